"""The arguments of a call by name, however they were passed.

- `read(module, args, kwargs, ask)`: the value at an input port
- `write(module, args, kwargs, ask, new)`: the arguments with something else there
- `bind(module, args, kwargs)`: all arguments by name
- `locate(module, args, kwargs, ask)`: where among them an input port is
- `names(module)`, `positional_names(module)`: the names of the arguments of a module's forward
"""

# Values of any structure have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import jit, nn, overrides

from hookline.engine.asks import Ask
from hookline.errors import ChangeError
from hookline.places.grammar import NAMED_INPUT_PORTS
from hookline.values.nested import Path, exact_path, get_part, set_part

__all__ = ["bind", "locate", "names", "positional_names", "read", "write"]

_signatures: dict[Any, tuple[list[str], list[str]]] = {}  # by a type's forward


def _names(module: Any) -> tuple[list[str], list[str]]:
    """Return the names of the parameters of a module's forward, or of a torch function.

    First those that are taken by position, then all.
    """
    key = function = module
    if isinstance(module, jit.ScriptModule):  # of one type, and each with a forward of its own
        method: Any = module.forward
        found = [argument.name for argument in method.schema.arguments[1:]]
        return found, found
    if isinstance(module, nn.Module):
        key = None if "forward" in module.__dict__ else type(module).forward
        function = module.forward
    if key is not None and key in _signatures:
        return _signatures[key]
    try:
        # torch's own functions have no signature but that of their stand-in for overriding.
        stand_in = overrides.get_testing_overrides().get(function) if key is function else None
        parameters = [*inspect.signature(stand_in or function).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = [p.name for p in named if p.kind is not p.KEYWORD_ONLY], [p.name for p in named]
    if key is function:
        # Some stand-ins lack the last parameters, which the first line of the docstring has, but of
        # methods without the tensor itself. What begins with `*size` goes by position.
        line = re.match(r"\s*\w+\(([^*].*?)\) ->", function.__doc__ or "", re.DOTALL)
        told = re.findall(r"(?:\A|,)\s*(\w+)", line[1]) if line else []
        told = ["self", *told] if told and hasattr(function, "__objclass__") else told
        if told[: len(found[0])] == found[0]:
            found = told, told
    _signatures[key] = found
    return found


def names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward.

    >>> names(nn.Linear(1, 1))
    ['input']
    """
    return _names(module)[1]


def positional_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments that the forward of a module takes by position."""
    return _names(module)[0]


def bind(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return all arguments by name, as they were passed; what `*args` takes is keyed by position.

    >>> bind(nn.Linear(1, 1), (7,), {})
    {'input': 7}
    """
    return {**dict(zip(_keys(module, args, kwargs), args, strict=True)), **kwargs}


def _keys(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
    names, _ = _names(module)
    return [names[n] if n < len(names) and names[n] not in kwargs else n for n in range(len(args))]


def _first(module: Any, kwargs: dict[str, Any]) -> str:
    """Return the name of the first argument of a call without positional ones."""
    first = next(iter((*_names(module)[1], *kwargs)), None)
    if first in kwargs:
        return first
    missing = f"its first argument, {first!r}" if kwargs else "arguments"
    raise LookupError(f"the module was called without {missing}")


def read(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Ask) -> Any:
    """Return the value at an input port; LookupError if the call has none."""
    if ask.port in NAMED_INPUT_PORTS:
        value: Any = bind(module, args, kwargs)
    else:
        value = args[0] if args else kwargs[_first(module, kwargs)]
    return get_part(value, ask.parts) if ask.parts else value


def locate(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Ask) -> Path:
    """Return the path of the value of an input port in `bind`; LookupError if there is none."""
    if ask.port in NAMED_INPUT_PORTS:
        return exact_path(bind(module, args, kwargs), ask.parts)
    if args:
        return _keys(module, args, kwargs)[0], *exact_path(args[0], ask.parts)
    name = _first(module, kwargs)
    return name, *exact_path(kwargs[name], ask.parts)


def write(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Ask, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with something else at an input port, passed as they were."""
    parts = ask.parts
    if ask.port not in NAMED_INPUT_PORTS:
        if args:
            return (set_part(args[0], parts, new), *args[1:]), kwargs
        name = _first(module, kwargs)
        return args, {**kwargs, name: set_part(kwargs[name], parts, new)}
    keys = _keys(module, args, kwargs)
    bound: Any = set_part(bind(module, args, kwargs), parts, new)
    if not isinstance(bound, Mapping) or not bound.keys() >= set(keys):
        raise ChangeError(
            f"The arguments of a {type(module).__name__} were to be replaced.",
            f"What was given in their place lacks one of {keys}, or is no dict.",
            "Return a dict with all arguments by name.",
        )
    rest = {name: value for name, value in bound.items() if name not in keys}
    return tuple(bound[key] for key in keys), rest
