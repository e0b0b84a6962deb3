"""Every warning points at the user's line: not at hookline, nor at a library between the two."""

import contextlib
import inspect
import linecache
import threading
import warnings
from pathlib import Path

import pytest
import torch
from models import OneOfTwo, small
from oracles import weigh
from stores import killed_before_the_commit
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.compat import nethook
from hookline.compat.torch_tuner import Hooks

X = torch.linspace(-1, 1, 6).reshape(2, 3)


INSTALLED = "/somewhere/site-packages/library.py"


def library():
    """What is in an installed file, whose lines are not the user's."""
    names = {}
    exec(compile("def run(model, x):\n    return model(x)\n", INSTALLED, "exec"), names)
    return names


def never_entered(folder):
    hl.edit(small(), "0", hl.zero())  # here


def never_entered_by_name(folder):
    capture = hl.capture(small(), "0")
    del capture  # here


def removed_before_a_recomputation(folder):
    model = nn.Linear(3, 3)
    handle = hl.edit(model, "", hl.scale(2.0)).attach()
    out = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    handle.remove()  # here
    assert out.requires_grad


def removed_with_all_that_is_attached(folder):
    model = nn.Linear(3, 3)
    hl.edit(model, "", hl.scale(2.0)).attach()
    out = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    hl.attached(model).remove()  # here
    assert out.requires_grad


def hidden_by_a_parametrization(folder):
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.preserve(model):  # here
        nn.utils.parametrizations.orthogonal(model[0])


def hidden_by_a_parametrization_in_a_stack(folder):
    model = nn.Sequential(nn.Linear(2, 2))
    with contextlib.ExitStack() as stack:  # here
        stack.enter_context(hl.preserve(model))
        nn.utils.parametrizations.orthogonal(model[0])


def watched_without_a_step(folder):
    with hl.watch(small()):  # here
        pass


def watched_in_vain(folder):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hl.watch(model, ["0", "1"], every=1, kinds=("output",)) as watching:  # here
        model[0](torch.ones(1, 2)).sum().backward()
        watching.step()


def _store_of_a_killed_writer(folder):
    """A store whose writer died when its rows were written and its index was not."""
    writer = hl.Store.create(folder / "store", rank=0)
    writer.append({"h": torch.ones(1, 2)})
    killed_before_the_commit(writer, {"h": torch.ones(1, 2)})
    return folder / "store"


def a_store_is_opened_that_was_cut(folder):
    path = _store_of_a_killed_writer(folder)
    hl.Store.open(path)  # here


def a_store_is_resumed_that_was_cut(folder):
    path = _store_of_a_killed_writer(folder)
    hl.Store.create(path, rank=0, resume=True).close()  # here


def measured_in_vain(folder):
    with hl.measure(OneOfTwo(), ["used", "unused"], statistics=[hl.Mean()]):  # here
        pass


def measured_in_vain_over_data(folder):
    hl.measure(OneOfTwo(), ["used", "unused"], data=[X], statistics=[hl.Mean()])  # here


def images_measured_by_column(folder):
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    hl.measure(model, "0", data=[torch.ones(2, 1, 4, 5)], statistics=[hl.Mean()])  # here


def images_measured_by_column_through_a_library(folder):
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    with hl.measure(model, "0", statistics=[hl.Mean()]):
        library()["run"](model, torch.ones(2, 1, 4, 5))  # here


def harvested_in_training_mode(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    hl.harvest(model, [X], "0", to=folder / "store", quiet=True)  # here


def harvested_in_vain(folder):
    hl.harvest(OneOfTwo(), [X], ["*"], to=folder / "store", quiet=True)  # here


def traced_and_dropped(folder):
    nethook.Trace(small(), "0")  # here


def traced_several_and_dropped(folder):
    traces = nethook.TraceDict(small(), ["0", "1"])
    del traces  # here


def traced_twice_and_read(folder):
    model = small()
    with nethook.TraceDict(model, ["0", "1"], retain_input=True) as traces:
        model(X), model(X)
    _ = traces["0"].output  # here
    _ = traces["1"].output, traces["1"].input


def traced_twice_and_read_as_input(folder):
    model = small()
    with nethook.Trace(model, "0", retain_output=False, retain_input=True) as trace:
        model(X), model(X)
    getattr(trace, "input")  # noqa: B009 # here


def instrumented_twice_and_read(folder):
    with nethook.InstrumentedModel(small()) as inst:
        inst.retain_layers(["0", "1"])
        inst(X), inst(X)
        inst.retained_features()  # here


def a_gradient_is_lost(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    handle = Hooks(model, 1).register_fbph(visualize=True)
    weigh(model(X)).backward()
    handle.remove()  # here


def a_gradient_is_lost_in_a_with(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    with Hooks(model, 1).register_fbph(visualize=True):  # here
        weigh(model(X)).backward()


def a_gradient_is_out_of_reach(folder):
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    handle = Hooks(model, 2).register_fbh(visualize=True)
    loss = weigh(model(X))  # here
    loss.backward()
    handle.remove()


SCENARIOS = [
    value for name, value in list(globals().items())
    if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["folder"]
    and not name.startswith("_")
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_warning_points_at_the_users_line(scenario, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scenario(tmp_path)
    (told,) = [w for w in caught if issubclass(w.category, hl.HooklineWarning)]
    assert told.filename == __file__
    assert "# here" in linecache.getline(__file__, told.lineno)


def test_a_warning_without_a_line_of_the_users_points_at_the_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.ReLU(inplace=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Hooks(model, 2).register_fbh(visualize=True):
            thread = threading.Thread(target=library()["run"], args=(model, X))
            thread.start()
            thread.join()
    (told,) = caught
    assert told.filename == INSTALLED


def test_no_warning_takes_another_way():
    """`warn_outside` finds the user's line; a `stacklevel` counted by hand does not."""
    calling = [
        path.name
        for path in Path(hl.__file__).parent.rglob("*.py")
        if "warnings.warn(" in path.read_text()
    ]
    assert calling == ["errors.py"]
