"""Data for harvests, and checks of their results."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import bits
from torch import Tensor

import hookline as hl

# The lengths of texts: one of them is empty.
LENGTHS = [3, 1, 5, 2, 4, 4, 0, 6, 2]


def texts(lengths: list[int], sizes: int = 4) -> list[dict[str, Tensor]]:
    """Return batches of padded sequences, each as long as its longest one."""
    torch.manual_seed(2)
    batches = []
    for start in range(0, len(lengths), sizes):
        own = lengths[start : start + sizes]
        mask = torch.arange(max(own))[None] < torch.tensor(own)[:, None]
        tokens = torch.randint(1, 20, mask.shape) * mask
        batches.append({"tokens": tokens, "attention_mask": mask.long()})
    return batches


class Stopped(Exception):
    """Raised by data to end a harvest."""


def failing_after(batches: Iterable[Any], after: int) -> Iterator[Any]:
    """Yield some batches, then raise Stopped."""
    for number, batch in enumerate(batches):
        if number == after:
            raise Stopped
        yield batch


def as_function(batches: list[Any]) -> Callable[[int], Iterator[Any]]:
    """Return data as a function of the first batch. It has no length."""
    return lambda first: iter(batches[first:])


def ids_of(batch: Tensor) -> Tensor:
    """Return ids of rows, made of their bits."""
    return batch[:, 0].view(torch.int32)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Make this process one of several ranks, by environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        yield


def assert_rows(store: hl.Store, expected: dict[str, Tensor]) -> None:
    """Check that a store has these rows, bit for bit."""
    for place, rows in expected.items():
        assert store[place].dtype == rows.dtype
        assert store[place].shape == rows.shape
        assert torch.equal(bits(store[place][:]), bits(rows))


def check_mean(folder: Path, store: hl.Store, place: str = "0") -> hl.Measurements:
    """Check the mean that was measured during a harvest against the rows."""
    found = hl.Measurements.load(folder / "statistics")
    rows = store[place].to_numpy().astype("float64")
    np.testing.assert_allclose(found[place]["mean"].numpy(), rows.mean(0), rtol=1e-12, atol=1e-15)
    assert found.statistics[place]["mean"].count.tolist() == [len(rows)] * rows.shape[1]
    return found


def same_stores(store: hl.Store, whole: hl.Store, samples: int) -> None:
    """Check that the first samples of two stores are equal, bit for bit."""
    if not samples:
        return
    assert store.ids == whole.ids[:samples]
    assert torch.equal(bits(store["pool"][:]), bits(whole["pool"][:samples]))
    assert torch.equal(store["mix"].lengths(), whole["mix"].lengths()[:samples])
    rows = int(whole["mix"].lengths()[:samples].sum())
    assert torch.equal(bits(store["mix"].rows[:]), bits(whole["mix"].rows[:rows]))
