"""Read values and gradients at places without changing the model, to measure them.

- `ValueObserver`: calls a function with every value at a place, and changes none
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor

from hookline.core.gradients import NO_GRAD, NO_TENSOR, NONE_CAME
from hookline.core.hooks import Context, HookTap, hook
from hookline.errors import warn_outside
from hookline.places.resolution import Target
from hookline.torch_private import at_backward_end, backward_id
from hookline.values.nested import Path
from hookline.values.snapshots import gradient_snapshot

__all__ = ["ValueObserver"]

_HARMLESS = (NO_GRAD[0], NO_TENSOR[0], NONE_CAME[0])  # reasons of calls that have no gradient


class _ObservingTap(HookTap):
    """Passes on the gradients at a target, and warns once of those that cannot be told apart."""

    # A hook puts an identity before an input: a model may compute something else with it.
    replaces = False
    told = False

    def __init__(self, target: Target, ref: Any, function: Any, wants_call: bool) -> None:
        super().__init__(target, ref, function, wants_call)
        # Of inputs: what has come of each, by backward, call and path.
        self.shares: dict[tuple[int, int, Path], Tensor] = {}

    def gradient(self, grad: Tensor, index: int, path: Path) -> None:
        if self.target.port == "grad_output":
            super().gradient(grad, index, path)
            return
        # The shares of an input come one by one, as the module has used it.
        task = backward_id()
        if not any(key[0] == task for key in self.shares):
            at_backward_end(partial(_end, weakref.ref(self), task))
        key = task, index, path
        held = self.shares.get(key)
        self.shares[key] = gradient_snapshot(grad) if held is None else held + grad

    def end(self, task: int) -> None:
        """End a backward: the shares of its gradients are complete."""
        for key in [key for key in self.shares if key[0] == task]:
            super().gradient(self.shares.pop(key), key[1], key[2])

    def explain(self, index: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        super().explain(index, reason, remedy, path)
        if reason not in _HARMLESS and not self.told:
            self.told = True
            place = str(self.place)
            warn_outside(f"A gradient at {place!r} cannot be measured: {reason} {remedy}")

    def remember(self, entries: Any, index: int, entry: Any) -> None:
        super().remember(entries, index, entry)
        if len(entries) > 64:  # as for an edit: there may be any number of calls
            del entries[next(iter(entries))]


def _end(tap: weakref.ref[_ObservingTap], task: int) -> None:
    """End a backward at a tap if the tap still exists: hooks keep nothing alive."""
    found = tap()
    if found is not None:
        found.end(task)


class ValueObserver(hook):
    """Calls a function with every value at a place, and changes none."""

    _verb = "measure"

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> HookTap:
        if target.port.startswith("grad_"):
            return _ObservingTap(target, ref, self._function, self._wants_call)
        return super()._tap(target, ref)

    @property
    def told(self) -> set[Any]:
        """The keys of the targets with a warning that something is not measured."""
        taps = self._taps.items()
        return {key for key, tap in taps if isinstance(tap, _ObservingTap) and tap.told}

    def _stop(self) -> None:
        super()._stop()
        for tap in self._taps.values():
            tap.lost()
