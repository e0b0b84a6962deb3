"""Change values: `edit(model, where, change)`.

- `edit`: change the values at places while a `with` block runs
- `EditTap`: what it does at one target; `EditFunction`: a user's function as a change
- `as_change(given)`: what a user gives, as a change
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from hookline.edits import parameter_swap as parameters
from hookline.edits.changes import Change, replace
from hookline.engine.call_choice import Calls, Which, as_calls
from hookline.engine.checkpointing import awaited
from hookline.engine.handlers import Call, Frame, Tap, add_place
from hookline.engine.hooking import Context, takes_call
from hookline.engine.slices import Misfit, check_at, put
from hookline.errors import ChangeError
from hookline.places.resolution import Request, Target, Where, resolve
from hookline.torch_private import clear_parametrization_cache, version_of
from hookline.values.nested import Path, leaves, only_tensor

__all__ = ["EditFunction", "EditTap", "as_change", "edit"]


class EditFunction(Change):
    """A user's function as a change: it meets the whole value."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.wants_call = function, takes_call(function)
        self.name = getattr(function, "__name__", repr(function))

    def meet(self, value: Any, call: Call) -> Any:
        before = _versions(value)
        new = self.function(value, call) if self.wants_call else self.function(value)
        call._tap.wrote |= _versions(value) != before
        return self._fitting(value, new, call)


def _versions(value: Any) -> list[int]:
    return [version_of(tensor) for _, tensor in leaves(value) if not tensor.is_inference()]


class EditTap(Tap):
    """Applies changes, one after the other, to the values at a target."""

    empty = False  # whether there was nothing to change in the last value

    def __init__(
        self, target: Target, ref: Any, changes: Any, at: Any, calls: Calls | None
    ) -> None:
        super().__init__(target, ref)
        self.changes, self.at, self.chosen = changes, at, calls
        self.lacking = frozenset() if calls is None else calls.named

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        self.seen += 1
        change = partial(self._changed, Call(self, index, recomputed, frame))
        try:
            new = change(value) if self.at is None else put(value, self.at, change)
        except Misfit as error:
            raise error.at_place(str(self.place), "changed") from error.__cause__
        except Exception as error:
            add_place(error, self)
            raise
        if not self.empty:
            self.fired += 1
            self.lacking -= {index}
        return new

    def _changed(self, call: Call, value: Any) -> Any:
        self.empty = self.at is not None and value.numel() == 0
        if self.empty:
            self.silent = f"the slice at={self.at!r} of the value there is empty."
        for change in self.changes:
            value = change.meet(value, call)
        return value

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        if index < 0 and not self.wants(self.seen, None):  # of a parameter: one a backward
            self.seen += 1
            return None
        return super().gradient(grad, index, path)

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        ready = self.at is not None or not all(isinstance(c, EditFunction) for c in self.changes)
        if ready:
            only_tensor(value, self.shown)


class _Used:
    """Looks whether calls use a swapped parameter; `torch.func.functional_call` brings others."""

    chosen = None

    def __init__(self, tap: Tap) -> None:
        self.tap, self.target, self.tensor = tap, tap.target, tap.target.tensor()
        self.seen: set[bool] = set()

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> None:
        self.seen.add(value is self.tensor)

    @property
    def missed(self) -> bool:
        """Whether all calls used others, put there for the time being."""
        return self.seen == {False} and self.target.tensor() is self.tensor


class edit(Context[EditTap]):
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
            must have the shape, dtype and device of what it was given. A tensor in a change
            broadcasts as in torch, from the last dimension; `dim=` of a ready change aligns a
            vector with another one, such as 1 for the channels of images.
        at: change only this slice: an index, `heads(...)` or `last_token(...)`. One that does not
            fit a value raises ChangeError there.
        calls: change only these calls: an int, a slice or a set of numbers, "prompt" or
            "generated". Numbers count the calls of the module from 0 on, from entering or
            attaching until the end, across all runs of the model; inputs are numbered by the
            start of the call, all else by its completion. Each call that is named must come, of a
            slice at least one; else leaving the `with` raises `NeverFired`, which says at which
            calls the edit acted and at which it did not. "prompt" and "generated" are decided
            anew at each forward of the model that starts with an empty cache, so at each
            `generate()` of transformers; a call of which that cannot be told raises `ChangeError`
            in the forward, with the reason.

    At a parameter or buffer (`edit(model, "fc.weight", ...)`) its data is swapped in and back,
    bit for bit; the Parameter object stays. Optimiser steps taken inside are discarded with it.
    No gradient flows into the change's own tensors there. Of several edits of one parameter the
    last is made of what the others gave: remove it first. A backward after the `with` is still
    right; after `.attach()` and `.remove()` it raises. (The `with` saves tensors through hooks,
    which torch.func refuses: there, use `.attach()`.)
    At gradient places the change meets the gradient as it arrives; run the backward inside. One
    tensor that is passed for several arguments, or returned at several positions, becomes several
    by an identity at each place that is named, so that each has its own gradient.
    At a module it is for what the module returns: where a model drops that and goes on with what
    the module wrote in place (`self.relu(h)`), edit its operation, "relu/relu".
    """

    _verb = "edit"
    _needs = ("core", "edits")
    _saving: parameters.Saving | None = None

    def __init__(
        self,
        model: nn.Module | Tensor,
        where: Where | Mapping[Any, Any],
        change: Callable[[Any], Any] | Callable[[Any, Call], Any] | Change | Tensor | None = None,
        *,
        at: Any = None,
        calls: Which | None = None,
    ) -> None:
        pairs = list(cast(Any, where).items()) if isinstance(where, Mapping) else [(where, change)]
        if isinstance(where, Mapping) and change is not None:
            raise TypeError("edit was given a mapping of changes and a change. Give either.")
        self._changes = [as_change(given) for _, given in pairs]
        self._at, self._chosen = at, None if calls is None else as_calls(calls)
        self._undo = parameters.Undo()
        super().__init__(model, [place for place, _ in pairs])

    def _resolve(self) -> list[Request]:
        # A `where` may be a list and so give several requests; each keeps its change. Where two
        # meet at one place, both apply, in the order in which they were given.
        found: list[Request] = []
        self._changes_at: dict[Any, list[Change]] = {}
        for where, change in zip(self._wheres, self._changes, strict=True):
            requests = resolve(self._model, (where,))
            found += requests
            for key in dict.fromkeys(t.key for r in requests for t in r.targets):
                self._changes_at.setdefault(key, []).append(change)
        return found

    def _tap(self, target: Target, ref: Any) -> EditTap:
        check_at(self._at, target)
        calls = None if target.port == "value" else self._chosen
        tap = EditTap(target, ref, self._changes_at[target.key], self._at, calls)
        tap.changes = [change.bound_to(tap) for change in tap.changes]
        return tap

    def _prepared(self) -> None:
        values = [tap for tap in self._taps.values() if tap.target.port == "value"]
        if self._chosen is not None and len(values) == len(self._taps):
            asked = "Some calls of a parameter or buffer were to be changed."
            raise ChangeError(asked, "It has none.", "Leave out calls=, or name its module.")
        for _, site in self._sites.values():
            # Parameters are swapped now, and at each call only looked at.
            site.changed = any(tap.target.port == "value" for tap in site.values)
            site.counted = self._chosen is not None or bool(site.outputs) or site.changed
            site.values = [cast(Tap, _Used(t)) if t in values else t for t in site.values]
        self._saving = parameters.swap(values, self._undo, attached=self._attached)
        self._forget()

    def _forget(self) -> None:
        """Of weights that torch has computed and keeps (`parametrize.cached`), make new ones."""
        if any("parametrizations" in tap.target.path.split(".") for tap in self._taps.values()):
            clear_parametrization_cache()

    def _awaited(self) -> ChangeError | None:
        if self._undo.covered():
            found = "A later edit was made of what this one had changed, and still holds that."
            return ChangeError(f"{self!r} was removed.", found, "Remove the later one first.")
        for tap in self._taps.values():
            site = self._site_of(tap)
            site.changed |= tap.wrote
            # A parameter whose module is called is used there; else in any region, perhaps.
            used = id(site.module) if site.count else None
            if tap.target.port == "value" and self._saving and self._saving.awaiting(used):
                return awaited(f"edit changed {str(tap.place)!r}, which may be used")
        return super()._awaited()

    def _verify(self) -> None:
        for used in [used for _, site in self._sites.values() for used in site.values]:
            if isinstance(used, _Used) and used.missed:
                used.tap.fired = 0
                used.tap.explain(0, "its module was called with another tensor in its stead.")
        super()._verify()

    def _stop(self) -> None:
        super()._stop()
        self._undo.run()
        self._forget()


def as_change(given: Any) -> Change:
    """What a user gives for a change: one, a tensor or a function."""
    if isinstance(given, (Change, Tensor)):
        return given if isinstance(given, Change) else replace(given)
    if callable(given) and not isinstance(given, type):
        return EditFunction(given)
    found, remedy = f"It is a {type(given).__name__}.", "Give one such as hookline.replace(2.0), a "
    remedy += "tensor, or a function of the value."
    if isinstance(given, type):
        found, remedy = "It is a class.", f"Give one of its kind: {given.__name__}(...)."
    raise ChangeError(f"{given!r} was given as a change.", found, remedy)
