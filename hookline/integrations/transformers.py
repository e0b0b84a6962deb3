"""Watch and guard trainings with the Trainer of transformers.

- `WatchCallback(every=50, to="run")`: `hookline.watch` for a `Trainer`
- `GuardCallback()`: `hookline.guard` for a `Trainer`

The callbacks place hooks when the training begins and remove them when it ends. If it ends by an
exception, `hookline.attached(model).remove()` removes them. They only mark the steps: gradients
come from hookline's own hooks, since the Trainer shows its callbacks clipped gradients, or none.
"""

from __future__ import annotations

from typing import Any

from hookline.engine.lifecycle import is_open
from hookline.guards.guarding import guard
from hookline.integrations.optional_libraries import load
from hookline.integrations.training_callbacks import TrainingCallback
from hookline.training.watching import watch

__all__ = ["GuardCallback", "WatchCallback"]

_Base: Any = load("transformers", "transformers").TrainerCallback


def _scaler(kwargs: dict[str, Any]) -> Any:
    """Return the scaler of mixed precision, which accelerate's optimizer has."""
    return getattr(kwargs.get("optimizer"), "scaler", None)


class WatchCallback(TrainingCallback, _Base):
    """`hookline.watch` for a Trainer: `Trainer(..., callbacks=[WatchCallback(to="run")])`.

    Args:
        options: those of `hookline.watch`: `where`, `every`, `to`, `kinds`, `ranks`.

    Steps are the trainer's `global_step`, also if a training is continued. The numbers that the
    trainer logs (loss, learning rate …) are logged. `callback.watch` is the watch, with
    `findings()` and `last`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watch: watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        given = {"scaler": _scaler(kwargs), "start": state.global_step} | self.options
        self.watch = self.attach(watch(kwargs["model"], **given))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark a step."""
        if self.watch is not None:
            self.watch.step()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the numbers of the trainer, at the step that has just ended."""
        if self.watch is not None and is_open(self.watch):
            logs: dict[str, Any] = kwargs.get("logs") or {}
            numbers = {n: v for n, v in logs.items() if isinstance(v, (int, float))}
            self.watch.log(max(state.global_step - 1, 0), **numbers)

    on_train_end = TrainingCallback.remove


class GuardCallback(TrainingCallback, _Base):
    """`hookline.guard` for a Trainer: `Trainer(..., callbacks=[GuardCallback()])`.

    Args:
        options: those of `hookline.guard`: `ignore`, `to`, `careful`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.guard: guard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to guard."""
        given = {"scaler": _scaler(kwargs)} | self.options
        self.guard = self.attach(guard(kwargs["model"], **given))

    on_train_end = TrainingCallback.remove
