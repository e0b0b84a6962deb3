"""The options of capture: at, transform, dtype, device, detach, keep and stop."""

import weakref

import numpy as np
import pytest
import torch
from models import Giving, Swallowing, small
from oracles import assert_clean
from torch import nn

import hookline as hl


def test_at_takes_an_index_or_a_function():
    model, x = small(seed=0), torch.randn(5, 3)
    expected = model[0](x)
    with hl.capture(model, "0", at=np.s_[:, -1]) as record:
        model(x)
    assert torch.equal(record["0"], expected[:, -1])
    with hl.capture(model, "0", at=lambda value: value.mean(0)) as record:
        model(x)
    assert torch.equal(record["0"], expected.mean(0))
    with hl.capture(model, "0", at=0) as record:
        model(x)
    assert torch.equal(record["0"], expected[0])


@pytest.mark.parametrize("columns", [1, 60, 99])
@pytest.mark.parametrize("grad", [True, False])
def test_only_the_memory_of_the_slice_is_kept(columns, grad):
    model = nn.Linear(3, 100)
    with torch.set_grad_enabled(grad), hl.capture(model, "", at=np.s_[:, :columns]) as record:
        model(torch.ones(8, 3))
    kept = record[""]
    assert kept.requires_grad == grad
    assert kept.untyped_storage().nbytes() == kept.nbytes == 8 * columns * 4


def test_an_attached_slice_can_be_used_in_a_loss_whatever_happens_to_the_rest():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(5, 3)
    with hl.capture(model, "0", at=np.s_[:, :1]) as record:
        model(x)
    record["0"].sum().backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model[0](x)[:, :1].sum().backward()
    assert torch.equal(got, model[0].weight.grad)


def test_at_meets_nested_values_with_one_tensor_only():
    model = Giving(lambda x: {"h": x, "n": 1})
    with hl.capture(model, "", at=0) as record:
        model(torch.arange(3.0))
    assert record[""] == 0
    model = nn.Sequential(nn.LSTM(2, 2))
    with pytest.raises(hl.NeverFired, match=r"'0'.*\[1\]\[0\]"), hl.capture(model, "0", at=0):
        model(torch.ones(1, 1, 2))
    assert_clean(model)


def test_heads_takes_the_columns_of_attention_heads():
    model = nn.Identity()
    x = torch.arange(2 * 5 * 12.0).view(2, 5, 12)
    split = x.view(2, 5, 4, 3)
    for which in [(2,), (0, 3), (3, 1), (-1,)]:
        with hl.capture(model, "", at=hl.heads(*which, of=4)) as record:
            model(x)
        assert torch.equal(record[""], split[:, :, list(which)].flatten(2))


def test_heads_that_do_not_fit_are_an_error():
    model = nn.Identity()
    with pytest.raises(hl.NeverFired, match=r"\(2, 5, 12\).*of="):
        with hl.capture(model, "", at=hl.heads(0, of=5)):
            model(torch.ones(2, 5, 12))
    for make in (lambda: hl.heads(of=4), lambda: hl.heads(0, of=0), lambda: hl.heads(4, of=4)):
        with pytest.raises(hl.ChangeError, match="heads"):
            make()


def test_last_token_takes_the_last_position_that_is_not_padding():
    model = nn.Identity()
    x = torch.arange(24.0).view(3, 4, 2)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]])
    expected = torch.stack([x[0, 1], x[1, 3], x[2, 0]])
    for given in (mask, mask.bool(), mask.float()):
        with hl.capture(model, "", at=hl.last_token(given)) as record:
            model(x)
        assert torch.equal(record[""], expected)


def test_last_token_needs_a_mask_that_fits_and_is_not_empty():
    model = nn.Identity()
    with pytest.raises(hl.NeverFired, match=r"\(2, 4\).*\(3, 4, 2\)"):
        with hl.capture(model, "", at=hl.last_token(torch.ones(2, 4))):
            model(torch.ones(3, 4, 2))
    with pytest.raises(hl.NeverFired, match="empty for some sequence"):
        with hl.capture(model, "", at=hl.last_token(torch.tensor([[1, 1], [0, 0]]))):
            model(torch.ones(2, 2, 2))


def test_transform_keeps_what_it_returns():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(model, "0", transform=lambda v: {"norm": v.norm(), "n": len(v)}) as record:
        model(x)
    assert torch.equal(record["0"]["norm"], model[0](x).norm())
    assert record["0[n]"] == 5
    with hl.capture(model, "0", transform=lambda v: None) as record:
        model(x)
    assert record["0"] is None


def test_a_transform_that_gives_an_alias_keeps_the_value_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(50, 3)
    with torch.no_grad():
        expected = model[0](x)
        for transform in (lambda v: v, lambda v: v.t(), lambda v: v.view(-1), lambda v: v.numpy()):
            with hl.capture(model, "0", transform=transform) as record:
                model(x)
            assert np.array_equal(np.asarray(record["0"]), np.asarray(transform(expected)))


@pytest.mark.parametrize("option", ["at", "transform"])
@pytest.mark.parametrize("detach", [False, True])
def test_a_function_that_writes_into_a_snapshot_does_not_reach_the_model(option, detach):
    model, x = small(), torch.randn(5, 3)
    expected = model(x)
    with torch.set_grad_enabled(detach):
        with hl.capture(model, "0", detach=detach, **{option: lambda v: v.zero_()}) as record:
            result = model(x)
    assert torch.equal(result, expected)
    assert not record["0"].any()


def test_an_error_in_a_transform_carries_the_place_and_leaves_no_hook():
    model = small(seed=0)
    with pytest.raises(ZeroDivisionError) as caught:
        with hl.capture(model, "1", transform=lambda value: 1 / 0):
            model(torch.ones(1, 3))
    assert any("'1'" in note for note in caught.value.__notes__)
    assert_clean(model)


def test_dtype_converts_floating_point_values_only():
    model = Giving(lambda x: (x, x.long(), x > 0, x.to(torch.complex64) * 1j))
    with hl.capture(model, "", dtype=torch.float16) as record:
        model(torch.randn(4))
    kinds = [value.dtype for value in record[""]]
    assert kinds == [torch.float16, torch.int64, torch.bool, torch.complex64]
    assert record[""][3].imag.abs().sum() > 0


def test_device_moves_what_is_kept():
    model = small(seed=0)
    with hl.capture(model, "*", device="meta") as record:
        model(torch.ones(5, 3))
    assert record["0"].is_meta
    assert record["0"].shape == (5, 4)


def test_derived_values_stay_attached_and_can_be_used_in_a_loss():
    model, x = small(seed=0), torch.randn(5, 3)
    for options in (
        {"dtype": torch.float64},
        {"transform": torch.tanh},
        {"at": np.s_[1:3]},
        {"at": np.s_[1:3], "dtype": torch.float64, "transform": torch.tanh, "keep": "last"},
    ):
        model.zero_grad()
        with hl.capture(model, "0", **options) as record:
            model(x)
        record["0"].sum().backward()
        assert model[0].weight.grad is not None
        with hl.capture(model, "0", detach=True, **options) as record:
            model(x)
        assert not record["0"].requires_grad


def test_at_transform_dtype_and_detach_are_applied_in_that_order():
    model, x = small(seed=0), torch.randn(5, 3)
    with hl.capture(
        model, "0", at=np.s_[:2], transform=lambda v: v.sum(0), dtype=torch.float64, detach=True
    ) as record:
        model(x)
    assert torch.equal(record["0"], model[0](x)[:2].sum(0).double().detach())


def test_a_derived_value_is_a_snapshot_under_no_grad():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    x = torch.randn(50, 3)
    with torch.no_grad():
        expected = model[0](x)
        for options in ({"at": np.s_[:, :3]}, {"dtype": torch.float32}, {"device": "cpu"}):
            with hl.capture(model, "0", **options) as record:
                model(x)
            assert torch.equal(record["0"], expected[:, :3] if "at" in options else expected)


def test_keep_first_and_last_give_that_call():
    model = nn.Sequential(nn.Identity())
    for keep, number in (("first", 0.0), ("last", 2.0)):
        with hl.capture(model, "0", "0:input", keep=keep) as record:
            for n in range(3):
                model(torch.tensor([float(n)]))
        assert record["0"].item() == record["0:input"].item() == number
        assert len(record.calls("0")) == 1


def test_keep_holds_for_gradients_and_for_parts():
    model = nn.Sequential(nn.LSTM(2, 2))
    for keep, factor in (("first", 1.0), ("last", 3.0)):
        with hl.capture(model, "0:grad_output[0]", "0[1][0]", keep=keep) as record:
            for n in (1.0, 2.0, 3.0):
                (model(torch.ones(1, 1, 2))[0] * n).sum().backward()
        assert torch.equal(record["0:grad_output[0]"], torch.full((1, 1, 2), factor))
        assert len(record.calls("0[1][0]")) == 1


def test_keep_last_lets_earlier_values_go():
    model = nn.Sequential(nn.Linear(2, 2))
    alive = []
    model[0].register_forward_hook(lambda m, a, o: alive.append(weakref.ref(o)))
    with hl.capture(model, "0", keep="last"):
        for _ in range(4):
            model(torch.ones(1, 2))
        assert [ref() is not None for ref in alive] == [False, False, False, True]


def test_stop_ends_the_forward_and_the_block():
    ran = []
    model = small(seed=0)
    model[2].register_forward_hook(lambda *_: ran.append("late"))
    with hl.capture(model, "0", "1:input", stop=True) as record:
        model(torch.ones(1, 3))
        ran.append("after")
    assert ran == []
    assert torch.equal(record["0"], model[0](torch.ones(1, 3)))
    assert record["1:input"] is record["0"]


def test_stop_with_several_options_keeps_the_derived_value():
    model = small(seed=0)
    with hl.capture(
        model, "1", at=np.s_[:, 0], dtype=torch.float64, detach=True, keep="first", stop=True
    ) as record:
        model(torch.ones(2, 3))
    assert record["1"].dtype == torch.float64
    assert record["1"].shape == (2,)


def test_stop_passes_through_except_exception_and_nothing_is_left():
    model = Swallowing(Exception)
    with hl.capture(model, "first", stop=True) as record:
        model(torch.ones(1, 3))
        raise AssertionError("not reached")
    assert record["first"].shape == (1, 3)
    assert_clean(model)


def test_a_swallowed_stop_is_told_at_exit_with_the_record():
    model = Swallowing(BaseException)
    with pytest.raises(hl.NeverFired, match="caught the stop") as caught:
        with hl.capture(model, "first", stop=True):
            model(torch.ones(1, 3))
    assert caught.value.record["first"].shape == (1, 3)
    assert_clean(model)


def test_an_outer_capture_survives_the_stop_of_an_inner_one():
    model = small(seed=0)
    with hl.capture(model, "*") as outer:
        with hl.capture(model, "1", stop=True) as inner:
            model(torch.ones(1, 3))
    assert outer.places() == ["0", "1"]
    assert torch.equal(outer["1"], inner["1"])
    assert_clean(model)


def test_stop_is_refused_for_gradients_and_attach():
    with pytest.raises(ValueError, match=r"gradient place.*Leave out stop"):
        with hl.capture(small(seed=0), "0:grad_output", stop=True):
            pass
    model = small(seed=0)
    context = hl.capture(model, "0", stop=True)
    with pytest.raises(ValueError, match="attach"):
        context.attach()
    with context:
        model(torch.ones(1, 3))


@pytest.mark.parametrize("option", [{"keep": "some"}, {"threads": "mine"}])
def test_unknown_options_are_refused(option):
    with pytest.raises(ValueError, match="was asked for"):
        hl.capture(small(seed=0), "0", **option)
