"""Activation checkpointing: each call counts once, and runs again as it ran first."""

import contextlib
import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import Giving, small
from oracles import assert_clean
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl

# torch's own words on a reentrant checkpoint without gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
X = torch.arange(12.0).reshape(4, 3) / 10
MODES = [True, False, "composable"]
modes = pytest.mark.parametrize("mode", MODES, ids=["reentrant", "non-reentrant", "composable"])


def run_in(mode):
    """`run(function, x)` that checkpoints; the composable way is made of hooks on a module."""
    if mode != "composable":
        return lambda function, x: checkpoint(function, x, use_reentrant=mode)
    from torch.distributed._composable.checkpoint_activation import checkpoint as make

    class Wrapped(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.forward = function if not isinstance(function, nn.Module) else function.__call__

    return lambda function, x: make(Wrapped(function))(x)


def without_checkpoint(function, x):
    return function(x)


REGIONS = {
    "no region": lambda m, run: lambda x: m(torch.tanh(m(x))),
    "one call a region": lambda m, run: lambda x: run(m, torch.tanh(run(m, x))),
    "two calls in one region": lambda m, run: lambda x: run(lambda z: m(torch.tanh(m(z))), x),
    "two regions of two calls": lambda m, run: (
        lambda x: run(lambda z: m(torch.tanh(m(z))), run(lambda z: m(torch.tanh(m(z))), x))
    ),
    "a call between regions": lambda m, run: lambda x: run(m, m(torch.tanh(run(m, x)))),
    "a region in a region": lambda m, run: (
        lambda x: run(lambda z: m(torch.tanh(run(lambda y: m(torch.tanh(m(y))), m(z)))), x)
    ),
}
regions = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())


def sine_in_place(value):
    return value.sin_()


EDITS = {
    "noise": lambda m: hl.edit(m, "", hl.noise(0.5, seed=1) | hl.scale(2.0)),
    "noise at the input": lambda m: hl.edit(m, ":input", hl.noise(0.5, seed=1)),
    "by call": lambda m: hl.edit(m, "", lambda value, call: value * (call.index + 2)),
    "one call": lambda m: hl.edit(m, "", lambda value: value.sin(), calls=1),
    "in place": lambda m: hl.edit(m, "", sine_in_place),
    "a hook": lambda m: hl.hook(m, "", lambda value, call: value.sin() * (call.index + 2)),
    "a weight": lambda m: hl.edit(m, "weight", hl.scale(2.0)),
}
edits = pytest.mark.parametrize("make", EDITS.values(), ids=EDITS.keys())


@modes
@regions
@edits
def test_what_an_edit_makes_of_a_call_is_repeated_in_its_recomputation(make, region, mode):
    model = nn.Linear(3, 3)

    def gradient(run):
        x = X.clone().requires_grad_()
        with make(model):
            region(model, run)(x).square().sum().backward()
        return x.grad

    expected = gradient(without_checkpoint)
    torch.testing.assert_close(gradient(run_in(mode)), expected)
    assert_clean(model)


@modes
@edits
def test_an_edit_that_ends_before_the_backward_is_refused(make, mode):
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    forward = REGIONS["two regions of two calls"](model, run_in(mode))
    kept = []
    with pytest.raises(hl.errors.ChangeError, match="recompute"), make(model):
        kept.append(forward(x))
    assert kept[0].requires_grad
    assert_clean(model)


@modes
@edits
def test_an_edit_may_end_before_the_backward_if_nothing_is_checkpointed_or_kept(make, mode):
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    with make(model):
        REGIONS["no region"](model, without_checkpoint)(x)
    with make(model), torch.no_grad():
        REGIONS["one call a region"](model, run_in(mode))(x)
    with make(model):
        out = REGIONS["one call a region"](model, run_in(mode))(x)
        del out  # no backward can come
        gc.collect()
    assert_clean(model)


@modes
def test_after_the_backward_an_edit_ends_in_peace_though_the_loss_lives_on(mode):
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    with hl.edit(model, "", hl.scale(2.0)):
        loss = REGIONS["two calls in one region"](model, run_in(mode))(x).sum()
        loss.backward()
    assert loss.requires_grad
    assert_clean(model)


@modes
def test_a_handle_that_is_removed_before_the_backward_warns(mode):
    model = nn.Linear(3, 3)
    handle = hl.edit(model, "", hl.scale(2.0)).attach()
    out = run_in(mode)(model, X.clone().requires_grad_())
    with pytest.warns(hl.errors.HooklineWarning, match="recompute"):
        handle.remove()
    assert out.requires_grad
    assert_clean(model)


@modes
def test_a_hook_that_only_looks_may_end_before_the_backward(mode):
    model, seen = nn.Linear(3, 3), []
    x = X.clone().requires_grad_()
    with hl.hook(model, "", lambda value: seen.append(value.shape)):
        out = run_in(mode)(model, x)
    out.sum().backward()
    assert len(seen) == 1


@modes
@regions
def test_a_function_is_told_which_call_runs_again(region, mode):
    model, seen = nn.Linear(3, 3), []
    x = X.clone().requires_grad_()
    given = {}

    def look(value, call):
        seen.append((call.index, call.recomputed))
        value = value.detach()
        if call.recomputed:
            assert torch.equal(value, given[call.index])
        else:
            given[call.index] = value.clone()

    with hl.hook(model, ":input", look):
        region(model, run_in(mode))(x).square().sum().backward()
    first = [index for index, again in seen if not again]
    assert first == list(range(len(first)))
    assert_clean(model)


@modes
@regions
def test_every_call_is_captured_once_and_as_it_was(region, mode):
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    with hl.capture(model, "", ":input", detach=True) as record:
        out = region(model, run_in(mode))(x)
        out.square().sum().backward()
    with hl.capture(model, "", ":input", detach=True) as bare:
        expected = region(model, without_checkpoint)(X)
    torch.testing.assert_close(out, expected)
    for place in ("", ":input"):
        assert len(record.calls(place)) == len(bare.calls(place))
        for one, other in zip(record.calls(place), bare.calls(place), strict=True):
            torch.testing.assert_close(one, other)
    assert_clean(model)


@modes
@regions
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_gradients_are_those_without_checkpointing_or_refused(region, mode, port):
    model = nn.Linear(3, 3)

    def grads(run):
        x = X.clone().requires_grad_()
        with hl.capture(model, f":{port}") as record:
            region(model, run)(x).square().sum().backward()
        return record.calls(f":{port}")

    expected = grads(without_checkpoint)
    with contextlib.suppress(hl.errors.GradientNotAvailable):
        found = grads(run_in(mode))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert_clean(model)


@modes
def test_gradients_of_one_call_a_region_are_there(mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = X.clone().requires_grad_()
    with hl.capture(model, "*:grad_output", "*.weight:grad") as record:
        run_in(mode)(model, x).square().sum().backward()
    y = X.clone().requires_grad_()
    with hl.capture(model, "*:grad_output", "*.weight:grad") as bare:
        model(y).square().sum().backward()
    for place in bare.places():
        torch.testing.assert_close(record[place], bare[place])


@modes
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_gradients_of_a_backward_in_another_thread_are_there(mode, port):
    # As the threads that autograd has for each GPU do, it runs the regions of this context again.
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def gradients(run, backward):
        with hl.capture(model, f"*:{port}") as record:
            backward(run(model, X.clone().requires_grad_()).square().sum())
        return dict(record.items())

    def in_a_thread(loss):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(loss.backward).result()

    expected = gradients(without_checkpoint, torch.Tensor.backward)
    found = gradients(run_in(mode), in_a_thread)
    assert found.keys() == expected.keys()
    for place, gradient in expected.items():
        torch.testing.assert_close(found[place], gradient)
    assert_clean(model)


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_reentrant_region_without_its_backward_is_named_as_the_reason(port):
    model = nn.Sequential(nn.Linear(3, 3))
    with hl.capture(model, f"0:{port}") as record:
        loss = run_in(True)(model, X.clone().requires_grad_()).sum()
    with pytest.raises(hl.GradientNotAvailable, match=r"checkpoint, and no backward .* Run the b"):
        record[f"0:{port}"]
    loss.backward()


@pytest.mark.parametrize("mode", MODES[:2], ids=["reentrant", "non-reentrant"])
def test_a_checkpointed_training_of_another_thread_is_not_seen(mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def step():
        run_in(mode)(model, X.clone().requires_grad_()).sum().backward()

    with hl.capture(model, "*:grad_output") as record:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(step).result()
        step()
    assert [len(record.calls(place)) for place in record.places()] == [1, 1]


# torch's composable checkpoint recomputes only once, and does not outlive a forward that ends early
@pytest.mark.parametrize("mode", MODES[:2], ids=["reentrant", "non-reentrant"])
def test_a_second_backward_through_the_same_graph_repeats_the_edit(mode):
    model = nn.Linear(3, 3)

    def grads(run):
        x = X.clone().requires_grad_()
        with hl.edit(model, "", lambda value, call: value.sin() * (call.index + 2)):
            loss = REGIONS["two calls in one region"](model, run)(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return x.grad

    torch.testing.assert_close(grads(run_in(mode)), grads(without_checkpoint))


@pytest.mark.parametrize("mode", MODES[:2], ids=["reentrant", "non-reentrant"])
def test_stop_ends_a_checkpointed_forward_and_training_goes_on(mode):
    model = small()
    x = X.clone().requires_grad_()
    with hl.capture(model, "0", stop=True) as record:
        run_in(mode)(model, x)
        raise AssertionError("not reached")
    assert torch.equal(record["0"], model[0](X))
    run_in(mode)(model, x).sum().backward()
    y = X.clone().requires_grad_()
    model(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert_clean(model)


def regions_alive():
    """Return what torch keeps of each checkpointed region as long as its graph is alive."""
    gc.collect()
    kinds = ("_CheckpointFrame", "CheckpointFunctionBackward")
    return [thing for thing in gc.get_objects() if type(thing).__name__ in kinds]


@modes
def test_no_region_is_kept_alive_by_an_attached_edit(mode):
    model, found = nn.Linear(3, 3), []
    handle = hl.edit(model, "", hl.scale(2.0)).attach()
    with hl.hook(model, "", lambda value: found.append(len(regions_alive()))):
        for _ in range(5):
            run_in(mode)(model, X.clone().requires_grad_()).sum().backward()
    assert min(found) >= 1
    # A recomputation that torch ends early is noticed at the next call.
    assert len(regions_alive()) <= 1
    handle.remove()
    assert not regions_alive()


@modes
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_an_attached_gradient_hook_and_edit_act_in_every_step(mode, port):
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), []
    looking = hl.hook(model[2], f":{port}", lambda grad: calls.append(1)).attach()
    zeroing = hl.edit(model[2], f":{port}", hl.zero()).attach()
    for step in range(1, 5):
        model.zero_grad()
        run_in(mode)(model, X.clone().requires_grad_()).sum().backward()
        assert len(calls) == step
        assert model[0].weight.grad.abs().sum() == 0
    looking.remove(), zeroing.remove()
    assert_clean(model)


@modes
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_each_of_many_checkpointed_calls_has_its_gradient_edited(mode, port):
    model, seen = nn.Linear(3, 3), []
    nn.init.eye_(model.weight), nn.init.zeros_(model.bias)
    calls = 100

    def gradient(run):
        x = X.clone().requires_grad_()
        value = x
        with hl.edit(model, f":{port}", hl.scale(1.5)):
            with hl.hook(model, f":{port}", lambda grad, call: seen.append(call.index)):
                for _ in range(calls):
                    value = run(model, value).tanh()
                value.sum().backward()
        return x.grad

    expected = gradient(without_checkpoint)
    found = gradient(run_in(mode))
    torch.testing.assert_close(found, expected)
    assert sorted(seen) == sorted([*range(calls)] * 2)
    assert_clean(model)


@modes
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_region_with_a_part_that_has_no_gradient_delivers_the_other_part_once(mode, early_stop):
    class TwoParts(nn.Module):
        def forward(self, x):
            return x * 2, x.detach()

    model, seen = nn.Sequential(TwoParts()), []
    x = X.clone().requires_grad_()
    with set_checkpoint_early_stop(early_stop):
        with hl.hook(model, "0:grad_output", seen.append):
            run_in(mode)(lambda x: model(x)[0].sin(), x).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_call_that_raises_in_a_checkpoint_takes_no_other_call_away(port):
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            y = self.inner(x)
            with contextlib.suppress(TypeError):
                self.inner(None)
            self.inner(y)  # no gradient
            return y

    model = Trying()
    with hl.capture(model, f"inner:{port}") as record:
        x = checkpoint(model, X.clone().requires_grad_() * 1, use_reentrant=True)
        model(x).sum().backward()
    assert [grad is None for grad in record.calls(f"inner:{port}")] == [False, True, False, True]


def test_a_call_inside_a_backward_is_counted_once_whatever_the_module_returns():
    class Two(nn.Module):
        def forward(self, x):
            return x * 2, x * 3

    model = nn.Sequential(Two())

    def call_again(grad):
        with torch.enable_grad():
            model(X.clone().requires_grad_())

    with hl.capture(model, "0:grad_output") as record:
        one, other = model(X.clone().requires_grad_())
        one.register_hook(call_again)
        (one + other).sum().backward()
    assert len(record.calls("0:grad_output")) == 1


class Checkpointed(nn.Module):
    """Uses parameters inside a region without a call of the modules that hold them."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight, self.listed = nn.Parameter(torch.eye(4)), nn.ParameterList([torch.eye(4)])

    def inner(self, x):
        x = self.attention(x, x, x, need_weights=False)[0].tanh()
        return self.mlp(x) @ self.weight @ self.listed[0]

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant))


PARAMETERS = ["attention.out_proj.weight", "attention.in_proj_weight", "mlp.weight", "weight",
              "listed.0"]  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", PARAMETERS)
def test_an_edited_parameter_of_a_region_wants_the_backward_inside(place, reentrant):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant), torch.randn(2, 3, 4, requires_grad=True)
    other = copy.deepcopy(model)
    other.get_parameter(place).data *= 2
    other(x).square().sum().backward()
    with pytest.raises(hl.ChangeError, match="Run the backward before"):
        with hl.edit(model, place, hl.scale(2.0)):
            loss = model(x).sum()
    assert loss.requires_grad
    with hl.edit(model, place, hl.scale(2.0)):
        model(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_outside_of_a_region_may_have_its_backward_after(reentrant):
    model, x = Checkpointed(reentrant), torch.randn(2, 3, 4, requires_grad=True)
    with hl.edit(model, "head.weight", hl.scale(2.0)):
        loss = model(x).sum()
    loss.backward()
    with hl.replace_module(model, "head", nn.Linear(4, 4)):
        loss = model(x).sum()
    loss.backward()
    assert_clean(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_put_into_a_region_wants_the_backward_inside(reentrant):
    model, x = Checkpointed(reentrant), torch.randn(2, 3, 4, requires_grad=True)
    new = nn.Linear(4, 4)
    with pytest.raises(hl.ChangeError, match="Linear be called inside a checkpointed region"):
        with hl.replace_module(model, "mlp", new):
            loss = model(x).sum()
    assert loss.requires_grad
    with hl.replace_module(model, "mlp", new):
        model(x).sum().backward()
    assert_clean(model)
    assert_clean(new)


@pytest.mark.parametrize("verb", ["edit", "capture"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_reason_for_a_gradient_that_was_lost_is_that_of_the_call_with_gradients(
    mode, nested, verb
):
    module, leaf = Giving(lambda x: (x.view(-1), x * 2) if nested else x.view(-1)), X.clone()
    leaf.requires_grad_()
    place = ":grad_output[0]" if nested and verb == "capture" else ":grad_output"

    def region(x):
        view = module(x * 1)
        view = view[0] if nested else view
        return view.mul_(3)

    def run():
        change = (lambda g: g * 10,) if verb == "edit" else ()
        with getattr(hl, verb)(module, ":grad_output", *change) as record:
            run_in(mode)(region, leaf).sum().backward()
        return record[place]

    with pytest.raises((hl.NeverFired, hl.GradientNotAvailable), match="in place") as told:
        run()
    assert "did not require grad" not in str(told.value)
    assert_clean(module)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_in_a_region_on_which_the_loss_does_not_depend_has_that_as_its_reason(mode):
    lin, leaf = nn.Linear(3, 3), X.clone().requires_grad_()
    with pytest.raises(hl.NeverFired, match="no gradient arrived"):
        with hl.edit(lin, ":grad_output", hl.scale(10.0)):
            run_in(mode)(lambda x: (lin(x).detach() + x).sum(), leaf).backward()
    with hl.capture(lin, ":grad_output") as record:
        run_in(mode)(lambda x: (lin(x).detach() + x).sum(), leaf).backward()
    with pytest.raises(hl.GradientNotAvailable, match="arrived"):
        record[":grad_output"]


class _Attending(nn.Module):
    """Gives one tensor twice to a module that looks whether its arguments are the same."""

    def __init__(self):
        super().__init__()
        self.twice = Giving(lambda x: (y := x * 2, y))
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        query, key = self.twice(x)
        return self.attention(query, key, key, need_weights=False)[0]


@pytest.mark.parametrize("place", ["twice:grad_output[0]", "attention:grad_inputs[query]"])
@modes
def test_an_edit_that_divides_a_tensor_divides_it_in_the_recomputation(mode, place):
    torch.manual_seed(0)
    model, data = _Attending(), torch.randn(2, 3, 4)

    def gradient(run):
        x = data.clone().requires_grad_()
        with hl.edit(model, place, hl.scale(2.0)):
            run(model, x).sum().backward()
        return x.grad

    torch.testing.assert_close(gradient(run_in(mode)), gradient(without_checkpoint))


@pytest.mark.parametrize("port", ["grad_input", "grad_output"])
def test_a_call_that_ran_again_and_got_no_gradient_does_not_say_that_no_backward_ran_it(port):
    unused, used = nn.Linear(3, 3), nn.Linear(3, 3)

    def region(x):
        unused(x)
        return used(x)

    model = nn.ModuleList([unused, used])
    x = torch.randn(2, 3, requires_grad=True)
    with hl.capture(model, f"0:{port}", f"1:{port}") as record:
        checkpoint(region, x, use_reentrant=True).sum().backward()
    assert torch.equal(record[f"1:{port}"], x.grad if port == "grad_input" else torch.ones(2, 3))
    with pytest.raises(hl.GradientNotAvailable, match="no gradient arrived"):
        record[f"0:{port}"]
    assert_clean(model)


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_where_nothing_requires_grad_that_is_the_reason_in_a_region_too(reentrant, port):
    model = nn.Sequential(nn.Linear(3, 3))
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=not reentrant)
    run = run_in(reentrant)
    with hl.capture(model, f"0:{port}") as record, torch.set_grad_enabled(reentrant):
        run(model, X)
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record[f"0:{port}"]


def test_calls_that_a_backward_runs_again_by_itself_repeat_the_last_ones_in_each_backward():
    model, seen = nn.Linear(3, 3), []

    class RunsAgain(torch.autograd.Function):
        """Calls the model in its backward only, as no checkpoint does."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            model(X), model(X)
            return grad

    with hl.hook(model, "", lambda value, call: seen.append((call.index, call.recomputed))):
        for _ in range(3):
            model(X)
        for _ in range(2):
            RunsAgain.apply(X.clone().requires_grad_()).sum().backward()
    first = [(0, False), (1, False), (2, False)]
    assert seen == first + [(2, True), (1, True)] * 2


class Recursive(nn.Module):
    """Calls itself once, so that the inner call ends first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, depth=0):
        x = self.inner(x)
        return self(x, 1) * 1.5 if depth == 0 else x * x


@modes
def test_a_recursive_module_in_a_region_keeps_the_numbers_of_its_calls(mode):
    model = Recursive()

    def observe(run):
        x = X.clone().requires_grad_()
        with hl.edit(model, "", torch.sin, calls=0):
            run(model, x).sum().backward()
        with hl.capture(model, ":grad_input", ":grad_output") as record:
            run(model, x).sum().backward()
        return [x.grad, *record.calls(":grad_input"), *record.calls(":grad_output")]

    for found, expected in zip(observe(run_in(mode)), observe(without_checkpoint), strict=True):
        torch.testing.assert_close(found, expected)


@modes
def test_a_recomputation_that_ends_early_keeps_nothing_alive_after_the_backward(mode):
    model, alive = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []

    class Watched(nn.Module):
        def forward(self, x):
            y = x * 1
            alive.append(weakref.ref(y))
            return model(y)

    watched = Watched()
    with hl.capture(model, "0:grad_input", "1:grad_input"):
        run_in(mode)(watched, X.clone().requires_grad_()).sum().backward()
        gc.collect()
        assert not any(tensor() is not None for tensor in alive)


def test_an_edit_in_a_region_is_not_kept_waiting_by_another_context():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False).relu())

    model = Nested()
    with hl.capture(model, "b:input"), hl.edit(model, "a:grad_output", lambda grad: grad * 1):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert_clean(model)
