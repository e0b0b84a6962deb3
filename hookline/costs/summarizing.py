"""Measure the costs of each module of a model: parameters, activations, FLOPs, time.

- `summarize(model, batch)`: run a model once and return the costs of each module → `Summary`
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hookline.costs.call_costs import CallCosts
from hookline.costs.call_tree import CallTree
from hookline.costs.flop_counter import FlopCounter
from hookline.costs.flop_formulas import is_ordinary
from hookline.costs.footprints import size_of
from hookline.costs.module_sizes import (
    ModuleSizes,
    copy_uninitialized,
    has_uninitialized,
    model_sizes,
)
from hookline.costs.summary import Summary
from hookline.errors import BatchError
from hookline.isolation.backward import (
    backward_roots,
    backward_without_grads,
    check_differentiable,
    grad_mode,
    graph_nodes,
)
from hookline.isolation.batches import copy_batch, make_batch, needs_integers, shapes_error
from hookline.isolation.isolated_runs import Mode, isolated
from hookline.isolation.model_calls import check_model, run_model
from hookline.isolation.module_index import ModuleIndex
from hookline.isolation.random_state import cuda_devices
from hookline.torch_checks import require
from hookline.torch_private import any_global_hook, sequence_number
from hookline.values.conversions import as_dtype
from hookline.values.nested import leaves

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
    """Measure the costs of each module: parameters, shapes, memory, FLOPs and, if asked, time.

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
        time: whether to time the forward, and the backward if there is one: medians of three more
            runs.
        mode: "eval" or "train", to run the model so.
        dtype: of what is made for shapes. Without it, whole numbers are tried where the model
            turns out to want them.

    Afterwards the mode of every module, buffers, gradients, random numbers and the batch are as
    before, and no hook is left. A model with lazy modules is copied, and stays lazy.
    """
    check_model("summarize", model)
    require("operations", "flops")
    dtype = as_dtype(dtype, "summarize")
    if batch is None and (time or backward is not False):
        raise BatchError(
            f"What a {'backward' if backward is not False else 'run'} costs was asked for.",
            "There is no batch, so nothing runs.",
            "Give a batch or its shape, or leave out backward= and time=.",
        )
    if batch is None:
        return model_sizes(model)
    contents = ModuleIndex(model)
    if backward is not False:
        check_differentiable(contents.all_parameters)
    tensors = contents.tensors
    lazy = has_uninitialized(tensors)
    if lazy:
        model = copy_uninitialized(model, tensors)
        contents, tensors = ModuleIndex(model), []
    shortcuts = not any_global_hook() and is_ordinary(tensors)
    held = None if lazy else ModuleSizes(contents, dense=shortcuts)
    made, shapes = make_batch(model, batch, dtype)
    with isolated(contents, mode=mode), grad_mode(backward is not False):
        try:
            return _measured(contents, held, made, backward, time, shortcuts)
        except (RuntimeError, IndexError, TypeError) as error:
            if not shapes or not needs_integers(error):
                raise
            if dtype is not None or len(shapes) > 1:
                raise shapes_error(shapes, dtype, error) from error
        made, _ = make_batch(model, batch, torch.long)
        return _measured(contents, held, made, backward, time, shortcuts)


def _measured(
    contents: ModuleIndex,
    held: ModuleSizes | None,
    batch: Any,
    backward: bool | Loss,
    time: bool,
    shortcuts: bool,
) -> Summary:
    """Run a model once to count, and some more times if time is asked for."""
    model = contents.model
    device = next(iter(cuda_devices(model)), None)
    if device is not None:
        torch.cuda.reset_peak_memory_stats(device)
    tree, counter = _counted(contents, batch, backward, shortcuts)
    if tree.doubtful:  # a call raised and that was caught: not all was seen from there on
        tree, counter = _counted(contents, batch, backward, False)
    if held is None or not contents.is_current():  # the run has made some of it, or replaced it
        contents = ModuleIndex(model)
        held = ModuleSizes(contents)
        tree.renumber(contents.modules)
    calls = CallCosts(tree, held.places, backward is not False)
    summary = Summary(model, held, calls)
    summary.totals.update(calls.totals())
    if not callable(batch):  # what a function gives the model is not known
        summary.totals["input_bytes"] = sum(size_of(tensor) for _, tensor in leaves(batch))
    summary.totals["uncounted"] = counter.uncounted
    if device is not None:
        summary.totals["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    if time:
        timed = [_timed(model, batch, backward, device) for _ in range(_RUNS)]
        _fill_times(summary, timed, backward is not False)
    return summary


def _counted(
    contents: ModuleIndex, batch: Any, backward: bool | Loss, shortcuts: bool
) -> tuple[CallTree, FlopCounter]:
    """Run a model once, and count."""
    model, graded, batch = contents.model, backward is not False, copy_batch(batch)
    tree = CallTree(model, graded=graded, walked=contents.named)
    counter = FlopCounter(tree.count, shortcuts)
    tree.certain = counter.certain
    with tree, counter:
        output = run_model(model, batch)
        tree.ran = True
        if graded:
            backward_without_grads(_roots(output, backward))
    return tree, counter


# -- time -----------------------------------------------------------------------------------------


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
    """Return the seconds of each module in one run, forward and backward, with its calls."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for step in tree.steps:
        if step.parent is None or step.number not in step.parent.above():
            path = tree.places[step.number]
            forward[path] = forward.get(path, 0.0) + step.seconds
        for number in step.above() if step.backward else ():
            path = tree.places[number]
            backward[path] = backward.get(path, 0.0) + step.backward
    return forward, backward


# -- running --------------------------------------------------------------------------------------


def _roots(output: Any, backward: bool | Loss) -> list[Tensor]:
    """Return the tensors from which a backward starts."""
    if callable(backward):
        found: Any = backward(output)
    else:
        found = dict(leaves(output)).get(("loss",), output)
    return backward_roots(found)


def _timed(
    model: nn.Module, batch: Any, backward: bool | Loss, device: torch.device | None
) -> tuple[CallTree, float, float]:
    """Time one run: its calls, and the seconds of forward and backward."""

    def clock() -> float:
        if device is not None:
            torch.cuda.synchronize(device)
        return perf_counter()

    tree, batch = CallTree(model, clock), copy_batch(batch)
    with tree:
        start = clock()
        output = run_model(model, batch)
        middle = clock()
        if backward is False:
            return tree, middle - start, 0.0
        roots = _roots(output, backward)
        nodes = graph_nodes(roots)
        handles = [handle for node in nodes for handle in _watch(node, tree, clock)]
        middle, forward = clock(), middle - start
        try:
            backward_without_grads(roots, nodes)
        finally:
            for handle in handles:
                handle.remove()
        return tree, forward, clock() - middle


def _watch(node: Any, tree: CallTree, clock: Callable[[], float]) -> list[Any]:
    """Time one autograd node, for the call that made it."""
    step = None if hasattr(node, "variable") else tree.maker(sequence_number(node))
    if step is None:
        return []
    begun = [0.0]

    def begin(grad_mode: Any) -> None:
        begun[0] = clock()

    def end(inputs: Any, outputs: Any) -> None:
        step.backward += clock() - begun[0]

    return [node.register_prehook(begin), node.register_hook(end)]
