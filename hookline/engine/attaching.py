"""What is live on a model, and how it stays so.

- `attached(model)`: all that is live on a model
- `Anchored`: a context without places, that the model keeps alive by a hook that does nothing
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from hookline.engine.handlers import SERIALS
from hookline.engine.lifecycle import Entering
from hookline.engine.tracer import Site
from hookline.places.tree import walk
from hookline.torch_private import forward_hooks_of, forward_pre_hooks_of

__all__ = ["Anchored", "Attached", "attached"]


class Anchored(Entering):
    """A context without taps: a hook that does nothing ties it to the model."""

    _anchor: Site | None = None
    _serial = 0

    def _enter(self, attached: bool) -> None:
        super()._enter(attached)
        self._serial = next(SERIALS)
        self._anchor = Site(self._model, weakref.ref(self), None)
        if attached:
            self._anchor.keeper = self
        self._anchor.register(self._model)

    def _leave(self) -> None:
        if self._anchor is not None:
            self._anchor.unregister(self._model)
            self._anchor = None
        super()._leave()


class Attached(list[Any]):
    """What is live on a model, in order of entering; `remove()` ends all of it."""

    def remove(self, value: Any = None) -> None:
        """End one of the contexts, or all, last first."""
        for context in reversed(self) if value is None else (value,):
            context.remove()


def attached(model: nn.Module) -> Attached:
    """All that is live on a model: open `with` blocks and attachments, in order of entering.

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
    sites = [getattr(function, "__self__", None) for function in hooks]
    contexts = [site.context() for site in sites if isinstance(site, Site) and site.context]
    found = {context._serial: context for context in contexts if context is not None}
    return Attached(found[serial] for serial in sorted(found))
