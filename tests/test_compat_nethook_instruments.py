"""hookline.compat.nethook: InstrumentedModel, callbacks, and values and edits as attributes."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from models import Failing, Giving, InPlace, nested_sequence, small
from oracles import assert_clean, by_hand, hooks_left
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat import nethook

X = torch.linspace(-1, 1, 6).reshape(2, 3)


# -- InstrumentedModel ----------------------------------------------------------------------------


def linear(layer, x):
    """The output of a layer past its hooks."""
    return F.linear(x, layer.weight, layer.bias)


def test_a_layer_is_retained_at_each_run_before_its_edits():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", ablation=1.0)
        inst.retain_layer("0")
        assert inst.retained_layer("0") is None
        for n in range(3):
            assert torch.equal(inst(X + n), linear(model[2], torch.zeros(2, 4)))
            assert torch.equal(inst.retained_layer("0"), linear(model[0], X + n))
    assert_clean(model)


def test_an_instrumented_model_runs_as_the_model_does():
    model = Giving(lambda x, y=1, *, z=0: x * y + z)
    inst = nethook.InstrumentedModel(model)
    assert torch.equal(inst(X, 2, z=3), X * 2 + 3)
    assert inst.model is model
    assert inst.layer_names() == [""]
    assert nethook.InstrumentedModel(nested_sequence()).layer_names() == nethook.module_names(
        nested_sequence()
    )


def test_retained_values_are_detached_unless_asked_otherwise():
    model = InPlace()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layers(["lin"])
        inst.retain_layers(["relu"], detach=False)
        result = inst(X)
        assert not inst.retained_layer("lin").requires_grad
        assert torch.equal(inst.retained_layer("lin"), linear(model.lin, X))  # not the relu's
        assert inst.retained_layer("relu") is result
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layer("lin", detach=False)
        inst(X)
        with pytest.raises(hl.ValueChanged, match="retained layer 'lin'"):
            inst.retained_layer("lin")


def test_layers_can_be_given_an_alias():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layers([("0", "in"), "1", ("2", "out")])
        inst.edit_layer(("2", "out"), offset=1.0)
        result = inst(X)
        assert list(inst.retained_features()) == ["in", "1", "out"]
        assert torch.equal(inst.retained_layer("in"), linear(model[0], X))
        assert torch.equal(result, inst.retained_layer("out") + 1)
        inst.remove_edits(("2", "out"))
        assert torch.equal(inst(X), inst.retained_layer("out"))
        with pytest.raises(LookupError, match=r"'0'.*Retained are: 'in', '1', 'out'"):
            inst.retained_layer("0")
        with pytest.raises(ValueError, match=r"'1' was to be known as 'in'.*'0' already"):
            inst.retain_layer(("1", "in"))


def test_a_layer_may_have_several_aliases():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer(("0", "double"), lambda x: x * 2)
        inst.retain_layers(["0", ("0", "again")])
        inst(X)
        for alias in ("0", "again"):
            assert torch.equal(inst.retained_layer(alias), linear(model[0], X))
        inst.stop_retaining_layers([("0", "again")])
        assert list(inst.retained_features()) == ["0"]


def test_without_a_name_the_first_retained_layer_is_meant():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        with pytest.raises(LookupError, match=r"none.*retain_layer"):
            inst.retained_layer()
        inst.retain_layers(["1", "0"])
        inst(X)
        assert torch.equal(inst.retained_layer(), model[1](linear(model[0], X)))


def test_retained_values_can_be_cleared():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layers(["0", "2"])
        result = inst(X)
        assert inst.retained_layer("0", clear=True) is not None
        assert inst.retained_layer("0") is None
        found = inst.retained_features(clear=True)
        assert found["0"] is None
        assert torch.equal(found["2"], result)
        assert inst.retained_features() == {"0": None, "2": None}
        inst(X)
        assert inst.retained_layer("0") is not None


def test_what_is_retained_can_be_read_and_cleared_as_a_dict():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layers(["0", ("2", "last")])
        inst(X)
        assert list(inst._retained) == ["0", "last"]
        assert torch.equal(inst._retained["0"], linear(model[0], X))
        inst._retained["0"] = None
        assert inst._retained["0"] is None
        assert inst._retained["last"] is not None
        inst._retained["last"] = X
        assert inst.retained_layer("last") is X
        with pytest.raises(KeyError):
            _ = inst._retained["1"]
        with pytest.raises(KeyError, match="'1' was asked for"):
            inst.retained_layer("1")


def test_hooks_can_be_had_before_anything_is_asked_of_a_layer():
    model = nn.Sequential(nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        inst.add_hooks([("0", "in")])
        assert torch.equal(inst(X), X)
        inst.retain_layer(("0", "in"))
        inst(X)
        assert torch.equal(inst.retained_layer("in"), X)
        inst.stop_retaining_layers(["in"])
        inst.add_hooks([("0", "in")])
        inst.edit_layer(("0", "other"), ablation=1.0)
        inst.remove_edits("other")  # with the last edit the hook goes
        assert_clean(model)
        inst.remove_edits()
        inst.edit_layer(("0", "in"), offset=1.0)
        assert torch.equal(inst(X), X + 1)
    assert_clean(model)


def test_a_subclass_may_have_parameters_that_its_edits_use():
    """As in the search for what a generator cannot make: an offset is learnt at each layer."""

    class Adjusted(nethook.InstrumentedModel):
        def __init__(self, model):
            with torch.no_grad(), nethook.InstrumentedModel(model) as inst:
                inst.retain_layers(["0", "2"])
                inst(X)
                values = inst.retained_features()
            super().__init__(model)
            for n, (layer, value) in enumerate(values.items()):
                self.register_parameter(f"d{n}", nn.Parameter(torch.zeros_like(value[:1])))
                self.edit_layer(layer, add_adjustment, attr=f"d{n}")

    def add_adjustment(x, adjusted, attr):
        return x + getattr(adjusted, attr)

    model = small()
    result = model(X)
    adjusted = Adjusted(model)
    assert torch.equal(adjusted(X), result)
    with torch.no_grad():
        adjusted.d1 += 1
    assert torch.equal(adjusted(X), result + 1)
    adjusted(X).sum().backward()
    assert adjusted.d1.grad.tolist() == [[2, 2]]
    assert adjusted.d0.grad.any()
    copied = copy.deepcopy(adjusted)
    with torch.no_grad():
        copied.d1 -= 1
    assert torch.equal(copied(X), result)
    assert torch.equal(adjusted(X), result + 1)
    adjusted.close()
    copied.close()
    assert_clean(model)


def test_retaining_twice_keeps_the_value():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layer("0")
        inst(X)
        inst.retain_layer("0")
        assert inst.retained_layer("0") is not None


def test_layers_can_be_retained_no_longer():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layers(["0", "1"])
        inst.edit_layer("1", offset=1.0)
        inst.stop_retaining_layers(["0", "1", "2"])
        assert {name.partition(".")[0] for name in hooks_left(model)} == {"1"}
        result = inst(X)
        assert inst.retained_features() == {}
        assert torch.equal(result, linear(model[2], linear(model[0], X).relu() + 1))
        with pytest.raises(LookupError):
            inst.stop_retaining_layers(["3"])


def test_of_several_calls_an_instrumented_model_keeps_the_last_with_one_warning():
    model = small()
    inst = nethook.InstrumentedModel(model)
    inst.retain_layers(["0", "1"])
    for n in range(3):
        inst(X + n)
    with pytest.warns(hl.HooklineWarning, match="layer '0' was read: .*last call only") as caught:
        assert torch.equal(inst.retained_layer("0"), linear(model[0], X + 2))
    assert len(caught) == 1
    inst.retained_features()
    inst.close()


IMAGES = torch.linspace(-1, 1, 2 * 3 * 2 * 2).reshape(2, 3, 2, 2)

CHANNELS = torch.tensor([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"ablation": 1.0}, IMAGES * 0),
        ({"ablation": 0.25}, IMAGES * 0.75),
        ({"ablation": CHANNELS}, IMAGES * (1 - CHANNELS.view(1, 3, 1, 1))),
        ({"ablation": CHANNELS.numpy()}, IMAGES * (1 - CHANNELS.view(1, 3, 1, 1))),
        ({"ablation": CHANNELS.tolist()}, IMAGES * (1 - CHANNELS.view(1, 3, 1, 1))),
        ({"ablation": CHANNELS.double()}, IMAGES * (1 - CHANNELS.view(1, 3, 1, 1))),
        ({"ablation": 0.5, "replacement": 8.0}, IMAGES * 0.5 + 4),
        ({"replacement": IMAGES[0]}, IMAGES[:1].expand(2, 3, 2, 2)),
        (
            {"ablation": CHANNELS, "replacement": torch.ones(3, 2, 2)},
            IMAGES * (1 - CHANNELS.view(1, 3, 1, 1)) + CHANNELS.view(1, 3, 1, 1),
        ),
        ({"offset": CHANNELS}, IMAGES + CHANNELS.view(1, 3, 1, 1)),
        ({"ablation": 1, "offset": CHANNELS}, IMAGES * 0 + CHANNELS.view(1, 3, 1, 1)),
        ({"ablation": IMAGES}, IMAGES * (1 - IMAGES)),
    ],
)
def test_a_layer_is_edited_by_ablation_replacement_and_offset(arguments, expected):
    model = nn.Sequential(nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", **arguments)
        torch.testing.assert_close(inst(IMAGES), expected)
        inst.remove_edits()
        assert torch.equal(inst(IMAGES), IMAGES)
    assert_clean(model)


def test_the_older_form_gives_ablation_and_replacement_by_position():
    model = nn.Sequential(nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", 0.5, torch.full((3,), 4.0))
        assert torch.equal(inst(X), X * 0.5 + 2)
        inst.edit_layer("0", None, torch.full((3,), 4.0))  # None is the default, the whole
        assert torch.equal(inst(X), X * 0 + 4)
        inst.edit_layer("0", 0.5, None, 1.0)
        assert torch.equal(inst(X), X * 0.5 + 1)
        with pytest.raises(hl.ChangeError, match="and again ablation"):
            inst.edit_layer("0", 0.5, ablation=1.0)
        with pytest.raises(hl.ChangeError, match="2 arguments came by position"):
            inst.edit_layer("0", lambda x: x, 0.5)
        with pytest.raises(hl.ChangeError, match="1 arguments came by position"):
            inst.edit_layer("0", lambda x: x, rule=lambda x: x)
        with pytest.raises(hl.ChangeError, match="4 arguments came by position"):
            inst.edit_layer("0", 0.5, None, 1.0, 2.0)


def test_gradients_reach_the_tensors_of_an_edit():
    model, offset = nn.Sequential(nn.Identity()), torch.zeros(3, requires_grad=True)
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", offset=offset)
        (inst(X) * 3).sum().backward()
    assert offset.grad.tolist() == [6, 6, 6]


def test_further_calls_add_to_an_edit():
    model = nn.Sequential(nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", ablation=1.0)
        inst.edit_layer("0", offset=2.0)
        inst.edit_layer("0", replacement=3.0)
        assert torch.equal(inst(X), torch.full((2, 3), 5.0))
        inst.remove_edits("0", remove_replacement=False)
        assert torch.equal(inst(X), torch.full((2, 3), 3.0))
        inst.edit_layer("0", offset=2.0)
        inst.remove_edits(remove_offset=False)
        assert torch.equal(inst(X), X + 2)
        inst.remove_edits("0")
        assert torch.equal(inst(X), X)
        assert_clean(model)
        inst.remove_edits("0")
        inst.remove_edits("not there")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{"replacement": 3.0}, {"ablation": 1.0, "replacement": None}], X * 0),
        ([{"replacement": 3.0}, {"ablation": 0.5, "replacement": None}], X * 0.5),
        ([{"ablation": 0.5, "replacement": 4.0}, {"ablation": None}], X),
        (
            [{"ablation": 0.5, "replacement": 4.0}, {"ablation": None, "replacement": 2.0}],
            X * 0 + 2,
        ),
        ([{"ablation": 0.5}, {"ablation": None}, {"replacement": 2.0}], X * 0 + 2),
        ([{"ablation": 0.5, "offset": 1.0}, {"offset": None}], X * 0.5),
        ([{"ablation": 0.5, "offset": 1.0}, {"ablation": None}], X + 1),
        ([{"ablation": None, "replacement": None}], X),
        ([{"ablation": None, "replacement": 2.0}], X * 0 + 2),
        ([{"ablation": 0.5}, {"replacement": 4.0}], X * 0.5 + 2),
    ],
)
def test_what_is_given_as_none_is_cleared(calls, expected):
    model = nn.Sequential(nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        for arguments in calls:
            inst.edit_layer("0", **arguments)
        torch.testing.assert_close(inst(X), expected)
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", 1.0, 3.0)
        inst.edit_layer("0", 1.0, None)  # by position, as in the oldest form
        assert torch.equal(inst(X), X * 0)
    assert_clean(model)


def test_a_rule_is_told_what_was_given_as_none():
    model, seen = nn.Sequential(nn.Identity()), []
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", rule=lambda x, **more: seen.append(more), replacement=3.0)
        inst(X)
        inst.edit_layer("0", rule=lambda x, **more: seen.append(more), replacement=None)
        inst(X)
    assert seen == [{"name": "0", "replacement": 3.0}, {"name": "0", "replacement": None}]


def test_the_arguments_of_an_edit_can_be_read_and_written():
    model, mask = nn.Sequential(nn.Identity(), nn.Identity()), torch.tensor([0.0, 1.0, 0.5])
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer(("0", "in"), ablation=mask, replacement=None)
        assert inst._ablation["in"] is mask
        assert inst._replacement["in"] is None
        assert torch.equal(inst(X), X * (1 - mask))
        inst._replacement["in"] = 2.0
        assert torch.equal(inst(X), X * (1 - mask) + mask * 2)
        inst._ablation["in"] = None
        assert torch.equal(inst(X), X)
        inst.retain_layer("1")
        inst._ablation["1"] = 1.0  # a layer that is hooked can be edited, too
        assert not inst(X).any()
        inst.remove_edits()
        assert inst._ablation == {}
        assert torch.equal(inst(X), X)
    assert_clean(model)


def test_layers_can_be_edited_through_the_ablation_of_the_instrumented_model():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layers(["0", ("1", "last")])
        assert torch.equal(inst(X), X)
        inst.ablation["0"], inst.replacement["last"] = 0.5, 2.0
        assert torch.equal(inst(X), X * 0.5)
        inst.ablation["last"] = 1.0
        assert torch.equal(inst(X), X * 0 + 2)
        for layer in inst.ablation:
            inst.ablation[layer] = None
        assert torch.equal(inst(X), X)
        inst.ablation["0"] = 1.0
        inst.clear_edit()
        assert torch.equal(inst(X), X)
        with pytest.raises(LookupError, match="'4'"):
            inst.edit_layers(["4"])
    assert_clean(model)


def test_a_rule_gets_what_it_takes():
    model, seen = small(), []

    def rule(x, imodel, name, strength, **more):
        seen.append((imodel, name, more))
        return x * strength

    inst = nethook.InstrumentedModel(model)
    inst.edit_layer(("0", "in"), rule=rule, strength=2.0, extra=1)
    inst.edit_layer("2", lambda x: x + 1)
    result = inst(X)
    assert torch.equal(result, linear(model[2], (linear(model[0], X) * 2).relu()) + 1)
    assert seen == [(inst, "in", {"extra": 1})]
    inst.edit_layer(("0", "in"), rule=lambda x: None)  # looks only
    assert torch.equal(inst(X), linear(model[2], linear(model[0], X).relu()) + 1)
    inst.remove_edits("2", remove_offset=False)  # a rule goes as a whole
    assert torch.equal(inst(X), linear(model[2], linear(model[0], X).relu()) + 1)
    inst.close()
    assert_clean(model)


def test_an_edit_that_makes_no_sense_is_told():
    model = nn.Sequential(nn.Identity(), nn.LSTM(3, 3))
    with nethook.InstrumentedModel(model) as inst:
        with pytest.raises(hl.ChangeError, match="No argument was given"):
            inst.edit_layer("0")
        with pytest.raises(hl.ChangeError, match="strength was given"):
            inst.edit_layer("0", ablation=1.0, strength=2.0)
        assert_clean(model)
        inst.edit_layer("0", offset=torch.ones(5))
        with pytest.raises(hl.ChangeError, match=r"\(1, 5\).*\(2, 3\)"):
            inst(X)
        inst.remove_edits()
        inst.edit_layer("1", ablation=1.0)
        with pytest.raises(hl.SeveralTensors, match=r"'1'.*\[1\]\[0\]"):
            inst(X)


def test_the_only_tensor_of_a_nested_output_is_edited():
    model = nn.Sequential(Giving(lambda x: {"h": x, "n": 3}))
    with nethook.InstrumentedModel(model) as inst:
        inst.edit_layer("0", offset=1.0)
        assert torch.equal(inst(X)["h"], X + 1)
        assert inst(X)["n"] == 3


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ({"layer": "1"}, "1"),
        ({"layer": 1}, "1"),
        ({"first_layer": "1"}, "12"),
        ({"last_layer": 1}, "01"),
        ({"first_layer": 1, "last_layer": "2"}, "12"),
        ({"first_layer": None}, "012"),
    ],
)
def test_a_part_of_a_sequential_is_run(part, names):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    expected = X
    for name in names:
        expected = model.get_submodule(name)(expected)
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layer("1")
        assert torch.equal(inst(X, **part), expected)
        assert inst.retained_layer("1") is not None  # its hooks act
    assert model.forward.__func__ is nn.Sequential.forward


def test_a_nested_part_of_a_sequential_is_run():
    model = nested_sequence()
    inst = nethook.InstrumentedModel(model)
    h = inst(X, last_layer="inner.b")
    assert torch.equal(h, model.inner.b(model.inner.a(model.first(X))))
    assert torch.equal(inst(h, first_layer="inner.c"), model(X))
    with pytest.raises(ValueError, match=r"'inner.e'"):
        inst(X, layer="inner.e")


def test_another_model_gets_the_names_of_parts_as_its_own_arguments():
    model = Giving(lambda x, layer: x * layer)
    assert torch.equal(nethook.InstrumentedModel(model)(X, layer=2), X * 2)


def test_a_wrong_layer_leaves_nothing_behind():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        with pytest.raises(LookupError, match="'4'"):
            inst.retain_layers(["0", "1", "4"])
        with pytest.raises(LookupError):
            inst.retain_layers(["0", "0.weight"])
        with pytest.raises(LookupError):
            inst.edit_layer("4", ablation=1.0)
        assert_clean(model)
        assert inst.retained_features() == {}


def test_close_takes_all_away_and_it_can_be_used_again():
    model = small()
    inst = nethook.InstrumentedModel(model)
    inst.retain_layer("0")
    inst.edit_layer("1", ablation=1.0)
    inst(X)
    inst.close()
    inst.close()
    assert_clean(model)
    assert torch.equal(inst(X), model(X))
    with pytest.raises(LookupError, match="close"):
        inst.retained_layer("0")
    inst.retain_layer("0")
    inst(X)
    assert torch.equal(inst.retained_layer("0"), linear(model[0], X))
    inst.close()


def test_an_instrumented_model_is_closed_after_an_error_and_when_it_is_dropped():
    model = Failing(ValueError("no"))
    inst = nethook.InstrumentedModel(model)
    inst.retain_layers(["first", "second"])
    with pytest.raises(ValueError, match="no"), inst:
        inst(X)
    assert_clean(model)
    inst = nethook.InstrumentedModel(model)
    inst.retain_layer("first")
    gc.disable()
    try:
        del inst
        assert_clean(model)
    finally:
        gc.enable()


def test_a_copy_of_an_instrumented_model_retains_and_edits_as_it_does():
    inst = nethook.InstrumentedModel(small())
    inst.retain_layers([("0", "first"), "2"])
    inst.edit_layer("1", ablation=1.0)
    inst.edit_layer("2", rule=lambda x, strength: x * strength, strength=2.0)
    expected = inst(X)
    before = inst.retained_features()
    other = copy.deepcopy(inst)
    assert list(other.retained_features()) == ["first", "2"]
    for alias, value in before.items():
        assert torch.equal(other.retained_layer(alias), value)
    assert torch.equal(other(X + 1), expected)
    assert torch.equal(other.retained_layer("first"), linear(other.model[0], X + 1))
    assert torch.equal(inst.retained_layer("first"), before["first"])  # each has its own
    other.remove_edits()
    assert torch.equal(other(X), other.model(X))
    assert torch.equal(inst(X), expected)
    other.close()
    assert_clean(other.model)
    inst.retained_features()
    inst(X)
    assert inst.retained_layer("2") is not None
    inst.close()
    assert_clean(inst.model)


def test_a_retained_value_is_copied_with_its_protection():
    inst = nethook.InstrumentedModel(InPlace())
    inst.retain_layers(["lin", "relu"], detach=False)
    result = inst(X)
    other = copy.deepcopy(inst)
    assert torch.equal(other.retained_layer("relu"), result)
    with pytest.raises(hl.ValueChanged):  # by the ReLU, before it was copied
        other.retained_layer("lin")
    inst.close()
    other.close()


def test_what_comes_back_from_a_file_begins_without_hooks():
    inst = nethook.InstrumentedModel(small())
    inst.retain_layer("0")
    inst.edit_layer("1", ablation=1.0)
    inst(X)
    other = pickle.loads(pickle.dumps(inst))
    assert torch.equal(other(X), small_like(inst.model)(X))
    assert other.retained_features() == {}
    other.retain_layer("0")
    other(X)
    assert other.retained_layer("0") is not None
    assert list(inst.state_dict()) == [f"model.{name}" for name in inst.model.state_dict()]
    inst.close()
    other.close()


def small_like(model):
    """The same weights without hooks."""
    other = small()
    other.load_state_dict(model.state_dict())
    return other


def test_the_model_itself_can_be_retained():
    model = small()
    with nethook.InstrumentedModel(model) as inst:
        inst.retain_layer("")
        inst.remove_edits("0")
        result = inst(X)
        assert torch.equal(inst.retained_layer(""), result)


# -- Callbacks ------------------------------------------------------------------------------------


def test_callbacks_call_a_function_with_the_value_of_each_layer():
    model, seen = small(), []
    with nethook.Callbacks(model, ["2", "0"], lambda x, layer: seen.append((layer, x))):
        result = model(X)
    assert [layer for layer, _ in seen] == ["0", "2"]
    assert torch.equal(seen[0][1], model[0](X))
    assert seen[1][1] is result
    assert_clean(model)


def test_callbacks_are_called_in_backward_where_asked():
    model, forward, backward = small(), [], []
    with nethook.Callbacks(
        model,
        iter(["0", "2"]),
        lambda output: forward.append(output),
        backward=lambda grad, layer: backward.append((layer, grad)),
    ):
        model(X).square().sum().backward()
    leaf = model[0](X).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[2](leaf.relu()).square().sum(), leaf)
    assert len(forward) == 2
    assert [layer for layer, _ in backward] == ["2", "0"]
    torch.testing.assert_close(backward[1][1], expected)
    assert_clean(model)


def test_one_function_can_serve_both_ways_and_one_name_will_do():
    model, seen = nn.Sequential(OrderedDict(lin=nn.Linear(3, 4))), []
    with nethook.Callbacks(model, "lin", lambda value: seen.append(value.shape), backward=True):
        model(X).sum().backward()
    assert seen == [(2, 4), (2, 4)]


def test_callbacks_in_backward_only():
    model, seen = small(), []
    with nethook.Callbacks(model, ["0"], backward=lambda grad: seen.append(grad)):
        model(X).sum().backward()
    assert len(seen) == 1


def test_what_a_callback_returns_changes_nothing():
    model = small()
    other = copy.deepcopy(model)
    with nethook.Callbacks(model, ["0", "1"], lambda value: value * 0, backward=True):
        result = model(X)
        result.sum().backward()
    assert torch.equal(result, other(X))
    other(X).sum().backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)


def test_a_loss_can_be_made_of_what_a_callback_sees():
    model, penalties = small(), []
    with nethook.Callbacks(model, ["1"], lambda output: penalties.append(output.abs().sum())):
        (model(X).sum() * 0 + sum(penalties)).backward()
    assert torch.equal(model[0].bias.grad, (model[0](X) > 0).float().sum(0))


def test_callbacks_that_were_never_called_are_told():
    model = small()
    with pytest.raises(hl.NeverFired, match="'0'"):
        with nethook.Callbacks(model, ["0"], print):
            pass
    with pytest.raises(hl.NeverFired, match="'0:grad_output'"):
        with nethook.Callbacks(model, ["0"], backward=print):
            model(X)
    with pytest.raises(LookupError):
        nethook.Callbacks(model, ["0", "3"], print)
    with pytest.raises(TypeError, match="no function"):
        nethook.Callbacks(model, ["0"])
    assert_clean(model)


def test_an_error_in_a_callback_is_the_users_and_leaves_no_hook():
    model = small()

    def fail(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with nethook.Callbacks(model, ["0", "1"], fail, backward=True):
            model(X)
    assert_clean(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_callbacks_are_not_called_again_for_a_recomputation(reentrant):
    model, seen = small(), []
    with nethook.Callbacks(model, ["0"], lambda output: seen.append(output)):
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 1


# -- values and edits as attributes of the model --------------------------------------------------


def test_layers_are_retained_in_an_attribute_of_the_model():
    model = small()
    seen = by_hand(model, lambda m: m(X), ["0"])
    result, (expected,) = seen.result, seen.outputs["0"]
    nethook.retain_layers(model, ["0", ("2", "last")])
    assert model.retained == {"0": None, "last": None}
    assert torch.equal(model(X), result)
    assert torch.equal(model.retained["0"], expected)
    assert torch.equal(model.retained["last"], result)
    assert not model.retained["last"].requires_grad
    model(X), model(X + 1)  # the last one is kept, without a warning
    assert torch.equal(model.retained["0"], linear(model[0], X + 1))
    old = model.retained
    nethook.retain_layers(model, ["1"])
    model(X)
    assert torch.equal(model.retained["1"], expected.relu())
    assert torch.equal(old["0"], linear(model[0], X + 1))  # it acts no longer
    hl.attached(model).remove()
    assert_clean(model)
    with pytest.raises(LookupError, match="'4'"):
        nethook.retain_layers(model, ["0", "4"])
    assert_clean(model)


def test_layers_are_edited_through_attributes_of_the_model():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    nethook.edit_layers(model, ["0", ("1", "last")])
    assert model.ablation == model.replacement == {"0": None, "last": None}
    assert torch.equal(model(IMAGES), IMAGES)
    by_channel = CHANNELS.view(1, 3, 1, 1)
    model.ablation["0"] = CHANNELS
    assert torch.equal(model(IMAGES), IMAGES * (1 - by_channel))
    model.replacement["0"] = [1.0, 2.0, 3.0]
    replaced = IMAGES * (1 - by_channel) + torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1) * by_channel
    assert torch.equal(model(IMAGES), replaced)
    model.ablation["last"] = 0.5
    assert torch.equal(model(IMAGES), replaced * 0.5)
    nethook.clear_edit(model)
    assert torch.equal(model(IMAGES), IMAGES)
    model.ablation["0"] = 1.0
    nethook.edit_layers(model, ["1"])  # of the earlier call nothing is left
    assert list(model.ablation) == ["1"]
    assert torch.equal(model(IMAGES), IMAGES)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IMAGES), IMAGES)
    assert copied.ablation == {"1": None}
    hl.attached(model).remove()
    assert_clean(model)


def test_rows_and_columns_of_an_edit_are_fitted_by_max_pooling():
    model, mask = nn.Sequential(nn.Identity()), torch.zeros(1, 3, 4, 4)
    mask[0, 1, 3, 0] = 1.0
    nethook.edit_layers(model, ["0"])
    model.ablation["0"] = mask
    expected = IMAGES * (1 - F.adaptive_max_pool2d(mask, (2, 2)))
    assert torch.equal(model(IMAGES), expected)
    model.ablation["0"] = mask[0]
    assert torch.equal(model(IMAGES), expected)
    model.ablation["0"] = torch.ones(1, 3, 1, 1)
    assert not model(IMAGES).any()
    model.ablation["0"] = torch.ones(2)
    with pytest.raises(hl.ChangeError, match=r"\(1, 2, 1, 1\).*\(2, 3, 2, 2\).*each channel"):
        model(IMAGES)


@pytest.mark.parametrize("order", ["retain first", "edit first"])
def test_what_a_model_retains_is_what_its_edits_gave(order):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    calls = [nethook.retain_layers, nethook.edit_layers]
    for call in calls if order == "retain first" else calls[::-1]:
        call(model, ["0"])
    model.ablation["0"] = 0.5
    model(X)
    assert torch.equal(model.retained["0"], X * 0.5)


def test_edits_that_are_not_there_cannot_be_cleared():
    model = small()
    with pytest.raises(hl.ChangeError, match="edit_layers"):
        nethook.clear_edit(model)


def test_a_model_with_attributes_is_collected():
    model = small()
    nethook.retain_layers(model, ["0"])
    nethook.edit_layers(model, ["0"])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
