"""The ranks of a training: which one this is, and what all of them have measured.

- `rank_of()`, `ranks_in()`: the number of this process, and how many there are
- `gathered(looking)`: put together what all ranks have measured in a step
"""

from __future__ import annotations

from typing import Any, cast

from torch import distributed

from hookline.training.looking import Looking
from hookline.training.moments import Moments
from hookline.values.sharding import placements

__all__ = ["gathered", "rank_of", "ranks_in"]


def _running() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_of() -> int:
    """The number of this process; 0 if it is alone.

    >>> rank_of(), ranks_in()
    (0, 1)
    """
    return distributed.get_rank() if _running() else 0


def ranks_in() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if _running() else 1


def gathered(looking: Looking) -> None:
    """Put together what all ranks have measured; every rank must call this.

    Outputs and gradients are those of all batches; parameters in shards are put together, those
    that every rank has whole are this rank's.
    """
    if ranks_in() == 1:
        return
    own = {n: found for n, found in looking.found.items() if _differs(looking, n)}
    found: list[Any] = [None] * ranks_in()
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


def _differs(looking: Looking, number: int) -> bool:
    """Whether each rank has something of its own in a row."""
    if looking.plan.attributes[number] is None:
        return True
    tensor = looking.plan.parameter(number)
    spread = None if tensor is None else placements(tensor)
    return any(placement.is_shard() for placement in spread or ())
