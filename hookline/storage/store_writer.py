"""Write a store: append rows to shards, and commit each append.

- `StoreWriter`: the result of `Store.create`

An append writes its rows behind the committed ones, then the headers of the shards, then the whole
index: only then do the rows exist. An append that fails before that is undone. Uncommitted rows of
a killed process are cut off when the store is opened next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex

from torch import Tensor

from hookline.errors import StoreError
from hookline.operating_system import sync_folder
from hookline.storage.disk_space import SpaceReservation
from hookline.storage.locks import claimed
from hookline.storage.recovery import recover
from hookline.storage.row_blocks import blocks_of
from hookline.storage.shard_writer import OpenShard
from hookline.storage.small_files import as_json, most_files, sync_file
from hookline.storage.store_files import (
    Index,
    IndexFile,
    Series,
    index_path,
    read_index,
    shard_numbers,
    shard_path,
)
from hookline.storage.store_json import describe, settle

__all__ = ["StoreWriter", "Sync"]

Sync = Literal["commit", "shard", "never"]


class StoreWriter:
    """Appends rows to a store; made by `Store.create`.

    Use it in `with`, or call `close()`. Tensors are read, never kept.
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
        whole = isinstance(shard_bytes, SupportsIndex) and int(shard_bytes) > 0
        if type(rank) is not int or not 0 <= rank < 100_000 or not whole:
            raise StoreError(
                f"Cannot write a store as rank {rank!r} with shards of {shard_bytes!r} bytes.",
                "A rank is an integer from 0 to 99999, and the bytes are one from 1 on.",
                "Leave them out for the usual ones; the usual rank is the variable RANK, or 0.",
            )
        self.folder, self.rank = folder, rank
        self._sync: Sync = sync
        self._shard_bytes = int(shard_bytes)
        self._open: dict[int, OpenShard] = {}  # by number
        self._aside: set[int] = set()  # those that were written to and closed again
        self._most = most_files()
        self._index_file = IndexFile(folder, rank)
        self._unclean = False
        self._lock = threading.RLock()  # another thread may close it in the middle of an append
        self._held = contextlib.ExitStack()
        try:
            self._begin(metadata, resume)
        except BaseException as error:
            self._held.close()
            if isinstance(error, OSError):
                raise _failed(f"begin a store in {str(folder)!r}", error) from error
            raise

    @property
    def samples(self) -> int:
        """The number of samples that this rank has committed."""
        return self._index.samples

    @property
    def mark(self) -> dict[str, Any]:
        """The mark of the last append of this rank that had one."""
        return self._index.mark

    def _begin(self, metadata: Mapping[str, Any] | None, resume: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ahead = SpaceReservation(self.folder)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder} may not be written to")
        try:
            free = self._held.enter_context(claimed(self.folder, self.rank))
        except OSError as error:
            raise StoreError(
                f"Cannot write to {str(self.folder)!r} as rank {self.rank}.",
                f"There can be no lock there ({error.strerror or error}), so two writers of this "
                "rank could damage the store.",
                "Write to another file system, such as a local disk, and copy the store.",
            ) from error
        if not free:
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
        """Append samples, and commit them.

        Args:
            values: For each place a tensor with one row for each sample, or a list of tensors,
                one for each sample, whose first sizes may vary. The first append sets places,
                dtypes, the shapes of rows, which places vary, and whether there are ids.
            ids: One integer or one string for each sample.
            mark: A few numbers or words of the caller's own, in JSON, that are committed together
                with the samples, such as its progress. `writer.mark` reads them, also on resuming.

        If it raises, nothing of it is in the store, and the writer can continue. Only after an
        error behind the commit (an interrupt, a failed sync of the index) it is; see `samples`.
        """
        with self._lock:
            self._append(values, ids, mark)

    def _append(self, values: Any, ids: Any, mark: Mapping[str, Any] | None) -> None:
        if self._held is _CLOSED:
            raise StoreError("Cannot append.", "This writer is closed.", "Use resume=True.")
        told = None if mark is None else as_json(mark, "the mark")
        blocks, samples = blocks_of(values, ids, self._index.series, self._shard_bytes)
        if not samples:
            return
        new = self._index.copy()
        new.samples += samples
        new.series = new.series or [series.copy() for series, _ in blocks]
        new.mark = new.mark if told is None else told
        try:
            if self._unclean:
                self._take_back(self._index)
            if not self._index.series:
                settle(self.folder, self.rank, new.series, self._sync == "commit")
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
            if number in self._open:
                self._open.pop(number).close()

    def note(self, mark: Mapping[str, Any]) -> None:
        """Commit a mark without samples."""
        with self._lock:
            if self._held is _CLOSED:
                raise StoreError("Cannot note.", "This writer is closed.", "Use resume=True.")
            new = self._index.copy()
            new.mark = as_json(mark, "the mark")
            try:
                self._index_file.write(new, self._sync == "commit")
            except OSError as error:
                raise _failed(f"note how far {str(self.folder)!r} has come", error) from error
            self._index = new

    def _write_rows(self, new: Index, series: Series, rows: Tensor) -> list[int]:
        """Write rows behind those of a series, into new shards if needed; return the full shards.

        A header is written after the rows that it counts.
        """
        full: list[int] = []
        done, total = 0, rows.shape[0]
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
            if number not in self._open:
                self._open[number] = self._opened(number, series)
            shard, count = self._open[number], min(total - done, series.shard_rows - inside)
            part = data if count == total else data[done : done + count]
            shard.put(series, part, inside, count)
            series.rows += count
            done += count
            if inside + count == series.shard_rows:
                full.append(number)
            if self._sync == "commit" or (self._sync == "shard" and number in full):
                shard.sync()
            elif self._sync == "shard":
                shard.send()
        return full

    def _opened(self, number: int, series: Series) -> OpenShard:
        while len(self._open) >= self._most:  # appends go round: the last opened is needed last
            self._put_aside(next(reversed(self._open)))
        fresh = number >= self._index.next_shard
        path = shard_path(self.folder, self.rank, number)
        shard = OpenShard(path, series, self._ahead, fresh=fresh)
        if fresh and self._sync == "commit":
            try:
                sync_folder(self.folder)
            except BaseException:
                shard.close()
                raise
        return shard

    def _put_aside(self, number: int) -> None:
        """Close a shard, so that another file can be opened."""
        shard = self._open.pop(number)
        self._aside.add(number)
        try:
            shard.finish(sync=False)
        finally:
            shard.close()

    def _take_back(self, new: Index) -> None:
        """Undo an append that failed, unless its index is already there."""
        self._unclean = True
        with contextlib.suppress(OSError, StoreError):  # whoever opens the store does it otherwise
            for number in [*self._open]:  # it may have failed because too many files are open
                self._put_aside(number)
            if read_index(self.folder, self.rank) == new and new is not self._index:
                self._index, self._unclean = new, False
                return
            for number in shard_numbers(self.folder, self.rank):
                if number >= self._index.next_shard:
                    shard_path(self.folder, self.rank, number).unlink()
            done = [self._cut(series) for series in self._index.series]
            self._unclean = not all(done)

    def _cut(self, series: Series) -> bool:
        """Cut the last shard of a series to what is committed."""
        number = series.shards[-1] if series.shards else -1
        if number not in self._aside:
            return True
        shard = self._opened(number, series)
        try:
            return shard.cut(series, series.rows_in(len(series.shards) - 1))
        finally:
            shard.close()

    def close(self) -> None:
        """Finish: sync as the policy says and close the files. May be called twice."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._held is _CLOSED:
            return
        try:
            if self._unclean:
                self._take_back(self._index)
            for shard in self._open.values():
                shard.finish(sync=self._sync != "never")
            if self._sync != "never":
                for number in self._aside.difference(self._open):
                    if number < self._index.next_shard:
                        sync_file(shard_path(self.folder, self.rank, number))
                self._index_file.write(self._index, True)
                sync_folder(self.folder)
        except OSError as error:
            raise _failed(f"finish the store in {str(self.folder)!r}", error) from error
        finally:
            for shard in self._open.values():
                shard.close()
            self._open.clear()
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


def _failed(what: str, error: OSError) -> StoreError:
    remedy = "See to the disk, its space and permissions"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "Close other files, or raise the limit (ulimit -n)"
    return StoreError(
        f"Cannot {what}.",
        f"The system says: {error.strerror or error}.",
        f"All that was committed before is still there. {remedy}, then go on, later with "
        "resume=True.",
    )
