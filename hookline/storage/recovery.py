"""Recover a store: cut off what a killed writer left uncommitted.

- `recover(folder, rank, held)`: check the shards of a rank and cut them to its index
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path

from hookline.errors import StoreError, warn_outside
from hookline.operating_system import is_link, replace, sync_folder
from hookline.storage.locks import locked
from hookline.storage.small_files import corrupt, sync_file
from hookline.storage.store_files import (
    HEADER,
    PAGE,
    Index,
    Series,
    header_of,
    read_header,
    read_index,
    shard_numbers,
    shard_path,
)
from hookline.values.tables import show_bytes

__all__ = ["recover"]


def recover(folder: Path, rank: int, *, held: bool = False) -> Index:
    """Return the index of a rank; drop rows behind it, with a warning.

    Nothing is changed if a living writer holds the lock or the folder cannot be written: readers
    stop at what the index says in any case. A file that other folders have too is left alone.
    `held` says that the caller has the lock and is going to write.
    """
    if held:
        return _cut(folder, read_index(folder, rank), held=True)
    attempts = 5
    while True:
        try:
            index = read_index(folder, rank)
            if not _tails(folder, index):
                return index
            break
        except StoreError:  # a living writer may just be at a header: look again
            attempts -= 1
            with locked(folder, rank) as free:
                if free or not attempts:
                    raise
            time.sleep(0.01)
    with locked(folder, rank) as free:
        return _cut(folder, read_index(folder, rank)) if free else index


def _tails(folder: Path, index: Index) -> dict[Path, int]:
    """Return the shards with more bytes than committed, and how many; raise if one has fewer."""
    tails: dict[Path, int] = {}
    for series in index.series:
        for position, number in enumerate(series.shards):
            path = shard_path(folder, index.rank, number)
            rows, size = read_header(path, series)
            committed = series.rows_in(position)
            last = position == len(series.shards) - 1
            if rows < committed or (rows > committed and not last):
                raise corrupt(path, f"It has {rows} rows where the index promises {committed}")
            end = HEADER + committed * series.row_bytes
            if size != end or rows != committed:
                tails[path] = size - end
            if last and series.rows_part:
                _check_end(path, index, series, committed)
    for number in shard_numbers(folder, index.rank):
        if number >= index.next_shard:
            path = shard_path(folder, index.rank, number)
            with suppress(FileNotFoundError):
                tails[path] = path.stat().st_size
    return tails


def _check_end(path: Path, index: Index, ends: Series, committed: int) -> None:
    """Raise unless the last sample ends where the rows end; nothing is cut before that."""
    divided = (ends.place, ends.rows_part)
    rows = sum(series.rows for series in index.series if (series.place, series.part) == divided)
    with path.open("rb") as file:
        file.seek(HEADER + (committed - 1) * 8)
        (end,) = struct.unpack("<q", file.read(8))
    if end != rows:
        raise corrupt(path, f"Its last sample ends at row {end} of {rows}")


def _shared(path: Path) -> bool:
    """Return True if another folder may have the same file, with rows of its own in it."""
    return is_link(path) or path.lstat().st_nlink > 1


def _own(path: Path) -> None:
    """Replace a link by a copy, so that nothing is written into another folder."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.copyfile(path, partial)
    sync_file(partial)
    replace(partial, path)
    sync_folder(path.parent)


def _cut(folder: Path, index: Index, *, held: bool = False) -> Index:
    tails = _tails(folder, index)
    listed = {
        shard_path(folder, index.rank, number): (series, series.rows_in(position))
        for series in index.series
        for position, number in enumerate(series.shards)
    }
    for path, (series, rows) in listed.items():
        if (path in tails or rows < series.shard_rows) and _shared(path):
            if held:
                _own(path)
            else:
                tails.pop(path, None)
    if not tails:
        return index
    try:
        for path in tails:
            if path not in listed:
                path.unlink()
                continue
            series, rows = listed[path]
            with path.open("r+b", buffering=0) as file:
                file.write(header_of(series, rows).ljust(PAGE))
                os.ftruncate(file.fileno(), HEADER + rows * series.row_bytes)
    except OSError:  # read-only, or mapped on Windows: readers stop at the index anyway
        return index
    warn_outside(
        f"A writer of rank {index.rank} stopped in the middle of an append to {str(folder)!r}: "
        f"dropped {show_bytes(sum(tails.values()))} in {len(tails)} shards that were never "
        f"committed. The {index.samples} samples that were are all there."
    )
    return index
