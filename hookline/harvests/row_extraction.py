"""Make the rows that are stored from a batch: run the model, take the values, leave out padding.

- `RowOptions`: which rows to make
- `BatchRows`: the rows of one batch
- `RowExtractor`: runs a model on batches
- `rows_in`, `sizes_in`, `numbers_of`: rows, sizes and ids of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.captures.capturing import capture
from hookline.captures.record import Record
from hookline.edits.ready_slices import last_token
from hookline.engine.context import reusable
from hookline.errors import HarvestError, warn_outside
from hookline.harvests.harvest_checks import (
    places_in,
    refuse_unfit,
    warn_of_order,
    warn_of_training,
)
from hookline.isolation.batches import check_mask_name, move_batch
from hookline.isolation.early_exit import EarlyExit
from hookline.isolation.model_calls import call_model
from hookline.places.grammar import Place
from hookline.places.resolution import Where
from hookline.statistics.masks import is_added
from hookline.storage.store_files import Series
from hookline.values.conversions import as_dtype
from hookline.values.nested import Path, leaves, only_tensor

__all__ = ["BatchRows", "RowExtractor", "RowOptions", "Rows", "numbers_of", "rows_in", "sizes_in"]

Rows = dict[str, "Tensor | list[Tensor]"]
Stop = bool | Literal["auto"]


@dataclass(frozen=True, eq=False)
class RowOptions:
    """Which rows to make of a batch: the options of `harvest`."""

    at: Any = None
    transform: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    stop: Stop = "auto"
    mask: str | Callable[[Any], Any] | None = None
    ids: str | Callable[[Any], Any] | None = None
    forward: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        check_mask_name(self.mask, HarvestError)
        as_dtype(self.dtype, "harvest")
        if self.stop not in (True, False, "auto"):
            raise HarvestError(
                f"A harvest with stop={self.stop!r} was asked for.",
                "stop is True, False or 'auto'.",
                "Leave it out if unsure.",
            )

    def mask_of(self, batch: Any) -> Tensor | None:
        """Return where values count, batch × position; None if there is no mask."""
        if self.mask is None:
            return None
        found = _lookup(batch, self.mask, "mask")
        try:
            # A list is not made where the default device is, which may be another one.
            mask = torch.as_tensor(found, device=getattr(found, "device", "cpu"))
        except (TypeError, ValueError, RuntimeError):
            raise _misgiven("mask", found, "batch × position") from None
        added = is_added(mask)
        if mask.ndim != 2 or added:
            raise HarvestError(
                f"The mask {self.mask!r} was to say which positions are kept.",
                f"It has the shape {tuple(mask.shape)}."
                if not added
                else "Some numbers in it are negative or NaN.",
                "Give batch × position, nonzero for tokens and zero for padding.",
            )
        return mask != 0

    def ids_of(self, batch: Any) -> Any:
        """Return the ids that the caller gives the samples; None to number them."""
        if self.ids is None:
            return None
        found: Any = _lookup(batch, self.ids, "ids")
        if isinstance(found, (Tensor, np.ndarray)):
            found = cast("Any", found.tolist())
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise _misgiven("ids", found, "a number or a word for each sample")
        return list(cast("Iterable[Any]", found))


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch: for each place a row a sample, or a tensor for each sample."""

    rows: Rows
    samples: int
    ids: Any = None


class RowExtractor:
    """Runs a model on batches and makes rows of the values at places."""

    def __init__(self, model: nn.Module, where: Where, options: RowOptions) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # It would wait for ranks that have fewer batches.
            model = cast("nn.Module", model.module)
        self.model, self.options = model, options
        self._where = reusable(where)
        self.asked = places_in(model, self._where)
        self.places: list[Place] = []  # those that fire, as far as that is known
        self._begun = False
        self.whole: set[str] = set()  # with a mask: places that are known to have no positions
        self.stops = options.stop is True
        self._stopping = EarlyExit(model)
        self._device = _device(model)
        self._aside = _aside(model, options)
        refuse_unfit(model)
        warn_of_training(model)

    def go_on(self, stored: list[Series]) -> None:
        """Use the places that are stored already, whichever fire in the first batch now."""
        kept = {series.place for series in stored if series.part == "rows"}
        self.whole = kept - {series.place for series in stored if series.part == "offsets"}
        self.places = [place for place in self.asked if str(place) in kept]

    def take(self, batch: Any, ids: Any = None) -> BatchRows:
        """Run the model on a batch and return its rows; `ids` identify its samples, if known."""
        options = self.options
        mask = options.mask_of(batch)
        at = options.at
        if at is last_token:
            at, mask = last_token(self._needed(mask)), None
        with _noted(batch if options.forward is None else None):
            record = self._record(batch, at)
        first = not self._begun
        if first:
            self._after_block(record)
        values = {str(place): self._value(record, place) for place in self.places}
        rows: Rows = {p: [*v.unbind()] if v.is_nested else v for p, v in values.items()}
        if mask is not None:
            rows = {p: _kept(v, mask, p in self.whole) for p, v in values.items()}
            self.whole |= {place for place, kept in rows.items() if isinstance(kept, Tensor)}
        counts = {place: len(value) for place, value in rows.items()}
        ids = options.ids_of(batch) if ids is None else ids
        if len(set(counts.values())) != 1 or (ids is not None and len(ids) not in counts.values()):
            counts |= {} if ids is None else {"ids": len(ids)}
            raise HarvestError(
                "The values of a batch were to be stored, one row for each sample.",
                f"Counts along the first dimension: {str(counts)[:300]}.",
                "Bring the samples to the front, as with transform=lambda v: v.transpose(0, 1).",
            )
        samples = next(iter(counts.values()))
        if first and ids is None and options.at is options.transform is options.forward is None:
            warn_of_order(sizes_in(batch).values(), samples)
        return BatchRows(rows, samples, ids)

    def _record(self, batch: Any, at: Any) -> Record:
        options = self.options
        if self._aside and isinstance(batch, Mapping):
            given = cast("Mapping[str, Any]", batch)
            batch = {name: part for name, part in given.items() if name not in self._aside}
        if self._device is not None:
            batch = move_batch(batch, self._device)
        # A glob may match what never fires; a place that fired once has to fire each time.
        where = self.places or self._where
        capturing = capture(
            self.model, where, at=at, transform=options.transform, detach=True, dtype=options.dtype,
            stop=self.stops,
        )  # fmt: skip
        first = nullcontext() if self._begun else self._stopping.first()
        with first, torch.no_grad(), capturing as record:
            (options.forward or call_model)(self.model, batch)
        return record

    def _after_block(self, record: Record) -> None:
        """Set the places after the first batch, and whether forwards may end early."""
        self._begun = True
        self.places = record.places()
        silent = record.unfired()
        if silent:
            shown = ", ".join(map(repr, list(silent)[:6])) + ", …" * (len(silent) > 6)
            place, why = next(iter(silent.items()))
            warn_outside(
                f"Nothing happened at {shown} in the first batch: the harvest goes on without "
                f"{'it' if len(silent) == 1 else 'them'}. At {str(place)!r}: {why}"
            )
        if self.options.stop == "auto":
            self.stops = self._stopping.safe

    def _value(self, record: Record, place: Place) -> Tensor:
        values = [value for value in record.calls(place) if value is not None] or [None]
        if len(values) > 1 and self.options.stop is not True:
            raise HarvestError(
                f"The values at {str(place)!r} were to be stored.",
                f"The module was called {len(values)} times for one batch.",
                "Give stop=True to take the first call, or name a place that is called once.",
            )
        _, tensor = only_tensor(values[0], f"The value at {str(place)!r}")
        sparse = not tensor.is_nested and tensor.layout != torch.strided
        if tensor.ndim == 0 or sparse:
            raise HarvestError(
                f"The values at {str(place)!r} were to be stored, one row for each sample.",
                f"There is a tensor of {tensor.layout}."
                if sparse
                else "There is a single number for the whole batch.",
                "Give transform=lambda value: value.to_dense()."
                if sparse
                else "Keep the dimension of the samples in at= and transform=.",
            )
        return tensor

    def _needed(self, mask: Tensor | None) -> Tensor:
        if mask is None:
            raise HarvestError(
                "at=last_token was asked for.",
                "There is no mask to tell tokens from padding.",
                "Give mask=, such as mask='attention_mask'.",
            )
        return mask


def _kept(value: Tensor, mask: Tensor, whole: bool) -> Tensor | list[Tensor]:
    """Return the rows of each sample that the mask keeps.

    A row of numbers for each sample, such as a pooled output, has no positions and stays whole. If
    the batch is as long as such a row is wide, earlier batches decide (`whole`). A nested tensor,
    which layers of torch's TransformerEncoder return in eval mode, has no padding.
    """
    if value.is_nested:
        samples = [*value.unbind()]
        kept = cast("list[int]", mask.sum(1).tolist())
        if [len(sample) for sample in samples] != kept:
            raise HarvestError(
                f"A mask of shape {tuple(mask.shape)} was given, batch × position.",
                f"A value is nested; its samples are not as long as the mask says: {kept!s:.80}.",
                "Leave the mask out, or pad the value with transform=.",
            )
        return samples
    pooled = value.ndim == 2 and value.dtype.is_floating_point
    if pooled and value.shape == mask.shape and not whole:
        raise HarvestError(
            f"A mask of shape {tuple(mask.shape)} was given, batch × position.",
            "A value has the same shape: a number for each position, or a row for each sample.",
            "Give numbers a dimension of their own, as with transform=lambda v: v.unsqueeze(-1); "
            "harvest rows by themselves, without a mask.",
        )
    if len(value) == len(mask) and (value.ndim == 1 or pooled):
        return value
    if value.shape[:2] != mask.shape:
        raise HarvestError(
            f"A mask of shape {tuple(mask.shape)} was given, batch × position.",
            f"A value has the shape {tuple(value.shape)}.",
            "Bring samples and positions to the front with transform=, or harvest places with "
            "other positions by themselves.",
        )
    rows = value[mask.to(value.device)]
    return list(cast("tuple[Tensor, ...]", rows.split(mask.sum(1).tolist())))


def _aside(model: nn.Module, options: RowOptions) -> set[str]:
    """Return the parts of a batch that only identify samples and positions.

    They are not given to the model, unless it has arguments of these names.
    """
    named = {one for one in (options.mask, options.ids) if isinstance(one, str)}
    if options.forward is not None:
        return set()
    try:
        taken = signature(model.forward).parameters
    except (TypeError, ValueError):
        return set()
    return set() if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else named - set(taken)


def _lookup(batch: Any, key: str | Callable[[Any], Any], what: str) -> Any:
    if not isinstance(key, str):
        return key(batch)
    if isinstance(batch, Mapping):
        found = cast("Mapping[str, Any]", batch).get(key)
    else:
        found = getattr(batch, key, None)
    if found is None:
        kind = type(cast("Any", batch)).__name__
        has = f"with the keys {list(cast('Any', batch))}" if isinstance(batch, Mapping) else ""
        raise HarvestError(
            f"{what}={key!r} was asked for.",
            f"The batch, a {kind} {has}, has no such part."[:300],
            f"Name a part of it, or give {what}= a function of the batch.",
        )
    return found


def _misgiven(what: str, found: Any, wanted: str) -> HarvestError:
    return HarvestError(
        f"{what}= was to give {wanted}.",
        f"It gave a {type(found).__name__}.",
        "Name a part of the batch, or give a function of it that returns these.",
    )


def _device(model: nn.Module) -> torch.device | None:
    """Return the device to move batches to: the one device of the model, unless it is the CPU.

    Parameters that accelerate has offloaded are on the meta device; it moves the inputs itself.
    """
    devices = {p.device for p in model.parameters() if not p.is_meta} or {torch.device("cpu")}
    only = devices.pop()
    return None if devices or only.type == "cpu" else only


def rows_in(rows: Rows) -> int:
    """Return the number of rows of the first place: samples, or positions if these vary."""
    first = next(iter(rows.values()))
    return len(first) if isinstance(first, Tensor) else sum(map(len, first))


def sizes_in(batch: Any) -> dict[Path, int]:
    """Return the lengths of the tensors in a batch, one of which holds the samples."""
    return {path: tensor.size(0) for path, tensor in leaves(batch) if tensor.ndim}


def numbers_of(ids: Any) -> Sequence[int] | None:
    """Return the ids if they are integers from 0 on, as `TopK` needs them."""
    whole = ids is not None and all(isinstance(one, (int, np.integer)) and one >= 0 for one in ids)
    return ids if whole else None


@contextmanager
def _noted(batch: Any) -> Generator[None]:
    """Add a note to an error of the model that says how the batch was passed."""
    try:
        yield
    except TypeError as error:
        if isinstance(batch, (tuple, list)):
            error.add_note(
                "hookline: a batch that is a tuple or list is given to the model as its arguments; "
                "if it holds labels too, let the data give inputs alone, as (x for x, _ in loader) "
                "does, or pass forward=lambda model, batch: model(batch[0])."
            )
        elif isinstance(batch, Mapping):
            error.add_note(
                "hookline: a batch that is a dict is given to the model as its arguments by name; "
                "if it holds labels too, pass forward=lambda model, batch: model(batch['x'])."
            )
        raise
