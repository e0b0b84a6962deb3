"""Which number in the data a sample has, where the caller names none.

- `Numbers`: numbers the samples of batch after batch

To count what comes at a place would be wrong where a module is called several times for a batch,
or not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.errors import warn_outside
from hookline.statistics.kinds import Statistic, TopK
from hookline.values.nested import leaves

__all__ = ["Numbers"]


class Numbers:
    """The numbers of the samples of a batch, as far as they are known."""

    def __init__(self) -> None:
        self._next = 0  # the number of the next sample; -1 if nobody knows it
        self._batch: Tensor | None = None
        self._numbered: dict[int, bool] = {}  # by statistic, whether its samples have these numbers

    def begin(self, batch: Any) -> None:
        """Number the samples of one more batch: it tells how many if its tensors agree in it."""
        sizes = {tensor.size(0) for _, tensor in leaves(batch) if tensor.ndim}
        size = sizes.pop() if len(sizes) == 1 and self._next >= 0 else -1
        first, self._next = self._next, self._next + size if size >= 0 else -1
        self._batch = torch.arange(first, first + size, device="cpu") if size >= 0 else None

    def at(self, place: Any, one: Statistic, value: Tensor) -> Tensor | None:
        """Those of a value's samples, if these lie along its first dimension; else None."""
        first = value.ndim > 0 and (one.dim is None or one.dim % value.ndim > 0)
        known = first and self._batch is not None and len(self._batch) == value.size(0)
        if self._numbered.setdefault(id(one), known) and not known:
            self._numbered[id(one)] = False
            if isinstance(one, TopK):
                warn_outside(
                    f"The samples at {str(place)!r} were numbered as they come in the data; now a "
                    f"value of shape {tuple(value.shape)} came, whose samples are not those of the "
                    f"batch. From here on they are counted. Give ids=, which says who is who."
                )
        return self._batch if self._numbered[id(one)] else None
