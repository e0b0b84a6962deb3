"""Look at values: `capture(model, *where)` keeps them in a `Record`.

- `capture`: keep the values at places while a `with` block runs
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.captures.gradient_logs import GradInputLog, GradOutputLog
from hookline.captures.keeping import PLAIN, CaptureTap, Keep, Options
from hookline.captures.logs import LastLog, Log, OutputLog
from hookline.captures.record import Record
from hookline.engine.call_choice import Which, as_calls
from hookline.engine.fsdp import recover, recovers
from hookline.engine.hooking import Context
from hookline.engine.offloading import unload
from hookline.engine.slices import check_at
from hookline.errors import NeverFired, NotCaptured, UsageError
from hookline.places.resolution import Request, Target, Where, resolve
from hookline.torch_private import compiler_is_loaded, compiler_is_used
from hookline.values.conversions import as_device, as_dtype
from hookline.values.snapshots import duplicate

__all__ = ["capture"]

_NOTHING = cast(Any, MappingProxyType({}))
_LOGS = {"output": OutputLog, "grad_output": GradOutputLog, "grad_input": GradInputLog}


class _NoRecord(UsageError, AttributeError):
    """A capture was read as if it were its record."""


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
        at: an index such as `np.s_[:, -1]`, or a function of the value; only the slice is kept. An
            index that does not fit a value leaves the forward alone: the end of the `with` tells
            it if a place has nothing else, and reading that value does.
        transform: a function of the value (after `at`); what it returns is kept. Gradients of a
            nested value arrive one by one, and `at` and `transform` meet each tensor alone.
        detach: keep snapshots of values that require grad, too.
        device: where to keep tensors; one that is there, or "meta" to keep shapes only.
        dtype: how to keep floating-point tensors.
        stop: end the forward, and the rest of the `with` block, once every place has fired.
        keep: "all" calls, the "first" or the "last".
        calls: keep only these calls, as in `edit`: an int, a slice or a set of numbers, "prompt" or
            "generated"; `keep` chooses among them. Of the others nothing is kept, and the record
            has the calls under their own numbers: `record[place, 3]` after `calls={3}`. Each
            number of an int or a set must come. A call of which it cannot be told whether it is
            of the prompt or of generated tokens is named when the `with` ends, and on reading.
            Inputs are numbered by the start of the call, all else by its completion, a parameter's
            `:grad` by backward pass.
        threads: "own" sees the calls of the thread or task that entered; "all" sees every call.

    A value that requires grad is kept attached, the very tensor: it can be used in a loss and in
    `torch.autograd.grad`, and reading it raises `ValueChanged` if it was changed in place since
    (writes through `.data`, its storage or another library's alias are not seen; `detach=True`
    holds against all of them, but for a DLPack alias that was there before). Any other value is a
    snapshot. The model's results are bit for bit those without the capture.
    """

    _verb = "capture"
    _record: Record | None = None
    _logs: dict[str, Log] = _NOTHING  # by port
    _waiting = 0  # for stop=True: the places that have not fired so far
    _stopping = False

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
        calls: Which | None = None,
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
        device, dtype = as_device(device, "capture"), as_dtype(dtype, "capture")
        self._chosen = None if calls is None else as_calls(calls)
        super().__init__(model, where)
        self._owned = threads == "own"
        if at is transform is device is dtype is None and keep == "all" and not (detach or stop):
            self._options = PLAIN
        else:
            self._options = Options(at, transform, detach, device, dtype, keep, stop)

    _gives = _kept_as = "record"

    def __getattr__(self, name: str) -> Any:
        if hasattr(Record, name) and not name.startswith("_"):
            raise _NoRecord(*self._misused(f".{name} of"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def record(self) -> Record:
        """What was captured since the last entering."""
        if self._record is None:
            asked = "The record of a capture was asked for."
            remedy = "Use it in a `with` statement, or call .attach()."
            raise NotCaptured(asked, "It was never entered.", remedy)
        return self._record

    def _tap(self, target: Target, ref: weakref.ref[Context[Any]]) -> CaptureTap:
        check_at(self._options.at, target)
        tap = CaptureTap(target, ref, self._options)
        if self._chosen is not None:
            tap.choose(self._chosen)
        # Others may hold the address of parameters, buffers and the model's own arguments.
        if target.port == "value" or (target.module is self._model and "input" in target.port):
            tap.freeze = duplicate
        return tap

    def _resolve(self) -> list[Request]:
        requests = resolve(self._model, self._wheres)
        self._logs = {}
        self._mixed = self._find_mixed(requests)
        return requests

    def _runs_compiled(self) -> bool:
        plain = self._options.keep == "last" and self._mixed is _NOTHING
        in_graph = plain and compiler_is_loaded() and not compiler_is_used()
        for log in self._logs.values():
            log.in_graph = in_graph
        return in_graph

    def _find_mixed(self, requests: list[Request]) -> set[int] | None:
        """The modules of which more than whole values is asked for; None if options are."""
        options = self._options
        if options.derives or options.stop or options.keep == "first" or self._chosen:
            return None
        gradients = options.keep == "all" and self._owned and not self._attached
        ports = _LOGS if gradients else ("output",)
        mixed = {t.ident for asked in requests if not asked.whole(ports) for t in asked.targets}
        return mixed or _NOTHING

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
        log = self._logs.get(port)
        if log is None:
            kind = LastLog if self._options.keep == "last" else _LOGS[port]
            log = self._logs[port] = kind(ref, self._options, owner)
        log.hook(modules)

    def _prepared(self) -> None:
        self._stopping = False
        if self._options.stop:
            self._prepare_stop()
        logs = [*self._logs.values()]
        for log in logs:
            log.keeper = self if self._attached else None
            if len(logs) > 1:
                log.beside = Counter(i for one in logs for i in {id(m) for _, m in one.steps})
        self._record = Record(None, self, logs[0] if len(logs) == 1 and not self._taps else None)

    def _prepare_stop(self) -> None:
        self._waiting = len(self._taps)
        if self._attached:
            raise ValueError(
                "stop=True was asked for together with attach(). Every forward would end early. "
                "Use it in a `with` statement."
            )
        if any("grad" in tap.target.port for tap in self._taps.values()):
            raise ValueError(
                "stop=True was asked for at a gradient place. Gradients come after the forward. "
                "Leave out stop, or the gradient places."
            )
        if not recovers(self._model):
            raise ValueError(
                "stop=True was asked for at a model that FSDP shards. This torch cannot go on "
                "after a forward that ended early; torch 2.13 can. Leave out stop."
            )

    def _listed(self) -> list[CaptureTap]:
        """All taps, in the order in which they were asked for; those of logs are made now."""
        taps = [tap for log in self._logs.values() for tap in log.all_taps()]
        found = {**self._taps, **{tap.target.key: tap for tap in taps}}
        keys = [target.key for request in self._requests for target in request.targets]
        return [found[key] for key in dict.fromkeys(keys)]

    if TYPE_CHECKING:

        def __enter__(self) -> Record: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def _result(self) -> Record | None:
        return self._record

    def arrived(self) -> None:
        """One more place has fired for the first time; after the last one the forward ends."""
        self._waiting -= 1
        if self._waiting == 0:
            self._stopping = True
            raise _Stop(self._serial)

    def _fired(self, tap: CaptureTap) -> bool:
        port = tap.target.port  # what has no gradient tells it on read
        if tap.lacking or tap.untold:
            return False
        return tap.holds or port == "grad" or ("grad" in port and self._site_of(tap).count > 0)

    def _failed(self, error: BaseException, trace: Any) -> bool | None:
        if isinstance(error, _Stop) and error.serial == self._serial:
            recover(trace)
            unload(trace)
            return True
        return super()._failed(error, trace)

    def _verify(self) -> None:
        one = len(self._requests) == 1 and not self._requests[0].literal
        if not (self._taps or any(log.silent(one) for log in self._logs.values())):
            return
        try:
            if self._stopping:
                raise NeverFired(
                    "The forward was to end early (stop=True).",
                    "Something in the model caught the stop and went on, probably a bare "
                    "`except:`.",
                    "Leave out stop=True; what was captured is in the record.",
                )
            self._taps = {tap.target.key: tap for tap in self.record._taps}
            super()._verify()
        except NeverFired as missing:
            missing.record = self._record
            raise

    def _stop(self) -> None:
        for log in self._logs.values():
            log.unhook()
            log.keeper = None
        super()._stop()
        if self._record is not None:
            self._record._seal(self)
