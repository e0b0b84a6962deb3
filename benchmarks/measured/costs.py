"""What hookline adds to a model: beside hooks by hand, compiled, and what a summary takes."""

from __future__ import annotations

import summary
from peers.page import number, plain, table

from measured.parts import Results, count, line, part, times, verdict, where


def overhead_rows(results: Results, ways: tuple[str, ...]) -> list[list[str]]:
    """One row a case that has these ways: what each adds a place, and that over raw hooks."""
    rows = []
    for case in results["cases"]:
        found = case["variants"]
        if found.keys() >= {"raw again", *ways}:
            added = {name: found[name]["added_us"] for name in ("raw", "raw again", *ways)}
            row = [case["name"], number(found["bare"]["fast_us"] / 1e3)]
            row.append(number(added["raw"] / case["places"]))
            for name in ways:
                row += [number(added[name] / case["places"]), times(added[name] / added["raw"])]
            rows.append([*row, times(added["raw again"] / added["raw"])])
    return rows


@part("overhead values")
def overhead_values(results: Results) -> list[str]:
    head = [
        "", "bare, ms", "raw", "clone", "/ raw", "care", "/ raw", "hookline", "/ raw",
        "raw again / raw",
    ]  # fmt: skip
    return table(head, overhead_rows(results, ("raw + clone", "raw + care", "hookline")))


@part("overhead gradients")
def overhead_gradients(results: Results) -> list[str]:
    ways = ("full backward", "hookline :grad_output", "hookline :grad_input")
    head = [
        "", "bare, ms", "raw", "full backward", "/ raw", "`:grad_output`", "/ raw", "`:grad_input`",
        "/ raw", "raw again / raw",
    ]  # fmt: skip
    return table(head, overhead_rows(results, ways))


@part("overhead goals")
def overhead_goals(results: Results) -> list[str]:
    words = {"pass": "met", "miss": "missed", "pass?": "met ?", "miss?": "missed ?"}
    rows = []
    for goal in results["goals"]:
        unit = "" if goal["unit"] == "×" else f" {goal['unit']}"
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


@part("overhead warm")
def overhead_warm(results: Results) -> str:
    """Entering and leaving in a loop."""
    told = "{places} places in {ours} µs, by hand in {raw} µs"
    rows = results["warm"]
    return "; ".join(
        told.format(places=row["places"], ours=number(row["hookline"]), raw=number(row["raw"]))
        for row in rows
    )


@part("overhead entering")
def overhead_entering(results: Results) -> list[str]:
    ways = ("capture", "edit", "hook")
    rows = []
    for row in results["entering"]["rows"]:
        taken = [number(row["us"][way]) for way in ("raw", *ways)]
        met = verdict(all(row["us"][way] <= row["at_most_us"] for way in ways))
        goal = f"≤ {number(row['at_most_us'])} ({met})"
        rows.append([f"{row['modules']:,}", f"`{row['place']}`", *taken, goal])
    head = ["modules", "", "raw, µs", *(f"`{way}`, µs" for way in ways), "goal: 3 × raw + 20 µs"]
    return table(head, rows)


@part("overhead entering machine")
def overhead_entering_machine(results: Results) -> str:
    return where(results["entering"])


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


@part("summary table")
def summary_table(results: Results) -> list[str]:
    sizes = list(results["µs"])
    rows = []
    for way in results["µs"][sizes[-1]]:  # which has all of them
        row = [plain(way)]
        for size in sizes:
            if way not in results["µs"][size]:
                row += ["", ""]
                continue
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


@part("summary line")
def summary_line(results: Results) -> str:
    found = results["µs"]["32 elements"]
    if "torchinfo" not in found:
        return "torchinfo was not installed"
    return line(found["torchinfo"] / found["hookline"], "≥", summary.GOAL)


@part("overhead count")
def overhead_count(results: Results) -> str:
    goals = [goal["verdict"].startswith("pass") for goal in results["goals"]]
    entered = [
        row["us"][way] <= row["at_most_us"]
        for row in results["entering"]["rows"]
        for way in ("capture", "edit", "hook")
    ]
    return count(goals + entered)


@part("summary count")
def summary_count(results: Results) -> str:
    fast = [found["torchinfo"] / found["hookline"] >= summary.GOAL
            for found in results["µs"].values() if "torchinfo" in found]  # fmt: skip
    return count(fast + [pair["hookline"] == pair["torch"] for pair in results["flops"].values()])
