"""The engine: what one open context does at the calls of its modules.

- `Tracer`: two hooks, the same for all modules of a context, and the log of what they saw

To read it: `put_on` puts the hooks on, `before` and `after` are the hooks, `begin` and `end` are
for a call of which more is asked than a look at its output, and `read` gives a handler what was
logged of its place.

A hook appends an event `(subject, ask, number, kept)` to the log. A handler, the object for one
place, is made when somebody reads, or when a value is to be replaced.

`begin` and `end` define what happens at a call. There are shortcuts for the commonest calls, which
`benchmarks/overhead.py` measures: `after` logs whole outputs at once, where nothing else is asked
for; `_end_simple` watches the whole gradients of a call that nothing unusual surrounds, without a
pre-forward hook for `Plan.without_start`; and compiled graphs write to a `Slot`.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Collection
from itertools import takewhile
from typing import Any, cast

import torch
from torch import nn

from hookline.engine import arguments, gradients, input_gradients
from hookline.engine.asked_places import AskedPlaces
from hookline.engine.asks import Ask, Missing, Plan
from hookline.engine.call_numbers import CallNumbers
from hookline.engine.calls import RunningCall, Subject, is_over, module_id
from hookline.engine.checkpointing import may_run_again
from hookline.engine.compiling import Slot
from hookline.engine.events import INSIDE, Event, Keep, StopForward, make_log
from hookline.engine.fsdp import watch_gathered
from hookline.engine.generation import FORGOTTEN, Generation, Step, Steps
from hookline.engine.handlers import PART_REMEDY, UNCHANGED, Handler, add_place
from hookline.engine.module_hooks import ACTIVE, CLOSED, ModuleHooks
from hookline.engine.offloading import value_of
from hookline.engine.operations import Operation
from hookline.engine.tensor_hooks import TensorHooks
from hookline.places.grammar import INPUT_PORTS, is_gradient
from hookline.torch_private import (
    at_backward_end,
    backward_id,
    forward_hooks_of,
    global_forward_hooks,
    next_sequence_number,
    outside_graphs,
)
from hookline.values.nested import get_part, set_part

__all__ = ["Tracer"]

active = ACTIVE.get


class Tracer(ModuleHooks):
    """The hooks of one open context, the same two for all its modules, and what they saw."""

    def __init__(self, context: Any, model: Any, owner: int | None, keep: Keep = "all") -> None:
        super().__init__(context, owner)
        self.ref = weakref.ref(self)
        self.keep: Keep = keep
        self.events: Any = make_log(keep)
        self.logged: dict[tuple[Subject, Ask], list[Event]] = defaultdict(list)  # sorted by place
        self.sorted = 0  # how many events are in it
        self.handlers: dict[tuple[Subject, Ask], Handler] = {}
        self.places = AskedPlaces(model)
        self.output_ask: Any = None  # the Ask, if whole outputs are all that is asked for
        self.plans: dict[int, Plan] = {}  # else all that is asked of each module
        self.slots: dict[int, tuple[Slot, Any]] = {}  # for compiled graphs
        self.operations: dict[int, list[Operation]] = {}  # by the id of their module
        self.callers: dict[Ask, int] = {}  # the modules at whose calls parameters are read
        self.tensor_hooks = TensorHooks()
        # For stop=True: the places that have not fired so far.
        self.waiting: set[tuple[Subject, Ask]] = set()
        self.stopped = False
        # Calls that run.
        self.running: dict[Any, RunningCall] = {}
        self.deepest = 0  # how many ran at once
        self.backward = -1  # the last backward that ran calls again
        self.late: Any = make_log(keep)  # the inputs of calls that raised
        self.numbers = CallNumbers(shared=owner is None)
        self.foreign: dict[Subject, int] = defaultdict(int)  # calls of other threads and tasks
        # Of whole outputs: the modules that were called outside of a backward, and up to where the
        # log was searched for them.
        self.outside: set[Subject] = set()
        self.searched = 0
        self.changed: set[Subject] = set()  # of which a value was replaced
        # Generation: who tells its steps, and what was told of complete calls.
        self.generation: Generation | None = None
        self.steps: dict[Subject, Steps] = defaultdict(Steps)
        self.lock = threading.RLock()  # two threads may read

    # -- putting on and taking off --------------------------------------------------------------

    def put_on(
        self,
        callers: dict[Ask, nn.Module],
        takers: Collection[nn.Module] = (),
        anchors: bool = True,
    ) -> None:
        """Put the hooks on.

        `callers` are the modules at whose calls parameters are read; `takers` are those whose calls
        tell the steps of a generation. With `anchors`, modules whose parameters are watched keep
        the context alive.
        """
        self.callers = {ask: id(module) for ask, module in callers.items()}
        if self.looks_at_outputs:
            self.output_ask = self.places.entries[0][0]
            for slot, module in self.slots.values():
                slot.put_after([module], slot.after)
            for _, modules in self.places.entries if not self.slots else ():
                self.put_after([module for _, module in modules], self.after)
            return
        self.operations = self._plan_operations()
        planned = self._plan(callers, takers, anchors)
        # Other threads may call at once: the plans are there before any hook is on.
        self.plans = {id(module): plan for plan, modules in planned for module in modules}
        for plan, modules in planned:
            ends = plan.needs_start or plan.outputs or plan.gradients
            # The pre-hook of operations sees calls of other threads; that of parameters only keeps
            # the context alive.
            if plan.needs_start or plan.has_operations or not ends:
                self.put_before(modules, self.before)
            if plan.takes_kwargs:
                self.put_after(modules, self.after_with_kwargs, with_kwargs=True)
            elif ends:
                self.put_after(modules, self.after)
        for operations in self.operations.values():
            for operation in operations:
                operation.begin()

    def _plan_operations(self) -> dict[int, list[Operation]]:
        """Return the operations of which something is asked, by the id of their module."""
        wanted: dict[tuple[nn.Module, str], dict[Ask, None]] = {}
        for ask, modules in self.places.entries:
            if ask.operation is not None:
                for _, module in modules:
                    wanted.setdefault((module, ask.operation), {})[ask] = None
        found: dict[int, list[Operation]] = {}
        for (module, name), asks in wanted.items():
            operation = Operation(self, module, name, Plan(tuple(asks)))
            found.setdefault(id(module), []).append(operation)
        return found

    def _plan(
        self, callers: dict[Ask, nn.Module], takers: Collection[nn.Module], anchors: bool
    ) -> list[tuple[Plan, list[nn.Module]]]:
        """Return what is asked of the modules that get hooks."""
        wanted: dict[nn.Module, tuple[Ask, ...]] = dict.fromkeys(takers, ())
        for ask, modules in self.places.entries:
            if ask.operation is None and (ask.target is None or ask in callers):
                one: tuple[Ask, ...] = (ask,)
            elif anchors or ask.target is None:
                one = ()
            else:
                continue
            for module in [callers[ask]] if ask in callers else [module for _, module in modules]:
                known = wanted.setdefault(module, one)
                if known is not one and ask not in known:
                    wanted[module] = known + one
        plans: dict[Any, Plan] = {}
        found: dict[Plan, list[nn.Module]] = {}
        for module, asks in wanted.items():
            kind = asks, module in takers, id(module) in self.operations
            plan = plans.get(kind)
            if plan is None:
                plan = plans[kind] = Plan(*kind)
                plan.simple = plan.simple and self.owner is not None  # else numbers need the lock
            if plan.simple and not plan.grad_inputs and gradients.makes_its_output(module):
                plan = plan.without_start
            found.setdefault(plan, []).append(module)
        return list(found.items())

    def take_off(self) -> None:
        """Take the hooks off; fine if they are off already."""
        self.owner = CLOSED  # torch may still be about to call a hook
        self.remove_all()
        for slot, _ in self.slots.values():
            slot.remove_all()
        for operations in self.operations.values():
            for operation in operations:
                operation.end()
        self.tensor_hooks.remove_all()
        self._keep_late()
        self.keeper = self.generation = None

    @property
    def looks_at_outputs(self) -> bool:
        """Return True if whole outputs of modules are all that is asked for."""
        entries = self.places.entries
        first = entries[0][0]
        if self.waiting or self.keep == "first":
            return False
        return first.is_whole and first.port == "output" and all(ask is first for ask, _ in entries)

    def keep_in_graphs(self, detach: bool) -> None:
        """Keep the last outputs in a way that torch.compile takes into its graphs."""
        for _, modules in self.places.entries:
            for _, module in modules:
                self.slots[id(module)] = Slot(self, detach), module

    def leave_modes(self) -> None:
        """Leave torch's modes that could not be left when the hooks were taken off."""
        for operations in self.operations.values():
            for operation in operations:
                operation.leave()

    def foreign_call(self, module: nn.Module) -> None:
        """Count a call of another thread or task; take the hooks off a copied module."""
        if self.context is None:
            self.remove_from(module)
        elif self.owner != CLOSED:
            self.foreign[id(module)] += 1

    # -- the hooks ------------------------------------------------------------------------------

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """The pre-forward hook, on modules of which something must be known before a call."""
        if self.context is None:
            self.remove_from(module)
            return None
        for operation in self.operations.get(id(module), ()):
            operation.module_called(self)
        plan = self.plans.get(id(module))
        if plan is None or not plan.needs_start:  # a shallow copy shares its hooks with the module
            return None
        # Taken off meanwhile, it gets no kwargs. The forward hook counts calls of other threads.
        if kwargs is None or not (self.owner in active() or self._is_own_recomputation(module)):
            return None
        call = RunningCall(id(module), sys._getframe(1))
        if self.running:
            outermost = next(iter(self.running.values()), call)
            # A module that is called again, after a call that raised, say, lets that go.
            if outermost.subject == call.subject or len(self.running) > self.deepest:
                self.drop_raised()
        self.running[call.frame] = call
        if plan.simple and _is_simple_call(module):
            call.given = gradients.note_given(args, kwargs)
            if not plan.grad_inputs or input_gradients.is_simple_input(args, kwargs, call.given):
                call.sequence = next_sequence_number()
                call.simple = True
                return None
        return self.begin(plan, call, module, args, kwargs)

    @outside_graphs
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook."""
        if self.owner not in active() and not self._is_own_recomputation(module):
            return self.foreign_call(module)
        whole = self.output_ask
        if whole is None:
            return self._after_planned(module, args, {}, output, sys._getframe(1))
        number = None
        if backward_id() != -1:
            if self._was_called_before(id(module)):
                return None
            number = INSIDE
        try:
            kept = whole.keep(output)
        except Exception as error:
            self._explain(self.events, whole, id(module), number, error)
            raise
        self.events.append((id(module), whole, number, kept))
        return None

    @outside_graphs
    def after_with_kwargs(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any = None
    ) -> Any:
        """The forward hook, on modules whose output may be replaced."""
        if self.owner not in active() and not self._is_own_recomputation(module):
            return self.foreign_call(module)  # taken off meanwhile, it gets no kwargs
        return self._after_planned(module, args, kwargs, output, sys._getframe(1))

    def _after_planned(
        self, module: nn.Module, args: Any, kwargs: Any, output: Any, frame: types.FrameType
    ) -> Any:
        """End a call of a module that has a plan; return the new output, if it was changed."""
        plan = self.plans.get(id(module))
        if plan is None:
            return None
        if plan.needs_start:
            call = self.running.pop(frame, None)
            if call is None:  # the context was entered while the module was running
                return None
            if call.simple:
                self._end_simple(plan, call.subject, frame, output, call)
                return None
        else:
            if plan.simple and _is_simple_call(module) and not global_forward_hooks:
                self._end_simple(plan, id(module), frame, output)
                return None
            call = RunningCall(id(module), frame)
            start = next_sequence_number() if self._may_be_replaced(module) else 0
            self.begin(plan, call, module, args, kwargs, start)
        call.args, call.kwargs = args, kwargs
        return self.end(plan, call, output)

    def _may_be_replaced(self, module: nn.Module) -> bool:
        """Return True if a hook of somebody else's may have replaced an output before."""
        hooks = [*forward_hooks_of(module).items()]  # other threads may add to it
        before = [hook for _, hook in takewhile(lambda item: item[0] != self.key, hooks)]
        ours = all(isinstance(getattr(hook, "__self__", None), ModuleHooks) for hook in before)
        return bool(global_forward_hooks) or not ours

    # -- calls ----------------------------------------------------------------------------------

    def begin(
        self,
        plan: Plan,
        call: RunningCall,
        owner: Any,
        args: Any,
        kwargs: Any,
        sequence: int | None = None,
    ) -> tuple[Any, Any] | None:
        """Begin a call of a module or a torch function; return its arguments, if they changed.

        It is called before the call runs; or after it, for a plan that does not need the start.
        Then `sequence` says from which autograd node on all count as made by the call: 0 for any.
        """
        subject = call.subject
        self._identify(plan, call)
        call.positional = len(args)
        if self.generation is not None:
            module = owner if isinstance(owner, nn.Module) else self.places.located(subject)[1]
            call.step = self._step(self.generation, plan, call, module, args, kwargs)
        for ask in plan.values:
            self._offer_value(ask, call, owner)
        given = args, kwargs
        for ask in plan.inputs:
            args, kwargs = self._offer_input(ask, call, owner, args, kwargs)
        if plan.gradients:
            call.sequence = next_sequence_number() if sequence is None else sequence
            if torch.is_grad_enabled():
                call.given = gradients.note_given(args, kwargs)
            for ask in plan.grad_inputs:
                if self._may_be_watched(ask, call):
                    handler = self.handler(subject, ask)
                    args, kwargs = input_gradients.note_inputs(handler, owner, args, kwargs, call)
        if args is given[0] and kwargs is given[1]:
            return None
        self.changed.add(subject)
        return args, kwargs

    def end(self, plan: Plan, call: RunningCall, output: Any) -> Any:
        """End a call; return the new output, if it was changed."""
        if plan.takes_cache and self.generation is not None:
            self.generation.leave(cast(types.FrameType, call.frame))
        self._number(plan, call)
        for subject, ask, number, kept in call.pending:
            self._log(subject, ask, call.number if number is None else number, kept)
        new = output
        for ask in plan.outputs:
            if self._is_meant(ask, call):
                new = self._offer_output(ask, call, new)
        for ask in plan.grad_outputs:
            # An edit puts its gates in a discarded graph, too: the run must be like the first one.
            if (ask.replaces or not call.graph_discarded) and self._is_meant(ask, call):
                new = self._watch_output(ask, call, new)
        for ask in plan.grad_inputs:
            if not call.graph_discarded and self._is_meant(ask, call):
                input_gradients.watch_inputs(self.handler(call.subject, ask), new, call)
        if new is output:
            return None
        self.changed.add(call.subject)
        return new

    def _end_simple(
        self,
        plan: Plan,
        subject: Subject,
        frame: types.FrameType,
        output: Any,
        call: RunningCall | None = None,
    ) -> None:
        """End an ordinary call of which whole gradients are captured, without a handler.

        There is no `call` if nothing had to be known of it before it began.
        """
        completed = self.numbers.completed
        number = completed[subject]
        completed[subject] = number + 1
        if len(self.tensor_hooks) >= self.tensor_hooks.many:
            self.tensor_hooks.prune()
        for ask in plan.outputs:
            self.events.append((subject, ask, number, self._kept(ask, subject, number, output)))
        start, given = (0, ()) if call is None else (call.sequence, call.given)
        watch_output = gradients.watch_simple_output
        for ask in plan.grad_outputs:
            if not watch_output(self, ask, subject, number, output, start, given):
                unusual = call or RunningCall(subject, frame)
                unusual.number = number
                gradients.watch_outputs(self.handler(subject, ask), output, output, unusual)
        if call is None:
            return
        call.number = number
        for ask in plan.grad_inputs:
            if not input_gradients.watch_simple_input(self, ask, call, output):
                handler = self.handler(subject, ask)
                input_gradients.note_simple_input(handler, call)
                input_gradients.watch_inputs(handler, output, call)

    def _identify(self, plan: Plan, call: RunningCall) -> None:
        """Find out which call begins: a new one, or one that a backward runs again."""
        subject = call.subject
        repeated = self.numbers.repeated(subject)
        if repeated is None:
            call.number = self.numbers.completed[subject] + self._depth(call)
        else:
            call.recomputed, call.graph_discarded = True, repeated.had_graph
            call.number = self.numbers.completed[subject]  # if the first run raised
            if repeated.number is not None:
                call.number = repeated.number
            self._drop_at_backward_end()
        if plan.remembers:
            call.first_run = self.numbers.remember(subject, bool(plan.inputs or plan.outputs))
            if call.recomputed and call.first_run is not None:  # another region may repeat it
                call.first_run.number = call.number

    def _number(self, plan: Plan, call: RunningCall) -> None:
        """Number a complete call."""
        if not call.recomputed:
            call.number = self.numbers.end(call.subject)
            if plan.remembers and call.step is not None:
                self.steps[call.subject].note(call.number, call.step)
        if call.first_run is not None:
            call.first_run.number = call.number

    def _is_own_recomputation(self, module: nn.Module) -> bool:
        """Return True if another thread runs a call of this context again, for its backward.

        Autograd has threads of its own: one for each GPU, and others for nested backwards.
        """
        if self.owner == CLOSED or backward_id() == -1:
            return False
        return self.numbers.is_recomputing(id(module))

    def _was_called_before(self, subject: Subject) -> bool:
        """Return True if a module whose outputs are logged was called outside of a backward.

        Then the backward that runs it now runs a call again.
        """
        new = self.events[self.searched :] if self.keep == "all" else [*self.events]
        self.outside |= {event[0] for event in new if event[2] is not INSIDE}
        self.searched += len(new) if self.keep == "all" else 0
        return subject in self.outside

    def _depth(self, call: RunningCall) -> int:
        """Return how many other calls of the same subject run."""
        calls = [*self.running.values()]
        if any(one.subject == call.subject and one is not call for one in calls):
            self.drop_raised()
            calls = [*self.running.values()]
        return sum([one.subject == call.subject and one is not call for one in calls])

    def _drop_at_backward_end(self) -> None:
        """Set calls aside that torch ends early, as it recomputes no more than it needs."""
        task = backward_id()
        if task != self.backward:
            self.backward, ref = task, self.ref
            at_backward_end(lambda: _drop_raised_of(ref()))

    def drop_raised(self) -> None:
        """Set calls aside that raised."""
        for key, call in [*self.running.items()]:
            # Another thread may have ended the call meanwhile: then it is no longer there.
            if (call.frame is None or is_over(call.frame)) and self.running.pop(key, None) is call:
                for event in call.pending:
                    self.late.append(event)
        self.deepest = max(self.deepest, len(self.running))

    def _step(
        self,
        generation: Generation,
        plan: Plan,
        call: RunningCall,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Step:
        """Return the step of a generation that a call is of."""
        if call.recomputed:
            told = self.steps.get(call.subject)
            return FORGOTTEN if told is None else told.of(call.number)
        frame = cast(types.FrameType, call.frame)
        if plan.takes_cache:
            return generation.enter(module, args, kwargs, frame)
        return generation.current(module, frame)

    # -- values ---------------------------------------------------------------------------------

    def _is_meant(self, ask: Ask, call: RunningCall) -> bool:
        """Return True if a call is one of those that were asked for."""
        return ask.calls is None or self.handler(call.subject, ask).wants(call.number, call.step)

    def _offer_value(self, ask: Ask, call: RunningCall, module: nn.Module) -> None:
        """Read a parameter or buffer as a call begins."""
        assert ask.target is not None
        subject = ask.target.key
        handler, value = self.handler(subject, ask), value_of(ask.target, module)
        if ask.port == "grad":
            watch_gathered(handler, value)
        elif handler.wants(call.number, call.step):
            if ask.keep is None:
                handler.receive(value, call)
            elif not call.recomputed:
                self._hold(ask, call, subject, value, shared=True)

    def _offer_input(
        self, ask: Ask, call: RunningCall, owner: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Read an input; return the arguments, with another input there if it was replaced."""
        if not self._is_meant(ask, call):
            return args, kwargs
        try:
            value = arguments.read(owner, args, kwargs, ask)
        except LookupError as error:
            self._miss(ask, call, f"{error}.", as_input=True)
            return args, kwargs
        if ask.keep is None:
            new = self.handler(call.subject, ask).receive(value, call)
            return (
                (args, kwargs)
                if new is UNCHANGED
                else arguments.write(owner, args, kwargs, ask, new)
            )
        if not call.recomputed:
            # Others may hold the address of the model's own arguments.
            shared = module_id(call.subject) == id(self.places.model)
            self._hold(ask, call, call.subject, value, shared)
        return args, kwargs

    def _hold(
        self, ask: Ask, call: RunningCall, subject: Subject, value: Any, shared: bool
    ) -> None:
        """Keep a value that comes as a call begins, until the call is complete."""
        if not self._has_first_value(ask, subject):
            number = None if ask.calls is None else call.number
            keep = cast(Any, ask.keep_copy if shared else ask.keep)
            try:
                kept = keep(value)
            except Exception as error:
                if ask.port in INPUT_PORTS:  # a call that raises before it began leaves its number
                    self._explain(self.late, ask, subject, call.number, error)
                else:
                    self._explain(self.events, ask, subject, number, error)
                raise
            call.pending.append((subject, ask, number, kept))
            if type(kept) is Missing:
                return
        self._arrived(subject, ask)

    def _offer_output(self, ask: Ask, call: RunningCall, output: Any) -> Any:
        """Give an output, or a part of it, to who asked for it; return the new output."""
        try:
            value = get_part(output, ask.parts) if ask.parts else output
        except LookupError as error:
            self._miss(ask, call, f"{error}.")
            return output
        subject = call.subject
        if ask.keep is None:
            new = self.handler(subject, ask).receive(value, call)
            return output if new is UNCHANGED or new is value else set_part(output, ask.parts, new)
        if call.recomputed:
            return output
        if self._has_first_value(ask, subject):
            self._arrived(subject, ask)
        else:
            self._log(subject, ask, call.number, self._kept(ask, subject, call.number, value))
        return output

    def _watch_output(self, ask: Ask, call: RunningCall, output: Any) -> Any:
        """Watch the gradient of an output, or of a part of it; return the output with its gates."""
        try:
            value = get_part(output, ask.parts) if ask.parts else output
        except LookupError as error:
            self._miss(ask, call, f"{error}.")
            return output
        new = gradients.watch_outputs(self.handler(call.subject, ask), value, output, call)
        return output if new is value else set_part(output, ask.parts, new)

    def _may_be_watched(self, ask: Ask, call: RunningCall) -> bool:
        """Return True if, as a call begins, its gradients may be those that are asked for."""
        if self.generation is not None or call.recomputed:
            return self._is_meant(ask, call)
        # The call gets its number when it ends: it may be this one or a later one.
        first = self.numbers.completed[call.subject]
        return ask.calls is None or self.handler(call.subject, ask).may_want(first)

    # -- logging --------------------------------------------------------------------------------

    def _kept(self, ask: Ask, subject: Subject, number: int, output: Any) -> Any:
        """Return what is kept of an output."""
        assert ask.keep is not None
        try:
            return ask.keep(output)
        except Exception as error:
            self._explain(self.events, ask, subject, number, error)
            raise

    def _explain(self, log: Any, ask: Ask, subject: Subject, number: Any, error: Exception) -> None:
        """Explain an error that a function of the user's raised: in a note, and in a log."""
        add_place(error, self.handler(subject, ask))
        log.append((subject, ask, number, ask.explain(error)))

    def _log(self, subject: Subject, ask: Ask, number: int | None, kept: Any) -> None:
        self.events.append((subject, ask, number, kept))
        if type(kept) is not Missing:
            self._arrived(subject, ask)

    def _miss(self, ask: Ask, call: RunningCall, problem: str, as_input: bool = False) -> None:
        """Note that a value lacks the part that is asked for."""
        handler = self.handler(call.subject, ask)
        if ask.keep is None or is_gradient(ask.port):
            handler.missing(call.number, problem)
        elif as_input:
            number = None if ask.calls is None else call.number
            call.pending.append((call.subject, ask, number, Missing(problem, PART_REMEDY)))
        elif not call.recomputed:
            self._log(call.subject, ask, call.number, Missing(problem, PART_REMEDY))

    def _has_first_value(self, ask: Ask, subject: Subject) -> bool:
        """Return True if only the first value is kept, and it is there."""
        return self.keep == "first" and (subject, ask) in self.events

    def _arrived(self, subject: Subject, ask: Ask) -> None:
        """For stop=True: end the forward after the last place that is waited for."""
        if (subject, ask) in self.waiting:
            if ask.calls is not None and self.handler(subject, ask).calls_missing:
                return
            self.waiting.discard((subject, ask))
            if not self.waiting:
                self.stopped = True
                raise StopForward(self.key)

    def _keep_late(self) -> None:
        """Log the inputs of calls that never completed, after all others."""
        while self.running:  # other threads may still end calls; each call is taken out once
            _, call = self.running.popitem()
            for event in call.pending:
                self.late.append(event)
        late: list[Event] = [*self.late]
        self.late = []
        if not late:
            return
        logged = {event[:3] for event in self.events}
        places = {event[:2] for event in logged}
        for event in late:
            if event[2] is None:
                single = self.keep != "all" or type(event[3]) is Missing
                known = single and event[:2] in places
            else:  # a complete call may have got the same number since
                known = event[:3] in logged or event[2] < self.numbers.completed[event[0]]
            if not known:
                self.events.append(event)
                logged.add(event[:3])

    # -- reading --------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Sort the new events of the log by place."""
        if self.keep != "all":
            return
        for event in self.events[self.sorted :]:
            logged = self.logged[event[0], event[1]]
            if not (logged and logged[-1] is event):  # else an interrupt came after the append
                logged.append(event)
            self.sorted += 1

    def read(self, subject: Subject, ask: Ask) -> Handler:
        """Return the handler for one place, with all that was logged."""
        with self.lock:
            handler = self.handler(subject, ask)
            if self.keep != "all":
                self._read_single(handler)
                return handler
            self._sort()
            for _, _, number, kept in self.logged.get((subject, ask), ())[handler.taken :]:
                # In one step: an interrupt loses no event, and gives none twice.
                handler.taken, _ = handler.taken + 1, handler.take(number, kept)
        return handler

    def _read_single(self, handler: Handler) -> None:
        """Give a handler the only event that is kept of its place."""
        subject, ask = handler.subject, handler.ask
        if (subject, ask) in self.events:
            event, count = self.events[subject, ask]
            handler.take_only(event[2], event[3], count)
        slot = self.slots.get(subject) if ask is self.output_ask else None
        if slot is not None and slot[0].value is not None:
            handler.take_only(None, (slot[0].value, None), 1)

    def handler(self, subject: Subject, ask: Ask) -> Handler:
        """Return the handler for one place, which is made when it is first needed."""
        handler = self.handlers.get((subject, ask))
        if handler is None:
            made = ask.make(self.places.target(subject, ask), self.ref, ask)
            handler = self.handlers.setdefault((subject, ask), made)
        return handler

    def all_handlers(self) -> list[Handler]:
        """Return a handler for each place, with all that was logged."""
        return [self.read(subject, ask) for subject, ask in self.places]

    def fired(self) -> dict[Ask, set[Subject]]:
        """Return where what was asked for has happened, as far as known without handlers.

        For a captured gradient it is enough that a call was made, or a backward may come: one that
        is missing is explained when it is read.
        """
        found: dict[Ask, set[Subject]] = defaultdict(set)
        asks = {ask for ask, _ in self.places.entries}
        calls = [*self.numbers.completed.items()]  # other threads may still add to it
        called = {subject for subject, count in calls if count}
        captured = [ask for ask in asks if ask.keep is not None and is_gradient(ask.port)]
        for ask in captured:
            found[ask] |= called if ask.target is None else {ask.target.key}
        for subject, ask, _, kept in self.events if len(captured) < len(asks) else ():
            if type(kept) is not Missing:
                found[ask].add(subject)
        for ident, (slot, _) in self.slots.items():
            if slot.value is not None:
                found[self.output_ask].add(ident)
        for (subject, ask), handler in [*self.handlers.items()]:
            if handler.unknown_steps or handler.tally()[1]:
                found[ask].discard(subject)
            elif handler.fired:
                found[ask].add(subject)
        return found

    def calls_of(self, handler: Handler) -> int:
        """Return how many calls of the module or operation at a place were completed."""
        subject = self._called(handler)
        if self.output_ask is None:
            return self.numbers.completed.get(subject, 0)
        return len([event for event in self.events if event[0] == subject])

    def foreign_calls(self, handler: Handler) -> int:
        """Return how many calls at a place belonged to other threads and tasks."""
        return self.foreign.get(self._called(handler), 0)

    def called_in(self, ident: int) -> list[str]:
        """Return the operations that were called in a module, in order."""
        names = [name for one in self.operations.get(ident, ()) for name in one.names]
        return list(dict.fromkeys(names))

    def _called(self, handler: Handler) -> Subject:
        """Return whose calls show the values at a place."""
        if handler.ask.target is None:
            return handler.subject
        return self.callers.get(handler.ask, handler.target.ident)

    def close(self) -> None:
        """Let go of the model: what was captured does not keep it alive."""
        self.places.close()
        self.plans = {}
        self.slots = {ident: (slot, None) for ident, (slot, _) in self.slots.items()}


def _drop_raised_of(tracer: Tracer | None) -> None:
    if tracer is not None:
        tracer.drop_raised()


def _is_simple_call(module: nn.Module) -> bool:
    """Return True if no other hook may change a call, and no checkpoint may run it again."""
    return len(forward_hooks_of(module)) == 1 and backward_id() == -1 and not may_run_again()
