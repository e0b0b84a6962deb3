"""What stands in on Windows, in processes that see a simulated Windows (tests/windows.py)."""

import errno
import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from environment import ROOT
from safetensors.torch import load_file

import hookline as hl
from hookline import operating_system
from hookline.storage.small_files import most_files, replace_file
from hookline.view.page_html import why_not

ON_WINDOWS = """
import json, os, sys, threading, time
sys.path[:0] = ["tests", "."]
import torch, safetensors.torch
from torch import nn
torch.set_num_threads(1)
import windows
linux = windows.simulate()
import hookline as hl
from hookline import operating_system
folder = sys.argv[1]
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulation is made on Linux")


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ON_WINDOWS + program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def on_windows(program, *arguments):
    """What a program prints on a simulated Windows."""
    process = start(program, *arguments)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return printed


def test_the_simulation_lacks_what_windows_lacks(tmp_path):
    program = """
import pathlib
for name in windows.MISSING:
    assert not hasattr(os, name), name
for name in ("fcntl", "resource"):
    try: __import__(name)
    except ImportError: pass
    else: raise AssertionError(name)
path = pathlib.Path(folder, "a")
path.write_text("a\\nü", "utf-8")
assert path.read_bytes() == b"a\\r\\n\\xc3\\xbc"
number = os.open(path, os.O_WRONLY | os.O_TRUNC)
os.write(number, b"a\\n")
for function in (path.unlink, lambda: path.replace(path)):
    try: function()
    except PermissionError: pass
    else: raise AssertionError("the file is open")
os.close(number)
assert path.read_bytes() == b"a\\r\\n"
try: os.open(folder, os.O_RDONLY)
except PermissionError: print("fine")
"""
    assert on_windows(program, tmp_path) == "fine\n"


WRITE = """
def values(start, count):
    numbers = range(start, start + count)
    return {
        "row": torch.tensor([[k % 256, 10, 13] for k in numbers], dtype=torch.uint8),
        "varying": [torch.full((k % 4, 2), k) for k in numbers],
    }

def append(writer, count=3, mark=None):
    ids = [f"s{k}" for k in range(writer.samples, writer.samples + count)]
    writer.append(values(writer.samples, count), ids=ids, mark=mark)
"""


def check_written(folder, samples):
    """What a simulated Windows wrote is read on Linux, also by safetensors."""
    store = hl.Store.open(folder)
    assert len(store) == samples
    assert store.ids == [f"s{k}" for k in range(samples)]
    expected = [[k % 256, 10, 13] for k in range(samples)]
    assert store["row"][:].tolist() == expected
    for k, value in enumerate(store["varying"]):
        assert torch.equal(value, torch.full((k % 4, 2), k))
    for path in Path(folder).glob("*.safetensors"):
        load_file(path)


def test_a_store_is_written_continued_and_read(tmp_path):
    program = (
        WRITE
        + """
for sync in ("commit", "shard", "never"):
    here = f"{folder}/{sync}"
    for turn in range(3):
        with hl.Store.create(here, sync=sync, shard_bytes=60, resume=turn > 0) as writer:
            for _ in range(10):
                append(writer)
        store = hl.Store.open(here)
        assert store["row"][-1].tolist() == [len(store) - 1, 10, 13]
    print(len(store))
"""
    )
    assert on_windows(program, tmp_path) == "90\n90\n90\n"
    for sync in ("commit", "shard", "never"):
        check_written(tmp_path / sync, 90)


@pytest.mark.parametrize("length", [10, 5000])  # the second is an index of two pages
def test_an_index_is_written_over_or_replaced_beside_a_reader(tmp_path, length):
    program = (
        WRITE
        + """
stop, read = threading.Event(), []

def look():
    while not stop.is_set():
        read.append(len(hl.Store.open(folder)))

with hl.Store.create(folder, sync="never") as writer:
    append(writer, 1)
    reader = threading.Thread(target=look)
    reader.start()
    while len(read) < 20 or read[-1] == read[0]:
        append(writer, 1, {"note": "x" * int(sys.argv[2])})
    stop.set()
    reader.join()
assert read == sorted(read), read
print("fine")
"""
    )
    assert on_windows(program, tmp_path, length) == "fine\n"


KILLED = (
    WRITE
    + """
import random, signal, warnings
dice, dropped = random.Random(0), 0
for turn in range(20):
    reading, writing = os.pipe()
    child = linux.fork()
    if not child:
        writer = hl.Store.create(folder, sync="never", shard_bytes=400, resume=True)
        while True:
            append(writer, 1 + writer.samples % 3)
            linux.write(writing, writer.samples.to_bytes(4, "little"))
    os.close(writing)
    said = os.read(reading, 4)
    time.sleep(dice.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reading, 1 << 16):
        said += piece
    os.close(reading)
    committed = int.from_bytes(said[-4:], "little")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = hl.Store.open(folder)
    dropped += len(caught)
    assert committed <= len(store) <= committed + 3, (turn, committed, len(store))
    assert store["row"][:, 0].tolist() == [k % 256 for k in range(len(store))]
    samples = len(store)
    del store  # what is mapped is not cut
print(samples, dropped)
"""
)


def test_a_killed_writer_loses_the_uncommitted_tail_only_and_its_lock(tmp_path):
    samples, dropped = map(int, on_windows(KILLED, tmp_path).split())
    assert dropped  # else no writer was killed in the middle of an append
    check_written(tmp_path, samples)


STOPPED = (
    WRITE
    + """
import warnings
from hookline.storage import store_files
from hookline.storage import shard_writer
real = operating_system.write_at

def write_until(last, half):
    calls = [0]

    def write_at(file, data, place):
        calls[0] += 1
        if calls[0] == last:
            if half and len(data) != 4096:  # a page is written whole or not at all
                real(file, memoryview(data).cast("B")[: memoryview(data).nbytes // 2], place)
            os._exit(1)
        return real(file, data, place)

    store_files.write_at = shard_writer.write_at = write_at

with hl.Store.create(folder) as writer:
    append(writer)
ends = []
for last in range(2, 14):
    for half in (False, True):
        child = linux.fork()
        if not child:
            writer = hl.Store.create(folder, sync="never", resume=True)
            write_until(last, half)
            append(writer)
            os._exit(0)
        ends.append(os.waitpid(child, 0)[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            samples = len(hl.Store.open(folder))
        assert samples == 3 + 3 * ends.count(0), (last, half, samples)
        assert bool(caught) == (ends[-1] != 0), (last, half)
print(samples, ends.count(0))
"""
)


def test_a_writer_that_ends_at_any_write_loses_the_uncommitted_tail_only(tmp_path):
    samples, whole = map(int, on_windows(STOPPED, tmp_path).split())
    assert 0 < whole < 24
    check_written(tmp_path, samples)


def test_two_writers_of_a_rank_are_refused_in_one_process_and_in_two(tmp_path):
    program = """
writer = hl.Store.create(folder, resume=True)
writer.append({"x": torch.zeros(2)})
try: hl.Store.create(folder, resume=True)
except hl.StoreError as error: assert "Another writer" in str(error), error
else: raise AssertionError("two writers")
print("open", flush=True)
sys.stdin.readline()
"""
    other = """
try: hl.Store.create(folder, resume=True)
except hl.StoreError as error: print(error)
hl.Store.create(folder, rank=1, resume=True).close()  # another rank is free
print(len(hl.Store.open(folder)))
"""
    with start(program, tmp_path) as first:
        assert first.stdout.readline() == "open\n"
        printed = on_windows(other, tmp_path)
        assert "Another writer of this rank" in printed
        assert printed.endswith("\n2\n")
        first.kill()
    assert on_windows(other, tmp_path) == "2\n"  # the lock ended with the process


NOTHING_LOCKS = """
sys.modules["msvcrt"] = None
for name in [n for n in sys.modules if n.startswith("hookline")]: del sys.modules[name]
import hookline as hl
"""


def test_without_any_locks_a_store_is_refused_and_a_record_is_saved(tmp_path):
    with hl.Store.create(tmp_path / "acts") as writer:
        writer.append({"x": torch.arange(4)})
    program = (
        NOTHING_LOCKS
        + """
try: hl.Store.create(folder + "/acts", resume=True)
except hl.StoreError as error: print(error)
assert hl.Store.open(folder + "/acts")["x"][:].tolist() == [0, 1, 2, 3]
model = nn.Sequential(nn.Flatten())
for _ in range(2):
    with hl.capture(model, "0") as record:
        model(torch.ones(2, 3))
    assert torch.equal(hl.load_record(hl.save_record(record, folder + "/record"))["0"], record["0"])
"""
    )
    printed = on_windows(program, tmp_path)
    assert "two writers of this rank could damage the store" in printed
    assert "local disk" in printed


OTHERS = """
from hookline.view.page_html import why_not
from hookline.view.server import _HTTPServer
from hookline.training.run_writing import RunWriter
from hookline.training.run_reading import Run
from hookline.training.run_files import Row
from pathlib import Path

# A run: records and lines are the same bytes on all systems, and a reader does not stop a writer.
rows = [Row("fc", "output", "Linear")]
with RunWriter(folder + "/run", rows, model="Net") as writer:
    for step in range(20):
        writer.values(step, [[10.0] * 10], at=float.fromhex("0x1.0a0a0a0a0a0a0p+3"))
        writer.scalar(step, "loss", 2.5)
    reader = open(next(Path(folder, "run").glob("*.json")), "rb")  # which stops a replacement
    threading.Timer(0.2, reader.close).start()
    writer.shapes([(1, 2)])
run = Run.open(folder + "/run")
assert run.series("fc", "output", "mean")[0].tolist() == list(range(20))
for path in Path(folder, "run").iterdir():
    assert path.suffix == ".values" or bytes([13]) not in path.read_bytes(), path

# A page is what its digest says.
hl.report(nn.Linear(2, 2), folder + "/page.html")
assert why_not(Path(folder, "page.html").read_bytes()) == ""
assert not _HTTPServer.allow_reuse_address

# Records: those who save at once wait for each other, and readers for them.
model, records = nn.Sequential(nn.Flatten()), []
for number in range(3):
    with hl.capture(model, "0") as record:
        model(torch.full((2, 3), float(number)))
    records.append(record)
hl.save_record(records[0], folder + "/record")
failed = []

def save_often(record):
    try:
        for _ in range(3):
            hl.save_record(record, folder + "/record")
    except BaseException as error:
        failed.append(error)

saving = [threading.Thread(target=save_often, args=[record]) for record in records]
for one in saving:
    one.start()
while any(one.is_alive() for one in saving):
    value = hl.load_record(folder + "/record")["0"]
    assert any(torch.equal(value, record["0"]) for record in records)
assert not failed, failed
assert Path(folder, "record", "hookline.lock").exists()

# A harvest goes on where it stopped.
class Stopped(Exception): pass

def batches(last):
    for number in range(10):
        if number == last: raise Stopped
        yield torch.full((4, 3), float(number))

for last in (4, 10):
    try: hl.harvest(model, batches(last), "0", to=folder + "/acts", quiet=True)
    except Stopped: print("stopped")
assert hl.Store.open(folder + "/acts")["0"][:, 0].tolist() == [k // 4 for k in range(40)]
print("fine")
"""


def test_runs_pages_records_and_harvests_are_written_and_read(tmp_path):
    assert on_windows(OTHERS, tmp_path) == "stopped\nfine\n"
    assert hl.load_record(tmp_path / "record")["0"].shape == (2, 3)
    assert len(hl.Run.open(tmp_path / "run").series("fc", "output", "std")[0]) == 20
    assert why_not((tmp_path / "page.html").read_bytes()) == ""


# -- single functions -----------------------------------------------------------------------------


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(operating_system, "_msvcrt", SimpleNamespace())
    monkeypatch.setattr(operating_system, "_NO_LINK", 0)
    monkeypatch.setattr(operating_system, "_PATIENCE", 0.05)


def test_a_file_that_is_read_is_replaced_when_it_is_closed(tmp_path, windows, monkeypatch):
    refused, real = [], os.replace

    def replace(source, target):
        if len(refused) < 2:
            refused.append(target)
            raise PermissionError(errno.EACCES, "another program uses the file")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "new").write_text("new")
    operating_system.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert len(refused) == 2


@pytest.mark.parametrize("system", ["this one", "windows"])
def test_a_file_that_is_never_free_is_an_error_at_once_or_after_a_while(system, request):
    if system == "windows":
        request.getfixturevalue("windows")
    calls = []

    def refuse():
        calls.append(1)
        raise PermissionError

    with pytest.raises(PermissionError):
        operating_system.when_free(refuse)
    assert (len(calls) > 1) == (system == "windows")


@pytest.mark.parametrize("system", ["this one", "windows"])
def test_a_link_is_not_opened_where_none_is_expected(tmp_path, system, request):
    if system == "windows":
        request.getfixturevalue("windows")
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"content")
    link.symlink_to(path)
    number = operating_system.open_file(path, os.O_RDONLY, follow=False)
    assert os.read(number, 9) == b"content"
    os.close(number)
    with pytest.raises(OSError, match="symbolic links"):
        operating_system.open_file(link, os.O_WRONLY, follow=False)
    assert not [n for n in Path("/proc/self/fd").iterdir() if n.exists() and n.samefile(path)]


def test_a_junction_is_a_link(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    assert operating_system.is_link(tmp_path / "link")
    assert not operating_system.is_link(tmp_path)
    mode = tmp_path.stat().st_mode
    junction = SimpleNamespace(st_mode=mode, st_reparse_tag=0xA0000003)
    monkeypatch.setattr(os, "lstat", lambda path: junction)
    assert operating_system.is_link(tmp_path)


def test_threads_that_write_at_places_of_one_file_do_not_mix(tmp_path):
    write_at = operating_system._seek_and_write
    with (tmp_path / "file").open("wb", buffering=0) as file, ThreadPoolExecutor(8) as pool:
        pieces = {n * 100: bytes([n]) * 100 for n in range(200)}
        done = pool.map(lambda place: write_at(file.fileno(), pieces[place], place), pieces)
        assert list(done) == [100] * 200
    assert (tmp_path / "file").read_bytes() == b"".join(pieces.values())


def test_threads_that_replace_one_file_do_not_take_each_others(tmp_path):
    texts = [str(n).encode() * 1000 for n in range(100, 300)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(replace_file, tmp_path / "file", text, False) for text in texts]:
            done.result()
    assert (tmp_path / "file").read_bytes() in texts
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("can", [True, False])
def test_on_macos_a_sync_goes_through_the_cache_of_the_disk(tmp_path, monkeypatch, can):
    asked, synced = [], []

    def fcntl(file, command):
        asked.append(command)
        if not can:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(operating_system, "_fcntl", SimpleNamespace(fcntl=fcntl))
    monkeypatch.setattr(operating_system, "_FULL_SYNC", 51)
    monkeypatch.setattr(os, "fsync", synced.append)
    operating_system.sync(7)
    assert (asked, synced) == ([51], [] if can else [7])


def test_a_system_without_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(operating_system, "_fcntl", None)
    with (tmp_path / "lock").open("wb") as file, pytest.raises(OSError, match="lock"):
        operating_system.try_lock(file.fileno())


def test_a_console_prints_a_question_mark_for_what_its_encoding_lacks(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(UnicodeEncodeError):
        print("→")
    operating_system.print_anything()
    print("× →")
    stream.flush()
    assert stream.buffer.getvalue() == b"\xd7 ?\n"


def test_where_the_system_does_not_tell_a_quarter_of_512_files_is_used(monkeypatch):
    monkeypatch.setattr(operating_system, "_resource", None)
    assert most_files() == 128
