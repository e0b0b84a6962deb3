"""Import optional libraries, or say how to install them.

- `load(name, extra)`: a module of an optional library, or an error with the install line
"""

from __future__ import annotations

import importlib
from typing import Any

from hookline.errors import MissingExtra

__all__ = ["load"]


def load(name: str, extra: str) -> Any:
    """Import a module of an optional library; the error has the install line.

    >>> load("no_such_library", "wandb")
    Traceback (most recent call last):
    hookline.errors.MissingExtra: hookline.integrations.wandb was asked for. It needs
    no_such_library, which is not installed. Install it with: pip install 'hookline[wandb]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"hookline.integrations.{extra} was asked for.",
            f"It needs {name}, which is not installed.",
            f"Install it with: pip install 'hookline[{extra}]'",
        ) from error
