"""The ready changes, each against plain torch."""

import copy
import dataclasses
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import mlp
from oracles import assert_clean
from torch import nn

import hookline as hl

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EVERY = [
    hl.replace(1.5),
    hl.add(1.5),
    hl.scale(2.0),
    hl.noise(0.1, seed=1),
    hl.zero(),
    hl.clamp(-0.5, 0.5),
    hl.dropout(0.5, seed=1),
    hl.blend(2.0, 0.25),
    hl.remove_direction(torch.tensor([1.0, 2.0, 2.0])),
]
ids = [type(change).__name__ for change in EVERY]


def changed(change, value, module=None, **options):
    """What a change makes of a value."""
    module = nn.Identity() if module is None else module
    with hl.edit(module, "", change, **options):
        result = module(value)
    assert_clean(module)
    return result


def random_values(*shape, dtype=torch.float32):
    torch.manual_seed(3)
    return torch.randn(shape).to(dtype)


# -- what each one does -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_change_is_plain_torch_in_every_floating_dtype(dtype):
    x = random_values(4, 3, dtype=dtype)
    v = torch.tensor([1.0, -2.0, 0.5])
    w = v.to(dtype)
    expected = {
        hl.replace(v): w.expand(4, 3),
        hl.replace(1.5): torch.full_like(x, 1.5),
        hl.add(v): x + w,
        hl.add(1.5): x + 1.5,
        hl.scale(v): x * w,
        hl.scale(2): x * 2,
        hl.zero(): torch.zeros_like(x),
        hl.clamp(min=-0.5): x.clamp(min=-0.5),
        hl.clamp(max=0.5): x.clamp(max=0.5),
        hl.clamp(-0.5, 0.5): x.clamp(-0.5, 0.5),
        hl.clamp(torch.full((3,), -0.5), 0.5): x.clamp(-0.5, 0.5),
        hl.clamp(-0.5, torch.full((4, 3), 0.5)): x.clamp(-0.5, 0.5),
        hl.blend(v, 0.25): x * 0.75 + w * 0.25,
        hl.blend(2.0): torch.full_like(x, 2.0),
    }
    for change, wanted in expected.items():
        result = changed(change, x)
        assert result.dtype == dtype
        assert result.shape == x.shape
        assert torch.equal(result, wanted), change


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
@pytest.mark.parametrize("change", EVERY, ids=ids)
def test_shape_dtype_and_the_original_are_kept(change, dtype):
    if dtype.is_complex and isinstance(change, hl.clamp):
        return
    x = random_values(4, 3, dtype=dtype)
    before = x.clone()
    result = changed(change, x)
    assert result.dtype == dtype
    assert result.shape == x.shape
    assert torch.equal(x, before)
    assert not torch.equal(result, x)


def test_bounds_have_no_meaning_for_complex_values():
    with pytest.raises(hl.ChangeError, match="complex64"):
        changed(hl.clamp(max=1.0), torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 4, 3), (2, 4, 5, 3), (2, 4, 5, 6, 3)])
def test_numbers_work_from_0_to_5_dimensions(shape):
    x = random_values(*shape)
    assert torch.equal(changed(hl.add(1.5), x), x + 1.5)
    assert torch.equal(changed(hl.replace(torch.tensor(4.0)), x), torch.full_like(x, 4.0))
    assert torch.equal(changed(hl.zero(), x), torch.zeros_like(x))
    assert torch.equal(changed(hl.clamp(0.0, 1.0), x), x.clamp(0, 1))
    assert torch.equal(changed(hl.blend(3.0, 0.5), x), x * 0.5 + 1.5)
    assert changed(hl.noise(1.0), x).shape == x.shape
    assert changed(hl.noise(1.0, seed=0), x).shape == x.shape
    assert changed(hl.dropout(0.5), x).shape == x.shape
    if shape:
        d = torch.tensor([2.0, 0.0, 0.0])
        expected = x.clone()
        expected[..., 0] = 0
        assert torch.allclose(changed(hl.remove_direction(d), x), expected)


# How a change makes use of a vector, and the same in plain torch of a tensor that broadcasts.
WITH_VECTORS = {
    "add": (hl.add, lambda x, v: x + v),
    "scale": (hl.scale, lambda x, v: x * v),
    "replace": (hl.replace, lambda x, v: v.expand(x.shape)),
    "clamp min": (lambda v, **d: hl.clamp(min=v, **d), lambda x, v: x.clamp(min=v)),
    "clamp max": (lambda v, **d: hl.clamp(-9.0, v, **d), lambda x, v: x.clamp(-9.0).clamp(max=v)),
    "blend": (lambda v, **d: hl.blend(v, 0.25, **d), lambda x, v: x * 0.75 + v * 0.25),
    "blend amount": (lambda v, **d: hl.blend(2.0, v, **d), lambda x, v: x * (1 - v) + 2.0 * v),
    "blend both": (lambda v, **d: hl.blend(v, v, **d), lambda x, v: x * (1 - v) + v * v),
}
each_with_vectors = pytest.mark.parametrize(
    ("make", "plain"), WITH_VECTORS.values(), ids=list(WITH_VECTORS)
)
V = torch.tensor([1.0, 2.0, 3.0])


@each_with_vectors
@pytest.mark.parametrize(
    "shape", [(3,), (1, 3), (3, 3), (5, 3), (2, 5, 3), (2, 3, 3), (2, 3, 5, 3), (3, 3, 3, 3),
              (1, 3, 1, 3), (2, 3, 4, 5, 3)],
)  # fmt: skip
def test_a_vector_lies_along_the_last_dimension_whatever_the_other_sizes_are(make, plain, shape):
    x = random_values(*shape)
    assert torch.equal(changed(make(V), x), plain(x, V))


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_a_vector_at_the_heads_means_the_same_for_every_length_of_the_prompt(length):
    class Attention(nn.Module):
        def forward(self, x):
            return x.view(*x.shape[:2], 4, 64)

    model, x, v = Attention(), random_values(1, length, 256), random_values(64)
    with hl.edit(model, "/view#0", hl.add(v)):
        assert torch.equal(model(x), x.view(1, length, 4, 64) + v)
    with hl.edit(model, "/view#0", hl.add(torch.arange(4.0), dim=2)):
        assert torch.equal(model(x), x.view(1, length, 4, 64) + torch.arange(4.0)[:, None])


@each_with_vectors
@pytest.mark.parametrize(
    ("shape", "dim"), [((3,), 0), ((3, 5), 0), ((2, 3), -1), ((2, 3, 7), 1), ((2, 3, 3), 1),
                       ((1, 3, 5, 5), 1), ((2, 3, 5, 5), -3), ((3, 3, 3, 3), 1),
                       ((3, 3, 3, 3), 2), ((2, 5, 3, 4, 3), 2), ((2, 3, 0, 5), 1)],
)  # fmt: skip
def test_dim_says_along_which_dimension_a_vector_lies(make, plain, shape, dim):
    x = random_values(*shape)
    along = V.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
    assert torch.equal(changed(make(V, dim=dim), x), plain(x, along))


@each_with_vectors
@pytest.mark.parametrize(
    ("shape", "fits"), [((2, 3, 5, 5), "dim=1,"), ((2, 3, 7), "dim=1,"), ((3, 5), "dim=0,"),
                        ((2, 3, 3, 5), "dim=1 or dim=2,")],
)  # fmt: skip
def test_a_vector_that_fits_another_dimension_only_is_refused_with_both_shapes_and_dim(
    make, plain, shape, fits
):
    with pytest.raises(hl.ChangeError) as caught:
        changed(make(V), random_values(*shape))
    assert "(3,)" in caught.value.found
    assert str(shape) in caught.value.found
    assert fits in caught.value.remedy
    with pytest.raises(hl.ChangeError, match=fits):
        changed(hl.scale(1.0) | make(V), random_values(*shape))


def test_a_tensor_given_as_the_change_is_refused_as_replace_is():
    with pytest.raises(hl.ChangeError, match=r"\(3,\).*\(2, 3, 5, 5\).*replace\(\.\.\., dim=1\)"):
        changed(V, random_values(2, 3, 5, 5))
    with pytest.raises(hl.ChangeError, match=r"\(4, 3\).*\(3, 4\)\. Keep the value's"):
        changed(torch.ones(4, 3), random_values(3, 4))


@each_with_vectors
def test_a_dim_that_makes_no_sense_is_refused(make, plain):
    for dim in (4, -5):
        with pytest.raises(hl.ChangeError, match=rf"dim={dim} .*\(2, 3, 5, 5\)"):
            changed(make(V, dim=dim), random_values(2, 3, 5, 5))
    with pytest.raises(hl.ChangeError, match="dim=0 is out of range"):
        changed(make(V, dim=0), torch.tensor(1.0))
    with pytest.raises(hl.ChangeError, match=r"\(3,\) .*\(2, 3, 5, 5\), along dim=2.*dim=1,"):
        changed(make(V, dim=2), random_values(2, 3, 5, 5))
    for wrong in (torch.ones(3, 1), torch.ones(2, 3).tolist(), 1.0, torch.tensor(1.0)):
        with pytest.raises(hl.ChangeError, match=r"dim=1\..*aligns 1-D tensors.*Leave out dim="):
            make(wrong, dim=1)
    for dim in ("1", 1.0, True, (1,)):
        with pytest.raises(hl.ChangeError, match=r"dim=.*number of a dimension.*Give an int"):
            make(V, dim=dim)


def test_with_dim_numbers_and_tensors_without_dimensions_stay_numbers():
    x = random_values(2, 3, 5, 5)
    per = V.view(1, 3, 1, 1)
    blended = hl.blend(torch.tensor(2.0), V, dim=1)
    assert torch.equal(changed(blended, x), x * (1 - per) + 2.0 * per)
    assert torch.equal(changed(hl.clamp(-9, V, dim=1), x), x.clamp(min=-9.0).clamp(max=per))
    assert torch.equal(changed(hl.add([1.0, 2.0, 3.0], dim=1), x), x + per)
    assert torch.equal(changed(hl.add(np.array([1, 2, 3]), dim=1), x), x + per)
    assert torch.equal(changed(hl.add(torch.ones(1), dim=1), x), x + 1)
    with pytest.raises(hl.ChangeError, match=r"\(3,\).*\(2, 1, 5, 5\)"):
        changed(hl.add(V, dim=1), random_values(2, 1, 5, 5))


def test_dim_counts_the_dimensions_of_the_slice_that_is_changed():
    x = random_values(2, 5, 3, 4)
    expected = x.clone()
    expected[:, -1] += V[:, None]
    assert torch.equal(changed(hl.add(V, dim=1), x, at=np.s_[:, -1]), expected)
    with pytest.raises(hl.ChangeError, match=r"dim=3 .*\(2, 3, 4\).*with at="):
        changed(hl.add(V, dim=3), x, at=np.s_[:, -1])


def test_dim_is_shown_and_passes_gradients():
    change = hl.add(V, dim=1) | hl.clamp(max=V, dim=-2)
    assert [part.dim for part in change.changes] == [1, -2]
    assert "dim=1" in repr(change)
    assert "dim=-2" in repr(change)
    v, x = V.clone().requires_grad_(), random_values(2, 3, 5)
    changed(hl.scale(v, dim=1), x).sum().backward()
    assert torch.allclose(v.grad, x.sum((0, 2)))
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    weight = model[0].weight.detach().clone()
    with hl.edit(model, "0.weight", hl.scale(V, dim=0)):
        assert torch.equal(model[0].weight, weight * V.view(3, 1, 1, 1))


def test_batch_of_values_broadcasts_as_torch_does():
    x = random_values(4, 5, 3)
    for shape in [(4, 1, 1), (1, 5, 1), (5, 3), (4, 5, 3), (1,)]:
        v = random_values(*shape) + 1
        assert torch.equal(changed(hl.add(v), x), x + v)
        assert torch.equal(changed(hl.blend(v, 0.5), x), x * 0.5 + v * 0.5)


@pytest.mark.parametrize(
    "make", [hl.replace, hl.add, hl.scale, lambda v: hl.clamp(min=v), lambda v: hl.blend(v, 0.5),
             lambda v: hl.blend(1.0, v)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 3), (1, 2, 3)])
def test_a_wrong_shape_is_an_error_that_shows_both_sides(make, shape):
    model = nn.Sequential(nn.Identity())
    with pytest.raises(hl.ChangeError) as caught:
        with hl.edit(model, "0", make(torch.ones(shape))):
            model(torch.ones(2, 3))
    assert str(shape) in str(caught.value)
    assert "(2, 3)" in str(caught.value)
    assert any("'0'" in note for note in caught.value.__notes__)
    assert_clean(model)


def test_a_change_never_enlarges_the_value():
    with pytest.raises(hl.ChangeError, match=r"\(4, 3\).*\(1, 3\)"):
        changed(hl.add(torch.ones(4, 3)), torch.ones(1, 3))
    with pytest.raises(hl.ChangeError, match=r"\(1,\).*\(\)"):
        changed(hl.replace(torch.ones(1)), torch.ones(()))


def test_remove_direction_leaves_nothing_along_it():
    x = random_values(2, 5, 3)
    d = torch.tensor([1.0, 2.0, 2.0])
    unit = d / 3
    result = changed(hl.remove_direction(d), x)
    assert torch.allclose(result, x - (x @ unit)[..., None] * unit, atol=1e-6)
    assert (result @ unit).abs().max() < 1e-6
    assert torch.allclose(changed(hl.remove_direction(-7 * d), x), result, atol=1e-6)
    images = random_values(2, 3, 4, 4)
    result = changed(hl.remove_direction(d, dim=1), images)
    assert torch.einsum("bchw,c->bhw", result, unit).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_remove_direction_is_as_exact_as_the_value(dtype):
    direction = torch.tensor([1, 1, 0], dtype=dtype)
    x = torch.randn(4, 3, dtype=torch.float64)
    along = changed(hl.remove_direction(direction), x) @ direction.double()
    assert along.abs().max() < 1e-14  # in float32 it would be 1e-8


def test_remove_direction_is_a_projection_for_complex_values():
    d = torch.tensor([1.0 + 0j, 1j, 2.0])
    x = random_values(4, 3, dtype=torch.complex64) * (1 + 2j)
    result = changed(hl.remove_direction(d), x)
    assert (result * d.conj()).sum(-1).abs().max() < 1e-5


def test_remove_direction_refuses_what_is_no_direction():
    for wrong in (torch.zeros(3), torch.ones(2, 2), torch.tensor([float("nan"), 1.0])):
        with pytest.raises(hl.ChangeError, match="direction"):
            hl.remove_direction(wrong)
    with pytest.raises(hl.ChangeError, match=r"\(4, 5\).*length 3"):
        changed(hl.remove_direction(torch.ones(3)), torch.ones(4, 5))
    with pytest.raises(hl.ChangeError, match="dim=2"):
        changed(hl.remove_direction(torch.ones(3), dim=2), torch.ones(4, 3))
    with pytest.raises(
        hl.ChangeError, match=r"give dim=1, as in remove_direction\(\.\.\., dim=1\)"
    ):
        changed(hl.remove_direction(torch.ones(3)), torch.ones(2, 3, 5, 5))


def test_a_direction_of_another_precision_is_brought_to_the_values():
    d = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    for dtype in FLOATS:
        x = random_values(50, 3, dtype=dtype)
        result = changed(hl.remove_direction(d), x)
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 0.05)
        assert (result.double() @ (d / 3)).abs().max() < tolerance


def test_clamp_needs_a_bound_and_dropout_a_probability():
    with pytest.raises(hl.ChangeError, match="no bound"):
        hl.clamp()
    for p in (-0.1, 1.1):
        with pytest.raises(hl.ChangeError, match="probability"):
            hl.dropout(p)


def test_clamp_keeps_nan_and_passes_gradients_as_torch_does():
    x = torch.tensor([-2.0, 0.5, 0.25, float("nan")])
    assert torch.equal(changed(hl.clamp(0.0, 0.5), x)[:3], torch.tensor([0.0, 0.5, 0.25]))
    assert changed(hl.clamp(0.0, 0.5), x)[3].isnan()
    for bound in (0.5, torch.tensor([0.5, 0.5, 0.5])):
        one = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
        two = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
        changed(hl.clamp(max=bound), one).sum().backward()
        two.clamp(max=bound).sum().backward()
        assert torch.equal(one.grad, two.grad)


# -- whole numbers ------------------------------------------------------------------------------


def test_whole_numbers_stay_whole():
    x = torch.tensor([1, 2, 3])
    assert torch.equal(changed(hl.add(2), x), torch.tensor([3, 4, 5]))
    assert torch.equal(changed(hl.scale(torch.tensor([1, 0, 2])), x), torch.tensor([1, 0, 6]))
    assert torch.equal(changed(hl.clamp(max=2), x), torch.tensor([1, 2, 2]))
    assert torch.equal(changed(hl.zero(), x), torch.tensor([0, 0, 0]))
    assert torch.equal(changed(hl.replace(7), x), torch.tensor([7, 7, 7]))
    assert torch.equal(changed(hl.replace(torch.tensor([4, 5, 6])), x), torch.tensor([4, 5, 6]))
    mask = torch.tensor([True, False])
    assert torch.equal(changed(hl.replace(torch.tensor([False, True])), mask), ~mask)
    assert torch.equal(changed(hl.zero(), mask), torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    "change",
    [hl.add(0.5), hl.scale(0.5), hl.noise(1.0), hl.dropout(0.5), hl.blend(1.0, 0.5),
     hl.remove_direction(torch.ones(3)), hl.replace(1.7), hl.replace(torch.tensor([1.7, 0.2, 0.0])),
     hl.add(torch.tensor([0.5, 0.5, 0.5])), hl.clamp(max=0.5)],
    ids=lambda change: type(change).__name__,
)  # fmt: skip
def test_what_would_cut_off_fractions_is_refused(change, dtype):
    with pytest.raises(hl.ChangeError, match=f"{dtype}".removeprefix("torch.")):
        changed(change, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    "change",
    [hl.scale(1j), hl.add(torch.tensor([1j, 1j])), hl.replace(1j),
     hl.replace(torch.tensor([1j, 1j])), hl.blend(torch.tensor([1j, 1j]), 0.5),
     hl.remove_direction(torch.tensor([1j, 1.0]))],
    ids=lambda change: type(change).__name__,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_imaginary_parts_are_never_dropped(change):
    with pytest.raises(hl.ChangeError, match="complex"):
        changed(change, torch.ones(2))


def test_whole_numbers_that_do_not_fit_are_refused():
    for change in (hl.replace(torch.tensor([300])), hl.replace(300), hl.add(torch.tensor([300]))):
        with pytest.raises(hl.ChangeError, match="uint8"):
            changed(change, torch.ones(1, dtype=torch.uint8))
    assert changed(hl.add(torch.tensor([200])), torch.ones(1, dtype=torch.uint8)) == 201


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_whole_numbers_never_wrap_around(dtype):
    most = torch.iinfo(dtype).max
    value = torch.tensor([0, 1, most], dtype=dtype)
    assert changed(hl.clamp(-1, most // 2), value).tolist() == [0, 1, most // 2]
    assert changed(hl.clamp(max=2 * most), value).tolist() == value.tolist()
    one = torch.ones(3, dtype=dtype)
    for change in (hl.add(1), hl.scale(2), hl.add(one), hl.scale(2 * one), hl.add(-most - 10)):
        with pytest.raises(hl.ChangeError, match="int64"):
            changed(change, value)


def test_a_number_is_put_in_with_all_its_digits():
    for dtype, number in [
        (torch.float64, 0.1),
        (torch.complex128, 0.1 + 0.2j),
        (torch.float16, 0.1),
    ]:
        result = changed(hl.replace(number), torch.zeros(2, dtype=dtype))
        assert torch.equal(result, torch.full((2,), number, dtype=dtype))


# -- chains and objects -------------------------------------------------------------------------


def test_changes_compose_from_left_to_right():
    x = random_values(4, 3)
    chain = hl.add(1.0) | hl.scale(3.0) | hl.clamp(max=2.0)
    assert torch.equal(changed(chain, x), ((x + 1) * 3).clamp(max=2))
    assert torch.equal(changed(hl.scale(3.0) | (hl.add(1.0) | hl.zero()), x), torch.zeros(4, 3))
    assert isinstance(chain, hl.Chain)
    assert len((chain | hl.zero()).changes) == 4


def test_an_error_in_a_chain_names_the_step():
    with pytest.raises(hl.ChangeError, match=r"add.*\(5,\).*\(2, 3\)"):
        changed(hl.scale(2.0) | hl.add(torch.ones(5)), torch.ones(2, 3))


def test_a_chain_is_made_of_changes_only():
    for other in (torch.relu, 3, None):
        with pytest.raises(TypeError):
            hl.scale(2.0) | other


@pytest.mark.parametrize("change", [*EVERY, hl.add(1.0) | hl.zero()], ids=[*ids, "chain"])
def test_changes_are_frozen_dataclasses_without_equality(change):
    assert dataclasses.is_dataclass(change)
    assert change == change
    assert {change: 1}[change] == 1
    assert change != copy.copy(change)
    assert repr(change).startswith(type(change).__name__ + "(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        change.anything = 1


def test_tensors_in_changes_do_not_break_comparison():
    one, two = hl.replace(torch.ones(3)), hl.replace(torch.ones(3))
    assert one != two
    assert one in [two, one]
    assert len({one, two}) == 2


def test_reprs_show_the_arguments():
    assert repr(hl.noise(0.5, seed=3)) == "noise(std=0.5, relative=False, seed=3)"
    shown = "Chain(changes=(scale(factor=2.0, dim=None), zero()))"
    assert repr(hl.scale(2.0) | hl.zero()) == shown


def test_a_change_of_ones_own_is_a_subclass():
    class square(hl.Change):
        def apply(self, value, call):
            return value**2 + call.index

    model = nn.Identity()
    with hl.edit(model, "", square() | hl.scale(10.0)):
        assert model(torch.tensor([3.0])) == 90
        assert model(torch.tensor([3.0])) == 100


def test_a_change_of_ones_own_is_held_to_the_same_rules():
    class wrong(hl.Change):
        def __init__(self, function):
            self.function = function

        def apply(self, value, call):
            return self.function(value)

    for function, told in [
        (lambda v: None, "wrong was applied at ''. .*returned None"),
        (lambda v: v[:1], r"\(3,\).*\(1,\)"),
        (lambda v: v.to("meta"), "on cpu.*on meta"),
        (lambda v: v.to(torch.complex64), "float32.*complex64"),
    ]:
        with pytest.raises(hl.ChangeError, match=told):
            changed(wrong(function), torch.ones(3))
    assert changed(wrong(lambda v: v.double() * 2), torch.ones(3)).dtype == torch.float32


# -- noise --------------------------------------------------------------------------------------


def test_noise_without_a_seed_uses_the_state_of_torch():
    x = random_values(4, 3)
    torch.manual_seed(0)
    result = changed(hl.noise(0.5), x)
    torch.manual_seed(0)
    assert torch.equal(result, x + torch.randn_like(x) * 0.5)
    torch.manual_seed(0)
    result = changed(hl.noise(0.5, relative=True), x)
    torch.manual_seed(0)
    assert torch.allclose(result, x * (1 + torch.randn_like(x) * 0.5))


def test_noise_has_the_standard_deviation_asked_for():
    for seed in (None, 5):
        torch.manual_seed(0)
        x = torch.full((100_000,), 4.0)
        added = changed(hl.noise(0.3, seed=seed), x) - 4
        assert abs(added.mean()) < 0.01
        assert abs(added.std() - 0.3) < 0.01
        factor = changed(hl.noise(0.3, relative=True, seed=seed), x) / 4
        assert abs(factor.mean() - 1) < 0.01
        assert abs(factor.std() - 0.3) < 0.01
        assert torch.equal(changed(hl.noise(1.0, relative=True, seed=seed), x * 0), x * 0)


@pytest.mark.parametrize(
    "make", [lambda s: hl.noise(1.0, seed=s), lambda s: hl.dropout(0.5, seed=s)]
)
def test_a_seed_repeats_on_a_rerun_and_differs_by_place_call_and_seed(make):
    model = nn.ModuleList([nn.Identity(), nn.Identity()])
    x = torch.ones(100)

    def run(seed):
        with hl.edit(model, "*", make(seed)):
            return [model[0](x), model[1](x), model[0](x)]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first[0], other[0])


def test_a_seed_leaves_the_state_of_torch_alone():
    for change in (hl.noise(1.0, seed=1), hl.dropout(0.5, seed=1)):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        changed(change, random_values(3).detach())
        torch.manual_seed(0)
        changed(change, torch.ones(3))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [hl.noise(1.0, seed=1), hl.dropout(0.5, seed=1)])
def test_a_seed_does_not_depend_on_the_default_device_or_dtype(change):
    x = torch.ones(100)
    expected = changed(change, x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(changed(change, x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: hl.replace(2.0), lambda x: x * 0 + 2),
        (lambda: hl.replace([1.0, 2.0]), lambda x: x * 0 + torch.tensor([1.0, 2.0])),
        (lambda: hl.add([1, 2]), lambda x: x + torch.tensor([1, 2])),
        (lambda: hl.blend([1.0, 3.0], 0.5), lambda x: x / 2 + torch.tensor([0.5, 1.5])),
        (lambda: hl.remove_direction([0.0, 1.0]), lambda x: x * torch.tensor([1.0, 0.0])),
    ],
)
def test_numbers_and_lists_in_changes_do_not_depend_on_the_default_device(make, plain):
    x = torch.ones(3, 2)
    expected = plain(x)
    with torch.device("meta"):
        assert torch.equal(changed(make(), x), expected)


def test_a_seed_gives_the_same_noise_under_every_name_and_for_every_precision():
    model = nn.Sequential(nn.Identity())
    model.add_module("alias", model[0])
    x = torch.zeros(10)
    results = []
    for where in ("0", "alias", model[0], nn.Identity):
        with hl.edit(model, where, hl.noise(1.0, seed=4)):
            results.append(model[0](x))
    assert all(torch.equal(result, results[0]) for result in results)
    with hl.edit(model, "0", hl.noise(1.0, seed=4)):
        assert torch.equal(model[0](x.to(torch.bfloat16)), results[0].to(torch.bfloat16))


def test_noise_on_complex_values_is_complex_with_and_without_a_seed():
    x = torch.zeros(1000, dtype=torch.complex64)
    for seed in (None, 3):
        result = changed(hl.noise(1.0, seed=seed), x)
        assert result.imag.std() > 0.5
        assert result.real.std() > 0.5


# -- dropout ------------------------------------------------------------------------------------


def test_dropout_follows_the_modules_own_mode():
    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(1000)
    model[1].eval()
    with hl.edit(model, "0", hl.dropout(0.5)):
        assert (model(x) == 0).any()
    with hl.edit(model, "1", hl.dropout(0.5)):
        assert torch.equal(model(x), x)
    with hl.edit(model, "1", hl.dropout(0.5, training=True)):
        assert (model(x) == 0).any()
    with hl.edit(model, "0", hl.dropout(0.5, training=False)):
        assert torch.equal(model(x), x)


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_keeps_the_mean_and_zeros_the_share_asked_for(seed):
    torch.manual_seed(0)
    result = changed(hl.dropout(0.25, seed=seed), torch.ones(100_000))
    assert set(result.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((result == 0).float().mean() - 0.25) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_is_unbiased_in_low_precision(dtype, seed):
    torch.manual_seed(0)
    result = changed(hl.dropout(0.001, seed=seed), torch.ones(1_000_000, dtype=dtype))
    assert 800 < int((result == 0).sum()) < 1200


def test_dropout_of_channels_drops_whole_ones_as_dropout2d_does():
    x = torch.ones(64, 32, 4, 5)
    torch.manual_seed(0)
    for seed in (None, 3):
        result = changed(hl.dropout(0.5, channels=True, seed=seed), x)
        flat = result.flatten(2)
        assert torch.equal(flat.amin(2), flat.amax(2))
        dropped = (flat[:, :, 0] == 0).float()
        assert abs(dropped.mean() - 0.5) < 0.05
        assert 0 < dropped[0].mean() < 1
        assert 0 < dropped[:, 0].mean() < 1
    reference = F.dropout2d(x, 0.5).flatten(2)
    assert set(reference.unique().tolist()) == set(result.unique().tolist())
    with pytest.raises(hl.ChangeError, match=r"\(3,\).*channel"):
        changed(hl.dropout(0.5, channels=True), torch.ones(3))


def test_dropout_of_nothing_and_of_everything():
    x = random_values(4, 3)
    assert torch.equal(changed(hl.dropout(0.0), x), x)
    assert torch.equal(changed(hl.dropout(1.0), x), torch.zeros_like(x))


def test_dropout_passes_gradients_through_what_it_keeps():
    x = torch.ones(1000, requires_grad=True)
    result = changed(hl.dropout(0.5, seed=1), x)
    result.sum().backward()
    assert torch.equal(x.grad, result.detach())


# -- patch --------------------------------------------------------------------------------------


def test_patch_puts_in_what_another_run_had():
    model, clean, corrupt = mlp(), torch.randn(5, 3), torch.randn(5, 3)
    with hl.capture(model, "0") as record:
        expected = model(clean)
    with hl.edit(model, "0", hl.patch(record)):
        result = model(corrupt)
    assert torch.equal(result, expected)
    assert_clean(model)


def test_patch_is_detached_from_the_other_run():
    model, x = mlp(), torch.randn(5, 3)
    with hl.capture(model, "0") as record:
        model(x)
    with hl.edit(model, "0", hl.patch(record)):
        model(x).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_patch_goes_by_call():
    model = mlp()
    inputs = torch.randn(3, 5, 3)
    with hl.capture(model, "1") as record:
        expected = [model(x) for x in inputs]
    with hl.edit(model, "1", hl.patch(record)):
        for wanted in expected:
            assert torch.equal(model(torch.zeros(5, 3)), wanted)
        with pytest.raises(hl.NotCaptured, match="Call 3 at '1'") as caught:
            model(torch.zeros(5, 3))
    assert any("'1'" in note for note in caught.value.__notes__)


def test_patch_checks_at_entry_that_the_record_holds_the_places():
    model = mlp()
    with hl.capture(model, "0") as record:
        model(torch.zeros(1, 3))
    ran = []
    for where in ("1", "*", "0:input", "2.weight"):
        with pytest.raises(hl.NotCaptured, match=r"The record holds '0'.*Capture that place"):
            with hl.edit(model, where, hl.patch(record)):
                ran.append(where)
    with pytest.raises(hl.NotCaptured):
        with hl.edit(model, "1", hl.scale(2.0) | hl.patch(record)):
            ran.append("chain")
    assert not ran
    assert_clean(model)


def test_patch_takes_the_value_of_another_place_or_part_or_at_a_slice():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.capture(model, "0") as record:
        model(torch.arange(4.0))
    with hl.edit(model, "1", hl.patch(record, "0")):
        assert torch.equal(model(torch.zeros(4)), torch.arange(4.0))
    lstm, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    with hl.capture(lstm, "") as record:
        out, (h, c) = lstm(x)
    with hl.edit(lstm, "[1][0]", hl.patch(record)):
        other, (patched, own) = lstm(x * 2)
    assert torch.equal(patched, h)
    assert not torch.equal(own, c)
    assert not torch.equal(other, out)


@pytest.mark.parametrize(
    "at", [(slice(None), 2), (slice(None), slice(1, 3)), 0, (..., 1), hl.heads(1, of=2),
           hl.last_token(torch.tensor([[1, 1, 0], [1, 1, 1]]))],
)  # fmt: skip
def test_patch_of_a_slice_takes_that_slice_of_a_record_of_the_whole_or_of_the_slice(at):
    model = nn.Sequential(nn.Identity())
    clean, corrupt = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    index = at.index(clean) if hasattr(at, "index") and not isinstance(at, tuple) else at
    expected = corrupt.clone()
    expected[index] = clean[index]
    for kept in (None, at):
        with hl.capture(model, "0", at=kept) as record:
            model(clean)
        with hl.edit(model, "0", hl.patch(record), at=at):
            assert torch.equal(model(corrupt), expected)


@pytest.mark.parametrize("at", [np.s_[:, -1], np.s_[0, 0], np.s_[:, -1:]])
def test_patch_of_a_whole_value_refuses_a_record_of_a_slice(at):
    model = nn.Identity()
    with hl.capture(model, "", at=at) as record:  # as many tokens as sequences: it broadcasts
        model(torch.randn(3, 3, 4))
    refused = pytest.raises(hl.ChangeError, match=r"holds a slice .* the same at=")
    with refused, hl.edit(model, "", hl.patch(record)):
        model(torch.randn(3, 3, 4))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_patch_never_goes_by_the_shape_of_what_a_record_holds(length, tmp_path):
    """Slices that are as large as others, or as the whole, for some lengths only."""
    model, x = nn.Sequential(nn.Identity()), torch.randn(2, length, 4)

    def record_of(**options):
        with hl.capture(model, "0", **options) as record:
            model(x)
        return record, hl.load_record(hl.save_record(record, tmp_path))

    for record in record_of(at=np.s_[:, :1]):
        for at in (None, np.s_[:, -1:], np.s_[:], 0):
            refused = pytest.raises(hl.ChangeError, match=r"at=\[:, :1\].*the same at=")
            with refused, hl.edit(model, "0", hl.patch(record), at=at):
                model(x * 2)
        with hl.edit(model, "0", hl.patch(record), at=np.s_[:, : np.int64(1)]):
            assert torch.equal(model(x * 2)[:, :1], x[:, :1])
    for record in record_of():
        with hl.edit(model, "0", hl.patch(record), at=np.s_[:, -1]):
            assert torch.equal(model(x * 2)[:, -1], x[:, -1])
    for record in record_of(transform=lambda value: value[:, -1:]):
        refused = pytest.raises(hl.ChangeError, match=r"what transform= made.*the same at=")
        with refused, hl.edit(model, "0", hl.patch(record), at=np.s_[:, -1:]):
            model(x * 2)
    for record in record_of(at=lambda value: value[:, -1:]):
        with hl.edit(model, "0", hl.patch(record), at=np.s_[:, -1:]):
            assert torch.equal(model(x * 2)[:, -1:], x[:, -1:])
        refused = pytest.raises(hl.ChangeError, match="a slice of the value there")
        with refused, hl.edit(model, "0", hl.patch(record)):
            model(x * 2)


def test_patch_puts_the_last_token_of_one_run_in_the_place_of_that_of_another():
    model, clean, corrupt = nn.Identity(), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    with hl.capture(model, "", at=hl.last_token([[1, 0, 0], [1, 1, 1]])) as record:
        model(clean)
    last = hl.last_token([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    with hl.edit(model, "", hl.patch(record), at=last):
        result = model(corrupt)
    assert torch.equal(result[0, 3], clean[0, 0])
    assert torch.equal(result[1, 1], clean[1, 2])
    refused = pytest.raises(
        hl.ChangeError, match=r"what the record holds: at=\[:, 4\] does not fit"
    )
    with hl.capture(model, "") as record:
        model(clean)
    with refused, hl.edit(model, "", hl.patch(record), at=np.s_[:, 4]):
        model(corrupt)


def test_patch_of_a_vector_never_goes_along_another_dimension():
    model, x = nn.Identity(), torch.randn(2, 3, 5, 5)
    with hl.capture(model, "", transform=lambda value: value.mean((0, 2, 3))) as record:
        model(x)
    refused = pytest.raises(hl.ChangeError, match=r"\(3,\).*dim=1, as in replace\(")
    with refused, hl.edit(model, "", hl.patch(record)):
        model(x)
    with hl.edit(model, "", hl.replace(record[""], dim=1)):
        assert torch.equal(model(x), record[""].view(1, 3, 1, 1).expand(2, 3, 5, 5))


@pytest.mark.parametrize("at", [np.s_[:, 1:], np.s_[:], np.s_[0, 1:]])
@pytest.mark.parametrize("kept", [np.s_[:, -1], np.s_[0, 0], np.s_[:, -1:]])
def test_patch_of_a_slice_refuses_a_record_of_another_that_would_broadcast(at, kept):
    model = nn.Identity()
    with hl.capture(model, "", at=kept) as record:
        model(torch.randn(1, 3, 4))
    refused = pytest.raises(hl.ChangeError, match=r"holds a slice .* the same at=")
    with refused, hl.edit(model, "", hl.patch(record), at=at):
        model(torch.randn(1, 3, 4))
    with hl.edit(model, "", hl.patch(record), at=kept):  # one for all sequences
        assert torch.equal(*torch.broadcast_tensors(model(torch.randn(2, 3, 4))[kept], record[""]))


def test_patch_of_a_slice_takes_a_mean_that_broadcasts():
    model = nn.Identity()
    x = torch.randn(2, 3, 4)
    for mean in (lambda v: v.mean(0), lambda v: v.mean(0, keepdim=True)):
        with hl.capture(model, "", at=(slice(None), 1), transform=mean) as record:
            model(x)
        with hl.edit(model, "", hl.patch(record), at=(slice(None), 1)):
            assert torch.equal(model(x)[:, 1], x[:, 1].mean(0).expand(2, 4))


def test_patch_works_across_models_and_precisions():
    model, x = mlp(), torch.randn(5, 3)
    other = copy.deepcopy(model).double()
    with hl.capture(model, "0") as record:
        model(x)
    with hl.edit(other, "0", hl.patch(record)):
        result = other(x.double() * 0)
    assert torch.allclose(result, other[2](torch.tanh(record["0"].double())))
    del model
    with hl.edit(other, "0", hl.patch(record)):
        assert torch.equal(other(x.double()), result)


def test_patch_of_another_shape_shows_both_sides():
    model = mlp()
    with hl.capture(model, "0") as record:
        model(torch.zeros(5, 3))
    with pytest.raises(hl.ChangeError, match=r"\(5, 4\).*\(2, 4\)"):
        with hl.edit(model, "0", hl.patch(record)):
            model(torch.zeros(2, 3))


def test_patch_of_gradients_and_inputs():
    model, x = mlp(), torch.randn(5, 3)
    with hl.capture(model, "1:grad_output", "1:input") as record:
        model(x).pow(3).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    with hl.edit(model, "1:input", hl.patch(record)):
        assert torch.equal(model(x * 0), model[2](torch.tanh(record["1:input"])))
    with hl.edit(model, "1:grad_output", hl.patch(record)):
        (model(x) * 0).sum().backward()
    assert torch.allclose(model[0].weight.grad, expected)


def test_patch_of_gradients_never_takes_those_of_another_call_or_pass():
    model, x = mlp(), torch.randn(5, 3)

    def run():
        for factor in (1.0, 2.0):
            loss = model(x).sum() * factor
            loss.backward(retain_graph=True)
            (loss * 10).backward()

    with hl.capture(model, "0:grad_output") as record:
        run()
    with suppress(hl.HooklineError):  # a refusal is fine, a mixture is not
        with hl.edit(model, "0:grad_output", hl.patch(record)):
            with hl.capture(model, "0:grad_output") as again:
                run()
        for one, other in zip(
            record.calls("0:grad_output"), again.calls("0:grad_output"), strict=True
        ):
            assert torch.equal(one, other)


def test_patch_refuses_a_value_that_changed_since():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    with hl.capture(model, "0") as record:
        model(torch.randn(5, 3))
    with pytest.raises(hl.ValueChanged):
        with hl.edit(model, "0", hl.patch(record)):
            model(torch.randn(5, 3))
    assert_clean(model)


# -- gradients, modes ---------------------------------------------------------------------------


def test_changes_are_differentiable_like_plain_torch():
    x = random_values(4, 3).requires_grad_()
    v = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    for change, plain in [
        (hl.add(v), x + v),
        (hl.scale(v), x * v),
        (hl.replace(v), v.expand(4, 3)),
        (hl.blend(v, 0.25), x * 0.75 + v * 0.25),
        (hl.clamp(min=-0.5), x.clamp(min=-0.5)),
    ]:
        got = torch.autograd.grad(changed(change, x).pow(2).sum(), (x, v), allow_unused=True)
        wanted = torch.autograd.grad(plain.pow(2).sum(), (x, v), allow_unused=True)
        for a, b in zip(got, wanted, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b)


@pytest.mark.parametrize("change", EVERY, ids=ids)
def test_every_change_works_on_gradients(change):
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.randn(4, 2)
    seen = []

    def by_hand(grad):
        identity = nn.Identity()
        with hl.edit(identity, "", change):
            return identity(grad)

    model[0].register_forward_hook(
        lambda m, a, o: o.register_hook(lambda g: seen.append(g)) and None
    )
    model(x).sum().backward()
    plain = seen[-1].clone()
    model[0]._forward_hooks.clear()
    model.zero_grad()
    with hl.edit(model, "0:grad_output", change), hl.capture(model, "0:grad_output") as record:
        model(x).sum().backward()
    got = record["0:grad_output"]
    assert got.shape == plain.shape
    assert got.dtype == plain.dtype
    if getattr(change, "seed", None) is None:
        assert torch.allclose(got, by_hand(plain))
    else:
        assert not torch.equal(got, plain)
    assert torch.allclose(model[0].weight.grad, got.t() @ x, atol=1e-6)
    assert_clean(model)


@pytest.mark.parametrize("change", EVERY, ids=ids)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_change_works_without_gradients(change, mode):
    module = nn.Linear(2, 3)
    x = torch.randn(4, 2)
    with mode():
        result = changed(change, x, module)
        plain = changed(change, x, module)
    assert torch.equal(result, plain)
    assert not result.requires_grad
    assert result.shape == (4, 3)


@pytest.mark.parametrize("change", EVERY, ids=ids)
def test_every_change_works_under_autocast(change):
    module = nn.Linear(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        result = changed(change, torch.randn(4, 2), module)
        assert result.dtype == torch.bfloat16
        result.float().sum().backward() if result.requires_grad else None
    if isinstance(change, hl.scale):
        assert module.weight.grad.dtype == torch.float32


def test_tensors_made_in_inference_mode_serve_in_training():
    with torch.inference_mode():
        v = torch.tensor([1.0, -2.0, 0.5])
    for change in (
        hl.add(v), hl.scale(v), hl.replace(v), hl.blend(v, v), hl.clamp(max=v),
        hl.remove_direction(v),
    ):  # fmt: skip
        x, y = random_values(4, 3).requires_grad_(), random_values(4, 3).requires_grad_()
        (changed(change, x) * y).sum().backward()
        assert torch.equal(y.grad, changed(change, x.detach()))


def test_tensors_of_another_device_are_moved():
    x = torch.empty(4, 3, device="meta")
    for change in (hl.add(torch.ones(3)), hl.replace(torch.ones(3)), hl.blend(torch.ones(3), 0.5)):
        assert changed(change, x).is_meta
    assert changed(hl.noise(1.0, seed=1), x).is_meta
    assert changed(hl.dropout(0.5, seed=1), x).is_meta


def test_values_that_share_memory_with_themselves_can_be_changed_and_written_to():
    x = torch.ones(1).expand(4)
    for change in (hl.add(1.0), hl.zero(), hl.replace(3.0), hl.replace(torch.tensor(3.0))):
        changed(change, x).add_(1)
    assert torch.equal(x, torch.ones(4))


def test_what_replaced_a_value_is_not_the_users_tensor():
    own = torch.zeros(2, 3)
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with hl.edit(model, "0", own):
        result = model(torch.ones(2, 3))
    result.add_(5)
    assert torch.equal(own, torch.zeros(2, 3))


def test_channels_last_values_are_changed_rightly():
    x = random_values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    v = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(changed(hl.scale(v, dim=1), x), x * v.view(1, 3, 1, 1))
    assert torch.equal(changed(hl.zero(), x), torch.zeros(2, 3, 4, 5))


@pytest.mark.parametrize("length", [1e-38, 1e-25, 1.0, 1e25, 1e38])
def test_a_direction_is_removed_however_long_it_is(length):
    direction, x = torch.tensor([0.6, -0.8, 0.0]) * length, random_values(4, 3)
    along = (x @ torch.tensor([0.6, -0.8, 0.0])).unsqueeze(-1)
    expected = x - along * torch.tensor([0.6, -0.8, 0.0])
    torch.testing.assert_close(changed(hl.remove_direction(direction), x), expected)


@pytest.mark.parametrize("given", [np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]], ids=type)
@pytest.mark.parametrize(
    "make", [hl.add, hl.scale, hl.clamp, hl.blend, hl.replace, hl.remove_direction]
)
def test_arrays_and_lists_are_taken_for_tensors(make, given):
    x = random_values(4, 3).requires_grad_()
    expected = changed(make(torch.as_tensor(given)), x)
    assert torch.equal(changed(make(given), x), expected)
    with torch.no_grad():
        assert torch.equal(changed(make(given), x), expected)
