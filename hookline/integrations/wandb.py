"""Write the measurements of `watch` to Weights & Biases.

- `WandbWriter(run)`: a writer for `hookline.watch(..., to=WandbWriter(run))`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hookline.integrations.optional_libraries import load
from hookline.training.findings import Finding
from hookline.training.run_files import STATISTICS, Row
from hookline.training.writers import Measured, Writer

__all__ = ["WandbWriter"]


class WandbWriter(Writer):
    """Logs scalars, histograms and findings to a run of wandb; also in offline mode.

    Args:
        run: a run of `wandb.init`; by default the run that is active when the training begins.
        statistics: the statistics to log as numbers, such as `output std/h.0.mlp`; those that were
            not measured are left out.

    The axis is the step of the training, `hookline/step`. The numbers go into the row that your own
    next `wandb.log` ends; an open row is ended before the next one. Histograms are passed on in
    bins.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        statistics: Sequence[str] = ("mean", "std", "norm", "dead", "saturated", "ratio"),
    ) -> None:
        self._wandb = load("wandb", "wandb")
        self._given, self._run = run, run
        self._open = -1  # the row of wandb that holds something of ours and was not ended by us
        self._last = -1  # the step of what it holds
        self.statistics = [name for name in STATISTICS if name in statistics]

    def start(self, rows: Sequence[Row], model: str, options: dict[str, Any]) -> None:
        self._run = self._given or self._wandb.run
        if self._run is None:
            raise RuntimeError(
                "WandbWriter was to log to the active run of wandb. There is none. Call "
                "wandb.init(...) before, or give its result to WandbWriter."
            )
        self._run.define_metric("hookline/step", hidden=True)
        for kind in dict.fromkeys(row.kind for row in rows):
            for tag in (f"{kind}/*", *(f"{kind} {name}/*" for name in self.statistics)):
                self._run.define_metric(tag, step_metric="hookline/step")

    def measured(self, measured: Measured) -> None:
        content: dict[str, Any] = dict(measured.scalars(self.statistics))
        for number, bins in measured.histograms.items():
            row, counts = measured.rows[number], np.asarray(bins.counts)
            edges = np.linspace(bins.low, bins.high, len(counts) + 1)
            histogram = self._wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
            content[f"{row.kind}/{row.place or 'model'}"] = histogram
        self._log(measured.step, content)

    def scalar(self, step: int, name: str, value: float) -> None:
        self._log(step, {name: value})

    def finding(self, finding: Finding) -> None:
        self._log(finding.step, {f"findings/{finding.kind}": str(finding)})

    def _log(self, step: int, content: dict[str, Any]) -> None:
        # wandb keeps only the last value of a key that is logged twice in a row.
        if self._open == self._run.step and step != self._last:
            self._run.log({}, commit=True)
        self._run.log({**content, "hookline/step": step}, commit=False)
        self._open, self._last = self._run.step, step

    def close(self) -> None:
        if self._run is not None and self._open == self._run.step:
            self._run.log({}, commit=True)
        self._open = -1
