"""Compare two models on the same batch, place by place.

- `compare(model_a, model_b, batch)`: find where two models diverge, and by how much → `Comparison`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.captures.capturing import capture
from hookline.comparisons.differences import (
    COARSE,
    Comparison,
    Difference,
    Tolerance,
    measure_difference,
    tolerance_of,
)
from hookline.comparisons.place_pairs import Renaming, check_mapping, pair_places, shorten
from hookline.engine.calls import Call
from hookline.engine.hooking import hook
from hookline.errors import BatchError, NeverFired
from hookline.isolation.batches import copy_batch
from hookline.isolation.isolated_runs import Mode, isolated
from hookline.isolation.model_calls import check_model, error_note, run_model
from hookline.isolation.random_state import fork_rng
from hookline.places.grammar import Place
from hookline.places.resolution import Where
from hookline.places.tree import walk
from hookline.torch_private import compiled_call, compiler_is_loaded, compiler_is_used
from hookline.values.nested import Path, leaves, map_leaves
from hookline.values.quantisation import dequantised
from hookline.values.snapshots import snapshot
from hookline.values.tables import describe

__all__ = ["compare"]

# By place of the second model and its call: place, call and value of the first. Where several
# places have one counterpart, as where the second model ties modules, calls meet in their order.
Kept = dict[Place, dict[int, tuple[Place, int, Any]]]
_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)
_COMPILED = (
    "is compiled, and something compiled has run in this process: only its output is compared, as "
    "no hook fires in a graph that may be there already. Compare before, or after "
    "torch.compiler.reset(), to see inside."
)
_WHOLE = (
    "is compiled: only its output is compared, as of a graph only outputs of modules, and those as "
    "a whole, can be seen."
)
_OWN = "raised in the second model; it can have a batch of its own, as in batch_b=x.bfloat16()."
_LAST = "Where a place has several calls, the last is compared: a compiled model keeps no other."


def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    where: Where = ("**", ""),
    *,
    mapping: Renaming | None = None,
    tolerance: Tolerance | None = None,
    batch_b: Any = None,
    mode: Mode | None = None,
) -> Comparison:
    """Run two models on the same batch, and find where they diverge and by how much.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> other.load_state_dict(model.state_dict())
    <All keys matched successfully>
    >>> bool(compare(model, other, torch.randn(3, 4)))
    True

    Args:
        model_a: the first model, to which errors are relative.
        model_b: the second.
        batch: a tensor is the model's argument, a tuple or list are its arguments, a dict its
            arguments by name; a function is called with each model.
        where: places of the first model: outputs, inputs, operations, parameters.
        mapping: the paths in the second model, where they differ: a dict of paths or of their
            beginnings, or a function of the path, which may give None to leave a place out.
        tolerance: the relative error that is no divergence: a number, or one for each dtype.
            By default it follows the coarser of the two dtypes, or the dtypes before it if these
            rounded: 1e-9 for float64, 1e-4 for float32, 0.01 for float16, 0.05 for bfloat16, 0.2
            for quantised values and outputs of quantised layers; and 0 for integers.
        batch_b: another batch for the second model.
        mode: "eval" or "train", the mode in which both run.

    Both run without gradients, with the same random numbers, and are afterwards as before. Numbers
    and numpy arrays in a value are compared like its tensors. The values of the first model are
    kept until they are compared; those of the second model are not kept.
    """
    for model in (model_a, model_b):
        check_model("compare", model)
    _check_tolerance(tolerance)
    check_mapping(model_a, model_b, mapping)
    pairs, comparison = pair_places(model_a, model_b, where, mapping)
    with isolated(model_a, model_b, mode=mode):
        kept: Kept = {}

        def keep(place: Place, index: int, value: Any) -> None:
            calls = kept.setdefault(pairs[place], {})
            calls[len(calls)] = place, index, map_leaves(_kept, value)

        first = "The first model" if model_a is not model_b else "The model"
        last = _is_compiled(model_a) or _is_compiled(model_b)
        _follow(model_a, copy_batch(batch), list(pairs), keep, first, comparison, last)
        meeting = _ValueMatcher(kept, tolerance)
        meeting.rounding = _rounding(model_a), _rounding(model_b)
        given = copy_batch(batch if batch_b is None else batch_b)
        places = list(dict.fromkeys([*kept, *pairs.values()]))  # as the first model has them
        with error_note(_OWN if batch_b is None else ""):
            _follow(model_b, given, places, meeting.meet, "The second model", comparison, last)
    meeting.finish(comparison)
    if not comparison.rows:
        raise BatchError(
            f"Two models were compared at {len(pairs)} places.",
            "At none of them both have a value.",
            "Let the batch run both models, and name places that are called.",
        )
    if comparison.equal and not meeting.elements:
        raise BatchError(
            "Two models were compared.",
            f"All {len(comparison.rows)} values that both have are empty.",
            "Give a batch with a sample in it.",
        )
    return comparison


def _rounding(model: nn.Module) -> set[str]:
    """Return the paths of layers that take and return floats, but compute in integers."""
    found = walk(model)
    return {path for path, one in found if "quantized" in type(one).__module__.split(".")}


def _kept(leaf: Any) -> Any:
    return snapshot(leaf) if isinstance(leaf, Tensor) else _measurable(leaf)


def _measurable(leaf: Any) -> Any:
    """Return a number or numpy array as a tensor: models may return those, too."""
    if isinstance(leaf, _NUMBERS):
        with suppress(TypeError, ValueError, RuntimeError):  # an array of objects, or too large
            return torch.tensor(leaf, device="cpu")
    return cast(Any, leaf)


def _check_tolerance(tolerance: Tolerance | None) -> None:
    """Raise unless a tolerance is a number, or numbers by dtype."""
    given = cast("Mapping[Any, Any]", tolerance if isinstance(tolerance, Mapping) else {})
    for dtype in given:
        if not isinstance(dtype, torch.dtype):
            raise BatchError(
                f"A tolerance for {dtype!r} was given.",
                f"It is a {type(dtype).__name__}, not a dtype.",
                "Name dtypes as in {torch.float32: 1e-3}.",
            )
    for number in given.values() if isinstance(tolerance, Mapping) else [tolerance]:
        if number is not None and not float(number) >= 0:
            raise ValueError(f"tolerance={number!r} was given. A relative error is 0 or more.")


# -- following a run ------------------------------------------------------------------------------


def _follow(
    model: nn.Module,
    batch: Any,
    places: list[Place],
    take: Callable[[Place, int, Any], None],
    name: str,
    comparison: Comparison,
    last: bool,
) -> None:
    """Run a model, and pass the values at places to a function, in the order of the calls.

    With `last`, only the last call of each place counts, as a graph keeps no other.
    """
    latest: dict[Place, Any] = {}
    several = False

    def look(value: Any, call: Call) -> None:
        nonlocal several
        if call.recomputed:
            return
        if not last:
            take(call.place, call.index, value)
            return
        several |= latest.pop(call.place, None) is not None
        latest[call.place] = map_leaves(_kept, value)

    with torch.no_grad(), fork_rng(model):
        if _is_compiled(model):
            _follow_compiled(model, batch, places, take, name, comparison)
            return
        with suppress(NeverFired):  # the comparison lists places that one model lacks
            with hook(model, places, look):
                run_model(model, batch)
    for place, value in latest.items():
        take(place, 0, value)
    if several:
        comparison.notes.append(_LAST)


def _is_compiled(model: nn.Module) -> bool:
    """Return True if the model, or a part of it, runs as a graph of torch.compile."""
    modules = [module for _, module in walk(model)]
    kinds = {type(module).__name__ for module in modules}
    called = any(compiled_call(module) is not None for module in modules)
    return compiler_is_loaded() and ("OptimizedModule" in kinds or called)


def _follow_compiled(
    model: nn.Module, batch: Any, places: list[Place], take: Any, name: str, comparison: Comparison
) -> None:
    """Do the same for a compiled model: pass the values of the graph, not of the eager model."""
    inside = all(p.port == "output" and not p.parts and not p.operation for p in places)
    if not (not compiler_is_used() and inside):
        take(_root(places, inside), 0, run_model(model, batch))
        comparison.notes.append(f"{name} {_COMPILED if inside else _WHOLE}")
        return
    capturing = capture(model, places, keep="last")
    with suppress(NeverFired):
        with capturing:
            run_model(model, batch)
    for place in [place for place in places if place in capturing.record]:
        take(place, 0, capturing.record[place])


def _root(places: list[Place], inside: bool) -> Place:
    for place in places:
        if shorten(place.path) == "" and place.port == "output" and not place.parts:
            return place
    raise BatchError(
        "A compiled model was to be compared at places that do not hold its output.",
        f"It {_COMPILED if inside else _WHOLE}",
        "Name '' in where=, too, or compare the model that was compiled.",
    )


class _ValueMatcher:
    """Compares the values of the second model with those of the first."""

    def __init__(self, kept: Kept, tolerance: Tolerance | None) -> None:
        self.kept, self.tolerance = kept, tolerance
        self.rows: dict[tuple[Place, Path], Difference] = {}
        self.coarsest = 0.0  # the tolerance of what was not the same so far
        self.rounding: tuple[set[str], set[str]] = set(), set()  # paths of quantised layers
        self.elements = 0  # numbers that were compared
        self.alone: Counter[Place] = Counter()  # calls that the first model did not make
        self.met: tuple[set[Place], set[Place]] = set(), set()  # places of both models
        self.only: tuple[dict[str, None], dict[str, None]] = {}, {}  # parts of one alone

    def meet(self, place: Place, index: int, value: Any) -> None:
        """Compare a value of the second model, and free that of the first."""
        if index not in self.kept.get(place, {}):
            self.alone[place] += 1
            return
        mine, call, kept = self.kept[place].pop(index)
        self.met[0].add(mine)
        self.met[1].add(place)
        first, second = dict(leaves(kept)), dict(leaves(map_leaves(_measurable, value)))
        apart = first and second and not first.keys() & second.keys()  # not to be compared
        for path in dict.fromkeys((*first, *second)):
            names = str(_part(mine, path)), str(_part(place, path))
            if not apart and (path in first) != (path in second):
                which = int(path in second)
                self.only[which][names[which] or "''"] = None
                continue
            found = _difference(first.get(path), second.get(path), self.tolerance)
            self.elements += first[path].numel() if path in first else 0
            found.place, found.place_b, found.call = *names, call
            # Results of rounded values are as coarse, whatever their dtype: as under autocast.
            # Whole numbers have no tolerance, and parameters are not computed.
            if self.tolerance is None and found.tolerance and place.port != "value":
                rounds = mine.path in self.rounding[0] or place.path in self.rounding[1]
                own = COARSE if rounds and place.port == "output" else 0
                found.tolerance = max(found.tolerance, self.coarsest, own)
                self.coarsest = found.tolerance if found.relative else self.coarsest
            self._add(mine, path, found)

    def _add(self, place: Place, path: Path, found: Difference) -> None:
        """Keep the worst call of each place, at the position where the place first diverged."""
        known = self.rows.get((place, path))
        if known is not None:
            found.calls = known.calls + 1
            if (found.diverges, found.relative) <= (known.diverges, known.relative):
                known.calls += 1
                return
            if found.diverges and not known.diverges:
                del self.rows[place, path]
        self.rows[place, path] = found

    def finish(self, comparison: Comparison) -> None:
        """Write the differences into a comparison, and remarks on values without a partner."""
        comparison.rows = list(self.rows.values())
        comparison.only_a += self.only[0]
        comparison.only_b += self.only[1]
        left = Counter(mine for calls in self.kept.values() for mine, _, _ in calls.values())
        sides = (left, comparison.only_a, "first"), (self.alone, comparison.only_b, "second")
        for (counts, only, name), met in zip(sides, self.met, strict=True):
            for place, count in counts.items():
                if place in met:
                    more = f"{count} time{'s' * (count != 1)} more in the {name} model"
                    comparison.notes.append(f"{str(place)!r} was called {more}")
                else:
                    only.append(str(place) or "''")


def _part(place: Place, path: Path) -> Place:
    return Place(place.path, place.port, place.parts + path, place.operation)


def _difference(a: Tensor | None, b: Tensor | None, tolerance: Tolerance | None) -> Difference:
    """Compare two tensors; the caller fills in the places."""
    shape = "" if a is None else describe(a).rpartition(" ")[0]
    dtypes = ["" if t is None else str(t.dtype).removeprefix("torch.") for t in (a, b)]
    far = float("inf")
    found = Difference("", "", shape, dtypes[0], dtypes[1], 1, 0, far, far, 0.0, 0.0)
    if a is None or b is None:
        found.remark = f"only in the {'second' if a is None else 'first'}"
        return found
    found.tolerance = tolerance_of(a, b, tolerance)
    first, second = _plain(a), _plain(b)
    if first.shape != second.shape:
        found.remark = f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
        return found
    if first.is_meta or second.is_meta:
        raise BatchError(
            "Two models were compared.",
            "One is on the meta device, where tensors have no values.",
            "Move it to a real device.",
        )
    found.error, found.relative, found.cosine, found.remark = measure_difference(first, second)
    return found


def _plain(tensor: Tensor) -> Tensor:
    """Return the values as a dense tensor on the CPU, where any two can be compared."""
    tensor = dequantised(tensor.detach())
    if tensor.is_nested:
        tensor = cast(Tensor, cast(Any, torch.nested).to_padded_tensor(tensor, 0.0))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_meta else tensor.cpu()
