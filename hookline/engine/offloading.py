"""Parameters that accelerate keeps on the CPU or on disk, and loads for the length of a call.

Outside of the call the module holds a meta tensor. accelerate replaces `module.forward`, so that
the hooks of torch run before it has loaded the data. It is read from accelerate's map of weights
instead; nothing of accelerate's is changed. accelerate's parts are found by what they offer, and
never imported.

- `data_of(module, tensor, path)`: the tensor, or a copy of its data if it is offloaded
- `value_of(target, caller)`: what a call of a module will use as a parameter or buffer
- `unload(trace)`: after a forward that was ended early
- `is_offloaded(module, tensor, path)`, `offloads(model)`: whether data is kept elsewhere
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from traceback import walk_tb
from types import TracebackType
from typing import Any, cast

from torch import Tensor, nn

from hookline.places.resolution import Target
from hookline.places.tree import walk

__all__ = ["NO_GRADIENT", "data_of", "is_offloaded", "offloads", "unload", "value_of"]

NO_GRADIENT = (
    "accelerate has offloaded the parameter: the gradient flows to a copy that lives for one call.",
    "Keep the parameter in memory, or capture the gradients of the module's output and input.",
)


def data_of(module: nn.Module, tensor: Tensor, path: str) -> Tensor:
    """Return the tensor at a path in a module, or a copy of its data if it is offloaded."""
    if not tensor.is_meta:
        return tensor
    for weights, name in _maps(module, path):
        try:
            # A copy: accelerate knows tied parameters by the address of what it keeps. It loads
            # them in the dtype of the meta tensor, too.
            return weights[name].detach().to(tensor.dtype, copy=True)
        except KeyError:  # the map of a module around it, which offloads others
            continue
    return tensor


def value_of(target: Target, caller: nn.Module) -> Tensor | None:
    """Return the parameter or buffer at a target as a call of a module will use it."""
    tensor = target.tensor()
    if tensor is None or not tensor.is_meta:
        return tensor
    path = next(path for path, module in walk(caller) if module is target.module)
    return data_of(caller, tensor, target.named(path))


def is_offloaded(module: nn.Module, tensor: Tensor | None, path: str) -> bool:
    """Return True if accelerate keeps the data of the tensor at a path in a module elsewhere."""
    return tensor is not None and tensor.is_meta and any(True for _ in _maps(module, path))


def offloads(model: nn.Module) -> bool:
    """Return True if accelerate keeps parameters of a model elsewhere."""
    modules = cast("Iterable[nn.Module]", model.modules())
    return any(True for module in modules for _ in _own_maps(module))


def unload(trace: TracebackType | None) -> None:
    """Unload what accelerate has loaded, after a forward that was ended early.

    It is told the end of the calls that were running, as at the end of any call.
    """
    running: list[nn.Module] = []
    for frame, _ in walk_tb(trace):
        if frame.f_globals.get("__name__") == "accelerate.hooks":
            module = frame.f_locals.get("module")
            if isinstance(module, nn.Module) and module not in running:
                running.append(module)
    for module in reversed(running):
        hook = vars(module).get("_hf_hook")
        if hook is not None:
            hook.post_forward(module, None)


def _maps(module: nn.Module, path: str) -> Iterator[tuple[Mapping[str, Tensor], str]]:
    """Yield the maps that may have a tensor, the innermost module first, with its name in each."""
    steps, around = path.split("."), [module]
    for step in steps[:-1]:
        around.append(around[-1].get_submodule(step))
    for depth in reversed(range(len(around))):
        name = ".".join(steps[depth:])
        yield from ((weights, name) for weights in _own_maps(around[depth]))


def _own_maps(module: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Yield the weights maps of accelerate's hooks on a module."""
    waiting: list[Any] = [vars(module).get("_hf_hook")]
    while waiting:
        hook = waiting.pop()
        waiting += getattr(hook, "hooks", ())  # of accelerate's SequentialHook
        weights = getattr(hook, "weights_map", None)
        if getattr(hook, "offload", False) and isinstance(weights, Mapping):
            yield cast("Mapping[str, Tensor]", weights)
