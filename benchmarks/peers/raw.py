"""Hooks written by hand, as in PyTorch's documentation."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PACKAGE = "torch"
TITLE = "raw hooks"
SOURCE = "docs.pytorch.org, torch.nn.Module.register_forward_hook"
NOTES = {"to_disk": "one safetensors file a batch"}
ABSENT = {"summary": "nothing ready", "edit_parameter": "nothing ready"}


class Stop(Exception):
    pass


def capture(model, names):
    modules = [(name, model.get_submodule(name)) for name in names]

    def run(*args, **kwargs):
        kept = {}

        def keep(name):
            def hook(module, inputs, output):
                kept[name] = output

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in modules]
        try:
            model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return {name: kept[name] for name in names}

    return run


def calls(model, names, work=None):
    modules = [(name, model.get_submodule(name)) for name in names]

    def run(*args, **kwargs):
        kept = {name: [] for name in names}

        def keep(name):
            def hook(module, inputs, output):
                kept[name].append(output)

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in modules]
        try:
            (work or model)(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return kept

    return run


def inputs(model, name, keyword=None):
    def run(*args, **kwargs):
        kept = []

        def hook(module, args, kwargs):
            kept.append(args[0] if args else next(iter(kwargs.values())))

        handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        try:
            model(*args, **kwargs)
        finally:
            handle.remove()
        return kept[0]

    return run


def edit(model, name, change):
    def run(*args, **kwargs):
        hook = lambda module, inputs, output: change(output)  # noqa: E731
        handle = model.get_submodule(name).register_forward_hook(hook)
        try:
            return model(*args, **kwargs)
        finally:
            handle.remove()

    return run


def gradient(model, name):
    def run(*args, **kwargs):
        kept = []

        def hook(module, inputs, output):
            output.register_hook(kept.append)

        handle = model.get_submodule(name).register_forward_hook(hook)
        try:
            model(*args, **kwargs).sum().backward()
        finally:
            handle.remove()
        return kept[0]

    return run


def stop(model, name):
    def run(*args, **kwargs):
        kept = []

        def hook(module, inputs, output):
            kept.append(output)
            raise Stop

        handle = model.get_submodule(name).register_forward_hook(hook)
        try:
            model(*args, **kwargs)
        except Stop:
            pass
        finally:
            handle.remove()
        return kept[0]

    return run


def generate(model, names, steps):
    run = calls(model, names, model.generate)
    return lambda ids: run(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)


def to_disk(model, names):
    capturing = capture(model, names)

    def run(batches, folder):
        Path(folder).mkdir()
        for number, batch in enumerate(batches):
            save_file(capturing(batch), f"{folder}/{number:05}.safetensors")

    def read(folder, name):
        files = sorted(Path(folder).glob("*.safetensors"))
        return torch.cat([load_file(file)[name] for file in files])

    run.read = read
    return run
