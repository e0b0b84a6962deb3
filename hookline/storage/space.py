"""Disk space that a growing file has ahead of time.

- `Ahead(folder)`: reserves space behind the ends of files, where that is known to help

For every page that is added to a file, ext4 has to set space aside. Where it was asked for before,
many megabytes in one call, writing takes a third less time. The file keeps its size, so readers
and recovery see nothing of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["Ahead"]

_FROM = 1 << 20  # bytes that a file has before any are reserved
_LEAST, _MOST = 8 << 20, 64 << 20  # bytes that are reserved together: as many as a file has, within
_PLENTY = 1 << 30  # bytes that are free on the disk, or nothing is reserved
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_MOUNTS = Path("/proc/self/mountinfo")


class Ahead:
    """Reserves space in the files of a folder; does nothing where it is no use, or not possible."""

    def __init__(self, folder: Path) -> None:
        self._call = _fallocate() if _file_system(folder) == "ext4" else None

    def __bool__(self) -> bool:
        """Whether there is a use in asking."""
        return self._call is not None

    def reserve(self, file: int, start: int, end: int, most: int) -> int:
        """Reserve from a start to beyond an end, never beyond the most; gives up to where.

        A small file gets none. After a failure, no more is tried.
        """
        if self._call is None or end < _FROM:
            return 0
        until = min(end + min(max(end, _LEAST), _MOST), most)
        if _free(file) < _PLENTY or self._call(file, _KEEP_SIZE, start, until - start) != 0:
            self._call = None
        return until


def _free(file: int) -> int:
    found = os.fstatvfs(file)
    return found.f_bavail * found.f_frsize


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The call of Linux. Python's `posix_fallocate` would make the file longer."""
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call if sys.maxsize > 1 << 32 else None  # elsewhere a place in a file has fewer bits


def _file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on; empty where Linux does not tell."""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
        device = folder.stat().st_dev
    except (OSError, UnicodeDecodeError):
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [words[words.index("-") + 1] for words in mounts if words[2] == number]
    return kinds[-1] if kinds else ""
