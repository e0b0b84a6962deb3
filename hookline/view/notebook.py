"""Show records, stores, recipes and lists of places in notebooks, as HTML.

- `render(title, rows, subject)`: a table that folds, with small pictures of the tensors

`values/tables.py` calls it for every `_repr_html_`. The HTML has no script and no colour of text,
so that it is readable in light and dark; its size is bounded, and `render` never raises.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.attention_patterns.patterns import Patterns
from hookline.captures.record import Record, first_value
from hookline.edits.changes import Chain
from hookline.errors import HooklineError
from hookline.recipes.recipe import Recipe
from hookline.statistics.all_statistics import Bins
from hookline.statistics.measuring import Measurements
from hookline.storage.store import Store
from hookline.storage.stored_rows import StoredSamples
from hookline.values.nested import leaves, show_path
from hookline.view.thumbnails import bars, extent, thumbnail

__all__ = ["render"]

Rows = Sequence[Sequence[str]]

_OPEN, _MOST, _PICTURES = 20, 60, 40  # rows in sight, in all, and with a picture
_LONGEST = 120  # characters of a cell
_TURNS = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_STYLE = """
.hookline{font-size:13px;line-height:1.4;overflow-x:auto}
.hookline summary{cursor:pointer;padding:2px 0}
.hookline table{font-size:inherit;border-collapse:collapse;margin:4px 0 6px;border:0}
.hookline th,.hookline td{text-align:left;padding:2px 14px 2px 0;border:0;background:none;
border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.28));vertical-align:middle;
white-space:nowrap;max-width:32em;overflow:hidden;text-overflow:ellipsis}
.hookline th{font-weight:600;opacity:.65}
.hookline tr{background:none}
.hookline td:first-child{font-family:var(--jp-code-font-family,ui-monospace,monospace)}
.hookline img{image-rendering:pixelated;display:block;max-width:none;margin:0}
.hookline .long{display:block;white-space:normal;min-width:24em}
.hookline .more{opacity:.65}
"""


def render(title: str, rows: Rows, subject: Any = None) -> str:
    """Return a title and a table that folds, with pictures of the tensors of the subject.

    >>> text = render("Two", [("a", "b"), ("1", "<2>")])
    >>> "<summary><b>Two</b></summary>" in text, "&lt;2&gt;" in text
    (True, True)

    Args:
        title: the line that stays when the table is folded.
        rows: the head and the rows; everything in them is escaped.
        subject: the object that they describe; there are pictures for a record, patterns, a store,
            a recipe and measurements.
    """
    head, body = rows[0], list(rows[1:])
    seen = _pictures(subject, [row[0] for row in body[:_PICTURES]])
    shown = body[:_MOST]
    table = _table(head, shown[:_OPEN], seen, 0)
    if len(shown) > _OPEN:
        rest = _table(head, shown[_OPEN:], seen, _OPEN)
        table += f"<details><summary>{len(shown) - _OPEN} more</summary>{rest}</details>"
    if len(body) > _MOST:
        table += f'<div class="more">… and {len(body) - _MOST} more</div>'
    heading = html.escape(_visible(title))
    whole = f"<details open><summary><b>{heading}</b></summary>{table}</details>"
    return f'<div class="hookline"><style>{_STYLE}</style>{whole}</div>'


def _table(head: Sequence[str], rows: Rows, seen: dict[int, tuple[str, str]], first: int) -> str:
    words = any(extents for extents, _ in seen.values())
    extra = ["values"] * words + [""] * bool(seen)
    lines = [_line("th", [*map(_cell, head), *extra])]
    for n, row in enumerate(rows, first):
        extents, picture = seen.get(n, ("", ""))
        more = [html.escape(extents)] * words + [picture] * bool(seen)
        lines.append(_line("td", [*map(_cell, row), *more]))
    return f"<table>{''.join(lines)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _cell(text: str) -> str:
    """Return an escaped cell: sentences in lines; the middle of a very long name is left out."""
    text = _visible(text)
    if " " in text and len(text) > _LONGEST // 2:
        return f'<span class="long">{html.escape(text[: 4 * _LONGEST])}</span>'
    if len(text) <= _LONGEST:
        return html.escape(text)
    short = f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return f'<span title="{html.escape(text[:1000])}">{html.escape(short)}</span>'


def _visible(text: str) -> str:
    """Return text with blanks in quotes, and with visible marks of writing direction."""
    if text and not text.strip():
        return repr(text)
    return _TURNS.sub(lambda mark: f"\\u{ord(mark[0]):04x}", text)


# -- pictures -------------------------------------------------------------------------------------


def _pictures(subject: Any, names: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return the extent and the picture of each row that has one, by its number."""
    find = next((find for kind, find in _FINDERS.items() if isinstance(subject, kind)), None)
    if find is None:
        return {}
    try:
        found = list(find(subject, names))
    except Exception:  # noqa: BLE001 - values are of any kind; a repr without pictures is one
        return {}
    return {n: made for n, made in enumerate(found) if made is not None and any(made)}


def _drawn(tensor: Tensor | None, words: bool = True) -> tuple[str, str] | None:
    """Return the extent in words, unless they are not wanted, and the picture of a tensor."""
    try:
        return None if tensor is None else (extent(tensor) if words else "", thumbnail(tensor))
    except Exception:  # noqa: BLE001 - a tensor that cannot be read leaves others theirs
        return None


Found = Iterator[tuple[str, str] | None]


def _of_record(record: Record, names: Sequence[str]) -> Found:
    """Return the tensors of the first call that has any, without those changed in place."""
    tensors: dict[str, Tensor] = {}
    for place in record.places()[: len(names)]:
        try:
            value = first_value(record, place)
        except HooklineError:
            continue  # the text beside it, or reading it, says why
        for path, tensor in leaves(value):
            tensors[str(place) + show_path(path) or "''"] = tensor
    for name in names:
        yield _drawn(tensors.get(name))


def _of_patterns(patterns: Patterns, names: Sequence[str]) -> Found:
    for place in patterns.places()[: min(len(names), 12)]:  # each is computed for its picture
        yield _drawn(patterns[place, 0][:1], words=False)


def _of_store(store: Store, names: Sequence[str]) -> Found:
    """Return the first samples of each place."""
    for place in store.places()[: len(names)]:
        column = store[place]
        rows = column.rows if isinstance(column, StoredSamples) else column
        size = max(1, rows.shape[1:].numel())
        yield _drawn(rows[: max(1, min(64, 65_536 // size))])


def _of_recipe(recipe: Recipe, names: Sequence[str]) -> Found:
    """Return the first tensor of each change."""
    for _, change in list(recipe)[: len(names)]:
        yield _drawn(next(_tensors(change), None))


def _tensors(change: Any) -> Iterator[Tensor]:
    if isinstance(change, Chain):
        for one in change.changes:
            yield from _tensors(one)
    elif is_dataclass(change):
        values = [getattr(change, field.name) for field in fields(change)]
        yield from (value for value in values if isinstance(value, Tensor))


def _of_measurements(found: Measurements, names: Sequence[str]) -> Found:
    """Return a histogram if one was measured, else the first result with one number a channel."""
    for place in list(found)[: len(names)]:
        results = list(found[place].values())
        binned = [one for one in results if isinstance(one, Bins)]
        if binned:
            counts = binned[0].counts
            yield "", bars(counts if counts.ndim == 1 else counts.sum(0))
        else:
            flat = [one for one in results if isinstance(one, Tensor) and one.numel() > 1]
            yield _drawn(flat[0].to(torch.float32) if flat else None, words=False)


_FINDERS: dict[type, Callable[[Any, Sequence[str]], Found]] = {
    Record: _of_record,
    Patterns: _of_patterns,
    Store: _of_store,
    Recipe: _of_recipe,
    Measurements: _of_measurements,
}
