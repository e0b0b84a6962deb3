"""Assign the batches of a harvest to ranks, and skip those that were done.

- `BatchSource`: batches by their number, from a loader, a list, any iterable, or a function
- `RankShare`: the numbers of the batches of one rank
- `rank_and_world_size()`: the rank of this process, and the number of ranks
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from hookline.errors import HarvestError
from hookline.isolation.batches import is_series, not_series_error

__all__ = ["BatchSource", "RankShare", "rank_and_world_size"]


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as the launcher has set them.

    Without a launcher they are 0 and 1.
    """
    rank, world = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    try:
        found = int(rank or 0), int(world or 1)
    except ValueError:
        found = -1, 0
    if not 0 <= found[0] < found[1] or (found[1] > 1 and not rank):
        raise HarvestError(
            "A harvest was to begin on one of several ranks.",
            f"The launcher says RANK={rank} and WORLD_SIZE={world}.",
            "Set both, or neither.",
        )
    return found


@dataclass(frozen=True)
class RankShare:
    """The batches of one rank: every `world`-th, those behind `last`.

    >>> share = RankShare(rank=1, world=2, last=3)
    >>> [number for number in range(10) if share.takes(number)]
    [5, 7, 9]

    To check that the data is the same, all ranks read batch 0, and read the last batch that is
    done again.
    """

    rank: int
    world: int
    last: int = -1  # the last batch that is committed

    def takes(self, number: int) -> bool:
        """Return True if this rank runs the model on the batch."""
        return number > self.last and number % self.world == self.rank

    def needs(self, number: int) -> bool:
        """Return True if the batch has to be loaded."""
        return number in (0, self.last) or self.takes(number)

    def size(self, batches: int) -> int:
        """Return how many of so many batches this rank has still to take."""
        first = self.rank if self.last < 0 else self.last + self.world
        return len(range(first, batches, self.world))

    def done(self) -> int:
        """Return how many of its batches are done."""
        return len(range(self.rank, self.last + 1, self.world))


class BatchSource:
    """Batches by their number.

    A list, and a plain DataLoader over a map-style data set, load only the batches that are needed;
    anything else is read from the start. A function is called, with the number of the first batch
    that is needed if it takes an argument: then its data begins with that batch.
    """

    def __init__(self, data: Any) -> None:
        self._data: Any = data
        self._begins = 0  # the number of the first batch that the data has
        self._seen = -1  # the number of the last batch that was come to
        self.skips = False  # True if batch 0 may never be seen
        self._called = callable(data) and not isinstance(data, Iterable)
        if not self._called and not is_series(data):
            raise not_series_error(data, HarvestError)
        if self._called:
            self.skips = _takes_argument(self._data)

    def begin(self, first: int) -> None:
        """Call the data, if it is a function."""
        if self._called:
            self._begins = first if self.skips else 0
            self._data = self._data(first) if self.skips else self._data()
            if not is_series(self._data):
                raise HarvestError(
                    "The function that was given as data was called.",
                    f"It returned a {type(self._data).__name__}.",
                    "Let it return batches, or be a generator of them.",
                )
        _refuse_shares(self._data)

    @property
    def length(self) -> int | None:
        """The number of batches, if it is known."""
        try:
            return len(self._data) + self._begins
        except (TypeError, RuntimeError):  # some loaders know only once they have begun
            return None

    @property
    def batches(self) -> int | None:
        """The number of batches after all were read; None if none came, or they are not counted."""
        counted = self.length is None and self._seen >= 0 and not self.jumps
        return self._seen + 1 if counted else self.length

    @property
    def jumps(self) -> bool:
        """True if only the batches that are needed are loaded."""
        return type(self._data) in (list, tuple) or (_can_skip(self._data) and not self._begins)

    @property
    def last(self) -> int:
        """The number of the last batch, as far as it is known by now."""
        return (self.length or 0) - 1 if self.jumps else self._seen

    def numbered(self, share: RankShare) -> Iterator[tuple[int, Any]]:
        """Yield the batches that a share needs, with their numbers, in order."""
        data = self._data
        if type(data) in (list, tuple):
            start = self._begins
            yield from ((n + start, data[n]) for n in range(len(data)) if share.needs(n + start))
        elif self.jumps:
            yield from zip(filter(share.needs, count()), _part(data, share), strict=False)
        else:
            for number, batch in enumerate(data, self._begins):
                self._seen = number
                if share.needs(number):
                    yield number, batch


def _can_skip(data: Any) -> bool:
    """Return True for a plain loader that knows beforehand which samples a batch has."""
    loader = type(data) is DataLoader and data.batch_sampler is not None
    return loader and not isinstance(data.dataset, IterableDataset)


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )


class _SomeBatches:
    """A batch sampler without the batches that are not needed, so that these are never loaded."""

    def __init__(self, sampler: Any, share: RankShare) -> None:
        self.sampler, self.share = sampler, share

    def __iter__(self) -> Iterator[Any]:
        return (batch for n, batch in enumerate(self.sampler) if self.share.needs(n))


def _part(loader: DataLoader[Any], share: RankShare) -> DataLoader[Any]:
    """Return the same loader for some of its batches."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator", "prefetch_factor",
    )  # fmt: skip
    options: dict[str, Any] = {name: getattr(loader, name) for name in names}
    some = cast("Any", _SomeBatches(loader.batch_sampler, share))
    return DataLoader(loader.dataset, batch_sampler=some, **options)


def _refuse_shares(data: Any) -> None:
    """Raise for a loader that already gives each rank its share."""
    samplers = [getattr(data, name, None) for name in ("sampler", "batch_sampler")]
    samplers.append(getattr(samplers[1], "sampler", None))
    for sampler in samplers:
        for name in ("num_replicas", "num_processes"):
            if getattr(sampler, name, 1) not in (0, 1):
                raise HarvestError(
                    f"A loader with a {type(sampler).__name__} was given as data.",
                    "It gives each rank a share already, and may repeat samples to make them even.",
                    "Give a plain loader: a harvest shares the batches out by itself.",
                )
