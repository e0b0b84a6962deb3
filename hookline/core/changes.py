"""What an edit does to a value: the ready changes.

    replace  add  scale  noise  zero  clamp  dropout  blend  remove_direction  patch

Each is a frozen dataclass, composed with `|` from left to right, and works on activations as well
as on gradients. A change meets one tensor, brings its own tensors to that tensor's dtype and
device, broadcasts them, and never changes the shape. (A long file, for its examples.)

- `Change`: the base class; `apply(value, call)` is what a subclass defines
- `Chain`: several changes, one after the other
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hookline.core.distributed import alike, beside, placements
from hookline.errors import ChangeError, NotCaptured

if TYPE_CHECKING:
    from hookline.core.records import Record
    from hookline.core.sites import Call

__all__ = [
    "Chain",
    "Change",
    "add",
    "apply",
    "blend",
    "clamp",
    "describe",
    "dropout",
    "noise",
    "patch",
    "remove_direction",
    "replace",
    "scale",
    "zero",
]


class Change:
    """What an edit does to a tensor."""

    def apply(self, value: Tensor, call: Call) -> Tensor:
        """The changed value; `value` itself is left alone."""
        raise AssertionError("a change defines apply")

    def check(self, place: Any) -> None:
        """Called for each place when an edit is entered: raise if the change cannot work there."""

    def __or__(self, other: Change) -> Chain:
        if not isinstance(other, Change):
            return NotImplemented
        return Chain((*_steps(self), *_steps(other)))


def _steps(change: Change) -> tuple[Change, ...]:
    return change.changes if isinstance(change, Chain) else (change,)


@dataclass(frozen=True, eq=False)
class Chain(Change):
    """Several changes, one after the other; made by `|`.

    >>> scale(2.0) | zero()
    Chain(changes=(scale(factor=2.0), zero()))
    """

    changes: tuple[Change, ...]

    def apply(self, value: Tensor, call: Call) -> Tensor:
        for change in self.changes:
            value = apply(change, value, call)
        return value

    def check(self, place: Any) -> None:
        for change in self.changes:
            change.check(place)


def apply(change: Change, value: Tensor, call: Call) -> Tensor:
    """Apply a ready change and check that the result fits: the same shape, dtype and device."""
    if value.is_quantized:
        raise ChangeError(
            f"{change!r} was applied at {str(call.place)!r}.",
            "The value is quantised.",
            "Give a function that dequantises it, changes it and quantises it again.",
        )
    result = alike(change.apply(value, call), value)
    if result.shape != value.shape:
        raise ChangeError(
            f"{change!r} was applied at {str(call.place)!r}.",
            f"The value has the shape {tuple(value.shape)}, the result {tuple(result.shape)}.",
            "Give the change tensors that broadcast to the value's shape.",
        )
    if type(result) is not Tensor and placements(result) != placements(value):
        raise ChangeError(
            f"{change!r} was applied at {str(call.place)!r}.",
            f"The value is a plain tensor, the result is spread over ranks: {placements(result)}.",
            "Give the change what this rank holds, as tensor.to_local() has it.",
        )
    if result.dtype != value.dtype:
        if not torch.can_cast(result.dtype, value.dtype):
            raise _dtypes_differ(change, value, result, call)
        result = result.to(value.dtype)
    return result


def _dtypes_differ(change: Change, value: Tensor, other: Tensor, call: Call | None) -> ChangeError:
    at = "" if call is None else f" at {str(call.place)!r}"
    return ChangeError(
        f"{type(change).__name__} was applied{at}.",
        f"The value is of dtype {value.dtype}, and {other.dtype} would be cut off.",
        "Edit a value of that kind, or give a function that says how to convert.",
    )


def fit(own: Tensor | float, value: Tensor, change: Change) -> Tensor | float:
    """A change's own tensor, brought to the value's device and floating dtype, to broadcast.

    A 1-D tensor is per channel: it lies along dimension 1 of values with four or more dimensions,
    else along the last one, or along the only one of the two that has its length.
    """
    if not isinstance(own, Tensor):
        return own
    if own.dtype != value.dtype and (value.is_floating_point() or value.is_complex()):
        if not torch.can_cast(own.dtype, value.dtype):
            raise _dtypes_differ(change, value, own, None)
        own = own.to(value.dtype)
    own = own.to(value.device)
    if own.ndim == 1 and value.ndim >= 3:
        length = own.shape[0]
        last, channel = value.shape[-1] == length, value.shape[1] == length
        if channel and (value.ndim >= 4 or not last):
            own = own.view(1, length, *[1] * (value.ndim - 2))
    try:
        shape = cast("torch.Size", torch.broadcast_shapes(own.shape, value.shape))
    except RuntimeError:
        shape = None
    if shape != value.shape:
        raise ChangeError(
            f"{type(change).__name__} was given a tensor of shape {tuple(own.shape)}.",
            f"The value has the shape {tuple(value.shape)}, to which it does not broadcast.",
            "Give one of the value's shape, or one that broadcasts to it, such as one number a "
            "channel.",
        )
    return beside(own, value)


def _need_float(change: Change, value: Tensor, call: Call) -> None:
    if not (value.is_floating_point() or value.is_complex()):
        raise ChangeError(
            f"{change!r} was applied at {str(call.place)!r}.",
            f"The value is of dtype {value.dtype}.",
            "This change is for floating-point values.",
        )


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
        own = fit(self.values, value, self)
        if not isinstance(own, Tensor):
            own = torch.tensor(own, device=value.device)
        fitted = own.to(value.dtype) if torch.can_cast(own.dtype, value.dtype) else None
        if fitted is None or not (
            value.dtype.is_floating_point
            or value.is_complex()
            or torch.equal(fitted.to(own.dtype), own)
        ):
            raise _dtypes_differ(self, value, own, call)
        return fitted.expand(value.shape).clone()


@dataclass(frozen=True, eq=False)
class add(Change):
    """Add values: a steering vector, an offset.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", add(torch.tensor([0.0, 5.0]))):
    ...     model(torch.zeros(1, 2))
    tensor([[0., 5.]])
    """

    values: Tensor | float

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return value + fit(self.values, value, self)


@dataclass(frozen=True, eq=False)
class scale(Change):
    """Multiply by a factor: a number, or a tensor of them.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", scale(3.0)):
    ...     model(torch.ones(2))
    tensor([3., 3.])
    """

    factor: Tensor | float

    def apply(self, value: Tensor, call: Call) -> Tensor:
        return value * fit(self.factor, value, self)


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
class clamp(Change):
    """Keep the value between two bounds, either of which may be None.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", clamp(max=1.0)):
    ...     model(torch.tensor([0.5, 7.0]))
    tensor([0.5000, 1.0000])
    """

    min: Tensor | float | None = None
    max: Tensor | float | None = None

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ChangeError(
                "clamp() was given no bound.", "It would change nothing.", "Give min or max."
            )

    def apply(self, value: Tensor, call: Call) -> Tensor:
        if value.is_complex():
            raise _dtypes_differ(self, value.real, value, call)
        result = value
        if self.min is not None:
            result = result.clamp(min=fit(self.min, value, self))
        return result if self.max is None else result.clamp(max=fit(self.max, value, self))


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
        _need_float(self, value, call)
        if self.seed is None:
            drawn = torch.randn_like(value)
        else:
            drawn = seeded(self.seed, call, value, torch.randn).to(value.dtype)
        drawn = drawn * self.std
        return value * (1 + drawn) if self.relative else value + drawn


def seeded(seed: int, call: Call, value: Tensor, draw: Any) -> Tensor:
    """Random numbers that depend on (seed, place, call) alone, drawn on the CPU."""
    text = f"{seed}|{call.place}|{call.index}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(number)
    dtype = value.dtype if value.is_complex() else torch.float32
    drawn: Tensor = draw(value.shape, generator=generator, dtype=dtype)
    return beside(drawn.to(device=value.device), value)


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
            raise ChangeError(
                f"dropout was given p={self.p}.", "It is a probability.", "Give 0 <= p <= 1."
            )

    def apply(self, value: Tensor, call: Call) -> Tensor:
        _need_float(self, value, call)
        training = call.module.training if self.training is None else self.training
        if not training or self.p == 0:
            return value
        if self.p == 1:
            return torch.zeros_like(value)
        mask = value
        if self.channels:
            if value.ndim < 2:
                raise ChangeError(
                    f"dropout(channels=True) was applied at {str(call.place)!r}.",
                    f"The value has the shape {tuple(value.shape)}, without a channel dimension.",
                    "Use it on values with batch and channel dimensions.",
                )
            mask = value[(slice(None), slice(None), *[slice(1)] * (value.ndim - 2))]
        mask = mask.real if mask.is_complex() else mask  # drawn in float32: bfloat16 is too coarse
        if self.seed is None:
            drawn = torch.rand_like(mask, dtype=torch.float32)
        else:
            drawn = seeded(self.seed, call, mask, torch.rand)
        return value * ((drawn >= self.p) / (1 - self.p)).to(value.dtype)


@dataclass(frozen=True, eq=False)
class blend(Change):
    """Mix with other values: `x * (1 - amount) + value * amount`.

    >>> from hookline import edit
    >>> model = torch.nn.Identity()
    >>> with edit(model, "", blend(10.0, amount=torch.tensor([0.0, 0.5]))):
    ...     model(torch.ones(1, 2))
    tensor([[1.0000, 5.5000]])

    Args:
        value: what to mix in, a number or a tensor.
        amount: how much of it, from 0 (nothing) to 1 (all): a number or a tensor. A 1-D tensor is
            one number a channel: along dimension 1 of images, else along the last dimension.
    """

    value: Tensor | float
    amount: Tensor | float = 1.0

    def apply(self, value: Tensor, call: Call) -> Tensor:
        _need_float(self, value, call)
        amount = fit(self.amount, value, self)
        return value * (1 - amount) + fit(self.value, value, self) * amount


@dataclass(frozen=True, eq=False)
class remove_direction(Change):
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
    dim: int = -1

    def __post_init__(self) -> None:
        if self.direction.ndim != 1 or not float(self.direction.detach().abs().sum()) > 0:
            raise ChangeError(
                f"remove_direction was given a tensor of shape {tuple(self.direction.shape)}.",
                "A direction is a vector that is not zero.",
                "Give a 1-D tensor.",
            )

    def apply(self, value: Tensor, call: Call) -> Tensor:
        _need_float(self, value, call)
        if not -value.ndim <= self.dim < value.ndim or value.shape[self.dim] != len(self.direction):
            raise ChangeError(
                f"remove_direction was applied at {str(call.place)!r} along dim={self.dim}.",
                f"The value has the shape {tuple(value.shape)}, the direction the length "
                f"{len(self.direction)}.",
                "Give the dimension along which the direction lies.",
            )
        own = self.direction.to(value.device, torch.promote_types(value.dtype, torch.float32))
        direction = beside((own / cast(Tensor, own.norm())).to(value.dtype), value)
        moved = value.movedim(self.dim, -1)
        along = (moved * direction.conj()).sum(-1, keepdim=True)
        return (moved - along * direction).movedim(-1, self.dim)


@dataclass(frozen=True, eq=False)
class patch(Change):
    """Put in what another run had at the same place and call, detached.

    >>> from hookline import capture, edit
    >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    >>> with capture(model, "0") as clean:
    ...     _ = model(torch.ones(2))
    >>> with edit(model, "0", patch(clean)):
    ...     model(torch.zeros(2))
    tensor([1., 1.])

    Args:
        record: what another run had; that it holds the place is checked when the edit is entered.
        place: another place of the record to take the value from.
    """

    record: Record
    place: str | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.record, "of_call"):
            raise ChangeError(
                f"patch was given a {type(self.record).__name__}.",
                "It takes a record.",
                "Give what `with capture(...) as record` gives, or the `.record` of a capture.",
            )

    def check(self, place: Any) -> None:
        source = place if self.place is None else self.place
        if source not in self.record:
            held = ", ".join(repr(str(held)) for held in self.record.places()[:6])
            raise NotCaptured(
                f"patch was asked to put in what a record has at {str(source)!r}.",
                f"The record holds {held or 'nothing'}.",
                "Capture that place in the other run, or name one with patch(record, place).",
            )

    def apply(self, value: Tensor, call: Call) -> Tensor:
        from hookline.core.nested import only_tensor

        source = call.place if self.place is None else self.place
        other = self.record.of_call(source, call.index)
        own = fit(only_tensor(other, f"The value at {source!r}")[1].detach(), value, self)
        return replace(own).apply(value, call)


def describe(change: Any) -> str:
    """A change as an error shows it."""
    return repr(change) if isinstance(change, Change) else getattr(change, "__name__", repr(change))
