"""Collect or replace the inputs and outputs of layers.

- `get_layer_inputs`, `get_layer_outputs`: collect them in a dict, by name
- `replace_layer_inputs`, `replace_layer_outputs`: replace them
- `replace_layer_output`: another name of the latter
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, TypeVar, cast

from torch import Tensor

import hookline as hl
from hookline.compat.torch_hook_utils.named_layers import Layers, NamedLayers, NoValue, listed
from hookline.compat.torch_hook_utils.types import Module
from hookline.values.nested import map_leaves

__all__ = [
    "get_layer_inputs",
    "get_layer_outputs",
    "replace_layer_inputs",
    "replace_layer_output",
    "replace_layer_outputs",
]

T = TypeVar("T")


@contextmanager
def get_layer_inputs(
    named_layers: Layers[Module[Concatenate[T, ...], Any]],
) -> Generator[dict[str, T]]:
    """Collect what layers are called with, while a `with` block runs.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ReLU(), nn.Softplus())
    >>> with get_layer_inputs(model.named_children()) as inputs:
    ...     _ = model(torch.tensor([-1.0, 1.0]))
    >>> inputs
    {'0': tensor([-1.,  1.]), '1': tensor([0., 1.])}

    Args:
        named_layers: (name, layer) pairs, such as `named_modules_of_type` gives, or a mapping.

    Gives a dict with the first argument of each layer that ran, however it was passed; the last,
    if it ran several times. Tensors that require grad are the very ones, all others are snapshots;
    see `LayerValues`. All arguments: `hookline.capture(model, "layer:inputs")`.
    """
    with NamedLayers(named_layers).capture(":input") as inputs:
        yield inputs


@contextmanager
def get_layer_outputs(named_layers: Layers[Module[..., T]]) -> Generator[dict[str, T]]:
    """Collect what layers return, while a `with` block runs.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten(0))
    >>> with get_layer_outputs({"relu": model[0]}) as outputs:
    ...     _ = model(torch.tensor([[-1.0, 1.0]]))
    >>> outputs
    {'relu': tensor([[0., 1.]])}

    Args:
        named_layers: (name, layer) pairs, such as `named_modules_of_type` gives, or a mapping.

    Gives a dict with the output of each layer that ran; the last, if it ran several times. Tensors
    that require grad are the very ones, all others are snapshots; see `LayerValues`.
    """
    with NamedLayers(named_layers).capture(":output") as outputs:
        yield outputs


def replace_layer_inputs(
    network_layers: Layers[Module[Concatenate[T, ...], Any]], inputs_to_use: Mapping[str, T]
) -> AbstractContextManager[None]:
    """Let layers be called with something else, while a `with` block runs.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten(0))
    >>> with replace_layer_inputs({"relu": model[0]}, {"relu": torch.tensor([[5.0, -5.0]])}):
    ...     model(torch.zeros(1, 2))
    tensor([5., 0.])

    Args:
        network_layers: (name, layer) pairs, or a mapping.
        inputs_to_use: by name, what stands in the place of the first argument of each layer. Other
            names than those of the layers do no harm.

    It may be of any type and shape, and may be given as a tuple of one. The layers get copies, so
    that none can change what was given; gradients flow into it.
    """
    return _replaced(network_layers, inputs_to_use, ":input")


def replace_layer_outputs(
    network_layers: Layers[Module[..., T]], layer_outputs: Mapping[str, T]
) -> AbstractContextManager[None]:
    """Let layers return something else, while a `with` block runs. They still run.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten(0))
    >>> with replace_layer_outputs({"relu": model[0]}, {"relu": torch.tensor([[5.0, -5.0]])}):
    ...     model(torch.zeros(1, 2))
    tensor([ 5., -5.])

    Args:
        network_layers: (name, layer) pairs, or a mapping.
        layer_outputs: by name, what each layer shall return. Other names than those of the layers
            do no harm.

    It may be of any type and shape. What follows gets copies, so that it cannot change what was
    given; gradients flow into it.
    """
    return _replaced(network_layers, layer_outputs, ":output")


replace_layer_output = replace_layer_outputs


@contextmanager
def _replaced(named_layers: Layers[Any], given: Mapping[str, Any], port: str) -> Generator[None]:
    layers = NamedLayers(named_layers)
    values = {name: given[name] for name in layers.layers if given.get(name) is not None}
    for name in layers.layers:
        if name not in values:
            raise NoValue(
                f"The {port[1:]} of the layer {name!r} was to be replaced.",
                f"There are values for {listed(values)}.",
                "Give a value for each layer, or fewer layers.",
            )

    def put(value: Any, call: hl.Call) -> Any:
        name = layers.names[call.module][-1]
        new = values[name]
        return map_leaves(_copied, _argument(new, value) if port == ":input" else new)

    with layers.hook(port, put):
        yield


def _argument(new: Any, old: Any) -> Any:
    """Return what a layer is called with in place of an argument: a tuple of one is its content."""
    if type(new) is tuple and type(old) is not tuple and len(cast("Any", new)) == 1:
        return cast("Any", new)[0]
    return cast("Any", new)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
