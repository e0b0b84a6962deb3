"""Gradients at places, by hooks on tensors and autograd nodes.

Full backward hooks are not used: they break in-place models, rewrap inputs, and are silent for
nested values. Instead, around a module's call:

- `watch_tensor`: the gradient of a parameter, a buffer or a plain tensor, before accumulation
- `note_given` (before the call), `watch_outputs`: what flows into a module's outputs
- `alike`, `alone`, `uses`: whether the gradient of a view can be had from its base
- `grouped`, `tensors_in`, `without`, `made_since`, `leading`, `is_gate`, `mark_gate`: for
  `input_gradients.py`

A capture replaces no value: it hooks the output tensors, and the nodes inside the module that
lead to the inputs. An edit puts a *gate*, an identity, at its place. What cannot be told apart
from other gradients is explained, never guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hookline.engine.tensor_hooks import Arm
from hookline.torch_private import (
    backward_hooks_of,
    base_of,
    is_view,
    sequence_number,
    use_count,
    version_of,
)
from hookline.values.nested import Path, leaves, set_part

if TYPE_CHECKING:
    from hookline.engine.handlers import Frame, Tap

__all__ = [
    "DIVIDED", "LEAF", "NONE_CAME", "NO_GRAD", "NO_TENSOR", "PASSED_ON", "VIEW_CHANGED", "Edge",
    "alias", "alike", "alone", "gate_of", "grouped", "is_gate", "is_usable", "leading",
    "made_since", "mark_gate", "note_given", "note_recomputed", "tensors_in",
    "watch_outputs", "watch_tensor", "without",
]  # fmt: skip

Edge = tuple[Any, int]
LEAF = 2**64 - 1  # the sequence number of nodes that accumulate, which lead nowhere
_ONE: list[tuple[Tensor, list[Path]]] = []  # one tensor, the whole value

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
    """Whether a node is there and was made when the sequence had come to `start`, or later."""
    return node is not None and sequence_number(node) >= start


# -- parameters, buffers, plain tensors -----------------------------------------------------------


def watch_tensor(tap: Tap, tensor: Tensor | None) -> None:
    """Hook a tensor that exists already; its gradients are numbered by backward pass."""
    if tensor is None or not tensor.requires_grad:
        tap.explain(0, *NOT_ASKED)
        return
    arm = Arm(tap, -1, ())
    if is_view(tensor):
        tap.guard(arm, tensor)
    arm.watch(tap, tensor)


# -- outputs --------------------------------------------------------------------------------------


def grouped(value: Any) -> list[tuple[Tensor, list[Path]]]:
    """The tensors of a value that require grad, each once, with the paths where they stand."""
    if isinstance(value, Tensor):
        return [(value, [()])] if value.requires_grad and is_usable(value) else []
    found: dict[int, tuple[Tensor, list[Path]]] = {}
    for path, tensor in leaves(value):
        if tensor.requires_grad and is_usable(tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(path)
    return list(found.values())


def is_usable(tensor: Tensor) -> bool:
    """Whether torch lets a tensor be used: not, say, a chunk of what was changed in place since."""
    try:
        _ = tensor.grad_fn
    except RuntimeError:
        return False
    return True


def without(value: Any) -> tuple[str, str]:
    """Why no gradient comes for a value, none of whose tensors has one."""
    return NO_GRAD if leaves(value) else NO_TENSOR


def note_recomputed(tap: Tap, index: int) -> None:
    """A call whose gradients come by its recomputation has no longer the reason of the first run.

    It keeps one, by which it is known to need watching whenever it is recomputed.
    """
    if torch.is_grad_enabled():
        tap.explain(index, *NONE_CAME)


def note_given(args: Any, kwargs: Any) -> list[tuple[Tensor, Any, int, int]]:
    """Before a call: the tensors that it is given, with node, number and version as they are."""
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
    """The tensors of a value that require grad."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and is_usable(value) else []
    return [tensor for tensor, _ in grouped(value)]


def watch_outputs(tap: Tap, value: Any, output: Any, index: int, frame: Frame) -> Any:
    """Hook the tensors of an output; returns the value, with gates in it if the tap replaces."""
    alone = value is output and isinstance(value, Tensor) and value.requires_grad
    if frame.recomputed:
        note_recomputed(tap, index)
    if alone and torch.is_grad_enabled():  # the commonest case, without the lists below
        tap.expect(value, index, _ONE)
        return _watch_output(tap, value, index, (), False, frame, output)
    found = grouped(value) if torch.is_grad_enabled() else []
    tap.expect(value, index, found)
    if not found:
        tap.explain(index, *without(value))
    whole = found if value is output else grouped(output)
    several = {id(tensor) for tensor, paths in whole if len(paths) > 1}
    reused = set[int]() if len(whole) < 2 else _reused(output, frame.sequence)
    for tensor, paths in found:
        mixed = id(tensor) in reused or (tap.replaces and id(tensor) in several)
        for path in paths if tap.replaces else paths[:1]:
            new = _watch_output(tap, tensor, index, path, mixed, frame, output)
            if new is not tensor:
                value = set_part(value, path, new)
    return value


def _watch_output(
    tap: Tap, tensor: Tensor, index: int, path: Path, mixed: bool, frame: Frame, output: Any
) -> Tensor:
    """Hook one tensor of an output, or put a gate in its place; mixed, if what flows into it is
    also for other parts of the output: it stands there as well, or they are computed from it.
    """
    arm = Arm(tap, index, path)
    if is_gate(tensor.grad_fn, -frame.serial):  # of an edit that was entered before
        if is_view(tensor):
            tap.guard(arm, tensor)
        arm.watch_gate(tap, tensor.grad_fn)
        return tensor
    fresh, given, shared, base_fresh = _origin(tensor, frame)
    distinct = fresh and not mixed
    if tap.replaces and not (given and distinct):
        own = distinct and not shared and _owns_memory(tensor, base_fresh, output)
        twice = [other for _, other in leaves(output) if other is tensor]
        return _gate_output(tap, arm, tensor, own, len(twice) > 1, frame)
    if not distinct:
        tap.explain(index, *(REUSED if fresh else PASSED_ON), path=path)
        return tensor
    if base_of(tensor) is not None:
        own = base_fresh and not tap.replaces and _owns_base(tensor, output)
        if own and alike(base_of(tensor), tensor):
            arm.watch_base(tap, base_of(tensor), tensor)
        else:
            tap.guard(arm, tensor)
    arm.watch(tap, tensor)
    return tensor


def _origin(tensor: Tensor, frame: Frame) -> tuple[bool, bool, bool, bool]:
    """Of a tensor that a call returns: whether it was made in the call, whether it is one that the
    call was given, whether it has its memory in common with one, and whether its base was made in
    the call.
    """
    node, base = tensor.grad_fn, base_of(tensor)
    fresh, given, shared = made_since(node, frame.sequence), False, False
    base_fresh = base is not None and made_since(base.grad_fn, frame.sequence)
    for other, other_node, _, version in frame.given:
        if other is tensor:
            given = True
            fresh = fresh and other_node is not node
        if base is not None and (base_of(other) is base or other is base):
            shared = True
            base_fresh = base_fresh and version_of(other) != version
    return fresh, given, shared, base_fresh


def _owns_memory(tensor: Tensor, base_fresh: bool, output: Any) -> bool:
    """Whether nothing else, as far as can be seen, shows what is written to a tensor's memory."""
    if base_of(tensor) is None:
        return use_count(tensor) == 1  # else it has views, or is saved for the backward
    return base_fresh and _owns_base(tensor, output)


def _owns_base(tensor: Tensor, output: Any) -> bool:
    """Whether a tensor's base is held by it alone, or by outputs that show other parts of it.

    Of a base that others hold or have views of, not all that flows is this view's.
    """
    base: Any = base_of(tensor)
    if sys.getrefcount(base) > alone():
        return False
    if use_count(base) <= 2:
        return True
    views = [other for other in tensors_in(output) if base_of(other) is base]
    return use_count(base) == 1 + len(views) and sum(v.numel() for v in views) <= base.numel()


def alike(base: Tensor, view: Tensor) -> bool:
    """Whether a view's gradient can be cut out of its base's."""
    return base.dtype == view.dtype and 0 not in view.stride()


@cache
def alone() -> int:
    """The reference count of a base that only its view holds, seen from a local variable."""
    view = torch.zeros(1, requires_grad=True).add(1).view(1, 1)
    base = base_of(view)
    return sys.getrefcount(base)


def _gate_output(
    tap: Tap, arm: Arm, tensor: Tensor, own: bool, twice: bool, frame: Frame
) -> Tensor:
    """An identity in an output's place; hooks on its node run in the order of entering.

    A copy if the module made the memory itself and nothing else shows it, since a view would be
    lost with a later in-place operation; else a view, so that writing to it is seen there as well.
    """
    gate = tensor.clone() if own else alias(tensor)
    node = mark_gate(gate, -frame.serial)
    if not own:
        tap.guard(arm, gate)
    for hook in tuple((backward_hooks_of(tensor) or {}).values()):
        earlier = getattr(hook, "__self__", None)  # captures that were entered before
        if isinstance(earlier, Arm) and not earlier.muted:
            owner = earlier.tap()
            if owner is None or owner.replaces or not owner.target.meets(tap.target):
                continue
            earlier.muted = True
            if twice:
                owner.divided(earlier.index, earlier.path)
                continue
            moved = Arm(owner, earlier.index, earlier.path)
            if not own:
                owner.guard(moved, gate)
            moved.watch_gate(owner, node)
    arm.watch_gate(tap, node)
    return gate


def mark_gate(gate: Tensor, serial: int, path: Path = ()) -> Any:
    """Remember that a tensor is a gate of this call, at this path of its arguments; its node."""
    node: Any = gate.grad_fn
    node.metadata[_MARK] = serial, path
    return node


def gate_of(node: Any, serial: int) -> Path | None:
    """Where the gate stands whose node this is; None if no edit has made it for this very call."""
    mark = None if node is None else node.metadata.get(_MARK)
    return mark[1] if mark is not None and mark[0] == serial else None


def is_gate(node: Any, serial: int) -> bool:
    """Whether a node is that of a gate which an edit has made for this very call."""
    return gate_of(node, serial) is not None


def _reused(output: Any, start: int) -> set[int]:
    """The tensors of an output from which others of its tensors were computed."""
    tensors = tensors_in(output)
    if len(tensors) < 2:
        return set()
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
    """The nodes made since `start`, reached from `starts`, that have a next edge among `wanted`."""
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
