"""Compute attention patterns from the recorded arguments of a call.

- `SDPA`, `MHA`, `SOFTMAX`: the operations that patterns come from
- `compute(operation, kept, dtype)`: the pattern of a call
- `shape_of(operation, kept)`: its shape, without computing it
- `remarks_on(operation, kept)`: remarks for whoever reads the pattern
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from hookline.values.snapshots import snapshot

__all__ = ["MHA", "SDPA", "SOFTMAX", "compute", "remarks_on", "shape_of"]

SDPA, MHA, SOFTMAX = "scaled_dot_product_attention", "multi_head_attention_forward", "softmax"


def _of_kernel(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Tensor:
    """Compute the pattern inside a call of scaled_dot_product_attention."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:  # query n sees the keys up to n, also where there are more keys than queries
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0.0)  # zeros are what the kernels give there


def _of_layer(need_weights: bool = True, **inputs: Any) -> Tensor:
    """Compute the pattern inside a call of multi_head_attention_forward, as nn.MultiheadAttention
    makes.

    It is torch's own arithmetic for `need_weights=True`, with a small output projection.
    """
    query, key = inputs["query"], inputs["key"]
    inputs |= {
        "out_proj_weight": query.new_zeros(1, query.shape[-1]), "out_proj_bias": None,
        "training": False, "need_weights": True, "average_attn_weights": False,
    }  # fmt: skip
    pattern = cast(Tensor, F.multi_head_attention_forward(**inputs)[1])
    if not need_weights and not query.isnan().any() and not key.isnan().any():
        # It ran a kernel, which gives zeros where nothing may be attended to.
        pattern = pattern.masked_fill(pattern.isnan().all(-1, keepdim=True), 0.0)
    return pattern


def compute(operation: str, kept: Any, dtype: torch.dtype | None) -> Tensor:
    """Compute the pattern of a call in float32 at least; return it as `dtype`, or as the query."""
    if operation == SOFTMAX:
        return snapshot(kept) if dtype in (None, kept.dtype) else kept.to(dtype)

    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(torch.promote_types(value.dtype, torch.float32))

    query: Tensor = kept["query"]
    inputs = {name: widen(value) for name, value in kept.items()}
    device = query.device.type
    cast_off = nullcontext()
    if torch.amp.is_autocast_available(device):
        cast_off = torch.autocast(device, enabled=False)
    with torch.no_grad(), cast_off:
        pattern = (_of_kernel if operation == SDPA else _of_layer)(**inputs)
    return pattern.to(dtype or query.dtype)


def shape_of(operation: str, kept: Any) -> str:
    """Return the shape of a pattern, without computing it."""
    if operation == SOFTMAX:
        return str(tuple(kept.shape))
    query, key = kept["query"], kept["key"]
    if query.is_nested:
        return "nested"
    if operation == SDPA:
        heads = [query, query if kept.get("enable_gqa") else key]
        batch: tuple[int, ...] = torch.broadcast_shapes(*(one.shape[:-2] for one in heads))
        return str((*batch, query.shape[-2], key.shape[-2]))
    static = kept.get("static_k")
    keys = key.shape[0] if static is None else static.shape[1]
    keys += (kept.get("bias_k") is not None) + bool(kept.get("add_zero_attn"))
    return str((*query.shape[1:-1], kept["num_heads"], query.shape[0], keys))


def remarks_on(operation: str, kept: Any) -> str:
    """Return remarks on a pattern: whether it is causal, and which dropout follows it."""
    if operation == SOFTMAX:
        return ""
    dropout = kept.get("dropout_p") if kept.get("training", True) else 0
    said = {"causal": kept.get("is_causal"), f"before dropout {dropout}": dropout}
    return ", ".join(remark for remark, true in said.items() if true)
