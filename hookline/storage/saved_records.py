"""Records on disk, as JSON with safetensors beside it.

- `save_record(record, folder)`: write a record
- `load_record(folder)`: read it again, without the model
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from hookline.captures.entries import Entries
from hookline.captures.keeping import PLAIN, CaptureAsk, CaptureHandler
from hookline.captures.record import Record
from hookline.engine.call_choice import as_calls
from hookline.errors import NotCaptured, RecordError
from hookline.places.grammar import PORTS, Place, is_gradient
from hookline.places.resolution import Target
from hookline.storage import json_safetensors
from hookline.storage.store_files import stored_dtype
from hookline.training.run_files import segments_in
from hookline.values.nested import children
from hookline.values.quantisation import is_wrapper
from hookline.values.sharding import local

__all__ = ["load_record", "save_record"]

_KIND = "record"
_NOWHERE = nn.Module()  # stands for every module


def save_record(record: Record, folder: str | Path) -> Path:
    """Write a record into a folder: `record.json` and `record.safetensors`.

    >>> import tempfile, torch, hookline as hl
    >>> model = nn.Sequential(nn.Flatten())
    >>> with hl.capture(model, "0") as record:
    ...     _ = model(torch.ones(2, 3, 1))
    >>> print(load_record(save_record(record, tempfile.mkdtemp())))
    Record of 1 place, 1 value, 24 B
      place  calls  shape   dtype
      0      1      (2, 3)  float32

    Values are written detached, from any device; of a DTensor this rank's part. Tuples, lists and
    dicts stay what they are (keys that are neither strings nor integers become strings); named
    tuples, dataclasses and the like are read again as dicts, and any other object, such as a numpy
    array or a cache of keys and values, as its repr. A value that changed since it was captured is
    refused, as it is on reading, and so is a folder that holds a store or a run.
    """
    if not isinstance(cast(Any, record), Record):
        raise TypeError(
            f"save_record was given a {type(record).__name__}. It writes what a capture has kept. "
            "Give a Record; tensors of your own are written by hookline.Store."
        )
    held = "store" if (Path(folder) / "store.json").is_file() else ""
    held = held or ("run" if segments_in(Path(folder)) else "")
    if held:
        raise RecordError(
            f"A record was to be written to {str(folder)!r}.",
            f"There is a {held} in it, which could not be told from the record.",
            "Give another folder.",
        )
    tensors: dict[str, Tensor] = {}
    places: list[dict[str, Any]] = []
    for place in record.places():
        try:
            calls = list(_write_calls(record, place, tensors))
        except RecursionError:
            raise RecordError(
                f"The value at {str(place)!r} was to be saved.",
                "It is nested too deeply.",
                "Capture a part of it, or what transform= makes of it.",
            ) from None
        numbers = [n for n, _ in record.numbered(place)]
        some = {} if numbers == list(range(len(numbers))) else {"numbers": numbers}
        places.append({**_address(place), **_slicing(record, place), "calls": calls, **some})
    missing = [{**_address(place), "why": why} for place, why in record.unfired().items()]
    return json_safetensors.write(folder, _KIND, {"places": places, "unfired": missing}, tensors)


def load_record(folder: str | Path) -> Record:
    """Read what `save_record` wrote, as a record without a model; nothing in it is executed."""
    content, tensors = json_safetensors.read(folder, _KIND, RecordError)
    try:
        held = [_handler(entry, tensors) for entry in _list(content.get("places"))]
        held += [_handler(entry, tensors) for entry in _list(content.get("unfired"))]
    except RecursionError:
        problem = "it is nested too deeply"
    except _Malformed as error:
        problem = str(error)
    else:
        return Record(None, held)
    raise RecordError(
        f"A record was to be read from {str(folder)!r}.",
        f"record.json is not as a record is written: {problem}.",
        "Give a folder that hookline.save_record wrote.",
    )


class _Malformed(Exception):
    """The content of the file is not what `save_record` writes."""


class _SavedHandler(CaptureHandler):
    """The values that were captured at one place, without the module and its capture."""

    saved_slicing: tuple[str | None, bool] = (None, False)

    @property
    def slicing(self) -> tuple[str | None, bool]:
        return self.saved_slicing

    def entries(self) -> Entries:
        return Entries(self.values)


# -- writing --------------------------------------------------------------------------------------


def _address(place: Place) -> dict[str, Any]:
    address: dict[str, Any] = {"path": place.path, "port": place.port}
    if place.parts:
        address["parts"] = list(place.parts)
    if place.operation is not None:
        address["operation"] = place.operation
    return address


def _slicing(record: Record, place: Place) -> dict[str, Any]:
    at, transformed = record.slicing(place)
    return ({} if at is None else {"at": at}) | ({"transformed": True} if transformed else {})


def _write_calls(record: Record, place: Place, tensors: dict[str, Tensor]) -> Iterator[Any]:
    """Yield the value of each call at a place, or the reason why the call has none."""
    for n, value in record.numbered(place):
        if value is None and not is_gradient(place.port):
            try:
                record[place, n]
            except NotCaptured as error:
                yield {"missing": error.found}
                continue
        yield _write_value(value, tensors, place)


def _write_value(value: Any, tensors: dict[str, Tensor], place: Place) -> Any:
    if isinstance(value, Tensor):
        tensor = local(value.detach())
        if not json_safetensors.is_plain(tensor) or stored_dtype(tensor.dtype) is None:
            layout = "nested" if tensor.is_nested else tensor.layout
            kind = (
                f"{type(tensor).__name__} ({tensor.dtype})" if is_wrapper(tensor) else tensor.dtype
            )
            raise RecordError(
                f"The value at {str(place)!r} was to be saved.",
                f"It holds a {kind} tensor of layout {layout} on {tensor.device}, "
                f"which no record holds.",
                "Capture it with transform=, as a plain tensor.",
            )
        tensors[str(len(tensors))] = tensor
        return {"tensor": str(len(tensors) - 1)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    inside = children(value)
    if inside is None:
        return {"opaque": repr(value)[:200]}
    items = [[part, _write_value(item, tensors, place)] for part, item in inside]
    if type(value) in (tuple, list):
        return {type(value).__name__: [item for _, item in items]}
    named = any(isinstance(part, str) for part, _ in items) or isinstance(value, Mapping)
    return {"dict": items} if named else {"tuple": [item for _, item in items]}


# -- reading --------------------------------------------------------------------------------------


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        _refuse("a list is missing")
    return cast("list[Any]", found)


def _refuse(problem: str) -> NoReturn:
    raise _Malformed(problem)


def _handler(entry: Any, tensors: dict[str, Tensor]) -> CaptureHandler:
    if not isinstance(entry, dict):
        _refuse("an entry is no object")
    entry = cast("dict[str, Any]", entry)
    path, port, operation = entry.get("path"), entry.get("port"), entry.get("operation")
    parts = _list(entry.get("parts", []))
    plain = isinstance(path, str) and isinstance(port, str)
    plain = plain and isinstance(operation, (str, type(None)))
    if not plain or port not in PORTS or any(type(part) not in (int, str) for part in parts):
        _refuse("an entry is no place")
    target = Target(_NOWHERE, cast(str, path), cast(str, port), tuple(parts), None, operation)
    at = entry.get("at")
    if not isinstance(at, (str, type(None))):
        _refuse("a slice is no text")
    calls = _list(entry.get("calls", []))
    numbers = _numbers(entry.get("numbers", list(range(len(calls)))), len(calls))
    meant = as_calls(numbers) if numbers and "numbers" in entry else None
    ask = CaptureAsk(cast(str, port), PLAIN, calls=meant)
    handler = _SavedHandler(target, cast(Any, lambda: None), ask)  # its capture is over
    handler.saved_slicing = (at, bool(entry.get("transformed")))
    if "why" in entry:
        handler.explain(0, str(entry["why"]))
    for n, value in zip(numbers, calls, strict=True):
        why = cast("dict[str, Any]", value).get("missing") if isinstance(value, dict) else None
        if isinstance(why, str):
            handler.explain(n, why)
        absent = isinstance(why, str) or (value is None and is_gradient(port))
        handler.values.append((n, None if absent else (_read(value, tensors), None)))
    return handler


def _numbers(found: Any, count: int) -> list[int]:
    numbers = _list(found)
    plain = all(type(number) is int and number >= 0 for number in numbers)
    if not plain or len(numbers) != count or numbers != sorted(numbers):
        _refuse("the numbers of the calls are none")
    return numbers


def _read(found: Any, tensors: dict[str, Tensor]) -> Any:
    if found is None or isinstance(found, (bool, int, float, str)):
        return found
    content = cast("dict[str, Any]", found if isinstance(found, dict) else {})
    ((kind, inside),) = content.items() if len(content) == 1 else [("", None)]
    if kind == "tensor" and isinstance(inside, str) and inside in tensors:
        return tensors[inside]
    if kind == "float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if kind == "opaque" and isinstance(inside, str):
        return inside
    if kind in ("list", "tuple"):
        items = [_read(item, tensors) for item in _list(inside)]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return dict(_pair(item, tensors) for item in _list(inside))
    _refuse(f"{str(cast(Any, found))[:60]!r} is no value")


def _pair(item: Any, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
    pair = _list(item)
    if len(pair) != 2 or type(pair[0]) not in (int, str):
        _refuse("a dict holds something that is no pair")
    return pair[0], _read(pair[1], tensors)
