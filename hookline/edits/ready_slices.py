"""Ready slices for the `at=` of captures and edits.

- `heads(*which, of=n)`: the columns of some attention heads
- `last_token(mask)`: the last position of each sequence that is not padding
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from hookline.engine.slices import Slice
from hookline.errors import ChangeError
from hookline.values.tables import describe

__all__ = ["heads", "last_token"]


class heads(Slice):
    """The columns of some attention heads, for `at=`.

    >>> from hookline.engine.slices import take
    >>> take(torch.arange(6), heads(1, of=3))
    tensor([2, 3])

    Args:
        which: the heads, from 0.
        of: how many heads the last dimension is split into.
    """

    def __init__(self, *which: int, of: int) -> None:
        try:
            self.which = tuple(map(operator.index, which))
            self.of = operator.index(of)
        except TypeError as error:
            raise TypeError(f"heads{which} of {of}: {error}. Write heads(0, 2, of=4).") from None
        if not self.which or not all(-self.of <= head < self.of for head in self.which):
            found = f"Heads count from 0, and there are {self.of}."
            raise ChangeError(f"{self!r} was asked for.", found, "Write heads(0, 2, of=4).")

    def index(self, value: Tensor) -> Any:
        """Return the index of the heads' columns in the last dimension."""
        width = value.shape[-1] if value.ndim else 0
        if not width or width % self.of:
            found = f"The value has the shape {tuple(value.shape)}."
            remedy = "Give as of= the number of heads, a divisor of the last dimension."
            raise ChangeError(f"{self!r} was asked for.", found, remedy)
        size = width // self.of
        starts = [head % self.of * size for head in self.which]
        if len(starts) == 1:
            return (..., slice(starts[0], starts[0] + size))
        columns = [start + n for start in starts for n in range(size)]
        return (..., torch.tensor(columns, device=value.device))

    def __repr__(self) -> str:
        return f"heads({', '.join(map(str, self.which))}, of={self.of})"


class last_token(Slice):
    """The last position of each sequence that is not padding, for `at=`.

    >>> from hookline.engine.slices import take
    >>> take(torch.tensor([[1, 2, 3], [4, 5, 6]]), last_token(torch.tensor([[1, 1, 0], [1, 1, 1]])))
    tensor([2, 6])

    Args:
        mask: batch × position, nonzero where there is a token; padding on either side.
    """

    needs_full_last_dim = False

    def __init__(self, mask: Tensor) -> None:
        self.mask = torch.as_tensor(mask)

    def index(self, value: Tensor) -> Any:
        """Return the index of each row's last position where the mask is set."""
        mask = self.mask.to(value.device) != 0
        fits = mask.ndim == 2 and mask.shape == value.shape[:2]
        if not fits or not mask.any(1).all():
            asked = f"{self!r} was asked for."
            found = f"The mask has the shape {tuple(mask.shape)}, the value {tuple(value.shape)}."
            found = "The mask is empty for some sequence." if fits else found
            remedy = "It needs the value's first two dimensions, and a token in each sequence."
            raise ChangeError(asked, found, remedy)
        batch, positions = (torch.arange(size, device=value.device) for size in mask.shape)
        return batch, (mask * positions).argmax(1)

    def spelled(self) -> str:
        return "last_token"  # of any mask: sequences of another run end elsewhere

    def __repr__(self) -> str:
        return f"last_token({describe(self.mask)})"
