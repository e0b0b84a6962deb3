"""How fast a store is written and read, against the other ways to put tensors on a disk.

    python benchmarks/store.py                  about a minute, 256 MB at a time
    python benchmarks/store.py --megabytes 64   quicker, noisier

The same batches are written by each in turn, several rounds in one run, and the files are deleted
in between. "synced" forces everything onto the disk at the end, as a store does by default;
"not synced" leaves that to the system. Then single random rows are read. Ratios are of the best
rounds; the goals are printed with pass or miss. Writes results/store.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timing import machine, no_garbage_collection
from torch import Tensor

import hookline as hl

RESULTS = Path(__file__).resolve().parent / "results" / "store.json"
WIDTH = 1024
Write = Callable[[Path, list[Tensor], bool], None]


def sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def raw(folder: Path, batches: list[Tensor], synced: bool) -> None:
    file = os.open(folder / "raw", os.O_CREAT | os.O_WRONLY)
    for batch in batches:
        view = memoryview(batch.view(torch.uint8).numpy()).cast("B")
        while view:
            view = view[os.write(file, view) :]
    if synced:
        os.fsync(file)
    os.close(file)


def store(folder: Path, batches: list[Tensor], synced: bool) -> None:
    with hl.Store.create(folder / "s", sync="shard" if synced else "never") as writer:
        for batch in batches:
            writer.append({"h.3": batch})


def safetensors(folder: Path, batches: list[Tensor], synced: bool) -> None:
    for n, batch in enumerate(batches):
        save_file({"h.3": batch}, folder / f"{n}.safetensors")
        if synced:
            sync(folder / f"{n}.safetensors")


def torch_save(folder: Path, batches: list[Tensor], synced: bool) -> None:
    for n, batch in enumerate(batches):
        torch.save(batch, folder / f"{n}.pt")
        if synced:
            sync(folder / f"{n}.pt")


def zarr(folder: Path, batches: list[Tensor], synced: bool) -> None:
    import zarr

    rows = len(batches[0])
    array = zarr.create_array(
        store=str(folder / "z"),
        shape=(rows * len(batches), WIDTH),
        chunks=(rows, WIDTH),
        dtype="u2",
    )
    for n, batch in enumerate(batches):
        array[n * rows : (n + 1) * rows] = batch.view(torch.uint16).numpy()
    if synced:
        for path in (folder / "z").rglob("*"):
            sync(path)


def datasets(folder: Path, batches: list[Tensor], synced: bool) -> None:
    from datasets import Array2D, Features
    from datasets.arrow_writer import ArrowWriter

    rows = len(batches[0])
    form = Features({"h.3": Array2D((rows, WIDTH), "float16")})
    with ArrowWriter(path=str(folder / "d.arrow"), features=form) as writer:
        for batch in batches:
            writer.write({"h.3": batch.half().numpy()})
        writer.finalize()
    if synced:
        sync(folder / "d.arrow")


WAYS: dict[str, Write] = {
    "raw write": raw,
    "hookline store": store,
    "save_file per batch": safetensors,
    "torch.save per batch": torch_save,
}
OPTIONAL: dict[str, Write] = {"zarr": zarr, "datasets": datasets}
GOALS = {
    "raw write": 0.9, "save_file per batch": 2.0, "torch.save per batch": 3.0, "zarr": 3.0,
    "datasets": 3.0,
}  # fmt: skip


def race(ways: dict[str, Write], batches: list[Tensor], synced: bool, rounds: int, base: Path):
    """The best seconds of each, in turn and in a new order every round."""
    best = dict.fromkeys(ways, float("inf"))
    order = list(ways.items())
    shuffle = random.Random(0).shuffle
    for _ in range(rounds + 1):  # the first warms up
        shuffle(order)
        for name, write in order:
            folder = Path(tempfile.mkdtemp(dir=base))
            os.sync()  # what others left to write is not ours to wait for
            start = time.perf_counter()
            write(folder, batches, synced)
            taken = time.perf_counter() - start
            shutil.rmtree(folder)
            best[name] = min(best[name], taken) if _ else best[name]
    return best


def reads(base: Path, batches: list[Tensor], rounds: int) -> dict[str, float]:
    """Microseconds for one random row, from the same rows in one file."""
    folder = base / "read"
    with hl.Store.create(folder, sync="never") as writer:
        for batch in batches:
            writer.append({"h.3": batch})
    stored = hl.Store.open(folder)["h.3"]
    picks = random.Random(0).choices(range(len(stored)), k=4000)
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        part = file.get_slice("h.3")

        def by_slice() -> Iterator[Tensor]:
            return (part[n : n + 1] for n in picks)

        def by_store() -> Iterator[Tensor]:
            return (stored[n] for n in picks)

        for a, b in zip(by_store(), by_slice(), strict=True):
            assert torch.equal(a.view(torch.int16), b[0].view(torch.int16))
        best = {"hookline store": float("inf"), "safe_open slice": float("inf")}
        with no_garbage_collection():
            for _ in range(rounds):
                for name, run in (("hookline store", by_store), ("safe_open slice", by_slice)):
                    start = time.perf_counter()
                    for _row in run():
                        pass
                    best[name] = min(best[name], (time.perf_counter() - start) / len(picks) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    installed = {n: way for n, way in OPTIONAL.items() if importlib.util.find_spec(n)}
    where = machine()
    print(f"{where['cpu']}, torch {where['torch']}, {options.megabytes} MB in bfloat16")
    result: dict[str, object] = {"machine": where, "megabytes": options.megabytes}
    base = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for size in (1, 8):
            rows = (size << 20) // (2 * WIDTH)
            batches = [
                torch.randn(rows, WIDTH).bfloat16() for _ in range(options.megabytes // size)
            ]
            for synced in (False, True):
                case = f"batches of {size} MB, {'synced' if synced else 'not synced'}"
                best = race(WAYS | installed, batches, synced, options.rounds, base)
                ours = best["hookline store"]
                result[case] = {
                    name: {"GB/s": options.megabytes * 2**20 / 1e9 / taken, "ratio": taken / ours}
                    for name, taken in best.items()
                }
                print(f"\n{case}\n  {'':22} GB/s   store is   goal")
                for name, taken in best.items():
                    rate = options.megabytes * 2**20 / 1e9 / taken
                    goal = GOALS.get(name)
                    verdict = "" if goal is None else "pass" if taken / ours >= goal else "miss"
                    told = f"{goal or '':>4} {verdict}"
                    print(f"  {name:22} {rate:5.2f}   {taken / ours:5.2f} ×   {told}")
        for name in OPTIONAL.keys() - installed.keys():
            print(f"  {name}: not installed")
            result[name] = "not installed"
        rows = reads(base, batches, options.rounds)
        ratio = rows["safe_open slice"] / rows["hookline store"]
        result["random row, µs"] = rows | {"ratio": ratio}
        print(f"\none random row of {2 * WIDTH} bytes")
        for name, taken in rows.items():
            print(f"  {name:22} {taken:6.2f} µs")
        print(f"  store is {ratio:.1f} × faster; goal 4.0 {'pass' if ratio >= 4 else 'miss'}")
    finally:
        shutil.rmtree(base)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
