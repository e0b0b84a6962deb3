"""The `at=` of captures and edits: a slice of a tensor.

- `take(value, at)`: the slice
- `put(value, at, change)`: the same value with the slice changed
- `check_at(at, target)`: whether a slice makes sense at a place
- `heads(*which, of=n)`: the columns of some attention heads
- `last_token(mask)`: the last position of each sequence that is not padding
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hookline.core.distributed import alike, beside, layouts, whole
from hookline.core.nested import only_tensor, set_part
from hookline.core.places import Target
from hookline.errors import ChangeError

__all__ = ["check_at", "heads", "last_token", "put", "take"]


class heads:
    """The columns of some attention heads, for `at=`.

    >>> take(torch.arange(6), heads(1, of=3))
    tensor([2, 3])

    Args:
        which: the heads, from 0.
        of: how many heads the last dimension is split into.
    """

    def __init__(self, *which: int, of: int) -> None:
        self.which, self.of = which, of

    def index(self, value: Tensor) -> Any:
        """The index of the heads' columns in the last dimension."""
        which, of, width = self.which, self.of, value.shape[-1] if value.ndim else 0
        if not which or not all(-of <= head < of for head in which) or not width or width % of:
            raise ChangeError(
                f"{self!r} was asked for.",
                f"The value has the shape {tuple(value.shape)}; heads count from 0.",
                "Give some of the model's heads, and their number, a divisor of the width, as of=.",
            )
        size = width // of
        starts = [head % of * size for head in which]
        if len(starts) == 1:
            return (..., slice(starts[0], starts[0] + size))
        return (..., torch.tensor([start + n for start in starts for n in range(size)]))

    def __repr__(self) -> str:
        return f"heads({', '.join(map(str, self.which))}, of={self.of})"


class last_token:
    """The last position of each sequence that is not padding, for `at=`.

    >>> take(torch.tensor([[1, 2, 3], [4, 5, 6]]), last_token(torch.tensor([[1, 1, 0], [1, 1, 1]])))
    tensor([2, 6])

    Args:
        mask: batch × position, nonzero where there is a token; padding on either side.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def index(self, value: Tensor) -> Any:
        """The index of each row's last position where the mask is set."""
        mask = self.mask.to(value.device) != 0
        fits = mask.ndim == 2 and mask.shape == value.shape[:2]
        if not fits or not mask.any(1).all():
            shape = f"The value has the shape {tuple(value.shape)}."
            raise ChangeError(
                f"last_token was given a mask of shape {tuple(mask.shape)}.",
                "The mask is empty for some sequence." if fits else shape,
                "It needs the value's first two dimensions, and a token in each sequence.",
            )
        batch, positions = (torch.arange(size, device=value.device) for size in mask.shape)
        return batch, (mask * positions).argmax(1)


def check_at(at: Any, target: Target) -> None:
    """Refuse heads of a value that is only this rank's part: they are counted over the whole."""
    for planned in layouts(target) if isinstance(at, heads) else ():
        if any(getattr(placement, "dim", 0) not in (0, 1) for placement in planned or ()):
            raise ChangeError(
                f"{at!r} was asked for at {str(target.place)!r}.",
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
    at = at.index(tensor) if isinstance(at, (heads, last_token)) else at
    if type(tensor) is Tensor:
        return at
    steps = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    return tuple(beside(step, tensor) if isinstance(step, Tensor) else step for step in steps)
