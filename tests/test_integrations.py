"""Inside other libraries: real trainings, and files that are read back."""

import json
import math
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import assert_clean
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

# What these libraries warn of is theirs: missing workers, loggers, deprecated calls of their own.
pytestmark = pytest.mark.filterwarnings("ignore")


def labelled_data(count=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return x, (x.sum(1) > 0).long()


# -- TensorBoard and wandb -------------------------------------------------------------------------


def small_training(to, steps=4, illness=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = labelled_data()
    found = []
    with hl.watch(model, every=2, optimizer=optimizer, to=[*to, found.append]) as watching:
        for step in range(steps):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            watching.log(loss=loss)
            if illness and step == steps - 2:
                with torch.no_grad():
                    model[0].weight[0, 0] = math.nan
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_tensorboard_files_hold_what_was_measured(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from hookline.integrations.tensorboard import TensorBoardWriter

    found = small_training([TensorBoardWriter(tmp_path, statistics=("std", "ratio"))], illness=True)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    scalars = events.Scalars("output std/1")
    assert [event.step for event in scalars] == [0, 2]
    assert scalars[0].value == pytest.approx(found[0]["1", "output"]["std"])
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3]
    assert "update ratio/0.weight" in events.Tags()["scalars"]
    assert "output ratio/1" not in events.Tags()["scalars"]
    histograms = events.Histograms("grad/0")
    assert [event.step for event in histograms] == [0, 2]
    value = histograms[0].histogram_value
    number = [(row.place, row.kind) for row in found[0].rows].index(("0", "grad"))
    bins = found[0].histograms[number]
    assert value.num == bins.counts.sum() == 48 * 8
    assert (value.min, value.max) == (pytest.approx(bins.low), pytest.approx(bins.high))
    # Reading back, TensorBoard leaves out empty bins at the ends.
    assert sum(value.bucket) == value.num
    assert max(value.bucket) == bins.counts.max()
    assert value.sum == pytest.approx(found[0]["0", "grad"]["mean"] * 384, rel=1e-4)
    assert any("findings" in tag for tag in events.Tags()["tensors"])


@pytest.mark.parametrize("at", ["step", "end"])
def test_a_full_disk_ends_the_writing_for_tensorboard_and_not_the_training(
    tmp_path, monkeypatch, caplog, at
):
    from torch.utils.tensorboard import SummaryWriter

    from hookline.integrations.tensorboard import TensorBoardWriter

    def full(self):
        raise OSError(28, "No space left on device")

    model, steps = nn.Linear(2, 1), []
    writers = [lambda m: steps.append(m.step), TensorBoardWriter(tmp_path / "logs")]
    with hl.watch(model, every=1, to=[*writers, tmp_path / "run.jsonl"]) as watching:
        for step in range(3):
            if step == 1 and at == "step":
                monkeypatch.setattr(SummaryWriter, "flush", full)
            model(torch.ones(3, 2)).sum().backward()
            watching.step()
        monkeypatch.setattr(SummaryWriter, "flush", full)
    assert steps == [0, 1, 2]
    told = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(told) == 1
    monkeypatch.undo()


def test_a_summary_writer_that_is_there_is_used_and_left_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    from hookline.integrations.tensorboard import TensorBoardWriter

    own = SummaryWriter(tmp_path)
    small_training([TensorBoardWriter(own)])
    own.add_scalar("mine", 1.0, 0)
    own.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert "mine" in tags
    assert "weight norm/0.weight" in tags


def wandb_records(content):
    """The records of a wandb file: LevelDB's log format behind 7 bytes of its own."""
    at, pieces = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header: the next block begins
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # it is being written
            return
        pieces += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def wandb_rows(folder):
    """The rows of the history in the file of an offline run, once wandb's process has ended it."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    until, kinds = time.monotonic() + 30, []
    while "exit" not in kinds and time.monotonic() < until:
        rows, kinds = [], []
        for content in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            kinds.append(record.WhichOneof("record_type"))
            items = record.history.item
            if items:
                names = [".".join(item.nested_key) or item.key for item in items]
                values = [json.loads(item.value_json) for item in items]
                rows.append(dict(zip(names, values, strict=True)))
        time.sleep(0.05)
    return rows


def test_an_offline_run_of_wandb_holds_what_was_measured(tmp_path, monkeypatch):
    import wandb

    from hookline.integrations.wandb import WandbWriter

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="hookline") as run:
        found = small_training([WandbWriter(run)])
        run.log({"mine": 1})
    rows = wandb_rows(tmp_path)
    measured = [row for row in rows if "output std/1" in row]
    assert [row["hookline/step"] for row in measured] == [0, 2]
    for row, one in zip(measured, found, strict=True):
        assert row["output std/1"] == pytest.approx(one["1", "output"]["std"])
        assert "output ratio/1" not in row
        number = [(r.place, r.kind) for r in one.rows].index(("0", "grad"))
        bins = one.histograms[number]
        assert row["grad/0._type"] == "histogram"
        assert row["grad/0.values"] == bins.counts.tolist()
        assert row["grad/0.bins"][0] == pytest.approx(bins.low)
        assert row["grad/0.bins"][-1] == pytest.approx(bins.high)
    assert len([row for row in rows if "loss" in row]) == 4
    assert any("mine" in row for row in rows)


def test_wandb_without_a_run_says_so():
    from hookline.integrations.wandb import WandbWriter

    with pytest.raises(RuntimeError, match=r"wandb\.init"):
        small_training([WandbWriter()])


# -- Lightning -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning():
    import lightning.pytorch

    return lightning.pytorch


def lit_model(lightning, clip=None, spoil=None):
    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
            self.grads = []
            self.outputs = []

        def training_step(self, batch, index):
            x, y = batch
            out = self.net(x)
            self.outputs.append(out.detach())
            loss = F.cross_entropy(out, y)
            if spoil is not None and index == spoil:
                loss = loss + (self.net[0].weight * 0).sum().log() * 0
            return loss

        def validation_step(self, batch, index):
            self.net(1000 + batch[0])

        def on_after_backward(self):
            self.grads.append(self.net[0].weight.grad.clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Lit()


def trainer(lightning, tmp_path, callbacks, **options):
    return lightning.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1, **options},
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
    )  # fmt: skip


def loader():
    return DataLoader(TensorDataset(*labelled_data()), batch_size=8)


@pytest.mark.parametrize("parts", [1, 2])
def test_lightning_trains_watched(lightning, tmp_path, parts):
    from hookline.integrations.lightning import WatchCallback

    model = lit_model(lightning)
    found = []
    callback = WatchCallback(every=2, to=[tmp_path / "run", found.append])
    options = {"gradient_clip_val": 1e-3, "accumulate_grad_batches": parts}
    trainer(lightning, tmp_path, [callback], **options).fit(model, loader(), loader())
    steps = 12 // parts
    run = hl.Run(tmp_path / "run")
    assert run.steps().tolist() == list(range(0, steps, 2))
    assert callback.watch.steps == steps
    for measured in found:
        last = (measured.step + 1) * parts - 1  # the gradient of the last micro-batch is the sum
        raw = model.grads[last].norm().item()
        assert measured["net.0.weight", "weight_grad"]["norm"] == pytest.approx(raw, rel=1e-4)
        assert measured["net.0.weight", "update"]["norm"] < 1.1e-4  # it was clipped
        outputs = torch.cat(model.outputs[last + 1 - parts : last + 1])
        assert measured["net.3", "output"]["norm"] == pytest.approx(outputs.norm().item(), rel=1e-4)
    assert len(run.scalars("loss")[0]) == steps
    assert callback.watch.findings() == []
    assert_clean(model)


def test_with_two_optimizers_of_lightning_a_step_is_a_batch(lightning, tmp_path):
    from hookline.integrations.lightning import WatchCallback

    class Two(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
            self.automatic_optimization = False

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.last(self.first(batch[0])), batch[1])
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.first, self.last)]

    measured = []
    callback = WatchCallback(every=1, to=lambda one: measured.append(one.step))
    fitting = trainer(lightning, tmp_path, [callback], max_epochs=1)
    fitting.fit(Two(), loader())
    assert fitting.global_step == 12
    assert callback.watch.steps == 6
    assert measured == list(range(6))


def test_lightning_trains_the_same_with_and_without(lightning, tmp_path):
    from hookline.integrations.lightning import GuardCallback, WatchCallback

    def weights(callbacks):
        model = lit_model(lightning)
        torch.manual_seed(7)
        trainer(lightning, tmp_path, callbacks).fit(model, loader())
        return [p.detach().clone() for p in model.parameters()]

    watched = weights([WatchCallback(every=1), GuardCallback(to=None)])
    for one, other in zip(weights([]), watched, strict=True):
        assert torch.equal(one, other)


def test_lightning_stops_at_a_bad_number_and_is_left_clean(lightning, tmp_path):
    from hookline.integrations.lightning import GuardCallback, WatchCallback

    model = lit_model(lightning)
    x, y = labelled_data()
    x[20] = math.inf
    bad = DataLoader(TensorDataset(x, y), batch_size=8)
    watching = WatchCallback(every=1)
    callbacks = [GuardCallback(to=None), watching]
    with pytest.raises(hl.NonFiniteError):
        trainer(lightning, tmp_path, callbacks).fit(model, bad)
    assert watching.watch.steps == 2  # the third batch is the bad one
    assert_clean(model)
    assert not hl.attached(model)


LIT_STEPS = {  # what makes the bad number, and what the guard is to say of it
    "own forward": (lambda lit, x: lit(x, 0), "operation", "/div"),
    "backward of the own forward": (lambda lit, x: lit(x, "root"), "operation", "/sqrt"),
    "a module in the own forward": (lambda lit, x: lit(x, 1e-36), "operation", "b/linear"),
    "a module that the step calls": (
        lambda lit, x: lit.b(lit.a(x) * 1e36), "operation", "b/linear",
    ),
    "the step between two modules": (
        lambda lit, x: lit.b(lit.a(x) / 0), "input", "b:inputs[input]",
    ),
    "own parameter": (lambda lit, x: lit(x, "own"), "operation", "/log"),
    "own parameter in the step": (lambda lit, x: (x @ lit.own).sqrt() + 1, "loss", ""),
}  # fmt: skip


def lit_steps(lightning, case):
    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
            self.own = nn.Parameter(torch.zeros(6, 2))
            self.b.weight.data *= 1e6

        def forward(self, x, how=1):
            if how == "own":
                return (x @ self.own).log()
            return self.b((self.a(x) * 0).sqrt() if how == "root" else self.a(x) / how)

        def training_step(self, batch, index):
            step = LIT_STEPS[case][0] if index == 2 else type(self).__call__
            return F.cross_entropy(step(self, batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    return Lit()


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("case", LIT_STEPS)
def test_lightning_names_the_producer_by_its_place_in_the_module(
    lightning, tmp_path, case, careful
):
    from hookline.integrations.lightning import GuardCallback

    model, (_, kind, place) = lit_steps(lightning, case), LIT_STEPS[case]
    callback = GuardCallback(to=None, careful=careful)
    with pytest.raises(hl.NonFiniteError) as found:
        trainer(lightning, tmp_path, [callback]).fit(model, loader())
    fault = found.value.fault
    if careful and kind == "operation" and not fault.backward:  # operations are not seen then
        kind, place = "module", place.partition("/")[0]
    if careful and fault.backward:
        place = place.partition("/")[0]
    assert (fault.kind, fault.place) == (kind, place)
    assert_clean(model)


def test_lightning_ignores_places_of_the_module(lightning, tmp_path):
    from hookline.integrations.lightning import GuardCallback

    model = lit_steps(lightning, "the step between two modules")
    callbacks = [GuardCallback(to=None, ignore=["b:inputs[input]", "b", "a"])]
    with pytest.raises(hl.NonFiniteError) as found:
        trainer(lightning, tmp_path, callbacks).fit(model, loader())
    assert found.value.fault.backward  # the forward was ignored


def test_lightning_finds_the_producer_where_a_strategy_calls_the_module(lightning):
    """As in DDP: it is called with a function in place of its forward, which calls the step."""
    from hookline.integrations.lightning import GuardCallback

    model = lit_steps(lightning, "a module that the step calls")
    callback, forward = GuardCallback(to=None), model.forward
    callback.on_train_start(SimpleNamespace(precision_plugin=None), model)

    def redirected(*args):
        model.forward = forward
        return model.training_step(*args)

    for index in range(2):
        model.forward = redirected
        model(labelled_data(), index).backward()
    model.forward = redirected
    with pytest.raises(hl.NonFiniteError) as found:
        model(labelled_data(), 2)
    callback.on_train_end(None, model)
    assert found.value.fault.place == "b/linear"


# -- transformers ----------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.outputs, self.grads = [], []
        self.net[0].weight.register_post_accumulate_grad_hook(
            lambda p: self.grads.append(p.grad.clone())
        )

    def forward(self, x, labels=None):
        out = self.net(x)
        if self.training:
            self.outputs.append(out.detach())
        return {"loss": F.cross_entropy(out, labels), "logits": out}


class LabelledRows(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def hf_train(tmp_path, callbacks, rows=None, seed=0, **options):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(seed)
    model = Classifier()
    rows = rows or LabelledRows(*labelled_data())
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, save_strategy="no",
        per_device_train_batch_size=8, num_train_epochs=2, logging_steps=1, disable_tqdm=True,
        learning_rate=0.05, optim="sgd", **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    return model, trainer


@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainer_of_transformers_trains_watched(tmp_path, parts):
    from hookline.integrations.transformers import WatchCallback

    found = []
    callback = WatchCallback(every=2, to=[tmp_path / "run", found.append])
    model, trainer = hf_train(
        tmp_path, [callback], max_grad_norm=1e-3, gradient_accumulation_steps=parts,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer.train()
    steps = 12 // parts
    assert callback.watch.steps == steps
    assert [measured.step for measured in found] == list(range(0, steps, 2))
    for measured in found:
        last = (measured.step + 1) * parts - 1
        raw = model.grads[last].norm().item()
        assert measured["net.0.weight", "weight_grad"]["norm"] == pytest.approx(raw, rel=1e-4)
        assert measured["net.0.weight", "update"]["norm"] < 1e-3
        outputs = torch.cat(model.outputs[last + 1 - parts : last + 1])
        assert measured["net.3", "output"]["norm"] == pytest.approx(outputs.norm().item(), rel=1e-4)
    run = hl.Run(tmp_path / "run")
    assert {"loss", "learning_rate", "grad_norm"} <= set(run.names())
    assert np.isfinite(run.scalars("loss")[1]).all()
    assert_clean(model)


def test_the_trainer_of_transformers_trains_the_same_with_and_without(tmp_path):
    from hookline.integrations.transformers import GuardCallback, WatchCallback

    def weights(callbacks):
        model, trainer = hf_train(tmp_path, callbacks)
        trainer.train()
        return [p.detach().clone() for p in model.parameters()]

    watched = weights([WatchCallback(every=1), GuardCallback(to=None)])
    for one, other in zip(weights([]), watched, strict=True):
        assert torch.equal(one, other)


def test_the_trainer_of_transformers_stops_at_a_bad_number(tmp_path):
    from hookline.integrations.transformers import GuardCallback, WatchCallback

    x, y = labelled_data()
    x[:] = math.inf
    model, trainer = hf_train(
        tmp_path, [WatchCallback(every=1), GuardCallback(to=None)], rows=LabelledRows(x, y)
    )
    with pytest.raises(hl.NonFiniteError):
        trainer.train()
    hl.attached(model).remove()
    assert not hl.attached(model)


def test_a_missing_library_is_told_with_the_install_line(monkeypatch):
    import sys

    from hookline.integrations.optional_libraries import load

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(hl.MissingExtra, match=r"pip install 'hookline\[wandb\]'") as caught:
        load("wandb", "wandb")
    assert isinstance(caught.value, ImportError)
