"""Walk and rebuild the structures that modules take and return.

torch's own pytree does not see into subclasses of dict and list, dataclasses or namespaces, so
hookline has its own traversal. A *part* is one step into a structure: a position, a key or an
attribute; a *path* is a tuple of parts.

- `children(value)`: the parts of one container with their values; None for any other object
- `leaves(value)`: every tensor in a structure with its path
- `only_tensor(value)`: the one tensor in a structure with its path, or an error
- `get_part(value, path)`: the value at a path
- `exact_path(value, path)`: a path with its parts named as `children` names them
- `set_part(value, path, new)`: a structure with a new value at a path
- `map_leaves(function, value)`: a structure with every leaf mapped
- `show_path(path)`: a path as it is written in a place
"""

# Values of any structure have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from hookline.errors import PlaceError, SeveralTensors

__all__ = [
    "Path", "children", "exact_path", "get_part", "leaves", "map_leaves", "only_tensor", "set_part",
    "show_path",
]  # fmt: skip

Part = int | str
Path = tuple[Part, ...]

_ATOMS = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_LEVELS = 200  # containers that are nested deeper than this are opaque


def show_path(path: Path) -> str:
    """Return a path as it is written in a place.

    >>> show_path((1, "mask", "0"))
    "[1][mask]['0']"
    """
    return "".join([f"[{_show_part(part)}]" for part in path])


def _show_part(part: Part) -> str:
    if isinstance(part, str) and re.search(r"""[\[\]'"\\]|^(-?[0-9]+)?$""", part):
        return "'" + re.sub(r"['\\]", r"\\\g<0>", part) + "'"
    return str(part)


def children(value: Any) -> list[tuple[Part, Any]] | None:
    """Return the parts of one container with their values; None for any other object.

    >>> children({"a": 1, "b": (2, 3)})
    [('a', 1), ('b', (2, 3))]
    >>> children("text") is None
    True
    """
    kind: Any = type(value)
    if kind is tuple or kind is list:
        return list(enumerate(value))
    try:
        if isinstance(value, _ATOMS):
            return None
        if isinstance(value, (dict, Mapping)):
            found = [(k if type(k) in (int, str) else str(k), value[k]) for k in value]
            return found if len(dict(found)) == len(found) else _distinct(value, found)
        if isinstance(value, (list, tuple, deque)):
            return list(zip(getattr(kind, "_fields", range(len(value))), value, strict=True))
        if isinstance(value, (Distribution, SimpleNamespace)):
            return list(vars(value).items())
        # A dataclass, or one of the attrs library, without importing it.
        fields = getattr(kind, "__attrs_attrs__", None) or dataclasses.fields(kind)
        return [(f.name, getattr(value, f.name)) for f in fields if hasattr(value, f.name)]
    except Exception:  # noqa: BLE001 - an object that cannot be walked is opaque
        return None


def _distinct(keys: Any, items: list[tuple[Part, Any]]) -> list[tuple[Part, Any]]:
    """Return the items of a mapping in which some keys, as None and "None", have the same text.

    A key that is neither a text nor an integer is then named by its text and its position.
    """
    parts = [part for part, _ in items]
    found: list[tuple[Part, Any]] = []
    for position, (key, (part, item)) in enumerate(zip(keys, items, strict=True)):
        is_distinct = type(key) in (int, str) or parts.count(part) == 1
        found.append((part if is_distinct else f"{part} at {position}", item))
    return found


def leaves(value: Any, path: Path = (), above: tuple[int, ...] = ()) -> list[tuple[Path, Tensor]]:
    """Return every tensor in a structure with its path, in order.

    A structure may hold itself.

    >>> [path for path, _ in leaves((torch.zeros(1), {"h": [torch.zeros(2), None]}))]
    [(0,), (1, 'h', 0)]
    """
    if issubclass(type(value), Tensor):  # isinstance would ask a proxy for its class
        return [(path, value)]
    if id(value) in above or len(above) == _LEVELS:
        return []
    found: list[tuple[Path, Tensor]] = []
    for part, item in children(value) or ():
        found += leaves(item, (*path, part), (*above, id(value)))
    return found


def only_tensor(value: Any, what: str | Callable[[], str] = "The value") -> tuple[Path, Tensor]:
    """Return the one tensor in a structure with its path; raise SeveralTensors if there are others.

    `what` is the name of the value in the error, or a function that returns it.

    >>> only_tensor((None, torch.zeros(2)))
    ((1,), tensor([0., 0.]))
    """
    found = leaves(value)
    if len(found) == 1:
        return found[0]
    parts = ", ".join(f"{show_path(path)} {tuple(tensor.shape)}" for path, tensor in found[:12])
    raise SeveralTensors(
        f"{what() if callable(what) else what} was taken for one tensor.",
        f"It is a {type(value).__name__} and holds {len(found) or 'none'}: {parts or 'no tensor'}.",
        "Name one of the parts in the place, as in block[0] or block[keys].",
    )


def get_part(value: Any, path: Path) -> Any:
    """Return the value at a path; raise LookupError, which lists the parts, if there is none.

    >>> get_part({"h": (1, 2)}, ("h", 1))
    2
    """
    for depth, part in enumerate(path):
        value, _, _ = _locate(value, part, path[:depth])
    return value


def exact_path(value: Any, path: Path) -> Path:
    """Return a path by the names that `children` gives; raise LookupError if it leads nowhere.

    >>> exact_path({"h": (1, 2)}, (0, -1))
    ('h', 1)
    """
    found: Path = ()
    for depth, part in enumerate(path):
        value, name, _ = _locate(value, part, path[:depth])
        found = (*found, name)
    return found


def _locate(value: Any, part: Part, before: Path = ()) -> tuple[Any, Part, list[tuple[Part, Any]]]:
    """Return the value at a part, the part's own name, and the parts that can be set."""
    inside = children(value) or []
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields") and part in kind.__match_args__:  # torch.return_types
        part = kind.__match_args__.index(part)
    named = dict(inside)
    if part in named:
        return named[part], part, inside
    if isinstance(part, int) and -len(inside) <= part < len(inside):
        name, item = inside[part]
        return item, name, inside
    it = show_path(before) or "the value"
    if isinstance(value, Tensor):
        it += f" is a tensor of shape {tuple(value.shape)}, and a part never indexes a tensor"
        raise LookupError(f"{it}: leave the part out; a slice is given with at=")
    if isinstance(part, str) and not callable(getattr(kind, part, None)):  # not for methods
        with suppress(Exception):  # a property may raise anything
            return getattr(value, part), part, [] if inside else [(part, None)]
    there = ", ".join(show_path((name,)) for name, _ in inside) or "no parts"
    raise LookupError(f"{it} is a {kind.__name__}, which has {there}, not {show_path((part,))}")


def set_part(value: Any, path: Path, new: Any) -> Any:
    """Return a structure with `new` at a path; only the containers on the way are copied.

    >>> set_part((1, {"a": 2}), (1, "a"), 5)
    (1, {'a': 5})
    """
    if not path:
        return new
    old, name, inside = _locate(value, path[0])
    changed = set_part(old, path[1:], new)
    items = [changed if part == name else item for part, item in inside]
    made = _fill(value, _duplicate(value), inside, items) if inside else value
    if made is value:
        asked = f"{show_path(path[:1])} of a {type(value).__name__} was to be replaced."
        found = "Such an object cannot be made anew with something else there."
        raise PlaceError(asked, found, "Edit the whole value with a function, or another place.")
    return made


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure with every leaf mapped, tensors and opaque objects alike.

    Containers are copied, so that a list that grows later does not change the result; one that
    cannot be copied is kept. An object that occurs twice in the structure is mapped once.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": [1, 2]})
    {'a': [2, 3]}
    """
    return _map(function, value, {}, 0)


def _map(function: Callable[[Any], Any], value: Any, seen: dict[int, Any], level: int) -> Any:
    if id(value) in seen:
        return seen[id(value)][1]
    inside = None if type(value) is Tensor or level == _LEVELS else children(value)
    if inside is None:
        result = function(value)
    else:
        # A structure may hold itself: then the copy must exist before its content.
        duplicate = _duplicate(value)
        seen[id(value)] = (value, duplicate)
        items = [_map(function, item, seen, level + 1) for _, item in inside]
        result = _fill(value, duplicate, inside, items)
    seen[id(value)] = (value, result)
    return result


def _duplicate(value: Any) -> Any:
    """Return a copy of a container, to be filled; itself if it must be made with its content.

    The constructor is not used: it may have other arguments, and a Distribution validates them.
    """
    kind: Any = type(value)
    if kind in (list, dict, MappingProxyType):
        return value.copy()
    if not isinstance(value, tuple):
        with suppress(Exception):
            return copy.copy(value)
    if isinstance(value, dict):  # copying it calls a constructor with required arguments
        with suppress(Exception):
            duplicate = kind.__new__(kind)
            vars(duplicate).update(vars(value))
            return duplicate
    return value


def _fill(value: Any, duplicate: Any, inside: list[tuple[Part, Any]], items: list[Any]) -> Any:
    """Return a container of the same type with other content; itself if there can be none."""
    kind: Any = type(value)
    try:
        if isinstance(value, tuple):
            return _tuple_like(value, items)
        if duplicate is not value:
            _set_items(value, duplicate, inside, items)
        return kind(duplicate) if kind is MappingProxyType else duplicate
    except Exception:  # noqa: BLE001 - its class may raise anything; then it is kept as it is
        return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """Return a tuple of the same type and with the same attributes that holds the items."""
    kind: Any = type(value)
    if kind is tuple or hasattr(kind, "n_sequence_fields"):  # torch.return_types
        made = kind(items)
    else:
        made = tuple.__new__(kind, items)
    getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
    return made


def _set_items(
    value: Any, duplicate: Any, inside: list[tuple[Part, Any]], items: list[Any]
) -> None:
    """Set the items or the attributes of a duplicate."""
    is_sequence = isinstance(value, (list, deque))
    has_items = is_sequence or isinstance(value, (dict, Mapping))
    has_fields = hasattr(type(value), "__dataclass_fields__")  # also dicts, in transformers
    keys = value if has_items and not is_sequence else [part for part, _ in inside]
    for key, item in zip(keys, items, strict=True):
        if has_items:
            duplicate[key] = item
        if not has_items or (has_fields and hasattr(value, str(key))):
            object.__setattr__(duplicate, str(key), item)
