"""One tensor that is passed for several arguments: each has its own gradient, or says why not.

The oracle passes copies in its place, made outside: torch then has a gradient for each.
"""

import contextlib

import pytest
import torch
from models import Giving
from oracles import assert_clean, weigh
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat.torch_tuner import Hooks

# torch's own words on a reentrant checkpoint without gradients
pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


class Weighted(nn.Module):
    def forward(self, q, k, v):
        return q * 2 + k.sin() * 3 + v * v


class TakesNested(nn.Module):
    def forward(self, first, others, *, mask=None):
        return first * 2 + others["a"][0].sin() + others["b"] * mask


def attention():
    return nn.MultiheadAttention(4, 2, batch_first=True)


# The module, and its arguments made of a function that gives the shared tensor and one that gives
# another tensor; the arguments that are the shared one.
CASES = {
    "attention(h, h, h)": (
        attention,
        lambda h, k: ((h(), h(), h()), {}),
        ["[query]", "[key]", "[value]"],
    ),
    "attention(k, h, h)": (attention, lambda h, k: ((k(), h(), h()), {}), ["[key]", "[value]"]),
    "attention by keyword": (
        attention,
        lambda h, k: ((k(),), {"key": h(), "value": h(), "need_weights": False}),
        ["[key]", "[value]"],
    ),
    "Bilinear(h, h)": (
        lambda: nn.Bilinear(4, 4, 3),
        lambda h, k: ((h(), h()), {}),
        ["[input1]", "[input2]"],
    ),
    "a product": (
        lambda: Giving(lambda x, y: x * y),
        lambda h, k: ((h(), h()), {}),
        ["[0]", "[1]"],
    ),
    "three uses": (
        Weighted,
        lambda h, k: ((h(), h()), {"v": h()}),
        ["[q]", "[k]", "[v]"],
    ),
    "all by keyword": (
        Weighted,
        lambda h, k: ((), {"v": h(), "q": h(), "k": h()}),
        ["[v]", "[q]", "[k]"],
    ),
    "in a list": (
        lambda: Giving(lambda xs: xs[0] * 2 + xs[1].sin() * xs[2]),
        lambda h, k: (([h(), h(), k()],), {}),
        ["[0][0]", "[0][1]"],
    ),
    "nested, and by keyword": (
        TakesNested,
        lambda h, k: ((h(), {"a": [h()], "b": k()}), {"mask": h()}),
        ["[first]", "[others][a][0]", "[mask]"],
    ),
    "an argument that is not used": (
        lambda: Giving(lambda x, y: x * 2),
        lambda h, k: ((h(), h()), {}),
        ["[0]", "[1]"],
    ),
}
cases = pytest.mark.parametrize("case", CASES)


def result(output):
    return output[0] if isinstance(output, tuple) else output


def expected(module, make, h, k):
    """The output, and the gradient of each copy of the shared tensor."""
    copies = []

    def copy():
        copies.append(h.detach().clone().requires_grad_())
        return copies[-1]

    args, kwargs = make(copy, lambda: k)
    output = result(module(*args, **kwargs))
    return output, torch.autograd.grad(weigh(output), copies, allow_unused=True)


def made_of_leaf(make, h, k):
    """The arguments, and the leaf that the shared tensor is made of."""
    leaf = h.clone().requires_grad_()
    made = leaf * 1
    return leaf, *make(lambda: made, lambda: k)


def prepared(case):
    make_module, make, names = CASES[case]
    h, k = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    return make_module(), make, names, h, k


# -- captures -------------------------------------------------------------------------------------


@cases
def test_a_capture_refuses_on_read_what_the_graph_has_only_as_a_sum(case):
    module, make, names, h, k = prepared(case)
    parts = [f":grad_inputs{name}" for name in names]
    with hl.capture(module, ":grad_inputs", *parts) as record:
        _, args, kwargs = made_of_leaf(make, h, k)
        weigh(result(module(*args, **kwargs))).backward()
    for place in (":grad_inputs", *parts):
        with pytest.raises(hl.GradientNotAvailable, match=r"sum.*edit\(model, ':grad_in") as told:
            record[place]
        assert all(name in str(told.value) for name in names)
    assert_clean(module)


@cases
@pytest.mark.parametrize("beside", [(), (":grad_output", "")])
def test_the_gradient_of_the_first_argument_alone_is_refused_too(case, beside):
    module, make, names, h, k = prepared(case)
    with hl.capture(module, ":grad_input", *beside) as record:
        _, args, kwargs = made_of_leaf(make, h, k)
        weigh(result(module(*args, **kwargs))).backward()
    # Where another tensor comes first, it needs no gradient.
    reason = "require grad" if names[0] == "[key]" else "sum"
    with pytest.raises(hl.GradientNotAvailable, match=rf":grad_input(\[0\])?'.*{reason}"):
        record[":grad_input"]


def test_what_is_passed_once_beside_a_shared_tensor_is_exact():
    module, q, kv = attention(), *(torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    whole = module(q, kv, kv)[0]
    (share,) = torch.autograd.grad(weigh(whole), q)
    with hl.capture(module, ":grad_input", ":grad_inputs") as record:
        weigh(module(q, kv, kv)[0]).backward()
    assert torch.equal(record[":grad_input"], share)
    assert torch.equal(record[":grad_inputs[query]"], share)
    for name in ("key", "value"):
        with pytest.raises(hl.GradientNotAvailable, match="sum"):
            record[f":grad_inputs[{name}]"]


@pytest.mark.parametrize("view", [lambda h: h.view_as(h), lambda h: h[:], lambda h: h.clone()])
def test_views_and_copies_of_one_tensor_are_told_apart(view):
    module, h = attention(), torch.randn(2, 3, 4)
    leaf = h.clone().requires_grad_()
    made = leaf * 1
    _, shares = expected(module, lambda h, k: ((h(), h(), h()), {}), h, None)
    with hl.capture(module, ":grad_inputs", ":grad_input") as record:
        weigh(module(made, view(made), view(made))[0]).backward()
    for name, share in zip(("query", "key", "value"), shares, strict=True):
        assert torch.equal(record[f":grad_inputs[{name}]"], share)
    assert torch.equal(record[":grad_input"], shares[0])


def test_a_shared_tensor_on_which_nothing_depends_has_no_gradient_at_either_argument():
    module, h = Giving(lambda x, y, z: z * 2), torch.ones(2, requires_grad=True) * 1
    with hl.capture(module, ":grad_inputs") as record:
        module(h, h, torch.ones(2, requires_grad=True)).sum().backward()
    found = record[":grad_inputs"]
    assert found[0] is found[1] is None
    assert found[2].tolist() == [2, 2]


def test_a_capture_leaves_a_shared_tensor_one_and_changes_no_bit():
    module, h, seen = attention(), torch.randn(2, 3, 4), []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(args))
    found = []
    for context in (contextlib.nullcontext(), hl.capture(module, ":grad_inputs", ":grad_input")):
        leaf = h.clone().requires_grad_()
        module.zero_grad()
        with context:
            output = module(leaf, leaf, leaf)[0]
            weigh(output).backward()
        found.append([output, leaf.grad, *(p.grad for p in module.parameters())])
    handle.remove()
    assert all(q is k is v for q, k, v in seen)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@cases
@pytest.mark.parametrize("outside", [False, True])
def test_beside_an_edit_a_capture_is_exact_for_each_argument(case, outside):
    module, make, names, h, k = prepared(case)
    output, shares = expected(module, make, h, k)
    verbs = [
        hl.edit(module, ":grad_inputs", lambda g: g),
        hl.capture(module, ":grad_inputs", ":grad_input"),
    ]
    capture = verbs[1]
    with contextlib.ExitStack() as stack:
        for verb in verbs[::-1] if outside else verbs:
            stack.enter_context(verb)
        _, args, kwargs = made_of_leaf(make, h, k)
        found = result(module(*args, **kwargs))
        weigh(found).backward()
    assert torch.equal(found, output)
    for name, share in zip(names, shares, strict=True):
        own = capture.record[f":grad_inputs{name}"]
        assert own is None if share is None else torch.equal(own, share)
    assert_clean(module)


@pytest.mark.parametrize("port", [":grad_input", ":grad_inputs[input1]", ":grad_inputs[input2]"])
def test_where_one_of_two_arguments_is_edited_a_capture_is_exact_for_both(port):
    module, h = nn.Bilinear(4, 4, 3), torch.randn(2, 4)
    _, shares = expected(module, lambda h, k: ((h(), h()), {}), h, None)
    with hl.capture(module, ":grad_inputs") as record, hl.edit(module, port, lambda g: g):
        made = h.clone().requires_grad_() * 1
        weigh(module(made, made)).backward()
    assert torch.equal(record[":grad_inputs[input1]"], shares[0])
    assert torch.equal(record[":grad_inputs[input2]"], shares[1])


@pytest.mark.parametrize("outside", [False, True])
def test_where_one_of_three_arguments_is_edited_the_others_are_refused(outside):
    module, h = Weighted(), torch.randn(2, 4)
    _, shares = expected(module, lambda h, k: ((h(), h(), h()), {}), h, None)
    capture = hl.capture(module, ":grad_inputs")
    verbs = [hl.edit(module, ":grad_inputs[k]", lambda g: g), capture]
    with contextlib.ExitStack() as stack:
        for verb in verbs[::-1] if outside else verbs:
            stack.enter_context(verb)
        made = h.clone().requires_grad_() * 1
        weigh(module(made, made, v=made)).backward()
    assert torch.equal(capture.record[":grad_inputs[k]"], shares[1])
    for name in "qv":
        with pytest.raises(hl.GradientNotAvailable, match=r"as \[q\], \[v\]: .*sum"):
            capture.record[f":grad_inputs[{name}]"]


@pytest.mark.parametrize("stop", ["no_grad", "inference_mode"])
def test_without_gradients_one_tensor_stays_one_and_the_read_gives_that_reason(stop):
    module, h, seen = attention(), torch.randn(2, 3, 4, requires_grad=True), []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(args))
    with hl.capture(module, ":grad_inputs") as record, getattr(torch, stop)():
        module(h, h, h)
    with pytest.raises(hl.NeverFired, match="did not require grad"):
        with hl.edit(module, ":grad_inputs", lambda g: g), getattr(torch, stop)():
            module(h, h, h)
    handle.remove()
    assert all(q is k is v is h for q, k, v in seen)
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record[":grad_inputs"]


# -- hooks and edits ------------------------------------------------------------------------------


@cases
def test_a_hook_sees_at_each_argument_its_own_gradient(case):
    module, make, names, h, k = prepared(case)
    output, shares = expected(module, make, h, k)
    seen = {}

    def look(g, call):
        assert str(call.place) not in seen
        seen[str(call.place)] = g.clone()

    used = [name for name, share in zip(names, shares, strict=True) if share is not None]
    with hl.hook(module, [f":grad_inputs{name}" for name in used], look):
        _, args, kwargs = made_of_leaf(make, h, k)
        found = result(module(*args, **kwargs))
        weigh(found).backward()
    assert torch.equal(found, output)
    for name, share in zip(names, shares, strict=True):
        assert share is None or torch.equal(seen[f":grad_inputs{name}"], share)
    assert_clean(module)


def gradient_through_views(module, make, h, k, change, which):
    """The same with views in place of the shared tensor, made outside, some of which are hooked."""
    leaf = h.clone().requires_grad_()
    made, count = leaf * 1, iter(range(9))

    def view():
        one = made.view_as(made)
        if next(count) in which:
            one.register_hook(change)
        return one

    args, kwargs = make(view, lambda: k)
    weigh(result(module(*args, **kwargs))).backward()
    return leaf.grad


@cases
def test_an_edit_changes_each_argument_by_its_own_gradient(case):
    module, make, names, h, k = prepared(case)

    def change(g):
        return g * 3 + 1

    for which, place in [
        (range(len(names)), ":grad_inputs"),
        *(({n}, f":grad_inputs{name}") for n, name in enumerate(names)),
    ]:
        if case == "an argument that is not used" and place.endswith("[1]"):
            continue
        with hl.edit(module, place, change):
            leaf, args, kwargs = made_of_leaf(make, h, k)
            weigh(result(module(*args, **kwargs))).backward()
        torch.testing.assert_close(
            leaf.grad, gradient_through_views(module, make, h, k, change, which)
        )
        assert_clean(module)


def test_an_edit_of_the_first_argument_leaves_the_others_alone():
    module, leaf = nn.Bilinear(4, 4, 3), torch.randn(2, 4, requires_grad=True)
    _, (first, second) = expected(module, lambda h, k: ((h(), h()), {}), leaf, None)
    with hl.edit(module, ":grad_input", hl.scale(10.0)):
        weigh(module(leaf, leaf)).backward()
    torch.testing.assert_close(leaf.grad, first * 10 + second)


def test_edits_of_several_arguments_stack_in_the_order_of_entering():
    leaf = torch.ones(2, requires_grad=True)
    module, seen = Giving(lambda x, y: x * 2 + y * 5), []
    with hl.edit(module, ":grad_inputs[1]", lambda g: g + 1):
        with hl.hook(module, ":grad_inputs", lambda g: seen.append(g[0].item())):
            with hl.edit(module, ":grad_inputs", lambda g: g * 10):
                module(leaf, leaf).sum().backward()
    assert sorted(seen) == [2, 6]
    assert leaf.grad.tolist() == [20 + 60, 20 + 60]


def test_an_edited_input_that_stands_for_several_arguments_is_told_apart_too():
    leaf, module = torch.ones(2, requires_grad=True), Giving(lambda x, y: x * 2 + y * 5)
    with hl.edit(module, ":grad_inputs", lambda g: g + 1):
        with hl.edit(module, ":inputs", lambda given: {0: given[0], 1: given[0]}):
            with hl.edit(module, ":grad_inputs", lambda g: g * 10):
                with hl.capture(module, ":grad_inputs") as record:
                    module(leaf, leaf * 1).sum().backward()
    assert record[":grad_inputs"][0].tolist() == [20, 20]
    assert record[":grad_inputs"][1].tolist() == [50, 50]
    assert leaf.grad.tolist() == [71, 71]


def test_a_module_that_changes_a_shared_input_in_place_is_refused_at_once():
    module, leaf = Giving(lambda x, y: x.mul_(2) + y), torch.ones(2, requires_grad=True)
    bare = leaf * 1
    assert module(bare, bare).tolist() == [4, 4]
    for place in (":grad_inputs", ":grad_input", ":grad_inputs[1]"):
        made = leaf * 1
        with pytest.raises(hl.GradientNotAvailable, match="in place"):
            with hl.edit(module, place, lambda g: g):
                module(made, made)
        assert made.tolist() == [2, 2]


def test_an_edit_leaves_what_the_model_does_in_place_afterwards_as_it_is():
    module, found = Giving(lambda x, y: x * 2 + y * 5), []
    for context in (contextlib.nullcontext(), hl.edit(module, ":grad_inputs", lambda g: g)):
        leaf = torch.tensor([-1.0, 3.0], requires_grad=True)
        with context:
            made = leaf * 1
            made.t_()
            total = module(made, made)
            made.relu_()
            (total.relu_() + made).sum().backward()
        found.append((total, made, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# -- operations, checkpointing, autocast ----------------------------------------------------------


class Squaring(nn.Module):
    def forward(self, x):
        y = x * 2
        return torch.mul(y, y)


def test_an_operation_on_one_tensor_twice_has_the_same_rules():
    module, leaf = Squaring(), torch.full((2,), 3.0, requires_grad=True)
    with hl.capture(module, "/mul#1:grad_inputs", "/mul#1:grad_input") as record:
        module(leaf).sum().backward()
    for place in ("/mul#1:grad_inputs", "/mul#1:grad_input"):
        with pytest.raises(hl.GradientNotAvailable, match="sum"):
            record[place]
    leaf.grad = None
    with hl.edit(module, "/mul#1:grad_inputs[other]", hl.scale(10.0)):
        module(leaf).sum().backward()
    assert leaf.grad.tolist() == [(6 + 60) * 2] * 2


MODES = pytest.mark.parametrize("reentrant", [True, False])


@MODES
@pytest.mark.parametrize("within", [False, True])
def test_in_a_checkpointed_region_each_argument_is_exact_or_refused(reentrant, within):
    module, h = attention(), torch.randn(2, 3, 4)
    _, shares = expected(module, lambda h, k: ((h(), h(), h()), {}), h, None)
    names = ("query", "key", "value")

    def run():
        leaf = h.clone().requires_grad_()
        made = leaf * 1
        if within:
            found = checkpoint(lambda x: module(x, x, x)[0], made, use_reentrant=reentrant)
        else:
            found = checkpoint(module, made, made, made, use_reentrant=reentrant)[0]
        weigh(found).backward()
        return leaf.grad

    with hl.capture(module, ":grad_inputs") as record:
        run()
    for name, share in zip(names, shares, strict=True):
        place = f":grad_inputs[{name}]"
        if reentrant and not within:  # this checkpoint makes tensors of its own
            assert torch.equal(record[place], share)
        else:
            with pytest.raises(hl.GradientNotAvailable, match="sum"):
                record[place]
    seen = {}
    with hl.hook(
        module,
        [f":grad_inputs[{name}]" for name in names],
        lambda g, call: seen.setdefault(str(call.place), []).append(g),
    ):
        run()
    for name, share in zip(names, shares, strict=True):
        (own,) = seen[f":grad_inputs[{name}]"]
        assert torch.equal(own, share)
    with hl.edit(module, ":grad_inputs[key]", hl.scale(10.0)):
        grad = run()
    torch.testing.assert_close(grad, shares[0] + 10 * shares[1] + shares[2])
    assert_clean(module)


def test_under_autocast_a_shared_leaf_is_refused_and_hooked_exactly():
    module, h = Giving(lambda x, y: x @ y.mT), torch.randn(2, 4, 4)

    def run(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            weigh(module(x, y).float()).backward()

    first, second = (h.clone().requires_grad_() for _ in range(2))
    run(first, second)
    leaf, seen = h.clone().requires_grad_(), []
    with hl.capture(module, ":grad_inputs") as record:
        run(leaf, leaf)
    with pytest.raises(hl.GradientNotAvailable, match="sum"):
        record[":grad_inputs"]
    with hl.hook(module, [":grad_inputs[0]", ":grad_inputs[1]"], lambda g: seen.append(g)):
        run(leaf, leaf)
    assert {g.dtype for g in seen} == {torch.float32}
    assert any(torch.equal(g, first.grad) for g in seen)
    assert any(torch.equal(g, second.grad) for g in seen)


# -- TorchTuner -----------------------------------------------------------------------------------


@cases
def test_torch_tuner_saves_for_each_argument_its_own_gradient(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, make, _, h, k = prepared(case)
    _, shares = expected(module, make, h, k)
    model = nn.ModuleDict({"layer": module})
    with Hooks(model, "layer").register_fbh(visualize=True):
        _, args, kwargs = made_of_leaf(make, h, k)
        weigh(result(module(*args, **kwargs))).backward()
    files = sorted(tmp_path.rglob("grad_input_*.pt"))
    found = [torch.load(file, weights_only=True) for file in files]
    wanted = [share for share in shares if share is not None]
    assert len(found) == len(wanted)
    for share in wanted:
        assert any(torch.equal(share, one) for one in found)
    assert_clean(model)


def test_torch_tuner_says_what_it_cannot_save_and_leaves_the_values_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer, leaf = Giving(lambda x, y: x.mul_(2) + y), torch.ones(2, requires_grad=True)
    model = nn.ModuleDict({"layer": layer})
    with Hooks(model, "layer").register_fbh(visualize=True):
        made = leaf * 1
        with pytest.warns(hl.HooklineWarning, match="in place"):
            output = layer(made, made)
        output.sum().backward()
    assert output.tolist() == [4, 4]
    assert made.tolist() == [2, 2]
    assert leaf.grad.tolist() == [4, 4]
    assert [file.name for file in tmp_path.rglob("grad_input_*.pt")] == []
