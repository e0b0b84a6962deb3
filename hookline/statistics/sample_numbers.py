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

_PARAMETERS = ("value", "grad")  # ports at which rows are no samples


class SampleNumbers:
    """The numbers of the samples of a batch, as far as they are known."""

    def __init__(self) -> None:
        self._next = 0  # the number of the next sample; -1 if nobody knows it
        self._batch: Tensor | None = None
        self._used = False  # whether values have been numbered by batches

    def begin(self, batch: Any) -> None:
        """Number the samples of one more batch; its size is known if its tensors agree in it."""
        sizes = {tensor.size(0) for _, tensor in leaves(batch) if tensor.ndim}
        size = sizes.pop() if len(sizes) == 1 and self._next >= 0 else -1
        if size < 0 and self._used:
            raise StatisticsError(
                "Samples were numbered as they come in the data.",
                f"The tensors of a batch differ in their first size, {_shown(batch)}, "
                "and those of the batches before it agreed.",
                "Give ids=, which says who is who.",
            )
        first, self._next = self._next, self._next + size if size >= 0 else -1
        self._batch = torch.arange(first, first + size, device="cpu") if size >= 0 else None

    def at(self, place: Place, one: Statistic, value: Tensor) -> Tensor | None:
        """Return the numbers of a value's samples, along its first dimension; None to count them.

        The choice never depends on the length of the value. Rows of parameters are no samples, and
        channels in the first dimension mean that there is no batch.
        """
        first = value.ndim > 0 and (one.dim is None or one.dim % value.ndim > 0)
        if (
            self._batch is None
            or not isinstance(one, TopK)
            or not first
            or place.port in _PARAMETERS
        ):
            return None
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


def _shown(batch: Any) -> str:
    """Return the first sizes of the tensors of a batch, each once."""
    sizes = dict.fromkeys(tensor.size(0) for _, tensor in leaves(batch) if tensor.ndim)
    return " and ".join(str(n) for n in sizes)
