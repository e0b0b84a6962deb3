"""What is drawn is the data: bars, lines and images are read back from the Axes."""

import io
import math
import re
import subprocess
import sys
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from models import SelfAttention
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import RunWriter
from hookline.view import figures
from hookline.view.figures.axes import shorten
from hookline.view.figures.figure_sources import matching
from hookline.view.figures.sampled_numbers import MOST, spaced


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


@pytest.fixture(scope="module")
def seen():
    """A model after a backward, and a record of its values and gradients."""
    model, x = conv_net(), torch.randn(6, 1, 6, 6)
    with hl.capture(model, "*", "*:grad_output", detach=True) as record:
        F.cross_entropy(model(x), torch.arange(6) % 5).backward()
    return model, record


def words(figure):
    """All text of a figure."""
    figure.draw_without_rendering()
    found = figure.findobj(mpl.text.Text)
    return " ".join(" ".join(text.get_text() for text in found).split())


def image(figure, axes=0):
    return figure.axes[axes].images[0].get_array()


def renders(figure):
    assert isinstance(figure, Figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    assert buffer.tell() > 1000
    return figure


# -- histograms -----------------------------------------------------------------------------------


def test_the_bars_of_a_histogram_are_the_counts_of_the_values(seen):
    _, record = seen
    figure = renders(figures.histograms(record, "0", bins=17))
    counts, edges = np.histogram(record["0"].numpy().astype(float), bins=17)
    bars = figure.axes[0].patches[0].get_data()
    assert np.array_equal(bars.values, counts)
    assert np.allclose(bars.edges, edges)
    assert "Distribution of 0" in words(figure)
    assert f"{record['0'].numel():,} values" in words(figure)


def test_several_histograms_share_their_bins_and_show_shares(seen):
    _, record = seen
    figure = renders(figures.histograms(record, ["0", "3"], bins=10))
    both = np.concatenate([record["0"].flatten().numpy(), record["3"].flatten().numpy()])
    edges = np.linspace(both.min(), both.max(), 11)
    outlines = figure.axes[0].patches[::2]
    for outline, name in zip(outlines, ("0", "3"), strict=True):
        counts = np.histogram(record[name].numpy(), edges)[0]
        bars = outline.get_data()
        assert np.allclose(bars.edges, edges)
        assert np.allclose(bars.values, counts / counts.sum() * 100)
    assert "% of values" in figure.axes[0].get_ylabel()


def test_all_calls_at_a_place_count():
    model = nn.Identity()
    with hl.capture(model, "") as record:
        model(torch.zeros(3)), model(torch.ones(5))
    bars = figures.histograms(record, bins=2).axes[0].patches[0].get_data()
    assert bars.values.tolist() == [3, 5]


def test_values_that_are_not_finite_are_left_out_and_said():
    value = torch.tensor([1.0, 2.0, torch.nan, torch.inf, -torch.inf, -torch.inf])
    figure = renders(figures.histograms({"x": value}, bins=2))
    assert figure.axes[0].patches[0].get_data().values.tolist() == [1, 1]
    assert "1 NaN, 1 +Inf, 2 −Inf not shown" in words(figure)
    assert "nothing but 2 NaN" in words(figures.histograms({"x": value[2:3].repeat(2)}))


def test_empty_and_constant_values_are_drawn_and_said():
    assert "no values" in words(renders(figures.histograms({"x": torch.zeros(0, 3)})))
    figure = renders(figures.histograms({"x": torch.full((7,), 0.5, dtype=torch.bfloat16)}))
    assert "all values are 0.5" in words(figure)
    assert figure.axes[0].patches[0].get_data().values.sum() == 7


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).to(torch.bfloat16),
        torch.arange(6).to(torch.float16),
        torch.arange(6).to(torch.float8_e4m3fn),
        torch.arange(6),
        torch.arange(6) > 2,
        torch.arange(6.0).to(torch.complex64),
        torch.arange(6.0).reshape(2, 3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.arange(6.0), 1.0, 0, torch.quint8),
        torch.arange(6.0).requires_grad_(),
        np.arange(6, dtype=np.float32),
        [0, 1, 2, 3, 4, 5],
    ],
    ids=[
        "bf16",
        "f16",
        "f8",
        "int",
        "bool",
        "complex",
        "sparse",
        "quantised",
        "attached",
        "numpy",
        "list",
    ],
)
def test_values_of_every_dtype_are_counted(value):
    value = value() if callable(value) else value
    bars = figures.histograms(value, bins=3).axes[0].patches[0].get_data()
    numbers = [0, 0, 0, 1, 1, 1] if bars.edges[-1] == 1 else range(6)
    assert bars.values.tolist() == np.histogram(list(numbers), 3)[0].tolist()


def test_large_values_are_sampled_always_alike_and_the_figure_says_so():
    torch.manual_seed(0)
    value = torch.randn(MOST // 1000 + 500, 1000)
    first, second = (figures.histograms({"x": value}) for _ in range(2))
    bars = [figure.axes[0].patches[0].get_data().values for figure in (first, second)]
    assert np.array_equal(*bars)
    assert bars[0].sum() == MOST
    assert f"sample of {MOST:,} out of {value.numel():,} values" in words(first)
    turned = figures.histograms({"x": value.T}).axes[0].patches[0].get_data()
    assert turned.values.sum() == MOST
    whole = np.histogram(value.numpy(), first.axes[0].patches[0].get_data().edges)[0]
    share = whole / whole.sum()
    assert np.abs(bars[0] / MOST - share).max() < 0.002


def test_one_nan_in_millions_is_counted_though_only_a_sample_is_drawn():
    value = torch.zeros(1500, 1000)
    value[777, 3] = torch.nan
    value[778, 4:6] = -torch.inf
    assert "1 NaN, 2 −Inf not shown" in words(figures.histograms({"x": value}))
    said = words(figures.weights({"x": value.T.contiguous()}))
    assert "1,024 of 1,500 columns" in said
    assert "1 NaN (grey)" in said


def test_a_sample_meets_all_channels():
    chosen = spaced(64 * 100_000, 10_000)
    assert len(np.unique(chosen)) == len(chosen)
    counts = np.bincount(chosen % 64, minlength=64)
    assert counts.min() > 80


def test_measured_histograms_are_drawn_as_they_were_measured(seen):
    model, _ = seen
    statistic = hl.Histogram(dim=None, bins=9, range=(-1, 1))
    batches = [torch.randn(4, 1, 6, 6) for _ in range(3)]
    found = hl.measure(model, "*", statistics=[statistic], data=batches)
    figure = renders(figures.histograms(found, "1"))
    bins = found["1"]["histogram"]
    bars = figure.axes[0].patches[0].get_data()
    assert np.array_equal(bars.values, bins.counts.numpy())
    assert np.array_equal(bars.edges, bins.edges.numpy())
    assert "range" in words(figures.histograms(found, "0"))  # some lie above or below
    for source in (found.statistics["1"]["histogram"], bins):
        again = figures.histograms(source).axes[0].patches[0].get_data()
        assert np.array_equal(again.values, bins.counts.numpy())


def test_the_values_of_a_store_are_drawn(tmp_path):
    rows = torch.randn(50, 4)
    with hl.Store.create(tmp_path / "acts") as writer:
        writer.append({"h.0": rows, "h.1": [torch.ones(n + 1, 2) for n in range(50)]})
    store = hl.Store.open(tmp_path / "acts")
    bars = figures.histograms(store, "h.0", bins=8).axes[0].patches[0].get_data()
    assert np.array_equal(bars.values, np.histogram(rows.numpy().astype(float), 8)[0])
    assert figures.histograms(store, "h.1").axes[0].patches[0].get_data().values.sum() == 2 * 1275


def test_a_large_store_is_sampled_by_whole_samples(tmp_path):
    with hl.Store.create(tmp_path / "acts") as writer:
        writer.append({"h": torch.randn(1500, 1000).half()})
    figure = figures.histograms(hl.Store.open(tmp_path / "acts"), "h")
    assert "sample of 1,000,000 out of 1,500,000 values" in words(figure)


def test_nested_values_are_drawn_part_by_part():
    lstm = nn.LSTM(3, 2)
    with hl.capture(lstm, "") as record:
        lstm(torch.randn(5, 4, 3))
    figure = figures.histograms(record)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["[0]", "[1][0]", "[1][1]"]
    one = figures.histograms(record, "[1][0]", bins=5).axes[0].patches[0].get_data()
    assert np.array_equal(one.values, np.histogram(record["[1][0]"].detach().numpy(), 5)[0])


# -- layers ---------------------------------------------------------------------------------------


def test_a_ridge_has_the_density_of_each_layer_in_order():
    torch.manual_seed(0)
    values = {f"h.{n}": torch.randn(500) * (n + 1) for n in range(5)}
    figure = renders(figures.ridge(values, bins=30))
    ax = figure.axes[0]
    joined = torch.cat(list(values.values())).numpy().astype(float)
    edges = np.linspace(joined.min(), joined.max(), 31)
    heights = [n - line.get_ydata() for n, line in enumerate(_ridges(ax))]
    shares = [np.histogram(v.numpy(), edges)[0] for v in values.values()]
    scales = [height.max() / share.max() for height, share in zip(heights, shares, strict=True)]
    for height, share, scale in zip(heights[1:], shares[1:], scales[1:], strict=True):
        assert np.allclose(height, share * scale)
        assert scale == pytest.approx(scales[-1])  # the same area for the same share
    assert heights[0].max() == pytest.approx(1.8)  # what would hide those above is cut
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"h.{n}" for n in range(5)]


def _ridges(ax):
    return [line for line in ax.lines if len(line.get_xdata()) > 2]


def test_along_layers_shows_the_quantiles_of_each(seen):
    _, record = seen
    figure = renders(figures.along_layers(record, "*"))
    ax = figure.axes[0]
    thin, thick = ax.collections
    for n, name in enumerate(("0", "1", "2", "3")):
        ends = np.quantile(record[name].numpy().astype(float), [0.01, 0.25, 0.5, 0.75, 0.99])
        assert ax.lines[0].get_xdata()[n] == pytest.approx(ends[2])
        assert thin.get_segments()[n][:, 0].tolist() == pytest.approx([ends[0], ends[4]])
        assert thick.get_segments()[n][:, 0].tolist() == pytest.approx([ends[1], ends[3]])
        assert (thin.get_segments()[n][:, 1] == n).all()
    top, bottom = sorted(ax.get_ylim(), reverse=True)
    assert ax.get_ylim() == (top, bottom)  # the first layer stands at the top


def test_along_layers_of_measured_moments_shows_mean_and_deviation():
    torch.manual_seed(0)
    value = torch.randn(400, 3) * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.0, 5.0, -5.0])
    found = hl.measure(nn.Identity(), "", statistics=[hl.Variance(correction=0)], data=[value])
    ax = renders(figures.along_layers(found)).axes[0]
    assert ax.lines[0].get_xdata()[0] == pytest.approx(value.mean().item(), abs=1e-5)
    ends = ax.collections[1].get_segments()[0][:, 0]
    assert ends[1] - ends[0] == pytest.approx(2 * value.std(correction=0).item(), rel=1e-5)
    assert "± 1 std" in words(ax.figure)


def test_along_layers_of_a_measured_histogram_shows_its_quantiles():
    value = torch.linspace(0, 1, 10_001)
    statistic = hl.Histogram(dim=None, bins=100, range=(0, 1))
    found = hl.measure(nn.Identity(), "", statistics=[statistic], data=[value])
    ax = figures.along_layers(found).axes[0]
    assert ax.lines[0].get_xdata()[0] == pytest.approx(0.5, abs=0.01)
    assert ax.collections[0].get_segments()[0][:, 0] == pytest.approx([0.01, 0.99], abs=0.01)


def test_gradient_flow_shows_root_mean_square_and_largest(seen):
    model, record = seen
    for source, values in (
        (record, {str(p): record[p] for p in record.places() if "grad" in p.port}),
        (model, {name: p.grad for name, p in model.named_parameters()}),
    ):
        ax = renders(figures.gradient_flow(source)).axes[0]
        rms, largest = (line.get_xdata() for line in ax.lines[:2])
        assert rms == pytest.approx(
            [v.double().square().mean().sqrt().item() for v in values.values()]
        )
        assert largest == pytest.approx([v.abs().max().item() for v in values.values()])
        assert [t.get_text() for t in ax.get_yticklabels()] == list(values)
        assert ax.get_xscale() == "log"


def test_the_largest_gradient_is_that_of_all_values_also_where_a_sample_is_drawn():
    gradient = torch.randn(1200, 1000)
    gradient[-1, 7] = -1e6
    figure = figures.gradient_flow({"a:grad": gradient, "b:grad": torch.ones(3)})
    assert figure.axes[0].lines[1].get_xdata().tolist() == [1e6, 1]


def test_gradients_that_are_zero_missing_or_not_finite_are_marked_and_said():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.grad = torch.full((2, 2), 1e-30)
    model[0].bias.grad = torch.zeros(2)
    model[1].weight.grad = torch.tensor([[torch.nan, 1.0], [1.0, 1.0]])
    figure = renders(figures.gradient_flow(model))
    ax = figure.axes[0]
    assert ax.lines[0].get_xdata()[0] == pytest.approx(1e-30)  # its square would be zero
    labels = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert labels["all zero"] == [1]
    assert labels["none, or not finite"] == [2, 3, 4, 5]
    assert "1 NaN" in words(figure)
    assert "no gradient" in words(figure)


def test_a_hundred_layers_with_long_names_are_readable():
    names = [f"model.decoder.layers.{n}.self_attention.output_projection.lora" for n in range(100)]
    for draw in (figures.ridge, figures.along_layers, figures.gradient_flow):
        figure = draw({name: torch.randn(50) for name in names})
        ax = figure.axes[0]
        labels = [t.get_text() for t in ax.get_yticklabels()]
        said = words(figure)
        assert "one name in 2 is written" in said
        assert "names begin with model.decoder.layers." in said
        assert labels == shorten(names)[0][::2]
        boxes = [t.get_window_extent() for t in ax.get_yticklabels()]
        assert all(a.y0 >= b.y1 - 1 for a, b in pairwise(boxes))


def test_short_names_stay_different():
    names = [f"layer.{'x' * 40}.{n}.{'y' * 40}" for n in range(30)]
    short, start = shorten(names)
    assert start == "layer." + "x" * 40 + "."
    assert len(set(short)) == 30
    assert max(map(len, short)) <= 36
    assert shorten(["fc", "conv"]) == (["fc", "conv"], "")
    assert shorten([""]) == (["''"], "")
    assert shorten(["new\nline", "\u202eturned"])[0] == [r"new\nline", r"\u202eturned"]


# -- maps -----------------------------------------------------------------------------------------


def test_feature_maps_show_every_channel_of_the_sample(seen):
    _, record = seen
    figure = renders(figures.feature_maps(record, "0", sample=2))
    shown, maps = image(figure), record["0"][2].numpy()
    gap = 1
    for n, one in enumerate(maps):
        top, left = (n // 2) * (6 + gap), (n % 2) * (6 + gap)
        assert np.allclose(shown[top : top + 6, left : left + 6], one)
    low, high = figure.axes[0].images[0].get_clim()
    assert low == -high
    assert high == pytest.approx(np.abs(maps).max())
    assert "(6, 4, 6, 6) float32; sample 2" in words(figure)
    assert "NaN" not in words(figure)  # the gaps are no NaN


def test_feature_maps_of_many_channels_are_spread_evenly_and_said():
    value = torch.arange(200.0)[None, :, None, None].expand(1, 200, 4, 4)
    figure = renders(figures.feature_maps(value))
    assert "64 of 200 channels" in words(figure)
    shown = np.unique(image(figure).compressed())
    assert shown[0] == 0
    assert shown[-1] == 199
    assert len(shown) == 64
    chosen = figures.feature_maps(value, channels=[3, 7])
    assert np.unique(image(chosen).compressed()).tolist() == [3, 7]


@pytest.mark.parametrize("shape", [(64, 16, 16), (64, 4, 16), (64, 16, 4), (50, 90, 90)])
def test_the_numbers_above_feature_maps_fit_between_them(shape):
    figure = renders(figures.feature_maps(torch.rand(shape)))
    ax = figure.axes[0]
    texts = [text for text in ax.texts if text.get_text().isdigit()]
    assert len(texts) == shape[0]
    tops = sorted({text.get_position()[1] for text in texts})
    for text in texts:
        row = tops.index(text.get_position()[1])
        if row:
            above = ax.transData.transform((0, tops[row - 1] + shape[1]))[1]
            assert text.get_window_extent().y1 <= above


def test_feature_maps_with_scales_of_their_own_go_from_0_to_1():
    value = torch.rand(3, 5, 5) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
    value[0, 0, 0] = torch.nan
    figure = renders(figures.feature_maps(value, own_scale=True))
    assert figure.axes[0].images[0].get_clim() == (0.0, 1.0)
    shown = image(figure)[:5, 6:11]
    assert np.allclose(shown, (value[1] - value[1].min()) / (value[1].max() - value[1].min()))
    assert "1 NaN (grey)" in words(figure)
    assert "scale of its own" in words(figure)


def attention_weights():
    torch.manual_seed(0)
    return torch.randn(2, 5, 7, 7).softmax(-1)


def test_attention_maps_show_every_head_of_the_sample():
    values = attention_weights()
    figure = renders(figures.attention_maps({"h.0.attn": values}, sample=1))
    cells = [ax for ax in figure.axes[0].child_axes if ax.images]
    assert len(cells) == 5
    for cell, head in zip(cells, values[1], strict=True):
        assert np.allclose(cell.images[0].get_array(), head)
        assert cell.images[0].get_clim() == pytest.approx((0, values[1].max().item()))
    assert [cell.get_title() for cell in cells] == [f"head {n}" for n in range(5)]


def test_attention_maps_of_several_places_have_a_row_each_and_chosen_heads():
    values = {f"transformer.h.{n}.attn": attention_weights() * (n + 1) for n in range(3)}
    figure = renders(figures.attention_maps(values, heads=[4, 0]))
    cells = [ax for ax in figure.axes[0].child_axes if ax.images]
    pairs = [(value, head) for value in values.values() for head in (4, 0)]
    for cell, (value, head) in zip(cells, pairs, strict=True):
        assert np.allclose(cell.images[0].get_array(), value[0, head])
    assert [c.get_ylabel() for c in cells[::2]] == ["0.attn", "1.attn", "2.attn"]


def test_attention_maps_are_drawn_from_patterns_and_labelled_with_tokens():
    model = nn.Sequential(SelfAttention())
    with hl.attention(model) as patterns:
        model(torch.randn(1, 2, 4, 8))
    figure = renders(figures.attention_maps(patterns, "0", tokens=["the", "$cat$", "sat", "."]))
    cells = figure.axes[0].child_axes
    assert np.allclose(cells[1].images[0].get_array(), patterns["0"][0, 1])
    assert "$cat\\$" in words(figure)
    with pytest.raises(hl.FigureError, match=r"3 tokens.*There are 4 keys"):
        figures.attention_maps(patterns, tokens=["a", "b", "c"])


def test_attention_maps_of_many_heads_and_long_sequences_say_what_is_left_out():
    figure = renders(figures.attention_maps(torch.rand(20, 3, 2000)))
    assert "the first 16 of 20 heads" in words(figure)
    assert "1,024 of 2,000 columns" in words(figure)
    told = [f"word{n}" for n in range(20)]
    figure = renders(figures.attention_maps(torch.rand(2, 20, 20), tokens=told))
    assert "up to 14 tokens are written, 40 with one head alone" in words(figure)
    figure = renders(figures.attention_maps(torch.rand(2, 20, 20), tokens=told, heads=[1]))
    assert "word19" in words(figure)
    assert "tokens are written" not in words(figure)
    told = [f"word{n}" for n in range(40)]
    figure = renders(figures.attention_maps(torch.rand(40, 40), tokens=told))
    cell = figure.axes[0].child_axes[0]
    boxes = [label.get_window_extent() for label in cell.get_yticklabels()]
    assert all(a.y0 >= b.y1 for a, b in pairwise(boxes))  # none lies over the next
    single = renders(figures.attention_maps(torch.rand(4, 4)))
    assert len(single.axes[0].child_axes) == 1


# -- matrices -------------------------------------------------------------------------------------


def test_weights_are_matrices_on_a_scale_around_zero(seen):
    model, _ = seen
    figure = renders(figures.weights(model, "3.weight"))
    assert np.allclose(image(figure), model[3].weight.detach())
    largest = model[3].weight.abs().max().item()
    assert figure.axes[0].images[0].get_clim() == pytest.approx((-largest, largest))
    conv = figures.weights(model, "0.weight")
    assert np.allclose(image(conv), model[0].weight.detach().reshape(4, 9))
    bias = figures.weights(model, "3.bias")
    assert np.allclose(image(bias), model[3].bias.detach()[None])


def test_all_matrices_of_a_model_are_panels(seen):
    model, _ = seen
    figure = renders(figures.weights(model))
    cells = [ax for ax in figure.axes[0].child_axes if ax.images]
    assert [cell.get_title().split("\n")[0] for cell in cells] == ["0.weight", "3.weight"]
    assert np.allclose(cells[1].images[0].get_array(), model[3].weight.detach())
    many = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    assert "the first 12 of 20" in words(figures.weights(many))


def test_large_matrices_are_thinned_evenly_and_said():
    value = torch.arange(5000.0)[:, None].expand(5000, 3)
    figure = renders(figures.weights({"wte": value}))
    assert "1,024 of 5,000 rows" in words(figure)
    shown = image(figure)
    assert shown.shape == (1024, 3)
    assert shown[0, 0] == 0
    assert shown[-1, 0] == 4999
    assert set(np.diff(shown[:, 0])) <= {4, 5}


def test_nan_and_infinities_in_a_matrix_have_colours_of_their_own():
    value = torch.tensor([[1.0, -2.0, torch.nan], [torch.inf, -torch.inf, 0.0]])
    figure = renders(figures.weights({"w": value}))
    drawn = figure.axes[0].images[0]
    colours = drawn.to_rgba(drawn.get_array())
    said = words(figure)
    for place, name, colour in (
        ((0, 2), "1 NaN (grey)", (0.6, 0.6, 0.6)),
        ((1, 0), "1 +Inf (magenta)", (0.9, 0.0, 0.49)),
        ((1, 1), "1 −Inf (cyan)", (0.0, 0.84, 1.0)),
    ):
        assert name in said
        assert colours[place][:3] == pytest.approx(colour, abs=0.01)
    assert drawn.get_clim() == (-2.0, 2.0)


def test_effects_have_labels_and_numbers():
    frame = pytest.importorskip("pandas").DataFrame(
        [[0.5, -1.0], [2.0, 0.0]], index=["h.0", "h.1"], columns=["loss", "accuracy"]
    )
    matrix = frame.to_numpy()
    for figure in (
        figures.effects(frame),
        figures.effects(matrix, ["h.0", "h.1"], ["loss", "accuracy"]),
        figures.effects(torch.tensor(matrix), ["h.0", "h.1"], ["loss", "accuracy"]),
        figures.effects({"h.0": {"loss": 0.5, "accuracy": -1}, "h.1": {"loss": 2, "accuracy": 0}}),
    ):
        renders(figure)
        ax = figure.axes[0]
        assert np.array_equal(image(figure), matrix)
        assert [t.get_text() for t in ax.get_yticklabels()] == ["h.0", "h.1"]
        assert [t.get_text() for t in ax.get_xticklabels()] == ["loss", "accuracy"]
        assert [t.get_text() for t in ax.texts if t.get_text()][:4] == ["0.5", "-1", "2", "0"]
        assert ax.images[0].get_clim() == (-2.0, 2.0)
    centered = figures.effects(matrix, center=1.0, words="accuracy (%)")
    assert centered.axes[0].images[0].get_clim() == (-1.0, 3.0)
    assert "Accuracy (%)" in words(centered)


def test_effects_that_some_rows_lack_are_left_open_and_labels_are_any_series():
    figure = figures.effects({"h.0": {"a": 1.0}, "h.1": {"b": 3.0, "a": 2.0}})
    shown = [text.get_text() for text in figure.axes[0].texts][:4]
    assert shown == ["1", "nan", "2", "3"]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["a", "b"]
    figure = figures.effects(torch.rand(3, 2), np.array([4, 5, 6]), np.array(["x", "y"]))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["4", "5", "6"]
    with pytest.raises(hl.FigureError, match="rows have the shapes"):
        figures.effects({"a": [1, 2], "b": [1]})


def test_the_effects_of_a_sweep_are_its_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clean, corrupt = torch.randn(1, 5, 3), torch.randn(1, 5, 3)
    for positions in (None, "all"):
        found = hl.sweep(model, clean, corrupt, "*", lambda out: out.sum(), positions=positions)
        figure = renders(figures.effects(found))
        assert np.allclose(image(figure), found.matrix)
        ax = figure.axes[0]
        assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1", "2"]
        across = [t.get_text() for t in ax.get_xticklabels()]
        assert across == (["whole value"] if positions is None else list("01234"))
        assert f"{found.corrupt:.4g} corrupt, {found.clean:.4g} clean" in words(figure)


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def small_run(tmp_path):
    rows = [Row(f"h.{n}", kind, "Linear", (2, 8)) for kind in ("output", "grad") for n in range(3)]
    rng = np.random.default_rng(0)
    with RunWriter(tmp_path / "run", rows, model="Net") as writer:
        for step in (0, 10, 50):
            counts = np.arange(64) + step
            writer.histograms(step, [(n, (-1.0, 1.0, counts)) for n in range(3)])
            values = rng.random((6, len(STATISTICS)))
            values[:, STATISTICS.index("nonfinite")] = 0
            writer.values(step, values)
        writer.finding(hl.Finding("dead units", "h.1", 10, "All are.", {}, "Look."))
    return hl.Run(tmp_path / "run")


def test_layers_by_steps_are_the_matrix_of_the_run(small_run):
    figure = renders(figures.over_steps(small_run, kind="grad", statistic="norm"))
    _, steps, array = small_run.matrix("grad", "norm")
    assert np.allclose(image(figure), array)
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == [str(step) for step in steps]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["h.0", "h.1", "h.2"]
    spot = ax.lines[0]
    assert (spot.get_xdata().tolist(), spot.get_ydata().tolist()) == ([1], [1])
    assert "1 finding" in words(figure)
    some = figures.over_steps(small_run, "h.{1,2}")
    assert np.allclose(image(some), small_run.matrix("output", "std")[2][1:])


def test_the_heading_of_layers_by_steps_tells_what_and_when(small_run):
    figure = figures.over_steps(small_run, kind="grad", statistic="absmax")
    assert figure.axes[0].get_title("left") == "Largest magnitude of the gradients"
    steps = small_run.steps()
    assert f"{len(steps)} steps from {steps[0]} to {steps[-1]}" in words(figure)


def test_a_layer_that_never_ran_is_hatched_and_has_no_nan(tmp_path):
    values = np.ones((3, len(STATISTICS)))
    values[1:] = np.nan  # the first ran, the second had nothing finite, the third never ran
    values[1, STATISTICS.index("nonfinite")] = 1
    with RunWriter(tmp_path, [Row(name, "output") for name in "abc"]) as writer:
        for step in range(2):
            writer.values(step, values)
    figure = renders(figures.over_steps(hl.Run(tmp_path)))
    assert "2 NaN (grey)" in words(figure)
    assert "2 not measured (hatched)" in words(figure)
    assert figure.axes[0].images[0].get_alpha().tolist() == [[1, 1], [1, 1], [0, 0]]
    assert figure.axes[0].patch.get_hatch()


def test_weights_of_no_rows_or_columns_are_said_to_have_no_values():
    values = {"a": torch.zeros(0, 5), "b": torch.zeros(5, 0, 2), "c": torch.zeros(0)}
    for name in values:
        assert "no values" in words(renders(figures.weights(values, name)))
    assert "a: no values" in words(renders(figures.weights({**values, "d": torch.ones(2, 2)})))


def test_long_maps_are_more_than_a_hair_and_ticks_are_whole_numbers():
    value = torch.randn(1, 6, 1, 200)
    value[0, 2, 0, 5] = torch.nan
    for turned in (value, value.mT):
        figure = renders(figures.feature_maps(turned))
        height, width = image(figure).shape
        assert 1 / 8 < height / width < 8
        assert "drawn 25 times as large" in words(figure)
        assert "1 NaN" in words(figure)
    figure = renders(figures.weights(torch.randn(1, 5)))
    assert all(at == round(at) for at in figure.axes[0].get_yticks())


def test_noise_beside_effects_is_written_as_nothing():
    figure = figures.effects([[0.343, 1.2e-9, -3e-8], [0.0123, -0.21, math.nan]])
    written = [text.get_text() for text in figure.axes[0].texts][:6]
    assert written == ["0.34", "0", "0", "0.012", "-0.21", "nan"]
    figure = figures.effects([[-27.77, 0.0]])  # whose colour is not that of what it is rounded to
    assert figure.axes[0].texts[0].get_color() == "white"
    figure = figures.effects([[0.0, 0.0], [1e-9, -2e-9]])
    assert [t.get_text() for t in figure.axes[0].texts][:4] == ["0", "0", "1e-09", "-2e-09"]


def test_layers_by_steps_over_many_magnitudes_are_logarithmic_with_zeros(tmp_path):
    with RunWriter(tmp_path, [Row("a", "output"), Row("b", "output")]) as writer:
        for step, value in enumerate((1e-5, 1.0, 0.0)):
            writer.values(step, np.full((2, len(STATISTICS)), value))
    figure = renders(figures.over_steps(hl.Run(tmp_path)))
    drawn = figure.axes[0].images[0]
    assert "logarithmic" in words(figure)
    shades = drawn.norm(np.array([0.0, 1e-5, 1e-2, 1.0]))
    assert shades[0] == 0
    assert shades[-1] == 1
    assert 0.3 < shades[2] < 0.8
    assert np.allclose(image(figure)[0], [1e-5, 1, 0])


def test_a_run_has_distributions_spreads_and_gradient_flow(small_run):
    bars = renders(figures.histograms(small_run, "h.1", step=20)).axes[0].patches[0].get_data()
    assert np.array_equal(bars.values, np.arange(64) + 10)
    assert "step 10" in words(figures.histograms(small_run, "h.1", step=20))
    assert len(_ridges(renders(figures.ridge(small_run)).axes[0])) == 3
    ax = renders(figures.along_layers(small_run, step=10)).axes[0]
    assert ax.lines[0].get_xdata() == pytest.approx(small_run.matrix("output", "mean")[2][:, 1])
    flow = renders(figures.gradient_flow(small_run)).axes[0]
    mean, std = (small_run.matrix("grad", name)[2][:, 2] for name in ("mean", "std"))
    assert flow.lines[0].get_xdata() == pytest.approx(np.hypot(mean, std))


def test_the_root_mean_square_of_a_run_is_right_for_a_small_batch_and_for_two_calls(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(first := nn.Linear(4, 4), first, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, every=1, optimizer=optimizer, to=tmp_path):
        for count in (16, 3):
            with hl.capture(model, "0:grad_output", "2:grad_output") as record:
                model(torch.randn(count, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = [
        torch.cat(record.calls(f"{place}:grad_output")).double().square().mean().sqrt().item()
        for place in ("0", "2")
    ]
    ax = figures.gradient_flow(hl.Run(tmp_path)).axes[0]
    assert ax.lines[0].get_xdata() == pytest.approx(wanted, rel=1e-5)


def test_where_a_run_has_nothing_finite_the_numbers_before_are_not_drawn(tmp_path):
    good = np.ones((2, len(STATISTICS)))
    good[:, STATISTICS.index("nonfinite")] = 0
    bad = good.copy()
    bad[1] = np.nan
    bad[1, STATISTICS.index("nonfinite")] = 1
    with RunWriter(tmp_path, [Row(name, "grad") for name in "ab"]) as writer:
        writer.values(0, good)
        writer.values(1, bad)
    for draw in (figures.along_layers, figures.gradient_flow):
        figure = renders(draw(hl.Run(tmp_path), kind="grad"))
        assert np.isnan(figure.axes[0].lines[0].get_xdata()).tolist() == [False, True]
        assert "b: 100 % not finite" in words(figure)
        before = draw(hl.Run(tmp_path), kind="grad", step=0)
        assert np.isfinite(before.axes[0].lines[0].get_xdata()).all()


# -- top samples ----------------------------------------------------------------------------------


def test_top_samples_are_the_samples_of_the_largest_values():
    torch.manual_seed(0)
    data, model = torch.rand(30, 1, 5, 5), nn.Conv2d(1, 3, 3)
    found = hl.measure(model, "", statistics=[hl.TopK(dim=1, k=4)], data=data.split(7))
    figure = renders(figures.top_samples(found, data, k=4, channels=[2, 0]))
    with torch.no_grad():
        best = model(data).flatten(2).max(-1)[0]
    cells = [ax for ax in figure.axes[0].child_axes if ax.images]
    tops = found[""]["topk"]
    for row, channel in enumerate((2, 0)):
        assert int(best[:, channel].argmax()) == int(tops.ids[0, channel])
        for rank in range(4):
            cell = cells[row * 4 + rank]
            number = int(tops.ids[rank, channel])
            assert np.allclose(cell.images[0].get_array(), data[number, 0])
            assert cell.get_title().startswith(f"#{number} ")
    assert [c.get_ylabel() for c in cells[::4]] == ["channel 2", "channel 0"]


def test_top_samples_can_be_words_lines_colour_images_and_pairs_with_labels():
    tops = hl.TopK(k=2).update(torch.tensor([[[1.0], [9.0], [2.0]], [[3.0], [0.0], [5.0]]]))
    data = [(["the", "cat", "sat"], 1), (["a", "$dog$", "ran"], 0)]
    shown = words(renders(figures.top_samples(tops, data, k=2)))
    assert "▸ cat" in shown
    assert "▸ ran" in shown
    lines = figures.top_samples(tops, torch.arange(6.0).reshape(2, 3), k=1)
    cell = lines.axes[0].child_axes[0]
    assert cell.lines[0].get_ydata().tolist() == [0, 1, 2]
    assert cell.lines[1].get_xdata()[0] == 1
    colours = torch.rand(2, 3, 6, 6)
    picture = figures.top_samples(tops, colours, k=1).axes[0].child_axes[0].images[0]
    assert np.allclose(picture.get_array(), colours[0].permute(1, 2, 0))
    renders(figures.top_samples(tops, {0: "a text of words", 1: "another"}, k=2))


# -- all of them ----------------------------------------------------------------------------------


def every(record, patterns, run, tops):
    values = {f"h.{n}": torch.randn(3, 4) for n in range(3)}
    return {
        "histograms": lambda **a: figures.histograms(values, **a),
        "ridge": lambda **a: figures.ridge(values, **a),
        "along_layers": lambda **a: figures.along_layers(values, **a),
        "gradient_flow": lambda **a: figures.gradient_flow(values, **a),
        "feature_maps": lambda **a: figures.feature_maps(torch.rand(1, 3, 4, 4), **a),
        "attention_maps": lambda **a: figures.attention_maps(torch.rand(1, 3, 4, 4), **a),
        "weights": lambda **a: figures.weights(values, **a),
        "over_steps": lambda **a: figures.over_steps(run, **a),
        "effects": lambda **a: figures.effects(torch.rand(3, 4), **a),
        "top_samples": lambda **a: figures.top_samples(tops, torch.rand(9, 4, 4), **a),
    }


def settings():
    return dict(dict.items(mpl.rcParams))  # reading the backend by its key would choose one


@pytest.mark.parametrize("name", figures.__all__)
def test_a_figure_draws_on_given_axes_and_leaves_everything_global_as_it_was(name, small_run):
    tops = hl.TopK(k=2).update(torch.randn(9, 3))
    draw = every(None, None, small_run, tops)[name]
    before = settings()
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert draw(ax=right) is figure
    renders(figure)
    inside = [right, *right.child_axes]
    assert any(ax.lines or ax.images or ax.patches for ax in inside)
    assert not left.lines
    assert not left.images
    assert right.get_title("left")
    assert settings() == before
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize("name", figures.__all__)
def test_a_figure_shows_itself_in_a_notebook(name, small_run):
    tops = hl.TopK(k=2).update(torch.randn(9, 3))
    figure = every(None, None, small_run, tops)[name]()
    assert figure._repr_png_()[1:4] == b"PNG"


def test_pyplot_is_not_imported():
    program = (
        "import sys, torch\n"
        "from hookline.view import figures\n"
        "assert 'matplotlib' not in sys.modules\n"
        "figures.histograms(torch.ones(3))._repr_png_()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_a_missing_matplotlib_is_said_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hookline.view.figures.notebook_figure", None)
    with pytest.raises(hl.MissingExtra, match=r"pip install 'hookline\[report\]'") as caught:
        figures.histograms(torch.ones(3))
    assert isinstance(caught.value, ImportError)


def test_names_with_dollars_are_no_formulas():
    value = {"$x_1$": torch.rand(2, 3), "a$": torch.rand(2, 3)}
    for draw in (figures.histograms, figures.ridge, figures.along_layers, figures.weights):
        renders(draw(value))
    renders(figures.weights(value, "$x_1$"))
    heads = {r"$\frac$": torch.rand(1, 2, 4, 4), "b": torch.rand(1, 2, 4, 4)}
    renders(figures.attention_maps(heads))


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("h.0.mlp", ["h.0.mlp"]),
        ("h.*.mlp", ["h.0.mlp", "h.1.mlp"]),
        ("**", ["h.0.mlp", "h.1.mlp", "h.1.attn", "fc"]),
        ("h.**", ["h.0.mlp", "h.1.mlp", "h.1.attn"]),
        ("**.mlp:input", ["h.1.mlp:input"]),
        ("h.{0..3}.{attn,mlp}", ["h.0.mlp", "h.1.mlp", "h.1.attn"]),
        (re.compile(r"1\."), ["h.1.mlp", "h.1.mlp:input", "h.1.attn"]),
        (["fc", "h.0.*"], ["h.0.mlp", "fc"]),
        (None, ["h.0.mlp", "h.1.mlp", "h.1.mlp:input", "h.1.attn", "fc"]),
    ],
)
def test_places_are_matched_as_everywhere(where, found):
    names = ["h.0.mlp", "h.1.mlp", "h.1.mlp:input", "h.1.attn", "fc"]
    assert matching(names, where) == found


def test_module_types_and_predicates_are_found_while_the_model_lives(seen):
    _, record = seen
    figure = figures.along_layers(record, nn.Linear)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["3"]


def test_values_that_cannot_be_read_are_said_beside_the_others():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    with hl.capture(model, "*") as record:
        model(torch.randn(4, 3))
    figure = renders(figures.along_layers(record))
    assert "changed in place" in words(figure)
    with pytest.raises(hl.ValueChanged):
        figures.histograms(record, "0")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: figures.histograms({"fc": torch.ones(2)}, "fcc"),
            "'fcc'.*There is 'fc'.*Name one",
        ),
        (lambda: figures.histograms({f"{n}": torch.ones(2) for n in range(9)}), "9 hist.*6.*ridge"),
        (lambda: figures.histograms(torch.ones(2), bins=0), "0 bins.*Give bins=1"),
        (lambda: figures.histograms(object()), "holds no tensor: it is object.*Give a record"),
        (lambda: figures.histograms(["a"]), "It is a list.*Give a record"),
        (lambda: figures.histograms(torch.ones(2, device="meta")), "meta tensor.*run with data"),
        (lambda: figures.feature_maps(torch.ones(2, 3)), r"shape \(2, 3\).*height × width"),
        (lambda: figures.feature_maps(torch.ones(2, 3, 4, 4), sample=2), "2 samples.*Give sample="),
        (
            lambda: figures.feature_maps(torch.ones(3, 4, 4), channels=[5]),
            r"\[5\].*3, from 0.*Give",
        ),
        (lambda: figures.feature_maps({"a": torch.ones(1), "b": torch.ones(1)}), "'a', 'b'. Name"),
        (lambda: figures.feature_maps({"a": torch.ones(1, 2, 2)}, call=3), "Call 3.*1 calls.*Give"),
        (lambda: figures.attention_maps(torch.ones(3)), r"shape \(3,\).*queries × keys"),
        (lambda: figures.attention_maps(torch.ones(2, 2, 2), heads=[9]), "2 heads.*Give heads="),
        (
            lambda: figures.attention_maps(torch.ones(1, 2, 2, 2), sample=4),
            "1 samples.*Give sample",
        ),
        (lambda: figures.effects(torch.ones(2, 2), ["a"]), r"1 row.*\(2, 2\).*one label"),
        (lambda: figures.effects(torch.ones(2, 2, 2)), r"\(2, 2, 2\).*Give a matrix"),
        (lambda: figures.over_steps({"a": torch.ones(2)}), "Only a run has steps.*Run.open"),
        (lambda: figures.gradient_flow(nn.Linear(2, 2)), "No parameter has one.*backward"),
        (lambda: figures.top_samples(torch.ones(3), []), "no TopK.*Measure with"),
        (lambda: figures.top_samples(hl.TopK(), []), "Nothing was measured.*Update"),
        (
            lambda: figures.top_samples(hl.TopK(k=2).update(torch.ones(3, 2)), []),
            r"data\[0\] failed",
        ),
        (
            lambda: figures.top_samples(hl.TopK(k=2).update(torch.ones(3, 2)), [], channels=[4]),
            "2 ch.*Give",
        ),
    ],
)
def test_what_cannot_be_drawn_is_an_error_in_three_parts(draw, message):
    with pytest.raises(hl.FigureError, match=f"(?s){message}") as caught:
        draw()
    assert caught.value.asked
    assert caught.value.found
    assert caught.value.remedy


def test_what_a_source_lacks_is_an_error_in_three_parts(seen, small_run):
    _, record = seen
    found = hl.measure(nn.Identity(), "", statistics=[hl.Mean()], data=[torch.ones(2, 2)])
    for draw, message in (
        (lambda: figures.histograms(found), "mean was measured, and no histogram.*Histogram"),
        (lambda: figures.along_layers(found), "mean was measured.*Variance"),
        (lambda: figures.top_samples(found, []), "no TopK"),
        (
            lambda: figures.histograms(small_run, kind="weight"),
            "'weight'.*It has grad, output.*Give kind=",
        ),
        (lambda: figures.histograms(small_run, kind="grad"), "none of kind 'grad'"),
        (lambda: figures.feature_maps(record), "Feature maps of one place.*Name one"),
    ):
        with pytest.raises(hl.FigureError, match=f"(?s){message}"):
            draw()


@pytest.mark.parametrize("source", [{}, nn.ReLU()])
@pytest.mark.parametrize("name", ["histograms", "ridge", "weights", "attention_maps"])
def test_a_source_with_nothing_in_it_is_told(name, source):
    message = f"(?s)A figure of a {type(source).__name__} was asked for.*nothing in it.*Give one"
    with pytest.raises(hl.FigureError, match=message):
        getattr(figures, name)(source)
