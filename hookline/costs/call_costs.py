"""Write the recorded calls of a run into the rows of a summary, when they are read.

- `CallCosts(tree, places, backward)`: the calls of a run, by module
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from hookline.costs.call_tree import CallNode, CallTree
from hookline.costs.footprints import footprint_of, show_shape
from hookline.costs.summary import ModuleCosts

__all__ = ["CallCosts"]


class CallCosts:
    """The calls of a run by module, without references to modules.

    Args:
        tree: the calls, all of which have ended.
        places: the places of the modules.
        backward: whether there was a backward.
    """

    def __init__(self, tree: CallTree, places: list[str], backward: bool) -> None:
        self._places = places
        self._steps, self._flops = tree.steps, [step.flops for step in tree.steps]
        self._backward: list[Any] | None = [s.backward for s in tree.steps] if backward else None
        self._outside = tree.outside, tree.outside_backward
        self._names = tree.first_names()  # of all modules that can be called
        self._elsewhere = {tree.numbers[m] for m in tree.elsewhere if m in tree.numbers}
        # The positions of the calls of each module: most have one.
        first = {step.number: (position,) for position, step in enumerate(tree.steps)}
        self._calls: dict[int, Sequence[int]] = {**first}
        if len(first) < len(tree.steps):
            self._calls = {number: [] for number in first}
            for position, step in enumerate(tree.steps):
                cast("list[int]", self._calls[step.number]).append(position)

    def totals(self) -> dict[str, Any]:
        """Return the sums over the whole run."""
        # Calls that called no other module.
        last = [s.made for position, s in enumerate(self._steps, 1) if s.after <= position]
        kept = [footprint_of(made).bytes for made in last if made is not None]
        found: dict[str, Any] = {"activation_bytes": sum(kept)}
        found["called"] = len(self._calls.keys() - {-1})  # not those that are gone
        found["elsewhere"] = [self._places[number] for number in sorted(self._elsewhere)]
        found["flops"] = sum(self._flops) + self._outside[0]
        if self._backward is not None:
            found["backward_flops"] = sum(self._backward) + self._outside[1]
        return found

    def fill(self, row: ModuleCosts, number: int) -> None:
        """Write the calls of a module into its row, by its number in the order of `walk`."""
        positions = self._calls.get(number, ())
        if number in self._names:
            # It stays unknown for a ModuleList, which cannot be called, and for other threads.
            row.called = bool(positions) or (None if number in self._elsewhere else False)
        row.calls = len(positions)
        flops = own = size = until = 0
        ranges: list[slice] = []
        for position in positions:
            step = self._steps[position]
            own += self._flops[position]
            if position >= until:  # of a recursive module, the outermost call has the FLOPs of all
                until = step.after or position + 1
                ranges.append(slice(position, until))
                flops += sum(self._flops[position:until])
            if step.made is not None:
                shapes, bytes_, dtype = footprint_of(step.made)
                size += bytes_
                if row.dtype is None:
                    row.output, row.dtype = shapes, dtype
                elif row.output != shapes:
                    row.varies = True
        row.flops, row.own_flops, row.activation_bytes = flops, own, size
        if positions:
            row.inputs = self._inputs_of(number, self._steps[positions[0]])
        if self._backward is not None:
            row.backward_flops = sum([sum(self._backward[inside]) for inside in ranges])
            row.own_backward_flops = sum([self._backward[position] for position in positions])

    def _inputs_of(self, number: int, step: CallNode) -> Any:
        """Return the shapes of the arguments of a call by name."""
        if isinstance(step.given, torch.Size):
            return {self._names[number]: show_shape(step.given)}
        return step.given
