"""Entering, leaving, attaching, firing and nesting: what all contexts have in common."""

import contextlib
import gc
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from models import OneOfTwo, Recursive, small
from oracles import assert_clean
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.arange(12.0).reshape(4, 3) / 10

VERBS = {
    "capture": lambda model: hl.capture(model, "0"),
    "edit": lambda model: hl.edit(model, "0", hl.scale(2.0)),
    "edit of a parameter": lambda model: hl.edit(model, "0.weight", hl.scale(2.0)),
    "hook": lambda model: hl.hook(model, "0", lambda value: None),
    "preserve": lambda model: hl.preserve(model),
    "replace_module": lambda model: hl.replace_module(model, "0", nn.Linear(3, 4)),
}

every_verb = pytest.mark.parametrize("make", VERBS.values(), ids=VERBS.keys())


# -- entering -------------------------------------------------------------------------------------


@every_verb
def test_nothing_acts_before_it_is_entered(make):
    model = small()
    expected, state = model(X), {k: v.clone() for k, v in model.state_dict().items()}
    context = make(model)
    assert_clean(model)
    assert torch.equal(model(X), expected)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with context:
        model(X)
    assert torch.equal(model(X), expected)


@every_verb
def test_what_was_never_entered_warns_when_it_is_collected(make):
    context = make(small())
    with pytest.warns(hl.HooklineWarning, match=r"never entered.*with.*attach"):
        del context


@every_verb
def test_what_was_entered_does_not_warn(make):
    model = small()
    context = make(model)
    with context:
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del context
        gc.collect()


def test_the_warning_is_one_line_whatever_was_asked_for():
    model = small()
    context = hl.capture(model, model)
    with pytest.warns(hl.HooklineWarning) as caught:
        del context
    assert "\n" not in str(caught[0].message)


def test_a_constructor_that_raises_does_not_warn_too():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="model"):
            hl.capture([1, 2], "0")
        with pytest.raises(ValueError, match="keep='some'"):
            hl.capture(small(), "0", keep="some")
        gc.collect()


@every_verb
def test_entering_twice_raises_and_the_first_entering_still_ends_well(make):
    model = small()
    expected = model(X)
    context = make(model)
    with pytest.raises(RuntimeError, match="open already"), context:
        context.__enter__()
    assert torch.equal(model(X), expected)
    assert_clean(model)


@every_verb
def test_attaching_what_is_entered_raises(make):
    model = small()
    expected = model(X)
    context = make(model)
    with context:
        model(X)
        with pytest.raises(RuntimeError, match="open already"):
            context.attach()
    handle = make(model).attach()
    with pytest.raises(RuntimeError, match="open already"), handle:
        pass
    handle.remove()
    assert torch.equal(model(X), expected)
    assert_clean(model)


def test_entering_again_starts_afresh_with_a_new_record():
    model = small()
    context = hl.capture(model, "0")
    with context as first:
        model(X), model(X)
    with context as second:
        model(X + 1)
    assert first is not second
    assert len(first.calls("0")) == 2
    assert torch.equal(second["0"], model[0](X + 1))
    assert context.record is second
    assert_clean(model)


def test_entering_again_numbers_calls_from_zero():
    model, seen = small(), []
    context = hl.edit(model, "0", lambda v, call: seen.append(call.index) or v)
    for _ in range(2):
        with context:
            model(X), model(X)
    assert seen == [0, 1, 0, 1]


def test_entering_again_after_an_error_and_after_an_attachment():
    model = small()
    context = hl.capture(model, "0")
    with contextlib.suppress(ZeroDivisionError), context:
        model(X)
        raise ZeroDivisionError
    context.attach()
    model(X), model(X)
    context.remove()
    assert len(context.record.calls("0")) == 2
    with context as record:
        model(X)
    assert len(record.calls("0")) == 1
    assert_clean(model)


def test_entering_again_sees_a_model_that_changed():
    model = small()
    context = hl.capture(model, "0")
    with context:
        model(X)
    model[0] = nn.Linear(3, 4)
    with context as record:
        model(X)
    assert torch.equal(record["0"], model[0](X))
    assert_clean(model)


def test_places_from_a_generator_are_there_again_at_the_second_entering():
    model = small()
    context = hl.capture(model, (name for name in ("0", "2")))
    for _ in range(2):
        with context as record:
            model(X)
        assert record.places() == ["0", "2"]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: hl.capture(m, []),
        lambda m: hl.capture(m),
        lambda m: hl.edit(m, [], hl.zero()),
        lambda m: hl.edit(m, {}),
        lambda m: hl.hook(m, (), print),
    ],
)
def test_asking_for_no_place_at_all_is_an_error(make):
    model = small()
    with pytest.raises((TypeError, ValueError, LookupError), match=r"[Nn]othing|no place"):
        with make(model):
            model(X)
    assert_clean(model)


def test_the_record_of_a_capture_that_was_never_entered_cannot_be_read():
    context = hl.capture(small(), "0")
    with pytest.raises(hl.NotCaptured, match="never entered"):
        _ = context.record
    with pytest.warns(hl.HooklineWarning):
        del context


# -- attaching ------------------------------------------------------------------------------------


@every_verb
def test_attach_returns_the_context_and_remove_may_be_called_twice(make):
    model = small()
    expected = model(X)
    context = make(model)
    assert context.attach() is context
    model(X)
    context.remove()
    context.remove()
    assert torch.equal(model(X), expected)
    assert_clean(model)


@every_verb
def test_removing_what_was_never_entered_does_nothing(make):
    context = make(small())
    context.remove()
    with contextlib.suppress(hl.HooklineWarning), pytest.warns(hl.HooklineWarning):
        del context


def test_the_model_keeps_an_attachment_alive():
    model = small()
    expected = model(X) * 2
    hl.edit(model, "2", hl.scale(2.0)).attach()
    gc.collect()
    assert torch.equal(model(X), expected)
    hl.attached(model).remove()
    assert_clean(model)


def test_the_model_keeps_an_attached_parameter_edit_alive():
    model = small()
    before = model[0].weight.detach().clone()
    hl.edit(model, "0.weight", hl.zero()).attach()
    gc.collect()
    assert not model[0].weight.any()
    hl.attached(model).remove()
    assert torch.equal(model[0].weight, before)
    assert_clean(model)


def test_the_model_keeps_an_attached_gradient_hook_alive():
    model, seen = small(), []
    hl.hook(model, "0.weight:grad", lambda grad: seen.append(grad)).attach()
    gc.collect()
    model(X).sum().backward()
    assert len(seen) == 1
    hl.attached(model).remove()
    assert_clean(model)


def test_a_tensor_keeps_what_is_attached_to_it_alive():
    leaf = torch.ones(3, requires_grad=True)
    hl.edit(leaf, ":grad", hl.scale(0.0)).attach()
    gc.collect()
    leaf.sum().backward()
    assert leaf.grad.tolist() == [0, 0, 0]


def test_the_model_keeps_an_attached_replacement_and_preservation_alive():
    model, old = small(), None
    old = model[1]
    hl.replace_module(model, "1", nn.Identity()).attach()
    hl.preserve(model).attach()
    gc.collect()
    assert isinstance(model[1], nn.Identity)
    assert len(hl.attached(model)) == 2
    hl.attached(model).remove()
    assert model[1] is old
    assert hl.attached(model) == []


def test_a_model_with_attachments_can_be_collected():
    model = small()
    hl.capture(model, "**").attach()
    hl.edit(model, ["0", "0.weight", "2:grad_output"], hl.scale(2.0)).attach()
    model(X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_attachments_can_be_removed_in_any_order():
    model = nn.Identity()
    x = torch.ones(1)
    double = hl.edit(model, "", hl.scale(2.0)).attach()
    more = hl.edit(model, "", hl.add(1.0)).attach()
    watch = hl.capture(model, "").attach()
    assert model(x).item() == 3
    double.remove()
    assert model(x).item() == 2
    watch.remove()
    assert model(x).item() == 2
    more.remove()
    assert model(x).item() == 1
    assert [v.item() for v in watch.record.calls("")] == [3, 2]
    assert_clean(model)


def test_parameter_edits_can_be_removed_in_any_order():
    model = small()
    before = model[0].weight.detach().clone()
    first = hl.edit(model, "0.weight", hl.scale(2.0)).attach()
    second = hl.edit(model, "0.weight", hl.add(1.0)).attach()
    with pytest.warns(hl.HooklineWarning, match="still holds that"):
        first.remove()
    assert torch.equal(model[0].weight, before * 2 + 1)
    second.remove()
    assert torch.equal(model[0].weight, before)
    assert_clean(model)


def test_with_blocks_can_be_left_in_another_order_than_they_were_entered():
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = hl.edit(model, "0.weight", hl.scale(2.0))
    second = hl.edit(model, "2.weight", hl.scale(3.0))
    watch = hl.capture(model, "0")
    for context in (first, second, watch):
        context.__enter__()
    model(X)
    for context in (first, watch, second):
        context.__exit__(None, None, None)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_clean(model)


def test_an_attached_capture_fills_its_record_until_it_is_removed():
    model = small()
    handle = hl.capture(model, "0").attach()
    model(X)
    assert len(handle.record.calls("0")) == 1
    model(X)
    assert len(handle.record.calls("0")) == 2
    handle.remove()
    model(X)
    assert len(handle.record.calls("0")) == 2


def test_an_attachment_that_never_fired_is_removed_in_silence():
    handle = hl.capture(OneOfTwo(), "unused").attach()
    handle.remove()
    with pytest.raises(hl.NeverFired, match="unused"):
        _ = handle.record["unused"]


def test_remove_inside_a_with_block_ends_it_early():
    model = small()
    with hl.capture(model, "0") as record:
        model(X)
        hl.attached(model).remove()
        model(X)
    assert len(record.calls("0")) == 1
    assert_clean(model)


# -- attached -------------------------------------------------------------------------------------


def test_attached_lists_what_is_live_in_order_of_entering():
    model = small()
    assert hl.attached(model) == []
    first = hl.hook(model, "2", lambda value: None).attach()
    second = hl.edit(model, "0.weight", hl.scale(1.0)).attach()
    with hl.capture(model, "0"), hl.capture(model, "0.bias:grad"):
        model(X)
        found = hl.attached(model)
        assert found[:2] == [first, second]
        assert len(found) == 4
        assert "open" in repr(found[2])
    assert hl.attached(model) == [first, second]
    assert "attached" in repr(first)
    first.remove()
    assert "closed" in repr(first)
    assert hl.attached(model) == [second]
    hl.attached(model).remove()
    assert hl.attached(model) == []
    assert_clean(model)


def test_attached_of_a_part_lists_what_acts_in_that_part():
    model = nn.Sequential(small(), small())
    first = hl.hook(model, "0.2", lambda value: None).attach()
    second = hl.hook(model, "1.2", lambda value: None).attach()
    assert hl.attached(model[0]) == [first]
    assert hl.attached(model[1]) == [second]
    hl.attached(model).remove()
    assert_clean(model)


def test_attached_does_not_list_hooks_of_others():
    model, seen = small(), []
    handle = model[0].register_forward_hook(lambda m, a, o: seen.append(m))
    assert hl.attached(model) == []
    hl.attached(model).remove()
    model(X)
    assert seen == [model[0]]
    handle.remove()
    assert_clean(model)


# -- firing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["", ":input", ":inputs"])
def test_a_literal_place_that_never_fired_raises_at_exit_and_gives_the_record(port):
    model = OneOfTwo()
    with pytest.raises(hl.NeverFired, match=r"'unused.*not called.*module\.forward") as caught:
        with hl.capture(model, "used", "unused" + port) as record:
            model(X)
    assert caught.value.record is record
    assert torch.equal(record["used"], model.used(X))
    assert_clean(model)


@pytest.mark.parametrize(
    "where", [lambda m: m.unused, lambda m: [m.used, m.unused], lambda m: (m.unused, ":input")]
)
def test_a_module_object_that_never_fired_raises_at_exit(where):
    model = OneOfTwo()
    with pytest.raises(hl.NeverFired, match="unused"):
        with hl.capture(model, where(model)):
            model(X)
    assert_clean(model)


@pytest.mark.parametrize(
    "where",
    ["*", "{used,unused}", nn.Linear, re.compile("used"), lambda name, module: "used" in name],
)
def test_of_a_wildcard_one_match_must_fire_and_the_rest_is_listed_with_reasons(where):
    model = OneOfTwo()
    with hl.capture(model, where) as record:
        model(X)
    assert record.places() == ["used"]
    assert list(record.unfired()) == ["unused"]
    assert "not called" in record.unfired()["unused"]
    with pytest.raises(hl.NeverFired, match=r"'unused'.*not called"):
        _ = record["unused"]
    assert_clean(model)


@pytest.mark.parametrize("where", ["*", nn.Linear, re.compile("used"), lambda n, m: "used" in n])
def test_a_wildcard_of_which_nothing_fired_raises(where):
    model = OneOfTwo()
    with pytest.raises(hl.NeverFired, match=r"nor any other of the 2 places"):
        with hl.capture(model, where):
            pass


def test_the_exception_of_the_block_is_not_replaced_by_that_of_a_place_that_never_fired():
    model = OneOfTwo()
    with pytest.raises(ZeroDivisionError), hl.capture(model, "unused"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), hl.edit(model, "unused", hl.zero()):
        raise ZeroDivisionError
    assert_clean(model)


def test_an_edit_or_hook_that_never_applied_raises_at_exit():
    model = OneOfTwo()
    for context in (
        hl.edit(model, "unused", hl.zero()),
        hl.edit(model, {"used": hl.zero(), "unused": hl.zero()}),
        hl.edit(model, "used", hl.zero(), calls=3),
        hl.edit(model, "used:grad_output", hl.zero()),
        hl.edit(model, "used.weight:grad", hl.zero()),
        hl.hook(model, "unused", print),
    ):
        with pytest.raises(hl.NeverFired):
            with context:
                model(X)
        assert_clean(model)


def test_a_glob_edit_needs_one_match_that_fired():
    model = OneOfTwo()
    with hl.edit(model, "*", hl.zero()):
        assert not model(X).any()


def test_a_gradient_place_whose_module_ran_raises_on_read_only():
    model = small()
    with hl.capture(model, "0:grad_output", "2:grad_input", "0.weight:grad") as record:
        model(X)
    for place in ("0:grad_output", "2:grad_input", "0.weight:grad"):
        with pytest.raises(hl.GradientNotAvailable, match=re.escape(place)):
            _ = record[place]
    assert_clean(model)


def test_a_gradient_place_whose_module_never_ran_raises_at_exit():
    model = OneOfTwo()
    with pytest.raises(hl.NeverFired, match="unused:grad_output"):
        with hl.capture(model, "unused:grad_output"):
            model(X).sum().backward()


def test_the_reason_names_a_forward_that_was_called_directly():
    model = small()
    with pytest.raises(hl.NeverFired, match=r"module\.forward\(x\)"):
        with hl.capture(model, "0"):
            model[0].forward(X)


def test_the_reason_names_a_module_that_was_taken_out_meanwhile():
    model = small()
    other = nn.Sequential(nn.Linear(3, 4), *model[1:])
    with pytest.raises(hl.NeverFired, match="taken out"), hl.capture(model, "0"):
        model._modules.update(other._modules)
    assert_clean(model)


def test_a_place_whose_part_is_not_there_gives_that_as_the_reason():
    model = small()
    with pytest.raises(hl.NeverFired, match="part never indexes a tensor"):
        with hl.capture(model, "0[0]"):
            model(X)
    assert_clean(model)


def test_unfired_can_be_asked_while_the_capture_is_open():
    model = OneOfTwo()
    with hl.capture(model, "*") as record:
        assert set(record.unfired()) == {"used", "unused"}
        model(X)
        assert set(record.unfired()) == {"unused"}


# -- the model changes meanwhile ------------------------------------------------------------------


def test_hooks_leave_a_module_that_was_replaced_meanwhile():
    model = small()
    old = model[0]
    with hl.capture(model, "0", "0:input", "0.weight:grad") as record:
        model(X).sum().backward()
        model[0] = nn.Linear(3, 4)
        model(X)
    assert len(record.calls("0")) == 1
    assert_clean(model, old)


def test_hooks_leave_a_module_that_was_deleted_meanwhile():
    model = small()
    old = model[2]
    with hl.capture(model, "2") as record, hl.edit(model, "2", hl.zero()):
        model(X)
        del model[2]
    assert record.places() == ["2"]
    assert torch.equal(record["2"], old(model(X)))
    assert_clean(model, old)


def test_a_parameter_that_was_replaced_meanwhile_is_no_trouble():
    model = small()
    old = model[0].weight
    before = old.detach().clone()
    with hl.edit(model, "0.weight", hl.zero()), hl.capture(model, "0.weight:grad"):
        model[0].weight = nn.Parameter(torch.ones(4, 3))
        model(X)
    assert torch.equal(old, before)
    assert not old._backward_hooks
    assert_clean(model)


def test_hook_dicts_that_were_cleared_meanwhile_are_no_trouble():
    model = small()
    with hl.capture(model, "0", "0:input") as record:
        model(X)
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    assert len(record.calls("0")) == 1
    assert_clean(model)


# -- keep and calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["0", "0:input", "0:inputs[input]"])
def test_keep_first_and_last(place):
    model = small()
    with (
        hl.capture(model, place, keep="first") as first,
        hl.capture(model, place, keep="last") as last,
        hl.capture(model, place) as every,
    ):
        for shift in range(3):
            model(X + shift)
    assert torch.equal(first[place], every[place, 0])
    assert torch.equal(last[place], every[place, 2])
    assert len(first.calls(place)) == len(last.calls(place)) == 1
    with pytest.raises(hl.SeveralCalls, match=r"3 of them"):
        _ = every[place]


def test_keep_last_of_an_input_is_that_of_the_last_call_also_after_a_failed_one():
    model = small()
    with hl.capture(model, "0:input", keep="last") as record:
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 7))
        model(X)
    assert torch.equal(record["0:input"], X)


def test_keep_first_and_last_of_gradients():
    model = small()
    places = ("2:grad_output", "2:grad_input", "2.weight:grad")
    with (
        hl.capture(model, *places, keep="first") as first,
        hl.capture(model, *places, keep="last") as last,
    ):
        for factor in (1.0, 2.0, 3.0):
            (model(X).sum() * factor).backward()
    for place in places:
        assert len(first.calls(place)) == len(last.calls(place)) == 1
        torch.testing.assert_close(last[place], first[place] * 3)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (0, [0]),
        (2, [2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(3, None), [3, 4]),
        ({0, 4}, [0, 4]),
        ([1], [1]),
        (range(2), [0, 1]),
        (None, [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("place", ["0", "0:input"])
def test_calls_restricts_an_edit_to_some_calls(calls, expected, place):
    model = nn.Sequential(nn.Identity())
    with hl.edit(model, place, hl.zero(), calls=calls):
        changed = [n for n in range(5) if not model(torch.ones(1)).any()]
    assert changed == expected
    assert_clean(model)


# -- nesting --------------------------------------------------------------------------------------


def test_a_capture_inside_an_edit_sees_the_edited_value_and_one_outside_the_original():
    model = small()
    bare = model[0](X)
    with hl.capture(model, "0", "1:input") as outside:
        with hl.edit(model, "0", hl.scale(2.0)):
            with hl.capture(model, "0", "1:input") as inside:
                model(X)
    assert torch.equal(outside["0"], bare)
    assert torch.equal(inside["0"], bare * 2)
    assert torch.equal(outside["1:input"], bare * 2)
    assert torch.equal(inside["1:input"], bare * 2)
    assert_clean(model)


def test_a_capture_of_an_input_inside_and_outside_an_edit_of_it():
    model = small()
    with hl.capture(model, "0:input") as outside:
        with hl.edit(model, "0:input", hl.add(1.0)):
            with hl.capture(model, "0:input", "0") as inside:
                model(X)
    assert torch.equal(outside["0:input"], X)
    assert torch.equal(inside["0:input"], X + 1)
    assert torch.equal(inside["0"], model[0](X + 1))


def test_a_forward_hook_of_the_user_sees_the_edited_input():
    model, seen = small(), []
    handle = model[0].register_forward_hook(lambda m, args, out: seen.append(args[0]))
    with hl.edit(model, "0:input", hl.add(1.0)):
        model(X)
    handle.remove()
    assert torch.equal(seen[0], X + 1)


def test_captures_of_gradients_inside_and_outside_an_edit():
    model = small()
    place = "2:grad_output"
    with hl.capture(model, place) as outside:
        with hl.edit(model, place, hl.scale(3.0)):
            with hl.capture(model, place) as inside:
                model(X).sum().backward()
    assert torch.equal(outside[place], torch.ones(4, 2))
    assert torch.equal(inside[place], torch.ones(4, 2) * 3)
    assert_clean(model)


def test_edits_stack_in_the_order_they_were_entered():
    model = nn.Sequential(nn.Identity())
    x = torch.ones(1)
    with hl.edit(model, "0", hl.scale(10.0)), hl.edit(model, "0", hl.add(1.0)):
        assert model(x).item() == 11
    with hl.edit(model, "0", hl.add(1.0)), hl.edit(model, "0", hl.scale(10.0)):
        assert model(x).item() == 20
    with hl.edit(model, "0:input", hl.add(1.0)), hl.edit(model, "0:input", hl.scale(10.0)):
        assert model(x).item() == 20
    with hl.edit(model, "0:input", hl.add(1.0)), hl.edit(model, "0", hl.scale(10.0)):
        assert model(x).item() == 20
    assert_clean(model)


def test_parameter_edits_stack_and_come_off_one_by_one():
    model = small()
    before = model[0].weight.detach().clone()
    with hl.edit(model, "0.weight", hl.scale(2.0)):
        with hl.edit(model, "0.weight", hl.add(1.0)):
            assert torch.equal(model[0].weight, before * 2 + 1)
        assert torch.equal(model[0].weight, before * 2)
    assert torch.equal(model[0].weight, before)
    assert_clean(model)


def test_an_edit_of_a_value_changes_neither_what_a_capture_kept_nor_the_model_afterwards():
    model = small()
    bare = model(X)
    with hl.capture(model, "**", detach=True) as outside, hl.edit(model, "**", lambda v: v.mul_(2)):
        model(X)
    assert torch.equal(outside["0"], model[0](X))
    assert torch.equal(model(X), bare)


# -- checkpointing --------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_call_is_captured_once(reentrant):
    model = small()
    x = X.clone().requires_grad_()
    places = ["*", "*:input", "", ":input", "0.weight"]
    with hl.capture(model, *places) as record:
        out = checkpoint(model, x, use_reentrant=reentrant)
        out = out + checkpoint(model, x + 1, use_reentrant=reentrant)
        out.sum().backward()
    places = ["", ":input", "0", "0:input", "0.weight", "1", "1:input", "2", "2:input"]
    assert {place: len(record.calls(place)) for place in record.places()} == dict.fromkeys(
        places, 2
    )
    expected = torch.autograd.grad((model(x) + model(x + 1)).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    assert_clean(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_capture_changes_no_gradient_under_checkpointing(reentrant):
    model = small()
    x = X.clone().requires_grad_()
    bare = torch.autograd.grad((checkpoint(model, x, use_reentrant=False) ** 2).sum(), x)[0]
    with hl.capture(model, "**", "**:input"):
        (checkpoint(model, x, use_reentrant=reentrant) ** 2).sum().backward()
    assert torch.equal(x.grad, bare)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("calls", [0, 1, None])
def test_an_edit_of_some_calls_is_repeated_in_their_recomputation(reentrant, calls):
    model = nn.Linear(3, 3)

    def gradient(run):
        x = X.clone().requires_grad_()
        with hl.edit(model, "", lambda v: v**2, calls=calls):
            (run(run(x)) ** 2).sum().backward()
        return x.grad

    expected = gradient(model)
    assert torch.allclose(
        gradient(lambda x: checkpoint(model, x, use_reentrant=reentrant)), expected
    )
    assert_clean(model)


class InBackward(torch.autograd.Function):
    """Calls a function during the backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.function()
        return grad, None


@pytest.mark.parametrize("places", [["0"], ["0", "0:input"], ["0:input"], ["0.weight"]])
def test_calls_in_a_context_that_was_entered_inside_a_backward_are_no_recomputations(places):
    model, records = small(), []

    def run():
        with hl.capture(model, *places) as record:
            model(X), model(X + 1), model(X + 2)
        records.append(record)

    InBackward.apply(torch.ones(1, requires_grad=True), run).sum().backward()
    assert [len(records[0].calls(place)) for place in places] == [3] * len(places)
    assert_clean(model)


def test_outputs_of_a_recursive_module_that_first_runs_inside_a_backward_are_all_kept():
    model, lengths = Recursive(), []

    def run():
        with hl.capture(model, "", ":input") as record:
            model(X, depth=2)
        lengths.append((len(record.calls("")), len(record.calls(":input"))))

    InBackward.apply(torch.ones(1, requires_grad=True), run).sum().backward()
    assert lengths == [(3, 3)]


# -- a context that is taken for what it gives ----------------------------------------------------

READ_AS = {
    "subscripted": lambda context: context["0"],
    "iterated over": list,
    "searched": lambda context: "0" in context,
    "counted": len,
    "made a dict": dict,
}

CONTEXTS = {
    "capture": lambda model: hl.capture(model, "0"),
    "edit": lambda model: hl.edit(model, "0", hl.zero()),
    "hook": lambda model: hl.hook(model, "0", print),
    "guard": hl.guard,
    "watch": hl.watch,
    "measure": lambda model: hl.measure(model, "0", statistics=hl.Mean()),
    "attention": lambda model: hl.attention(model, "0"),
    "preserve": hl.preserve,
    "replace_module": lambda model: hl.replace_module(model, "0", nn.Identity()),
    "recipe": lambda model: hl.Recipe([("0", hl.zero())]).on(model),
}


@pytest.mark.parametrize("how", READ_AS)
@pytest.mark.parametrize("verb", CONTEXTS)
def test_a_context_that_is_read_without_with_says_to_use_with(verb, how):
    context = CONTEXTS[verb](nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(hl.UsageError, match=r"never entered.*in a `with` statement") as caught:
        READ_AS[how](context)
    assert isinstance(caught.value, TypeError)  # as Python's own would be
    assert context  # to ask whether there is one is no reading


@pytest.mark.parametrize("name", ["places", "tensor", "calls", "unfired", "items", "nbytes"])
def test_a_capture_that_is_read_by_name_without_with_says_to_use_with(name):
    model = nn.Sequential(nn.Linear(3, 2))
    context = hl.capture(model, "0")
    with pytest.raises(hl.UsageError, match=r"never entered.*capture\(\.\.\.\) as record"):
        getattr(context, name)
    assert not hasattr(context, name)
    with pytest.raises(AttributeError, match="'capture' object has no attribute 'nothing'"):
        context.nothing  # noqa: B018 - it must raise
    with hl.capture(model, "0") as record:
        model(torch.ones(1, 3))
    assert record["0"].shape == (1, 2)  # the remedy


def test_a_capture_that_is_attached_or_over_says_where_its_record_is():
    model = nn.Sequential(nn.Linear(3, 2))
    context = hl.capture(model, "0").attach()
    model(torch.ones(1, 3))
    with pytest.raises(hl.UsageError, match=r"It is attached\. Read its \.record\."):
        context["0"]
    assert context.record["0"].shape == (1, 2)
    context.remove()
    with pytest.raises(hl.UsageError, match=r"It has ended\."):
        context["0"]


# -- device= and dtype= ---------------------------------------------------------------------------


def on_device(device):
    return hl.capture(nn.ReLU(), "", device=device)


@pytest.mark.parametrize("device", ["cdua", "cuda:99", "cpu:x", 10**30, 2.5, []])
def test_a_device_that_is_not_there_is_refused_at_once_with_those_that_are(device):
    with pytest.raises(hl.UsageError, match=r"capture was given device=.*here\..*'cpu'") as caught:
        on_device(device)
    assert caught.value.found


def test_a_kind_of_device_that_is_not_there_is_refused_without_starting_it():
    if torch.cuda.is_available():
        assert on_device("cuda") is not None
    else:
        record = hl.Record(None)
        for verb in (on_device, record.to):
            with pytest.raises(hl.UsageError, match=r"There is no cuda device here\. Give one"):
                verb("cuda")
    assert not torch.cuda.is_initialized()


def test_values_are_kept_on_the_meta_device_as_shapes():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3)
    with torch.no_grad(), hl.capture(model, "0", device="meta") as record:
        model(x)
    assert (record["0"].is_meta, record["0"].shape) == (True, (1, 2))


TAKING_DTYPES = {
    "capture": lambda dtype: hl.capture(nn.ReLU(), "", dtype=dtype),
    "attention": lambda dtype: hl.attention(nn.ReLU(), "", dtype=dtype),
    "summarize": lambda dtype: hl.summarize(nn.ReLU(), (2, 3), dtype=dtype),
    "harvest": lambda dtype: hl.harvest(
        nn.Sequential(nn.ReLU()), [torch.ones(2, 2)], "0", to="nowhere", dtype=dtype
    ),
}


@pytest.mark.parametrize("verb", TAKING_DTYPES)
@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "half", np.float16, 3, "flaot16"])
def test_a_dtype_that_is_none_of_torchs_is_refused_with_the_one_that_is_meant(verb, dtype):
    with pytest.raises(hl.UsageError, match=r"dtype=.*torch\.dtype.*torch\.float16\.") as caught:
        TAKING_DTYPES[verb](dtype)
    assert verb in caught.value.asked


@pytest.mark.parametrize("dtype", [float, int, complex, bool])
def test_a_type_of_python_given_as_a_dtype_means_what_it_means_to_torch(dtype):
    with pytest.raises(hl.UsageError) as caught:
        TAKING_DTYPES["capture"](dtype)
    assert caught.value.remedy == f"Give {torch.empty(0, dtype=dtype).dtype}."


# -- nothing was called inside --------------------------------------------------------------------


def test_a_capture_in_which_nothing_was_called_says_that_the_model_was_called_outside():
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(1, 3)
    with pytest.raises(hl.NeverFired, match=r"called before or after the `with`") as caught:
        with hl.capture(model, "0", "*"):
            pass
    model(x)
    record = caught.value.record
    with pytest.raises(hl.NeverFired, match=r"called before or after the `with`"):
        record["0"]
    assert "before or after the `with`" in record.unfired()["1"]
    with pytest.raises(hl.NeverFired, match=r"called before or after the `with`"):
        with hl.edit(model, "0", hl.zero()):
            pass


def test_a_module_that_was_not_called_among_others_is_no_sign_of_that():
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU())), torch.ones(1, 3)
    with hl.capture(model, "**") as record:
        model[0](x)
        with pytest.raises(hl.NeverFired, match=r"was not called\. Its forward may"):
            record["1"]
    assert "before or after" not in record.unfired()["1.0"]


def test_a_glob_with_one_match_names_no_others_in_its_error():
    model = OneOfTwo()
    with pytest.raises(hl.NeverFired) as never, hl.capture(model, "unus*"):
        model(torch.ones(2, 3))
    assert "nor any other of the" not in str(never.value)
