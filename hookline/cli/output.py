"""Print the output of commands: tables for people, JSON for programs, progress on stderr.

- `Screen`: where one command's output goes
- `aside()`: a context for user code that may print
- `fail(error)`: print an error in its three parts
- `is_terminal()`: True if stdout is a terminal
- `show_number(number, what)`: a number with its noun
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hookline.errors import HooklineError
from hookline.values.tables import one_line

__all__ = ["Screen", "aside", "fail", "is_terminal", "show_number"]


def aside() -> redirect_stdout[Any]:
    """Send to stderr what a user's code prints, so that stdout has the answer only."""
    return redirect_stdout(sys.stderr)


def is_terminal() -> bool:
    """Return True if stdout is a terminal; it is None if it was closed, as by `hookline … >&-`."""
    return bool(sys.stdout) and sys.stdout.isatty()


@dataclass(frozen=True)
class Screen:
    """The output of one command: the answer to stdout, all else to stderr."""

    format: str = "table"
    quiet: bool = False

    def say(self, text: str) -> None:
        """Print on stderr what is being done."""
        if not self.quiet:
            Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text, style="dim"))

    def table(self, title: str, rows: Sequence[Sequence[str]], data: Any) -> None:
        """Print a table whose first row is its head; for programs `data` instead."""
        rows = [[one_line(cell) for cell in row] for row in rows]
        if self.format == "json":
            self.json(data)
        elif is_terminal():
            self._drawn(title, rows)
        else:
            click.echo(_aligned(title, rows))

    def text(self, text: str, data: Any) -> None:
        """Print a text that is complete as it is; for programs `data` instead."""
        if self.format == "json":
            self.json(data)
        else:
            click.echo(text)

    def json(self, data: Any) -> None:
        """Print data for programs."""
        click.echo(json.dumps(data, indent=2, default=str))

    def _drawn(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        least = 0
        for name, column in zip(rows[0], zip(*rows, strict=True), strict=True):
            numeric = all(_NUMBER.match(cell) for cell in column[1:])
            widest = max(map(len, column))
            least += 2 + (widest if numeric else min(widest, _FOLDED))
            table.add_column(
                name, justify="right" if numeric else "left", style="", header_style="dim",
                overflow="fold", no_wrap=numeric,
            )  # fmt: skip
        for row in rows[1:]:
            table.add_row(*[Text(cell) for cell in row])  # names are no markup
        # In a narrower terminal rich would fold names letter by letter, and leave columns out.
        width = max(Console().width, least)
        Console(highlight=False, width=width).print(table)


def _aligned(title: str, rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


_FOLDED = 12  # how narrow a column of text may become
_NUMBER = re.compile(r"-?(\d|inf\b|nan\b|$)")
_SELECT = re.compile(r"hookline\.select\(model, ([^()]*)\)")


def _as_command(found: re.Match[str]) -> str:
    """Return a remedy with the command instead of the Python call."""
    words = {"inputs=batch": "-i SPEC", "place": "PLACE"}
    return " ".join(["hookline places MODEL", *[words.get(w, w) for w in found[1].split(", ")]])


def fail(error: BaseException) -> None:
    """Print an error in its three parts."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    parts = [str(error)]
    if isinstance(error, HooklineError):
        parts = [part for part in (error.asked, error.found, error.remedy) if part]
        parts = [part.replace("\\\\", "\\") for part in parts]  # as a shell's quotes have them
    console.print(Text.assemble(("Error: ", "bold red"), parts[0]))
    for part in parts[1:]:
        console.print(Text(f"  {_SELECT.sub(_as_command, part)}"))
    for note in getattr(error, "__notes__", ()):
        console.print(Text(f"  {note}"))


def show_number(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> show_number(1, "edit"), show_number(2, "edit")
    ('1 edit', '2 edits')
    """
    return f"{number} {what}{'s' * (number != 1)}"
