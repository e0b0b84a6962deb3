"""What the modules of a model hold, told without a run: parameters, buffers, their bytes.

- `sizes(model)`: a `Summary` with all that needs no batch
- `has_unmade(model)`: whether it has lazy modules, which have no size so far
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core.tree import Step, join, tensors_of, walk
from hookline.costs.footprints import size_of
from hookline.costs.summaries import ModuleCosts, Summary

__all__ = ["has_unmade", "sizes"]

# Parameters, trainable ones, bytes of parameters, bytes of buffers.
_Size = tuple[int, int, int, int]
_MADE = {nn.Parameter, Tensor, type(None)}


def sizes(model: nn.Module) -> Summary:
    """What can be told without a run.

    >>> sizes(nn.Linear(2, 3))[""].parameters
    9
    """
    named = walk(model)
    aliases, owners = _aliases(model, named), _owners(named)
    # Of each module with all below it: the sums of what has one place only; of what has several,
    # the tensors themselves, so that each counts once.
    sums: dict[int, list[int]] = {}
    several: dict[int, dict[int, _Size]] = {}
    rows: dict[int, ModuleCosts] = {}
    for path, module in _inner_first(named) if aliases else reversed(named):
        row = ModuleCosts(path, type(module).__name__, path.count(".") + 1 if path else 0)
        ident = id(module)
        rows[ident] = row
        total = sums[ident] = [0, 0, 0, 0]
        shared: dict[int, _Size] = {}
        for tensor, size in _held(module):
            row.own_parameters += size[0]
            if id(tensor) in owners or ident in aliases:
                shared[id(tensor)] = size
            else:
                _add(total, size)
        for child in map(id, module._modules.values()):
            if child in sums:  # else there is none
                _add(total, sums[child])
                if child in several:
                    shared.update(several[child])
        if shared:
            several[ident] = shared
            total = [*total]
            for size in shared.values():
                _add(total, size)
            row.shared_with = _sharing(module, path, owners)
        if ident in aliases:
            row.aliases = aliases[ident]
        row.parameters, row.trainable, row.parameter_bytes, row.buffer_bytes = total
    return Summary(type(model).__name__, [rows[id(module)] for _, module in named])


def _add(total: list[int], size: list[int] | _Size) -> None:
    total[0] += size[0]
    total[1] += size[1]
    total[2] += size[2]
    total[3] += size[3]


def _held(module: nn.Module) -> list[tuple[Tensor, _Size]]:
    """The parameters and buffers of a module itself, with their sizes."""
    found: list[tuple[Tensor, _Size]] = []
    for tensor in module._parameters.values():
        if tensor is not None and not _is_unmade(tensor):
            count = tensor.numel()
            found.append((tensor, (count, count * tensor.requires_grad, size_of(tensor), 0)))
    buffers = [b for b in module._buffers.values() if b is not None and not _is_unmade(b)]
    return [*found, *((buffer, (0, 0, 0, size_of(buffer))) for buffer in buffers)]


def _is_unmade(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a lazy module, and has no size so far."""
    return type(tensor) not in _MADE and is_lazy(tensor)


def has_unmade(model: nn.Module) -> bool:
    """Whether some modules of a model are lazy, and were not called so far."""
    modules = [module for _, module in walk(model)]
    tensors = [tensor for module in modules for tensor in module._parameters.values()]
    tensors += [tensor for module in modules for tensor in module._buffers.values()]
    kinds = set(map(type, tensors))
    return not kinds <= _MADE and any(t is not None and _is_unmade(t) for t in tensors)


def _sharing(module: nn.Module, path: str, owners: dict[int, list[str]]) -> list[str]:
    """The modules that have a parameter of this one, too."""
    found: list[str] = []
    for parameter in module._parameters.values():
        for name in owners.get(id(parameter), ()):
            if name != path and name not in found:
                found.append(name)
    return found


def _inner_first(named: list[Step]) -> list[Step]:
    """Every module after all that are in it, also where one stands in several places."""
    paths = {id(module): path for path, module in named}
    found: dict[int, Step] = {}
    waiting = [module for _, module in named[::-1]]
    while waiting:
        module = waiting[-1]
        inside = [m for m in module._modules.values() if m is not None and id(m) not in found]
        if inside:
            waiting += inside
        else:
            found.setdefault(id(waiting.pop()), (paths[id(module)], module))
    return list(found.values())


def _owners(named: list[Step]) -> dict[int, list[str]]:
    """The modules of every tensor that is held by more than one."""
    tables = [table for _, m in named for table in (m._parameters, m._buffers) if table]
    held = [id(tensor) for table in tables for tensor in table.values() if tensor is not None]
    if len(set(held)) == len(held):
        return {}
    found: dict[int, list[str]] = {}
    for path, module in named:
        for _, tensor in tensors_of(module):
            found.setdefault(id(tensor), []).append(path)
    return {key: paths for key, paths in found.items() if len(paths) > 1}


def _aliases(model: nn.Module, named: list[Step]) -> dict[int, list[str]]:
    """The other names of all modules that have some."""
    inside = [len(module._modules) for _, module in named]
    if sum(inside) == len(named) - 1:  # every module but the first stands in one place
        return {}
    names: dict[int, list[str]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        names.setdefault(id(module), []).append(path)
        children = [(join(path, n), m) for n, m in module._modules.items() if m is not None]
        waiting += children[::-1]
    return {ident: found[1:] for ident, found in names.items() if len(found) > 1}
