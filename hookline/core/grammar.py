"""The spelling of places: `path [/operation[#n]] [:port] [[part]]...`.

- `parse(text)`: a spelled place as one `Pattern`, or several where braces hold whole paths
- `escape(name)`: a path with the characters of the grammar escaped
- `literal_readings(text)`: the ways to read a text as a plain existing path
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hookline.core.nested import Part, Path
from hookline.errors import PlaceError

__all__ = [
    "ANY",
    "DEEP",
    "MODULE_PORTS",
    "PORTS",
    "TENSOR_PORTS",
    "Pattern",
    "Segment",
    "escape",
    "literal_readings",
    "parse",
    "parse_port",
]

MODULE_PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs")
TENSOR_PORTS = ("value", "grad")
PORTS = (*MODULE_PORTS, *TENSOR_PORTS)

DEEP = object()  # the segment `**`
ANY = re.compile("[^.]*")  # the segment `*`
Segment = str | re.Pattern[str] | object

_SPECIAL = "*{},/:[]#\\"
_SPECIALS = re.compile(r"[*{},/:\[\]#\\]")
# What an escaped character is while a place is read: one of the last code points of Unicode's
# private planes, which no name holds.
_HIDDEN = {c: chr(0x10FE00 + ord(c)) for c in _SPECIAL}
_SHOWN = {ord(hidden): c for c, hidden in _HIDDEN.items()}
_HEAD = re.compile(
    r"(?P<path>[^\[\]:/#]*)"
    r"(?:/(?P<operation>[^\[\]:/#]+)(?:\#(?P<nth>[0-9]+))?)?"
    r"(?::(?P<port>[^\[\]:/#]*))?"
)
_PART = re.compile(r"""\[(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\[\]'"\\]+))\]""", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MOST = 10_000  # alternatives in one brace


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed place. `segments` are names, regular expressions for one name, or DEEP."""

    segments: tuple[Segment, ...]
    operation: str | None
    nth: int | None
    port: str | None
    parts: Path
    literal: bool


def escape(path: str) -> str:
    r"""A path with the characters of the grammar escaped.

    >>> print(escape("a/b.x[0]"))
    a\/b.x\[0\]
    """
    if not any(c in path for c in _SPECIAL):
        return path
    return "".join("\\" + c if c in _SPECIAL else c for c in path)


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Pattern, ...]:
    """A spelled place as patterns; PlaceError says where it is malformed.

    >>> (pattern,) = parse("h.{0..2}.attn:inputs[mask]")
    >>> pattern.port, pattern.parts, pattern.literal
    ('inputs', ('mask',), False)
    """
    head, spelled = _cut(text)
    form = _HEAD.fullmatch(head)
    if form is None:
        raise _malformed(text, _reason(text))
    port, parts = form["port"], _parts(text, spelled)
    if port is not None and port not in PORTS:
        raise _no_such_port(text, port)
    operation = form["operation"]
    nth = None if form["nth"] is None else int(form["nth"])
    patterns: list[Pattern] = []
    for path in _expand(text, form["path"]):
        segments = tuple(_segment(text, piece) for piece in _split(text, path))
        literal = form["path"] == path and all(isinstance(piece, str) for piece in segments)
        shown = None if operation is None else operation.translate(_SHOWN)
        patterns.append(Pattern(segments, shown, nth, port, parts, literal))
    return tuple(patterns)


@lru_cache(maxsize=1024)
def parse_port(text: str) -> tuple[str | None, Path]:
    """The second half of a pair such as `(nn.Conv2d, ":inputs[mask]")`.

    >>> parse_port(":inputs[mask]")
    ('inputs', ('mask',))
    """
    (pattern,) = parse(text)
    if pattern.segments or pattern.operation:
        raise _malformed(text, "the second item of a pair is a port, such as ':input'")
    return pattern.port, pattern.parts


@lru_cache(maxsize=4096)
def literal_readings(text: str) -> tuple[Pattern, ...]:
    """The ways to read a text that holds special characters as a plain path and a port.

    >>> [pattern.segments for pattern in literal_readings("a/b:input")]
    [('a/b:input',), ('a/b',)]
    """
    if not _SPECIALS.search(text):
        return ()
    readings: list[tuple[str, str | None, Path]] = [(text, None, ())]
    for position in range(len(text) - 1, -1, -1):  # the longest path first
        if text[position] in ":[" and _SPECIALS.search(text[:position]):
            try:
                readings.append((text[:position], *parse_port(text[position:])))
            except PlaceError:
                continue
    return tuple(
        Pattern(tuple(path.split(".")), None, None, port, parts, True)
        for path, port, parts in readings
    )


def _cut(text: str) -> tuple[str, str]:
    """A place cut before its parts; in what comes first, escaped characters are hidden."""
    if "\\" not in text:
        head, bracket, rest = text.partition("[")
        return head, bracket + rest
    shown, escaped = "", False
    for position, character in enumerate(text):
        if escaped:
            if character not in _HIDDEN:
                raise _malformed(text, f"a backslash escapes one of {' '.join(_SPECIAL)} only")
            shown += _HIDDEN[character]
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "[":
            return shown, text[position:]
        else:
            shown += character
    if escaped:
        raise _malformed(text, "it ends in a backslash")
    return shown, ""


def _parts(text: str, spelled: str) -> Path:
    parts: list[Part] = []
    position = 0
    while position < len(spelled):
        match = _PART.match(spelled, position)
        if match is None:
            reason = f"'{spelled[position:]}' is no part; write [0], [name] or ['0']"
            raise _malformed(text, _reason(text, reason))
        single, double, plain = match.groups()
        if plain is not None:
            parts.append(int(plain) if _NUMBER.fullmatch(plain) else plain)
        else:
            quoted = single if single is not None else double
            parts.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        position = match.end()
    return tuple(parts)


def _split(text: str, path: str) -> list[str]:
    """The segments of a path: cut at dots, but not inside braces (`{0..11}` holds dots)."""
    if not path:
        return []
    pieces, depth = [""], 0
    for character in path:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            raise _malformed(text, "'}' closes no '{'")
        if character == "." and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth:
        raise _malformed(text, "'{' is never closed")
    if not all(pieces):
        raise _malformed(text, "a path has no empty segments")
    return pieces


def _alternatives(text: str, inside: str) -> list[str]:
    span = _RANGE.fullmatch(inside)
    if span is None:
        pieces, depth = [""], 0
        for character in inside:
            depth += (character == "{") - (character == "}")
            if character == "," and depth == 0:
                pieces.append("")
            else:
                pieces[-1] += character
        return pieces
    low, high = sorted((int(span[1]), int(span[2])))
    if high - low >= _MOST:
        raise _malformed(text, f"a range holds at most {_MOST:,} numbers")
    width = len(span[1]) if span[1].startswith("0") and len(span[1]) > 1 else 0
    return [str(number).zfill(width) for number in range(low, high + 1)]


def _braces(path: str) -> tuple[int, int] | None:
    """Where the first outermost pair of braces stands."""
    start, depth = path.find("{"), 0
    for position in range(max(start, 0), len(path)):
        depth += (path[position] == "{") - (path[position] == "}")
        if depth == 0:
            return None if start < 0 else (start, position)
    return None


def _expand(text: str, path: str) -> Iterator[str]:
    """Braces whose alternatives are whole paths, with dots, become several paths."""
    found = _braces(path)
    if found is not None:
        start, end = found
        inside = path[start + 1 : end]
        if ("." in inside or "**" in inside) and not _ranges_only("{" + inside + "}"):
            for piece in _alternatives(text, inside):
                yield from _expand(text, path[:start] + piece + path[end + 1 :])
            return
        for rest in _expand(text, path[end + 1 :]):
            yield path[: end + 1] + rest
        return
    yield path


def _ranges_only(inside: str) -> bool:
    rest = re.sub(r"\{-?\d+\.\.-?\d+\}", "", inside)
    return "." not in rest and "**" not in rest


def _segment(text: str, piece: str) -> Segment:
    if piece == "**":
        return DEEP
    if piece == "*":
        return ANY
    if "**" in piece:
        raise _malformed(text, "'**' must stand alone between dots")
    if not any(c in piece for c in "*{}"):
        return piece.translate(_SHOWN)
    return re.compile(_regex(text, piece))


def _regex(text: str, piece: str) -> str:
    found = _braces(piece)
    if found is None:
        return "[^.]*".join(re.escape(run.translate(_SHOWN)) for run in piece.split("*"))
    start, end = found
    choices = _alternatives(text, piece[start + 1 : end])
    middle = "|".join(_regex(text, choice) for choice in choices)
    return f"{_regex(text, piece[:start])}(?:{middle}){_regex(text, piece[end + 1 :])}"


def _malformed(text: str, reason: str) -> PlaceError:
    return PlaceError(
        f"The place {text!r} cannot be read:",
        f"{reason}.",
        "A place is path[/operation[#n]][:port][[part]]...; a backslash escapes a character.",
    )


def _no_such_port(text: str, port: str) -> PlaceError:
    close = difflib.get_close_matches(port, PORTS, n=1, cutoff=0.5)
    return PlaceError(
        f"The place {text!r} names the port {port!r}, which does not exist.",
        f"Closest: {close[0]!r}." if close else "",
        f"A module has {', '.join(MODULE_PORTS)}; a parameter or buffer {', '.join(TENSOR_PORTS)}.",
    )


def _reason(text: str, otherwise: str = "its pieces are not in their order") -> str:
    swapped = re.fullmatch(r"(.*?)((?:\[[^\[\]]*\])+):(\w+)", text)
    if swapped is not None:
        return f"the port comes before the parts: {swapped[1]}:{swapped[3]}{swapped[2]}"
    if text.count("[") != text.count("]"):
        return "its square brackets do not pair up"
    if text.count(":") > 1:
        return "it has more than one port"
    if "#" in text:
        return "'#n' counts the uses of an operation, as in attn/matmul#1"
    return otherwise
