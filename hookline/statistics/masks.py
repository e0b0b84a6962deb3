"""The masks of values.

- `NamedMask`: reads a mask from an argument of the model at each call, and assigns it to values
- `is_added(mask)`: return True for a mask that is added to scores

A value comes while the model runs, and has the mask of that call. A gradient comes later: it has
the mask of the forward before it, if there was only one or all had the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hookline.errors import StatisticsError
from hookline.places.grammar import Place, is_gradient

__all__ = ["NamedMask", "is_added"]


def is_added(mask: Tensor) -> bool:
    """Return True for a mask that is added to scores: zero for tokens, the opposite of one of ours.

    >>> is_added(torch.tensor([0.0, -torch.inf])), is_added(torch.tensor([1, 0]))
    (True, False)
    """
    return mask.dtype.is_signed and not bool((mask >= 0).all())


class NamedMask:
    """The argument of a model that masks values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mask: Any = None
        self._running: bool | None = None  # the model; None before its first call
        self._mixed = False  # the masks of the forwards since gradients came last
        self._came = True  # gradients, since the last forward

    def begin(self, inputs: Any) -> None:
        """Read the mask from the arguments of the model, before it runs."""
        if not isinstance(inputs, Mapping) or self._name not in inputs:
            names = ", ".join(map(str, cast("Any", inputs) if isinstance(inputs, Mapping) else ()))
            raise StatisticsError(
                f"The mask was to be the model's argument {self._name!r}.",
                f"The call has {names or 'no arguments by name'}.",
                "Name one of these, or give mask= a tensor or a function of the batch.",
            )
        mask = cast("Mapping[str, Any]", inputs)[self._name]
        self._mixed = not self._came and (self._mixed or not _same(mask, self._mask))
        self._mask, self._running, self._came = mask, True, False

    def end(self) -> None:
        """End the call of the model."""
        self._running = False

    def at(self, place: Place) -> Any:
        """Return the mask of the value that is at a place now."""
        late = is_gradient(place.port)
        mixed = late and self._mixed
        if (self._running is not None if late else self._running) and not mixed:
            self._came |= late
            return self._mask
        raise StatisticsError(
            f"The mask at {str(place)!r} was to be the model's argument {self._name!r}.",
            "Forwards with different masks ran before the backward."
            if mixed
            else "The module was called, and the model itself was not.",
            "Run each backward right after its forward, or give mask= a tensor."
            if mixed
            else "Call the whole model, or give mask= a tensor.",
        )


def _same(one: Any, other: Any) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return one is other or (both and torch.equal(one, other))
