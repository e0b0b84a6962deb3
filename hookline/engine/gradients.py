"""Gradients at places, by hooks on tensors and autograd nodes.

Full backward hooks are not used: they break in-place models, rewrap inputs, and are silent for
nested values. Instead, around the call of a module:

- `watch_tensor`: the gradient of a parameter, a buffer or a plain tensor, before accumulation
- `note_given` (before the call) and `watch_outputs` (after it): what flows into a module's outputs
- `watch_simple_output`: the same for an output with nothing unusual about it, in less time
- `makes_its_output`: whether a module of torch's always returns a new tensor
- all else: the pieces that `input_gradients.py` shares

A capture replaces no value: it hooks the output tensors, and the nodes inside the module that lead
to the inputs. An edit puts a *gate*, an identity, in the value's place. A gradient that cannot be
told apart from others is explained, never guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookline.engine.tensor_hooks import GradientHook
from hookline.torch_private import (
    backward_hooks_of,
    base_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    global_forward_hooks,
    is_view,
    sequence_number,
    use_count,
    version_of,
)
from hookline.values.nested import Path, leaves, set_part

if TYPE_CHECKING:
    from hookline.engine.asks import Ask
    from hookline.engine.calls import RunningCall, Subject
    from hookline.engine.handlers import Handler
    from hookline.engine.tracer import Tracer

__all__ = [
    "DIVIDED",
    "LEAF",
    "NONE_CAME",
    "NOT_AGAIN",
    "NO_GRAD",
    "NO_TENSOR",
    "PASSED_ON",
    "VIEW_CHANGED",
    "Edge",
    "alias",
    "gate_of",
    "grouped",
    "is_gate",
    "is_usable",
    "leading",
    "made_since",
    "makes_its_output",
    "mark_gate",
    "note_given",
    "note_recomputed",
    "tensors_in",
    "watch_outputs",
    "watch_simple_output",
    "watch_tensor",
    "why_no_gradient",
]  # fmt: skip

Edge = tuple[Any, int]
LEAF = 2**64 - 1  # the sequence number of nodes that accumulate, which lead nowhere

NONE_CAME = (
    (
        "no gradient arrived. No backward ran inside the `with`, the loss does not depend on it, "
        "or only others were asked for (torch.autograd.grad, inputs=)."
    ),
    "Run the forward and the backward inside the `with`.",
)
NO_GRAD = (
    "the value did not require grad (torch.no_grad, inference mode, or nothing to train).",
    "Run it with gradients on; for those of data, call x.requires_grad_() before.",
)
NOT_AGAIN = (
    "it ran without gradients inside a reentrant checkpoint, and no backward has run it again.",
    "Run the backward inside the `with`.",
)
NO_TENSOR = (
    "no tensor was found in the value: it is no tuple, dict, dataclass or the like that holds one.",
    "Ask for the modules that make or take the tensors of such an object.",
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
DIVIDED = (
    "one tensor is returned at several positions, and an edit that was entered later divides it.",
    "Enter the capture after the edit: each position then has a gradient of its own.",
)
NOT_ASKED = ("it does not require grad.", "Call requires_grad_() on it before.")


alias: Any = torch.ops.aten.alias
# In the metadata of a gate's node: the serial of the call that it is for, negative at an output,
# and where in the arguments it stands.
_MARK = "hookline"


def made_since(node: Any, start: int) -> bool:
    """Return True if there is a node that was made when the sequence had come to `start`."""
    return node is not None and sequence_number(node) >= start


# -- parameters, buffers, plain tensors -----------------------------------------------------------


def watch_tensor(handler: Handler, tensor: Tensor | None) -> None:
    """Hook a tensor that exists already; its gradients are numbered by backward pass."""
    if tensor is None or not tensor.requires_grad:
        handler.explain(0, *NOT_ASKED)
        return
    hook = GradientHook.of(handler, -1)
    if is_view(tensor) and not tensor.is_leaf:
        handler.watch_memory(hook, tensor)
    handler.tensor_hooks.put(tensor, hook.at_tensor)


# -- outputs --------------------------------------------------------------------------------------


def grouped(value: Any) -> list[tuple[Tensor, list[Path]]]:
    """Return the tensors of a value that require grad, each once, with its paths."""
    if isinstance(value, Tensor):
        return [(value, [()])] if value.requires_grad and is_usable(value) else []
    found: dict[int, tuple[Tensor, list[Path]]] = {}
    for path, tensor in leaves(value):
        if tensor.requires_grad and is_usable(tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(path)
    return list(found.values())


def is_usable(tensor: Tensor) -> bool:
    """Return False if torch refuses a tensor, such as a chunk of one that was changed in place."""
    try:
        _ = tensor.grad_fn
    except RuntimeError:
        return False
    return True


def why_no_gradient(handler: Handler, value: Any, call: RunningCall) -> tuple[str, str]:
    """Explain why no gradient comes for a value, none of whose tensors has one."""
    if not leaves(value):
        return NO_TENSOR
    waits = not call.recomputed and handler.gives_graph_later(call.number)
    return NOT_AGAIN if waits else NO_GRAD


def note_recomputed(handler: Handler, number: int) -> None:
    """Replace the reason of the first run of a call whose gradients come by its recomputation."""
    if torch.is_grad_enabled():
        handler.explain(number, *NONE_CAME)


def note_given(args: Any, kwargs: Any) -> list[tuple[Tensor, Any, int, int]]:
    """Return the tensors that a call is given, with their node, output number and version."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # the commonest case
        (tensor,) = args
        try:
            if tensor.requires_grad:
                return [(tensor, tensor.grad_fn, tensor.output_nr, version_of(tensor))]
        except RuntimeError:  # see is_usable
            pass
        return []
    return [
        (tensor, tensor.grad_fn, tensor.output_nr, version_of(tensor))
        for value in ((*args, *kwargs.values()) if kwargs else args)
        for tensor in tensors_in(value)
    ]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value that require grad."""
    return [tensor for tensor, _ in grouped(value)]


def watch_outputs(handler: Handler, value: Any, output: Any, call: RunningCall) -> Any:
    """Hook the tensors of a value in an output; return the value, with gates if it is edited."""
    number = call.number
    if call.recomputed and not call.graph_discarded:
        note_recomputed(handler, number)
    found = grouped(value) if torch.is_grad_enabled() else []
    handler.expect(value, number, found)
    if not found:
        handler.explain(number, *why_no_gradient(handler, value, call))
    whole = found if value is output else grouped(output)
    several = {id(tensor) for tensor, paths in whole if len(paths) > 1}
    reused = set[int]() if len(whole) < 2 else _reused(output, call.sequence)
    for tensor, paths in found:
        mixed = id(tensor) in reused or (handler.replaces and id(tensor) in several)
        for path in paths if handler.replaces else paths[:1]:
            new = _hook_or_gate(handler, tensor, path, mixed, call, output)
            if new is not tensor:
                value = set_part(value, path, new)
    return value


def _hook_or_gate(
    handler: Handler, tensor: Tensor, path: Path, mixed: bool, call: RunningCall, output: Any
) -> Tensor:
    """Hook one tensor of an output, or put a gate in its place.

    `mixed` is true if what flows into the tensor is also for other parts of the output: because it
    stands there as well, or because they are computed from it.
    """
    hook = GradientHook.of(handler, call.number, path)
    hook.muted = call.graph_discarded
    if is_gate(tensor.grad_fn, -call.serial):  # of an edit that was entered before
        if is_view(tensor):
            handler.watch_memory(hook, tensor)
        handler.tensor_hooks.add(tensor.grad_fn, hook.at_node)
        return tensor
    fresh, given, shared, base_fresh = _origin(tensor, call)
    distinct = fresh and not mixed
    if handler.replaces and not (given and distinct):
        own = distinct and not shared and _owns_memory(tensor, base_fresh, output)
        twice = [other for _, other in leaves(output) if other is tensor]
        return _gate_output(handler, hook, tensor, own, len(twice) > 1, call)
    if not distinct:
        handler.explain(call.number, *(REUSED if fresh else PASSED_ON), path=path)
        return tensor
    if base_of(tensor) is not None:  # no local variable: `_owns_base` counts references
        own = base_fresh and not handler.replaces and _owns_base(tensor, output)
        if own and can_be_cut_out(base_of(tensor), tensor):
            hook.put_on_view(handler.tensor_hooks, tensor, base_of(tensor))
            return tensor
        handler.watch_memory(hook, tensor)
    handler.tensor_hooks.put(tensor, hook.at_tensor)
    return tensor


def _origin(tensor: Tensor, call: RunningCall) -> tuple[bool, bool, bool, bool]:
    """Return where a tensor comes from that a call returns.

    The answers are whether it was made in the call, whether it is one that the call was given,
    whether it shares memory with one, and whether its base was made in the call.
    """
    node, base = tensor.grad_fn, base_of(tensor)
    fresh, given, shared = made_since(node, call.sequence), False, False
    base_fresh = base is not None and made_since(base.grad_fn, call.sequence)
    for other, other_node, _, version in call.given:
        if other is tensor:
            given = True
            fresh = fresh and other_node is not node
        if base is not None and (base_of(other) is base or other is base):
            shared = True
            base_fresh = base_fresh and version_of(other) != version
    return fresh, given, shared, base_fresh


def _owns_memory(tensor: Tensor, base_fresh: bool, output: Any) -> bool:
    """Return True if nothing else, as far as can be seen, shows what is written to a tensor."""
    if base_of(tensor) is None:
        return use_count(tensor) == 1  # else it has views, or is saved for the backward
    return base_fresh and _owns_base(tensor, output)


def _owns_base(tensor: Tensor, output: Any) -> bool:
    """Return True if only a tensor holds its base, or outputs that show other parts of it.

    If others hold the base or view it, its gradient is not only this view's.
    """
    base: Any = base_of(tensor)
    if sys.getrefcount(base) > alone():
        return False
    if use_count(base) <= 2:
        return True
    views = [other for other in tensors_in(output) if base_of(other) is base]
    return use_count(base) == 1 + len(views) and sum(v.numel() for v in views) <= base.numel()


def can_be_cut_out(base: Tensor, view: Tensor) -> bool:
    """Return True if a view's gradient can be cut out of its base's."""
    return base.dtype == view.dtype and 0 not in view.stride()


@cache
def alone() -> int:
    """Return the reference count of a base that only its view holds, and a local variable."""
    view = torch.zeros(1, requires_grad=True).add(1).view(1, 1)
    base = base_of(view)
    return sys.getrefcount(base)


def _gate_output(
    handler: Handler, hook: GradientHook, tensor: Tensor, own: bool, twice: bool, call: RunningCall
) -> Tensor:
    """Put an identity in an output's place; hooks on its node run in the order of entering.

    It is a copy if the module made the memory itself and nothing else shows it, since a view would
    be lost with a later in-place operation. Otherwise it is a view, so that writing to it is seen
    wherever the memory is shown.
    """
    gate = tensor.clone() if own else alias(tensor)
    node = mark_gate(gate, -call.serial)
    if not own:
        handler.watch_memory(hook, gate)
    for function in tuple((backward_hooks_of(tensor) or {}).values()):
        earlier = getattr(function, "__self__", None)  # captures that were entered before
        if isinstance(earlier, GradientHook) and not earlier.muted:
            _move_to_gate(earlier, handler, None if own else gate, node, twice)
    handler.tensor_hooks.add(node, hook.at_node)
    return gate


def _move_to_gate(
    earlier: GradientHook, handler: Handler, view: Tensor | None, node: Any, twice: bool
) -> None:
    """Let an earlier capture of the same output see what passes the gate of an edit."""
    owner = earlier.handler
    if owner is None or owner.replaces or not owner.target.shares_port_with(handler.target):
        return
    earlier.muted = True
    if twice:
        owner.explain_separated(earlier.number, earlier.path)
        return
    moved = GradientHook.of(owner, earlier.number, earlier.path)
    if view is not None:
        owner.watch_memory(moved, view)
    owner.tensor_hooks.add(node, moved.at_node)


def mark_gate(gate: Tensor, serial: int, path: Path = ()) -> Any:
    """Mark a tensor as a gate of this call, at this path of its arguments; return its node."""
    node: Any = gate.grad_fn
    node.metadata[_MARK] = serial, path
    return node


def gate_of(node: Any, serial: int) -> Path | None:
    """Return where the gate of a node stands; None unless it was made for this very call."""
    mark = None if node is None else node.metadata.get(_MARK)
    return mark[1] if mark is not None and mark[0] == serial else None


def is_gate(node: Any, serial: int) -> bool:
    """Return True if a node belongs to a gate that an edit has made for this very call."""
    return gate_of(node, serial) is not None


def _reused(output: Any, start: int) -> set[int]:
    """Return the tensors of an output from which others of its tensors were computed."""
    tensors = tensors_in(output)
    edges = {(tensor.grad_fn, tensor.output_nr): id(tensor) for tensor in tensors}
    found = leading((tensor.grad_fn for tensor in tensors), edges, (), start)
    return {tensor for _, _, tensor in found}


def leading(
    starts: Iterable[Any],
    wanted: dict[Edge, Any],
    stops: Iterable[Edge],
    start: int,
    casts: bool = False,
) -> list[tuple[Any, int, Any]]:
    """Return the nodes made since `start`, reached from `starts`, with a next edge in `wanted`."""
    found: list[tuple[Any, int, Any]] = []
    seen: set[Node] = set()
    stack = [node for node in starts if made_since(node, start)]
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
                elif edge not in stops and sequence_number(follows) >= start:
                    stack.append(follows)
            elif follows is None or follows in seen or edge in stops:
                continue
            elif start <= sequence_number(follows) < LEAF:
                stack.append(follows)
    return found


# -- simple outputs -----------------------------------------------------------------------------

# torch's own modules that return a new tensor: no input, and no view of one. Without this table a
# capture of `grad_output` needs a hook before each call (1.84 instead of 1.65 times raw hooks).
_MAKERS: set[type[nn.Module]] = {
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm,
    nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU,
    nn.Tanh, nn.Sigmoid, nn.Softmax,
}  # fmt: skip


def makes_its_output(module: nn.Module) -> bool:
    """Return True for a module that always returns a new tensor, which nobody else replaces."""
    own = vars(module)
    if type(module) not in _MAKERS or "forward" in own or own.get("inplace"):
        return False
    return not (forward_hooks_of(module) or forward_pre_hooks_of(module) or global_forward_hooks)


def watch_simple_output(
    tracer: Tracer, ask: Ask, subject: Subject, number: int, output: Any, start: int, given: Any
) -> bool:
    """Hook an output that the call has made; return False if the general way is needed.

    `watch_outputs` does the same for every output. This takes no handler. `start` and `given` are
    those of the call, as it began.
    """
    node = output.grad_fn if type(output) is Tensor else None
    if node is None or sequence_number(node) < start:
        return False
    base = base_of(output)
    for other, *_ in given:
        if other is output or (base is not None and (base_of(other) is base or other is base)):
            return False
    if base is None:
        hook = GradientHook(tracer.ref, subject, ask, number)
        tracer.tensor_hooks.put(output, hook.deliver)
        return True
    if not made_since(base.grad_fn, start) or not can_be_cut_out(base, output):
        return False
    if sys.getrefcount(base) > alone() or use_count(base) > 2:
        return False
    hook = GradientHook(tracer.ref, subject, ask, number)
    hook.put_on_view(tracer.tensor_hooks, output, base)
    return True
