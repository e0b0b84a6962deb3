"""Moments: numpy in double precision is the oracle."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hookline.training import tensor_moments as moments_module
from hookline.training.run_files import STATISTICS
from hookline.training.tensor_moments import (
    Moments,
    binned,
    is_measurable,
    moments,
    sampled,
    settle,
)


def values_by_name(found: Moments) -> dict[str, float]:
    return dict(zip(STATISTICS, found.values(), strict=True))


def moments_by_numpy(x: torch.Tensor, unit: int = -1) -> dict[str, float]:
    """The statistics by numpy, of the finite values."""
    values = x.double().numpy()
    finite = np.isfinite(values)
    good = values[finite]
    found = {
        "mean": good.mean(), "std": good.std(), "absmax": np.abs(good).max(),
        "norm": np.sqrt((good**2).sum()), "zeros": (good == 0).mean(),
        "nonfinite": 1 - finite.mean(),
    }  # fmt: skip
    if x.ndim > 1 and finite.all():
        units = np.moveaxis(values, unit, 0).reshape(x.shape[unit], -1)
        found["dead"] = (units == 0).all(1).mean()
        found["spread"] = (units.max(1) - units.min(1)).max() / np.abs(units).max()
    return found


def assert_moments(found: Moments, x: torch.Tensor, unit: int = -1, rel: float = 1e-4) -> None:
    for name, value in moments_by_numpy(x, unit).items():
        assert values_by_name(found)[name] == pytest.approx(value, rel=rel, abs=1e-7), name


def zoo():
    torch.manual_seed(0)
    relu = torch.randn(7, 5, 9).relu()
    relu[..., 3] = 0
    return {
        "normal": torch.randn(6, 33),
        "relu": relu,
        "images": torch.randn(3, 4, 5, 6),
        "channels last": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        "transposed": torch.randn(9, 8).t(),
        "expanded": torch.randn(1, 6).expand(50, 6),
        "strided": torch.randn(40, 40)[::3, 1::2],
        "vector": torch.randn(17),
        "scalar": torch.tensor(3.5),
        "far from zero": 1e4 + torch.randn(50, 8),
        "constant": torch.full((20, 4), 0.1),
        "half": torch.randn(20, 30).half() * 100,
        "bfloat": torch.randn(20, 30).bfloat16(),
        "double": torch.randn(20, 30).double(),
        "huge": torch.randn(10, 10) * 1e30,
        "tiny": torch.randn(10, 10) * 1e-30,
        "zeros": torch.zeros(4, 4),
        "one element": torch.ones(1, 1),
    }


@pytest.mark.parametrize("name", zoo())
@pytest.mark.parametrize("careful", [False, True])
def test_the_statistics_are_those_of_numpy(name, careful, monkeypatch):
    x = zoo()[name]
    if careful:
        monkeypatch.setattr(moments_module, "_quick", lambda *args: None)
    found = moments(x)
    if name == "zeros":
        assert values_by_name(found)["spread"] == 0
        assert values_by_name(found)["dead"] == 1
        return
    expected = moments_by_numpy(x)
    got = values_by_name(found)
    for key in ("mean", "std", "absmax", "norm", "zeros", "nonfinite"):
        size = expected["absmax"]
        assert got[key] == pytest.approx(expected[key], rel=2e-4, abs=1e-6 * size), key
    if x.ndim > 1 and x.shape[0] > 1:
        assert got["dead"] == pytest.approx(expected["dead"])
        assert got["spread"] == pytest.approx(expected["spread"], rel=1e-4, abs=1e-6)
    assert found.shape == tuple(x.shape)


def test_both_ways_agree_on_units(monkeypatch):
    x = torch.randn(4, 6, 5, 5).relu()
    x[:, 2] = 0
    assert_moments(moments(x, unit=1), x, unit=1)
    monkeypatch.setattr(moments_module, "_quick", lambda *args: None)
    assert_moments(moments(x, unit=1), x, unit=1)
    assert values_by_name(moments(x, unit=1))["dead"] == pytest.approx(1 / 6)


def test_moments_are_of_the_finite_values():
    x = torch.randn(8, 50)
    x[0, 0], x[1, 1], x[2, 2], x[3, :] = math.nan, math.inf, -math.inf, -math.inf
    found = moments(x)
    assert_moments(found, x)
    assert found.nonfinite == 53
    assert found.bad == 2
    assert np.isnan(found.sample.numpy()).sum() == 53
    masked = torch.zeros(4, 4).masked_fill(torch.eye(4).bool(), -math.inf)
    assert moments(masked).bad == 0
    gone = moments(torch.full((3, 3), math.nan))
    values = values_by_name(gone)
    assert values.pop("nonfinite") == 1
    assert all(math.isnan(value) for value in values.values())


def test_a_unit_without_finite_values_is_not_dead():
    x = torch.ones(4, 3)
    x[:, 1] = math.nan
    x[:, 2] = 0
    assert values_by_name(moments(x))["dead"] == pytest.approx(1 / 3)


def test_saturated_values_are_counted():
    x = torch.tensor([-1.0, -0.98, 0.0, 0.5, 0.99, 1.0])
    assert values_by_name(moments(x, flat=(-0.97, 0.97)))["saturated"] == pytest.approx(4 / 6)
    assert math.isnan(values_by_name(moments(x))["saturated"])


def test_merging_is_measuring_both():
    torch.manual_seed(0)
    parts = [torch.randn(5, 4) + 3, torch.randn(9, 4).relu(), torch.randn(1, 4)]
    found = moments(parts[0], flat=(0, 1))
    for part in parts[1:]:
        found = found.merged(moments(part, flat=(0, 1)))
    whole = torch.cat(parts)
    assert_moments(found, whole)
    ends = ((whole <= 0) | (whole >= 1)).double().mean().item()
    assert values_by_name(found)["saturated"] == pytest.approx(ends)
    assert sorted(found.sample.tolist()) == sorted(whole.flatten().tolist())
    empty = moments(torch.full((2, 4), math.nan))
    assert values_by_name(empty.merged(found))["mean"] == pytest.approx(
        whole.mean().item(), rel=1e-5
    )


def test_merging_other_shapes_keeps_what_makes_sense():
    found = moments(torch.ones(2, 3)).merged(moments(torch.full((2, 5), -4.0)))
    values = values_by_name(found)
    assert values["absmax"] == 4
    assert math.isnan(values["dead"])
    assert values["mean"] == pytest.approx((6 - 40) / 16)


def test_a_merged_sample_does_not_grow_for_ever():
    found = moments(torch.randn(100, 100))
    for _ in range(50):
        found = found.merged(moments(torch.randn(100, 100)))
    assert len(found.sample) <= 8192


def test_a_merged_sample_has_its_share_of_every_part():
    sizes = [100, 100, 300, *[100] * 40]
    parts = [torch.full((size, 100), float(n)) for n, size in enumerate(sizes)]
    found = moments(parts[0])
    for part in parts[1:]:
        found = found.merged(moments(part))
    counts = torch.bincount(found.sample.long(), minlength=len(sizes))
    shares = counts / counts.sum() * sum(sizes)
    assert torch.allclose(shares, torch.tensor(sizes).float(), rtol=0.1)


def test_a_merged_sample_meets_every_column_alike():
    part = torch.arange(16.0).expand(64, 16).contiguous()
    found = moments(part)
    for _ in range(63):
        found = found.merged(moments(part))
    counts = torch.bincount(found.sample.long(), minlength=16)
    assert counts.max() < 1.3 * counts.min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dense", [True, False])
def test_large_tensors_are_measured_exactly(dtype, dense):
    torch.manual_seed(0)
    for mean, std in ((0, 0.02), (5, 1), (3, 0.1), (30, 1)):
        x = (torch.randn(1025, 2048) * std + mean).to(dtype)
        x = x if dense else x[:, :2000]
        values, expected = values_by_name(moments(x)), x.double()
        assert values["norm"] == pytest.approx(expected.norm().item(), rel=1e-6)
        assert values["std"] == pytest.approx(expected.std(correction=0).item(), rel=1e-3)


def test_scaling_and_growing():
    x = torch.randn(6, 7).relu()
    assert_moments(moments(x).scaled(0.125), x * 0.125)
    assert_moments(moments(x).grown(3), x.repeat(3, 1))


def test_what_waits_on_a_device_is_settled_in_one_go(monkeypatch):
    monkeypatch.setattr(moments_module, "_quick", lambda *args: None)
    monkeypatch.setattr(moments_module, "settle", lambda found: None)
    tensors = [torch.randn(4, 5), torch.randn(3, 2, 7).relu(), torch.randn(6)]
    found = [moments(x) for x in tensors]
    assert all(one.waiting is not None for one in found)
    settle(found)
    for one, x in zip(found, tensors, strict=True):
        assert one.waiting is None
        assert_moments(one, x)
        assert sorted(one.sample.tolist()) == sorted(x.flatten().tolist())


def test_zeros_are_counted_in_all_of_a_large_tensor():
    x = torch.randn(300, 300).relu()
    assert values_by_name(moments(x))["zeros"] == pytest.approx((x == 0).double().mean().item())
    x = torch.randn(300, 300).abs() + 1
    assert values_by_name(moments(x))["zeros"] == 0


def test_nothing_is_changed_and_no_random_number_drawn():
    x = torch.randn(300, 300, requires_grad=True)
    before, state, version = x.detach().clone(), torch.get_rng_state(), x._version
    moments(x * 1)
    assert torch.equal(x, before)
    assert x._version == version
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(64, 64), (1000, 128), (8, 3, 32, 32), (5,), (4096, 6)])
def test_a_sample_meets_every_column_alike(shape):
    x = torch.arange(shape[-1], dtype=torch.float32).expand(shape).contiguous()
    sample = sampled(x, 1024)
    assert len(sample) <= max(1024, x.numel() if x.numel() <= 1024 else 0)
    assert len(sample) >= min(x.numel(), 256)
    seen = np.bincount(sample.long().numpy(), minlength=shape[-1])
    assert seen.min() > 0
    assert seen.max() - seen.min() <= max(2, 0.2 * seen.mean() + 2)


def test_samples_are_copies_in_single_precision():
    x = torch.randn(10).double()
    sample = sampled(x, 100)
    x.zero_()
    assert sample.dtype == torch.float32
    assert sample.any()
    for y in (torch.randn(6, 4).t(), torch.randn(1, 1).expand(3000, 3000), torch.zeros(4)[::2]):
        assert 0 < len(sampled(y, 64)) <= 128


def test_histograms_are_those_of_numpy():
    torch.manual_seed(0)
    samples = [torch.randn(500), torch.rand(3), torch.randn(50) * 1e-20, torch.randn(9).relu()]
    for sample, bins in zip(samples, binned(samples, 16), strict=True):
        values = sample.double().numpy()
        assert bins.low <= values.min()
        assert bins.high >= values.max()
        counts, _ = np.histogram(values, 16, (bins.low, bins.high))
        assert bins.counts.tolist() == counts.tolist()
        assert bins.counts.sum() == len(values)


def test_histograms_of_odd_samples():
    constant, mixed, gone, empty = binned(
        [torch.ones(5), torch.tensor([math.nan, 1.0, math.inf]), torch.full((3,), math.nan),
         torch.zeros(0)], 8
    )  # fmt: skip
    assert constant.counts.sum() == 5
    assert constant.low < 1 < constant.high
    assert mixed.counts.sum() == 1
    assert gone is None
    assert empty is None
    assert binned([], 8) == []


def test_what_cannot_be_measured():
    assert is_measurable(torch.ones(2))
    for x in (
        torch.ones(2).long(), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"),
        torch.empty(0), torch.ones(2).bool(), torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ):  # fmt: skip
        assert not is_measurable(x)
    inside = []
    torch.vmap(lambda x: (inside.append(is_measurable(x)), x)[1])(torch.ones(2, 2))
    assert inside == [False]
    assert is_measurable(nn.Linear(2, 2).weight)


def test_values_whose_squares_no_number_can_hold_are_measured_as_infinite():
    one, other = (moments(size * torch.tensor([[1.0, 3.0]]).double()) for size in (1e200, -1e250))
    both = one.merged(other).scaled(1e10).grown(2.0)
    assert values_by_name(both)["norm"] == values_by_name(both)["std"] == math.inf
    assert values_by_name(both)["mean"] == pytest.approx((4e210 - 4e260) / 4)
    assert values_by_name(both)["nonfinite"] == 0
