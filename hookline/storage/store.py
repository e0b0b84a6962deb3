"""A store: captured values on disk, in a folder that any reader of safetensors can open.

- `Store`: `Store.create(folder)` writes, `Store.open(folder)` reads
- `StoreInfo`: the content of a store, as a table
- `StoreDataset`: a store for a DataLoader

docs/store.md describes the format, the promises for crashes and the syncing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray
from torch.utils.data import Dataset

from hookline.errors import StoreError
from hookline.selecting import held_as
from hookline.storage.recovery import recover
from hookline.storage.store_files import ENDS, Index, Series, ranks_of
from hookline.storage.store_json import read_description
from hookline.storage.store_writer import StoreWriter, Sync
from hookline.storage.stored_rows import StoredRows, StoredSamples, positions_of
from hookline.values.tables import as_html, as_text, show_bytes

__all__ = ["Store", "StoreDataset", "StoreInfo"]


class Store:
    """Captured values on disk: rows of several places for numbered samples.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp() + "/acts"
    >>> with Store.create(folder, metadata={"model": "demo"}) as writer:
    ...     writer.append({"h.3": torch.arange(6.0).reshape(3, 2)}, ids=["a", "b", "c"])
    >>> store = Store.open(folder)
    >>> store["h.3"][1:], store.ids[2]
    (tensor([[2., 3.], [4., 5.]]), 'c')

    `store[place]` reads, `len(store)` counts samples, `store.places()`, `store.ids`,
    `store.metadata` and `store.info()` describe the content. Samples are in the order of ranks, and
    of appends within a rank. Reading copies rows out of mapped files; an open store does not see
    later appends.
    """

    def __init__(
        self,
        folder: Path,
        metadata: dict[str, Any] | None = None,
        indexes: list[Index] | None = None,
    ) -> None:
        if metadata is None or indexes is None:
            raise TypeError(
                f"Store({str(folder)!r}) was called. A store is either read or written. "
                "Use Store.open(folder) or Store.create(folder)."
            )
        self.folder, self.metadata = folder, metadata
        self._indexes = indexes
        self._columns: dict[str, StoredRows | StoredSamples] = {}
        self._ids: StoredRows | StoredSamples | None = None
        filled = [index for index in indexes if index.series]
        for place, part in dict.fromkeys((s.place, s.part) for i in filled for s in i.series):
            if part == "rows":
                self._columns[place] = _column(folder, filled, place, part)
            elif part == "ids":
                self._ids = _column(folder, filled, place, part)
        self._samples = sum(index.samples for index in indexes)

    @staticmethod
    def create(
        folder: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        rank: int | None = None,
        shard_bytes: int = 1 << 30,
        sync: Sync = "shard",
        resume: bool = False,
    ) -> StoreWriter:
        """Return a writer, for `with`. Each of its appends is committed when it returns.

        Args:
            folder: The folder, which is made if need be.
            metadata: Anything that JSON can hold.
            rank: The number of this writer among several; each has its own files. By default it is
                that of the launcher (the variable RANK), or 0.
            shard_bytes: The size at which a shard is full.
            sync: When rows are forced onto the disk: at each "commit", when a "shard" is full and
                at the end, or "never". A killed process loses nothing committed with any of them;
                a power cut may lose what was not yet forced.
            resume: Continue where this rank stopped, instead of refusing.
        """
        if rank is None:
            given = os.environ.get("RANK") or "0"
            rank = int(given) if given.isdecimal() else cast("int", given)  # refused as it is
        return StoreWriter(
            Path(folder).absolute(), metadata=metadata, rank=rank, shard_bytes=shard_bytes,
            sync=sync, resume=resume,
        )  # fmt: skip

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Store:
        """Open a store for reading; what a killed writer left behind is dropped, with a warning."""
        folder = Path(folder).absolute()
        if not (folder / "store.json").is_file():
            raise StoreError(
                f"Cannot open {str(folder)!r} as a store.",
                "There is no store.json in it." if folder.is_dir() else "There is no such folder.",
                "Name the folder that harvest or Store.create has written.",
            )
        metadata = read_description(folder)
        indexes = [recover(folder, rank) for rank in ranks_of(folder)]
        _agree(folder, [index for index in indexes if index.series])
        return Store(folder, metadata, indexes)

    def places(self) -> list[str]:
        """Return the stored places, in the order of the first append."""
        return list(self._columns)

    @property
    def ids(self) -> list[Any] | None:
        """The id of each sample; None if the store was written without."""
        if isinstance(self._ids, StoredSamples):
            return _words(self._ids.to_numpy())
        return None if self._ids is None else list(self._ids[:].numpy().tolist())

    def ids_between(self, start: int, stop: int) -> list[Any] | None:
        """Return the ids of some samples only, if all of them would take too much memory."""
        if isinstance(self._ids, StoredSamples):
            return _words(one.numpy() for one in self._ids[start:stop])
        return None if self._ids is None else list(self._ids[start:stop].numpy().tolist())

    def __len__(self) -> int:
        return self._samples

    def __contains__(self, place: object) -> bool:
        return held_as(place, self._columns) is not None

    def __getitem__(self, place: str) -> Any:
        """Return the rows of a place: `StoredRows`, or `StoredSamples` if lengths vary."""
        known = held_as(place, self._columns)
        if known is None:
            raise StoreError(
                f"The store has no place {place!r}.",
                f"It has {str(self.places())[:300]}.",
                "Ask for one of these; samples are read as store[place][position].",
            )
        return self._columns[known]

    def batches(
        self, size: int, *, places: str | Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield dicts of `size` samples in order: tensors by place, lists if lengths vary."""
        if size < 1:
            asked = f"Batches of {size} samples were asked for."
            raise StoreError(asked, "There are none of that size.", "Ask for 1 or more.")
        columns = {place: self[place] for place in self._named(places)}
        for start in range(0, len(self), size):
            yield {place: rows[start : start + size] for place, rows in columns.items()}

    def as_dataset(self, places: str | Sequence[str] | None = None) -> StoreDataset:
        """Return a torch Dataset over the samples: each a dict of place to tensor.

        It can be sent to the workers of a DataLoader, which map the files for themselves.
        """
        return StoreDataset(self, self._named(places))

    def _named(self, places: str | Sequence[str] | None) -> tuple[str, ...]:
        """Return one place, those of a list, or all."""
        return (places,) if isinstance(places, str) else tuple(places or self.places())

    def info(self) -> StoreInfo:
        """Return what is in the store, as a table."""
        rows = [("place", "samples", "row", "dtype", "size")]
        for place, column in self._columns.items():
            values = column.rows if isinstance(column, StoredSamples) else column
            row = str(tuple(values.shape[1:]))
            if isinstance(column, StoredSamples):
                row += f" × {len(values)}, varying"
            dtype = str(values.dtype).removeprefix("torch.")
            rows.append((place or "''", str(len(self)), row, dtype, show_bytes(values.nbytes)))
        return StoreInfo(
            str(self.folder),
            len(self),
            tuple(self.places()),
            tuple(index.rank for index in self._indexes),
            sum(len(series.shards) for index in self._indexes for series in index.series),
            sum(column.nbytes for column in self._columns.values()),
            tuple(rows),
        )

    def __repr__(self) -> str:
        return repr(self.info())

    def _repr_html_(self) -> str:
        info = self.info()
        return as_html(info.title, info.table, self)


@dataclass(frozen=True, repr=False)
class StoreInfo:
    """The content of a store; its repr is a table."""

    folder: str
    samples: int
    places: tuple[str, ...]
    ranks: tuple[int, ...]
    shards: int
    nbytes: int
    table: tuple[tuple[str, ...], ...]

    @property
    def title(self) -> str:
        """The line above the table."""
        ranks = "" if len(self.ranks) == 1 else f", {len(self.ranks)} ranks"
        size = f"{show_bytes(self.nbytes)} in {self.shards} shards{ranks}"
        return f"Store {Path(self.folder).name!r}: {self.samples} samples, {size}"

    def __repr__(self) -> str:
        return as_text(self.title, self.table)

    def _repr_html_(self) -> str:
        return as_html(self.title, self.table)


class StoreDataset(Dataset[dict[str, Any]]):
    """The samples of a store for a DataLoader; made by `Store.as_dataset`."""

    def __init__(self, store: Store, places: tuple[str, ...]) -> None:
        self._columns = {place: store[place] for place in places}
        self._total = len(store)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {place: column[position] for place, column in self._columns.items()}

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Return a batch at once: one read for each place instead of one for each sample."""
        chosen = positions_of(positions, self._total, "the dataset")
        columns = [(place, column[chosen]) for place, column in self._columns.items()]
        return [{place: rows[n] for place, rows in columns} for n in range(len(chosen))]


def _words(words: Iterable[NDArray[Any]]) -> list[str]:
    return [one.tobytes().decode(errors="replace") for one in words]


def _column(
    folder: Path, indexes: list[Index], place: str, part: str
) -> StoredRows | StoredSamples:
    """Return the rows of a place or of the ids, divided into samples if these vary in length."""

    def series(wanted: str) -> list[tuple[Index, Series]]:
        return [
            (index, one)
            for index in indexes
            for one in index.series
            if (one.place, one.part) == (place, wanted)
        ]

    rows, offsets = series(part), series(ENDS[part])
    if not offsets:
        return StoredRows(folder, rows)
    ranks = [(index.samples, one.rows) for index, one in rows]
    return StoredSamples(StoredRows(folder, rows), StoredRows(folder, offsets), ranks)


def _agree(folder: Path, indexes: list[Index]) -> None:
    """Raise unless all ranks hold the same places, in the same form."""

    def form(index: Index) -> set[tuple[str, str, str, tuple[int, ...]]]:
        return {(one.place, one.part, one.dtype, one.shape) for one in index.series}

    for index in indexes[1:]:
        if form(index) != form(indexes[0]):
            difference = sorted(form(index) ^ form(indexes[0]))
            raise StoreError(
                f"Cannot open {str(folder)!r} as one store.",
                f"Ranks {indexes[0].rank} and {index.rank} differ: {str(difference)[:300]}.",
                "Move the files of one of them into a folder of their own.",
            )
