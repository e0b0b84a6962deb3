"""Figures of matrices: of weights, of layers × steps, of effects.

- `weights(source, where)`: parameters, or any values, as matrices
- `over_steps(run)`: layers × steps of a training run
- `effects(found)`: the effects of ablating or patching each place
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.comparisons.sweep_results import Sweep
from hookline.errors import FigureError
from hookline.training.run_reading import Run
from hookline.view.figures.axes import (
    axes_for,
    colour_bar,
    columns_for,
    describe_shape,
    figure_of,
    label_ticks,
    literal,
    panels,
    picture,
    reduced,
    shorten,
    title,
)
from hookline.view.figures.figure_sources import NamedTensors, gather, kept_places, one
from hookline.view.figures.sampled_numbers import counted, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["effects", "over_steps", "weights"]

Array = NDArray[Any]

_PANELS = 12
_WRITTEN = 12  # rows and columns up to which the numbers are written into the cells


def weights(
    source: Any, where: Any = None, *, call: int | None = None, ax: Axes | None = None
) -> Figure:
    """Draw weights, or any values, as matrices, blue below zero and red above it.

    >>> import torch
    >>> figure = weights({"fc.weight": torch.tensor([[1.0, -2.0]])})
    >>> figure.axes[0].images[0].get_clim()
    (-2.0, 2.0)

    Args:
        source: a model (its parameters; without `where`, those of two or more dimensions), a
            record, store, dict or tensor.
        where: places; by default all.
        call: for a record, which call; by default the first.
        ax: Axes to draw on.

    A tensor with more than two dimensions is drawn as its first dimension × all others. Each has
    its own scale, the same to both sides of zero. Of more than 1,024 rows or columns, evenly spaced
    ones are drawn.
    """
    found = gather(source, where)
    if isinstance(source, nn.Module) and where is None:
        found = [named for named in found if named.tensors[0].ndim > 1] or found
    dropped = [f"the first {_PANELS} of {len(found)}"] if len(found) > _PANELS else []
    found = found[:_PANELS]
    if len(found) == 1:
        ax = axes_for(ax, (6.4, 4.4))
        notes = _draw_matrix(ax, one(found[0], call), "", bar=True)
        title(ax, found[0].name or "Values", notes)
        return figure_of(ax)
    columns = columns_for(len(found), 4)
    outer, cells = panels(ax, -(-len(found) // columns), columns, (2.2, 2.2), 0.74)
    wide = outer.get_window_extent().width / figure_of(outer).dpi * 72 / columns  # points
    names, start = shorten([named.name for named in found], max(10, int(wide / 5)))
    flat = [cell for line in cells for cell in line]
    said_of: list[str] = []
    for cell, named, name in zip(flat, found, names, strict=False):
        notes = _draw_matrix(cell, one(named, call), name, bar=False)
        said_of += [f"{name}: {', '.join(notes[1:])}"] if notes[1:] else []
    for cell in flat[len(found) :]:
        cell.set_axis_off()
    begin = [f"names begin with {start}"] if start else []
    scale = "each on its own scale, red above zero and blue below"
    title(outer, f"{len(found)} matrices", [scale, *begin, *dropped, *said_of[:3]], space=2)
    return figure_of(outer)


def _draw_matrix(ax: Axes, value: Tensor, name: str, bar: bool) -> list[str]:
    """Draw a value as a matrix; return its shape and the remarks on it."""
    flat = value.reshape(1, -1) if value.ndim < 2 else value.flatten(1)
    flat, notes = reduced(flat)
    array = numbers(flat)
    image, remarks = picture(ax, array, center=0.0, odd=counted(value))
    if bar:
        colour_bar(ax, image, "value")
        rest = " × ".join(map(str, value.shape[1:]))
        ax.set_ylabel(f"{len(value):,} rows" if value.ndim > 1 else "")
        ax.set_xlabel(f"{rest} columns" if value.ndim > 1 else f"{value.numel():,} values")
    else:
        largest = float(image.get_clim()[1])
        words = f"{name}\n{tuple(value.shape)}  ±{largest:.2g}"
        ax.set_title(literal(words), fontsize=7, pad=2)
    if bar and not notes:
        ax.tick_params(labelsize=8)
        ax.locator_params(integer=True, min_n_ticks=1)
    else:
        ax.set_xticks([])
    if value.ndim < 2 or not bar or notes:
        ax.set_yticks([])
    return [describe_shape(value.shape, value.dtype), *notes, *remarks]


# -- layers × steps -------------------------------------------------------------------------------


def over_steps(
    run: Any,
    where: Any = None,
    *,
    kind: str = "output",
    statistic: str = "std",
    ax: Axes | None = None,
) -> Figure:
    """Draw a statistic of a training run over layers and steps, with findings marked.

    Args:
        run: a run of `hookline.watch`, from `hookline.Run.open(folder)`.
        where: places; by default all.
        kind: the kind of values: output, grad, weight, weight_grad or update.
        statistic: such as mean, std, absmax, norm or zeros.
        ax: Axes to draw on.

    The colours are logarithmic if positive values span more than a factor of a thousand. Steps that
    were not measured are hatched; steps without a finite number are grey.
    """
    if not isinstance(run, Run):
        raise FigureError(
            f"Layers × steps of {type(run).__name__} were asked for.",
            "Only a run has steps.",
            "Give hookline.Run.open(folder) of a folder that hookline.watch wrote.",
        )
    places = kept_places(run, where, kind)
    run.check(kind, statistic)
    _, steps, values = run.matrix_of(kind, statistic, places)
    array = np.asarray(values, dtype=float)
    ax = axes_for(ax, (7.2, min(11.0, max(2.4, 1.2 + 0.2 * len(places)))))
    signed = bool((array[np.isfinite(array)] < 0).any())
    norm, scale = _logarithmic(array)
    shown, fewer = reduced(array)
    measured = ~np.isnan(array)
    measured |= run.matrix_of(kind, "nonfinite", places)[2] == 1  # measured, and nothing was finite
    odd = counted(array[measured])
    image, notes = picture(ax, shown, center=0.0 if signed else None, norm=norm, odd=odd)
    if not measured.all():
        image.set_alpha(reduced(measured)[0].astype(float))
        ax.patch.set(hatch="////", edgecolor="0.8")
        notes.append(f"{(~measured).sum():,} not measured (hatched)")
    colour_bar(ax, image, f"{statistic} of the {_KINDS.get(kind, kind)}{scale}")
    along = label_ticks(ax, "y", places) if len(places) == len(shown) else []
    _label_steps(ax, steps, shown.shape[1])
    if not fewer:
        notes += _mark(ax, run, places, steps)
    words = f"{_STATISTICS.get(statistic, statistic)} of the {_KINDS.get(kind, kind)}"
    times = [f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}"] if len(steps) > 1 else []
    title(ax, words[:1].upper() + words[1:], [*times, *fewer, *along, *notes])
    return figure_of(ax)


_KINDS = {
    "output": "outputs", "grad": "gradients", "weight": "weights",
    "weight_grad": "weights' gradients", "update": "updates",
}  # fmt: skip
_STATISTICS = {
    "std": "standard deviation", "absmax": "largest magnitude", "zeros": "share of zeros",
    "dead": "share of dead units", "saturated": "share of saturated units",
    "nonfinite": "share of NaN and infinity",
}  # fmt: skip


def _logarithmic(array: Array) -> tuple[Any, str]:
    """Return a logarithmic norm if the values need one, and its label for the colour bar."""
    finite = array[np.isfinite(array)]
    positive = finite[finite > 0]
    if (finite < 0).any() or not positive.size or positive.max() < 1000 * positive.min():
        return None, ""
    from matplotlib.colors import LogNorm, SymLogNorm

    low, high = float(positive.min()), float(positive.max())
    if (finite == 0).any():  # which has no logarithm
        return SymLogNorm(low, vmin=0.0, vmax=high, base=10), ", logarithmic"
    return LogNorm(low, high), ", logarithmic"


def _label_steps(ax: Axes, steps: Any, shown: int) -> None:
    """Label the steps along the bottom: columns are measured steps, evenly spaced or not."""
    count = min(shown, 8)
    positions: list[int] = np.unique(np.linspace(0, shown - 1, count).round()).astype(int).tolist()
    at = [int(steps[round(p * (len(steps) - 1) / max(1, shown - 1))]) for p in positions]
    ax.set_xticks(positions, [f"{step:,}" for step in at], fontsize=8)
    ax.set_xlabel("step")


def _mark(ax: Axes, run: Run, places: list[str], steps: Any) -> list[str]:
    """Mark findings at their places and steps."""
    spots: list[tuple[int, int]] = []
    for finding in run.findings():
        if finding.place in places:
            later = np.searchsorted(steps, finding.step)
            spots.append((min(int(later), len(steps) - 1), places.index(finding.place)))
    if not spots:
        return []
    ax.plot(*zip(*spots, strict=True), "v", color="white", markeredgecolor="black", markersize=6)
    return [f"▽ {len(spots)} finding{'s' * (len(spots) > 1)}"]


# -- effects --------------------------------------------------------------------------------------


def effects(
    found: Any,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    *,
    words: str | None = None,
    center: float | None = 0.0,
    ax: Axes | None = None,
) -> Figure:
    """Draw a matrix of effects with its labels: layers × positions, layers × heads, places ×
    metrics.

    >>> import torch
    >>> figure = effects(torch.tensor([[0.5, -1.0]]), ["h.0"], ["head 0", "head 1"])
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['0.5', '-1']

    Args:
        found: the result of `hookline.sweep`, a matrix (a tensor, an array, nested lists), a pandas
            DataFrame, or a dict of rows.
        rows: labels of the rows, top to bottom.
        columns: labels of the columns.
        words: the meaning of the numbers, with their unit.
        center: the value that means "no effect"; None for a scale from least to greatest.
        ax: Axes to draw on.
    """
    array, own_rows, own_columns = _labelled(found)
    extra: list[str] = []
    if isinstance(found, Sweep):
        words = words or "change of the metric"
        extra = [f"{found.corrupt:.4g} corrupt, {found.clean:.4g} clean"]
        extra += ["approximate"] * found.approximate
    words = words or "effect"
    rows = [str(label) for label in (own_rows if rows is None else rows)]
    columns = [str(label) for label in (own_columns if columns is None else columns)]
    if (len(rows), len(columns)) != array.shape:
        raise FigureError(
            f"A matrix was to be drawn with {len(rows)} row and {len(columns)} column labels.",
            f"It has the shape {array.shape}.",
            "Give one label for each row and each column.",
        )
    size = (min(12.0, 3.4 + 0.34 * len(columns)), min(11.0, max(2.4, 1.5 + 0.26 * len(rows))))
    ax = axes_for(ax, size)
    shown, fewer = reduced(array)
    image, notes = picture(ax, shown, center=center)
    unit = words[words.rfind("(") + 1 : -1] if words.endswith(")") else words
    colour_bar(ax, image, unit)
    if max(array.shape) <= _WRITTEN:
        _write(ax, array, image)
    along = label_ticks(ax, "y", rows) if not fewer else []
    across = label_ticks(ax, "x", columns) if not fewer else []
    remarks = [*extra, *fewer, *dict.fromkeys(along + across), *notes]
    title(ax, words[:1].upper() + words[1:], remarks)
    return figure_of(ax)


def _labelled(found: Any) -> tuple[Array, Sequence[Any], Sequence[Any]]:
    """Return a matrix with its own labels; numbers where it has none."""
    if isinstance(found, Sweep):
        columns = ["whole value" if at is None else str(at) for at in found.positions]
        return numbers(found.matrix), list(found.places), columns
    if hasattr(found, "to_numpy") and hasattr(found, "columns") and hasattr(found, "index"):
        return np.asarray(found.to_numpy(), dtype=float), list(found.index), list(found.columns)
    if isinstance(found, dict):
        table = cast("dict[Any, Any]", found)
        first = next(iter(table.values()), None)
        if isinstance(first, dict):
            names = list(dict.fromkeys(name for row in table.values() for name in row))
            lines = [[row.get(name, math.nan) for name in names] for row in table.values()]
            return np.asarray(lines, dtype=float), list(table), names
        lines = [np.atleast_1d(np.asarray(row, dtype=float)) for row in table.values()]
        if len({line.shape for line in lines}) > 1:
            raise FigureError(
                "A dict of effects was to be drawn.",
                f"Its rows have the shapes {', '.join(str(line.shape) for line in lines[:6])}.",
                "Give rows of one length, or dicts by column.",
            )
        array = np.stack(lines) if lines else np.empty((0, 0))
        return array, list(table), range(array.shape[1])
    named: NamedTensors = gather(found)[0]
    array = numbers(one(named, None))
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise FigureError(
            "A matrix of effects was to be drawn.",
            f"It has the shape {array.shape}.",
            "Give a matrix: reduce the other dimensions first.",
        )
    return array, range(array.shape[0]), range(array.shape[1])


def _write(ax: Axes, array: Array, image: Any) -> None:
    """Write the numbers into the cells, dark or bright, whichever is readable."""
    greatest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
    # Beside the greatest, what is a thousandth of it is nothing, and its digits are noise.
    digits = 2 - math.floor(math.log10(greatest)) if greatest else 0
    for row, column in np.ndindex(array.shape):
        number = float(array[row, column])
        colour = image.cmap(image.norm(number)) if math.isfinite(number) else (0.5, 0.5, 0.5, 1)
        bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 0.55
        rounded = round(number, digits) + 0.0 if math.isfinite(number) else number  # no -0
        ax.text(column, row, f"{rounded:.2g}", ha="center", va="center", fontsize=7,
                color="black" if bright else "white")  # fmt: skip
