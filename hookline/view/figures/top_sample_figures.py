"""Figures of the samples with the largest activations of a unit.

- `top_samples(found, data)`: from `hookline.TopK` and the data that was measured
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import FigureError
from hookline.statistics.all_statistics import TopK, Tops
from hookline.statistics.measuring import Measurements
from hookline.view.figures.axes import BLUE, ORANGE, figure_of, literal, panels, title
from hookline.view.figures.figure_sources import matching
from hookline.view.figures.sampled_numbers import numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["top_samples"]

_CHANNELS, _SAMPLES = 8, 10


def top_samples(
    found: Any,
    data: Any,
    where: str | None = None,
    *,
    channels: Sequence[int] | None = None,
    k: int = 5,
    ax: Axes | None = None,
) -> Figure:
    """Draw the samples with the largest values of some channels: a row for each, best first.

    >>> import torch
    >>> from hookline import TopK
    >>> tops = TopK(k=2).update(torch.tensor([[1.0, 9.0], [5.0, 2.0]]))
    >>> figure = top_samples(tops, torch.rand(2, 8, 8), k=2)
    >>> [ax.get_title() for ax in figure.axes[0].child_axes]
    ['#1  5', '#0  1', '#0  9', '#1  2']

    Args:
        found: a `TopK`, its result, or `Measurements` that have one.
        data: the samples by their id, `data[id]`: a tensor, a list or a Dataset. Of a sample that
            is a tuple, the first item is drawn: images (height × width, with 1 or 3 channels
            before or behind), lists of words (with the one of the top value marked), text, or
            rows of numbers.
        where: for `Measurements`, the place, if there are several.
        channels: which channels; by default the first 8.
        k: how many samples, at most 10.
        ax: Axes to draw on.
    """
    name, tops = _tops(found, where)
    values, ids = (np.atleast_2d(part.numpy().T) for part in tops[:2])  # channels × k
    positions = tops.positions.numpy()
    positions = positions[:, None] if tops.values.ndim == 1 else positions
    wanted = list(range(min(len(values), _CHANNELS))) if channels is None else list(channels)
    notes = [f"the first {_CHANNELS} of {len(values)} channels"]
    notes = notes if channels is None and len(values) > _CHANNELS else []
    if any(not 0 <= c < len(values) for c in wanted) or not wanted or not 1 <= k <= _SAMPLES:
        raise FigureError(
            f"The top {k} samples of channels {wanted} were to be drawn.",
            f"There are {len(values)} channels.",
            f"Give channels= some of them, from 0, and k= from 1 to {_SAMPLES}.",
        )
    count = min(k, values.shape[1])
    if not count:
        raise FigureError(
            "The top samples were to be drawn.", "Nothing was measured.", "Update the TopK first."
        )
    outer, cells = panels(ax, len(wanted), count, (1.25, 1.45))
    for line, channel in zip(cells, wanted, strict=True):
        for rank, cell in enumerate(line):
            cell.set_xticks([])
            cell.set_yticks([])
            sample = int(ids[channel, rank])
            if rank == 0:
                label = f"channel {channel}" if tops.values.ndim > 1 else "all"
                cell.set_ylabel(label, fontsize=8)
            if sample < 0:
                cell.set_title("none", fontsize=7, pad=2)
                continue
            cell.set_title(f"#{sample}  {values[channel, rank]:.3g}", fontsize=7, pad=2)
            _show(cell, _sample(data, sample), positions[rank, channel])
    title(outer, f"Top samples of {name}" if name else "Top samples",
          ["number of the sample and the value there", *notes], space=2)  # fmt: skip
    return figure_of(outer)


def _tops(found: Any, where: str | None) -> tuple[str, Tops]:
    name = ""
    if isinstance(found, Measurements):
        places = matching(found, where)
        if len(places) != 1:
            raise FigureError(
                "Top samples of one place were asked for.",
                f"There are {', '.join(map(repr, map(str, places[:6])))}.",
                "Name one of them.",
            )
        name = str(places[0])
        held = found.statistics[places[0]]
        found = next((one for one in held.values() if isinstance(one, TopK)), held)
    if isinstance(found, TopK):
        found = found.result
    if not isinstance(found, Tops):
        raise FigureError(
            f"Top samples of {name or type(found).__name__!r} were to be drawn.",
            "There is no TopK.",
            "Measure with statistics=[hookline.TopK(k=10)].",
        )
    return name, found


def _sample(data: Any, number: int) -> Any:
    try:
        sample = data[number]
    except (IndexError, KeyError, TypeError) as error:
        raise FigureError(
            f"The sample with id {number} was to be drawn.",
            f"data[{number}] failed: {error!r:.80}.",
            "Give the data that was measured, in its order, or a dict from id to sample.",
        ) from error
    return cast("Any", sample)[0] if isinstance(sample, tuple) else sample


def _show(cell: Axes, sample: Any, position: NDArray[Any]) -> None:
    """Draw one sample: a picture, words, or a line."""
    if isinstance(sample, str):
        _words(cell, sample.split(), -1)
        return
    if isinstance(sample, list) and sample and isinstance(cast("Any", sample)[0], str):
        _words(cell, cast("list[str]", sample), int(position[0]) if len(position) else -1)
        return
    if not isinstance(sample, Tensor):
        sample = torch.as_tensor(np.asarray(cast("Any", sample)))
    array = numbers(sample).squeeze()
    if array.ndim == 3 and array.shape[0] in (3, 4) and array.shape[2] not in (3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)):
        if array.ndim == 3:
            array = _visible(array)
        cell.imshow(array, cmap="gray", aspect="equal", interpolation="nearest")
    elif array.ndim <= 1:
        cell.plot(np.atleast_1d(array), color=BLUE, linewidth=1)
        if len(position) == 1 and position[0] >= 0:
            cell.axvline(position[0], color=ORANGE, linewidth=1)
    else:
        raise FigureError(
            "Top samples were to be drawn.",
            f"A sample has the shape {array.shape}.",
            "Give images, lists of words, text, or rows of numbers.",
        )


def _visible(array: NDArray[Any]) -> NDArray[Any]:
    """Return colours from 0 to 1; normalised images are stretched."""
    finite = array[np.isfinite(array)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    if low >= 0 and high > 1 and high <= 255:
        low, high = 0.0, 255.0
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return np.clip(np.nan_to_num((array - low) / ((high - low) or 1.0)), 0, 1)


def _words(cell: Axes, words: list[str], marked: int) -> None:
    """Write some words around the marked one, which has its own line."""
    start = max(0, marked - 4) if marked >= 0 else 0
    around = words[start : start + 9]
    lines = [f"▸ {word}" if start + n == marked else word for n, word in enumerate(around)]
    text = "\n".join(literal(line[:18]) for line in lines)
    cell.text(0.05, 0.95, text, fontsize=5.5, va="top", transform=cell.transAxes)
