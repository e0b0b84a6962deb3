"""Pair the places of two models, by name or by a mapping.

- `pair_places(model_a, model_b, where, mapping)`: the pairs, and a `Comparison` of the other places
- `check_mapping(model_a, model_b, mapping)`: raise if a mapping has paths that do not exist
- `shorten(path)`: a path without the names that wrappers of torch add
- `Renaming`: a mapping of paths
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import nn

from hookline.comparisons.differences import Comparison
from hookline.errors import NotHookable, PlaceError, PlaceNotFound
from hookline.places.grammar import Place, is_gradient
from hookline.places.resolution import Where
from hookline.places.tree import exists, unwrapped
from hookline.selecting import select
from hookline.torch_private import WRAPPER_NAMES, submodules_of

__all__ = ["Renaming", "check_mapping", "pair_places", "shorten"]

Renaming = Mapping[str, str] | Callable[[str], str | None]


def check_mapping(model_a: nn.Module, model_b: nn.Module, mapping: Renaming | None) -> None:
    """Raise if a mapping has a path that does not exist."""
    given: Mapping[str, str] = {} if mapping is None or callable(mapping) else mapping
    for path, goal in given.items():
        for which, model, own in (("first", model_a, path), ("second", model_b, goal)):
            if own and not exists(model, own.split(".")):
                raise PlaceNotFound(
                    f"{path!r} was mapped to {goal!r}.",
                    f"The {which} model has nothing under the path {own!r}.",
                    "Map paths of the first model, or their beginnings, to those of the second.",
                )


def pair_places(
    model_a: nn.Module, model_b: nn.Module, where: Where, mapping: Renaming | None
) -> tuple[dict[Place, Place], Comparison]:
    """Return the pairs of places of both models, and a comparison with all other places."""
    names = [type(model).__name__ for model in (model_a, model_b)]
    comparison = Comparison((names[0], names[1]))
    pairs: dict[Place, Place] = {}
    for place in _select(model_a, where):
        if is_gradient(place.port):
            raise PlaceError(
                f"Models were to be compared at {str(place)!r}.",
                "Only forwards are run.",
                "Capture gradients of both with hookline.capture, and compare those.",
            )
        plain = _bare(model_a, place.path) if mapping is None else shorten(place.path)
        path = _renamed(plain, mapping)
        if path is None:
            continue
        found = _find(model_b, _moved(place, path))
        if found is None:
            comparison.only_a.append(str(place) or "''")
        else:
            pairs[place] = found
    with suppress(PlaceNotFound, NotHookable):
        taken = {_moved(place, _bare(model_b, place.path)) for place in pairs.values()}
        others = _select(model_b, where)
        others = [p for p in others if _moved(p, _bare(model_b, p.path)) not in taken]
        comparison.only_b = [str(place) or "''" for place in others]
    if not pairs:
        select(model_b, "")  # raises another error for a model that takes no hooks
        raise PlaceNotFound(
            f"Two models were to be compared at {where!r}.",
            f"Of the {len(comparison.only_a)} places of the first, the second has none.",
            "Give mapping={'path in the first': 'path in the second'}, or a function.",
        )
    return pairs, comparison


def _select(model: nn.Module, where: Where) -> list[Place]:
    """Return the places; of a wrapper and the module in it, only those of the wrapper."""
    if where == ("**", "") and not submodules_of(model):
        where = ""
    found: dict[Place, Place] = {}
    for place in select(model, where):
        found.setdefault(_moved(place, _bare(model, place.path)), place)
    return list(found.values())


def _moved(place: Place, path: str) -> Place:
    """Return the same place under another path."""
    return Place(path, place.port, place.parts, place.operation)


def shorten(path: str) -> str:
    """Return a path without the names that wrappers of torch add."""
    return ".".join(name for name in path.split(".") if name not in WRAPPER_NAMES)


def _bare(model: nn.Module, path: str) -> str:
    """Return a path without the names of wrappers, also of one around the whole model."""
    outer = unwrapped("", model)[0]
    if outer and f"{path}.".startswith(f"{outer}."):
        path = path[len(outer) + 1 :]
    return shorten(path)


def _renamed(path: str, mapping: Renaming | None) -> str | None:
    """Return the path in the second model."""
    if mapping is None:
        return path
    if callable(mapping):
        return mapping(path)
    # The empty path is the beginning of all.
    starts = [start for start in mapping if not start or f"{path}.".startswith(f"{start}.")]
    if not starts:
        return path
    start = max(starts, key=len)
    rest = path[len(start) :].removeprefix(".")
    return ".".join(name for name in (mapping[start], rest) if name)


def _find(model: nn.Module, place: Place) -> Place | None:
    with suppress(PlaceNotFound, NotHookable, PlaceError):
        (found,) = select(model, place)
        return found
    return None
