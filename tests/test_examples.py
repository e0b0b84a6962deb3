"""The examples run, and every statement that they print is true."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_the_truth(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    if "import ray" in path.read_text():
        printed = in_a_process_of_its_own(path)
    else:
        runpy.run_path(str(path))
        printed = capsys.readouterr().out
    assert printed
    assert "False" not in printed


def in_a_process_of_its_own(path):
    """Ray starts threads and processes, and warns of itself."""
    result = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return result.stdout
