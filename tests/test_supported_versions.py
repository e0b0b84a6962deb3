"""An old torch is refused before it is imported; what we say of versions is the same everywhere."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from environment import ROOT

from hookline import supported_versions
from hookline.supported_versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS, is_tested_torch

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST, NEWEST = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
BEFORE_OLDEST = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1] - 1}"


def python(program, *first, options=()):
    """Run a program with folders put first on sys.path; give the finished process."""
    paths = os.pathsep.join(str(path) for path in (*first, ROOT))
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT.parent,
    )  # fmt: skip


def pretend(folder, version):
    """Write the metadata of another torch."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir()
    line = "" if version is None else f"Version: {version}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\n{line}")


IMPORTING = """
import sys
try:
    import hookline
except ImportError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_an_old_torch_is_refused_and_not_imported(tmp_path):
    pretend(tmp_path, f"{BEFORE_OLDEST}.1")
    message, imported = python(IMPORTING, tmp_path).stdout.splitlines()
    assert message == (
        f"hookline needs torch {OLDEST} or newer. torch {BEFORE_OLDEST}.1 is installed here. "
        f"Install a newer one: pip install 'torch>={OLDEST}'"
    )
    assert imported == "False"


def test_the_oldest_torch_is_imported(tmp_path):
    pretend(tmp_path, f"{OLDEST}.0")
    assert python(IMPORTING, tmp_path).stdout == "True\n"


@pytest.mark.parametrize(
    "version", [f"{OLDEST}.0a0+git1234567", f"{OLDEST}.0.dev20250601+cu128", "2.99", "3.0.0", None]
)
def test_other_spellings_of_versions_and_none_at_all_are_let_pass(tmp_path, monkeypatch, version):
    pretend(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    supported_versions.check_torch()
    assert not is_tested_torch()


@pytest.mark.parametrize(
    "version", ["1.13.1+cpu", f"{BEFORE_OLDEST}.0a0+git1234567", f"{BEFORE_OLDEST}.0.dev20250401"]
)
def test_other_spellings_of_an_old_version_are_refused(tmp_path, monkeypatch, version):
    pretend(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_tested_torch()
    with pytest.raises(ImportError, match=re.escape(f"torch {version} is installed")) as caught:
        supported_versions.check_torch()
    assert caught.value.name == "torch"


@pytest.mark.parametrize("version", [f"{OLDEST}.0", "2.13.0+cpu", f"{NEWEST}.1+cu130"])
def test_releases_between_the_oldest_and_the_newest_count_as_tested(tmp_path, monkeypatch, version):
    pretend(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    assert is_tested_torch()


def test_a_torch_without_metadata_is_let_pass(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    supported_versions.check_torch()
    assert not is_tested_torch()


def test_the_check_loads_nothing_that_a_bare_python_lacks():
    program = (
        "import runpy, sys; runpy.run_path('hookline/supported_versions.py')\n"
        "print({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "{'__main__'}\n"


def test_importing_hookline_says_nothing():
    result = python("import hookline", options=("-W", "error"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# -- what the documents say ------------------------------------------------------------------------


def test_the_package_s_metadata_has_these_versions():
    assert f"torch>={OLDEST}" in METADATA["dependencies"]
    assert METADATA["requires-python"] == f">={PYTHONS[0]}"
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(METADATA["classifiers"]))
    assert tuple(named) == PYTHONS


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/where-it-runs.md"])
def test_a_page_has_these_versions(page):
    text = " ".join((ROOT / page).read_text().split())
    *others, newest = PYTHONS
    assert f"Python {', '.join(others)} and {newest}" in text
    assert f"torch {OLDEST} to {NEWEST}" in text
    assert set(re.findall(r"torch (2\.\d+)", text)) <= {OLDEST, NEWEST, "2.13"}


def test_the_pinned_torch_is_one_of_them():
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert OLDEST_TORCH <= (int(pinned[1]), int(pinned[2])) <= NEWEST_TORCH
