"""Measure a tensor in a few numbers, with few passes over it.

- `Moments`: count, sum, spread, zeros … of a tensor; `values()` are the statistics
- `moments(tensor, unit, flat)`: the moments of one tensor
- `settle(found)`: bring measurements from other devices to the CPU, in one transfer
- `sampled(tensor, most)`: some of the elements of a tensor, evenly spread
- `binned(samples, bins)`: histograms of many samples at once
- `is_measurable(tensor)`: True if a tensor has such numbers

On the CPU a pass is a sum, a norm, a maximum, a minimum or a count, which are fast in torch (0.1 to
0.5 ns an element; `var_mean`, `isfinite` and infinite norms take ten times as long). Numbers that
are not finite show in the sum, and are counted only then; zeros are counted if a sample has any.
Other devices are not waited for until `settle`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.training.run_files import STATISTICS
from hookline.training.run_writing import BinCounts
from hookline.values.quantisation import is_quantised
from hookline.values.sharding import local
from hookline.values.snapshots import is_wrapped

__all__ = ["Moments", "binned", "is_measurable", "moments", "sampled", "settle"]

# Private, so detected: values inside of vmap and its like, of which nothing may be kept.
_NAN = float("nan")
_SAMPLE = 8192  # elements of what was merged that are kept as a sample
_LONG = 16384  # elements; of more, float32 loses a part of the sum of squares
Flat = tuple[float, float]  # the ends at which an activation function is flat


@dataclass(eq=False)
class Moments:
    """The moments of one tensor, or of several that were merged.

    >>> one = moments(torch.tensor([[0.0, 3.0], [0.0, -1.0]]))
    >>> both = one.merged(moments(torch.tensor([[0.0, 2.0]])))
    >>> named = dict(zip(STATISTICS, both.values(), strict=True))
    >>> named["absmax"], named["zeros"], named["dead"]
    (3.0, 0.5, 0.5)
    """

    count: float  # of finite values, as all that follow
    total: float
    centered: float  # the sum of squares of what differs from the mean
    zeros: float
    nonfinite: float
    bad: float  # of those that are not finite: NaN and +inf; -inf may be a mask
    flat: float  # how many are at the flat ends; NaN if it has none
    high: Tensor  # the largest and the smallest value of each unit
    low: Tensor
    each: float  # values a unit
    sample: Tensor
    shape: tuple[int, ...]
    waiting: Tensor | None = None  # the numbers above, on another device

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both tensors as if they had been one; neither is changed."""
        count = self.count + other.count
        centered = self.centered + other.centered
        if self.count and other.count:
            apart = other.total / other.count - self.total / self.count
            centered += apart * apart * self.count * other.count / count
        if self.high.shape == other.high.shape:
            high, low = torch.maximum(self.high, other.high), torch.minimum(self.low, other.low)
        else:  # shapes that vary have no units in common
            high = torch.cat([self.high, other.high]).max().reshape(1)
            low = torch.cat([self.low, other.low]).min().reshape(1)
        share = max(self._share, other._share)  # the same of both
        while (count + self.nonfinite + other.nonfinite) > _SAMPLE * share:
            share *= 2
        sample = torch.cat([_thinned(one.sample, one._share / share) for one in (self, other)])
        return Moments(
            count, self.total + other.total, centered, self.zeros + other.zeros,
            self.nonfinite + other.nonfinite, self.bad + other.bad, self.flat + other.flat,
            high, low, self.each + other.each, sample, other.shape,
        )  # fmt: skip

    @property
    def _share(self) -> float:
        """The number of values for which each value of the sample stands."""
        return (self.count + self.nonfinite) / max(len(self.sample), 1)

    def scaled(self, factor: float) -> Moments:
        """Return the moments of the tensor multiplied by a positive number."""
        return replace(
            self, total=self.total * factor, centered=self.centered * factor * factor,
            high=self.high * factor, low=self.low * factor, sample=self.sample * factor,
        )  # fmt: skip

    def grown(self, share: float) -> Moments:
        """Return the moments of a tensor that is larger by a factor, of which this is a fair
        sample.
        """
        return replace(
            self, count=self.count * share, total=self.total * share,
            centered=self.centered * share, zeros=self.zeros * share,
            nonfinite=self.nonfinite * share, bad=self.bad * share,
        )  # fmt: skip

    @property
    def square(self) -> float:
        """The sum of squares."""
        # Not with `**`, which raises where products become infinite.
        return self.centered + (self.total * self.total / self.count if self.count else 0.0)

    @property
    def dead(self) -> Tensor:
        """A mask of the units that were zero everywhere."""
        return (self.high == 0) & (self.low == 0)

    def values(self, ratio: float = _NAN) -> list[float]:
        """Return the statistics, in the order of `STATISTICS`."""
        count = self.count
        nonfinite = self.nonfinite / max(count + self.nonfinite, 1)
        if not count:
            return [_NAN] * (len(STATISTICS) - 3) + [nonfinite, ratio, _NAN]
        mean = self.total / count
        absmax = max(float(self.high.max()), -float(self.low.min()))
        width = float((self.high - self.low).max())
        spread = (width / absmax if absmax else 0.0) if self.each >= 2 else _NAN
        dead = float(self.dead.float().mean()) if len(self.high) > 1 else _NAN
        return [
            mean, math.sqrt(self.centered / count), absmax, math.sqrt(self.square),
            self.zeros / count, dead, self.flat / count, nonfinite, ratio, spread,
        ]  # fmt: skip


def is_measurable(tensor: Tensor) -> bool:
    """Return True for a plain floating-point tensor that is not empty."""
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_quantised(tensor)
        and not tensor.is_meta
        and tensor.numel() > 0
        and not is_wrapped(tensor)
        and tensor.element_size() > 1  # few operations know 8-bit floats
    )


def moments(tensor: Tensor, unit: int = -1, flat: Flat | None = None, most: int = 1024) -> Moments:
    """Measure one tensor.

    Args:
        tensor: one for which `is_measurable` holds; for a DTensor the part of this rank.
        unit: the dimension that counts units: channels, features, or rows of a weight.
        flat: the ends of an activation function: at and beyond them, values count as saturated.
        most: how many elements to keep as a sample.
    """
    x = local(tensor.detach())
    if x.ndim == 0:
        x = x.reshape(1)
    units = x.shape[unit] if x.ndim > 1 else 1
    rest = [d for d in range(x.ndim) if d != unit % x.ndim] if x.ndim > 1 else [0]
    shape, sample, each = tuple(tensor.shape), sampled(x, most), x.numel() / units
    if x.is_cpu:
        found = _quick(x, rest, sample)
        if found is not None:
            count, total, centered, zeros, high, low = found
            ends = _NAN if flat is None else _at_ends(x, flat).item()
            return Moments(
                count, total, centered, zeros, 0.0, 0.0, ends, high.reshape(-1), low.reshape(-1),
                each, sample, shape,
            )  # fmt: skip
    numbers, high, low = _careful(x, rest, flat)
    sample = torch.where(sample.isfinite(), sample, torch.nan)
    found = Moments(0, 0, 0, 0, 0, 0, 0, high, low, each, sample, shape, waiting=numbers)
    if x.is_cpu:
        settle([found])
    return found


def _quick(
    x: Tensor, rest: list[int], sample: Tensor
) -> tuple[float, float, float, float, Tensor, Tensor] | None:
    """Return the numbers of a tensor; None if some are not finite, too large or too small."""
    wide = torch.float32 if x.element_size() < 4 else None
    total = x.sum(dtype=wide).item()
    norm = _norm(x, wide)
    if not math.isfinite(total) or not math.isfinite(norm):
        return None
    count, square = x.numel(), norm * norm
    centered = square - total * total / count
    if centered < 1e-3 * square and square > 0:  # the difference of two large numbers
        apart = _norm(x.double() - total / count, None)
        centered = apart * apart
    high, low = x.amax(rest).float(), x.amin(rest).float()
    if square < 1e-30 * count and (high.any() or low.any()):  # squares were lost
        return None
    # The slowest pass of all, and most tensors have no zeros.
    sparse = int(torch.count_nonzero(sample)) < len(sample)
    zeros = count - int(torch.count_nonzero(x)) if sparse else 0
    return count, total, max(centered, 0.0), zeros, high, low


def _norm(x: Tensor, dtype: torch.dtype | None) -> float:
    norm = cast(Any, torch.linalg).vector_norm
    if x.numel() <= _LONG or x.dtype == torch.float64:
        return norm(x, dtype=dtype).item()
    flat = _dense(x)
    flat = x.reshape(-1) if flat is None else flat
    whole = len(flat) - len(flat) % 512
    blocks = norm(flat[:whole].view(-1, 512), dim=1, dtype=dtype)
    return norm(torch.cat([blocks, norm(flat[whole:], dtype=dtype)[None]]).double()).item()


def _at_ends(x: Tensor, flat: Flat) -> Tensor:
    return ((x <= flat[0]) | (x >= flat[1])).sum()


def _careful(x: Tensor, rest: list[int], flat: Flat | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same numbers for any values, without waiting for the device."""
    wide = torch.float64 if x.is_cpu else torch.float32
    finite = x.isfinite()
    good = torch.where(finite, x, 0).to(wide)
    count, total = finite.sum(), good.sum()
    off = torch.where(finite, good - total / count.clamp(min=1), 0)
    ends = torch.full((), _NAN, device=x.device) if flat is None else _at_ends(good, flat)
    bad = (x.isnan() | (x == torch.inf)).sum()
    numbers = (
        count, total, off.square().sum(), count - torch.count_nonzero(good), x.numel() - count,
        bad, ends,
    )  # fmt: skip
    high = torch.where(finite, x, -torch.inf).amax(rest).float().reshape(-1)
    low = torch.where(finite, x, torch.inf).amin(rest).float().reshape(-1)
    # A unit without any finite value is not dead, and says nothing of the others.
    empty = high < low
    one = torch.where(empty.all(), 0.0, high.max())
    high, low = torch.where(empty, one, high), torch.where(empty, one, low)
    return torch.stack([number.to(wide) for number in numbers]), high, low


def settle(found: Sequence[Moments]) -> None:
    """Bring measurements from other devices to the CPU, with one wait for each."""
    groups: dict[torch.device, list[Moments]] = {}
    for one in found:
        if one.waiting is not None:
            groups.setdefault(one.waiting.device, []).append(one)
    for group in groups.values():
        stacked = torch.stack([cast(Tensor, one.waiting) for one in group])
        waited = cast("list[list[float]]", stacked.tolist())
        for one, numbers in zip(group, waited, strict=True):
            one.count, one.total, one.centered, one.zeros, one.nonfinite, one.bad, one.flat = (
                numbers
            )
            one.waiting = None
        for name in ("high", "low", "sample"):
            parts: list[Tensor] = [getattr(one, name) for one in group]
            whole = torch.cat([part.float() for part in parts]).cpu()
            split = cast("tuple[Tensor, ...]", whole.split([len(part) for part in parts]))
            for one, part in zip(group, split, strict=True):
                setattr(one, name, part)


# -- samples --------------------------------------------------------------------------------------


def sampled(tensor: Tensor, most: int, exact: bool = False) -> Tensor:
    """Return a copy of some elements, evenly spread over the tensor; all of them if they are few.

    They are in single precision; with `exact`, in the tensor's own if that is double.

    >>> sampled(torch.arange(12.0).reshape(3, 4), 5)
    tensor([0., 3., 6., 9.])
    """
    count = tensor.numel()
    flat = _flat(tensor, most)
    step = max(1, -(-len(flat) // most))
    # A step that shares a factor with the width would meet some columns only.
    while step > 1 and count == len(flat) and math.gcd(step, tensor.shape[-1]) > 1:
        step += 1
    picked = flat[::step]
    keep = picked.dtype == torch.float32 or (exact and picked.dtype == torch.float64)
    return picked.clone() if keep else picked.to(torch.float32, copy=True)


def _thinned(sample: Tensor, share: float) -> Tensor:
    """Return a share of a sample, spread without a period, which would hit some columns only."""
    if share >= 1:
        return sample
    count = torch.arange(int(len(sample) * share), device=sample.device)
    return sample[((count + count * 0.618034 % 1) / share).long().clamp(max=len(sample) - 1)]


def _dense(tensor: Tensor) -> Tensor | None:
    """Return the elements in the order of memory, without a copy; None if there are gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
    dense = tensor.permute(order)
    return dense.view(-1) if dense.is_contiguous() else None


def _flat(tensor: Tensor, most: int) -> Tensor:
    """Return the elements in the order of memory, without a copy; some of them if there are
    gaps.
    """
    dense = _dense(tensor)
    if dense is not None:
        return dense
    for dim in range(tensor.ndim):
        if tensor.numel() > 2 * most:
            step = min(max(1, tensor.numel() // most), tensor.shape[dim])
            tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor.reshape(-1)


def binned(samples: Sequence[Tensor], bins: int) -> list[BinCounts | None]:
    """Return the histogram of each sample, between its ends; None for one without finite values.

    >>> binned([torch.tensor([0.0, 1.0, 4.0])], 4)[0]
    BinCounts(low=0.0, high=4.0, counts=array([1, 1, 0, 1], dtype=uint32))
    """
    if not samples:
        return []
    sizes = np.array([len(sample) for sample in samples])
    values = torch.cat([sample.double() for sample in samples]).numpy()
    owner = np.repeat(np.arange(len(samples)), sizes)
    good = np.isfinite(values)
    values, owner = values[good], owner[good]
    left = np.bincount(owner, minlength=len(samples))
    lows, highs = _ends(values, left)
    width = np.where(highs > lows, highs - lows, 1.0)
    where = ((values - lows[owner]) / width[owner] * bins).astype(np.int64).clip(0, bins - 1)
    counts = np.bincount(owner * bins + where, minlength=bins * len(samples))
    counts = counts.reshape(len(samples), bins).astype(np.uint32)
    return [
        BinCounts(float(low), float(high), own) if n else None
        for low, high, own, n in zip(lows, highs, counts, left, strict=True)
    ]


def _ends(
    values: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the smallest and largest of each run of values, a little apart where they are
    equal.
    """
    lows, highs = np.zeros(len(sizes)), np.zeros(len(sizes))
    there = sizes > 0
    if there.any():
        starts = (np.cumsum(sizes) - sizes)[there]
        lows[there] = np.minimum.reduceat(values, starts)
        highs[there] = np.maximum.reduceat(values, starts)
    # As float32, in which they are written, the ends must still hold all values.
    low, high = lows.astype(np.float32), highs.astype(np.float32)
    same = low == high
    gap = np.maximum(np.abs(low) * np.float32(1e-6), np.float32(1e-12))
    return (
        np.where(same, low - gap, low).astype(np.float64),
        np.where(same, high + gap, high).astype(np.float64),
    )
