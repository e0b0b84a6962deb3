"""Values on disk: the store and the harvest."""

from __future__ import annotations

import harvest
from peers.page import number, plain, table

from measured.parts import Results, at_most, count, line, part, times, verdict


def store_cases(results: Results) -> dict[str, Results]:
    return {name: found for name, found in results.items() if name.startswith("batches of ")}


def beyond_raw(row: Results) -> bool:
    """A goal that is missed, and that a raw write does not reach either."""
    return row["ratio"] < row["goal"] and row["raw"] < row["goal"]


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
                cell = f"{times(one['ratio'])} {verdict(one['ratio'] >= goal)}"
                cell += " †" if beyond_raw(one) else ""
            row.append(cell)
        rows.append(row)
    heads = [plain(name.removeprefix("batches of ")) for name in cases]
    return table(["", "goal", *heads], rows)


@part("store reads")
def store_reads(results: Results) -> list[str]:
    found = results["random row, µs"]
    ours, other = found["hookline store"], found["safe_open slice"]
    rows = [
        ["hookline store", number(ours), "", ""],
        ["a slice of `safe_open`", number(other), times(other / ours),
         f"≥ {found['goal']:g} × {verdict(other / ours >= found['goal'])}"],
    ]  # fmt: skip
    return table(["one random row", "µs", "store is", "goal"], rows)


@part("harvest table")
def harvest_table(results: Results) -> list[str]:
    rows = []
    for way, found in results["ways"].items():
        goal = found.get("goal", harvest.GOAL if way == "harvest" else None)
        rows.append(
            [plain(way), number(found["seconds"]), times(found["ratio"]),
             times(found["processor ratio"]), *at_most(found["ratio"], goal)]
        )  # fmt: skip
    if "once, seconds" in results:  # files of before have no such field
        rows.append(["of a harvest, once", number(results["once, seconds"]), "", "", "", ""])
    return table(["", "s", "by the clock", "processor time", "goal", ""], rows)


@part("harvest memory")
def harvest_memory(results: Results) -> list[str]:
    rows = [[f"{int(count):,} batches", f"{found:.0f} MB", "", ""]
            for count, found in results["peak MB"].items()]  # fmt: skip
    rows.append(["growth", times(results["growth"]),
                 *at_most(results["growth"], harvest.GOAL_MEMORY)])  # fmt: skip
    return table(["peak memory of a process", "", "goal", ""], rows)


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


@part("store count")
def store_count(results: Results) -> str:
    every = [row for case in store_cases(results).values() for row in case.values()]
    rows = [row for row in every if row["goal"] is not None]
    beyond = sum(map(beyond_raw, rows))
    rows.append(results["random row, µs"])
    told = count([row["ratio"] >= row["goal"] for row in rows])
    return f"{told}; {beyond} of the others a raw write misses, too" if beyond else told


@part("harvest count")
def harvest_count(results: Results) -> str:
    found = results["ways"]["harvest"]
    goal = found.get("goal", harvest.GOAL)
    return count([found["ratio"] <= goal, results["growth"] <= harvest.GOAL_MEMORY])
