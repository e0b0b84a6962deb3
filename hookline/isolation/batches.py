"""Batches: run a model on one, and make one from shapes.

- `make_batch(model, batch, dtype)`: the batch, with a tensor for every shape in it
- `call(model, inputs)`: run a model on a batch
- `is_shape(value)`: whether a value is taken for a shape
- `is_series(data)`: whether something is batches, and not one; `no_series(data, error)` if not
- `refuse_padding(mask, error)`: the error for a mask by a name that marks padding in torch
- `needs_whole_numbers(error)`: whether a run failed for want of whole numbers, such as tokens
- `refused_shapes(shapes, dtype, error)`: the error if that cannot be mended
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hookline.core.offloading import offloads
from hookline.errors import BatchError, HooklineError
from hookline.places.tree import tensors_of
from hookline.values.nested import map_leaves

__all__ = [
    "call", "is_series", "is_shape", "make_batch", "needs_whole_numbers", "no_series",
    "refuse_padding", "refused_shapes",
]  # fmt: skip

Shape = tuple[int, ...]


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch: a dict gives arguments by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    several = isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence)
    return model(*inputs) if several else model(inputs)


def is_series(data: Any) -> bool:
    """Whether something is batches, and not one of them.

    >>> is_series([torch.zeros(2)]), is_series(torch.zeros(2)), is_series(5)
    (True, False, False)
    """
    return isinstance(data, Iterable) and not isinstance(data, (Tensor, str, Mapping))


def no_series(data: Any, error: type[HooklineError]) -> HooklineError:
    """The error for data that is no series of batches."""
    return error(
        f"A {type(data).__name__} was given as data.",
        "It is no series of batches.",
        "Give a DataLoader, a list or a generator of batches; x.split(64) makes some.",
    )


def refuse_padding(mask: Any, error: type[HooklineError]) -> None:
    """An error if a mask is named like those of torch's own layers, which mark what is left out."""
    if isinstance(mask, str) and mask.endswith("key_padding_mask"):
        raise error(
            f"The mask was to be {mask!r}.",
            "In torch's layers that is true for padding; a mask here is nonzero for tokens.",
            f"Give the opposite: mask=lambda batch: ~batch[{mask!r}], or a tensor.",
        )


def is_shape(value: Any) -> bool:
    """Whether a value is taken for a shape: it is a tuple of whole numbers.

    >>> is_shape((1, 3, 224, 224)), is_shape([1, 3]), is_shape((1.0, 3))
    (True, False, False)
    """
    items = cast("tuple[Any, ...]", value if isinstance(value, tuple) else ())
    return bool(items) and all(type(item) is int or isinstance(item, np.integer) for item in items)


def make_batch(
    model: nn.Module, batch: Any, dtype: torch.dtype | None = None
) -> tuple[Any, list[Shape]]:
    """The batch with a tensor for every shape, on the model's device; and the shapes.

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
        made = map_leaves(_to_meta, made)
    return made, shapes


def _first(model: nn.Module) -> Tensor | None:
    """The first floating-point parameter or buffer."""
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


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def needs_whole_numbers(error: BaseException) -> bool:
    """Whether a run failed for the reason that an embedding was given other than whole numbers."""
    text = str(error)
    return "scalar types: Long, Int" in text or "must be IntTensor or LongTensor" in text


def refused_shapes(
    shapes: list[Shape], dtype: torch.dtype | None, error: BaseException
) -> BatchError:
    """The error if a model cannot take what was made for shapes."""
    return BatchError(
        f"A batch was made of {', '.join(map(str, shapes))}{f' in {dtype}' if dtype else ''}.",
        f"The model takes whole numbers somewhere: {str(error).splitlines()[0]:.120}",
        "Give dtype=torch.long if all of them are such, or tensors instead of shapes.",
    )
