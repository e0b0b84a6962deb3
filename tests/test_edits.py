"""edit(): what is given as a change, where, at what slice, in which calls."""

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Giving, OneOfTwo, mlp
from oracles import assert_clean
from torch import nn

import hookline as hl


def by_hook(model, path, function, x, pre=False):
    """What a hand-written hook that replaces a value gives."""
    module = model.get_submodule(path)
    if pre:
        handle = module.register_forward_pre_hook(lambda m, a: (function(a[0]), *a[1:]))
    else:
        handle = module.register_forward_hook(lambda m, a, o: function(o))
    try:
        return model(x)
    finally:
        handle.remove()


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


# -- what can be given --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (hl.scale(2.0), lambda v: v * 2),
        (torch.arange(4.0), lambda v: torch.arange(4.0).expand_as(v)),
        (lambda v: v + 1, lambda v: v + 1),
        (torch.relu, torch.relu),
        (F.dropout, None),
        (nn.Softmax(-1), lambda v: v.softmax(-1)),
        (functools.partial(torch.clamp, max=0.0), lambda v: v.clamp(max=0)),
        (hl.add(1.0) | hl.zero(), torch.zeros_like),
    ],
)
def test_a_change_is_a_ready_one_a_tensor_or_a_function(change, plain):
    model = mlp()
    with hl.edit(model, "0", change):
        result = model(X)
    if plain is not None:
        assert torch.equal(result, by_hook(model, "0", plain, X))
    assert result.shape == (5, 2)
    assert_clean(model)


@pytest.mark.parametrize("wrong", [3.0, None, "zero", hl.scale, [hl.zero()]])
def test_what_is_no_change_is_refused_before_anything_happens(wrong):
    model = mlp()
    with pytest.raises(hl.ChangeError, match="change"):
        hl.edit(model, "0", wrong)
    with pytest.raises(hl.ChangeError, match="change"):
        hl.edit(model, {"0": wrong})


def test_a_mapping_and_a_change_together_are_refused():
    with pytest.raises(TypeError, match=r"mapping.*Give either"):
        hl.edit(mlp(), {"0": hl.zero()}, hl.zero())


def test_nothing_to_edit_is_an_error():
    for where in ({}, [], ()):
        with pytest.raises((TypeError, hl.PlaceError), match="no place"):
            with hl.edit(mlp(), where, *([] if where == {} else [hl.zero()])):
                pass


def test_the_edit_ends_with_the_block_and_after_exceptions():
    model = mlp()
    plain = model(X)
    with hl.edit(model, "0", hl.zero()):
        assert not torch.equal(model(X), plain)
    assert torch.equal(model(X), plain)
    with pytest.raises(KeyboardInterrupt):
        with hl.edit(model, "0", hl.zero()):
            raise KeyboardInterrupt
    assert torch.equal(model(X), plain)
    assert_clean(model)


def test_an_edit_can_be_attached_removed_and_entered_again():
    model = mlp()
    plain = model(X)
    handle = hl.edit(model, "0", hl.zero())
    assert handle.attach() is handle
    assert not torch.equal(model(X), plain)
    with pytest.raises(RuntimeError, match="open already"):
        handle.attach()
    handle.remove()
    handle.remove()
    assert torch.equal(model(X), plain)
    with handle:
        assert not torch.equal(model(X), plain)
    assert_clean(model)


# -- where --------------------------------------------------------------------------------------


def test_lists_types_globs_and_modules_say_where():
    model = mlp()
    for where in (["0", "2"], nn.Linear, "{0,2}", [model[0], "2"], lambda n, m: n in ("0", "2")):
        with hl.edit(model, where, hl.zero()), hl.capture(model, "*") as record:
            model(X)
        assert record["0"].abs().sum() == 0
        assert record["2"].abs().sum() == 0


def test_inputs_can_be_edited_however_they_are_passed():
    class Named(nn.Module):
        def forward(self, x, *rest, scale=1.0, **more):
            return x * scale + sum(rest) + more.get("shift", 0)

    model = nn.ModuleDict({"m": Named()})
    x, two = torch.ones(2), torch.full((2,), 2.0)
    with hl.edit(model, "m:input", hl.add(1.0)):
        assert torch.equal(model["m"](x), two)
        assert torch.equal(model["m"](x=x), two)
    with hl.edit(model, "m:inputs[x]", hl.add(1.0)):
        assert torch.equal(model["m"](x), two)
        assert torch.equal(model["m"](x=x, shift=1.0), two + 1)
    with hl.edit(model, "m:inputs[shift]", hl.scale(0.0)):
        assert torch.equal(model["m"](x, shift=two), x)
    with hl.edit(model, "m:inputs[1]", hl.scale(0.0)):
        assert torch.equal(model["m"](x, two), x)
    with hl.edit(model, "m:inputs", lambda inputs: {**inputs, "scale": 3.0}):
        assert torch.equal(model["m"](x, scale=1.0), x * 3)
    assert_clean(model)


def test_a_pre_hook_written_by_hand_gives_the_same():
    model = mlp()
    with hl.edit(model, "2:input", hl.scale(3.0)):
        result = model(X)
    assert torch.equal(result, by_hook(model, "2", lambda v: v * 3, X, pre=True))


def test_parts_of_nested_values_can_be_edited_and_the_rest_stays_the_very_object():
    @dataclass
    class Out:
        hidden: torch.Tensor
        extra: list

    Point = namedtuple("Point", ["x", "y"])
    a, b = torch.ones(2), torch.full((2,), 5.0)
    for value, part in [
        ((a, b), "[0]"),
        ([a, b], "[-2]"),
        ({"a": a, "b": b}, "[a]"),
        (OrderedDict(a=a, b=b), "[a]"),
        (Point(a, b), "[x]"),
        (Point(a, b), "[0]"),
        (Out(a, [b]), "[hidden]"),
        ((None, {"k": (a, "text")}, b), "[1][k][0]"),
    ]:
        model = nn.ModuleDict({"m": Giving(lambda value=value: value)})
        with hl.edit(model, "m" + part, hl.scale(2.0)), hl.capture(model, "m" + part) as record:
            result = model["m"]()
        assert type(result) is type(value)
        assert torch.equal(record["m" + part], a * 2)
        found = [t for t in _tensors(result) if t is b]
        assert len(found) == 1
        assert torch.equal(a, torch.ones(2))


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []


@pytest.mark.parametrize(
    ("given", "found", "remedy"),
    [
        (hl.zero, "It is a class.", "zero(...)"),
        (nn.Dropout, "It is a class.", "Dropout(...)"),
        (2.0, "It is a float.", "hookline.replace(2.0)"),
    ],
)
def test_what_is_no_change_is_told_with_what_to_give_instead(given, found, remedy):
    with pytest.raises(hl.ChangeError) as caught:
        hl.edit(nn.Sequential(nn.ReLU()), "0", given)
    assert caught.value.found == found
    assert remedy in caught.value.remedy


def test_a_ready_change_on_several_tensors_lists_the_parts():
    model = nn.Sequential(nn.LSTM(2, 3))
    with pytest.raises(
        hl.SeveralTensors, match=r"'0'.*holds 3: \[0\].*\[1\]\[0\].*Name one"
    ) as caught:
        with hl.edit(model, "0", hl.scale(2.0)):
            model(torch.ones(1, 1, 2))
    assert any("'0'" in note for note in caught.value.__notes__)
    with pytest.raises(hl.SeveralTensors, match=r"\[1\]\[1\]"):
        with hl.edit(model, "0:grad_output", hl.scale(2.0)):
            model(torch.ones(1, 1, 2))
    assert_clean(model)


def test_a_ready_change_meets_the_only_tensor_of_a_nested_value():
    model = Giving(lambda: {"h": torch.ones(2), "n": 3, "none": None})
    with hl.edit(model, "", hl.scale(2.0)):
        result = model()
    assert result["n"] == 3
    assert torch.equal(result["h"], torch.full((2,), 2.0))


def test_a_ready_change_on_a_value_without_tensors_is_an_error():
    model = Giving(lambda: None)
    with pytest.raises(hl.SeveralTensors, match="NoneType and holds none"):
        with hl.edit(model, "", hl.zero()):
            model()


def test_a_part_that_is_not_there_is_an_error_at_once():
    model = mlp()
    with pytest.raises(hl.PlaceError, match=r"'0\[1\]'.*a part never indexes a tensor"):
        with hl.edit(model, "0[1]", hl.zero()):
            model(X)
    assert_clean(model)


# -- mappings -----------------------------------------------------------------------------------


def test_a_mapping_binds_changes_to_places():
    model = mlp()
    with hl.edit(model, {"0": hl.scale(2.0), "2:input": torch.zeros(4), nn.Tanh: torch.relu}):
        result = model(X)
    assert torch.equal(result, model[2].bias.expand(5, 2))


def test_a_mapping_takes_modules_pairs_and_mixes_weights_with_activations():
    model = mlp()
    weight = model[0].weight.detach().clone()
    with hl.edit(
        model, {model[0]: hl.add(1.0), "0.weight": hl.zero(), (nn.Tanh, ":input"): lambda v: v * 2}
    ):
        result = model(X)
    expected = model[2](torch.tanh(((model[0].bias.expand(5, 4)) + 1) * 2))
    assert torch.equal(result, expected)
    assert torch.equal(model[0].weight, weight)
    assert_clean(model)


def test_two_entries_that_meet_at_one_place_both_apply_in_order():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.edit(model, {"*": hl.add(1.0), "1": hl.scale(10.0)}):
        assert model(torch.ones(1)) == 30
    with hl.edit(model, {"1": hl.scale(10.0), "*": hl.add(1.0)}):
        assert model(torch.ones(1)) == 21


def test_a_place_named_twice_in_a_list_is_edited_once():
    model = nn.Sequential(nn.Identity())
    model.add_module("alias", model[0])
    with hl.edit(model, ["0", "0", "alias", nn.Identity], hl.scale(2.0)):
        assert model[0](torch.ones(1)) == 2


# -- functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda v: v[:, :2], r"It was \(5, 4\) float32 on cpu, now \(5, 2\) float32 on cpu"),
        (lambda v: v.double(), r"float32 on cpu.*float64 on cpu"),
        (lambda v: v.to("meta"), r"float32 on cpu.*float32 on meta"),
        (
            lambda v: (v, v),
            r"given a Tensor and returned a tuple\..*\[0\] was no tensor, now .*\[1\] was",
        ),
        (lambda v: 3.0, r"returned a float\. It was .*, now no tensor"),
        (lambda v: None, "returned None.*hookline.hook"),
    ],
)
def test_what_a_function_returns_must_fit(function, told):
    model = mlp()
    for where in ("0", "1:input"):
        with pytest.raises(hl.ChangeError, match=told) as caught:
            with hl.edit(model, where, function):
                model(X)
        assert f"'{where}'" in str(caught.value)
    assert_clean(model)


def test_what_a_function_returns_for_a_nested_value_must_fit_part_by_part():
    model = nn.Sequential(nn.LSTM(2, 3))
    x = torch.ones(4, 1, 2)
    with pytest.raises(hl.ChangeError, match=r"tuple\. \[1\]\[0\] was \(1, 1, 3\).*\(3,\)"):
        with hl.edit(model, "0", lambda v: (v[0], (v[1][0].flatten(), v[1][1]))):
            model(x)
    with pytest.raises(
        hl.ChangeError, match=r"\[1\]\[0\] was .*, now no tensor.*Keep the value's structure"
    ):
        with hl.edit(model, "0", lambda v: (v[0], v[1][0])):
            model(x)
    with hl.edit(model, "0", lambda v: (v[0] * 0, v[1])):
        assert model(x)[0].abs().sum() == 0


def test_a_function_may_change_what_is_no_tensor():
    model = Giving(lambda: ("text", 3, torch.ones(1)))
    with hl.edit(model, "", lambda v: ("other", 4, v[2])):
        assert model()[:2] == ("other", 4)
    with hl.edit(model, "[1]", lambda n: n + 1):
        assert model()[1] == 4


def test_a_function_gets_the_call_only_as_a_second_required_parameter():
    model = mlp()
    seen = []

    def wants(value, call):
        seen.append(call)
        return value

    def defaults(value, other=None):
        assert other is None
        return value

    class Bound:
        def method(self, value, call):
            seen.append(call)
            return value

        def __call__(self, value, call):
            seen.append(call)
            return value

    for function in (wants, Bound().method, Bound()):
        seen.clear()
        with hl.edit(model, "1:input", function):
            model(X)
            model(X)
        assert [call.index for call in seen] == [0, 1]
        assert seen[0].place == "1:input"
        assert seen[0].place.port == "input"
        assert seen[0].module is model[1]
        assert not seen[0].recomputed
        assert repr(seen[1]) == "Call('1:input', 1)"
    for function in (defaults, lambda *values: values[0], lambda value, **options: value):
        with hl.edit(model, "0", function):
            model(X)


def test_an_error_in_a_function_keeps_its_type_and_gains_the_place():
    model = mlp()
    plain = model(X)

    def fails(value):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        with hl.edit(model, "2:input", fails):
            model(X)
    assert caught.value.__notes__ == ["hookline: raised at the place '2:input'"]
    assert torch.equal(model(X), plain)
    assert_clean(model)


def test_an_edit_by_identity_changes_nothing():
    model = mlp()
    plain = model(X)
    plain.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    places = ["**", "*:input", "*:inputs", "*:grad_output", "*:grad_input"]
    with hl.edit(model, places, lambda value: value):
        x = X.clone().requires_grad_()
        result = model(x)
        result.sum().backward()
    assert torch.equal(result, plain)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert_clean(model)


# -- at -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at",
    [np.s_[:, 1], np.s_[1:3], 0, np.s_[..., -1], torch.tensor([0, 2]), [0, 3],
     X[:, 0] > 0, np.s_[:, [1, 3]], np.s_[1, 2]],
)  # fmt: skip
def test_at_changes_only_that_slice(at):
    model = mlp()

    def plain(value):
        value = value.clone()
        value[at] = value[at] * 2 + 1
        return value

    expected = by_hook(model, "0", plain, X)
    for change in (hl.scale(2.0) | hl.add(1.0), lambda piece: piece * 2 + 1):
        with hl.edit(model, "0", change, at=at):
            assert torch.equal(model(X), expected)


def test_at_takes_heads_and_last_token():
    model = nn.Identity()
    x = torch.randn(2, 5, 12)
    with hl.edit(model, "", hl.zero(), at=hl.heads(1, 3, of=4)):
        result = model(x).view(2, 5, 4, 3)
    assert result[:, :, [1, 3]].abs().sum() == 0
    assert torch.equal(result[:, :, [0, 2]], x.view(2, 5, 4, 3)[:, :, [0, 2]])
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
    with hl.edit(model, "", torch.arange(12.0), at=hl.last_token(mask)):
        result = model(x)
    expected = x.clone()
    expected[0, 1] = expected[1, 4] = torch.arange(12.0)
    assert torch.equal(result, expected)


def test_at_is_differentiable_on_both_sides_of_the_cut():
    model = nn.Identity()
    x = torch.randn(4, 3, requires_grad=True)
    with hl.edit(model, "", hl.scale(5.0), at=np.s_[:, 1]):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 5.0, 1.0]).expand(4, 3))


def test_at_works_on_gradients_and_parts_and_parameters():
    model = mlp()
    with hl.capture(model, "0:grad_output") as record:
        model(X).sum().backward()
    plain = record["0:grad_output"].clone()
    with hl.edit(model, "0:grad_output", hl.zero(), at=np.s_[:, 0]):
        with hl.capture(model, "0:grad_output") as record:
            model(X).sum().backward()
    plain[:, 0] = 0
    assert torch.equal(record["0:grad_output"], plain)
    lstm = nn.LSTM(2, 3)
    with hl.edit(lstm, "[1][0]", hl.zero(), at=np.s_[..., 0]):
        _, (h, _) = lstm(torch.ones(4, 1, 2))
    assert h[..., 0].abs().sum() == 0
    assert h[..., 1:].abs().sum() > 0
    weight = model[0].weight.detach().clone()
    with hl.edit(model, "0.weight", hl.zero(), at=0):
        assert model[0].weight[0].abs().sum() == 0
        assert torch.equal(model[0].weight[1:], weight[1:])
    assert torch.equal(model[0].weight, weight)


def test_a_function_as_at_cannot_be_written_to():
    model = mlp()
    with pytest.raises(hl.ChangeError, match="only be read from"):
        with hl.edit(model, "0", hl.zero(), at=lambda value: value[0]):
            model(X)


def test_what_does_not_fit_the_slice_shows_both_sides():
    model = mlp()
    with pytest.raises(hl.ChangeError, match=r"\(4,\).*\(5,\)"):
        with hl.edit(model, "0", hl.add(torch.ones(4)), at=np.s_[:, 1]):
            model(X)


# -- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "applied"),
    [
        (0, {0}),
        (2, {2}),
        (slice(None), {0, 1, 2, 3, 4}),
        (slice(2, None), {2, 3, 4}),
        (slice(1, 4), {1, 2, 3}),
        (slice(None, None, 2), {0, 2, 4}),
        (slice(1, None, 2), {1, 3}),
        ({0, 3}, {0, 3}),
        ([4], {4}),
        (range(1, 3), {1, 2}),
        (np.int64(1), {1}),
        (frozenset([1, 3]), {1, 3}),
    ],
)
@pytest.mark.parametrize("port", ["", ":input"])
def test_calls_says_which_calls_are_changed(calls, applied, port):
    model = nn.Sequential(nn.Identity())
    with hl.edit(model, "0" + port, hl.add(1.0), calls=calls):
        changed = {n for n in range(5) if model(torch.zeros(1)).item() == 1}
    assert changed == applied
    assert_clean(model)


@pytest.mark.parametrize(
    "calls", [-1, slice(-1, None), slice(None, -2), slice(0, 5, 0), slice(5, 0, -1), {-1}, "0", 1.5]
)
def test_calls_that_make_no_sense_are_refused_before_the_forward(calls):
    with pytest.raises((hl.ChangeError, TypeError), match="calls"):
        with hl.edit(nn.Identity(), "", hl.add(1.0), calls=calls):
            raise AssertionError("entered")


def test_calls_hold_for_gradients_too():
    model = mlp()
    with hl.edit(model, "0:grad_output", hl.zero(), calls=1):
        model(X).sum().backward()
        first = model[0].weight.grad.clone()
        model(X).sum().backward()
        assert torch.equal(model[0].weight.grad, first)
        model(X).sum().backward()
        assert torch.allclose(model[0].weight.grad, first * 2)


def test_calls_that_never_came_are_told_at_exit():
    model = mlp()
    with pytest.raises(hl.NeverFired, match=r"'0'.*not at call 3: .*called 1×, counted from 0"):
        with hl.edit(model, "0", hl.zero(), calls=3):
            model(X)


def test_each_place_counts_its_own_calls():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.edit(model, "*", hl.add(1.0), calls=0):
        model[1](torch.zeros(1))
        assert model(torch.zeros(1)) == 1


# -- firing, order ------------------------------------------------------------------------------


def test_an_edit_that_never_applied_raises_at_exit():
    model = mlp()
    with pytest.raises(hl.NeverFired, match="Nothing happened at '0'"):
        with hl.edit(model, "0", hl.zero()):
            pass
    with pytest.raises(hl.NeverFired, match="'0:grad_output'"):
        with hl.edit(model, "0:grad_output", hl.zero()):
            model(X)
    with pytest.raises(hl.NeverFired, match="require grad"):
        with torch.no_grad(), hl.edit(model, "0:grad_output", hl.zero()):
            model(X)


def test_of_a_type_one_match_must_be_edited():
    model = OneOfTwo()
    with hl.edit(model, nn.Linear, hl.zero()):
        model(X)
    with pytest.raises(hl.NeverFired, match="'unused'"):
        with hl.edit(model, ["used", "unused"], hl.zero()):
            model(X)


def test_edits_stack_in_the_order_they_were_entered():
    model = nn.Sequential(nn.Identity())
    for port in ("0", "0:input"):
        with hl.edit(model, port, hl.add(1.0)), hl.edit(model, port, hl.scale(10.0)):
            assert model(torch.ones(1)) == 20
        with hl.edit(model, port, hl.scale(10.0)), hl.edit(model, port, hl.add(1.0)):
            assert model(torch.ones(1)) == 11


def test_gradient_edits_stack_in_the_order_they_were_entered():
    model = mlp()
    with hl.capture(model, "1:grad_output") as record:
        with hl.edit(model, "1:grad_output", hl.add(1.0)):
            with hl.edit(model, "1:grad_output", hl.scale(10.0)):
                with hl.capture(model, "1:grad_output") as inner:
                    model(X).sum().backward()
    plain = record["1:grad_output"]
    assert torch.allclose(inner["1:grad_output"], (plain + 1) * 10)


def test_a_capture_inside_an_edit_sees_the_change_and_one_outside_does_not():
    model = mlp()
    plain = model[0](X)
    with hl.capture(model, "0", "1:input") as outer, hl.edit(model, "0", hl.scale(2.0)):
        with hl.capture(model, "0", "1:input") as inner:
            model(X)
    assert torch.equal(outer["0"], plain)
    assert torch.equal(inner["0"], plain * 2)
    assert torch.equal(outer["1:input"], plain * 2)
    with hl.capture(model, "1:input") as outer, hl.edit(model, "1:input", hl.scale(2.0)):
        with hl.capture(model, "1:input") as inner:
            model(X)
    assert torch.equal(outer["1:input"], plain)
    assert torch.equal(inner["1:input"], plain * 2)


def test_edited_activations_give_the_gradients_of_the_edited_computation():
    model = mlp()
    with hl.edit(model, "0", hl.scale(2.0)):
        model(X).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model[2](torch.tanh(model[0](X) * 2)).sum().backward()
    assert all(torch.allclose(g, p.grad) for g, p in zip(got, model.parameters(), strict=True))


def test_a_plain_tensor_can_stand_where_the_model_stands():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with hl.edit(y, ":grad", hl.scale(10.0)), hl.capture(y, ":grad") as record:
        (y * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 60.0))
    assert torch.equal(record[":grad"], torch.full((3,), 30.0))
    assert not y._backward_hooks


def test_parameter_gradients_are_edited_before_they_accumulate():
    model = nn.Linear(3, 1)
    x = torch.full((8, 3), 10.0)
    model(x).backward(torch.full((8, 1), 1.5))
    assert model.bias.grad == 12
    with hl.edit(model, "bias:grad", hl.add(0.5)):
        model(x).backward(torch.full((8, 1), 1.5))
    assert model.bias.grad == 12 + 12.5
    assert_clean(model)


def test_a_gradient_edit_on_one_branch_leaves_the_sibling_right():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.left(x) + self.right(x)

    model = Branches()
    model(X).pow(2).sum().backward()
    right = model.right.weight.grad.clone()
    model.zero_grad()
    with hl.edit(model, "left:grad_output", lambda g: g.mul_(0)):
        model(X).pow(2).sum().backward()
    assert model.left.weight.grad.abs().sum() == 0
    assert torch.equal(model.right.weight.grad, right)


def test_a_slice_that_is_empty_changes_nothing_and_is_told():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 12)), torch.ones(2, 3)
    with pytest.raises(hl.NeverFired, match="is empty"):
        with hl.edit(model, "0", hl.zero(), at=np.s_[:, 10:]):
            model(x)
    with hl.edit(model, "*", hl.zero(), at=np.s_[:, 10:]):  # of several, one has it
        assert not model(x)[:, 10:].any()


def test_a_patch_knows_whether_its_record_holds_slices():
    model = nn.Sequential(nn.Identity())
    with hl.capture(model, "0", at=np.s_[:, -1]) as sliced:
        model(torch.rand(4, 5, 4))
    with pytest.raises(hl.ChangeError, match="does not broadcast"):
        with hl.edit(model, "0", hl.patch(sliced), at=np.s_[:, -1]):
            model(torch.zeros(2, 5, 4))
    with hl.capture(model, "0") as whole:
        model(torch.ones(1, 5, 4))
    with hl.edit(model, "0", hl.patch(whole), at=np.s_[:, -1]):
        changed = model(torch.zeros(8, 5, 4))
    assert changed.sum() == changed[:, -1].sum() == 32


def test_a_patch_puts_the_last_call_in_at_that_call():
    model = nn.Sequential(nn.Identity())
    for options in ({}, {"dtype": torch.float32}):
        with hl.capture(model, "0", keep="last", **options) as record:
            for n in range(3):
                model(torch.tensor([float(n)]))
        with hl.edit(model, "0", hl.patch(record), calls=2):
            assert [model(torch.tensor([-1.0])).item() for _ in range(3)] == [-1, -1, 2]
        with pytest.raises(hl.NotCaptured, match="0 values of that call"):
            with hl.edit(model, "0", hl.patch(record)):
                model(torch.tensor([-1.0]))


@pytest.mark.parametrize("calls", [[1], (1,), {1}, range(1, 2), np.array([1]), torch.tensor([1]),
                                   1, np.int64(1), torch.tensor(1), slice(1, 2)])  # fmt: skip
def test_calls_are_given_in_any_way_that_counts(calls):
    model = nn.Sequential(nn.Identity())
    with hl.edit(model, "0", hl.zero(), calls=calls):
        assert [model(torch.ones(1)).item() for _ in range(3)] == [1, 0, 1]


class TensorOrPair(nn.Module):
    """A tensor, or with `extra` a tuple."""

    def forward(self, x, extra=None):
        return x * 2 if extra is None else (x * 3, extra)


@pytest.mark.parametrize("where", ["[0]", ":inputs[extra]"])
def test_an_edit_of_some_calls_leaves_the_others_alone_that_have_no_such_part(where):
    model, x = TensorOrPair(), torch.ones(2)
    with hl.edit(model, where, hl.zero(), calls=slice(1, None)):
        assert torch.equal(model(x), x * 2)
        changed = model(x, x * 5)
    assert not changed[0 if where == "[0]" else 1].any()
    with pytest.raises(hl.PlaceError, match="does not fit"), hl.edit(model, where, hl.zero()):
        model(x)
    assert_clean(model)


def test_a_gradient_edit_of_some_calls_leaves_the_others_alone_that_have_another_structure():
    model, x = TensorOrPair(), torch.ones(2, requires_grad=True)
    with hl.edit(model, ":grad_output", hl.scale(10.0), calls=0):
        (model(x) + model(x, x * 5)[0]).sum().backward()
    assert x.grad.tolist() == [23, 23]
    x.grad = None
    with hl.edit(model, ":grad_output[0]", hl.scale(10.0), calls=1):
        (model(x) + model(x, x * 5)[0]).sum().backward()
    assert x.grad.tolist() == [32, 32]


@pytest.mark.parametrize("verb", [hl.edit, hl.hook])
def test_a_function_with_the_arguments_of_torchs_own_hooks_is_refused_at_once(verb):
    model = nn.Sequential(nn.Linear(2, 2))
    for function in (lambda module, args, output: output, lambda m, args, kwargs, output: output):
        with pytest.raises(TypeError, match=r"needs [34] arguments.*torch's own hooks"):
            verb(model, "0", function)
    assert not hl.attached(model)
