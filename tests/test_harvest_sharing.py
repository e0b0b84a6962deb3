"""Several ranks share the batches of a harvest. The last one joins their stores."""

import json
import threading

import pytest
import torch
from harvests import (
    as_function,
    as_rank,
    assert_rows,
    check_mean,
    ids_of,
)
from models import overwriting_mlp
from oracles import rows_by_hand

import hookline as hl
from hookline.harvests import rank_batches as harvest_batches


def test_ranks_share_the_batches_and_the_last_one_joins_them(data, to):
    kinds = [hl.Mean(), hl.TopK(k=2)]
    with as_rank(1, 2):
        part = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=kinds)
    assert len(part) == 3 * 8
    assert part.ids == [n for n in range(50) if n // 8 % 2 == 1]
    assert not (to / "harvest.json").exists()
    with as_rank(0, 2):
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=kinds)
    assert sorted(store.ids) == list(range(50))
    order = torch.tensor(store.ids).argsort()
    assert torch.equal(store["0"][order], rows_by_hand(overwriting_mlp(), data, "0")["0"])
    check_mean(to, store)
    content = json.loads((to / "harvest.json").read_text())
    assert [one["batches"] for one in content["ranks"]] == [4, 3]
    with pytest.raises(hl.HarvestError, match="There were 2 ranks; now there are 1"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)


def test_rank_0_waits_for_the_others(data, to):
    results = []

    def rank_0():
        results.append(hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True))

    with as_rank(0, 2):
        thread = threading.Thread(target=rank_0)
        thread.start()
        while not (to / "rank00000.index.json").exists():
            thread.join(0.01)
    with as_rank(1, 2):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    thread.join(30)
    assert len(results[0]) == 50
    assert (to / "harvest.json").exists()


def test_rank_0_gives_up_at_last_and_says_who_is_missing(data, to, monkeypatch):
    monkeypatch.setattr("hookline.harvests.rank_completion._PATIENCE", 0.1)
    with as_rank(0, 2), pytest.warns(hl.HooklineWarning, match=r"Ranks \[1\]"):
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert len(store) == 26
    with as_rank(1, 2):  # it comes late, and completes the store
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    assert sorted(store.ids) == list(range(50))
    assert (to / "harvest.json").exists()


@pytest.mark.parametrize("form", [list, iter, as_function], ids=lambda form: form.__name__)
@pytest.mark.parametrize("count", [4, 5, 6], ids=lambda count: f"after {count} batches")
def test_rank_0_waits_for_those_that_have_yet_to_see_that_the_data_has_grown(
    form, count, data, to, monkeypatch
):
    monkeypatch.setattr("hookline.harvests.rank_completion._PATIENCE", 0.1)
    given = {"to": to, "quiet": True, "statistics": [hl.Mean()], "ids": ids_of}
    data = data[: 6 if count == 5 else 7]  # of the sixth alone rank 0 has nothing
    for rank in (1, 0):
        with as_rank(rank, 2):
            hl.harvest(overwriting_mlp(), form(data[:count]), "0", **given)
    with as_rank(0, 2), pytest.warns(hl.HooklineWarning, match=r"Ranks \[1\]"):
        hl.harvest(overwriting_mlp(), form(data), "0", **given)
    assert (to / "harvest.json").exists() == (count == 5)
    with as_rank(1, 2):
        store = hl.harvest(overwriting_mlp(), form(data), "0", **given)
    samples = sum(map(len, data))
    assert len(store) == len(set(store.ids)) == samples
    assert json.loads((to / "harvest.json").read_text())["samples"] == samples
    check_mean(to, store)


def test_a_rank_that_sees_other_data_is_refused(data, to):
    with as_rank(1, 2):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    with as_rank(0, 2), pytest.raises(hl.HarvestError, match="same order each time and on every"):
        hl.harvest(overwriting_mlp(), data[::-1], "0", to=to, quiet=True)


def test_more_ranks_than_batches(data, to):
    with as_rank(2, 3):
        hl.harvest(overwriting_mlp(), data[:2], "0", to=to, quiet=True)
    with as_rank(1, 3):
        hl.harvest(overwriting_mlp(), data[:2], "0", to=to, quiet=True)
    with as_rank(0, 3):
        store = hl.harvest(overwriting_mlp(), data[:2], "0", to=to, quiet=True)
    assert_rows(store, rows_by_hand(overwriting_mlp(), data[:2], "0"))


def test_batches_that_grow_need_ids_on_several_ranks(data, to):
    grown = [data[0], torch.cat(data[1:3])]
    with as_rank(1, 2), pytest.raises(hl.HarvestError, match="give ids="):
        hl.harvest(overwriting_mlp(), grown, "0", to=to, quiet=True)
    with as_rank(1, 2), pytest.raises(hl.HarvestError, match="Histogram"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, statistics=[hl.Histogram()])


@pytest.mark.parametrize("sizes", [[8, 5, 8, 8], [8, 8, 5, 8], [8, 8, 8, 4, 2]], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_a_small_batch_before_the_last_needs_ids_on_several_ranks(sizes, known, to):
    batches = torch.randn(sum(sizes), 4).split(sizes)
    short = next(number for number, size in enumerate(sizes) if size < 8)
    for again in (False, True):
        given = batches if known and not again else iter(batches)
        found = rf"batch {short} .*is not the last: \d is there.*give ids="
        with as_rank(short % 2, 2), pytest.raises(hl.HarvestError, match=found):
            hl.harvest(overwriting_mlp(), given, "0", to=to, quiet=True)
    for rank in (1, 0):
        with as_rank(rank, 2):
            named = {"to": to.with_name("named"), "ids": lambda x: x[:, 0].view(torch.int32)}
            store = hl.harvest(overwriting_mlp(), batches, "0", quiet=True, **named)
    assert len(store) == sum(sizes)


def test_top_samples_with_words_are_counted_on_one_rank_and_need_numbers_on_several(data, to):
    def ids(batch):
        return [str(n) for n in range(len(batch))]

    given = {"ids": ids, "statistics": [hl.TopK(k=1)], "quiet": True}
    with as_rank(1, 2), pytest.raises(hl.HarvestError, match=r"whole number from 0 on"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, **given)
    assert not to.exists()
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, **given)
    best = hl.Measurements.load(to / "statistics")["0"]["topk"].ids[0]
    assert torch.equal(best, store["0"][:].argmax(0))


@pytest.mark.parametrize("negative", [0, 3])
def test_top_samples_are_never_counted_in_one_batch_and_named_in_another(negative, data, to):
    def ids(batch):
        number = next(n for n, one in enumerate(data) if one is batch)
        return [-n - 1 if number == negative else 100 + n for n in range(len(batch))]

    given = {"ids": ids, "quiet": True}
    with pytest.raises(hl.HarvestError, match=r"Some of their ids are negative.*leave out TopK"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, statistics=[hl.TopK(k=1)], **given)
    store = hl.harvest(overwriting_mlp(), data, "0", to=to, statistics=[hl.Mean()], **given)
    assert len(store) == 50


def test_samples_are_numbered_by_the_tensor_that_holds_them(data, to):
    batches = [{"steps": torch.arange(16), "x": x} for x in data]
    given = {"forward": lambda model, batch: model(batch["x"]), "quiet": True}
    for rank in (1, 0):
        with as_rank(rank, 2):
            store = hl.harvest(overwriting_mlp(), batches, "0", to=to, **given)
    assert sorted(store.ids) == list(range(50))
    order = torch.tensor(store.ids).argsort()
    assert torch.equal(store["0"][order], rows_by_hand(overwriting_mlp(), data, "0")["0"])


@pytest.mark.parametrize("rank", [0, 1])
def test_data_that_begins_anywhere_needs_ids_on_several_ranks(rank, data, to):
    def begun(first):
        return iter(data[first:])

    match = r"function of the number to begin with.*Give ids=, or a function without an argument"
    with as_rank(rank, 2), pytest.raises(hl.HarvestError, match=match):
        hl.harvest(overwriting_mlp(), begun, "0", to=to, quiet=True)
    assert not to.exists()
    with as_rank(1, 2):
        store = hl.harvest(overwriting_mlp(), lambda: begun(0), "0", to=to, quiet=True)
    assert store.ids[:8] == list(range(8, 16))


def test_where_it_is_not_clear_which_tensor_holds_the_samples_ids_are_needed(data, to):
    batches = [{"steps": torch.arange(2), "x": data[0]}, {"steps": torch.arange(2), "x": data[6]}]
    given = {"forward": lambda model, batch: model(batch["x"]), "quiet": True}
    with as_rank(1, 2), pytest.raises(hl.HarvestError, match="give ids="):
        hl.harvest(overwriting_mlp(), batches, "0", to=to, **given)


@pytest.mark.parametrize(
    "values", [("2", "2"), ("-1", "2"), ("x", "2"), ("1", None), (None, "2"), ("", "2")]
)
def test_ranks_that_make_no_sense_are_refused(values, monkeypatch):
    for name, value in zip(("RANK", "WORLD_SIZE"), values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(hl.HarvestError, match="RANK"):
        harvest_batches.rank_and_world_size()
