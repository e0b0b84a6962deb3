"""Check the values of an append to a store, and turn them into rows.

- `blocks_of(values, ids, known, shard_bytes)`: each series with the rows to append to it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import StoreError
from hookline.storage.store_files import ENDS, MOST_SIZES, PAGE, Series, header_of, stored_dtype

__all__ = ["blocks_of"]

Block = tuple[Series, Tensor]  # a series as it is or would begin, and the rows to put behind it


def _plain(place: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        native = cast("NDArray[Any]", value)
        native = native.astype(native.dtype.newbyteorder("="), copy=False)
        value = torch.from_numpy(np.asarray(native, order="C"))  # torch has no negative strides
    nested = isinstance(value, Tensor) and value.is_nested
    if (
        nested or not isinstance(value, Tensor)
        or value.layout is not torch.strided or value.is_meta
    ):  # fmt: skip
        kind = "nested tensor" if nested else type(cast("Any", value)).__name__
        raise StoreError(
            f"Cannot store {place!r}.",
            f"The value is a {kind}, not a plain tensor with data.",
            "Give a tensor with one row for each sample, or a list of tensors.",
        )
    # Only what is needed: each torch call costs a small append as much as a system call.
    if value.requires_grad:
        value = value.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return value if value.is_cpu else value.cpu()


def _rows_of(place: str, value: Any, varies: bool) -> tuple[Tensor, list[int] | None]:
    """Return the rows, and for a varying place the number of rows of each sample."""
    if isinstance(value, (list, tuple)):
        pieces = [_plain(place, piece) for piece in cast("Sequence[Any]", value)]
        shapes = {(tuple(piece.shape[1:]), piece.dtype) for piece in pieces}
        if not varies or len(shapes) != 1 or any(piece.ndim == 0 for piece in pieces):
            raise StoreError(
                f"Cannot store {place!r}.",
                f"It is a list of tensors, with rows {str(sorted(map(str, shapes)))[:200]}."
                if varies
                else "It is a list of tensors, and the store holds one row for each sample.",
                "Give tensors that differ in the first size only, from the first append on.",
            )
        return torch.cat(pieces).contiguous(), [len(piece) for piece in pieces]
    tensor = _plain(place, value)
    if tensor.ndim < 1 + varies:
        raise StoreError(
            f"Cannot store {place!r}.",
            f"The tensor has shape {tuple(tensor.shape)}.",
            "Its first size must count samples; add one with value[None].",
        )
    if varies:
        return tensor.flatten(0, 1).contiguous(), [tensor.shape[1]] * len(tensor)
    return tensor.contiguous(), None


def _ids_of(ids: Any) -> tuple[Tensor, list[int] | None]:
    """Return the ids as rows: integers as they are, strings as bytes with their lengths."""
    plain: Any = cast("Any", ids).tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        raise _no_ids(plain)
    listed: list[Any] = list(cast("Iterable[Any]", plain))
    try:
        if all(isinstance(one, str) for one in listed):
            words = [one.encode() for one in listed]
            joined = np.array(bytearray(b"".join(words)), dtype=np.uint8)
            return torch.from_numpy(joined), [len(word) for word in words]
        if all(isinstance(one, (int, np.integer)) for one in listed):
            return torch.from_numpy(np.array([int(one) for one in listed], dtype=np.int64)), None
    except (UnicodeEncodeError, OverflowError):
        pass
    raise _no_ids(listed[:3])


def _is_empty(given: Any) -> bool:
    if isinstance(given, Tensor) and given.is_nested:  # it may have no length
        return False
    if isinstance(given, (Tensor, np.ndarray)):
        return given.ndim > 0 and not given.shape[0]
    return isinstance(given, (list, tuple, range)) and not given


def _no_ids(found: Any) -> StoreError:
    return StoreError(
        "Cannot store these ids.",
        f"They begin with {str(found)[:100]}.",
        "Give integers of 64 bits, or strings, one for each sample.",
    )


def _compare(old: list[Series], new: list[Series]) -> None:
    """Raise if an append does not have the same places and forms as the first one."""

    def told(series: list[Series]) -> list[str]:
        names = [s.part if s.part.startswith("id") else f"{s.place!r} {s.part}" for s in series]
        return [f"{name} {s.shape} {s.dtype}" for name, s in zip(names, series, strict=True)]

    if told(old) != told(new):
        missing = [one for one in told(old) if one not in told(new)]
        added = [one for one in told(new) if one not in told(old)]
        raise StoreError(
            "Cannot append these values.",
            f"The store has {missing or 'the others'}; given were {added or 'none of these'}.",
            "Give the places, dtypes, shapes and ids that the first append had. Samples of varying "
            "length go in as a list of tensors, from the first append on; a harvest takes mask=.",
        )


def _series(place: str, part: str, rows: Tensor, shard_bytes: int) -> Series:
    """Return the series that begins with these rows."""
    kind = stored_dtype(rows.dtype)
    shape = tuple(rows.shape[1:])
    if len(shape) > MOST_SIZES:
        raise StoreError(
            f"Cannot store {place!r}.",
            f"A row has {len(shape)} dimensions, more than {MOST_SIZES}.",
            "Flatten some of them first, for instance with .flatten(1).",
        )
    if kind is None or 0 in shape:
        raise StoreError(
            f"Cannot store {place!r}.",
            f"A row is {shape} {rows.dtype}, which "
            + ("safetensors does not have." if kind is None else "holds nothing."),
            "Convert it first, for instance with .float().",
        )
    row_bytes = math.prod(shape) * rows.itemsize
    series = Series(place, part, kind.name, shape, max(1, shard_bytes // row_bytes))
    try:
        str.encode(place)
        fits = len(header_of(series, 1 << 62)) <= PAGE and place != "__metadata__"
    except (TypeError, UnicodeEncodeError):
        fits = False
    if not fits:
        raise StoreError(
            f"Cannot store a place named {str(place)[:40]!r}.",
            "The name is no string, longer than a page, no Unicode, or reserved by safetensors.",
            "Give it another name.",
        )
    return series


def _ends(rows: Series | None, lengths: list[int]) -> Tensor:
    """Return where each sample ends, counted over all rows of the rank."""
    start = 0 if rows is None else rows.rows
    return torch.from_numpy(np.cumsum(np.asarray(lengths, dtype=np.int64)) + start)


def _as_before(values: Mapping[str, Any], known: list[Series]) -> tuple[list[Block], int] | None:
    """Return the blocks of the usual append quickly: plain rows of all places, in the same order.

    It returns None if this may be another append. Between two writes of a megabyte the caches of
    the processor are empty, so that each step takes several times as long as usual.
    """
    if len(values) != len(known):
        return None
    blocks: list[Block] = []
    counts: set[int] = set()
    for series, (place, value) in zip(known, values.items(), strict=True):
        if (
            type(value) is not Tensor
            or place != series.place
            or series.part != "rows"
            or value.is_nested
            or value.ndim != 1 + len(series.shape)
            or not series.fits(value)
            or not (value.is_cpu and value.layout is torch.strided and value.is_contiguous())
            or value.requires_grad
            or value.is_conj()
            or value.is_neg()
        ):
            return None
        blocks.append((series, value))
        counts.add(value.shape[0])
    return (blocks, counts.pop()) if len(counts) == 1 else None


def blocks_of(
    values: Mapping[str, Tensor | Sequence[Tensor]],
    ids: Any,
    known: list[Series],
    shard_bytes: int,
) -> tuple[list[Block], int]:
    """Return each series of a store with its checked rows, and the number of samples.

    `known` are the series of the store, none for a new store; a new series has shards of
    `shard_bytes`.
    """
    if not hasattr(values, "items"):
        raise StoreError(
            "Cannot append these values.",
            f"They are a {type(values).__name__}, which names no places.",
            "Give a dict, as in writer.append({'fc': values}).",
        )
    usual = _as_before(values, known) if ids is None else None
    if usual is not None:
        return usual
    given = [*values.values(), *(() if ids is None else (ids,))]
    if values and all(map(_is_empty, given)):  # nothing tells of which kind no ids are
        return [], 0
    old = {(one.place, one.part): one for one in known}
    blocks, counts = _blocks_and_counts(values, ids, old, shard_bytes)
    if not values or len(set(counts.values())) != 1:
        told = ", ".join(f"{what}: {count}" for what, count in counts.items())
        raise StoreError(
            "Cannot append these values.",
            f"Samples: {told}." if values else "There are none.",
            "Give every place, and the ids, the same number of samples, in the first size.",
        )
    if old and [series for series, _ in blocks] != known:
        order = [*old, *((one.place, one.part) for one, _ in blocks)]
        blocks.sort(key=lambda block: order.index((block[0].place, block[0].part)))
        _compare(known, [series for series, _ in blocks])
    return blocks, next(iter(counts.values()))


def _blocks_and_counts(
    values: Mapping[str, Tensor | Sequence[Tensor]],
    ids: Any,
    old: dict[tuple[str, str], Series],
    shard_bytes: int,
) -> tuple[list[Block], dict[str, int]]:
    """Return each series with its new rows, and the numbers of samples of places and ids."""
    blocks: list[Block] = []
    counts: dict[str, int] = {}

    def put(place: str, part: str, rows: Tensor) -> None:
        series = old.get((place, part))
        if series is None or not series.fits(rows):
            series = _series(place, part, rows, shard_bytes)
        blocks.append((series, rows))

    def add(place: str, part: str, rows: Tensor, lengths: list[int] | None) -> None:
        what = repr(place) if part == "rows" else "ids"  # which a place may be named as well
        counts[what] = len(rows if lengths is None else lengths)
        put(place, part, rows)
        if lengths is not None:
            put(place, ENDS[part], _ends(old.get((place, part)), lengths))

    for place, value in values.items():
        varies = (place, "offsets") in old if old else isinstance(value, (list, tuple))
        add(place, "rows", *_rows_of(place, value, varies))
    if ids is not None:
        add("", "ids", *_ids_of(ids))
    return blocks, counts
