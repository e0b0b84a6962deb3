"""`at=`: slices that are kept and slices that are changed."""

import contextlib
import re

import numpy as np
import pytest
import torch
from models import Giving
from oracles import assert_clean, assert_same_state, state_bits
from torch import nn

import hookline as hl

Y = torch.arange(24.0).reshape(2, 3, 4) + 1  # batch × position × channel

INDICES = {
    "int": 0,
    "negative": -1,
    "slice": slice(1),
    "tuple": np.s_[:, -1],
    "ellipsis": np.s_[..., 1:3],
    "step": np.s_[:, ::2],
    "scalar": np.s_[1, 2, 3],
    "mask": torch.tensor([True, False]),
    "boolean of the whole shape": Y > 5,
    "tensor": torch.tensor([1, 0]),
    "array": np.array([1]),
    "nothing": np.s_[:0],
    "everything": (),
}
each_index = pytest.mark.parametrize("at", INDICES.values(), ids=list(INDICES))


@each_index
def test_a_capture_keeps_the_slice_only(at):
    model = Giving(lambda: Y)
    with hl.capture(model, "", at=at) as record:
        assert model() is Y
    assert torch.equal(record[""], Y[at])
    assert_clean(model)


@pytest.mark.parametrize("at", [at for name, at in INDICES.items() if name != "nothing"], ids=repr)
def test_an_edit_changes_the_slice_only(at):
    model = Giving(lambda: Y)
    before = Y.clone()
    with hl.edit(model, "", hl.scale(-1.0), at=at):
        out = model()
    expected = Y.clone()
    expected[at] = -expected[at]
    assert torch.equal(out, expected)
    assert torch.equal(Y, before)
    assert_clean(model)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("at", [np.s_[:, 0], np.s_[:50], np.s_[::2], np.s_[3], np.s_[..., :99]])
def test_the_memory_of_the_slice_is_all_that_is_kept(grad, at):
    big = torch.ones(100, 100, requires_grad=grad) * 1
    model = Giving(lambda: big)
    with hl.capture(model, "", at=at) as record:
        model()
    kept = record[""]
    size = kept.untyped_storage().nbytes()
    assert size == kept.nbytes
    assert kept.requires_grad == grad


def test_an_attached_slice_is_right_in_a_loss():
    x = torch.ones(2, 3, requires_grad=True)
    model = nn.Sequential(nn.Identity(), nn.Tanh())
    with hl.capture(model, "1", at=np.s_[:, -1]) as record:
        model(x)
    record["1"].sum().backward()
    expected = torch.zeros(2, 3)
    expected[:, -1] = 1 - torch.tanh(torch.tensor(1.0)) ** 2
    torch.testing.assert_close(x.grad, expected)


def test_a_change_beside_the_slice_does_not_spoil_it():
    x = torch.ones(4, 4, requires_grad=True) * 1
    model = Giving(lambda: x)
    with hl.capture(model, "", at=np.s_[0]) as record:
        model()
    with torch.no_grad():
        x[3].mul_(2)
    assert torch.equal(record[""], torch.ones(4))


@pytest.mark.parametrize("at", [np.s_[:, 0], (), np.s_[...], lambda value: value[0]])
@pytest.mark.parametrize("detach", [False, True])
def test_a_slice_stays_as_it_was(at, detach):
    value = Y.clone()
    model = Giving(lambda: value)
    with hl.capture(model, "", at=at, detach=detach) as record:
        model()
    value.zero_()
    assert torch.equal(record[""], at(Y) if callable(at) else Y[at])


def test_a_function_takes_what_it_likes_and_cannot_be_written_to():
    model = Giving(lambda: (Y, Y * 2))
    with hl.capture(model, "", at=lambda value: {"a": value[1][0], "n": len(value)}) as record:
        model()
    assert torch.equal(record[""]["a"], Y[0] * 2)
    assert record[""]["n"] == 2
    with pytest.raises(hl.ChangeError, match="A function can only be read from"):
        with hl.edit(model, "[0]", hl.zero(), at=lambda value: value[0]):
            model()
    assert_clean(model)


def test_the_slice_of_a_nested_value_is_that_of_its_only_tensor():
    model = Giving(lambda: (None, {"h": Y}))
    with hl.capture(model, "", at=np.s_[0]) as record:
        model()
    assert torch.equal(record[""], Y[0])
    with hl.edit(model, "", hl.zero(), at=np.s_[0]):
        out = model()
    assert not out[1]["h"][0].any()
    assert torch.equal(out[1]["h"][1], Y[1])
    assert_clean(model)


def test_a_slice_of_several_tensors_asks_for_the_part():
    model = Giving(lambda: (Y, Y))
    told = r"holds 2: \[0\] \(2, 3, 4\), \[1\]"
    with pytest.raises(hl.SeveralTensors, match=told) as caught, hl.edit(model, "", Y, at=0):
        model()
    assert any("raised at the place ''" in note for note in caught.value.__notes__)
    with pytest.raises(hl.NeverFired, match=f"'': .*{told}"), hl.capture(model, "", at=0):
        assert model()[1] is Y  # the forward goes on
    assert_clean(model)


MISFITS = {
    "int": (7, r"at=\[7\].*out of bounds for dimension 0 with size 2"),
    "column": (np.s_[:, 99], r"at=\[:, 99\].*out of bounds for dimension 1 with size 3"),
    "list": ([0, 99], r"at=\[\[0, 99\]\].*out of bounds"),
    "tensor": (torch.tensor([5]), r"at=\[\[5\]\].*out of bounds"),
    "dimensions": (np.s_[0, 0, 0, 0], r"at=\[0, 0, 0, 0\].*too many indices"),
    "mask": (torch.tensor([True]), r"at=\[\[True\]\].*shape of the mask"),
    "step": (np.s_[::-1], r"at=\[::-1\].*step"),
    "heads": (hl.heads(1, of=3), r"at=heads\(1, of=3\) does not fit"),
    "last_token": (hl.last_token(torch.ones(2, 9)), r"at=last_token.*\(2, 9\)"),
}
each_misfit = pytest.mark.parametrize(("at", "told"), MISFITS.values(), ids=list(MISFITS))


def in_three_parts(error, told):
    """Whether an error names the place '0', what was found there, and what to do."""
    assert "'0'" in error.asked
    assert re.search(told, error.found)
    assert "(2, 3, 4)" in error.found
    assert error.remedy
    return True


@each_misfit
def test_an_edit_of_a_slice_that_does_not_fit_raises_at_once(at, told):
    model = nn.Sequential(Giving(lambda: Y), nn.Identity())
    ran = []
    with pytest.raises(hl.ChangeError) as caught, hl.edit(model, "0", hl.zero(), at=at):
        ran.append(model[0]())
    assert in_three_parts(caught.value, told)
    assert not ran
    assert_clean(model)
    assert model[0]() is Y


@each_misfit
def test_a_capture_of_a_slice_that_does_not_fit_lets_the_forward_be_and_tells_it_at_exit(at, told):
    model = nn.Sequential(Giving(lambda: Y), nn.Identity())
    with pytest.raises(hl.NeverFired) as caught, hl.capture(model, "0", at=at):
        assert model[0]() is Y
    assert in_three_parts(caught.value, told)
    assert "'**'" not in caught.value.remedy
    assert_clean(model)


def test_of_several_places_those_that_a_slice_does_not_fit_are_told_on_read():
    long = torch.zeros(9, 2)
    model = nn.Sequential(Giving(lambda: Y), Giving(lambda: long), nn.Identity())
    with hl.capture(model, "{0,1}", at=7) as record:
        assert model[0]() is Y
        assert model[1]() is long
    assert record.places() == ["1"]
    assert "at=[7] does not fit" in record.unfired()["0"]
    with pytest.raises(hl.NeverFired, match=r"'0'.*at=\[7\].*\(2, 3, 4\)"):
        record["0"]
    with pytest.raises(hl.NeverFired, match=r"at=\[7\]"):
        with hl.capture(model, "0", at=7, stop=True):
            assert model[0]() is Y
    assert_clean(model)


@each_misfit
def test_measuring_a_slice_that_does_not_fit_raises_at_once(at, told):
    model = nn.Sequential(nn.Identity())
    with pytest.raises(hl.ChangeError) as caught:
        hl.measure(model, "0", statistics=[hl.Mean()], data=[Y], at=at)
    assert in_three_parts(caught.value, told)
    assert_clean(model)


def test_a_slice_of_a_parameter_that_does_not_fit_is_told_and_leaves_it_as_it_was():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.ones(1, 3)
    before, bare = state_bits(model), model(x)
    with pytest.raises(hl.ChangeError, match=r"'0\.bias'.*at=\[1, 2\].*\(2,\).*too many"):
        with hl.edit(model, {"0.weight": hl.zero(), "0.bias": hl.zero()}, at=np.s_[1, 2]):
            raise AssertionError("the block was entered")
    with pytest.raises(hl.NeverFired, match=r"'0\.weight:?.*at=\[5\].*\(2, 3\)"):
        with hl.capture(model, "0.weight", at=5):
            assert torch.equal(model(x), bare)
    with hl.capture(model, "0.weight:grad", at=5) as record:
        model(x).sum().backward()
    with pytest.raises(hl.GradientNotAvailable, match=r"at=\[5\].*\(2, 3\)"):
        record["0.weight:grad"]
    assert torch.equal(model[0].weight.grad, torch.ones(2, 3))
    assert_same_state(model, before)
    assert_clean(model)


def by_length(model, lengths):
    """Run a model on batches of these lengths."""
    return [model(torch.arange(2.0 * n).view(2, n)) for n in lengths]


def test_calls_that_a_slice_does_not_fit_are_told_when_they_are_read():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for where in ("0", "1:input"):
        with hl.capture(model, where, at=np.s_[:, 3]) as record:
            values = by_length(model, [4, 2, 5])
        assert torch.equal(record[where, 0], values[0][:, 3])
        assert torch.equal(record[where, 2], values[2][:, 3])
        assert record.calls(where)[1] is None
        with pytest.raises(hl.NotCaptured, match=r"'(0|1:input)'.*at=\[:, 3\].*\(2, 2\)"):
            record[where, 1]
        with pytest.raises(hl.NotCaptured, match=r"at=\[:, 3\]"):
            record.cat(where)
        with hl.capture(model, where, at=np.s_[:, 3]) as record:
            by_length(model, [2, 5])
        with pytest.raises(hl.SeveralCalls):
            record[where]


@pytest.mark.parametrize("where", ["0", "1:input"])
def test_the_first_and_the_last_call_never_stand_for_one_that_a_slice_does_not_fit(where):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    at = np.s_[:, 3]
    for keep, lengths in [("first", [2, 4]), ("last", [4, 2])]:
        with pytest.raises(hl.NeverFired, match=r"at=\[:, 3\].*\(2, 2\)"):
            with hl.capture(model, where, at=at, keep=keep):
                by_length(model, lengths)
    for keep, lengths, number in [("first", [4, 2], 0), ("last", [2, 2, 5], 2)]:
        with hl.capture(model, where, at=at, keep=keep) as record:
            values = by_length(model, lengths)
        assert torch.equal(record[where], values[number][:, 3])
        assert torch.equal(record.of_call(where, number), values[number][:, 3])


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_the_slice_of_a_gradient_that_does_not_fit_is_told_on_read_and_by_an_edit_at_once(port):
    lin, x, y = nn.Linear(3, 3), torch.ones(2, 3), torch.ones(5, 3)

    def run(*inputs):
        lin.zero_grad()
        for given in inputs:
            lin(given.clone().requires_grad_()).sum().backward()
        return lin.weight.grad.clone()

    expected = run(x)
    with hl.capture(lin, f":{port}", at=4) as record:
        assert torch.equal(run(x), expected)
    with pytest.raises(hl.GradientNotAvailable, match=rf"':{port}'.*at=\[4\].*\(2, 3\)"):
        record[f":{port}"]
    assert record.places() == []
    for keep, inputs in [("first", (x, y)), ("last", (y, x))]:
        with hl.capture(lin, f":{port}", at=4, keep=keep) as record:
            run(*inputs)
    with hl.capture(lin, f":{port}", at=4) as record:
        run(x, y)
    assert record[f":{port}", 1].shape == (3,)
    with pytest.raises(hl.GradientNotAvailable, match=r"at=\[4\]"):
        record[f":{port}", 0]
    with pytest.raises(hl.ChangeError, match=rf"':{port}'.*at=\[4\].*\(2, 3\)"):
        with hl.edit(lin, f":{port}", hl.zero(), at=4):
            run(x)
    assert_clean(lin)


def test_a_users_own_error_in_at_or_transform_is_raised_where_it_happens():
    model = Giving(lambda: Y)
    for options in ({"at": lambda v: v[7]}, {"transform": lambda v: v[7]}):
        with pytest.raises(IndexError, match="out of bounds") as caught:
            with hl.capture(model, "", **options):
                model()
        assert any("place ''" in note for note in caught.value.__notes__)
    assert_clean(model)


def test_transform_comes_after_at():
    model = Giving(lambda: Y)
    with hl.capture(model, "", at=np.s_[0], transform=lambda piece: piece.sum()) as record:
        model()
    assert record[""] == Y[0].sum()


def test_a_function_that_works_in_place_does_not_reach_outside_its_slice_nor_the_original():
    value = torch.ones(4)
    model = Giving(lambda: value)
    with hl.edit(model, "", lambda piece: piece.add_(5), at=np.s_[:2]):
        assert model().tolist() == [6, 6, 1, 1]
    assert value.tolist() == [1, 1, 1, 1]


def test_an_expanded_value_is_edited_at_one_row_only():
    model = Giving(lambda: torch.ones(1, 3).expand(2, 3))
    with hl.edit(model, "", hl.scale(3.0), at=np.s_[0]):
        assert model().tolist() == [[3, 3, 3], [1, 1, 1]]


def test_the_gradient_of_an_edited_slice_is_right():
    x = torch.ones(2, 3, requires_grad=True)
    model = Giving(lambda x: x * 1)
    with hl.edit(model, "", hl.scale(3.0), at=np.s_[0]):
        model(x).sum().backward()
    assert x.grad.tolist() == [[3, 3, 3], [1, 1, 1]]


def test_a_slice_of_whole_numbers_is_edited_by_a_function_that_keeps_them_whole():
    model = Giving(lambda: torch.arange(4))
    with hl.edit(model, "", lambda piece: piece * 2, at=np.s_[1:3]):
        assert model().tolist() == [0, 2, 4, 3]
    with pytest.raises(hl.ChangeError, match=r"int64.*float32"):
        with hl.edit(model, "", lambda piece: piece * 2.5, at=np.s_[1:3]):
            model()
    assert_clean(model)


# -- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "columns"),
    [
        (hl.heads(1, of=2), [2, 3]),
        (hl.heads(0, 3, of=4), [0, 3]),
        (hl.heads(1, 0, of=2), [2, 3, 0, 1]),
        (hl.heads(-1, of=4), [3]),
        (hl.heads(0, of=1), [0, 1, 2, 3]),
    ],
)
def test_heads_are_columns_of_the_last_dimension(at, columns):
    model = Giving(lambda: Y)
    with hl.capture(model, "", at=at) as record, hl.edit(model, "", hl.zero(), at=at):
        out = model()
    assert torch.equal(record[""], Y[..., columns])
    expected = Y.clone()
    expected[..., columns] = 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (hl.heads(2, of=2), Y),
        lambda: (hl.heads(-3, of=2), Y),
        lambda: (hl.heads(0, of=3), Y),
        lambda: (hl.heads(of=2), Y),
        lambda: (hl.heads(0, of=0), Y),
        lambda: (hl.heads(0, of=1), torch.tensor(1.0)),
    ],
    ids=["too large", "too small", "does not divide", "none", "of none", "no dimension"],
)
def test_heads_that_do_not_fit_are_told(make):
    with pytest.raises(hl.ChangeError, match="head"):  # noqa: PT012 - or when they are made
        at, value = make()
        model = Giving(lambda: value)
        with hl.edit(model, "", hl.zero(), at=at):
            model()


def test_heads_are_found_in_the_value_whatever_the_default_device_is():
    model, x = nn.Identity(), torch.ones(2, 6)
    with torch.device("meta"), hl.edit(model, "", hl.zero(), at=hl.heads(0, 2, of=3)):
        assert model(x).tolist() == [[0, 0, 1, 1, 0, 0]] * 2


# -- last_token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("mask", "last"),
    [
        ([[1, 1, 0], [1, 1, 1]], [1, 2]),
        ([[0, 1, 1], [1, 0, 0]], [2, 0]),
        ([[1, 0, 1], [0, 1, 0]], [2, 1]),
    ],
)
def test_the_last_token_is_the_last_that_the_mask_has(kind, mask, last):
    at = hl.last_token(torch.tensor(mask, dtype=kind))
    model = Giving(lambda: Y)
    with hl.capture(model, "", at=at) as record, hl.edit(model, "", hl.zero(), at=at):
        out = model()
    assert torch.equal(record[""], torch.stack([Y[0, last[0]], Y[1, last[1]]]))
    expected = Y.clone()
    expected[0, last[0]] = expected[1, last[1]] = 0
    assert torch.equal(out, expected)


def test_the_mask_of_the_last_token_may_be_a_list_or_an_array():
    mask = [[1, 1, 0], [1, 1, 1]]
    for given in (mask, np.array(mask)):
        model = Giving(lambda: Y)
        with hl.capture(model, "", at=hl.last_token(given)) as record:
            model()
        assert torch.equal(record[""], torch.stack([Y[0, 1], Y[1, 2]]))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.tensor([[0, 0, 0], [1, 0, 0]]), "The mask is empty for some sequence"),
        (torch.ones(2), r"mask has the shape \(2,\).*\(2, 3, 4\)"),
        (torch.ones(2, 4), r"mask has the shape \(2, 4\).*first two dimensions"),
        (torch.ones(2, 3, 4), r"mask has the shape \(2, 3, 4\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_told(mask, reason):
    model = Giving(lambda: Y)
    at = hl.last_token(mask)
    with pytest.raises(hl.ChangeError, match=reason), hl.edit(model, "", hl.zero(), at=at):
        model()
    with pytest.raises(hl.NeverFired, match=reason), hl.capture(model, "", at=at):
        model()
    assert_clean(model)


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_the_slice_of_a_gradient_is_captured_and_edited(port):
    lin = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    weights = torch.arange(6.0).reshape(2, 3)
    full = weights if port == "grad_output" else weights @ lin.weight.detach()
    with (
        hl.capture(lin, f":{port}", at=np.s_[0]) as record,
        hl.edit(lin, f":{port}", hl.zero(), at=np.s_[1]),
    ):
        (lin(x) * weights).sum().backward()
    torch.testing.assert_close(record[f":{port}"], full[0])
    assert x.grad[0].any()
    assert not x.grad[1].any()
    assert_clean(lin)


@pytest.mark.parametrize(("which", "of"), [(([0, 2],), 3), ((1.0,), 3), ((1,), 3.0)])
def test_heads_that_are_no_whole_numbers_are_refused_at_once(which, of):
    with pytest.raises(TypeError, match=r"of .*: .* integer\. Write heads\(0, 2, of=4\)"):
        hl.heads(*which, of=of)
    assert repr(hl.heads(np.int64(1), of=np.int64(3))) == "heads(1, of=3)"


def test_the_class_of_a_slice_is_not_taken_for_a_function_of_the_value():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 3, 2)
    with pytest.raises(hl.ChangeError, match=r"at=last_token.*It is a class.*last_token\(\.\.\.\)"):
        with hl.capture(model, "0", at=hl.last_token):
            model(x)
    with pytest.raises(hl.ChangeError, match=r"heads\(\.\.\.\)"):
        hl.measure(model, "0", statistics=[hl.Mean()], data=[x], at=hl.heads)
    assert_clean(model)


@pytest.mark.parametrize("at", ["last", 0.5, {"0": 1}])
def test_what_is_no_index_is_refused_before_the_forward(at):
    model = nn.Sequential(nn.Linear(2, 2))
    for context in (hl.capture(model, "0", at=at), hl.edit(model, "0", hl.zero(), at=at)):
        with pytest.raises(TypeError, match=r"at=.* was asked for.*no index.*np\.s_"):
            with context:
                raise AssertionError("the block was entered")
    assert_clean(model)


@pytest.mark.parametrize("where", ["*", "*:input", "*:inputs", "**.weight"])
def test_a_slice_that_fits_no_match_of_a_glob_raises_at_exit(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(hl.NeverFired, match="does not fit"):
        with hl.capture(model, where, at=np.s_[:, 1:, 1]):
            model(torch.randn(2, 4))
    assert_clean(model)


def test_a_slice_that_does_not_fit_raises_a_public_error():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(hl.errors.ChangeError) as caught, hl.edit(model, "0", hl.zero(), at=9):
        model(torch.randn(2, 4))
    assert type(caught.value) is hl.errors.ChangeError


def test_a_slice_without_gradients_is_not_called_attached():
    x = torch.randn(2, 3, requires_grad=True)
    model = nn.Identity()
    with hl.capture(model, "", at=np.s_[:, :2]) as record, torch.no_grad():
        model(x)
    assert not record[""].requires_grad
    assert "attached" not in repr(record)


def fails_from(first):
    """Return a function of a value that raises from its n-th call on."""
    values = []

    def function(value):
        values.append(value)
        if len(values) > first:
            raise LookupError("bad")
        return value

    return function


@pytest.mark.parametrize("keep", ["all", "last"])
@pytest.mark.parametrize("where", ["0", "0:input", "0:inputs"])
def test_a_function_that_raises_is_the_reason_at_any_port(where, keep):
    model = nn.Sequential(nn.Linear(4, 4))
    reason = "function in transform= raised LookupError: bad"
    capture = hl.capture(model, where, transform=fails_from(0), keep=keep)
    with pytest.raises(hl.NeverFired, match=reason), capture, contextlib.suppress(LookupError):
        model(torch.randn(2, 4))


@pytest.mark.parametrize("where", ["0", "0:input", "0:inputs"])
def test_a_call_whose_function_raised_is_told_beside_one_that_was_kept(where):
    model = nn.Sequential(nn.Linear(4, 4))
    with hl.capture(model, where, transform=fails_from(1)) as record:
        model(torch.randn(2, 4))
        with pytest.raises(LookupError):
            model(torch.randn(2, 4))
    kept, missing = record.calls(where)
    assert kept is not None
    assert missing is None
    with pytest.raises(hl.NotCaptured, match="raised LookupError: bad"):
        record[where, 1]


def test_an_index_without_dimensions_has_a_text():
    model = nn.Identity()
    with hl.capture(model, "", at=()) as record:
        model(torch.ones(2))
    assert record.slicing("") == ("()", False)
