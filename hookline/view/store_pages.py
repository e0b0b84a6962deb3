"""Make the page of a store: each place with samples of it.

- `page_of_store(store, …)`: the page; with `live`, samples are made on demand
- `sample_chunk(store, place, position)`: one sample of a place
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from hookline.costs.summarizing import summarize
from hookline.storage.store import Store
from hookline.storage.stored_rows import StoredSamples
from hookline.values.tables import show_bytes
from hookline.view.page import Chunk, Page
from hookline.view.page_tree import PageTree
from hookline.view.record_pages import BUDGET, items_chunk, page_of_tree, share
from hookline.view.tensor_summaries import spread, summarize_tensor

__all__ = ["page_of_store", "sample_chunk"]

_SAMPLES = 12  # in a file, of each place
_ROWS = 256  # of which the overview of a place is made


def page_of_store(
    store: Store, model: nn.Module | None = None, budget: int = BUDGET, live: bool = False
) -> Page:
    """Make the page of a store."""
    tree = PageTree(None if model is None else summarize(model))
    places, total = store.places(), len(store)
    shown = spread(total, _SAMPLES)
    most = share(budget, len(places) * (len(shown) + 1))
    for place in places:
        rows = _overview(store, place)
        found = None if rows is None else summarize_tensor(rows, most)
        column = store[place]
        values = column.rows if isinstance(column, StoredSamples) else column
        shape: list[int | str] = [total, *values.shape[1:]]
        if isinstance(column, StoredSamples):
            shape.insert(1, "varying")
        tree.entry(
            place,
            partial(_entry_chunk, store, place, [] if live else shown, most),
            count=total,
            shape=shape,
            dtype=str(values.dtype).removeprefix("torch."),
            summary={} if found is None else found.meta.get("statistics", {}),
        )
    if not live and len(shown) < total:
        tree.notes.append(f"{len(shown)} of {total:,} samples are shown.")
    if total > _ROWS:
        tree.notes.append(f"Statistics are those of {_ROWS} of {total:,} samples.")
    info = store.info()
    ids = store.ids if total <= 100_000 else None
    return page_of_tree(
        tree,
        kind="store",
        title=store.folder.name,
        subtitle=f"a store of {total:,} samples",
        item="sample",
        live=live,
        facts=[
            ["samples", f"{total:,}"],
            ["places", f"{len(places):,}"],
            ["size", show_bytes(info.nbytes)],
            ["shards", f"{info.shards:,}"],
            *_facts(store.metadata)[:12],
        ],
        ids=None if ids is None or len(ids) > 2_000 else [str(one) for one in ids],
    )


def sample_chunk(store: Store, place: str, position: int) -> Chunk:
    """Return one sample of a place, as the live view asks for it."""
    return items_chunk([summarize_tensor(_sample(store, place, position))], [str(position)])


def _entry_chunk(store: Store, place: str, shown: list[int], most: int) -> Chunk:
    """Return the samples of a place, after an overview of many of them."""
    rows = _overview(store, place)
    summaries = [summarize_tensor(_sample(store, place, position), most) for position in shown]
    chunk = items_chunk(summaries, [str(position) for position in shown])
    if rows is None:
        return chunk
    whole = items_chunk([summarize_tensor(rows, most)], ["all"], "all-")
    return Chunk({**chunk.meta, "all": whole.meta["items"][0]}, {**chunk.arrays, **whole.arrays})


def _overview(store: Store, place: str) -> Tensor | None:
    """Return rows from the whole length of a place: (rows, features)."""
    column = store[place]
    values = column.rows if isinstance(column, StoredSamples) else column
    if not len(values) or not np.prod(values.shape[1:]):
        return None
    rows: Tensor = values[spread(len(values), _ROWS)]
    return rows.reshape(len(rows), -1)


def _sample(store: Store, place: str, position: int) -> Tensor:
    """Return a sample, with a leading size of 1 if it could be mistaken for something smaller."""
    column = store[place]
    value: Tensor = column[position]
    if isinstance(column, StoredSamples) or value.ndim in (2, 3):
        return value[None]
    return value


def _facts(metadata: dict[str, Any]) -> list[list[str]]:
    """Return the metadata of a store; of nested values only words and numbers."""
    found: list[list[str]] = []
    for key, value in metadata.items():
        if not isinstance(value, dict):
            found.append([str(key), _short(value)])
            continue
        for name, one in cast("dict[str, Any]", value).items():
            if isinstance(one, (str, int, float)):
                found.append([name, _short(one)])
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
