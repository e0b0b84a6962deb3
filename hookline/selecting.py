"""List the places of a model: `select(model, *where)`, and with a batch the operations, too.

- `select`: the places that match, in model order
- `Places`: a list of places that notebooks show as a table
- `Listing`: places and operations in the order of a run, with their values' shapes
- `held_as`: the place for a name in which the names of torch's wrappers may be left out
"""

from __future__ import annotations

import linecache
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hookline.engine import compiling
from hookline.engine.calls import Call
from hookline.engine.hooking import hook
from hookline.engine.operations import Mode, innermost, name_of, not_called
from hookline.errors import NeverFired, PlaceNotFound
from hookline.isolation.batches import copy_batch
from hookline.isolation.isolated_runs import isolated
from hookline.isolation.model_calls import call_model, run_model
from hookline.places.grammar import Glob, Place, is_gradient, parse
from hookline.places.resolution import Where, resolve
from hookline.places.targets import Target
from hookline.places.tree import WRAPPERS, first_names
from hookline.values import tables
from hookline.values.nested import leaves

__all__ = ["Listing", "Places", "held_as", "select"]

_TORCH = str(Path(torch.__file__).parent)
_WRAPPED = re.compile(rf"(?:^|(?<=\.))({'|'.join(sorted(WRAPPERS - {''}))})(?:\.|(?=[/:[])|$)")


class Places(list[Place]):
    """The places that `select` found: a list, shown as a table in notebooks."""

    def __init__(self, found: dict[Place, str]) -> None:
        super().__init__(found)
        self._kinds = found  # the type of the module, or the shape of the parameter or buffer

    def _repr_html_(self) -> str:
        rows = [(str(place) or "''", self._kinds.get(place, "")) for place in self]
        title = f"{len(self)} place{'s' * (len(self) != 1)}"
        return tables.as_html(title, [("place", "of"), *rows])


def held_as(place: object, held: Collection[str]) -> str | None:
    """Return the place that a name means; it may leave out the names of torch's wrappers.

    It may not add them: `module.fc` is not `fc`, and a model may have both.

    >>> held_as("fc:input", ["_orig_mod.fc", "_orig_mod.fc:input"])
    '_orig_mod.fc:input'
    """
    if not isinstance(place, str):
        return None
    if place in held:
        return place
    short, given = _WRAPPED.sub("", place), Counter(_WRAPPED.findall(place))
    found = [one for one in held if _WRAPPED.sub("", one) == short]
    found = [one for one in found if given <= Counter(_WRAPPED.findall(one))]
    return found[0] if len(found) == 1 else None


def select(model: nn.Module | Tensor, *where: Where, inputs: Any = None) -> list[Place]:
    """List the places of a model that match, each once, in model order; by default all modules.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> select(model, nn.Linear)
    ['0', '2']
    >>> select(model, "{0,2}:grad_output", "**.bias")
    ['0:grad_output', '0.bias', '2:grad_output', '2.bias']

    Args:
        model: any module.
        where: places, modules, module types, regular expressions (searched in the path),
            predicates `(name, module) -> bool`, pairs of any of them and a port such as
            `(nn.Conv2d, ":grad_output")`, and lists of any of them.
        inputs: a batch (a tensor, a tuple of arguments, or a dict of them by name), or a function
            that is called with the model. With it, operations inside forwards are listed, too, as
            in `"h.0.attn/*"`: the model runs once, without gradients, and the result shows
            shapes, dtypes, and for operations the source line.

    A place is `path[/operation[#n]][:port][[part]]...`:

    - path: the name of a module, parameter or buffer; `*` is anything within one segment, `**` any
      number of segments, `{a,b}` either, `{0..11}` a range; the empty path is the model itself
    - operation: a torch function that the module's own forward calls, such as `h.0.attn/softmax`
    - port: `output` (may be left out), `input`, `inputs`, `grad_output`, `grad_input`,
      `grad_inputs`; of a parameter or buffer `value` (may be left out) and `grad`
    - part: one item of a nested value, as in `lstm[1][0]` and `block:inputs[mask]`
    """
    if inputs is not None and isinstance(model, nn.Module):
        return _survey(model, where or ("**",), inputs)
    targets = [t for request in resolve(model, where or ("**",)) for t in request.targets]
    if isinstance(model, Tensor):
        return [target.place for target in targets]
    names = first_names(model)
    order = {ident: position for position, ident in enumerate(names)}
    targets.sort(key=lambda target: order[target.ident])
    return Places({target.place_among(names): _kind_of(target) for target in targets})


def _kind_of(target: Target) -> str:
    if target.attribute is None:
        return type(target.module).__name__
    tensor = target.tensor()
    return "" if tensor is None else tables.describe(tensor)


class Listing(list[Place]):
    """Places in the order of a run, shown with their values' shapes."""

    def __init__(self, rows: dict[Place, tuple[str, str]]) -> None:
        super().__init__(rows)
        self.rows = rows  # shapes and dtypes, and the line of the source

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table())

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        columns = 3 if any(source for _, source in self.rows.values()) else 2
        rows = [("place", "value", "source")]
        rows += [(str(place) or "''", *row) for place, row in self.rows.items()]
        title = f"{len(self)} place{'s' * (len(self) != 1)}"
        return title, [row[:columns] for row in rows]


class _Use(NamedTuple):
    """One use of an operation in the forward of a module."""

    ident: int  # the id of the module
    name: str
    number: int  # how many uses came before in this call
    values: str  # shapes and dtypes
    source: str


class _Survey(Mode):
    """A function mode that notes every operation in the forwards of some modules."""

    def __init__(self, idents: set[int]) -> None:
        super().__init__()
        self.idents = idents
        self.uses: list[_Use] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        found = innermost(sys._getframe(1))
        if found is not None and id(found[0]) in self.idents:
            name = name_of(func)
            number = self.count(name, found[1])
            values = ", ".join([tables.describe(tensor) for _, tensor in leaves(output)])
            if values:
                self.uses.append(_Use(id(found[0]), name, number, values, _source()))
        return output


def _source() -> str:
    """Return the line that called a torch function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _TORCH in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or frame.f_code is call_model.__code__:  # all above is torch's, then the run's
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()}".strip()


def _survey(model: nn.Module, wheres: Iterable[Where], inputs: Any) -> list[Place]:
    """Run the model once; return its values at places, and the operations in some forwards.

    The run leaves nothing behind: model, batch and random numbers are as before.
    """
    asked = [t for request in resolve(model, wheres, wild=True) for t in request.targets]
    targets = [target for target in asked if target.operation is not None]
    names = first_names(model)
    others = {t.place_among(names): t for t in asked if t.operation is None}
    seen: dict[Place, list[str]] = {}

    def look(value: Any, at: Call) -> None:
        shown = ", ".join(tables.describe(tensor) for _, tensor in leaves(value))
        seen.setdefault(at.place, []).append(shown or type(value).__name__)

    looked = [p for p, t in others.items() if t.attribute is None and not is_gradient(p.port)]
    mode = _Survey({target.ident for target in targets})
    with isolated(model), torch.no_grad():
        batch = copy_batch(inputs)
        compiling.suspend(mode, in_graph=False)
        try:
            observing = hook(model, looked, look) if looked else nullcontext()
            with suppress(NeverFired), observing, mode:  # what was not called is listed as such
                run_model(model, batch)
        finally:
            compiling.resume(mode)
    operations = _rows_of(mode.uses, targets)
    if targets and not operations:
        raise _not_called(targets[0], [u.name for u in mode.uses if u.ident == targets[0].ident])
    rows = {place: (_standing(target, seen.get(place)), "") for place, target in others.items()}
    return Listing(rows | operations)


def _rows_of(uses: Sequence[_Use], targets: Sequence[Target]) -> dict[Place, tuple[str, str]]:
    """Return the values and sources of the operations that are asked for, in order of the run."""
    repeated = {(use.ident, use.name) for use in uses if use.number}
    rows: dict[Place, tuple[str, str]] = {}
    for use in uses:
        for target in targets:
            name, _, nth = cast(str, target.operation).partition("#")
            if target.ident != use.ident or nth not in ("", str(use.number)):
                continue
            (segment,) = parse(name).paths[0]
            if use.name == segment or (isinstance(segment, Glob) and segment.fullmatch(use.name)):
                numbered = nth or (use.ident, use.name) in repeated
                operation = f"{use.name}#{use.number}" if numbered else use.name
                place = Place(target.path, target.port, target.parts, operation)
                rows.setdefault(place, (use.values, use.source))
    return rows


def _standing(target: Target, values: list[str] | None) -> str:
    """Describe the value at a place that is no operation."""
    if target.attribute is not None:
        return _kind_of(target)
    if is_gradient(target.port):
        return ""
    if values is None:
        return "not called"
    return values[0] + f" × {len(values)}" * (len(values) > 1)


def _not_called(target: Target, names: list[str]) -> PlaceNotFound:
    return PlaceNotFound(
        f"Nothing matches {str(target.place)!r}:",
        not_called(cast(str, target.operation), names),
        "Operations in a child's forward belong to the child.",
    )
