"""The plan of a harvest: what it will write, and whether it may continue an earlier one.

- `describe(extractor, world)`: the model, options and edits of a harvest, for store.json
- `refuse_changes(folder, wanted)`: raise with the reason if an earlier harvest was different
- `HarvestPlan`: places, shapes, rows, bytes and free space, as a table
- `plan_for(...)`: the plan, from the rows of a first batch
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from hookline.errors import HarvestError
from hookline.harvests.fingerprints import (
    bound_content,
    digest,
    fingerprint,
    live_edits,
    stable_text,
)
from hookline.harvests.row_extraction import BatchRows, RowExtractor
from hookline.isolation.training_modes import modes_of
from hookline.places.tree import walk
from hookline.storage.store_files import HEADER
from hookline.storage.store_json import read_description
from hookline.values.tables import as_text, show_bytes

__all__ = ["HarvestPlan", "describe", "plan_for", "refuse_changes"]

_WORDS = {
    "model": "The model was a {0}; now it is a {1}.",
    "fingerprint": "The model's weights or modules are others (fingerprint {0}, now {1}).",
    "places": "The places were {0}; now they are {1}.",
    "dtype": "Values were stored with dtype={0}; now it is {1}.",
    "at": "Values were taken at={0}; now it is {1}.",
    "transform": "The transform was {0}; now it is {1}.",
    "mask": "The mask was {0}; now it is {1}.",
    "ids": "The ids were {0}; now they are {1}.",
    "forward": "The forward was {0}; now it is {1}.",
    "bound": "A function has other arguments, or a module other weights ({0}, now {1}).",
    "stop": "The forward was run with stop={0}; now it is {1}.",
    "mode": "The model was in {0} mode; now it is in {1} mode.",
    "edits": "The edits on the model were {0}; now they are {1}.",
    "ranks": "There were {0} ranks; now there are {1}.",
    "data": "The first batch differs: the data is other data, or in another order.",
}
_FIXES = {
    "ranks": "Start as many ranks as before, or choose another folder.",
    "data": "Give the data in the same order each time and on every rank (shuffle=False), or give "
    "ids=, which are then compared instead. Or choose another folder.",
}


def describe(extractor: RowExtractor, world: int | None) -> dict[str, Any]:
    """Return what a harvest depends on; functions by their name, code and bound arguments."""
    options = extractor.options
    functions = (options.at, options.transform, options.mask, options.ids, options.forward)
    return {
        "model": type(extractor.model).__name__,
        "fingerprint": fingerprint(extractor.model),
        "places": [str(place) for place in extractor.asked],
        "dtype": None if options.dtype is None else str(options.dtype).removeprefix("torch."),
        "at": stable_text(options.at),
        "transform": stable_text(options.transform),
        "mask": stable_text(options.mask),
        "ids": stable_text(options.ids),
        "forward": stable_text(options.forward),
        "bound": [bound_content(function) for function in functions],
        "stop": options.stop,
        "mode": _mode(extractor.model),
        "edits": live_edits(extractor.model),
        "ranks": world,
    }


def _mode(model: nn.Module) -> str:
    modes = modes_of([module for _, module in walk(model)])
    flags = [mode for mode in modes if mode is not None]
    if len(set(flags)) > 1:
        return f"a mixed ({digest(flags):08x})"
    return "training" if all(flags) else "evaluation"


def refuse_changes(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise if the store was written by a different harvest, or by something else."""
    if not (folder / "store.json").exists():
        return
    found = read_description(folder).get("harvest")
    asked = f"A harvest was to go on in {str(folder)!r}."
    if not isinstance(found, dict):
        raise HarvestError(
            asked, "The store there does not come from a harvest.", "Choose another folder."
        )
    found = cast("dict[str, Any]", found)
    for key, words in _WORDS.items():
        # Older versions did not note everything.
        if key in wanted and key in found and found[key] != wanted[key]:
            fix = _FIXES.get(key, "Give what was given before, or choose another folder.")
            shown = (str(one)[:120] for one in (found[key], wanted[key]))
            raise HarvestError(asked, words.format(*shown), fix)


@dataclass(frozen=True)
class HarvestPlan:
    """The places, shapes, rows and bytes that a harvest will write; its repr is a table."""

    folder: str
    # Place, row, number of rows, dtype and bytes, of the first batch.
    rows: tuple[tuple[str, str, int, str, int], ...]
    samples: int  # in the first batch
    batches: int | None  # batches of this rank; None if unknown
    done: int  # batches that are done
    ranks: int
    free: int
    varies: bool = False  # True if samples differ in their number of rows
    other: int = 0  # bytes of ids and offsets of the first batch
    stops: bool = False

    @property
    def batch_bytes(self) -> int:
        """The bytes of a batch on disk."""
        return sum(size for *_, size in self.rows) + self.other

    @property
    def nbytes(self) -> int | None:
        """The bytes that all ranks have still to write, headers included."""
        if self.batches is None:
            return None
        left = max(0, self.batches - self.done)
        return (left * self.batch_bytes + HEADER * (len(self.rows) + 2)) * self.ranks

    def check_space(self) -> None:
        """Raise if it does not fit on the disk."""
        if self.nbytes is not None and self.nbytes > self.free:
            raise HarvestError(
                f"A harvest of {show_bytes(self.nbytes)} into {self.folder!r} was asked for.",
                f"There are {show_bytes(self.free)} free on that disk.",
                "Name fewer places, take a part of each value with at=, store dtype=torch.bfloat16,"
                " or choose another disk.",
            )

    def __repr__(self) -> str:
        unknown = self.batches is None
        total = 1 if self.batches is None else self.batches * self.ranks
        head = ("place", "row", "rows", "dtype", "a batch" if unknown else "in all")
        table: list[tuple[str, ...]] = [head]
        for place, row, count, dtype, size in self.rows:
            table.append((place, row, f"{count * total:,}", dtype, show_bytes(size * total)))
        if not self.varies:  # as many rows as samples
            table = [(*cells[:2], *cells[3:]) for cells in table]
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        places = f"{len(self.rows)} place{'s' * (len(self.rows) != 1)}"
        title = f"Harvest of {places} into {self.folder!r}{ranks}"
        space = f"{show_bytes(self.free)} are free"
        if self.nbytes is None or self.batches is None:
            last = f"batches of {self.samples}, nobody knows how many; {space}"
        else:
            count = (
                f"about {self.samples * total:,} samples in {total:,} batch{'es' * (total != 1)}"
            )
            going = f"{self.done * self.ranks:,} of them are done, " if self.done else ""
            last = f"{count}, {going}{show_bytes(self.nbytes)} to write; {space}"
        stop = "\n  the forward stops once all places have fired" if self.stops else ""
        return f"{as_text(title, table)}\n  {last}{stop}"


def plan_for(
    batch_rows: BatchRows, folder: Path, batches: int | None, done: int, ranks: int, stops: bool
) -> HarvestPlan:
    """Return the plan of a rank's share, from the rows of one batch."""
    rows: list[tuple[str, str, int, str, int]] = []
    other = sum(len(str(one)) + 8 if isinstance(one, str) else 8 for one in batch_rows.ids or ())
    for place, value in batch_rows.rows.items():
        varies = isinstance(value, list)
        pieces = value if varies else [value]
        shape = tuple(pieces[0].shape[1:]) if pieces else ()
        row = f"{shape}{' each position' if varies else ''}"
        dtype = str(pieces[0].dtype).removeprefix("torch.") if pieces else ""
        size = sum(piece.nbytes for piece in pieces)
        rows.append((place or "''", row, sum(map(len, pieces)), dtype, size))
        other += 8 * len(pieces) if varies else 0
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    some_vary = any(isinstance(value, list) for value in batch_rows.rows.values())
    return HarvestPlan(
        str(folder),
        tuple(rows),
        batch_rows.samples,
        batches,
        done,
        ranks,
        free,
        some_vary,
        other,
        stops,
    )
