"""The small files of a store: JSON of bounded size, checked when read, replaced as a whole.

- `as_json(content, what)`: check content before it is written
- `read_json(path)`, `write_json(path, content, sync)`: the object in a JSON file
- `parse_json(text, path)`: the object in a text that was read from a file
- `strict_json(text)`: read JSON, and refuse what readers of JSON read differently
- `is_deep(content)`: return True if JSON is nested more deeply than hookline writes or reads
- `replace_file(path, text, sync)`: replace a file as a whole
- `open_regular(path)`: open a regular file for reading
- `most_files()`: how many files a writer keeps open; a reader keeps twice as many
- `sync_file(path)`: force what is in a file onto the disk
- `corrupt(path, found)`: the error for a file that hookline has not written
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from hookline import operating_system
from hookline.errors import StoreError

__all__ = [
    "DEEPEST",
    "as_json",
    "corrupt",
    "is_deep",
    "most_files",
    "open_regular",
    "parse_json",
    "read_json",
    "replace_file",
    "strict_json",
    "sync_file",
    "write_json",
]

DEEPEST = 1000  # levels of JSON; Python's own limit differs between versions and can be set
_LARGEST_JSON = 16 << 20


def corrupt(path: Path, found: str) -> StoreError:
    """Return the error for a file that hookline has not written, or that was changed since."""
    return StoreError(
        f"Cannot read {str(path)!r} as a part of a store.",
        f"{found[:300]}.",
        "The file was truncated, changed, or comes from elsewhere: restore it from a copy.",
    )


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands there twice")
    return content


def strict_json(text: str | bytes) -> Any:
    """Read JSON, without what readers of JSON read differently: NaN, infinities, repeated keys.

    >>> strict_json('{"a": [1, null]}')
    {'a': [1, None]}

    Raises:
        ValueError: If the text is no such JSON, is not UTF-8, or is nested too deeply.
    """
    try:
        content = json.loads(text, parse_constant=_not_json, object_pairs_hook=_once)
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply, or too large") from None
    if is_deep(content):
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return content


def is_deep(content: Any) -> bool:
    """Return True if JSON is nested more than `DEEPEST` levels deep."""
    inside: list[Any] = [[content]]
    for _ in range(DEEPEST + 1):
        level: list[Any] = [x for items in inside for x in items if isinstance(x, (dict, list))]
        if not level:
            return False
        inside = [node.values() if isinstance(node, dict) else node for node in level]
    return True


def as_json(content: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the content as it will be read back; raise StoreError if it is not JSON."""
    try:
        text = json.dumps(dict(content), allow_nan=False)
        return strict_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"Cannot keep {what} of a store.",
            f"It is no JSON ({error}).",
            "Use dicts with string keys, lists, strings, numbers, booleans and None.",
        ) from error


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Return the object in a text that was read from a file."""
    # json and `strip` spend more time on the blanks that fill a header than on the rest.
    end = text.rfind(b"}") + 1
    if text[end:] == b" " * (len(text) - end):
        text = text[:end]
    try:
        content = strict_json(text.decode("utf-8"))
    except ValueError as error:
        raise corrupt(path, f"It holds no sound JSON ({error})") from error
    if not isinstance(content, dict):
        raise corrupt(path, "Its JSON is not an object")
    return cast("dict[str, Any]", content)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe, which would wait for ever, raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return operating_system.open_to_read(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of bounded size."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(min(size, _LARGEST_JSON) + 1)
    except OSError as error:
        raise corrupt(path, f"It cannot be opened ({error})") from error
    if len(text) > _LARGEST_JSON:
        raise corrupt(path, f"It is larger than {_LARGEST_JSON >> 20} MB")
    return parse_json(text, path)


def write_json(path: Path, content: object, sync: bool) -> None:
    """Replace a JSON file as a whole."""
    replace_file(path, json.dumps(content, allow_nan=False).encode() + b"\n", sync)


def replace_file(path: Path, text: bytes, sync: bool) -> None:
    """Replace a file as a whole: readers, also after a crash, find the old file or the new one."""
    if len(text) > _LARGEST_JSON:
        raise StoreError(
            f"Cannot write {str(path)!r}.",
            f"It would be larger than {_LARGEST_JSON >> 20} MB, which no reader takes.",
            "Keep metadata and marks small, places few and shards large.",
        )
    # A name of its own: other threads, and processes of other machines, write the same file.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(text)
            if sync:
                file.flush()
                operating_system.sync(file.fileno())
        operating_system.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        operating_system.sync_folder(path.parent)


def most_files() -> int:
    """Return how many files a writer keeps open: a quarter of the limit, readers half of it."""
    limit = operating_system.most_open_files()
    return 1 << 16 if limit is None else max(limit // 4, 1)


def sync_file(path: Path) -> None:
    """Force what is in a file onto the disk."""
    with path.open("r+b") as file:
        operating_system.sync(file.fileno())
