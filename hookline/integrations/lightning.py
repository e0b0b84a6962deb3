"""Watch and guard trainings with Lightning.

- `WatchCallback(every=50, to="run")`: `hookline.watch` for a `Trainer`
- `GuardCallback()`: `hookline.guard` for a `Trainer`

The callbacks place hooks when the training begins and remove them when it ends, also by an
exception. They only mark the steps: gradients come from hookline's own hooks, before they are
clipped.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, cast

from torch import nn

from hookline.engine.calls import RunningCall
from hookline.errors import NotHookable
from hookline.guards.guarding import guard
from hookline.integrations.optional_libraries import load
from hookline.integrations.training_callbacks import TrainingCallback
from hookline.selecting import select
from hookline.training.watching import watch

__all__ = ["GuardCallback", "WatchCallback"]


def _base() -> Any:
    """Return the base class of callbacks of the library that the program uses."""
    if "lightning" not in sys.modules and "pytorch_lightning" in sys.modules:
        return load("pytorch_lightning", "lightning").Callback
    return load("lightning.pytorch", "lightning").Callback


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


class _Callback(TrainingCallback, _base()):
    """The base of both callbacks: the hooks are removed when the training ends, or fails."""

    on_train_end = on_exception = teardown = TrainingCallback.remove


class WatchCallback(_Callback):
    """`hookline.watch` for Lightning: `Trainer(callbacks=[WatchCallback(every=50, to="run")])`.

    Args:
        options: those of `hookline.watch`: `where`, `every`, `to`, `kinds`, `ranks`.

    A step is a batch at which an optimizer steps; the first has the number `global_step` of the
    trainer, also if a training is continued. With several optimizers (manual optimization)
    `global_step` counts the steps of each, and so is ahead. The loss is logged as often as the
    trainer logs, under `global_step`. `callback.watch` is the watch, with `findings()` and `last`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watch: watch | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to watch."""
        self._step = trainer.global_step
        given = {"scaler": _scaler(trainer), "start": self._step} | self.options
        self.watch = self.attach(watch(pl_module, **given))

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark a step, if the optimizer has made one."""
        if self.watch is None or trainer.global_step == self._step:
            return
        loss: Any = cast(Any, outputs).get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and trainer.global_step % max(trainer.log_every_n_steps, 1) == 0:
            self.watch.log(self._step, loss=loss)
        self.watch.step()
        self._step = trainer.global_step


class GuardCallback(_Callback):
    """`hookline.guard` for Lightning: `Trainer(callbacks=[GuardCallback()])`.

    Args:
        options: those of `hookline.guard`: `ignore`, `to`, `careful`.

    A `training_step` calls the LightningModule itself, as `self(x)`, or modules in it, as
    `self.net(x)`: each such call is a step of the guard. Values that a `training_step` makes
    between such calls count as coming from outside. `callback.guard` is the guard.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guard: guard | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to guard."""
        given = {"scaler": _scaler(trainer)} | self.options
        self.guard = self.attach(_Guard(pl_module, **given))


class _Guard(guard):
    """A guard of a LightningModule, and of the modules that its steps call by themselves."""

    def _entries(self) -> list[nn.Module]:
        return _callable(self._model)

    def began(self, module: nn.Module, inputs: Any, call: RunningCall) -> None:
        # A strategy such as DDP's calls the LightningModule with a function in place of its
        # forward, which calls the step.
        if inspect.ismethod(module.forward):
            super().began(module, inputs, call)


def _callable(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a module that can be called, unlike a list of modules."""
    found: list[nn.Module] = []
    for child in module.children():
        try:
            select(child, "")
            found.append(child)
        except NotHookable:
            found += _callable(child)
    return found
