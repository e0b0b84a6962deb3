"""The scale of the loss in mixed precision, as gradient scalers know it.

- `Scaler`: the protocol of a scaler; `torch.amp.GradScaler` fits
- `check_scaler(verb, scaler)`: raise unless something is a scaler
- `is_scaler(scaler)`: True if something is a scaler
- `scale_of(scaler)`: the scale, or None without scaling
"""

from __future__ import annotations

from typing import Protocol

from hookline.errors import PlaceError

__all__ = ["Scaler", "check_scaler", "is_scaler", "scale_of"]


class Scaler(Protocol):
    """A scaler such as `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """Return the factor of the loss."""
        ...

    def is_enabled(self) -> bool:
        """Return True if the loss is multiplied at all."""
        ...


def check_scaler(verb: str, scaler: Scaler | None) -> None:
    """Raise PlaceError unless something is a scaler; an object that has one as an attribute is
    none.

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
    """Return True if something has the methods of a scaler."""
    return all(callable(getattr(scaler, name, None)) for name in ("get_scale", "is_enabled"))


def scale_of(scaler: Scaler | None) -> float | None:
    """Return the factor by which a scaler multiplies the loss now; None without scaling.

    >>> import torch
    >>> scale_of(torch.amp.GradScaler("cpu", init_scale=8.0)), scale_of(None)
    (8.0, None)
    """
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
