"""What a context asks of modules.

- `Ask`: one thing that is asked: a port, a part of the value there, and who takes the value
- `Plan`: all that is asked of a module; modules of which the same is asked share one plan
- `Missing`: kept in place of a value that lacks what was asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookline.engine.calls import Subject
from hookline.places.resolution import Target
from hookline.places.tree import NamedModule
from hookline.values.nested import Path

if TYPE_CHECKING:
    from hookline.engine.call_choice import Calls
    from hookline.engine.handlers import Handler

__all__ = ["Ask", "Missing", "Plan"]


class Missing(NamedTuple):
    """Why a value lacks what was asked for, with the remedy. It stands in the log for the value."""

    reason: str
    remedy: str


class Ask:
    """One thing that is asked of modules: a port, a part of the value there, and who takes it.

    If `keep` is set, values are only looked at: the tracer logs `keep(value)`. Otherwise a value
    goes to a handler, one for each place, which `make` makes when it is first needed.
    """

    keep: Callable[[Any], Any] | None = None
    keep_copy: Callable[[Any], Any] | None = None  # `keep`, for values that others may write to
    keep_gradient: Callable[[Tensor], Any] | None = None  # None: gradients go to the handler

    def __init__(
        self,
        port: str,
        make: Callable[..., Handler],
        *,
        parts: Path = (),
        operation: str | None = None,
        target: Target | None = None,
        calls: Calls | None = None,
        replaces: bool = True,
        needs_start: bool = False,
    ) -> None:
        self.port, self.parts, self.operation = port, parts, operation
        self.make = make
        self.target = target  # of a parameter or buffer
        self.calls = calls  # those that are meant; None for all
        self.replaces = replaces  # whether values may be replaced
        self.needs_start = needs_start  # whether calls are told apart from their start

    @property
    def is_whole(self) -> bool:
        """Return True if the whole values of all calls of a module are only looked at."""
        others = self.parts or self.operation or self.target or self.calls
        return self.keep is not None and not (others or self.needs_start)

    def subject_at(self, ident: int) -> Subject:
        """Return what events belong to if this is asked of the module with an id."""
        if self.target is not None:
            return self.target.key
        return ident if self.operation is None else (ident, self.operation)

    def subjects_of(self, modules: Iterable[NamedModule]) -> list[Subject]:
        """Return what events belong to if this is asked of some modules."""
        if self.target is not None:
            return [self.target.key]
        idents = [id(module) for _, module in modules]
        return idents if self.operation is None else [(i, self.operation) for i in idents]

    def explain(self, error: Exception) -> Missing:
        """Explain that `keep` raised an error."""
        raise AssertionError("an ask with `keep` explains its errors")


class Plan:
    """All that is asked of a module. Modules of which the same is asked share one plan."""

    def __init__(
        self, asks: Sequence[Ask], takes_cache: bool = False, has_operations: bool = False
    ) -> None:
        def of_port(*ports: str) -> tuple[Ask, ...]:
            return tuple([ask for ask in asks if ask.port in ports])

        self.values = of_port("value", "grad")
        self.inputs = of_port("input", "inputs")
        self.outputs = of_port("output")
        self.grad_inputs = of_port("grad_input", "grad_inputs")
        self.grad_outputs = of_port("grad_output")
        found = self.values, self.inputs, self.outputs, self.grad_inputs, self.grad_outputs
        assert sum(map(len, found)) == len(asks), "a port is not known"
        self.gradients = bool(self.grad_inputs or self.grad_outputs)
        self.takes_cache = takes_cache  # whether its calls tell the steps of a generation
        self.has_operations = has_operations  # whether something is asked of its operations
        apart = any(ask.needs_start for ask in asks)
        # Whether something must be known of a call before it begins.
        self.needs_start = bool(
            self.inputs or self.values or self.gradients or takes_cache or apart
        )
        # Whether calls in checkpointed regions are remembered, to know them in the backward.
        self.replaces = any(ask.replaces for ask in self.inputs + self.outputs)
        self.remembers = self.replaces or apart or self.gradients
        # Whether the forward hook gets the named arguments.
        self.takes_kwargs = any(ask.keep is None for ask in self.outputs)
        # Whether only whole outputs and gradients are looked at; see `Tracer._end_simple`.
        looks = all(ask.is_whole and ask.keep_gradient is not None for ask in asks)
        named = any(ask.port in ("input", "inputs", "grad_inputs") for ask in asks)
        self.simple = self.gradients and looks and not (named or has_operations)

    @cached_property
    def without_start(self) -> Plan:
        """This plan for a module of which nothing must be known before a call begins."""
        plan = Plan((*self.outputs, *self.grad_outputs))
        plan.needs_start = False
        return plan
