"""What the modules of a model hold, told without a run: parameters, buffers, their bytes.

- `sizes(model)`: a `Summary` with all that needs no batch
- `is_unmade(tensor)`: whether it belongs to a lazy module, and has no size so far
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core.tree import Step, join, walk
from hookline.costs.footprints import size_of
from hookline.costs.summaries import ModuleCosts, Summary

__all__ = ["is_unmade", "sizes"]

# Parameters, trainable ones, bytes of parameters, bytes of buffers.
_Size = tuple[int, int, int, int]


def sizes(model: nn.Module) -> Summary:
    """What can be told without a run.

    >>> sizes(nn.Linear(2, 3))[""].parameters
    9
    """
    named = walk(model)
    aliases = _aliases(model, named)
    known, owners = _tensors(named)
    # Of each module with all below it: what has one place only is summed up; of the rest it must be
    # known which tensors they are, so that each counts once.
    sums: dict[int, list[int]] = {}
    rest: dict[int, set[int]] = {}
    rows: list[ModuleCosts] = []
    for path, module in reversed(named):  # children first
        row = ModuleCosts(path, type(module).__name__, path.count(".") + 1 if path else 0)
        ident = id(module)
        total, several = [0, 0, 0, 0], set[int]()
        sums[ident], rest[ident] = total, several
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                key = id(tensor)
                row.own_parameters += known[key][0]
                if key in owners or ident in aliases:
                    several.add(key)
                else:
                    _add(total, known[key])
        for child in module._modules.values():
            if child is not None and id(child) in sums:
                _add(total, sums[id(child)])
                several |= rest[id(child)]
        _fill(row, total, [known[key] for key in several])
        if owners:
            row.shared_with = _sharing(module, path, owners)
        if ident in aliases:
            row.aliases = aliases[ident]
        rows.append(row)
    return Summary(type(model).__name__, rows[::-1])


def _add(total: list[int], size: list[int] | _Size) -> None:
    total[0] += size[0]
    total[1] += size[1]
    total[2] += size[2]
    total[3] += size[3]


def _fill(row: ModuleCosts, total: list[int], more: list[_Size]) -> None:
    if more:
        total = [*total]
        for size in more:
            _add(total, size)
    row.parameters, row.trainable, row.parameter_bytes, row.buffer_bytes = total


def _tensors(named: list[Step]) -> tuple[dict[int, _Size], dict[int, list[str]]]:
    """The sizes of all tensors by id; and of those that stand in several places, the modules."""
    known: dict[int, _Size] = {}
    first: dict[int, str] = {}
    owners: dict[int, list[str]] = {}
    for path, module in named:
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is None:
                    continue
                key = id(tensor)
                if key in known:
                    owners.setdefault(key, [first[key]]).append(path)
                else:
                    known[key] = _size(tensor, table is module._parameters)
                    first[key] = path
    return known, owners


def _size(tensor: Tensor, is_parameter: bool) -> _Size:
    if is_unmade(tensor):
        return 0, 0, 0, 0
    if not is_parameter:
        return 0, 0, 0, size_of(tensor)
    count = tensor.numel()
    return count, count if tensor.requires_grad else 0, size_of(tensor), 0


def is_unmade(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a lazy module, and has no size so far."""
    return type(tensor) not in (nn.Parameter, Tensor) and is_lazy(tensor)


def _sharing(module: nn.Module, path: str, owners: dict[int, list[str]]) -> list[str]:
    """The modules that have a parameter of this one, too."""
    found: list[str] = []
    for parameter in module._parameters.values():
        for name in owners.get(id(parameter), ()):
            if name != path and name not in found:
                found.append(name)
    return found


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
