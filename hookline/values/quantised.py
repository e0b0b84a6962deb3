"""Quantised tensors: torch's own, and those of libraries such as torchao, which wrap others.

A wrapper has the dtype that it stands for, and no memory of its own: most operations of torch are
not defined for it. It can give its numbers, and the tensors that it holds.

- `dequantised(tensor)`: the numbers that it stands for
- `is_quantised(tensor)`, `is_wrapper(tensor)`: of any kind, or of a library's kind
- `held_in(tensor)`: the tensors that a wrapper holds
- `copy_of(tensor)`: a copy of a wrapper, bit for bit
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

__all__ = ["copy_of", "dequantised", "held_in", "is_quantised", "is_wrapper"]


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a library's own kind of tensor, which holds others and can be dequantised."""
    kind = type(tensor)
    if kind is Tensor or kind.dequantize is Tensor.dequantize:
        return False
    return hasattr(kind, "__tensor_flatten__")


def is_quantised(tensor: Tensor) -> bool:
    """Whether it holds its numbers in another form."""
    return tensor.is_quantized or is_wrapper(tensor)


def dequantised(tensor: Tensor) -> Tensor:
    """The numbers that a quantised tensor stands for; any other tensor as it is.

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
    """The tensors that a wrapper holds; of any other tensor itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names = cast("list[str]", cast(Any, tensor).__tensor_flatten__()[0])
    return [inner for name in names for inner in held_in(getattr(tensor, name))]


def copy_of(tensor: Tensor) -> Tensor:
    """A wrapper of copies of what it holds: a clone of torchao's NF4 is quantised anew."""
    kind = cast(Any, type(tensor))
    names, context = kind.__tensor_flatten__(tensor)
    held = {name: getattr(tensor, name) for name in names}
    copies = {n: copy_of(one) if is_wrapper(one) else one.clone() for n, one in held.items()}
    return kind.__tensor_unflatten__(copies, context, tensor.size(), tensor.stride())
