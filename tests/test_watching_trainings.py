"""watch in real trainings: micro-batches, clipping, scalers, wrappers, compiled models."""

import math

import accelerate
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from models import NormDropoutResidual
from oracles import assert_clean
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainings import OptimizerWrapper, assert_measured, fresh, labelled_batch, train

import hookline as hl


def test_micro_batches_are_put_together_and_gradients_are_the_accumulated_ones():
    model, optimizer = fresh()
    model.drop.p = 0.0
    model.norm.eval()
    raw = {}

    def keep(step):
        raw.update({n: p.grad.clone() for n, p in model.named_parameters()})

    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        with hl.capture(model, "first", "first:grad_output", detach=True) as record:
            train(model, optimizer, 1, parts=4, after=keep)
    assert_measured(watching.last, "first", "output", record.cat("first", 0))
    assert_measured(watching.last, "first", "grad", record.cat("first:grad_output", 0))
    for name, grad in raw.items():
        assert_measured(watching.last, name, "weight_grad", grad)
    assert watching.last["first", "output"]["norm"] > 0


def test_gradients_are_measured_before_they_are_clipped():
    model, optimizer = fresh()
    raw = {}

    def clip(step):
        raw.update({n: p.grad.clone() for n, p in model.named_parameters()})
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1, after=clip)
    assert_measured(watching.last, "last.weight", "weight_grad", raw["last.weight"])
    assert watching.last["last.weight", "update"]["norm"] < 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_are_measured_once(reentrant):
    class Checkpointed(NormDropoutResidual):
        def forward(self, x):
            x = x.requires_grad_()
            h = checkpoint(lambda x: self.act(self.norm(self.first(x))), x, use_reentrant=reentrant)
            return self.last(h * self.gain)

    model, optimizer = fresh(make=Checkpointed)
    with hl.watch(model, every=1, optimizer=optimizer) as watching:
        raw = {}
        with hl.capture(model, "first", "last:grad_output", "first:grad_output", detach=True) as r:
            train(model, optimizer, 1, after=lambda step: raw.update(
                {n: p.grad.clone() for n, p in model.named_parameters()}))  # fmt: skip
    assert_measured(watching.last, "first", "output", r["first"])
    assert_measured(watching.last, "first", "grad", r["first:grad_output"])
    for name, grad in raw.items():
        assert_measured(watching.last, name, "weight_grad", grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_a_scaler_gradients_are_those_without_it(dtype):
    def run(scaler):
        model, optimizer = fresh()
        found = []
        with hl.watch(
            model, every=1, optimizer=optimizer, scaler=scaler, to=found.append
        ) as watching:
            for step in range(3):
                x, y = labelled_batch(step)
                with torch.autocast("cpu", dtype):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert watching.findings() == []
        return found

    plain = run(torch.amp.GradScaler("cpu", enabled=False))
    scaled = run(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for one, other in zip(plain, scaled, strict=True):
        for place, kind in (
            ("first", "grad"), ("last", "grad"), ("first.weight", "weight_grad"),
            ("last", "output"), ("gain", "weight_grad"),
        ):  # fmt: skip
            for name in ("std", "absmax", "norm"):
                a, b = one[place, kind][name], other[place, kind][name]
                assert a == pytest.approx(b, rel=0.05), (place, kind, name)


def test_a_backward_that_overflows_is_left_out():
    model, optimizer = fresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-60)
    found = []
    with hl.watch(model, every=1, optimizer=optimizer, scaler=scaler, to=found.append) as watching:
        for step in range(3):
            x, y = labelled_batch(step)
            loss = F.cross_entropy(model(x), y) * (1e30 if step == 0 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [measured.step for measured in found] == [0, 1]  # the first was skipped by the scaler
    assert found[0]["first", "grad"]["nonfinite"] == 0
    assert 0 < found[0]["first.weight", "weight_grad"]["norm"] < 1e3
    assert watching.findings() == []


class Disguised(torch.optim.Optimizer):
    """A wrapper that is an optimizer by name, without any of what torch's have."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    step, zero_grad = OptimizerWrapper.step, OptimizerWrapper.zero_grad


WRAPPERS = {
    "accelerate": lambda optimizer: accelerate.Accelerator(cpu=True).prepare(optimizer),
    "accelerate, scaled": lambda optimizer: accelerate.optimizer.AcceleratedOptimizer(
        optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)
    ),
    "Lightning": LightningOptimizer,
    "plain": OptimizerWrapper,
    "disguised": Disguised,
    "two": lambda optimizer: OptimizerWrapper(Disguised(optimizer)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_steps_of_a_wrapped_optimizer_are_counted(wrap):
    model, optimizer = fresh()
    expected = []
    with hl.watch(model, every=1, optimizer=optimizer, to=expected.append):
        train(model, optimizer, 3)
    model, optimizer = fresh()
    found, wrapped = [], wrap(optimizer)
    with hl.watch(model, every=1, optimizer=wrapped, to=found.append) as watching:
        # Lightning's own has a strategy make the step.
        train(model, optimizer if isinstance(wrapped, LightningOptimizer) else wrapped, 3)
    assert watching.steps == 3
    updates = [[m["last.weight", "update"] for m in told] for told in (found, expected)]
    assert str(updates[0]) == str(updates[1])
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("given", [True, False])
def test_the_steps_that_accelerate_leaves_out_are_not_counted(given):
    model, optimizer = fresh()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = accelerator.prepare(optimizer)
    try:
        found = []
        with hl.watch(
            model, every=1, optimizer=optimizer if given else None, to=found.append
        ) as watching:
            for step in range(8):
                with accelerator.accumulate(model):
                    x, y = labelled_batch(step)
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        accelerator.gradient_state._reset_state()
    assert watching.steps == len(found) == 2
    model, optimizer = fresh()
    for step in range(4):
        x, y = labelled_batch(step)
        (F.cross_entropy(model(x), y) / 4).backward()
    assert_measured(found[0], "last.weight", "weight_grad", model.last.weight.grad)


def test_the_scaler_of_a_wrapped_optimizer_need_not_be_given():
    def run(wrap):
        model, optimizer = fresh()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-60)
        found, given = [], wrap(optimizer, scaler)
        with hl.watch(model, every=1, to=found.append, **given) as watching:
            for step in range(4):
                x, y = labelled_batch(step)
                scaler.scale(F.cross_entropy(model(x), y) * 2.0**40).backward()
                if "scaler" in given:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    given["optimizer"].step()
                optimizer.zero_grad()
        return watching.steps, [m["last.weight", "weight_grad"] for m in found]

    def prepared(optimizer, scaler):
        return {"optimizer": accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)}

    steps, grads = run(prepared)
    expected = run(lambda optimizer, scaler: {"optimizer": optimizer, "scaler": scaler})
    assert (steps, str(grads)) == (expected[0], str(expected[1]))
    assert steps == 2  # the others have overflowed


def test_a_scaler_that_skips_every_step_is_told_of():
    model, optimizer = fresh()
    scaler = torch.amp.GradScaler("cpu")
    with hl.watch(model, every=1, optimizer=optimizer, scaler=scaler) as watching:
        for step in range(25):
            x, y = labelled_batch(step)
            scaler.scale(F.cross_entropy(model(x), y) * math.nan).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        (finding,) = watching.findings()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
    assert finding.kind == "non-finite values"
    assert finding.severity == "error"
    assert finding.evidence["backwards"] == 20


def test_compiled_models_run_compiled_between_the_measured_steps():
    model, optimizer = fresh()
    calls = []

    def backend(graph, inputs):
        return lambda *args: (calls.append(1), graph.forward(*args))[1]

    compiled = torch.compile(model, backend=backend)
    counts = []
    with hl.watch(compiled, every=3, optimizer=optimizer) as watching:
        for step in range(6):
            before = len(calls)
            train(compiled, optimizer, 1, first=step)
            counts.append(len(calls) - before)
    assert [count > 0 for count in counts] == [False, True, True, False, True, True]
    assert watching.last.step == 3
    assert watching.last["first", "output"]["norm"] > 0
    assert "first" in [row.place for row in watching.last.rows]  # without _orig_mod
    torch._dynamo.reset()


def test_a_watched_model_can_be_copied_and_saved(tmp_path):
    import copy

    model, optimizer = fresh()
    with hl.watch(model, every=1, optimizer=optimizer):
        other = copy.deepcopy(model)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        train(model, optimizer, 1)
        other(labelled_batch(0)[0])
    assert_clean(model)
    assert_clean(other)
