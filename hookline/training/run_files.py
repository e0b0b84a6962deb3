"""The file format of a run directory, and how to read it without trusting it.

- `STATISTICS`, `ROW_KINDS`, `BINS`: which statistics are measured of which values
- `Row`: one value that is measured at every measured step
- `Head`: the head of a segment; `read_head`, `Head.to_dict`
- `values_dtype(head)`, `histogram_dtype(bins)`: the records of the two binary files
- `Stream`: a growing file of records or lines, of which only whole ones are read
- `segment_path`, `segments_in`: the files of a segment, which are named by its number

`docs/run-format.md` describes the format for other programs.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from hookline.errors import RunError

__all__ = [
    "BINS", "FORMAT", "ROW_KINDS", "STATISTICS", "VERSION", "Head", "Row", "Stream",
    "histogram_dtype", "read_head", "refuse", "segment_path", "segments_in", "values_dtype",
]  # fmt: skip

FORMAT, VERSION = "hookline-run", 1
ROW_KINDS = ("output", "grad", "weight", "weight_grad", "update")
STATISTICS = (
    "mean", "std", "absmax", "norm", "zeros", "dead", "saturated", "nonfinite", "ratio", "spread",
)  # fmt: skip
BINS = 64
_MOST = {"bytes": 256 << 20, "rows": 1_000_000, "statistics": 256, "bins": 1 << 16}
_LATEST = 250e9  # seconds since 1970: the year 9892, beyond which there are no dates
_LONGEST = 1 << 20  # bytes of a line
_CHUNK = 4 << 20
_REMEDY = "Give a directory that hookline.watch(..., to=directory) has written."
Strings = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One measured value: its place, kind, type and shape.

    `kind` is `output` (of a module), `grad` (the gradient of that), or for a parameter `weight`,
    `weight_grad` and `update` (what the optimizer's step has added to it).
    """

    place: str
    kind: str
    type: str = ""
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Head:
    """The head of a segment, with all that is needed to read its records."""

    rows: tuple[Row, ...]
    started: float = 0.0
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    statistics: Strings = STATISTICS
    bins: int = BINS

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        rows = [asdict(row) for row in self.rows]
        head = {"format": FORMAT, "version": VERSION, "started": self.started, "model": self.model}
        measured = {"statistics": self.statistics, "bins": self.bins, "rows": rows}
        return head | {"options": self.options} | measured


def values_dtype(head: Head) -> np.dtype[Any]:
    """Return the dtype of a record of `.values`: all statistics of a step."""
    shape = (len(head.rows), len(head.statistics))
    return np.dtype([("step", "<i8"), ("time", "<f8"), ("values", "<f4", shape)])


def histogram_dtype(bins: int) -> np.dtype[Any]:
    """Return the dtype of a record of `.histograms`: one row at one step.

    >>> histogram_dtype(64).itemsize
    280
    """
    ends = ("low", "<f4"), ("high", "<f4")
    return np.dtype(
        [("step", "<i8"), ("row", "<i4"), ("pad", "<i4"), *ends, ("counts", "<u4", (bins,))]
    )


# -- names ----------------------------------------------------------------------------------------


def segment_path(folder: Path, number: int, ending: str) -> Path:
    """Return the path of a file of a segment.

    >>> segment_path(Path("run"), 3, "values").name
    '00003.values'
    """
    return folder / f"{number:05d}.{ending}"


def segments_in(folder: Path) -> list[int]:
    """Return the numbers of the segments that have a head, in order."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"([0-9]{5,9})\.json", name)))


def refuse(path: Path, found: str, remedy: str = _REMEDY) -> NoReturn:
    """Raise the error for something that is no run."""
    raise RunError(f"A run was to be read from {str(path)!r}.", found, remedy) from None


# -- heads ----------------------------------------------------------------------------------------


def read_head(path: Path) -> Head:
    """Read and check the head of a segment."""
    size = _size(path)
    if size is None:
        refuse(path, "There is no such file.")
    if size > _MOST["bytes"]:
        refuse(path, f"It has {size} bytes, more than the head of a run needs.")
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as problem:
        refuse(path, f"It is no JSON: {problem!s:.80}.")
    if not isinstance(content, dict) or cast("Any", content).get("format") != FORMAT:
        refuse(path, f"It does not say that it is a {FORMAT!r}.")
    content = cast("dict[str, Any]", content)
    if content.get("version") != VERSION:
        version = f"It has the version {content.get('version')!r:.20}; this hookline reads 1."
        refuse(path, version, "Read it with the hookline that wrote it.")
    try:
        return _head_from(content)
    except (KeyError, TypeError, ValueError) as problem:
        refuse(path, f"Its head is not sound: {problem!r:.80}.")


def _head_from(content: dict[str, Any]) -> Head:
    given = _list(content, "rows")
    statistics = tuple(_text(name) for name in _list(content, "statistics"))
    started, bins, options = content["started"], content["bins"], content["options"]
    if type(started) not in (int, float) or not isinstance(options, dict):
        raise TypeError("'started' is a number and 'options' an object")
    if not 0 <= started <= _LATEST:  # nor a NaN
        raise ValueError("'started' is no time")
    if not statistics:
        raise ValueError("there is no statistic")
    if type(bins) is not int or not 1 <= bins <= _MOST["bins"]:
        raise ValueError("'bins' is out of bounds")
    if len(set(statistics)) < len(statistics):
        raise ValueError("a statistic stands twice")
    if len(given) * len(statistics) * 4 > _MOST["bytes"]:
        raise ValueError("a record would be too large")
    rows = tuple(_row_from(row) for row in given)
    if len({(row.place, row.kind) for row in rows}) < len(rows):
        raise ValueError("a row stands twice")
    named = cast("dict[str, Any]", options)
    return Head(rows, float(started), _text(content["model"]), named, statistics, bins)


def _row_from(row: Any) -> Row:
    shape: Any = row["shape"]
    if shape is not None:
        if not isinstance(shape, list) or len(cast("list[Any]", shape)) > 64:
            raise TypeError("a shape is a short list")
        shape = tuple(cast("list[Any]", shape))
        if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            raise TypeError("a shape is made of whole numbers")
    return Row(_text(row["place"]), _text(row["kind"]), _text(row["type"]), shape)


def _list(content: dict[str, Any], name: str) -> list[Any]:
    found: Any = content[name]
    if not isinstance(found, list) or len(cast("list[Any]", found)) > _MOST[name]:
        raise TypeError(f"{name!r} is no list, or too long")
    return cast("list[Any]", found)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.20} is no text")
    return value


# -- growing files --------------------------------------------------------------------------------


def _size(path: Path) -> int | None:
    """Return the size of a regular file; None for anything else, as a pipe would never end."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class Stream:
    """A file that grows by whole records or lines; an incomplete one at its end is not read.

    The file is read in chunks and never mapped: its size says how many records there are, and it
    may be cut short while it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = 0  # bytes that were given out by `lines` or `records`

    def records(self, dtype: np.dtype[Any], start: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """Yield whole records in chunks: all that are new, or from record `start` on."""
        at = self.taken if start is None else start * dtype.itemsize
        count = max(1, _CHUNK // dtype.itemsize) * dtype.itemsize
        for chunk in self._chunks(at, count):
            whole = len(chunk) - len(chunk) % dtype.itemsize
            if whole:
                if start is None:
                    self.taken += whole
                yield np.frombuffer(chunk[:whole], dtype)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON object in each new whole line."""
        rest = b""
        for chunk in self._chunks(self.taken, _CHUNK):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self.taken += len(line) + 1
                yield self._object(line)
            if len(rest) > _LONGEST:
                refuse(self.path, f"It has a line of more than {_LONGEST} bytes.")

    def _object(self, line: bytes) -> dict[str, Any]:
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            refuse(self.path, f"A line in it is no JSON object: {line[:40]!r}.")
        return cast("dict[str, Any]", found)

    def _chunks(self, at: int, count: int) -> Iterator[bytes]:
        size = _size(self.path)
        if size is None or size <= at:
            return
        with self.path.open("rb") as file:
            while at < size:
                file.seek(at, os.SEEK_SET)
                chunk = file.read(min(count, size - at))
                if not chunk:
                    return
                at += len(chunk)
                yield chunk
