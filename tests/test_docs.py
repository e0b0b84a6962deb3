"""Every python block in README.md and docs/ runs.

The blocks of one file run in order and share one namespace, as a reader would type them. A block
that cannot run here is preceded by a line `<!-- no-run -->`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_RUN = "<!-- no-run -->"
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.M)


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The line number and the code of each block that is to run."""
    for block in BLOCK.finditer(text):
        before = text[: block.start()].rstrip().rpartition("\n")[2].strip()
        if before != NO_RUN:
            yield text.count("\n", 0, block.start("code")), dedent(block["code"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for line, code in python_blocks(page.read_text()):
        # Blank lines in front make tracebacks point at the line of the page.
        exec(compile("\n" * line + code, page, "exec"), namespace)


def test_the_map_in_the_readme_names_only_what_exists():
    _, _, section = (ROOT / "README.md").read_text().partition("## Map\n")
    folders = {0: ROOT}
    for line in re.findall(r"^    ( *\S.*)$", section, re.M):
        depth = len(line) - len(line.lstrip())
        name, *words = line.split()
        folders[depth + 2] = folders[depth] / name
        assert (folders[depth] / name).exists(), line
        for mentioned in (word.strip(";:,`") for word in words):
            if mentioned.endswith((".py", ".md")):
                beside = folders[depth] if name.endswith(".py") else folders[depth] / name
                assert (beside / mentioned).exists(), line
    assert len(folders) > 1


def test_blocks_are_found_with_their_line_numbers():
    text = "# T\n\n```python\na = 1\n```\n\n- in a list\n\n    ```python\n    b = 2\n    ```\n"
    assert list(python_blocks(text)) == [(3, "a = 1\n"), (9, "b = 2\n")]


def test_blocks_marked_no_run_and_other_languages_are_left_out():
    text = f"{NO_RUN}\n```python\nraise SystemExit\n```\n\n```text\nno code\n```\n"
    assert list(python_blocks(text)) == []
