"""What a page says of a record, a store, a run or a model, before a browser draws it."""

import base64
import gzip
import hashlib
import json
import re
import warnings

import numpy as np
import pytest
import torch
from models import HOSTILE_NAMES, hostile_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.training.findings import Finding
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import BinCounts, RunWriter
from hookline.view.page import Chunk, Page, pack, plain_json, unpack
from hookline.view.page_html import as_html
from hookline.view.page_tree import read_place
from hookline.view.reporting import page_of
from hookline.view.tensor_summaries import numbers_of, spread, summarize_tensor


class ConvLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.act = nn.ReLU()
        self.cell = nn.LSTM(16, 3, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        y = self.act(self.conv(x)).flatten(2)
        return self.head(self.cell(y)[0])


def entries(page):
    return {entry["place"]: entry for entry in page.content["entries"]}


def items(page, place):
    chunk = unpack(pack(page.chunks[entries(page)[place]["chunk"]]()))
    return chunk.meta["items"], chunk.arrays


def modules(page):
    return {module["path"]: module for module in page.content["modules"]}


# -- portraits ------------------------------------------------------------------------------------


def test_statistics_are_those_of_numpy():
    value = torch.randn(6, 7, 5, 4, dtype=torch.float64)
    value[0, 0] = 0
    found, array = summarize_tensor(value), value.numpy()
    assert found.meta["shape"] == [6, 7, 5, 4]
    assert found.meta["dtype"] == "float64"
    statistics = found.meta["statistics"]
    for name, oracle in (("mean", array.mean()), ("std", array.std()), ("min", array.min())):
        assert statistics[name] == pytest.approx(oracle)
    assert statistics["norm"] == pytest.approx(np.linalg.norm(array))
    assert statistics["zeros"] == pytest.approx((array == 0).mean())
    counts, _ = np.histogram(array, 64)
    assert np.abs(found.counts.astype(int) - counts).sum() <= 2  # a value on an edge
    assert found.counts.sum() == array.size


def test_what_is_not_finite_is_counted_and_left_out():
    value = torch.tensor([1.0, 2.0, torch.nan, torch.inf, -torch.inf])
    found = summarize_tensor(value)
    assert found.meta["statistics"]["nonfinite"] == 3
    assert found.meta["statistics"]["mean"] == 1.5
    assert found.counts.sum() == 2
    assert np.isnan(found.picture[0, 0, 0, 2])
    nothing = summarize_tensor(torch.full((3, 3), torch.nan))
    assert nothing.counts is None
    assert "mean" not in nothing.meta["statistics"]


@pytest.mark.parametrize(
    ("shape", "weight", "kind", "axes"),
    [
        ((3, 4, 8, 8), False, "maps", ["samples", "channels", "rows", "columns"]),
        ((3, 9, 6), False, "sequence", ["samples", "", "positions", "features"]),
        ((3, 6), False, "matrix", ["", "", "samples", "features"]),
        ((3, 6), True, "matrix", ["", "", "rows", "columns"]),
        ((5, 2, 3, 3), True, "maps", ["filters", "input channels", "rows", "columns"]),
        ((7,), False, "vector", ["", "", "", "positions"]),
        ((2, 3, 4, 5, 6), False, "maps", ["samples", "channels", "rows", "columns"]),
        ((4, 3, 1, 1), False, "matrix", ["", "", "samples", "channels"]),
    ],
)
def test_the_kind_of_a_picture_follows_the_shape(shape, weight, kind, axes):
    value = torch.randn(shape)
    found = summarize_tensor(value, weight=weight)
    assert (found.meta["kind"], found.meta["axes"]) == (kind, axes)
    if value.ndim < 5:
        oracle = value.half().numpy().reshape(found.picture.shape)
        assert np.array_equal(found.picture, oracle)
    assert found.meta["sampled"] == []


@pytest.mark.parametrize("shape", [(16, 128, 28, 28), (8, 256, 512), (2000, 900), (100_000,)])
def test_a_picture_holds_values_of_the_tensor_at_even_steps_and_says_so(shape):
    value = torch.arange(float(np.prod(shape))).reshape(shape) % 1009
    found = summarize_tensor(value, most=4096)
    assert found.picture.size <= 4096
    assert found.meta["sampled"]
    shaped = {4: value, 3: value[:, None] if value.ndim == 3 else None}.get(value.ndim)
    if shaped is None:
        shaped = value[None, None] if value.ndim == 2 else value[None, None, None]
    steps = found.meta["steps"]
    oracle = shaped[tuple(slice(None, None, step) for step in steps)]
    oracle = oracle[: found.picture.shape[0]].half().numpy()
    assert np.array_equal(found.picture, oracle)
    for text, axis in re.findall(r"(\d+) of \d+ (\w+)", " ".join(found.meta["sampled"])):
        assert int(text) == found.picture.shape[found.meta["axes"].index(axis)]


def test_statistics_of_a_huge_tensor_are_of_a_sample_and_say_so():
    value = torch.zeros(5_000_000)
    value[7] = torch.nan  # not in the sample, and still seen
    found = summarize_tensor(value)
    assert "statistics and histogram of 1 in 3 values" in found.meta["notes"]
    assert found.meta["statistics"]["nonfinite"] == 1


def test_a_huge_tensor_is_all_zero_only_if_it_is():
    value = torch.ones(1000, 8000)
    value[:, ::4] = 0  # 1 in 4 values is looked at
    found = summarize_tensor(value).meta["statistics"]
    assert found["zeros"] == pytest.approx(0.25, abs=0.01)
    with torch.device("meta"):  # a default device, as others have cuda there
        assert summarize_tensor(value).meta["statistics"] == found
    assert found["max"] == 1
    value.zero_()[7, 7] = 1
    assert summarize_tensor(value).meta["statistics"]["zeros"] < 1
    assert summarize_tensor(value.zero_()).meta["statistics"]["zeros"] == 1


def test_dead_channels_of_a_volume_are_those_of_its_second_dimension():
    value = torch.rand(2, 4, 3, 5, 5)
    value[:, 1:] = 0
    assert summarize_tensor(value).meta["dead"] == 0.75


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e300])
def test_a_picture_of_very_small_or_large_values_keeps_them(size):
    value = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64) * size
    found = summarize_tensor(value)
    shown = found.picture[0, 0].astype(float) * found.meta["scale"]
    assert np.allclose(shown, value.numpy(), rtol=1e-3)
    assert found.counts.sum() == 4


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[15496, 28001, 2049, 50256]]),  # token ids
        torch.tensor([[28001, 12]]),
        1000 + torch.arange(32.0).view(4, 8) / 100,  # close to one another, far from 0
        torch.tensor([[-1e9, 5.25, -1e9, -1.5]]),  # scores under a mask
        torch.full((2, 3), 0.1),
    ],
    ids=["ids", "small ids", "offset", "mask", "constant"],
)
def test_a_picture_shows_the_numbers_that_are_there(value):
    found = summarize_tensor(value)
    shown = found.picture[0, 0].astype(float) * found.meta["scale"]
    assert np.allclose(shown, value.double().numpy(), rtol=1e-6)


def test_a_picture_is_half_as_large_where_nothing_is_lost():
    torch.manual_seed(0)
    value = torch.randn(64, 64)
    assert (
        summarize_tensor(value).picture.dtype
        == summarize_tensor(value * 1e6).picture.dtype
        == np.float16
    )
    assert (
        summarize_tensor(value.relu()).picture.dtype
        == summarize_tensor(value > 0).picture.dtype
        == np.float16
    )


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([True, False]),
        torch.arange(4),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.zeros(2, device="meta"),
        torch.randn(2, 3).expand(4, 2, 3),
    ],
    ids=lambda value: f"{value.dtype}, {value.layout}, {[*value.shape]}",
)
def test_any_tensor_has_a_portrait(value):
    found = summarize_tensor(value)
    assert found.meta["shape"] == list(value.shape)
    json.dumps(found.meta, allow_nan=False)


def test_an_empty_tensor_and_magnitudes_are_said_to_be_so():
    assert summarize_tensor(torch.zeros(0, 3)).meta["notes"] == ["an empty tensor"]
    found = summarize_tensor(torch.tensor([3 + 4j]))
    assert found.meta["notes"] == ["magnitudes of complex numbers"]
    assert found.meta["statistics"]["mean"] == 5


def test_a_sparse_csr_tensor_is_said_to_have_no_picture():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that CSR is new
        value = torch.eye(3).to_sparse_csr()
    assert numbers_of(value) is None
    assert summarize_tensor(value).meta["notes"] == ["no picture of a sparse_csr tensor"]


def test_positions_are_spread_from_the_first_to_the_last():
    assert spread(0, 4) == []
    assert spread(10_000, 12)[0] == 0
    assert spread(10_000, 12)[-1] == 9_999
    assert len(set(spread(13, 12))) == 12


# -- records and models ---------------------------------------------------------------------------


def test_a_record_page_has_every_call_and_pairs_values_with_gradients():
    model = ConvLSTM()
    x = torch.randn(2, 1, 4, 4)
    places = ["conv", "act", "conv:grad_output", "head.weight", "head.weight:grad", "head:input"]
    with hl.capture(model, *places, detach=True) as record:
        for _ in range(3):
            model(x).sum().backward()
    page = page_of(record)
    found = entries(page)
    assert found["conv"]["count"] == 3
    assert found["conv"]["shape"] == [2, 4, 4, 4]
    assert found["conv"]["group"] == found["conv:grad_output"]["group"] == "output"
    assert found["conv:grad_output"]["gradient"]
    assert found["head.weight"]["group"] == found["head.weight:grad"]["group"] == "weight"
    assert found["head:input"]["group"] == "input"
    owner = page.content["modules"][found["head.weight:grad"]["module"]]
    assert owner["path"] == "head"
    assert items(page, "head.weight:grad")[0][0]["axes"][2:] == ["rows", "columns"]
    calls, arrays = items(page, "conv")
    assert [item["label"] for item in calls] == ["0", "1", "2"]
    for item, value in zip(calls, record.calls("conv"), strict=True):
        assert np.array_equal(arrays[item["picture"]], value.half().numpy())
        assert item["statistics"]["mean"] == pytest.approx(float(value.double().mean()))
    assert modules(page)["head"]["parameters"] == 20
    assert [m["path"] for m in page.content["modules"]] == [n for n, _ in model.named_modules()]


def test_nested_values_have_an_entry_for_each_tensor():
    model = ConvLSTM()
    with hl.capture(model, "cell") as record:
        model(torch.randn(2, 1, 4, 4))
    page = page_of(record)
    assert list(entries(page)) == ["cell[0]", "cell[1][0]", "cell[1][1]"]
    assert entries(page)["cell[1][0]"]["group"] == "output[1][0]"
    assert ["values", "1"] in page.content["facts"]  # as the record itself counts
    assert "1 value," in repr(record)


def test_a_model_page_has_the_gradients_of_nested_values():
    model = nn.Sequential(nn.LSTM(3, 4))
    page = page_of(model, batch=torch.ones(2, 5, 3), loss=lambda output: output[0].sum())
    with hl.capture(model, "0:grad_output") as record:
        model(torch.ones(2, 5, 3))[0].sum().backward()
    (found,), _ = items(page, "0:grad_output[0]")
    expected = record["0:grad_output"][0].square().sum().sqrt().item()
    assert found["statistics"]["norm"] == pytest.approx(expected)
    assert "0:grad_output" not in entries(page)  # no entry that says that there is no tensor


def test_a_value_that_has_other_parts_in_some_calls_says_where_it_is_missing():
    class Fickle(nn.Module):
        def forward(self, x, extra):
            return (x, x + 1) if extra else (x,)

    model = nn.Sequential(Fickle())
    with hl.capture(model, "0") as record:
        for extra in (False, True, False):
            model[0](torch.zeros(2, 2), extra)
    found, _ = items(page_of(record), "0[1]")
    assert [item.get("missing", False) for item in found] == [True, False, True]
    assert found[1]["statistics"]["mean"] == 1


def test_many_calls_are_sampled_and_the_page_says_so():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.capture(model, "0") as record:
        for _ in range(40):
            model(torch.randn(1, 2))
    page = page_of(record)
    assert entries(page)["0"]["count"] == 40
    labels = [item["label"] for item in items(page, "0")[0]]
    assert len(labels) == 12
    assert (labels[0], labels[-1]) == ("0", "39")
    assert any("12 calls are shown" in note for note in page.content["notes"])


def test_a_value_that_cannot_be_read_says_why_in_its_place():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with hl.capture(model, "0", "1") as record:
        model(torch.randn(2, 3))
    found = entries(page_of(record))["0"]
    assert "changed in place" in found["note"]
    assert "chunk" not in found


def test_a_record_without_its_model_still_has_a_tree():
    model = ConvLSTM()
    with hl.capture(model, "conv", "head", detach=True) as record:
        model(torch.randn(2, 1, 4, 4))
    del model
    page = page_of(record)
    assert page.content["title"] == "Record"
    assert set(modules(page)) == {"", "conv", "head"}


def test_modules_that_were_asked_for_and_never_called_say_so():
    model = ConvLSTM()
    with hl.capture(model, "*") as record:
        model(torch.randn(2, 1, 4, 4))
    found = modules(page_of(record))
    assert found["unused"]["called"] is False
    assert found["unused"]["reason"]
    assert found["conv"]["called"] is True


def test_a_model_page_runs_it_once_and_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    batch, labels = torch.randn(8, 4), torch.arange(8) % 2
    model(batch).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    page = page_of(model, batch=batch, loss=lambda y: F.cross_entropy(y, labels))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
    assert not hl.attached(model)

    expected = nn.Linear(4, 6)
    expected.load_state_dict(model[0].state_dict())
    found, arrays = items(page, "0")
    assert np.array_equal(
        arrays[found[0]["picture"]][0, 0], expected(batch).detach().half().numpy()
    )
    output = model(batch)
    (oracle,) = torch.autograd.grad(F.cross_entropy(output, labels), output)
    gradient = items(page, "3:grad_output")[0][0]["statistics"]
    assert gradient["norm"] == pytest.approx(float(oracle.norm()), rel=1e-4)
    assert items(page, "0.weight")[0][0]["shape"] == [6, 4]
    assert modules(page)[""]["flops"] == 2 * 8 * (4 * 6 + 6 * 2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inference", [False, True])
def test_gradients_of_checkpointed_layers_are_on_the_page(inference):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=True)

    model, x = Saving(), torch.randn(3, 4)
    with torch.inference_mode(inference):
        page = page_of(model, batch=x, loss=torch.sum)
    gradient = items(page, "first:grad_output")[0][0]["statistics"]
    expected = torch.ones(3, 2) @ model.second.weight.detach()
    assert gradient["norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    assert model.first.weight.grad is None


def test_a_loss_without_gradients_or_without_a_batch_is_refused():
    model, x = nn.Linear(2, 2).requires_grad_(False), torch.randn(3, 2)
    with pytest.raises(hl.BatchError, match="Nothing that the model returned has a gradient"):
        page_of(model, batch=x, loss=torch.sum)
    page = page_of(model, batch=x.requires_grad_(), loss=torch.sum)
    assert items(page, ":grad_output")[0][0]["shape"] == [3, 2]
    with pytest.raises(hl.ReportError, match="There is no batch"):
        page_of(model, loss=torch.sum)


def test_a_model_without_a_batch_shows_its_parameters_only():
    page = page_of(ConvLSTM())
    assert {e["group"] for e in page.content["entries"]} >= {"weight", "bias", "weight_ih_l0"}
    assert not any(e["group"] == "output" for e in page.content["entries"])


def test_a_lazy_model_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False))
    page = page_of(model, batch=torch.randn(2, 5))
    assert entries(page)["0.weight"]["shape"] == [3, 5]
    assert entries(page)["1.running_mean"]["shape"] == [3]
    assert nn.parameter.is_lazy(model[0].weight)
    assert nn.parameter.is_lazy(model[1].running_mean)
    assert entries(page_of(model))["0.weight"]["note"]


def test_findings_name_what_is_broken_dead_or_zero():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.dead, self.none = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x):
            y = x.clone()
            y[0, 0] = torch.nan
            self.bad(y)
            self.dead(x.abs() * torch.tensor([1.0, 0, 0, 0]))
            return self.none(x * 0)

    model = Odd()
    with hl.capture(model, "bad", "dead", "none") as record:
        model(torch.randn(5, 4))
    found = [(f["kind"], f["place"], f["severity"]) for f in page_of(record).content["findings"]]
    assert found == [
        ("not finite", "bad", "error"),
        ("dead channels", "dead", "warning"),
        ("all zero", "none", "warning"),
    ]
    assert "1 of 20" in page_of(record).content["findings"][0]["message"]


def test_of_gradients_that_are_not_finite_the_one_that_the_backward_met_first_comes_first():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(70)])
    with hl.capture(model, "*:grad_output", detach=True) as record:
        (model(torch.ones(1, 2)) * torch.nan).sum().backward()
    page = page_of(record)
    findings = page.content["findings"]
    assert [finding["place"] for finding in findings[:2]] == ["69:grad_output", "68:grad_output"]
    assert "the last place in model order" in findings[0]["advice"]
    assert "60 of 70 findings are shown." in page.content["notes"]


def test_zeros_of_masks_of_whole_numbers_and_of_biases_are_no_findings():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.register_buffer("kinds", torch.zeros(1, 3, dtype=torch.int64))
            self.mask, self.ids, self.scale = nn.Identity(), nn.Identity(), nn.Identity()
            self.scale.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            self.mask(torch.zeros(2, 3, dtype=torch.bool))
            self.ids(torch.tensor([[1, 0, 0], [2, 0, 0]]))
            return self.attention(x, x, x)[0]

    model = Masked()
    page = page_of(model, batch=torch.randn(2, 3, 4))
    known = entries(page)
    for place in ("attention.in_proj_bias", "kinds", "mask", "ids"):
        assert known[place]["summary"]["zeros"] > 0.5
    found = [(f["kind"], f["place"]) for f in page.content["findings"]]
    assert found == [("all zero", "scale.weight")]


# -- stores ---------------------------------------------------------------------------------------


def test_a_store_page_shows_samples_from_its_whole_length(tmp_path):
    rows, maps = torch.randn(50, 6), torch.randn(50, 2, 4, 4)
    with hl.Store.create(tmp_path / "acts", metadata={"model": "demo"}) as writer:
        writer.append({"fc:input": rows, "conv": maps}, ids=[f"s{n}" for n in range(50)])
    page = page_of(tmp_path / "acts")
    assert page.content["item"] == "sample"
    assert page.content["ids"][49] == "s49"
    assert entries(page)["conv"]["shape"] == [50, 2, 4, 4]
    found, arrays = items(page, "conv")
    assert [item["label"] for item in found] == [str(n) for n in spread(50, 12)]
    assert np.array_equal(arrays[found[-1]["picture"]][0], maps[49].half().numpy())
    assert found[-1]["kind"] == "maps"
    whole = unpack(pack(page.chunks[entries(page)["fc:input"]["chunk"]]()))
    assert whole.meta["all"]["statistics"]["mean"] == pytest.approx(float(rows.double().mean()))
    assert any("12 of 50 samples" in note for note in page.content["notes"])


def test_a_store_of_varying_lengths_and_an_empty_one_have_pages(tmp_path):
    with hl.Store.create(tmp_path / "a") as writer:
        writer.append({"h": [torch.randn(3, 4), torch.randn(5, 4)]})
    page = page_of(hl.Store.open(tmp_path / "a"))
    assert entries(page)["h"]["shape"] == [2, "varying", 4]
    assert items(page, "h")[0][1]["shape"] == [1, 5, 4]
    with hl.Store.create(tmp_path / "b"):
        pass
    assert page_of(tmp_path / "b").content["entries"] == []


# -- runs -----------------------------------------------------------------------------------------

ROWS = [
    Row("h.0", "output", "Block", (2, 3)),
    Row("h.0", "grad", "Block", (2, 3)),
    Row("h.0.fc.weight", "weight", "Linear", (3, 3)),
    Row("h.0.fc.weight", "weight_grad", "Linear", (3, 3)),
    Row("h.0.fc.weight", "update", "Linear", (3, 3)),
]


def write_small_run(folder, steps, start=0.0, rows=ROWS):
    with RunWriter(folder, rows, model="Net") as writer:
        for step in steps:
            values = np.full((len(rows), len(STATISTICS)), np.nan, np.float32)
            values[:, 1] = start + step + np.arange(len(rows)) / 10
            writer.histograms(step, [(0, BinCounts(-1.0, 1.0, np.arange(64)))])
            writer.values(step, values)
            writer.scalar(step, "loss", 10.0 - step)


def test_a_run_page_has_maps_series_histograms_and_scalars(tmp_path):
    write_small_run(tmp_path, range(0, 50, 10))
    page = page_of(tmp_path)
    maps = {m["kind"]: m for m in page.content["run"]["maps"]}
    assert list(maps) == ["output", "grad", "weight", "weight_grad", "update"]
    assert maps["output"]["statistics"] == ["std"]
    whole = page.chunks["map:1:0"]().arrays
    assert whole["steps"].tolist() == [0, 10, 20, 30, 40]
    assert np.allclose(whole["values"], [[0.1, 10.1, 20.1, 30.1, 40.1]])
    found = page.content["entries"][maps["update"]["entries"][0]]
    assert (found["place"], found["role"], found["group"]) == ("h.0.fc.weight", "update", "weight")
    chunk = page.chunks[entries(page)["h.0"]["chunk"]]()
    index = chunk.meta["statistics"].index("std")
    assert np.allclose(chunk.arrays["series"][index], [0, 10, 20, 30, 40])
    assert chunk.arrays["histograms"].shape == (5, 64)
    scalars = page.chunks["scalars"]()
    assert scalars.meta["names"] == ["loss"]
    assert scalars.arrays["v0"].tolist() == [10, 0, -10, -20, -30]
    assert modules(page)["h.0"]["type"] == "Block"


def test_a_long_run_is_shown_at_spread_steps_and_says_so(tmp_path):
    write_small_run(tmp_path, range(3000))
    page = page_of(tmp_path)
    steps = page.chunks["map:0:0"]().arrays["steps"]
    assert len(steps) <= 600
    assert (steps[0], steps[-1]) == (0, 2999)
    values = page.chunks["map:0:0"]().arrays["values"][0]
    assert np.allclose(values, steps)
    assert any("3,000" in note for note in page.content["notes"])


def test_a_later_start_replaces_the_steps_that_it_repeats(tmp_path):
    write_small_run(tmp_path, range(0, 50, 10))
    write_small_run(tmp_path, [25, 45], start=1000)  # 30 and 40 belong to what was given up
    whole = page_of(tmp_path).chunks["map:0:0"]().arrays
    steps, values = hl.Run(tmp_path).series("h.0", "output", "std")
    assert whole["steps"].tolist() == steps.tolist() == [0, 10, 20, 25, 45]
    assert np.allclose(whole["values"][0], values)


def test_a_single_step_that_went_wrong_is_on_the_curve_of_a_long_run(tmp_path):
    values = 1 / (1 + np.arange(10_000.0))
    values[[5003, 6001, 7001, 9999]] = [40, -3, np.nan, 0.5]
    with RunWriter(tmp_path, ROWS) as writer:
        for step, value in enumerate(values):
            writer.scalar(step, "loss", value)
    found = page_of(tmp_path).chunks["scalars"]().arrays
    steps = found["s0"].astype(int)
    assert {0, 5003, 6001, 7001, 9999} <= {*steps}
    assert len(steps) <= 2002
    assert (np.diff(steps) > 0).all()
    assert np.array_equal(found["v0"], values[steps], equal_nan=True)


def test_of_very_many_findings_errors_and_the_latest_are_shown(tmp_path):
    with RunWriter(tmp_path, ROWS) as writer:
        for step in range(300):
            severity = "error" if step == 5 else "warning"
            writer.finding(Finding("spike", "h.0", step, "It jumped.", {}, "", severity))
    content = page_of(tmp_path).content
    assert [one["step"] for one in content["findings"]] == [5, *range(101, 300)]
    assert content["run"]["findings"] == 300


# -- the file -------------------------------------------------------------------------------------


def test_the_file_holds_no_text_of_the_model_outside_of_gzip(tmp_path):
    model = hostile_model()
    type(model).__name__ = "<script>alert(3)</script>"
    path = hl.report(model, tmp_path / "page.html", batch=torch.randn(3, 2))
    text = path.read_text("utf-8")
    assert "onerror" not in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(3)" in text  # the title
    content = re.search(r'data-chunk="page">([^<]*)<', text)[1]
    page = json.loads(gzip.decompress(base64.b64decode(content)))
    assert {m["path"].rpartition(".")[2] for m in page["modules"]} >= set(HOSTILE_NAMES)


def test_the_file_allows_its_own_script_and_style_only_and_names_nothing_outside(tmp_path):
    page = Page({"title": "T"}, {"e0": lambda: Chunk({})})
    text = as_html(page)
    rules = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#x27;", "'")
    assert "default-src 'none'" in rules
    assert "connect-src 'none'" in rules
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in rules
    assert not re.search(r'(src|href)="?(https?:)?//', text.partition("<body>")[0])
    assert text.count('data-chunk="e0"') == 1


def test_arrays_in_a_chunk_lie_where_a_typed_array_may_begin():
    arrays = {"a": np.zeros(3, np.uint8), "b": np.ones(1, np.float64), "c": np.ones(5, np.float16)}
    content = pack(Chunk({"x": 1}, arrays))
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    offsets = [start + offset for _, offset, _ in header["arrays"].values()]
    assert all(offset % 8 == 0 for offset in offsets)
    assert unpack(content).arrays["b"].tolist() == [1.0]


def test_numbers_that_json_cannot_hold_become_null():
    assert plain_json({"a": [float("nan"), 1.0, (float("inf"),)]}) == '{"a":[null,1.0,[null]]}'


def test_what_is_no_subject_is_refused_in_three_parts(tmp_path):
    with pytest.raises(hl.ReportError, match=r"The subject is a int.*view\.figures draws"):
        hl.report(3, tmp_path / "r.html")
    with pytest.raises(hl.ReportError, match="no store, run or record"):
        hl.report(tmp_path, tmp_path / "r.html")
    model = nn.Linear(2, 2)
    with hl.capture(model, "") as record:
        model(torch.randn(1, 2))
    with pytest.raises(hl.ReportError, match="which is not run"):
        hl.report(record, tmp_path / "r.html", batch=torch.randn(1, 2))


@pytest.mark.parametrize(
    ("text", "path", "port", "operation"),
    [
        ("h.0.attn/softmax#1:grad_output", "h.0.attn", "grad_output", "softmax#1"),
        ("", "", "output", None),
        ("fc:input", "fc", "input", None),
        (r"a\*b", "a*b", "output", None),
        ("not [ a place", "not [ a place", "output", None),
        ("h.*", "h.*", "output", None),
    ],
)
def test_places_are_read_from_their_text(text, path, port, operation):
    found = read_place(text)
    assert (found.path, found.port, found.operation) == (path, port, operation)


def test_a_million_flops_less_a_few_is_a_million():
    page = page_of(nn.Linear(25, 19_999), batch=torch.ones(1, 25))
    assert dict(page.content["facts"])["FLOPs"] == "1.00 M"


def test_facts_that_are_not_there_are_not_shown(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    modules = page_of(model).content["modules"]
    assert not any("aliases" in module or "shared_with" in module for module in modules)
    hl.harvest(model, [torch.ones(3, 2)], "0", to=tmp_path / "acts", quiet=True)
    facts = dict(page_of(tmp_path / "acts").content["facts"])
    assert facts["model"] == "Sequential"
    assert not any("{" in value for value in facts.values())


@pytest.mark.parametrize("name", ["nowhere/page.html", "."])
def test_a_page_that_cannot_be_written_is_told_of(tmp_path, name):
    with pytest.raises(hl.ReportError, match=r"was to be written to .*cannot be: .*folder that is"):
        hl.report(nn.Linear(2, 2), tmp_path / name)
