"""Writing a store: rows are appended to shards, and each append is committed.

- `StoreWriter`: what `Store.create` gives

An append writes its rows behind what is committed, then the headers of the shards, then the index,
as a whole: only then do the rows exist. What fails before that is
taken back; what a killed process left is cut off by whoever opens the store next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from hookline.errors import StoreError
from hookline.storage.description import describe, settle
from hookline.storage.files import (
    HEADER,
    PAGE,
    Index,
    IndexFile,
    Series,
    header_of,
    index_path,
    read_header,
    read_index,
    shard_numbers,
    shard_path,
)
from hookline.storage.locks import locked
from hookline.storage.recovery import recover
from hookline.storage.small_files import sync_folder
from hookline.storage.values import blocks_of

__all__ = ["StoreWriter", "Sync"]

Sync = Literal["commit", "shard", "never"]
_EARLY = 32 << 20  # bytes that are sent to the disk together before a sync asks for them


class StoreWriter:
    """Appends rows to a store; made by `Store.create`.

    Use it in `with`, or call `close()`. Tensors are read, never kept. `samples` is how many samples
    this rank has committed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metadata: Mapping[str, Any] | None,
        rank: int,
        shard_bytes: int,
        sync: Sync,
        resume: bool,
    ) -> None:
        if sync not in ("commit", "shard", "never"):
            raise StoreError(
                f"Cannot write a store with sync={sync!r}.",
                "The ways are 'commit', 'shard' and 'never'.",
                "Choose 'shard' if unsure.",
            )
        if type(rank) is not int or not 0 <= rank < 100_000 or shard_bytes < 1:
            raise StoreError(
                f"Cannot write a store as rank {rank!r} with shards of {shard_bytes!r} bytes.",
                "A rank is an integer from 0 to 99999, and a shard holds a byte at least.",
                "Leave them out for the usual ones.",
            )
        self.folder, self.rank = folder, rank
        self._sync: Sync = sync
        self._shard_bytes = shard_bytes
        self._files: dict[int, int] = {}
        self._sent: dict[int, int] = {}  # up to where each shard is on its way to the disk
        self._index_file = IndexFile(folder, rank)
        self._unclean = False
        self._held = contextlib.ExitStack()
        try:
            self._begin(metadata, resume)
        except OSError as error:
            self._held.close()
            raise _failed(f"begin a store in {str(folder)!r}", error) from error
        except BaseException:
            self._held.close()
            raise

    @property
    def samples(self) -> int:
        """How many samples this rank has committed."""
        return self._index.samples

    @property
    def mark(self) -> dict[str, Any]:
        """What the last append of this rank that had a mark was marked with."""
        return self._index.mark

    def _begin(self, metadata: Mapping[str, Any] | None, resume: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder} may not be written to")
        if not self._held.enter_context(locked(self.folder, self.rank)):
            raise StoreError(
                f"Cannot write to {str(self.folder)!r} as rank {self.rank}.",
                "Another writer of this rank is at work there.",
                "Close it first, or give each writer a rank of its own.",
            )
        there = index_path(self.folder, self.rank).exists()
        if not there and shard_numbers(self.folder, self.rank):
            raise StoreError(
                f"Cannot write to {str(self.folder)!r} as rank {self.rank}.",
                "There are shards of this rank and no index of them.",
                "Restore the index, or choose another folder.",
            )
        if there and not resume:
            raise StoreError(
                f"Cannot begin a store in {str(self.folder)!r} as rank {self.rank}.",
                "This rank has written there before.",
                "Continue it with resume=True, or choose another folder.",
            )
        describe(self.folder, metadata, self.rank)
        if there:
            self._index = recover(self.folder, self.rank, held=True)
        else:
            self._index = Index(self.rank)
            self._index_file.write(self._index, self._sync != "never")

    def append(
        self,
        values: Mapping[str, Tensor | Sequence[Tensor]],
        *,
        ids: Sequence[int] | Sequence[str] | Tensor | None = None,
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        """Put samples behind those that are there, and commit them.

        Args:
            values: For each place a tensor with one row for each sample, or a list of tensors,
                one for each sample, whose first sizes may vary. The first append settles places,
                dtypes, the shapes of rows, which places vary, and whether there are ids.
            ids: One integer or one string for each sample.
            mark: A few numbers or words of the caller's own, in JSON, that are committed together
                with the samples: how far it has come. `writer.mark` reads them, also on resuming.

        If it raises, nothing of it is in the store, and the writer can go on.
        """
        if self._held is _CLOSED:
            raise StoreError("Cannot append.", "This writer is closed.", "Use resume=True.")
        blocks, samples = blocks_of(values, ids, self._index.series, self._shard_bytes)
        if not samples:
            return
        new = self._index.copy()
        new.samples += samples
        new.series = new.series or [series.copy() for series, _ in blocks]
        new.mark = new.mark if mark is None else dict(mark)
        try:
            if self._unclean:
                self._take_back(self._index)
            if not self._index.series:
                settle(self.folder, new.series, self._sync == "commit")
            full = [
                number
                for series, (_, rows) in zip(new.series, blocks, strict=True)
                for number in self._write_rows(new, series, rows)
            ]
            if full and self._sync == "shard":
                sync_folder(self.folder)
            lasting = self._sync == "commit" or (self._sync == "shard" and bool(full))
            self._index_file.write(new, lasting)
        except BaseException as error:
            self._take_back(new)
            if isinstance(error, OSError):
                raise _failed(f"append to {str(self.folder)!r}", error) from error
            raise
        self._index = new
        for number in full:
            os.close(self._files.pop(number))
            self._sent.pop(number, None)

    def note(self, mark: Mapping[str, Any]) -> None:
        """Commit a mark without samples."""
        new = self._index.copy()
        new.mark = dict(mark)
        try:
            self._index_file.write(new, self._sync == "commit")
        except OSError as error:
            raise _failed(f"note how far {str(self.folder)!r} has come", error) from error
        self._index = new

    def _write_rows(self, new: Index, series: Series, rows: Tensor) -> list[int]:
        """Write rows behind those of a series, into new shards where needed; gives the full ones.

        A header is written after the rows that it speaks of.
        """
        full: list[int] = []
        done, total, size = 0, rows.shape[0], series.row_bytes
        if not total:  # samples may all be empty; torch views no such tensor as bytes
            return full
        carrier = series.kind.carrier
        data = (rows if carrier is None else rows.view(carrier)).numpy()
        while done < total:
            position, inside = divmod(series.rows, series.shard_rows)
            if position == len(series.shards):
                series.shards.append(new.next_shard)
                new.next_shard += 1
            number = series.shards[position]
            if number not in self._files:
                self._files[number] = self._open(number, series)
            file, count = self._files[number], min(total - done, series.shard_rows - inside)
            part = data if count == total else data[done : done + count]
            _write(file, memoryview(cast("bytes", part)), HEADER + inside * size)
            _write(file, memoryview(header_of(series, inside + count).ljust(PAGE)), 0)
            series.rows += count
            done += count
            if inside + count == series.shard_rows:
                full.append(number)
            if self._sync == "commit" or (self._sync == "shard" and number in full):
                os.fsync(file)
            elif self._sync == "shard":
                self._send(number, HEADER + series.row_bytes * (inside + count))
        return full

    def _send(self, number: int, end: int) -> None:
        """Let the system begin to write a shard out, so that little is left for the sync."""
        start = self._sent.setdefault(number, 0)
        if end - start >= _EARLY and hasattr(os, "posix_fadvise"):
            self._sent[number] = end
            # The advice is "not needed soon": Linux starts to write what is not on the disk yet.
            with contextlib.suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(self._files[number], start, end - start, os.POSIX_FADV_DONTNEED)

    def _open(self, number: int, series: Series) -> int:
        fresh = number >= self._index.next_shard
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if fresh else 0) | getattr(os, "O_BINARY", 0)
        file = os.open(shard_path(self.folder, self.rank, number), flags, 0o666)
        if fresh:
            try:
                _write(file, memoryview(header_of(series, 0).ljust(HEADER)), 0)
                if self._sync == "commit":
                    sync_folder(self.folder)
            except BaseException:
                os.close(file)
                raise
        return file

    def _take_back(self, new: Index) -> None:
        """Undo an append that failed, unless its index is already there."""
        self._unclean = True
        with contextlib.suppress(OSError, StoreError):  # whoever opens the store does it otherwise
            if read_index(self.folder, self.rank) == new and new is not self._index:
                self._index, self._unclean = new, False
                return
            for number in [n for n in self._files if n >= self._index.next_shard]:
                os.close(self._files.pop(number))
            for number in shard_numbers(self.folder, self.rank):
                if number >= self._index.next_shard:
                    shard_path(self.folder, self.rank, number).unlink()
            done = [self._cut(series) for series in self._index.series]
            self._unclean = not all(done)

    def _cut(self, series: Series) -> bool:
        """Cut the last shard of a series to what is committed.

        A header that cannot be put back keeps its rows: the file stays sound by itself.
        """
        number = series.shards[-1] if series.shards else -1
        if number not in self._files:
            return True
        rows = series.rows_in(len(series.shards) - 1)
        path = shard_path(self.folder, self.rank, number)
        with contextlib.suppress(OSError):
            if read_header(path, series)[0] != rows:
                header = memoryview(header_of(series, rows).ljust(PAGE))
                _write(self._files[number], header, 0)
            os.ftruncate(self._files[number], HEADER + rows * series.row_bytes)
            return True
        return False

    def close(self) -> None:
        """Finish: sync what the policy asks for, and let go of the files. Twice is once."""
        if self._held is _CLOSED:
            return
        try:
            if self._unclean:
                self._take_back(self._index)
            if self._sync != "never":
                for file in self._files.values():
                    os.fsync(file)
                self._index_file.write(self._index, True)
                sync_folder(self.folder)
        except OSError as error:
            raise _failed(f"finish the store in {str(self.folder)!r}", error) from error
        finally:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
            self._index_file.close()
            self._held.close()
            self._held = _CLOSED

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._held is _CLOSED else "open"
        return (
            f"StoreWriter({str(self.folder)!r}, rank {self.rank}, {self.samples} samples, {state})"
        )


_CLOSED = contextlib.ExitStack()


def _write(file: int, data: memoryview, place: int) -> None:
    """Write all of it: a nearly full disk, or more than 2 GB, takes only a part at first."""
    while (written := os.pwrite(file, data, place)) < data.nbytes:
        if written <= 0:
            raise OSError("the system wrote nothing and gave no reason")
        data, place = data.cast("B")[written:], place + written


def _failed(what: str, error: OSError) -> StoreError:
    return StoreError(
        f"Cannot {what}.",
        f"The system says: {error.strerror or error}.",
        "All that was committed before is still there. See to the disk, its space and "
        "permissions, then go on, later with resume=True.",
    )
