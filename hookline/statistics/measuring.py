"""Measure statistics of the values at places, over a whole data set, in one pass.

- `measure(model, where, statistics=[...], data=loader)`: run the model and measure
- `Measurements`: the results by place; they can be merged, saved and shown as a table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from hookline.captures.capturing import capture
from hookline.engine.calls import Call, key_of
from hookline.engine.context import reusable, see_own_calls, targets_of
from hookline.engine.hooking import hook
from hookline.engine.lifecycle import Entering, enter, leave, never_forgotten
from hookline.engine.slices import Misfit, take
from hookline.errors import NeverFired, NotCaptured, NotHookable, StatisticsError, warn_outside
from hookline.isolation.batches import check_mask_name, is_series, not_series_error
from hookline.isolation.early_exit import EarlyExit
from hookline.isolation.model_calls import call_model
from hookline.places.grammar import is_gradient
from hookline.places.resolution import Target, Where, resolve
from hookline.places.tree import first_names
from hookline.selecting import held_as
from hookline.statistics.all_statistics import Statistic, by_name, statistic_from, warn_of_images
from hookline.statistics.masks import NamedMask
from hookline.statistics.sample_numbers import SampleNumbers
from hookline.statistics.value_observer import ValueObserver
from hookline.storage import json_safetensors
from hookline.values.nested import only_tensor
from hookline.values.tables import as_html, as_text

__all__ = ["Measurements", "measure"]

Statistics = Sequence[Statistic] | Mapping[str, Statistic]
FromBatch = Callable[[Any], Any]


class Measurements(Mapping[str, Mapping[str, Any]]):
    """The results: place → name of a statistic → its current result.

    >>> from hookline import Mean, Sparsity
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> with measure(model, "*", statistics=[Mean(dim=None), Sparsity(dim=None)]) as found:
    ...     _ = model(torch.tensor([[-1.0, 1.0], [3.0, 5.0]]))
    >>> found["1"]["sparsity"]
    tensor(0.2500, dtype=torch.float64)
    >>> found
    Measurements at 2 places
      place  calls  mean  sparsity
      0      1      2     0
      1      1      2.25  0.25

    `found.statistics[place][name]` is the statistic itself, with its count and state.
    """

    def __init__(self) -> None:
        self.statistics: dict[str, dict[str, Statistic]] = {}
        self.calls: dict[str, int] = {}

    def __getitem__(self, place: str) -> dict[str, Any]:
        known = held_as(place, self.statistics)
        if known is None:
            held = ", ".join(map(repr, list(self.statistics)[:6]))
            raise NotCaptured(
                f"What was measured at {place!r} was asked for.",
                f"There is something at {held or 'no place'}.",
                "Measure that place, or write it as it is listed.",
            )
        return {name: one.result for name, one in self.statistics[known].items()}

    def __contains__(self, place: object) -> bool:
        return held_as(place, self.statistics) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the results at a place, or the default."""
        return default if held_as(key, self.statistics) is None else self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def merge(self, other: Measurements) -> Measurements:
        """Add the results of another run, place by place; the other stays as it is.

        If something does not fit, nothing is added.
        """
        joined: dict[str, dict[str, Statistic]] = {}
        for place, theirs in other.statistics.items():
            own = self.statistics.get(place) or {n: one.fresh() for n, one in theirs.items()}
            if own.keys() != theirs.keys():
                raise StatisticsError(
                    f"Measurements at {place!r} were to be merged.",
                    f"One has {', '.join(own)}, the other {', '.join(theirs)}.",
                    "Measure the same statistics in both runs.",
                )
            joined[place] = {n: own[n].fresh().merge(own[n]).merge(theirs[n]) for n in own}
        for place, both in joined.items():
            for name, one in self.statistics.setdefault(place, both).items():
                one.load_state(dict(both[name].state))
            self.calls[place] = self.calls.get(place, 0) + other.calls[place]
        return self

    def save(self, folder: str | Path) -> Path:
        """Write `measurements.json` and `measurements.safetensors` into a folder."""
        content: list[Any] = []
        tensors: dict[str, Tensor] = {}
        for place, named in self.statistics.items():
            row: dict[str, Any] = {"place": str(place), "calls": self.calls[place]}
            row["statistics"] = {name: one.to_dict() for name, one in named.items()}
            for name, one in named.items():
                for key, tensor in one.state.items():
                    tensors[f"{len(content)}/{name}/{key}"] = tensor
            content.append(row)
        return json_safetensors.write(folder, "measurements", {"places": content}, tensors)

    @classmethod
    def load(cls, folder: str | Path) -> Measurements:
        """Read what `save` wrote."""
        content, tensors = json_safetensors.read(folder, "measurements", StatisticsError)
        made, source = cls(), f"{folder}"
        states: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            start, _, key = path.rpartition("/")  # a name may hold slashes
            states.setdefault(start, {})[key] = tensor
        try:
            for number, row in enumerate(content["places"]):
                place, calls, named = row["place"], row["calls"], row["statistics"]
                if type(place) is not str or type(calls) is not int:
                    raise TypeError("a place is text, and its calls are counted")
                own: dict[str, Statistic] = {}
                for name, saved in named.items():
                    state = states.pop(f"{number}/{name}", {})
                    own[name] = statistic_from(dict(saved), state, source)
                made.statistics[place], made.calls[place] = own, calls
            if states:
                raise ValueError(f"there are tensors of {min(states)!r}, which are not listed")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, StatisticsError):
                raise
            raise StatisticsError(
                f"Measurements were to be read from {source!r}.",
                f"They are not spelled as such: {error!r:.120}.",
                "Give a folder that was written by .save(folder).",
            ) from None
        return made

    def __repr__(self) -> str:
        title, rows = self._table()
        return as_text(title, rows) if len(rows) > 1 else title

    def _repr_html_(self) -> str:
        return as_html(*self._table(), self)

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        names = list(dict.fromkeys(name for named in self.statistics.values() for name in named))
        rows: list[tuple[str, ...]] = [("place", "calls", *names)]
        for place, named in self.statistics.items():
            cells = [_show(named[name]) if name in named else "" for name in names]
            rows.append((str(place) or "''", str(self.calls[place]), *cells))
        return f"Measurements at {len(self)} place{'s' * (len(self) != 1)}", rows


def _show(one: Statistic) -> str:
    """Return the result in a few words: a number, or the least and greatest over the channels."""
    result = one.result
    first = result if isinstance(result, Tensor) else cast(Tensor, result[0])
    label = "" if isinstance(result, Tensor) else f"{type(result)._fields[0]} "
    if first.numel() == 1:
        return f"{label}{first.item():.4g}"
    good = first[~first.isnan()]
    ends = f"{good.min().item():.4g} … {good.max().item():.4g} " if good.numel() else ""
    return f"{label}{ends}{tuple(first.shape)}"


def _nothing(value: Any) -> None:
    """Return None, for values that only have to come."""


class _Measuring(Entering):
    """Measures the values at places, inside a `with` or from attach to remove."""

    _verb = "measure"
    _gives, _kept_as = "measurements", "found"

    def __init__(
        self, model: nn.Module, where: Where, statistics: Statistics, mask: Any, at: Any
    ) -> None:
        self._kinds, self._mask, self._at = by_name(statistics), mask, at
        check_mask_name(mask, StatisticsError)
        self._wheres = (reusable(where),)
        self.found = Measurements()
        self.ids: Any = None
        self.numbers = SampleNumbers()  # numbers samples where there are no ids
        self._stopping, self._stops = EarlyExit(model), False
        super().__init__(model)

    def _start(self, attached: bool) -> None:
        self.found = Measurements()
        self.batch_mask: Any = None
        self._named: NamedMask | None = None
        self._hooks: list[hook] = []
        self._silent: dict[Any, Target] = {}
        self._observer = ValueObserver(self._model, self._wheres[0], self._take)
        parts: list[hook] = [self._observer]
        if isinstance(self._mask, str):  # first: the model's own input may be measured
            self._named = NamedMask(self._mask)
            parts.insert(0, hook(self._model, ":inputs", self._named.begin))
        with suppress(NotHookable):  # then only the end shows what did not happen
            resolve(self._model, ("",))
            # Last, so that the places of the model's own output have been seen when it is called.
            parts.append(hook(self._model, "", self._one_batch))
        for part in parts:
            never_forgotten(part)  # should an earlier one fail
            see_own_calls(part)
        for part in parts:
            enter(part, attached)
            self._hooks.append(part)
        self._silent = {target.key: target for target in targets_of(self._observer)}
        self._asked = len(self._silent)  # how many places there are

    def _stop(self) -> None:
        for part in reversed(self._hooks):
            leave(part)

    if TYPE_CHECKING:

        def __enter__(self) -> Measurements: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def _result(self) -> Measurements:
        return self.found

    def _verify(self) -> None:
        self.warn_of_silent()

    def _take(self, value: Any, call: Call) -> None:
        if call.recomputed:  # it has been measured already
            return
        place = call.place
        if self._at is not None:
            try:
                value = take(value, self._at)
            except Misfit as error:
                raise error.at_place(str(place), "measured") from error.__cause__
        _, tensor = only_tensor(value, lambda: f"The value at {str(place)!r}")
        if place not in self.found.statistics:
            self.found.statistics[place] = {k: one.fresh() for k, one in self._kinds.items()}
            self.found.calls[place] = 0
            self._silent.pop(key_of(call), None)
            warn_of_images(place, tensor, self._kinds)
        mask = self.batch_mask if self._mask is None else self._mask
        mask = mask if self._named is None else self._named.at(place)
        # As in a harvest, a number for each sample is one channel; parameters have no samples.
        single = tensor.ndim == 1 and place.port not in ("value", "grad")
        for one in self.found.statistics[place].values():
            lone = single and one.dim in (-1, 1)
            rows = tensor[:, None] if lone else tensor
            ids = self.numbers.at(place, one, rows) if self.ids is None else self.ids
            one.update(rows, mask, ids)
        self.found.calls[place] += 1

    def measure_all(
        self, data: Iterable[Any], ids: FromBatch | None, mask: FromBatch | None, stop: Any
    ) -> Measurements:
        """Measure all batches; an exception has what was measured before it as `measured`."""
        batch: Any = None
        with self as found:
            try:
                empty = True
                for batch in data:
                    empty = False
                    self.numbers.begin(batch)
                    self.ids = None if ids is None else _given("ids", ids, batch)
                    self.batch_mask = None if mask is None else _given("mask", mask, batch)
                    with torch.no_grad():
                        if stop:
                            self.run(batch)
                        else:
                            call_model(self._model, batch)
                    self.warn_of_silent()
                if empty:
                    raise _no_batches()
            except BaseException as error:
                if type(error) is TypeError and isinstance(batch, (tuple, list)):
                    error.add_note(
                        "hookline: a batch that is a tuple or list is given to the model as its "
                        "arguments; if it holds labels too, pass (x for x, y in loader)."
                    )
                with suppress(AttributeError, TypeError):
                    cast("Any", error).measured = found
                raise
        return found

    def run(self, batch: Any) -> None:
        """Run the model on a batch, as far as there is something to measure.

        The first forward runs to its end. If each place had one call in it, the other forwards end
        after the last of these calls.
        """
        if not self.found.calls:
            with self._stopping.first():
                call_model(self._model, batch)
            once = [*self.found.calls.values()] == [1] * self._asked
            self._stops = once and self._stopping.safe
        elif self._stops:
            self._run_until_all_came(batch)
        else:
            call_model(self._model, batch)

    def _run_until_all_came(self, batch: Any) -> None:
        # Entered last, so that what is measured at a place was measured when this sees it.
        places = list(self.found.calls)
        capturing = capture(self._model, places, keep="first", transform=_nothing, stop=True)
        try:
            with capturing:
                call_model(self._model, batch)
        except NeverFired as error:
            # A batch may be without calls that others had; a stop that was caught is an error.
            if error.record is not capturing.record or not capturing.record.unfired():
                raise
        self._end_forward()

    def _end_forward(self) -> None:
        if self._named is not None:
            self._named.end()

    def _one_batch(self, value: Any, call: Call) -> None:
        self._end_forward()
        # Gradients come only after the forward; at the end they are looked at, too.
        if not call.recomputed and call.index == 0:
            self.warn_of_silent(gradients=False)

    def warn_of_silent(self, gradients: bool = True) -> None:
        """Warn, once, of the places that had no value so far."""
        silent = [t for t in self._silent.values() if gradients or not is_gradient(t.port)]
        for target in silent:
            del self._silent[target.key]
        silent = [target for target in silent if target.key not in self._observer.told]
        if silent:
            names = first_names(self._model)
            places = [target.place_among(names) for target in silent[:6]]
            shown = ", ".join(map(repr, places)) + ", …" * (len(silent) > 6)
            warn_outside(
                f"Nothing happened at {shown} in the first batch: what is measured lacks "
                f"{'it' if len(silent) == 1 else 'them'} so far. hookline.capture says why."
            )


@overload
def measure(
    model: nn.Module,
    where: Where,
    *,
    statistics: Statistics,
    data: Iterable[Any],
    mask: Tensor | str | FromBatch | None = None,
    at: Any = None,
    ids: FromBatch | None = None,
    stop: Literal["auto", False] = "auto",
) -> Measurements: ...


@overload
def measure(
    model: nn.Module,
    where: Where,
    *,
    statistics: Statistics,
    data: None = None,
    mask: Tensor | str | None = None,
    at: Any = None,
) -> _Measuring: ...


def measure(
    model: nn.Module,
    where: Where,
    *,
    statistics: Statistics,
    data: Iterable[Any] | None = None,
    mask: Tensor | str | FromBatch | None = None,
    at: Any = None,
    ids: FromBatch | None = None,
    stop: Literal["auto", False] = "auto",
) -> Measurements | _Measuring:
    """Measure the values at places, in constant memory: over `data` at once, or inside a `with`.

    >>> from hookline import Mean
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> batches = [torch.tensor([[-1.0, 1.0]]), torch.tensor([[3.0, 5.0]])]
    >>> measure(model, "1", statistics=[Mean()], data=batches)["1"]["mean"]
    tensor([1.5000, 3.0000], dtype=torch.float64)

    Args:
        model: any module. It runs in the mode in which it is, without gradients.
        where: places, or anything else that `select` takes.
        statistics: `Mean()`, `TopK(k=5)` and so on, or a dict of them by name. They are not
            changed: each place has its own.
        data: batches, as a loader yields them: a tensor is the model's argument, a tuple or list
            are its arguments, a dict its arguments by name. Without it, this is a context whose
            `with` returns the `Measurements`; run the model, and backwards, inside, in its thread.
        mask: where values count, nonzero for tokens and zero for padding: the name of an argument
            of the model such as `"attention_mask"`, a tensor, or a function of the batch.
        at: measure only this slice of each value, or the result of a function of it.
        ids: a function of the batch that returns an integer for each sample, for `TopK`. By default
            samples are numbered in the order of the data, if the tensors of a batch agree in their
            first size; values must then have samples in their first dimension, or are refused.
        stop: "auto" ends each forward after the last place, if that is safe; False never does,
            as needed for a model whose number of calls depends on the batch.

    A value of one dimension, as from `at=np.s_[:, 3]`, has a number for each sample: one channel.
    With `dim=0` these are channels, as in a model that runs without a batch; those of parameters
    and their gradients always are.

    With `stop="auto"` the first batch runs through the whole model. If each place has one call in
    it, the forwards of the other batches end after the last of these calls; a place that a later
    batch calls again after that is not measured again. Forwards run to their end if the rest draws
    random numbers or changes a buffer, as dropout and batch norm do in training mode. Inside a
    `with`, all forwards run to their end.

    Inside a `with`, gradients are read as `capture` reads them, without changing the model. A
    gradient that cannot be told apart from others is not measured, with a warning.

    A place without a value in the first batch gives a warning; there is no error at the end. If a
    later batch fails, the exception has the results until then as `measured`.
    """
    if stop not in ("auto", False):
        raise ValueError(f"stop={stop!r} was asked for. It is 'auto' or False.")
    of_batch = mask if callable(mask) and not isinstance(mask, Tensor) else None
    if data is None:
        if ids is not None or of_batch is not None:
            raise StatisticsError(
                "measure was given a function of the batch, and no data.",
                "Inside a `with` it sees no batches.",
                "Give data=, or mask= the name of an argument of the model.",
            )
        return _Measuring(model, where, statistics, mask, at)
    if not is_series(data):
        raise not_series_error(data, StatisticsError)
    where = reusable(where)
    requests = resolve(model, (where,))
    if any(is_gradient(target.port) for request in requests for target in request.targets):
        raise StatisticsError(
            "measure was given data and gradient places.",
            "Over data only the forward runs, so that none would arrive.",
            "Use `with hookline.measure(...) as found:` and run the backward inside.",
        )
    measuring = _Measuring(model, where, statistics, None if of_batch else mask, at)
    return measuring.measure_all(data, ids, of_batch, stop)


def _no_batches() -> StatisticsError:
    why = "It has no batches; a generator that was gone through before has none left."
    return StatisticsError("Data was to be measured.", why, "Give a list or a loader.")


def _given(what: str, function: FromBatch, batch: Any) -> Any:
    """Return the result of a function of a batch; None would mean that padding is measured."""
    found = function(batch)
    if found is None:
        asked = f"{what}= was to give something for each batch."
        remedy = "Look up a part that the batch has; where everything counts, give a mask of ones."
        raise StatisticsError(asked, "It gave None for this one.", remedy)
    return found
