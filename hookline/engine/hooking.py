"""The primitive on which the other verbs stand: call a function with every value at a place.

- `hook(model, where, function)`: call a function with every value at a place
- `HookTap`: what it does at one target
- `Context`: what `hook`, `capture` and `edit` have in common: places, sites, firing
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import hooks as torch_hooks

from hookline.engine import fsdp as gathering
from hookline.engine import gradients, offloading
from hookline.engine.call_choice import Calls, ranges
from hookline.engine.checkpointing import awaited
from hookline.engine.generation import Generation, takers_above
from hookline.engine.handlers import KEEP, SERIALS, Call, Frame, Tap, add_place
from hookline.engine.lifecycle import Entering
from hookline.engine.operations import Operation, not_called, refuse
from hookline.engine.tensor_hooks import Handles
from hookline.engine.tracer import ACTIVE, Site
from hookline.errors import ChangeError, NeverFired, NotHookable, PlaceError, warn_outside
from hookline.places.resolution import Place, Request, Target, Where, resolve
from hookline.places.tree import around, walk

__all__ = [
    "Context",
    "HookTap",
    "first_names",
    "hook",
    "named_place",
    "needs_backward",
    "settled",
    "silence",
    "takes_call",
]

T = TypeVar("T", bound="Tap")
_NOTHING = cast(Any, MappingProxyType({}))
_NO_GRADIENT = gradients.NONE_CAME[0]
_NAME_OTHERS = "Name calls that come, or a slice of calls: one of those is enough."
_UNCALLED = "its module was not called"


def settled(where: Any) -> Any:
    """What was asked for, so that it can be gone through again: iterators become lists."""
    return [settled(w) for w in where] if hasattr(where, "__next__") else where


class Context(Entering, Generic[T]):
    """What the verbs that act at places have in common. Nothing acts before it is entered."""

    _owned = False  # whether it sees only the calls of the thread or task that entered it
    _chosen: Calls | None = None  # those that were asked for
    # All below is made anew on entering.
    _serial = 0
    _names: dict[int, str] | None = None
    _requests: list[Request] = _NOTHING
    _taps: dict[Any, T] = _NOTHING
    _sites: dict[Any, tuple[nn.Module, Site]] = _NOTHING
    _handles = Handles()

    def __init__(self, model: nn.Module | Tensor, wheres: Iterable[Where]) -> None:
        super().__init__(model)
        self._wheres = tuple([w if isinstance(w, str) else settled(w) for w in wheres])

    # -- for subclasses -------------------------------------------------------------------------

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> T:
        raise AssertionError("a verb makes taps")

    def _resolve(self) -> list[Request]:
        return resolve(self._model, self._wheres)

    def _prepared(self) -> None:
        """Called when everything is made, before the hooks are registered."""

    # -- entering and leaving -------------------------------------------------------------------

    def _start(self, attached: bool) -> None:
        self._taps, self._sites, self._handles, self._names = {}, {}, Handles(), None
        self._requests = self._resolve()
        if not [request for request in self._requests if request.modules or request.targets]:
            remedy = "Name places after the model, such as '**' for every module."
            raise PlaceError(f"{self._verb} was given no place.", "Nothing would happen.", remedy)
        if attached:
            refuse(target for request in self._requests for target in request.targets)
        self._serial = next(SERIALS)
        owner = self._serial if self._owned and not attached else None
        ref: weakref.ref[Any] = weakref.ref(self)
        for request in self._requests:
            self._place_all(request, ref, owner)
        self._prepared()
        if self._chosen is not None and self._chosen.step is not None:
            self._follow(self._chosen.step, ref, owner)
        for module, site in self._sites.values():
            if attached:
                site.keeper = self
            site.register(module)
        if owner is not None:
            ACTIVE.set(ACTIVE.get() | {owner})

    def _place_all(self, request: Request, ref: weakref.ref[Any], owner: int | None) -> None:
        for target in request.targets:
            if target.key not in self._taps:
                self._place(target, ref, owner)

    def _follow(self, step: str, ref: weakref.ref[Any], owner: int | None) -> None:
        """Tell the steps of a generation apart, by the modules that take its cache."""
        targets = [tap.target for tap in self._taps.values() if tap.chosen is not None]
        takers = takers_above(self._model, [target.module for target in targets])
        covered = {id(inner) for taker in takers for inner in taker.modules()}
        for request in self._requests:
            asked = f"calls={step!r} was asked for at {request.asked}:"
            found = [t for t in request.targets if self._taps[t.key].chosen is not None]
            if any(target.port == "grad" for target in found):
                problem = "a parameter has one gradient for all calls of a backward."
                raise NotHookable(asked, problem, "Name a module's :grad_output or :grad_input.")
            if found and not any(target.ident in covered for target in found):
                problem = "no module there, or above it in the model that was given, takes a cache "
                problem += "(past_key_values, cache_params), which tells the prompt from the rest."
                remedy = "Give the whole model, or numbers in calls=."
                raise NotHookable(asked, problem, remedy)
        generation = Generation(takers)
        for module in takers:
            _, site = self._sites.setdefault(id(module), (module, Site(module, ref, owner)))
            site.takes_cache = True
        for _, site in self._sites.values():
            site.generation = generation

    def _site_of(self, tap: Tap) -> Site:
        return tap if isinstance(tap, Site) else self._sites[_home(tap.target)][1]

    def _place(self, target: Target, ref: weakref.ref[Context[Any]], owner: int | None) -> None:
        """Make what serves a target."""
        tap = self._taps[target.key] = self._tap(target, ref)
        module = target.module
        if target.port == "value":
            module = self._caller_of(target)
        if target.operation is not None:
            home = _home(target)
            if home not in self._sites:
                self._sites[home] = (module, Operation(module, ref, owner, target))
            self._sites[home][1].add(tap)
            return
        if id(module) not in self._sites:
            self._sites[id(module)] = (module, Site(module, ref, owner))
        self._sites.setdefault(target.ident, self._sites[id(module)])[1].add(tap)
        if target.port == "grad":
            self._watch_parameter(tap, ref, owner)
            if self._attached and isinstance(self._model, Tensor):
                # There is no module whose hooks could keep this alive: a hook of the tensor does.
                self._handles.add(self._model, _Keeper(self))

    def _watch_parameter(self, tap: Tap, ref: weakref.ref[Any], owner: int | None) -> None:
        """Watch the gradient of a parameter, or of what takes its place at a call."""
        target, tensor = tap.target, cast(Tensor, tap.target.tensor())
        if offloading.is_offloaded(self._model, tensor, target.named(target.path)):
            tap.explain(0, *offloading.NO_GRADIENT)
        elif gathering.is_gathered(target.module) or is_lazy(tensor):
            self._watch_later(tap, ref, owner)
        else:
            gradients.watch_tensor(tap, tensor)

    def _watch_later(self, tap: Tap, ref: weakref.ref[Any], owner: int | None) -> None:
        module = gathering.gatherer(self._model, tap.target.path) or tap.target.module
        _, site = self._sites.setdefault(id(module), (module, Site(module, ref, owner)))
        site.values = [*site.values, cast(Tap, gathering.Gathered(tap))]

    def _caller_of(self, target: Target) -> nn.Module:
        """The module whose calls show a parameter: its own, or the next above that is called."""
        if isinstance(target.module, torch.jit.ScriptModule):
            if self._verb == "edit":  # which swaps it now, not at a call
                return target.module
            asked = f"The value of {str(target.place)!r} was asked for at each call:"
            remedy = f"Read it with hookline.get_parameter(model, {str(target.place)!r})."
            raise NotHookable(asked, "it is in a ScriptModule, whose calls cannot be seen.", remedy)
        for module in around(self._model, target.path):  # a ParameterList is never called
            if type(module).forward is not nn.Module.forward:
                return module
        return target.module

    def _stop(self) -> None:
        for module, site in self._sites.values():
            site.unregister(module)
            if site.frames or site.abandoned:
                site.drain()
            site.keeper = site.generation = None
        self._handles.remove_all()
        active = ACTIVE.get()
        if self._serial in active:
            ACTIVE.set(active - {self._serial})

    def _settle(self) -> None:
        for _, site in self._sites.values():
            site.left()

    def handles(self) -> Handles:
        """The hooks on tensors and nodes, to be taken off at the end."""
        if len(self._handles) >= self._handles.many:
            self._handles.prune()
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
        return tap.fired > 0 and not tap.tally()[1]

    def _awaited(self) -> ChangeError | None:
        """The error if checkpointed calls that were changed will run again, after the end."""
        for module, site in self._sites.values():
            if site.changed and site.regions is not None and site.regions.awaiting():
                name = first_names(self._model).get(id(module), "")
                return awaited(f"{self._verb} changed a call of {name!r}")
        return None

    def remove(self) -> None:
        """Stop acting and leave nothing behind. Never raises, and may be called twice."""
        awaited = self._awaited() if self._open else None
        super().remove()
        if awaited is not None:
            warn_outside(str(awaited))

    def _verify(self) -> None:
        awaited = self._awaited()
        if awaited is not None:
            raise awaited
        for _, site in self._sites.values():
            if site.foreign and site.owner is None:  # an operation's: others see every thread
                raise NeverFired(
                    f"{self!r} was to act in every thread.",
                    f"A module was called {site.foreign}× in another: its operations are not seen.",
                    "Enter it in the thread that runs the model.",
                )
        for tap in self._taps.values():
            if tap.replaces:
                tap.lost()
        for request in self._requests:
            missing = [t for t in request.targets if not self._fired(self._taps[t.key])]
            lost = [t for t in missing if self._taps[t.key].losses]
            if missing and (request.literal or lost or len(missing) == len(request.targets)):
                raise self._never_fired(request, (lost or missing)[0])

    def _never_fired(self, request: Request, target: Target) -> NeverFired:
        tap, count = self._taps[target.key], len(request.targets)
        if tap.tally()[1] and (tap.fired or (tap.lacking and _came(tap, self._site_of(tap))[0])):
            return self._missed(tap)
        place = str(self.place_of(target))
        asked = f"Nothing happened at {place!r}"
        if tap.chosen is not None and tap.untold:
            call, unknown = next(iter(tap.untold.items()))
            asked = f"The calls {tap.chosen.shown} at {place!r} were asked for:"
            return NeverFired(asked, f"call {call} cannot be told: {unknown.found}", unknown.remedy)
        if count > 1 and not request.literal and not tap.losses:
            asked += f", nor any other of the {count} places that match {request.asked}"
        if tap.losses:
            return NeverFired(f"{asked}:", *gradients.VIEW_CHANGED)
        remedy = "A capture of '**' shows what is called, in record.places() and record.unfired()."
        if target.operation is not None and not self._site_of(tap).count:
            remedy = f"List them with hookline.select(model, '{target.path}/*', inputs=batch)."
        elif _is_beyond(tap, self._site_of(tap)):
            remedy = _NAME_OTHERS
        found, why = self.reason(tap), tap.why()
        if "grad" in target.port and needs_backward(found):
            remedy = gradients.NONE_CAME[1]
        if why is not None:  # which says itself what to do
            found, remedy = why[0], why[1] or remedy
        return NeverFired(f"{asked}:", found, remedy)

    def _missed(self, tap: T) -> NeverFired:
        """The error if a tap did not what was asked of it at some of the calls."""
        reached, missed = tap.tally()
        asked = f"{self._verb} was to act at {str(tap.place)!r}:"
        found = f"it did at {_calls(reached)}, but not at {_calls(missed)}"
        found = found if reached else f"it did not at {_calls(missed)}"
        count, came = _came(tap, self._site_of(tap))
        why = gradients.VIEW_CHANGED if missed[0] in tap.losses else tap.why(missed[0])
        if why is None and count <= missed[0]:
            why = f"{came}, counted from 0.", _NAME_OTHERS
        elif why is None:
            why = (tap.silent, _NAME_OTHERS) if tap.silent else gradients.NONE_CAME
        return NeverFired(asked, f"{found}: {why[0]}", why[1])

    def reason(self, tap: Tap, others: bool | None = None) -> str:
        """Why nothing happened at a tap; `others` is whether something did elsewhere."""
        if self._names is None:
            self._names = first_names(self._model)
        if others is None:
            others = any(self._fired(other) for other in self._taps.values())
        return silence(tap, self._site_of(tap), self._model, self._names, others)


def _home(target: Target) -> Any:
    """What the site of a target is kept under."""
    return target.ident if target.operation is None else (target.ident, target.operation)


def _calls(numbers: Sequence[int]) -> str:
    """Calls by their numbers, as words."""
    return f"call{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _came(tap: Tap, site: Site) -> tuple[int, str]:
    """How often what a tap is for came, and that as words."""
    if tap.target.port == "grad":
        return tap.seen, f"its gradient came {tap.seen}×"
    what = "its module" if tap.target.operation is None else "the operation"
    return site.count, f"{what} was called {site.count}×"


def _is_beyond(tap: Tap, site: Site) -> bool:
    """Whether something came for a tap, but only before the first call that was asked for."""
    count, calls = _came(tap, site)[0], tap.chosen
    return count > 0 and calls is not None and calls.step is None and calls.numbers[0] >= count


def silence(tap: Tap, site: Site, model: Any, names: dict[int, str], others: bool) -> str:
    """Why nothing happened at a tap; `others` is whether something did elsewhere."""
    target = tap.target
    tap.lost()
    if tap.untold:
        call, unknown = next(iter(tap.untold.items()))
        return f"call {call} cannot be told: {unknown.found} {unknown.remedy}"
    why = tap.why()
    if why is not None:
        return " ".join(why).strip()
    if tap.silent and target.port != "grad":
        return tap.silent
    if site.foreign:
        other = f"its module was called {site.foreign}×, but from another thread or task than this:"
        return f"{other} {site.elsewhere}"
    if isinstance(site, Operation) and not site.count:
        return not_called(target.operation or "", site.names)
    if _came(tap, site)[0]:
        return _meant(tap, site)
    if target.port == "grad":
        return tap.silent or _NO_GRADIENT
    path = names.get(target.ident)
    if path is None and isinstance(model, nn.Module):
        return "its module was taken out of the model while this was open."
    return _uncalled(model, path or "", others)


def _uncalled(model: Any, path: str, others: bool) -> str:
    """Why a module was not called; the likeliest cause first."""
    if path.endswith("out_proj"):
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return (
                "nn.MultiheadAttention uses the weights of its out_proj without ever calling it; "
                "ask for the attention module's own output."
            )
    if not others:
        return (
            f"{_UNCALLED}, nor any other that was asked for. Most likely the model "
            "was called before or after the `with`, and not inside it. Or its forward was called "
            "directly, as in module.forward(x), which runs no hooks, or its weights used without "
            "it, or the code that calls it was not reached."
        )
    return (
        f"{_UNCALLED}. Its forward may have been called directly, as in "
        "module.forward(x), which runs no hooks, or its weights used without it, or the code that "
        "calls it was not reached."
    )


def needs_backward(found: str) -> bool:
    """Whether a gradient is missing, for this reason, where a forward or a backward may be."""
    return _NO_GRADIENT in found or found.startswith(_UNCALLED)


def _meant(tap: Tap, site: Site) -> str:
    """Why nothing happened at a tap for which something came."""
    calls, (_, came) = tap.chosen, _came(tap, site)
    done = "changed" if tap.replaces else "kept"
    if _is_beyond(tap, site):
        return f"{came}, and no call was {done}: calls= names others, counted from 0."
    if "grad" in tap.target.port:
        return tap.silent or f"{came}, but {_NO_GRADIENT}"
    if calls is not None and calls.step is not None:
        return f"{came}, and no call was {done}: none was of the step {calls.shown}."
    return f"{came}, and no call was {done}: calls= names others, counted from 0."


def first_names(model: nn.Module | Tensor | None) -> dict[int, str]:
    """The first name of every module, by id, in model order."""
    return {id(m): path for path, m in walk(model)} if isinstance(model, nn.Module) else {}


def named_place(target: Target, names: dict[int, str]) -> Place:
    """The place of a target under the first name of its module."""
    return target.place_at(names.get(target.ident, target.path))


# -- hook -----------------------------------------------------------------------------------------


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes_call(function: Callable[..., Any]) -> bool:
    """Whether a function asks for the Call: it has a second required positional parameter. One
    with a third, as torch's own hooks have, is refused.

    >>> import torch
    >>> takes_call(lambda value, call: value), takes_call(torch.relu), takes_call(print)
    (True, False, False)
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return False
    required = [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty]
    if len(required) > 2:
        raise TypeError(
            f"{function!r} was given to be called at places. It needs {len(required)} arguments, "
            f"as torch's own hooks do. Let it take the value, or (value, call), with call.module."
        )
    return len(required) == 2


class HookTap(Tap):
    """Calls a function with the values at a target."""

    def __init__(self, target: Target, ref: Any, function: Any, wants_call: bool) -> None:
        super().__init__(target, ref)
        self.function, self.wants_call = function, wants_call

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        self.seen += 1
        self.fired += 1
        try:
            if self.wants_call:
                new = self.function(value, Call(self, index, recomputed, frame))
            else:
                new = self.function(value)
        except BaseException as error:
            add_place(error, self)
            raise
        if new is not None and self.target.port == "value":
            asked = f"A hook at {str(self.place)!r} returned a value:"
            remedy = "Use hookline.edit(model, place, change), which puts it back afterwards."
            raise PlaceError(asked, "a parameter or buffer cannot be replaced by a hook.", remedy)
        return KEEP if new is None else new


class hook(Context[HookTap]):
    """Call a function with every value at a place; what it returns stands in the value's stead.

    >>> import torch
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
        self,
        model: nn.Module | Tensor,
        where: Where,
        function: Callable[[Any], Any] | Callable[[Any, Call], Any],
    ) -> None:
        self._function, self._wants_call = function, takes_call(function)
        super().__init__(model, (where,))

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> HookTap:
        return HookTap(target, ref, self._function, self._wants_call)


@torch_hooks.unserializable_hook
class _Keeper:
    """A hook on a tensor that does nothing but keep a context alive."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __call__(self, grad: Any) -> None: ...
