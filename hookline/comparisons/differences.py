"""The differences between two runs, place by place.

- `Comparison`: the result of `compare`
- `Difference`: the difference at one place
- `measure_difference(a, b)`: largest error, relative error and cosine of two tensors
- `tolerance_of(a, b)`: the relative error that two dtypes explain; `COARSE` is the largest
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.errors import NotCaptured
from hookline.text_tables import Tabled, pandas, show_number
from hookline.values.quantisation import is_quantised

__all__ = ["COARSE", "Comparison", "Difference", "Tolerance", "measure_difference", "tolerance_of"]

Tolerance = float | Mapping[torch.dtype, float]
_MOST = 60  # rows that are shown

# Errors that rounding explains after some dozens of layers; whole numbers must be equal.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COARSE = 0.2  # quantised tensors, and floats of 8 bits or fewer


@dataclass
class Difference:
    """The difference between the values of two models at one place."""

    place: str
    place_b: str
    shape: str
    dtype: str
    dtype_b: str
    calls: int  # the number of calls that were compared
    call: int  # where the relative error is the largest
    error: float  # the largest absolute error; infinite where only one value is finite
    relative: float  # the norm of the difference, as a multiple of the norm of the first value
    cosine: float  # of the two values as vectors, where both are finite; NaN if nowhere
    tolerance: float
    remark: str = ""  # says why the values cannot be compared

    @property
    def diverges(self) -> bool:
        """True if the relative error exceeds the tolerance, or the values cannot be compared."""
        return not self.relative <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; numbers that are not finite become None."""
        found = {**asdict(self), "diverges": self.diverges}
        wild = (n for n, v in found.items() if isinstance(v, float) and not math.isfinite(v))
        return found | dict.fromkeys(wild)


class Comparison(Tabled[Difference]):
    """The differences of two runs in the order of the calls; `first` is where they diverge.

    >>> from torch import nn
    >>> from hookline import compare
    >>> model = nn.Sequential(nn.Identity(), nn.Softplus(beta=1), nn.ReLU())
    >>> other = nn.Sequential(nn.Identity(), nn.Softplus(beta=2), nn.ReLU())
    >>> comparison = compare(model, other, torch.ones(2))
    >>> comparison.equal, comparison.first.place, round(comparison.first.error, 2)
    (False, '1', 0.25)
    """

    def __init__(self, models: tuple[str, str]) -> None:
        self.models = models
        self.rows = []
        self.only_a: list[str] = []  # places and parts where only the first model has a value
        self.only_b: list[str] = []
        self.notes: list[str] = []

    @property
    def first(self) -> Difference | None:
        """The first place, in the order of the calls, where the two diverge."""
        return next((row for row in self.rows if row.diverges), None)

    @property
    def equal(self) -> bool:
        """True if they are within the tolerance at every place that both have."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.equal

    def __getitem__(self, place: str) -> Difference:
        """Return the difference at a place, under its name in either model."""
        for row in self.rows:
            if place in (row.place, row.place_b):
                return row
        held = ", ".join(repr(row.place) for row in self.rows[:6])
        raise NotCaptured(
            f"The difference at {place!r} was asked for.",
            f"There is one at {held}{', …' if len(self.rows) > 6 else ''}.",
            "Name one of these; only_a and only_b list what one model has alone.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return {
            "models": list(self.models),
            "equal": self.equal,
            "first": None if self.first is None else self.first.place,
            "places": [row.to_dict() for row in self.rows],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "notes": list(self.notes),
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with one row a place, in the order of the calls."""
        frame = pandas("comparison.to_pandas()").DataFrame([asdict(row) for row in self.rows])
        frame["diverges"] = [row.diverges for row in self.rows]
        return frame

    def _title(self) -> str:
        a, b = self.models
        first = self.first
        if first is None:
            found = "equal within the tolerance"
        else:
            error = f"relative error {show_number(first.relative)}"
            found = f"they part at {first.place!r}: {first.remark or error}"
            found += f" (tolerance {show_number(first.tolerance)})" if not first.remark else ""
        return f"{a} and {b} at {len(self)} place{'s' * (len(self) != 1)}: {found}"

    def _shown(self) -> list[Difference]:
        start = 0
        if len(self.rows) > _MOST and self.first is not None:
            start = min(max(self.rows.index(self.first) - 10, 0), len(self.rows) - _MOST)
        return self.rows[start : start + _MOST]

    def _cells(self) -> list[list[str]]:
        rows = self._shown()
        columns: dict[str, list[str]] = {"place": [row.place or "''" for row in rows]}
        if any(row.place != row.place_b for row in rows):
            columns["in b"] = [row.place_b or "''" for row in rows]
        columns["shape"] = [row.shape for row in rows]
        columns["dtype"] = [
            row.dtype if row.dtype == row.dtype_b else f"{row.dtype}, {row.dtype_b}" for row in rows
        ]
        if any(row.calls > 1 for row in rows):
            columns["calls"] = [str(row.calls) for row in rows]
        columns["error"] = [show_number(row.error) for row in rows]
        columns["relative"] = [show_number(row.relative) for row in rows]
        columns["cosine"] = [f"{row.cosine:.5f}" for row in rows]
        told = [row.remark or ("diverges" if row.diverges else "") for row in rows]
        if any(told):
            columns["remark"] = told
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

    def _remarks(self) -> list[str]:
        found = list(self.notes)
        for name, places in (("first", self.only_a), ("second", self.only_b)):
            if places:
                listed = ", ".join(places[:6]) + ", …" * (len(places) > 6)
                found.append(f"only in the {name} model: {listed}")
        if len(self.rows) > _MOST:
            found.append(f"{len(self.rows) - _MOST} more rows in comparison.rows")
        return found


def tolerance_of(a: Tensor, b: Tensor, given: Tolerance | None = None) -> float:
    """Return the allowed relative error: the given one, or what the coarser dtype explains.

    >>> tolerance_of(torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
    0.05
    """
    if given is not None and not isinstance(given, Mapping):
        return float(given)
    return max(_tolerance(tensor, given or {}) for tensor in (a, b))


def _tolerance(tensor: Tensor, given: Mapping[torch.dtype, float]) -> float:
    dtype = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
    if dtype in given:
        return given[dtype]
    if dtype in _TOLERANCES:
        return _TOLERANCES[dtype]
    return COARSE if is_quantised(tensor) or dtype.is_floating_point else 0.0


def measure_difference(a: Tensor, b: Tensor) -> tuple[float, float, float, str]:
    """Return the largest error, the relative error, the cosine and a remark for two tensors.

    >>> measure_difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))[:2]
    (0.5, 0.1)

    The tensors have one shape. NaN in both, or the same infinity in both, counts as equal.
    """
    if not a.numel():
        return 0.0, 0.0, 1.0, ""
    given = a, b
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).masked_fill(same, 0)
    if not any(tensor.is_floating_point() for tensor in given):
        # Different whole numbers beyond 2 ** 53 may be the same in float64.
        gap = torch.where(same, (given[0].long() - given[1].long()).double(), gap)
    good = gap.isfinite()
    remark = "" if bool(good.all()) else _broken(a, b, int((~good).sum()))
    error = math.inf if remark else float(gap.abs().max())
    finite = a.isfinite() & b.isfinite()
    a, b = a.masked_fill(~finite, 0).flatten(), b.masked_fill(~finite, 0).flatten()
    top = max(float(a.abs().max()), float(b.abs().max()))
    if top and not 1e-100 < top < 1e100:  # else squares are 0, or infinite
        a, b, gap = a / top, b / top, gap / top
    length, other, apart = (math.sqrt(float(t.square().sum())) for t in (a, b, gap))
    distance = math.inf if remark else apart
    relative = distance / length if length else math.inf if distance else 0.0
    cosine = float(a @ b) / (length * other) if length and other else float(length == other)
    if remark and not bool(finite.any()):
        cosine = math.nan
    return error, relative, cosine, remark


def _broken(a: Tensor, b: Tensor, count: int) -> str:
    found = [
        f"{name} in the {which}"
        for tensor, which in ((a, "first"), (b, "second"))
        for name, there in (("NaN", tensor.isnan()), ("inf", tensor.isinf()))
        if bool(there.any())
    ]
    return f"{' and '.join(found)}, {count} of {a.numel()} differ"
