"""Captures of gradients at whole outputs and inputs, in little time.

- `GradOutputLog`: the gradients at the outputs of modules
- `GradInputLog`: the same at their first inputs

A call with nothing unusual about it is noted by one hook for all modules, and its gradient as it
arrives. Every other call is handed over to the module's own tap, and done in the general way.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hookline.captures.arrivals import Arrival
from hookline.captures.entries import Entries, Kept
from hookline.captures.keeping import WHOLE, Options
from hookline.captures.logs import Log, LoggedTap, noted
from hookline.engine import gradients, input_gradients
from hookline.engine.checkpointing import Regions
from hookline.engine.handlers import Frame, is_over, now
from hookline.engine.tensor_hooks import Handles
from hookline.engine.tracer import ACTIVE
from hookline.places.tree import Step
from hookline.torch_private import (
    backward_id,
    base_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    global_forward_hooks,
    is_view,
    next_sequence_number,
    outside_graphs,
    saved_tensor_hooks,
    sequence_number,
    use_count,
    version_of,
)
from hookline.values.nested import Path

__all__ = ["GradInputLog", "GradOutputLog"]

Given = Sequence[tuple[Tensor, Any, int, int]]  # as `note_given` has them


class _GradientTap(LoggedTap):
    """What a log holds of one module, and what does the calls that are not for the log."""

    paired = True
    grads = noted("_grads")
    shaped = 0  # how many calls were looked through for those whose value is a tensor
    _outside = False

    def __init__(self, log: Any, path: str, module: nn.Module | None, ident: int) -> None:
        super().__init__(log, path, module, ident)
        self._grads: dict[tuple[int, int], dict[Path, Kept]] = {}
        self.general: set[int] = set()  # the calls that were not for the log
        self.shapes = {}

    def take(self, *noted: Any) -> None:
        index, task, grad = noted
        parts = self._grads.setdefault((index, task), {})
        if () in parts:  # the shares of an input come one by one
            grad = parts[()][0] + grad
        parts[()] = (grad, None)

    @property
    def count(self) -> int:
        return self.log.counts.get(self.ident, 0)

    @count.setter
    def count(self, count: int) -> None:
        self.log.counts[self.ident] = count

    @property
    def outside(self) -> bool:  # a call for the log is always outside
        return self._outside or self.count > len(self.general)

    @outside.setter
    def outside(self, outside: bool) -> None:
        self._outside = outside

    def _number(self, frame: Frame | None, output: Any) -> tuple[int, bool]:
        index, recomputed = super()._number(frame, output)
        if not recomputed:
            self.general.add(index)
        return index, recomputed

    def gathered(self) -> Entries:
        first, self.shaped = self.shaped, self.count
        for call in range(first, self.shaped):
            if call not in self.general:
                self.shapes.setdefault(call, WHOLE)
        return super().gathered()


class _GradientLog(Log):
    """What both kinds of gradients have in common: what is known of a call before it begins.

    An entry is what has arrived: the id of the module, the call, the backward pass, the gradient.
    """

    kind = _GradientTap

    def __init__(self, context: weakref.ref[Any], options: Options, owner: int | None) -> None:
        super().__init__(context, options, owner)
        self.ref = weakref.ref(self)
        # The running calls: the Python frame that calls both hooks of a call, and what was known
        # when it began.
        self.begun: list[tuple[types.FrameType, int, Given]] = []
        self.counts = defaultdict[int, int](int)  # completed calls, by the id of the module
        self.hung = Handles()  # the hooks on tensors and nodes
        self.paired_modules: list[nn.Module] = []  # those with a hook before each call

    def hook(self, steps: list[Step]) -> None:
        modules = [module for _, module in steps]
        self.steps += steps
        self.paired_modules += modules
        self.spread(modules, self.before_call, self.after_call, True)

    def unhook(self) -> None:
        super().unhook()
        self.lift(self.paired_modules, True)
        self.hung.remove_all()
        self.begun, self.paired_modules = [], []
        for tap in self.taps.values():
            tap.grad_inputs = tap.grad_outputs = ()
            tap.drain()

    @outside_graphs
    def before_call(
        self,
        module: Any,
        args: Any,
        kwargs: Any = None,
        # Found more quickly here than as names of this file.
        active: Callable[[], frozenset[int | None]] = ACTIVE.get,
        sequence: Callable[[], int] = next_sequence_number,
        enabled: Callable[[], bool] = torch.is_grad_enabled,
        backward_id: Callable[[], int] = backward_id,
        saved_tensor_hooks: Callable[[bool], Any] = saved_tensor_hooks,
        /,
    ) -> Any:
        """The pre-forward hook."""
        if kwargs is None or self.owner not in active():
            return None  # the forward hook counts it
        caller = sys._getframe(1)
        own = 1 if self.beside is None else self.beside.get(id(module), 1)
        # Other contexts may change this call; a checkpoint may run it again.
        if (
            len(forward_hooks_of(module)) == own
            and backward_id() == -1
            and enabled()
            and saved_tensor_hooks(True) is None
        ):
            given = self.note(args, kwargs)
            if given is not None:
                begun = self.begun
                while begun and is_over((last := begun[-1])[0]):  # that call raised
                    with suppress(ValueError):  # another thread was quicker
                        begun.remove(last)
                begun.append((caller, sequence(), given))
                return None
        tap = self.general_tap(id(module))
        return None if tap is None else tap.begin(module, args, kwargs, caller)

    def general_tap(self, ident: int) -> Any:
        """The tap of a module, ready for a call that is not for the log."""
        tap = self.tap_of(ident)
        if tap is not None and tap.regions is None:
            tap.regions = Regions()
            tap.add(tap)
        return tap

    @outside_graphs
    def after_call(
        self,
        module: nn.Module,
        args: Any,
        output: Any,
        active: Callable[[], frozenset[int | None]] = ACTIVE.get,
        /,
    ) -> Any:
        """The forward hook."""
        if self.owner not in active():
            return self.stranger(module)
        caller, begun, ident = sys._getframe(1), self.begun, id(module)
        if begun and begun[-1][0] is caller:
            call = begun.pop()
        else:
            call = next((call for call in begun[::-1] if call[0] is caller), None)
            if call is None:
                tap = self.taps.get(ident)
                return None if tap is None else tap.end(output, caller)
            begun.remove(call)
        index = self.counts[ident]
        self.counts[ident] = index + 1
        if len(self.hung) >= self.hung.many:
            self.hung.prune()
        if type(output) is not Tensor or not self.watch(output, ident, index, *call[1:]):
            self.hand_over(output, ident, index, *call)
        return None

    def hand_over(self, output: Any, ident: int, index: int, *call: Any) -> None:
        """Let the tap of a module hook what it has returned."""
        tap = self.tap_of(ident)
        if tap is not None:
            frame = Frame(index, False, call[0])
            now.frame = 0
            _, frame.sequence, frame.given = call
            tap.general.add(index)
            tap.outside = True
            self.watch_thoroughly(tap, output, index, frame)

    # What a call is given; None if it is not for the log.
    note: Callable[[Any, Any], Given | None] = staticmethod(gradients.note_given)

    def watch(self, output: Tensor, ident: int, index: int, start: int, given: Given, /) -> bool:
        """Hook what the gradient will come by; false if there is more to look at."""
        raise AssertionError("a log watches")

    def watch_thoroughly(self, tap: Any, output: Any, index: int, frame: Frame) -> None:
        """The same where there is."""
        raise AssertionError("a log watches")

    def only(self, entry: Any) -> Kept | None:
        ident, _, _, grad = entry
        return (grad, None) if self.counts[ident] == 1 else None

    def silent(self, one: bool) -> bool:
        return not self.counts.keys() >= self.names.keys()


# Of torch's own modules those that make what they return: no view of an input, and none itself.
_MAKERS: set[type[nn.Module]] = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm,
    nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU,
    nn.Tanh, nn.Sigmoid, nn.Softmax,
}  # fmt: skip


class GradOutputLog(_GradientLog):
    """The gradients at the outputs of modules."""

    port, suffix = "grad_output", ":grad_output"

    def hook(self, steps: list[Step]) -> None:
        makers: list[Step] = []
        rest: list[Step] = []
        for step in steps:
            found = rest
            if type(step[1]) in _MAKERS:  # and nobody else has to do with what it returns
                own = vars(step[1])
                others = forward_hooks_of(step[1]) or forward_pre_hooks_of(step[1])
                others = others or global_forward_hooks  # any may replace what a module returns
                if not (others or "forward" in own or own.get("inplace")):
                    found = makers
            found.append(step)
        self.steps += makers
        key, after_made = self.key, self.after_made
        for _, module in makers:
            forward_hooks_of(module)[key] = after_made
        super().hook(rest)

    @outside_graphs
    def after_made(
        self,
        module: Any,
        args: Any,
        output: Any,
        active: Callable[[], frozenset[int | None]] = ACTIVE.get,
        backward_id: Callable[[], int] = backward_id,
        saved_tensor_hooks: Callable[[bool], Any] = saved_tensor_hooks,
        held_by: Callable[[object], int] = sys.getrefcount,
        /,
    ) -> Any:
        """The forward hook of a module that makes what it returns: the one before is not needed."""
        if self.owner not in active():
            return self.stranger(module)
        ident = id(module)
        own = 1 if self.beside is None else self.beside.get(ident, 1)
        if (
            len(forward_hooks_of(module)) == own
            and type(output) is Tensor
            and output.requires_grad
            and backward_id() == -1
            and saved_tensor_hooks(True) is None
        ):
            index = self.counts[ident]
            self.counts[ident] = index + 1
            if len(self.hung) >= self.hung.many:
                self.hung.prune()
            base = base_of(output)
            if base is None:
                self.hang(output, ident, index)
            elif base.grad_fn and held_by(base) <= gradients.alone():
                self.hang_both(output, base, ident, index)
            else:
                self.hand_over(output, ident, index, sys._getframe(1), 0, ())
            return None
        tap = self.general_tap(ident)
        if tap is not None:
            tap.begin(module, args, {}, sys._getframe(1), 0)
            tap.end(output, sys._getframe(1))
        return None

    def watch(self, output: Tensor, ident: int, index: int, start: int, given: Given, /) -> bool:
        node: Any = output.grad_fn
        base = base_of(output)
        if node is None or sequence_number(node) < start:
            return False
        for other, *_ in given:
            if other is output or (base is not None and (base_of(other) is base or other is base)):
                return False
        if base is None:
            self.hang(output, ident, index)
            return True
        root: Any = base.grad_fn
        if root is None or sequence_number(root) < start or not gradients.alike(base, output):
            return False
        if sys.getrefcount(base) > gradients.alone() or use_count(base) > 2:
            return False
        self.hang_both(output, base, ident, index)
        return True

    def hang(self, output: Tensor, ident: int, index: int) -> None:
        """Hook an output."""
        arrive = Arrival(self.ref, ident, index).arrive
        self.hung.put(output, arrive)

    def hang_both(self, output: Tensor, base: Tensor, ident: int, index: int) -> None:
        """Hook an output, and what it is a view of."""
        arrival = Arrival(self.ref, ident, index)
        arrival.view(output, base)
        self.hung.put(base, arrival.at_base)
        self.hung.put(output, arrival.arrive)

    def watch_thoroughly(self, tap: Any, output: Any, index: int, frame: Frame) -> None:
        gradients.watch_outputs(tap, output, output, index, frame)


class GradInputLog(_GradientLog):
    """The gradients at the first inputs of modules."""

    port, suffix = "grad_input", ":grad_input"

    def note(self, args: Any, kwargs: Any) -> Given | None:
        if len(args) != 1 or kwargs or type(args[0]) is not Tensor:
            return None
        given = gradients.note_given(args, kwargs)
        return given if given and given[0][1] is not None else None

    def watch(self, output: Tensor, ident: int, index: int, start: int, given: Given, /) -> bool:
        last: Any = output.grad_fn
        base = base_of(output)
        if last is None or sequence_number(last) < start:
            return False
        if base is not None and not gradients.made_since(base.grad_fn, start):
            return False
        tensor, wanted, number, version = given[0]
        if version_of(tensor) != version and is_view(tensor):
            return False
        found: list[tuple[Any, int]] = []
        seen, stack = {last}, [last]  # as in `gradients.leading`, in less time
        for node in stack:  # which grows meanwhile
            for position, (follows, output_nr) in enumerate(node.next_functions):
                if follows is wanted:
                    if output_nr == number:
                        found.append((node, position))
                elif follows is None or follows in seen:
                    continue
                elif start <= sequence_number(follows) < gradients.LEAF:
                    seen.add(follows)
                    stack.append(follows)
        for node, position in found:
            arrival = Arrival(self.ref, ident, index)
            arrival.position = position
            handle = node.register_hook(arrival.at_node)
            self.hung.append((handle.hooks_dict_ref, handle.id))
        return bool(found)

    def watch_thoroughly(self, tap: Any, output: Any, index: int, frame: Frame) -> None:
        tensor, node, output_nr, _ = frame.given[0]
        noted = input_gradients.Noted(tap, tensor)
        noted.tensors = [(tensor, ())]
        noted.wanted = {(node, output_nr): input_gradients.Argument(tensor, [()])}
        frame.edges = (noted,)
        input_gradients.watch_inputs(tap, output, index, frame)
