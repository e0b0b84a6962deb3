"""Check the options `device=` and `dtype=` of the verbs before anything runs.

- `as_device(given, verb)`: the device, or an error that names the devices that exist
- `as_dtype(given, verb)`: the dtype, or an error that names the dtype that may be meant
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hookline.errors import UsageError

__all__ = ["as_device", "as_dtype"]

_COUNTED = ("cuda", "xpu", "mps", "mtia")  # torch can count these devices without starting them


def as_device(given: Any, verb: str) -> torch.device | None:
    """Return the device of an option; None stays None.

    >>> as_device("cpu", "capture")
    device(type='cpu')
    """
    if given is None:
        return None
    asked = f"{verb} was given device={given!r:.60}."
    remedy = f"Give one that is there: {', '.join(map(repr, _devices()))}."
    try:
        found = torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(asked, "Torch has no such device here.", remedy) from None
    if found.type in _COUNTED and (found.index or 0) >= _count(found.type):
        there = _count(found.type) or "no"
        raise UsageError(asked, f"There is {there} {found.type} device here.", remedy)
    return found


def _count(kind: str) -> int:
    """Return the number of devices of a kind."""
    module: Any = getattr(torch, kind, None)
    return module.device_count() if module is not None and module.is_available() else 0


def _devices() -> list[str]:
    """Return the names of the devices that exist; "meta" keeps shapes only."""
    counted = [f"{kind}:{n}" for kind in _COUNTED for n in range(_count(kind))]
    return ["cpu", *counted, "meta"]


def as_dtype(given: Any, verb: str) -> torch.dtype | None:
    """Return the dtype of an option; None stays None.

    >>> as_dtype(torch.float16, "capture")
    torch.float16
    """
    if given is None or isinstance(given, torch.dtype):
        return given
    name = str(getattr(given, "__name__", given)).removeprefix("torch.")
    meant: Any = getattr(torch, name, None)
    if isinstance(given, type) and given in (bool, int, float, complex):
        # torch takes Python's float for torch.float64; its own torch.float is torch.float32.
        meant = torch.empty(0, dtype=cast(Any, given)).dtype
    meant = meant if isinstance(meant, torch.dtype) else "one of torch's, such as torch.float16"
    raise UsageError(
        f"{verb} was given dtype={given!r:.60}.",
        f"That is a {type(given).__name__}, and a dtype is a torch.dtype.",
        f"Give {meant}.",
    )
