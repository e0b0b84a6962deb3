"""The arguments of a call by name, however they were passed.

- `read(module, args, kwargs, target)`: the value at an input port
- `write(module, args, kwargs, target, new)`: the arguments with something else there
- `bind(module, args, kwargs)`: all arguments by name
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.core.nested import Part, get_part, set_part
from hookline.core.places import Target

__all__ = ["bind", "read", "write"]

_names: dict[Any, tuple[str, ...]] = {}  # by forward function: a type's, or an instance's own


def _positional(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that a module's forward takes by position."""
    forward: Callable[..., Any] = module.__dict__.get("forward") or type(module).forward
    try:
        return _names[forward]
    except (KeyError, TypeError):
        pass
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
    if "forward" not in module.__dict__:  # an instance's own forward is not kept alive here
        _names[forward] = names
    return names


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Part, Any]:
    """All arguments by name, as they were passed; what `*args` takes is keyed by position.

    >>> bind(nn.Linear(1, 1), (7,), {})
    {'input': 7}
    """
    names = _positional(module)
    bound: dict[Part, Any] = dict(zip(names, args, strict=False))
    for position in range(len(names), len(args)):
        bound[position] = args[position]
    bound.update(kwargs)
    return bound


def _first(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """The name of the first argument of a call without positional ones."""
    for name in _positional(module):
        if name in kwargs:
            return name
    for name in kwargs:
        return name
    raise LookupError("the module was called without arguments")


def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> Any:
    """The value at an input port; LookupError if the call has none."""
    if target.port in ("inputs", "grad_inputs"):
        value: Any = bind(module, args, kwargs)
    elif args:
        value = args[0]
    else:
        value = kwargs[_first(module, kwargs)]
    return get_part(value, target.parts) if target.parts else value


def write(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with something else at an input port, passed as they were."""
    parts = target.parts
    if target.port in ("inputs", "grad_inputs"):
        bound: dict[Part, Any] = set_part(bind(module, args, kwargs), parts, new)
        names = (*_positional(module)[: len(args)], *range(len(_positional(module)), len(args)))
        passed = set(names)  # what is new, or was passed by name, is passed by name
        named = {str(name): value for name, value in bound.items() if name not in passed}
        return tuple(bound[name] for name in names), named
    if args:
        return (set_part(args[0], parts, new), *args[1:]), kwargs
    name = _first(module, kwargs)
    return args, {**kwargs, name: set_part(kwargs[name], parts, new)}
