"""What was measured, as Markdown: each function makes one part of a document from one JSON file.

- `PARTS` maps the name of a part to the file it is made of and to its function
- a function that gives lines makes a table; one that gives a string makes words within a sentence

Files are what the benchmarks write to results/. A field that is new in them does no harm; one that
is missing raises `KeyError`, which tables.py explains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harvest
import summary
import watch
from peers.page import number, plain, table
from peers.tasks import TASKS

Results = dict[str, Any]
Part = Callable[[Results], list[str] | str]
PARTS: dict[str, tuple[str, Part]] = {}


def part(name: str) -> Callable[[Part], Part]:
    """Register a part. The first word of its name is the file it is made of."""

    def register(function: Part) -> Part:
        PARTS[name] = name.split(maxsplit=1)[0], function
        return function

    return register


def times(value: float) -> str:
    return f"{number(value)} ×"


def verdict(met: bool | None) -> str:
    return {True: "met", False: "missed", None: ""}[met]


def at_most(value: float, goal: float | None) -> list[str]:
    """A goal, and whether it is met, as two cells."""
    if goal is None:
        return ["", ""]
    return [f"≤ {goal:g} ×", verdict(value <= goal)]


def where(results: Results) -> str:
    """The machine, the versions and the date."""
    found = results["machine"]
    day, _, clock = found["date"].partition("T")
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    system = "-".join(found["platform"].split("-")[:2])
    quick = ", a quick and noisy run" if results.get("quick") else ""
    return plain(
        f"Measured on {day} at {clock[:5]} UTC{quick}: {found['cpu']}, {found['cores']} cores, "
        f"{threads}, {system}, Python {found['python']}, torch {found['torch']}."
    )


for _file in (
    "overhead", "compiled", "side_by_side", "summary", "store", "harvest", "guard", "watch", "page",
):  # fmt: skip
    part(f"{_file} machine")(where)


# Beside hooks written by hand.


def overhead_rows(results: Results, columns: tuple[str, ...], first: str) -> list[list[str]]:
    """One row a case that has these variants: what each adds a place, and that over raw hooks."""
    rows = []
    for case in results["cases"]:
        found = case["variants"]
        if columns[-1] in found:
            added = {name: found[name]["added_us"] for name in ("raw", "raw again", *columns)}
            row = [case["name"], number(found["bare"]["fast_us"] / 1e3)]
            row += [number(added[name] / case["places"]) for name in ("raw", *columns)]
            row += [times(added[name] / added[first]) for name in columns]
            rows.append([*row, times(added["raw again"] / added["raw"])])
    return rows


@part("overhead values")
def overhead_values(results: Results) -> list[str]:
    head = [
        "", "bare, ms", "raw hooks", "raw + clone", "hookline",
        "clone / raw", "hookline / raw", "raw again / raw",
    ]  # fmt: skip
    return table(head, overhead_rows(results, ("raw + clone", "hookline"), "raw"))


@part("overhead gradients")
def overhead_gradients(results: Results) -> list[str]:
    ways = ("full backward", "hookline :grad_output", "hookline :grad_input")
    head = [
        "", "bare, ms", "raw tensor hooks", "full backward hooks", "`:grad_output`",
        "`:grad_input`", "full / raw", "`:grad_output` / raw", "`:grad_input` / raw",
        "raw again / raw",
    ]  # fmt: skip
    return table(head, overhead_rows(results, ways, "raw"))


@part("overhead goals")
def overhead_goals(results: Results) -> list[str]:
    words = {"pass": "met", "miss": "missed", "pass?": "met, in doubt", "miss?": "missed, in doubt"}
    rows = []
    for goal in results["goals"]:
        unit = f" {goal['unit']}"
        spread = f" ± {goal['error']:.2f}" if goal["error"] else ""
        measured = number(goal["measured"]) + spread + unit
        limit = f"≤ {number(goal['at_most'])}{unit}"
        rows.append([f"{goal['case']}: {goal['goal']}", limit, measured, words[goal["verdict"]]])
    return table(["what hookline adds / what the other adds", "goal", "measured", ""], rows)


def overhead_goal(results: Results, case: str, goal: str) -> str:
    for one in results["goals"]:
        if one["case"].startswith(case) and one["goal"] == goal:
            return times(one["measured"])
    raise KeyError(f"{case}: {goal}")


@part("overhead attached")
def overhead_attached(results: Results) -> str:
    return overhead_goal(results, "training, forward, 162 places", "attached / raw")


@part("overhead snapshot")
def overhead_snapshot(results: Results) -> str:
    return overhead_goal(results, "no_grad, 162 places, 32", "snapshot / raw")


@part("overhead gradient")
def overhead_gradient(results: Results) -> str:
    return overhead_goal(results, "gradients, 158 places", ":grad_output / full backward hooks")


@part("overhead import")
def overhead_import(results: Results) -> str:
    (goal,) = (one for one in results["goals"] if one["case"] == "import hookline")
    return f"{goal['measured']:.0f} ms"


# Compiled models.


@part("compiled")
def compiled(results: Results) -> list[str]:
    titles = {
        "compiled": "the compiled model",
        "capture in the graph": 'capture in the graph (`keep="last"`, attached first)',
        "capture, eagerly": "any other capture: the model runs eagerly",
        "eager": "the model, eagerly, without a capture",
    }
    rows = [
        [title, number(results["fast_us"][way] / 1e3), times(results["times_compiled"][way])]
        for way, title in titles.items()
    ]
    return table([f"with {plain(results['backend'])}", "ms", "× compiled"], rows)


# Beside other libraries.

SHOWN = ("raw", "hookline", "nnsight", "pyvene", "captum", "torchlens", "tdhook",
         "transformer_lens")  # fmt: skip


def side_cell(results: Results, name: str, task: str) -> str:
    found = results["times"][name].get(task)
    if found is not None:
        return number(found["ratio"])
    told = results["verdicts"][name].get(task, {"verdict": "absent"})["verdict"]
    return "–" if told == "absent" else told


def memory_cell(results: Results, name: str, task: str) -> str:
    bare = results["memory"].get("raw", {}).get(task, {}).get("bare")
    found = results["memory"].get(name, {}).get(task)
    if not bare or found is None:
        return "–"
    return number(found["use"] / bare) if "use" in found else "error"


def side_table(results: Results, names: list[str], tasks: tuple[str, ...]) -> list[str]:
    titles = {task.name: task.title for task in TASKS}
    rows = []
    for name in names:
        row = [f"{plain(results['peers'][name]['title'])}"]
        row += [side_cell(results, name, task) for task in tasks]
        rows.append([*row, memory_cell(results, name, "all")])
    head = [titles[task] for task in tasks]
    return table(["× the bare model", *head, "memory: capture 161 modules"], rows)


@part("side_by_side table")
def side_by_side(results: Results) -> list[str]:
    tasks = ("blocks", "all", "edit", "gradient", "stop", "summary", "gpt2", "generate", "disk")
    return side_table(results, list(results["peers"]), tasks)


@part("side_by_side readme")
def side_by_side_readme(results: Results) -> list[str]:
    names = [name for name in SHOWN if name in results["peers"]]
    tasks = ("blocks", "all", "edit", "gradient", "stop", "generate", "disk")
    return side_table(results, names, tasks)


PROBED = {
    "a value stays as it was when a later operation is in-place": "",
    "nested outputs (an LSTM's) are kept whole": "",
    "every call of a module that is called three times": "",
    "only the calls of one's own thread": "",
    "the gradient of a layer that an in-place ReLU follows": "",
    "a parameter is edited and put back, the same object and bits": "a parameter is edited and "
    "put back",
    "torch is as it was: no function is wrapped or replaced afterwards": "torch is as it was "
    "afterwards",
}


@part("side_by_side probes")
def side_by_side_probes(results: Results) -> list[str]:
    names = [name for name in SHOWN[:-1] if name in results["peers"]]
    words = {"absent": "–"}
    rows = []
    for title, short in PROBED.items():
        found = [results["features"][name][title]["verdict"] for name in names]
        rows.append([short or title, *(words.get(one, one) for one in found)])
    head = ["", *(plain(results["peers"][name]["title"]) for name in names)]
    lines = table(head, rows)
    return [lines[0], lines[1].replace("--:", "---"), *lines[2:]]


@part("side_by_side versions")
def side_by_side_versions(results: Results) -> str:
    found = [
        f"{plain(peer['title'])} {plain(peer['version'])}"
        for name, peer in results["peers"].items()
        if name not in ("raw", "raw_again", "hookline")
    ]
    return ", ".join(found)


@part("side_by_side count")
def side_by_side_count(results: Results) -> str:
    return str(len(results["features"]["hookline"]))


# What a model costs.


@part("summary table")
def summary_table(results: Results) -> list[str]:
    sizes = list(results["µs"])
    rows = []
    for way in next(iter(results["µs"].values())):
        row = [plain(way)]
        for size in sizes:
            taken, ours = results["µs"][size][way], results["µs"][size]["hookline"]
            row += [number(taken / 1e3), times(taken / ours)]
            if way == "torchinfo":
                row[-1] += f" (goal ≥ {summary.GOAL:g} ×: {verdict(taken / ours >= summary.GOAL)})"
        rows.append(row)
    head = [cell for size in sizes for cell in (f"{plain(size)}: ms", "÷ hookline")]
    return table(["", *head], rows)


@part("summary flops")
def summary_flops(results: Results) -> list[str]:
    rows = [
        [plain(name), f"{pair['hookline']:,}", f"{pair['torch']:,}",
         "yes" if pair["hookline"] == pair["torch"] else "no"]
        for name, pair in results["flops"].items()
    ]  # fmt: skip
    return table(["forward and backward", "hookline", "torch's counter", "equal"], rows)


# The store.


def store_cases(results: Results) -> dict[str, Results]:
    return {name: found for name, found in results.items() if name.startswith("batches of ")}


@part("store writes")
def store_writes(results: Results) -> list[str]:
    cases = store_cases(results)
    ways = list(next(iter(cases.values())))
    rows = []
    for way in ways:
        found = [case[way] for case in cases.values()]
        goal = found[0]["goal"]
        row = [plain(way), "" if goal is None else f"≥ {goal:g} ×"]
        for one in found:
            cell = f"{one['GB/s']:.2f} GB/s"
            if goal is not None:
                cell += f", {times(one['ratio'])} {verdict(one['met'])}"
                # What a raw write does not reach, no writer that copies into the cache can.
                cell += " (raw, too)" if not one["met"] and one["raw"] < goal else ""
            row.append(cell)
        rows.append(row)
    return table(["", "goal: store is", *cases], rows)


@part("store reads")
def store_reads(results: Results) -> list[str]:
    found = results["random row, µs"]
    ours, other = found["hookline store"], found["safe_open slice"]
    rows = [
        ["hookline store", number(ours), "", ""],
        ["a slice of `safe_open`", number(other), times(other / ours),
         f"≥ {found['goal']:g} × {verdict(found['met'])}"],
    ]  # fmt: skip
    return table(["one random row", "µs", "store is", "goal"], rows)


# Harvests, guards, watches.


@part("harvest table")
def harvest_table(results: Results) -> list[str]:
    rows = []
    for way, found in results["ways"].items():
        goal = found.get("goal", harvest.GOAL if way == "harvest" else None)
        rows.append(
            [plain(way), number(found["seconds"]), times(found["ratio"]),
             times(found["processor ratio"]), *at_most(found["ratio"], goal)]
        )  # fmt: skip
    return table(["", "s", "by the clock", "processor time", "goal", ""], rows)


@part("harvest memory")
def harvest_memory(results: Results) -> list[str]:
    rows = [[f"{int(count):,} batches", f"{found:.0f} MB", "", ""]
            for count, found in results["peak MB"].items()]  # fmt: skip
    rows.append(["growth", times(results["growth"]),
                 *at_most(results["growth"], harvest.GOAL_MEMORY)])  # fmt: skip
    return table(["peak memory of a process", "", "goal", ""], rows)


@part("guard table")
def guard_table(results: Results) -> list[str]:
    rows = [
        [f"`{way}`" if way.startswith(("guard", "set_")) else plain(way), number(found["ms"]),
         times(found["ratio"]), times(found["by medians"]),
         *at_most(found["ratio"], found["goal"])]
        for way, found in results["variants"].items()
    ]  # fmt: skip
    return table(["", "ms a step", "× bare", "by medians", "goal", ""], rows)


@part("guard anomaly")
def guard_anomaly(results: Results) -> str:
    return times(results["variants"]["set_detect_anomaly"]["ratio"])


@part("guard careful")
def guard_careful(results: Results) -> str:
    return times(results["variants"]["guard(careful=True)"]["ratio"])


@part("guard ratio")
def guard_ratio(results: Results) -> str:
    return times(results["variants"]["guard"]["ratio"])


@part("watch table")
def watch_table(results: Results) -> list[str]:
    rows = [
        [plain(way), number(results[way]["ms"]), times(results[way]["ratio"]),
         times(results[way]["median ratio"]),
         *at_most(results[way]["ratio"], watch.GOALS.get(way))]
        for way in results if isinstance(results[way], dict) and "median ratio" in results[way]
    ]  # fmt: skip
    if not rows:
        raise KeyError("watch, every=50")
    return table(["", "ms a step", "× bare", "by medians", "goal", ""], rows)


# The page, and the zoo.


@part("page table")
def page_table(results: Results) -> list[str]:
    goals = results["goals"]
    columns = {
        "megabytes": ("size", "MB"), "ready": ("tree and overview", "s"),
        "drawn": ("first picture", "s"), "frame": ("a frame while scrolling", "ms"),
    }  # fmt: skip
    rows = []
    for name, found in results.items():
        if isinstance(found, dict) and "ready" in found and name != "goals":
            row = [plain(name), f"{number(found['made'])} s"]
            for key, (_, unit) in columns.items():
                row.append(f"{number(found[key])} {unit} {verdict(found[key] <= goals[key])}")
            rows.append(row)
    if not rows:
        raise KeyError("1,000 modules, one run")
    limits = [f"≤ {goals[key]:g} {unit}" for key, (_, unit) in columns.items()]
    rows.insert(0, ["*goal*", "", *limits])
    return table(["", "made in", *(title for title, _ in columns.values())], rows)


@part("zoo architectures")
def zoo_architectures(results: Results) -> str:
    return str(len(results["architectures"]))


@part("zoo wrong")
def zoo_wrong(results: Results) -> str:
    wrong = [one for one in results["architectures"].values() if one.get("wrong") or "error" in one]
    return "all of them" if not wrong else f"all but {len(wrong)}"


# What README.md says in a line each, and how many goals are met.


def line(value: float, sign: str, goal: float, unit: str = "×") -> str:
    met = value <= goal if sign == "≤" else value >= goal
    return f"{number(value)} {unit} (goal {sign} {goal:g} {unit}: {verdict(met)})"


@part("guard line")
def guard_line(results: Results) -> str:
    found = results["variants"]["guard"]
    return line(found["ratio"], "≤", found["goal"])


@part("watch line")
def watch_line(results: Results) -> str:
    return line(results["watch, every=50"]["ratio"], "≤", watch.GOALS["watch, every=50"])


@part("harvest line")
def harvest_line(results: Results) -> str:
    found = results["ways"]["harvest"]
    return line(found["ratio"], "≤", found.get("goal", harvest.GOAL))


@part("store line")
def store_line(results: Results) -> str:
    found = results["random row, µs"]
    return line(found["ratio"], "≥", found["goal"])


@part("store write line")
def store_write_line(results: Results) -> str:
    found = results["batches of 8 MB, synced"]["raw write"]
    return line(found["ratio"], "≥", found["goal"])


@part("page line")
def page_line(results: Results) -> str:
    ready = results["1,000 modules, one run"]["ready"]
    return line(ready, "≤", results["goals"]["ready"], "s")


@part("summary line")
def summary_line(results: Results) -> str:
    found = results["µs"]["32 elements"]
    return line(found["torchinfo"] / found["hookline"], "≥", summary.GOAL)


def count(met: list[bool]) -> str:
    return f"{sum(met)} of {len(met)}"


@part("overhead count")
def overhead_count(results: Results) -> str:
    return count([goal["verdict"].startswith("pass") for goal in results["goals"]])


@part("summary count")
def summary_count(results: Results) -> str:
    fast = [found["torchinfo"] / found["hookline"] >= summary.GOAL
            for found in results["µs"].values() if "torchinfo" in found]  # fmt: skip
    return count(fast + [pair["hookline"] == pair["torch"] for pair in results["flops"].values()])


@part("store count")
def store_count(results: Results) -> str:
    rows = [row for case in store_cases(results).values() for row in case.values()]
    return count([row["met"] for row in [*rows, results["random row, µs"]]
                  if row["met"] is not None])  # fmt: skip


@part("harvest count")
def harvest_count(results: Results) -> str:
    found = results["ways"]["harvest"]
    goal = found.get("goal", harvest.GOAL)
    return count([found["ratio"] <= goal, results["growth"] <= harvest.GOAL_MEMORY])


@part("guard count")
def guard_count(results: Results) -> str:
    found = results["variants"].values()
    return count([one["ratio"] <= one["goal"] for one in found if one["goal"] is not None])


@part("watch count")
def watch_count(results: Results) -> str:
    return count([results[way]["ratio"] <= goal for way, goal in watch.GOALS.items()])


@part("page count")
def page_count(results: Results) -> str:
    goals = results["goals"]
    pages = [one for one in results.values() if isinstance(one, dict) and "made" in one]
    return count([one[key] <= goal for one in pages for key, goal in goals.items()])
