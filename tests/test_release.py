"""What is released: a wheel that works where only torch, numpy and safetensors are installed."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from environment import ROOT

import hookline

WITHOUT_EXTRAS = """
import sys

class Without:
    \"\"\"Finds all but the optional libraries, as if they were not installed.\"\"\"

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.path.insert(0, {folder!r})
"""

OPTIONAL = (
    "sklearn", "matplotlib", "click", "rich", "tqdm", "ray", "lightning", "transformers",
    "tensorboard", "wandb", "pandas", "PIL",
)  # fmt: skip


def build_with_hatchling(kind, source, folder):
    """A wheel or an sdist, made by the build backend."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        check=True, capture_output=True, cwd=source,
    )  # fmt: skip
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    return build_with_hatchling("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file, tmp_path_factory):
    """The wheel, unpacked as pip would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build_with_hatchling("sdist", ROOT, folder)) as archive:
        # The first releases of Python 3.11 know no filter, and later ones warn without.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safe)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


def run_with_wheel(wheel, program, *, without=OPTIONAL, cwd):
    """A program that has the wheel and no optional library: stdout."""
    start = WITHOUT_EXTRAS.format(names=without, folder=str(wheel))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", start + program],
        capture_output=True, text=True, cwd=cwd, env=clean_environment(),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_the_package_and_its_files_only(wheel):
    names = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    for needed in ("hookline/py.typed", "hookline/view/page.js", "hookline/view/page.css"):
        assert needed in names
    foreign = {name for name in names if not name.startswith(("hookline/", "hookline-"))}
    assert not foreign
    assert not [name for name in names if "__pycache__" in name or "node_modules" in name]
    (entry,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "hookline = hookline.__main__:main" in entry.read_text()
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    assert f"Version: {hookline.__version__}\n" in metadata.read_text()


def test_the_wheel_works_without_any_extra(wheel, tmp_path):
    program = """
import torch, hookline as hl
from torch import nn
assert hl.__file__.startswith(sys.path[0]), hl.__file__
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
x = torch.randn(8, 1, 8, 8)
with hl.capture(model, "*", "*:grad_output", detach=True) as record:
    model(x).square().mean().backward()
with hl.edit(model, "1", hl.zero()):
    assert torch.equal(model(x)[0], model[3].bias)
hl.load_record(hl.save_record(record, "record"))
hl.report(record, "page.html")
hl.Recipe([("1", hl.scale(2.0))]).save("recipe")
assert len(hl.harvest(model, x.split(4), "1", to="acts", quiet=True)) == 8
print(hl.summarize(model, x).totals["flops"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hl.watch(model, every=1, to="run", optimizer=optimizer), hl.guard(model):
    model(x).square().mean().backward()
    optimizer.step()
print(len(hl.Run("run").steps()), len(hl.measure(model, "*", statistics=[hl.Mean(None)], data=[x])))
print(hl.compare(model, model, x).equal)
"""
    flops, counts, equal = run_with_wheel(wheel, program, cwd=tmp_path).splitlines()
    assert int(flops) > 0
    assert counts.split()[0] == "1"
    assert equal == "True"


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("from hookline.view import figures\nfigures.histograms(torch.ones(3))", "report"),
        (
            "from hookline.integrations.tensorboard import TensorBoardWriter as W\nW('x')",
            "tensorboard",
        ),
        ("from hookline.integrations.wandb import WandbWriter as W\nW()", "wandb"),
        ("from hookline.integrations import lightning", "lightning"),
        ("from hookline.integrations import transformers", "transformers"),
    ],
)
def test_a_missing_extra_gives_the_line_that_installs_it(wheel, tmp_path, program, extra):
    wrapped = "\n".join(f"    {line}" for line in program.splitlines())
    whole = f"import torch\ntry:\n{wrapped}\nexcept ImportError as error:\n    print(error)\n"
    assert f"pip install 'hookline[{extra}]'" in run_with_wheel(wheel, whole, cwd=tmp_path)


def test_types_reach_a_user_s_project(wheel, tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "user.py").write_text(
        "import torch\nfrom torch import nn\nimport hookline as hl\n\n"
        "model = nn.Sequential(nn.Linear(2, 2))\n"
        "with hl.capture(model, '0') as record:\n    model(torch.ones(1, 2))\n"
        "reveal_type(hl.select(model))\nreveal_type(hl.Store.open('x'))\n"
        "reveal_type(hl.summarize(model))\n"
        "hl.harvest(model)\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{wheel}"]}}')
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "user.py"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )  # fmt: skip
    assert '"Store"' in result.stdout
    assert '"Summary"' in result.stdout
    errors = [line for line in result.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1, result.stdout  # harvest without data and places
    assert ":11:" in errors[0]


def test_what_a_with_gives_has_its_type_in_a_user_s_project(wheel, tmp_path):
    pytest.importorskip("pyright")
    verbs = {
        "hl.capture(model, '0')": "Record", "hl.attention(model)": "Patterns",
        "hl.measure(model, '0', statistics=[hl.Mean()])": "Measurements",
        "hl.edit(model, '0', lambda value: value * 2)": "edit",
        "hl.edit(model, '0', lambda value, call: value * call.index)": "edit",
        "hl.hook(model, '0', lambda value: print(value))": "hook", "hl.guard(model)": "guard",
        "hl.watch(model)": "watch", "hl.preserve(model)": "preserve",
    }  # fmt: skip
    (tmp_path / "user.py").write_text(
        "from torch import nn\nimport hookline as hl\n\nmodel = nn.Sequential(nn.ReLU())\n"
        + "".join(f"with {verb} as given:\n    reveal_type(given)\n" for verb in verbs)
    )
    config = f'{{"typeCheckingMode": "strict", "extraPaths": ["{wheel}"]}}'
    (tmp_path / "pyrightconfig.json").write_text(config)
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "user.py"],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )  # fmt: skip
    assert re.findall(r'Type of "given" is "(.*)"', result.stdout) == list(verbs.values())
    assert " error: " not in result.stdout, result.stdout


def contents_of_wheel(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if "RECORD" not in name}


def test_the_sdist_holds_what_it_takes_to_build_the_wheel_again(source, wheel_file, tmp_path):
    again = contents_of_wheel(build_with_hatchling("wheel", source, tmp_path))
    assert again == contents_of_wheel(wheel_file)
    for needed in (
        "Makefile", "constraints.txt", "frontend/package.json", "tests/test_hooks.py", "LICENSE",
        "mkdocs.yml", "README.md", "benchmarks/results/guard.json", "tests/plain_install.py",
        "SECURITY.md", "CITATION.cff", ".github/workflows/tests.yml",
    ):  # fmt: skip
        assert (source / needed).exists(), needed
    names = {path.name for path in source.rglob("*")}
    assert not names & {"node_modules", "__pycache__", ".venv", ".bench-venv", "site"}


@pytest.mark.slow
def test_the_usual_command_builds_both(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    version = hookline.__version__
    assert {path.name for path in tmp_path.iterdir()} == {
        f"hookline-{version}.tar.gz", f"hookline-{version}-py3-none-any.whl",
    }  # fmt: skip


SMOKE = """
import importlib.metadata, importlib.util, sys
from pathlib import Path
import torch
from torch import nn
import hookline as hl

assert hl.__file__.startswith(sys.prefix), hl.__file__
assert importlib.metadata.version("hookline") == hl.__version__
for name in {optional!r}:
    assert importlib.util.find_spec(name) is None, name
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(3, 4)
with hl.capture(model, "1", "2:input", "0.weight:grad") as record:
    model(x).sum().backward()
assert torch.equal(record["1"], torch.relu(model[0](x)))
assert torch.equal(record["0.weight:grad"], model[0].weight.grad)
with hl.edit(model, "1", hl.zero()):
    assert torch.equal(model(x)[0], model[2].bias)
assert "</html>" in Path(hl.report(record, "page.html")).read_text()
print(hl.__version__)
"""


@pytest.fixture
def environment(wheel_file, tmp_path):
    """A new virtual environment with the wheel and what it depends on, from the package index."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    limits = ROOT / "constraints.txt"
    torch_pin = re.search(r"^torch==\S+$", limits.read_text(), re.MULTILINE)[0]

    def pip(*command):
        return subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", *command, "-qq", "-c", str(limits)],
            capture_output=True, text=True, cwd=folder, env=clean_environment(),
        )  # fmt: skip

    tried = pip("download", "--no-deps", "safetensors")
    if tried.returncode:
        pytest.skip(f"the package index is out of reach: {tried.stderr.strip()[-200:]}")
    installed = pip("install", torch_pin, str(wheel_file))
    assert installed.returncode == 0, installed.stderr
    yield folder
    shutil.rmtree(folder)  # a gigabyte


def clean_environment():
    """The variables of this process, without what would lead to this tree."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_empty_environment(environment, tmp_path):
    def run(*command):
        found = subprocess.run(
            [str(environment / "bin" / command[0]), *command[1:]],
            capture_output=True, text=True, cwd=tmp_path, env=clean_environment(),
        )  # fmt: skip
        return found.returncode, found.stdout, found.stderr

    program = SMOKE.format(optional=OPTIONAL)
    assert run("python", "-W", "error", "-c", program) == (0, f"{hookline.__version__}\n", "")
    for asked in ("--help", "doctor"):
        code, out, told = run("hookline", asked)
        assert (code, out) == (2, "")
        assert "Install it with: pip install 'hookline[cli]'" in told
        assert "Traceback" not in told
