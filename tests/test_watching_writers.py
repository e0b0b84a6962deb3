"""watch(to=...): run directories, JSON lines, writers of the user, and errors in them."""

import copy
import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import NormDropoutResidual
from oracles import assert_clean, hooks_left
from torch import nn
from trainings import OptimizerWrapper, fresh, train

import hookline as hl
from hookline.training.run_files import STATISTICS
from hookline.training.writers import Writer


def test_a_run_directory_holds_what_was_measured(tmp_path):
    model, optimizer = fresh()
    found = []
    with hl.watch(model, every=2, optimizer=optimizer, to=[tmp_path / "run", found.append]) as w:
        for step in range(5):
            w.log(loss=torch.tensor(1.0 / (step + 1), requires_grad=True), rate=0.1)
            train(model, optimizer, 1, first=step)
        w.log(99, accuracy=0.5)
    run = hl.Run.open(tmp_path / "run")
    assert run.steps().tolist() == [0, 2, 4]
    assert run.head.model == "NormDropoutResidual"
    assert run.head.options["every"] == 2
    assert run.scalars("loss")[0].tolist() == [0, 1, 2, 3, 4]
    assert run.scalars("accuracy")[0].tolist() == [99]
    for number, row in enumerate(run.rows()):
        for column, name in enumerate(STATISTICS):
            _, _, matrix = run.matrix(row.kind, name)
            values = matrix[run.places(row.kind).index(row.place)]
            expected = np.array([m.values[number, column] for m in found])
            assert np.array_equal(values, expected, equal_nan=True)
        bins = run.histogram(row.place, row.kind, 2)
        assert bins.step == 2
        assert bins.counts.tolist() == found[1].histograms[number].counts.tolist()
    assert {row.place: row.shape for row in run.rows() if row.kind == "output"}["last"] == (16, 3)


def test_what_is_not_one_number_is_refused_by_its_name():
    model, optimizer = fresh()
    with hl.watch(model, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
        with pytest.raises(hl.RunError, match=r"'losses'.*Tensor of shape \(3,\), not one number"):
            watching.log(losses=torch.ones(3))
        with pytest.raises(hl.RunError, match=r"'what'.*a dict, not one number"):
            watching.log(what={})


def test_json_lines_hold_what_was_measured(tmp_path):
    model, optimizer = fresh()
    path = tmp_path / "logs" / "run.jsonl"
    with hl.watch(model, every=1, optimizer=optimizer, to=str(path)) as watching:
        watching.log(loss=math.inf)
        train(model, optimizer, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 0, "name": "loss", "value": "inf"}
    rows = {(line["place"], line["kind"]): line for line in lines[1:]}
    assert len(rows) == len(watching.last.rows)
    found = rows["first", "output"]
    assert found["std"] == watching.last["first", "output"]["std"]
    assert "saturated" not in found
    assert sum(found["histogram"]["counts"]) == 16 * 8


def test_a_writer_of_ones_own_is_told_everything(caplog):
    class Mine(Writer):
        def __init__(self):
            self.seen = []

        def start(self, rows, model, options):
            self.seen.append("start")

        def measured(self, measured):
            self.seen.append(measured.step)

        def scalar(self, step, name, value):
            self.seen.append((step, name, value))

        def finding(self, finding):
            self.seen.append(finding.kind)

        def close(self):
            self.seen.append("close")

    model, optimizer = fresh()
    mine = Mine()
    with hl.watch(model, every=1, optimizer=optimizer, to=mine) as watching:
        watching.log(loss=1.0)
        train(model, optimizer, 1)
        with torch.no_grad():
            model.first.weight[0, 0] = math.nan
        train(model, optimizer, 1)
    assert mine.seen == ["start", (0, "loss", 1.0), 0, 1, "non-finite values", "close"]


def test_the_base_of_writers_takes_everything_and_does_nothing():
    model, optimizer = fresh()
    with hl.watch(model, every=1, optimizer=optimizer, to=Writer()) as watching:
        watching.log(loss=1.0)
        train(model, optimizer, 1)


def test_a_disk_that_is_full_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    model, optimizer = fresh()
    steps = []
    with hl.watch(
        model, every=1, optimizer=optimizer, to=[tmp_path, lambda m: steps.append(m.step)]
    ):
        train(model, optimizer, 1)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("hookline.training.run_writing.os.write", full)
        train(model, optimizer, 2)
    assert steps == [0, 1, 2]
    told = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(told) == 1
    monkeypatch.undo()
    assert hl.Run(tmp_path).steps().tolist() == [0]


def test_an_error_of_the_users_function_is_the_users():
    model, optimizer = fresh()

    def broken(measured):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hl.watch(
        model, every=1, optimizer=optimizer, to=broken
    ):  # fmt: skip
        train(model, optimizer, 1)
    assert_clean(model)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"to": 5}, hl.RunError, "watch was asked to write to 5"),
        ({"every": 0}, hl.PlaceError, "every=0"),
        ({"every": 1.5}, hl.PlaceError, "every=1.5"),
        ({"every": "5"}, hl.PlaceError, "every='5'"),
        ({"start": 4.0}, hl.PlaceError, "start=4.0"),
        ({"optimizer": 3}, hl.PlaceError, r"optimizer=3.*watching\.step\(\)"),
        (
            {"optimizer": OptimizerWrapper(3)},
            hl.PlaceError,
            r"none as \.optimizer.*watching\.step\(\)",
        ),
        ({"scaler": 2.0}, hl.PlaceError, r"scaler=2\.0.*a float, without .*get_scale"),
        (
            {"scaler": SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))},
            hl.PlaceError,
            "which is its attribute scaler",
        ),
        ({"kinds": "gradient"}, hl.PlaceError, "kind 'gradient'"),
        ({"ranks": "some"}, hl.PlaceError, "ranks='some'"),
        ({"kinds": ["gradient"]}, hl.PlaceError, "kind 'gradient'"),
        ({"where": "first:input"}, hl.PlaceError, "'first:input'"),
        ({"where": "first/add"}, hl.PlaceError, "first/add"),
        ({"where": "frist"}, hl.PlaceNotFound, "Closest: 'first'"),
    ],
)
def test_what_cannot_be_is_refused(options, error, match):
    with pytest.raises(error, match=match), hl.watch(NormDropoutResidual(), **options):
        pass


def test_what_was_measured_reads_well():
    model, optimizer = fresh()
    with hl.watch(model, "first", every=1, optimizer=optimizer) as watching:
        train(model, optimizer, 1)
    text = repr(watching.last)
    assert text.splitlines()[0] == "Measured at step 0"
    assert text.splitlines()[2].split()[:2] == ["first", "output"]
    assert "<table>" in watching.last._repr_html_()
    with pytest.raises(hl.NotCaptured, match=r"\('last', 'output'\)"):
        watching.last["last", "output"]


def test_findings_are_logged_once_and_few_at_a_time(caplog):
    caplog.set_level(logging.WARNING)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)])
    with torch.no_grad():
        for block in model:
            block[0].bias.fill_(-100.0)
            block[0].bias[0] = 1.0
    with hl.watch(model, every=1) as watching:
        for _ in range(6):
            model(torch.randn(200, 8)).sum().backward()
            watching.step()
    dead = [finding for finding in watching.findings() if finding.kind == "dead units"]
    assert [finding.place for finding in dead] == ["0.1", "1.1", "2.1", "3.1", "4.1", "5.1"]
    told = [r.getMessage() for r in caplog.records if "dead units" in r.getMessage()]
    assert told == [str(finding) for finding in dead[:3]]
    assert sum("3 more places" in r.getMessage() for r in caplog.records) == 1


def test_a_watch_shows_how_far_it_is_and_how_much_it_found():
    model = nn.Sequential(nn.Linear(2, 2))
    watching = hl.watch(model, every=1)
    assert repr(watching) == "<hookline watch at '**', closed, 0 steps, no findings>"
    with watching:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            watching.step()
    assert repr(watching).startswith("<hookline watch at '**', closed, 3 steps, ")
    assert "watch" in repr(copy.deepcopy(watching))


def test_batched_gradients_are_let_by(tmp_path):
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    with hl.watch(model, every=1, to=tmp_path / "run") as watch:
        rows = torch.eye(10).reshape(10, 5, 2)
        (found,) = torch.autograd.grad(model(x), [model.bias], rows, is_grads_batched=True)
        watch.step()
    assert torch.equal(found, torch.eye(2).repeat(5, 1))
    assert hooks_left(model) == []
