"""Keep values as they are when they are captured, whatever is written to them later.

On the CPU, a copy-on-write alias does that in under a microsecond, whatever the size: the first
write to either tensor makes a copy.

- `snapshot(tensor)`: a detached tensor that later writes cannot reach
- `gradient_snapshot(tensor)`: a snapshot of a gradient during a backward
- `duplicate(tensor)`: a plain copy, for tensors that others hold by their address
- `compact_snapshot(tensor)`: a snapshot that keeps no larger storage alive
- `same_bits(one, other)`: True if two tensors hold the same bits
- `is_wrapped(tensor)`: True for a tensor of a transform, such as one inside vmap
- `is_fake(tensor)`: True for one of torch's fake tensors, which have no values
- `unreadable(tensor, version, twin)`: why a captured tensor cannot be read any more
"""

from __future__ import annotations

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
from hookline.values.quantisation import copy_of, held_in, is_wrapper
from hookline.values.sharding import copied, local

__all__ = [
    "BASES", "SMALL", "WIDE", "compact_snapshot", "duplicate", "gradient_snapshot", "is_fake",
    "is_wrapped", "same_bits", "snapshot", "unreadable",
]  # fmt: skip

SMALL = 4096  # up to so many bytes, copying is as fast as finding out if an alias will do
WIDE = 8  # a view of a storage more than so many times its size is copied: a write copies all of it
BASES = (type(None), Tensor)  # the types of the base of a tensor that gets an alias: no parameters


def snapshot(tensor: Tensor) -> Tensor:
    """Return a detached tensor that holds what `tensor` holds now, whatever is written later.

    >>> x = torch.zeros(2)
    >>> kept = snapshot(x)
    >>> _ = x.fill_(7)
    >>> kept
    tensor([0., 0.])
    """
    # Copy-on-write is for plain strided CPU tensors only. Reading a quantised alias crashes the
    # process. A storage that is not resizable, or a tensor that others hold, may be written to from
    # outside torch (numpy, shared memory, dlpack), which copy-on-write does not see. The storage of
    # a parameter is freed and resized by FSDP, which torch refuses while it has an alias.
    if type(tensor) is Tensor:
        try:
            size, grad = tensor.nbytes, tensor.requires_grad
            if size < SMALL and tensor.is_contiguous():
                return (tensor.detach() if grad else tensor).clone()
            if LAZY and tensor.is_cpu and not tensor.is_quantized:
                storage = tensor.untyped_storage()
                fits = type(base_of(tensor)) in BASES
                if fits and storage.resizable() and storage.nbytes() <= WIDE * size:
                    if grad:
                        return lazy_clone(tensor.detach())
                    if use_count(tensor) == 1:
                        return lazy_clone(tensor)
        except (NotImplementedError, RuntimeError):  # no storage: sparse, nested, vmap
            pass
    return duplicate(tensor)


def gradient_snapshot(grad: Tensor) -> Tensor:
    """Return a snapshot of a gradient during a backward.

    Nothing but the autograd engine holds a gradient on its way: `snapshot` would copy it.
    """
    if LAZY and type(grad) is Tensor and grad.is_cpu and not grad.requires_grad:
        try:
            storage = grad.untyped_storage()
            if storage.resizable() and storage.nbytes() <= WIDE * grad.nbytes:
                return lazy_clone(grad)
        except (NotImplementedError, RuntimeError):  # no storage: sparse, nested, vmap
            pass
    return snapshot(grad)


def duplicate(tensor: Tensor) -> Tensor:
    """Return a detached copy, or the tensor itself where torch cannot copy it."""
    if is_wrapper(tensor):
        return copy_of(tensor)
    if tensor.requires_grad:  # only then: detaching drops a forward-mode tangent
        tensor = tensor.detach()
    try:
        return copied(tensor)
    except RuntimeError:  # some quantised tensors
        return tensor


def compact_snapshot(tensor: Tensor) -> Tensor:
    """Return a snapshot that keeps alive no more memory than its own.

    >>> big = torch.zeros(1000, 1000)
    >>> compact_snapshot(big[:, 0]).untyped_storage().nbytes()
    4000
    """
    try:
        size = tensor.nbytes
        if size < SMALL and type(tensor) is Tensor and not tensor.requires_grad:
            return tensor.clone()
        if tensor.untyped_storage().nbytes() > size:
            return duplicate(tensor)
    except (NotImplementedError, RuntimeError):  # no storage, so no memory to free
        pass
    return snapshot(tensor)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors hold the same bits, NaN and -0.0 included.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
        return one.is_meta and other.is_meta
    if one.is_quantized:  # viewing one as bytes crashes the process
        return torch.equal(one, other)
    if is_wrapper(one):
        return all(map(same_bits, held_in(one), held_in(other)))
    try:  # only this rank's part of a DTensor: comparing all of it would need every rank
        flat = (local(t).resolve_conj().resolve_neg().reshape(-1)[:, None] for t in (one, other))
        return torch.equal(*(t.view(torch.uint8) for t in flat))
    except RuntimeError:  # no view as bytes: sparse, freed
        return False


def is_wrapped(tensor: Tensor) -> bool:
    """Return True for a tensor of vmap or of batched gradients, whose numbers cannot be read."""
    return is_functorch_tensor(tensor) or is_legacy_batched(tensor)


def is_fake(tensor: Tensor) -> bool:
    """Return True for a fake tensor of torch's, which has no values."""
    return type(tensor) is not Tensor and hasattr(tensor, "fake_mode")


def unreadable(tensor: Tensor, version: int | None, twin: Tensor | None) -> tuple[str, str] | None:
    """Explain why a captured tensor cannot be read any more; None if it can.

    The explanation is a reason and a remedy. `version` and `twin` are the version and a copy of a
    tensor that was kept attached, from when it was captured.
    """
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
        if plain and not tensor.untyped_storage().nbytes():  # checked before reading it below
            return (
                "It was kept attached, and its memory was freed since.",
                "Capture with detach=True to keep a copy.",
            )
        # Fused optimisers change parameters without a new version: the twin shows it.
        changed = version_of(tensor) != version
        if changed or (twin is not None and not same_bits(tensor.detach(), twin)):
            return (
                "It was kept attached, and was changed in place since.",
                "Capture with detach=True to keep it as it was, or read it before the change.",
            )
    return None
