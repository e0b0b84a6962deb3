"""How fast a store is written and read, against the other ways to put tensors on a disk.

    python benchmarks/store.py                      about a minute, 256 MB at a time
    python benchmarks/store.py --peers-python P     zarr and datasets, from another Python
    python benchmarks/store.py --megabytes 64       quicker, noisier

The same batches are written by each in turn, many rounds in one run, and the files are deleted in
between. "synced" forces everything onto the disk: the raw write syncs its one file and its folder
when it begins and when it ends, as a store does by default with its files; the others sync each
file that they make. "not synced" leaves that to the system. "by hand" makes the calls that a store
makes (rows, header, index), prepared beforehand: what the safety costs without the Python around
it. "raw, space ahead" is the raw write into a file whose space was asked for in one call: a store
asks for some, too, as it grows. "datasets per batch" saves data sets, as people do; the inner
class that writes their files stands beside it, with the same goal. Then single random rows are
read.

Ratios are of the best rounds. A goal is met ("pass"), or missed ("miss"), or it is "beyond raw":
missed, and the raw write of the same bytes does not reach it either. The last column is how many
times as fast the raw write is. Writes latest/store.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import store_peers
import torch
from latest import in_full, write
from safetensors import safe_open
from safetensors.torch import save_file
from store_peers import WIDTH, sync, timed
from timing import machine, no_garbage_collection
from torch import Tensor

import hookline as hl

GOALS = {
    "raw write": 0.9, "save_file per batch": 2.0, "torch.save per batch": 3.0,
    **dict.fromkeys(store_peers.WAYS, 3.0),
}  # fmt: skip
Run = Callable[[Path, bool], float]  # into a folder, synced or not; gives seconds


def view(batch: Tensor) -> memoryview:
    return memoryview(batch.view(torch.uint8).numpy()).cast("B")


def raw(folder: Path, batches: list[Tensor], synced: bool, ahead: bool = False) -> None:
    file = os.open(folder / "raw", os.O_CREAT | os.O_WRONLY)
    if ahead:
        os.posix_fallocate(file, 0, sum(batch.nbytes for batch in batches))
    if synced:
        os.fsync(file)
        sync(folder)
    for batch in batches:
        data = view(batch)
        while data:
            data = data[os.write(file, data) :]
    if synced:
        os.fsync(file)
        sync(folder)
    os.close(file)


def raw_ahead(folder: Path, batches: list[Tensor], synced: bool) -> None:
    raw(folder, batches, synced, ahead=True)


def by_hand(folder: Path, batches: list[Tensor], synced: bool) -> None:
    """The calls of a store: rows behind the last ones, then a header, then an index."""
    page, place = b" " * 4096, 65536
    file, index = (os.open(folder / name, os.O_CREAT | os.O_WRONLY) for name in ("rows", "index"))
    os.write(index, page)
    if synced:
        os.fsync(index)
        sync(folder)
    os.write(file, page * 16)
    for batch in batches:
        place += os.pwrite(file, view(batch), place)
        os.pwrite(file, page, 0)
        os.pwrite(index, page, 0)
    if synced:
        os.fsync(file)
        os.fsync(index)
        sync(folder)
    os.close(file)
    os.close(index)


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


WAYS = {
    "raw write": raw,
    "hookline store": store,
    "raw, space ahead": raw_ahead,
    "by hand": by_hand,
    "save_file per batch": safetensors,
    "torch.save per batch": torch_save,
}


class Peers:
    """zarr and datasets, in this Python or in another one."""

    def __init__(self, python: str | None) -> None:
        self.names = list(store_peers.installed())
        self.other = None
        if python is not None:
            self.other = subprocess.Popen(
                [python, "-W", "ignore", store_peers.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            self.names = self._answer()

    def _answer(self):
        return json.loads(self.other.stdout.readline())

    def _ask(self, **told):
        self.other.stdin.write(json.dumps(told) + "\n")
        self.other.stdin.flush()
        return self._answer()

    def begin(self, megabytes: int, size: int) -> dict[str, Run]:
        """Have batches; gives what writes them."""
        if self.other is None:
            batches = store_peers.arrays(megabytes, size) if self.names else []
            return {name: here(store_peers.WAYS[name], batches) for name in self.names}
        self._ask(megabytes=megabytes, size=size)

        def there(name: str) -> Run:
            return lambda folder, synced: self._ask(way=name, folder=str(folder), synced=synced)

        return {name: there(name) for name in self.names}

    def close(self) -> None:
        if self.other is not None:
            self.other.stdin.close()
            self.other.wait()


def here(write: store_peers.Write, batches: list) -> Run:
    return lambda folder, synced: timed(write, folder, batches, synced)


def race(ways: dict[str, Run], synced: bool, rounds: int, base: Path) -> dict[str, float]:
    """The best seconds of each, in turn and in a new order every round."""
    best = dict.fromkeys(ways, float("inf"))
    order = list(ways.items())
    shuffle = random.Random(0).shuffle
    for turn in range(rounds + 1):  # the first warms up
        shuffle(order)
        for name, run in order:
            if name in store_peers.WAYS and turn % 3 == 2:
                continue  # slow, and far from the goal
            folder = Path(tempfile.mkdtemp(dir=base))
            os.sync()  # what others left to write is not ours to wait for
            taken = run(folder, synced)
            shutil.rmtree(folder)
            best[name] = min(best[name], taken) if turn else best[name]
    return best


def table(best: dict[str, float], megabytes: int) -> dict[str, dict[str, float | str | None]]:
    """Print a case; gives it for the results."""
    print(f"  {'':37}GB/s   store is      goal              raw is")
    ours, bare = best["hookline store"], best["raw write"]
    rows = {}
    for name, taken in best.items():
        rate, ratio, goal = megabytes * 2**20 / 1e9 / taken, taken / ours, GOALS.get(name)
        found = verdict(ratio, taken / bare, goal)
        told = f"{goal or '':>4} {found or '':10}"
        print(f"  {name:36} {rate:5.2f}   {ratio:5.2f} ×   {told}   {taken / bare:5.2f} ×")
        rows[name] = {
            "GB/s": rate, "ratio": ratio, "goal": goal, "verdict": found, "raw": taken / bare,
        }  # fmt: skip
    return rows


def verdict(ratio: float, of_raw: float, goal: float | None) -> str | None:
    """Whether a goal is met and, if not, whether the raw write meets it."""
    if goal is None:
        return None
    return "pass" if ratio >= goal else "miss" if of_raw >= goal else "beyond raw"


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--peers-python", default=None, help="a Python with zarr and datasets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    megabytes, peers, where = options.megabytes, Peers(options.peers_python), machine()
    print(f"{where['cpu']}, torch {where['torch']}, {megabytes} MB in bfloat16")
    result: dict[str, object] = {"machine": where, "megabytes": megabytes}
    base = Path(tempfile.mkdtemp(dir=options.folder))
    batches: list[Tensor] = []
    try:
        for size in (1, 8):
            plain = store_peers.arrays(megabytes, size)
            batches = [torch.from_numpy(one).view(torch.bfloat16) for one in plain]
            ways = {name: here(way, batches) for name, way in WAYS.items()}
            ways |= peers.begin(megabytes, size)
            for synced in (False, True):
                case = f"batches of {size} MB, {'synced' if synced else 'not synced'}"
                best = race(ways, synced, options.rounds, base)
                print(f"\n{case}")
                result[case] = table(best, megabytes)
        for name in store_peers.WAYS.keys() - set(peers.names):
            print(f"  {name}: not installed")
            result[name] = "not installed"
        rows = reads(base, batches, options.rounds)
        ratio = rows["safe_open slice"] / rows["hookline store"]
        found = "pass" if ratio >= 4 else "miss"
        result["random row, µs"] = rows | {"ratio": ratio, "goal": 4.0, "verdict": found}
        print(f"\none random row of {2 * WIDTH} bytes")
        for name, taken in rows.items():
            print(f"  {name:22} {taken:6.2f} µs")
        print(f"  store is {ratio:.1f} × faster; goal 4.0 {found}")
    finally:
        shutil.rmtree(base)
        peers.close()
    write("store", result, in_full(parser, options))


if __name__ == "__main__":
    main()
