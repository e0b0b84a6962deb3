"""Watch a training: `watch(model, every=50, to="run")`.

- `watch`: measures every place at every so many steps, and finds what is wrong
- `Measured`: the measurements of one step
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import index
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hookline.engine.attaching import Anchored
from hookline.engine.context import reusable
from hookline.errors import PlaceError, RunError, warn_outside
from hookline.places.resolution import Where
from hookline.places.tree import unwrapped
from hookline.torch_private import backward_id
from hookline.training.diagnosis import Diagnosis
from hookline.training.distributed import current_rank, gather_ranks, world_size
from hookline.training.findings import Finding, Findings, overflowed
from hookline.training.grad_scalers import Scaler, check_scaler, is_scaler, scale_of
from hookline.training.optimizers import OptimizerLike, innermost
from hookline.training.run_files import BINS, ROW_KINDS
from hookline.training.step_measurement import MeasuredRows, StepMeasurement, at_end, weakly
from hookline.training.writers import Measured, Writer, writer_for

__all__ = ["Measured", "watch"]

_log = logging.getLogger("hookline.watch")
_SHOWN = 3  # findings of one kind at one step that are logged one by one


class watch(Anchored):
    """Measure every place while a model is trained, and find what is wrong with the training.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, every=10, optimizer=optimizer) as watching:
    ...     for _ in range(30):
    ...         loss = model(torch.randn(16, 4)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> watching.steps, watching.findings()
    (30, [])
    >>> watching.last.step, round(watching.last["1", "output"]["zeros"], 1)
    (20, 0.6)

    Args:
        model: any module, also one in DDP, FSDP2 or `torch.compile`.
        where: modules, with the parameters that they hold, or single parameters. The default is the
            whole model.
        every: measure at the steps 0, `every`, 2 × `every` …; in between there are no hooks.
        to: the destination: a directory (see `Run`), a file that ends in `.jsonl`, a function that
            takes a `Measured`, a writer such as those in `hookline.integrations`, or a list.
        optimizer: the optimizer whose steps are counted; for a wrapper such as accelerate's, which
            skips some, the steps of `optimizer.optimizer`. By default the first optimizer that
            steps a parameter of the model; `step()` counts by hand.
        scaler: the `GradScaler` of mixed precision. Gradients are measured without its scale, and
            overflows are left out, since the scaler skips those steps. The scaler of a wrapper
            (`optimizer.scaler`) need not be given.
        start: the number of the first step, if a training is continued.
        kinds: what is measured: one or some of `output`, `grad`, `weight`, `weight_grad` and
            `update`.
        ranks: `"own"` (rank 0 measures its part, the others nothing) or `"all"` (every rank
            measures, and the results are combined; every rank must watch).

    It acts inside `with`, or from `.attach()` to `.remove()`. It changes no mode, no gradient and
    no random number. Forwards without gradients of a model in evaluation mode are not measured,
    and recomputed calls are not measured twice. Within a step, outputs and their gradients are
    those of all micro-batches; the gradient of a parameter is the accumulated one, before it is
    clipped. `findings()` returns what is wrong; the logger `hookline.watch` logs each finding once.
    """

    _verb = "watch"
    _needs = ("core", "tools")

    def __init__(
        self,
        model: nn.Module,
        where: Where = "**",
        *,
        every: int = 50,
        to: Any = None,
        optimizer: OptimizerLike | None = None,
        scaler: Scaler | None = None,
        start: int = 0,
        kinds: str | Sequence[str] = ROW_KINDS,
        ranks: str = "own",
    ) -> None:
        whole = hasattr(every, "__index__") and hasattr(start, "__index__")
        if not whole or every < 1 or ranks not in ("own", "all"):
            raise PlaceError(
                f"watch was given every={every!r}, start={start!r} and ranks={ranks!r}.",
                "It measures at every so many steps, on one rank or on all.",
                "Give whole numbers, every= 1 or more, and ranks= 'own' or 'all'.",
            )
        every, start = index(every), index(start)  # numpy's own are nothing that JSON can hold
        self.steps = start  # steps that have ended, counted from `start`
        self.last: Measured | None = None
        inner = None if optimizer is None else innermost(optimizer)
        if scaler is None and is_scaler(getattr(optimizer, "scaler", None)):
            scaler = cast(Any, optimizer).scaler  # accelerate's optimizer has it
        check_scaler("watch", scaler)
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        self._wheres, self._every, self._to, self._kinds = (reusable(where),), every, to, kinds
        self._optimizer, self._scaler, self._ranks = inner, scaler, ranks
        self._begin = start
        self._writers: list[Writer] = []
        self._measurement: StepMeasurement | None = None
        self._hooks: list[Any] = []
        self._counted: Any = None
        self._by_hand = False
        self._diagnosis: Diagnosis | None = None
        self._found: list[Finding] = []
        super().__init__(model)
        _, self._inner = unwrapped("", model)  # places have the names that the user gave

    # -- entering and leaving -------------------------------------------------------------------

    def _runs_compiled(self) -> bool:
        return True  # between the steps that are measured; those run eagerly

    def _enter(self, attached: bool) -> None:
        super()._enter(attached)
        self._unseen = False  # what is compiled later runs eagerly in the steps that are measured

    def _start(self, attached: bool) -> None:
        self.steps, self.last, self._found = self._begin, None, []
        self._by_hand, self._counted = False, None
        plan = MeasuredRows(self._inner, self._wheres[0], self._kinds)
        self._plan, self._diagnosis = plan, Diagnosis(plan)
        self._silent = dict.fromkeys(plan.literal)
        bare = plan.without_data()
        if bare:
            shown = ", ".join(map(repr, bare[:6])) + ", …" * (len(bare) > 6)
            warn_outside(
                f"Neither the data nor the gradients of {shown} are measured: there is no data "
                "between calls, as accelerate offloads it. Keep what is trained in memory."
            )
        one = self._optimizer
        register = one.register_step_post_hook if one else register_optimizer_step_post_hook
        self._hooks.append(register(weakly(self._stepped)))
        self._measures = self._ranks == "all" or current_rank() == 0
        if current_rank() == 0:
            self._open_writers(plan)
        self._begin_step()

    def _open_writers(self, plan: MeasuredRows) -> None:
        given: list[Any] = [*self._to] if isinstance(self._to, (list, tuple)) else [self._to]
        options = {
            "every": self._every, "where": [repr(where)[:200] for where in self._wheres],
            "ranks": self._ranks, "world": world_size(), "scaled": self._scaler is not None,
        }  # fmt: skip
        for target in given:
            if target is not None:
                writer = writer_for(target)
                writer.start(plan.rows, type(self._inner).__name__, options)
                self._writers.append(writer)

    def _stop(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._measurement is not None:
            self._measurement.remove()
            self._measurement = None
        while self._writers:
            try:
                self._writers.pop().close()
            except RunError as error:
                _log.error("watch could not write all: %s", error)

    def _verify(self) -> None:
        if self.steps == self._begin:
            warn_outside(
                f"{self!r} saw no step: no optimizer has stepped a parameter of the model. Give "
                f"optimizer=, or call watching.step() at the end of each step."
            )
        elif self._silent and self.last is not None:
            shown = ", ".join(map(repr, self._silent))
            warn_outside(f"Nothing was measured at {shown}: hookline.capture says why.")

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> None:
        """End a step by hand; then steps of optimizers are not counted.

        >>> model = nn.Linear(2, 1)
        >>> with watch(model, every=1) as watching:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     watching.step()
        >>> watching.last.step
        0
        """
        first, self._by_hand = not self._by_hand, True
        if not first or self.steps == self._begin:  # else the optimizer has ended it already
            self._end_step()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step of an optimizer; the hook of its steps."""
        if self._by_hand:
            return
        if self._optimizer is None:
            known = None if self._counted is None else self._counted()
            if known is None:
                own = set(map(id, self._inner.parameters()))  # they may have been exchanged since
                if not any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
                    return
                self._counted = weakref.ref(optimizer)
            elif known is not optimizer:
                return
        if backward_id() == -1:
            self._end_step()
        else:  # the other parameters are yet to come, as with an optimizer for each of them
            at_end(self._end_step)

    def _begin_step(self) -> None:
        if self.steps % self._every == 0 and self._measures:
            scale = partial(scale_of, self._scaler)
            measurement = StepMeasurement(self._plan, self._counts, scale, self._alarm)
            self._measurement = measurement.attach()

    def _alarm(self, count: int, scale: float) -> None:
        self._note([overflowed(self.steps, count, scale)])

    def _end_step(self) -> None:
        measurement, self._measurement = self._measurement, None
        step, self.steps = self.steps, self.steps + 1
        if measurement is not None:
            measurement.finish()
            self._report(step, measurement)
        self._begin_step()

    def _counts(self) -> bool:
        """Return True if a running forward belongs to the training."""
        return self._inner.training or torch.is_grad_enabled()

    # -- what was found -------------------------------------------------------------------------

    def _report(self, step: int, measurement: StepMeasurement) -> None:
        if self._ranks == "all":
            gather_ranks(measurement)
        measured = Measured.of(step, time.time(), measurement, BINS)
        for row in list(measurement.found):
            self._silent.pop(measurement.plan.rows[row].place, None)
        self.last = measured
        if current_rank() != 0:
            return
        self._write("measured", measured)
        self._note(cast(Diagnosis, self._diagnosis).update(measured, measurement))

    def _note(self, found: list[Finding]) -> None:
        self._found += found
        for finding in found:
            self._write("finding", finding)
        for kind in dict.fromkeys(finding.kind for finding in found):
            alike = [finding for finding in found if finding.kind == kind]
            for finding in alike[:_SHOWN]:
                level = logging.ERROR if finding.severity == "error" else logging.WARNING
                _log.log(level, "%s", finding)
            if len(alike) > _SHOWN:
                _log.warning("and %d more places: watch.findings()", len(alike) - _SHOWN)

    def __repr__(self) -> str:
        own = vars(self)  # of one that was copied with its model: empty
        found = len(own.get("_found", ()))
        seen = f"{own.get('steps', 0)} steps, {found or 'no'} finding{'s' * (found != 1)}"
        return f"{super().__repr__()[:-1]}, {seen}>"

    def findings(self) -> list[Finding]:
        """Return the findings so far, in order, each once."""
        return Findings(self._found)

    def log(self, step: int | None = None, /, **scalars: float | torch.Tensor) -> None:
        """Log numbers such as the loss: `watching.log(loss=loss)` before the step ends.

        By default they belong to the step that has not ended yet. Before the watch begins and after
        it has ended, nothing is written.
        """
        for name, value in scalars.items():
            try:
                number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise RunError(
                    f"watch was asked to log {name!r}.",
                    f"It is a {type(value).__name__}{shape}, not one number.",
                    "Log one number for each name, as loss.mean() of a loss for each example.",
                ) from None
            self._write("scalar", self.steps if step is None else int(step), name, number)

    def _write(self, method: str, *content: Any) -> None:
        """Pass something to every writer; a full disk ends the writing, and not the training."""
        for writer in list(self._writers):  # of which only rank 0 has any
            try:
                getattr(writer, method)(*content)
            except RunError as error:
                _log.error("watch has stopped to write: %s", error)
                self._writers.remove(writer)
                with suppress(RunError):  # of what it has not written either
                    writer.close()
