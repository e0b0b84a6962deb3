"""The calls of one place in order: one of many is found without going through the others.

- `Entries`: calls by position, each with what was kept of it
- `checks_of(kept)`: what to check of a value on reading
- `Order`: the calls and backward passes of gradients, in order
- `Kept`: what is kept of a value
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Reversible, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias, cast

from torch import Tensor

__all__ = ["Entries", "Kept", "Order", "checks_of"]

# What is kept of a value: the value and what to check on reading. None: nothing (a snapshot). An
# int: the version of the tensor that it is. A dict: versions, and twins of parameters, by id.
Kept = tuple[Any, "int | dict[int, tuple[int, Tensor | None]] | None"]

Arrived: TypeAlias = Mapping[tuple[int, int], Any]  # gradients by call and backward pass

_NONE = -2  # instead of a backward pass, whose numbers are -1 or more: none came so far


def checks_of(kept: Kept) -> dict[int, tuple[int, Tensor | None]]:
    """Return what to check of a value on reading, by the ids of its tensors."""
    value, checks = kept
    if isinstance(checks, int):
        return {id(value): (checks, None)}
    return checks or {}


class Entries(Sequence[tuple[int, "Kept | None"]]):
    """Calls by position, each with what was kept of it; None for one that gave nothing.

    The items are in order and begin with the number of their call; `read` makes an entry of one. By
    default they are entries already, which `tuple` leaves as they are.
    """

    def __init__(
        self, items: Sequence[tuple[int, Any]], read: Callable[[Any], Any] = tuple
    ) -> None:
        self.items, self.read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: Any) -> Any:
        return self.read(self.items[position])

    def __iter__(self) -> Iterator[tuple[int, Kept | None]]:
        return map(self.read, list(self.items))  # more may come meanwhile

    def of_call(self, call: int) -> list[Kept | None]:
        """Return what was kept of one call, in order of backward passes."""
        found: list[Kept | None] = []
        for number in (-1, call):  # a parameter's gradients have no call
            first = bisect_left(self.items, number, key=itemgetter(0))
            last = bisect_right(self.items, number, key=itemgetter(0))
            found += [self.read(item)[1] for item in self.items[first:last]]
        return found


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
