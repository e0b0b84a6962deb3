"""hook(): what its function is given and may return, and its order among other hooks."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from models import Giving, Recursive, small
from oracles import assert_clean
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10


# -- functions ------------------------------------------------------------------------------------


def test_print_can_be_the_function(capsys):
    model = nn.Identity()
    with hl.hook(model, "", print):
        model(torch.ones(2))
    assert capsys.readouterr().out == "tensor([1., 1.])\n"
    assert_clean(model)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        F.relu,
        nn.ReLU(),
        torch.Tensor.relu,
        lambda *args: torch.relu(*args),
        lambda value, inplace=False: F.relu(value, inplace),
        lambda value, *rest, **more: torch.relu(value),
        lambda value, *, option=None: torch.relu(value),
        functools.partial(torch.clamp, min=0),
    ],
)
def test_what_a_function_returns_stands_in_the_values_place(function):
    model = nn.Identity()
    with hl.hook(model, "", function):
        assert model(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert model(torch.tensor([-1.0, 1.0])).tolist() == [-1, 1]
    assert_clean(model)


def test_a_second_required_parameter_gets_the_call():
    model, calls = small(), []
    with hl.hook(model, "2", lambda value, call: calls.append(call)):
        model(X), model(X)
    assert [call.index for call in calls] == [0, 1]
    assert [call.place for call in calls] == ["2", "2"]
    assert all(call.module is model[2] and call.recomputed is False for call in calls)
    assert "2" in repr(calls[0])


def test_the_call_tells_how_many_arguments_were_passed_by_position():
    model, seen = Giving(lambda x, y=None: x), []
    with hl.hook(model, ":inputs", lambda value, call: seen.append((list(value), call.positional))):
        with hl.edit(model, ":input", lambda value, call: value * call.positional):
            given = [model(X), model(X, X), model(X, y=X), model(x=X)]
    assert [count for _, count in seen] == [1, 2, 1, 0]
    assert torch.equal(given[1], 2 * X)
    assert not given[3].any()


class KeywordsToo(nn.Module):
    """Calls its child with one argument by position and one by name, and applies `mul`."""

    def __init__(self):
        super().__init__()
        self.child = Giving(lambda x, y: x + y)

    def forward(self, x):
        return torch.mul(self.child(x, y=x + 1), 2)


@pytest.mark.parametrize("verb", [hl.hook, hl.edit])
@pytest.mark.parametrize("port", ["child", "child:inputs"])
def test_the_call_of_an_output_has_the_arguments_that_a_hook_of_torch_gets(verb, port):
    model, by_torch, ours = KeywordsToo(), [], []
    model.child.register_forward_hook(
        lambda module, args, kwargs, output: by_torch.append((args, kwargs)), with_kwargs=True
    )

    def look(value, call):
        ours.append((call.args, dict(call.kwargs)))
        return value

    with verb(model, [port, "child"], look):
        handle = model.child.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        model(X)
        handle.remove()
    args, kwargs = ours[-1]
    assert args[0] is by_torch[0][0][0]
    assert kwargs["y"] is by_torch[0][1]["y"]
    assert (len(args), list(kwargs)) == (1, ["y"])
    assert len(ours) == 1 or ours[0] == ((), {})  # before the call there is nothing to say


def test_the_call_of_an_operation_has_its_arguments():
    model, seen = KeywordsToo(), []
    with hl.hook(model, "/mul", lambda value, call: seen.append((call.args, call.kwargs))):
        model(X)
    ((x, two), kwargs) = seen[0]
    assert torch.equal(x, X + (X + 1))
    assert (two, dict(kwargs)) == (2, {})


def test_a_method_with_a_second_required_parameter_gets_the_call():
    class Watcher:
        def __init__(self):
            self.seen = []

        def __call__(self, value, call):
            self.seen.append(call.index)

        def look(self, value, call, extra=1):
            self.seen.append(call.index)

    model, watcher = small(), Watcher()
    with hl.hook(model, "0", watcher), hl.hook(model, "0", watcher.look):
        model(X)
    assert watcher.seen == [0, 0]


def test_a_parameter_with_a_default_never_gets_the_call():
    model, given = small(), []
    with hl.hook(model, "0", lambda value, p=0.5: given.append(p)):
        model(X)
    assert given == [0.5]


def test_the_call_has_the_first_name_of_a_shared_module():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    seen = []
    with hl.hook(model, "1", lambda value, call: seen.append((call.place, call.index))):
        model(X)
    assert seen == [("0", 0), ("0", 1)]


def test_a_function_that_returns_none_changes_nothing():
    model = small()
    bare = model(X)
    with hl.hook(model, ["**", "0:input", "2:inputs"], lambda value: None):
        assert torch.equal(model(X), bare)
    assert_clean(model)


def test_a_function_may_return_what_does_not_fit():
    model = nn.Sequential(nn.Identity())
    with hl.hook(model, "0", lambda value: "anything"):
        assert model(X) == "anything"


def test_input_functions_change_what_the_module_gets():
    model = small()
    expected = model(X + 1)
    with hl.hook(model, ":input", lambda value: value + 1):
        assert torch.equal(model(X), expected)
        assert torch.equal(model(input=X), expected)
    assert_clean(model)


def test_a_parameter_is_shown_at_each_call_and_cannot_be_replaced():
    model, seen = small(), []
    with hl.hook(model, "0.weight", lambda value: seen.append(value)):
        model(X), model(X)
    assert [value is model[0].weight for value in seen] == [True, True]
    with pytest.raises(hl.PlaceError, match=r"0\.weight.*edit"):
        with hl.hook(model, "0.weight", torch.relu):
            model(X)
    assert_clean(model)


def test_gradients_of_a_parameter_are_numbered_by_backward_pass():
    model, seen = small(), []
    with hl.hook(model, "0.weight:grad", lambda grad, call: seen.append(call.index)):
        model(X).sum().backward()
        model(X).sum().backward()
    assert seen == [0, 1]
    assert_clean(model)


def test_a_function_gets_a_copy_of_the_gradient():
    model, other = small(), small()
    other.load_state_dict(model.state_dict())

    def ruin(grad):
        grad.zero_()

    with hl.hook(model, ["2:grad_output", "0:grad_input", "0.weight:grad"], ruin):
        model(X.clone().requires_grad_()).sum().backward()
    other(X).sum().backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)
    assert_clean(model)


# -- order ----------------------------------------------------------------------------------------


def test_hooks_of_the_user_run_before_and_after_ours_in_order_of_registration():
    model, order = nn.Identity(), []
    first = model.register_forward_hook(lambda m, i, o: order.append(("before", o.item())) or o + 1)
    with hl.hook(model, "", lambda value: order.append(("ours", value.item())) or value + 10):
        last = model.register_forward_hook(lambda m, i, o: order.append(("after", o.item())))
        front = model.register_forward_hook(
            lambda m, i, o: order.append(("prepended", o.item())), prepend=True
        )
        model(torch.tensor(0.0))
        assert order == [("prepended", 0), ("before", 0), ("ours", 1), ("after", 11)]
    order.clear()
    model(torch.tensor(0.0))
    assert order == [("prepended", 0), ("before", 0), ("after", 1)]
    for handle in (first, last, front):
        handle.remove()
    assert_clean(model)


def test_global_hooks_run_before_ours():
    model, order = nn.Identity(), []
    pre = torch_module.register_module_forward_pre_hook(lambda m, i: order.append("global pre"))
    post = torch_module.register_module_forward_hook(lambda m, i, o: order.append("global"))
    try:
        with hl.hook(model, ":input", lambda v: order.append("input")):
            with hl.hook(model, "", lambda v: order.append("output")):
                model(X)
    finally:
        pre.remove(), post.remove()
    assert order == ["global pre", "input", "global", "output"]
    assert_clean(model)


def test_a_hook_that_is_always_called_still_is_when_ours_raises():
    model, called = nn.Identity(), []
    handle = model.register_forward_hook(lambda m, i, o: called.append(o), always_call=True)

    def fail(value):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        with hl.hook(model, ":input", fail):
            model(X)
    assert called == [None]
    handle.remove()
    assert_clean(model)


def test_a_hook_may_remove_itself_while_it_runs():
    model, seen = small(), []

    def once(value):
        seen.append(value)
        handle.remove()
        handle.remove()

    for place in ("0", "0:input", ":input", ""):
        handle = hl.hook(model, place, once).attach()
        model(X), model(X)
        assert len(seen) == 1
        seen.clear()
        assert_clean(model)


@pytest.mark.parametrize("place", ["0", "0:input"])
def test_a_hook_that_is_removed_by_an_earlier_one_does_not_act_any_more(place):
    model = small()
    expected = model[0](X)
    first = hl.hook(model, place, lambda value: second.remove()).attach()
    second = hl.edit(model, place, hl.zero()).attach()
    assert torch.equal(model[0](X), expected)
    first.remove()
    assert_clean(model)


def test_a_hook_that_is_added_while_the_model_runs_acts_on_what_comes_after():
    model, handles, seen = small(), [], []

    def add(value):
        handles.append(hl.hook(model, ["0", "2"], lambda v, call: seen.append(call.place)).attach())

    with hl.hook(model, "1", add):
        model(X)
    assert seen == ["2"]
    handles[0].remove()
    assert_clean(model)


# -- numbering ------------------------------------------------------------------------------------


def test_inputs_and_outputs_of_plain_calls_have_the_same_numbers():
    model, seen = small(), []
    with hl.hook(model, ["0:input", "0"], lambda v, call: seen.append((call.place, call.index))):
        model(X), model(X)
    assert seen == [("0:input", 0), ("0", 0), ("0:input", 1), ("0", 1)]


def test_a_call_that_raised_does_not_shift_the_numbers_of_later_inputs():
    model, seen = small(), []
    with hl.hook(model, ["0:input", "0"], lambda v, call: seen.append((call.place, call.index))):
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 7))
        seen.clear()
        model(X)
    assert seen == [("0:input", 0), ("0", 0)]


def test_outputs_of_a_recursive_module_are_numbered_by_completion():
    model, seen = Recursive(), []
    with hl.hook(model, "", lambda v, call: seen.append((call.index, v))):
        out = model(X, depth=2)
    assert [index for index, _ in seen] == [0, 1, 2]
    assert torch.equal(seen[-1][1], out)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_is_marked(reentrant):
    model, seen = small(), []
    x = X.clone().requires_grad_()
    with hl.hook(model, "0", lambda v, call: seen.append((call.index, call.recomputed))):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert seen == [(0, False), (0, True)]
    assert_clean(model)


# -- beside hooks of the user ---------------------------------------------------------------------


def test_no_global_hook_is_ever_used():
    model = small()
    with hl.capture(model, "**", "**:grad_output"), hl.edit(model, "0", hl.scale(1.0)):
        assert not torch_module._global_forward_hooks
        assert not torch_module._global_forward_pre_hooks
        assert not torch_module._global_backward_hooks
        assert not torch_module._has_any_global_hook()
        model(X).sum().backward()


def test_handles_of_torch_and_ours_never_collide():
    layer, seen = nn.Identity(), []
    handles = [layer.register_forward_hook(lambda m, a, o: seen.append("torch")) for _ in range(20)]
    contexts = [
        hl.hook(layer, "", lambda value: seen.append("hookline")).attach() for _ in range(20)
    ]
    handles += [
        layer.register_forward_hook(lambda m, a, o: seen.append("torch")) for _ in range(20)
    ]
    layer(X)
    assert seen == ["torch"] * 20 + ["hookline"] * 20 + ["torch"] * 20
    for handle in handles:
        handle.remove()
    seen.clear()
    layer(X)
    assert seen == ["hookline"] * 20
    for context in contexts:
        context.remove()
    assert_clean(layer)


def test_removing_ours_leaves_the_hooks_of_the_user_in_their_order():
    layer, order = nn.Identity(), []
    for name in "ab":
        layer.register_forward_hook(lambda m, a, o, name=name: order.append(name))
    with hl.hook(layer, "", lambda value: None):
        layer.register_forward_hook(lambda m, a, o: order.append("c"))
        layer(X)
    layer(X)
    assert order == ["a", "b", "c"] * 2


def test_the_effect_of_a_hook_equals_that_of_a_public_one():
    by_hand, ours = small(), small()
    ours.load_state_dict(by_hand.state_dict())
    by_hand[0].register_forward_hook(lambda m, a, o: o * 2)
    by_hand[2].register_forward_pre_hook(lambda m, a: (a[0] - 1,))
    with hl.hook(ours, "0", lambda v: v * 2), hl.hook(ours, "2:input", lambda v: v - 1):
        assert torch.equal(ours(X), by_hand(X))
    assert_clean(ours)


def test_a_call_that_is_taken_for_the_name_of_a_layer_is_an_error():
    model, x = nn.Sequential(nn.ReLU()), torch.ones(2)

    def double(output, layer):  # as in baukit: it would silently change nothing
        return output * 2 if layer == "0" else output

    with (
        pytest.raises(TypeError, match=r"compared with '0'.*call\.place"),
        hl.edit(model, "0", double),
    ):
        model(x)
    calls = []
    with hl.hook(model, "0", lambda value, call: calls.append(call)):
        model(x), model(x)
    assert calls[0] != calls[1]
    assert len({*calls, calls[0]}) == 2
    assert_clean(model)
