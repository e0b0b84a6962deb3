"""What an edit does to a value: what all changes have in common.

A change meets one tensor, brings its own tensors to that tensor's dtype and device, broadcasts
them as torch does, and never changes the shape. The others are in `ready_changes.py`.

- `Change`: the base class; `apply(value, call)` is what a subclass defines
- `Chain`: several changes, one after the other, made by `|`
- `replace`: other values, which is also what a tensor means where a change is taken
- `check_dim(change, *given)`: whether `dim=` makes sense with what a change was given
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.engine.calls import Call
from hookline.engine.handlers import Handler
from hookline.errors import ChangeError
from hookline.torch_private import nested_sizes
from hookline.values.nested import Path, leaves, only_tensor, set_part, show_path
from hookline.values.sharding import alike, beside, placements
from hookline.values.tables import describe

__all__ = ["Chain", "Change", "check_dim", "replace"]


_LIKE = "Keep the value's structure, shape, dtype, device, placement; hookline.hook checks nothing."


class Change:
    """What an edit does to a tensor."""

    binds = False  # whether it depends on the place: then `bound_to` is called on entering

    def apply(self, value: Tensor, call: Call) -> Tensor:
        """The changed value; `value` itself is left alone."""
        raise AssertionError("a change defines apply")

    def bound_to(self, handler: Handler) -> Change:
        """Return the change for one place; raise an error if it cannot work there."""
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
            path, old = only_tensor(value, lambda: f"The value at {str(call.place)!r}")
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

    def _fit(self, own: Any, value: Tensor, call: Call, dim: int | None = None) -> Any:
        """A change's own tensor, brought to the value's device, floating dtype and shape.

        It broadcasts as in torch, from the last dimension; with `dim` a vector lies along that one.
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
        aligned = own if dim is None or not own.ndim else self._aligned(own, value, call, dim)
        try:
            return beside(aligned, value).expand(value.shape)
        except RuntimeError:
            found = f"A tensor of shape {tuple(own.shape)} does not broadcast to the value's, "
            found += f"{tuple(value.shape)}" + ("." if dim is None else f", along dim={dim}.")
            raise self._unfit(call, found, self._other_dims(own, value, dim)) from None

    def _aligned(self, vector: Tensor, value: Tensor, call: Call, dim: int) -> Tensor:
        """A vector as a tensor that lies along one dimension of a value."""
        if not -value.ndim <= dim < value.ndim:
            found = f"dim={dim} is out of range for a value of shape {tuple(value.shape)}."
            remedy = "Give one of the value's dimensions; with at=, those of the slice count."
            raise self._unfit(call, found, remedy)
        return vector.view([-1 if d == dim % value.ndim else 1 for d in range(value.ndim)])

    def _other_dims(self, own: Tensor, value: Tensor, dim: int | None) -> str:
        """What to do about a tensor that does not fit: name other dimensions that a vector fits."""
        tried = -1 if dim is None else dim
        sizes = enumerate(value.shape) if own.ndim == 1 else ()
        dims = [d for d, size in sizes if size == len(own) and d - tried not in (0, value.ndim)]
        if not dims:
            return _LIKE
        verb = type(self).__name__ if hasattr(self, "dim") else "replace"
        along = " or ".join(f"dim={d}" for d in dims)
        remedy = f"Tensors broadcast from the last dimension. For another, give {along}"
        return f"{remedy}, as in {verb}(..., dim={dims[0]})."

    def _unfit(self, call: Call, found: str, remedy: str = _LIKE) -> ChangeError:
        asked = f"{getattr(self, 'name', type(self).__name__)} was applied at {str(call.place)!r}."
        return ChangeError(asked, found, remedy)


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
    """The tensor in another dtype, or as it is if something would be cut off."""
    if getattr(tensor, "dtype", dtype) == dtype or not torch.can_cast(tensor.dtype, dtype):
        return tensor
    cast = tensor.to(dtype)
    exact = torch.can_cast(torch.float32, dtype) or torch.equal(cast.to(tensor.dtype), tensor)
    return cast if exact else tensor


def check_dim(change: Any, *given: Any) -> None:
    """Raise ChangeError unless `dim` is None, or an integer that aligns a vector of the change."""
    dim = change.dim
    if dim is None:
        return
    asked = f"{type(change).__name__} was given dim={dim!r}."
    if isinstance(dim, bool) or not isinstance(dim, int):
        found = "It is the number of a dimension, such as 1."
        raise ChangeError(asked, found, "Give an int, or leave out dim=.")
    lists = (list, tuple)
    own = [torch.as_tensor(one, device="cpu") if isinstance(one, lists) else one for one in given]
    shapes = [shape for one in own if (shape := tuple(getattr(one, "shape", ())))]
    if not shapes or any(len(shape) > 1 for shape in shapes):
        held = f"tensors of shape {', '.join(map(str, shapes))}" if shapes else "numbers only"
        found = f"dim= aligns 1-D tensors, and it was given {held}."
        raise ChangeError(asked, found, "Leave out dim=: numbers and other tensors broadcast.")


@dataclass(frozen=True, eq=False)
class Chain(Change):
    """Several changes, one after the other; made by `|`.

    >>> replace(1.0) | replace(2.0)
    Chain(changes=(replace(values=1.0, dim=None), replace(values=2.0, dim=None)))
    """

    changes: tuple[Change, ...]

    def apply(self, value: Tensor, call: Call) -> Tensor:
        for change in self.changes:
            value = change.meet(value, call)
        return value

    @property
    def binds(self) -> bool:
        return any(change.binds for change in self.changes)

    def bound_to(self, handler: Handler) -> Change:
        return Chain(tuple(change.bound_to(handler) for change in self.changes))


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

    They keep their graph, so gradients flow into them, not into the model.

    Args:
        values: a number, or a tensor, which broadcasts as in torch.
        dim: the dimension of the value along which a 1-D tensor lies, such as 1 for the channels of
            images; without it, the last.
    """

    values: Tensor | float
    dim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_dim(self, self.values)

    def apply(self, value: Tensor, call: Call) -> Tensor:
        # Python's own numbers have more digits than torch gives them.
        wide: dict[type, torch.dtype] = {float: torch.float64, complex: torch.complex128}
        own = self.values
        if not isinstance(own, Tensor):
            own = torch.as_tensor(own, dtype=wide.get(type(own)), device="cpu")
        return self._fit(own, value, call, self.dim).clone()
