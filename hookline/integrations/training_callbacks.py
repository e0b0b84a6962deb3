"""The part of a callback that all training libraries share.

- `TrainingCallback`: attaches a context when a training begins, and removes it when it ends
"""

from __future__ import annotations

from typing import Any

__all__ = ["TrainingCallback"]


class TrainingCallback:
    """The base of callbacks that keep a context attached while a training runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self._context: Any = None

    def attach(self, context: Any) -> Any:
        """Attach a context, in place of one that an earlier training has left."""
        self.remove()
        self._context = context.attach()
        return context

    def remove(self, *_: Any, **__: Any) -> None:
        """Remove the hooks; the arguments are those of the library."""
        if self._context is not None:
            self._context.remove()
