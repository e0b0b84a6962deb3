"""Errors for places that cannot be used, each with its reason and a remedy.

- `why_outside_python(module)`: the reason why a scripted or exported module takes no hooks
- `not_a_model`, `not_a_place`, `not_the_gradient`, `not_hookable`, `wrong_port`, `part_of_tensor`,
  `operation_wildcard`, `ambiguous`, `not_found`, `not_in_model`: one error each
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, jit, nn

from hookline.errors import NotHookable, PlaceError, PlaceNotFound
from hookline.places.grammar import DEEP, MODULE_PORTS, TENSOR_PORTS, escape
from hookline.places.targets import Request, Target
from hookline.places.tree import find, join, takes_hooks, tensors_of, walk
from hookline.torch_private import is_export_guard, submodules_of

__all__ = [
    "ambiguous", "not_a_model", "not_a_place", "not_found", "not_hookable",
    "not_in_model", "not_the_gradient", "operation_wildcard", "part_of_tensor",
    "why_outside_python", "wrong_port",
]  # fmt: skip

Names = Sequence[Any]  # the segments of a path; those of a literal path are names
Explained = tuple[str, str]  # what was found, and what to do

_LIST = "List what there is with hookline.select(model, '**', '**:value')."
_ITSELF = "Name the model as '', a port of it as ':input', a parameter or buffer as 'weight'."
_ALONE = "none; the model itself is ''"


# -- modules at which no hook can fire ------------------------------------------------------------


def why_outside_python(module: nn.Module) -> Explained | None:
    """Explain why a scripted or exported module takes no hooks; None for other modules."""
    if isinstance(module, jit.ScriptModule):
        reason = "it is a ScriptModule, which runs outside Python and takes no hooks."
        return reason, "Use the model before torch.jit.script or torch.jit.trace."
    kind = type(module)
    is_bare = kind is nn.Module and all(type(inner) is nn.Module for inner in module.modules())
    if is_bare or is_export_guard(kind):
        reason = "it is a bare Module, as an exported program has: its graph calls operations only."
        remedy = "Use torch.export.unflatten(exported_program), or the model before the export."
        return reason, remedy
    return None


def _why_container(path: str, module: nn.Module) -> Explained:
    """Explain why a module without a forward takes no hooks."""
    kind = type(module).__name__
    children = join(escape(path), "*" if submodules_of(module) else "*:value")
    reason = f"it is a {kind}, which has no forward of its own: nothing passes through."
    return reason, f"Name its children, as in {children!r}, or give one of them as the model."


def not_hookable(request: Request, path: str, module: nn.Module) -> NotHookable:
    """Return the error for a module that is named and takes no hooks."""
    reason, remedy = why_outside_python(module) or _why_container(path, module)
    return NotHookable(f"A hook at {request.shown} was asked for:", reason, remedy)


# -- what is no place -----------------------------------------------------------------------------


def not_a_model(given: object) -> TypeError:
    """Return the error for places of an object that is neither a module nor a tensor."""
    return TypeError(
        f"Places of a {type(given).__name__} were asked for. A model is a torch.nn.Module. "
        f"Give it first, then the places."
    )


def not_a_place(where: object) -> PlaceError:
    """Return the error for an object that cannot stand for places."""
    return PlaceError(
        f"{'A tensor' if isinstance(where, Tensor) else repr(where)} is no place:",
        f"it is of type {type(where).__name__}.",
        "Give a string, a module, a type, a re.Pattern, a predicate (name, module) -> bool, a pair "
        "of one of them and a port, or a list of them; for a parameter, its path.",
    )


def not_the_gradient(where: object) -> PlaceError:
    """Return the error for a place of a plain tensor that is not its gradient."""
    return PlaceError(f"{where!r} was asked for:", "a tensor has one place.", "Write ':grad'.")


def wrong_port(request: Request, found: str) -> PlaceError:
    """Return the error for a port that does not fit what it is asked of."""
    asked = f"The place {request.shown} asks for the port {request.port!r}:"
    remedy = "Give one: modules have such as fc:input, parameters fc.weight:value and :grad."
    return PlaceError(asked, found, remedy)


def part_of_tensor(request: Request, name: str) -> PlaceError:
    """Return the error for a part of a parameter or buffer."""
    asked = f"The place {request.shown} names a part of {name!r}:"
    found = "it is one tensor, and a part never indexes a tensor."
    return PlaceError(asked, found, "Leave out the part; a slice is given with at=.")


def operation_wildcard(request: Request) -> PlaceError:
    """Return the error for a wildcard for operations."""
    asked = f"The place {request.shown} holds a wildcard for operations:"
    found = "which ones there are is known when the model has run."
    remedy = "List them with hookline.select(model, place, inputs=batch), and name some."
    return PlaceError(asked, found, remedy)


def ambiguous(text: str, literal: Target, pattern: Target) -> PlaceError:
    """Return the error for a text with two readings, and how to write each of them."""
    # Braces around the path keep the grammar's reading, and are in no name.
    path, rest = re.findall(r"(?s)([^/:\[\]#]*)(.*)", text)[0]
    other = repr("{" + path + "}" + rest) if path else f"(model, {text!r})"
    asked = f"The place {text!r} has two readings:"
    name = literal.named(literal.path)
    found = f"the module named {name!r}, and {pattern.place!r} by the grammar."
    remedy = f"Write {str(literal.place)!r} for the first, or {other} for the second."
    return PlaceError(asked, found, remedy)


# -- what is not there ----------------------------------------------------------------------------


def not_in_model(request: Request, modules: Iterable[nn.Module]) -> PlaceNotFound:
    """Return the error for a module, type, expression or predicate that matches no module."""
    kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
    found = f"The model has {kinds}; what is in a plain list or dict is not registered."
    return _nothing(request, found, _LIST)


def not_found(model: nn.Module, request: Request, names: Names) -> PlaceNotFound:
    """Return the error for a path that matches nothing, with the likeliest explanation."""
    for explain in (_explain_computed, _explain_module, _explain_attribute, _explain_refused):
        explained = explain(model, request, names)
        if explained is not None:
            return _nothing(request, *explained)
    return _nothing(request, _closest(model, request.where, names), _list_or_itself(model))


def _explain_computed(model: nn.Module, request: Request, names: Names) -> Explained | None:
    """Explain a literal name that stands for a computation: a parametrised tensor, a method."""
    for above, name, owner in _owners(model, request, names):
        if nn.utils.parametrize.is_parametrized(owner, name):
            ((full, module),) = find(model, (*above, "parametrizations", name))
            originals = [f"'{full}.{n}'" for n, _ in tensors_of(module)]
            remedy = f"Name {full!r}, or {' and '.join(originals)} for its parameters."
            return f"{name!r} is parametrised: it is computed at each use.", remedy
        if callable(getattr(type(owner), name, None)):  # a quantised module packs its weight
            call = f"hookline.get_module(model, {'.'.join(above)!r}).{name}()"
            return f"{name!r} is a method there.", f"Call {call}."
    return None


def _explain_module(model: nn.Module, request: Request, names: Names) -> Explained | None:
    """Explain that the path of a tensor is that of a module."""
    if request.port not in TENSOR_PORTS:
        return None
    for path, module in find(model, names):
        inside = f"it holds '{join(escape(path), '**')}:{request.port}'."
        if not any(tensors_of(inner) for _, inner in walk(module)):
            inside = "it holds none."
        remedy = "A module itself has :grad_output and :grad_input."
        return f"{path!r} is a module; {inside}", remedy
    return None


def _explain_attribute(model: nn.Module, request: Request, names: Names) -> Explained | None:
    """Explain a literal name that is a plain attribute."""
    for _, name, owner in _owners(model, request, names):
        there: Any = getattr(owner, name, 0)
        if isinstance(there, Tensor):  # of weight_norm, spectral_norm or pruning, say
            found = f"{name!r} is there as a plain tensor, perhaps computed at each call. "
            return found + _closest(model, request.where, names), _list_or_itself(model)
        if there is None:
            return f"{name!r} is there, but it is None.", _list_or_itself(model)
    return None


def _explain_refused(model: nn.Module, request: Request, names: Names) -> Explained | None:
    """Explain that a wildcard matches modules only that take no hooks."""
    for place, reason in request.refused.items():
        return f"{str(place)!r}: {reason}", _list_or_itself(model)
    return None


def _owners(
    model: nn.Module, request: Request, names: Names
) -> Iterator[tuple[Names, str, nn.Module]]:
    """Yield the module in which a literal name was looked for, with the path to it and the name."""
    if request.literal:
        *above, name = names or ("",)
        for _, owner in find(model, above):
            yield above, name, owner


def _closest(model: nn.Module, text: str, names: Names) -> str:
    """Return the paths and places that may be meant, as a sentence."""
    paths = [
        escape(join(path, name))
        for path, module in walk(model)
        for name in ("", *dict(tensors_of(module)))
    ]
    sought = re.split(r"[:\[]", text)[0]
    close: list[str] = []
    above, _, port = sought.rpartition(".")
    if above in paths and port in MODULE_PORTS + TENSOR_PORTS:  # as in `h.0.output`
        close.append(f"{above}:{port}")
    close += [path for path in paths if path.endswith("." + sought)]
    if names and not close:  # a path that begins further down
        below = find(model, (DEEP, *names))
        close += [f"**.{text}"] if any(takes_hooks(module) for _, module in below) else []
    close += difflib.get_close_matches(sought, paths, n=3, cutoff=0.5)
    if close:
        first = list(dict.fromkeys(close))[:3]
        return f"Closest: {', '.join(map(repr, first))}."
    names_of_children = submodules_of(model).keys()  # the table of a ScriptModule is no iterable
    own = [repr(escape(name)) for name in names_of_children]
    return f"Its own children: {', '.join(own[:8] or [_ALONE])}."


def _list_or_itself(model: nn.Module) -> str:
    return _LIST if submodules_of(model) else _ITSELF


def _nothing(request: Request, found: str, remedy: str) -> PlaceNotFound:
    what = "No parameter or buffer" if request.port in TENSOR_PORTS else "Nothing"
    return PlaceNotFound(f"{what} matches {request.shown}.", found, remedy)
