"""Call a function in the background: the model runs on while rows are written to disk.

- `BackgroundThread`: calls a function with each item on a thread of its own

Memory is bounded: `put` waits if a few items are waiting already. An error of the thread is raised
in the caller, at the next `put` or at the end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["BackgroundThread"]

_WAITING = 2  # items that may wait, beside the one that is being written


class BackgroundThread:
    """Calls a function with each item that is put, on another thread, in order.

    >>> written = []
    >>> with BackgroundThread(written.append) as writing:
    ...     for number in range(5):
    ...         writing.put(number)
    >>> written
    [0, 1, 2, 3, 4]
    """

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work
        self._items: queue.Queue[Any] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # A daemon: should its end not be awaited, it does not keep the process.
        self._thread = threading.Thread(target=self._run, name="hookline harvest", daemon=True)

    def _run(self) -> None:
        while (item := self._items.get()) is not self:
            if self._error is None:
                try:
                    self._work(item)
                except BaseException as error:  # noqa: BLE001 - raised in the caller
                    self._error = error
            del item  # do not hold its tensors while waiting for the next
        self._ended.set()

    def put(self, item: Any) -> None:
        """Queue an item; wait if too many are waiting already."""
        if self._error is None:
            self._items.put(item)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, RuntimeError("the writer has stopped")
            raise error

    def __enter__(self) -> BackgroundThread:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait until all items are done, also after an error of the caller or Ctrl-C.

        A Ctrl-C during this wait drops the items that wait, but not the one that is being done: the
        caller is about to close the files.
        """
        interrupt: BaseException | None = None
        while not self._ended.is_set():  # `is_alive` is wrong once an interrupt has met `join`
            try:
                self._items.put(self)
                self._ended.wait()
                self._thread.join()
            except BaseException as again:  # noqa: BLE001 - raised below
                interrupt = again
                self._error = self._error or RuntimeError("the rest was given up")
        if interrupt is not None:
            raise interrupt
        if error is None:
            self._raise()
        elif self._error is not None and not isinstance(self._error, RuntimeError):
            error.add_note(f"hookline: writing failed as well: {self._error}")
