"""Read the numbers of a run into bounded memory: all rows at evenly spread steps.

- `RunTable`: steps, and rows × statistics × steps; it reads on as the run grows
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hookline.training.run_files import Row, values_dtype
from hookline.training.run_reading import Run
from hookline.view.tensor_summaries import spread

__all__ = ["RunTable"]

_BYTES = 64 << 20


class _Part:
    """Every n-th record of a segment; n doubles whenever there would be too many."""

    def __init__(self, most: int) -> None:
        self.most, self.stride, self.seen = most, 1, 0
        self.positions: list[int] = []
        self.records: list[npt.NDArray[np.float32]] = []
        self.last: npt.NDArray[np.float32] | None = None

    def read(self, segment: Any) -> None:
        known = len(segment.steps)
        if self.seen >= known:
            return
        for chunk in segment.values.records(values_dtype(segment.head), start=self.seen):
            for record in chunk["values"][: known - self.seen]:
                if self.seen % self.stride == 0:
                    self.positions.append(self.seen)
                    self.records.append(record.copy())
                self.last = record
                self.seen += 1
                if len(self.positions) > 2 * self.most:
                    self.stride *= 2
                    kept = [n for n, at in enumerate(self.positions) if at % self.stride == 0]
                    self.positions = [self.positions[n] for n in kept]
                    self.records = [self.records[n] for n in kept]
            if self.seen >= known:
                break
        if self.last is not None:
            self.last = self.last.copy()  # a view would keep the whole chunk


class RunTable:
    """All rows of a run at steps that are spread over its length, and the latest one."""

    def __init__(self, run: Run, most: int) -> None:
        self.run = run
        self._asked = most
        self._parts: dict[Any, _Part] = {}  # by segment
        self.refresh()

    def refresh(self) -> None:
        """Read what `run.refresh()` has found, and build the table again."""
        self.rows: list[Row] = self.run.rows()
        segments = [segment for segment, _ in self.run.kept_records()]
        heads = [segment.head for segment in segments]
        self.statistics = list(dict.fromkeys(name for head in heads for name in head.statistics))
        size = 4 * max(len(self.rows) * len(self.statistics), 1)
        self.most = int(min(self._asked, max(60, _BYTES // size)))
        known, self._parts = self._parts, {}
        for segment in segments:
            self._parts[segment] = known.get(segment) or _Part(self.most)
            self._parts[segment].read(segment)
        self.total = len(self.run.steps())
        self._build()

    def _build(self) -> None:
        columns: dict[int, npt.NDArray[np.float32]] = {}
        index = {(row.place, row.kind): n for n, row in enumerate(self.rows)}
        for segment, kept in self.run.kept_records():
            part, head = self._parts[segment], segment.head
            to = np.array([index[row.place, row.kind] for row in head.rows], int)
            names = np.array([self.statistics.index(name) for name in head.statistics], int)
            pairs = list(zip(part.positions, part.records, strict=True))
            if part.last is not None and part.seen - 1 not in part.positions[-1:]:
                pairs.append((part.seen - 1, part.last))
            for position, record in pairs:
                if position < len(kept) and kept[position]:
                    column = np.full((len(self.rows), len(self.statistics)), np.nan, np.float32)
                    column[np.ix_(to, names)] = record
                    columns[int(segment.steps[position])] = column
        steps = sorted(columns)
        if len(steps) > self.most:  # the first and the last stay
            steps = [steps[n] for n in spread(len(steps), self.most)]
        self.steps = np.array(steps, np.float64)
        shape = (len(self.rows), len(self.statistics), 0)
        empty = np.zeros(shape, np.float32)
        self.values = np.stack([columns[step] for step in steps], 2) if steps else empty

    def matrix(self, kind: str, statistic: str) -> npt.NDArray[np.float32]:
        """Return one statistic of the rows of a kind: rows × steps."""
        rows = [n for n, row in enumerate(self.rows) if row.kind == kind]
        return self.values[rows, self.statistics.index(statistic)]

    def reached(self, kind: str, statistic: str) -> npt.NDArray[np.bool_]:
        """Return where such a matrix was measured, even if no number was finite."""
        found = ~np.isnan(self.matrix(kind, statistic))
        if "nonfinite" in self.statistics:
            found |= self.matrix(kind, "nonfinite") == 1  # the share of all
        return found

    def measured(self, kind: str) -> list[str]:
        """Return the statistics that were measured for a kind."""
        rows = [n for n, row in enumerate(self.rows) if row.kind == kind]
        missing = np.isnan(self.values[rows])
        names = enumerate(self.statistics)
        return [name for k, name in names if not missing.size or not missing[:, k].all()]
