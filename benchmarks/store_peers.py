"""The other ways to put batches on a disk, for store.py.

Each takes a folder, the batches as arrays of 16 bits, and whether to force them onto the disk. As
zarr and datasets bring many packages, they may live in a Python of their own: run as a program,
this file times what it is told to on its standard input, one JSON object a line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 1024
Arrays = list[np.ndarray]
Write = Callable[[Path, Any, bool], None]


def arrays(megabytes: int, size: int) -> Arrays:
    """Batches of `size` megabytes: random numbers as 16 bits, the upper halves of float32."""
    random = np.random.default_rng(0)
    rows = (size << 20) // (2 * WIDTH)
    wide = (random.standard_normal((rows, WIDTH), "f4") for _ in range(megabytes // size))
    return [(one.view("u4") >> 16).astype("u2") for one in wide]


def sync(*paths: Path) -> None:
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def zarr(folder: Path, batches: Arrays, synced: bool, **options: Any) -> None:
    import zarr

    rows = len(batches[0])
    array = zarr.create_array(
        store=str(folder / "z"),
        shape=(rows * len(batches), WIDTH),
        chunks=(rows, WIDTH),
        dtype="u2",
        **options,
    )
    for n, batch in enumerate(batches):
        array[n * rows : (n + 1) * rows] = batch
    if synced:
        sync(*(folder / "z").rglob("*"))


def plain_zarr(folder: Path, batches: Arrays, synced: bool) -> None:
    zarr(folder, batches, synced, compressors=None)


def _table(batch: np.ndarray) -> Any:
    import pyarrow

    flat = pyarrow.array(batch.reshape(-1))
    return pyarrow.table({"h.3": pyarrow.FixedSizeListArray.from_arrays(flat, WIDTH)})


def datasets(folder: Path, batches: Arrays, synced: bool) -> None:
    """A data set per batch, from Arrow tables: faster than from arrays, lists or a generator."""
    import datasets

    for n, batch in enumerate(batches):
        datasets.Dataset(_table(batch)).save_to_disk(str(folder / str(n)))
    if synced:
        sync(*folder.rglob("*"))


def writer(folder: Path, batches: Arrays, synced: bool, by_hand: bool = False) -> None:
    """The class by which datasets itself writes the one file of a data set."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    form = Features({"h.3": List(Value("uint16"), length=WIDTH)})
    with ArrowWriter(path=str(folder / "d.arrow"), features=form) as writer:
        for batch in batches:
            if by_hand:
                writer.write_table(_table(batch))
            else:
                writer.write_batch({"h.3": batch})
        writer.finalize()
    if synced:
        sync(folder / "d.arrow", folder)


def writer_of_tables(folder: Path, batches: Arrays, synced: bool) -> None:
    writer(folder, batches, synced, by_hand=True)


WAYS: dict[str, Write] = {
    "zarr": zarr,
    "zarr, uncompressed": plain_zarr,
    "datasets per batch": datasets,
    "datasets' inner writer": writer,
    "datasets' inner writer, Arrow tables": writer_of_tables,
}


def installed() -> dict[str, Write]:
    """Those whose package this Python has."""
    there = {name for name in ("zarr", "datasets") if importlib.util.find_spec(name)}
    if "datasets" in there:
        import datasets

        datasets.disable_progress_bars()
    return {name: way for name, way in WAYS.items() if re.split(r"\W", name)[0] in there}


def timed(write: Write, folder: Path, batches: Any, synced: bool) -> float:
    start = time.perf_counter()
    write(folder, batches, synced)
    return time.perf_counter() - start


def main() -> None:
    print(json.dumps(list(installed())), flush=True)
    batches: Arrays = []
    for line in sys.stdin:
        told = json.loads(line)
        if "megabytes" in told:
            batches = arrays(told["megabytes"], told["size"])
            print(json.dumps(len(batches)), flush=True)
        else:
            way, folder = WAYS[told["way"]], Path(told["folder"])
            print(json.dumps(timed(way, folder, batches, told["synced"])), flush=True)


if __name__ == "__main__":
    main()
