"""What a capture has kept: a `Record`.

- `Record`: values by place and call; reading checks that they are what they were
- `captured(record)`, `captured_by_place(record)`, `model_of(record)`, `first_value(record, where)`:
  what it holds, for the tools

The class is long because all of its ways to read share the same checks.
"""

from __future__ import annotations

import copy
import difflib
import operator
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn

from hookline.captures.entries import Order, checks_of
from hookline.engine.call_choice import Calls, ranges
from hookline.engine.reasons import reason
from hookline.errors import (
    GradientNotAvailable,
    HooklineError,
    NeverFired,
    NotCaptured,
    SeveralCalls,
    ValueChanged,
)
from hookline.places.grammar import Place, is_gradient, parse_port
from hookline.places.resolution import Target, resolve
from hookline.places.tree import find, first_names
from hookline.values import tables
from hookline.values.conversions import as_device
from hookline.values.nested import Path, get_part, leaves, map_leaves, only_tensor, show_path
from hookline.values.sharding import has_plans, spread
from hookline.values.snapshots import unreadable

if TYPE_CHECKING:
    from hookline.captures.entries import Entries, Kept
    from hookline.captures.keeping import CaptureHandler
    from hookline.engine.tracer import Tracer

__all__ = ["Record", "captured", "captured_by_place", "first_value", "model_of"]

_UNFIRED = "record.unfired() lists all places without values."


class Record:
    """The values of a capture, by place and call. Reading never changes it.

    >>> from hookline import capture
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

    def __init__(
        self,
        tracer: Tracer | None,
        handlers: Sequence[CaptureHandler] = (),
        refused: Mapping[Place, str] = MappingProxyType({}),
    ) -> None:
        # Either the tracer of a capture, or what was kept of one, as when a record is loaded.
        self._tracer = tracer
        self._held = handlers
        # While the capture is open; weakly, so that an interrupted capture is undone at once.
        self._open = tracer is not None
        model = None if tracer is None else tracer.places.model
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._refused = refused  # what a wildcard matched and no hook can see, with the reason
        # Ways to find a handler, once they were needed.
        self._by_key: dict[Any, list[int]] | None = None
        self._places: dict[Place, CaptureHandler] | None = None
        self._lock = threading.RLock()  # two threads may be the first to read

    def seal(self) -> None:
        """Let go of the capture, which has ended, and of the model."""
        if not self._open:
            return
        tracer = cast("Tracer", self._tracer)
        if has_plans() and tracer.places.have_other_hooks():
            for handler in self._handlers:
                handler.note_layouts()
        for handler in tracer.handlers.values():
            handler.explain_lost()
            cast("CaptureHandler", handler).release()
        self._open = False
        tracer.close()

    @property
    def _handlers(self) -> Sequence[CaptureHandler]:
        """The values of each place, with all that was logged so far."""
        if self._tracer is None:
            return self._held
        if not self._open and self._held:
            return self._held
        with self._lock:
            found = cast("list[CaptureHandler]", self._tracer.all_handlers())
            if not self._open:
                self._held = found
        return found

    # -- reading --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """Return the value at a place, or with `record[place, n]` that of its n-th call.

        Of a capture with `calls=`, n is the number that the call has among all.
        """
        where, call = _split(key)
        handler, parts = self._find(where)
        index, kept = self._pick(handler, call)
        return self._read(handler, kept, parts, index)

    def _pick(self, handler: CaptureHandler, call: int | None) -> tuple[int, Kept | None]:
        """Return what is kept of one call, or of the only one."""
        kept = self._kept(handler)
        if handler.ask.calls is not None and call is not None and call >= 0:
            return self._numbered(handler, kept, call)
        if call is None or handler.ask.calls is not None:
            self._check_told(handler)
        if call is None:
            if len(kept) > 1:
                place = str(self._place(handler))
                more = " and backward pass" if is_gradient(handler.target.port) else ""
                found = f"There are {len(kept)} of them, one for each call{more}."
                remedy = f"Read record[{place!r}, n], record.calls({place!r}), or capture with "
                asked = f"The value at {place!r} was asked for."
                raise SeveralCalls(asked, found, f"{remedy}keep='last'.")
            call = 0
        if not -len(kept) <= call < len(kept):
            asked = f"Call {call} at {str(self._place(handler))!r} was asked for."
            found = f"Calls that were kept: {len(kept)}, counted from 0."
            raise NotCaptured(asked, found, "record.calls(place) gives all of them.")
        return kept[call + len(kept) if call < 0 else call]

    def _numbered(
        self, handler: CaptureHandler, kept: Entries, call: int
    ) -> tuple[int, Kept | None]:
        """Return what is kept of a call, where only some were asked for."""
        found = kept.of_call(call)
        if len(found) == 1:
            return call, found[0]
        place, calls = str(self._place(handler)), cast("Calls", handler.ask.calls)
        asked = f"Call {call} at {place!r} was asked for."
        if found:
            several = f"There are {len(found)} gradients of it, one a backward."
            raise SeveralCalls(asked, several, f"Read record.numbered({place!r}).")
        if call in handler.unknown_steps:
            raise NotCaptured(
                asked,
                f"It cannot be told: {handler.unknown_steps[call].found}",
                handler.unknown_steps[call].remedy,
            )
        never = calls.step is None and calls.cover(call)
        why = "It never came." if never else f"The capture was for others: calls={calls.shown}."
        held = ranges([number for number, one in kept if one is not None])
        raise NotCaptured(asked, why, f"Read one of those that were kept: {held}.")

    def _check_told(self, handler: CaptureHandler) -> None:
        """Refuse to read all calls, if some may be missing."""
        for call, why in handler.unknown_steps.items():
            calls = cast("Calls", handler.ask.calls).shown
            asked = f"The calls {calls} at {str(self._place(handler))!r} were asked for."
            raise NotCaptured(asked, f"Call {call} cannot be told: {why.found}", why.remedy)

    def calls(self, where: Any) -> list[Any]:
        """Return the values at a place, one for each call, and backward pass of gradients.

        Of a capture with `calls=`, one for each call that was asked for; see `numbered`.
        """
        return [value for _, value in self.numbered(where)]

    def numbered(self, where: Any) -> list[tuple[int, Any]]:
        """Return the values at a place with the numbers by which `record[place, n]` reads them."""
        handler, parts = self._find(where)
        kept = self._kept(handler)
        self._check_told(handler)
        found: list[tuple[int, Any]] = []
        for position, (call, one) in enumerate(kept):
            number = position if handler.ask.calls is None else call
            found.append((number, one and self._read(handler, one, parts, call)))
        return found

    def of_call(self, where: Any, call: int) -> Any:
        """Return the value of one call; raise NotCaptured if several backward passes gave one."""
        handler, parts = self._find(where)
        found = self._kept(handler).of_call(call)
        if len(found) == 1:
            return self._read(handler, found[0], parts, call)
        asked = f"Call {call} at {str(self._place(handler))!r} was asked for."
        remedy = "Capture a run with the same calls, and one backward for each; or give the value."
        raise NotCaptured(asked, f"The record holds {len(found)} values of that call.", remedy)

    def slicing(self, where: Any) -> tuple[str | None, bool]:
        """Return the slice of each value that is kept, as text, and whether it was transformed."""
        return self._find(where)[0].slicing

    def tensor(self, where: Any) -> Tensor:
        """Return the only tensor in the value at a place; an error otherwise lists the parts."""
        return only_tensor(self[where], lambda: f"The value at {where!r}")[1]

    def cat(self, where: Any, dim: int = 0) -> Tensor:
        """Return the tensors of all calls at a place, joined along a dimension."""
        return torch.cat(self._tensors(where), dim)

    def stack(self, where: Any, dim: int = 0) -> Tensor:
        """Return the tensors of all calls at a place, stacked along a new dimension."""
        return torch.stack(self._tensors(where), dim)

    def placement(self, where: Any, call: int = 0) -> tuple[Any, ...] | None:
        """Return how the only tensor at a place is spread over ranks, by mesh dimension.

        Those of a DTensor, or those that the plan of `parallelize_module` gives what a module
        returns: a plain tensor that is only this rank's part. None if neither is known, as for all
        tensors of a model that is not spread.
        """
        handler, parts = self._find(where)
        kept = self._pick(handler, call)[1]
        if kept is None:
            return None
        path, tensor = only_tensor(get_part(kept[0], parts), lambda: f"The value at {where!r}")
        return self._spread(handler, (*parts, *path), tensor)

    def _spread(
        self, handler: CaptureHandler, path: Path, tensor: Tensor
    ) -> tuple[Any, ...] | None:
        if self._open:
            handler.note_layouts()
        return spread(tensor, handler.layouts, (*handler.target.parts, *path))

    def _tensors(self, where: Any) -> list[Tensor]:
        # A call that has no value is read, for the error that says why.
        found = [self[where, n] if v is None else v for n, v in self.numbered(where)]
        return [only_tensor(value, lambda: f"The value at {where!r}")[1] for value in found]

    def places(self) -> list[Place]:
        """Return the places that hold values, in model order."""
        return [place for place, handler in self._named().items() if handler.holds]

    def keys(self) -> list[Place]:
        """Return the places, as `places()` does; with it, `dict(record)` works."""
        return self.places()

    def items(self) -> Iterator[tuple[Place, Any]]:
        """Yield every place with its value, once for each call."""
        for place in self.places():
            for value in self.calls(place):
                yield place, value

    def values(self) -> Iterator[Any]:
        """Yield every value, once for each call, in the order of `items()`."""
        return (value for _, value in self.items())

    def unfired(self) -> dict[Place, str]:
        """Return the places that were asked for and hold nothing, with the reason."""
        empty = {place: one for place, one in self._named().items() if not one.holds}
        missing = {place: " ".join(self._why(one)).strip() for place, one in empty.items()}
        return {**missing, **self._refused}

    def __contains__(self, where: Any) -> bool:
        where, call = _split(where)
        try:
            handler, parts = self._find(where)
            kept = self._kept(handler)
            for _, one in kept if parts else ():
                get_part(None if one is None else one[0], parts)
        except (HooklineError, LookupError):
            return False
        if call is not None and call >= 0 and handler.ask.calls is not None:
            return bool(kept.of_call(call))
        return call is None or -len(kept) <= call < len(kept)

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places())

    def __len__(self) -> int:
        return len(self.places())

    # -- the whole ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, each counted once."""
        entries = [kept for handler in self._handlers for kept in handler.all_kept()]
        found = {id(tensor): tensor for value, _ in entries for _, tensor in leaves(value)}
        return sum(tables.bytes_of(tensor) for tensor in found.values())

    def to(self, device: torch.device | str) -> Record:
        """Return the record with its tensors on another device."""
        place = cast(torch.device, as_device(device, "record.to"))

        def move(leaf: Any) -> Any:
            return leaf.to(place) if isinstance(leaf, Tensor) else leaf

        moved: list[CaptureHandler] = []
        for handler in self._handlers:
            other = copy.copy(handler)
            other.values, other.grads, other.order = [], {}, Order()
            for number, kept in handler.values:
                if kept is not None:
                    value = map_leaves(move, self._read(handler, kept, (), number))
                    kept = value, checks_of(kept)
                other.values.append((number, kept))
            for key, parts in handler.grads.items():
                other.grads[key] = {p: (move(one[0]), checks_of(one)) for p, one in parts.items()}
            moved.append(other)
        record = Record(None, moved, self._refused)
        record._model = self._model
        return record

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "A Record was to be copied or pickled. It holds the very tensors, with their graphs. "
            "Write it with hookline.save_record(record, folder), or take the values out of it."
        )

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table(), self)

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [("place", "calls", "shape", "dtype", "")]
        count = 0
        for place, handler in self._named().items():
            entries = handler.all_kept()
            count += len(entries)
            if not entries:
                rows.append((str(place) or "''", "0", "-", "-", "never fired"))
            else:
                values = [entry[0] for entry in entries]
                calls = str(len(entries)) + self._which(handler)
                spread = partial(self._spread, handler)
                rows += tables.rows_of(place, values, entries[0][1], spread, calls)
        n, size = len(self.places()), tables.show_bytes(self.nbytes)
        title = f"Record of {n} place{'s' * (n != 1)}, {count} value{'s' * (count != 1)}, {size}"
        return title, rows

    def _which(self, handler: CaptureHandler) -> str:
        """Return the numbers of the calls that are kept, if others were not asked for."""
        if handler.ask.calls is None:
            return ""
        kept = [number for number, one in handler.entries() if one is not None]
        return f" ({ranges(kept)})"

    # -- finding --------------------------------------------------------------------------------

    def _named(self) -> dict[Place, CaptureHandler]:
        """Return the handlers by place, in model order."""
        if self._places is not None:
            return self._places
        model = None if self._model is None else self._model()
        names = first_names(model)
        if not self._open:  # another module may have got the id of one that is gone
            targets = [handler.target for handler in self._handlers]
            same = {target.ident for target in targets if self._is_there(target)}
            names = {ident: path for ident, path in names.items() if ident in same}
        order = {ident: n for n, ident in enumerate(names)}
        handlers = sorted(self._handlers, key=lambda one: order.get(one.target.ident, len(order)))
        named = {handler.target.place_among(names): handler for handler in handlers}
        if not self._open:
            self._places = named
        return named

    def _place(self, handler: CaptureHandler) -> Place:
        return next(place for place, other in self._named().items() if other is handler)

    def _find(self, where: Any) -> tuple[CaptureHandler, Path]:
        """Return what was captured at a place, and the parts to take of its values."""
        if isinstance(where, str):
            found = self._spelled(where)
            if found is not None:
                return found, ()
            if where in self._refused:
                raise _never_fired(where, self._refused[cast(Place, where)])
        if isinstance(where, nn.Module):
            held = self._holding(Target(where, ""))
            if held is not None:
                return held
        model = None if self._model is None else self._model()
        if model is not None:
            held = self._resolved(model, where)
        else:  # its names are what is left
            held = self._named_so(where) if isinstance(where, str) else None
        if held is None:
            raise self._not_captured(where)
        return held

    def _spelled(self, text: str) -> CaptureHandler | None:
        """Return what was captured at a place that is spelled as it was asked for."""
        if self._tracer is None:
            return next((one for one in self._held if str(one.target.place) == text), None)
        key = self._tracer.places.key_at(text)
        return None if key is None else cast("CaptureHandler", self._tracer.read(*key))

    def _resolved(self, model: nn.Module, where: Any) -> tuple[CaptureHandler, Path] | None:
        """Find a place in the model, and what was captured there."""
        targets = [t for request in resolve(model, (where,)) for t in request.targets]
        if len(targets) > 1:
            found = f"It matches {len(targets)} places."
            remedy = "Read one place at a time; record.items() gives all."
            raise NotCaptured(f"{where!r} was asked of a record.", found, remedy)
        return self._holding(targets[0])

    def _named_so(self, where: str) -> tuple[CaptureHandler, Path] | None:
        """Find a place by its name, where the model is gone."""
        if where in self._named():
            return self._named()[cast(Place, where)], ()
        for handler in self._handlers:
            place = handler.target.place
            if where.startswith(place) and where[len(place) :].startswith("["):
                return handler, parse_port(where[len(place) :])[1]
        return None

    def _not_captured(self, where: Any) -> NotCaptured:
        held = [str(place) for place in self._named()]
        close = difflib.get_close_matches(str(where), held, n=3, cutoff=0.4) or held[:6]
        found = f"It was not captured. Closest: {', '.join(map(repr, close))}."
        remedy = "record.places() lists what is there; name the place in capture(model, ...)."
        return NotCaptured(f"{where!r} was asked of a record.", found, remedy)

    def _is_there(self, target: Target) -> bool:
        """Return True if the module of a target stands in the model where it was found."""
        model = None if self._model is None else self._model()
        if model is None or target.attribute is not None:
            return model is not None
        found = find(model, tuple(target.path.split(".")) if target.path else ())
        return bool(found) and id(found[0][1]) == target.ident

    def _holding(self, target: Target) -> tuple[CaptureHandler, Path] | None:
        if self._by_key is None:
            by_key: dict[Any, list[int]] = {}
            for n, handler in enumerate(self._handlers):
                by_key.setdefault(handler.target.key[:3], []).append(n)
            self._by_key = by_key
        for n in self._by_key.get(target.key[:3], ()):
            handler = self._handlers[n]
            parts = handler.target.parts
            if not self._open and not self._is_there(handler.target):
                continue
            if target.parts[: len(parts)] == parts:
                return handler, target.parts[len(parts) :]
        return None

    def _why(self, handler: CaptureHandler) -> tuple[str, str]:
        """Explain why a place holds nothing; return what was found, and what to do."""
        model = None if self._model is None else self._model()
        return reason(handler, model, any(other.holds for other in self._handlers))

    def _kept(self, handler: CaptureHandler) -> Entries:
        """Return what was kept at a place; an error if that is nothing."""
        gradient = is_gradient(handler.target.port)
        kept = handler.entries()
        if handler.holds:
            return kept
        if not gradient:
            raise _never_fired(self._place(handler), *self._why(handler))
        asked = f"The gradient at {str(self._place(handler))!r} was asked for:"
        found, remedy = self._why(handler)
        raise GradientNotAvailable(asked, found, remedy or _UNFIRED)

    def _read(self, handler: CaptureHandler, kept: Kept | None, parts: Path, call: int) -> Any:
        """A value, or a part of it, if it is what it was when it was captured."""
        for path, why in handler.reasons.get(call, {}).items():
            if kept is None or (path and path[: len(parts)] == parts[: len(path)]):
                gradient = is_gradient(handler.target.port)
                place = str(self._place(handler)) + show_path(path)
                asked = f"The {'gradient' if gradient else 'value'} at {place!r} was asked for:"
                raise (GradientNotAvailable if gradient else NotCaptured)(asked, *why)
        if kept is None:
            asked = f"The gradient at {str(self._place(handler))!r}, call {call}, was asked for:"
            found, remedy = "none arrived for that call.", "record.calls(place) has None there."
            raise GradientNotAvailable(asked, found, remedy)
        value, checks = kept[0], checks_of(kept)
        try:
            value = get_part(value, parts) if parts else value
        except LookupError as error:
            place = str(self._place(handler))
            remedy = "Read the place without the part to see it all."
            asked = f"{show_path(parts)} of the value at {place!r} was asked for:"
            raise NotCaptured(asked, f"{error}.", remedy) from None
        for path, tensor in leaves(value):
            found = unreadable(tensor, *checks.get(id(tensor), (None, None)))
            if found is not None:
                raise ValueChanged(
                    f"The value at {str(self._place(handler)) + show_path((*parts, *path))!r} was "
                    f"asked for.",
                    *found,
                )
        return value


def captured(record: Record) -> Sequence[CaptureHandler]:
    """Return what a record holds, place by place, in the order in which it was asked for."""
    return record._handlers


def model_of(record: Record) -> nn.Module | None:
    """Return the model of a record, if it is still there."""
    return None if record._model is None else record._model()


def first_value(record: Record, where: Any) -> Any:
    """Return the value of the first call at a place that gave one."""
    handler, parts = record._find(where)
    found = (entry for entry in record._kept(handler) if entry[1] is not None)
    call, kept = next(found, (0, None))
    return record._read(handler, kept, parts, call)


def captured_by_place(record: Record) -> Mapping[Place, CaptureHandler]:
    """Return what a record holds by place, in model order."""
    return record._named()


def _never_fired(place: str, found: str, remedy: str = "") -> NeverFired:
    return NeverFired(f"The value at {str(place)!r} was asked for:", found, remedy or _UNFIRED)


def _split(key: Any) -> tuple[Any, int | None]:
    if isinstance(key, tuple) and len(cast("tuple[Any, ...]", key)) == 2:
        where, call = cast("tuple[Any, Any]", key)
        if isinstance(call, SupportsIndex):
            return where, operator.index(call)
    return cast(Any, key), None
