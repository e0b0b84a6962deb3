"""Hooks on tensors and autograd nodes, by which gradients arrive.

- `Arm`: a hook on a tensor or node, for one tap, call and part of the value
- `pass_on(arms)`: a hook on a node inside a module: what it passes on to the module's inputs
- `Handles`: the hooks that are to be taken off at the end; `put` is what `Tensor.register_hook`
  does, in a quarter of the time
- `cut_out(grad, view, stride, offset)`: the gradient of a view, from that of its base
- `handles(tap)`: where the hooks for a tap are kept
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import hooks as torch_hooks

from hookline.torch_private import hook_tensor, version_of
from hookline.values.nested import Path

if TYPE_CHECKING:
    from hookline.engine.handlers import Tap

__all__ = ["Arm", "Handles", "cut_out", "handles", "pass_on"]


class Handles(list[tuple["weakref.ref[Any]", int]]):
    """The hooks on tensors and nodes that are to be taken off at the end: their dicts and keys."""

    many = 64  # with more than that, those of graphs that are gone are looked for

    def prune(self) -> None:
        """Forget the hooks of graphs that are gone."""
        self[:] = [handle for handle in self if handle[0]() is not None]
        self.many = max(64, 2 * len(self))

    def add(self, holder: Any, function: Callable[..., Any]) -> None:
        """Put a hook on a tensor or node in torch's own way."""
        # In one step: an interrupt between two would leave the hook behind.
        self.append(((handle := holder.register_hook(function)).hooks_dict_ref, handle.id))

    def put(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """What `Tensor.register_hook` does, with a lighter handle: a quarter of the time."""
        # register_hook may crash the process on a view that was changed in place, unless grad_fn
        # was read before: https://github.com/pytorch/pytorch/issues/196459
        node: Any = tensor.grad_fn
        handle = hook_tensor(tensor, node, function)
        if handle is None:
            self.add(tensor, function)
        else:
            self.append(handle)

    def remove_all(self) -> None:
        """Take the hooks off; fine if they are off already."""
        for ref, key in self:
            (ref() or {}).pop(key, None)
        self.clear()


def handles(tap: Tap) -> Handles:
    """Where to keep a hook, in one step with its making."""
    context = tap.context()
    return Handles() if context is None else context.handles()


def cut_out(grad: Tensor, view: Tensor, stride: Any, offset: int) -> Tensor:
    """The gradient of a view, from that of its base, which has this stride and offset."""
    if grad.stride() != stride:
        held = torch.empty_strided(grad.size(), stride, dtype=grad.dtype, device=grad.device)
        grad = held.copy_(grad)
    first = view.storage_offset() - offset + grad.storage_offset()
    return grad.as_strided(view.size(), view.stride(), first)


class Arm:
    """A hook on a tensor or node. It holds its tap weakly: the tap's record may hold the graph."""

    muted = False
    fired = False
    dtype: torch.dtype | None = None  # to cast to: autocast's casts are looked through
    aliases: Sequence[tuple[Tensor, int]] = ()  # show whether memory was changed in place
    base: tuple[Any, Any] = ((), 0)  # the stride and the offset of a view's base

    def __init__(self, tap: Tap, index: int, path: Path = ()) -> None:
        self.tap = tap.ref
        self.index = index
        self.path = path

    def watch(self, tap: Tap, tensor: Tensor) -> None:
        handles(tap).put(tensor, self.at_tensor)

    def watch_base(self, tap: Tap, base: Tensor, view: Tensor) -> None:
        self.guard(view)
        self.base = base.stride(), base.storage_offset()
        handles(tap).put(base, self.at_base)

    def watch_gate(self, tap: Tap, node: Any) -> None:
        handles(tap).add(node, self.at_gate)

    def guard(self, *tensors: Tensor) -> None:
        self.aliases = [(tensor.detach(), version_of(tensor)) for tensor in tensors]

    @property
    def changed(self) -> bool:
        for alias, version in self.aliases:  # noqa: SIM110 - a hot path
            if version_of(alias) != version:
                return True
        return False

    @property
    def lost(self) -> bool:
        return not self.fired and self.changed

    @torch_hooks.unserializable_hook
    def at_tensor(self, grad: Tensor | None) -> Tensor | None:
        """The hook on a tensor."""
        return None if self.aliases and self.changed else self.deliver(grad)

    def deliver(self, grad: Tensor | None) -> Tensor | None:
        tap = self.tap()
        if grad is None or tap is None or self.muted:
            return None
        if self.dtype is not None:
            grad = grad.to(self.dtype)
        self.fired = True
        return tap.gradient(grad, self.index, self.path)

    def at_gate(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> Any:
        """The hook on a gate's node: what has passed the gate."""
        new = self.at_tensor(grad_inputs[0])
        return None if new is None else (new,)

    @torch_hooks.unserializable_hook
    def at_base(self, grad: Tensor | None) -> None:
        """The hook on a view's base, as it is after the call.

        The view's own node is exact, but out of the graph if the view was changed in place since.
        The base's node stays: what flows into it is then the gradient, in the base's shape.
        """
        if grad is not None and self.changed:
            self.deliver(cut_out(grad, self.aliases[0][0], *self.base))


def pass_on(arms: list[tuple[int, Arm]], grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
    """The hook on a node inside a module: what it passes on to the module's inputs."""
    for position, arm in arms:
        arm.at_tensor(grad_inputs[position])
