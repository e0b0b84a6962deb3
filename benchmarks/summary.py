"""What a summary costs beside torchinfo and torch's flop counter, and whether the FLOPs are right.

    python benchmarks/summary.py                                   about a minute
    python benchmarks/summary.py --peers-python VENV/bin/python    where torchinfo is installed

The 12-layer transformer of overhead.py, 163 modules, is summarised by each in turn, in a new order
every round, on tiny and on larger values; once before torch's compiler is loaded, which torch's
counter does, and once after that. Ratios are of fast runs (5th percentile). torchinfo is run where
it can be imported: in this Python, or in the one that is named, which needs torch, numpy and
safetensors besides. It counts multiplications by the sizes of weights, without a dispatch mode:
what such a mode costs is shown by an empty one, which hookline needs only for what does not follow
from shapes, and what hooks cost by empty ones. FLOPs are compared with those of torch's own
counter. Goals are printed with pass or miss. Writes latest/summary.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from latest import in_full, write
from overhead import TINY, Size
from timing import Race, machine
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hookline as hl

ROOT = Path(__file__).resolve().parent.parent
LARGER = Size("4096 elements", batch=2, length=32, width=64)
GOAL = 3.0
# These load torch's compiler, and where it is loaded every context sees to compiled models.
LOADING = ("an empty dispatch mode", "torch's flop counter")


class Empty(TorchDispatchMode):
    """Sees every operation, and does nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is asked at every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def nothing(*values: object) -> None:
    """A hook that does nothing."""


def variants(size: Size) -> dict[str, Callable[[], object]]:
    """A run without anything, and each way to a summary, printed as text where it can be."""
    model, ids = size.build()

    def bare() -> object:
        with torch.no_grad():
            return model(ids)

    def hookline() -> object:
        return str(hl.summarize(model, ids))

    def counter() -> object:
        with torch.no_grad(), FlopCounterMode(display=False) as found:
            model(ids)
        return found.get_total_flops()

    def empty_mode() -> object:
        with torch.no_grad(), Empty():
            return model(ids)

    def empty_hooks() -> object:
        handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(nothing, with_kwargs=True),
                module.register_forward_hook(nothing),
            )
        ]
        bare()
        for handle in handles:
            handle.remove()
        return None

    ways: dict[str, Callable[[], object]] = {
        "bare": bare,
        "empty hooks": empty_hooks,
        "an empty dispatch mode": empty_mode,
        "hookline": hookline,
        "torch's flop counter": counter,
    }
    if importlib.util.find_spec("torchinfo"):
        import torchinfo

        def peer() -> object:
            return str(torchinfo.summary(model, input_data=ids, verbose=0))

        ways["torchinfo"] = peer
    return ways


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, groups=4),
        nn.ConvTranspose2d(32, 8, 2, 2), nn.Flatten(), nn.Linear(8 * 32 * 32, 10),
    )  # fmt: skip


def flops() -> dict[str, dict[str, int]]:
    """FLOPs, forward and backward together, by hookline and by torch, which must be equal."""
    transformer, ids = LARGER.build()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "transformer of 163 modules": (transformer, ids),
        "torch's encoder": (encoder, torch.randn(2, 16, 64)),
        "convolutions": (small_network(), torch.randn(2, 3, 32, 32)),
        "GRU": (nn.GRU(8, 16, 2, batch_first=True), torch.randn(2, 10, 8)),
    }
    found: dict[str, dict[str, int]] = {}
    for name, (model, batch) in cases.items():
        # torch has no formula for the attention kernel of the CPU: both count it written out.
        with sdpa_kernel(SDPBackend.MATH):
            totals = hl.summarize(model, batch, backward=True).totals
            with FlopCounterMode(display=False) as counter:
                output = model(batch)
                sum(
                    part.sum() for part in (output if isinstance(output, tuple) else (output,))
                ).backward()
        ours = totals["flops"] + totals["backward_flops"]
        found[name] = {"hookline": ours, "torch": counter.get_total_flops()}
    return found


def timed(rounds: int) -> dict[str, dict[str, float]]:
    sizes = {size.name: variants(size) for size in (TINY, LARGER)}
    result: dict[str, dict[str, float]] = {}
    for loaded in (False, True):
        for name, ways in sizes.items():
            race = Race({way: run for way, run in ways.items() if loaded or way not in LOADING})
            race.warm_up(2)
            for _ in range(3):
                race.run(rounds)
            case = f"{name}, compiler loaded" if loaded else name
            result[case] = {way: race.fast(way) for way in race.variants}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--peers-python", default=None, help="a Python that has torchinfo")
    options = parser.parse_args()
    if options.peers_python and Path(options.peers_python).absolute() != Path(sys.executable):
        command = [options.peers_python, __file__, "--rounds", str(options.rounds)]
        sys.exit(subprocess.call(command, env={**os.environ, "PYTHONPATH": str(ROOT)}))
    torch.set_num_threads(1)
    where = machine()
    print(f"{where['cpu']}, torch {where['torch']}, one thread, 163 modules")
    times, counts = timed(options.rounds), flops()
    for name, found in times.items():
        ours = found["hookline"]
        print(f"\n{name} a value\n  {'':22}     µs   hookline is   goal")
        for way, taken in found.items():
            goal = GOAL if way == "torchinfo" else None
            verdict = "" if goal is None else "pass" if taken / ours >= goal else "miss"
            print(f"  {way:22} {taken:6.0f}   {taken / ours:9.2f} ×   {goal or '':>4} {verdict}")
        if "torchinfo" not in found:
            print("  torchinfo: not installed")
    print("\nFLOPs, forward and backward")
    for name, pair in counts.items():
        verdict = "pass" if pair["hookline"] == pair["torch"] else "miss"
        print(f"  {name:28} {pair['hookline']:>12,}   torch's {pair['torch']:>12,}   {verdict}")
    content = {"machine": where, "µs": times, "flops": counts}
    write("summary", content, in_full(parser, options))


if __name__ == "__main__":
    main()
