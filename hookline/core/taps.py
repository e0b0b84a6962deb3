"""What a context does with the values at one target, call by call.

- `Tap`: what is done with the values at one target; the verbs are its subclasses
- `Frame`: what is known of one running call; `Completed`: of one whose module has returned
- `is_over(running)`: whether a Python frame has ended
- `Call`: which execution of which module a value belongs to
"""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hookline.core import gradients
from hookline.errors import ChangeError, PlaceError
from hookline.places.resolution import Place, Target
from hookline.values.nested import Path
from hookline.values.sharding import copied

if TYPE_CHECKING:
    from hookline.core.calls import Calls
    from hookline.core.generation import Step, Untold
    from hookline.core.hooks import Context

__all__ = ["KEEP", "SERIALS", "Call", "Completed", "Frame", "Tap", "add_place", "is_over", "now"]

KEEP = object()  # what a tap returns to leave a value as it is
SERIALS = itertools.count(1)
_RECENT = 64  # calls whose gradients may still come


class Call:
    """Which execution of which module a value belongs to; given to functions that ask for it.

    At an input, `positional` says how many of the arguments were passed by position. At an output,
    `args` and `kwargs` are the arguments of the call, as the forward got them.
    """

    __slots__ = ("_tap", "args", "index", "kwargs", "module", "positional", "recomputed")

    def __init__(
        self, tap: Tap, index: int, recomputed: bool = False, frame: Frame | None = None
    ) -> None:
        self._tap = tap
        self.module = tap.target.module
        self.index = index
        self.recomputed = recomputed
        self.positional = 0 if frame is None else frame.positional
        self.args: tuple[Any, ...] = () if frame is None else frame.args
        self.kwargs: Mapping[str, Any] = {} if frame is None else frame.kwargs

    @property
    def place(self) -> Place:
        """The place of the value, under the module's first name."""
        return self._tap.place

    def __repr__(self) -> str:
        again = ", recomputed" if self.recomputed else ""
        return f"Call({str(self.place)!r}, {self.index}{again})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):  # other libraries give such functions the layer's name
            raise TypeError(f"A call was compared with {other!r}. Its name is call.place.")
        return self is other

    __hash__ = object.__hash__


class Tap:
    """What a context does with the values at one target. Subclasses are the verbs."""

    replaces = True  # whether values may be replaced: false for captures
    separates = False  # whether one tensor may be put into several arguments as several
    fired: int = 0
    seen: int = 0  # values that came
    wrote = False  # whether a value was changed in place
    # Why a call gave nothing, by path; and hooks that may have been lost.
    reasons: Mapping[int, dict[Path, tuple[str, str]]] = MappingProxyType({})
    guards: Sequence[Any] = ()
    silent = ""  # what to say if nothing happened, where more is known than usual
    # Of gradients, the calls for which some came, and those of which some was lost.
    reached: Mapping[int, None] = MappingProxyType({})
    losses: Sequence[int] = ()
    chosen: Calls | None = None  # those that were asked for; None: all
    lacking: Set[int] = frozenset()  # the calls that were named one by one and have not come
    # The calls of which it cannot be told whether they were asked for.
    untold: Mapping[int, Untold] = MappingProxyType({})

    def __init__(self, target: Target, context: weakref.ref[Context[Any]]) -> None:
        self.target = target
        self.context = context

    @cached_property
    def ref(self) -> weakref.ref[Tap]:
        """What hooks on tensors hold of this."""
        return weakref.ref(self)

    @property
    def place(self) -> Place:
        """The place under the first name of its module, for which the model is gone through."""
        context = self.context()
        return self.target.place if context is None else context.place_of(self.target)

    @property
    def spelled(self) -> str:
        """The place under the path by which it was found, as plain text."""
        return self.target.place

    def shown(self) -> str:
        """What an error calls a value here, under the first name of its module."""
        return f"The value at {str(self.place)!r}"

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        """Take a value; return KEEP or what shall stand in its place."""
        raise AssertionError("a tap receives")

    def wants(self, index: int, step: Step | None) -> bool:
        """Whether a call was asked for, by its number or by the step of a generation."""
        calls = self.chosen
        if calls is None:
            return True
        if calls.step is not None:
            if step == calls.step:
                return True
            if not isinstance(step, str):
                self.leave_out(index, cast("Untold", step))
            return False
        return index in calls.numbers

    def leave_out(self, index: int, why: Untold) -> None:
        """It cannot be told whether a call was asked for: an edit refuses it."""
        calls = cast("Calls", self.chosen)
        asked = f"The calls {calls.shown} at {str(self.place)!r} were to be changed."
        raise ChangeError(asked, f"Call {index} cannot be told: {why.found}", why.remedy)

    def gradient(self, grad: Tensor, index: int, path: tuple[Any, ...]) -> Tensor | None:
        """Take a gradient, or one tensor of it; return what shall stand in its place, or None."""
        # A negative index: of a parameter or plain tensor, numbered by backward pass.
        call = self.seen if index < 0 else index
        new = self.receive(copied(grad), call, False, None)
        self.reached = self.reached or {}
        self.remember(self.reached, call, None)
        return None if new is KEEP else new

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        """A call has taken place whose gradients will come, for these tensors of this value."""

    def explain(self, index: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        """A value that was asked for cannot be given for this call; say why on read or at exit."""
        self.reasons = self.reasons or {}
        parts = {**self.reasons.get(index, {}), path: (reason, remedy)}
        if path:  # what is known of a part counts more, and later, than what is known of the whole
            parts.pop((), None)
        self.remember(self.reasons, index, parts)

    def why(self, index: int | None = None) -> tuple[str, str] | None:
        """Why a call gave nothing, with the remedy, or why the first such call did, if known."""
        calls = self.reasons if index is None else (index,)
        return next((why for n in calls for why in self.reasons.get(n, {}).values()), None)

    def withdraw(self, index: int) -> None:
        """The call that had this number was not completed: the next one has it."""
        cast("dict[Any, Any]", self.reasons or {}).pop(index, None)

    def remember(self, entries: Any, index: int, entry: Any) -> None:
        """Remember something of a call; of the recent calls only, where not all are kept."""
        entries[index] = entry
        if self.replaces and len(entries) > _RECENT:  # an edit may be attached for ever
            del entries[next(iter(entries))]

    def missing(self, index: int, problem: str) -> None:
        """The call has not the value that the place names: told at exit, or at once by an edit."""
        remedy = "Capture the whole value and look at record[place] to see its parts."
        if self.replaces:
            asked = f"The place {str(self.place)!r} does not fit the value there:"
            raise PlaceError(asked, problem, remedy)
        self.explain(index, problem, remedy)

    watch_outputs = gradients.watch_outputs

    def may_want(self, index: int) -> bool:
        """Whether a call is asked for whose number will be this one or a later one."""
        calls = self.chosen
        return calls is None or calls.step is not None or calls.numbers[-1] >= index

    def tally(self) -> tuple[list[int], list[int]]:
        """The calls at which this did what was asked of it, and those at which it did not."""
        named = () if self.chosen is None else self.chosen.named
        missed = {*self.lacking, *(self.losses if self.replaces else ())}
        return sorted({*(named or self.reached)} - missed), sorted(missed)

    def several(self, index: int, path: Path) -> None:
        """The gradient at a path will come in several shares."""

    def divided(self, index: int, path: Path) -> None:
        """The tensor at a path is returned at several positions, which have become several."""
        self.explain(index, *gradients.DIVIDED, path=path)

    def guard(self, arm: Any, *tensors: Tensor) -> None:
        """Remember a hook that is lost if the memory of these tensors is changed in place."""
        arm.guard(*tensors)
        guards = [*(old for old in self.guards if not old.fired), arm]
        self.lost(guards[:-_RECENT])
        self.guards = guards[-_RECENT:]

    def lost(self, guards: Sequence[Any] | None = None) -> None:
        """Explain the gradients that did not come for such a change: those of all guards, or of
        those that are given up.
        """
        for arm in self.guards if guards is None else guards:
            if arm.lost:
                self.explain(arm.index, *gradients.VIEW_CHANGED, path=arm.path)
                self.losses = [*self.losses, arm.index][-_RECENT:]
        self.guards = ()


class _Now(threading.local):
    """The call whose hooks run now, in each thread."""

    frame = 0
    serial = 0


now = _Now()


class Frame:
    """What is known of one running call of one module.

    `running` is the Python frame of torch's that calls both hooks of a call: a call that raises
    has a first hook, but no second, and a recursive one has several of each.
    """

    pending: Sequence[tuple[Any, Any]] = ()  # inputs kept until the call is complete
    positional = 0  # how many arguments were passed by position
    args: tuple[Any, ...] = ()  # the arguments, once the call is complete
    kwargs: Mapping[str, Any] = MappingProxyType({})
    # For gradients, all at the start of the call: the autograd sequence number, the tensors that
    # the call was given, and what is noted of the inputs that are asked for.
    sequence = 0
    given: Sequence[Any] = ()
    edges: Sequence[Any] = ()
    step: Step | None = None  # of a generation, where calls are chosen by it

    def __init__(self, index: int, recomputed: bool, running: types.FrameType) -> None:
        self.index = index
        self.recomputed = recomputed
        self.running: types.FrameType | None = running
        # The same for all contexts that see this call: their hooks run one after the other.
        if now.frame != id(running):
            now.frame, now.serial = id(running), next(SERIALS)
        self.serial = now.serial


class Completed(Frame):
    """What is known of a call when its module has returned: its arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


def is_over(running: types.FrameType) -> bool:
    """Whether a Python frame has ended: then, and only then, Python lets it be cleared."""
    try:
        running.clear()
    except RuntimeError:
        return False
    return True


def add_place(error: BaseException, tap: Tap) -> None:
    """Tell in a note of the user's exception at which place it was raised."""
    error.add_note(f"hookline: raised at the place {str(tap.place)!r}")
