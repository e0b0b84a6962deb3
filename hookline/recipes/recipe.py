"""Recipes: changes bound to places, which can be saved, shared and put on any model.

- `Recipe`: a list of edits; `.on(model)` applies them, `.save(folder)` and `Recipe.load(folder)`
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from operator import index
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, cast

from torch import Tensor, nn

from hookline.edits.changes import Chain, Change, replace
from hookline.edits.editing import as_change, edit
from hookline.engine.call_choice import Which, as_calls
from hookline.engine.lifecycle import Entering, enter, leave
from hookline.errors import HooklineError, RecipeError
from hookline.places.resolution import Where
from hookline.recipes.json_format import RecipeReader, RecipeWriter
from hookline.storage import json_safetensors
from hookline.values.tables import as_html, as_text, describe

__all__ = ["Recipe"]

_COLUMNS = ("where", "change", "at", "calls")
_Changing = Change | Tensor | Callable[..., Any]


@dataclass(frozen=True, eq=False)
class _Entry:
    """One edit of a recipe: where, what, and on which slice and calls."""

    where: Any
    change: Any
    at: Any = None
    calls: Any = None

    def row(self) -> tuple[str, str, str, str]:
        at, calls = ("" if v is None else _show(v) for v in (self.at, self.calls))
        return _show(self.where), _show(self.change), at, calls

    def as_texts(self) -> dict[str, str | None]:
        """Return the cells by name, None for an empty one; a place that is text as it is."""
        row: dict[str, Any] = dict(zip(_COLUMNS, self.row(), strict=True))
        own = {"where": str(self.where)} if isinstance(self.where, str) else {}
        return {name: text or None for name, text in row.items()} | own

    def __str__(self) -> str:
        return f"{_show(self.where)} ← {_show(self.change)}"


class Recipe:
    """A list of changes bound to places, which can be saved, joined and put on any model.

    >>> import torch
    >>> from hookline import add, scale
    >>> recipe = Recipe([("0", scale(2.0)), ("1", add(torch.ones(2)))])
    >>> recipe
    Recipe of 2 edits
      where  change                 at  calls
      '0'    scale(factor=2.0)
      '1'    add(values=(2,) float32)
    >>> with recipe.on(nn.Sequential(nn.Identity(), nn.ReLU())) as applied:
    ...     applied.model(torch.ones(1, 2))
    tensor([[3., 3.]])

    Args:
        entries: pairs of a place, or anything that `select` takes, and a change: a ready one, a
            tensor (meaning `replace`) or a function; or a dict of these, as in `edit`. They apply
            in this order.
        at, calls: as in `edit`, for all entries. Join recipes with `+` to give several.

    A recipe can be saved if its changes are ready ones, but not `patch`, or functions that can be
    imported, and its places are text, module types, regular expressions, pairs with a port, or
    lists of them. Any other recipe works as well; saving it raises an error with the reason.
    """

    def __init__(
        self,
        entries: Iterable[tuple[Where, _Changing]] | Mapping[Any, _Changing] = (),
        *,
        at: Any = None,
        calls: Which | None = None,
    ) -> None:
        self._entries: tuple[_Entry, ...] = ()
        # It may be an iterator, or a tensor of one number.
        if isinstance(calls, Iterable) and not isinstance(calls, str):
            single = getattr(calls, "shape", None) == ()
            calls = index(cast("Any", calls)) if single else list(calls)
        if isinstance(entries, Mapping):
            entries = cast("Mapping[Any, Any]", entries).items()
        for number, pair in enumerate(cast("Iterable[Any]", entries), 1):
            if not isinstance(pair, (tuple, list)) or len(cast("Any", pair)) != 2:
                raise RecipeError(
                    f"{_show(pair)} was given as entry {number} of a recipe.",
                    "An entry is a pair of a place and a change.",
                    "Write Recipe([('fc', hookline.scale(2.0))]); at= and calls= stand behind.",
                )
            where, change = cast("tuple[Any, Any]", pair)
            as_change(change)  # complains about what is none
            change = replace(change) if isinstance(change, Tensor) else change
            self._entries += (_Entry(_settled(where), change, at, calls),)
        if calls is not None:
            as_calls(calls)

    def on(self, model: nn.Module) -> Applied:
        """Put the recipe on a model: it acts inside `with`, or from `.attach()` to `.remove()`.

        If it does not fit, the error says which entry does not and why; nothing is changed then.
        """
        return Applied(model, self._entries)

    def save(self, folder: str | Path) -> Path:
        """Write `recipe.json` and `recipe.safetensors` into a folder, which is made if need be.

        Tensors are written detached, from any device. If a part cannot be saved, this raises an
        error with the reason before anything is written.
        """
        writer = RecipeWriter()
        entries = []
        for number, entry in enumerate(self._entries, 1):
            writer.subject = f"Entry {number} of the recipe, {entry}, was to be saved."
            entries.append(
                {
                    "where": writer.where(entry.where),
                    "change": writer.change(entry.change),
                    "at": writer.index(entry.at),
                    "calls": writer.calls(entry.calls),
                }
            )
        return json_safetensors.write(folder, "recipe", {"entries": entries}, writer.tensors)

    @classmethod
    def load(cls, folder: str | Path, *, allow_functions: bool = False) -> Recipe:
        """Read what `save` wrote. Nothing is imported, and nothing of the file's is run.

        Args:
            folder: where it was saved.
            allow_functions: import the functions and module types that the recipe names, which
                runs the code of their modules, and take its regular expressions, which can be made
                to search without end: only for recipes that you trust.
        """
        content, tensors = json_safetensors.read(folder, "recipe", RecipeError)
        reader = RecipeReader(
            tensors, allow_functions, f"A recipe was to be read from {str(folder)!r}."
        )
        recipe = cls()
        for number, entry in enumerate(reader.list_of(content.get("entries"), "entries"), 1):
            reader.within = f"entry {number}"
            entry = reader.dict_of(entry, {"where", "change", "at", "calls"})
            try:
                recipe += cls(
                    [(reader.where(entry["where"]), reader.change(entry["change"]))],
                    at=reader.index(entry["at"]),
                    calls=reader.calls(entry["calls"]),
                )
            except RecursionError:
                reader.refuse("it is nested too deeply.")
            except RecipeError:
                raise
            except (HooklineError, TypeError, ValueError, RuntimeError, OverflowError) as error:
                reader.refuse(str(error))
        return recipe

    def __add__(self, other: Recipe) -> Recipe:
        if not isinstance(other, Recipe):
            return NotImplemented
        joined = Recipe()
        joined._entries = (*self._entries, *other._entries)
        return joined

    def __radd__(self, other: Any) -> Recipe:
        return Recipe() + self if other == 0 else NotImplemented  # `sum` begins with 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(entry.where, entry.change) for entry in self._entries])

    def __repr__(self) -> str:
        return as_text(*self._table()) if self._entries else self._table()[0]

    def _repr_html_(self) -> str:
        return as_html(*self._table(), self) if self._entries else html.escape(self._table()[0])

    def describe_entries(self) -> list[dict[str, str | None]]:
        """Return where, change, at and calls of each entry as text, for programs."""
        return [entry.as_texts() for entry in self._entries]

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        count = len(self._entries)
        title = f"Recipe of {count} edit{'s' * (count != 1)}"
        return title, [_COLUMNS, *(e.row() for e in self._entries)]


def _settled(where: Any) -> Any:
    """Return a place that can be iterated over again, and that nobody changes later."""
    if hasattr(where, "__next__") or isinstance(where, list):
        return [_settled(item) for item in cast("Iterable[Any]", where)]
    return where


def _show(value: Any) -> str:
    """Return a change, a place or an index as short text; tensors by their shape."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, nn.Module):
        return f"the given {type(value).__name__}"
    if isinstance(value, Chain):
        return " | ".join(map(_show, value.changes))
    if isinstance(value, Change) and is_dataclass(value):
        given = [(f, getattr(value, f.name)) for f in fields(value)]
        shown = [f"{f.name}={_show(v)}" for f, v in given if v is not f.default]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, (list, tuple)):
        ends = "[]" if isinstance(value, list) else "()"
        return ends[0] + ", ".join(map(_show, cast("list[Any]", value))) + ends[1]
    if isinstance(value, slice):
        own = cast("Any", value)
        steps: list[Any] = [own.start, own.stop, *([] if own.step is None else [own.step])]
        return ":".join("" if step is None else str(step) for step in steps)
    if value is Ellipsis:
        return "..."
    if callable(value) or isinstance(value, type):
        # Torch's own functions are methods of a class that nobody knows.
        name = "__name__" if isinstance(value, BuiltinFunctionType) else "__qualname__"
        value = getattr(value, name, None) or repr(value)
        return value if len(value) <= 60 else value[:59] + "…"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


# -- on a model -----------------------------------------------------------------------------------


class _EntryEdit(edit):
    """The edit of one entry; its errors tell which entry it is."""

    _verb = "recipe"
    owner: Any = None  # the model keeps this alive, and this the whole

    def __init__(self, model: Any, entry: _Entry, note: str) -> None:
        self._note = note
        super().__init__(model, entry.where, entry.change, at=entry.at, calls=entry.calls)

    def _verify(self) -> None:
        try:
            super()._verify()
        except HooklineError as error:
            error.add_note(self._note)
            raise


class Applied(Entering):
    """A recipe that was put on a model with `Recipe.on`."""

    _verb = "recipe"

    def __init__(self, model: nn.Module, entries: tuple[_Entry, ...]) -> None:
        self._edits: list[_EntryEdit] = []
        super().__init__(model)
        self._entries, self._wheres = entries, tuple(entry.where for entry in entries)

    @property
    def model(self) -> Any:
        """The model that the recipe is on."""
        return self._model

    def _start(self, attached: bool) -> None:
        self._edits = []
        for number, entry in enumerate(self._entries, 1):
            which = f"entry {number} of {len(self._entries)} of the recipe, {entry}"
            part = _EntryEdit(self._model, entry, f"hookline: in {which}")
            part.owner = self if attached else None
            try:
                enter(part, attached)
            except HooklineError as error:
                kind = type(self._model).__name__
                raise RecipeError(
                    f"A recipe was put on a {kind}, and {which}, does not fit.",
                    f"{error.asked} {error.found}".strip(),
                    error.remedy,
                ) from error
            self._edits.append(part)

    def _stop(self) -> None:
        for part in reversed(self._edits):
            leave(part)

    def _verify(self) -> None:
        for part in self._edits:
            part._verify()

    def remove(self) -> None:
        """Stop acting and leave nothing behind. Never raises, and may be called twice."""
        for part in reversed(self._edits):
            part.remove()
        super().remove()
