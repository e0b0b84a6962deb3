"""TorchHook, as in its README: a HookManager, `add`, `get`, `clear_hooks`."""

from __future__ import annotations

from torchhook import HookManager

PACKAGE = "TorchHook"
TITLE = "TorchHook"
SOURCE = "README of 0.2.7"
NOTES = {"capture": "values are detached copies on the CPU", "setup": "adding the hooks"}
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


class Manager:
    """The hooks live as long as this does, as with a HookManager."""

    def __init__(self, model, names, max_size):
        self.model, self.names = model, names
        self.manager = HookManager(model, max_size=max_size)
        for name in names:
            self.manager.add(layer_name=name)

    def one(self, *args, **kwargs):
        self.model(*args, **kwargs)
        return {name: self.manager.get(name)[0] for name in self.names}

    def each(self, work, *args, **kwargs):
        self.manager.clear_features()
        work(*args, **kwargs)
        return {name: list(self.manager.get(name)) for name in self.names}


def capture(model, names):
    return Manager(model, names, 1).one


def calls(model, names):
    manager = Manager(model, names, -1)
    return lambda *args, **kwargs: manager.each(model, *args, **kwargs)


def generate(model, names, steps):
    manager = Manager(model, names, -1)
    settings = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    return lambda ids: manager.each(model.generate, ids, **settings)
