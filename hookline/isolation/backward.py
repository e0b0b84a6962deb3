"""Run the backward of a model without leaving gradients.

- `grad_mode(enabled)`: a context with or without gradients, also inside inference mode
- `check_differentiable(parameters)`: raise BatchError if some were made in inference mode
- `is_differentiable(tensor)`: return True if its dtype can have gradients
- `copy_with_leaves(value, wanted)`: a copy of a nested value, and the leaves of autograd in it
- `backward_roots(value)`: the tensors from which a backward starts
- `graph_nodes(roots)`: the autograd nodes that it visits
- `has_reentrant_checkpoint(nodes)`: return True if it needs `backward()`, which writes to `.grad`
- `backward_without_grads(roots)`: a backward that leaves no gradient anywhere
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookline.errors import BatchError
from hookline.values.nested import leaves, map_leaves

__all__ = [
    "REENTRANT",
    "backward_roots",
    "backward_without_grads",
    "check_differentiable",
    "copy_with_leaves",
    "grad_mode",
    "graph_nodes",
    "has_reentrant_checkpoint",
    "is_differentiable",
]

REENTRANT = "CheckpointFunctionBackward"  # the node of reentrant checkpointing


@contextmanager
def grad_mode(enabled: bool) -> Generator[None]:
    """Enable or disable gradients, also where the user has turned on inference mode.

    >>> with torch.inference_mode(), grad_mode(True):
    ...     (torch.ones(2, requires_grad=True) * 3).requires_grad
    True
    """
    ends = enabled and torch.is_inference_mode_enabled()
    mode = torch.inference_mode(False) if ends else nullcontext()
    # Not set_grad_enabled, which acts as soon as it is made: an interrupt would leave it so.
    with mode, torch.enable_grad() if enabled else torch.no_grad():
        yield


def check_differentiable(parameters: Iterable[Tensor | None]) -> None:
    """Raise BatchError if a parameter was made in inference mode.

    It says that it requires a gradient, and torch makes no graph of what is computed with it.
    """
    made = [p for p in parameters if p is not None and not is_lazy(p)]
    if any(p.requires_grad and p.is_inference() for p in made):
        raise BatchError(
            "A backward was asked for.",
            "Parameters of the model were made inside torch.inference_mode: they have no gradient.",
            "Make the model outside of it; copy.deepcopy(model), called outside, will do.",
        )


def is_differentiable(tensor: Tensor) -> bool:
    """Return True if the dtype of a tensor can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def copy_with_leaves(value: Any, wanted: Callable[[Tensor], bool]) -> tuple[Any, dict[int, Tensor]]:
    """Copy a nested value; return new leaves that require grad for the tensors that are wanted.

    The leaves are returned by the ids of the original tensors.
    """
    found: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().clone()
        if not wanted(leaf):
            return copy
        found[id(leaf)] = copy.requires_grad_()
        return copy.clone()  # the model may change it in place, which a leaf does not allow

    return map_leaves(copied, value), found


def backward_roots(value: Any) -> list[Tensor]:
    """Return the tensors from which a backward starts; raise BatchError if there are none."""
    roots = [tensor for _, tensor in leaves(value) if tensor.requires_grad]
    if not roots:
        raise BatchError(
            "A backward was asked for.",
            "Nothing that the model returned has a gradient.",
            "Let a parameter or the batch require grad, or leave out backward= or loss=.",
        )
    return roots


def graph_nodes(roots: list[Tensor]) -> list[Any]:
    """Return the autograd nodes that a backward from these tensors visits."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return list(seen)


def has_reentrant_checkpoint(nodes: Iterable[Any]) -> bool:
    """Return True if reentrant checkpointing made a node.

    It works in `torch.autograd.backward` only, not in `torch.autograd.grad`.
    """
    return any(node.name() == REENTRANT for node in nodes)


def backward_without_grads(roots: list[Tensor], nodes: list[Any] | None = None) -> None:
    """Run a backward that leaves no gradient anywhere.

    >>> layer = torch.nn.Linear(2, 2)
    >>> backward_without_grads([layer(torch.ones(1, 2))])
    >>> layer.weight.grad is None
    True
    """
    nodes = graph_nodes(roots) if nodes is None else nodes
    starts = [torch.ones_like(tensor) for tensor in roots]
    variables = [node.variable for node in nodes if hasattr(node, "variable")]
    variables = [variable for variable in variables if variable.requires_grad]
    if variables and not has_reentrant_checkpoint(nodes):
        torch.autograd.grad(roots, variables, starts, allow_unused=True)
        return
    before = [(variable, variable.grad) for variable in variables]
    try:
        for variable in variables:
            variable.grad = None  # else it is added to, in place
        torch.autograd.backward(roots, starts)
    finally:
        for variable, grad in before:
            variable.grad = grad
