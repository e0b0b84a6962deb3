"""The live view: a small web server for this machine only, which reads a folder and never writes.

- `serve(path)`: serve the page of a run, a store, or a folder of them → `Server`
- `Server`: its address; `serve_forever()`, or `with`
"""

from __future__ import annotations

import gzip
import os
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from hookline.errors import HooklineError, ReportError
from hookline.operating_system import EXCLUSIVE_PORTS
from hookline.view.live_views import Gallery, View
from hookline.view.page import pack, plain_json
from hookline.view.page_html import policy, shell, why_not

__all__ = ["Server", "serve"]

_PULSE = 10.0  # seconds after which a silent stream shows that it lives
_LONGEST = 4096  # bytes of an address


def serve(path: str | os.PathLike[str], port: int = 0, *, poll: float = 0.5) -> Server:
    """Serve the page of a run or a store, or of all of them in a folder, on this machine only.

    >>> import tempfile, urllib.request, torch, hookline as hl
    >>> folder = tempfile.mkdtemp()
    >>> with hl.Store.create(folder + "/acts") as writer:
    ...     writer.append({"fc": torch.zeros(3, 2)})
    >>> with serve(folder) as server:
    ...     with urllib.request.urlopen(server.address + "api/sources") as answer:
    ...         print(answer.read().decode())
    {"sources":[{"name":"acts","kind":"store"}]}

    Args:
        path: A folder, which may be empty.
        port: 0 for a free one; `server.address` has it.
        poll: The seconds between checks of the folder for an open page.

    It listens on 127.0.0.1, answers only GET requests for that address, and opens files of the
    folder for reading only. A name in a request is compared with the names in the folder, and never
    becomes part of a path.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ReportError(
            f"A live view of {str(folder)!r} was asked for.",
            "It is a file." if folder.exists() else "There is no such folder.",
            "Give the folder of a run or a store, or one that holds some; reports are opened in "
            "a browser as they are.",
        )
    return Server(Gallery(folder), port, poll)


class Server:
    """A server that is ready: `serve_forever()` blocks, `with` serves in the background."""

    def __init__(self, gallery: Gallery, port: int, poll: float) -> None:
        self._server = _HTTPServer(("127.0.0.1", port), _Handler)
        self._server.gallery, self._server.poll = gallery, poll
        self._server.closing = Event()
        self.port: int = self._server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        names = ("127.0.0.1", "localhost")
        self._server.hosts = {f"{host}:{self.port}" for host in names}
        if self.port == 80:  # which browsers leave out
            self._server.hosts.update(names)
        self._thread: Thread | None = None

    def serve_forever(self) -> None:
        """Answer until `close()` is called from elsewhere, or Ctrl-C is pressed."""
        self._server.serve_forever(poll_interval=0.1)

    def __enter__(self) -> Server:
        self._thread = Thread(target=self.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering, and end open streams."""
        self._server.closing.set()
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __repr__(self) -> str:
        return f"Server({str(self._server.gallery.folder)!r} at {self.address})"


class _HTTPServer(ThreadingHTTPServer):
    allow_reuse_address = not EXCLUSIVE_PORTS
    daemon_threads = True
    block_on_close = False  # a stream may be waiting for its next look
    gallery: Gallery
    closing: Event
    hosts: set[str]
    poll: float

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that goes away in the middle of an answer."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "hookline"
    sys_version = ""
    timeout = 30

    @property
    def _own(self) -> _HTTPServer:
        return cast("_HTTPServer", self.server)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is inherited
        """Print nothing: only the command line prints."""

    def do_GET(self) -> None:
        """Answer, if the request was meant for this server."""
        if self.headers.get("Host", "") not in self._own.hosts:
            # A page from elsewhere whose name was pointed at this address comes with its own name.
            return self._refuse(HTTPStatus.FORBIDDEN, "This server answers for 127.0.0.1 only.")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return self._refuse(HTTPStatus.FORBIDDEN, "Other pages may not read from here.")
        if len(self.path) > _LONGEST:
            return self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        answer = _ANSWERS.get(address.path)
        if answer is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "There is nothing at this address.")
        try:
            return answer(self, query)
        except (ConnectionError, TimeoutError):
            raise  # the browser is gone
        except (HooklineError, OSError) as error:  # not sound, or deleted meanwhile
            return self._refuse(HTTPStatus.CONFLICT, str(error))

    def _only_get(self) -> None:
        self.close_connection = True  # what else was sent is not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "This server answers GET only.")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _only_get  # noqa: N815 - names of http.server

    # -- answers --------------------------------------------------------------------------------

    def _answer_page(self, query: dict[str, str]) -> None:
        title = f"{self._own.gallery.folder.absolute().name} · hookline"
        self._send(shell(title, "", connect="'self'").encode(), "text/html; charset=utf-8")

    def _answer_sources(self, query: dict[str, str]) -> None:
        self._send_json({"sources": self._sources()})

    def _sources(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        for one in self._own.gallery.shown():
            entry = {"name": one.name, "kind": one.kind}
            if one.kind == "report":
                entry["address"] = f"report?source={quote(one.name)}"
            found.append(entry)
        return found

    def _answer_description(self, query: dict[str, str]) -> None:
        view = self._view(query)
        if view is not None:
            view.refresh()
            self._send_json(view.page())

    def _answer_chunk(self, query: dict[str, str]) -> None:
        view = self._view(query)
        if view is None:
            return
        chunk = view.chunk(query.get("id", ""))
        if chunk is None:
            self._refuse(HTTPStatus.NOT_FOUND, "The page has no such part any more.")
        else:
            self._send(pack(chunk), "application/octet-stream")

    def _answer_report(self, query: dict[str, str]) -> None:
        """Send a page that `report` has written, in a sandbox without network access."""
        found = self._own.gallery.find(query.get("source", ""))
        if found is None or found.kind != "report":
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such report.")
        else:
            page = found.path.read_bytes()
            if problem := why_not(page):
                raise ReportError(
                    f"The page {found.name!r} was asked for.",
                    problem,
                    "Write it again with hookline.report, or, if you trust it, open it in a "
                    "browser from the disk.",
                )
            self._send(page, "text/html; charset=utf-8", f"sandbox allow-scripts; {policy()}")

    def _answer_events(self, query: dict[str, str]) -> None:
        """Send a stream of server-sent events: what was appended since the page was made."""
        view = self._view(query)
        if view is None:
            return
        self._head("text/event-stream", None)
        known, form = query.get("revision", ""), view.form()
        spoken = time.monotonic()
        self._say("retry: 1000\n\n")
        while not self._own.closing.is_set():
            revision = view.refresh()
            if revision != known:
                form, update = view.update(form)
                known = revision
                update["sources"] = self._sources()
                self._say(f"event: update\ndata: {plain_json(update)}\n\n")
                spoken = time.monotonic()
            elif time.monotonic() - spoken > _PULSE:
                self._say(": here\n\n")
                spoken = time.monotonic()
            self._own.closing.wait(self._own.poll)

    # -- sending --------------------------------------------------------------------------------

    def _view(self, query: dict[str, str]) -> View | None:
        view = self._own.gallery.view(query.get("source", ""))
        if view is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no run or store of that name.")
        return view

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _send_json(self, content: Any) -> None:
        self._send(plain_json(content).encode(), "application/json")

    def _send(self, content: bytes, kind: str, rules: str | None = None) -> None:
        packed = "gzip" in self.headers.get("Accept-Encoding", "") and len(content) > 1000
        if packed:
            content = gzip.compress(content, 3)
        self._head(kind, len(content), "gzip" if packed else None, rules)
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        content = f"{text}\n".encode()
        self._head("text/plain; charset=utf-8", len(content), status=status)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(
        self,
        kind: str,
        size: int | None,
        encoding: str | None = None,
        rules: str | None = None,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if size is None:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(size))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Security-Policy", rules or policy("'self'"))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()


_ANSWERS = {
    "/": _Handler._answer_page,
    "/report": _Handler._answer_report,
    "/api/sources": _Handler._answer_sources,
    "/api/page": _Handler._answer_description,
    "/api/chunk": _Handler._answer_chunk,
    "/api/events": _Handler._answer_events,
}
