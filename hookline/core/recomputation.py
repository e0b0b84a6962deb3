"""Which call is being recomputed: activation checkpointing runs a module again in the backward.

- `Regions`: the calls of one site inside checkpointed regions, and which of them comes again
- `around_region(frame)`: if what is saved for the backward is for such a region, what it is in
- `running(frame)`: the modules that run
- `awaited(what)`: the error if such a region will run again when that is too late
- `in_backward()`: the number of the backward that runs in this thread, or -1
- `at_end(function)`: call a function at the end of the backward that is running
- `saving(True)`: the saved-tensor hooks that are in force, if any
- `CALL`: the code of the frame in which torch calls a module, with its hooks

A region is known by an object of torch's that lives as long as its graph: the frame of a
non-reentrant checkpoint, or the `ctx` of a reentrant one (or of any other autograd function that
calls modules in its forward and again in its backward). It is found on the Python stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import checkpoint

from hookline.errors import ChangeError

__all__ = [
    "CALL", "Regions", "around_region", "at_end", "awaited", "in_backward", "running", "saving",
]  # fmt: skip

in_backward: Callable[[], int] = torch._C._current_graph_task_id
CALL = nn.Module._call_impl.__code__
_autograd = cast(Any, torch._C)._autograd
saving: Callable[[bool], Any] = getattr(
    _autograd, "_top_saved_tensors_default_hooks", lambda ignored: None
)


def at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running."""
    engine: Any = cast(Any, torch.autograd.Variable)._execution_engine
    engine.queue_callback(function)


class Regions:
    """The calls of one site inside checkpointed regions, and which of them comes again."""

    hidden = False  # whether one began inside the module's own call: it comes again without that

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        # Of each region that was recomputed: in which backward, and how many calls of it.
        self._again: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def note(self, index: int, changing: bool) -> None:
        """A call was numbered: remember it for the regions in which it ran.

        One that is to be changed may be of an operation, inside the module's own call.
        """
        if torch.is_grad_enabled() and saving(True) is None:
            return  # neither kind of checkpointing
        for region in [region for region, recomputing in _running() if not recomputing]:
            self._calls.setdefault(region, []).append(index)
        for region, _ in _running(within=True) if changing else ():
            # Without gradients nothing is saved, there are no next nodes, and nothing comes again.
            own = getattr(region, "_forward_cls", None) is checkpoint.CheckpointFunction
            self.hidden |= region in _saved() or (own and bool(region.next_functions))

    def again(self) -> int | None:
        """In a backward: the number of the call that runs again; None if no region is known."""
        task = in_backward()
        for region, recomputing in reversed(_running()):
            if recomputing and region in self._calls:
                last, count = self._again.get(region, (-1, 0))
                count = count if last == task else 0
                self._again[region] = task, count + 1
                calls = self._calls[region]
                return calls[count] if count < len(calls) else None
        return None

    def awaiting(self) -> bool:
        """Whether a region that may still be recomputed has not been so far."""
        # torch ends a recomputation early: the site's module may not have come again.
        done = {id(region) for region in self._calls if getattr(region, "is_recomputed", None)}
        return self.hidden or any(r not in self._again and id(r) not in done for r in self._calls)


def _running(within: bool = False) -> list[tuple[Any, bool]]:
    """The regions that run now, the outermost first, and whether they are being recomputed; or
    only those that began within the innermost call of a module.
    """
    found: list[tuple[Any, bool]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (within and frame.f_code is CALL):
        code = frame.f_code
        if code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, torch._C._FunctionBase):
                found.append((ctx, code.co_name == "backward"))
        elif code.co_filename == checkpoint.__file__:
            if code.co_name == "unpack_hook":
                found.append((frame.f_locals["frame"], True))
            elif "gen" in frame.f_locals:  # suspended while the region runs
                inside = frame.f_locals["gen"].gi_frame.f_locals
                if "new_frame" in inside:  # else gradients are off: nothing will run again
                    found.append((inside["new_frame"], False))
        frame = frame.f_back
    found.reverse()
    if saving(True) is not None and not within:  # those made of hooks on modules are on no stack
        known = [region for region, _ in found]
        found += [(region, False) for region in _saved() if region not in known]
    return found


def awaited(what: str) -> ChangeError:
    """The error if what was done inside a region will be undone before that runs again."""
    found = "The backward will recompute that, and would do so without the change."
    remedy = "Run the backward before this ends, use torch.no_grad(), or checkpoint whole modules."
    return ChangeError(f"{what} inside a checkpointed region.", found, remedy)


def around_region(frame: FrameType) -> set[int] | None:
    """If what is saved now, seen from this frame, is for a region: the modules that run, by id."""
    near = [frame, frame.f_back, frame.f_back and frame.f_back.f_back]  # torch's stand between
    inside = any(one and one.f_code.co_filename == checkpoint.__file__ for one in near)
    return running(frame) if inside else None


def running(frame: FrameType | None) -> set[int]:
    """The modules that run, seen from this frame, by id."""
    found: set[int] = set()
    while frame is not None:
        if frame.f_code is CALL:
            found.add(id(frame.f_locals["self"]))
        frame = frame.f_back
    return found


def _saved() -> list[Any]:
    """The regions whose saved-tensor hooks are in force, the outermost first."""
    top = saving(True)
    if top is None:
        return []
    _autograd._pop_saved_tensors_default_hooks()  # only the top can be seen
    try:
        found = _saved()
    finally:
        _autograd._push_saved_tensors_default_hooks(*top)
    pack = top[0]
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if names == ("frame",) and pack.__module__ == checkpoint.__name__:
        found.append(pack.__closure__[0].cell_contents)
    return found
