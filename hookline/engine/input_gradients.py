"""What flows out of a module's inputs: the part of the gradient that the module itself sends back.

- `note_inputs` (before the call), `watch_inputs`: the gradients at inputs, however they were passed
- `Noted`, `Argument`: what is noted in between

Hooks are put on the nodes inside the module that lead to the inputs, which are found by a walk
back from its outputs; for an edit, on a gate in the input's place. One tensor that was passed for
several arguments has one edge in the graph: only gates, one for each argument, tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookline.engine import arguments, gradients
from hookline.engine.gradients import Edge, gate_of, is_gate, made_since
from hookline.engine.tensor_hooks import Arm, handles, pass_on
from hookline.errors import GradientNotAvailable
from hookline.torch_private import base_of, is_view, version_of
from hookline.values.nested import Path, children, leaves, set_part, show_path

if TYPE_CHECKING:
    from hookline.engine.handlers import Frame, Tap

__all__ = ["Argument", "Noted", "note_inputs", "watch_inputs"]

INPUT_CHANGED = (
    "the module changed a view in place that it was given: the gradient cannot be reached.",
    "Ask for the gradient at the module that made the view.",
)
NO_PATH = (
    "no gradient flows from the module's outputs to this input.",
    "Ask for an input that the outputs depend on.",
)


class Argument:
    """A tensor that a call was given, and the paths where it stands."""

    __slots__ = ("paths", "tensor")

    def __init__(self, tensor: Tensor, paths: list[Path]) -> None:
        self.tensor, self.paths = tensor, paths


class Noted:
    """What is noted of a call before it begins, for one tap."""

    __slots__ = ("gates", "place", "problem", "tap", "tensors", "value", "wanted")

    def __init__(self, tap: Tap, value: Any = None, problem: str = "") -> None:
        self.tap, self.value, self.problem = tap, value, problem
        self.tensors: list[tuple[Tensor, Path]] = []  # that are asked for, with paths in the value
        # Where the value stands in the bound arguments, if some tensor stands at several paths
        # there; else paths are those in the value.
        self.place: Path = ()
        self.wanted: dict[Edge, Argument] = {}  # how the tensors are found in the graph
        self.gates: list[tuple[Path, Tensor, int]] = []  # with the path in the value, and version

    def own(self, paths: list[Path]) -> list[Path]:
        """Those of these paths that are in the value, as paths in the value."""
        depth = len(self.place)
        return [path[depth:] for path in paths if path[:depth] == self.place]


def note_inputs(
    tap: Tap, module: nn.Module, args: Any, kwargs: Any, frame: Frame
) -> tuple[Any, Any] | None:
    """Before a call: note the gradient edges of its inputs, since in-place modules move them.

    For an edit, returns the arguments with a gate in place of each tensor that is asked for.
    """
    try:
        value = arguments.read(module, args, kwargs, tap.target)
    except LookupError as error:
        frame.edges = (*frame.edges, Noted(tap, None, f"{error}."))
        return None
    noted = Noted(tap, value)
    frame.edges = (*frame.edges, noted)
    if torch.is_grad_enabled():
        found = gradients.grouped(value)
        noted.tensors = [(tensor, path) for tensor, paths in found for path in paths]
    if not noted.tensors:
        return None
    uses = _shared(module, args, kwargs) if _may_share(args, kwargs) else {}
    if uses:
        noted.place = arguments.locate(module, args, kwargs, tap.target)
    for tensor, path in noted.tensors:
        edge, here = _edge(tensor), (*noted.place, *path)
        argument = noted.wanted.setdefault(edge, Argument(tensor, uses.get(edge, [])))
        if here not in argument.paths:
            argument.paths.append(here)
    return _put_gates(noted, module, args, kwargs, frame)


def _may_share(args: Any, kwargs: Any) -> bool:
    """Whether one tensor may stand at several places in the arguments of a call."""
    seen: set[int] = set()
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor):
            if children(value) is not None:
                return True
        elif id(value) in seen:
            return True
        else:
            seen.add(id(value))
    return False


def _shared(module: nn.Module, args: Any, kwargs: Any) -> dict[Edge, list[Path]]:
    """The edges of the tensors that stand at several paths in the bound arguments, with these."""
    found: dict[Edge, list[Path]] = {}
    for path, tensor in leaves(arguments.bind(module, args, kwargs)):
        if tensor.requires_grad and gradients.is_usable(tensor):
            found.setdefault(_edge(tensor), []).append(path)
    return {edge: paths for edge, paths in found.items() if len(paths) > 1}


def _edge(tensor: Tensor) -> Edge:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    try:
        edge = get_gradient_edge(tensor)
    except AssertionError:  # a view that an autograd function returned in a list has no edge
        return None, -id(tensor)
    return edge.node, edge.output_nr


def _put_gates(
    noted: Noted, module: nn.Module, args: Any, kwargs: Any, frame: Frame
) -> tuple[Any, Any] | None:
    """The arguments with gates: for an edit one for each tensor that is asked for."""
    tap, value, wanted = noted.tap, noted.value, dict[Edge, Argument]()
    for tensor, path in noted.tensors:
        edge = _edge(tensor)
        argument, here = noted.wanted[edge], (*noted.place, *path)
        several = len(argument.paths) > 1
        if not (tap.replaces or (several and tap.separates)):
            wanted[edge] = argument
            continue
        if several or not is_gate(edge[0], frame.serial):
            gate: Tensor = gradients.alias(tensor)
            edge = gradients.mark_gate(gate, frame.serial, here), 0
            value = set_part(value, path, gate)
            noted.gates.append((path, gate, version_of(gate)))
        wanted[edge] = Argument(tensor, [here])
    noted.wanted = wanted
    return arguments.write(module, args, kwargs, tap.target, value) if noted.gates else None


def watch_inputs(tap: Tap, output: Any, index: int, frame: Frame) -> None:
    """After a call: hook the nodes inside the module that lead to its inputs."""
    noted: Noted = next(one for one in frame.edges if one.tap is tap)
    if noted.problem:
        tap.missing(index, noted.problem)
        return
    if frame.recomputed:
        gradients.note_recomputed(tap, index)
    tap.expect(noted.value, index, [(tensor, [path]) for tensor, path in noted.tensors])
    if not noted.tensors:
        tap.explain(index, *gradients.without(noted.value))
        return
    changed = [path for path, gate, version in noted.gates if version_of(gate) != version]
    if changed and tap.replaces:
        asked = f"The gradient at {str(tap.place)!r} cannot be changed:"
        remedy = "Change grad_output of the module that made the input, or of this module."
        raise GradientNotAvailable(asked, "the module changes its input in place.", remedy)
    tensors = gradients.tensors_in(output)
    views = _views_of_older(tensors, frame)
    rest: dict[Edge, Argument] = {}
    for edge, argument in noted.wanted.items():
        if len(argument.paths) > 1 or not is_gate(edge[0], frame.serial):
            rest[edge] = argument
            continue
        (path,) = noted.own(argument.paths)
        if path in changed:
            tap.explain(index, *INPUT_CHANGED, path=path)
            continue
        arm = Arm(tap, index, path)
        if views:
            tap.guard(arm, *views)
        arm.watch_gate(tap, edge[0])
    noted.wanted = rest
    if rest:
        _watch_paths(noted, tensors, views, index, frame)


def _watch_paths(
    noted: Noted, tensors: list[Tensor], views: list[Tensor], index: int, frame: Frame
) -> None:
    tap, wanted = noted.tap, noted.wanted
    _refuse_moved(noted, tensors, index)
    stops = {(node, output_nr) for _, node, output_nr, _ in frame.given}
    grouped: dict[Any, list[tuple[int, Arm]]] = {}
    starts = [tensor.grad_fn for tensor in tensors]
    reached: set[Path] = set()
    # Autocast keeps the casts of leaves for all modules that use them: they are looked through.
    casts = torch.is_autocast_cache_enabled() and any(
        tensor.is_leaf and torch.is_autocast_enabled(tensor.device.type)
        for tensor, *_ in frame.given
    )
    found = gradients.leading(starts, {e: e for e in wanted}, stops, frame.sequence, casts)
    for node, position, path, tensor in _told_apart(noted, found, index, frame):
        if path in reached:
            tap.several(index, path)
        reached.add(path)
        arm = Arm(tap, index, path)
        if casts:
            arm.dtype = tensor.dtype
        if views:
            tap.guard(arm, *views)
        grouped.setdefault(node, []).append((position, arm))
    for node, arms in grouped.items():
        if is_gate(node, frame.serial):
            arms[0][1].watch_gate(tap, node)
        else:
            handles(tap).add(node, partial(pass_on, arms))
    # Of another path, None says that none flows.
    if () in {path for one in wanted.values() for path in noted.own(one.paths)} - reached:
        tap.explain(index, *NO_PATH)


def _refuse_moved(noted: Noted, tensors: list[Tensor], index: int) -> None:
    """Explain what cannot be had of inputs that are changed views, or are among the outputs."""
    returned = {_edge(tensor) for tensor in tensors}
    for edge, argument in list(noted.wanted.items()):
        # Of a view that was changed in place, only what came before it leads to the old node.
        moved = is_view(argument.tensor) and argument.tensor.grad_fn is not edge[0]
        if moved or edge in returned:
            del noted.wanted[edge]
            for path in noted.own(argument.paths):
                why = INPUT_CHANGED if moved else gradients.PASSED_ON
                noted.tap.explain(index, *why, path=path)


def _told_apart(
    noted: Noted, found: list[tuple[Any, int, Any]], index: int, frame: Frame
) -> Iterator[tuple[Any, int, Path, Tensor]]:
    """The nodes that lead to tensors, each with the path that is meant and the tensor.

    Of a tensor that was passed for several arguments, a node is known to be for one of them only if
    it is that of a gate there, or if all the others have gates.
    """
    shared = [node for node, _, edge in found if len(noted.wanted[edge].paths) > 1]
    gates = {node: gate_of(node, frame.serial) for node in shared}
    gated = {*gates.values()}
    mixed: dict[Edge, list[Path]] = {}
    for node, position, edge in found:
        argument = noted.wanted[edge]
        meant = argument.paths
        if len(meant) > 1:
            left = [path for path in meant if path not in gated]
            gate = gates[node]
            meant = left or meant if gate is None else [gate]
        if len(meant) > 1:
            mixed[edge] = meant
            continue
        for path in noted.own(meant):
            yield node, position, path, argument.tensor
    for edge, paths in mixed.items():
        noted.wanted.pop(edge)
        names = ", ".join([show_path(path) for path in paths])
        reason = f"one tensor was passed as {names}: the graph has only the sum of the gradients."
        remedy = f"Enter hookline.edit(model, {noted.tap.spelled!r}, lambda g: g) before: it puts "
        remedy += "an identity at each of them, which then has a gradient of its own."
        for path in noted.own(paths):
            noted.tap.explain(index, reason, remedy, path)


def _views_of_older(tensors: list[Tensor], frame: Frame) -> list[Tensor]:
    """Outputs that are views of something older: in-place changes take their nodes away."""
    start = frame.sequence
    return [
        t for t in tensors if base_of(t) is not None and not made_since(base_of(t).grad_fn, start)
    ]
