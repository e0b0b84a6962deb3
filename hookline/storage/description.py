"""store.json: what a store is, once for all ranks.

- `describe(folder, metadata, rank)`: write it, or see that the one there says the same
- `settle(folder, series, sync)`: add the places, or see that all ranks write the same
- `read_description(folder)`: the metadata
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hookline.errors import StoreError
from hookline.storage.files import Series
from hookline.storage.small_files import as_json, corrupt, read_json, write_json

__all__ = ["describe", "read_description", "settle"]

_FORMAT = {"format": "hookline.store", "version": 1}


def describe(folder: Path, metadata: Mapping[str, Any] | None, rank: int) -> None:
    """Write store.json, or see that the one there says the same."""
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
            first.replace(path)
        first.unlink(missing_ok=True)
    found = read_description(folder)
    if metadata is not None and found != wanted:
        raise StoreError(
            f"Cannot write to the store in {str(folder)!r} with other metadata.",
            f"There: {str(found)[:200]}. Given: {str(wanted)[:200]}.",
            "Leave metadata out, or choose another folder.",
        )


def settle(folder: Path, series: list[Series], sync: bool) -> None:
    """Say in store.json which places there are; an error if another rank said otherwise."""
    path = folder / "store.json"
    varying = {one.place for one in series if one.part == "offsets"}
    places = {
        one.place: {"dtype": one.dtype, "shape": [*one.shape], "varying": one.place in varying}
        for one in series
        if one.part == "rows"
    }
    content = read_json(path)
    if content.get("places") is None:
        write_json(path, {**content, "places": places}, sync)
    elif content["places"] != places:
        raise StoreError(
            f"Cannot append to {str(folder)!r}.",
            f"Another rank has {str(content['places'])[:300]}; this one {str(places)[:300]}.",
            "Let all ranks write the same places, dtypes and shapes.",
        )


def read_description(folder: Path) -> dict[str, Any]:
    """The metadata of a store; an error if store.json is none of ours."""
    content = read_json(folder / "store.json")
    metadata = content.get("metadata")
    known = all(content.get(key) == value for key, value in _FORMAT.items())
    if not known or not isinstance(metadata, dict):
        raise corrupt(folder / "store.json", "It describes no store of this version")
    return cast("dict[str, Any]", metadata)
