"""Values that stay as they were.

A later in-place operation must not change what was captured. On the CPU a copy-on-write alias
does that in under a microsecond whatever the size: whoever writes first gets a copy of its own.

- `snapshot(tensor)`: a detached tensor that later writes cannot reach
- `gradient_snapshot(tensor)`: the same, with one check less
- `duplicate(tensor)`: a plain copy, for what others hold by its address
- `settle(tensor)`: a snapshot that keeps no larger storage alive
- `same_bits(one, other)`: whether two tensors hold the same
- `is_wrapped(tensor)`: whether it stands for many, in a transform of torch's
- `is_fake(tensor)`: whether it is one of torch's fake tensors, which have no values
- `unreadable(tensor, version, twin)`: why a tensor is not what it was when it was captured
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hookline.torch_private import (
    LAZY,
    base_of,
    is_functorch_tensor,
    is_legacy_batched,
    lazy_clone,
    transform_level,
    use_count,
    version_of,
)
from hookline.values.quantised import copy_of, held_in, is_wrapper
from hookline.values.sharding import copied, local

__all__ = [
    "BASES", "SMALL", "WIDE", "duplicate", "gradient_snapshot", "is_fake", "is_wrapped",
    "same_bits", "settle", "snapshot", "unreadable",
]  # fmt: skip

SMALL = 4096  # bytes below which a copy takes no longer than to see whether an alias will do
WIDE = 8  # times a view's size: whoever writes to memory beyond that would have to copy all of it
BASES = (type(None), Tensor)  # of which an aliased tensor may be a view: not of a parameter


def snapshot(tensor: Tensor, exported: bool = True) -> Tensor:
    """A detached tensor that holds what `tensor` holds now, whatever is written to it later.

    >>> x = torch.zeros(2)
    >>> kept = snapshot(x)
    >>> _ = x.fill_(7)
    >>> kept
    tensor([0., 0.])
    """
    # Copy-on-write is for plain strided CPU tensors only: a quantised one crashes the process on
    # read, and a storage that is not resizable, or a tensor that others hold, may be written to
    # from outside torch (numpy, shared memory, dlpack), which copy-on-write does not see. That of
    # a parameter, of which this may be a view, FSDP frees and resizes, which torch then refuses.
    if LAZY and type(tensor) is Tensor and tensor.is_cpu and not tensor.is_quantized:
        try:
            storage, fits = tensor.untyped_storage(), type(base_of(tensor)) in BASES
            if fits and storage.resizable() and storage.nbytes() <= WIDE * tensor.nbytes:
                if tensor.requires_grad:
                    return lazy_clone(tensor.detach())
                if not exported or use_count(tensor) == 1:
                    return lazy_clone(tensor)
        except (NotImplementedError, RuntimeError):  # no storage: sparse, nested, vmap
            pass
    return duplicate(tensor)


# Of a gradient on its way: the autograd engine holds it, too, but nobody has exported it.
gradient_snapshot = partial(snapshot, exported=False)


def duplicate(tensor: Tensor) -> Tensor:
    """A detached copy; the tensor itself where torch cannot copy it."""
    if is_wrapper(tensor):
        return copy_of(tensor)
    if tensor.requires_grad:  # else it stays as it is: detaching drops a forward-mode tangent
        tensor = tensor.detach()
    try:
        return copied(tensor)
    except RuntimeError:  # some quantised tensors
        return tensor


def settle(tensor: Tensor) -> Tensor:
    """A snapshot that keeps alive no more memory than its own.

    >>> big = torch.zeros(1000, 1000)
    >>> settle(big[:, 0]).untyped_storage().nbytes()
    4000
    """
    try:
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            return duplicate(tensor)
    except (NotImplementedError, RuntimeError):  # no storage, so no memory to let go of
        pass
    return snapshot(tensor)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN and -0.0 included.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
        return one.is_meta and other.is_meta
    if one.is_quantized:  # to view one as bytes crashes the process
        return torch.equal(one, other)
    if is_wrapper(one):
        return all(map(same_bits, held_in(one), held_in(other)))
    try:  # of a DTensor what is here: to compare all of it, every rank would have to take part
        flat = (local(t).resolve_conj().resolve_neg().reshape(-1)[:, None] for t in (one, other))
        return torch.equal(*(t.view(torch.uint8) for t in flat))
    except RuntimeError:  # no view as bytes: sparse, freed
        return False


def is_wrapped(tensor: Tensor) -> bool:
    """Whether it stands for many, as in vmap, or batched gradients: no number of it can be told."""
    return is_functorch_tensor(tensor) or is_legacy_batched(tensor)


def is_fake(tensor: Tensor) -> bool:
    """Return True for a fake tensor of torch's, which has no values."""
    return type(tensor) is not Tensor and hasattr(tensor, "fake_mode")


def unreadable(tensor: Tensor, version: int | None, twin: Tensor | None) -> tuple[str, str] | None:
    """Why a tensor is not what it was when it was captured, and what to do; None if it is."""
    if is_functorch_tensor(tensor):
        level, current = transform_level(tensor)
        if current is not None and 0 < level <= current:
            return None
        return (
            "It was captured inside a transform of torch.func, which is over: it lives no longer.",
            "Return it from the transformed function, or capture outside.",
        )
    if is_legacy_batched(tensor):
        return (
            "It came in torch.autograd.grad(..., is_grads_batched=True), and lives no longer.",
            "Give the rows of grad_outputs one by one, each in a backward of its own.",
        )
    if version is not None:
        plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
        if plain and not tensor.untyped_storage().nbytes():  # before it is compared with a twin
            return (
                "It was kept attached, and its memory was freed since.",
                "Capture with detach=True to keep a copy.",
            )
        changed = version_of(tensor) != version  # how often, a parameter's edit hides
        if changed or (twin is not None and not same_bits(tensor.detach(), twin)):
            return (
                "It was kept attached, and was changed in place since.",
                "Capture with detach=True to keep it as it was, or read it before the change.",
            )
    return None
