"""Stores: what is appended is read back bit for bit; marks, ids and ranks."""

import contextlib
import errno
import gc
import json
import os
import pickle
import shutil
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import (
    DTYPES,
    HEADER,
    append_counted,
    check_counted,
    check_files,
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
from hookline.storage import store_files
from hookline.storage import stored_rows as store_rows

# -- Round trips ----------------------------------------------------------------------------------


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


# -- Workers and ranks ----------------------------------------------------------------------------


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


# -- What is refused ------------------------------------------------------------------------------


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


# -- Marks ----------------------------------------------------------------------------------------


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


# -- Writers --------------------------------------------------------------------------------------


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
    assert store_files.index_json(index) == json.dumps(content, sort_keys=True)
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
