"""Read quantised tensors: torch's own, and those of libraries such as torchao, which wrap others.

A wrapper has the dtype that it stands for, and no memory of its own: most operations of torch are
not defined for it. It can give its numbers, and the tensors that it holds.

- `is_quantised(tensor)`: True for a quantised tensor of any kind
- `is_wrapper(tensor)`: True for a quantised tensor of a library
- `dequantised(tensor)`: the numbers that a tensor stands for
- `held_in(tensor)`: the tensors that a wrapper holds
- `copy_of(tensor)`: a copy of a wrapper, bit for bit
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

__all__ = ["copy_of", "dequantised", "held_in", "is_quantised", "is_wrapper"]


def is_wrapper(tensor: Tensor) -> bool:
    """Return True for a library's kind of tensor that holds others and can be dequantised."""
    kind = type(tensor)
    if kind is Tensor or kind.dequantize is Tensor.dequantize:
        return False
    return hasattr(kind, "__tensor_flatten__")


def is_quantised(tensor: Tensor) -> bool:
    """Return True for a tensor that holds its numbers in another form."""
    return tensor.is_quantized or is_wrapper(tensor)


def dequantised(tensor: Tensor) -> Tensor:
    """Return the numbers that a quantised tensor stands for; any other tensor as it is.

    >>> import torch
    >>> dequantised(torch.ones(2))
    tensor([1., 1.])
    """
    if not is_quantised(tensor):
        return tensor
    # The method `dequantize` of torchao's NF4 is for a part of the tensor.
    whole = getattr(tensor, "get_original_weight", tensor.dequantize)
    return cast(Tensor, whole())


def held_in(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a wrapper holds; a list of itself for any other tensor."""
    if not is_wrapper(tensor):
        return [tensor]
    names = cast("list[str]", cast(Any, tensor).__tensor_flatten__()[0])
    return [inner for name in names for inner in held_in(getattr(tensor, name))]


def copy_of(tensor: Tensor) -> Tensor:
    """Return a wrapper of copies of what it holds: cloning torchao's NF4 would quantise again."""
    kind = cast(Any, type(tensor))
    names, context = kind.__tensor_flatten__(tensor)
    copies: dict[str, Tensor] = {}
    for name in names:
        held = getattr(tensor, name)
        copies[name] = copy_of(held) if is_wrapper(held) else held.clone()
    return kind.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
