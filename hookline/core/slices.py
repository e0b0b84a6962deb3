"""The `at=` of captures and edits: a slice of a tensor.

- `take(value, at)`: the slice
- `put(value, at, change)`: the same value with the slice changed
- `check_at(at, target)`: whether a slice makes sense at a place
- `heads(*which, of=n)`: the columns of some attention heads
- `last_token(mask)`: the last position of each sequence that is not padding
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hookline.core.distributed import alike, beside, layouts, whole
from hookline.core.nested import only_tensor, set_part
from hookline.core.places import Target
from hookline.errors import ChangeError

__all__ = ["Heads", "LastToken", "check_at", "heads", "last_token", "put", "take"]


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The columns of some attention heads; made by `heads`."""

    which: tuple[int, ...]
    of: int

    def index(self, value: Tensor) -> Any:
        """The index of the heads' columns in the last dimension."""
        width = value.shape[-1] if value.ndim else 0
        if not width or width % self.of:
            raise ChangeError(
                f"heads{self.which} of {self.of} were asked for.",
                f"The value has the shape {tuple(value.shape)}: its last dimension is no multiple "
                f"of the number of heads.",
                "Give the model's number of heads as of=.",
            )
        size = width // self.of
        first = [head % self.of * size for head in self.which]
        if len(first) == 1:
            return (..., slice(first[0], first[0] + size))
        return (..., torch.tensor([start + i for start in first for i in range(size)]))


@dataclass(frozen=True, slots=True, eq=False)
class LastToken:
    """The last position of each sequence that is not padding; made by `last_token`."""

    mask: Tensor

    def index(self, value: Tensor) -> Any:
        """The index of each row's last position where the mask is set."""
        mask = self.mask.to(value.device)
        if mask.ndim != 2 or value.ndim < 2 or mask.shape != value.shape[:2]:
            raise ChangeError(
                f"last_token was given a mask of shape {tuple(mask.shape)}.",
                f"The value has the shape {tuple(value.shape)}.",
                "The mask needs the value's first two dimensions, batch and position.",
            )
        set_ = mask.bool()
        if not set_.any(1).all():
            raise ChangeError(
                "last_token was asked for the last position of each sequence.",
                "The mask is empty for some sequence.",
                "Leave such sequences out of the batch.",
            )
        positions = torch.arange(mask.shape[1], device=value.device)
        last = (set_ * positions).argmax(1)
        return torch.arange(mask.shape[0], device=value.device), last


def heads(*which: int, of: int) -> Heads:
    """The columns of some attention heads, for `at=`.

    >>> take(torch.arange(6), heads(1, of=3))
    tensor([2, 3])

    Args:
        which: the heads, from 0.
        of: how many heads the last dimension is split into.
    """
    if of < 1 or not which or not all(-of <= head < of for head in which):
        raise ChangeError(
            f"heads{which} of {of} were asked for.",
            f"There are {of}, and they count from 0.",
            "Give one or more of them, and the model's number of heads as of=.",
        )
    return Heads(which, of)


def last_token(mask: Tensor) -> LastToken:
    """The last position of each sequence that is not padding, for `at=`.

    >>> take(torch.tensor([[1, 2, 3], [4, 5, 6]]), last_token(torch.tensor([[1, 1, 0], [1, 1, 1]])))
    tensor([2, 6])

    Args:
        mask: batch × position, nonzero where there is a token; padding on either side.
    """
    return LastToken(mask)


def check_at(at: Any, target: Target) -> None:
    """Refuse heads of a value that is only this rank's part: they are counted over the whole."""
    for planned in layouts(target.module, target.port) if isinstance(at, Heads) else ():
        if any(getattr(placement, "dim", 0) not in (0, 1) for placement in planned or ()):
            raise ChangeError(
                f"heads{at.which} of {at.of} were asked for at {str(target.place)!r}.",
                f"The value there is only this rank's part of it: {planned}.",
                "Give an index into that part, such as np.s_[..., :64].",
            )


def take(value: Any, at: Any) -> Any:
    """The slice of the only tensor in a value, or what a function makes of the value.

    >>> take(torch.arange(6).view(2, 3), (slice(None), -1))
    tensor([2, 5])
    """
    if callable(at):
        return at(value)
    _, tensor = only_tensor(value)
    return tensor[_index(tensor, at)]


def put(value: Any, at: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with the slice of its only tensor changed; the original is left alone.

    >>> put(torch.zeros(3), slice(1), lambda x: x + 5)
    tensor([5., 0., 0.])
    """
    if callable(at):
        raise ChangeError(
            f"An edit was asked for at={at!r}.",
            "A function can only be read from, not written to.",
            "Give an index such as np.s_[:, -1], hookline.heads(...) or hookline.last_token(...).",
        )
    path, tensor = only_tensor(value)
    changed = whole(tensor).clone()
    index = _index(changed, at)
    changed[index] = change(changed[index].clone())
    return set_part(value, path, alike(changed, tensor))


def _index(tensor: Tensor, at: Any) -> Any:
    if isinstance(at, (Heads, LastToken)):
        at = at.index(tensor)
    if type(tensor) is Tensor:
        return at
    steps = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    return tuple(beside(step, tensor) if isinstance(step, Tensor) else step for step in steps)
