"""The scaler of mixed precision: by what it multiplies the loss.

- `Scaler`: what is needed of one; `torch.amp.GradScaler` has it
- `check_scaler(verb, scaler)`: an error for what is none
- `is_scaler(scaler)`: whether something can say its scale
- `scale_of(scaler)`: the scale, or None where nothing is scaled
"""

from __future__ import annotations

from typing import Protocol

from hookline.errors import PlaceError

__all__ = ["Scaler", "check_scaler", "is_scaler", "scale_of"]


class Scaler(Protocol):
    """A scaler such as `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """By what the loss is multiplied."""
        ...

    def is_enabled(self) -> bool:
        """Whether it is multiplied at all."""
        ...


def check_scaler(verb: str, scaler: Scaler | None) -> None:
    """PlaceError for something else, such as what has a scaler as an attribute.

    >>> import torch
    >>> check_scaler("watch", torch.amp.GradScaler("cpu"))
    >>> check_scaler("watch", 2.0)
    Traceback (most recent call last):
    hookline.errors.PlaceError: watch was given scaler=2.0. It is a float, without the methods ...
    """
    if scaler is None or is_scaler(scaler):
        return
    name = next((n for n in ("scaler", "_scaler") if is_scaler(getattr(scaler, n, None))), None)
    raise PlaceError(
        f"{verb} was given scaler={scaler!r:.80}.",
        f"It is a {type(scaler).__name__}, without the methods get_scale and is_enabled.",
        "Give the torch.amp.GradScaler"
        + (f", which is its attribute {name}." if name else " of the training, or leave it out."),
    )


def is_scaler(scaler: object) -> bool:
    """Whether something can say its scale."""
    return all(callable(getattr(scaler, name, None)) for name in ("get_scale", "is_enabled"))


def scale_of(scaler: Scaler | None) -> float | None:
    """By what a scaler multiplies the loss now; None if it does not.

    >>> import torch
    >>> scale_of(torch.amp.GradScaler("cpu", init_scale=8.0)), scale_of(None)
    (8.0, None)
    """
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
