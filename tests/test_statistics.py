"""Statistics: equal to numpy on the whole data, however the data is split."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    assert_near_numpy,
    parts_of,
)
from torch import nn

import hookline as hl
from hookline.statistics import all_statistics as statistics
from hookline.statistics import statistic as statistic_module

KINDS = {
    "mean": hl.Mean(),
    "variance": hl.Variance(),
    "population variance": hl.Variance(correction=0),
    "covariance": hl.Covariance(),
    "histogram": hl.Histogram(bins=7, range=(-1.0, 1.0)),
    "top": hl.TopK(k=3),
    "bottom": hl.TopK(k=3, largest=False),
    "norm": hl.Norm(),
    "sparsity": hl.Sparsity(threshold=0.25),
}

OVERALL = {
    "mean": hl.Mean(dim=None),
    "variance": hl.Variance(dim=None),
    "histogram": hl.Histogram(dim=None, bins=5, range=(-2.0, 0.5)),
    "top": hl.TopK(dim=None, k=4),
    "sparsity": hl.Sparsity(dim=None),
}


def top_of(values, ids, positions, k, largest):
    """The best of a list of (value, id, position) triples, by sorting them all."""
    rows = [
        (value if not largest else -value, i, tuple(p))
        for value, i, p in zip(values, ids, positions, strict=True)
        if not np.isnan(value)
    ]
    rows = sorted(rows)[:k]
    return (
        [r[0] if not largest else -r[0] for r in rows],
        [r[1] for r in rows],
        [r[2] for r in rows],
    )


def by_numpy(kind, x, kept):  # noqa: C901
    """The result by numpy: x is samples × positions × channels, kept is samples × positions."""
    # One case for each statistic.
    if kind.dim is None:
        where = np.argwhere(np.broadcast_to(kept[..., None], x.shape))
        columns = [(x[tuple(where.T)], where[:, 0], where[:, 1:])]
    else:
        where = np.argwhere(kept)
        columns = [(c, where[:, 0], where[:, 1:]) for c in x[kept].T]
    rows = np.stack([c[0] for c in columns], 1)

    def shaped(parts):
        return parts[0] if kind.dim is None else np.stack(parts, -1)

    match kind:
        case hl.Variance():
            return rows.var(0, ddof=kind.correction).reshape(() if kind.dim is None else -1)
        case hl.Mean():
            return rows.mean(0).reshape(() if kind.dim is None else -1)
        case hl.Covariance():
            return np.cov(rows.T, ddof=kind.correction)
        case hl.Sparsity():
            return (abs(rows) <= kind.threshold).mean(0).reshape(() if kind.dim is None else -1)
        case hl.Norm():
            n = np.linalg.norm(rows, axis=1)
            return n.mean(), n.std(ddof=1), n.min(), n.max()
        case hl.Histogram():
            edges = np.linspace(*kind.range, kind.bins + 1)
            counts = shaped([np.histogram(c[0], edges)[0] for c in columns]).T
            low, high = kind.range
            below = shaped([np.asarray((c[0] < low).sum()) for c in columns])
            return counts, edges, below, shaped([np.asarray((c[0] > high).sum()) for c in columns])
        case hl.TopK():
            tops = [top_of(*c, kind.k, kind.largest) for c in columns]
            values, ids, positions = ([np.asarray(t[n]) for t in tops] for n in range(3))
            if kind.dim is None:
                return values[0], ids[0], positions[0]
            return np.stack(values, 1), np.stack(ids, 1), np.stack(positions, 1)


@st.composite
def masked_batches(draw):
    """Samples × positions × channels with many equal values, a mask, and how it is split."""
    samples, positions = draw(st.integers(2, 9)), draw(st.integers(1, 5))
    channels = draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=(samples, positions, channels)) * draw(st.sampled_from([0.1, 1, 100]))
    if draw(st.booleans()):
        x = np.round(x)
    kept = rng.random((samples, positions)) < draw(st.sampled_from([0.7, 1.0]))
    kept.reshape(-1)[:] |= np.arange(samples * positions) < 2
    kept[:2, 0] = True  # enough for a variance
    kept = np.where(kept.sum() < 4, True, kept)
    cuts = draw(st.lists(st.integers(0, samples), max_size=4))
    return x, kept, [0, *sorted(cuts), samples]


@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("kind", [*KINDS.values(), *OVERALL.values()], ids=repr)
@settings(max_examples=12, deadline=None)
@given(masked_batches())
def test_batches_and_merges_give_what_numpy_gives_on_the_whole(kind, chunk, made):
    x, kept, cuts = made
    ids = np.arange(len(x))
    before, statistic_module._CHUNK = statistic_module._CHUNK, chunk
    try:
        parts = []
        one = kind.fresh()
        for start, stop in pairwise(cuts):
            batch = [torch.from_numpy(part[start:stop]) for part in (x, kept, ids)]
            one.update(*batch)
            parts.append(kind.fresh().update(*batch))
        merged = kind.fresh()
        for part in reversed(parts):
            merged.merge(part)
    finally:
        statistic_module._CHUNK = before
    expected = by_numpy(kind, x, kept)
    if isinstance(kind, hl.TopK) and len(expected[0]) == 0:
        return
    assert_near_numpy(one.result, expected, check_dtype=False)
    assert_near_numpy(merged.result, expected, check_dtype=False)
    numbers = kept.sum() * (x.shape[2] if kind.dim is None else 1)
    assert (one.count == numbers).all()
    assert (merged.count == numbers).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8, bool])
def test_other_dtypes_are_measured_in_float64(dtype):
    dtype = torch.bool if dtype is bool else dtype
    x = (torch.randn(6, 4, 3).abs() * 20).to(dtype)
    wide = x.to(torch.float64).numpy()
    kept = np.ones((6, 4), dtype=bool)
    for kind in KINDS.values():
        own = kind.fresh().update(x).result
        assert_near_numpy(own, by_numpy(kind, wide, kept), check_dtype=False)


def test_sums_stay_exact_far_from_zero_and_over_many_batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 2)) + 1e8
    variance, covariance = hl.Variance(), hl.Covariance()
    for part in torch.from_numpy(x).split(7):
        variance.update(part)
        covariance.update(part)
    assert np.allclose(variance.result, x.var(0, ddof=1), rtol=1e-9)
    assert np.allclose(covariance.result, np.cov(x.T), rtol=1e-7, atol=1e-9)
    assert np.allclose(variance.mean, x.mean(0), rtol=1e-13)
    counted = hl.Mean().update(torch.full((2**24 + 1, 1), 1.0))  # float32 ends at 2**24
    assert counted.count.item() == 2**24 + 1


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e8])
def test_merges_are_exact_up_to_the_magnitude_of_the_values(offset):
    x = np.random.default_rng(0).normal(size=(7_000, 2)) + offset
    variance = hl.Variance()
    for part in torch.from_numpy(x).split(7):
        variance.merge(hl.Variance().update(part))
    exact = x.astype(np.longdouble)
    for own, expected in ((variance.mean, exact.mean(0)), (variance.std, exact.std(0, ddof=1))):
        assert abs(own.numpy() - expected).max() < 1e-14 * abs(x).max()


def test_channels_may_lie_along_any_dimension():
    x = torch.randn(4, 3, 5, 6)
    images = x.movedim(1, -1).reshape(-1, 3).double().numpy()
    assert_near_numpy(hl.Mean(dim=1).update(x).result, images.mean(0))
    assert_near_numpy(hl.Covariance(dim=1).update(x).result, np.cov(images.T))
    values, ids, positions = hl.TopK(dim=1, k=2).update(x).result
    for (k, c), value in np.ndenumerate(values.numpy()):
        assert x[ids[k, c], c, positions[k, c, 0], positions[k, c, 1]] == value
    assert_near_numpy(hl.Mean(dim=0).update(x).result, x.double().mean((1, 2, 3)))
    tops = hl.TopK(dim=None, k=1).update(x).result
    assert x[(tops.ids[0], *tops.positions[0])] == x.max()


def test_a_mask_lies_over_the_first_dimensions_without_the_channels():
    x = torch.randn(2, 3, 4)
    kept = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
    expected = x.movedim(1, -1)[kept.bool()].double().mean(0)
    assert_near_numpy(hl.Mean(dim=1).update(x, kept).result, expected)
    assert_near_numpy(hl.Mean().update(x, torch.tensor([1, 0])).result, x[0].double().mean(0))
    assert_near_numpy(
        hl.Mean(dim=None).update(x, torch.tensor([[0], [1]])).result, x[1].double().mean()
    )
    with pytest.raises(hl.StatisticsError, match="is no tensor"):
        hl.Mean().update(x, [[1, 0], [1]])
    for wrong in (torch.ones(2, 2), torch.ones(2, 3, 4, 1), torch.ones(5)):
        with pytest.raises(hl.StatisticsError, match="mask has the shape"):
            hl.Mean().update(x, wrong)


def test_numbers_whose_sum_is_too_large_are_measured_like_others():
    huge = torch.tensor([[1.2e308, 1.2e308, 0.0]], dtype=torch.float64)
    for one in (hl.Mean(), hl.Variance()):
        one.update(huge)
        assert torch.equal(one.state["mean"], huge[0])
        assert one.count.tolist() == [1, 1, 1]
        assert one.skipped.tolist() == [0, 0, 0]


def test_nan_and_infinity_are_left_out_and_counted():
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.inf, 7.0]])
    for kind, expected in (
        (hl.Mean(), [2.0, 6.0]),
        (hl.Variance(), [2.0, 2.0]),
        (hl.Sparsity(threshold=1.0), [0.5, 0.0]),
    ):
        own = kind.update(x)
        assert own.result.tolist() == expected
        assert own.skipped.tolist() == [1, 1]
    for kind in (hl.Norm(), hl.Covariance()):
        own = kind.update(x)
        assert (own.count.item(), own.skipped.item()) == (1, 2)
    assert hl.Norm().update(x).result.mean.item() == pytest.approx(34**0.5)
    bins = hl.Histogram(bins=2, range=(0.0, 6.0)).update(x)
    assert bins.result.above.tolist() == [1, 1]
    assert bins.skipped.tolist() == [0, 1]
    tops = hl.TopK(k=5).update(x)
    assert tops.result.values[0].tolist() == [torch.inf, 7.0]
    assert tops.result.ids.tolist() == [[2, 2], [1, 1], [0, -1]]
    assert tops.result.values[2].isnan().tolist() == [False, True]


@pytest.mark.parametrize("kind", [*KINDS.values(), *OVERALL.values()], ids=repr)
def test_empty_and_all_masked_batches_change_nothing(kind):
    x = torch.randn(3, 4, 2)
    bare = kind.fresh().update(x, ids=[5, 6, 7])
    empty = kind.fresh()
    assert repr(empty.result)  # nothing was seen, and it can be read
    assert repr(empty.update(x[:0]).result)
    found = hl.Measurements()
    found.statistics["0"], found.calls["0"] = {"empty": empty}, 1
    assert "empty" in repr(found)
    empty.update(x[:, :0]).update(x, torch.zeros(3, 4), ids=[1, 2, 3])
    assert repr(empty.result)
    empty.update(x, ids=[5, 6, 7]).update(x[:0])
    assert_near_numpy(empty.result, bare.result)
    assert (empty.count == bare.count).all()


def test_a_histogram_finds_its_range_in_the_first_batch_and_counts_what_is_beyond():
    first, second = torch.tensor([-1.0, 3.0, torch.nan]), torch.tensor([-2.0, 0.0, 9.0, 3.0])
    histogram = hl.Histogram(dim=None, bins=4).update(first).update(second)
    counts, edges, below, above = histogram.result
    assert edges.tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 1, 0, 2]
    assert (below.item(), above.item()) == (1, 1)
    with pytest.raises(hl.StatisticsError, match=r"ranges differ.*range=\(low, high\)"):
        histogram.merge(hl.Histogram(dim=None, bins=4).update(second))
    assert histogram.result.counts.tolist() == [1, 1, 0, 2]
    one = hl.Histogram(dim=None, bins=2).update(torch.full((3,), 5.0)).result
    assert one.edges.tolist() == [4.5, 5.0, 5.5]


def test_histograms_are_merged_also_if_one_has_seen_nothing_finite():
    x = torch.arange(100.0) + 1000
    for first in (torch.full((4,), torch.nan), x[:0]):
        nothing, some = hl.Histogram(dim=None).update(first), hl.Histogram(dim=None).update(x)
        one, other = nothing.fresh().merge(nothing).merge(some), some.fresh().merge(some)
        other.merge(nothing)
        assert one.result.edges[[0, -1]].tolist() == [1000.0, 1099.0]
        for own, theirs in zip(one.result, other.result, strict=True):
            assert torch.equal(own, theirs)
        one.update(x)
        assert one.result.counts.sum() == 200


def test_samples_are_counted_where_no_ids_are_given():
    tops = hl.TopK(k=1)
    for batch in ([[1.0], [2.0]], [[0.0]], [[3.0], [1.0]]):
        tops.update(torch.tensor(batch))
    assert tops.result.ids.tolist() == [[3]]


def test_what_does_not_fit_is_an_error_and_leaves_the_state_alone():
    x = torch.randn(3, 2)
    mean = hl.Mean().update(x)
    for wrong, found in (
        (torch.randn(3, 5), "5 channels"),
        (torch.tensor(1.0), "no dimension -1"),
        (torch.ones(2, 2, dtype=torch.complex64), "complex64"),
    ):
        with pytest.raises(hl.StatisticsError, match=found):
            mean.update(wrong)
    for ids in ([1, 2], [0.5, 1, 2], [-1, 0, 1], ["a", "b", "c"], [[1], [2, 3]]):
        with pytest.raises(hl.StatisticsError, match="ids"):
            hl.TopK().update(x, ids=ids)
    with pytest.raises(hl.StatisticsError, match="merged with"):
        mean.merge(hl.Variance().update(x))
    with pytest.raises(hl.StatisticsError, match="channels"):
        mean.merge(hl.Mean().update(torch.randn(3, 5)))
    with pytest.raises(hl.StatisticsError, match="numbers of dimensions"):
        hl.TopK().update(x).update(x[None])
    assert_near_numpy(mean.result, x.double().mean(0))
    for make in (
        lambda: hl.TopK(k=0),
        lambda: hl.Histogram(bins=0),
        lambda: hl.Histogram(range=(1.0, 0.0)),
        lambda: hl.Norm(order=0),
        lambda: hl.Norm(dim=None),
        lambda: hl.Covariance(dim=None),
    ):
        with pytest.raises(hl.StatisticsError):
            make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mean.dim = 1


@pytest.mark.parametrize("kind", [*KINDS.values(), *OVERALL.values()], ids=repr)
def test_a_statistic_comes_back_from_a_folder_and_goes_on(kind, tmp_path):
    x = torch.randn(6, 4, 2)
    whole = kind.fresh().update(x)
    kind.fresh().update(x[:3]).save(tmp_path)
    back = type(kind).load(tmp_path)
    assert repr(back) == repr(kind)
    assert_near_numpy(back.update(x[3:]).result, whole.result)
    kind.save(tmp_path / "empty")
    assert not type(kind).load(tmp_path / "empty").state


def test_foreign_files_are_errors(tmp_path):
    hl.TopK(k=2).update(torch.randn(4, 3)).save(tmp_path)
    with pytest.raises(hl.StatisticsError, match="There is a TopK"):
        hl.Mean.load(tmp_path)
    path = tmp_path / "statistic.json"
    content = json.loads(path.read_text())
    for change in (
        {"statistic": "Recipe"},
        {"statistic": "Mean", "options": {"dim": -1}},
        {"options": {"k": 0}},
        {"options": {"k": "2"}},
        {"options": {"wrong": 1}},
        {"options": {"dim": "a"}},
        {"options": {"k": 1}},
        {"options": {"k": 2, "largest": 1}},
        {"options": {"k": 10**40}},
        {"options": {"dim": True}},
        {"statistic": "Histogram", "options": {"bins": 2**20}},
        {"statistic": "Histogram", "options": {"range": [0, 10**400]}},
        {"statistic": "Variance", "options": {"correction": "1"}},
        {"options": []},
        {"statistic": "Histogram", "options": {"range": [1, 2, 3]}},
        {"tensors": "0"},
        {"version": 3},
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(hl.StatisticsError) as caught:
            hl.Statistic.load(tmp_path)
        assert caught.value.remedy
    path.write_text(json.dumps(content))
    assert isinstance(hl.Statistic.load(tmp_path), hl.TopK)


def test_the_value_is_only_read_and_the_default_device_does_not_matter(tmp_path):
    x = torch.randn(4, 3, requires_grad=True)
    kept = x.detach().clone()
    torch.set_default_device("meta")
    try:
        results = [kind.fresh().update(x).result for kind in KINDS.values()]
        merged = [kind.fresh().update(x).merge(kind.fresh().update(x)) for kind in KINDS.values()]
        results += [kind.fresh().result for kind in KINDS.values()]
        for name, kind in KINDS.items():
            kind.fresh().update(x).save(tmp_path / name)
            results.append(hl.Statistic.load(tmp_path / name).result)
    finally:
        torch.set_default_device(None)
    for result in results:
        assert not any(part.requires_grad or part.is_meta for part in parts_of(result))
    assert all(one.count.sum() > 0 for one in merged)
    assert torch.equal(x, kept)


def test_masks_ids_and_the_numbers_of_samples_do_not_go_to_the_default_device():
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Identity())
    torch.set_default_device("meta")
    try:
        tops = hl.TopK(k=1).update(x, torch.ones(4, device="cpu"), torch.arange(4, device="cpu"))
        found = hl.measure(model, "0", statistics=[hl.TopK(k=1)], data=[x, x])
    finally:
        torch.set_default_device(None)
    assert torch.equal(tops.result.ids[0], x.argmax(0))
    assert torch.equal(found["0"]["topk"].ids[0], x.argmax(0))


def test_a_file_that_claims_much_is_refused_before_anything_of_that_size_is_made(tmp_path):
    for kind in (hl.Covariance(), hl.Histogram(bins=2**20), hl.Mean(), hl.TopK()):
        state = kind.fresh().update(torch.zeros(1, 1)).state
        huge = state | {"channels": torch.tensor(10**12)}
        with pytest.raises(hl.StatisticsError, match="how many channels"):
            statistics.statistic_from(kind.to_dict(), huge, "x")
    whole = hl.Variance().update(torch.randn(3, 2)).state
    for wrong, found in (
        (whole | {"mean": whole["mean"].float()}, "'mean' is missing, or of another kind"),
        (whole | {"mean": whole["mean"][:1]}, r"'mean' has the shape \(1,\)"),
        (whole | {"more": whole["mean"]}, "has more"),
        ({k: v for k, v in whole.items() if k != "channels"}, "how many channels"),
        ({k: v for k, v in whole.items() if k != "squares"}, "'squares' is missing"),
    ):
        with pytest.raises(hl.StatisticsError, match=found):
            statistics.statistic_from(hl.Variance().to_dict(), wrong, "x")


def test_a_state_made_in_inference_mode_goes_on_outside(tmp_path):
    x = torch.randn(4, 3)
    for kind in KINDS.values():
        with torch.inference_mode():
            one = kind.fresh().update(x[:2])
        one.update(x[2:]).save(tmp_path)
        assert_near_numpy(type(kind).load(tmp_path).result, kind.fresh().update(x).result)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (hl.Mean(dim=np.int64(1)), hl.Mean(dim=1)),
        (hl.Variance(correction=torch.tensor(0)), hl.Variance(correction=0)),
        (hl.Sparsity(threshold=np.float32(0.5)), hl.Sparsity(threshold=0.5)),
        (hl.Histogram(bins=np.int32(4), range=[0, 1]), hl.Histogram(bins=4, range=(0.0, 1.0))),
        (
            hl.Histogram(range=(torch.tensor(-1.0), np.float64(1))),
            hl.Histogram(range=(-1.0, 1.0)),
        ),
        (hl.TopK(k=np.int64(2), largest=np.bool_(False)), hl.TopK(k=2, largest=False)),
        (hl.Norm(order=1), hl.Norm(order=1.0)),
    ],
    ids=repr,
)
def test_options_of_any_kind_of_number_are_those_of_python(given, plain, tmp_path):
    assert repr(given) == repr(plain)
    x = torch.rand(5, 3)
    given.fresh().update(x[:2], ids=[0, 1]).save(tmp_path)
    both = given.fresh().update(x[2:], ids=[2, 3, 4]).merge(hl.Statistic.load(tmp_path))
    assert_near_numpy(both.result, plain.fresh().update(x).result)


def test_options_that_are_no_numbers_are_refused_when_the_statistic_is_made():
    for make in (
        lambda: hl.Mean(dim="1"),
        lambda: hl.Mean(dim=1.5),
        lambda: hl.Mean(dim=True),
        lambda: hl.Variance(correction=None),
        lambda: hl.Sparsity(threshold="0.5"),
        lambda: hl.Sparsity(threshold=float("inf")),
        lambda: hl.Sparsity(threshold=torch.randn(3)),
        lambda: hl.Histogram(range=3),
        lambda: hl.Histogram(range=(0, 1, 2)),
        lambda: hl.Histogram(range=(0, 10**400)),
        lambda: hl.TopK(largest="no"),
    ):
        with pytest.raises(hl.StatisticsError) as caught:
            make()
        assert caught.value.remedy


def test_a_histogram_of_turned_values_warns_of_nothing(recwarn):
    values = torch.randn(6, 40, dtype=torch.float64)
    found = hl.Histogram(dim=0, bins=5, range=(-1, 1)).update(values)  # torch warns once a process
    counts = [np.histogram(row, bins=5, range=(-1, 1))[0] for row in values.numpy()]
    assert np.array_equal(found.result.counts, counts)
    assert not [str(w.message) for w in recwarn]


def test_top_values_that_do_not_fit_each_other_are_refused():
    whole = hl.TopK(k=5).update(torch.randn(4, 2, 3)).state
    for key, wrong in (
        ("positions", torch.zeros((), dtype=torch.int64)),
        ("positions", torch.zeros(0, 3, 1, dtype=torch.int64)),
        ("positions", torch.zeros(0, 3, 10**9, dtype=torch.int64)),
        ("ids", whole["ids"][:2]),
        ("values", whole["values"][:0]),
    ):
        with pytest.raises(hl.StatisticsError, match="has the shape"):
            statistics.statistic_from(hl.TopK(k=5).to_dict(), whole | {key: wrong}, "x")
