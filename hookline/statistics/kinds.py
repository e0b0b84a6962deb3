"""Statistics of values that come batch by batch, in constant memory.

    Mean  Variance  Covariance  Histogram  TopK  Norm  Sparsity

Each holds its options, which never change, and a state: a few tensors on the CPU. `update` takes
a batch in, `merge` another statistic of the same options, `result` is what was found so far.
Sums are taken in float64 and joined by the formulas of Chan, Golub and LeVeque, so that neither
the order nor the way in which the data was split matters beyond rounding (about 1e-14 of the
magnitude of the values); counts, histograms and top values are exact.

NaN and infinite values are left out and counted in `skipped`, so that one of them does not spoil
hours of measuring. (In a histogram infinities are beyond the range, among top values they are
values.) What a mask leaves out is not counted anywhere.

- `Statistic`: what they have in common; `accumulation.py` has it
- `Bins`, `Norms`, `Tops`: the results that are more than one tensor
- `statistic_from(spelled, tensors, source)`: one that was saved, with its state checked

`Mean` and its kin are in `moments.py`, `Histogram` and its kin in `distributions.py`; this file
knows all of them, and reads them back.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hookline.errors import StatisticsError
from hookline.statistics.accumulation import State, Statistic
from hookline.statistics.distributions import Bins, Histogram, Sparsity, TopK, Tops
from hookline.statistics.moments import Covariance, Mean, Norm, Norms, Variance

__all__ = [
    "Bins", "Covariance", "Histogram", "Mean", "Norm", "Norms", "Sparsity", "Statistic", "TopK",
    "Tops", "Variance", "statistic_from",
]  # fmt: skip

_KINDS: dict[str, type[Statistic]] = {
    kind.__name__: kind for kind in (Mean, Variance, Covariance, Histogram, TopK, Norm, Sparsity)
}
_DEEPEST = 64  # dimensions that torch can work on


def statistic_from(spelled: dict[str, Any], tensors: State, source: str) -> Statistic:
    """The statistic that was spelled, with its state; what does not fit is an error."""
    asked = f"A statistic was to be read from {source!r}."
    remedy = "Give a folder that was written by .save(folder)."
    kind, options = _KINDS.get(str(spelled.get("statistic"))), spelled.get("options")
    if kind is None or not isinstance(options, dict):
        found = f"It names {spelled.get('statistic')!r:.60}, with options {options!r:.60}."
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
    if where.ndim != 3 or where.shape[2] > _DEEPEST:
        return f"The state's 'positions' has the shape {tuple(where.shape)}."
    zeros = torch.zeros(1, *[1] * where.shape[-1], *([] if made.dim is None else [channels]))
    options: dict[str, Any] = made._options() | {"dim": None if made.dim is None else -1}
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
