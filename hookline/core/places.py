"""Every value inside a model has an address, its place.

- `Place`: the address of a value, a string with its pieces as attributes
- `select(model, *where)`: the places that match, in model order
- `Target`: a place found in a model, with the module that it belongs to
- `resolve(model, wheres)`: what was asked for, as targets

A little long, for its errors: they say what is close, and why something cannot be had.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hookline.core.grammar import (
    MODULE_PORTS,
    TENSOR_PORTS,
    Pattern,
    Segment,
    escape,
    literal_readings,
    parse,
    parse_port,
)
from hookline.core.nested import Path, show_path
from hookline.core.tree import all_names, child_of, find, find_tensors, tensors_of, walk
from hookline.errors import NotHookable, PlaceError, PlaceNotFound

__all__ = ["Place", "Request", "Target", "Where", "resolve", "select"]

Where: TypeAlias = (
    str
    | nn.Module
    | type[nn.Module]
    | re.Pattern[str]
    | Callable[[str, nn.Module], bool]
    | tuple[Any, str]
    | Iterable[Any]
)


class Place(str):
    """The address of a value: a string in its canonical spelling, with its pieces as attributes.

    >>> place = Place("lstm", "output", (1, 0))
    >>> place == "lstm[1][0]", place.path, place.port, place.parts
    (True, 'lstm', 'output', (1, 0))
    """

    __slots__ = ("parts", "path", "port")
    path: str
    port: str
    parts: Path

    def __new__(cls, path: str, port: str = "output", parts: Path = ()) -> Place:
        shown = "" if port in ("output", "value") else f":{port}"
        self = super().__new__(cls, escape(path) + shown + show_path(parts))
        self.path, self.port, self.parts = path, port, parts
        return self

    def __getnewargs__(self) -> tuple[str, str, Path]:  # pyright: ignore
        return self.path, self.port, self.parts


class Target:
    """A place found in a model. `attribute` is set for a parameter or buffer of `module`."""

    __slots__ = ("attribute", "ident", "key", "module", "parts", "path", "port")

    def __init__(
        self,
        module: nn.Module,
        path: str,
        port: str = "output",
        parts: Path = (),
        attribute: str | None = None,
    ) -> None:
        self.module = module
        self.path = path
        self.port = port
        self.parts = parts
        self.attribute = attribute
        self.ident = id(module)
        # The same for two targets at the same place of the same module, or of the same tensor.
        shared = id(module if attribute is None else self.tensor())
        self.key = (shared, attribute is None, port, parts)

    def meets(self, other: Target) -> bool:
        """Whether two targets are at the same port of the same module."""
        return self.ident == other.ident and self.port == other.port

    @property
    def place(self) -> Place:
        return Place(self.named(self.path), self.port, self.parts)

    def named(self, path: str) -> str:
        """The path of the module, or of the tensor in it, if the module's path is `path`."""
        if not self.attribute:  # a module, or a plain tensor
            return path
        return f"{path}.{self.attribute}" if path else self.attribute

    def tensor(self) -> Tensor | None:
        """The parameter or buffer at this target, as it is now."""
        return getattr(self.module, cast(str, self.attribute), None)


@dataclass(slots=True)
class Request:
    """One thing that was asked for: literal places must all fire, of others one must."""

    asked: str
    literal: bool
    targets: list[Target] = field(default_factory=list[Target])
    refused: dict[Place, str] = field(default_factory=dict[Place, str])


def select(model: nn.Module | Tensor, *where: Where) -> list[Place]:
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
    """
    if isinstance(model, Tensor):
        return [target.place for request in resolve(model, where) for target in request.targets]
    names = {id(module): (n, path) for n, (path, module) in enumerate(walk(model))}
    found: dict[Place, int] = {}
    for request in resolve(model, where or ("**",)):
        for target in request.targets:
            order, path = names[id(target.module)]
            found.setdefault(Place(target.named(path), target.port, target.parts), order)
    return sorted(found, key=found.__getitem__)


def resolve(
    model: nn.Module | Tensor, wheres: Iterable[Where], hookable: bool = True
) -> list[Request]:
    """What was asked for, as targets; an error in three parts for what is not there.

    With `hookable=False` also modules at which no hook can fire, such as containers.
    """
    requests: list[Request] = []
    paths: dict[int, str] = {}
    for where in wheres:
        if isinstance(model, Tensor):
            places = cast("list[Any]", where) if isinstance(where, (list, tuple)) else [where]
            requests += [_of_tensor(model, place) for place in places]
        else:
            _resolve(_Query(model, hookable, paths), where, None, (), requests)
    return requests


@dataclass(slots=True)
class _Query:
    """Of which model something is asked, and how."""

    model: nn.Module
    hookable: bool
    paths: dict[int, str]  # of all modules, once they were needed

    def problem(self, module: nn.Module) -> tuple[str, str] | None:
        return _problem(module) if self.hookable else None

    def path_of(self, module: nn.Module) -> str | None:
        if not self.paths:
            self.paths.update({id(other): path for path, other in walk(self.model)})
        return self.paths.get(id(module))


def _resolve(
    query: _Query, where: Any, port: str | None, parts: Path, requests: list[Request]
) -> None:
    if isinstance(where, str):
        requests.append(_of_text(query, where, port, parts))
    elif isinstance(where, nn.Module):
        requests.append(_of_module(query, where, port, parts))
    elif isinstance(where, (type, re.Pattern)) or callable(where):
        requests.append(_of_predicate(query, where, port, parts))
    elif isinstance(where, tuple) and _is_pair(cast("tuple[Any, ...]", where)):
        inner, spelled = cast("tuple[Any, str]", where)
        _resolve(query, inner, *parse_port(spelled), requests)
    elif isinstance(where, Iterable):
        for item in cast("Iterable[Any]", where):
            _resolve(query, item, port, parts, requests)
    else:
        raise PlaceError(
            f"{where!r} is no place:",
            f"it is of type {type(where).__name__}.",
            "Give a string, a module, a module type, a re.Pattern, a predicate (name, module) -> "
            "bool, a pair of one of them and a port, or a list of them.",
        )


def _is_pair(where: tuple[Any, ...]) -> bool:
    return len(where) == 2 and isinstance(where[1], str) and where[1][:1] in (":", "[")


def _describe(where: Any, port: str | None, parts: Path) -> str:
    if isinstance(where, nn.Module):
        shown = f"the module {type(where).__name__}"
    elif isinstance(where, type):
        shown = where.__name__
    else:
        shown = repr(cast(Any, where).pattern) if isinstance(where, re.Pattern) else repr(where)
    return shown if port is None and not parts else f"({shown}, ':{port}{show_path(parts)}')"


# -- text ---------------------------------------------------------------------------------------


def _of_text(query: _Query, text: str, port: str | None, parts: Path) -> Request:
    literal = None
    for pattern in () if isinstance(text, Place) else literal_readings(text):
        if _exists(query.model, pattern.segments):
            literal = Request(repr(text), True)
            literal.targets = _matches(query, text, pattern, port, parts, literal)
            break
    try:
        patterns = parse(text)
    except PlaceError:
        if literal is None:
            raise
        return literal
    request = Request(repr(text), patterns[0].literal)
    missing: PlaceNotFound | None = None
    for pattern in patterns:
        try:
            request.targets += _matches(query, text, pattern, port, parts, request)
        except PlaceNotFound as error:
            missing = missing or error
        except NotHookable:
            if literal is None:
                raise
    if literal is not None:
        if request.targets and {t.key for t in literal.targets} != {t.key for t in request.targets}:
            raise _ambiguous(text, literal.targets[0], request.targets[0])
        return literal
    if request.targets:
        return request
    raise missing or PlaceNotFound(
        f"Nothing matches {text!r}:",
        next(iter(request.refused.values()), _closest(query.model, text)),
        "List the modules with hookline.select(model, '**').",
    )


def _exists(model: nn.Module, segments: tuple[Segment, ...]) -> bool:
    """Whether a plain path is that of a module, parameter or buffer."""
    for _, owner in find(model, segments[:-1]):
        name = cast(str, segments[-1])
        if (
            child_of(owner, "", name) is not None
            or name in owner._parameters
            or name in owner._buffers
        ):
            return True
    return False


def _matches(
    query: _Query, text: str, pattern: Pattern, port: str | None, parts: Path, request: Request
) -> list[Target]:
    model = query.model
    segments, literal = pattern.segments, pattern.literal
    if pattern.operation is not None:
        if not find(model, segments):
            return []
        raise NotHookable(
            f"The place {text!r} asks for the operation {pattern.operation!r}:",
            "operations inside a forward are not available yet.",
            "Ask for the module's input or output, "
            f"or write {escape(text)!r} if that is the name of a module.",
        )
    if pattern.port and port:
        raise PlaceError(
            f"The place {text!r} was given in a pair with the port {port!r}.",
            f"It has the port {pattern.port!r} already.",
            "Give one of them.",
        )
    port, parts = pattern.port or port, (*pattern.parts, *parts)
    found: list[Target] = []
    if port not in TENSOR_PORTS:
        own = port or "output"
        for path, module in find(model, segments):
            if type(module) in _hookable and _hookable[type(module)]:
                found.append(Target(module, path, own, parts))
                continue
            problem = query.problem(module)
            if problem is None:
                found.append(Target(module, path, own, parts))
            elif literal:
                raise NotHookable(f"The place {text!r} cannot be hooked:", *problem)
            elif isinstance(module, torch.jit.ScriptModule) or problem[1] == _EXPORTED:
                request.refused[Place(path, own, parts)] = problem[0]
    named = bool(segments) and isinstance(segments[-1], str) and not (literal and found)
    if port in TENSOR_PORTS or (named and (port is None or not found)):
        for path, module, name in find_tensors(model, segments, port == "grad"):
            if port in MODULE_PORTS:
                raise PlaceError(
                    f"The place {text!r} asks for the port {port!r}:",
                    f"{name!r} is a parameter or buffer.",
                    f"It has the ports {' and '.join(TENSOR_PORTS)}.",
                )
            found.append(Target(module, path, port or "value", parts, name))
    if not found and literal:
        raise _not_found(model, text, cast("tuple[str, ...]", segments), port)
    return found


# -- modules, types, expressions, predicates -----------------------------------------------------


def _of_module(query: _Query, module: nn.Module, port: str | None, parts: Path) -> Request:
    path = "" if module is query.model else query.path_of(module)
    if path is None:
        raise PlaceNotFound(
            f"The given {type(module).__name__} is not a part of the model.",
            "It is none of the modules that model.named_modules() lists (a module in a plain list "
            "or dict is not registered).",
            "Give a module of this model, or put it into an nn.ModuleList or nn.ModuleDict.",
        )
    problem = query.problem(module)
    if problem is not None:
        raise NotHookable(f"The module {path!r} cannot be hooked:", *problem)
    target = Target(module, path, _module_port(path, port), parts)
    return Request(_describe(module, port, parts), True, [target])


def _of_predicate(query: _Query, where: Any, port: str | None, parts: Path) -> Request:
    model = query.model
    if isinstance(where, type):
        if not issubclass(where, nn.Module):
            raise PlaceError(
                f"{where.__name__} is no place:",
                "it is a type, but not of modules.",
                "Give a subclass of torch.nn.Module, such as nn.Conv2d.",
            )
        kind = where

        def matches(path: str, module: nn.Module) -> bool:
            return isinstance(module, kind)
    elif isinstance(where, re.Pattern):
        expression = cast("re.Pattern[str]", where)

        def matches(path: str, module: nn.Module) -> bool:
            return bool(path) and expression.search(path) is not None
    else:

        def matches(path: str, module: nn.Module) -> bool:
            return bool(where(path, module))

    request = Request(_describe(where, port, parts), False)
    for path, module in walk(model):
        if matches(path, module) and query.problem(module) is None:
            request.targets.append(Target(module, path, _module_port(path, port), parts))
    if not request.targets:
        kinds = sorted({type(module).__name__ for _, module in walk(model)})
        raise PlaceNotFound(
            f"No module with a forward of its own matches {request.asked}.",
            f"The model has modules of the types {', '.join(kinds)}.",
            "List them with hookline.select(model, '**').",
        )
    return request


def _module_port(path: str, port: str | None) -> str:
    if port in TENSOR_PORTS:
        raise PlaceError(
            f"The port {port!r} was asked for at the module {path!r}:",
            "it belongs to parameters and buffers.",
            f"Name one, as in '**.weight:{port}'; a module has {', '.join(MODULE_PORTS)}.",
        )
    return port or "output"


_hookable: dict[type, bool] = {}
_EXPORTED = "Use torch.export.unflatten(exported_program), or the model before the export."


def _problem(module: nn.Module) -> tuple[str, str] | None:
    """Why no hook on a module can ever fire, and what to do; None if one can."""
    kind = type(module)
    if kind not in _hookable:
        script = issubclass(kind, torch.jit.ScriptModule)
        guards = f"{kind.__module__}.{kind.__name__}" == "torch.export._unlift.GuardsFn"
        _hookable[kind] = not (script or guards or kind.forward is nn.Module.forward)
    if _hookable[kind]:
        return None
    if issubclass(kind, torch.jit.ScriptModule):
        return (
            "it is a ScriptModule, which runs outside Python and takes no hooks.",
            "Use the model before torch.jit.script or torch.jit.trace.",
        )
    guards = kind.forward is not nn.Module.forward
    if "forward" in module.__dict__ and not guards:
        return None  # a forward given to the instance is called all the same
    if guards or (kind is nn.Module and all(_problem(child) for child in module.children())):
        return (
            "it is a bare Module, as an exported program has: its graph calls operations only.",
            _EXPORTED,
        )
    return (
        f"it is a {kind.__name__}, which has no forward of its own: nothing passes through it.",
        "Name its children, as in 'layers.*'.",
    )


# -- plain tensors --------------------------------------------------------------------------------


class Lone(nn.Module):
    """Stands in for the model where a plain tensor was given."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._buffers[""] = tensor


def _of_tensor(tensor: Tensor, where: Any) -> Request:
    if where != ":grad":
        raise PlaceError(
            f"{where!r} was asked of a plain tensor:",
            "a tensor has one place.",
            "Write ':grad' for its gradient.",
        )
    return Request("':grad'", True, [Target(Lone(tensor), "", "grad", (), "")])


# -- errors ---------------------------------------------------------------------------------------


def _closest(model: nn.Module, text: str) -> str:
    path = re.split(r"[:\[]", text)[0]
    close = difflib.get_close_matches(path, all_names(model), n=3, cutoff=0.5)
    if close:
        return f"Closest: {', '.join(repr(escape(name)) for name in close)}."
    top = [escape(name) for name in model._modules][:8]
    return f"The model's own children: {', '.join(map(repr, top)) or 'none'}."


def _not_found(
    model: nn.Module, text: str, segments: tuple[str, ...], port: str | None
) -> PlaceNotFound:
    wanted = "parameter or buffer" if port in TENSOR_PORTS else "module, parameter or buffer"
    asked = f"No {wanted} matches {text!r}."
    remedy = "List the modules with hookline.select(model, '**')."
    if port in TENSOR_PORTS:
        remedy = f"List them with hookline.select(model, '**:{port}')."
    owners = list(find(model, segments[:-1])) if segments else []
    if owners:
        (path, owner), name = owners[0], segments[-1]
        modules: dict[str, Any] = dict(owner._modules.items())
        parametrizations = modules.get("parametrizations") or dict[str, Any]()
        if name in parametrizations:
            full = ".".join(filter(None, (path, "parametrizations", name)))
            originals = [f"'{full}.{n}'" for n in parametrizations[name]._parameters]
            return PlaceNotFound(
                asked,
                f"{name!r} is parametrised: it is computed at each use.",
                f"Name {full!r} for its value, or {' and '.join(originals)} for its parameters.",
            )
        if callable(getattr(type(owner), name, None)):  # a quantised module packs its weight
            call = f"hookline.get_module(model, {path!r}).{name}()"
            return PlaceNotFound(asked, f"{name!r} is a method there.", f"Call {call}.")
        if name in (*modules, *dict(tensors_of(owner))):
            return PlaceNotFound(asked, f"{name!r} is registered there, but it is None.", remedy)
    return PlaceNotFound(asked, _closest(model, text), remedy)


def _ambiguous(text: str, literal: Target, pattern: Target) -> PlaceError:
    # Braces around the path keep the grammar's reading, and are in no name.
    path = re.match(r"[^/:\[\]#]*", text)
    size = len(path[0]) if path else 0
    other = repr("{" + text[:size] + "}" + text[size:]) if size else f"(model, {text!r})"
    return PlaceError(
        f"The place {text!r} has two readings:",
        f"the module named {literal.named(literal.path)!r}, and {pattern.place!r} by the grammar.",
        f"Write {str(literal.place)!r} for the first, or {other} for the second.",
    )
