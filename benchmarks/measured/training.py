"""What a guard and a watch cost a training step; the page in a browser; the zoo."""

from __future__ import annotations

import watch
from peers.page import number, plain, table

from measured.parts import Results, at_most, count, line, part, times, verdict


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


@part("zoo exact")
def zoo_exact(results: Results) -> str:
    found = results["architectures"].values()
    return count([not one.get("wrong") and "error" not in one for one in found])


@part("guard line")
def guard_line(results: Results) -> str:
    found = results["variants"]["guard"]
    return line(found["ratio"], "≤", found["goal"])


@part("watch line")
def watch_line(results: Results) -> str:
    return line(results["watch, every=50"]["ratio"], "≤", watch.GOALS["watch, every=50"])


@part("page line")
def page_line(results: Results) -> str:
    ready = results["1,000 modules, one run"]["ready"]
    return line(ready, "≤", results["goals"]["ready"], "s")


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
