"""Run the fast tests with other versions of Python and torch, each in an environment of its own.

    make test-with WITH_TORCH=2.15.0 PYTHON=python3.13   one pair of versions
    make test-with ... KEEP=1                            keep its environment, to look at a failure
    make test-with ... TESTS=tests/test_grammar.py       only these tests
    make test-matrix                                     every pair in ROWS, one after another
    make test-matrix ONLY=2.15.0                         run these rows again; keep the others

The environments are in .matrix/, and are deleted after each run, also after a failure or Ctrl-C.
The JUnit report of each run stays there. The matrix leaves each finished row in latest/, and moves
them to results/versions.json and versions.md at its end.

This script needs only the standard library of Python 3.9: it starts before an environment exists.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from latest import held, take_over, write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"

# The pairs of Python and torch that hookline is tested with, from the oldest to the newest.
ROWS = (("3.11", "2.8.0"), ("3.11", "2.13.0"), ("3.12", "2.14.1"), ("3.13", "2.15.0"))

OLDEST_PYTHON = (3, 11)  # as pyproject.toml says
ENVIRONMENT_GB, DOWNLOADS_GB = 7, 4  # with torch's CUDA build; the downloads until all is installed
MINUTES = 15  # a row on two cores
CHECKS = (("ruff", "check"), ("ruff", "format", "--check"), ("pyright",))
STOPPING = (signal.SIGTERM, signal.SIGHUP)


class Unusable(Exception):
    """A request that cannot be run: what was asked, what was found, what to do."""


# Finding interpreters


class Interpreter(NamedTuple):
    """A Python that can make virtual environments."""

    path: str
    version: str

    @property
    def minor(self) -> str:
        """The version without its last number, such as 3.12."""
        return self.version.rpartition(".")[0]


def candidates(asked: str) -> list[str]:
    """Return the interpreters that a path, a name or a version such as 3.12 can mean."""
    if os.sep in asked:
        return [str(Path(asked).expanduser())]
    version = re.fullmatch(r"(?:python)?(\d+\.\d+)", asked)
    names = [asked] + ([f"python{version[1]}"] if version else [])
    found = [path for path in map(shutil.which, names) if path]
    if version:
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        installed = pyenv.glob(f"{version[1]}.*/bin/python")
        found += map(str, sorted(installed, key=lambda path: numbers(path.parts[-3]), reverse=True))
    return list(dict.fromkeys(found))


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare it with others."""
    return tuple(map(int, re.findall(r"\d+", version)))


def examine(path: str) -> Interpreter | str:
    """Start an interpreter: return it with its version, or say why it cannot be used."""
    program = "import ensurepip, venv, sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run(
            [path, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
    return Interpreter(path, done.stdout.strip())


def find_python(asked: str, version: str | None = None) -> Interpreter:
    """Return the first usable interpreter that is meant, of this version if one is given."""
    seen = []
    for path in candidates(asked):
        found = examine(path)
        if isinstance(found, str):
            seen.append(f"{path}: {found}")
        elif version and found.minor != version:
            seen.append(f"{path} is Python {found.version}")
        elif numbers(found.version) < OLDEST_PYTHON:
            seen.append(f"{path} is Python {found.version}, which is too old")
        else:
            return found
    raise Unusable(
        f"An environment with '{asked}' was asked for.\n"
        f"No usable interpreter was found: {'; '.join(seen) or 'none of that name'}.\n"
        "Install that Python with its venv module (pyenv install, or Debian's python3.X-venv), "
        "or name another one: PYTHON=/path/to/python3"
    )


def pythons_of(rows: Iterable[tuple[str, str]], preferred: str) -> dict[str, Interpreter]:
    """Find the interpreter of each row before any is run; use the preferred one where it fits."""
    found = {}
    for version in dict.fromkeys(version for version, _ in rows):
        with contextlib.suppress(Unusable):
            found[version] = find_python(preferred, version)
        if version not in found:
            found[version] = find_python(version, version)
    return found


# The environment


def with_torch(constraints: str, version: str) -> str:
    """Return the constraints with another version in the line of torch."""
    text, count = re.subn(r"(?m)^torch==.*$", f"torch=={version}", constraints)
    if count != 1:
        raise Unusable(
            f"constraints.txt was to pin torch=={version}.\n"
            f"It has {count} lines that begin with torch==, not one.\n"
            "Give it one line such as torch==2.13.0."
        )
    return text


def pinned_torch() -> str:
    """Return the version of torch in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text()
    found = re.search(r"(?m)^torch==(\S+)$", text)
    return found[1] if found else ""


def check_version(torch: str) -> None:
    """Raise Unusable unless this is a version of torch."""
    if not re.fullmatch(r"\d+\.\d+\.\d+[\w.+]*", torch):
        raise Unusable(
            "An environment needs a version of torch with three numbers.\n"
            f"The version given is {torch!r}.\n"
            "Run: make test-with WITH_TORCH=2.15.0 PYTHON=python3.13"
        )


def check_disk(folder: Path, needed: float = ENVIRONMENT_GB + DOWNLOADS_GB) -> None:
    """Raise Unusable unless the disk has room for an environment and its downloads."""
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free / 1e9
    if free < needed:
        raise Unusable(
            f"An environment with torch needs {needed:.0f} GB in {folder}: about "
            f"{ENVIRONMENT_GB} GB, and {DOWNLOADS_GB} GB for downloads while it is installed.\n"
            f"That disk has {free:.1f} GB free.\n"
            f"Free some space, or make {folder} a symbolic link to a folder on a larger disk."
        )


@contextlib.contextmanager
def environment(python: Interpreter, torch: str, keep: bool = False) -> Iterator[Path]:
    """Make an empty virtual environment, and delete it after the block."""
    folder = FOLDER / f"py{python.minor.replace('.', '')}-torch{re.sub(r'[^a-z0-9]', '', torch)}"
    delete(folder)  # what a run that was killed has left
    FOLDER.mkdir(exist_ok=True)
    try:
        heading(f"making {shown(folder)} with Python {python.version} ({python.path})")
        if run([python.path, "-m", "venv", folder]):
            raise Unusable(
                f"{shown(folder)} was to be made with {python.path}.\n"
                "Its venv module failed, with the message above.\n"
                "Name another Python: PYTHON=/path/to/python3"
            )
        yield folder
    finally:
        if keep:
            heading(f"kept: {shown(folder)}/bin/python -m pytest")
        else:
            delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder whole, even when Ctrl-C is pressed again meanwhile."""
    if not folder.exists():
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        heading(f"deleting {shown(folder)}")
        for _ in range(5):  # processes that are about to end may still write into it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return
            time.sleep(1)
        print(f"{folder} could not be deleted whole. Delete it with: rm -rf {folder}")
    finally:
        signal.signal(signal.SIGINT, before)


def installing(torch: str, extras: str, originals: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each `pip install`, which do what the Makefile does for .venv."""
    pin = f"torch=={torch}"  # on each line, so that no library brings another version
    steps = [["hatchling", "editables"], ["--no-build-isolation", pin, "-e", f".[{extras}]"]]
    if originals:
        steps.append(["--no-deps", "--ignore-requires-python", pin, *originals])
    return steps


def install(folder: Path, torch: str, extras: str, originals: Sequence[str]) -> None:
    """Install hookline with its extras and this version of torch."""
    heading(f"installing torch {torch} and hookline[{extras}] (some minutes)")
    limits, downloads = folder / "constraints.txt", folder / "downloads"
    limits.write_text(with_torch((ROOT / "constraints.txt").read_text(), torch))
    downloads.mkdir()
    # No cache: each version of torch comes with gigabytes that no other environment uses.
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-cache-dir",
           "--disable-pip-version-check", "-c", limits]  # fmt: skip
    for arguments in installing(torch, extras, originals):
        if run([*pip, *arguments], TMPDIR=str(downloads)):
            raise Unusable(
                f"torch {torch} and hookline[{extras}] were to be installed into "
                f"{shown(folder)}.\n"
                f"`pip install {' '.join(arguments)}` failed, with the message above.\n"
                "Choose a version that has a build for this Python, or change the pin in "
                "constraints.txt; if the package index was out of reach, try again."
            )
    shutil.rmtree(downloads)


def size(folder: Path) -> float:
    """Return the gigabytes of all files in a folder."""
    files = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in files) / 1e9


# Running commands


def heading(text: str) -> None:
    """Print what begins now, as the Makefile does."""
    print(f"==> {text}", flush=True)


def shown(path: Path) -> str:
    """Return a path as it is from the root of the tree."""
    return str(path.relative_to(ROOT))


def variables() -> dict[str, str]:
    """Return the environment variables, without what leads to another Python or to make."""
    other = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    return {name: value for name, value in os.environ.items() if name not in other}


def run(command: Sequence[str | Path], **more: str) -> int:
    """Run a command from the root of the tree, and return its exit code.

    All processes that the command started end with it, also on an interruption: none of them may
    write into a folder that is being deleted.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables() | more,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def output(command: Sequence[str | Path]) -> str:
    """Return what a command prints, or an empty string if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables(), capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def tree_state() -> tuple[str, bool]:
    """Return hookline's commit, and whether no file differs from it, but for what is made here."""
    commit = output(["git", "rev-parse", "--short=10", "HEAD"])
    own = [
        f":(exclude){name}"
        for name in ("benchmarks/versions.md", "benchmarks/results/versions.json")
    ]
    changed = output(["git", "status", "--porcelain", "--", ".", *own])
    return (commit or "unknown", bool(commit) and not changed)


# One row: an environment and what its tests gave


def read_report(path: Path) -> dict[str, Any]:
    """Return the outcomes of a JUnit report: counts, names of failed tests, reasons to skip."""
    passed, failed, expected, reasons = 0, [], 0, Counter[str]()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append("::".join(filter(None, (case.get("classname"), case.get("name")))))
        elif skipped is None:
            passed += 1
        elif skipped.get("type") == "pytest.xfail":
            expected += 1
        else:
            lines = (skipped.get("message") or "no reason").strip().splitlines()
            reasons[lines[0]] += 1
    return {
        "passed": passed,
        "failed": sorted(set(failed)),
        "expected failures": expected,
        "skipped": dict(sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))),
    }


def run_tests(folder: Path, tests: Sequence[str], workers: str) -> dict[str, Any]:
    """Run the fast tests, and return their outcomes."""
    heading(f"running {' '.join(tests) or 'the tests'}")
    report = folder.with_suffix(".xml")
    report.unlink(missing_ok=True)
    code = run(
        [folder / "bin" / "python", "-m", "pytest", "-m", "not slow", "--numprocesses", workers,
         f"--junitxml={report}", *tests],
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    if not report.exists():
        raise Unusable(
            f"The tests were to be run in {shown(folder)}.\n"
            f"pytest ended with exit code {code} and without a report.\n"
            "Read its output above; KEEP=1 keeps the environment, to run it by hand."
        )
    return read_report(report) | {"exit code": code}


def run_checks(folder: Path) -> dict[str, bool]:
    """Run ruff and pyright, and return which of them passed."""
    python, passed = folder / "bin" / "python", {}
    for command in CHECKS:
        name = " ".join(command)
        heading(name)
        more = ["--pythonpath", python] if command[0] == "pyright" else []
        done = run([python, "-m", *command, *more], PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
        passed[name] = done == 0
    return passed


def run_row(
    python: Interpreter, torch: str, options: argparse.Namespace, check: bool = False
) -> dict[str, Any]:
    """Make an environment, run the tests in it, delete it; return the row of the table."""
    check_disk(FOLDER)
    before, began = tree_state(), time.monotonic()
    with environment(python, torch, options.keep) as folder:
        install(folder, torch, "test,check" if check else "test", options.originals)
        installed = time.monotonic()
        build = output([folder / "bin" / "python", "-c", "import torch; print(torch.__version__)"])
        found = run_tests(folder, options.tests, options.workers)
        tested = time.monotonic()
        checks = run_checks(folder) if check else {}
        gigabytes = size(folder)
    commit, clean = before
    return {
        "python": python.minor,
        "torch": torch,
        "interpreter": python.version,
        "build": build or torch,
        **found,
        "checks": checks,
        "install seconds": round(installed - began, 1),
        "test seconds": round(tested - installed, 1),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "GB": round(gigabytes, 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "clean": clean and tree_state() == before,
    }


def good(row: dict[str, Any]) -> bool:
    """Return True if all tests and checks of a row passed."""
    return row["exit code"] == 0 and not row["failed"] and all(row["checks"].values())


def summary(row: dict[str, Any]) -> str:
    """Return what one environment gave, in a few lines."""
    outcome = (
        f"Python {row['interpreter']}, torch {row['build']}: {row['passed']} passed, "
        f"{len(row['failed'])} failed, {sum(row['skipped'].values())} skipped in "
        f"{row['test seconds']:.0f} s (pytest's exit code: {row['exit code']})."
    )
    lines = [
        outcome,
        f"Installed in {row['install seconds']:.0f} s. The environment took {row['GB']:.1f} GB.",
        *(f"  failed: {name}" for name in row["failed"]),
        *(f"  failed: {name}" for name, passed in row["checks"].items() if not passed),
        *(f"  skipped, {count} ×: {reason}" for reason, count in row["skipped"].items()),
    ]
    return "\n".join(lines)


# The matrix


def chosen(only: str) -> list[tuple[str, str]]:
    """Return the rows that have one of these versions of torch or Python; all for none."""
    asked = only.split()
    known = {version for row in ROWS for version in row}
    unknown = [word for word in asked if word not in known]
    if unknown:
        raise Unusable(
            f"The rows {only!r} were asked for.\n"
            f"No row has the version {unknown[0]}. There are: {named(ROWS)}.\n"
            "Give ONLY versions of torch or of Python out of these, or run another pair with: "
            "make test-with WITH_TORCH=2.15.0 PYTHON=python3.13"
        )
    return [row for row in ROWS if not asked or set(asked) & set(row)]


def named(rows: Iterable[tuple[str, str]]) -> str:
    """Return the rows in words."""
    return ", ".join(f"torch {torch} on Python {python}" for python, torch in rows)


def merged(old: Iterable[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows in the order of ROWS, with one of them new."""
    found = {(row["python"], row["torch"]): row for row in [*old, new]}
    return [found[row] for row in ROWS if row in found]


def run_matrix(options: argparse.Namespace) -> int:
    """Run rows one after another, and write the table; the exit code."""
    rows, full = chosen(options.only), not options.tests
    pythons = pythons_of(rows, options.python)
    announce(rows)
    known: list[dict[str, Any]] = held("versions").get("rows", []) if full else []
    failures, done = [], []
    for version, torch in rows:
        try:
            row = run_row(pythons[version], torch, options, check=torch == pinned_torch())
        except Unusable as error:
            failures.append(f"No row for torch {torch} on Python {version}:\n{error}")
            print(failures[-1], file=sys.stderr, flush=True)
            continue
        known = merged(known, row)
        done.append(row)
        print(summary(row), flush=True)
        write("versions", {"rows": known}, full)
        write("versions.md", page(known), full)
    if done and full:
        take_over("versions")
        print("Moved to benchmarks/results/versions.json and benchmarks/versions.md.")
    print("", *table(known), "", *failures, sep="\n")
    return 0 if not failures and all(map(good, done)) else 1


def run_one(options: argparse.Namespace) -> int:
    """Run the tests with one version of torch; the exit code."""
    check_version(options.torch)
    python = find_python(options.python)
    announce([(python.minor, options.torch)])
    row = run_row(python, options.torch, options)
    print(summary(row))
    print(f"The JUnit report is in {shown(FOLDER)}.")
    return 0 if good(row) else 1


def announce(rows: Sequence[tuple[str, str]]) -> None:
    """Say how much disk and time this needs; raise Unusable if there is too little disk."""
    print(
        f"The fast tests are run with {named(rows)}: one environment at a time, with about "
        f"{ENVIRONMENT_GB} GB on disk\nand {DOWNLOADS_GB} GB more while it is installed, and about "
        f"{MINUTES * len(rows)} minutes in all. Ctrl-C stops, and deletes the environment.",
        flush=True,
    )
    check_disk(FOLDER)


# The page

HEADING = [
    "| Python | torch | passed | failed | skipped | minutes | disk | date | hookline |",
    "|---|---|--:|--:|--:|--:|--:|---|---|",
]
BEFORE = """\
# Versions

Written by `make test-matrix`. Each row is a run of the fast tests (`pytest -m "not slow"`) in a new
environment with this Python and this torch; every other library has the version that
constraints.txt pins. Minutes and disk include the installation. *hookline* is the commit that was
tested.
"""


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of all rows."""
    return [*HEADING, *map(line, rows)]


def line(row: dict[str, Any]) -> str:
    """Return the line of one row."""
    failed = str(len(row["failed"]))
    if row["exit code"] and not row["failed"]:
        failed = f"pytest ended with exit code {row['exit code']}"
    cells = (
        row["interpreter"],
        row["build"],
        f"{row['passed']:,}",
        failed if failed == "0" else f"**{failed}**",
        sum(row["skipped"].values()),
        f"{row['minutes']:.1f}",
        f"{row['GB']:.1f} GB",
        row["date"],
        f"`{row['commit']}`" + ("" if row["clean"] else ", with uncommitted changes"),
    )
    return f"| {' | '.join(map(str, cells))} |"


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return versions.md: the table, the checks, what failed and what was skipped."""
    lines = [BEFORE, *table(rows)]
    missing = [pair for pair in ROWS if pair not in {(row["python"], row["torch"]) for row in rows}]
    if missing:
        lines += ["", f"Not run yet: {named(missing)}."]
    for row in rows:
        for passed, verb in ((True, "pass"), (False, "**fail**")):
            names = [f"`{name}`" for name, result in row["checks"].items() if result is passed]
            if names:
                lines += [
                    "",
                    f"With torch {row['torch']}, these checks {verb}: {', '.join(names)}.",
                ]
    failed = [f"- {title(row)}: `{name}`" for row in rows for name in row["failed"]]
    if failed:
        lines += ["", "## Failed", "", *failed]
    return "\n".join(lines + skips(rows)) + "\n"


def title(row: dict[str, Any]) -> str:
    """Return the versions of a row."""
    return f"{row['python']}, {row['torch']}"


def skips(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section with the number of skipped tests by reason and row."""
    total = sum((Counter(row["skipped"]) for row in rows), Counter[str]())
    if not total:
        return []
    lines = [
        *("", "## Skipped", ""),
        f"| reason | {' | '.join(map(title, rows))} |",
        f"|---|{'--:|' * len(rows)}",
    ]
    for reason, _ in total.most_common():
        counts = (str(row["skipped"].get(reason, "")) for row in rows)
        lines.append(f"| {reason.replace('|', chr(92) + '|')} | {' | '.join(counts)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", help="run only one environment, with this version of torch")
    parser.add_argument("--python", default="python3", help="its interpreter: a path or a name")
    parser.add_argument("--keep", action="store_true", help="keep that environment")
    parser.add_argument("--only", default="", help="the rows with these versions only")
    parser.add_argument(
        "--originals", nargs="*", default=[], help="installed without what they need"
    )
    parser.add_argument("--workers", default="2", help="test processes")
    parser.add_argument("--tests", type=shlex.split, default=[], help="more arguments of pytest")
    options = parser.parse_args(arguments)
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        return run_matrix(options) if options.torch is None else run_one(options)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
