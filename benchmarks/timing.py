"""Time variants of the same work against one another, on a machine that is not quiet.

- `Race` runs its variants in turn, in a new order every round, and compares them.
- `Ratio` is such a comparison, with its standard error.
- `machine` says where the numbers come from.
- `settle_memory` lets malloc keep what is freed, as in any process that has run for a while.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Ratio(NamedTuple):
    fast: float  # by the fast runs
    error: float  # one standard error of it
    median: float  # by the middle runs


class Race:
    """Variants of the same work, timed in turn.

    Neighbours on the machine slow everything down for a while, so a variant is only compared
    with others of the same rounds, and a race is run in several passes with other races in
    between. The order changes every round: no variant always inherits the same caches.

    A "fast" time is the 5th percentile. It drops the disturbed runs as the minimum does, but
    where the same variant was raced against itself, the times that two minima put on top of the
    bare run differed by up to 40 %, those of two 5th percentiles by up to 20 %.
    """

    def __init__(self, variants: dict[str, Callable[[], object]]) -> None:
        self.variants = variants
        self._passes: list[dict[str, list[int]]] = []
        self._shuffle = random.Random(0).shuffle

    def warm_up(self, rounds: int = 5) -> None:
        """Run every variant a few times without timing it."""
        for _ in range(rounds):
            for run in self.variants.values():
                run()

    def run(self, rounds: int) -> None:
        """Add one pass of that many rounds."""
        clock = time.perf_counter_ns
        order = list(self.variants.items())
        times: dict[str, list[int]] = {name: [] for name in self.variants}
        with no_garbage_collection():
            for done in range(rounds):
                self._shuffle(order)
                for name, run in order:
                    start = clock()
                    run()
                    times[name].append(clock() - start)
                if done % 50 == 49:  # what a variant leaves in cycles must not slow the others
                    gc.collect()
        self._passes.append(times)

    @property
    def rounds(self) -> int:
        return len(self._times("bare" if "bare" in self.variants else next(iter(self.variants))))

    def fast(self, name: str, *, without: int | None = None) -> float:
        """The 5th percentile of a variant's times in µs, if asked without one of the passes."""
        return float(np.quantile(self._times(name, without), 0.05)) / 1e3

    def best(self, name: str) -> float:
        """The shortest time, in µs."""
        return float(self._times(name).min()) / 1e3

    def median(self, name: str) -> float:
        """The middle time, in µs."""
        return float(np.median(self._times(name))) / 1e3

    def added(self, name: str, over: str, *, without: int | None = None) -> float:
        """What `name` takes beyond `over` in µs, by the fast time of each."""
        return self.fast(name, without=without) - self.fast(over, without=without)

    def median_added(self, name: str, over: str) -> float:
        """What `name` takes beyond `over` in µs, by the middle difference within a round."""
        return float(np.median(self._times(name) - self._times(over))) / 1e3

    def ratio(self, name: str, reference: str, over: str | None) -> Ratio:
        """What `name` adds over `over`, as a multiple of what `reference` adds.

        Without `over`, it is the ratio of the whole times.
        The error is the jackknife's: from how the ratio moves when each pass is left out.
        """

        def fast(without: int | None = None) -> float:
            if over is None:
                return self.fast(name, without=without) / self.fast(reference, without=without)
            added = self.added(name, over, without=without)
            return added / self.added(reference, over, without=without)

        passes = len(self._passes)
        without_one = np.array([fast(without) for without in range(passes)] if passes > 1 else [0])
        error = float(np.sqrt((passes - 1) * without_one.var()))
        if over is None:
            median = self.median(name) / self.median(reference)
        else:
            median = self.median_added(name, over) / self.median_added(reference, over)
        return Ratio(fast(), error, median)

    def _times(self, name: str, without: int | None = None) -> np.ndarray:
        kept = [times[name] for index, times in enumerate(self._passes) if index != without]
        return np.concatenate(kept)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector out of timed code; what exists already is not scanned meanwhile."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def settle_memory() -> None:
    """Free a block of 30 MB, nearly the largest that changes what glibc's malloc keeps.

    Before that, what is freed goes back to the system and is taken again page by page, more of it
    in one variant than in another by chance; a process that has run for a while is past that.
    """
    torch.empty(30 << 18)


def machine() -> dict[str, str | int | None]:
    """Processor, versions and date, for the result file."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
