"""sweep: patching by hand, with plain hooks, is the oracle."""

import json

import numpy as np
import pytest
import torch
from oracles import assert_clean, assert_same_state, state_bits
from torch import nn

import hookline as hl
from hookline.comparisons.sweep_results import Sweep


class Mixer(nn.Module):
    """Tokens that see one another, as in a small transformer; values are batch × token × width."""

    def __init__(self, linear=False):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.act = nn.Identity() if linear else nn.Tanh()
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.act(block(x + x.cumsum(1)))
        return self.head(x)[:, -1]


def metric(logits):
    return (logits[:, 1] - logits[:, 2]).mean()


CLEAN = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
CORRUPT = torch.tensor([[1, 0, 3, 4], [5, 0, 7, 1]])


@torch.no_grad()
def patched_by_hand(model, clean, corrupt, name, position, measure=metric):
    """Patch one place with a plain hook."""
    module, kept = model.get_submodule(name), []
    handle = module.register_forward_hook(lambda m, i, o: kept.append(o.clone()))
    model(clean)
    handle.remove()

    def put(m, i, o):
        new = o.clone()
        if position is None:
            return kept[0]
        new[:, position] = kept[0][:, position]
        return new

    handle = module.register_forward_hook(put)
    value = float(measure(model(corrupt)))
    handle.remove()
    return value


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("positions", [None, "all", [0, -1]])
def test_a_sweep_gives_what_patching_by_hand_gives(batch_size, positions):
    model, where = Mixer(), ["embed", "blocks.*", "head"]
    found = hl.sweep(
        model, CLEAN, CORRUPT, where, metric, positions=positions, batch_size=batch_size
    )
    wanted = {None: [None], "all": [0, 1, 2, 3]}.get(
        positions if isinstance(positions, str | None) else 0, [0, 3]
    )
    assert found.places == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [(e.place, e.position) for e in found] == [(p, n) for p in found.places for n in wanted]
    with torch.no_grad():
        corrupt, clean = float(metric(model(CORRUPT))), float(metric(model(CLEAN)))
    assert found.corrupt == pytest.approx(corrupt)
    assert found.clean == pytest.approx(clean)
    for effect in found:
        expected = patched_by_hand(model, CLEAN, CORRUPT, effect.place, effect.position)
        assert effect.value == pytest.approx(expected, abs=1e-6)
        assert effect.change == pytest.approx(expected - corrupt, abs=1e-6)
        assert effect.share == pytest.approx((expected - corrupt) / (clean - corrupt), abs=1e-5)
    assert found.matrix.shape == (5, len(wanted))
    assert found.matrix[3, -1] == found["blocks.2", wanted[-1]].change
    assert torch.allclose(found.shares, found.matrix / (found.clean - found.corrupt))
    if batch_size > 1:
        assert found.runs == 2 + -(-len(found) // batch_size)  # two to find out that it is safe
        assert not found.notes
    else:
        assert found.runs == len(found)


def test_samples_do_not_mix_because_the_output_is_a_column():
    class Column(nn.Sequential):
        def forward(self, x):
            return super().forward(x)[:, 0]

    model = Column(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    batches = torch.randn(1, 3), torch.randn(1, 3)
    found = hl.sweep(model, *batches, "*", torch.sum, batch_size=8)
    assert (found.runs, found.notes) == (3, [])


def test_a_whole_value_late_in_the_model_restores_everything():
    found = hl.sweep(Mixer(), CLEAN, CORRUPT, "head", metric)
    assert found["head"].share == pytest.approx(1)
    assert found.best is found["head"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("positions", [None, "all"])
def test_the_estimate_is_exact_for_a_linear_model(positions, frozen):
    model = Mixer(linear=True).requires_grad_(not frozen)
    where = ["embed", "blocks.*", "head", "blocks.1:input"]
    exact = hl.sweep(model, CLEAN, CORRUPT, where, metric, positions=positions)
    guess = hl.sweep(model, CLEAN, CORRUPT, where, metric, positions=positions, approximate=True)
    assert guess.places == exact.places
    assert guess.positions == exact.positions
    assert torch.allclose(guess.matrix, exact.matrix, atol=1e-5)
    assert exact.matrix.abs().max() > 0.01
    assert guess.approximate
    assert guess.runs == 0
    assert "approximate" in str(guess)
    assert all(p.grad is None and p.requires_grad != frozen for p in model.parameters())


def test_the_estimate_is_gradient_times_difference_for_any_model():
    model = Mixer()
    guess = hl.sweep(model, CLEAN, CORRUPT, "blocks.0", metric, approximate=True)
    kept = []
    handle = model.blocks[0].register_forward_hook(lambda m, i, o: kept.append(o))
    model(CLEAN)
    loss = metric(model(CORRUPT))
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, kept[1])
    expected = ((kept[0] - kept[1]) * gradient).sum().detach()
    assert guess["blocks.0"].change == pytest.approx(float(expected), rel=1e-4)


def test_in_place_modules_and_inputs_are_estimated_too(seeded):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.abs_(), model[0].bias.fill_(1)  # the ReLU is linear here
    model, clean, corrupt = model.double(), torch.rand(2, 3).double(), torch.rand(2, 3).double()
    where = ["0", "1", "0:input"]
    exact = hl.sweep(model, clean, corrupt, where, torch.sum)
    guess = hl.sweep(model, clean, corrupt, where, torch.sum, approximate=True)
    assert torch.allclose(guess.matrix, exact.matrix, atol=1e-5)
    assert exact["0"].share == pytest.approx(1, abs=1e-3)


def test_a_model_that_writes_into_its_batch_is_estimated_too():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x):
            return self.fc(x.sub_(1).mul_(2))

    model, clean, corrupt = Centred(), torch.randn(2, 3), torch.randn(2, 3)
    before, where = clean.clone(), ["fc", "fc:input", ":input"]
    exact = hl.sweep(model, clean, corrupt, where, torch.sum)
    guess = hl.sweep(model, clean, corrupt, where, torch.sum, approximate=True)
    assert torch.allclose(guess.matrix, exact.matrix, atol=1e-5)
    assert torch.equal(clean, before)


def test_the_estimate_at_complex_values_is_that_of_both_parts():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x)

    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64), requires_grad=False)

        def forward(self, x):
            return (x * self.weight).abs().square()

    model = nn.Sequential(Spectrum(), Power())
    clean, corrupt = torch.randn(2, 8), torch.randn(2, 8)
    found = hl.sweep(model, clean, corrupt, "0", torch.sum, approximate=True, positions="all")
    start, goal = model[0](corrupt).requires_grad_(), model[0](clean)
    (slope,) = torch.autograd.grad(model[1](start).sum(), start)
    way = goal - start.detach()
    expected = (way.real * slope.real + way.imag * slope.imag).sum(0)
    assert torch.allclose(found.matrix[0].float(), expected, rtol=1e-4, atol=1e-4)
    assert not model[1].weight.requires_grad


def test_calls_of_other_lengths_are_estimated_one_by_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x).sum(1) + self.layer(x[:, :1]).sum(1)

    model, clean, corrupt = Twice(), torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    exact = hl.sweep(model, clean, corrupt, "layer", torch.sum)
    guess = hl.sweep(model, clean, corrupt, "layer", torch.sum, approximate=True)
    assert guess["layer"].change == pytest.approx(exact["layer"].change, abs=1e-4)
    way = float((clean - corrupt)[:, 0].sum(0) @ model.layer.weight.detach().sum(0))
    for approximate in (False, True):
        how = {"approximate": approximate, "progress": False}
        found = hl.sweep(model, clean, corrupt, "layer", torch.sum, positions=[0], **how)
        assert found["layer", 0].change == pytest.approx(2 * way, abs=1e-4)
        for positions in ("all", [3], [-1]):
            with pytest.raises(hl.BatchError, match=r"shape \(2, 5, 3\) and \(2, 1, 3\)"):
                hl.sweep(model, clean, corrupt, "layer", torch.sum, positions=positions, **how)


def test_an_estimate_over_calls_that_feed_one_another_is_told_to_be_none_of_one_change():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 1)
            nn.init.eye_(self.layer.weight)

        def forward(self, x):
            return self.head(self.layer(self.layer(x)))

    model, batches = Again(), (torch.randn(2, 3), torch.randn(2, 3))
    exact = hl.sweep(model, *batches, ["layer", "head"], torch.sum, progress=False)
    guess = hl.sweep(model, *batches, ["layer", "head"], torch.sum, approximate=True)
    assert guess["layer"].change == pytest.approx(2 * exact["layer"].change, abs=1e-5)
    assert guess["head"].change == pytest.approx(exact["head"].change, abs=1e-5)
    assert [note[:27] for note in guess.notes] == ["'layer' is called 2 times: "]
    assert exact.notes == []
    assert hl.sweep(model, *batches, "head", torch.sum, approximate=True).notes == []


@pytest.mark.parametrize(
    "positions",
    [np.array([1, 3]), torch.tensor([1, 3]), (n for n in (1, 3)), {1: 0, 3: 0}, (1, np.int64(3))],
    ids=lambda positions: type(positions).__name__,
)
def test_positions_are_any_series_of_whole_numbers(positions):
    found = hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric, positions=positions)
    assert found.positions == [1, 3]
    assert found.matrix.shape == (3, 2)
    assert json.loads(json.dumps(found.to_dict()))["positions"] == [1, 3]


@pytest.mark.parametrize("positions", [3, "al", [1.0], ["1"], [None]])
def test_what_are_no_positions_is_refused(positions):
    with pytest.raises(TypeError, match="Give 'all', a list of whole numbers, or None"):
        hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric, positions=positions)


def test_no_positions_at_all_are_refused():
    with pytest.raises(ValueError, match="positions= was given, and empty"):
        hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric, positions=[])


def test_a_matrix_is_on_the_cpu_whatever_the_default_device_is():
    found = hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric)
    expected = found.matrix
    with torch.device("meta"):  # as others have cuda there
        assert torch.equal(found.matrix, expected)


def test_places_without_a_gradient_are_left_out_of_a_glob_and_told():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.side, self.head = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            hidden = self.stem(x)
            return self.head(hidden), self.side(hidden)

    model, clean, corrupt = Beside(), torch.randn(2, 3), torch.randn(2, 3)

    def measure(output):
        return output[0].sum()

    exact = hl.sweep(model, clean, corrupt, "*", measure)
    guess = hl.sweep(model, clean, corrupt, "*", measure, approximate=True)
    assert guess.places == ["stem", "head"]
    assert guess["stem"].change == pytest.approx(exact["stem"].change, abs=1e-4)
    assert guess.notes == ["no estimate at 'side': no gradient of the metric is known there"]
    for where in ("side", ["stem", "side"], "sid*"):
        with pytest.raises(hl.GradientNotAvailable, match="'side:grad_output'"):
            hl.sweep(model, clean, corrupt, where, measure, approximate=True)


@pytest.mark.parametrize("where", ["layer", "lay*", ["*", "layer"]])
def test_a_call_whose_gradient_is_refused_is_not_estimated_as_nothing(where):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            with torch.no_grad():
                first = self.layer(x)
            return self.head(first + self.layer(x))

    model, batches = Twice(), (torch.randn(2, 3), torch.randn(2, 3))
    assert hl.sweep(model, *batches, "layer", torch.sum, progress=False)["layer"].change
    with pytest.raises(hl.GradientNotAvailable, match=r"'layer:grad_output'.*require grad"):
        hl.sweep(model, *batches, where, torch.sum, approximate=True)
    guess = hl.sweep(model, *batches, "*", torch.sum, approximate=True)
    assert guess.places == ["head"]
    (note,) = guess.notes[:1]
    assert note.startswith("no estimate at 'layer': no gradient of the metric is known there (the ")
    assert "value did not require grad" in note


def test_no_change_is_a_share_of_nothing_whichever_way_the_metric_goes():
    model, clean = nn.Sequential(nn.Identity(), nn.ReLU()), torch.tensor([[1.0, 2.0]])
    for corrupt in (clean - torch.tensor([1.0, 0.0]), clean + torch.tensor([1.0, 0.0])):
        found = hl.sweep(model, clean, corrupt, "0", torch.sum, positions="all")
        assert "-0.0%" not in str(found)
        assert [row.share for row in found] == [1, 0]


def test_estimates_can_be_had_in_inference_mode():
    model = Mixer()
    expected = hl.sweep(model, CLEAN, CORRUPT, "blocks.*", metric, approximate=True)
    with torch.inference_mode():
        found = hl.sweep(model, CLEAN, CORRUPT, "blocks.*", metric, approximate=True)
    assert torch.equal(found.matrix, expected.matrix)


def test_other_changes_are_swept_too():
    model = Mixer()
    for change in (
        hl.zero(),
        hl.zero,
        torch.zeros_like,
        lambda value, call: value * 0,
        torch.tensor(0.0),
    ):
        found = hl.sweep(model, CLEAN, CORRUPT, "blocks.*", metric, change=change, positions="all")
        for effect in found:
            spot = (slice(None), slice(effect.position, effect.position + 1))
            with torch.no_grad(), hl.edit(model, effect.place, hl.zero(), at=spot):
                assert effect.value == pytest.approx(float(metric(model(CORRUPT))), abs=1e-6)
    with pytest.raises(hl.BatchError, match="Only what the clean run had"):
        hl.sweep(model, CLEAN, CORRUPT, "head", metric, change=hl.zero(), approximate=True)


class Mean(nn.Module):
    """Samples mix: each row sees the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        x = self.fc(x)
        return (x - x.mean(0)) * torch.arange(1.0, 1 + len(x))[:, None]


def test_models_that_mix_samples_run_one_change_at_a_time():
    model, clean, corrupt = Mean(), torch.randn(2, 3), torch.randn(2, 3)
    found = hl.sweep(model, clean, corrupt, "fc", lambda out: out[0, 0], positions="all")
    for effect in found:
        expected = patched_by_hand(
            model, clean, corrupt, "fc", effect.position, lambda out: out[0, 0]
        )
        assert effect.value == pytest.approx(expected, abs=1e-5)
    assert found.notes == [
        "one change a forward: copies of the batch in one forward do not give what it gives alone"
    ]


class Centred(nn.Module):
    """Samples mix, in a way that copies of one batch do not show."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        x = self.fc(x)
        return {"centred": x - x.mean(0), "size": x.square().mean()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [2, 16])
@pytest.mark.parametrize("part", ["centred", "size"])
def test_mixing_that_copies_of_one_batch_do_not_show_is_found(part, batch_size, dtype):
    model = Centred().to(dtype)
    clean, corrupt = torch.randn(2, 2, 3, dtype=dtype)

    def measure(out):
        return out[part].abs().max()

    found = hl.sweep(model, clean, corrupt, "fc", measure, positions="all", batch_size=batch_size)
    assert found.notes == ["one change a forward: the samples of a batch mix"]
    for effect in found:
        expected = patched_by_hand(model, clean, corrupt, "fc", effect.position, measure)
        assert effect.value == pytest.approx(expected, abs=1e-6)


class Before(nn.Module):
    """Each row sees the row before it; the first one sees itself."""

    def __init__(self, back):
        super().__init__()
        self.fc, self.back = nn.Linear(3, 3), back

    def forward(self, x):
        x = self.fc(x)
        ends = [x[:1], x[:-1]] if self.back else [x[1:], x[-1:]]
        return x - torch.cat(ends) / 2


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("batch_size", [2, 3])
def test_mixing_in_one_direction_is_found_too(batch_size, back):
    model, clean, corrupt = Before(back), torch.randn(1, 3), torch.randn(1, 3)
    found = hl.sweep(model, clean, corrupt, "fc", torch.sum, positions="all", batch_size=batch_size)
    for effect in found:
        expected = patched_by_hand(model, clean, corrupt, "fc", effect.position, torch.sum)
        assert effect.value == pytest.approx(expected, abs=1e-5)
    assert found.notes == ["one change a forward: the samples of a batch mix"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_attention_along_the_first_dimension_and_batch_norm_in_training_mix_samples():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2).eval()  # positions come first
    clean, corrupt = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    last = lambda out: out[-1, :, 0].sum()  # noqa: E731
    found, alone = (
        hl.sweep(encoder, clean, corrupt, "layers.*", last, positions="all", dim=0, batch_size=size)
        for size in (16, 1)
    )
    assert torch.equal(found.matrix, alone.matrix)
    assert bool((found.matrix[1, :4] == 0).all())  # of the last layer one position is read
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    clean, corrupt = torch.randn(4, 3), torch.randn(4, 3)
    first = lambda out: out[0].sum()  # noqa: E731
    found = hl.sweep(norm, clean, corrupt, "*", first, positions="all")
    assert "the samples of a batch mix" in found.notes[0]
    assert not hl.sweep(norm, clean, corrupt, "*", first, positions="all", mode="eval").notes


def test_where_mixing_would_not_be_seen_one_change_runs_at_a_time():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.unheard, self.fc = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            self.unheard(x)
            return self.fc(x)

    clean, corrupt = torch.randn(2, 3), torch.randn(2, 3)
    found = hl.sweep(Ignores(), clean, corrupt, "unheard", torch.sum, positions="all")
    assert "could not be seen in the output" in found.notes[0]
    assert bool((found.matrix == 0).all())
    tokens = hl.sweep(Mixer(), CLEAN, CORRUPT, "embed:input", metric, positions="all")
    assert not tokens.notes  # indices are disturbed by those of the clean batch
    assert tokens.matrix.abs().max() > 0.01


class Told(Mixer):
    """Beside the logits, something that has no row for each sample."""

    def __init__(self, tell):
        super().__init__()
        self.tell, self.scale = tell, nn.Parameter(torch.linspace(1, 3, 6))

    def forward(self, ids):
        logits = super().forward(ids)
        return {"logits": logits, "told": self.tell(self, logits)}


@pytest.mark.parametrize("batch_size", [3, 4, 9])
def test_what_is_as_long_as_some_copies_is_not_taken_for_their_rows(batch_size):
    model = Told(lambda model, logits: model.scale)  # six numbers: as many as rows of three copies

    def measure(output):
        return metric(output["logits"]) * output["told"].sum()

    found = hl.sweep(
        model, CLEAN, CORRUPT, "blocks.*", measure, positions="all", batch_size=batch_size
    )
    assert (found.runs < 12) == (batch_size > 3)  # three copies alone do not tell them apart
    for place in found.places:
        for position in range(4):
            expected = patched_by_hand(model, CLEAN, CORRUPT, place, position, measure)
            assert found[place, position].value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "tell",
    [
        lambda model, logits: metric(logits).item(),
        lambda model, logits: logits.detach().numpy().mean(0),
        lambda model, logits: [logits[:, 1].tolist(), logits[:, 2].tolist()],
    ],
    ids=["number", "array", "lists"],
)
def test_numbers_that_are_no_tensors_are_those_of_the_batch_alone(tell):
    model = Told(tell)

    def measure(output):
        told = output["told"]
        if isinstance(told, list):
            return float(np.subtract(*told).mean())
        return told if isinstance(told, float) else float(told[1] - told[2])

    found = hl.sweep(model, CLEAN, CORRUPT, "blocks.*", measure)
    for place in found.places:
        expected = patched_by_hand(model, CLEAN, CORRUPT, place, None, measure)
        assert found[place].value == pytest.approx(expected, abs=1e-4)
    assert found.notes[0].startswith("one change a forward: ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "AssertionError"),  # of a bare assert
        (KeyError("six"), "'six'"),
        (TypeError("two\nlines"), "two lines"),
        (Exception("own"), "own"),
    ],
)
def test_a_model_may_refuse_copies_of_the_batch_in_any_way(error, said):
    class Strict(Mixer):
        def forward(self, ids):
            if len(ids) != 2:
                raise error
            return super().forward(ids)

    model = Strict()
    found = hl.sweep(model, CLEAN, CORRUPT, "blocks.*", metric)
    assert found.notes == [
        f"one change a forward: copies of the batch cannot be run together: {said}"
    ]
    for place in found.places:
        expected = patched_by_hand(model, CLEAN, CORRUPT, place, None)
        assert found[place].value == pytest.approx(expected, abs=1e-5)


def test_where_the_batch_is_not_first_one_change_runs_at_a_time():
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)  # positions come first

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = model, nn.Linear(6, 1)

        def forward(self, x):
            return self.out(self.layer(x.transpose(0, 1)).transpose(0, 1))

    turned, clean, corrupt = Turned(), torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    found = hl.sweep(turned, clean, corrupt, ["layer", "out"], torch.sum, positions=[0], dim=0)
    assert "the batch is not first" in found.notes[0]
    together = hl.sweep(turned, clean, corrupt, ["layer", "out"], torch.sum)
    assert together["out"].share == pytest.approx(1, abs=1e-4)
    alone = hl.sweep(turned, clean, corrupt, ["layer", "out"], torch.sum, batch_size=1)
    assert torch.allclose(together.matrix, alone.matrix, atol=1e-4)


def test_dicts_tuples_and_functions_are_batches_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, y):
            return {"sum": self.a(x) + self.b(y)}

    model = Two()
    (x, y), (u, v) = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    measure = lambda out: out["sum"].sum()  # noqa: E731
    by_tuple = hl.sweep(model, (x, y), (u, v), "*", measure, positions="all")
    by_dict = hl.sweep(model, {"x": x, "y": y}, {"x": u, "y": v}, "*", measure, positions="all")
    by_call = hl.sweep(model, lambda m: m(x, y), lambda m: m(u, v), "*", measure, positions="all")
    assert torch.allclose(by_tuple.matrix, by_dict.matrix, atol=1e-5)
    assert torch.allclose(by_tuple.matrix, by_call.matrix, atol=1e-5)
    assert by_call.runs == len(by_call) > by_dict.runs


def test_parts_of_nested_values_are_swept():
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    clean, corrupt = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    measure = lambda out: out[0].sum()  # noqa: E731
    found = hl.sweep(model, clean, corrupt, "0[0]", measure, positions="all")
    for effect in found:
        with torch.no_grad(), hl.capture(model, "0[0]") as record:
            model(clean)
        spot = (slice(None), effect.position)
        with torch.no_grad(), hl.edit(model, "0[0]", hl.patch(record), at=spot):
            assert effect.value == pytest.approx(float(measure(model(corrupt))), abs=1e-5)
    with pytest.raises(hl.SeveralTensors, match=r"\[0\].*\[1\]\[0\]"):
        hl.sweep(model, clean, corrupt, "0", measure)


def test_modules_that_are_not_called_are_left_out_of_a_glob():
    model = Mixer()
    model.unused = nn.Linear(2, 2)
    assert "unused" not in hl.sweep(model, CLEAN, CORRUPT, "*", metric).places
    with pytest.raises(hl.NeverFired, match="unused"):
        hl.sweep(model, CLEAN, CORRUPT, "unused", metric)


def test_what_cannot_be_swept_is_refused_with_a_remedy():
    model = Mixer()
    with pytest.raises(hl.BatchError, match=r"one number\. It gave a Tensor of shape \(2, 9\)"):
        hl.sweep(model, CLEAN, CORRUPT, "head", lambda out: out)
    with pytest.raises(hl.BatchError, match=r"It gave a str\."):
        hl.sweep(model, CLEAN, CORRUPT, "head", lambda out: "much")
    with pytest.raises(hl.BatchError, match=r"\[7\] along dim=1 .* has the shape \(2, 4, 9\)"):
        hl.sweep(model, CLEAN, CORRUPT, "head", metric, positions=[7])
    with pytest.raises(hl.BatchError, match="dim=3"):
        hl.sweep(model, CLEAN, CORRUPT, "head", metric, positions="all", dim=3)
    with pytest.raises(hl.PlaceError, match="not parameters or gradients"):
        hl.sweep(model, CLEAN, CORRUPT, "head.weight", metric)
    with pytest.raises(hl.ChangeError, match=r"\(2, 3, 6\).*\(2, 4, 6\)"):
        hl.sweep(model, CLEAN[:, :3], CORRUPT, "embed", metric)
    with pytest.raises(hl.BatchError, match="The metric has no gradient"):
        hl.sweep(model, CLEAN, CORRUPT, "head", lambda out: metric(out).item(), approximate=True)
    with pytest.raises(hl.BatchError, match="of the same shape"):
        hl.sweep(model, CLEAN[:, :3], CORRUPT, "embed", metric, approximate=True)
    assert_clean(model)


class Repeats(nn.Module):
    """Calls its cell once for each token but three."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(ids.shape[1] - 3):
            x = self.cell(x)
        return x[:, -1]


SHORT, LONG = torch.tensor([[1, 2, 3, 4, 5]] * 2), torch.tensor([[1, 2, 3, 4, 5, 6]] * 2)


@pytest.mark.parametrize(("clean", "corrupt"), [(SHORT, LONG), (LONG, SHORT)])
def test_batches_of_different_lengths_need_positions_that_both_have(clean, corrupt):
    model = Repeats()
    for positions in ("all", [-1], [5]):
        with pytest.raises(hl.BatchError, match=r"along dim=1 were asked for.*has the shape"):
            hl.sweep(model, clean, corrupt, "embed", torch.sum, positions=positions)
    found = hl.sweep(model, clean, corrupt, "embed", torch.sum, positions=[0, 4])
    for effect in found:
        expected = patched_by_hand(model, clean, corrupt, "embed", effect.position, torch.sum)
        assert effect.value == pytest.approx(expected, abs=1e-5)
    shapes = f"{(*clean.shape, 4)} and {(*corrupt.shape, 4)} at 'embed'"
    assert found.notes == [f"clean and corrupt values differ in shape: {shapes}"]


@pytest.mark.parametrize(("clean", "corrupt"), [(SHORT, LONG), (LONG, SHORT)])
def test_other_changes_are_made_at_the_positions_of_the_corrupt_batch(clean, corrupt):
    where = ["embed", "cell"]
    found = hl.sweep(Repeats(), clean, corrupt, where, torch.sum, change=hl.zero(), positions="all")
    assert found.positions == list(range(corrupt.shape[1]))
    assert not found.notes


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize(("clean", "corrupt"), [(SHORT, LONG), (LONG, SHORT)])
def test_a_place_must_have_as_many_calls_in_both_runs(clean, corrupt, approximate):
    calls = f"{clean.shape[1] - 3} times in the clean run, {corrupt.shape[1] - 3} times"
    with pytest.raises(hl.BatchError, match=f"'cell' was to be put in. It was called {calls}"):
        hl.sweep(
            Repeats(), clean, corrupt, "cell", torch.sum, positions=[0], approximate=approximate
        )


@pytest.mark.parametrize("approximate", [False, True])
def test_a_place_that_the_corrupt_batch_does_not_reach_is_told(approximate):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.up, self.down = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            return self.stem(self.up(x) if x.sum() > 0 else self.down(x))

    model, x = Either(), torch.ones(1, 2)
    with pytest.raises(hl.BatchError, match=r"at 'up' were.*and not in the corrupt one"):
        hl.sweep(model, x, -x, "*", torch.sum, approximate=approximate)
    assert_clean(model)
    found = hl.sweep(model, x, -x, "stem", torch.sum, approximate=approximate)
    assert found["stem"].value == pytest.approx(found.clean, abs=1e-4)


def test_a_metric_that_is_not_finite_hides_nothing_and_is_plain_data():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    clean, corrupt = torch.tensor([[4.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    found = hl.sweep(
        model, clean, corrupt, "0", lambda y: (y[0, 0] - 2).sqrt() + y[0, 1], positions="all"
    )
    assert found.to_dict()["corrupt"] is None
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["effects"][0]["change"] is None
    found.rows[1].change = 3.0
    assert found.best.position == 1


def test_a_clean_batch_of_one_is_put_into_all_samples_and_that_is_told():
    found = hl.sweep(Mixer(), CLEAN[:1], CORRUPT, "head", metric)
    assert found["head"].share == pytest.approx(1)
    assert found.notes == [
        "clean and corrupt values differ in shape: (1, 4, 9) and (2, 4, 9) at 'head'"
    ]


def test_a_function_must_give_a_value_like_the_one_it_was_given():
    for change, told in [(lambda v: None, "returned None"), (lambda v: v[:1], "now")]:
        with pytest.raises(hl.ChangeError, match=told):
            hl.sweep(Mixer(), CLEAN, CORRUPT, "head", metric, change=change)
    with pytest.raises(hl.ChangeError, match="was given as a change"):
        hl.sweep(Mixer(), CLEAN, CORRUPT, "head", metric, change="zero")


def test_a_metric_may_give_a_number_of_numpy():
    model = Mixer()
    plain = hl.sweep(model, CLEAN, CORRUPT, "head", metric)
    array = hl.sweep(model, CLEAN, CORRUPT, "head", lambda out: metric(out).numpy())
    scalar = hl.sweep(model, CLEAN, CORRUPT, "head", lambda out: np.float32(metric(out)))
    assert plain.rows == array.rows == scalar.rows
    with pytest.raises(hl.BatchError, match=r"It gave a ndarray of shape \(2,\)"):
        hl.sweep(Mixer(), CLEAN, CORRUPT, "head", lambda out: out[:, 0].numpy())


@pytest.mark.parametrize("approximate", [False, True])
def test_the_model_is_as_before(approximate):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model[2].eval()
    grad = model[0].weight.grad = torch.ones(3, 3)
    state, random = state_bits(model), torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    clean, corrupt = (torch.randn(4, 3, generator=torch.Generator()) for _ in range(2))
    hl.sweep(model, clean, corrupt, "0", torch.sum, approximate=approximate)
    assert_clean(model)
    assert_same_state(model, state)
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in model.modules()] == modes
    assert model[0].weight.grad is grad
    assert bool((grad == 1).all())
    assert model[3].weight.grad is None


def test_dropout_draws_the_same_numbers_in_every_run():
    model = nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Identity())
    clean, corrupt = torch.randn(2, 3), torch.randn(2, 3)
    found = hl.sweep(model, clean, clean, "*", torch.sum)
    assert found.matrix.abs().max() < 1e-5  # nothing differs
    found = hl.sweep(model, clean, corrupt, "2", torch.sum)
    assert found["2"].value == pytest.approx(found.clean, abs=1e-4)


def test_progress_is_told_or_drawn(capsys):
    told = []
    model = Mixer()
    hl.sweep(
        model, CLEAN, CORRUPT, "blocks.*", metric, batch_size=2, progress=lambda *n: told.append(n)
    )
    assert told == [(2, 3), (3, 3)]
    hl.sweep(model, CLEAN, CORRUPT, "blocks.*", metric, progress=False)
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_no_bar(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    assert len(hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric)) == 3


def test_a_sweep_is_shown_and_is_plain_data():
    found = hl.sweep(Mixer(), CLEAN, CORRUPT, "blocks.*", metric, positions="all")
    content = found.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["positions"] == [0, 1, 2, 3]
    assert len(content["effects"]) == 12
    frame = found.to_pandas()
    assert list(frame.columns) == ["place", "position", "value", "change", "share"]
    assert frame.pivot(index="place", columns="position", values="change").shape == (3, 4)
    assert "Sweep over 3 places × 4 positions" in str(found)
    assert "<table>" in found._repr_html_()
    assert max(map(len, found.show(width=60).splitlines())) <= 60
    with pytest.raises(hl.NotCaptured, match="12 results"):
        found["blocks.0"]
    same = hl.sweep(Mixer(), CLEAN, CLEAN, "blocks.0", metric)
    assert same["blocks.0"].share is None
    assert same.shares.isnan().all()


def test_of_many_effects_the_largest_are_shown():
    model = nn.Sequential(*[nn.Identity() for _ in range(70)])
    found = hl.sweep(model, torch.ones(1, 2), torch.zeros(1, 2), "*", torch.sum)
    assert "the 60 largest changes of 70; all are in sweep.rows" in str(found)


def test_the_largest_effects_are_shown_also_where_some_are_nan():
    found = Sweep(1.0, 0.0, approximate=False)
    for n in range(100):
        found.add(f"layers.{n}", None, float("nan") if n % 10 == 3 else float(n * 37 % 100))
    changes = [line.split()[2] for line in found.show().splitlines()[2:62]]
    largest = sorted([row.change for row in found if row.change == row.change], reverse=True)[:60]
    assert changes == [f"{change:.3g}" for change in largest]


def test_a_place_that_not_every_call_has_is_told_with_the_reason():
    class Varied(nn.Module):
        def forward(self, x, whole):
            return x if whole else (x,)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Varied()

        def forward(self, x):
            return self.inner(x, True) + self.inner(x, False)[0]

    x = torch.ones(1, 2)
    with pytest.raises(hl.NotCaptured, match=r"'inner\[0\]' was asked for: the value is a tensor"):
        hl.sweep(Model(), x, 0 * x, where="inner[0]", metric=torch.sum)


def test_batches_of_two_shapes_are_told_as_such():
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(hl.ChangeError) as caught:
        hl.sweep(model, torch.zeros(4, 2), torch.ones(3, 2), "*", torch.mean)
    assert "'0'" in caught.value.asked
    assert "(4, 3), here (3, 3)" in caught.value.found
    assert "one shape" in caught.value.remedy
