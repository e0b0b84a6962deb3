"""Report the progress of a harvest on stderr: a bar of tqdm on a terminal, else a line at times.

- `Progress`: counts batches and rows; `show(text)` prints a line
"""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Progress"]

_EVERY = 10.0  # seconds between two lines


class Progress:
    """Counts the written batches and rows, and prints the progress unless `quiet`.

    >>> progress = Progress(quiet=True)
    >>> progress.begin(total=10, done=4)
    >>> progress.step(rows=64)
    >>> progress.line()
    '5 of 10 batches, 64 rows, ... rows/s, 0:00:00 left'
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet or not sys.stderr  # which is None where it was closed
        self._bar = None
        self._total: int | None = None
        self._done = self._before = self._rows = 0
        self._start = self._told = time.monotonic()

    def show(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def begin(self, total: int | None, done: int) -> None:
        """Start to count, from what was done before."""
        self._total, self._done, self._before = total, done, done
        self._start = self._told = time.monotonic()
        self._bar = None if self._quiet else _bar(total, done)

    def step(self, rows: int) -> None:
        """Count one more batch that is on the disk."""
        self._done += 1
        self._rows += rows
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rate():,.0f} rows/s", refresh=False)
            self._bar.update()
        elif time.monotonic() - self._told > _EVERY:
            self._told = time.monotonic()
            self.show(self.line())

    def _rate(self) -> float:
        return self._rows / max(1e-9, time.monotonic() - self._start)

    def line(self) -> str:
        """Return the progress in words."""
        text = f"{self._done:,}" + (f" of {self._total:,}" if self._total is not None else "")
        text += f" batches, {self._rows:,} rows, {self._rate():,.0f} rows/s"
        made = self._done - self._before
        if self._total is None or not made:
            return text
        left = (self._total - self._done) * (time.monotonic() - self._start) / made
        minutes, seconds = divmod(round(left), 60)
        return f"{text}, {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(total: int | None, done: int) -> Any:
    """Return a bar, if there is a terminal and tqdm is installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=done, unit="batch", file=sys.stderr, dynamic_ncols=True)
