"""The `at=` of captures and edits: a slice of a tensor.

- `take(value, at)`: the slice
- `put(value, at, change)`: the same value with the slice changed
- `check_at(at, targets)`: an error unless a slice makes sense at places
- `spelled(at)`: a slice as text
- `Slice`: a slice whose index depends on the value
- `Misfit`: the error of a slice that does not fit a value, raised where the place is not known
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from hookline.errors import ChangeError
from hookline.places.resolution import Target
from hookline.values.nested import only_tensor, set_part
from hookline.values.sharding import (
    beside,
    has_plans,
    layouts,
    placed_like,
    placements,
    replicated,
)
from hookline.values.tables import describe

__all__ = ["FUNCTION", "Misfit", "Slice", "check_at", "put", "spelled", "take"]

_REMEDY = "Give an index such as np.s_[:, -1], hookline.heads() or hookline.last_token()."
_OTHER_INDEX = "Use integers and slices, such as np.s_[:, -1], or torch 2.13 or newer."
FUNCTION = "a function"  # how each function is spelled


class Slice:
    """A slice whose index depends on the value; subclasses are ready to use (`ready_slices.py`)."""

    needs_full_last_dim = True  # whether it is counted over the whole last dimension

    def index(self, value: Tensor) -> Any:
        """Return the index of the slice in a value."""
        raise AssertionError("a slice has an index")

    def spelled(self) -> str:
        """Return the slice as text; equal slices have the same text."""
        return repr(self)


class Misfit(ChangeError):
    """A slice does not fit a value; `at_place` gives the public error, which names the place."""

    def at_place(self, place: str, verb: str) -> ChangeError:
        """Return the error that says at which place the slice was to be changed, or measured."""
        asked = f"A slice of the value at {place!r} was to be {verb}:"
        return ChangeError(asked, self.found, self.remedy)


def check_at(at: Any, targets: Callable[[], Iterable[Target]]) -> None:
    """Raise an error unless `at` can be an index, and is one at these places.

    Slices count over the whole value: one of a value that is only this rank's part is refused.
    """
    if isinstance(at, (str, bytes, float, dict)):
        raise TypeError(f"at={at!r} was asked for. It is no index. {_REMEDY}")
    _refuse_class(at)
    if not (isinstance(at, Slice) and at.needs_full_last_dim and has_plans()):
        return
    for target in targets():
        for planned in layouts(target):
            if any(getattr(placement, "dim", 0) not in (0, 1) for placement in planned or ()):
                asked = f"{at!r} was asked for at {str(target.place)!r}."
                found = f"The value there is only this rank's part of it: {planned}."
                remedy = "Give an index into that part, as np.s_[..., :64]."
                raise ChangeError(asked, found, remedy)


def _refuse_class(at: Any) -> None:
    if Slice in getattr(at, "__mro__", ()):
        remedy = f"Give one of its kind: {at.__name__}(...)."
        raise ChangeError(f"A slice at={at.__name__} was asked for.", "It is a class.", remedy)


def spelled(at: Any) -> str:
    """Return a slice as text, as it stands between square brackets; equal ones have the same.

    >>> spelled((slice(None), -1)), spelled([0, 2]), spelled(lambda value: value)
    (':, -1', '[0, 2]', 'a function')
    """
    if isinstance(at, Slice):
        return at.spelled()
    if isinstance(at, tuple):
        return ", ".join(map(spelled, cast("tuple[Any, ...]", at))) or "()"
    if isinstance(at, slice):
        own = cast("Any", at)
        steps: list[Any] = [own.start, own.stop, *([] if own.step is None else [own.step])]
        return ":".join("" if step is None else str(index(step)) for step in steps)
    if at is Ellipsis:
        return "..."
    if callable(at):
        return FUNCTION
    if hasattr(at, "tolist"):  # a tensor or an array
        at = at.tolist()
    whole = isinstance(at, SupportsIndex) and not isinstance(at, bool)
    return str(index(at)) if whole else repr(at)


def take(value: Any, at: Any) -> Any:
    """Return the slice of the only tensor in a value, or what a function makes of the value.

    >>> import torch
    >>> take(torch.arange(6).view(2, 3), (slice(None), -1))
    tensor([2, 5])
    """
    if callable(at):
        _refuse_class(at)
        return at(value)
    _, tensor = only_tensor(value)
    return _find(tensor, at)[1]


def put(value: Any, at: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with the slice of its only tensor changed; the original is left alone.

    >>> import torch
    >>> put(torch.zeros(3), slice(1), lambda x: x + 5)
    tensor([5., 0., 0.])
    """
    if callable(at):
        found = "A function can only be read from, not written to."
        raise ChangeError(f"An edit was asked for at={at!r}.", found, _REMEDY)
    path, tensor = only_tensor(value)
    changed = replicated(tensor).clone()
    where, piece = _find(changed, at)
    new = change(piece.clone())
    try:
        changed[where] = new
    except (RuntimeError, NotImplementedError) as error:
        if placements(changed) is None:
            raise
        found = f"It is a DTensor, and torch {torch.__version__} cannot write to these indices."
        raise ChangeError(f"An edit was asked for at={at!r}.", found, _OTHER_INDEX) from error
    return set_part(value, path, placed_like(changed, tensor))


def _find(tensor: Tensor, at: Any) -> tuple[Any, Tensor]:
    """Return the index of a slice in a tensor, and what is there; Misfit if it does not fit."""
    try:
        where = _index(tensor, at)
        return where, tensor[where]
    except torch.OutOfMemoryError:
        raise
    except ChangeError as error:  # a Slice says itself what is wrong
        cause, found, remedy = error, error.found, error.remedy
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        cause, found = error, f"The value is {describe(tensor)}: {str(error).splitlines()[0]:.200}."
        remedy = "Give an index that fits every value there, such as np.s_[:, -1]."
    shown = repr(at) if isinstance(at, Slice) else f"[{spelled(at)}]"
    found = f"at={shown:.80} does not fit. {found}"
    raise Misfit("A slice was asked for:", found, remedy) from cause


def _index(tensor: Tensor, at: Any) -> Any:
    at = at.index(tensor) if isinstance(at, Slice) else at
    if type(tensor) is Tensor:
        return at
    steps = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    return tuple(beside(step, tensor) if isinstance(step, Tensor) else step for step in steps)
