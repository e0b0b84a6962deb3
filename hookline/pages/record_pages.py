"""A page of a record: each place with its calls, gradients beside the values that they belong to.

- `page_of_record(record, model, …)`: the page
- `page_of_model(model, batch, loss, …)`: the page of one run of a model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.core.captures import capture
from hookline.core.parameters import preserve
from hookline.core.places import Place
from hookline.core.records import Record
from hookline.core.tables import show_bytes
from hookline.core.tree import tensors_of, walk
from hookline.errors import HooklineError
from hookline.pages.chunks import Chunk, Page
from hookline.pages.outlines import Outline
from hookline.pages.portraits import MOST, Portrait, portray, portray_value
from hookline.pages.remarks import remark

__all__ = ["BUDGET", "gather", "items_chunk", "page_of_model", "page_of_record"]

BUDGET = 12_000_000  # bytes of pictures on a page
_CALLS = 12  # calls of a place that are shown


def page_of_record(record: Record, model: nn.Module | None = None, budget: int = BUDGET) -> Page:
    """The page of what a capture has kept."""
    if model is None and record._model is not None:
        model = record._model()
    outline = Outline(model)
    places = record.places()
    most = _share(budget, min(len(places), 4000) * 2)
    chunks: dict[str, Callable[[], Chunk]] = {}
    notes: list[str] = []
    for place in places:
        try:
            calls = record.calls(place)
        except HooklineError as error:
            outline.entry(place, note=str(error), count=0, chunk="")
            continue
        gather(outline, chunks, place, calls, most, notes)
    unfired = record.unfired()
    for place, reason in unfired.items():
        _never_called(outline, place, reason)
    _mark_called(outline, places)
    facts = [
        ["places", f"{len(places):,}"],
        ["values", f"{sum(entry.count for entry in outline.entries):,}"],
        ["captured", show_bytes(record.nbytes)],
    ]
    if model is not None:
        facts = _facts_of_model(model) + facts
    title = "Record" if model is None else type(model).__name__
    return Page(
        {
            "kind": "record",
            "title": title,
            "subtitle": f"{len(places):,} places captured",
            "item": "call",
            "facts": facts,
            "notes": notes,
            "findings": remark(outline),
            **outline.to_json(),
        },
        chunks,
    )


def page_of_model(
    model: nn.Module,
    batch: Any = None,
    loss: Callable[[Any], Tensor] | None = None,
    budget: int = BUDGET,
) -> Page:
    """The page of a model: its parameters, and with a batch what happened in one run of it."""
    outline = Outline(model)
    chunks: dict[str, Callable[[], Chunk]] = {}
    notes: list[str] = []
    count = len(outline.modules)
    most = _share(budget, count * (1 + (batch is not None) + (loss is not None)))
    called: list[Place] = []
    if batch is not None:
        record = _run(model, batch, loss, most)
        called = record.places()
        for place in called:
            try:
                gather(outline, chunks, place, record.calls(place), most, notes)
            except HooklineError as error:
                outline.entry(place, note=str(error), count=0, chunk="")
        for place, reason in record.unfired().items():
            _never_called(outline, place, reason)
        _mark_called(outline, called)
    for path, module in walk(model):
        for name, tensor in tensors_of(module):
            place = Place(f"{path}.{name}" if path else name, "value")
            if nn.parameter.is_lazy(tensor):
                outline.entry(place, note="It has no shape before the first run.", count=0, chunk="")
            else:
                gather(outline, chunks, place, [tensor], most, notes, weight=True)
    return Page(
        {
            "kind": "model",
            "title": type(model).__name__,
            "subtitle": "one run" if batch is not None else "not run",
            "item": "call",
            "facts": _facts_of_model(model),
            "notes": notes,
            "findings": remark(outline),
            **outline.to_json(),
        },
        chunks,
    )


def _run(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, most: int
) -> Record:
    """One run of a model, of which portraits are kept instead of values."""
    where = ["", "**"] if any(True for _ in model.children()) else [""]
    if loss is not None:
        where += [f"{place}:grad_output" for place in where]
    arguments: Any = batch if isinstance(batch, (tuple, Mapping)) else (batch,)
    watched = capture(model, *where, transform=partial(portray_value, most=most), detach=True)
    with preserve(model), torch.random.fork_rng(), torch.set_grad_enabled(loss is not None):
        with watched as record:
            result = model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)
            if loss is not None:
                # Not backward(): the gradients of the parameters are the user's.
                leaves = [p for p in model.parameters() if p.requires_grad]
                torch.autograd.grad(loss(result), leaves, allow_unused=True)
    return record


def gather(
    outline: Outline,
    chunks: dict[str, Callable[[], Chunk]],
    place: Place,
    calls: list[Any],
    most: int,
    notes: list[str],
    *,
    weight: bool = False,
) -> None:
    """Add the entries of a place: one for each tensor in its values."""
    shown = _spread(len(calls), _CALLS)
    if len(shown) < len(calls):
        note = f"Of places with more than {_CALLS} calls, {_CALLS} calls are shown."
        if note not in notes:
            notes.append(note)
    most = max(most // max(len(shown) // 2, 1), 256)
    portraits: dict[tuple[Any, ...], list[Portrait | None]] = {}
    for position, index in enumerate(shown):
        value = calls[index]
        if isinstance(value, Tensor):
            found: Any = [((), portray(value, most, weight=weight))]
        elif _is_portrayed(value):
            found = value
        else:
            found = portray_value(value, most)
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
            count=len(calls),
            shape=first.meta["shape"],
            dtype=first.meta["dtype"],
            summary={**first.meta.get("statistics", {}), "dead": first.meta.get("dead")},
        )
        labels = [str(index) for index in shown]
        chunks[entry.chunk] = partial(items_chunk, row, labels)
    if not portraits:
        kind = type(calls[0]).__name__ if calls else "nothing"
        note = f"There is no tensor in it: it is of type {kind}."
        outline.entry(place, note=note, count=len(calls), chunk="")


def items_chunk(portraits: list[Portrait | None], labels: list[str]) -> Chunk:
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


def _is_portrayed(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Portrait)  # pyright: ignore
        for pair in value  # pyright: ignore
    )


def _share(budget: int, pictures: int) -> int:
    """How many values each picture may have."""
    return int(min(MOST, max(512, budget / 2 / max(pictures, 1))))


def _spread(total: int, most: int) -> list[int]:
    """At most so many positions, from the first to the last."""
    if total <= most:
        return list(range(total))
    return [round(n * (total - 1) / (most - 1)) for n in range(most)]


def _mark_called(outline: Outline, places: list[Place]) -> None:
    for place in places:
        index = outline.find(place.path)
        if index is not None and not place.port.startswith("grad"):
            outline.modules[index]["called"] = True


def _never_called(outline: Outline, place: Place, reason: str) -> None:
    index = outline.find(place.path)
    if index is not None and place.port == "output" and place.operation is None:
        outline.modules[index].update(called=False, reason=reason)
    else:
        outline.entry(place, note=reason, count=0, chunk="")


def _facts_of_model(model: nn.Module) -> list[list[str]]:
    parameters = {id(p): p for p in model.parameters() if not nn.parameter.is_lazy(p)}
    count = sum(p.numel() for p in parameters.values())
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    facts = [
        ["parameters", f"{count:,}"],
        ["weights", show_bytes(size)],
        ["modules", f"{len(walk(model)):,}"],
    ]
    if trained != count:
        facts.insert(1, ["trainable", f"{trained:,}"])
    return facts
