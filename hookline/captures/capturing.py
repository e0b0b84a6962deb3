"""Look at values: `capture(model, *where)` keeps them in a `Record`.

- `capture`: keep the values at places while a `with` block runs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hookline.captures.keeping import CaptureAsk, Options
from hookline.captures.record import Record
from hookline.engine.asks import Ask
from hookline.engine.call_choice import Which, as_calls
from hookline.engine.context import Context
from hookline.engine.events import Keep, StopForward
from hookline.engine.fsdp import recover, recovers
from hookline.engine.offloading import unload
from hookline.engine.slices import check_at
from hookline.errors import NeverFired, NotCaptured, UsageError
from hookline.places.grammar import is_gradient
from hookline.places.resolution import Where
from hookline.torch_private import compiler_is_loaded, compiler_is_used
from hookline.values.conversions import as_device, as_dtype

__all__ = ["capture"]


class _NoRecord(UsageError, AttributeError):
    """A capture was read as if it were its record."""


class capture(Context):
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
            index that fits no value at a place is an error when the `with` ends; one that does not
            fit a single value is an error when that value is read. The forward goes on.
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
            number of an int or a set must come. A call that cannot be assigned to the prompt or to
            generated tokens raises when the `with` ends, and when it is read. Inputs are numbered
            by the start of the call, all else by its completion, a parameter's `:grad` by backward
            pass.
        threads: "own" sees the calls of the thread or task that entered; "all" sees every call.

    A value that requires grad is kept attached, the very tensor: it can be used in a loss and in
    `torch.autograd.grad`, and reading it raises `ValueChanged` if it was changed in place since
    (writes through `.data`, its storage or another library's alias are not seen; `detach=True`
    holds against all of them, but for a DLPack alias that was there before). Any other value is a
    snapshot. The model's results are bit for bit those without the capture.
    """

    _verb = "capture"
    _gives = _kept_as = "record"
    _record: Record | None = None
    _in_graph = False  # whether compiled graphs keep values by themselves

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
        self._owned, self._keep = threads == "own", keep
        self._options = Options(at, transform, detach, device, dtype, keep)
        self._ends_early = stop

    def __getattr__(self, name: str) -> Any:
        if hasattr(Record, name) and not name.startswith("_"):
            raise _NoRecord(*self._misused(f".{name} of"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def record(self) -> Record:
        """The values captured since the capture was last entered."""
        if self._record is None:
            asked = "The record of a capture was asked for."
            remedy = "Use it in a `with` statement, or call .attach()."
            raise NotCaptured(asked, "It was never entered.", remedy)
        return self._record

    def _ask(self, port: str, **place: Any) -> Ask:
        return CaptureAsk(port, self._options, calls=self._chosen, **place)

    def _prepared(self) -> None:
        tracer, options = self._tracer, self._options
        if options.at is not None:
            check_at(options.at, tracer.places.targets)
        if self._ends_early:
            self._check_stop()
            tracer.waiting = set(tracer.places)
        plain = options.keep == "last" and tracer.looks_at_outputs and not options.derives
        self._in_graph = plain and compiler_is_loaded() and not compiler_is_used()
        if self._in_graph:
            tracer.keep_in_graphs(options.detach)
        self._record = self._new_record()

    def _new_record(self) -> Record:
        refused = [request.refused for request in self._requests]
        return Record(self._tracer, refused={k: v for one in refused for k, v in one.items()})

    def _runs_compiled(self) -> bool:
        return self._in_graph

    def _check_stop(self) -> None:
        """Raise an error if the forward cannot be ended early."""
        if self._attached:
            raise ValueError(
                "stop=True was asked for together with attach(). Every forward would end early. "
                "Use it in a `with` statement."
            )
        if any(is_gradient(ask.port) for _, ask in self._tracer.places):
            raise ValueError(
                "stop=True was asked for at a gradient place. Gradients come after the forward. "
                "Leave out stop, or the gradient places."
            )
        if not recovers(self._model):
            raise ValueError(
                "stop=True was asked for at a model that FSDP shards. This torch cannot go on "
                "after a forward that ended early; torch 2.13 can. Leave out stop."
            )

    if TYPE_CHECKING:

        def __enter__(self) -> Record: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def _result(self) -> Record | None:
        return self._record

    def _failed(self, error: BaseException, trace: Any) -> bool | None:
        if isinstance(error, StopForward) and error.key == self._tracer.key:
            recover(trace)
            unload(trace)
            return True
        return super()._failed(error, trace)

    def _verify(self) -> None:
        tracer = self._tracer
        try:
            if tracer.stopped:
                raise NeverFired(
                    "The forward was to end early (stop=True).",
                    "Something in the model caught the stop and went on, probably a bare "
                    "`except:`.",
                    "Leave out stop=True; what was captured is in the record.",
                )
            super()._verify()
        except NeverFired as missing:
            missing.record = self._record
            raise

    def _stop(self) -> None:
        super()._stop()
        if self._record is not None:
            self._record.seal()
