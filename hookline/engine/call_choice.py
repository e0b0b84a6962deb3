"""Which calls of a module are meant: the `calls=` of captures and edits.

- `Calls`: the calls that were asked for
- `as_calls(calls)`: parse a user's `calls=`, which is a `Which`
- `ranges(numbers)`: numbers in a few characters
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, TypeAlias, cast

from hookline.errors import ChangeError

__all__ = ["Calls", "Which", "as_calls", "ranges"]

Which: TypeAlias = 'int | slice | Iterable[int] | Literal["prompt", "generated"]'

STEPS = ("prompt", "generated")


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that were asked for: by their numbers, or by the step of a generation."""

    numbers: Sequence[int] = ()  # in order
    step: str | None = None  # "prompt" or "generated"
    named: frozenset[int] = frozenset()  # those that were named one by one: each must come
    shown: str = ""

    def cover(self, number: int) -> bool:
        """Return True if a call may be meant, as far as its number tells."""
        return self.step is not None or number in self.numbers


def as_calls(calls: Which) -> Calls:
    """Return the calls that were asked for; raise ChangeError if they make no sense.

    >>> as_calls({3, 1}).numbers, as_calls(slice(1, None)).cover(5), as_calls("prompt").step
    ([1, 3], True, 'prompt')
    """
    if isinstance(calls, str):
        if calls in STEPS:
            return Calls(step=calls, shown=repr(calls))
        raise _refused(calls)
    numbers: Sequence[int] = ()
    named: frozenset[int] = frozenset()
    with suppress(TypeError, ValueError):
        if isinstance(calls, slice):
            stop = sys.maxsize if calls.stop is None else calls.stop
            numbers = range(calls.start or 0, stop, 1 if calls.step is None else calls.step)
        elif not isinstance(calls, bool):
            several = isinstance(calls, Iterable) and getattr(calls, "shape", None) != ()
            numbers = sorted(map(index, cast(Any, calls if several else [calls])))
            named = frozenset(numbers)
    if not numbers or numbers[0] < 0 or numbers[0] > numbers[-1]:
        raise _refused(calls)
    return Calls(numbers, None, named, ranges(numbers) if named else repr(calls))


def _refused(calls: object) -> ChangeError:
    return ChangeError(
        f"The calls {calls!r} were asked for.",
        "Calls are whole numbers from 0 on, or those of one step of a generation.",
        "Give an int, a slice, a set, 'prompt' or 'generated'.",
    )


def ranges(numbers: Sequence[int]) -> str:
    """Spell numbers in a few characters.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
