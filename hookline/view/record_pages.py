"""A page of a record: each place with its calls, gradients beside the values that they belong to.

- `page_of_record(record, model, …)`: the page
- `add_record(…)`: the entries of all its places; `gather(…)`: those of one, from its values
- `items_chunk(portraits, labels)`: what is read when an entry is shown
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.captures.record import Record, captured, model_of
from hookline.costs.summarizing import summarize
from hookline.costs.summary import Summary
from hookline.errors import HooklineError
from hookline.places.resolution import Place
from hookline.text_tables import show_count
from hookline.values.nested import Path, children
from hookline.values.tables import show_bytes
from hookline.view.page import Chunk, Page
from hookline.view.page_tree import PageTree
from hookline.view.tensor_summaries import (
    MOST,
    TensorSummary,
    spread,
    summarize_tensor,
    summarize_value,
)
from hookline.view.value_findings import find_value_problems

__all__ = [
    "BUDGET", "add_record", "facts_of", "gather", "items_chunk", "page_of_record", "share",
]  # fmt: skip

BUDGET = 12_000_000  # bytes of pictures on a page
_CALLS = 12  # calls of a place that are shown


def page_of_record(record: Record, model: nn.Module | None = None, budget: int = BUDGET) -> Page:
    """The page of what a capture has kept."""
    model = model_of(record) if model is None else model
    summary = None if model is None else summarize(model)
    outline = PageTree(summary)
    places = record.places()
    chunks: dict[str, Callable[[], Chunk]] = {}
    notes: list[str] = []
    add_record(outline, chunks, record, share(budget, len(places) * 2), notes)
    facts = [
        ["places", f"{len(places):,}"],
        ["values", f"{sum(len(one.all_kept()) for one in captured(record)):,}"],
        ["captured", show_bytes(record.nbytes)],
    ]
    if summary is not None:
        facts = facts_of(summary) + facts
    title = "Record" if summary is None else summary.model
    return Page(
        {
            "kind": "record",
            "title": title,
            "subtitle": f"{len(places):,} places captured",
            "item": "call",
            "facts": facts,
            "notes": notes,
            "findings": find_value_problems(outline, notes),
            **outline.to_json(),
        },
        chunks,
    )


def add_record(
    outline: PageTree,
    chunks: dict[str, Callable[[], Chunk]],
    record: Record,
    most: int,
    notes: list[str],
) -> None:
    """Add the entries of all places of a record; where nothing is, it is said why."""
    for place in record.places():
        try:
            numbered = record.numbered(place)
        except HooklineError as error:
            outline.entry(place, note=str(error), count=0, chunk="")
            continue
        weight = place.port in ("value", "grad")
        numbers, calls = [n for n, _ in numbered], [value for _, value in numbered]
        gather(outline, chunks, place, calls, most, notes, weight=weight, numbers=numbers)
    for place, reason in record.unfired().items():
        _never_called(outline, place, reason)
    for place in record.places():
        index = outline.find(place.path)
        if index is not None and not place.port.startswith("grad"):
            outline.modules[index]["called"] = True


def gather(
    outline: PageTree,
    chunks: dict[str, Callable[[], Chunk]],
    place: Place,
    calls: list[Any],
    most: int,
    notes: list[str],
    *,
    weight: bool = False,
    numbers: Sequence[int] | None = None,
) -> None:
    """Add the entries of a place: one for each tensor in its values, the calls with these numbers.

    The slider of the page goes over all numbers up to the last.
    """
    numbers = numbers or range(len(calls))
    shown = spread(len(calls), _CALLS)
    if len(shown) < len(calls):
        note = f"Of places with more than {_CALLS} calls, {_CALLS} calls are shown."
        if note not in notes:
            notes.append(note)
    most = max(most // max(len(shown) // 2, 1), 256)
    portraits: dict[tuple[Any, ...], list[TensorSummary | None]] = {}
    for position, index in enumerate(shown):
        value = calls[index]
        if isinstance(value, Tensor):
            found: Any = [((), summarize_tensor(value, most, weight=weight))]
        else:
            found = _portrayed(value) or summarize_value(value, most)
        for path, portrait in found:
            row = portraits.setdefault(path, [])
            row += [None] * (position - len(row)) + [portrait]
    for path, row in portraits.items():
        row += [None] * (len(shown) - len(row))
        parts = (*place.parts, *path)
        full = Place(place.path, place.port, parts, place.operation)
        first = next(portrait for portrait in row if portrait is not None)
        entry = outline.entry(
            full,
            count=numbers[-1] + 1,
            shape=first.meta["shape"],
            dtype=first.meta["dtype"],
            summary={**first.meta.get("statistics", {}), "dead": first.meta.get("dead")},
        )
        labels = [str(numbers[index]) for index in shown]
        chunks[entry.chunk] = partial(items_chunk, row, labels)
    if not portraits:
        kind = type(calls[0]).__name__ if calls else "nothing"
        note = f"There is no tensor in it: it is of type {kind}."
        outline.entry(place, note=note, count=len(calls), chunk="")


def items_chunk(portraits: Sequence[TensorSummary | None], labels: Sequence[str]) -> Chunk:
    """The chunk of an entry: its portraits, each with the label of its call or sample."""
    items: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for n, (portrait, label) in enumerate(zip(portraits, labels, strict=True)):
        if portrait is None:
            items.append({"label": label, "missing": True})
            continue
        item = {"label": label, **portrait.meta}
        if portrait.counts is not None:
            item["counts"] = f"h{n}"
            arrays[f"h{n}"] = portrait.counts.astype(np.uint32)
        if portrait.picture is not None:
            item["picture"] = f"p{n}"
            arrays[f"p{n}"] = portrait.picture
        items.append(item)
    return Chunk({"items": items}, arrays)


def _portrayed(
    value: Any, path: Path = (), above: tuple[int, ...] = ()
) -> list[tuple[Path, TensorSummary]]:
    """What `summarize_value` gave, kept by a capture instead of a value; in a nested gradient it
    stands at each part, since these arrive one by one.
    """
    pairs = cast("list[Any]", value if isinstance(value, list) else [])
    if pairs and all(type(pair) is tuple and isinstance(pair[-1], TensorSummary) for pair in pairs):
        return [((*path, *inner), portrait) for inner, portrait in pairs]
    found: list[tuple[Path, TensorSummary]] = []
    mark = id(cast("object", value))
    if mark in above:
        return found
    for part, inside in children(value) or ():
        found += _portrayed(inside, (*path, part), (*above, mark))
    return found


def share(budget: int, pictures: int) -> int:
    """How many values each of so many pictures may have."""
    return int(min(MOST, max(512, budget / 2 / max(pictures, 1))))


def _never_called(outline: PageTree, place: Place, reason: str) -> None:
    """Say at a place why it holds nothing."""
    index = outline.find(place.path)
    if index is not None and place.port == "output" and place.operation is None:
        outline.modules[index].update(called=False, reason=reason)
    else:
        outline.entry(place, note=reason, count=0, chunk="")


def facts_of(summary: Summary) -> list[list[str]]:
    """What a summary says of the model as a whole, for the head of the page."""
    totals = summary.totals
    facts = [["parameters", f"{totals['parameters']:,}"]]
    if totals["trainable"] != totals["parameters"]:
        facts.append(["trainable", f"{totals['trainable']:,}"])
    facts += [["weights", show_bytes(totals["parameter_bytes"])]]
    facts += [["modules", f"{len(summary):,}"]]
    if totals.get("flops"):
        facts.append(["FLOPs", show_count(totals["flops"])])
    if totals.get("activation_bytes"):
        facts.append(["activations", show_bytes(totals["activation_bytes"])])
    return facts
