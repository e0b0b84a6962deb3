"""Change values: `edit(model, where, change)`.

- `edit`: change the values at places while a `with` block runs
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, cast, overload

from torch import Tensor, nn

from hookline.core import parameters
from hookline.core.changes import Change, apply, describe, replace
from hookline.core.distributed import copied, placements
from hookline.core.hooks import Context, takes_call
from hookline.core.nested import Path, leaves, only_tensor, set_part, show_path
from hookline.core.places import Request, Target, Where, resolve
from hookline.core.sites import KEEP, Call, Frame, Tap, add_place
from hookline.core.slices import check_at, put
from hookline.errors import ChangeError

__all__ = ["edit"]

Calls = int | slice | Collection[int] | None
AnyChange = Change | Tensor | Callable[..., Any]


class _EditTap(Tap):
    """Applies changes, one after the other, to the values at a target."""

    def __init__(
        self, target: Target, context: weakref.ref[Any], changes: list[Any], at: Any, calls: Any
    ) -> None:
        super().__init__(target, context)
        self.changes = [(c, not isinstance(c, Change) and takes_call(c)) for c in changes]
        self.at = at
        self.calls: slice | Collection[int] | None = calls
        self.seen = 0

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        self.seen += 1
        if self.calls is not None and not _among(index, self.calls):
            return KEEP
        call = Call(self, index, recomputed)
        try:
            if self.at is not None:
                new = put(value, self.at, lambda piece: self._changed(piece, call))
            else:
                new = self._changed(value, call)
        except Exception as error:
            add_place(error, self)
            raise
        self.fired += 1
        return new

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        if self.at is not None or any(isinstance(change, Change) for change, _ in self.changes):
            only_tensor(value, f"The value at {str(self.place)!r}")

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        if index < 0:  # of a parameter or plain tensor: numbered by backward pass
            index = self.seen
        new = self.receive(copied(grad), index, False, None)
        return None if new is KEEP else new

    def _changed(self, value: Any, call: Call) -> Any:
        for change, wants_call in self.changes:
            if isinstance(change, Change):
                path, tensor = only_tensor(value, f"The value at {str(call.place)!r}")
                value = set_part(value, path, apply(change, tensor, call))
                continue
            new = change(value, call) if wants_call else change(value)
            _check_fit(change, value, new, call)
            value = new
        return value


class _Used:
    """Looks whether calls use a swapped parameter; `torch.func.functional_call` brings others."""

    own = others = 0

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.target = tap.target
        self.tensor = tap.target.tensor()

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> None:
        if value is self.tensor:
            self.own += 1
        else:
            self.others += 1

    @property
    def missed(self) -> bool:
        """Whether all calls used others, put there for the time being."""
        return bool(self.others) and not self.own and self.target.tensor() is self.tensor


def _among(index: int, calls: slice | Collection[int]) -> bool:
    if isinstance(calls, slice):
        start, stop, step = calls.start or 0, calls.stop, calls.step or 1
        return index >= start and (stop is None or index < stop) and (index - start) % step == 0
    return index in calls


def _checked(calls: Calls) -> Any:
    """The calls that an edit is for, as a slice or a set; an error if they make no sense."""
    if calls is None:
        return None
    try:
        if isinstance(calls, slice):
            step = 1 if calls.step is None else calls.step - 1
            limits = [calls.start or 0, calls.stop or 0, step]
            found: Any = calls
        else:
            whole = [calls] if isinstance(calls, SupportsIndex) else list(calls)
            limits = found = {operator.index(call) for call in whole}
        if limits and all(operator.index(limit) >= 0 for limit in limits) and calls is not True:
            return found
    except TypeError:
        pass
    raise ChangeError(
        f"An edit was asked for with calls={calls!r}.",
        "Calls count from 0, on every call of the module.",
        "Give an int, a slice such as slice(2, None), or a set of ints.",
    )


def _check_fit(change: Any, value: Any, new: Any, call: Call) -> None:
    """What a user's function returns must be like what it was given."""
    asked = f"The function {describe(change)} was applied at {str(call.place)!r}."
    if new is None and value is not None:
        raise ChangeError(
            asked, "It returned None.", "Return the new value; to look only, use hookline.hook."
        )
    before, after = dict(leaves(value)), dict(leaves(new))
    if before.keys() != after.keys():
        raise ChangeError(
            asked,
            f"It was given {_structure(value, before)} and returned {_structure(new, after)}.",
            "Return a value of the same structure.",
        )
    for path, old in before.items():
        tensor = after[path]
        if _likeness(old) != _likeness(tensor):
            raise ChangeError(
                asked,
                f"{show_path(path) or 'It'} was {_signature(old)}, now it is {_signature(tensor)}.",
                "Return the same shape, dtype, device and placement; hookline.hook checks nothing.",
            )


def _likeness(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, placements(tensor)


def _signature(tensor: Tensor) -> str:
    spread = placements(tensor)
    kind = str(tensor.dtype).removeprefix("torch.") + (f" {spread}" if spread else "")
    return f"{tuple(tensor.shape)} {kind} on {tensor.device}"


def _structure(value: Any, tensors: Iterable[Path]) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    parts = ", ".join(show_path(path) for path in list(tensors)[:8])
    return f"a {type(value).__name__} with {'tensors at ' + parts if parts else 'no tensors'}"


class edit(Context[_EditTap]):
    """Change the values at places while a `with` block runs.

    >>> import torch
    >>> from hookline import scale
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> with edit(model, "0", scale(2.0)):
    ...     model(torch.ones(2))
    tensor([2., 2.])
    >>> model(torch.ones(2))
    tensor([1., 1.])

    Args:
        model: any module, or a plain tensor with the place ":grad".
        where: one place or a list of them (see `select`), or a mapping of places to changes.
        change: a ready change, a tensor (meaning `replace`), or a function of the value, which
            also gets the `Call` if it has a second required parameter. What a function returns
            must have the shape, dtype and device of what it was given.
        at: change only this slice: an index, `heads(...)` or `last_token(...)`.
        calls: change only these calls: an int, a slice, a set. Inputs are numbered by the start
            of the call, all else by its completion.

    At a parameter or buffer (`edit(model, "fc.weight", ...)`) its data is swapped in and back,
    bit for bit; the Parameter object stays. Optimiser steps taken inside are discarded with it.
    A backward after the `with` is still right; after `.attach()` and `.remove()` it raises. (The
    `with` saves tensors through hooks, which torch.func refuses: there, use `.attach()`.)
    At gradient places the change meets the gradient as it arrives; run the backward inside.
    """

    _verb = "edit"
    _swaps: list[parameters.Swap]
    _saving: parameters.Saving | None = None

    @overload
    def __init__(
        self, model: nn.Module | Tensor, where: Where, change: AnyChange, *,
        at: Any = None, calls: Calls = None,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, model: nn.Module | Tensor, where: Mapping[Any, AnyChange], *,
        at: Any = None, calls: Calls = None,
    ) -> None: ...  # fmt: skip

    def __init__(
        self,
        model: nn.Module | Tensor,
        where: Any,
        change: AnyChange | None = None,
        *,
        at: Any = None,
        calls: Calls = None,
    ) -> None:
        if isinstance(where, Mapping):
            if change is not None:
                raise TypeError(
                    "edit was given a mapping and a change. The mapping holds the changes "
                    "already. Give either."
                )
            pairs: list[tuple[Any, Any]] = list(where.items())  # pyright: ignore
        else:
            pairs = [(where, change)]
        self._changes = [_as_change(given) for _, given in pairs]
        self._at = at
        self._calls = _checked(calls)
        self._swaps = []
        super().__init__(model, [place for place, _ in pairs])

    def _resolve(self) -> list[Request]:
        # A `where` may be a list and so give several requests; each keeps its change. Where two
        # meet at one place, both apply, in the order in which they were given.
        found: list[Request] = []
        self._changes_at: dict[Any, list[Any]] = {}
        for where, change in zip(self._wheres, self._changes, strict=True):
            targets: dict[Any, Target] = {}
            for request in resolve(self._model, (where,)):
                found.append(request)
                targets |= {target.key: target for target in request.targets}
            for key, target in targets.items():
                if isinstance(change, Change):
                    change.check(self.place_of(target))
                self._changes_at.setdefault(key, []).append(change)
        return found

    def _tap(self, target: Target, ref: weakref.ref[Any]) -> _EditTap:
        check_at(self._at, target)
        calls = None if target.port == "value" else self._calls
        return _EditTap(target, ref, self._changes_at[target.key], self._at, calls)

    def _prepared(self) -> None:
        values = [tap for tap in self._taps.values() if tap.target.port == "value"]
        if self._calls is not None and len(values) == len(self._taps):
            raise ChangeError(
                f"Calls {self._calls} of a parameter or buffer were to be changed.",
                "A parameter has no calls.",
                "Leave out calls=; to change a module's calls, name its input or output.",
            )
        for _, site in self._sites.values():
            site.counted = self._calls is not None or bool(site.outputs)
        if values:
            for _, site in self._sites.values():
                # Parameters are swapped now, and at each call only looked at.
                site.values = [cast(Tap, _Used(t)) if t in values else t for t in site.values]
            parameters.swap(values, self._swaps)

    def _verify(self) -> None:
        for site in {id(site): site for _, site in self._sites.values()}.values():
            for used in site.values:
                if isinstance(used, _Used) and used.missed:
                    used.tap.fired = 0
                    used.tap.explain(0, "its module was called with another tensor in its stead.")
        super()._verify()

    def _start(self, attached: bool) -> None:
        super()._start(attached)
        if self._swaps and not attached:
            self._saving = parameters.Saving()
            self._saving.__enter__()

    def _stop(self) -> None:
        try:
            super()._stop()
            parameters.swap_back(self._swaps)
        finally:
            if self._saving is not None:
                self._saving.leave()
                self._saving = None


def _as_change(given: Any) -> Change | Callable[..., Any]:
    if isinstance(given, Tensor):
        return replace(given)
    if isinstance(given, Change) or callable(given):
        if isinstance(given, type) and issubclass(given, Change):
            raise ChangeError(
                f"The change {given.__name__} was given without its arguments.",
                "It is a class.",
                f"Write {given.__name__}(...).",
            )
        return cast("Callable[..., Any]", given)
    raise ChangeError(
        f"{given!r} was given as a change.",
        f"It is of type {type(given).__name__}.",
        "Give a ready change such as hookline.scale(2.0), a tensor, or a function of the value.",
    )
