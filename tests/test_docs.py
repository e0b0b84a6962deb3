"""Every python block in README.md and docs/ runs, and prints what the page says.

The blocks of one file run in order and share one namespace, as a reader would type them. A block
that cannot run here is preceded by a line `<!-- no-run -->`. What a block prints stands in a block
`output` right behind it and is compared character for character; a page that shows the output of
one block shows that of all.
"""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch
from environment import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_RUN = "<!-- no-run -->"
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\s+^(?P=indent)```output\n(?P<output>.*?)^(?P=indent)```$)?",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#]*)#?(?P<heading>[^)]*)\)")


class CodeBlock(NamedTuple):
    line: int  # how many lines stand before it
    code: str
    output: str | None = None  # what the page says that it prints


def python_blocks(text: str) -> Iterator[CodeBlock]:
    """The blocks that are to run."""
    for block in BLOCK.finditer(text):
        before = text[: block.start()].rstrip().rpartition("\n")[2].strip()
        if before != NO_RUN:
            output = None if block["output"] is None else dedent(block["output"])
            yield CodeBlock(text.count("\n", 0, block.start("code")), dedent(block["code"]), output)


def lines(printed: str) -> list[str]:
    """The lines of an output, without the blanks that editors cut off."""
    return [line.rstrip() for line in printed.rstrip().splitlines()]


def run_page(text: str, page: Path) -> None:
    """Run the blocks of a page; fail where one raises or prints what the page does not say."""
    blocks = list(python_blocks(text))
    assert text.count("```output\n") == sum(block.output is not None for block in blocks), (
        f"{page}: an output stands behind no block that runs"
    )
    shown = any(block.output is not None for block in blocks)
    namespace = {"__name__": "__main__"}
    for line, code, output in blocks:
        # Blank lines in front make tracebacks point at the line of the page.
        program = compile("\n" * line + code, page, "exec")
        with redirect_stdout(StringIO()) as printed:
            exec(program, namespace)
        if shown:
            assert lines(printed.getvalue()) == lines(output or ""), f"{page}, line {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_examples_of_a_page_run_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    torch.manual_seed(0)
    run_page(page.read_text(), page)


def test_the_first_page_leads_to_every_other():
    index = ROOT / "docs" / "index.md"
    linked = {index.parent / link["file"] for link in LINK.finditer(index.read_text())}
    assert linked == set(PAGES[1:]) - {index}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page):
    for link in LINK.finditer(page.read_text()):
        target = page.parent / link["file"] if link["file"] else page
        assert target.exists(), link[0]
        if link["heading"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            names = [re.sub(r"[^\w\- ]", "", h).strip().lower() for h in headings]
            assert link["heading"] in [re.sub(r"[\s-]+", "-", name) for name in names], link[0]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert re.search(rf": {re.escape(name)}$", navigation, re.MULTILINE), name


def test_the_map_names_only_what_exists():
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Map\n")
    section, _, _ = section.partition("## A walk\n")
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
    assert list(python_blocks(text)) == [CodeBlock(3, "a = 1\n"), CodeBlock(9, "b = 2\n")]


def test_blocks_marked_no_run_and_other_languages_are_left_out():
    text = f"{NO_RUN}\n```python\nraise SystemExit\n```\n\n```text\nno code\n```\n"
    assert list(python_blocks(text)) == []


def test_an_output_belongs_to_the_block_right_before_it():
    text = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```output\n1\n```\n"
    assert [block.output for block in python_blocks(text)] == [None, "1\n"]
    run_page(text, Path("page"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```python\nprint(1)\n```\n\n```output\n2\n```\n", "line 1"),
        ("```python\na = 1\n```\n\n```output\n1\n```\n", "line 1"),
        (
            "```python\nprint(1)\n```\n```output\n1\n```\n```python\nprint(2)\n```\n",
            "line 7",
        ),
        ("```python\nprint(1)\n```\n\nIt prints\n\n```output\n1\n```\n", "no block that runs"),
    ],
    ids=["another output", "no output", "an output that is not shown", "text in between"],
)
def test_a_page_that_misstates_its_output_fails(text, reason):
    with pytest.raises(AssertionError, match=reason):
        run_page(text, Path("page"))
