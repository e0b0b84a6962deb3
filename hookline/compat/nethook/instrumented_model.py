"""A wrapper that retains and edits layers of a model until it is closed.

- `InstrumentedModel(model)`: retain_layer, edit_layer, and related methods
- `Layer`: the type of layer names; `NothingRetained`: the error for a layer that is not retained
- `fitted(value, x)`: the value of an edit with the dimensions of an output
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from hookline.compat.nethook.module_names import get_module, module_names
from hookline.compat.nethook.optional_arguments import Invocation
from hookline.compat.nethook.retained_values import LastValue, RetainedValues, UnreadWarning
from hookline.compat.nethook.subsequences import subsequence
from hookline.edits.ready_changes import add, blend
from hookline.engine.calls import Call
from hookline.engine.hooking import hook
from hookline.errors import ChangeError, NotCaptured, PlaceError
from hookline.places.grammar import Place
from hookline.values.nested import only_tensor, set_part

__all__ = ["InstrumentedModel", "Layer", "NothingRetained", "fitted"]

Layer: TypeAlias = str | tuple[str, str]  # a name, or a name and an alias
_PART = {"layer", "first_layer", "last_layer"}
_OMITTED: Any = object()  # unlike None, which clears what was set before


class InstrumentedModel(nn.Module):
    """A model with layers that are retained and edited at each run, until it is closed.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with InstrumentedModel(model) as inst:
    ...     inst.retain_layer(("1", "relu"))
    ...     inst.edit_layer("1", ablation=0.5)
    ...     _ = inst(torch.zeros(5, 2))
    ...     inst.retained_layer("relu").shape
    torch.Size([5, 3])

    A layer is a dotted name, or a pair of a name and an alias under which it is known here. What
    is retained is the output before the edits. Of a Sequential a part can be run:
    `inst(x, layer="1")`, `inst(h, first_layer="1")`, `inst(x, last_layer="1")`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._layers: dict[str, _Layer] = {}  # by name
        self._names: dict[str, str] = {}  # by alias
        self._kept: OrderedDict[str, LastValue] = OrderedDict()  # by alias
        self._losses = UnreadWarning()
        # The arguments of the default rule by alias: programs read them, and write to them.
        self._ablation: dict[str, Any] = {}
        self._replacement: dict[str, Any] = {}
        self._offset: dict[str, Any] = {}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, or the part of a Sequential from one layer to another."""
        if isinstance(self.model, nn.Sequential) and kwargs.keys() & _PART:
            return self._part(**kwargs)(*inputs)
        return self.model(*inputs, **kwargs)

    def _part(
        self,
        layer: str | int | None = None,
        first_layer: str | int | None = None,
        last_layer: str | int | None = None,
    ) -> nn.Module:
        first, last, single = (
            None if name is None else str(name) for name in (first_layer, last_layer, layer)
        )
        return subsequence(self.model, first, last, single_layer=single, share_weights=True)

    def layer_names(self) -> list[str]:
        """Return the names of all layers of the model."""
        return module_names(self.model)

    # -- retaining ------------------------------------------------------------------------------

    def retain_layer(self, layername: Layer, detach: bool = True) -> None:
        """Retain the output of a layer at each run; see `retain_layers`."""
        self.retain_layers([layername], detach=detach)

    def retain_layers(self, layernames: Iterable[Layer], detach: bool = True) -> None:
        """Retain the outputs of layers at each run, before edits; all of them, or none.

        Args:
            layernames: names, or pairs of a name and an alias.
            detach: keep snapshots; otherwise tensors that require grad are kept attached.
        """
        pairs = [_pair(layer) for layer in layernames]
        self._hook(pairs)
        for name, alias in pairs:
            if alias not in self._kept:
                kept = self._kept[alias] = LastValue(self._losses)
                self._layers[name].retained[alias] = (kept, detach)

    def stop_retaining_layers(self, layernames: Iterable[Layer]) -> None:
        """Retain these layers no longer, and forget their values."""
        pairs = [_pair(layer) for layer in layernames]
        for name, alias in pairs:
            get_module(self.model, self._names.get(alias, name))  # an error if there is none
        for _, alias in pairs:
            if self._kept.pop(alias, None) is not None:
                del self._layers[self._names[alias]].retained[alias]
            self._release(alias)

    def retained_layer(self, aka: str | None = None, clear: bool = False) -> Any:
        """Return the output of a layer in the last run; None if it did not run since it was
        cleared.

        Args:
            aka: the alias or name of the layer; the first one that is retained, if left out.
            clear: forget the value.
        """
        if aka is None:
            aka = next(iter(self._kept), None)
        if aka is None or aka not in self._kept:
            held = ", ".join(map(repr, self._kept)) or "none"
            raise NothingRetained(
                f"The retained layer {aka!r} was asked for." if aka else "A layer was asked for.",
                f"Retained are: {held}.",
                "Call retain_layer(name) before the run; close() forgets all.",
            )
        value = self._retained[aka]
        if clear:
            self._retained[aka] = None
        return value

    @property
    def _retained(self) -> RetainedValues:
        """The retained values as a dict, by alias or name, which programs read and clear."""
        return RetainedValues(self._kept)

    def retained_features(self, clear: bool = False) -> OrderedDict[str, Any]:
        """Return the outputs of all retained layers in the last run, by alias or name."""
        return OrderedDict((aka, self.retained_layer(aka, clear)) for aka in self._kept)

    # -- editing --------------------------------------------------------------------------------

    def edit_layer(
        self,
        layername: Layer,
        *form: Any,
        rule: Callable[..., Any] | None = None,
        ablation: Any = _OMITTED,
        replacement: Any = _OMITTED,
        offset: Any = _OMITTED,
        **kwargs: Any,
    ) -> None:
        """Change the output of a layer at each run: `x * (1 - a) + r * a + o`, or by a rule.

        >>> inst = InstrumentedModel(nn.Sequential(nn.Identity()))
        >>> inst.edit_layer("0", ablation=[0.0, 0.5], replacement=10.0)
        >>> inst(torch.ones(1, 2))
        tensor([[1.0000, 5.5000]])
        >>> inst.close()

        Args:
            layername: a name, or a pair of a name and an alias.
            form: by position, the rule; or ablation, replacement and offset, in this order.
            rule: a function of the output, the InstrumentedModel, and by name of `name` and all
                other arguments given here, as far as it takes them; what it returns stands in
                the output's place.
            ablation: how much of the replacement is mixed in, from 0 to 1; with None, nothing.
            replacement: what is mixed in: zeros, if left out. Given without an ablation, it
                replaces the output altogether.
            offset: what is added.
            kwargs: arguments of the rule.

        Numbers, lists, arrays and tensors are taken; one with fewer dimensions than the output
        lies along its dimensions from the second on, such as one number a channel. Further calls
        for the same layer add to the arguments, and set the rule anew; an argument given as None
        clears what was set before.
        """
        named = {"ablation": ablation, "replacement": replacement, "offset": offset}
        rule, given = _arguments(layername, form, rule, named)
        name, alias = _pair(layername)
        if rule is None and (kwargs or not (given or self._mixed(alias))):
            raise ChangeError(
                f"The layer {layername!r} was to be edited, without a rule.",
                f"{', '.join(kwargs) or 'No argument'} was given.",
                "Give an ablation, a replacement, an offset, or a rule that takes other arguments.",
            )
        if rule is None and given.get("replacement") is not None:
            before = given.get("ablation", self._ablation.get(alias))
            given["ablation"] = 1.0 if before is None else before
        invocation = None if rule is None else Invocation(rule)
        self._hook([(name, alias)])
        edits = self._layers[name].edits
        edits[alias] = (invocation, {**edits.get(alias, (None, {}))[1], **kwargs})
        for key, value in given.items():
            self._tables()[key][alias] = value

    def add_hooks(self, layernames: Iterable[Layer]) -> None:
        """Add hooks at layers; methods that retain and edit layers do so themselves."""
        self._hook([_pair(layer) for layer in layernames])

    def edit_layers(self, layernames: Iterable[Layer]) -> None:
        """Edit layers by the values in `ablation` and `replacement` under their names.

        >>> inst = InstrumentedModel(nn.Sequential(nn.Identity()))
        >>> inst.edit_layers(["0"])
        >>> inst.ablation["0"] = 0.5
        >>> inst(torch.ones(2))
        tensor([0.5000, 0.5000])
        >>> inst.close()
        """
        pairs = [_pair(layer) for layer in layernames]
        self._hook(pairs)
        for pair in pairs:
            self.edit_layer(pair, ablation=None, replacement=None)

    def clear_edit(self) -> None:
        """Clear the ablation and the replacement of every layer."""
        for table in (self._ablation, self._replacement):
            table.update(dict.fromkeys(table))

    @property
    def ablation(self) -> dict[str, Any]:
        """The replaced share of each edited layer, by alias or name; it can be written to."""
        return self._ablation

    @property
    def replacement(self) -> dict[str, Any]:
        """The replacement of each edited layer, by alias or name; it can be written to."""
        return self._replacement

    def _tables(self) -> dict[str, dict[str, Any]]:
        return {
            "ablation": self._ablation, "replacement": self._replacement, "offset": self._offset
        }  # fmt: skip

    def _mixed(self, alias: str) -> dict[str, Any]:
        """Return the given arguments of the default rule for a layer."""
        return {key: table[alias] for key, table in self._tables().items() if alias in table}

    def remove_edits(
        self,
        layername: Layer | None = None,
        remove_offset: bool = True,
        remove_replacement: bool = True,
    ) -> None:
        """Stop editing a layer, or all; or remove only its offset or replacement."""
        gone = {"offset": remove_offset, "ablation": remove_replacement}
        gone["replacement"] = remove_replacement
        tables = self._tables()
        known = dict.fromkeys([*self._names, *(alias for t in tables.values() for alias in t)])
        for alias in list(known) if layername is None else [_pair(layername)[1]]:
            edits = self._layers[self._names[alias]].edits if alias in self._names else {}
            rule, _ = edits.get(alias, (None, {}))
            if rule is not None and not all(gone.values()):
                continue  # a rule and its arguments stay or go together
            for key, table in tables.items():
                if gone[key]:
                    table.pop(alias, None)
            if all(value is None for value in self._mixed(alias).values()):
                edits.pop(alias, None)
                self._release(alias)

    # -- hooks ----------------------------------------------------------------------------------

    def _hook(self, pairs: list[tuple[str, str]]) -> None:
        """Add hooks at layers: all of them, or none."""
        names = dict(self._names)
        for name, alias in pairs:
            if names.setdefault(alias, name) != name:
                raise PlaceError(
                    f"The layer {name!r} was to be known as {alias!r}.",
                    f"That is the layer {names[alias]!r} already.",
                    "Choose another alias.",
                )
        made: dict[str, _Layer] = {}
        try:
            for name, _ in pairs:
                if name not in self._layers and name not in made:
                    get_module(self.model, name)  # raises if there is none, or a parameter
                    made[name] = _Layer(self, name)
        except BaseException:
            for layer in made.values():
                layer.context.remove()
            raise
        self._layers |= made
        self._names = names

    def _release(self, alias: str) -> None:
        """Remove a hook that neither a value nor an edit needs."""
        if alias not in self._names:
            return
        name = self._names[alias]
        layer = self._layers[name]
        if not layer.retained and not layer.edits:
            self._layers.pop(name).context.remove()
            self._names = {other: n for other, n in self._names.items() if n != name}
        elif alias not in layer.retained and alias not in layer.edits:
            del self._names[alias]

    def close(self) -> None:
        """Remove all hooks and retained values. May be called twice."""
        for layer in self._layers.values():
            layer.context.remove()
        self._layers, self._names = {}, {}
        self._kept.clear()
        for table in self._tables().values():
            table.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # The hooks are on the modules of this one: what comes back from a file begins without.
        tables: dict[str, Any] = {f"_{key}": {} for key in self._tables()}
        hooks: dict[str, Any] = {"_layers": {}, "_names": {}, "_kept": OrderedDict()}
        return {**self.__dict__, **hooks, **tables, "_losses": UnreadWarning()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model; the copy retains the same layers and is edited in the same way."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        other._hook([(name, alias) for alias, name in self._names.items()])
        for name, layer in self._layers.items():
            other._layers[name].edits.update(layer.edits)
        for alias, old in self._kept.items():
            kept = other._kept[alias] = old.copied(other._losses)
            detach = self._layers[self._names[alias]].retained[alias][1]
            other._layers[self._names[alias]].retained[alias] = (kept, detach)
        for key, table in self._tables().items():
            other._tables()[key].update(table)
        return other


class NothingRetained(NotCaptured, KeyError):
    """A layer was asked for that is not retained."""


def _arguments(
    layername: Layer, form: tuple[Any, ...], rule: Any, named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the rule of an edit, and the values to mix, given by position or by name."""
    given = {key: value for key, value in named.items() if value is not _OMITTED}
    if len(form) == 1 and rule is None and (form[0] is None or callable(form[0])):
        return form[0], given
    placed = dict(zip(named, form, strict=False))
    twice = [key for key in named if key in placed and key in given]
    if twice or len(placed) < len(form) or (form and (rule is not None or callable(form[0]))):
        raise ChangeError(
            f"The layer {layername!r} was to be edited.",
            f"{len(form)} arguments came by position{', and again ' if twice else ''}"
            f"{', '.join(twice)}.",
            "Give a rule by position, or ablation, replacement and offset; all else by name.",
        )
    return rule, given | placed


def _pair(layer: Layer) -> tuple[str, str]:
    """Return a layer's name and its alias."""
    return (layer[0], layer[1]) if isinstance(layer, (tuple, list)) else (layer, layer)


_Retained: TypeAlias = dict[str, tuple[LastValue, bool]]  # by alias; and whether to detach
_Edits: TypeAlias = dict[str, tuple[Invocation | None, dict[str, Any]]]  # by alias


class _Layer:
    """The state of one layer: values are retained first, then edited."""

    def __init__(self, owner: InstrumentedModel, name: str) -> None:
        self.retained: _Retained = {}
        self.edits: _Edits = {}
        self.context = hook(
            owner.model, Place(name), _LayerFunction(owner, self.retained, self.edits)
        )
        self.context.__enter__()


class _LayerFunction:
    """The function at a layer. It holds its owner weakly, so that the owner can be collected."""

    def __init__(self, owner: InstrumentedModel, retained: _Retained, edits: _Edits) -> None:
        self.owner = weakref.ref(owner)
        self.retained = retained
        self.edits = edits

    def __call__(self, value: Any, call: Call) -> Any:
        owner = self.owner()
        if owner is None:
            return None
        for kept, detach in () if call.recomputed else list(self.retained.values()):
            kept.keep(value, detach=detach)
        for alias in dict.fromkeys([*self.edits, *self.retained]):
            rule, own = self.edits.get(alias, (None, {}))
            arguments = owner._mixed(alias)
            if rule is not None:
                new = rule(value, owner, **{"name": alias, **arguments, **own})
                value = value if new is None else new
                continue
            if arguments.get("ablation") is None:
                arguments.pop("replacement", None)
            if any(given is not None for given in arguments.values()):
                value = _mix(value, call, arguments)
        return value


def _mix(x: Any, call: Call, arguments: dict[str, Any]) -> Any:
    """Apply the default rule: `x * (1 - a) + r * a + o`."""
    ablation, replacement, offset = map(arguments.get, ("ablation", "replacement", "offset"))
    path, tensor = only_tensor(x, lambda: f"The value at {str(call.place)!r}")
    changed = tensor
    if ablation is not None or replacement is not None:
        amount = fitted(1.0 if ablation is None else ablation, tensor)
        mixed = blend(fitted(0.0 if replacement is None else replacement, tensor), amount)
        changed = mixed.apply_checked(changed, call)
    if offset is not None:
        changed = add(fitted(offset, tensor)).apply_checked(changed, call)
    return set_part(x, path, changed)


def fitted(value: Any, x: Tensor) -> Tensor:
    """Return a number, list, array or tensor with the dtype, device and dimensions of an output."""
    own = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if own.ndim < x.ndim:
        own = own.reshape(1, *own.shape, *[1] * (x.ndim - own.ndim - 1))
    return own
