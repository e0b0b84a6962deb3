"""The lock that a living writer holds; the system lets go of it when the process ends.

- `locked(folder, rank)`: hold the lock of a rank
- `lock_path(folder, rank)`: its file
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: one writer for each rank is then the caller's business
    fcntl = None

__all__ = ["lock_path", "locked"]


def lock_path(folder: Path, rank: int) -> Path:
    """The empty file that a living writer keeps locked."""
    return folder / f"rank{rank:05d}.lock"


@contextmanager
def locked(folder: Path, rank: int) -> Generator[bool, None, None]:
    """Hold the lock of a rank; gives False if a living process has it, or the folder is sealed."""
    try:
        number = os.open(lock_path(folder, rank), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield False
        return
    try:
        if fcntl is not None:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
        yield True
    finally:
        os.close(number)
