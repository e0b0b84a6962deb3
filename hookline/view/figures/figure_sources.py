"""Read the tensors for figures from any source: records, stores, models, dicts, runs.

- `NamedTensors`: the tensors at one place, one for each call
- `gather(source, where)`: those of a record, a store, a model, a mapping or a tensor
- `matching(names, where)`: the names that a place or a pattern means
- `kept_places(run, where, kind)`: the places of a run that have a kind of rows
- `one(named, call)`: the only tensor, or that of a call
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.attention_patterns.patterns import Patterns
from hookline.captures.record import Record, model_of
from hookline.engine.offloading import data_of
from hookline.errors import FigureError, HooklineError
from hookline.places.grammar import DEEP, Segment, parse
from hookline.selecting import select
from hookline.storage.store import Store
from hookline.storage.stored_rows import StoredSamples
from hookline.training.run_reading import Run
from hookline.values.nested import leaves, show_path
from hookline.values.quantisation import dequantised
from hookline.values.sharding import local
from hookline.view.figures.sampled_numbers import MOST, spaced

__all__ = ["NamedTensors", "gather", "kept_places", "matching", "named_places", "one", "plain"]

_TAKEN = "a record, a store, a model, a dict of tensors, or a tensor"


class NamedTensors(NamedTuple):
    """The tensors at one place, and the total of their numbers."""

    name: str
    tensors: list[Tensor]
    total: int
    refused: str = ""  # why there is nothing


def gather(source: Any, where: Any = None, *, grads: bool = False) -> list[NamedTensors]:
    """Return the tensors of a source at some places, or at all.

    Args:
        source: a record, patterns, a store, a model (its parameters), a mapping or a tensor.
        where: a place, a pattern, a compiled regular expression, or a list of them.
        grads: for a model, the gradients of the parameters.
    """
    found = _gathered(source, where, grads)
    if not found:
        raise FigureError(
            f"A figure of a {type(source).__name__} was asked for.",
            "There is nothing in it.",
            "Give one that holds values, or a model with parameters.",
        )
    return found


def _gathered(source: Any, where: Any, grads: bool) -> list[NamedTensors]:
    if isinstance(source, nn.Module):
        found = dict(source.named_parameters())
        names = matching([f"{name}:value" for name in found], where, default="value")
        plainly = [name.removesuffix(":value") for name in names]
        return [_of_parameter(source, name, found[name], grads) for name in plainly]
    if isinstance(source, (Record, Patterns)):
        places = named_places(source, where)
        found = [named for place in places for named in _of(source, place, len(places) == 1)]
        return _asked_for(found, where)
    if isinstance(source, Store):
        return [_of_store(source, place) for place in named_places(source, where)]
    if isinstance(source, Mapping):
        values = {str(name): value for name, value in cast("Mapping[Any, Any]", source).items()}
        names = matching(values, where, inside=True)
        return _asked_for([n for name in names for n in _split(name, [values[name]])], where)
    if where is not None and not isinstance(source, (Tensor, np.ndarray, list, tuple)):
        raise FigureError(
            f"A figure of {type(source).__name__} was asked for.",
            "It is not a kind of thing that this figure shows.",
            f"Give {_TAKEN}.",
        )
    return _split("", [source])


def named_places(source: Any, where: Any) -> list[str]:
    """Return the places of a source that were asked for."""
    held = source.places()
    model = model_of(source) if isinstance(source, Record) else None
    if model is not None and not _is_text(where) and where is not None:
        chosen = set(select(model, where))
        held = [place for place in held if place in chosen]
        return held or matching(held, str(where))
    return matching(held, where, inside=True)


def _asked_for(found: list[NamedTensors], where: Any) -> list[NamedTensors]:
    """Return the parts of nested values that were asked for."""
    if where is None or not _is_text(where):
        return found
    chosen = set(matching([named.name for named in found], where))
    return [named for named in found if named.name in chosen]


def _is_text(where: Any) -> bool:
    if isinstance(where, (list, tuple)):
        return all(map(_is_text, cast("list[Any]", where)))
    return isinstance(where, (str, re.Pattern))


# -- names ----------------------------------------------------------------------------------------


def matching(
    names: Iterable[str], where: Any, default: str = "output", inside: bool = False
) -> list[str]:
    """Return the names that a place or pattern means, in their order; all without one.

    >>> matching(["h.0.mlp", "h.1.mlp", "h.1.mlp:input"], "h.*.mlp")
    ['h.0.mlp', 'h.1.mlp']

    If nothing fits, the error lists the names. With `inside`, names of values that have the part
    fit, too.
    """
    names = list(names)
    if where is None:
        return names
    alone = isinstance(where, (str, re.Pattern))
    wheres = cast("list[Any]", [where] if alone else list(where))
    chosen: set[str] = set()
    for one_of in wheres:
        fitting = [name for name in names if _fits(name, one_of, default, inside)]
        if not fitting:
            shown = ", ".join(map(repr, map(str, names[:6]))) + ", …" * (len(names) > 6)
            raise FigureError(
                f"A figure of {getattr(one_of, 'pattern', one_of)!r} was asked for.",
                f"There is {shown or 'nothing'}.",
                "Name one of these, or a pattern such as 'h.*.mlp' that fits some.",
            )
        chosen.update(fitting)
    return [name for name in names if name in chosen]


def _fits(name: str, where: Any, default: str, inside: bool) -> bool:
    if isinstance(where, re.Pattern):
        return cast("re.Pattern[str]", where).search(name) is not None
    if not isinstance(where, str):
        raise FigureError(
            f"A figure of {type(where).__name__} was asked for.",
            "The source has names only, and no live model to find that in.",
            "Give places as text, such as 'h.*.mlp'.",
        )
    if name in (where, f"{where}:value"):
        return True
    try:
        asked, own = parse(where), parse(name)
    except HooklineError:
        return False  # a name that is no place is only known by itself
    same = (asked.port or default) == (own.port or default) and asked.nth in (None, own.nth)
    shared = min(len(asked.parts), len(own.parts)) if inside else len(asked.parts)
    if not same or own.parts[:shared] != asked.parts[:shared]:
        return False
    if asked.operation != own.operation and not (asked.operation == "*" and own.operation):
        return False
    return any(_leads(path, own.paths[0]) for path in asked.paths)


def _leads(path: Sequence[Segment], names: Sequence[Any]) -> bool:
    """Return True if the segments of a pattern stand for these names."""
    if not path:
        return not names
    first, *rest = path
    if first is DEEP:
        return any(_leads(rest, names[n:]) for n in range(0 if rest else 1, len(names) + 1))
    if not names:
        return False
    fits = first == names[0] if isinstance(first, str) else first.fullmatch(names[0])
    return fits and _leads(rest, names[1:])


def kept_places(run: Run, where: Any, kind: str) -> list[str]:
    """Return the places of a run that have a kind of rows."""
    held = [row.place for row in run.rows() if row.kind == kind]
    if not held:
        kinds = sorted({row.kind for row in run.rows()})
        raise FigureError(
            f"Rows of kind {kind!r} of a run were to be drawn.",
            f"It has {', '.join(kinds) or 'none'}.",
            "Give kind= one of these.",
        )
    return matching(dict.fromkeys(held), where)


# -- values ---------------------------------------------------------------------------------------


def one(named: NamedTensors, call: int | None) -> Tensor:
    """Return the tensor of a place: of the given call, or the only one, or that of the first
    call.
    """
    count = len(named.tensors)
    if named.refused:
        raise FigureError(
            f"A figure of {named.name!r} was asked for.", named.refused, "Draw another."
        )
    if not -count <= (call or 0) < count:
        raise FigureError(
            f"Call {call} at {named.name!r} was to be drawn.",
            f"There are {count} calls, from 0.",
            "Give call= one of them.",
        )
    return named.tensors[call or 0]


def _of(source: Any, place: str, alone: bool) -> list[NamedTensors]:
    try:
        values = source.calls(place)
    except HooklineError as error:
        if alone:
            raise
        return [NamedTensors(str(place), [], 0, error.found)]  # the others can be drawn
    return _split(str(place), [value for value in values if value is not None])


def _split(name: str, values: Sequence[Any]) -> list[NamedTensors]:
    """Return one entry for each tensor in nested values."""
    found: dict[str, list[Tensor]] = {}
    for value in values:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(cast("Any", value)))
        elif isinstance(value, (list, tuple)) and not leaves(value):
            value = _numbers(name, cast("Any", value))
        for path, tensor in leaves(value):
            found.setdefault(name + show_path(path), []).append(plain(tensor, name))
    if not found:
        kinds = ", ".join({type(value).__name__ for value in values}) or "nothing"
        raise FigureError(
            f"A figure of {name or 'a value'!r} was asked for.",
            f"It holds no tensor: it is {kinds}.",
            f"Give {_TAKEN}.",
        )
    return [
        NamedTensors(key, list_of, sum(t.numel() for t in list_of))
        for key, list_of in found.items()
    ]


def _numbers(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        asked = f"A figure of {name or 'a value'!r} was asked for."
        raise FigureError(asked, f"It is a {type(value).__name__}.", f"Give {_TAKEN}.") from None


def plain(tensor: Tensor, name: str = "") -> Tensor:
    """Return a tensor that can be indexed and turned into numpy: detached, dense, real."""
    tensor = local(tensor.detach())
    if tensor.is_meta or tensor.is_nested:
        raise FigureError(
            f"A figure of {name or 'a value'!r} was asked for.",
            "It is a meta tensor, without data." if tensor.is_meta else "It is a nested tensor.",
            "Draw values of a run with data; of a nested tensor, its parts.",
        )
    tensor = dequantised(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.abs() if tensor.is_complex() else tensor


def _of_parameter(model: nn.Module, name: str, parameter: Tensor, grads: bool) -> NamedTensors:
    tensor = parameter.grad if grads else data_of(model, parameter, name)
    if tensor is None:
        return NamedTensors(name, [], 0, "No gradient has arrived there.")
    return NamedTensors(name, [plain(tensor, name)], tensor.numel())


def _of_store(store: Store, place: str) -> NamedTensors:
    """Return whole samples of a store, as many as can be drawn, evenly spaced."""
    rows = store[place]
    values = rows.rows if isinstance(rows, StoredSamples) else rows
    size = max(1, int(np.prod(values.shape[1:])))
    chosen = spaced(len(values), max(1, MOST // size))
    return NamedTensors(place, [plain(values[chosen], place)], len(values) * size)
