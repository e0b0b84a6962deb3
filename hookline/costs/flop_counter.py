"""Count floating-point operations at torch's dispatcher, by torch's own formulas.

- `FlopCounter(add)`: a context that passes the FLOPs of every operation to a function

The formulas are those of `torch.utils.flop_counter`, and the tests compare the sums with it. This
file adds formulas for kernels that torch has none for: attention and recurrent layers on the CPU,
recurrent layers of cuDNN, the fast path of `nn.MultiheadAttention`, grouped matrix products, which
compute experts, and bilinear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hookline.costs.flop_formulas import (
    FREE,
    PURE,
    flops_of_call,
    has_torchs_formulas,
    is_own,
    key_of_call,
)
from hookline.torch_private import (
    DispatchMode,
    has_other_modes,
    internal_operator,
    is_higher_order,
    nested_tensor_class,
    operator_can_decompose,
    operator_packet,
    operator_schema,
    without_dispatch_modes,
)

__all__ = ["FlopCounter"]

Formula = Callable[..., int]
_aten: Any = torch.ops.aten
_NestedTensor = nested_tensor_class()
_own: dict[Any, Formula] = {}


def _recurrent(tokens: Tensor, weights: Sequence[Any]) -> int:
    """Count each weight matrix once for each token."""
    count = tokens.numel() // tokens.shape[-1]
    matrices = [weight for weight in weights if weight is not None and weight.ndim == 2]
    return sum(2 * count * matrix.numel() for matrix in matrices)


def _rnn_layer(tokens: Tensor, *more: Any, **kwargs: Any) -> int:
    return _recurrent(tokens, more[:2])  # biases follow: zeros as large as weights, if none


def _cudnn_rnn(tokens: Tensor, weights: Any, *more: Any, **kwargs: Any) -> int:
    return _recurrent(tokens, weights)


def _backward_of(forward: Formula) -> Formula:
    """Count twice the forward: for the tokens, and for the weights."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def _attention_layer(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *more: Any, **kwargs: Any
) -> int:
    """Count the projections of queries, keys, values and result, and attention in each head."""
    batch, length = query.shape[:2]
    rows = sum(tensor.numel() // tensor.shape[-1] for tensor in (query, key, value, query))
    attention = 4 * batch * heads * length * key.shape[1] * (width // heads)
    return 2 * rows * width * width + attention


def _grouped_product(
    one: Tensor, other: Tensor, *more: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """Count groups of rows or columns, each with its own matrix, or groups of the summed size."""
    groups = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]


def _bilinear(one: Tensor, two: Tensor, weight: Tensor, *more: Any, **kwargs: Any) -> int:
    """Count rows of the first input with all weights, and the result with the second input."""
    made, first, second = weight.shape
    return 2 * (one.numel() // first) * made * second * (first + 1)


def _product_of_three(
    one: Tensor, two: Tensor, three: Tensor, not_one: Sequence[int], not_two: Sequence[int],
    not_three: Sequence[int], summed: Sequence[int], *more: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Count two products: of the first two factors, and of the result with the third.

    Each factor has all dimensions but those that are named for it; what can be summed is summed.
    An elementwise product without a sum counts like any other.
    """
    dims: list[set[int]] = []
    sizes: dict[int, int] = {}
    for tensor, without in ((one, not_one), (two, not_two), (three, not_three)):
        own = [dim for dim in range(tensor.ndim + len(without)) if dim not in without]
        sizes |= dict(zip(own, tensor.shape, strict=True))
        dims.append(set(own))
    both, first = dims[0] | dims[1], set(summed) - dims[2]
    steps = ((both, first), (both - first | dims[2], set(summed) & dims[2]))
    return sum(2 * prod(sizes[dim] for dim in met) for met, over in steps if over)


def _formula_of(operation: Any) -> Formula | None:
    """Return the formula of an operation: torch's, the user's, or else one of this file."""
    from torch.utils import flop_counter

    known = cast("dict[Any, Formula]", flop_counter.flop_registry)
    if not _own:
        attention = known[internal_operator("_scaled_dot_product_flash_attention")]
        backward = known[internal_operator("_scaled_dot_product_flash_attention_backward")]
        formulas: dict[str, Formula] = {
            "_scaled_dot_product_flash_attention_for_cpu": attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
            "mkldnn_rnn_layer": _rnn_layer,
            "mkldnn_rnn_layer_backward": _backward_of(_rnn_layer),
            "_cudnn_rnn": _cudnn_rnn,
            "_cudnn_rnn_backward": _backward_of(_cudnn_rnn),
            "_native_multi_head_attention": _attention_layer,
            "_int_mm": known[_aten.mm],  # of weights and values in 8 bits
            "_grouped_mm": _grouped_product,
            "_scaled_grouped_mm": _grouped_product,
            "bilinear": _bilinear,
            "_trilinear": _product_of_three,
        }
        for name, formula in formulas.items():
            own = internal_operator(name)
            if own is not None:
                _own[own] = formula
    return known.get(operation) or _own.get(operation)


def _flops_of(formula: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Call a formula; torch 2.10 refuses attention with fewer heads of keys than of queries."""
    try:
        return formula(*args, **kwargs, out_val=out)
    except AssertionError:
        if formula.__module__ != "torch.utils.flop_counter":
            raise
        return formula(*_with_all_heads(args), **kwargs, out_val=out)


def _with_all_heads(args: Sequence[Any]) -> list[Any]:
    """Return the arguments of attention with keys and values of all heads."""
    four = [arg.shape for arg in args if isinstance(arg, Tensor) and arg.ndim == 4]
    heads = max([shape[1] for shape in four], default=0)
    return [
        torch.Size((arg.shape[0], heads, *arg.shape[2:]))
        if isinstance(arg, Tensor) and arg.ndim == 4
        else arg
        for arg in args
    ]


# The ways in which a mode treats an operation.
_PASS, _DECOMPOSE, _DECLINE = object(), object(), object()
# Tensor subclasses are asked for these; a mode must not answer in their stead.
_GEOMETRY = {
    "aten::sym_is_contiguous", "aten::is_contiguous", "aten::is_strides_like_format",
    "aten::is_non_overlapping_and_dense", "aten::size", "aten::sym_size", "aten::stride",
    "aten::sym_stride", "aten::storage_offset", "aten::sym_storage_offset", "aten::numel",
    "aten::sym_numel", "aten::dim", "prim::layout", "prim::device",
}  # fmt: skip
# Whose operations without a formula have few FLOPs, or none.
_OURS = ("aten", "prim", "prims", "profiler")


class _CountingMode(DispatchMode):
    """A dispatch mode that counts every operation of a thread, and of its backwards."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first operation imports the compiler, which takes seconds. What is compiled
        # runs eagerly meanwhile.
        return False

    def __init__(self, add: Callable[[int], None]) -> None:
        super().__init__()
        self.add = add
        self.kinds: dict[Any, Any] = {}
        self.total = 0
        self.uncounted: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = self.kinds.get(func)
        if kind is None:
            kind = self.kinds[func] = self._kind_of(func)
        if kind is _DECLINE or (types and _NestedTensor in types):
            return NotImplemented
        if kind is _PASS:
            return func(*args, **kwargs)
        if kind is _DECOMPOSE and any(isinstance(a, Tensor) and a.is_nested for a in args):
            kind = _unknown  # they have kernels of their own, and what it is made of fails on them
        if kind is _DECOMPOSE:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(func, kind, args, kwargs, out)
        return out

    def _kind_of(self, func: Any) -> Any:
        kind = _nature(func)
        return (_formula_of(operator_packet(func)) or kind) if kind is not _DECLINE else kind

    def _count(self, func: Any, formula: Formula, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = _flops_of(formula, args, kwargs, out)
        except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
            # No formula, or none that takes such tensors: it is told, not passed over.
            name = str(operator_packet(func))
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
            return
        self.total += flops
        self.add(flops)


@cache
def _nature(func: Any) -> Any:
    """Return how an operation without a formula is treated."""
    if is_higher_order(func):
        return _DECLINE  # torch then runs what is in it, which comes here
    if operator_schema(func) in _GEOMETRY:
        return _DECLINE
    if operator_can_decompose(func):
        return _DECOMPOSE
    return _PASS if func.namespace in _OURS else _unknown


def _unknown(*args: Any, **kwargs: Any) -> int:
    raise TypeError("an operation of another library, for which there is no formula")


class _KnownFlopsMode(TorchFunctionMode):
    """A function mode that hides calls with known FLOPs from the dispatch mode."""

    def __init__(self, counting: _CountingMode, certain: bool) -> None:
        super().__init__()
        self.counting = counting
        self.certain = certain  # whether FLOPs that follow from shapes are those of the formulas
        self.known: dict[Any, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        key = flops = None
        # In most calls no types are named, since they are torch's own.
        if self.certain and func in FREE and (not types or is_own(types)):
            flops = 0
        elif self.certain:
            flops = flops_of_call(func, args, kwargs)
        if flops is None and func in PURE:
            key = key_of_call(func, args, kwargs or {})
            flops = None if key is None else self.known.get(key)
        if flops is None:
            return self._counted(key, func, args, kwargs or {})
        guard = without_dispatch_modes()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            del guard
        if flops:
            self.counting.total += flops
            self.counting.add(flops)
        return result

    def _counted(self, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the dispatch mode count a call, and remember its FLOPs."""
        if key is None:
            return func(*args, **kwargs)
        before, missed = self.counting.total, dict(self.counting.uncounted)
        result = func(*args, **kwargs)
        if self.counting.uncounted == missed:
            self.known[key] = self.counting.total - before
        return result


class FlopCounter:
    """Pass the FLOPs of every operation inside to a function as they happen.

    >>> counted = []
    >>> with FlopCounter(counted.append) as counter:
    ...     _ = torch.zeros(2, 3) @ torch.zeros(3, 5)
    >>> counted, counter.total
    ([60], 60)

    `uncounted` has the operations of other libraries, which have no formula, with their calls;
    `certain` is True if operations whose FLOPs follow from shapes may be hidden from the counter.

    Args:
        add: is called with FLOPs as they happen.
        shortcuts: whether operations whose FLOPs follow from shapes may be hidden from it.
    """

    def __init__(self, add: Callable[[int], None], shortcuts: bool = True) -> None:
        self._mode = _CountingMode(add)
        possible = without_dispatch_modes is not None and not has_other_modes()
        self._shortcuts = shortcuts and possible
        self.certain = self._shortcuts and has_torchs_formulas()
        self._modes = ExitStack()

    @property
    def total(self) -> int:
        return self._mode.total

    @property
    def uncounted(self) -> dict[str, int]:
        return self._mode.uncounted

    def __enter__(self) -> FlopCounter:
        self._modes.enter_context(self._mode)
        if self._shortcuts:
            self._modes.enter_context(_KnownFlopsMode(self._mode, self.certain))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.__exit__(*error)
