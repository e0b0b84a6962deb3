"""The exception tree: one base, each also a builtin, each message in three parts."""

import copy
import inspect
import pickle
import re
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import hookline as hl
from hookline import errors, torch_private
from hookline.view import figures

BUILTINS = {
    "PlaceError": ValueError,
    "PlaceNotFound": LookupError,
    "NotHookable": TypeError,
    "NeverFired": RuntimeError,
    "NotCaptured": LookupError,
    "SeveralCalls": LookupError,
    "SeveralTensors": TypeError,
    "ValueChanged": RuntimeError,
    "GradientNotAvailable": RuntimeError,
    "ChangeError": ValueError,
    "StoreError": ValueError,
    "HarvestError": ValueError,
    "RecipeError": ValueError,
    "StatisticsError": ValueError,
    "NonFiniteError": ArithmeticError,
    "ReplayError": ValueError,
    "BatchError": ValueError,
    "MissingExtra": ImportError,
    "RunError": ValueError,
    "RecordError": ValueError,
    "ReportError": ValueError,
    "FigureError": ValueError,
    "UnsupportedTorch": RuntimeError,
    "UsageError": TypeError,
}


def error_classes():
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.HooklineError)
    ]


def test_every_error_has_our_base_and_a_builtin_one():
    assert {kind.__name__ for kind in error_classes()} == {*BUILTINS, "HooklineError"}
    for name, builtin in BUILTINS.items():
        kind = getattr(hl, name)
        assert issubclass(kind, hl.HooklineError)
        assert issubclass(kind, builtin)
        assert kind.__doc__
    assert issubclass(hl.HooklineWarning, UserWarning)


def test_no_error_is_a_key_error_whose_message_would_be_quoted():
    assert not any(issubclass(kind, KeyError) for kind in error_classes())


def test_the_tree_at_the_top_of_the_file_is_the_tree():
    drawn = dict(re.findall(r"[├└]── (\w+) \((\w+)\)", errors.__doc__))
    assert drawn == {name: builtin.__name__ for name, builtin in BUILTINS.items()}


def test_a_message_has_three_parts_and_leaves_out_empty_ones():
    error = hl.PlaceNotFound("Asked.", "Found.", "Do.")
    assert str(error) == "Asked. Found. Do."
    assert (error.asked, error.found, error.remedy) == ("Asked.", "Found.", "Do.")
    assert str(hl.PlaceNotFound("Asked.", "", "Do.")) == "Asked. Do."
    assert str(hl.PlaceNotFound("Asked.")) == "Asked."


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_errors_can_be_copied_and_pickled(kind):
    error = kind("Asked.", "Found.", "Do.")
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert other.remedy == "Do."


def test_a_never_fired_error_with_its_record_can_be_pickled():
    model = nn.Sequential(nn.Identity())
    with pytest.raises(hl.NeverFired) as caught:
        with hl.capture(model, "0"):
            pass
    assert isinstance(caught.value.record, hl.Record)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def raised():
    """One error of every kind, as a user meets it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.ModuleList([nn.ReLU()]))
    model.forward = lambda x: model[1](model[0](x))
    x = torch.randn(3, 2)
    with hl.capture(model, "0", "1") as record:
        model(x)
        model(x)
    lstm = nn.LSTM(2, 2)
    with hl.capture(lstm, "") as pair:
        lstm(torch.ones(1, 1, 2))
    with torch.no_grad(), hl.capture(model, "0:grad_output") as gradients:
        model(x)

    def never_fired():
        with hl.capture(model, "0"):
            pass

    def change():
        with hl.edit(model, "0", torch.ones(7)):
            model(x)

    def guarded():
        with hl.guard(model, to=None):
            model(x * float("nan"))

    def missing_extra():
        with mock.patch.dict(sys.modules, pandas=None):
            hl.summarize(model).to_pandas()

    return {
        hl.PlaceError: lambda: hl.select(model, "0:outptu"),
        hl.PlaceNotFound: lambda: hl.select(model, "00"),
        hl.NotHookable: lambda: hl.select(model, "2"),
        hl.NeverFired: never_fired,
        hl.NotCaptured: lambda: record["0:input"],
        hl.SeveralCalls: lambda: record["1"],
        hl.SeveralTensors: lambda: pair.tensor(""),
        hl.ValueChanged: lambda: record["0", 0],
        hl.GradientNotAvailable: lambda: gradients["0:grad_output"],
        hl.ChangeError: change,
        hl.StoreError: lambda: hl.Store.open("no such folder"),
        hl.HarvestError: lambda: hl.harvest(torch.nn.Linear(1, 1), 3, "", to="nowhere"),
        hl.RecipeError: lambda: hl.Recipe([("0", lambda value: value)]).save("nowhere"),
        hl.StatisticsError: lambda: hl.Mean(dim=5).update(x),
        hl.NonFiniteError: guarded,
        hl.ReplayError: lambda: hl.replay("no such folder"),
        hl.BatchError: lambda: hl.summarize(nn.ReLU(), (-1, 3)),
        hl.MissingExtra: missing_extra,
        hl.RunError: lambda: hl.Run("no such folder"),
        hl.RecordError: lambda: hl.load_record("no such folder"),
        hl.ReportError: lambda: hl.report(3),
        hl.FigureError: lambda: figures.histograms(hl.Mean()),
        hl.UnsupportedTorch: lambda: torch_private._find(torch, "no_such_name")(),
        hl.UsageError: lambda: hl.capture(model, "0", dtype="float16"),
    }


@pytest.mark.parametrize("kind", [getattr(hl, name) for name in BUILTINS], ids=list(BUILTINS))
def test_each_error_says_what_was_asked_what_was_found_and_what_to_do(kind):
    with pytest.raises(kind) as caught:
        raised()[kind]()
    error = caught.value
    assert type(error) is kind
    assert error.asked
    assert error.found
    assert error.remedy
    assert error.remedy.endswith((".", ")"))
    assert "\n" not in str(error) or kind is hl.NonFiniteError  # which has a table


def test_a_wrong_model_is_told_at_once():
    for verb in (
        lambda: hl.capture("0", nn.ReLU()),
        lambda: hl.edit([nn.ReLU()], "0", hl.zero()),
        lambda: hl.hook(None, "0", print),
        lambda: hl.preserve({}),
        lambda: hl.replace_module(3, "0", nn.ReLU()),
    ):
        with pytest.raises(TypeError, match=r"A model is a torch\.nn\.Module"):
            verb()
