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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.store_description import describe, settle
from hookline.store_files import (
    HEADER,
    PAGE,
    Index,
    Series,
    header_of,
    index_path,
    kind_of,
    read_header,
    read_index,
    shard_numbers,
    shard_path,
    sync_folder,
    write_index,
)
from hookline.store_locks import locked
from hookline.store_recovery import recover
from hookline.store_values import compare_series, ids_of, rows_of

__all__ = ["StoreWriter", "Sync"]

Sync = Literal["commit", "shard", "never"]
_Block = tuple[Series, Tensor]  # a series as it would begin, and the rows to put behind it


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
            write_index(self.folder, self._index, self._sync != "never")

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
        blocks, samples = self._blocks(values, ids)
        if not samples:
            return
        series = [replace(one, shards=[*one.shards]) for one in self._index.series]
        new = replace(self._index, samples=self._index.samples + samples, series=series)
        if not new.series:
            new.series = [replace(series) for series, _ in blocks]
            for series in new.series:
                series.shards = []
        try:
            if self._unclean:
                self._take_back(self._index)
            if not self._index.series:
                settle(self.folder, new.series, self._sync == "commit")
            touched: dict[int, tuple[Series, int]] = {}
            for series, (_, rows) in zip(new.series, blocks, strict=True):
                touched |= self._write_rows(new, series, rows)
            for number, (series, position) in touched.items():
                header = header_of(series, series.rows_in(position)).ljust(PAGE)
                _write(self._files[number], header, 0)
                full = series.rows_in(position) == series.shard_rows
                if self._sync == "commit" or (full and self._sync == "shard"):
                    os.fsync(self._files[number])
            new.mark = self._index.mark if mark is None else dict(mark)
            write_index(self.folder, new, self._sync == "commit")
        except BaseException as error:
            self._take_back(new)
            if isinstance(error, OSError):
                raise _failed(f"append to {str(self.folder)!r}", error) from error
            raise
        self._index = new
        for number, (series, position) in touched.items():
            if series.rows_in(position) == series.shard_rows:
                os.close(self._files.pop(number))

    def note(self, mark: Mapping[str, Any]) -> None:
        """Commit a mark without samples."""
        old = self._index
        new = Index(old.rank, old.samples, old.next_shard, old.series, dict(mark))
        try:
            write_index(self.folder, new, self._sync == "commit")
        except OSError as error:
            raise _failed(f"note how far {str(self.folder)!r} has come", error) from error
        self._index = new

    def _write_rows(
        self, new: Index, series: Series, rows: Tensor
    ) -> dict[int, tuple[Series, int]]:
        """Write rows behind those of a series, into new shards where needed."""
        touched: dict[int, tuple[Series, int]] = {}
        if not len(rows):  # samples may all be empty; torch views no such tensor as bytes
            return touched
        data = memoryview(cast("bytes", rows.flatten().view(torch.uint8).numpy()))
        done, size = 0, series.row_bytes
        while done < len(rows):
            position, inside = divmod(series.rows, series.shard_rows)
            if position == len(series.shards):
                series.shards.append(new.next_shard)
                new.next_shard += 1
            number = series.shards[position]
            if number not in self._files:
                self._files[number] = self._open(number, series)
            count = min(len(rows) - done, series.shard_rows - inside)
            place = HEADER + inside * size
            _write(self._files[number], data[done * size : (done + count) * size], place)
            series.rows += count
            done += count
            touched[number] = series, position
        return touched

    def _open(self, number: int, series: Series) -> int:
        fresh = number >= self._index.next_shard
        flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if fresh else 0) | getattr(os, "O_BINARY", 0)
        file = os.open(shard_path(self.folder, self.rank, number), flags, 0o666)
        if fresh:
            try:
                _write(file, header_of(series, 0).ljust(HEADER), 0)
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
                _write(self._files[number], header_of(series, rows).ljust(PAGE), 0)
            os.ftruncate(self._files[number], HEADER + rows * series.row_bytes)
            return True
        return False

    def _blocks(
        self, values: Mapping[str, Tensor | Sequence[Tensor]], ids: Any
    ) -> tuple[list[_Block], int]:
        """Each series of the store with the rows to append, checked, and how many samples."""
        old = {(one.place, one.part): one for one in self._index.series}
        blocks: list[_Block] = []
        counts: dict[str, int] = {}
        for place, value in values.items():
            varies = (place, "offsets") in old if old else isinstance(value, (list, tuple))
            rows, lengths = rows_of(place, value, varies)
            counts[place] = len(rows) if lengths is None else len(lengths)
            blocks.append((self._series(place, "rows", rows), rows))
            if lengths is not None:
                blocks.append(self._offsets(place, "offsets", "rows", lengths))
        if ids is not None:
            rows, lengths = ids_of(ids)
            counts["ids"] = len(rows) if lengths is None else len(lengths)
            blocks.append((self._series("", "ids", rows), rows))
            if lengths is not None:
                blocks.append(self._offsets("", "id offsets", "ids", lengths))
        if not values or len(set(counts.values())) != 1:
            raise StoreError(
                "Cannot append these values.",
                f"Samples: {counts}." if values else "There are none.",
                "Give every place, and the ids, the same number of samples, in the first size.",
            )
        if old:
            order = [*old, *((one.place, one.part) for one, _ in blocks)]
            blocks.sort(key=lambda block: order.index((block[0].place, block[0].part)))
            compare_series(list(old.values()), [series for series, _ in blocks])
        return blocks, next(iter(counts.values()))

    def _series(self, place: str, part: str, rows: Tensor) -> Series:
        kind = kind_of(rows.dtype)
        shape = tuple(rows.shape[1:])
        if kind is None or 0 in shape:
            raise StoreError(
                f"Cannot store {place!r}.",
                f"A row is {shape} {rows.dtype}, which "
                + ("safetensors does not have." if kind is None else "holds nothing."),
                "Convert it first, for instance with .float().",
            )
        series = Series(place, part, kind.name, shape, 1)
        series.shard_rows = max(1, self._shard_bytes // series.row_bytes)
        try:
            place.encode()
            fits = len(header_of(series, 1 << 62)) <= PAGE and place != "__metadata__"
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise StoreError(
                f"Cannot store a place named {place[:40]!r}.",
                "The name is longer than a page, no Unicode, or reserved by safetensors.",
                "Give it another name.",
            )
        return series

    def _offsets(self, place: str, part: str, of: str, lengths: list[int]) -> _Block:
        """Where each sample ends, counted over all rows of the rank."""
        start = sum(s.rows for s in self._index.series if (s.place, s.part) == (place, of))
        ends = torch.from_numpy(np.cumsum(np.asarray(lengths, dtype=np.int64)) + start)
        return self._series(place, part, ends), ends

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
                write_index(self.folder, self._index, True)
        except OSError as error:
            raise _failed(f"finish the store in {str(self.folder)!r}", error) from error
        finally:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
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


def _write(file: int, data: bytes | memoryview, place: int) -> None:
    """Write all of it: a nearly full disk, or more than 2 GB, takes only a part at first."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)
        if written <= 0:
            raise OSError("the system wrote nothing and gave no reason")
        view, place = view[written:], place + written


def _failed(what: str, error: OSError) -> StoreError:
    return StoreError(
        f"Cannot {what}.",
        f"The system says: {error.strerror or error}.",
        "All that was committed before is still there. See to the disk, its space and "
        "permissions, then go on, later with resume=True.",
    )
