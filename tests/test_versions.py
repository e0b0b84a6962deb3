"""The matrix of versions: environments that are made, tested and deleted, and the table of them.

A script stands in for Python, pip and pytest, so that nothing is installed.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environment import ROOT


def report(*cases):
    """What pytest writes with --junitxml."""
    lines = "\n".join(f"<testcase classname='{where}' {case}</testcase>" for where, case in cases)
    start = "<?xml version='1.0' encoding='utf-8'?><testsuites><testsuite name='pytest'>"
    return f"{start}\n{lines}\n</testsuite></testsuites>"


def skipped(name, message, kind="skip"):
    return "test_c", f"name='{name}'><skipped type='pytest.{kind}' message='{message}'>x</skipped>"


CASES = [
    ("test_a", "name='test_good[1]' time='0.1'>"),
    ("test_a", "name='test_good[2]' time='0.1'><system-out>x</system-out>"),
    skipped("test_gpu", "needs CUDA | or MPS"),
    skipped("test_gpus", "needs CUDA | or MPS"),
    skipped("test_one", "could not import &apos;x&apos;"),
    skipped("test_known", "a bug", kind="xfail"),
]
GOOD = report(*CASES)
BAD = report(
    *CASES,
    ("test_a", "name='test_bad'><failure message='assert 1 == 2'>x</failure>"),
    ("test_a", "name='test_bad'><error message='failed on teardown'>x</error>"),
    ("", "name='test_b'><error message='collection failure'>x</error>"),
)

FAKE = r"""#!{python} -IS
'''Stands in for Python: writes down how it is called, and does nothing that needs a network.'''
import json, os, pathlib, shutil, signal, subprocess, sys, time

arguments, here = sys.argv[1:], pathlib.Path(sys.argv[0])
keys = ("OMP_NUM_THREADS", "PYTHONPATH", "MAKEFLAGS", "TMPDIR")
with open(os.environ["FAKE_LOG"], "a") as log:
    variables = {{key: os.environ.get(key) for key in keys}}
    print(json.dumps([arguments, variables]), file=log)
if arguments[0] == "worker":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
elif arguments[0] == "-c":
    print("9.9.9+fake" if "torch" in arguments[1] else here.name.removeprefix("python") + ".7")
elif arguments[1] == "venv":
    environment = pathlib.Path(arguments[2])
    (environment / "bin").mkdir(parents=True)
    shutil.copy(here, environment / "bin" / "python")
elif arguments[1] == os.environ.get("FAKE_FAILURE"):
    sys.exit(f"{{arguments[1]}} fails")
elif arguments[1] == "pip":
    (limits,) = (arguments[i + 1] for i, word in enumerate(arguments) if word == "-c")
    assert "torch==" in pathlib.Path(limits).read_text()
elif arguments[1] == "pytest":
    if "FAKE_SECONDS" in os.environ:
        subprocess.Popen([here, "worker"])
        time.sleep(float(os.environ["FAKE_SECONDS"]))
    (report,) = (word for word in arguments if word.startswith("--junitxml="))
    pathlib.Path(report.partition("=")[2]).write_text(os.environ["FAKE_REPORT"])
    sys.exit(int("<failure" in os.environ["FAKE_REPORT"]))
"""


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import versions

    return versions


class Tree:
    """A copy of what the matrix needs, with scripts named python3.11 … on the PATH."""

    def __init__(self, folder):
        self.folder, self.bin, self.log = folder / "tree", folder / "bin", folder / "log"
        self.matrix = self.folder / ".matrix"
        (self.folder / "benchmarks" / "results").mkdir(parents=True)
        for name in (
            "Makefile",
            "constraints.txt",
            "benchmarks/versions.py",
            "benchmarks/latest.py",
        ):
            shutil.copy(ROOT / name, self.folder / name)
        self.change("ENVIRONMENT_GB, DOWNLOADS_GB = 7, 4", "ENVIRONMENT_GB, DOWNLOADS_GB = 0, 0")
        self.bin.mkdir()
        for name in ("python3.11", "python3.12", "python3.13"):
            self.add_program(name, FAKE.format(python=sys.executable))
        self.add_program("chromium", "#!/bin/sh\n")
        without = ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "KEEP", "TESTS", "ONLY")
        self.variables = {key: value for key, value in os.environ.items() if key not in without}
        self.variables |= {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "FAKE_LOG": str(self.log),
            "FAKE_REPORT": GOOD, "PYENV_ROOT": str(folder / "none"),
        }  # fmt: skip

    def change(self, old, new):
        path = self.folder / "benchmarks" / "versions.py"
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    def add_program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def command(self, *options, **variables):
        """How the script is started, with Python 3.11 for the rows that it fits."""
        command = [sys.executable, str(self.folder / "benchmarks" / "versions.py"), *options]
        return {"args": command, "env": self.variables | variables, "text": True}

    def run(self, *options, **variables):
        options = options if "--python" in options else (*options, "--python", "python3.11")
        return subprocess.run(**self.command(*options, **variables), capture_output=True)

    def interrupt(self, number, *options, pytests=1, **variables):
        """Send a signal once that many runs of pytest have a worker; return what is told."""
        before = signal.signal(number, signal.SIG_DFL)  # nohup and background jobs ignore some
        try:
            process = subprocess.Popen(
                **self.command(*options, **variables),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        finally:
            signal.signal(number, before)
        try:
            while not (self.log.exists() and len(self.calls("worker")) == pytests):
                assert process.poll() is None
                time.sleep(0.05)
            assert len(self.environments()) == 1
            process.send_signal(number)
            _, told = process.communicate(timeout=30)  # until no process has this pipe any more
        finally:
            process.kill()
        assert process.returncode == 130
        return told

    def make(self, *arguments, **variables):
        return subprocess.run(
            ["make", *arguments], cwd=self.folder, env=self.variables | variables,
            capture_output=True, text=True,
        )  # fmt: skip

    def calls(self, *start):
        """The arguments and variables of each call of the scripts that starts so."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [(a, v) for a, v in lines if tuple(a[: len(start)]) == start]

    def rows(self):
        text = (self.folder / "benchmarks" / "results" / "versions.json").read_text()
        return {(row["python"], row["torch"]): row for row in json.loads(text)["rows"]}

    def environments(self):
        return [path.name for path in self.matrix.glob("*") if path.is_dir()]


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


# Parts


def test_a_report_is_read_with_errors_skips_and_expected_failures_apart(versions, tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(BAD)
    assert versions.read_report(path) == {
        "passed": 2,
        "failed": ["test_a::test_bad", "test_b"],
        "expected failures": 1,
        "skipped": {"needs CUDA | or MPS": 2, "could not import 'x'": 1},
    }


def test_pytest_writes_such_reports(versions, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_skipped(): pytest.skip('needs\\ntwo lines')\n"
        "@pytest.mark.skip\ndef test_without_reason(): pass\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise ValueError\n"
        "def test_bad_at_its_end(broken): assert False\n"
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    found = versions.read_report(report)
    assert found["failed"] == ["test_it::test_bad", "test_it::test_bad_at_its_end"]
    assert (found["passed"], found["expected failures"]) == (1, 1)
    assert found["skipped"] == {"needs": 1, "unconditional skip": 1}


def test_only_the_line_of_torch_changes_in_the_constraints(versions):
    before = (ROOT / "constraints.txt").read_text().splitlines()
    after = versions.with_torch("\n".join(before), "2.15.0").splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [(f"torch=={versions.pinned_torch()}", "torch==2.15.0")]
    assert any(line.startswith("torch-tuner==") for line in after)


def test_constraints_without_torch_are_refused(versions):
    with pytest.raises(versions.Unusable, match="0 lines that begin with torch=="):
        versions.with_torch("numpy==2.4.6\ntorch-tuner==0.1.0\n", "2.15.0")


def test_too_little_disk_is_refused_with_what_is_needed_found_and_to_do(versions, tmp_path):
    versions.check_disk(tmp_path / "not" / "there", needed=0)
    with pytest.raises(versions.Unusable) as caught:
        versions.check_disk(tmp_path / "not" / "there", needed=10**9)
    asked, found, remedy = str(caught.value).splitlines()
    assert "needs 1000000000 GB in" in asked
    assert re.search(r"has [\d.]+ GB free", found)
    assert remedy.startswith("Free some space, or make")


@pytest.mark.parametrize("given", ["", "latest", "2.15", "torch==2.15.0", "2.15.0 -e x"])
def test_what_is_no_version_of_torch_is_refused(tree, given):
    done = tree.run("--torch", given)
    assert (done.returncode, tree.log.exists(), tree.matrix.exists()) == (2, False, False)
    assert f"The version given is {given!r}.\nRun: make test-with WITH_TORCH=" in done.stderr


def test_rows_are_chosen_by_torch_and_by_python(versions):
    assert versions.chosen("") == list(versions.ROWS)
    for python, torch in versions.ROWS:
        assert (python, torch) in versions.chosen(torch)
        assert all(python in row for row in versions.chosen(python))
    assert len(versions.chosen(" ".join(torch for _, torch in versions.ROWS))) == len(versions.ROWS)
    with pytest.raises(
        versions.Unusable, match=r"No row has the version 1\.0\.0\. There are: torch"
    ):
        versions.chosen(f"{versions.ROWS[0][1]} 1.0.0")


def test_the_rows_agree_with_what_hookline_supports(versions):
    if importlib.util.find_spec("hookline.supported_versions") is None:
        pytest.skip("hookline.supported_versions does not exist yet")
    from hookline import supported_versions as supported

    numbers = [versions.numbers(torch)[:2] for _, torch in versions.ROWS]
    assert (min(numbers), max(numbers)) == (supported.OLDEST_TORCH, supported.NEWEST_TORCH)
    assert numbers == sorted(numbers)


def test_the_oldest_python_is_that_of_the_package(versions):
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert versions.numbers(oldest) == versions.OLDEST_PYTHON
    assert min(versions.numbers(python) for python, _ in versions.ROWS) == versions.OLDEST_PYTHON


@pytest.mark.parametrize("name", ["versions.py", "latest.py"])
def test_the_script_starts_with_the_standard_library_of_an_older_python(name):
    tree = ast.parse((ROOT / "benchmarks" / name).read_text(), feature_version=(3, 9))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    assert imported <= {*sys.stdlib_module_names, "latest"}


# Interpreters


def pyenv(tree, *installed):
    """A folder of pyenv with these versions."""
    root = tree.folder.parent / "pyenv"
    for version in installed:
        (root / "versions" / version / "bin").mkdir(parents=True)
        name = "python" + ".".join(version.split(".")[:2])
        path = root / "versions" / version / "bin" / "python"
        path.write_text(f'#!/bin/sh\nexec {tree.bin / name} "$@"\n')
        path.chmod(0o755)
    return root


@pytest.fixture
def lookup(tree, versions, monkeypatch):
    """find_python, with the tree's PATH and variables."""
    for key in ("PATH", "FAKE_LOG"):
        monkeypatch.setenv(key, tree.variables[key])
    monkeypatch.setenv("PATH", str(tree.bin))
    monkeypatch.setenv("PYENV_ROOT", str(pyenv(tree, "3.12.1", "3.12.10", "3.13.0")))
    return versions.find_python


def test_an_interpreter_is_found_by_path_name_and_version(lookup, tree):
    path = str(tree.bin / "python3.12")
    for asked in (path, "python3.12", "3.12"):
        assert lookup(asked) == (path, "3.12.7")


def test_an_interpreter_of_pyenv_is_found_where_the_path_has_none_that_works(lookup, tree):
    tree.add_program("python3.12.real", (tree.bin / "python3.12").read_text())
    tree.add_program("python3.12", "#!/bin/sh\necho 'pyenv: command not found' >&2; exit 127\n")
    for path in Path(os.environ["PYENV_ROOT"]).glob("versions/3.12.*/bin/python"):
        path.write_text("#!/bin/sh\necho 3.12.7\n")
    found = lookup("python3.12")
    assert Path(found.path).parts[-3:] == ("3.12.10", "bin", "python")  # the newest


def test_an_interpreter_that_is_missing_or_broken_is_told_with_what_was_tried(
    lookup, versions, tree
):
    for name in ("python3.12", "python3.13"):
        tree.add_program(name, "#!/bin/sh\necho 'No module named ensurepip' >&2; exit 1\n")
    with pytest.raises(versions.Unusable) as caught:
        lookup("python3.13")
    asked, found, remedy = str(caught.value).splitlines()
    assert "'python3.13' was asked for" in asked
    assert found.count("ensurepip") == 2  # on the PATH and of pyenv
    assert "PYTHON=/path/to/python3" in remedy
    with pytest.raises(versions.Unusable, match="was found: none of that name"):
        lookup("python3.99")
    with pytest.raises(versions.Unusable, match=r"none/python.*No such file"):
        lookup("/none/python")
    with pytest.raises(versions.Unusable, match=r"python3\.11 is Python 3\.11\.7\."):
        lookup("python3.11", "3.12")


def test_a_python_older_than_the_package_s_is_refused(lookup, versions, tree):
    tree.add_program("python3.9", (tree.bin / "python3.11").read_text())
    with pytest.raises(versions.Unusable, match=r"is Python 3\.9\.7, which is too old"):
        lookup("python3.9")


# One environment


def test_one_environment_is_made_filled_tested_and_deleted(tree):
    done = tree.run("--torch", "2.15.0", "--python", "python3.13", "--originals", "torch-tuner",
                    PYTHONPATH="/elsewhere", MAKEFLAGS="w")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "about 0 GB on disk" in done.stdout
    assert "about 15 minutes" in done.stdout
    installs = tree.calls("-m", "pip")
    limits = str(tree.matrix / "py313-torch2150" / "constraints.txt")
    assert all(call[call.index("-c") + 1] == limits for call, _ in installs)
    assert all("--no-cache-dir" in call for call, _ in installs)
    assert all(v["TMPDIR"].startswith(str(tree.matrix)) for _, v in installs)
    assert [call[call.index(limits) + 1 :] for call, _ in installs] == [
        ["hatchling", "editables"],
        ["--no-build-isolation", "torch==2.15.0", "-e", ".[test]"],
        ["--no-deps", "--ignore-requires-python", "torch==2.15.0", "torch-tuner"],
    ]
    ((call, variables),) = tree.calls("-m", "pytest")
    report = tree.matrix / "py313-torch2150.xml"
    assert call[2:] == ["-m", "not slow", "--numprocesses", "2", f"--junitxml={report}"]
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["PYTHONPATH"] is variables["MAKEFLAGS"] is None
    assert "torch 9.9.9+fake: 2 passed, 0 failed, 3 skipped in" in done.stdout
    assert "skipped, 2 ×: needs CUDA | or MPS" in done.stdout
    assert tree.environments() == []
    assert report.exists()
    assert not (tree.folder / "benchmarks" / "latest").exists()  # the table is the matrix's


def test_the_environment_is_kept_when_that_is_asked(tree):
    done = tree.run("--torch", "2.15.0", "--keep")
    assert tree.environments() == ["py311-torch2150"]
    assert "kept: .matrix/py311-torch2150/bin/python -m pytest" in done.stdout
    (tree.matrix / "py311-torch2150" / "old").touch()
    assert tree.run("--torch", "2.15.0", "--keep").returncode == 0
    assert not (tree.matrix / "py311-torch2150" / "old").exists()  # it is made anew


def test_failed_tests_give_an_exit_code_and_their_names(tree):
    done = tree.run("--torch", "2.15.0", FAKE_REPORT=BAD)
    assert done.returncode == 1
    assert "2 passed, 2 failed, 3 skipped" in done.stdout
    assert "failed: test_a::test_bad\n" in done.stdout
    assert tree.environments() == []


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("pip", "`pip install hatchling editables` failed, with the message above."),
        ("pytest", "pytest ended with exit code 1 and without a report."),
    ],
)
def test_the_environment_is_deleted_after_a_failure(tree, failing, told):
    tree.matrix.mkdir()
    (tree.matrix / "py311-torch2150.xml").write_text(BAD)  # of an earlier run
    done = tree.run("--torch", "2.15.0", FAKE_FAILURE=failing)
    assert done.returncode == 2
    assert told in done.stderr
    assert f"{failing} fails" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree.environments() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_environment_and_its_processes_end_with_an_interruption(tree, number):
    told = tree.interrupt(number, "--torch", "2.15.0", "--python", "python3.11", FAKE_SECONDS="100")
    assert told == "Stopped.\n"
    assert tree.environments() == []


# The matrix


def test_the_matrix_runs_every_row_and_writes_the_table(tree, versions):
    done = tree.run()
    assert done.returncode == 0, done.stderr
    assert list(tree.rows()) == list(versions.ROWS)
    page = (tree.folder / "benchmarks" / "versions.md").read_text()
    assert page == versions.page(list(tree.rows().values()))
    assert page.splitlines()[-1] == f"| could not import 'x' |{' 1 |' * len(versions.ROWS)}"
    assert f"about {15 * len(versions.ROWS)} minutes in all" in done.stdout
    assert "\n".join(versions.table(tree.rows().values())) in done.stdout
    assert tree.environments() == []
    assert list((tree.folder / "benchmarks" / "latest").iterdir()) == []


def test_ruff_and_pyright_run_with_the_pinned_torch_only(tree, versions):
    assert tree.run().returncode == 0
    checked = {row["torch"]: row["checks"] for row in tree.rows().values() if row["checks"]}
    passed = {"ruff check": True, "ruff format --check": True, "pyright": True}
    assert checked == {versions.pinned_torch(): passed}
    installed = [call[-1] for call, _ in tree.calls("-m", "pip") if "-e" in call]
    assert sorted(installed) == [".[test,check]"] + [".[test]"] * (len(versions.ROWS) - 1)
    done = tree.run("--only", versions.pinned_torch(), FAKE_FAILURE="ruff")
    assert done.returncode == 1
    assert "  failed: ruff check\n" in done.stdout
    page = (tree.folder / "benchmarks" / "versions.md").read_text()
    assert "checks **fail**: `ruff check`, `ruff format --check`." in page
    assert "checks pass: `pyright`." in page


def test_one_row_can_be_run_again_and_the_others_stay(tree, versions):
    assert tree.run().returncode == 0
    before = tree.rows()
    newest = versions.ROWS[-1]
    done = tree.run("--only", newest[1], FAKE_REPORT=BAD)
    assert done.returncode == 1
    after = tree.rows()
    assert list(after) == list(before)
    assert {row for row in after if after[row] != before[row]} == {newest}
    assert after[newest]["failed"] == ["test_a::test_bad", "test_b"]
    assert "## Failed\n\n- " in (tree.folder / "benchmarks" / "versions.md").read_text()


def test_a_row_that_could_not_run_keeps_what_it_was_and_stops_no_other(tree, versions):
    assert tree.run("--only", versions.ROWS[0][1]).returncode == 0
    before = tree.rows()
    tree.add_program("python3.12", "#!/bin/sh\n[ $2 = venv ] && exit 3\necho 3.12.7\n")
    done = tree.run()
    assert done.returncode == 1
    missing = {row for row in versions.ROWS if row[0] == "3.12"}
    assert missing
    assert set(tree.rows()) == set(versions.ROWS) - missing
    assert set(before) < set(tree.rows())
    for python, torch in missing:
        assert f"No row for torch {torch} on Python {python}:" in done.stderr
    page = (tree.folder / "benchmarks" / "versions.md").read_text()
    assert f"Not run yet: {versions.named(sorted(missing))}." in page
    assert tree.environments() == []


def test_a_matrix_of_some_tests_only_changes_no_table(tree, versions):
    benchmarks, (first, *_, last) = tree.folder / "benchmarks", versions.ROWS
    assert tree.run("--only", last[1]).returncode == 0
    files = [benchmarks / "results" / "versions.json", benchmarks / "versions.md"]
    before = [path.read_bytes() for path in files]
    done = tree.run("--tests=tests/test_grammar.py -k 'a or b'", "--only", first[1])
    assert done.returncode == 0, done.stderr
    call, _ = tree.calls("-m", "pytest")[-1]
    assert call[-3:] == ["tests/test_grammar.py", "-k", "a or b"]
    assert [path.read_bytes() for path in files] == before
    left = {path.name: path.read_text() for path in (benchmarks / "latest").iterdir()}
    assert set(left) == {"versions-partial.json", "versions-partial.md"}
    assert [row["torch"] for row in json.loads(left["versions-partial.json"])["rows"]] == [first[1]]


def test_the_rows_that_were_finished_before_an_interruption_count(tree, versions):
    text = (tree.bin / "python3.12").read_text()
    slow = text.replace("import json", "import os; os.environ['FAKE_SECONDS'] = '100'; import json")
    tree.add_program("python3.12", slow)
    finished = [python for python, _ in versions.ROWS].index("3.12")
    tree.interrupt(signal.SIGINT, "--python", "python3.11", pytests=1)
    assert tree.environments() == []
    tree.add_program("python3.12", text)
    assert tree.run("--only", versions.ROWS[-1][1]).returncode == 0
    assert list(tree.rows()) == [*versions.ROWS[:finished], versions.ROWS[-1]]


def test_a_missing_interpreter_is_told_before_any_row_is_run(tree):
    (tree.bin / "python3.13").unlink()
    done = tree.run(PATH=str(tree.bin))
    assert done.returncode == 2
    assert "An environment with '3.13' was asked for" in done.stderr
    assert not tree.matrix.exists()


def test_too_little_disk_is_told_before_any_row_is_run(tree):
    tree.change("ENVIRONMENT_GB, DOWNLOADS_GB = 0, 0", "ENVIRONMENT_GB, DOWNLOADS_GB = 10**9, 1")
    for options in ((), ("--torch", "2.15.0")):
        done = tree.run(*options)
        assert done.returncode == 2
        assert "GB free.\nFree some space" in done.stderr
        assert not tree.matrix.exists()


@needs_git
def test_a_row_says_which_commit_was_tested_and_whether_files_differ(tree, versions):
    def git(*arguments):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments],
            cwd=tree.folder, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    first, last = versions.ROWS[0], versions.ROWS[-1]
    git("init", "-q")
    shutil.copy(ROOT / ".gitignore", tree.folder)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert tree.run("--only", first[1], "--workers", "3").returncode == 0
    # The table that the first run has written is no change of what is tested.
    assert tree.run("--only", last[1]).returncode == 0
    rows = tree.rows()
    for row in (rows[first], rows[last]):
        assert git("rev-parse", "HEAD").startswith(row["commit"])
        assert row["clean"] is True
    (tree.folder / "new.py").touch()
    assert tree.run("--only", last[1]).returncode == 0
    assert tree.rows()[last]["clean"] is False
    page = (tree.folder / "benchmarks" / "versions.md").read_text()
    assert page.count(", with uncommitted changes") == 1


ROW = {
    "python": "3.13", "torch": "2.15.0", "interpreter": "3.13.0", "build": "2.15.0+cu130",
    "passed": 12345, "failed": [], "expected failures": 0, "skipped": {"a | b": 3}, "exit code": 0,
    "checks": {}, "install seconds": 90.0, "test seconds": 600.5, "minutes": 11.5, "GB": 6.71,
    "date": "2026-11-19", "commit": "0123456789", "clean": True,
}  # fmt: skip


def test_a_row_becomes_a_line_of_the_table(versions):
    assert versions.line(ROW) == (
        "| 3.13.0 | 2.15.0+cu130 | 12,345 | 0 | 3 | 11.5 | 6.7 GB | 2026-11-19 | `0123456789` |"
    )
    changed = ROW | {"failed": ["a::b"], "exit code": 1, "clean": False}
    assert "| **1** | 3 |" in versions.line(changed)
    assert versions.line(changed).endswith("| `0123456789`, with uncommitted changes |")
    assert "| **pytest ended with exit code 3** |" in versions.line(ROW | {"exit code": 3})
    assert versions.good(ROW)
    for wrong in ({"exit code": 3}, {"failed": ["a"]}, {"checks": {"pyright": False}}):
        assert not versions.good(ROW | wrong)


def test_the_page_counts_skips_by_reason_and_row(versions):
    other = ROW | {"python": "3.11", "torch": "2.8.0", "skipped": {"c": 5, "a | b": 1}}
    table = versions.page([other, ROW]).partition("## Skipped\n\n")[2]
    assert table == (
        "| reason | 3.11, 2.8.0 | 3.13, 2.15.0 |\n"
        "|---|--:|--:|\n"
        "| c | 5 |  |\n"
        "| a \\| b | 1 | 3 |\n"
    )
    assert "## Skipped" not in versions.page([ROW | {"skipped": {}}])


def test_the_committed_page_is_made_of_the_committed_rows(versions):
    rows = ROOT / "benchmarks" / "results" / "versions.json"
    if not rows.exists():
        pytest.skip("make test-matrix has not been run yet")
    found = json.loads(rows.read_text())["rows"]
    assert (ROOT / "benchmarks" / "versions.md").read_text() == versions.page(found)


# Make


@needs_make
def test_make_runs_one_environment(tree):
    done = tree.make("test-with", "WITH_TORCH=2.15.0", "PYTHON=python3.13", "TESTS=-k 'a or b'")
    assert done.returncode == 0, done.stderr
    ((call, variables),) = tree.calls("-m", "pytest")
    assert call[-2:] == ["-k", "a or b"]
    assert variables["MAKEFLAGS"] is None
    assert "torch-tuner" in tree.calls("-m", "pip")[-1][0]
    assert tree.environments() == []
    assert not (tree.folder / ".venv").exists()


@needs_make
def test_make_gives_its_variables_to_the_script(tree, versions):
    def options(*arguments):
        (line,) = (
            line
            for line in tree.make("-n", *arguments).stdout.splitlines()
            if "versions.py" in line
        )
        return line.partition("versions.py ")[2]

    one = ("test-with", "WITH_TORCH=2.15.0", "PYTHON=/opt/python")
    assert '--python "/opt/python"' in options(*one)
    assert '--torch "2.15.0"' in options(*one)
    assert "--keep" not in options(*one)
    assert "--keep" not in options(*one, "KEEP=0")
    assert "--keep" in options(*one, "KEEP=1")
    assert '--only ""' in options("test-matrix")
    assert '--only "2.15.0 3.11"' in options("test-matrix", "ONLY=2.15.0 3.11")
    assert "--torch" not in options("test-matrix")


@needs_make
def test_make_help_names_both_and_make_clean_deletes_the_environments(tree):
    told = tree.make("help").stdout
    for target in ("test-with", "test-matrix"):
        assert f"make {target} " in told
    tree.matrix.mkdir()
    assert tree.make("clean").returncode == 0
    assert not tree.matrix.exists()


@needs_make
def test_make_without_a_version_of_torch_says_what_to_type(tree):
    done = tree.make("test-with")
    assert done.returncode != 0
    assert "Run: make test-with WITH_TORCH=2.15.0 PYTHON=python3.13" in done.stderr
