"""Find the places that a program asks for in a model.

- `resolve(model, wheres)`: what was asked for, as requests with their targets
- `Where`: what stands for places
"""

# Places may be given as objects of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.places import refusals
from hookline.places.grammar import (
    INPUT_PORTS,
    TENSOR_PORTS,
    Pattern,
    Place,
    Segment,
    literal_readings,
    parse,
    parse_port,
)
from hookline.places.targets import Request, Target
from hookline.places.tree import (
    NamedModule,
    exists,
    find,
    find_tensors,
    takes_hooks,
    unwrapped,
    walk,
)
from hookline.values.nested import Path

__all__ = ["Request", "Target", "Where", "resolve"]

Predicate = Callable[[str, nn.Module], bool]
Where: TypeAlias = str | nn.Module | type[nn.Module] | re.Pattern[str] | Predicate | Iterable[Any]


def resolve(
    model: Any, wheres: Iterable[Where], hookable: bool = True, wild: bool = False
) -> list[Request]:
    """Return what was asked for; raise an error for what the model does not have.

    Args:
        model: a module, or a plain tensor with the one place ":grad".
        wheres: places, and what stands for places.
        hookable: if False, also accept modules at which no hook can fire, such as containers.
        wild: if True, also accept wildcards for operations.
    """
    if not isinstance(model, nn.Module):
        return _of_tensor(model, wheres)
    query = _Query(model, hookable, wild)
    for where in wheres:
        query.add(where)
    return query.requests


class _Query:
    """A query to one model, with the requests that are answered so far."""

    def __init__(self, model: nn.Module, hookable: bool, wild: bool) -> None:
        self.model = model
        self.hookable = hookable
        self.wild = wild
        self.requests: list[Request] = []
        # Every module by its id; None until a module, type, expression or predicate is given.
        self.walked: dict[int, NamedModule] | None = None

    def add(self, where: Any, port: str | None = None, parts: Path = ()) -> None:
        """Resolve one thing that is asked for, with the port and parts of the pair around it."""
        if isinstance(where, str):
            self.requests.append(self._of_text(where, port, parts))
        elif callable(where) or isinstance(where, re.Pattern):
            self.requests.append(self._of_modules(where, port, parts))
        elif _is_pair(where):
            self.add(where[0], *parse_port(where[1]))
        elif isinstance(where, Iterable) and not isinstance(where, (Tensor, bytes)):
            for item in where:
                self.add(item, port, parts)
        else:
            raise refusals.not_a_place(where)

    def _of_text(self, text: str, port: str | None, parts: Path) -> Request:
        """Resolve a text by the grammar, or as the literal path of something in the model."""
        literal = None
        for reading in literal_readings(text):
            if not isinstance(text, Place) and exists(self.model, reading.paths[0]):
                literal = self._of_pattern(text, reading, port, parts)
                break
        if literal is None:
            return self._of_pattern(text, parse(text), port, parts)
        try:
            request = self._of_pattern(text, parse(text), port, parts)
        except HooklineError:
            return literal
        if {target.key for target in literal.targets} != {target.key for target in request.targets}:
            raise refusals.ambiguous(text, literal.targets[0], request.targets[0])
        return literal

    def _of_pattern(self, text: str, pattern: Pattern, port: str | None, parts: Path) -> Request:
        request = Request(text, pattern.literal, pattern.port or port, pattern.parts + parts)
        if pattern.port and port:
            raise refusals.wrong_port(request, f"it was given in a pair with {port!r}.")
        if pattern.operation is not None:
            self._ask_operation(request, pattern)
        for path in pattern.paths:
            self._add_path(request, path)
        if not (request.modules or request.single_targets):
            raise refusals.not_found(self.model, request, pattern.paths[0])
        return request

    def _ask_operation(self, request: Request, pattern: Pattern) -> None:
        """Set the operation of a request."""
        name = pattern.operation or ""
        request.operation = name if pattern.nth is None else f"{name}#{pattern.nth}"
        if request.port in TENSOR_PORTS:
            raise refusals.wrong_port(request, "it belongs to parameters and buffers.")
        if not self.wild and ("*" in name or "{" in name):
            raise refusals.operation_wildcard(request)

    def _add_path(self, request: Request, path: tuple[Segment, ...]) -> None:
        """Add the modules at a path, and the tensors if the port or the last name can mean them."""
        if request.operation is not None or (not path and request.port in INPUT_PORTS):
            self._add_modules(request, self._find_unwrapped(path))
        elif request.port is None or request.port not in TENSOR_PORTS:
            self._add_modules(request, find(self.model, path))
            answered = request.modules and (request.port or request.literal)
            if path and isinstance(path[-1], str) and not answered:
                self._add_tensors(request, path)
        else:
            self._add_tensors(request, path)

    def _find_unwrapped(self, path: tuple[Segment, ...]) -> Iterable[NamedModule]:
        """Return the modules at a path, inside torch's wrappers, whose inputs have other names."""
        found: dict[nn.Module, NamedModule] = {}
        for step in find(self.model, path):
            inner = unwrapped(*step)
            found[inner[1]] = inner
        return found.values()

    def _add_modules(self, request: Request, steps: Iterable[NamedModule]) -> None:
        """Add modules; refuse those at which no hook can fire."""
        modules = request.modules
        for step in steps:
            path, module = step
            if not self.hookable or takes_hooks(module):
                modules.append(step)
            elif request.literal:
                raise refusals.not_hookable(request, path, module)
            else:
                self._note_refused(request, path, module)

    @staticmethod
    def _note_refused(request: Request, path: str, module: nn.Module) -> None:
        """Note why a match of a wildcard takes no hooks, unless it is a mere container."""
        explained = refusals.why_outside_python(module)
        if explained is not None:
            place = Place(path, request.port or "output", request.parts)
            request.refused[place] = explained[0]

    def _add_tensors(self, request: Request, path: tuple[Segment, ...]) -> None:
        """Add the parameters and buffers at a path."""
        port = request.port or "value"
        for above, module, name in find_tensors(self.model, path, port == "grad"):
            if port not in TENSOR_PORTS:
                raise refusals.wrong_port(request, f"{name!r} is a parameter or buffer.")
            if request.parts:
                raise refusals.part_of_tensor(request, name)
            request.single_targets.append(Target(module, above, port, (), name))

    def _of_modules(self, where: Any, port: str | None, parts: Path) -> Request:
        """Resolve a module, a module type, a regular expression or a predicate."""
        request = Request(where, isinstance(where, nn.Module), port, parts)
        if port in TENSOR_PORTS:
            raise refusals.wrong_port(request, "it belongs to parameters and buffers.")
        if self.walked is None:
            self.walked = {id(step[1]): step for step in walk(self.model)}
        self._add_modules(request, _matching(self.walked, where))
        if not request.modules:
            raise refusals.not_in_model(request, [module for _, module in self.walked.values()])
        return request


def _matching(walked: dict[int, NamedModule], where: Any) -> list[NamedModule]:
    """Return the modules that a module, a type, a regular expression or a predicate matches."""
    if isinstance(where, nn.Module):
        return [walked[id(where)]] if id(where) in walked else []
    steps = walked.values()
    if isinstance(where, re.Pattern):
        return [step for step in steps if step[0] and where.search(step[0])]
    if isinstance(where, type):
        return [step for step in steps if isinstance(step[1], where)]
    return [step for step in steps if where(*step)]


def _is_pair(where: Any) -> bool:
    """Return True for a pair of places and a port."""
    if not isinstance(where, tuple) or len(where) != 2:
        return False
    return isinstance(where[1], str) and where[1][:1] in (":", "[")


def _of_tensor(tensor: Any, wheres: Iterable[Any]) -> list[Request]:
    """Resolve what is asked of a plain tensor; raise TypeError for any other object."""
    requests: list[Request] = []
    for where in wheres:
        if not isinstance(tensor, Tensor):
            raise refusals.not_a_model(tensor)
        if _is_pair(where):
            parse_port(where[1])
            requests += _of_tensor(tensor, where[:1])
        elif isinstance(where, (list, tuple)):
            requests += _of_tensor(tensor, where)
        elif where != ":grad":
            raise refusals.not_the_gradient(where)
        else:
            request = Request(":grad", True, "grad", ())
            request.single_targets.append(Target.of_tensor(tensor))
            requests.append(request)
    return requests
