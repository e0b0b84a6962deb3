"""Register hooks at layers, as TorchTuner does.

- `Hooks(model, layer)`: the four kinds of hooks at a layer, or at several
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any, SupportsIndex, TypeAlias, cast
from urllib.parse import quote

import torch
from torch import nn

from hookline.captures.capturing import capture
from hookline.compat.torch_tuner.handles import FBH, FBPH, FH, FPH, Handle, HookKind
from hookline.compat.torch_tuner.layer_gradients import LayerGradients
from hookline.compat.torch_tuner.saved_values import (
    Value,
    after_first,
    arguments_of,
    plain,
    settled,
)
from hookline.compat.torch_tuner.updates import Noise, Update
from hookline.edits.editing import edit
from hookline.edits.restoring import get_module
from hookline.engine.calls import Call
from hookline.engine.context import Context
from hookline.engine.hooking import hook
from hookline.errors import ChangeError, NotCaptured, PlaceError, PlaceNotFound
from hookline.isolation.isolated_runs import isolated
from hookline.isolation.model_calls import call_model
from hookline.places.grammar import Place
from hookline.places.resolution import Where
from hookline.selecting import select
from hookline.values.nested import Part, leaves

__all__ = ["Hooks"]

Layer: TypeAlias = SupportsIndex | Where


class Hooks:
    """Registers hooks that save the values and gradients of a layer, or change them.

    >>> import contextlib, tempfile
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    ...     with Hooks(model, 0).register_fh(visualize=True):
    ...         _ = model(torch.ones(8, 3))
    ...     sorted(file.name for file in Folder("saved_forward_hook_values").iterdir())
    ['input_0_batch_size_8_layer_0_forward_hook_tensor.pt',
     'output_0_batch_size_8_layer_0_forward_hook_tensor.pt']

    Args:
        model_object: any module.
        layer_index: the layer: its index in `list(model_object.children())`, its name, itself, or
            anything else that `hookline.select` takes; or a list of such. Every method takes
            `layer` as well, which then counts instead.

    **visualize** saves, at each call, what torch gives to such a hook: `input` and `output`
    (`register_fh`), `inputs` (`register_fph`), `grad_input` and `grad_output` (`register_fbh`),
    `grad_output` (`register_fbph`); with an update, what was there before it. The files are in a
    folder of the working directory, named by the value, the iteration (counted for each kind and
    layer), the batch size and the layer; those of an earlier run are overwritten. Read them with
    `torch.load(file, weights_only=True)`. Arguments after the first have files of their own, such
    as `…_tensor_mask.pt`, and so have gradients of parts after the first, such as `…_tensor_1.pt`.
    A nested input or output is one file of tuples, lists and dicts. If several threads run the
    model at the same time, `register_fh` may save the input of another thread's call.

    **update** multiplies a value by the noise, or puts new values in its place, or new values times
    noise; `add_noise_…` and `add_values_…` switch the two on. Both broadcast to the value's shape.
    In a nested value the noise meets every floating-point tensor, and new values are nested
    likewise. New values for a gradient need a layer where it is a single tensor.

    As in torch, whichever is registered first, forward hooks see what pre-hooks of the same
    instance change, and backward hooks what all others change. Register before the forward whose
    backward is meant.
    """

    def __init__(self, model_object: nn.Module, layer_index: Layer | None = None) -> None:
        self.object = model_object
        self.layer_index = layer_index
        self.layers = list(model_object.children())
        self._iterations: dict[tuple[str, str], Iterator[int]] = {}
        self._handles: list[Handle] = []
        self.paused = False  # during a run of our own
        if layer_index is not None:
            self._find(None)  # a layer that is not there is an error now

    # -- shapes ---------------------------------------------------------------------------------

    def get_shape_of_layer(
        self, batch: Any = None, *, layer: Layer | None = None
    ) -> tuple[Any, Any]:
        """Return the shapes of the layer's input and output, without the batch.

        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        >>> Hooks(model, 2).get_shape_of_layer()
        (16, 2)
        >>> Hooks(model, 0).get_shape_of_layer(torch.zeros(8, 1, 4, 4))
        ((1, 4, 4), (4, 2, 2))

        Args:
            batch: what to call the model with, to see the shapes in a run; a tuple or list holds
                arguments, a mapping named ones. Not needed for a layer that has `in_features` and
                `out_features`, which are its shapes. The run computes no gradients and leaves
                buffers and the random numbers as they were.
            layer: the layer, if not that of the instance.

        New values then have the shape `(BATCH_SIZE, features)` or `(BATCH_SIZE, *shape)`: the first
        dimension is taken for the batch. Nested values have nested shapes.
        """
        found = self._find(layer)
        if len(found) > 1:
            raise PlaceError(
                "The shape of a layer was asked for.",
                f"There are {len(found)} layers: {', '.join(map(repr, list(found)[:8]))}.",
                "Name one, as in get_shape_of_layer(layer='fc').",
            )
        (place,) = found
        module: Any = get_module(self.object, place)
        features = [getattr(module, name, None) for name in ("in_features", "out_features")]
        if all(isinstance(number, int) and number > 0 for number in features):  # 0 if it is lazy
            return features[0], features[1]
        if batch is None:
            raise NotCaptured(
                f"The shape of the layer {str(place)!r} was asked for.",
                f"It is a {type(module).__name__}: its shape depends on what it is given.",
                "Give a batch to run the model on: get_shape_of_layer(batch).",
            )
        given, output = self._run(place, batch)
        return plain(given, after_first), plain(output, after_first)

    def _run(self, place: Place, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and outputs of a layer in a run of the model."""
        watched = capture(self.object, (place, ":input"), place, detach=True, stop=True)
        self.paused = True
        try:
            with isolated(self.object), torch.no_grad(), watched as record:
                call_model(self.object, batch)
        finally:
            self.paused = False
        return record[Place(place.path, "input")], record[place]

    # -- the four kinds of hooks ----------------------------------------------------------------

    def register_fh(
        self, update: bool = False, visualize: bool = False,
        add_noise_output: bool = False, add_values_output: bool = False,
        noise_output: Noise = None, new_values_output: Any = None,
        *, layer: Layer | None = None,
    ) -> Handle:  # fmt: skip
        """Register a forward hook: it saves inputs and outputs, and changes the output.

        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> handle = Hooks(model, "0").register_fh(
        ...     update=True, add_values_output=True, new_values_output=torch.ones(4, 2)
        ... )
        >>> model(torch.zeros(4, 3))[0]
        tensor([1., 1.])
        """
        noise = noise_output if add_noise_output else None
        values = new_values_output if add_values_output else None
        return self._register(FH, update, visualize, noise, values, layer)

    def register_fph(
        self, update: bool = False, visualize: bool = False,
        add_noise_input: bool = False, add_values_input: bool = False,
        noise_input: Noise = None, new_values_input: Any = None,
        *, layer: Layer | None = None,
    ) -> Handle:  # fmt: skip
        """Register a forward pre-hook: it saves the inputs, and changes the first one.

        >>> model = nn.Sequential(nn.Identity())
        >>> handle = Hooks(model, 0).register_fph(update=True, add_noise_input=True, noise_input=3)
        >>> model(torch.ones(2))
        tensor([3., 3.])
        """
        noise = noise_input if add_noise_input else None
        values = new_values_input if add_values_input else None
        return self._register(FPH, update, visualize, noise, values, layer)

    def register_fbh(
        self, update: bool = False, visualize: bool = False,
        add_noise_input: bool = False, add_values_input: bool = False,
        noise_input: Noise = None, new_values_input: Any = None,
        *, layer: Layer | None = None,
    ) -> Handle:  # fmt: skip
        """Register a full backward hook: it saves gradients, and changes that of the first input.

        >>> model, x = nn.Sequential(nn.Identity()), torch.ones(2, requires_grad=True)
        >>> handle = Hooks(model, 0).register_fbh(update=True, add_noise_input=True, noise_input=3)
        >>> model(x).sum().backward()
        >>> x.grad
        tensor([3., 3.])
        """
        noise = noise_input if add_noise_input else None
        values = new_values_input if add_values_input else None
        return self._register(FBH, update, visualize, noise, values, layer)

    def register_fbph(
        self, update: bool = False, visualize: bool = False,
        add_noise_output: bool = False, add_values_output: bool = False,
        noise_output: Noise = None, new_values_output: Any = None,
        *, layer: Layer | None = None,
    ) -> Handle:  # fmt: skip
        """Register a full backward pre-hook: it saves the gradient of the output, and changes it.

        >>> model, x = nn.Sequential(nn.ReLU()), torch.ones(2, requires_grad=True)
        >>> values = torch.tensor([5.0, 6.0])
        >>> handle = Hooks(model, 0).register_fbph(
        ...     update=True, add_values_output=True, new_values_output=values
        ... )
        >>> model(x).sum().backward()
        >>> x.grad
        tensor([5., 6.])
        """
        noise = noise_output if add_noise_output else None
        values = new_values_output if add_values_output else None
        return self._register(FBPH, update, visualize, noise, values, layer)

    def _register(
        self, kind: HookKind, update: bool, visualize: bool, noise: Noise, values: Any,
        layer: Layer | None,
    ) -> Handle:  # fmt: skip
        if not (update or visualize):
            raise ChangeError(
                f"{kind.method} was called with neither update nor visualize.",
                "It would do nothing.",
                "Give visualize=True to save the values, update=True to change them, or both.",
            )
        if update and noise is None and values is None:
            word = kind.port.removeprefix(":").removeprefix("grad_")
            raise ChangeError(
                f"{kind.method} was called with update=True.",
                "It was given neither noise nor new values that are switched on.",
                f"Give add_noise_{word}=True with noise_{word}, add_values_{word}=True with "
                f"new_values_{word}, or both.",
            )
        change = Update(self, values, noise)
        layers = self._find(layer)

        def contexts() -> Iterator[Context]:
            for place, label in layers.items():
                if visualize:
                    yield from self._savers(kind, place, label)
                if update:
                    yield edit(self.object, (place, kind.port), change.at(kind))

        handle = Handle(kind)
        handle.attach(contexts())
        self._handles = [other for other in self._handles if other.live]
        if update:
            # Hooks that torch runs later must see what this one changes: they enter after it.
            later = [other for other in self._handles if other.kind.rank > kind.rank]
            for other in later:
                other.remove()
            for other in sorted(later, key=lambda other: other.kind.rank):
                other.attach_again()
        self._handles.append(handle)
        return handle

    # -- layers ---------------------------------------------------------------------------------

    def _find(self, layer: Layer | None) -> dict[Place, str]:
        """Return the layers that are meant, each with its label in the names of files."""
        asked = self.layer_index if layer is None else layer
        if asked is None:
            raise PlaceError(
                "No layer was named.",
                "This instance was made without one.",
                "Give one: Hooks(model, 0), Hooks(model, 'fc'), or layer='fc' when registering.",
            )
        found: dict[Place, str] = {}
        for place, label in self._each(asked):
            found.setdefault(place, label)
        return found

    def _each(self, layer: Any) -> Iterator[tuple[Place, str]]:
        if isinstance(layer, (list, tuple)):
            for item in cast("list[Any]", layer):
                yield from self._each(item)
        elif isinstance(layer, SupportsIndex):
            index, count = layer.__index__(), len(self.layers)
            if not -count <= index < count:
                raise PlaceNotFound(
                    f"Layer {index} was asked for.",
                    f"The model has {count} children, counted from 0.",
                    "Give an index of list(model.children()), or a name; hookline.select(model) "
                    "lists them.",
                )
            yield select(self.object, self.layers[index])[0], str(index)
        else:
            for place in select(self.object, layer):
                if place.port != "output" or place.parts:
                    raise PlaceError(
                        f"{layer!r} was given as a layer.",
                        f"The place {str(place)!r} is that of a value.",
                        "Give the name of a module; the method says which value is meant.",
                    )
                yield place, quote(place.path, safe="")

    # -- saving ---------------------------------------------------------------------------------

    def _savers(self, kind: HookKind, place: Place, label: str) -> Iterator[Context]:
        """Yield the contexts that save the values of a layer."""

        def save(values: list[Value]) -> None:
            if not self.paused:
                self._save(kind, label, values)

        def save_inputs(given: dict[Part, Any], call: Call) -> None:
            if not call.recomputed:
                save(arguments_of("inputs", given, call.module))

        def save_outputs(output: Any, call: Call) -> None:
            if not call.recomputed:
                given = inputs.record[Place(place.path, "inputs")]
                save([*arguments_of("input", given, call.module), ("output", "", output)])

        if kind is FPH:
            yield hook(self.object, (place, ":inputs"), save_inputs)
        elif kind is FH:
            inputs = capture(self.object, (place, ":inputs"), detach=True, keep="last")
            yield inputs
            yield hook(self.object, place, save_outputs)
        else:
            ports = (":grad_output", ":grad_inputs") if kind is FBH else (":grad_output",)
            yield LayerGradients(self.object, [(place, port) for port in ports], save)

    def _save(self, kind: HookKind, label: str, values: list[Value]) -> None:
        """Save the values of one call; the first tensor tells the batch size."""
        iteration = next(self._iterations.setdefault((kind.method, label), itertools.count()))
        tensors = [tensor for _, _, value in values for _, tensor in leaves(value)]
        if not tensors:
            return
        size = tensors[0].shape[0] if tensors[0].ndim else 1
        folder = Folder(kind.folder)
        folder.mkdir(exist_ok=True)
        for word, part, value in values:
            if any(True for _ in leaves(value)):
                name = f"{word}_{iteration}_batch_size_{size}_layer_{label}_{kind.ending}_tensor"
                torch.save(plain(value, settled), folder / f"{name}{part}.pt")
