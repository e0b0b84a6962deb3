"""A page as one HTML file that needs nothing else.

- `as_html(page)`: the whole file
- `shell(config, chunks)`: the HTML around them, for a file and for the live view
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from functools import cache
from importlib.resources import files

from hookline.pages.chunks import Page, pack, plain_json

__all__ = ["as_html", "policy", "shell"]

_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="hookline">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"><p class="loading">Reading the page …</p></div>
<noscript><p class="loading">This page draws itself with JavaScript, which is switched off here.
Nothing is loaded from elsewhere.</p></noscript>
{data}<script>{script}</script>
</body>
</html>
"""


def as_html(page: Page) -> str:
    """The page as one file: description and chunks are gzip in base64, so no text can break out."""
    parts = [_embed("page", plain_json(page.content).encode())]
    parts += [_embed(name, pack(make())) for name, make in page.chunks.items()]
    return shell(f"{page.content['title']} · hookline", "".join(parts))


def shell(title: str, data: str, connect: str = "'none'") -> str:
    """The HTML around the data; `connect` is where the page may read from."""
    return _HTML.format(
        policy=html.escape(policy(connect)),
        title=html.escape(title.encode(errors="replace").decode()),
        style=_asset("page.css"),
        data=data,
        script=_asset("page.js"),
    )


def policy(connect: str = "'none'") -> str:
    """The Content-Security-Policy of a page: its own script and style, nothing from outside."""
    return (
        "default-src 'none'; "
        f"script-src '{_digest('page.js')}'; style-src '{_digest('page.css')}'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _embed(name: str, content: bytes) -> str:
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
    return f'<script type="application/gzip" data-chunk="{html.escape(name)}">{packed}</script>\n'


@cache
def _asset(name: str) -> str:
    return files("hookline.pages").joinpath(name).read_text("utf-8")


@cache
def _digest(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
