"""Write the measurements of a training to a directory, a file or a function.

- `Measured`: the measurements of one step
- `Writer`: the base class of the writers here and in `hookline.integrations`
- `writer_for(target)`: the writer for a directory, a `.jsonl` file or a function

Histograms are binned once, here; writers pass the bins on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from hookline.errors import NotCaptured, RunError
from hookline.training.findings import Finding, to_json
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import BinCounts, RunWriter, writing
from hookline.training.tensor_moments import binned
from hookline.values.tables import as_html, as_text

if TYPE_CHECKING:
    from hookline.training.step_measurement import StepMeasurement

__all__ = ["Measured", "Writer", "writer_for"]


@dataclass(frozen=True, eq=False, repr=False)
class Measured:
    """The measurements of one step: statistics of every row, and histograms of samples.

    `measured[place, kind]` is a dict of statistics. `rows` describes the lines of `values`,
    `STATISTICS` names the columns; values that were not measured are NaN. `histograms` has the
    bins by the number of the row.
    """

    step: int
    time: float
    rows: Sequence[Row]
    values: npt.NDArray[np.float32]
    histograms: Mapping[int, BinCounts]
    shapes: Sequence[tuple[int, ...] | None]

    @classmethod
    def of(cls, step: int, time: float, measurement: StepMeasurement, bins: int) -> Measured:
        """Return the measurements of a measured step."""
        rows = measurement.plan.rows
        values = np.full((len(rows), len(STATISTICS)), np.nan, np.float32)
        shapes: list[tuple[int, ...] | None] = [row.shape for row in rows]
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            for number, found in measurement.found.items():
                before = measurement.squares.get(number, 0.0)
                ratio = math.sqrt(found.square / before) if before else float("nan")
                values[number] = found.values(ratio)
                if measurement.plan.attributes[number] is None:
                    shapes[number] = found.shape
        histograms = binned([found.sample for found in measurement.found.values()], bins)
        named = zip(measurement.found, histograms, strict=True)
        return cls(step, time, rows, values, {number: one for number, one in named if one}, shapes)

    def scalars(self, statistics: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yield some statistics, under such names as `output std/h.0.mlp`."""
        for row, numbers in zip(self.rows, self.values.tolist(), strict=True):
            for name, value in zip(STATISTICS, numbers, strict=True):
                if name in statistics and not math.isnan(value):
                    yield f"{row.kind} {name}/{row.place or 'model'}", value

    def __getitem__(self, key: tuple[str, str]) -> dict[str, float]:
        for row, numbers in zip(self.rows, self.values, strict=True):
            if (row.place, row.kind) == key:
                return dict(zip(STATISTICS, numbers.tolist(), strict=True))
        there = ", ".join(f"({row.place!r}, {row.kind!r})" for row in self.rows[:6])
        raise NotCaptured(
            f"What was measured at {key!r} was asked for.",
            f"There is {there or 'nothing'}{', …' * (len(self.rows) > 6)}.",
            "Ask for a place and a kind: measured['fc', 'output'].",
        )

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        names = [name for name in STATISTICS if name not in ("saturated", "spread")]
        rows: list[tuple[str, ...]] = [("place", "kind", *names)]
        for row, numbers in zip(self.rows, self.values, strict=True):
            shown = [numbers[STATISTICS.index(name)] for name in names]
            cells = ["" if math.isnan(number) else f"{number:.3g}" for number in shown]
            rows.append((row.place or "''", row.kind, *cells))
        return f"Measured at step {self.step}", rows

    def __repr__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table())


class Writer:
    """Takes the measurements; a subclass overrides the methods that it needs."""

    def start(self, rows: Sequence[Row], model: str, options: dict[str, Any]) -> None:
        """Begin a training: which rows will be measured, of which model."""

    def measured(self, measured: Measured) -> None:
        """Take the measurements of a step."""

    def scalar(self, step: int, name: str, value: float) -> None:
        """Take a number that was logged."""

    def finding(self, finding: Finding) -> None:
        """Take a finding."""

    def close(self) -> None:
        """End the training."""


class _Directory(Writer):
    """Writes a run directory."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder

    def start(self, rows: Sequence[Row], model: str, options: dict[str, Any]) -> None:
        self.writer, self.shaped = RunWriter(self.folder, rows, model=model, options=options), False

    def measured(self, measured: Measured) -> None:
        if not self.shaped:
            self.writer.shapes(measured.shapes)
            self.shaped = True
        self.writer.histograms(measured.step, measured.histograms.items())
        self.writer.values(measured.step, measured.values, measured.time)

    def scalar(self, step: int, name: str, value: float) -> None:
        self.writer.scalar(step, name, value)

    def finding(self, finding: Finding) -> None:
        self.writer.finding(finding)

    def close(self) -> None:
        self.writer.close()


class _Lines(Writer):
    """Appends JSON lines: one for each row, scalar and finding."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, rows: Sequence[Row], model: str, options: dict[str, Any]) -> None:
        self._write([])  # a file that cannot be written is told now, not after the first steps

    def measured(self, measured: Measured) -> None:
        lines: list[dict[str, Any]] = []
        for number, (row, numbers) in enumerate(zip(measured.rows, measured.values, strict=True)):
            named = zip(STATISTICS, numbers.tolist(), strict=True)
            good = {name: to_json(value) for name, value in named if not math.isnan(value)}
            if good:
                head = {"step": measured.step, "place": row.place, "kind": row.kind}
                line: dict[str, Any] = head | good
                bins = measured.histograms.get(number)
                if bins is not None:
                    counts = np.asarray(bins.counts).tolist()
                    line["histogram"] = {"low": bins.low, "high": bins.high, "counts": counts}
                lines.append(line)
        self._write(lines)

    def scalar(self, step: int, name: str, value: float) -> None:
        self._write([{"step": step, "name": name, "value": to_json(value)}])

    def finding(self, finding: Finding) -> None:
        self._write([{"finding": finding.to_dict()}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with writing(f"Measurements were to be written to {str(self.path)!r}.", "file"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(text)


class _Function(Writer):
    """Calls a function with each step that was measured."""

    def __init__(self, function: Callable[[Measured], object]) -> None:
        self.function = function

    def measured(self, measured: Measured) -> None:
        self.function(measured)


def writer_for(target: Any) -> Writer:
    """Return the writer for the argument `to=`.

    >>> type(writer_for("logs/run.jsonl")).__name__, type(writer_for("run")).__name__
    ('_Lines', '_Directory')
    """
    if isinstance(target, Writer):
        return target
    if isinstance(target, (str, os.PathLike)):
        # The process may go to another directory before all is written.
        path = Path(cast("str | os.PathLike[str]", target)).absolute()
        return _Lines(path) if path.suffix == ".jsonl" else _Directory(path)
    if callable(target):
        return _Function(target)
    raise RunError(
        f"watch was asked to write to {target!r}.",
        f"It is of type {type(target).__name__}.",
        "Give a directory, a file that ends in .jsonl, a function that takes a Measured, or a "
        "writer such as hookline.integrations.tensorboard.TensorBoardWriter(folder).",
    )
