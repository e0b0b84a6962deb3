"""Stores: what is appended is read back bit for bit, and nothing done to the files can crash us."""

import contextlib
import errno
import gc
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from environment import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import Killed
from stores import (
    DTYPES,
    HEADER,
    append_counted,
    breaking,
    check_counted,
    check_files,
    entry,
    killed_before_the_commit,
    patch_write_at,
    random_bits,
    rewrite_index,
    same_bits,
    sample,
    shard_of,
)
from torch.utils.data import DataLoader

import hookline as hl
from hookline import Store, StoreError, operating_system
from hookline.storage import files as store_files
from hookline.storage import recovery as store_recovery
from hookline.storage import rows as store_rows
from hookline.storage import shards as store_shards
from hookline.storage import space as store_space
from hookline.storage import writing as store_writing

# Round trips


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_appended_is_read_back(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    names = data.draw(st.lists(st.text(max_size=12), min_size=1, max_size=3, unique=True))
    names = [n for n in names if n != "__metadata__" and n.isprintable()] or ["x"]
    forms = {
        name: (
            data.draw(st.sampled_from(DTYPES)),
            tuple(data.draw(st.lists(st.integers(1, 4), max_size=2))),
            data.draw(st.booleans()),
        )
        for name in names
    }
    kept = {name: [] for name in names}
    ids = []
    size = data.draw(st.integers(16, 300))
    with Store.create(folder, shard_bytes=size, sync="never") as writer:
        for n in data.draw(st.lists(st.integers(0, 5), max_size=6)):
            values = {}
            for name, (dtype, shape, varies) in forms.items():
                lengths = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
                rows = [random_bits((k, *shape) if varies else shape, dtype) for k in lengths]
                if n:
                    values[name] = rows if varies else torch.stack(rows)
                    kept[name] += rows
            if n:
                ids += range(len(ids), len(ids) + n)
                writer.append(values, ids=ids[-n:])
                check_files(folder)
    store = Store.open(folder)
    assert len(store) == len(ids)
    if ids:
        assert store.places() == names
        assert store.ids == ids
    for name in names if ids else []:
        assert len(store[name]) == len(ids)
        assert all(same_bits(a, b) for a, b in zip(store[name], kept[name], strict=True))
        some = data.draw(st.slices(len(ids)))
        assert all(
            same_bits(a, b) for a, b in zip(store[name][some], kept[name][some], strict=True)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_indexed_as_a_tensor_is(dtype, tmp_path):
    rows = random_bits((23, 4, 2), dtype)
    with Store.create(tmp_path, shard_bytes=64) as writer:
        for piece in rows.split(5):
            writer.append({"x": piece})
    stored = Store.open(tmp_path)["x"]
    assert (stored.shape, stored.dtype) == (rows.shape, dtype)
    mask = torch.arange(23) % 3 == 0
    for key in (
        0, -1, 22, slice(None), slice(3, 19), slice(19, 3), slice(1, 20, 4), [1, 7, -2], [],
        mask, mask.tolist(), mask.numpy(), torch.tensor([[0, 22], [5, 5]]), np.int64(3),
        torch.tensor(4), (slice(2, 9), 1), (3, slice(None), 0), ([1, 2], slice(1, 3)), (),
        ..., (..., 1), (..., 1, slice(None)), (3, ..., 0),
    ):  # fmt: skip
        expected = rows[key] if not isinstance(key, list) or key else rows[:0]
        assert same_bits(stored[key], expected), key
    for key in (slice(20, 2, -3), slice(None, None, -1), slice(2, 20, -3)):  # torch has no such
        expected = rows[list(range(23))[key]]
        assert same_bits(stored[key], expected), key
    for key in (23, -24, [0, 23], torch.tensor([-24])):
        with pytest.raises(IndexError, match="There are 23"):
            stored[key]
    for key in ([0.5], "a", [True, False], mask.to(torch.uint8)):
        with pytest.raises(StoreError):
            stored[key]


@pytest.mark.parametrize("key", [np.int64(3), torch.tensor(3), (np.int64(-3), ...)], ids=str)
def test_rows_that_are_numbers_are_read_one_by_one_by_any_whole_number(key, tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"label": torch.arange(6)})
    assert same_bits(Store.open(tmp_path)["label"][key], torch.tensor(3))


def test_lists_beside_lists_are_pairs_of_positions_as_in_a_tensor(tmp_path):
    rows = torch.arange(72.0).reshape(6, 4, 3)
    with Store.create(tmp_path, shard_bytes=100) as writer:
        writer.append({"x": rows})
    stored = Store.open(tmp_path)["x"]
    every, labels = torch.arange(6), torch.tensor([0, 1, 2, 3, 0, 1])
    for key in (
        (every, labels), ([0, -1], [2, 3]), ([0, 1], 1, [1, 2]), (every, slice(None), labels % 3),
        ([[0, 1], [2, 3]], [1, 2]), (every > 2, [0, 1, 2]), ([0, 1], ..., [1, 2]), (3, [0, 1]),
        ([0, 1], None, [0, 1]), (slice(1, 5), [0, 1], [2, 2]), ([0, 1], torch.tensor(2)),
    ):  # fmt: skip
        assert same_bits(stored[key], rows[key]), key


@pytest.mark.parametrize("dimensions", [32, 33, 60])
def test_rows_of_many_dimensions_are_read_back_or_refused_when_they_are_written(
    dimensions, tmp_path
):
    rows = torch.ones(2, *[1] * dimensions)
    with Store.create(tmp_path) as writer:
        if dimensions > 32:
            with pytest.raises(StoreError, match="more than 32"):
                writer.append({"x": rows})
            rows = rows.flatten(1)
        writer.append({"x": rows})
    assert same_bits(Store.open(tmp_path)["x"][:], rows)


def test_numpy_gets_its_own_dtypes_and_bf16_as_float32(tmp_path):
    x, y = torch.randn(4, 2), torch.randn(4, 2).bfloat16()
    with Store.create(tmp_path) as writer:
        writer.append({"x": x, "y": y, "v": [x[:k] for k in (1, 0, 3, 2)]})
    store = Store.open(tmp_path)
    np.testing.assert_array_equal(store["x"].to_numpy(), x.numpy())
    np.testing.assert_array_equal(store["y"].to_numpy(), y.float().numpy())
    assert [len(one) for one in store["v"].to_numpy()] == [1, 0, 3, 2]
    assert store["v"].lengths().tolist() == [1, 0, 3, 2]


def test_the_default_device_does_not_matter(tmp_path):
    rows, words = torch.randn(4, 3), ["a", "b", "c", "d"]
    torch.set_default_device("meta")
    try:
        with Store.create(tmp_path / "numbers") as writer:
            writer.append({"x": rows}, ids=[5, 6, 7, 8])
        with Store.create(tmp_path / "words") as writer:
            writer.append({"x": [rows, rows[:0], rows[1:], rows]}, ids=words)
        store, varying = Store.open(tmp_path / "numbers"), Store.open(tmp_path / "words")
        assert (store.ids, varying.ids) == ([5, 6, 7, 8], words)
        read = [store["x"][2:2], store["x"][[0, 1], [2, 0]], varying["x"][1], varying["x"].rows[:0]]
    finally:
        torch.set_default_device(None)
    for found, expected in zip(
        read, [rows[:0], rows[[0, 1], [2, 0]], rows[:0], rows[:0]], strict=True
    ):
        assert same_bits(found, expected)


def test_what_is_read_is_a_copy(counted):
    store = Store.open(counted)
    store["h.3"][4].zero_()
    store["h.3"][3:6].zero_()
    check_counted(counted, 21)
    assert same_bits(store["h.3"][4], sample(4)[0])


def test_appended_tensors_may_be_strided_attached_or_numpy(tmp_path):
    x = torch.randn(4, 6, requires_grad=True)
    with Store.create(tmp_path) as writer:
        writer.append({"t": x.T, "n": x.detach().numpy().T, "c": x.T.to(torch.complex64).conj()})
    store = Store.open(tmp_path)
    assert same_bits(store["t"][:], x.detach().T)
    assert same_bits(store["n"][:], x.detach().T)


def test_appended_arrays_may_be_reversed_or_of_the_other_byte_order(tmp_path):
    array = np.arange(6, dtype=">f4").reshape(3, 2)
    with Store.create(tmp_path) as writer:
        writer.append({"x": array, "y": array[::-1], "z": np.arange(3)[::-1]})
    store = Store.open(tmp_path)
    for name, expected in {"x": array, "y": array[::-1], "z": np.array([2, 1, 0])}.items():
        np.testing.assert_array_equal(store[name].to_numpy(), expected)
    assert store["x"].dtype == torch.float32


def test_a_varying_place_takes_a_padded_tensor_too(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"v": [torch.ones(1, 2), torch.ones(3, 2)]})
        writer.append({"v": torch.zeros(2, 4, 2)})
        writer.append({"v": torch.zeros(1, 0, 2)})
    stored = Store.open(tmp_path)["v"]
    assert stored.lengths().tolist() == [1, 3, 4, 4, 0]
    assert stored[-1].shape == (0, 2)


def test_further_indices_apply_to_each_sample_of_varying_length(tmp_path):
    samples = [torch.randn(k, 4) for k in (3, 2, 5)]
    with Store.create(tmp_path) as writer:
        writer.append({"v": samples})
    stored = Store.open(tmp_path)["v"]
    assert same_bits(stored[2, 1], samples[2][1])
    assert same_bits(stored[-1, 1:, 0], samples[-1][1:, 0])
    for key, chosen in [
        (slice(1, None), samples[1:]),
        ([2, 0], [samples[2], samples[0]]),
        (torch.tensor([True, False, True]), samples[::2]),
    ]:
        found = stored[key, 0, 1:]
        assert all(same_bits(a, b[0, 1:]) for a, b in zip(found, chosen, strict=True))
    assert len(stored[()]) == 3


def test_batches_go_through_all_samples_in_order(counted):
    batches = list(Store.open(counted).batches(8))
    assert [len(batch["h.3"]) for batch in batches] == [8, 8, 5]
    assert torch.cat([batch["h.3"] for batch in batches])[:, 0].tolist() == list(range(21))
    assert len([one for batch in batches for one in batch["h/../v"]]) == 21


def test_one_place_may_be_named_without_a_list(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({name: torch.tensor([int(name or 5)]) for name in ("0", "1", "10", "")})
    store = Store.open(tmp_path)
    for name in ("10", ""):
        value = torch.tensor(int(name or 5))
        assert store.as_dataset(name)[0] == {name: value}
        assert list(store.batches(4, places=name)) == [{name: value[None]}]
    assert list(store.as_dataset(("1", "0"))[0]) == ["1", "0"]


def test_ids_are_read_together(tmp_path, monkeypatch):
    words = [["é" * n for n in range(5)], [], ["", "x"]]
    for rank, some in enumerate(words):
        with Store.create(tmp_path, rank=rank, shard_bytes=4) as writer:
            writer.append({"x": torch.zeros(len(some))}, ids=some)
    store = Store.open(tmp_path)
    monkeypatch.setattr(store_rows.StoredSamples, "_read", None)  # which reads one
    assert store.ids == [word for some in words for word in some]
    store.ids.clear()
    assert len(store.ids) == 7


def test_a_store_prints_as_a_table(counted):
    store = Store.open(counted)
    lines = repr(store).splitlines()
    assert lines[0].startswith("Store 'acts': 21 samples, ")
    assert lines[1].split() == ["place", "samples", "row", "dtype", "size"]
    assert lines[2].split() == ["h.3", "21", "(3,)", "float32", "252", "B"]
    assert "varying" in lines[3]
    assert "<table>" in store._repr_html_()
    assert store.info().samples == 21
    assert store.metadata == {"model": "m"}


def test_names_of_places_never_become_paths(tmp_path):
    with Store.create(tmp_path / "acts") as writer:
        writer.append({"../../up": torch.ones(1), "/etc/x": torch.ones(1), "a\0b": torch.ones(1)})
    names = {path.name for path in (tmp_path / "acts").iterdir()}
    shards = {f"rank00000-{n:05d}.safetensors" for n in range(3)}
    assert names == {"store.json", "rank00000.index.json", "rank00000.lock", *shards}
    assert [path.name for path in tmp_path.iterdir()] == ["acts"]
    assert Store.open(tmp_path / "acts").places() == ["../../up", "/etc/x", "a\0b"]


# Workers and ranks


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_loader_read_it(counted, method):
    dataset = Store.open(counted).as_dataset(["h.3"])
    dataset[0]  # mapped here already
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=method)
    rows = torch.cat([batch["h.3"] for batch in loader])
    assert rows[:, 0].tolist() == list(range(21))


def test_a_store_is_pickled_without_its_data(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"x": torch.randn(100_000)})
    store = Store.open(tmp_path)
    before = store["x"][:]
    text = pickle.dumps(store.as_dataset())
    assert len(text) < 5_000
    assert same_bits(pickle.loads(text)[7]["x"], before[7])


def test_a_rank_of_the_launcher_that_is_no_number_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(StoreError, match=r"as rank 'first'.*A rank is an integer"):
        Store.create(tmp_path)


def test_ranks_write_side_by_side_and_are_read_as_one(tmp_path, monkeypatch):
    writers = [Store.create(tmp_path, rank=rank, shard_bytes=50) for rank in (0, 2)]
    monkeypatch.setenv("RANK", "1")
    writers.insert(1, Store.create(tmp_path, shard_bytes=30))
    kept = [], [], []
    for step in range(9):
        rank = step % 3 if step < 6 else 2
        rows = [torch.full((k, 2), step, dtype=torch.int16) for k in (step % 3, 2)]
        writers[rank].append({"x": torch.tensor([step, step]), "v": rows}, ids=[step, -step])
        kept[rank].append((step, rows))
    for writer in writers:
        writer.close()
    store = Store.open(tmp_path)
    order = [one for rank in kept for one in rank]
    assert store["x"][:].tolist() == [step for step, _ in order for _ in range(2)]
    assert store.ids == [i for step, _ in order for i in (step, -step)]
    expected = [row for _, rows in order for row in rows]
    assert all(same_bits(a, b) for a, b in zip(store["v"], expected, strict=True))
    assert store["v"].lengths().tolist() == [len(row) for row in expected]
    assert store.info().ranks == (0, 1, 2)


def test_ranks_that_disagree_are_told_at_the_first_append(tmp_path):
    with Store.create(tmp_path, rank=0) as writer:
        writer.append({"x": torch.ones(2, 3)})
    with Store.create(tmp_path, rank=1) as writer:
        with pytest.raises(StoreError, match="Another rank"):
            writer.append({"x": torch.ones(2, 4)})
        writer.append({"x": torch.ones(2, 3)})
    assert len(Store.open(tmp_path)) == 4


@pytest.mark.parametrize("ids", [None, [1, 2], ["a", "b"]])
def test_ranks_that_disagree_about_ids_are_told_at_the_first_append(tmp_path, ids):
    values = {"x": torch.ones(2, 3)}
    with Store.create(tmp_path, rank=0) as writer:
        writer.append(values, ids=ids)
    with Store.create(tmp_path, rank=1) as writer:
        for others in (None, [1, 2], ["a", "b"]):
            if others != ids:
                with pytest.raises(StoreError, match=r"Another rank.*ids"):
                    writer.append(values, ids=others)
        writer.append(values, ids=ids)
    assert len(Store.open(tmp_path)) == 4


def test_a_store_that_says_nothing_of_ids_can_be_continued(tmp_path):
    values = {"x": torch.ones(2, 3)}
    with Store.create(tmp_path, rank=0) as writer:
        writer.append(values, ids=[1, 2])
    path = tmp_path / "store.json"
    content = json.loads(path.read_text())
    del content["ids"]  # as earlier versions wrote it
    path.write_text(json.dumps(content))
    for rank in (0, 1):
        with Store.create(tmp_path, rank=rank, resume=True) as writer:
            writer.append(values, ids=[1, 2])
    assert Store.open(tmp_path).ids == [1, 2] * 3
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize("end", ["an error", "a kill"])
def test_a_first_append_that_failed_settles_nothing(tmp_path, monkeypatch, end):
    row = torch.ones(1, 2)
    writer = Store.create(tmp_path, rank=3)
    if end == "a kill":
        killed_before_the_commit(writer, {"h": row, "g": row})
        with pytest.warns(hl.HooklineWarning, match="dropped"):
            writer = Store.create(tmp_path, rank=3, resume=True)
    else:
        with monkeypatch.context() as patch:
            breaking(patch, 3, OSError(errno.ENOSPC, "No space"), half=False)
            with pytest.raises(StoreError, match="No space"):
                writer.append({"h": row, "g": row})
    with Store.create(tmp_path, rank=2) as other:
        if end == "an error":
            with pytest.raises(StoreError, match="Another rank"):  # which is alive, and may go on
                other.append({"h": row.double()}, ids=["a"])
        writer.close()
        other.append({"h": row.double()}, ids=["a"])
    with Store.create(tmp_path, rank=3, resume=True) as writer:
        with pytest.raises(StoreError, match="Another rank"):
            writer.append({"h": row, "g": row})
    assert Store.open(tmp_path).places() == ["h"]


def test_a_writer_alone_may_begin_again_after_a_first_append_that_failed(tmp_path, monkeypatch):
    row = torch.ones(1, 2)
    with Store.create(tmp_path) as writer:
        with monkeypatch.context() as patch:
            breaking(patch, 3, OSError(errno.ENOSPC, "No space"), half=False)
            with pytest.raises(StoreError, match="No space"):
                writer.append({"h": row, "g": row}, ids=["a"])
        writer.append({"h": row.double()})
    assert Store.open(tmp_path)["h"].dtype == torch.float64
    places = json.loads((tmp_path / "store.json").read_text())["places"]
    assert places == {"h": {"dtype": "F64", "shape": [2], "varying": False}}


# What is refused


def test_what_does_not_fit_is_refused_and_changes_nothing(counted):
    with Store.create(counted, resume=True) as writer:
        row, varying = torch.ones(1, 3), [torch.ones(1, 2, dtype=torch.int32)]
        for values, ids in [
            ({"h.3": row}, ["a"]),
            ({"h.3": row, "h/../v": varying}, None),
            ({"h.3": row, "h/../v": varying}, ["a", "b"]),
            ({"h.3": row, "h/../v": varying}, [1]),
            ({"h.3": row, "h/../v": varying}, [1.5]),
            ({"h.3": row.double(), "h/../v": varying}, ["a"]),
            ({"h.3": row[:, :2], "h/../v": varying}, ["a"]),
            ({"h.3": [row], "h/../v": varying}, ["a"]),
            ({"h.3": row, "h/../v": varying, "more": row}, ["a"]),
            ({"h.3": row, "h/../v": [*varying, torch.ones(1, 3, dtype=torch.int32)]}, ["a", "b"]),
            ({"h.3": row.to("meta"), "h/../v": varying}, ["a"]),
            ({"h.3": row.to_sparse(), "h/../v": varying}, ["a"]),
            ({"h.3": "text", "h/../v": varying}, ["a"]),
            ({}, None),
        ]:
            with pytest.raises(StoreError):
                writer.append(values, ids=ids)
        append_counted(writer)
    check_counted(counted, 24)
    with pytest.raises(StoreError, match="closed"):
        append_counted(writer)


@pytest.mark.parametrize(
    "values",
    [
        {"x": torch.ones(())},
        {"x": torch.ones(2, 0)},
        {"x": torch.ones(1, dtype=torch.complex128)},
        {"__metadata__": torch.ones(1)},
        {"\ud800": torch.ones(1)},
        {"x" * 5000: torch.ones(1)},
        {5: torch.ones(1)},
        {"x": np.array(["a"])},
        {"x": np.array([object()])},
        {"x": [np.array(["a"])]},
    ],
)
def test_what_safetensors_cannot_hold_is_refused(values, tmp_path):
    with Store.create(tmp_path) as writer, pytest.raises(StoreError):
        writer.append(values)
    assert len(Store.open(tmp_path)) == 0


@pytest.mark.parametrize(
    "ids",
    [3, torch.tensor(3), np.array("a"), "ab", 1.5, [None, None], [1, 2**64], [1, -(2**63) - 1]],
)
def test_ids_that_are_no_list_of_numbers_or_words_are_refused(tmp_path, ids):
    with Store.create(tmp_path) as writer, pytest.raises(StoreError, match="Cannot store these"):
        writer.append({"x": torch.ones(2)}, ids=ids)


def test_a_place_named_ids_is_counted_apart_from_the_ids(tmp_path):
    with Store.create(tmp_path, sync="never") as writer:
        with pytest.raises(StoreError, match="'ids': 3, ids: 2"):
            writer.append({"ids": torch.ones(3, 2)}, ids=[1, 2])
        writer.append({"ids": torch.ones(3, 2)}, ids=[1, 2, 3])
    store = Store.open(tmp_path)
    assert store["ids"].shape == (3, 2)
    assert store.ids == [1, 2, 3]


@pytest.mark.parametrize("ids", [[4, 5], ["a", "b"]])
def test_an_append_of_no_samples_changes_nothing_whatever_the_ids_are(tmp_path, ids):
    ragged = [torch.ones(2, 3), torch.ones(1, 3)]
    with Store.create(tmp_path, sync="never") as writer:
        writer.append({"x": [], "y": torch.ones(0, 3)}, ids=[])
        writer.append({"x": ragged, "y": torch.ones(2, 3)}, ids=ids)
        writer.append({"x": [], "y": torch.ones(0, 3)}, ids=[])
        writer.append({"x": (), "y": torch.ones(0, 3)}, ids=torch.arange(0))
        with pytest.raises(StoreError):
            writer.append({"x": [], "y": torch.ones(0, 3)}, ids=ids)
    store = Store.open(tmp_path)
    assert store.ids == ids
    assert store["x"].lengths().tolist() == [2, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_writer_that_is_closed_leaves_no_lock_to_processes_that_were_forked_meanwhile(tmp_path):
    # As the workers of a DataLoader are, which may live on.
    writer = Store.create(tmp_path, sync="never")
    writer.append({"x": torch.ones(2, 3)})
    ends, waits = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover - in the other process
        os.close(waits)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    try:
        with pytest.raises(StoreError, match="Another writer"):
            Store.create(tmp_path, resume=True)
        writer.close()
        with Store.create(tmp_path, sync="never", resume=True) as writer:
            writer.append({"x": torch.ones(2, 3)})
    finally:
        os.close(waits)
        os.waitpid(child, 0)
    assert len(Store.open(tmp_path)) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_does_not_let_go_of_the_lock_of_a_writer(tmp_path):
    writer = Store.create(tmp_path, sync="never")
    child = os.fork()
    if not child:  # pragma: no cover - in the other process
        del writer
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StoreError, match="Another writer"):
        Store.create(tmp_path, resume=True)
    writer.close()


@pytest.mark.skipif(os.name != "posix", reason="links need rights elsewhere")
def test_opening_a_hostile_store_makes_no_file_where_a_link_points_to(counted, tmp_path):
    lock, elsewhere = counted / "rank00000.lock", tmp_path / "elsewhere"
    lock.unlink()
    lock.symlink_to(elsewhere)
    with (counted / "rank00000-00000.safetensors").open("ab") as file:
        file.write(b"more")  # what a lock is needed for
    Store.open(counted)
    assert not elsewhere.exists()
    with pytest.raises(StoreError, match="There can be no lock there"):
        Store.create(counted, resume=True)
    lock.unlink()
    with pytest.warns(hl.HooklineWarning, match="dropped"):
        Store.open(counted)
    assert lock.is_file()


def test_where_there_are_no_locks_a_store_is_read_and_not_written(counted, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    shard = shard_of(counted, "h.3")
    with shard.open("ab") as file:
        file.write(b"an append that may be under way")
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(
        StoreError, match=r"no lock there \(.*not supported\).*local disk"
    ) as caught:
        Store.create(counted, resume=True)
    assert isinstance(caught.value.__cause__, OSError)  # so that nobody waits for another writer
    assert len(Store.open(counted)) == 21
    assert shard.read_bytes().endswith(b"under way")


@pytest.mark.parametrize("size", [0, 1e9, "1", None])
def test_shards_of_no_whole_size_are_refused(tmp_path, size):
    with pytest.raises(StoreError, match="shards of"):
        Store.create(tmp_path / "s", shard_bytes=size)
    assert not (tmp_path / "s").exists()


def test_a_store_is_not_begun_twice_and_not_written_by_two(counted):
    with pytest.raises(StoreError, match="resume=True"):
        Store.create(counted)
    with Store.create(counted, resume=True):
        with pytest.raises(StoreError, match="Another writer"):
            Store.create(counted, resume=True)
    with pytest.raises(StoreError, match="other metadata"):
        Store.create(counted, resume=True, metadata={"model": "n"})
    with pytest.raises(StoreError, match="no JSON"):
        Store.create(counted / "new", metadata={"model": object()})
    (counted / "rank00000.index.json").unlink()
    with pytest.raises(StoreError, match="no index"):
        Store.create(counted, resume=True)


def test_an_unknown_place_is_told_with_those_that_exist(counted):
    store = Store.open(counted)
    with pytest.raises(StoreError, match=r"no place 'h\.4'.*h\.3"):
        store["h.4"]
    assert "h.3" in store
    assert "h.4" not in store


# Crashes and full disks


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(1, 12))
def test_a_crash_at_any_write_loses_the_uncommitted_tail_only(counted, monkeypatch, after, half):
    writer = Store.create(counted, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(store_writing.StoreWriter, "_take_back", lambda *_: None)
        breaking(patch, after, Killed(), half)
        with pytest.raises(Killed):
            append_counted(writer, count=9)
    writer._held.close()  # as the end of a process does
    if after > 1 or half:  # otherwise nothing was written yet
        with pytest.warns(hl.HooklineWarning, match=r"dropped .* The 21 samples"):
            Store.open(counted)
    check_counted(counted, 21)  # and no second warning
    with Store.create(counted, resume=True) as writer:
        append_counted(writer)
    check_counted(counted, 24)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(1, 12))
def test_a_full_disk_is_an_error_that_leaves_the_store_as_it_was(counted, monkeypatch, after, half):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with Store.create(counted, resume=True) as writer:
        with monkeypatch.context() as patch:
            calls = breaking(patch, after, full, half)
            with pytest.raises(StoreError, match="No space left on device"):
                append_counted(writer, count=9)
            assert calls[0] >= after
        check_counted(counted, 21)
        append_counted(writer, count=9)
    check_counted(counted, 30)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_fails_at_the_commit_happened_or_did_not(counted, monkeypatch, error, moment):
    def write(*arguments, real=store_files.IndexFile.write):
        if moment == "after":
            real(*arguments)
        raise error

    with Store.create(counted, resume=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(store_files.IndexFile, "write", write)
            with pytest.raises((StoreError, KeyboardInterrupt)):
                append_counted(writer)
        there = 21 if moment == "before" else 24
        assert writer.samples == there
        check_counted(counted, there)
        append_counted(writer)
    check_counted(counted, there + 3)


def test_a_limit_on_the_size_of_files_leaves_a_valid_store(tmp_path):
    program = (
        "import resource, sys, torch, hookline as hl\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "writer = hl.Store.create(sys.argv[1])\n"
        "try:\n"
        "    while True: writer.append({'x': torch.arange(1000) + writer.samples})\n"
        "except hl.StoreError as error: print(writer.samples, error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    samples, _, text = result.stdout.partition(" ")
    assert "File too large" in text
    store = Store.open(tmp_path)
    assert len(store) == int(samples) == (100_000 - HEADER) // 8000 * 1000
    assert store["x"][:].tolist() == list(range(int(samples)))
    check_files(tmp_path)


MANY = """
import os, resource, sys, torch, hookline as hl
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
values = {f"p{n}": torch.full((3,), n) for n in range(120)}
values["v"] = [torch.ones(n) for n in range(3)]
for sync in ("never", "shard", "commit"):
    folder = f"{sys.argv[1]}/{sync}"
    with hl.Store.create(folder, sync=sync, shard_bytes=64) as writer:  # 8 rows
        for _ in range(3):
            writer.append(values, ids=["a", "b", "c"])
        os.listdir(folder)
    store = hl.Store.open(folder)
    read = [store[f"p{n}"] for n in range(120)]
    for _ in range(2):
        assert all(rows[:].tolist() == [n] * 9 for n, rows in enumerate(read))
    os.listdir(folder)
"""

NO_FILES = """
import os, resource, sys, torch, hookline as hl
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
values = {f"p{n}": torch.ones(3) for n in range(20)}
writer = hl.Store.create(sys.argv[1], shard_bytes=16)
for begun in (0, 3):
    taken = []
    try:
        while True: taken.append(os.open(".", os.O_RDONLY))
    except OSError:
        for _ in range(5): os.close(taken.pop())
    try: writer.append(values)
    except hl.StoreError as error: assert "ulimit -n" in str(error), error
    else: raise AssertionError("there were files enough")
    os.listdir(sys.argv[1])
    for number in taken: os.close(number)
    assert writer.samples == begun
    writer.append(values)
writer.close()
assert [rows.tolist() for rows in hl.Store.open(sys.argv[1])["p19"]] == [1] * 6
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sees which files are open")
@pytest.mark.parametrize("program", [MANY, NO_FILES], ids=["many places", "no files left"])
def test_there_may_be_more_shards_than_files_that_can_be_open(tmp_path, program):
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    for path in tmp_path.rglob("store.json"):
        check_files(path.parent)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(1, 12))
def test_shards_that_were_closed_for_others_are_taken_back_too(counted, monkeypatch, after, half):
    monkeypatch.setattr(store_writing, "most_files", lambda: 1)
    with Store.create(counted, resume=True) as writer:
        append_counted(writer, count=1)
        with monkeypatch.context() as patch:
            breaking(patch, after, OSError(errno.ENOSPC, "No space"), half)
            with pytest.raises(StoreError, match="No space"):
                append_counted(writer, count=9)
        check_counted(counted, 22)
        append_counted(writer, count=9)
        assert len(writer._open) == 1
    check_counted(counted, 31)


def names_of_synced(monkeypatch):
    """From now on, the names of the files that are forced onto the disk."""
    synced = []

    def fsync(file, real=os.fsync):
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file it is")
def test_shards_that_were_closed_for_others_are_synced_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(store_writing, "most_files", lambda: 1)
    with Store.create(tmp_path, sync="shard") as writer:
        writer.append({name: torch.zeros(7) for name in "abc"})
        synced = names_of_synced(monkeypatch)
    shards = [f"rank00000-0000{n}.safetensors" for n in range(3)]
    assert sorted(synced[:3]) == shards
    assert synced[3:] == ["rank00000.index.json", tmp_path.name]


def test_a_read_only_folder_can_be_read_and_not_written(counted, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="may not be written to"):
        Store.create(counted, resume=True)
    shard = shard_of(counted, "h.3")
    with shard.open("ab") as file:
        file.write(b"tail")

    def sealed(path, flags, *mode, real=os.open):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", sealed)
    assert len(Store.open(counted)) == 21
    assert shard.read_bytes().endswith(b"tail")


def test_reading_beside_a_living_writer_touches_nothing(counted):
    with Store.create(counted, resume=True) as writer:
        append_counted(writer)
        shard = shard_of(counted, "h.3")
        with shard.open("ab") as file:
            file.write(b"an append that is under way")
        assert len(Store.open(counted)) == 24
        assert shard.read_bytes().endswith(b"under way")


def at_a_header(monkeypatch, before=lambda: None, after=lambda: None):
    """Let something happen just before or after the next header is read."""

    class File(io.BufferedReader):
        def read(self, size=-1):
            monkeypatch.undo()
            before()
            text = super().read(size)
            after()
            return text

    monkeypatch.setattr(store_files, "open_regular", lambda path: File(io.FileIO(path)))


def test_rows_are_read_while_a_writer_is_just_at_them(tmp_path, monkeypatch):
    with Store.create(tmp_path, sync="never") as writer:
        writer.append({"x": torch.zeros(10)})
        rows = Store.open(tmp_path)["x"]
        at_a_header(monkeypatch, before=lambda: writer.append({"x": torch.ones(10)}))
        assert rows[-1] == 0
    assert len(Store.open(tmp_path)) == 20


def test_half_of_a_header_that_is_just_being_written_is_looked_at_again(tmp_path, monkeypatch):
    with Store.create(tmp_path, sync="never") as writer:
        writer.append({"x": torch.zeros(10)})
        rows, path = Store.open(tmp_path)["x"], shard_of(tmp_path, "x")
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b'"shape":[10]', b'"shape":[11]'))
        monkeypatch.setattr("time.sleep", lambda seconds: path.write_bytes(whole))
        assert rows[-1] == 0


def test_rows_are_read_while_what_is_left_of_an_append_is_just_cut_off(tmp_path, monkeypatch):
    writer = Store.create(tmp_path, sync="never")
    writer.append({"x": torch.zeros(10)})
    rows = Store.open(tmp_path)["x"]
    killed_before_the_commit(writer, {"x": torch.ones(10)})

    def another_reader():
        with pytest.warns(hl.HooklineWarning, match="dropped 40 B"):
            Store.open(tmp_path)

    at_a_header(monkeypatch, after=another_reader)
    assert rows[-1] == 0


def test_a_reader_beside_a_living_writer_keeps_the_index_it_could_read(counted, monkeypatch):
    with Store.create(counted, resume=True):
        with shard_of(counted, "h.3").open("ab") as file:
            file.write(b"an append that is under way")
        whole = [store_recovery.read_index(counted, 0)]

        def half_written(*_):
            if whole:
                return whole.pop()
            raise StoreError("a", "b", "c")

        monkeypatch.setattr(store_recovery, "read_index", half_written)
        assert len(Store.open(counted)) == 21


# Files that two folders share


@pytest.fixture(params=["symbolic", "hard"])
def shared_files(request, tmp_path):
    """A store, and another folder with the same shards; the store then has 10 rows more."""
    store, view = tmp_path / "store", tmp_path / "view"
    with Store.create(store, sync="never") as writer:
        writer.append({"x": torch.zeros(10)})
        view.mkdir()
        for path in store.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, view)
            elif request.param == "hard":
                os.link(path, view / path.name)
            else:
                (view / path.name).symlink_to(path)
        writer.append({"x": torch.ones(10)})
    return store, view


def test_opening_cuts_nothing_off_a_file_that_another_folder_has_too(shared_files):
    store, view = shared_files
    assert Store.open(view)["x"][:].tolist() == [0] * 10
    assert Store.open(store)["x"][:].tolist() == [0] * 10 + [1] * 10


def test_a_writer_takes_a_copy_of_a_file_that_another_folder_has_too(shared_files):
    store, view = shared_files
    with pytest.warns(hl.HooklineWarning, match="dropped 40 B"):
        writer = Store.create(view, resume=True)
    with writer:
        writer.append({"x": torch.full((5,), 2.0)})
    assert Store.open(view)["x"][:].tolist() == [0] * 10 + [2] * 5
    assert Store.open(store)["x"][:].tolist() == [0] * 10 + [1] * 10
    check_files(view)
    assert not list(view.glob("*.partial"))


@pytest.mark.parametrize("places", [1, 60])  # an index of one page, and of several
def test_a_snapshot_of_links_stays_as_it_was(tmp_path, places):
    def values(value):
        return {f"a place with a long name, {n}": torch.full((2,), value) for n in range(places)}

    store, snapshot = tmp_path / "store", tmp_path / "snapshot"
    with Store.create(store, sync="never", shard_bytes=12) as writer:
        writer.append(values(0.0))
    shutil.copytree(store, snapshot, copy_function=os.link)
    with Store.create(store, sync="never", resume=True) as writer:
        for _ in range(3):
            writer.append(values(1.0))
    for _ in range(2):
        read = Store.open(snapshot)
        assert all(read[place][:].tolist() == [0, 0] for place in read.places())
        read = Store.open(store)
        assert all(read[place][:].tolist() == [0, 0] + [1] * 6 for place in read.places())


KILLER = """
import json, os, random, signal, sys, time, warnings
sys.path[:0] = ["tests", "."]
import torch
torch.set_num_threads(1)
from hookline import Store
from hookline.storage import space as store_space
from stores import append_counted, check_counted
folder, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dice = random.Random(seed)
dropped = total = 0
for turn in range(rounds):
    here = f"{folder}/{turn // 10}"  # ten writers in a row go on with the same store
    ahead = turn // 10 % 2  # in every other one with space ahead
    store_space._FROM = 1 << 16 if ahead else 1 << 20
    size = 40_000 if ahead else 400
    read, write = os.pipe()
    child = os.fork()
    if not child:
        writer = Store.create(here, resume=True, shard_bytes=size, sync="never")
        while True:
            append_counted(writer, 1 + writer.samples % 3)
            os.write(write, writer.samples.to_bytes(4, "little"))
    os.close(write)
    told = os.read(read, 4)
    time.sleep(dice.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(read, 1 << 16):
        told += piece
    os.close(read)
    said = int.from_bytes(told[-4:], "little")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store.open(here)
    dropped += len(caught)
    assert said <= len(store) <= said + 3, (turn, said, len(store))
    check_counted(here, len(store))
    total += 1
print(json.dumps({"rounds": total, "dropped": dropped}))
"""


def kill_writers(folder, rounds, seed):
    result = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), str(rounds), str(seed)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["rounds"] == rounds
    return told["dropped"]


def test_a_killed_writer_loses_nothing_committed(tmp_path):
    assert kill_writers(tmp_path, rounds=60, seed=0) > 0  # some were in the middle of an append


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_killed_writers_lose_nothing_committed(tmp_path):
    assert kill_writers(tmp_path, rounds=600, seed=1) > 0


# Marks


def test_a_mark_is_committed_with_its_samples_and_kept_until_the_next(tmp_path):
    with Store.create(tmp_path) as writer:
        assert writer.mark == {}
        writer.append({"h": torch.zeros(1, 2)}, mark={"batch": 3, "word": 'a "b"'})
        writer.append({"h": torch.zeros(1, 2)})
        assert writer.mark == {"batch": 3, "word": 'a "b"'}
    with Store.create(tmp_path, resume=True) as writer:
        assert writer.mark == {"batch": 3, "word": 'a "b"'}
        writer.note({"done": True})
    with Store.create(tmp_path, resume=True) as writer:
        assert (writer.mark, writer.samples) == ({"done": True}, 2)


def test_an_append_that_fails_leaves_the_mark_as_it_was(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"h": torch.zeros(1, 2)}, mark={"batch": 0})
        with pytest.raises(StoreError):
            writer.append({"h": torch.zeros(1, 3)}, mark={"batch": 1})
        assert writer.mark == {"batch": 0}


def nested_mark(levels):
    mark = {}
    for _ in range(levels):
        mark = {"more": mark}
    return mark


NO_MARKS = {
    "NaN": {"loss": float("nan")},
    "an infinity": {"losses": [1.0, float("-inf")]},
    "a tensor": {"loss": torch.zeros(())},
    "a set": {"seen": {1}},
    "a key twice": {1: "a", "1": "b"},
    "nested too deep": nested_mark(2000),
    "a list": [1],
    "larger than what is read": {"text": "x" * (17 << 20)},
}


@pytest.mark.parametrize("why", NO_MARKS)
def test_a_mark_that_could_not_be_read_again_is_refused(tmp_path, why):
    with Store.create(tmp_path, sync="never") as writer:
        writer.append({"h": torch.zeros(1, 2)}, mark={"batch": 0})
        with pytest.raises(StoreError):
            writer.append({"h": torch.ones(1, 2)}, mark=NO_MARKS[why])
        with pytest.raises(StoreError):
            writer.note(NO_MARKS[why])
        assert (writer.mark, writer.samples) == ({"batch": 0}, 1)
        writer.append({"h": torch.ones(2, 2)})
    assert Store.open(tmp_path)["h"][:].tolist() == [[0, 0], [1, 1], [1, 1]]


def test_a_mark_is_at_once_what_is_read_later(tmp_path):
    with Store.create(tmp_path) as writer:
        writer.append({"h": torch.zeros(1, 2)}, mark={2: (1, 2), 10: None, "seen": {3: 0.1}})
        told = writer.mark
    with Store.create(tmp_path, resume=True) as writer:
        assert writer.mark == told == {"2": [1, 2], "10": None, "seen": {"3": 0.1}}


def test_a_mark_is_not_changed_from_outside(tmp_path):
    mark = {"seen": [1]}
    with Store.create(tmp_path) as writer:
        writer.note(mark)
        mark["seen"].append(2)
        assert writer.mark == {"seen": [1]}
    with pytest.raises(StoreError, match="closed"):
        writer.note({})


def test_metadata_that_could_not_be_read_again_is_refused(tmp_path):
    for why in ("NaN", "a key twice", "larger than what is read"):
        with pytest.raises(StoreError):
            Store.create(tmp_path, metadata=NO_MARKS[why])
    with Store.create(tmp_path, metadata={"sound": True}):
        pass
    assert Store.open(tmp_path).metadata == {"sound": True}


def test_a_mark_that_is_no_object_is_refused(counted):
    rewrite_index(counted, lambda content: content.update(mark=[1]))
    with pytest.raises(StoreError, match="mark"):
        Store.open(counted)


def test_an_index_without_a_mark_can_be_read(counted):
    rewrite_index(counted, lambda content: content.pop("mark"))
    check_counted(counted, 21)


# Files that are not sound


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


@pytest.mark.parametrize(("sync", "least"), [("commit", 9), ("shard", 3), ("never", 0)])
def test_the_policy_says_what_is_synced(tmp_path, monkeypatch, sync, least):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Store.create(tmp_path, sync=sync) as writer:
        begun = len(synced)
        for _ in range(3):
            append_counted(writer)
        within = len(synced) - begun
    assert len(synced) >= least
    assert (within > 0) == (sync == "commit")  # no shard was full
    assert bool(synced) == (sync != "never")
    with pytest.raises(StoreError, match="sync='sometimes'"):
        Store.create(tmp_path / "b", sync="sometimes")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file it is")
def test_a_full_shard_is_synced_with_its_name_and_the_index_that_commits_it(tmp_path, monkeypatch):
    with Store.create(tmp_path, sync="shard", shard_bytes=64) as writer:
        synced = names_of_synced(monkeypatch)
        writer.append({"x": torch.zeros(7)})
        assert synced == []
        writer.append({"x": torch.zeros(10)})  # fills the shard of 16 rows, and begins another
        shard, folder, index = "rank00000-00000.safetensors", tmp_path.name, "rank00000.index.json"
        assert synced == [shard, folder, index]
        synced.clear()
    assert synced == ["rank00000-00001.safetensors", index, folder]


def test_rows_are_sent_to_the_disk_before_a_sync_asks_for_them(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(store_shards, "_EARLY", 100_000)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *told: sent.append(told), raising=False)
    for sync in ("never", "commit", "shard"):
        with Store.create(tmp_path / sync, sync=sync) as writer:
            for _ in range(5):
                writer.append({"x": torch.zeros(1000, 10)})
            assert bool(sent) == (sync == "shard")
    starts, lengths, _ = zip(*sent, strict=True)  # of 40,000 bytes an append
    assert starts == (0, HEADER + 40_000)
    assert lengths == (HEADER + 40_000, 120_000)


@pytest.fixture
def reserved(monkeypatch):
    """Space is asked for from 150,000 bytes on; gives what was asked for: file, start, end."""
    asked = []

    def reserve(file, start, length):
        asked.append((Path(f"/proc/self/fd/{file}").readlink().name, start, start + length))
        return True

    for name, size in {"_FROM": 150_000, "_LEAST": 100_000, "_MOST": 300_000}.items():
        monkeypatch.setattr(store_space, name, size)
    monkeypatch.setattr(store_space, "file_system", lambda folder: "ext4")
    monkeypatch.setattr(store_space, "space_reserver", lambda: reserve)
    return asked


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which file it is")


@needs_linux
def test_space_is_reserved_ahead_of_a_file_that_grows(tmp_path, reserved):
    with Store.create(tmp_path, sync="never", shard_bytes=1_600_000) as writer:
        for n in range(81):
            writer.append({"x": torch.full((5000,), n)})  # 40,000 bytes
            check_files(tmp_path)
    first, second = (f"rank00000-0000{n}.safetensors" for n in (0, 1))

    def asked(name):
        return [(start - HEADER, end - HEADER) for at, start, end in reserved if at == name]

    twice, more = 2 * 120_000 + HEADER, 300_000
    assert asked(first) == [
        (80_000, twice),  # the file has 150,000 bytes and more: as much again
        (280_000, 320_000 + more),  # at most so much
        (600_000, 640_000 + more),
        (920_000, 960_000 + more),
        (1_240_000, 1_280_000 + more),
        (1_560_000, 1_600_000),  # never behind the end of a full shard
    ]
    assert asked(second) == asked(first)
    assert torch.equal(Store.open(tmp_path)["x"][:], torch.arange(81).repeat_interleave(5000))


@needs_linux
@pytest.mark.parametrize("why", ["refused", "little space", "another file system"])
def test_where_no_space_can_be_reserved_rows_are_written_as_they_come(
    tmp_path, reserved, monkeypatch, why
):
    def refuse(*told):
        reserved.append(told)
        return False

    if why == "refused":
        monkeypatch.setattr(store_space, "space_reserver", lambda: refuse)
    elif why == "little space":
        monkeypatch.setattr(store_space, "_PLENTY", 1 << 62)
    else:
        monkeypatch.setattr(store_space, "file_system", lambda folder: "tmpfs")
    with Store.create(tmp_path, sync="never") as writer:
        for n in range(10):
            writer.append({"x": torch.full((5000,), n)})
    assert len(reserved) == (why == "refused")  # once, then never again
    assert torch.equal(Store.open(tmp_path)["x"][:], torch.arange(10).repeat_interleave(5000))


@pytest.mark.parametrize("end", ["close", "an error", "kill"])
def test_space_that_was_reserved_is_given_back(tmp_path, monkeypatch, end):
    if operating_system.file_system(tmp_path) != "ext4" or not store_space.Ahead(tmp_path):
        pytest.skip("another file system")
    value = torch.ones(1 << 18)  # 1 MB, from where on there is some
    writer = Store.create(tmp_path, sync="never")
    for _ in range(2):
        writer.append({"x": value})
    path = shard_of(tmp_path, "x")
    size = HEADER + 2 * value.nbytes

    def spare():
        os.sync()  # only then does the system say which blocks there are
        return path.stat().st_blocks * 512 - path.stat().st_size

    assert path.stat().st_size == size
    assert spare() >= 900_000
    if end == "an error":
        with monkeypatch.context() as patch:
            breaking(patch, 1, OSError(errno.ENOSPC, "No space"), half=True)
            with pytest.raises(StoreError, match="No space"):
                writer.append({"x": value})
    if end == "kill":
        writer._held.close()  # as the end of a process does
        check_files(tmp_path)
        assert len(Store.open(tmp_path)) == 2 << 18
        monkeypatch.setattr(store_space, "_FROM", 1 << 30)
        writer = Store.create(tmp_path, sync="never", resume=True)
        writer.append({"x": value[:1]})
        size += 4
    else:
        if end == "close":
            writer.close()
        assert spare() < 100_000
    writer.close()
    assert path.stat().st_size == size
    assert spare() < 100_000
    check_files(tmp_path)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("after", "half"),
    [(1, False), (1, True), (2, False), (2, True), (3, False)],  # at rows, header, index
)
def test_an_interrupted_append_is_taken_back(tmp_path, monkeypatch, after, half, ahead):
    monkeypatch.setattr(store_space, "_FROM", 1 if ahead else 1 << 40)
    value = torch.rand(1 << 18)  # 1 MB
    writer = Store.create(tmp_path, sync="never")
    writer.append({"x": value})
    with monkeypatch.context() as patch:
        breaking(patch, after, KeyboardInterrupt(), half)
        with pytest.raises(KeyboardInterrupt):
            writer.append({"x": value})
    check_files(tmp_path)
    assert writer.samples == len(Store.open(tmp_path)) == len(value)
    writer.append({"x": -value})
    writer.close()
    check_files(tmp_path)
    assert torch.equal(Store.open(tmp_path)["x"][:], torch.cat([value, -value]))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sees which files are open")
def test_a_writer_that_is_dropped_leaves_no_file_open(tmp_path):
    gc.collect()
    before = len([*Path("/proc/self/fd").iterdir()])
    writer = Store.create(tmp_path)
    writer.append({"x": torch.zeros(3), "y": torch.zeros(3)})
    writer.append({"x": torch.zeros(3), "y": torch.zeros(3)})
    del writer
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    with Store.create(tmp_path, resume=True) as writer:
        assert writer.samples == 6


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    writer = Store.create(tmp_path / "s", sync="never")
    writer.append({"x": torch.zeros(3)})
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(StoreError, match="No such file"):
        writer.append({"x": torch.zeros(3)})
    assert writer.samples == 3


@pytest.mark.parametrize("values", [torch.ones(3), [torch.ones(3)], None, "fc"], ids=type)
def test_values_without_places_are_refused(tmp_path, values):
    with Store.create(tmp_path) as writer:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"a \w+, which names no places.*Give a dict"):
                writer.append(values)
            writer.append({"x": torch.ones(3)})


def test_a_writer_stays_in_its_folder_when_the_process_goes_to_another(tmp_path, monkeypatch):
    homes = tmp_path / "a", tmp_path / "b"
    writers = []
    for start, home in enumerate(homes):
        home.mkdir()
        monkeypatch.chdir(home)
        writers.append(Store.create("s", shard_bytes=32))
        writers[-1].append({"x": torch.arange(20) + 1000 * start})
    for start, writer in enumerate(writers):
        writer.append({"x": torch.arange(20, 40) + 1000 * start})
        writer.close()
    for start, home in enumerate(homes):
        assert torch.equal(Store.open(home / "s")["x"][:], torch.arange(40) + 1000 * start)
        check_files(home / "s")


def test_an_index_of_many_pages_is_replaced_whole(tmp_path):
    values = {f"a place with a long name, number {n}": torch.tensor([n]) for n in range(60)}
    with Store.create(tmp_path, sync="never") as writer:
        for _ in range(3):
            writer.append(values)
            assert len(Store.open(tmp_path)) == writer.samples
    assert (tmp_path / "rank00000.index.json").stat().st_size > 4096
    assert Store.open(tmp_path)["a place with a long name, number 59"][:].tolist() == [59] * 3


ODD = {
    "as before": torch.ones(2, 3),
    "a gradient": torch.ones(2, 3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2, 3)),
    "columns": torch.ones(3, 2).T,
    "negative": torch.complex(torch.zeros(2, 3), -torch.ones(2, 3)).conj().imag,
    "an array": np.ones((2, 3), "f4"),
    "sparse": torch.ones(2, 3).to_sparse(),
    "without data": torch.ones(2, 3, device="meta"),
    "another dtype": torch.ones(2, 3, dtype=torch.float64),
    "another row": torch.ones(2, 4),
    "one row": torch.ones(3),
    "other samples": torch.ones(3, 3),
    "a list": [torch.ones(3), torch.ones(3)],
    "none": torch.ones(0, 3),
}


@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("ids", [None, [7, 8]])
def test_a_later_append_is_checked_like_the_first(tmp_path, form, ids):
    fits = ("as before", "a gradient", "a parameter", "columns", "negative", "an array")
    numbers = torch.arange(2)
    with Store.create(tmp_path, sync="never") as writer:
        writer.append({"a": torch.zeros(2, 3), "b": numbers}, ids=ids)
        if form in fits:
            writer.append({"a": ODD[form], "b": numbers}, ids=ids)
            writer.append({"b": numbers, "a": ODD[form]}, ids=ids)
        else:
            with pytest.raises(StoreError):
                writer.append({"a": ODD[form], "b": numbers}, ids=ids)
            if ids is None:
                writer.append({"a": torch.zeros(0, 3), "b": numbers[:0]})
        with pytest.raises(StoreError):
            writer.append({"a": torch.zeros(2, 3)}, ids=ids)
        with pytest.raises(StoreError):
            writer.append({"a": torch.zeros(2, 3), "c": numbers}, ids=ids)
        with pytest.raises(StoreError):
            writer.append({"a": torch.zeros(2, 3), "b": torch.tensor(1)}, ids=ids)
    store = Store.open(tmp_path)
    expected = torch.ones(6, 3) if form in fits else torch.zeros(2, 3)
    expected[:2] = 0
    assert same_bits(store["a"][:], expected)
    assert store["b"][:].tolist() == [0, 1] * (len(expected) // 2)


def test_a_number_that_torch_has_yet_to_negate_is_stored_negated(tmp_path):
    lazy = torch.tensor([1 + 2j]).conj()
    assert lazy.is_conj()
    assert lazy.imag.is_neg()
    for name, value in {"whole": lazy, "part": lazy.imag}.items():
        assert value.is_contiguous()
        with Store.create(tmp_path / name, sync="never") as writer:
            for _ in range(2):
                writer.append({"x": value})
        assert Store.open(tmp_path / name)["x"][:].tolist() == value.tolist() * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_odd_strides_are_stored_also_where_the_system_writes_a_part(
    tmp_path, monkeypatch, dtype
):
    def write_at(file, data, place, real=operating_system.write_at):
        data = memoryview(data)
        return real(file, data.cast("B")[:5] if data.nbytes < 1000 else data, place)

    patch_write_at(monkeypatch, write_at)
    bits = random_bits((40,), dtype)
    forms = [((6, 1, 2), (3, 7, 1)), ((6, 1, 1), (1, 9, 5)), ((5, 3), (1, 5)), ((4, 2), (0, 1))]
    for n, (shape, strides) in enumerate(forms):
        value = bits.as_strided(shape, strides)
        with Store.create(tmp_path / str(n), sync="never", shard_bytes=40) as writer:
            writer.append({"x": value})
        assert same_bits(Store.open(tmp_path / str(n))["x"][:], value.contiguous())


@given(
    names=st.lists(st.text(max_size=20).filter(str.isprintable), unique=True, max_size=4),
    numbers=st.tuples(*[st.integers(0, 1 << 40)] * 3),
    shape=st.lists(st.integers(1, 1 << 20), max_size=3),
)
def test_indexes_and_headers_are_spelled_as_json_spells_them(names, numbers, shape):
    rows, samples, following = numbers
    series = [
        store_files.Series(name, part, "BF16", tuple(shape), 7, rows, [n, n + 9])
        for n, name in enumerate(names)
        for part in ("rows", "offsets")
    ]
    index = store_files.Index(3, samples, following, series)
    fields = ("place", "part", "dtype", "shape", "shard_rows", "rows", "shards")
    content = {
        "format": "hookline.store.index", "version": 1, **vars(index),
        "series": [{name: getattr(one, name) for name in fields} for one in series],
    }  # fmt: skip
    assert store_files.spell_index(index) == json.dumps(content, sort_keys=True)
    for one in series:
        name = one.place if one.part == "rows" else f"{one.place}#{one.part}"
        end = rows * int(np.prod(shape, dtype=object)) * 2
        entry = {"dtype": "BF16", "shape": [rows, *shape], "data_offsets": [0, end]}
        text = json.dumps({name: entry}, separators=(",", ":")).encode()
        assert store_files.header_of(one, rows) == struct.pack("<Q", HEADER - 8) + text


def test_a_store_that_is_called_with_a_folder_says_how_it_is_opened(tmp_path):
    with pytest.raises(TypeError, match=r"Store.open\(folder\) or Store.create\(folder\)"):
        hl.Store(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_numpy_takes_rows_as_they_are(dtype, tmp_path):
    rows = torch.arange(12).reshape(6, 2).to(dtype)
    with Store.create(tmp_path) as writer:
        writer.append({"a": rows})
    found = np.asarray(Store.open(tmp_path)["a"])
    assert found.dtype == (np.int64 if dtype == torch.int64 else np.float32)
    assert np.array_equal(found, rows.double().numpy())
    assert np.asarray(Store.open(tmp_path)["a"], dtype=np.float64).dtype == np.float64


def test_a_writer_that_another_thread_closes_finishes_its_append_first(tmp_path):
    for _ in range(5):
        folder = tmp_path / str(_)
        writer = hl.Store.create(folder, sync="never")
        written = []

        def append(writer=writer, written=written):
            with contextlib.suppress(hl.StoreError):  # closed, at some point
                while True:
                    writer.append({"a": torch.ones(64, 512)})
                    written.append(64)

        thread = threading.Thread(target=append)
        thread.start()
        while len(written) < 3:
            time.sleep(0.001)
        writer.close()
        thread.join()
        assert len(hl.Store.open(folder)["a"]) == sum(written)
