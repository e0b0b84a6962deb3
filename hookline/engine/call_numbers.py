"""The numbers of calls, also of those that a backward runs again.

- `CallNumbers`: numbers the calls of the modules and operations of one context

A call gets its number when it ends: 0, 1, 2 … in the order in which the calls of a module end. A
call that a backward runs again, as activation checkpointing does, has the number of the call that
it repeats.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from threading import RLock
from typing import Any

from hookline.engine.calls import Subject
from hookline.engine.checkpointing import FirstRun, Regions, may_run_again
from hookline.torch_private import backward_id

__all__ = ["CallNumbers"]

_NEVER = -1  # no backward has this id


class CallNumbers:
    """Numbers the calls of the modules and operations of one context.

    With `shared`, several threads may end calls at the same time.
    """

    def __init__(self, shared: bool) -> None:
        self.completed: dict[Subject, int] = defaultdict(int)  # how many calls have ended
        # How many of them ran in a backward without repeating another.
        self._inside: dict[Subject, int] = defaultdict(int)
        self._regions: dict[Subject, Regions] = {}
        # Where a region is unknown: the last backward that ran calls again, and how many.
        self._recomputed: dict[Subject, tuple[int, int]] = {}
        self._lock: Any = RLock() if shared else nullcontext()

    def end(self, subject: Subject) -> int:
        """Return the number of a new call, which has ended."""
        with self._lock:
            number = self.completed[subject]
            self.completed[subject] = number + 1
        if backward_id() != -1:
            self._inside[subject] += 1
        return number

    def repeated(self, subject: Subject) -> FirstRun | None:
        """Return the first run of a call that a backward runs again now; None for a new call.

        A module that never ran outside of a backward (in a custom one, say) does not run again.
        Where the region is not known, the last call is taken to come first.
        """
        task = backward_id()
        if task == -1 or self.completed[subject] == self._inside[subject]:
            return None
        if subject in self._regions:
            known = self._regions[subject].next_repeated()
            if known is not None:
                return known
        last, count = self._recomputed.get(subject, (_NEVER, 0))
        count = count + 1 if last == task else 1
        self._recomputed[subject] = task, count
        return FirstRun(max(self.completed[subject] - count, 0))

    def remember(self, subject: Subject, changing: bool) -> FirstRun | None:
        """Remember a call that begins, if a backward may run it again; see `Regions.note`."""
        if not may_run_again():
            return None
        if subject not in self._regions:
            self._regions.setdefault(subject, Regions())
        return self._regions[subject].note(changing)

    def is_recomputing(self, subject: Subject) -> bool:
        """Return True if a call is run again now, in this thread."""
        return subject in self._regions and self._regions[subject].is_recomputing()

    def gives_graph_later(self, subject: Subject, number: int) -> bool:
        """Return True if a call ran without a graph, which its recomputation makes."""
        return subject in self._regions and self._regions[subject].gives_graph_later(number)

    def will_be_repeated(self, subject: Subject) -> bool:
        """Return True if calls may still be run again."""
        return subject in self._regions and self._regions[subject].has_pending()
