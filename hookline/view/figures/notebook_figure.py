"""The figure that is drawn on when no Axes were given.

- `NotebookFigure`: a matplotlib Figure that notebooks show, and that pyplot does not know of

Importing this imports matplotlib.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

__all__ = ["NotebookFigure"]


class NotebookFigure(Figure):
    """A Figure outside pyplot: nothing to close, and it shows itself in a notebook."""

    def __init__(self, size: tuple[float, float], **options: Any) -> None:
        super().__init__(figsize=size, layout="constrained", **options)

    def _repr_png_(self) -> bytes:
        """The picture, for notebooks."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=144, bbox_inches="tight")
        return buffer.getvalue()
