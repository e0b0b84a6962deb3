"""Locks between processes, which the system releases when a process ends.

- `claimed(folder, rank)`: the lock of a rank, for its writer
- `locked(folder, rank)`: that lock, for those who only need to know whether a writer is alive
- `held(folder, alone=)`: the lock of a folder that is saved into
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hookline.operating_system import open_file, open_folder, try_lock, unlock

__all__ = ["claimed", "held", "locked"]

_PATIENCE = 60.0  # seconds
_LOOK = 0.01  # seconds between two attempts
_FOLDER_LOCK = "hookline.lock"  # where a folder itself cannot be locked


@contextmanager
def claimed(folder: Path, rank: int) -> Generator[bool, None, None]:
    """Hold the lock of a rank; yield False if another writer has it.

    Raises:
        OSError: If there can be no lock: the folder is sealed, or its file system has no locks.
    """
    number = _opened(folder / f"rank{rank:05d}.lock")  # an empty file
    with _closing(number):
        yield try_lock(number)


@contextmanager
def locked(folder: Path, rank: int) -> Generator[bool, None, None]:
    """Hold the lock of a rank; yield False if a living process has it, or if there is no lock."""
    with ExitStack() as stack:
        free = False
        with suppress(OSError):
            free = stack.enter_context(claimed(folder, rank))
        yield free


def _opened(path: Path) -> int:
    """Open or make a file in this folder, not where a link in a hostile store points to."""
    try:
        return open_file(path, os.O_RDWR)
    except FileNotFoundError:
        with suppress(FileExistsError):  # a link to nothing, or another process was quicker
            return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return open_file(path, os.O_RDWR)


@contextmanager
def held(folder: Path, *, alone: bool) -> Generator[bool | None, None, None]:
    """Hold a folder, alone or with others that do not hold it alone; wait for its holders.

    It yields True if the folder is held, False if others held it for too long, and None if there
    can be no lock: then nothing may be done that is wrong beside another process. If the folder
    itself cannot be locked (Windows, some network file systems), a file in it is locked; only a
    holder alone makes that file.
    """
    with ExitStack() as stack:
        free = None
        for opened in (open_folder, _opened_alone if alone else _opened_with_others):
            with suppress(OSError):
                number = opened(folder)
                stack.enter_context(_closing(number))
                free = _wait(number, shared=not alone)
                break
        yield free


def _opened_alone(folder: Path) -> int:
    return _opened(folder / _FOLDER_LOCK)


def _opened_with_others(folder: Path) -> int:
    return open_file(folder / _FOLDER_LOCK, os.O_RDWR)


def _wait(number: int, *, shared: bool) -> bool:
    until = time.monotonic() + _PATIENCE
    while not try_lock(number, shared=shared):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK)
    return True


@contextmanager
def _closing(number: int) -> Generator[None, None, None]:
    """Release a lock and close its file in the end."""
    owner = os.getpid()
    try:
        yield
    finally:
        # Closing is not enough: a process that was forked meanwhile has the same lock.
        if os.getpid() == owner:
            unlock(number)
        os.close(number)
