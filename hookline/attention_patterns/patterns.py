"""Attention patterns of models that never compute them: `attention(model, where)`.

Fast kernels return the result of attention without its pattern. hookline keeps their arguments
(queries, keys, mask and scale), computes the pattern from these, and leaves the kernel as it is.

- `attention`: keep the arguments while a `with` block runs
- `Patterns`: the patterns by place and call, computed when they are read
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from hookline.attention_patterns.arithmetic import MHA, SDPA, SOFTMAX, compute, remarks_on, shape_of
from hookline.captures.capturing import capture
from hookline.captures.keeping import CaptureAsk, CaptureHandler, Options
from hookline.captures.record import Record, captured, captured_by_place
from hookline.engine.asks import Ask
from hookline.errors import (
    HooklineError,
    NeverFired,
    NotCaptured,
    NotHookable,
    PlaceError,
    SeveralCalls,
)
from hookline.places.grammar import Place, escape
from hookline.places.resolution import Request, Target, Where
from hookline.places.tree import NamedModule, unwrapped, walk
from hookline.selecting import select
from hookline.torch_private import mask_of
from hookline.values import tables
from hookline.values.conversions import as_dtype
from hookline.values.snapshots import compact_snapshot, duplicate

__all__ = ["Patterns", "attention"]

# Where a module calls several of them, the first is its attention.
_PORTS = {SDPA: ("inputs",), MHA: ("inputs",), SOFTMAX: ("output", "inputs")}
_NAMES = {5: "is_causal"}  # given by position: torch has no signature of the kernel that names it
# Not needed for a pattern; of the last two, something smaller stands in.
_UNNEEDED = {SDPA: {"value"}, MHA: {"out_proj_weight", "out_proj_bias"}}


# -- reading --------------------------------------------------------------------------------------


class _RecordedCalls(Sequence[Any]):
    """The recorded calls of an operation, each read from the record on access."""

    def __init__(self, record: Record, place: str, numbers: Sequence[int]) -> None:
        self.record, self.place, self.numbers = record, place, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        return self.record[self.place, self.numbers[at]]


class Patterns:
    """Attention patterns by place and call, computed when they are read.

    Places are those of modules, or of operations if these were asked for. Patterns are detached
    tensors of their own: (batch, heads, queries, keys).
    """

    def __init__(self, record: Record, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._record = record
        self._model = weakref.ref(model)
        # For each softmax, which calls are of attention, and how many were looked at.
        self._fits: dict[str, tuple[list[int], int]] = {}
        self._dtype = dtype

    def __getitem__(self, key: Any) -> Tensor:
        """Return the pattern at a place, with `patterns[place, n]` that of its n-th call."""
        where, call = key, None
        if isinstance(key, tuple) and len(cast("tuple[Any, ...]", key)) == 2:
            where, last = cast("tuple[Any, Any]", key)
            call = operator.index(last) if isinstance(last, SupportsIndex) else None
        place, operation, kept = self._find(where)
        name, count = str(place), len(kept)
        if call is None and count > 1:
            raise SeveralCalls(
                f"The attention pattern at {name!r} was asked for.",
                f"There are {count} of them, one for each call.",
                f"Read patterns[{name!r}, n], or patterns.calls({name!r}).",
            )
        if call is not None and not -count <= call < count:
            raise NotCaptured(
                f"The attention pattern of call {call} at {name!r} was asked for.",
                f"There are {count} calls, from 0.",
                "patterns.calls(place) gives all of them.",
            )
        return self._compute(place, operation, kept[call or 0])

    def calls(self, where: Any) -> list[Tensor]:
        """Return the patterns at a place as a list, one for each call."""
        place, operation, kept = self._find(where)
        return [self._compute(place, operation, one) for one in kept]

    def places(self) -> list[Place]:
        """Return the places that have patterns, in model order."""
        return list(self._found())

    def items(self) -> Iterator[tuple[Place, Tensor]]:
        """Yield every place with its pattern, once for each call."""
        for place, (operation, kept) in self._found().items():
            for one in kept:
                yield place, self._compute(place, operation, one)

    def __contains__(self, where: Any) -> bool:
        try:
            return bool(self._find(where))
        except HooklineError:
            return False

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table(), self)

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [("place", "calls", "shape", "dtype", "from", "")]
        count = 0
        for place, (operation, kept) in self._found().items():
            shapes = [shape_of(operation, one) for one in kept]
            shape = f"{shapes[0]} varies" if len(set(shapes)) > 1 else shapes[0]
            tensor = kept[0] if operation == SOFTMAX else kept[0]["query"]
            dtype = str(self._dtype or tensor.dtype).removeprefix("torch.")
            remarks = " | ".join(dict.fromkeys(remarks_on(operation, one) for one in kept))
            rows.append((str(place) or "''", str(len(kept)), shape, dtype, operation, remarks))
            count += len(kept)
        places = f"{len(rows) - 1} place{'s' * (len(rows) != 2)}"
        return f"Attention patterns of {places}, {count} call{'s' * (count != 1)}", rows

    def _found(self) -> dict[Place, tuple[str, Sequence[Any]]]:
        """Return the operation that gives the patterns of a place, and its recorded calls."""
        found: dict[Place, tuple[str, Sequence[Any]]] = {}
        for place, handler in captured_by_place(self._record).items():
            kept = self._kept(place, handler)
            if kept:
                spelled = place.operation if _is_named(handler) else None
                found.setdefault(Place(place.path, operation=spelled), (_kind(place), kept))
        return found

    def _kept(self, place: Place, handler: CaptureHandler) -> Sequence[Any]:
        """Return what was kept of the calls of an operation, if patterns follow from it."""
        if not handler.holds or place.port not in _PORTS[_kind(place)][:1]:
            return ()
        spelled = str(handler.target.place)
        if _kind(place) == SOFTMAX:
            return _RecordedCalls(self._record, spelled, self._fitting(handler))
        return _RecordedCalls(self._record, spelled, range(len(handler.entries())))

    def _fitting(self, handler: CaptureHandler) -> list[int]:
        """Return the calls of a softmax that are of attention: each is looked at once."""
        ident, operation, _, parts = handler.target.key
        spelled = str(handler.target.place)
        outputs = handler.entries()
        given = self._by_key()[ident, operation, "inputs", parts].entries()
        found, seen = self._fits.get(spelled, ([], 0))
        count = min(len(outputs), len(given))
        for n in range(seen, count):
            value, last = outputs[n][1], given[n][1]
            if value is not None and value[0] is not None and last is not None and last[0]:
                found.append(n)
        self._fits[spelled] = found, max(seen, count)
        return found

    def _by_key(self) -> dict[Any, CaptureHandler]:
        return {handler.target.key: handler for handler in captured(self._record)}

    def has(self, target: Target) -> bool:
        """Return True if there are patterns of an operation that was asked for."""
        handler = self._by_key()[target.key]  # it may have been asked for under another name, too
        return bool(self._kept(handler.target.place, handler))

    def _find(self, where: Any) -> tuple[Place, str, Sequence[Any]]:
        held = {str(one.target.place): one for one in captured(self._record)}
        for operation in _PORTS if isinstance(where, str) else ():  # as it was asked for
            for spelled in (f"{where}/{operation}", where):
                place = f"{spelled}:{_PORTS[operation][0]}".removesuffix(":output")
                handler = held.get(place)
                if handler is None or _is_named(handler) != (spelled is where):
                    continue
                found = handler.target.place
                kept = self._kept(found, handler)
                if kept:
                    own = found.operation if _is_named(handler) else None
                    return Place(found.path, operation=own), _kind(found), kept
        return self._search(where)

    def _search(self, where: Any) -> tuple[Place, str, Sequence[Any]]:
        """Find the patterns of a place that is written in another way than it was asked for."""
        found, model = self._found(), self._model()
        fitting = [place for place in found if place == where]
        if not fitting and model is not None:
            modules = dict(walk(model))
            fitting = [
                place
                for place in found
                for other in select(model, where)
                if other.operation in (None, place.operation) and other.path in modules
                if place.path == unwrapped(other.path, modules[other.path])[0]
            ]
        if len(fitting) == 1:
            return fitting[0], *found[fitting[0]]
        shown = where if isinstance(where, str) else type(where).__name__
        held = ", ".join(repr(str(place)) for place in fitting or found) or "none"
        several = f"It matches several: {held}." if fitting else f"There are patterns at {held}."
        raise NotCaptured(
            f"The attention pattern at {shown!r} was asked for.",
            several,
            "Read one place at a time." if fitting else "print(patterns) shows them as a table.",
        )

    def _compute(self, place: Place, operation: str, kept: Any) -> Tensor:
        if operation != SOFTMAX and kept["query"].is_nested:
            raise NotCaptured(
                f"The attention pattern at {str(place)!r} was asked for.",
                "It was called with nested tensors, whose sequences have patterns of many shapes.",
                "Run the model on padded sequences with a mask, or on one sequence at a time.",
            )
        return compute(operation, kept, self._dtype)


def _kind(place: Place) -> str:
    """Return the operation of a place, without the number of its use."""
    return cast(str, place.operation).partition("#")[0]


# -- keeping --------------------------------------------------------------------------------------


class _Every:
    """A predicate for every module, the model itself included."""

    def __call__(self, name: str, module: nn.Module) -> bool:
        return True

    def __repr__(self) -> str:
        return "every module"


class _PatternAsk(CaptureAsk):
    """An ask for the values of an operation from which its pattern follows."""

    def __init__(
        self, port: str, options: Options, operation: str, named: bool, **place: Any
    ) -> None:
        super().__init__(port, options, operation=operation, **place)
        self.named = named  # True if it was asked for by the operation's name
        keep = partial(_keep_given, options, operation.partition("#")[0], port, named)
        self.keep = partial(keep, compact_snapshot)
        self.keep_copy = partial(keep, duplicate)


def _is_named(handler: CaptureHandler) -> bool:
    return cast(_PatternAsk, handler.ask).named


def _keep_given(
    options: Options, operation: str, port: str, named: bool, freeze: Any, value: Any
) -> Any:
    """Keep the values of a call from which its pattern follows."""
    if operation == SOFTMAX:
        # A softmax is over all sorts of things: of attention if over the last of 4 dimensions.
        if port == "output":
            value = value if named or value.ndim == 4 else None
        else:
            value = named or value.get("dim") in (-1, 3)
        return options.keeps(value, freeze)
    value = {_NAMES.get(name, name): one for name, one in value.items()}
    value = {name: value[name] for name in value if name not in _UNNEEDED[operation]}
    if "attn_mask" in value:  # one of torch.nn.attention.bias holds no numbers
        value["attn_mask"] = mask_of(value["attn_mask"], value["query"].device)
    return options.keeps(value, freeze)


class attention(capture):
    """Capture attention patterns of modules that call `scaled_dot_product_attention`.

    >>> from torch.nn import functional as F
    >>> class Attention(nn.Module):
    ...     def forward(self, q, k, v):
    ...         return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> model, x = Attention(), torch.zeros(1, 2, 3, 4)
    >>> with attention(model) as patterns:
    ...     _ = model(x, x, x)
    >>> patterns[""][0, 0, 1]
    tensor([0.5000, 0.5000, 0.0000])

    Args:
        model: any module.
        where: modules, in any way that `select` takes; by default all, the model itself included.
            `"h.0.attn/softmax"` names the operation.
        dtype: of the patterns; by default that of the queries. They are computed in float32.

    The model runs its fast kernels and returns, bit for bit, the same as without this. Queries,
    keys and masks are kept as detached snapshots; reading `patterns[place]`, `patterns[place, n]`
    or `patterns.calls(place)` computes (batch, heads, queries, keys). A pattern is the one before
    dropout, and zero in the rows of queries that may attend to nothing.

    It also supports `nn.MultiheadAttention` (in evaluation without gradients it leaves its fast
    path meanwhile, which may change the last bits), and attention written out, if its forward calls
    a softmax over the last of four dimensions: then the pattern is the output of the softmax.
    Modules that call none of these are left out; if all are, it raises an error.
    """

    _verb = "attention"
    _needs = ("core", "tools")
    _gives, _kept_as = "patterns", ""

    def __init__(
        self, model: nn.Module, where: Where | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        dtype = as_dtype(dtype, "attention")
        super().__init__(model, _Every() if where is None else where, detach=True)
        self._dtype = dtype
        self._patterns: Patterns | None = None

    def _resolve(self) -> list[Request]:
        requests = super()._resolve()
        self._by_name: set[Any] = set()
        for request in requests:
            modules = request.targets
            own = [new for old in modules for new in self._operations(request, old)]
            request.replace_targets(own)
            if modules and not request.targets:
                kinds = ", ".join(sorted({type(target.module).__name__ for target in modules}))
                raise NotHookable(
                    f"Attention patterns at {request.shown} were asked for.",
                    f"What is there are torch's own layers, which have none: {kinds}.",
                    "Name the modules whose forward computes attention.",
                )
        return requests

    def _operations(self, request: Request, target: Target) -> list[Target]:
        """Return the targets for the operations that may give a module's patterns."""
        if target.attribute is not None or target.port != "output" or target.parts:
            raise PlaceError(
                f"An attention pattern at {str(target.place)!r} was asked for.",
                "It belongs to a module as a whole, or to one of its operations.",
                f"Write {target.path!r}, or {target.path + '/' + SDPA!r}.",
            )
        path, module = unwrapped(target.path, target.module)
        named = target.operation
        if named is not None and named.partition("#")[0] not in _PORTS:
            raise PlaceError(
                f"An attention pattern at {str(target.place)!r} was asked for.",
                f"Patterns come from {', '.join(_PORTS)}.",
                f"Use hookline.capture(model, {str(target.place)!r}) if the value there is one.",
            )
        if named is None and not request.literal and not _may_attend(module):
            return []
        targets = [
            Target(module, path, port, (), None, operation)
            for operation in ([named] if named else _PORTS)
            for port in _PORTS[operation.partition("#")[0]]
        ]
        self._by_name |= {new.key for new in targets} if named else set()
        return targets

    def _ask_at(self, request: Request) -> list[tuple[Ask, list[NamedModule]]]:
        entries: list[tuple[Ask, list[NamedModule]]] = []
        for target in request.targets:
            named = target.key in self._by_name
            key = target.port, target.operation, named
            if key not in self._asks:
                operation = cast(str, target.operation)
                self._asks[key] = _PatternAsk(target.port, self._options, operation, named)
            entries.append((self._asks[key], [(target.path, target.module)]))
        return entries

    def _prepared(self) -> None:
        super()._prepared()
        self._patterns = Patterns(self.record, self._model, self._dtype)

    if TYPE_CHECKING:  # entering gives patterns, where a capture gives its record

        def __enter__(self) -> Patterns: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def _result(self) -> Any:
        return self._patterns

    # -- nothing there --------------------------------------------------------------------------

    def _verify(self) -> None:
        patterns = cast(Patterns, self._patterns)
        for request in self._requests:
            if not any(patterns.has(target) for target in request.targets):
                raise self._nothing(request)

    def _nothing(self, request: Request) -> NeverFired:
        """Return the error for modules without a pattern: similar modules, and what they call."""
        asked = f"Attention patterns at {request.shown} were asked for."
        tracer = self._tracer
        if tracer.foreign:
            found = "What is there was called from another thread or task than this."
            return NeverFired(asked, found, "Run the model where the `with` is.")
        called: dict[int, list[str]] = {one: tracer.called_in(one) for one in tracer.operations}
        named = {target.ident for target in request.targets if request.literal}
        looks = [step for step in walk(self._model) if id(step[1]) in named or _looks(*step)]
        looks.sort(key=lambda step: not called.get(id(step[1])))
        shown: list[str] = []
        for path, module in looks[:3]:
            names = ", ".join(called.get(id(module), ()))
            did = f"called {names or 'no torch function itself in this thread'}"
            did = did if id(module) in called else "was not looked at"
            shown.append(f"{path!r} ({type(module).__name__}, which {did})")
        path = escape(looks[0][0]) if looks else "path"
        if any("softmax" in called.get(id(module), ()) for _, module in looks):
            remedy = f"If what softmax gives is the pattern, name it: '{path}/softmax'."
        elif any(called.values()):
            remedy = (
                f"List what a module calls with hookline.select(model, '{path}/*', inputs=batch), "
                f"and capture what is the pattern; or use an implementation that calls {SDPA}."
            )
        else:
            remedy = "Run the model inside the `with`, in its thread."
        if not all(id(module) in called for _, module in looks):
            remedy = f"Look at every module: hookline.attention(model). Or: {remedy}"
        return NeverFired(
            asked,
            f"No module there called {SDPA}, {MHA}, or a softmax over the last of four "
            f"dimensions. What looks like attention: {'; '.join(shown) or 'nothing'}.",
            remedy,
        )


def _looks(path: str, module: nn.Module) -> bool:
    """Return True if a module looks like attention, by its names."""
    name = path.rpartition(".")[2].lower()
    return "attention" in type(module).__name__.lower() or name in ("attn", "attention")


def _may_attend(module: nn.Module) -> bool:
    """Return True if a module of a wildcard may call attention, unlike torch's other layers."""
    kind = type(module)
    ours = kind.__module__.startswith("torch.nn.") and "forward" not in module.__dict__
    return not ours or kind in (nn.MultiheadAttention, nn.Softmax)
