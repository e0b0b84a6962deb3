"""Write the measurements of `watch` for TensorBoard.

- `TensorBoardWriter(folder)`: a writer for `hookline.watch(..., to=TensorBoardWriter("logs"))`
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hookline.integrations.optional_libraries import load
from hookline.training.findings import Finding
from hookline.training.run_files import STATISTICS
from hookline.training.run_writing import writing
from hookline.training.writers import Measured, Writer

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter(Writer):
    """Writes scalars, histograms and findings into the event files of TensorBoard.

    >>> import tempfile, torch, hookline as hl
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    >>> with hl.watch(model, every=1, to=TensorBoardWriter(tempfile.mkdtemp())) as watching:
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     watching.step()

    Args:
        folder: the directory for event files, or an existing `SummaryWriter`, which is flushed at
            the end, and not closed.
        statistics: the statistics to draw as scalars, such as `output std/h.0.mlp`; those that
            were not measured are left out.

    Histograms are passed on in bins, which takes a hundredth of the time of `add_histogram`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Any,
        *,
        statistics: Sequence[str] = ("mean", "std", "norm", "dead", "saturated", "ratio"),
    ) -> None:
        load("tensorboard", "tensorboard")
        self.statistics = [name for name in STATISTICS if name in statistics]
        self._own = isinstance(folder, (str, os.PathLike))
        self._given: Any = folder
        self._writer: Any = None if self._own else folder

    @property
    def writer(self) -> Any:
        """The `SummaryWriter`."""
        if self._writer is None:
            module = load("torch.utils.tensorboard", "tensorboard")
            self._writer = module.SummaryWriter(log_dir=str(self._given))
        return self._writer

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"Measurements were to be written for TensorBoard, to {self._given!r}.")

    def measured(self, measured: Measured) -> None:
        with self._writing():
            for tag, value in measured.scalars(self.statistics):
                self.writer.add_scalar(tag, value, measured.step, measured.time)
            for number, bins in measured.histograms.items():
                row, (mean, std) = measured.rows[number], measured.values[number, :2].tolist()
                counts = np.asarray(bins.counts)
                count = int(counts.sum())
                self.writer.add_histogram_raw(
                    f"{row.kind}/{row.place or 'model'}", bins.low, bins.high, count, mean * count,
                    (std**2 + mean**2) * count,
                    np.linspace(bins.low, bins.high, len(counts) + 1)[1:].tolist(),
                    counts.tolist(), measured.step, walltime=measured.time,
                )  # fmt: skip
            self.writer.flush()

    def scalar(self, step: int, name: str, value: float) -> None:
        with self._writing():
            self.writer.add_scalar(name, value, step)

    def finding(self, finding: Finding) -> None:
        with self._writing():
            self.writer.add_text(f"findings/{finding.kind}", str(finding), finding.step)
            self.writer.flush()

    def close(self) -> None:
        writer = self._writer
        if self._own:
            self._writer = None
        if writer is not None:
            with self._writing():
                writer.flush()
                if self._own:
                    writer.close()
