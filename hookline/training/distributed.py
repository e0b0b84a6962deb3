"""The ranks of a training, and the measurements of all of them together.

- `current_rank()`, `world_size()`: the number of this process, and how many there are
- `gather_ranks(step)`: combine the measurements of all ranks in a step
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
    """Return the number of this process; 0 without torch.distributed.

    >>> current_rank(), world_size()
    (0, 1)
    """
    return distributed.get_rank() if _running() else 0


def world_size() -> int:
    """Return the number of processes that train together."""
    return distributed.get_world_size() if _running() else 1


def gather_ranks(measurement: StepMeasurement) -> None:
    """Combine the measurements of all ranks; every rank must call this.

    Outputs and gradients are those of all batches. Sharded parameters are combined; of parameters
    that every rank has whole, those of this rank are used.
    """
    if world_size() == 1:
        return
    own = {n: found for n, found in measurement.found.items() if _differs(measurement, n)}
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, (own, measurement.squares))
    for number in own:
        measurement.found.pop(number)
        measurement.squares.pop(number, None)
    for theirs, squares in cast("list[tuple[dict[int, Moments], dict[int, float]]]", found):
        for number, one in theirs.items():
            before = measurement.found.get(number)
            measurement.found[number] = one if before is None else before.merged(one)
            if number in squares:
                measurement.squares[number] = measurement.squares.get(number, 0.0) + squares[number]


def _differs(measurement: StepMeasurement, number: int) -> bool:
    """Return True if each rank has a part of its own of a row."""
    if measurement.plan.attributes[number] is None:
        return True
    tensor = measurement.plan.parameter(number)
    spread = None if tensor is None else placements(tensor)
    return any(placement.is_shard() for placement in spread or ())
