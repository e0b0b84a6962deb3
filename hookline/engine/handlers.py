"""Handlers: what a context does with the values at one place, call by call.

- `Handler`: the base class; `capture`, `edit`, `hook` and the tools define subclasses
- `UNCHANGED`: what a handler returns to leave a value as it is
- `add_place(error, handler)`: tell in a note of the user's exception where it was raised
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hookline.engine import gradients
from hookline.engine.calls import RunningCall, Subject
from hookline.errors import ChangeError, PlaceError
from hookline.places.grammar import Place
from hookline.places.resolution import Target
from hookline.values.nested import Path
from hookline.values.sharding import copied

if TYPE_CHECKING:
    from hookline.engine.asks import Ask
    from hookline.engine.generation import Step, UnknownStep
    from hookline.engine.tensor_hooks import GradientHook, TensorHooks
    from hookline.engine.tracer import Tracer

__all__ = ["PART_REMEDY", "UNCHANGED", "Handler", "add_place"]

UNCHANGED: Any = object()
PART_REMEDY = "Capture the whole value and look at record[place] to see its parts."
_RECENT = 64  # calls whose gradients may still come


class Handler:
    """Take the values at one place, and leave or replace them."""

    separates = False  # whether one tensor may be put into several arguments as several

    def __init__(self, target: Target, tracer: weakref.ref[Tracer], ask: Ask) -> None:
        self.target, self.tracer, self.ask = target, tracer, ask
        self.fired = 0  # how often this did what was asked of it
        self.seen = 0  # how many values came
        self.taken = 0  # how many events of the log were taken
        self.wrote = False  # whether a value was changed in place
        self.known_reason = ""  # why nothing happened, where more is known than usual
        # Why a call gave nothing, by call and by path in the value, with the remedy.
        self.reasons: dict[int, dict[Path, tuple[str, str]]] = {}
        self.memory_watches: list[GradientHook] = []  # hooks that in-place changes may have cut off
        # Of gradients, the calls for which some came, and those of which some was lost.
        self.calls_with_gradient: dict[int, None] = {}
        self.calls_lost: list[int] = []
        self.watched: list[weakref.ref[Tensor]] = []  # tensors whose gradients are watched
        self.calls_missing = frozenset[int]() if ask.calls is None else ask.calls.named
        self.unknown_steps: dict[
            int, UnknownStep
        ] = {}  # calls of which it is unknown whether they are meant

    @property
    def replaces(self) -> bool:
        """Return True if values may be replaced."""
        return self.ask.replaces

    @property
    def subject(self) -> Subject:
        """The module, operation or tensor that the values at the place belong to."""
        return self.ask.subject_at(self.target.ident)

    @property
    def context(self) -> Any:
        """The context for which this acts; None if it is gone."""
        tracer = self.tracer()
        return None if tracer is None or tracer.context is None else tracer.context()

    @property
    def place(self) -> Place:
        """The place under the first name of its module, for which the model is searched."""
        tracer = self.tracer()
        return self.target.place if tracer is None else tracer.places.first_name(self.target)

    @property
    def tensor_hooks(self) -> TensorHooks:
        """The hooks on tensors and nodes that are taken off at the end."""
        hooks = cast("Tracer", self.tracer()).tensor_hooks
        hooks.prune()
        return hooks

    def shown(self) -> str:
        """Name the value for an error."""
        return f"The value at {str(self.place)!r}"

    # -- values ---------------------------------------------------------------------------------

    def receive(self, value: Any, call: RunningCall) -> Any:
        """Take a value; return UNCHANGED or what replaces it."""
        raise AssertionError("a handler receives")

    def take(self, number: Any, kept: Any) -> None:
        """Take what was logged of a call."""
        raise AssertionError("a handler of what is logged takes it")

    def take_only(self, number: Any, kept: Any, count: int) -> None:
        """Take what was logged of the only call that is kept, one of so many."""
        raise AssertionError("a handler of what is logged takes it")

    def missing(self, number: int, problem: str) -> None:
        """Refuse a call whose value lacks the part that the place names."""
        if self.replaces:
            asked = f"The place {str(self.place)!r} does not fit the value there:"
            raise PlaceError(asked, problem, PART_REMEDY)
        self.explain(number, problem, PART_REMEDY)

    # -- which calls are meant ------------------------------------------------------------------

    def wants(self, number: int, step: Step | None) -> bool:
        """Return True if a call was asked for, by its number or by the step of a generation."""
        calls = self.ask.calls
        if calls is None:
            return True
        if calls.step is None:
            return number in calls.numbers
        if step == calls.step:
            return True
        if not isinstance(step, str):
            self.refuse_unknown(number, cast("UnknownStep", step))
        return False

    def may_want(self, number: int) -> bool:
        """Return True if a call with this number or a later one was asked for."""
        calls = self.ask.calls
        return calls is None or calls.step is not None or calls.numbers[-1] >= number

    def refuse_unknown(self, number: int, why: UnknownStep) -> None:
        """Raise ChangeError for a call whose step in a generation is unknown."""
        calls = self.ask.calls
        assert calls is not None
        asked = f"The calls {calls.shown} at {str(self.place)!r} were to be changed."
        raise ChangeError(asked, f"Call {number} cannot be told: {why.found}", why.remedy)

    def tally(self) -> tuple[list[int], list[int]]:
        """Return the calls at which this acted, and those at which it should have and did not."""
        named = () if self.ask.calls is None else self.ask.calls.named
        missed = {*self.calls_missing, *(self.calls_lost if self.replaces else ())}
        return sorted({*(named or self.calls_with_gradient)} - missed), sorted(missed)

    # -- gradients ------------------------------------------------------------------------------

    def gradient(self, grad: Tensor, number: int, path: Path) -> Tensor | None:
        """Take the gradient of one tensor of a value; return what replaces it, or None.

        A negative number stands for a parameter or plain tensor, whose gradients are numbered by
        backward pass.
        """
        number = self.seen if number < 0 else number
        call = RunningCall(self.subject, None)
        call.number = number
        new = self.receive(copied(grad), call)
        self.remember(self.calls_with_gradient, number, None)
        return None if new is UNCHANGED else new

    def expect(self, value: Any, number: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        """Note a call whose gradients will come, for these tensors of this value."""

    def note_shares(self, number: int, path: Path) -> None:
        """Note that the gradient at a path will come in several shares."""

    def explain_separated(self, number: int, path: Path) -> None:
        """Explain that a tensor which is returned at several positions was separated."""
        self.explain(number, *gradients.DIVIDED, path=path)

    def watch_memory(self, hook: GradientHook, *tensors: Tensor) -> None:
        """Remember a hook that is lost if the memory of these tensors is changed in place."""
        hook.watch_memory(*tensors)
        watches = [*(old for old in self.memory_watches if not old.fired), hook]
        self.explain_lost(watches[:-_RECENT])
        self.memory_watches = watches[-_RECENT:]

    def explain_lost(self, hooks: Sequence[GradientHook] | None = None) -> None:
        """Explain the gradients that in-place changes have cut off: of all hooks, or of these."""
        for hook in self.memory_watches if hooks is None else hooks:
            if hook.lost:
                self.explain(hook.number, *gradients.VIEW_CHANGED, path=hook.path)
                self.calls_lost = [*self.calls_lost, hook.number][-_RECENT:]
        self.memory_watches = []

    # -- reasons --------------------------------------------------------------------------------

    def explain(self, number: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        """Record why a call has no value; reading raises it."""
        parts = {**self.reasons.get(number, {}), path: (reason, remedy)}
        if path:  # what is known of a part counts more, and later, than what is known of the whole
            parts.pop((), None)
        self.remember(self.reasons, number, parts)

    def gives_graph_later(self, number: int) -> bool:
        """Return True if a call ran without a graph, which its recomputation makes."""
        return cast("Tracer", self.tracer()).numbers.gives_graph_later(self.subject, number)

    def why(self, number: int | None = None) -> tuple[str, str] | None:
        """Return why a call, or the first such call, gave nothing, with the remedy, if known."""
        calls = self.reasons if number is None else (number,)
        return next((why for n in calls for why in self.reasons.get(n, {}).values()), None)

    def remember(self, entries: dict[int, Any], number: int, entry: Any) -> None:
        """Remember something about a call, and forget old calls: a context may stay attached."""
        entries[number] = entry
        if len(entries) > _RECENT:
            del entries[next(iter(entries))]


def add_place(error: BaseException, handler: Handler) -> None:
    """Tell in a note of the user's exception at which place it was raised."""
    error.add_note(f"hookline: raised at the place {str(handler.place)!r}")
