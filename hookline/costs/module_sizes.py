"""Measure what the modules of a model hold, without a run: parameters, buffers, bytes.

- `model_sizes(model)`: a `Summary` with everything that needs no batch
- `ModuleSizes(contents)`: the sizes of each module; rows are made when they are read
- `has_uninitialized(tensors)`: True if some belong to lazy modules, and have no size so far
- `copy_uninitialized(model, tensors)`: a copy of a model with such tensors
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any, cast

from torch import ScriptObject, Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from hookline.costs.flop_formulas import is_dense
from hookline.costs.footprints import size_of
from hookline.costs.summary import ModuleCosts, Summary
from hookline.isolation.module_index import ModuleIndex
from hookline.places.tree import join, tensors_of
from hookline.torch_private import submodules_of

__all__ = ["ModuleSizes", "copy_uninitialized", "has_uninitialized", "model_sizes"]

_MADE = {nn.Parameter, Tensor}


def model_sizes(model: nn.Module) -> Summary:
    """Return a summary of everything that needs no run.

    >>> model_sizes(nn.Linear(2, 3))[""].parameters
    9
    """
    return Summary(model, ModuleSizes(ModuleIndex(model)))


def has_uninitialized(tensors: list[Tensor]) -> bool:
    """Return True if tensors belong to lazy modules that were not called so far."""
    return not _MADE.issuperset(map(type, tensors)) and any(map(_is_uninitialized, tensors))


def _is_uninitialized(tensor: Tensor) -> bool:
    """Return True for a tensor of a lazy module that has no size so far."""
    return type(tensor) not in _MADE and is_lazy(tensor)


def copy_uninitialized(model: nn.Module, tensors: list[Tensor]) -> nn.Module:
    """Copy a model with lazy modules, whose buffers torch cannot copy."""
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if isinstance(tensor, UninitializedBuffer):
            like = {"device": tensor.data.device, "dtype": tensor.data.dtype}
            memo[id(tensor)] = cast(Any, UninitializedBuffer)(tensor.requires_grad, **like)
    return copy.deepcopy(model, memo)


class ModuleSizes:
    """The sizes of the modules of a model as it is now, without references to it.

    >>> found = ModuleSizes(ModuleIndex(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    >>> [found.make_row(number).parameters for number in range(len(found.places))]
    [9, 9, 0]

    Args:
        contents: the index of the model.
        dense: whether it is known already that all its tensors are dense.
    """

    def __init__(self, contents: ModuleIndex, dense: bool = False) -> None:
        self.places = [path for path, _ in contents.named]
        self.depths = [path.count(".") + 1 if path else 0 for path in self.places]
        self._types = [type(module).__name__ for module in contents.modules]
        self.packed = _packed(contents)
        dense = dense or is_dense(contents.tensors)
        self._parameters = _TensorColumn(contents.parameters, contents.all_parameters, dense)
        self._parameters.trained = contents.trained
        self._buffers = _TensorColumn(contents.buffers, contents.all_buffers, dense)
        self._children = [*map(len, contents.children)]
        self._ends: list[int] = []  # of each module, the number after the last in it
        self._owners, self._aliases = _owners(contents), dict[int, list[str]]()
        self._inside: list[list[int]] | None = None  # of each module, all in it, if some are shared
        single = sum(self._children) == len(self.places) - 1  # every module stands in one place
        if self._owners or not single:
            self._aliases = _aliases(contents)
            self._parameters.identify(contents.all_parameters)
            self._buffers.identify(contents.all_buffers)
            self._inside = _insides(contents)

    def make_row(self, number: int) -> ModuleCosts:
        """Return the row of a module, by its number in the order of `walk`."""
        place, parameters, buffers = self.places[number], self._parameters, self._buffers
        if self._inside is None:
            if not self._ends:
                self._ends = _ends(self._children)
            end = self._ends[number]
            count, trained, size = parameters.sums(number, end)
            kept = buffers.sums(number, end)[2] if buffers.counts else 0
        else:
            count, trained, size = parameters.distinct_sums(self._inside[number])
            kept = buffers.distinct_sums(self._inside[number])[2]
        own = parameters.sums(number, number + 1)[0]
        kind, depth = self._types[number], self.depths[number]
        row = ModuleCosts(place, kind, depth, count, own, trained, size, kept)
        if self._owners:
            keys = parameters.keys_of(number)
            names = dict.fromkeys(name for key in keys for name in self._owners.get(key, ()))
            row.shared_with = [name for name in names if name != place]
        if number in self._aliases:
            row.aliases = self._aliases[number]
        return row


class _TensorColumn:
    """Parameters or buffers in order, with the sizes of each and where each module begins."""

    def __init__(
        self, tables: list[dict[str, Any]], tensors: Sequence[Tensor | None], dense: bool
    ) -> None:
        self._starts = [0, *accumulate(map(len, tables))]
        self._keys: list[int] = []
        # Each property is read from all tensors at once: that is much faster.
        if dense:
            self._bytes = [0 if t is None else t.nbytes for t in tensors]
        else:
            tensors = [None if t is None or _is_uninitialized(t) else t for t in tensors]
            self._bytes = [0 if t is None else size_of(t) for t in tensors]
        self.counts = [0 if t is None else t.numel() for t in tensors]
        self.trained: list[bool] = []  # of each, if it is a matter of parameters

    def identify(self, tensors: Sequence[Tensor | None]) -> None:
        """Note which tensors are the same."""
        self._keys = [*map(id, tensors)]

    def keys_of(self, number: int) -> list[int]:
        """Return keys that tell the tensors of a module from others."""
        return self._keys[self._starts[number] : self._starts[number + 1]]

    def sums(self, number: int, end: int) -> tuple[int, int, int]:
        """Return elements, trained elements and bytes of some modules in a row."""
        start, stop = self._starts[number], self._starts[end]
        if start == stop:
            return 0, 0, 0
        counts, trained = self.counts[start:stop], self.trained[start:stop]
        return sum(counts), sum(compress(counts, trained)), sum(self._bytes[start:stop])

    def distinct_sums(self, numbers: list[int]) -> tuple[int, int, int]:
        """Return the same sums for any modules, each tensor once."""
        starts, found = self._starts, dict[int, int]()
        for number in numbers:
            for at in range(starts[number], starts[number + 1]):
                found[self._keys[at]] = at
        held = [*found.values()]
        trained = [self.counts[at] for at in held if self.trained and self.trained[at]]
        counts, model_sizes = [self.counts[at] for at in held], [self._bytes[at] for at in held]
        return sum(counts), sum(trained), sum(model_sizes)


def _packed(contents: ModuleIndex) -> list[str]:
    """Return the quantised modules whose weights only their own kernels can read."""
    kinds = {kind for kind in {*map(type, contents.modules)} if "torch.ao.nn" in kind.__module__}
    return [
        path
        for path, module in (contents.named if kinds else ())
        if type(module) in kinds
        and any(isinstance(held, ScriptObject) for held in vars(module).values())
    ]


def _ends(children: list[int]) -> list[int]:
    """Return for each module the number after the last module in it."""
    found = [0] * len(children)
    for number in range(len(children) - 1, -1, -1):
        end = number + 1
        for _ in range(children[number]):
            end = found[end]
        found[number] = end
    return found


def _insides(contents: ModuleIndex) -> list[list[int]]:
    """Return for each module the numbers of all modules in it and its own, in all its places."""
    numbers = {module: number for number, module in enumerate(contents.modules)}
    found: list[list[int]] = []
    for module in contents.modules:
        inside: dict[nn.Module, int] = {}
        waiting = [module]
        while waiting:
            one = waiting.pop()
            if one not in inside:
                inside[one] = numbers[one]
                waiting += [child for child in submodules_of(one).values() if child is not None]
        found.append([*inside.values()])
    return found


def _owners(contents: ModuleIndex) -> dict[int, list[str]]:
    """Return the modules of every tensor that is held more than once."""
    if len({*map(id, contents.tensors)}) == len(contents.tensors):
        return {}
    found: dict[int, list[str]] = {}
    for path, module in contents.named:
        for _, tensor in tensors_of(module):
            found.setdefault(id(tensor), []).append(path)
    return {key: paths for key, paths in found.items() if len(paths) > 1}


def _aliases(contents: ModuleIndex) -> dict[int, list[str]]:
    """Return the other names of all modules that have some."""
    numbers = {module: number for number, module in enumerate(contents.modules)}
    names: dict[int, list[str]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", contents.model)]
    while waiting:
        path, module = waiting.pop()
        names.setdefault(numbers[module], []).append(path)
        children = [(join(path, n), m) for n, m in submodules_of(module).items() if m is not None]
        waiting += children[::-1]
    return {number: found[1:] for number, found in names.items() if len(found) > 1}
