"""The examples run, and every statement that they print is true."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_the_truth(path, capsys):
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed
    assert "False" not in printed
