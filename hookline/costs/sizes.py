"""What the modules of a model hold, told without a run: parameters, buffers, their bytes.

- `sizes(model)`: a `Summary` with all that needs no batch
- `rows_of(model)`: its rows by module
- `has_unmade(tensors)`: whether some are of lazy modules, and have no size so far
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core.tree import Step, join, tensors_of, walk
from hookline.costs.footprints import size_of
from hookline.costs.shortcuts import is_dense
from hookline.costs.summaries import ModuleCosts, Summary
from hookline.trials.runs import tensors_of_all

__all__ = ["has_unmade", "rows_of", "sizes"]

# Parameters, trainable ones, bytes of parameters, bytes of buffers.
_Size = tuple[int, int, int, int]
_MADE = {nn.Parameter, Tensor}


def sizes(model: nn.Module) -> Summary:
    """What can be told without a run.

    >>> sizes(nn.Linear(2, 3))[""].parameters
    9
    """
    return Summary(type(model).__name__, list(rows_of(model).values()))


def rows_of(model: nn.Module) -> dict[nn.Module, ModuleCosts]:
    """What can be told of each module without a run, in the order of `walk`."""
    named = walk(model)
    tensors = tensors_of_all(named)
    aliases, owners = _aliases(model, named), _owners(named, tensors)
    # What is asked of every tensor is asked of all at once where it can be: that is much faster.
    dense = is_dense(tensors)
    # Of each module with all below it: the sums of what has one place only; of what has several,
    # the tensors themselves, so that each counts once.
    sums: dict[nn.Module, _Size] = {}
    several: dict[nn.Module, dict[int, _Size]] = {}
    rows: dict[nn.Module, ModuleCosts] = {}
    for path, module in _inner_first(named) if aliases else reversed(named):
        shared: dict[int, _Size] = {}
        apart = module in aliases  # else only tensors can have several places
        own = count = trained = size = kept = 0
        for tensor in module._parameters.values():
            if tensor is not None and (dense or not _is_unmade(tensor)):
                number, bytes_ = tensor.numel(), tensor.nbytes if dense else size_of(tensor)
                own += number
                if apart or (owners and id(tensor) in owners):
                    shared[id(tensor)] = number, number * tensor.requires_grad, bytes_, 0
                else:
                    count += number
                    size += bytes_
                    if tensor.requires_grad:
                        trained += number
        for tensor in module._buffers.values() if module._buffers else ():
            if tensor is not None and (dense or not _is_unmade(tensor)):
                if apart or id(tensor) in owners:
                    shared[id(tensor)] = 0, 0, 0, size_of(tensor)
                else:
                    kept += size_of(tensor)
        for child in module._modules.values() if module._modules else ():
            if child is not None:
                parts = sums[child]
                count += parts[0]
                trained += parts[1]
                size += parts[2]
                kept += parts[3]
                if child in several:
                    shared.update(several[child])
        total = sums[module] = count, trained, size, kept
        if shared:
            several[module] = shared
            count, trained, size, kept = map(sum, zip(total, *shared.values(), strict=True))
        depth = path.count(".") + 1 if path else 0
        row = ModuleCosts(path, type(module).__name__, depth, count, own, trained, size, kept)
        if shared:
            row.shared_with = _sharing(module, path, owners)
        if apart:
            row.aliases = aliases[module]
        rows[module] = row
    return {module: rows[module] for _, module in named}


def _is_unmade(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a lazy module, and has no size so far."""
    return type(tensor) not in _MADE and is_lazy(tensor)


def has_unmade(tensors: list[Tensor]) -> bool:
    """Whether some tensors of a model belong to lazy modules that were not called so far."""
    return not _MADE.issuperset(map(type, tensors)) and any(map(_is_unmade, tensors))


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


def _owners(named: list[Step], tensors: list[Tensor]) -> dict[int, list[str]]:
    """The modules of every tensor that is held by more than one."""
    if len({*map(id, tensors)}) == len(tensors):
        return {}
    found: dict[int, list[str]] = {}
    for path, module in named:
        for _, tensor in tensors_of(module):
            found.setdefault(id(tensor), []).append(path)
    return {key: paths for key, paths in found.items() if len(paths) > 1}


def _aliases(model: nn.Module, named: list[Step]) -> dict[nn.Module, list[str]]:
    """The other names of all modules that have some."""
    inside = [len(module._modules) for _, module in named]
    if sum(inside) == len(named) - 1:  # every module but the first stands in one place
        return {}
    names: dict[nn.Module, list[str]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        names.setdefault(module, []).append(path)
        children = [(join(path, n), m) for n, m in module._modules.items() if m is not None]
        waiting += children[::-1]
    return {module: found[1:] for module, found in names.items() if len(found) > 1}
