"""hookline beside other libraries, each used as its own documentation says.

    python benchmarks/side_by_side.py                     about eight minutes
    python benchmarks/side_by_side.py --quick             one or two, noisier, without memory
    python benchmarks/side_by_side.py --only raw hookline nnsight

Each library has a process of its own (peers/worker.py); they take turns in a new order every
round, on the same model and the same work (peers/tasks.py). An answer that is not what hooks
written by hand give is marked wrong and not timed. Writes RESULTS.md and results/side_by_side.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
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

    def start(self) -> None:
        for worker in self.workers.values():  # they import at the same time
            worker.send("hello")
        for name, worker in list(self.workers.items()):
            try:
                self.peers[name] = worker.answer(300)
            except Gone as gone:
                self.missing[name] = str(gone)
                del self.workers[name]

    def prepare(self) -> None:
        for name in list(self.workers):
            self.verdicts[name] = {}
            for task in TASKS:
                answer = self.ask(name, "prepare", task=task.name)
                if answer is not None:
                    self.verdicts[name][task.name] = answer

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
        for name in list(self.workers):
            self.memory[name] = {}
            for task in TASKS:
                right = self.verdicts[name].get(task.name, {}).get("verdict") == "right"
                if task.has_memory and right:
                    answer = self.ask(name, "memory", task=task.name)
                    if answer is not None:
                        self.memory[name][task.name] = answer

    def probe(self) -> None:
        for name in list(self.workers):
            self.features[name] = {}
            for title in (*PROBES, PROCESS):
                answer = self.ask(name, "probe", title=title)
                if answer is not None:
                    self.features[name][title] = answer

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def results(self) -> dict[str, Any]:
        """Everything as plain data: fast runs are the 5th percentile, in ms."""
        bare = {
            task.name: fast(self.times[("raw", task.name)]["bare"])
            for task in TASKS
            if ("raw", task.name) in self.times
        }
        # Hand-written hooks have no summary: hookline's process gives the bare model there.
        for (_, task), kept in self.times.items():
            if np.isnan(bare.get(task, np.nan)):
                bare[task] = fast(kept["bare"])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no memory")
    parser.add_argument("--only", nargs="+", choices=peers.ALL, help="these libraries (with raw)")
    parser.add_argument("--page", default=str(HERE / "RESULTS.md"), help="where the page goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = arguments.only or list(peers.ALL)
    begin, load = time.perf_counter(), os.getloadavg()[0]
    comparison = Comparison(["raw", *(name for name in chosen if name != "raw")])
    try:
        say("importing")
        comparison.start()
        say("checking that each does the work right")
        comparison.prepare()
        if arguments.quick:
            comparison.race(rounds=3, slot=0.03, limit=1.0)
        else:
            comparison.race(rounds=16, slot=0.08, limit=3.0)
            say("memory")
            comparison.measure_memory()
        say("probes")
        comparison.probe()
    finally:
        comparison.close()
    results = comparison.results()
    results["minutes"] = (time.perf_counter() - begin) / 60
    results["quick"], results["load"] = arguments.quick, load
    (HERE / "results").mkdir(exist_ok=True)
    stored = HERE / "results" / "side_by_side.json"
    if Path(arguments.page) == HERE / "RESULTS.md":
        stored.write_text(json.dumps(results, indent=1) + "\n")
    text = page(results)
    Path(arguments.page).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
