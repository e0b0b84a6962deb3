"""What a capture has kept: a `Record`.

- `Record`: values by place and call; reading checks that they are what they were

Past the usual length: it is one class, whose ways to read share the same checks, in one file.
"""

from __future__ import annotations

import difflib
import operator
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn

from hookline.core.calls import Calls, ranges
from hookline.core.gradients import NONE_CAME
from hookline.core.hooks import first_names, named_place, needs_backward, silence
from hookline.core.sites import Site
from hookline.errors import (
    GradientNotAvailable,
    HooklineError,
    NeverFired,
    NotCaptured,
    SeveralCalls,
    ValueChanged,
)
from hookline.places.grammar import parse_port
from hookline.places.resolution import Place, Target, resolve
from hookline.places.tree import find
from hookline.values import tables
from hookline.values.conversions import as_device
from hookline.values.nested import Path, get_part, leaves, map_leaves, only_tensor, show_path
from hookline.values.sharding import has_plans, spread
from hookline.values.snapshots import unreadable

if TYPE_CHECKING:
    from hookline.records.captures import capture
    from hookline.records.keeping import CaptureTap
    from hookline.records.logs import Log
    from hookline.records.positions import Entries, Kept

__all__ = ["Record"]

_NO_SITE = Site(None, None, None)
_UNFIRED = "record.unfired() lists all places without values."


class Record:
    """What a capture has kept, by place and call. Reading never changes it.

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

    _refused: Mapping[Place, str] = MappingProxyType({})
    _ready: dict[str, Kept] | None = None
    _by_name: dict[str, CaptureTap] | None = None
    _by_key: dict[Any, list[int]] | None = None
    _places: dict[Place, CaptureTap] | None = None

    def __init__(
        self, taps: list[CaptureTap] | None, source: capture | None, log: Log | None = None
    ) -> None:
        self._made = taps  # None: as soon as they are asked for
        self._log = log  # that holds all of them
        # While it is open; weakly, so that an interrupted capture is undone at once.
        self._source = None if source is None else weakref.ref(source)
        model = None if source is None else source._model
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._sites: dict[Any, Site] = {}  # for the reasons of what never fired
        self._lock = threading.RLock()  # two threads may be the first to read

    def _seal(self, source: capture) -> None:
        """The capture has ended: let go of it and of the model."""
        if self._source is None:
            return
        planned = has_plans() and (self._log is None or self._log.beset())
        lazily = self._log is not None and not self._log.taps and not planned
        if self._made is None and not lazily:
            self._made = self._listed(source)
        taps = self._made or ()
        self._source = None
        for tap in taps:
            if planned:
                tap.note_layouts()
            if not tap.kept:
                if tap.guards:
                    tap.lost()
                if not (tap.grads or isinstance(tap, Site)):
                    site = self._sites[tap.target.key] = source._site_of(tap)
                    site.module = None
            tap.release()
        for log in source._logs.values():
            log.release()
        for request in source._requests:
            if request.refused:
                self._refused = {**self._refused, **request.refused}

    @property
    def _taps(self) -> list[CaptureTap]:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._listed(None if self._source is None else self._source())
                    if self._log is not None and self._source is None:
                        self._log.release()  # last: an interrupt before it loses nothing
        return self._made

    def _listed(self, source: capture | None) -> list[CaptureTap]:
        if self._log is not None:
            return self._log.all_taps()
        return [] if source is None else source._listed()

    # -- reading --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """The value at a place, or with `record[place, n]` that of its n-th call.

        Of a capture with `calls=`, n is the number that the call has among all.
        """
        # The commonest case, in less time: a whole value that is the only one at its place.
        if self._ready is None and self._source is None:
            if self._made is None and self._log is not None:
                self._ready = self._log.ready()
            else:
                alone = [tap for tap in self._taps if len(tap.kept) == 1]
                alone = [tap for tap in alone if not (tap.reasons or tap.untold)]
                self._ready = {tap.spelled: tap.kept[0] for tap in alone}
        found = self._ready.get(key) if self._ready and isinstance(key, str) else None
        if found is not None:
            value, check = found
            version = check if isinstance(check, int) else None
            plain = version is check and type(value) is Tensor
            if plain and unreadable(value, version, None) is None:
                return value
        where, call = _split(key)
        tap, parts = self._find(where)
        index, kept = self._pick(tap, call)
        return self._read(tap, kept, parts, index)

    def _pick(self, tap: CaptureTap, call: int | None) -> tuple[int, Kept | None]:
        """What is kept of one call, or of the only one."""
        kept = self._kept(tap)
        if tap.chosen is not None and call is not None and call >= 0:
            return self._numbered(tap, kept, call)
        if call is None or tap.chosen is not None:
            self._check_told(tap)
        if call is None:
            if len(kept) > 1:
                place, more = str(self._place(tap)), " and backward" * ("grad" in tap.target.port)
                found = f"There are {len(kept)} of them, one a call{more}."
                remedy = f"Read record[{place!r}, n], record.calls({place!r}), or capture with "
                asked = f"The value at {place!r} was asked for."
                raise SeveralCalls(asked, found, f"{remedy}keep='last'.")
            call = 0
        if not -len(kept) <= call < len(kept):
            asked = f"Call {call} at {str(self._place(tap))!r} was asked for."
            found = f"Calls that were kept: {len(kept)}, counted from 0."
            raise NotCaptured(asked, found, "record.calls(place) gives all of them.")
        return kept[call + len(kept) if call < 0 else call]

    def _numbered(self, tap: CaptureTap, kept: Entries, call: int) -> tuple[int, Kept | None]:
        """What is kept of a call, where only some were asked for."""
        found = kept.of_call(call)
        if len(found) == 1:
            return call, found[0]
        place, calls = str(self._place(tap)), cast("Calls", tap.chosen)
        asked = f"Call {call} at {place!r} was asked for."
        if found:
            several = f"There are {len(found)} gradients of it, one a backward."
            raise SeveralCalls(asked, several, f"Read record.numbered({place!r}).")
        if call in tap.untold:
            raise NotCaptured(
                asked, f"It cannot be told: {tap.untold[call].found}", tap.untold[call].remedy
            )
        never = calls.step is None and calls.cover(call)
        why = "It never came." if never else f"The capture was for others: calls={calls.shown}."
        held = ranges([number for number, one in kept if one is not None])
        raise NotCaptured(asked, why, f"Read one of those that were kept: {held}.")

    def _check_told(self, tap: CaptureTap) -> None:
        """Refuse to read all calls, if some may be missing."""
        for call, why in tap.untold.items():
            asked = f"The calls {cast('Calls', tap.chosen).shown} at {str(self._place(tap))!r} "
            found = f"Call {call} cannot be told: {why.found}"
            raise NotCaptured(asked + "were asked for.", found, why.remedy)

    def calls(self, where: Any) -> list[Any]:
        """The values at a place, always a list: one a call; for gradients one a call and pass.

        Of a capture with `calls=`, one for each call that was asked for; see `numbered`.
        """
        return [value for _, value in self.numbered(where)]

    def numbered(self, where: Any) -> list[tuple[int, Any]]:
        """The same values with the numbers by which `record[place, n]` reads them."""
        tap, parts = self._find(where)
        kept = self._kept(tap)
        self._check_told(tap)
        values = [None if one is None else self._read(tap, one, parts, call) for call, one in kept]
        numbers = range(len(kept)) if tap.chosen is None else [call for call, _ in kept]
        return list(zip(numbers, values, strict=True))

    def of_call(self, where: Any, call: int) -> Any:
        """The value of one call of the module; an error if several backward passes gave one."""
        tap, parts = self._find(where)
        found = self._kept(tap).of_call(call)
        if len(found) == 1:
            return self._read(tap, found[0], parts, call)
        asked = f"Call {call} at {str(self._place(tap))!r} was asked for."
        remedy = "Capture a run with the same calls, and one backward for each; or give the value."
        raise NotCaptured(asked, f"The record holds {len(found)} values of that call.", remedy)

    def _slicing(self, where: Any) -> tuple[str | None, bool]:
        """Which slice of the value is kept at a place, as text, and whether it was transformed."""
        return self._find(where)[0].slicing

    def tensor(self, where: Any) -> Tensor:
        """The only tensor in the value at a place; an error that lists the parts otherwise."""
        return only_tensor(self[where], lambda: f"The value at {where!r}")[1]

    def cat(self, where: Any, dim: int = 0) -> Tensor:
        """The tensors of all calls at a place, joined along a dimension."""
        return torch.cat(self._tensors(where), dim)

    def stack(self, where: Any, dim: int = 0) -> Tensor:
        """The tensors of all calls at a place, stacked along a new dimension."""
        return torch.stack(self._tensors(where), dim)

    def placement(self, where: Any, call: int = 0) -> tuple[Any, ...] | None:
        """How the only tensor at a place is spread over ranks: a placement for each mesh dimension.

        Those of a DTensor, or those that the plan of `parallelize_module` gives what a module
        returns: a plain tensor that is only this rank's part. None if neither is known, as for all
        tensors of a model that is not spread.
        """
        tap, parts = self._find(where)
        kept = self._pick(tap, call)[1]
        if kept is None:
            return None
        path, tensor = only_tensor(get_part(kept[0], parts), lambda: f"The value at {where!r}")
        return self._spread(tap, (*parts, *path), tensor)

    def _spread(self, tap: CaptureTap, path: Path, tensor: Tensor) -> tuple[Any, ...] | None:
        if self._source is not None:
            tap.note_layouts()
        return spread(tensor, tap.layouts, (*tap.target.parts, *path))

    def _tensors(self, where: Any) -> list[Tensor]:
        # A call that has no value is read, for the error that says why.
        found = [self[where, n] if v is None else v for n, v in self.numbered(where)]
        return [only_tensor(value, lambda: f"The value at {where!r}")[1] for value in found]

    def places(self) -> list[Place]:
        """The places that hold values, in model order."""
        return [place for place, tap in self._named().items() if tap.holds]

    def keys(self) -> list[Place]:
        """The same as `places()`: with it, `dict(record)` works."""
        return self.places()

    def items(self) -> Iterator[tuple[Place, Any]]:
        """Every place with its value, once for each call."""
        for place in self.places():
            for value in self.calls(place):
                yield place, value

    def values(self) -> Iterator[Any]:
        """Every value, once for each call, in the order of `items()`."""
        return (value for _, value in self.items())

    def unfired(self) -> dict[Place, str]:
        """The places that were asked for and hold nothing, with the reason."""
        missing = {p: self._why(tap) for p, tap in self._named().items() if not tap.holds}
        return {**missing, **self._refused}

    def __contains__(self, where: Any) -> bool:
        where, call = _split(where)
        try:
            tap, parts = self._find(where)
            kept = self._kept(tap)
            for _, one in kept if parts else ():
                get_part(None if one is None else one[0], parts)
        except (HooklineError, LookupError):
            return False
        if call is not None and call >= 0 and tap.chosen is not None:
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
        entries = [entry for tap in self._taps for entry in tap.entries()]
        found = {id(tensor): tensor for value, _ in entries for _, tensor in leaves(value)}
        return sum(tables.bytes_of(tensor) for tensor in found.values())

    def to(self, device: torch.device | str) -> Record:
        """The same record with its tensors on another device."""
        place = cast(torch.device, as_device(device, "record.to"))

        def move(leaf: Any) -> Any:
            return leaf.to(place) if isinstance(leaf, Tensor) else leaf

        moved: list[CaptureTap] = []
        for tap in self._taps:
            other = object.__new__(type(tap))  # a copy would be inert: see Site
            vars(other).update(vars(tap))
            other.kept, other.grads, other.order = [], {}, None
            held = cast("list[Kept | None]", tap.kept)  # None: loaded, of a call without a gradient
            for n, kept in zip(tap.numbers or range(len(held)), held, strict=True):
                new = kept and (map_leaves(move, self._read(tap, kept, (), n)), _checks(kept))
                other.kept.append(cast("Kept", new))
            for key, parts in tap.grads.items():
                cast("dict[Any, Any]", other.grads)[key] = {
                    path: (move(kept[0]), kept[1]) for path, kept in parts.items()
                }
            moved.append(other)
        record = Record(moved, None)
        record._model, record._refused, record._sites = self._model, self._refused, self._sites
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
        for place, tap in self._named().items():
            entries = tap.entries()
            count += len(entries)
            if not entries:
                rows.append((str(place) or "''", "0", "-", "-", "never fired"))
            else:
                values = [entry[0] for entry in entries]
                calls = str(len(entries)) + self._which(tap)
                spread = partial(self._spread, tap)
                rows += tables.rows_of(place, values, entries[0][1], spread, calls)
        n, size = len(self.places()), tables.show_bytes(self.nbytes)
        title = f"Record of {n} place{'s' * (n != 1)}, {count} value{'s' * (count != 1)}, {size}"
        return title, rows

    def _which(self, tap: CaptureTap) -> str:
        """The numbers of the calls that are kept, if others were not asked for."""
        if tap.chosen is None:
            return ""
        kept = tap.gathered() if tap.grads else tap.numbered()
        return f" ({ranges([number for number, one in kept if one is not None])})"

    # -- finding --------------------------------------------------------------------------------

    def _named(self) -> dict[Place, CaptureTap]:
        """The taps by place, in model order."""
        if self._places is not None:
            return self._places
        model = None if self._model is None else self._model()
        names = first_names(model)
        if self._source is None:  # another module may have got the id of one that is gone
            same = {t.target.ident for t in self._taps if self._still_there(t.target)}
            names = {ident: path for ident, path in names.items() if ident in same}
        order = {ident: n for n, ident in enumerate(names)}
        taps = sorted(self._taps, key=lambda tap: order.get(tap.target.ident, len(order)))
        named = {named_place(tap.target, names): tap for tap in taps}
        if self._source is None:
            self._places = named
        return named

    def _place(self, tap: CaptureTap) -> Place:
        return next(place for place, other in self._named().items() if other is tap)

    def _find(self, where: Any) -> tuple[CaptureTap, Path]:
        """The tap that holds a place, and the parts to take of its values."""
        if self._by_name is None:
            self._by_name = {tap.spelled: tap for tap in reversed(self._taps)}
        if isinstance(where, str) and where in self._by_name:
            return self._by_name[where], ()
        if isinstance(where, str) and where in self._refused:
            raise _never_fired(where, self._refused[cast(Place, where)])
        if isinstance(where, nn.Module):
            found = self._holding(Target(where, ""))
            if found is not None:
                return found
        model = None if self._model is None else self._model()
        if model is not None:
            targets = [t for request in resolve(model, (where,)) for t in request.targets]
            if len(targets) > 1:
                found = f"It matches {len(targets)} places."
                remedy = "Read one place at a time; record.items() gives all."
                raise NotCaptured(f"{where!r} was asked of a record.", found, remedy)
            found = self._holding(targets[0])
            if found is not None:
                return found
        elif isinstance(where, str):  # the model is gone: its names are what is left
            if where in self._named():
                return self._named()[cast(Place, where)], ()
            for tap in self._taps:
                place = tap.target.place
                if where.startswith(place) and where[len(place) :].startswith("["):
                    return tap, parse_port(where[len(place) :])[1]
        held = [str(place) for place in self._named()]
        close = difflib.get_close_matches(str(where), held, n=3, cutoff=0.4) or held[:6]
        found = f"It was not captured. Closest: {', '.join(map(repr, close))}."
        remedy = "record.places() lists what is there; name the place in capture(model, ...)."
        raise NotCaptured(f"{where!r} was asked of a record.", found, remedy)

    def _still_there(self, target: Target) -> bool:
        """Whether the module of a target stands in the model where it was found."""
        model = None if self._model is None else self._model()
        if model is None or target.attribute is not None:
            return model is not None
        found = find(model, tuple(target.path.split(".")) if target.path else ())
        return bool(found) and id(found[0][1]) == target.ident

    def _holding(self, target: Target) -> tuple[CaptureTap, Path] | None:
        if self._by_key is None:
            by_key: dict[Any, list[int]] = {}
            for n, tap in enumerate(self._taps):
                by_key.setdefault(tap.target.key[:3], []).append(n)
            self._by_key = by_key
        for n in self._by_key.get(target.key[:3], ()):
            tap = self._taps[n]
            parts = tap.target.parts
            if self._source is None and not self._still_there(tap.target):
                continue
            if target.parts[: len(parts)] == parts:
                return tap, target.parts[len(parts) :]
        return None

    def _why(self, tap: CaptureTap) -> str:
        source = None if self._source is None else self._source()
        others = any(other.holds for other in self._taps)
        if source is not None:
            return source.reason(tap, others)
        model = None if self._model is None else self._model()
        site = tap if isinstance(tap, Site) else self._sites.get(tap.target.key, _NO_SITE)
        return silence(tap, site, model, first_names(model), others)

    def _kept(self, tap: CaptureTap) -> Entries:
        gradient = "grad" in tap.target.port
        kept = tap.gathered() if gradient else tap.numbered()
        if tap.holds:
            return kept
        if not gradient:
            raise _never_fired(self._place(tap), self._why(tap))
        asked = f"The gradient at {str(self._place(tap))!r} was asked for:"
        found = self._why(tap)  # which also looks for what was lost
        remedy = NONE_CAME[1] if needs_backward(found) else _UNFIRED
        raise GradientNotAvailable(asked, *(tap.why() or (found, remedy)))

    def _read(self, tap: CaptureTap, kept: Kept | None, parts: Path, call: int) -> Any:
        """A value, or a part of it, if it is what it was when it was captured."""
        for path, why in tap.reasons.get(call, {}).items():
            if kept is None or (path and path[: len(parts)] == parts[: len(path)]):
                gradient, place = "grad" in tap.target.port, str(self._place(tap)) + show_path(path)
                asked = f"The {'gradient' if gradient else 'value'} at {place!r} was asked for:"
                raise (GradientNotAvailable if gradient else NotCaptured)(asked, *why)
        if kept is None:
            asked = f"The gradient at {str(self._place(tap))!r}, call {call}, was asked for:"
            found, remedy = "none arrived for that call.", "record.calls(place) has None there."
            raise GradientNotAvailable(asked, found, remedy)
        value, checks = kept[0], _checks(kept)
        try:
            value = get_part(value, parts) if parts else value
        except LookupError as error:
            place, remedy = str(self._place(tap)), "Read the place without the part to see it all."
            asked = f"{show_path(parts)} of the value at {place!r} was asked for:"
            raise NotCaptured(asked, f"{error}.", remedy) from None
        for path, tensor in leaves(value):
            found = unreadable(tensor, *(checks or {}).get(id(tensor), (None, None)))
            if found is not None:
                raise ValueChanged(
                    f"The value at {str(self._place(tap)) + show_path((*parts, *path))!r} was "
                    f"asked for.",
                    *found,
                )
        return value


def _checks(kept: Kept) -> dict[int, tuple[int, Tensor | None]] | None:
    """What to check of a value on reading, by the ids of its tensors."""
    value, checks = kept
    return {id(value): (checks, None)} if isinstance(checks, int) else checks


def _never_fired(place: str, why: str) -> NeverFired:
    return NeverFired(f"The value at {str(place)!r} was asked for:", why, _UNFIRED)


def _split(key: Any) -> tuple[Any, int | None]:
    if isinstance(key, tuple) and len(cast("tuple[Any, ...]", key)) == 2:
        where, call = cast("tuple[Any, Any]", key)
        if isinstance(call, SupportsIndex):
            return where, operator.index(call)
    return cast(Any, key), None
