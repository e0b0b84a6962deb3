"""What may be appended to a store, as rows.

- `rows_of(place, value, varies)`: the rows of a tensor or of a list of tensors
- `ids_of(ids)`: the rows of integers or strings
- `compare_series(old, new)`: every append brings the same places
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hookline.errors import StoreError
from hookline.storage.files import Series

__all__ = ["compare_series", "ids_of", "rows_of"]


def _plain(place: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        raise StoreError(
            f"Cannot store {place!r}.",
            f"The value is a {type(cast('Any', value)).__name__}, not a plain tensor with data.",
            "Give a tensor with one row for each sample, or a list of tensors.",
        )
    return value.detach().resolve_conj().resolve_neg().cpu()


def rows_of(place: str, value: Any, varies: bool) -> tuple[Tensor, list[int] | None]:
    """The rows, and for a varying place how many of them each sample has."""
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


def ids_of(ids: Any) -> tuple[Tensor, list[int] | None]:
    """The ids as rows: integers as they are, strings as bytes with their lengths."""
    plain: Any = cast("Any", ids).tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
    listed: list[Any] = list(plain)
    try:
        if all(isinstance(one, str) for one in listed):
            words = [one.encode() for one in listed]
            joined = np.array(bytearray(b"".join(words)), dtype=np.uint8)
            return torch.from_numpy(joined), [len(word) for word in words]
        if all(isinstance(one, (int, np.integer)) for one in listed):
            return torch.tensor([int(one) for one in listed], dtype=torch.int64), None
    except (UnicodeEncodeError, RuntimeError, OverflowError):
        pass
    raise StoreError(
        "Cannot store these ids.",
        f"They begin with {str(listed[:3])[:100]}.",
        "Give integers of 64 bits, or strings, one for each sample.",
    )


def compare_series(old: list[Series], new: list[Series]) -> None:
    """An error if an append does not bring what the first one brought."""

    def told(series: list[Series]) -> list[str]:
        return [f"{s.place or 'ids'} {s.part} {s.shape} {s.dtype}" for s in series]

    if told(old) != told(new):
        missing = [one for one in told(old) if one not in told(new)]
        added = [one for one in told(new) if one not in told(old)]
        raise StoreError(
            "Cannot append these values.",
            f"The store has {missing or 'the others'}; given were {added or 'none of these'}.",
            "Give the places, dtypes, shapes and ids that the first append had.",
        )
