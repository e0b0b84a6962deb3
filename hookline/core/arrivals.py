"""Hooks on tensors and nodes by which the gradients of a log arrive.

- `Arrival`: on a tensor that a call has made
- `ViewArrival`: on a view of what a call has made, and on the base of it
- `Share`: on a node inside a module, for what it passes on to the module's input
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import hooks as torch_hooks

from hookline.core.arms import cut_out
from hookline.core.recomputation import in_backward
from hookline.core.snapshots import LAZY

__all__ = ["Arrival", "Share", "ViewArrival"]


class Arrival:
    """A hook by which the gradient of one call arrives. It holds its log weakly."""

    __slots__ = ("ident", "index", "log")

    def __init__(self, log: weakref.ref[Any], ident: int, index: int) -> None:
        self.log, self.ident, self.index = log, ident, index

    @torch_hooks.unserializable_hook
    def at_tensor(self, grad: Tensor | None) -> None:
        """The hook on a tensor."""
        log = self.log()
        if grad is None or log is None:
            return
        if LAZY and type(grad) is Tensor and grad.is_cpu and not grad.requires_grad:
            try:  # the commonest snapshot, without a call: see snapshots.py
                if grad.untyped_storage().resizable():
                    entry = (self.ident, self.index, in_backward(), grad._lazy_clone())
                    log.entries.append(entry)
                    return
            except RuntimeError:  # no storage
                pass
        tap = log.tap_of(self.ident)
        if tap is not None:
            tap.gradient(grad, self.index, ())


class ViewArrival(Arrival):
    """The same for a view of what the call has made; see `Arm.at_base`."""

    __slots__ = ("alias", "base", "version")

    def __init__(self, log: weakref.ref[Any], ident: int, index: int, view: Tensor) -> None:
        self.log, self.ident, self.index = log, ident, index
        self.alias, self.version = view.detach(), view._version

    @torch_hooks.unserializable_hook
    def at_view(self, grad: Tensor | None) -> None:
        """The hook on the view."""
        if self.alias._version == self.version:
            self.at_tensor(grad)

    @torch_hooks.unserializable_hook
    def at_base(self, grad: Tensor | None) -> None:
        """The hook on its base."""
        if grad is not None and self.alias._version != self.version:
            self.at_tensor(cut_out(grad, self.alias, *self.base))


class Share(Arrival):
    """The same for what a node inside the module passes on to its input."""

    __slots__ = ("position",)

    def at_node(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
        """The hook on a node."""
        self.at_tensor(grad_inputs[self.position])
