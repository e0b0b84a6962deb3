"""measure: statistics of the values in a model, over data or inside a `with`."""

import errno
import json
import os
import random
import threading
import warnings
from collections import UserDict
from contextlib import suppress
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
import torch
from models import Giving, Swallowing, small
from oracles import (
    Killed,
    assert_clean,
    assert_near_numpy,
    assert_same_state,
    rows_by_hand,
    state_bits,
)
from safetensors import SafetensorError
from torch import nn

import hookline as hl

# -- over data and inside a with ------------------------------------------------------------------


def test_measure_over_data_gives_what_a_hand_written_hook_gives(model):
    data = list(torch.randn(20, 3).split(6))
    found = hl.measure(model, nn.Linear, statistics=[hl.Mean(), hl.Covariance()], data=data)
    assert list(found) == ["0", "2"]
    for path in found:
        whole = rows_by_hand(model, data, path)[path].double()
        assert_near_numpy(found[path]["mean"], whole.mean(0))
        assert_near_numpy(found[path]["covariance"], whole.T.cov())
    assert found.calls == {"0": 4, "2": 4}
    assert_clean(model)


def test_measuring_changes_nothing(model):
    model.train()
    model[1].eval()
    before, x = state_bits(model), torch.randn(4, 3)
    state = torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    bare = model(x)
    bare.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    hl.measure(model, "**", statistics=[hl.Mean(), hl.Variance()], data=[x])
    with hl.measure(model, "**", statistics=[hl.Norm(), hl.TopK()]):
        model.zero_grad()
        again = model(x)
        again.sum().backward()
    assert torch.equal(again, bare)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(model, before)
    assert_clean(model)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, attention_mask=None):
        return self.lin(x)


@pytest.mark.parametrize("how", ["name", "function", "positional", "context"])
def test_a_mask_is_an_argument_of_the_model_or_a_function_of_the_batch(how):
    torch.manual_seed(0)
    model = Padded()
    xs = [torch.randn(2, 4, 3), torch.randn(1, 5, 3)]
    masks = [torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]), torch.tensor([[0, 1, 1, 1, 1]])]
    data = [{"x": x, "attention_mask": m} for x, m in zip(xs, masks, strict=True)]
    kind = {"statistics": [hl.Mean()], "mask": "attention_mask"}
    if how == "function":
        kind["mask"] = lambda batch: batch["attention_mask"]
    if how == "positional":
        data = [tuple(batch.values()) for batch in data]
    if how == "context":
        with hl.measure(model, "lin", **kind) as found:
            for batch in data:
                model(**batch)
    else:
        found = hl.measure(model, "lin", data=data, **kind)
    rows = torch.cat([model.lin(x)[m.bool()] for x, m in zip(xs, masks, strict=True)])
    assert_near_numpy(found["lin"]["mean"], rows.detach().double().mean(0))
    assert found.statistics["lin"]["mean"].count.tolist() == [9, 9]
    listed = [m.tolist() for m in masks]
    if how == "function":
        again = hl.measure(
            model, "lin", data=data, statistics=[hl.Mean()], mask=lambda batch: listed.pop(0)
        )
        assert_near_numpy(again["lin"]["mean"], found["lin"]["mean"])
    whole = hl.measure(model, "lin", statistics=[hl.Mean()], data=data[:1], mask=masks[0].tolist())
    assert whole.statistics["lin"]["mean"].count.tolist() == [5, 5]
    with pytest.raises(hl.StatisticsError, match=r"'padding'.*x, attention_mask"):
        hl.measure(model, "lin", statistics=[hl.Mean()], mask="padding", data=data)
    assert_clean(model)


def test_a_mask_by_name_is_that_of_the_call_also_at_the_input_of_the_model():
    model = Padded()
    xs, masks = torch.randn(2, 1, 3, 3), torch.tensor([[[1, 0, 0]], [[1, 1, 0]]])
    data = [{"x": x, "attention_mask": m} for x, m in zip(xs, masks, strict=True)]
    found = hl.measure(model, ":input", statistics=[hl.Mean()], data=data, mask="attention_mask")
    expected = torch.cat([x[m.bool()] for x, m in zip(xs, masks, strict=True)])
    assert_near_numpy(found[":input"]["mean"], expected.double().mean(0))


def test_a_mask_by_name_is_asked_for_where_the_model_itself_did_not_run():
    model, x = Padded(), torch.randn(1, 3, 3)
    with hl.measure(model, "lin", statistics=[hl.Mean()], mask="attention_mask") as found:
        with pytest.raises(hl.StatisticsError, match="the model itself was not"):
            model.lin(x)
        model(x, torch.tensor([[1, 0, 0]]))
        with pytest.raises(hl.StatisticsError, match="the model itself was not"):
            model.lin(x)
        model(x, None)
    assert found.statistics["lin"]["mean"].count.tolist() == [4, 4]
    assert_clean(model)


def test_gradients_have_the_mask_of_their_forward_or_none_at_all():
    model, x = Padded(), torch.randn(1, 3, 3)
    one, two = torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 0]])
    place = "lin:grad_output"
    with hl.measure(model, place, statistics=[hl.Mean()], mask="attention_mask") as found:
        for mask in (one, two):
            model(x, mask).sum().backward()
        (model(x, two) + model(x, two.clone())).sum().backward()
        assert found.statistics[place]["mean"].count.tolist() == [7, 7]
        loss = (model(x, one) + model(x, two)).sum()
        with pytest.raises(hl.StatisticsError, match="with different masks"):
            loss.backward()
    assert found.statistics[place]["mean"].count.tolist() == [7, 7]
    assert_clean(model)


@pytest.mark.parametrize("what", ["mask", "ids"])
def test_a_function_that_finds_no_mask_or_ids_in_a_batch_is_told_of(what):
    data = [{"x": torch.randn(1, 3, 3), "attention_mask": torch.ones(1, 3)}]
    given = {"statistics": [hl.TopK()], "data": data, what: lambda batch: batch.get("padding")}
    with pytest.raises(hl.StatisticsError, match=f"{what}= .*It gave None.*that the batch has"):
        hl.measure(Padded(), "lin", **given)


def test_a_mask_that_marks_padding_in_torch_is_refused_by_name(tmp_path):
    model = nn.TransformerEncoderLayer(4, 1, batch_first=True).eval()
    batch = {
        "src": torch.randn(1, 3, 4),
        "src_key_padding_mask": torch.tensor([[False] * 2 + [True]]),
    }
    given = {"statistics": [hl.Mean()], "mask": "src_key_padding_mask"}
    with pytest.raises(hl.StatisticsError, match="true for padding"):
        hl.measure(model, "linear1", data=[batch], **given)
    with pytest.raises(hl.StatisticsError, match="true for padding"):
        hl.measure(model, "linear1", **given)
    with pytest.raises(hl.HarvestError, match="true for padding"):
        hl.harvest(model, [batch], "linear1", to=tmp_path / "acts", **given)
    given["mask"] = lambda batch: ~batch["src_key_padding_mask"]
    found = hl.measure(model, "linear1", data=[batch], **given)
    assert found.statistics["linear1"]["mean"].count[0] == 2


@pytest.mark.parametrize("padding", [float("-inf"), -3.4e38, float("nan"), -100])
def test_a_mask_that_is_added_to_scores_is_refused(padding, tmp_path):
    mask = torch.tensor([[0, 0, padding]])
    batch = {"x": torch.randn(1, 3, 4), "mask": mask}
    given = {"statistics": [hl.Mean()], "mask": lambda batch: batch["mask"]}
    model = Giving(lambda x, mask: x)
    with pytest.raises(hl.StatisticsError, match=r"negative or NaN.*nonzero for tokens"):
        hl.measure(model, "", data=[batch], **given)
    with pytest.raises(hl.HarvestError, match=r"negative or NaN.*nonzero for tokens"):
        hl.harvest(model, [batch], "", to=tmp_path / "acts", **given)
    given["mask"] = lambda batch: batch["mask"] == 0
    assert hl.measure(model, "", data=[batch], **given).statistics[""]["mean"].count[0] == 2


def test_calls_of_other_threads_are_not_measured(model):
    batches = [*torch.randn(6, 3).split(2)]

    def meanwhile():
        for batch in batches:
            yield batch
            other = threading.Thread(target=model, args=(batch + 100,))
            other.start()
            other.join()

    with torch.no_grad():
        expected = torch.cat([model[0](batch) for batch in batches]).double().mean(0)
    found = hl.measure(model, "0", statistics=[hl.Mean()], data=meanwhile())
    assert_near_numpy(found["0"]["mean"], expected)
    with hl.measure(model, "0", statistics=[hl.Mean()]) as found, torch.no_grad():
        for batch in meanwhile():
            model(batch)
    assert_near_numpy(found["0"]["mean"], expected)
    measuring = hl.measure(model, "0", statistics=[hl.Mean()]).attach()
    for batch in meanwhile():
        model(batch)
    measuring.remove()
    assert measuring.found.calls["0"] == 6
    assert_clean(model)


def test_a_number_for_each_sample_is_one_channel_as_in_a_harvest(tmp_path):
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 4), [*torch.randn(7, 3).split(3)]
    kinds = {"variance": hl.Variance(), "top": hl.TopK(k=2), "all": hl.Mean(dim=None)}
    found = hl.measure(model, "", statistics=kinds, data=batches, at=np.s_[:, 2])
    values = torch.cat([model(batch)[:, 2] for batch in batches]).detach().double()
    assert_near_numpy(found[""]["variance"], values.var()[None])
    assert_near_numpy(found[""]["all"], values.mean())
    assert_near_numpy(found[""]["top"].values, values.topk(2)[0][:, None])
    assert found[""]["top"].ids.tolist() == [[n] for n in values.topk(2)[1].tolist()]
    hl.harvest(model, batches, "", to=tmp_path, at=np.s_[:, 2], statistics=kinds, quiet=True)
    stored = hl.Measurements.load(tmp_path / "statistics")
    for name in kinds:
        assert_near_numpy(stored[""][name], found[""][name])


def test_a_vector_is_channels_where_dim_says_so_and_at_parameters():
    model = nn.Linear(3, 4)
    xs = torch.randn(5, 3)
    with hl.measure(model, ["", "bias:grad"], statistics=[hl.Mean(dim=0)]) as found:
        for x in xs:
            model(x).sum().backward()
    expected = torch.stack([model(x) for x in xs]).double().mean(0).detach()
    assert_near_numpy(found[""]["mean"], expected)
    with hl.measure(model, "bias:grad", statistics=[hl.Mean()]) as found:
        model(xs).sum().backward()
    assert_near_numpy(found["bias:grad"]["mean"], torch.full((4,), 5.0).double())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_values_of_samples_with_one_id_do_not_depend_on_how_they_came(k):
    # As windows of one text may have its number.
    x = torch.zeros(3, 4, 2)
    x[0, 3], x[1, 1], x[2, 2] = 1.0, 1.0, 1.0
    ids = [8, 8, 5]
    whole = hl.TopK(k=k).update(x, ids=ids).result
    parts = hl.TopK(k=k)
    for n in (2, 0, 1):
        parts.update(x[n : n + 1], ids=ids[n : n + 1])
    assert_near_numpy(parts.result, whole)
    order = [(8 if n != 2 else 5, p) for n, p in ((2, 2), (1, 1), (0, 3))]
    order += [(5, 0), (5, 1)]
    assert whole.ids[:, 0].tolist() == [i for i, _ in order[:k]]
    assert whole.positions[:, 1, 0].tolist() == [p for _, p in order[:k]]


def test_top_samples_have_the_ids_of_the_batch(model):
    data = [(torch.randn(3, 3), [7, 3, 11]), (torch.randn(2, 3), [5, 20])]
    ids = iter([d[1] for d in data])
    found = hl.measure(
        model, "2", statistics=[hl.TopK(k=2)], data=[d[0] for d in data], ids=lambda b: next(ids)
    )
    names = torch.tensor([7, 3, 11, 5, 20])
    rows = rows_by_hand(model, [d[0] for d in data], "2")["2"]
    order = rows.double().argsort(0, descending=True)
    assert torch.equal(found["2"]["topk"].ids, names[order[:2]])


class TwiceOrNever(nn.Module):
    """Calls one module twice for a batch, or not at all."""

    def __init__(self):
        super().__init__()
        self.act, self.out = nn.Tanh(), nn.Linear(3, 3)

    def forward(self, x):
        return self.act(self.out(self.act(x))) if x[0, 0] > 0 else x


@pytest.mark.parametrize("dim", [-1, None])
def test_top_samples_have_their_numbers_where_a_module_is_called_twice_or_not_at_all(dim):
    rows = torch.randn(30, 3)
    rows[::5, 0] = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 1.5])  # below 0 it is not called
    data, model = rows.split(5), TwiceOrNever()
    found = hl.measure(model, "act", statistics=[hl.TopK(dim=dim, k=4)], data=data)["act"]["topk"]
    seen = []
    handle = model.act.register_forward_hook(lambda *call: seen[-1].append(call[-1]))
    for batch in data:
        seen.append([])
        with torch.no_grad():
            model(batch)
    handle.remove()
    assert 0 < sum(map(len, seen)) < 2 * len(data)
    rows = torch.cat([value for calls in seen for value in calls])
    calls = torch.tensor([number for number, calls in enumerate(seen) for _ in calls])
    names = (calls[:, None] * 5 + torch.arange(5)).reshape(-1)
    if dim is None:
        rows, names = rows.reshape(-1, 1), names.repeat_interleave(3)
    wanted = names[rows.argsort(0, descending=True)[:4]]
    assert torch.equal(found.ids, wanted[:, 0] if dim is None else wanted)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Identity()

    def forward(self, x):
        return self.act(x.flatten(0, 1))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Identity()

    def forward(self, x):
        return self.act(x.transpose(0, 1))


@pytest.mark.parametrize("kind", [Tokens, SequenceFirst])
def test_whose_values_are_numbered_does_not_depend_on_the_first_size_of_a_batch(kind):
    same, other = (4, 1, 2) if kind is Tokens else (4, 4, 2), (4, 3, 2)
    for shapes in ([same, other], [other, same], [other]):
        data = [torch.randn(shape) for shape in shapes]
        with pytest.raises(hl.StatisticsError, match=r"'act'.* 4 samples.*ids=") as raised:
            hl.measure(kind(), "act", statistics=[hl.TopK(k=3), hl.Mean()], data=data)
        assert raised.value.measured.calls == ({"act": 1} if shapes[0] == same else {"act": 0})
        found = hl.measure(kind(), "act", statistics=[hl.Mean()], data=data)
        assert found.calls["act"] == len(data)


def test_samples_are_brought_to_the_front_for_their_numbers():
    data = [torch.randn(4, 4, 2), torch.randn(3, 4, 2), torch.randn(5, 2, 2)]
    front = hl.measure(
        SequenceFirst(),
        "act",
        statistics=[hl.TopK(k=3)],
        at=lambda v: v.transpose(0, 1),
        data=data,
    )["act"]["topk"]
    whole = hl.TopK(k=3)
    for batch in data:
        whole.update(batch)
    assert all(torch.equal(*pair) for pair in zip(front, whole.result, strict=True))


def test_rows_are_counted_inside_a_with():
    data = torch.randn(4, 1, 2), torch.randn(4, 3, 2)
    model = Tokens()
    with hl.measure(model, "act", statistics=[hl.TopK(k=3)]) as found:
        for batch in data:
            model(batch)
    rows = torch.cat([length.flatten(0, 1) for length in data])
    assert torch.equal(found["act"]["topk"].ids, rows.argsort(0, descending=True)[:3])


def test_rows_of_a_parameter_are_no_samples_whatever_the_batch_has():
    for size in (4, 3):
        model, data = nn.Linear(2, 4, bias=False), torch.randn(3, size, 2)
        found = hl.measure(model, "weight", statistics=[hl.TopK(k=2)], data=[*data])
        assert found.calls["weight"] == 3
        wanted = hl.TopK(k=2)
        for _ in data:
            wanted.update(model.weight)
        assert torch.equal(found["weight"]["topk"].ids, wanted.result.ids)


def test_a_batch_that_does_not_say_how_many_samples_it_has_after_others_that_did_is_refused():
    class Weighted(nn.Module):
        def forward(self, x, weights):
            return x * weights

    data = [(torch.randn(n, 2), torch.ones(2)) for n in (2, 6)]
    with pytest.raises(hl.StatisticsError, match=r"first size, 6 and 2, .*ids="):
        hl.measure(Weighted(), "", statistics=[hl.TopK(k=3)], data=data)
    found = hl.measure(Weighted(), "", statistics=[hl.TopK(k=3)], data=data[::-1])
    rows = torch.cat([data[1][0], data[0][0]])
    assert torch.equal(found[""]["topk"].ids, rows.argsort(0, descending=True)[:3])


def test_samples_are_counted_where_a_batch_does_not_say_how_many_it_has():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Identity()

        def forward(self, x, weights):
            return torch.cat([self.act(half) for half in x.chunk(2)]) * weights

    x = torch.randn(12, 2)
    data = [(part, torch.ones(2)) for part in x.split(6)]
    found = hl.measure(Halves(), "act", statistics=[hl.TopK(k=3)], data=data)
    assert torch.equal(found["act"]["topk"].ids, x.argsort(0, descending=True)[:3])
    known = [{"x": part, "weights": 1.0} for part in x.split(6)]
    with pytest.raises(hl.StatisticsError, match=r"shape \(3, 2\).* 6 samples"):
        hl.measure(Halves(), "act", statistics=[hl.TopK(k=3)], data=known)


def test_a_slice_of_each_value_is_measured(model):
    x = torch.randn(5, 3)
    found = hl.measure(model, "0", statistics=[hl.Mean()], at=np.s_[:, 1:3], data=[x])
    assert_near_numpy(found["0"]["mean"], model[0](x)[:, 1:3].detach().double().mean(0))


def test_gradients_are_measured_inside_a_with(model):
    x = torch.randn(5, 3)
    with hl.capture(model, "0:grad_output") as record:
        model(x).square().sum().backward()
    with hl.measure(model, "0:grad_output", statistics=[hl.Mean()]) as found:
        model(x).square().sum().backward()
    assert_near_numpy(found["0:grad_output"]["mean"], record["0:grad_output"].double().mean(0))
    with pytest.raises(hl.StatisticsError, match="gradient places"):
        hl.measure(model, "0:grad_output", statistics=[hl.Mean()], data=[x])


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.late = False

    def forward(self, x):
        return self.b(self.a(x)) if self.late else self.a(x)


def test_a_place_that_did_not_fire_is_warned_of_after_the_first_batch_and_nothing_is_lost():
    model, seen = Halves(), []

    def data():
        yield torch.randn(2, 3)
        seen.append(len(caught))
        model.late = True
        yield torch.randn(2, 3)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hl.measure(model, ["a", "b"], statistics=[hl.Mean()], data=data())
    assert seen == [1]
    assert [w.category for w in caught] == [hl.HooklineWarning]
    assert "'b'" in str(caught[0].message)
    assert found.calls == {"a": 2, "b": 1}
    model.late = False
    with pytest.warns(hl.HooklineWarning, match="'b'"):
        with hl.measure(model, ["a", "b"], statistics=[hl.Mean()]) as found:
            model(torch.randn(2, 3))
    assert list(found) == ["a"]
    with pytest.warns(hl.HooklineWarning, match="'a', 'b'"):
        with hl.measure(model, ["a", "b"], statistics=[hl.Mean()]) as found:
            pass
    with pytest.raises(hl.NotCaptured, match="no place"):
        found["a"]
    assert found.get("a") is None


# -- The end of a forward that nobody needs -------------------------------------------------------


def calls_of(module):
    """A list that grows with each call of a module."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


BATCHES = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).split(8)


def test_measure_over_data_ends_each_forward_after_the_last_place():
    model = small().eval()
    calls = calls_of(model[2])
    places = ["0", "0.weight", "1:input"]
    found = hl.measure(model, places, statistics=[hl.Mean()], data=BATCHES)
    assert len(calls) == 1  # the first batch runs through, to see that each place has one call
    assert found.calls == dict.fromkeys(places, len(BATCHES))
    with torch.no_grad():
        expected = model[0](torch.cat(BATCHES)).double().mean(0)
    assert_near_numpy(found["0"]["mean"], expected)
    assert_near_numpy(found["1:input"]["mean"], expected)
    assert_near_numpy(found["0.weight"]["mean"], model[0].weight.detach().double().mean(0))


def test_measure_sees_every_call_of_every_batch_if_it_may_not_stop():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            found = self.layer(x)
            return self.layer(found) if len(x) > 2 else found

    model, batches = Sometimes(), [torch.randn(2, 3), torch.randn(4, 3), torch.randn(5, 3)]
    found = hl.measure(model, "layer", statistics=[hl.Mean()], data=batches, stop=False)
    assert found.calls == {"layer": 5}
    with pytest.raises(ValueError, match="stop='yes' was asked for"):
        hl.measure(model, "layer", statistics=[hl.Mean()], data=batches, stop="yes")


def test_measure_with_a_mask_that_is_named_ends_forwards_early_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, mask):
            return self.second(self.first(x))

    model = Masked().double()
    calls = calls_of(model.second)
    batches = [{"x": x.double()[:, None], "mask": (x[:, :1] > 0).long()} for x in BATCHES]
    found = hl.measure(model, "first", statistics=[hl.Mean()], data=batches, mask="mask")
    assert len(calls) == 1
    rows = torch.cat(BATCHES).double()
    with torch.no_grad():
        expected = model.first(rows[rows[:, 0] > 0]).mean(0)
    assert_near_numpy(found["first"]["mean"], expected)


class RepeatsFirst(nn.Module):
    """Calls its first layer as often as it is told, then its second."""

    def __init__(self, calls=2):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(3, 3), nn.Linear(3, 3), calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.first(x)
        return self.second(x)


def test_measure_runs_forwards_to_their_end_where_a_place_has_several_calls():
    model = RepeatsFirst()
    calls = calls_of(model.second)
    found = hl.measure(model, "first", statistics=[hl.Mean()], data=BATCHES)
    assert found.calls == {"first": 2 * len(BATCHES)}
    assert len(calls) == len(BATCHES)


def test_a_batch_without_a_call_of_a_place_is_measured_at_the_others():
    model = RepeatsFirst(calls=1)

    def data():
        yield BATCHES[0]
        model.calls = 0
        yield BATCHES[1]

    found = hl.measure(model, ["first", "second"], statistics=[hl.Mean()], data=data())
    assert found.calls == {"first": 1, "second": 2}


class Noisy(nn.Module):
    """Draws numbers that leave its result as it is."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x + 0 * self.draw()


class CountsItsCalls(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize(
    "last",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.InstanceNorm1d(8, track_running_stats=True),
        nn.Dropout,
        CountsItsCalls,
        lambda: Noisy(np.random.random),
        lambda: Noisy(random.random),
        lambda: Noisy(lambda: torch.rand(())),
    ],
    ids=["batch norm", "instance norm", "dropout", "a buffer", "numpy", "random", "torch"],
)
@pytest.mark.parametrize("verb", ["measure", "harvest"])
@pytest.mark.filterwarnings("ignore:The model is in training mode")
def test_a_forward_whose_end_has_effects_is_not_ended_early(verb, last, tmp_path):
    def run(forwards):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(3, 4), last())
        forwards(model)
        return state_bits(model), torch.rand(()), random.random(), np.random.random()

    def by_hand(model):
        with torch.no_grad():
            for batch in BATCHES:
                model(batch)

    def by_verb(model):
        if verb == "measure":
            hl.measure(model, "0", statistics=[hl.Mean()], data=BATCHES)
        else:
            hl.harvest(model, BATCHES, "0", to=tmp_path / "acts", quiet=True)

    state, *numbers = run(by_verb)
    expected, *others = run(by_hand)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert numbers == others


def test_a_model_that_catches_the_end_of_its_forward_is_told_of():
    model = nn.Sequential(Swallowing(BaseException), nn.Linear(3, 3))
    with pytest.raises(hl.NeverFired, match="caught the stop"):
        hl.measure(model, "0.first", statistics=[hl.Mean()], data=BATCHES)
    assert_clean(model)


@pytest.mark.parametrize("error", [ValueError("disk"), KeyboardInterrupt()])
def test_what_was_measured_before_a_failure_is_in_the_exception(model, error):
    x = torch.randn(2, 3)

    def data():
        yield x
        raise error

    with pytest.raises(type(error)) as caught:
        hl.measure(model, "0", statistics=[hl.Mean()], data=data())
    assert_near_numpy(caught.value.measured["0"]["mean"], model[0](x).detach().double().mean(0))
    assert_clean(model)
    with pytest.raises(TypeError) as caught:
        hl.measure(model, "0", statistics=[hl.Mean()], data=[(x, x)])
    assert any("labels" in note for note in caught.value.__notes__)


def test_operations_inside_a_forward_are_measured():
    class Attending(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model, x = nn.Sequential(Attending()), torch.randn(2, 3, 4)
    found = hl.measure(model, "0/softmax", statistics=[hl.Mean(dim=None)], data=[x])
    assert_near_numpy(found["0/softmax"]["mean"], (x @ x.mT).softmax(-1).double().mean())


def test_a_name_of_a_shared_module_is_its_first_name():
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": layer, "b": layer})
    with hl.measure(model, "b", statistics=[hl.Mean()]) as found:
        model["b"](torch.randn(2, 3))
    assert list(found) == ["a"]


def test_recomputed_calls_count_once(model):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 3, requires_grad=True)
    with hl.measure(model, "0", statistics=[hl.Mean()]) as found:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert found.calls == {"0": 1}


def test_measurements_merge_save_and_show_themselves(model, tmp_path):
    x = torch.randn(8, 3)
    named = {"top": hl.TopK(k=2), "bottom": hl.TopK(k=2, largest=False), "spread": hl.Variance()}
    batches = [x[:3], x[3:]]  # the same in both ways: a batch of 8 is rounded otherwise

    def numbers(batch):
        return range(3) if len(batch) == 3 else range(3, 8)

    whole = hl.measure(model, "*", statistics=named, data=batches, ids=numbers)
    parts = [hl.measure(model, "*", statistics=named, data=[b], ids=numbers) for b in batches]
    parts[1].save(tmp_path)
    merged = hl.Measurements().merge(parts[0]).merge(hl.Measurements.load(tmp_path))
    for place, named in whole.items():
        for name, result in named.items():
            assert_near_numpy(merged[place][name], result)
    assert repr(whole).splitlines()[1].split() == ["place", "calls", "top", "bottom", "spread"]
    assert "<table>" in whole._repr_html_()
    assert repr(hl.Measurements()) == "Measurements at 0 places"
    other = hl.measure(model, "0", statistics=[hl.Mean()], data=[x])
    with pytest.raises(hl.StatisticsError, match="top, bottom, spread"):
        merged.merge(other)


def test_foreign_measurements_are_errors(model, tmp_path):
    hl.measure(model, "0", statistics=[hl.Mean()], data=[torch.randn(2, 3)]).save(tmp_path)
    path = tmp_path / "measurements.json"
    content = json.loads(path.read_text())
    row = content["places"][0]
    for places in (None, 5, [5], [{}], [row | {"calls": "a"}], [row | {"statistics": []}],
                   [row | {"statistics": {"mean": 5}}], [row | {"place": 5}]):  # fmt: skip
        path.write_text(json.dumps(content | {"places": places}))
        with pytest.raises(hl.StatisticsError):
            hl.Measurements.load(tmp_path)
    renamed = {"statistics": {"meam": row["statistics"]["mean"]}}
    for places in ([row | renamed], [], [row | {"statistics": {}}]):
        path.write_text(json.dumps(content | {"places": places}))
        with pytest.raises(hl.StatisticsError, match="tensors of '0/mean', which are not listed"):
            hl.Measurements.load(tmp_path)
    with pytest.raises(hl.StatisticsError, match="no file"):
        hl.Measurements.load(tmp_path / "nowhere")


def test_a_file_that_says_nothing_of_its_tensors_is_an_error(tmp_path):
    hl.Mean().update(torch.ones(2, 3)).save(tmp_path)
    path = tmp_path / "statistic.json"
    path.write_text(path.read_text().replace("tensors", "tensorz"))
    with pytest.raises(hl.StatisticsError, match="does not say whether it has tensors"):
        hl.Mean.load(tmp_path)


def test_what_is_no_statistic_is_refused_and_nothing_is_left(model):
    x = torch.randn(2, 3)
    for given_, found in (
        ([], "No statistics"),
        ([hl.TopK(), hl.TopK(k=3)], "of one name"),
        (["mean"], "none"),
        ([hl.Mean], "none"),
    ):
        with pytest.raises(hl.StatisticsError, match=found):
            hl.measure(model, "0", statistics=given_, data=[x])
    with pytest.raises(hl.PlaceNotFound):
        hl.measure(model, "9", statistics=[hl.Mean()], data=[x])
    with pytest.raises(hl.StatisticsError, match="no data"):
        hl.measure(model, "0", statistics=[hl.Mean()], ids=len)
    lstm = nn.LSTM(3, 2)
    with pytest.raises(hl.SeveralTensors):
        hl.measure(lstm, "", statistics=[hl.Mean()], data=[x])
    assert_clean(model, lstm)


def test_measuring_can_be_attached_and_removed(model):
    handle = hl.measure(model, "0", statistics=[hl.Mean()]).attach()
    model(torch.randn(2, 3))
    handle.remove()
    model(torch.randn(2, 3))
    assert handle.found.calls == {"0": 1}
    assert_clean(model)
    with pytest.warns(hl.HooklineWarning, match="never entered"):
        hl.measure(model, "0", statistics=[hl.Mean()])


def dying(function, after):
    """The function, until it was called so often."""
    calls = count()

    def call(*args, **more):
        if next(calls) == after:
            raise Killed
        return function(*args, **more)

    return call


def test_saving_that_fails_or_is_killed_leaves_one_whole_version(model, tmp_path, monkeypatch):
    x = torch.randn(6, 3)
    old, new = (hl.measure(model, "0", statistics=[hl.Mean()], data=[d]) for d in (x[:4], x[4:]))
    seen = set()
    for name, moment in product(("mkdir", "replace", "write_text", "unlink"), range(4)):
        folder = tmp_path / f"{name}{moment}"
        old.save(folder)
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(Path, name, dying(getattr(Path, name), moment))
            new.save(folder)
        back = hl.Measurements.load(folder)["0"]["mean"]
        assert any(torch.equal(back, one["0"]["mean"]) for one in (old, new))
        seen.add(torch.equal(back, new["0"]["mean"]))
        new.save(folder)
        assert torch.equal(hl.Measurements.load(folder)["0"]["mean"], new["0"]["mean"])
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["measurements.json", "measurements.safetensors"]
    assert seen == {True, False}


@pytest.mark.parametrize("step", ["tensors", "json"])
def test_saving_on_a_full_disk_says_so_and_leaves_no_part_behind(step, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_file(tensors, path):
        path.write_bytes(b"half of it")
        raise SafetensorError(f"Error while serializing: I/O error: {full}")

    def write_text(self, *args, **more):
        self.write_bytes(b"half of it")
        raise full

    x = torch.randn(4, 3)
    hl.Mean().update(x).save(tmp_path)
    with monkeypatch.context() as patch:
        if step == "tensors":
            patch.setattr("safetensors.torch.save_file", save_file)
        else:
            patch.setattr(Path, "write_text", write_text)
        with pytest.raises(hl.HooklineError, match="No space left on device") as caught:
            hl.Mean().update(x + 1).save(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.remedy
    assert sorted(p.name for p in tmp_path.iterdir()) == ["statistic.json", "statistic.safetensors"]
    assert_near_numpy(hl.Mean.load(tmp_path).result, x.double().mean(0))


def test_a_failed_save_spares_tensors_that_only_the_one_before_has(tmp_path, monkeypatch):
    def fail(self, *args, **more):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def move(self, to, move=Path.replace):
        return fail(self) if to.name == "statistic.safetensors" else move(self, to)

    mean = hl.Mean().update(torch.randn(4, 3))
    hl.Mean().update(torch.randn(4, 3)).save(tmp_path)
    with monkeypatch.context() as patch:  # all is written, and only the last name is not had
        patch.setattr(Path, "replace", move)
        mean.save(tmp_path)
    assert_near_numpy(hl.Mean.load(tmp_path).result, mean.result)
    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(hl.HooklineError, match="still there"):
        mean.save(tmp_path)
    assert_near_numpy(hl.Mean.load(tmp_path).result, mean.result)


class Unspellable(hl.Mean):
    def to_dict(self):
        return {"statistic": object()}


def test_what_cannot_be_spelled_leaves_what_was_saved_before(tmp_path):
    x = torch.randn(4, 3)
    hl.Mean().update(x).save(tmp_path)
    with pytest.raises(TypeError):
        Unspellable().update(x + 1).save(tmp_path)
    assert_near_numpy(hl.Mean.load(tmp_path).result, x.double().mean(0))
    with pytest.raises(TypeError):
        Unspellable().update(x).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_names_of_statistics_may_hold_a_slash_and_have_to_be_text(model, tmp_path):
    kinds = {"a": hl.Mean(), "a/b": hl.Variance(), "": hl.Norm()}
    found = hl.measure(model, "0", statistics=kinds, data=[torch.randn(5, 3)])
    found.save(tmp_path)
    back = hl.Measurements.load(tmp_path)
    assert list(back["0"]) == ["a", "a/b", ""]
    assert_near_numpy(back["0"]["a/b"], found["0"]["a/b"])
    with pytest.raises(hl.StatisticsError, match="is no text"):
        hl.measure(model, "0", statistics={("a", 1): hl.Mean()}, data=[])


def test_a_tensor_is_no_series_of_batches(model):
    batch = {"input": torch.randn(8, 3)}
    for data in (batch["input"], batch, UserDict(batch), "text"):  # as tokenizers give them
        with pytest.raises(hl.StatisticsError, match="no series of batches"):
            hl.measure(model, "0", statistics=[hl.Mean()], data=data)


def test_a_merge_that_does_not_fit_takes_in_nothing(model):
    x = torch.randn(8, 3)
    kinds = [hl.Mean(), hl.Histogram()]  # each finds a range of its own
    one, other = (hl.measure(model, "*", statistics=kinds, data=[part]) for part in x.split(4))
    held = one.statistics["0"]["mean"]
    with pytest.raises(hl.StatisticsError, match="The ranges differ"):
        one.merge(other)
    assert held.count.tolist() == one.statistics["0"]["histogram"].count.tolist()
    assert one.calls == dict.fromkeys(one, 1)
    one.merge(hl.Measurements())
    one.merge(one)
    assert held.count.tolist() == [8] * len(held.count), "what was held is what was merged into"


def test_labels_are_spoken_of_only_where_a_batch_may_have_some(model):
    x = torch.randn(4, 3)
    several = torch.nn.LSTM(3, 2)  # more tensors than one: an error of another kind
    for net, batch, spoken in ((model, (x, x), True), (several, x, False), (several, (x,), False)):
        with pytest.raises(TypeError) as caught:
            hl.measure(net, "" if net is several else "0", statistics=[hl.Mean()], data=[batch])
        assert any("labels" in note for note in caught.value.__notes__) == spoken


@pytest.mark.parametrize("given", ["mean", hl.Mean, [hl.Mean, hl.Norm], ["mean", "norm"], 3])
def test_what_is_no_statistic_is_named(given):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(hl.StatisticsError, match=r"was given as a statistic\..*hookline\.Mean\(\)"):
        hl.measure(model, "0", statistics=given, data=[torch.ones(1, 2)])


def test_data_without_batches_is_an_error():
    model, used = nn.Sequential(nn.Linear(2, 2)), iter([torch.ones(1, 2)])
    hl.measure(model, "0", statistics=[hl.Mean()], data=used)
    for data in (used, []):
        with pytest.raises(hl.StatisticsError, match=r"no batches.*Give a list"):
            hl.measure(model, "0", statistics=[hl.Mean()], data=data)


def test_images_that_are_measured_by_column_are_warned_of(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(1, 3, 1)), torch.randn(2, 1, 4, 5)
    with torch.no_grad():
        images = model(x).double()
    with pytest.warns(hl.HooklineWarning, match=r"'0' has the shape \(2, 3, 4, 5\).*Mean\(dim=1\)"):
        found = hl.measure(model, "0", statistics=[hl.Mean()], data=[x, x])
    assert_near_numpy(found["0"]["mean"], images.mean((0, 1, 2)))
    with pytest.warns(hl.HooklineWarning, match=r"Mean\(dim=1\), or dim=3"):
        hl.harvest(model, [x], "0", to=tmp_path / "a", statistics=[hl.Mean()], quiet=True)
    # What the warning names is taken without one.
    for dim, expected in ((1, images.mean((0, 2, 3))), (3, images.mean((0, 1, 2)))):
        found = hl.measure(model, "0", statistics=[hl.Mean(dim=dim)], data=[x])
        assert_near_numpy(found["0"]["mean"], expected)


class Distinct(nn.Module):
    """Gives another result if its arguments are not one object."""

    def forward(self, a, b):
        return a * a + a * 2 if a is b else a * b * 5


def _backward(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return out, x.grad


class PassesItsInputSeveralTimes(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        h = x * 2
        out = self.inner(*[h] * (3 if isinstance(self.inner, nn.MultiheadAttention) else 2))
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(
    ("inner", "port"),
    [
        (Distinct, "grad_inputs[a]"),
        (Distinct, "grad_input"),
        (lambda: nn.MultiheadAttention(4, 2), "grad_inputs[query]"),
        (lambda: nn.MultiheadAttention(4, 2), "grad_input"),
    ],
)
def test_measuring_gradients_leaves_the_model_to_compute_what_it_computes(inner, port):
    model, x = PassesItsInputSeveralTimes(inner()), torch.randn(3, 5, 4)
    bare = _backward(model, x)
    with pytest.warns(hl.HooklineWarning, match="one tensor was passed as .*edit") as warned:
        with hl.measure(model, f"inner:{port}", statistics=[hl.Mean()]) as found:
            measured = [_backward(model, x) for _ in range(2)]
    for one in measured:
        assert all(torch.equal(*pair) for pair in zip(bare, one, strict=True))
    assert not found
    assert sum("one tensor was passed" in str(one.message) for one in warned) == 1
    assert_clean(model)


def test_the_gradient_of_an_input_that_is_used_several_times_is_measured_as_the_sum():
    class Uses(nn.Module):
        def forward(self, x):
            return x * 3 + x.sin() + x.square()

    model, x = nn.Sequential(nn.Linear(4, 4), Uses(), Uses()), torch.randn(5, 4)
    places = ["1:grad_input", "2:grad_inputs[x]"]
    with hl.capture(model, places) as record:
        for _ in range(2):
            model(x).square().sum().backward()
    with hl.measure(model, places, statistics=[hl.Mean(dim=None)]) as found:
        for number in range(2):
            model(x).square().sum().backward()
            assert found.calls["1:grad_input"] == number + 1
    for place in places:
        wanted = hl.Mean(dim=None)
        for gradient in record.calls(place):
            wanted.update(gradient)
        assert found.calls[place] == 2
        assert torch.equal(found[place]["mean"], wanted.result)
    assert_clean(model)


def test_a_gradient_that_cannot_be_told_apart_is_not_measured_and_told_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    measuring = hl.measure(model, "1:grad_output", statistics=[hl.Mean()])
    with pytest.warns(hl.HooklineWarning, match=r"'1:grad_output'.*returned a tensor") as warned:
        with measuring:
            model(x).sum().backward(), model(x).sum().backward()
    assert not measuring.found
    assert sum("returned a tensor" in str(one.message) for one in warned) == 1
