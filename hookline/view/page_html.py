"""Write a page as one self-contained HTML file.

- `as_html(page)`: the whole file
- `shell(title, data)`: the HTML around the data, for a file and for the live view
- `policy(connect)`: its Content-Security-Policy
- `is_page(start)`: True if a file with this start claims to be such a file
- `why_not(content)`: the reason why a file was not written by this version, or was changed

A file contains its version, and a digest of itself with zeros in the digest's place.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from functools import cache
from importlib.resources import files

from hookline import __version__
from hookline.view.page import Page, pack, plain_json

__all__ = ["as_html", "is_page", "policy", "shell", "why_not"]

_ZEROS = "0" * 64
_MARK = b'<meta name="generator" content="hookline'
_SIGNED = re.compile(_MARK + rb" ([^;\"]{1,40}); sha256 ([0-9a-f]{64})\">")
_START = 4096  # bytes, among which the mark stands
_EMBEDDED = re.compile(
    r'(?:<script type="application/gzip" data-chunk="[^"<>]*+">[A-Za-z0-9+/=]*+</script>\n)*+'
)

_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="{generator}">
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
    """Return the page as one file. Its data is gzip in base64, so no text can break out."""
    parts = [_embed("page", plain_json(page.content).encode())]
    parts += [_embed(name, pack(make())) for name, make in page.chunks.items()]
    text = shell(f"{page.content['title']} · hookline", "".join(parts), _generator(_ZEROS))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(_generator(_ZEROS), _generator(digest), 1)  # it stands before all else


def shell(title: str, data: str, generator: str = "hookline", connect: str = "'none'") -> str:
    """Return the HTML around the data; `connect` is where the page may read from."""
    return _framed(
        html.escape(title.encode(errors="replace").decode()), data, generator, policy(connect)
    )


def _framed(title: str, data: str, generator: str, rules: str) -> str:
    return _HTML.format(
        policy=html.escape(rules),
        generator=generator,
        title=title,
        style=_asset("page.css"),
        data=data,
        script=_asset("page.js"),
    )


def _generator(digest: str) -> str:
    return f"hookline {__version__}; sha256 {digest}"


def is_page(start: bytes) -> bool:
    """Return True if a file that begins so says that it is a page."""
    return _MARK in start[:_START]


def why_not(content: bytes) -> str:
    """Return why a file is not a page that this version has written; "" if it is.

    >>> why_not(as_html(Page({"title": "a"})).encode())
    ''
    >>> why_not(as_html(Page({"title": "a"})).encode() + b" ")
    'Its digest does not fit: it was cut short or changed since.'
    """
    found = _SIGNED.search(content[:_START])
    if found is None:
        return "It has no digest: an earlier version wrote it, or it was changed since."
    version, digest = (part.decode(errors="replace") for part in found.groups())
    if version != __version__:
        return f"Version {version} of hookline wrote it, and this is {__version__}."
    zeros = content[: found.start(2)] + _ZEROS.encode() + content[found.end(2) :]
    if hashlib.sha256(zeros).hexdigest() != digest:
        return "Its digest does not fit: it was cut short or changed since."
    if not _is_framed(content, _generator(digest)):
        return "Its script, its style or its frame is not that of this hookline."
    return ""


def _is_framed(content: bytes, generator: str) -> bool:
    """Return True if a page has only a title and data inside the frame of this version."""
    before, after = _framed("\0", "\1", generator, policy()).encode().split(b"\0", 1)
    middle, after = after.split(b"\1", 1)
    if not (content.startswith(before) and content.endswith(after)):
        return False
    title, there, data = content[len(before) : len(content) - len(after)].partition(middle)
    plain = there and b"<" not in title
    return bool(plain and _EMBEDDED.fullmatch(data.decode(errors="replace")))


def policy(connect: str = "'none'") -> str:
    """Return the Content-Security-Policy of a page: its own script and style, nothing from
    outside.
    """
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
    return files("hookline.view").joinpath(name).read_text("utf-8")


@cache
def _digest(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
