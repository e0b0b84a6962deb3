"""The content of a page: a description, and arrays in chunks that are read when they are shown.

- `Page`: the description of a page, and functions that make its chunks
- `Chunk`: a small description and arrays; `pack`, `unpack`: as bytes, and back
- `plain_json(content)`: JSON that every reader accepts

A chunk is a JSON header of known length and the bytes of arrays behind it. The page in the browser
asks for a chunk by its id. An HTML file embeds all chunks; a server makes them on demand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chunk", "Page", "pack", "plain_json", "unpack"]

_KINDS = {"f2": np.float16, "f4": np.float32, "f8": np.float64, "u1": np.uint8, "u4": np.uint32}
_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}


@dataclass
class Chunk:
    """A small description and named arrays, shown together."""

    meta: Any
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


@dataclass
class Page:
    """A page before it becomes HTML: its description, and the chunks that it reads on demand.

    `content` is plain JSON (title, facts, modules, entries, findings, …); `chunks` has a function
    for each chunk id in it.
    """

    content: dict[str, Any]
    chunks: dict[str, Callable[[], Chunk]] = field(default_factory=dict[str, Callable[[], Chunk]])


def pack(chunk: Chunk) -> bytes:
    """Return a chunk as bytes: the length of the header, the header, then the aligned arrays.

    >>> found = unpack(pack(Chunk({"shape": [2]}, {"a": np.array([1, 2], np.float32)})))
    >>> found.meta, found.arrays["a"]
    ({'shape': [2]}, array([1., 2.], dtype=float32))
    """
    table: dict[str, list[Any]] = {}
    bodies: list[bytes] = []
    offset = 0
    for name, array in chunk.arrays.items():
        body = np.ascontiguousarray(array).tobytes()
        table[name] = [_NAMES[array.dtype], offset, [*array.shape]]
        bodies.append(body + b"\0" * (-len(body) % 8))
        offset += len(bodies[-1])
    header = plain_json({"meta": chunk.meta, "arrays": table}).encode()
    header += b" " * (-(len(header) + 8) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(bodies)


def unpack(content: bytes) -> Chunk:
    """Return the chunk in the bytes of `pack`."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    arrays: dict[str, NDArray[Any]] = {}
    for name, (kind, offset, shape) in header["arrays"].items():
        count = math.prod(shape)
        flat = np.frombuffer(content, _KINDS[kind], count, start + offset)
        arrays[name] = flat.reshape(shape)
    return Chunk(header["meta"], arrays)


def plain_json(content: Any) -> str:
    """Return JSON that every reader accepts: numbers that are not finite become null."""
    return json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if np.isfinite(content) else None
    if isinstance(content, dict):
        named = cast("dict[Any, Any]", content)
        return {str(key): _finite(value) for key, value in named.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(item) for item in cast("list[Any]", content)]
    return content
