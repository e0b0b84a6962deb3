"""The log of a tracer: what its hooks saw, in the order in which they saw it.

- `Event`: what was called, what was asked of it, which call it was, and what is kept of the value
- `make_log(keep)`: a log, which for `keep="all"` is a plain list
- `StopForward`: ends a forward early
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from hookline.engine.asks import Ask
from hookline.engine.calls import Subject

__all__ = ["INSIDE", "Event", "Keep", "StopForward", "make_log"]

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


class SingleEvents(dict[tuple[Subject, Ask], tuple[Event, int]]):
    """A log that holds the first or the last event of each place, and counts them."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep

    def append(self, event: Event) -> None:
        """Log an event."""
        key = event[0], event[1]
        held, count = self.get(key, (event, 0))
        # Threads and recursion end calls in another order than that of their numbers.
        new, old = event[2], held[2]
        is_before = type(new) is int and type(old) is int and new < old
        self[key] = event if is_before == (self.keep == "first") else held, count + 1

    def __iter__(self) -> Iterator[Any]:
        held = [*self.values()]  # other threads may still append
        return iter([event for event, _ in held])


def make_log(keep: Keep) -> Any:
    """Return an empty log, to which events can be appended."""
    return [] if keep == "all" else SingleEvents(keep)
