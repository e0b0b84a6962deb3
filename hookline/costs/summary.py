"""The costs of each module of a model, as an object, a table and a dict.

- `Summary`: the result of `summarize`
- `ModuleCosts`: the costs of one module
- `shapes_of(value)`: the shapes in a value, in its structure
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from textwrap import wrap
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from hookline.errors import PlaceNotFound
from hookline.places.grammar import escape
from hookline.places.resolution import Where, resolve
from hookline.selecting import select
from hookline.text_tables import as_html, as_lines, pandas, show_count, show_seconds, show_shapes
from hookline.torch_private import submodules_of
from hookline.values.nested import children
from hookline.values.tables import show_bytes

if TYPE_CHECKING:
    from hookline.costs.call_costs import CallCosts
    from hookline.costs.module_sizes import ModuleSizes

__all__ = ["ModuleCosts", "Summary", "shapes_of"]

_MOST = 60  # rows that are shown if nothing is said
_PLAIN = (bool, int, float, complex, str)


def shapes_of(value: Any) -> Any:
    """Return the shapes in a value: text for a tensor, lists and dicts of it, types of the rest.

    >>> import torch
    >>> shapes_of((torch.zeros(2, 3), {"mask": None, "h": [torch.zeros(4)], "causal": True}))
    ['(2, 3)', {'mask': None, 'h': ['(4,)'], 'causal': 'bool'}]
    """
    if isinstance(value, Tensor):
        try:
            return str(tuple(value.shape))
        except RuntimeError:  # a nested tensor has no shape
            return "nested"
    return None if value is None else _shapes_in(value, 0)


def _shapes_in(value: Any, level: int) -> Any:
    inside = None if isinstance(value, _PLAIN) or level > 20 else children(value)
    if inside is None:
        return type(value).__name__
    shown = [(part, shapes_of(item) if level < 20 else "…") for part, item in inside]
    if isinstance(value, (tuple, list)):
        return [item for _, item in shown]
    return {str(part): item for part, item in shown}


@dataclass(slots=True)
class ModuleCosts:
    """The costs of one module and of all that is in it or called by it; `own_…` without these.

    Fields that were not measured are None: without a batch, all from `called` on.
    """

    place: str
    type: str
    depth: int
    parameters: int  # each tensor counts once
    own_parameters: int
    trainable: int
    parameter_bytes: int
    buffer_bytes: int
    shared_with: Sequence[str] = ()  # modules with the same parameters
    aliases: Sequence[str] = ()  # other names of the same module
    called: bool | None = None
    calls: int | None = None
    inputs: Any = None  # shapes by argument, of the first call
    output: Any = None  # shapes, of the first call
    dtype: str | None = None  # of the first tensor in the output
    varies: bool = False  # whether a later call had another shape
    activation_bytes: int | None = None  # of the outputs of all calls
    flops: int | None = None
    own_flops: int | None = None
    backward_flops: int | None = None
    own_backward_flops: int | None = None
    seconds: float | None = None
    backward_seconds: float | None = None


class Summary:
    """The costs of each module: `summary[place]`, `summary.totals`, and a table as text.

    >>> from hookline import summarize
    >>> print(summarize(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), (32, 8)))
    Sequential: 3 modules, 144 parameters (576 B), 8.19 KFLOPs, 4.1 KB activations
      place  type        input     output    parameters  activations   FLOPs
      ''     Sequential  (32, 8)   (32, 16)         144       2.0 KB  8.19 K
      0      Linear      (32, 8)   (32, 16)         144       2.0 KB  8.19 K
      1      ReLU        (32, 16)  (32, 16)                   2.0 KB
    """

    def __init__(
        self, model: nn.Module, sizes: ModuleSizes, calls: CallCosts | None = None
    ) -> None:
        self.model = type(model).__name__
        self._sizes, self._calls = sizes, calls
        self._alive: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._made: dict[int, ModuleCosts] = {}  # rows that were read, by number
        whole = self._row(0)
        self.totals: dict[str, Any] = {
            "modules": len(self),
            "called": None,
            "parameters": whole.parameters,
            "trainable": whole.trainable,
            "parameter_bytes": whole.parameter_bytes,
            "buffer_bytes": whole.buffer_bytes,
            "input_bytes": None,
            "activation_bytes": None,
            "flops": None,
            "backward_flops": None,
            "seconds": None,
            "backward_seconds": None,
            "peak_bytes": None,
            "uncounted": {},
            "packed": sizes.packed,
            "elsewhere": [],  # modules that other threads called meanwhile: that is not measured
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_alive": None}  # a model stays in its process

    def _row(self, number: int) -> ModuleCosts:
        """Return the row of a module, made when it is first read."""
        if number not in self._made:
            row = self._made[number] = self._sizes.make_row(number)
            if self._calls is not None:
                self._calls.fill(row, number)
        return self._made[number]

    @property
    def modules(self) -> list[ModuleCosts]:
        """The rows of all modules, in model order."""
        return [self._row(number) for number in range(len(self))]

    def __getitem__(self, place: str) -> ModuleCosts:
        """Return the costs of the module at a place, or at one of its other names."""
        for row in self.modules:
            if place == row.place or place in row.aliases or place == escape(row.place):
                return row
        raise PlaceNotFound(
            f"What the module {place!r} costs was asked for.",
            f"{self.model} has no such module.",
            "List them with [row.place for row in summary.modules].",
        )

    def __iter__(self) -> Iterator[ModuleCosts]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self._sizes.places)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON: `model`, `totals`, `modules`."""
        rows = [asdict(row) for row in self.modules]
        for row in rows:
            row["shared_with"], row["aliases"] = list(row["shared_with"]), list(row["aliases"])
        return {"model": self.model, "totals": dict(self.totals), "modules": rows}

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with one row a module; the totals are in its `attrs`."""
        content = self.to_dict()
        frame = pandas("summary.to_pandas()").DataFrame(content["modules"])
        frame.attrs.update(model=self.model, totals=content["totals"])
        return frame

    def show(
        self, where: Where | None = None, *, depth: int | None = None, width: int = 120
    ) -> str:
        """Return the table as text.

        Args:
            where: only the modules at these places: globs, regular expressions, types; modules
                and predicates as long as the model is there, of which a summary keeps nothing.
            depth: only modules at most so deep; the model itself has depth 0. Without it, as deep
                as 60 rows go.
            width: of the longest line; shapes and names are cut.
        """
        rows, left_out = self._rows(where, depth)
        title = wrap(self._title(), width, subsequent_indent="  ", break_long_words=False)
        return "\n".join([*title, *as_lines(_cells(rows), width), *self._notes(left_out)])

    def __repr__(self) -> str:
        return self.show()

    def _repr_html_(self) -> str:
        rows, left_out = self._rows(None, None)
        return as_html(self._title(), _cells(rows), self._notes(left_out))

    def _rows(self, where: Where | None, depth: int | None) -> tuple[list[ModuleCosts], int]:
        """Return the rows to show, and how many are left out for being too deep."""
        places = self._sizes.places
        numbers = range(len(places))
        if where is not None:
            paths = {place.path for place in select(_skeleton(places), self._named(where))}
            numbers = [number for number in numbers if places[number] in paths]
        depths = [self._sizes.depths[number] for number in numbers]
        if depth is None:
            at = Counter(depths)
            sums = accumulate([at[depth] for depth in range(max(at, default=0) + 1)])
            depth = max([depth for depth, count in enumerate(sums) if count <= _MOST], default=0)
        shown = [n for n, deep in zip(numbers, depths, strict=True) if deep <= depth]
        return [self._row(number) for number in shown], len(numbers) - len(shown)

    def _named(self, where: Any) -> Any:
        """Return the same places for a tree of names."""
        if isinstance(where, tuple):  # perhaps a pair with a port
            return tuple(map(self._named, cast("tuple[Any, ...]", where)))
        if callable(where):
            paths = self._paths_of(where)

            def is_asked_for(path: str, node: nn.Module) -> bool:
                return path in paths

            return is_asked_for
        if isinstance(where, Iterable) and not isinstance(where, str):
            return [*map(self._named, cast("Iterable[Any]", where))]
        return cast(Any, where)

    def _paths_of(self, where: Any) -> set[str]:
        """Return the paths of a module, of a type, or of what a predicate selects."""
        model = None if self._alive is None else self._alive()
        if model is not None:
            requests = resolve(model, (where,), hookable=False)
            return {target.path for request in requests for target in request.targets}
        kind = where.__name__ if isinstance(where, type) else None
        found = {row.place for row in self if row.type == kind}
        if not found:
            raise PlaceNotFound(
                f"The rows of {getattr(where, '__name__', type(where).__name__)} were asked for.",
                "A summary holds no module, and its model is gone, or was not copied with it.",
                "Name places or types that it has, or keep the model.",
            )
        return found

    def _title(self) -> str:
        totals = self.totals
        sizes = f"{show_count(totals['parameters'])} parameters"
        modules = f"{len(self)} module{'s' * (len(self) != 1)}"
        parts = [modules, f"{sizes} ({show_bytes(totals['parameter_bytes'])})"]
        if totals["trainable"] != totals["parameters"]:
            parts.append(f"{show_count(totals['trainable'])} of them trainable")
        measured: list[tuple[str, Callable[[Any], str], str]] = [
            ("flops", _show_flops, ""), ("backward_flops", _show_flops, " backward"),
            ("activation_bytes", show_bytes, " activations"),
            ("peak_bytes", show_bytes, " at the peak"),
            ("seconds", show_seconds, ""), ("backward_seconds", show_seconds, " backward"),
        ]  # fmt: skip
        for name, show, what in measured:
            if totals[name] is not None:
                parts.append(f"{show(totals[name])}{what}")
        return f"{self.model}: {', '.join(parts)}"

    def _notes(self, left_out: int) -> list[str]:
        notes: list[str] = []
        if left_out:
            notes.append(f"{left_out} deeper modules: summary.show(depth=…)")
        if self.totals["uncounted"]:
            calls = ", ".join(f"{name} ({n} ×)" for name, n in self.totals["uncounted"].items())
            notes.append(f"without a formula, and so not in the FLOPs: {calls}")
        for name, words in (
            ("packed", "quantised weights, which are not in the parameters"),
            ("elsewhere", "called in another thread, and not measured there"),
        ):
            if self.totals[name]:
                places = ", ".join(place or "''" for place in self.totals[name])
                notes.append(f"{words}: {places}")
        return notes


class _Node(nn.Module):
    """A module without content, for a tree in which `select` finds places."""

    def forward(self) -> None:
        """Do nothing."""


def _skeleton(paths: Sequence[str]) -> nn.Module:
    root = _Node()
    for path in paths:
        module: Any = root
        for name in path.split(".") if path else ():
            module = submodules_of(module).setdefault(name, _Node())
    return root


def _cells(rows: Sequence[ModuleCosts]) -> list[list[str]]:
    """Return the table: a head, then a row a module; empty columns are left out."""
    ran = any(row.called is not None for row in rows)
    columns: dict[str, list[str]] = {
        "place": [escape(row.place) or "''" for row in rows],
        "type": [row.type for row in rows],
    }
    if ran:
        columns["input"] = [show_shapes(row.inputs) for row in rows]
        columns["output"] = [_output(row) for row in rows]
    if any((row.calls or 0) > 1 for row in rows):
        columns["calls"] = [str(row.calls or "") for row in rows]
    columns["parameters"] = _each(show_count, [row.parameters for row in rows])
    if ran:
        columns["activations"] = _each(show_bytes, [row.activation_bytes for row in rows])
        columns["FLOPs"] = _each(show_count, [row.flops for row in rows])
    else:
        columns["bytes"] = _each(show_bytes, [row.parameter_bytes for row in rows])
        if any(row.buffer_bytes for row in rows):
            columns["buffers"] = _each(show_bytes, [row.buffer_bytes for row in rows])
    measured: dict[str, tuple[Callable[[Any], str], list[float | None]]] = {
        "backward": (show_count, [row.backward_flops for row in rows]),
        "time": (show_seconds, [row.seconds for row in rows]),
        "backward time": (show_seconds, [row.backward_seconds for row in rows]),
    }
    for name, (show, numbers) in measured.items():
        if {*numbers} - {None}:
            columns[name] = _each(show, numbers)
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def _show_flops(number: float) -> str:
    shown = show_count(number)
    return f"{shown}FLOPs" if " " in shown else f"{shown} FLOPs"  # 19.5 KFLOPs, 512 FLOPs


def _each(show: Callable[[Any], str], numbers: Sequence[float | None]) -> list[str]:
    """Format numbers for people; None and 0 are empty. Many are alike in a model."""
    known = {number: show(number) if number else "" for number in {*numbers}}
    return [known[number] for number in numbers]


def _output(row: ModuleCosts) -> str:
    if row.called is False:
        return "not called"
    return show_shapes(row.output) + (" varies" if row.varies else "")
