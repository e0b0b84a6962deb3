"""harvest: the plan, the progress, and the limits of disk and memory."""

import io
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from harvests import (
    assert_rows,
    check_mean,
)
from models import overwriting_mlp
from oracles import rows_by_hand
from torch import nn

import hookline as hl
from hookline.harvests import harvest_plan as harvest_plans
from hookline.harvests import progress as harvest_progress
from hookline.storage import shard_writer as store_shards
from hookline.storage import store_writer as store_writing


def test_the_plan_is_shown_first(data, to, capsys):
    hl.harvest(overwriting_mlp(), data, ["0", "2"], to=to)
    printed = capsys.readouterr()
    assert printed.out == ""
    plan, last = printed.err.split("\ndone: ")
    assert plan.splitlines()[1:4] == [
        "  place  row   dtype    in all",
        "  0      (6,)  float32  1.3 KB",
        "  2      (3,)  float32  672 B",
    ]
    assert "about 56 samples in 7 batches" in plan
    assert "the forward stops" in plan
    assert str(to) in last
    hl.harvest(overwriting_mlp(), (x for x in data), "0", to=to / "unknown")
    assert "nobody knows how many" in capsys.readouterr().err


def test_the_plan_counts_the_rows_that_a_mask_keeps(to, capsys):
    kept = torch.arange(5)[None] < torch.tensor([2, 5])[:, None]
    batch = {"input": torch.randn(2, 5, 4), "kept": kept}
    hl.harvest(nn.Linear(4, 3), [batch] * 3, "", to=to, mask="kept")
    plan = capsys.readouterr().err
    assert plan.splitlines()[1:3] == [
        "  place  row                 rows  dtype    in all",
        "  ''     (3,) each position  21    float32  252 B",
    ]
    assert "about 6 samples in 3 batches" in plan
    store = hl.Store.open(to)
    assert sum(store[""].lengths().tolist()) == 21


def test_data_that_cannot_tell_its_length_yet_is_gone_through(data, to, capsys):
    class Later:  # as Lightning's CombinedLoader
        def __iter__(self):
            return iter(data)

        def __len__(self):
            raise RuntimeError("call iter() first")

    store = hl.harvest(overwriting_mlp(), Later(), "0", to=to)
    assert "nobody knows how many" in capsys.readouterr().err
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("installed", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(installed, data, to, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(harvest_progress, "_EVERY", -1.0)
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    hl.harvest(overwriting_mlp(), data, "0", to=to)
    plan, told = terminal.getvalue().split("have fired\n")
    assert plan.startswith("Harvest of 1 place into")
    if installed:
        assert "7/7 [" in told
        assert "100%" in told
    else:
        assert told.count(" left\n") == 7
        assert "7 of 7 batches, 50 rows, " in told
    assert "rows/s" in told
    assert told.endswith(f"done: {str(to)!r}\n")


def test_a_plan_of_one_batch_speaks_of_one(to, capsys):
    hl.harvest(nn.Sequential(nn.ReLU()), [torch.ones(2, 3)], "0", to=to)
    assert "2 samples in 1 batch," in capsys.readouterr().err


def test_the_bytes_of_the_plan_are_those_on_disk(data, to, monkeypatch):
    plans = []
    monkeypatch.setattr(harvest_plans.HarvestPlan, "check_space", lambda plan: plans.append(plan))
    hl.harvest(overwriting_mlp(), torch.randn(64, 4).split(8), ["0", "2"], to=to, quiet=True)
    shards = sum(path.stat().st_size for path in to.glob("*.safetensors"))
    assert shards <= plans[0].nbytes <= shards + 65536


def test_what_does_not_fit_on_the_disk_is_refused(data, to, monkeypatch):
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(harvest_plans.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(hl.HarvestError, match=r"100 B free.*bfloat16"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert not to.exists()


def test_a_disk_that_fills_up_raises_here_and_leaves_a_sound_store(data, to, monkeypatch):
    write, count = store_shards._write, []

    def failing(file, content, place):
        count.append(1)
        if len(count) > 20 and place >= 65536:  # what is written over needs no space
            raise OSError(28, "No space left on device")
        write(file, content, place)

    with monkeypatch.context() as patch:
        patch.setattr(store_shards, "_write", failing)
        with pytest.raises(hl.StoreError, match="No space left") as caught:
            hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=[hl.Mean()])
    assert "the same harvest again goes on" in caught.value.__notes__[0]
    stored = len(hl.Store.open(to))
    assert 0 < stored < 50
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=[hl.Mean()])
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))
    check_mean(to, store)


def test_an_error_of_the_writing_thread_does_not_hang_the_harvest(to, monkeypatch):
    def broken(self, *args, **kwargs):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(store_writing.StoreWriter, "append", broken)
    many = (torch.zeros(2, 4) for _ in range(1000))
    with pytest.raises(ZeroDivisionError):
        hl.harvest(overwriting_mlp(), many, "0", to=to, quiet=True)
    assert not [t for t in threading.enumerate() if t.name == "hookline harvest"]


def test_an_error_of_the_last_append_is_raised_too(data, to, monkeypatch):
    append = store_writing.StoreWriter.append

    def failing(self, values, *, ids, mark):
        if mark["batch"] == len(data) - 1:
            raise ZeroDivisionError("in the thread")
        append(self, values, ids=ids, mark=mark)

    with monkeypatch.context() as patch:
        patch.setattr(store_writing.StoreWriter, "append", failing)
        with pytest.raises(ZeroDivisionError):
            hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert not (to / "harvest.json").exists()
    assert len(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)) == 50


def test_memory_is_bounded_when_the_disk_is_slow(data, to, monkeypatch):
    append, going = store_writing.StoreWriter.append, threading.Event()
    made, seen = [], []

    def waiting(self, *args, **kwargs):
        assert going.wait(60)
        append(self, *args, **kwargs)

    def batches():
        for batch in data:
            made.append(1)
            yield batch

    def look():
        seen.append(len(made))
        going.set()

    monkeypatch.setattr(store_writing.StoreWriter, "append", waiting)
    timer = threading.Timer(0.7, look)
    timer.start()
    store = hl.harvest(overwriting_mlp(), batches(), "0", to=to, quiet=True)
    timer.join()
    assert seen[0] <= 4 < len(made)  # one is being written, two wait, and one waits to wait
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))


def test_the_first_batch_is_let_go_of_while_the_others_run(to):
    made, values, alive = [], [], []

    def batches():
        for n in range(8):
            batch = torch.full((2, 4), float(n))
            made.append(weakref.ref(batch))
            yield batch
            del batch
            alive.append((made[0]() is not None, values[0]() is not None))

    def taken(value):
        values.append(weakref.ref(value := value + 1))
        return value

    hl.harvest(overwriting_mlp(), batches(), "0", to=to, quiet=True, transform=taken)
    assert alive[-1] == (False, False)  # of the first, while only a few others can still wait
