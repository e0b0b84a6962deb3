"""The ready changes, for `edit`.

    add  scale  noise  zero  clamp  dropout  blend  remove_direction  patch

Each is a frozen dataclass, composed with `|` from left to right, and works on activations as well
as on gradients. `replace` and the base classes are in `hookline/edits/changes.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookline.captures.record import Record
from hookline.edits.changes import Broadcasting, Change
from hookline.engine.calls import Call
from hookline.engine.handlers import Handler
from hookline.engine.slices import FUNCTION, Misfit, spelled, take
from hookline.errors import ChangeError, NotCaptured
from hookline.values.nested import only_tensor
from hookline.values.sharding import beside

__all__ = [
    "add", "blend", "clamp", "dropout", "noise", "patch", "remove_direction", "scale", "zero",
]  # fmt: skip


def _draw(draw: Any, like: Tensor, seed: int | None, call: Call) -> Tensor:
    """Draw random numbers; with a seed they depend on (seed, place, call) alone."""
    dtype = torch.result_type(like, 0.5)
    if seed is None:
        return draw(torch.empty_like(like, dtype=dtype))
    text = f"{seed}|{call.place}|{call.index}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    # Drawn on the CPU and in one precision, so that it is the same everywhere.
    wide = dtype if dtype.is_complex else torch.float32
    drawn = torch.empty(like.shape, dtype=wide, device="cpu")
    draw(drawn, generator=torch.Generator().manual_seed(number))
    return beside(drawn.to(like.device, dtype), like)


@dataclass(frozen=True, eq=False)
class add(Broadcasting):
    """Add values: a steering vector, an offset, a number for each channel.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", add(torch.tensor([0.0, 5.0]))):
    ...     model(torch.zeros(1, 2))
    tensor([[0., 5.]])
    >>> with edit(model, "", add(torch.tensor([0.0, 5.0]), dim=1)):
    ...     model(torch.zeros(1, 2, 1, 3))
    tensor([[[[0., 0., 0.]],
    <BLANKLINE>
             [[5., 5., 5.]]]])

    Args:
        values: a number, or a tensor, which broadcasts as in torch.
        dim: as in `replace`: `add(offsets, dim=1)` adds one number to each channel of images.
    """

    values: Tensor | float
    dim: int | None = field(default=None, kw_only=True)

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return value + self._broadcast(self.values, value, call)


@dataclass(frozen=True, eq=False)
class scale(Broadcasting):
    """Multiply by a factor: a number, or a tensor of them.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", scale(3.0)):
    ...     model(torch.ones(2))
    tensor([3., 3.])

    Args:
        factor: a number, or a tensor, which broadcasts as in torch.
        dim: as in `replace`.
    """

    factor: Tensor | float
    dim: int | None = field(default=None, kw_only=True)

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return value * self._broadcast(self.factor, value, call)


@dataclass(frozen=True, eq=False)
class zero(Change):
    """Put zeros in the value's place: an ablation.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", zero()):
    ...     model(torch.ones(2))
    tensor([0., 0.])
    """

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return torch.zeros_like(value)


@dataclass(frozen=True, eq=False)
class clamp(Broadcasting):
    """Keep the value between two bounds, either of which may be None.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", clamp(max=1.0)):
    ...     model(torch.tensor([0.5, 7.0]))
    tensor([0.5000, 1.0000])

    Args:
        min, max: numbers, or tensors, which broadcast as in torch.
        dim: as in `replace`, for both bounds.
    """

    min: Tensor | float | None = None
    max: Tensor | float | None = None
    dim: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ChangeError("clamp has no bound.", "It would change nothing.", "Give min or max.")
        super().__post_init__()

    def apply(self, value: Tensor, call: Call) -> Tensor:
        if value.is_complex():
            raise self._error(call, f"The value is {value.dtype}: it has no bounds.")
        low, high = (self._broadcast(bound, value, call) for bound in (self.min, self.max))
        value = value if low is None else value.clamp(min=low)
        return value if high is None else value.clamp(max=high)


@dataclass(frozen=True, eq=False)
class noise(Change):
    """Add Gaussian noise, or with `relative=True` noise in proportion to each value.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", noise(0.1, seed=7)):
    ...     first = model(torch.zeros(3))
    >>> with edit(model, "", noise(0.1, seed=7)):
    ...     bool((model(torch.zeros(3)) == first).all())
    True

    Args:
        std: the standard deviation; with `relative` that of the factor `1 + noise`.
        relative: multiply instead of add.
        seed: draw from (seed, place, call), the same on every run, device and recomputation, and
            leave torch's random state alone. Without it, torch's random state is used.
    """

    std: float
    relative: bool = False
    seed: int | None = None

    def apply(self, value: Tensor, call: Call) -> Tensor:
        drawn = _draw(Tensor.normal_, value, self.seed, call) * self.std
        return value * (1 + drawn) if self.relative else value + drawn


@dataclass(frozen=True, eq=False)
class dropout(Change):
    """Zero elements at random and scale up the rest, as `nn.Dropout` does.

    >>> from hookline import edit
    >>> model = torch.nn.Conv2d(1, 4, 1).eval()
    >>> x = torch.ones(1, 1, 2, 2)
    >>> with edit(model, "", dropout(0.5)):  # eval mode: nothing is dropped
    ...     bool((model(x) == torch.nn.functional.conv2d(x, model.weight, model.bias)).all())
    True

    Args:
        p: the probability of dropping.
        channels: drop whole channels (dimension 1), as `nn.Dropout2d` does.
        training: None follows the module's own `training`; True or False overrides it.
        seed: as in `noise`.
    """

    p: float = 0.5
    channels: bool = False
    training: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ChangeError(f"dropout has p={self.p}.", "It is a probability.", "Give 0 to 1.")

    def apply(self, value: Tensor, call: Call) -> Tensor:
        training = call.module.training if self.training is None else self.training
        if not training or self.p == 0:
            return value
        shape = tuple(value.shape)
        if self.channels:
            if value.ndim < 2:
                raise self._error(call, f"The value has the shape {shape}: no channels.")
            shape = (*shape[:2], *[1] * (value.ndim - 2))
        like = value.new_empty(shape, dtype=torch.float32)  # bfloat16 would be too coarse
        kept = _draw(Tensor.uniform_, like, self.seed, call) >= self.p
        return torch.where(kept, value / (1 - self.p or 1), 0)


@dataclass(frozen=True, eq=False)
class blend(Broadcasting):
    """Mix with other values: `x * (1 - amount) + value * amount`.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", blend(10.0, amount=torch.tensor([0.0, 0.5]))):
    ...     model(torch.ones(1, 2))
    tensor([[1.0000, 5.5000]])

    Args:
        value: what to mix in, a number or a tensor, which broadcasts as in torch.
        amount: how much of it, from 0 (nothing) to 1 (all): a number or a tensor.
        dim: as in `replace`, for both.
    """

    value: Tensor | float
    amount: Tensor | float = 1.0
    dim: int | None = field(default=None, kw_only=True)

    def apply(self, value: Tensor, call: Call) -> Tensor:
        amount = self._broadcast(self.amount, value, call)
        return value * (1 - amount) + self._broadcast(self.value, value, call) * amount


@dataclass(frozen=True, eq=False)
class remove_direction(Broadcasting):
    """Take out the component along a direction: `x - (x · d) d`, with d of length 1.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", remove_direction(torch.tensor([0.0, 2.0]))):
    ...     model(torch.tensor([[3.0, 4.0]]))
    tensor([[3., 0.]])

    Args:
        direction: a vector, of any length but zero.
        dim: the dimension of the value along which it lies: -1 for tokens, 1 for image channels.
    """

    direction: Tensor
    dim: int = -1  # pyright: ignore[reportIncompatibleVariableOverride] - it is never None

    def __post_init__(self) -> None:
        if not isinstance(self.direction, Tensor):  # an array, a list
            object.__setattr__(self, "direction", torch.as_tensor(self.direction, device="cpu"))
        if self.direction.ndim != 1 or not float(self.direction.detach().abs().sum()) > 0:
            found = f"It has the shape {tuple(self.direction.shape)}, or is zero."
            raise ChangeError("remove_direction was given no direction.", found, "Give a vector.")

    def apply(self, value: Tensor, call: Call) -> Tensor:
        length, dims = len(self.direction), range(-value.ndim, value.ndim)
        if self.dim not in dims or value.shape[self.dim] != length:
            found = f"The value has the shape {tuple(value.shape)}, the direction length {length}"
            found += f", along dim={self.dim}."
            raise self._error(call, found, self._other_dims(self.direction, value))
        wide = torch.promote_types(torch.result_type(self.direction, value), torch.float32)
        direction = self.direction.to(value.device, wide)
        direction = direction / direction.abs().max()  # else its square may overflow or vanish
        direction = beside(direction / direction.abs().square().sum().sqrt(), value)
        moved = value.movedim(self.dim, -1)
        along = (moved * direction.conj()).sum(-1, keepdim=True)
        return (along * -direction + moved).movedim(-1, self.dim)  # torch has no `-` for bool


@dataclass(frozen=True, eq=False)
class patch(Broadcasting):
    """Put in what another run had at the same place and call, detached.

    >>> from hookline import capture, edit
    >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    >>> with capture(model, "0") as clean:
    ...     _ = model(torch.ones(2))
    >>> with edit(model, "0", patch(clean)):
    ...     model(torch.zeros(2))
    tensor([1., 1.])

    With `at=` in the edit, only that slice is put in; the record may hold it, captured with the
    same `at=`, or the whole value. A record of another slice is refused, whatever its shape.

    Args:
        record: what another run had; that it holds the place is checked when the edit is entered.
        place: another place of the record to take the value from.
    """

    record: Record
    place: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.record, "of_call"):
            found = f"It was given a {type(self.record).__name__}."
            raise ChangeError("patch takes a record.", found, "Use replace() for a tensor.")

    binds = True

    def bound_to(self, handler: Handler) -> patch:
        if self.place is None:  # as it was asked for, or under the first name of the module
            asked = handler.target.place
            found = asked if asked in self.record else handler.place
            return patch(self.record, found).bound_to(handler)
        if self.place not in self.record:
            held = ", ".join(repr(str(held)) for held in self.record.places()[:6])
            asked = f"patch was asked to put in what a record has at {str(self.place)!r}."
            remedy = "Capture that place in the other run, or name one with patch(record, place)."
            raise NotCaptured(asked, f"The record holds {held or 'nothing'}.", remedy)
        return self

    def apply(self, value: Tensor, call: Call) -> Tensor:
        source = call.place if self.place is None else self.place
        own = self.record.of_call(source, call.index)
        own = only_tensor(own, lambda: f"The value at {str(source)!r}")[1]
        return self._broadcast(self._slice(own, source, call).detach(), value, call).clone()

    def _slice(self, own: Tensor, source: Any, call: Call) -> Tensor:
        """Return the slice of the recorded value that the edit changes, of any shape."""
        at = call.at
        kept, transformed = self.record.slicing(source)
        if at is not None and kept is None and not transformed:
            try:
                return take(own, at)
            except Misfit as error:
                found = f"Of what the record holds: {error.found}"
                raise self._error(call, found, error.remedy) from error.__cause__
        same = kept is None if at is None else kept in (spelled(at), FUNCTION)
        if same:
            return own
        held = "what transform= made of the value" if kept is None else "a slice of the value"
        held += f" there{'' if kept is None else f', at=[{kept:.60}]'}, of shape {tuple(own.shape)}"
        remedy = "Give the capture and the edit the same at=, or use replace(record[place])."
        raise self._error(call, f"The record holds {held}.", remedy)
