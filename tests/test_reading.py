"""The program that measures how hard hookline is to read: its walks and its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hookline as hl

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "reading.py"


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))


def test_every_walk_does_what_it_says(tmp_path):
    from reading import WALKS, Model

    for walk in WALKS:
        (folder := tmp_path / walk.__name__).mkdir()
        walk(Model(), torch.randn(2, 4, 8), folder)
    assert len(hl.Run(tmp_path / "watch_a_step" / "run").steps()) == 1
    assert len(hl.Store.open(tmp_path / "harvest_a_place" / "store")) == 4


def test_a_walk_counts_the_functions_of_hookline_only():
    from reading import files_of_calls

    def steps():
        sorted([2, 1], key=lambda number: number)
        torch.nn.Linear(2, 2)(torch.ones(1, 2))

    assert files_of_calls(steps) == []
    assert files_of_calls(lambda: hl.Place("fc"))
    assert sys.getprofile() is None


def test_a_walk_that_raises_leaves_no_profile_function():
    from reading import files_of_calls

    with pytest.raises(ZeroDivisionError):
        files_of_calls(lambda: 1 / 0)
    assert sys.getprofile() is None


def test_a_warm_walk_takes_the_same_steps_every_time():
    from reading import capture_a_glob, follow

    first, second = follow(capture_a_glob), follow(capture_a_glob)
    assert first["warm"] == second["warm"]
    assert sum(first["warm"]["calls by file"].values()) == first["warm"]["calls"]
    assert first["warm"]["files"] <= first["warm"]["switches"] + 1


def test_the_page_has_a_row_for_each_folder():
    from reading import SOURCES, measure_source, page

    parts = measure_source()
    folders = {name.partition("/")[0] for name in SOURCES if "/" in name}
    assert [part["part"] for part in parts] == [
        "the foundation", "(no folder)", *sorted(folders), "all"
    ]  # fmt: skip
    assert sum(part["code lines"] for part in parts[1:-1]) == parts[-1]["code lines"]
    text = page(parts, [])
    assert "| the foundation" in text
    assert all(found in text for part in parts for found in part["complex"] + part["private"])


@pytest.mark.slow
def test_the_program_prints_json():
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--json"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["source"][-1]["part"] == "all"
    assert found["walks"][0]["walk"] == "capture a glob"
    assert all(walk["first"]["calls"] > walk["first"]["files"] > 1 for walk in found["walks"])
