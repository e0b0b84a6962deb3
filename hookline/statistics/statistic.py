"""The base class of all statistics: it takes in values batch by batch, in constant memory.

- `Statistic`: options that never change, and a state to which `update` and `merge` add
- `Rows`: a part of a batch
- `State`: the state of a statistic: tensors by name
- `in_parts(values, kept, numbers)`: rows in parts that are small enough for float64
- `padded(samples)`: samples of varying length as one tensor, and the mask of their values
- `sums(one, other, *keys)`: the parts of two states that are merged by adding
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hookline.errors import StatisticsError
from hookline.statistics.masks import is_added
from hookline.storage import json_safetensors
from hookline.values.quantisation import is_quantised, is_wrapper

__all__ = ["Rows", "State", "Statistic", "in_parts", "padded", "sums"]

State = dict[str, Tensor]
_CHUNK = 2**20  # numbers that are widened to float64 at once


class Rows(NamedTuple):
    """A part of a batch: rows × channels in float64, and which of the numbers count."""

    values: Tensor
    kept: Tensor
    start: int  # the number of the first row in the batch
    names: Tensor  # the ids of all samples of the batch
    shape: tuple[int, ...]  # of the batch, without channels

    @property
    def finite(self) -> Tensor:
        return self.kept & self.values.isfinite()

    def is_whole(self) -> bool:
        """Return True if every number counts, the usual case, for which there are quicker ways.

        It tests the sum, which is finite only if all numbers are, and many times as fast as a test
        of each number. (A sum of huge numbers may overflow; then the slower way is used.)
        """
        return bool(self.kept.all()) and bool(self.values.sum().isfinite())


@dataclass(frozen=True, eq=False)
class Statistic:
    """The base class of all statistics.

    Args:
        dim: the dimension of the channels, each of which has its own result: the last, or 1 for
            images; None for one result over everything.
    """

    dim: int | None = -1
    state: State = field(init=False, repr=False, default_factory=dict[str, Tensor])
    _takes_ids: ClassVar[bool] = False  # True if it tells samples apart

    def __post_init__(self) -> None:
        """Make the options plain numbers: they are compared, and saved."""
        for option in fields(self):
            own = getattr(self, option.name)
            if option.name == "state" or (own is None and option.name in ("dim", "range")):
                continue
            usual = (-1.0, 1.0) if option.name == "range" else option.default
            try:
                plain = _plain(own, usual)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise StatisticsError(
                    f"A {type(self).__name__} was to be made.",
                    f"Its {option.name} is {own!r:.60}.",
                    f"Give a value such as {usual}.",
                ) from None
            object.__setattr__(self, option.name, plain)

    def _of(self, rows: Rows) -> State:
        """Return the state for some rows alone."""
        raise AssertionError("a statistic defines _of")

    def _join(self, one: State, other: State) -> State:
        """Return the state of both together."""
        raise AssertionError("a statistic defines _join")

    def _at_once(self, channels: int) -> int:
        """Return how many numbers are added together."""
        return _CHUNK

    def _prepare(self, values: Tensor, kept: Tensor) -> None:
        """Read all rows of a batch before they are added."""

    @property
    def result(self) -> Any:
        """The result so far."""
        raise AssertionError("a statistic defines result")

    # -- taking in ------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, value: Tensor, mask: Tensor | None = None, ids: Sequence[int] | Tensor | None = None
    ) -> Self:
        """Add a batch. The value is only read.

        Args:
            value: a tensor of any real dtype; its first dimension, channels apart, is the samples.
                A vector along `dim` is the channels of one sample. In a nested tensor each sample
                has a length of its own.
            mask: nonzero where the value counts: over the first dimensions of the value, channels
                apart, as batch × position is for batch × position × channel.
            ids: an integer for each sample, for `TopK`. By default samples are counted.
        """
        if value.is_nested:
            value, mask = self._unnested(value, mask)
        rows, shape = self._rows(value)
        kept = torch.ones((), dtype=torch.bool, device=value.device).expand(shape)
        if mask is not None:
            given = self._tensor(mask, "mask").to(value.device)
            if is_added(given):
                raise self._unfit(
                    "Some numbers in the mask are negative or NaN.",
                    "A mask is nonzero for tokens and zero for padding, such as (mask == 0) where "
                    "padding is marked by what is added to scores.",
                )
            kept = self._fitting(given, shape)
        kept = kept.reshape(-1)
        names = self._names(shape, ids if self._takes_ids else None)
        if "channels" in self.state and int(self.state["channels"]) != rows.shape[1]:
            had = int(self.state["channels"])
            raise self._unfit(
                f"A value of shape {tuple(value.shape)} has {rows.shape[1]} channels along "
                f"dim={self.dim}; those before had {had}.",
                "Measure places of one width, or everything together with dim=None.",
            )
        if len(rows):
            self._prepare(rows, kept)
        state = dict(self.state)
        for start, part, counted in in_parts(rows, kept, self._at_once(rows.shape[1])):
            batch = Rows(part, counted[:, None], start, names, shape)
            made = {key: tensor.cpu() for key, tensor in self._of(batch).items()}
            made["channels"] = torch.tensor(rows.shape[1], device="cpu")
            state = self._joined(state, made)
        # All at once: an error, or an interrupt, leaves the state as it was before the batch.
        state["samples"] = state.get("samples", _none()) + len(names)
        self.load_state(state)
        return self

    def _unnested(self, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a nested tensor padded, and the mask of its values.

        A given mask must keep the same values. The layers of torch's TransformerEncoder return such
        tensors in eval mode, with padding.
        """
        samples = value.detach().unbind()
        lengths = [sample.shape[0] if sample.ndim else -1 for sample in samples]
        given: list[int] = lengths
        if mask is not None:
            given = cast("list[int]", (self._tensor(mask, "mask") != 0).sum(-1).tolist())
        if given != lengths or len({sample.shape[1:] for sample in samples}) != 1:
            shapes = [tuple(sample.shape) for sample in samples]
            found = f"The value is nested, of samples of shapes {shapes!s:.200}"
            raise self._unfit(
                f"{found}{'' if given == lengths else f', the mask keeps {given!s:.80}'}.",
                "Give samples that differ in their first size only, as long as the mask says.",
            )
        return padded(samples)

    def _rows(self, value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the value as rows × channels, and its shape without the channels."""
        quantised = is_quantised(value)
        if value.is_complex() or quantised or value.layout != torch.strided:
            kind = type(value).__name__ if is_wrapper(value) else f"{value.dtype}, {value.layout}"
            found = f"The value is {kind}: its numbers have no order."
            way = "dequantize" if quantised else "to_dense"
            way = "abs" if value.is_complex() else way
            raise self._unfit(found, f"Measure at=lambda value: value.{way}() instead.")
        value = value.detach()
        if self.dim is None:
            return value.reshape(-1, 1), tuple(value.shape)
        if not -value.ndim <= self.dim < value.ndim:
            found = f"A value of shape {tuple(value.shape)} has no dimension {self.dim}."
            raise self._unfit(found, "Give dim= another one, or None for one result overall.")
        moved = value.movedim(self.dim, -1)
        # Not reshape(-1, …), which cannot tell the rows of a value without channels.
        count = moved.shape[:-1].numel()
        return moved.reshape(count, moved.shape[-1]), tuple(moved.shape[:-1])

    def _fitting(self, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        ahead = shape[: mask.ndim]
        sizes = zip(mask.shape, ahead, strict=False)
        if len(ahead) < mask.ndim or any(own not in (1, size) for own, size in sizes):
            raise self._unfit(
                f"A mask has the shape {tuple(mask.shape)}, the value without channels {shape}.",
                "A mask lies over the first dimensions of the value, such as batch × position.",
            )
        mask = (mask != 0).expand(ahead)
        return mask.reshape(*mask.shape, *[1] * (len(shape) - mask.ndim)).expand(shape)

    def _names(self, shape: tuple[int, ...], ids: Any) -> Tensor:
        count = shape[0] if shape else 1
        if ids is None:
            return torch.arange(count, device="cpu") + self.state.get("samples", _none())
        names = self._tensor(ids, "ids").detach().cpu().reshape(-1)
        if len(names) != count or (len(names) and (names.is_floating_point() or names.min() < 0)):
            found = f"{len(names)} ids of {names.dtype} were given for {count} samples."
            raise self._unfit(found, "Give one whole number from 0 on for each sample.")
        return names.to(torch.int64)

    def _tensor(self, given: Any, what: str) -> Tensor:
        if isinstance(given, Tensor):  # as_tensor would move it to the default device
            return given
        try:
            return torch.as_tensor(given, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            found = f"Its {what}, {given!r:.60}, is no tensor and cannot be made one."
            raise self._unfit(found, "Give a tensor, an array or a list of numbers.") from None

    def merge(self, other: Statistic) -> Self:
        """Add the state of another statistic of the same options, which stays as it is."""
        if repr(other) != repr(self):
            raise self._unfit(f"It was to be merged with {other!r}.", "Give both the same options.")
        widths = {int(s["channels"]) for s in (self.state, other.state) if "channels" in s}
        if len(widths) > 1:
            raise self._unfit(f"The two have {widths} channels.", "Merge those of one place.")
        state = self._joined(self.state, other.state)
        seen = [one.state.get("samples", _none()) for one in (self, other)]
        self.load_state(state | {"samples": seen[0] + seen[1]})
        return self

    def _joined(self, one: State, other: State) -> State:
        if "channels" not in one or "channels" not in other:
            return {**one, **other}
        return {**one, **other} | self._join(one, other)

    def load_state(self, state: State) -> None:
        """Replace the state."""
        self.state.clear()
        self.state.update(state)

    def _shaped(self, tensor: Tensor) -> Tensor:
        return tensor if self.dim is not None else tensor.squeeze(0)

    def _total(self, key: str) -> Tensor:
        return self._shaped(self.state.get(key, torch.zeros(1, dtype=torch.int64, device="cpu")))

    @property
    def count(self) -> Tensor:
        """The number of values that took part, for each channel."""
        return self._total("count")

    @property
    def skipped(self) -> Tensor:
        """The number of NaN or infinite values that were left out, for each channel."""
        return self._total("skipped")

    # -- copies and files -----------------------------------------------------------------------

    def fresh(self) -> Self:
        """Return an empty statistic of the same options."""
        return type(self)(**self.options())

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        return {key: value for key, value in asdict(self).items() if key != "state"}

    def save(self, folder: str | Path) -> Path:
        """Write options and state into a folder: `statistic.json` and `statistic.safetensors`."""
        return json_safetensors.write(folder, "statistic", self.to_dict(), self.state)

    def to_dict(self) -> dict[str, Any]:
        """Return kind and options, ready for JSON."""
        return {"statistic": type(self).__name__, "options": self.options()}

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote."""
        from hookline.statistics.all_statistics import statistic_from  # which knows this file

        content, tensors = json_safetensors.read(folder, "statistic", StatisticsError)
        made = statistic_from(content, tensors, str(folder))
        if not isinstance(made, cls):
            asked = f"A {cls.__name__} was to be read from {str(folder)!r}."
            raise StatisticsError(asked, f"There is a {type(made).__name__}.", "Load it as that.")
        return made

    def _unfit(self, found: str, remedy: str) -> StatisticsError:
        return StatisticsError(f"{self!r} was to take in more.", found, remedy)


def _plain(value: Any, usual: Any) -> Any:
    """Return a value as Python's own, of the type of the usual one; raise if it is of another."""
    if isinstance(usual, tuple):
        low, high = (_plain(end, 0.0) for end in value)
        return low, high
    if isinstance(value, str) or isinstance(value, (bool, np.bool_)) != isinstance(usual, bool):
        raise TypeError
    made = index(value) if type(usual) is int else type(usual)(value)
    if not math.isfinite(made):
        raise ValueError
    return made


def _none() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")  # whatever the default device is


def _wide(part: Tensor) -> Tensor:
    if part.device.type == "mps":  # which has no float64
        part = part.cpu()
    return part.to(torch.float64)


def in_parts(
    values: Tensor, kept: Tensor, numbers: int = 0
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield parts of rows: the number of the first row, the rows in float64, and which count."""
    step = max(1, (numbers or _CHUNK) // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        part = _wide(values[start : start + step])
        yield start, part, kept[start : start + step].to(part.device)


def padded(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return samples of varying length as one tensor, and the mask of their values."""
    lengths = torch.tensor([sample.shape[0] for sample in samples], device=samples[0].device)
    value = pad_sequence(list(samples), batch_first=True)
    return value, torch.arange(value.shape[1], device=value.device)[None] < lengths[:, None]


def sums(one: State, other: State, *keys: str) -> State:
    """Return the parts that are merged by adding."""
    return {key: one[key] + other[key] for key in keys}
