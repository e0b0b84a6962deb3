"""The tree of a page: its modules, and the places on it.

- `PageTree`: modules and entries with their chunks, added one by one
- `PageEntry`: a place on the page
- `read_place(text)`: a place from its text alone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hookline.costs.summary import Summary
from hookline.errors import HooklineError
from hookline.places.grammar import Place, is_gradient, parse
from hookline.places.tree import join
from hookline.view.page import Chunk

__all__ = ["PageEntry", "PageTree", "read_place"]

_COSTS = (
    "parameters", "flops", "activation_bytes", "calls", "called", "aliases", "shared_with",
)  # fmt: skip
_GRADIENT_OF = {"grad_output": "output", "grad_input": "input", "grad_inputs": "inputs"}


@dataclass
class PageEntry:
    """A place on the page: one port of a module, or a parameter of it.

    A value and its gradient have the same `group`, and are shown beside each other.
    """

    place: str
    module: int
    group: str
    gradient: bool
    chunk: str = ""
    count: int = 1  # calls, samples or steps
    shape: list[int | str] | None = None
    dtype: str = ""
    summary: dict[str, Any] | None = None
    note: str = ""
    weight: bool = False  # a parameter or buffer
    role: str = ""  # what it is called beside the others of its group, if not value or gradient

    def to_json(self) -> dict[str, Any]:
        found = {key: value for key, value in vars(self).items() if value not in (None, "", False)}
        return found | {"place": self.place, "module": self.module, "count": self.count}


class PageTree:
    """The modules of a page in model order, its entries with their chunks, and its notes."""

    def __init__(self, summary: Summary | None = None) -> None:
        self.modules: list[dict[str, Any]] = []
        self.entries: list[PageEntry] = []
        self.chunks: dict[str, Callable[[], Chunk]] = {}
        self.notes: list[str] = []
        self._index: dict[str, int] = {}
        for row in () if summary is None else summary.modules:
            module = self.modules[self.module(row.place, row.type)]
            known = {name: getattr(row, name) for name in _COSTS}
            module |= {name: value for name, value in known.items() if value not in (None, [], ())}

    def module(self, path: str, kind: str = "") -> int:
        """Return the index of the module with that path; add it if it is new."""
        if path in self._index:
            index = self._index[path]
            if kind and not self.modules[index]["type"]:
                self.modules[index]["type"] = kind
            return index
        parent = self.module(path.rpartition(".")[0]) if path else None
        self._index[path] = len(self.modules)
        self.modules.append(
            {"path": path, "place": str(Place(path)), "type": kind, "parent": parent}
        )
        return self._index[path]

    def find(self, path: str) -> int | None:
        """Return the index of the module with that path, if there is one."""
        return self._index.get(path)

    def entry(
        self, place: Place | str, make: Callable[[], Chunk] | None = None, **known: Any
    ) -> PageEntry:
        """Add a place below its module; `make` returns its chunk, if it has one."""
        if not isinstance(place, Place):
            place = read_place(place)
        path, rest = place.path, ""
        if place.port in ("value", "grad"):  # a parameter or buffer
            path, _, rest = path.rpartition(".")
        index = self.module(path)
        port = {"grad": "value"}.get(place.port, _GRADIENT_OF.get(place.port, place.port))
        group = rest if port == "value" else port
        if place.operation is not None:
            group = f"/{place.operation}" + ("" if port == "output" else f":{port}")
        group += "".join(f"[{part}]" for part in place.parts)
        known.setdefault("weight", place.port in ("value", "grad"))
        known.setdefault("gradient", is_gradient(place.port))
        found = PageEntry(str(place), index, group, **known)
        if make is not None:
            found.chunk = f"e{len(self.entries)}"
            self.chunks[found.chunk] = make
        self.entries.append(found)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the modules in the order of the tree, and the entries."""
        order = self._ordered()
        new = {old: position for position, old in enumerate(order)}
        modules = [dict(self.modules[old]) for old in order]
        for module in modules:
            parent = module["parent"]
            module["parent"] = None if parent is None else new[parent]
        entries = [entry.to_json() | {"module": new[entry.module]} for entry in self.entries]
        return {"modules": modules, "entries": entries}

    def _ordered(self) -> list[int]:
        children: dict[int | None, list[int]] = {}
        for index, module in enumerate(self.modules):
            children.setdefault(module["parent"], []).append(index)
        order: list[int] = []
        waiting = children.get(None, [])[::-1]
        while waiting:
            index = waiting.pop()
            order.append(index)
            waiting += children.get(index, [])[::-1]
        return order


def read_place(text: str) -> Place:
    """Return the pieces of a place that is known by its text only, as in a store.

    >>> read_place("h.0.attn/softmax:grad_output").operation
    'softmax'
    """
    try:
        pattern = parse(text)
    except HooklineError:
        return Place(text)
    names = pattern.paths[0]
    if not pattern.literal or not all(isinstance(name, str) for name in names):
        return Place(text)
    path = ""
    for name in names:
        path = join(path, str(name))
    nth = "" if pattern.nth is None else f"#{pattern.nth}"
    operation = None if pattern.operation is None else pattern.operation + nth
    return Place(path, pattern.port or "output", pattern.parts, operation)
