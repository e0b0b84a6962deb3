"""Install hookline as a user does, run what README shows, and delete everything again.

`make test-install` runs it. A virtual environment of the Python that runs this file gets a wheel of
this tree with the extras cli and report, and whatever pip chooses for torch: the newest release, on
Linux with several GB of CUDA libraries. Nothing is pinned, and nothing is kept in pip's cache.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "cli,report"
NEEDED = 10  # GB; at one time both what is downloaded and what is installed are there: 8 for 2.15
README = re.compile(r"^```python\n(.*?)^```$\s+^```output\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Run every step in a new folder, which is deleted whatever happens."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    folder = Path(tempfile.mkdtemp(prefix="hookline-install-"))
    try:
        check_disk(folder)
        began = time.monotonic()
        environment = install(folder)
        size = sum(file.lstat().st_size for file in environment.rglob("*")) / 1e9
        print(f"==> {size:.1f} GB installed in {time.monotonic() - began:.0f} s")
        use(environment, folder)
    finally:
        shutil.rmtree(folder)
    print("==> README's example, the demo and the doctor run without a warning")


def check_disk(folder: Path) -> None:
    """Say what this takes, and end here if the disk is too full."""
    free = shutil.disk_usage(folder).free / 1e9
    print(
        f"==> installing a wheel and the newest torch into {folder}: up to {NEEDED} GB of disk "
        f"({free:.0f} GB are free) and a few minutes; deleted afterwards"
    )
    if free < NEEDED:
        sys.exit(f"That is too little disk. TMPDIR names another folder than {folder.parent}.")


def install(folder: Path) -> Path:
    """Build the wheel and install it, with its extras, into a new environment."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    (folder / "temporary").mkdir()
    # pip's downloads lie in this folder, too, so that an interrupted run leaves none behind.
    settings = clean() | {"TMPDIR": str(folder / "temporary")}
    pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "wheel", ROOT]
    subprocess.run(build, check=True, env=settings)
    (wheel,) = (folder / "wheel").glob("hookline-*.whl")
    print(f"==> pip install {wheel.name}[{EXTRAS}]", flush=True)
    subprocess.run([*pip, "install", "--quiet", f"{wheel}[{EXTRAS}]"], check=True, env=settings)
    return environment


def use(environment: Path, folder: Path) -> None:
    """Run from an empty folder what README tells a user to run."""
    found = README.search((ROOT / "README.md").read_text())
    assert found is not None, "README.md has no example with an output"
    example, output = found.groups()
    empty = folder / "empty"
    empty.mkdir()

    def run(*command: str, title: str = "") -> str:
        print("==>", title or " ".join(command), flush=True)
        done = subprocess.run(
            [environment / "bin" / command[0], *command[1:]],
            capture_output=True, text=True, cwd=empty, env=clean() | {"PYTHONWARNINGS": "error"},
        )  # fmt: skip
        if done.returncode or done.stderr:
            sys.exit(f"It ended with {done.returncode} and wrote:\n{done.stdout}{done.stderr}")
        return done.stdout

    said = run("python", "-W", "error", "-c", "import hookline")
    assert not said, said
    said = run("python", "-c", example, title="the example in README.md")
    assert said.split() == output.split(), said
    said = run("hookline", "demo")
    page = Path(said.split()[-1])
    assert page.name == "report.html", said
    shutil.rmtree(page.parent)
    said = run("hookline", "doctor")
    assert "No problems found" in said, said
    print(said)


def clean() -> dict[str, str]:
    """Return the variables of this process without those that lead to other packages."""
    leading = ("PYTHON", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if not key.startswith(leading)}


if __name__ == "__main__":
    main()
