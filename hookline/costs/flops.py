"""Floating-point operations, counted at torch's dispatcher by torch's own formulas.

- `FlopCounter(add)`: a context in which every operation's FLOPs are given to a function
- `settings_of(module)`: calls of modules with the same ones have the same FLOPs for one shape
- `no_dispatch()`: what lets operations past all dispatch modes, as long as it exists

torch's counter (`torch.utils.flop_counter`) brings the formulas, and is what the sums are compared
with. Some kernels have none there: attention and recurrent layers on the CPU, recurrent layers of
cuDNN, and the fast path of `nn.MultiheadAttention`. Theirs are here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FlopCounter", "no_dispatch", "settings_of"]

Formula = Callable[..., int]
_aten: Any = torch.ops.aten
no_dispatch: Any = getattr(torch._C, "_DisableTorchDispatch", None)  # private, so detected
_own: dict[Any, Formula] = {}


def _recurrent(tokens: Tensor, weights: list[Any]) -> int:
    """Every weight matrix meets every token once."""
    count = tokens.numel() // tokens.shape[-1]
    matrices = [weight for weight in weights if weight is not None and weight.ndim == 2]
    return sum(2 * count * matrix.numel() for matrix in matrices)


def _rnn_layer(tokens: Tensor, *more: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _recurrent(tokens, list(more[:4]))


def _rnn_layer_backward(tokens: Tensor, *more: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * _recurrent(tokens, list(more[:4]))  # for the tokens, and for the weights


def _cudnn_rnn(tokens: Tensor, weight: Any, *more: Any, out_val: Any = None, **kwargs: Any) -> int:
    return _recurrent(tokens, list(weight))


def _cudnn_rnn_backward(
    tokens: Tensor, weight: Any, *more: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return 2 * _recurrent(tokens, list(weight))


def _attention_layer(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *more: Any, **kwargs: Any
) -> int:
    """Projections of queries, keys and values, attention in each head, projection of the result."""
    batch, length = query.shape[:2]
    rows = sum(tensor.numel() // tensor.shape[-1] for tensor in (query, key, value, query))
    attention = 4 * batch * heads * length * key.shape[1] * (width // heads)
    return 2 * rows * width * width + attention


def _formula_of(operation: Any) -> Formula | None:
    """The formula of an operation: torch's or the user's, or ours for what those have none for."""
    from torch.utils import flop_counter

    known = cast("dict[Any, Formula]", flop_counter.flop_registry)
    if not _own:
        attention = known[_aten._scaled_dot_product_flash_attention]
        backward = known[_aten._scaled_dot_product_flash_attention_backward]
        formulas: dict[str, Formula] = {
            "_scaled_dot_product_flash_attention_for_cpu": attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": backward,
            "mkldnn_rnn_layer": _rnn_layer,
            "mkldnn_rnn_layer_backward": _rnn_layer_backward,
            "_cudnn_rnn": _cudnn_rnn,
            "_cudnn_rnn_backward": _cudnn_rnn_backward,
            "_native_multi_head_attention": _attention_layer,
        }
        for name, formula in formulas.items():
            if hasattr(_aten, name):  # not every build of torch has all of them
                _own[getattr(_aten, name)] = formula
    return known.get(operation) or _own.get(operation)


def _flops_of(formula: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Ask a formula, most of which want shapes: torch's way to them is slow."""
    inner = formula.__wrapped__ if getattr(formula, "__code__", None) is _wrapper() else None
    if inner is None or kwargs or type(out) is not Tensor or not _PLAIN.issuperset(map(type, args)):
        return formula(*args, **kwargs, out_val=out)
    return inner(
        *[arg.shape if isinstance(arg, Tensor) else arg for arg in args], out_shape=out.shape
    )


@cache
def _wrapper() -> Any:
    """The code of the function that torch puts around a formula for shapes."""
    from torch.utils import flop_counter

    return cast(Any, flop_counter).shape_wrapper(_unknown).__code__


# What a mode does with an operation.
_PASS, _DECOMPOSE, _DECLINE = object(), object(), object()
# Tensor subclasses are asked for these; a mode must not answer in their stead.
_GEOMETRY = {
    "aten::sym_is_contiguous", "aten::is_contiguous", "aten::is_strides_like_format",
    "aten::is_non_overlapping_and_dense", "aten::size", "aten::sym_size", "aten::stride",
    "aten::sym_stride", "aten::storage_offset", "aten::sym_storage_offset", "aten::numel",
    "aten::sym_numel", "aten::dim", "prim::layout",
}  # fmt: skip
_OURS = ("aten", "prim", "prims")  # whose operations without a formula have few FLOPs, or none


class _Counting(TorchDispatchMode):
    """Sees every operation of a thread, and of the backwards that it starts."""

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
        if kind is _PASS:
            return func(*args, **kwargs)
        if kind is _DECLINE:
            return NotImplemented
        if kind is _DECOMPOSE:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._count(func, kind, args, kwargs, out)
        return out

    def _kind_of(self, func: Any) -> Any:
        kind = _nature(func)
        return (_formula_of(func._overloadpacket) or kind) if kind is not _DECLINE else kind

    def _count(self, func: Any, formula: Formula, args: Any, kwargs: Any, out: Any) -> None:
        try:
            flops = _flops_of(formula, args, kwargs, out)
        except (TypeError, RuntimeError, AttributeError, ValueError, IndexError):
            # No formula, or none that takes such tensors: it is told, not passed over.
            name = str(func._overloadpacket)
            self.uncounted[name] = self.uncounted.get(name, 0) + 1
            return
        self.total += flops
        self.add(flops)


@cache
def _nature(func: Any) -> Any:
    """What is done with an operation that has no formula."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return _DECLINE  # torch then runs what is in it, which comes here
    if func._schema.name in _GEOMETRY:
        return _DECLINE
    if func._can_decompose():
        return _DECOMPOSE
    return _PASS if func.namespace in _OURS else _unknown


def _unknown(*args: Any, **kwargs: Any) -> int:
    raise TypeError("an operation of another library, for which there is no formula")


# Functions that are nothing but operations, the same ones whenever the arguments are alike.
_PURE: frozenset[Any] = frozenset({
    F.linear, F.scaled_dot_product_attention, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm, Tensor.matmul,
    Tensor.__matmul__, Tensor.bmm, Tensor.mm,
})  # fmt: skip
# Of these all calls are alike, unless a formula of the user's gives them FLOPs.
_FREE_FUNCTIONS: frozenset[Any] = frozenset({
    F.layer_norm, F.embedding, F.silu, F.gelu, F.relu, F.softmax, F.group_norm, torch.relu,
    torch.softmax, Tensor.softmax, Tensor.add, Tensor.__add__, Tensor.__iadd__, Tensor.mul,
    Tensor.__mul__, Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute,
    Tensor.contiguous, Tensor.unflatten, Tensor.flatten, Tensor.__truediv__,
})  # fmt: skip
_SIMPLE = (type(None), bool, int, float, str, torch.dtype)
_TENSORS = (Tensor, nn.Parameter)
_PLAIN = frozenset({*_TENSORS, *_SIMPLE})


class _Remembering(TorchFunctionMode):
    """Lets calls of pure functions past the dispatch mode, if such a call has been counted before.

    A dispatch mode costs some 10 µs an operation, and most calls in a model are alike.
    """

    def __init__(self, counting: _Counting) -> None:
        super().__init__()
        self.counting = counting
        self.known: dict[Any, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = None
        if func in _FREE_FUNCTIONS:
            key = func if not kwargs and _PLAIN.issuperset(map(type, args)) else None
        elif func in _PURE:
            key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        flops = self.known.get(key)
        if flops is None:
            return self._first(key, func, args, kwargs)
        guard = no_dispatch()
        try:
            result = func(*args, **kwargs)
        finally:
            del guard
        if flops:
            self.counting.total += flops
            self.counting.add(flops)
        return result

    def _first(self, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a call be counted, and remember what it has."""
        before, missed = self.counting.total, dict(self.counting.uncounted)
        result = func(*args, **kwargs)
        flops = self.counting.total - before
        if self.counting.uncounted == missed and not (key is func and flops):
            self.known[key] = flops
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the FLOPs of a call depend on; None if that is not known."""
    found: list[Any] = [func, torch.is_grad_enabled()]
    items: tuple[Any, ...] = (*args, *kwargs, *kwargs.values())
    for item in items:
        kind = cast(Any, type(item))
        if kind in _TENSORS:
            if item.is_nested or item.layout is not torch.strided:
                return None
            found.append((item.shape, item.dtype, item.device, item.requires_grad))
        elif kind in _SIMPLE or (kind is tuple and all(type(n) is int for n in item)):
            found.append(item)
        else:
            return None
    return tuple(found)


# Modules of torch whose calls have no FLOPs, and others whose calls are alike if their settings
# and their first argument are.
_FREE = frozenset({
    nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Dropout, nn.Identity, nn.Flatten,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
})  # fmt: skip
_SIMPLE_MODULES = _FREE | {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


def settings_of(module: nn.Module) -> Any:
    """What the FLOPs of a module's calls depend on, besides the shape of one plain argument.

    >>> settings_of(nn.Linear(2, 3)) == settings_of(nn.Linear(2, 3)) != settings_of(nn.Linear(2, 4))
    True

    The type alone if its calls have no FLOPs; None if it is not known.
    """
    kind, parameters = type(module), module._parameters
    if kind not in _SIMPLE_MODULES or "forward" in module.__dict__:
        return None
    for weight in parameters.values():
        if weight is not None and type(weight) is not nn.Parameter:
            return None
    if kind in _FREE:
        return kind
    weight = parameters.get("weight")
    if weight is None or kind is nn.Linear:  # it may be computed from others at each call
        return None if weight is None else weight.shape
    return kind, module.extra_repr()


class FlopCounter:
    """Inside, the FLOPs of every operation are given to a function as they happen.

    >>> counted = []
    >>> with FlopCounter(counted.append) as counter:
    ...     _ = torch.zeros(2, 3) @ torch.zeros(3, 5)
    >>> counted, counter.total
    ([60], 60)

    `uncounted` has the operations of other libraries, which have no formula, with their calls.
    """

    def __init__(self, add: Callable[[int], None]) -> None:
        self._mode = _Counting(add)
        self._memory: _Remembering | None = None

    @property
    def total(self) -> int:
        return self._mode.total

    @property
    def uncounted(self) -> dict[str, int]:
        return self._mode.uncounted

    @property
    def remembers(self) -> bool:
        """Whether calls may be let past it: not if others, too, want to see all operations."""
        return self._memory is not None

    def __enter__(self) -> FlopCounter:
        self._mode.__enter__()
        # Others' modes would be passed by, too.
        alone = torch._C._len_torch_dispatch_stack() == 1
        if no_dispatch is not None and alone:
            self._memory = _Remembering(self._mode)
            self._memory.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._memory is not None:
            self._memory.__exit__(*error)
        self._mode.__exit__(*error)
