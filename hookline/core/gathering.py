"""Parameters that FSDP gathers for a forward, and frees again.

- `Gathered`: watches the gradient of a parameter on what is gathered for a forward
- `is_gathered(module)`, `gatherer(model, path)`: whether parameters are gathered, and where
- `reshard(model)`: put the shards in their places
- `recover(trace)`, `recovers(model)`: after a forward that was ended early, if torch can
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.core import gradients
from hookline.places.tree import Step, around, walk
from hookline.torch_checks import passes, require
from hookline.torch_private import is_fsdp_managed, recover_fsdp, recovers_fsdp
from hookline.values.sharding import loaded

if TYPE_CHECKING:
    from hookline.core.taps import Frame, Tap

__all__ = ["Gathered", "gatherer", "is_gathered", "recover", "recovers", "reshard"]

NOT_GATHERED = (
    "no gradient arrived. FSDP gathers the parameter for a forward, and its gradient flows to what "
    "was gathered: the forward must run inside the `with`, too."
)


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP keeps the parameters of a module in shards, and gathers them for a forward."""
    managed = is_fsdp_managed(module)
    if managed:
        require("distributed")
    return managed


def gatherer(model: nn.Module, path: str) -> nn.Module | None:
    """The module in a model at whose call FSDP gathers the parameters of the module at a path."""
    kind = loaded("fsdp", "FSDPModule")
    return next((module for module in around(model, path) if isinstance(module, kind)), None)


class Gathered:
    """Stands at the module that gathers a parameter, and watches the gradient of what it gathers.

    Autograd knows the gathered parameter only: a hook on the sharded one never fires. A lazy
    parameter, too, is there at the first call only.
    """

    chosen = None

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
    kind = loaded("fsdp", "FSDPModule")
    for _, module in (walked or walk(model)) if kind else ():
        if isinstance(module, kind):
            cast(Any, module).reshard()


def recovers(model: nn.Module) -> bool:
    """Whether a forward of this model can be ended early without harm."""
    kind = loaded("fsdp", "FSDPModule")
    known = not kind or (recovers_fsdp(kind) and passes("early stop"))
    return known or not any(is_gathered(module) for _, module in walk(model))


def recover(trace: TracebackType | None) -> None:
    """After a forward that was ended early: FSDP would go on from there, with wrong gradients.

    The modules that were running, also those around the model, are in the traceback.
    """
    kind = loaded("fsdp", "FSDPModule")
    while kind and trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next
        if isinstance(module, kind):
            recover_fsdp(module)
