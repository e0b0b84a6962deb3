"""Values that stay as they were.

A later in-place operation must not change what was captured. On the CPU a copy-on-write alias
does that in under a microsecond whatever the size: whoever writes first gets a copy of its own.

- `snapshot(tensor)`: a detached tensor that later writes cannot reach
- `settle(tensor)`: the same, and no larger storage is kept alive for it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["settle", "snapshot"]

# Private, so detected. Checked on torch 2.13; without it every snapshot is a clone.
_lazy_clone: Callable[[Tensor], Tensor] | None = getattr(Tensor, "_lazy_clone", None)


def snapshot(tensor: Tensor) -> Tensor:
    """A detached tensor that holds what `tensor` holds now, whatever is written to it later.

    >>> x = torch.zeros(2)
    >>> kept = snapshot(x)
    >>> _ = x.fill_(7)
    >>> kept
    tensor([0., 0.])
    """
    # Copy-on-write is for plain strided CPU tensors only: a quantised one crashes the process on
    # read, and a storage that is not resizable is aliased from outside torch (numpy, shared
    # memory), where writes would not be seen. Tensors without a storage raise NotImplementedError.
    if type(tensor) is Tensor and tensor.is_cpu and not tensor.is_quantized:
        try:
            if tensor.untyped_storage().resizable():
                if tensor.requires_grad:
                    tensor = tensor.detach()
                return tensor._lazy_clone()  # pyright: ignore
        except (NotImplementedError, RuntimeError, AttributeError):
            pass
    return _clone(tensor)


def _clone(tensor: Tensor) -> Tensor:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # pyright: ignore
        return tensor.detach()
    kept = tensor.detach().clone()
    # The clone of a Parameter is a plain tensor; other subclasses (DTensor, nested) stay.
    return kept


def settle(tensor: Tensor) -> Tensor:
    """A snapshot that keeps alive no more memory than its own.

    >>> big = torch.zeros(1000, 1000)
    >>> settle(big[:, 0]).untyped_storage().nbytes()
    4000
    """
    try:
        if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
            return _clone(tensor)
    except (NotImplementedError, RuntimeError):
        pass
    return snapshot(tensor)


