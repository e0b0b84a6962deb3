"""Measure one step of a training: outputs, gradients, parameters and their updates.

- `MeasuredRows`: the rows that are measured, with their modules and parameters
- `StepMeasurement`: one measured step: attached when it begins, complete after `finish()`
- `at_end(function)`: call a function at the end of the running backward
- `weakly(method)`: a function for hooks, which calls a method as long as its object exists

Outputs and their gradients come from taps, which change nothing. The gradient of a parameter is
measured at the end of a backward: `.grad`, over all micro-batches, is what the optimizer will get,
before it is clipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine.asks import Ask
from hookline.engine.calls import RunningCall
from hookline.engine.context import Context
from hookline.engine.handlers import UNCHANGED, Handler
from hookline.errors import PlaceError
from hookline.places.grammar import Place
from hookline.places.resolution import Request, Target, Where, resolve
from hookline.places.tree import first_names, join
from hookline.torch_private import (
    at_backward_end,
    backward_id,
    parameters_of,
    post_accumulate_hooks_of,
    version_of,
)
from hookline.training.output_properties import ends_of, has_zeros, is_fixed, unit_of
from hookline.training.run_files import ROW_KINDS, Row
from hookline.training.tensor_moments import Moments, is_measurable, moments, sampled, settle
from hookline.values.nested import leaves
from hookline.values.sharding import local

__all__ = ["MeasuredRows", "StepMeasurement", "at_end", "weakly"]

_UPDATES = 4096  # elements of a parameter that are compared before and after a step
_OVERFLOWS = 20  # more than a scaler needs to come down from where it begins


class MeasuredRows:
    """The rows that are measured, in model order, with their modules and parameters."""

    def __init__(self, model: nn.Module, where: Where, kinds: Iterable[str]) -> None:
        self.model, self.kinds = model, tuple(kinds)
        for kind in self.kinds:
            if kind not in ROW_KINDS:
                raise PlaceError(
                    f"watch was asked for the kind {kind!r}.",
                    "There is no such kind.",
                    f"Name some of {', '.join(ROW_KINDS)}.",
                )
        self.rows: list[Row] = []
        self.modules: list[nn.Module] = []  # of each row
        self.attributes: list[str | None] = []  # of rows of parameters: the name in the module
        self.targets: list[Target] = []
        self.numbers: dict[Any, int] = {}  # the row of a target's key, or of a parameter
        # The parameters that the model itself holds belong to all of it, too.
        everything = isinstance(where, str) and where == "**"
        alone = everything and len(_lists_in(model)) == len(list(model.modules())) - 1
        requests = resolve(model, ["" if alone else where])
        names = first_names(model)
        named = [r.targets[0] for r in requests if r.literal]
        self.literal = [str(target.place_at(names[target.ident])) for target in named]
        order = {ident: n for n, ident in enumerate(names)}
        targets = {t.key: t for request in requests for t in request.targets}
        own = [model] if everything else []
        whole = [t for t in targets.values() if t.port == "output" and not t.parts]
        for module in [*own, *(t.module for t in whole if t.operation is None)]:
            own += _lists_in(module)
        held = [Target(module, "", "value", (), n) for module in own for n in parameters_of(module)]
        targets = {t.key: t for t in held} | targets
        seen: set[int] = set()
        for target in sorted(targets.values(), key=lambda target: order[target.ident]):
            path = names[target.ident]
            if target.port == "output" and target.operation is None:
                self._add_module(target, path)
                held = parameters_of(target.module) if not target.parts else {}
                self._add_parameters(target.module, path, list(held), seen)
            elif target.port == "value":
                self._add_parameters(target.module, path, [cast(str, target.attribute)], seen)
            else:
                raise PlaceError(
                    f"watch was given the place {str(target.place)!r}.",
                    "It watches modules, with their outputs and gradients, and parameters.",
                    "Name a module without a port, or a parameter; kinds= says what to measure.",
                )

    def _add_module(self, target: Target, path: str) -> None:
        place, kind = target.place_at(path), type(target.module).__name__
        for port, name in (("output", "output"), ("grad_output", "grad")):
            if name in self.kinds:
                one = Target(target.module, path, port, target.parts)
                self.targets.append(one)
                self.numbers[one.key] = len(self.rows)
                self._add(Row(str(place), name, kind), target.module, None)

    def _add_parameters(
        self, module: nn.Module, path: str, names: list[str], seen: set[int]
    ) -> None:
        for name in names:
            tensor = _parameter(module, name)
            if tensor is None or not tensor.requires_grad or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            place = str(Place(join(path, name), "value"))
            for kind in ("weight", "weight_grad", "update"):
                if kind in self.kinds:
                    shown = None if is_lazy(tensor) else tuple(tensor.shape)
                    self._add(Row(place, kind, type(module).__name__, shown), module, name)

    def _add(self, row: Row, module: nn.Module, attribute: str | None) -> None:
        self.rows.append(row)
        self.modules.append(module)
        self.attributes.append(attribute)

    def parameter(self, number: int) -> Tensor | None:
        """Return the parameter of a row as it is now; it may have been exchanged since."""
        tensor = _parameter(self.modules[number], cast(str, self.attributes[number]))
        return None if tensor is None or is_lazy(tensor) else tensor

    def sample(self, number: int) -> Tensor | None:
        """Return a copy of some elements of the parameter of a row."""
        tensor = _held(self.parameter(number))
        return None if tensor is None else sampled(tensor, _UPDATES, exact=True)

    def is_sampled(self, number: int) -> bool:
        """Return True if only some elements of the parameter of a row are compared."""
        tensor = _held(self.parameter(number))
        return tensor is not None and tensor.numel() > _UPDATES

    def without_data(self) -> list[str]:
        """Return the places of parameters without data between calls: accelerate offloads them."""
        numbers = [n for n, name in enumerate(self.attributes) if name is not None]
        found = [(self.rows[n].place, self.parameter(n)) for n in numbers]
        return [*dict.fromkeys(p for p, tensor in found if tensor is not None and tensor.is_meta)]

    def of_kind(self, kind: str) -> list[int]:
        """Return the numbers of the rows of a kind."""
        return [number for number, row in enumerate(self.rows) if row.kind == kind]


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a module; None if there is none of that name, or it is a buffer."""
    held = parameters_of(module)
    return held[name] if name in held else None  # noqa: SIM401 - a ScriptModule's has no get


def _lists_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules in a module that are never called, such as parameter lists, and those in
    them.
    """
    found: list[nn.Module] = []
    for child in module.children():
        own = getattr(type(child), "forward", None)  # which that of a ScriptModule does not show
        if own is nn.Module.forward and "forward" not in vars(child):
            found += [child, *_lists_in(child)]
    return found


def _first(value: Any) -> Tensor | None:
    """Return the tensor in an output that is measured: the first floating-point one."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    return next((tensor for _, tensor in leaves(value) if tensor.is_floating_point()), None)


class _MeasuringHandler(Handler):
    """Measures the outputs of one module, or their gradients."""

    wanted: Any = ()  # of a nested output: where the tensor stands whose gradient is measured

    def receive(self, value: Any, call: RunningCall) -> Any:
        looking = cast("StepMeasurement | None", self.context)
        tensor = None if call.recomputed else _first(value)
        if looking is not None and tensor is not None:
            looking.take_output(self.target, tensor)
        return UNCHANGED

    def expect(self, value: Any, number: int, tensors: Any) -> None:
        looking, tensor = cast("StepMeasurement | None", self.context), _first(value)
        if looking is not None and tensor is not None:
            looking.find_units(self.target, number, tensor)
        if not isinstance(value, Tensor):
            found = (path for path, tensor in leaves(value) if tensor.is_floating_point())
            self.wanted = next(found, None)

    def gradient(self, grad: Tensor, number: int, path: Any) -> Tensor | None:
        looking = cast("StepMeasurement | None", self.context)
        if looking is not None and path == self.wanted:
            looking.take_gradient(self.target, number, grad)
        return None


class StepMeasurement(Context):
    """Everything that is measured in one step: attach it when the step begins.

    `counts` returns whether a forward belongs to the training, `scale` the factor of the loss;
    `alarm` is called if gradients are not finite and the scale cannot be the reason.
    """

    _verb = "watch"

    def __init__(
        self,
        plan: MeasuredRows,
        counts: Callable[[], bool],
        scale: Callable[[], float | None],
        alarm: Callable[[int, float], None],
    ) -> None:
        super().__init__(plan.model, ())
        self.plan = plan
        self.found: dict[int, Moments] = {}  # by the number of the row
        self.squares: dict[int, float] = {}  # of updates: of the parameter as it was before
        self.spoiled: set[int] = set()  # rows of updates of what was not finite before the step
        self.aliases: dict[int, int] = {}  # rows whose tensor is that of an earlier row
        # Rows of outputs that are what they are by design, and of those with units that are zero.
        self.fixed, self.zeroed = set[int](), set[int]()
        self.backwards = self.overflows = 0  # and those that a scaler will make nothing of
        self._counts, self._scale, self._alarm = counts, scale, alarm
        self._outputs: list[tuple[int, Moments]] = []
        self._grads: list[tuple[int, Moments]] = []  # of the backward that runs
        self._arrived: dict[int, None] = {}  # parameters whose gradients have changed in it
        self._shares: dict[int, Moments] = {}  # of gradients that may be gone when it ends
        self._tasks: set[int] = set()  # backwards whose end is waited for
        self._last: dict[str, tuple[Any, int, Moments, int]] = {}
        self._units: dict[tuple[Any, int], int] = {}  # of outputs, by call: the unit dimension
        self._before: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        return "<hookline watch, in a step that is measured>"

    def _resolve(self) -> list[Request]:
        request = Request("**", False, None, ())
        request.replace_targets(self.plan.targets)
        return [request]

    def _ask(self, port: str, **place: Any) -> Ask:
        return Ask(port, _MeasuringHandler, replaces=False, **place)

    def _start(self, attached: bool) -> None:
        if self.plan.targets:
            super()._start(attached)
        share, arrival = weakly(self.take_share), weakly(self.take_arrival)
        for number in self.plan.of_kind("weight_grad"):
            tensor = self.plan.parameter(number)
            if tensor is not None and tensor.requires_grad:
                if post_accumulate_hooks_of(tensor):  # they may step, and let the gradient go
                    self._hooks.append(tensor.register_hook(partial(share, number)))
                arrive = partial(arrival, number)
                self._hooks.append(tensor.register_post_accumulate_grad_hook(arrive))
        for number in self.plan.of_kind("update"):
            if (sample := self.plan.sample(number)) is not None:
                self._before[number] = sample

    def _stop(self) -> None:
        super()._stop()
        while self._hooks:
            self._hooks.pop().remove()

    # -- what comes while the step runs ---------------------------------------------------------

    def find_units(self, target: Target, index: int, tensor: Tensor) -> None:
        """Find the dimension of the units in an output whose gradient will be measured."""
        self._units[target.key, index] = unit_of(target.module, tensor)

    def take_output(self, target: Target, tensor: Tensor) -> None:
        """Measure an output."""
        if self._counts():
            number = self.plan.numbers[target.key]
            if is_fixed(tensor, target.module):
                self.fixed.add(number)
            if has_zeros(tensor, target.module):
                self.zeroed.add(number)
            unit = unit_of(target.module, tensor)
            found = self._measure("output", tensor, unit, target.module, number)
            if found is not None:
                self._outputs.append((number, found))
                if found.waiting is None:
                    self._fold()

    def take_gradient(self, target: Target, index: int, grad: Tensor) -> None:
        """Measure the gradient of an output; the end of the backward decides if it counts."""
        number = self.plan.numbers[target.key]
        unit = self._units.get((target.key, index), -1)
        found = self._measure("grad", grad, unit, target.module, number)
        if found is not None:
            self._grads.append((number, found))
            self._await_end()

    @torch.no_grad()
    def take_share(self, number: int, grad: Tensor) -> None:
        """Measure the share of a parameter's gradient that is about to be added."""
        held = _held(grad)
        if held is not None:
            self._shares[number] = moments(held, 0)

    def take_arrival(self, number: int, parameter: Tensor) -> None:
        """Note that the gradient of a parameter has changed."""
        self._arrived[number] = None
        self._await_end()

    def _measure(
        self, kind: str, tensor: Tensor, unit: int, module: nn.Module, number: int
    ) -> Moments | None:
        # A block often returns what its last layer returned: the same tensor, just measured.
        ref, version, found, other = self._last.get(kind, (None, 0, None, 0))
        if ref is not None and ref() is tensor and version == version_of(tensor):
            self.aliases.setdefault(number, other)
            return found
        with torch.no_grad():
            if not is_measurable(local(tensor)):
                return None
            flat = ends_of(module) if kind == "output" else None
            found = moments(tensor, unit, flat)
        if not tensor.is_inference():
            self._last[kind] = weakref.ref(tensor), version_of(tensor), found, number
        return found

    # -- the end of a backward ------------------------------------------------------------------

    def _await_end(self) -> None:
        task = backward_id()
        if task != -1 and task not in self._tasks:
            self._tasks.add(task)
            at_end(weakly(self.take_end))

    @torch.no_grad()
    def take_end(self) -> None:
        """End a backward: gradients are summed over its paths, and over ranks."""
        self._tasks.discard(backward_id())
        scale = self._scale()
        for number in self._arrived:
            parameter = self.plan.parameter(number)
            grad = _held(None if parameter is None else parameter.grad)
            found = self._shares.get(number) if grad is None else moments(grad, 0)
            if found is not None:
                self._grads.append((number, found))
        self._arrived, self._shares = {}, {}
        self._fold()
        settle([found for _, found in self._grads])
        self.backwards += 1
        grads, self._grads = self._grads, []
        if scale is not None and any(found.nonfinite for _, found in grads):
            self.overflows += 1  # the scaler makes no step of it, and nor does this
            if self.overflows == _OVERFLOWS:
                self._alarm(self.overflows, scale)
            return
        for number, found in grads:
            self._add(number, found if scale is None else found.scaled(1 / scale))

    def _fold(self) -> None:
        settle([found for _, found in self._outputs])
        for number, found in self._outputs:
            self._add(number, found)
        self._outputs = []

    def _add(self, number: int, found: Moments) -> None:
        own = self.found.get(number)
        # The gradient of a parameter is the sum over all backwards already.
        total = own is None or self.plan.rows[number].kind == "weight_grad"
        self.found[number] = found if total else cast(Moments, own).merged(found)

    # -- the end of the step --------------------------------------------------------------------

    def finish(self) -> None:
        """End the step: measure the updates of the parameters, and leave the model."""
        with torch.no_grad():
            self._fold()
            late: dict[int, Moments] = {}
            for number in self.plan.of_kind("weight"):
                tensor = _held(self.plan.parameter(number))
                if tensor is not None:
                    late[number] = moments(tensor, 0)
            pairs: dict[int, tuple[Moments, Moments, float]] = {}
            for number, before in self._before.items():
                tensor = _held(self.plan.parameter(number))
                after = None if tensor is None else sampled(tensor, _UPDATES, exact=True)
                if tensor is not None and after is not None and after.shape == before.shape:
                    share = tensor.numel() / len(before)
                    pairs[number] = moments(after - before), moments(before, most=1), share
            settle([*late.values(), *(one for pair in pairs.values() for one in pair[:2])])
            self.found |= late
            for number, (update, old, share) in pairs.items():
                self.found[number] = update.grown(share)
                self.squares[number] = old.square * share
                if old.nonfinite:
                    self.spoiled.add(number)
        self.remove()


def _held(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's part of a parameter or its gradient, if it can be measured."""
    if tensor is None:
        return None
    found = local(tensor.detach())
    if found.layout is torch.sparse_coo:  # of an embedding: the rows that were used
        found = found.coalesce().values()
    return found if is_measurable(found) else None


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object exists: hooks keep nothing
    alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        found = reference()
        if found is not None:
            found(*given)

    return call


def at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward."""
    # DDP and FSDP, too, do their last work in such a callback: theirs come first.
    at_backward_end(partial(at_backward_end, function))
