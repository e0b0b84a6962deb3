"""Captured gradients of several calls and backwards, in threads and beside other hooks."""

import gc
import threading
import weakref

import pytest
import torch
from models import EndsInLinear, small
from oracles import (
    assert_clean,
    assert_exact_or_refused,
    cut,
    objects_alive,
    recorded,
    weigh,
)
from torch import nn

import hookline as hl

pytestmark = pytest.mark.usefixtures("seeded")


# -- calls and passes -----------------------------------------------------------------------------


def test_gradients_are_numbered_by_forward_call_then_by_pass():
    lin = nn.Linear(2, 2)
    with hl.capture(lin, ":grad_output", ":grad_input", "weight:grad") as record:
        xs = [torch.full((1, 2), float(n), requires_grad=True) for n in range(3)]
        ys = [lin(x) for x in xs]
        for factor in (1, 10):
            for n in (2, 0):
                (ys[n] * factor * (n + 1)).sum().backward(retain_graph=True)
    found = record.calls(":grad_output")
    assert [g if g is None else g[0, 0].item() for g in found] == [1, 10, None, 3, 30]
    assert [g is None for g in record.calls(":grad_input")] == [False, False, True, False, False]
    assert torch.equal(record[":grad_input", 3], record[":grad_output", 3] @ lin.weight)
    passes = [g[0, 0].item() for g in record.calls("weight:grad")]
    assert passes == [6, 0, 60, 0]  # by pass alone
    with pytest.raises(hl.SeveralCalls, match="5 of them"):
        record[":grad_output"]


def test_the_reason_of_a_call_without_gradient_is_its_own():
    lin, x = nn.Linear(2, 2), torch.ones(1, 2)
    with hl.capture(lin, ":grad_output") as record:
        y = lin(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        with torch.no_grad():
            lin(x)
        lin(x)
    assert [g is None for g in record.calls(":grad_output")] == [False, False, True, True]
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record[":grad_output", 2]
    with pytest.raises(hl.GradientNotAvailable, match="none arrived"):
        record[":grad_output", 3]


def test_a_shared_module_keeps_its_calls_apart():
    lin = nn.Linear(3, 3)
    model = nn.Sequential(lin, nn.Tanh(), lin)
    x = torch.randn(2, 3)
    last, _ = cut(lin, [torch.tanh(lin(x)).detach()], weigh)
    first, (at_input,) = cut(lin, [x], lambda y: weigh(lin(torch.tanh(y))))
    record = recorded(model, [x], weigh, "0:grad_output", "0:grad_input")
    assert torch.equal(record["0:grad_output", 0], first)
    assert torch.equal(record["2:grad_output", 1], last)
    assert torch.equal(record["0:grad_input", 0], at_input)


def test_one_module_on_one_tensor_twice_gives_each_calls_share():
    lin, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    with hl.capture(lin, ":grad_input") as record:
        (lin(x) + 10 * lin(x)).sum().backward()
    first, second = record.calls(":grad_input")
    torch.testing.assert_close(second, 10 * first)
    torch.testing.assert_close(first + second, x.grad)


def test_recursive_calls_are_numbered_by_completion():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            return x * 1 if depth == 0 else self(x, depth - 1) * 2 + x

    model, x = Recursive(), torch.ones(2, requires_grad=True)
    with hl.capture(model, ":grad_output", ":grad_input") as record:
        model(x, 2).sum().backward()
    assert [g[0].item() for g in record.calls(":grad_output")] == [4, 2, 1]
    assert [g[0].item() for g in record.calls(":grad_input")] == [4, 6, 7]


def test_a_recursive_call_that_failed_leaves_the_others_exact():
    class Trying(nn.Module):
        def forward(self, x, depth):
            if depth == 0:
                raise ValueError("too deep")
            try:
                return self(x * 3, depth - 1) * 5
            except ValueError:
                return x * 2

    model, x = Trying(), torch.ones(2, requires_grad=True)
    with hl.capture(model, ":grad_output", ":grad_input") as record:
        model(x, 2).sum().backward()
    assert [g[0].item() for g in record.calls(":grad_output")] == [5, 1]
    assert [g[0].item() for g in record.calls(":grad_input")] == [10, 30]
    assert x.grad.tolist() == [30, 30]
    assert_clean(model)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_the_first_or_last_of_several_gradients_can_be_kept(keep):
    lin = nn.Linear(2, 2)
    with hl.capture(lin, ":grad_output", keep=keep) as record:
        for n in range(3):
            (lin(torch.ones(1, 2)) * n).sum().backward()
    assert record[":grad_output"].tolist() == [[0, 0] if keep == "first" else [2, 2]]


def test_two_losses_give_two_passes():
    model, x = small(), torch.randn(2, 3)
    with hl.capture(model, "1:grad_output", "0.weight:grad") as record:
        y = model(x)
        y[:, 0].sum().backward(retain_graph=True)
        y[:, 1].sum().backward()
    for n in range(2):
        expected = model[2].weight[n].expand(2, 4)
        assert torch.equal(record["1:grad_output", n], expected)
    first, second = record.calls("0.weight:grad")
    torch.testing.assert_close(first + second, model[0].weight.grad)


# -- autograd.grad, double backward, parameters ---------------------------------------------------


def test_autograd_grad_with_regard_to_a_weight_gives_what_it_computes():
    lin, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    with hl.capture(lin, ":grad_output", ":grad_input", "weight:grad", "bias:grad") as record:
        (expected,) = torch.autograd.grad(weigh(lin(x)), lin.weight)
    assert torch.equal(record["weight:grad"], expected)
    assert torch.equal(record[":grad_output"], torch.tensor([[-1.0, 1.0]]))
    for place in (":grad_input", "bias:grad"):
        with pytest.raises(hl.GradientNotAvailable, match=r"autograd\.grad"):
            record[place]


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_autograd_grad_with_regard_to_an_output_or_an_input(shape):
    lin, x = nn.Linear(2, 2), torch.randn(shape, requires_grad=True)
    with hl.capture(lin, ":grad_output") as record:
        y = lin(x)
        (expected,) = torch.autograd.grad(weigh(y), y)
    assert torch.equal(record[":grad_output"], expected)
    with hl.capture(lin, ":grad_output", ":grad_input") as record:
        (expected,) = torch.autograd.grad(weigh(lin(x)), x)
    assert torch.equal(record[":grad_input"], expected)
    assert torch.equal(record[":grad_output"].flatten(), torch.linspace(-1, 1, x.numel()))


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
@pytest.mark.parametrize(
    "place", ["0:grad_input", "0:grad_output", "2:grad_input", "0.weight:grad"]
)
def test_a_captured_gradient_can_be_used_in_a_penalty(place, shape):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(shape, requires_grad=True)

    h = model[0](x)
    a = torch.tanh(h)
    loss = model[2](a).pow(2).sum()
    wanted = {"0:grad_input": x, "0:grad_output": h, "2:grad_input": a}.get(place, model[0].weight)
    (grad,) = torch.autograd.grad(loss, wanted, create_graph=True)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(grad.pow(2).sum(), parameters, allow_unused=True)

    with hl.capture(model, place) as record:
        loss = model(x).pow(2).sum()
        torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        found = record[place]
        got = torch.autograd.grad(found.pow(2).sum(), parameters, allow_unused=True)
    torch.testing.assert_close(found, grad)
    assert [g is None for g in got] == [g is None for g in expected]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other) if one is not None else None


def test_a_detached_gradient_of_a_differentiable_backward_is_detached():
    lin, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    with hl.capture(lin, ":grad_output", ":grad_input", detach=True) as record:
        torch.autograd.grad(lin(x).pow(2).sum(), x, create_graph=True)
    assert not record[":grad_output"].requires_grad
    assert not record[":grad_input"].requires_grad


def test_a_parameters_gradient_is_this_backwards_share():
    lin, x = nn.Linear(2, 2), torch.randn(3, 2)
    lin.weight.grad = torch.full((2, 2), 100.0)
    with hl.capture(lin, "weight:grad", "bias:grad") as record:
        (lin(x) + lin(x)).sum().backward()
    (expected,) = torch.autograd.grad((lin(x) + lin(x)).sum(), lin.weight)
    assert torch.equal(record["weight:grad"], expected)
    assert torch.equal(lin.weight.grad, 100 + expected)
    assert record["bias:grad"].tolist() == [6, 6]
    assert_clean(lin)


def test_a_tied_parameter_has_one_gradient_under_both_names():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "out": nn.Linear(3, 4, bias=False)})
    model["out"].weight = model["embed"].weight
    with hl.capture(model, "**.weight:grad") as record:
        model["out"](model["embed"](torch.tensor([0, 2]))).pow(2).sum().backward()
    assert torch.equal(record["embed.weight:grad"], model["embed"].weight.grad)
    assert torch.equal(record["out.weight:grad"], model["embed"].weight.grad)


def test_a_frozen_parameter_says_that_it_does_not_require_grad():
    model = small()
    model[0].weight.requires_grad_(False)
    with hl.capture(model, "0.weight:grad", "0.bias:grad") as record:
        model(torch.randn(1, 3)).sum().backward()
    assert torch.equal(record["0.bias:grad"], model[0].bias.grad)
    with pytest.raises(hl.GradientNotAvailable, match="does not require grad"):
        record["0.weight:grad"]


def test_a_sparse_gradient_is_kept_sparse():
    embedding = nn.Embedding(5, 2, sparse=True)
    with hl.capture(embedding, "weight:grad") as record:
        embedding(torch.tensor([1, 2])).sum().backward()
    assert record["weight:grad"].is_sparse
    assert torch.equal(record["weight:grad"].to_dense(), embedding.weight.grad.to_dense())
    assert "weight:grad" in repr(record)
    assert record.nbytes > 0


@pytest.mark.parametrize("leaf", [True, False])
def test_a_plain_tensor_can_stand_where_the_model_stands(leaf):
    x = torch.ones(3, requires_grad=True)
    y = x if leaf else x * 2
    with hl.capture(y, ":grad") as record:
        weigh(y).backward(retain_graph=True)
        (weigh(y) * 2).backward()
    assert [g.tolist() for g in record.calls(":grad")] == [[-1, 0, 1], [-2, 0, 2]]
    assert not y._backward_hooks


def test_a_plain_tensor_that_was_changed_in_place_is_exact_or_refused():
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    for y in (x * 1, (x * 1).view(2)):
        with hl.capture(y, ":grad") as record:
            y.relu_()
            y.sum().backward()
        expected = torch.tensor([0.0, 1.0]).view_as(y)
        assert_exact_or_refused(record, ":grad", expected, "in place")


def test_a_plain_tensor_without_grad_says_so():
    with hl.capture(torch.ones(2), ":grad") as record:
        pass
    with pytest.raises(hl.GradientNotAvailable, match=r"does not require grad.*requires_grad_"):
        record[":grad"]


# -- threads, other hooks, memory -----------------------------------------------------------------


def test_a_backward_in_another_thread_is_seen():
    model, x = small(), torch.randn(1, 3, requires_grad=True)
    with hl.capture(model, ":grad_output", "0:grad_input", "2.bias:grad") as record:
        loss = model(x).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert record[":grad_output"].tolist() == [[1, 1]]
    assert torch.equal(record["0:grad_input"], x.grad)
    assert record["2.bias:grad"].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_a_users_own_hook_on_the_output_runs_after_ours(shape):
    lin = nn.Linear(2, 2)
    with hl.capture(lin, ":grad_output", "bias:grad") as record:
        y = lin(torch.ones(shape))
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        y.sum().backward()
    assert torch.equal(record[":grad_output"], torch.ones(shape))
    assert torch.equal(y.grad, torch.full(shape, 2.0))
    assert torch.equal(record["bias:grad"], torch.full((2,), 2.0 * y.numel() / 2))


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_a_users_module_hook_that_was_there_before_sets_its_tensor_hook_first(shape):
    lin = nn.Linear(2, 2)

    def double(module, args, output):
        output.register_hook(lambda g: g * 2)

    handle = lin.register_forward_hook(double)
    with hl.capture(lin, ":grad_output") as record:
        lin(torch.ones(shape)).sum().backward()
    handle.remove()
    assert torch.equal(record[":grad_output"], torch.full(shape, 2.0))
    assert_clean(lin)


def test_full_backward_hooks_of_the_user_agree_with_ours():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = {}

    def look(module, grad_input, grad_output):
        seen[module] = grad_input, grad_output

    handles = [child.register_full_backward_hook(look) for child in model]
    x = torch.randn(2, 3, requires_grad=True)
    with hl.capture(model, "*:grad_output", "*:grad_input") as record:
        weigh(model(x)).backward()
    for handle in handles:
        handle.remove()
    for name, child in model.named_children():
        grad_input, grad_output = seen[child]
        assert torch.equal(record[f"{name}:grad_input"], grad_input[0])
        assert torch.equal(record[f"{name}:grad_output"], grad_output[0])
    assert_clean(model)


@pytest.mark.parametrize("backward", [True, False])
def test_no_graph_is_kept_alive_by_a_record_of_gradients(backward):
    model = nn.Sequential(EndsInLinear(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randn(2, 3, 4)
    gc.collect()
    gc.disable()  # no cycles either
    try:
        with hl.capture(model, "**:grad_output", "**:grad_inputs", "**.weight:grad") as record:
            h = x.requires_grad_() * 1
            alive = weakref.ref(h)
            y = model(h)
            if backward:
                y.sum().backward()
            del h, y
            assert alive() is None
        assert bool(record.places()) is backward
        kept = weakref.ref(record)
        del record
        assert kept() is None
    finally:
        gc.enable()


def test_nothing_is_left_on_a_graph_that_outlives_the_with():
    model = EndsInLinear(4)
    x = torch.randn(2, 3, 4, requires_grad=True)
    with hl.capture(model, "**:grad_output", "**:grad_input", ":grad_output", ":grad_input"):
        y = model(x)
    stack, nodes = [y.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [follows for follows, _ in node.next_functions]
            assert not node.metadata
    assert len(nodes) > 3
    assert not y._backward_hooks
    y.sum().backward()


def test_handles_do_not_pile_up_over_many_calls():
    lin, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    alive = []
    with hl.capture(lin, ":grad_output", ":grad_input", keep="last") as record:
        for _ in range(2):
            for _ in range(1500):
                lin(x)
            alive.append(objects_alive())
        lin(x).sum().backward()
    assert alive[1] - alive[0] < 1200
    assert record[":grad_output"].tolist() == [[1, 1]]


# -- keep -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [":grad_output", ":grad_input", ":grad_inputs[input]"])
@pytest.mark.parametrize("options", [{}, {"transform": torch.clone}], ids=["plain", "derived"])
def test_of_several_calls_the_gradient_of_the_first_or_the_last_is_kept(where, options):
    torch.manual_seed(0)
    cell, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)

    def run():
        hidden = x
        for _ in range(6):
            hidden = cell(hidden).tanh()
        hidden.sum().backward()

    with hl.capture(cell, where) as every:
        run()
    with hl.capture(cell, where, keep="first", **options) as first:
        run()
        run()
    with hl.capture(cell, where, keep="last", **options) as last:
        run()
        run()
        with torch.no_grad():
            cell(x)
    assert torch.equal(first[where], every[where, 0])
    assert torch.equal(last[where], every[where, 5])
    assert len(first.calls(where)) == len(last.calls(where)) == 1
