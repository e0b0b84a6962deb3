"""Run the changes of a sweep on the corrupt batch, several in one forward.

- `SweepRunner`: runs a model with changes, and returns the metric of each
- `PatchJob`: one change to try, at a place and a position
- `one_number(value)`: a metric as a number
- `shape_of(value, place)`: the shape of the tensor at a place
- `not_called(places)`: the error for places that the corrupt batch does not reach
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.captures.record import Record
from hookline.comparisons.sweep_results import Sweep
from hookline.edits.changes import replace
from hookline.edits.editing import as_change, edit
from hookline.edits.ready_changes import patch
from hookline.engine.calls import Call
from hookline.engine.hooking import hook
from hookline.errors import BatchError, ChangeError, NeverFired
from hookline.isolation.batches import copy_batch
from hookline.isolation.model_calls import run_model
from hookline.isolation.random_state import fork_rng
from hookline.places.grammar import Place
from hookline.values.nested import Path, children, leaves, map_leaves, only_tensor, set_part
from hookline.values.snapshots import same_bits

__all__ = ["Metric", "PatchJob", "Shapes", "SweepRunner", "not_called", "one_number", "shape_of"]

Metric = Callable[[Any], Any]
Shapes = dict[Place, list[torch.Size]]  # one for each call
_Maker = Callable[[Place, Tensor, "int | None", Call], Tensor]  # makes new values for a part


class PatchJob(NamedTuple):
    """One change to try; without a position, at the whole value."""

    place: Place
    position: int | None


def one_number(value: Any) -> float:
    """Return a metric as a number, or raise an error.

    >>> one_number(torch.tensor([2.5]))
    2.5
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, (int, float)) or getattr(value, "shape", None) == ():  # as numpy's have
        return float(cast("Any", value))
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise BatchError(
        "A metric was to give one number.",
        f"It gave a {type(value).__name__}{shape}.",
        "Let it end with .mean() or .sum().",
    )


def shape_of(value: Any, place: Place) -> torch.Size:
    """Return the shape of the one tensor at a place."""
    tensor = only_tensor(value, f"The value at {str(place)!r}")[1]
    if tensor.is_nested:
        raise BatchError(
            f"A sweep over {str(place)!r} was asked for.",
            "There is a nested tensor, whose samples have shapes of their own.",
            "Let the model pad: nn.TransformerEncoder(..., enable_nested_tensor=False).",
        )
    return tensor.shape


def not_called(places: Iterable[Place]) -> BatchError:
    """Return the error for places that the corrupt batch does not reach."""
    shown = ", ".join(repr(str(place)) for place in places)
    return BatchError(
        f"Values at {shown} were to be changed.",
        "They are there in the clean run, and not in the corrupt one.",
        "Give batches with which the same modules are called, or name places that both have.",
    )


class SweepRunner:
    """Runs a model on the corrupt batch, with changes."""

    def __init__(
        self, model: nn.Module, batch: Any, metric: Metric, record: Record, change: Any, dim: int
    ) -> None:
        self.model, self.batch, self.metric = model, batch, metric
        self.record, self.dim, self.runs = record, dim, 0
        self.change = None
        if change is not patch:
            self.change = as_change(change() if isinstance(change, type) else change)
        self.copies, self.samples = 1, 0
        self.together: set[Place] = set()  # where several changes can be tried in one forward
        self.divided: set[Path] = set()  # the parts of the output that have rows of each copy
        self.output: Any = None  # that of the unchanged corrupt batch

    def baseline(self, places: list[Place]) -> float:
        """Return the metric of the corrupt batch without changes."""
        self.shapes = self._shapes(places, copy_batch(self.batch))
        return one_number(self.metric(self.output))

    def _shapes(self, places: list[Place], batch: Any) -> Shapes:
        """Run a batch without changes; return the shapes at places."""
        found: Shapes = {}

        def look(value: Any, call: Call) -> None:
            found.setdefault(call.place, []).append(shape_of(value, call.place))

        try:
            self.output = self._forward(batch, hook(self.model, places, look))
        except NeverFired as error:
            raise not_called(place for place in places if place not in found) from error
        return found

    def _forward(self, batch: Any, context: Any) -> Any:
        with torch.no_grad(), fork_rng(self.model), context:
            return run_model(self.model, batch)

    # -- several changes in one forward ---------------------------------------------------------

    def try_stacking(self, places: list[Place], copies: int, found: Sweep) -> None:
        """Find out where several changes can be tried in one forward.

        The copies must give the same output as the batch alone, a value must have a row for each
        sample, and a change of one copy must not reach another.
        """
        firsts = {tensor.shape[:1] for _, tensor in leaves(self.batch)}
        samples = next(iter(firsts), ())
        if copies < 2 or len(firsts) != 1 or not samples or callable(self.batch):
            return
        alone, self.samples = self.output, samples[0]
        self.copies = max(copies, 3)  # one then has others on both sides
        try:
            why = self._try_copies(places)
        except Exception as error:  # noqa: BLE001 - a model may refuse another size as it likes
            said = " ".join(str(error).split()) or type(error).__name__
            why = f"copies of the batch cannot be run together: {said:.80}"
        self.output, self.copies = alone, copies
        if why:
            found.notes.append(f"one change a forward: {why}")

    def _try_copies(self, places: list[Place]) -> str:
        """Run copies of the batch unchanged and with one disturbed; return why that is unsafe."""
        alone, numbers = self.output, range(self.copies)
        shapes = self._shapes(places, self._stacked(self.copies))
        self.runs += 1
        size = self.samples * self.copies
        self.divided = {path for path, t in leaves(self.output) if t.shape[:1] == (size,)}
        before = [self._share(number) for number in numbers]
        if not all(_same(share, alone, _alike) for share in before):
            return "copies of the batch in one forward do not give what it gives alone"
        rows = {p for p in places if self._has_rows(p, shapes[p], self.copies)}
        middle = self.copies // 2
        if rows:
            spots = [(middle, None)]
            changes = {place: self._changing(place, spots, self._disturbed) for place in rows}
            context = edit(self.model, cast("Any", changes))
            self.output = self._forward(self._stacked(self.copies), context)
            self.runs += 1
            moved = [n for n in numbers if not _same(self._share(n), before[n], same_bits)]
            if not moved:
                return "whether the samples of a batch mix could not be seen in the output"
            if moved != [middle]:
                return "the samples of a batch mix"
        self.together = rows
        return "" if len(rows) == len(places) else "the batch is not first at some places"

    def _disturbed(self, place: Place, part: Tensor, position: int | None, call: Call) -> Tensor:
        """Return other values that a model can take: in [0, 1] if they were, or valid indices."""
        if not part.is_floating_point():
            return self._new(place, part, position, call)
        numbers = torch.Generator(part.device).manual_seed(0)  # none of the model's own
        draw = torch.rand(part.shape, dtype=part.dtype, device=part.device, generator=numbers)
        return (part + 1) / 2 * draw

    def _stacked(self, copies: int) -> Any:
        def repeat(leaf: Any) -> Any:
            return torch.cat([leaf] * copies) if isinstance(leaf, Tensor) else leaf

        return map_leaves(repeat, copy_batch(self.batch))

    def _has_rows(self, place: Place, shapes: list[torch.Size], copies: int) -> bool:
        alone = all(shape[:1] == (self.samples,) for shape in self.shapes[place])
        return alone and all(shape[:1] == (self.samples * copies,) for shape in shapes)

    def _share(self, number: int) -> Any:
        """Return the output of one of the copies."""
        start = number * self.samples
        # Not by their sizes: with fewer copies, something else may be as large.
        divided = {id(tensor) for path, tensor in leaves(self.output) if path in self.divided}

        def part(leaf: Any) -> Any:
            return leaf[start : start + self.samples] if id(leaf) in divided else leaf

        return map_leaves(part, self.output)

    # -- running --------------------------------------------------------------------------------

    def chunks(self, jobs: list[PatchJob]) -> Iterator[list[PatchJob]]:
        """Yield the jobs in lists; each list runs in one forward."""
        together = [job for job in jobs if job.place in self.together]
        size = self.copies
        for start in range(0, len(together), size):
            yield together[start : start + size]
        yield from ([job] for job in jobs if job.place not in self.together)

    def run(self, jobs: list[PatchJob]) -> list[float]:
        """Return the metric with each of these changes."""
        self.runs += 1
        stacked = jobs[0].place in self.together
        self.copies = len(jobs)
        batch = self._stacked(len(jobs)) if stacked else copy_batch(self.batch)
        at: dict[Place, list[tuple[int | None, int | None]]] = {}
        for number, job in enumerate(jobs):
            at.setdefault(job.place, []).append((number if stacked else None, job.position))
        changes = {place: self._changing(place, spots, self._new) for place, spots in at.items()}
        self.output = self._forward(batch, edit(self.model, cast("Any", changes)))
        if not stacked:
            return [one_number(self.metric(self.output))]
        return [one_number(self.metric(self._share(number))) for number in range(len(jobs))]

    def _changing(
        self, place: Place, spots: Sequence[tuple[int | None, int | None]], new: _Maker
    ) -> Callable[[Any, Call], Any]:
        """Return the function of an edit that puts new values in at rows and positions."""

        def changed(value: Any, call: Call) -> Any:
            path, tensor = only_tensor(value, f"The value at {str(place)!r}")
            tensor = tensor.clone()
            for number, position in spots:
                rows = slice(None)
                if number is not None:
                    rows = slice(number * self.samples, (number + 1) * self.samples)
                part = tensor[rows]
                if position is not None:
                    part = part.narrow(self.dim, position, 1)
                part.copy_(new(place, part.clone(), position, call))
            return set_part(value, path, tensor)

        return changed

    def _new(self, place: Place, part: Tensor, position: int | None, call: Call) -> Tensor:
        """Return what the change makes of a part of a value."""
        if self.change is not None:
            return cast(Tensor, self.change.apply_checked(part, call))
        source = only_tensor(self.record.of_call(place, call.index))[1]
        source = source if position is None else source.narrow(self.dim, position, 1)
        try:
            return cast(Tensor, replace(source).apply_checked(part, call))
        except ChangeError:
            shapes = f"There it has the shape {tuple(source.shape)}, here {tuple(part.shape)}."
            raise ChangeError(
                f"At {str(place)!r}, what the clean batch gave was to be put into the other.",
                shapes,
                "Give two batches of one shape, padded to the same length.",
            ) from None


def _numbers(value: Any, above: tuple[int, ...] = ()) -> list[Any]:
    """Return the numbers, texts and arrays in an output, which all copies share."""
    if isinstance(value, (np.ndarray, np.generic)):
        return [value.shape, value.tobytes()]
    if isinstance(value, (bool, int, float, complex, str)):
        return [value]
    if isinstance(value, Tensor) or id(value) in above:
        return []
    inside = children(value) or ()
    return [found for _, item in inside for found in _numbers(item, (*above, id(value)))]


def _same(one: Any, other: Any, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Return True if two outputs hold the same, for tensors by a function of two of them."""
    first, second = dict(leaves(one)), dict(leaves(other))
    if first.keys() != second.keys() or _numbers(one) != _numbers(other):
        return False
    return all(same(tensor, second[path]) for path, tensor in first.items())


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same but for rounding."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    top = float(other.detach().abs().nan_to_num().max())
    room = 100 * torch.finfo(one.dtype).eps * max(top, 1e-6)
    return torch.allclose(one, other, rtol=1e-3, atol=room, equal_nan=True)
