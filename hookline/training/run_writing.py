"""Write a run directory, in whole records that never overwrite earlier ones.

- `RunWriter`: a new segment in a run directory
- `BinCounts`: a histogram
- `writing(asked)`: a context that turns an error of the disk into a RunError
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hookline.errors import RunError
from hookline.operating_system import open_file, replace
from hookline.training.findings import Finding, to_json
from hookline.training.run_files import Head, Row, histogram_dtype, segment_path, values_dtype

__all__ = ["BinCounts", "RunWriter", "writing"]


class BinCounts(NamedTuple):
    """A histogram: counts of equal bins between two ends."""

    low: float
    high: float
    counts: Sequence[int] | npt.NDArray[Any]


@contextmanager
def writing(asked: str, target: str = "directory") -> Generator[None]:
    """Turn an error of the disk into a RunError, which ends the writing, and not the training."""
    try:
        yield
    except OSError as error:
        raise RunError(
            asked,
            f"{type(error).__name__}: {error}.",
            f"Name a {target} that can be written, on a disk with space.",
        ) from error


class RunWriter:
    """A new segment of a run directory, which is made if it is not there.

    >>> import tempfile
    >>> from hookline.training.run_reading import Run
    >>> folder = tempfile.mkdtemp()
    >>> with RunWriter(folder, [Row("fc", "output", "Linear")], model="Net") as writer:
    ...     writer.values(10, [[0.5, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    ...     writer.scalar(10, "loss", 2.3)
    >>> Run(folder).series("fc", "output", "std")
    (array([10]), array([1.], dtype=float32))

    A segment belongs to one writer; older ones are never touched. A record is appended with one
    write; if the disk is full, an incomplete record is cut off again, and the error is raised.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rows: Iterable[Row],
        *,
        model: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._files: dict[str, tuple[int, int]] = {}  # ending → file number and good size
        self.head = Head(tuple(rows), time.time(), model, dict(options or {}))
        self._values, self._histogram = values_dtype(self.head), histogram_dtype(self.head.bins)
        self._asked = f"A run was to be written to {str(self.folder)!r}."
        with writing(self._asked):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.number = self._claim()
            self._write_head()

    def _claim(self) -> int:
        """Make the first file of a segment with a new number; two writers never share one."""
        number = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        while True:
            path = segment_path(self.folder, number, "values")
            try:
                if not segment_path(self.folder, number, "json").exists():
                    self._files["values"] = open_file(path, flags), 0
                    return number
            except FileExistsError:
                pass  # claimed by another, who has not written its head yet, or never did
            number += 1

    def _write_head(self) -> None:
        """Write the head, whole or not at all."""
        path = segment_path(self.folder, self.number, "json")
        part = path.with_suffix(".json.part")
        text = json.dumps(self.head.to_dict(), allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8", newline="\n")
        replace(part, path)

    def shapes(self, shapes: Sequence[tuple[int, ...] | None]) -> None:
        """Write the head again, with the shapes of the rows, once they are known."""
        given = zip(self.head.rows, shapes, strict=True)
        rows = tuple(dataclasses.replace(row, shape=shape or row.shape) for row, shape in given)
        if rows != self.head.rows:
            self.head = dataclasses.replace(self.head, rows=rows)
            with writing(self._asked):
                self._write_head()

    def values(self, step: int, values: npt.ArrayLike, at: float | None = None) -> None:
        """Append the values of a step: rows × statistics, NaN for those that were not measured."""
        record = np.zeros((), self._values)
        record["step"], record["time"] = step, time.time() if at is None else at
        record["values"] = values
        self._append("values", record.tobytes())

    def histograms(self, step: int, found: Iterable[tuple[int, BinCounts]]) -> None:
        """Append histograms of some rows, by their numbers, before the values of the step."""
        given = list(found)
        records = np.zeros(len(given), self._histogram)
        for record, (row, bins) in zip(records, given, strict=True):
            record["step"], record["row"] = step, row
            record["low"], record["high"], record["counts"] = bins
        if given:
            self._append("histograms", records.tobytes())

    def scalar(self, step: int, name: str, value: float) -> None:
        """Append a number with a name, such as the loss."""
        content = {"step": int(step), "time": time.time(), "name": name}
        self._line("scalars.jsonl", content | {"value": to_json(float(value))})

    def finding(self, finding: Finding) -> None:
        """Append a finding."""
        self._line("findings.jsonl", {"time": time.time()} | finding.to_dict())

    def _line(self, ending: str, content: dict[str, Any]) -> None:
        line = json.dumps(content, allow_nan=False, ensure_ascii=False)
        self._append(ending, line.encode("utf-8", "surrogatepass") + b"\n")

    def _append(self, ending: str, content: bytes) -> None:
        with writing(self._asked):
            number, size = self._open(ending)
            try:
                written = os.write(number, content)
                while written < len(content):  # a full disk, or a signal: go on, or say why not
                    written += os.write(number, content[written:])
            except OSError:
                os.ftruncate(number, size)
                raise
        self._files[ending] = number, size + len(content)

    def _open(self, ending: str) -> tuple[int, int]:
        if ending not in self._files:
            if "values" not in self._files:
                raise RunError(
                    f"Something was to be written to {str(self.folder)!r}.",
                    "This writer is closed.",
                    "Make another, which begins a new segment.",
                )
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            path = segment_path(self.folder, self.number, ending)
            self._files[ending] = open_file(path, flags), 0
        return self._files[ending]

    def close(self) -> None:
        """Close the files; may be called twice."""
        for ending in list(self._files):
            os.close(self._files.pop(ending)[0])

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<hookline run writer, segment {self.number} of {str(self.folder)!r}>"
