"""Where hooks are registered: what a context does at one module.

- `Site`: a context's hooks on one module, at most one forward and one pre-forward hook

Only this file registers hooks on modules, and the logs do for one whole value a module.
Hooks are local, appended, forward and pre-forward. Gradients are reached from there, through
tensors and autograd nodes (`gradients.py`).
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hookline.engine import arguments, gradients, input_gradients
from hookline.engine.checkpointing import Regions
from hookline.engine.generation import FORGOTTEN, Generation, Step, Steps
from hookline.engine.handlers import KEEP, Completed, Frame, Tap, is_over, now
from hookline.engine.offloading import value_of
from hookline.torch_private import (
    backward_id,
    forward_hooks_of,
    forward_hooks_with_kwargs_of,
    forward_pre_hooks_of,
    forward_pre_hooks_with_kwargs_of,
    next_sequence_number,
    outside_graphs,
)
from hookline.values.nested import get_part, set_part

if TYPE_CHECKING:
    from hookline.engine.lifecycle import Entering

__all__ = ["ACTIVE", "CLOSED", "KEYS", "Site"]

# The contexts that are open in this thread or task; None stands for those that see every call.
ACTIVE: ContextVar[frozenset[int | None]] = ContextVar("hookline_active", default=frozenset({None}))

CLOSED = 0  # the owner of what has ended, or was copied: no context has this serial

# Of our entries in hook dicts. torch's own count up from 0; a model that was saved while hooked
# brings keys of another process along, hence the random start.
KEYS = itertools.count(-1 - int.from_bytes(os.urandom(6)), -1)


_KINDS = {
    "output": "outputs", "input": "inputs", "inputs": "inputs", "value": "values",
    "grad_output": "grad_outputs", "grad_input": "grad_inputs", "grad_inputs": "grad_inputs",
}  # fmt: skip


class Site:
    """A context's hooks on one module.

    The model holds sites, sites hold their context weakly (unless attached), so that an abandoned
    context can be collected. Copies of a module get an inert site that removes itself.
    """

    # What few sites need stands here, so that making one is cheap.
    keeper: Entering | None = None
    counted = False  # whether calls are numbered from their start, for edits of some of them
    paired = False  # whether something must be known of a call before it begins
    closed = False
    count = 0  # completed calls
    foreign = 0  # calls from other threads and tasks
    elsewhere = "threads='all' takes those calls too."  # what to say of them
    outside = False  # whether a call was seen outside a backward
    changed = False  # whether a value was replaced
    again = (-1, 0)  # the last backward that recomputed calls, and how many
    regions: Regions | None = None  # where more is done than to look at values
    generation: Generation | None = None  # where calls are chosen by the step of a generation
    takes_cache = False  # whether the step is told by the calls of this module
    told: Steps | None = None  # of complete calls, where a backward may run them again
    inputs: Sequence[Tap] = ()
    values: Sequence[Tap] = ()
    outputs: Sequence[Tap] = ()
    grad_inputs: Sequence[Tap] = ()
    grad_outputs: Sequence[Tap] = ()
    lock: Any = None  # where every thread is seen
    frames: dict[int, list[Frame]] | None = None  # the running calls of each thread
    abandoned: Sequence[Frame] = ()  # calls that began and raised

    def __init__(
        self, module: nn.Module | None, context: weakref.ref[Any] | None, owner: int | None
    ) -> None:
        self.module = module  # None in a copied module
        self.context = context
        self.owner = owner  # the serial of the context, or None to act for every thread and task
        self.key = next(KEYS)

    def add(self, tap: Tap) -> None:
        """Serve one more tap."""
        kind = _KINDS.get(tap.target.port)
        if kind is not None:
            setattr(self, kind, [*getattr(self, kind), tap])

    def prepare(self) -> None:
        """All taps were added: find out what must be known of each call."""
        if self.owner is None:
            self.lock = threading.RLock()  # its own: an interrupt may leave it locked for ever
        gradient = self.grad_outputs or self.grad_inputs
        self.paired = bool(self.inputs or gradient or self.counted or self.generation)
        taps = *self.inputs, *self.outputs
        if self.counted or gradient or any(tap.replaces for tap in taps):
            self.regions = Regions()
            self.told = Steps() if self.generation is not None else None

    def register(self, module: nn.Module) -> None:
        """Put the hooks on a module.

        Straight into the module's hook dicts, which is what `register_forward_hook` does after
        making a handle, and a third of the cost of entering and leaving.
        """
        self.prepare()
        before = self.paired or self.values
        after = self.paired or self.outputs
        if before:
            forward_pre_hooks_with_kwargs_of(module)[self.key] = True
            forward_pre_hooks_of(module)[self.key] = self.before
        if after:
            forward_hooks_with_kwargs_of(module)[self.key] = True
            forward_hooks_of(module)[self.key] = self.after
        if not (before or after):
            self.anchor(module)

    def anchor(self, module: nn.Module) -> None:
        """Put a hook on a module that does nothing: by it the model keeps a context alive."""
        forward_pre_hooks_of(module)[self.key] = self.rest

    def unregister(self, module: nn.Module) -> None:
        """Take the hooks off a module; fine if they are off already."""
        self.closed = True
        forward_hooks_of(module).pop(self.key, None)
        forward_hooks_with_kwargs_of(module).pop(self.key, None)
        forward_pre_hooks_of(module).pop(self.key, None)
        forward_pre_hooks_with_kwargs_of(module).pop(self.key, None)

    def spread(self, modules: Iterable[nn.Module], before: Any, after: Any, named: bool) -> None:
        """Put the same two hooks on many modules, the first with named arguments if asked."""
        key = self.key
        for module in modules:
            forward_pre_hooks_of(module)[key] = before
            forward_hooks_of(module)[key] = after
            if named:
                forward_pre_hooks_with_kwargs_of(module)[key] = True

    def lift(self, modules: Iterable[nn.Module], named: bool) -> None:
        """Take such hooks off; fine if they are off already."""
        key, self.closed = self.key, True
        for module in modules:
            forward_pre_hooks_of(module).pop(key, None)
            forward_hooks_of(module).pop(key, None)
            if named:
                forward_pre_hooks_with_kwargs_of(module).pop(key, None)

    def left(self) -> None:
        """The block has ended in which this was taken off."""

    @outside_graphs
    def rest(self, module: nn.Module, args: Any) -> None:
        """A hook that does nothing, but that a copied module sheds it."""
        if self.module is None:
            self.unregister(module)

    def stranger(self, module: nn.Module) -> None:
        """A call that is not this context's: of another thread or task, or of a copied module."""
        if self.module is None:
            self.unregister(module)
        elif module is self.module:
            self.foreign += 1

    def recomputes(self) -> int | None:
        """The number of the call that is being recomputed in a backward; None if this is a new one.

        Checkpointing runs a module again inside the backward. A module that never ran outside the
        backward (in a custom one, say) is not being recomputed. Where the region is not known, the
        last call is taken to come first.
        """
        task = backward_id()
        if task == -1:
            self.outside = True
            return None
        if not self.outside:
            return None
        known = None if self.regions is None else self.regions.again()
        if known is not None:
            return known
        self.again = (task, self.again[1] + 1 if self.again[0] == task else 0)
        return max(self.count - 1 - self.again[1], 0)

    # torch.compile cuts a graph where a ContextVar is read, and after a cut the caller's frame is
    # another: what sees every call does not read it, here and in `after`.

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """The pre-forward hook."""
        if self.closed or kwargs is None:  # removed while torch was about to call it
            return None
        paired = self.paired
        if module is not self.module or (self.owner is not None and self.owner not in ACTIVE.get()):
            if not (paired or self.outputs):
                self.stranger(module)  # else the forward hook counts it
            return None
        if not paired:
            self._offer_values(module)
            return None
        return self.begin(module, args, kwargs, sys._getframe(1))

    def begin(
        self, module: Any, args: Any, kwargs: Any, caller: types.FrameType, start: int | None = None
    ) -> Any:
        """A call begins; the new arguments, if they were changed.

        With a start, the autograd sequence had come to that number when it began.
        """
        call = self.recomputes()
        running = self._running()
        first = self.count if call is None else call  # the lowest number that it may get at its end
        index = first + len(running) if call is None else call
        frame = Frame(index, call is not None, caller)
        frame.positional = len(args)
        running.append(frame)
        if self.generation is not None:
            frame.step = self._step(self.generation, frame, args, kwargs, caller)
        for tap in self.values:
            if tap.chosen is None or tap.wants(index, frame.step):
                tap.receive(value_of(tap.target, module), index, frame.recomputed, None)
        changed = False
        for tap in self.inputs:
            new = self._offer_input(tap, module, args, kwargs, frame)
            if new is not KEEP:
                args, kwargs = arguments.write(module, args, kwargs, tap.target, new)
                changed = True
        if self.grad_inputs or self.grad_outputs:
            frame.sequence = next_sequence_number() if start is None else start
            if torch.is_grad_enabled():
                frame.given = gradients.note_given(args, kwargs)
        for tap in self.grad_inputs:
            new = self._note_inputs(tap, module, args, kwargs, frame, first)
            if new is not None:
                args, kwargs = new
                changed = True
        self.changed |= changed
        return (args, kwargs) if changed else None

    def _note_inputs(
        self, tap: Tap, module: Any, args: Any, kwargs: Any, frame: Frame, first: int
    ) -> Any:
        """Note what the gradients of a call's inputs will come by; the arguments, if changed."""
        if self.generation is None:
            asked = tap.may_want(first)
        else:
            asked = self._watches(tap, frame.index, frame)
        return input_gradients.note_inputs(tap, module, args, kwargs, frame) if asked else None

    def _step(
        self, generation: Generation, frame: Frame, args: Any, kwargs: Any, caller: types.FrameType
    ) -> Step:
        """The step of a generation that a call is of."""
        module = cast(nn.Module, self.module)
        if frame.recomputed:
            return FORGOTTEN if self.told is None else self.told.of(frame.index)
        if self.takes_cache:
            return generation.enter(module, args, kwargs, caller)
        return generation.current(module, caller)

    def _watches(self, tap: Tap, index: int, frame: Frame | None) -> bool:
        """Whether the gradients of a call are to be watched: one that is recomputed only if it
        gave nothing.
        """
        if frame is not None and frame.recomputed:
            return index in tap.reasons
        return tap.chosen is None or tap.wants(index, frame and frame.step)

    def _offer_values(self, module: nn.Module) -> None:
        """Give the parameters and buffers of the module to their taps, at a call of it."""
        alone = not self.outputs
        call = self.recomputes() if alone else None
        recomputed = call is not None or (not alone and self.outside and backward_id() != -1)
        for tap in self.values:
            if tap.chosen is None or tap.wants(self.count, None):
                tap.receive(value_of(tap.target, module), self.count, recomputed, None)
        if alone and call is None:
            self.count += 1

    def _running(self) -> list[Frame]:
        """The running calls of this thread; what raised since is set aside."""
        frames = self.frames
        if frames is None:
            frames = self.frames = {}
        running = frames.setdefault(threading.get_ident(), [])
        if running:
            over = [f for f in running if f.running is None or is_over(f.running)]
            self._abandon(over)
            running[:] = [frame for frame in running if frame not in over]
        return running

    def _completed(self, caller: types.FrameType) -> Frame | None:
        now.frame = 0
        running = (self.frames or {}).get(threading.get_ident(), [])
        while running:
            frame = running.pop()
            if frame.running is caller:
                return frame
            self._abandon([frame])
        return None  # the context was entered while the module was running

    def _abandon(self, frames: list[Frame]) -> None:
        """Set the inputs aside of calls that raised; all that else was known of them goes."""
        for frame in frames:
            frame.running, frame.edges, frame.given = None, (), ()
            frame.pending = [(tap, kept) for tap, kept in frame.pending if tap.wants_late()]
            for tap in self.inputs:  # the next call has the same number
                tap.withdraw(frame.index)
            if frame.pending:
                keep = frame.pending[0][0].options.keep
                old = () if keep == "last" else self.abandoned
                self.abandoned = old if old and keep == "first" else [*old, frame]

    def _offer_input(self, tap: Tap, module: Any, args: Any, kwargs: Any, frame: Frame) -> Any:
        if tap.chosen is not None and not tap.wants(frame.index, frame.step):
            return KEEP
        try:
            value = arguments.read(module, args, kwargs, tap.target)
        except LookupError as error:
            tap.missing(frame.index, f"{error}.")
            return KEEP
        return tap.receive(value, frame.index, frame.recomputed, frame)

    @outside_graphs
    def after(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        """The forward hook."""
        if self.closed:  # removed while torch was about to call it
            return None
        if module is not self.module or (self.owner is not None and self.owner not in ACTIVE.get()):
            return self.stranger(module)
        return self.end(rest[-1], sys._getframe(1), args, rest[0])

    def end(self, output: Any, caller: types.FrameType, args: Any = (), kwargs: Any = None) -> Any:
        """A call ends; the new output, if it was changed."""
        frame = None
        if self.paired:
            frame = self._completed(caller)
            if frame is None:  # the context was entered while the module was running
                return None
            if self.takes_cache and self.generation is not None:
                self.generation.leave(caller)
        # Where every thread is seen, the numbers stay distinct, and the inputs and outputs of one
        # call together. A user's function is never called under the lock.
        original = output
        if self.owner is not None:
            index, recomputed = self._number(frame, output)
        else:
            with self.lock:
                index, recomputed = self._number(frame, output)
        if self.outputs and self.outputs[0].replaces:
            call = Completed(args, kwargs or {})
            output = self._offer_outputs(output, index, recomputed, frame, call)
        if self.grad_outputs or self.grad_inputs:
            output = self._watch_gradients(output, index, cast(Frame, frame))
        if output is original:
            return None
        self.changed = True
        return output

    def _watch_gradients(self, output: Any, index: int, frame: Frame) -> Any:
        """Watch the gradients of a call that has ended; its output, with gates if need be."""
        for tap in self.grad_outputs:
            if self._watches(tap, index, frame):
                output = _at_part(tap, output, index, tap.watch_outputs, output, index, frame)
        for tap in self.grad_inputs:
            if self._watches(tap, index, frame):
                input_gradients.watch_inputs(tap, output, index, frame)
        return output

    def _number(self, frame: Frame | None, output: Any) -> tuple[int, bool]:
        """Number a complete call, and keep what captures want of it."""
        call = self.recomputes() if frame is None else frame.index if frame.recomputed else None
        index = self.count if call is None else call
        if call is None:
            self.count += 1
            if self.told is not None and frame is not None:
                self.told.note(index, cast(Step, frame.step))
        if self.regions is not None:
            self.regions.note(index, changing=bool(self.inputs or self.outputs))
        if frame is not None:
            for tap, stored in frame.pending:
                tap.commit(stored, frame.index)
        if self.outputs and not self.outputs[0].replaces:
            self._offer_outputs(output, index, call is not None, frame, None)
        return index, call is not None

    def _offer_outputs(
        self, output: Any, index: int, recomputed: bool, frame: Frame | None, call: Completed | None
    ) -> Any:
        for tap in self.outputs:
            if tap.chosen is None or tap.wants(index, frame and frame.step):
                output = _at_part(tap, output, index, tap.receive, index, recomputed, call)
        return output

    def drain(self) -> None:
        """Keep the inputs of calls that began and never completed, after all others."""
        # Other threads may still begin calls: what is gone through here is a copy.
        frames = list((self.frames or {}).values())
        waiting = [frame for running in frames for frame in list(running)]
        late = [frame for frame in (*self.abandoned, *waiting) if frame.pending]
        last = bool(late) and late[0].pending[0][0].options.keep == "last"
        for frame in reversed(late) if last else late:
            for tap, stored in frame.pending:
                tap.commit(stored, frame.index, late=True)
        self.frames, self.abandoned = None, ()

    def __deepcopy__(self, memo: Any) -> Site:
        return _inert(type(self), self.key)

    def __reduce__(self) -> Any:
        return _inert, (type(self), self.key)


def _inert(kind: type[Site], key: int) -> Site:
    """The site of a copied or loaded module: it never acts, and removes itself when called."""
    site = kind.__new__(kind)
    Site.__init__(site, None, None, CLOSED)
    site.key = key
    return site


def _at_part(tap: Tap, output: Any, index: int, offer: Callable[..., Any], *more: Any) -> Any:
    """Offer the part of an output that a tap is for; the output, changed if that was changed."""
    parts = tap.target.parts
    try:
        value = get_part(output, parts) if parts else output
    except LookupError as error:
        tap.missing(index, f"{error}.")
        return output
    new = offer(value, *more)
    if new is KEEP or new is value:
        return output
    return set_part(output, parts, new) if parts else new
