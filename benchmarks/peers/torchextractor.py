"""torchextractor, as in its README: an Extractor around the model."""

from __future__ import annotations

import torchextractor as tx

PACKAGE = "torchextractor"
TITLE = "torchextractor"
SOURCE = "README of 0.3.0"
NOTES = {
    "setup": "Extractor; it writes an attribute on every module",
    "calls": "with a capture_fn of one's own, which its documentation offers",
}
ABSENT = {
    "inputs": "through a capture_fn of one's own",
    "edit": "none",
    "gradient": "none",
    "stop": "none",
    "operation": "modules only",
    "summary": "none",
    "to_disk": "none",
    "edit_parameter": "none",
}


def capture(model, names):
    extractor = tx.Extractor(model, names)

    def run(*args, **kwargs):
        _, features = extractor(*args, **kwargs)
        return {name: features[name] for name in names}

    return run


def keep_all(module, inputs, output, module_name, feature_maps):
    feature_maps.setdefault(module_name, []).append(output)


def calls(model, names, work=None):
    chosen = set(names)
    extractor = tx.Extractor(
        model, module_filter_fn=lambda module, name: name in chosen, capture_fn=keep_all
    )

    def run(*args, **kwargs):
        extractor.clear_placeholder()
        (work or model)(*args, **kwargs)
        features = extractor.collect()
        return {name: list(features[name]) for name in names}

    return run


def generate(model, names, steps):
    run = calls(model, names, model.generate)
    return lambda ids: run(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
