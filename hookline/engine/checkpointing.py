"""Activation checkpointing: find out which call a backward runs again.

- `Regions`: the calls of one module inside checkpointed regions, and which of them runs again
- `FirstRun`: one of these calls
- `may_run_again()`: True if a backward may run again what runs now
- `around_region(frame)`: the ids of the running modules, if torch saves for a checkpoint now
- `running_modules(frame)`: the ids of the running modules
- `undone_too_early(what)`: the error if a region will run again when a change in it is undone

A module inside a region is called twice: in the forward and, with the same values and in the same
order, in the backward. A call is noted for its regions when it begins (`note`); a call inside a
backward gets the number of the one that it repeats (`next_repeated`). A non-reentrant region makes
its graph in the forward, where its gradients are hooked, and torch ends its recomputation early, so
that the last calls may not come again. A reentrant region runs without gradients in the forward;
the graph, and what is hooked, is that of the recomputation.

A region is known by an object of torch's that lives as long as its graph: the frame of a
non-reentrant checkpoint, or the `ctx` of a reentrant one (or of any other autograd function that
calls modules in its forward and again in its backward). It is found on the Python stack.
"""

from __future__ import annotations

import sys
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from hookline.errors import ChangeError
from hookline.torch_checks import require
from hookline.torch_private import (
    CALL_CODE,
    autograd_function,
    backward_id,
    checkpoint_code,
    region_of,
    regions_on_stack,
    saved_tensor_hooks,
    saved_tensor_hooks_set_aside,
)

__all__ = [
    "FirstRun",
    "Regions",
    "around_region",
    "may_run_again",
    "running_modules",
    "undone_too_early",
]


def may_run_again() -> bool:
    """Return True if a backward may run again what runs now.

    Reentrant checkpoints run without gradients; all others set hooks for saved tensors.
    """
    return not torch.is_grad_enabled() or saved_tensor_hooks(True) is not None


class FirstRun:
    """A call in a checkpointed region, which a backward may run again."""

    __slots__ = ("had_graph", "number")

    def __init__(self, number: int | None = None, had_graph: bool = True) -> None:
        self.number = number  # None until the call is complete
        self.had_graph = (
            had_graph  # whether it ran with gradients: then its graph is the one in use
        )


class Regions:
    """The calls of one module inside checkpointed regions, and which of them runs again."""

    def __init__(self) -> None:
        # The calls in each region, in the order in which they began, as in the recomputation.
        self._calls: WeakKeyDictionary[Any, list[FirstRun]] = WeakKeyDictionary()
        # Of each region that was recomputed: in which backward, and how many calls of it.
        self._progress: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        # Whether a region began inside a call: the recomputation passes by the module itself.
        self._began_inside = False

    def note(self, changing: bool) -> FirstRun:
        """Remember a call that begins, for the regions in which it runs.

        `changing` is true if the call may be changed, perhaps by an operation inside it.
        """
        call = FirstRun(had_graph=torch.is_grad_enabled())
        for region in [region for region, recomputing in _running_regions() if not recomputing]:
            self._calls.setdefault(region, []).append(call)
        if changing and not self._began_inside:
            self._began_inside = any(map(_will_run, _running_regions(within=True)))
        return call

    def gives_graph_later(self, number: int) -> bool:
        """Return True if a call ran without a graph, which its recomputation makes."""
        # Of the kinds of regions, only the `ctx` of an autograd function has next nodes.
        known = list(self._calls.items())  # other threads may add to it
        again = [calls for region, calls in known if getattr(region, "next_functions", ())]
        return any(one.number == number and not one.had_graph for calls in again for one in calls)

    def next_repeated(self) -> FirstRun | None:
        """Count a call that a backward runs again; return its first run, if the region is known."""
        task = backward_id()
        for region, recomputing in reversed(_running_regions()):
            if recomputing and region in self._calls:
                last, count = self._progress.get(region, (-1, 0))
                count = count if last == task else 0
                self._progress[region] = task, count + 1
                calls = self._calls[region]
                return calls[count] if count < len(calls) else None
        return None

    def is_recomputing(self) -> bool:
        """Return True if one of the regions runs again now."""
        return any(again and region in self._calls for region, again in _running_regions())

    def has_pending(self) -> bool:
        """Return True if a region that may run again has not done so."""
        # torch ends a recomputation early: the module may not have been called again.
        known = list(self._calls)  # other threads may add to it
        done = {id(region) for region in known if getattr(region, "is_recomputed", None)}
        return self._began_inside or any(
            region not in self._progress and id(region) not in done for region in known
        )


def _will_run(running: tuple[Any, bool]) -> bool:
    """Return True if a backward will run a region again that began within a call."""
    region, _ = running
    # Without gradients nothing is saved, there are no next nodes, and nothing comes again.
    reentrant = autograd_function(region) is checkpoint.CheckpointFunction
    return region in _saved() or (reentrant and bool(region.next_functions))


def _running_regions(within: bool = False) -> list[tuple[Any, bool]]:
    """Return the regions that run, the outermost first, and whether they run again.

    With `within`, only those that began within the innermost call of a module.
    """
    found = regions_on_stack(sys._getframe(1), within)
    if saved_tensor_hooks(True) is not None and not within:
        # Those made of hooks on modules are on no stack.
        known = [region for region, _ in found]
        found += [(region, False) for region in _saved() if region not in known]
    return found


def undone_too_early(what: str) -> ChangeError:
    """Return the error if a change inside a region is undone before the region runs again."""
    found = "The backward will recompute that, and would do so without the change."
    remedy = "Run the backward before this ends, use torch.no_grad(), or checkpoint whole modules."
    return ChangeError(f"{what} inside a checkpointed region.", found, remedy)


def around_region(frame: FrameType) -> set[int] | None:
    """Return the ids of the modules that run, if what is saved now is for a region."""
    near = [frame, frame.f_back, frame.f_back and frame.f_back.f_back]  # torch's stand between
    inside = any(one and checkpoint_code(one.f_code) for one in near)
    return running_modules(frame) if inside else None


def running_modules(frame: FrameType | None) -> set[int]:
    """Return the ids of the modules that run, seen from a frame."""
    frames = walk_stack(frame) if frame is not None else ()
    return {id(one.f_locals["self"]) for one, _ in frames if one.f_code is CALL_CODE}


def _saved() -> list[Any]:
    """Return the regions whose saved-tensor hooks are in force, the outermost first."""
    top = saved_tensor_hooks(True)
    if top is None:
        return []
    require("checkpointing")
    with saved_tensor_hooks_set_aside(top):  # only the innermost can be seen
        found = _saved()
    region = region_of(top[0])
    return found if region is None else [*found, region]
