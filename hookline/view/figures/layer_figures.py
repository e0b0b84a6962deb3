"""Figures along the layers of a model.

- `along_layers(source, where)`: where the values of each layer lie
- `gradient_flow(source, where)`: how large the gradients of each layer are
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from hookline.captures.record import Record
from hookline.errors import FigureError
from hookline.places.grammar import is_gradient
from hookline.statistics.all_statistics import Histogram, Variance
from hookline.statistics.measuring import Measurements
from hookline.training.run_reading import Run
from hookline.view.figures.axes import (
    BLUE,
    GREY,
    ORANGE,
    axes_for,
    by_name,
    figure_of,
    label_ticks,
    shorten,
    title,
)
from hookline.view.figures.binned_counts import distributions
from hookline.view.figures.figure_sources import gather, kept_places, matching
from hookline.view.figures.sampled_numbers import NumberSample, sample_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["along_layers", "gradient_flow"]

_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)


class _Spread(NamedTuple):
    """The spread of the values of a place."""

    name: str
    ends: tuple[float, ...]  # 1 %, 25 %, median, 75 %, 99 %, or NaN for what is not known
    notes: Sequence[str] = ()


def along_layers(
    source: Any,
    where: Any = None,
    *,
    step: int | None = None,
    kind: str = "output",
    ax: Axes | None = None,
) -> Figure:
    """Draw where the values of each layer lie, in the order of the model, from top to bottom.

    >>> import torch
    >>> figure = along_layers({"a": torch.arange(101.0), "b": torch.zeros(5)})
    >>> figure.axes[0].lines[0].get_xdata()  # the medians
    array([50.,  0.])

    A dot is the median, the thick line covers the middle half of the values and the thin one all
    but 1 % at each end. For `Measurements` without a histogram, and for a run, the dot is the mean
    and the thick line one standard deviation to each side.

    Args:
        source: a record, store, `Measurements`, run, model, dict or tensor.
        where: places, if not all.
        step: of a run, the step; the last one without.
        kind: of a run, what was measured: output, grad, weight, weight_grad or update.
        ax: Axes to draw on.
    """
    measured = isinstance(source, (Measurements, Run))
    spreads = _measured(source, where, step, kind) if measured else _of_values(source, where)
    ax = _axes(ax, len(spreads))
    ends = np.array([one.ends for one in spreads], dtype=float).reshape(-1, 5)
    rows = np.arange(len(spreads))
    ax.hlines(rows, ends[:, 0], ends[:, 4], color=BLUE, linewidth=1, alpha=0.5)
    ax.hlines(rows, ends[:, 1], ends[:, 3], color=BLUE, linewidth=4)
    ax.plot(ends[:, 2], rows, "o", color="white", markeredgecolor=BLUE, markersize=5, zorder=4)
    ax.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_xlabel("value")
    deviations = measured and bool(np.isnan(ends[:, 0]).all())
    middle = "mean, ± 1 std" if deviations else "median, 25–75 % and 1–99 % of the values"
    _finish(ax, "Values along the layers", spreads, [middle])
    return figure_of(ax)


def _axes(ax: Axes | None, rows: int) -> Axes:
    return axes_for(ax, (6.4, min(11.0, max(2.2, 1.1 + 0.2 * rows))))


def _finish(ax: Axes, words: str, rows: Sequence[Any], notes: Sequence[str]) -> None:
    """Complete a figure with one row for each layer."""
    ax.set_ylim(len(rows) - 0.4, -0.6)
    names = [one.name for one in rows]
    along = label_ticks(ax, "y", names)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    own = by_name(shorten(names)[0], [one.notes for one in rows])
    title(ax, words, [*notes, *along, *own])


def _of_values(source: Any, where: Any) -> list[_Spread]:
    made: list[_Spread] = []
    for one in [sample_numbers(named) for named in gather(source, where)]:
        ends = np.quantile(one.values, _SHARES) if one.values.size else (math.nan,) * 5
        made.append(_Spread(one.name, tuple(ends), one.notes))
    return made


def _measured(source: Any, where: Any, step: int | None, kind: str) -> list[_Spread]:
    if isinstance(source, Run):
        found = _at_step(source, where, step, kind, ["mean", "std"])
        return [_of_moments(place, mean, std, notes) for place, (mean, std), notes in found]
    made: list[_Spread] = []
    for place in matching(source, where):
        held = list(source.statistics[place].values())
        if any(isinstance(one, Histogram) for one in held):
            counts = distributions(source, [place], 1)[0]
            ends = tuple(counts.quantile(share) for share in _SHARES)
            made.append(_Spread(counts.name, ends, counts.notes))
            continue
        moments = next((one for one in held if isinstance(one, Variance)), None)
        if moments is None:
            raise FigureError(
                f"Where the values of {str(place)!r} lie was to be drawn.",
                f"There {', '.join(source.statistics[place])} was measured.",
                "Measure with statistics=[hookline.Histogram(dim=None)], or a Variance.",
            )
        made.append(_of_moments(str(place), float(moments.mean.mean()), _whole(moments)))
    return made


def _whole(moments: Variance) -> float:
    """Return the deviation over everything: within the channels, and of their means."""
    means, variances = moments.mean.numpy(), moments.result.numpy()
    return float(np.sqrt(np.mean(variances) + np.var(means)))


def _of_moments(name: str, mean: float, std: float, notes: Sequence[str] = ()) -> _Spread:
    return _Spread(name, (math.nan, mean - std, mean, mean + std, math.nan), notes)


def _at_step(
    run: Run, where: Any, step: int | None, kind: str, names: Sequence[str]
) -> Iterator[tuple[str, list[float], list[str]]]:
    """Yield the last statistics of each place, at or before a step, with remarks.

    They are NaN, with a remark, if nothing was finite then; earlier values are not used.
    """
    places, steps = kept_places(run, where, kind), run.steps()
    for name in names:
        run.check(kind, name)
    found = np.array([run.matrix_of(kind, name, places)[2] for name in (*names, "nonfinite")])
    for n, place in enumerate(places):
        measured = ~np.isnan(found[:, n]).all(0) & (step is None or steps <= step)
        if measured.any():
            at = np.flatnonzero(measured)[-1]
            *values, odd = found[:, n, at].tolist()
            yield place, values, [f"{100 * odd:.3g} % not finite"] if odd > 0 else []


# -- gradients ------------------------------------------------------------------------------------

_MARKS = {"root mean square": "●", "largest": "○", "all zero": "◁", "none, or not finite": "×"}


class _Flow(NamedTuple):
    """The size of the gradient at a place."""

    name: str
    rms: float
    largest: float
    notes: Sequence[str] = ()


def gradient_flow(
    source: Any,
    where: Any = None,
    *,
    step: int | None = None,
    kind: str = "grad",
    ax: Axes | None = None,
) -> Figure:
    """Draw how large the gradients of each layer are, on a logarithmic axis, from top to bottom.

    >>> import torch
    >>> figure = gradient_flow({"a:grad": torch.tensor([3.0, -4.0]), "b:grad": torch.tensor([0.1])})
    >>> figure.axes[0].lines[1].get_xdata()  # the largest of each
    array([4. , 0.1])

    The filled dot is the root mean square, which does not grow with the size of the tensor; the
    open one is the largest magnitude. A gradient of zeros is at the left edge; one that is not
    finite or did not arrive is marked at the right, and in the remarks.

    Args:
        source: a record with gradient places, a model after a backward (the gradients of its
            parameters), a run, or a dict of tensors.
        where: places, if not all that hold gradients.
        step: of a run, the step; the last one without.
        kind: of a run, which gradients: grad, of what modules return, or weight_grad.
        ax: Axes to draw on.
    """
    ran = isinstance(source, Run)
    flows = _flows_of_run(source, where, step, kind) if ran else _flows(source, where)
    good = [v for one in flows for v in (one.rms, one.largest) if math.isfinite(v) and v > 0]
    low, high = (min(good), max(good)) if good else (1e-3, 1.0)
    low, high = low / 3, high * 3
    ax = _axes(ax, len(flows))
    rows = np.arange(len(flows))
    rms, largest = (np.array([one[n] for one in flows]) for n in (1, 2))
    ax.hlines(rows, rms, largest, color=GREY, linewidth=1, alpha=0.6)
    ax.plot(rms, rows, "o", color=BLUE, markersize=5, label="root mean square")
    ax.plot(largest, rows, "o", color="none", markeredgecolor=ORANGE, markersize=5, label="largest")
    labels = ["root mean square", "largest"]
    for mask, place, marker, words in (
        (rms == 0, low, "<", "all zero"),
        (~np.isfinite(rms), high, "x", "none, or not finite"),
    ):
        if mask.any():
            labels.append(words)
            edge = np.full(mask.sum(), place)
            ax.plot(
                edge, rows[mask], marker, color="#CC79A7", label=words, ls="none", clip_on=False
            )
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.set_xlabel("magnitude of the gradient")
    _finish(
        ax, "Gradients along the layers", flows, [f"{_MARKS[label]} {label}" for label in labels]
    )
    return figure_of(ax)


def _flows(source: Any, where: Any) -> list[_Flow]:
    if isinstance(source, Record) and where is None:
        where = [str(place) for place in source.places() if is_gradient(place.port)]
        if not where:
            raise FigureError(
                "The gradients of a record were to be drawn.",
                f"It has none: {', '.join(map(repr, map(str, source.places()[:6])))}.",
                "Capture gradient places, such as '**:grad_output' or '**.weight:grad'.",
            )
    if isinstance(source, nn.Module) and all(p.grad is None for p in source.parameters()):
        raise FigureError(
            "The gradients of a model were to be drawn.",
            "No parameter has one.",
            "Run a backward first, and draw before optimizer.zero_grad().",
        )
    return [
        _flow(sample_numbers(named), named.tensors) for named in gather(source, where, grads=True)
    ]


def _flow(one: NumberSample, tensors: Sequence[Tensor]) -> _Flow:
    if one.refused:
        return _Flow(one.name, math.nan, math.nan, ["no gradient"])
    if one.nan or one.above or one.below or not one.values.size:
        return _Flow(one.name, math.nan, math.nan, one.notes)
    sizes = np.abs(one.values)
    largest = float(sizes.max())
    if one.taken < one.total:  # the largest of all: one in a million matters
        wide = [t if t.element_size() > 1 else t.float() for t in tensors if t.numel()]
        largest = max(float(tensor.abs().max()) for tensor in wide)
    # Squares of tiny gradients would vanish.
    rms = largest * float(np.sqrt(np.mean((sizes / largest) ** 2))) if largest else 0.0
    return _Flow(one.name, rms, largest, [] if largest == 0 else one.notes)


def _flows_of_run(run: Run, where: Any, step: int | None, kind: str) -> list[_Flow]:
    made: list[_Flow] = []
    names = ["mean", "std", "absmax"]
    for place, (mean, std, largest), notes in _at_step(run, where, step, kind, names):
        # Not from the norm: how many values there were differs from step to step.
        rms = math.nan if notes else math.hypot(mean, std)
        made.append(_Flow(place, rms, math.nan if notes else largest, notes))
    return made
