"""Call a function with the value of each named layer.

- `Callbacks(module, layers, callback, backward=…)`: in forward and, where asked, in backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from torch import nn

from hookline.compat.nethook.module_names import get_module, place
from hookline.compat.nethook.optional_arguments import Invocation
from hookline.engine.calls import Call
from hookline.engine.hooking import hook

__all__ = ["Callbacks"]


class Callbacks:
    """Call a function with the value of each named layer while a `with` block runs.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> def show(value, layer):
    ...     print(layer, tuple(value.shape))
    >>> with Callbacks(net, ["0", "2"], show, backward=True):
    ...     net(torch.zeros(5, 2)).sum().backward()
    0 (5, 3)
    2 (5, 1)
    2 (5, 1)
    0 (5, 3)

    Args:
        module: any module.
        layers: the names of modules in it, or one name.
        callback: a function of (output), of (output, layer), or of either by name, called after
            each call of a layer; or None.
        backward: the same of (grad) or (grad, layer), called with a copy of the gradient at each
            layer's output, once for each tensor of it; True calls `callback` there, too.

    What the functions return is ignored: nothing is changed. A layer where nothing happened is an
    error at the end of the `with`. To change values, use `TraceDict(edit_output=…)`.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Iterable[str],
        callback: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | bool = False,
    ) -> None:
        names = dict.fromkeys([layers] if isinstance(layers, str) else layers)
        self._module = module
        self._names: dict[int, list[str]] = {}
        for name in names:
            self._names.setdefault(id(get_module(module, name)), []).append(name)
        self._forward = None if callback is None else Invocation(callback)
        gradients = callback if backward is True else backward or None
        self._backward = None if gradients is None else Invocation(gradients)
        if self._forward is None and self._backward is None:
            raise TypeError(
                "Callbacks was given no function. Nothing would be called. Give a function of the "
                "value as `callback`, one of the gradient as `backward`, or both."
            )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        names = [name for aliases in self._names.values() for name in aliases]
        asked = ((self._forward, "output", "output"), (self._backward, "grad", "grad_output"))
        with ExitStack() as stack:
            for function, word, port in asked:
                if function is not None:
                    places = [place(name, port) for name in names]
                    call = partial(_call, function, word, self._names)
                    stack.enter_context(hook(self._module, places, call))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _call(
    function: Invocation, word: str, names: dict[int, list[str]], value: Any, call: Call
) -> None:
    for layer in names[id(call.module)] if not call.recomputed else ():
        function(**{word: value, "layer": layer})
