"""torch-intermediate-layer-getter, as in its README."""

from __future__ import annotations

from torch_intermediate_layer_getter import IntermediateLayerGetter

PACKAGE = "torch_intermediate_layer_getter"
TITLE = "layer getter"
SOURCE = "README of 0.1.post1"
NOTES = {}
ABSENT = {
    "inputs": "outputs only",
    "edit": "none",
    "gradient": "none",
    "stop": "none",
    "operation": "modules only",
    "summary": "none",
    "generate": "it calls the model, not generate",
    "to_disk": "none",
    "edit_parameter": "none",
}


def capture(model, names):
    getter = IntermediateLayerGetter(model, {name: name for name in names})

    def run(*args, **kwargs):
        values, _ = getter(*args, **kwargs)
        return {name: values[name] for name in names}

    return run


def calls(model, names):
    run = capture(model, names)

    def listed(*args, **kwargs):
        found = run(*args, **kwargs)
        return {name: one if isinstance(one, list) else [one] for name, one in found.items()}

    return listed
