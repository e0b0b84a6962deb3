"""Figures of the distribution of values.

- `histograms(source, where)`: the distribution of a value, or of a few over each other
- `ridge(source, where)`: the distributions of many layers, one above the other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.errors import FigureError
from hookline.view.figures.axes import (
    COLOURS,
    axes_for,
    by_name,
    figure_of,
    label_ticks,
    literal,
    shorten,
    title,
)
from hookline.view.figures.binned_counts import Counts, distributions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["histograms", "ridge"]


def histograms(
    source: Any,
    where: Any = None,
    *,
    bins: int = 60,
    log: bool = False,
    step: int | None = None,
    kind: str = "output",
    ax: Axes | None = None,
) -> Figure:
    """Draw the distribution of a value, or of up to six places over each other, as shares.

    >>> import torch
    >>> figure = histograms({"fc": torch.tensor([0.0, 1.0, 1.0])}, bins=2)
    >>> figure.axes[0].patches[0].get_data().values
    array([1, 2])

    Args:
        source: a record, store, `Measurements` with a `Histogram`, run, model, dict or tensor.
        where: places; by default all.
        bins: the number of bins, for values that are counted here.
        log: whether the counts have a logarithmic axis.
        step: for a run, the step; by default the last one.
        kind: for a run, the kind of values: output, grad, weight, weight_grad or update.
        ax: Axes to draw on.

    All calls at a place count. NaN and infinities are left out, with a remark. Of more than a
    million values a sample is counted, the same each time.
    """
    found = distributions(source, where, bins, step, kind)
    if len(found) > len(COLOURS):
        raise FigureError(
            f"{len(found)} histograms in one figure were asked for.",
            f"Over each other, {len(COLOURS)} can be told apart.",
            "Name fewer places, or draw figures.ridge(...), one above the other.",
        )
    ax = axes_for(ax, (6.4, 3.6))
    if len(found) == 1:
        _draw_one(ax, found[0])
    else:
        _draw_several(ax, found)
    ax.set_xlabel("value")
    if log:
        ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    return figure_of(ax)


def _draw_one(ax: Axes, one: Counts) -> None:
    ax.stairs(one.counts, one.edges, fill=True, color=COLOURS[0], alpha=0.85)
    ax.set_ylabel("values per bin")
    ax.margins(x=0.01)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    if not one.total:
        ax.set_ylim(0, 1)
        ax.set_yticks([0, 1])
    title(ax, f"Distribution of {one.name}" if one.name else "Distribution", [*_size(one)])


def _size(one: Counts) -> list[str]:
    sampled = any(note.startswith("sample of") for note in one.notes)
    return [*one.notes] if sampled or not one.total else [f"{one.total:,.0f} values", *one.notes]


def _draw_several(ax: Axes, found: Sequence[Counts]) -> None:
    names, start = shorten([one.name for one in found])
    for one, name, colour in zip(found, names, COLOURS, strict=False):
        shares = one.counts / max(one.total, 1) * 100
        ax.stairs(shares, one.edges, color=colour, linewidth=1.6, label=literal(name))
        ax.stairs(shares, one.edges, fill=True, color=colour, alpha=0.12)
    ax.legend(frameon=False, fontsize=8)
    ax.set_ylabel("% of values per bin")
    notes = [f"names begin with {start}"] if start else []
    title(ax, f"Distributions at {len(found)} places", notes + _said_once(found, names))


def _said_once(found: Sequence[Counts], names: Sequence[str]) -> list[str]:
    """Return the remarks on several places: common ones once, others with their names."""
    common = [note for note in found[0].notes if all(note in one.notes for one in found)]
    others = [[note for note in one.notes if note not in common] for one in found]
    return common + by_name(names, others)


def ridge(
    source: Any,
    where: Any = None,
    *,
    bins: int = 120,
    step: int | None = None,
    kind: str = "output",
    ax: Axes | None = None,
) -> Figure:
    """Draw the distributions at many places, one above the other, in the order of the model.

    >>> import torch
    >>> figure = ridge({f"h.{n}": torch.randn(100) * n for n in range(1, 5)})
    >>> len(figure.axes[0].collections)
    4

    Each has the same area for the same share of its values, so that a narrow one is high; the
    highest of all sets the scale. The arguments are those of `histograms`.
    """
    import matplotlib as mpl

    found = distributions(source, where, bins, step, kind)
    ax = axes_for(ax, (6.4, min(11.0, max(2.4, 1.2 + 0.3 * len(found)))))
    colours = mpl.colormaps["viridis"](np.linspace(0.1, 0.85, len(found)))
    heights = _heights(found)
    for n, (one, height) in enumerate(zip(found, heights, strict=True)):
        middle = (one.edges[1:] + one.edges[:-1]) / 2
        ax.fill_between(
            middle, n - height, n, color=colours[n], linewidth=0, zorder=n + 2, label=one.name
        )
        ax.plot(middle, n - height, color=(*colours[n, :3] * 0.55, 1.0), lw=0.6, zorder=n + 2)
        ax.axhline(n, color="0.85", linewidth=0.5, zorder=1)
    ax.set_ylim(len(found) - 0.5, -max(1.6, max(h.max(initial=0.0) for h in heights) + 0.2))
    notes = label_ticks(ax, "y", [one.name for one in found])
    names, _ = shorten([one.name for one in found])
    ax.set_xlabel("value")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.0)
    count = f"{len(found)} places" if len(found) > 1 else names[0]
    title(ax, f"Distributions at {count}", notes + _said_once(found, names))
    return figure_of(ax)


def _heights(found: Sequence[Counts]) -> list[Any]:
    """Return densities, the highest as high as two rows; the tallest may hide nothing above it."""
    dense = [one.counts / max(one.total, 1) / np.diff(one.edges) for one in found]
    # A constant layer is a needle, beside which the others would be flat.
    peaks = sorted(float(d.max(initial=0.0)) for d in dense)
    top = peaks[int(0.8 * (len(peaks) - 1))] or 1.0
    return [np.minimum(d / top, 1.0) * 1.8 for d in dense]
