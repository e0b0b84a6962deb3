"""Pass indices from the max-pooling layers of an encoder to the unpooling layers of a decoder.

- `save_maxpool_indices`: the indices of the maxima of every pool, in a dict by name
- `use_indices_in_maxunpool`: give them to unpooling layers
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

import hookline as hl
from hookline.compat.torch_hook_utils.named_layers import Layers, NamedLayers, NoValue, listed
from hookline.compat.torch_hook_utils.types import named_modules_of_type

__all__ = ["save_maxpool_indices", "use_indices_in_maxunpool"]

_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_UNPOOLS = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)


@contextmanager
def save_maxpool_indices(
    module_or_modules: nn.Module | Layers[nn.Module],
) -> Generator[dict[str, Tensor]]:
    """Save the indices of the maxima of every max-pooling layer, while a `with` block runs.

    >>> import torch
    >>> encoder = nn.Sequential(nn.MaxPool1d(2))
    >>> with save_maxpool_indices(encoder) as indices:
    ...     encoder(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[2., 4.]])
    >>> indices
    {'0': tensor([[1, 2]])}

    Args:
        module_or_modules: a module, with its layers of the types `MaxPool` and `AdaptiveMaxPool`
            (if it has none, nothing happens), or a mapping of names to layers, or pairs.

    Gives a dict of index tensors by name. The layers return what they always do: those that return
    their indices, those too, all others none. Their `return_indices` is set while the block runs
    and put back, so other hooks that were there before see pairs. A layer that runs again is an
    error, as the dict has place for one: a `with` for each run, and a layer for each use. (Or take
    the indices out of the dict in between.)
    """
    layers = _found(module_or_modules, _POOLS)
    for name, layer in layers.layers.items():
        if not hasattr(layer, "return_indices"):
            raise hl.NotHookable(
                f"The indices of the layer {name!r} were to be saved.",
                f"It is a {type(layer).__name__}, which has none.",
                "Give max-pooling layers only, or a module that holds them.",
            )
    silent: list[Any] = [layer for layer in layers.names if not layer.return_indices]

    def guard(value: Any, call: hl.Call) -> None:
        for name in () if call.recomputed else layers.names[call.module]:
            if name in indices:
                raise hl.SeveralCalls(
                    f"The indices of the layer {name!r} were to be saved.",
                    "It runs a second time, and those of the first are not taken yet.",
                    "Run the model once in each `with`, and give each use a layer of its own.",
                )

    def strip(value: Any, call: hl.Call) -> Any:
        # A call that began before the flag was set returns no pair.
        if call.module in silent and isinstance(value, tuple):
            return cast("tuple[Any, ...]", value)[0]
        return None

    with (
        layers.capture(":output[1]") as indices,
        layers.hook(":input", guard, own=True),
        layers.hook(":output", strip),
    ):
        try:
            for layer in silent:
                layer.return_indices = True
            yield indices
        finally:
            for layer in silent:
                layer.return_indices = False


@contextmanager
def use_indices_in_maxunpool(
    module_or_modules: nn.Module | Layers[nn.Module],
    maxpool_indices: dict[str, Tensor] | Iterable[Tensor],
    consume_indices: bool = False,
) -> Generator[None]:
    """Give indices to unpooling layers that are called without, while a `with` block runs.

    >>> import torch
    >>> decoder = nn.Sequential(nn.MaxUnpool1d(2))
    >>> with use_indices_in_maxunpool(decoder, {"0": torch.tensor([[1, 2]])}):
    ...     decoder(torch.tensor([[2.0, 4.0]]))
    tensor([[0., 2., 4., 0.]])

    Args:
        module_or_modules: a module, with its layers of the type `MaxUnpool`, or a mapping of names
            to layers, or pairs.
        maxpool_indices: the indices by the names of these layers, or a list in their order. What is
            in a dict is looked up when a layer is called.
        consume_indices: take those that were used out of the dict; a list is emptied.

    A layer without indices is an error when it is called without; indices for other layers do no
    harm. Indices that the decoder itself gives to a layer give way to those that are there for it.
    """
    layers = _found(module_or_modules, _UNPOOLS)
    if isinstance(maxpool_indices, Mapping):
        source = cast("dict[str, Tensor]", maxpool_indices)
    else:
        source = _in_order(list(maxpool_indices), list(layers.layers))
        if consume_indices and isinstance(maxpool_indices, list):
            maxpool_indices.clear()
    used: dict[str, Tensor] = {}

    def insert(arguments: dict[str, Any], call: hl.Call) -> dict[str, Any] | None:
        names = layers.names[call.module]
        own = arguments.get("indices")
        name = next((name for name in names if name in source or name in used), None)
        if name is None and isinstance(own, Tensor):
            return None
        if name is None:
            raise NoValue(
                f"The unpooling layer {names[0]!r} was called without indices.",
                f"There are indices for: {listed(source)}.",
                "Name the indices as the layers are named, give them as a list, or leave it out of "
                "the layers.",
            )
        if name in source:
            used[name] = source.pop(name) if consume_indices else source[name]
        _check(name, used[name], next(iter(arguments.values()), None))
        # With the indices left out, the size of the output may stand in their place.
        size = {} if own is None or isinstance(own, Tensor) else {"output_size": own}
        return {**arguments, "indices": used[name], **size}

    with layers.hook(":inputs", insert):
        yield


def _found(given: nn.Module | Layers[nn.Module], kinds: tuple[type[nn.Module], ...]) -> NamedLayers:
    return NamedLayers(
        named_modules_of_type(given, kinds) if isinstance(given, nn.Module) else given
    )


def _in_order(indices: list[Tensor], names: list[str]) -> dict[str, Tensor]:
    if len(indices) == len(names):
        return dict(zip(names, indices, strict=True))
    without = f", and {names[len(indices)]!r} would have none" if len(indices) < len(names) else ""
    raise hl.ChangeError(
        f"Indices were given as a list of {len(indices)}.",
        f"The unpooling layers are: {listed(names)}{without}.",
        "Give one tensor for each of them, in this order.",
    )


def _check(name: str, indices: Tensor, value: Any) -> None:
    if isinstance(value, Tensor) and value.shape != indices.shape:
        raise hl.ChangeError(
            f"The unpooling layer {name!r} was to use indices of the shape {tuple(indices.shape)}.",
            f"Its input has the shape {tuple(value.shape)}.",
            "Give it those of the pool that it undoes; a decoder often goes in reverse order.",
        )
