"""The `at=` of captures and edits: a slice of a tensor.

- `take(value, at)`: the slice
- `put(value, at, change)`: the same value with the slice changed
- `check_at(at, target)`: whether a slice makes sense at a place
- `Slice`: a slice whose index depends on the value
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from hookline.errors import ChangeError
from hookline.places.resolution import Target
from hookline.values.nested import only_tensor, set_part
from hookline.values.shards import alike, beside, layouts, whole

__all__ = ["Slice", "check_at", "put", "take"]

_REMEDY = "Give an index such as np.s_[:, -1], hookline.heads() or hookline.last_token()."


class Slice:
    """A slice whose index depends on the value; subclasses are ready to use (`ready_slices.py`)."""

    whole = True  # whether it is counted over the whole last dimension

    def index(self, value: Tensor) -> Any:
        """The index of the slice in a value."""
        raise AssertionError("a slice has an index")


def check_at(at: Any, target: Target) -> None:
    """Refuse what is no index, and a slice of a value that is only this rank's part.

    Slices are counted over the whole.
    """
    if isinstance(at, (str, bytes, float, dict)):
        raise TypeError(f"at={at!r} was asked for. It is no index. {_REMEDY}")
    for planned in layouts(target) if isinstance(at, Slice) and at.whole else ():
        if any(getattr(placement, "dim", 0) not in (0, 1) for placement in planned or ()):
            asked = f"{at!r} was asked for at {str(target.place)!r}."
            found = f"The value there is only this rank's part of it: {planned}."
            raise ChangeError(asked, found, "Give an index into that part, as np.s_[..., :64].")


def take(value: Any, at: Any) -> Any:
    """The slice of the only tensor in a value, or what a function makes of the value.

    >>> import torch
    >>> take(torch.arange(6).view(2, 3), (slice(None), -1))
    tensor([2, 5])
    """
    if callable(at):
        if Slice in getattr(at, "__mro__", ()):
            name = at.__name__
            remedy = f"Give one of its kind: {name}(...)."
            raise ChangeError(f"A slice at={name} was asked for.", "It is a class.", remedy)
        return at(value)
    _, tensor = only_tensor(value)
    return tensor[_index(tensor, at)]


def put(value: Any, at: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same value with the slice of its only tensor changed; the original is left alone.

    >>> import torch
    >>> put(torch.zeros(3), slice(1), lambda x: x + 5)
    tensor([5., 0., 0.])
    """
    if callable(at):
        found = "A function can only be read from, not written to."
        raise ChangeError(f"An edit was asked for at={at!r}.", found, _REMEDY)
    path, tensor = only_tensor(value)
    changed = whole(tensor).clone()
    index = _index(changed, at)
    changed[index] = change(changed[index].clone())
    return set_part(value, path, alike(changed, tensor))


def _index(tensor: Tensor, at: Any) -> Any:
    at = at.index(tensor) if isinstance(at, Slice) else at
    if type(tensor) is Tensor:
        return at
    steps = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    return tuple(beside(step, tensor) if isinstance(step, Tensor) else step for step in steps)
