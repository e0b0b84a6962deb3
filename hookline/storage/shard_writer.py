"""Write a shard of a store.

- `OpenShard(path, series, ahead, fresh=)`: an open shard; `put` adds rows, `cut` removes them
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from hookline.operating_system import open_file, start_writing, sync, write_at
from hookline.storage.disk_space import SpaceReservation
from hookline.storage.store_files import HEADER, PAGE, Series, header_of, read_header

__all__ = ["OpenShard"]

_EARLY = 8 << 20  # bytes that are sent to the disk together before a sync asks for them


class OpenShard:
    """The open file of a shard; a fresh one begins with the header of no rows."""

    def __init__(self, path: Path, series: Series, ahead: SpaceReservation, *, fresh: bool) -> None:
        self._path, self._ahead = path, ahead
        self._file = -1
        self._sent = 0  # up to where it is on its way to the disk
        self._reserved = 0  # up to where it has space
        self._file = open_file(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if fresh else 0))
        try:
            if fresh:
                _write(self._file, header_of(series, 0).ljust(HEADER), 0)
            self._end = HEADER if fresh else os.fstat(self._file).st_size
            if ahead and not fresh:
                self._let_go()  # space that a killed process had reserved
        except BaseException:
            self.close()
            raise

    def put(self, series: Series, rows: Any, inside: int, count: int) -> None:
        """Write rows, as a buffer, behind those inside, then the header that counts them."""
        start = HEADER + inside * series.row_bytes
        end = start + count * series.row_bytes
        if end > self._reserved and self._ahead:
            most = HEADER + series.shard_rows * series.row_bytes
            self._reserved = self._ahead.reserve(self._file, start, end, most)
        _write(self._file, rows, start)
        self._end = end
        _write(self._file, header_of(series, inside + count).ljust(PAGE), 0)

    def send(self) -> None:
        """Let the system begin to write the shard to the disk, so that the sync takes less time."""
        start, length = self._sent, self._end - self._sent
        if length >= _EARLY:
            self._sent = self._end
            start_writing(self._file, start, length)

    def cut(self, series: Series, rows: int) -> bool:
        """Cut the shard to so many rows; return whether that could be done.

        A header that cannot be put back keeps its rows: the file stays sound by itself. Windows
        cuts no file that a reader has mapped; what is behind the rows is then cut off later.
        """
        with contextlib.suppress(OSError):
            if read_header(self._path, series)[0] != rows:
                _write(self._file, header_of(series, rows).ljust(PAGE), 0)
            self._end = HEADER + rows * series.row_bytes
            self._let_go()
            return True
        return False

    def _let_go(self) -> None:
        os.ftruncate(self._file, self._end)  # also cuts off reserved space
        self._reserved = 0

    def finish(self, *, sync: bool) -> None:
        """Give back space that is not needed, and force everything onto the disk if asked."""
        if self._reserved > self._end:
            self._let_go()
        if sync:
            self.sync()

    def sync(self) -> None:
        """Force the shard onto the disk."""
        sync(self._file)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def _write(file: int, data: Any, place: int) -> None:
    """Write everything: a nearly full disk, or more than 2 GB, takes only a part at first."""
    size = len(data) if type(data) is bytes else data.nbytes
    while (written := write_at(file, data, place)) < size:
        if written <= 0:
            raise OSError("the system wrote nothing and gave no reason")
        data = memoryview(data).cast("B")[written:]
        size, place = size - written, place + written
