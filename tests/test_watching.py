"""watch: what is measured, which steps count, and a training that is left unchanged."""

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import assert_clean, hooks_left, same_tensors
from torch import nn
from torch.nn import functional as F
from trainings import assert_measured, fresh, labelled_batch, train

import hookline as hl

# -- what is measured -----------------------------------------------------------------------------


def test_all_is_measured_as_plain_hooks_see_it():
    model, optimizer = fresh()
    outputs, grads = {}, {}
    handles = []
    for name, module in model.named_children():

        def seen(module, args, output, name=name):
            outputs[name] = output.detach().clone()
            output.grad_fn  # noqa: B018 - registering on a view may crash without
            output.register_hook(lambda grad: grads.__setitem__(name, grad.clone()))

        if name not in ("norm",):  # its output is changed in place
            handles.append(module.register_forward_hook(seen))
    found = []
    with hl.watch(model, every=1, optimizer=optimizer, to=found.append) as watching:
        for step in range(4):
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            raw = {}

            def keep(step, raw=raw):
                raw.update({n: p.grad.clone() for n, p in model.named_parameters()})

            train(model, optimizer, 1, after=keep, first=step)
            measured = found[-1]
            assert measured.step == step
            for name, value in outputs.items():
                assert_measured(measured, name, "output", value)
                assert_measured(measured, name, "grad", grads[name])
            for name, parameter in model.named_parameters():
                assert_measured(measured, name, "weight", parameter)
                assert_measured(measured, name, "weight_grad", raw[name])
                update = parameter.detach() - weights[name]
                assert_measured(measured, name, "update", update)
                ratio = update.norm() / weights[name].norm() if weights[name].any() else math.nan
                assert measured[name, "update"]["ratio"] == pytest.approx(
                    float(ratio), rel=1e-4, nan_ok=True
                )
    for handle in handles:
        handle.remove()
    assert watching.steps == 4
    assert [row.place for row in found[0].rows if row.kind == "output"] == [
        "first", "norm", "act", "drop", "last",
    ]  # fmt: skip
    assert "gain" in [row.place for row in found[0].rows if row.kind == "weight"]
    assert_clean(model)


def test_units_that_are_zero_for_every_example_are_dead():
    model, optimizer = fresh()
    with torch.no_grad():
        model.norm.bias[:2] = -100
    with hl.watch(model, "act", every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    assert watching.last["act", "output"]["dead"] == 0.25
    assert math.isnan(watching.last["act", "output"]["saturated"])


def test_channels_are_the_units_of_images():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[0].bias[1:] = -100
    with hl.watch(model, every=1) as watching:
        model(torch.randn(5, 1, 6, 6)).sum().backward()
        watching.step()
    assert watching.last["1", "output"]["dead"] == 0.75


@pytest.mark.parametrize("act", [nn.ReLU(), nn.PReLU(8, 0.0), nn.Dropout(0.0)])
def test_channels_are_the_units_of_activations_behind_a_convolution_over_time(act):
    model = nn.Sequential(nn.Conv1d(1, 8, 3), act, nn.Conv1d(8, 1, 3))
    with torch.no_grad():
        model[0].weight.fill_(1), model[0].bias.zero_()
        model[0].weight[:6], model[0].bias[:6] = 0, -1.0 * (not isinstance(act, nn.Dropout))
    with hl.watch(model, every=1) as watching:
        model(torch.rand(4, 1, 12)).sum().backward()
        watching.step()
    assert watching.last["1", "output"]["dead"] == 0.75
    assert watching.last["0", "grad"]["dead"] == (0 if isinstance(act, nn.Dropout) else 0.75)


class Turned(nn.Module):
    """Puts the channels of what a convolution gives last."""

    def forward(self, x):
        return x.transpose(1, 2)


class Calling(nn.Module):
    """A function between a convolution and an activation."""

    def __init__(self, function, act):
        super().__init__()
        self.conv, self.act, self.function = nn.Conv1d(1, 8, 3), act, function

    def forward(self, x):
        return self.act(self.function(self.conv(x))) + 0


@pytest.mark.parametrize("length", [10, 12])
@pytest.mark.parametrize("kinds", [("output", "grad"), ("grad",), ("output",)])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Conv1d(1, 8, 3), Turned(), nn.ReLU(), nn.Identity()), "2"),
        (lambda: Calling(lambda x: x.transpose(1, 2), nn.ReLU()), "act"),
        (lambda: Calling(lambda x: x * 2 + x, nn.ReLU()), "act"),
        (
            lambda: Calling(lambda x: x, nn.Sequential(nn.Dropout(0.0), nn.ReLU(inplace=True))),
            "act.1",
        ),
    ],
)
def test_the_units_of_an_activation_do_not_depend_on_the_length(make, name, kinds, length):
    model = make()
    conv = next(one for one in model.modules() if isinstance(one, nn.Conv1d))
    with torch.no_grad():
        conv.weight.fill_(1), conv.bias.zero_()
        conv.weight[:6], conv.bias[:6] = 0, -1.0
    with hl.watch(model, every=1, kinds=kinds) as watching:
        model(torch.rand(4, 1, length)).sum().backward()
        watching.step()
    conv = next(path for path, one in model.named_modules() if isinstance(one, nn.Conv1d))
    if "output" in kinds:
        assert watching.last[name, "output"]["dead"] == 0.75
    if "grad" in kinds:
        assert watching.last[conv, "grad"]["dead"] == 0.75


def test_the_gradients_of_an_activation_that_is_shared_have_the_units_of_each_call():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv1d(1, 8, 3), nn.ReLU()

        def forward(self, x):
            first = self.act(self.conv(x))
            return first, self.act(first.transpose(1, 2))

    model = Shared()
    kept = torch.zeros(8)
    kept[:2] = 1
    with hl.watch(model, "act", every=1) as watching:
        first, second = model(torch.rand(4, 1, 10))
        (first * kept[:, None]).sum().backward()
        watching.step()
    assert watching.last["act", "grad"]["dead"] == 0.75
    assert second.shape == first.shape


def test_features_are_the_units_of_activations_behind_a_layer_of_them():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.fill_(1), model[0].bias.zero_()
        model[0].weight[:6], model[0].bias[:6] = 0, -1
    with hl.watch(model, every=1) as watching:
        model(torch.rand(4, 8, 5)).sum().backward()
        watching.step()
    assert watching.last["1", "output"]["dead"] == 0.75


@pytest.mark.parametrize(
    ("act", "low", "high"), [(nn.Tanh(), -0.97, 0.97), (nn.Sigmoid(), 0.03, 0.97),
                             (nn.Hardtanh(-2, 2), -2, 2)]
)  # fmt: skip
def test_the_flat_ends_of_activations_are_counted(act, low, high):
    model = nn.Sequential(nn.Linear(4, 50), act, nn.Linear(50, 1))
    x = torch.randn(30, 4) * 8
    with hl.watch(model, every=1) as watching:
        model(x).sum().backward()
        watching.step()
    y = act(model[0](x))
    share = ((y <= low) | (y >= high)).double().mean().item()
    assert 0.01 < share < 1
    assert watching.last["1", "output"]["saturated"] == pytest.approx(share)


def test_histograms_are_of_all_values_if_they_are_few():
    model, optimizer = fresh()
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    last = watching.last
    for number, bins in last.histograms.items():
        row, values = last.rows[number], last[last.rows[number].place, last.rows[number].kind]
        assert bins.counts.sum() == math.prod(last.shapes[number]), row
        assert max(abs(bins.low), abs(bins.high)) == pytest.approx(values["absmax"], rel=1e-5)
    assert len(last.histograms) == len(last.rows)


def test_a_nested_output_is_measured_at_its_first_tensor():
    class Pair(nn.Module):
        def forward(self, x):
            return {"ids": torch.arange(3), "a": x * 2, "b": (x * 3,)}

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.pair = nn.Linear(2, 2), Pair()

        def forward(self, x):
            out = self.pair(self.inner(x))
            return out["a"].sum() + 5 * out["b"][0].sum()

    model, x = Outer(), torch.randn(4, 2)
    with hl.watch(model, ["pair", "pair[b][0]"], every=1) as watching:
        model(x).backward()
        watching.step()
    a = 2 * model.inner(x)
    assert_measured(watching.last, "pair", "output", a)
    assert_measured(watching.last, "pair", "grad", torch.ones(4, 2))
    assert_measured(watching.last, "pair[b][0]", "output", 1.5 * a)
    assert_measured(watching.last, "pair[b][0]", "grad", torch.full((4, 2), 5.0))


def test_a_shared_module_has_one_row_with_all_its_calls():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(3, 4)
    with hl.watch(model, every=1) as watching:
        model(x).sum().backward()
        watching.step()
    first = layer(x)
    assert_measured(watching.last, "0", "output", torch.cat([first, layer(first.tanh())]))
    places = [row.place for row in watching.last.rows if row.kind == "weight"]
    assert places == ["0.weight", "0.bias"]


def test_what_a_block_hands_on_is_measured_once_and_stands_at_both_places():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    from hookline.training import step_measurement as measurement

    counted, real = [], measurement.moments
    try:
        measurement.moments = lambda *args, **kwargs: (
            counted.append(1),
            real(*args, **kwargs),
        )[1]
        with hl.watch(model, every=1, kinds=("output", "grad")) as watching:
            model(torch.randn(5, 3)).sum().backward()
            watching.step()
    finally:
        measurement.moments = real
    for kind in ("output", "grad"):
        one, other = watching.last["0", kind], watching.last["0.1", kind]
        assert one == pytest.approx(other, rel=0, nan_ok=True)
    assert watching.last["0", "grad"]["norm"] > 0
    assert len(counted) == 6  # three layers, their outputs and gradients


def test_small_updates_of_double_precision_are_seen():
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-10)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        for step in range(4):
            before = model.weight.detach().clone()
            model(labelled_batch(step)[0].double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    update, found = model.weight.detach() - before, watching.last["weight", "update"]
    assert found["norm"] == pytest.approx(update.norm().item(), rel=1e-5)
    assert found["ratio"] == pytest.approx((update.norm() / before.norm()).item(), rel=1e-5)
    assert found["zeros"] == 0
    assert watching.findings() == []


def test_sparse_gradients_are_those_of_the_rows_that_were_used():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()
    assert watching.last["0.weight", "weight_grad"]["norm"] == pytest.approx(
        model[0].weight.grad.to_dense().norm().item()
    )


def test_lazy_modules_are_measured_once_they_are_there():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))
    with hl.watch(model, every=1) as watching:
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
            watching.step()
    assert watching.last["0.weight", "weight_grad"]["norm"] > 0
    assert watching.last["0.weight", "weight"]["norm"] > 0


def test_kinds_and_places_limit_what_is_measured():
    model, optimizer = fresh()
    with hl.watch(
        model, [nn.Linear, "gain"], every=1, kinds=("output", "update"), optimizer=optimizer
    ) as watching:
        train(model, optimizer, 1)
    assert [(row.place, row.kind) for row in watching.last.rows] == [
        ("gain", "update"), ("first", "output"), ("first.weight", "update"),
        ("first.bias", "update"), ("last", "output"), ("last.weight", "update"),
        ("last.bias", "update"),
    ]  # fmt: skip


@pytest.mark.parametrize("kinds", [("weight",), ("update",), ("weight_grad",), ("grad",), "weight"])
def test_a_single_kind_can_be_measured(kinds):
    model, optimizer = fresh()
    with hl.watch(model, every=1, kinds=kinds, optimizer=optimizer) as watching:
        train(model, optimizer, 2)
    assert {row.kind for row in watching.last.rows} == {"".join(kinds)}
    assert all(watching.last[row.place, row.kind]["norm"] > 0 for row in watching.last.rows)
    assert_clean(model)


def test_a_place_is_named_by_any_of_its_names():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model[0])
    with hl.watch(model, ["again", model[0], "again.weight"], every=1) as watching:
        model(torch.ones(3, 2)).sum().backward()
        watching.step()
    assert {row.place for row in watching.last.rows} == {"0", "0.weight", "0.bias"}


def test_a_module_of_the_users_that_calls_its_only_child_module_is_part_of_the_model():
    class Around(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x).square()

    for wrap in (nn.Sequential, nn.DataParallel):
        model = Around(nn.Linear(2, 1))
        with hl.watch(wrap(model), every=1) as watching:
            model(torch.ones(1, 2)).sum().backward()
            watching.step()
        kept = "0." if wrap is nn.Sequential else ""
        assert watching.last[f"{kept}module", "output"]["norm"] > 0


def test_a_training_goes_on_when_its_run_directory_is_removed(tmp_path, caplog):
    model = nn.Linear(2, 1)
    with hl.watch(model, every=1, to=tmp_path / "run") as watching:
        shutil.rmtree(tmp_path / "run")
        watching.log(loss=1.0)  # the first: its file would have to be made
        model(torch.ones(1, 2)).sum().backward()
        watching.step()
    assert watching.last.step == 0
    assert "watch has stopped to write" in caplog.text
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not any(str(tmp_path) in file for file in files)


@pytest.mark.parametrize("to", ["run", "run.jsonl"])
def test_what_is_written_stays_together_when_the_process_goes_to_another_directory(
    to, tmp_path, monkeypatch
):
    def run(away):
        home, elsewhere = tmp_path / f"home {away}", tmp_path / "elsewhere"
        for folder in (home, elsewhere):
            folder.mkdir(exist_ok=True)
        monkeypatch.chdir(home)
        model, optimizer = fresh()
        with hl.watch(model, every=1, optimizer=optimizer, to=to) as watching:
            if away:
                monkeypatch.chdir(elsewhere)
            train(model, optimizer, 2)
            watching.log(loss=1.0)
        assert not [*elsewhere.iterdir()]
        return {path.relative_to(home): path.stat().st_size > 0 for path in home.rglob("*")}

    assert run(True) == run(False)


@pytest.mark.parametrize("to", ["file/run", "file/run.jsonl"])
def test_a_place_that_cannot_be_written_to_is_told_at_once(tmp_path, to):
    (tmp_path / "file").write_text("")
    with pytest.raises(hl.RunError, match=r"to be written to .*Name a"):
        with hl.watch(nn.Linear(2, 1), to=tmp_path / to):
            pass


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.ones(6, 6)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(6))})
        self.spare = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(6))])])

    def forward(self, x):
        for weight in self.several:
            x = x @ weight
        return (x + self.named["shift"]) * self.spare[0][0]


@pytest.mark.parametrize("nested", [False, True])
def test_parameters_in_lists_and_dicts_belong_to_the_module_that_holds_them(nested):
    lists = Lists()
    model = nn.Sequential(nn.Linear(6, 6), lists) if nested else lists
    start = "1." if nested else ""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for where in ("**", "1") if nested else ("**", ""):
        with hl.watch(model, where, every=1, optimizer=optimizer) as watching:
            model(labelled_batch(0)[0]).sum().backward()
            expected = {name: p.grad.norm().item() for name, p in lists.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        rows = [row.place for row in watching.last.rows if row.kind == "weight_grad"]
        names = ["several.0", "several.1", "named.shift", "spare.0.0"]
        own = ["0.weight", "0.bias"] if nested and where == "**" else []
        assert rows == [*own, *(start + name for name in names)]
        for name in names:
            found = watching.last[start + name, "weight_grad"]["norm"]
            assert found == pytest.approx(expected[name])


def test_frozen_parameters_have_no_rows():
    model, optimizer = fresh()
    model.first.requires_grad_(False)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    places = {row.place for row in watching.last.rows}
    assert "first" in places
    assert "first.weight" not in places


# -- nothing changes ------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_the_training_is_the_same_bit_for_bit(every, tmp_path):
    model, optimizer = fresh()
    expected = train(model, optimizer, 7)
    state = torch.get_rng_state()
    model, optimizer = fresh()
    model.drop.eval()
    model.drop.train()
    modes = [m.training for m in model.modules()]
    python, numbers = random.getstate(), np.random.get_state()[1].tolist()
    with hl.watch(model, every=every, optimizer=optimizer, to=tmp_path / "run"):
        found = train(model, optimizer, 7)
    assert same_tensors(found, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numbers
    assert_clean(model)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert all(not (p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def test_between_measured_steps_the_model_has_one_hook_that_does_nothing():
    model, optimizer = fresh()
    counts = []
    with hl.watch(model, every=3, optimizer=optimizer):
        for step in range(7):
            grads = [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {})]
            counts.append((len(hooks_left(model)), len(grads)))
            train(model, optimizer, 1, first=step)
    assert [hooks == 1 for hooks, _ in counts] == [False, True, True] * 2 + [False]
    assert [grads for _, grads in counts] == [7, 0, 0, 7, 0, 0, 7]


def test_an_exception_leaves_nothing_behind():
    model, optimizer = fresh()
    with pytest.raises(IndexError), hl.watch(model, every=1, optimizer=optimizer):
        F.cross_entropy(model(labelled_batch(0)[0]), torch.full((16,), 9)).backward()
    assert_clean(model)
    assert not optimizer._optimizer_step_post_hooks


def test_attaching_and_removing():
    model, optimizer = fresh()
    handle = hl.watch(model, every=2, optimizer=optimizer).attach()
    assert handle in hl.attached(model)
    train(model, optimizer, 3)
    assert handle.last.step == 2
    handle.remove()
    handle.remove()
    assert not hl.attached(model)
    assert_clean(model)
    train(model, optimizer, 3)
    assert handle.steps == 3


def test_entering_again_starts_afresh():
    model, optimizer = fresh()
    watching = hl.watch(model, every=1, optimizer=optimizer)
    for _ in range(2):
        with watching:
            train(model, optimizer, 2)
        assert watching.steps == 2


def test_a_watch_that_is_never_entered_warns():
    with pytest.warns(hl.HooklineWarning, match="never entered"):
        hl.watch(nn.Linear(1, 1))


# -- steps ----------------------------------------------------------------------------------------


def test_the_optimizer_of_the_model_is_found():
    model, optimizer = fresh()
    other = nn.Linear(2, 2)
    strange = torch.optim.SGD(other.parameters(), 0.1)
    steps = []
    with hl.watch(model, every=2, to=lambda measured: steps.append(measured.step)) as watching:
        for step in range(4):
            other(torch.randn(1, 2)).sum().backward()
            strange.step()
            train(model, optimizer, 1, first=step)
    assert steps == [0, 2]
    assert watching.steps == 4
    from torch.optim import optimizer as module

    assert not module._global_optimizer_post_hooks


def test_steps_go_on_when_all_parameters_are_exchanged():
    model, optimizer = fresh()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with hl.watch(model, every=2) as watching:
        train(model, optimizer, 3)
        model.load_state_dict(state, assign=True)  # other objects, and an optimizer for them
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, 2, first=3)
    assert watching.steps == 5
    assert_measured(watching.last, "last.weight", "weight", model.last.weight)


def test_of_two_optimizers_the_first_counts_and_updates_of_both_are_seen():
    model, _ = fresh()
    one = torch.optim.SGD(model.first.parameters(), 0.1)
    two = torch.optim.SGD([*model.last.parameters(), *model.norm.parameters(), model.gain], 0.1)
    with hl.watch(model, every=1) as watching:
        for step in range(3):
            x, y = labelled_batch(step)
            F.cross_entropy(model(x), y).backward()
            one.step()
            two.step()
            model.zero_grad()
    assert watching.steps == 3
    assert watching.last["first.weight", "update"]["ratio"] > 0
    assert watching.last["last.weight", "update"]["ratio"] > 0


def test_steps_by_hand_count_alone_from_the_first_on():
    model, optimizer = fresh()
    with hl.watch(model, every=1) as watching:
        for step in range(3):
            train(model, optimizer, 1, first=step)
            watching.step()
            assert watching.last.step == step
    assert watching.steps == 3
    with hl.watch(model, every=1) as watching:
        for _ in range(3):
            model(labelled_batch(0)[0]).sum().backward()
            watching.step()
    assert watching.steps == 3


@pytest.mark.parametrize("by_hand", [False, True])
def test_optimizers_that_step_in_the_backward_are_measured(by_hand):
    """One for each parameter, which lets the gradient go at once, to save memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    expected = {}

    def step(parameter):
        expected[parameter] = parameter.grad.norm().item()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with hl.watch(model, every=1) as watching:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            if by_hand:
                watching.step()
    assert (watching.steps, watching.last.step) == (5, 4)
    for name, parameter in model.named_parameters():
        found = watching.last[name, "weight_grad"]["norm"]
        assert found == pytest.approx(expected[parameter], rel=1e-5)
        assert watching.last[name, "update"]["norm"] == pytest.approx(0.1 * found, rel=1e-3)
    assert watching.last["0", "grad"]["norm"] > 0
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_closure_runs_inside_the_step():
    model, _ = fresh()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        x, y = labelled_batch(0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        optimizer.step(closure)
    assert watching.last["first", "output"]["norm"] > 0
    assert watching.last["first.weight", "weight_grad"]["norm"] > 0
    assert watching.last["first.weight", "update"]["ratio"] > 0


def test_a_training_that_is_gone_on_with_has_the_numbers_of_its_steps(tmp_path):
    model, optimizer = fresh()
    for start in (0, 4):
        with hl.watch(model, every=2, optimizer=optimizer, to=tmp_path, start=start) as watching:
            train(model, optimizer, 6)
            assert watching.steps == start + 6
    run = hl.Run(tmp_path)
    assert run.segments == [0, 1]
    assert run.steps().tolist() == [0, 2, 4, 6, 8]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_model_with_a_scripted_module_is_watched():
    model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 2)
    assert watching.last["1", "output"]["norm"] > 0


def test_an_output_that_torch_lets_nobody_use_disturbs_no_training():
    class Parts(nn.Module):
        def forward(self, x):
            made = x * 3
            part, _ = made.chunk(2, 1)
            return part, made.mul_(2)  # torch raises where the chunk is used

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(6, 3), Parts()

        def forward(self, x):
            return self.parts(self.first(x))[1]

    bare, own = fresh(make=Net)
    expected = train(bare, own, 2)
    model, optimizer = fresh(make=Net)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        assert same_tensors(train(model, optimizer, 2), expected)
    assert watching.last["parts", "output"]["norm"] > 0


def test_steps_may_be_numbers_of_numpy(tmp_path):
    model, optimizer = fresh()
    options = {"every": np.int64(2), "start": np.int64(4), "optimizer": optimizer}
    to = [tmp_path / "run", tmp_path / "run.jsonl"]
    with hl.watch(model, to=to, **options) as watching:
        watching.log(np.int64(3), loss=np.float32(1.5))
        train(model, optimizer, 3)
    assert watching.steps == 7
    run = hl.Run(tmp_path / "run")
    assert run.steps().tolist() == [4, 6]
    assert run.scalars("loss")[0].tolist() == [3]
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])["step"] == 3


def test_no_step_at_all_is_warned_of():
    model, _ = fresh()
    with pytest.warns(hl.HooklineWarning, match=r"saw no step.*step\(\)"), hl.watch(model):
        model(labelled_batch(0)[0]).sum().backward()


def test_a_named_place_where_nothing_happens_is_warned_of():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watching = hl.watch(model, ["0", "1"], every=1, kinds=("output",))
    watching.__enter__()
    model[0](torch.ones(1, 2)).sum().backward()
    watching.step()
    with pytest.warns(hl.HooklineWarning, match="Nothing was measured at '1'"):
        watching.__exit__(None, None, None)


def test_forwards_of_an_evaluation_are_not_measured():
    model, optimizer = fresh()
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
        expected = []
        for step in (1, 2):
            model.eval()
            with torch.no_grad():
                model(1000 + labelled_batch(9)[0])
            model.train()
            with hl.capture(model, "last", detach=True) as record:
                train(model, optimizer, 1, first=step)
            expected.append(record["last"])
            assert_measured(watching.last, "last", "output", expected[-1])


def test_a_model_that_is_trained_in_evaluation_mode_is_measured():
    model, optimizer = fresh()
    model.eval()
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    assert watching.last["last", "output"]["norm"] > 0
