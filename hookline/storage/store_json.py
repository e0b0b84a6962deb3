"""store.json: the description of a store, once for all ranks.

- `describe(folder, metadata, rank)`: write it, or check that the existing one is the same
- `settle(folder, rank, series, sync)`: add places and ids, or check that all ranks agree
- `read_description(folder)`: the metadata
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hookline.errors import StoreError
from hookline.operating_system import replace
from hookline.storage.locks import held, locked
from hookline.storage.small_files import as_json, corrupt, read_json, write_json
from hookline.storage.store_files import Series, ranks_of, read_index

__all__ = ["describe", "read_description", "settle"]

_FORMAT = {"format": "hookline.store", "version": 1}


def describe(folder: Path, metadata: Mapping[str, Any] | None, rank: int) -> None:
    """Write store.json, or check that the existing one is the same."""
    path = folder / "store.json"
    wanted = as_json(metadata or {}, "the metadata")
    if not path.exists():
        first = path.with_name(f"store.json.{rank}.first")
        write_json(first, {**_FORMAT, "places": None, "metadata": wanted}, False)
        try:
            os.link(first, path)  # unlike a rename, never replaces that of another rank
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            with held(folder, alone=True):
                if not path.exists():
                    replace(first, path)
        first.unlink(missing_ok=True)
    found = read_description(folder)
    if metadata is not None and found != wanted:
        raise StoreError(
            f"Cannot write to the store in {str(folder)!r} with other metadata.",
            f"There: {str(found)[:200]}. Given: {str(wanted)[:200]}.",
            "Leave metadata out, or choose another folder.",
        )


def settle(folder: Path, rank: int, series: list[Series], sync: bool) -> None:
    """Add places and ids to store.json; raise if another rank has written others."""
    path = folder / "store.json"
    varying = {one.place for one in series if one.part == "offsets"}
    places = {
        one.place: {"dtype": one.dtype, "shape": [*one.shape], "varying": one.place in varying}
        for one in series
        if one.part == "rows"
    }
    parts = {one.part for one in series}
    ids = "strings" if "id offsets" in parts else "integers" if "ids" in parts else None
    given = {"ids": ids, "places": places}
    content = read_json(path)
    said = {key: content[key] for key in given if key in content}  # earlier versions: no ids
    if all(given[key] == value for key, value in said.items()):
        return
    if said.get("places") is not None and _others(folder, rank):
        raise StoreError(
            f"Cannot append to {str(folder)!r}.",
            f"Another rank has {str(said)[:300]}; this one {str(given)[:300]}.",
            "Let all ranks write the same places, dtypes and shapes, and the same kind of ids.",
        )
    write_json(path, {**content, **given}, sync)


def _others(folder: Path, rank: int) -> bool:
    """Return True if another rank has samples or, as it is alive, may be about to have some.

    If not, the content of store.json comes from a first append that failed.
    """
    for other in ranks_of(folder):
        if other != rank:
            with locked(folder, other) as free:
                if not free or read_index(folder, other).series:
                    return True
    return False


def read_description(folder: Path) -> dict[str, Any]:
    """Return the metadata of a store; raise if store.json is not one of hookline."""
    content = read_json(folder / "store.json")
    metadata = content.get("metadata")
    known = all(content.get(key) == value for key, value in _FORMAT.items())
    if not known or not isinstance(metadata, dict):
        raise corrupt(folder / "store.json", "It describes no store of this version")
    return cast("dict[str, Any]", metadata)
