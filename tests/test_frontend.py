"""The built bundle in the package is what the source of the front end gives.

`make test` builds it again where npm and the registry are there; this needs neither.
"""

import hashlib
import json
import re

from environment import ROOT

SOURCE = ROOT / "frontend" / "src"
BUILT = ROOT / "hookline" / "view"


def test_the_bundle_was_built_from_this_source():
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir(), key=lambda path: path.name):
        digest.update(f"{path.name}\0{path.read_text('utf-8')}\0".encode())
    for name in ("page.js", "page.css"):
        head = (BUILT / name).read_text("utf-8").partition("\n")[0]
        assert digest.hexdigest() in head, f"{name} is stale: run `make frontend`"


def test_the_bundle_carries_the_licence_of_what_is_in_it():
    text = (BUILT / "page.js").read_text("utf-8")
    assert "The MIT License (MIT)" in text
    assert "uPlot" in text


def test_the_bundle_can_lie_inside_html_and_asks_for_nothing():
    for name in ("page.js", "page.css"):
        text = (BUILT / name).read_text("utf-8")
        assert not re.search(r"</(script|style)|<!--", text, re.IGNORECASE)
        assert "\r" not in text
        code = text.partition("*/")[2]
        outside = set(re.findall(r"https?://[\w./]+", code)) - {"http://www.w3.org/2000/svg"}
        assert not outside


def test_no_text_becomes_html_in_the_source():
    for path in SOURCE.glob("*.js"):
        text = path.read_text("utf-8")
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert unsafe not in text, (path.name, unsafe)


def test_versions_are_pinned_and_the_lock_agrees():
    asked = json.loads((ROOT / "frontend" / "package.json").read_text())["devDependencies"]
    lock = json.loads((ROOT / "frontend" / "package-lock.json").read_text())["packages"]
    for name, version in asked.items():
        assert re.fullmatch(r"[\d.]+", version)
        assert lock[f"node_modules/{name}"]["version"] == version
