"""The pages of the live view: runs, stores, records and reports in a folder, which is only read.

- `Gallery`: the items in a folder, opened on demand
- `ViewItem`: one of them: its name and kind
- `View`: the current page of an item: `RunView`, `StoreView`, `RecordView`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from hookline.errors import HooklineError
from hookline.operating_system import is_link
from hookline.storage.saved_records import load_record
from hookline.storage.store import Store
from hookline.storage.store_files import ranks_of, read_index
from hookline.storage.store_json import read_description
from hookline.training.run_files import read_head, segment_path, segments_in
from hookline.training.run_reading import Run
from hookline.view.page import Chunk, Page
from hookline.view.page_html import is_page
from hookline.view.record_pages import page_of_record
from hookline.view.reporting import kind_of
from hookline.view.run_pages import RunPage
from hookline.view.store_pages import page_of_store, sample_chunk

__all__ = ["Gallery", "RecordView", "RunView", "StoreView", "View", "ViewItem"]


class ViewItem(NamedTuple):
    """An item to show: a `run`, a `store`, a `record` or a `report`."""

    name: str
    kind: str
    path: Path


class View:
    """The current page of a run, a store or a record."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, RLock()

    @property
    def revision(self) -> str:
        """A text that differs whenever something has changed."""
        raise AssertionError("a view has revisions")

    def refresh(self) -> str:
        """Read what was written since; return the new revision."""
        raise AssertionError("a view reads on")

    def _current(self) -> Page:
        raise AssertionError("a view has a page")

    def page(self) -> dict[str, Any]:
        """Return the description of the page."""
        with self._lock:
            return self._current().content

    def chunk(self, name: str) -> Chunk | None:
        """Return a chunk of the page; None if there is none of that name."""
        with self._lock:
            make = self._current().chunks.get(name)
            return None if make is None else make()

    def form(self) -> tuple[Any, ...]:
        """Return what the tree of the page is made of."""
        return (self.revision,)

    def update(self, known: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the current form, and what a reader with that known form needs."""
        return self.form(), {"revision": self.revision, "restructured": True}


class RunView(View):
    """A run that may still grow, be continued, or be started anew in the same folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._renewed = 0
        self._open()

    def _open(self) -> None:
        self._page = RunPage(Run(self._path))
        self._first = self._started()
        self._made: tuple[str, Page] | None = None

    def _started(self) -> tuple[int, float]:
        first = segments_in(self._path)[0]
        return first, read_head(segment_path(self._path, first, "json")).started

    @property
    def revision(self) -> str:
        return f"{self._renewed}.{self._page.revision}"

    def refresh(self) -> str:
        with self._lock:
            # Gone, or half written: what was read of it stays on the page.
            with suppress(HooklineError, OSError, IndexError):
                if not self._reads_on():
                    self._open()
                    self._renewed += 1
            return self.revision

    def _reads_on(self) -> bool:
        """Read what was written since; return False if the run was deleted and begun again."""
        with suppress(HooklineError, OSError, IndexError):
            if self._started() == self._first:
                self._page.refresh()
                return True
        return False

    def _current(self) -> Page:
        if self._made is None or self._made[0] != self.revision:
            page = self._page.page()
            page.content |= {"live": True, "revision": self.revision}
            self._made = self.revision, page
        return self._made[1]

    def form(self) -> tuple[Any, ...]:
        with self._lock:
            return self._renewed, *self._page.form

    def update(self, known: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with self._lock:
            form = self.form()
            if form != known:
                return super().update(known)
            scalars = [
                {**one, "steps": one["steps"].tolist(), "values": one["values"].tolist()}
                for one in self._page.scalars()
            ]
            return form, {"revision": self.revision, **self._page.moving(), "scalars": scalars}


class _WholeView(View):
    """An item that is read again as a whole when one of its files was written."""

    files = ""  # which of them tell

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._open(self._stamps())

    def _read(self) -> Page:
        raise AssertionError("it is read")

    def _open(self, stamps: tuple[Any, ...]) -> None:
        page = self._read()
        self._stamp, self._page = stamps, page
        page.content |= {"live": True, "revision": self.revision}

    def _stamps(self) -> tuple[Any, ...]:
        found = sorted(self._path.glob(self.files))
        return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in found)

    @property
    def revision(self) -> str:
        return f"{hash(self._stamp) & 0xFFFFFFFF:x}"

    def refresh(self) -> str:
        with self._lock:
            # Gone, or in the middle of a write: what was read of it stays, until the next look.
            with suppress(HooklineError, OSError):
                stamps = self._stamps()
                if stamps != self._stamp:
                    self._open(stamps)
            return self.revision

    def _current(self) -> Page:
        return self._page


class StoreView(_WholeView):
    """A store, with every sample of it."""

    files = "rank*.index.json"

    def _read(self) -> Page:
        # Not Store.open, which cuts off what a killed writer left: a viewer writes nothing, and
        # readers stop at what the index says in any case.
        folder = self._path.absolute()
        indexes = [read_index(folder, rank) for rank in ranks_of(folder)]
        store = Store(folder, read_description(folder), indexes)
        page = page_of_store(store, live=True)
        self._store = store
        return page

    def chunk(self, name: str) -> Chunk | None:
        """Return a chunk of the page: `e3`, or `e3:17` for the 17th sample of that entry."""
        match = re.fullmatch(r"(e\d{1,9})(?::(\d{1,15}))?", name)
        if match is None:
            return super().chunk(name)
        with self._lock:
            entries: list[dict[str, Any]] = self._page.content["entries"]
            place = next((one["place"] for one in entries if one["chunk"] == match[1]), None)
            if place is None:
                return None
            self._store[place].let_go()  # somebody may have cut the files off
            if match[2] is None:
                return super().chunk(name)
            position = int(match[2])
            return (
                sample_chunk(self._store, place, position) if position < len(self._store) else None
            )


class RecordView(_WholeView):
    """A saved record."""

    files = "record.json"

    def _read(self) -> Page:
        return page_of_record(load_record(self._path))


_VIEWS: dict[str, Callable[[Path], View]] = {
    "run": RunView,
    "store": StoreView,
    "record": RecordView,
}


class Gallery:
    """The runs, stores, records and reports in a folder, or the folder itself if it is one.

    A name that a browser sends is looked up among those that were found; it never becomes a path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = RLock()
        self._views: dict[str, tuple[ViewItem, View]] = {}

    def shown(self) -> list[ViewItem]:
        """Return the current items by name, without links that lead out of the folder."""
        kind = _kind_of(self.folder)
        if kind is not None:
            return [ViewItem(_name(self.folder.absolute()), kind, self.folder)]
        try:
            inside = sorted(self.folder.iterdir())
        except OSError:
            return []
        kinds = [(path, _kind_of(path)) for path in inside if not is_link(path)]
        return [ViewItem(_name(path), kind, path) for path, kind in kinds if kind is not None]

    def find(self, name: str) -> ViewItem | None:
        """Return the item of that name."""
        return next((one for one in self.shown() if one.name == name), None)

    def view(self, name: str) -> View | None:
        """Return the item of that name, opened; None if it cannot be shown."""
        with self._lock:
            known = self._views.get(name)
            if known is not None and _kind_of(known[0].path) in (None, known[0].kind):
                return known[1]  # also of what is gone: what was read of it stays
            found = self.find(name)
            if found is None or found.kind not in _VIEWS:
                return None
            view = _VIEWS[found.kind](found.path)
            self._views[name] = found, view
            return view


def _name(path: Path) -> str:
    """Return the name of a file or folder, as a browser can send it back."""
    return path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _kind_of(path: Path) -> str | None:
    """Return what is at a path: a run, a store, a record, a report, or None."""
    with suppress(OSError):
        if path.is_dir():
            return kind_of(path)
        if path.suffix == ".html" and path.is_file():
            with path.open("rb") as file:
                return "report" if is_page(file.read(4096)) else None
    return None
