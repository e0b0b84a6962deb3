"""Locks of the system's, which lets go of them when a process ends.

- `locked(folder, rank)`: hold the lock of a rank, as a living writer does
- `lock_path(folder, rank)`: its file
- `held(folder, alone=)`: hold a folder itself, as whoever saves into it does
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: one writer for each rank is then the caller's business
    fcntl = None

__all__ = ["held", "lock_path", "locked"]

_PATIENCE = 60.0  # seconds
_LOOK = 0.01  # between two looks


def lock_path(folder: Path, rank: int) -> Path:
    """The empty file that a living writer keeps locked."""
    return folder / f"rank{rank:05d}.lock"


@contextmanager
def locked(folder: Path, rank: int) -> Generator[bool, None, None]:
    """Hold the lock of a rank; gives False if a living process has it, or the folder is sealed."""
    try:
        number = _opened(lock_path(folder, rank))
    except OSError:
        yield False
        return
    with _closing(number):
        free = True
        if fcntl is not None:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                free = False
        yield free


def _opened(path: Path) -> int:
    """Open a file, or make it: here, and not where a link in a hostile store points to."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        with suppress(FileExistsError):  # a link to nothing, or another process was quicker
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        return os.open(path, os.O_RDWR)


@contextmanager
def held(folder: Path, *, alone: bool) -> Generator[bool, None, None]:
    """Hold a folder, alone or with others that do not hold it alone; waits for them.

    Gives False if that took too long. Where nobody can lock a folder (Windows, some network file
    systems), it is as if one had it.
    """
    try:
        number = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))  # no pipe: it waits
    except OSError:
        yield True
        return
    with _closing(number):
        yield fcntl is None or _wait(number, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def _wait(number: int, how: int) -> bool:
    until = time.monotonic() + _PATIENCE
    while fcntl is not None:
        try:
            fcntl.flock(number, how | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                return False
        except OSError:  # a file system without locks
            break
        time.sleep(_LOOK)
    return True


@contextmanager
def _closing(number: int) -> Generator[None, None, None]:
    """Let go of a lock and of its file in the end."""
    owner = os.getpid()
    try:
        yield
    finally:
        # Closing is not enough: a process that was forked meanwhile has the same lock.
        if fcntl is not None and os.getpid() == owner:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)
        os.close(number)
