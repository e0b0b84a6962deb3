"""Read values and gradients at places without changing the model, to measure them.

- `ValueObserver`: calls a function with every value at a place, and changes none
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor

from hookline.engine.asks import Ask
from hookline.engine.gradients import NO_GRAD, NO_TENSOR, NONE_CAME, NOT_AGAIN
from hookline.engine.hooking import HookHandler, hook
from hookline.errors import warn_outside
from hookline.torch_private import at_backward_end, backward_id
from hookline.values.nested import Path
from hookline.values.snapshots import gradient_snapshot

__all__ = ["ValueObserver"]

# Reasons of calls that have no gradient.
_HARMLESS = (NO_GRAD[0], NO_TENSOR[0], NONE_CAME[0], NOT_AGAIN[0])


class _GradientHandler(HookHandler):
    """Hands on the gradients at a place; a gradient that cannot be told apart is warned of once."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told = False
        # The gradients of inputs so far, by backward, call and path.
        self.shares: dict[tuple[int, int, Path], Tensor] = {}

    def gradient(self, grad: Tensor, number: int, path: Path) -> None:
        if self.target.port == "grad_output":
            super().gradient(grad, number, path)
            return
        # The shares of an input come one by one, as the module has used it.
        task = backward_id()
        if not any(key[0] == task for key in self.shares):
            at_backward_end(partial(_end, weakref.ref(self), task))
        key = task, number, path
        held = self.shares.get(key)
        self.shares[key] = gradient_snapshot(grad) if held is None else held + grad

    def end(self, task: int) -> None:
        """Hand on the summed gradients of a backward that has ended."""
        for key in [key for key in self.shares if key[0] == task]:
            super().gradient(self.shares.pop(key), key[1], key[2])

    def explain(self, number: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        super().explain(number, reason, remedy, path)
        if reason not in _HARMLESS and not self.told:
            self.told = True
            place = str(self.place)
            warn_outside(f"A gradient at {place!r} cannot be measured: {reason} {remedy}")


def _end(handler: weakref.ref[_GradientHandler], task: int) -> None:
    """End a backward at a handler that is still there: hooks keep nothing alive."""
    found = handler()
    if found is not None:
        found.end(task)


class ValueObserver(hook):
    """Calls a function with every value at a place, and changes none."""

    _verb = "measure"

    def _ask(self, port: str, **place: Any) -> Ask:
        if not port.startswith("grad_"):
            return super()._ask(port, **place)
        # A hook puts an identity before an input: a model may compute something else with it.
        make = partial(_GradientHandler, self._function, self._wants_call)
        return Ask(port, make, replaces=False, **place)

    @property
    def told(self) -> set[Any]:
        """The keys of the targets at which a warning has told why something is not measured."""
        handlers = self._tracer.handlers.values()
        told = [one for one in handlers if isinstance(one, _GradientHandler) and one.told]
        return {handler.target.key for handler in told}

    def _stop(self) -> None:
        super()._stop()
        for handler in [*self._tracer.handlers.values()] if self._tracer is not None else ():
            handler.explain_lost()
