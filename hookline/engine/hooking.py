"""The verb `hook`: call a function with every value at a place.

- `hook(model, where, function)`: call a function with every value at a place
- `HookHandler`: what it does at one place
- `takes_call(function)`: whether a function asks for the `Call`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookline.engine.asks import Ask
from hookline.engine.calls import Call, RunningCall
from hookline.engine.context import Context
from hookline.engine.handlers import UNCHANGED, Handler, add_place
from hookline.errors import PlaceError
from hookline.places.resolution import Where

__all__ = ["HookHandler", "hook", "takes_call"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes_call(function: Callable[..., Any]) -> bool:
    """Return True if a function asks for the Call, by a second required positional parameter.

    One with a third, as torch's own hooks have, is refused.

    >>> import torch
    >>> takes_call(lambda value, call: value), takes_call(torch.relu), takes_call(print)
    (True, False, False)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return False
    required = [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty]
    if len(required) > 2:
        raise TypeError(
            f"{function!r} was given to be called at places. It needs {len(required)} arguments, "
            f"as torch's own hooks do. Let it take the value, or (value, call), with call.module."
        )
    return len(required) == 2


class HookHandler(Handler):
    """Call a function with the values at a place."""

    def __init__(self, function: Any, wants_call: bool, *place: Any) -> None:
        super().__init__(*place)
        self.function, self.wants_call = function, wants_call

    def receive(self, value: Any, call: RunningCall) -> Any:
        self.seen += 1
        self.fired += 1
        try:
            if self.wants_call:
                new = self.function(value, Call(self, call))
            else:
                new = self.function(value)
        except BaseException as error:
            add_place(error, self)
            raise
        if new is not None and self.target.port == "value":
            asked = f"A hook at {str(self.place)!r} returned a value:"
            remedy = "Use hookline.edit(model, place, change), which puts it back afterwards."
            raise PlaceError(asked, "a parameter or buffer cannot be replaced by a hook.", remedy)
        return UNCHANGED if new is None else new


class hook(Context):
    """Call a function with every value at a place; its return value replaces the value.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with hook(model, "0", lambda value: print(tuple(value.shape))):
    ...     _ = model(torch.zeros(5, 2))
    (5, 3)

    Args:
        model: any module, or a plain tensor with the place ":grad".
        where: one place, or a list of them; see `select`.
        function: `fn(value) -> None or a new value`, or `fn(value, call)`; with a second required
            parameter it also gets the `Call`. Nothing is checked: what it returns is used. At
            gradient places it is called once per tensor, as the gradients arrive, with a copy.

    It acts inside `with`, or from `.attach()` to `.remove()`.
    """

    _verb = "hook"

    def __init__(
        self,
        model: nn.Module | Tensor,
        where: Where,
        function: Callable[[Any], Any] | Callable[[Any, Call], Any],
    ) -> None:
        self._function, self._wants_call = function, takes_call(function)
        super().__init__(model, (where,))

    def _ask(self, port: str, **place: Any) -> Ask:
        return Ask(port, partial(HookHandler, self._function, self._wants_call), **place)
