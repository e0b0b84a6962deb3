"""What the verbs that act at places have in common: asking, entering, leaving, and the exit check.

- `Context`: the base class of `capture`, `edit`, `hook` and of the tools that look at values
- `targets_of(context)`, `tracer_of(context)`, `see_own_calls(context)`: for the tools
- `reusable(where)`: places that can be gone through again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import hooks as torch_hooks

from hookline.engine import fsdp, gradients, offloading
from hookline.engine.asks import Ask
from hookline.engine.call_choice import Calls
from hookline.engine.calls import Subject, module_id
from hookline.engine.checkpointing import undone_too_early
from hookline.engine.events import Keep
from hookline.engine.generation import Generation, takers_above
from hookline.engine.handlers import Handler
from hookline.engine.lifecycle import Entering
from hookline.engine.module_hooks import ACTIVE, SERIALS
from hookline.engine.operations import refuse
from hookline.engine.reasons import never_fired
from hookline.engine.tracer import Tracer
from hookline.errors import ChangeError, NeverFired, NotHookable, PlaceError, warn_outside
from hookline.places.resolution import Request, Target, Where, resolve
from hookline.places.tree import NamedModule, around, first_names
from hookline.values.nested import Path

__all__ = ["Context", "reusable", "see_own_calls", "targets_of", "tracer_of"]


def reusable(where: Any) -> Any:
    """Return places that can be gone through again: iterators become lists."""
    return [reusable(w) for w in where] if hasattr(where, "__next__") else where


class Context(Entering):
    """The base class of the verbs that act at places. Nothing acts before it is entered."""

    _owned = False  # whether it sees only the calls of the thread or task that entered it
    _keep: Keep = "all"  # what the log holds
    _chosen: Calls | None = None  # the calls that are meant; None for all
    _anchors = True  # whether modules whose parameters are watched keep it alive
    _serial = 0
    _tracer: Any = None  # a Tracer, made anew on entering

    def __init__(self, model: nn.Module | Tensor, wheres: Iterable[Where]) -> None:
        super().__init__(model)
        self._wheres = tuple([w if isinstance(w, str) else reusable(w) for w in wheres])
        self._requests: list[Request] = []

    # -- for subclasses -------------------------------------------------------------------------

    def _ask(self, port: str, **place: Any) -> Ask:
        """Return what is asked at a port; `place` are the arguments of `Ask` that name the place.

        It must not hold this context, or a cycle would keep graphs alive.
        """
        raise AssertionError("a verb asks")

    def _asking(self, request: Request) -> tuple[Callable[..., Ask], dict[Any, Ask]]:
        """Return what makes the asks of a request, and those that it shares with other requests."""
        return self._ask, self._asks

    def _resolve(self) -> list[Request]:
        return resolve(self._model, self._wheres)

    def _prepared(self) -> None:
        """Called when everything is asked, before the hooks are put on."""

    # -- entering and leaving -------------------------------------------------------------------

    def _start(self, attached: bool) -> None:
        self._tracer = None
        self._requests = self._resolve()
        if not any(request.modules or request.single_targets for request in self._requests):
            remedy = "Name places after the model, such as '**' for every module."
            raise PlaceError(f"{self._verb} was given no place.", "Nothing would happen.", remedy)
        if attached:
            refuse(self._requests)
        self._serial = next(SERIALS)
        owner = self._serial if self._owned and not attached else None
        self._tracer = tracer = Tracer(self, self._model, owner, self._keep)
        tracer.keeper = self if attached else None
        self._asks: dict[Any, Ask] = {}
        self._callers: dict[Ask, nn.Module] = {}  # the modules at whose calls parameters are read
        # What each request asks of which modules.
        self._asked = [self._ask_at(request) for request in self._requests]
        tracer.places.entries = [entry for entries in self._asked for entry in entries]
        self._prepared()
        takers = self._takers()
        if takers:
            tracer.generation = Generation(takers)
        tracer.put_on(self._callers, takers, self._anchors)
        if owner is not None:
            ACTIVE.set(ACTIVE.get() | {owner})

    def _ask_at(self, request: Request) -> list[tuple[Ask, list[NamedModule]]]:
        """Return what a request asks of which modules."""
        make, asks = self._asking(request)
        entries: list[tuple[Ask, list[NamedModule]]] = []
        if request.modules:
            port = request.port or "output"
            ask = _shared_ask(make, asks, port, request.parts, request.operation)
            entries.append((ask, request.modules))
        for target in request.single_targets:
            if target.attribute is None:
                ask = _shared_ask(make, asks, target.port, target.parts, target.operation)
            elif target.key in asks:
                ask = asks[target.key]
            else:
                ask = asks[target.key] = make(target.port, target=target)
                self._watch_tensor(target, ask)
            entries.append((ask, [(target.path, target.module)]))
        return entries

    def _watch_tensor(self, target: Target, ask: Ask) -> None:
        """Watch a parameter or buffer: the calls that use it, or its gradient."""
        if target.port == "value":
            self._callers[ask] = self._caller_of(target)
        else:
            self._watch_parameter(self._tracer.handler(target.key, ask))

    def _watch_parameter(self, handler: Handler) -> None:
        """Watch the gradient of a parameter, or of what takes its place at a call."""
        target, tensor = handler.target, cast(Tensor, handler.target.tensor())
        if isinstance(self._model, Tensor) and self._attached:
            # There is no module whose hooks could keep this alive: a hook of the tensor does.
            handler.tensor_hooks.add(self._model, _Keeper(self))
        if offloading.is_offloaded(cast(Any, self._model), tensor, target.named(target.path)):
            handler.explain(0, *offloading.NO_GRADIENT)
        elif fsdp.is_gathered(target.module) or is_lazy(tensor):
            module = fsdp.gatherer(cast(Any, self._model), target.path) or target.module
            self._callers[handler.ask] = module
            fsdp.watch_later(handler)
        else:
            gradients.watch_tensor(handler, tensor)

    def _caller_of(self, target: Target) -> nn.Module:
        """Return the module whose calls show a parameter: its own, or the next above it."""
        if isinstance(target.module, torch.jit.ScriptModule):
            asked = f"The value of {str(target.place)!r} was asked for at each call:"
            remedy = f"Read it with hookline.get_parameter(model, {str(target.place)!r})."
            raise NotHookable(asked, "it is in a ScriptModule, whose calls cannot be seen.", remedy)
        for module in around(self._model, target.path):  # a ParameterList is never called
            if type(module).forward is not nn.Module.forward:
                return module
        return target.module

    def _takers(self) -> list[nn.Module]:
        """Return the modules that take the cache of a generation, if its steps are asked for."""
        if self._chosen is None or self._chosen.step is None:
            return []
        meant = [entry for entries in self._asked for entry in entries if entry[0].calls]
        takers = takers_above(self._model, [module for _, held in meant for _, module in held])
        covered = {id(inner) for taker in takers for inner in taker.modules()}
        for request, entries in zip(self._requests, self._asked, strict=True):
            asked = f"calls={self._chosen.step!r} was asked for at {request.shown}:"
            found = [entry for entry in entries if entry[0].calls is not None]
            if any(ask.port == "grad" for ask, _ in found):
                problem = "a parameter has one gradient for all calls of a backward."
                raise NotHookable(asked, problem, "Name a module's :grad_output or :grad_input.")
            modules = [module for _, held in found for _, module in held]
            if modules and not any(id(module) in covered for module in modules):
                problem = "no module there, or above it in the model that was given, takes a cache "
                problem += "(past_key_values, cache_params), which tells the prompt from the rest."
                remedy = "Give the whole model, or numbers in calls=."
                raise NotHookable(asked, problem, remedy)
        return takers

    def _stop(self) -> None:
        if self._tracer is not None:
            self._tracer.take_off()
        active = ACTIVE.get()
        if self._serial in active:
            ACTIVE.set(active - {self._serial})

    def _after_block(self) -> None:
        if self._tracer is not None:
            self._tracer.leave_modes()

    def remove(self) -> None:
        """Stop acting and leave nothing behind. Never raises, and may be called twice."""
        error = self._pending_recomputation() if self._open else None
        super().remove()
        if error is not None:
            warn_outside(str(error))

    # -- the exit check -------------------------------------------------------------------------

    def _pending_recomputation(self) -> ChangeError | None:
        """Return the error if checkpointed calls that were changed will run again afterwards."""
        tracer = self._tracer
        if tracer is None:
            return None
        for subject in [*tracer.changed]:  # other threads may still add to it
            if tracer.numbers.will_be_repeated(subject):
                name = first_names(self._model).get(module_id(subject), "")
                return undone_too_early(f"{self._verb} changed a call of {name!r}")
        return None

    def _verify(self) -> None:
        error = self._pending_recomputation()
        if error is not None:
            raise error
        tracer = self._tracer
        foreign = max(tracer.foreign.values(), default=0)
        if foreign and not self._owned:  # of operations: hooks see the calls of every thread
            raise NeverFired(
                f"{self!r} was to act in every thread.",
                f"A module was called {foreign}× in another: its operations are not seen.",
                "Enter it in the thread that runs the model.",
            )
        for handler in [*tracer.handlers.values()]:
            if handler.replaces:
                handler.explain_lost()
        fired = tracer.fired()
        for request, entries in zip(self._requests, self._asked, strict=True):
            self._verify_request(request, entries, fired)

    def _verify_request(
        self,
        request: Request,
        entries: list[tuple[Ask, list[NamedModule]]],
        fired: dict[Ask, set[Subject]],
    ) -> None:
        """Raise an error if a literal place did not fire, or none that a wildcard matches."""
        tracer = self._tracer
        missing: list[tuple[Subject, Ask]] = []
        count = 0
        for ask, modules in entries:
            subjects = ask.subjects_of(modules)
            count += len(subjects)
            if not fired[ask].issuperset(subjects):
                missing += [(subject, ask) for subject in subjects if subject not in fired[ask]]
        lost = [
            key for key in missing if key in tracer.handlers and tracer.handlers[key].calls_lost
        ]
        if missing and (request.literal or lost or len(missing) == count):
            matches = ""
            if count > 1 and not request.literal:
                matches = f", nor any other of the {count} places that match {request.shown}"
            handler = tracer.read(*(lost or missing)[0])
            others = any(fired.values())
            raise never_fired(handler, self._verb, self._model, others, matches)


def _shared_ask(
    make: Callable[..., Ask], asks: dict[Any, Ask], port: str, parts: Path, operation: str | None
) -> Ask:
    """Return what is asked at a port of all modules."""
    key = port, parts, operation
    if key not in asks:
        asks[key] = make(port, parts=parts, operation=operation)
    return asks[key]


def targets_of(context: Context) -> list[Target]:
    """Return the places that an open context was asked for."""
    return [target for request in context._requests for target in request.targets]


def tracer_of(context: Context) -> Any:
    """Return the tracer of a context; None if it was never entered."""
    return context._tracer


def see_own_calls(context: Context, own: bool = True) -> None:
    """Let a context see only the calls of the thread or task that enters it, or all calls."""
    context._owned = own


@torch_hooks.unserializable_hook
class _Keeper:
    """A hook on a tensor that does nothing but keep a context alive."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __call__(self, grad: Any) -> None: ...
