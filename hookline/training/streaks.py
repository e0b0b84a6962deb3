"""Conditions that last over several measured steps.

- `DeadUnits`: the units of a layer that have been zero, and for how many values
- `Streaks`: the rows with a finding, and at how many steps in a row
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["DeadUnits", "Streaks"]

_LASTING = 0.98  # of the units that were zero for half of the values


class DeadUnits:
    """The units of one layer that were zero at all steps so far.

    >>> import torch
    >>> dead = DeadUnits(torch.tensor([True, True, False]), 100)
    >>> dead.go_on(torch.tensor([True, False, True]), 100, 0.3)
    >>> dead.mask, dead.values, dead.steps, dead.lasts
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
        """The share of the units that are dead."""
        return self._count() / len(self.mask)

    def go_on(self, mask: Tensor, values: float, least: float) -> None:
        """Add a step with so many values a unit; start over if less than a share is left."""
        both = self.mask & mask if self.mask.shape == mask.shape else None
        if both is None or both.float().mean() < least:
            self.__init__(mask, values)
            return
        self.mask, self.values, self.steps = both, self.values + values, self.steps + 1
        before, at = self._half
        if self.values >= 2 * at:
            self.lasts = self._count() >= _LASTING * before
            self._half = self._count(), self.values


class Streaks:
    """The rows with a finding, since when, and at how many measured steps in a row.

    >>> streaks = Streaks(least=2, span=4)
    >>> [streaks.go_on(step, {7}, [7, 8]) for step in range(4)]
    [[], [], [], [7]]
    """

    def __init__(self, least: int, span: int) -> None:
        self._least, self._span = least, span  # measured steps, and steps
        self._rows: dict[int, tuple[int, int]] = {}  # how many so far, and the first step

    def go_on(self, step: int, found: set[int], among: Iterable[int]) -> list[int]:
        """Add a measured step; return the rows, of those that were checked, where it has lasted."""
        for row in among:
            count, first = self._rows.get(row, (0, step))
            self._rows[row] = (count + 1, first if count else step) if row in found else (0, step)
        least, last = self._least, step - self._span + 1
        return [n for n in sorted(found) if self._rows[n][0] >= least and self._rows[n][1] <= last]
