"""tdhook, as in its documentation: ActivationCaching, SteeringVectors, HookSession."""

from __future__ import annotations

import re

from tdhook.latent.activation_caching import ActivationCaching
from tdhook.latent.steering_vectors import SteeringVectors
from tdhook.session import HookSession
from tdhook.targets import Target
from tensordict import TensorDict

PACKAGE = "tdhook"
TITLE = "tdhook"
SOURCE = "README; docstrings of ActivationCaching, SteeringVectors and HookSession of 0.3.0"
NOTES = {
    "capture": "ActivationCaching with `blocks\\.\\d+$` and `.*`",
    "calls": "HookSession, which keeps clones; a Target is told how wide a layer is, and can "
    "name one part of a nested output",
    "stop": "HookSession.stop",
}
ABSENT = {
    "operation": "modules only",
    "summary": "none",
    "to_disk": "a memory-mapped cache of fixed keys holds one batch",
}
MANY = 50


def whole(model, name, kind="activation", **options):
    """A target that is all of a layer: its features are named one by one."""
    return Target(name, kind, -1, tuple(range(model.width)), **options)


def capture(model, names):
    forms = {re.sub(r"\d+", r"\\d+", re.escape(name)) for name in names}
    caching = ActivationCaching(".*" if len(names) > MANY else f"(?:{'|'.join(forms)})$")

    def run(x):
        with caching.prepare(model) as hooked:
            result = hooked(TensorDict({"input": x}, batch_size=[len(x)]))
        cache = result["cache"]
        return {name: cache[name] for name in names}

    return run


def calls(model, names, work=None):
    def run(*args, **kwargs):
        with HookSession(model) as session:
            found = {name: session.capture(whole(model, name)) for name in names}
            (work or model)(*args, **kwargs)
        return {name: one.values for name, one in found.items()}

    return run


def inputs(model, name, keyword=None):
    path, direction = ((0,), "fwd_pre") if keyword is None else ((1, keyword), "fwd_pre_kwargs")
    target = whole(model, name, output_path=path)

    def run(*args, **kwargs):
        with HookSession(model) as session:
            found = session.capture(target, direction=direction)
            model(*args, **kwargs)
        return found.values[0]

    return run


def attached(model, name):
    def run(*args, **kwargs):
        with HookSession(model) as session:
            found = session.capture(whole(model, name), detach=False)
            model(*args, **kwargs)
        return {name: found.values[0]}

    return run


def edit(model, name, change):
    steering = SteeringVectors([name], lambda module_key, output: change(output))

    def run(x):
        with steering.prepare(model) as hooked:
            return hooked(TensorDict({"input": x}, batch_size=[len(x)]))["output"]

    return run


def gradient(model, name):
    target = whole(model, name, "gradient", output_path=(0,))

    def run(*args, **kwargs):
        with HookSession(model) as session:
            found = session.capture(target)
            model(*args, **kwargs).sum().backward()
        return found.values[0]

    return run


def stop(model, name):
    def run(*args, **kwargs):
        with HookSession(model) as session:
            result = session.stop(name)
            model(*args, **kwargs)
        return result.output

    return run


def generate(model, names, steps):
    run = calls(model, names, model.generate)
    return lambda ids: run(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)


def edit_parameter(model, name, tensor):
    module, _, parameter = name.rpartition(".")
    rows = tuple(range(len(tensor)))
    target = Target(module, "parameter", 0, rows, parameter=parameter)

    def run(*args, **kwargs):
        with HookSession(model) as session:
            session.replace(target, tensor)
            return model(*args, **kwargs)

    return run
