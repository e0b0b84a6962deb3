"""FLOPs that follow from shapes, so that calls need not be counted at the dispatcher.

- `sort_leaves(modules)`: the modules whose FLOPs follow from the shape of their argument
- `flops_of_linear(given, made)`: FLOPs of a linear layer, from the shapes of input and output
- `flops_of_call(function, args, kwargs)`: FLOPs of a call of a torch function, if they are known
- `FREE`: functions without FLOPs, on tensors of types for which `is_own(types)` holds
- `key_of_call(function, args, kwargs)`: a key for the FLOPs of a function in `PURE`
- `is_ordinary(tensors)`: True if these rules hold for a model with these tensors
- `is_dense(tensors)`: True for dense tensors of torch's own types
- `has_torchs_formulas()`: True if the formulas are those that torch registers

The dispatcher needs about 5 µs for each operation; a linear layer is several operations, attention
two dozen. These formulas give the same FLOPs as the dispatcher, and tests compare both for all of
them. They are not used if the user has registered a formula for one of torch's operations, or one
exists for an operation that counts as free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.torch_private import (
    forward_hooks_of,
    operator_library,
    parameters_of,
    transform_stack,
)

__all__ = [
    "FREE",
    "PURE",
    "flops_of_call",
    "flops_of_linear",
    "has_torchs_formulas",
    "is_dense",
    "is_ordinary",
    "is_own",
    "key_of_call",
    "sort_leaves",
]

# Functions that are nothing but operations, the same ones whenever the arguments are alike.
PURE: frozenset[Any] = frozenset({
    F.linear, F.scaled_dot_product_attention, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm, Tensor.matmul,
    Tensor.__matmul__, Tensor.bmm, Tensor.mm,
})  # fmt: skip
# Functions and modules of torch whose operations have no formula.
FREE: frozenset[Any] = frozenset({
    F.layer_norm, F.embedding, F.silu, F.gelu, F.relu, F.softmax, F.group_norm, torch.relu,
    torch.softmax, Tensor.softmax, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__,
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.sub, Tensor.__sub__, Tensor.view,
    Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.contiguous, Tensor.unflatten,
    Tensor.flatten, Tensor.__truediv__, Tensor.chunk, Tensor.split, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.expand, Tensor.expand_as, Tensor.mean, Tensor.sum,
})  # fmt: skip
_FREE = frozenset({
    nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Dropout, nn.Identity, nn.Flatten,
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
})  # fmt: skip
_LEAVES: frozenset[Any] = _FREE | {nn.Linear}
# The operations that the free functions and modules are made of, on whichever device.
_FREE_OPERATIONS = frozenset({
    "_adaptive_avg_pool2d", "_batch_norm_impl_index", "_batch_norm_no_update",
    "_batch_norm_with_update", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_reshape_alias", "_softmax", "_to_copy",
    "_unsafe_view", "adaptive_avg_pool2d", "add", "add_", "alias", "as_strided", "avg_pool2d",
    "batch_norm", "bernoulli", "bernoulli_", "chunk", "clone", "contiguous", "copy_",
    "cudnn_batch_norm", "detach", "div", "div_", "dropout", "embedding", "embedding_renorm_",
    "empty", "empty_like", "expand", "expand_as", "flatten", "gelu", "gelu_", "group_norm",
    "layer_norm", "max_pool2d", "max_pool2d_with_indices", "mean", "miopen_batch_norm",
    "mkldnn_adaptive_avg_pool2d", "mkldnn_max_pool2d", "mul", "mul_", "native_batch_norm",
    "native_dropout", "native_group_norm", "native_layer_norm", "permute", "relu", "relu_",
    "reshape", "rsub", "sigmoid", "silu", "silu_", "softmax", "split", "squeeze", "sub", "sub_",
    "sum", "t", "tanh", "to", "transpose", "true_divide", "unflatten", "unsqueeze", "view",
    "view_as",
})  # fmt: skip
_SIMPLE = frozenset({type(None), bool, int, float, str, torch.dtype})
_TENSORS = frozenset({Tensor, nn.Parameter})
_PLAIN = _TENSORS | _SIMPLE
_DEVICES = frozenset({"cpu", "cuda", "meta"})  # others have kernels of their own
_strided = torch.strided
_seen: list[Any] = []  # operations and formulas that were found to be torch's


def has_torchs_formulas() -> bool:
    """Return True if torch's operations have torch's formulas, and free ones have none.

    >>> has_torchs_formulas()
    True

    The set of other operations with formulas differs between versions of torch.
    """
    from torch.utils import flop_counter

    known = flop_counter.flop_registry
    found = [*known, *known.values()]  # lists are compared by identity first, and so quickly
    if found != _seen:
        home = flop_counter.__name__
        for operation, formula in known.items():
            own = operator_library(operation) in ("aten", "prim", "prims")  # they call no others
            if own and (formula.__module__ != home or operation.__name__ in _FREE_OPERATIONS):
                return False
        _seen[:] = found
    return True


def is_ordinary(tensors: Iterable[Tensor]) -> bool:
    """Return True if tensors are dense and their operations are the usual ones.

    >>> is_ordinary([torch.zeros(2)]), is_ordinary([torch.zeros(2).to_sparse()])
    (True, False)
    """
    found = list(tensors)
    if not is_dense(found):
        return False
    elsewhere = [tensor.device.type for tensor in found if not tensor.is_cpu]
    return not elsewhere or _DEVICES.issuperset(elsewhere)


def is_dense(tensors: Sequence[Tensor]) -> bool:
    """Return True if tensors are of torch's own types, not lazy, not sparse, not nested.

    >>> is_dense([torch.zeros(2)]), is_dense([torch.zeros(2).to_sparse()])
    (True, False)
    """
    return (
        _TENSORS.issuperset(map(type, tensors))
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and True not in [tensor.is_nested for tensor in tensors]
    )


def sort_leaves(
    modules: Iterable[nn.Module],
) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Sort modules into those without FLOPs, linear layers, and all others.

    >>> sort_leaves([nn.ReLU(), nn.Linear(2, 3), nn.Sequential()])
    ([ReLU()], [Linear(in_features=2, out_features=3, bias=True)], [Sequential()])

    The first two kinds call no other modules and take one argument.
    """
    kinds = {kind for kind in _LEAVES if kind.forward.__module__ == kind.__module__}
    free: list[nn.Module] = []
    linear: list[nn.Module] = []
    rest: list[nn.Module] = []
    for module in modules:
        kind: Any = type(module)
        found = rest
        if kind in kinds:
            # Others' hooks may compute, too; those that come later run after ours.
            plain = not forward_hooks_of(module) and "forward" not in vars(module)
            if plain and kind is not nn.Linear:
                found = free
            elif plain and parameters_of(module).get("weight") is not None:  # else it is computed
                found = linear
        found.append(module)
    return free, linear, rest


def flops_of_linear(given: torch.Size, made: torch.Size) -> int:
    """Return the FLOPs of a linear layer: every row of the input times every column of the weights.

    >>> flops_of_linear(torch.Size((5, 7, 2)), torch.Size((5, 7, 3)))
    420
    """
    return 2 * given.numel() * made[-1]


def is_own(types: Sequence[Any]) -> bool:
    """Return True if the types that a function mode was given are those of torch's own tensors.

    >>> is_own((nn.Parameter,)), is_own((nn.Buffer,))
    (True, False)
    """
    return _TENSORS.issuperset(types)


def flops_of_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> int | None:
    """Return the FLOPs of a call of a torch function by torch's formulas; None if unknown.

    >>> x = torch.zeros(5, 2)
    >>> flops_of_call(F.linear, (x, x)), flops_of_call(torch.einsum, ("ab,ab->a", x, x))
    (100, None)
    """
    if function is F.scaled_dot_product_attention:
        return _flops_of_attention(*args, **(kwargs or {}))
    if function is F.linear and not kwargs and 2 <= len(args) <= 3 and _are_dense(*args):
        given, weight = args[0].shape, args[1].shape
        if len(given) > 1 and len(weight) == 2:
            return flops_of_linear(given, weight[:1])
    return None


def _flops_of_attention(
    query: Any = None, key: Any = None, value: Any = None, *more: Any, **options: Any
) -> int | None:
    """Return the FLOPs of queries times keys, and of the result times values."""
    if query is None or key is None or value is None or not _are_dense(query, key, value):
        return None
    if (more or options) and not _PLAIN.issuperset(map(type, (*more, *options.values()))):
        return None
    queries, keys, values = query.shape, key.shape, value.shape
    alike = queries == keys == values  # as most are, and the rest takes longer to find out
    if len(queries) < 3 or not (alike or queries[:-2] == keys[:-2] == values[:-2]):
        return None  # one matrix, broadcast, or heads in groups
    return 2 * (queries.numel() * keys[-2] + values.numel() * queries[-2])


def _are_dense(*tensors: Any) -> bool:
    """Return True if all are ordinary tensors, or None, with the shape that they show."""
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _TENSORS or tensor.layout is not _strided or tensor.is_nested
        ):
            return False
    first = tensors[0]
    # Inside vmap, a tensor has more than it shows.
    return (first.is_cpu or first.device.type in _DEVICES) and transform_stack() is None


def key_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the FLOPs of a call of a pure function depend on; None if that is not known."""
    if transform_stack() is not None:
        return None
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
