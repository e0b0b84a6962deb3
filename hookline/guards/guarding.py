"""Stop at the first producer of a NaN or an infinity: `guard(model)`.

- `guard`: a context that raises an error if a bad number leaves the model, forward or backward
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn

from hookline.engine import gradients
from hookline.engine.asks import Ask
from hookline.engine.calls import RunningCall, is_over
from hookline.engine.context import Context
from hookline.engine.handlers import UNCHANGED, Handler
from hookline.engine.lifecycle import enter, leave
from hookline.engine.tensor_hooks import GradientHook
from hookline.errors import NonFiniteError, NotHookable, PlaceNotFound
from hookline.guards.backward_trace import BackwardTrace
from hookline.guards.finite_checks import (
    TensorDescription,
    all_finite,
    finite_probe,
    float_values,
    is_bad,
)
from hookline.guards.forward_trace import ForwardTrace, ModuleHooks
from hookline.guards.guard_errors import ErrorBuilder, bad_gradients, label_of
from hookline.guards.kept_calls import CallHolder, KeptCall, ModelParts, is_spread, unwrapped
from hookline.guards.origin_search import find_forward, output_origins, parameter_names
from hookline.guards.origins import ADDING, IgnoredPlaces, Labelled, Origin, line_of
from hookline.places.resolution import Request, Where, resolve
from hookline.places.tree import first_names
from hookline.torch_private import at_backward_end, backward_hooks_of, backward_id, version_of
from hookline.training.grad_scalers import Scaler, check_scaler, scale_of
from hookline.values.nested import leaves

__all__ = ["guard"]

_FINITE = (
    "the second run gave finite gradients: they came from outside of the model, or from an edit of "
    "gradients, or something of it is random"
)
_GRAPHS = 4  # graphs with hooks on all nodes that are kept until their backward
_RECENT = 64
Part = tuple[Any, ...]
Key = tuple[int, int]  # a call: the id of the module, and the number of the call


class _GuardHandler(Handler):
    """Shows calls of the model, and gradients, to the guard."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        of_parameter = self.ask.port == "grad"
        self.name = str(self.target.place).removesuffix(":grad") if of_parameter else ""

    def receive(self, value: Any, call: RunningCall) -> Any:
        context: Any = self.context
        self.fired += 1
        if context is not None and not call.recomputed and not context.busy():
            if self.target.port == "output":
                context.ended(self.target.module, value, call.number)
            else:
                context.began(self.target.module, value, call)
        return UNCHANGED

    def gradient(self, grad: Tensor, number: int, path: Part) -> None:
        context: Any = self.context
        self.fired += 1
        if context is not None and not context.busy():
            context.arrived(self, grad, number, path)


class _BackwardPass:
    """One backward: the probes of its gradients, and the calls that it went through."""

    def __init__(self) -> None:
        self.probes: list[tuple[_GuardHandler, Tensor]] = []
        self.calls: dict[Key, KeptCall] = {}
        self.skipped = False  # True if it is left to the scaler
        # The parameters that had a gradient already: which one, and its version.
        self.before: dict[str, tuple[_GuardHandler, int, int]] = {}

    def sums(self) -> dict[str, Tensor]:
        """Return the gradients to which something was added; `autograd.grad` adds nothing."""
        found: dict[str, Tensor] = {}
        for name, (handler, ident, version) in self.before.items():
            gradient = _gradient(handler)
            if gradient is not None and (id(gradient), version_of(gradient)) != (ident, version):
                found[name] = gradient
        return found


class guard(Context):
    """Stop at the first producer of a NaN or an infinity, in the forward or in the backward.

    >>> class Normed(nn.Module):
    ...     def forward(self, x):
    ...         return x / x.norm(dim=-1, keepdim=True)
    >>> model = nn.Sequential(nn.ReLU(), Normed())
    >>> with guard(model):
    ...     model(torch.tensor([[-1.0, -2.0], [3.0, 4.0]]))
    Traceback (most recent call last):
    hookline.errors.NonFiniteError: guard found numbers that are not finite in step 0, ...

    Args:
        model: any module.
        ignore: places whose bad numbers are meant: modules, operations (`"attn/log"`), parameters,
            parts of the model's inputs (`":inputs[mask]"`) or outputs.
        scaler: the `GradScaler` of mixed precision. It skips steps whose gradients are bad only
            because of its scale, so the guard ignores these.
        to: the folder for dumps, which `hookline.replay` runs again. By default none is written.
        careful: check every module as it runs. The guard does so by itself where a call cannot be
            run again as it was.

    It acts inside `with`, or from `.attach()` to `.remove()`, over any number of steps; a step is
    a call of the model and its backward. A bad number is a fault if it leaves the model, in an
    output or in the gradient of a parameter or an input; numbers that are masked away inside are
    not. The error is a `NonFiniteError`; its `fault` has all details. Each step is checked by one
    number for each output and gradient. Only if one of them is bad, the guard runs the call again,
    with the same inputs, random numbers and buffers, and checks all operations. Your own hooks on
    modules run again, too.
    """

    _verb = "guard"
    # Gradients of parameters need no hooks on modules, which cost, and end torch's fast paths.
    _anchors = False
    _needs = ("core", "operations", "guards")

    def __init__(
        self,
        model: nn.Module,
        *,
        ignore: Where | None = None,
        scaler: Scaler | None = None,
        to: str | Path | None = None,
        careful: bool = False,
    ) -> None:
        check_scaler("guard", scaler)
        self._scaler, self._to = scaler, None if to is None else Path(to)
        super().__init__(unwrapped(model), ("", ":inputs", ":grad_output"))
        self._ignore = () if ignore is None else (ignore,)
        self.careful = careful
        self.skipped = 0  # backwards that were left to the scaler

    # -- entering and leaving -------------------------------------------------------------------

    def _entries(self) -> list[nn.Module]:
        """Return the modules that the program may call outside of the model's forward."""
        return []

    def _resolve(self) -> list[Request]:
        ports = (":output", ":inputs", ":grad_output")
        more = [(module, port) for module in self._called[1:] for port in ports]
        requests = resolve(self._model, (*self._wheres, *more))
        with suppress(PlaceNotFound, NotHookable):  # a model without parameters
            requests += resolve(self._model, ("**:grad",))
        return requests

    def _ask(self, port: str, **place: Any) -> Ask:
        return Ask(port, _GuardHandler, replaces=False, **place)

    @property
    def _handlers(self) -> list[_GuardHandler]:
        return [*self._tracer.handlers.values()]

    def _start(self, attached: bool) -> None:
        self._called = (self._model, *self._entries())
        self._running: dict[int, list[tuple[RunningCall, KeptCall]]] = {}
        self._later: list[Tensor] = []  # parameters that have come since
        # A call is kept by a hook on its output's graph: as long as a backward may come.
        self._calls: WeakValueDictionary[Key, KeptCall] = WeakValueDictionary()
        self._looked: deque[KeptCall] = deque()  # whose graph has hooks on all nodes
        self._pending: list[tuple[KeptCall, list[Tensor]]] = []
        self._passes: dict[int, _BackwardPass] = {}
        self._let: set[str] = set()  # parameters whose gradients are bad, and that was let be
        self._meant: dict[Part, Tensor] = {}  # where outputs are infinite on purpose
        self._modules: ModuleHooks | None = None
        self._step = 0  # the last call that has ended
        self._ended: KeptCall | None = None  # a call whose trace is not yet looked at
        self._ignored = IgnoredPlaces(self._model, self._ignore, self._called)
        self._errors = ErrorBuilder(self._model, self._ignored, self._to, self._scaler is not None)
        super()._start(attached)
        self._find_parts()
        self._first = {id(p): p for p in self._model.parameters()}
        inputs = self._ask("inputs")  # whose gradients are watched, too
        self._input_handler = self._tracer.handler(id(self._model), inputs)
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        if self.careful or is_spread(self._model):
            self._look_closely()

    def _find_parts(self) -> None:
        names = first_names(self._model)
        self._parts = {id(one): ModelParts(self._model, one, names) for one in self._called}

    def _find_more(self) -> None:
        """Watch new parameters, after an exchange as by `load_state_dict(assign=True)`."""
        self._later = [p for p in self._model.parameters() if id(p) not in self._first]
        self._find_parts()

    def _look_closely(self) -> None:
        """Check every module from now on."""
        self.careful = True
        if self._modules is None and self._open:
            self._modules = ModuleHooks(self._model, None, self._left)
            enter(self._modules, attached=False)

    def _stop(self) -> None:
        super()._stop()
        if self._modules is not None:
            leave(self._modules)
            self._modules = None
        for kept in self._looked:
            kept.close()
        self._looked.clear()
        self._calls.clear()
        self._running.clear()
        self._later.clear()

    def _verify(self) -> None:
        self._check_pending()
        self._verify_request(self._requests[0], self._asked[0], self._tracer.fired())

    def __repr__(self) -> str:
        state = "attached" if self._attached else "open" if self._open else "closed"
        every = ", every module" if self.careful else ""
        return f"<hookline guard of {type(self._model).__name__}{every}, {state}>"

    @property
    def model(self) -> nn.Module:
        """The guarded model; for a DDP or compiled model the one inside."""
        return self._model

    def busy(self) -> bool:
        """Return True while a call is run again: the guard ignores it."""
        return self._errors.busy

    # -- forward --------------------------------------------------------------------------------

    def began(self, module: nn.Module, inputs: Any, call: RunningCall) -> None:
        """Begin a call of the model, or of a module in it that is called by itself."""
        running = self._running.setdefault(threading.get_ident(), [])
        running[:] = [(one, kept) for one, kept in running if not _is_over(one)]
        if running and running[-1][1].called is not module:  # a part of that call
            return
        self._check_pending()  # for a call without a backward
        if backward_id() == -1:
            self._passes.clear()  # backwards that raised have left them
        if self._parts[id(module)].are_exchanged():
            self._find_more()
        kept = KeptCall(self._parts[id(module)], inputs, call.positional)
        kept.line = line_of(call.frame)
        running.append((call, kept))
        if self._modules is not None:
            self._modules.trace = kept.trace = ForwardTrace(
                kept.parts, self._ignored, operations=False
            )
        if kept.grad:
            self._watch_more(inputs)

    def _watch_more(self, inputs: Any) -> None:
        """Watch inputs that require grad, and parameters that do so since this was entered."""
        for handler in self._handlers:
            if handler.name and handler.reasons:  # it did not require grad
                tensor = handler.target.tensor()
                if tensor is not None and tensor.requires_grad:
                    handler.reasons = {}
                    gradients.watch_tensor(handler, tensor)
        for tensor in (*self._later, *(tensor for _, tensor in leaves(inputs))):
            known = self._watched.get(id(tensor))
            if tensor.requires_grad and (known is None or known() is not tensor):
                if len(self._watched) > _RECENT:
                    self._watched = {i: r for i, r in self._watched.items() if r() is not None}
                self._watched[id(tensor)] = weakref.ref(tensor)
                gradients.watch_tensor(self._input_handler, tensor)

    def ended(self, module: nn.Module, output: Any, index: int) -> None:
        """End a call of the model, or of a module in it that is called by itself."""
        running = self._running.get(threading.get_ident())
        if not running or running[-1][1].called is not module:
            return  # entered while it was running, or a part of that call
        _, kept = running.pop()
        kept.number = self._step = index
        kept.learn()
        found = leaves(output)
        self._tracer.tensor_hooks.prune()
        graphs = [t for _, t in found if t.requires_grad and t.grad_fn is not None]
        for tensor in graphs:
            self._calls[id(module), index] = kept
            self._tracer.tensor_hooks.put(tensor, CallHolder(kept))
        if kept.trace is not None:
            self._ended = kept
            return  # it is looked at when the trace knows that the call has ended
        kept.outputs = [(path, tensor.detach()) for path, tensor in found]
        probes = [one for _, tensor in kept.outputs if (one := finite_probe(tensor)) is not None]
        self._pending.append((kept, probes))
        if not (graphs and _must_be_waited_for(probes)):  # else one wait for the whole step
            self._check_pending()

    def _check_pending(self) -> None:
        """Check the probes of outputs."""
        pending, self._pending = self._pending, []
        for kept, probes in pending:
            if not all_finite(probes):
                self._forward_failed(kept)
            kept.outputs = []

    def _forward_failed(self, kept: KeptCall) -> None:
        bad = [(path, tensor) for path, tensor in kept.outputs if self._counts(kept, path, tensor)]
        if not bad or all(self._is_known((kept.path, *path), tensor) for path, tensor in bad):
            return  # the sum has overflowed, or it is meant
        seen: Labelled = [
            (label_of(path, kept.path), TensorDescription.of(tensor)) for path, tensor in bad
        ]
        doubts = kept.doubts()
        found = (
            None if doubts else self._errors.run_again(doubts, find_forward, kept, self._ignored)
        )
        if found is None:
            raise self._unknown(kept.number, False, seen, doubts)
        if not found.bad or (not found.same and not found.origins):
            doubts = ["the second run gave finite values: something of it is random, or changed"]
            raise self._unknown(kept.number, False, seen, doubts)
        if not found.origins:
            for path, tensor in bad:
                self._meant[kept.path, *path] = cast(Tensor, float_values(tensor)).isfinite()
            return
        if not found.same:
            self._look_closely()
        raise self._errors.build(kept, found, seen)

    def _counts(self, kept: KeptCall, path: Part, tensor: Tensor) -> bool:
        """Return True for an output that is bad, and not ignored."""
        return is_bad(tensor) and not self._ignored.output(path, kept.called)

    def _is_known(self, path: Part, tensor: Tensor) -> bool:
        """Return True if an output is infinite just where it was before, on purpose."""
        known, own = self._meant.get(path), cast(Tensor, float_values(tensor))
        same = known is not None and known.shape == own.shape and torch.equal(known, own.isfinite())
        return same and not own.isnan().any()

    def _left(self, module: nn.Module, output: Any) -> None:
        """Check the trace of a call that has ended, where every module is checked."""
        if backward_id() != -1:  # it may be recomputed
            for looked in self._looked:
                if looked.trace is cast(ModuleHooks, self._modules).trace:
                    looked.backward.recomputed(output)
        kept = self._ended
        if kept is None or module is not kept.called:
            return
        self._ended = None
        found = output_origins(kept, kept.trace, output, self._ignored)
        if found.origins:
            bad = [(p, t) for p, t in leaves(output) if self._counts(kept, p, t)]
            seen: Labelled = [(label_of(p, kept.path), TensorDescription.of(t)) for p, t in bad]
            raise self._errors.build(kept, found, seen)
        if (id(module), kept.number) in self._calls:
            names = parameter_names(self._model) | kept.names()
            kept.backward = BackwardTrace(kept.trace, names, cast(ModuleHooks, self._modules))
            kept.backward.watch(tensor for _, tensor in leaves(output))
            self._looked.append(kept)
            if len(self._looked) > _GRAPHS:
                self._looked.popleft().close()

    # -- backward -------------------------------------------------------------------------------

    def arrived(self, handler: _GuardHandler, gradient: Tensor, index: int, path: Part) -> None:
        """Note a gradient of a parameter, of an input, or of an output of the model."""
        task = backward_id()
        if task not in self._passes:
            self._passes[task] = _BackwardPass()
            # Again from there, so that it comes after those of others: DDP has work to end.
            at_backward_end(lambda: at_backward_end(lambda: self._backward_ended(task)))
        found = self._passes[task]
        if handler.target.port == "grad_output":
            key = handler.target.ident, index
            kept = self._calls.get(key)
            if kept is not None:
                found.calls[key] = kept
                kept.gradients[path] = (gradient, version_of(gradient))
        else:
            there = _gradient(handler) if handler.name else None
            if there is not None:
                found.before[handler.name] = handler, id(there), version_of(there)
            # The gradient itself is not kept, or torch would have to copy it.
            one = finite_probe(gradient, exact=there is not None)
            if one is not None:
                found.probes.append((handler, one))

    def _backward_ended(self, task: int) -> None:
        found = self._passes.pop(task, None)
        if found is None or not self._open:
            return
        for outer in self._passes.values():  # a checkpoint runs a backward inside another
            found.calls |= outer.calls
        try:
            self._check_pending()
            probes, sums = [one for _, one in found.probes], found.sums()
            if distributed.is_available() and distributed.is_initialized():
                sums = {}  # those of other ranks are in them
            added = [
                one for gradient in sums.values() if (one := finite_probe(gradient)) is not None
            ]
            if not all_finite([*probes, *added]):
                if not all_finite(probes):
                    self._backward_failed(found)
                    bad = {handler for handler, one in found.probes if not one.isfinite()}
                    self._let |= {handler.name for handler in bad if is_bad(_gradient(handler))}
                self._sum_failed(sums)
            for outer in self._passes.values():
                outer.skipped |= found.skipped
            self.skipped += found.skipped and not self._passes
        finally:
            if not self._passes:
                for kept in found.calls.values():
                    kept.gradients = {}
                    kept.close()
                    if kept in self._looked:
                        self._looked.remove(kept)

    def _backward_failed(self, found: _BackwardPass) -> None:
        flagged = {handler.name for handler, one in found.probes if not one.isfinite()} - {""}
        handlers = [handler for handler in self._handlers if handler.name in flagged]
        known = {handler.name: _gradient(handler) for handler in handlers}
        bad = [(n, g) for n, g in known.items() if g is not None and is_bad(g)]
        alone = flagged & found.before.keys() - found.sums().keys()
        sure = any(handler.name in alone and not _is_hooked(handler) for handler in handlers)
        if known and not bad and not sure and all(g is not None for g in known.values()):
            return  # sums that have overflowed
        seen: Labelled = [(f"the gradient of {n!r}", TensorDescription.of(g)) for n, g in bad]
        # The last call first: what flows out of it may flow into the one before.
        calls = [found.calls[key] for key in reversed(list(self._calls)) if key in found.calls]
        given = [(kept, bad_gradients(kept)) for kept in calls]
        scale = self._scale()
        clean = [kept for kept, wrong in given if not wrong]
        hooked = {n: g for n, g in bad if any(_is_hooked(t) for t in handlers if t.name == n)}
        doubts = self._errors.search_backward(clean, hooked, seen, scale)
        if doubts is None or scale > 1:
            found.skipped = scale > 1
            return
        for kept, wrong in given:
            if wrong:
                origin = Origin("loss", "", backward=True, values=wrong)
                raise self._errors.build_outside([origin], kept.number, seen or wrong)
        step = calls[0].number if calls else self._step
        if bad and not doubts and all(kept.trace is not None for kept in calls):
            beside = Origin("loss", "", backward=True)  # all that the calls passed on was finite
            raise self._errors.build_outside([beside], step, seen)
        if bad or doubts or sure:
            raise self._unknown(step, True, seen, doubts or [_FINITE])

    def _sum_failed(self, sums: dict[str, Tensor]) -> None:
        """Raise for a sum: a backward was finite, and the gradients it was added to are not."""
        bad = {name: gradient for name, gradient in sums.items() if is_bad(gradient)}
        self._let -= sums.keys() - bad.keys()
        bad = [(n, g) for n, g in bad.items() if not (n in self._let or self._ignored.tensor(n))]
        if not bad or self._scale() > 1:  # the scaler will meet it, too
            return
        seen: Labelled = [(f"the gradient of {n!r}", TensorDescription.of(g)) for n, g in bad]
        origins = [Origin("sum", name, backward=True, node=ADDING) for name, _ in bad]
        origins[0].values = [("gradient", seen[0][1])]
        raise self._errors.build_outside(origins, self._step, seen)

    def _unknown(
        self, step: int, backward: bool, seen: Labelled, doubts: list[str]
    ) -> NonFiniteError:
        """Return the error for a call that cannot be run again; check modules from now on."""
        self._look_closely()
        return self._errors.build_unknown(step, backward, seen, doubts)

    def _scale(self) -> float:
        """Return the factor by which the scaler multiplies the loss."""
        return scale_of(self._scaler) or 1.0


def _gradient(handler: Handler) -> Tensor | None:
    tensor = handler.target.tensor()
    return tensor.grad if tensor is not None and tensor.is_leaf else None


def _is_hooked(handler: Handler) -> bool:
    """Return True if a parameter has a hook that is none of ours."""
    tensor = handler.target.tensor()
    hooks: dict[int, Any] = {} if tensor is None else backward_hooks_of(tensor) or {}
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    return any(not isinstance(owner, GradientHook) for owner in owners)


def _must_be_waited_for(probes: list[Tensor]) -> bool:
    """Return True if reading probes makes the program wait for another device."""
    return not all(one.is_cpu for one in probes)


def _is_over(call: RunningCall) -> bool:
    return call.frame is None or is_over(call.frame)
