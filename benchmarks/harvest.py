"""What a harvest costs beside the forward that it needs anyway, and whether its memory grows.

    python benchmarks/harvest.py            about two minutes
    python benchmarks/harvest.py --quick    half a minute, noisier

Four places of a 12-layer transformer go to disk. The reference is the bare forward to the last of
these places, over the same batches; beside it stands what one would write by hand, hooks and
`torch.save` for each batch. All are run in turn, in a new order every round, with everything that
belongs to a run: plan, fingerprint, files, the last sync, and the first forward, which goes through
all 12 layers to see what fires, and not through 9. A ratio is the median over rounds of what a way
took against the bare forward of the same round; processor time is that of all threads. "once" is
what a run of a single batch takes beyond a bare forward. It is part of the ratio, and large there:
a run of 12 batches is short. A user's, of thousands, has it once as well.

As in any process that has loaded a real model, a large block of memory has been freed before. Until
that has happened, malloc gives what is freed back to the system and takes it again page by page:
that makes the bare forward a fifth slower or not, by chance, and with it all ratios.

Then the peak memory of a process that harvests so many rows, and of one that harvests ten times as
many. Prints a table with the goals and writes latest/harvest.json.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from latest import in_full, write
from timing import machine, settle_memory
from torch import Tensor, nn

import hookline as hl

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LENGTH, BATCH = 256, 128, 4
PLACES = "layers.{2,4,6,8}"
GOAL, GOAL_MEMORY = 1.15, 1.10


class Block(nn.Module):
    """A layer of a transformer. Torch's own takes another, faster path while no hook is on it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batches(count: int) -> Iterator[Tensor]:
    """New tensors each time, as a loader gives them, so that memory would show what is kept."""
    for number in range(count):
        yield torch.full((BATCH, LENGTH, WIDTH), number / 1000)


def bare(model: Transformer, count: int, folder: Path) -> None:
    with torch.no_grad():
        for x in batches(count):
            for layer in model.layers[:9]:
                x = layer(x)


def harvested(model: Transformer, count: int, folder: Path) -> None:
    hl.harvest(model, batches(count), PLACES, to=folder / "acts", quiet=True)


def harvested_small(model: Transformer, count: int, folder: Path) -> None:
    hl.harvest(model, batches(count), PLACES, to=folder / "acts", quiet=True, dtype=torch.bfloat16)


def measured(model: Transformer, count: int, folder: Path) -> None:
    hl.harvest(
        model, batches(count), PLACES, to=folder / "acts", quiet=True,
        statistics=[hl.Variance()],
    )  # fmt: skip


def by_hand(model: Transformer, count: int, folder: Path) -> None:
    kept: dict[int, Tensor] = {}
    handles = [
        model.layers[n].register_forward_hook(lambda m, a, y, n=n: kept.__setitem__(n, y.clone()))
        for n in (2, 4, 6, 8)
    ]
    with torch.no_grad():
        for number, x in enumerate(batches(count)):
            for layer in model.layers[:9]:
                x = layer(x)
            torch.save(kept, folder / f"{number}.pt")
    for handle in handles:
        handle.remove()


WAYS: dict[str, Callable[[Transformer, int, Path], None]] = {
    "bare forward": bare,
    "bare again": bare,
    "harvest": harvested,
    "harvest, bfloat16": harvested_small,
    "harvest, Variance too": measured,
    "hooks and torch.save": by_hand,
}


def once(rounds: int, base: Path) -> float:
    """The seconds that a run takes whatever its length: the least of a harvest of one batch."""
    model, best = Transformer().eval(), [float("inf")] * 2
    for _ in range(2 * rounds + 1):
        for n, way in enumerate((bare, harvested)):
            folder = Path(tempfile.mkdtemp(dir=base))
            start = time.perf_counter()
            way(model, 1, folder)
            best[n] = min(best[n], time.perf_counter() - start)
            shutil.rmtree(folder)
    return best[1] - best[0]


def race(count: int, rounds: int, base: Path) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each way, by the clock and of the processor, in turn, in changing order."""
    model = Transformer().eval()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    order = list(WAYS.items())
    shuffle = random.Random(0).shuffle
    for turn in range(rounds + 1):  # the first warms up
        shuffle(order)
        for name, way in order:
            folder = Path(tempfile.mkdtemp(dir=base))
            start, used = time.perf_counter(), time.process_time()
            way(model, count if turn else 2, folder)
            taken = time.perf_counter() - start, time.process_time() - used
            shutil.rmtree(folder)
            if turn:
                times[name].append(taken)
    return times


def peak(count: int, base: Path) -> float:
    """The peak memory, in MB, of a process of its own that harvests so many batches."""
    command = [sys.executable, __file__, "--peak-of", str(count), "--folder", str(base)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--peak-of", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if options.peak_of is not None:
            layer = nn.Sequential(
                *(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            )  # more disk, less work
            hl.harvest(layer, batches(options.peak_of), "*", to=base / "acts", quiet=True)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            return
        count, rounds, few = (8, 3, 20) if options.quick else (12, 5, 100)
        where = machine()
        rows = count * BATCH * LENGTH
        size = 4 * rows * WIDTH * 4
        print(f"{where['cpu']}, torch {where['torch']}, one thread")
        print(f"{rows:,} tokens × 4 places × {WIDTH} float32, {size / 1e6:.0f} MB a run\n")
        settle_memory()
        times = race(count, rounds, base)
        print(f"  {'':24}  by the clock     processor time")
        table = {}
        for name, taken in times.items():
            pairs = list(zip(taken, times["bare forward"], strict=True))
            clock, processor = (statistics.median(a[n] / b[n] for a, b in pairs) for n in (0, 1))
            seconds = statistics.median(one[0] for one in taken)
            goal = f"≤ {GOAL} {'pass' if clock <= GOAL else 'miss'}" if name == "harvest" else ""
            print(f"  {name:24} {seconds:6.2f} s {clock:5.2f} ×   {processor:5.2f} ×   {goal}")
            table[name] = {"seconds": seconds, "ratio": clock, "processor ratio": processor}
        fixed = once(rounds, base)
        print(f"  once in a harvest, however long: {fixed * 1e3:.0f} ms")
        peaks = {few: peak(few, base), 10 * few: peak(10 * few, base)}
        print("\npeak memory of a process")
        for batch_count, megabytes in peaks.items():
            written = batch_count * BATCH * LENGTH * 4 * WIDTH * 4 / 1e6
            print(
                f"  {batch_count * BATCH * LENGTH:9,} rows, {written:6.0f} MB: {megabytes:6.0f} MB"
            )
        growth = peaks[10 * few] / peaks[few]
        verdict = "pass" if growth <= GOAL_MEMORY else "miss"
        print(f"  {growth:.2f} × for 10 × the rows; goal ≤ {GOAL_MEMORY} {verdict}")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    content = {
        "machine": where, "tokens": rows, "ways": table, "once, seconds": fixed,
        "peak MB": peaks, "growth": growth,
    }  # fmt: skip
    write("harvest", content, in_full(parser, options))


if __name__ == "__main__":
    main()
