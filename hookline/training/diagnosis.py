"""Find what is wrong with a training, from its measurements.

- `Diagnosis`: takes one measured step after the other and returns findings, each once

Values that are not finite are reported at once. Everything else must hold at several measured steps
in a row: one step says little, and much that looks wrong at first (layers that begin with zeros, a
learning rate that is warmed up) is fine later. The limits are far from the values of healthy
trainings; `docs/watching.md` lists them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hookline.torch_private import parameters_of
from hookline.training.findings import Finding, Severity
from hookline.training.run_files import STATISTICS
from hookline.training.step_measurement import MeasuredRows, StepMeasurement
from hookline.training.streaks import DeadUnits, Streaks
from hookline.training.tensor_moments import Moments
from hookline.training.vanishing_gradients import advise_on, judge_depths

if TYPE_CHECKING:
    from hookline.training.writers import Measured

__all__ = ["Diagnosis"]

PATIENCE = 3  # measured steps in a row
SPAN = 5  # steps, if all are measured: layers that begin with zeros come to life one by one
EXAMPLES = 500  # values that a unit must have been zero for, to be called dead
DEAD = 0.4  # of the units of a layer
OFTEN = 0.05  # of the values of the others: else the units of a layer are active rarely by design
SATURATED = 0.6  # of the values
LEAP = 100  # times the gradients of the steps before
STILL = 1e-4  # of the update ratio of the other layers
MUCH = 0.01  # an update ratio; that of layers that began with zeros is far larger at first
ROUNDING = 1e-7  # an update ratio at which float32 loses most of an update: the training is over
STUCK = 0.99  # of the values of every layer, which no step has changed so far
CONSTANT = 1e-6  # of the largest value
UNUSED = 20  # steps without a gradient: some experts are chosen rarely
_RELUS = ("ReLU", "ReLU6", "Threshold", "LeakyReLU", "PReLU")


class Diagnosis:
    """Takes one measured step after the other and returns findings, each once."""

    def __init__(self, plan: MeasuredRows) -> None:
        self.plan = plan
        self.rows = plan.rows
        self._streaks = defaultdict[str, Streaks](partial(Streaks, PATIENCE, SPAN))  # by kind
        self._told: set[tuple[str, int]] = set()
        self._dead: dict[int, DeadUnits] = {}  # units that are zero
        self._totals: list[float] = []
        self._learned = False  # whether a step has changed some layer
        self._used: set[int] = set()  # the rows of gradients that have come
        self._first: dict[int, tuple[int, Tensor | None]] = {}  # those without: when, and values
        self._wrong: set[int] = set()  # those that are not finite at this step
        self._graded: set[int] = set()  # the rows of gradients that were not zero everywhere
        self._blank: Counter[int] = Counter()  # at how many steps in a row they were
        self._sums: dict[str, tuple[float, float]] = {}  # of parameters with few rows in use
        modules = list(plan.model.modules())
        self._layers = [module for module in modules if parameters_of(module)]
        self._early = set(modules[: modules.index(self._layers[-1])] if self._layers else [])

    def update(self, measured: Measured, measurement: StepMeasurement) -> list[Finding]:
        """Return the new findings of a step."""
        self._step, self._measurement, self._values = measured.step, measurement, measured.values
        sick = self._nonfinite()
        if sick:  # all else follows from it
            return sick
        return [
            *self._depths(), *self._leap(), *self._dead_units(), *self._saturated(),
            *self._still(), *self._unused(), *self._constant(),
        ]  # fmt: skip

    # -- helpers --------------------------------------------------------------------------------

    def _of(self, number: int, statistic: str) -> float:
        return float(self._values[number, STATISTICS.index(statistic)])

    def _name(self, number: int) -> str:
        row = self.rows[number]
        return f"{row.place!r} ({row.type})"

    def _lasting(
        self, kind: str, found: Iterable[int], among: Iterable[int], wait: bool = False
    ) -> list[int]:
        """Return the rows with a lasting finding that was not reported yet."""
        lasting = self._streaks[kind].go_on(self._step, set(found), among)
        new = [n for n in lasting if not wait and (kind, n) not in self._told]
        self._told |= {(kind, n) for n in new}
        return new

    def _finding(
        self,
        kind: str,
        number: int,
        message: str,
        evidence: Mapping[str, float],
        advice: str,
        others: int = 0,
        severity: Severity = "warning",
    ) -> Finding:
        more = f" So it is at {others} other place{'s' * (others > 1)}." if others else ""
        place = self.rows[number].place
        return Finding(kind, place, self._step, message + more, evidence, advice, severity)

    # -- values that are not finite -------------------------------------------------------------

    def _nonfinite(self) -> list[Finding]:
        kind, found = "non-finite values", self._measurement.found
        # -inf in an output may be a mask, and is no harm before a softmax.
        wrong = [
            n for n, one in sorted(found.items())
            if (one.bad if self.rows[n].kind == "output" else one.nonfinite)
        ]  # fmt: skip
        self._wrong = set(wrong)
        new = [n for n in wrong if (kind, n) not in self._told]
        if not new:
            return []
        self._told |= {(kind, n) for n in range(len(self.rows))}  # they spread, and say no more
        # Forward they come from the first place, backward from the last; parameters follow.
        forward = [n for n in new if self.rows[n].kind == "output"]
        backward = [n for kind in ("weight_grad", "grad") for n in new if self.rows[n].kind == kind]
        first = forward[0] if forward else backward[-1] if backward else new[0]
        row, share = self.rows[first], self._of(first, "nonfinite")
        names = {"grad": "gradient at the output", "weight_grad": "gradient", "weight": "values"}
        what = names.get(row.kind, row.kind)
        message = f"{share:.2%} of the {what} of {self._name(first)} are NaN or infinite."
        if self._measurement.spoiled:  # all else follows from it
            first = min(self._measurement.spoiled)
            message = f"{self._name(first)} held NaN or infinite values already before this step."
        advice = (
            "Find the operation with hookline.guard(model); lower the learning rate, clip "
            "gradients, or look for a division or logarithm of zero."
        )
        evidence = {"nonfinite": share, "places": float(len(new))}
        return [self._finding(kind, first, message, evidence, advice, len(new) - 1, "error")]

    # -- gradients ------------------------------------------------------------------------------

    def _matrices(self, kind: str) -> list[int]:
        """Return the rows of parameters with two or more dimensions; biases and scales differ too
        much.
        """
        return [n for n in self._sound(kind) if len(self.rows[n].shape or self._shape(n)) > 1]

    def _sound(self, kind: str) -> list[int]:
        """Return the measured rows of a kind that are not NaN or infinite."""
        found = self._measurement.found
        return [n for n in self.plan.of_kind(kind) if n in found and n not in self._wrong]

    def _shape(self, number: int) -> tuple[int, ...]:
        tensor = self.plan.parameter(number)
        return () if tensor is None else tuple(tensor.shape)

    def _depths(self) -> list[Finding]:
        """Find gradients that vanish or explode on their way to the first layers."""
        rows = self._matrices("weight_grad")
        sizes = {n: math.sqrt(f.square / max(f.count, 1)) for n in rows for f in [self._found(n)]}
        small, large = (
            {rows[at]: share for at, share in shares.items()}
            for shares in judge_depths([sizes[n] for n in rows])
        )
        self._graded.update(n for n in rows if sizes[n])
        for number in self._idle(rows, sizes):
            small.pop(number, None)
        found: list[Finding] = []
        for kind, shares in (("vanishing gradient", small), ("exploding gradient", large)):
            new = self._lasting(kind, shares, rows)
            if new:
                share = shares[new[0]]
                said = f"{share:.1e} of that of a later layer" if share else "zero everywhere"
                if shares is large:
                    said = f"{share:.1e} times that of the later layers"
                message = f"The gradient of {self._name(new[0])} is {said}."
                told = {"rms": sizes[new[0]], "relative": share}, advise_on(share), len(new) - 1
                found.append(self._finding(kind, new[0], message, *told))
        return found

    def _idle(self, rows: list[int], sizes: dict[int, float]) -> list[int]:
        """Return gradients of zeros that may belong to experts that are chosen at other steps."""
        first = next((at for at, n in enumerate(rows) if sizes[n]), len(rows))
        found: list[int] = []
        for at, number in enumerate(rows):
            self._blank[number] = 0 if sizes[number] else self._blank[number] + 1
            if sizes[number] or (at < first and 2 * first >= len(rows)):
                continue
            if self._blank[number] < UNUSED or (at > first and number in self._graded):
                found.append(number)
        return found

    def _found(self, number: int) -> Moments:
        return self._measurement.found[number]

    def _leap(self) -> list[Finding]:
        """Find gradients that explode from one step to the next."""
        kind = "exploding gradient"
        rows = [n for n in self.plan.of_kind("weight_grad") if n in self._measurement.found]
        total = math.sqrt(sum(self._found(n).square for n in rows))
        if not total:  # of a loss that is not yet there, nothing can be a multiple
            return []
        before, self._totals = self._totals, [*self._totals[:5], *self._totals[5:][-9:], total]
        if len(before) < PATIENCE or (kind, -1) in self._told:
            return []
        first, recent = median(before[:5]), median(before[-10:])
        if not (total > LEAP * recent and total > LEAP / 10 * first) and total <= 10 * LEAP * first:
            return []
        self._told.add((kind, -1))
        worst = max(rows, key=lambda n: self._found(n).square)
        message = (
            f"The gradient of all parameters has the norm {total:.3g}, where it was {recent:.3g} "
            f"before and {first:.3g} in the first steps; most of it is at {self._name(worst)}."
        )
        advice = "Lower the learning rate, warm it up, or clip gradients."
        evidence = {"norm": total, "recent": recent, "first": first}
        return [self._finding(kind, worst, message, evidence, advice)]

    # -- units ----------------------------------------------------------------------------------

    def _outputs(self) -> list[int]:
        """Return the measured rows of outputs, without those that only pass on an earlier one."""
        rows = [n for n in self._sound("output") if n not in self._measurement.aliases]
        # Masks and one-hot codes, of which nothing is learned, may be zero or the same for long.
        return [n for n in rows if n not in self._measurement.fixed or not self._is_own(n)]

    def _is_own(self, number: int) -> bool:
        """Return True if the module of a row is the user's, not torch's."""
        return not type(self.plan.modules[number]).__module__.startswith("torch.nn")

    def _dead_units(self) -> list[Finding]:
        kind, found = "dead units", list[Finding]()
        for number in self._outputs():
            one, row = self._found(number), self.rows[number]
            own = self._is_own(number) and number not in self._measurement.zeroed
            clipped = row.type in _RELUS or (own and float(one.low.min()) == 0 and one.zeros > 0)
            if not clipped or (kind, number) in self._told:
                continue
            dead = self._dead.get(number)
            if dead is None:
                dead = self._dead[number] = DeadUnits(one.dead, one.each)
            else:  # a unit that comes to life is not dead
                dead.go_on(one.dead, one.each, DEAD)
            share, count, each = dead.share, len(dead.mask), dead.values
            active = (1 - one.zeros / one.count) / max(1 - share, 1e-9)  # of the values of others
            few = dead.steps < PATIENCE or each < EXAMPLES
            if share < DEAD or few or count < 2 or not (active > OFTEN or dead.lasts):
                continue
            self._told.add((kind, number))
            message = (
                f"{int(dead.mask.sum())} of {count} units of {self._name(number)} were zero for "
                f"all {each:.0f} values of the last {dead.steps} measured steps."
            )
            advice = (
                "Lower the learning rate, look at the bias and the initialisation of the layer "
                "before, or use LeakyReLU or GELU."
            )
            evidence = {"dead": share, "units": float(count), "values": each}
            found.append(self._finding(kind, number, message, evidence, advice))
        return found

    def _saturated(self) -> list[Finding]:
        kind, rows = "saturated units", self._outputs()
        full = [n for n in rows if self._of(n, "saturated") >= SATURATED and self._is_hidden(n)]
        found: list[Finding] = []
        for number in self._lasting(kind, full, rows):
            share = self._of(number, "saturated")
            message = f"{share:.0%} of the outputs of {self._name(number)} are at its flat ends."
            advice = (
                "Scale the inputs, initialise the layer before with smaller weights, or put a "
                "normalisation layer between them."
            )
            found.append(self._finding(kind, number, message, {"saturated": share}, advice))
        return found

    def _is_hidden(self, number: int) -> bool:
        """Return True if layers follow: at the end of a model, a sigmoid may saturate."""
        own, modules = self.plan.modules[number], self.plan.modules
        if not {modules[n] for n in self.plan.of_kind("output")}.issuperset(self._layers):
            return own in self._early  # as not all is measured, the order of calls is not known
        called = [n for n in self._measurement.found if self.rows[n].kind == "output"]
        behind = [modules[n] for n in called[called.index(number) + 1 :]]
        return any(parameters_of(m) and own not in set(m.modules()) for m in behind)

    def _constant(self) -> list[Finding]:
        kind = "constant output"
        # An embedding gives one row if all ids are the same, as those of segments often are.
        tables = nn.Embedding, nn.EmbeddingBag
        rows = [n for n in self._outputs() if not isinstance(self.plan.modules[n], tables)]
        still = [n for n in rows if self._of(n, "spread") <= CONSTANT]
        new = self._lasting(kind, still, rows)
        new = [n for n in new if ("dead units", n) not in self._told]
        if not new:
            return []
        first, value = new[0], self._of(new[0], "absmax")
        message = (
            f"The output of {self._name(first)} is the same for every input: its units differ by "
            f"{self._of(first, 'spread'):.1e} of the largest value, {value:.3g}."
        )
        advice = (
            "Look at what comes in there; a layer before may be dead, saturated, or far too large "
            "for its normalisation."
        )
        evidence = {"spread": self._of(first, "spread"), "absmax": value}
        return [self._finding(kind, first, message, evidence, advice, len(new) - 1)]

    # -- parameters -----------------------------------------------------------------------------

    def _still(self) -> list[Finding]:
        """Find layers that get gradients, but hardly change."""
        kind = "layer does not learn"
        grads = {self.rows[n].place: n for n in self._matrices("weight_grad")}
        ratios = {n: self._of(n, "ratio") for n in self._matrices("update")}
        ratios = {
            n: ratio for n, ratio in ratios.items()
            if not math.isnan(ratio) and self._moves(grads.get(self.rows[n].place))
        }  # fmt: skip
        moving = [ratio for ratio in ratios.values() if ratio > 0]
        usual = median(moving) if moving else 0.0
        least = STILL * min(usual, MUCH) if usual > ROUNDING else 0.0
        still = [n for n, ratio in ratios.items() if ratio < least]
        dense = [n for n in ratios if self._is_dense(n, grads[self.rows[n].place])]
        few = [n for n in still if n not in dense and self.plan.is_sampled(n)]
        resting = self._resting([self.rows[n].place for n in few])
        still = [n for n in still if n not in few or self.rows[n].place in resting]
        stuck = [n for n in dense if self._of(n, "zeros") >= STUCK]
        self._learned |= len(stuck) < len(dense)
        nowhere = bool(stuck) and not self._learned  # later it may be the end of a schedule
        if nowhere:
            still = stuck
        new = self._lasting(kind, still, ratios)
        new = [
            n for n in new if ("vanishing gradient", grads[self.rows[n].place]) not in self._told
        ]
        if not new:
            return []
        ratio = ratios[new[0]]
        beside = f"where others change by {usual:.1e}"
        if nowhere:
            beside = "and hardly a value of any other"
        message = (
            f"A step changes {self._name(new[0])} by {ratio:.1e} of its norm, {beside}, though it "
            f"has a gradient."
        )
        advice = (
            "See that the optimizer has this parameter, and with which learning rate; in half "
            "precision, small updates are lost: keep the parameters in float32."
        )
        evidence = {"ratio": ratio, "median": usual}
        return [self._finding(kind, new[0], message, evidence, advice, len(new) - 1)]

    def _moves(self, number: int | None) -> bool:
        return number is not None and self._found(number).square > 0

    def _is_dense(self, update: int, grad: int) -> bool:
        """Return True if most of a parameter has a gradient; of an embedding only the used rows
        have.
        """
        found = self._found(grad)
        return found.count - found.zeros > self._found(update).count / 2

    def _resting(self, places: list[str]) -> set[str]:
        """Return the parameters that are unchanged since the last check; a sample may miss used
        rows.
        """
        weights = {self.rows[n].place: self._found(n) for n in self._sound("weight")}
        sums = {p: (weights[p].total, weights[p].centered) for p in places if p in weights}
        found = {place for place, both in sums.items() if self._sums.get(place) == both}
        self._sums = sums
        return found

    def _unused(self) -> list[Finding]:
        kind, rows = "unused parameters", self.plan.of_kind("weight_grad")
        came = [n for n in rows if n in self._measurement.found]
        self._used.update(came)  # experts, say, are not used at every step
        missing = [n for n in rows if n not in self._used and self._is_trained(n)]
        missing = [n for n in missing if not self._has_changed(n)]
        wait = any(self._step - self._first[n][0] < UNUSED for n in missing)
        new = self._lasting(kind, missing if came else [], rows, wait)
        if not new:
            return []
        names = ", ".join(self._name(n) for n in new[:4]) + ", …" * (len(new) > 4)
        plural = "s have" if len(new) > 1 else " has"
        message = f"{len(new)} parameter{plural} had no gradient so far: {names}."
        advice = (
            "The loss does not depend on them: call their modules, take them out, or set "
            "requires_grad to False."
        )
        return [self._finding(kind, new[0], message, {"parameters": float(len(new))}, advice)]

    def _has_changed(self, number: int) -> bool:
        """Return True if steps that were not measured changed a parameter: it had a gradient
        then.
        """
        now = self.plan.sample(number)
        _, before = self._first.setdefault(number, (self._step, now))
        return before is not None and now is not None and not torch.equal(before, now)

    def _is_trained(self, number: int) -> bool:
        tensor = self.plan.parameter(number)
        return tensor is not None and tensor.requires_grad
