"""Run models without a trace: afterwards they, and the random numbers, are as before.

- `isolated(*models, mode=None)`: the context in which `summarize`, `compare`, `sweep`, `select`,
  `report`, the second runs of a guard, and `replay` run a model
- `Mode`: "eval" or "train"
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.edits.parameter_swap import Undo
from hookline.edits.restoring import put_back, restorer
from hookline.engine.fsdp import reshard
from hookline.errors import BatchError
from hookline.isolation.module_index import ModuleIndex
from hookline.isolation.random_state import RandomState, cuda_devices
from hookline.isolation.training_modes import modes_of, set_mode, set_modes
from hookline.torch_private import buffers_of, parameters_of, post_accumulate_hooks_of
from hookline.values.snapshots import is_fake

__all__ = ["Mode", "isolated"]

Mode = Literal["eval", "train"]


@contextmanager
def isolated(
    *models: nn.Module | ModuleIndex,
    mode: Mode | None = None,
    devices: Iterable[torch.device | int] = (),
) -> Generator[None]:
    """Restore modes, buffers, gradients and random numbers at the end of the block.

    Gradients are put aside meanwhile: a backward inside would add to them.

    >>> norm = nn.BatchNorm1d(2)
    >>> with isolated(norm):
    ...     _ = norm(torch.randn(8, 2))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))

    Args:
        models: the models that run. Lazy modules are refused, except in a `ModuleIndex`.
        mode: "eval" or "train" to run the models so; each module gets its own mode back.
        devices: CUDA devices whose random numbers are restored, beside those of the models.
    """
    _check_mode(mode)
    indices = [one if isinstance(one, ModuleIndex) else _indexed(one) for one in models]
    modules = [module for index in indices for module in index.modules]
    modes = modes_of(modules)
    held = [p for index in indices for p in index.all_parameters]
    parameters = [p for p in held if p is not None and p.is_leaf]  # others have no gradient
    grads = [p.grad for p in parameters]
    undo = _buffers_back(modules)
    for index in indices:
        reshard(index.model, index.named)
        undo.append(partial(reshard, index.model, index.named))
    state = RandomState({*devices}.union(*(cuda_devices(index) for index in indices)))
    try:
        _take_out_hooks(parameters, undo)
        _set_grads(parameters, [None] * len(parameters))
        if mode is not None:
            for index in indices:
                set_mode(index.model, mode == "train")
        yield
    finally:
        try:
            # Most often nothing has changed, and that is seen without a loop in Python.
            if modes_of(modules) != modes:
                set_modes(modules, modes)
            for index in indices:
                if index.find_trained() != index.trained:
                    _require(index)
            _set_grads(parameters, grads)
            undo.run()
        finally:
            state.restore()


def _check_mode(mode: Any) -> None:
    """Raise an error unless this is a mode."""
    if mode not in (None, "eval", "train"):
        raise BatchError(
            f"A run with mode={mode!r} was asked for.",
            "There is no such mode.",
            "Give mode='eval', 'train' or None, which runs the model in the mode in which it is.",
        )


def _take_out_hooks(parameters: list[nn.Parameter], undo: Undo) -> None:
    """Take out the hooks that run after a gradient is accumulated: they may step an optimiser."""
    for hooks in filter(None, [post_accumulate_hooks_of(p) for p in parameters]):
        # torch keeps the dict, so its content is taken out.
        undo.append(partial(hooks.update, dict(hooks)))
        hooks.clear()


def _set_grads(parameters: list[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Set the gradients of parameters."""
    # Most often nothing differs, and that is seen without a loop in Python.
    if any(map(is_not, [p.grad for p in parameters], grads)):
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


def _indexed(model: nn.Module) -> ModuleIndex:
    index = ModuleIndex(model)
    if any(is_lazy(tensor) for tensor in index.tensors):
        raise BatchError(
            "A run was asked for after which the model is as before.",
            "It has lazy modules, which the run would give their sizes.",
            "Run the model once before.",
        )
    return index


def _buffers_back(modules: list[nn.Module]) -> Undo:
    """Return what puts back the buffers of modules: the same tensors, bit for bit, and no others.

    It also puts back the embeddings whose weights a forward of torch changes (`max_norm`).
    """
    undo = Undo()
    before = {module: dict(buffers_of(module)) for module in modules if buffers_of(module)}
    for module, own in before.items():
        for name, buffer in own.items():
            if buffer is not None and not buffer.is_meta:
                undo.append(partial(put_back, module, buffers_of(module), own, name))
                if type(buffer) is Tensor or not (is_lazy(buffer) or is_fake(buffer)):
                    undo.append(restorer(buffer))
    for module in [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]:
        if module.max_norm is not None:  # it shortens its weights
            weight = parameters_of(module).get("weight")
            if weight is not None and not (weight.is_meta or is_fake(weight)):
                undo.append(restorer(weight))
    undo.append(partial(_drop_new, modules, before))  # the last comes first
    return undo


def _require(index: ModuleIndex) -> None:
    for parameter, was in zip(index.all_parameters, index.trained, strict=True):
        if parameter is not None and parameter.requires_grad != was and parameter.is_leaf:
            parameter.requires_grad_(was)


def _drop_new(modules: list[nn.Module], before: dict[nn.Module, dict[str, Any]]) -> None:
    """Remove the buffers that a run has registered, or put where None was registered."""
    for module in [module for module in modules if buffers_of(module)]:
        table, own = buffers_of(module), before.get(module, {})
        for name in list(table.keys()):  # a ScriptModule's table cannot be iterated
            if name not in own:
                del table[name]
            elif own[name] is None:
                table[name] = None
