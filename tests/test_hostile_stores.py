"""Damaged and malicious stores are refused, or do no harm."""

import json
import os
import shutil
import struct
import tracemalloc
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import (
    HEADER,
    check_counted,
    entry,
    rewrite_index,
    shard_of,
)

import hookline as hl
from hookline import Store, StoreError


def read_all(folder):
    """Read everything; gives False if the store was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hl.HooklineWarning)
        try:
            store = Store.open(folder)
            repr(store), store._repr_html_(), store.ids
            for place in store.places():
                list(store[place])
        except StoreError as error:
            parts = error.asked, error.found, error.remedy
        else:
            return True
    assert all(parts)
    return False


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bits_and_cut_files_are_refused_or_harmless(counted, data):
    work = counted.parent / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(counted, work)
    path = work / data.draw(st.sampled_from(sorted(p.name for p in counted.iterdir())))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3)) if content else 0):
        near = st.integers(0, min(len(content), 200) - 1)  # where headers speak
        at = data.draw(near | st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    sound = read_all(work)
    if (
        path.suffix == ".json"
        and path.name.startswith("rank")
        and content[:cut].strip() != (counted / path.name).read_bytes().strip()
    ):
        assert not sound  # an index has a checksum


def test_a_cut_shard_is_refused(counted):
    for path in sorted(counted.glob("*.safetensors")):
        whole = path.read_bytes()
        for size in (0, 7, 100, HEADER - 1, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(StoreError, match="truncated"):
                Store.open(counted)
        path.write_bytes(whole)
    check_counted(counted, 21)


HOSTILE = {
    "a header of 2**63 bytes": struct.pack("<Q", 1 << 63),
    "a header of 0 bytes": struct.pack("<Q", 0),
    "not JSON": b"\xff" * 50,
    "nested without end": b"[" * 60_000,
    "objects without end": b'{"a":' * 12_000,
    "a number without end": b'{"h.3":' + b"9" * 60_000 + b"}",
    "a list": b"[]",
    "a huge shape": entry([1 << 60, 3], (1 << 60) * 12),
    "an overflowing shape": entry([1 << 61, 1 << 61], 12),
    "more rows than bytes": entry([8, 3], 96),
    "a negative shape": entry([-1, 3], -12),
    "a shape of floats": entry([1.5, 3], 18),
    "no shape": entry([], 4),
    "an overlap": entry([1, 3], 12) | entry([1, 3], 12, name="b"),
    "a start in the middle": entry([1, 3], 16, start=4),
    "an end before the start": entry([1, 3], -12),
    "another dtype": entry([1, 3], 12, dtype="I32"),
    "an unknown dtype": entry([1, 3], 12, dtype="Q7"),
    "a dtype that is a list": entry([1, 3], 12, dtype=[]),
    "another name": entry([1, 3], 12, name="../../etc/passwd"),
    "no entry": {},
    "an entry that is a number": {"h.3": 3},
    "NaN": b'{"h.3": NaN}',
    "a key twice": b'{"h.3":1,"h.3":2}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_without_allocating_what_it_claims(counted, name):
    header = HOSTILE[name]
    path = shard_of(counted, "h.3")
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    if "bytes" in name and "rows" not in name:
        new = header
    else:
        new = struct.pack("<Q", HEADER - 8) + header.ljust(HEADER - 8)
    path.write_bytes(new + path.read_bytes()[len(new) :])
    tracemalloc.start()
    assert not read_all(counted)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def changed_series(series=0, **fields):
    return lambda index: index["series"][series].update(fields)


@pytest.mark.parametrize(
    "spoil",
    [
        changed_series(rows=1 << 61),
        changed_series(rows=-1),
        changed_series(rows=20),
        changed_series(rows=True),
        changed_series(shape=[1 << 61, 1 << 61]),
        changed_series(shape=[0]),
        changed_series(shape="abc"),
        changed_series(shape=[1] * 1000),
        changed_series(shard_rows=0),
        changed_series(shard_rows=7),
        changed_series(shards=[0]),
        changed_series(shards=["../../x"] * 3),
        changed_series(shards=[99999999999] * 3),
        changed_series(dtype="F64"),
        changed_series(dtype=["F32"]),
        changed_series(dtype="os.system"),
        changed_series(place="../.."),
        changed_series(place=7),
        changed_series(part="secret"),
        changed_series(1, part="rows", place="w"),
        changed_series(2, dtype="F64"),
        changed_series(more=1),
        lambda index: index.update(samples=1 << 61),
        lambda index: index.update(samples=22),
        lambda index: index.update(rank=1),
        lambda index: index.update(series=[]),
        lambda index: index.update(series={}),
        lambda index: index.update(series=[3]),
        lambda index: index.update(next_shard=1),
        lambda index: index.update(version=2),
        lambda index: index["series"].pop(1),
        lambda index: index["series"].append(index["series"][0]),
        lambda index: index.clear(),
    ],
)
def test_a_hostile_index_is_refused_and_nothing_is_cut_by_it(counted, spoil):
    before = {path.name: path.read_bytes() for path in counted.glob("*.safetensors")}
    rewrite_index(counted, spoil)
    assert not read_all(counted)
    assert before == {path.name: path.read_bytes() for path in counted.glob("*.safetensors")}


@pytest.mark.parametrize("ends", [[5, 3], [-1, 3], [1 << 62, 3], [3, 4]])
def test_hostile_offsets_are_refused(tmp_path, ends):
    with Store.create(tmp_path) as writer:
        writer.append({"v": [torch.ones(1), torch.ones(2)]})
    path = shard_of(tmp_path, "v", "offsets")
    path.write_bytes(path.read_bytes()[:HEADER] + struct.pack("<qq", *ends))
    assert not read_all(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b"\xff\xfe",
        b"9" * 10**6,
        b" " * (17 << 20),
    ],
    ids=lambda text: str(text[:5]),
)
@pytest.mark.parametrize("name", ["store.json", "rank00000.index.json"])
def test_json_bombs_and_foreign_json_are_refused(counted, name, text):
    (counted / name).write_bytes(text)
    assert not read_all(counted)


def test_what_is_no_file_is_refused(counted):
    path = shard_of(counted, "h.3")
    path.unlink()
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(counted)
    os.mkfifo(path)
    with pytest.raises(StoreError, match="no regular file"):
        Store.open(counted)
    with pytest.raises(StoreError, match=r"no store\.json"):
        Store.open(counted.parent)
    with pytest.raises(StoreError, match="no such folder"):
        Store.open(counted / "nowhere")


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_without_their_index_are_refused(tmp_path, rank):
    for number in range(2):
        with Store.create(tmp_path, rank=number) as writer:
            writer.append({"x": torch.zeros(5)})
    (tmp_path / f"rank{rank:05d}.index.json").unlink()
    with pytest.raises(StoreError, match=rf"rank{rank:05d}\.index\.json.*restore it"):
        Store.open(tmp_path)


def test_a_rank_that_just_begins_is_no_damage(tmp_path, monkeypatch):
    with Store.create(tmp_path, rank=0) as writer:
        writer.append({"x": torch.zeros(5)})

    def begun_meanwhile(folder, real=Path.iterdir):
        """A listing that was past the name of the index when this was made."""
        monkeypatch.undo()
        with Store.create(tmp_path, rank=1) as writer:
            writer.append({"x": torch.ones(5)})
        return (path for path in real(folder) if path.name != "rank00001.index.json")

    monkeypatch.setattr(Path, "iterdir", begun_meanwhile)
    assert len(Store.open(tmp_path)) == 10
    with Store.create(tmp_path, rank=2):
        assert Store.open(tmp_path).info().ranks == (0, 1, 2)


def test_rows_too_large_to_exist_are_refused_also_where_there_are_none(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"x": [torch.zeros(0, 2)]})
    rewrite_index(tmp_path, changed_series(shape=[1 << 61, 1 << 61]))
    with pytest.raises(StoreError, match="makes no sense"):
        Store.open(tmp_path)


def test_a_byte_that_is_no_boolean_is_read_as_one(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"b": torch.tensor([True, False])})
    path = shard_of(tmp_path, "b")
    path.write_bytes(path.read_bytes()[:HEADER] + b"\x07\x00")
    read = Store.open(tmp_path)["b"][:]
    assert read.tolist() == [True, False]
    assert read.view(torch.uint8).tolist() == [1, 0]
