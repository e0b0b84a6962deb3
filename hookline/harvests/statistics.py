"""Statistics of a harvest: measured while the rows are written, right after a crash too.

- `Measuring`: takes in the rows of a rank as they are committed
- `merge_ranks(folder, ranks)`: those of all ranks as one

What is measured is what is stored, so that it can always be made again from the store: what was
saved of it is only a short cut. A rank saves now and then; after a crash the rows that came later
are read back.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.errors import HarvestError, StatisticsError
from hookline.harvests.rows import Rows, numbers_of
from hookline.statistics.kinds import Histogram
from hookline.statistics.measuring import Measurements, Statistics, _named
from hookline.storage.files import read_index
from hookline.storage.store import Store

__all__ = ["Measuring", "merge_ranks", "statistics_path"]

_EVERY = 30.0  # seconds between two saves
_AT_ONCE = 1024  # samples that are read back together


def statistics_path(folder: Path, rank: int | None = None) -> Path:
    """Where the statistics of a rank are, or those of all."""
    return folder / ("statistics" if rank is None else f"rank{rank:05d}.statistics")


class Measuring:
    """The statistics of what one rank has stored."""

    def __init__(self, statistics: Statistics, folder: Path, rank: int, world: int) -> None:
        self._kinds = _named(statistics)
        self._folder, self._rank = folder, rank
        self.kinds = repr(self._kinds)
        self.found = Measurements()
        self.samples = 0
        self._saved = (-1, 0.0)  # at how many samples, and when
        for name, one in self._kinds.items():
            if world > 1 and isinstance(one, Histogram) and one.range is None:
                raise HarvestError(
                    f"The histogram {name!r} was to be measured on {world} ranks.",
                    "It has no range: each rank would find its own, and they could not be joined.",
                    "Give it one, as in Histogram(range=(-10.0, 10.0)).",
                )

    def update(self, rows: Rows, samples: int, ids: Any) -> None:
        """Take in the rows of a batch."""
        numbers = numbers_of(ids)
        for place, value in rows.items():
            own = self.found.statistics.setdefault(
                place, {name: one.fresh() for name, one in self._kinds.items()}
            )
            tensor, mask = (value, None) if isinstance(value, Tensor) else _padded(value)
            for one in own.values():
                one.update(tensor, mask, numbers)
            self.found.calls[place] = self.found.calls.get(place, 0) + 1
        self.samples += samples

    def save(self, *, now: bool = False) -> None:
        """Save, if the last time is long ago or `now`; the first batch is always saved."""
        count, when = self._saved
        first = count < 0
        if self.samples != count and (now or first or time.monotonic() - when > _EVERY):
            self.found.save(statistics_path(self._folder, self._rank))
            self._saved = self.samples, time.monotonic()

    def catch_up(self) -> None:
        """Begin with what was saved, and take in what was committed since."""
        path = statistics_path(self._folder, self._rank)
        index = read_index(self._folder, self._rank)
        if path.is_dir():
            try:
                self._put(Measurements.load(path), index.samples)
            except StatisticsError:  # half written, or of other statistics: made again
                self.found, self.samples = Measurements(), 0
        store = Store(self._folder, {}, [index])
        ids = store.ids if self.samples < index.samples else None
        while self.samples < index.samples:
            stop = min(self.samples + _AT_ONCE, index.samples)
            rows: Rows = {place: store[place][self.samples : stop] for place in store.places()}
            names = None if ids is None else ids[self.samples : stop]
            self.update(rows, stop - self.samples, names)

    def _put(self, saved: Measurements, committed: int) -> None:
        """Take what was saved, if it is of the same kinds and of no more than was committed."""
        counts: set[int] = set()
        for own in saved.statistics.values():
            if [repr(one) for one in own.values()] != [repr(o) for o in self._kinds.values()]:
                return
            counts |= {int(one.state.get("samples", torch.tensor(-1))) for one in own.values()}
        if len(counts) == 1 and 0 <= max(counts) <= committed:
            self.found, self.samples = saved, counts.pop()
            self._saved = self.samples, time.monotonic()


def _padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Samples of varying length as one tensor, and where it holds something."""
    lengths = torch.tensor([len(one) for one in samples])
    value = pad_sequence(samples, batch_first=True)
    return value, torch.arange(value.shape[1])[None] < lengths[:, None]


def merge_ranks(folder: Path, ranks: int) -> Measurements | None:
    """Join what all ranks measured and save it beside the store; None if they measured nothing."""
    found = Measurements()
    for rank in range(ranks):
        path = statistics_path(folder, rank)
        if path.is_dir():
            found.merge(Measurements.load(path))
    if not found.statistics:
        return None
    found.save(statistics_path(folder))
    return found
