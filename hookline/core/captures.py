"""Look at values: `capture(model, *where)` keeps them in a `Record`.

- `capture`: keep the values at places while a `with` block runs
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.core import compiling
from hookline.core.distributed import recover, recovers
from hookline.core.hooks import Context
from hookline.core.keeping import PLAIN, CaptureTap, Keep, Kept, Options
from hookline.core.places import Request, Target, Where
from hookline.core.recomputation import in_backward
from hookline.core.records import Record
from hookline.core.sites import ACTIVE, KEYS, Site
from hookline.core.slices import check_at
from hookline.core.snapshots import LAZY, duplicate, snapshot
from hookline.errors import NeverFired, NotCaptured

__all__ = ["capture"]


class _Stop(BaseException):
    """Ends a forward early. Not an Exception: a model's own `except Exception` lets it by."""

    def __init__(self, serial: int) -> None:
        super().__init__("hookline has what was asked for and ends the forward here")
        self.serial = serial


class _Common:
    """What the taps of one capture have in common, kept once so that making them is cheap."""

    __slots__ = ("closed", "context", "detach", "in_graph", "key", "options", "owner")

    def __init__(self, context: weakref.ref[Any], options: Options, owner: int | None) -> None:
        self.context = context
        self.options = options
        self.owner = owner
        self.detach = options.detach
        self.in_graph = False  # whether compiled graphs may keep values by themselves
        self.key = next(KEYS)
        self.closed = False


class _OutputTap(CaptureTap, Site):
    """The commonest tap: the whole output of a module, kept as it is. It is its own site."""

    common: _Common = cast(_Common, None)  # in a copied module

    def __init__(self, target: Target, common: _Common) -> None:
        self.target = target
        self.module = target.module
        self.common = common
        self.kept = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.common, name)

    def unregister(self, module: nn.Module) -> None:
        module._forward_hooks.pop(self.key, None)

    def after_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        common = self.common
        if module is not self.module or (
            common.owner is not None and common.owner not in ACTIVE.get()
        ):
            return self.stranger(module)
        if common.closed:
            return None
        if in_backward() == -1:
            self.outside = True
        elif self.outside:
            return None  # recomputed
        if type(output) is not Tensor:
            self.kept.append(common.options.keeps(output))
            return None
        try:
            if output.requires_grad:
                if not common.detach:
                    self.kept.append((output, output._version))
                    return None
            elif (  # the commonest snapshot, without a call: see snapshots.py
                LAZY
                and output.is_cpu
                and not output.is_quantized
                and output.untyped_storage().resizable()
                and output._use_count() == 1  # pyright: ignore - not in torch's stubs
            ):
                self.kept.append((output._lazy_clone(), None))
                return None
        except RuntimeError:  # no version (inference mode) or no storage (sparse, nested, vmap)
            pass
        self.kept.append((snapshot(output), None))
        return None


class _LastTap(_OutputTap):
    """The same for the last call only, in a way that torch.compile takes into its graphs."""

    slot: Tensor | None = None  # the value of the last compiled call, if no other came since

    @property
    def kept(self) -> list[Kept]:
        return self._kept if self.slot is None else [(self.slot, None)]

    @kept.setter
    def kept(self, kept: list[Kept]) -> None:
        self._kept = kept

    def after_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # In a graph no version can be read and no copy-on-write made, but a copy costs little.
        if torch.compiler.is_compiling() and self.common.in_graph and type(output) is Tensor:
            self.slot = output.detach().clone() if self.common.detach else output.clone()
            return
        self.slot = None
        super().after_output(module, args, output)
        del self._kept[:-1]


class capture(Context[CaptureTap]):
    """Keep the values at places while a `with` block runs.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with capture(model, "0", "1:input") as record:
    ...     _ = model(torch.zeros(5, 2))
    >>> record["0"].shape
    torch.Size([5, 3])
    >>> torch.equal(record["0"], record["1:input"])
    True

    Args:
        model: any module, or a plain tensor with the place ":grad".
        where: places, or anything else that `select` takes.
        at: an index such as `np.s_[:, -1]`, or a function of the value; only the slice is kept.
        transform: a function of the value (after `at`); what it returns is kept.
        detach: keep snapshots of values that require grad, too.
        device: where to keep tensors.
        dtype: how to keep floating-point tensors.
        stop: end the forward, and the rest of the `with` block, once every place has fired.
        keep: "all" calls, the "first" or the "last".
        threads: "own" sees the calls of the thread or task that entered; "all" sees every call.

    A value that requires grad is kept attached, the very tensor: it can be used in a loss and in
    `torch.autograd.grad`, and reading it raises `ValueChanged` if it was changed in place since
    (writes through `.data`, its storage or another library's alias are not seen; `detach=True`
    holds against all of them). Any other value is a snapshot. The model's results are bit for bit
    those without the capture.
    """

    _verb = "capture"
    _record: Record | None = None
    _commons: Sequence[_Common] = ()

    def __init__(
        self,
        model: nn.Module | Tensor,
        *where: Where,
        at: Any = None,
        transform: Callable[[Any], Any] | None = None,
        detach: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        stop: bool = False,
        keep: Keep = "all",
        threads: Literal["own", "all"] = "own",
    ) -> None:
        if not where:
            raise TypeError(
                "capture was given no place. Nothing would be captured. Name places after the "
                "model, such as '**' for every module."
            )
        if keep not in ("all", "first", "last"):
            raise ValueError(f"keep={keep!r} was asked for. It is 'all', 'first' or 'last'.")
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r} was asked for. It is 'own' or 'all'.")
        super().__init__(model, where)
        self._owned = threads == "own"
        self._options = Options(at, transform, detach, device, dtype, keep, stop)
        self._waiting = 0
        self._stopping = False

    @property
    def record(self) -> Record:
        """What was captured since the last entering."""
        if self._record is None:
            raise NotCaptured(
                "The record of a capture was asked for.",
                "It was never entered.",
                "Use it in a `with` statement, or call .attach().",
            )
        return self._record

    def attach(self) -> capture:
        """Capture from now on, until `remove()`; `record` holds what came so far."""
        if getattr(self, "_options", PLAIN).stop:
            self._entered = True
            raise ValueError(
                "stop=True was asked for together with attach(). Every forward would end early. "
                "Use it in a `with` statement."
            )
        return super().attach()

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> CaptureTap:
        check_at(self._options.at, target)
        tap = CaptureTap(target, ref, self._options)
        # Others may hold the address of parameters, buffers and the model's own arguments.
        if target.port == "value" or (target.module is self._model and "input" in target.port):
            tap.freeze = duplicate
        return tap

    def _resolve(self) -> list[Request]:
        requests = super()._resolve()
        self._commons = ()
        self._mixed = self._find_mixed(requests)
        return requests

    def _runs_compiled(self) -> bool:
        plain = self._options.keep == "last" and self._mixed == set()
        in_graph = plain and compiling.loaded() and compiling.untouched()
        for common in self._commons:
            common.in_graph = in_graph
        return in_graph

    def _find_mixed(self, requests: list[Request]) -> set[int] | None:
        """The modules of which more than the whole output is asked for; None if options are."""
        options = self._options
        if options.derives or options.stop or options.keep == "first":
            return None
        return {
            target.ident
            for request in requests
            for target in request.targets
            if target.port != "output" or target.parts or target.operation
        }

    def _place_all(self, targets: list[Target], ref: weakref.ref[Any], owner: int | None) -> None:
        mixed = self._mixed
        if mixed is None or (mixed and not mixed.isdisjoint(t.ident for t in targets)):
            super()._place_all(targets, ref, owner)
            return
        common = _Common(ref, self._options, owner)
        self._commons = (*self._commons, common)
        taps, key = self._taps, common.key
        kind = _LastTap if self._options.keep == "last" else _OutputTap
        for target in targets:
            if target.key not in taps:
                tap = taps[target.key] = kind(target, common)
                target.module._forward_hooks[key] = tap.after_output
                if self._attached:
                    tap.keeper = self

    def _prepared(self) -> None:
        self._stopping = False
        self._waiting = len(self._taps) if self._options.stop else 0
        if self._options.stop and any("grad" in tap.target.port for tap in self._taps.values()):
            raise ValueError(
                "stop=True was asked for at a gradient place. Gradients come after the forward. "
                "Leave out stop, or the gradient places."
            )
        if self._options.stop and not recovers(self._model):
            raise ValueError(
                "stop=True was asked for at a model that FSDP shards. This torch cannot go on "
                "after a forward that ended early. Leave out stop."
            )
        self._record = Record(list(self._taps.values()), self)

    def _result(self) -> Record:
        return self.record

    def arrived(self) -> None:
        """One more place has fired for the first time; after the last one the forward ends."""
        self._waiting -= 1
        if self._waiting == 0:
            self._stopping = True
            raise _Stop(self._serial)

    def _fired(self, tap: CaptureTap) -> bool:
        if tap.kept or tap.grads:
            return True
        if tap.target.port == "grad":
            return True  # told on read
        return "grad" in tap.target.port and self._site_of(tap).count > 0

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        stopped = isinstance(error, _Stop) and error.serial == self._serial
        try:
            super().__exit__(kind, error, trace)
        except NeverFired as missing:
            missing.record = self._record
            raise
        if stopped:
            recover(trace)
        return True if stopped else None

    def _verify(self) -> None:
        if self._stopping:
            raise NeverFired(
                "The forward was to end early (stop=True).",
                "Something in the model caught the stop and went on, probably a bare `except:`.",
                "Leave out stop=True; what was captured is in the record.",
            )
        for tap in self._taps.values():
            if not tap.kept:
                super()._verify()
                return

    def _stop(self) -> None:
        for common in self._commons:
            common.closed = True
        for tap in self._taps.values() if self._commons else ():
            if isinstance(tap, _OutputTap) and tap.module is not None:
                tap.module._forward_hooks.pop(tap.common.key, None)
                tap.keeper = None
        super()._stop()
        if self._record is not None:
            self._record._seal()
