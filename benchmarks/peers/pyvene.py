"""pyvene, as in its documentation: an IntervenableModel over components named by their paths."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pyvene as pv

PACKAGE = "pyvene"
TITLE = "pyvene"
SOURCE = "stanfordnlp.github.io/pyvene; docstring of IntervenableModel.forward of 0.1.8"
NOTES = {
    "capture": "CollectIntervention",
    "setup": "IntervenableModel, which also turns off requires_grad of the model's parameters; "
    "a model without a `config` is given an empty one",
    "generate": "components by path: its own name `block_output` expects tuples, which the GPT-2 "
    "of transformers 5 no longer returns",
}
ABSENT = {
    "gradient": "none at layers",
    "stop": "none",
    "operation": "none",
    "summary": "none",
    "to_disk": "none for values; it saves interventions",
    "edit_parameter": "none",
}


def component(name, port="output"):
    return re.sub(r"\.(\d+)", r"[\1]", name) + f".{port}"


def wrap(model, places):
    if not hasattr(model, "config"):
        model.config = SimpleNamespace()
    return pv.IntervenableModel(places, model=model)


def asked(model, args, kwargs):
    """Its input is a dict of keyword arguments."""
    names = list(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def collect(model, names, port="output"):
    places = [
        {"component": component(name, port), "intervention": pv.CollectIntervention()}
        for name in names
    ]
    return wrap(model, places)


def capture(model, names):
    wrapped = collect(model, names)

    def run(*args, **kwargs):
        (_, values), _ = wrapped(asked(model, args, kwargs))
        return dict(zip(names, values, strict=True))

    return run


def calls(model, names):
    wrapped = collect(model, names)

    def run(*args, **kwargs):
        (_, values), _ = wrapped(asked(model, args, kwargs))
        each = len(values) // len(names)
        return {name: values[i * each : (i + 1) * each] for i, name in enumerate(names)}

    return run


def inputs(model, name, keyword=None):
    wrapped = collect(model, [name], "input")

    def run(*args, **kwargs):
        (_, values), _ = wrapped(asked(model, args, kwargs))
        return values[0]

    return run


def edit(model, name, change):
    def intervention(base, source):
        return change(base)

    wrapped = wrap(model, {"component": component(name), "intervention": intervention})

    def run(*args, **kwargs):
        _, output = wrapped(asked(model, args, kwargs))
        return output

    return run


def generate(model, names, steps):
    wrapped = collect(model, names)

    def run(ids):
        (_, values), _ = wrapped.generate(
            {"input_ids": ids}, intervene_on_prompt=True,
            max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
        )  # fmt: skip
        return {name: values[i * steps : (i + 1) * steps] for i, name in enumerate(names)}

    return run
