"""hookline.compat.nethook: recursive_copy, subsequences, and modules and parameters by name."""

from collections import OrderedDict

import pytest
import torch
from models import nested_sequence, small
from oracles import assert_clean
from torch import nn

from hookline.compat import nethook

X = torch.linspace(-1, 1, 6).reshape(2, 3)


# -- recursive_copy -------------------------------------------------------------------------------


def test_recursive_copy_without_options_is_the_value_itself():
    value = (X, {"a": X})
    assert nethook.recursive_copy(value) is value


def test_recursive_copy_keeps_the_structure():
    Pair = type("Pair", (tuple,), {})
    value = {"a": [X.clone(), (X.clone(), "text")], "b": OrderedDict(c=X.clone()), "n": None}
    copied = nethook.recursive_copy(value, clone=True)
    value["a"][0].zero_()
    value["b"]["c"].zero_()
    assert torch.equal(copied["a"][0], X)
    assert torch.equal(copied["b"]["c"], X)
    assert copied["a"][1][1] == "text"
    assert copied["n"] is None
    assert type(copied["b"]) is OrderedDict
    assert type(copied["a"][1]) is tuple
    assert type(nethook.recursive_copy(Pair((X,)), detach=True)) is Pair


def test_recursive_copy_detaches_and_clones():
    x = X.clone().requires_grad_()
    y = x * 2
    detached = nethook.recursive_copy((y,), detach=True)[0]
    assert not detached.requires_grad
    assert detached.data_ptr() == y.data_ptr()
    cloned = nethook.recursive_copy((y,), clone=True)[0]
    assert torch.equal(torch.autograd.grad(cloned.sum(), x)[0], torch.full((2, 3), 2.0))
    both = nethook.recursive_copy([y], clone=True, detach=True)[0]
    with torch.no_grad():
        y.zero_()
    assert torch.equal(both, X * 2)
    assert not both.requires_grad


def test_recursive_copy_that_retains_gradients_does_not_detach():
    x = X.clone().requires_grad_()
    for clone in (False, True):
        y = x * 2
        copied = nethook.recursive_copy((y,), clone=clone, detach=True, retain_grad=True)[0]
        (copied * 3).sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 3))


def test_recursive_copy_marks_the_originals_to_retain_their_gradients():
    x = X.clone().requires_grad_()
    y, plain, whole = x * 2, X.clone(), torch.arange(3)
    assert nethook.recursive_copy([y, plain, whole], retain_grad=True)[0] is y
    (y * plain).sum().backward()
    assert torch.equal(y.grad, X)
    assert torch.equal(plain.grad, X * 2)
    assert not whole.requires_grad


# -- subsequence ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({}, "first inner inner.a inner.b inner.c inner.d act last"),
        ({"first_layer": "act"}, "act last"),
        ({"last_layer": "inner"}, "first inner inner.a inner.b inner.c inner.d"),
        ({"first_layer": "act", "last_layer": "act"}, "act"),
        ({"after_layer": "inner"}, "act last"),
        ({"upto_layer": "inner"}, "first"),
        ({"after_layer": "first", "upto_layer": "act"}, "inner inner.a inner.b inner.c inner.d"),
        ({"after_layer": "inner.c", "upto_layer": "last"}, "inner inner.d act"),
        ({"first_layer": "inner", "upto_layer": "act"}, "inner inner.a inner.b inner.c inner.d"),
        ({"single_layer": "act"}, "act"),
        ({"single_layer": "inner.b"}, "inner inner.b"),
        ({"first_layer": "inner.c"}, "inner inner.c inner.d act last"),
        ({"after_layer": "inner.c"}, "inner inner.d act last"),
        ({"after_layer": "inner.d"}, "act last"),
        ({"last_layer": "inner.b"}, "first inner inner.a inner.b"),
        ({"upto_layer": "inner.b"}, "first inner inner.a"),
        ({"upto_layer": "inner.a"}, "first"),
        ({"first_layer": "inner.b", "last_layer": "inner.c"}, "inner inner.b inner.c"),
        ({"after_layer": "inner.a", "upto_layer": "inner.d"}, "inner inner.b inner.c"),
        ({"after_layer": "inner.a", "last_layer": "act"}, "inner inner.b inner.c inner.d act"),
        ({"after_layer": "first", "upto_layer": "inner"}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [False, True])
def test_a_subsequence_has_the_layers_between_its_ends(limits, names, share):
    model = nested_sequence().eval()
    part = nethook.subsequence(model, **limits, share_weights=share)
    assert [name for name in nethook.module_names(part) if name] == names.split()
    leaves = [name for name in names.split() if name != "inner"]
    expected = X
    for name in leaves:
        expected = model.get_submodule(name)(expected)
    assert torch.equal(part(X), expected)
    assert not part.training
    for name in leaves:
        assert (part.get_submodule(name) is model.get_submodule(name)) == share


def test_a_copied_subsequence_has_weights_of_its_own():
    model = nested_sequence()
    part = nethook.subsequence(model, last_layer="inner.a")
    nn.init.zeros_(part.inner.a.weight)
    assert model.inner.a.weight.any()
    assert part.training
    shared = nethook.subsequence(model, last_layer="inner.a", share_weights=True)
    assert shared.inner.a.weight is model.inner.a.weight


def test_tied_weights_stay_tied_in_a_copied_subsequence():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    part = nethook.subsequence(model, first_layer="0")
    assert part[0].weight is part[2].weight
    assert part[0].weight is not model[0].weight


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"first_layer": "frist"}, "'frist'.*Closest: 'first'"),
        ({"last_layer": "inner.e"}, "'inner.e'"),
        ({"first_layer": "first.x"}, "'first'.*Linear, not a Sequential"),
        ({"first_layer": "act", "last_layer": "first"}, "'act' comes after 'first'"),
        ({"first_layer": "act", "after_layer": "act"}, "first_layer='act' and after_layer='act'"),
        ({"last_layer": "act", "upto_layer": "act"}, "last_layer='act' and upto_layer='act'"),
        ({"single_layer": "act", "last_layer": "last"}, "single_layer='act'"),
    ],
)
def test_a_subsequence_that_cannot_be_is_told(limits, message):
    with pytest.raises(ValueError, match=message):
        nethook.subsequence(nested_sequence(), **limits)


def test_only_a_sequential_has_subsequences():
    with pytest.raises(ValueError, match="Linear, not a Sequential"):
        nethook.subsequence(nn.Linear(3, 3), first_layer="0")


def test_without_a_layer_the_subsequence_is_the_whole_of_any_module():
    model = nn.Linear(3, 3)
    assert nethook.subsequence(model, share_weights=True) is model
    copied = nethook.subsequence(model, first_layer=None)
    assert copied is not model
    assert torch.equal(copied(X), model(X))


# -- names ----------------------------------------------------------------------------------------


def test_set_requires_grad_takes_modules_and_tensors():
    model, tensor, parameter = small(), torch.zeros(2), nn.Parameter(torch.zeros(2))
    nethook.set_requires_grad(False, model, parameter)
    assert not any(p.requires_grad for p in (*model.parameters(), parameter))
    nethook.set_requires_grad(True, model[0], tensor)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    assert tensor.requires_grad
    with pytest.raises(TypeError, match="given a str"):
        nethook.set_requires_grad(False, model, "0")
    assert model[0].weight.requires_grad  # all of it, or nothing


def test_modules_and_parameters_are_found_by_name():
    model = nested_sequence()
    assert nethook.get_module(model, "inner.c") is model.inner.c
    assert nethook.get_module(model, "") is model
    assert nethook.get_parameter(model, "inner.c.bias") is model.inner.c.bias
    for find, name in [
        (nethook.get_module, "inner.e"),
        (nethook.get_module, "inner.c.bias"),
        (nethook.get_parameter, "inner.c"),
        (nethook.get_parameter, "inner.c.biass"),
        (nethook.get_parameter, "*.bias"),
    ]:
        with pytest.raises(LookupError):
            find(model, name)
    with pytest.raises(LookupError, match=r"Closest: 'inner.c.bias'"):
        nethook.get_parameter(model, "inner.c.biass")


def test_a_tied_parameter_is_found_by_both_names():
    model = small()
    model.add_module("head", nn.Linear(4, 2))
    model.head.weight = model[2].weight
    assert nethook.get_parameter(model, "head.weight") is model[2].weight


def test_a_containers_children_are_found_through_it():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    assert nethook.get_module(model, "blocks") is model["blocks"]
    assert nethook.get_module(model, "blocks.1") is model["blocks"][1]


def test_all_names_are_those_of_torch():
    model = nested_sequence()
    model.add_module("again", model.inner.a)
    assert nethook.module_names(model) == [name for name, _ in model.named_modules()]
    assert nethook.parameter_names(model) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", ["act", "inner.b"])
def test_a_module_is_replaced_for_good_also_at_the_top(name):
    model = nested_sequence()
    new = nn.Identity()
    assert nethook.replace_module(model, name, new) is None
    assert model.get_submodule(name) is new
    assert list(nethook.module_names(model)) == list(nethook.module_names(nested_sequence()))
    assert_clean(model)


def test_a_module_is_replaced_under_the_wrapper_that_was_left_out():
    model = nn.Module()
    model.module = nested_sequence()
    nethook.replace_module(model, "act", nn.Identity())
    assert isinstance(model.module.act, nn.Identity)
    assert list(model._modules) == ["module"]


def test_a_module_that_is_not_there_is_not_replaced():
    model = nested_sequence()
    with pytest.raises(LookupError):
        nethook.replace_module(model, "acts", nn.Identity())
    with pytest.raises(ValueError, match="parameter or buffer"):
        nethook.replace_module(model, "first.weight", nn.Identity())
    with pytest.raises(ValueError, match="model itself"):
        nethook.replace_module(model, "", nn.Identity())
    assert "acts" not in dict(model.named_children())
