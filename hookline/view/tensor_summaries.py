"""Summarize a tensor for a page: its shape, statistics, a histogram and a small picture.

- `summarize_tensor(tensor, most)`: one tensor, with a picture of at most so many values
- `summarize_value(value, most)`: all tensors in a nested value, with their paths
- `TensorSummary`: the summary
- `spread(total, most)`: evenly spread positions

The picture holds values of the tensor itself, never averages: if there are too many, it takes every
n-th along a dimension, and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.values.nested import Path, leaves
from hookline.values.quantisation import dequantised
from hookline.values.sharding import local, placements

__all__ = [
    "BINS",
    "MOST",
    "TensorSummary",
    "numbers_of",
    "spread",
    "summarize_tensor",
    "summarize_value",
]

BINS = 64
MOST = 16_384  # values in a picture
_COUNTED = 2_000_000  # values that statistics are taken of; of more, one in n


@dataclass(eq=False, slots=True)
class TensorSummary:
    """The summary of a tensor. `meta` is plain JSON, `counts` and `picture` are arrays."""

    meta: dict[str, Any]
    counts: NDArray[np.uint32] | None = None
    picture: NDArray[np.float16 | np.float32] | None = None


def summarize_value(value: Any, most: int = MOST) -> list[tuple[Path, TensorSummary]]:
    """Return the summaries of all tensors in a value, with their paths in it."""
    return [(path, summarize_tensor(tensor, most)) for path, tensor in leaves(value)]


def summarize_tensor(tensor: Tensor, most: int = MOST, *, weight: bool = False) -> TensorSummary:
    """Return the summary of a tensor.

    >>> found = summarize_tensor(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    >>> found.meta["shape"], found.meta["statistics"]["mean"], found.meta["kind"]
    ([2, 2], 1.5, 'matrix')

    Args:
        tensor: Any tensor; it is neither kept nor changed.
        most: How many values the picture may have.
        weight: True for a parameter or buffer: its first dimension is no batch.
    """
    notes: list[str] = []
    if placements(tensor) is not None:
        notes.append("the part of it that this rank holds")
    meta: dict[str, Any] = {
        "shape": ["nested"] if tensor.is_nested else [*tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "notes": notes,
    }
    if tensor.is_meta:
        notes.append("a tensor without values")
        return TensorSummary(meta)
    values = numbers_of(tensor)
    if values is None:
        notes.append(f"no picture of a {str(tensor.layout).removeprefix('torch.')} tensor")
        return TensorSummary(meta)
    if tensor.is_complex():
        notes.append("magnitudes of complex numbers")
    if not values.numel():
        notes.append("an empty tensor")
    meta["statistics"], low, high, counts = _statistics(values, notes)
    meta["low"], meta["high"] = low, high
    meta["dead"] = None if weight else _dead(values)
    picture = _draw(values, most, weight, meta)
    return TensorSummary(meta, counts, picture)


def numbers_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor as floats on the CPU; None for a layout without rows."""
    tensor = local(tensor.detach())
    if tensor.is_nested:
        tensor = tensor.values() if tensor.layout is torch.jagged else torch.cat(
            [one.flatten() for one in tensor.unbind()]
        )  # fmt: skip
    tensor = dequantised(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        tensor = tensor.abs()
    if tensor.dtype is not torch.float64:
        tensor = tensor.float()
    return tensor.cpu()


def _statistics(
    values: Tensor, notes: list[str]
) -> tuple[dict[str, Any], float, float, NDArray[np.uint32] | None]:
    flat = values.reshape(-1)
    total = flat.numel()
    step = -(-total // _COUNTED)
    if step > 1:
        # One of each stretch: exact steps may meet the same channels again and again.
        starts = torch.arange(0, total, step, device="cpu")
        generator = torch.Generator().manual_seed(0)
        within = torch.randint(step, starts.shape, generator=generator, device="cpu")
        flat = flat[(starts + within).clamp_(max=total - 1)]
        notes.append(f"statistics and histogram of 1 in {step} values")
    broken = total - int(torch.isfinite(values).sum())  # of all: one is enough to matter
    finite = flat[torch.isfinite(flat)].double()
    found: dict[str, Any] = {"count": total, "nonfinite": broken}
    if not finite.numel():
        return found, 0.0, 0.0, None
    low, high = float(finite.min()), float(finite.max())
    zeros = finite
    if step > 1 and low == high == 0:  # that all are 0 is said of all
        zeros = values[torch.isfinite(values)]
    found |= {
        "mean": float(finite.mean()),
        "std": float(finite.std(correction=0)),
        "min": low,
        "max": high,
        "zeros": float((zeros == 0).double().mean()),
        "norm": float(cast("Tensor", torch.linalg.vector_norm(finite)))
        * math.sqrt(total / max(flat.numel(), 1)),
    }
    if low == high:
        return found, low, high, np.array([finite.numel()], np.uint32)
    # Halves, as the difference of two large numbers may be infinite.
    position = (finite / 2 - low / 2) / (high / 2 - low / 2) * BINS
    counts = torch.bincount(position.long().clamp(0, BINS - 1), minlength=BINS)
    return found, low, high, counts.numpy().astype(np.uint32)


def _dead(values: Tensor) -> float | None:
    """Return the share of channels that are 0 for every sample and position; None if
    meaningless.
    """
    if values.ndim < 2 or values.shape[0] < 2 or not values.numel():
        return None
    dim = 1 if values.ndim >= 4 else values.ndim - 1
    others = [d for d in range(values.ndim) if d != dim]
    return float((values.abs().amax(dim=others) == 0).double().mean())


# -- the picture ----------------------------------------------------------------------------------


def _draw(
    values: Tensor, most: int, weight: bool, meta: dict[str, Any]
) -> NDArray[np.float16 | np.float32] | None:
    """Return a picture by the kind of the tensor: (samples, panels, rows, columns)."""
    if not values.numel() or not values.ndim:
        meta["kind"] = "number" if values.numel() else "empty"
        if values.numel():
            meta["value"] = float(values)
        return None
    kind, axes, shaped = _arrange(values, weight)
    if values.ndim > 4 and not weight:
        meta["notes"].append("the picture is of the middle frame")
    samples, steps = _thin_out(shaped.shape, min(most, 4096) if kind == "vector" else most, kind)
    taken = shaped[(slice(samples), *(slice(None, None, step) for step in steps))]
    array = taken.double().numpy()
    picture, scale = _shorten(array)
    meta |= {
        "kind": kind,
        "axes": axes,
        "steps": [1, *steps],
        "scale": scale,
        "sampled": _say_sampled(axes, shaped.shape, taken.shape),
        "low_shown": float(np.min(array, initial=np.inf, where=np.isfinite(array))),
        "high_shown": float(np.max(array, initial=-np.inf, where=np.isfinite(array))),
    }
    return picture


def _shorten(array: NDArray[np.float64]) -> tuple[NDArray[np.float16 | np.float32], float]:
    """Return numbers in units of a scale, as half floats, or as floats if those would differ."""
    finite = array[np.isfinite(array)]
    largest = float(np.abs(finite).max(initial=0.0))
    scale = largest if largest > 30_000 or 0 < largest < 1e-2 else 1.0  # what a half float holds
    short = (array / scale).astype(np.float16)
    away = np.abs(short[np.isfinite(array)].astype(np.float64) * scale - finite)
    if not away.any():
        return short, scale
    whole = np.array_equal(finite, np.rint(finite))
    span = float(finite.max() / 2 - finite.min() / 2)  # half of it, which is always finite
    tiny = float((away > 1e-3 * np.abs(finite)).mean())  # how many are, beside the largest
    if not (whole or float(away.max()) > span / 128 or tiny > 0.01):
        return short, scale
    scale = 1.0 if 1e-30 < largest < 1e38 else scale
    return (array / scale).astype(np.float32), scale


def _arrange(values: Tensor, weight: bool) -> tuple[str, list[str], Tensor]:
    """Return the kind of a picture, the names of its four axes, and the values along them."""
    ndim = values.ndim
    if ndim == 1:
        return "vector", ["", "", "", "positions"], values.reshape(1, 1, 1, -1)
    if ndim == 2:
        axes = ["", "", "rows", "columns"] if weight else ["", "", "samples", "features"]
        return "matrix", axes, values[None, None]
    if weight and ndim >= 3:
        kernel = values.reshape(*values.shape[:2], values.shape[2], -1)
        return "maps", ["filters", "input channels", "rows", "columns"], kernel
    if ndim == 3:
        return "sequence", ["samples", "", "positions", "features"], values[:, None]
    while values.ndim > 4:  # a video: its middle frame
        values = values[:, :, values.shape[2] // 2]
    if values.shape[2] == values.shape[3] == 1:
        return "matrix", ["", "", "samples", "channels"], values[None, None, :, :, 0, 0]
    return "maps", ["samples", "channels", "rows", "columns"], values


def _thin_out(shape: torch.Size, most: int, kind: str) -> tuple[int, list[int]]:
    """Return the number of samples, and the steps along the other axes, for few enough values."""
    samples = min(shape[0], 8 if kind in ("maps", "sequence") else shape[0])
    steps = [-(-shape[1] // 64), 1, 1]
    panels, rows, columns = (-(-shape[n + 1] // steps[n]) for n in range(3))
    while samples * panels * rows * columns > most:
        if samples > 1:
            samples -= 1
        elif rows * columns > 28 * 28 or panels <= 16:
            axis = 2 if columns >= rows else 1
            steps[axis] += 1
            rows, columns = -(-shape[2] // steps[1]), -(-shape[3] // steps[2])
        else:
            steps[0] += 1
            panels = -(-shape[1] // steps[0])
    return samples, steps


def _say_sampled(axes: list[str], whole: torch.Size, taken: torch.Size) -> list[str]:
    """Return notes on what a picture leaves out: '16 of 64 channels'."""
    sizes = zip(axes, taken, whole, strict=True)
    return [f"{shown} of {size} {axis}" for axis, shown, size in sizes if shown < size]


def spread(total: int, most: int) -> list[int]:
    """Return at most so many positions, evenly from the first to the last.

    >>> spread(3, 5), spread(100, 4)
    ([0, 1, 2], [0, 33, 66, 99])
    """
    if total <= most:
        return list(range(total))
    return [round(n * (total - 1) / (most - 1)) for n in range(most)]
