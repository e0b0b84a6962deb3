"""Hooks on tensors and autograd nodes, by which gradients arrive.

- `Arm`: a hook on a tensor or node, for one tap, call and part of the value
- `Shares`: a hook on a node inside a module: what it passes on to the module's inputs
- `put_hook(tensor, function)`: what `Tensor.register_hook` does, in a quarter of the time
- `hang(tensor, node, function)`: the same for a tensor that a node has made
- `cut_out(grad, view, stride, offset)`: the gradient of a view, from that of its base
- `handles(tap)`: where the handle of a hook is kept
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import hooks as torch_hooks

from hookline.core.nested import Path

if TYPE_CHECKING:
    from hookline.core.taps import Tap

__all__ = ["Arm", "Shares", "cut_out", "handles", "hang", "put_hook"]

_keys = itertools.count(-1, -1)  # of hooks on tensors; torch's own count up from 0


def handles(tap: Tap) -> list[Any]:
    """Where to keep the handle of a hook, in one step with its making."""
    context = tap.context()
    return [] if context is None else context.handles()


class _Handle:
    """Removes a hook that `put_hook` has put on a tensor."""

    __slots__ = ("hooks_dict_ref", "key")

    def __init__(self, hooks: Any, key: int) -> None:
        self.hooks_dict_ref = weakref.ref(hooks)
        self.key = key

    def remove(self) -> None:
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.key, None)


def put_hook(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> Any:
    """What `Tensor.register_hook` does, with a lighter handle: a quarter of the time."""
    # register_hook may crash the process on a view that was changed in place, unless grad_fn was
    # read before: https://github.com/pytorch/pytorch/issues/196459
    node: Any = tensor.grad_fn
    if type(tensor) is not Tensor or not hasattr(node, "_register_hook_dict"):
        return cast(Any, tensor).register_hook(function)
    return _Handle(*hang(tensor, node, function))


def hang(tensor: Tensor, node: Any, function: Callable[[Tensor], Any]) -> tuple[Any, int]:
    """Put a hook on a tensor that a node has made; the dict that it is in, and its key there."""
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    key = next(_keys)
    hooks[key] = function
    return hooks, key


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
        handles(tap).append(put_hook(tensor, self.at_tensor))

    def watch_base(self, tap: Tap, base: Tensor) -> None:
        self.base = base.stride(), base.storage_offset()
        handles(tap).append(put_hook(base, self.at_base))

    def watch_gate(self, tap: Tap, node: Any) -> None:
        handles(tap).append(node.register_hook(self.at_gate))

    def guard(self, *tensors: Tensor) -> None:
        self.aliases = [(tensor.detach(), tensor._version) for tensor in tensors]

    @property
    def changed(self) -> bool:
        for alias, version in self.aliases:  # noqa: SIM110 - a hot path
            if alias._version != version:
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


class Shares:
    """The hook on a node inside a module: what it passes on to the module's inputs."""

    __slots__ = ("arms",)

    def __init__(self, arms: list[tuple[int, Arm]]) -> None:
        self.arms = arms

    def at_node(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
        for position, arm in self.arms:
            arm.at_tensor(grad_inputs[position])
