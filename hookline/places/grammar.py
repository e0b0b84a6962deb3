"""Read and write the spelling of places: `path [/operation[#n]] [:port] [[part]]...`.

- `MODULE_PORTS`, `TENSOR_PORTS`: what can be asked for at a module, and at a parameter or buffer
- `INPUT_PORTS`, `NAMED_INPUT_PORTS`: the ports of arguments, and those that give all by name
- `is_gradient(port)`: True for a port that gives gradients
- `Place`: the address of a value, a string with its pieces as attributes
- `parse(text)`: the `Pattern` that a text spells
- `parse_port(text)`: the port and the parts that a text spells
- `literal_readings(text)`: the patterns of a text that is taken as a plain path
- `escape(path)`: a path with the characters of the grammar escaped
- `Segment`: one segment of a path, a name or a `Glob`; `DEEP` is the segment `**`
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from hookline.errors import PlaceError
from hookline.values.nested import Path, show_path

__all__ = [
    "DEEP", "INPUT_PORTS", "MODULE_PORTS", "NAMED_INPUT_PORTS", "PORTS", "TENSOR_PORTS", "Glob",
    "Pattern", "Place", "Segment", "escape", "is_gradient", "literal_readings", "parse",
    "parse_port",
]  # fmt: skip

MODULE_PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs")
TENSOR_PORTS = ("value", "grad")
PORTS = MODULE_PORTS + TENSOR_PORTS

INPUT_PORTS = frozenset({"input", "inputs", "grad_input", "grad_inputs"})
NAMED_INPUT_PORTS = frozenset({"inputs", "grad_inputs"})  # all arguments; the others are the first
_GRADIENT_PORTS = frozenset({"grad_output", "grad_input", "grad_inputs", "grad"})


def is_gradient(port: str | None) -> bool:
    """Return True for the port of a gradient, of a module or of a tensor."""
    return port in _GRADIENT_PORTS


_SPECIAL = re.compile(r"[*{},/:\[\]#\\]")

# While a place is read, code points from the end of Unicode's private planes, which no name holds,
# stand for escaped characters, and for the braces and commas inside one segment.
_HIDDEN = {f"\\{c}": chr(0x10FE00 + ord(c)) for c in r"\*{},/:[]#"}  # the backslash comes first
_SHOWN = {ord(hidden): escaped[1] for escaped, hidden in _HIDDEN.items()}
_OPEN = chr(0x10FD00)
_OR = chr(0x10FD01)
_CLOSE = chr(0x10FD02)

_NAME = r"[^\[\]:/#\\]"
_PART = r"""\[('(?:[^'\\]|\\(?s:.))*'|"(?:[^"\\]|\\(?s:.))*"|[^\[\]'"\\]+)\]"""
_PLACE = re.compile(
    rf"(?P<path>{_NAME}*)(?:/(?P<operation>{_NAME}+)(?:\#(?P<nth>[0-9]+))?)?"
    rf"(?::(?P<port>{_NAME}*))?(?P<parts>(?:{_PART})*)"
)
_BRACES = re.compile(r"\{([^{}]*)\}")  # an innermost pair

# Limits of one place: numbers in a range; paths that braces stand for; ports, parts and braces.
_NUMBERS = 10_000
_PATHS = 1_000
_PIECES = 100

# Reasons why a place or a path is malformed, by what is found in it; errors give the first.
_REASONS = {
    r"\A[^\[]*\\\Z": "it ends in a backslash",
    r"\A[^\[]*\\": r"a backslash escapes one of * { } , / : [ ] # \\ only",
    r"\A(.*?)((?:\[[^\[\]]*\])+):(\w+)\Z": r"the port comes before the parts: \1:\3\2",
    r"\[[^\]]*\Z|\A[^\[]*\]": "its square brackets do not pair up",
    r":.*:": "it has more than one port",
    r"#": "'#n' counts the uses of an operation, as in attn/matmul#1",
    r"(\[.*)": r"'\1' is no part; write [0], [name] or ['0']",
    r"\{": "'{' is never closed",
    r"\}": "'}' closes no '{'",
    r"\A\.|\.\.|\.\Z": "a path has no empty segments",
    r"[^.]\*\*|\*\*[^.]": "'**' must stand alone between dots",
}


class _Group(NamedTuple):
    """The choices that a pair of braces gives: plain texts by their length, and others."""

    plain: dict[int, set[str]]
    others: list[list[Any]]


class Glob:
    """A segment with stars or braces, which matches some names.

    >>> glob = parse("h.*_{0..11}").paths[0][1]
    >>> glob.fullmatch("block_11"), glob.fullmatch("block_12")
    (True, False)

    There are three ways to match. The last is the definition; the others are faster:

    - A glob that lists names, such as `{0..11}`, looks them up and stops after the last of them:
      the time does not depend on the other names. 12 names take 2 µs, and by positions 11 µs.
    - A glob that a regular expression can match without backtracking uses one: `*_proj` takes
      0.1 ms for 1,000 names, and by positions 1.5 ms.
    - Any other glob keeps the set of all positions at which its match can stand. A text such as
      `*{}*{}*{}*{}x`, which may come from a file, would take a regular expression forever.
    """

    def __init__(self, text: str) -> None:
        (items,) = _choices(iter(text))
        self._items = items
        self._matches_all = items == [None]
        self._names = _names_of(items)
        expression = _expression(items)
        self._fits: Callable[[str], Any] = self._ends_there
        if expression is not None:
            self._fits = re.compile(expression, re.DOTALL).fullmatch

    def among(self, names: Collection[str]) -> Iterable[str]:
        """Return the names that match, in their order."""
        if self._matches_all:
            return names
        if not self._names:
            return filter(self._fits, names)
        held = {name for name in self._names if name in names}
        return islice(filter(held.__contains__, names), len(held))  # stops after the last match

    def fullmatch(self, name: str) -> bool:
        """Return True if the whole name matches."""
        return any(True for _ in self.among((name,)))

    def _ends_there(self, name: str) -> bool:
        return len(name) in _ends(self._items, name, {0})


def _names_of(items: Sequence[Any]) -> frozenset[str]:
    """Return the names that a glob such as `{0..11}` lists; nothing for other globs."""
    groups = [item for item in items if isinstance(item, _Group)]
    if None in items or len(groups) != 1 or groups[0].others:
        return frozenset()
    at = items.index(groups[0])
    before = "".join(items[:at])
    after = "".join(items[at + 1 :])
    return frozenset(before + text + after for texts in groups[0].plain.values() for text in texts)


def _expression(items: Sequence[Any]) -> str | None:
    """Return a regular expression for a glob; None if it would have to backtrack.

    It need not if the pieces after each star have one length: then their first match is as good as
    any later one.
    """
    pieces = [""]
    for item in items:
        if item is None:
            pieces.append("")
        elif isinstance(item, str):
            pieces[-1] += re.escape(item)
        elif item.others or len(item.plain) > 1:
            return None
        else:
            (texts,) = item.plain.values()
            pieces[-1] += f"(?:{'|'.join(map(re.escape, texts))})"
    first, *middle = pieces
    last = f".*{middle.pop()}" if middle else ""
    return first + "".join(f"(?>.*?{piece})" for piece in middle) + last


def _choices(text: Iterator[str]) -> list[list[Any]]:
    """Return the choices up to the end of a group, each a list of items.

    An item is a literal text, a group, or None for a star.
    """
    choices: list[list[Any]] = [[]]
    for character in text:
        items = choices[-1]
        if character == _CLOSE:
            break
        if character == _OR:
            choices.append([])
        elif character == _OPEN:
            items.append(_group(_choices(text)))
        elif character == "*":
            items.append(None)
        elif items and isinstance(items[-1], str):
            items[-1] += character.translate(_SHOWN)
        else:
            items.append(character.translate(_SHOWN))
    return choices


def _group(choices: list[list[Any]]) -> _Group:
    group = _Group({}, [])
    for items in choices:
        if not items or (len(items) == 1 and isinstance(items[0], str)):
            text = items[0] if items else ""
            group.plain.setdefault(len(text), set()).add(text)
        else:
            group.others.append(items)
    return group


def _ends(items: Sequence[Any], name: str, starts: set[int]) -> set[int]:
    """Return the positions in a name at which a match of the items can end."""
    for item in items:
        if not starts:
            break
        if item is None:
            starts = {*range(min(starts), len(name) + 1)}
        elif isinstance(item, str):
            starts = {start + len(item) for start in starts if name.startswith(item, start)}
        else:
            found = {
                start + size
                for size, texts in item.plain.items()
                for start in starts
                if name[start : start + size] in texts
            }
            starts = found.union(*(_ends(choice, name, starts) for choice in item.others))
    return starts


Segment = str | Glob
DEEP = Glob("*")  # the segment `**`: any number of names


class Place(str):
    """The address of a value: a string in its canonical spelling, with its pieces as attributes.

    >>> place = Place("lstm", "output", (1, 0))
    >>> place == "lstm[1][0]", place.path, place.port, place.parts
    (True, 'lstm', 'output', (1, 0))
    """

    __slots__ = ("operation", "parts", "path", "port")
    path: str
    port: str
    parts: Path
    operation: str | None  # such as "softmax" or "matmul#1"

    def __new__(
        cls, path: str, port: str = "output", parts: Path = (), operation: str | None = None
    ) -> Place:
        within = "" if operation is None else f"/{operation}"
        shown = "" if port in ("output", "value") else f":{port}"
        self = super().__new__(cls, escape(path) + within + shown + show_path(parts))
        self.path = path
        self.port = port
        self.parts = parts
        self.operation = operation
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.path, self.port, self.parts, self.operation


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed place. A path is made of names, expressions for one name, and DEEP."""

    paths: tuple[tuple[Segment, ...], ...]  # several where braces hold whole paths
    operation: str | None
    nth: int | None
    port: str | None
    parts: Path
    literal: bool


@lru_cache(maxsize=4096)
def escape(path: str) -> str:
    r"""Return a path with the characters of the grammar escaped.

    >>> print(escape("a/b.x[0]"))
    a\/b.x\[0\]
    """
    return _SPECIAL.sub(r"\\\g<0>", path) if _SPECIAL.search(path) else path


@lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """Return the pattern that a text spells; raise PlaceError if the text is malformed.

    >>> pattern = parse("h.{0..2}.attn:inputs[mask]")
    >>> pattern.port, pattern.parts, pattern.literal
    ('inputs', ('mask',), False)
    """
    if _is_endless(text):
        raise _malformed(text, f"it has more than {_PIECES} ports, parts and braces")
    hidden = text
    for escaped, character in _HIDDEN.items():
        hidden = hidden.replace(escaped, character)
    form = _PLACE.fullmatch(hidden)
    if form is None:
        _check(text, hidden)
        raise _malformed(text, "its pieces are not in their order")
    path = form["path"]
    port = form["port"]
    _check_port(text, port)
    operation = form["operation"] and form["operation"].translate(_SHOWN)
    if operation and not re.fullmatch(r"[\w*{},]+", operation):
        raise _malformed(text, "an operation is the name of a torch function")
    nth = int(form["nth"]) if form["nth"] else None
    parts = tuple(_part(spelled) for spelled in re.findall(_PART, form["parts"]))
    literal = "*" not in path and "{" not in path
    return Pattern(_paths(text, path), operation, nth, port, parts, literal)


@lru_cache(maxsize=1024)
def parse_port(text: str) -> tuple[str | None, Path]:
    """Return the port and parts of the second half of a pair: `(nn.Conv2d, ":inputs[mask]")`.

    >>> parse_port(":inputs[mask]")
    ('inputs', ('mask',))
    """
    pattern = parse(text)
    if pattern.paths != ((),) or pattern.operation:
        raise _malformed(text, "the second item of a pair is a port, such as ':input'")
    return pattern.port, pattern.parts


@lru_cache(maxsize=4096)
def literal_readings(text: str) -> tuple[Pattern, ...]:
    """Return the patterns of a text with special characters if its path is taken literally.

    The longest path comes first.

    >>> [pattern.paths for pattern in literal_readings("a/b:input")]
    [(('a/b:input',),), (('a/b',),)]
    """
    readings: list[Pattern] = []
    for end in range(0 if _is_endless(text) else len(text), 0, -1):
        if text[end : end + 1] in ("", ":", "[") and _SPECIAL.search(text, 0, end):
            with suppress(PlaceError):
                path = tuple(text[:end].split("."))
                readings.append(Pattern((path,), None, None, *parse_port(text[end:]), True))
    return tuple(readings)


def _is_endless(text: str) -> bool:
    """Return True if a text has so many pieces that reading it would take too long."""
    return sum(map(text.count, "[:{")) > _PIECES


def _check_port(text: str, port: str | None) -> None:
    if port is None or port in PORTS:
        return
    close = difflib.get_close_matches(port, PORTS, n=1, cutoff=0.5)
    closest = f". Closest: {close[0]!r}" if close else ""
    raise _malformed(text, f"it names the port {port!r}, which does not exist{closest}")


def _part(spelled: str) -> int | str:
    if spelled[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", spelled[1:-1], flags=re.DOTALL).translate(_SHOWN)
    return int(spelled) if re.fullmatch(r"-?[0-9]+", spelled) else spelled.translate(_SHOWN)


def _paths(text: str, path: str) -> tuple[tuple[Segment, ...], ...]:
    found = tuple(islice(_expand(text, path), _PATHS + 1))
    if len(found) > _PATHS:
        raise _malformed(text, f"its braces stand for more than {_PATHS:,} paths")
    return found


def _expand(text: str, path: str) -> Iterator[tuple[Segment, ...]]:
    """Yield the paths that a path with braces stands for.

    Braces that hold dots stand for several paths; other braces become a group of their segment.
    """
    braces = _BRACES.search(path)
    if braces is None:
        _check(text, path)
        yield tuple(_segment(name) for name in path.split(".")) if path else ()
        return
    before = path[: braces.start()]
    after = path[braces.end() :]
    span = re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})", braces[1])
    choices = braces[1].split(",") if span is None else _numbers(text, span[1], span[2])
    if not any("." in choice or "**" in choice for choice in choices):
        choices = [_OPEN + _OR.join(choices) + _CLOSE]
    for choice in choices:
        yield from _expand(text, before + choice + after)


def _numbers(text: str, start: str, end: str) -> list[str]:
    low, high = sorted((int(start), int(end)))
    if high - low >= _NUMBERS:
        raise _malformed(text, f"a range holds at most {_NUMBERS:,} numbers")
    width = len(start) if start.startswith("0") else 0
    return [str(number).zfill(width) for number in range(low, high + 1)]


def _segment(name: str) -> Segment:
    if "*" not in name and _OPEN not in name:
        return name.translate(_SHOWN)
    return DEEP if name == "**" else Glob(name)


def _check(text: str, spelled: str) -> None:
    """Raise an error with the first reason that fits a place or a path, if any does."""
    for wrong, reason in _REASONS.items():
        found = re.search(wrong, spelled, re.DOTALL)
        if found is not None:
            raise _malformed(text, found.expand(reason).translate(_SHOWN))


def _malformed(text: str, reason: str) -> PlaceError:
    return PlaceError(
        f"The place {text!r} cannot be read:",
        f"{reason}.",
        "A place is path[/operation[#n]][:port][[part]]...; a backslash escapes a character. "
        f"A module has {', '.join(MODULE_PORTS)}; a parameter or buffer {', '.join(TENSOR_PORTS)}.",
    )
