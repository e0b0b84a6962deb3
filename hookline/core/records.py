"""Look at values: `capture(model, *where)` gives a `Record`.

- `capture`: keep the values at places while a `with` block runs
- `Record`: what was captured, by place and call
"""

from __future__ import annotations

import copy
import difflib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, SupportsIndex, cast

import torch
from torch import Tensor, nn

from hookline.core import tables
from hookline.core.grammar import parse_port
from hookline.core.hooks import (
    ACTIVE,
    KEEP,
    KEYS,
    Context,
    Frame,
    Site,
    Tap,
    add_place,
    first_names,
    in_backward,
    named_place,
    silence,
)
from hookline.core.nested import (
    Path,
    get_part,
    leaves,
    map_leaves,
    only_tensor,
    set_part,
    show_path,
)
from hookline.core.places import Place, Request, Target, Where, resolve
from hookline.core.slices import take
from hookline.core.snapshots import duplicate, same_bits, settle, snapshot
from hookline.errors import (
    GradientNotAvailable,
    HooklineError,
    NeverFired,
    NotCaptured,
    SeveralCalls,
    ValueChanged,
)

__all__ = ["Record", "capture"]

# What is kept of a value: the value and what to check on reading. None: nothing (a snapshot). An
# int: the version of the tensor that it is. A dict: versions, and twins of parameters, by id.
Kept = tuple[Any, "int | dict[int, tuple[int, Tensor | None]] | None"]
Keep = Literal["all", "first", "last"]

_RECENT = 4  # calls whose gradients may still come, where not all are kept
_GONE = cast(nn.Module, None)  # a record does not keep modules alive
_NO_SITE = Site(None, None, None)


class _Stop(BaseException):
    """Ends a forward early. Not an Exception, so that a model's own `except Exception` lets it by."""

    def __init__(self, serial: int) -> None:
        super().__init__("hookline has what was asked for and ends the forward here")
        self.serial = serial


class _Options:
    """How values are kept."""

    __slots__ = ("at", "derives", "detach", "device", "dtype", "keep", "stop", "transform")

    def __init__(
        self,
        at: Any,
        transform: Callable[[Any], Any] | None,
        detach: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        keep: Keep,
        stop: bool,
    ) -> None:
        self.at = at
        self.transform = transform
        self.detach = detach
        self.device = device
        self.dtype = dtype
        self.keep = keep
        self.stop = stop
        given = (at, transform, device, dtype)
        self.derives = any(option is not None for option in given)

    def keeps(self, value: Any, freeze: Callable[[Tensor], Tensor] = snapshot) -> Kept:
        """What to keep of a value: attached if it requires grad, else a snapshot."""
        if self.derives:
            return self._nested(self._derived(value), settle)
        if type(value) is Tensor and (self.detach or not value.requires_grad):
            return freeze(value), None
        return self._nested(value, freeze)

    def _nested(self, value: Any, freeze: Callable[[Tensor], Tensor]) -> Kept:
        checks: dict[int, tuple[int, Tensor | None]] = {}

        def keep_leaf(leaf: Any) -> Any:
            if not issubclass(type(leaf), Tensor):  # isinstance would ask a proxy for its class
                # Opaque objects are kept by reference, but arrays may alias a tensor.
                return copy.copy(leaf) if hasattr(type(leaf), "__array_interface__") else leaf
            if self.detach or not leaf.requires_grad or leaf.is_inference():
                return freeze(leaf)
            # Fused optimisers change parameters without a new version: a twin shows it.
            twin = duplicate(leaf) if isinstance(leaf, nn.Parameter) else None
            checks[id(leaf)] = (leaf._version, twin)
            return leaf

        return map_leaves(keep_leaf, value), checks or None

    def _derived(self, value: Any) -> Any:
        """What is made of a value by at, transform, device and dtype; of its memory only that."""

        def start(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or (leaf.requires_grad and not self.detach):
                return leaf
            return snapshot(leaf) if self.transform is not None else leaf.detach()

        def finish(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = self.dtype
            if dtype is not None and not (leaf.is_floating_point() or leaf.is_complex()):
                dtype = None
            if dtype is not None and leaf.is_complex() and not dtype.is_complex:
                dtype = None  # a real dtype would cut off the imaginary part
            moved = leaf.to(device=self.device, dtype=dtype)
            return moved.clone() if moved.requires_grad and moved._is_view() else moved

        value = map_leaves(start, value)
        if self.at is not None:
            value = take(value, self.at)
        if self.transform is not None:
            value = self.transform(value)
        return map_leaves(finish, value)


class _CaptureTap(Tap):
    """Keeps the values at a target: one entry a call, or for gradients one a call and pass."""

    replaces = False
    freeze = staticmethod(snapshot)
    shared: Set[tuple[int, Path]] = frozenset()  # gradients that come in shares, to be derived from
    waiting = True  # for stop=True: until it has fired
    # Of gradients: the structure of the value by call, and what arrived by call and backward pass.
    shapes: Mapping[int, tuple[Any, list[Path]]] = MappingProxyType({})
    grads: Mapping[tuple[int, int], dict[Path, Kept]] = MappingProxyType({})

    def __init__(
        self, target: Target, context: weakref.ref[Context[Any]], options: _Options
    ) -> None:
        self.target = target
        self.context = context
        self.options = options
        self.kept: list[Kept] = []

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        if recomputed:
            return KEEP
        options = self.options
        if options.keep == "first" and self.fired:
            self.fired += 1
            return KEEP
        try:
            kept = options.keeps(value, self.freeze)
        except Exception as error:
            add_place(error, self)
            raise
        if frame is not None:  # an input: numbered when the call is complete
            frame.pending.append((self, kept))
        else:
            self.commit(kept)
        if options.stop and self.waiting:
            self.waiting = False
            context = cast("capture | None", self.context())
            if context is not None:
                context.arrived()
        return KEEP

    def commit(self, kept: Kept, late: bool = False) -> None:
        """Keep a value. Late ones are inputs of calls that never completed."""
        self.fired += 1
        if self.options.keep == "all" or not self.kept:
            self.kept.append(kept)
        elif self.options.keep == "last" and not late:
            self.kept[0] = kept

    def wants_late(self) -> bool:
        """Whether the input of a call that raised is of use."""
        return self.options.keep == "all" or not self.kept

    # -- gradients ------------------------------------------------------------------------------

    def several(self, index: int, path: Path) -> None:
        if self.options.derives:
            self.shared = {*self.shared, (index, path)}

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        shape = None if isinstance(value, Tensor) else map_leaves(lambda leaf: None, value)
        if not self.shapes:
            self.shapes = {}
        _store(self.shapes, index, (shape, [paths for _, paths in tensors]), self.options.keep)

    def explain(self, index: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        if not self.reasons:
            self.reasons = {}
        _store(self.reasons, (index, path), (reason, remedy), self.options.keep)

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        key = (index, in_backward())
        parts = self.grads.get(key)
        if parts is None:
            if self.grads and self.options.keep == "first":
                return None
            if not self.grads or self.options.keep == "last":
                self.grads = {}
            parts = cast("dict[Any, Any]", self.grads)[key] = {}
            self.fired += 1
        if path in parts and self.target.port.startswith("grad_input"):
            grad = parts[path][0] + grad  # the shares of an input come one by one
        # Shares are summed as they are; what is derived of them is derived on gathering.
        options = _PLAIN if (index, path) in self.shared else self.options
        try:
            parts[path] = options.keeps(grad)
        except Exception as error:
            add_place(error, self)
            raise
        return None

    def gathered(self) -> list[tuple[int, Kept | None]]:
        """The gradients with their calls, in order of calls, then of backward passes; None for a
        call without any.
        """
        self.lost()
        found: list[tuple[int, Kept | None]] = []
        for call in sorted({index for index, _ in self.grads} | set(self.shapes)):
            passes = [self.grads[key] for key in sorted(self.grads) if key[0] == call]
            found += [(call, self._gather(call, parts)) for parts in passes] or [(call, None)]
        keep = self.options.keep
        return found[:1] if keep == "first" else found[-1:] if keep == "last" else found

    def _gather(self, call: int, parts: dict[Path, Kept]) -> Kept:
        shape, groups = self.shapes.get(call, (None, [[()]]))
        for path in [path for path in parts if (call, path) in self.shared]:
            parts = {**parts, path: self.options.keeps(parts[path][0])}
        if () in parts:
            return parts[()]
        checks: dict[int, Any] = {}
        for paths in groups:
            for path in paths if paths[0] in parts else ():
                value, check = parts[paths[0]]
                shape = set_part(shape, path, value)
                checks |= check if isinstance(check, dict) else {}
        return shape, checks or None


def _store(entries: Any, key: Any, entry: Any, keep: Keep) -> None:
    """Remember something of a call; of the recent calls only, where not all are kept."""
    if keep == "first" and len(entries) >= _RECENT:
        return
    entries[key] = entry
    if keep == "last" and len(entries) > _RECENT:
        del entries[next(iter(entries))]


_PLAIN = _Options(None, None, False, None, None, "all", False)


class _OutputTap(_CaptureTap, Site):
    """The commonest tap: the whole output of a module, kept as it is. It is its own site."""

    def __init__(
        self,
        target: Target,
        context: weakref.ref[Context[Any]],
        options: _Options,
        owner: int | None,
    ) -> None:
        self.target = target
        self.context = context
        self.options = options
        self.module = target.module
        self.owner = owner
        self.detach = options.detach
        self.kept = []
        self.key = next(KEYS)

    def register(self, module: nn.Module) -> None:
        module._forward_hooks[self.key] = self.after_output

    def unregister(self, module: nn.Module) -> None:
        module._forward_hooks.pop(self.key, None)
        self.closed = True

    def after_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        if module is not self.module or (self.owner is not None and self.owner not in ACTIVE.get()):
            return self.stranger(module)
        if self.closed:
            return None
        if in_backward() == -1:
            self.outside = True
        elif self.outside:
            return None  # recomputed
        kept = self.kept
        if type(output) is not Tensor:
            kept.append(self.options.keeps(output))
        elif output.requires_grad and not self.detach:
            try:
                kept.append((output, output._version))
            except RuntimeError:  # inference tensors have no version
                kept.append((snapshot(output), None))
        else:
            kept.append((snapshot(output), None))
        return None


class capture(Context[_CaptureTap]):  # noqa: N801 - a verb that is used like a function
    """Keep the values at places while a `with` block runs.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with capture(model, "0", "1:input") as record:
    ...     _ = model(torch.zeros(5, 2))
    >>> record["0"].shape
    torch.Size([5, 3])
    >>> torch.equal(record["0"], record["1:input"])
    True

    Args:
        model: any module, or a plain tensor with the place ":grad".
        where: places, or anything else that `select` takes.
        at: an index such as `np.s_[:, -1]`, or a function of the value; only the slice is kept.
        transform: a function of the value (after `at`); what it returns is kept.
        detach: keep snapshots of values that require grad, too.
        device, dtype: where and how to keep tensors (floating-point ones, for dtype).
        stop: end the forward, and the rest of the `with` block, once every place has fired.
        keep: "all" calls, the "first" or the "last".
        threads: "own" sees the calls of the thread or task that entered; "all" sees every call.

    A value that requires grad is kept attached, the very tensor: it can be used in a loss and in
    `torch.autograd.grad`, and reading it raises `ValueChanged` if it was changed in place since
    (writes through `.data`, its storage or another library's alias are not seen; `detach=True`
    holds against all of them). Any other value is a snapshot. The model's results are bit for bit those without the capture.
    """

    _verb = "capture"
    _record: Record | None = None

    def __init__(
        self,
        model: nn.Module | Tensor,
        *where: Where,
        at: Any = None,
        transform: Callable[[Any], Any] | None = None,
        detach: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        stop: bool = False,
        keep: Keep = "all",
        threads: Literal["own", "all"] = "own",
    ) -> None:
        if not where:
            raise TypeError(
                "capture was given no place. Nothing would be captured. Name places after the "
                "model, such as '**' for every module."
            )
        if keep not in ("all", "first", "last"):
            raise ValueError(f"keep={keep!r} was asked for. It is 'all', 'first' or 'last'.")
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r} was asked for. It is 'own' or 'all'.")
        super().__init__(model, where)
        self._owned = threads == "own"
        self._options = _Options(at, transform, detach, device, dtype, keep, stop)
        self._waiting = 0
        self._stopping = False

    @property
    def record(self) -> Record:
        """What was captured since the last entering."""
        if self._record is None:
            raise NotCaptured(
                "The record of a capture was asked for.",
                "It was never entered.",
                "Use it in a `with` statement, or call .attach().",
            )
        return self._record

    def attach(self) -> capture:
        """Capture from now on, until `remove()`; `record` holds what came so far."""
        if getattr(self, "_options", _PLAIN).stop:
            self._entered = True
            raise ValueError(
                "stop=True was asked for together with attach(). Every forward would end early. "
                "Use it in a `with` statement."
            )
        return super().attach()

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> _CaptureTap:
        tap = _CaptureTap(target, ref, self._options)
        # Others may hold the address of parameters, buffers and the model's own arguments.
        if target.port == "value" or (target.module is self._model and "input" in target.port):
            tap.freeze = duplicate  # pyright: ignore
        return tap

    def _resolve(self) -> list[Request]:
        requests = super()._resolve()
        self._mixed = self._find_mixed(requests)
        return requests

    def _find_mixed(self, requests: list[Request]) -> set[int] | None:
        """The modules of which more than the whole output is asked for; None if options are."""
        options = self._options
        if options.derives or options.stop or options.keep != "all":
            return None
        return {
            target.ident
            for request in requests
            if request.targets[0].port != "output" or request.targets[0].parts
            for target in request.targets
        }

    def _place(self, target: Target, ref: weakref.ref[Context[Any]], owner: int | None) -> None:
        ident = target.ident
        if self._mixed is None or ident in self._mixed:
            super()._place(target, ref, owner)
            return
        tap = self._taps[target.key] = _OutputTap(target, ref, self._options, owner)
        self._sites[ident] = (target.module, tap)

    def _prepared(self) -> None:
        self._stopping = False
        self._waiting = len(self._taps) if self._options.stop else 0
        if self._options.stop and any("grad" in tap.target.port for tap in self._taps.values()):
            raise ValueError(
                "stop=True was asked for at a gradient place. Gradients come after the forward. "
                "Leave out stop, or the gradient places."
            )
        self._record = Record(list(self._taps.values()), self)

    def _result(self) -> Record:
        return self.record

    def arrived(self) -> None:
        """One more place has fired for the first time; after the last one the forward ends."""
        self._waiting -= 1
        if self._waiting == 0:
            self._stopping = True
            raise _Stop(self._serial)

    def _fired(self, tap: _CaptureTap) -> bool:
        if tap.kept or tap.grads:
            return True
        if tap.target.port == "grad":
            return True  # told on read
        return "grad" in tap.target.port and self._sites[tap.target.ident][1].count > 0

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        stopped = isinstance(error, _Stop) and error.serial == self._serial
        if self._open:
            self._leave()
            if error is None:
                try:
                    self._verify()
                except NeverFired as missing:
                    missing.record = self._record
                    raise
        return True if stopped else None

    def _verify(self) -> None:
        if self._stopping:
            raise NeverFired(
                "The forward was to end early (stop=True).",
                "Something in the model caught the stop and went on, probably a bare `except:`.",
                "Leave out stop=True; what was captured is in the record.",
            )
        super()._verify()

    def _stop(self) -> None:
        super()._stop()
        if self._record is not None:
            self._record._seal()


class Record:
    """What a capture has kept, by place and call. Reading never changes it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with capture(model, "*") as record:
    ...     _ = model(torch.zeros(1, 2)), model(torch.ones(1, 2))
    >>> record
    Record of 2 places, 4 values, 48 B
      place  calls  shape   dtype
      0      2      (1, 3)  float32  attached
      1      2      (1, 3)  float32  attached
    >>> record["0", 1].shape, len(record.calls("1"))
    (torch.Size([1, 3]), 2)
    """

    def __init__(self, taps: list[_CaptureTap], source: capture | None) -> None:
        self._taps = taps
        # While it is open; weakly, so that an interrupted capture is undone at once.
        self._source = None if source is None else weakref.ref(source)
        model = None if source is None else source._model
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._sites: dict[int, Site] = {}  # for the reasons of what never fired
        self._refused: dict[Place, str] = {}
        self._modules: list[weakref.ref[nn.Module]] = []
        self._by_name: dict[str, _CaptureTap] | None = None
        self._by_key: dict[Any, list[int]] | None = None
        self._places: dict[Place, _CaptureTap] | None = None

    def _seal(self) -> None:
        """The capture has ended: let go of it and of the model."""
        source = None if self._source is None else self._source()
        if source is None:
            return
        self._source = None
        sites = source._sites
        for tap in self._taps:
            target = tap.target
            if tap.guards:
                tap.lost()
            if not (tap.kept or tap.grads):
                site = self._sites[target.ident] = sites[target.ident][1]
                site.module = None
            self._modules.append(weakref.ref(target.module))
            target.module = _GONE
            if isinstance(tap, _OutputTap):
                tap.module = None
        for request in source._requests:
            if request.refused:
                self._refused.update(request.refused)

    # -- reading --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """The value at a place, or with `record[place, n]` that of its n-th call."""
        where, call = _split(key)
        tap, parts = self._find(where)
        kept = self._kept(tap)
        if call is None:
            if len(kept) > 1:
                place = self._place(tap)
                raise SeveralCalls(
                    f"The value at {str(place)!r} was asked for.",
                    f"There are {len(kept)} of them, one a call.",
                    f"Read record[{str(place)!r}, n], record.calls({str(place)!r}), or capture "
                    f"with keep='last'.",
                )
            call = 0
        if not -len(kept) <= call < len(kept):
            raise NotCaptured(
                f"Call {call} at {str(self._place(tap))!r} was asked for.",
                f"There are {len(kept)} calls, from 0.",
                "record.calls(place) gives all of them.",
            )
        return self._read(tap, kept[call][1], parts, kept[call][0])

    def calls(self, where: Any) -> list[Any]:
        """The values at a place, always a list: one a call; for gradients one a call and pass."""
        tap, parts = self._find(where)
        return [
            None if kept is None else self._read(tap, kept, parts, call)
            for call, kept in self._kept(tap)
        ]

    def of_call(self, where: Any, call: int) -> Any:
        """The value of one call of the module; an error if several backward passes gave one."""
        tap, parts = self._find(where)
        found = [kept for index, kept in self._kept(tap) if index in (call, -1)]
        if len(found) == 1:
            return self._read(tap, found[0], parts, call)
        raise NotCaptured(
            f"Call {call} at {str(self._place(tap))!r} was asked for.",
            f"The record holds {len(found)} values of that call.",
            "Capture a run with the same calls, and one backward for each.",
        )

    def tensor(self, where: Any) -> Tensor:
        """The only tensor in the value at a place; an error that lists the parts otherwise."""
        return only_tensor(self[where], f"The value at {where!r}")[1]

    def cat(self, where: Any, dim: int = 0) -> Tensor:
        """The tensors of all calls at a place, joined along a dimension."""
        return torch.cat(self._tensors(where), dim)

    def stack(self, where: Any, dim: int = 0) -> Tensor:
        """The tensors of all calls at a place, stacked along a new dimension."""
        return torch.stack(self._tensors(where), dim)

    def _tensors(self, where: Any) -> list[Tensor]:
        return [only_tensor(value, f"The value at {where!r}")[1] for value in self.calls(where)]

    def places(self) -> list[Place]:
        """The places that hold values, in model order."""
        return [place for place, tap in self._named().items() if tap.kept or tap.grads]

    def items(self) -> Iterator[tuple[Place, Any]]:
        """Every place with its value, once for each call."""
        for place in self.places():
            for value in self.calls(place):
                yield place, value

    def unfired(self) -> dict[Place, str]:
        """The places that were asked for and hold nothing, with the reason."""
        missing = {
            place: self._why(tap)
            for place, tap in self._named().items()
            if not (tap.kept or tap.grads)
        }
        return {**missing, **self._refused}

    def __contains__(self, where: Any) -> bool:
        try:
            tap, _ = self._find(_split(where)[0])
        except HooklineError:
            return False
        return bool(tap.kept or tap.grads)

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places())

    def __len__(self) -> int:
        return len(self.places())

    # -- the whole ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, each counted once."""
        found = {id(t): t for _, kept in self._entries() for _, t in leaves(kept[0])}
        return sum(tables.bytes_of(tensor) for tensor in found.values())

    def to(self, device: torch.device | str) -> Record:
        """The same record with its tensors on another device."""

        def move(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        moved: list[_CaptureTap] = []
        for tap in self._taps:
            other = _CaptureTap(tap.target, tap.context, tap.options)
            other.fired, other.reasons, other.shapes = tap.fired, tap.reasons, tap.shapes
            for n, kept in enumerate(tap.kept):
                other.kept.append((map_leaves(move, self._read(tap, kept, (), n)), None))
            other.grads = {}
            for key, parts in tap.grads.items():
                cast("dict[Any, Any]", other.grads)[key] = {
                    path: (move(kept[0]), None) for path, kept in parts.items()
                }
            moved.append(other)
        record = Record(moved, None)
        record._model, record._refused = self._model, self._refused
        record._sites, record._modules = self._sites, self._modules
        return record

    def _entries(self) -> Iterator[tuple[_CaptureTap, Kept]]:
        for tap in self._named().values():
            for kept in [k for _, k in tap.gathered()] if tap.grads else tap.kept:
                if kept is not None:
                    yield tap, kept

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table())

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [("place", "calls", "shape", "dtype", "")]
        count = 0
        found: dict[int, list[Kept]] = {}
        for tap, kept in self._entries():
            found.setdefault(id(tap), []).append(kept)
        for place, tap in self._named().items():
            entries = found.get(id(tap), [])
            count += len(entries)
            if not entries:
                rows.append((str(place), "0", "-", "-", "never fired"))
            else:
                rows += tables.rows_of(place, [entry[0] for entry in entries], entries[0][1])
        size = tables.show_bytes(self.nbytes)
        title = f"Record of {len(self.places())} places, {count} values, {size}"
        return title, rows

    # -- finding --------------------------------------------------------------------------------

    def _named(self) -> dict[Place, _CaptureTap]:
        """The taps by place, in model order."""
        if self._places is not None:
            return self._places
        model = None if self._model is None else self._model()
        names = first_names(model)
        if self._source is None and len(self._modules) == len(self._taps):
            alive = {id(ref()) for ref in self._modules}  # another may have got the id since
            names = {ident: path for ident, path in names.items() if ident in alive}
        order = {ident: n for n, ident in enumerate(names)}
        taps = sorted(self._taps, key=lambda tap: order.get(tap.target.ident, len(order)))
        named = {named_place(tap.target, names): tap for tap in taps}
        if self._source is None:
            self._places = named
        return named

    def _place(self, tap: _CaptureTap) -> Place:
        return next(place for place, other in self._named().items() if other is tap)

    def _find(self, where: Any) -> tuple[_CaptureTap, Path]:
        """The tap that holds a place, and the parts to take of its values."""
        if self._by_name is None:
            self._by_name = {tap.target.place: tap for tap in reversed(self._taps)}
        if isinstance(where, str) and where in self._by_name:
            return self._by_name[where], ()
        if isinstance(where, nn.Module):
            found = self._holding(Target(where, ""))
            if found is not None:
                return found
        model = None if self._model is None else self._model()
        if model is not None:
            targets = [t for request in resolve(model, (where,)) for t in request.targets]
            if len(targets) > 1:
                raise NotCaptured(
                    f"{where!r} was asked of a record.",
                    f"It matches {len(targets)} places.",
                    "Read one place at a time; record.items() gives all.",
                )
            found = self._holding(targets[0])
            if found is not None:
                return found
        elif isinstance(where, str):  # the model is gone: its names are what is left
            for tap in self._taps:
                place = tap.target.place
                if where.startswith(place) and where[len(place) :].startswith("["):
                    return tap, parse_port(where[len(place) :])[1]
        held = [str(place) for place in self._named()]
        close = difflib.get_close_matches(str(where), held, n=3, cutoff=0.4) or held[:6]
        raise NotCaptured(
            f"{where!r} was asked of a record.",
            f"It was not captured. Closest: {', '.join(map(repr, close))}.",
            "record.places() lists what is there; name the place in capture(model, ...).",
        )

    def _holding(self, target: Target) -> tuple[_CaptureTap, Path] | None:
        if self._by_key is None:
            self._by_key = {}
            for n, tap in enumerate(self._taps):
                self._by_key.setdefault(tap.target.key[:3], []).append(n)
        for n in self._by_key.get(target.key[:3], ()):
            tap = self._taps[n]
            parts = tap.target.parts
            if self._modules and target.attribute is None:
                if self._modules[n]() is not target.module:
                    continue  # another module has got the id of one that is gone
            if target.parts[: len(parts)] == parts:
                return tap, target.parts[len(parts) :]
        return None

    def _why(self, tap: _CaptureTap) -> str:
        source = None if self._source is None else self._source()
        if source is not None:
            return source.reason(tap)
        model = None if self._model is None else self._model()
        site = self._sites.get(tap.target.ident)
        return silence(tap, site or _NO_SITE, model, first_names(model))

    def _kept(self, tap: _CaptureTap) -> list[tuple[int, Kept | None]]:
        gradient = "grad" in tap.target.port
        kept = tap.gathered() if gradient else list(enumerate(tap.kept))
        if any(entry is not None for _, entry in kept):
            return kept
        place = str(self._place(tap))
        if gradient:
            raise GradientNotAvailable(
                f"The gradient at {place!r} was asked for:",
                self._why(tap),
                "Run the forward and the backward inside the `with`.",
            )
        raise NeverFired(
            f"The value at {place!r} was asked for:",
            self._why(tap),
            "record.unfired() lists all places without values.",
        )

    def _read(self, tap: _CaptureTap, kept: Kept | None, parts: Path, call: int) -> Any:
        """A value, or a part of it, if it is what it was when it was captured."""
        refused = {path: why for (n, path), why in tap.reasons.items() if n == call}
        for path, why in refused.items() if "grad" in tap.target.port else ():
            if kept is None or (path and path[: len(parts)] == parts[: len(path)]):
                raise GradientNotAvailable(
                    f"The gradient at {str(self._place(tap)) + show_path(path)!r} was asked for:",
                    *why,
                )
        if kept is None:
            raise GradientNotAvailable(
                f"The gradient at {str(self._place(tap))!r}, call {call}, was asked for:",
                "none arrived for that call.",
                "record.calls(place) has None there.",
            )
        value, checks = kept
        try:
            value = get_part(value, parts) if parts else value
        except LookupError as error:
            raise NotCaptured(
                f"{show_path(parts)} of the value at {str(self._place(tap))!r} was asked for:",
                f"{error}.",
                "Read the place without the part to see the whole.",
            ) from None
        if isinstance(checks, int):
            checks = {id(value): (checks, None)}
        for path, tensor in leaves(value):
            found = _unreadable(tensor, *(checks or {}).get(id(tensor), (None, None)))
            if found is not None:
                raise ValueChanged(
                    f"The value at {str(self._place(tap)) + show_path((*parts, *path))!r} was "
                    f"asked for.",
                    *found,
                )
        return value


def _unreadable(tensor: Tensor, version: int | None, twin: Tensor | None) -> tuple[str, str] | None:
    """Why a tensor is not what it was when it was captured, and what to do; None if it is."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor):
        level, current = functorch.maybe_get_level(tensor), functorch.maybe_current_level()
        if current is not None and 0 < level <= current:
            return None
        return (
            "It was captured inside a transform of torch.func (vmap, grad), which is over: its "
            "tensors live no longer.",
            "Return it from the transformed function, or capture outside.",
        )
    if version is not None:
        changes = tensor._version - version
        if changes or (twin is not None and not same_bits(tensor.detach(), twin)):
            return (
                "It was kept attached to the graph, and was changed in place since "
                f"({changes or 'at least 1'} times).",
                "Capture with detach=True to keep it as it was, or read it before the change.",
            )
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            if not tensor.untyped_storage().nbytes():
                return (
                    "It was kept attached to the graph, and its memory was freed since.",
                    "Capture with detach=True to keep a copy.",
                )
    return None


def _split(key: Any) -> tuple[Any, int | None]:
    if isinstance(key, tuple) and len(cast("tuple[Any, ...]", key)) == 2:
        where, call = cast("tuple[Any, Any]", key)
        if isinstance(call, SupportsIndex):
            return where, operator.index(call)
    return key, None
