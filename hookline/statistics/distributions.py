"""Statistics of the distribution of values: histograms, top values, zeros.

    Histogram  TopK  Sparsity

- `Bins`, `Tops`: the results of the first two
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hookline.errors import StatisticsError
from hookline.statistics.statistic import Rows, State, Statistic, in_parts, sums

__all__ = ["Bins", "Histogram", "Sparsity", "TopK", "Tops"]


class Bins(NamedTuple):
    """A histogram: channels × bins, or bins; values beyond the range are counted separately."""

    counts: Tensor
    edges: Tensor
    below: Tensor
    above: Tensor


@dataclass(frozen=True, eq=False)
class Histogram(Statistic):
    """The counts of values in bins of equal width.

    >>> histogram = Histogram(dim=None, bins=2, range=(0.0, 1.0))
    >>> counts, edges, below, above = histogram.update(torch.tensor([0.1, 0.7, 1.0, 9.0])).result
    >>> counts, int(above)
    (tensor([1, 2]), 1)

    A bin includes its left edge, the last one also its right edge.

    Args:
        dim: as in every statistic.
        bins: the number of bins.
        range: the least and the greatest edge. By default that of the first batch; histograms of
            different ranges cannot be merged, so give one if several workers measure.
    """

    bins: int = 64
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.range or (0.0, 1.0)
        if not 1 <= self.bins <= 2**20 or not -1e300 < low < high < 1e300:
            asked = f"A histogram of {self.bins} bins in {self.range} was asked for."
            raise StatisticsError(asked, "That has no bins.", "Give a range from low to high.")

    def _prepare(self, values: Tensor, kept: Tensor) -> None:
        if "range" in self.state:
            return
        found = self.range
        if found is None:
            ends: list[tuple[float, float]] = []
            for _, part, counted in in_parts(values, kept):
                part = part[counted]
                part = part[part.isfinite()]
                if part.numel():
                    ends.append((float(part.min()), float(part.max())))
            if not ends:
                return  # nothing to go by yet; see _of
            found = min(low for low, _ in ends), max(high for _, high in ends)
            if found[0] == found[1]:
                found = found[0] - 0.5, found[1] + 0.5
        self.state["range"] = torch.tensor(found, dtype=torch.float64, device="cpu")

    def _edges(self) -> Tensor:
        low, high = map(float, self.state["range"]) if "range" in self.state else (0.0, 1.0)
        return torch.linspace(low, high, self.bins + 1, dtype=torch.float64, device="cpu")

    def _of(self, rows: Rows) -> State:
        kept = rows.kept & ~rows.values.isnan()
        edges = self._edges().to(rows.values.device)
        # From 0, below the range, to bins + 1, above it.
        which = torch.bucketize(rows.values.contiguous(), edges, right=True)  # else torch warns
        which = torch.where(rows.values == edges[-1], self.bins, which)
        width, channels = self.bins + 2, rows.values.shape[1]
        flat = (which + torch.arange(channels, device=which.device) * width)[kept.expand_as(which)]
        counts = torch.bincount(flat, minlength=width * channels).view(channels, width)
        skipped = (rows.kept & ~kept).sum(0)
        return {"counts": counts, "count": counts.sum(1), "skipped": skipped}

    def _join(self, one: State, other: State) -> State:
        ranges = [s["range"] for s in (one, other) if "range" in s]
        if len(ranges) == 2 and not torch.equal(*ranges):
            found = f"The ranges differ: {ranges[0].tolist()} and {ranges[1].tolist()}."
            raise self._unfit(found, "Give both the same range=(low, high).")
        return sums(one, other, "counts", "count", "skipped")

    @property
    def result(self) -> Bins:
        """Counts, edges, and the numbers of values below and above the range."""
        nothing = torch.zeros(1, self.bins + 2, dtype=torch.int64, device="cpu")
        counts = self.state.get("counts", nothing)
        parts = (counts[:, 1:-1], counts[:, 0], counts[:, -1])
        inside, below, above = (self._shaped(part) for part in parts)
        return Bins(inside, self._edges(), below, above)


class Tops(NamedTuple):
    """The top values, best first: k × channels, or k; an id of -1 if there were fewer.

    `positions` has one more dimension: where in the sample, one number for each dimension between
    the samples and the channels.
    """

    values: Tensor
    ids: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class TopK(Statistic):
    """The largest values of each channel, with the sample and the position where they were.

    >>> tops = TopK(k=1).update(torch.tensor([[[1.0, 9.0], [5.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]]]))
    >>> values, ids, positions = tops.result
    >>> values, ids, positions[..., 0]  # sample × position × channel
    (tensor([[5., 9.]], dtype=torch.float64), tensor([[0, 0]]), tensor([[1, 0]]))

    Equal values are ordered by id, then by position, so that the result does not depend on how the
    data was split. NaN and the infinity at the far end are left out.

    Args:
        dim: as in every statistic.
        k: the number of values.
        largest: False for the smallest.
    """

    k: int = 10
    largest: bool = True
    _takes_ids: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.k < 2**31:
            raise StatisticsError(
                f"TopK has k={self.k!r}.", "It keeps k values.", "Give 1 or more."
            )

    def _of(self, rows: Rows) -> State:
        values = rows.values if self.largest else -rows.values
        some = values > -torch.inf  # nor NaN
        kept = rows.kept & some
        values = torch.where(kept, values, -torch.inf)
        per_sample = max(1, math.prod(rows.shape[1:]))
        numbers = torch.arange(rows.start, rows.start + len(values), device="cpu")
        names, inside = rows.names[numbers // per_sample], numbers % per_sample
        k = min(self.k, len(values))
        least, at = _furthest(values, k)
        tied = ((values >= least).sum(0) > k) & (least > -torch.inf)
        if tied.any():  # torch has taken any of those that are equal to the least
            first = _order(inside[:, None], names[:, None])[:, 0]
            at[:, tied] = _first_of_equal(values[:, tied], least[tied], first, k)
        values, at = values.gather(0, at).cpu(), at.cpu()
        order = _order(inside[at], names[at], -values)
        values, at = values.gather(0, order), at.gather(0, order)
        present = values > -torch.inf
        ids = torch.where(present, names[at], -1)
        columns = _positions(inside[at].reshape(-1), rows.shape)
        positions = columns.reshape(*at.shape, columns.shape[1])
        positions = torch.where(present[..., None], positions, -1)
        counts = {"count": kept.sum(0), "skipped": (rows.kept & ~some).sum(0)}
        return {"values": values, "ids": ids, "positions": positions, **counts}

    def _join(self, one: State, other: State) -> State:
        if one["positions"].shape[2] != other["positions"].shape[2]:
            found = "The values have different numbers of dimensions."
            raise self._unfit(found, "Measure values of one kind.")
        values, ids, positions = (
            torch.cat([one[key], other[key]]) for key in ("values", "ids", "positions")
        )
        order = _order(*positions.unbind(2)[::-1], ids, -values)[: self.k]
        return {
            "values": values.gather(0, order),
            "ids": ids.gather(0, order),
            "positions": positions.gather(0, order[..., None].expand(-1, -1, positions.shape[2])),
        } | sums(one, other, "count", "skipped")

    @property
    def result(self) -> Tops:
        """Values, ids and positions, best first."""
        nothing = {
            "values": torch.zeros(0, 1, dtype=torch.float64, device="cpu"),
            "ids": torch.zeros(0, 1, dtype=torch.int64, device="cpu"),
            "positions": torch.zeros(0, 1, 0, dtype=torch.int64, device="cpu"),
        }
        state = nothing | self.state
        values = state["values"] if self.largest else -state["values"]
        values = torch.where(state["ids"] < 0, torch.nan, values)
        kept = (state["ids"] >= 0).any(1)  # rows in which no channel has anything
        parts = [part[kept] for part in (values, state["ids"], state["positions"])]
        return Tops(*(part if self.dim is not None else part.squeeze(1) for part in parts))


def _furthest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the least of the k largest of each column, and the rows of these."""
    top, at = torch.topk(values, k, dim=0)
    return top[-1], at


def _first_of_equal(values: Tensor, least: Tensor, order: Tensor, k: int) -> Tensor:
    """Return the rows of the k largest of each column; of rows that equal the least, the first."""
    order = order.to(values.device)
    values = values[order]
    above, equal = values > least, values == least
    room = k - above.sum(0)
    chosen = above | (equal & (equal.cumsum(0, dtype=torch.int32) <= room))
    _, at = _furthest(torch.where(chosen, values, -torch.inf), k)
    return order[at]


def _order(*keys: Tensor) -> Tensor:
    """Return the order of each column by several keys, of which the last one counts most."""
    order = torch.arange(len(keys[0]), device="cpu")[:, None].expand_as(keys[0])
    for key in keys:
        order = order.gather(0, torch.sort(key.gather(0, order), dim=0, stable=True)[1])
    return order


def _positions(inside: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return where rows are in their samples: one column for each dimension after the first."""
    columns: list[Tensor] = []
    for size in reversed(shape[1:]):
        columns.insert(0, inside % size)
        inside = inside // size
    return torch.stack(columns, 1) if columns else inside.new_zeros(len(inside), 0)


@dataclass(frozen=True, eq=False)
class Sparsity(Statistic):
    """The share of values that are zero, or nearly so, in each channel.

    >>> Sparsity().update(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).result
    tensor([1.0000, 0.5000], dtype=torch.float64)

    Args:
        dim: as in every statistic.
        threshold: magnitudes up to it count as zero.
    """

    threshold: float = 0.0

    def _of(self, rows: Rows) -> State:
        finite = rows.finite
        zeros = finite & (rows.values.abs() <= self.threshold)
        skipped = (rows.kept & ~finite).sum(0)
        return {"count": finite.sum(0), "zeros": zeros.sum(0), "skipped": skipped}

    def _join(self, one: State, other: State) -> State:
        return sums(one, other, "count", "zeros", "skipped")

    @property
    def result(self) -> Tensor:
        """The shares, from 0 to 1, in float64; NaN for channels without values."""
        return self._total("zeros").to(torch.float64) / self.count
