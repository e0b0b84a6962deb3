"""The modules, parameters and buffers of a model by name.

- `walk(model)`: every module once, under its first name
- `find(model, segments)`: the modules whose path matches
- `find_tensors(model, segments, gradients)`: the parameters and buffers whose path matches
- `unwrapped(path, module)`: what torch's wrappers hold; `WRAPPERS` are their names for it
- `exists(model, names)`: whether a plain path is that of a module, parameter or buffer
- `around(model, path)`: the module at a path and those that it is in, the innermost first
- `tensors_of(module)`: the parameters and buffers of a module itself
- `join(path, name)`: the path of what has that name in a module with that path
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from hookline.places.grammar import ANY, DEEP, Segment
from hookline.torch_private import WRAPPER_NAMES, buffers_of, parameters_of, submodules_of

__all__ = [
    "WRAPPERS", "Step", "around", "exists", "find", "find_tensors", "join", "tensors_of",
    "unwrapped", "walk",
]  # fmt: skip

Step = tuple[str, nn.Module]  # a module under a path
Owned = tuple[str, nn.Module, str]  # and a parameter or buffer in it

# Wrappers of torch whose name in a path may be left out: DDP, compile, FSDP1, checkpointing.
WRAPPERS = {"", "module", *WRAPPER_NAMES}


def walk(model: nn.Module) -> list[Step]:
    """Every module once with its first name, the model itself first, as `named_modules` has them.

    >>> [name for name, _ in walk(nn.Sequential(nn.ReLU()))]
    ['', '0']
    """
    found: dict[Any, Step] = {model: ("", model)}
    _add_children("", model, DEEP, found)
    return list(found.values())


def find(model: nn.Module, segments: Sequence[Segment]) -> list[Step]:
    """The modules whose path matches, each once. Only what can match is looked at."""
    module: Any = model
    depth = 0
    for segment in segments:  # as far as it is a plain path, and most often it is one
        modules: dict[Any, Any] = submodules_of(module)
        if segment not in modules or modules[segment] is None:
            break
        module, depth = modules[segment], depth + 1
    level: list[Step] = [(".".join(cast("Sequence[str]", segments[:depth])), module)]
    for segment in segments[depth:]:
        depth += 1
        last = depth == len(segments)
        # Before other segments `**` may stand for nothing.
        found: dict[Any, Step] = {} if last or segment is not DEEP else {s[1]: s for s in level}
        for path, module in level:
            _add_children(path, module, segment, found)
        if segment is DEEP and last:
            found.pop(model, None)
        level = list(found.values())
    return level


def _add_children(path: str, module: Any, segment: Segment, found: dict[Any, Step]) -> None:
    """Add the children whose name matches, and for `**` all modules below."""
    prefix, modules = path and f"{path}.", submodules_of(module)
    if segment is DEEP:
        for name, child in modules.items():
            if child is not None and child not in found:
                found[child] = (prefix + name, child)
                if submodules_of(child):
                    _add_children(prefix + name, child, DEEP, found)
        return
    inner = _wrapped(path, module, segment)
    if inner is not None:
        _add_children(*inner, segment, found)
    elif not isinstance(segment, str):
        names = modules.keys()  # the table of a ScriptModule cannot be iterated
        for name in names if segment is ANY else segment.among(names):
            child = modules[name]
            if child is not None:
                found.setdefault(child, (prefix + name, child))
    elif segment in modules and modules[segment] is not None:
        found.setdefault(modules[segment], (prefix + segment, modules[segment]))


def _wrapped(path: str, module: nn.Module, segment: Segment) -> Step | None:
    """The module to look in, if this one is a wrapper whose name was left out.

    For wildcards an ordinary module that calls a child `module` is no wrapper.
    """
    if len(submodules_of(module)) == 1:
        ((name, inner),) = submodules_of(module).items()
        known = name != "module" or "DataParallel" in type(module).__name__
        known = known or isinstance(segment, str) or WRAPPERS.issuperset(path.split("."))
        if name in WRAPPERS and inner is not None and name != segment and known:
            return join(path, name), inner
    return None


def unwrapped(path: str, module: nn.Module) -> Step:
    """A module, or what torch's wrappers around it hold: their forwards take any arguments."""
    while len(submodules_of(module)) == 1:
        ((name, inner),) = submodules_of(module).items()
        known = name != "module" or "DataParallel" in type(module).__name__
        if inner is None or name not in WRAPPERS or not known:
            break
        path, module = join(path, name), inner
    return path, module


def find_tensors(model: nn.Module, segments: Sequence[Segment], gradients: bool) -> list[Owned]:
    """The parameters and buffers whose path matches, each once, with their owners.

    Of gradients, wildcards do not mean buffers, which have none.
    """
    last = segments[-1] if segments else ""
    named = isinstance(last, str)
    fits = last.__eq__ if isinstance(last, str) else last.fullmatch
    below = find(model, segments) if last is DEEP else []  # `a.**` is any tensor in a or below
    owners = find(model, segments[:-1]) + below
    found: dict[int, Owned] = {}
    for path, module in owners:
        tensors = [(name, tensor) for name, tensor in tensors_of(module) if fits(name)]
        inner = None if named and tensors else _wrapped(path, module, last)
        owners += [inner] if inner else []  # to be looked at as well, in this loop
        for name, tensor in tensors:
            every = named or not gradients or tensor.requires_grad
            if every or isinstance(tensor, nn.Parameter):
                found.setdefault(id(tensor), (path, module, name))
    return list(found.values())


def exists(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether a plain path is that of a module, parameter or buffer."""
    name, owners = names[-1], find(model, names[:-1])
    for path, owner in owners:
        if (
            name in submodules_of(owner)
            or name in parameters_of(owner)
            or name in buffers_of(owner)
        ):
            return True
        inner = _wrapped(path, owner, name)
        owners += [inner] if inner else []  # to be looked at as well, in this loop
    return False


def around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The module at a path and those that it is in, the innermost first."""
    while path:
        yield model.get_submodule(path)
        path = path.rpartition(".")[0]
    yield model


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module itself."""
    named = (*parameters_of(module).items(), *buffers_of(module).items())
    return [(name, tensor) for name, tensor in named if tensor is not None]


def join(path: str, name: str) -> str:
    """The path of what has that name, if any, in a module with that path."""
    return f"{path}.{name}" if path and name else path or name
