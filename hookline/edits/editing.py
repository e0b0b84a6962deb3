"""Change values: `edit(model, where, change)`.

- `edit`: change the values at places while a `with` block runs
- `EditHandler`, `ParameterHandler`: change the values at one place
- `EditFunction`: a user's function as a change
- `handlers_of(edit)`: the handlers of an open edit
- `as_change(given)`: the change that a user gives, or that is made of a tensor or a function
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.edits import parameter_swap
from hookline.edits.changes import Change, replace
from hookline.engine.asks import Ask
from hookline.engine.call_choice import Which, as_calls
from hookline.engine.calls import Call, RunningCall
from hookline.engine.checkpointing import undone_too_early
from hookline.engine.context import Context, tracer_of
from hookline.engine.handlers import UNCHANGED, Handler, add_place
from hookline.engine.hooking import takes_call
from hookline.engine.slices import Misfit, check_at, put
from hookline.errors import ChangeError
from hookline.places.resolution import Request, Target, Where, resolve
from hookline.torch_private import clear_parametrization_cache, version_of
from hookline.values.nested import Path, leaves, only_tensor

__all__ = ["EditFunction", "EditHandler", "ParameterHandler", "as_change", "edit", "handlers_of"]


class EditFunction(Change):
    """A user's function as a change: it gets the whole value."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.wants_call = takes_call(function)
        self.name = getattr(function, "__name__", repr(function))

    def apply_checked(self, value: Any, call: Call) -> Any:
        new = self.function(value, call) if self.wants_call else self.function(value)
        return self._check_result(value, new, call)


def _versions(value: Any) -> list[int]:
    return [version_of(tensor) for _, tensor in leaves(value) if not tensor.is_inference()]


class EditHandler(Handler):
    """Change the values at a place."""

    def __init__(self, change: Change, at: Any, note: str, *place: Any) -> None:
        super().__init__(*place)
        self.at = at
        self.note = note  # to add to errors
        self.change = change.bound_to(self)
        self.empty = False  # True if there was nothing to change in the last value

    def receive(self, value: Any, call: RunningCall) -> Any:
        self.seen += 1
        change = partial(self._changed, Call(self, call))
        try:
            new = change(value) if self.at is None else put(value, self.at, change)
        except Misfit as error:
            raise self._noted(error.at_place(str(self.place), "changed")) from error.__cause__
        except Exception as error:
            add_place(error, self)
            self._noted(error)
            raise
        if not self.empty:
            self.fired += 1
            self.calls_missing -= {call.number}
        return new

    def _noted(self, error: Exception) -> Exception:
        """Add the note of the edit, if it has one, to an error."""
        if self.note:
            error.add_note(self.note)
        return error

    def _changed(self, call: Call, value: Any) -> Any:
        self.empty = self.at is not None and value.numel() == 0
        if self.empty:
            self.known_reason = f"the slice at={self.at!r} of the value there is empty."
        before = _versions(value) if isinstance(self.change, EditFunction) else None
        new = self.change.apply_checked(value, call)
        self.wrote = self.wrote or (before is not None and _versions(value) != before)
        return new

    def gradient(self, grad: Tensor, number: int, path: Path) -> Tensor | None:
        if number < 0 and not self.wants(self.seen, None):  # of a parameter: one a backward
            self.seen += 1
            return None
        return super().gradient(grad, number, path)

    def expect(self, value: Any, number: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        if self.at is not None or not isinstance(self.change, EditFunction):
            only_tensor(value, self.shown)


class ParameterHandler(EditHandler):
    """Change a parameter, whose data is swapped when the edit is entered.

    Its calls are only looked at: `torch.func.functional_call` uses another tensor.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tensor = self.target.tensor()
        self.used: set[bool] = set()

    def changed(self, value: Tensor) -> Tensor:
        """Return the new data."""
        return super().receive(value, RunningCall(self.subject, None))

    def receive(self, value: Any, call: RunningCall) -> Any:
        self.used.add(value is self.tensor)
        return UNCHANGED

    @property
    def missed(self) -> bool:
        """Return True if all calls used another tensor, put there for the time being."""
        return self.used == {False} and self.target.tensor() is self.tensor


class edit(Context):
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
            slice at least one; otherwise leaving the `with` raises `NeverFired`, which says at
            which calls the edit acted and at which it did not. "prompt" and "generated" are
            decided anew at each forward of the model that starts with an empty cache, as each
            `generate()` of transformers does; a call that may be either raises `ChangeError` in
            the forward, with the reason.

    At a parameter or buffer (`edit(model, "fc.weight", ...)`) its data is swapped in and back,
    bit for bit; the Parameter object stays. Optimiser steps taken inside are discarded with it.
    No gradient flows into the change's own tensors there. If several edits change one parameter,
    the last starts from what the others gave: remove it first. A backward after the `with` is still
    right; after `.attach()` and `.remove()` it raises. (The `with` saves tensors through hooks,
    which torch.func refuses: there, use `.attach()`.)
    At gradient places the change applies to the gradient as it arrives; run the backward inside.
    One tensor that is passed for several arguments, or returned at several positions, becomes
    several by an identity at each place that is named, so that each has its own gradient.
    At a module the change applies to what the module returns. If the model drops that and goes on
    with what the module wrote in place (`self.relu(h)`), edit the operation, "relu/relu".
    """

    _verb = "edit"
    _needs = ("core", "edits")
    _note = ""  # to add to errors
    _saving: parameter_swap.Saving | None = None

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
        self._at = at
        self._chosen = None if calls is None else as_calls(calls)
        self._undo = parameter_swap.Undo()
        self._parameters: list[Any] = []
        self._parametrized = False
        super().__init__(model, [place for place, _ in pairs])

    def _resolve(self) -> list[Request]:
        # A `where` may be a list and so give several requests, which share its change and asks.
        # Two changes at one place have asks of their own: both apply, in the order given.
        self._given: dict[Request, tuple[Change, dict[Any, Ask]]] = {}
        for where, change in zip(self._wheres, self._changes, strict=True):
            asks: dict[Any, Ask] = {}
            for request in resolve(self._model, (where,)):
                self._given[request] = change, asks
        return list(self._given)

    def _asking(self, request: Request) -> tuple[Callable[..., Ask], dict[Any, Ask]]:
        change, asks = self._given[request]
        return partial(self._ask_to, change), asks

    def _ask_to(self, change: Change, port: str, **place: Any) -> Ask:
        calls = None if port == "value" else self._chosen
        kind = ParameterHandler if port == "value" else EditHandler
        make = partial(kind, change, self._at, self._note)
        return Ask(port, make, calls=calls, needs_start=True, **place)

    def _caller_of(self, target: Target) -> nn.Module:
        if isinstance(target.module, torch.jit.ScriptModule):  # swapped now, not at a call
            return target.module
        return super()._caller_of(target)

    def _prepared(self) -> None:
        tracer = self._tracer
        if self._at is not None:
            check_at(self._at, tracer.places.targets)
        if any(change.binds for change in self._changes):
            for key in tracer.places:
                tracer.handler(*key)
        asks = [ask for ask, _ in tracer.places.entries]
        values = [ask for ask in dict.fromkeys(asks) if ask.port == "value"]
        if self._chosen is not None and len(values) == len(set(asks)):
            asked = "Some calls of a parameter or buffer were to be changed."
            raise ChangeError(asked, "It has none.", "Leave out calls=, or name its module.")
        self._parameters = [tracer.handler(ask.target.key, ask) for ask in values]
        # Parameters are swapped now, and at each call only looked at.
        tracer.changed |= {id(self._callers[ask]) for ask in values}
        self._saving = parameter_swap.swap(self._parameters, self._undo, attached=self._attached)
        paths = [path for _, modules in tracer.places.entries for path, _ in modules]
        self._parametrized = any("parametrizations" in path for path in paths)
        self._forget()

    def _forget(self) -> None:
        """Drop the weights that torch has computed and keeps (`parametrize.cached`)."""
        if self._parametrized:
            clear_parametrization_cache()

    def _pending_recomputation(self) -> ChangeError | None:
        if self._undo.covered():
            found = "A later edit was made of what this one had changed, and still holds that."
            return ChangeError(f"{self!r} was removed.", found, "Remove the later one first.")
        tracer = self._tracer
        if tracer is None:
            return None
        for handler in [*tracer.handlers.values()]:
            if handler.wrote:
                tracer.changed.add(handler.subject)
        for handler in self._parameters:
            # A parameter whose module is called is used there; else in any region, perhaps.
            used = id(self._callers[handler.ask]) if tracer.calls_of(handler) else None
            if self._saving is not None and self._saving.has_pending(used):
                return undone_too_early(f"edit changed {str(handler.place)!r}, which may be used")
        return super()._pending_recomputation()

    def _verify(self) -> None:
        for handler in self._parameters:
            if handler.missed:
                handler.fired = 0
                handler.explain(0, "its module was called with another tensor in its stead.")
        super()._verify()

    def _stop(self) -> None:
        super()._stop()
        self._undo.run()
        self._forget()


def handlers_of(one: edit) -> list[EditHandler]:
    """Return the handlers of an open edit, one for each place."""
    tracer = tracer_of(one)
    return [tracer.handler(*key) for key in tracer.places] if tracer is not None else []


def as_change(given: Any) -> Change:
    """Return a change: the one that a user gives, or one made of a tensor or a function."""
    if isinstance(given, (Change, Tensor)):
        return given if isinstance(given, Change) else replace(given)
    if callable(given) and not isinstance(given, type):
        return EditFunction(given)
    asked = f"{given!r} was given as a change."
    if isinstance(given, type):
        raise ChangeError(asked, "It is a class.", f"Give one of its kind: {given.__name__}(...).")
    found = f"It is a {type(given).__name__}."
    remedy = "Give one such as hookline.replace(2.0), a tensor, or a function of the value."
    raise ChangeError(asked, found, remedy)
