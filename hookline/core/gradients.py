"""Gradients at places, by hooks on tensors and autograd nodes.

Full backward hooks are not used: they break in-place models, rewrap inputs, and are silent for
nested values. Instead, around a module's call:

- `watch_tensor`: the gradient of a parameter, a buffer or a plain tensor, before accumulation
- `note_given` (before the call), `watch_outputs`: what flows into a module's outputs
- `note_inputs` (before the call), `watch_inputs`: what flows out of a module's inputs

A capture replaces no value: it hooks the output tensors, and the nodes inside the module that
lead to the inputs. An edit puts a *gate*, an identity, at its place. What cannot be told apart
from other gradients is explained, never guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hookline.core import arguments
from hookline.core.arms import Arm, Shares, handles
from hookline.core.nested import Path, leaves, set_part
from hookline.errors import GradientNotAvailable

if TYPE_CHECKING:
    from hookline.core.taps import Frame, Tap

__all__ = [
    "note_given", "note_inputs", "sequence", "watch_fresh", "watch_inputs", "watch_lone_input",
    "watch_outputs", "watch_tensor",
]  # fmt: skip

Edge = tuple[Any, int]
_LEAF = 2**64 - 1  # the sequence number of nodes that accumulate, which lead nowhere
_ONE: list[tuple[Tensor, list[Path]]] = []  # one tensor, the whole value

NO_GRAD = (
    "the value did not require grad (torch.no_grad, inference mode, or nothing to train).",
    "Run it with gradients on.",
)
PASSED_ON = (
    "the module returned a tensor that it was given, or had before, with gradients of other uses.",
    "Ask for the module that made it.",
)
REUSED = (
    "another output is computed from this one: what flows from outside cannot be told apart.",
    "Ask for the modules that use it.",
)
VIEW_CHANGED = (
    "the value is a view, and its memory was changed in place later: its gradient is lost.",
    "Ask for the gradient of the module before or after it.",
)
INPUT_CHANGED = (
    "the module changed a view in place that it was given: the gradient cannot be reached.",
    "Ask for the gradient at the module that made the view.",
)
NO_PATH = (
    "no gradient flows from the module's outputs to this input.",
    "Ask for an input that the outputs depend on.",
)
NOT_ASKED = ("it does not require grad.", "Call requires_grad_() on it before.")


def _sequence() -> int:
    with torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return node._sequence_nr()


# The number that the next autograd node of this thread will get.
sequence: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", _sequence)
_alias: Any = torch.ops.aten.alias
_MARK = "hookline"  # in the metadata of a gate's node: the serial of the call that it is for


def _made_since(node: Any, start: int) -> bool:
    return node is not None and node._sequence_nr() >= start


# -- parameters, buffers, plain tensors -----------------------------------------------------------


def watch_tensor(tap: Tap, tensor: Tensor | None) -> None:
    """Hook a tensor that exists already; its gradients are numbered by backward pass."""
    if tensor is None or not tensor.requires_grad:
        tap.explain(0, *NOT_ASKED)
        return
    arm = Arm(tap, -1, ())
    if tensor._is_view():
        arm.guard(tensor)
        tap.guard(arm)
    arm.watch(tap, tensor)


# -- outputs --------------------------------------------------------------------------------------


def _grouped(value: Any) -> list[tuple[Tensor, list[Path]]]:
    """The tensors of a value that require grad, each once, with the paths where they stand."""
    if isinstance(value, Tensor):
        return [(value, [()])] if value.requires_grad else []
    found: dict[int, tuple[Tensor, list[Path]]] = {}
    for path, tensor in leaves(value):
        if tensor.requires_grad:
            found.setdefault(id(tensor), (tensor, []))[1].append(path)
    return list(found.values())


def note_given(args: Any, kwargs: Any) -> list[tuple[Tensor, Any, int, int]]:
    """Before a call: the tensors that it is given, with node, number and version as they are."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # the commonest case
        (tensor,) = args
        if not tensor.requires_grad:
            return []
        return [(tensor, tensor.grad_fn, tensor.output_nr, tensor._version)]
    return [
        (tensor, tensor.grad_fn, tensor.output_nr, tensor._version)
        for value in ((*args, *kwargs.values()) if kwargs else args)
        for tensor in _tensors(value)
    ]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a value that require grad."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor, _ in _grouped(value)]


def watch_outputs(tap: Tap, value: Any, output: Any, index: int, frame: Frame) -> Any:
    """Hook the tensors of an output; returns the value, with gates in it if the tap replaces."""
    alone = value is output and isinstance(value, Tensor) and value.requires_grad
    if alone and torch.is_grad_enabled():  # the commonest case, without the lists below
        tap.expect(value, index, _ONE)
        return _watch_output(tap, value, index, (), False, frame)
    found = _grouped(value) if torch.is_grad_enabled() else []
    tap.expect(value, index, found)
    if not found:
        tap.explain(index, *NO_GRAD)
    reused = set[int]() if value is output and len(found) < 2 else _reused(output, frame.sequence)
    for tensor, paths in found:
        new = _watch_output(tap, tensor, index, paths[0], id(tensor) in reused, frame)
        if new is not tensor:
            for path in paths:
                value = set_part(value, path, new)
    return value


def _watch_output(
    tap: Tap, tensor: Tensor, index: int, path: Path, reused: bool, frame: Frame
) -> Tensor:
    node, base = tensor.grad_fn, tensor._base
    arm = Arm(tap, index, path)
    if _is_gate(node, frame):  # of an edit that was entered before
        arm.watch_gate(tap, node)
        return tensor
    fresh, given = _made_since(node, frame.sequence), False
    base_fresh = base is not None and _made_since(base.grad_fn, frame.sequence)
    for other, other_node, _, version in frame.given:
        if other is tensor:
            given = True
            fresh = fresh and other_node is not node
        if base is not None and (other._base is base or other is base):
            base_fresh = base_fresh and other._version != version
    distinct = fresh and not reused
    if tap.replaces and not (given and distinct):
        return _gate_output(tap, arm, tensor, distinct and (base is None or base_fresh), frame)
    if not distinct:
        tap.explain(index, *(REUSED if fresh else PASSED_ON), path=path)
        return tensor
    if base is not None:
        arm.guard(tensor)
        # Of a base that others hold, for another loss perhaps, not all that flows is the view's.
        shared = sys.getrefcount(base) > _alone()
        if base_fresh and not shared and not tap.replaces and _alike(base, tensor):
            arm.watch_base(tap, base)
        else:
            tap.guard(arm)
    arm.watch(tap, tensor)
    return tensor


def watch_fresh(tap: Tap, tensor: Tensor, index: int, start: int, given: Sequence[Any]) -> bool:
    """The quick way for an output that its call has made; false if there is more to look at."""
    node: Any = tensor.grad_fn
    if node is None or node._sequence_nr() < start:
        return False
    base = tensor._base
    for other in given:
        if other[0] is tensor or (
            base is not None and (other[0]._base is base or other[0] is base)
        ):
            return False
    arm = Arm(tap, index)
    if base is not None:
        if not _made_since(base.grad_fn, start) or not _alike(base, tensor):
            return False
        if sys.getrefcount(base) > _alone():
            return False
        arm.guard(tensor)
        arm.watch_base(tap, base)
    arm.watch(tap, tensor)
    return True


def _alike(base: Tensor, view: Tensor) -> bool:
    """Whether a view's gradient can be cut out of its base's."""
    return base.dtype == view.dtype and 0 not in view.stride()


@cache
def _alone() -> int:
    """The reference count of a base that only its view holds, seen from a local variable."""
    view = torch.zeros(1, requires_grad=True).add(1).view(1, 1)
    base = view._base
    return sys.getrefcount(base)


def _gate_output(tap: Tap, arm: Arm, tensor: Tensor, own: bool, frame: Frame) -> Tensor:
    """An identity in an output's place; hooks on its node run in the order of entering.

    A copy if the module made the memory itself, since a view would be lost with a later in-place
    operation; else a view, so that writing to it still writes to what it is a view of.
    """
    gate = tensor.clone() if own else _alias(tensor)
    node = _mark(gate, frame)
    if not own:
        arm.guard(gate)
        tap.guard(arm)
    for hook in tuple((tensor._backward_hooks or {}).values()):
        earlier = getattr(hook, "__self__", None)  # captures that were entered before
        if isinstance(earlier, Arm) and not earlier.muted:
            owner = earlier.tap()
            if owner is not None and not owner.replaces and owner.target.meets(tap.target):
                moved = Arm(owner, earlier.index, earlier.path)
                moved.watch_gate(owner, node)
                earlier.muted = True
    arm.watch_gate(tap, node)
    return gate


def _mark(gate: Tensor, frame: Frame) -> Any:
    node: Any = gate.grad_fn
    node.metadata[_MARK] = frame.serial
    return node


def _is_gate(node: Any, frame: Frame) -> bool:
    """Whether a node is that of a gate which an edit has made for this very call."""
    return node is not None and node.metadata.get(_MARK) == frame.serial


def _reused(output: Any, start: int) -> set[int]:
    """The tensors of an output from which others of its tensors were computed."""
    tensors = _tensors(output)
    if len(tensors) < 2:
        return set()
    edges = {(tensor.grad_fn, tensor.output_nr): id(tensor) for tensor in tensors}
    found = _leading((tensor.grad_fn for tensor in tensors), edges, (), start)
    return {tensor for _, _, tensor in found}


# -- inputs ---------------------------------------------------------------------------------------


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
    found = _grouped(value) if torch.is_grad_enabled() else []
    wanted: dict[Edge, Path] = {}
    for tensor, paths in found:
        if tap.replaces:
            node: Any = tensor.grad_fn
            if not _is_gate(node, frame):
                gate: Tensor = _alias(tensor)
                node = _mark(gate, frame)
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
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def watch_inputs(tap: Tap, output: Any, index: int, frame: Frame) -> None:
    """After a call: hook the nodes inside the module that lead to its inputs."""
    _, value, found, wanted = next(noted for noted in frame.edges if noted[0] is tap)
    if isinstance(found, str):
        tap.missing(index, found)
        return
    tap.expect(value, index, found)
    if not wanted and not found:
        tap.explain(index, *NO_GRAD)
        return
    if any(gate._version != version for gate, version in frame.gates):
        raise GradientNotAvailable(
            f"The gradient at {str(tap.place)!r} cannot be changed:",
            "the module changes its input in place.",
            "Change grad_output of the module that made the input, or of this module.",
        )
    tensors = _tensors(output)
    views = _views_of_older(tensors, frame)
    for node, _ in [edge for edge in wanted if _is_gate(edge[0], frame)]:
        arm = Arm(tap, index, wanted.pop((node, _)))
        if views:
            arm.guard(*views)
            tap.guard(arm)
        arm.watch_gate(tap, node)
    if wanted:
        dtypes = {paths[0]: tensor.dtype for tensor, paths in found}
        _watch_paths(tap, tensors, views, index, wanted, dtypes, frame)


def _watch_paths(
    tap: Tap,
    tensors: list[Tensor],
    views: list[Tensor],
    index: int,
    wanted: dict[Edge, Path],
    dtypes: dict[Path, torch.dtype],
    frame: Frame,
) -> None:
    for edge in wanted.keys() & {(tensor.grad_fn, tensor.output_nr) for tensor in tensors}:
        tap.explain(index, *PASSED_ON, path=wanted.pop(edge))
    stops = {(node, output_nr) for _, node, output_nr, _ in frame.given}
    grouped: dict[Any, list[tuple[int, Arm]]] = {}
    starts = [tensor.grad_fn for tensor in tensors]
    reached: set[Path] = set()
    # Autocast keeps the casts of leaves for all modules that use them: they are looked through.
    casts = torch.is_autocast_cache_enabled() and any(
        tensor.is_leaf and torch.is_autocast_enabled(tensor.device.type)
        for tensor, *_ in frame.given
    )
    found = _leading(starts, wanted, stops, frame.sequence, casts)
    for node, position, path in found:
        if path in reached:
            tap.several(index, path)
        reached.add(path)
        arm = Arm(tap, index, path)
        if casts:
            arm.dtype = dtypes[path]
        if views:
            arm.guard(*views)
            tap.guard(arm)
        grouped.setdefault(node, []).append((position, arm))
    for node, arms in grouped.items():
        if _is_gate(node, frame):
            arms[0][1].watch_gate(tap, node)
        else:
            handles(tap).append(node.register_hook(Shares(arms).at_node))
    moved = any(t._is_view() and t.grad_fn is not node for t, node, _, _ in frame.given)
    for path in wanted.values():
        if path not in reached and (moved or not path):  # else None says that none flows
            tap.explain(index, *(INPUT_CHANGED if moved else NO_PATH), path=path)


def watch_lone_input(
    tap: Tap, output: Tensor, index: int, start: int, given: Sequence[Any]
) -> bool:
    """The quick way for a call with one tensor in and one out; false if there is more to it."""
    last: Any = output.grad_fn
    base = output._base
    if last is None or (base is not None and not _made_since(base.grad_fn, start)):
        return False
    found = _leading([last], {given[0][1:3]: ()}, (), start)
    shares: dict[Any, list[tuple[int, Arm]]] = {}
    for node, position, _ in found:
        shares.setdefault(node, []).append((position, Arm(tap, index)))
    for node, arms in shares.items():
        handles(tap).append(node.register_hook(Shares(arms).at_node))
    if len(found) > 1:
        tap.several(index, ())
    return bool(found)


def _views_of_older(tensors: list[Tensor], frame: Frame) -> list[Tensor]:
    """Outputs that are views of something older: in-place changes take their nodes away."""
    return [
        tensor
        for tensor in tensors
        if tensor._base is not None and not _made_since(tensor._base.grad_fn, frame.sequence)
    ]


def _leading(
    starts: Iterable[Any],
    wanted: dict[Edge, Any],
    stops: Iterable[Edge],
    start: int,
    casts: bool = False,
) -> list[tuple[Any, int, Any]]:
    """The nodes made since `start`, reached from `starts`, that have a next edge among `wanted`."""
    found: list[tuple[Any, int, Any]] = []
    seen: set[Node] = set()
    stack = [node for node in starts if _made_since(node, start)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for position, edge in enumerate(node.next_functions):
            follows = edge[0]
            if edge in wanted:
                found.append((node, position, wanted[edge]))
            elif casts and follows is not None and follows.name() == "ToCopyBackward0":
                beyond = follows.next_functions[0]
                if beyond in wanted:
                    found.append((node, position, wanted[beyond]))
                elif edge not in stops and follows._sequence_nr() >= start:
                    stack.append(follows)
            elif follows is None or follows in seen or edge in stops:
                continue
            elif start <= follows._sequence_nr() < _LEAF:
                stack.append(follows)
    return found
