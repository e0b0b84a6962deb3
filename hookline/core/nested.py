"""Walk and rebuild the structures that modules take and return.

torch's own pytree does not see into subclasses of dict and list, dataclasses or namespaces, so
hookline has its own traversal. A *part* is one step into a structure: a position, a key or an
attribute; a *path* is a tuple of parts.

- `children(value)`: the parts of one container and what stands there, None if it is no container
- `leaves(value)`: every tensor in a structure with its path
- `only_tensor(value)`: the one tensor in a structure with its path, or an error
- `get_part(value, path)`: what stands at a path
- `set_part(value, path, new)`: the same structure with something else at a path
- `map_leaves(function, value)`: the same structure with every leaf mapped
- `show_path(path)`: a path as it is written in a place
"""

# Values of any structure have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import dataclasses
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from hookline.errors import PlaceError, SeveralTensors

__all__ = [
    "Part", "Path", "children", "get_part", "leaves", "map_leaves", "only_tensor", "set_part",
    "show_path",
]  # fmt: skip

Part = int | str
Path = tuple[Part, ...]

_ATOMS = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


def show_path(path: Path) -> str:
    """A path as it is written in a place.

    >>> show_path((1, "mask", "0"))
    "[1][mask]['0']"
    """
    return "".join(f"[{_show_part(part)}]" for part in path)


def _show_part(part: Part) -> str:
    if isinstance(part, int) or (part and not re.search(r"""[\[\]'"\\]|^-?[0-9]+$""", part)):
        return str(part)
    escaped = part.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def children(value: Any) -> list[tuple[Part, Any]] | None:
    """The parts of one container with what stands there; None if the value is no container.

    >>> children({"a": 1, "b": (2, 3)})
    [('a', 1), ('b', (2, 3))]
    >>> children("text") is None
    True
    """
    try:
        return None if isinstance(value, _ATOMS) else _children(value)
    except Exception:  # noqa: BLE001 - an object that cannot be walked is opaque
        return None


def _children(value: Any) -> list[tuple[Part, Any]] | None:
    if isinstance(value, Mapping):
        return [(k if type(k) in (int, str) else str(k), value[k]) for k in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, getattr(value, name)) for name in value._fields]  # pyright: ignore
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, (Distribution, SimpleNamespace)):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    attrs = getattr(type(value), "__attrs_attrs__", None)  # the attrs library, without importing it
    return None if attrs is None else [(a.name, getattr(value, a.name)) for a in attrs]


def leaves(value: Any) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a structure with its path, in order. A structure that holds itself is safe.

    >>> [path for path, _ in leaves((torch.zeros(1), {"h": [torch.zeros(2), None]}))]
    [(0,), (1, 'h', 0)]
    """
    if issubclass(type(value), Tensor):  # isinstance would ask a proxy for its class
        yield (), value
    else:
        yield from _leaves(value, (), ())


def _leaves(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Tensor]]:
    inside = children(value)
    if inside is None or id(value) in above:
        return
    above = (*above, id(value))
    for part, item in inside:
        if issubclass(type(item), Tensor):
            yield (*path, part), item
        else:
            yield from _leaves(item, (*path, part), above)


def only_tensor(value: Any, what: str = "The value") -> tuple[Path, Tensor]:
    """The one tensor in a structure with its path; SeveralTensors lists the parts otherwise.

    >>> only_tensor((None, torch.zeros(2)))
    ((1,), tensor([0., 0.]))
    """
    found = list(leaves(value))
    if len(found) == 1:
        return found[0]
    parts = ", ".join(f"{show_path(path)} {tuple(tensor.shape)}" for path, tensor in found[:12])
    raise SeveralTensors(
        f"{what} was taken for one tensor.",
        f"It is a {type(value).__name__} and holds {len(found) or 'none'}: {parts or 'no tensor'}.",
        "Name one of the parts in the place, as in block[0] or block[keys].",
    )


def get_part(value: Any, path: Path) -> Any:
    """What stands at a path; LookupError, saying what there is, if nothing does.

    >>> get_part({"h": (1, 2)}, ("h", 1))
    2
    """
    for depth, part in enumerate(path):
        inside, position = _locate(value, part, path[:depth])
        value = getattr(value, str(part)) if position is None else inside[position][1]
    return value


def _locate(value: Any, part: Part, before: Path) -> tuple[list[tuple[Part, Any]], int | None]:
    """The children of a value and the position of a part among them; None for an attribute."""
    where = show_path(before) or "the value"
    if isinstance(value, Tensor):
        raise LookupError(
            f"{where} is a tensor of shape {tuple(value.shape)}, and a part never indexes a tensor"
        )
    inside = children(value) or []
    names = [name for name, _ in inside]
    if part in names:
        return inside, names.index(part)
    if isinstance(part, int):
        if -len(inside) <= part < len(inside):
            return inside, part % len(inside)
    elif _has_attribute(value, part):
        # The attributes of torch.return_types are its items.
        item = getattr(value, part)
        same = [n for n, (_, other) in enumerate(inside) if other is item]
        return inside, same[0] if same and isinstance(value, tuple) else None
    there = ", ".join(show_path((name,)) for name in names) or "no parts"
    kind = type(value).__name__
    raise LookupError(f"{where} is a {kind}, which has {there}, not {show_path((part,))}")


def _has_attribute(value: Any, name: str) -> bool:
    try:
        getattr(value, name)
    except Exception:  # noqa: BLE001 - a property may raise anything
        return False
    return not callable(getattr(type(value), name, None))  # methods are nobody's parts


def set_part(value: Any, path: Path, new: Any) -> Any:
    """The same structure with `new` at a path; only the containers on the way are made anew.

    >>> set_part((1, {"a": 2}), (1, "a"), 5)
    (1, {'a': 5})
    """
    if not path:
        return new
    inside, position = _locate(value, path[0], ())
    old = getattr(value, str(path[0])) if position is None else inside[position][1]
    changed = set_part(old, path[1:], new)
    try:
        if position is None:
            return _with_attributes(copy.copy(value), {str(path[0]): changed})
        items = [item for _, item in inside]
        items[position] = changed
        return _rebuild(value, inside, items)
    except Exception as error:
        raise PlaceError(
            f"{show_path(path[:1])} of a {type(value).__name__} was to be replaced.",
            f"Such an object cannot be made anew: {error}.",
            "Edit the whole value with a function, or another place.",
        ) from error


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with every leaf mapped, tensors and opaque objects alike.

    Containers are made anew, so that a list that grows later does not change the result; one that
    cannot be made anew is kept. What stands twice in the structure is mapped once.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    return _map(function, value, {})


def _map(function: Callable[[Any], Any], value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    if id(value) in seen:
        return seen[id(value)][1]
    inside = children(value)
    if inside is None:
        result = function(value)
        seen[id(value)] = (value, result)
        return result
    # A structure may hold itself: then the new one must be there before its content.
    result = value
    if type(value) in (list, dict):
        result = type(value)()
    elif not isinstance(value, (tuple, list, Mapping, deque)):
        try:
            result = copy.copy(value)
        except Exception:  # noqa: BLE001 - kept as it is
            result = value
    seen[id(value)] = (value, result)
    items = [_map(function, item, seen) for _, item in inside]
    if type(value) is list:
        result.extend(items)
    elif type(value) is dict:
        result.update(zip(value, items, strict=True))
    elif result is not value:
        names = [str(part) for part, _ in inside]
        _with_attributes(result, dict(zip(names, items, strict=True)))
    else:
        try:
            result = _rebuild(value, inside, items)
        except Exception:  # noqa: BLE001 - kept as it is
            result = value
        seen[id(value)] = (value, result)
    return result


def _rebuild(value: Any, inside: list[tuple[Part, Any]], items: list[Any]) -> Any:
    """A container of the same type and keys with other content."""
    kind: Any = type(value)
    if kind in (tuple, list) or hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return kind(items)
    if isinstance(value, tuple):  # not the constructor: it may take other arguments
        return _with_attributes(tuple.__new__(kind, items), dict(getattr(value, "__dict__", {})))
    if isinstance(value, list):
        duplicate = copy.copy(value)
        duplicate[:] = items
        return duplicate
    if isinstance(value, deque):
        return kind(items, value.maxlen)
    if isinstance(value, Mapping):
        return _mapping(value, dict(zip(value, items, strict=True)))
    return _with_attributes(
        copy.copy(value), {str(p): i for (p, _), i in zip(inside, items, strict=True)}
    )


def _mapping(value: Any, content: dict[Any, Any]) -> Any:
    kind: Any = type(value)
    if kind in (dict, MappingProxyType):
        return kind(content)
    try:
        duplicate = copy.copy(value)
    except TypeError:  # a constructor with required arguments
        duplicate = kind.__new__(kind)
        vars(duplicate).update(vars(value))
    for key, item in content.items():
        if isinstance(value, OrderedDict) and kind.__setitem__ is OrderedDict.__setitem__:
            OrderedDict.__setitem__(duplicate, key, item)
        else:
            duplicate[key] = item
        if dataclasses.is_dataclass(value) and isinstance(key, str) and hasattr(value, key):
            object.__setattr__(duplicate, key, item)
    return duplicate


def _with_attributes(value: Any, changes: Mapping[str, Any]) -> Any:
    # Not the constructor: it may have other arguments, and a Distribution would validate them.
    for name, item in changes.items():
        object.__setattr__(value, name, item)
    return value
