"""Stores on full disks and in processes that are killed: committed samples are never lost."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environment import ROOT
from oracles import Killed
from stores import (
    HEADER,
    append_counted,
    breaking,
    check_counted,
    check_files,
    killed_before_the_commit,
    shard_of,
)

import hookline as hl
from hookline import Store, StoreError, operating_system
from hookline.storage import disk_space as store_space
from hookline.storage import recovery as store_recovery
from hookline.storage import shard_writer as store_shards
from hookline.storage import store_files
from hookline.storage import store_writer as store_writing

# -- First appends --------------------------------------------------------------------------------


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


# -- Crashes and full disks -----------------------------------------------------------------------


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


# -- Files that two folders share -----------------------------------------------------------------


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
from hookline.storage import disk_space as store_space
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


# -- Syncing, space and interrupts ----------------------------------------------------------------


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
    if operating_system.file_system(tmp_path) != "ext4" or not store_space.SpaceReservation(
        tmp_path
    ):
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


def test_an_index_of_many_pages_is_replaced_whole(tmp_path):
    values = {f"a place with a long name, number {n}": torch.tensor([n]) for n in range(60)}
    with Store.create(tmp_path, sync="never") as writer:
        for _ in range(3):
            writer.append(values)
            assert len(Store.open(tmp_path)) == writer.samples
    assert (tmp_path / "rank00000.index.json").stat().st_size > 4096
    assert Store.open(tmp_path)["a place with a long name, number 59"][:].tolist() == [59] * 3
