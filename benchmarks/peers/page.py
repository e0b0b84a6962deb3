"""The results as a page of Markdown.

- `page(results)` is the whole text
"""

from __future__ import annotations

from typing import Any

from peers.probes import PROBES, PROCESS
from peers.tasks import TASKS

WORDS = {"yes": "yes", "no": "no", "silent": "**silent**", "absent": "–"}


class Notes:
    """Numbered reasons under a table; the same reason has one number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        if not reason:
            return ""
        number = self.numbers.setdefault(reason, len(self.numbers) + 1)
        return f" <sup>{number}</sup>"

    def lines(self) -> list[str]:
        return [f"{number}. {plain(reason)}" for reason, number in self.numbers.items()]


def plain(text: str) -> str:
    """Text of a library without what Markdown or HTML would take for itself."""
    for mark, code in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(mark, code)
    return text


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def number(value: float) -> str:
    """Three digits, which is more than the noise allows."""
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def times(results: dict[str, Any]) -> list[str]:
    notes, rows = Notes(), []
    for name, peer in results["peers"].items():
        row = [peer["title"]]
        for task in TASKS:
            verdict = results["verdicts"][name].get(task.name, {"verdict": "absent", "reason": ""})
            found = results["times"][name].get(task.name)
            if found is not None:
                row.append(number(found["ratio"]))
            elif verdict["verdict"] == "absent":
                row.append("–")
            else:
                row.append(verdict["verdict"] + notes.mark(verdict["reason"]))
        rows.append(row)
    bare = ["*bare model, ms*"]
    bare += [number(results["bare_ms"].get(task.name, float("nan"))) for task in TASKS]
    return [*table(["× the bare model", *(task.title for task in TASKS)], [bare, *rows]), "",
            *notes.lines()]  # fmt: skip


def memory(results: dict[str, Any]) -> list[str]:
    tasks = [task for task in TASKS if task.has_memory]
    notes, rows = Notes(), []
    raw = results["memory"]["raw"]
    bare = ["*bare model, MB*"]
    clean = {}
    for task in tasks:
        sources = [raw, *results["memory"].values()]
        clean[task.name] = next((s[task.name]["bare"] for s in sources
                                 if s.get(task.name, {}).get("bare")), float("nan"))  # fmt: skip
        bare.append(number(clean[task.name]))
    for name, peer in results["peers"].items():
        row = [peer["title"]]
        for task in tasks:
            found = results["memory"].get(name, {}).get(task.name)
            if found is None:
                row.append("–")
            elif "error" in found:
                row.append("error" + notes.mark(found["error"]))
            else:
                row.append(number(found["use"] / clean[task.name]))
        rows.append(row)
    return [*table(["× the bare model", *(task.title for task in tasks)], [bare, *rows]), "",
            *notes.lines()]  # fmt: skip


def around(results: dict[str, Any]) -> list[str]:
    rows = []
    for name, peer in results["peers"].items():
        found = results["times"][name]
        first = found.get("blocks") or found.get("gpt2")
        own = first["own_bare"] if first else None
        rows.append(
            [
                peer["title"], peer["version"], number(peer["import_seconds"]),
                number(max(peer["import_megabytes"], 0)),
                number(first["setup_ms"]) if first else "–", number(own) if own else "–",
            ]
        )  # fmt: skip
    head = [
        "",
        "version",
        "import, s",
        "import, MB",
        "set up once, ms",
        "bare model there",
    ]
    return table(head, rows)


def features(results: dict[str, Any]) -> list[str]:
    notes, rows = Notes(), []
    shown = [name for name in results["peers"] if name != "raw_again"]
    for title in (*PROBES, PROCESS):
        row = [title]
        for name in shown:
            found = results["features"].get(name, {}).get(title)
            if found is None:
                row.append("")
            else:
                reason = found["reason"] if found["verdict"] != "absent" else ""
                row.append(WORDS[found["verdict"]] + notes.mark(reason))
        rows.append(row)
    head = ["", *(results["peers"][name]["title"] for name in shown)]
    return [*table(head, rows), "", *notes.lines()]


def remarks(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, peer in results["peers"].items():
        if name == "raw_again":
            continue
        said = "; ".join(f"{what}: {text}" for what, text in peer["notes"].items())
        lines.append(f"- **{peer['title']}** ({plain(peer['source'])}). {plain(said)}".rstrip())
    return lines


def left_out(results: dict[str, Any]) -> list[str]:
    found = results["left_out"] | results["missing"]
    return [f"- {name}: {plain(reason)}" for name, reason in found.items()]


TIME = """\
How long one use takes, as a multiple of the bare model's run: 1.00 is free. Fast runs (5th
percentile) of all libraries, which took turns in one run. A use is what is done each time: asking,
running the model, and reading every value by name. What a library does once (wrapping the model,
adding hooks that stay) is not in it, but under "Around it". *raw hooks, again* is the same code in
another process: its distance from *raw hooks* is the noise. Every answer was compared with that of
hooks written by hand; one that is not the same is marked `wrong` and not timed. – means that the
library does not offer it.

The tensors of the plain model (a transformer of 163 modules) have 32 elements, so this is the worst
case: nothing hides what a library adds.
"""

MEMORY = """\
How far the resident memory grows in one use, as a multiple of the bare model's run. Here every
activation is 1 MB: 12 blocks that are kept take 12 MB, 161 modules 137 MB (24 return what another
returned).
"""

AROUND = """\
What happens once: importing, beside torch (some import more at the first use), and setting up a
capture of 12 blocks if it is not part of a use. The last column is the bare model's time in the
process that uses the library, as a multiple of that in a clean one.
"""

FEATURES = """\
Each cell is a small experiment (`benchmarks/peers/probes.py`), the same code for all. **silent** is
a wrong value, or nothing, without a word. *no* is said aloud, or shows. – is not offered.
"""


def page(results: dict[str, Any]) -> str:
    where = results["machine"]
    kind = "A quick run, noisy: make no conclusions from it. " if results["quick"] else ""
    place = (
        f"{kind}{where['date']}, {where['cpu']}, {where['cores']} cores, one thread, "
        f"{where['platform']}, Python {where['python']}, torch {where['torch']}; "
        f"{results['minutes']:.1f} minutes; load average before it {results['load']:.1f}."
    )
    lines = ["# hookline beside other libraries", ""]
    lines += ["Made by `make bench` (`benchmarks/side_by_side.py`); do not edit.", place, ""]
    lines += ["## Time", "", TIME, *times(results), ""]
    if results["memory"]:
        lines += ["## Memory", "", MEMORY, *memory(results), ""]
    lines += ["## Around it", "", AROUND, *around(results), ""]
    lines += ["## What each does", "", FEATURES, *features(results), ""]
    lines += ["## How each was used", "", *remarks(results), ""]
    lines += ["Looked at and left out:", "", *left_out(results), ""]
    return "\n".join(lines)
