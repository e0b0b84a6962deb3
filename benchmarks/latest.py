"""Where a benchmark leaves what it has measured: in latest/, which is not committed.

- `write(name, content, full)`: leave it there
- `in_full(parser, options)`: whether the options of a run have made it no shorter
- `held(name)`: what was measured last, to be completed by a run of a part
- `finished()`: what was measured in full; `take_over()` puts that into results/, or only what is
  named

So a run changes no document. `make tables` takes over what was measured in full, and makes the
documents of it. Only `make test-matrix`, whose page is its result, takes over its own at its end.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LATEST, RESULTS = HERE / "latest", HERE / "results"
PAGES = ("zoo.md", "versions.md")  # that a benchmark makes itself, beside its numbers


def write(name: str, content: Any, full: bool) -> None:
    """Leave what was measured, as text or as something that becomes JSON.

    What was measured with fewer rounds or of a part only has a name of its own: `make tables` does
    not take it over.
    """
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    stem, dot, kind = name.partition(".")
    path = LATEST / f"{stem}{'' if full else '-partial'}{dot or '.json'}{kind}"
    LATEST.mkdir(exist_ok=True)
    path.write_text(text)
    told = "make tables takes it over" if full else "not for the documents"
    print(f"Written to {path.relative_to(HERE.parent)} ({told}).")


def in_full(parser: ArgumentParser, options: Namespace) -> bool:
    """Whether the options of a run have made it no shorter: more rounds are as good."""
    given = {name: (value, parser.get_default(name)) for name, value in vars(options).items()}
    counts = [pair for pair in given.values() if type(pair[1]) is int]
    others = [given[name] for name in ("quick", "backend") if name in given]
    return all(now >= usual for now, usual in counts) and all(a == b for a, b in others)


def held(name: str) -> dict[str, Any]:
    """What was measured in full last, taken over or not; empty if nothing was."""
    paths = (folder / f"{name}.json" for folder in (LATEST, RESULTS))
    return next((json.loads(path.read_text()) for path in paths if path.exists()), {})


def finished() -> dict[str, Path]:
    """What was measured in full and is not taken over, by the name of the benchmark."""
    found = [path for path in sorted(LATEST.glob("*.json")) if "-partial" not in path.name]
    return {path.stem: path for path in found}


def take_over(*names: str) -> list[str]:
    """Put what was measured in full into results/; the names of the files.

    `names` are those of benchmarks; all are meant if there is none.
    """
    found = [path for name, path in finished().items() if not names or name in names]
    pages = [path for path in map(LATEST.joinpath, PAGES) if path.exists()]
    pages = [path for path in pages if not names or path.stem in names]
    for path in found:
        path.replace(RESULTS / path.name)
    for path in pages:
        path.replace(HERE / path.name)
    return [path.name for path in found + pages]
