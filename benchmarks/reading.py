"""Measure how hard hookline is to read: code lines, complexity, private accesses, and walks.

    python benchmarks/reading.py             print tables
    python benchmarks/reading.py --json      print JSON, with the calls of each file
    PYTHONPATH=FOLDER python benchmarks/reading.py    measure another copy of hookline

A walk is a short program that a reader follows through the files of hookline. A profile function
counts the calls of hookline's functions, the files they are in, and the switches: the calls that
are in another file than the call before them. Each walk runs twice in a process of its own, first
with nothing cached, then warm. A generator counts each time it resumes. Comprehensions, the bodies
of modules and classes, and other threads do not count.

This program uses only public names of hookline, so that it can measure any version.
`tests/source_code.py` defines what is counted in the source.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from source_code import (
    MOST_COMPLEX,
    code_lines,
    complex_functions,
    folder_of,
    is_foundation,
    private_accesses,
    read_package,
)

SOURCES = read_package(Path(hl.__file__).parent)
FILES = {str(Path(hl.__file__).parent / name): name for name in SOURCES}
MEASURED = ("calls", "files", "switches")
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # functions until 3.11

# The walks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(12)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


def capture_a_glob(model: nn.Module, x: Tensor, folder: Path) -> None:
    with hl.capture(model, "h.*.mlp") as record:
        model(x)
    record["h.3.mlp"]


def capture_three_places(model: nn.Module, x: Tensor, folder: Path) -> None:
    with hl.capture(model, "h.0.mlp", "h.3.mlp", "h.11.mlp") as record:
        model(x)
    record["h.3.mlp"]


def edit_a_gradient(model: nn.Module, x: Tensor, folder: Path) -> None:
    with hl.edit(model, "h.3.mlp:grad_input", hl.scale(2.0)):
        model(x).sum().backward()


def guard_a_step(model: nn.Module, x: Tensor, folder: Path) -> None:
    with hl.guard(model):
        model(x).sum().backward()


def watch_a_step(model: nn.Module, x: Tensor, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, to=folder / "run", optimizer=optimizer):
        model(x).sum().backward()
        optimizer.step()


def harvest_a_place(model: nn.Module, x: Tensor, folder: Path) -> None:
    hl.harvest(model, [x, x], "h.3.mlp", to=folder / "store", quiet=True)


Walk = Callable[[nn.Module, Tensor, Path], None]
WALKS: tuple[Walk, ...] = (
    capture_a_glob, capture_three_places, edit_a_gradient, guard_a_step, watch_a_step,
    harvest_a_place,
)  # fmt: skip


def files_of_calls(function: Callable[[], None]) -> list[str]:
    """Return the file of hookline of each call that a function makes, in their order."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in COMPREHENSIONS
        if event == "call" and is_function and code.co_filename in FILES:
            calls.append(FILES[code.co_filename])

    gc.collect()
    gc.disable()  # finalizers would count
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def follow(walk: Walk) -> dict[str, Any]:
    """Count the calls, files and switches of a walk, the first time and warm."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4, 8)
    found: dict[str, Any] = {"walk": walk.__name__.replace("_", " ")}
    for time in ("first", "warm"):
        with tempfile.TemporaryDirectory() as folder:
            calls = files_of_calls(lambda: walk(model, x, Path(folder)))
        by_file = Counter(calls)
        found[time] = {
            "calls": len(calls),
            "files": len(by_file),
            "switches": sum(before != after for before, after in pairwise(calls)),
            "calls by file": dict(by_file.most_common()),
        }
    return found


def follow_all() -> list[dict[str, Any]]:
    """Follow each walk in a new process."""
    new = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=new, max_tasks_per_child=1) as processes:
        return list(processes.map(follow, WALKS))


# The source


def measure_source() -> list[dict[str, Any]]:
    """Count code lines, complex functions and private accesses of each folder and of all files."""
    lines = {name: code_lines(source) for name, source in SOURCES.items()}
    above = {name: list(complex_functions(source)) for name, source in SOURCES.items()}
    accesses = list(private_accesses(SOURCES))

    def row(part: str, names: Collection[str]) -> dict[str, Any]:
        return {
            "part": part,
            "files": len(names),
            "code lines": sum(lines[name] for name in names),
            "complex": [f"{n}:{line} {f} ({c})" for n in names for line, f, c in above[n]],
            "private": [f"{n}:{line} {code}" for n, line, code in accesses if n in names],
        }

    folders: dict[str, list[str]] = {}
    for name in SOURCES:
        folders.setdefault(folder_of(name) or "(no folder)", []).append(name)
    return [
        row("the foundation", list(filter(is_foundation, SOURCES))),
        *(row(folder, names) for folder, names in sorted(folders.items())),
        row("all", list(SOURCES)),
    ]


# The page


def table(head: tuple[str, ...], rows: Iterable[tuple[str | int, ...]]) -> str:
    """Return a table of Markdown: the first column is text, the others are numbers."""
    cells = [head, *([f"{c:,}" if isinstance(c, int) else c for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    ]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def page(parts: list[dict[str, Any]], walks: list[dict[str, Any]]) -> str:
    """Return everything that was measured as a page of Markdown."""
    head = ("part", "files", "code lines", f"above {MOST_COMPLEX}", "private accesses")
    counts = [
        (p["part"], p["files"], p["code lines"], len(p["complex"]), len(p["private"]))
        for p in parts
    ]
    columns = [(time, key) for time in ("first", "warm") for key in MEASURED]
    steps = [(walk["walk"], *(walk[time][key] for time, key in columns)) for walk in walks]
    return "\n".join(
        [
            table(head, counts),
            f"\nFunctions with a cyclomatic complexity above {MOST_COMPLEX}\n",
            *(f"    {found}" for found in parts[-1]["complex"]),
            "\nAccesses to private names of another file\n",
            *(f"    {found}" for found in parts[-1]["private"]),
            "\nWalks through the functions of hookline\n",
            table(("walk", *(f"{time}: {key}" for time, key in columns)), steps),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, with the calls by file")
    options = parser.parse_args()
    parts, walks = measure_source(), follow_all()
    if options.json:
        print(json.dumps({"source": parts, "walks": walks}, indent=1))
    else:
        print(page(parts, walks))


if __name__ == "__main__":
    main()
