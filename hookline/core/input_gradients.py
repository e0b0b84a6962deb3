"""What flows out of a module's inputs: the part of the gradient that the module itself sends back.

- `note_inputs` (before the call), `watch_inputs`: the gradients at inputs, however they were passed

Hooks are put on the nodes inside the module that lead to the inputs, which are found by a walk
back from its outputs; for an edit, on a gate in the input's place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookline.core import arguments, gradients
from hookline.core.arms import Arm, handles, pass_on
from hookline.core.gradients import Edge, is_gate, made_since
from hookline.errors import GradientNotAvailable
from hookline.values.nested import Path, leaves, set_part

if TYPE_CHECKING:
    from hookline.core.taps import Frame, Tap

__all__ = ["note_inputs", "watch_inputs"]

INPUT_CHANGED = (
    "the module changed a view in place that it was given: the gradient cannot be reached.",
    "Ask for the gradient at the module that made the view.",
)
NO_PATH = (
    "no gradient flows from the module's outputs to this input.",
    "Ask for an input that the outputs depend on.",
)


def note_inputs(
    tap: Tap, module: nn.Module, args: Any, kwargs: Any, frame: Frame
) -> tuple[Any, Any] | None:
    """Before a call: note the gradient edges of its inputs, since in-place modules move them.

    For an edit, returns the arguments with a gate in place of each tensor.
    """
    try:
        value = arguments.read(module, args, kwargs, tap.target)
    except LookupError as error:
        frame.edges = (*frame.edges, (tap, None, f"{error}.", {}))
        return None
    found = gradients.grouped(value) if torch.is_grad_enabled() else []
    wanted: dict[Edge, Path] = {}
    for tensor, paths in found:
        if tap.replaces:
            node: Any = tensor.grad_fn
            if not is_gate(node, frame.serial):
                gate: Tensor = gradients.alias(tensor)
                node = gradients.mark_gate(gate, frame.serial)
                for path, other in list(leaves((args, kwargs))):
                    if other is tensor:
                        args, kwargs = set_part((args, kwargs), path, gate)
                frame.gates = (*frame.gates, (gate, gate._version))
            wanted[node, 0] = paths[0]
        else:
            wanted[_edge(tensor)] = paths[0]
    frame.edges = (*frame.edges, (tap, value, found, wanted))
    return (args, kwargs) if tap.replaces and found else None


def _edge(tensor: Tensor) -> Edge:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    try:
        edge = get_gradient_edge(tensor)
    except AssertionError:  # a view that an autograd function returned in a list has no edge
        return None, -1
    return edge.node, edge.output_nr


def watch_inputs(tap: Tap, output: Any, index: int, frame: Frame) -> None:
    """After a call: hook the nodes inside the module that lead to its inputs."""
    _, value, found, wanted = next(noted for noted in frame.edges if noted[0] is tap)
    if isinstance(found, str):
        tap.missing(index, found)
        return
    if frame.recomputed:
        gradients.note_recomputed(tap, index)
    tap.expect(value, index, found)
    if not wanted and not found:
        tap.explain(index, *gradients.without(value))
        return
    if any(gate._version != version for gate, version in frame.gates):
        asked = f"The gradient at {str(tap.place)!r} cannot be changed:"
        remedy = "Change grad_output of the module that made the input, or of this module."
        raise GradientNotAvailable(asked, "the module changes its input in place.", remedy)
    tensors = gradients.tensors_in(output)
    views = _views_of_older(tensors, frame)
    for node, _ in [edge for edge in wanted if is_gate(edge[0], frame.serial)]:
        arm = Arm(tap, index, wanted.pop((node, _)))
        if views:
            tap.guard(arm, *views)
        arm.watch_gate(tap, node)
    if wanted:
        inputs = {paths[0]: tensor for tensor, paths in found}
        _watch_paths(tap, tensors, views, index, wanted, inputs, frame)


def _watch_paths(
    tap: Tap,
    tensors: list[Tensor],
    views: list[Tensor],
    index: int,
    wanted: dict[Edge, Path],
    inputs: dict[Path, Tensor],
    frame: Frame,
) -> None:
    # Of a view that was changed in place, only what came before the change leads to the old node.
    for edge, tensor in [(edge, inputs[path]) for edge, path in wanted.items()]:
        if tensor._is_view() and tensor.grad_fn is not edge[0]:
            tap.explain(index, *INPUT_CHANGED, path=wanted.pop(edge))
    for edge in wanted.keys() & {_edge(tensor) for tensor in tensors}:
        tap.explain(index, *gradients.PASSED_ON, path=wanted.pop(edge))
    stops = {(node, output_nr) for _, node, output_nr, _ in frame.given}
    grouped: dict[Any, list[tuple[int, Arm]]] = {}
    starts = [tensor.grad_fn for tensor in tensors]
    reached: set[Path] = set()
    # Autocast keeps the casts of leaves for all modules that use them: they are looked through.
    casts = torch.is_autocast_cache_enabled() and any(
        tensor.is_leaf and torch.is_autocast_enabled(tensor.device.type)
        for tensor, *_ in frame.given
    )
    found = gradients.leading(starts, wanted, stops, frame.sequence, casts)
    for node, position, path in found:
        if path in reached:
            tap.several(index, path)
        reached.add(path)
        arm = Arm(tap, index, path)
        if casts:
            arm.dtype = inputs[path].dtype
        if views:
            tap.guard(arm, *views)
        grouped.setdefault(node, []).append((position, arm))
    for node, arms in grouped.items():
        if is_gate(node, frame.serial):
            arms[0][1].watch_gate(tap, node)
        else:
            handles(tap).add(node, partial(pass_on, arms))
    if () in {*wanted.values()} - reached:  # of another path, None says that none flows
        tap.explain(index, *NO_PATH)


def _views_of_older(tensors: list[Tensor], frame: Frame) -> list[Tensor]:
    """Outputs that are views of something older: in-place changes take their nodes away."""
    start = frame.sequence
    return [t for t in tensors if t._base is not None and not made_since(t._base.grad_fn, start)]
