"""What hookline costs, beside the hooks that one would write by hand.

    python benchmarks/overhead.py                    about six minutes
    python benchmarks/overhead.py --quick            about one minute, noisier
    python benchmarks/overhead.py --only entering    seconds: that part anew, the rest as it was

A 12-layer transformer of 163 modules is run bare, with hand-written hooks, and with hookline,
all in one interleaved run (timing.py); and so is a GPT-2 of real size, to see what share of a
forward that matters. Registering the hooks and removing them is inside the
timed part of every variant, and measured alone on models of up to 10,000 modules (entering.py).
Prints a table and the goals, writes latest/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import entering
import numpy as np
import torch
from latest import held, write
from timing import Race, Ratio, machine, settle_memory
from torch import Tensor, nn
from transformer import GPT2, LARGE, TINY, Size

import hookline as hl

ROOT = Path(__file__).resolve().parent.parent


BLOCKS = ("blocks.*",)
EVERYTHING = ("", "**")
# The embeddings and the model itself have no gradient at their input.
EVERYTHING_WITH_GRADIENTS = ("blocks.**", "norm", "head")
FEW = 12  # places, for which there are no goals


# The variants. Each takes the model, the batch and its places, and does one whole iteration.

Named = list[tuple[str, nn.Module]]
Kept = dict[Any, Any]  # tensors by name


def modules_at(model: nn.Module, where: Iterable[str]) -> Named:
    """The very modules that hookline hooks for these places, by name."""
    names = [str(place).partition(":")[0] for place in hl.select(model, *where)]
    return [(name, model.get_submodule(name)) for name in names]


def forward(model: nn.Module, batch: Tensor) -> None:
    model(batch)


def forward_backward(model: nn.Module, batch: Tensor) -> None:
    model(batch).sum().backward()


Work = Callable[[nn.Module, Tensor], None]


def by_hand(make_hook: Callable[..., object], register: str = "register_forward_hook"):
    """A variant with one hand-written hook a module, and what it kept as the result."""

    def variant(work: Work, model: nn.Module, batch: Tensor, modules: Named) -> Kept:
        kept: Kept = {}
        handles = [getattr(module, register)(make_hook(kept, name)) for name, module in modules]
        work(model, batch)
        for handle in handles:
            handle.remove()
        return kept

    return variant


def keep_output(kept: Kept, name: str):
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept[name] = output

    return hook


def keep_clone(kept: Kept, name: str):
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept[name] = output.clone()

    return hook


# Who captures, for hooks that ask; a thread or task that did not begin the capture has another.
CAPTURING: ContextVar[object] = ContextVar("CAPTURING", default=None)


def keep_with_care(kept: Kept, name: str):
    """The least that promises 1 to 3 ask of a hook: whose call, no repetition, no later change."""

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        if CAPTURING.get() is not kept or torch._C._current_graph_task_id() != -1:
            return
        if output.requires_grad:
            kept[name], kept[name, "version"] = output, output._version
        else:
            kept[name] = output.clone()

    return hook


def raw_careful(work: Work, model: nn.Module, batch: Tensor, modules: Named) -> Kept:
    """As `by_hand`, in the name of one thread or task."""
    kept: Kept = {}
    token = CAPTURING.set(kept)
    handles = [module.register_forward_hook(keep_with_care(kept, name)) for name, module in modules]
    work(model, batch)
    for handle in handles:
        handle.remove()
    CAPTURING.reset(token)
    return kept


def keep_detached_clone(kept: Kept, name: str):
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        kept[name] = output.detach().clone()

    return hook


def keep_gradient(kept: Kept, name: str):
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: kept.__setitem__(name, gradient))

    return hook


def keep_full_backward(kept: Kept, name: str):
    def hook(module: nn.Module, grad_input: tuple[Tensor], grad_output: tuple[Tensor]) -> None:
        kept[name] = grad_input[0]

    return hook


raw = by_hand(keep_output)
raw_clone = by_hand(keep_clone)
raw_detached_clone = by_hand(keep_detached_clone)
raw_gradient = by_hand(keep_gradient)
full_backward = by_hand(keep_full_backward, "register_full_backward_hook")


def hookline(
    work: Work, model: nn.Module, batch: Tensor, where: tuple[str, ...], **options: Any
) -> hl.Record:
    with hl.capture(model, *where, **options) as record:
        work(model, batch)
    return record


# The cases: one race each.


@dataclass
class Case:
    name: str
    places: int
    race: Race
    with_gradients: bool = True
    columns: tuple[str, ...] = ("raw", "raw + clone")
    share: float = 1.0  # of the rounds
    # Each a text, the most that it may be, who adds, over what that is divided, and over what both
    # add; None compares whole times. At few places of a tiny model, entering is most of the cost.
    goals: tuple[tuple[str, float, str, str, str | None], ...] = ()

    def run(self, rounds: int) -> None:
        with torch.set_grad_enabled(self.with_gradients):
            self.race.run(max(1, round(rounds * self.share)))


def values_case(
    title: str, size: Size, where: tuple[str, ...], work: Work, with_gradients: bool
) -> Case:
    model, batch = size.build()
    modules = modules_at(model, where)
    given = (work, model, batch)
    ours = "hookline"
    goals: list[tuple[str, float, str, str, str | None]] = []
    if size is LARGE:
        third = "(snapshot − raw) / (clone − raw)"
        goals.append((third, 1 / 3, ours, "raw + clone", "raw"))
    elif len(modules) > FEW:
        kind, limit = ("attached", 0.95) if with_gradients else ("snapshot", 1.25)
        goals.append((f"{kind} / raw", limit, ours, "raw", "bare"))
        goals.append((f"{kind} / raw that clones", 1.0, ours, "raw + clone", "bare"))
    variants: dict[str, Callable[[], object]] = {
        "bare": partial(work, model, batch),
        "raw": partial(raw, *given, modules),
        "raw again": partial(raw, *given, modules),
        "raw + clone": partial(raw_clone, *given, modules),
        "raw + care": partial(raw_careful, *given, modules),
        "hookline": partial(hookline, *given, where),
    }
    if with_gradients and work is forward:
        variants["raw + detach + clone"] = partial(raw_detached_clone, *given, modules)
        variants["hookline, detach=True"] = partial(hookline, *given, where, detach=True)
        if len(modules) > FEW:
            text = "detach=True / raw that detaches and clones"
            goals.append((text, 1.0, "hookline, detach=True", "raw + detach + clone", "bare"))
    with torch.set_grad_enabled(with_gradients):
        expected = raw_clone(*given, modules)
        for name, run in variants.items():
            if name != "bare":
                check_same(name, run(), expected)
        race = Race(variants)
        race.warm_up()
    name = f"{title}, {len(modules)} places, {size.name}"
    return Case(name, len(modules), race, with_gradients, goals=tuple(goals))


def gradients_case(size: Size, where: tuple[str, ...]) -> Case:
    model, batch = size.build()
    modules = modules_at(model, where)
    given = (forward_backward, model, batch)
    outputs = tuple(f"{place}:grad_output" for place in where)
    inputs = tuple(f"{place}:grad_input" for place in where)
    variants: dict[str, Callable[[], object]] = {
        "bare": partial(forward_backward, model, batch),
        "raw": partial(raw_gradient, *given, modules),
        "raw again": partial(raw_gradient, *given, modules),
        "full backward": partial(full_backward, *given, modules),
        "hookline :grad_output": partial(hookline, *given, outputs),
        "hookline :grad_input": partial(hookline, *given, inputs),
        "hookline, outputs too": partial(hookline, *given, (*where, *outputs)),
    }
    check_same("grad_output", hookline(*given, outputs), raw_gradient(*given, modules), outputs)
    check_same("grad_input", hookline(*given, inputs), full_backward(*given, modules), inputs)
    race = Race(variants)
    race.warm_up()
    name = f"gradients, {len(modules)} places, {size.name}"
    out, into, both = "hookline :grad_output", "hookline :grad_input", "hookline, outputs too"
    goals = (
        (":grad_output / raw tensor hooks", 1.7, out, "raw", "bare"),
        (":grad_output / full backward hooks", 0.7, out, "full backward", "bare"),
        (":grad_input / raw tensor hooks", 2.5, into, "raw", "bare"),
        (":grad_input / full backward hooks", 0.7, into, "full backward", "bare"),
        ("outputs and :grad_output / raw tensor hooks", 2.0, both, "raw", "bare"),
    )
    columns = "raw", "full backward"
    return Case(
        name, len(modules), race, columns=columns, goals=goals if len(modules) > FEW else ()
    )


def options_case(size: Size, where: tuple[str, ...]) -> Case:
    model, batch = size.build()
    modules = modules_at(model, where)
    given = (forward, model, batch)
    at, last = {"at": np.s_[:, -1]}, {"keep": "last"}
    variants: dict[str, Callable[[], object]] = {
        "bare": partial(forward, model, batch),
        "raw": partial(raw, *given, modules),
        "raw again": partial(raw, *given, modules),
        "hookline, at=": partial(hookline, *given, where, **at),
        "hookline, keep='last'": partial(hookline, *given, where, **last),
    }
    with torch.no_grad():
        expected = raw_clone(*given, modules)
        slices = {name: value[at["at"]] for name, value in expected.items()}
        check_same("at=", variants["hookline, at="](), slices)
        check_same("keep='last'", variants["hookline, keep='last'"](), expected)
        race = Race(variants)
        race.warm_up()
    name = f"options, {len(modules)} places, {size.name}"
    goals = (
        ("at= / raw", 1.5, "hookline, at=", "raw", "bare"),
        ("keep='last' / raw", 1.3, "hookline, keep='last'", "raw", "bare"),
    )
    return Case(name, len(modules), race, False, columns=("raw",), goals=goals)


def real_case(where: tuple[str, ...]) -> Case:
    torch.manual_seed(0)
    model, batch = GPT2(), torch.randint(GPT2.vocabulary, (4, 128))
    modules = modules_at(model, where)
    given = (forward, model, batch)
    variants: dict[str, Callable[[], object]] = {
        "bare": partial(forward, model, batch),
        "raw": partial(raw, *given, modules),
        "hookline": partial(hookline, *given, where),
    }
    with torch.no_grad():
        check_same("hookline", variants["hookline"](), raw_clone(*given, modules))
        race = Race(variants)
        race.warm_up(1)
    name = f"a GPT-2, {len(modules)} places, 12 layers, width 768, 4 × 128 tokens"
    goal = "the forward with the capture / bare", 1.02, "hookline", "bare", None
    return Case(name, len(modules), race, False, columns=("raw",), share=0.04, goals=(goal,))


def check_same(name: str, got: object, expected: Kept, where: tuple[str, ...] = ()) -> None:
    """A variant that kept something else, or less, would win for nothing."""
    port = ":" + where[0].partition(":")[2] if where else ""
    for place, value in expected.items():
        if not torch.allclose(got[place + port], value):  # type: ignore[index]
            raise SystemExit(f"{name}: the value at {place!r} is not what a hook by hand sees.")


def build_cases() -> list[Case]:
    cases = []
    for where in (BLOCKS, EVERYTHING):
        cases += [
            values_case("no_grad", TINY, where, forward, with_gradients=False),
            values_case("training, forward", TINY, where, forward, with_gradients=True),
            values_case("training, with backward", TINY, where, forward_backward, True),
        ]
    # Twelve clones of 98 KB would drown in the noise of the forward around them.
    cases += [values_case("no_grad", LARGE, EVERYTHING, forward, with_gradients=False)]
    cases += [gradients_case(TINY, BLOCKS), gradients_case(TINY, EVERYTHING_WITH_GRADIENTS)]
    return [*cases, options_case(TINY, EVERYTHING), real_case(EVERYTHING)]


# The goals. Each is a ratio of two added times, with the most that it may be.


@dataclass(frozen=True)
class Goal:
    case: str
    text: str
    limit: float
    measured: Ratio
    unit: str = "×"

    @property
    def met(self) -> bool:
        return self.measured.fast <= self.limit

    @property
    def verdict(self) -> str:
        """With a question mark if two standard errors could turn it round."""
        unsure = abs(self.measured.fast - self.limit) < 2 * self.measured.error
        return ("pass" if self.met else "miss") + "?" * unsure


def goals_of(case: Case) -> list[Goal]:
    return [
        Goal(case.name, text, limit, case.race.ratio(name, reference, over))
        for text, limit, name, reference, over in case.goals
    ]


def import_goal(times: int) -> Goal:
    """`import hookline` after `import torch`, each time in a new process.

    With compiled bytecode, as installed packages have it, whatever the environment says.
    """
    code = "import torch, time; t = time.perf_counter(); import hookline; "
    code += "print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, check=True)
        run(command)  # compiles
        runs = sorted(float(run(command, text=True).stdout) for _ in range(times))
    measured = Ratio(fast=runs[0] * 1e3, error=0.0, median=runs[times // 2] * 1e3)
    return Goal("import hookline", "added to import torch", 60, measured, unit=" ms")


def warm(where: tuple[str, ...], turns: int, times: int = 200) -> dict[str, float]:
    """Hooks are put on and taken off, over and over, and nothing runs in between: µs each time."""
    model, _ = TINY.build()
    modules = modules_at(model, where)

    def by_hand() -> None:
        for _ in range(times):
            raw(lambda *given: None, model, Tensor(), modules)

    def attached() -> None:
        for _ in range(times):
            hl.capture(model, *where).attach().remove()

    race = Race({"raw": by_hand, "hookline": attached})
    race.warm_up(2)
    race.run(turns)
    return {"places": len(modules)} | {way: race.fast(way) / times for way in race.variants}


# The report.


def print_case(case: Case) -> None:
    race = case.race
    print(f"\n{case.name}: bare {race.fast('bare'):.0f} µs, {race.rounds} rounds")
    heads = [f"/ {reference}" for reference in case.columns]
    print(f"  {'':24}{'added µs':>10}{'a place':>9}" + "".join(f"{head:>18}" for head in heads))
    for name in race.variants:
        if name == "bare":
            continue
        added = race.added(name, "bare")
        line = f"  {name:24}{added:10.1f}{added / case.places:9.2f}"
        for reference in case.columns:
            measured = race.ratio(name, reference, "bare")
            line += f"{measured.fast:11.2f} ± {measured.error:.2f}"
        print(line)


def print_goals(goals: list[Goal]) -> None:
    print(f"\n{'goal':85}{'at most':>8}{'measured':>16}{'median':>9}")
    for goal in goals:
        text = f"{goal.case}: {goal.text}"
        fast, error, median = goal.measured
        print(
            f"{text:85}{goal.limit:8.2f}{fast:9.2f} ± {error:.2f}{median:9.2f}"
            f"{goal.unit:3}  {goal.verdict}"
        )
    print(f"\n{sum(goal.met for goal in goals)} of {len(goals)} goals met.")
    print("± is one standard error; 'raw again', the same code as 'raw', should be 1.00.")


def write_results(
    cases: list[Case], goals: list[Goal], loops: list[dict[str, float]], entered: Kept, quick: bool
) -> None:
    results = {
        "machine": machine(),
        "hookline": getattr(hl, "__version__", None),
        "quick": quick,
        "warm": loops,
        "entering": entered,
        "cases": [
            {
                "name": case.name,
                "places": case.places,
                "rounds": case.race.rounds,
                "variants": {
                    name: {
                        "best_us": case.race.best(name),
                        "median_us": case.race.median(name),
                        "added_us": case.race.added(name, "bare"),
                        "fast_us": case.race.fast(name),
                        "median_added_us": case.race.median_added(name, "bare"),
                    }
                    for name in case.race.variants
                },
            }
            for case in cases
        ],
        "goals": [
            {
                "case": goal.case,
                "goal": goal.text,
                "at_most": goal.limit,
                "measured": goal.measured.fast,
                "error": goal.measured.error,
                "median": goal.measured.median,
                "unit": goal.unit.strip(),
                "verdict": goal.verdict,
            }
            for goal in goals
        ],
    }
    write("overhead", as_text(results), full=not quick)


def as_text(results: dict[str, Any]) -> str:
    return json.dumps(results, indent=2, ensure_ascii=False) + "\n"


def time_entering(quick: bool) -> Kept:
    """Entering and leaving by themselves, in models of several sizes."""
    races = {modules: entering.race(modules) for modules in entering.SIZES}
    for _ in range(2 if quick else 6):
        for race in races.values():
            race.run(rounds=10 if quick else 25)
    return {"machine": machine(), "rows": entering.rows(races)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, noisier ratios")
    parser.add_argument("--only", choices=["entering"], help="that part anew, the rest as it was")
    options = parser.parse_args()
    quick = options.quick
    torch.set_num_threads(1)
    settle_memory()
    warnings.simplefilter("error")

    start = time.perf_counter()
    entered = time_entering(quick)
    if options.only:
        entering.show(entered["rows"])
        write("overhead", as_text(held("overhead") | {"entering": entered}), full=not quick)
        return
    cases = build_cases()
    # Several passes over all cases, so that a slow minute does not fall on one of them alone.
    for _ in range(4 if quick else 10):
        for case in cases:
            case.run(rounds=25 if quick else 60)
    goals = [goal for case in cases for goal in goals_of(case)]
    goals.append(import_goal(5 if quick else 15))
    loops = [warm(where, 10 if quick else 40) for where in (BLOCKS, EVERYTHING)]

    for case in cases:
        print_case(case)
    for loop in loops:
        print(
            f"\nput on and taken off in a loop, {loop['places']} places: raw {loop['raw']:.1f} µs, "
            f"hookline {loop['hookline']:.1f} µs"
        )
    entering.show(entered["rows"])
    print_goals(goals)
    write_results(cases, goals, loops, entered, quick)
    print(f"{time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
