"""Take numbers out of tensors of any size: all of them, or a sample that is always the same.

- `NumberSample`: the numbers of one place, the counts of what was left out, and remarks
- `sample_numbers(named)`: the sample of a place
- `spaced(count, most)`: evenly spread positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from hookline.view.figures.figure_sources import NamedTensors

__all__ = ["MOST", "NumberSample", "counted", "numbers", "sample_numbers", "spaced"]

MOST = 1_000_000  # numbers of a place that are looked at

Array = NDArray[Any]


def spaced(count: int, most: int) -> Array:
    """Return at most `most` positions of `count`, one drawn from each stretch.

    They are the same each time. Exact steps would hit the same channels again and again.

    >>> len(spaced(10, 20)), len(spaced(1_000_000, 1000))
    (10, 1000)
    """
    if count <= most:
        return np.arange(count)
    within = np.random.default_rng(0).random(most)
    return np.minimum(((np.arange(most) + within) * (count / most)).astype(np.int64), count - 1)


def numbers(tensor: Tensor) -> Array:
    """Return a tensor as float64 numpy, whatever its dtype and device."""
    return tensor.to("cpu", torch.float64).numpy()


@dataclass(frozen=True)
class NumberSample:
    """The finite numbers of a place, and the counts of the others."""

    name: str
    values: Array
    taken: int
    total: int
    nan: int = 0
    above: int = 0
    below: int = 0
    refused: str = ""

    @property
    def notes(self) -> list[str]:
        """The remarks of a figure on the numbers that it shows."""
        if self.refused:
            return [self.refused.rstrip(".")]
        found: list[str] = []
        if self.taken < self.total:
            found.append(f"sample of {self.taken:,} out of {self.total:,} values")
        odd = [(self.nan, "NaN"), (self.above, "+Inf"), (self.below, "−Inf")]
        if any(count for count, _ in odd):
            left = ", ".join(f"{count:,} {name}" for count, name in odd if count)
            found.append(f"{left} not shown" if len(self.values) else f"nothing but {left}")
        elif not self.total:
            found.append("no values")
        if len(self.values) > 1 and self.values.min() == self.values.max():
            found.append(f"all values are {self.values[0]:.4g}")
        return found


def sample_numbers(named: NamedTensors, most: int = MOST) -> NumberSample:
    """Return the numbers at a place: all, or `most` of them."""
    if named.refused:
        return NumberSample(named.name, np.empty(0), 0, 0, refused=named.refused)
    share = most / max(1, sum(tensor.numel() for tensor in named.tensors))
    pieces = [_some(tensor, share) for tensor in named.tensors]
    values = np.concatenate(pieces) if pieces else np.empty(0)
    odd = np.array([counted(tensor) for tensor in named.tensors]).reshape(-1, 3).sum(0)
    finite = values[np.isfinite(values)] if odd.any() else values
    nan, above, below = (int(count) for count in odd)
    return NumberSample(named.name, finite, len(values), named.total, nan, above, below)


def _some(tensor: Tensor, share: float) -> Array:
    count = tensor.numel()
    if share >= 1:
        return numbers(tensor).reshape(-1)
    where = torch.from_numpy(spaced(count, max(1, int(count * share))))
    where = where.to(tensor.device)
    if tensor.is_contiguous():
        return numbers(tensor.reshape(-1)[where])
    return numbers(tensor[torch.unravel_index(where, tensor.shape)])


def counted(values: Tensor | Array) -> tuple[int, int, int]:
    """Return the counts of NaN, inf and -inf among all values, since one in a million matters."""
    if not isinstance(values, Tensor):
        tests = (np.isnan(values), np.isposinf(values), np.isneginf(values))
        return int(tests[0].sum()), int(tests[1].sum()), int(tests[2].sum())
    if not values.is_floating_point():
        return 0, 0, 0
    values = values.float() if values.element_size() < 2 else values  # torch does not test 8 bits
    if values.isfinite().all():
        return 0, 0, 0
    return int(values.isnan().sum()), int(values.isposinf().sum()), int(values.isneginf().sum())
