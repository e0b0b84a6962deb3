"""The file formats of a store: how files are named, written whole, and read without trusting them.

- `StoredDtype`, `STORED_DTYPES`, `stored_dtype(dtype)`: the dtypes of safetensors, torch and numpy
- `Series`: the rows of one place, of its offsets or of the sample ids, over the shards of a rank
- `ENDS`: the part that says where each sample ends, for a part whose samples vary in length
- `Index`: the committed rows of one rank; `read_index`, `index_json`; `IndexFile` writes it
- `shard_path`, `index_path`: file names, made of numbers, never of places
- `header_of(series, rows)`, `read_header(path, series)`: the first 64 KB of a shard

A shard is a safetensors file with one tensor, so that the tensor can grow at the end of the file:
safetensors allows no holes and no overlaps. Its header takes 64 KB from the start and is written
again after each append; the content fits in one page, so that no crash leaves half of it. A reader
at that very moment may find half of it, and reads again.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hookline.operating_system import open_file, write_at
from hookline.operating_system import sync as sync_to_disk
from hookline.storage.small_files import corrupt, open_regular, parse_json, read_json, replace_file

__all__ = [
    "ENDS",
    "HEADER",
    "MOST_SIZES",
    "PAGE",
    "STORED_DTYPES",
    "Index",
    "IndexFile",
    "Series",
    "StoredDtype",
    "header_of",
    "index_json",
    "index_path",
    "ranks_of",
    "read_header",
    "read_index",
    "shard_numbers",
    "shard_path",
    "stored_dtype",
]

HEADER = 65536  # bytes that a shard reserves in front of its data
PAGE = 4096  # one page is written whole or not at all, also by a killed process
MOST_SIZES = 32  # dimensions that a row may have
ENDS = {"rows": "offsets", "ids": "id offsets"}
_ROWS = {ends: rows for rows, ends in ENDS.items()}
_FORMAT, _VERSION = "hookline.store.index", 1


@dataclass(frozen=True)
class StoredDtype:
    """One dtype: its name in safetensors, in torch, and the numpy dtype that carries its bytes.

    `carrier` is the torch dtype of that size that numpy knows; None if numpy knows this one.
    """

    name: str
    torch: torch.dtype
    numpy: np.dtype[Any]
    carrier: torch.dtype | None


def _kinds() -> dict[str, StoredDtype]:
    names = {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
        "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    }  # fmt: skip
    carriers = {"BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8", "BOOL": "uint8"}
    kinds: dict[str, StoredDtype] = {}
    for name, word in names.items():
        carrier = carriers.get(name)
        own = None if carrier is None else getattr(torch, carrier)
        kinds[name] = StoredDtype(name, getattr(torch, word), np.dtype(carrier or word), own)
    return kinds


STORED_DTYPES = _kinds()
_BY_TORCH = {kind.torch: kind for kind in STORED_DTYPES.values()}


def stored_dtype(dtype: torch.dtype) -> StoredDtype | None:
    """Return the kind of a torch dtype; None if safetensors has none.

    >>> stored_dtype(torch.bfloat16).name
    'BF16'
    """
    return _BY_TORCH.get(dtype)


@dataclass
class Series:
    """The rows of one tensor, which fill one shard after another."""

    place: str  # "" for the ids of the samples
    part: str  # "rows", "offsets" (where each sample ends), "ids" or "id offsets"
    dtype: str
    shape: tuple[int, ...]  # of one row
    shard_rows: int
    rows: int = 0
    shards: list[int] = field(default_factory=list[int])

    @property
    def rows_part(self) -> str | None:
        """For offsets, the part with the rows that they divide into samples; else None."""
        return _ROWS.get(self.part)

    @property
    def tensor_name(self) -> str:
        """The name of the tensor in its shards."""
        return self.place if self.part == "rows" else f"{self.place}#{self.part}"

    @cached_property
    def kind(self) -> StoredDtype:
        return STORED_DTYPES[self.dtype]

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.kind.numpy.itemsize

    @cached_property
    def json_parts(self) -> tuple[str, str]:
        """Its JSON in an index, before and after the number of rows, up to the list of shards."""
        place = json.dumps(self.place)
        return (
            f'{{"dtype": "{self.dtype}", "part": "{self.part}", "place": {place}, "rows": ',
            f', "shape": {[*self.shape]}, "shard_rows": {self.shard_rows}, "shards": ',
        )

    @cached_property
    def header(self) -> tuple[bytes, bytes]:
        """The header of its shards, before and after the number of rows, up to the last byte."""
        before = f'{{{json.dumps(self.tensor_name)}:{{"dtype":"{self.dtype}","shape":['
        after = "".join(f",{size}" for size in self.shape) + '],"data_offsets":[0,'
        return struct.pack("<Q", HEADER - 8) + before.encode(), after.encode()

    def copy(self) -> Series:
        """Return a copy to change: made at every append, so not by `dataclasses.replace`."""
        one = object.__new__(Series)
        one.__dict__ = {**self.__dict__, "shards": [*self.shards]}
        return one

    def fits(self, rows: torch.Tensor) -> bool:
        """Return True if rows can be appended to those that are there."""
        return rows.dtype is self.kind.torch and rows.shape[1:] == self.shape

    def rows_in(self, position: int) -> int:
        """Return the committed rows in the shard at that position of the series."""
        return min(self.shard_rows, self.rows - position * self.shard_rows)


@dataclass
class Index:
    """The rows that one rank has committed."""

    rank: int
    samples: int = 0
    next_shard: int = 0
    series: list[Series] = field(default_factory=list[Series])
    mark: dict[str, Any] = field(default_factory=dict[str, Any])  # the writer's own, small

    def copy(self) -> Index:
        """Return a copy to change."""
        one = object.__new__(Index)
        one.__dict__ = {**self.__dict__, "series": [series.copy() for series in self.series]}
        return one


def shard_path(folder: Path, rank: int, number: int) -> Path:
    """Return the path of a shard.

    >>> shard_path(Path("acts"), 0, 12).name
    'rank00000-00012.safetensors'
    """
    return folder / f"rank{rank:05d}-{number:05d}.safetensors"


def index_path(folder: Path, rank: int) -> Path:
    """Return the path of the file that says what a rank has committed."""
    return folder / f"rank{rank:05d}.index.json"


def ranks_of(folder: Path) -> list[int]:
    """Return the ranks that have an index in the folder, or shards, whose index is then missing."""
    form = re.compile(r"rank(\d{5,9})(\.index\.json|-\d{5,9}\.safetensors)")
    found = (form.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in found if match})


def shard_numbers(folder: Path, rank: int) -> list[int]:
    """Return the numbers of all shards of a rank in the folder, committed or not."""
    form = re.compile(rf"rank{rank:05d}-(\d{{5,9}})\.safetensors")
    found = (form.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


class IndexFile:
    """The file of an index, for its writer. `write` commits."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = index_path(folder, rank)
        self._file = -1

    def write(self, index: Index, sync: bool) -> None:
        """Commit the rows of the index."""
        body = index_json(index).encode()
        text = b'%b, "crc32": %d}' % (body[:-1], zlib.crc32(body))
        # To replace a file makes some file systems flush it at once, a millisecond each time. An
        # index that fits in a page is written over: like a header, as a whole or not at all.
        if len(text) >= PAGE or not self._is_page():
            self.close()
            replace_file(self._path, text.ljust(PAGE - 1) + b"\n", sync)
            return
        if write_at(self._file, b"%-4095b\n" % text, 0) != PAGE:
            raise OSError("the system wrote a part of the index only")
        if sync:
            sync_to_disk(self._file)

    def _is_page(self) -> bool:
        """Return True if the file exists, is one page long, and is in no other folder."""
        if self._file < 0:
            try:
                self._file = open_file(self._path, os.O_WRONLY, follow=False)
            except OSError:  # none yet, or a link: it is replaced
                return False
        found = os.fstat(self._file)
        return found.st_size == PAGE and found.st_nlink == 1

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def index_json(index: Index) -> str:
    """Return the JSON of an index, with sorted keys, without its checksum.

    Every append needs it, so it is built here, several times as fast as by `json`.
    """
    mark = json.dumps(index.mark, sort_keys=True) if index.mark else "{}"
    series = ", ".join(
        [f"{one.json_parts[0]}{one.rows}{one.json_parts[1]}{one.shards}}}" for one in index.series]
    )
    return (
        f'{{"format": "{_FORMAT}", "mark": {mark}, "next_shard": {index.next_shard}, '
        f'"rank": {index.rank}, "samples": {index.samples}, "series": [{series}], '
        f'"version": {_VERSION}}}'
    )


def _checksum(content: dict[str, Any]) -> int:
    """Return the checksum of all other fields, so that recovery does not cut by a changed index."""
    others = {key: value for key, value in content.items() if key != "crc32"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def _count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 62


def _counts(values: Any, least: int = 0) -> bool:
    return isinstance(values, list) and all(_count(n, least) for n in cast("list[Any]", values))


def read_index(folder: Path, rank: int) -> Index:
    """Return the index of a rank, with every field checked before anything is allocated."""
    path = index_path(folder, rank)
    content = read_json(path)
    if content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise corrupt(path, "It is no index of a store of this version")
    if content.get("crc32") != _checksum(content):
        raise corrupt(path, "Its checksum does not fit")
    if type(content.get("rank")) is not int or content["rank"] != rank:
        raise corrupt(path, f"It belongs to rank {content.get('rank')!r}")
    samples, following, entries = (content.get(k) for k in ("samples", "next_shard", "series"))
    if not (_count(samples) and _count(following) and isinstance(entries, list)):
        raise corrupt(path, "A count in it is missing or makes no sense")
    series = [_read_series(entry, path) for entry in cast("list[Any]", entries)]
    mark = content.get("mark", {})
    if not isinstance(mark, dict):
        raise corrupt(path, "Its mark is not an object")
    index = Index(
        rank, cast("int", samples), cast("int", following), series, cast("dict[str, Any]", mark)
    )
    _check_index(index, path)
    return index


def _read_series(entry: Any, path: Path) -> Series:
    keys = ("place", "part", "dtype", "shape", "shard_rows", "rows", "shards")
    if not isinstance(entry, dict) or set(cast("dict[str, Any]", entry)) != set(keys):
        raise corrupt(path, "A series in it has missing or unknown fields")
    place, part, dtype, shape, shard_rows, rows, shards = (
        cast("dict[str, Any]", entry)[key] for key in keys
    )
    sound = (
        isinstance(place, str)
        and isinstance(dtype, str)
        and part in (*ENDS, *_ROWS)
        and dtype in STORED_DTYPES
        and _counts(shape, 1)
        and len(shape) <= MOST_SIZES
        and _count(shard_rows, 1)
        and _count(rows)
        and _counts(shards)
    )
    if not sound:
        raise corrupt(path, f"The series of {place!r} in it makes no sense")
    series = Series(place, part, dtype, tuple(shape), shard_rows, rows, shards)
    if not _count(series.row_bytes):
        raise corrupt(path, f"The shape of {place!r} in it makes no sense")
    if len(series.shards) != -(-rows // shard_rows):
        raise corrupt(path, f"{rows} rows of {place!r} do not fit its list of shards")
    if series.rows_part and (dtype, series.shape) != ("I64", ()):
        raise corrupt(path, f"The offsets of {place!r} are not integers")
    return series


def _check_index(index: Index, path: Path) -> None:
    named = [(one.place, one.part) for one in index.series]
    numbers = [number for one in index.series for number in one.shards]
    if len(set(named)) != len(named) or len(set(numbers)) != len(numbers):
        raise corrupt(path, "Two series in it are the same, or share a shard")
    if any(number >= index.next_shard for number in numbers):
        raise corrupt(path, "It lists a shard that was never begun")
    for one in index.series:
        varies = (one.place, ENDS.get(one.part)) in named
        if not varies and one.rows != index.samples:
            raise corrupt(path, f"{one.place!r} has {one.rows} rows for {index.samples} samples")
        if one.rows_part and (one.place, one.rows_part) not in named:
            raise corrupt(path, f"{one.place!r} has offsets and no rows")
    if index.samples and not any(one.part == "rows" for one in index.series):
        raise corrupt(path, "It counts samples and has no places")


def header_of(series: Series, rows: int) -> bytes:
    """Return the header of a shard with that many rows, without the blanks that fill 64 KB."""
    before, after = series.header
    return b"%b%d%b%d]}}" % (before, rows, after, rows * series.row_bytes)


def read_header(path: Path, series: Series) -> tuple[int, int]:
    """Return the rows in a shard by its checked header, and the size of the file."""
    try:
        with open_regular(path) as file:
            before = os.fstat(file.fileno()).st_size
            text = file.read(HEADER)
            # A living writer puts rows there before their header, and cuts them off after it.
            size = max(before, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise corrupt(path, f"It cannot be opened ({error})") from error
    if len(text) < HEADER:
        raise corrupt(path, f"It has {size} bytes, fewer than a header")
    length = struct.unpack("<Q", text[:8])[0]
    if length != HEADER - 8:
        raise corrupt(path, f"It states a header of {length} bytes, not {HEADER - 8}")
    content = parse_json(text[8:], path)
    content.pop("__metadata__", None)
    name = series.tensor_name
    entry = content.get(name)
    if set(content) != {name} or not isinstance(entry, dict):
        raise corrupt(path, f"It does not hold just one tensor {name!r}")
    entry = cast("dict[str, Any]", entry)
    shape = entry.get("shape")
    shape = cast("list[Any]", shape) if isinstance(shape, list) else []
    if not (shape and _count(shape[0]) and shape[0] <= series.shard_rows):
        raise corrupt(path, f"Its shape {str(shape)[:80]} makes no sense")
    end = shape[0] * series.row_bytes
    expected = {"dtype": series.dtype, "shape": [shape[0], *series.shape], "data_offsets": [0, end]}
    if entry != expected:
        raise corrupt(path, f"Its tensor is {str(entry)[:120]}, not {expected}")
    if size < HEADER + end:
        raise corrupt(path, f"It has {size} bytes where its header promises {HEADER + end}")
    return shape[0], size
