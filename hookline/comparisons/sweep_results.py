"""The effects of changes on a metric, by place and position.

- `Sweep`: the result of `sweep`
- `Effect`: the metric with the change at one place and position
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite, isnan
from typing import Any, cast

import torch
from torch import Tensor

from hookline.errors import NotCaptured
from hookline.text_tables import Tabled, pandas, show_number

__all__ = ["Effect", "Sweep"]

_MOST = 60  # rows that are shown


@dataclass
class Effect:
    """The metric with the change at one place and position; None is the whole value."""

    place: str
    position: int | None
    value: float  # the metric; an estimate if the sweep was approximate
    change: float  # how far it is from that of the corrupt run
    share: float | None  # that, as a share of the way from the corrupt run to the clean one


class Sweep(Tabled[Effect]):
    """The effect of a change on a metric, place by place and position by position.

    >>> from torch import nn
    >>> from hookline import sweep
    >>> model = nn.Sequential(nn.Identity(), nn.Linear(2, 1, bias=False))
    >>> _ = nn.init.constant_(model[1].weight, 1.0)
    >>> clean, corrupt = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    >>> found = sweep(model, clean, corrupt, "0", lambda out: out.sum(), positions="all")
    >>> found.clean, found.corrupt, found.matrix
    (7.0, 2.0, tensor([[2., 3.]], dtype=torch.float64))
    """

    def __init__(self, clean: float, corrupt: float, approximate: bool) -> None:
        self.clean, self.corrupt, self.approximate = clean, corrupt, approximate
        self.rows = []
        self.runs = 0  # forwards, besides those of the clean and the corrupt batch
        self.notes: list[str] = []

    def add(self, place: str, position: int | None, change: float) -> None:
        """Add one result."""
        gap = self.clean - self.corrupt
        share = change / gap + 0.0 if gap else None  # no -0
        self.rows.append(Effect(place, position, self.corrupt + change, change, share))

    @property
    def places(self) -> list[str]:
        """The places, in model order: the rows of the matrix."""
        return list(dict.fromkeys(row.place for row in self.rows))

    @property
    def positions(self) -> list[int | None]:
        """The positions: the columns of the matrix; `[None]` if whole values were changed."""
        found = list(dict.fromkeys(row.position for row in self.rows))
        return sorted(found, key=lambda p: -1 if p is None else p)

    @property
    def matrix(self) -> Tensor:
        """The effects, places × positions, for a heatmap; NaN where there is no such position."""
        found = {(row.place, row.position): row.change for row in self.rows}
        nothing = float("nan")
        rows = [[found.get((place, p), nothing) for p in self.positions] for place in self.places]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    @property
    def shares(self) -> Tensor:
        """The effects as shares of the way from the corrupt run to the clean one."""
        gap = self.clean - self.corrupt
        return self.matrix / gap if gap else torch.full_like(self.matrix, torch.nan)

    @property
    def best(self) -> Effect:
        """The largest effect."""
        return max(self.rows, key=_size)

    def __getitem__(self, key: Any) -> Effect:
        """Return `found[place]`, or `found[place, position]`."""
        place, position = cast("tuple[Any, Any]", key if isinstance(key, tuple) else (key, None))
        for row in self.rows:
            if (row.place, row.position) == (place, position):
                return row
        held = ", ".join(f"[{row.place!r}, {row.position}]" for row in self.rows[:4])
        raise NotCaptured(
            f"What the change does at {place!r}, position {position}, was asked for.",
            f"There are {len(self.rows)} results: {held}{', …' if len(self.rows) > 4 else ''}.",
            "Name one of these.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; numbers that are not finite become None."""
        return {
            "clean": _finite(self.clean),
            "corrupt": _finite(self.corrupt),
            "approximate": self.approximate,
            "places": self.places,
            "positions": self.positions,
            "effects": [{n: _finite(v) for n, v in asdict(row).items()} for row in self.rows],
            "notes": list(self.notes),
        }

    def to_pandas(self) -> Any:
        """Return a tidy pandas DataFrame with one row a place and position."""
        frame = pandas("sweep.to_pandas()").DataFrame([asdict(row) for row in self.rows])
        frame.attrs.update(clean=self.clean, corrupt=self.corrupt, approximate=self.approximate)
        return frame

    def _title(self) -> str:
        ends = f"metric {show_number(self.corrupt)} corrupt, {show_number(self.clean)} clean"
        size = f"{_many(self.places, 'place')} × {_many(self.positions, 'position')}"
        if self.positions == [None]:
            size = _many(self.places, "place")
        return f"Sweep over {size}{', approximate' if self.approximate else ''}: {ends}"

    def _cells(self) -> list[list[str]]:
        rows = self.rows
        if len(rows) > _MOST:
            rows = sorted(rows, key=_size, reverse=True)[:_MOST]
        columns = {"place": [row.place or "''" for row in rows]}
        if self.positions != [None]:
            columns["position"] = [str(row.position) for row in rows]
        columns["metric"] = [show_number(row.value) for row in rows]
        columns["change"] = [show_number(row.change) for row in rows]
        if self.clean != self.corrupt:
            columns["share"] = ["" if row.share is None else f"{row.share:.1%}" for row in rows]
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

    def _remarks(self) -> list[str]:
        found = list(self.notes)
        if len(self.rows) > _MOST:
            found.append(f"the {_MOST} largest changes of {len(self.rows)}; all are in sweep.rows")
        return found


def _size(row: Effect) -> float:
    return -1.0 if isnan(row.change) else abs(row.change)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _many(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
