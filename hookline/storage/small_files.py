"""The small files of a store: JSON that is bounded and distrusted, and replaced whole.

- `as_json(content, what)`: the content as it is read back, checked before it is written
- `read_json(path)`, `write_json(path, content, sync)`: the object in a JSON file
- `parse_json(text, path)`: the object in a text that was read from a file
- `strict_json(text)`: what a text holds that every reader of JSON reads alike
- `is_deep(content)`: whether JSON is nested more deeply than hookline writes or reads it
- `replace_file(path, text, sync)`: a reader, or a crash, finds the old file or the new one
- `open_regular(path)`: open a file, and nothing that would wait for ever
- `most_files()`: how many files a writer may keep open, and half of what a reader may
- `sync_file(path)`, `sync_folder(folder)`: make what is in a file last, and the names in a folder
- `corrupt(path, found)`: the error for a file that is not what a writer of ours left there
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from hookline.errors import StoreError

try:
    import resource
except ImportError:  # Windows
    resource = None

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
    "sync_folder",
    "write_json",
]

DEEPEST = 1000  # levels of JSON; Python's own limit differs between versions and can be set
_LARGEST_JSON = 16 << 20


def corrupt(path: Path, found: str) -> StoreError:
    """The error for a file that is not what a writer of ours left there."""
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
    """Read JSON; ValueError where readers differ: NaN, infinities, keys that stand there twice.

    >>> strict_json('{"a": [1, null]}')
    {'a': [1, None]}

    Raises:
        ValueError: If the text is no such JSON, is no UTF-8, or is nested too deeply.
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
    """The content as it is read back; an error if it is no JSON, which none could read."""
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
    """The object in a text that was read from a file."""
    # The blanks that fill a header take json, and `strip`, longer than all the rest.
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
    """Open a file, and nothing that would wait for ever, as a pipe does."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    return path.open("rb")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size."""
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
    """Replace a file as a whole: a reader, or a crash, finds the old one or the new one."""
    if len(text) > _LARGEST_JSON:
        raise StoreError(
            f"Cannot write {str(path)!r}.",
            f"It would be larger than {_LARGEST_JSON >> 20} MB, which no reader takes.",
            "Keep metadata and marks small, places few and shards large.",
        )
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def most_files() -> int:
    """How many files a writer may keep open, and half of what a reader may: a quarter of all."""
    limit = 512 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(limit // 4, 1) if limit > 0 else 1 << 16  # no limit is a negative one


def sync_file(path: Path) -> None:
    """Make what is in a file last."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last, where the system can."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
