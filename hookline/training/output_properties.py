"""Properties of an output that follow from its module and graph, before it is measured.

- `unit_of(module, tensor)`: the dimension of the units
- `ends_of(module)`: the values at which an activation function saturates
- `is_fixed(tensor, module)`: True if it may be constant by design
- `has_zeros(tensor, module)`: True if units of it may be zero by design
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.gradients import is_usable
from hookline.torch_private import padding_of, parameters_of
from hookline.training.tensor_moments import Flat

__all__ = ["ends_of", "has_zeros", "is_fixed", "unit_of"]

_FLAT: dict[str, Flat] = {
    "Tanh": (-0.97, 0.97), "Softsign": (-0.97, 0.97), "Sigmoid": (0.03, 0.97),
    "Hardsigmoid": (0.0, 1.0),
}  # fmt: skip
_CHANNELS = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "Pool", "Dropout1d", "Dropout2d")

_MARK = "hookline units"  # in the metadata of a node whose result has channels before times
_MOST = 64  # nodes that are gone through to find one
# Operations that leave each element where it is, by the names of their nodes.
_ELEMENTWISE = frozenset({
    "Abs", "Add", "Celu", "Clamp", "ClampMax", "ClampMin", "Clone", "Div", "Elu", "Erf", "Exp",
    "FusedDropout", "Gelu", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu",
    "Log", "LogSigmoid", "Mish", "Mul", "NativeDropout", "Neg", "Pow", "PreluKernel", "Relu",
    "RreluWithNoise", "Rsub", "Sigmoid", "Silu", "Softplus", "Softshrink", "Sqrt", "Sub",
    "Tanh", "Threshold", "ToCopy", "Where",
})  # fmt: skip


def unit_of(module: nn.Module, tensor: Tensor) -> int:
    """Return the dimension of the units in an output, by the layer or by the graph; never by
    sizes.
    """
    name = type(module).__name__
    if tensor.ndim >= 4:
        return 1
    node: Any = tensor.grad_fn if tensor.ndim == 3 and is_usable(tensor) else None
    if tensor.ndim == 3 and name.startswith(_CHANNELS):
        if node is not None:
            node.metadata[_MARK] = True
        return 1
    # An activation behind a convolution over time: its channels, not its times.
    plain = isinstance(module, nn.PReLU) or not parameters_of(module)
    return 1 if plain and node is not None and _keeps_channels(node) else -1


def _keeps_channels(node: Any) -> bool:
    """Return True if a node's result comes from elementwise operations on a value with channels."""
    nodes = [node]
    for _ in range(_MOST):
        node = nodes.pop(0)
        name = node.name()
        if name.startswith("Convolution") or node.metadata.get(_MARK):
            return True
        if name.rstrip("0123456789").removesuffix("Backward") in _ELEMENTWISE:
            nodes += [inner for inner, _ in node.next_functions if inner is not None]
        if not nodes:
            break
    return False


def is_fixed(tensor: Tensor, module: nn.Module) -> bool:
    """Return True if an output may be the same for every input by design."""
    if not tensor.requires_grad:
        return torch.is_grad_enabled()
    return bool(parameters_of(module)) and is_usable(tensor) and _is_learned(tensor)


def has_zeros(tensor: Tensor, module: nn.Module) -> bool:
    """Return True if units of an output may be zero by design, and are not dead."""
    node: Any = tensor.grad_fn if is_usable(tensor) else None
    if node is None:
        return False
    made = node.name()
    if made.startswith("Softmax"):
        return True  # of what is masked, as keys that pad, it gives zeros
    if next(module.parameters(), None) is not None:
        return False
    if made.startswith("ConstantPad"):  # as by a shortcut of a ResNet: channels, and not edges
        return tensor.ndim < 4 or any(padding_of(node)[2 * tensor.ndim - 4 :][:2])
    beside = node.next_functions if made.startswith("Cat") else ()
    return any(one is None or one.name().startswith("Mul") for one, _ in beside)


def _is_learned(tensor: Tensor) -> bool:
    """Return True if a value is made of a few parameters only, like a class token."""
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    nodes: list[Any] = [tensor.grad_fn]
    for _ in range(8):
        node = nodes.pop()
        inner = getattr(node, "next_functions", ())  # of a tensor without a gradient: None
        if not inner and not isinstance(getattr(node, "variable", None), nn.Parameter):
            return False
        nodes += [one for one, _ in inner]
        if not nodes:
            return True
    return False


def ends_of(module: nn.Module) -> Flat | None:
    """Return the values at which an activation function saturates; None for other modules."""
    if type(module) is nn.Hardtanh:
        return module.min_val, module.max_val
    return _FLAT.get(type(module).__name__)
