"""Gradients at inputs: the part of the gradient that the module itself sends back.

- `note_inputs` (before the call) and `watch_inputs` (after it): however the inputs were passed
- `is_simple_input`, `watch_simple_input`, `note_simple_input`: a quicker way for one argument that
  is a tensor

Hooks are put on the nodes inside the module that lead to the inputs, which are found by a walk
back from its outputs; for an edit, on a gate in the input's place. One tensor that was passed for
several arguments has one edge in the graph: only gates, one for each argument, tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookline.engine import arguments, gradients
from hookline.engine.gradients import Edge, gate_of, is_gate, made_since
from hookline.engine.tensor_hooks import GradientHook
from hookline.errors import GradientNotAvailable
from hookline.torch_private import base_of, is_view, sequence_number, version_of
from hookline.values.nested import Path, leaves, set_part, show_path

if TYPE_CHECKING:
    from hookline.engine.asks import Ask
    from hookline.engine.calls import RunningCall
    from hookline.engine.handlers import Handler
    from hookline.engine.tracer import Tracer

__all__ = [
    "is_simple_input", "note_inputs", "note_simple_input", "watch_inputs", "watch_simple_input",
]  # fmt: skip

INPUT_CHANGED = (
    "the module changed a view in place that it was given: the gradient cannot be reached.",
    "Ask for the gradient at the module that made the view.",
)
NO_PATH = (
    "no gradient flows from the module's outputs to this input.",
    "Ask for an input that the outputs depend on.",
)


class _Argument:
    """A tensor that a call was given, and the paths where it stands."""

    __slots__ = ("paths", "tensor")

    def __init__(self, tensor: Tensor, paths: list[Path]) -> None:
        self.tensor, self.paths = tensor, paths


class _InputNotes:
    """Notes on the inputs of a call, made before it begins, for one handler."""

    def __init__(self, handler: Handler, value: Any = None, problem: str = "") -> None:
        self.handler, self.value, self.problem = handler, value, problem
        self.tensors: list[tuple[Tensor, Path]] = []  # that are asked for, with paths in the value
        # Where the value stands in the bound arguments, if some tensor stands at several paths
        # there; otherwise paths are those in the value.
        self.place: Path = ()
        self.wanted: dict[Edge, _Argument] = {}  # how the tensors are found in the graph
        self.gates: list[tuple[Path, Tensor, int]] = []  # with the path in the value, and version

    def own(self, paths: list[Path]) -> list[Path]:
        """Return those of these paths that are in the value, as paths in the value."""
        depth = len(self.place)
        return [path[depth:] for path in paths if path[:depth] == self.place]


def note_inputs(
    handler: Handler, module: nn.Module, args: Any, kwargs: Any, call: RunningCall
) -> tuple[Any, Any]:
    """Note the gradient edges of the inputs before a call, since in-place modules move them.

    Returns the arguments; for an edit, with a gate in place of each tensor that is asked for.
    """
    try:
        value = arguments.read(module, args, kwargs, handler.ask)
    except LookupError as error:
        call.edges.append(_InputNotes(handler, None, f"{error}."))
        return args, kwargs
    noted = _InputNotes(handler, value)
    call.edges.append(noted)
    if torch.is_grad_enabled():
        found = gradients.grouped(value)
        noted.tensors = [(tensor, path) for tensor, paths in found for path in paths]
    if not noted.tensors:
        return args, kwargs
    uses = _shared(module, args, kwargs)
    if uses:
        noted.place = arguments.locate(module, args, kwargs, handler.ask)
    for tensor, path in noted.tensors:
        edge, here = _edge(tensor), (*noted.place, *path)
        argument = noted.wanted.setdefault(edge, _Argument(tensor, uses.get(edge, [])))
        if here not in argument.paths:
            argument.paths.append(here)
    return _put_gates(noted, module, args, kwargs, call)


def _shared(module: nn.Module, args: Any, kwargs: Any) -> dict[Edge, list[Path]]:
    """Return the edges of tensors that stand at several paths in the bound arguments."""
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
    noted: _InputNotes, module: nn.Module, args: Any, kwargs: Any, call: RunningCall
) -> tuple[Any, Any]:
    """Return the arguments with gates: for an edit, one for each tensor that is asked for."""
    handler, value, wanted = noted.handler, noted.value, dict[Edge, _Argument]()
    for tensor, path in noted.tensors:
        edge = _edge(tensor)
        argument, here = noted.wanted[edge], (*noted.place, *path)
        several = len(argument.paths) > 1
        if not (handler.replaces or (several and handler.separates)):
            wanted[edge] = argument
            continue
        if several or not is_gate(edge[0], call.serial):
            gate: Tensor = gradients.alias(tensor)
            edge = gradients.mark_gate(gate, call.serial, here), 0
            value = set_part(value, path, gate)
            noted.gates.append((path, gate, version_of(gate)))
        wanted[edge] = _Argument(tensor, [here])
    noted.wanted = wanted
    if not noted.gates:
        return args, kwargs
    return arguments.write(module, args, kwargs, handler.ask, value)


def watch_inputs(handler: Handler, output: Any, call: RunningCall) -> None:
    """Hook the nodes inside the module that lead to its inputs, after a call."""
    noted: _InputNotes = next(one for one in call.edges if one.handler is handler)
    number = call.number
    if noted.problem:
        handler.missing(number, noted.problem)
        return
    if call.recomputed:
        gradients.note_recomputed(handler, number)
    handler.expect(noted.value, number, [(tensor, [path]) for tensor, path in noted.tensors])
    if not noted.tensors:
        handler.explain(number, *gradients.why_no_gradient(handler, noted.value, call))
        return
    changed = [path for path, gate, version in noted.gates if version_of(gate) != version]
    if changed and handler.replaces:
        asked = f"The gradient at {str(handler.place)!r} cannot be changed:"
        remedy = "Change grad_output of the module that made the input, or of this module."
        raise GradientNotAvailable(asked, "the module changes its input in place.", remedy)
    tensors = gradients.tensors_in(output)
    views = _views_of_older(tensors, call)
    rest: dict[Edge, _Argument] = {}
    for edge, argument in noted.wanted.items():
        if len(argument.paths) > 1 or not is_gate(edge[0], call.serial):
            rest[edge] = argument
            continue
        (path,) = noted.own(argument.paths)
        if path in changed:
            handler.explain(number, *INPUT_CHANGED, path=path)
            continue
        hook = GradientHook.of(handler, number, path)
        if views:
            handler.watch_memory(hook, *views)
        handler.tensor_hooks.add(edge[0], hook.at_node)
    noted.wanted = rest
    if rest:
        _watch_paths(noted, tensors, views, call)


def _watch_paths(
    noted: _InputNotes, tensors: list[Tensor], views: list[Tensor], call: RunningCall
) -> None:
    """Hook the nodes that lead to the inputs without gates."""
    handler, wanted, number = noted.handler, noted.wanted, call.number
    _refuse_moved(noted, tensors, number)
    stops = {(node, output_nr) for _, node, output_nr, _ in call.given}
    starts = [tensor.grad_fn for tensor in tensors]
    reached: set[Path] = set()
    # Autocast keeps the casts of leaves for all modules that use them: they are passed over.
    casts = torch.is_autocast_cache_enabled() and any(
        tensor.is_leaf and torch.is_autocast_enabled(tensor.device.type)
        for tensor, *_ in call.given
    )
    found = gradients.leading(starts, {e: e for e in wanted}, stops, call.sequence, casts)
    for node, position, path, tensor in _told_apart(noted, found, call):
        if path in reached:
            handler.note_shares(number, path)
        reached.add(path)
        hook = GradientHook.of(handler, number, path)
        if casts:
            hook.dtype = tensor.dtype
        if views:
            handler.watch_memory(hook, *views)
        hook.position = position
        handler.tensor_hooks.add(node, hook.at_node)
    # Of another path, None says that none flows.
    if () in {path for one in wanted.values() for path in noted.own(one.paths)} - reached:
        handler.explain(number, *NO_PATH)


def _refuse_moved(noted: _InputNotes, tensors: list[Tensor], number: int) -> None:
    """Explain what cannot be had of inputs that are changed views, or are among the outputs."""
    returned = {_edge(tensor) for tensor in tensors}
    for edge, argument in list(noted.wanted.items()):
        # Of a view that was changed in place, only what came before it leads to the old node.
        tensor = argument.tensor
        moved = is_view(tensor) and not tensor.is_leaf and tensor.grad_fn is not edge[0]
        if moved or edge in returned:
            del noted.wanted[edge]
            for path in noted.own(argument.paths):
                why = INPUT_CHANGED if moved else gradients.PASSED_ON
                noted.handler.explain(number, *why, path=path)


def _told_apart(
    noted: _InputNotes, found: list[tuple[Any, int, Any]], call: RunningCall
) -> Iterator[tuple[Any, int, Path, Tensor]]:
    """Yield the nodes that lead to tensors, each with the path that is meant and the tensor.

    Of a tensor that was passed for several arguments, a node is known to be for one of them only if
    it is that of a gate there, or if all the others have gates.
    """
    shared = [node for node, _, edge in found if len(noted.wanted[edge].paths) > 1]
    gates = {node: gate_of(node, call.serial) for node in shared}
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
        spelled = str(noted.handler.target.place)
        remedy = f"Enter hookline.edit(model, {spelled!r}, lambda g: g) before: it puts "
        remedy += "an identity at each of them, which then has a gradient of its own."
        for path in noted.own(paths):
            noted.handler.explain(call.number, reason, remedy, path)


def _views_of_older(tensors: list[Tensor], call: RunningCall) -> list[Tensor]:
    """Return outputs that are views of something older: in-place changes take their nodes away."""
    return [
        tensor
        for tensor in tensors
        if base_of(tensor) is not None and not made_since(base_of(tensor).grad_fn, call.sequence)
    ]


# -- simple inputs ------------------------------------------------------------------------------


def is_simple_input(args: Any, kwargs: Any, given: list[tuple[Tensor, Any, int, int]]) -> bool:
    """Return True if a call has one argument, a tensor that is no leaf."""
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor:
        return False
    return bool(given) and given[0][1] is not None


def watch_simple_input(tracer: Tracer, ask: Ask, call: RunningCall, output: Any) -> bool:
    """Hook the nodes that lead to the only input of a call; False if more must be looked at.

    `watch_inputs` does the same for every call. This takes no handler.
    """
    last: Any = output.grad_fn if type(output) is Tensor else None
    base, start = base_of(output) if last is not None else None, call.sequence
    if last is None or sequence_number(last) < start:
        return False
    if base is not None and not made_since(base.grad_fn, start):
        return False
    tensor, wanted, output_nr, version = call.given[0]
    if version_of(tensor) != version and is_view(tensor):
        return False
    found = gradients.leading([last], {(wanted, output_nr): None}, (), start)
    for node, position, _ in found:
        hook = GradientHook(tracer.ref, call.subject, ask, call.number)
        hook.position = position
        tracer.tensor_hooks.add(node, hook.at_node)
    return bool(found)


def note_simple_input(handler: Handler, call: RunningCall) -> None:
    """Note the only input of a call for `watch_inputs`, where the shortcut does not do."""
    tensor, node, output_nr, _ = call.given[0]
    noted = _InputNotes(handler, tensor)
    noted.tensors = [(tensor, ())]
    noted.wanted = {(node, output_nr): _Argument(tensor, [()])}
    call.edges.append(noted)
