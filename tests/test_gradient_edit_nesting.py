"""Nested edits and captures of gradients: the order in which they act."""

import contextlib

import pytest
import torch
from models import EndsInLinear, Giving
from oracles import assert_clean, weigh
from torch import nn

import hookline as hl

pytestmark = pytest.mark.usefixtures("seeded")

PLACES = {
    "output": (lambda: nn.Linear(2, 2), ":grad_output", (3, 2)),
    "output that is a view": (lambda: nn.Linear(2, 2), ":grad_output", (1, 3, 2)),
    "output of a block that is a view": (lambda: EndsInLinear(2), ":grad_output", (1, 3, 2)),
    "output that is a view of the input": (nn.Flatten, ":grad_output", (1, 3, 2)),
    "output of a Sequential": (lambda: nn.Sequential(nn.Linear(2, 2)), ":grad_output", (1, 3, 2)),
    "input": (lambda: nn.Linear(2, 2), ":grad_input", (3, 2)),
    "inputs": (lambda: nn.Linear(2, 2), ":grad_inputs[input]", (3, 2)),
    "input of a view": (nn.Flatten, ":grad_input", (1, 3, 2)),
    "parameter": (lambda: nn.Linear(2, 2), "weight:grad", (3, 2)),
}


def layered(model, place, layers, backward):
    """Enter the layers, outermost first; the gradients that its captures have read."""
    records = []
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if layer == "capture":
                records.append(stack.enter_context(hl.capture(model, place)))
            else:
                stack.enter_context(hl.edit(model, place, layer))
        backward()
    return [record[place] for record in records]


@pytest.mark.parametrize("kind", PLACES)
def test_a_capture_sees_the_edits_that_were_entered_before_it(kind):
    make, place, shape = PLACES[kind]
    model, leaf = make(), torch.randn(shape, requires_grad=True)

    def backward():
        weigh(model(leaf * 1)).backward()

    (original,) = layered(model, place, ["capture"], backward)
    layers = ["capture", lambda g: g + 1, "capture", lambda g: g * 10, "capture"]
    outer, middle, inner = layered(model, place, layers, backward)
    torch.testing.assert_close(outer, original)
    torch.testing.assert_close(middle, original + 1)
    torch.testing.assert_close(inner, (original + 1) * 10)
    assert_clean(model)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("reverse", [False, True])
def test_edits_stack_in_the_order_of_entering(kind, reverse):
    make, place, shape = PLACES[kind]
    model, leaf = make(), torch.randn(shape, requires_grad=True)
    watched = model.weight if place == "weight:grad" else leaf

    def backward():
        leaf.grad = None
        model.zero_grad()
        weigh(model(leaf * 1)).backward()
        return watched.grad.clone()

    steps = [lambda g: g + 1, lambda g: g * 10]
    steps = steps[::-1] if reverse else steps
    with hl.edit(model, place, steps[0]), hl.edit(model, place, steps[1]):
        nested = backward()
    with hl.edit(model, place, lambda g: steps[1](steps[0](g))):
        at_once = backward()
    torch.testing.assert_close(nested, at_once)
    assert not torch.allclose(nested, backward())


def test_a_plain_tensor_nests_like_a_place():
    leaf = torch.ones(2, requires_grad=True)
    y = leaf * 1
    layers = ["capture", lambda g: g + 1, "capture", lambda g: g * 10, "capture"]
    found = layered(y, ":grad", layers, lambda: y.sum().backward())
    assert [g.tolist() for g in found] == [[1, 1], [2, 2], [20, 20]]
    assert leaf.grad.tolist() == [20, 20]
    assert not y._backward_hooks


def test_a_module_that_returns_its_input_nests_like_any_other_under_an_edit():
    module, leaf = nn.Identity(), torch.ones(2, requires_grad=True)
    with hl.edit(module, ":grad_output", lambda g: g + 1):
        with hl.capture(module, ":grad_output") as record:
            with hl.edit(module, ":grad_output", lambda g: g * 10):
                x = leaf * 1
                (module(x) + 7 * x).sum().backward()
    assert record[":grad_output"].tolist() == [2, 2]
    assert leaf.grad.tolist() == [27, 27]


@pytest.mark.parametrize("edit_first", [False, True])
def test_what_flows_into_an_output_that_is_the_input_is_not_what_an_edit_of_that_made(edit_first):
    module, leaf = Giving(lambda x: (x * 3, x)), torch.ones(1, requires_grad=True)
    capture = hl.capture(module, ":grad_output")
    verbs = [hl.edit(module, ":grad_input", hl.scale(10.0)), capture]
    with contextlib.ExitStack() as stack:
        for verb in verbs if edit_first else verbs[::-1]:
            stack.enter_context(verb)
        first, second = module(leaf * 1)
        (first * 5 + second * 7).sum().backward()
    assert leaf.grad.item() == (5 * 3 + 7) * 10
    assert capture.record[":grad_output[0]"].item() == 5
    with pytest.raises(hl.GradientNotAvailable):
        capture.record[":grad_output[1]"]


def test_an_output_that_is_the_input_is_edited_at_both_ports():
    module, leaf = Giving(lambda x: (x * 3, x)), torch.ones(1, requires_grad=True)
    changes = {":grad_input": hl.scale(10.0), ":grad_output[1]": hl.scale(2.0)}
    with hl.edit(module, changes):
        first, second = module(leaf * 1)
        (first * 5 + second * 7).sum().backward()
    assert leaf.grad.item() == (5 * 3 + 7 * 2) * 10


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
@pytest.mark.parametrize("edit_first", [False, True])
def test_what_flows_into_a_child_is_what_the_parents_edit_made_of_it(shape, edit_first):
    model = nn.Sequential(nn.Linear(2, 2))  # its output is its child's, the same tensor
    verbs = [hl.edit(model, ":grad_output", hl.scale(10.0)), hl.capture(model, "0:grad_output")]
    capture = verbs[1]
    with contextlib.ExitStack() as stack:
        for verb in verbs if edit_first else verbs[::-1]:
            stack.enter_context(verb)
        model(torch.ones(shape)).sum().backward()
    assert torch.equal(capture.record["0:grad_output"], torch.full(shape, 10.0))


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
@pytest.mark.parametrize("edit_first", [False, True])
def test_what_flows_into_a_parent_is_before_its_childs_edit(shape, edit_first):
    model = nn.Sequential(nn.Linear(2, 2))
    verbs = [hl.edit(model, "0:grad_output", hl.scale(10.0)), hl.capture(model, ":grad_output")]
    capture = verbs[1]
    with contextlib.ExitStack() as stack:
        for verb in verbs if edit_first else verbs[::-1]:
            stack.enter_context(verb)
        model(torch.ones(shape)).sum().backward()
    assert torch.equal(capture.record[":grad_output"], torch.ones(shape))


@pytest.mark.parametrize("edit_first", [False, True])
@pytest.mark.parametrize(("edited_at", "factor"), [("", 1), ("0", 10)])
def test_the_inputs_of_parent_and_child_are_two_places(edit_first, edited_at, factor):
    model, leaf = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True)
    captured_at = "0" if edited_at == "" else ""
    verbs = [
        hl.edit(model, f"{edited_at}:grad_input", hl.scale(10.0)),
        hl.capture(model, f"{captured_at}:grad_input"),
    ]
    capture = verbs[1]
    with contextlib.ExitStack() as stack:
        for verb in verbs if edit_first else verbs[::-1]:
            stack.enter_context(verb)
        model(leaf).sum().backward()
    own = model[0].weight.sum(0, keepdim=True)
    torch.testing.assert_close(capture.record[f"{captured_at}:grad_input"], own * factor)
    torch.testing.assert_close(leaf.grad, own * 10)


@pytest.mark.parametrize("parent_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_edits_of_parent_and_child_apply_in_the_order_of_the_backward(parent_first, shape):
    model = nn.Sequential(nn.Linear(2, 2))
    parent = hl.edit(model, ":grad_output", lambda g: g + 1)
    child = hl.edit(model, "0:grad_output", lambda g: g * 10)
    first, second = (parent, child) if parent_first else (child, parent)
    with first, second:
        model(torch.ones(shape)).sum().backward()
    rows = torch.ones(shape).numel() / 2
    assert model[0].bias.grad.tolist() == [20 * rows, 20 * rows]
