"""Statistics of a harvest, measured while its rows are written, also across a crash.

- `RankStatistics`: measures the rows of a rank as they are committed
- `merge_ranks(folder, ranks)`: merges the statistics of all ranks
- `are_sound(folder)`: return True if the saved statistics can be read
- `keep_whole(folder, samples)`: return True if the saved statistics are of all samples
- `statistics_path(folder, rank)`: the folder where they are saved

They are measured from the stored rows, so they can always be made again from the store: the saved
state only saves time. A rank saves it now and then; after a crash it reads back the rows that came
later.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.errors import HarvestError, StatisticsError
from hookline.harvests.row_extraction import Rows, numbers_of
from hookline.statistics.all_statistics import Histogram, TopK, by_name, warn_of_images
from hookline.statistics.measuring import Measurements, Statistics
from hookline.statistics.statistic import padded
from hookline.storage.store import Store
from hookline.storage.store_files import read_index

__all__ = ["RankStatistics", "are_sound", "keep_whole", "merge_ranks", "statistics_path"]

_EVERY = 30.0  # seconds between two saves
_AT_ONCE = 1024  # samples that are read back together


def statistics_path(folder: Path, rank: int | None = None) -> Path:
    """Return the folder with the statistics of a rank, or of all ranks."""
    return folder / ("statistics" if rank is None else f"rank{rank:05d}.statistics")


class RankStatistics:
    """The statistics of the rows that one rank has stored."""

    def __init__(self, statistics: Statistics, folder: Path, rank: int, world: int) -> None:
        self._kinds = by_name(statistics)
        self._folder, self._rank, self._world = folder, rank, world
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

    def check(self, ids: Any) -> None:
        """Raise if the ids cannot identify top samples; on one rank, words are numbered."""
        ranked = any(isinstance(one, TopK) for one in self._kinds.values())
        if not ranked or ids is None or numbers_of(ids) is not None:
            return
        words = all(isinstance(one, str) for one in ids)
        if self._world > 1 or not words:
            raise HarvestError(
                "The samples with the top values were to be found.",
                f"Their ids are words: each of {self._world} ranks would count its own from 0."
                if words
                else "Some of their ids are negative.",
                "Give each sample a whole number from 0 on as its id, or leave out TopK.",
            )

    def update(self, rows: Rows, samples: int, ids: Any) -> None:
        """Add the rows of a batch."""
        self.check(ids)
        numbers = numbers_of(ids)
        for place, value in rows.items():
            tensor, mask = (value, None) if isinstance(value, Tensor) else padded(value)
            if place not in self.found.statistics:
                warn_of_images(place, tensor, self._kinds)
            own = self.found.statistics.setdefault(
                place, {name: one.fresh() for name, one in self._kinds.items()}
            )
            single = tensor.ndim == (1 if mask is None else 2)  # a row is a number: one channel
            for one in own.values():
                one.update(tensor[..., None] if single and one.dim else tensor, mask, numbers)
        self.samples += samples

    def save(self, batches: int, *, now: bool = False) -> None:
        """Save the state after so many batches, if the last time is long ago or `now`.

        The first batch is always saved.
        """
        count, when = self._saved
        first = count < 0
        if self.samples != count and (now or first or time.monotonic() - when > _EVERY):
            self.found.calls = dict.fromkeys(self.found.statistics, batches)
            self.found.save(statistics_path(self._folder, self._rank))
            self._saved = self.samples, time.monotonic()

    def catch_up(self) -> None:
        """Begin with the saved state, and add the rows that were committed since."""
        path = statistics_path(self._folder, self._rank)
        index = read_index(self._folder, self._rank)
        if path.is_dir():
            try:
                self._put(Measurements.load(path), index.samples)
            except StatisticsError:  # half written, or of other statistics: made again
                self.found, self.samples = Measurements(), 0
        store = Store(self._folder, {}, [index])
        while self.samples < index.samples:
            stop = min(self.samples + _AT_ONCE, index.samples)
            rows: Rows = {place: store[place][self.samples : stop] for place in store.places()}
            self.update(rows, stop - self.samples, store.ids_between(self.samples, stop))

    def _put(self, saved: Measurements, committed: int) -> None:
        """Load the saved state if its kinds and its number of samples fit what was committed."""
        same = all(repr(own) == self.kinds for own in saved.statistics.values())
        if same and 0 <= _samples(saved) <= committed:
            self.found, self.samples = saved, _samples(saved)
            self._saved = self.samples, time.monotonic()


def _samples(found: Measurements) -> int:
    """Return the number of samples that all statistics have seen; -1 if it is unknown."""
    states = [one.state for own in found.statistics.values() for one in own.values()]
    counts = {int(state["samples"]) if "samples" in state else -1 for state in states}
    return counts.pop() if len(counts) == 1 else -1


def merge_ranks(folder: Path, ranks: int) -> bool:
    """Merge and save the statistics of all ranks; return False if there are none."""
    found = Measurements()
    for rank in range(ranks):
        found.merge(Measurements.load(statistics_path(folder, rank)))
    found.save(statistics_path(folder))
    return bool(found.statistics)


def are_sound(folder: Path) -> bool:
    """Return True if the statistics of all ranks can be read."""
    try:
        Measurements.load(statistics_path(folder))
    except StatisticsError:
        return False
    return True


def keep_whole(folder: Path, samples: int) -> bool:
    """Return True if there are statistics of so many samples; remove those of others."""
    path = statistics_path(folder)
    with suppress(StatisticsError):
        if _samples(Measurements.load(path)) == samples:
            return True
    if path.is_dir():
        shutil.rmtree(path)
    return False
