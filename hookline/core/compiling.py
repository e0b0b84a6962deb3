"""Compiled models: while something looks inside, they run eagerly.

A graph that torch.compile has made runs no hooks that came later, and says nothing. The stance
"force_eager" makes every compiled model of the process run as if it were not compiled.

- `suspend()`, `resume()`: run compiled models eagerly from now on; as before
- `untouched()`: whether nothing was compiled so far, so that hooks will be in the first graph
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

__all__ = ["resume", "suspend", "untouched"]


class _State:
    """Contexts that want eager runs may end in any order: the last one puts the stance back."""

    lock = threading.Lock()
    count = 0
    stance: Any = None


_eager = _State()


def suspend() -> bool:
    """Run compiled models eagerly; whether there can be any (importing the compiler is slow)."""
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        return False
    with _eager.lock:
        if _eager.count == 0:
            _eager.stance = torch.compiler.set_stance("force_eager")
        _eager.count += 1
    return True


def resume() -> None:
    """One `suspend` less; after the last, compiled models run as before."""
    with _eager.lock:
        _eager.count -= 1
        if _eager.count == 0:
            _eager.stance.__exit__(None, None, None)
            _eager.stance = None


def untouched() -> bool:
    """Whether nothing was compiled so far in this process, or since the compiler was reset."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(dynamo, "input_codes", None), "seen", None)
    return dynamo is None or (codes is not None and not codes)
