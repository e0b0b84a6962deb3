"""Stores with known samples, and ways to break their files."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from oracles import Killed
from safetensors import safe_open

from hookline import Store, operating_system
from hookline.storage import shard_writer as store_shards
from hookline.storage import store_files
from hookline.storage import store_writer as store_writing

HEADER = 65536  # bytes of the header of a shard
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


def random_bits(shape, dtype):
    """Return random bit patterns, with NaN payloads among them."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).squeeze(-1)


def same_bits(a, b):
    """Return True if shape, dtype and bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(
        *(t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    )


def sample(k):
    """Return sample k of a counted store: a row, and k % 4 rows of varying length."""
    return torch.full((3,), float(k)), torch.full((k % 4, 2), k, dtype=torch.int32)


def append_counted(writer, count=3):
    """Append the next samples of a counted store."""
    numbers = range(writer.samples, writer.samples + count)
    rows, varying = zip(*map(sample, numbers), strict=True)
    values = {"h.3": torch.stack(rows), "h/../v": list(varying)}
    writer.append(values, ids=[f"s{k}" for k in numbers])


def check_counted(folder, samples):
    """Check that a counted store holds exactly these samples, in files of safetensors."""
    store = Store.open(folder)
    assert len(store) == samples
    if samples:
        rows, varying = zip(*map(sample, range(samples)), strict=True)
        assert same_bits(store["h.3"][:], torch.stack(rows))
        found = store["h/../v"][:]
        assert all(same_bits(one, other) for one, other in zip(found, varying, strict=True))
    if samples:
        assert store.ids == [f"s{k}" for k in range(samples)]
    check_files(folder)
    return store


def check_files(folder):
    """Check that safetensors reads every file of a store."""
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                file.get_tensor(name)


def rewrite_index(folder, change, rank=0):
    """Change an index and its checksum."""
    path = Path(folder) / f"rank{rank:05d}.index.json"
    content = json.loads(path.read_text())
    change(content)
    content.pop("crc32", None)
    content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps(content))


def shard_of(folder, place, part="rows"):
    """Return the last file that holds values of a place."""
    index = json.loads((folder / "rank00000.index.json").read_text())
    series = next(s for s in index["series"] if (s["place"], s["part"]) == (place, part))
    return folder / f"rank00000-{series['shards'][-1]:05d}.safetensors"


def patch_write_at(monkeypatch, function):
    """Replace the function with which stores write, in each module that uses it."""
    for module in (store_files, store_shards):
        monkeypatch.setattr(module, "write_at", function)


def breaking(monkeypatch, after, error, half):
    """Make the n-th write to a shard fail, optionally after half of it. Return a counter."""
    calls = [0]

    def write_at(file, data, place, real=operating_system.write_at):
        calls[0] += 1
        if calls[0] == after and half:
            return real(file, data[: len(data) // 2 or 1], place)
        if calls[0] >= after + half:
            raise error
        return real(file, data, place)

    patch_write_at(monkeypatch, write_at)
    return calls


def killed_before_the_commit(writer, values):
    """Kill a writer after it has written rows and headers, and before the index."""

    def die(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_writing.StoreWriter, "_take_back", lambda *_: None)
        patch.setattr(store_files.IndexFile, "write", die)
        with pytest.raises(Killed):
            writer.append(values)
    writer._held.close()  # as the end of a process does


def entry(shape, end, dtype="F32", start=0, name="h.3"):
    """Return the entry of one tensor in a header of safetensors."""
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}
