"""Runs that leave no trace: how `summarize`, `compare` and `sweep` call a model.

- `trial(*models, mode=None)`: a context; afterwards the models and random numbers are as before
- `run(model, batch)`: call a model on a batch, or let a function call it
- `check_model(verb, model)`: an error if it is no module
- `noted(note)`: a context; what a model raises inside keeps its type, and gains a note
- `cuda_devices(model)`: where its parameters and buffers are
- `copied(batch)`: the same batch in memory of its own, as models may write into it
- `same_random_numbers(*models)`: a context; random numbers drawn inside are drawn again after it
- `gradients(wanted)`: a context with or without gradients, also where inference mode is on
- `refuse_inference(parameters)`: an error if some can have no gradient, for how they were made
- `roots_of(value)`: the tensors from which a backward starts, or an error that there are none
- `pull_back(roots)`: a backward that leaves no gradient; `nodes_of(roots)`: what it visits
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import is_not
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hookline.core.gathering import reshard
from hookline.edits.parameters import Undo
from hookline.edits.restoring import put_back, restorer
from hookline.errors import BatchError, HooklineError
from hookline.places.tree import walk
from hookline.torch_private import (
    buffers_of,
    parameters_of,
    post_accumulate_hooks_of,
    submodules_of,
)
from hookline.trials.batches import call, is_shape
from hookline.trials.contents import Contents
from hookline.trials.modes import modes_of, set_mode, set_modes
from hookline.values.nested import leaves, map_leaves
from hookline.values.snapshots import duplicate, is_fake

__all__ = [
    "Mode",
    "check_model",
    "copied",
    "cuda_devices",
    "gradients",
    "nodes_of",
    "noted",
    "pull_back",
    "refuse_inference",
    "roots_of",
    "run",
    "same_random_numbers",
    "trial",
]

Mode = Literal["eval", "train"]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module)


def check_model(verb: str, model: Any) -> None:
    """TypeError if something that was given as a model is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{verb} was asked about a {type(model).__name__}. A model is a torch.nn.Module. "
            f"Give it first, then a batch."
        )


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model: a dict gives arguments by name, a tuple or list by position.

    >>> run(nn.ReLU(), {"input": torch.tensor([-1.0, 1.0])})
    tensor([0., 1.])
    >>> run(nn.ReLU(), lambda model: model(torch.tensor([-1.0, 1.0])))
    tensor([0., 1.])
    """
    if callable(batch) and not isinstance(batch, (Tensor, nn.Module)):
        return cast("Callable[[nn.Module], Any]", batch)(model)
    try:
        return call(model, batch)
    except Exception as error:
        _note_place(model, error)
        if isinstance(error, TypeError) and isinstance(batch, (tuple, list)):
            items = tuple(cast("list[Any]", batch))
            remedy = "if it holds labels too, give batch[0]."
            if is_shape(items):
                remedy = f"if a shape is meant, give a tuple: {items}."
            error.add_note(
                "hookline: a batch that is a tuple or list is given to the model as its arguments; "
                f"{remedy}"
            )
        elif isinstance(batch, DataLoader):
            error.add_note("hookline: this is a loader; give a batch of it: next(iter(loader)).")
        raise


def _note_place(model: nn.Module, error: Exception) -> None:
    """Say in which module an error was raised, and what a layer was given."""
    names = {module: path for path, module in walk(model)}
    raised, trace = None, error.__traceback__
    while trace is not None:  # from the outermost frame inwards
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and names.get(own):
            raised = own, trace.tb_frame
        trace = trace.tb_next
    if raised is None or isinstance(error, HooklineError) or getattr(error, "__notes__", None):
        return
    module, frame = raised
    given = [value for value in frame.f_locals.values() if isinstance(value, Tensor)]
    shape = (
        f", which was given {tuple(given[0].shape)}" if given and not submodules_of(module) else ""
    )
    error.add_note(f"hookline: raised in {names[module]!r} ({type(module).__name__}){shape}.")


@contextmanager
def noted(note: str) -> Generator[None]:
    """What a model raises inside keeps its type, and gains a note, if there is one."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if note and not isinstance(error, HooklineError):
            error.add_note(f"hookline: {note}")
        raise


def cuda_devices(model: nn.Module) -> set[torch.device]:
    """The CUDA devices on which a model has parameters or buffers."""
    if not torch.cuda.is_initialized():
        return set()
    return {tensor.device for tensor in Contents(model).tensors if tensor.is_cuda}


def copied(batch: Any) -> Any:
    """The same batch in memory of its own; what cannot be copied stays as it is.

    >>> x = torch.zeros(2)
    >>> _ = copied({"x": x})["x"].fill_(7)
    >>> x
    tensor([0., 0.])
    """
    return map_leaves(_copy, batch)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return duplicate(leaf).requires_grad_(leaf.requires_grad)
    if not isinstance(leaf, _PLAIN) and not callable(leaf):
        with suppress(Exception):  # a cache of keys and values can be copied, a stream cannot
            return copy.deepcopy(leaf)
    return leaf


@contextmanager
def trial(
    *models: nn.Module, mode: Mode | None = None, contents: Sequence[Contents] | None = None
) -> Generator[None]:
    """Run models inside; afterwards modes, buffers, gradients and random numbers are as before.

    Gradients are put aside meanwhile: a backward that the run makes itself would add to them.

    >>> norm = nn.BatchNorm1d(2)
    >>> with trial(norm):
    ...     _ = norm(torch.randn(8, 2))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))

    Args:
        models: the models that run.
        mode: "eval" or "train" to run them so; each module has its own mode again afterwards.
        contents: what stands in each model, if it is known already. Without it, lazy models are
            refused.
    """
    _check_mode(mode)
    if contents is None:
        contents = [Contents(model) for model in models]
        _refuse_unmade(contents)
    modules = [module for content in contents for module in content.modules]
    modes = modes_of(modules)
    parameters = [p for content in contents for p in content.all_parameters if p is not None]
    grads = [p.grad for p in parameters]
    undo = _buffers_back(modules)
    for content in contents:
        reshard(content.model, content.named)
        undo.append(partial(reshard, content.model, content.named))
    with same_random_numbers(*models, loaded=True):
        try:
            _take_out_hooks(parameters, undo)
            _set_grads(parameters, [None] * len(parameters))
            if mode is not None:
                for model in models:
                    set_mode(model, mode == "train")
            yield
        finally:
            # Most often nothing has changed, and that is seen without a loop in Python.
            if modes_of(modules) != modes:
                set_modes(modules, modes)
            for content in contents:
                if content.find_trained() != content.trained:
                    _require(content)
            _set_grads(parameters, grads)
            undo.run()


def _check_mode(mode: Any) -> None:
    if mode not in (None, "eval", "train"):
        raise BatchError(
            f"A run with mode={mode!r} was asked for.",
            "There is no such mode.",
            "Give mode='eval', 'train' or None, which runs the model in the mode in which it is.",
        )


def _refuse_unmade(contents: Sequence[Contents]) -> None:
    if any(is_lazy(tensor) for content in contents for tensor in content.tensors):
        raise BatchError(
            "A run was asked for after which the model is as before.",
            "It has lazy modules, which the run would give their sizes.",
            "Run the model once before.",
        )


def _buffers_back(modules: list[nn.Module]) -> Undo:
    """What puts the buffers of modules back: the same tensors, bit for bit, and no others.

    And the weights to which a forward of torch's own writes.
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


def _take_out_hooks(parameters: list[nn.Parameter], undo: Undo) -> None:
    """Take out the hooks that run after a gradient is accumulated: they may step an optimiser."""
    for hooks in filter(None, [post_accumulate_hooks_of(p) for p in parameters]):
        # Torch keeps the dict, so its content is taken out.
        undo.append(partial(hooks.update, dict(hooks)))
        hooks.clear()


def _set_grads(parameters: list[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    # Most often nothing differs, and that is seen without a loop in Python.
    if any(map(is_not, [p.grad for p in parameters], grads)):
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


def _require(content: Contents) -> None:
    for parameter, was in zip(content.all_parameters, content.trained, strict=True):
        if parameter is not None and parameter.requires_grad != was and parameter.is_leaf:
            parameter.requires_grad_(was)


def _drop_new(modules: list[nn.Module], before: dict[nn.Module, dict[str, Any]]) -> None:
    """Take out the buffers that a run has registered, and all that was in the place of none."""
    for module in [module for module in modules if buffers_of(module)]:
        table, own = buffers_of(module), before.get(module, {})
        for name in list(table.keys()):  # that of a ScriptModule cannot be gone through
            if name not in own:
                del table[name]
            elif own[name] is None:
                table[name] = None


@contextmanager
def same_random_numbers(*models: nn.Module, loaded: bool = False) -> Generator[None]:
    """Random numbers drawn inside, from torch, Python or numpy, are drawn again after it.

    With `loaded`, those of numpy only if its generators were loaded before: else nobody has seeded
    them, and which numbers they give is left to chance.

    >>> with same_random_numbers():
    ...     first = torch.rand(3)
    >>> bool((first == torch.rand(3)).all())
    True
    """
    devices = {device for model in models for device in cuda_devices(model)}
    numpy = np.random if not loaded or "numpy.random" in sys.modules else None
    numbers = None if numpy is None else numpy.get_state(legacy=False)
    python, state = random.getstate(), torch.get_rng_state()
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and numbers is not None:
            numpy.set_state(numbers)
        torch.set_rng_state(state)
        for device, of_device in states.items():
            torch.cuda.set_rng_state(of_device, device)


@contextmanager
def gradients(wanted: bool) -> Generator[None]:
    """Inside, gradients can be had, or not; also where the user has turned on inference mode.

    >>> with torch.inference_mode(), gradients(True):
    ...     (torch.ones(2, requires_grad=True) * 3).requires_grad
    True
    """
    ends = wanted and torch.is_inference_mode_enabled()
    mode = torch.inference_mode(False) if ends else nullcontext()
    # Not set_grad_enabled, which acts as soon as it is made: an interrupt would leave it so.
    with mode, torch.enable_grad() if wanted else torch.no_grad():
        yield


def refuse_inference(parameters: Iterable[Tensor | None]) -> None:
    """BatchError if a parameter was made in inference mode.

    It says that it requires a gradient, and torch makes no graph of what is computed with it.
    """
    made = [p for p in parameters if p is not None and not is_lazy(p)]
    if any(p.requires_grad and p.is_inference() for p in made):
        raise BatchError(
            "A backward was asked for.",
            "Parameters of the model were made inside torch.inference_mode: they have no gradient.",
            "Make the model outside of it; copy.deepcopy(model), called outside, will do.",
        )


def roots_of(value: Any) -> list[Tensor]:
    """The tensors from which a backward starts; BatchError if there are none."""
    roots = [tensor for _, tensor in leaves(value) if tensor.requires_grad]
    if not roots:
        raise BatchError(
            "A backward was asked for.",
            "Nothing that the model returned has a gradient.",
            "Let a parameter or the batch require grad, or leave out backward= or loss=.",
        )
    return roots


def nodes_of(roots: list[Tensor]) -> list[Any]:
    """The autograd nodes that a backward from these tensors visits."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return list(seen)


def pull_back(roots: list[Tensor], nodes: list[Any] | None = None) -> None:
    """A backward that leaves no gradient anywhere.

    >>> layer = nn.Linear(2, 2)
    >>> pull_back([layer(torch.ones(1, 2))])
    >>> layer.weight.grad is None
    True
    """
    nodes = nodes_of(roots) if nodes is None else nodes
    starts = [torch.ones_like(tensor) for tensor in roots]
    variables = [node.variable for node in nodes if hasattr(node, "variable")]
    variables = [variable for variable in variables if variable.requires_grad]
    reentrant = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
    if variables and not reentrant:
        torch.autograd.grad(roots, variables, starts, allow_unused=True)
        return
    # Reentrant checkpointing works in backward() only, which leaves gradients behind.
    before = [(variable, variable.grad) for variable in variables]
    try:
        for variable in variables:
            variable.grad = None  # else it is added to, in place
        torch.autograd.backward(roots, starts)
    finally:
        for variable, grad in before:
            variable.grad = grad
