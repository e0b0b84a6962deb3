"""Complete a harvest on many ranks: wait for the others, then describe the whole store.

- `finish(writer, world, statistics)`: each rank calls it when its share is written
- `unfinish(folder)`: remove the description of the whole before more is written
- `earlier(folder, rank)`: how many samples a rank has committed, and its mark
- `open_writer(folder, rank, metadata)`: the writer of a rank, also right after a crash

harvest.json exists when all ranks are done. Rank 0 writes it; if that process is gone, the rank
that ends last does.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from hookline.errors import StoreError, warn_outside
from hookline.harvests.harvest_plan import refuse_changes
from hookline.harvests.harvest_statistics import keep_whole, merge_ranks, statistics_path
from hookline.storage import json_safetensors
from hookline.storage.locks import locked
from hookline.storage.store import Store
from hookline.storage.store_files import Index, index_path, read_index
from hookline.storage.store_writer import StoreWriter

__all__ = ["earlier", "finish", "open_writer", "unfinish"]

_LOOK = 0.2  # seconds between two looks at the other ranks
_PATIENCE = 600.0  # seconds in which no other rank commits anything
_ORPHANS = 15.0  # seconds that the workers of a killed process take to notice, and let go of locks


def earlier(folder: Path, rank: int) -> Index:
    """Return what a rank has committed so far."""
    return read_index(folder, rank) if index_path(folder, rank).exists() else Index(rank)


def open_writer(folder: Path, rank: int, wanted: dict[str, Any]) -> StoreWriter:
    """Return the writer of a rank, which resumes; `wanted` is the result of `describe`."""
    until = time.monotonic() + _ORPHANS
    while True:
        known = (folder / "store.json").exists()
        metadata = None if known else {"harvest": wanted}
        try:
            return Store.create(folder, metadata=metadata, rank=rank, resume=True)
        except StoreError as error:
            refuse_changes(folder, wanted)  # another rank was quicker, and sees other data
            if isinstance(error.__cause__, OSError):  # the disk failed: waiting does not help
                raise
            with locked(folder, rank) as free:
                if free or time.monotonic() > until or not folder.is_dir():
                    raise
        time.sleep(_LOOK)


def finish(writer: StoreWriter, world: int, statistics: str | None) -> None:
    """Complete a rank that has set its mark, before its writer is closed."""
    folder, mark = writer.folder, {"done": True, "kinds": statistics}
    mark["length"] = writer.mark.get("length")  # another has yet to go on with data that has grown
    if writer.rank == 0:
        missing = _wait(folder, world, mark)
        if not missing:
            _describe(folder, world, statistics)
        else:
            warn_outside(
                f"Ranks {missing} have committed nothing for a while and are not done. What there "
                f"is can be read; start them again to complete the store in {str(folder)!r}."
            )
    elif not _missing(folder, world, mark):
        with locked(folder, 0) as free:  # if not, rank 0 is there and does it
            if free:
                _describe(folder, world, statistics)


def unfinish(folder: Path) -> None:
    """Remove the description of an earlier harvest, since more samples will come."""
    (folder / "harvest.json").unlink(missing_ok=True)
    shutil.rmtree(statistics_path(folder), ignore_errors=True)


def _missing(folder: Path, world: int, wanted: dict[str, Any]) -> list[int]:
    return [rank for rank in range(world) if not _is_done(_mark(folder, rank), wanted)]


def _is_done(mark: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return True if a rank is done with as many batches; without any it cannot tell how many."""
    lengths = {one.get("length") for one in (mark, wanted)} - {None}
    return len(lengths) < 2 and all(mark.get(key) == wanted[key] for key in ("done", "kinds"))


def _mark(folder: Path, rank: int) -> dict[str, Any]:
    try:
        return earlier(folder, rank).mark
    except StoreError:  # it is just being written
        return {}


def _wait(folder: Path, world: int, wanted: dict[str, Any]) -> list[int]:
    """Return the ranks that are missing after none of them has committed anything for long."""
    seen: list[Any] = []
    since = time.monotonic()
    while missing := _missing(folder, world, wanted):
        now = [_mark(folder, rank) for rank in missing]
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > _PATIENCE:
            break
        time.sleep(_LOOK)
    return missing


def _describe(folder: Path, world: int, statistics: str | None) -> None:
    """Write harvest.json, and the statistics of all ranks as one."""
    indexes = [read_index(folder, rank) for rank in range(world)]
    samples = sum(index.samples for index in indexes)
    whole = keep_whole(folder, samples) if statistics is None else merge_ranks(folder, world)
    content = {
        "samples": samples,
        "batches": sum(index.mark["batches"] for index in indexes),
        "statistics": "statistics" if whole else None,
        "ranks": [
            {"rank": n, "samples": index.samples, "batches": index.mark["batches"]}
            for n, index in enumerate(indexes)
        ],
    }
    json_safetensors.write(folder, "harvest", content, {})
