"""Trace a forward with every value checked, to find where bad numbers come from.

A value that is not finite is followed by its memory. An operation that makes one from finite
arguments is its origin; an operation with bad arguments passes their origins on. At the end, only
origins of values that reached the model's outputs count: values that were masked away do no harm.

- `ForwardTrace`: the state of one run: origins, running calls, spans of autograd nodes
- `OperationMode`: the function mode that shows every operation to a trace
- `ModuleHooks`: the hooks that show every call of a module to a trace
- `TracedCall`, `NodeSpan`: a call that is running, and the autograd nodes that something has made
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine.asks import Ask
from hookline.engine.calls import RunningCall
from hookline.engine.context import Context
from hookline.engine.handlers import UNCHANGED, Handler
from hookline.engine.lifecycle import never_forgotten
from hookline.engine.operations import Mode, innermost, name_of
from hookline.errors import PlaceNotFound
from hookline.guards.finite_checks import (
    TensorDescription,
    bad_leaves,
    infinity_signs,
    is_bad,
    is_mask,
)
from hookline.guards.kept_calls import ModelParts, count_of_writes
from hookline.guards.origins import (
    IgnoredPlaces,
    Origin,
    infinite,
    is_meant,
    label_tensors,
    line_of,
    show_line,
)
from hookline.guards.producer_samples import ProducerSample, RunSettings, kept_value
from hookline.places.resolution import Request, resolve
from hookline.places.tree import join, tensors_of, walk
from hookline.torch_private import (
    next_sequence_number,
    parameters_of,
    storage_id,
    without_function_modes,
)
from hookline.values.nested import leaves

__all__ = ["ForwardTrace", "ModuleHooks", "NodeSpan", "OperationMode", "TracedCall"]

_UNWRITTEN = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted",
    "resize_", "resize_as_",
})  # fmt: skip
_MOST = 8  # origins that are followed for one value


@dataclass(eq=False, slots=True)
class TracedCall:
    """A call of a module that is running."""

    module: nn.Module
    path: str
    number: int
    start: int
    inputs: Any
    positional: int
    settings: RunSettings = field(default_factory=RunSettings)
    origins: tuple[Origin, ...] = ()  # of its inputs
    inner: list[Origin] = field(default_factory=list["Origin"])  # of the outputs of calls in it


@dataclass(eq=False, slots=True)
class NodeSpan:
    """The numbers of the autograd nodes that an operation or a call has made."""

    start: int
    end: int
    number: int
    path: str
    operation: str = ""
    use: int = 0
    source: str = ""
    origins: tuple[Origin, ...] = ()  # of its bad inputs


class ForwardTrace:
    """The state of one run: where bad numbers came from, and which calls are running."""

    def __init__(self, parts: ModelParts, ignored: IgnoredPlaces, operations: bool) -> None:
        self.model, self.called, self.names = parts.model, parts.called, parts.names
        self.ignored, self.sees_operations = ignored, operations
        self.clock = 0  # numbers operations and calls
        self.origins: list[Origin] = []
        self.often: set[tuple[str, str]] = set()  # operations that a call used several times
        self.running: list[TracedCall] = []
        self.spans: list[NodeSpan] = []
        self.sample: ProducerSample | None = None  # to be filled
        # By the memory, of which parts may be written to one by one.
        self._of: dict[int, list[tuple[Tensor, tuple[Origin, ...]]]] = {}
        self._states: dict[int, tuple[str, str, Tensor]] = {}
        self._sound: set[int] = set()  # buffers that were finite when the call began
        self._inputs: dict[int, tuple[Origin, Tensor]] = {}
        for path, module in walk(self.model):
            for name, tensor in tensors_of(module):
                if is_lazy(tensor):  # the module was not called so far
                    continue
                kind = "parameter" if name in parameters_of(module) else "buffer"
                self._states.setdefault(_memory(tensor), (kind, join(path, name), tensor))
                if kind == "buffer" and not operations and not is_bad(tensor):
                    self._sound.add(_memory(tensor))

    def _note_inputs(self, running: TracedCall, inputs: Any) -> None:
        """Note the inputs of the call that came in bad, by name; others may be made so in place."""
        first = next(iter(inputs), None)
        for path, tensor in bad_leaves(inputs):
            ignored = self.ignored.input(path, first, running.module)
            origin = Origin("input", running.path, ignored=ignored, parts=path)
            self._inputs.setdefault(_memory(tensor), (origin, tensor))

    # -- following values -----------------------------------------------------------------------

    def origins_of(self, tensor: Tensor) -> tuple[Origin, ...]:
        """Return the known origins of a tensor's bad numbers."""
        memory = _memory(tensor)
        if memory in self._of:
            return self._ordered([o for _, own in self._of[memory] for o in own])
        origin = None
        if memory in self._states and memory not in self._sound:
            kind, path, own = self._states[memory]
            origin = Origin(kind, path, ignored=self.ignored.tensor(path))
            origin.values = [("", TensorDescription.of(own))]
        elif memory in self._inputs:
            origin, own = self._inputs[memory]
        else:
            return ()
        # A tensor that is trained is no mask.
        origin.meant = origin.ignored or (is_mask(own) and not own.requires_grad)
        self._add(origin)
        self._of[memory] = [(own, (origin,))]
        return (origin,)

    def _add(self, origin: Origin) -> Origin:
        self.origins.append(origin)
        return origin

    def _follow(self, tensors: list[Tensor], origins: tuple[Origin, ...]) -> None:
        ordered = self._ordered(origins)
        for tensor in tensors:  # kept, so that its memory is not used again
            memory = _memory(tensor)
            others = [one for one in self._of.get(memory, ()) if not _covers(tensor, one[0])]
            self._of[memory] = [*others, (tensor, ordered)]

    def _ordered(self, origins: Iterable[Origin]) -> tuple[Origin, ...]:
        return tuple(sorted(set(origins), key=self.origins.index)[:_MOST])

    def forget(self, tensor: Tensor) -> None:
        """Forget the origins of a tensor that was written to, and is finite now."""
        memory = _memory(tensor)
        if memory in self._of:
            left = [one for one in self._of[memory] if is_bad(one[0])]
            self._of[memory] = left
            if not left:
                del self._of[memory]

    # -- operations -----------------------------------------------------------------------------

    def note_operation(
        self, name: str, use: int, module: nn.Module | None, given: Any,
        bad: list[tuple[Tensor, frozenset[str], Tensor]], made: list[Tensor], frame: FrameType,
    ) -> None:  # fmt: skip
        """Note an operation that has made something that is not finite."""
        inner = self.innermost(module)
        path = "" if inner is None else inner.path

        def made_by(kind: str) -> Origin:
            source = show_line(line_of(frame))
            return Origin(kind, path, False, name, use, source=source, number=self.clock)

        known = [(self.origins_of(tensor), sign, where) for tensor, sign, where in bad]
        held = [origin for origins, _, _ in known for origin in origins]
        if any(not origins for origins, _, _ in known):  # nothing that was seen has made it
            held.append(self._add(made_by("outside")))
        wrong = [origin for origin in held if not origin.meant]
        if wrong or any(origin.ignored for origin in held):
            self._follow(made, tuple(wrong or held))
            return
        meant = is_meant(name, given, [(sign, where) for _, sign, where in known], made)
        if held and meant:
            self._follow(made, tuple(held))
            return
        origin = made_by("memory" if name in _UNWRITTEN else "operation")
        origin.ignored = module is not None and self.ignored.operation(module, name, use)
        origin.meant = meant or origin.ignored
        self._follow(made, (self._add(origin),))

    def innermost(self, module: nn.Module | None) -> TracedCall | None:
        """Return the innermost running call of a module; of any module if it has none."""
        for running in reversed(self.running):
            if module is None or running.module is module:
                return running
        return self.running[-1] if self.running else None

    # -- modules --------------------------------------------------------------------------------

    def enter(self, module: nn.Module, inputs: Any, positional: int) -> None:
        """Begin a call of a module."""
        self.clock += 1
        path, given = self.names.get(id(module), ""), kept_value(inputs)
        running = TracedCall(module, path, self.clock, next_sequence_number(), given, positional)
        if module is self.called and not self.running:
            self._note_inputs(running, inputs)
        if not self.sees_operations:
            bad = [tensor for _, tensor in bad_leaves(inputs)]
            running.origins = self._origins_of_inputs(bad)
        self.running.append(running)
        if self.sample is not None and self.sample.number == self.clock:
            self.sample.keep_call(running)

    def _origins_of_inputs(self, bad: list[Tensor]) -> tuple[Origin, ...]:
        """Return the origins of the bad inputs of a call, if only calls of modules are seen."""
        found: list[Origin] = []
        for tensor in bad:
            origins = self.origins_of(tensor)
            if not origins and self.running:  # made in the forward that called this
                origins = self._origins_inside(self.running[-1], tensor)
                self._follow([tensor], origins)
            found += origins
        return tuple(dict.fromkeys(found))

    def _origins_inside(self, running: TracedCall, value: Tensor) -> tuple[Origin, ...]:
        """Return the origins of a value that a forward made: calls in it, its inputs, or itself."""
        made = [o for o in self.origins if o.number > running.number]
        found = [o for o in dict.fromkeys((*made, *running.inner)) if not o.meant]
        found = found or [o for o in running.origins if not o.meant]
        if not found:
            for name, tensor in tensors_of(running.module):
                if is_bad(tensor):
                    path = join(running.path, name)
                    held = self.origins_of(tensor)
                    found += [o for o in held if o.path == path and not o.meant]
        if found:
            return tuple(found)
        origin = Origin("module", running.path, number=running.number)
        origin.ignored = origin.meant = self.ignored.module(running.module)
        if not self.sees_operations:
            origin.values = label_tensors({"": value})
            origin.given = label_tensors(running.inputs)
            origin.sample = ProducerSample(running.number, operation=False)
            origin.sample.keep_call(running)
        return (self._add(origin),)

    def _explains(self, origins: tuple[Origin, ...], tensor: Tensor) -> bool:
        """Return True if a tensor's bad numbers may come from these origins; a NaN is never meant.

        Writers that torch does not show may have made them: numpy, a script, `torch.vmap`.
        """
        meant = all(origin.meant and not origin.ignored for origin in origins)
        return bool(origins) and not (meant and "n" in infinity_signs(tensor))

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a call of a module."""
        running = self._ended(module)
        if running is None:
            return
        span = NodeSpan(running.start, next_sequence_number(), running.number, running.path)
        # The next operation, which is not seen, may hide the results of calls in it.
        span.origins = (*running.origins, *running.inner)
        self.spans.append(span)
        for _, tensor in bad_leaves(output):
            if self.ignored.module(module):
                origin = Origin("module", running.path, number=running.number)
                origin.ignored = origin.meant = True
                self._follow([tensor], (self._add(origin),))
            elif not self._explains(self.origins_of(tensor), tensor):
                self._follow([tensor], self._origins_inside(running, tensor))
            if self.running:
                self.running[-1].inner += self.origins_of(tensor)
        self._take_sample(running, output)

    def _ended(self, module: nn.Module) -> TracedCall | None:
        """Take the innermost call of a module off the stack."""
        while self.running:
            last = self.running.pop()  # calls that raised are dropped
            if last.module is module:
                return last
        return None

    def _take_sample(self, running: TracedCall, output: Any) -> None:
        """Keep the output of a call of which a sample is taken."""
        for origin in self.origins:  # its value may be a part of the output, or come before it
            if origin.sample is not None and origin.number == running.number:
                origin.sample.output = kept_value(output)
        if self.sample is not None and self.sample.number == running.number:
            self.sample.keep_output(output)
        if self.sample is not None and self.sample.module is running.module:
            self.sample.keep_module_gradients(output)


def _memory(tensor: Tensor) -> int:
    """Return a number that tells the memory of a tensor from others."""
    try:
        return storage_id(tensor)  # its address would end copy-on-write
    except (NotImplementedError, RuntimeError):  # no storage of its own: sparse, nested
        return id(tensor)


def _covers(one: Tensor, other: Tensor) -> bool:
    """Return True if a tensor is all of its memory, or the same part of it as another."""
    if one is other or one.nbytes == one.untyped_storage().nbytes():
        return True
    if one.is_nested or other.is_nested:  # without a shape
        return False
    return (one.storage_offset(), one.shape, one.stride()) == (
        other.storage_offset(), other.shape, other.stride()
    )  # fmt: skip


class OperationMode(Mode):
    """The function mode that shows every operation to a trace."""

    def __init__(self, trace: ForwardTrace) -> None:
        super().__init__()
        self.trace = trace
        self.recomputed: Callable[[Any], None] | None = None  # from the backward on

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, trace, name = kwargs or {}, self.trace, name_of(func)
        trace.clock += 1
        number, start, frame = trace.clock, next_sequence_number(), sys._getframe(1)
        given = [tensor for _, tensor in leaves((args, kwargs))]
        versions = [count_of_writes(tensor) for tensor in given]
        bad = [(t, infinity_signs(t), infinite(t)) for t in given if is_bad(t)]
        module, use = self._caller(name, frame)
        sample = trace.sample if trace.sample and trace.sample.number == number else None
        if sample is not None:
            self._before(sample, func, args, kwargs, module)
        output = func(*args, **kwargs)
        changed = [t for t, v in zip(given, versions, strict=True) if count_of_writes(t) != v]
        made = [t for _, t in leaves(output)] + changed
        if sample is not None:
            sample.keep_output(output if leaves(output) else changed[:1])
        if self.recomputed is not None:
            self.recomputed(made)
        if use:
            trace.often.add((trace.names.get(id(module), ""), name))
        if next_sequence_number() > start:
            path = trace.names.get(id(module), "")
            if module is None and trace.running:
                path = trace.running[-1].path
            source = show_line(line_of(frame))
            held = tuple(o for tensor, _, _ in bad for o in trace.origins_of(tensor))
            trace.spans.append(
                NodeSpan(start, next_sequence_number(), number, path, name, use, source, held)
            )
        wrong = [tensor for tensor in made if is_bad(tensor)]
        if wrong:
            trace.note_operation(name, use, module, (args, kwargs), bad, wrong, frame)
        for tensor in changed:
            if not is_bad(tensor):
                trace.forget(tensor)
        return output

    def _caller(self, name: str, frame: FrameType) -> tuple[nn.Module | None, int]:
        """Return the module whose forward calls an operation, and the number of that call in it."""
        found = innermost(frame)
        if found is None:
            return None, 0
        module, of_call = found
        if self.recomputed and all(one.module is not module for one in self.trace.running):
            return None, 0  # the program's own, from which the backward was called
        return module, self.count(name, of_call)

    def _before(
        self, sample: ProducerSample, func: Any, args: Any, kwargs: Any, module: Any
    ) -> None:
        sample.function, sample.arguments = func, kept_value((args, kwargs))
        sample.settings = RunSettings()
        running = self.trace.innermost(module)
        if running is not None:
            sample.keep_call(running)


class _ModuleHandler(Handler):
    """Shows the calls of one module to a trace."""

    def receive(self, value: Any, call: RunningCall) -> Any:
        context: Any = self.context
        if context is None or context.trace is None:
            return UNCHANGED
        self.fired += 1
        with without_function_modes():  # these computations are not the model's
            if self.target.port == "output":
                context.trace.leave(self.target.module, value)
            else:
                context.trace.enter(self.target.module, value, call.positional)
        if self.target.port == "output" and context.left is not None:
            context.left(self.target.module, value)
        return UNCHANGED


class ModuleHooks(Context):
    """The hooks that show every call of every module to a trace."""

    _verb = "guard"

    def __init__(self, model: nn.Module, trace: ForwardTrace | None, left: Any = None) -> None:
        super().__init__(model, ("", ":inputs"))
        self.trace = trace
        self.left: Callable[[nn.Module, Any], None] | None = left  # called after a call has ended
        never_forgotten(self)  # should entering fail

    def _resolve(self) -> list[Request]:
        # Also ScriptModules: torch calls hooks on those that Python calls, and on none inside.
        requests = resolve(self._model, self._wheres, hookable=False)
        with suppress(PlaceNotFound):  # a model without children
            requests += resolve(self._model, ("**", "**:inputs"), hookable=False)
        return requests

    def _ask(self, port: str, **place: Any) -> Ask:
        return Ask(port, _ModuleHandler, replaces=False, **place)

    def _verify(self) -> None:
        """Accept modules that were not called."""
