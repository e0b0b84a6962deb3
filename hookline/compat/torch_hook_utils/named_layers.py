"""Layers under given names, and their values.

- `NamedLayers`: layers of any models as one, for the verbs of hookline
- `LayerValues`: values by layer name, the dict that the contexts return
- `Layers`: the type of the layers that the contexts take, (name, layer) pairs or a mapping
- `NoValue`: the error for a name without a value
- `listed(names)`: names for a message
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

from torch import nn

import hookline as hl
from hookline.captures.record import captured
from hookline.engine.context import see_own_calls
from hookline.torch_private import submodules_of

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

__all__ = ["LayerValues", "Layers", "NamedLayers", "NoValue", "listed"]

T = TypeVar("T")
Layer = TypeVar("Layer")
Layers: TypeAlias = Mapping[str, Layer] | Iterable[tuple[str, Layer]]

_IN_RECORD = cast(Any, object())  # stands for a value that the record holds


class NoValue(hl.NotCaptured, KeyError):
    """A value was asked for under a name that has none."""


def listed(names: Iterable[str]) -> str:
    """Return names for a message.

    >>> listed("ab"), listed([])
    ("'a', 'b'", 'none')
    """
    return ", ".join(map(repr, names)) or "none"


class _RecordValues(MutableMapping[str, T]):
    """Values by layer name, read from a record, with all methods of a dict."""

    def __init__(self, layers: Mapping[str, nn.Module], record: hl.Record) -> None:
        super().__init__()
        held = {handler.target.ident: handler.target.place for handler in captured(record)}
        self._idents = {name: id(layer) for name, layer in layers.items() if id(layer) in held}
        self._places = {name: held[ident] for name, ident in self._idents.items()}
        self._record = record
        self._given = list(layers)
        self._seen: dict[str, Any] = {}  # of each layer, the last value that was noticed
        self._values: dict[str, Any] = {}

    def _notice(self, names: Iterable[Any]) -> None:
        """See which layers have run since."""
        held = {handler.target.ident: handler for handler in captured(self._record)}
        for name in names:
            handler = held.get(self._idents.get(name, 0))
            # Each call is kept as a tuple of its own, also if the value is the same.
            last = handler.values[-1][1] if handler and handler.values else None
            if last is not None and last is not self._seen.get(name):
                self._seen[name] = last
                self._values[name] = _IN_RECORD

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise NoValue(
                f"The value of the layer {name!r} was asked for.",
                f"It has not run. There are values of: {listed(self)}."
                if name in self._given
                else f"It is none of the given layers: {listed(self._given)}.",
                "Run the model inside the `with`, with all layers that are wanted given to it.",
            )
        value = self._values[name]
        if value is not _IN_RECORD:
            return value
        try:
            return self._record[self._places[name]]
        except hl.ValueChanged as error:
            remedy = "Read it before that, or use hookline.capture(model, place, detach=True)."
            raise hl.ValueChanged(error.asked, error.found, remedy) from None

    def __setitem__(self, name: str, value: T) -> None:
        self._notice([name])
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        self._notice([name])
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        self._notice([name])
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> dict_keys[str, T]:
        self._notice(self._places)
        ordered = {name: self._values[name] for name in self._given if name in self._values}
        self._values = ordered | self._values
        return self._values.keys()

    def values(self) -> dict_values[str, T]:
        return self.copy().values()

    def items(self) -> dict_items[str, T]:
        return self.copy().items()

    def copy(self) -> dict[str, T]:
        return {name: self[name] for name in self.keys()}

    def clear(self) -> None:
        self.keys()
        self._values.clear()

    def popitem(self) -> tuple[str, T]:
        name = next(reversed(self), "")
        return name, self.pop(name)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {self._shown(name)}' for name in self)}}}"

    def _shown(self, name: str) -> str:
        try:
            return repr(self[name])
        except hl.HooklineError as error:
            return f"<{type(error).__name__}>"


class LayerValues(_RecordValues[T], dict[str, T]):
    """Values by layer name: a dict that fills up as the layers run.

    It is in the order in which the layers were given, and a layer that runs again has its last
    value in it. What is read is what the layer saw: a value that requires grad is the very tensor,
    and reading it raises `hookline.ValueChanged` if it was changed in place since; any other is a
    snapshot. Copies and what comes back from a file are ordinary dicts.
    """

    # A dict for those who ask for one. Its own methods would pass by the record: none is reached.


class _Given:
    """Selects the given layers. As of those that a glob matches, one of them must run, not all."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = frozenset(layers)

    def __call__(self, path: str, module: nn.Module) -> bool:
        return module in self.layers

    def __repr__(self) -> str:
        return "the given layers"


class _LayerContainer(nn.Module):
    """A module with layers as its children, whose names may have dots, which torch forbids."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return the layer of that name."""
        return submodules_of(self).get(target) or self


class NamedLayers:
    """Layers that need not belong to one model, under the names that they were given.

    >>> layers = NamedLayers([("a.b", nn.Identity()), ("c", nn.ReLU())])
    >>> with layers.hook(":input", lambda value, call: print(layers.names[call.module], value)):
    ...     _ = layers.layers["a.b"](5)
    ['a.b'] 5
    """

    def __init__(self, layers: Layers[Any]) -> None:
        self.layers = _checked(layers)
        self.names: dict[nn.Module, list[str]] = {}
        for name, layer in self.layers.items():
            self.names.setdefault(layer, []).append(name)
        self._model = _LayerContainer()
        # The smallest first: a layer inside another one is then found under its own name.
        for layer in sorted(self.names, key=_size):
            submodules_of(self._model)[self.names[layer][0]] = layer
        self._given = _Given(self.names)

    def hook(
        self, port: str, function: Callable[[Any, hl.Call], Any], own: bool = False
    ) -> AbstractContextManager[Any]:
        """Call a function with every value at a port of the layers, as `hookline.hook` does; with
        `own`, in the thread or task that enters it only.
        """
        if not self.layers:
            return nullcontext()
        context = hl.hook(self._model, (self._given, port), function)
        see_own_calls(context, own)
        return context

    @contextmanager
    def capture(self, port: str) -> Generator[LayerValues[Any]]:
        """Keep the last value at a port of each layer, as `hookline.capture` does."""
        if not self.layers:
            yield LayerValues({}, hl.Record(None))
            return
        with hl.capture(self._model, (self._given, port), keep="last") as record:
            yield LayerValues(self.layers, record)


def _size(layer: nn.Module) -> int:
    return sum(1 for _ in layer.modules()) if submodules_of(layer) else 1


def _checked(layers: Any) -> dict[str, nn.Module]:
    """Return the layers by name; raise if they are something else."""
    if isinstance(layers, (Mapping, nn.ModuleDict)):
        layers = cast("Mapping[Any, Any]", layers).items()
    elif isinstance(layers, nn.Module) or not isinstance(layers, Iterable):
        raise hl.PlaceError(
            f"Layers were to be given by name, and a {type(layers).__name__} was.",
            "It has no names.",
            "Give a mapping of names to layers, or pairs, such as model.named_modules().",
        )
    found: dict[str, nn.Module] = {}
    for item in cast("Iterable[Any]", layers):
        pair = cast("tuple[Any, ...]", item) if isinstance(item, (tuple, list)) else (item,)
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], nn.Module):
            raise hl.PlaceError(
                "Layers were to be given by name.",
                f"Among them is {item!r}, which is no name with a module.",
                "Give a mapping of names to layers, or pairs, such as model.named_modules().",
            )
        name, layer = cast("tuple[str, nn.Module]", pair)
        if found.setdefault(name, layer) is not layer:
            raise hl.PlaceError(
                f"Two layers were given under the name {name!r}.",
                "One of them could not be told from the other.",
                "Give each a name of its own.",
            )
    return found
