"""Small tables: what a record looks like as text and in a notebook.

- `rows_of(place, values, checks, spread)`: the rows for one place
- `as_text(title, rows)`, `as_html(title, rows)`: a table
- `bytes_of(tensor)`, `show_bytes(n)`: a size, and a size for people
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookline.core.distributed import local
from hookline.core.nested import Path, children, leaves, show_path

__all__ = ["as_html", "as_text", "bytes_of", "rows_of", "show_bytes"]

_MOST = 60  # rows shown
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def show_bytes(count: float) -> str:
    """A size for people.

    >>> show_bytes(48), show_bytes(3_500_000)
    ('48 B', '3.5 MB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor, also of one without a plain storage; of a DTensor those held here."""
    try:
        return local(tensor).nbytes
    except (RuntimeError, NotImplementedError):
        pass
    try:
        return tensor._values().nbytes + tensor._indices().nbytes  # a sparse tensor
    except (RuntimeError, NotImplementedError):
        return 0


def _shape(tensor: Tensor) -> str:
    try:
        return str(tuple(tensor.shape))
    except (RuntimeError, NotImplementedError):
        return "nested"


def rows_of(
    place: str,
    values: Sequence[Any],
    checks: Any,
    spread: Callable[[Path, Tensor], tuple[Any, ...] | None],
) -> list[tuple[str, ...]]:
    """One row for each tensor in the values of a place; shapes that vary are marked."""
    place = place or "''"  # the model itself
    found = list(leaves(values[0]))
    if not found:
        kind = type(values[0]).__name__
        plain = children(values[0]) is not None or issubclass(type(values[0]), _PLAIN)
        note = "" if plain else "kept by reference"
        return [(place, str(len(values)), kind, "-", note)]
    rows: list[tuple[str, ...]] = []
    others = [dict(leaves(value)) for value in values[1:]]
    for path, tensor in found:
        shape = _shape(tensor)
        same = all(path in other and _shape(other[path]) == shape for other in others)
        shape += "" if same else " varies"
        dtype = str(tensor.dtype).removeprefix("torch.")
        attached = isinstance(checks, int) or id(tensor) in (checks or ())
        notes = ["attached"] if attached else []
        notes += [str(placement) for placement in spread(path, tensor) or ()]
        rows.append((place + show_path(path), str(len(values)), shape, dtype, ", ".join(notes)))
    return rows


def as_text(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A title and aligned columns.

    >>> print(as_text("Two", [("a", "b"), ("1", "2")]))
    Two
      a  b
      1  2
    """
    shown = list(rows[: _MOST + 1])
    widths = [max(len(row[n]) for row in shown) for n in range(len(shown[0]))]
    lines = [title]
    for row in shown:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    if len(rows) > len(shown):
        lines.append(f"  … and {len(rows) - len(shown)} more")
    return "\n".join(lines)


def as_html(title: str, rows: Sequence[Sequence[str]]) -> str:
    """The same as a small HTML table; names are escaped."""
    head, *body = rows[: _MOST + 1]
    cells = "".join(f"<th style='text-align:left'>{html.escape(cell)}</th>" for cell in head)
    lines = [f"<tr>{cells}</tr>"]
    for row in body:
        cells = "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    more = f"<p>… and {len(rows) - _MOST - 1} more</p>" if len(rows) > _MOST + 1 else ""
    return f"<p><b>{html.escape(title)}</b></p><table>{''.join(lines)}</table>{more}"
