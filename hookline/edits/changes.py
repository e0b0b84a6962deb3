"""What an edit does to a value: what all changes have in common.

A change meets one tensor, brings its own tensors to that tensor's dtype and device, broadcasts
them, and never changes the shape. The others are in `ready_changes.py`.

- `Change`: the base class; `apply(value, call)` is what a subclass defines
- `Chain`: several changes, one after the other, made by `|`
- `replace`: other values, which is also what a tensor means where a change is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hookline.core.taps import Call, Tap
from hookline.errors import ChangeError
from hookline.values.nested import Path, leaves, only_tensor, set_part, show_path
from hookline.values.shards import alike, beside, placements
from hookline.values.tables import describe

__all__ = ["Chain", "Change", "replace"]


_LIKE = "Keep the value's structure, shape, dtype, device, placement; hookline.hook checks nothing."


class Change:
    """What an edit does to a tensor."""

    def apply(self, value: Tensor, call: Call) -> Tensor:
        """The changed value; `value` itself is left alone."""
        raise AssertionError("a change defines apply")

    def bound_to(self, tap: Tap) -> Change:
        """The change at one place, asked for when an edit is entered.

        Raises if it cannot work there.
        """
        return self

    def __or__(self, other: Change) -> Chain:
        if not isinstance(other, Change):
            return NotImplemented
        both = [c.changes if isinstance(c, Chain) else (c,) for c in (self, other)]
        return Chain((*both[0], *both[1]))

    def meet(self, value: Any, call: Call) -> Any:
        """The value with its only tensor changed; an error if the result does not fit."""
        path, old = (), value
        if not isinstance(value, Tensor):
            path, old = only_tensor(value, call._tap.shown)
        if old.is_quantized:
            remedy = "Give a function that dequantises it, changes it and quantises it again."
            raise self._unfit(call, "The value is quantised.", remedy)
        try:
            new = alike(_cast(self.apply(old, call), old.dtype), old)
        except RuntimeError as error:
            if not _is_ragged(old):
                raise
            remedy = "Give a function that changes each of value.unbind()."
            raise self._unfit(call, "torch cannot do that to a nested tensor.", remedy) from error
        return set_part(value, path, self._fitting(old, new, call))

    def _fitting(self, value: Any, new: Any, call: Call) -> Any:
        """What was made of a value, if it is like the value in all that others rely on."""
        old, made = _kinds(value), _kinds(new)
        if old == made and (new is not None or value is None):
            return new
        if new is None:
            remedy = "Return the new value; to look only, use hookline.hook."
            raise self._unfit(call, "It returned None.", remedy)
        found = f"It was given a {type(value).__name__} and returned a {type(new).__name__}."
        for path in [path for path in old | made if old.get(path) != made.get(path)][:8]:
            was, now = _shown(value, path), _shown(new, path)
            found += f" {show_path(path) or 'It'} was {was}, now {now}."
        raise self._unfit(call, found)

    def _fit(self, own: Any, value: Tensor, call: Call) -> Any:
        """A change's own tensor, brought to the value's device, floating dtype and shape.

        A 1-D tensor is per channel: it lies along dimension 1 of values with four or more
        dimensions, else along the last one, or along the only one of the two that has its length.
        """
        floats = torch.can_cast(torch.float32, value.dtype)
        if own is None or (floats and isinstance(own, (int, float, complex))):
            return own
        if not isinstance(own, Tensor):  # an array, a list
            own = torch.as_tensor(own, device="cpu")  # the default device may hold no data
        # In a narrow dtype of whole numbers torch would let what is too large wrap around.
        wide = value.dtype if floats or value.dtype is torch.bool else torch.int64
        own = _cast(own, wide).to(value.device)
        # Autograd saves no tensor that was made in inference mode.
        own = own.clone() if own.is_inference() and torch.is_grad_enabled() else own
        image = value.ndim >= 4 or (value.ndim == 3 and value.shape[-1] != own.numel())
        if own.ndim == 1 and image and value.shape[1] == len(own):
            own = own.view(-1, *[1] * (value.ndim - 2))
        try:
            return beside(own, value).expand(value.shape)
        except RuntimeError:
            shapes = f"{tuple(own.shape)} does not broadcast to the value's, {tuple(value.shape)}"
            raise self._unfit(call, f"A tensor of shape {shapes}.") from None

    def _unfit(self, call: Call, found: str, remedy: str = _LIKE) -> ChangeError:
        asked = f"{getattr(self, 'name', type(self).__name__)} was applied at {str(call.place)!r}."
        return ChangeError(asked, found, remedy)


def _kinds(value: Any) -> dict[Path, Any]:
    return {path: (_size(t), t.dtype, t.device, placements(t)) for path, t in leaves(value)}


def _is_ragged(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided  # which has no shape


def _size(tensor: Tensor) -> Any:
    return cast(Any, tensor)._nested_tensor_size().tolist() if _is_ragged(tensor) else tensor.shape


def _shown(value: Any, path: Path) -> str:
    tensor = dict(leaves(value)).get(path)
    return "no tensor" if tensor is None else f"{describe(tensor)} on {tensor.device}"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype, or as it is if something would be cut off."""
    if getattr(tensor, "dtype", dtype) == dtype or not torch.can_cast(tensor.dtype, dtype):
        return tensor
    cast = tensor.to(dtype)
    exact = torch.can_cast(torch.float32, dtype) or torch.equal(cast.to(tensor.dtype), tensor)
    return cast if exact else tensor


@dataclass(frozen=True, eq=False)
class Chain(Change):
    """Several changes, one after the other; made by `|`.

    >>> replace(1.0) | replace(2.0)
    Chain(changes=(replace(values=1.0), replace(values=2.0)))
    """

    changes: tuple[Change, ...]

    def apply(self, value: Tensor, call: Call) -> Tensor:
        for change in self.changes:
            value = change.meet(value, call)
        return value

    def bound_to(self, tap: Tap) -> Change:
        return Chain(tuple(change.bound_to(tap) for change in self.changes))


@dataclass(frozen=True, eq=False)
class replace(Change):
    """Put other values in the value's place.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", replace(torch.tensor([1.0, 2.0]))):
    ...     model(torch.zeros(3, 2))
    tensor([[1., 2.],
            [1., 2.],
            [1., 2.]])

    The values broadcast. They keep their graph, so gradients flow into them, not into the model.
    """

    values: Tensor | float

    def apply(self, value: Tensor, call: Call) -> Tensor:
        # Python's own numbers have more digits than torch gives them.
        wide: dict[type, torch.dtype] = {float: torch.float64, complex: torch.complex128}
        own = self.values
        if not isinstance(own, Tensor):
            own = torch.as_tensor(own, dtype=wide.get(type(own)), device="cpu")
        return self._fit(own, value, call).clone()
