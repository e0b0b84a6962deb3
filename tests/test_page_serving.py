"""The live view over plain HTTP: what it answers, and what it refuses."""

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from threading import Thread
from urllib.parse import quote

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.training.run_files import STATISTICS, Row
from hookline.training.run_writing import RunWriter
from hookline.view import live_views
from hookline.view import server as view_server
from hookline.view.page import unpack
from hookline.view.server import serve

ROWS = [Row("h.0", "output", "Block"), Row("h.1", "output", "Block")]


def write_values(writer, *steps):
    for step in steps:
        values = np.full((len(writer.head.rows), len(STATISTICS)), float(step), np.float32)
        writer.values(step, values)
        writer.scalar(step, "loss", 1.0 / (1 + step))


@pytest.fixture
def served_folder(tmp_path):
    with RunWriter(tmp_path / "first", ROWS, model="Net") as writer:
        write_values(writer, 0, 1, 2)
    with hl.Store.create(tmp_path / "acts") as writer:
        writer.append({"fc": torch.arange(24.0).reshape(12, 2)})
    hl.report(nn.Linear(2, 2), tmp_path / "weights.html")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "other.html").write_text("<p>not ours</p>")
    return tmp_path


@pytest.fixture
def server(served_folder):
    with serve(served_folder, poll=0.02) as found:
        yield found


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def ask_json(server, path):
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


class EventStream:
    """The server-sent events of a source."""

    def __init__(self, server, query):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        self.connection.request("GET", f"/api/events?{query}")
        self.answer = self.connection.getresponse()
        assert self.answer.headers["Content-Type"] == "text/event-stream"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.answer.close()
        self.connection.close()

    def update(self):
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("data: "):
                return json.loads(line[6:])


def test_runs_stores_and_reports_of_a_folder_are_listed_and_nothing_else(server):
    found = ask_json(server, "/api/sources")["sources"]
    assert [(one["name"], one["kind"]) for one in found] == [
        ("acts", "store"), ("first", "run"), ("weights.html", "report"),
    ]  # fmt: skip


def test_the_page_is_the_same_for_all_and_reads_from_its_own_server_only(server):
    status, headers, body = ask(server, "/")
    assert status == 200
    assert b"data-chunk" not in body.partition(b"<script>")[0]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_a_run_is_described_and_its_chunks_are_made_when_asked_for(server):
    page = ask_json(server, "/api/page?source=first")
    assert page["live"] is True
    assert [entry["place"] for entry in page["entries"]] == ["h.0", "h.1"]
    status, _, body = ask(server, "/api/chunk?source=first&id=map:0:1")
    assert status == 200
    assert unpack(body).arrays["values"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_saved_record_is_shown_and_read_again_when_it_was_saved_again(server, served_folder):
    model = nn.Sequential(nn.Linear(2, 3))
    with hl.capture(model, "0", detach=True) as record:
        model(torch.ones(4, 2))
    hl.save_record(record, served_folder / "values")
    assert {"name": "values", "kind": "record"} in ask_json(server, "/api/sources")["sources"]
    page = ask_json(server, "/api/page?source=values")
    assert [entry["place"] for entry in page["entries"]] == ["0"]
    chunk = page["entries"][0]["chunk"]
    status, _, body = ask(server, f"/api/chunk?source=values&id={chunk}")
    assert status == 200
    assert body
    with hl.capture(model, "0", "", detach=True) as record:
        model(torch.ones(4, 2))
    hl.save_record(record, served_folder / "values")
    again = ask_json(server, "/api/page?source=values")
    assert {entry["place"] for entry in again["entries"]} == {"", "0"}
    assert again["revision"] != page["revision"]


def test_a_record_that_could_not_be_read_while_it_was_saved_is_read_at_the_next_look(
    tmp_path, monkeypatch
):
    def save(*where):
        model = nn.Sequential(nn.ReLU(), nn.ReLU())
        with hl.capture(model, *where, detach=True) as record:
            model(torch.ones(1, 2))
        hl.save_record(record, tmp_path / "values")

    def half_written(folder):
        raise hl.RecordError("A record was to be read.", "Its tensors are missing.", "Wait.")

    def places(view):
        return {entry["place"] for entry in view.page()["entries"]}

    save("0")
    view = live_views.RecordView(tmp_path / "values")
    before = view.revision
    save("0", "1")
    with monkeypatch.context() as patched:
        patched.setattr(live_views, "load_record", half_written)
        assert view.refresh() == before
    assert places(view) == {"0"}
    assert view.refresh() != before
    assert places(view) == {"0", "1"}


def test_answers_are_packed_for_those_who_take_it(server):
    status, headers, body = ask(server, "/", Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"], body[:2]) == (200, "gzip", b"\x1f\x8b")


def test_single_samples_of_a_store_are_given_by_number(server):
    page = ask_json(server, "/api/page?source=acts")
    chunk = page["entries"][0]["chunk"]
    _, _, body = ask(server, f"/api/chunk?source=acts&id={chunk}:11")
    found = unpack(body)
    assert found.arrays["p0"].ravel().tolist() == [22, 23]
    assert found.meta["items"][0]["label"] == "11"
    for wrong in (f"{chunk}:12", f"{chunk}:-1", "e99:0", f"{chunk}:x", "../e0", ""):
        assert ask(server, f"/api/chunk?source=acts&id={wrong}")[0] == 404, wrong


def test_a_report_is_served_in_a_box_of_its_own(server, served_folder):
    status, headers, body = ask(server, "/report?source=weights.html")
    assert status == 200
    assert body == (served_folder / "weights.html").read_bytes()
    rules = headers["Content-Security-Policy"].split("; ")
    assert rules[0] == "sandbox allow-scripts"
    assert "connect-src 'none'" in rules
    assert "default-src 'none'" in rules
    assert not [rule for rule in rules if "self" in rule or "unsafe" in rule]


def resigned(text):
    """A page with a digest that fits, as anybody can compute it."""
    zeros = re.sub(r"(sha256 )[0-9a-f]{64}(\">)", rf"\g<1>{'0' * 64}\2", text, count=1)
    return zeros.replace("0" * 64, hashlib.sha256(zeros.encode()).hexdigest(), 1)


DIGEST = "was cut short or changed since"
FRAME = "script, its style or its frame is not that of this hookline"
CHANGES = {
    "cut short": (lambda text: text[: len(text) // 2], DIGEST),
    "one letter": (lambda text: text.replace("weight", "Weight", 1), DIGEST),
    "something behind it": (lambda text: text + "\n", DIGEST),
    "another title": (lambda text: re.sub("<title>.", "<title>x", text), DIGEST),
    "an older version": (lambda text: resigned(text.replace("hookline 0", "hookline -1")), "-1"),
    "a newer version": (lambda text: resigned(text.replace("hookline 0", "hookline 90")), "90"),
    "no digest": (
        lambda text: re.sub('hookline [^<]*">', 'hookline">', text, count=1),
        "no digest",
    ),
    "a script more": (
        lambda text: resigned(text.replace("<script>", "<script>alert(1)</script><script>", 1)),
        FRAME,
    ),
    "another script": (lambda text: resigned(text.replace("<script>", "<script>alert(1);")), FRAME),
    "another policy": (lambda text: resigned(text.replace("connect-src", "style-src")), FRAME),
    "markup": (lambda text: resigned(text.replace("</title>", "</title><base href='//x'>")), FRAME),
    "a handler": (
        lambda text: resigned(text.replace('data-chunk="page"', 'data-chunk="page" onload="x"')),
        FRAME,
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_page_that_hookline_did_not_write_so_is_refused_with_the_reason(
    kind, server, served_folder
):
    path = served_folder / "weights.html"
    change, reason = CHANGES[kind]
    text = path.read_text("utf-8")
    assert change(text) != text
    path.write_text(change(text), "utf-8")
    status, headers, body = ask(server, "/report?source=weights.html")
    assert (status, headers["Content-Type"]) == (409, "text/plain; charset=utf-8")
    assert reason in body.decode()
    assert "Write it again with hookline.report" in body.decode()
    path.write_text(resigned(text), "utf-8")
    assert ask(server, "/report?source=weights.html")[0] == 200


def test_a_title_of_any_text_is_served(server, served_folder):
    title = '</title><script>"&\ud800 sha256 ' + "0" * 64
    hl.report(nn.Linear(2, 2), served_folder / "weights.html", title=title)
    assert ask(server, "/report?source=weights.html")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/first/00000.json",
        "/report?source=secret.txt", "/report?source=other.html", "/report?source=../x.html",
        "/report?source=%2e%2e%2fsecret.txt", "/report?source=first", "/report",
        "/api/page?source=..", "/api/page?source=.", "/api/page?source=/etc", "/api/page",
        "/api/page?source=first%2f..%2facts", "/api/page?source=weights.html", "/api/events",
        "/api/page?source=first%00", "/api/chunk?source=first&id=nothing", "/etc/passwd",
    ],
)  # fmt: skip
def test_no_address_leads_to_a_file(server, path):
    status, _, body = ask(server, path)
    assert status == 404
    assert b"secret" not in body


def test_links_out_of_the_folder_are_not_followed(server, served_folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    with RunWriter(outside / "run", ROWS) as writer:
        write_values(writer, 0)
    (served_folder / "link").symlink_to(outside / "run")
    assert "link" not in [one["name"] for one in ask_json(server, "/api/sources")["sources"]]
    assert ask(server, "/api/page?source=link")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_only_get_is_answered(server, method):
    assert ask(server, "/", method)[0] == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "", "[::1]"])
def test_requests_for_another_host_are_refused(server, host):
    status, _, body = ask(server, "/api/page?source=first", Host=host.format(port=server.port))
    assert status == 403
    assert b"h.0" not in body


def test_requests_from_other_pages_are_refused(server):
    assert ask(server, "/api/sources", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "/api/sources", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(server, "/api/sources", Host=f"localhost:{server.port}")[0] == 200


def test_a_long_address_is_refused(server):
    assert ask(server, "/api/page?source=" + "x" * 5000)[0] == 414


def test_it_listens_on_this_machine_only(server):
    assert server._server.server_address[0] == "127.0.0.1"
    assert repr(server).endswith(f"at http://127.0.0.1:{server.port}/)")


def test_what_is_appended_is_pushed(server, served_folder):
    page = ask_json(server, "/api/page?source=first")
    with RunWriter(served_folder / "second", ROWS, model="Net") as writer:
        write_values(writer, 0)
        with EventStream(server, "source=second&revision=none") as stream:
            assert stream.update()["run"]["steps"] == 1
            write_values(writer, 1)
            found = stream.update()
            while found["run"]["steps"] < 2 or len(found["scalars"][0]["steps"]) < 2:
                found = stream.update()
            assert found["scalars"][0]["values"] == [1.0, 0.5]
            assert found["facts"][0] == ["latest step", "1"]
            assert "second" in [one["name"] for one in found["sources"]]
    assert page["revision"]


def test_a_reader_that_is_up_to_date_is_told_nothing_until_something_comes(server, served_folder):
    revision = ask_json(server, "/api/page?source=first")["revision"]
    with EventStream(server, f"source=first&revision={revision}") as stream:
        with RunWriter(
            served_folder / "first", ROWS, model="Net"
        ) as writer:  # training was started again
            write_values(writer, 2, 3)
            found = stream.update()
            while found["run"]["steps"] < 4:
                found = stream.update()
    assert found["facts"][-1] == ["starts", "2"]


def test_a_start_with_other_rows_makes_the_page_anew(server, served_folder):
    revision = ask_json(server, "/api/page?source=first")["revision"]
    rows = [*ROWS, Row("h.2", "output", "Block")]
    with EventStream(server, f"source=first&revision={revision}") as stream:
        with RunWriter(served_folder / "first", rows, model="Net") as writer:
            write_values(writer, 3)
            assert stream.update()["restructured"] is True
    page = ask_json(server, "/api/page?source=first")
    assert [entry["place"] for entry in page["entries"]] == ["h.0", "h.1", "h.2"]


def test_a_run_that_is_deleted_and_begun_anew_is_read_anew(server, served_folder):
    revision = ask_json(server, "/api/page?source=first")["revision"]
    with EventStream(server, f"source=first&revision={revision}") as stream:
        for path in (served_folder / "first").iterdir():
            path.unlink()
        with RunWriter(served_folder / "first", ROWS[:1], model="Other") as writer:
            write_values(writer, 0)
        assert stream.update()["restructured"] is True
    assert ask_json(server, "/api/page?source=first")["title"] == "Other"


def test_a_store_that_grows_is_read_anew(server, served_folder):
    before = ask_json(server, "/api/page?source=acts")
    with hl.Store.create(served_folder / "acts", resume=True) as writer:
        writer.append({"fc": torch.zeros(3, 2)})
    after = ask_json(server, "/api/page?source=acts")
    assert (before["entries"][0]["count"], after["entries"][0]["count"]) == (12, 15)
    assert before["revision"] != after["revision"]


def test_a_broken_run_is_refused_with_its_reason(server, served_folder):
    (served_folder / "broken").mkdir()
    (served_folder / "broken" / "00000.json").write_text("{}")
    status, _, body = ask(server, "/api/page?source=broken")
    assert status == 409
    assert b"A run was to be read" in body


def test_a_store_whose_files_are_cut_off_is_refused_and_the_server_lives(served_folder):
    # In a process of its own: to read from a map of what is no longer there ends it.
    code = """if True:
        import sys, urllib.error, urllib.request
        from pathlib import Path
        from hookline.view.server import serve
        with serve(sys.argv[1]) as server:
            for part in ("e0", "e0:3"):
                ask = lambda: urllib.request.urlopen(
                    server.address + f"api/chunk?source=acts&id={part}").read()
                ask()
                (shard,) = Path(sys.argv[1], "acts").glob("*.safetensors")
                kept = shard.read_bytes()
                shard.write_bytes(b"")
                try:
                    print("read", ask())
                except urllib.error.HTTPError as error:
                    print(error.code)
                shard.write_bytes(kept)
                ask()
    """
    ran = subprocess.run(
        [sys.executable, "-c", code, str(served_folder)], capture_output=True, text=True
    )
    assert ran.stdout.split() == ["409", "409"], ran.stderr
    assert ran.returncode == 0


def test_what_has_taken_the_place_of_something_else_is_shown(server, served_folder):
    assert ask_json(server, "/api/page?source=first")["kind"] == "run"
    shutil.rmtree(served_folder / "first")
    assert ask_json(server, "/api/page?source=first")["kind"] == "run"  # what was read stays
    (served_folder / "acts").rename(served_folder / "first")
    assert ask_json(server, "/api/page?source=first")["kind"] == "store"


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_names_that_are_no_text_can_be_asked_for_and_hide_no_others(served_folder):
    bad = served_folder / os.fsdecode(b"caf\xe9")
    (served_folder / "first").rename(bad)
    (served_folder / "weights.html").rename(served_folder / os.fsdecode(b"\xe9.html"))
    with serve(served_folder) as server:
        named = {one["name"]: one for one in ask_json(server, "/api/sources")["sources"]}
        assert list(named) == ["acts", "caf\ufffd", "\ufffd.html"]
        assert ask_json(server, "/api/page?source=" + quote("caf\ufffd"))["kind"] == "run"
        assert ask(server, "/" + named["\ufffd.html"]["address"])[0] == 200
    with serve(bad) as server:
        assert ask(server, "/")[0] == 200
    assert hl.report(bad, served_folder / "page.html").stat().st_size


def test_at_the_port_that_browsers_leave_out_it_answers(served_folder, monkeypatch):
    monkeypatch.setattr(view_server._HTTPServer, "server_bind", lambda self: None)
    monkeypatch.setattr(view_server._HTTPServer, "server_activate", lambda self: None)
    monkeypatch.setattr(view_server._HTTPServer, "server_address", ("127.0.0.1", 80), raising=False)
    server = serve(served_folder, 80)
    assert {"127.0.0.1", "localhost"} <= server._server.hosts
    server.close()


def test_nothing_is_written(served_folder):
    (served_folder / "acts" / "rank00000-00007.safetensors").write_bytes(b"left by a killed writer")
    before = {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in served_folder.rglob("*")
    }
    with serve(served_folder) as server:
        for source in ("acts", "first"):
            page = ask_json(server, f"/api/page?source={source}")
            for entry in page["entries"]:
                assert ask(server, f"/api/chunk?source={source}&id={entry['chunk']}")[0] == 200
    after = {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in served_folder.rglob("*")
    }
    assert before == after


def test_a_folder_may_be_empty_at_first_and_is_itself_a_run_later(tmp_path):
    with serve(tmp_path) as server:
        assert ask_json(server, "/api/sources") == {"sources": []}
        with RunWriter(tmp_path, ROWS) as writer:
            write_values(writer, 0)
        (found,) = ask_json(server, "/api/sources")["sources"]
        assert found == {"name": tmp_path.name, "kind": "run"}


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(hl.ReportError, match="There is no such folder"):
        serve(tmp_path / "nothing")
    (tmp_path / "page.html").write_text("")
    with pytest.raises(hl.ReportError, match="It is a file"):
        serve(tmp_path / "page.html")


def test_many_readers_are_answered_at_once(server):
    found = []

    def read():
        found.append(ask(server, "/api/chunk?source=first&id=map:0:0")[2])

    threads = [Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
