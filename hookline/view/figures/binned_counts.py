"""Distributions from any source, as counts in bins.

- `Counts`: the counts of the values of one place in bins
- `distributions(source, where)`: those of values, of measured histograms or of a training run
- `edges_of(arrays, bins)`: the edges of bins over all values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookline.errors import FigureError
from hookline.statistics.all_statistics import Bins, Histogram
from hookline.statistics.measuring import Measurements
from hookline.training.run_reading import Run
from hookline.view.figures.figure_sources import gather, kept_places, matching
from hookline.view.figures.sampled_numbers import NumberSample, sample_numbers

__all__ = ["Counts", "distributions", "edges_of"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Counts:
    """The counts of the values of a place in bins, with remarks."""

    name: str
    counts: Array
    edges: Array
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The number of values in the bins."""
        return float(self.counts.sum())

    def quantile(self, share: float) -> float:
        """Return the value below which a share of the values lies, interpolated within a bin."""
        if not self.total:
            return float("nan")
        summed = np.concatenate([[0.0], np.cumsum(self.counts)]) / self.total
        return float(np.interp(share, summed, self.edges))


def distributions(
    source: Any, where: Any, bins: int, step: int | None = None, kind: str = "output"
) -> list[Counts]:
    """Return the distributions at places; those of values have the same bins."""
    if bins < 1:
        raise FigureError(
            f"A histogram of {bins} bins was asked for.",
            "Values need one to fall into.",
            "Give bins=1 or more.",
        )
    if isinstance(source, Histogram):
        return [_of_bins("", source.result, int(source.skipped.sum()))]
    if isinstance(source, Bins):
        return [_of_bins("", source, 0)]
    if isinstance(source, Measurements):
        return [_measured(source, place) for place in matching(source, where)]
    if isinstance(source, Run):
        return _of_run(source, where, step, kind)
    return _of_samples([sample_numbers(named) for named in gather(source, where)], bins)


def _of_samples(samples: Sequence[NumberSample], bins: int) -> list[Counts]:
    """Return the distributions of numbers, in bins that all of them share."""
    edges = edges_of([sample.values for sample in samples], bins)
    return [
        Counts(sample.name, np.histogram(sample.values, edges)[0], edges, tuple(sample.notes))
        for sample in samples
    ]


def edges_of(arrays: Sequence[Array], bins: int) -> Array:
    """Return the edges of bins over all values; around a constant, half a unit to each side."""
    ends = [(float(values.min()), float(values.max())) for values in arrays if values.size]
    low = min((low for low, _ in ends), default=0.0)
    high = max((high for _, high in ends), default=1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        reach = 0.5 * max(abs(low), 1e-30) if low else 0.5
        low, high = low - reach, high + reach
    return np.linspace(low, high, bins + 1)


def _measured(source: Measurements, place: str) -> Counts:
    held = source.statistics[place]
    for one in held.values():
        if isinstance(one, Histogram):
            return _of_bins(str(place), one.result, int(one.skipped.sum()))
    raise FigureError(
        f"The distribution of {str(place)!r} was to be drawn.",
        f"There {', '.join(held)} was measured, and no histogram.",
        "Measure with statistics=[hookline.Histogram(dim=None)].",
    )


def _of_bins(name: str, found: Bins, skipped: int) -> Counts:
    counts, edges, below, above = (part.numpy() for part in found)
    if counts.ndim > 1:  # one for each channel: all together
        counts = counts.sum(0)
    notes = [f"{skipped:,} NaN not shown"] if skipped else []
    beyond = [(int(below.sum()), "below"), (int(above.sum()), "above")]
    notes += [f"{count:,} {word} the range" for count, word in beyond if count]
    return Counts(name, counts, edges, tuple(notes) if counts.sum() else (*notes, "no values"))


def _of_run(run: Run, where: Any, step: int | None, kind: str) -> list[Counts]:
    """Return the histograms of a run at places, the last ones at or before a step."""
    made: list[Counts] = []
    for place in kept_places(run, where, kind):
        found = run.histogram(place, kind, step)
        if found is not None:
            low, high, counts, at = found
            edges = np.linspace(low, high, len(counts) + 1)
            made.append(Counts(str(place), np.asarray(counts), edges, (f"step {at:,}",)))
    if not made:
        raise FigureError(
            f"Histograms of {where or 'a run'!r} were to be drawn.",
            f"The run has none of kind {kind!r}"
            + ("." if step is None else f" up to step {step}."),
            "Give kind= and step= that it has; run.rows() lists the kinds.",
        )
    return made
