"""harvest resumes after an interrupt or a crash, or says why it cannot."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from environment import ROOT
from harvests import (
    Stopped,
    assert_rows,
    check_mean,
    failing_after,
)
from models import LargeBatches, overwriting_mlp
from oracles import rows_by_hand
from torch import nn

import hookline as hl

# -- Places ---------------------------------------------------------------------------------------


def test_a_harvest_goes_on_with_the_places_that_it_began_with(data, to):
    model, batches = LargeBatches().eval(), [data[0][:2], *data]
    with pytest.raises(Stopped), pytest.warns(hl.HooklineWarning, match=r"Nothing .* 'h.1'"):
        hl.harvest(model, failing_after(batches, 3), "h.*", to=to, quiet=True)
    store = hl.harvest(model, batches, "h.*", to=to, quiet=True)
    assert store.places() == ["h.0", "h.2"]
    assert_rows(store, rows_by_hand(model, batches, "h.0", "h.2"))


def test_a_place_that_does_not_fire_when_a_harvest_goes_on_is_an_error(data, to):
    model, batches = LargeBatches().eval(), [*data[:3], data[3][:2], *data[4:]]
    with pytest.raises(Stopped):
        hl.harvest(model, failing_after(batches, 3), "h.*", to=to, quiet=True)
    for _ in range(2):
        with pytest.raises(hl.NeverFired, match=r"'h.1'"):
            hl.harvest(model, batches, "h.*", to=to, quiet=True)
    assert_rows(hl.Store.open(to), rows_by_hand(model, batches[:3], "h.0", "h.1", "h.2"))


# -- Going on -------------------------------------------------------------------------------------


def test_a_harvest_that_is_complete_does_not_run_the_model(data, to):
    hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    content = json.loads((to / "harvest.json").read_text())
    assert (content["samples"], content["batches"]) == (50, 7)

    def never(module, args):
        raise AssertionError

    model = overwriting_mlp()
    model.register_forward_pre_hook(never)
    for again in (data, iter(data), lambda: iter(data), lambda first: iter(data[first:])):
        assert len(hl.harvest(model, again, "0", to=to, quiet=True)) == 50


@pytest.mark.parametrize("batches", [[0, 0], [8, 0, 8, 0], [0, 8, 0]])
def test_a_batch_of_no_samples_is_done_like_others(batches, to):
    data = torch.randn(sum(batches), 4).split(batches)
    model = overwriting_mlp()
    calls = []
    model.register_forward_pre_hook(lambda *call: calls.append(call))
    for run in range(3):
        store = hl.harvest(model, data, "0", to=to, statistics=[hl.Mean()], quiet=True)
        assert (len(store), len(calls)) == (sum(batches), len(batches))
        assert json.loads((to / "harvest.json").read_text())["batches"] == len(batches), run
    more = [*data, torch.randn(3, 4)]
    store = hl.harvest(model, more, "0", to=to, statistics=[hl.Mean()], quiet=True)
    assert (len(store), len(calls)) == (sum(batches) + 3, len(batches) + 1)
    assert_rows(store, rows_by_hand(overwriting_mlp(), more, "0"))
    mean = hl.Measurements.load(to / "statistics")["0"]["mean"]
    assert torch.allclose(mean, store["0"][:].double().mean(0))


def test_nothing_says_that_a_harvest_is_complete_once_more_comes_behind_no_samples(data, to):
    def more():
        yield from [*data[:2], data[0][:0], data[2]]
        raise OSError("lost")

    hl.harvest(overwriting_mlp(), data[:2], "0", to=to, statistics=hl.Mean(), quiet=True)
    with pytest.raises(OSError, match="lost"):
        hl.harvest(overwriting_mlp(), more, "0", to=to, statistics=hl.Mean(), quiet=True)
    assert len(hl.Store.open(to)["0"]) == sum(map(len, data[:3]))
    assert not (to / "harvest.json").exists()
    assert not (to / "statistics").exists()


@pytest.mark.parametrize("length", [True, False], ids=["known length", "unknown length"])
def test_a_complete_harvest_sees_whether_the_data_is_the_same_and_whether_there_is_more(
    length, data, to
):
    def given(batches):
        return batches if length else iter(batches)

    hl.harvest(overwriting_mlp(), given(data[:4]), "0", to=to, quiet=True)
    other = [x + 1 for x in data]
    with pytest.raises(hl.HarvestError, match="first batch differs"):
        hl.harvest(overwriting_mlp(), given(other[:4]), "0", to=to, quiet=True)
    with pytest.raises(hl.HarvestError, match="Batch 3, the last one that was stored, differs"):
        hl.harvest(overwriting_mlp(), given([*data[:3], other[3]]), "0", to=to, quiet=True)
    with pytest.raises(hl.HarvestError, match=r"no batches|ends before batch 3"):
        hl.harvest(overwriting_mlp(), given([]), "0", to=to, quiet=True)
    store = hl.harvest(overwriting_mlp(), given(data), "0", to=to, quiet=True)
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))


def test_of_a_stream_as_long_as_before_only_the_first_batch_is_loaded(data, to):
    loaded = []

    class Sized:
        def __len__(self):
            return len(data)

        def __iter__(self):
            for batch in data:
                loaded.append(1)
                yield batch

    for count in (len(data), 1):
        loaded.clear()
        assert len(hl.harvest(overwriting_mlp(), Sized(), "0", to=to, quiet=True)) == 50
        assert len(loaded) == count


def seal(monkeypatch):
    """Let nothing be written any more, as on a disk that is mounted to be read (root may all)."""

    def opened(path, flags, *mode, real=os.open, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def test_in_a_sealed_folder_a_complete_harvest_is_there_and_another_fails_at_once(
    data, to, monkeypatch
):
    kinds = [hl.Mean()]
    hl.harvest(overwriting_mlp(), data[:4], "0", to=to, quiet=True, statistics=kinds)
    seal(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    for statistics in (kinds, None):
        store = hl.harvest(
            overwriting_mlp(), data[:4], "0", to=to, quiet=True, statistics=statistics
        )
        assert len(store) == 32
    with pytest.raises(hl.StoreError, match="permissions"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)


def test_more_data_is_gone_on_with_and_less_is_refused(data, to):
    hl.harvest(overwriting_mlp(), data[:4], "0", to=to, quiet=True)
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))
    with pytest.raises(hl.HarvestError, match="ends before batch 6"):
        hl.harvest(overwriting_mlp(), data[:4], "0", to=to, quiet=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": overwriting_mlp(1)}, "fingerprint"),
        ({"model": nn.Linear(4, 6), "where": ""}, "was a Sequential; now it is a Linear"),
        ({"where": ["0", "2"]}, "places were"),
        ({"dtype": torch.float16}, "dtype=None; now it is float16"),
        ({"at": np.s_[:, 0]}, "at=None; now"),
        ({"transform": torch.relu}, "transform was"),
        ({"mask": lambda b: b > 0}, "mask was"),
        ({"ids": lambda b: b[:, 0].long()}, "ids were"),
        ({"forward": lambda model, batch: model(0 * batch)}, "forward was"),
        ({"stop": False}, "stop=auto; now it is False"),
        ({"model": overwriting_mlp().train()}, "in evaluation mode; now it is in training mode"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_harvest_is_refused_with_the_reason(change, reason, data, to):
    given = {"model": overwriting_mlp(), "where": "0"} | change
    model, where = given.pop("model"), given.pop("where")
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True)
    with pytest.raises(hl.HarvestError, match=reason):
        hl.harvest(model, data, where, to=to, quiet=True, **given)
    assert len(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)) == 50


def scaled(value, by):
    return value * by


def applied(value, function):
    return function(value)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (partial(scaled, by=1), partial(scaled, by=100)),
        (partial(scaled, by=torch.ones(6)), partial(scaled, by=torch.zeros(6))),
        (partial(applied, function=torch.relu), partial(applied, function=torch.tanh)),
        (nn.Linear(6, 2), nn.Linear(6, 2)),
    ],
    ids=["number", "tensor", "function", "module"],
)
def test_a_function_with_other_arguments_is_refused(first, then, data, to):
    with pytest.raises(Stopped):
        hl.harvest(
            overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True, transform=first
        )
    with pytest.raises(hl.HarvestError, match="other arguments"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, transform=then)
    assert len(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, transform=first)) == 50


@pytest.mark.parametrize("change", [hl.scale(100.0), torch.relu, hl.add(torch.ones(6))])
def test_edits_that_are_gone_or_others_are_refused(change, data, to):
    model = overwriting_mlp()
    with hl.edit(model, "0", change), pytest.raises(Stopped):
        hl.harvest(model, failing_after(data, 3), "0", to=to, quiet=True)
    for others in (nullcontext(), hl.edit(model, "0", hl.scale(3.0))):
        with pytest.raises(hl.HarvestError, match="edits"), others:
            hl.harvest(model, data, "0", to=to, quiet=True)
    with hl.Recipe([("0", change)]).on(model):
        assert len(hl.harvest(model, data, "0", to=to, quiet=True)) == 50


def test_a_harvest_begun_before_more_was_noted_is_gone_on_with(data, to):
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True)
    path = to / "store.json"
    content = json.loads(path.read_text())
    for key in ("forward", "stop", "mode", "bound", "edits"):
        del content["metadata"]["harvest"][key]
    path.write_text(json.dumps(content))
    assert len(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)) == 50


def test_data_in_another_order_is_refused(data, to):
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True)
    with pytest.raises(hl.HarvestError, match="first batch differs"):
        hl.harvest(overwriting_mlp(), data[::-1], "0", to=to, quiet=True)
    with pytest.raises(hl.HarvestError, match="Batch 2, the last one that was stored, differs"):
        hl.harvest(overwriting_mlp(), [*data[:2], *data[3:]], "0", to=to, quiet=True)


def test_with_ids_the_ids_are_compared_and_not_the_batches(data, to):
    def noisy():
        return [{"x": x + torch.rand(()), "n": torch.arange(len(x)) + 8 * k}
                for k, x in enumerate(data)]  # fmt: skip

    def forward(model, batch):
        return model(batch["x"])

    with pytest.raises(Stopped):
        hl.harvest(
            overwriting_mlp(),
            failing_after(noisy(), 3),
            "0",
            to=to,
            ids="n",
            forward=forward,
            quiet=True,
        )
    store = hl.harvest(overwriting_mlp(), noisy(), "0", to=to, ids="n", forward=forward, quiet=True)
    assert store.ids == list(range(50))


def test_two_at_once_do_not_write_twice(data, to):
    def meanwhile():
        hl.harvest(overwriting_mlp(), data[:3], "0", to=to, quiet=True)
        yield from data

    with pytest.raises(hl.HarvestError, match="in the meantime"):
        hl.harvest(overwriting_mlp(), meanwhile(), "0", to=to, quiet=True)
    assert len(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)) == 50


def test_a_folder_with_something_else_is_refused(data, to):
    with hl.Store.create(to) as writer:
        writer.append({"0": torch.zeros(1, 6)})
    with pytest.raises(hl.HarvestError, match="does not come from a harvest"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)


# -- Interrupted and killed -----------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, time, torch
sys.path.insert(0, "tests")
from models import overwriting_mlp
import hookline as hl

def interrupted(module, args):
    interrupted.calls += 1
    if interrupted.calls == 4:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

interrupted.calls = 0
model = overwriting_mlp()
model.register_forward_pre_hook(interrupted)
torch.manual_seed(1)
hl.harvest(model, torch.randn(50, 4).split(8), "0", to=sys.argv[1], statistics=[hl.Mean()])
"""


def test_ctrl_c_leaves_a_valid_store_that_is_gone_on_with(data, to):
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(to)], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr
    assert "is sound and has 24 samples; the same harvest again goes on" in result.stderr
    assert len(hl.Store.open(to)) == 24
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=[hl.Mean()])
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))
    check_mean(to, store)


AGAIN = """
import os, signal, sys, threading, time, torch
sys.path.insert(0, "tests")
from models import overwriting_mlp
import hookline as hl
from hookline.storage import shard_writer

def slow(file, data, place):
    slow.calls += 1
    if slow.calls == 4:  # in the middle of an append
        for wait in (0.3, 0.3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(wait)
    write(file, data, place)

slow.calls, write, shard_writer._write = 0, shard_writer._write, slow
model = overwriting_mlp()
torch.manual_seed(1)
try:
    hl.harvest(model, torch.randn(50, 4).split(8), "0", to=sys.argv[1], quiet=True)
except KeyboardInterrupt as error:
    print(threading.active_count(), *error.__notes__)
"""


def test_ctrl_c_while_the_end_is_awaited_waits_for_what_is_being_written(data, to):
    result = subprocess.run(
        [sys.executable, "-c", AGAIN, str(to)], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout.startswith("1 hookline: the store in"), result.stderr
    told = int(re.search(r"has (\d+) samples", result.stdout)[1])
    assert told == len(hl.Store.open(to)) < 50
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))


KILLER = """
import json, os, random, signal, sys, time, warnings
from pathlib import Path
sys.path.insert(0, "tests")
import torch
torch.set_num_threads(1)
import hookline as hl
from hookline.storage import store_writer as store_writing
from harvests import LENGTHS, same_stores, texts
from models import TextModel

base, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dice = random.Random(seed)
torch.manual_seed(0)
model, batches = TextModel(), texts(LENGTHS * 20)
kinds = [hl.Mean(), hl.TopK(k=2)]

def run(folder):
    return hl.harvest(model, batches, ["mix", "pool"], to=folder, mask="attention_mask",
                      statistics=kinds, quiet=True)

whole = run(base / "whole")
append = store_writing.StoreWriter.append
killed = dropped = complete = grown = 0
folder = base / "0"
while killed < rounds:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)

        def told(self, *args, **kwargs):
            append(self, *args, **kwargs)
            os.write(write, self.samples.to_bytes(4, "little"))

        store_writing.StoreWriter.append = told
        warnings.simplefilter("ignore")
        run(folder)
        os._exit(0)
    os.close(write)
    # Sometimes while it begins, more often while it writes.
    said = os.read(read, 4) if dice.random() < 0.8 else b""
    time.sleep(dice.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    grown += bool(said)
    while piece := os.read(read, 1 << 16):
        said += piece
    os.close(read)
    said = int.from_bytes(said[-4:], "little")
    if os.WIFSIGNALED(status):
        killed += 1
    there = (folder / "store.json").exists()
    if there and (said or dice.random() < 0.5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store = hl.Store.open(folder)
        dropped += len(caught)
        assert len(store) >= said, (killed, len(store), said)
        same_stores(store, whole, len(store))
    if (folder / "harvest.json").exists() or killed % 7 == 0:
        with warnings.catch_warnings(action="ignore"):
            store = run(folder)
        same_stores(store, whole, len(whole))
        found, expected = (hl.Measurements.load(f / "statistics") for f in (folder, base / "whole"))
        for place in expected:
            torch.testing.assert_close(found[place]["mean"], expected[place]["mean"],
                                       rtol=1e-12, atol=1e-14)
            assert torch.equal(found[place]["topk"].values, expected[place]["topk"].values)
        complete += 1
        folder = base / str(killed) / str(complete)
print(json.dumps({"killed": killed, "dropped": dropped, "complete": complete,
                  "grown": grown}))
"""


def kill_harvests(folder, rounds, seed):
    result = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), str(rounds), str(seed)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["killed"] >= rounds
    assert told["complete"] > 0
    assert told["grown"] > rounds / 3  # killed while it was writing
    return told


def test_killed_harvests_lose_nothing_and_are_completed(tmp_path):
    kill_harvests(tmp_path, rounds=24, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_killed_harvests_lose_nothing_and_are_completed(tmp_path):
    kill_harvests(tmp_path, rounds=150, seed=1)


def test_warnings_of_what_was_dropped_are_given_when_it_goes_on(data, to):
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True)
    with (to / "rank00000-00000.safetensors").open("ab") as file:
        file.write(b"half a row")
    with pytest.warns(hl.HooklineWarning, match="dropped 10 B"):
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    with warnings.catch_warnings(action="error"):
        assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))
