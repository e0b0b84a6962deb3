"""Call a function with only the arguments that it takes.

- `invoke_with_optional_args(fn, *args, **kwargs)`: the original name
- `Invocation`: the same for many calls of one function, whose signature is read once
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeAlias

from torch import nn

__all__ = ["Invocation", "invoke_with_optional_args"]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

# Which of the given arguments, followed by defaults, go by position and which by name.
_Plan: TypeAlias = tuple[list[int], dict[str, int], list[Any]]


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

    __slots__ = ("_function", "_parameters", "_plans")

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
        self._plans: dict[Any, _Plan] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shape = (len(args), *kwargs)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._arrange(len(args), list(kwargs))
        positional, named, defaults = plan
        given = [*args, *kwargs.values(), *defaults]
        return self._function(
            *[given[n] for n in positional], **{name: given[n] for name, n in named.items()}
        )

    def _arrange(self, count: int, names: list[str]) -> _Plan:
        """Return where each argument goes, for so many by position and these by name."""
        parameters = self._parameters
        places = {name: count + n for n, name in enumerate(names)}
        by_name = [p.name for p in parameters if p.kind in _BY_NAME and p.name in places]
        named = {name: places.pop(name) for name in by_name}
        left: list[tuple[str | None, int]] = [*((None, n) for n in range(count)), *places.items()]
        positional: list[int] = []
        defaults: list[Any] = []
        missing: list[str] = []
        for p in parameters:
            if p.kind in _BY_POSITION:
                if p.name in named:
                    positional.append(named.pop(p.name))
                elif left:
                    positional.append(left.pop(0)[1])
                else:
                    positional.append(count + len(names) + len(defaults))
                    defaults.append(p.default)
                    missing += [p.name] if p.default is p.empty else []
            elif p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in named:
                missing.append(p.name)
            elif p.kind is p.VAR_KEYWORD:
                named |= {name: n for name, n in left if name is not None}
                left = [(name, n) for name, n in left if name is None]
        if missing:
            name = getattr(self._function, "__name__", repr(self._function))
            given = ", ".join([*map(str, range(count)), *names]) or "nothing"
            raise TypeError(
                f"{name} was to be called. It requires {', '.join(missing)}, beyond what it can "
                f"be given ({given}). Give its other parameters a default, or bind them before."
            )
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            positional += [n for _, n in left]
        return positional, named, defaults
