"""Prepare values to be saved: plain, detached, each under a name of its own.

- `Value`: the port of a value, the part of it, and itself
- `settled(tensor)`: a tensor that shares nothing
- `after_first(tensor)`: its shape without the batch
- `plain(value, function)`: a nested value in tuples, lists and dicts
- `first_argument(module)`, `arguments_of(word, given, module)`: the arguments of a call
- `suffix(path)`: the end of the file name of a part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import quote

from torch import Tensor, nn

from hookline.engine import arguments
from hookline.values.nested import Part, Path, children

__all__ = ["Value", "after_first", "arguments_of", "first_argument", "plain", "settled", "suffix"]

Value: TypeAlias = tuple[str, str, Any]  # the word for it, which part it is, and itself


def after_first(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor without the batch."""
    return tuple(tensor.shape[1:])


def settled(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, and without the tensor it is a view of."""
    return tensor.detach().clone()


def plain(value: Any, function: Callable[[Tensor], Any], above: tuple[int, ...] = ()) -> Any:
    """Return a value in tuples, lists and dicts, its tensors mapped; other objects become None."""
    if isinstance(value, Tensor):
        return function(value)
    inside = children(value)
    if inside is None or id(value) in above:
        return value if isinstance(value, (bool, int, float, complex, str)) else None
    items = [(part, plain(item, function, (*above, id(value)))) for part, item in inside]
    if isinstance(value, list):
        return [item for _, item in items]
    return tuple(item for _, item in items) if isinstance(value, tuple) else dict(items)


def first_argument(module: nn.Module) -> Part:
    """Return the name of the first argument; a number if the forward takes `*args`."""
    return next(iter(arguments.positional_names(module)), 0)


def arguments_of(word: str, given: dict[Part, Any], module: nn.Module) -> list[Value]:
    """Return the arguments of a call, the first one first."""
    first = first_argument(module)
    found = sorted(given.items(), key=lambda item: item[0] != first)
    return [(word, "" if name == first else suffix((name,)), value) for name, value in found]


def suffix(path: Path) -> str:
    """Return the end of the file name of a part."""
    return "_" + ".".join(quote(str(part), safe="") for part in path)
