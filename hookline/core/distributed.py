"""Values and models that are spread over ranks: DTensors, tensor parallelism, FSDP2.

torch.distributed's parts are found only if the program has loaded them; nothing is imported here.

- `local(tensor)`: what this rank holds of a tensor, waited for
- `placements(tensor)`, `layouts(target)`, `spread`: how a tensor is spread over the ranks
- `copied(tensor)`: a copy, made without the other ranks
- `beside(own, value)`: a change's own tensor, to be computed with a value
- `whole(tensor)`: a DTensor that every rank has whole
- `alike(result, value)`: a changed value, spread as the value was
- `Gathered`: watches the gradient of a parameter on what FSDP gathers for a forward
- `is_gathered(module)`, `gatherer(model, path)`: whether FSDP gathers parameters, and where
- `reshard(model)`: put the shards in their places
- `recover(trace)`, `recovers(model)`: after a forward that was ended early, if torch can
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core import gradients
from hookline.core.tree import Step, around, walk

if TYPE_CHECKING:
    from hookline.core.places import Target
    from hookline.core.taps import Frame, Tap

__all__ = [
    "Gathered", "alike", "beside", "copied", "gatherer", "has_plans", "is_gathered", "layouts",
    "local", "placements", "recover", "recovers", "reshard", "spread", "whole",
]  # fmt: skip

NOT_GATHERED = (
    "no gradient arrived. FSDP gathers the parameter for a forward, and its gradient flows to what "
    "was gathered: the forward must run inside the `with`, too."
)


def _loaded(module: str, name: str) -> Any:
    """A class of torch.distributed, if the program uses it; else what nothing is an instance of."""
    return getattr(sys.modules.get(f"torch.distributed.{module}"), name, ())


# -- tensors --------------------------------------------------------------------------------------


def placements(tensor: Tensor) -> tuple[Any, ...] | None:
    """How a DTensor is spread over its mesh; None for any other tensor."""
    kind = _loaded("tensor", "DTensor")
    return cast(Any, tensor).placements if isinstance(tensor, kind) else None


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; what a collective still brings is waited for."""
    if type(tensor) is Tensor:
        return tensor
    if placements(tensor) is not None:
        tensor = cast(Any, tensor)._local_tensor
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def copied(tensor: Tensor) -> Tensor:
    """A copy that no other rank takes part in: cloning a DTensor of partial sums would add them."""
    if type(tensor) is Tensor or tensor.requires_grad or placements(tensor) is None:
        return tensor.clone()
    given: Any = tensor
    return _loaded("tensor", "DTensor").from_local(
        local(tensor).clone(), given.device_mesh, given.placements,
        run_check=False, shape=given.shape, stride=given.stride(),
    )  # fmt: skip


def beside(own: Tensor, value: Tensor) -> Tensor:
    """A tensor that can be computed with a value: for a DTensor, one that all ranks have whole."""
    if type(value) is Tensor or placements(value) is None or placements(own) is not None:
        return own
    kind, replicate = _loaded("tensor", "DTensor"), _loaded("tensor", "Replicate")
    mesh = cast(Any, value).device_mesh
    return kind.from_local(own, mesh, [replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor that every rank has whole: one in shards may lose what is written to a slice."""
    if type(tensor) is Tensor or placements(tensor) is None:
        return tensor
    given: Any = tensor
    replicate = _loaded("tensor", "Replicate")
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
    before, after = _held(module._forward_pre_hooks), _held(module._forward_hooks)
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


def _held(hooks: Any) -> list[Any]:
    """What torch's own hooks for tensor parallelism hold in their closures."""
    return [
        cell.cell_contents
        for hook in list(hooks.values())  # others may come and go meanwhile
        if getattr(hook, "__module__", "").startswith("torch.distributed.tensor")
        for cell in getattr(hook, "__closure__", None) or ()
    ]


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


# -- FSDP2 ----------------------------------------------------------------------------------------


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP keeps the parameters of a module in shards, and gathers them for a forward."""
    return getattr(module, "_is_fsdp_managed_module", False)


def gatherer(model: nn.Module, path: str) -> nn.Module | None:
    """The module in a model at whose call FSDP gathers the parameters of the module at a path."""
    kind = _loaded("fsdp", "FSDPModule")
    return next((module for module in around(model, path) if isinstance(module, kind)), None)


class Gathered:
    """Stands at the module that gathers a parameter, and watches the gradient of what it gathers.

    Autograd knows the gathered parameter only: a hook on the sharded one never fires. A lazy
    parameter, too, is there at the first call only.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.target = tap.target
        self.seen: list[weakref.ref[Tensor]] = []
        tensor = cast(Tensor, tap.target.tensor())
        if not is_lazy(tensor):
            self.receive(tensor, 0, False, None)
            tap.silent = NOT_GATHERED

    def receive(self, value: Tensor, index: int, recomputed: bool, frame: Frame | None) -> None:
        """Watch the parameter that a call uses, unless it is watched already."""
        if not any(ref() is value for ref in self.seen):
            self.seen.append(weakref.ref(value))
            gradients.watch_tensor(self.tap, value)


def reshard(model: nn.Module, walked: list[Step] | None = None) -> None:
    """Free gathered parameters, so that the sharded ones stand in the modules."""
    kind = _loaded("fsdp", "FSDPModule")
    for _, module in (walked or walk(model)) if kind else ():
        if isinstance(module, kind):
            cast(Any, module).reshard()


def recovers(model: nn.Module) -> bool:
    """Whether a forward of this model can be ended early without harm."""
    kind = _loaded("fsdp", "FSDPModule")
    known = not kind or hasattr(kind, "reset_iter_state")
    return known or not any(is_gathered(module) for _, module in walk(model))


def recover(trace: TracebackType | None) -> None:
    """After a forward that was ended early: FSDP would go on from there, with wrong gradients.

    The modules that were running, also those around the model, are in the traceback.
    """
    kind = _loaded("fsdp", "FSDPModule")
    while kind and trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next
        if not isinstance(module, kind):
            continue
        root = cast(Any, module)._get_fsdp_state()._state_ctx.iter_forward_root
        if root is not None:  # else it is done already
            groups = [g for s in root._state_ctx.all_states for g in s._fsdp_param_groups]
            # What was accumulated and not reduced yet stays, though a reset drops it.
            kept = [(group, group._partial_reduce_output) for group in groups]
            root._modules[0].reset_iter_state()
            for group, output in kept:
                group._partial_reduce_output = output
