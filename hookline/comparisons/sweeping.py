"""Find the places and positions that matter to a metric: activation patching, exact or approximate.

- `sweep(model, clean, corrupt, where, metric)`: change one place after the other → `Sweep`
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.captures.capturing import capture
from hookline.captures.record import Record
from hookline.comparisons.sweep_results import Sweep
from hookline.comparisons.sweep_runs import (
    Metric,
    PatchJob,
    Shapes,
    SweepRunner,
    not_called,
    one_number,
    shape_of,
)
from hookline.edits.changes import Change
from hookline.edits.ready_changes import patch
from hookline.engine.context import reusable
from hookline.engine.gradients import NONE_CAME
from hookline.errors import BatchError, GradientNotAvailable, NeverFired, PlaceError
from hookline.isolation.backward import (
    backward_without_grads,
    check_differentiable,
    copy_with_leaves,
    grad_mode,
    is_differentiable,
)
from hookline.isolation.batches import copy_batch
from hookline.isolation.isolated_runs import Mode, isolated
from hookline.isolation.model_calls import check_model, run_model
from hookline.isolation.random_state import fork_rng
from hookline.places.grammar import Place
from hookline.places.resolution import Where, resolve
from hookline.selecting import select
from hookline.values.nested import only_tensor

__all__ = ["sweep"]

Tell = Callable[[int, int], None]
Positions = Literal["all"] | Sequence[int] | None


def sweep(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    where: Where,
    metric: Metric,
    *,
    change: type[patch] | Change | Callable[..., Any] = patch,
    positions: Positions = None,
    dim: int = 1,
    batch_size: int = 16,
    approximate: bool = False,
    progress: bool | Tell = True,
    mode: Mode | None = None,
) -> Sweep:
    """Run a model on a corrupt batch with one value at a time from the clean run, and measure a
    metric.

    >>> model = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Identity())
    >>> found = sweep(model, torch.tensor([[5.0]]), torch.tensor([[-3.0]]), "*", torch.sum)
    >>> found.corrupt, found.clean, [effect.value for effect in found]
    (0.0, 5.0, [5.0, 5.0, 5.0])

    Args:
        model: any module. It runs in the mode in which it is.
        clean: the batch from which values are taken: a tensor is the model's argument, a tuple
            or list are its arguments, a dict its arguments by name.
        corrupt: the batch on which the model runs.
        where: places, one tensor at each.
        metric: a function of the model's output that returns one number.
        change: the change at each place: `patch`, which puts in the value of the clean run, or any
            other change, such as `hookline.zero()` to ablate.
        positions: None changes whole values, "all" one position after the other, a list some.
        dim: the dimension of the positions.
        batch_size: how many changes to try in one forward, on concatenated copies of the corrupt
            batch, if that is safe: the samples of a batch must not mix. Two forwards test this
            first; if it is not safe, each change gets a forward of its own.
        approximate: estimate all changes with one backward, as (clean - corrupt) · gradient, summed
            over the calls of a place. A place without a gradient at one of its calls is left out,
            with a note; if it was named itself, that is an error.
        progress: whether to show a bar, if tqdm is installed; or a function of (done, total).
        mode: "eval" or "train", the mode in which the model runs.

    Afterwards the model is as before. All runs draw the same random numbers.
    """
    check_model("sweep", model)
    where, positions = reusable(where), _settled(positions)
    _check(select(model, where))
    if approximate and change is not patch:
        raise BatchError(
            f"An approximate sweep of {change!r} was asked for.",
            "Only what the clean run had can be estimated by its gradient.",
            "Leave out change= or approximate=.",
        )
    with isolated(model, mode=mode):
        with torch.no_grad(), fork_rng(model):
            with capture(model, where, detach=True) as record:
                output = run_model(model, copy_batch(clean))
        places = record.places()
        reference = one_number(metric(output))
        shapes: Shapes = {}
        for place in places:
            calls = range(len(record.calls(place)))
            shapes[place] = [shape_of(record[place, n], place) for n in calls]
        if approximate:
            jobs = _jobs(shapes, positions, dim)
            return _estimated(model, corrupt, metric, record, reference, jobs, dim, where)
        runner = SweepRunner(model, corrupt, metric, record, change, dim)
        found = Sweep(reference, runner.baseline(places), approximate=False)
        jobs = _jobs({place: runner.shapes[place] for place in places}, positions, dim)
        if change is patch:
            _check_clean(shapes, runner.shapes, positions, dim, found)
        runner.try_stacking(places, min(batch_size, len(jobs)), found)
        with _bar(progress, len(jobs)) as advance:
            for chunk in runner.chunks(jobs):
                for job, value in zip(chunk, runner.run(chunk), strict=True):
                    found.add(str(job.place), job.position, value - found.corrupt)
                advance(len(chunk))
        found.runs = runner.runs
        order = {job: n for n, job in enumerate(jobs)}
        found.rows.sort(key=lambda row: order[PatchJob(cast(Place, row.place), row.position)])
        return found


def _settled(positions: Positions) -> Positions:
    """Return positions as plain numbers in a list, or raise an error."""
    if positions is None or (isinstance(positions, str) and positions == "all"):
        return positions
    try:
        found = [operator.index(position) for position in cast("Sequence[Any]", positions)]
    except TypeError as error:
        raise TypeError(
            f"positions={positions!r} was given. Give 'all', a list of whole numbers, or None."
        ) from error
    if not found:
        raise ValueError("positions= was given, and empty. Leave it out to change whole values.")
    return found


def _check(places: list[Place]) -> None:
    for place in places:
        if place.port not in ("output", "input", "inputs"):
            raise PlaceError(
                f"A sweep over {str(place)!r} was asked for.",
                "Values of calls are put in, not parameters or gradients.",
                "Name outputs or inputs of modules, or operations.",
            )


def _jobs(shapes: Shapes, positions: Positions, dim: int) -> list[PatchJob]:
    """Return all changes to try; raise if a place has no such positions."""
    jobs: list[PatchJob] = []
    for place, calls in shapes.items():
        if positions is None:
            jobs.append(PatchJob(place, None))
            continue
        sizes = [_size(shape, dim) for shape in calls]
        size, most = min(sizes), max(sizes)
        wanted = range(most) if positions == "all" else positions
        # Counted from the end, a position is another one in a call of another length.
        if not size or not all((-size if size == most else 0) <= p < size for p in wanted):
            held = " and ".join(str(tuple(shape)) for shape in dict.fromkeys(calls))
            raise BatchError(
                f"The positions {positions!r} along dim={dim} were asked for.",
                f"The value at {str(place)!r} has the shape {held}.",
                "Give positions that all places and calls have, or another dim=.",
            )
        jobs += [PatchJob(place, p % size) for p in wanted]
    return jobs


def _size(shape: Sequence[int], dim: int) -> int:
    return shape[dim] if -len(shape) <= dim < len(shape) else 0


def _check_clean(
    clean: Shapes, corrupt: Shapes, positions: Positions, dim: int, found: Sweep
) -> None:
    """Raise if clean values lack positions of the corrupt ones; note other shapes."""
    for place, shapes in clean.items():
        _check_calls(place, len(shapes), len(corrupt[place]))
    unlike = [
        (place, tuple(old), tuple(new))
        for place in clean
        for old, new in zip(clean[place], corrupt[place], strict=True)
        if old != new
    ]
    for place, old, new in unlike:
        size = _size(old, dim)
        if positions is None or size == _size(new, dim):
            continue
        if positions == "all" or not all(0 <= p < size for p in positions):
            raise BatchError(
                f"The positions {positions!r} along dim={dim} were asked for.",
                f"The value at {str(place)!r} has the shape {old} in the clean run, {new} in the "
                "corrupt one.",
                "Give batches of the same shape, or positions that both have, counted from 0.",
            )
    for place, old, new in unlike[:1]:
        found.notes.append(
            f"clean and corrupt values differ in shape: {old} and {new} at {str(place)!r}"
        )


def _check_calls(place: Place, clean: int, corrupt: int) -> None:
    if clean != corrupt:
        raise BatchError(
            f"The clean value at {str(place)!r} was to be put in.",
            f"It was called {clean} times in the clean run, {corrupt} times in the corrupt one.",
            "Give batches with which it is called as often.",
        )


def _estimated(
    model: nn.Module, batch: Any, metric: Metric, record: Record, reference: float,
    jobs: list[PatchJob], dim: int, where: Where,
) -> Sweep:  # fmt: skip
    """Estimate all changes at once: gradient of the metric times distance to the clean values."""
    check_differentiable(model.parameters())
    places = list(dict.fromkeys(job.place for job in jobs))
    slopes = {place: _gradient_place(place) for place in places}
    for parameter in filter(is_differentiable, model.parameters()):
        parameter.requires_grad_()  # also in a frozen model; put back afterwards
    try:
        with capture(model, places, list(slopes.values()), detach=True) as corrupt:
            value = _pulled_back(model, batch, metric)
    except NeverFired as error:
        held = error.record or ()
        raise not_called(place for place in places if place not in held) from error
    found = Sweep(reference, value, approximate=True)
    literal = {t.place for r in resolve(model, (where,)) if r.literal for t in r.targets}
    missing: dict[str, list[str]] = {}  # by reason
    for place in places:
        try:
            _add_estimates(found, place, slopes[place], record, corrupt, jobs, dim)
        except GradientNotAvailable as error:
            if place in literal or (place == places[-1] and not found.rows):
                raise
            missing.setdefault(_reason(error), []).append(str(place))
    for reason, of_it in missing.items():
        shown = ", ".join(map(repr, of_it[:6])) + ", …" * (len(of_it) > 6)
        found.notes.append(f"no estimate at {shown}: {reason}")
    often = [place for place in places if len(corrupt.calls(place)) > 1]
    if often:
        found.notes.append(
            f"{str(often[0])!r} is called {len(corrupt.calls(often[0]))} times: an estimate is the "
            "sum over the calls, and what flows from one into another counts again"
        )
    return found


def _reason(error: GradientNotAvailable) -> str:
    """Return why there is no estimate at a place."""
    found = error.found.rstrip(".")
    why = "" if NONE_CAME[0] in error.found else f" ({found})"  # which speaks of a `with`
    return f"no gradient of the metric is known there{why}"


def _pulled_back(model: nn.Module, batch: Any, metric: Metric) -> float:
    """Return the metric of a batch, after a backward from it."""
    with grad_mode(True), fork_rng(model):
        given, _ = copy_with_leaves(copy_batch(batch), is_differentiable)
        result = metric(run_model(model, given))
        value = one_number(result)
        if not isinstance(result, Tensor) or not result.requires_grad:
            raise BatchError(
                "An approximate sweep was asked for.",
                "The metric has no gradient.",
                "Let it return a tensor, made of the output by operations of torch alone.",
            )
        backward_without_grads([result])
    return value


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in complex numbers of as many digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def _gradient_place(place: Place) -> Place:
    port = {"output": "grad_output", "input": "grad_input", "inputs": "grad_inputs"}[place.port]
    return Place(place.path, port, place.parts, place.operation)


def _add_estimates(
    found: Sweep, place: Place, slope: Place, record: Record, corrupt: Record, jobs: list[PatchJob],
    dim: int,
) -> None:  # fmt: skip
    """Add the estimates at one place, summed over its calls and all other dimensions."""
    steps: list[Tensor] = []  # of each call
    values = corrupt.calls(place)
    # One by one: a call without a gradient raises the reason, where `calls` has None.
    grads = [corrupt[slope, n] for n in range(len(corrupt.calls(slope)))]
    _check_calls(place, len(record.calls(place)), len(values))
    for clean, value, gradient in zip(record.calls(place), values, grads, strict=True):
        goal, now = only_tensor(clean)[1], only_tensor(value)[1]
        if goal.shape != now.shape:
            raise BatchError(
                f"The clean value at {str(place)!r} was to be put in.",
                f"Its shape is {tuple(goal.shape)}, that of the corrupt one {tuple(now.shape)}.",
                "Give batches of the same shape.",
            )
        factor = _wide(only_tensor(gradient)[1]).conj()
        steps.append(((_wide(goal) - _wide(now)) * factor).real)
    for job in jobs:
        if job.place == place:
            parts = steps
            if job.position is not None:
                parts = [step.select(dim, job.position) for step in steps]
            found.add(str(place), job.position, sum(float(part.sum()) for part in parts))


@contextmanager
def _bar(progress: bool | Tell, total: int) -> Generator[Callable[[int], None]]:
    """Yield a function to report progress to: a bar of tqdm, or the user's function."""
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if callable(progress):
            progress(done, total)

    tqdm: Any = None
    if progress is True:
        with suppress(ImportError):
            from tqdm.auto import tqdm
    if tqdm is None:
        yield tell
        return
    with tqdm(total=total, desc="sweep", leave=False, disable=None) as bar:
        yield bar.update
