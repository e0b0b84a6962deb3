"""What a run has shown of each module of a model, written into rows when they are read.

- `Ledger(sizes, tree, backward)`: the calls of a run, by module
"""

from __future__ import annotations

from typing import Any

import torch

from hookline.costs.call_trees import CallTree, Step
from hookline.costs.footprints import Footprint, footprint_of
from hookline.costs.sizes import Sizes
from hookline.costs.summaries import ModuleCosts

__all__ = ["Ledger"]


class Ledger:
    """The calls of a run, by module; no module is kept.

    Args:
        sizes: what the modules hold.
        tree: the calls, all of which are over.
        backward: whether there was a backward.
    """

    def __init__(self, sizes: Sizes, tree: CallTree, backward: bool) -> None:
        self.places = sizes.places
        self._sizes, self._steps, self._backward = sizes, tree.steps, backward
        self._outside = tree.outside, tree.outside_backward
        self._callable = {*tree.numbers.values()}
        self._names = tree.first_names()
        self._calls: dict[int, list[int]] = {}  # the positions of the steps of each module
        for position, step in enumerate(tree.steps):
            self._calls.setdefault(step.number, []).append(position)
        self._flops = [step.flops for step in tree.steps]
        self._known: dict[Any, Footprint] = {}  # most values in a model are alike
        self._texts: dict[torch.Size, str] = {}

    def totals(self) -> dict[str, float]:
        """What it is in all."""
        kept = 0
        for position, step in enumerate(self._steps):
            if step.made is not None and step.after <= position + 1:  # it called no other
                kept += footprint_of(step.made, self._known).bytes
        found: dict[str, float] = {"called": len(self._calls), "activation_bytes": kept}
        found["flops"] = sum(self._flops) + self._outside[0]
        if self._backward:
            found["backward_flops"] = sum([s.backward for s in self._steps]) + self._outside[1]
        return found

    def make_row(self, number: int) -> ModuleCosts:
        """What is told of a module, by its number in the order of `walk`."""
        row, positions = self._sizes.make_row(number), self._calls.get(number, ())
        if number in self._callable:
            row.called = bool(positions)  # of a ModuleList it is not told: it cannot be
        row.calls = len(positions)
        row.own_flops = sum([self._flops[position] for position in positions])
        row.flops = row.activation_bytes = 0
        if self._backward:
            row.own_backward_flops = sum([self._steps[position].backward for position in positions])
            row.backward_flops = 0
        until = 0
        for position in positions:
            step = self._steps[position]
            if position >= until:  # of a recursive module, the outermost call has the FLOPs of all
                until = max(step.after, position + 1)
                row.flops += sum(self._flops[position:until])
                if self._backward:
                    row.backward_flops += sum([s.backward for s in self._steps[position:until]])
            self._add_output(row, step)
        if positions:
            row.inputs = self._inputs_of(number, self._steps[positions[0]])
        return row

    def _add_output(self, row: ModuleCosts, step: Step) -> None:
        if step.made is not None:
            shapes, size, dtype = footprint_of(step.made, self._known)
            row.activation_bytes += size
            if row.dtype is None:
                row.output, row.dtype = shapes, dtype
            elif row.output != shapes:
                row.varies = True

    def _inputs_of(self, number: int, step: Step) -> Any:
        """The shapes of the arguments of a call by name."""
        shape = step.given
        if type(shape) is not torch.Size:
            return shape
        if shape not in self._texts:  # there are few in a model
            self._texts[shape] = str(tuple(shape))
        return {self._names[number]: self._texts[shape]}
