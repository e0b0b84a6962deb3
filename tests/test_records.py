"""Record: reading, moving, printing, and the cost of reading."""

import contextlib
import copy
import gc
import pickle
import re
import tempfile
import weakref

import numpy as np
import pytest
import torch
from models import ChangesItsPair, Giving, OneOfTwo, SometimesTuple, small
from oracles import assert_clean, by_hand, work_of
from torch import nn

import hookline as hl

# -- reading --------------------------------------------------------------------------------------


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


# -- after the model is gone ----------------------------------------------------------------------


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


# -- tables ---------------------------------------------------------------------------------------


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


# -- sizes and moving -----------------------------------------------------------------------------


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


# -- calls, parts and tables ----------------------------------------------------------------------


def test_the_table_says_of_each_tensor_whether_it_is_attached():
    model = nn.GRU(2, 3)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 2), torch.ones(1, 2)])
    with hl.capture(model, "") as record:
        model(packed)
    rows = [line.split() for line in repr(record).splitlines()]
    attached = {row[0]: row[-1] == "attached" for row in rows if row[0].startswith("[")}
    assert attached == {"[0][data]": True, "[0][batch_sizes]": False, "[1]": True}


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
