"""hookline beside other libraries, each used as its own documentation says.

    python benchmarks/side_by_side.py                     about eight minutes
    python benchmarks/side_by_side.py --quick             two or three, noisier, without memory
    python benchmarks/side_by_side.py --only raw hookline nnsight

Each library has a process of its own (peers/worker.py); they take turns in a new order every
round, on the same model and the same work (peers/tasks.py). An answer that is not what hooks
written by hand give is marked wrong and not timed. Prints RESULTS.md and writes
latest/side_by_side.json.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from latest import write
from peers.page import page
from peers.probes import PROBES, PROCESS
from peers.tasks import TASKS
from peers.worker import Gone, Worker
from timing import machine

HERE = Path(__file__).resolve().parent


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


class Comparison:
    """The libraries' processes and all that came out of them."""

    def __init__(self, names: list[str]) -> None:
        self.workers = {name: Worker(name) for name in names}
        self.peers: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, dict[str, dict[str, Any]]] = {}
        self.times: dict[tuple[str, str], dict[str, list[int]]] = {}
        self.memory: dict[str, dict[str, dict[str, float]]] = {}
        self.features: dict[str, dict[str, dict[str, str]]] = {}
        self.missing: dict[str, str] = {}

    def ask(self, name: str, do: str, **request: Any) -> dict[str, Any] | None:
        """An answer, or None from a library whose process is gone; that is noted."""
        if name not in self.workers:
            return None
        try:
            return self.workers[name].ask(do, **request)
        except Gone as gone:
            self.missing[name] = str(gone)
            self.workers.pop(name).close()
            return None

    def ask_all(self, do: str) -> None:
        """Let all do the same, two at a time: nothing here is timed."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: self.ask(name, do), list(self.workers)))

    def start(self) -> None:
        self.ask_all("ready")
        for name in list(self.workers):  # one after the other: imports are timed
            answer = self.ask(name, "hello")
            if answer is not None:
                self.peers[name] = answer
        self.ask_all("load_models")
        self.peers = {name: peer for name, peer in self.peers.items() if name in self.workers}

    def prepare(self) -> None:
        for name in list(self.workers):
            self.verdicts[name] = {}
            for task in TASKS:
                answer = self.ask(name, "prepare", task=task.name)
                if answer is not None:
                    self.verdicts[name][task.name] = answer
            self.ask(name, "settle")

    def race(self, rounds: int, slot: float, limit: float) -> None:
        """Let all take turns, task by task. A slow one leaves when its time is used up.

        Where one use alone takes longer than that, the one that was checked is its only number.
        """
        shuffle = random.Random(0).shuffle
        spent: dict[tuple[str, str], float] = {}
        for number in range(rounds):
            for task in TASKS:
                order = list(self.workers)
                shuffle(order)
                for name in order:
                    key = (name, task.name)
                    verdict = self.verdicts[name].get(task.name, {})
                    if verdict.get("verdict") != "right" or spent.get(key, 0.0) > limit:
                        continue
                    if verdict["took"] > limit and name != "raw":
                        self.times[key] = {"bare": [], "use": [int(verdict["took"] * 1e9)]}
                        spent[key] = verdict["took"]
                        continue
                    start = time.perf_counter()
                    found = self.ask(name, "time", task=task.name, seconds=slot)
                    spent[key] = spent.get(key, 0.0) + time.perf_counter() - start
                    if found is not None:
                        kept = self.times.setdefault(key, {"bare": [], "use": []})
                        for kind, values in found.items():
                            kept[kind] += values
            say(f"round {number + 1} of {rounds}")

    def measure_memory(self) -> None:
        """Two libraries at a time: each counts the memory of its own process."""
        bare = {task.name: self.first_right(task.name) for task in TASKS if task.has_memory}

        def measure(name: str) -> None:
            found = self.memory[name] = {}
            for task, clean in bare.items():
                if self.verdicts[name].get(task, {}).get("verdict") == "right":
                    answer = self.ask(name, "memory", task=task, bare=clean == name)
                    if answer is not None:
                        found[task] = answer

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(measure, list(self.workers)))

    def first_right(self, task: str) -> str | None:
        """The library that stands for a clean process: hooks by hand, or else hookline."""
        verdicts = {name: self.verdicts[name].get(task, {}) for name in self.workers}
        right = (name for name, told in verdicts.items() if told.get("verdict") == "right")
        return next(right, None)

    def probe(self) -> None:
        """Two libraries at a time: no probe is timed."""

        def probe(name: str) -> None:
            found = self.features[name] = {}
            for title in (*PROBES, PROCESS):
                answer = self.ask(name, "probe", title=title)
                if answer is not None:
                    found[title] = answer

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(probe, list(self.workers)))

    def bare_runs(self, task: str) -> list[int]:
        """Those of the clean processes: hooks by hand, twice; else of the first that has some."""
        runs = {name: self.times.get((name, task), {"bare": []})["bare"] for name in self.peers}
        clean = [*runs.get("raw", []), *runs.get("raw_again", [])]
        return clean or next((found for found in runs.values() if found), [])

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def results(self) -> dict[str, Any]:
        """Everything as plain data: fast runs are the 5th percentile, in ms."""
        bare = {task.name: fast(self.bare_runs(task.name)) for task in TASKS}
        times = {
            name: {
                task: {
                    "ms": fast(kept["use"]),
                    "median_ms": float(np.median(kept["use"])) / 1e6,
                    "uses": len(kept["use"]),
                    "ratio": fast(kept["use"]) / bare[task],
                    "own_bare": fast(kept["bare"]) / bare[task],
                    "setup_ms": self.verdicts[name][task]["setup"] * 1e3,
                }
                for (who, task), kept in self.times.items()
                if who == name
            }
            for name in self.peers
        }
        return {
            "machine": machine() | {"threads": 1},
            "peers": self.peers,
            "missing": self.missing,
            "left_out": peers.LEFT_OUT,
            "bare_ms": bare,
            "verdicts": self.verdicts,
            "times": times,
            "memory": self.memory,
            "features": self.features,
        }


def fast(nanoseconds: list[int]) -> float:
    """The 5th percentile, in ms; of nothing, not a number."""
    if not nanoseconds:
        return float("nan")
    return float(np.quantile(nanoseconds, 0.05)) / 1e6


class Phases:
    """How many seconds each part of the run took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        say(title)
        start = time.perf_counter()
        yield
        self.seconds[title] = round(time.perf_counter() - start, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no memory")
    parser.add_argument("--only", nargs="+", choices=peers.ALL, help="these libraries (with raw)")
    parser.add_argument("--page", type=Path, help="write the page there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = arguments.only or list(peers.ALL)
    begin, load = time.perf_counter(), os.getloadavg()[0]
    comparison = Comparison(["raw", *(name for name in chosen if name != "raw")])
    phase = Phases()
    try:
        with phase("importing"):
            comparison.start()
        with phase("checking that each does the work right"):
            comparison.prepare()
        with phase("time"):
            if arguments.quick:
                comparison.race(rounds=3, slot=0.03, limit=1.0)
            else:
                comparison.race(rounds=16, slot=0.08, limit=3.0)
        if not arguments.quick:
            with phase("memory"):
                comparison.measure_memory()
        with phase("probes"):
            comparison.probe()
    finally:
        comparison.close()
    results = comparison.results()
    results["minutes"] = (time.perf_counter() - begin) / 60
    results["quick"], results["load"], results["phases"] = arguments.quick, load, phase.seconds
    text = page(results)
    if arguments.page is not None:
        arguments.page.write_text(text)
    print(text)
    write("side_by_side", results, full=not (arguments.quick or arguments.only))
    say(", ".join(f"{title} {seconds:.0f} s" for title, seconds in phase.seconds.items()))


if __name__ == "__main__":
    main()
