"""harvest(statistics=...): statistics measured while a store is written."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from harvests import (
    LENGTHS,
    Stopped,
    check_mean,
    failing_after,
    texts,
)
from models import TextModel, overwriting_mlp
from torch import nn

import hookline as hl
from hookline.harvests import harvest_statistics


@pytest.mark.parametrize("lost", ["nothing", "all", "half", "other kinds"])
def test_statistics_are_those_of_the_rows_also_after_a_crash(lost, data, to):
    kinds = [hl.Mean(), hl.TopK(k=3), hl.Histogram(range=(-3.0, 3.0))]
    first = [hl.Norm()] if lost == "other kinds" else kinds
    with pytest.raises(Stopped):
        hl.harvest(
            overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True, statistics=first
        )
    saved = to / "rank00000.statistics"
    if lost == "all":
        for path in saved.iterdir():
            path.unlink()
        saved.rmdir()
    elif lost == "half":  # killed between its two files
        (saved / "measurements.safetensors").write_bytes(b"")
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=kinds)
    found = check_mean(to, store)
    rows = store["0"][:]
    values, ids, _ = found["0"]["topk"]
    assert torch.equal(values.float(), rows.topk(3, dim=0).values)
    assert torch.equal(rows[ids[0], torch.arange(6)], rows.max(0).values)
    counted = torch.stack([torch.histc(column, 64, -3.0, 3.0) for column in rows.T])
    assert found["0"]["histogram"].counts.sum() == counted.sum()


@pytest.mark.parametrize("make", [str, int])
def test_ids_are_read_back_a_part_at_a_time(make, data, to, monkeypatch):
    numbers = iter(range(100, 300))
    batches = [{"input": x, "ids": [make(next(numbers)) for _ in x]} for x in data]
    given = {"ids": "ids", "to": to, "quiet": True}
    store = hl.harvest(overwriting_mlp(), batches, "0", **given)
    expected = [one for batch in batches for one in batch["ids"]]
    assert store.ids == expected
    monkeypatch.setattr(hl.Store, "ids", None)  # all of them may be more than memory holds
    monkeypatch.setattr(harvest_statistics, "_AT_ONCE", 7)
    hl.harvest(overwriting_mlp(), batches, "0", statistics=[hl.TopK(k=1)], **given)
    best = hl.Measurements.load(to / "statistics")["0"]["topk"].ids[0]
    rows = store["0"][:].argmax(0)
    assert torch.equal(best, rows if make is str else rows + 100)


def test_statistics_leave_out_padding_and_know_positions(to):
    model, batches = TextModel(), texts(LENGTHS)
    store = hl.harvest(
        model, batches, "mix", to=to, mask="attention_mask", quiet=True,
        statistics=[hl.Mean(), hl.TopK(k=1)],
    )  # fmt: skip
    found = hl.Measurements.load(to / "statistics")
    rows = store["mix"].rows[:]
    assert found.statistics["mix"]["mean"].count.tolist() == [sum(LENGTHS)] * 5
    np.testing.assert_allclose(found["mix"]["mean"], rows.double().mean(0), rtol=1e-12)
    values, ids, positions = found["mix"]["topk"]
    for channel in range(5):
        sample, position = int(ids[0, channel]), int(positions[0, channel, 0])
        assert store["mix"][sample][position, channel] == values[0, channel]


def test_a_single_number_for_each_sample_or_token_is_one_channel(data, to):
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).eval()
    kinds = [hl.Mean(), hl.TopK(k=2), hl.Sparsity(dim=None)]
    even = data[:6]  # all of one size
    with pytest.raises(Stopped):
        hl.harvest(model, failing_after(even, 3), "1", to=to, quiet=True, statistics=kinds)
    shutil.rmtree(to / "rank00000.statistics")
    store = hl.harvest(model, even, "1", to=to, quiet=True, statistics=kinds)
    found = hl.Measurements.load(to / "statistics")["1"]
    values = store["1"][:].double()
    assert torch.allclose(found["mean"], values.mean()[None], rtol=1e-12)
    assert found["topk"].ids[:, 0].tolist() == values.topk(2).indices.tolist()
    other = to.with_name("tokens")
    tokens = hl.harvest(
        TextModel(), texts(LENGTHS), "embed:input", to=other, mask="attention_mask", quiet=True,
        statistics=kinds,
    )  # fmt: skip
    found = hl.Measurements.load(other / "statistics")["embed:input"]
    assert torch.allclose(found["mean"], tokens["embed:input"].rows[:].double().mean()[None])
    best, position = int(found["topk"].ids[0, 0]), int(found["topk"].positions[0, 0, 0])
    assert tokens["embed:input"][best][position] == tokens["embed:input"].rows[:].max()


def test_statistics_can_be_asked_for_later(data, to):
    hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=[hl.Mean()])
    check_mean(to, store)


@pytest.mark.parametrize("first", ["stopped", "complete"])
def test_statistics_of_a_part_are_not_given_as_those_of_the_whole(first, data, to):
    begun = failing_after(data, 3) if first == "stopped" else data[:3]
    with nullcontext() if first == "complete" else pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), begun, "0", to=to, quiet=True, statistics=[hl.Mean()])
    hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert json.loads((to / "harvest.json").read_text())["statistics"] is None
    assert not (to / "statistics").exists()
    for kinds in ([hl.Mean()], None):  # what was measured of the whole stays
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=kinds)
        check_mean(to, store)
        assert json.loads((to / "harvest.json").read_text())["statistics"] == "statistics"


@pytest.mark.parametrize("name", ["measurements.json", "measurements.safetensors"])
def test_statistics_that_are_damaged_are_made_again(name, data, to):
    given = {"to": to, "quiet": True, "statistics": [hl.Mean()]}
    hl.harvest(overwriting_mlp(), data, "0", **given)
    (to / "statistics" / name).write_bytes(b"")
    check_mean(to, hl.harvest(overwriting_mlp(), data, "0", **given))


def test_statistics_of_rows_instead_of_columns_are_there_as_well(data, to):
    store = hl.harvest(
        overwriting_mlp(), data[:6], "0", to=to, quiet=True, statistics=[hl.Mean(dim=0)]
    )
    found = hl.Measurements.load(to / "statistics")["0"]["mean"]
    torch.testing.assert_close(found, store["0"][:].double().reshape(6, 8, 6).mean((0, 2)))
    assert json.loads((to / "harvest.json").read_text())["statistics"] == "statistics"


def test_statistics_have_the_names_that_were_given_last(data, to):
    for name in ("a", "b"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics={name: hl.Mean()})
        assert list(hl.Measurements.load(to / "statistics")["0"]) == [name]


@pytest.mark.parametrize("lost", [False, True])
def test_the_calls_of_statistics_are_batches_also_after_a_crash(lost, data, to):
    kinds = {"statistics": [hl.Mean()], "quiet": True}
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 5), "0", to=to, **kinds)
    if lost:
        shutil.rmtree(to / "rank00000.statistics")
    hl.harvest(overwriting_mlp(), data, "0", to=to, **kinds)
    assert hl.Measurements.load(to / "statistics").calls == {"0": len(data)}
