"""FSDP: parameters that are gathered for a forward, and freed again.

- `is_gathered(module)`, `gatherer(model, path)`: whether parameters are gathered, and where
- `watch_later(handler)`, `watch_gathered(handler, tensor)`: watch the gradient of such a parameter
- `reshard(model)`: put the shards back
- `recovers(model)`, `recover(trace)`: go on after a forward that was ended early
"""

from __future__ import annotations

import weakref
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine import gradients
from hookline.places.tree import NamedModule, around, walk
from hookline.torch_checks import passes, require
from hookline.torch_private import is_fsdp_managed, recover_fsdp, recovers_fsdp
from hookline.values.sharding import loaded

if TYPE_CHECKING:
    from hookline.engine.handlers import Handler

__all__ = [
    "gatherer", "is_gathered", "recover", "recovers", "reshard", "watch_gathered", "watch_later",
]  # fmt: skip

NOT_GATHERED = (
    "no gradient arrived. FSDP gathers the parameter for a forward, and its gradient flows to what "
    "was gathered: the forward must run inside the `with`, too."
)


def is_gathered(module: nn.Module) -> bool:
    """Return True if FSDP keeps the parameters of a module in shards, gathered for a forward."""
    managed = is_fsdp_managed(module)
    if managed:
        require("distributed")
    return managed


def gatherer(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at whose call FSDP gathers the parameters of the module at a path."""
    kind = loaded("fsdp", "FSDPModule")
    return next((module for module in around(model, path) if isinstance(module, kind)), None)


def watch_later(handler: Handler) -> None:
    """Prepare for the gradient of a parameter that is gathered, or made, at a call."""
    tensor = cast(Tensor, handler.target.tensor())
    if not is_lazy(tensor):
        watch_gathered(handler, tensor)
        handler.known_reason = NOT_GATHERED


def watch_gathered(handler: Handler, tensor: Tensor | None) -> None:
    """Watch the gradient of the parameter that a call uses, unless it is watched already.

    Autograd knows the gathered parameter only: a hook on the sharded one never fires. A lazy
    parameter, too, exists only at the first call.
    """
    if tensor is not None and not any(ref() is tensor for ref in handler.watched):
        handler.watched.append(weakref.ref(tensor))
        gradients.watch_tensor(handler, tensor)


def reshard(model: nn.Module, walked: list[NamedModule] | None = None) -> None:
    """Free gathered parameters, so that the sharded ones stand in the modules."""
    kind = loaded("fsdp", "FSDPModule")
    for _, module in (walked or walk(model)) if kind else ():
        if isinstance(module, kind):
            cast(Any, module).reshard()


def recovers(model: nn.Module) -> bool:
    """Return True if a forward of this model can be ended early without harm."""
    kind = loaded("fsdp", "FSDPModule")
    known = not kind or (recovers_fsdp(kind) and passes("early stop"))
    return known or not any(is_gathered(module) for _, module in walk(model))


def recover(trace: TracebackType | None) -> None:
    """Reset FSDP after a forward that was ended early: it would go on with wrong gradients.

    The modules that were running, also those around the model, are in the traceback.
    """
    kind = loaded("fsdp", "FSDPModule")
    for frame, _ in walk_tb(trace) if kind else ():
        module = frame.f_locals.get("self")
        if isinstance(module, kind):
            recover_fsdp(module)
