"""Keep values of layers, and check on reading that they did not change.

- `recursive_copy(x, clone, detach, retain_grad)`: the original name
- `LastValue`: the last value of one layer, safe against later changes
- `RetainedValues`: the values of several layers as a dict
- `UnreadWarning`: warns once that earlier values were never read
- `with_gradient(value)`: a value whose tensors will have a `.grad`, and a copy for the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hookline.errors import ValueChanged, warn_outside
from hookline.torch_private import version_of
from hookline.values.nested import map_leaves
from hookline.values.snapshots import snapshot

__all__ = ["LastValue", "RetainedValues", "UnreadWarning", "recursive_copy", "with_gradient"]


def recursive_copy(
    x: Any,
    clone: bool | None = None,
    detach: bool | None = None,
    retain_grad: bool | None = None,
) -> Any:
    """Return the structure with its tensors cloned or detached; without an option, `x` itself.

    >>> import torch
    >>> state = {"h": [torch.ones(2)], "step": 3}
    >>> copied = recursive_copy(state, clone=True)
    >>> _ = state["h"][0].zero_()
    >>> copied
    {'h': [tensor([1., 1.])], 'step': 3}

    Args:
        x: a tensor, or tuples, lists, dicts, dataclasses … of tensors; all else in it is kept.
        clone: copy the tensors; those without gradient share memory until one side is written to.
        detach: take the tensors out of the autograd graph.
        retain_grad: mark the tensors of `x` themselves, so that they have a `.grad` after a
            backward. It goes before `detach`.
    """
    if not (clone or detach or retain_grad):
        return x
    detach = detach and not retain_grad

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if retain_grad and (leaf.is_floating_point() or leaf.is_complex()):
            if not leaf.requires_grad:
                leaf.requires_grad_()
            leaf.retain_grad()
        if clone and (detach or not leaf.requires_grad):
            return snapshot(leaf)
        leaf = leaf.detach() if detach else leaf
        return leaf.clone() if clone else leaf

    return map_leaves(copy, x)


def with_gradient(value: Any) -> tuple[Any, Any]:
    """Return a value whose tensors will have a `.grad`, and a copy of it for the model.

    The copy lets in-place operations follow. The tensors are nodes of their own, so that a layer
    that returns its input reports its own gradient, and the input is not marked.

    >>> import torch
    >>> kept, passed = with_gradient(torch.ones(2))
    >>> (passed * 3).sum().backward()
    >>> kept.grad
    tensor([3., 3.])
    """

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        own = leaf.view_as(leaf)
        if not own.requires_grad:
            own = own.detach().requires_grad_()
        own.retain_grad()
        return own

    kept = map_leaves(mark, value)
    return kept, recursive_copy(kept, clone=True)


class UnreadWarning:
    """Warns once for all layers when a value is read and those before it were never read.

    A trace that only edits retains values, too, unless told otherwise. Who reads none lost none.
    """

    def __init__(self) -> None:
        self.told = False

    def tell(self, what: str) -> None:
        """Warn that a value was read, and the ones before it are lost."""
        if not self.told:
            self.told = True
            warn_outside(
                f"The {what} was read: it is that of the last call only, and those of the calls "
                f"before were never read. Read it after each call, or use hookline.capture, which "
                f"keeps all calls."
            )


class LastValue:
    """The last value of one layer.

    Tensors that require grad are kept as they are, and reading raises `ValueChanged` if one was
    changed in place since; all others are snapshots.
    """

    __slots__ = ("_losses", "_lost", "_unread", "_value", "_versions", "filled")

    def __init__(self, losses: UnreadWarning) -> None:
        self._losses = losses
        self.clear()

    def clear(self) -> None:
        """Forget the value."""
        self._value: Any = None
        self._versions: list[tuple[Tensor, int]] = []
        self.filled = self._unread = self._lost = False

    def put(self, value: Any, again: bool = False) -> None:
        """Keep a value as it is; `again` if it is of the same call as the one before."""
        self._lost |= self._unread and not again
        self._value, self._versions = value, []
        self.filled = self._unread = True

    def set(self, value: Any) -> None:
        """Set a value of the user's, which is not lost when a call brings another."""
        self.clear()
        self._value, self.filled = value, True

    def keep(
        self,
        value: Any,
        clone: bool = False,
        detach: bool = False,
        freeze: Callable[[Tensor], Tensor] = snapshot,
        again: bool = False,
    ) -> None:
        """Keep a value safely."""
        versions: list[tuple[Tensor, int]] = []

        def keep_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if detach or not leaf.requires_grad or leaf.is_inference():
                return freeze(leaf)
            if clone:
                return leaf.clone()
            versions.append((leaf, version_of(leaf)))
            return leaf

        kept = keep_leaf(value) if type(value) is Tensor else map_leaves(keep_leaf, value)
        self.put(kept, again)
        self._versions = versions

    def copied(self, losses: UnreadWarning) -> LastValue:
        """Return a copy that later changes of this value do not reach; attached tensors stay so."""
        attached = {id(tensor) for tensor, _ in self._versions}

        def copy(leaf: Any) -> Any:
            return leaf if id(leaf) in attached or not isinstance(leaf, Tensor) else snapshot(leaf)

        other = LastValue(losses)
        if self.filled:
            other.set(map_leaves(copy, self._value))
            other._versions = list(self._versions)
        return other

    def read(self, what: str) -> Any:
        """Return the value, if it did not change."""
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise ValueChanged(
                    f"The {what} was asked for.",
                    "It was changed in place since.",
                    "Retain it with clone=True or detach=True, or read it before the change.",
                )
        if self._lost:
            self._losses.tell(what)
        self._unread = self._lost = False
        return self._value


class RetainedValues(Mapping[str, Any]):
    """The values of retained layers by alias; writing None forgets one."""

    def __init__(self, kept: Mapping[str, LastValue]) -> None:
        self._kept = kept

    def __getitem__(self, alias: str) -> Any:
        return self._kept[alias].read(f"retained layer {alias!r}")

    def __setitem__(self, alias: str, value: Any) -> None:
        if value is None:
            self._kept[alias].clear()
        else:
            self._kept[alias].set(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
