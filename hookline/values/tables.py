"""Show values as small tables, in text and in notebooks.

- `rows_of(place, values, checks, spread)`: the rows for one place
- `describe(tensor)`: the shape, dtype and placements of a tensor
- `as_text(title, rows)`, `as_html(title, rows, subject)`: a table
- `one_line(text)`: a text as it can stand in a table
- `render_with(function)`: set the function that makes the HTML
- `bytes_of(tensor)`, `show_bytes(count)`: the size of a tensor, and a size for people
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookline.torch_private import sparse_parts
from hookline.values.nested import Path, children, leaves, show_path
from hookline.values.quantisation import held_in
from hookline.values.sharding import local, placements

__all__ = [
    "as_html", "as_text", "bytes_of", "describe", "one_line", "render_with", "rows_of",
    "show_bytes",
]  # fmt: skip

_MOST = 60  # rows shown
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def show_bytes(count: int) -> str:
    """Return a size for people.

    >>> show_bytes(48), show_bytes(3_500_000)
    ('48 B', '3.5 MB')
    """
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.{min(power, 1)}f} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory, for a DTensor those of this rank."""
    try:
        tensor = local(tensor)
        pieces = sparse_parts(tensor) if tensor.is_sparse else held_in(tensor)
        return sum(piece.nbytes for piece in pieces)
    except RuntimeError:
        return 0


def _shape(tensor: Tensor) -> str:
    try:
        return str(tuple(tensor.shape))
    except RuntimeError:
        return "nested"


def describe(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor, and its placements if it is spread over ranks.

    >>> import torch
    >>> describe(torch.zeros(2, 3))
    '(2, 3) float32'
    """
    spread = placements(tensor)
    kind = f"{_shape(tensor)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{kind} {spread}" if spread else kind


def rows_of(
    place: str,
    values: Sequence[Any],
    checks: Any,
    spread: Callable[[Path, Tensor], tuple[Any, ...] | None],
    calls: str = "",
) -> list[tuple[str, ...]]:
    """Return one row for each tensor in the values of a place; shapes that vary are marked.

    `calls` names the calls; by default their number is shown.
    """
    first = values[0]
    others = [dict(leaves(value)) for value in values[1:]]
    count = calls or str(len(values))
    rows: list[tuple[str, ...]] = []
    for path, tensor in leaves(first):
        shape = _shape(tensor)
        if any(path not in other or _shape(other[path]) != shape for other in others):
            shape += " varies"
        attached = isinstance(checks, int) or id(tensor) in (checks or ())
        dtype = str(tensor.dtype).removeprefix("torch.")
        notes = ["attached"] * attached + [str(p) for p in spread(path, tensor) or ()]
        rows.append((place + show_path(path) or "''", count, shape, dtype, ", ".join(notes)))
    if not rows:
        plain = children(first) is not None or issubclass(type(first), _PLAIN)
        kept = "" if plain else "kept by reference"
        rows.append((place or "''", count, type(first).__name__, "-", kept))
    return rows


def one_line(text: str) -> str:
    r"""Return a text as it can stand in a table.

    Characters that would break the line, control a terminal or turn the direction of writing are
    escaped.

    >>> print(one_line("new\nline"), one_line("\x1b[31mred"))
    new\nline \x1b[31mred
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def as_text(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a title and aligned columns, with at most 60 rows and the number of the others.

    >>> print(as_text("Two", [("a", "b"), ("1", "2")]))
    Two
      a  b
      1  2
    """
    left = len(rows) - 1 - _MOST
    if left > 0:
        rows = [*rows[: _MOST + 1], (f"… and {left} more", *[""] * (len(rows[0]) - 1))]
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  " + "  ".join(f"{{:{width}}}" for width in widths)
    return "\n".join([title, *(form.format(*row).rstrip() for row in rows)])


Renderer = Callable[[str, Sequence[Sequence[str]], Any], str]
_renderers: list[Renderer] = []


def render_with(function: Renderer) -> None:
    """Set the function that makes the HTML; hookline sets that of view/notebook.py."""
    _renderers.append(function)


def as_html(title: str, rows: Sequence[Sequence[str]], subject: Any = None) -> str:
    """Return a table for a notebook. The subject is the object that the rows describe."""
    return _renderers[-1](title, rows, subject)
