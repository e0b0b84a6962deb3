"""The functions of the operating system that differ between Linux, macOS and Windows.

The rest of the package calls these functions and never asks on which system it runs:

- `open_file(path, flags)`: open a file for bytes, without following links if asked
- `open_folder(folder)`: open a folder itself
- `write_at(file, data, place)`: write at a place in a file
- `sync(file)`, `sync_folder(folder)`: force a file, and the names in a folder, onto the disk
- `start_writing(file, start, length)`: let the system begin to write a part of a file out
- `replace(source, target)`, `open_to_read(path)`, `when_free(function)`: on Windows, wait for
  others that have the file open
- `try_lock(file)`, `unlock(file)`: lock a file; the lock ends with the process
- `is_link(path)`: whether a path leads elsewhere
- `most_open_files()`: how many files the process may have open
- `file_system(folder)`, `free_space(file)`, `space_reserver()`: reserve space for a growing file
- `print_anything()`: let the console print characters that its encoding lacks
- `EXCLUSIVE_PORTS`: whether a server must ask for a port of its own

Where a system lacks something, the function does the same job in another way or raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import io
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

__all__ = [
    "EXCLUSIVE_PORTS",
    "file_system",
    "free_space",
    "is_link",
    "most_open_files",
    "open_file",
    "open_folder",
    "open_to_read",
    "print_anything",
    "replace",
    "space_reserver",
    "start_writing",
    "sync",
    "sync_folder",
    "try_lock",
    "unlock",
    "when_free",
    "write_at",
]

T = TypeVar("T")


def _module(name: str) -> Any:
    """Import a module of the standard library that only some systems have, or return None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl = _module("fcntl")  # Linux and macOS
_resource = _module("resource")  # Linux and macOS
_msvcrt = _module("msvcrt")  # Windows
_LINUX = sys.platform == "linux" and _fcntl is not None
_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows: else each b"\n" is written as b"\r\n"
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Linux and macOS
_FULL_SYNC: int | None = getattr(_fcntl, "F_FULLFSYNC", None)  # macOS
_ADVISES = hasattr(os, "posix_fadvise")  # Linux
_PATIENCE = 2.0  # seconds that a reader on Windows may have a file open
_LOOK = 0.01  # seconds between two attempts
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux
_MOUNTS = Path("/proc/self/mountinfo")
_JUNCTION = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT of Windows

# On Windows SO_REUSEADDR lets two processes listen on the same port; elsewhere it only lets a port
# be used again at once.
EXCLUSIVE_PORTS = _msvcrt is not None


# -- opening and writing --------------------------------------------------------------------------


def open_file(path: Path, flags: int, *, follow: bool = True) -> int:
    """Open a file for bytes and return its number; a new one gets the usual permissions.

    With `follow=False`, a link raises OSError. Windows has no O_NOFOLLOW: there the open file is
    compared with what lies at the path, so nothing may be truncated on opening (O_TRUNC).
    """
    if follow:
        return os.open(path, flags | _BINARY, 0o666)
    file = os.open(path, flags | _BINARY | _NO_LINK, 0o666)
    if not _NO_LINK:
        try:
            if is_link(path) or not os.path.samestat(os.lstat(path), os.fstat(file)):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        except BaseException:
            os.close(file)
            raise
    return file


def open_folder(folder: Path) -> int:
    """Open a folder itself and return its number, on Linux and macOS.

    Windows raises PermissionError. A pipe of that name, which would wait, is no folder: OSError.
    """
    return os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


_seeking = threading.Lock()


def _seek_and_write(file: int, data: Any, place: int) -> int:
    """Write at a place on Windows; one thread at a time, as a file has one position."""
    with _seeking:
        os.lseek(file, place, os.SEEK_SET)
        return os.write(file, data)


# Write bytes at a place in a file and return how many were written: `os.pwrite` itself, since every
# append to a store calls it. Windows has none.
write_at: Callable[[int, Any, int], int] = getattr(os, "pwrite", _seek_and_write)


def sync(file: int) -> None:
    """Force a file that is open for writing onto the disk.

    On macOS fsync stops at the cache of the disk, so F_FULLFSYNC is used where the file system has
    it.
    """
    if _FULL_SYNC is not None:
        with suppress(OSError):
            _fcntl.fcntl(file, _FULL_SYNC)
            return
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder onto the disk, on Linux and macOS.

    Windows has no such call. There a power cut may take back the name of a new file, although the
    file was synced; a reader then raises an error, since the index speaks of that file.
    """
    if _msvcrt is not None:
        return
    file = open_folder(folder)
    try:
        sync(file)
    finally:
        os.close(file)


def start_writing(file: int, start: int, length: int) -> None:
    """Let Linux begin to write a part of a file to the disk, so that a later sync takes less time.

    Nothing depends on it. Other systems begin when they like, or at the sync.
    """
    if _ADVISES:
        # The advice is "not needed soon": Linux starts to write what is not on the disk yet.
        with suppress(OSError):  # some file systems take no advice
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)


# -- names ----------------------------------------------------------------------------------------


def when_free(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that opens or renames a file.

    Windows refuses to open or replace a file at the moment when another process replaces or reads
    it. There the call is repeated for two seconds before its PermissionError is raised.
    """
    if _msvcrt is None:
        return function(*arguments)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return function(*arguments)
        except PermissionError:
            if time.monotonic() > until:
                raise
        time.sleep(_LOOK)


def open_to_read(path: Path) -> BinaryIO:
    """Open a file that another process may be replacing; see `when_free`."""
    if _msvcrt is None:  # readers of stores open many files
        return path.open("rb")
    return when_free(lambda: path.open("rb"))


def replace(source: Path, target: Path) -> None:
    """Give a file another name, in the place of a file that may have it: whole or not at all.

    Windows waits for those who read the target; a file that stays open cannot be replaced there.
    """
    when_free(os.replace, source, target)


def is_link(path: Path) -> bool:
    """Return True if a path leads elsewhere: a symbolic link, or a junction of Windows."""
    found = os.lstat(path)
    return stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == _JUNCTION


# -- locks ----------------------------------------------------------------------------------------


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file, without waiting; return False if another open file has the lock.

    The system drops the lock when the process ends, however it ends. On Linux and macOS this is
    flock, which also locks folders. On Windows it is a lock of the first byte, which nobody shares:
    `shared` is ignored, so that readers exclude each other too.

    Raises:
        OSError: If the system or the file system has no locks.
    """
    if _fcntl is not None:
        try:
            _fcntl.flock(file, (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | _fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    if _msvcrt is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    os.lseek(file, 0, os.SEEK_SET)
    try:
        _msvcrt.locking(file, _msvcrt.LK_NBLCK, 1)
    except PermissionError:
        return False
    return True


def unlock(file: int) -> None:
    """Release a lock. Nothing happens if there is none."""
    with suppress(OSError):
        if _fcntl is not None:
            _fcntl.flock(file, _fcntl.LOCK_UN)
        elif _msvcrt is not None:
            os.lseek(file, 0, os.SEEK_SET)
            _msvcrt.locking(file, _msvcrt.LK_UNLCK, 1)


# -- limits and space -----------------------------------------------------------------------------


def most_open_files() -> int | None:
    """Return how many files this process may have open; None if there is no limit.

    Windows does not tell. 512 is what its C library always allows.
    """
    if _resource is None:
        return 512
    limit: int = _resource.getrlimit(_resource.RLIMIT_NOFILE)[0]
    return limit if limit > 0 else None  # no limit is a negative one


def file_system(folder: Path) -> str:
    """Return the kind of the file system that a folder is on; "" where it is not known.

    Only Linux tells, and only there does space that is reserved save time.
    """
    if not _LINUX:
        return ""
    try:
        mounts = [line.split() for line in _MOUNTS.read_text("utf-8").splitlines()]
        device = folder.stat().st_dev
    except (OSError, UnicodeDecodeError):
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [words[words.index("-") + 1] for words in mounts if words[2] == number]
    return kinds[-1] if kinds else ""


def free_space(file: int) -> int:
    """Return how many bytes are free on the disk of an open file, on Linux and macOS."""
    found = os.fstatvfs(file)
    return found.f_bavail * found.f_frsize


@cache
def space_reserver() -> Callable[[int, int, int], bool] | None:
    """Return a function that reserves a part of a file, which keeps its size, or None.

    That is fallocate, on Linux of 64 bits. Python's `posix_fallocate` would make the file longer.
    Elsewhere files grow as they are written: this only saves time.
    """
    if not _LINUX or sys.maxsize <= 1 << 32:  # with 32 bits, places have fewer bits
        return None
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is None:
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return lambda file, start, length: call(file, _KEEP_SIZE, start, length) == 0


# -- the console ----------------------------------------------------------------------------------


def print_anything() -> None:
    """Let stdout print "?" for a character that its encoding lacks, instead of raising an error.

    A pipe on Windows has an encoding of 256 characters, such as cp1252.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
