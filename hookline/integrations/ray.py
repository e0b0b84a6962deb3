"""Harvest with Ray Data: `map_batches` over a pool of actors, each of which writes shards.

- `Harvester`: the class to give to `map_batches`

Importing this file does not import Ray: Ray calls the class.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hookline.errors import HarvestError, StoreError
from hookline.harvests.harvest_plan import describe, refuse_changes
from hookline.harvests.row_extraction import RowExtractor, RowOptions
from hookline.places.resolution import Where
from hookline.storage.locks import locked
from hookline.storage.store import Store
from hookline.storage.store_files import ranks_of, read_index
from hookline.storage.store_writer import StoreWriter

__all__ = ["Harvester"]

_MOST = 10_000  # actors
_PATIENCE = 60.0  # seconds in which all ranks seem to be taken


class Harvester:
    """Stores the values at places for the batches of a Ray data set, like `hookline.harvest`.

    `dataset.map_batches(Harvester, fn_constructor_kwargs={...}, batch_size=256,
    compute=ray.data.ActorPoolStrategy(size=2)).materialize()` runs it in two actors. Ray makes such
    a call for each batch:

    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/acts"
    >>> harvester = Harvester(nn.Linear(3, 2), "", folder, ids="id", inputs="x")
    >>> done = harvester({"id": np.arange(4), "x": np.ones((4, 3), dtype="float32")})
    >>> done["samples"], Store.open(folder).ids
    ([4], [0, 1, 2, 3])

    Each actor writes as a rank of its own, the first that no living actor has. Ray runs a batch
    again if its actor dies, and in any order: samples are identified by their ids, and stored ones
    are left out, also after a new start of the whole program. An actor keeps the ids of its stored
    samples in memory, some 100 bytes each.

    Args:
        model: a module, or a function that makes one in each actor.
        where, to, at, transform, dtype, stop, mask, forward: as in `hookline.harvest`. All actors
            must reach the folder `to`.
        ids: the column with a number or a word for each sample.
        inputs: the column that is the model's argument, or a dict from the names of its arguments
            to columns. With `forward`, the batch goes there: a dict of tensors.

    A call returns one row: the folder, the rank, how many samples were stored and how many had
    been stored before.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        where: Where,
        to: str | os.PathLike[str],
        *,
        ids: str,
        inputs: str | Mapping[str, str] | None = None,
        at: Any = None,
        transform: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        stop: Any = "auto",
        mask: str | Callable[[Any], Any] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        made = model if isinstance(model, nn.Module) else model()
        if (inputs is None) == (forward is None):
            raise HarvestError(
                "A Harvester was to be made.",
                "It was given both inputs= and forward=." if inputs else "It was given neither.",
                "Say with inputs= which columns are the model's arguments, or give forward=.",
            )
        options = RowOptions(
            at, transform, dtype, stop, mask, ids, forward or partial(_run, inputs=inputs)
        )
        self._extractor = RowExtractor(made, where, options)
        self._folder = Path(to).absolute()
        wanted = describe(self._extractor, None)
        refuse_changes(self._folder, wanted)
        self._writer = _free_writer(self._folder, wanted)
        self._lives: dict[int, Any] = {}  # by rank, how often it was begun when we read its ids
        self._seen: set[Any] = set()
        self._extractor.go_on(read_index(self._folder, self._writer.rank).series)
        mark = self._writer.mark
        self._writer.note({**mark, "lives": mark.get("lives", 0) + 1})
        self._seen.update(_ids_of(self._folder, self._writer.rank))
        self._look_around()

    def __call__(self, batch: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
        """Store a batch of Ray: a dict of arrays."""
        self._look_around()
        columns = {name: _tensor(column) for name, column in batch.items()}
        names: list[Any] = self._extractor.options.ids_of(columns)
        first = {name: len(names) - n for n, name in enumerate(reversed(names), 1)}  # where each is
        new = sorted(n for name, n in first.items() if name not in self._seen)
        if new and len(new) < len(names):
            columns = {k: _some(column, new) for k, column in columns.items()}
        if new:
            batch_rows = self._extractor.take(columns)
            self._writer.append(batch_rows.rows, ids=batch_rows.ids)
            self._seen.update(batch_rows.ids)
        return {
            "store": [str(self._folder)],
            "rank": [self._writer.rank],
            "samples": [len(new)],
            "stored before": [len(names) - len(new)],
        }

    def _look_around(self) -> None:
        """Read which samples ranks have stored whose actor has died: Ray runs its batch again."""
        for rank in ranks_of(self._folder):
            if rank == self._writer.rank:
                continue
            with suppress(StoreError):  # an index that is just being written
                index = read_index(self._folder, rank)
                with locked(self._folder, rank) as free:
                    now = (index.mark.get("lives"), index.samples if free else None)
                if self._lives.get(rank) != now:
                    self._seen.update(_ids_of(self._folder, rank))
                    self._lives[rank] = now

    def close(self) -> None:
        """Close the files. Stored samples are committed in any case."""
        if hasattr(self, "_writer"):
            self._writer.close()

    def __del__(self) -> None:
        self.close()


def _run(model: nn.Module, batch: dict[str, Any], *, inputs: str | Mapping[str, str] | None) -> Any:
    if isinstance(inputs, str):
        return model(_column(batch, inputs))
    return model(**{name: _column(batch, column) for name, column in (inputs or {}).items()})


def _column(batch: dict[str, Any], name: str) -> Any:
    """Return the content of a column; raise if it is missing, or has rows of several lengths."""
    found: Any = batch.get(name)
    rows = cast("Any", found) if isinstance(found, list) else ()
    uneven = any(isinstance(one, np.ndarray) for one in rows)
    if found is None or uneven:
        raise HarvestError(
            f"The column {name!r} was to be an argument of the model.",
            "Its rows differ in shape." if uneven else f"The batch has {list(batch)}.",
            "Pad them before, or give forward=." if uneven else "Name one of these.",
        )
    return cast("Any", found)


def _free_writer(folder: Path, wanted: dict[str, Any]) -> StoreWriter:
    """Return a writer as the first rank that no living process has."""
    until = time.monotonic() + _PATIENCE
    for rank in range(_MOST):
        while True:
            known = (folder / "store.json").exists()
            try:
                return Store.create(
                    folder,
                    metadata=None if known else {"harvest": wanted},
                    rank=rank,
                    resume=True,
                )
            except StoreError as error:
                refuse_changes(folder, wanted)
                if isinstance(error.__cause__, OSError):  # of the disk: waiting does not help
                    raise
                with locked(folder, rank) as free:
                    if not free:
                        break  # taken
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)  # someone looked at it just then
    raise HarvestError(
        f"A Harvester was to write to {str(folder)!r}.",
        f"{_MOST} others are at work there.",
        "Use fewer actors.",
    )


def _ids_of(folder: Path, rank: int) -> list[Any]:
    """Return the ids that a rank has stored."""
    return Store(folder, {}, [read_index(folder, rank)]).ids or []


def _tensor(column: Any) -> Any:
    """Return a column as a tensor; as a list if it holds words, or arrays of several shapes."""
    array = np.asarray(column)
    rows: list[Any] = array.tolist() if array.dtype.kind == "O" else []
    shapes: set[Any] = {getattr(one, "shape", None) for one in rows}
    if len(shapes) == 1 and None not in shapes:
        array = np.asarray([*rows])  # Ray gives lists, such as tokens, as an array of arrays
    if array.dtype.kind in "biufc":
        return torch.from_numpy(np.array(array))  # Ray's own are read-only
    return cast("list[Any]", array.tolist())


def _some(column: Any, chosen: list[int]) -> Any:
    return [column[n] for n in chosen] if isinstance(column, list) else column[chosen]
