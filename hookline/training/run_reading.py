"""Read a run directory: the measurements of `watch`, also while the training continues.

- `Run`: statistics, histograms, scalars and findings of a training run, by place and step
- `Segment`: one start of the training
- `BinsAt`: a histogram at a step

`run_files.py` has the format, `run_writing.py` the writer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hookline.errors import NotCaptured
from hookline.training.findings import Finding, Findings, from_json
from hookline.training.run_files import (
    Head,
    Row,
    Stream,
    histogram_dtype,
    read_head,
    refuse,
    segment_path,
    segments_in,
    values_dtype,
)
from hookline.values.tables import as_html, as_text

__all__ = ["BinsAt", "Run"]

Steps = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]
_NO_STEPS: Steps = np.zeros(0, np.int64)


class BinsAt(NamedTuple):
    """A histogram: the ends of its range, the counts of its equal bins, and its step."""

    low: float
    high: float
    counts: npt.NDArray[np.uint32]
    step: int


class Segment:
    """One start of the training: its head, and what was read of its files so far."""

    def __init__(self, folder: Path, number: int) -> None:
        def stream(ending: str) -> Stream:
            return Stream(segment_path(folder, number, ending))

        self.path = segment_path(folder, number, "json")
        self._stamp = _stamp(self.path)
        self.head: Head = read_head(self.path)
        self.values, self.histograms = stream("values"), stream("histograms")
        self.scalar_lines, self.finding_lines = stream("scalars.jsonl"), stream("findings.jsonl")
        self.steps = _NO_STEPS
        self.places = _NO_STEPS, np.zeros(0, np.int32)  # of the histograms: steps and rows
        self.scalars: dict[str, tuple[list[int], list[float]]] = {}
        self.findings: list[Finding] = []

    def refresh(self) -> bool:
        """Read new steps and lines; numbers are read on demand. Return True if there were any."""
        before = self._taken()
        values, bins = values_dtype(self.head), histogram_dtype(self.head.bins)
        # A record of zeros is what a disk that lost its power may leave: it has no time, no count.
        steps = [np.where(r["time"] > 0, r["step"], -1) for r in self.values.records(values)]
        self.steps = np.concatenate([self.steps, *steps])
        own, rows = [self.places[0]], [self.places[1]]
        for record in self.histograms.records(bins):
            good = record["counts"].any(1) & (record["row"] >= 0)
            own.append(record["step"].copy())  # a view would keep the whole chunk
            rows.append(np.where(good & (record["row"] < len(self.head.rows)), record["row"], -1))
        self.places = np.concatenate(own), np.concatenate(rows)
        for line in self.scalar_lines.lines():
            self._take_scalar(line)
        for line in self.finding_lines.lines():
            try:
                self.findings.append(Finding.from_dict(line))
            except ValueError as problem:
                refuse(self.finding_lines.path, f"A line in it is no finding: {problem}.")
        if self._taken() == before:
            return False
        self._stamp = _stamp(self.path)
        head = read_head(self.path)  # written again once, when the shapes were known
        if _form(head) != _form(self.head):
            refuse(self.path, "It has changed: its records cannot be read any more.")
        self.head = head
        return True

    def is_past(self) -> bool:
        """Return True if it was deleted, and another start of the training has its number now."""
        changed = _stamp(self.path) != self._stamp
        return changed and read_head(self.path).started != self.head.started

    def _taken(self) -> int:
        streams = self.values, self.histograms, self.scalar_lines, self.finding_lines
        return sum(stream.taken for stream in streams)

    def _take_scalar(self, line: dict[str, Any]) -> None:
        step, name = line.get("step"), line.get("name")
        if type(step) is not int or not -(2**63) <= step < 2**63 or type(name) is not str:
            refuse(self.scalar_lines.path, "A line in it has no step, or no name.")
        try:
            value = from_json(line.get("value"))
        except ValueError as problem:
            refuse(self.scalar_lines.path, f"A line in it has no value: {problem}.")
        steps, values = self.scalars.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)

    def columns(self, rows: Sequence[int], statistic: str) -> Numbers:
        """Return one statistic of some rows: records × rows, for the known steps."""
        column = self.head.statistics.index(statistic)
        found = np.full((len(self.steps), len(rows)), np.nan, np.float32)
        at = 0
        for chunk in self.values.records(values_dtype(self.head), start=0):
            chunk = chunk[: len(self.steps) - at]
            found[at : at + len(chunk)] = chunk["values"][:, list(rows), column]
            at += len(chunk)
        return found

    def last(self) -> Numbers:
        """Return the last record: rows × statistics."""
        dtype = values_dtype(self.head)
        for chunk in self.values.records(dtype, start=max(0, len(self.steps) - 1)):
            return chunk[0]["values"]
        return np.full(dtype["values"].shape, np.nan, np.float32)

    def bins(self, record: int) -> BinsAt:
        """Return the histogram in a record."""
        chunk = next(self.histograms.records(histogram_dtype(self.head.bins), start=record), None)
        if chunk is None:
            refuse(self.histograms.path, "It was cut short.")
        one = chunk[0]
        counts = one["counts"].astype(np.uint32)
        return BinsAt(float(one["low"]), float(one["high"]), counts, int(one["step"]))


class Run:
    """The measurements of `watch` in a training run, read from its directory.

    >>> import tempfile
    >>> from hookline.training.run_writing import RunWriter
    >>> folder = tempfile.mkdtemp()
    >>> with RunWriter(folder, [Row("fc", "output", "Linear", (8, 2))], model="Net") as writer:
    ...     for step in (0, 50):
    ...         writer.values(step, [[0, 0.1 * step, 1, 2, 0, 0, 0, 0, 0, 0]])
    ...         writer.scalar(step, "loss", 2.5)
    >>> run = Run(folder)
    >>> run.series("fc", "output", "std")
    (array([ 0, 50]), array([0., 5.], dtype=float32))
    >>> run
    Run of Net: 2 steps from 0 to 50, 1 place, loss, no findings
      place  kind    type    shape   mean  std  absmax  nonfinite
      fc     output  Linear  (8, 2)  0     5    1       0

    Every start of a training has its own segment. For steps that occur twice, the later start
    counts: from its first step on, earlier measurements are left out. An incomplete record, as
    after a crash, is left out too. `refresh()` reads on while the training continues.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._segments: dict[int, Segment] = {}
        self.refresh()
        if not self._segments:
            found = "There is no such directory." if not self.folder.is_dir() else ""
            refuse(self.folder, found or "It has no head of a segment, such as 00000.json.")

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Read a run directory; the same as `Run(folder)`."""
        return cls(folder)

    def refresh(self) -> bool:
        """Read what was written since; return True if there was anything.

        If the directory was deleted and a new training has begun there, the run is the new one.
        """
        numbers = segments_in(self.folder)
        gone = self._segments.keys() - set(numbers) if numbers else ()
        for number in list(gone):
            del self._segments[number]
        news = bool(gone)
        for number in numbers:
            if number not in self._segments or self._segments[number].is_past():
                self._segments[number] = Segment(self.folder, number)
                news = True
            news |= self._segments[number].refresh()
        return news

    # -- what there is --------------------------------------------------------------------------

    @property
    def segments(self) -> list[int]:
        """The numbers of the starts of this training."""
        return sorted(self._segments)

    @property
    def head(self) -> Head:
        """The head of the last segment: model, options, when it was started."""
        return self._segments[self.segments[-1]].head

    def rows(self) -> list[Row]:
        """Return the measured rows in model order: of the last start, then those of earlier
        starts.
        """
        found: dict[tuple[str, str], Row] = {}
        for segment in self._latest_first():
            for row in segment.head.rows:
                found.setdefault((row.place, row.kind), row)
        return list(found.values())

    def places(self, kind: str | None = None) -> list[str]:
        """Return the measured places (of one kind of value), in model order."""
        rows = [row.place for row in self.rows() if kind in (None, row.kind)]
        return list(dict.fromkeys(rows))

    def steps(self) -> Steps:
        """Return the measured steps, each once, in order."""
        return np.unique(np.concatenate([_NO_STEPS, *(s.steps[k] for s, k in self.kept_records())]))

    def names(self) -> list[str]:
        """Return the names of the scalars."""
        return list(dict.fromkeys(n for s in self._segments.values() for n in s.scalars))

    # -- numbers --------------------------------------------------------------------------------

    def series(
        self, place: str, kind: str = "output", statistic: str = "std"
    ) -> tuple[Steps, Numbers]:
        """Return one statistic of one place, at the steps at which it was measured."""
        self.check(kind, statistic, place)
        _, steps, found = self.matrix_of(kind, statistic, [place])
        good = ~np.isnan(found[0])
        return steps[good], found[0][good]

    def matrix(
        self, kind: str = "output", statistic: str = "std"
    ) -> tuple[list[str], Steps, Numbers]:
        """Return one statistic of all places at all steps: places, steps, and places × steps.

        Entries that were not measured are NaN.
        """
        self.check(kind, statistic)
        return self.matrix_of(kind, statistic, self.places(kind))

    def matrix_of(
        self, kind: str, statistic: str, places: list[str]
    ) -> tuple[list[str], Steps, Numbers]:
        """Return what `matrix` returns for some places; a statistic that is not there is NaN."""
        steps = self.steps()
        found = np.full((len(places), len(steps)), np.nan, np.float32)
        wanted = {place: n for n, place in enumerate(places)}
        for segment, kept in self.kept_records():
            if statistic not in segment.head.statistics or not kept.any():
                continue
            rows = [n for n, r in enumerate(segment.head.rows) if _is(r, kind, wanted)]
            if not rows:
                continue
            to = [wanted[segment.head.rows[n].place] for n in rows]
            columns = segment.columns(rows, statistic)[kept]
            at = np.searchsorted(steps, segment.steps[kept])
            found[np.array(to)[:, None], at[None]] = columns.T
        return places, steps, found

    def scalars(self, name: str) -> tuple[Steps, npt.NDArray[np.float64]]:
        """Return the steps and values of a scalar such as the loss."""
        found: dict[int, float] = {}
        for segment in reversed(self._latest_first()):
            if name in segment.scalars:
                steps, values = segment.scalars[name]
                found = {step: value for step, value in found.items() if step < min(steps)}
                found |= dict(zip(steps, values, strict=True))
        if not found:
            self._missing(f"The scalar {name!r}", self.names())
        order = sorted(found)
        return np.array(order, np.int64), np.array([found[step] for step in order])

    def histograms(self, place: str, kind: str = "output") -> list[BinsAt]:
        """Return all histograms of a place, by step."""
        self.check(kind, None, place)
        return [segment.bins(record) for _, segment, record in self.histogram_records(place, kind)]

    def histogram(self, place: str, kind: str = "output", step: int | None = None) -> BinsAt | None:
        """Return the last histogram of a place, or the last one up to a step; None if there is
        none.
        """
        self.check(kind, None, place)
        found = [
            one for one in self.histogram_records(place, kind) if step is None or one[0] <= step
        ]
        return found[-1][1].bins(found[-1][2]) if found else None

    def histogram_records(self, place: str, kind: str) -> list[tuple[int, Segment, int]]:
        """Return the step, segment and number of each histogram record of a place."""
        found: dict[int, tuple[int, Segment, int]] = {}
        for segment, _ in self.kept_records():
            rows = [n for n, r in enumerate(segment.head.rows) if _is(r, kind, (place,))]
            steps, own = segment.places
            records: list[int] = np.flatnonzero(np.isin(own, np.array(rows, int))).tolist()
            if records:
                first = int(steps[records].min())
                found = {step: one for step, one in found.items() if step < first}
            for record in records:
                found[int(steps[record])] = int(steps[record]), segment, record
        return [found[step] for step in sorted(found)]

    def findings(self) -> list[Finding]:
        """Return the findings in the order in which they were written.

        Findings of an earlier start at steps that a later one has measured again are left out.
        """
        ends = self._ends()
        return Findings(one for s, end in ends for one in s.findings if one.step < end)

    # -- inside ---------------------------------------------------------------------------------

    def _latest_first(self) -> list[Segment]:
        return [self._segments[number] for number in reversed(self.segments)]

    def kept_records(self) -> list[tuple[Segment, npt.NDArray[np.bool_]]]:
        """Return the segments in order, and which of their records no later start replaces."""
        return [(s, (s.steps >= 0) & (s.steps < end)) for s, end in self._ends()]

    def _ends(self) -> list[tuple[Segment, int]]:
        """Return the segments in order, and the first step of each that a later start replaces."""
        found: list[tuple[Segment, int]] = []
        end = np.iinfo(np.int64).max
        for segment in self._latest_first():
            found.append((segment, end))
            good = segment.steps >= 0
            if good.any():
                end = min(end, int(segment.steps[good].min()))
        return found[::-1]

    def check(self, kind: str, statistic: str | None, place: str | None = None) -> None:
        """Raise NotCaptured unless this kind, statistic and place were measured."""
        rows = self.rows()
        kinds = list(dict.fromkeys(row.kind for row in rows))
        found = [name for s in self._latest_first() for name in s.head.statistics]
        names = list(dict.fromkeys(found))
        if kind not in kinds:
            other = f"kind={statistic!r}, " if statistic in kinds else ""
            remedy = f"Say {other}statistic={kind!r}: it is a statistic." if kind in names else ""
            self._missing(f"The kind {kind!r}", kinds, remedy)
        if place is not None and not any(_is(row, kind, (place,)) for row in rows):
            self._missing(f"The place {place!r} of kind {kind!r}", self.places(kind))
        if statistic is not None and statistic not in names:
            remedy = f"Say kind={statistic!r}: it is a kind." if statistic in kinds else ""
            self._missing(f"The statistic {statistic!r}", names, remedy)

    def _missing(self, asked: str, there: list[str], remedy: str = "") -> NoReturn:
        shown = ", ".join(map(repr, there[:8])) + ", …" * (len(there) > 8)
        raise NotCaptured(
            f"{asked} was asked for.",
            f"The run in {str(self.folder)!r} has {shown or 'none'}.",
            remedy or "Ask for one of them; run.rows() lists all.",
        )

    def __repr__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table())

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        steps, places, found = self.steps(), len(self.places()), len(self.findings())
        span = f" from {steps[0]} to {steps[-1]}" if len(steps) > 1 else ""
        pieces = [f"{_count(len(steps), 'step')}{span}", _count(places, "place"), *self.names()[:4]]
        title = f"Run of {self.head.model or 'a model'}: {', '.join(pieces)}, "
        title += _count(found, "finding")
        segment = next((s for s in self._latest_first() if len(s.steps)), self._latest_first()[0])
        head, last = segment.head, segment.last()
        names = [n for n in ("mean", "std", "absmax", "nonfinite") if n in head.statistics]
        rows: list[tuple[str, ...]] = [("place", "kind", "type", "shape", *names)]
        for row, numbers in zip(head.rows, last, strict=True):
            shown = [numbers[head.statistics.index(name)] for name in names]
            cells = ["" if np.isnan(number) else f"{number:.4g}" for number in shown]
            shape = "" if row.shape is None else str(row.shape)
            rows.append((row.place or "''", row.kind, row.type, shape, *cells))
        return title, rows


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _form(head: Head) -> tuple[Any, ...]:
    """Return all that the records of a segment are made of, which must not change while it
    grows.
    """
    return [(row.place, row.kind) for row in head.rows], head.statistics, head.bins


def _is(row: Row, kind: str, places: Any) -> bool:
    return row.kind == kind and row.place in places


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"
