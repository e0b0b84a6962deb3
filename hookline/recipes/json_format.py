"""Write places, changes and slices as JSON, and read them back.

- `RecipeWriter`: writes them; what cannot be written is refused with the reason
- `RecipeReader`: reads them back, and trusts nothing that it reads

Plain JSON values stay as they are. Everything else is an object with one key that names its kind:
`{"tensor": "0"}`, `{"type": "torch.nn.modules.linear:Linear"}`, `{"slice": [null, 3, null]}`.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import index
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn

from hookline.edits.changes import Chain, Change, replace
from hookline.edits.ready_changes import (
    add,
    blend,
    clamp,
    dropout,
    noise,
    patch,
    remove_direction,
    scale,
    zero,
)
from hookline.edits.ready_slices import heads, last_token
from hookline.errors import RecipeError
from hookline.storage.json_safetensors import NumberedTensors, is_plain, name_kind

__all__ = ["RecipeReader", "RecipeWriter"]

_READY: dict[str, Any] = {
    change.__name__: change
    for change in (add, blend, clamp, dropout, noise, remove_direction, replace, scale, zero)
}
_TAKES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,), "float": (float, int, complex, bool), "int": (int,), "bool": (bool,),
    "None": (type(None),),
}  # fmt: skip

_FLAGS = int(re.A | re.I | re.M | re.S | re.U | re.X)  # not those that print, or depend on a place


def _takes(kind: str, value: Any) -> bool:
    """Return True if a field of a change with this annotation takes a value."""
    if isinstance(value, bool) and "bool" not in kind and "Tensor" not in kind:
        return False
    return isinstance(value, tuple(t for word in kind.split(" | ") for t in _TAKES[word]))


class RecipeWriter(NumberedTensors):
    """Writes the parts of a recipe as JSON; `tensors` collects the tensors in them."""

    subject = "It was to be saved."

    def _refuse(self, found: str, remedy: str) -> NoReturn:
        raise RecipeError(self.subject, found, remedy)

    def tensor(self, tensor: Tensor) -> dict[str, Any]:
        """Write a tensor as its number."""
        if not is_plain(tensor):
            self._refuse(f"It holds a {name_kind(tensor)}.", "Give a plain dense tensor.")
        content: dict[str, Any] = {"tensor": self.number_of(tensor)}
        return content | {"complex": 1} if tensor.is_complex() else content

    def number(self, value: Any) -> Any:
        """Write a number, None or a tensor."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, complex):
            return {"complex": [self.number(value.real), self.number(value.imag)]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(value)}
        return value

    def where(self, where: Any) -> Any:
        """Write a place, or what stands for places."""
        if isinstance(where, str):
            return str(where)
        if isinstance(where, re.Pattern):
            pattern = cast("re.Pattern[Any]", where)
            if not isinstance(pattern.pattern, str):
                found = "The place is a regular expression of bytes."
                self._refuse(found, "Give one of text, without the b.")
            return {"pattern": pattern.pattern, "flags": pattern.flags}
        if isinstance(where, type):
            return {"type": self._path(where, "The type")}
        if isinstance(where, (list, tuple)):
            items = [self.where(item) for item in cast("list[Any]", where)]
            return items if isinstance(where, list) else {"tuple": items}
        if isinstance(where, nn.Module):
            found = f"The place is a module object, a {type(where).__name__} of one model."
            self._refuse(found, "Name it; hookline.select(model, module) gives its place.")
        found = f"The place is a {type(where).__name__}, whose code cannot be saved."
        return self._refuse(found, "Give a string, a module type, a re.Pattern, or a list of them.")

    def change(self, change: Any) -> Any:
        """Write a ready change, a chain of them, or a function by its import path."""
        kind = cast("type[Any]", type(change))
        if kind is Chain:
            return {"chain": [self.change(part) for part in change.changes]}
        if kind in _READY.values():
            content: dict[str, Any] = {"change": kind.__name__}
            for field in fields(change):
                value = getattr(change, field.name)
                if not _takes(str(field.type), value):
                    found = f"{field.name} of {kind.__name__} is a {type(value).__name__}."
                    self._refuse(found, f"Give a {field.type}.")
                content[field.name] = self.number(value)
            return content
        if kind is patch:
            remedy = "Take the tensor that you want, record[place], and save replace(tensor)."
            self._refuse("It holds a record, which belongs to one run.", remedy)
        if isinstance(change, Change):
            found = f"{kind.__name__} is no ready change, so that loading could not make it again."
            self._refuse(found, "Compose it of the ready changes, or write it as a function.")
        return {"function": self._path(change, "The function")}

    def _path(self, thing: Any, what: str) -> str:
        """Return the import path of a function or type, `pkg.module:name`, if it is found there."""
        name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
        shown = name or f"of type {type(thing).__name__}"
        remedy = "Move it to the top of a module that can be imported, or use ready changes."
        if not isinstance(name, str):
            self._refuse(f"{what} is an object {shown}: it has no name to import.", remedy)
        if "<" in name:
            shown = "a lambda" if name.endswith("<lambda>") else f"{name}, made inside a function"
            self._refuse(f"{what} is {shown}: it cannot be imported.", remedy)
        says = getattr(thing, "__module__", None) or "torch"
        # Torch's own functions do not all say where they are.
        for home, own in ((says, name), ("torch", getattr(thing, "__name__", name))):
            if home != "__main__" and _lookup(sys.modules.get(home), own) is thing:
                return f"{home}:{own}"
        if says == "__main__":
            found = f"{what} {shown} is in __main__, a script or notebook: it cannot be imported."
            self._refuse(found, remedy)
        return self._refuse(f"{what} {shown} is not found where it says that it is.", remedy)

    def index(self, at: Any) -> Any:
        """Write an argument for `at=`: an index, heads or last_token."""
        if at is None or isinstance(at, bool):
            return at
        if isinstance(at, Tensor):
            return self.tensor(at)
        if at is Ellipsis:
            return {"ellipsis": True}
        if isinstance(at, slice):
            own = cast("Any", at)
            steps = (own.start, own.stop, own.step)
            return {"slice": [None if step is None else index(step) for step in steps]}
        if isinstance(at, heads):
            return {"heads": [index(head) for head in at.which], "of": index(at.of)}
        if isinstance(at, last_token):
            return {"last_token": self.tensor(at.mask)}
        if isinstance(at, (list, tuple)):
            items = [self.index(item) for item in cast("list[Any]", at)]
            return items if isinstance(at, list) else {"tuple": items}
        if hasattr(at, "__array__") and getattr(at, "ndim", 0):  # a numpy array
            return self.tensor(torch.as_tensor(at))
        if isinstance(at, SupportsIndex):
            return index(at)
        found = f"Its at= is a {type(at).__name__}."
        return self._refuse(
            found, "Give an index such as np.s_[:, -1], heads(...) or last_token(...)."
        )

    def calls(self, calls: Any) -> Any:
        """Write an argument for `calls=`: a number, a slice, several numbers, or a name."""
        if isinstance(calls, str):
            return calls
        if calls is None or isinstance(calls, (slice, SupportsIndex)):
            return self.index(calls)
        return sorted(map(index, cast("Iterable[Any]", calls)))


def _lookup(owner: Any, name: str) -> Any:
    """Find a dotted name in a module, without calling anything."""
    for part in name.split("."):
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner


class RecipeReader:
    """Reads what a RecipeWriter wrote; `within` says for the errors where it is."""

    def __init__(self, tensors: dict[str, Tensor], allow_functions: bool, subject: str) -> None:
        self.tensors, self.allow_functions, self.subject = tensors, allow_functions, subject
        self.within = "the file"

    def refuse(self, found: str, remedy: str = "Save the recipe again.") -> NoReturn:
        """Raise an error that says where something is wrong."""
        raise RecipeError(self.subject, f"In {self.within}: {found}", remedy)

    def list_of(self, value: Any, what: str) -> list[Any]:
        """Return a list, or raise an error."""
        if not isinstance(value, list):
            self.refuse(f"{what} is no list.")
        return cast("list[Any]", value)

    def dict_of(self, value: Any, keys: set[str]) -> dict[str, Any]:
        """Return an object with these keys, or raise an error."""
        if not isinstance(value, dict) or set(cast("dict[str, Any]", value)) != keys:
            self.refuse(f"{_short(value)} does not have just {', '.join(sorted(keys))}.")
        return cast("dict[str, Any]", value)

    def _tagged(self, value: Any, known: dict[str, Callable[[dict[str, Any]], Any]]) -> Any:
        if isinstance(value, dict):
            for tag, read in known.items():
                if tag in value:
                    return read(cast("dict[str, Any]", value))
        return self.refuse(f"{_short(value)} is nothing that is known.")

    def _tensor(self, value: dict[str, Any]) -> Tensor:
        self.dict_of(value, {"tensor", "complex"} if "complex" in value else {"tensor"})
        name = value["tensor"]
        if not isinstance(name, str) or name not in self.tensors:
            self.refuse(f"there is no tensor {_short(name)}.")
        found = self.tensors[name]
        if "complex" not in value:
            return found
        if not found.is_floating_point() or not found.ndim or found.shape[-1] != 2:
            self.refuse(f"the tensor {name} is not complex.")
        return torch.view_as_complex(found)

    def number(self, value: Any) -> Any:
        """Read a number, None or a tensor."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        return self._tagged(
            value, {"tensor": self._tensor, "complex": self._complex, "float": self._float}
        )

    def _float(self, value: dict[str, Any]) -> float:
        if self.dict_of(value, {"float"})["float"] not in ("inf", "-inf", "nan"):
            self.refuse(f"{_short(value)} is no number.")
        return float(value["float"])

    def _complex(self, value: dict[str, Any]) -> complex:
        pair = self.list_of(self.dict_of(value, {"complex"})["complex"], "a complex number")
        parts = [self.number(part) for part in pair]
        if len(parts) != 2 or not all(isinstance(part, (int, float)) for part in parts):
            self.refuse(f"{_short(value)} is no complex number.")
        return complex(*parts)

    def where(self, value: Any) -> Any:
        """Read a place, or what stands for places."""
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return [self.where(item) for item in cast("list[Any]", value)]
        return self._tagged(
            value, {"pattern": self._pattern, "type": self._type, "tuple": self._places}
        )

    def _places(self, value: dict[str, Any]) -> tuple[Any, ...]:
        items = self.list_of(self.dict_of(value, {"tuple"})["tuple"], "a tuple")
        return tuple([self.where(item) for item in items])

    def _pattern(self, value: dict[str, Any]) -> re.Pattern[str]:
        self.dict_of(value, {"pattern", "flags"})
        text, flags = value["pattern"], value["flags"]
        if not isinstance(text, str) or type(flags) is not int or flags & ~_FLAGS:
            self.refuse(f"{_short(value)} is no regular expression.")
        if not self.allow_functions:
            self.refuse(
                f"it holds the regular expression {_short(text)}, and those were not allowed: one "
                "can be made to search without end.",
                "If you trust it, load it with Recipe.load(folder, allow_functions=True).",
            )
        try:
            return re.compile(text, flags)
        except (re.error, ValueError, OverflowError) as error:
            self.refuse(f"{_short(text)} is no regular expression: {error}.")

    def _type(self, value: dict[str, Any]) -> type[nn.Module]:
        path = self.dict_of(value, {"type"})["type"]
        found = self._import(path, "module type", self.allow_functions)
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            self.refuse(f"{_short(path)} is no type of modules.")
        return found

    def _import(self, path: Any, what: str, allowed: bool) -> Any:
        """Return the object at an import path; import its module only if that is allowed."""
        home, colon, name = path.partition(":") if isinstance(path, str) else ("", "", "")
        if not colon or not all(word.isidentifier() for word in f"{home}.{name}".split(".")):
            self.refuse(f"{_short(path)} is no import path such as 'package.module:name'.")
        if allowed:
            try:
                importlib.import_module(home)
            except ImportError as error:
                self.refuse(f"{path!r} cannot be imported: {error}.", f"Install or write {home}.")
        elif home not in sys.modules:
            self.refuse(
                f"it names the {what} {path!r}, whose module is not imported.",
                f"Import {home} first, or load it with allow_functions=True if you trust it.",
            )
        found = _lookup(sys.modules.get(home), name)
        if found is None:
            self.refuse(f"there is no {name} in {home}.", "Use the version that it was saved with.")
        return found

    def change(self, value: Any) -> Any:
        """Read a ready change, a chain of them, or a function if those are allowed."""
        return self._tagged(
            value, {"change": self._ready, "chain": self._chain, "function": self._function}
        )

    def _chain(self, value: dict[str, Any]) -> Chain:
        parts = self.list_of(self.dict_of(value, {"chain"})["chain"], "a chain")
        made = tuple([self.change(part) for part in parts])
        if not made or not all(isinstance(part, Change) for part in made):
            self.refuse("a chain has ready changes only.")
        return Chain(made)

    def _ready(self, value: dict[str, Any]) -> Change:
        kind = _READY.get(value["change"]) if isinstance(value["change"], str) else None
        if kind is None:
            self.refuse(f"{_short(value['change'])} is no ready change.")
        kinds = {field.name: str(field.type) for field in fields(kind)}
        self.dict_of(value, {"change", *kinds})
        given = {name: self.number(value[name]) for name in kinds}
        for name, own in given.items():
            if not _takes(kinds[name], own):
                self.refuse(f"{name} of {value['change']} is {_short(own)}, not {kinds[name]}.")
        return kind(**given)

    def _function(self, value: dict[str, Any]) -> Any:
        path = self.dict_of(value, {"function"})["function"]
        if not self.allow_functions:
            self.refuse(
                f"it names the function {_short(path)}, and functions were not allowed.",
                "If you trust it, load it with Recipe.load(folder, allow_functions=True).",
            )
        found = self._import(path, "function", allowed=True)
        if not callable(found) or isinstance(found, type):
            self.refuse(f"{_short(path)} is no function.")
        return found

    def index(self, value: Any) -> Any:
        """Read an argument for `at=`."""
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, list):
            return [self.index(item) for item in cast("list[Any]", value)]
        return self._tagged(
            value,
            {
                "tensor": self._tensor,
                "slice": self._slice,
                "ellipsis": lambda value: ...,
                "heads": self._heads,
                "last_token": self._last_token,
                "tuple": lambda value: tuple(
                    [self.index(item) for item in self.list_of(value["tuple"], "a tuple")]
                ),
            },
        )

    def _slice(self, value: dict[str, Any]) -> slice:
        steps = self.list_of(self.dict_of(value, {"slice"})["slice"], "a slice")
        if len(steps) != 3 or not all(step is None or type(step) is int for step in steps):
            self.refuse(f"{_short(value)} is no slice.")
        return slice(*steps)

    def _heads(self, value: dict[str, Any]) -> heads:
        which = self.list_of(self.dict_of(value, {"heads", "of"})["heads"], "heads")
        if not all(type(number) is int for number in (*which, value["of"])):
            self.refuse(f"{_short(value)} are no heads.")
        return heads(*which, of=value["of"])

    def _last_token(self, value: dict[str, Any]) -> last_token:
        mask = self.index(self.dict_of(value, {"last_token"})["last_token"])
        if not isinstance(mask, Tensor):
            self.refuse("the mask of last_token is no tensor.")
        return last_token(mask)

    def calls(self, value: Any) -> Any:
        """Read an argument for `calls=`."""
        if value is None or type(value) is int or isinstance(value, (str, list)):
            return cast("Any", value)  # looked at by Recipe itself
        return self._tagged(value, {"slice": self._slice})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
