"""captum, as in its API pages: LayerActivation, LayerGradientXActivation, AV."""

from __future__ import annotations

from pathlib import Path

import torch
from captum._utils.av import AV
from captum._utils.gradient import compute_layer_gradients_and_eval
from captum.attr import LayerActivation

PACKAGE = "captum"
TITLE = "captum"
SOURCE = (
    "captum.ai; docstrings of LayerActivation, AV and compute_layer_gradients_and_eval of 0.9.0"
)
NOTES = {
    "gradient": "compute_layer_gradients_and_eval, on which its layer methods stand; its backward "
    "ends at the layer, which is less work than the bare model's whole one",
    "to_disk": "AV.generate_dataset_activations, one torch.save a layer and batch",
}
ABSENT = {
    "calls": "LayerActivation gives one value a layer",
    "edit": "attribution methods only",
    "stop": "none in public",
    "operation": "modules only",
    "summary": "none",
    "generate": "LayerActivation calls a forward, not generate",
    "edit_parameter": "none",
}


def capture(model, names):
    layers = LayerActivation(model, [model.get_submodule(name) for name in names])

    def run(*args, **kwargs):
        if kwargs:
            raise NotImplementedError("attribute() takes positional inputs only")
        return dict(zip(names, layers.attribute(args), strict=True))

    return run


def inputs(model, name, keyword=None):
    layer = LayerActivation(model, model.get_submodule(name))

    def run(*args):
        return layer.attribute(args, attribute_to_layer_input=True)

    return run


def gradient(model, name):
    layer = model.get_submodule(name)

    def scalar(*args):
        return model(*args).sum().reshape(1)

    def run(*args):
        gradients, _ = compute_layer_gradients_and_eval(scalar, layer, args)
        return gradients[0]

    return run


def to_disk(model, names):
    def run(batches, folder):
        AV.generate_dataset_activations(folder, model, "model", list(names), batches)

    def read(folder, name):
        files = sorted(
            Path(folder).glob(f"av/model/default/{name}/*.pt"), key=lambda f: int(f.stem)
        )
        return torch.cat([torch.load(file) for file in files])

    run.read = read
    return run
