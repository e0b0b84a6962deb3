"""replace_module puts another module in the place of one, until the block ends."""

import copy

import pytest
import torch
from models import Blocks, mlp
from oracles import assert_clean
from torch import nn

import hookline as hl

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


def test_replace_module_puts_another_in_and_the_old_one_back():
    model = mlp()
    old, keys, plain = model[1], list(model.state_dict()), model(X)
    with hl.replace_module(model, "1", nn.ReLU()):
        assert torch.equal(model(X), model[2](torch.relu(model[0](X))))
        assert [name for name, _ in model.named_children()] == ["0", "1", "2"]
    assert model[1] is old
    assert list(model.state_dict()) == keys
    assert torch.equal(model(X), plain)
    assert_clean(model)


def test_replace_module_goes_wherever_the_old_one_is_used():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared), shared)
    with hl.replace_module(model, "0", nn.Identity()):
        assert shared not in set(model.modules())
        assert torch.equal(model(X), torch.tanh(X))
    assert model[0] is model[1][1] is model[2] is shared


def test_replace_module_takes_types_globs_and_factories():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    olds = [model[0], model[1][0]]
    made = []

    def wrap(old):
        made.append(old)
        return nn.Sequential(old, nn.ReLU())

    for where in (nn.Linear, ["0", "1.0"], [model[0], model[1][0]], lambda n, m: m in olds):
        made.clear()
        with hl.replace_module(model, where, wrap):
            assert made == olds
            model(X)
            assert isinstance(model[1][0][1], nn.ReLU)
        assert [model[0], model[1][0]] == olds


def test_replace_module_of_a_parent_and_its_child_is_undone_in_reverse():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
    parent, child = model[0], model[0][0]
    with hl.replace_module(model, ["0", "0.0"], lambda old: nn.Identity()):
        assert torch.equal(model(X), X)
    assert model[0] is parent
    assert parent[0] is child


def test_replace_module_is_undone_after_exceptions_also_of_the_factory():
    model = mlp()
    olds = list(model)
    with pytest.raises(ValueError, match="mine"):
        with hl.replace_module(model, "*", nn.Identity()):
            raise ValueError("mine")
    assert list(model) == olds

    def fails(old):
        if old is model_last:
            raise KeyError("factory")
        return nn.Identity()

    model_last = model[2]
    with pytest.raises(KeyError, match="factory"):
        with hl.replace_module(model, "*", fails):
            pass
    assert list(model) == olds
    with pytest.raises(hl.ChangeError, match="made by a function, is a int"):
        with hl.replace_module(model, "1", lambda old: 3):
            pass
    with pytest.raises(hl.ChangeError, match="is a NoneType"):
        hl.replace_module(model, "1", None).attach()
    assert list(model) == olds


def test_replace_module_refuses_the_model_itself_and_what_is_no_module():
    model = mlp()
    for where in ("", model, nn.Sequential):
        with pytest.raises(hl.PlaceError, match="no parent"):
            with hl.replace_module(model, where, nn.Identity()):
                pass
    for where in ("0.weight", "0:input", "0[0]"):
        with pytest.raises(hl.PlaceError, match="no module"):
            with hl.replace_module(model, where, nn.Identity()):
                pass
    with pytest.raises(hl.PlaceNotFound):
        with hl.replace_module(model, "7", nn.Identity()):
            pass


@pytest.mark.parametrize("kind", [nn.ReLU, nn.GELU, nn.Identity])  # ReLU(old) works in place
def test_replace_module_takes_no_class_of_torch_for_a_function_of_the_old_module(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    refused = pytest.raises(hl.ChangeError, match="a function that returns one")
    with refused, hl.replace_module(model, nn.Tanh, kind):
        pass
    with hl.replace_module(model, nn.Tanh, nn.Sequential):  # which is made of the old one
        assert isinstance(model[1], nn.Sequential)
    assert isinstance(model[1], nn.Tanh)
    assert_clean(model)


def test_replace_module_nests():
    model = mlp()
    old = model[1]
    with hl.replace_module(model, "1", nn.ReLU()):
        with hl.replace_module(model, "1", nn.Sigmoid()):
            assert isinstance(model[1], nn.Sigmoid)
        assert isinstance(model[1], nn.ReLU)
    assert model[1] is old


def test_replacements_may_be_removed_in_any_order():
    model = mlp()
    old = model[1]
    outer = hl.replace_module(model, "1", nn.ReLU()).attach()
    inner = hl.replace_module(model, "1", nn.Sigmoid()).attach()
    outer.remove()
    assert isinstance(model[1], nn.Sigmoid)
    inner.remove()
    assert model[1] is old


class KeepsItTwice(nn.Module):
    """Also keeps a module in a plain list, where torch does not see it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.hidden = [self.first]

    def forward(self, x):
        return self.second(self.hidden[0](x))


def test_replace_module_tells_that_the_model_went_on_with_the_old_one():
    model, x = KeepsItTwice(), torch.randn(1, 2)
    told = r"put at 'first'\. The model called the old one 2×.* nn\.ModuleList"
    with pytest.raises(hl.ChangeError, match=told):
        with hl.replace_module(model, "first", nn.Identity()):
            model(x), model(x)
    with hl.replace_module(model, "second", nn.Identity()):
        assert torch.equal(model(x), model.first(x))
    assert_clean(model)


def test_calls_of_a_replaced_module_by_others_than_the_model_are_no_error():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = [inner]

        def forward(self, x):
            return self.inner[0](x) * 2

    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    old, plain = model[0], model[0](x)
    with hl.replace_module(model, "0", Wrapper):
        assert torch.equal(model(x), (plain * 2).relu())
    with hl.replace_module(model, "0", lambda old: old):
        assert torch.equal(model(x), plain.relu())
    with hl.replace_module(model, "0", nn.Identity()):
        assert torch.equal(model(x), x.relu())
        assert torch.equal(old(x), plain)
        copied = copy.deepcopy(old)
    assert torch.equal(copied(x), plain)
    assert_clean(model)
    assert_clean(old)
    assert_clean(copied)


def test_replace_module_takes_containers():
    model = Blocks()
    old = model.layers
    with hl.replace_module(model, "layers", nn.ModuleList([nn.Identity()])):
        assert torch.equal(model(X), X)
    assert model.layers is old


def test_captures_and_edits_see_the_new_module():
    model = mlp()
    with hl.replace_module(model, "1", nn.ReLU()):
        with hl.edit(model, "1", hl.scale(2.0)), hl.capture(model, "1") as record:
            model(X)
    assert torch.equal(record["1"], torch.relu(model[0](X)) * 2)
    assert_clean(model)


def test_an_array_in_the_place_of_a_module_is_refused_as_what_it_is():
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(hl.ChangeError, match="is a ndarray"):
        hl.replace_module(model, "0", torch.ones(3).numpy()).attach()
    assert_clean(model)
