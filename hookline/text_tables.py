"""Numbers, shapes and tables as text.

- `show_count(n)`, `show_seconds(s)`, `show_number(x)`, `show_shapes(shapes)`: short text
- `as_lines(cells, width)`, `as_html(title, cells, notes)`: a table
- `Tabled`: a base class for results that are shown as such a table
- `pandas(what)`: the library, or an error that says how to install it
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any, Generic, TypeVar, cast

from hookline.errors import MissingExtra
from hookline.values import tables
from hookline.values.tables import one_line

__all__ = [
    "Tabled", "as_html", "as_lines", "pandas", "show_count", "show_number", "show_seconds",
    "show_shapes",
]  # fmt: skip

T = TypeVar("T")
_LEAST = 12  # how far a column of text is cut; then columns are left out
_LEFT_OUT = (
    "input", "activations", "type", "backward time", "backward", "output", "time", "calls", "dtype",
    "shape",
)  # fmt: skip
_TEXT = ("place", "type", "input", "output", "in b", "shape", "dtype", "remark")  # columns of text


def show_count(number: float) -> str:
    """Format a count in three digits.

    >>> show_count(144), show_count(8192), show_count(23_508_032), show_count(999_950)
    ('144', '8.19 K', '23.5 M', '1.00 M')
    """
    if number < 1000:
        return f"{number:.0f}"
    for unit in ("K", "M", "G", "T", "P"):
        number /= 1000
        if number < 999.5 or unit == "P":
            break
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"


def show_seconds(seconds: float) -> str:
    """Format a time.

    >>> show_seconds(0.00001234), show_seconds(0.25), show_seconds(12.5)
    ('12.3 µs', '250 ms', '12.5 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            break
    number = seconds * scale
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def show_number(number: float | None) -> str:
    """Format a number; None becomes an empty text.

    >>> show_number(0.000123456), show_number(1.0), show_number(None)
    ('0.000123', '1', '')
    """
    return "" if number is None else f"{number:.3g}"


def show_shapes(shapes: Any) -> str:
    """Format nested shapes on one line, without what is no tensor.

    >>> show_shapes({"x": "(2, 3)", "states": ["(4,)", "(4,)"], "causal": "bool", "mask": None})
    '(2, 3), [(4,), (4,)]'
    """
    if not isinstance(shapes, (list, dict)):
        return _one(shapes)
    return ", ".join(_shown(cast("list[Any]", shapes)))


def _one(shape: Any) -> str:
    return shape if isinstance(shape, str) and (shape[:1] == "(" or shape == "nested") else ""


def _shown(shapes: dict[str, Any] | list[Any]) -> list[str]:
    items: list[Any] = [*(shapes.values() if isinstance(shapes, dict) else shapes)]
    found: list[str] = []
    for item in items:
        if isinstance(item, (list, dict)):
            inside = _shown(cast("list[Any]", item))
            found += [f"[{', '.join(inside)}]"] if inside else []
        elif _one(item):
            found.append(_one(item))
    return found


def as_lines(cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return aligned columns, text left and numbers right, no wider than `width`.

    >>> as_lines([["place", "n"], ["layers.0.attention", "12"]], 18)
    ['  place          n', '  …0.attention  12']
    """
    head, cells = (
        cells[0],
        [row if "".join(row).isprintable() else [*map(one_line, row)] for row in cells],
    )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = [n for n, name in enumerate(head) if name in _TEXT]
    least = sum(_LEAST if n in text else size for n, size in enumerate(widths))
    for name in _LEFT_OUT if least + 2 * len(widths) > width else ():
        if name in head:
            at = list(head).index(name)
            return as_lines([[*row[:at], *row[at + 1 :]] for row in cells], width)
    while sum(widths) + 2 * len(widths) > width:
        # Names are cut last: they are what one copies.
        long = [n for n in text if widths[n] > _LEAST]
        long = [n for n in long if head[n] != "place"] or long
        if not long:
            break
        widest = max(long, key=lambda n: widths[n])
        widths[widest] -= 1
    columns: list[list[str]] = []
    for name, size, column in zip(head, widths, zip(*cells, strict=True), strict=True):
        if name in _TEXT:
            columns.append([_cut(cell, size, name == "place").ljust(size) for cell in column])
        else:
            columns.append([cell.rjust(size) for cell in column])
    return ["  " + "  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _cut(cell: str, size: int, keep_end: bool) -> str:
    if len(cell) <= size:
        return cell
    return "…" + cell[1 - size :] if keep_end else cell[: size - 1] + "…"


def as_html(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return the same table for notebooks: it folds, and notes stand under it; names are
    escaped.
    """
    below = "".join(f'<div class="more">{html.escape(note)}</div>' for note in notes)
    return tables.as_html(title, cells) + (f'<div class="hookline">{below}</div>' if below else "")


class Tabled(Generic[T]):
    """A result that is shown as a table under a title, as text and in notebooks."""

    rows: list[T]

    def __iter__(self) -> Iterator[T]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _title(self) -> str:
        raise AssertionError("a table has a title")

    def _cells(self) -> list[list[str]]:
        raise AssertionError("a table has cells")

    def _remarks(self) -> list[str]:
        raise AssertionError("a table has remarks")

    def show(self, *, width: int = 120) -> str:
        """Return the table as text, without the less important rows of a long one."""
        title = wrap(self._title(), width, subsequent_indent="  ", break_long_words=False)
        return "\n".join([*title, *as_lines(self._cells(), width), *self._remarks()])

    def __repr__(self) -> str:
        return self.show()

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._cells(), self._remarks())


def pandas(what: str) -> Any:
    """Return the pandas library, or raise an error that says how to install it."""
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise MissingExtra(
            f"{what} was called.", "It needs pandas.", "Install it with `pip install pandas`."
        ) from None
