"""Harvests: what is on disk is what plain torch hooks see, also after crashes and in shares."""

import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from environment import ROOT
from harvests import (
    LENGTHS,
    Stopped,
    as_function,
    as_rank,
    assert_rows,
    check_mean,
    failing_after,
    ids_of,
    texts,
)
from models import LargeBatches, SometimesTuple, TextModel, overwriting_mlp
from oracles import assert_clean, rows_by_hand
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import hookline as hl
from hookline.harvests import batches as harvest_batches
from hookline.harvests import plans as harvest_plans
from hookline.harvests import progress as harvest_progress
from hookline.harvests import rows as harvest_rows
from hookline.harvests import statistics as harvest_statistics
from hookline.harvests.fingerprints import digest, fingerprint, spell
from hookline.storage import shards as store_shards
from hookline.storage import writing as store_writing

# What is stored


def test_what_is_stored_is_what_hooks_see(data, to):
    model = overwriting_mlp()
    store = hl.harvest(model, data, ["0", "2"], to=to, quiet=True)
    assert_rows(store, rows_by_hand(model, data, "0", "2"))
    assert store.ids == list(range(50))
    assert store.places() == ["0", "2"]
    assert_clean(model)


@pytest.mark.parametrize("form", ["dict", "tuple", "object", "forward"])
def test_padding_is_left_out_whatever_a_batch_is(form, to):
    torch.manual_seed(0)
    model, batches = TextModel(), texts(LENGTHS)
    given = {
        "dict": batches,
        "tuple": [tuple(batch.values()) for batch in batches],
        "object": [SimpleNamespace(**batch) for batch in batches],
        "forward": [[batch, "label"] for batch in batches],
    }[form]
    mask = {"tuple": lambda b: b[1], "forward": lambda b: b[0]["attention_mask"]}
    forward = (lambda m, b: m(**b[0])) if form == "forward" else None
    store = hl.harvest(
        model, given, ["mix", "pool", "embed:input"], to=to, quiet=True, forward=forward,
        mask=mask.get(form, "attention_mask"),
    )  # fmt: skip
    with torch.no_grad():
        whole = [model(**batch) for batch in batches]
    sequences = [row for h, _ in whole for row in h]
    tokens = [row for batch in batches for row in batch["tokens"]]
    assert store["mix"].lengths().tolist() == LENGTHS
    for number, length in enumerate(LENGTHS):
        assert torch.equal(store["mix"][number], sequences[number][:length])
        assert torch.equal(store["embed:input"][number], tokens[number][:length])
    assert torch.equal(store["pool"][:], torch.cat([pooled for _, pooled in whole]))


def test_one_number_for_each_token_is_told_from_a_row_for_each_sample(to):
    model, batches = TextModel(), texts(LENGTHS)
    given = {"mask": "attention_mask", "quiet": True}
    with pytest.raises(hl.HarvestError, match=r"unsqueeze\(-1\)"):
        hl.harvest(model, batches, "mix", to=to, transform=lambda v: v.norm(dim=-1), **given)
    store = hl.harvest(
        model, batches, "mix", to=to, transform=lambda v: v.norm(dim=-1).unsqueeze(-1), **given
    )
    assert store["mix"].lengths().tolist() == LENGTHS
    assert store["mix"].rows.shape == (sum(LENGTHS), 1)


def test_a_batch_as_long_as_a_pooled_row_is_wide_is_told_by_those_before_it(to):
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.pool = nn.Embedding(9, 6), nn.Identity()

        def forward(self, tokens, attention_mask):
            return self.pool(self.embed(tokens).mean(1))

    model = Pooling()
    tokens = [torch.randint(9, (2, length)) for length in (3, 6, 6, 8)]
    batches = [{"tokens": t, "attention_mask": torch.ones_like(t)} for t in tokens]
    given = {"to": to, "mask": "attention_mask", "quiet": True}
    with pytest.raises(hl.HarvestError, match="has the same shape"):
        hl.harvest(model, batches[1:], ["embed", "pool"], **given)
    with pytest.raises(Stopped):
        hl.harvest(model, failing_after(batches, 2), ["embed", "pool"], **given)
    store = hl.harvest(model, batches, ["embed", "pool"], **given)
    with torch.no_grad():
        assert torch.equal(store["pool"][:], torch.cat([model(**batch) for batch in batches]))
    assert store["embed"].lengths().tolist() == [3, 3, 6, 6, 6, 6, 8, 8]


class Encoder(nn.Module):
    """In eval mode torch packs what is padded here into nested tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2)

    def forward(self, x, mask):
        return self.stack(x, src_key_padding_mask=mask == 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mask", ["mask", None])
def test_nested_tensors_are_samples_of_their_own_lengths(mask, to):
    lengths = torch.tensor([3, 5, 1, 4, 2, 5])
    x, keep = torch.randn(6, 5, 8), torch.arange(5)[None] < lengths[:, None]
    batches = [{"x": x[s], "mask": keep[s].long()} for s in (np.s_[:3], np.s_[3:])]
    model = Encoder().eval()
    kinds = [hl.Mean(), hl.TopK(k=1)]
    with torch.no_grad():
        expected = model(x, keep)
    given = {"mask": mask, "quiet": True, "statistics": kinds}
    places = ["stack.layers.1", "stack.layers.0.linear1"]
    store = hl.harvest(model, batches, places, to=to, **given)
    assert store["stack.layers.1"].lengths().tolist() == lengths.tolist()
    assert torch.allclose(store["stack.layers.1"].rows[:], expected[keep], atol=1e-6)
    found = hl.Measurements.load(to / "statistics")
    measured = hl.measure(model, places, statistics=kinds, data=batches, mask=mask)
    for place in places:
        rows = store[place].rows[:].double()
        assert torch.allclose(found[place]["mean"], rows.mean(0), atol=1e-12)
        assert torch.allclose(measured[place]["mean"], rows.mean(0), atol=1e-12)
        values, ids, positions = measured[place]["topk"]
        assert store[place][int(ids[0, 0])][int(positions[0, 0, 0]), 0] == values[0, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_tensors_that_do_not_fit_are_refused(to):
    class Packing(nn.Module):
        def forward(self, x, mask):
            return torch.nested.as_nested_tensor([row[: n + 1] for n, row in enumerate(x)])

    batch = {"x": torch.randn(2, 3, 4), "mask": torch.ones(2, 3)}
    given = {"to": to, "quiet": True, "mask": "mask"}
    with pytest.raises(hl.HarvestError, match=r"not as long as the mask says: \[3, 3\]"):
        hl.harvest(Packing(), [batch], "", **given)
    with pytest.raises(hl.StatisticsError, match=r"\(1, 4\), \(2, 4\).* keeps \[3, 3\]"):
        hl.measure(Packing(), "", statistics=[hl.Mean()], data=[batch], mask="mask")
    uneven = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(hl.StatisticsError, match="differ in their first size only"):
        hl.Mean().update(uneven)
    with pytest.raises(hl.HarvestError, match=r"sparse_coo.*to_dense"):
        hl.harvest(nn.Identity(), [torch.eye(3).to_sparse()], "", to=to, quiet=True)
    with pytest.raises(hl.StatisticsError, match=r"sparse_coo.*to_dense"):
        hl.Mean().update(torch.eye(3).to_sparse())


def test_the_last_token_of_each_sequence(to):
    model, batches = TextModel(), texts([3, 1, 5, 2])
    store = hl.harvest(
        model, batches, "mix", to=to, at=hl.last_token, mask="attention_mask", quiet=True
    )
    with torch.no_grad():
        h, _ = model(**batches[0])
    assert torch.equal(store["mix"][:], h[torch.arange(4), torch.tensor([2, 0, 4, 1])])


def test_slices_transforms_and_dtypes(data, to):
    store = hl.harvest(
        overwriting_mlp(), data, "0", to=to, at=np.s_[:, :2], transform=lambda v: v * 2,
        dtype=torch.bfloat16, quiet=True,
    )  # fmt: skip
    rows = rows_by_hand(overwriting_mlp(), data, "0")["0"]
    assert_rows(store, {"0": (rows[:, :2] * 2).bfloat16()})


def test_ids_are_taken_from_the_batch(data, to):
    batches = [
        {"input": x, "name": [f"{n}-{k}" for k in range(len(x))]} for n, x in enumerate(data)
    ]
    store = hl.harvest(
        overwriting_mlp(),
        batches,
        "0",
        to=to,
        ids="name",
        quiet=True,
        forward=lambda m, b: m(b["input"]),
    )
    assert store.ids == [f"{n}-{k}" for n, x in enumerate(data) for k in range(len(x))]


class LinearWithNames(nn.Linear):
    def forward(self, x, name):
        assert len(name) == len(x)
        return super().forward(x)


def test_a_function_that_counts_is_asked_for_ids_once_a_batch(data, to):
    def given():
        numbers = iter(range(100, 200))
        return {"ids": lambda batch: [next(numbers) for _ in batch], "to": to, "quiet": True}

    buffer = torch.empty(8, 4)

    def again():  # one tensor for all batches, as some loaders have it
        for batch in data:
            buffer.resize_(batch.shape).copy_(batch)
            yield buffer

    assert hl.harvest(overwriting_mlp(), data[:3], "0", **given()).ids == [*range(100, 124)]
    with pytest.raises(hl.HarvestError, match="Batch 2, the last one that was stored, differs"):
        hl.harvest(overwriting_mlp(), data, "0", **given())
    shutil.rmtree(to)
    assert hl.harvest(overwriting_mlp(), again(), "0", **given()).ids == [*range(100, 150)]


@pytest.mark.parametrize("kind", [nn.Linear, LinearWithNames], ids=["not taken", "taken"])
def test_ids_in_a_dict_are_given_only_to_a_model_that_takes_them(kind, data, to):
    key = "x" if kind is LinearWithNames else "input"
    batches = [{key: x, "name": [f"{k}.{n}" for n in range(len(x))]} for k, x in enumerate(data)]
    model = kind(4, 3)
    store = hl.harvest(model, batches, "", to=to, ids="name", quiet=True)
    assert store.ids == [name for batch in batches for name in batch["name"]]
    assert torch.allclose(store[""][:], nn.functional.linear(torch.cat(data), *model.parameters()))


def test_a_mask_that_the_model_does_not_take_is_not_given_to_it(to):
    x = torch.randn(2, 3, 4)
    batches = [{"input": x, "kept": torch.tensor([[1, 1, 0], [1, 0, 0]])}]
    store = hl.harvest(nn.Linear(4, 3), batches, "", to=to, mask="kept", quiet=True)
    assert store[""].lengths().tolist() == [2, 1]


def test_a_part_of_a_dict_that_a_model_does_not_take_is_told_of(data, to):
    with pytest.raises(TypeError) as caught:
        hl.harvest(nn.Linear(4, 3), [{"input": data[0], "label": 1}], "", to=to, quiet=True)
    assert any("forward=" in note for note in caught.value.__notes__)


def test_the_forward_stops_after_the_last_place(data, to):
    model = overwriting_mlp()
    calls = []
    model[3].register_forward_hook(lambda *_: calls.append(1))
    hl.harvest(model, data, "0", to=to, quiet=True)
    assert len(calls) == 1  # the first batch runs through, to see that each place fires once
    hl.harvest(model, data, "0", to=to / "never", stop=False, quiet=True)
    assert len(calls) == 1 + len(data)
    hl.harvest(model, data, "0", to=to / "always", stop=True, quiet=True)
    assert len(calls) == 1 + len(data)


class CallsTwiceAndUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


def test_a_module_that_is_called_twice_is_refused_or_its_first_call_taken(data, to):
    model = CallsTwiceAndUnused()
    with pytest.raises(hl.HarvestError, match=r"called 2 times.*stop=True"):
        hl.harvest(model, data, "layer", to=to, quiet=True)
    store = hl.harvest(model, data, "layer", to=to, stop=True, quiet=True)
    assert torch.equal(store["layer"][:8], model.layer(data[0]).detach())
    assert_clean(model)


class CallsThreeTimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        first = self.layer(x)
        return self.out(self.layer(self.layer(first)))


class CallsShortBatchesTwice(nn.Module):
    """Calls its layer once more for short batches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x if len(x) == 8 else self.layer(x))


def test_further_calls_in_later_batches_are_seen_where_the_forward_runs_to_its_end(data, to):
    model = CallsShortBatchesTwice()
    store = hl.harvest(model, data, "layer", to=to / "auto", quiet=True)
    assert torch.allclose(store["layer"][-2:], model.layer(data[-1]))
    with pytest.raises(hl.HarvestError, match="called 2 times"):
        hl.harvest(model, data, "layer", to=to / "whole", stop=False, quiet=True)


def test_the_first_call_is_taken_also_where_the_forward_goes_on_to_another_place(data, to):
    model = CallsThreeTimes()
    with pytest.raises(hl.HarvestError, match=r"called 3 times.*stop=True"):
        hl.harvest(model, data, ["layer", "out"], to=to, quiet=True)
    store = hl.harvest(model, data, ["layer", "out"], to=to, stop=True, quiet=True)
    rows = torch.cat(data)
    assert torch.allclose(store["layer"][:], model.layer(rows))
    assert torch.allclose(store["out"][:], model(rows))


def test_places_of_a_glob_where_nothing_happens_are_warned_of(data, to):
    model = nn.Sequential(CallsTwiceAndUnused(), nn.Linear(4, 2))
    with pytest.warns(hl.HooklineWarning, match="Nothing happened at '0.unused'"):
        store = hl.harvest(model, data, ["{1,0.unused}"], to=to, quiet=True)
    assert store.places() == ["1"]
    with pytest.raises(hl.NeverFired):
        hl.harvest(model, data, "0.unused", to=to / "other", quiet=True)


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


def test_training_mode_is_warned_of(data, to):
    with pytest.warns(hl.HooklineWarning, match="training mode: '1'"):
        hl.harvest(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), data, "0", to=to, quiet=True)


# Data


class BatchStream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    "kind",
    ["list", "tuple", "generator", "function", "from", "loader", "workers", "stream", "batched"],
)
def test_data_comes_in_many_ways_and_is_gone_on_with(kind, data, to):
    rows, asked = torch.cat(data), []

    def begin(first):
        asked.append(first)
        return iter(data[first:])

    def given():
        return {
            "list": lambda: list(data),
            "tuple": lambda: data,
            "generator": lambda: (x for x in data),
            "function": lambda: lambda: (x for x in data),
            "from": lambda: begin,
            "loader": lambda: DataLoader(rows, batch_size=8),
            "workers": lambda: DataLoader(rows, batch_size=8, num_workers=1),
            "stream": lambda: DataLoader(BatchStream(data), batch_size=None),
            "batched": lambda: DataLoader(BatchStream(rows), batch_size=8),
        }[kind]()

    calls = []

    def forward(model, batch):
        calls.append(1)
        if len(calls) == 4:
            raise Stopped
        return model(batch)

    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), given(), "0", to=to, quiet=True, forward=forward)
    assert len(hl.Store.open(to)) == 3 * 8
    store = hl.harvest(overwriting_mlp(), given(), "0", to=to, quiet=True, forward=forward)
    assert len(calls) == 4 + len(data) - 3
    assert asked in ([], [0, 2])  # the last one that is there is looked at again
    assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))
    assert store.ids == list(range(50))


def test_a_loader_loads_only_what_is_needed(data, to):
    loaded = []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 50

        def __getitem__(self, n):
            loaded.append(n)
            return torch.full((4,), float(n))

    def interrupted(model, batch):
        if batch[0, 0] == 40 and len(loaded) < 50:
            raise Stopped
        return model(batch)

    loader = DataLoader(Rows(), batch_size=8)
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), loader, "0", to=to, quiet=True, forward=interrupted)
    before = len(loaded)
    hl.harvest(overwriting_mlp(), loader, "0", to=to, quiet=True, forward=interrupted)
    assert loaded[before:] == [
        *range(8),
        *range(32, 50),
    ]  # the first and the last stored are compared


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.zeros(8, 4), "x.split"),
        ({"x": 1}, "no series of batches"),
        (3, "no series of batches"),
        ([], "no batches"),
        (lambda: 3, "returned a int"),
    ],
)
def test_what_is_no_data_is_refused(given, reason, to):
    with pytest.raises(hl.HarvestError, match=reason):
        hl.harvest(overwriting_mlp(), given, "0", to=to, quiet=True)
    assert not to.exists()


def test_a_loader_that_shares_already_is_refused(data, to):
    rows = TensorDataset(torch.cat(data))
    loader = DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=2, rank=0))
    with pytest.raises(hl.HarvestError, match="DistributedSampler"):
        hl.harvest(overwriting_mlp(), loader, "0", to=to, quiet=True)


def test_labels_in_a_batch_are_told_of(data, to):
    with pytest.raises(TypeError) as caught:
        hl.harvest(overwriting_mlp(), [(x, len(x)) for x in data], "0", to=to, quiet=True)
    assert "labels" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as caught:  # not of a batch that goes to a function
        hl.harvest(
            overwriting_mlp(),
            [(x, len(x)) for x in data],
            "0",
            to=to,
            quiet=True,
            forward=torch.add,
        )
    assert not any("labels" in note for note in getattr(caught.value, "__notes__", []))


def test_batches_go_to_the_device_of_the_model():
    batch = {"x": torch.ones(2), "n": [torch.ones(1), "word"]}
    found = harvest_rows.moved(batch, torch.device("meta"))
    assert found["x"].is_meta
    assert found["n"][0].is_meta
    assert found["n"][1] == "word"
    assert not batch["x"].is_meta


@pytest.mark.parametrize(
    ("where", "reason"), [("0:grad_output", "gradient"), ("0.weight", "same for every batch")]
)
def test_places_that_a_forward_does_not_give_are_refused(where, reason, data, to):
    with pytest.raises(hl.HarvestError, match=reason):
        hl.harvest(overwriting_mlp(), data, where, to=to, quiet=True)


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ({"ids": lambda batch: None}, "NoneType"),
        ({"ids": lambda batch: 3}, "int"),
        ({"ids": lambda batch: torch.tensor(3)}, "int"),
        ({"ids": lambda batch: "word"}, "str"),
        ({"mask": lambda batch: None}, "NoneType"),
        ({"mask": lambda batch: "word"}, "str"),
    ],
)
def test_ids_and_masks_that_a_function_does_not_give_are_refused(option, found, data, to):
    with pytest.raises(hl.HarvestError, match=f"{next(iter(option))}=") as caught:
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, **option)
    assert found in caught.value.found


def test_options_that_make_no_sense_are_refused(data, to):
    with pytest.raises(hl.HarvestError, match="stop='soon' was asked for"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, stop="soon")
    with pytest.raises(hl.UsageError, match=r"Give torch\.float16"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True, dtype="float16")


def test_rows_that_are_as_many_as_nothing_in_the_batch_are_warned_of(to):
    model, batches = nn.LSTM(3, 4, batch_first=True), torch.randn(6, 5, 3).split(2)
    with pytest.warns(hl.HooklineWarning, match=r"have 2 in .* and the values 1"):
        hl.harvest(model, batches, "[1][0]", to=to, quiet=True)  # layer × sample × channel
    to = to.with_name("front")
    store = hl.harvest(
        model, batches, "[1][0]", to=to, quiet=True, transform=lambda v: v.transpose(0, 1)
    )
    assert store["[1][0]"].shape == (6, 1, 4)


def test_values_that_do_not_fit_samples_are_refused(data, to):
    with pytest.raises(hl.HarvestError, match="single number"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, transform=torch.mean, quiet=True)
    with pytest.raises(hl.HarvestError, match="first dimension"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, ids=lambda b: [1, 2], quiet=True)
    with pytest.raises(hl.HarvestError, match="batch × position"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, mask=lambda b: b[0], quiet=True)
    with pytest.raises(hl.HarvestError, match="no such part"):
        hl.harvest(overwriting_mlp(), data, "0", to=to, mask="attention_mask", quiet=True)
    with pytest.raises(hl.HarvestError, match="mask="):
        hl.harvest(overwriting_mlp(), data, "0", to=to, at=hl.last_token, quiet=True)
    assert not to.exists()


# Going on


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


# The plan, and the disk


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
    monkeypatch.setattr(harvest_plans.Plan, "check_space", lambda plan: plans.append(plan))
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


# Statistics


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


# Ranks, in one process


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
    monkeypatch.setattr("hookline.harvests.ranks._PATIENCE", 0.1)
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
    monkeypatch.setattr("hookline.harvests.ranks._PATIENCE", 0.1)
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
        harvest_batches.ranks()


# Fingerprints


def test_a_function_with_a_set_of_words_is_the_same_in_every_process():
    code = (
        "from hookline.harvests.fingerprints import spell\n"
        "print(spell(lambda m, b: m(**{k: b[k] for k in b if k in {'ids', 'mask', 'types'}})))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "012"
    }  # fmt: skip
    assert len(told) == 1
    assert spell(lambda k: k in {"a", "b"}) != spell(lambda k: k in {"a", "c"})


def test_a_fingerprint_sees_every_change():
    model = nn.Sequential(nn.Linear(100, 200), nn.BatchNorm1d(200))
    seen = {fingerprint(model)}
    assert seen == {fingerprint(model)}
    for change in (
        lambda: model[0].weight.data[77, 33].add_(1e-3),
        lambda: model[1].running_mean.add_(1),
        lambda: model.append(nn.ReLU()),
        lambda: model.double(),
    ):
        change()
        seen.add(fingerprint(model))
    assert len(seen) == 5


@pytest.mark.parametrize("size", [1, 3, 7, 8, 100, 40_000, 40_001])
def test_a_fingerprint_is_of_what_stands_in_a_tensor_wherever_it_stands(size):
    whole = torch.randn(size + 9).half()
    model = nn.Module()
    model.register_buffer("a", whole[:size].clone())
    first = fingerprint(model)
    for start in range(9):
        whole[start : start + size] = model.a
        other = nn.Module()
        other.register_buffer("a", whole[start : start + size])
        assert fingerprint(other) == first
    for place in {0, size // 2, size - 1}:
        with torch.no_grad():
            other.a.copy_(model.a)
            other.a[place] = 9.0
        assert fingerprint(other) != first


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_")
def test_a_fingerprint_sees_weights_that_are_packed():
    def quantized(seed):
        return torch.ao.quantization.quantize_dynamic(overwriting_mlp(seed), {nn.Linear})

    assert fingerprint(quantized(0)) == fingerprint(quantized(0)) != fingerprint(quantized(1))


@pytest.mark.filterwarnings("ignore:torch.quantize_")
def test_quantized_values_are_told_apart_by_scale_and_order():
    x = torch.tensor([1.0, 2.0, 3.0])
    made = [
        torch.quantize_per_tensor(one, scale, 0, torch.qint8)
        for one, scale in ((x, 0.1), (x * 2, 0.2), (x.flip(0), 0.1))
    ]
    assert len({*map(digest, made)}) == 3


def test_modules_that_have_no_shapes_yet_have_a_fingerprint():
    assert fingerprint(nn.LazyLinear(3)) == fingerprint(nn.LazyLinear(4))


def test_a_model_whose_weights_would_be_drawn_at_each_start_is_refused(data, to):
    for layer in (nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)):
        model = nn.Sequential(nn.ReLU(), layer)
        with pytest.raises(hl.HarvestError, match=r"'1\.(weight|running_mean)' has no shape yet"):
            hl.harvest(model, data, "0", to=to, quiet=True)
    assert not to.exists()


def test_a_model_that_is_spread_over_ranks_is_refused(data, to):
    model = overwriting_mlp()
    model[2].weight.placements = ()  # as a DTensor has
    with pytest.raises(hl.HarvestError, match=r"'2\.weight' is spread over ranks"):
        hl.harvest(model, data, "0", to=to, quiet=True)


def test_functions_and_slices_are_told_apart():
    a, b = (lambda v: v[:, 0]), (lambda v: v[:, 1])
    things = [
        None, a, b, torch.relu, torch.tanh, np.s_[:, 0], np.s_[:, 1], np.s_[..., :3],
        hl.heads(1, of=4), hl.heads(2, of=4), hl.last_token(torch.ones(2, 3)),
        hl.last_token(torch.ones(2, 4)), hl.last_token,
    ]  # fmt: skip
    assert len({spell(one) for one in things}) == len(things)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_are_told_apart():
    class Own:
        def __init__(self, x):
            self.own, self.me = x, self

    x = torch.arange(6.0)
    things = [
        x, x.flip(0), x.double(), x.view(2, 3), {"x": x}, {"y": x}, [x], x.numpy() + 1,
        {"x": x, "n": 1}, "a", ["a", "b"], ["b", "a"], Own(x), Own(x + 1), np.array(["a"]),
        np.int32(5), np.int32(6), np.float32(0.5), 1j, 2j, np.complex64(3j),
        *odd_batches(x), *odd_batches(x + 1),
    ]  # fmt: skip
    assert len({digest(one) for one in things}) == len(things)
    assert [*map(digest, odd_batches(x))] == [*map(digest, odd_batches(x))]


class Held:
    """What a batch of another library may be: arrays somewhere in its attributes."""

    def __init__(self, inside):
        self.inside, self.me = inside, self


def many_held(inside):
    """Objects each of which leads to all others."""
    others = [Held(None) for _ in range(20)]
    for one in others:
        one.inside = others
    return [others, inside]


class Picture:
    """Known to numpy only, as an image of Pillow is."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.kept = (array,)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [Path(f"{n}.png")],
        lambda n: Picture(np.full((2, 2), n)),
        lambda n: Held(Held({"x": [torch.full((3,), n)]})),
        lambda n: Held(many_held(torch.full((3,), n))),
        lambda n: {"days": [date(2020, 1, n)]},
        lambda n: bytearray([n]),
        lambda n: {str(n), "a", "b", "c"},
        lambda n: range(n),
    ],
    ids=["path", "picture", "held", "many", "date", "bytes", "set", "range"],
)
def test_batches_of_objects_are_told_apart(make, data, to):
    assert digest(make(1)) == digest(make(1)) != digest(make(2))
    batches = [{"input": x, "own": make(n + 1)} for n, x in enumerate(data)]
    given = {"forward": lambda model, batch: model(batch["input"]), "to": to, "quiet": True}
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(batches, 3), "0", **given)
    batches[2]["own"] = make(20)
    with pytest.raises(hl.HarvestError, match="Batch 2, the last one that was stored, differs"):
        hl.harvest(overwriting_mlp(), batches, "0", **given)


def odd_batches(x):
    """What torch cannot view as bytes, or numpy has and torch does not."""
    nested = [
        torch.nested.as_nested_tensor([x[:2].clone(), x.clone()], layout=layout)
        for layout in (torch.strided, torch.jagged)
    ]
    return [
        torch.complex(x, x).conj(), x.view(2, 3).to_sparse(), x.numpy().astype(">f4"),
        x.numpy().astype(np.longdouble), nested[0], [nested[1]],
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_any_kind_are_gone_on_with(data, to):
    for number, odd in enumerate(odd_batches(torch.arange(6.0))):
        given = [{"x": x, "odd": odd} for x in data]
        run = {"to": to / str(number), "forward": lambda model, batch: model(batch["x"])}
        with pytest.raises(Stopped):
            hl.harvest(overwriting_mlp(), failing_after(given, 2), "0", quiet=True, **run)
        assert_rows(
            hl.harvest(overwriting_mlp(), given, "0", quiet=True, **run),
            rows_by_hand(overwriting_mlp(), data, "0"),
        )


# Real data


def test_a_harvest_of_a_cnn_over_the_digits(to):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures[:600]), torch.tensor(labels[:600])).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(pictures), batch_size=128)
    store = hl.harvest(
        model.eval(), loader, ["0", "5"], to=to, quiet=True, dtype=torch.float16,
        statistics={"sparsity": hl.Sparsity(dim=None)},
    )  # fmt: skip
    batches = pictures.split(128)
    expected = rows_by_hand(model, batches, "0", "5")
    assert_rows(store, {place: rows.half() for place, rows in expected.items()})
    # A linear probe on what was stored finds the digits again.
    features, answers = store["5"].to_numpy().astype("float32"), np.eye(10)[labels]
    weights = np.linalg.lstsq(features[:600], answers[:600], rcond=None)[0]
    assert (np.argmax(features[600:] @ weights, 1) == labels[600:]).mean() > 0.8
    assert 0.1 < float(hl.Measurements.load(to / "statistics")["5"]["sparsity"]) < 0.9


def test_what_was_said_of_all_samples_is_gone_when_more_were_begun(data, to):
    data = [*data[:2], data[0][:0], *data[2:]]

    def breaks_off():
        yield from data[:5]
        raise OSError("the network is gone")

    given = {"to": to, "quiet": True}
    hl.harvest(overwriting_mlp(), data[:2], "0", statistics=[hl.Mean()], **given)
    hl.harvest(overwriting_mlp(), data[:3], "0", **given)  # nothing to store
    assert hl.Measurements.load(to / "statistics").statistics["0"]["mean"].count[0] == 16
    with pytest.raises(OSError, match="network"):
        hl.harvest(overwriting_mlp(), breaks_off(), "0", statistics=[hl.Mean()], **given)
    assert len(hl.Store.open(to)) == 32
    assert not (to / "harvest.json").exists()
    assert not (to / "statistics").exists()
    store = hl.harvest(overwriting_mlp(), data, "0", statistics=[hl.Mean()], **given)
    assert json.loads((to / "harvest.json").read_text())["samples"] == 50
    check_mean(to, store)


# Interrupted and killed


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
from hookline.storage import shards

def slow(file, data, place):
    slow.calls += 1
    if slow.calls == 4:  # in the middle of an append
        for wait in (0.3, 0.3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(wait)
    write(file, data, place)

slow.calls, write, shards._write = 0, shards._write, slow
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
from hookline.storage import writing as store_writing
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


def test_the_workers_of_a_loader_end_with_a_harvest_that_fails(data, to):
    def forward(model, batch):
        if len(forward.seen) == 3:
            raise Stopped
        forward.seen.append(batch)
        return model(batch)

    forward.seen, others = [], set(multiprocessing.active_children())
    loader = DataLoader(torch.cat(data), batch_size=4, num_workers=1)
    with pytest.raises(Stopped) as caught:
        hl.harvest(overwriting_mlp(), loader, "0", to=to, forward=forward, quiet=True)
    assert caught.value  # which holds its frames, as a notebook holds the last error
    assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("recurs", [True, False])
def test_only_errors_that_may_not_come_again_advise_to_go_on(recurs, data, to):
    kinds = [hl.Mean(dim=3 if recurs else 1)]
    with pytest.raises((hl.StatisticsError, Stopped)) as caught:
        hl.harvest(
            overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True, statistics=kinds
        )
    note = " ".join(caught.value.__notes__)
    assert "is sound and has" in note
    assert ("goes on from there" in note) is not recurs


def test_warnings_of_what_was_dropped_are_given_when_it_goes_on(data, to):
    with pytest.raises(Stopped):
        hl.harvest(overwriting_mlp(), failing_after(data, 3), "0", to=to, quiet=True)
    with (to / "rank00000-00000.safetensors").open("ab") as file:
        file.write(b"half a row")
    with pytest.warns(hl.HooklineWarning, match="dropped 10 B"):
        store = hl.harvest(overwriting_mlp(), data, "0", to=to, quiet=True)
    with warnings.catch_warnings(action="error"):
        assert_rows(store, rows_by_hand(overwriting_mlp(), data, "0"))


def test_values_that_do_not_fit_the_store_name_the_place_and_advise_nothing_in_vain(to):
    model = nn.Embedding(10, 4)
    batches = [torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)]
    with pytest.raises(hl.StoreError, match=r"has .*'' rows \(3, 4\) F32.*mask=") as caught:
        hl.harvest(model, batches, "", to=to, quiet=True)
    assert "goes on from there" not in " ".join(caught.value.__notes__)
    assert len(hl.Store.open(to)) == 2


def test_names_of_wrappers_may_be_left_out_where_a_harvest_is_read(data, to):
    model = overwriting_mlp()
    compiled = torch.compile(model, backend="eager")
    store = hl.harvest(compiled, data, ["0", "3:input"], to=to, statistics=[hl.Mean()], quiet=True)
    assert store.places() == ["_orig_mod.0", "_orig_mod.3:input"]
    assert "0" in store
    assert_rows(store, rows_by_hand(model, data, "0"))
    assert store["3:input"].shape == store["_orig_mod.3:input"].shape == (50, 3)
    found = hl.Measurements.load(to / "statistics")
    assert torch.equal(found["0"]["mean"], found["_orig_mod.0"]["mean"])
    assert found.get("1") is None
    with pytest.raises(hl.StoreError, match="no place '1'"):
        store["1"]


class CallsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SometimesTuple()

    def forward(self, x):
        return self.inner(x) + self.inner(x, x * 4)[0]


@pytest.mark.parametrize("stop", [True, False])
def test_a_part_that_only_one_of_the_calls_has_is_harvested(tmp_path, stop):
    hl.harvest(CallsTwice(), [torch.ones(2, 3)], "inner[0]", to=tmp_path / "acts", stop=stop)
    assert hl.Store.open(tmp_path / "acts")["inner[0]"][:].tolist() == [[5.0] * 3] * 2


def test_a_module_called_as_a_wrapper_is_not_taken_for_another_one(to):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.fc = nn.Sequential(OrderedDict(fc=nn.Linear(3, 3))), nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(self.module(x))

    store = hl.harvest(Outer(), [torch.ones(2, 3)], "fc", to=to, statistics=[hl.Mean()], quiet=True)
    assert "module.fc" not in store
    assert hl.Measurements.load(to / "statistics").get("module.fc") is None
    with pytest.raises(hl.StoreError, match=r"no place 'module\.fc'"):
        store["module.fc"]


def test_warnings_of_the_first_batch_are_told_at_the_line_that_asked(to):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.used(x.transpose(0, 1))

    batches = [torch.ones(2, 5, 3)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hl.harvest(Turning(), batches, "*", to=to, quiet=True)
        hl.measure(Turning(), "*", statistics=[hl.Mean()], data=batches)
    begins = [str(one.message).split()[0] for one in told]
    assert begins == ["Nothing", "The", "Nothing"]
    assert {one.filename for one in told} == {__file__}
