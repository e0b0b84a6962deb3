"""Stop at the first producer of a NaN or an infinity.

- `guard(model)`: a context in which a bad number that leaves the model, forward or backward, is an
  error that names what made it
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.core import distributed, gradients
from hookline.core.hooks import Context
from hookline.core.nested import leaves, show_path
from hookline.core.places import Request, Target, Where, resolve
from hookline.core.recomputation import in_backward
from hookline.core.sites import KEEP, Frame, Tap
from hookline.errors import NotHookable, PlaceNotFound
from hookline.finite_checks import Numbers, all_finite, is_bad, numbers, probe
from hookline.guard_dumps import write_dump
from hookline.guard_gradients import Backward
from hookline.guard_origins import Ignored, Labelled, Origin
from hookline.guard_reports import Fault, explain, fault_of
from hookline.guard_runs import Kept, Parts
from hookline.guard_search import (
    describe_sample,
    find_backward,
    find_forward,
    of_outputs,
    parameter_names,
    take_sample,
)
from hookline.guard_tracing import Modules, Trace

__all__ = ["guard"]

_DIFFERENT = "The second run was bad at other places than the first: something of it is random."
_MANY = 64
_RECENT = 16  # calls whose backward may still come
_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
Part = tuple[Any, ...]


def _unwrapped(model: Any) -> Any:
    """The model inside DDP and compile: run again, it must not meet the other ranks."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def _is_spread(model: nn.Module) -> bool:
    """Whether a forward of the model needs other ranks, so that it cannot be run again here."""
    return any(
        distributed.is_gathered(module)
        or (isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized())
        for module in model.modules()
    ) or any(distributed.placements(p) is not None for p in model.parameters())


class _Tap(Tap):
    replaces = False
    name = ""  # of a parameter

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        context: Any = self.context()
        self.fired += 1
        if context is not None and not recomputed and not context.busy:
            if frame is None:
                context.ended(value, index)
            else:
                context.began(value, frame)
        return KEEP

    def gradient(self, grad: Tensor, index: int, path: Part) -> None:
        context: Any = self.context()
        self.fired += 1
        if context is not None and not context.busy:
            context.arrived(self, grad, index, path)


class _Pass:
    """One backward: the probes of its gradients, and the calls that it went through."""

    def __init__(self) -> None:
        self.probes: list[tuple[str, Tensor]] = []
        self.calls: dict[int, Kept] = {}


class guard(Context[_Tap]):
    """Stop at the first producer of a NaN or an infinity, in the forward or in the backward.

    >>> class Normed(nn.Module):
    ...     def forward(self, x):
    ...         return x / x.norm(dim=-1, keepdim=True)
    >>> model = nn.Sequential(nn.ReLU(), Normed())
    >>> with guard(model, to=None):
    ...     model(torch.tensor([[-1.0, -2.0], [3.0, 4.0]]))
    Traceback (most recent call last):
    hookline.errors.NonFiniteError: guard found numbers that are not finite in step 0, ...

    Args:
        model: any module.
        ignore: places whose bad numbers are meant: modules, operations (`"attn/log"`), parameters,
            parts of the model's inputs (`":inputs[mask]"`) or outputs.
        scaler: the `GradScaler` of mixed precision. Gradients that are bad only because of its
            scale are left to it: it skips the step.
        to: the folder for what `hookline.replay` runs again; None to write nothing.
        careful: check every module as it runs. The guard does so by itself where a call cannot be
            run again as it was.

    It acts inside `with`, or from `.attach()` to `.remove()`, over any number of steps; a step is
    a call of the model and its backward. A bad number is a fault if it leaves the model, in an
    output or in the gradient of a parameter or an input: what was masked away inside is none. The
    error is a `NonFiniteError`; its `fault` has all that is known. Each step is checked by one
    number for each output and gradient; only if one of them is bad, the call is run again, from
    its inputs, random numbers and buffers, with all operations looked at. Modules with hooks of
    yours run them again, too.
    """

    _verb = "guard"

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Where | None = None,
        scaler: Any = None,
        to: str | Path | None = "hookline-guard",
        careful: bool = False,
    ) -> None:
        super().__init__(_unwrapped(model), ("", ":inputs", ":grad_output"))
        self._ignore = () if ignore is None else (ignore,)
        self._scaler, self._to = scaler, to
        self.careful = careful
        self.busy = False  # whether a call is being run again
        self.skipped = 0  # backwards that were left to the scaler

    # -- entering and leaving -------------------------------------------------------------------

    def _resolve(self) -> list[Request]:
        requests = resolve(self._model, self._wheres)
        with suppress(PlaceNotFound, NotHookable):  # a model without parameters
            requests += resolve(self._model, ("**:grad",))
        return requests

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> _Tap:
        tap = _Tap(target, ref)
        if target.port == "grad":
            tap.name = str(target.place).removesuffix(":grad")
        return tap

    def _start(self, attached: bool) -> None:
        self._running: dict[int, list[tuple[Frame, Kept]]] = {}
        self._calls: OrderedDict[int, Kept] = OrderedDict()
        self._pending: list[tuple[Kept, list[Tensor]]] = []
        self._passes: dict[int, _Pass] = {}
        self._meant: dict[Part, Tensor] = {}  # where an output is infinite on purpose
        self._modules: Modules | None = None
        self._ignored = Ignored(self._model, self._ignore)
        super()._start(attached)
        self._parts = Parts(self._model)
        target = self._requests[1].targets[0]  # of the inputs
        self._input_tap = _Tap(target, weakref.ref(self))
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        if self.careful or _is_spread(self._model):
            self._look_closely()

    def _look_closely(self) -> None:
        """Check every module from now on."""
        self.careful = True
        if self._modules is None and self._open:
            self._modules = Modules(self._model, None, self._left)
            self._modules._enter(attached=False)

    def _stop(self) -> None:
        super()._stop()
        if self._modules is not None:
            self._modules._leave()
            self._modules = None
        for kept in self._calls.values():
            kept.close()
        self._calls.clear()
        self._running.clear()

    def _verify(self) -> None:
        pending, self._pending = self._pending, []
        self._check(pending)
        literal = self._requests[0]
        if not self._taps[literal.targets[0].key].fired:
            raise self._never_fired(literal, literal.targets[0])

    # -- forward --------------------------------------------------------------------------------

    def began(self, inputs: Any, frame: Frame) -> None:
        """A call of the model begins."""
        pending, self._pending = self._pending, []
        self._check(pending)  # of a call without a backward
        if in_backward() == -1:
            self._passes.clear()  # of backwards that raised
        running = self._running.setdefault(threading.get_ident(), [])
        running[:] = [(f, kept) for f, kept in running if not _is_over(f)]
        kept = Kept(self._parts, inputs, frame.positional)
        running.append((frame, kept))
        if self._modules is not None:
            self._modules.trace = kept.trace = Trace(self._model, self._ignored, operations=False)
        if kept.grad:
            self._watch_more(inputs)

    def _watch_more(self, inputs: Any) -> None:
        """Watch inputs that require grad, and parameters that do so since this was entered."""
        for tap in self._taps.values():
            if tap.name and tap.reasons:  # it did not require grad
                tensor = tap.target.tensor()
                if tensor is not None and tensor.requires_grad:
                    tap.reasons = {}
                    gradients.watch_tensor(tap, tensor)
        for _, tensor in leaves(inputs):
            known = self._watched.get(id(tensor))
            if tensor.requires_grad and (known is None or known() is not tensor):
                if len(self._watched) > _MANY:
                    self._watched = {i: r for i, r in self._watched.items() if r() is not None}
                self._watched[id(tensor)] = weakref.ref(tensor)
                gradients.watch_tensor(self._input_tap, tensor)

    def ended(self, output: Any, index: int) -> None:
        """A call of the model ends."""
        running = self._running.get(threading.get_ident())
        if not running:  # entered while it was running
            return
        _, kept = running.pop()
        kept.number = index
        kept.lost = self._parts.buffers.learn(kept.buffers)
        found = leaves(output)
        if any(tensor.requires_grad for _, tensor in found):
            self._calls[index] = kept
            if len(self._calls) > _RECENT:
                self._calls.popitem(last=False)[1].close()
        if kept.trace is not None:
            return  # it is looked at when the call of the outermost module is known to have ended
        kept.outputs = [(path, tensor.detach()) for path, tensor in found]
        probes = [one for _, tensor in kept.outputs if (one := probe(tensor)) is not None]
        # Elsewhere than on the CPU it would have to be waited for: one wait for the whole step.
        if index in self._calls and not all(one.is_cpu for one in probes):
            self._pending.append((kept, probes))
        else:
            self._check([(kept, probes)])

    def _check(self, pending: list[tuple[Kept, list[Tensor]]]) -> None:
        """Look at the probes of outputs."""
        for kept, probes in pending:
            if not all_finite(probes):
                self._forward_failed(kept)
            kept.outputs = []

    def _forward_failed(self, kept: Kept) -> None:
        bad = [
            (path, tensor)
            for path, tensor in kept.outputs
            if is_bad(tensor) and not self._ignored.output(path, self._model)
        ]
        if not bad or all(self._is_known(path, tensor) for path, tensor in bad):
            return  # the sum has overflowed, or it is meant
        seen: Labelled = [(_label(path), Numbers.of(tensor)) for path, tensor in bad]
        doubts = kept.doubts()
        if doubts:
            raise self._unknown(kept, seen, doubts, backward=False)
        with _Busy(self):
            found = find_forward(kept, self._ignored)
        if not found.bad or (not found.same and not found.origins):
            doubts = [
                "the second run gave finite values: something of it is random, or was changed"
            ]
            raise self._unknown(kept, seen, doubts, backward=False)
        if not found.origins:
            for path, tensor in bad:
                self._meant[path] = cast(Tensor, numbers(tensor)).isfinite()
            return
        fault = fault_of(found.origins, found.trace.often, kept.number, seen)
        if not found.same:
            fault.remarks.append(_DIFFERENT)
            self._look_closely()
        raise self._told(kept, found.origins[0], fault)

    def _is_known(self, path: Part, tensor: Tensor) -> bool:
        """Whether an output is infinite just where it was before, on purpose."""
        known, own = self._meant.get(path), cast(Tensor, numbers(tensor))
        same = known is not None and known.shape == own.shape and torch.equal(known, own.isfinite())
        return same and not own.isnan().any()

    def _left(self, module: nn.Module, output: Any) -> None:
        """Where every module is checked: a call of one has ended."""
        if module is not self._model:
            kept = next((k for k in self._calls.values() if k.backward is not None), None)
            if in_backward() != -1 and kept is not None:
                kept.backward.recomputed(module, output)
            return
        trace = cast(Modules, self._modules).trace
        kept = next((k for k in reversed(self._calls.values()) if k.trace is trace), None)
        found = of_outputs(cast(Trace, trace), output, self._ignored)
        if found.origins:
            seen: Labelled = [
                (_label(path), Numbers.of(tensor))
                for path, tensor in leaves(output)
                if is_bad(tensor)
            ]
            number = self._taps[self._requests[0].targets[0].key].fired - 1
            raise self._finish(fault_of(found.origins, set(), number, seen))
        if kept is not None:
            kept.backward = Backward(cast(Trace, trace), parameter_names(self._model))
            kept.backward.watch(tensor for _, tensor in leaves(output))

    # -- backward -------------------------------------------------------------------------------

    def arrived(self, tap: _Tap, gradient: Tensor, index: int, path: Part) -> None:
        """A gradient arrives, of a parameter, of an input, or of an output of the model."""
        task = in_backward()
        if task not in self._passes:
            self._passes[task] = _Pass()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._backward_ended(task))
        found = self._passes[task]
        if tap.target.port == "grad_output":
            kept = self._calls.get(index)
            if kept is not None:
                found.calls[index] = kept
                kept.gradients[path] = (gradient, gradient._version)
        else:
            one = probe(gradient)  # the gradient itself is not kept, or torch would have to copy it
            if one is not None:
                found.probes.append((tap.name, one))

    def _backward_ended(self, task: int) -> None:
        found = self._passes.pop(task, None)
        if found is None or not self._open:
            return
        for outer in self._passes.values():  # a checkpoint runs a backward inside another
            found.calls |= outer.calls
        pending, self._pending = self._pending, []
        try:
            self._check(pending)
            if not all_finite([one for _, one in found.probes]):
                self._backward_failed(found)
        finally:
            if not self._passes:
                for kept in found.calls.values():
                    kept.gradients = {}

    def _backward_failed(self, found: _Pass) -> None:
        flagged = {name for name, one in found.probes if not one.isfinite()}
        held = dict(self._model.named_parameters())
        known = {name: held[name].grad for name in flagged if name in held}
        certain = [(n, g) for n, g in known.items() if g is not None and is_bad(g)]
        seen: Labelled = [(f"the gradient of {n!r}", Numbers.of(g)) for n, g in certain]
        if known and not certain and all(g is not None for g in known.values()):
            return  # sums that have overflowed
        scale = self._scale()
        calls = [found.calls[index] for index in sorted(found.calls)]
        for kept in calls:
            bad = [(p, g) for p, (g, _) in kept.gradients.items() if is_bad(g)]
            if bad and scale <= 1:
                origin = Origin("loss", "", backward=True)
                origin.values = [(f"gradient of {_label(p)}", Numbers.of(g)) for p, g in bad]
                raise self._finish(fault_of([origin], set(), kept.number, seen or origin.values))
            if bad:
                self.skipped += 1
                return
        self._search_backward(calls, seen, scale, bool(known))

    def _search_backward(
        self, calls: list[Kept], seen: Labelled, scale: float, certain: bool
    ) -> None:
        doubts: list[str] = []
        for kept in calls:
            if kept.backward is not None:  # every node was looked at
                origins = [o for own in kept.backward.bad.values() for o in own if not o.meant]
                origins.sort(key=kept.backward.origins.index)
                if origins and scale <= 1:
                    fault = fault_of(list(dict.fromkeys(origins)), set(), kept.number, seen)
                    raise self._finish(fault)
                continue
            doubts += kept.doubts()
            if doubts:
                continue
            with _Busy(self):
                again = find_backward(kept, self._ignored, scale)
            if again.origins and again.same:
                often = again.trace.often
                fault = fault_of(again.origins, often, kept.number, seen or again.seen)
                raise self._told(kept, again.origins[0], fault, scale)
            if again.bad:
                return  # all of it is ignored
            if not again.same:
                doubts.append("the second forward was not finite, as the first was")
        if scale > 1:
            self.skipped += 1
            return
        if certain or doubts:
            doubts = doubts or ["the second run gave finite gradients: something of it is random"]
            raise self._unknown(calls[0] if calls else None, seen, doubts, backward=True)

    def _scale(self) -> float:
        """What the scaler multiplies the loss with."""
        scaler = self._scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0

    # -- telling --------------------------------------------------------------------------------

    def _told(self, kept: Kept, origin: Origin, fault: Fault, scale: float = 1.0) -> Exception:
        """The error for a fault, with what the producer was given, and a dump of it."""
        sample = None
        if origin.number:
            with _Busy(self):
                sample = take_sample(kept, self._ignored, origin, scale)
            if sample is not None:
                describe_sample(sample, origin)
                fault.values, fault.given = origin.values, origin.given
        elif origin.kind in ("parameter", "buffer"):
            tensor = self._model.get_parameter if origin.kind == "parameter" else None
            own = tensor or self._model.get_buffer
            fault.values = [("", Numbers.of(own(origin.path)))]
        elif origin.kind == "input":
            found = [t for p, t, _ in kept.versions if _label(p, "") == origin.path]
            fault.values = [("", Numbers.of(t)) for t in found[:1]]
        if self._to is not None and sample is not None:
            try:
                fault.folder = write_dump(self._to, fault, sample, kept)
            except (OSError, RuntimeError) as error:  # what was found counts more
                fault.remarks.append(f"The dump could not be written: {error}.")
        return self._finish(fault)

    def _unknown(
        self, kept: Kept | None, seen: Labelled, doubts: list[str], backward: bool
    ) -> Exception:
        """The error where a call cannot be run again as it was."""
        fault = Fault(-1 if kept is None else kept.number, backward, seen)
        fault.remarks = [f"The call was not run again: {one}." for one in dict.fromkeys(doubts)]
        self._look_closely()
        return self._finish(fault)

    def _finish(self, fault: Fault) -> Exception:
        if fault.kind not in ("parameter", "buffer", "input", "loss", "unknown"):
            with suppress(AttributeError):
                fault.owner = type(self._model.get_submodule(fault.path)).__name__
        return explain(fault, self._scaler is not None)


class _Busy:
    """While a call is run again, the guard does not look at it."""

    def __init__(self, owner: guard) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        self.owner.busy = True

    def __exit__(self, *error: object) -> None:
        self.owner.busy = False


def _label(path: Part, whole: str = "the model's output") -> str:
    if not whole:
        return f"{path[0]}{show_path(path[1:])}" if path else ""
    return f"{whole}{show_path(path)}"


def _is_over(frame: Frame) -> bool:
    return frame.running is None or gradients.is_over(frame.running)
