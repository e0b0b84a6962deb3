"""Which units of a layer have been zero, and for how many values.

- `Silence`: what is known of the units of one layer, over some measured steps
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["Silence"]

_LASTING = 0.98  # of the units that were zero for half of the values


class Silence:
    """The units of one layer that were zero at all steps so far.

    >>> import torch
    >>> silence = Silence(torch.tensor([True, True, False]), 100)
    >>> silence.go_on(torch.tensor([True, False, True]), 100, 0.3)
    >>> silence.mask, silence.values, silence.steps, silence.lasts
    (tensor([ True, False, False]), 200, 2, False)

    A unit that is only rarely active, as in a sparse autoencoder, is zero for many values, too: it
    `lasts` if of those that were zero for half of the values few have come to life since.
    """

    def __init__(self, mask: Tensor, values: float) -> None:
        self.mask, self.values, self.steps = mask, values, 1
        self.lasts = False
        self._half = self._count(), values

    def _count(self) -> int:
        return int(self.mask.sum())

    @property
    def share(self) -> float:
        """Of the units."""
        return self._count() / len(self.mask)

    def go_on(self, mask: Tensor, values: float, least: float) -> None:
        """A step with so many values a unit; if less than a share is left, it begins anew."""
        both = self.mask & mask if self.mask.shape == mask.shape else None
        if both is None or both.float().mean() < least:
            self.__init__(mask, values)
            return
        self.mask, self.values, self.steps = both, self.values + values, self.steps + 1
        before, at = self._half
        if self.values >= 2 * at:
            self.lasts = self._count() >= _LASTING * before
            self._half = self._count(), self.values
