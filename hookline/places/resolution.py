"""Every value inside a model has an address, its place.

- `resolve(model, wheres)`: what was asked for, as requests with their targets
"""

# What is asked for may be of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from torch import Tensor, jit, nn

from hookline.errors import HooklineError, NotHookable, PlaceError, PlaceNotFound
from hookline.places.grammar import (
    ANY,
    DEEP,
    MODULE_PORTS,
    TENSOR_PORTS,
    Pattern,
    escape,
    literal_readings,
    parse,
    parse_port,
    plain,
)
from hookline.places.targets import Place, Request, Target
from hookline.places.tree import Step, exists, find, find_tensors, join, tensors_of, unwrapped, walk
from hookline.torch_private import buffers_of, is_export_guard, parameters_of, submodules_of
from hookline.values.nested import Path

__all__ = ["Place", "Request", "Target", "Where", "resolve"]

_LIST = "List what there is with hookline.select(model, '**', '**:value')."
_ITSELF = "Name the model as '', a port of it as ':input', a parameter or buffer as 'weight'."
Predicate = Callable[[str, nn.Module], bool]
Where: TypeAlias = str | nn.Module | type[nn.Module] | re.Pattern[str] | Predicate | Iterable[Any]


def resolve(
    model: Any, wheres: Iterable[Where], hookable: bool = True, wild: bool = False
) -> list[Request]:
    """What was asked for, as targets; an error in three parts for what is not there.

    With `hookable=False` also modules at which no hook can fire, such as containers; with `wild`
    also wildcards for operations.
    """
    query = None
    requests: list[Request] = []
    for where in wheres:
        plainly = hookable and type(where) is str
        request = _quickly(model, cast(str, where)) if plainly else None
        if request is not None:
            requests.append(request)
            continue
        query = query or _Query(model, hookable, wild, requests)
        query.add(where)
    return requests


def _quickly(model: Any, text: str) -> Request | None:
    """A request in one of the commonest forms; None if there is more to look at."""
    form = plain(text)
    if form is None or not isinstance(model, nn.Module):
        return None
    owner: Any = model
    for name in form.above:
        if name not in submodules_of(owner) or submodules_of(owner)[name] is None:
            return None
        owner = submodules_of(owner)[name]
    if isinstance(owner, jit.ScriptModule):
        return None
    for name in form.taken:
        if (
            name in submodules_of(owner)
            or name in parameters_of(owner)
            or name in buffers_of(owner)
        ):
            return None
        if len(submodules_of(owner)) == 1 and exists(model, (*form.above, name)):
            return None  # in what it wraps, whose name may be left out
    request = Request(form.asked, form.literal, form.port, ())
    modules, fine = request.modules, _fine
    last: Any = form.last
    if last is DEEP:
        steps = find(model, (*form.above, DEEP))
        modules += [step for step in steps if type(step[1]) in fine]
        for _, module in steps if len(modules) < len(steps) else ():
            kind = type(module)
            if kind not in fine and (kind not in _CONTAINERS or "forward" in module.__dict__):
                return None
    elif last is ANY:
        found = submodules_of(owner)
        if len(found) < 2 or len(set(found.values())) < len(found):
            return None  # a wrapper, whose name may be left out, or one module with two names
        prefix = form.prefix
        for name, module in found.items():
            if type(module) not in fine:
                return None
            modules.append((prefix + name, module))
    else:
        module: Any = owner if last is None else submodules_of(owner).get(last)
        wrapper = last is None and len(submodules_of(owner)) == 1
        if type(module) not in fine or wrapper:
            return None
        modules.append(("" if last is None else form.prefix + last, module))
    return request if modules else None


class _Query:
    """What is asked of a model, and what was found so far."""

    def __init__(self, model: Any, hookable: bool, wild: bool, requests: list[Request]) -> None:
        if not isinstance(model, (nn.Module, Tensor)):
            raise TypeError(
                f"Places of a {type(model).__name__} were asked for. A model is a torch.nn.Module. "
                f"Give it first, then the places."
            )
        self.model: Any = model
        self.hookable, self.wild, self.requests = hookable, wild, requests
        self.walked: dict[int, Step] = {}  # all modules by id, once they were needed

    def add(self, where: Any, port: str | None = None, parts: Path = ()) -> None:
        """Resolve one more thing that was asked for."""
        if isinstance(self.model, Tensor) and not isinstance(where, (list, tuple)):
            self.requests.append(_of_tensor(self.model, where))
        elif isinstance(where, str):
            self.requests.append(self._of_text(where, port, parts))
        elif callable(where) or isinstance(where, re.Pattern):
            self.requests.append(self._of_modules(where, port, parts))
        elif isinstance(where, tuple) and _is_pair(where):
            self.add(where[0], *parse_port(where[1]))
        elif isinstance(where, Iterable) and not isinstance(where, (Tensor, bytes)):
            for item in where:
                self.add(item, port, parts)
        else:
            raise PlaceError(
                f"{'A tensor' if isinstance(where, Tensor) else repr(where)} is no place:",
                f"it is of type {type(where).__name__}.",
                "Give a string, a module, a type, a re.Pattern, a predicate (name, module) -> "
                "bool, a pair of one of them and a port, or a list of them; for a parameter, its "
                "path.",
            )

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
            raise _wrong_port(request, f"it was given in a pair with {port!r}.")
        if pattern.operation is not None:
            nth = "" if pattern.nth is None else f"#{pattern.nth}"
            request.operation = pattern.operation + nth
            if request.port in TENSOR_PORTS:
                raise _wrong_port(request, "it belongs to parameters and buffers.")
            if not self.wild and ("*" in request.operation or "{" in request.operation):
                asked = f"The place {text!r} holds a wildcard for operations:"
                found = "which ones there are is known when the model has run."
                remedy = (
                    "List them with hookline.select(model, place, inputs=batch), and name some."
                )
                raise PlaceError(asked, found, remedy)
        for path in pattern.paths:
            if not path and (pattern.operation or "input" in (request.port or "")):
                self._add_modules(request, [unwrapped("", self.model)])
            elif pattern.operation is None:
                self._add_path(request, path)
            else:
                steps = [unwrapped(*step) for step in find(self.model, path)]
                self._add_modules(request, {step[1]: step for step in steps}.values())
        if not (request.modules or request.tensors):
            raise self._not_found(request, text, pattern.paths[0])
        return request

    def _add_path(self, request: Request, path: tuple[Any, ...]) -> None:
        """Add the modules at a path, and if the port or the last name can mean them, tensors."""
        port = request.port
        if port not in TENSOR_PORTS:
            self._add_modules(request, find(self.model, path))
            named = path and isinstance(path[-1], str)
            if not named or (request.modules and (port or request.literal)):
                return
        for start, module, name in find_tensors(self.model, path, port == "grad"):
            if port and port not in TENSOR_PORTS:
                raise _wrong_port(request, f"{name!r} is a parameter or buffer.")
            if request.parts:
                asked = f"The place {request.asked} names a part of {name!r}:"
                found = "it is one tensor, and a part never indexes a tensor."
                raise PlaceError(asked, found, "Leave out the part; a slice is given with at=.")
            request.tensors.append(Target(module, start, port or "value", request.parts, name))

    def _add_modules(self, request: Request, steps: Iterable[Step]) -> None:
        modules = request.modules
        for step in steps:
            path, module = step
            problem = None if type(module) in _fine or not self.hookable else _problem(path, module)
            if problem is None:
                modules.append(step)
            elif request.literal:
                raise NotHookable(f"A hook at {request.asked} was asked for:", *problem)
            elif isinstance(module, jit.ScriptModule) or problem[1] == _EXPORTED:
                place = Place(path, request.port or "output", request.parts)
                request.refused[place] = problem[0]

    def _not_found(self, request: Request, text: str, names: tuple[Any, ...]) -> PlaceNotFound:
        found = next((f"{str(place)!r}: {why}" for place, why in request.refused.items()), "")
        *above, name = names or ("",)
        for _, owner in find(self.model, above) if request.literal else ():
            if nn.utils.parametrize.is_parametrized(owner, name):
                ((full, module),) = find(self.model, (*above, "parametrizations", name))
                originals = [f"'{full}.{n}'" for n, _ in tensors_of(module)]
                found = f"{name!r} is parametrised: it is computed at each use."
                remedy = f"Name {full!r}, or {' and '.join(originals)} for its parameters."
                return _nothing(request, found, remedy)
            if callable(getattr(type(owner), name, None)):  # a quantised module packs its weight
                call = f"hookline.get_module(model, {'.'.join(above)!r}).{name}()"
                return _nothing(request, f"{name!r} is a method there.", f"Call {call}.")
            there: Any = getattr(owner, name, 0)
            if isinstance(there, Tensor):  # of weight_norm, spectral_norm or pruning, say
                found = f"{name!r} is there as a plain tensor, perhaps computed at each call. "
                found += _closest(self.model, text, names)
            elif there is None:
                found = f"{name!r} is there, but it is None."
        for path, module in find(self.model, names)[:1] if request.port in TENSOR_PORTS else ():
            within = f"it holds '{join(escape(path), '**')}:{request.port}'."
            held = any([*tensors_of(inner)] for _, inner in walk(module))
            found = f"{path!r} is a module; {within if held else 'it holds none.'}"
            return _nothing(request, found, "A module itself has :grad_output and :grad_input.")
        remedy = _LIST if submodules_of(self.model) else _ITSELF
        return _nothing(request, found or _closest(self.model, text, names), remedy)

    # -- modules --------------------------------------------------------------------------------

    def _of_modules(self, where: Any, port: str | None, parts: Path) -> Request:
        """A module, a module type, a regular expression or a predicate."""
        literal = isinstance(where, nn.Module)
        shown = f"the given {type(where).__name__}" if literal else getattr(where, "__name__", None)
        request = Request(shown or repr(getattr(where, "pattern", where)), literal, port, parts)
        if port in TENSOR_PORTS:
            raise _wrong_port(request, "it belongs to parameters and buffers.")
        if not self.walked:
            self.walked = {id(step[1]): step for step in walk(self.model)}
        steps: Iterable[Step] = self.walked.values()
        if literal:
            steps = [self.walked[id(where)]] if id(where) in self.walked else []
        elif isinstance(where, re.Pattern):
            steps = [step for step in steps if step[0] and where.search(step[0])]
        elif isinstance(where, type):
            steps = [step for step in steps if isinstance(step[1], where)]
        else:
            steps = [step for step in steps if where(*step)]
        self._add_modules(request, steps)
        if not request.modules:
            kinds = ", ".join(sorted({type(module).__name__ for _, module in self.walked.values()}))
            found = f"The model has {kinds}; what is in a plain list or dict is not registered."
            raise _nothing(request, found)
        return request


def _is_pair(where: tuple[Any, ...]) -> bool:
    return len(where) == 2 and isinstance(where[1], str) and where[1][:1] in (":", "[")


_ALONE = "none; the model itself is ''"
_EXPORTED = "Use torch.export.unflatten(exported_program), or the model before the export."
_CONTAINERS = {nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}
_fine: set[type[nn.Module]] = set()  # types at whose modules hooks can fire, as far as seen


def _problem(path: str, module: nn.Module) -> tuple[str, str] | None:
    """Why no hook on a module can ever fire, and what to do; None if one can."""
    kind = type(module)
    if isinstance(module, jit.ScriptModule):
        reason = "it is a ScriptModule, which runs outside Python and takes no hooks."
        return reason, "Use the model before torch.jit.script or torch.jit.trace."
    guards = is_export_guard(kind)
    if kind.forward is not nn.Module.forward and not guards:
        _fine.add(kind)
    if kind in _fine or ("forward" in module.__dict__ and not guards):
        return None  # a forward given to the instance is called, too
    if guards or (kind is nn.Module and all(type(m) is nn.Module for m in module.modules())):
        reason = "it is a bare Module, as an exported program has: its graph calls operations only."
        return reason, _EXPORTED
    reason = f"it is a {kind.__name__}, which has no forward of its own: nothing passes through."
    children = join(escape(path), "*" if submodules_of(module) else "*:value")
    return reason, f"Name its children, as in {children!r}, or give one of them as the model."


def _of_tensor(tensor: Tensor, where: Any) -> Request:
    if where != ":grad":
        raise PlaceError(f"{where!r} was asked for:", "a tensor has one place.", "Write ':grad'.")
    request, owner = Request("':grad'", True, "grad", ()), nn.Module()
    buffers_of(owner)[""] = tensor
    request.tensors.append(Target(owner, "", "grad", (), ""))
    return request


# -- errors ---------------------------------------------------------------------------------------


def _nothing(request: Request, found: str, remedy: str = _LIST) -> PlaceNotFound:
    what = "No parameter or buffer" if request.port in TENSOR_PORTS else "Nothing"
    return PlaceNotFound(f"{what} matches {request.asked}.", found, remedy)


def _wrong_port(request: Request, found: str) -> PlaceError:
    asked = f"The place {request.asked} asks for the port {request.port!r}:"
    remedy = "Give one: modules have such as fc:input, parameters fc.weight:value and :grad."
    return PlaceError(asked, found, remedy)


def _closest(model: nn.Module, text: str, names: tuple[Any, ...]) -> str:
    paths = [escape(join(p, name)) for p, m in walk(model) for name in ("", *dict(tensors_of(m)))]
    sought = re.split(r"[:\[]", text)[0]
    above, _, port = sought.rpartition(".")  # `h.0.output`, and paths that begin further down
    close = [f"{above}:{port}"] if above in paths and port in MODULE_PORTS + TENSOR_PORTS else []
    close += [path for path in paths if path.endswith("." + sought)]
    below = [] if close or not names else find(model, (DEEP, *names))
    close += [f"**.{text}"] if any(_problem(*step) is None for step in below) else []
    close += difflib.get_close_matches(sought, paths, n=3, cutoff=0.5)
    own = map(escape, submodules_of(model).keys())  # that of a ScriptModule cannot be gone through
    shown = [repr(path) for path in [*dict.fromkeys(close)][:3] or own]
    return f"{'Closest' if close else 'Its own children'}: {', '.join(shown[:8] or [_ALONE])}."


def _ambiguous(text: str, literal: Target, pattern: Target) -> PlaceError:
    # Braces around the path keep the grammar's reading, and are in no name.
    path, rest = re.findall(r"(?s)([^/:\[\]#]*)(.*)", text)[0]
    other = repr("{" + path + "}" + rest) if path else f"(model, {text!r})"
    asked, name = f"The place {text!r} has two readings:", literal.named(literal.path)
    found = f"the module named {name!r}, and {pattern.place!r} by the grammar."
    remedy = f"Write {str(literal.place)!r} for the first, or {other} for the second."
    return PlaceError(asked, found, remedy)
