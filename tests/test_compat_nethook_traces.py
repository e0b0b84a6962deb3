"""hookline.compat.nethook: Trace and TraceDict."""

import contextlib
import copy
import functools
import gc
import pickle
from collections import OrderedDict

import pytest
import torch
from models import Failing, Giving, InPlace, Recursive, Swallowing, named, small
from oracles import assert_clean, bits, by_hand, work_of
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


# -- Trace: retaining -----------------------------------------------------------------------------


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


# -- Trace: inputs --------------------------------------------------------------------------------


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


# -- Trace: gradients -----------------------------------------------------------------------------


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


# -- Trace: editing -------------------------------------------------------------------------------


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


# -- Trace: stopping ------------------------------------------------------------------------------


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


# -- Trace: opening and closing -------------------------------------------------------------------


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


# -- repeated calls -------------------------------------------------------------------------------


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


# -- TraceDict ------------------------------------------------------------------------------------


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


# -- invoke_with_optional_args --------------------------------------------------------------------


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
