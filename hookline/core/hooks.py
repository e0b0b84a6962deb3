"""Where hooks are registered, and the primitive on which the other verbs stand.

- `hook(model, where, function)`: call a function with every value at a place
- `attached(model)`: all that is live on a model
- `Call`: which execution of which module a value belongs to
- `Context`: what `hook`, `capture` and `edit` have in common: entering, leaving, firing
- `Tap`: what a context does with the values at one target
- `Site`: a context's hooks on one module, at most one forward and one pre-forward hook

Only this file registers hooks on modules: local, appended, forward and pre-forward. Gradients are
reached from there, through tensors and autograd nodes (`gradients.py`).
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from hookline.core import arguments, gradients
from hookline.core.contexts import Entering
from hookline.core.nested import Path, get_part, set_part
from hookline.core.places import Place, Request, Target, Where, resolve, walk
from hookline.errors import NeverFired, PlaceError

__all__ = [
    "ACTIVE", "KEEP", "KEYS", "Anchored", "Attached", "Call", "Context", "Frame", "Site", "Tap",
    "add_place", "attached", "first_names", "hook", "in_backward", "named_place", "silence",
    "takes_call",
]  # fmt: skip

KEEP = object()  # what a tap returns to leave a value as it is
ACTIVE: ContextVar[frozenset[int]] = ContextVar("hookline_active", default=frozenset())

# Of our entries in hook dicts. torch's own count up from 0; a model that was saved while hooked
# brings keys of another process along, hence the random start.
KEYS = itertools.count(-1 - int.from_bytes(os.urandom(6)), -1)
_serials = itertools.count(1)
in_backward: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore
_RECENT = 64  # calls whose gradients may still come
T = TypeVar("T", bound="Tap")


class Call:
    """Which execution of which module a value belongs to; given to functions that ask for it."""

    __slots__ = ("_tap", "index", "module", "recomputed")

    def __init__(self, tap: Tap, index: int, recomputed: bool = False) -> None:
        self._tap = tap
        self.module = tap.target.module
        self.index = index
        self.recomputed = recomputed

    @property
    def place(self) -> Place:
        """The place of the value, under the module's first name."""
        return self._tap.place

    def __repr__(self) -> str:
        again = ", recomputed" if self.recomputed else ""
        return f"Call({str(self.place)!r}, {self.index}{again})"


class Tap:
    """What a context does with the values at one target. Subclasses are the verbs."""

    replaces = True  # whether values may be replaced: false for captures
    fired = 0
    # Why a call gave nothing, by call and path; and hooks that may have been lost.
    reasons: Mapping[tuple[int, Path], tuple[str, str]] = MappingProxyType({})
    guards: Sequence[Any] = ()

    def __init__(self, target: Target, context: weakref.ref[Context[Any]]) -> None:
        self.target = target
        self.context = context

    @property
    def place(self) -> Place:
        context = self.context()
        return self.target.place if context is None else context.place_of(self.target)

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        """Take a value; return KEEP or what shall stand in its place."""
        raise AssertionError("a tap receives")

    def gradient(self, grad: Tensor, index: int, path: tuple[Any, ...]) -> Tensor | None:
        """Take a gradient, or one tensor of it; return what shall stand in its place, or None."""
        raise AssertionError("a tap receives gradients")

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        """A call has taken place whose gradients will come, for these tensors of this value."""

    def explain(self, index: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        """A value that was asked for cannot be given for this call; say why on read or at exit."""
        if not self.reasons:
            self.reasons = {}
        if not self.replaces or not self.reasons:  # an edit needs one, a record one for each call
            cast("dict[Any, Any]", self.reasons)[index, path] = (reason, remedy)

    def missing(self, index: int, problem: str) -> None:
        """The call has not the value that the place names: told at exit, or at once by an edit."""
        if self.replaces:
            raise PlaceError(
                f"The place {str(self.place)!r} does not fit the value there:",
                problem,
                "Capture the whole value and look at record[place] to see its parts.",
            )
        self.explain(index, problem)

    def several(self, index: int, path: Path) -> None:
        """The gradient at a path will come in several shares."""

    def guard(self, arm: Any) -> None:
        """Remember a hook that is lost if the memory of its tensor is changed in place."""
        self.guards = [*(old for old in self.guards if not old.fired), arm][-_RECENT:]

    def lost(self) -> None:
        """Explain the gradients that did not come for such a change."""
        for arm in self.guards:
            if arm.lost:
                self.explain(arm.index, *gradients.VIEW_CHANGED, path=arm.path)
        self.guards = ()


class _Now(threading.local):
    """The call whose hooks run now, in each thread."""

    frame = 0
    serial = 0


_now = _Now()


class Frame:
    """What is known of one running call of one module.

    `running` is the Python frame of torch's that calls both hooks of a call: a call that raises
    has a first hook, but no second, and a recursive one has several of each.
    """

    __slots__ = (
        "edges", "gates", "given", "index", "pending", "recomputed", "running", "sequence",
        "serial",
    )  # fmt: skip

    def __init__(self, index: int, recomputed: bool, running: types.FrameType) -> None:
        self.index = index
        self.recomputed = recomputed
        self.running: types.FrameType | None = running
        # The same for all contexts that see this call: their hooks run one after the other.
        if _now.frame != id(running):
            _now.frame, _now.serial = id(running), next(_serials)
        self.serial = _now.serial
        self.pending: list[tuple[Any, Any]] = []  # inputs kept until the call is complete
        # For gradients, all at the start of the call:
        self.sequence = 0  # the autograd sequence number
        self.given: list[Any] = []  # the tensors that the call was given
        self.edges: list[Any] = []  # the gradient edges of the inputs that are asked for
        self.gates: list[tuple[Tensor, int]] = []  # what an edit put in their place


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
    closed = False
    count = 0  # completed calls
    foreign = 0  # calls from other threads and tasks
    outside = False  # whether a call was seen outside a backward
    again = (-1, 0)  # the last backward that recomputed calls, and how many
    inputs: Sequence[Tap] = ()
    values: Sequence[Tap] = ()
    outputs: Sequence[Tap] = ()
    grad_inputs: Sequence[Tap] = ()
    grad_outputs: Sequence[Tap] = ()
    lock: AbstractContextManager[Any] = nullcontext()  # a real one where every thread is seen
    frames: dict[int, list[Frame]] | None = None  # the running calls of each thread
    abandoned: Sequence[Frame] = ()  # calls that began and raised

    def __init__(
        self,
        module: nn.Module | None,
        context: weakref.ref[Any] | None,
        owner: int | None,
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

    @property
    def paired(self) -> bool:
        """Whether something must be known of a call before it begins."""
        return bool(self.inputs or self.grad_outputs or self.grad_inputs or self.counted)

    def register(self, module: nn.Module) -> None:
        """Put the hooks on a module.

        Straight into the module's hook dicts, which is what `register_forward_hook` does after
        making a handle, and a third of the cost of entering and leaving.
        """
        if self.owner is None:
            self.lock = threading.RLock()  # its own: an interrupt may leave it locked for ever
        before = self.paired or self.values
        after = self.paired or self.outputs
        if before:
            module._forward_pre_hooks_with_kwargs[self.key] = True
            module._forward_pre_hooks[self.key] = self.before
        if after:
            module._forward_hooks_with_kwargs[self.key] = True
            module._forward_hooks[self.key] = self.after
        if not (before or after):
            module._forward_pre_hooks[self.key] = self.rest

    def unregister(self, module: nn.Module) -> None:
        """Take the hooks off a module; fine if they are off already."""
        self.closed = True
        for hooks in (
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
        ):
            hooks.pop(self.key, None)

    def rest(self, module: nn.Module, args: Any) -> None:
        """A hook that does nothing: by it the model keeps an attached context alive."""
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

        Checkpointing runs a module again inside the backward, the last call first. A module that
        never ran outside the backward (in a custom one, say) is not being recomputed.
        """
        task = in_backward()
        if task == -1:
            self.outside = True
            return None
        if not self.outside:
            return None
        self.again = (task, self.again[1] + 1 if self.again[0] == task else 0)
        return max(self.count - 1 - self.again[1], 0)

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
            self._offer_values()
            return None
        call = self.recomputes()
        running = self._running()
        index = self.count + len(running) if call is None else call
        frame = Frame(index, call is not None, sys._getframe(1))
        running.append(frame)
        for tap in self.values:
            tap.receive(tap.target.tensor(), index, frame.recomputed, None)
        changed = False
        for tap in self.inputs:
            new = self._offer_input(tap, module, args, kwargs, frame)
            if new is not KEEP:
                args, kwargs = arguments.write(module, args, kwargs, tap.target, new)
                changed = True
        if self.grad_inputs or self.grad_outputs:
            frame.sequence = gradients.sequence()
            frame.given = gradients.note_given(args, kwargs)
        for tap in self.grad_inputs:
            new = gradients.note_inputs(tap, module, args, kwargs, frame)
            if new is not None:
                args, kwargs = new
                changed = True
        return (args, kwargs) if changed else None

    def _offer_values(self) -> None:
        """Give the parameters and buffers of the module to their taps, at a call of it."""
        alone = not self.outputs
        call = self.recomputes() if alone else None
        recomputed = call is not None or (not alone and self.outside and in_backward() != -1)
        for tap in self.values:
            tap.receive(tap.target.tensor(), self.count, recomputed, None)
        if alone and call is None:
            self.count += 1

    def _running(self) -> list[Frame]:
        """The running calls of this thread; what raised since is set aside."""
        if self.frames is None:
            self.frames = {}
        running = self.frames.setdefault(threading.get_ident(), [])
        if running:
            over = [f for f in running if f.running is None or gradients.is_over(f.running)]
            self._abandon(over)
            running[:] = [frame for frame in running if frame not in over]
        return running

    def _completed(self, caller: types.FrameType) -> Frame | None:
        _now.frame = 0
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
            frame.running, frame.edges, frame.given, frame.gates = None, [], [], []
            frame.pending = [(tap, kept) for tap, kept in frame.pending if tap.wants_late()]
            if frame.pending:
                self.abandoned = [*self.abandoned, frame]

    def _offer_input(
        self, tap: Tap, module: nn.Module, args: Any, kwargs: Any, frame: Frame
    ) -> Any:
        try:
            value = arguments.read(module, args, kwargs, tap.target)
        except LookupError as error:
            tap.missing(frame.index, f"{error}.")
            return KEEP
        return tap.receive(value, frame.index, frame.recomputed, frame)

    def after(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        """The forward hook."""
        if self.closed:  # removed while torch was about to call it
            return None
        if module is not self.module or (self.owner is not None and self.owner not in ACTIVE.get()):
            return self.stranger(module)
        frame = None
        if self.paired:
            frame = self._completed(sys._getframe(1))
            if frame is None:  # the context was entered while the module was running
                return None
        # Where every thread is seen, the numbers stay distinct, and the inputs and outputs of one
        # call together. A user's function is never called under the lock.
        with self.lock:
            call = self.recomputes() if frame is None else frame.index if frame.recomputed else None
            index = self.count if call is None else call
            if call is None:
                self.count += 1
            output, original = rest[-1], rest[-1]
            for tap, stored in frame.pending if frame is not None else ():
                tap.commit(stored)
            if not (self.outputs and self.outputs[0].replaces):
                self._offer_outputs(output, index, call is not None)
        if self.outputs and self.outputs[0].replaces:
            output = self._offer_outputs(output, index, call is not None)
        if frame is not None and (self.grad_outputs or self.grad_inputs):
            output = self._watch(output, index, frame)
        return None if output is original else output

    def _offer_outputs(self, output: Any, index: int, recomputed: bool) -> Any:
        for tap in self.outputs:
            output = _at_part(tap, output, index, lambda v: tap.receive(v, index, recomputed, None))
        return output

    def _watch(self, output: Any, index: int, frame: Frame) -> Any:
        """Reach for the gradients of a call. Of a recomputed one only if the first run had none:
        else the graph of that one counts.
        """

        def wanted(taps: Sequence[Tap]) -> list[Tap]:
            return [
                t for t in taps if not frame.recomputed or any(n == index for n, _ in t.reasons)
            ]

        for tap in wanted(self.grad_outputs):
            output = _at_part(
                tap, output, index, lambda v: gradients.watch_outputs(tap, v, output, index, frame)
            )
        for tap in wanted(self.grad_inputs):
            gradients.watch_inputs(tap, output, index, frame)
        return output

    def drain(self) -> None:
        """Keep the inputs of calls that began and never completed, after all others."""
        waiting = [frame for running in (self.frames or {}).values() for frame in running]
        for frame in (*self.abandoned, *waiting):
            for tap, stored in frame.pending:
                tap.commit(stored, late=True)
        self.frames, self.abandoned = None, ()

    def __deepcopy__(self, memo: Any) -> Site:
        return _inert(type(self), self.key)

    def __reduce__(self) -> Any:
        return _inert, (type(self), self.key)


def _inert(kind: type[Site], key: int) -> Site:
    """The site of a copied or loaded module: it never acts, and removes itself when called."""
    site = kind.__new__(kind)
    Site.__init__(site, None, None, None)
    site.key = key
    return site


def _at_part(tap: Tap, output: Any, index: int, offer: Callable[[Any], Any]) -> Any:
    """Offer the part of an output that a tap is for; the output, changed if that was changed."""
    parts = tap.target.parts
    try:
        value = get_part(output, parts) if parts else output
    except LookupError as error:
        tap.missing(index, f"{error}.")
        return output
    new = offer(value)
    if new is KEEP or new is value:
        return output
    return set_part(output, parts, new) if parts else new


def _settled(where: Any) -> Any:
    """What was asked for, so that it can be gone through again: iterators become lists."""
    return [_settled(item) for item in where] if isinstance(where, Iterator) else where


class Context(Entering, Generic[T]):
    """What the verbs that act at places have in common. Nothing acts before it is entered."""

    _serial = 0
    _sites: dict[int, tuple[nn.Module, Site]] = MappingProxyType({})  # pyright: ignore
    _handles: list[Any] = []  # noqa: RUF012 - of a handle in a copied model
    _owned = False  # whether it sees only the calls of the thread or task that entered it

    def __init__(self, model: nn.Module | Tensor, wheres: Iterable[Where]) -> None:
        super().__init__(model)
        self._wheres = tuple(_settled(where) for where in wheres)
        self._serial = 0
        self._names: dict[int, str] | None = None
        self._requests: list[Request] = []
        self._taps: dict[tuple[Any, ...], T] = {}
        self._sites: dict[int, tuple[nn.Module, Site]] = {}
        self._handles: list[Any] = []
        self._many = 64

    # -- for subclasses -------------------------------------------------------------------------

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> T:
        raise AssertionError("a verb makes taps")

    def _resolve(self) -> list[Request]:
        return resolve(self._model, self._wheres)

    def _prepared(self) -> None:
        """Called when everything is made, before the hooks are registered."""

    # -- entering and leaving -------------------------------------------------------------------

    def _start(self, attached: bool) -> None:
        self._taps, self._sites, self._handles, self._names = {}, {}, [], None
        self._requests = self._resolve()
        if not any(request.targets for request in self._requests):
            raise PlaceError(
                f"{self._verb} was given no place.",
                "Nothing would happen.",
                "Name places after the model, such as '**' for every module.",
            )
        self._serial = next(_serials)
        owner = self._serial if self._owned and not attached else None
        ref = weakref.ref(self)
        taps = self._taps
        for request in self._requests:
            for target in request.targets:
                if target.key not in taps:
                    self._place(target, ref, owner)
        self._prepared()
        for module, site in self._sites.values():
            if attached:
                site.keeper = self
            site.register(module)
        if owner is not None:
            ACTIVE.set(ACTIVE.get() | {owner})

    def _place(self, target: Target, ref: weakref.ref[Context[Any]], owner: int | None) -> None:
        """Make what serves a target."""
        tap = self._taps[target.key] = self._tap(target, ref)
        module = target.module
        if target.port == "value" and type(module).forward is nn.Module.forward:
            module = self._caller_of(target)  # a ParameterList is never called
        if id(module) not in self._sites:
            self._sites[id(module)] = (module, Site(module, ref, owner))
        self._sites.setdefault(target.ident, self._sites[id(module)])[1].add(tap)
        if target.port == "grad":
            gradients.watch_tensor(tap, target.tensor())
            if self._attached and isinstance(self._model, Tensor):
                # There is no module whose hooks could keep this alive: a hook of the tensor does.
                self._handles.append(self._model.register_hook(_Keeper(self)))

    def _caller_of(self, target: Target) -> nn.Module:
        path = target.path
        while path:
            path = path.rpartition(".")[0]
            module = self._model.get_submodule(path)
            if type(module).forward is not nn.Module.forward:
                return module
        return target.module

    def _stop(self) -> None:
        for module, site in self._sites.values():
            site.unregister(module)
            if site.frames or site.abandoned:
                site.drain()
            if site.keeper is not None:
                site.keeper = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        active = ACTIVE.get()
        if self._serial in active:
            ACTIVE.set(active - {self._serial})

    def handles(self) -> list[Any]:
        """The handles of hooks on tensors and nodes, to be removed at the end."""
        # Graphs die, and their handles with them: forget those now and then.
        if len(self._handles) >= self._many:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._many = max(64, 2 * len(self._handles))
        return self._handles

    # -- names ----------------------------------------------------------------------------------

    def place_of(self, target: Target) -> Place:
        """The place of a target under the first name of its module; names are found on demand."""
        if self._names is None:
            self._names = first_names(self._model)
        return named_place(target, self._names)

    # -- firing ---------------------------------------------------------------------------------

    def _fired(self, tap: T) -> bool:
        """Whether a tap has done what was asked of it."""
        return tap.fired > 0

    def _verify(self) -> None:
        for tap in self._taps.values():
            if tap.replaces and any(arm.lost for arm in tap.guards):
                tap.lost()
                tap.fired = 0  # not everywhere where it was to act
        for request in self._requests:
            missing = [t for t in request.targets if not self._fired(self._taps[t.key])]
            lost = [t for t in missing if self._taps[t.key].replaces and self._taps[t.key].reasons]
            if missing and (request.literal or lost or len(missing) == len(request.targets)):
                raise self._never_fired(request, (lost or missing)[0])

    def _never_fired(self, request: Request, target: Target) -> NeverFired:
        tap = self._taps[target.key]
        count = len(request.targets)
        others = f", nor any other of the {count} places that match {request.asked}"
        return NeverFired(
            f"Nothing happened at {str(self.place_of(target))!r}"
            f"{others if count > 1 and not request.literal else ''}:",
            self.reason(tap),
            "A capture of '**' shows what is called, in record.places() and record.unfired().",
        )

    def reason(self, tap: Tap) -> str:
        """Why nothing happened at a tap."""
        if self._names is None:
            self._names = first_names(self._model)
        return silence(tap, self._sites[tap.target.ident][1], self._model, self._names)


def silence(tap: Tap, site: Site, model: Any, names: dict[int, str]) -> str:
    """Why nothing happened at a tap."""
    target = tap.target
    tap.lost()
    if tap.reasons:
        reason, remedy = next(iter(tap.reasons.values()))
        return f"{reason} {remedy}".strip()
    if site.foreign:
        return (
            f"its module was called {site.foreign} times, but from another thread or task than the "
            f"one that entered this; threads='all' takes those calls too."
        )
    if target.port == "grad":
        return (
            "no gradient arrived. No backward ran inside the `with`, the loss does not depend on "
            "it, or only others were asked for (torch.autograd.grad, inputs=)."
        )
    if site.count:
        if "grad" in target.port:
            return (
                f"its module was called {site.count} times, but no gradient arrived. No backward "
                f"ran inside the `with`, the loss does not depend on it, or only others were asked "
                f"for (torch.autograd.grad, inputs=)."
            )
        return f"its module was called {site.count} times, and the change applied to none of them."
    path = names.get(target.ident)
    if path is None and isinstance(model, nn.Module):
        return "its module was taken out of the model while this was open."
    if path is not None and path.endswith("out_proj"):
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return (
                "nn.MultiheadAttention uses the weights of its out_proj without ever calling it; "
                "ask for the attention module's own output."
            )
    return (
        "its module was not called. Its forward may have been called directly, as in "
        "module.forward(x), which runs no hooks, or its weights used without it, or the code that "
        "calls it was not reached."
    )


def first_names(model: nn.Module | Tensor | None) -> dict[int, str]:
    """The first name of every module, by id, in model order."""
    return {id(m): path for path, m in walk(model)} if isinstance(model, nn.Module) else {}


def named_place(target: Target, names: dict[int, str]) -> Place:
    """The place of a target under the first name of its module."""
    path = names.get(target.ident, target.path)
    return Place(target.named(path), target.port, target.parts)


# -- hook -----------------------------------------------------------------------------------------


def takes_call(function: Callable[..., Any]) -> bool:
    """Whether a function asks for the Call: it has a second required positional parameter.

    >>> takes_call(lambda value, call: value), takes_call(torch.relu), takes_call(print)
    (True, False, False)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return False
    if len(parameters) < 2:
        return False
    second = parameters[1]
    positional = second.kind in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD)
    return positional and second.default is second.empty


class _HookTap(Tap):
    def __init__(self, target: Target, context: Any, function: Callable[..., Any]) -> None:
        super().__init__(target, context)
        self.function = function
        self.wants_call = takes_call(function)

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        self.fired += 1
        try:
            if self.wants_call:
                new = self.function(value, Call(self, index, recomputed))
            else:
                new = self.function(value)
        except BaseException as error:
            add_place(error, self)
            raise
        if new is not None and self.target.port == "value":
            raise PlaceError(
                f"A hook at {str(self.place)!r} returned a value:",
                "a parameter or buffer cannot be replaced by a hook.",
                "Use hookline.edit(model, place, change), which puts it back afterwards.",
            )
        return KEEP if new is None else new

    def gradient(self, grad: Tensor, index: int, path: tuple[Any, ...]) -> Tensor | None:
        if index < 0:  # of a parameter or plain tensor: numbered by backward pass
            index = self.fired
        new = self.receive(grad.clone(), index, False, None)
        return None if new is KEEP else new


def add_place(error: BaseException, tap: Tap) -> None:
    """Tell in a note of the user's exception at which place it was raised."""
    error.add_note(f"hookline: raised at the place {str(tap.place)!r}")


class hook(Context[_HookTap]):  # noqa: N801 - a verb that is used like a function
    """Call a function with every value at a place; what it returns stands in the value's stead.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with hook(model, "0", lambda value: print(tuple(value.shape))):
    ...     _ = model(torch.zeros(5, 2))
    (5, 3)

    Args:
        model: any module, or a plain tensor with the place ":grad".
        where: one place, or a list of them; see `select`.
        function: `fn(value) -> None or a new value`, or `fn(value, call)`; with a second required
            parameter it also gets the `Call`. Nothing is checked: what it returns is used. At
            gradient places it is called once per tensor, as the gradients arrive, with a copy.

    It acts inside `with`, or from `.attach()` to `.remove()`.
    """

    _verb = "hook"

    def __init__(
        self, model: nn.Module | Tensor, where: Where, function: Callable[..., Any]
    ) -> None:
        super().__init__(model, (where,))
        self._function = function

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> _HookTap:
        return _HookTap(target, ref, self._function)


# -- attached -------------------------------------------------------------------------------------


@unserializable_hook
class _Keeper:
    """A hook on a tensor that does nothing but keep a context alive."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __call__(self, grad: Any) -> None: ...


class Anchored(Entering):
    """A context without taps: a hook that does nothing ties it to the model."""

    _anchor: Site | None = None
    _serial = 0

    def _enter(self, attached: bool) -> None:
        super()._enter(attached)
        self._serial = next(_serials)
        self._anchor = Site(self._model, weakref.ref(self), None)
        if attached:
            self._anchor.keeper = self
        self._anchor.register(self._model)

    def _leave(self) -> None:
        if self._anchor is not None:
            self._anchor.unregister(self._model)
            self._anchor = None
        super()._leave()


class Attached(list[Any]):
    """What is live on a model, in order of entering; `remove()` ends all of it."""

    def remove(self, value: Any = None) -> None:
        """End one of the contexts, or all, last first."""
        for context in reversed(self) if value is None else (value,):
            context.remove()


def attached(model: nn.Module) -> Attached:
    """All that is live on a model: open `with` blocks and attachments, in order of entering.

    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> handle = hook(model, "0", print).attach()
    >>> attached(model)
    [<hookline hook at '0', attached>]
    >>> attached(model).remove()
    >>> attached(model)
    []
    """
    found: dict[int, Any] = {}
    for _, module in walk(model):
        for function in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            site = getattr(function, "__self__", None)
            if isinstance(site, Site) and site.context is not None:
                context = site.context()
                if context is not None:
                    found[context._serial] = context
    return Attached(found[serial] for serial in sorted(found))
