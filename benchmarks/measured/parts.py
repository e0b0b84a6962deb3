"""What the parts of a document have in common.

- `part` registers one in `PARTS`
- `times`, `verdict`, `at_most`, `line`, `count`: numbers and goals in words
- `where`: the machine and the date
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.page import number, plain

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
        f"{day}, {clock[:5]} UTC{quick}: {found['cpu']}, {found['cores']} cores, "
        f"{threads}, {system}, Python {found['python']}, torch {found['torch']}"
    )


for _file in (
    "overhead", "compiled", "side_by_side", "summary", "store", "harvest", "guard", "watch", "page",
):  # fmt: skip
    part(f"{_file} machine")(where)


def line(value: float, sign: str, goal: float, unit: str = "×") -> str:
    met = value <= goal if sign == "≤" else value >= goal
    return f"{number(value)} {unit} (goal {sign} {goal:g} {unit}: {verdict(met)})"


def count(met: list[bool]) -> str:
    return f"{sum(met)} of {len(met)}"
