"""Every value inside a model has an address, its place.

- `Place`: the address of a value, a string with its pieces as attributes
- `select(model, *where)`: the places that match, in model order
- `Target`: a place found in a model, with the module that it belongs to
- `resolve(model, wheres)`: what was asked for, as targets
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias, cast

from torch import Tensor, jit, nn
from torch.nn.utils import parametrize

from hookline.core.grammar import TENSOR_PORTS, Pattern, escape, literal_readings, parse, parse_port
from hookline.core.nested import Path, show_path
from hookline.core.tree import Step, exists, find, find_tensors, join, tensors_of, walk
from hookline.errors import HooklineError, NotHookable, PlaceError, PlaceNotFound

__all__ = ["Place", "Request", "Target", "Where", "resolve", "select"]

_WILD = re.compile(r"[*{]")
Predicate = Callable[[str, nn.Module], bool]
Where: TypeAlias = str | nn.Module | type[nn.Module] | re.Pattern[str] | Predicate | Iterable[Any]


class Place(str):
    """The address of a value: a string in its canonical spelling, with its pieces as attributes.

    >>> place = Place("lstm", "output", (1, 0))
    >>> place == "lstm[1][0]", place.path, place.port, place.parts
    (True, 'lstm', 'output', (1, 0))
    """

    __slots__ = ("operation", "parts", "path", "port")
    path: str
    port: str
    parts: Path
    operation: str | None  # such as "softmax" or "matmul#1"

    def __new__(
        cls, path: str, port: str = "output", parts: Path = (), operation: str | None = None
    ) -> Place:
        within = "" if operation is None else f"/{operation}"
        shown = "" if port in ("output", "value") else f":{port}"
        self = super().__new__(cls, escape(path) + within + shown + show_path(parts))
        self.path, self.port, self.parts, self.operation = path, port, parts, operation
        return self

    def __getnewargs__(self) -> tuple[str, str, Path, str | None]:  # pyright: ignore
        return self.path, self.port, self.parts, self.operation


class Target:
    """A place found in a model. `attribute` is set for a parameter or buffer of `module`."""

    __slots__ = ("attribute", "ident", "key", "module", "operation", "parts", "path", "port")

    def __init__(
        self,
        module: nn.Module,
        path: str,
        port: str = "output",
        parts: Path = (),
        attribute: str | None = None,
        operation: str | None = None,
    ) -> None:
        self.module, self.path, self.attribute = module, path, attribute
        self.port, self.parts, self.operation = port, parts, operation
        self.ident = shared = id(module)
        if attribute is not None:
            shared = id(self.tensor())
        # The same for two targets at the same place of the same module, or of the same tensor.
        self.key = (shared, operation or attribute is None, port, parts)

    def meets(self, other: Target) -> bool:
        """Whether two targets are at the same port of the same module."""
        return self.key[:3] == other.key[:3]

    @property
    def place(self) -> Place:
        return self.place_at(self.path)

    def place_at(self, path: str) -> Place:
        """The place, if the module's path is `path`."""
        return Place(self.named(path), self.port, self.parts, self.operation)

    def named(self, path: str) -> str:
        """The path of the module, or of the tensor in it, if the module's path is `path`."""
        return join(path, self.attribute or "")

    def tensor(self) -> Tensor | None:
        """The parameter or buffer at this target, as it is now."""
        return getattr(self.module, cast(str, self.attribute), None)


class Request:
    """One thing that was asked for: literal places must all fire, of others one must."""

    __slots__ = ("asked", "literal", "operation", "parts", "port", "refused", "targets")
    operation: str | None

    def __init__(self, asked: str, literal: bool, port: str | None, parts: Path) -> None:
        self.asked, self.literal = asked, literal
        self.port, self.parts = port, parts  # no port: output, or value
        self.operation = None
        self.targets: list[Target] = []
        self.refused: dict[Place, str] = {}  # what a wildcard matches and cannot be hooked, and why


def select(model: nn.Module | Tensor, *where: Where, inputs: Any = None) -> list[Place]:
    """The places of a model that match, each once, in model order. Without `where`: all modules.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> select(model, nn.Linear)
    ['0', '2']
    >>> select(model, "{0,2}:grad_output", "**.bias")
    ['0:grad_output', '0.bias', '2:grad_output', '2.bias']

    Args:
        model: any module.
        where: places, modules, module types, regular expressions (searched in the path),
            predicates `(name, module) -> bool`, pairs of any of them and a port such as
            `(nn.Conv2d, ":grad_output")`, and lists of any of them.
        inputs: a batch (a tensor, a tuple of arguments, or a dict of them by name). With it,
            operations inside forwards are listed, too, as in `"h.0.attn/*"`: the model runs once,
            without gradients, and what comes back shows shapes, dtypes and the source line.
    """
    if inputs is not None and isinstance(model, nn.Module):
        from hookline.core import operations

        return operations.survey(model, where, inputs)
    targets = [t for request in resolve(model, where or ("**",)) for t in request.targets]
    if isinstance(model, Tensor):
        return [target.place for target in targets]
    names = {id(module): (n, path) for n, (path, module) in enumerate(walk(model))}
    targets.sort(key=lambda target: names[target.ident])
    places = [t.place_at(names[t.ident][1]) for t in targets]
    return list(dict.fromkeys(places))


def resolve(
    model: nn.Module | Tensor,
    wheres: Iterable[Where],
    hookable: bool = True,
    operations: bool = False,
) -> list[Request]:
    """What was asked for, as targets; an error in three parts for what is not there.

    With `hookable=False` also modules at which no hook can fire, such as containers; with
    `operations` also wildcards for operations.
    """
    query = _Query(model, hookable, operations)
    for where in wheres:
        query.add(where)
    return query.requests


class _Query:
    """What is asked of a model, and what was found so far."""

    def __init__(self, model: Any, hookable: bool, operations: bool) -> None:
        self.model, self.hookable, self.operations = model, hookable, operations
        self.requests: list[Request] = []
        self.walked: dict[int, Step] = {}  # all modules by id, once they were needed

    def add(self, where: Any, port: str | None = None, parts: Path = ()) -> None:
        """Resolve one more thing that was asked for."""
        if isinstance(self.model, Tensor) and not isinstance(where, (list, tuple)):
            self.requests.append(_of_tensor(self.model, where))
        elif isinstance(where, str):
            self.requests.append(self._of_text(where, port, parts))
        elif callable(where) or isinstance(where, re.Pattern):
            self.requests.append(self._of_modules(where, port, parts))
        elif isinstance(where, tuple) and _is_pair(cast("tuple[Any, ...]", where)):
            self.add(where[0], *parse_port(where[1]))
        elif isinstance(where, Iterable):
            for item in cast("Iterable[Any]", where):
                self.add(item, port, parts)
        else:
            raise _no_place(where, f"of type {type(where).__name__}")

    # -- text -----------------------------------------------------------------------------------

    def _of_text(self, text: str, port: str | None, parts: Path) -> Request:
        literal = None
        for reading in () if isinstance(text, Place) else literal_readings(text):
            if literal is None and exists(self.model, cast("tuple[str, ...]", reading.paths[0])):
                literal = self._of_pattern(text, reading, port, parts)
        try:
            request = self._of_pattern(text, parse(text), port, parts)
        except HooklineError:
            if literal is None:
                raise
            return literal
        if literal and {t.key for t in literal.targets} != {t.key for t in request.targets}:
            raise _ambiguous(text, literal.targets[0], request.targets[0])
        return literal or request

    def _of_pattern(self, text: str, pattern: Pattern, port: str | None, parts: Path) -> Request:
        request = Request(repr(text), pattern.literal, pattern.port or port, pattern.parts + parts)
        if pattern.port and port:
            raise _wrong_port(request, f"it was given with the port {port!r} as well.", "Give one.")
        if pattern.operation is not None:
            nth = "" if pattern.nth is None else f"#{pattern.nth}"
            request.operation = pattern.operation + nth
            self._check_operation(request)
        for path in pattern.paths:
            if pattern.operation is None:
                self._add_path(request, path)
            else:
                self._add_modules(request, find(self.model, path))
        if not request.targets:
            raise self._not_found(request, text, pattern.paths[0])
        return request

    def _check_operation(self, request: Request) -> None:
        if request.port in TENSOR_PORTS:
            found = "it belongs to parameters and buffers."
            raise _wrong_port(request, found, "An operation has the ports of a module.")
        if not self.operations and _WILD.search(cast(str, request.operation)):
            raise PlaceError(
                f"The place {request.asked} holds a wildcard for operations:",
                "which ones there are is known when the model has run.",
                "List them with hookline.select(model, place, inputs=batch), and name some.",
            )

    def _add_path(self, request: Request, path: tuple[Any, ...]) -> None:
        """Add the modules at a path, and if the port or the last name can mean them, tensors."""
        port = request.port
        if port not in TENSOR_PORTS:
            self._add_modules(request, find(self.model, path))
            named = path and isinstance(path[-1], str)
            if not named or (request.targets and (port or request.literal)):
                return
        for start, module, name in find_tensors(self.model, path, port == "grad"):
            if port and port not in TENSOR_PORTS:
                found = f"{name!r} is a parameter or buffer."
                raise _wrong_port(request, found, "It has the ports value and grad.")
            request.targets.append(Target(module, start, port or "value", request.parts, name))

    def _add_modules(self, request: Request, steps: Iterable[Step]) -> None:
        port, parts, targets = request.port or "output", request.parts, request.targets
        for path, module in steps:
            problem = None if _runs(type(module)) or not self.hookable else _problem(module)
            if problem is None:
                targets.append(Target(module, path, port, parts, None, request.operation))
            elif request.literal:
                place = str(Place(path, port, parts))
                raise NotHookable(f"The place {place!r} cannot be hooked:", *problem)
            elif isinstance(module, jit.ScriptModule):
                request.refused[Place(path, port, parts)] = problem[0]

    def _not_found(self, request: Request, text: str, names: tuple[Any, ...]) -> PlaceNotFound:
        what, every = "Nothing", "**"
        if request.port in TENSOR_PORTS:
            what, every = "No parameter or buffer", f"**:{request.port}"
        remedy = f"List what there is with hookline.select(model, {every!r})."
        found = next((f"{str(place)!r}: {why}" for place, why in request.refused.items()), "")
        *above, name = names or ("",)
        for path, owner in find(self.model, above) if request.literal else ():
            if parametrize.is_parametrized(owner, name):
                full = join(join(path, "parametrizations"), name)
                originals = [f"'{full}.{n}'" for n in owner.parametrizations[name]._parameters]
                found = f"{name!r} is parametrised: it is computed at each use."
                remedy = f"Name {full!r}, or {' and '.join(originals)} for its parameters."
            elif name in owner._modules or name in owner._parameters or name in owner._buffers:
                found = f"{name!r} is registered there, but it is None."
        found = found or _closest(self.model, text)
        return PlaceNotFound(f"{what} matches {text!r}.", found, remedy)

    # -- modules --------------------------------------------------------------------------------

    def _of_modules(self, where: Any, port: str | None, parts: Path) -> Request:
        """A module, a module type, a regular expression or a predicate."""
        asked, literal = _describe(where, port, parts), isinstance(where, nn.Module)
        request = Request(asked, literal, port, parts)
        if port in TENSOR_PORTS:
            found = "it belongs to parameters and buffers."
            raise _wrong_port(request, found, f"Name one, as in '**.weight:{port}'.")
        if not self.walked:
            self.walked = {id(module): (path, module) for path, module in walk(self.model)}
        steps: Iterable[Step] = self.walked.values()
        if isinstance(where, nn.Module):
            steps = [self.walked[id(where)]] if id(where) in self.walked else []
        elif isinstance(where, re.Pattern):
            steps = [step for step in steps if step[0] and where.search(step[0])]
        elif not isinstance(where, type):
            steps = [step for step in steps if where(*step)]
        elif issubclass(where, nn.Module):
            steps = [step for step in steps if isinstance(step[1], where)]
        else:
            raise _no_place(where, "a type, but not of modules")
        self._add_modules(request, steps)
        if request.targets:
            return request
        fits = "is the given" if literal else "with a forward of its own matches"
        kinds = sorted({type(module).__name__ for _, module in self.walked.values()})
        raise PlaceNotFound(
            f"No module of the model {fits} {asked}.",
            f"The model has {', '.join(kinds)}; what is in a plain list or dict is not registered.",
            "List them with hookline.select(model, '**').",
        )


def _is_pair(where: tuple[Any, ...]) -> bool:
    return len(where) == 2 and isinstance(where[1], str) and where[1][:1] in (":", "[")


def _describe(where: Any, port: str | None, parts: Path) -> str:
    if isinstance(where, (type, nn.Module)):
        shown = (where if isinstance(where, type) else type(where)).__name__
    else:
        shown = repr(getattr(where, "pattern", where))
    return f"({shown}, {str(Place('', port or 'output', parts))!r})" if port or parts else shown


@lru_cache(maxsize=1024)
def _runs(kind: type[nn.Module]) -> bool:
    """Whether modules of a type have a forward that runs in Python, so that hooks fire."""
    return not issubclass(kind, jit.ScriptModule) and kind.forward is not nn.Module.forward


def _problem(module: nn.Module) -> tuple[str, str] | None:
    """Why no hook on a module can ever fire, and what to do; None if one can."""
    if isinstance(module, jit.ScriptModule):
        reason = "it is a ScriptModule, which runs outside Python and takes no hooks."
        return reason, "Use the model before torch.jit.script or torch.jit.trace."
    if "forward" in module.__dict__:  # a forward given to the instance is called all the same
        return None
    reason = f"it is a {type(module).__name__}, which has no forward of its own: nothing passes it."
    return reason, "Name its children, as in 'layers.*'."


def _of_tensor(tensor: Tensor, where: Any) -> Request:
    if where != ":grad":
        raise PlaceError(f"{where!r} was asked for:", "a tensor has one place.", "Write ':grad'.")
    request, owner = Request("':grad'", True, "grad", ()), nn.Module()
    owner._buffers[""] = tensor
    request.targets.append(Target(owner, "", "grad", (), ""))
    return request


# -- errors ---------------------------------------------------------------------------------------


def _no_place(where: Any, kind: str) -> PlaceError:
    return PlaceError(
        f"{where!r} is no place:",
        f"it is {kind}.",
        "Give a string, a module, a module type such as nn.Conv2d, a re.Pattern, a predicate "
        "(name, module) -> bool, a pair of one of them and a port, or a list of them.",
    )


def _wrong_port(request: Request, found: str, remedy: str) -> PlaceError:
    asked = f"The place {request.asked} asks for the port {request.port!r}:"
    return PlaceError(asked, found, remedy)


def _closest(model: nn.Module, text: str) -> str:
    names = [join(path, name) for path, m in walk(model) for name in ("", *tensors_of(m))]
    close = difflib.get_close_matches(re.split(r"[:\[]", text)[0], names, n=3, cutoff=0.5)
    shown = [repr(escape(name)) for name in close or list(model._modules)[:8]]
    return f"{'Closest' if close else 'Its own children'}: {', '.join(shown) or 'none'}."


def _ambiguous(text: str, literal: Target, pattern: Target) -> PlaceError:
    # Braces around the path keep the grammar's reading, and are in no name.
    path, rest = re.findall(r"(?s)([^/:\[\]#]*)(.*)", text)[0]
    other = repr("{" + path + "}" + rest) if path else f"(model, {text!r})"
    return PlaceError(
        f"The place {text!r} has two readings:",
        f"the module named {literal.named(literal.path)!r}, and {pattern.place!r} by the grammar.",
        f"Write {str(literal.place)!r} for the first, or {other} for the second.",
    )
