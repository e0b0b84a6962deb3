"""What the modules of a model hold, told without a run: parameters, buffers, their bytes.

- `sizes(model)`: a `Summary` with all that needs no batch
- `Sizes(contents)`: what is told of each module, of which rows are made when they are read
- `has_unmade(tensors)`: whether some are of lazy modules, and have no size so far
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core.tree import join, tensors_of
from hookline.costs.footprints import size_of
from hookline.costs.shortcuts import is_dense
from hookline.costs.summaries import ModuleCosts, Summary, depth_of
from hookline.trials.contents import Contents

__all__ = ["Sizes", "has_unmade", "sizes"]

_MADE = {nn.Parameter, Tensor}


def sizes(model: nn.Module) -> Summary:
    """What can be told without a run.

    >>> sizes(nn.Linear(2, 3))[""].parameters
    9
    """
    return Summary(type(model).__name__, Sizes(Contents(model)))


def has_unmade(tensors: list[Tensor]) -> bool:
    """Whether some tensors of a model belong to lazy modules that were not called so far."""
    return not _MADE.issuperset(map(type, tensors)) and any(map(_is_unmade, tensors))


def _is_unmade(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a lazy module, and has no size so far."""
    return type(tensor) not in _MADE and is_lazy(tensor)


class Sizes:
    """What the modules of a model hold as it is now; no module and no tensor is kept.

    >>> found = Sizes(Contents(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    >>> [found.make_row(number).parameters for number in range(len(found.places))]
    [9, 9, 0]

    Args:
        contents: what stands in the model.
        dense: whether it is known already that all its tensors are dense.
    """

    def __init__(self, contents: Contents, dense: bool = False) -> None:
        self.places = [path for path, _ in contents.named]
        self._types = [type(module).__name__ for module in contents.modules]
        dense = dense or is_dense(contents.tensors)
        self._parameters = _Column(contents.parameters, contents.all_parameters, dense)
        self._buffers = _Column(contents.buffers, contents.all_buffers, dense)
        self._owners = _owners(contents)
        self._aliases: dict[int, list[str]] = {}
        self._children: list[list[int]] = []
        if sum(map(len, contents.children)) != len(self.places) - 1:  # some stand in several places
            self._aliases = _aliases(contents)
            numbers = {module: number for number, module in enumerate(contents.modules)}
            self._children = [
                [numbers[child] for child in table.values() if child is not None]
                for table in contents.children
            ]

    def make_row(self, number: int) -> ModuleCosts:
        """What is told of a module, by its number in the order of `walk`."""
        place, modules = self.places[number], self._inside(number)
        own = self._parameters.held_by(range(number, number + 1))
        held, kept = self._parameters.held_by(modules), self._buffers.held_by(modules)
        if self._owners or self._aliases:  # each tensor counts once
            held, kept = self._parameters.distinct(held), self._buffers.distinct(kept)
        row = ModuleCosts(
            place,
            self._types[number],
            depth_of(place),
            *self._parameters.sums(held, own),
            self._buffers.sums(kept, ())[-1],
        )
        if self._owners:
            keys = [self._parameters.keys[at] for at in own]
            names = dict.fromkeys(name for key in keys for name in self._owners.get(key, ()))
            row.shared_with = [name for name in names if name != place]
        if number in self._aliases:
            row.aliases = self._aliases[number]
        return row

    def _inside(self, number: int) -> Sequence[int]:
        """The numbers of a module and of all below it: they follow it, if each has one place."""
        if not self._aliases:
            start = f"{self.places[number]}." if number else ""
            end = number + 1
            while end < len(self.places) and self.places[end].startswith(start):
                end += 1
            return range(number, end)
        found: dict[int, None] = {}
        waiting = [number]
        while waiting:
            at = waiting.pop()
            if at not in found:
                found[at] = None
                waiting += self._children[at]
        return [*found]


class _Column:
    """Parameters, or buffers, in order: of each what is told, and where those of a module begin."""

    def __init__(
        self, tables: list[dict[str, Any]], tensors: Sequence[Tensor | None], dense: bool
    ) -> None:
        self._starts = [0, *accumulate(map(len, tables))]
        self.keys = [*map(id, tensors)]
        if not dense:
            tensors = [None if t is None or _is_unmade(t) else t for t in tensors]
        # What is asked of every tensor is asked of all at once: that is much faster.
        counts = [0 if t is None else t.numel() for t in tensors]
        trained = [t is not None and t.requires_grad for t in tensors]
        if dense:
            sizes = [0 if t is None else t.nbytes for t in tensors]
        else:
            sizes = [0 if t is None else size_of(t) for t in tensors]
        self._columns = counts, [*map(mul, counts, trained)], sizes

    def held_by(self, modules: Sequence[int]) -> Sequence[int]:
        """The numbers of what modules hold themselves."""
        starts = self._starts
        if isinstance(modules, range):
            return range(starts[modules.start], starts[modules.stop])
        return [*chain.from_iterable([range(starts[n], starts[n + 1]) for n in modules])]

    def distinct(self, numbers: Sequence[int]) -> Sequence[int]:
        """The same without those of tensors that were there already."""
        return [*{self.keys[number]: number for number in numbers}.values()]

    def sums(self, held: Sequence[int], own: Sequence[int]) -> tuple[int, int, int, int]:
        """Elements of what is held, of which a module's own, those that are trained, and bytes."""
        counts, trained, sizes = self._columns
        inside = sum([counts[number] for number in own])
        if isinstance(held, range):  # as most are
            start, stop = held.start, held.stop
            found = counts[start:stop], trained[start:stop], sizes[start:stop]
        else:
            found = [[column[number] for number in held] for column in self._columns]
        return sum(found[0]), inside, sum(found[1]), sum(found[2])


def _owners(contents: Contents) -> dict[int, list[str]]:
    """The modules of every tensor that is held by more than one, or twice by one."""
    if len({*map(id, contents.tensors)}) == len(contents.tensors):
        return {}
    found: dict[int, list[str]] = {}
    for path, module in contents.named:
        for _, tensor in tensors_of(module):
            found.setdefault(id(tensor), []).append(path)
    return {key: paths for key, paths in found.items() if len(paths) > 1}


def _aliases(contents: Contents) -> dict[int, list[str]]:
    """The other names of all modules that have some."""
    numbers = {module: number for number, module in enumerate(contents.modules)}
    names: dict[int, list[str]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", contents.model)]
    while waiting:
        path, module = waiting.pop()
        names.setdefault(numbers[module], []).append(path)
        children = [(join(path, n), m) for n, m in module._modules.items() if m is not None]
        waiting += children[::-1]
    return {number: found[1:] for number, found in names.items() if len(found) > 1}
