"""The log of a tracer: what its hooks saw, in the order in which they saw it.

- `Event`: what was called, what was asked of it, which call it was, and what is kept of the value
- `FirstEvents`, `LastEvents`: logs that hold one event for each place
- `LOGS`: the kinds of logs by what is kept; for `keep="all"` a plain list
- `StopForward`: ends a forward early
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from hookline.engine.asks import Ask
from hookline.engine.calls import Subject

__all__ = ["INSIDE", "LOGS", "Event", "FirstEvents", "Keep", "LastEvents", "StopForward"]

Keep = Literal["all", "first", "last"]

# The number of a call is None for the next one. Of a gradient it is the call, the backward pass and
# the path in the value. What is kept is `Missing` for a value that lacks what was asked for.
Event = tuple[Subject, Ask, Any, Any]

INSIDE = "inside a backward"  # instead of a number: the next call, made inside a backward


class StopForward(BaseException):
    """Ends a forward early. Not an Exception: a model's own `except Exception` lets it pass."""

    def __init__(self, key: int) -> None:
        super().__init__("hookline has what was asked for and ends the forward here")
        self.key = key  # of the tracer


class LastEvents(dict[tuple[Subject, Ask], tuple[Event, int]]):
    """A log that holds the last event of each place, and counts them."""

    def append(self, event: Event) -> None:
        """Log an event."""
        key = event[0], event[1]
        held = self.get(key)
        self[key] = (event, 1) if held is None else (self.choose(held[0], event), held[1] + 1)

    def choose(self, held: Event, event: Event) -> Event:
        """Choose between the event that is held and a new one: numbers may come in any order."""
        return held if _is_before(event, held) else event

    def __iter__(self) -> Iterator[Any]:
        return iter([event for event, _ in self.values()])


class FirstEvents(LastEvents):
    """A log that holds the first event of each place, and counts them."""

    def choose(self, held: Event, event: Event) -> Event:
        """Choose between the event that is held and a new one: numbers may come in any order."""
        return event if _is_before(event, held) else held


def _is_before(one: Event, other: Event) -> bool:
    numbered = isinstance(one[2], int) and isinstance(other[2], int)
    return numbered and one[2] < other[2]


LOGS: dict[Keep, type[Any]] = {"all": list, "first": FirstEvents, "last": LastEvents}
