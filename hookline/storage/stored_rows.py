"""Read a store: the rows of one place over all shards and ranks, from mapped files.

- `StoredRows`: one row for each sample, or the rows of all samples behind each other
- `StoredSamples`: samples of varying length
- `positions_of(key, total, place)`: the positions that an index names

Rows are copied out of the map: they stay as they are, whatever happens to the files.
"""

from __future__ import annotations

import mmap
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import StoreError
from hookline.storage.small_files import corrupt, most_files
from hookline.storage.store_files import HEADER, Index, Series, read_header, shard_path

__all__ = ["StoredRows", "StoredSamples", "positions_of"]

Key = int | slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]
_PLAIN = (int, slice, EllipsisType, type(None))  # indices that act on one dimension alone


class _Shard:
    """A shard that is mapped when it is first read, in each process anew.

    A map keeps its file open, so the oldest maps are closed when there are many.
    """

    __slots__ = ("__weakref__", "_array", "path", "rows", "series")

    _mapped: ClassVar[deque[weakref.ref[_Shard]]] = deque()

    def __init__(self, path: Path, series: Series, rows: int) -> None:
        self.path, self.series, self.rows = path, series, rows
        self._array: NDArray[Any] | None = None

    @property
    def array(self) -> NDArray[Any]:
        array = self._array
        if array is None:
            array = self._array = self._map()
        return array

    def _map(self) -> NDArray[Any]:
        found = self._found()
        if found < self.rows:
            raise corrupt(self.path, f"It has {found} rows where the index promises {self.rows}")
        end = HEADER + self.rows * self.series.row_bytes
        while len(self._mapped) >= 2 * most_files():
            first = self._mapped.popleft()()
            if first is not None:
                first._array = None
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise corrupt(self.path, f"It cannot be mapped ({error})") from error
        self._mapped.append(weakref.ref(self))
        flat = np.frombuffer(mapped, dtype=self.series.kind.numpy, offset=HEADER)
        return flat.reshape(self.rows, *self.series.shape)

    def _found(self) -> int:
        """Return the rows in its header; read again if a living writer is just writing it."""
        for _ in range(4):
            with suppress(StoreError):
                return read_header(self.path, self.series)[0]
            time.sleep(0.01)
        return read_header(self.path, self.series)[0]

    def __reduce__(self) -> tuple[type[_Shard], tuple[Path, Series, int]]:
        return _Shard, (self.path, self.series, self.rows)  # another process maps it for itself


class StoredRows:
    """The rows of a place: indexed like a tensor in the first size, each read a new tensor.

    `rows[7]`, `rows[10:20]`, `rows[[1, 5]]`, `rows[mask]` and `rows[tensor_of_positions]` read
    rows; further indices are as a tensor's. There are `len(rows)`, `rows.shape`, `rows.dtype` and
    `rows.to_numpy()`.
    """

    def __init__(self, folder: Path, series: Sequence[tuple[Index, Series]]) -> None:
        first = series[0][1]
        self.place, self._kind, self._row = first.place, first.kind, first.shape
        self._shards: list[_Shard] = []
        self._starts: list[int] = []
        total = 0
        for index, one in series:
            for position, number in enumerate(one.shards):
                self._starts.append(total)
                rows = one.rows_in(position)
                self._shards.append(_Shard(shard_path(folder, index.rank, number), one, rows))
                total += rows
        self._total = total

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows together."""
        return torch.Size((self._total, *self._row))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""
        return self._kind.torch

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return sum(shard.rows * shard.series.row_bytes for shard in self._shards)

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, key: Key | EllipsisType | tuple[Any, ...]) -> Tensor:
        if type(key) is int:
            if not -self._total <= key < self._total:
                raise _outside(self.place, key, self._total)
            key = key + self._total if key < 0 else key
            at = bisect_right(self._starts, key) - 1
            return self._tensor(self._shards[at].array[key - self._starts[at], ...].copy())
        if key is ...:
            return self[:]
        if isinstance(key, tuple):
            first, *others = key or (slice(None),)
            rows = self[first]
            if first is ...:
                return rows[key]
            if isinstance(first, slice):
                return rows[(slice(None), *others)]
            chosen = rows.ndim - len(self._row)  # dimensions that the first index has left
            if chosen and not all(isinstance(one, _PLAIN) for one in others):
                # Lists beside lists are pairs of positions, as in rows[[0, 1], [4, 5]].
                shape = rows.shape[:chosen]
                count = torch.arange(shape.numel(), device="cpu").reshape(shape)
                return rows.flatten(0, chosen - 1)[(count, *others)]
            return rows[(*[slice(None)] * chosen, *others)]
        if isinstance(key, slice):
            start, stop, step = key.indices(self._total)
            if step == 1:
                return self._tensor(self._between(start, max(start, stop)))
            return self._tensor(self._gather(np.arange(start, stop, step, dtype=np.int64)))
        positions = positions_of(key, self._total, self.place)
        rows = self._tensor(self._gather(positions.reshape(-1)))
        return rows.reshape((*positions.shape, *self._row))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[position] for position in range(self._total))

    def to_numpy(self) -> NDArray[Any]:
        """Return all rows as one numpy array, in memory; bf16 and 8-bit floats become float32."""
        tensor = self[:]
        exotic = self._kind.name in ("BF16", "F8_E4M3", "F8_E5M2")
        return (tensor.float() if exotic else tensor).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the same for `np.asarray`, which would else read row by row."""
        if copy is False:
            raise ValueError("Rows of a store are copied out of its files: leave out copy=False.")
        return np.asarray(self.to_numpy(), dtype)

    def _between(self, start: int, stop: int) -> NDArray[Any]:
        first = max(bisect_right(self._starts, start) - 1, 0)
        shards = range(first, bisect_left(self._starts, stop))
        if len(shards) == 1:
            base = self._starts[first]
            return self._shards[first].array[start - base : stop - base].copy()
        for at in shards:  # map all rows before memory is allocated for them
            _ = self._shards[at].array
        result = self._empty(stop - start)
        for at in shards:
            base = self._starts[at]
            piece = self._shards[at].array[max(start - base, 0) : stop - base]
            done = max(base - start, 0)
            result[done : done + len(piece)] = piece
        return result

    def _gather(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        if not len(positions):
            return self._empty(0)
        owners = np.searchsorted(self._starts, positions, side="right") - 1
        if owners.min() == owners.max():
            at = int(owners[0])
            return self._shards[at].array[positions - self._starts[at]]
        result = self._empty(len(positions))
        for at in np.unique(owners).tolist():
            mine = owners == at
            result[mine] = self._shards[at].array[positions[mine] - self._starts[at]]
        return result

    def let_go(self) -> None:
        """Map and check the files again at the next read.

        Reading from the map of a file that was cut off meanwhile would end the process.
        """
        for shard in self._shards:
            shard._array = None

    def _empty(self, rows: int) -> NDArray[Any]:
        return np.empty((rows, *self._row), self._kind.numpy)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        if not array.size:  # numpy's strides of nothing are none that torch can view
            return torch.empty(array.shape, dtype=self._kind.torch, device="cpu")
        tensor = torch.from_numpy(array)
        if self._kind.name == "BOOL":
            return tensor != 0  # a byte that is neither 0 nor 1 is no boolean
        return tensor if tensor.dtype == self._kind.torch else tensor.view(self._kind.torch)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"StoredRows({self.place!r}, {tuple(self.shape)} {dtype})"


class StoredSamples:
    """Samples of varying length: `samples[7]` is a tensor, `samples[10:20]` a list of tensors.

    Further indices apply to each sample: `samples[7, 0]` is its first row. `samples.rows` are the
    rows of all samples behind each other, `samples.lengths()` how many of them each sample has.
    """

    def __init__(self, rows: StoredRows, ends: StoredRows, ranks: list[tuple[int, int]]) -> None:
        self.rows = rows
        self.place = rows.place
        self._ends = ends
        self._first_sample: list[int] = []  # of each rank that has samples
        self._first_row: list[int] = []
        samples = base = 0
        for of_rank, rows_of_rank in ranks:
            if of_rank:
                self._first_sample.append(samples)
                self._first_row.append(base)
            samples, base = samples + of_rank, base + rows_of_rank
        self._first_row.append(base)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is read."""
        return self.rows.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, without the offsets."""
        return self.rows.nbytes

    def let_go(self) -> None:
        """Map and check the files again at the next read."""
        self.rows.let_go()
        self._ends.let_go()

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, key: int) -> Tensor: ...
    @overload
    def __getitem__(self, key: tuple[Any, ...]) -> Any: ...
    @overload
    def __getitem__(self, key: slice | Sequence[Any] | Tensor | NDArray[Any]) -> list[Tensor]: ...
    def __getitem__(self, key: Key | tuple[Any, ...]) -> Any:
        total = len(self)
        if isinstance(key, tuple):
            first, *others = cast("tuple[Any, ...]", key) or (slice(None),)
            chosen: Tensor | list[Tensor] = cast("Any", self)[first]
            if isinstance(chosen, Tensor):
                return chosen[tuple(others)]
            return [one[tuple(others)] for one in chosen]
        if type(key) is int:
            if not -total <= key < total:
                raise _outside(self.place, key, total)
            return self._read(key % total)
        if isinstance(key, slice):
            return [self._read(position) for position in range(*key.indices(total))]
        positions = positions_of(cast("Any", key), total, self.place)
        if positions.ndim == 0:
            return self._read(int(positions))
        return [self._read(position) for position in positions.reshape(-1).tolist()]

    def __iter__(self) -> Iterator[Tensor]:
        return (self._read(position) for position in range(len(self)))

    def lengths(self) -> Tensor:
        """Return how many rows each sample has."""
        ends = self._ends[:]
        starts = torch.zeros_like(ends)
        starts[1:] = ends[:-1]
        starts[self._first_sample] = 0
        lengths = ends - starts
        if len(lengths) and lengths.min() < 0:
            sample = int(lengths.argmin())
            raise self._changed(sample, int(starts[sample]), int(ends[sample]))
        return lengths

    def to_numpy(self) -> list[NDArray[Any]]:
        """Return each sample as a numpy array; bf16 and 8-bit floats become float32."""
        rows = self.rows.to_numpy()
        return np.split(rows, np.cumsum(self.lengths().numpy())[:-1]) if len(self) else []

    def _read(self, sample: int) -> Tensor:
        rank = bisect_right(self._first_sample, sample) - 1
        base, following = self._first_row[rank], self._first_row[rank + 1]
        fresh = sample == self._first_sample[rank]
        start = 0 if fresh else int(self._ends[sample - 1])
        end = int(self._ends[sample])
        if not 0 <= start <= end <= following - base:
            raise self._changed(sample, start, end)
        return self.rows[base + start : base + end]

    def _changed(self, sample: int, start: int, end: int) -> StoreError:
        return StoreError(
            f"Cannot read sample {sample} of {self.place!r}.",
            f"Its offsets say rows {start} to {end}, of {len(self.rows)} in all.",
            "The offsets were changed: restore the store from a copy.",
        )

    def __repr__(self) -> str:
        row = ", ".join(["varying", *map(str, self.rows.shape[1:])])
        dtype = str(self.dtype).removeprefix("torch.")
        return f"StoredSamples({self.place!r}, {len(self)} × ({row}) {dtype})"


def positions_of(key: Any, total: int, place: str) -> NDArray[np.int64]:
    """Return the positions that a list, mask or tensor names; raise if one is outside."""
    if isinstance(key, Tensor) and key.dtype == torch.uint8:
        raise StoreError(
            f"Cannot read {place!r} with a tensor of uint8.",
            "For torch that is a mask, for numpy these are positions.",
            "Make it a mask with .bool(), or positions with .long().",
        )
    array = np.asarray(key.cpu() if isinstance(key, Tensor) else key)
    if array.dtype == np.bool_:
        if array.shape != (total,):
            raise StoreError(
                f"Cannot read {place!r} with a mask of shape {array.shape}.",
                f"There are {total}.",
                "Give one boolean for each of them.",
            )
        return np.flatnonzero(array)
    if array.size == 0:
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise StoreError(
            f"Cannot read {place!r} at {str(key)[:80]}.",
            f"That is {array.dtype}.",
            "Use integers, slices, booleans, or lists and tensors of them.",
        )
    low, high = int(array.min()), int(array.max())
    if low < -total or high >= total:
        raise _outside(place, high if high >= total else low, total)
    positions = array.astype(np.int64)
    return np.where(positions < 0, positions + total, positions)


class _Outside(StoreError, IndexError):
    """A position past the end; it is also an IndexError, which ends a loop."""


def _outside(place: str, position: int, total: int) -> StoreError:
    return _Outside(
        f"Cannot read {place!r} at {position}.",
        f"There are {total}.",
        f"Use positions from {-total} to {total - 1}." if total else "The store is empty.",
    )
