"""The arguments of a call by name, however they were passed.

- `read(module, args, kwargs, target)`: the value at an input port
- `write(module, args, kwargs, target, new)`: the arguments with something else there
- `bind(module, args, kwargs)`: all arguments by name
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from hookline.core.nested import Part, get_part, set_part
from hookline.core.places import Target
from hookline.errors import ChangeError

__all__ = ["bind", "read", "write"]

_signatures: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # by a type's forward


def _names(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters of a module's forward: those taken by position, and all that have names."""
    own = "forward" in module.__dict__
    forward = module.__dict__["forward"] if own else type(module).forward
    if not own and forward in _signatures:
        return _signatures[forward]
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = tuple(p.name for p in named if p.kind is not p.KEYWORD_ONLY)
    found = positional, tuple(p.name for p in named)
    if not own:
        _signatures[forward] = found
    return found


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Part, Any]:
    """All arguments by name, as they were passed; what `*args` takes is keyed by position.

    >>> bind(nn.Linear(1, 1), (7,), {})
    {'input': 7}
    """
    keys = _keys(module, args, kwargs)
    return {**dict(zip(keys, args, strict=True)), **kwargs}


def _keys(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Part]:
    names, _ = _names(module)
    return [names[n] if n < len(names) and names[n] not in kwargs else n for n in range(len(args))]


def _first(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """The name of the first argument of a call without positional ones."""
    _, names = _names(module)
    first = names[0] if names else next(iter(kwargs), None)
    if first in kwargs:
        return first
    missing = "without arguments" if not kwargs else f"without its first argument, {first!r}"
    raise LookupError(f"the module was called {missing}")


def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> Any:
    """The value at an input port; LookupError if the call has none."""
    if target.port in ("inputs", "grad_inputs"):
        value: Any = bind(module, args, kwargs)
    else:
        value = args[0] if args else kwargs[_first(module, kwargs)]
    return get_part(value, target.parts) if target.parts else value


def write(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with something else at an input port, passed as they were."""
    parts = target.parts
    if target.port in ("inputs", "grad_inputs"):
        keys = _keys(module, args, kwargs)
        bound = set_part(bind(module, args, kwargs), parts, new)
        missing = [key for key in keys if not isinstance(bound, Mapping) or key not in bound]
        if missing:
            raise ChangeError(
                f"The arguments of a {type(module).__name__} were to be replaced.",
                f"What was given in their place has no {missing[0]!r}.",
                "Return a dict with all arguments by name.",
            )
        bound = cast("Mapping[Part, Any]", bound)
        rest = {str(key): value for key, value in bound.items() if key not in keys}
        return tuple(bound[key] for key in keys), rest
    if args:
        return (set_part(args[0], parts, new), *args[1:]), kwargs
    name = _first(module, kwargs)
    return args, {**kwargs, name: set_part(kwargs[name], parts, new)}
