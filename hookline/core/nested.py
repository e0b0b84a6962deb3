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

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

from hookline.errors import SeveralTensors

Part = int | str
Path = tuple[Part, ...]

__all__ = ["Part", "Path", "children", "get_part", "leaves", "map_leaves", "only_tensor", "set_part", "show_path"]

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)


def show_path(path: Path) -> str:
    """A path as it is written in a place.

    >>> show_path((1, "mask", "0"))
    "[1][mask]['0']"
    """
    return "".join(f"[{_show_part(part)}]" for part in path)


def _show_part(part: Part) -> str:
    if isinstance(part, int):
        return str(part)
    plain = part and not re.fullmatch(r"-?[0-9]+", part) and not any(c in "[]'\"\\" for c in part)
    if plain:
        return part
    quoted = part.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


def _attributes(value: object) -> list[str] | None:
    """The names of the attributes that hold a value's content, None if it is opaque."""
    if isinstance(value, (Distribution, SimpleNamespace)):
        return list(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    attrs = getattr(type(value), "__attrs_attrs__", None)  # the attrs library, without importing it
    return None if attrs is None else [field.name for field in attrs]


def children(value: object) -> list[tuple[Part, Any]] | None:
    """The parts of one container with what stands there; None if the value is no container.

    >>> children({"a": 1, "b": (2, 3)})
    [('a', 1), ('b', (2, 3))]
    >>> children("text") is None
    True
    """
    if isinstance(value, (Tensor, *_SCALARS)):
        return None
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        return [(key if isinstance(key, (int, str)) else str(key), mapping[key]) for key in mapping]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = cast(Any, value)
        return [(name, getattr(named, name)) for name in named._fields]
    if isinstance(value, (list, tuple)):
        return list(enumerate(cast("list[Any]", value)))
    names = _attributes(value)
    return None if names is None else [(name, getattr(value, name)) for name in names]


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a structure with its path, in order. A structure that holds itself is safe.

    >>> [path for path, _ in leaves((torch.zeros(1), {"h": [torch.zeros(2), None]}))]
    [(0,), (1, 'h', 0)]
    """
    if isinstance(value, Tensor):
        yield path, value
        return
    yield from _leaves(value, path, ())


def _leaves(value: object, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Tensor]]:
    inside = children(value)
    if inside is None or id(value) in above:
        return
    above = (*above, id(value))
    for part, item in inside:
        if isinstance(item, Tensor):
            yield (*path, part), item
        else:
            yield from _leaves(item, (*path, part), above)


def only_tensor(value: object, what: str = "The value") -> tuple[Path, Tensor]:
    """The one tensor in a structure with its path; SeveralTensors lists the parts otherwise.

    >>> only_tensor((None, torch.zeros(2)))
    ((1,), tensor([0., 0.]))
    """
    if isinstance(value, Tensor):
        return (), value
    found = list(leaves(value))
    if len(found) == 1:
        return found[0]
    if not found:
        raise SeveralTensors(
            f"{what} was taken for one tensor.",
            f"It is a {type(value).__name__} and holds none.",
            "If it is an object of its own kind, name the attribute, as in block[keys].",
        )
    parts = ", ".join(f"{show_path(path)} {tuple(tensor.shape)}" for path, tensor in found[:12])
    raise SeveralTensors(
        f"{what} was taken for one tensor.",
        f"It is a {type(value).__name__} and holds {len(found)}: {parts}.",
        "Name one of the parts in the place.",
    )


def get_part(value: Any, path: Path) -> Any:
    """What stands at a path; LookupError, saying what there is, if nothing does.

    >>> get_part({"h": (1, 2)}, ("h", 1))
    2
    """
    for depth, part in enumerate(path):
        value = _step(value, part, path[:depth])
    return value


def _step(value: Any, part: Part, before: Path) -> Any:
    if isinstance(value, Tensor):
        raise LookupError(
            f"{show_path(before) or 'the value'} is a tensor of shape {tuple(value.shape)}, and a "
            f"part never indexes a tensor"
        )
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        if part in mapping:
            return mapping[part]
        for key in mapping:
            if not isinstance(key, (int, str)) and str(key) == part:
                return mapping[key]
        if isinstance(part, int) and -len(mapping) <= part < len(mapping):
            return list(mapping.values())[part]
    elif isinstance(part, int):
        if isinstance(value, (list, tuple)) and -len(value) <= part < len(value):
            return value[part]
        inside = None if isinstance(value, (list, tuple)) else children(value)
        if inside is not None and -len(inside) <= part < len(inside):
            return inside[part][1]
    if isinstance(part, str) and hasattr(value, part):
        # The methods of a container are not its parts: `inputs[values]` means an argument.
        if not callable(getattr(type(value), part, None)):
            return getattr(value, part)
    inside = children(value)
    there = ", ".join(show_path((name,)) for name, _ in inside or ()) or "no parts"
    kind = type(value).__name__
    where = show_path(before) or "the value"
    raise LookupError(f"{where} is a {kind}, which has {there}, not {show_path((part,))}")


def set_part(value: Any, path: Path, new: Any) -> Any:
    """The same structure with `new` at a path; only the containers on the way are made anew.

    >>> set_part((1, {"a": 2}), (1, "a"), 5)
    (1, {'a': 5})
    """
    if not path:
        return new
    part, rest = path[0], path[1:]
    changed = set_part(_step(value, part, ()), rest, new)
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        keys = list(mapping)
        if part in mapping:
            key: Any = part
        else:
            key = keys[part] if isinstance(part, int) else next(k for k in keys if str(k) == part)
        return _rebuild(value, {key: changed})
    if isinstance(value, (list, tuple)):
        return _rebuild(value, {_position(cast("tuple[Any, ...]", value), part): changed})
    if isinstance(part, int):
        part = (children(value) or [])[part][0]
    return _rebuild(value, {part: changed})


def _position(value: tuple[Any, ...], part: Part) -> Part:
    """A part of a sequence as `_rebuild` takes it: a name for named tuples, else an index >= 0."""
    fields = getattr(value, "_fields", None)
    if isinstance(part, int):
        part = part % len(value)
        return part if fields is None else fields[part]
    if fields is None:  # torch.return_types has attributes, but no list of their names
        return next(i for i, item in enumerate(value) if item is getattr(value, part))
    return part


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with every leaf mapped, tensors and opaque objects alike.

    Containers are always made anew, so that a list that grows later does not change the result.
    What stands twice in the structure is mapped once.

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
    else:
        seen[id(value)] = (value, value)  # a structure that holds itself keeps the original there
        keys = list(cast(Mapping[Any, Any], value)) if isinstance(value, Mapping) else None
        changes = {
            part if keys is None else keys[position]: _map(function, item, seen)
            for position, (part, item) in enumerate(inside)
        }
        result = _rebuild(value, changes)
    seen[id(value)] = (value, result)
    return result


def _rebuild(value: Any, changes: Mapping[Any, Any]) -> Any:
    """A copy of one container with some of its parts replaced, of the same type."""
    if type(value) is tuple:
        return tuple([changes.get(i, item) for i, item in enumerate(cast("tuple[Any]", value))])
    if type(value) is list:
        return [changes.get(i, item) for i, item in enumerate(cast("list[Any]", value))]
    if type(value) is dict:
        return {**value, **changes}
    if isinstance(value, PackedSequence):
        return _with_fields(value, {**value._asdict(), **changes})
    if isinstance(value, tuple):
        sequence = cast("tuple[Any, ...]", value)
        fields = getattr(sequence, "_fields", None)
        if fields is not None:
            return cast(Any, sequence)._replace(**changes)
        items = [changes.get(i, item) for i, item in enumerate(sequence)]
        return cast(Any, type(sequence))(items)  # torch.return_types and other tuple subclasses
    if isinstance(value, list) or isinstance(value, Mapping):
        duplicate = copy.copy(value)
        for key, item in changes.items():
            duplicate[key] = item
        return duplicate
    return _with_attributes(value, changes)


def _with_fields(value: PackedSequence, fields: Mapping[str, Any]) -> PackedSequence:
    # The constructor of PackedSequence moves and checks things; this is what it stores.
    return tuple.__new__(type(value), fields.values())  # pyright: ignore


def _with_attributes(value: Any, changes: Mapping[str, Any]) -> Any:
    # Not the constructor: it may have other arguments, and a Distribution would validate them.
    duplicate = copy.copy(value)
    for name, item in changes.items():
        object.__setattr__(duplicate, name, item)
    return duplicate
