"""Make the page of a record: each place with its calls, and gradients beside their values.

- `page_of_record(record, model, …)`: the page
- `add_record(…)`: add the entries of all its places; `gather(…)`: add those of one place
- `items_chunk(summaries, labels)`: the chunk of an entry
- `page_of_tree`, `share`, `facts_of`, `BUDGET`: for other pages
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.captures.record import Record, captured, model_of
from hookline.costs.summarizing import summarize
from hookline.costs.summary import Summary
from hookline.errors import HooklineError
from hookline.places.grammar import Place, is_gradient
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
    "BUDGET", "add_record", "facts_of", "gather", "items_chunk", "page_of_record", "page_of_tree",
    "share",
]  # fmt: skip

BUDGET = 12_000_000  # bytes of pictures on a page
_CALLS = 12  # calls of a place that are shown


def page_of_record(record: Record, model: nn.Module | None = None, budget: int = BUDGET) -> Page:
    """Make the page of a record; by default, its model is the captured one if that still exists."""
    model = model_of(record) if model is None else model
    summary = None if model is None else summarize(model)
    tree = PageTree(summary)
    places = record.places()
    add_record(tree, record, share(budget, len(places) * 2))
    facts = [
        ["places", f"{len(places):,}"],
        ["values", f"{sum(len(one.all_kept()) for one in captured(record)):,}"],
        ["captured", show_bytes(record.nbytes)],
    ]
    if summary is not None:
        facts = facts_of(summary) + facts
    return page_of_tree(
        tree,
        kind="record",
        title="Record" if summary is None else summary.model,
        subtitle=f"{len(places):,} places captured",
        item="call",
        facts=facts,
    )


def page_of_tree(tree: PageTree, **content: Any) -> Page:
    """Make a page of values, with the problems that are found in them."""
    content["findings"] = find_value_problems(tree)
    return Page({**content, "notes": tree.notes, **tree.to_json()}, tree.chunks)


def add_record(tree: PageTree, record: Record, most: int) -> None:
    """Add the entries of all places of a record, with the reason where there is no value."""
    for place in record.places():
        try:
            numbered = record.numbered(place)
        except HooklineError as error:
            tree.entry(place, note=str(error), count=0)
            continue
        numbers, calls = [n for n, _ in numbered], [value for _, value in numbered]
        gather(tree, place, calls, most, numbers)
    for place, reason in record.unfired().items():
        _never_called(tree, place, reason)
    for place in record.places():
        index = tree.find(place.path)
        if index is not None and not is_gradient(place.port):
            tree.modules[index]["called"] = True


def gather(
    tree: PageTree,
    place: Place,
    calls: list[Any],
    most: int,
    numbers: Sequence[int] | None = None,
) -> None:
    """Add the entries of a place: one for each tensor in its values, with its calls.

    The slider of the page goes over all numbers up to the last.
    """
    numbers = numbers or range(len(calls))
    shown = spread(len(calls), _CALLS)
    if len(shown) < len(calls):
        note = f"Of places with more than {_CALLS} calls, {_CALLS} calls are shown."
        if note not in tree.notes:
            tree.notes.append(note)
    most = max(most // max(len(shown) // 2, 1), 256)
    weight = place.port in ("value", "grad")
    summaries: dict[tuple[Any, ...], list[TensorSummary | None]] = {}
    for position, index in enumerate(shown):
        value = calls[index]
        if isinstance(value, Tensor):
            found: Any = [((), summarize_tensor(value, most, weight=weight))]
        else:
            found = _kept_summaries(value) or summarize_value(value, most)
        for path, one in found:
            row = summaries.setdefault(path, [])
            row += [None] * (position - len(row)) + [one]
    labels = [str(numbers[index]) for index in shown]
    for path, row in summaries.items():
        row += [None] * (len(shown) - len(row))
        meta = next(one for one in row if one is not None).meta
        tree.entry(
            Place(place.path, place.port, (*place.parts, *path), place.operation),
            partial(items_chunk, row, labels),
            count=numbers[-1] + 1,
            shape=meta["shape"],
            dtype=meta["dtype"],
            summary={**meta.get("statistics", {}), "dead": meta.get("dead")},
        )
    if not summaries:
        kind = type(calls[0]).__name__ if calls else "nothing"
        note = f"There is no tensor in it: it is of type {kind}."
        tree.entry(place, note=note, count=len(calls))


def items_chunk(
    summaries: Sequence[TensorSummary | None], labels: Sequence[str], prefix: str = ""
) -> Chunk:
    """Return the chunk of an entry: its tensor summaries, labelled by call or sample."""
    items: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for n, (one, label) in enumerate(zip(summaries, labels, strict=True)):
        if one is None:
            items.append({"label": label, "missing": True})
            continue
        item = {"label": label, **one.meta}
        if one.counts is not None:
            item["counts"] = f"{prefix}h{n}"
            arrays[item["counts"]] = one.counts.astype(np.uint32)
        if one.picture is not None:
            item["picture"] = f"{prefix}p{n}"
            arrays[item["picture"]] = one.picture
        items.append(item)
    return Chunk({"items": items}, arrays)


def _kept_summaries(
    value: Any, path: Path = (), above: tuple[int, ...] = ()
) -> list[tuple[Path, TensorSummary]]:
    """Return the results of `summarize_value` that a capture kept instead of a value.

    In a nested gradient they stand at each part, since the parts arrive one by one.
    """
    pairs = cast("list[Any]", value if isinstance(value, list) else [])
    if pairs and all(type(pair) is tuple and isinstance(pair[-1], TensorSummary) for pair in pairs):
        return [((*path, *inner), one) for inner, one in pairs]
    found: list[tuple[Path, TensorSummary]] = []
    mark = id(cast("object", value))
    if mark in above:
        return found
    for part, inside in children(value) or ():
        found += _kept_summaries(inside, (*path, part), (*above, mark))
    return found


def share(budget: int, pictures: int) -> int:
    """Return how many values each of so many pictures may have."""
    return int(min(MOST, max(512, budget / 2 / max(pictures, 1))))


def _never_called(tree: PageTree, place: Place, reason: str) -> None:
    """Note at a place why it has no value."""
    index = tree.find(place.path)
    if index is not None and place.port == "output" and place.operation is None:
        tree.modules[index].update(called=False, reason=reason)
    else:
        tree.entry(place, note=reason, count=0)


def facts_of(summary: Summary) -> list[list[str]]:
    """Return the facts of a summary about the whole model, for the head of the page."""
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
