"""Draw tiny pictures of tensors for notebooks, as PNG files, without other libraries.

- `thumbnail(tensor)`: a tensor of any shape as a small picture, in an `<img>` that holds its data
- `bars(counts)`: a histogram as a small picture
- `extent(tensor)`: the least and the greatest value, in words
- `png(pixels, palette)`: the bytes of a PNG
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hookline.values.quantisation import dequantised
from hookline.values.sharding import local
from hookline.view.tensor_summaries import spread

__all__ = ["bars", "extent", "png", "thumbnail"]

_HIGH, _WIDE = 24, 72  # pixels
_SHADES = 32
_NAN, _ABOVE, _BELOW, _NOTHING = _SHADES, _SHADES + 1, _SHADES + 2, _SHADES + 3
_LOOKED_AT = 1 << 18  # numbers

Colour = tuple[int, int, int]
# Ends and middles of two scales that the colour-blind can read: dark to bright, blue to red.
_ONE_WAY = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_TWO_WAYS = ((33, 102, 172), (146, 197, 222), (238, 238, 238), (244, 165, 130), (178, 24, 43))
_MARKS = ((153, 153, 153), (230, 0, 126), (0, 213, 255), (0, 0, 0))  # NaN, +Inf, −Inf, nothing


def _palette(stops: Sequence[Colour]) -> bytes:
    """Return the shades between some colours, and the marks."""
    parts: list[int] = []
    for n in range(_SHADES):
        at = n / (_SHADES - 1) * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        ends = zip(stops[low], stops[low + 1], strict=True)
        parts += [round(a + (b - a) * (at - low)) for a, b in ends]
    return bytes([*parts, *(part for mark in _MARKS for part in mark)])


def png(pixels: Tensor, palette: bytes) -> bytes:
    """Return the bytes of a PNG: height × width numbers of colours; the last one is transparent.

    >>> png(torch.zeros(1, 1, dtype=torch.uint8), bytes(3))[1:4]
    b'PNG'
    """
    height, width = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = cast("list[list[int]]", pixels.to("cpu", torch.uint8).tolist())
    lines = b"".join(b"\0" + bytes(row) for row in rows)
    clear = b"\xff" * (len(palette) // 3 - 1) + b"\0"
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits, by palette
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            chunk(b"PLTE", palette),
            chunk(b"tRNS", clear),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        )
    )


# -- of tensors -----------------------------------------------------------------------------------


def _dense(tensor: Tensor) -> Tensor | None:
    """Return a tensor whose numbers can be read; None if there is none."""
    tensor = local(tensor.detach())
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    tensor = dequantised(tensor)
    return tensor.abs() if tensor.is_complex() else tensor


def _pick(matrix: Tensor, height: int, width: int) -> Tensor:
    """Return evenly spaced rows and columns, as float64 on the CPU."""
    rows, columns = spread(matrix.shape[-2], height), spread(matrix.shape[-1], width)
    return matrix[..., rows, :][..., columns].to("cpu", torch.float64)


def _plane(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return the matrix to draw of a tensor, and the columns between some images or heads."""
    if tensor.ndim < 2:
        return _pick(tensor.reshape(1, -1), 1, _WIDE).expand(6, -1), []
    while tensor.ndim > 4:
        tensor = tensor[0]
    if tensor.ndim < 4:  # the first sample of positions × channels, or the first channel
        return _pick(tensor[0] if tensor.ndim == 3 else tensor, _HIGH, _WIDE), []
    some = tensor[0][spread(tensor.shape[1], 3)]
    pieces = _pick(some, _HIGH, _WIDE // max(1, len(some)) - 1)
    gap = torch.full((pieces.shape[1], 1), math.nan, dtype=torch.float64, device="cpu")
    joined = [part for piece in pieces for part in (piece, gap)]
    gaps = [(n + 1) * (pieces.shape[2] + 1) - 1 for n in range(len(pieces) - 1)]
    return torch.cat(joined[:-1], 1), gaps


def thumbnail(tensor: Tensor) -> str:
    """Return a tensor as a small picture in HTML; "" if there is nothing to see.

    >>> thumbnail(torch.eye(3))[:31]
    '<img src="data:image/png;base64'

    It shows the first sample, of its channels or heads the first, the middle and the last, and
    evenly spaced numbers. Blue is below zero and red above it; without negative numbers, dark is
    the least. NaN is grey, infinities are magenta and cyan.
    """
    dense = _dense(tensor)
    if dense is None or dense.numel() < 2:
        return ""
    plane, gaps = _plane(dense)
    finite = plane[plane.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    two = low < 0
    if two:
        high = max(-low, high)
        low = -high
    share = (plane - low) / (high - low) if high > low else torch.zeros_like(plane)
    pixels = (share.nan_to_num(0, 1, 0).clamp(0, 1) * (_SHADES - 1)).round()
    pixels = pixels.where(~plane.isnan(), float(_NAN)).where(~plane.isposinf(), float(_ABOVE))
    pixels = pixels.where(~plane.isneginf(), float(_BELOW))
    pixels[:, gaps] = _NOTHING
    return _image(
        pixels, _TWO_WAYS if two else _ONE_WAY, f"{tuple(tensor.shape)}: {extent(tensor)}"
    )


def bars(counts: Tensor) -> str:
    """Return a histogram as a small picture in HTML."""
    heights = counts.to(torch.float64)
    if heights.ndim != 1 or not heights.numel() or not float(heights.max()):
        return ""
    heights = heights[spread(len(heights), _WIDE)]
    levels = (heights / heights.max() * _HIGH).ceil()
    up = torch.arange(_HIGH, 0, -1, dtype=torch.float64, device="cpu")[:, None]
    pixels = torch.where(levels >= up, 14.0, float(_NOTHING))  # a blue that both themes show
    return _image(pixels, _ONE_WAY, f"histogram of {int(counts.sum()):,} values")


def _image(pixels: Tensor, stops: Sequence[Colour], words: str) -> str:
    data = base64.b64encode(png(pixels, _palette(stops))).decode()
    height, width = pixels.shape
    scale = max(1, min(_HIGH // height, _WIDE // width))
    size = f'width="{width * scale}" height="{height * scale}"'
    text = html.escape(words)
    return f'<img src="data:image/png;base64,{data}" {size} alt="{text}" title="{text}">'


def extent(tensor: Tensor) -> str:
    """Return the least and the greatest value in words, and the numbers of NaN and infinities.

    >>> extent(torch.tensor([1.0, 2.5, torch.nan]))
    '1 … 2.5, 1 NaN'
    """
    dense: Any = _dense(tensor)
    if dense is None or not dense.numel():
        return ""
    about = ""
    if dense.numel() > _LOOKED_AT:
        # An odd stride meets all channels, whose numbers are mostly even.
        dense, about = dense.reshape(-1)[:: dense.numel() // _LOOKED_AT | 1], "≈ "
    numbers = dense.to("cpu", torch.float64)
    finite = numbers[numbers.isfinite()]
    words = "nothing finite"
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        words = f"{low:.3g}" if low == high else f"{low:.3g} … {high:.3g}"
    odd = [(numbers.isnan(), "NaN"), (numbers.isinf(), "Inf")]
    return about + ", ".join([words, *(f"{int(n.sum())} {w}" for n, w in odd if n.any())])
