"""Tensors that are spread over ranks: DTensors, and what a tensor-parallel plan makes of them.

torch.distributed's parts are found only if the program has loaded them; nothing is imported here.

- `loaded(module, name)`: a class of torch.distributed, if the program uses it
- `local(tensor)`: what this rank holds of a tensor, waited for
- `placements(tensor)`, `layouts(target)`, `spread`: how a tensor is spread over the ranks
- `has_plans()`: whether the program may have parallelised modules
- `copied(tensor)`: a copy, made without the other ranks
- `beside(own, value)`: a change's own tensor, to be computed with a value
- `whole(tensor)`: a DTensor that every rank has whole
- `alike(result, value)`: a changed value, spread as the value was
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hookline.torch_checks import require
from hookline.torch_private import (
    forward_hooks_of,
    forward_pre_hooks_of,
    local_tensor,
    tensor_parallel_styles,
)

if TYPE_CHECKING:
    from hookline.places.targets import Target

__all__ = [
    "alike", "beside", "copied", "has_plans", "layouts", "loaded", "local", "placements",
    "spread", "whole",
]  # fmt: skip


def loaded(module: str, name: str) -> Any:
    """A class of torch.distributed, if the program uses it; else what nothing is an instance of."""
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())


def placements(tensor: Tensor) -> tuple[Any, ...] | None:
    """How a DTensor is spread over its mesh; None for any other tensor."""
    kind = loaded("tensor", "DTensor")
    return cast(Any, tensor).placements if isinstance(tensor, kind) else None


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; what a collective still brings is waited for."""
    if type(tensor) is Tensor:
        return tensor
    if placements(tensor) is not None:
        require("distributed")
        tensor = local_tensor(tensor)
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def copied(tensor: Tensor) -> Tensor:
    """A copy that no other rank takes part in: cloning a DTensor of partial sums would add them."""
    if type(tensor) is Tensor or tensor.requires_grad or placements(tensor) is None:
        return tensor.clone()
    given: Any = tensor
    return loaded("tensor", "DTensor").from_local(
        local(tensor).clone(), given.device_mesh, given.placements,
        run_check=False, shape=given.shape, stride=given.stride(),
    )  # fmt: skip


def beside(own: Tensor, value: Tensor) -> Tensor:
    """A tensor that can be computed with a value: for a DTensor, one that all ranks have whole."""
    if type(value) is Tensor or placements(value) is None or placements(own) is not None:
        return own
    kind, replicate = loaded("tensor", "DTensor"), loaded("tensor", "Replicate")
    mesh = cast(Any, value).device_mesh
    return kind.from_local(own, mesh, [replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor that every rank has whole: one in shards may lose what is written to a slice."""
    if type(tensor) is Tensor or placements(tensor) is None:
        return tensor
    given: Any = tensor
    replicate = loaded("tensor", "Replicate")
    return given.redistribute(placements=[replicate()] * given.device_mesh.ndim)


def alike(result: Tensor, value: Tensor) -> Tensor:
    """A changed value, spread over the ranks as the value was."""
    wanted = None if type(value) is Tensor else placements(value)
    if wanted is None or placements(result) == wanted:
        return result
    return cast(Any, beside(result, value)).redistribute(placements=wanted)


# -- tensor parallelism ---------------------------------------------------------------------------


def has_plans() -> bool:
    """Whether the program may have parallelised modules."""
    return "torch.distributed.tensor.parallel" in sys.modules


def layouts(target: Target) -> Sequence[tuple[Any, ...] | None]:
    """How a plan of `parallelize_module` spreads what a module returns, or its first argument.

    Its hooks turn DTensors into plain tensors that bear no mark; the plan is in their closures.
    What stays a DTensor says itself how it is spread, and is not looked for.
    """
    if not has_plans() or target.operation is not None:
        return ()
    module, port = target.module, target.port
    before = tensor_parallel_styles(forward_pre_hooks_of(module))
    after = tensor_parallel_styles(forward_hooks_of(module))
    if port in ("input", "grad_input"):
        styles = [held for held in before if getattr(held, "use_local_output", False)]
        return [_one(p) for held in styles[:1] for p in getattr(held, "desired_input_layouts", ())]
    for held in after if port in ("output", "grad_output") else ():
        if getattr(held, "use_local_output", False):  # PrepareModuleOutput
            return [_one(p) for p in getattr(held, "desired_output_layouts", ())]
        if isinstance(held, partial) and held.args[-1] is True:  # use_local_output of the others
            given = [*held.args, *(arg for other in before for arg in getattr(other, "args", ()))]
            return [cast("tuple[Any, ...]", arg) for arg in given if isinstance(arg, tuple)][:1]
    return ()


def _one(placement: Any) -> tuple[Any, ...] | None:
    return None if placement is None else (placement,)


def spread(tensor: Tensor, planned: Sequence[tuple[Any, ...] | None], path: Sequence[Any]) -> Any:
    """The placements of a tensor: its own, or those that a plan gives what stands at a path."""
    position = path[0] if path and isinstance(path[0], int) else 0
    found = placements(tensor)
    if found is None and 0 <= position < len(planned) and len(path) < 2:
        found = planned[position]
    if found is None:
        return None
    return tuple(type(p)(p.dim + tensor.ndim) if getattr(p, "dim", 0) < 0 else p for p in found)
