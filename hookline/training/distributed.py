"""The ranks of a training: which one this is, and what all of them have measured.

- `current_rank()`, `world_size()`: the number of this process, and how many there are
- `gather_ranks(looking)`: put together what all ranks have measured in a step
"""

from __future__ import annotations

from typing import Any, cast

from torch import distributed

from hookline.training.step_measurement import StepMeasurement
from hookline.training.tensor_moments import Moments
from hookline.values.sharding import placements

__all__ = ["current_rank", "gather_ranks", "world_size"]


def _running() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def current_rank() -> int:
    """The number of this process; 0 if it is alone.

    >>> current_rank(), world_size()
    (0, 1)
    """
    return distributed.get_rank() if _running() else 0


def world_size() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if _running() else 1


def gather_ranks(looking: StepMeasurement) -> None:
    """Put together what all ranks have measured; every rank must call this.

    Outputs and gradients are those of all batches; parameters in shards are put together, those
    that every rank has whole are this rank's.
    """
    if world_size() == 1:
        return
    own = {n: found for n, found in looking.found.items() if _differs(looking, n)}
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, (own, looking.squares))
    for number in own:
        looking.found.pop(number)
        looking.squares.pop(number, None)
    for theirs, squares in cast("list[tuple[dict[int, Moments], dict[int, float]]]", found):
        for number, one in theirs.items():
            before = looking.found.get(number)
            looking.found[number] = one if before is None else before.merged(one)
            if number in squares:
                looking.squares[number] = looking.squares.get(number, 0.0) + squares[number]


def _differs(looking: StepMeasurement, number: int) -> bool:
    """Whether each rank has something of its own in a row."""
    if looking.plan.attributes[number] is None:
        return True
    tensor = looking.plan.parameter(number)
    spread = None if tensor is None else placements(tensor)
    return any(placement.is_shard() for placement in spread or ())
