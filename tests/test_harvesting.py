"""harvest: the rows on disk equal what hooks of torch see, for every kind of data."""

import json
import multiprocessing
import shutil
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harvests import (
    LENGTHS,
    Stopped,
    assert_rows,
    check_mean,
    failing_after,
    texts,
)
from models import SometimesTuple, TextModel, overwriting_mlp
from oracles import assert_clean, rows_by_hand
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import hookline as hl
from hookline.isolation.batches import move_batch

# -- What is stored -------------------------------------------------------------------------------


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


def test_training_mode_is_warned_of(data, to):
    with pytest.warns(hl.HooklineWarning, match="training mode: '1'"):
        hl.harvest(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), data, "0", to=to, quiet=True)


# -- Data -----------------------------------------------------------------------------------------


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
    found = move_batch(batch, torch.device("meta"))
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


# -- Real data ------------------------------------------------------------------------------------


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


# -- Errors, warnings and wrappers ----------------------------------------------------------------


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
    kinds = [hl.Mean(dim=3 if recurs else 1)]  # there is no dimension 3
    batches = data if recurs else failing_after(data, 3)
    with pytest.raises(hl.StatisticsError if recurs else Stopped) as caught:
        hl.harvest(overwriting_mlp(), batches, "0", to=to, quiet=True, statistics=kinds)
    note = " ".join(caught.value.__notes__)
    assert "is sound and has" in note
    assert ("goes on from there" in note) is not recurs


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
