"""Identify a model, function or batch by a few characters.

- `fingerprint(model)`: a few characters for its modules, parameters and buffers
- `stable_text(thing)`: an index, a function or None as text that is the same in another process
- `bound_content(function)`: the arguments of a partial, the weights of a module
- `live_edits(model)`: the edits that act on a model
- `digest(value)`: a number for the tensors, numbers and words in a batch
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from datetime import date, time, timedelta
from functools import partial
from types import CodeType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hookline.edits.editing import EditFunction, edit, handlers_of
from hookline.edits.ready_slices import heads
from hookline.engine.attaching import attached
from hookline.engine.offloading import data_of
from hookline.places.tree import walk
from hookline.recipes.json_format import RecipeWriter
from hookline.torch_private import packed_parameters_of
from hookline.values.nested import children
from hookline.values.quantisation import held_in, is_wrapper

__all__ = ["bound_content", "digest", "fingerprint", "live_edits", "stable_text"]

_SPELLED = (
    str, bytes, bytearray, bool, int, float, complex, range, slice, date, time, timedelta,
)  # fmt: skip
_HELD = 256  # objects in a batch that are looked into
_SAMPLED = 2048  # words of 8 bytes that are looked at one by one; of the others the sum


def fingerprint(model: nn.Module) -> str:
    """Return a few characters that change with any module, shape or weight of a model.

    >>> torch.nn.init.ones_((model := nn.Linear(2, 1)).weight), torch.nn.init.ones_(model.bias)
    (Parameter...
    >>> before = fingerprint(model)
    >>> with torch.no_grad():
    ...     _ = model.weight[0, 1].add_(1e-6)
    >>> fingerprint(model) == before
    False
    """
    seen = hashlib.sha256()
    for name, module in walk(model):
        seen.update(f"{name}\0{type(module).__qualname__}\0".encode())
        packed = packed_parameters_of(module)  # the weights of torch's quantized layers
        if hasattr(packed, "unpack"):
            seen.update(f"{digest(packed.unpack())}".encode())
        seen.update(_adapters(module).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):  # it has no shape yet
            seen.update(name.encode())
            continue
        shape = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        seen.update(shape.encode() + _content(data_of(model, tensor, name)))
    return seen.hexdigest()[:16]


def _adapters(module: nn.Module) -> str:
    """Return which adapters of PEFT a layer uses, and how; empty for any other layer."""
    names = "disable_adapters", "active_adapters", "merged_adapters", "scaling"
    if not all(hasattr(module, name) for name in names[:2]):
        return ""
    return str([getattr(module, name, None) for name in names])


def _content(tensor: Tensor) -> bytes:
    """Return the sum of all bits as 8-byte words in any order, a sample of them, and the rest."""
    if is_wrapper(tensor):
        held = held_in(tensor)
        return type(tensor).__qualname__.encode() + b"".join(_content(inner) for inner in held)
    tensor = tensor.detach()
    if tensor.is_meta or tensor.layout != torch.strided or type(tensor).__name__ == "DTensor":
        return b""
    plain = tensor.data.resolve_conj().contiguous().reshape(-1)
    if plain.is_quantized:
        plain = plain.dequantize()
    if not plain.numel():
        return b""
    bits = plain.view(torch.uint8)
    if bits.storage_offset() % 8:  # torch views as words only what begins where a word may
        bits = bits.clone()
    end = bits.numel() // 8 * 8
    words = bits[:end].view(torch.int64)  # several times as fast to add as any smaller ones
    total = int(words.sum())
    sample = words[:: max(1, words.numel() // _SAMPLED)].cpu().numpy().tobytes()
    rest = bits[end:].cpu().numpy().tobytes()
    return total.to_bytes(8, "little", signed=True) + sample + rest


def stable_text(thing: Any) -> str | None:
    """Return an index, a function or None as text that is the same in another process.

    >>> stable_text(np.s_[:, -1]), stable_text(torch.nn.functional.gelu)
    ("{'tuple': [{'slice': [None, None, None]}, -1]}", 'gelu')
    >>> stable_text(lambda x: x[:, 0]) == stable_text(lambda x: x[:, 1])
    False
    """
    if thing is None or isinstance(thing, str):
        return thing
    if callable(thing) and not isinstance(thing, heads):
        named = getattr(thing, "__qualname__", None) or type(cast("Any", thing)).__qualname__
        code = getattr(thing, "__code__", None)
        return f"{named} {_code(code):08x}" if isinstance(code, CodeType) else named
    writer = RecipeWriter()
    text = str(writer.index(thing))
    return text + "".join(f" {digest(tensor):08x}" for tensor in writer.tensors.values())


def bound_content(function: Any) -> str | None:
    """Return what a function holds beside its code: arguments of a partial, weights of a module.

    >>> bound_content(partial(torch.add, other=1)) == bound_content(partial(torch.add, other=2))
    False
    """
    if isinstance(function, nn.Module):
        return fingerprint(function)
    if not isinstance(function, partial):
        return None
    given = [*enumerate(function.args), *sorted(function.keywords.items())]
    parts = [function.func, *(value for _, value in given if callable(value))]
    content = " ".join(f"{stable_text(part)} {bound_content(part)}" for part in parts)
    return f"{content} {digest(given):08x}"


def live_edits(model: nn.Module) -> list[str]:
    """List the edits that act on a model now: their places and changes.

    >>> from hookline import scale
    >>> handle = edit(model := nn.Sequential(nn.ReLU()), "0", scale(2.0)).attach()
    >>> live_edits(model)
    ["'0' scale ..."]
    """
    found: list[str] = []
    for one in (one for one in attached(model) if isinstance(one, edit)):
        for handler in handlers_of(one):
            calls = handler.ask.calls
            how = digest((stable_text(handler.at), calls.shown if calls else ""))
            change = handler.change
            what = type(change).__name__
            if isinstance(change, EditFunction):
                what = f"{stable_text(change.function)} {bound_content(change.function)}"
            found.append(f"{str(handler.place)!r} {what} {digest(change, how):08x}")
    return found


def _code(code: CodeType) -> int:
    """Return a digest of a function's code: its steps, and the numbers and names in them."""
    plain = [_ordered(c) for c in code.co_consts if not isinstance(c, CodeType)]
    seen = zlib.crc32(code.co_code + repr((plain, code.co_names)).encode())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            seen = zlib.crc32(_code(inner).to_bytes(4, "little"), seen)
    return seen


def _ordered(constant: Any) -> Any:
    """Return a set in a fixed order: that of words differs from process to process."""
    sets = isinstance(constant, frozenset)
    return sorted(map(repr, cast("frozenset[Any]", constant))) if sets else constant


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Return an array as a tensor, or as its bytes if torch has no such dtype or byte order."""
    array = np.ascontiguousarray(array)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return str(array.dtype), array.shape, array.tobytes()


def _is_array(value: Any) -> bool:
    """Return True if numpy can read a value, such as an image of Pillow."""
    return hasattr(value, "__array_interface__") or hasattr(value, "__array__")


def _arrays_in(thing: Any, met: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in the attributes of an object, and in the objects there."""
    inside: Any = children(thing)
    if inside is None:
        inside = [*getattr(thing, "__dict__", {}).items()]
    if not inside or id(thing) in met or len(met) == _HELD or isinstance(thing, nn.Module):
        return
    met[id(thing)] = thing
    for part, item in inside:
        if isinstance(item, (Tensor, np.ndarray)):
            yield part, item
        else:
            yield from ((f"{part}.{name}", array) for name, array in _arrays_in(item, met))


def digest(value: Any, seen: int = 0) -> int:
    """Return a digest of the tensors, arrays, numbers and words in a structure; large ones are
    sampled.

    >>> digest({"x": torch.zeros(3)}) == digest({"x": torch.zeros(3)})
    True
    >>> digest([torch.tensor([1, 2])]) == digest([torch.tensor([2, 1])])
    False
    """
    value = _reduced(value)
    if isinstance(value, Tensor):
        return zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode() + _content(value), seen)
    if value is None or isinstance(value, _SPELLED):
        return zlib.crc32(repr(cast("Any", value)).encode(), seen)
    inside = children(value)
    if inside is None:  # an object of another library
        inside = _arrays_in(value, {})
    for part, item in inside:
        seen = digest(item, zlib.crc32(str(part).encode(), seen))
    return seen


def _reduced(value: Any) -> Any:
    """Return a value as dense tensors, numbers, strings or a structure of them, if possible."""
    if not isinstance(value, (Tensor, np.ndarray, np.generic)) and _is_array(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        if array.dtype.kind in "biufc":
            value = _plain(array) if array.size else array.shape
        else:
            value = array.tolist()
    elif isinstance(value, np.generic):
        value = cast("np.generic[Any]", value).item()
    if isinstance(value, Tensor) and value.is_nested:
        return value.unbind()
    if isinstance(value, Tensor) and "sparse" in str(value.layout):
        whole = value.detach().to_sparse().coalesce()
        return tuple(value.shape), whole.indices(), whole.values()
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, (set, frozenset)):
        return _ordered(frozenset(cast("set[Any]", value)))
    return value
