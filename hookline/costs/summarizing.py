"""What each module of a model costs: parameters, activations, FLOPs, time.

- `summarize(model, batch)`: run a model once, and tell what each module costs → `Summary`
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core.nested import get_part, leaves
from hookline.core.tree import join, walk
from hookline.costs.call_trees import CallTree, size_of
from hookline.costs.flops import FlopCounter
from hookline.costs.summaries import ModuleCosts, Summary
from hookline.errors import BatchError
from hookline.trials.batches import make_batch, needs_whole_numbers, refused_shapes
from hookline.trials.runs import (
    Mode,
    copied,
    cuda_devices,
    nodes_of,
    pull_back,
    run,
    tensors_in,
    trial,
)

__all__ = ["summarize"]

Loss = Callable[[Any], Tensor]
_RUNS = 3  # that are timed


def summarize(
    model: nn.Module,
    batch: Any = None,
    *,
    backward: bool | Loss = False,
    time: bool = False,
    mode: Mode | None = None,
    dtype: torch.dtype | None = None,
) -> Summary:
    """Tell what each module costs: parameters, shapes, memory, FLOPs and, if asked, time.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> summary = summarize(model, (32, 8))
    >>> summary["0"].parameters, summary["0"].flops, summary.totals["flops"]
    (144, 8192, 12288)

    Args:
        model: any module. It runs in the mode in which it is, without gradients.
        batch: a tensor is the model's argument, a tuple or list are its arguments, a dict its
            arguments by name, a function is called with the model; anything else (a dataclass,
            say) is its argument. A tuple of whole numbers is a shape: a tensor of that shape, in
            the model's dtype and on its device, is made for it. Without a batch nothing runs, and
            only sizes are told.
        backward: whether to run a backward, too: from the output's `loss` if it has one, else
            from the sum of all outputs; or from what a function makes of the output.
        time: whether to time the forward, and the backward if there is one: the median of three
            more runs.
        mode: "eval" or "train", to run the model so.
        dtype: of what is made for shapes. Without it, whole numbers are tried where the model
            turns out to want them.

    Afterwards all is as before: the mode of every module, buffers, gradients, random numbers, the
    batch; no hook is left. A model with lazy modules is copied, and stays lazy.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"summarize was asked about a {type(model).__name__}. A model is a torch.nn.Module. "
            f"Give it first, then a batch or a shape."
        )
    if batch is None:
        return _sizes(model)
    if any(map(_lazy, tensors_in(model))):
        model = copy.deepcopy(model)
    made, shapes = make_batch(model, batch, dtype)
    with trial(model, mode=mode):
        try:
            return _measured(model, made, backward, time)
        except (RuntimeError, IndexError, TypeError) as error:
            if not shapes or not needs_whole_numbers(error):
                raise
            if dtype is not None or len(shapes) > 1:
                raise refused_shapes(shapes, dtype, error) from error
        made, _ = make_batch(model, batch, torch.long)
        return _measured(model, made, backward, time)


def _measured(model: nn.Module, batch: Any, backward: bool | Loss, time: bool) -> Summary:
    """Run a model once to count, and some more times if time is asked for."""
    tree = CallTree(model)
    counter = FlopCounter(tree.count)
    device = next(iter(cuda_devices(model)), None)
    if device is not None:
        torch.cuda.reset_peak_memory_stats(device)
    with tree, counter:
        tree.remembers = counter.remembers
        _run(model, batch, backward)
    summary = _sizes(model)
    _fill(summary, tree, backward is not False)
    summary.totals["input_bytes"] = sum(size_of(tensor) for _, tensor in leaves(batch))
    summary.totals["uncounted"] = counter.uncounted
    if device is not None:
        summary.totals["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if time:
        timed = [_timed(model, batch, backward, device) for _ in range(_RUNS)]
        _fill_times(summary, timed, backward is not False)
    return summary


# -- sizes ----------------------------------------------------------------------------------------


def _sizes(model: nn.Module) -> Summary:
    """What can be told without a run."""
    named = walk(model)
    names = _all_names(model)
    owners: dict[int, list[str]] = {}
    known: dict[int, _Size] = {}
    for path, module in named:
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None:
                    owners.setdefault(id(tensor), []).append(path)
                    known[id(tensor)] = _size(tensor, table is module._parameters)
    held: dict[int, set[int]] = {}
    rows: list[ModuleCosts] = []
    for path, module in reversed(named):  # children first
        row = ModuleCosts(path, type(module).__name__, path.count(".") + 1 if path else 0)
        own = [id(p) for p in module._parameters.values() if p is not None]
        for tensor in own:
            row.own_parameters += known[tensor][0]
            if len(owners[tensor]) > 1:
                others = [name for name in owners[tensor] if name not in (path, *row.shared_with)]
                row.shared_with = [*row.shared_with, *others]
        mine = set(own)
        mine.update([id(b) for b in module._buffers.values() if b is not None])
        for child in module._modules.values():
            mine |= held.get(id(child), _NONE)
        held[id(module)] = mine
        for tensor in mine:
            count, trainable, size, buffer = known[tensor]
            row.parameters += count
            row.trainable += trainable
            row.parameter_bytes += size
            row.buffer_bytes += buffer
        if len(names[id(module)]) > 1:
            row.aliases = names[id(module)][1:]
        rows.append(row)
    return Summary(type(model).__name__, rows[::-1])


_NONE: set[int] = set()
# Of a tensor: parameters, trainable ones, bytes as a parameter, bytes as a buffer.
_Size = tuple[int, int, int, int]


def _size(tensor: Tensor, is_parameter: bool) -> _Size:
    if _lazy(tensor):
        return 0, 0, 0, 0
    if not is_parameter:
        return 0, 0, 0, size_of(tensor)
    count = tensor.numel()
    return count, count if tensor.requires_grad else 0, size_of(tensor), 0


def _lazy(tensor: Tensor) -> bool:
    return type(tensor) not in (nn.Parameter, Tensor) and is_lazy(tensor)


def _all_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of every module, the first one first."""
    names: dict[int, list[str]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        names.setdefault(id(module), []).append(path)
        children = [(join(path, n), m) for n, m in module._modules.items() if m is not None]
        waiting += children[::-1]
    return names


# -- what a run has shown -------------------------------------------------------------------------


def _fill(summary: Summary, tree: CallTree, backward: bool) -> None:
    """Write into a summary what was counted in the calls."""
    kept = 0
    for row in summary.modules:
        row.called = False if row.place in tree.hooked else None  # a ModuleList cannot be
        row.calls = row.activation_bytes = row.flops = row.own_flops = 0
        row.backward_flops = row.own_backward_flops = 0 if backward else None
        row.inputs, row.output, row.dtype = tree.seen.get(row.place, (None, None, None))
        row.varies = row.place in tree.varies
    rows: dict[str, Any] = {row.place: row for row in summary.modules}
    for step in tree.steps:
        row = rows[step.path]
        row.called, row.calls = True, row.calls + 1
        row.activation_bytes += step.bytes
        row.own_flops += step.flops
        kept += 0 if step.inner else step.bytes
        if backward:
            row.own_backward_flops += step.backward
        if step.flops or step.backward:
            for place in step.above():
                rows[place].flops += step.flops
                if backward:
                    rows[place].backward_flops += step.backward
    forward = tree.outside + sum(step.flops for step in tree.steps)
    back = tree.outside_backward + sum(int(step.backward) for step in tree.steps)
    summary.totals.update(activation_bytes=kept, flops=forward)
    summary.totals["backward_flops"] = back if backward else None
    summary.totals["called"] = sum(bool(row.called) for row in rows.values())


def _fill_times(
    summary: Summary, timed: list[tuple[CallTree, float, float]], backward: bool
) -> None:
    """Write into a summary the medians of some runs."""
    found = [_times(tree) for tree, _, _ in timed]
    for row in summary.modules:
        if row.called:
            row.seconds = median(forward.get(row.place, 0.0) for forward, _ in found)
            if backward:
                row.backward_seconds = median(back.get(row.place, 0.0) for _, back in found)
    summary.totals["seconds"] = median(forward for _, forward, _ in timed)
    if backward:
        summary.totals["backward_seconds"] = median(back for _, _, back in timed)


def _times(tree: CallTree) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of each module in one run, forward and backward, with all that it calls."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for step in tree.steps:
        if step.parent is None or step.path not in step.parent.above():
            forward[step.path] = forward.get(step.path, 0.0) + step.seconds
        for place in step.above() if step.backward else ():
            backward[place] = backward.get(place, 0.0) + step.backward
    return forward, backward


# -- running --------------------------------------------------------------------------------------


def _run(model: nn.Module, batch: Any, backward: bool | Loss) -> None:
    with torch.set_grad_enabled(backward is not False):
        output = run(model, copied(batch))
        if backward is not False:
            roots = _roots(output, backward)
            pull_back(roots)


def _roots(output: Any, backward: bool | Loss) -> list[Tensor]:
    """The tensors from which a backward starts."""
    found: Any = output
    if callable(backward):
        found = backward(output)
    else:
        with_loss = dict(leaves(output)).get(("loss",))
        found = output if with_loss is None else get_part(output, ("loss",))
    roots = [tensor for _, tensor in leaves(found) if tensor.requires_grad]
    if not roots:
        raise BatchError(
            "A backward was asked for.",
            "Nothing that the model returned has a gradient.",
            "Let a parameter or the batch require grad, or leave out backward=.",
        )
    return roots


def _timed(
    model: nn.Module, batch: Any, backward: bool | Loss, device: torch.device | None
) -> tuple[CallTree, float, float]:
    """One run with a clock: its calls, and the seconds of forward and backward."""

    def clock() -> float:
        if device is not None:
            torch.cuda.synchronize(device)
        return perf_counter()

    tree, batch = CallTree(model, clock), copied(batch)
    with tree, torch.set_grad_enabled(backward is not False):
        start = clock()
        output = run(model, batch)
        middle = clock()
        if backward is False:
            return tree, middle - start, 0.0
        roots = _roots(output, backward)
        nodes = nodes_of(roots)
        handles = [handle for node in nodes for handle in _watch(node, tree, clock)]
        middle, forward = clock(), middle - start
        try:
            pull_back(roots, nodes)
        finally:
            for handle in handles:
                handle.remove()
        return tree, forward, clock() - middle


def _watch(node: Any, tree: CallTree, clock: Callable[[], float]) -> list[Any]:
    """Time one node, for the call that made it."""
    step = None if hasattr(node, "variable") else tree.maker(node._sequence_nr())
    if step is None:
        return []
    begun = [0.0]

    def begin(gradients: Any) -> None:
        begun[0] = clock()

    def end(inputs: Any, outputs: Any) -> None:
        step.backward += clock() - begun[0]

    return [node.register_prehook(begin), node.register_hook(end)]
