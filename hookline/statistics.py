"""Statistics of values that come batch by batch, in constant memory.

    Mean  Variance  Covariance  Histogram  TopK  Norm  Sparsity

Each holds its options, which never change, and a state: a few tensors on the CPU. `update` takes
a batch in, `merge` another statistic of the same options, `result` is what was found so far.
Sums are taken in float64 and joined by the formulas of Chan, Golub and LeVeque, so that neither
the order nor the way in which the data was split matters beyond rounding (about 1e-12 of the
spread of the values); counts, histograms and top values are exact.

NaN and infinite values are left out and counted in `skipped`, so that one of them does not spoil
hours of measuring. (In a histogram infinities are beyond the range, among top values they are
values.) What a mask leaves out is not counted anywhere.

- `Statistic`: what they have in common
- `Bins`, `Norms`, `Tops`: the results that are more than one tensor

A long file, for its examples: seven small classes that are read together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from hookline import folders
from hookline.errors import StatisticsError

__all__ = [
    "Bins", "Covariance", "Histogram", "Mean", "Norm", "Norms", "Sparsity", "Statistic", "TopK",
    "Tops", "Variance", "statistic_from",
]  # fmt: skip

State = dict[str, Tensor]
_CHUNK = 2**20  # numbers that are widened to float64 at once


class _Rows(NamedTuple):
    """Part of a batch: rows × channels in float64, and which of the numbers count."""

    values: Tensor
    kept: Tensor
    start: int  # the number of the first row in the batch
    names: Tensor  # the ids of all samples of the batch
    shape: tuple[int, ...]  # of the batch, without channels

    @property
    def finite(self) -> Tensor:
        return self.kept & self.values.isfinite()


@dataclass(frozen=True, eq=False)
class Statistic:
    """What the statistics have in common.

    Args:
        dim: the dimension of the channels, each of which has its own result; None for one result
            over everything.
    """

    dim: int | None = -1
    state: State = field(init=False, repr=False, default_factory=dict[str, Tensor])

    def _of(self, rows: _Rows) -> State:
        """The state that some rows alone give."""
        raise AssertionError("a statistic defines _of")

    def _join(self, one: State, other: State) -> State:
        """The state of both together."""
        raise AssertionError("a statistic defines _join")

    def _prepare(self, values: Tensor, kept: Tensor) -> None:
        """Called with all rows of a batch before they are taken in."""

    @property
    def result(self) -> Any:
        """What was found so far."""
        raise AssertionError("a statistic defines result")

    # -- taking in ------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, value: Tensor, mask: Tensor | None = None, ids: Sequence[int] | Tensor | None = None
    ) -> Self:
        """Take a batch in. The value is only read.

        Args:
            value: a tensor of any real dtype; its first dimension, channels apart, is the samples.
            mask: nonzero where the value counts: over the first dimensions of the value, channels
                apart, as batch × position is for batch × position × channel.
            ids: a whole number for each sample, for `TopK`. Without, samples are counted.
        """
        rows, shape = self._rows(value)
        kept = torch.ones((), dtype=torch.bool, device=value.device).expand(shape)
        if mask is not None:
            kept = self._fitting(mask.to(value.device), shape)
        kept = kept.reshape(-1)
        names = self._names(shape, ids if isinstance(self, TopK) else None)
        if "channels" in self.state and int(self.state["channels"]) != rows.shape[1]:
            had = int(self.state["channels"])
            raise self._unfit(
                f"A value of shape {tuple(value.shape)} has {rows.shape[1]} channels along "
                f"dim={self.dim}; those before had {had}.",
                "Measure places of one width, or everything together with dim=None.",
            )
        if len(rows):
            self._prepare(rows, kept)
        state = dict(self.state)
        step = max(1, _CHUNK // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            part = _wide(rows[start : start + step])
            counted = kept[start : start + step].to(part.device)[:, None]
            batch = _Rows(part, counted, start, names, shape)
            made = {key: tensor.cpu() for key, tensor in self._of(batch).items()}
            state = self._joined(
                state, made | {"channels": torch.tensor(rows.shape[1], device="cpu")}
            )
        # All at once: an error, or an interrupt, leaves the state as it was before the batch.
        state["samples"] = state.get("samples", _none()) + len(names)
        self._put(state)
        return self

    def _rows(self, value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The value as rows × channels, and its shape without the channels."""
        if value.is_complex() or value.is_quantized or value.layout != torch.strided:
            found = f"The value is {value.dtype}, {value.layout}: its numbers have no order."
            raise self._unfit(
                found, "Measure a real part of it, with at=lambda value: value.abs()."
            )
        value = value.detach()
        if self.dim is None:
            return value.reshape(-1, 1), tuple(value.shape)
        if not -value.ndim <= self.dim < value.ndim:
            found = f"A value of shape {tuple(value.shape)} has no dimension {self.dim}."
            raise self._unfit(found, "Give dim= another one, or None for one result overall.")
        moved = value.movedim(self.dim, -1)
        # Not reshape(-1, …), which cannot tell the rows of a value without channels.
        count = moved.shape[:-1].numel()
        return moved.reshape(count, moved.shape[-1]), tuple(moved.shape[:-1])

    def _fitting(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        ahead = shape[: mask.ndim]
        if len(ahead) < mask.ndim or any(
            m not in (1, n) for m, n in zip(mask.shape, ahead, strict=True)
        ):
            raise self._unfit(
                f"A mask has the shape {tuple(mask.shape)}, the value without channels {shape}.",
                "A mask lies over the first dimensions of the value, such as batch × position.",
            )
        mask = (mask != 0).expand(ahead)
        return mask.reshape(*mask.shape, *[1] * (len(shape) - mask.ndim)).expand(shape)

    def _names(self, shape: tuple[int, ...], ids: Any) -> Tensor:
        count = shape[0] if shape else 1
        if ids is None:
            return torch.arange(count, device="cpu") + self.state.get("samples", _none())
        names = (
            torch.as_tensor(ids, device=None if isinstance(ids, Tensor) else "cpu")
            .detach()
            .cpu()
            .reshape(-1)
        )
        if len(names) != count or (len(names) and (names.is_floating_point() or names.min() < 0)):
            found = f"{len(names)} ids of {names.dtype} were given for {count} samples."
            raise self._unfit(found, "Give one whole number from 0 on for each sample.")
        return names.to(torch.int64)

    def merge(self, other: Statistic) -> Self:
        """Take in what another one of the same options has found; the other stays as it is."""
        if repr(other) != repr(self):
            raise self._unfit(f"It was to be merged with {other!r}.", "Give both the same options.")
        widths = {int(s["channels"]) for s in (self.state, other.state) if "channels" in s}
        if len(widths) > 1:
            raise self._unfit(f"The two have {widths} channels.", "Merge those of one place.")
        state = self._joined(self.state, other.state)
        state["samples"] = sum(
            (s.get("samples", _none()) for s in (self.state, other.state)), _none()
        )
        self._put(state)
        return self

    def _joined(self, one: State, other: State) -> State:
        if "channels" not in one or "channels" not in other:
            return {**one, **other}
        fixed = {key: other.get(key, tensor) for key, tensor in one.items()}
        return fixed | self._join(one, other)

    def _put(self, state: State) -> None:
        self.state.clear()
        self.state.update(state)

    def _shaped(self, tensor: Tensor) -> Tensor:
        return tensor if self.dim is not None else tensor.squeeze(0)

    def _total(self, key: str) -> Tensor:
        return self._shaped(self.state.get(key, torch.zeros(1, dtype=torch.int64, device="cpu")))

    @property
    def count(self) -> Tensor:
        """How many numbers took part, for each channel."""
        return self._total("count")

    @property
    def skipped(self) -> Tensor:
        """How many NaN or infinite numbers were left out, for each channel."""
        return self._total("skipped")

    # -- copies and files -----------------------------------------------------------------------

    def fresh(self) -> Self:
        """Another one of the same options that has seen nothing."""
        return type(self)(**self._options())

    def _options(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "state"}

    def save(self, folder: str | Path) -> Path:
        """Write options and state into a folder: `statistic.json` and `statistic.safetensors`."""
        return folders.write(folder, "statistic", self.spelled(), self.state)

    def spelled(self) -> dict[str, Any]:
        """Which statistic this is, for JSON."""
        return {"statistic": type(self).__name__, "options": self._options()}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote."""
        content, tensors = folders.read(folder, "statistic", StatisticsError)
        made = statistic_from(content, tensors, str(folder))
        if not isinstance(made, cls):
            asked = f"A {cls.__name__} was to be read from {str(folder)!r}."
            raise StatisticsError(asked, f"There is a {type(made).__name__}.", "Load it as that.")
        return made

    def _unfit(self, found: str, remedy: str) -> StatisticsError:
        return StatisticsError(f"{self!r} was to take in more.", found, remedy)


def _none() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is


def _wide(part: Tensor) -> Tensor:
    if part.device.type == "mps":  # which has no float64
        part = part.cpu()
    return part.to(torch.float64)


def _positions(inside: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Where rows are in their samples: one column for each dimension behind the first."""
    columns: list[Tensor] = []
    for size in reversed(shape[1:]):
        columns.insert(0, inside % size)
        inside = inside // size
    return torch.stack(columns, 1) if columns else inside.new_zeros(len(inside), 0)


def _moments(values: Tensor, kept: Tensor) -> State:
    """Count, mean and sum of squared differences of each column, over what is kept."""
    count = kept.sum(0)
    if bool(kept.all()):  # the usual case, in fewer passes
        mean = values.mean(0) if len(values) else values.new_zeros(values.shape[1])
        apart = values - mean
        squares = apart.square().sum(0) - apart.sum(0).square() / count.clamp(min=1)
        return {"count": count, "mean": mean, "squares": squares.clamp(min=0)}
    mean = torch.where(kept, values, 0.0).sum(0) / count.clamp(min=1)
    apart = torch.where(kept, values - mean, 0.0)
    # What rounding left in the mean is taken out of the squares.
    squares = apart.square().sum(0) - apart.sum(0).square() / count.clamp(min=1)
    return {"count": count, "mean": mean, "squares": squares.clamp(min=0)}


def _join_moments(one: State, other: State) -> State:
    count = one["count"] + other["count"]
    share = _divided(other["count"], count)
    apart = other["mean"] - one["mean"]
    mean = one["mean"] + apart * share
    squares = one["squares"] + other["squares"] + apart.square() * one["count"] * share
    return {"count": count, "mean": mean, "squares": squares}


def _divided(part: Tensor, count: Tensor) -> Tensor:
    """Torch would divide whole numbers in float32."""
    return part.to(torch.float64) / count.clamp(min=1)


def _sums(one: State, other: State, *keys: str) -> State:
    return {key: one[key] + other[key] for key in keys}


@dataclass(frozen=True, eq=False)
class Mean(Statistic):
    """The mean of each channel.

    >>> mean = Mean().update(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.update(torch.tensor([[5.0, 50.0]])).result
    tensor([ 3., 30.], dtype=torch.float64)
    """

    def _of(self, rows: _Rows) -> State:
        return _moments(rows.values, rows.finite) | {"skipped": (rows.kept & ~rows.finite).sum(0)}

    def _join(self, one: State, other: State) -> State:
        return _join_moments(one, other) | _sums(one, other, "skipped")

    @property
    def result(self) -> Tensor:
        """The means, in float64; NaN where nothing was seen."""
        return torch.where(self.count > 0, self._total("mean"), torch.nan)


@dataclass(frozen=True, eq=False)
class Variance(Mean):
    """The variance of each channel.

    >>> variance = Variance(dim=None).update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> variance.result, variance.mean
    (tensor(1.6667, dtype=torch.float64), tensor(2.5000, dtype=torch.float64))

    Args:
        dim: as in every statistic.
        correction: 1 divides by one less than the count, as `torch.var` does; 0 by the count.
    """

    correction: int = 1

    @property
    def mean(self) -> Tensor:
        return super().result

    @property
    def std(self) -> Tensor:
        return self.result.sqrt()

    @property
    def result(self) -> Tensor:
        """The variances, in float64; NaN where too little was seen."""
        free = self.count - self.correction
        return torch.where(free > 0, self._total("squares") / free, torch.nan)


@dataclass(frozen=True, eq=False)
class Covariance(Statistic):
    """The covariance of the channels with each other.

    >>> covariance = Covariance().update(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]))
    >>> covariance.result
    tensor([[ 4.,  7.],
            [ 7., 13.]], dtype=torch.float64)

    A row with a NaN or an infinity is left out as a whole.

    Args:
        dim: as in every statistic, but not None.
        correction: as in `Variance`.
    """

    correction: int = 1

    def __post_init__(self) -> None:
        _need_dim(self)

    def _of(self, rows: _Rows) -> State:
        finite = rows.finite.all(1)
        values = rows.values[finite]
        mean = values.mean(0) if len(values) else values.new_zeros(values.shape[1])
        apart = values - mean
        rest = apart.sum(0)
        products = apart.mT @ apart - torch.outer(rest, rest) / max(1, len(values))
        counts = {"count": finite.sum(), "skipped": (rows.kept[:, 0] & ~finite).sum()}
        return {"mean": mean, "products": products, **counts}

    def _join(self, one: State, other: State) -> State:
        count = one["count"] + other["count"]
        share = _divided(other["count"], count)
        apart = other["mean"] - one["mean"]
        between = torch.outer(apart, apart) * one["count"] * share
        products = one["products"] + other["products"] + between
        mean = one["mean"] + apart * share
        return {"mean": mean, "products": products} | _sums(one, other, "count", "skipped")

    @property
    def mean(self) -> Tensor:
        return torch.where(self.count > 0, self._total("mean"), torch.nan)

    @property
    def result(self) -> Tensor:
        """Channels × channels, in float64."""
        free = self.count - self.correction
        products = self.state.get("products", torch.zeros(1, 1))
        return torch.where(free > 0, products / free, torch.nan)


class Bins(NamedTuple):
    """A histogram: channels × bins, or bins; what lies beyond the range is counted apart."""

    counts: Tensor
    edges: Tensor
    below: Tensor
    above: Tensor


@dataclass(frozen=True, eq=False)
class Histogram(Statistic):
    """How often values fall into bins of one width.

    >>> histogram = Histogram(dim=None, bins=2, range=(0.0, 1.0))
    >>> counts, edges, below, above = histogram.update(torch.tensor([0.1, 0.7, 1.0, 9.0])).result
    >>> counts, int(above)
    (tensor([1, 2]), 1)

    A bin has its left edge, the last one also its right edge.

    Args:
        dim: as in every statistic.
        bins: how many.
        range: from where to where. Without, that of the first batch; two that found different
            ranges cannot be merged, so give one where several workers measure.
    """

    bins: int = 64
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        low, high = self.range or (0.0, 1.0)
        if (
            type(self.bins) is not int
            or not 1 <= self.bins <= 2**20
            or not -1e300 < low < high < 1e300
        ):
            asked = f"A histogram of {self.bins} bins in {self.range} was asked for."
            raise StatisticsError(asked, "That has no bins.", "Give a range from low to high.")

    def _prepare(self, values: Tensor, kept: Tensor) -> None:
        if "range" in self.state:
            return
        found = self.range
        if found is None:
            step = max(1, _CHUNK // max(1, values.shape[1]))
            ends: list[tuple[float, float]] = []
            for start in range(0, len(values), step):
                part = _wide(values[start : start + step][kept[start : start + step]])
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

    def _of(self, rows: _Rows) -> State:
        kept = rows.kept & ~rows.values.isnan()
        edges = self._edges().to(rows.values.device)
        # From 0, below the range, to bins + 1, above it.
        which = torch.bucketize(rows.values, edges, right=True)
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
        return _sums(one, other, "counts", "count", "skipped")

    @property
    def result(self) -> Bins:
        """Counts, edges, and how many were below and above the range."""
        counts = self.state.get("counts", torch.zeros(1, self.bins + 2, dtype=torch.int64))
        parts = (counts[:, 1:-1], counts[:, 0], counts[:, -1])
        inside, below, above = (self._shaped(part) for part in parts)
        return Bins(inside, self._edges(), below, above)


class Tops(NamedTuple):
    """The top values, best first: k × channels, or k; an id of -1 where there were fewer.

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

    Of equal values that of the smaller id, then of the earlier position comes first, so that the
    result does not depend on how the data was split. NaN and the infinity at the far end are left
    out.

    Args:
        dim: as in every statistic.
        k: how many.
        largest: False for the smallest.
    """

    k: int = 10
    largest: bool = True

    def __post_init__(self) -> None:
        if type(self.k) is not int or not 1 <= self.k < 2**31:
            raise StatisticsError(
                f"TopK has k={self.k!r}.", "It keeps k values.", "Give 1 or more."
            )

    def _of(self, rows: _Rows) -> State:
        values = rows.values if self.largest else -rows.values
        some = values > -torch.inf  # nor NaN
        kept = rows.kept & some
        values = torch.where(kept, values, -torch.inf)
        counted = kept.sum(0)
        if len(values) > 2 * self.k:  # only the rows that have a top value of some channel
            least = torch.topk(values, self.k, dim=0)[0][-1]
            which = (kept & (values >= least)).any(1).nonzero()[:, 0]
            values, kept = values[which], kept.expand_as(some)[which]
            which = which.cpu() + rows.start
        else:
            which = torch.arange(rows.start, rows.start + len(values), device="cpu")
        per_sample = max(1, math.prod(rows.shape[1:]))
        names, inside = rows.names[which // per_sample], _positions(which % per_sample, rows.shape)
        order = torch.sort(names, stable=True)[1]  # rows of one id are in the order of positions
        values, present = values[order.to(values.device)], kept[order.to(values.device)]
        values, place = torch.sort(values, dim=0, descending=True, stable=True)
        values, place = values[: self.k].cpu(), place[: self.k]
        present = present.gather(0, place).cpu()
        place = order[place.cpu()]
        ids, positions = names[place], inside[place]
        counts = {"count": counted, "skipped": (rows.kept & ~some).sum(0)}
        ids = torch.where(present, ids, -1)
        positions = torch.where(present[..., None], positions, -1)
        return {"values": values, "ids": ids, "positions": positions, **counts}

    def _join(self, one: State, other: State) -> State:
        if one["positions"].shape[2] != other["positions"].shape[2]:
            found = "The values have different numbers of dimensions."
            raise self._unfit(found, "Measure values of one kind.")
        values, ids, positions = (
            torch.cat([one[key], other[key]]) for key in ("values", "ids", "positions")
        )
        # Stable sorts by one key after the other; the last one counts most.
        order = torch.arange(len(ids), device="cpu")[:, None].expand_as(ids)
        for key in (*positions.unbind(2)[::-1], ids, -values):
            order = order.gather(0, torch.sort(key.gather(0, order), dim=0, stable=True)[1])
        order = order[: self.k]
        return {
            "values": values.gather(0, order),
            "ids": ids.gather(0, order),
            "positions": positions.gather(0, order[..., None].expand(-1, -1, positions.shape[2])),
        } | _sums(one, other, "count", "skipped")

    @property
    def result(self) -> Tops:
        """Values, ids and positions, best first."""
        state = self.state or {
            "values": torch.zeros(0, 1, dtype=torch.float64),
            "ids": torch.zeros(0, 1, dtype=torch.int64),
            "positions": torch.zeros(0, 1, 0, dtype=torch.int64),
        }
        values = state["values"] if self.largest else -state["values"]
        values = torch.where(state["ids"] < 0, torch.nan, values)
        kept = (state["ids"] >= 0).any(1)  # rows in which no channel has anything
        parts = [part[kept] for part in (values, state["ids"], state["positions"])]
        return Tops(*(part if self.dim is not None else part.squeeze(1) for part in parts))


class Norms(NamedTuple):
    """The lengths of vectors: their mean, standard deviation, least and greatest."""

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor


@dataclass(frozen=True, eq=False)
class Norm(Statistic):
    """The lengths of the vectors along a dimension.

    >>> norm = Norm().update(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> norm.result.mean, norm.result.max
    (tensor(3., dtype=torch.float64), tensor(5., dtype=torch.float64))

    A vector with a NaN or an infinity is left out as a whole.

    Args:
        dim: the dimension along which the vectors lie.
        order: 2 for the Euclidean length, 1 for the sum of magnitudes.
    """

    order: float = 2.0

    def __post_init__(self) -> None:
        _need_dim(self)
        if not 0 < self.order < 1e6:
            asked = f"Norm has order={self.order!r}."
            raise StatisticsError(asked, "There is no such length.", "Give 1 or 2.")

    def _of(self, rows: _Rows) -> State:
        finite = rows.finite.all(1)
        lengths = cast("Tensor", torch.linalg.vector_norm(rows.values[finite], self.order, dim=1))[
            :, None
        ]
        counts = {"skipped": (rows.kept[:, 0] & ~finite).sum()[None]}
        least = lengths.amin(0) if len(lengths) else lengths.new_full((1,), torch.inf)
        most = lengths.amax(0) if len(lengths) else lengths.new_full((1,), -torch.inf)
        moments = _moments(lengths, torch.ones_like(lengths, dtype=torch.bool))
        return moments | counts | {"min": least, "max": most}

    def _join(self, one: State, other: State) -> State:
        ends = {
            "min": torch.minimum(one["min"], other["min"]),
            "max": torch.maximum(one["max"], other["max"]),
        }
        return _join_moments(one, other) | _sums(one, other, "skipped") | ends

    def _shaped(self, tensor: Tensor) -> Tensor:
        return tensor.squeeze(0)  # the channels are used up

    @property
    def result(self) -> Norms:
        """Mean, standard deviation, least and greatest length, in float64."""
        some = self.count > 0
        mean, least, most = (
            torch.where(some, self._total(key), torch.nan) for key in ("mean", "min", "max")
        )
        spread = (self._total("squares") / (self.count - 1).clamp(min=1)).sqrt()
        return Norms(mean, torch.where(self.count > 1, spread, torch.nan), least, most)


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

    def _of(self, rows: _Rows) -> State:
        finite = rows.finite
        zeros = finite & (rows.values.abs() <= self.threshold)
        skipped = (rows.kept & ~finite).sum(0)
        return {"count": finite.sum(0), "zeros": zeros.sum(0), "skipped": skipped}

    def _join(self, one: State, other: State) -> State:
        return _sums(one, other, "count", "zeros", "skipped")

    @property
    def result(self) -> Tensor:
        """The shares, from 0 to 1, in float64; NaN where nothing was seen."""
        return self._total("zeros").to(torch.float64) / self.count


def _need_dim(statistic: Statistic) -> None:
    if statistic.dim is None:
        name = type(statistic).__name__
        asked = f"{name} was asked for with dim=None."
        raise StatisticsError(
            asked, "It needs vectors.", "Name the dimension along which they lie."
        )


_KINDS: dict[str, type[Statistic]] = {
    kind.__name__: kind for kind in (Mean, Variance, Covariance, Histogram, TopK, Norm, Sparsity)
}


def statistic_from(spelled: dict[str, Any], tensors: State, source: str) -> Statistic:
    """The statistic that was spelled, with its state; what does not fit is an error."""
    asked = f"A statistic was to be read from {source!r}."
    remedy = "Give a folder that was written by .save(folder)."
    kind, options = _KINDS.get(str(spelled.get("statistic"))), spelled.get("options")
    if kind is None or not isinstance(options, dict):
        found = f"It names {spelled.get('statistic')!r:.60}, with options {options!r:.60}."
        raise StatisticsError(asked, found, remedy)
    try:
        given: dict[str, Any] = {str(key): value for key, value in options.items()}  # pyright: ignore
        if given.get("range") is not None:
            given["range"] = tuple(map(float, given["range"]))
        made = kind(**given)
        for option in fields(made):
            own, usual = getattr(made, option.name), cast("Any", option.default)
            number = (float, int) if isinstance(usual, float) else int
            if option.name not in ("dim", "range", "state") and (
                not isinstance(own, number) or isinstance(own, bool) != isinstance(usual, bool)
            ):
                raise TypeError(f"{option.name} is {own!r:.60}")
        if isinstance(made.dim, bool) or not isinstance(made.dim, int | None):
            raise TypeError(f"dim is {made.dim!r:.60}")
    except (TypeError, ValueError, OverflowError) as error:
        raise StatisticsError(asked, f"The options do not fit: {error}.", remedy) from None
    if not tensors:
        return made
    problem = _misfit(made, tensors)
    if problem:
        raise StatisticsError(asked, problem, remedy)
    made._put(tensors)
    return made


def _misfit(made: Statistic, tensors: State) -> str:
    """What is wrong with a state, compared with one that was made of a single zero a channel."""
    width = tensors.get("channels", torch.tensor(-1.0))
    channels = int(width) if width.ndim == 0 and width.dtype == torch.int64 else -1
    if isinstance(made, Norm) and channels > 0:
        channels = 1  # they are used up
    # Before anything is made of that size: whether the file holds as much as it claims.
    each = made.bins if isinstance(made, Histogram) else 1
    claimed = channels * (channels if isinstance(made, Covariance) else each)
    if not 0 < claimed <= max(tensor.numel() for tensor in tensors.values()) or channels < 0:
        if set(tensors) == {"samples"}:  # only empty batches were seen
            return ""
        return "The state does not say how many channels it has."
    where = tensors.get("positions", torch.zeros(0, 0, 0))
    zeros = torch.zeros(1, *[1] * where.shape[-1], *([] if made.dim is None else [channels]))
    options: dict[str, Any] = made._options() | {"dim": None if made.dim is None else -1}
    like = type(made)(**options).update(zeros).state
    for key, expected in like.items():
        own = tensors.get(key)
        if own is None and key == "range":
            continue  # nothing but NaN was seen
        most = made.k if isinstance(made, TopK) and key in ("values", "ids", "positions") else 0
        loose = most > 0  # up to k rows
        if own is None or own.dtype != expected.dtype or own.ndim != expected.ndim:
            return f"The state's {key!r} is missing, or of another kind."
        if own.shape[loose:] != expected.shape[loose:] or (loose and len(own) > most):
            return f"The state's {key!r} has the shape {tuple(own.shape)}."
    unknown = sorted(set(tensors) - set(like))
    return f"The state has {', '.join(unknown)[:60]}." if unknown else ""
