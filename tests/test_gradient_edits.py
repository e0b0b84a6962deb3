"""Edited and hooked gradients: what flows on is what the change made of it, and nothing else moves.

The oracle cuts the graph at the module and changes by hand what crosses the cut.
"""

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from models import MAKERS, VIEWERS, EndsInLinear, Giving, Nothing, QueryKeyValue, small
from oracles import FOLLOWING, assert_clean, weigh
from torch import nn

import hookline as hl
from hookline.values.nested import get_part, set_part, show_path

pytestmark = pytest.mark.usefixtures("seeded")


def shift(g):
    return g * 3 + 1


def bare(module, inputs, rest, at_output=None, at_input=None):
    """The gradients of inputs and parameters, changed by hand where the graph is cut."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = module(*leaves)
    leaf = output.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(rest(leaf.clone()), leaf)
    wanted = [*leaves, *module.parameters()]
    grad = at_output(grad) if at_output else grad
    found = list(torch.autograd.grad(output, wanted, grad, allow_unused=True))
    found[0] = at_input(found[0]) if at_input else found[0]
    return found


def edited(context, module, inputs, rest):
    """The same gradients by one backward in a context."""
    module.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with context:
        rest(module(*(leaf * 1 for leaf in leaves))).backward()
    assert_clean(module)
    return [tensor.grad for tensor in (*leaves, *module.parameters())]


def assert_close_or_none(found, expected):
    assert [g is None for g in found] == [g is None for g in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


IN_PLACE = ["nothing", "relu_", "a part changed", "used, then changed", "summed (stride 0)"]


@pytest.mark.parametrize("following", IN_PLACE)
@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("port", ["output", "input"])
def test_an_edited_gradient_flows_on_as_the_change_made_it(made, following, port):
    make, shapes = MAKERS[made]
    module, inputs, rest = make(), [torch.randn(shape) for shape in shapes], FOLLOWING[following]
    expected = bare(module, inputs, rest, **{f"at_{port}": shift})
    assert_close_or_none(
        edited(hl.edit(module, f":grad_{port}", shift), module, inputs, rest), expected
    )


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "grad_inputs"])
def test_hooks_that_only_look_change_no_bit_and_see_what_a_capture_sees(made, port):
    make, shapes = MAKERS[made]
    module, inputs = make(), [torch.randn(shape) for shape in shapes]
    rest, seen = FOLLOWING["relu_"], []

    def look(g):
        seen.append(g.clone())
        g.zero_()  # it was given a copy

    expected = edited(contextlib.nullcontext(), module, inputs, rest)
    context = hl.hook(module, f":{port}", look)
    found = edited(context, module, inputs, rest)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    capture = hl.capture(module, f":{port}")
    edited(capture, module, inputs, rest)
    captured = capture.record[f":{port}"]
    captured = list(captured.values()) if isinstance(captured, dict) else [captured]
    assert len(seen) == len(captured)
    for g in captured:
        assert any(g.shape == s.shape and torch.allclose(g, s, atol=1e-6) for s in seen)


# -- what a capture must refuse, an edit can make distinct ----------------------------------------


@pytest.mark.parametrize("viewed", VIEWERS)
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_view_of_the_input_beside_a_residual_is_edited_alone(viewed, port):
    make, shape = VIEWERS[viewed]
    module, x = make(), torch.randn(shape)
    change = {port.replace("grad", "at"): shift}
    (expected,) = bare(module, [x], weigh, **change)
    leaf = x.clone().requires_grad_()
    with hl.edit(module, f":{port}", shift):
        made = leaf * 1
        (weigh(module(made)) + 7 * made.sum()).backward()
    torch.testing.assert_close(leaf.grad, expected + 7)


@pytest.mark.parametrize("viewed", sorted(VIEWERS.keys() - {"an expansion of the input"}))
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_view_of_the_input_that_is_changed_in_place_is_edited_or_refused(viewed, port):
    make, shape = VIEWERS[viewed]
    module, x, rest = make(), torch.randn(shape), FOLLOWING["relu_"]
    expected = bare(module, [x], rest, **{port.replace("grad", "at"): shift})
    try:
        found = edited(hl.edit(module, f":{port}", shift), module, [x], rest)
    except (hl.NeverFired, hl.GradientNotAvailable) as error:
        reason = str(error)
    else:
        reason = "in place"
        assert_close_or_none(found, expected)
    assert "in place" in reason
    assert_clean(module)


def test_a_gradient_edit_leaves_a_write_through_a_view_alone():
    flat, x = nn.Flatten(), torch.ones(2, 3, requires_grad=True)
    with contextlib.suppress(hl.NeverFired), hl.edit(flat, ":grad_output", shift):
        h = x * 1
        flat(h).mul_(2)
        h.sum().backward()
    assert torch.equal(h, torch.full((2, 3), 2.0))
    assert_clean(flat)


@pytest.mark.parametrize("module", [nn.Flatten(), nn.Identity(), nn.Dropout().eval()])
@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
@pytest.mark.parametrize("when", ["another call is not changed", "an earlier use is not changed"])
def test_an_in_place_change_never_loses_an_edit_in_silence(module, place, when):
    leaf = torch.ones(1, 2, requires_grad=True)
    reason = "in place"
    try:
        with hl.edit(module, place, hl.scale(10.0)):
            y = module(leaf * 1)
            z = y * 1 if when == "an earlier use is not changed" else None
            y.mul_(3)
            (y + (module(leaf * 1) if z is None else z)).sum().backward()
    except (hl.NeverFired, hl.GradientNotAvailable) as error:
        reason = str(error)
    else:
        assert leaf.grad.tolist() == [[40, 40]]
    assert "in place" in reason
    assert_clean(module)


@pytest.mark.parametrize("module", [nn.Flatten(), Giving(lambda x: (x * 2,) * 2)])
@pytest.mark.parametrize("inside", [True, False])
def test_what_an_edit_loses_is_not_given_in_part_to_others(module, inside):
    leaf, seen, nested = torch.ones(1, 2, requires_grad=True), [], isinstance(module, Giving)
    place = ":grad_output[0]" if nested else ":grad_output"
    edit, capture = hl.edit(module, place, hl.scale(10.0)), hl.capture(module, place)
    others = [capture, hl.hook(module, place, lambda g: seen.append(g))]

    def run():
        with contextlib.ExitStack() as stack:
            for context in (edit, *others) if inside else (*others, edit):
                stack.enter_context(context)
            y = module(leaf * 1)
            y = y[0] if nested else y
            z = y * 1
            y.mul_(3)
            (y + z).sum().backward()

    with pytest.raises(hl.NeverFired, match="in place"):
        run()
    with pytest.raises(hl.GradientNotAvailable):
        capture.record[place]
    assert seen == []
    assert_clean(module)


def changed_through_the_output(act, x):
    y = act(x)
    y += 1
    return x


def changed_through_a_view(act, x):
    y = act(x.view(1, 2))
    y += 1
    return x


def with_the_output_ignored(act, x):
    act(x)
    return x


def with_both_names_used(act, x):
    y = act(x)
    return x + y


@pytest.mark.parametrize(
    "use",
    [
        changed_through_the_output,
        changed_through_a_view,
        with_the_output_ignored,
        with_both_names_used,
    ],
)
def test_a_gradient_edit_at_an_inplace_module_changes_no_value_and_is_whole(use):
    act, leaf = Giving(lambda x: x.mul_(2)), torch.ones(2, requires_grad=True)
    bare = use(act, leaf * 1)
    (whole,) = torch.autograd.grad(bare.sum(), leaf)
    reason = "in place"
    try:
        with hl.edit(act, ":grad_output", hl.scale(10.0)):
            output = use(act, leaf * 1)
            output.sum().backward()
    except (hl.NeverFired, hl.GradientNotAvailable) as error:
        reason = str(error)
    else:
        assert torch.equal(leaf.grad, whole * 10)
    assert torch.equal(output, bare)
    assert "in place" in reason
    assert_clean(act)


@pytest.mark.parametrize("use", [changed_through_the_output, changed_through_a_view])
def test_a_gradient_edit_at_a_view_of_what_was_changed_in_place_changes_no_value(use):
    act, leaf = Giving(lambda x: x.mul_(2).view(-1)), torch.ones(2, requires_grad=True)
    with contextlib.suppress(hl.NeverFired), hl.edit(act, ":grad_output", shift):
        output = use(act, leaf * 1)
        output.sum().backward()
    assert output.flatten().tolist() == [3, 3]  # what was added to the view is in its memory
    assert_clean(act)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential()])
@pytest.mark.parametrize("place", [":grad_output", ":grad_input"])
def test_a_module_that_returns_its_input_is_edited_alone(module, place):
    leaf = torch.randn(3, requires_grad=True)
    with hl.edit(module, place, lambda g: g * 10):
        x = leaf * 1
        (module(x) + 7 * x).sum().backward()
    assert leaf.grad.tolist() == [17, 17, 17]
    assert_clean(module)


def test_an_output_from_which_another_is_computed_is_edited_alone():
    def forward(x):
        c = x * 1
        return c * 2, c

    module = Giving(forward)
    leaf = torch.ones(2, requires_grad=True)
    with hl.edit(module, ":grad_output[1]", hl.scale(10.0)):
        h, c = module(leaf)
        (h + c).sum().backward()
    assert leaf.grad.tolist() == [12, 12]


def test_one_branch_of_an_addition_leaves_its_sibling_right():
    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"left": left, "right": right})
    x = torch.randn(3, 2)
    with hl.capture(model, "right:grad_output") as record:
        with hl.edit(model, "left:grad_output", lambda g: g.mul_(0)):  # in place, on purpose
            (left(x) + right(x)).sum().backward()
    assert left.bias.grad.tolist() == [0, 0]
    assert right.bias.grad.tolist() == [3, 3]
    assert torch.equal(record["right:grad_output"], torch.ones(3, 2))


def test_query_key_and_value_are_edited_by_part():
    model, x = QueryKeyValue(), torch.randn(2, 3, 4)
    with hl.edit(model, ":grad_output[1]", hl.zero()):
        q, k, v = model(x)
        (q + 2 * k + 3 * v).sum().backward()
    grad = model.proj.bias.grad.view(3, 4)
    assert grad[:, 0].tolist() == [6, 0, 18]


def test_a_ready_change_on_several_tensors_lists_the_parts():
    model, x = QueryKeyValue(), torch.randn(2, 3, 4)
    with pytest.raises(hl.SeveralTensors, match=r"\[0\].*\[1\].*\[2\].*Name one"):
        with hl.edit(model, ":grad_output", hl.zero()):
            model(x)
    assert_clean(model)


def nested_pair(tensor):
    return tensor, [tensor]


# Modules that return what they were given, or one tensor at several positions.
RETURNING = {
    "dropout": (nn.Dropout().eval(), [()]),
    "an identity in a Sequential": (nn.Sequential(nn.Identity()), [()]),
    "a view of what is flat": (nn.Flatten(), [()]),
    "two of its inputs": (Giving(lambda a, b: (a, b)), [(0,), (1,)]),
    "its inputs exchanged": (Giving(lambda a, b: [b, a]), [(0,), (1,)]),
    "one input twice": (Giving(lambda a, b: (a, b, a)), [(0,), (1,), (2,)]),
    "an input beside a result": (Giving(lambda a, b: {"x": a * 2, "y": [a]}), [("x",), ("y", 0)]),
    "a result twice": (Giving(lambda a, b: nested_pair(a * b)), [(0,), (1, 0)]),
}


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("returns", RETURNING)
def test_an_edit_reaches_each_position_of_an_output_and_no_other_use_of_its_tensor(returns, leaf):
    module, paths = RETURNING[returns]
    x, other = torch.randn(2, 3), torch.randn(2, 3)

    def grads(call):
        leaves = [x.clone().requires_grad_(), other.clone().requires_grad_()]
        given = leaves if leaf else [one * 1 for one in leaves]
        output = call(*(given if "put" in returns or "result" in returns else given[:1]))
        parts = [get_part(output, path) for path in paths]
        uses = [(n + 2) * weigh(part) for n, part in enumerate((*parts, *given))]
        sum(uses).backward()
        return [one.grad for one in leaves]

    for place, chosen in [
        (":grad_output", paths),
        *((f":grad_output{show_path(path)}", [path]) for path in paths if path),
    ]:

        def by_hand(*given, chosen=chosen):
            output = module(*given)
            for path in chosen:
                tensor = get_part(output, path)
                view = tensor.view_as(tensor)
                view.register_hook(shift)
                output = set_part(output, path, view)
            return output

        expected = grads(by_hand)
        with hl.edit(module, place, shift):
            found = grads(module)
        assert_close_or_none(found, expected)
        assert_clean(module)


class SeenUnderTwoNames(nn.Module):
    """Returns a tensor whose memory is seen under another name as well."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept = how, None

    def forward(self, x):
        made = x * 2
        if self.how == "a view is returned beside it":
            return made, made.view(-1)
        if self.how == "it is returned twice":
            return made, made
        self.kept = made
        return made.view(-1), None

    def other(self, output):
        return self.kept if output[1] is None else output[1]


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("place", [":grad_output", ":grad_output[0]", ":grad_output[1]"])
@pytest.mark.parametrize(
    "how", ["a view is returned beside it", "it is returned twice", "a view of it is returned"]
)
def test_what_the_model_writes_in_place_is_seen_under_every_name_under_an_edit(how, place, written):
    module, x, values = SeenUnderTwoNames(how), torch.randn(2, 3), []
    for edits in (False, True):
        leaf = x.clone().requires_grad_()
        context = hl.edit(module, place, lambda g: g) if edits else contextlib.nullcontext()
        with contextlib.suppress(hl.NeverFired), context:  # which is told at exit
            output = module(leaf)
            (output[0], module.other(output))[written].mul_(3)
            values += [output[0].flatten(), module.other(output).flatten()]
            values[-1].sum().backward()
        values.append(leaf.grad)
    for before, now in zip(values[:3], values[3:], strict=True):
        assert torch.equal(before, now)
    assert_clean(module)


def test_inputs_that_depend_on_each_other_are_edited_apart():
    block = Giving(lambda x, y: x * 2 + y * 3)
    leaf = torch.ones(2, requires_grad=True)
    with hl.edit(block, {":grad_inputs[0]": hl.scale(10.0), ":grad_inputs[1]": hl.scale(100.0)}):
        x = leaf * 1
        block(x, x * 5).sum().backward()
    assert leaf.grad.tolist() == [1520, 1520]


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_the_input_of_a_module_that_works_in_place_is_refused_at_once(shape):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with pytest.raises(hl.GradientNotAvailable, match=r"'1:grad_input'.*in place.*grad_output"):
        with hl.edit(model, "1:grad_input", shift):
            model(torch.ones(shape))
    assert_clean(model)


def test_arguments_by_name_are_edited_too():
    class Named(nn.Module):
        def forward(self, *, value, factor=None):
            return value * factor

    module = Named()
    value, factor = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with hl.edit(module, ":grad_inputs[factor]", hl.scale(10.0)):
        module(value=value, factor=factor).sum().backward()
    assert value.grad.tolist() == [3, 3]
    assert factor.grad.tolist() == [10, 10]


def test_an_argument_that_a_call_has_not_is_an_error_that_says_so():
    class Masked(nn.Module):
        def forward(self, x, mask=None):
            return x * 2

    module = Masked()
    with pytest.raises(
        hl.PlaceError, match=r"'grad_inputs\[mask\]|:grad_inputs\[mask\].*not \[mask"
    ):
        with hl.edit(module, ":grad_inputs[mask]", hl.scale(2.0)):
            module(torch.ones(2, requires_grad=True)).sum().backward()
    assert_clean(module)


# -- calls and passes -----------------------------------------------------------------------------


def test_calls_choose_forward_calls():
    lin = nn.Linear(2, 2)
    leaves = [torch.ones(1, 2, requires_grad=True) for _ in range(3)]
    for port in ("grad_output", "grad_input"):
        for leaf in leaves:
            leaf.grad = None
        with hl.edit(lin, f":{port}", hl.zero(), calls={0, 2}):
            outputs = [lin(leaf) for leaf in leaves]
            for output in reversed(outputs):
                output.sum().backward()
        assert [bool(leaf.grad.any()) for leaf in leaves] == [False, True, False]


LOSING = pytest.mark.parametrize("module", [nn.Flatten(), nn.Identity(), nn.Dropout().eval()])

at_gradients = pytest.mark.parametrize("place", [":grad_output", ":grad_input"])


def sum_of_calls(module, leaf, lost, count=2):
    """The sum of calls on a tensor, some of whose results are tripled in place."""
    outputs = [module(leaf * 1) for _ in range(count)]
    for call in lost:
        outputs[call].mul_(3)
    return sum(outputs).sum()


@LOSING
@at_gradients
@pytest.mark.parametrize("calls", [0, {0, 2}, slice(0, 4, 2)])
def test_what_other_calls_lose_is_no_matter_to_an_edit_of_some(module, place, calls):
    leaf = torch.ones(1, 2, requires_grad=True)
    with hl.edit(module, place, hl.scale(10.0), calls=calls):
        sum_of_calls(module, leaf, lost=[1, 3], count=4).backward()
    assert leaf.grad.tolist() == [[17, 17] if calls == 0 else [26, 26]]
    assert_clean(module)


@LOSING
@at_gradients
@pytest.mark.parametrize("verb", ["every call", "named calls", "hook"])
def test_of_several_calls_the_error_names_those_that_were_reached_and_those_that_were_not(
    module, place, verb
):
    leaf, calls = torch.ones(1, 2, requires_grad=True), {0, 1, 2} if verb == "named calls" else None
    if verb == "hook":
        context = hl.hook(module, place, lambda g: g * 10)
    else:
        context = hl.edit(module, place, hl.scale(10.0), calls=calls)
    with pytest.raises(hl.NeverFired, match=r"at calls 0, 2.*not at call 1.*in place") as caught:
        with context:
            sum_of_calls(module, leaf, lost=[1], count=3).backward()
    assert place in caught.value.asked
    assert "Nothing happened" not in str(caught.value)
    assert_clean(module)


def test_a_gradient_that_many_calls_ago_was_lost_is_told():
    flat, leaf = nn.Flatten(), torch.ones(1, 2, requires_grad=True)

    def run():
        lost = flat(leaf * 1).mul_(3)
        (lost + sum_of_calls(flat, leaf, lost=[], count=200)).backward(torch.ones(1, 2))

    with pytest.raises(hl.NeverFired, match=r"not at call 0.*in place"):
        with hl.edit(flat, ":grad_output", hl.scale(10.0)):
            run()


def test_a_call_that_is_not_named_keeps_what_it_was_given_and_gives():
    module, x = Giving(lambda x: seen.append(x) or x), torch.ones(2, requires_grad=True) * 1
    for port in ("grad_output", "grad_input"):
        seen = []
        with hl.edit(module, f":{port}", hl.scale(10.0), calls=0):
            outputs = [module(x), module(x)]
            sum(outputs).sum().backward(retain_graph=True)
        assert [y is x for y in outputs] == [False, True]
        assert [y is x for y in seen] == [port == "grad_output", True]


def test_a_call_that_is_not_named_may_change_its_input_in_place():
    module = Giving(lambda x, inplace: x.mul_(3) if inplace else x * 3)
    leaf = torch.ones(2, requires_grad=True)
    with hl.edit(module, ":grad_input", hl.scale(10.0), calls=1):
        (module(leaf * 1, True) + module(leaf * 1, False)).sum().backward()
    assert leaf.grad.tolist() == [33, 33]


@pytest.mark.parametrize("port", ["", ":input", ":grad_output", ":grad_input", ".weight:grad"])
@pytest.mark.parametrize("calls", [{0, 5}, [5, 0], range(2)])
def test_each_call_that_is_named_must_come(port, calls):
    model, leaf = small(), torch.ones(1, 3, requires_grad=True)
    missing = max(calls)
    with pytest.raises(
        hl.NeverFired, match=rf"at call 0.*not at call {missing}.*(called|came) 1×,"
    ) as caught:
        with hl.edit(model, "0" + port, hl.scale(2.0), calls=calls):
            model(leaf).sum().backward()
    assert "slice" in caught.value.remedy
    with hl.edit(model, "0" + port, hl.scale(2.0), calls=slice(0, 5)):
        model(leaf).sum().backward()
    with hl.edit(model, "0" + port, hl.scale(2.0), calls=calls):
        for _ in range(missing + 1):
            model(leaf).sum().backward()
    assert_clean(model)


def test_of_a_glob_one_place_must_have_every_call_that_is_named():
    model, x = small(), torch.ones(1, 3)
    with hl.edit(model, "*", hl.scale(2.0), calls={0, 1}):
        model(x)
        model[0](x)
    with pytest.raises(hl.NeverFired, match=r"at call 0.*not at call 1"):
        with hl.edit(model, "*", hl.scale(2.0), calls={0, 1}):
            model(x)


def test_a_call_that_is_named_and_has_no_gradient_is_told():
    lin, leaf = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    with pytest.raises(hl.NeverFired, match=r"at call 0.*not at call 1.*no gradient arrived"):
        with hl.edit(lin, ":grad_output", hl.scale(2.0), calls={0, 1}):
            (lin(leaf) + lin(leaf).detach()).sum().backward()


@pytest.mark.parametrize("where", ["*:grad_output", "**.weight:grad"])
def test_a_frozen_layer_among_the_matches_of_a_glob_is_no_error(where):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    expected = model[1].weight.grad.clone()
    model.zero_grad()
    with hl.edit(model, where, hl.scale(10.0)):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model[1].weight.grad, expected * 10)
    assert_clean(model)


def test_one_place_of_a_glob_that_lost_its_gradient_is_named_and_no_other_is_said_to_be_silent():
    model, leaf = nn.ModuleDict({"a": nn.Flatten(), "b": nn.Flatten()}), torch.ones(1, 2)
    leaf.requires_grad_()
    with pytest.raises(hl.NeverFired, match=r"'b:grad_output'.*in place") as caught:
        with hl.edit(model, "*:grad_output", hl.scale(10.0)):
            (model["a"](leaf * 1) + model["b"](leaf * 1).mul_(3)).sum().backward()
    assert "nor any other" not in str(caught.value)
    assert caught.value.remedy == "Ask for the gradient of the module before or after it."


def test_calls_choose_passes_of_a_parameter():
    lin, x, seen = nn.Linear(2, 2), torch.ones(1, 2), []
    with hl.edit(lin, "bias:grad", lambda g, call: seen.append(call.index) or g * 0, calls=1):
        for _ in range(3):
            lin(x).sum().backward()
    assert seen == [1]
    assert lin.bias.grad.tolist() == [2, 2]


@pytest.mark.parametrize("verb", ["hook", "edit"])
def test_a_function_is_told_the_forward_call_of_a_gradient(verb):
    lin, seen = nn.Linear(2, 2), []
    leaf = torch.ones(1, 2, requires_grad=True)

    def note(g, call):
        seen.append((str(call.place), call.index, call.module is lin))
        return g

    with getattr(hl, verb)(lin, [":grad_output", ":grad_input", "bias:grad"], note):
        outputs = lin(leaf), lin(leaf)
        outputs[1].sum().backward()
        outputs[0].sum().backward()
    for place, indices in {
        ":grad_output": [1, 0],
        ":grad_input": [1, 0],
        "bias:grad": [0, 1],
    }.items():
        assert [index for name, index, _ in seen if name == place] == indices
    assert all(right for _, _, right in seen)


def test_an_edit_applies_in_every_pass():
    lin, x = nn.Linear(2, 2), torch.ones(1, 3, 2)
    with hl.edit(lin, ":grad_output", hl.scale(10.0)):
        y = lin(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert lin.bias.grad.tolist() == [60, 60]


def test_each_call_of_a_recursive_module_has_its_own_edit():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            return x * 1 if depth == 0 else self(x, depth - 1) * 2 + x

    model, leaf = Recursive(), torch.ones(2, requires_grad=True)
    with hl.edit(model, ":grad_input", hl.scale(10.0)):
        model(leaf, 1).sum().backward()
    assert leaf.grad.tolist() == [210, 210]  # (2 * 10 + 1) * 10


def test_each_call_of_a_module_that_returns_its_input_has_its_own_edit():
    same = nn.Identity()
    model, leaf = nn.Sequential(same, same), torch.ones(2, requires_grad=True)

    def change(g, call):
        return g * 10 if call.index == 0 else g + 1

    for port in ("grad_input", "grad_output"):
        leaf.grad = None
        with hl.edit(model, f"0:{port}", change):
            model(leaf).sum().backward()
        assert leaf.grad.tolist() == [20, 20]


def test_an_edit_can_be_attached_for_a_whole_training():
    model, x = small(), torch.randn(4, 3)
    handle = hl.edit(model, "0.weight:grad", hl.zero()).attach()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    handle.remove()
    assert_clean(model)
    model(x).pow(2).sum().backward()
    assert model[0].weight.grad.any()


# -- parameters and plain tensors -----------------------------------------------------------------


def test_noise_on_a_bias_gradient():
    lin = nn.Linear(3, 1)
    with hl.edit(lin, "bias:grad", hl.noise(0.5, seed=7)):
        lin(torch.full((8, 3), 10.0)).backward(torch.full((8, 1), 1.5))
    assert lin.weight.grad.tolist() == [[120, 120, 120]]
    difference = lin.bias.grad.item() - 12
    assert 0 < abs(difference) < 3
    lin.zero_grad()
    with hl.edit(lin, "bias:grad", hl.noise(0.5, seed=7)):
        lin(torch.full((8, 3), 10.0)).backward(torch.full((8, 1), 1.5))
    assert lin.bias.grad.item() - 12 == difference


def test_a_parameters_gradient_is_edited_in_autograd_grad_too():
    lin = nn.Linear(3, 1)
    with hl.edit(lin, "bias:grad", lambda g: g + 100):
        (grad,) = torch.autograd.grad(lin(torch.ones(8, 3)).sum(), lin.bias)
    assert grad.item() == 108


def test_only_this_backwards_share_is_edited():
    lin = nn.Linear(3, 1)
    lin.bias.grad = torch.tensor([1000.0])
    with hl.edit(lin, "bias:grad", hl.scale(10.0)):
        lin(torch.ones(8, 3)).sum().backward()
    assert lin.bias.grad.item() == 1080


@pytest.mark.parametrize("where", ["**.weight:grad", ["a.weight:grad", "b.weight:grad"]])
def test_a_tied_parameters_gradient_is_edited_once(where):
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    with hl.edit(model, where, hl.scale(10.0)):
        (model["a"](torch.ones(1, 2)) + model["b"](torch.ones(1, 2))).sum().backward()
    assert torch.equal(model["a"].weight.grad, torch.full((2, 2), 20.0))
    assert_clean(model)


def test_a_frozen_parameters_edit_says_why_it_never_applied():
    model = small()
    model[0].weight.requires_grad_(False)
    with pytest.raises(hl.NeverFired, match=r"'0\.weight:grad'.*does not require grad"):
        with hl.edit(model, "0.weight:grad", hl.zero()):
            model(torch.ones(1, 3)).sum().backward()
    assert_clean(model)


@pytest.mark.parametrize("verb", ["edit", "hook"])
def test_a_plain_tensor_can_be_edited_and_hooked(verb):
    leaf = torch.ones(2, requires_grad=True)
    y = leaf * 2
    with getattr(hl, verb)(y, ":grad", lambda g: g + 1):
        y.sum().backward(retain_graph=True)
    assert leaf.grad.tolist() == [4, 4]
    y.sum().backward()
    assert leaf.grad.tolist() == [6, 6]


def test_only_a_slice_of_a_gradient_can_be_edited():
    lin, leaf = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    with hl.edit(lin, [":grad_output", ":grad_input"], hl.zero(), at=np.s_[0]):
        lin(leaf).sum().backward()
    assert lin.bias.grad.tolist() == [2, 2]
    assert leaf.grad[0].tolist() == [0, 0]
    assert leaf.grad[1].any()


# -- under autocast, create_graph, in other threads -----------------------------------------------


@pytest.mark.parametrize("change", [hl.noise(0.1), hl.scale(torch.ones(4)), hl.clamp(max=0.5)])
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_an_edit_keeps_the_dtype_of_a_gradient_under_autocast(change, port):
    model, leaf = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    place = f":{port}"
    with hl.capture(model, place) as before, hl.edit(model, place, change):
        with hl.capture(model, place) as after, torch.autocast("cpu", torch.bfloat16):
            model(leaf).float().sum().backward()
    dtype = torch.bfloat16 if port == "grad_output" else torch.float32
    assert before[place].dtype == after[place].dtype == dtype
    assert leaf.grad.dtype == torch.float32


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_an_edit_is_part_of_a_differentiable_backward(port):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)

    def penalty(change_output=None, change_input=None):
        leaf = x.clone().requires_grad_()
        h = model[0](leaf)
        handle = h.register_hook(change_output or (lambda g: g))
        (grad,) = torch.autograd.grad(model[2](torch.tanh(h)).pow(2).sum(), leaf, create_graph=True)
        handle.remove()
        grad = change_input(grad) if change_input else grad
        return torch.autograd.grad(grad.pow(2).sum(), list(model.parameters()), allow_unused=True)

    expected = penalty(**{port.replace("grad", "change"): lambda g: g.pow(2)})
    leaf = x.clone().requires_grad_()
    with hl.edit(model, f"0:{port}", lambda g: g.pow(2)):
        (grad,) = torch.autograd.grad(model(leaf).pow(2).sum(), leaf, create_graph=True)
    found = torch.autograd.grad(grad.pow(2).sum(), list(model.parameters()), allow_unused=True)
    assert_close_or_none(found, expected)


def test_a_backward_in_another_thread_is_edited():
    lin = nn.Linear(2, 2)
    with hl.edit(lin, ":grad_output", hl.scale(10.0)):
        loss = lin(torch.ones(1, 2)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert lin.bias.grad.tolist() == [10, 10]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["0:grad_output", "2:grad_input", "0.weight:grad"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g[:1], r"<lambda>.*\(1, "),
        (lambda g: None, "returned None"),
        (lambda g: g.double(), "float64"),
        (hl.add(torch.ones(7, 9)), r"\(7, 9\).*does not broadcast"),
    ],
)
def test_a_change_that_does_not_fit_is_told_in_the_backward_and_nothing_is_left(
    place, change, message
):
    model, x = small(), torch.randn(5, 3)
    with pytest.raises(hl.ChangeError, match=message) as caught:
        with hl.edit(model, place, change):
            model(x).sum().backward()
    assert place in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert_clean(model)
    model.zero_grad()
    model(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("verb", ["edit", "hook"])
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)])
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_a_users_exception_in_the_backward_keeps_its_type_and_names_the_place(verb, shape, port):
    class Mine(Exception):
        pass

    def fail(g):
        raise Mine("no")

    model = small()
    leaf = torch.randn(shape, requires_grad=True)
    with pytest.raises(Mine, match="no") as caught:
        with getattr(hl, verb)(model, f"2:{port}", fail):
            model(leaf).sum().backward()
    assert f"2:{port}" in "".join(caught.value.__notes__)
    assert_clean(model)


def test_an_edit_without_a_backward_raises_at_exit():
    lin = nn.Linear(2, 2)
    with pytest.raises(hl.NeverFired, match=r"':grad_output'.*No backward ran"):
        with hl.edit(lin, ":grad_output", hl.zero()):
            y = lin(torch.ones(1, 3, 2))
    y.sum().backward()
    assert lin.bias.grad.tolist() == [3, 3]
    assert_clean(lin)


@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
@pytest.mark.parametrize("verb", ["edit", "hook"])
def test_a_gradient_that_arrives_as_none_is_not_edited(shape, verb):
    lin, leaf = nn.Linear(2, 2), torch.ones(shape, requires_grad=True)
    with pytest.raises(hl.NeverFired, match="arrived"):
        with getattr(hl, verb)(lin, [":grad_output", ":grad_input", "bias:grad"], lambda g: g * 2):
            Nothing.apply(lin(leaf)).sum().backward()
    assert leaf.grad is None
    assert_clean(lin)


# -- nothing else changes, nothing is left --------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_an_edit_that_changes_nothing_changes_no_bit_of_a_model_with_inplace_operations(shape):
    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.lin, self.act = EndsInLinear(4), nn.Linear(4, 4), nn.ReLU(inplace=True)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            y = self.block(x)
            y += x
            y = self.act(self.lin(y))
            y = self.drop(y) + y
            y[..., :1].mul_(2)
            z = self.lin(y)
            return z.relu_()

    model, x = Awkward().eval(), torch.randn(shape)
    results = []
    for context in (contextlib.nullcontext(), hl.edit(model, "**:grad_output", lambda g: g)):
        model.zero_grad()
        with context:
            y = model(x)
            weigh(y).backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for before, now in zip(*results, strict=True):
        assert torch.equal(before, now)
        assert before.stride() == now.stride()
    assert_clean(model)


def test_no_graph_is_kept_alive_by_an_edit():
    model = nn.Sequential(EndsInLinear(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(2, 3, 4)
    gc.collect()
    gc.disable()
    try:
        with hl.edit(model, ["**:grad_output", "0:grad_input"], lambda g: g):
            h = x.requires_grad_() * 1
            alive = weakref.ref(h)
            y = model(h)
            y.sum().backward()
            del h, y
            assert alive() is None
    finally:
        gc.enable()


def test_an_edit_ends_with_its_with_even_where_the_graph_lives_on():
    lin, leaf = nn.Linear(2, 2), torch.ones(1, 3, 2, requires_grad=True)
    with hl.edit(lin, [":grad_output", ":grad_input", "bias:grad"], hl.scale(10.0)):
        y = lin(leaf)
        y.sum().backward(retain_graph=True)
    lin.zero_grad()
    y.sum().backward()
    assert lin.bias.grad.tolist() == [3, 3]
    assert_clean(lin)


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("shape", [(1, 2), (1, 3, 2)])
def test_a_users_own_tensor_hook_applies_beside_an_edit(ours_first, shape):
    lin = nn.Linear(2, 2)

    def add_one(module, args, output):
        output.register_hook(lambda g: g + 1)

    with contextlib.ExitStack() as stack:
        edit = hl.edit(lin, ":grad_output", lambda g: g * 10)
        if ours_first:
            stack.enter_context(edit)
        stack.callback(lin.register_forward_hook(add_one).remove)
        if not ours_first:
            stack.enter_context(edit)
        lin(torch.ones(shape)).sum().backward()
    rows = torch.ones(shape).numel() // 2
    # Ours then theirs, or theirs then ours: what a module returns under an edit is the edit's gate,
    # and a hook on it sees what comes before the gate.
    assert lin.bias.grad[0].item() / rows in (11, 20)
    assert_clean(lin)


def test_an_edit_of_a_gradient_without_a_backward_says_to_run_one():
    model = nn.Sequential(nn.Linear(2, 2))
    for place in ("0:grad_output", "0.bias:grad", "0/linear:grad_output"):
        with pytest.raises(hl.NeverFired) as caught, hl.edit(model, place, hl.zero()):
            model(torch.ones(1, 2))
        assert caught.value.remedy == "Run the forward and the backward inside the `with`."
    assert_clean(model)


# -- arguments passed by name ---------------------------------------------------------------------


class DoublesInPlace(nn.Module):
    """Doubles its argument in place, which its caller passes by position or by name."""

    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_that_a_module_changes_in_place_and_returns_is_not_copied_by_an_edit(by_name):
    def run(x):
        h = x * 1
        y = doubles(x=h) if by_name else doubles(h)
        y.add_(1)
        return h

    doubles, x = DoublesInPlace(), torch.randn(3, requires_grad=True)
    expected = run(x)
    with hl.edit(doubles, ":grad_output", lambda g: g * 3):
        found = run(x)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    assert_clean(doubles)
