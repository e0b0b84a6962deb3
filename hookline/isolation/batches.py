"""Batches for a model: make one from shapes, copy one, check what was given as data.

- `make_batch(model, batch, dtype)`: the batch, with a tensor for every shape in it
- `copy_batch(batch)`: a copy of a batch in memory of its own
- `move_batch(batch, device)`: a batch with its tensors on another device
- `is_shape(value)`: return True if a value is a shape
- `is_series(data)`: return True for an iterable of batches; `not_series_error(data, error)` if not
- `check_mask_name(mask, error)`: raise if a mask has a name that marks padding in torch
- `needs_integers(error)`: return True if a run failed because it needs integers, such as tokens
- `shapes_error(shapes, dtype, error)`: the error for shapes where that cannot be mended
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.engine.offloading import offloads
from hookline.errors import BatchError, HooklineError
from hookline.places.tree import tensors_of
from hookline.values.nested import map_leaves
from hookline.values.snapshots import duplicate

__all__ = [
    "check_mask_name",
    "copy_batch",
    "is_series",
    "is_shape",
    "make_batch",
    "move_batch",
    "needs_integers",
    "not_series_error",
    "shapes_error",
]

Shape = tuple[int, ...]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module)


def is_series(data: Any) -> bool:
    """Return True for an iterable of batches, False for a single batch.

    >>> is_series([torch.zeros(2)]), is_series(torch.zeros(2)), is_series(5)
    (True, False, False)
    """
    return isinstance(data, Iterable) and not isinstance(data, (Tensor, str, Mapping))


def not_series_error(data: Any, error: type[HooklineError]) -> HooklineError:
    """Return the error for data that is not an iterable of batches."""
    return error(
        f"A {type(data).__name__} was given as data.",
        "It is no series of batches.",
        "Give a DataLoader, a list or a generator of batches; x.split(64) makes some.",
    )


def check_mask_name(mask: Any, error: type[HooklineError]) -> None:
    """Raise if a mask is named like those of torch's layers, which are True for padding."""
    if isinstance(mask, str) and mask.endswith("key_padding_mask"):
        raise error(
            f"The mask was to be {mask!r}.",
            "In torch's layers that is true for padding; a mask here is nonzero for tokens.",
            f"Give the opposite: mask=lambda batch: ~batch[{mask!r}], or a tensor.",
        )


def is_shape(value: Any) -> bool:
    """Return True if a value is a shape: a tuple of integers.

    >>> is_shape((1, 3, 224, 224)), is_shape([1, 3]), is_shape((1.0, 3))
    (True, False, False)
    """
    items = cast("tuple[Any, ...]", value if isinstance(value, tuple) else ())
    return bool(items) and all(type(item) is int or isinstance(item, np.integer) for item in items)


def make_batch(
    model: nn.Module, batch: Any, dtype: torch.dtype | None = None
) -> tuple[Any, list[Shape]]:
    """Return the batch with a tensor for every shape, on the model's device, and the shapes.

    >>> batch, shapes = make_batch(nn.Linear(3, 2), {"input": (5, 3)})
    >>> batch["input"].shape, shapes
    (torch.Size([5, 3]), [(5, 3)])
    """
    parameter = _first(model)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "meta" and offloads(model):  # accelerate loads the data for each call
        device = torch.device("cpu")
    if dtype is None:
        dtype = torch.float32 if parameter is None else parameter.dtype
    shapes: list[Shape] = []

    def filled(value: Any) -> Any:
        if not is_shape(value):
            return value
        shapes.append(tuple(map(int, value)))
        return _tensor(shapes[-1], dtype, device)

    made: Any = batch
    if is_shape(batch):
        made = filled(batch)
    elif type(batch) in (tuple, list):
        made = [filled(value) for value in batch]
    elif isinstance(batch, Mapping) and any(map(is_shape, made.values())):
        made = {name: filled(value) for name, value in made.items()}
    if device.type == "meta":
        made = move_batch(made, device)
    return made, shapes


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on another device."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return map_leaves(moved, batch)


def copy_batch(batch: Any) -> Any:
    """Copy a batch, as models may write into it; what cannot be copied stays as it is.

    >>> x = torch.zeros(2)
    >>> _ = copy_batch({"x": x})["x"].fill_(7)
    >>> x
    tensor([0., 0.])
    """
    return map_leaves(_copy, batch)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return duplicate(leaf).requires_grad_(leaf.requires_grad)
    if not isinstance(leaf, _PLAIN) and not callable(leaf):
        with suppress(Exception):  # a cache of keys and values can be copied, a stream cannot
            return copy.deepcopy(leaf)
    return leaf


def _first(model: nn.Module) -> Tensor | None:
    """Return the first floating-point parameter or buffer."""
    for module in model.modules():  # not all of them: most often the first that has some will do
        for _, tensor in tensors_of(module):
            if tensor.is_floating_point():
                return tensor
    return None


def _tensor(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    if any(size < 0 for size in shape):
        raise BatchError(
            f"A tensor of shape {shape} was to be made.",
            "A size is negative.",
            "Give the whole shape, with the size of the batch.",
        )
    # A generator of its own: the user's random numbers are left alone.
    if dtype.is_floating_point and device.type != "meta":
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def needs_integers(error: BaseException) -> bool:
    """Return True for the error of an embedding that was not given integers."""
    text = str(error)
    return "scalar types: Long, Int" in text or "must be IntTensor or LongTensor" in text


def shapes_error(
    shapes: list[Shape], dtype: torch.dtype | None, error: BaseException
) -> BatchError:
    """Return the error for a model that does not take the tensors made for shapes."""
    return BatchError(
        f"A batch was made of {', '.join(map(str, shapes))}{f' in {dtype}' if dtype else ''}.",
        f"The model takes whole numbers somewhere: {str(error).splitlines()[0]:.120}",
        "Give dtype=torch.long if all of them are such, or tensors instead of shapes.",
    )
