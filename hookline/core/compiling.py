"""Compiled models: while something looks inside, they run eagerly.

A graph that torch.compile has made runs no hooks that came later, and says nothing. The stance
"force_eager" makes every compiled model of the process run as if it were not compiled.

- `suspend(user)`, `resume(user)`: run compiled models eagerly from now on; as before
- `untouched()`: whether nothing was compiled so far, so that hooks will be in the first graph
"""

from __future__ import annotations

import sys
import threading
from typing import Any, ClassVar

import torch

__all__ = ["resume", "suspend", "untouched"]


class _State:
    """Contexts that want eager runs may end in any order: the last one puts the stance back."""

    lock = threading.RLock()  # a context may be collected, and end, while it is held
    users: ClassVar[set[int]] = set()
    stance: Any = None


def suspend(user: object) -> None:
    """Run compiled models eagerly, if there can be any: importing the compiler is slow."""
    if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
        with _State.lock:
            _State.users.add(id(user))
            if len(_State.users) == 1:
                _State.stance = torch.compiler.set_stance("force_eager")


def resume(user: object) -> None:
    """One user less; after the last, compiled models run as before. May be called again."""
    if _State.stance is not None or _State.users:
        with _State.lock:
            _State.users.discard(id(user))
            if not _State.users and _State.stance is not None:
                _State.stance.__exit__(None, None, None)
                _State.stance = None


def untouched() -> bool:
    """Whether nothing was compiled so far in this process, or since the compiler was reset."""
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(getattr(dynamo, "input_codes", None), "seen", None)
    return dynamo is None or (codes is not None and not codes)
