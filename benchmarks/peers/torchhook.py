"""TorchHook, as in its README: a HookManager, `add`, `get`, `clear_hooks`."""

from __future__ import annotations

from torchhook import HookManager

PACKAGE = "TorchHook"
TITLE = "TorchHook"
SOURCE = "README of 0.2.7"
NOTES = {"capture": "values are detached, on the CPU", "setup": "adding the hooks"}
ABSENT = {
    "inputs": "outputs only",
    "edit": "a custom hook can, but its result is kept instead of passed on",
    "gradient": "outputs only",
    "stop": "none",
    "operation": "modules only",
    "summary": "of the hooks only; its model_summary runs nothing and shows no shapes",
    "to_disk": "none",
    "edit_parameter": "none",
}


def manage(model, names, max_size):
    manager = HookManager(model, max_size=max_size)
    for name in names:
        manager.add(layer_name=name)
    return manager


def capture(model, names):
    manager = manage(model, names, 1)

    def run(*args, **kwargs):
        model(*args, **kwargs)
        return {name: manager.get(name)[0] for name in names}

    run.close = manager.clear_hooks  # "Important!"
    return run


def calls(model, names, work=None):
    manager = manage(model, names, -1)

    def run(*args, **kwargs):
        manager.clear_features()
        (work or model)(*args, **kwargs)
        return {name: list(manager.get(name)) for name in names}

    run.close = manager.clear_hooks
    return run


def generate(model, names, steps):
    run = calls(model, names, model.generate)
    return lambda ids: run(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
