"""The workflows run what the Makefile has, with the supported versions and pinned actions."""

import re
import runpy

import pytest
import yaml
from environment import ROOT

import hookline
from hookline.supported_versions import NEWEST_TORCH, OLDEST_TORCH, PYTHONS

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
CITATION = ROOT / "CITATION.cff"
ON = True  # YAML 1.1 reads the key `on` as a boolean


def load(path):
    return yaml.safe_load(path.read_text())


def jobs():
    return [(path.stem, job) for path in WORKFLOWS for job in load(path)["jobs"].values()]


def commands():
    """Every line of shell in the workflows."""
    return [line for _, job in jobs() for step in job["steps"] for line in shell(step)]


def shell(step):
    return step.get("run", "").splitlines()


def combinations(name):
    """The combinations that a workflow runs."""
    (job,) = load(ROOT / f".github/workflows/{name}.yml")["jobs"].values()
    return job["strategy"]["matrix"]["include"]


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_the_workflows_are_these():
    assert [path.stem for path in WORKFLOWS] == ["checks", "foundation", "tests", "wheel"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_by_a_commit_and_has_its_version_behind_it(path):
    lines = [line for line in path.read_text().splitlines() if re.search(r"\buses:", line)]
    assert lines
    for line in lines:
        assert re.fullmatch(r" +- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    steps = [step for job in load(path)["jobs"].values() for step in job["steps"]]
    assert len(lines) == sum("uses" in step for step in steps)


def test_an_action_has_one_version_everywhere():
    text = "".join(path.read_text() for path in WORKFLOWS)
    pins = set(re.findall(r"uses: (\S+)@(\S+ # \S+)", text))
    assert len({action for action, _ in pins}) == len(pins)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_only_and_ends_by_itself(path):
    workflow = load(path)
    assert set(workflow) == {"name", ON, "permissions", "concurrency", "jobs"}
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]
    assert "pull_request_target" not in workflow[ON]
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert 0 < job["timeout-minutes"] <= 90
        assert "latest" not in job["runs-on"]  # an image that changes by itself
        checkout = next(step for step in job["steps"] if "checkout" in step.get("uses", ""))
        assert checkout["with"]["persist-credentials"] is False


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    called = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"check", "docs", "test-install", "test-with"} <= called
    missing = [name for name in called if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
    assert not missing


def test_every_variable_that_is_given_to_make_is_one_of_the_makefile_s():
    makefile = (ROOT / "Makefile").read_text()
    given = set(re.findall(r"\b([A-Z_]+)=", "\n".join(commands())))
    assert given == {"WITH_TORCH", "PYTHON", "INSTALL_PYTHON"}
    for name in given:
        assert f"$({name})" in makefile, name


def test_the_tests_run_with_the_pairs_of_make_test_matrix(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    expected = runpy.run_path(str(ROOT / "benchmarks/versions.py"))["ROWS"]
    assert tuple((row["python"], row["torch"]) for row in combinations("tests")) == expected


def test_the_tests_run_with_the_oldest_and_the_newest_version():
    torches = [numbers(row["torch"])[:2] for row in combinations("tests")]
    assert (min(torches), max(torches)) == (OLDEST_TORCH, NEWEST_TORCH)
    assert tuple(dict.fromkeys(row["python"] for row in combinations("tests"))) == PYTHONS


def test_where_it_runs_lists_the_same_pairs():
    page = (ROOT / "docs/where-it-runs.md").read_text()
    listed = re.findall(r"^\| (3\.\d+) \| (2\.\d+) \|$", page, re.MULTILINE)
    minor = [(row["python"], row["torch"].rpartition(".")[0]) for row in combinations("tests")]
    assert listed == minor


def test_the_foundation_is_tested_on_other_systems_and_the_next_python():
    found = combinations("foundation")
    systems = {row["os"].partition("-")[0] for row in found}
    assert systems == {"macos", "windows", "ubuntu"}
    oldest_of_ubuntu = min(numbers(row["python"]) for row in found if "ubuntu" in row["os"])
    assert oldest_of_ubuntu > max(map(numbers, PYTHONS))
    (command,) = [line for line in commands() if "pytest " in line and "pip" not in line]
    files = re.findall(r"tests/\S+", command)
    assert len(files) > 10
    for file in files:
        assert (ROOT / file).exists(), file


def test_no_job_may_fail_unseen():
    for name, job in jobs():
        assert "continue-on-error" not in str(job), name


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_has_what_the_form_needs(path):
    form = load(path)
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert set(form) == {"name", "description", "title", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    for field in fields:
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
        assert isinstance(field["validations"]["required"], bool)


def test_the_issue_templates_are_these():
    assert [path.stem for path in TEMPLATES] == ["bug", "config", "feature"]


def test_the_citation_is_of_this_version():
    citation = load(CITATION)
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["title"] == "hookline"
    assert citation["version"] == hookline.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


def test_nothing_here_names_an_address():
    for path in [*WORKFLOWS, *TEMPLATES, CITATION, ROOT / "SECURITY.md"]:
        assert "://" not in path.read_text(), path
