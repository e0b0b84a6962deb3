"""The comparison with other libraries: its probes, tasks and page, tried on what is installed."""

import pytest
import torch
from environment import ROOT

pytestmark = pytest.mark.usefixtures("benchmarks_are_importable")
BENCHMARKS = ROOT / "benchmarks"
TINY_TASKS = ("blocks", "all", "edit", "gradient", "stop", "disk")


def probe_all(name, refuse_unknown=()):
    from peers import load
    from peers.probes import PROBES, Absent

    found = {}
    for title, probe in PROBES.items():
        if title not in refuse_unknown:
            try:
                found[title] = probe(load(name))[0]
            except Absent:
                found[title] = "absent"
    return found


def test_hookline_passes_every_probe():
    assert set(probe_all("hookline").values()) == {"yes"}


def test_the_probes_see_what_hooks_written_by_hand_do_not_do():
    found = probe_all("raw", refuse_unknown=("a model compiled before",))
    assert found["a value stays as it was when a later operation is in-place"] == "silent"
    assert found["only the calls of one's own thread"] == "no"
    assert found["a torch function inside a forward (tanh)"] == "absent"
    assert found["every call of a module that is called three times"] == "yes"


def make_peer(**functions):
    from types import ModuleType

    peer = ModuleType("peer")
    peer.ABSENT = {}
    for name, function in functions.items():
        setattr(peer, name, function)
    return peer


def test_a_library_that_keeps_the_last_call_only_is_silent():
    from peers.probes import PROBES

    def capture(model, names):
        def run(x):
            kept = {}
            for name in names:
                module = model.get_submodule(name)
                module.register_forward_hook(lambda m, i, o, name=name: kept.update({name: o}))
            model(x)
            return kept

        return run

    peer = make_peer(capture=capture)
    verdict = PROBES["every call of a module that is called three times"](peer)
    assert verdict == ("silent", "one value, of call 3")
    left = PROBES["no hook is left when the model raises, and the error is the model's own"](peer)
    assert left[0] == "silent"


def test_a_library_that_changes_the_model_is_found_out():
    from peers.probes import PROBES

    def capture(model, names):
        model.requires_grad_(False)
        return lambda x: {name: model.get_submodule(name)(x) for name in names}

    title = "the model is as it was: modules, attributes, flags, hooks"
    assert PROBES[title](make_peer(capture=capture))[0] == "no"


@pytest.mark.parametrize("name", ["raw", "hookline"])
@pytest.mark.parametrize("task", TINY_TASKS)
def test_a_task_is_done_right(name, task):
    from peers import load
    from peers.tasks import TASKS

    found = next(one for one in TASKS if one.name == task)
    with torch.no_grad():
        work = found.build(load(name), False)
    with torch.set_grad_enabled(work.gradients):
        work.bare()
        assert work.right(work.make()())


def test_a_wrong_answer_is_seen():
    from peers import raw
    from peers.tasks import TASKS

    def capture(model, names):
        right = raw.capture(model, names)
        return lambda x: {name: value + 1e-6 for name, value in right(x).items()}

    with torch.no_grad():
        work = TASKS[0].build(make_peer(capture=capture), False)
        assert not work.right(work.make()())


def measured():
    from peers import LEFT_OUT
    from peers.probes import PROBES
    from peers.tasks import TASKS

    machine = dict.fromkeys(("date", "cpu", "cores", "platform", "python", "torch"), "m")
    peer = {"title": "T", "version": "1", "source": "s", "notes": {"capture": "a_b|c"},
            "import_seconds": 1.0, "import_megabytes": 2.0}  # fmt: skip
    timed = {"ratio": 1.234, "own_bare": 1.0, "setup_ms": 3.0}
    wrong = {"verdict": "wrong", "reason": "not what raw hooks give"}
    return {
        "machine": machine, "quick": False, "minutes": 7.5, "load": 0.1, "missing": {"x": "gone"},
        "left_out": LEFT_OUT, "peers": {"raw": peer},
        "bare_ms": {task.name: 1.0 for task in TASKS},
        "verdicts": {"raw": {"all": wrong}}, "times": {"raw": {"blocks": timed}},
        "memory": {"raw": {"blocks": {"bare": 2.0, "use": 8.0}}},
        "features": {"raw": {title: {"verdict": "silent", "reason": "why"} for title in PROBES}},
    }  # fmt: skip


def test_the_page_shows_ratios_verdicts_and_reasons():
    from peers.page import page

    text = page(measured())
    rows = [line for line in text.splitlines() if line.startswith("| T |")]
    assert rows[0].startswith("| T | 1.23 | wrong <sup>1</sup> | – |")
    assert rows[1].startswith("| T | 4.00 | – |")
    assert "1. not what raw hooks give" in text
    assert "**silent** <sup>1</sup>" in text
    assert "1. why" in text
    assert "a\\_b\\|c" in text
    assert "- x: gone" in text


def test_a_worker_answers_and_a_broken_one_is_told():
    from peers.worker import Gone, Worker

    worker = Worker("raw")
    try:
        assert worker.ask("hello")["title"] == "raw hooks"
        assert worker.ask("prepare", task="stop")["verdict"] == "right"
        assert worker.ask("prepare", task="summary")["verdict"] == "absent"
        assert worker.ask("settle") == {}
        found = worker.ask("time", task="stop", seconds=0.0)
        assert len(found["use"]) == len(found["bare"]) == 1
        assert len(worker.ask("time", task="stop", seconds=0.5)["use"]) > 1
        assert worker.ask("memory", task="stop", bare=True).keys() == {"bare", "use"}
        assert worker.ask("memory", task="stop", bare=False).keys() == {"use"}
        assert worker.ask("probe", title="every call of a module that is called three times") == {
            "verdict": "yes",
            "reason": "",
        }
    finally:
        worker.close()
    missing = Worker("no_such_library")
    try:
        with pytest.raises(Gone, match="no_such_library"):
            missing.ask("hello")
    finally:
        missing.close()


def test_the_bare_model_is_timed_in_clean_processes():
    from side_by_side import Comparison

    comparison = Comparison([])
    comparison.peers = {name: {} for name in ("raw", "raw_again", "torchlens", "hookline")}
    comparison.times = {
        ("torchlens", "edit"): {"bare": [9], "use": [9]},
        ("raw_again", "edit"): {"bare": [2], "use": [3]},
        ("raw", "edit"): {"bare": [1], "use": [3]},
        ("torchlens", "disk"): {"bare": [], "use": [9]},
        ("hookline", "disk"): {"bare": [4], "use": [5]},
    }
    assert comparison.bare_runs("edit") == [1, 2]
    assert comparison.bare_runs("disk") == [4]
    assert comparison.bare_runs("stop") == []


def test_every_library_is_pinned():
    from peers import ALL

    pins = (BENCHMARKS / "peers" / "requirements.txt").read_text().lower().replace("-", "_")
    for name in ALL:
        source = (BENCHMARKS / "peers" / f"{name}.py").read_text()
        if 'PACKAGE = "' in source:
            package = source.partition('PACKAGE = "')[2].partition('"')[0].lower()
            assert package in ("torch", "hookline") or f"{package}==" in pins, name
    assert "torchvision==" not in pins
    assert "torchaudio==" not in pins
