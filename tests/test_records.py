"""capture() and Record: what is kept, how it is read, and what it costs."""

import contextlib
import copy
import gc
import pickle
import re
import tempfile
import weakref
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import ChangesItsPair, Giving, OneOfTwo, SometimesTuple, Swallowing, small
from oracles import assert_clean, by_hand, work_of
from torch import nn

import hookline as hl

# -- reading ------------------------------------------------------------------------------------


def test_a_record_holds_what_hand_written_hooks_see():
    model, x = small(seed=0), torch.randn(5, 3)
    seen = by_hand(model, lambda model: model(x), ["0", "1", "2"]).outputs
    with hl.capture(model, "*") as record:
        model(x)
    for path, (value,) in seen.items():
        assert torch.equal(record[path], value)
    assert record.places() == ["0", "1", "2"]
    assert_clean(model)


def test_a_value_can_be_read_by_place_module_pair_and_call():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(model, "0", "2:input") as record:
        model(x)
    value = record["0"]
    assert record[model[0]] is value
    assert record["0", 0] is value
    assert record["0", -1] is value
    assert record[model[0], 0] is value
    assert record["0:output"] is value
    assert record[model[2], ":input"] is record["2:input"]
    assert record[(model[2], ":input"), 0] is record["2:input"]


def test_several_calls_raise_and_the_error_names_the_ways_to_read_them():
    model = small(seed=0)
    with hl.capture(model, "0") as record:
        for n in range(3):
            model(torch.full((1, 3), float(n)))
    with pytest.raises(hl.SeveralCalls, match=r"3 of them.*record\['0', n\].*calls\('0'\).*last"):
        record["0"]
    assert len(record.calls("0")) == 3
    for n in range(3):
        assert torch.equal(record["0", n], model[0](torch.full((1, 3), float(n))))
        assert record["0", n] is record.calls("0")[n]
    assert record["0", -1] is record["0", 2]


def test_a_call_that_was_not_made_is_an_error_with_the_number_of_calls():
    model = small(seed=0)
    with hl.capture(model, "0") as record:
        model(torch.ones(1, 3))
    for call in (1, -2):
        with pytest.raises(hl.NotCaptured, match=rf"Call {call} at '0'.*Calls that were kept: 1"):
            record["0", call]


def test_a_call_can_be_a_numpy_integer():
    model = small(seed=0)
    with hl.capture(model, "0") as record:
        model(torch.zeros(1, 3))
        model(torch.ones(1, 3))
    assert record["0", np.int64(1)] is record["0", 1]


def test_calls_is_a_list_for_a_single_call_too():
    model = small(seed=0)
    with hl.capture(model, "0") as record:
        model(torch.ones(1, 3))
    (value,) = record.calls("0")
    assert value is record["0"]


def test_what_was_not_captured_is_an_error_with_the_closest_places():
    model = small(seed=0)
    with hl.capture(model, "0", "1:input") as record:
        model(torch.ones(1, 3))
    with pytest.raises(hl.NotCaptured, match=r"'2' was asked.*not captured.*places\(\)"):
        record["2"]
    with pytest.raises(hl.NotCaptured, match=r"'1' was asked.*Closest: .*'1:input'"):
        record["1"]
    with pytest.raises(LookupError):
        record["nothing.there"]


def test_a_glob_that_matches_several_captured_places_is_no_key():
    model = small(seed=0)
    with hl.capture(model, "*") as record:
        model(torch.ones(1, 3))
    with pytest.raises(hl.NotCaptured, match="matches 3 places"):
        record["*"]


def test_iteration_length_and_membership_go_by_place():
    model = small(seed=0)
    with hl.capture(model, "0", "2") as record:
        model(torch.ones(1, 3))
    assert list(record) == ["0", "2"]
    assert len(record) == 2
    assert "0" in record
    assert model[0] in record
    assert "0:output" in record
    assert "1" not in record
    assert "nothing" not in record
    assert nn.Identity() not in record


def test_items_gives_every_place_once_for_each_call():
    model = small(seed=0)
    with hl.capture(model, "1", "0") as record:
        model(torch.zeros(1, 3))
        model(torch.ones(1, 3))
    items = list(record.items())
    assert [place for place, _ in items] == ["0", "0", "1", "1"]
    assert items[1][1] is record["0", 1]
    assert all(one is other for one, (_, other) in zip(record.values(), items, strict=True))


def test_places_are_strings_with_pieces():
    model = nn.Sequential(nn.LSTM(2, 2))
    with hl.capture(model, "0[1][0]", "0:input") as record:
        model(torch.ones(1, 1, 2))
    whole = {place.port: place for place in record.places()}
    assert whole["output"].path == "0"
    assert whole["output"].parts == (1, 0)
    assert whole["input"] == "0:input"


def test_tensor_gives_the_only_tensor_or_lists_the_parts():
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.capture(model, "0", "0:inputs") as record:
        model(torch.ones(4, 1, 2))
    assert record.tensor("0:inputs").shape == (4, 1, 2)
    with pytest.raises(
        hl.SeveralTensors, match=r"holds 3: \[0\] \(4, 1, 3\), \[1\]\[0\].*\[1\]\[1\]"
    ):
        record.tensor("0")
    with pytest.raises(TypeError):
        record.tensor("0")


def test_tensor_of_a_value_without_tensors_says_so():
    model = Giving(lambda x: {"n": 3})
    with hl.capture(model, "") as record:
        model(torch.ones(1))
    with pytest.raises(hl.SeveralTensors, match="a dict and holds none"):
        record.tensor("")


def test_cat_and_stack_join_the_calls():
    model = nn.Sequential(nn.Identity())
    batches = [torch.randn(2, 3), torch.randn(4, 3)]
    with hl.capture(model, "0") as record:
        for batch in batches:
            model(batch)
    assert torch.equal(record.cat("0"), torch.cat(batches))
    with hl.capture(model, "0") as record:
        model(batches[0])
        model(batches[0] + 1)
    assert torch.equal(record.cat("0", 1), torch.cat([batches[0], batches[0] + 1], 1))
    assert torch.equal(record.stack("0"), torch.stack([batches[0], batches[0] + 1]))
    assert record.stack("0", dim=-1).shape == (2, 3, 2)
    assert torch.equal(record.stack(model[0]), record.stack("0"))


def test_cat_of_a_nested_value_takes_its_only_tensor_or_says_which_there_are():
    model = Giving(lambda x: {"h": x, "n": 1})
    with hl.capture(model, "") as record:
        model(torch.zeros(1, 2))
        model(torch.ones(1, 2))
    assert torch.equal(record.cat(""), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    model = Giving(lambda x: (x, x + 1))
    with hl.capture(model, "") as record:
        model(torch.zeros(1, 2))
    with pytest.raises(hl.SeveralTensors, match=r"\[0\].*\[1\]"):
        record.cat("")


def test_a_part_of_a_captured_whole_can_be_read():
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.capture(model, "0", "0:inputs") as record:
        model(torch.ones(4, 1, 2))
    out, (h, c) = record["0"]
    assert record["0[0]"] is out
    assert record["0[1][0]"] is h
    assert record["0[1][-1]"] is c
    assert record["0[1][0]", 0] is h
    assert record["0:inputs[input]"].shape == (4, 1, 2)
    assert record[model[0], "[1][0]"] is h
    assert record.calls("0[1][1]")[0] is c


def test_a_part_of_a_captured_part_can_be_read():
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.capture(model, "0[1]") as record:
        model(torch.ones(4, 1, 2))
    assert record["0[1][0]"] is record["0[1]"][0]
    with pytest.raises(hl.NotCaptured):
        record["0[0]"]


def test_a_part_that_is_not_there_says_what_is():
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.capture(model, "0") as record:
        model(torch.ones(4, 1, 2))
    with pytest.raises(hl.NotCaptured, match=r"a tuple, which has \[0\], \[1\], not \[5\]"):
        record["0[5]"]
    with pytest.raises(hl.NotCaptured, match="a part never indexes a tensor"):
        record["0[0][0]"]


def test_every_alias_reads_the_one_place():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model = Tied()
    with hl.capture(model, "second") as record:
        model(torch.ones(1, 2))
    assert record.places() == ["first"]
    assert len(record.calls("first")) == 2
    assert record["second", 1] is record["first", 1] is record[model.second, 1]
    assert "second" in record
    assert "first" in record


# -- after the model is gone --------------------------------------------------------------------


def test_a_record_does_not_keep_the_model_alive():
    model = small(seed=0)
    with torch.no_grad(), hl.capture(model, "*", "0:input", "0.weight") as record:
        model(torch.ones(1, 3))
    gone = weakref.ref(model), weakref.ref(model[0])
    del model
    assert gone[0]() is None
    assert gone[1]() is None
    assert record["0"].shape == (1, 4)


def test_a_record_reads_the_same_after_the_model_is_deleted():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Linear(2, 2)
            self.a = nn.LSTM(2, 2)

        def forward(self, x):
            return self.a(self.b(x))

    model = Two()
    with hl.capture(model, "a", "b", "a:inputs") as record:
        model(torch.ones(1, 1, 2))
    places, table, part = record.places(), repr(record), record["a[1][0]"]
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert record.places() == places == ["b", "a", "a:inputs"]
    assert repr(record) == table
    assert record["a[1][0]"] is part
    assert record["a:inputs[input]"] is not None
    assert record["a", 0] is not None
    with pytest.raises(hl.NotCaptured):
        record["c"]


def test_aliases_still_read_after_the_model_is_deleted():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model[0])
    with hl.capture(model, "again") as record:
        model(torch.ones(1, 2))
    assert record.places() == ["0"]
    del model
    assert record.places() == ["0"]
    assert len(record.calls("again")) == 2


def test_a_module_at_the_address_of_a_dead_one_does_not_inherit_its_values():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    new = nn.ReLU()
    with hl.replace_module(model, "1", new), hl.capture(model, "1") as record:
        model(torch.ones(1, 2))
    address = id(new)
    del new
    others = []
    for _ in range(5000):
        others.append(nn.Tanh())
        if id(others[-1]) == address:
            break
    model.add_module("other", others[-1])
    assert "other" not in record
    assert record.places() == ["1"]


# -- tables -------------------------------------------------------------------------------------


def test_the_repr_is_a_table_of_places_calls_shapes_dtypes_and_sizes():
    model = small(seed=0)
    with hl.capture(model, "0", "2:grad_output") as record:
        model(torch.ones(5, 3))
        model(torch.ones(5, 3)).sum().backward()
    title, head, *rows = repr(record).splitlines()
    assert re.fullmatch(r"Record of 2 places, 3 values, \d+ B", title)
    assert head.split() == ["place", "calls", "shape", "dtype"]
    assert rows[0].split() == ["0", "2", "(5,", "4)", "float32", "attached"]
    assert "2:grad_output" in rows[1]
    assert "(5, 2)" in rows[1]


def test_the_repr_shows_parts_varying_shapes_and_what_never_fired():
    model = OneOfTwo(2)
    model.used = nn.LSTM(2, 3)
    with hl.capture(model, "*") as record:
        model(torch.ones(4, 1, 2))
        model(torch.ones(6, 1, 2))
    table = repr(record)
    assert re.search(r"used\[0\] +2 +\(4, 1, 3\) varies", table)
    assert re.search(r"used\[1\]\[0\] +2 +\(1, 1, 3\) +float32", table)
    assert re.search(r"unused +0 .*never fired", table)


def test_an_empty_record_has_a_repr_before_during_and_after():
    model = small(seed=0)
    context = hl.capture(model, "*", "0.weight:grad", ":grad_output")
    record = context.__enter__()
    assert "never fired" in repr(record)
    assert "never fired" in record._repr_html_()
    with pytest.raises(hl.NeverFired):
        context.__exit__(None, None, None)
    assert repr(record).startswith("Record of 0 places, 0 values, 0 B")
    assert record.nbytes == 0
    assert len(record) == 0


def test_the_repr_of_many_places_is_cut():
    model = nn.Sequential(*[nn.Identity() for _ in range(100)])
    with hl.capture(model, "*") as record:
        model(torch.ones(1))
    assert "and 40 more" in repr(record)
    assert "and 40 more" in record._repr_html_()


def test_the_repr_does_not_raise_after_a_value_was_changed():
    model = ChangesItsPair()
    with hl.capture(model, "pair") as record:
        model(torch.ones(1, 3))
    assert "pair[1]" in repr(record)
    assert "pair[1]" in record._repr_html_()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_repr_does_not_raise_for_any_kind_of_tensor():
    values = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(1).expand(1000),
        nn.Parameter(torch.ones(2)),
    ]
    model = nn.Identity()
    for value in values:
        with hl.capture(model, "") as record:
            model(value)
        assert repr(record).startswith("Record of 1 place, 1 value")
        assert record._repr_html_()
        assert record.nbytes >= 0


def test_the_repr_does_not_raise_for_tensors_that_died_with_vmap():
    model = nn.Linear(3, 3)
    with torch.no_grad(), hl.capture(model, "") as record:
        torch.vmap(model)(torch.ones(4, 3))
    assert "Record of 1 place" in repr(record)
    assert record._repr_html_()


class NoAttributes:
    def __getattribute__(self, name):
        raise RuntimeError("no attributes here")


class NoDict:
    @property
    def __dict__(self):
        raise RuntimeError("no dict here")


class NoIteration(dict):
    def __iter__(self):
        raise RuntimeError("no iteration here")


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr here")


@pytest.mark.parametrize("kind", [NoAttributes, NoDict, NoIteration, NoRepr])
def test_hostile_values_disturb_neither_the_model_nor_the_repr(kind):
    value = kind()
    model = Giving(lambda x: value)
    with hl.capture(model, "") as record:
        assert model(torch.ones(1)) is value
    assert "Record of 1 place" in repr(record)
    assert record._repr_html_()
    assert_clean(model)


def test_opaque_objects_are_kept_by_reference_and_the_table_says_so():
    class Cache:
        def __init__(self):
            self.keys = torch.ones(3)

    model = Giving(lambda x: Cache())
    with hl.capture(model, "") as record:
        cache = model(torch.ones(1))
    assert record[""] is cache
    assert "Cache" in repr(record)
    assert "kept by reference" in repr(record)


def test_names_are_escaped_in_html():
    model = nn.ModuleDict({"<script>alert(1)</script>": nn.Identity(), "a&b": nn.Identity()})
    model.forward = lambda x: [child(x) for child in model.values()]
    with hl.capture(model, "*") as record:
        model(torch.ones(1))
    html = record._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a&amp;b" in html
    del model.forward


# -- sizes and moving ---------------------------------------------------------------------------


def test_nbytes_counts_each_tensor_once():
    model = Giving(lambda x: (x, x, x[:2]))
    with torch.no_grad(), hl.capture(model, "") as record:
        model(torch.ones(10))
    assert record.nbytes == 10 * 4 + 2 * 4


def test_to_moves_every_tensor_and_leaves_the_first_record_alone():
    model = nn.Sequential(nn.LSTM(2, 3))
    with hl.capture(model, "0", "0:grad_output", "0.weight_ih_l0:grad") as record:
        model(torch.ones(4, 1, 2))[0].sum().backward()
    moved = record.to("meta")
    assert moved["0[1][0]"].is_meta
    assert moved["0:grad_output[0]"].is_meta
    assert moved["0.weight_ih_l0:grad"].is_meta
    assert not record["0[1][0]"].is_meta
    assert moved.places() == record.places()
    assert "Record of 3 places" in repr(moved)
    assert record.to("cpu").nbytes == record.nbytes


@pytest.mark.parametrize("place", ["0", "0:output", "0.weight", "0:inputs"])
def test_what_was_on_the_device_already_and_is_changed_later_is_told_of_a_moved_record(place):
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2, requires_grad=True)
    with hl.capture(model, place) as record:
        model(x * 1)
    moved, copied = record.to("cpu"), record.to("meta")
    with torch.no_grad():
        (record[place]["input"] if place == "0:inputs" else record[place]).add_(1)
    for one in (record, moved):
        with pytest.raises(hl.ValueChanged, match="changed in place"):
            one[place]
    assert copied.places() == record.places()
    assert copied.calls(place)


@pytest.mark.parametrize(("keep", "kept"), [("all", [0, 1, 2]), ("first", [0]), ("last", [2])])
def test_of_calls_that_all_raised_the_first_or_the_last_input_is_kept(keep, kept):
    def fail(x):
        raise ZeroDivisionError

    model = nn.Sequential(Giving(fail))
    with hl.capture(model, "0:input", keep=keep) as record:
        for n in range(3):
            with pytest.raises(ZeroDivisionError):
                model(torch.full((2,), float(n)))
    assert [int(value[0]) for value in record.calls("0:input")] == kept


def test_to_moves_the_values_of_the_last_call_and_leaves_the_first_record_alone():
    model = small()
    with hl.capture(model, "**", keep="last") as record:
        model(torch.zeros(4, 3))
        model(torch.ones(4, 3))
    moved = record.to("meta")
    assert [len(moved.calls(place)) for place in moved] == [1, 1, 1]
    assert {moved[place].device.type for place in moved} == {"meta"}
    assert {record[place].device.type for place in record} == {"cpu"}


@pytest.mark.parametrize("order", [["0", "**", "2:input"], ["**", "2:input", "0"]], ids=str)
def test_a_place_that_is_asked_for_twice_is_kept_once_beside_other_ports(order):
    model = small()
    with hl.capture(model, *order) as record:
        model(torch.zeros(4, 3))
    assert record.places() == ["0", "1", "2", "2:input"]
    assert [len(record.calls(place)) for place in record] == [1, 1, 1, 1]


def test_places_that_were_listed_under_a_first_name_are_read_by_it_after_the_model_is_deleted():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with hl.capture(model, "2", "2:grad_output") as record:
        model(torch.zeros(1, 2)).sum().backward()
    assert record.places() == ["0", "0:grad_output"]
    del model, shared
    gc.collect()
    assert [place for place, _ in record.items()] == ["0", "0", "0:grad_output", "0:grad_output"]
    assert len(record.calls("2")) == len(record.calls("0")) == 2


@pytest.mark.parametrize("where", [["**", "2:input"], ["**", "0.weight"], ["0", "2:input", "**"]])
def test_places_of_a_model_that_is_gone_stand_in_the_order_in_which_they_were_asked_for(where):
    model = small()
    with hl.capture(model, *where) as record:
        model(torch.zeros(4, 3))
    del model
    gc.collect()
    asked = [place for w in where for place in (["0", "1", "2"] if w == "**" else [w])]
    assert record.places() == list(dict.fromkeys(asked))


def test_to_keeps_the_reasons_for_what_is_missing():
    model = OneOfTwo(2)
    with hl.capture(model, "*") as record:
        model(torch.ones(1, 2))
    moved = record.to("cpu")
    assert moved.unfired() == record.unfired()
    with pytest.raises(hl.NeverFired, match="was not called"):
        moved["unused"]


# -- what did not fire --------------------------------------------------------------------------


def test_a_literal_place_that_never_fires_raises_at_exit_with_the_record():
    model = OneOfTwo(2)
    with pytest.raises(hl.NeverFired, match=r"'unused'.*was not called") as caught:
        with hl.capture(model, "used", "unused"):
            model(torch.ones(1, 2))
    assert caught.value.record["used"].shape == (1, 2)
    assert list(caught.value.record.unfired()) == ["unused"]
    assert_clean(model)


def test_of_a_glob_one_must_fire_and_the_others_are_explained():
    model = OneOfTwo(2)
    with hl.capture(model, "*") as record:
        model(torch.ones(1, 2))
    assert list(record.unfired()) == ["unused"]
    assert "was not called" in record.unfired()["unused"]
    assert record.places() == ["used"]
    with pytest.raises(hl.NeverFired, match=r"'unused' was asked for.*was not called.*unfired\(\)"):
        record["unused"]
    with pytest.raises(hl.NeverFired):
        record.calls("unused")
    assert "unused" not in record


def test_of_a_glob_none_fired_raises():
    model = OneOfTwo(2)
    with pytest.raises(hl.NeverFired, match="nor any other of the 2 places that match"):
        with hl.capture(model, nn.Linear):
            pass


def test_the_users_exception_is_not_replaced_by_never_fired():
    model = OneOfTwo(2)
    with pytest.raises(ZeroDivisionError):
        with hl.capture(model, "unused"):
            _ = 1 / 0
    assert_clean(model)


def test_nothing_asked_for_is_an_error():
    with pytest.raises(TypeError, match="no place"):
        hl.capture(small(seed=0))
    with pytest.raises((TypeError, hl.PlaceError), match="no place"):
        with hl.capture(small(seed=0), []):
            pass


# -- attached values and snapshots --------------------------------------------------------------


def test_an_attached_value_is_the_very_tensor_and_a_target_for_autograd_grad():
    model, x = small(seed=0), torch.randn(5, 3)
    outputs = []
    model[0].register_forward_hook(lambda m, a, o: outputs.append(o))
    with hl.capture(model, "0") as record:
        loss = model(x).pow(2).sum()
    assert record["0"] is outputs[0]
    (got,) = torch.autograd.grad(loss, record["0"], retain_graph=True)
    (expected,) = torch.autograd.grad(loss, outputs[0])
    assert torch.equal(got, expected)


def test_a_loss_on_captured_activations_trains_the_model():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(model, "0") as record:
        model(x)
    record["0"].pow(2).mean().backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model[0](x).pow(2).mean().backward()
    assert torch.equal(got, model[0].weight.grad)


def test_a_detached_value_is_a_snapshot_that_later_writes_do_not_reach():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(5, 3)
    expected = model[0](x).detach()
    with hl.capture(model, "0", detach=True) as record:
        model(x)
    assert not record["0"].requires_grad
    assert torch.equal(record["0"], expected)
    with torch.no_grad(), hl.capture(model, "0") as record:
        model(x)
    assert torch.equal(record["0"], expected)


def test_an_attached_value_that_was_changed_in_place_raises_and_names_the_remedy():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    with hl.capture(model, "0") as record:
        model(torch.randn(5, 3))
    for read in (
        lambda: record["0"],
        lambda: record["0", 0],
        lambda: record.calls("0"),
        lambda: record.tensor("0"),
        lambda: record.cat("0"),
        lambda: list(record.items()),
        lambda: record.to("cpu"),
    ):
        with pytest.raises(hl.ValueChanged, match=r"'0'.*changed in place.*detach=True"):
            read()


def test_only_the_changed_part_of_a_value_is_refused():
    model = ChangesItsPair()
    with hl.capture(model, "pair") as record:
        model(torch.ones(1, 3))
    assert record["pair[0]"].shape == (1, 3)
    with pytest.raises(hl.ValueChanged, match=re.escape("'pair[1]'")):
        record["pair[1]"]
    with pytest.raises(hl.ValueChanged):
        record["pair"]


@pytest.mark.parametrize("spelling", ["[1]", "[-1]", "[second]"])
def test_a_changed_part_is_refused_however_it_is_spelled(spelling):
    Two = namedtuple("Two", ["first", "second"])

    class Named(ChangesItsPair):
        def __init__(self):
            super().__init__()
            self.pair = Giving(lambda x: Two(x * 1, x * 3))

    model = Named()
    with hl.capture(model, "pair") as record:
        model(torch.ones(1, 3))
    with pytest.raises(hl.ValueChanged):
        record["pair" + spelling]


def test_a_changed_part_of_a_dict_is_refused_by_position_too():
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.keyed = Giving(lambda x: {"a": x * 1})

        def forward(self, x):
            return self.keyed(self.linear(x))["a"].mul_(2)

    model = Keyed()
    with hl.capture(model, "keyed") as record:
        model(torch.ones(1, 3))
    for spelling in ("keyed[a]", "keyed[0]", "keyed"):
        with pytest.raises(hl.ValueChanged):
            record[spelling]


def test_containers_that_grow_later_do_not_change_what_was_captured():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Giving(lambda x: [x])

        def forward(self, x):
            values = self.inner(x)
            values.append(x)
            return values

    model = Grows()
    with hl.capture(model, "inner") as record:
        assert len(model(torch.ones(1))) == 2
    assert len(record["inner"]) == 1


def test_captured_parameters_and_buffers_stay_where_they_are_in_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    with hl.capture(model, "1.running_mean", "0.weight", detach=True) as record:
        model(torch.randn(8, 2))
    mean = record["1.running_mean"]
    assert torch.equal(mean, torch.zeros(2))
    assert not torch.equal(model[1].running_mean, mean)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before


def test_a_snapshot_survives_writes_from_outside_torch():
    memory = np.zeros(3, dtype=np.float32)
    model = nn.Identity()
    with hl.capture(model, "") as record:
        model(torch.from_numpy(memory))
    memory[:] = 7
    assert torch.equal(record[""], torch.zeros(3))


# -- options ------------------------------------------------------------------------------------


def test_at_takes_an_index_or_a_function():
    model, x = small(seed=0), torch.randn(5, 3)
    expected = model[0](x)
    with hl.capture(model, "0", at=np.s_[:, -1]) as record:
        model(x)
    assert torch.equal(record["0"], expected[:, -1])
    with hl.capture(model, "0", at=lambda value: value.mean(0)) as record:
        model(x)
    assert torch.equal(record["0"], expected.mean(0))
    with hl.capture(model, "0", at=0) as record:
        model(x)
    assert torch.equal(record["0"], expected[0])


@pytest.mark.parametrize("columns", [1, 60, 99])
@pytest.mark.parametrize("grad", [True, False])
def test_only_the_memory_of_the_slice_is_kept(columns, grad):
    model = nn.Linear(3, 100)
    with torch.set_grad_enabled(grad), hl.capture(model, "", at=np.s_[:, :columns]) as record:
        model(torch.ones(8, 3))
    kept = record[""]
    assert kept.requires_grad == grad
    assert kept.untyped_storage().nbytes() == kept.nbytes == 8 * columns * 4


def test_an_attached_slice_can_be_used_in_a_loss_whatever_happens_to_the_rest():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(5, 3)
    with hl.capture(model, "0", at=np.s_[:, :1]) as record:
        model(x)
    record["0"].sum().backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model[0](x)[:, :1].sum().backward()
    assert torch.equal(got, model[0].weight.grad)


def test_at_meets_nested_values_with_one_tensor_only():
    model = Giving(lambda x: {"h": x, "n": 1})
    with hl.capture(model, "", at=0) as record:
        model(torch.arange(3.0))
    assert record[""] == 0
    model = nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(hl.NeverFired, match=r"'0'.*\[1\]\[0\]"), hl.capture(model, "0", at=0):
        model(torch.ones(1, 1, 2))
    assert_clean(model)


def test_heads_takes_the_columns_of_attention_heads():
    model = nn.Identity()
    x = torch.arange(2 * 5 * 12.0).view(2, 5, 12)
    split = x.view(2, 5, 4, 3)
    for which in [(2,), (0, 3), (3, 1), (-1,)]:
        with hl.capture(model, "", at=hl.heads(*which, of=4)) as record:
            model(x)
        assert torch.equal(record[""], split[:, :, list(which)].flatten(2))


def test_heads_that_do_not_fit_are_an_error():
    model = nn.Identity()
    with pytest.raises(hl.NeverFired, match=r"\(2, 5, 12\).*of="):
        with hl.capture(model, "", at=hl.heads(0, of=5)):
            model(torch.ones(2, 5, 12))
    for make in (lambda: hl.heads(of=4), lambda: hl.heads(0, of=0), lambda: hl.heads(4, of=4)):
        with pytest.raises(hl.ChangeError, match="heads"):
            make()


def test_last_token_takes_the_last_position_that_is_not_padding():
    model = nn.Identity()
    x = torch.arange(24.0).view(3, 4, 2)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
    expected = torch.stack([x[0, 1], x[1, 3], x[2, 0]])
    for given in (mask, mask.bool(), mask.float()):
        with hl.capture(model, "", at=hl.last_token(given)) as record:
            model(x)
        assert torch.equal(record[""], expected)


def test_last_token_needs_a_mask_that_fits_and_is_not_empty():
    model = nn.Identity()
    with pytest.raises(hl.NeverFired, match=r"\(2, 4\).*\(3, 4, 2\)"):
        with hl.capture(model, "", at=hl.last_token(torch.ones(2, 4))):
            model(torch.ones(3, 4, 2))
    with pytest.raises(hl.NeverFired, match="empty for some sequence"):
        with hl.capture(model, "", at=hl.last_token(torch.tensor([[1, 1], [0, 0]]))):
            model(torch.ones(2, 2, 2))


def test_transform_keeps_what_it_returns():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(model, "0", transform=lambda v: {"norm": v.norm(), "n": len(v)}) as record:
        model(x)
    assert torch.equal(record["0"]["norm"], model[0](x).norm())
    assert record["0[n]"] == 5
    with hl.capture(model, "0", transform=lambda v: None) as record:
        model(x)
    assert record["0"] is None


def test_a_transform_that_gives_an_alias_keeps_the_value_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(50, 3)
    with torch.no_grad():
        expected = model[0](x)
        for transform in (lambda v: v, lambda v: v.t(), lambda v: v.view(-1), lambda v: v.numpy()):
            with hl.capture(model, "0", transform=transform) as record:
                model(x)
            assert np.array_equal(np.asarray(record["0"]), np.asarray(transform(expected)))


@pytest.mark.parametrize("option", ["at", "transform"])
@pytest.mark.parametrize("detach", [False, True])
def test_a_function_that_writes_into_a_snapshot_does_not_reach_the_model(option, detach):
    model, x = small(), torch.randn(5, 3)
    expected = model(x)
    with torch.set_grad_enabled(detach):
        with hl.capture(model, "0", detach=detach, **{option: lambda v: v.zero_()}) as record:
            result = model(x)
    assert torch.equal(result, expected)
    assert not record["0"].any()


def test_an_error_in_a_transform_carries_the_place_and_leaves_no_hook():
    model = small(seed=0)
    with pytest.raises(ZeroDivisionError) as caught:
        with hl.capture(model, "1", transform=lambda value: 1 / 0):
            model(torch.ones(1, 3))
    assert any("'1'" in note for note in caught.value.__notes__)
    assert_clean(model)


def test_dtype_converts_floating_point_values_only():
    model = Giving(lambda x: (x, x.long(), x > 0, x.to(torch.complex64) * 1j))
    with hl.capture(model, "", dtype=torch.float16) as record:
        model(torch.randn(4))
    kinds = [value.dtype for value in record[""]]
    assert kinds == [torch.float16, torch.int64, torch.bool, torch.complex64]
    assert record[""][3].imag.abs().sum() > 0


def test_device_moves_what_is_kept():
    model = small(seed=0)
    with hl.capture(model, "*", device="meta") as record:
        model(torch.ones(5, 3))
    assert record["0"].is_meta
    assert record["0"].shape == (5, 4)


def test_derived_values_stay_attached_and_can_be_used_in_a_loss():
    model, x = small(seed=0), torch.randn(5, 3)
    for options in (
        {"dtype": torch.float64},
        {"transform": torch.tanh},
        {"at": np.s_[1:3]},
        {"at": np.s_[1:3], "dtype": torch.float64, "transform": torch.tanh, "keep": "last"},
    ):
        model.zero_grad()
        with hl.capture(model, "0", **options) as record:
            model(x)
        record["0"].sum().backward()
        assert model[0].weight.grad is not None
        with hl.capture(model, "0", detach=True, **options) as record:
            model(x)
        assert not record["0"].requires_grad


def test_at_transform_dtype_and_detach_are_applied_in_that_order():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(
        model, "0", at=np.s_[:2], transform=lambda v: v.sum(0), dtype=torch.float64, detach=True
    ) as record:
        model(x)
    assert torch.equal(record["0"], model[0](x)[:2].sum(0).double().detach())


def test_a_derived_value_is_a_snapshot_under_no_grad():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(50, 3)
    with torch.no_grad():
        expected = model[0](x)
        for options in ({"at": np.s_[:, :3]}, {"dtype": torch.float32}, {"device": "cpu"}):
            with hl.capture(model, "0", **options) as record:
                model(x)
            assert torch.equal(record["0"], expected[:, :3] if "at" in options else expected)


def test_keep_first_and_last_give_that_call():
    model = nn.Sequential(nn.Identity())
    for keep, number in (("first", 0.0), ("last", 2.0)):
        with hl.capture(model, "0", "0:input", keep=keep) as record:
            for n in range(3):
                model(torch.tensor([float(n)]))
        assert record["0"].item() == record["0:input"].item() == number
        assert len(record.calls("0")) == 1


def test_keep_holds_for_gradients_and_for_parts():
    model = nn.Sequential(nn.LSTM(2, 2))
    for keep, factor in (("first", 1.0), ("last", 3.0)):
        with hl.capture(model, "0:grad_output[0]", "0[1][0]", keep=keep) as record:
            for n in (1.0, 2.0, 3.0):
                (model(torch.ones(1, 1, 2))[0] * n).sum().backward()
        assert torch.equal(record["0:grad_output[0]"], torch.full((1, 1, 2), factor))
        assert len(record.calls("0[1][0]")) == 1


def test_keep_last_lets_earlier_values_go():
    model = nn.Sequential(nn.Linear(2, 2))
    alive = []
    model[0].register_forward_hook(lambda m, a, o: alive.append(weakref.ref(o)))
    with hl.capture(model, "0", keep="last"):
        for _ in range(4):
            model(torch.ones(1, 2))
        assert [ref() is not None for ref in alive] == [False, False, False, True]


def test_stop_ends_the_forward_and_the_block():
    ran = []
    model = small(seed=0)
    model[2].register_forward_hook(lambda *_: ran.append("late"))
    with hl.capture(model, "0", "1:input", stop=True) as record:
        model(torch.ones(1, 3))
        ran.append("after")
    assert ran == []
    assert torch.equal(record["0"], model[0](torch.ones(1, 3)))
    assert record["1:input"] is record["0"]


def test_stop_with_several_options_keeps_the_derived_value():
    model = small(seed=0)
    with hl.capture(
        model, "1", at=np.s_[:, 0], dtype=torch.float64, detach=True, keep="first", stop=True
    ) as record:
        model(torch.ones(2, 3))
    assert record["1"].dtype == torch.float64
    assert record["1"].shape == (2,)


def test_stop_passes_through_except_exception_and_nothing_is_left():
    model = Swallowing(Exception)
    with hl.capture(model, "first", stop=True) as record:
        model(torch.ones(1, 3))
        raise AssertionError("not reached")
    assert record["first"].shape == (1, 3)
    assert_clean(model)


def test_a_swallowed_stop_is_told_at_exit_with_the_record():
    model = Swallowing(BaseException)
    with pytest.raises(hl.NeverFired, match="caught the stop") as caught:
        with hl.capture(model, "first", stop=True):
            model(torch.ones(1, 3))
    assert caught.value.record["first"].shape == (1, 3)
    assert_clean(model)


def test_an_outer_capture_survives_the_stop_of_an_inner_one():
    model = small(seed=0)
    with hl.capture(model, "*") as outer:
        with hl.capture(model, "1", stop=True) as inner:
            model(torch.ones(1, 3))
    assert outer.places() == ["0", "1"]
    assert torch.equal(outer["1"], inner["1"])
    assert_clean(model)


def test_stop_is_refused_for_gradients_and_attach():
    with pytest.raises(ValueError, match=r"gradient place.*Leave out stop"):
        with hl.capture(small(seed=0), "0:grad_output", stop=True):
            pass
    model = small(seed=0)
    context = hl.capture(model, "0", stop=True)
    with pytest.raises(ValueError, match="attach"):
        context.attach()
    with context:
        model(torch.ones(1, 3))


@pytest.mark.parametrize("option", [{"keep": "some"}, {"threads": "mine"}])
def test_unknown_options_are_refused(option):
    with pytest.raises(ValueError, match="was asked for"):
        hl.capture(small(seed=0), "0", **option)


# -- contexts -----------------------------------------------------------------------------------


def test_an_attached_capture_collects_until_removed():
    model = small(seed=0)
    handle = hl.capture(model, "0").attach()
    model(torch.ones(1, 3))
    assert len(handle.record.calls("0")) == 1
    model(torch.ones(1, 3))
    handle.remove()
    handle.remove()
    model(torch.ones(1, 3))
    assert len(handle.record.calls("0")) == 2
    assert_clean(model)


def test_entering_again_starts_afresh_and_leaves_the_first_record_alone():
    model = small(seed=0)
    context = hl.capture(model, "0")
    with context as first:
        model(torch.zeros(1, 3))
    with context as second:
        model(torch.ones(1, 3))
    assert first is not second
    assert torch.equal(first["0"], model[0](torch.zeros(1, 3)))
    assert torch.equal(second["0"], model[0](torch.ones(1, 3)))


def test_the_record_of_a_capture_that_was_never_entered_is_an_error():
    context = hl.capture(small(seed=0), "0")
    with pytest.raises(hl.NotCaptured, match="never entered"):
        _ = context.record
    with pytest.warns(hl.HooklineWarning, match="never entered"):
        del context


def test_a_record_can_be_read_while_it_is_open():
    model = small(seed=0)
    with hl.capture(model, "*") as record:
        with pytest.raises(hl.NeverFired):
            record["0"]
        model(torch.ones(1, 3))
        assert record["0"].shape == (1, 4)
        assert len(record) == 3


def test_nested_records_keep_their_type_and_every_container():
    @dataclass
    class Out:
        hidden: torch.Tensor
        extra: dict

    model = Giving(lambda x: Out(x + 1, {"list": [x, None], "text": "t"}))
    with hl.capture(model, "") as record:
        model(torch.zeros(2))
    value = record[""]
    assert type(value) is Out
    assert value.extra["text"] == "t"
    assert value.extra["list"][1] is None
    assert record["[hidden]"] is value.hidden
    assert record["[extra][list][0]"] is value.extra["list"][0]


def test_captures_leave_outputs_and_gradients_bit_identical():
    model, x = small(seed=0), torch.randn(5, 3)

    def run():
        model.zero_grad()
        out = model(x)
        out.pow(2).sum().backward()
        return [out.detach().clone(), *[p.grad.clone() for p in model.parameters()]]

    bare = run()
    for options in ({}, {"detach": True}, {"at": 0}, {"dtype": torch.float64}, {"keep": "last"}):
        with hl.capture(model, "**", "", "*:input", "*:inputs", "*:grad_output", **options):
            looked = run()
        assert all(torch.equal(a, b) for a, b in zip(bare, looked, strict=True))
    assert_clean(model)


def test_the_memory_of_a_dropped_record_is_freed_without_the_collector():
    model, x = small(seed=0), torch.randn(5, 3)
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"detach": True}):
            with hl.capture(model, "*", "*:input", "0:grad_output", **options) as record:
                model(x).sum().backward()
            value = weakref.ref(record["0"])
            del record
            assert value() is None
    finally:
        gc.enable()


def test_the_table_says_of_each_tensor_whether_it_is_attached():
    model = nn.GRU(2, 3)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 2), torch.ones(1, 2)])
    with hl.capture(model, "") as record:
        model(packed)
    rows = [line.split() for line in repr(record).splitlines()]
    attached = {row[0]: row[-1] == "attached" for row in rows if row[0].startswith("[")}
    assert attached == {"[0][data]": True, "[0][batch_sizes]": False, "[1]": True}


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("x", torch.full((1,), 7.0))

    def forward(self, value):
        return value + self.x


class ModuleAndBuffer(nn.Module):
    """`**.x` is a module here and a buffer there."""

    def __init__(self):
        super().__init__()
        self.x, self.other = nn.Linear(2, 2), Half()

    def forward(self, value):
        return self.other(self.x(value))


@pytest.mark.parametrize("where", ["**.x", "{x,other.x}", "{other.x,x}"])
def test_a_glob_that_matches_modules_and_buffers_gives_each_its_own_value(where):
    model, x = ModuleAndBuffer(), torch.ones(1, 2)
    with hl.capture(model, where) as record:
        model(x)
    assert torch.equal(record["other.x"], torch.tensor([7.0]))
    assert torch.equal(record["x"], model.x(x))


class Bare(nn.Module):
    """Holds its layers in bare modules, as some models do, one of them empty."""

    def __init__(self):
        super().__init__()
        self.down, self.empty = nn.Module(), nn.Module()
        self.down.block = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x):
        return self.down.block[0](x)


def test_bare_modules_that_hold_others_are_containers_and_empty_ones_have_a_reason():
    model = Bare()
    with hl.capture(model, "**") as record:
        model(torch.ones(1, 2))
    assert record.places() == ["down.block.0"]
    assert list(record.unfired()) == ["empty"]
    with pytest.raises(hl.NeverFired, match="bare Module"):
        _ = record["empty"]


@pytest.mark.parametrize("places", [["0"], ["0", "1:grad_output"], ["0", "1:input"]])
def test_a_record_outlives_an_attached_capture_that_is_collected_with_its_model(places):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    record = hl.capture(model, *places).attach().record
    model(torch.ones(1, 2)).sum().backward()
    del model
    gc.collect()
    assert [str(place) for place in record.places()] == places


def test_values_are_read_alike_before_and_after_the_places_are_listed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a:input", nn.Linear(3, 3))
            self.twice = nn.Linear(3, 3)

        def forward(self, x):
            return self.twice(self.twice(getattr(self, "a:input")(x)))

    model = Odd()
    for port in ("", ":grad_output", ":grad_input"):
        read = []
        for listed in (False, True):
            with hl.capture(model, f"**{port}") as record:
                model(torch.ones(2, 3, requires_grad=True) * 1).sum().backward()
            assert not listed or len(record.places()) == 2
            read += [record[f"a\\:input{port}"], *record.calls(f"twice{port}")]
            with pytest.raises(hl.SeveralCalls):
                record[f"twice{port}"]
        assert all(torch.equal(a, b) for a, b in zip(read[:3], read[3:], strict=True))


def test_a_value_that_was_changed_in_place_is_refused_at_the_first_read():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hl.capture(model, "*") as record:
        model(torch.ones(2, 3))
    with pytest.raises(hl.ValueChanged):
        record["0"]
    assert record["1"].min() >= 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_record_that_is_to_be_copied_says_what_to_do_instead(copied):
    model = nn.Sequential(nn.Linear(2, 3))
    with hl.capture(model, "0") as record:
        model(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="save_record"):
        copied(record)
    assert record["0"].shape == (1, 3)


def test_a_record_has_a_place_only_with_that_call_and_that_part():
    model = nn.Sequential(nn.LSTM(2, 3), small())
    with hl.capture(model, "0", "0:grad_output") as record:
        model[0](torch.zeros(1, 2))
    for held in ("0", ("0", 0), ("0", -1), "0[1][0]"):
        assert held in record
    for missing in (("0", 1), "0[2]", "0[1][7]", "0:grad_output"):
        assert missing not in record
    with pytest.raises(hl.NotCaptured, match="patch was asked"):
        hl.edit(model, "0[1][0]", hl.patch(record, "0[9]")).__enter__()


def test_a_record_of_single_calls_can_be_made_a_dict():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with hl.capture(model, "*") as record:
        model(torch.zeros(1, 2))
    assert list(dict(record)) == ["0", "1"]
    assert torch.equal(dict(record)["1"], record["1"])


@pytest.mark.parametrize("where", ["[0]", ":inputs[extra]"])
def test_a_call_without_the_part_that_was_asked_for_keeps_its_number(where):
    model, x = SometimesTuple(), torch.ones(2)
    with hl.capture(model, where) as record:
        with pytest.raises(ValueError, match="as asked"):
            model(x, fails=True)
        model(x)
        model(x, x * 3)
        model(x, x * 5)
    more = 1 if where == "[0]" else 0
    assert record.calls(where)[0] is None
    assert [value.tolist() for value in record.calls(where)[1:]] == [[3 + more] * 2, [5 + more] * 2]
    assert record[where, 2].tolist() == [5 + more] * 2
    assert record.to("cpu")[where, 1].tolist() == [3 + more] * 2
    with pytest.raises(hl.NotCaptured, match=r"asked for: the value is a .* Capture the whole"):
        record[where, 0]
    with hl.edit(model, where, hl.patch(record), calls={1, 2}), hl.capture(model, where) as patched:
        for extra in (None, x, x):
            model(x * 7, extra)
    assert torch.equal(patched[where, 1], record[where, 1])
    assert torch.equal(patched[where, 2], record[where, 2])


@pytest.mark.parametrize("where", [":grad_output[0]", ":grad_inputs[extra]"])
def test_the_gradient_of_a_call_without_the_part_that_was_asked_for_keeps_its_number(where):
    model, x = SometimesTuple(), torch.ones(2, requires_grad=True)
    with hl.capture(model, where) as record:
        (model(x) + 3 * model(x, x * 1)[0]).sum().backward()
    assert record.calls(where)[0] is None
    assert record[where, 1].tolist() == [3, 3]
    with pytest.raises(hl.GradientNotAvailable, match="asked for: the value is a"):
        record[where, 0]


@pytest.mark.parametrize("where", ["[0]", ":grad_output[0]"])
def test_joining_calls_of_which_one_has_not_the_part_says_so(where):
    model, x = SometimesTuple(), torch.ones(2, requires_grad=True)
    with hl.capture(model, where) as record:
        (model(x, x * 2)[0] + model(x)).sum().backward()
    for join in (record.cat, record.stack):
        with pytest.raises(hl.HooklineError, match=r"asked for: the value is a tensor .* at="):
            join(where)


def test_every_place_in_the_table_of_a_record_can_be_read():
    model = nn.LSTM(2, 3)
    with hl.capture(model, "", ":inputs", ":grad_output", "weight_ih_l0:grad") as record:
        model(torch.zeros(1, 2))[0].sum().backward()
    shown = [line.split()[0] for line in repr(record).splitlines()[2:]]
    assert shown[:3] == ["[0]", "[1][0]", "[1][1]"]
    for place in shown:
        assert isinstance(record[place], torch.Tensor)
    with hl.capture(model, "") as record:
        assert repr(record).splitlines()[2].split()[:2] == ["''", "0"]
        model(torch.zeros(1, 2))


def test_printed_places_of_the_models_own_parts_can_be_read():
    model = nn.LSTM(2, 3)
    with hl.capture(model, "") as record:
        model(torch.ones(4, 2))
    shown = [line.split()[0] for line in repr(record).splitlines()[2:]]
    assert [record[place].shape for place in shown] == [(4, 3), (1, 3), (1, 3)]


def test_a_part_of_a_tensor_is_told_to_be_left_out():
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(hl.NeverFired, match=r"'0\[0\]'.*leave the part out; a slice.*at="):
        with hl.capture(model, "0[0]"):
            model(torch.ones(4, 2))


def test_odd_names_keep_the_table_straight():
    model = nn.Sequential()
    for name in ("plain", "new\nline", "\x1b[31mred", "\u202eturned"):
        model.add_module(name, nn.ReLU())
    with hl.capture(model, "**") as record:
        model(torch.ones(2, 3))
    table = repr(record)
    lines = table.splitlines()
    assert len(lines) == 2 + 4
    assert "\x1b" not in table
    assert "\u202e" not in table
    assert [line.split()[0] for line in lines[3:5]] == [r"new\nline", r"\x1b\[31mred"]
    assert len({line.index("(2, 3)") for line in lines[2:]}) == 1


# -- what reading costs ---------------------------------------------------------------------------


class Splitting(nn.Module):
    """Gives a dict, in which every third call has no "rest"."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return {"first": self.line(x)} | ({"rest": x * 2} if self.calls % 3 else {})


class SplitsAndJoins(nn.Module):
    def __init__(self):
        super().__init__()
        self.split, self.last = Splitting(), nn.Sequential(nn.Linear(2, 2))

    def forward(self, x):
        values = self.split(x)
        return self.last(values["first"].tanh()) + values.get("rest", 0)


# What each place is asked for, so that every way of keeping values is among them.
OFTEN = {
    "outputs": ("last.0", {}),
    "outputs beside others": (["last.0", "split"], {}),
    "snapshots": ("last.0", {"detach": True}),
    "slices": ("last.0", {"at": np.s_[:, 0]}),
    "inputs": ("last.0:input", {}),
    "inputs by name": ("last:inputs", {}),
    "a part": ("split[first]", {}),
    "a part that some calls lack": ("split[rest]", {}),
    "operations": ("/tanh", {}),
    "a parameter": ("last.0.weight", {}),
    "gradients at outputs": ("last.0:grad_output", {}),
    "gradients at outputs that are views": ("split.line:grad_output", {}),
    "gradients at outputs of containers": ("last:grad_output", {}),
    "gradients at parts": ("split:grad_output[first]", {}),
    "gradients of nested outputs": ("split:grad_output", {}),
    "slices of gradients": ("last.0:grad_output", {"at": np.s_[..., 0]}),
    "gradients at inputs": ("last.0:grad_input", {}),
    "gradients at all inputs": ("split.line:grad_inputs", {}),
    "slices of gradients at inputs": ("last.0:grad_input", {"transform": torch.abs}),
    "gradients of parameters": ("last.0.weight:grad", {}),
}


def _often(where, options, count):
    """The work of reading one call of many, and that of reading all."""
    model, found = SplitsAndJoins(), {}
    place = where[0] if isinstance(where, list) else where
    with hl.capture(model, *([where] if isinstance(where, str) else where), **options) as record:
        for n in range(count):
            model(torch.ones(1, 1, 2, requires_grad=True)).sum().backward()
            if n == count - 4:
                record[place, 0]
        found["of new ones"] = work_of(lambda: record[place, -2])
        found["while it is open"] = work_of(lambda: record[place, 0])
    record[place, 0]
    found["afterwards"] = work_of(lambda: record[place, 0])
    found["from the end"] = work_of(lambda: record[place, -2])
    found["of a call"] = work_of(lambda: record.of_call(place, 0)) if "weight" not in place else 0
    found["whether it is there"] = work_of(lambda: (place, 0) in record)
    with tempfile.TemporaryDirectory() as folder:
        loaded = hl.load_record(hl.save_record(record, folder))
    loaded[place, 0]
    found["when it was loaded"] = work_of(lambda: loaded[place, -2])
    return found, work_of(lambda: record.calls(place))


@pytest.mark.parametrize(("where", "options"), OFTEN.values(), ids=OFTEN)
def test_reading_one_call_is_the_same_work_however_many_there_are(where, options):
    (few, first), (more, second), (many, third) = (
        _often(where, options, n) for n in (90, 150, 210)
    )
    assert few == more == many
    assert third - second == second - first  # all of them: a call more is as much more each time


def _with_pauses(place, options, expected):
    """Run forwards and backwards in an odd order, and compare all that was read in between."""
    generator, model = np.random.default_rng(0), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    came: dict[int, list[torch.Tensor]] = {}
    losses = []
    with hl.capture(model, place, **options) as record:
        for _ in range(60):
            if not losses or generator.random() < 0.4:
                x = torch.randn(1, 2, requires_grad=True)
                y = model[0](x)
                losses.append((model[1](y) ** 2).sum())
                came[len(losses) - 1] = []
                y.register_hook(came[len(losses) - 1].append)
                model[1](y)  # no gradient comes for this call of the last layer
            else:
                losses[generator.integers(len(losses))].backward(retain_graph=True)
            found = [one for call in came.values() for one in call or [None]]
            if any(one is not None for one in found) and generator.random() < 0.5:
                _same_values(record.calls(place), [expected(one) for one in found])
                k = int(generator.integers(len(found)))
                if found[k] is not None:
                    _same_values([record[place, k]], [expected(found[k])])
                    _same_values([record[place, k - len(found)]], [expected(found[k])])
        for call, (first, *more) in ((call, own) for call, own in came.items() if own):
            if not more:
                _same_values([record.of_call(place, call)], [expected(first)])
    _same_values(record.calls(place), [expected(one) for one in found])


def _same_values(found, wanted):
    assert [value is None for value in found] == [value is None for value in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("place", "options", "expected"),
    [
        ("0:grad_output", {}, lambda grad: grad),
        ("0:grad_output", {"at": np.s_[:, 0]}, lambda grad: grad if grad is None else grad[:, 0]),
    ],
)
def test_gradients_read_between_backwards_are_those_of_hooks_by_hand(place, options, expected):
    _with_pauses(place, options, expected)


def test_calls_that_lack_a_part_keep_their_numbers_while_others_come():
    class Optional(nn.Module):
        def forward(self, **given):
            if "fail" in given:
                raise ValueError("it was to fail")
            return given["x"]

    model, found = Optional(), []
    with hl.capture(model, ":inputs[mask]") as record:
        for n in range(40):
            mask = torch.full((1,), float(n))
            if n % 7 == 3:  # the next call has its number
                with pytest.raises(ValueError, match="to fail"):
                    model(x=mask, fail=True)
            model(x=mask, **({} if n % 3 == 0 else {"mask": mask}))
            found.append(None if n % 3 == 0 else mask)
            if n % 5 == 4:
                _same_values(record.calls(":inputs[mask]"), found)
                assert torch.equal(record[":inputs[mask]", n - n % 3 - 2], found[n - n % 3 - 2])
    _same_values(record.calls(":inputs[mask]"), found)
    for n, value in enumerate(found):
        if value is None:
            with pytest.raises(hl.NotCaptured, match="mask"):
                record[":inputs[mask]", n]
        else:
            assert torch.equal(record[":inputs[mask]", n], value)
            assert torch.equal(record.of_call(":inputs[mask]", n), value)


@pytest.mark.parametrize("option", ["transform", "at"])
@pytest.mark.parametrize("calls", [None, slice(0, 9)])
@pytest.mark.parametrize("place", ["0", ":output", "0/linear", "0:input", "0:inputs[input]"])
def test_calls_keep_their_numbers_where_the_users_function_raised(place, calls, option):
    model = nn.Sequential(nn.Linear(2, 2))
    inputs = [torch.full((1, 2), float(n)) for n in range(4)]

    def choosy(value):
        if refused:
            raise ValueError("not this one")
        return value * 2

    with hl.capture(model, place, calls=calls, **{option: choosy}) as record:
        for n, x in enumerate(inputs):
            refused = n == 1
            with contextlib.suppress(ValueError):
                model(x)
    if "input" in place:  # the call that raised before it began has no number
        wanted = [2 * x for n, x in enumerate(inputs) if n != 1]
        assert all(torch.equal(*both) for both in zip(record.calls(place), wanted, strict=True))
        return
    assert [value is None for value in record.calls(place)] == [False, True, False, False]
    for n in (0, 2, 3):
        assert torch.equal(record[place, n], 2 * model(inputs[n]))
    with pytest.raises(hl.NotCaptured, match=rf"{option}=.*raised ValueError.*not this one"):
        record[place, 1]


def test_a_gradient_says_that_the_users_function_raised():
    model = nn.Linear(2, 1)

    def choosy(value):
        if refused:
            raise ValueError("not this one")
        return value * 2

    with hl.capture(model, ":grad_output", transform=choosy) as record:
        for n in range(3):
            refused = n == 1
            with contextlib.suppress(ValueError):
                model(torch.ones(1, 2)).sum().backward()
    assert [value is None for value in record.calls(":grad_output")] == [False, True, False]
    assert torch.equal(record[":grad_output", 2], torch.full((1, 1), 2.0))
    with pytest.raises(hl.GradientNotAvailable, match=r"raised ValueError.*not this one"):
        record[":grad_output", 1]
