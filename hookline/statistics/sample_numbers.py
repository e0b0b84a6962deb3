"""Number the samples of the data, if the caller gives no ids.

- `SampleNumbers`: numbers the samples of batch after batch

Counting the values at a place would be wrong if a module is called several times for a batch, or
not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.errors import StatisticsError
from hookline.places.grammar import Place
from hookline.statistics.all_statistics import Statistic, TopK
from hookline.values.nested import leaves

__all__ = ["SampleNumbers"]


class SampleNumbers:
    """The numbers of the samples of a batch, as far as they are known."""

    def __init__(self) -> None:
        self._next = 0  # the number of the next sample; -1 if nobody knows it
        self._batch: Tensor | None = None
        self._used = False  # True once values were numbered by batches

    def begin(self, batch: Any) -> None:
        """Number the samples of one more batch; its size is known if its tensors agree in it."""
        sizes = dict.fromkeys(tensor.size(0) for _, tensor in leaves(batch) if tensor.ndim)
        size = next(iter(sizes)) if len(sizes) == 1 and self._next >= 0 else -1
        if size < 0 and self._used:
            raise StatisticsError(
                "Samples were numbered as they come in the data.",
                "The tensors of a batch differ in their first size, "
                f"{' and '.join(map(str, sizes))}, and those of the batches before it agreed.",
                "Give ids=, which says who is who.",
            )
        first, self._next = self._next, self._next + size if size >= 0 else -1
        self._batch = torch.arange(first, first + size, device="cpu") if size >= 0 else None

    def at(self, place: Place, one: Statistic, value: Tensor) -> Tensor | None:
        """Return the numbers of a value's samples, along its first dimension; None to count them.

        The choice never depends on the length of the value.
        """
        if self._batch is None or not isinstance(one, TopK) or place.port in ("value", "grad"):
            return None  # rows of parameters are no samples
        if value.ndim == 0 or (one.dim is not None and one.dim % value.ndim == 0):
            return None  # channels in the first dimension: there is no batch
        if len(self._batch) != value.size(0):
            raise StatisticsError(
                f"The samples at {str(place)!r} were to be numbered as they come in the data.",
                f"The value has the shape {tuple(value.shape)}, and the batch {len(self._batch)} "
                "samples: its first dimension does not hold these.",
                "Bring the samples to the front with at=, or give ids=; inside a `with`, rows are "
                "counted as they come.",
            )
        self._used = True
        return self._batch
