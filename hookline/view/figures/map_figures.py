"""Figures of single values as maps.

- `feature_maps(source, where)`: the channels of an image-like value, side by side
- `attention_maps(source, where)`: what each head attends to
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import FigureError
from hookline.view.figures.axes import (
    PIXELS,
    axes_for,
    colour_bar,
    columns_for,
    describe_shape,
    figure_of,
    literal,
    panels,
    picture,
    reduced,
    shorten,
    title,
)
from hookline.view.figures.figure_sources import NamedTensors, gather, one
from hookline.view.figures.sampled_numbers import counted, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention_maps", "feature_maps"]

Array = NDArray[Any]

_CHANNELS = 64
_LONG = 8  # times as long as high, beyond which a map is stretched
_NUMBER = 8.0  # points that the number above a map takes
_HEADS, _PLACES = 16, 12
_TOKENS, _FEW_TOKENS = 40, 14  # that are written along a map that stands alone, and along others


def feature_maps(
    source: Any,
    where: Any = None,
    *,
    sample: int = 0,
    channels: Sequence[int] | None = None,
    call: int | None = None,
    own_scale: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw the channels of one sample of an image-like value, in a grid.

    >>> import torch
    >>> figure = feature_maps({"conv": torch.rand(2, 4, 8, 8)}, "conv", sample=1)
    >>> figure.axes[0].get_title("left")
    'Feature maps of conv'

    Args:
        source: a record, store, dict or tensor: samples × channels × height × width, or
            channels × height × width.
        where: the place, if there is more than one.
        sample: which sample.
        channels: which channels; by default all, or 64 evenly spread ones.
        call: which call; by default the first.
        own_scale: scale each map from its own least to its own greatest value, to see shapes
            rather than sizes.
        ax: Axes to draw on.
    """
    named = _only(gather(source, where), "Feature maps")
    value = one(named, call)
    maps, notes = _sample_of(value, sample, named.name)
    maps = maps if channels is None else _channels(maps, channels, named.name)
    numbered = list(range(len(maps))) if channels is None else list(channels)
    if len(maps) > _CHANNELS:
        numbered = np.linspace(0, len(maps) - 1, _CHANNELS).round().astype(int).tolist()
        notes.append(f"{_CHANNELS} of {len(maps)} channels")
        maps = maps[numbered]
    array = numbers(maps)
    if own_scale:
        array = _to_unit(array)
        notes.append("each map on a scale of its own")
    odd = counted(array)
    array, columns = _arranged(array, notes)
    grid = _Grid(columns, *array.shape)
    ax = axes_for(ax, _figure_size(grid))
    grid = _with_gaps(grid, ax)
    mosaic = _mosaic(array, grid)
    signed = not own_scale and (mosaic[np.isfinite(mosaic)] < 0).any()
    center = 0.0 if signed else None
    image, remarks = picture(ax, mosaic, center=center, aspect="equal", odd=odd)
    _cover_gaps(ax, grid)
    _number_maps(ax, grid, numbered)
    colour_bar(ax, image, "share of the map's range" if own_scale else "value")
    ax.set_axis_off()
    words = f"Feature maps of {named.name}" if named.name else "Feature maps"
    title(ax, words, [describe_shape(value.shape, value.dtype), *notes, *remarks], space=4)
    return figure_of(ax)


def _only(found: list[NamedTensors], words: str) -> NamedTensors:
    if len(found) == 1:
        return found[0]
    shown = ", ".join(repr(named.name) for named in found[:6]) + ", …" * (len(found) > 6)
    raise FigureError(
        f"{words} of one place were asked for.", f"There are {shown}.", "Name one of them."
    )


def _sample_of(value: Tensor, sample: int, name: str) -> tuple[Tensor, list[str]]:
    if value.ndim == 3:
        return value, []
    if value.ndim != 4:
        raise FigureError(
            f"Feature maps of {name or 'a value'!r} were asked for.",
            f"It has the shape {tuple(value.shape)}.",
            "Give samples × channels × height × width; other values are drawn by figures.weights.",
        )
    if not -len(value) <= sample < len(value):
        raise FigureError(
            f"Feature maps of sample {sample} at {name or 'a value'!r} were asked for.",
            f"There are {len(value)} samples, from 0.",
            "Give sample= one of them.",
        )
    return value[sample], [f"sample {sample}"]


def _channels(maps: Tensor, channels: Sequence[int], name: str) -> Tensor:
    wrong = [c for c in channels if not -len(maps) <= c < len(maps)]
    if wrong or not channels:
        raise FigureError(
            f"The channels {list(channels)} of {name or 'a value'!r} were asked for.",
            f"There are {len(maps)}, from 0.",
            "Give channels= some of them.",
        )
    return maps[list(channels)]


def _to_unit(array: Array) -> Array:
    flat = np.where(np.isfinite(array), array, np.nan).reshape(len(array), -1)
    empty = np.isnan(flat).all(1)
    flat[empty] = 0.0  # nothing finite in it
    low, high = np.nanmin(flat, 1)[:, None, None], np.nanmax(flat, 1)[:, None, None]
    width = np.where(high > low, high - low, 1.0)
    return (array - low) / width


class _Grid(NamedTuple):
    """A grid of maps in one picture; sizes are in pixels of the maps."""

    columns: int
    total: int
    height: int
    width: int
    below: int = 0  # the gap below each map
    beside: int = 0  # the gap at its right

    @property
    def rows(self) -> int:
        return max(1, -(-self.total // self.columns))

    def corner(self, n: int) -> tuple[int, int]:
        """Return the row and the column of pixels at which a map begins."""
        row, column = divmod(n, self.columns)
        return row * (self.height + self.below), column * (self.width + self.beside)


def _arranged(array: Array, notes: list[str]) -> tuple[Array, int]:
    """Return the maps, and how many stand beside each other; a row of numbers is made thicker."""
    count, height, width = (max(1, size) for size in array.shape)
    times = max(height, width) // (_LONG * min(height, width))
    if times > 1:
        array = array.repeat(times, axis=1 if width > height else 2)
        notes.append(f"{'heights' if width > height else 'widths'} drawn {times} times as large")
        count, height, width = (max(1, size) for size in array.shape)
    if _LONG / 2 > width / height > 2 / _LONG:
        return array, columns_for(len(array), 12)
    return array, min(count, max(1, round(math.sqrt(count * height / width))))


def _figure_size(grid: _Grid) -> tuple[float, float]:
    ratio = (grid.rows * grid.height) / max(1, grid.columns * grid.width)
    return 6.4, min(10.0, max(2.0, 5.2 * ratio + grid.rows * _NUMBER / 72 + 0.8))


def _with_gaps(grid: _Grid, ax: Axes) -> _Grid:
    """Return a grid with gaps between its maps, so that a number fits above each."""
    height = max(1, grid.height)
    beside = max(1, round(0.06 * max(height, grid.width)))
    box = ax.get_window_extent().transformed(figure_of(ax).dpi_scale_trans.inverted())
    # The scale takes the rest of the width.
    across = 72 * 0.85 * box.width / (grid.columns * (grid.width + beside))
    down = (72 * box.height - grid.rows * _NUMBER) / (grid.rows * height)
    pixel = max(min(across, down), _NUMBER / height)  # in a tiny picture, half of it is numbers
    return grid._replace(below=max(beside, math.ceil(_NUMBER / pixel)), beside=beside)


def _mosaic(array: Array, grid: _Grid) -> Array:
    """Return all maps in one matrix, with gaps of NaN between them, which are covered later."""
    high, wide = grid.rows * (grid.height + grid.below), grid.columns * (grid.width + grid.beside)
    whole = np.full((high - grid.below, wide - grid.beside), np.nan)
    for n, one_map in enumerate(array):
        top, left = grid.corner(n)
        whole[top : top + grid.height, left : left + grid.width] = one_map
    return whole


def _cover_gaps(ax: Axes, grid: _Grid) -> None:
    """Cover the gaps between the maps, so that they do not look like NaN."""
    from matplotlib.patches import Rectangle

    height, width = grid.height + grid.below, grid.width + grid.beside
    ground: Any = ax.get_facecolor()

    def cover(left: float, top: float, wide: float, high: float) -> None:
        corner = (left - 0.5, top - 0.5)
        ax.add_patch(Rectangle(corner, wide, high, color=ground, linewidth=0, zorder=3))

    for row in range(1, grid.rows):
        cover(0, row * height - grid.below, grid.columns * width, grid.below)
    for column in range(1, grid.columns):
        cover(column * width - grid.beside, 0, grid.beside, grid.rows * height)
    for n in range(grid.total, grid.rows * grid.columns):
        top, left = grid.corner(n)
        cover(left, top, width, height)


def _number_maps(ax: Axes, grid: _Grid, numbers: Sequence[int]) -> None:
    """Write the number of each channel above its map."""
    for n, number in enumerate(numbers[: grid.total]):
        top, left = grid.corner(n)
        ax.text(
            left - 0.5, top - 0.5, str(number), fontsize=6, va="bottom", ha="left", zorder=4,
            alpha=0.8,
        )  # fmt: skip


# -- attention ------------------------------------------------------------------------------------


def attention_maps(
    source: Any,
    where: Any = None,
    *,
    sample: int = 0,
    heads: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    call: int | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw what each head attends to: a row of maps for each place, queries down, keys across.

    >>> import torch
    >>> figure = attention_maps(torch.rand(1, 2, 5, 5).softmax(-1))
    >>> [len(ax.images) for ax in figure.axes[0].child_axes]
    [1, 1]

    Args:
        source: the patterns of `hookline.attention`, or a record, dict or tensor with
            samples × heads × queries × keys, heads × queries × keys, or queries × keys.
        where: places; by default all.
        sample: which sample.
        heads: which heads; by default all, or the first 16.
        tokens: words for the keys, and for the queries if there are as many. They are written
            if there is room: up to 40 along a single head, up to 14 along each of several.
        call: which call; by default the first.
        ax: Axes to draw on.
    """
    found = gather(source, where)
    notes: list[str] = []
    if len(found) > _PLACES:
        notes.append(f"the first {_PLACES} of {len(found)} places")
        found = found[:_PLACES]
    maps = [_heads_of(one(named, call), sample, heads, named.name) for named in found]
    most = max(len(values) for values, _ in maps)
    if heads is None and most > _HEADS:
        notes.append(f"the first {_HEADS} of {most} heads")
        maps = [(values[:_HEADS], numbered[:_HEADS]) for values, numbered in maps]
        most = _HEADS
    alone = len(maps) == 1
    columns = columns_for(most, 8) if alone else most
    rows = -(-most // columns) if alone else len(maps)
    outer, cells = panels(ax, rows, columns, (1.7, 1.85) if most * rows > 1 else (4.2, 4.2))
    notes = _draw_heads(outer, cells, maps, [named.name for named in found], tokens) + notes
    several = maps[0][0].shape if alone else None
    shape = [describe_shape(several, found[0].tensors[0].dtype)] if several else []
    batched = [f"sample {sample}"] if found[0].tensors[0].ndim == 4 else []
    words = f"Attention of {found[0].name}" if alone and found[0].name else "Attention"
    title(outer, words, [*shape, *batched, "queries down, keys across", *notes], space=2)
    return figure_of(outer)


def _heads_of(
    value: Tensor, sample: int, heads: Sequence[int] | None, name: str
) -> tuple[Array, list[int]]:
    asked = f"Attention maps of {name or 'a value'!r} were asked for."
    if value.ndim not in (2, 3, 4):
        found = f"It has the shape {tuple(value.shape)}."
        raise FigureError(asked, found, "Give samples × heads × queries × keys.")
    if value.ndim == 4 and not -len(value) <= sample < len(value):
        found = f"There are {len(value)} samples, and number {sample} was asked for."
        raise FigureError(asked, found, "Give sample= one of them, from 0.")
    value = value[sample] if value.ndim == 4 else value
    value = value[None] if value.ndim == 2 else value
    numbered = list(range(len(value)) if heads is None else heads)
    if any(not -len(value) <= head < len(value) for head in numbered) or not numbered:
        raise FigureError(
            asked, f"There are {len(value)} heads, from 0.", "Give heads= some of them."
        )
    return numbers(value[numbered]), numbered


def _draw_heads(
    outer: Axes,
    cells: list[list[Axes]],
    maps: Sequence[tuple[Array, list[int]]],
    names: Sequence[str],
    tokens: Sequence[str] | None,
) -> list[str]:
    """Draw one picture for each head, on one scale from 0; return the remarks."""
    alone, count = len(maps) == 1, len(maps[-1][0])
    finite = [v[np.isfinite(v)] for v, _ in maps]
    top = max((float(v.max()) for v in finite if v.size), default=1.0) or 1.0
    low = min((float(v.min()) for v in finite if v.size), default=0.0)
    limits = (min(0.0, low), top)
    short, start = shorten(names)
    notes: dict[str, None] = {f"names begin with {start}": None} if start and not alone else {}
    most = _TOKENS if alone and count == 1 else _FEW_TOKENS
    if tokens is not None and len(tokens) > most:
        single = f", {_TOKENS} with one head alone" if most == _FEW_TOKENS else ""
        notes[f"up to {most} tokens are written{single}"] = None
    columns, image, used = len(cells[0]), None, 0
    for row, (values, numbered) in enumerate(maps):
        for n, (head, number) in enumerate(zip(values, numbered, strict=True)):
            line, column = (divmod(n, columns)) if alone else (row, n)
            cell = cells[line][column]
            shown, fewer = reduced(head)
            image, remarks = picture(cell, shown, limits=limits, odd=counted(head))
            notes |= dict.fromkeys([*fewer, *[r for r in remarks if "all values" not in r]])
            cell.set_title(f"head {number}" if row == 0 or alone else "", fontsize=8, pad=2)
            used += 1
            below = n + columns >= count if alone else row == len(maps) - 1
            _label(cell, head.shape, tokens, (below, column == 0), large=count == 1 and alone)
            if not alone and column == 0:
                cell.set_ylabel(literal(short[row]), fontsize=8)
        for column in range(len(values), columns) if not alone else ():
            cells[row][column].set_axis_off()
    for cell in [c for line in cells for c in line][used:] if alone else ():
        cell.set_axis_off()
    if image is not None:
        colour_bar(outer, image, "attention")
    return list(notes)


def _label(
    cell: Axes,
    shape: tuple[int, ...],
    tokens: Sequence[str] | None,
    outside: tuple[bool, bool],
    large: bool,
) -> None:
    """Put words, or the first and last number, along a map at the outside of the grid."""
    cell.tick_params(length=0, labelsize=7)
    queries, keys = shape
    words = [literal(str(word)) for word in tokens or ()]
    if tokens is not None and len(words) != keys:
        raise FigureError(
            f"{len(words)} tokens were given for attention maps.",
            f"There are {keys} keys.",
            "Give as many tokens as keys.",
        )
    most = _TOKENS if large else _FEW_TOKENS
    for axis, count, shown in zip((cell.xaxis, cell.yaxis), (keys, queries), outside, strict=True):
        if shown and words and len(words) == count <= most:
            # A map that stands alone is some 230 points high: a line each for the words.
            axis.set_ticks(range(count), words, fontsize=min(8, 200 / count) if large else 6)
            cell.tick_params(axis="x", labelrotation=90)
        elif shown and count <= PIXELS:
            ends = [0, count - 1] if count > 1 else [0]
            axis.set_ticks(ends, [str(end) for end in ends])
        else:
            axis.set_ticks([])  # inside the grid, or not all rows are drawn
