"""Record shapes, dtypes and bytes of the values in a model while it runs, without keeping tensors.

- `note(value)`: a quick note of a value, taken between the calls of a model
- `Footprint`: shapes, bytes and dtype of a value; `footprint_of(noted)` makes it from a note
- `is_plain(value)`: True if a value is one ordinary tensor, as most are
- `size_of(tensor)`: its bytes; `show_shape(shape)`: a shape as text
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.costs.summary import shapes_of
from hookline.values.nested import leaves
from hookline.values.tables import bytes_of

__all__ = ["Footprint", "footprint_of", "is_plain", "note", "show_shape", "size_of"]

_PLAIN = (Tensor, nn.Parameter)


class Footprint(NamedTuple):
    """The shapes in a value, the bytes of its distinct tensors, the dtype of its first one."""

    shapes: Any
    bytes: int
    dtype: str


# The shape and dtype of one ordinary tensor are kept as they are: text is made of them later.
Noted = Footprint | tuple[torch.Size, torch.dtype]


def is_plain(value: Any) -> bool:
    """Return True for one ordinary tensor."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, quickly for a plain one."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.nbytes if plain else bytes_of(tensor)


def note(value: Any) -> Noted:
    """Return a note of a value, for `footprint_of`.

    >>> footprint_of(note((torch.zeros(2, 3), torch.zeros(4))))
    Footprint(shapes=['(2, 3)', '(4,)'], bytes=40, dtype='float32')
    """
    if is_plain(value):
        return value.shape, value.dtype
    tensors = [tensor for _, tensor in leaves(value)]
    distinct = {id(tensor): tensor for tensor in tensors}
    size = sum([size_of(tensor) for tensor in distinct.values()])
    return Footprint(shapes_of(value), size, _name(tensors[0].dtype) if tensors else "")


def footprint_of(noted: Noted) -> Footprint:
    """Make a Footprint from a note."""
    return noted if isinstance(noted, Footprint) else _footprint_of_tensor(*noted)


@lru_cache(maxsize=4096)  # most values in a model are alike
def _footprint_of_tensor(shape: torch.Size, dtype: torch.dtype) -> Footprint:
    return Footprint(show_shape(shape), prod(shape) * dtype.itemsize, _name(dtype))


@lru_cache(maxsize=4096)
def show_shape(shape: torch.Size) -> str:
    """Return a shape as text."""
    return str(tuple(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
