"""Collect the gradients of a layer, and pass them on at the end of a backward.

- `LayerGradients(model, wheres, save)`: the context that collects them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn

from hookline.compat.torch_tuner.saved_values import Value, first_argument, settled, suffix
from hookline.engine.asks import Ask
from hookline.engine.context import Context
from hookline.engine.gradients import NO_GRAD, NO_TENSOR, NONE_CAME, NOT_AGAIN
from hookline.engine.handlers import Handler
from hookline.errors import warn_outside
from hookline.places.resolution import Target, Where
from hookline.torch_private import at_backward_end, backward_id
from hookline.values.nested import Path

__all__ = ["LayerGradients"]

# Why a call gives no gradient where nobody is to be warned: none flows, or it may still come.
_EXPECTED = [reason for reason, _ in (NO_GRAD, NO_TENSOR, NONE_CAME, NOT_AGAIN)]


class _GradientHandler(Handler):
    """Hands on the gradients of a value as they arrive, each with its path, and changes none."""

    separates = True

    def gradient(self, grad: Tensor, number: int, path: Path) -> None:
        context = cast("LayerGradients | None", self.context)
        if context is not None:
            context.take(self.target, settled(grad), number, path)

    def explain(self, number: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        super().explain(number, reason, remedy, path)
        if reason not in _EXPECTED:
            warn_outside(f"The gradient at {str(self.place)!r} cannot be saved: {reason} {remedy}")


class LayerGradients(Context):
    """Collect the gradients of a layer; pass on those of each call at the end of a backward."""

    _verb = "look"

    def __init__(
        self, model: nn.Module, wheres: Iterable[Where], save: Callable[[list[Value]], None]
    ) -> None:
        super().__init__(model, wheres)
        self._save = save
        self._arrived: dict[int, dict[int, dict[tuple[str, str], Tensor]]] = {}

    def _ask(self, port: str, **place: Any) -> Ask:
        # An identity behind an output tells its gradient from those of other uses. Before an input
        # it would be in the way of modules that change it in place; there the graph is enough,
        # unless one tensor is passed for several arguments.
        return Ask(port, _GradientHandler, replaces=port == "grad_output", **place)

    def take(self, target: Target, grad: Tensor, index: int, path: Path) -> None:
        """Take a gradient, or one share of an input's, for a call of the layer."""
        backward = backward_id()
        if backward not in self._arrived:
            self._arrived[backward] = {}
            at_backward_end(lambda: self._finish(backward))
        if target.port == "grad_output":
            word, first = "grad_output", not any(path)
        else:
            word = "grad_input"
            first = path[0] == first_argument(target.module) and not any(path[1:])
        parts = self._arrived[backward].setdefault(index, {})
        key = word, "" if first else suffix(path)
        parts[key] = parts[key] + grad if key in parts else grad

    def _finish(self, backward: int) -> None:
        for parts in self._arrived.pop(backward, {}).values():
            # The output comes first: it tells the batch size.
            ordered = sorted(parts, key=lambda key: (key[0] != "grad_output", key[1]))
            self._save([(*key, parts[key]) for key in ordered])

    def _stop(self) -> None:
        super()._stop()
        for handler in [*self._tracer.handlers.values()] if self._tracer is not None else ():
            handler.explain_lost()
