"""Change values: `edit(model, where, change)`.

- `edit`: change the values at places while a `with` block runs
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, overload

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hookline.core import changes, parameters
from hookline.core.changes import Change, describe, replace
from hookline.core.hooks import KEEP, Call, Context, Frame, Tap, add_place, takes_call
from hookline.core.nested import Path, leaves, only_tensor, set_part, show_path
from hookline.core.places import Request, Target, Where, resolve
from hookline.core.slices import put
from hookline.errors import ChangeError

__all__ = ["edit"]

Calls = int | slice | Collection[int] | None
AnyChange = Change | Tensor | Callable[..., Any]


class _EditTap(Tap):
    """Applies a change to the values at a target."""

    def __init__(
        self,
        target: Target,
        context: weakref.ref[Context[Any]],
        change: Change | Callable[..., Any],
        at: Any,
        calls: Calls,
    ) -> None:
        super().__init__(target, context)
        self.change = change
        self.at = at
        self.calls = calls
        self.seen = 0
        self.wants_call = not isinstance(change, Change) and takes_call(change)

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

    def expect(self, value: Any, index: int, tensors: list[tuple[Any, Tensor]]) -> None:
        if isinstance(self.change, Change) or self.at is not None:
            only_tensor(value, f"The value at {str(self.place)!r}")

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        if index < 0:  # of a parameter or plain tensor: numbered by backward pass
            index = self.seen
        new = self.receive(grad.clone(), index, False, None)
        return None if new is KEEP else new

    def _changed(self, value: Any, call: Call) -> Any:
        change = self.change
        if isinstance(change, Change):
            path, tensor = only_tensor(value, f"The value at {str(call.place)!r}")
            return set_part(value, path, changes.apply(change, tensor, call))
        new = change(value, call) if self.wants_call else change(value)
        _check_fit(change, value, new, call)
        return new


def _among(index: int, calls: Calls) -> bool:
    if isinstance(calls, int):
        return index == calls
    if isinstance(calls, slice):
        start, stop, step = calls.start or 0, calls.stop, calls.step or 1
        return index >= start and (stop is None or index < stop) and (index - start) % step == 0
    return calls is None or index in calls


def _check_fit(change: Any, value: Any, new: Any, call: Call) -> None:
    """What a user's function returns must be like what it was given."""
    asked = f"The function {describe(change)} was applied at {str(call.place)!r}."
    if new is None and value is not None:
        raise ChangeError(
            asked, "It returned None.", "Return the new value; to look only, use hookline.hook."
        )
    if isinstance(value, Tensor) and isinstance(new, Tensor):
        before, after = [((), value)], [((), new)]
    else:
        before, after = list(leaves(value)), list(leaves(new))
    if [path for path, _ in before] != [path for path, _ in after]:
        raise ChangeError(
            asked,
            f"It was given {_structure(value, before)} and returned {_structure(new, after)}.",
            "Return a value of the same structure.",
        )
    for (path, old), (_, tensor) in zip(before, after, strict=True):
        if (old.shape, old.dtype, old.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise ChangeError(
                asked,
                f"{show_path(path) or 'It'} was {_signature(old)} and came back {_signature(tensor)}.",
                "Return the same shape, dtype and device; hookline.hook checks nothing.",
            )


def _signature(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _structure(value: Any, tensors: list[tuple[Path, Tensor]]) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    parts = ", ".join(show_path(path) for path, _ in tensors[:8])
    return f"a {type(value).__name__} with {'tensors at ' + parts if parts else 'no tensors'}"


class edit(Context[_EditTap]):  # noqa: N801 - a verb that is used like a function
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
    At gradient places the change meets the gradient as it arrives; run the backward inside.
    """

    _verb = "edit"
    _swaps: list[parameters.Swap]
    _saving: saved_tensors_hooks | None = None

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
        if isinstance(calls, int) and calls < 0:
            raise ChangeError(
                f"calls={calls} was asked for.", "Calls count from 0.", "Give 0 for the first."
            )
        self._at = at
        self._calls = calls
        self._swaps = []
        super().__init__(model, [place for place, _ in pairs])

    def _resolve(self) -> list[Request]:
        # A `where` may be a list and so give several requests; each keeps its change.
        found: list[Request] = []
        self._change_of: dict[tuple[Any, ...], Change | Callable[..., Any]] = {}
        for where, change in zip(self._wheres, self._changes, strict=True):
            for request in resolve(self._model, (where,)):
                found.append(request)
                for target in request.targets:
                    self._change_of.setdefault(target.key, change)
        return found

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> _EditTap:
        change = self._change_of[target.key]
        if isinstance(change, Change):
            change.check(self.place_of(target))
        return _EditTap(target, ref, change, self._at, self._calls)

    def _prepared(self) -> None:
        values = [tap for tap in self._taps.values() if tap.target.port == "value"]
        if values:
            for _, site in self._sites.values():
                site.values = []  # parameters are swapped now, not at each call
            parameters.swap(values, self._swaps)

    def _start(self, attached: bool) -> None:
        super()._start(attached)
        if self._swaps and not attached:
            saving = parameters.keep_saved(self._swaps)
            saving.__enter__()
            self._saving = saving

    def _stop(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.__exit__()
        super()._stop()
        parameters.swap_back(self._swaps)


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
        return given
    raise ChangeError(
        f"{given!r} was given as a change.",
        f"It is of type {type(given).__name__}.",
        "Give a ready change such as hookline.scale(2.0), a tensor, or a function of the value.",
    )
