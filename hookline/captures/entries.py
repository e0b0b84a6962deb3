"""The calls of one place in order: one of many is found without going through the others.

- `Entries`: calls by position, each with what was kept of it
- `Values`: what was kept of values, one for each call
- `Gradients`: what was kept of gradients, which come by call and backward pass
- `Order`: the calls and backward passes of gradients, in order
- `Kept`: what is kept of a value
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Reversible, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias, cast

from torch import Tensor

__all__ = ["Entries", "Gradients", "Kept", "Order", "Values"]

# What is kept of a value: the value and what to check on reading. None: nothing (a snapshot). An
# int: the version of the tensor that it is. A dict: versions, and twins of parameters, by id.
Kept = tuple[Any, "int | dict[int, tuple[int, Tensor | None]] | None"]

Arrived: TypeAlias = Mapping[tuple[int, int], Any]  # gradients by call and backward pass
Gather: TypeAlias = Callable[[int, Any], "Kept | None"]

_NONE = -2  # instead of a backward pass, whose numbers are -1 or more: none came so far


class Entries(Sequence[tuple[int, "Kept | None"]]):
    """Calls by position, each with what was kept of it; None for one that gave nothing."""

    @abstractmethod
    def of_call(self, call: int) -> list[Kept | None]:
        """Return what was kept of one call, in order of backward passes."""


class Values(Entries):
    """What was kept of values, in order of the numbers of their calls."""

    def __init__(self, values: Sequence[tuple[int, Kept | None]]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: Any) -> Any:
        return cast(Any, self.values[position])

    def of_call(self, call: int) -> list[Kept | None]:
        first = bisect_left(self.values, call, key=itemgetter(0))
        last = bisect_right(self.values, call, key=itemgetter(0))
        return [kept for _, kept in self.values[first:last]]


class Gradients(Entries):
    """What was kept of gradients, put together by `gather` when it is read."""

    def __init__(self, keys: list[tuple[int, int]], grads: Arrived, gather: Gather) -> None:
        self.keys, self.grads, self.gather = keys, grads, gather

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, position: Any) -> Any:
        return self._of(cast("tuple[int, int]", self.keys[position]))

    def __iter__(self) -> Iterator[tuple[int, Kept | None]]:
        return map(self._of, list(self.keys))  # more may come meanwhile

    def of_call(self, call: int) -> list[Kept | None]:
        found: list[Kept | None] = []
        for number in {-1, call}:  # a parameter's have no call
            first, last = self._ends(number)
            found += [self._of(key)[1] for key in self.keys[first:last]]
        return found

    def _ends(self, call: int) -> tuple[int, int]:
        """Return where the keys of a call begin and end."""
        first, last = (call, _NONE), (call + 1, _NONE)
        return bisect_left(self.keys, first), bisect_left(self.keys, last)

    def _of(self, key: tuple[int, int]) -> tuple[int, Kept | None]:
        parts = self.grads.get(key)
        return key[0], None if parts is None else self.gather(key[0], parts)


class Order:
    """The calls and backward passes of gradients, in order. What is new is put in on reading.

    Threads that read at the same time find the same; there is no lock that an interrupt could leave
    locked.
    """

    def __init__(self) -> None:
        # The keys, and how many calls and gradients of each kind are in them.
        self._state: tuple[list[tuple[int, int]], tuple[int, ...]] = ([], (0, 0, 0))

    def update(
        self, grads: Arrived, shapes: Mapping[int, Any], reasons: Mapping[int, Any]
    ) -> list[tuple[int, int]]:
        """Put in what has come since; nothing is ever taken out of the dicts."""
        keys, known = self._state
        kinds: tuple[Mapping[Any, Any], ...] = (shapes, reasons, grads)
        new = [_since(count, kind) for count, kind in zip(known, kinds, strict=True)]
        if not any(new):
            return keys
        keys = list(keys)
        for call in sorted([*new[0], *new[1]]):
            at = bisect_left(keys, (call, _NONE))
            if at == len(keys) or keys[at][0] != call:
                keys.insert(at, (call, _NONE))
        for key in sorted(new[2]):
            at = bisect_left(keys, (key[0], _NONE))
            if at < len(keys) and keys[at] == (key[0], _NONE):
                keys[at] = key
            else:
                insort(keys, key)
        self._state = keys, tuple(n + len(found) for n, found in zip(known, new, strict=True))
        return keys


def _since(known: int, entries: Mapping[Any, Any]) -> list[Any]:
    """Return the keys that were added to a dict after the first `known`."""
    count = -1
    found: list[Any] = []
    while count != len(entries):  # else more have come from another thread
        count = len(entries)
        found = list(islice(reversed(cast("Reversible[Any]", entries)), count - known))
    return found
