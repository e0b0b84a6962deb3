"""Hooks on tensors and autograd nodes, through which gradients arrive.

- `GradientHook`: one such hook, for one call and one part of the value
- `TensorHooks`: the hooks of a context that are taken off at its end
- `cut_out(grad, view, stride, offset)`: the gradient of a view, from that of its base
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import hooks as torch_hooks

from hookline.torch_private import backward_id, hook_tensor, version_of
from hookline.values.nested import Path

if TYPE_CHECKING:
    from hookline.engine.asks import Ask
    from hookline.engine.calls import Subject
    from hookline.engine.handlers import Handler
    from hookline.engine.tracer import Tracer

__all__ = ["GradientHook", "TensorHooks", "cut_out"]


class TensorHooks(list[tuple["weakref.ref[Any]", int]]):
    """The hooks on tensors and nodes that are taken off at the end: their dicts and keys."""

    many = 64  # above this number, hooks of graphs that are gone are dropped

    def prune(self) -> None:
        """Forget the hooks of graphs that are gone, if there are many hooks."""
        if len(self) >= self.many:
            self[:] = [handle for handle in self if handle[0]() is not None]
            self.many = max(64, 2 * len(self))

    def add(self, holder: Any, function: Callable[..., Any]) -> None:
        """Put a hook on a tensor or node in torch's own way."""
        # In one step: an interrupt between two would leave the hook behind.
        self.append(((handle := holder.register_hook(function)).hooks_dict_ref, handle.id))

    def put(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """Put a hook on a tensor, in a quarter of the time of `Tensor.register_hook`."""
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


class GradientHook:
    """A hook on a tensor or node, for one call and one part of the value.

    It holds its tracer weakly: what was captured may hold the graph, which holds the hook.
    """

    __slots__ = (
        "aliases", "ask", "base", "dtype", "fired", "muted", "number", "path", "position",
        "subject", "tracer",
    )  # fmt: skip

    def __init__(
        self, tracer: weakref.ref[Tracer], subject: Subject, ask: Ask, number: int, path: Path = ()
    ) -> None:
        self.tracer, self.subject, self.ask = tracer, subject, ask
        self.number, self.path = number, path
        self.position = 0  # at a node: which of its edges leads to the input
        self.muted = False  # whether another hook delivers the gradient
        self.fired = False
        self.dtype: torch.dtype | None = None  # to cast to, where autocast's casts are passed over
        # Detached aliases with their versions: they show whether memory was changed in place.
        self.aliases: tuple[tuple[Tensor, int], ...] = ()
        self.base: tuple[Any, Any] | None = None  # the stride and offset of a view's base

    @classmethod
    def of(cls, handler: Handler, number: int, path: Path = ()) -> GradientHook:
        """Make a hook for a handler."""
        return cls(handler.tracer, handler.subject, handler.ask, number, path)

    @property
    def handler(self) -> Handler | None:
        """Return the handler that takes the gradient; None if the context is gone."""
        tracer = self.tracer()
        return None if tracer is None else tracer.handler(self.subject, self.ask)

    # -- in-place changes -----------------------------------------------------------------------

    def watch_memory(self, *tensors: Tensor) -> None:
        """Watch the memory of tensors: after an in-place change the hook is cut off."""
        self.aliases = tuple([(tensor.detach(), version_of(tensor)) for tensor in tensors])

    @property
    def changed(self) -> bool:
        """Return True if memory that is watched was changed in place."""
        changed = [alias for alias, version in self.aliases if version_of(alias) != version]
        return bool(changed)

    @property
    def lost(self) -> bool:
        """Return True if the gradient will not come, since memory was changed in place."""
        return not (self.fired or self.muted) and self.changed

    # -- putting it on --------------------------------------------------------------------------

    def put_on_view(self, hooks: TensorHooks, tensor: Tensor, base: Tensor) -> None:
        """Hook a view, and its base as it is after the call.

        The view's own node is exact, but no longer in the graph once the view is changed in place.
        The base's node stays in the graph: what flows into it is then the gradient, in the base's
        shape.
        """
        self.watch_memory(tensor)
        self.base = base.stride(), base.storage_offset()
        hooks.put(base, self.at_base)
        hooks.put(tensor, self.at_tensor)

    # -- the hooks ------------------------------------------------------------------------------

    @torch_hooks.unserializable_hook
    def at_tensor(self, grad: Tensor | None) -> Tensor | None:
        """Deliver the gradient of a tensor, unless its node was cut off."""
        return None if self.aliases and self.changed else self.deliver(grad)

    @torch_hooks.unserializable_hook
    def at_base(self, grad: Tensor | None) -> None:
        """Deliver the gradient of a view through its base, if the view's node was cut off."""
        if grad is not None and self.changed and self.base is not None:
            self.deliver(cut_out(grad, self.aliases[0][0], *self.base))

    def at_node(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> Any:
        """Deliver what a node passes on: a gate, or a node inside a module that leads to its input.

        Only what passes a gate, which has one edge, is replaced.
        """
        new = self.at_tensor(grad_inputs[self.position])
        return None if new is None else (new,)

    @torch_hooks.unserializable_hook
    def deliver(self, grad: Tensor | None) -> Tensor | None:
        """Log a gradient, or give it to the handler; return what replaces it, or None."""
        tracer, ask = self.tracer(), self.ask
        if grad is None or tracer is None or self.muted:
            return None
        self.fired = True
        if self.dtype is not None:
            grad = grad.to(self.dtype)
        if ask.keep_gradient is None:
            handler = tracer.handler(self.subject, ask)
            return handler.gradient(grad, self.number, self.path)
        number = self.number, backward_id(), self.path
        tracer.events.append((self.subject, ask, number, ask.keep_gradient(grad)))
        return None


def cut_out(grad: Tensor, view: Tensor, stride: Any, offset: int) -> Tensor:
    """Return the gradient of a view, from that of its base, which has this stride and offset."""
    if grad.stride() != stride:
        held = torch.empty_strided(grad.size(), stride, dtype=grad.dtype, device=grad.device)
        grad = held.copy_(grad)
    first = view.storage_offset() - offset + grad.storage_offset()
    return grad.as_strided(view.size(), view.stride(), first)
