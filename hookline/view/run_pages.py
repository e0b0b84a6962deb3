"""Make the page of a training run: curves, layers × steps, and the change of each place over time.

- `page_of_run(run, …)`: the page
- `RunPage`: the page for the live view, which reads on as the run grows
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from hookline.costs.summarizing import summarize
from hookline.places.grammar import Place
from hookline.training.run_reading import Run
from hookline.view.page import Chunk, Page
from hookline.view.page_tree import PageTree, read_place
from hookline.view.run_tables import RunTable
from hookline.view.tensor_summaries import spread

__all__ = ["RunPage", "page_of_run"]

_TITLES = {
    "output": "outputs",
    "grad": "gradients",
    "weight": "weights",
    "weight_grad": "weight gradients",
    "update": "updates",
}
_PAIRED = ("output", "grad", "weight", "weight_grad")  # values and their gradients
_PORTS = {"grad": "grad_output", "weight": "value", "update": "value", "weight_grad": "grad"}
_POINTS = 2_000  # of a scalar
_FINDINGS = 200


def page_of_run(run: Run, model: nn.Module | None, budget: int) -> Page:
    """Make the page of a run, as it is now."""
    rows, names = len(run.rows()), len(run.head.statistics)
    most = int(min(600, max(60, 3 * budget / (8 * max(rows, 1) * names))))
    histograms = int(min(48, max(4, budget / (256 * max(rows, 1)))))
    return RunPage(run, model, most=most, histograms=histograms).page()


class RunPage:
    """The page of a run that may still grow. `refresh()` reads on; `page()` is the current page."""

    def __init__(
        self, run: Run, model: nn.Module | None = None, *, most: int = 600, histograms: int = 48
    ) -> None:
        self.run, self._histograms = run, histograms
        self._summary = None if model is None else summarize(model)
        self.revision = 0
        self.table = RunTable(run, most)

    def refresh(self) -> bool:
        """Read what was written since; return True if there was anything."""
        if not self.run.refresh():
            return False
        self.table.refresh()
        self.revision += 1
        return True

    @property
    def form(self) -> tuple[Any, ...]:
        """The rows and options of which the tree and the entries of the page are made."""
        kinds = self.kinds()
        rows = tuple((row.place, row.kind) for row in self.table.rows)
        return rows, tuple((kind, *self.table.measured(kind)) for kind in kinds)

    def kinds(self) -> list[str]:
        """Return the measured kinds of values, in the order of the page."""
        there = {row.kind for row in self.table.rows}
        return [*(k for k in _TITLES if k in there), *sorted(there - _TITLES.keys())]

    def page(self) -> Page:
        """Return the page, with chunks that are made on demand."""
        tree = self._tree()
        chunks: dict[str, Callable[[], Chunk]] = {"scalars": self._scalars_chunk}
        maps: list[dict[str, Any]] = []
        for number, kind in enumerate(self.kinds()):
            statistics = self.table.measured(kind)
            rows = [n for n, row in enumerate(self.table.rows) if row.kind == kind]
            maps.append(
                {
                    "kind": kind,
                    "title": _TITLES.get(kind, kind),
                    "statistics": statistics,
                    "entries": rows,  # each row has an entry, in their order
                }
            )
            for k, statistic in enumerate(statistics):
                chunks[f"map:{number}:{k}"] = partial(self._map_chunk, kind, statistic)
        moving = self.moving()
        moving["run"]["maps"] = maps
        content: dict[str, Any] = {
            "kind": "run",
            "title": self.run.head.model or self.run.folder.name,
            "item": "step",
            "notes": self._notes(),
            **moving,
            **tree.to_json(),
        }
        return Page(content, chunks | tree.chunks)

    def moving(self) -> dict[str, Any]:
        """Return the part of the page that changes as the run grows."""
        steps, starts = self.table.steps, len(self.run.segments)
        latest = f"{int(steps[-1]):,}" if len(steps) else "–"
        started = datetime.fromtimestamp(self.run.head.started, UTC)
        facts = [
            ["latest step", latest],
            ["measured steps", f"{self.table.total:,}"],
            ["places", f"{len(self.run.places()):,}"],
        ]
        for scalar in self.run.names()[:3]:
            _, values = self.run.scalars(scalar)
            facts.append([scalar, f"{values[-1]:.4g}"])
        if starts > 1:
            facts.append(["starts", str(starts)])
        name = self.run.folder.absolute().name
        noticed = self.run.findings()
        errors = [finding for finding in noticed if finding.severity == "error"][-_FINDINGS:]
        others = [finding for finding in noticed if finding.severity != "error"]
        others = others[max(0, len(others) + len(errors) - _FINDINGS) :]
        findings = [finding.to_dict() for finding in (*errors, *others)]
        return {
            "subtitle": f"training run in {name}, started {started:%Y-%m-%d %H:%M} UTC",
            "facts": facts,
            "findings": findings,
            "run": {
                "scalars": self.run.names(),
                "steps": self.table.total,
                "findings": len(noticed),
            },
        }

    def scalars(self) -> list[dict[str, Any]]:
        """Return all scalars, each at no more steps than can be seen."""
        found: list[dict[str, Any]] = []
        for name in self.run.names():
            steps, values = self.run.scalars(name)
            if len(steps) > _POINTS:
                picked = _visible_positions(values, _POINTS)
                steps, values = steps[picked], values[picked]
            found.append({"name": name, "steps": steps.astype(float), "values": values})
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _tree(self) -> PageTree:
        tree = PageTree(self._summary)
        tree.module("", self.run.head.model)
        latest = self.table.values[:, :, -1] if len(self.table.steps) else None
        for n, row in enumerate(self.table.rows):
            place = Place(read_place(row.place).path, _PORTS.get(row.kind, "output"))
            summary = None
            if latest is not None:
                numbers = zip(self.table.statistics, latest[n].tolist(), strict=True)
                summary = {name: value for name, value in numbers if np.isfinite(value)}
            entry = tree.entry(
                place,
                partial(self._entry_chunk, n),
                count=len(self.table.steps),
                shape=None if row.shape is None else [*row.shape],
                role="" if row.kind in _PAIRED else row.kind,
                gradient=row.kind in ("grad", "weight_grad", "update"),
                summary=summary,
            )
            if place.port == "output":
                tree.modules[entry.module]["type"] = row.type
        return tree

    def _notes(self) -> list[str]:
        shown, total = len(self.table.steps), self.table.total
        notes = [f"{shown} of {total:,} measured steps are shown."] if shown < total else []
        places = {row.place for row in self.table.rows if row.kind == "output"}
        if any(
            len(self.run.histogram_records(p, "output")) > self._histograms
            for p in list(places)[:3]
        ):
            notes.append(f"At most {self._histograms} histograms of a place are shown.")
        return notes

    def _scalars_chunk(self) -> Chunk:
        found = self.scalars()
        arrays: dict[str, npt.NDArray[Any]] = {}
        for n, one in enumerate(found):
            arrays |= {f"s{n}": one["steps"], f"v{n}": one["values"]}
        return Chunk({"names": [one["name"] for one in found]}, arrays)

    def _map_chunk(self, kind: str, statistic: str) -> Chunk:
        values = self.table.matrix(kind, statistic)
        measured = self.table.reached(kind, statistic).astype(np.uint8)
        return Chunk({}, {"steps": self.table.steps, "values": values, "measured": measured})

    def _entry_chunk(self, number: int) -> Chunk:
        row = self.table.rows[number]
        arrays: dict[str, npt.NDArray[Any]] = {
            "steps": self.table.steps,
            "series": self.table.values[number],
        }
        records = self.run.histogram_records(row.place, row.kind)
        picked = [records[n] for n in spread(len(records), self._histograms)]
        bins = [segment.bins(record) for _, segment, record in picked]
        if bins and len({len(one.counts) for one in bins}) == 1:
            arrays["histogram_steps"] = np.array([one.step for one in bins], np.float64)
            arrays["lows"] = np.array([one.low for one in bins], np.float32)
            arrays["highs"] = np.array([one.high for one in bins], np.float32)
            arrays["histograms"] = np.stack([one.counts for one in bins]).astype(np.uint32)
        return Chunk({"statistics": self.table.statistics}, arrays)


def _visible_positions(values: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.intp]:
    """Return positions of the least, the greatest and any non-finite value in each stretch.

    A single bad step stays visible. The first and the last position are among them.
    """
    stretch = -(-len(values) // (most // 3))
    padded = np.pad(values, (0, -len(values) % stretch), mode="edge").reshape(-1, stretch)
    finite = np.isfinite(padded)
    low = np.where(finite, padded, np.inf).argmin(1)
    high = np.where(finite, padded, -np.inf).argmax(1)
    within = np.stack([low, high, finite.argmin(1)])  # the last is the first one if all are finite
    found = within + np.arange(0, padded.size, stretch)
    ends = np.array([0, len(values) - 1])
    return np.unique(np.append(found.clip(max=len(values) - 1), ends))
