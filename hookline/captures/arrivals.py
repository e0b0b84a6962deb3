"""Hooks on tensors and nodes by which the gradients of a log arrive.

- `Arrival`: the hooks for one call of a module
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import hooks as torch_hooks

from hookline.engine.tensor_hooks import cut_out
from hookline.torch_private import backward_id, lazy_clone, version_of
from hookline.values.snapshots import LAZY

__all__ = ["Arrival"]


class Arrival:
    """The hooks by which the gradient of one call arrives. They hold their log weakly."""

    __slots__ = ("alias", "base", "ident", "index", "log", "position", "version")

    def __init__(self, log: weakref.ref[Any], ident: int, index: int) -> None:
        self.log, self.ident, self.index = log, ident, index
        self.alias: Tensor | None = None  # of the tensor, if it is a view

    @torch_hooks.unserializable_hook
    def arrive(self, grad: Tensor | None, changed: bool = False) -> None:
        """The hook on a tensor: keep its gradient. Of a view that was changed, not all comes so."""
        alias, log = self.alias, self.log()
        if alias is not None and (version_of(alias) != self.version) is not changed:
            return
        if grad is None or log is None:
            return
        if LAZY and type(grad) is Tensor and grad.is_cpu and not grad.requires_grad:
            try:  # the commonest snapshot, without a call: see snapshots.py
                if grad.untyped_storage().resizable():
                    entry = (self.ident, self.index, backward_id(), lazy_clone(grad))
                    log.entries.append(entry)
                    return
            except RuntimeError:  # no storage
                pass
        tap = log.tap_of(self.ident)
        if tap is not None:
            tap.gradient(grad, self.index, ())

    def at_node(self, grad_inputs: tuple[Tensor | None, ...], _: Any) -> None:
        """The hook on a node inside a module: what it passes on to the module's input."""
        self.arrive(grad_inputs[self.position])

    def view(self, tensor: Tensor, base: Tensor) -> None:
        """The call has returned a view of what it has made, by which its gradient may come, too."""
        self.alias, self.version = tensor.detach(), version_of(tensor)
        self.base: tuple[Any, Any] = base.stride(), base.storage_offset()

    @torch_hooks.unserializable_hook
    def at_base(self, grad: Tensor | None) -> None:
        """The hook on the base of a view; see `Arm.at_base`."""
        alias = self.alias
        if alias is not None and version_of(alias) != self.version and grad is not None:
            self.arrive(cut_out(grad, alias, *self.base), True)
