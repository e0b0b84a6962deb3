"""Find the modules, parameters and buffers of a model by name.

- `walk(model)`: every module once, under its first name
- `find(model, segments)`: the modules whose path matches
- `find_tensors(model, segments, gradients)`: the parameters and buffers whose path matches
- `exists(model, names)`: True if a plain path is that of a module, parameter or buffer
- `takes_hooks(module)`: True if a hook on the module can fire
- `unwrapped(path, module)`: the module inside torch's wrappers
- `WRAPPERS`: the names under which torch's wrappers hold a module
- `around(model, path)`: the module at a path and those that contain it, the innermost first
- `tensors_of(module)`: the parameters and buffers of a module itself
- `join(path, name)`: the path of a name inside the module at a path
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, jit, nn

from hookline.places.grammar import DEEP, Segment
from hookline.torch_private import (
    WRAPPER_NAMES,
    buffers_of,
    is_export_guard,
    parameters_of,
    submodules_of,
)

__all__ = [
    "WRAPPERS",
    "NamedModule",
    "around",
    "exists",
    "find",
    "find_tensors",
    "first_names",
    "join",
    "takes_hooks",
    "tensors_of",
    "unwrapped",
    "walk",
]  # fmt: skip

NamedModule = tuple[str, nn.Module]  # a path and the module there
Found = dict[nn.Module, NamedModule]  # each module once, in the order in which they were found
Owned = tuple[str, nn.Module, str]  # a path, the module there, and the name of a tensor in it

# Wrappers of torch whose name in a path may be left out: DDP, compile, FSDP1, checkpointing.
WRAPPERS = {"", "module", *WRAPPER_NAMES}


def walk(model: nn.Module) -> list[NamedModule]:
    """Return every module once, under its first name, in the order of `named_modules`.

    >>> [name for name, _ in walk(nn.Sequential(nn.ReLU()))]
    ['', '0']
    """
    found: Found = {model: ("", model)}
    _add_below("", model, found)
    return list(found.values())


def find(model: nn.Module, segments: Sequence[Segment]) -> list[NamedModule]:
    """Return the modules whose path matches, each once. Only modules that can match are visited."""
    names: Any = segments
    module: Any = model
    depth = 0
    for name in names:
        modules = submodules_of(module)
        if name not in modules or modules[name] is None:
            break  # a wildcard, a wrapper whose name was left out, or no match
        module = modules[name]
        depth += 1
    else:
        return [(".".join(names), module)]

    level: list[NamedModule] = [(".".join(names[:depth]), module)]
    for segment in names[depth:]:
        depth += 1
        if not level:
            break
        if segment is not DEEP:
            level = _children(level, segment)
        elif depth < len(names):
            level = _below(level, kept=level)  # `**` also stands for no name
        else:  # but at the end for one at least, so never for the model itself
            level = [step for step in _below(level, kept=[]) if step[1] is not model]
    return level


def _children(level: list[NamedModule], segment: Segment) -> list[NamedModule]:
    """Return the children of some modules whose name matches, each once."""
    found: Found = {}
    for path, module in level:
        modules = submodules_of(module)
        if len(modules) == 1 and not WRAPPERS.isdisjoint(modules.keys()):
            path, module = _inside_wrappers(path, module, segment)
            modules = submodules_of(module)
        prefix = f"{path}." if path else ""
        # The table of a ScriptModule cannot be iterated, and has no `get`.
        names = (segment,) if isinstance(segment, str) else segment.among(modules.keys())
        for name in names:
            child = modules[name] if name in modules else None  # noqa: SIM401
            if child is not None and child not in found:
                found[child] = (prefix + name, child)
    return list(found.values())


def _below(level: list[NamedModule], kept: list[NamedModule]) -> list[NamedModule]:
    """Return the kept modules and all modules below a level, each once."""
    found = {step[1]: step for step in kept}
    for path, module in level:
        _add_below(path, module, found)
    return list(found.values())


def _add_below(path: str, module: nn.Module, found: Found) -> None:
    prefix = f"{path}." if path else ""
    for name, child in submodules_of(module).items():
        if child is not None and child not in found:
            found[child] = (prefix + name, child)
            if submodules_of(child):
                _add_below(prefix + name, child, found)


def find_tensors(model: nn.Module, segments: Sequence[Segment], gradients: bool) -> list[Owned]:
    """Return the parameters and buffers whose path matches, each once, with their owners.

    With `gradients`, wildcards match only tensors that can have one: most buffers have none.
    """
    last = segments[-1] if segments else ""
    by_name = isinstance(last, str)
    owners = find(model, segments[:-1])
    if last is DEEP:
        owners += find(model, segments)  # `a.**` is any tensor in a or below
    found: dict[int, Owned] = {}
    for path, module in owners:
        is_there = False
        for tensors in (parameters_of(module), buffers_of(module)):
            names = (last,) if isinstance(last, str) else last.among(tensors.keys())
            for name in names:
                tensor = tensors[name] if name in tensors else None  # noqa: SIM401
                if tensor is None:
                    continue
                is_there = True
                every = by_name or not gradients or tensor.requires_grad
                if every or isinstance(tensor, nn.Parameter):
                    found.setdefault(id(tensor), (path, module, name))
        if not (by_name and is_there):
            inner = _wrapped(path, module, last)
            if inner is not None:
                owners.append(inner)  # this loop visits it as well
    return list(found.values())


def exists(model: nn.Module, names: Sequence[Segment]) -> bool:
    """Return True if a plain path is that of a module, parameter or buffer."""
    return bool(find(model, names) or find_tensors(model, names, False))


# -- modules at which no hook can fire ------------------------------------------------------------

_hookable_types: set[type[nn.Module]] = set()


def takes_hooks(module: nn.Module) -> bool:
    """Return True if a hook on the module can fire."""
    kind = type(module)
    if kind in _hookable_types:
        return True
    if isinstance(module, jit.ScriptModule):
        return False
    if kind.forward is nn.Module.forward:  # but a forward given to the instance is called, too
        return "forward" in module.__dict__ and not is_export_guard(kind)
    if is_export_guard(kind):
        return False
    _hookable_types.add(kind)
    return True


# -- wrappers -------------------------------------------------------------------------------------


def _inside_wrappers(path: str, module: nn.Module, segment: Segment) -> NamedModule:
    """Return the module inside wrappers whose names the path leaves out; other modules as given."""
    inner = _wrapped(path, module, segment)
    return (path, module) if inner is None else _inside_wrappers(*inner, segment)


def _wrapped(path: str, module: nn.Module, segment: Segment) -> NamedModule | None:
    """Return the module inside a wrapper whose name the path leaves out; None for other modules."""
    if len(submodules_of(module)) != 1:
        return None
    ((name, inner),) = submodules_of(module).items()
    if name not in WRAPPERS or inner is None or name == segment:
        return None
    known = _is_wrapper(module, name) or WRAPPERS.issuperset(path.split("."))
    if not known and not isinstance(segment, str):
        return None  # a wildcard takes a user's module whose child is called `module` as it is
    return join(path, name), inner


def _is_wrapper(module: nn.Module, name: str) -> bool:
    """Return True if a module with one child of that name is a wrapper of torch's."""
    return name != "module" or "DataParallel" in type(module).__name__


def unwrapped(path: str, module: nn.Module) -> NamedModule:
    """Return the module inside torch's wrappers, whose own forwards take any arguments."""
    while len(submodules_of(module)) == 1:
        ((name, inner),) = submodules_of(module).items()
        if name not in WRAPPERS or inner is None or not _is_wrapper(module, name):
            break
        path = join(path, name)
        module = inner
    return path, module


# -- paths ----------------------------------------------------------------------------------------


def around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the module at a path and those that contain it, the innermost first."""
    while path:
        yield model.get_submodule(path)
        path = path.rpartition(".")[0]
    yield model


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module itself."""
    named = (*parameters_of(module).items(), *buffers_of(module).items())
    return [(name, tensor) for name, tensor in named if tensor is not None]


def join(path: str, name: str) -> str:
    """Return the path of a name inside the module at a path; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def first_names(model: nn.Module | Tensor | None) -> dict[int, str]:
    """Return the first name of every module, by id, in model order."""
    return {id(m): path for path, m in walk(model)} if isinstance(model, nn.Module) else {}
