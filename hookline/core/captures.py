"""Look at values: `capture(model, *where)` keeps them in a `Record`.

- `capture`: keep the values at places while a `with` block runs
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.core import compiling
from hookline.core.distributed import recover, recovers
from hookline.core.hooks import Context
from hookline.core.keeping import PLAIN, CaptureTap, Keep, Options
from hookline.core.places import Request, Target, Where
from hookline.core.quick_taps import CLOSED, QUICK, Common, LastTap, QuickTap, tap_all
from hookline.core.records import Record
from hookline.core.slices import check_at
from hookline.core.snapshots import duplicate
from hookline.errors import NeverFired, NotCaptured

__all__ = ["capture"]

_NOTHING = cast(Any, MappingProxyType({}))


class _Stop(BaseException):
    """Ends a forward early. Not an Exception: a model's own `except Exception` lets it by."""

    def __init__(self, serial: int) -> None:
        super().__init__("hookline has what was asked for and ends the forward here")
        self.serial = serial


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
    _commons: dict[str, Common] = _NOTHING  # by port
    _quick: list[QuickTap] = _NOTHING

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
        self._commons, self._quick = {}, []
        self._mixed = self._find_mixed(requests)
        return requests

    def _runs_compiled(self) -> bool:
        plain = self._options.keep == "last" and self._mixed == set()
        in_graph = plain and compiling.loaded() and compiling.untouched()
        for common in self._commons.values():
            common.in_graph = in_graph
        return in_graph

    def _find_mixed(self, requests: list[Request]) -> set[int] | None:
        """The modules of which more than whole values is asked for; None if options are."""
        options = self._options
        if options.derives or options.stop or options.keep == "first":
            return None
        gradients = options.keep == "all" and self._owned and not self._attached
        ports = QUICK if gradients else ("output",)
        return {t.ident for asked in requests if not asked.whole(ports) for t in asked.targets}

    def _place_all(self, request: Request, ref: weakref.ref[Any], owner: int | None) -> None:
        mixed, modules = self._mixed, request.modules
        if mixed:
            modules = [step for step in modules if id(step[1]) not in mixed]
        if mixed is None or not modules:
            super()._place_all(request, ref, owner)
            return
        for target in request.targets if mixed else ():
            if target.ident in mixed and target.key not in self._taps:
                self._place(target, ref, owner)
        port = request.port or "output"
        common = self._commons.get(port) or Common(ref, self._options, owner)
        self._commons[port] = common
        kind = LastTap if self._options.keep == "last" else QUICK[port]
        tap_all(kind, modules, common, self._quick)

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
        if len(self._commons) > 1:
            counts = Counter(tap.ident for tap in self._quick)
            for tap in self._quick:
                tap.beside = counts[tap.ident]
        for tap in self._quick if self._attached else ():
            tap.keeper = self
        taps = [*self._taps.values(), *self._quick]
        if self._taps and self._quick:  # in the order in which they were asked for
            found = {tap.target.key: tap for tap in taps}
            keys = [target.key for request in self._requests for target in request.targets]
            taps = [found[key] for key in dict.fromkeys(keys)]
        self._record = Record(taps, self)

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
        for tap in self.record._taps:
            if not (tap.kept or tap.grads):
                self._taps.update((quick.target.key, quick) for quick in self._quick)
                super()._verify()
                return

    def _stop(self) -> None:
        for common in self._commons.values():
            common.owner = CLOSED  # torch may still be about to call a hook
        for tap in self._quick:
            if tap.module is not None:
                tap.unregister(tap.module)
                if self._attached:
                    tap.keeper = None
        super()._stop()
        if self._record is not None:
            self._record._seal()
