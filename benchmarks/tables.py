"""Put the tables that were measured into the documents, so that no number is typed by hand.

    python benchmarks/tables.py            write them (make tables)
    python benchmarks/tables.py --check    say whether they are up to date; exit code 1 if not

A document has `<!-- measured: NAME -->` and `<!-- end -->`; what stands between is made of
results/*.json, as measured/ says. RESULTS.md is made as a whole, and so is docs/torch-private.md,
of a file of hookline's. Before it writes, it takes over into results/ what the benchmarks have left
in latest/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from latest import RESULTS, finished, take_over
from measured import PARTS
from peers.page import page
from private_names import page as page_of_private_names

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/performance.md", "docs/design.md",
             "docs/guard.md")  # fmt: skip
PLACE = re.compile(r"<!-- measured: (?P<name>.*?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- (measured:|end\b)")


class Unusable(Exception):
    """A result or a document that no table can be made of, with what to do about it."""


class Results:
    """The JSON files of one folder, or newer ones in their stead, each read once."""

    def __init__(self, folder: Path, newer: Mapping[str, Path] = MappingProxyType({})) -> None:
        self.folder, self.newer = folder, newer
        self.read = cache(self._read)

    def path(self, name: str) -> Path:
        """The file of a benchmark."""
        return self.newer.get(name, self.folder / f"{name}.json")

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path(name)
        again = f"Measure it again: python benchmarks/{name}.py"
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            raise Unusable(f"There is no {path}. {again}") from None
        except ValueError as error:  # also for bytes that are no text
            raise Unusable(f"{path} is not JSON: {error}. {again}") from None
        if not isinstance(found, dict):
            raise Unusable(f"{path} holds no object, but {type(found).__name__}. {again}")
        return found

    def make(self, name: str, function: Callable[[dict[str, Any]], Any]) -> Any:
        """What a function makes of a file; an error that says which one if it is another's."""
        found = self.read(name)
        try:
            return function(found)
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
            raise Unusable(
                f"{self.path(name)} is not what benchmarks/{name}.py writes: "
                f"{type(error).__name__}: {error}. Measure it again with that script."
            ) from error

    def part(self, name: str) -> str:
        """The text of one part, with the line breaks that a table needs around it."""
        if name not in PARTS:
            known = ", ".join(sorted(PARTS))
            raise Unusable(f"No part is named {name!r}. There are: {known}.")
        file, function = PARTS[name]
        made = self.make(file, function)
        return made if isinstance(made, str) else "\n\n" + "\n".join(made) + "\n\n"


def filled(text: str, results: Results, document: str) -> str:
    """A document with its parts made anew."""
    places = len(PLACE.findall(text))
    if len(MARK.findall(text)) != 2 * places:
        raise Unusable(f"{document}: each <!-- measured: NAME --> needs its own <!-- end -->.")

    def made(place: re.Match[str]) -> str:
        name, part = place["name"], results.part(place["name"])
        begins = not text[: place.start()].rpartition("\n")[2].strip()
        if begins != ("\n" in part):  # Markdown takes a line that begins with a comment for HTML
            where = "on a line of its own" if "\n" in part else "within a line"
            raise Unusable(f"{document}: the part {name!r} belongs {where}.")
        return f"<!-- measured: {name} -->{part}<!-- end -->"

    return PLACE.sub(made, text)


def documents(results: Results, root: Path = ROOT) -> dict[Path, str]:
    """Every document with measured parts, as it should be."""
    made = {}
    for name in DOCUMENTS:
        path = root / name
        made[path] = filled(path.read_text(), results, name)
    made[root / "benchmarks" / "RESULTS.md"] = results.make("side_by_side", page)
    made[root / "docs" / "torch-private.md"] = page_of_private_names()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if old")
    check = parser.parse_args().check
    try:
        made = documents(Results(RESULTS, {} if check else finished()))
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    for name in [] if check else take_over():
        print(f"benchmarks/latest/{name}: taken over")
    old = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if not check:
            path.write_text(made[path])
        print(f"{path.relative_to(ROOT)}: {'not up to date' if check else 'written'}")
    if not old:
        print("All tables are up to date.")
    elif check:
        print("Write them with: make tables")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
