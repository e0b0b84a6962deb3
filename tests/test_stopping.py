"""stop=True: the forward and the block end once every place has fired."""

import pytest
import torch
from models import OneOfTwo, Swallowing, small
from oracles import assert_clean, hooks_left
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10


@pytest.mark.parametrize("place", ["0", "1:input", "0:inputs", "2.weight"])
def test_stop_ends_the_forward_and_the_block_once_every_place_has_fired(place):
    model, ran = small(), []
    model[2].register_forward_hook(lambda m, a, o: ran.append("2"))
    with hl.capture(model, place, stop=True) as record:
        model(X)
        ran.append("block")
    assert ran == []
    assert len(record.calls(place)) == 1
    assert hooks_left(model) == ["2._forward_hooks"]


def test_stop_waits_for_the_last_place():
    model = small()
    with hl.capture(model, "0", "1", stop=True) as record:
        model(X)
    assert record.places() == ["0", "1"]
    with hl.capture(model, "0", stop=True, at=lambda v: v[:1]) as record:
        model(X)
    assert torch.equal(record["0"], model[0](X)[:1])
    assert_clean(model)


def test_stop_ends_the_block_only_if_it_was_reached():
    model = OneOfTwo()
    with hl.capture(model, "*", stop=True) as record:
        model(X)
        model(X)
    assert len(record.calls("used")) == 2


def test_stop_passes_except_exception_in_the_model():
    model = Swallowing(Exception)
    with hl.capture(model, "first", stop=True) as record:
        model(X)
        raise AssertionError("not reached")
    assert torch.equal(record["first"], model.first(X))
    assert_clean(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_stop_passes_checkpointing(reentrant):
    model = small()
    with hl.capture(model, "0", stop=True) as record:
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        raise AssertionError("not reached")
    assert torch.equal(record["0"], model[0](X))
    assert_clean(model)


def test_a_stop_that_the_model_swallows_is_told():
    model = Swallowing(BaseException)
    with pytest.raises(hl.NeverFired, match=r"stop=True.*except") as caught:
        with hl.capture(model, "first", stop=True) as record:
            model(X)
    assert caught.value.record is record
    assert torch.equal(record["first"], model.first(X))
    assert_clean(model)


def test_a_stop_ends_only_its_own_capture():
    model = small()
    with hl.capture(model, "1", stop=True) as outer:
        with hl.capture(model, "0", stop=True) as inner:
            model(X)
        assert inner.places() == ["0"]
        model(X)
        raise AssertionError("not reached")
    assert outer.places() == ["1"]
    with hl.capture(model, "0", stop=True) as outer:
        with hl.capture(model, "**") as inner:
            model(X)
        raise AssertionError("not reached")
    assert outer.places() == ["0"]
    assert_clean(model)


def test_a_stop_undoes_the_edits_inside():
    model = small()
    before = model[0].weight.detach().clone()
    with hl.capture(model, "0", stop=True) as record:
        with hl.edit(model, "0.weight", hl.zero()), hl.edit(model, "2", hl.zero()):
            model(X)
    assert torch.equal(record["0"], model[0].bias.expand(4, 4))
    assert torch.equal(model[0].weight, before)
    assert_clean(model)


def test_stop_can_be_entered_again():
    model = small()
    context = hl.capture(model, "0", stop=True)
    for shift in (0, 1):
        with context as record:
            model(X + shift)
            raise AssertionError("not reached")
        assert torch.equal(record["0"], model[0](X + shift))


def test_stop_is_refused_for_gradients_and_for_attachments():
    model = small()
    with pytest.raises(ValueError, match=r"stop=True.*gradient"):
        with hl.capture(model, "0", "0:grad_output", stop=True):
            pass
    context = hl.capture(model, "0", stop=True)
    with pytest.raises(ValueError, match=r"stop=True.*attach"):
        context.attach()
    with context:
        model(X)
    assert_clean(model)


def test_the_exception_of_the_block_survives_stop():
    model = small()
    with pytest.raises(ZeroDivisionError), hl.capture(model, "0", stop=True):
        raise ZeroDivisionError


def test_a_stop_is_swallowed_by_a_capture_that_was_removed_inside_its_block():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    context = hl.capture(model, "0", stop=True)
    with context as record:
        try:
            model(x)
        finally:
            context.remove()
    assert record["0"].shape == (1, 2)
    assert_clean(model)


def test_an_input_without_the_part_that_is_asked_for_does_not_end_the_forward():
    model, reached = nn.Sequential(nn.Identity(), nn.Identity()), []
    model[1].register_forward_hook(lambda *given: reached.append(1))
    with pytest.raises(hl.NeverFired), hl.capture(model, "0:inputs[nothing]", stop=True):
        model(torch.ones(2))
    assert reached


@pytest.mark.parametrize("place", ["0", "0:input"])
def test_a_value_that_the_slice_does_not_fit_does_not_end_the_forward(place):
    model, reached = nn.Sequential(nn.Identity(), nn.Identity()), []
    model[1].register_forward_hook(lambda *given: reached.append(1))
    with pytest.raises(hl.NeverFired), hl.capture(model, place, at=9, stop=True):
        model(torch.ones(2))
    assert reached
