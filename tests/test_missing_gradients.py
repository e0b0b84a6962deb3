"""Gradients that cannot be captured: the model runs on, and reading gives the reason."""

import subprocess
import sys
import threading

import pytest
import torch
from models import Giving, Nothing, small
from oracles import (
    assert_clean,
    cut,
    recorded,
    weigh,
)
from torch import nn
from torch.autograd import Function

import hookline as hl

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("hooked", [False, True])
def test_a_tensor_that_a_module_had_before_is_refused_on_read(hooked):
    class Remembering(nn.Module):
        memory = None

        def forward(self, x):
            return self.memory

    module = Remembering()
    module.memory = torch.randn(2, 3, requires_grad=True) * 2
    if hooked:
        module.register_forward_hook(lambda *_: None)
    with hl.capture(module, ":grad_output") as record:
        (module(torch.zeros(1)) + module.memory).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="had before"):
        record[":grad_output"]


# -- what cannot be told apart is refused ---------------------------------------------------------


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential()])
@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
def test_a_module_that_returns_its_input_is_refused_on_read(module, place):
    x = torch.randn(3, requires_grad=True)
    made = x * 1
    with hl.capture(module, place) as record:
        y = module(made)
        assert y is made
        (weigh(y) + 5 * made.sum()).backward()
    assert torch.equal(x.grad, torch.linspace(-1, 1, 3) + 5)
    with pytest.raises(hl.GradientNotAvailable, match="a tensor that it was given"):
        record[place]
    assert_clean(module)


def test_a_parameter_that_a_module_returns_is_refused_on_read():
    module = nn.Linear(2, 2)
    returns = Giving(lambda x: module.weight)
    with hl.capture(returns, ":grad_output") as record:
        (returns(torch.ones(1)) * 2 + module.weight).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="had before"):
        record[":grad_output"]


def test_the_input_of_a_later_block_is_refused_where_dropout_and_residual_share_it():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

        def forward(self, x):
            h = self.lin(x)
            return self.drop(h) + h * 3

    model = Residual().eval()
    x = torch.randn(2, 4)
    with hl.capture(model, "drop:grad_output", "lin:grad_output") as record:
        weigh(model(x)).backward()
    weights = torch.linspace(-1, 1, 8).reshape(2, 4)
    torch.testing.assert_close(record["lin:grad_output"], weights * 4)
    with pytest.raises(hl.GradientNotAvailable, match=r"'drop:grad_output'.*Ask for the mod"):
        record["drop:grad_output"]


@pytest.mark.parametrize("leaf", [False, True])
def test_an_input_that_is_returned_beside_another_output_is_refused_a_leaf_too(leaf):
    module = Giving(lambda x: (x * 3, x))
    x = torch.ones(2, requires_grad=True)
    with hl.capture(module, ":grad_input") as record:
        first, second = module(x if leaf else x * 1)
        (first + second * 5).sum().backward()  # 8 for the input, of which 3 pass a node of its own
    with pytest.raises(hl.GradientNotAvailable, match="returned a tensor that it was given"):
        record[":grad_input"]


@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
@pytest.mark.parametrize("verb", [hl.capture, lambda *to: hl.edit(*to, lambda grad: grad)])
def test_an_output_that_torch_lets_nobody_use_disturbs_no_forward(place, verb):
    def forward(x):
        made = x * 3
        part, _ = made.chunk(2)
        return made.mul_(2), part  # a chunk of what was changed: torch raises where it is used

    module, leaf = Giving(forward), torch.ones(2, requires_grad=True)
    with verb(module, place) as context:
        module(leaf * 1)[0].sum().backward()
    assert leaf.grad.tolist() == [6, 6]
    if verb is hl.capture:
        found = context[place]
        whole, part = found if place == ":grad_output" else (found / 6, None)
        assert (whole.tolist(), part) == ([1, 1], None)


@pytest.mark.parametrize("place", ["0:grad_output", "0:grad_input"])
def test_a_tensor_that_torch_lets_nobody_use_with_gradients_is_used_without(place):
    model, made = nn.Sequential(nn.Tanh()), torch.ones(2, requires_grad=True) * 3
    part, _ = made.chunk(2)
    made.mul_(2)
    with hl.capture(model, place) as record, torch.no_grad():
        assert model(part).tolist() == part.tanh().tolist()
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record[place]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("place", ["inner:grad_output", "inner:grad_input", "inner:grad_inputs"])
def test_a_module_without_gradients_may_be_given_what_torch_lets_nobody_use_with_them(place, count):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Giving(torch.no_grad()(lambda *parts: parts[0] + 1))

        def forward(self, x):
            made = x * 3
            parts = made.chunk(2)
            made.mul_(2)
            return made.sum() + self.inner(*parts[:count]).sum()

    model, leaf = Outer(), torch.ones(2, requires_grad=True)
    with hl.capture(model, place) as record:
        model(leaf).backward()
    assert leaf.grad.tolist() == [6, 6]
    with pytest.raises(hl.GradientNotAvailable):
        record[place]


class ViewInList(Function):
    @staticmethod
    def forward(ctx, x):
        return [x.view(-1).view(x.shape)]  # torch connects tensors and tuples only

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("it is of no graph")


def test_a_tensor_that_requires_grad_and_is_of_no_graph_disturbs_no_forward():
    model = nn.ModuleDict({"make": Giving(ViewInList.apply), "use": nn.Tanh()})
    x = torch.ones(2, requires_grad=True)
    with hl.capture(model, "make:grad_input", "use:grad_input", "use:grad_inputs") as record:
        (made,) = model["make"](x * 1)
        assert made.requires_grad
        (model["use"](made) + x).sum().backward()
    for place in record.places():
        with pytest.raises(hl.GradientNotAvailable):
            record[place]


def test_a_part_that_is_refused_is_never_none():
    module = Giving(lambda x, y: (x, x * 2 + y))
    x, y = (torch.ones(2, requires_grad=True) * n for n in (1, 2))
    with hl.capture(module, ":grad_output", ":grad_inputs") as record:
        first, second = module(x, y)
        (first * 3 + second).sum().backward()
    assert record[":grad_output[1]"].tolist() == [1, 1]
    assert next(g for g in record[":grad_inputs[1]"]).item() == 1
    for place in (":grad_output", ":grad_output[0]", ":grad_inputs", ":grad_inputs[0]"):
        with pytest.raises(hl.GradientNotAvailable, match="a tensor that it was given"):
            record[place]


def test_an_output_from_which_another_is_computed_is_refused():
    cell = nn.LSTMCell(2, 3)  # h is computed from c, inside
    x, state = torch.randn(4, 2), None
    with hl.capture(cell, ":grad_output") as record:
        states = []
        for _ in range(2):
            state = cell(x, state)
            states.append(state[0])
        weigh(states[-1]).backward()
    assert torch.equal(record[":grad_output[0]", 1], torch.linspace(-1, 1, 12).reshape(4, 3))
    with pytest.raises(hl.GradientNotAvailable, match="another output"):
        record[":grad_output[1]", 0]
    with pytest.raises(hl.GradientNotAvailable, match="another output"):
        record[":grad_output", 0]


@pytest.mark.parametrize("place", [":grad_output", "1:grad_input", "1:grad_inputs"])
def test_an_object_that_cannot_be_looked_into_is_not_said_to_be_without_gradients(place):
    class Opaque:
        def __init__(self, hidden):
            self.hidden = hidden

    model = nn.Sequential(Giving(lambda x: Opaque(x * 2)), Giving(lambda o: Opaque(o.hidden)))
    with hl.capture(model, place) as record:
        model(torch.ones(3, requires_grad=True)).hidden.sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="no tensor was found in the value"):
        record[place]


def test_an_input_that_the_output_does_not_depend_on_is_told():
    module = Giving(lambda x, y: x * 2)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with hl.capture(module, ":grad_inputs[1]", ":grad_inputs") as record:
        module(x, y).sum().backward()
    assert record[":grad_inputs"][1] is None
    with pytest.raises(hl.GradientNotAvailable, match="no gradient flows"):
        record[":grad_inputs[1]"]


def test_an_argument_that_a_call_has_not_is_told():
    class Masked(nn.Module):
        def forward(self, x, mask=None):
            return x * 2

    module = Masked()
    with hl.capture(module, ":grad_inputs[mask]") as record:
        module(torch.ones(2, requires_grad=True)).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match=r"not \[mask\]"):
        record[":grad_inputs[mask]"]


@pytest.mark.parametrize("place", ["1:grad_input", "0:grad_output", "1:grad_output"])
def test_an_inplace_relu_after_a_view_is_exact_or_refused(place):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(2, 3, 4)
    at_lin, _ = cut(model[0], [x], lambda y: weigh(y.relu()))
    at_relu, _ = cut(model, [x], weigh)
    record = recorded(model, [x], weigh, place)
    if place == "1:grad_input" and model[0](x)._is_view():  # until torch 2.15
        with pytest.raises(hl.GradientNotAvailable, match="in place"):
            record[place]
    else:
        assert torch.equal(record[place], at_relu if place == "1:grad_output" else at_lin)


@pytest.mark.parametrize("others", [[], ["1:grad_output"]], ids=["alone", "beside"])
def test_a_view_that_is_used_and_then_changed_in_place_has_both_shares(others):
    class Model(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            early = self[1](y)
            return early + y.relu_()

    model, x = Model(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 3, 4)
    expected, _ = cut(model[0], [x], lambda y: weigh(y.tanh() + y.relu()))
    with hl.capture(model, "0:grad_output", *others) as record:
        loss = weigh(model(x))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    first, second = record.calls("0:grad_output")
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, 2 * expected)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["no view", "a view"])
def test_a_gradient_is_what_came_before_a_hook_of_the_models_own_has_changed_it(shape):
    class Model(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            y.register_hook(lambda grad: grad.clamp(max=0.1))
            return self[1](y)

    model, x = Model(nn.Linear(4, 4), nn.Tanh()), torch.randn(shape)
    expected, _ = cut(model[0], [x], lambda y: weigh(y.tanh()))
    with hl.capture(model, "0:grad_output") as record:
        weigh(model(x)).backward()
    assert torch.equal(record["0:grad_output"], expected)
    assert expected.max() > 0.1


def test_only_the_gradient_of_a_layers_own_output_can_be_asked_for():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 3, 4)
    with hl.capture(model, "0", "*:grad_output") as record:
        (grad,) = torch.autograd.grad(weigh(model(x)), record["0"])
    assert torch.equal(record["0:grad_output"], grad)


def test_an_inplace_relu_after_no_view_is_exact_everywhere():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    at_lin, _ = cut(model[0], [x], lambda y: weigh(model[2](y.relu())))
    at_relu, _ = cut(model[:2], [x], lambda y: weigh(model[2](y)))
    record = recorded(model, [x], weigh, "*:grad_output", "*:grad_input")
    assert torch.equal(record["0:grad_output"], at_lin)
    assert torch.equal(record["1:grad_input"], at_lin)
    assert torch.equal(record["1:grad_output"], at_relu)
    assert torch.equal(record["2:grad_input"], at_relu)


def test_a_part_changed_in_place_does_not_crash_the_process():
    code = """
import torch, hookline as hl
from torch import nn
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        y = self.lin(x)
        y[:, :1].add_(1)
        return y
model, x = Part(), torch.randn(2, 3, 4)
for verb in (hl.capture(model, "**:grad_output", "**:grad_input", ":grad_output"),
             hl.hook(model, ["lin:grad_output", ":grad_output"], lambda g: None)):
    with verb as record:
        model(x).sum().backward()
with hl.capture(model, "lin:grad_output") as record:
    model(x).sum().backward()
assert torch.equal(record["lin:grad_output"], torch.ones(2, 3, 4))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# -- no gradient: the forward succeeds, the read says why -----------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 3)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_under_no_grad_the_forward_succeeds_and_the_read_says_why(mode, shape, requires_grad):
    model, x = small(), torch.randn(shape, requires_grad=requires_grad)
    places = ["0:grad_output", "0:grad_input", "0:grad_inputs", ":grad_output", ":grad_input"]
    with mode(), hl.capture(model, *places) as record:
        y = model(x)
    assert torch.equal(y, model(x))
    for place in places:
        with pytest.raises(hl.GradientNotAvailable, match=r"did not require grad.*no_grad"):
            record[place]
    assert_clean(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("module", [nn.Identity(), nn.Flatten(), nn.Linear(3, 3)])
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "grad_inputs"])
@pytest.mark.parametrize("verb", ["edit", "hook"])
def test_under_no_grad_an_edit_lets_the_forward_succeed_and_tells_at_exit(mode, module, port, verb):
    x = torch.randn(1, 3, requires_grad=True)
    context = getattr(hl, verb)(module, f":{port}", lambda g: g * 2)
    with pytest.raises(hl.NeverFired, match="did not require grad"), mode(), context:
        y = module(x)
    assert torch.equal(y, module(x))
    assert_clean(module)


def test_a_backward_after_the_with_is_not_seen_and_the_read_says_why():
    lin = nn.Linear(2, 2)
    with hl.capture(lin, ":grad_output", ":grad_input", "weight:grad") as record:
        y = lin(torch.ones(1, 2, requires_grad=True))
    y.sum().backward()
    for place in (":grad_output", ":grad_input", "weight:grad"):
        with pytest.raises(hl.GradientNotAvailable, match="backward inside the `with`"):
            record[place]


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_a_gradient_that_arrives_as_none_is_none(shape):
    lin = nn.Linear(2, 2)
    x = torch.ones(shape, requires_grad=True)
    with hl.capture(lin, ":grad_output", ":grad_input", "weight:grad") as record:
        Nothing.apply(lin(x)).sum().backward()
    assert x.grad is None
    for place in (":grad_output", ":grad_input", "weight:grad"):
        with pytest.raises(hl.GradientNotAvailable, match="arrived"):
            record[place]


def test_a_module_that_was_never_called_is_told_at_exit():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    with pytest.raises(hl.NeverFired, match=r"'unused:grad_output'.*not called"):
        with hl.capture(model, "unused:grad_output"):
            model["used"](torch.ones(1, 2)).sum().backward()
    assert_clean(model)


# -- other reasons --------------------------------------------------------------------------------


def test_the_gradient_of_data_is_told_to_need_requires_grad():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    with hl.capture(model, "0:grad_input") as record:
        model(x).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match=r"x.requires_grad_\(\)"):
        record["0:grad_input"]
    with hl.capture(model, "0:grad_input") as record:
        model(x.requires_grad_()).sum().backward()
    assert torch.equal(record["0:grad_input"], x.grad)


def test_gradients_of_several_backwards_are_told_as_such():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(model, "0:grad_output") as record:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    with pytest.raises(
        hl.SeveralCalls, match=r"There are 2 of them, one for each call and backward pass\."
    ):
        record["0:grad_output"]


class UsesItsInputTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu_() + x.tanh()


def batched(model, x):
    y = model(x)
    rows = torch.eye(y.numel()).view(-1, *y.shape)
    return torch.autograd.grad(y, [x, model[0].weight], rows, is_grads_batched=True)


OPTIONS = [
    {}, {"at": 0}, {"transform": torch.Tensor.square}, {"keep": "last"}, {"threads": "all"},
    {"dtype": torch.float64},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "place", ["0:grad_output", "0.weight:grad", "1:grad_input", "1.linear:grad_output"]
)
def test_gradients_of_many_rows_at_once_are_refused_on_reading(place, options):
    model, x = nn.Sequential(nn.Linear(4, 4), UsesItsInputTwice()), torch.randn(2, 3, 4)
    x.requires_grad_()
    plain = batched(model, x)
    with hl.capture(model, place, **options) as record:
        found = batched(model, x)
    assert all(map(torch.equal, found, plain))
    assert place in repr(record)
    with pytest.raises(hl.ValueChanged, match="rows of grad_outputs one by one"):
        record[place]
    with hl.capture(model, place, **{**options, "keep": "all"}) as record:
        model(x).sum().backward(inputs=[x, model[0].weight])
        batched(model, x)
    assert record[place, 0].isfinite().all()
    with pytest.raises(hl.ValueChanged, match="is_grads_batched=True"):
        record.calls(place)
    assert_clean(model)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_shares_of_a_gradient_inside_a_transform_are_refused_on_reading(options):
    model, x = nn.Sequential(nn.Linear(4, 4), UsesItsInputTwice()), torch.randn(2, 3, 4)
    with hl.capture(model, "1:grad_input", **options) as record:
        torch.func.jacrev(model)(x)
    assert "1:grad_input" in repr(record)
    with pytest.raises(hl.ValueChanged, match=r"inside a transform of torch\.func"):
        record["1:grad_input"]


def test_a_gradient_that_is_missing_for_another_reason_than_a_backward_says_no_word_of_one():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    backward = "Run the forward and the backward inside the `with`."

    def elsewhere():
        thread = threading.Thread(target=lambda: model(x).sum().backward())
        thread.start(), thread.join()

    with hl.capture(model, "*:grad_output") as record:
        model[0](x).sum().backward()
        elsewhere()
    with pytest.raises(hl.GradientNotAvailable, match="threads='all' takes those") as caught:
        record["1:grad_output"]
    assert backward not in str(caught.value)
    with pytest.raises(hl.NeverFired, match="threads='all' takes those") as never:
        with hl.capture(model, "1:grad_output"):
            elsewhere()
    assert backward not in str(never.value)

    attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(hl.NeverFired, match="ask for the attention module's own output") as never:
        with hl.capture(attention, "out_proj:grad_output") as record:
            attention(*[torch.randn(3, 4)] * 3)[0].sum().backward()
    assert backward not in str(never.value)
    with pytest.raises(hl.GradientNotAvailable, match="attention module's own output") as caught:
        record["out_proj:grad_output"]
    assert backward not in str(caught.value)

    with hl.capture(model, "*:grad_output") as record:
        model(x), model[0](x)
    with pytest.raises(hl.GradientNotAvailable) as caught:
        record["1:grad_output"]
    assert caught.value.remedy == backward
    with pytest.raises(hl.NeverFired) as never, hl.capture(model, "1:grad_output"):
        pass
    assert never.value.remedy == backward
