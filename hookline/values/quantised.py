"""Quantised tensors: torch's own, and those of libraries such as torchao, which wrap others.

A wrapper has the dtype that it stands for, and no memory of its own: most operations of torch are
not defined for it. It can give its numbers, and the tensors that it holds.

- `dequantised(tensor)`: the numbers that it stands for
- `is_quantised(tensor)`, `is_wrapper(tensor)`: of any kind, or of a library's kind
- `held_in(tensor)`: the tensors that a wrapper holds
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

__all__ = ["dequantised", "held_in", "is_quantised", "is_wrapper"]


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a library's own kind of tensor, with a way of its own to dequantise it."""
    kind = type(tensor)
    return kind is not Tensor and kind.dequantize is not Tensor.dequantize


def is_quantised(tensor: Tensor) -> bool:
    """Whether it holds its numbers in another form."""
    return tensor.is_quantized or is_wrapper(tensor)


def dequantised(tensor: Tensor) -> Tensor:
    """The numbers that a quantised tensor stands for; any other tensor as it is.

    >>> import torch
    >>> dequantised(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))
    tensor([1., 1.])
    """
    return tensor.dequantize() if is_quantised(tensor) else tensor


def held_in(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper holds; of any other tensor itself."""
    names = getattr(tensor, "__tensor_flatten__", None) if is_wrapper(tensor) else None
    if names is None:
        return [tensor]
    held = [getattr(tensor, name) for name in cast("tuple[list[str], Any]", names())[0]]
    return [inner for outer in held for inner in held_in(outer)]
