"""capture: places that never fire, attached values and snapshots, entering and leaving."""

import gc
import re
import weakref
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import ChangesItsPair, Giving, OneOfTwo, SometimesTuple, small
from oracles import assert_clean
from torch import nn

import hookline as hl

# -- what did not fire ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("where", [("*", "unused"), ("unused", "*")])
def test_a_literal_place_that_never_fires_raises_beside_a_glob_that_did(where):
    model = OneOfTwo(2)
    remedy = r"A capture of '\*\*' shows what is called"
    with pytest.raises(hl.NeverFired, match=rf"'unused'.*was not called.*{remedy}") as caught:
        with hl.capture(model, *where):
            model(torch.ones(1, 2))
    assert caught.value.record.places() == ["used"]
    assert_clean(model)


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


# -- attached values and snapshots ----------------------------------------------------------------


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


# -- contexts -------------------------------------------------------------------------------------


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


def test_a_value_that_was_changed_in_place_is_refused_at_the_first_read():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hl.capture(model, "*") as record:
        model(torch.ones(2, 3))
    with pytest.raises(hl.ValueChanged):
        record["0"]
    assert record["1"].min() >= 0


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
