"""Every documented behaviour of nethook, on hookline; torch's own hooks are the oracle."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Failing, Giving, InPlace, Recursive, Swallowing, named, nested_sequence, small
from oracles import assert_clean, bits, by_hand, hooks_left, work_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat import nethook

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class PassesOn(nn.Module):
    """Calls its child with the arguments that it is told."""

    def __init__(self, forward, pass_on):
        super().__init__()
        self.child = Giving(forward)
        self.pass_on = pass_on

    def forward(self, x):
        return self.pass_on(self.child, x)


# -- Trace: retaining ------------------------------------------------------------------------------


def test_a_trace_retains_the_output_of_a_layer():
    model = small()
    seen = by_hand(model, lambda m: m(X), ["1"])
    (expected,) = seen.outputs["1"]
    with nethook.Trace(model, "1") as ret:
        assert torch.equal(model(X), seen.result)
        assert torch.equal(ret.output, expected)  # also before the end of the block
    assert torch.equal(ret.output, expected)
    assert ret.layer == "1"
    assert_clean(model)


def test_a_layer_can_be_passed_without_a_name():
    model = small()
    with nethook.Trace(model[0]) as ret:
        model(X)
    assert torch.equal(ret.output, model[0](X))
    assert ret.layer is None


def test_an_empty_name_is_the_model_itself():
    model = small()
    with nethook.Trace(model, "") as ret:
        result = model(X)
    assert ret.output is result


def test_by_default_an_attached_output_is_the_very_tensor():
    model, seen = small(), []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o))
    with nethook.Trace(model, "0") as ret:
        model(X)
    assert ret.output is seen[0]
    loss = ret.output.square().sum()
    (gradient,) = torch.autograd.grad(loss, model[0].weight)
    (expected,) = torch.autograd.grad(model[0](X).square().sum(), model[0].weight)
    assert torch.equal(gradient, expected)


def test_without_gradients_the_output_is_as_it_was_before_an_in_place_layer():
    model = InPlace()
    with torch.no_grad():
        expected = model.lin(X)
        assert (expected < 0).any()
        with nethook.Trace(model, "lin") as ret:
            model(X)
    assert torch.equal(ret.output, expected)


def test_a_trace_works_in_inference_mode():
    model = InPlace()
    with torch.inference_mode(), nethook.Trace(model, "lin", retain_input=True) as ret:
        model(X)
    assert torch.equal(ret.output, model.lin(X))
    assert torch.equal(ret.input, X)


def test_an_attached_output_that_was_changed_in_place_is_refused():
    model = InPlace()
    with nethook.Trace(model, "lin") as ret:
        model(X)
    with pytest.raises(hl.ValueChanged, match=r"output of the layer 'lin'.*clone=True"):
        _ = ret.output


def test_clone_keeps_an_attached_copy():
    model = InPlace()
    with nethook.Trace(model, "lin", clone=True) as ret:
        model(X)
    assert torch.equal(ret.output, model.lin(X))
    (gradient,) = torch.autograd.grad(ret.output.sum(), model.lin.bias)
    assert gradient.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("clone", [False, True])
def test_detach_keeps_a_value_without_graph_that_later_changes_do_not_reach(clone):
    model = InPlace()
    with nethook.Trace(model, "lin", detach=True, clone=clone) as ret:
        model(X)
    assert not ret.output.requires_grad
    assert torch.equal(ret.output, model.lin(X))


def test_clone_and_detach_reach_into_nested_values():
    held = []

    def give(x):
        held.append((x * 2, {"a": [x * 3], "n": 7}))
        return held[-1]

    model, x = Giving(give), X.clone().requires_grad_()
    with nethook.Trace(model, detach=True, clone=True) as ret:
        model(x)
    expected = X * 2
    with torch.no_grad():
        held[0][0].zero_()
        held[0][1]["a"][0].zero_()
    assert torch.equal(ret.output[0], expected)
    assert torch.equal(ret.output[1]["a"][0], X * 3)
    assert ret.output[1]["n"] == 7
    assert not ret.output[0].requires_grad
    assert not ret.output[1]["a"][0].requires_grad


def test_retain_output_false_retains_none():
    model = small()
    with nethook.Trace(model, "0", retain_output=False, retain_input=True) as ret:
        model(X)
    assert not hasattr(ret, "output")
    assert torch.equal(ret.input, X)
    with pytest.raises(AttributeError, match="retain_output is False"):
        _ = ret.output


def test_before_the_layer_has_run_there_is_nothing_to_read():
    model = small()
    with nethook.Trace(model, "0") as ret:
        assert not hasattr(ret, "output")
        with pytest.raises(hl.NotCaptured, match=r"'0'.*not called"):
            _ = ret.output
    assert getattr(ret, "input", None) is None


def test_looking_changes_no_result_and_no_gradient():
    bare = small()
    traced = copy.deepcopy(bare)
    bare(X).square().sum().backward()
    with nethook.TraceDict(traced, ["0", "1", "2"], retain_input=True):
        result = traced(X)
    result.square().sum().backward()
    for one, other in zip(bare.parameters(), traced.parameters(), strict=True):
        assert torch.equal(bits(one.grad), bits(other.grad))


def test_a_trace_has_a_short_repr():
    model = small()
    with nethook.Trace(model, "0") as ret:
        assert repr(ret) == "<Trace at the layer '0', empty>"
        model(X)
    assert repr(ret) == "<Trace at the layer '0', output>"


# -- Trace: inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "pass_on", "expected"),
    [
        (lambda x: x, lambda m, x: m(x), X),
        (lambda x, y: x, lambda m, x: m(x, x + 1), (X, X + 1)),
        (lambda x, y=None: x, lambda m, x: m(x, x + 1), (X, X + 1)),
        (lambda x, y=None: x, lambda m, x: m(x, y=x + 1), X),
        (lambda *xs: xs[0], lambda m, x: m(x, x + 1), (X, X + 1)),
        (lambda *, x: x, lambda m, x: m(x=x), X),
        (lambda x, y: x, lambda m, x: m(x=x, y=x + 1), (X, X + 1)),
        (lambda: torch.zeros(1), lambda m, x: m(), ()),
    ],
)
def test_the_input_is_what_was_passed_by_position_or_else_by_keyword(forward, pass_on, expected):
    model = PassesOn(forward, pass_on)
    with nethook.Trace(model, "child", retain_input=True) as ret:
        model(X)
    assert type(ret.input) is type(expected)
    pairs = zip(ret.input, expected, strict=True) if expected is not X else [(ret.input, X)]
    for found, value in pairs:
        assert torch.equal(found, value)


@pytest.mark.parametrize("retain_output", [True, False])
def test_a_pre_hook_that_is_set_inside_the_trace_is_seen_by_the_input(retain_output):
    model = small()
    with nethook.TraceDict(model, ["0"], retain_output, retain_input=True) as ret:
        handle = model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model(X)
        assert torch.equal(ret["0"].input, X + 1)
        handle.remove()
        model(X)
        assert torch.equal(ret["0"].input, X)  # and nothing was lost: both were read


def test_an_argument_that_a_later_hook_adds_is_seen_by_the_input():
    model = PassesOn(lambda x, y=None: x, lambda m, x: m(x))
    with nethook.Trace(model, "child", retain_input=True) as ret:
        handle = model.child.register_forward_pre_hook(lambda module, args: (args[0], args[0] * 2))
        model(X)
        handle.remove()
    x, y = ret.input
    assert torch.equal(x, X)
    assert torch.equal(y, X * 2)


def test_the_input_is_as_it_was_before_an_in_place_layer():
    model = InPlace()
    with torch.no_grad(), nethook.Trace(model, "relu", retain_input=True) as ret:
        model(X)
    assert torch.equal(ret.input, model.lin(X))
    assert torch.equal(ret.output, model.lin(X).relu())


def test_a_retained_argument_of_the_model_does_not_move_the_users_memory():
    model, x = small(), X.clone()
    address = x.data_ptr()
    with torch.no_grad(), nethook.Trace(model, retain_input=True) as ret:
        model(x)
    x.zero_()
    assert x.data_ptr() == address
    assert torch.equal(ret.input, X)


def test_clone_and_detach_count_for_the_input_and_retain_grad_does_not():
    model = InPlace()
    with nethook.Trace(model, "relu", retain_input=True, clone=True) as ret:
        model(X)
    assert ret.input.grad_fn is not None
    assert torch.equal(ret.input, model.lin(X))
    with nethook.Trace(model, "relu", retain_input=True, detach=True, retain_grad=True) as ret:
        model(X).sum().backward()
    assert not ret.input.requires_grad
    assert ret.output.grad is not None


# -- Trace: gradients ------------------------------------------------------------------------------


def test_retain_grad_gives_the_gradient_of_the_output_also_before_an_in_place_layer():
    model = InPlace()
    leaf = model.lin(X).detach().requires_grad_()
    (expected,) = torch.autograd.grad(leaf.relu().square().sum(), leaf)
    with nethook.Trace(model, "lin", retain_grad=True) as ret:
        model(X).square().sum().backward()
    assert torch.equal(ret.output, model.lin(X))
    assert torch.equal(ret.output.grad, expected)
    assert model.lin.weight.grad is not None


def test_retain_grad_works_where_nothing_requires_grad():
    model = small().requires_grad_(False)
    with nethook.Trace(model, "0", retain_grad=True) as ret:
        model(X).sum().backward()
    mask = (model[0](X) > 0).float()
    torch.testing.assert_close(ret.output.grad, mask * model[2].weight.sum(0))


@pytest.mark.parametrize("options", [{"clone": True}, {"detach": True}])
def test_retain_grad_goes_before_clone_and_detach(options):
    model = small()
    with nethook.Trace(model, "0", retain_grad=True, **options) as ret:
        model(X).sum().backward()
    assert ret.output.grad is not None


def test_retain_grad_of_a_layer_that_returns_its_input_is_the_layers_own():
    x = torch.ones(3, requires_grad=True)
    layer = nn.Identity()
    with nethook.Trace(layer, retain_grad=True) as ret:
        (layer(x) * 2 + x * 5).sum().backward()
    assert ret.output.grad.tolist() == [2, 2, 2]
    assert x.grad.tolist() == [7, 7, 7]
    plain = torch.ones(3)
    with nethook.Trace(layer, retain_grad=True) as ret:
        layer(plain)
    assert not plain.requires_grad
    assert ret.output.requires_grad


def test_retain_grad_reaches_into_nested_values():
    lstm = nn.LSTM(3, 4, batch_first=True)
    with nethook.Trace(lstm, retain_grad=True) as ret:
        _, (h, _) = lstm(X[None])
        (h * 3).sum().backward()
    assert ret.output[0].grad is None
    assert ret.output[1][0].grad.unique().tolist() == [3]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_is_not_a_second_one(reentrant):
    model, x = small(), X.clone().requires_grad_()
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with nethook.Trace(model, "0", retain_input=True, detach=True) as ret:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(ret.output, model[0](X))
    assert torch.equal(ret.input, X)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_retain_grad_under_checkpointing(reentrant):
    model, x = small(), X.clone().requires_grad_()
    leaf = model[0](X).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[2](leaf.relu()).sum(), leaf)
    with nethook.Trace(model, "0", retain_grad=True) as ret:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(ret.output.grad, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_edit_counts_in_the_recomputation_too(reentrant):
    def run(model, x):
        with nethook.Trace(model, "0", edit_output=lambda y: y.sin() * 3):
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        return x.grad

    model, x = small(), X.clone().requires_grad_()
    found = run(model, x)
    y = X.clone().requires_grad_()
    model[2]((model[0](y).sin() * 3).relu()).square().sum().backward()
    torch.testing.assert_close(found, y.grad)


# -- Trace: editing --------------------------------------------------------------------------------


class DoublingIntervention:
    def __call__(self, output):
        return output * 2

    def method(self, x, layer):
        assert layer == "0"
        return x * 2


def by_position_and_name(layer, output):
    assert layer == "0"
    return output * 2


def with_default(x, name=None):
    assert name == "0"
    return x * 2


def by_keyword(*, layer, output):
    assert layer == "0"
    return output * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda output: output * 2,
        lambda x, layer: x * {"0": 2}[layer],
        lambda output, layer: output * {"0": 2}[layer],
        lambda x, name: x * {"0": 2}[name],
        lambda x, **rest: x * {"0": 2}[rest["layer"]],
        lambda *args: args[0] * {"0": 2}[args[1]],
        lambda **kwargs: kwargs["output"] * 2,
        lambda x, *, factor=2: x * factor,
        lambda x: x.mul_(2),
        by_position_and_name,
        by_keyword,
        with_default,
        DoublingIntervention(),
        DoublingIntervention().method,
        functools.partial(lambda x, factor: x * factor, factor=2),
        functools.partial(torch.mul, torch.tensor(2.0)),
    ],
)
def test_edit_output_takes_the_output_and_the_layer_in_any_way(function):
    model = small()
    with torch.no_grad(), nethook.Trace(model, "0", edit_output=function) as ret:
        result = model(X)
    assert torch.equal(ret.output, model[0](X) * 2)
    assert torch.equal(result, model[2]((model[0](X) * 2).relu()))
    assert_clean(model)


def scaled_by_inputs(output, factor=2, inputs=()):
    (x,) = inputs
    assert (x.shape, factor) == ((2, 3), "0")
    return output * 2


def inputs_first(inputs=None, output=None, layer=None, mask=None):
    assert (type(inputs), layer, mask) == (tuple, "0", "mask")
    return output * 2


class Intervention(nn.Module):
    def forward(self, output, layer, inputs):
        assert inputs[0].shape == (2, 3)
        return output * {"0": 2}[layer]


@pytest.mark.parametrize(
    "function",
    [
        lambda output, layer, inputs: output * len(inputs) * {"0": 2}[layer],
        lambda output, layer_name, inputs: output * len(inputs) * {"0": 2}[layer_name],
        lambda x, name, given: x * len(given) * {"0": 2}[name],
        lambda x, inputs: x * len(inputs) * 2,
        lambda inputs, x: x * len(inputs) * 2,
        lambda x, layer=None, inputs=None: x * len(inputs) * {"0": 2}[layer],
        lambda x, name=None, given=None: x * len(given) * {"0": 2}[name],
        lambda x, *, inputs: x * len(inputs) * 2,
        lambda x, *, inputs=None: x * len(inputs) * 2,
        lambda x, **rest: x * len(rest["inputs"]) * 2,
        scaled_by_inputs,
        functools.partial(inputs_first, mask="mask"),
        Intervention(),
    ],
)
def test_edit_output_takes_the_inputs_in_any_way(function):
    model = small()
    with torch.no_grad(), nethook.TraceDict(model, ["0"], edit_output=function) as ret:
        result = model(X)
    assert torch.equal(ret["0"].output, model[0](X) * 2)
    assert torch.equal(result, model[2]((model[0](X) * 2).relu()))
    assert_clean(model)


@pytest.mark.parametrize(
    ("forward", "pass_on"),
    [
        (lambda x: x, lambda m, x: m(x)),
        (lambda x, y: x, lambda m, x: m(x, x + 1)),
        (lambda x, y=None: x, lambda m, x: m(x, y=x + 1)),
        (lambda x, y: x, lambda m, x: m(x=x, y=x + 1)),
        (lambda pair: pair[0], lambda m, x: m((x, x + 1))),
        (lambda: torch.zeros(1), lambda m, x: m()),
    ],
)
def test_the_inputs_are_what_a_forward_hook_of_torch_gets(forward, pass_on):
    model, seen = PassesOn(forward, pass_on), []
    model.child.register_forward_hook(lambda module, args, output: seen.append(args))
    with nethook.Trace(model, "child", edit_output=lambda output, inputs: seen.append(inputs)):
        model(X)
    by_torch, ours = seen
    assert type(ours) is tuple
    assert [id(x) for x in ours] == [id(x) for x in by_torch]  # the very objects, to be changed too


def test_the_inputs_of_a_recursive_call_are_its_own():
    model, seen = Recursive(), []
    model.register_forward_hook(lambda module, args, output: seen.append(args))
    with nethook.Trace(model, edit_output=lambda x, layer, inputs: seen.append(inputs)) as ret:
        model(X, 2)
    assert [len(args) for args in seen] == [2] * 6
    for by_torch, ours in zip(seen[::2], seen[1::2], strict=True):
        assert all(a is b for a, b in zip(by_torch, ours, strict=True))
    assert ret.layer is None


def test_heads_are_put_in_place_by_what_an_output_projection_is_given(gpt):
    """As function vectors are: the output is computed again from inputs that were changed."""
    layer, heads, mean = "transformer.h.1.attn.c_proj", 4, torch.linspace(-1, 1, 4)

    def rep_act(output, layer_name, inputs):
        assert layer_name == layer
        if isinstance(inputs, tuple):
            inputs = inputs[0]
        shape = inputs.shape
        inputs = inputs.view(*shape[:-1], heads, -1)
        inputs[-1, -1, 2] = mean
        projection = nethook.get_module(gpt, layer_name)
        return F.linear(inputs.view(*shape), projection.weight, projection.bias)

    def change(module, args):
        x = args[0].clone()
        x.view(*x.shape[:-1], heads, -1)[-1, -1, 2] = mean
        return (x,)

    before = gpt(**INP).logits
    with torch.no_grad(), nethook.TraceDict(gpt, [layer], edit_output=rep_act):
        logits = gpt(**INP).logits
    handle = gpt.transformer.h[1].attn.c_proj.register_forward_pre_hook(change)
    expected = gpt(**INP).logits
    handle.remove()
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, before)


def test_a_builtin_can_edit():
    model = small()
    with torch.no_grad(), nethook.Trace(model, "0", edit_output=torch.relu) as ret:
        model(X)
    assert torch.equal(ret.output, model[0](X).relu())


def test_a_module_can_edit():
    model, adapter = small(), nn.Linear(4, 4)
    with torch.no_grad(), nethook.Trace(model, "0", edit_output=adapter) as ret:
        model(X)
    assert torch.equal(ret.output, adapter(model[0](X)))


def test_edit_output_that_returns_none_leaves_the_output_as_it_is():
    model, seen = small(), []
    with nethook.Trace(model, "0", edit_output=lambda x: seen.append(x.shape)) as ret:
        result = model(X)
    assert torch.equal(result, model(X))
    assert torch.equal(ret.output, model[0](X))
    assert seen == [(2, 4)]


def test_edit_output_may_change_the_shape_or_the_type():
    model = nn.Sequential(nn.Identity(), Giving(lambda pair: pair[0] + pair[1]))
    with nethook.Trace(model, "0", edit_output=lambda x: (x[:1], x[1:])) as ret:
        assert torch.equal(model(X), X[:1] + X[1:])
    assert torch.equal(ret.output[1], X[1:])


def test_gradients_flow_through_an_edit_and_into_what_it_uses():
    model, delta = small(), torch.zeros(4, requires_grad=True)
    with nethook.Trace(model, "0", edit_output=lambda x: x + delta):
        loss = model(X).square().sum()
    loss.backward()
    own = torch.zeros(4, requires_grad=True)
    model[2]((model[0](X) + own).relu()).square().sum().backward()
    torch.testing.assert_close(delta.grad, own.grad)


def test_an_edit_that_needs_more_is_told():
    model = small()
    with pytest.raises(TypeError, match="requires factor"):
        with nethook.Trace(model, "0", edit_output=lambda output, layer, inputs, factor: output):
            model(X)
    assert_clean(model)
    with pytest.raises(TypeError, match="function was expected"):
        nethook.Trace(model, "0", edit_output=3)
    assert_clean(model)


def test_traces_stack_in_the_order_in_which_they_were_made():
    model = nn.Identity()
    with nethook.Trace(model) as before:
        with nethook.Trace(model, edit_output=lambda x: x * 2) as inside:
            with nethook.Trace(model, edit_output=lambda x: x + 1) as after:
                assert torch.equal(model(X), X * 2 + 1)
    assert torch.equal(before.output, X)
    assert torch.equal(inside.output, X * 2)
    assert torch.equal(after.output, X * 2 + 1)


# -- Trace: stopping -------------------------------------------------------------------------------


def test_stop_runs_the_model_up_to_the_layer_only():
    model, ran = small(), []
    model[2].register_forward_hook(lambda *args: ran.append("2"))
    with nethook.Trace(model, "0", retain_input=True, stop=True) as ret:
        model(X)
        ran.append("the rest of the block")
    assert ran == []
    assert torch.equal(ret.output, model[0](X))
    assert torch.equal(ret.input, X)


def test_stop_when_nothing_stopped_is_fine():
    model = small()
    with nethook.Trace(model, "0", stop=True) as ret:
        pass
    assert not hasattr(ret, "output")
    with nethook.TraceDict(model, ["0", "1"], stop=True):
        pass
    with nethook.TraceDict(model, [], stop=True) as none:
        model(X)
    assert not none
    assert_clean(model)


def test_without_a_with_the_stop_can_be_caught():
    model = small()
    trace = nethook.Trace(model, "1", stop=True)
    with pytest.raises(nethook.StopForward):
        model(X)
    trace.close()
    assert torch.equal(trace.output, model[0](X).relu())
    assert model(X).shape == (2, 2)


def test_a_model_that_catches_exceptions_does_not_catch_the_stop():
    model = Swallowing(Exception)
    ran = []
    model.second.register_forward_hook(lambda *args: ran.append(1))
    with nethook.Trace(model, "first", stop=True) as ret:
        model(X)
    assert ran == []
    assert torch.equal(ret.output, model.first(X))


@pytest.mark.parametrize(("outer", "inner"), [("0", "2"), ("2", "0")])
def test_each_trace_catches_its_own_stop(outer, inner):
    model, reached = small(), []
    with nethook.Trace(model, outer, stop=True) as one:
        with nethook.Trace(model, inner, stop=True) as other:
            model(X)
        reached.append("after the inner block")
    assert bool(reached) == (inner == "0")
    assert hasattr(one, "output") == (outer == "0")
    assert hasattr(other, "output") == (inner == "0")
    assert_clean(model)


def test_a_stop_of_the_users_is_caught_where_a_stop_was_asked_for():
    model = small()

    def enough(x):
        raise nethook.StopForward

    with nethook.Trace(model, "2", stop=True), nethook.Trace(model, "0", edit_output=enough):
        model(X)
    with pytest.raises(nethook.StopForward):
        with nethook.Trace(model, "0", edit_output=enough):
            model(X)
    assert_clean(model)


# -- Trace: opening and closing --------------------------------------------------------------------


def test_a_trace_acts_until_it_is_closed_also_without_a_with():
    model = small()
    trace = nethook.Trace(model, "0", edit_output=lambda x: x * 0)
    assert torch.equal(model(X), model[2](torch.zeros(2, 4)))
    trace.close()
    trace.close()
    assert not torch.equal(model(X), model[2](torch.zeros(2, 4)))
    assert not trace.output.any()
    assert_clean(model)


def test_entering_again_starts_afresh():
    model = small()
    trace = nethook.Trace(model, "0", retain_input=True)
    with trace:
        model(X)
    with trace as again:
        assert again is trace
        assert not hasattr(trace, "output")
        assert not hasattr(trace, "input")
        model(X + 1)
    assert torch.equal(trace.input, X + 1)
    assert_clean(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: nethook.Trace(model, "0", edit_output=lambda x: x * 0),
        lambda model: nethook.TraceDict(model, ["0", "2"], retain_input=True),
    ],
)
def test_a_trace_that_is_dropped_leaves_nothing_behind_and_says_so(make):
    model = small()
    expected = model(X)
    gc.disable()  # it goes at once: there is no circle of references
    try:
        with pytest.warns(hl.HooklineWarning, match="the layer '0'.*dropped before it was closed"):
            make(model)
    finally:
        gc.enable()
    assert_clean(model)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_no_hook_is_left_when_the_model_raises(error):
    model = Failing(error)
    with pytest.raises(type(error)):
        with nethook.TraceDict(model, ["first", "second"], retain_input=True) as ret:
            model(X)
    assert_clean(model)
    assert torch.equal(ret["first"].output, model.first(X))
    assert not hasattr(ret["second"], "output")


@pytest.mark.parametrize("layer", [0, 1, False, pytest.param(nn.ReLU(), id="module")])
def test_a_layer_that_is_no_string_is_a_lookup_error_and_never_the_model(layer):
    model = small()
    for trace in (
        lambda: nethook.Trace(model, layer),
        lambda: nethook.TraceDict(model, ["1", layer], retain_input=True),
        lambda: nethook.Callbacks(model, [layer], print),
        lambda: nethook.InstrumentedModel(model).retain_layer(layer),
        lambda: nethook.get_module(model, layer),
        lambda: nethook.get_parameter(model, layer),
        lambda: nethook.replace_module(model, layer, nn.Identity()),
    ):
        with pytest.raises(LookupError, match=r"of type \w+\. Give a string"):
            trace()
    assert_clean(model)


def test_a_wrong_name_is_a_lookup_error_and_leaves_no_hook():
    model = small()
    with pytest.raises(LookupError, match=r"'12'"):
        nethook.Trace(model, "12")
    with pytest.raises(LookupError):
        nethook.Trace(model, "12", retain_output=False)
    with pytest.raises(LookupError):
        nethook.TraceDict(model, ["0", "1", "nothing"], retain_input={"0": True})
    with pytest.raises(LookupError):
        nethook.Trace(model, "*")  # names are literal
    for retain_input in (False, True):
        with pytest.raises(LookupError):
            nethook.Trace(model, "0.weight", retain_input=retain_input, retain_output=False)
    assert_clean(model)


def test_a_layer_that_is_never_called_is_refused_at_once():
    model = nn.Sequential(nn.Linear(3, 3))
    model.more = nn.ModuleList([nn.Linear(3, 3)])
    with pytest.raises(hl.NotHookable, match="ModuleList"):
        nethook.TraceDict(model, ["0", "more"])
    assert_clean(model)


@pytest.mark.parametrize("name", ["a*b", "x[0]", "in:input", "a/b", "{0,1}", "back\\slash"])
def test_names_are_taken_literally(name):
    model = named("other", name)
    with nethook.Trace(model, name, edit_output=lambda x, layer: x + len(layer)) as ret:
        assert torch.equal(model(X), X + len(name))
    assert torch.equal(ret.output, X + len(name))
    assert nethook.get_module(model, name) is model._modules[name]
    nethook.replace_module(model, name, nn.Flatten())
    assert isinstance(model._modules[name], nn.Flatten)


def test_a_shared_module_answers_to_each_of_its_names():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.add_module("again", model[0])
    with torch.no_grad(), nethook.TraceDict(model, ["0", "again"]) as ret:
        model(X)
    with pytest.warns(hl.HooklineWarning, match="last call only") as caught:  # it is called twice
        assert torch.equal(ret["0"].output, ret["again"].output)
    assert len(caught) == 1


def test_a_copy_of_a_traced_model_is_not_traced():
    model = small()
    with nethook.Trace(model, "0", edit_output=lambda x: x * 0) as ret:
        other = copy.deepcopy(model)
        assert other(X).any()
        assert not hasattr(ret, "output")
        pickle.loads(pickle.dumps(model))(X)
        assert not hasattr(ret, "output")
    assert_clean(model, other)


def test_hookline_lists_a_trace_as_live():
    model = small()
    with nethook.Trace(model, "0", retain_input=True):
        assert len(hl.attached(model)) == 2
    assert hl.attached(model) == []


# -- repeated calls --------------------------------------------------------------------------------


def run_often(model, trace, times):
    with trace:
        for n in range(times):
            model(X + n)


@pytest.mark.parametrize("options", [{}, {"retain_grad": True}, {"detach": True, "clone": True}])
def test_of_several_calls_the_last_is_kept_with_one_warning(options):
    model = small()
    ret = nethook.Trace(model, "0", **options)
    run_often(model, ret, 4)
    with pytest.warns(hl.HooklineWarning, match="layer '0' was read: .*last call only") as caught:
        assert torch.equal(ret.output, model[0](X + 3))
    assert len(caught) == 1
    assert torch.equal(ret.output, model[0](X + 3))


def test_of_several_inputs_the_last_is_kept_with_one_warning():
    model = small()
    ret = nethook.TraceDict(model, ["0", "2"], retain_input=True, retain_output=False)
    run_often(model, ret, 3)
    with pytest.warns(hl.HooklineWarning, match="input of the layer '0'.*last call") as caught:
        assert torch.equal(ret["0"].input, X + 2)
    assert len(caught) == 1
    assert torch.equal(ret["2"].input, model[:2](X + 2))


def test_what_was_read_may_be_overwritten_without_a_warning():
    model, outputs = small(), []
    with nethook.Trace(model, "0") as ret:  # warnings are errors
        for n in range(3):
            model(X + n)
            outputs.append(ret.output)
    for n, output in enumerate(outputs):
        assert torch.equal(output, model[0](X + n))


def test_what_nobody_reads_is_not_warned_of():
    model = small()
    run_often(model, nethook.TraceDict(model, ["0", "2"], edit_output=lambda x: x * 0), 3)
    with nethook.InstrumentedModel(model) as inst:  # warnings are errors
        inst.retain_layer("0")
        run_often(inst, contextlib.nullcontext(), 3)


def test_an_edit_without_retaining_may_run_many_times():
    model = small()
    with nethook.Trace(model, "0", edit_output=lambda x: x * 0, retain_output=False):
        for _ in range(3):
            model(X)


# -- TraceDict -------------------------------------------------------------------------------------


def test_a_trace_dict_retains_the_outputs_of_its_layers_in_their_order():
    model = small()
    expected = by_hand(model, lambda m: m(X)).outputs
    with nethook.TraceDict(model, ["2", "0", "1"]) as ret:
        model(X)
    assert isinstance(ret, OrderedDict)
    assert list(ret) == ["2", "0", "1"]
    for layer, traced in ret.items():
        assert traced.layer == layer
        assert torch.equal(traced.output, expected[layer][0])
    assert_clean(model)


@pytest.mark.parametrize("layers", [["0", "2", "0"], ("0", "2"), {"0": 1, "2": 2}.keys()])
def test_layers_are_any_iterable_and_count_once(layers):
    model = small()
    with nethook.TraceDict(model, iter(layers), edit_output=lambda x, layer: x + 1) as ret:
        result = model(X)
    assert list(ret) == ["0", "2"]
    assert torch.equal(result, model[2]((model[0](X) + 1).relu()) + 1)


def test_one_name_for_several_is_told():
    with pytest.raises(TypeError, match=r"\['12'\]"):
        nethook.TraceDict(small(), "12")


def test_edit_output_gets_the_name_of_each_layer():
    model, seen = small(), []

    def edit(output, layer):
        seen.append(layer)
        return output * 0 if layer == "1" else output

    with nethook.TraceDict(model, ["2", "1", "0"], edit_output=edit) as ret:
        result = model(X)
    assert seen == ["0", "1", "2"]
    assert torch.equal(result, model[2](torch.zeros(2, 4)))
    assert not ret["1"].output.any()
    assert ret["0"].output.any()


def test_options_can_be_given_for_each_layer():
    model = nn.Sequential(OrderedDict(block=InPlace(), out=nn.Linear(4, 2)))
    names = ["block.lin", "block.relu", "out"]
    with nethook.TraceDict(
        model,
        names,
        retain_output={"block.lin": True, "block.relu": False},
        retain_input={"out": True},
        clone={"block.lin": True},
        detach={"out": True},
        edit_output={"out": lambda x: x + 1, "block.lin": None},
    ) as ret:
        result = model(X)
    assert [hasattr(ret[name], "output") for name in names] == [True, False, False]
    assert torch.equal(ret["block.lin"].output, model.block.lin(X))
    assert ret["block.lin"].output.requires_grad
    assert [hasattr(ret[name], "input") for name in names] == [False, False, True]
    assert torch.equal(ret["out"].input, model.block(X))
    assert not ret["out"].input.requires_grad
    assert result.requires_grad
    assert torch.equal(result, model(X) + 1)


def test_retain_grad_can_be_given_for_each_layer():
    model = small()
    with nethook.TraceDict(model, ["0", "2"], retain_grad={"0": True}) as ret:
        result = model(X)
        result.sum().backward()
    assert ret["0"].output.grad is not None
    assert ret["2"].output is result


def test_an_option_for_a_layer_that_is_not_traced_is_ignored():
    model, edit = small(), {"1": lambda x: x * 0, "0": lambda x: x + 1, "no such layer": None}
    with nethook.TraceDict(model, ["0", "2"], retain_input={"1": True}, edit_output=edit) as ret:
        result = model(X)
    assert torch.equal(result, model[2]((model[0](X) + 1).relu()))
    assert not hasattr(ret["0"], "input")
    assert_clean(model)


def test_what_was_retained_can_be_set():
    model = small()
    with nethook.TraceDict(model, ["0", "2"], retain_output={"0": True}) as ret:
        model(X)
        ret["0"].output = ret["0"].output.detach() * 2
        ret["2"].input = ret["2"].output = "of one's own"
    assert torch.equal(ret["0"].output, model[0](X) * 2)
    assert ret["2"].input == ret["2"].output == "of one's own"
    with nethook.Trace(model, "0") as trace:
        trace.output = trace.input = 3
        assert (trace.output, trace.input) == (3, 3)
        model(X)
        assert torch.equal(trace.output, model[0](X))
    assert trace.input == 3
    del trace.input, ret["0"].output
    assert [hasattr(trace, "input"), hasattr(ret["0"], "output")] == [False, False]


def test_one_layer_of_several_can_be_closed():
    model = small()
    with nethook.TraceDict(model, ["0", "1", "2"], edit_output=lambda x: x + 1) as ret:
        ret["2"].stop = True
        with pytest.raises(nethook.StopForward):
            model(X)
        kept = ret["0"].output
        ret["0"].close()
        with ret["2"]:
            pass
        result = model(X * 2)  # it does not stop any more
    assert ret["0"].output is kept
    assert torch.equal(result, model[2](model[0](X * 2).relu() + 1))


def test_an_edit_that_is_false_is_none():
    model = small()
    with nethook.TraceDict(model, ["0", "1"], edit_output={"0": False}) as ret:
        result = model(X)
    with nethook.Trace(model, "0", edit_output=False):
        assert torch.equal(model(X), result)
    assert torch.equal(ret["0"].output, model[0](X))


def test_stop_comes_after_the_last_layer_of_the_list():
    model, ran = small(), []
    model[1].register_forward_hook(lambda *args: ran.append("1"))
    with nethook.TraceDict(model, ["2", "0"], stop=True) as ret:
        model(X)
    assert ran == []
    assert torch.equal(ret["0"].output, model[0](X))
    assert not hasattr(ret["2"], "output")
    with nethook.TraceDict(model, ["0", "1", "0"], stop=True) as ret:
        model(X)
    assert ran == ["1"]
    assert [hasattr(traced, "output") for traced in ret.values()] == [True, True]


def test_stop_can_name_the_layer():
    model = small()
    with nethook.TraceDict(model, ["0", "1", "2"], stop={"1": True}) as ret:
        model(X)
    assert [hasattr(traced, "output") for traced in ret.values()] == [True, True, False]
    assert_clean(model)


def test_a_trace_dict_without_a_with_is_closed_by_hand():
    model = small()
    traces = nethook.TraceDict(model, ["0", "2"])
    model(X)
    traces.close()
    assert_clean(model)
    assert torch.equal(traces["0"].output, model[0](X))


def test_finding_layers_does_not_depend_on_the_size_of_the_model(monkeypatch):
    def work(blocks):
        model = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(blocks)))
        names = [f"{n}.1" for n in range(8)]
        nethook.TraceDict(model, names, retain_input=True).close()  # what is cached, is cached
        return work_of(lambda: nethook.TraceDict(model, names, retain_input=True).close())

    def scanned(self, *args, **kwargs):
        raise AssertionError("named_modules was scanned")

    monkeypatch.setattr(nn.Module, "named_modules", scanned)
    assert work(8) == work(200)


def test_the_work_per_layer_does_not_depend_on_how_many_are_traced():
    model = nn.Sequential(*(nn.Identity() for _ in range(200)))

    def work(count):
        names = [str(n) for n in range(count)]
        nethook.TraceDict(model, names).close()
        return work_of(lambda: nethook.TraceDict(model, names).close())

    few, more, many = work(1), work(101), work(199)
    assert many - more < (more - few) * 1.1


# -- recursive_copy --------------------------------------------------------------------------------


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


# -- subsequence -----------------------------------------------------------------------------------


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


# -- names -----------------------------------------------------------------------------------------


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


# -- invoke_with_optional_args ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (lambda: "none", (1,), {"a": 2}, "none"),
        (lambda x: x, (1, 2), {"a": 3}, 1),
        (lambda a: a, (1,), {"a": 3}, 3),
        (lambda x, a: (x, a), (1,), {"a": 3}, (1, 3)),
        (lambda a, x: (a, x), (1,), {"a": 3}, (3, 1)),
        (lambda x, y: (x, y), (1,), {"a": 3, "b": 4}, (1, 3)),
        (lambda b, x, y: (b, x, y), (), {"a": 3, "b": 4, "c": 5}, (4, 3, 5)),
        (lambda x, y=9: (x, y), (1,), {}, (1, 9)),
        (lambda x, y=9: (x, y), (1, 2), {}, (1, 2)),
        (lambda x, y=9, *, a=8: (x, y, a), (1,), {"a": 3}, (1, 9, 3)),
        (lambda x, y=9, a=8: (x, y, a), (1,), {"a": 3}, (1, 9, 3)),
        (lambda *xs: xs, (1, 2), {"a": 3}, (1, 2, 3)),
        (lambda x, *xs, a: (x, xs, a), (1, 2, 3), {"a": 4}, (1, (2, 3), 4)),
        (lambda **more: more, (), {"a": 3}, {"a": 3}),
        (lambda x, **more: (x, more), (1, 2), {"a": 3}, (1, {"a": 3})),
        (lambda x, /, **more: (x, more), (1,), {"x": 3}, (1, {"x": 3})),
        (lambda *xs, **more: (xs, more), (1,), {"a": 3}, ((1,), {"a": 3})),
        (DoublingIntervention(), (4,), {"layer": "0"}, 8),
        (DoublingIntervention().method, (4,), {"layer": "0"}, 8),
    ],
)
def test_a_function_is_called_with_the_arguments_that_it_takes(function, args, kwargs, expected):
    assert nethook.invoke_with_optional_args(function, *args, **kwargs) == expected


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda x, y, z: 0, "y, z"),
        (lambda x, *, a: 0, "a"),
    ],
)
def test_a_function_that_requires_more_is_a_type_error(function, missing):
    with pytest.raises(TypeError, match=f"requires {missing}, beyond"):
        nethook.invoke_with_optional_args(function, 1)


# -- InstrumentedModel -----------------------------------------------------------------------------


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


# -- Callbacks -------------------------------------------------------------------------------------


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


# -- values and edits as attributes of the model ---------------------------------------------------


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


# -- the code of causal tracing, as it is written against nethook ----------------------------------


class GPT2Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = self.c_attn(hidden_states).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.c_proj(mixed), None


class GPT2MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, hidden_states):
        return self.c_proj(F.gelu(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    """As in GPT-2: arguments by keyword, a tuple back."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = GPT2Attention(width), GPT2MLP(width)

    def forward(self, hidden_states, attention_mask=None):
        attended, _ = self.attn(
            hidden_states=self.ln_1(hidden_states), attention_mask=attention_mask
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states)), attended


class Body(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(GPT2Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        h = self.wte(input_ids) + self.wpe(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for block in self.h:
            h = block(h, attention_mask=mask)[0]
        return self.ln_f(h)


class TinyGPT(nn.Module):
    def __init__(self, words=29, width=16, layers=3):
        super().__init__()
        self.transformer = Body(words, width, layers)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.lm_head(self.transformer(input_ids)))


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return TinyGPT().eval()


INP = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9]] * 4)}
EMBED, LAYERS = "transformer.wte", [f"transformer.h.{n}" for n in range(3)]
SUBJECT = (1, 3)


def untuple(x):
    return x[0] if isinstance(x, tuple) else x


def corruption(b, e, x):
    noise = np.random.RandomState(1).randn(x.shape[0] - 1, e - b, x.shape[2])
    return 3.0 * torch.from_numpy(noise).to(x.device)


def trace_with_patch(model, inp, states, answer, tokens_to_mix, trace_layers=None):
    """Row 0 runs clean, the others with noise at the subject and some states of row 0 restored."""
    restored = defaultdict(list)
    for token, layer in states:
        restored[layer].append(token)

    def patch_rep(x, layer):
        if layer == EMBED:
            b, e = tokens_to_mix
            x[1:, b:e] += corruption(b, e, x)
            return x
        if layer not in restored:
            return x
        h = untuple(x)
        for token in restored[layer]:
            h[1:, token] = h[0, token]
        return x

    more = trace_layers or []
    with (
        torch.no_grad(),
        nethook.TraceDict(
            model, [EMBED] + list(restored.keys()) + more, edit_output=patch_rep
        ) as td,
    ):
        outputs = model(**inp)
    probs = torch.softmax(outputs.logits[1:, -1, :], dim=1).mean(dim=0)[answer]
    if trace_layers is None:
        return probs
    states = [untuple(td[layer].output).detach().cpu() for layer in trace_layers]
    return probs, torch.stack(states, dim=2)


def trace_by_hand(model, inp, states, answer, tokens_to_mix, trace_layers=()):
    """The same with hooks of torch."""
    modules, handles, seen = dict(model.named_modules()), [], {}

    def corrupt(module, args, output):
        b, e = tokens_to_mix
        output = output.clone()
        output[1:, b:e] += corruption(b, e, output)
        return output

    def restore(token, module, args, output):
        h = output[0].clone()
        h[1:, token] = h[0, token]
        return (h, *output[1:])

    def look(layer, module, args, output):
        seen[layer] = output[0].clone()

    handles.append(modules[EMBED].register_forward_hook(corrupt))
    for token, layer in states:
        handles.append(modules[layer].register_forward_hook(functools.partial(restore, token)))
    for layer in trace_layers:
        handles.append(modules[layer].register_forward_hook(functools.partial(look, layer)))
    with torch.no_grad():
        logits = model(**inp).logits
    for handle in handles:
        handle.remove()
    probs = torch.softmax(logits[1:, -1, :], dim=1).mean(dim=0)[answer]
    return probs, torch.stack([seen[n] for n in trace_layers], dim=2) if trace_layers else None


def test_causal_tracing_gives_what_hooks_written_by_hand_give(gpt):
    with torch.no_grad():
        answer = gpt(**INP).logits[0, -1].argmax()
    clean = torch.softmax(gpt(**INP).logits[0, -1], 0)[answer]
    low = trace_with_patch(gpt, INP, [], answer, SUBJECT)
    assert torch.equal(low, trace_by_hand(gpt, INP, [], answer, SUBJECT)[0])
    assert abs(low - clean) > 1e-4
    scores = torch.zeros(6, 3)
    for token in range(6):
        for n, layer in enumerate(LAYERS):
            scores[token, n] = trace_with_patch(gpt, INP, [(token, layer)], answer, SUBJECT)
            by_hand, _ = trace_by_hand(gpt, INP, [(token, layer)], answer, SUBJECT)
            assert torch.equal(scores[token, n], by_hand)
    assert scores.std() > 0
    assert torch.isclose(scores[5, 2], clean)  # the last state of the last token decides
    assert_clean(gpt)


def test_causal_tracing_returns_the_states_of_all_layers(gpt):
    states = [(2, LAYERS[0]), (1, LAYERS[0]), (5, LAYERS[1])]
    probs, traced = trace_with_patch(gpt, INP, states, 7, SUBJECT, trace_layers=LAYERS)
    by_hand, expected = trace_by_hand(gpt, INP, states, 7, SUBJECT, trace_layers=LAYERS)
    assert torch.equal(probs, by_hand)
    assert torch.equal(traced, expected)
    assert traced.shape == (4, 6, 3, 16)


def test_a_first_pass_can_be_read_in_the_edits_of_a_second(gpt):
    mlps = [f"{layer}.mlp" for layer in LAYERS]

    def patch(x, layer):
        if layer == EMBED:
            x[1:, 1:3] += corruption(1, 3, x)
        elif not first_pass and layer in LAYERS:
            untuple(x)[1:] = untuple(x)[:1]  # restore all
        elif not first_pass:
            x[1:, 2] = first[layer].output[1:, 2]  # but freeze this
        return x

    results, first = [], {}
    for first_pass in (True, False):
        layers = [EMBED, *LAYERS, *mlps]
        with torch.no_grad(), nethook.TraceDict(gpt, layers, edit_output=patch) as td:
            results.append(gpt(**INP).logits)
        if first_pass:
            first = td
    frozen, free = td[mlps[1]].output, first[mlps[1]].output
    assert torch.equal(frozen[1:, 2], free[1:, 2])
    assert not torch.equal(frozen[1:, 1], free[1:, 1])
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1][0], results[1][1])  # the last layer was restored


def test_representations_are_extracted_with_input_and_stop(gpt):
    layer = "transformer.h.1.mlp.c_proj"
    ran = []
    gpt.lm_head.register_forward_hook(lambda *args: ran.append(1))
    with torch.no_grad():
        with nethook.Trace(
            module=gpt, layer=layer, retain_input=True, retain_output=True, stop=True
        ) as tr:
            gpt(**INP)
    block = gpt.transformer.h[1]
    key = F.gelu(block.mlp.c_fc(gpt_output(gpt, "transformer.h.1.ln_2")))
    assert ran == [1]  # by the oracle only
    assert torch.equal(tr.input, key)
    assert torch.equal(tr.output, block.mlp.c_proj(key))
    assert tr.input[torch.arange(4), torch.tensor([2, 2, 3, 3])].shape == (4, 64)


def test_the_inputs_of_blocks_and_of_modules_called_by_keyword_are_extracted(gpt):
    names = ["transformer.h.2", "transformer.h.2.attn"]
    with torch.no_grad(), nethook.TraceDict(gpt, names, retain_input=True, stop=True) as td:
        gpt(**INP)
    hidden, mask = td["transformer.h.2.attn"].input
    expected = gpt_output(gpt, "transformer.h.1")[0]
    assert torch.equal(hidden, gpt.transformer.h[2].ln_1(expected))
    assert mask.dtype is torch.bool
    assert torch.equal(td["transformer.h.2"].input, expected)
    assert not hasattr(td["transformer.h.2"], "output")


def test_weights_are_edited_and_put_back_under_no_grad(gpt):
    name = "transformer.h.1.mlp.c_proj.weight"
    before = gpt(**INP).logits
    with torch.no_grad():
        saved = nethook.get_parameter(gpt, name).detach().clone()
        u, v = torch.randn(16, 1), torch.randn(1, 64)
        nethook.get_parameter(gpt, name)[...] += u @ v
        changed = gpt(**INP).logits
        assert torch.equal(gpt.transformer.h[1].mlp.c_proj.weight, saved + u @ v)
        nethook.get_parameter(gpt, name)[...] = saved
    assert not torch.equal(changed, before)
    assert torch.equal(gpt(**INP).logits, before)


def test_a_vector_is_optimised_through_an_edit(gpt):
    """As a new value is found for a key: a delta at one token, the weights frozen."""
    layer, target = "transformer.h.1.mlp", torch.tensor(11)
    delta = torch.zeros(16, requires_grad=True)
    first = []

    def edit_output_fn(cur_out, cur_layer):
        if cur_layer == layer:
            if not first:
                first.append(cur_out[0, 2].detach().clone())
            cur_out[:, 2, :] += delta
        return cur_out

    nethook.set_requires_grad(False, gpt)
    optimizer = torch.optim.Adam([delta], lr=0.3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with nethook.TraceDict(
            module=gpt,
            layers=[LAYERS[-1], layer],
            retain_input=False,
            retain_output=True,
            edit_output=edit_output_fn,
        ) as tr:
            logits = gpt(**INP).logits
        loss = F.cross_entropy(logits[:, -1], target.expand(4))
        assert untuple(tr[LAYERS[-1]].output).requires_grad
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(p.grad is None for p in gpt.parameters())
    assert torch.equal(first[0], gpt_output(gpt, layer)[0, 2])
    assert_clean(gpt)


def gpt_output(model, layer):
    (output,) = by_hand(model, lambda m: m(**INP), [layer]).outputs[layer]
    return output
