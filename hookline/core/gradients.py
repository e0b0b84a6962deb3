"""Gradients at places, by hooks on tensors and autograd nodes.

Full backward hooks are not used: they break in-place models, rewrap inputs, and are silent for
nested values. Instead, right after a module's call:

- `watch_tensor`: the gradient of a parameter, a buffer or a plain tensor, before accumulation
- `watch_outputs`: what flows into a module's outputs
- `note_inputs` (before the call) and `watch_inputs`: what flows out of a module's inputs

What cannot be told apart from other gradients is explained, never guessed. A capture replaces no
value; an edit may insert an identity where that makes its place distinct.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hookline.core import arguments
from hookline.core.nested import Path, leaves, set_part, show_path

if TYPE_CHECKING:
    from hookline.core.hooks import Frame, Tap

__all__ = ["note_inputs", "sequence", "watch_inputs", "watch_outputs", "watch_tensor"]

NO_GRAD = "the value did not require grad (torch.no_grad, inference mode, or nothing to train)."
PASSED_ON = "the module returned a tensor that it was given, or had before, as it was:"
PASSED_REMEDY = (
    "its gradient cannot be told from that of the tensor's other uses. Ask for the module that "
    "made it."
)
REUSED = "another output of the module is computed from this one:"
REUSED_REMEDY = "what flows from outside cannot be told apart. Ask for the modules that use it."
VIEW_CHANGED = "the module returned a view of its input, which was changed in place later:"
VIEW_REMEDY = "its gradient is lost. Ask for the gradient of the module before or after it."


def _sequence() -> int:
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    return 0 if node is None else node._sequence_nr()  # pyright: ignore


# The number that the next autograd node of this thread will get.
sequence: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", _sequence)
_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore
_alias: Callable[[Tensor], Tensor] = torch.ops.aten.alias  # pyright: ignore
_MARK = "hookline"  # in the metadata of autograd nodes: what hookline has put there


def _deliver(ref: weakref.ref[Tap], index: int, path: Path, grad: Tensor) -> Tensor | None:
    """The hook on tensors. It holds its tap weakly: the tap's record may hold the graph."""
    tap = ref()
    return None if tap is None else tap.gradient(grad, index, path)


def _keep(tap: Tap, handle: Any) -> None:
    context = tap.context()
    if context is None:
        handle.remove()
    else:
        context.keep_handle(handle)


def _hook(tap: Tap, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    # register_hook may crash the process on a view that was changed in place, unless grad_fn was
    # read before: https://github.com/pytorch/pytorch/issues/196459
    _ = tensor.grad_fn
    _keep(tap, tensor.register_hook(function))


# -- parameters, buffers, plain tensors -----------------------------------------------------------


def watch_tensor(tap: Tap, tensor: Tensor | None) -> None:
    """Hook a tensor that exists already; its gradients are numbered by backward pass."""
    if tensor is None or not tensor.requires_grad:
        tap.explain(0, "it does not require grad.", "Call requires_grad_() on it before.")
        return
    _hook(tap, tensor, partial(_deliver, weakref.ref(tap), -1, ()))


# -- outputs --------------------------------------------------------------------------------------


def watch_outputs(
    tap: Tap, value: Any, output: Any, args: Any, kwargs: Any, index: int, frame: Frame
) -> Any:
    """Hook the tensors of an output; returns KEEP, or the value to return in its place."""
    from hookline.core.hooks import KEEP

    if isinstance(value, Tensor):
        found: list[tuple[Path, Tensor]] = [((), value)]
        alone = value is output
    else:
        found = list(leaves(value))
        alone = False
    tap.expect(value, index, found)
    reused = set[int]() if alone else _reused(output, frame.sequence)
    new: Any = KEEP
    for path, tensor in found:
        gate = _watch_output(tap, tensor, index, path, alone, reused, (args, kwargs), frame)
        if gate is not None:
            new = set_part(value if new is KEEP else new, path, gate)
    return new


def _watch_output(
    tap: Tap,
    tensor: Tensor,
    index: int,
    path: Path,
    alone: bool,
    reused: set[int],
    given: Any,
    frame: Frame,
) -> Tensor | None:
    if not tensor.requires_grad:
        tap.explain(index, NO_GRAD, "Run it with gradients on.")
        return None
    node = tensor.grad_fn
    deliver = partial(_deliver, weakref.ref(tap), index, path)
    made_here = node is not None and node._sequence_nr() >= frame.sequence  # pyright: ignore
    base = tensor._base if made_here else None
    base_made_here = base is not None and _made_since(base.grad_fn, frame.sequence)
    if made_here and base is not None and not base_made_here:
        # A view that was changed in place gets a new node on access: an old tensor all the same.
        made_here = all(tensor is not other for _, other in leaves(given))
    if not made_here or id(tensor) in reused:
        if tap.replaces:
            gate = _alias(tensor)
            _hook(tap, gate, deliver)
            return gate
        tap.explain(index, *((REUSED, REUSED_REMEDY) if made_here else (PASSED_ON, PASSED_REMEDY)))
    elif base is None:
        _hook(tap, tensor, deliver)
    elif base_made_here and tap.replaces:
        # A hook on a view is lost with a later in-place operation; on a copy it is not.
        gate = tensor.clone()
        for earlier in _views_on(node):
            earlier.move_to(gate)  # captures that were entered before see what comes before
        _hook(tap, gate, deliver)
        return gate
    elif base_made_here:
        pure = alone and type(tap.target.module).__module__.startswith("torch.nn.modules")
        view = _View(tap, deliver, tensor, base, pure)
        _views_on(node).append(view)
        _hook(tap, tensor, view.at_view)
        _keep(tap, base.grad_fn.register_prehook(view.at_base))  # pyright: ignore
    else:
        _hook(tap, tensor, _Guarded(tap, deliver, tensor, index).at_view)
    return None


def _views_on(node: Any) -> list[_View]:
    """The views that captures watch at a node, in order of entering."""
    return node.metadata.setdefault(_MARK, [])


def _made_since(node: Node | None, start: int) -> bool:
    return node is not None and node._sequence_nr() >= start  # pyright: ignore


def _reused(output: Any, start: int) -> set[int]:
    """The tensors of an output from which others of its tensors were computed."""
    tensors = [tensor for _, tensor in leaves(output) if tensor.requires_grad]
    if len(tensors) < 2:
        return set()
    edges = {(tensor.grad_fn, tensor.output_nr): id(tensor) for tensor in tensors}
    nodes = [node for node, _ in edges if node is not None]
    return {tensor for _, _, tensor in _leading(nodes, edges, start)}


class _View:
    """Takes the gradient of a view whose base was made inside the module.

    The view's own node is exact, but out of the graph if the view was changed in place since. The
    base's node stays: what flows into it is then the gradient, in the base's shape.
    """

    __slots__ = ("alias", "deliver", "geometry", "muted", "output_nr", "seen", "tap", "version")

    def __init__(
        self,
        tap: Tap,
        deliver: Callable[[Tensor], Any],
        tensor: Tensor,
        base: Tensor,
        pure: bool,
    ) -> None:
        self.tap = weakref.ref(tap)
        self.deliver = deliver
        # torch's own layers use the base for nothing else, so its gradient can be trusted. Others
        # may (a feature kept for another loss): then it is used only after an in-place change.
        self.alias = None if pure else tensor.detach()
        self.version = tensor._version
        self.geometry = (
            (tensor.size(), tensor.stride(), tensor.storage_offset()),
            (base.size(), base.stride(), base.storage_offset()),
        )
        self.output_nr = base.output_nr
        self.seen = (-2, 0)  # the backward pass and storage of what the view's own node gave
        self.muted = False

    def move_to(self, gate: Tensor) -> None:
        """An edit has put a copy in the view's place: take the gradient there, before the edit."""
        tap = self.tap()
        if tap is not None:
            self.muted = True
            _hook(tap, gate, self.deliver)

    def at_view(self, grad: Tensor) -> None:
        if not self.muted:
            self.seen = _task(), grad.untyped_storage()._cdata
            self.deliver(grad)

    def at_base(self, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[self.output_nr]
        if grad is None or self.muted:
            return
        if self.alias is not None:
            if self.alias._version == self.version:
                return
        elif self.seen == (_task(), grad.untyped_storage()._cdata):
            return  # the very gradient that the view's node passed on
        (size, stride, offset), (base_size, base_stride, base_offset) = self.geometry
        if grad.stride() != base_stride:
            held = torch.empty_strided(base_size, base_stride, dtype=grad.dtype, device=grad.device)
            grad = held.copy_(grad)
        self.deliver(grad.as_strided(size, stride, offset - base_offset + grad.storage_offset()))


class _Guarded:
    """Takes the gradient of a view of an input, unless the memory was changed in place since."""

    __slots__ = ("alias", "deliver", "index", "tap", "version")

    def __init__(
        self, tap: Tap, deliver: Callable[[Tensor], Any], tensor: Tensor, index: int
    ) -> None:
        self.tap = weakref.ref(tap)
        self.deliver = deliver
        self.alias = tensor.detach()
        self.version = tensor._version
        self.index = index

    def at_view(self, grad: Tensor) -> Tensor | None:
        tap = self.tap()
        if self.alias._version == self.version or tap is None:
            return self.deliver(grad)
        tap.explain(self.index, VIEW_CHANGED, VIEW_REMEDY)
        return None


# -- inputs ---------------------------------------------------------------------------------------


def note_inputs(tap: Tap, module: nn.Module, args: Any, kwargs: Any, frame: Frame) -> Any:
    """Before a call: note the gradient edges of its inputs, since in-place modules move them.

    Returns KEEP, or for an edit the value with an identity in place of each tensor.
    """
    from hookline.core.hooks import KEEP

    try:
        value = arguments.read(module, args, kwargs, tap.target)
    except LookupError:
        frame.edges.append((tap, None, (), {}))
        return KEEP
    found = list(leaves(value))
    wanted: dict[tuple[Any, int], Path] = {}
    new: Any = KEEP
    gates: dict[int, Tensor] = {}
    for path, tensor in found:
        if not tensor.requires_grad:
            continue
        wanted.setdefault(_edge(tensor), path)
        if tap.replaces:
            gate = gates.get(id(tensor))
            if gate is None:
                gate = gates[id(tensor)] = _gate(tensor, tap.target.module)
                frame.gates.append((tap, path, gate, gate._version))
            new = set_part(value if new is KEEP else new, path, gate)
    frame.edges.append((tap, value, found, wanted))
    return new


def _gate(tensor: Tensor, module: nn.Module) -> Tensor:
    """An identity that makes a module's use of a tensor distinct; it shares the memory.

    Several edits of the same call share one gate: hooks on it run in the order of entering.
    """
    gate = _gate_of(tensor.grad_fn, module)
    if gate is None:
        gate = _alias(tensor)
        gate.grad_fn.metadata[_MARK] = weakref.ref(gate), id(module)  # pyright: ignore
    return gate


def _gate_of(node: Node | None, module: nn.Module) -> Tensor | None:
    """The gate of a module that a node belongs to, if it belongs to one."""
    mark = None if node is None else node.metadata.get(_MARK)
    return mark[0]() if isinstance(mark, tuple) and mark[1] == id(module) else None


def _edge(tensor: Tensor) -> tuple[Any, int]:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def watch_inputs(tap: Tap, output: Any, index: int, frame: Frame) -> None:
    """After a call: hook the nodes inside the module that lead to its inputs."""
    for noted, value, found, wanted in frame.edges:
        if noted is not tap:
            continue
        tap.expect(value, index, found)
        if not wanted:
            tap.explain(index, NO_GRAD, "Give inputs that require grad, with gradients on.")
            return
        if tap.replaces:
            _watch_gates(tap, index, frame)
            return
        tensors = [tensor for _, tensor in leaves(output) if tensor.requires_grad]
        outputs = {_edge(tensor) for tensor in tensors}
        for edge in wanted.keys() & outputs:
            tap.explain(index, PASSED_ON, PASSED_REMEDY)
            del wanted[edge]
        views = _input_views(tensors, frame.sequence)
        count = 0
        # Where an edit has put a gate, hooks on the gate run in the order of entering.
        for (node, _), path in list(wanted.items()):
            gate = _gate_of(node, tap.target.module)
            if gate is not None:
                count += 1
                _hook(tap, gate, partial(_deliver, weakref.ref(tap), index, path))
                del wanted[node, _]
        for node, positions in _grouped(_leading((n for n, _ in outputs), wanted, frame.sequence)):
            count += 1
            gate = _gate_of(node, tap.target.module)
            if gate is not None:
                _hook(tap, gate, partial(_deliver, weakref.ref(tap), index, positions[0][1]))
                continue
            share = _Share(tap, index, positions, views)
            _keep(tap, node.register_hook(share.at_node))
        if not count and index not in tap.reasons:
            tap.explain(index, "no gradient flows from the module's outputs to this input.")


def _input_views(tensors: list[Tensor], start: int) -> list[tuple[Tensor, int]]:
    """Outputs that are views of something older: in-place changes take their nodes away."""
    return [
        (tensor.detach(), tensor._version)
        for tensor in tensors
        if tensor._base is not None and not _made_since(tensor._base.grad_fn, start)
    ]


def _leading(
    nodes: Iterable[Node | None], edges: dict[tuple[Any, int], Any], start: int
) -> list[tuple[Node, int, Any]]:
    """The nodes made since `start`, reached from `nodes`, with a next edge among `edges`."""
    found: list[tuple[Node, int, Any]] = []
    seen: set[Node] = set()
    stack = [node for node in nodes if _made_since(node, start)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for position, edge in enumerate(node.next_functions):
            follows = edge[0]
            if follows is None:
                continue
            if edge in edges:
                found.append((node, position, edges[edge]))  # pyright: ignore
            elif follows._sequence_nr() >= start:  # pyright: ignore
                stack.append(follows)
    return found


def _grouped(
    found: list[tuple[Node, int, Path]],
) -> Iterable[tuple[Node, list[tuple[int, Path]]]]:
    grouped: dict[Node, list[tuple[int, Path]]] = {}
    for node, position, path in found:
        grouped.setdefault(node, []).append((position, path))
    return grouped.items()


class _Share:
    """Takes what one node inside a module passes on to the module's inputs."""

    __slots__ = ("index", "positions", "tap", "views")

    def __init__(
        self,
        tap: Tap,
        index: int,
        positions: list[tuple[int, Path]],
        views: list[tuple[Tensor, int]],
    ) -> None:
        self.tap = weakref.ref(tap)
        self.index = index
        self.positions = positions
        self.views = views

    def at_node(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
        tap = self.tap()
        if tap is None:
            return
        if any(alias._version != version for alias, version in self.views):
            tap.explain(self.index, VIEW_CHANGED, VIEW_REMEDY)
            return
        for position, path in self.positions:
            grad = grad_inputs[position]
            if grad is not None:
                tap.gradient(grad, self.index, path)


def _watch_gates(tap: Tap, index: int, frame: Frame) -> None:
    for owner, path, gate, version in frame.gates:
        if owner is not tap:
            continue
        if gate._version != version:
            from hookline.errors import GradientNotAvailable

            raise GradientNotAvailable(
                f"The gradient at {str(tap.place) + show_path(path)!r} cannot be changed:",
                "the module changes its input in place.",
                "Change grad_output of the module that made the input, or of this module.",
            )
        _hook(tap, gate, partial(_deliver, weakref.ref(tap), index, path))
