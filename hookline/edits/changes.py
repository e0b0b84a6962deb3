"""Changes: what an edit does to a value.

A change applies to one tensor. It brings its own tensors to that tensor's dtype and device,
broadcasts them as torch does, and never changes the shape.

- `Change`: the base class; `apply(value, call)` is what a subclass defines
- `Broadcasting`: a change with tensors of its own
- `Chain`: several changes, one after the other, made by `|`
- `replace`: other values, which is also what a tensor means where a change is taken

The other changes are in `ready_changes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from hookline.engine.calls import Call
from hookline.engine.handlers import Handler
from hookline.errors import ChangeError
from hookline.torch_private import nested_sizes
from hookline.values.nested import Path, leaves, only_tensor, set_part, show_path
from hookline.values.sharding import beside, placed_like, placements
from hookline.values.tables import describe

__all__ = ["Broadcasting", "Chain", "Change", "replace"]


_LIKE = "Keep the value's structure, shape, dtype, device, placement; hookline.hook checks nothing."


class Change:
    """A change of a tensor, for `edit`. A subclass defines `apply`."""

    binds = False  # True if it depends on the place: then `bound_to` is called on entering

    def apply(self, value: Tensor, call: Call) -> Tensor:
        """Return the changed value; leave `value` itself alone."""
        raise AssertionError("a change defines apply")

    def bound_to(self, handler: Handler) -> Change:
        """Return the change for one place; raise an error if it cannot work there."""
        return self

    def __or__(self, other: Change) -> Chain:
        if not isinstance(other, Change):
            return NotImplemented
        both = [c.changes if isinstance(c, Chain) else (c,) for c in (self, other)]
        return Chain((*both[0], *both[1]))

    def apply_checked(self, value: Any, call: Call) -> Any:
        """Return the value with its only tensor changed; raise ChangeError if it does not fit."""
        path, old = (), value
        if not isinstance(value, Tensor):
            path, old = only_tensor(value, lambda: f"The value at {str(call.place)!r}")
        if old.is_quantized:
            remedy = "Give a function that dequantises it, changes it and quantises it again."
            raise self._error(call, "The value is quantised.", remedy)
        try:
            new = placed_like(_cast(self.apply(old, call), old.dtype), old)
        except RuntimeError as error:
            if not _is_ragged(old):
                raise
            remedy = "Give a function that changes each of value.unbind()."
            raise self._error(call, "torch cannot do that to a nested tensor.", remedy) from error
        return set_part(value, path, self._check_result(old, new, call))

    def _check_result(self, value: Any, new: Any, call: Call) -> Any:
        """Return a new value; raise ChangeError if it differs from the old one in shape or kind."""
        old, made = _kinds(value), _kinds(new)
        if old == made and (new is not None or value is None):
            return new
        if new is None:
            remedy = "Return the new value; to look only, use hookline.hook."
            raise self._error(call, "It returned None.", remedy)
        found = f"It was given a {type(value).__name__} and returned a {type(new).__name__}."
        for path in [path for path in old | made if old.get(path) != made.get(path)][:8]:
            was, now = _shown(value, path), _shown(new, path)
            found += f" {show_path(path) or 'It'} was {was}, now {now}."
        raise self._error(call, found)

    def _error(self, call: Call, found: str, remedy: str = _LIKE) -> ChangeError:
        asked = f"{getattr(self, 'name', type(self).__name__)} was applied at {str(call.place)!r}."
        return ChangeError(asked, found, remedy)


class Broadcasting(Change):
    """A change with numbers and tensors of its own, which broadcast to a value as in torch.

    A subclass is a dataclass. If it has the field `dim`, that aligns 1-D tensors with a dimension.
    """

    dim: int | None = None

    def __post_init__(self) -> None:
        """Raise ChangeError unless `dim` is None, or an integer that aligns an own vector."""
        if self.dim is None:
            return
        asked = f"{type(self).__name__} was given dim={self.dim!r}."
        if isinstance(self.dim, bool) or not isinstance(cast(Any, self.dim), int):
            found = "It is the number of a dimension, such as 1."
            raise ChangeError(asked, found, "Give an int, or leave out dim=.")
        given = [getattr(self, name) for name in self._fields() if name != "dim"]
        lists = (list, tuple)
        own = [
            torch.as_tensor(one, device="cpu") if isinstance(one, lists) else one for one in given
        ]
        shapes = [shape for one in own if (shape := tuple(getattr(one, "shape", ())))]
        if not shapes or any(len(shape) > 1 for shape in shapes):
            held = f"tensors of shape {', '.join(map(str, shapes))}" if shapes else "numbers only"
            found = f"dim= aligns 1-D tensors, and it was given {held}."
            raise ChangeError(asked, found, "Leave out dim=: numbers and other tensors broadcast.")

    def _fields(self) -> list[str]:
        return [field.name for field in fields(cast(Any, self))]

    def _broadcast(self, own: Any, value: Tensor, call: Call) -> Any:
        """Return an own number or tensor with the value's device, floating dtype and shape.

        A tensor broadcasts from the last dimension; with `dim` a vector lies along that one.
        """
        floats = torch.can_cast(torch.float32, value.dtype)
        if own is None or (floats and isinstance(own, (int, float, complex))):
            return own
        if not isinstance(own, Tensor):  # an array, a list
            own = torch.as_tensor(own, device="cpu")  # the default device may hold no data
        # In a narrow integer dtype, torch would let numbers that are too large wrap around.
        wide = value.dtype if floats or value.dtype is torch.bool else torch.int64
        own = _cast(own, wide).to(value.device)
        # Autograd saves no tensor that was made in inference mode.
        own = own.clone() if own.is_inference() and torch.is_grad_enabled() else own
        aligned = own if self.dim is None or not own.ndim else self._along_dim(own, value, call)
        try:
            return beside(aligned, value).expand(value.shape)
        except RuntimeError:
            found = f"A tensor of shape {tuple(own.shape)} does not broadcast to the value's, "
            found += f"{tuple(value.shape)}" + (
                "." if self.dim is None else f", along dim={self.dim}."
            )
            raise self._error(call, found, self._other_dims(own, value)) from None

    def _along_dim(self, vector: Tensor, value: Tensor, call: Call) -> Tensor:
        """Return a vector as a tensor that lies along the dimension `dim` of a value."""
        assert self.dim is not None
        if not -value.ndim <= self.dim < value.ndim:
            found = f"dim={self.dim} is out of range for a value of shape {tuple(value.shape)}."
            remedy = "Give one of the value's dimensions; with at=, those of the slice count."
            raise self._error(call, found, remedy)
        return vector.view([-1 if d == self.dim % value.ndim else 1 for d in range(value.ndim)])

    def _other_dims(self, own: Tensor, value: Tensor) -> str:
        """Return the remedy for a tensor that does not fit: other dimensions that a vector fits."""
        tried = -1 if self.dim is None else self.dim
        sizes = enumerate(value.shape) if own.ndim == 1 else ()
        dims = [d for d, size in sizes if size == len(own) and d - tried not in (0, value.ndim)]
        if not dims:
            return _LIKE
        verb = type(self).__name__ if "dim" in self._fields() else "replace"
        along = " or ".join(f"dim={d}" for d in dims)
        remedy = f"Tensors broadcast from the last dimension. For another, give {along}"
        return f"{remedy}, as in {verb}(..., dim={dims[0]})."


def _kinds(value: Any) -> dict[Path, Any]:
    return {path: (_size(t), t.dtype, t.device, placements(t)) for path, t in leaves(value)}


def _is_ragged(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided  # which has no shape


def _size(tensor: Tensor) -> Any:
    return nested_sizes(tensor) if _is_ragged(tensor) else tensor.shape


def _shown(value: Any, path: Path) -> str:
    tensor = dict(leaves(value)).get(path)
    return "no tensor" if tensor is None else f"{describe(tensor)} on {tensor.device}"


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype, or as it is if something would be cut off."""
    if getattr(tensor, "dtype", dtype) == dtype or not torch.can_cast(tensor.dtype, dtype):
        return tensor
    cast = tensor.to(dtype)
    exact = torch.can_cast(torch.float32, dtype) or torch.equal(cast.to(tensor.dtype), tensor)
    return cast if exact else tensor


@dataclass(frozen=True, eq=False)
class Chain(Change):
    """Several changes, one after the other; made by `|`.

    >>> replace(1.0) | replace(2.0)
    Chain(changes=(replace(values=1.0, dim=None), replace(values=2.0, dim=None)))
    """

    changes: tuple[Change, ...]

    def apply(self, value: Tensor, call: Call) -> Tensor:
        for change in self.changes:
            value = change.apply_checked(value, call)
        return value

    @property
    def binds(self) -> bool:
        return any(change.binds for change in self.changes)

    def bound_to(self, handler: Handler) -> Change:
        return Chain(tuple(change.bound_to(handler) for change in self.changes))


@dataclass(frozen=True, eq=False)
class replace(Broadcasting):
    """Put other values in the value's place.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", replace(torch.tensor([1.0, 2.0]))):
    ...     model(torch.zeros(3, 2))
    tensor([[1., 2.],
            [1., 2.],
            [1., 2.]])

    They keep their graph, so gradients flow into them, not into the model.

    Args:
        values: a number, or a tensor, which broadcasts as in torch.
        dim: the dimension of the value along which a 1-D tensor lies, such as 1 for the channels of
            images; without it, the last.
    """

    values: Tensor | float
    dim: int | None = field(default=None, kw_only=True)

    def apply(self, value: Tensor, call: Call) -> Tensor:
        # Python's own numbers have more digits than torch gives them.
        wide: dict[type, torch.dtype] = {float: torch.float64, complex: torch.complex128}
        own = self.values
        if not isinstance(own, Tensor):
            own = torch.as_tensor(own, dtype=wide.get(type(own)), device="cpu")
        return self._broadcast(own, value, call).clone()
