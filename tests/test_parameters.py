"""Parameters and buffers: found by name, edited, and restored bit for bit."""

import copy
import gc
import math
import struct
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import numpy as np
import pytest
import torch
from models import Blocks, TiedLayers, Token, mlp
from oracles import assert_clean, assert_same_state, bits, state_bits
from torch import nn
from torch.nn.utils import prune

import hookline as hl

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


# -- finding --------------------------------------------------------------------------------------


def test_get_module_finds_modules_containers_aliases_and_the_model():
    model = Blocks()
    assert hl.get_module(model, "layers.1") is model.layers[1]
    assert hl.get_module(model, "layers") is model.layers
    assert hl.get_module(model, "") is model
    model.alias = model.layers[0]
    assert hl.get_module(model, "alias") is model.layers[0]
    wrapped = nn.Module()
    wrapped.module = model
    assert hl.get_module(wrapped, "layers.0") is model.layers[0]
    assert hl.get_module(nn.ModuleDict({"a/b": nn.ReLU()}), "a/b").__class__ is nn.ReLU


def test_get_parameter_finds_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert hl.get_parameter(model, "0.weight") is model[0].weight
    assert hl.get_parameter(model, "1.running_mean") is model[1].running_mean
    assert hl.get_parameter(Blocks(), "scales.0").shape == (3,)
    assert hl.get_parameter(nn.Linear(2, 3), "bias").shape == (3,)


def test_what_is_not_there_is_an_error_with_the_closest_names():
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(hl.PlaceNotFound, match=r"'0.wieght'.*Closest: '0.weight'"):
        hl.get_parameter(model, "0.wieght")
    with pytest.raises(hl.PlaceNotFound, match="'7'"):
        hl.get_module(model, "7")
    with pytest.raises(hl.PlaceNotFound, match=r"module, with '?0.weight'?, '?0.bias'?"):
        hl.get_parameter(model, "0")
    with pytest.raises(hl.PlaceNotFound, match=r"module, with weight, bias\."):
        hl.get_parameter(model[0], "")
    with pytest.raises(hl.PlaceNotFound, match=r"module, with none of its own\."):
        hl.get_parameter(model, "")


def test_one_module_with_parameters_is_not_put_at_several_places():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(hl.ChangeError, match=r"One PReLU .* 2 places.*share.*function"):
        hl.replace_module(model, nn.ReLU, nn.PReLU()).attach()
    assert type(model[0]) is type(model[1]) is nn.ReLU
    with hl.replace_module(model, nn.ReLU, lambda old: nn.PReLU()):
        assert model[0] is not model[1]
    with hl.replace_module(model, nn.ReLU, nn.GELU()):  # without state it does no harm
        assert model[0] is model[1]
    assert_clean(model)


def test_get_module_and_get_parameter_take_one_path_of_their_kind():
    model = mlp()
    for path in ("0.weight", "0:input", "0[0]", "*", "0.weight:grad"):
        with pytest.raises((hl.PlaceError, hl.PlaceNotFound)):
            hl.get_module(model, path)
    for path in ("0.weight:grad", "**.weight", "0:input", "0"):
        with pytest.raises((hl.PlaceError, hl.PlaceNotFound)):
            hl.get_parameter(model, path)


# -- editing weights ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [hl.zero(), hl.scale(2.0), hl.noise(0.1, seed=1), torch.ones(4, 3), lambda w: w.flip(0),
     hl.add(1.0) | hl.clamp(max=0.5), lambda w, call: w * (call.index + 3)],
)  # fmt: skip
def test_an_edited_weight_is_used_inside_and_put_back_bit_for_bit(change):
    model = mlp()
    before, plain, weight = state_bits(model), model(X), model[0].weight
    pointer = weight.data_ptr()
    with hl.edit(model, "0.weight", change):
        assert model[0].weight is weight
        assert torch.equal(model(X), model[2](torch.tanh(X @ weight.t() + model[0].bias)))
        assert not torch.equal(bits(weight), before["0.weight"])
    assert model[0].weight is weight
    assert weight.data_ptr() == pointer
    assert weight.requires_grad
    assert weight.is_leaf
    assert_same_state(model, before)
    assert torch.equal(model(X), plain)
    assert_clean(model)


def test_nan_payloads_and_negative_zero_come_back():
    strange = np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
    model = nn.Linear(5, 1, bias=False)
    model.weight.data = torch.from_numpy(strange.view(np.float32)).view(1, 5).clone()
    before = state_bits(model)
    with hl.edit(model, "weight", hl.scale(2.0)):
        pass
    assert_same_state(model, before)
    with hl.preserve(model), torch.no_grad():
        model.weight.zero_()
    assert_same_state(model, before)
    assert struct.unpack("<5I", bytes(bits(model.weight).tolist())) == tuple(strange.tolist())


def test_preserve_tells_nan_and_the_sign_of_zero_apart():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[-0.0, math.nan]])
    before = state_bits(model)
    with hl.preserve(model), torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, math.nan]]))
    assert_same_state(model, before)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool],
)
def test_every_dtype_is_put_back(dtype):
    model = nn.Module()
    model.register_buffer("b", torch.tensor([[0.0, 1.0], [1.0, 1.0]]).to(dtype))
    model.forward = lambda x: x
    before, buffer = state_bits(model), model.b
    with hl.edit(model, "b", hl.zero()):
        assert not model.b.any()
        assert model.b.dtype == dtype
    assert_same_state(model, before)
    with hl.preserve(model):
        model.b.zero_()
    assert_same_state(model, before)
    assert model.b is buffer


def test_buffers_can_be_edited():
    model = nn.Sequential(nn.BatchNorm1d(3)).eval()
    before, buffer = state_bits(model), model[0].running_mean
    with hl.edit(model, "0.running_mean", hl.add(1.0)):
        shifted = model(X)
    assert model[0].running_mean is buffer
    assert torch.allclose(shifted, model(X - 1))
    with hl.edit(model, {"0.running_var": hl.scale(4.0), "0.num_batches_tracked": hl.add(3)}):
        assert model[0].num_batches_tracked == 3
    assert_same_state(model, before)


def test_globs_lists_and_mappings_name_several():
    model = mlp()
    before = state_bits(model)
    for where in ("**.weight", "**.weight:value", ["0.weight", "2.weight"], "{0,2}.weight"):
        with hl.edit(model, where, hl.zero()):
            assert not model[0].weight.any()
            assert not model[2].weight.any()
            assert model[0].bias.any()
        assert_same_state(model, before)
    with hl.edit(model, {"0.bias": hl.zero(), "2.*:value": hl.scale(0.0)}):
        assert not model[0].bias.any()
        assert not model[2].bias.any()
        assert not model[2].weight.any()
        assert model[0].weight.any()
    assert_same_state(model, before)
    assert_clean(model)


def test_a_shared_parameter_is_edited_once_under_any_of_its_names():
    model = TiedLayers()
    before = state_bits(model)
    for where in (
        "encode.weight",
        "decode.weight",
        "**.weight",
        ["encode.weight", "decode.weight"],
    ):
        with hl.edit(model, where, hl.scale(2.0)):
            assert torch.equal(bits(model.decode.weight / 2), before["encode.weight"])
            assert model.decode.weight is model.encode.weight
        assert_same_state(model, before)
    assert model.decode.weight is model.encode.weight


def test_at_edits_a_slice_of_a_weight():
    model = mlp()
    before = state_bits(model)
    with hl.edit(model, "0.weight", lambda rows: rows * 0 + 7, at=np.s_[1:3]):
        assert (model[0].weight[1:3] == 7).all()
        assert not (model[0].weight[0] == 7).any()
    assert_same_state(model, before)


def test_a_change_that_does_not_fit_a_weight_leaves_all_as_it_was():
    model = mlp()
    before = state_bits(model)
    for wrong in (
        torch.ones(7),
        lambda w: w[:2],
        lambda w: w.double(),
        lambda w: None,
        lambda w: 1 / 0,
    ):
        with pytest.raises((hl.ChangeError, ZeroDivisionError)):
            with hl.edit(model, {"2.weight": hl.zero(), "0.weight": wrong}):
                raise AssertionError("entered")
        assert_same_state(model, before)
        assert_clean(model)
    assert torch.equal(model(X), mlp()(X))


def test_calls_have_no_meaning_for_a_weight_and_the_error_says_so():
    model = mlp()
    with pytest.raises((hl.ChangeError, TypeError, hl.PlaceError), match="calls"):
        with hl.edit(model, "0.weight", hl.zero(), calls=1):
            pass
    assert_clean(model)


def test_an_exception_inside_puts_the_weight_back():
    model = mlp()
    before = state_bits(model)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            with hl.edit(model, "**.weight", hl.zero()):
                raise error
        assert_same_state(model, before)
        assert_clean(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.Adam(p, 0.1, foreach=True),
        lambda p: torch.optim.Adam(p, 0.1, fused=True),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    ],
)
def test_optimiser_steps_inside_are_discarded(make):
    model = mlp()
    before = state_bits(model)
    optimiser = make(model.parameters())
    with hl.edit(model, "**:value", hl.scale(2.0)):
        for _ in range(2):
            optimiser.zero_grad()
            model(X).pow(2).sum().backward()
            optimiser.step()
    assert_same_state(model, before)
    with hl.preserve(model):
        for _ in range(2):
            optimiser.zero_grad()
            model(X).pow(2).sum().backward()
            optimiser.step()
    assert_same_state(model, before)
    optimiser.zero_grad()
    model(X).pow(2).sum().backward()
    optimiser.step()
    assert not torch.equal(bits(model[0].weight), before["0.weight"])


def test_loading_and_converting_inside_are_undone():
    model = mlp()
    before, other = state_bits(model), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    weight, pointer = model[0].weight, model[0].weight.data_ptr()
    for act in (
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model.to(torch.float64),
        lambda: model.half(),
        lambda: setattr(weight, "data", torch.zeros(4, 3)),
        lambda: weight.data.fill_(9),
    ):
        for context in (hl.edit(model, "**:value", hl.scale(2.0)), hl.preserve(model)):
            with context:
                act()
            assert model[0].weight is weight
            assert weight.dtype == torch.float32
            assert weight.data_ptr() == pointer
            assert_same_state(model, before)


def test_the_users_own_tensor_is_not_written_to_by_a_step_inside():
    model = mlp()
    own = torch.zeros(4, 3)
    optimiser = torch.optim.SGD(model.parameters(), 1.0)
    with hl.edit(model, "0.weight", lambda w: own):
        model(X).sum().backward()
        optimiser.step()
    assert not own.any()


def test_a_function_that_keeps_its_argument_does_not_share_the_weight():
    model, kept = mlp(), []

    def clear(weight):
        kept.append(weight)
        return weight.zero_()

    with hl.edit(model, "0.weight", clear):
        kept[0].fill_(5)
        assert not model[0].weight.any()


def test_a_weight_made_from_another_parameter_does_not_tie_the_two():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = state_bits(model)
    with hl.edit(model, "0.weight", lambda w: model[1].weight), torch.no_grad():
        model[0].weight.fill_(5)
    assert_same_state(model, before)


def test_an_expanded_or_transposed_new_weight_can_be_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for function in (lambda w: w.mean().expand_as(w), lambda w: w.t()):
        with hl.edit(model, "0.weight", function):
            model(X).sum().backward()
            optimiser.step()


def test_a_weight_edit_reaches_autocast_and_leaves_its_cache():
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with hl.edit(model, "weight", hl.zero()):
            inside = model(x)
        after = model(x)
        with hl.preserve(model):
            with torch.no_grad():
                model.weight.zero_()
            torch.clear_autocast_cache()
            model(x)
        preserved = model(x)
    assert torch.equal(inside.float(), model.bias.to(torch.bfloat16).float().expand(1, 2))
    assert torch.equal(after, plain)
    assert torch.equal(preserved, plain)


def test_weights_are_edited_under_no_grad_and_in_inference_mode():
    model = mlp()
    before = state_bits(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), hl.edit(model, "0.weight", hl.zero()):
            inside = model(X)
        assert torch.equal(inside, model[2](torch.tanh(model[0].bias.expand(5, 4))))
        assert_same_state(model, before)
    model(X).sum().backward()
    assert model[0].weight.grad is not None


def test_parameters_made_in_inference_mode_can_be_edited():
    with torch.inference_mode():
        model = mlp()
    before = state_bits(model)
    with torch.no_grad(), hl.edit(model, "0.weight", hl.zero()):
        assert not model[0].weight.any()
        model(X)
    assert_same_state(model, before)


def test_an_edit_entered_in_inference_mode_can_be_trained_outside_it():
    model = mlp()
    with torch.inference_mode():
        handle = hl.edit(model, "0.weight", hl.scale(2.0)).attach()
    model(X).sum().backward()
    handle.remove()
    assert model[0].weight.grad is not None


# -- gradients through edited weights -------------------------------------------------------------


class AttentionOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


class RecurrentOutput(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 4)

    def forward(self, x):
        return self.rnn(x)[0]


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "Linear on 3-D": (lambda: nn.Linear(4, 4), (2, 3, 4)),
    "Bilinear": (lambda: Bilinear(), (3, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), (2, 4, 5, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "BatchNorm": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "PReLU": (lambda: nn.PReLU(4), (3, 4)),
    "LSTM": (lambda: RecurrentOutput(nn.LSTM), (3, 2, 4)),
    "GRU": (lambda: RecurrentOutput(nn.GRU), (3, 2, 4)),
    "MHA": (AttentionOutput, (2, 3, 4)),
}


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return self.inner(x, x + 1)


def gradients(model, x):
    return [x.grad, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("after", [True, False], ids=["after the exit", "inside"])
def test_backward_is_right_with_edited_weights(name, after):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(-2)
    data = torch.randn(shape)
    x, y = data.clone().requires_grad_(), data.clone().requires_grad_()
    reference(y).pow(2).sum().backward()
    before = [bits(p) for p in model.parameters()]
    with hl.edit(model, "**:value" if list(model.children()) else "*:value", scale_parameters):
        loss = model(x).pow(2).sum()
        if not after:
            loss.backward()
    if after:
        loss.backward()
    for got, expected in zip(gradients(model, x), gradients(reference, y), strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(bits(p), b) for p, b in zip(model.parameters(), before, strict=True))
    assert_clean(model)


def scale_parameters(value, call):
    return value * -2 if value.is_floating_point() and not _is_buffer(call) else value


def _is_buffer(call):
    return call.place.path.rpartition(".")[2] in call.module._buffers


def test_backward_is_right_for_an_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference[0].weight.mul_(3)
        reference[1].weight.mul_(3)
    tokens = torch.tensor([[1, 2, 2]])
    with hl.edit(model, "**.weight", hl.scale(3.0)):
        loss = model(tokens).pow(2).sum()
    loss.backward()
    reference(tokens).pow(2).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)


def test_a_tied_weight_gets_the_gradient_of_both_uses():
    model = TiedLayers()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.encode.weight.mul_(2)
    with hl.edit(model, "decode.weight", hl.scale(2.0)):
        loss = model(X).pow(2).sum()
    loss.backward()
    reference(X).pow(2).sum().backward()
    assert torch.allclose(model.encode.weight.grad, reference.encode.weight.grad)


def test_backward_of_an_older_graph_raises_inside_and_is_right_afterwards():
    for kind in (lambda: nn.Linear(3, 3), lambda: nn.LayerNorm(3)):
        torch.manual_seed(0)
        model = kind()
        x = X.clone().requires_grad_()
        older = model(x).pow(2).sum()
        with hl.edit(model, "weight", hl.scale(2.0)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                older.backward()
        x.grad = None
        older = model(x).pow(2).sum()
        (expected,) = torch.autograd.grad(older, x, retain_graph=True)
        with hl.edit(model, "weight", hl.scale(2.0)):
            model(x)
        older.backward()
        assert torch.equal(x.grad, expected)


def test_a_clean_and_an_edited_run_can_be_in_one_loss():
    model = nn.Linear(3, 3, bias=False)
    x = X.clone().requires_grad_()
    clean = model(x)
    with hl.edit(model, "weight", hl.scale(3.0)):
        edited = model(x)
    (clean + edited).sum().backward()
    assert torch.allclose(x.grad, (4 * model.weight.sum(0)).expand(5, 3), atol=1e-6)


def test_an_in_place_change_of_a_saved_value_is_still_found_inside():
    model = nn.Linear(3, 3)
    with hl.edit(model, "weight", hl.scale(2.0)):
        saved = model(X).exp()
        loss = saved.sum()
        saved.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("inside", [True, False])
def test_an_in_place_change_of_the_edited_weight_is_found(inside):
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    with hl.edit(model, "weight", hl.scale(2.0)):
        loss = model(x).sum()
        with torch.no_grad():
            model.weight.mul_(2)
        if inside:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    if not inside:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_training_on_after_the_exit_does_not_disturb_the_graph_made_inside():
    model = nn.Linear(3, 3)
    x = X.clone().requires_grad_()
    with hl.edit(model, "weight", hl.scale(2.0)):
        loss = model(x).sum()
    expected = 2 * model.weight.detach().sum(0)
    with torch.no_grad():
        model.weight.mul_(5)
    loss.backward()
    assert torch.allclose(x.grad, expected.expand(5, 3), atol=1e-6)


def test_double_backward_goes_through_an_edited_weight():
    model = mlp()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference[0].weight.mul_(2)

    def penalty(module, x):
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return grad.pow(2).sum()

    x = X.clone().requires_grad_()
    penalty(reference, x).backward()
    with hl.edit(model, "0.weight", hl.scale(2.0)):
        penalty(model, x).backward()
    first = [p.grad.clone() for p in (model[0].weight, model[2].weight)]
    model.zero_grad()
    with hl.edit(model, "0.weight", hl.scale(2.0)):
        loss = penalty(model, x)
    loss.backward()
    for p, q, f in zip(
        (model[0].weight, model[2].weight), (reference[0].weight, reference[2].weight), first,
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(p.grad, q.grad)
        assert torch.allclose(f, q.grad)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_graph_without_our_care_is_right_or_refused(steps, elsewhere):
    """Attached edits, and forwards in other threads, have nothing that watches their graphs."""
    model = nn.Conv2d(1, 1, 1, bias=False)
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    expected = 2 * model.weight.detach()
    if elsewhere:
        with hl.edit(model, "weight", hl.scale(2.0)), ThreadPoolExecutor(1) as pool:
            loss = pool.submit(lambda: model(x).sum()).result()
    else:
        handle = hl.edit(model, "weight", hl.scale(2.0)).attach()
        loss = model(x).sum()
        handle.remove()
    with torch.no_grad():
        for _ in range(steps):
            model.weight.mul_(1.5)
    with suppress(RuntimeError):  # torch's own check for in-place changes
        loss.backward()
    assert x.grad is None or torch.equal(x.grad, expected.expand_as(x))


def test_a_weight_edit_leaks_no_graph():
    model = mlp()
    gc.collect()
    gc.disable()
    try:
        for use in ("backward inside", "backward after", "none", "error"):
            watched, mark = [], Token()
            x = X.clone().requires_grad_()
            try:
                with hl.edit(model, "**.weight", hl.scale(2.0)):
                    hidden = model[0](x).exp()
                    hidden.grad_fn.metadata["mark"] = mark  # nodes take no weak references
                    watched += [weakref.ref(hidden), weakref.ref(mark)]
                    loss = model[2](hidden).sum()
                    if use == "backward inside":
                        loss.backward()
                    if use == "error":
                        raise ValueError
            except ValueError as error:
                error.__traceback__ = None
            if use == "backward after":
                loss.backward()
            del hidden, loss, mark
            assert [ref() for ref in watched] == [None, None], use
    finally:
        gc.enable()


def test_the_new_data_is_freed_at_exit():
    model = mlp()
    with hl.edit(model, "0.weight", hl.scale(2.0)):
        storage = weakref.ref(model[0].weight.untyped_storage())
        model(X)
    gc.collect()
    assert storage() is None


# -- several edits at once ------------------------------------------------------------------------


def test_nested_edits_of_one_weight_stack_and_unwind():
    model = mlp()
    before = state_bits(model)
    weight = model[0].weight.detach().clone()
    with hl.edit(model, "0.weight", hl.scale(2.0)):
        with hl.edit(model, "0.weight", hl.add(1.0)):
            assert torch.equal(model[0].weight, weight * 2 + 1)
        assert torch.equal(model[0].weight, weight * 2)
    assert_same_state(model, before)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_edits_may_be_removed_in_any_order(order):
    model = mlp()
    before, pointer = state_bits(model), model[0].weight.data_ptr()
    handles = [hl.edit(model, "0.weight", hl.scale(float(n))).attach() for n in (2, 3, 5)]
    left = [0, 1, 2]
    for n in order:
        # The later ones were made of what this one had changed, and still hold that.
        told = pytest.warns(hl.HooklineWarning, match="Remove the later one first")
        with nullcontext() if n == left[-1] else told:
            handles[n].remove()
        left.remove(n)
    assert_same_state(model, before)
    assert model[0].weight.data_ptr() == pointer
    assert_clean(model)


def test_edits_of_the_same_weights_in_several_threads_leave_them_as_they_were():
    model = mlp()
    before, old = state_bits(model), model[1]

    def work(n):
        for _ in range(300):
            with hl.edit(model, "0.weight", hl.scale(float(n))):
                with hl.replace_module(model, "1", nn.ReLU()):
                    pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(2, 6)))
    finally:
        sys.setswitchinterval(interval)
    assert_same_state(model, before)
    assert model[1] is old
    assert_clean(model)


@pytest.mark.parametrize("ended", [False, True])
def test_a_graph_of_the_outer_edit_survives_an_inner_one(ended):
    model = nn.Linear(3, 3, bias=False)
    x = X.clone().requires_grad_()
    rows = model.weight.detach().sum(0)
    with ExitStack() as stack:
        stack.enter_context(hl.edit(model, "weight", hl.scale(2.0)))
        outer = model(x)
        with hl.edit(model, "weight", hl.scale(3.0)):
            inner = model(x)
        if ended:
            stack.close()
        (outer - inner).sum().backward()
    assert torch.allclose(x.grad, (-4 * rows).expand(5, 3), atol=1e-6)


def test_nested_edits_of_different_weights_give_the_right_gradient_after_both():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    x = X.clone().requires_grad_()
    with hl.edit(model, "0.weight", hl.scale(2.0)), hl.edit(model, "1.weight", hl.scale(3.0)):
        loss = model(x).sum()
    loss.backward()
    expected = 6 * model[1].weight.sum(0) @ model[0].weight
    assert torch.allclose(x.grad, expected.expand(5, 3), atol=1e-5)


def test_weight_and_activation_edits_and_captures_work_together():
    model = mlp()
    before = state_bits(model)
    with hl.edit(model, "0.weight", hl.zero()), hl.edit(model, "0", hl.add(1.0)):
        with hl.capture(model, "0", "0.weight", "0.weight:grad") as record:
            model(X).sum().backward()
    assert torch.equal(record["0"], (model[0].bias + 1).expand(5, 4))
    assert record["0.weight:grad"].shape == (4, 3)
    assert_same_state(model, before)


def test_a_captured_weight_is_the_edited_one():
    model = mlp()
    with hl.edit(model, "0.weight", hl.zero()):
        with hl.capture(model, "0.weight", detach=True) as record:
            model(X)
    assert not record["0.weight"].any()


def test_an_attached_edit_is_listed_and_kept_alive_by_the_model():
    model = mlp()
    before = state_bits(model)
    hl.edit(model, "0.weight", hl.zero()).attach()
    gc.collect()
    assert not model[0].weight.any()
    assert len(hl.attached(model)) == 1
    hl.attached(model).remove()
    assert_same_state(model, before)
    assert_clean(model)


def test_a_copy_of_the_model_keeps_the_edited_weight_and_no_hook():
    model = mlp()
    with hl.edit(model, "0.weight", hl.zero()):
        duplicate = copy.deepcopy(model)
    assert not duplicate[0].weight.any()
    duplicate(X)
    assert_clean(duplicate)
    assert model[0].weight.any()


def test_an_uninitialised_parameter_is_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises((hl.HooklineError, ValueError), match=r"0\.weight"):
        with hl.edit(model, "0.weight", hl.zero()):
            pass


# -- parameters that cannot be edited -------------------------------------------------------------


def test_a_parameter_without_data_is_not_edited():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(hl.NotHookable, match=r"meta device, without data.*Load it all before"):
        hl.edit(model, "weight", hl.zero()).attach()
    assert_clean(model)


def test_an_offloaded_parameter_is_not_edited_in_vain():
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    plain = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(hl.NotHookable, match="offloaded meanwhile"):
        with hl.edit(model, "0.weight", hl.zero()):
            model(x)
    assert torch.equal(model(x), plain)
    with hl.edit(model, "0", hl.zero()):
        assert not model(x).any()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make", "closest"),
    [
        (nn.utils.weight_norm, "weight_g"),
        (nn.utils.spectral_norm, "weight_orig"),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
)
def test_a_weight_that_is_computed_at_each_call_is_told_with_what_it_is_made_of(make, closest):
    model = nn.Sequential(make(nn.Linear(3, 3)))
    told = f"'weight' is there as a plain tensor.*computed at each call.*'0.{closest}'"
    with pytest.raises(hl.PlaceNotFound, match=told):
        hl.edit(model, "0.weight", hl.zero()).attach()


def test_an_edit_that_its_own_function_removes_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4))
    before = model[0].weight.detach().clone()

    def change(value):
        handle.remove()
        return value * 2

    handle = hl.edit(model, "0.weight", change)
    handle.attach()
    assert hl.attached(model) == []
    assert torch.equal(model[0].weight, before)
    assert_clean(model)
