"""What is live on a model, and contexts that a model keeps alive.

- `attached(model)`: all that is live on a model
- `Anchored`: a context without places, which the model keeps alive by a hook that does nothing
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch import nn

from hookline.engine.lifecycle import Entering
from hookline.engine.module_hooks import Anchor, ModuleHooks
from hookline.places.tree import walk
from hookline.torch_private import forward_hooks_of, forward_pre_hooks_of

__all__ = ["Anchored", "Attached", "attached"]


class Anchored(Entering):
    """A context without places, tied to the model by a hook that does nothing."""

    _anchor: Anchor | None = None

    def _enter(self, attached: bool) -> None:
        super()._enter(attached)
        self._anchor = Anchor(self, attached)
        self._anchor.put_on(self._model)

    def _leave(self) -> None:
        if self._anchor is not None:
            self._anchor.remove_all()
            self._anchor = None
        super()._leave()


class Attached(list[Any]):
    """The contexts that are live on a model, in order of entering; `remove()` ends all of them."""

    def remove(self, value: Any = None) -> None:
        """End one of the contexts, or all, last first."""
        for context in reversed(self) if value is None else (value,):
            context.remove()


def attached(model: nn.Module) -> Attached:
    """Return all that is live on a model: open `with` blocks and attachments, in order of entering.

    >>> import hookline
    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> handle = hookline.hook(model, "0", print).attach()
    >>> attached(model)
    [<hookline hook at '0', attached>]
    >>> attached(model).remove()
    >>> attached(model)
    []
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attached was asked about a {type(model).__name__}. What is live is kept by the "
            f"modules of a model. Give a torch.nn.Module."
        )
    modules: list[Any] = [module for _, module in walk(model)]
    before = [hook for module in modules for hook in forward_pre_hooks_of(module).values()]
    hooks = [*before, *(hook for module in modules for hook in forward_hooks_of(module).values())]
    owners: list[Any] = [getattr(function, "__self__", None) for function in hooks]
    found: dict[int, tuple[int, Any]] = {}
    for owner in owners:
        context = owner.context() if isinstance(owner, ModuleHooks) and owner.context else None
        if context is not None:
            found.setdefault(id(context), (-owner.key, context))  # keys count down
    return Attached(context for _, context in sorted(found.values(), key=itemgetter(0)))
