"""Handle tensors that are spread over ranks: DTensors, and the outputs of tensor-parallel modules.

Nothing of torch.distributed is imported here: a program that does not load it has no such tensors.

- `loaded(module, name)`: a class of torch.distributed, if the program has loaded it
- `local(tensor)`: the part of a tensor that this rank holds
- `placements(tensor)`: how a DTensor is spread over its mesh
- `layouts(target)`: how a tensor-parallel plan spreads the value at a place
- `spread(tensor, planned, path)`: how a tensor is spread, by itself or by a plan
- `has_plans()`: True if the program may have parallelised modules
- `copied(tensor)`: a copy, made without the other ranks
- `beside(own, value)`: a tensor of this rank, in a form that can be combined with a value
- `replicated(tensor)`: a DTensor of which every rank has all
- `placed_like(changed, original)`: a changed value, spread over the ranks as the original was
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
    "beside", "copied", "has_plans", "layouts", "loaded", "local", "placed_like", "placements",
    "replicated", "spread",
]  # fmt: skip


Placements = tuple[Any, ...]  # torch's Shard, Replicate or Partial, one for each mesh dimension


def loaded(module: str, name: str) -> Any:
    """Return a class of torch.distributed, or `()`, for `isinstance`, if it is not loaded."""
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())


def placements(tensor: Tensor) -> Placements | None:
    """Return the placements of a DTensor; None for any other tensor."""
    kind = loaded("tensor", "DTensor")
    return cast(Any, tensor).placements if isinstance(tensor, kind) else None


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, after waiting for its collective."""
    if type(tensor) is Tensor:
        return tensor
    if placements(tensor) is not None:
        require("distributed")
        tensor = local_tensor(tensor)
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def copied(tensor: Tensor) -> Tensor:
    """Return a copy without communication: `clone` would reduce a DTensor of partial sums."""
    if type(tensor) is Tensor or tensor.requires_grad or placements(tensor) is None:
        return tensor.clone()
    given: Any = tensor
    return loaded("tensor", "DTensor").from_local(
        local(tensor).clone(), given.device_mesh, given.placements,
        run_check=False, shape=given.shape, stride=given.stride(),
    )  # fmt: skip


def beside(own: Tensor, value: Tensor) -> Tensor:
    """Return a tensor that can be combined with a value: beside a DTensor, a replicated one."""
    if type(value) is Tensor or placements(value) is None or placements(own) is not None:
        return own
    kind = loaded("tensor", "DTensor")
    replicate = loaded("tensor", "Replicate")
    mesh = cast(Any, value).device_mesh
    return kind.from_local(own, mesh, [replicate()] * mesh.ndim, run_check=False)


def replicated(tensor: Tensor) -> Tensor:
    """Return a DTensor of which every rank has all: a sharded one may lose writes to a slice."""
    if type(tensor) is Tensor or placements(tensor) is None:
        return tensor
    given: Any = tensor
    replicate = loaded("tensor", "Replicate")
    return given.redistribute(placements=[replicate()] * given.device_mesh.ndim)


def placed_like(changed: Tensor, original: Tensor) -> Tensor:
    """Return a changed value, spread over the ranks as the original was."""
    wanted = None if type(original) is Tensor else placements(original)
    if wanted is None or placements(changed) == wanted:
        return changed
    return cast(Any, beside(changed, original)).redistribute(placements=wanted)


# -- tensor parallelism ---------------------------------------------------------------------------


def has_plans() -> bool:
    """Return True if the program may have parallelised modules."""
    return "torch.distributed.tensor.parallel" in sys.modules


def layouts(target: Target) -> Sequence[Placements | None]:
    """Return how a plan of `parallelize_module` spreads a module's outputs, or its first arguments.

    The hooks of a plan return plain tensors that bear no mark; the plan is in their closures. A
    tensor that stays a DTensor knows its own placements, so nothing is returned for it.
    """
    if not has_plans() or target.operation is not None:
        return ()
    module = target.module
    before = tensor_parallel_styles(forward_pre_hooks_of(module))
    after = tensor_parallel_styles(forward_hooks_of(module))
    if target.port in ("input", "grad_input"):
        return _input_layouts(before)
    if target.port in ("output", "grad_output"):
        return _output_layouts(before, after)
    return ()


def _input_layouts(before: Sequence[Any]) -> list[Placements | None]:
    """Return the layouts of the first of these styles that returns plain tensors."""
    for style in before:
        if getattr(style, "use_local_output", False):  # PrepareModuleInput
            return [_one(placement) for placement in getattr(style, "desired_input_layouts", ())]
    return []


def _output_layouts(before: Sequence[Any], after: Sequence[Any]) -> list[Placements | None]:
    """Return the layouts of the first style that returns plain tensors."""
    for style in after:
        if getattr(style, "use_local_output", False):  # PrepareModuleOutput
            return [_one(placement) for placement in getattr(style, "desired_output_layouts", ())]
        # The last argument that the other styles bind to their hooks is use_local_output.
        if isinstance(style, partial) and style.args[-1] is True:
            bound = [*style.args, *(arg for other in before for arg in getattr(other, "args", ()))]
            return [cast("Placements | None", arg) for arg in bound if isinstance(arg, tuple)][:1]
    return []


def _one(placement: Any) -> Placements | None:
    return None if placement is None else (placement,)


def spread(tensor: Tensor, planned: Sequence[Placements | None], path: Sequence[Any]) -> Any:
    """Return the placements of the tensor at a path: its own, or those of a plan."""
    position = path[0] if path and isinstance(path[0], int) else 0
    found = placements(tensor)
    if found is None and 0 <= position < len(planned) and len(path) < 2:
        found = planned[position]
    if found is None:
        return None
    # A shard's dimension may be counted from the end.
    return tuple(type(p)(p.dim + tensor.ndim) if getattr(p, "dim", 0) < 0 else p for p in found)
