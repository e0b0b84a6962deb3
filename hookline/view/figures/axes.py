"""The parts that all figures share: Axes, titles, colours, labels, pictures of matrices.

- `axes_for(ax, size)`: the given Axes, or those of a new figure
- `panels(ax, rows, columns)`: a grid of Axes, in a new figure or inside given Axes
- `title(ax, words, notes)`: a heading, and remarks in small type under it
- `by_name(names, notes)`: the remarks on several places
- `literal(text)`: text in which a dollar sign is only that
- `shorten(names)`, `label_ticks(ax, "y", names)`: place names that fit
- `picture(ax, array)`: a matrix, with NaN and infinities in colours of their own
- `figure_of(ax)`: the figure of Axes

The colours are those of Okabe and Ito, and colour maps that the colour-blind can read.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hookline.errors import MissingExtra
from hookline.values.tables import one_line
from hookline.view.figures.sampled_numbers import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "ORANGE",
    "PIXELS",
    "axes_for",
    "by_name",
    "colour_bar",
    "columns_for",
    "describe_shape",
    "figure_of",
    "label_ticks",
    "literal",
    "panels",
    "picture",
    "reduced",
    "shorten",
    "title",
]  # fmt: skip

Array = NDArray[Any]

BLUE, ORANGE, GREEN, PINK, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#888888",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, "#E69F00")
_NAN, _ABOVE, _BELOW = "#999999", "#E6007E", "#00D5FF"
_SMALL = 8.0  # points
PIXELS = 1024  # of a matrix, in each direction


def _sheet(size: tuple[float, float]) -> Figure:
    try:
        from hookline.view.figures.notebook_figure import NotebookFigure
    except ImportError as error:
        raise MissingExtra(
            "A figure was asked for.",
            f"matplotlib cannot be imported ({error}).",
            "pip install 'hookline[report]'",
        ) from error
    return NotebookFigure(size)


def axes_for(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the given Axes, or the only ones of a new figure of this size in inches."""
    return _sheet(size).add_subplot() if ax is None else ax


def figure_of(ax: Axes) -> Figure:
    """Return the figure of Axes, also if these are in a subfigure."""
    return cast("Figure", ax.get_figure(root=True))


def columns_for(count: int, most: int = 8) -> int:
    """Return the number of columns for so many cells: a nearly square grid with few empty cells.

    >>> [columns_for(count) for count in (1, 4, 6, 7, 12)]
    [1, 2, 3, 4, 4]
    """
    low = min(most, math.ceil(math.sqrt(count)))
    good = range(max(1, low), max(2, min(most, count, 2 * low) + 1))
    return min(good, key=lambda c: (-count % c, abs(c - math.sqrt(1.4 * count))))


def panels(
    ax: Axes | None, rows: int, columns: int, size: tuple[float, float], share: float = 0.86
) -> tuple[Axes, list[list[Axes]]]:
    """Make a grid of inset Axes; return the Axes around them, which have the title, and the grid.

    `size` is the size of a cell in inches, `share` the part of its height that is drawn on.
    """
    if ax is None:
        sheet = _sheet((size[0] * columns + 0.8, size[1] * rows + 0.7))
        outer = sheet.add_subplot()
    else:
        outer = ax
    outer.set_axis_off()
    cells: list[list[Axes]] = []
    width, height = 1 / columns, 1 / rows
    for row in range(rows):
        line: list[Axes] = []
        for column in range(columns):
            left, low = column * width, 1 - (row + 1) * height
            box = (left + 0.04 * width, low, 0.92 * width, share * height)
            line.append(outer.inset_axes(box))
        cells.append(line)
    return outer, cells


# -- words ----------------------------------------------------------------------------------------


def title(ax: Axes, words: str, notes: Sequence[str] = (), *, space: float = 0) -> None:
    """Put a heading at the left, and remarks under it in small type, both wrapped to the width."""
    inches = ax.get_window_extent().width / figure_of(ax).dpi
    small = textwrap.wrap("; ".join(notes), max(24, int(inches * 16)))
    large = textwrap.wrap(words, max(20, int(inches * 10)), break_on_hyphens=False)
    pad = 6 + space + len(small) * _SMALL * 1.3
    ax.set_title("\n".join(literal(line) for line in large), loc="left", fontsize=11, pad=pad)
    if small:
        ax.annotate(
            "\n".join(literal(line) for line in small), (0, 1), (0, 4 + space), "axes fraction",
            "offset points", fontsize=_SMALL, alpha=0.7, va="bottom", annotation_clip=False,
        )  # fmt: skip


def by_name(names: Sequence[str], notes: Sequence[Sequence[str]], most: int = 3) -> list[str]:
    """Return the remarks on several places, with their names; of more than a few, the number."""
    own = [f"{name}: {', '.join(some)}" for name, some in zip(names, notes, strict=True) if some]
    more = [f"remarks on {len(own) - most} more"] if len(own) > most else []
    return own[:most] + more


def literal(text: str) -> str:
    """Return text in which a dollar sign is only that: a module may be called `$x$`."""
    return text.replace("$", r"\$")


def describe_shape(tensor_shape: Sequence[int], dtype: Any) -> str:
    """Return a shape and a dtype in a few words."""
    return f"{tuple(tensor_shape)} {str(dtype).removeprefix('torch.')}"


def shorten(names: Sequence[str], most: int = 36) -> tuple[list[str], str]:
    """Return names without their common beginning, long ones cut in the middle; and that beginning.

    >>> shorten(["model.h.0.mlp", "model.h.1.mlp"])
    (['0.mlp', '1.mlp'], 'model.h.')
    """
    names = [one_line(str(name)) or "''" for name in names]
    split = [name.split(".") for name in names]
    same = 0
    while len(names) > 1 and all(len(s) > same + 1 and s[same] == split[0][same] for s in split):
        same += 1
    start = ".".join([*split[0][:same], ""]) if same else ""
    if len(start) < 6:
        start = ""
    bare = [name[len(start) :] for name in names]
    short = [_cut(name, most) for name in bare]
    if len(set(short)) < len(set(bare)):
        short = [_cut(name, 2 * most) for name in bare]
    return short, start


def _cut(name: str, most: int) -> str:
    head = most // 3
    return name if len(name) <= most else f"{name[:head]}…{name[len(name) - most + head + 1 :]}"


def label_ticks(ax: Axes, which: Literal["x", "y"], names: Sequence[str]) -> list[str]:
    """Put names along an axis, as many as fit; return a remark on those left out, if any."""
    short, start = shorten(names)
    box = ax.get_window_extent()  # before the layout, which mostly gives a little more
    room = (box.height if which == "y" else box.width) / figure_of(ax).dpi * 72
    step = max(1, math.ceil(len(short) * _SMALL * 1.25 / max(room, 1)))
    positions = list(range(0, len(short), step))
    axis = ax.yaxis if which == "y" else ax.xaxis
    axis.set_ticks(positions, [literal(short[n]) for n in positions], fontsize=_SMALL)
    longest = max(map(len, short), default=0) * _SMALL * 0.62 + 4
    if which == "x" and longest * len(positions) > room:
        ax.tick_params(axis="x", labelrotation=90)
    notes = [f"names begin with {start}"] if start else []
    return [*notes, f"one name in {step} is written"] if step > 1 else notes


# -- matrices -------------------------------------------------------------------------------------


def reduced(matrix: Any) -> tuple[Any, list[str]]:
    """Return an array or tensor with no more rows and columns than can be seen, evenly spaced."""
    notes: list[str] = []
    for n, word in enumerate(("rows", "columns")):
        count = int(matrix.shape[n])
        if count > PIXELS:
            chosen = np.linspace(0, count - 1, PIXELS).round().astype(int)
            matrix = matrix[chosen] if n == 0 else matrix[:, chosen]
            notes.append(f"{PIXELS:,} of {count:,} {word}")
    return matrix, notes


def picture(
    ax: Axes,
    array: Array,
    *,
    center: float | None = None,
    limits: tuple[float, float] | None = None,
    aspect: Literal["auto", "equal"] = "auto",
    norm: Any = None,
    odd: tuple[int, int, int] | None = None,
) -> tuple[AxesImage, list[str]]:
    """Draw a matrix; NaN and infinities have colours of their own, and remarks.

    Args:
        ax: the Axes.
        array: numbers, or NaN.
        center: the value in the middle of a map of two colours; None for one from dark to bright.
        limits: the values at both ends of the colours; by default those of the finite numbers.
        aspect: the aspect of a cell.
        norm: another norm of matplotlib.
        odd: how many are NaN, infinite and minus infinite, if the array is a part only.
    """
    import matplotlib as mpl

    finite = array[np.isfinite(array)]
    low, high = limits or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
    notes: list[str] = []
    if center is not None:
        reach = max(abs(high - center), abs(low - center)) or 1.0
        low, high = center - reach, center + reach
    elif low == high:
        low, high = low - 0.5, high + 0.5
    if finite.size > 1 and finite.min() == finite.max():
        notes.append(f"all values are {finite[0]:.4g}")
    colours = mpl.colormaps["viridis" if center is None else "RdBu_r"]
    colours = colours.with_extremes(bad=_NAN, under=_BELOW, over=_ABOVE)
    scale: dict[str, Any] = {"norm": norm} if norm else {"vmin": low, "vmax": high}
    # matplotlib takes an infinity for NaN; a number beyond the ends has the colour for it.
    beyond = np.where(np.isposinf(array), high + abs(high - low), array)
    beyond = np.where(np.isneginf(array), low - abs(high - low), beyond)
    if not array.size:
        beyond, colours = np.full((1, 1), np.nan), colours.with_extremes(bad="none")
    image = ax.imshow(beyond, cmap=colours, aspect=aspect, interpolation="nearest", **scale)
    odd = odd or counted(array)
    named = zip(odd, ("NaN (grey)", "+Inf (magenta)", "−Inf (cyan)"), strict=True)
    notes += [f"{count:,} {name}" for count, name in named if count]
    if not array.size:
        notes.append("no values")
    return image, notes


def colour_bar(ax: Axes, image: AxesImage, words: str) -> None:
    """Put the scale of colours beside Axes, with the meaning of the numbers."""
    bar = figure_of(ax).colorbar(image, ax=ax, fraction=0.04, pad=0.02)
    bar.set_label(words, fontsize=9)
    bar.ax.tick_params(labelsize=_SMALL)
    cast("Any", bar.outline).set_visible(False)
