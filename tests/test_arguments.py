"""Inputs by name, however they were passed: captured, edited, and passed on as they came."""

import functools

import pytest
import torch
from models import Giving
from oracles import assert_clean
from torch import nn

import hookline as hl

ONE, TWO, THREE = (torch.tensor([float(n)]) for n in (1, 2, 3))


class TensorsAndOptions(nn.Module):
    """Two tensors and two options, any of them by name."""

    def forward(self, hidden, attention_mask=None, scale=1.0, *, causal=False):
        self.seen = (hidden, attention_mask, scale, causal)
        return hidden if attention_mask is None else hidden * 10 + attention_mask


WAYS = {
    "by position": ((ONE, TWO), {}),
    "one by name": ((ONE,), {"attention_mask": TWO}),
    "all by name": ((), {"hidden": ONE, "attention_mask": TWO}),
    "all by name in another order": ((), {"attention_mask": TWO, "hidden": ONE}),
    "with options": ((ONE, TWO, 2.0), {"causal": True}),
    "options first": ((), {"causal": True, "scale": 2.0, "attention_mask": TWO, "hidden": ONE}),
}
each_way = pytest.mark.parametrize(("args", "kwargs"), WAYS.values(), ids=list(WAYS))


@each_way
def test_inputs_are_captured_by_name_however_they_are_passed(args, kwargs):
    block = TensorsAndOptions()
    where = [":input", ":inputs", ":inputs[attention_mask]", ":inputs[hidden]"]
    with hl.capture(block, *where) as record:
        out = block(*args, **kwargs)
    assert torch.equal(out, ONE * 10 + TWO)
    assert torch.equal(record[":input"], ONE)
    assert torch.equal(record[":inputs[hidden]"], ONE)
    assert torch.equal(record[":inputs[attention_mask]"], TWO)
    options = {name: value for name, value in kwargs.items() if name in ("causal", "scale")}
    if len(args) == 3:
        options["scale"] = args[2]
    assert record[":inputs"].keys() == {"hidden", "attention_mask", *options}
    assert {name: record[":inputs"][name] for name in options} == options
    assert_clean(block)


@each_way
@pytest.mark.parametrize("place", [":input", ":inputs[hidden]", ":inputs[attention_mask]"])
def test_inputs_are_edited_by_name_and_the_rest_is_passed_on(args, kwargs, place):
    block = TensorsAndOptions()
    with hl.edit(block, place, hl.replace(7.0)):
        out = block(*args, **kwargs)
    hidden, mask = (ONE, 7) if place.endswith("mask]") else (7, TWO)
    assert torch.equal(out, torch.as_tensor(hidden * 10.0 + mask).reshape(1))
    assert block.seen[2:] == (
        2.0 if "scale" in kwargs or len(args) > 2 else 1.0,
        bool(kwargs.get("causal")),
    )
    assert_clean(block)


@each_way
def test_all_inputs_are_edited_as_a_dict(args, kwargs):
    block = TensorsAndOptions()

    def change(inputs):
        return {name: v + 1 if name == "hidden" else v for name, v in inputs.items()}

    with hl.edit(block, ":inputs", change):
        assert torch.equal(block(*args, **kwargs), (ONE + 1) * 10 + TWO)
    with hl.edit(block, ":inputs", lambda inputs: dict(reversed(change(inputs).items()))):
        assert torch.equal(block(*args, **kwargs), (ONE + 1) * 10 + TWO)
    assert_clean(block)


def test_a_hook_may_add_an_argument_that_was_not_passed():
    block = TensorsAndOptions()
    with hl.hook(
        block, ":inputs", lambda inputs: {**inputs, "attention_mask": TWO, "causal": True}
    ):
        assert torch.equal(block(ONE), ONE * 10 + TWO)
    assert block.seen[3] is True
    assert_clean(block)


@pytest.mark.parametrize("change", [lambda inputs: {}, lambda inputs: 3])
def test_what_is_no_set_of_arguments_is_refused_with_the_place(change):
    block = TensorsAndOptions()
    with pytest.raises(hl.HooklineError, match=r":inputs|hidden"):
        with hl.hook(block, ":inputs", change):
            block(ONE)
    assert_clean(block)


def test_an_argument_left_at_its_default_is_told_with_those_that_were_passed():
    block = TensorsAndOptions()
    with pytest.raises(
        hl.NeverFired, match=r"hidden.*not .attention_mask|'attention_mask' was passed, only hidden"
    ):
        with hl.capture(block, ":inputs[attention_mask]"):
            block(ONE)
    with pytest.raises(
        hl.PlaceError, match=r"hidden.*not .attention_mask|'attention_mask' was passed, only hidden"
    ):
        with hl.edit(block, ":inputs[attention_mask]", hl.zero()):
            block(ONE)
    assert_clean(block)


def test_a_call_without_arguments_is_told_and_has_no_inputs():
    model = Giving(lambda: ONE)
    with hl.capture(model, ":inputs") as record:
        model()
    assert record[":inputs"] == {}
    with (
        pytest.raises(hl.NeverFired, match="called without arguments"),
        hl.capture(model, ":input"),
    ):
        model()
    assert_clean(model)


def test_the_first_argument_is_the_first_of_the_signature_not_of_the_call():
    class KeywordOnly(nn.Module):
        def forward(self, *, second, first):
            return second * 10 + first

    model = KeywordOnly()
    for kwargs in ({"second": TWO, "first": ONE}, {"first": ONE, "second": TWO}):
        with hl.capture(model, ":input", ":inputs[first]") as record:
            model(**kwargs)
        assert torch.equal(record[":input"], TWO)
        assert torch.equal(record[":inputs[first]"], ONE)
        with hl.edit(model, ":input", hl.zero()):
            assert torch.equal(model(**kwargs), ONE)
    assert_clean(model)


def test_another_argument_does_not_stand_in_for_a_first_one_that_was_not_passed():
    model = Giving(None)
    model.forward = lambda tokens=None, embeds=None: embeds
    with pytest.raises(hl.NeverFired, match="tokens"), hl.capture(model, ":input"):
        model(embeds=ONE)
    assert_clean(model)


class Variadic(nn.Module):
    def forward(self, x, *rest, flag=1, **named):
        return x + sum(rest) * 10 + sum(named.values()) * 100


def test_surplus_arguments_are_known_by_position_and_by_name():
    model = Variadic()
    with hl.capture(model, ":inputs", ":inputs[1]", ":inputs[2]", ":inputs[extra]") as record:
        model(ONE, TWO, THREE, extra=ONE)
    assert torch.equal(record[":inputs[1]"], TWO)
    assert torch.equal(record[":inputs[2]"], THREE)
    assert torch.equal(record[":inputs[extra]"], ONE)
    for place, expected in {
        ":inputs[1]": 131.0,
        ":inputs[extra]": 51.0,
        ":inputs[x]": 150.0,
    }.items():
        with hl.edit(model, place, hl.zero()):
            assert model(ONE, TWO, THREE, extra=ONE).item() == expected
    assert_clean(model)


def test_arguments_that_only_have_names_come_as_they_were_passed():
    model = Giving(lambda **named: named["b"] * 10 + named["a"])
    with hl.capture(model, ":input", ":inputs[a]") as record:
        model(b=TWO, a=ONE)
    assert torch.equal(record[":input"], TWO)
    assert torch.equal(record[":inputs[a]"], ONE)


def test_a_positional_only_argument_and_a_keyword_of_its_name_are_told_apart():
    class Both(nn.Module):
        def forward(self, x, /, **named):
            return x * 10 + named["x"]

    model = Both()
    with hl.capture(model, ":inputs", ":input") as record:
        model(ONE, x=TWO)
    assert torch.equal(record[":input"], ONE)
    assert sorted(value.item() for value in record[":inputs"].values()) == [1, 2]
    with hl.edit(model, ":input", hl.zero()):
        assert torch.equal(model(ONE, x=TWO), TWO)
    assert_clean(model)


def test_an_argument_named_like_a_method_of_dict_is_an_argument():
    class Attention(nn.Module):
        def forward(self, queries, keys=None, values=None):
            return queries

    model = Attention()
    with hl.capture(model, ":inputs[keys]", ":inputs[values]") as record:
        model(ONE, values=THREE, keys=TWO)
    assert torch.equal(record[":inputs[keys]"], TWO)
    assert torch.equal(record[":inputs[values]"], THREE)
    with pytest.raises(
        hl.NeverFired, match=r"queries.*not .values|'values' was passed, only queries"
    ):
        with hl.capture(model, ":inputs[values]"):
            model(ONE)
    assert_clean(model)


def test_nested_arguments_are_edited_without_touching_the_callers_own():
    model = Giving(lambda batch: batch["x"] + batch["more"][0])
    batch = {"x": ONE, "more": (TWO,)}
    with hl.edit(model, ":input[more][0]", hl.scale(100.0)):
        assert model(batch).item() == 201
    assert batch["more"][0].item() == 2
    assert_clean(model)


def test_the_order_of_edits_of_the_same_arguments_is_the_order_of_entering():
    block = TensorsAndOptions()
    with (
        hl.edit(block, ":input", hl.add(1.0)),
        hl.edit(block, ":inputs[hidden]", hl.scale(3.0)),
        hl.capture(block, ":input") as record,
    ):
        block(hidden=ONE)
    assert record[":input"].item() == (1 + 1) * 3


# -- signatures -----------------------------------------------------------------------------------


def wrapped(forward):
    @functools.wraps(forward)
    def outer(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return outer


class Decorated(nn.Module):
    @wrapped
    def forward(self, hidden, mask=None):
        return hidden


class Static(nn.Module):
    @staticmethod
    def forward(hidden, mask=None):
        return hidden


class Inherited(Decorated):
    pass


def own_forward() -> nn.Module:
    module = TensorsAndOptions()
    module.forward = lambda hidden, mask=None: hidden
    return module


def partial_forward() -> nn.Module:
    module = nn.Module()
    module.forward = functools.partial(lambda option, hidden, mask=None: hidden, 3)
    return module


@pytest.mark.parametrize("make", [Decorated, Static, Inherited, own_forward, partial_forward])
def test_the_names_come_from_the_forward_that_is_called(make):
    model = make()
    with hl.capture(model, ":inputs") as record:
        model(ONE, mask=TWO)
    assert list(record[":inputs"]) == ["hidden", "mask"]
    assert_clean(model)


def test_two_instances_with_forwards_of_their_own_do_not_share_names():
    models = [nn.Module(), nn.Module()]
    models[0].forward = lambda left: left
    models[1].forward = lambda right: right
    for model, name in zip(models, ("left", "right"), strict=True):
        with hl.capture(model, ":inputs") as record:
            model(ONE)
        assert list(record[":inputs"]) == [name]


def test_the_arguments_of_torchs_own_modules_have_their_names():
    bilinear = nn.Bilinear(1, 1, 1)
    with hl.capture(bilinear, ":inputs") as record:
        bilinear(ONE, input2=TWO)
    assert record[":inputs"] == {"input1": ONE, "input2": TWO}
    attention = nn.MultiheadAttention(4, 2)
    x = torch.ones(2, 1, 4)
    with hl.capture(attention, ":inputs[key]", ":inputs[need_weights]") as record:
        attention(x, x * 2, value=x, need_weights=False)
    assert torch.equal(record[":inputs[key]"], x * 2)
    assert record[":inputs[need_weights]"] is False
    assert_clean(attention)


def test_the_arguments_of_methods_that_make_tensors_have_their_own_names():
    class Model(nn.Module):
        def forward(self, x):
            return x.new_full((2,), 5.0) + torch.zeros(2)

    model = Model()
    with hl.capture(model, "/new_full:inputs", "/zeros:inputs") as record:
        model(ONE)
    given = record["/new_full:inputs"]
    assert list(given) == ["self", "size", "fill_value"]
    assert given["fill_value"] == 5.0
    assert record["/zeros:inputs"] == {0: 2}
