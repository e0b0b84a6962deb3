"""Statistics of values that come batch by batch, in constant memory.

    Mean  Variance  Covariance  Histogram  TopK  Norm  Sparsity

Each has its options, which never change, and a state: a few tensors on the CPU. `update` adds a
batch, `merge` adds another statistic of the same options, `result` is the result so far. Sums are
computed in float64 and merged by the formulas of Chan, Golub and LeVeque, so that neither the order
nor the split of the data matters beyond rounding (about 1e-14 of the magnitude of the values);
counts, histograms and top values are exact.

NaN and infinite values are left out and counted in `skipped`, so that one of them does not spoil
hours of measuring. (In a histogram infinities are beyond the range; among top values they are
values.) Values that a mask leaves out are not counted anywhere.

- `Statistic`: the base class; it is in `statistic.py`
- `Bins`, `Norms`, `Tops`: the results that are more than one tensor
- `by_name(statistics)`: the given statistics, each under its name
- `statistic_from(content, tensors, source)`: a saved statistic, with its state checked
- `warn_of_images(place, value, statistics)`: warn that channels may lie along another dimension

`Mean` and its relatives are in `moments.py`, `Histogram` and its relatives in `distributions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hookline.errors import StatisticsError, warn_outside
from hookline.statistics.distributions import Bins, Histogram, Sparsity, TopK, Tops
from hookline.statistics.moments import Covariance, Mean, Norm, Norms, Variance
from hookline.statistics.statistic import State, Statistic

__all__ = [
    "Bins", "Covariance", "Histogram", "Mean", "Norm", "Norms", "Sparsity", "Statistic", "TopK",
    "Tops", "Variance", "by_name", "statistic_from", "warn_of_images",
]  # fmt: skip

_KINDS: dict[str, type[Statistic]] = {
    kind.__name__: kind for kind in (Mean, Variance, Covariance, Histogram, TopK, Norm, Sparsity)
}
_DEEPEST = 64  # dimensions that torch can work on


def by_name(statistics: Any) -> dict[str, Statistic]:
    """Return the given statistics, each under its name."""
    given: list[Any] = [statistics]
    named: dict[Any, Any]
    if isinstance(statistics, Mapping):
        named = dict(cast("Mapping[Any, Any]", statistics))
        given = list(named.values())
    else:
        if isinstance(statistics, Iterable) and not isinstance(statistics, str):
            given = list(cast("Iterable[Any]", statistics))
        named = {type(one).__name__.lower(): one for one in given}
    for one in given:
        if not isinstance(one, Statistic) or type(one) is Statistic:
            asked = f"{one!r} was given as a statistic."
            raise StatisticsError(asked, "It is none.", "Give such as hookline.Mean().")
    if len(named) < len(given):
        raise StatisticsError(
            f"{len(given)} statistics were given.",
            "Two of them are of one kind, and so of one name.",
            "Name them: statistics={'top': TopK(), 'bottom': TopK(largest=False)}.",
        )
    for name in named:
        if not isinstance(name, str):
            asked = f"A statistic was given under the name {name!r:.60}."
            raise StatisticsError(asked, "It is no text.", "Give a name such as 'top'.")
    if not named:
        asked = "Values were to be measured."
        raise StatisticsError(asked, "No statistics were given.", "Give such as [hookline.Mean()].")
    return named


def statistic_from(content: dict[str, Any], tensors: State, source: str) -> Statistic:
    """Return a saved statistic with its state; raise if something does not fit."""
    asked = f"A statistic was to be read from {source!r}."
    remedy = "Give a folder that was written by .save(folder)."
    kind, options = _KINDS.get(str(content.get("statistic"))), content.get("options")
    if kind is None or not isinstance(options, dict):
        found = f"It names {content.get('statistic')!r:.60}, with options {options!r:.60}."
        raise StatisticsError(asked, found, remedy)
    try:
        given = {str(key): value for key, value in cast("dict[Any, Any]", options).items()}
        made = kind(**given)
    except (TypeError, ValueError) as error:
        raise StatisticsError(asked, f"The options do not fit: {error}.", remedy) from None
    if not tensors:
        return made
    problem = _misfit(made, tensors)
    if problem:
        raise StatisticsError(asked, problem, remedy)
    made.load_state(tensors)
    return made


def _misfit(made: Statistic, tensors: State) -> str:
    """Return what is wrong with a state, compared with that of a single zero a channel."""
    width = tensors.get("channels", torch.tensor(-1.0, device="cpu"))
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
    where = tensors.get("positions", torch.zeros(0, 0, 0, device="cpu"))
    if where.ndim != 3 or where.shape[2] > _DEEPEST:
        return f"The state's 'positions' has the shape {tuple(where.shape)}."
    shape = (1, *[1] * where.shape[-1], *([] if made.dim is None else [channels]))
    zeros = torch.zeros(shape, device="cpu")
    options: dict[str, Any] = made.options() | {"dim": None if made.dim is None else -1}
    like = type(made)(**options).update(zeros).state
    for key, expected in like.items():
        own = tensors.get(key)
        if own is None and key == "range":
            continue  # nothing but NaN was seen
        most = made.k if isinstance(made, TopK) and key in ("values", "ids", "positions") else 0
        loose = most > 0  # up to k rows, of each as many
        if own is None or own.dtype != expected.dtype or own.ndim != expected.ndim:
            return f"The state's {key!r} is missing, or of another kind."
        many = loose and not len(own) == len(where) <= most
        if own.shape[loose:] != expected.shape[loose:] or many:
            return f"The state's {key!r} has the shape {tuple(own.shape)}."
    unknown = sorted(set(tensors) - set(like))
    return f"The state has {', '.join(unknown)[:60]}." if unknown else ""


def warn_of_images(place: str, value: Tensor, statistics: Mapping[str, Statistic]) -> None:
    """Warn if the first value at a place may be an image whose columns are measured."""
    kinds = [type(one).__name__ for one in statistics.values() if one.dim == -1]
    if value.ndim > 3 and kinds:
        warn_outside(
            f"The value at {str(place)!r} has the shape {tuple(value.shape)}, and {kinds[0]} was "
            f"asked for along its last dimension. Channels of images lie along the second: give "
            f"{kinds[0]}(dim=1), or dim={value.ndim - 1} if the last is meant."
        )
