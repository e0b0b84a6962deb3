"""The tables of the documents: made of what the benchmarks measured, and up to date."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from environment import ROOT

pytestmark = pytest.mark.usefixtures("benchmarks_are_importable")
BENCHMARKS = ROOT / "benchmarks"
FILES = (
    "overhead", "compiled", "side_by_side", "summary", "store", "harvest", "guard", "watch",
    "page", "zoo",
)  # fmt: skip


@pytest.fixture
def results_folder(tmp_path):
    """A copy of the results, to be spoiled."""
    return shutil.copytree(BENCHMARKS / "results", tmp_path / "results")


def test_the_documents_hold_what_was_measured():
    from tables import Results, documents

    for path, text in documents(Results(BENCHMARKS / "results")).items():
        assert path.read_text() == text, f"{path} is old: make tables"


def test_every_part_is_in_a_document_and_every_file_is_used():
    from measured import PARTS
    from tables import DOCUMENTS

    written = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    named = set(re.findall(r"<!-- measured: (.*?) -->", written))
    assert named == set(PARTS)
    assert {file for file, _ in PARTS.values()} == set(FILES)


def test_the_page_of_private_names_has_each_of_them_once():
    from private_names import page

    from hookline import torch_private

    listed = re.findall(r"^\| `(\w+)` \| \S.* \| \S.* \|$", page(), re.MULTILINE)
    assert sorted(listed) == sorted(torch_private.__all__)


def test_a_private_name_whose_text_does_not_say_what_happens_without_it_is_told():
    from private_names import row

    assert row("x", "`x(y)`: what y|z is. Required.") == "| `x` | What y\\|z is. | Required. |"
    assert row("x", "Do y. Without it, do z.") == "| `x` | Do y. | Do z. |"
    with pytest.raises(ValueError, match="The text of x does not end with"):
        row("x", "Required. Do y.")


def numbers_in(part):
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\.?\d*", part)]


def test_a_table_says_what_the_json_says(results_folder):
    from tables import Results

    guard = json.loads((results_folder / "guard.json").read_text())
    guard["variants"]["guard"] |= {"ms": 123.4, "ratio": 1.0701, "by medians": 1.02, "goal": 1.05}
    (results_folder / "guard.json").write_text(json.dumps(guard))
    (row,) = (
        line
        for line in Results(results_folder).part("guard table").splitlines()
        if "`guard`" in line
    )
    assert row == "| `guard` | 123 | 1.07 × | 1.02 × | ≤ 1.05 × | missed |"
    assert Results(results_folder).part("guard line") == "1.07 × (goal ≤ 1.05 ×: missed)"
    assert Results(results_folder).part("guard count") == "0 of 1"


def test_what_hookline_adds_is_told_a_place_and_over_raw_hooks(results_folder):
    from tables import Results

    overhead = json.loads((results_folder / "overhead.json").read_text())
    case = overhead["cases"][0]
    for name, added in {
        "raw": 100.0,
        "raw again": 110.0,
        "raw + clone": 150,
        "raw + care": 140,
        "hookline": 125,
    }.items():
        case["variants"][name]["added_us"] = added
    case["places"], case["variants"]["bare"]["fast_us"] = 10, 2500.0
    (results_folder / "overhead.json").write_text(json.dumps(overhead))
    row = Results(results_folder).part("overhead values").splitlines()[4]
    told = numbers_in(row.partition("elements |")[2])
    assert told == [2.5, 10, 15, 1.5, 14, 1.4, 12.5, 1.25, 1.1]


def test_a_goal_that_a_raw_write_misses_too_is_marked(results_folder):
    from tables import Results

    store = json.loads((results_folder / "store.json").read_text())
    for case in store.values():
        if isinstance(case, dict) and "save_file per batch" in case:
            row = {"GB/s": 1.0, "ratio": 1.5, "goal": 2.0, "raw": 1.9}
            case["save_file per batch"] = row | {"something new": 1}
            case["torch.save per batch"] = row | {"raw": 2.1}
    (results_folder / "store.json").write_text(json.dumps(store))
    lines = Results(results_folder).part("store writes").splitlines()
    marked = {line.split(" | ")[0]: line.count("†") for line in lines}
    assert (marked["| save\\_file per batch"], marked["| torch.save per batch"]) == (4, 0)


def test_a_summary_without_torchinfo_beside_it_says_so(results_folder):
    from tables import Results

    summary = json.loads((results_folder / "summary.json").read_text())
    for found in summary["µs"].values():
        del found["torchinfo"]
    (results_folder / "summary.json").write_text(json.dumps(summary))
    assert Results(results_folder).part("summary line") == "torchinfo was not installed"
    assert Results(results_folder).part("summary count") == "4 of 4"


def test_probes_of_the_readme_are_those_of_the_json(results_folder):
    from tables import Results

    found = json.loads((results_folder / "side_by_side.json").read_text())
    found["features"]["hookline"]["only the calls of one's own thread"]["verdict"] = "silent"
    found["features"]["nnsight"]["only the calls of one's own thread"]["verdict"] = "absent"
    (results_folder / "side_by_side.json").write_text(json.dumps(found))
    text = Results(results_folder).part("side_by_side probes")
    assert re.search(r"own thread \| \w+ \| silent \| – \|", text)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}", '{"machine": 3}', b"\xff\xfe"])
def test_a_missing_or_foreign_file_is_named_with_what_makes_it(results_folder, file, content):
    from measured import PARTS
    from tables import Results, Unusable

    path = results_folder / f"{file}.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    parts = [name for name, (source, _) in PARTS.items() if source == file]
    assert parts
    for name in parts:
        with pytest.raises(Unusable, match=rf"(?s){file}\.json.*{file}\.py"):
            Results(results_folder).part(name)


def test_one_benchmark_s_file_in_place_of_another_is_told(results_folder):
    from tables import Results, Unusable

    shutil.copy(results_folder / "guard.json", results_folder / "watch.json")
    with pytest.raises(Unusable, match=r"watch\.json is not what benchmarks/watch\.py writes"):
        Results(results_folder).part("watch table")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<!-- measured: guard line -->", "needs its own"),
        ("A <!-- end -->", "needs its own"),
        ("A <!-- measured: guard line --> <!-- measured: guard line --><!-- end -->", "its own"),
        ("A <!-- measured: no such --><!-- end -->", "No part is named 'no such'. There are: "),
        ("<!-- measured: guard line --><!-- end -->", "belongs within a line"),
        ("A <!-- measured: guard table --><!-- end -->", "belongs on a line of its own"),
    ],
)
def test_a_document_with_marks_that_do_not_fit_is_told(text, told):
    from tables import Results, Unusable, filled

    with pytest.raises(Unusable, match=told):
        filled(text, Results(BENCHMARKS / "results"), "page.md")


def run_in_a_copy(tmp_path, *options):
    """The command, in a copy of the tree that may be spoiled."""
    command = [sys.executable, str(tmp_path / "benchmarks" / "tables.py"), *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@pytest.fixture
def copied_tree(tmp_path):
    """A copy of what the benchmarks and the tables read, without what was left by runs here."""
    for name in ("benchmarks", "docs", "tests/zoo"):
        ignored = shutil.ignore_patterns("images", "latest")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def contents_of_tree(tree):
    """All files, but those that a benchmark leaves for `make tables`."""
    files = [path for path in tree.rglob("*") if path.is_file() and "latest" not in path.parts]
    return {str(path.relative_to(tree)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "command",
    [
        "overhead.py --quick --only entering",
        pytest.param("compiled.py --backend eager --rounds 4", marks=pytest.mark.slow),
        pytest.param("summary.py --rounds 4", marks=pytest.mark.slow),
        pytest.param("guard.py --rounds 1", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_changes_no_document_and_no_result(copied_tree, command):
    name, *options = command.split()
    before = contents_of_tree(copied_tree)
    done = subprocess.run(
        [sys.executable, str(copied_tree / "benchmarks" / name), *options],
        capture_output=True, text=True, cwd=copied_tree, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = copied_tree / "benchmarks" / "latest" / f"{name.removesuffix('.py')}-partial.json"
    assert json.loads(left.read_text())
    assert f"{left.name} (not for the documents)" in done.stdout
    assert (
        run_in_a_copy(copied_tree).stdout == "All tables are up to date.\n"
    )  # nothing is taken over
    assert contents_of_tree(copied_tree) == before


def test_only_one_file_says_where_benchmarks_leave_what_they_measure():
    sources = {path.name: path.read_text() for path in BENCHMARKS.glob("*.py")}
    assert [name for name, text in sources.items() if '"results"' in text] == ["latest.py"]
    for name in FILES:
        assert f'write("{name}",' in sources[f"{name}.py"], name


def test_what_was_measured_in_full_is_taken_over_with_the_documents(copied_tree):
    results, latest = copied_tree / "benchmarks" / "results", copied_tree / "benchmarks" / "latest"
    latest.mkdir()
    watch = json.loads((results / "watch.json").read_text())
    watch["watch, every=50"]["ratio"] = 1.2345
    (latest / "watch.json").write_text(json.dumps(watch))
    (latest / "zoo.md").write_text("# Another page\n")
    before = contents_of_tree(copied_tree)
    assert run_in_a_copy(copied_tree, "--check").returncode == 0  # what is committed agrees
    assert contents_of_tree(copied_tree) == before
    assert run_in_a_copy(copied_tree).stdout.startswith(
        "benchmarks/latest/watch.json: taken over\nbenchmarks/latest/zoo.md: taken over\n"
    )
    assert json.loads((results / "watch.json").read_text()) == watch
    assert (copied_tree / "benchmarks" / "zoo.md").read_text() == "# Another page\n"
    assert "1.23" in (copied_tree / "docs" / "performance.md").read_text()
    assert list(latest.iterdir()) == []
    assert run_in_a_copy(copied_tree).stdout == "All tables are up to date.\n"


def test_a_result_that_makes_no_table_is_not_taken_over(copied_tree):
    latest = copied_tree / "benchmarks" / "latest"
    latest.mkdir()
    (latest / "watch.json").write_text("{}")
    before = contents_of_tree(copied_tree)
    done = run_in_a_copy(copied_tree)
    assert (done.returncode, done.stdout) == (2, "")
    assert "latest/watch.json is not what benchmarks/watch.py writes" in done.stderr
    assert contents_of_tree(copied_tree) == before
    assert (latest / "watch.json").exists()


def test_the_command_checks_writes_and_says_what_is_missing(copied_tree):
    readme = copied_tree / "README.md"
    text = readme.read_text()
    readme.write_text(re.sub(r"(<!-- measured: watch line -->).*?(<!--)", r"\g<1>0.5 ×\2", text))
    old = run_in_a_copy(copied_tree, "--check")
    assert (old.returncode, old.stderr) == (1, "")
    assert old.stdout == "README.md: not up to date\nWrite them with: make tables\n"
    assert run_in_a_copy(copied_tree).stdout == "README.md: written\n"
    assert readme.read_text() == text
    (copied_tree / "benchmarks" / "results" / "page.json").unlink()
    missing = run_in_a_copy(copied_tree)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "page.json. Measure it again: python benchmarks/page.py" in missing.stderr
    assert "Traceback" not in missing.stderr
