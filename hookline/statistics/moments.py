"""Statistics that follow from counts, means and sums of squares.

    Mean  Variance  Covariance  Norm

Two parts of the data are merged by the formulas of Chan, Golub and LeVeque.

- `Norms`: the result of `Norm`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hookline.errors import StatisticsError
from hookline.statistics.statistic import Rows, State, Statistic, sums

__all__ = ["Covariance", "Mean", "Norm", "Norms", "Variance"]


def _moments(values: Tensor, kept: Tensor | None) -> State:
    """Return count, mean and sum of squared differences of each column; `kept` None is all rows."""
    if kept is None:
        count = values.new_full(values.shape[1:], len(values), dtype=torch.int64)
        mean = values.sum(0) / count.clamp(min=1)
        apart = values - mean
    else:
        count = kept.sum(0)
        mean = torch.where(kept, values, 0.0).sum(0) / count.clamp(min=1)
        apart = torch.where(kept, values - mean, 0.0)
    # Correct the squares for the rounding of the mean.
    rest = apart.sum(0).square() / count.clamp(min=1)
    squares = apart.square_().sum(0) - rest
    return {"count": count, "mean": mean, "squares": squares.clamp(min=0)}


def _join_means(one: State, other: State) -> tuple[State, Tensor, Tensor]:
    """Return the joined count and mean, how far the means are apart, and the share of `other`."""
    count = one["count"] + other["count"]
    # In float64: torch would divide integers in float32.
    share = other["count"].to(torch.float64) / count.clamp(min=1)
    apart = other["mean"] - one["mean"]
    return {"count": count, "mean": one["mean"] + apart * share}, apart, share


def _join_moments(one: State, other: State) -> State:
    joined, apart, share = _join_means(one, other)
    squares = one["squares"] + other["squares"] + apart.square() * one["count"] * share
    return joined | {"squares": squares}


@dataclass(frozen=True, eq=False)
class Mean(Statistic):
    """The mean of each channel.

    >>> mean = Mean().update(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))
    >>> mean.update(torch.tensor([[5.0, 50.0]])).result
    tensor([ 3., 30.], dtype=torch.float64)
    """

    def _of(self, rows: Rows) -> State:
        if rows.is_whole():
            moments = _moments(rows.values, None)
            return moments | {"skipped": torch.zeros_like(moments["count"])}
        finite = rows.finite
        return _moments(rows.values, finite) | {"skipped": (rows.kept & ~finite).sum(0)}

    def _join(self, one: State, other: State) -> State:
        return _join_moments(one, other) | sums(one, other, "skipped")

    @property
    def result(self) -> Tensor:
        """The means, in float64; NaN for channels without values."""
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
        """The variances, in float64; NaN for channels with too few values."""
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
        super().__post_init__()
        _need_dim(self)

    def _at_once(self, channels: int) -> int:
        return max(super()._at_once(channels), channels**2)  # as many as the products are

    def _of(self, rows: Rows) -> State:
        values, skipped = _vectors(rows)
        count = torch.full_like(skipped, len(values))
        mean = values.mean(0) if len(values) else values.new_zeros(values.shape[1])
        apart = values - mean
        rest = apart.sum(0)
        products = (apart.mT @ apart).addr_(rest, rest, alpha=-1 / max(1, len(values)))
        return {"mean": mean, "products": products, "count": count, "skipped": skipped}

    def _join(self, one: State, other: State) -> State:
        joined, apart, share = _join_means(one, other)
        products = one["products"] + other["products"]
        products.addr_(apart, apart, alpha=float(one["count"] * share))
        return joined | {"products": products} | sums(one, other, "skipped")

    @property
    def mean(self) -> Tensor:
        return torch.where(self.count > 0, self._total("mean"), torch.nan)

    @property
    def result(self) -> Tensor:
        """Channels × channels, in float64."""
        free = self.count - self.correction
        products = self.state.get("products", torch.zeros(1, 1, device="cpu"))
        return torch.where(free > 0, products / free, torch.nan)


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
        super().__post_init__()
        _need_dim(self)
        if not 0 < self.order < 1e6:
            asked = f"Norm has order={self.order!r}."
            raise StatisticsError(asked, "There is no such length.", "Give 1 or 2.")

    def _of(self, rows: Rows) -> State:
        values, skipped = _vectors(rows)
        lengths = cast("Tensor", torch.linalg.vector_norm(values, self.order, dim=1))[:, None]
        least = lengths.amin(0) if len(lengths) else lengths.new_full((1,), torch.inf)
        most = lengths.amax(0) if len(lengths) else lengths.new_full((1,), -torch.inf)
        return _moments(lengths, None) | {"skipped": skipped[None], "min": least, "max": most}

    def _join(self, one: State, other: State) -> State:
        ends = {
            "min": torch.minimum(one["min"], other["min"]),
            "max": torch.maximum(one["max"], other["max"]),
        }
        return _join_moments(one, other) | sums(one, other, "skipped") | ends

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


def _vectors(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the rows that count, and how many are left out for a NaN or an infinity."""
    if rows.is_whole():
        return rows.values, torch.zeros((), dtype=torch.int64, device=rows.values.device)
    finite = rows.finite.all(1)
    return rows.values[finite], (rows.kept[:, 0] & ~finite).sum()


def _need_dim(statistic: Statistic) -> None:
    if statistic.dim is None:
        name = type(statistic).__name__
        asked = f"{name} was asked for with dim=None."
        raise StatisticsError(
            asked, "It needs vectors.", "Name the dimension along which they lie."
        )
