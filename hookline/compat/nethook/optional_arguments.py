"""Call a function with only the arguments that it takes.

- `invoke_with_optional_args(fn, *args, **kwargs)`: the original name
- `Invocation`: a function for many such calls, whose signature is read once
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import nn

__all__ = ["Invocation", "invoke_with_optional_args"]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def invoke_with_optional_args(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with those of the given arguments that it takes.

    >>> invoke_with_optional_args(lambda x: x, output=1, layer="fc")
    1
    >>> invoke_with_optional_args(lambda x, layer: (x, layer), output=1, layer="fc")
    (1, 'fc')

    Keyword arguments go to the parameters of that name. What is left goes, in order, to the
    parameters that are left (also to those with a default), then to `**kwargs` and `*args`; the
    rest is dropped. A required parameter that gets nothing is a TypeError. A builtin that does
    not tell its parameters gets the first argument.
    """
    return Invocation(fn)(*args, **kwargs)


class Invocation:
    """A function that is called again and again with those arguments that it takes.

    >>> double = Invocation(lambda x: x * 2)
    >>> double(output=2, layer="fc"), double(output=3, layer="fc")
    (4, 6)
    """

    __slots__ = ("_function", "_parameters")

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(
                f"A function was expected. {function!r} is of type {type(function).__name__}. "
                f"Give a function of the value, or of the value and the layer's name."
            )
        self._function = function
        told = function.forward if isinstance(function, nn.Module) else function
        try:
            self._parameters = list(inspect.signature(told).parameters.values())
        except (TypeError, ValueError):  # builtins such as torch.relu
            self._parameters = [Parameter("value", Parameter.POSITIONAL_ONLY)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by_name = [p.name for p in self._parameters if p.kind in _BY_NAME and p.name in kwargs]
        named = {name: kwargs[name] for name in by_name}
        rest = {name: value for name, value in kwargs.items() if name not in named}
        left: list[tuple[str | None, Any]] = [*((None, value) for value in args), *rest.items()]
        positional: list[Any] = []
        missing: list[str] = []
        for p in self._parameters:
            if p.kind in _BY_POSITION:
                if p.name in named:
                    positional.append(named.pop(p.name))
                elif left:
                    positional.append(left.pop(0)[1])
                else:
                    positional.append(p.default)
                    missing += [p.name] if p.default is p.empty else []
            elif p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in named:
                missing.append(p.name)
            elif p.kind is p.VAR_KEYWORD:
                named |= {name: value for name, value in left if name is not None}
                left = [(name, value) for name, value in left if name is None]
        if missing:
            raise self._refused(missing, [*map(str, range(len(args))), *kwargs])
        if any(p.kind is p.VAR_POSITIONAL for p in self._parameters):
            positional += [value for _, value in left]
        return self._function(*positional, **named)

    def _refused(self, missing: list[str], given: list[str]) -> TypeError:
        name = getattr(self._function, "__name__", repr(self._function))
        return TypeError(
            f"{name} was to be called. It requires {', '.join(missing)}, beyond what it can "
            f"be given ({', '.join(given) or 'nothing'}). Give its other parameters a default, or "
            f"bind them before."
        )
