"""The matplotlib Figure that is drawn on if no Axes were given.

- `NotebookFigure`: a Figure that notebooks show, and that pyplot does not know

Importing this file imports matplotlib.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

__all__ = ["NotebookFigure"]


class NotebookFigure(Figure):
    """A Figure outside of pyplot: there is nothing to close, and notebooks show it."""

    def __init__(self, size: tuple[float, float], **options: Any) -> None:
        super().__init__(figsize=size, layout="constrained", **options)

    def _repr_png_(self) -> bytes:
        """Return the picture, for notebooks."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=144, bbox_inches="tight")
        return buffer.getvalue()
