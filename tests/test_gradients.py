"""Captured gradients are those that plain torch computes, or reading them says why not.

The oracle cuts the graph: the module's output becomes a leaf, whose gradient is grad_output; that,
pulled back through the module alone, gives grad_input.
"""

import contextlib
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from models import MAKERS, VIEWERS, EndsInLinear, Giving, QueryKeyValue
from oracles import (
    FOLLOWING,
    assert_clean,
    assert_exact_or_refused,
    cut,
    recorded,
    weigh,
)
from torch import nn
from torch.autograd import Function

import hookline as hl
from hookline.values.nested import leaves

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("made", MAKERS)
def test_gradients_equal_those_of_the_cut_graph(made, following):
    make, shapes = MAKERS[made]
    module, inputs, rest = make(), [torch.randn(shape) for shape in shapes], FOLLOWING[following]
    grad_output, grad_inputs = cut(module, inputs, rest)
    record = recorded(module, inputs, rest, ":grad_output", ":grad_input", ":grad_inputs")
    assert torch.equal(record[":grad_output"], grad_output)
    torch.testing.assert_close(record[":grad_input"], grad_inputs[0], rtol=1e-5, atol=1e-6)
    found = list(record[":grad_inputs"].values())
    torch.testing.assert_close(found, list(grad_inputs), rtol=1e-5, atol=1e-6)


def told(record, place):
    """What a record gives for a place: its gradients, or the error that says why there is none."""
    try:
        return record.calls(place)
    except hl.HooklineError as error:
        return str(error)


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("made", [*MAKERS, *VIEWERS, "identity", "a parameter"])
@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
def test_a_place_asked_for_alone_tells_the_same_as_with_others(made, following, place):
    # A hook of the user excludes every shortcut for plain layers.
    others = {"identity": (nn.Identity, (2, 4)), "a parameter": (Returning, (2, 4))}
    make, shapes = (MAKERS | VIEWERS | others)[made]
    shapes = shapes if isinstance(shapes[0], tuple) else [shapes]
    module, inputs = make(), [torch.randn(shape) for shape in shapes]
    found = []
    for hooks in ([], [module.register_forward_hook(lambda *_: None)]):
        torch.manual_seed(0)
        with contextlib.suppress(RuntimeError):  # some may not be changed in place
            made_inputs = [x.clone().requires_grad_() * 1 for x in inputs]
            with contextlib.suppress(hl.NeverFired), hl.capture(module, place) as record:
                FOLLOWING[following](module(*made_inputs)).backward()
            found.append(told(record, place))
        for hook in hooks:
            hook.remove()
    assert len(found) in (0, 2)
    if found:
        assert str(found[0]) == str(found[1])


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        return self.weight


@pytest.mark.parametrize("place", ["0:grad_output", "0:grad_input"])
def test_a_call_that_raised_holds_nothing_and_spoils_nothing_of_the_next(place):
    class Failing(nn.Linear):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("no")
            return super().forward(x)

    model = nn.Sequential(Failing(3, 3))
    x = torch.randn(2, 5, 3)
    with hl.capture(model, place) as record:
        model[0].fails = True
        given = x.clone().requires_grad_() * 1
        alive = weakref.ref(given)
        with contextlib.suppress(ValueError):
            model(given)
        del given
        model[0].fails = False
        last = x.clone().requires_grad_() * 1
        model(last).pow(2).sum().backward()
        gc.collect()
        assert alive() is None
    grad_output, (grad_input,) = cut(model[0], [x], lambda y: y.pow(2).sum())
    assert len(record.calls(place)) == 1
    expected = grad_output if "output" in place else grad_input
    torch.testing.assert_close(record[place], expected)


@pytest.mark.parametrize("viewed", VIEWERS)
def test_gradients_of_views_of_the_input_are_exact(viewed):
    make, shape = VIEWERS[viewed]
    module, x = make(), torch.randn(shape)
    grad_output, (grad_input,) = cut(module, [x], weigh)
    residual = torch.randn(shape)

    made = x.clone().requires_grad_() * 1
    with hl.capture(module, ":grad_output", ":grad_input") as record:
        (weigh(module(made)) + (made * residual).sum()).backward()
    assert torch.equal(record[":grad_output"], grad_output)
    assert torch.equal(record[":grad_input"], grad_input)


@pytest.mark.parametrize("viewed", sorted(VIEWERS.keys() - {"an expansion of the input"}))
@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
def test_a_view_of_the_input_that_was_changed_in_place_is_exact_or_refused(viewed, place):
    make, shape = VIEWERS[viewed]
    module, x = make(), torch.randn(shape)
    rest = FOLLOWING["relu_"]
    grad_output, (grad_input,) = cut(module, [x], rest)
    record = recorded(module, [x], rest, place)
    expected = grad_output if place == ":grad_output" else grad_input
    assert_exact_or_refused(record, place, expected, "in place")


@pytest.mark.parametrize("changed", [0, 1])
def test_of_two_views_of_inputs_the_one_that_was_changed_is_never_none(changed):
    module = Giving(lambda x, y: (x.view(-1), y.view(-1)))
    leaf = torch.ones(2, 2, requires_grad=True)
    with hl.capture(module, ":grad_inputs", ":grad_output") as record:
        outputs = module(leaf * 1, leaf * 1)
        outputs[changed].mul_(3)
        sum(outputs).sum().backward()
    for place in (":grad_inputs", ":grad_output"):
        expected = torch.full((2, 2) if place == ":grad_inputs" else (4,), 3.0)
        assert_exact_or_refused(record, f"{place}[{changed}]", expected, "in place")


@pytest.mark.parametrize("threads", ["own", "all"])
@pytest.mark.parametrize("shape", [(1, 2), (1, 1, 2)])  # of the second, what is kept is a view
def test_a_base_or_view_that_is_kept_for_another_loss_does_not_count(shape, threads):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            self.feature = self.lin(x)
            return self.feature.view(-1)

    model = Keeping()
    with hl.capture(model, ":grad_output", threads=threads) as record:
        y = model(torch.ones(shape))
        side = 5 * model.feature
        y.mul_(3)
        (y.sum() + side.sum()).backward()
    assert_exact_or_refused(record, ":grad_output", torch.full((2,), 3.0), "in place")


@pytest.mark.parametrize("others", [3, 100])
@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_nested_gradient_stays_whatever_calls_without_one_come_before_or_after(keep, others):
    model, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)

    def evaluate():
        with torch.no_grad():
            for _ in range(others):
                model(x)
        for _ in range(others):  # with a graph, but no backward
            model(x)

    with hl.capture(model, ":grad_output", keep=keep) as record:
        if keep == "last":
            model(x)[0].sum().backward()
        evaluate()
        if keep == "first":
            model(x)[0].sum().backward()
    expected = (torch.ones(4, 1, 3), (None, None))
    if keep == "first" and others > 64:
        with pytest.raises(hl.GradientNotAvailable):
            record[":grad_output"]
    else:
        assert torch.equal(record[":grad_output"][0], expected[0])
        assert record[":grad_output"][1] == expected[1]


def test_an_older_gradient_is_not_taken_for_the_last_where_that_is_forgotten():
    model, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    with hl.capture(model, ":grad_output", keep="last") as record:
        model(x)[0].sum().backward()
        outputs = [model(x)[0] for _ in range(100)]
        outputs[10].sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match=r"forgotten.*keep='all'"):
        record[":grad_output"]


def test_what_flows_to_a_view_beside_one_that_was_changed_does_not_count():
    model = nn.Sequential(nn.Linear(2, 2), Giving(lambda x: (x[..., 0:], x.view(-1))))
    with hl.capture(model, ":grad_output") as record:
        beside, y = model(torch.ones(1, 1, 2))
        side = 5 * beside
        y.mul_(3)
        (y.sum() + side.sum()).backward()
    assert_exact_or_refused(record, ":grad_output[1]", torch.full((2,), 3.0), "in place")


@pytest.mark.parametrize("threads", ["own", "all"])
@pytest.mark.parametrize("place", [":grad_input", ":grad_inputs[0]"])
def test_a_view_that_the_module_uses_and_then_changes_in_place_is_exact_or_refused(place, threads):
    def use_and_change(x):
        y = x + 1
        x.mul_(2)
        return x + y

    leaf = torch.ones(4, requires_grad=True)
    for given in (lambda: leaf * 1, lambda: (leaf * 1)[:3]):
        module = Giving(use_and_change)
        with hl.capture(module, place, threads=threads) as record:
            module(given()).sum().backward()
        assert_exact_or_refused(record, place, torch.full(given().shape, 3.0), "in place")


# -- wholes and parts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split",
    [
        lambda h: h.chunk(3, -1),
        lambda h: h.split(4, -1),
        lambda h: h.unflatten(-1, (3, 4)).unbind(-2),
        lambda h: h.unflatten(-1, (3, 4)).movedim(-2, 0),
        lambda h: [h[..., :4], h[..., 4:8], h[..., 8:]],
        lambda h: [part.transpose(-1, -2) for part in h.chunk(3, -1)],
        lambda h: [part.clone() for part in h.chunk(3, -1)],
    ],
    ids=["chunk", "split", "unbind", "iterated", "slices", "transposed", "copies"],
)
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
def test_query_key_and_value_have_their_own_gradients(split, shape):
    model, x = QueryKeyValue(split=split), torch.randn(shape)

    def loss(q, k, v):
        return weigh(q.sin() * k.cos()) + weigh(v.exp())

    leaves = [part.detach().clone().requires_grad_() for part in model(x)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    with hl.capture(model, ":grad_output") as record:
        loss(*model(x)).backward()
    assert isinstance(record[":grad_output"], tuple)
    for n in range(3):
        assert torch.equal(record[f":grad_output[{n}]"], expected[n])


def test_one_of_three_slices_can_be_changed_in_place():
    def split(h):
        return h[..., :4], h[..., 4:8], h[..., 8:]

    model, x = QueryKeyValue(split=split), torch.randn(2, 3, 4)

    def loss(q, k, v):
        q.mul_(3)
        return weigh(q.sin() * k.cos()) + weigh(v.exp())

    leaves = [part.detach().clone().requires_grad_() for part in model(x)]
    expected = torch.autograd.grad(loss(*(leaf.clone() for leaf in leaves)), leaves)
    with hl.capture(model, ":grad_output") as record:
        loss(*model(x)).backward()
    for n in range(3):
        assert torch.equal(record[f":grad_output[{n}]"], expected[n])


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
def test_a_module_that_returns_a_feature_beside_a_view_of_it_tells_what_it_can(shape):
    model = Giving(lambda x: x.exp().view(-1))
    inner = nn.Sequential(model)
    kept = []
    model.function = lambda x: (kept.append(x.exp()), kept[0].view(-1))[1]
    x = torch.randn(shape, requires_grad=True)
    with hl.capture(inner, ":grad_output", "0:grad_output") as record:
        (weigh(inner(x)) + 5 * kept[0].sum()).backward()
    expected = torch.linspace(-1, 1, x.numel())
    assert torch.equal(record[":grad_output"], expected)
    assert torch.equal(record["0:grad_output"], expected)


def test_an_expanded_output_has_the_gradient_of_every_copy():
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: x.expand(3, *x.shape)))
    grad_output, _ = cut(model, [torch.ones(2, 4)], weigh)
    record = recorded(model, [torch.ones(2, 4)], weigh, ":grad_output", "1:grad_output")
    assert torch.equal(record[":grad_output"], grad_output)
    assert torch.equal(record["1:grad_output"], grad_output)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["alone", "in a Sequential"])
@pytest.mark.parametrize("following", ["nothing", "summed (stride 0)", "iadd"])
def test_the_real_view_of_a_complex_value_is_exact_or_refused(wrap, following):
    model = wrap(Giving(lambda x: torch.view_as_real(torch.fft.fft(x))))
    x, rest = torch.randn(2, 4), FOLLOWING[following]
    expected, _ = cut(model, [x], rest)
    record = recorded(model, [x], rest, ":grad_output")
    if following == "iadd":
        assert_exact_or_refused(record, ":grad_output", expected, "in place")
    else:
        assert torch.equal(record[":grad_output"], expected)


def test_an_lstm_with_the_loss_on_its_last_state():
    lstm, x = nn.LSTM(2, 3, num_layers=2), torch.randn(4, 1, 2, requires_grad=True)
    with hl.capture(lstm, ":grad_output", ":grad_input", ":grad_output[1][0]") as record:
        weigh(lstm(x)[1][0]).backward()
    output, (h, c) = record[":grad_output"]
    assert output is None
    assert c is None
    assert torch.equal(h, torch.linspace(-1, 1, 6).reshape(2, 1, 3))
    assert torch.equal(record[":grad_output[1][0]"], h)
    torch.testing.assert_close(record[":grad_input"], x.grad)
    with pytest.raises(hl.NotCaptured, match="a part never indexes a tensor"):
        record[":grad_output[1][0][0]"]


@dataclasses.dataclass
class LogitsAndHidden:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    step: int = 3


@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: {"logits": a, "hidden": b},
        LogitsAndHidden,
        lambda a, b: [a, [b, None], 7],
        lambda a, b: {"both": (a, b), "name": "x"},
    ],
)
def test_gradients_mirror_the_structure_of_the_output(pack):
    module = Giving(lambda x: pack(x * 2, x.exp()))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, ":grad_output") as record:
        a, b = (tensor for _, tensor in leaves(module(x)))
        (weigh(a) + 3 * b.sum()).backward()
    found = record[":grad_output"]
    assert type(found) is type(pack(x, x))
    tensors = [tensor for _, tensor in leaves(found)]
    assert torch.equal(tensors[0], torch.linspace(-1, 1, 3))
    assert torch.equal(tensors[1], torch.full((3,), 3.0))


def test_a_part_that_gets_no_gradient_is_none():
    module = Giving(lambda x: LogitsAndHidden(x * 2, x.exp()))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, ":grad_output") as record:
        module(x).logits.sum().backward()
    assert record[":grad_output"].logits.tolist() == [1, 1, 1]
    assert record[":grad_output"].hidden is None
    assert record[":grad_output[hidden]"] is None


def test_topk_has_a_gradient_for_its_values_only():
    module = Giving(lambda x: x.topk(2))
    x = torch.tensor([1.0, 5.0, 3.0], requires_grad=True)
    with hl.capture(module, ":grad_output", ":grad_input") as record:
        (module(x).values * torch.tensor([2.0, 7.0])).sum().backward()
    assert type(record[":grad_output"]).__name__ == "topk"
    assert record[":grad_output"].values.tolist() == [2, 7]
    assert record[":grad_output"].indices is None
    assert record[":grad_input"].tolist() == [0, 2, 7]


def test_an_integer_part_is_not_the_reason_for_a_missing_gradient():
    module = Giving(lambda x: x.topk(2))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, ":grad_output") as record:
        module(x)
        x.sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="no gradient arrived"):
        record[":grad_output"]


def test_the_same_tensor_returned_twice_has_its_total_at_both_positions():
    module, leaf = Giving(lambda x: (x * 2,) * 2), torch.ones(2, requires_grad=True)
    with hl.capture(module, ":grad_output", ":grad_output[1]") as record:
        first, second = module(leaf)
        assert first is second
        (first + 3 * second).sum().backward()
    assert [g.tolist() for g in record[":grad_output"]] == [[4, 4], [4, 4]]
    assert record[":grad_output[1]"].tolist() == [4, 4]


@pytest.mark.parametrize("edited", [":grad_output", ":grad_output[0]", ":grad_output[1]"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_tensor_that_is_returned_twice_and_edited_is_exact_or_refused(edited, inside):
    module, leaf = Giving(lambda x: (x * 2,) * 2), torch.ones(2, requires_grad=True)
    capture = hl.capture(module, ":grad_output")
    verbs = [hl.edit(module, edited, lambda g: g * 10), capture]
    with contextlib.ExitStack() as stack:
        for verb in verbs if inside else verbs[::-1]:
            stack.enter_context(verb)
        first, second = module(leaf)
        assert first.data_ptr() == second.data_ptr()
        (first + 3 * second).sum().backward()
    for n, expected in enumerate((10, 30)):
        if inside and edited in (":grad_output", f":grad_output[{n}]"):
            assert capture.record[f":grad_output[{n}]"].tolist() == [expected] * 2
        else:
            with pytest.raises(hl.GradientNotAvailable, match=r"after the edit|computed from"):
                capture.record[f":grad_output[{n}]"]


def test_a_distribution_and_a_packed_sequence_keep_their_kind():
    normal = Giving(lambda x: torch.distributions.Normal(x * 2, x.exp()))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(normal, ":grad_output") as record:
        output = normal(x)
        (output.loc * 3 + output.scale * 4).sum().backward()
    assert record[":grad_output[loc]"].tolist() == [3, 3, 3]
    assert record[":grad_output"].scale.tolist() == [4, 4, 4]
    assert "grad_output[loc]" in repr(record)

    lstm = nn.LSTM(2, 3)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    with hl.capture(lstm, ":grad_output") as record:
        lstm(packed)[0].data.sum().backward()
    assert isinstance(record[":grad_output"][0], nn.utils.rnn.PackedSequence)
    assert torch.equal(record[":grad_output[0][data]"], torch.ones(5, 3))


# -- inputs ---------------------------------------------------------------------------------------


def test_inputs_that_depend_on_each_other_have_their_own_shares():
    block = Giving(lambda x, y: x * 2 + y * 3)
    x = torch.randn(3, requires_grad=True)
    with hl.capture(block, ":grad_inputs", ":grad_input") as record:
        made = x * 1
        block(made, made.sin()).sum().backward()
    assert record[":grad_input"].tolist() == [2, 2, 2]
    assert [g.tolist() for g in record[":grad_inputs"].values()] == [[2, 2, 2], [3, 3, 3]]
    torch.testing.assert_close(x.grad, 2 + 3 * x.detach().cos())


def test_the_input_depends_on_a_tensor_that_is_an_input_too():
    block = Giving(lambda x, y: x * 2 + y * 3)
    leaf = torch.ones(2, requires_grad=True)
    with hl.capture(block, ":grad_inputs") as record:
        block(leaf.view(2, 1), leaf).sum().backward()
    assert [g.tolist() for g in record[":grad_inputs"].values()] == [[[4], [4]], [6, 6]]


def in_a_thread(function):
    """What a function returns that runs in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def made_in_a_thread(leaf):
    """A tensor and one computed from it, whose nodes have higher numbers than a fresh thread's."""

    def make():
        for _ in range(200):
            leaf.sin()
        x = leaf * 1
        return x, x.sin()

    return in_a_thread(make)


def test_threads_number_their_nodes_apart_and_shares_stay_exact():
    block = Giving(lambda x, y: x * 2 + y * 3)
    x, y = made_in_a_thread(torch.randn(3, requires_grad=True))

    def use():
        with hl.capture(block, ":grad_inputs", ":grad_input") as record:
            block(x, y).sum().backward()
        return record

    record = in_a_thread(use)
    assert record[":grad_input"].tolist() == [2, 2, 2]
    assert [g.tolist() for g in record[":grad_inputs"].values()] == [[2, 2, 2], [3, 3, 3]]


def test_what_another_thread_made_is_not_taken_for_the_modules_own():
    identity = nn.Identity()
    x, _ = made_in_a_thread(torch.randn(3, requires_grad=True))

    def use():
        with hl.capture(identity, ":grad_output") as record:
            (identity(x) + x * 3).sum().backward()
        return record

    record = in_a_thread(use)
    with pytest.raises(hl.GradientNotAvailable, match="a tensor that it was given"):
        record[":grad_output"]


def test_a_residual_does_not_add_to_the_share_of_a_module():
    lin = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with hl.capture(lin, ":grad_input") as record:
        (weigh(lin(x)) + 7 * x.sum()).backward()
    _, (expected,) = cut(lin, [x], weigh)
    assert torch.equal(record[":grad_input"], expected)
    assert torch.equal(x.grad, expected + 7)


def test_query_key_and_value_that_differ_have_their_own_shares():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    parts = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
    with hl.capture(attention, ":grad_inputs") as record:
        weigh(attention(*parts, need_weights=False)[0]).backward()
    assert record[":grad_inputs"].keys() == {"query", "key", "value", "need_weights"}
    for name, part in zip(("query", "key", "value"), parts, strict=True):
        torch.testing.assert_close(record[f":grad_inputs[{name}]"], part.grad)


def test_integer_and_none_inputs_have_no_gradient():
    class Indexed(nn.Module):
        def forward(self, table, index, mask=None, scale=2.0):
            return table[index] * scale

    module = Indexed()
    table = torch.randn(4, 2, requires_grad=True)
    with hl.capture(module, ":grad_inputs") as record:
        module(table, index=torch.tensor([1, 3]), mask=None).sum().backward()
    found = record[":grad_inputs"]
    assert torch.equal(found["table"], table.grad)
    assert found["index"] is None
    assert found["mask"] is None


def test_an_embedding_has_no_gradient_at_its_input_and_says_so():
    embedding = nn.Embedding(4, 2)
    with hl.capture(embedding, ":grad_input", ":grad_output") as record:
        embedding(torch.tensor([0, 1])).sum().backward()
    assert torch.equal(record[":grad_output"], torch.ones(2, 2))
    with pytest.raises(hl.GradientNotAvailable, match="did not require grad"):
        record[":grad_input"]


@pytest.mark.parametrize("nested", [list, tuple, lambda xs: {"a": xs[0], "b": xs[1]}])
def test_nested_inputs_have_nested_gradients(nested):
    def forward(xs):
        a, b = xs.values() if isinstance(xs, dict) else xs
        return a * 2 + b * 3

    module = Giving(forward)
    xs = nested([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)])
    with hl.capture(module, ":grad_input") as record:
        module(xs).sum().backward()
    found = record[":grad_input"]
    assert type(found) is type(xs)
    found = list(found.values()) if isinstance(found, dict) else found
    assert [g.tolist() for g in found] == [[2, 2], [3, 3]]


class TwoOfEach(Function):
    """Tensors among other arguments, two outputs, None among the gradients."""

    @staticmethod
    def forward(ctx, factor, a, flag, b):
        ctx.factor = factor
        return a * factor + b, a * 2

    @staticmethod
    def backward(ctx, first, second):
        return None, first * ctx.factor + second * 2, None, None


def test_a_custom_function_inside_a_module_passes_on_what_it_says():
    module = Giving(lambda a, b: TwoOfEach.apply(3.0, a, True, b))
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with hl.capture(module, ":grad_inputs", ":grad_output") as record:
        first, second = module(a, b)
        (first + 5 * second).sum().backward()
    assert [g.tolist() for g in record[":grad_output"]] == [[1, 1], [5, 5]]
    first, second = record[":grad_inputs"].values()
    assert first.tolist() == [13, 13]
    assert second is None


@pytest.mark.parametrize("function", [lambda g: g.norm(), lambda g: g.abs().max()])
def test_a_transform_meets_the_whole_gradient_of_an_input_that_is_used_twice(function):
    module = Giving(lambda x: x * 2 + x.sin())
    x = torch.randn(3, 4, requires_grad=True)
    with hl.capture(module, ":grad_input", transform=function) as record:
        module(x).sum().backward()
    torch.testing.assert_close(record[":grad_input"], function(x.grad))


def test_a_slice_of_the_gradient_of_an_input_that_is_used_twice():
    module = Giving(lambda x: x * 2 + x.sin())
    x = torch.randn(3, 4, requires_grad=True)
    with hl.capture(module, ":grad_input", at=np.s_[:, 0], dtype=torch.float64) as record:
        module(x).sum().backward()
    torch.testing.assert_close(record[":grad_input"], x.grad[:, 0].double())


# -- looking changes nothing ----------------------------------------------------------------------


class Awkward(nn.Module):
    """Views, in-place changes, shared modules, residuals, chunks, writes through a view."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.qkv = QueryKeyValue(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lin = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.flat = nn.Flatten()
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.head = EndsInLinear(4)
        self.identical = []

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x)
        x = x + self.attention(q, k, v)[0] + self.attention(x, x, x)[0]
        y = self.lin(x)
        y += x
        y = self.act(self.lin(y))
        y = self.drop(y) + y
        y[:, :1].mul_(2)
        h = y * 1
        self.flat(h).add_(1)
        h, _ = self.rnn(h)
        h = self.head(self.norm(h))
        h.relu_()
        return {"out": self.flat(h), "last": h[:, -1]}


def outcome(model, tokens, context=None):
    """Outputs with their strides and all parameter gradients with theirs."""
    model.zero_grad()
    torch.manual_seed(1)
    with context or contextlib.nullcontext():
        output = model(tokens)
        (weigh(output["out"]) + output["last"].pow(2).sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = [*output.values(), *(g for g in grads.values() if g is not None)]
    return [value.detach().clone() for value in values], [value.stride() for value in values]


EVERY_PORT = ["", ":input", ":inputs", ":grad_output", ":grad_input", ":grad_inputs"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_captures_of_every_port_of_every_module_change_no_bit(training, autocast):
    model = Awkward().train(training)
    tokens = torch.randint(0, 7, (2, 3))
    places = [f"**{port}" for port in EVERY_PORT] + [port for port in EVERY_PORT if port]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        bare = outcome(model, tokens)
        captured = outcome(model, tokens, hl.capture(model, *places, "**.weight:grad"))
    assert bare[1] == captured[1]
    for before, now in zip(bare[0], captured[0], strict=True):
        assert before.dtype == now.dtype
        assert torch.equal(before, now)
    assert_clean(model)


def test_captures_keep_channels_last():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2)
    ).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    results = []
    for places in (None, [f"**{port}" for port in EVERY_PORT]):
        model.zero_grad()
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        context = hl.capture(model, *places) if places else contextlib.nullcontext()
        with context:
            y = model(leaf)
            weigh(y.sigmoid()).backward()
        results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
    for bare, captured in zip(*results, strict=True):
        assert torch.equal(bare, captured)
        assert bare.stride() == captured.stride()


def test_captures_leave_a_write_through_a_view_alone():
    flat = nn.Flatten()

    def forward(x, h=None):
        h = x * 1
        flat(h).mul_(2)
        return h

    x = torch.ones(2, 3, requires_grad=True)
    with hl.capture(flat, ":grad_output", ":grad_input"):
        y = forward(x)
        y.sum().backward()
    assert torch.equal(y, torch.full((2, 3), 2.0))
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


def test_captured_gradients_do_not_change_when_the_parameters_gradient_does():
    lin = nn.Linear(2, 2)
    with hl.capture(lin, "weight:grad", ":grad_output") as record:
        y = lin(torch.ones(1, 2))
        y.retain_grad()
        y.sum().backward()
    kept = record["weight:grad"].clone()
    lin.weight.grad.zero_()
    y.grad.zero_()
    assert torch.equal(record["weight:grad"], kept)
    assert record[":grad_output"].tolist() == [[1, 1]]


# -- autocast -------------------------------------------------------------------------------------


def test_gradients_under_autocast_have_the_dtypes_of_their_values():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        at_lin, (at_input,) = cut(model[0], [x], lambda y: weigh(model[2](y.relu()).float()))
        record = recorded(model, [x], lambda y: weigh(y.float()), "0:grad_output", "0:grad_input")
    assert record["0:grad_output"].dtype == torch.bfloat16
    assert record["0:grad_input"].dtype == torch.float32
    assert torch.equal(record["0:grad_output"], at_lin)
    assert torch.equal(record["0:grad_input"], at_input)


def test_modules_that_share_a_leaf_under_autocast_are_exact_or_refused():
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.q(x).float() * 2 + self.k(x).float() * 3

    model, x = Projections(), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        _, (q,) = cut(model.q, [x], lambda y: weigh(y.float() * 2))
        _, (k,) = cut(model.k, [x], lambda y: weigh(y.float() * 3))
        leaf = x.clone().requires_grad_()  # torch casts a leaf once, for both
        with hl.capture(model, "*:grad_input") as record:
            weigh(model(leaf)).backward()
    for name, expected in {"q:grad_input": q, "k:grad_input": k}.items():
        assert_exact_or_refused(record, name, expected, "autocast")


def test_casts_inside_a_module_do_not_hide_an_input_under_autocast():
    module = Giving(lambda x, y: x @ x.T + y.float() @ y.float().T)
    leaf = torch.randn(2, 4, requires_grad=True)
    made = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True) * 1
    expected = {}
    for cut_at, inputs in (("leaf", (leaf, made.detach())), ("made", (leaf.detach(), made))):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(*inputs).float().sum()
        wanted = leaf if cut_at == "leaf" else made
        (expected[cut_at],) = torch.autograd.grad(output, wanted, retain_graph=True)
    for inputs in ((leaf, made), (made, leaf)):
        with hl.capture(module, ":grad_inputs") as record:
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(*inputs).float().sum()
            loss.backward(retain_graph=True)
        for tensor, found in zip(inputs, record[":grad_inputs"].values(), strict=True):
            assert found.dtype == tensor.dtype
            reference = expected["leaf" if tensor is leaf else "made"]
            torch.testing.assert_close(found, reference, rtol=0.05, atol=0.05)


# -- layers of torch ------------------------------------------------------------------------------


def called_by_name(model, x):
    return model[1](input=model[0](input=x))


def checkpointed(reentrant):
    def run(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    return run


def without_gradients(model, x):
    with torch.no_grad():
        hidden = model[0](x)
    return model[1](hidden + x)


def twice(model, x):
    return model(x) + model(2 * x)


def hooked_inside(model, x):
    with hl.hook(model, "1", lambda value: 2 * value), hl.edit(model, "0:grad_output", hl.scale(3)):
        out = model(x)
        out.sum().backward(retain_graph=True)
    return out


def given_its_input(model, x):
    handle = model[1].register_forward_hook(lambda module, args, output: args[0], prepend=True)
    try:
        return model(x)
    finally:
        handle.remove()


def after_a_failed_call(model, x):
    with contextlib.suppress(RuntimeError):
        model[0](x[:, :1])
    return model(x)


def vmapped(model, x):
    return torch.vmap(model)(x)


WAYS = [
    called_by_name, checkpointed(True), checkpointed(False), without_gradients, twice,
    hooked_inside, given_its_input, after_a_failed_call, vmapped, lambda model, x: model(x).relu_(),
]  # fmt: skip


class OwnLinear(nn.Linear):
    """A class of the user. Unlike that of nn.Linear, its output need not be a new tensor."""


class OwnSiLU(nn.SiLU):
    """The same without parameters."""


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3)], ids=["made", "view"])
@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__qualname__.split(".")[0])
def test_layers_of_torch_tell_the_same_with_and_without_a_hook_before_each_call(run, shape):
    def told(linear, silu):
        torch.manual_seed(0)
        model = nn.Sequential(linear(3, 3), silu())
        x = torch.randn(shape, requires_grad=True)
        with hl.capture(model, "0:grad_output", "1:grad_output") as record:
            out = run(model, x)
            (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        found = []
        for place in ("0:grad_output", "1:grad_output"):
            try:
                found.append([None if g is None else g.tolist() for g in record.calls(place)])
            except hl.GradientNotAvailable as error:
                found.append(str(error))
        assert_clean(model)
        return found

    assert told(nn.Linear, nn.SiLU) == told(OwnLinear, OwnSiLU)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_cast_of_the_modules_own_adds_up_its_uses_in_the_dtype_of_the_cast(leaf):
    def uses_a_cast(x):
        h = x.to(torch.bfloat16)
        return h * 3.1 + h * 0.013

    model, x = Giving(uses_a_cast), torch.randn(64, requires_grad=True)
    given = x if leaf else x * 1
    with hl.capture(model, ":grad_input") as record:
        model(given).float().pow(2).sum().backward()
    assert torch.equal(record[":grad_input"], x.grad)
    assert_clean(model)


@pytest.mark.parametrize("nested", [False, True])
def test_an_attached_gradient_that_was_changed_is_refused_on_read(nested):
    model = nn.Sequential(Giving(lambda x: {"h": x * 2} if nested else x * 2))
    x = torch.ones(3, requires_grad=True)
    with hl.capture(model, "0:grad_output") as record:
        out = model(x)
        loss = (out["h"] if nested else out).square().sum()
        torch.autograd.grad(loss, x, create_graph=True)
    kept = record["0:grad_output"]
    gradient = kept["h"] if nested else kept
    assert gradient.requires_grad
    assert "attached" in repr(record)
    with torch.no_grad():
        gradient.zero_()
    with pytest.raises(hl.ValueChanged, match="changed in place"):
        record["0:grad_output"]


def test_a_leaf_that_is_a_view_has_its_gradients_though_it_is_changed_in_place():
    model, x = nn.Linear(4, 4), torch.randn(4, 4)[:2].requires_grad_()
    with hl.edit(x, ":grad", lambda grad: grad * 0), hl.capture(model, ":grad_input") as record:
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert not x.grad.any()
            with torch.no_grad():
                x.sub_(1)
    expected = torch.ones(2, 4) @ model.weight.detach()
    assert len(record.calls(":grad_input")) == 3
    for gradient in record.calls(":grad_input"):
        torch.testing.assert_close(gradient, expected)


def test_an_output_that_a_prepended_hook_has_replaced_is_not_taken_for_a_new_one():
    model = nn.Sequential(nn.Linear(3, 3))
    older = torch.randn(2, 3, requires_grad=True) * 1
    with hl.capture(model, "0:grad_output") as record:
        handle = model[0].register_forward_hook(lambda *given: older, prepend=True)
        (model(torch.randn(2, 3)).sum() + 5 * older.sum()).backward()
        handle.remove()
    with pytest.raises(hl.GradientNotAvailable, match="had before"):
        record["0:grad_output"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", [lambda x: (x * 2).view(-1), lambda x: x.view(-1)])
def test_a_gradient_that_came_is_not_lost_if_the_view_is_changed_afterwards(make, nested):
    last = Giving(lambda x: (make(x), None) if nested else make(x))
    model = nn.Sequential(Giving(lambda x: x * 3), last)
    with hl.capture(model, "1:grad_output") as record:
        out = model(torch.ones(2, 2, requires_grad=True))
        out = out[0] if nested else out
        out.square().sum().backward()
        with torch.no_grad():
            expected = 2 * out
            out.zero_()
    gradient = record["1:grad_output"]
    assert torch.equal(gradient[0] if nested else gradient, expected)


def test_a_gradient_is_never_cut_out_of_one_of_another_dtype():
    def make(x):
        return torch.view_as_real(torch.complex(x, x) * 1)

    model = nn.Sequential(Giving(make))
    with hl.capture(model, "0:grad_output") as record:
        out = model(torch.ones(2, 2, requires_grad=True))
        out.mul_(2)
        out.square().sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match="changed in place later"):
        record["0:grad_output"]
