"""The oldest form of nethook: values and edits as attributes of the model itself.

- `retain_layers(model, layer_names)`: the last outputs of layers, in `model.retained`
- `edit_layers(model, layer_names)`: edits, in `model.ablation` and `model.replacement`
- `clear_edit(model)`: no edits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hookline.compat.nethook.instrumented_model import InstrumentedModel, Layer, fitted
from hookline.compat.nethook.retained_values import recursive_copy
from hookline.errors import ChangeError
from hookline.values.nested import only_tensor, set_part

__all__ = ["clear_edit", "edit_layers", "retain_layers"]


class _Table(dict[str, Any]):
    """One value for each layer, by its alias or name, with the hooks that use it."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._layers = list(layers)
        self._hooks: InstrumentedModel | None = None
        names = [layer if isinstance(layer, str) else layer[1] for layer in self._layers]
        super().__init__(dict.fromkeys(names))

    def hook(self, model: nn.Module, rule: Callable[..., Any]) -> None:
        """Call a rule of (output, name) at each layer: at all of them, or none."""
        hooks = InstrumentedModel(model)
        for layer in self._layers:
            hooks.edit_layer(layer, rule=rule)
        self.close()
        self._hooks = hooks

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self._hooks is not None:
            self._hooks.close()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # the hooks stay with the model that was copied


class _Retained(_Table):
    """The last outputs of layers."""

    def keep(self, output: Any, name: str) -> None:
        """Keep the output of a layer, and leave it as it is."""
        self[name] = recursive_copy(output, clone=True, detach=True)


def retain_layers(model: nn.Module, layer_names: Iterable[Layer]) -> None:
    """Retain the outputs of layers in the dict `model.retained`, detached, after all edits.

    >>> import torch
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> retain_layers(model, [("1", "relu")])
    >>> _ = model(torch.tensor([-1.0, 1.0]))
    >>> model.retained
    {'relu': tensor([0., 1.])}

    Args:
        model: any module; it gets the attribute.
        layer_names: names, or pairs of a name and an alias.

    It lasts until the next call for the same model, or `hookline.attached(model).remove()`.
    """
    retained = _Retained(layer_names)
    retained.hook(model, retained.keep)
    _put(model, retained=retained)


def edit_layers(model: nn.Module, layer_names: Iterable[Layer]) -> None:
    """Make layers return `x * (1 - a) + r * a`, with `a` and `r` from dicts on the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Identity())
    >>> edit_layers(model, ["0"])
    >>> model.ablation["0"], model.replacement["0"] = 0.5, 10.0
    >>> model(torch.ones(1, 2, 1, 1)).flatten()
    tensor([5.5000, 5.5000])
    >>> clear_edit(model)

    Args:
        model: any module; it gets the attributes `ablation` and `replacement`.
        layer_names: names, or pairs of a name and an alias.

    Both dicts take numbers, lists, arrays and tensors, by channel, row and column; rows and columns
    are fitted to the output by max pooling. None is no edit; without a replacement zeros are mixed
    in. It lasts until the next call for the same model, or `hookline.attached(model).remove()`.
    """
    layers = list(layer_names)
    ablation, replacement = _Table(layers), _Table(layers)

    def mixed(output: Any, name: str) -> Any:
        if ablation.get(name) is None:
            return output
        path, x = only_tensor(output, f"The output of the layer {name!r}")
        amount = _with_pixels(ablation[name], x, name)
        new = x * (1 - amount)
        if replacement.get(name) is not None:
            new = new + _with_pixels(replacement[name], x, name) * amount
        return set_part(output, path, new)

    ablation.hook(model, mixed)
    _put(model, ablation=ablation, replacement=replacement)
    retained = model.__dict__.get("retained")
    if isinstance(retained, _Retained):
        retained.hook(model, retained.keep)  # what is retained is what the edits gave


def clear_edit(model: nn.Module) -> None:
    """Clear the edits of all layers; a model without `edit_layers` is a ChangeError."""
    for name in ("ablation", "replacement"):
        table = model.__dict__.get(name)
        if not isinstance(table, _Table):
            raise ChangeError(
                f"The edits of a {type(model).__name__} were to be cleared.",
                f"It has no dict {name!r} of edits.",
                "Call edit_layers(model, layer_names) first.",
            )
        table.update(dict.fromkeys(table))


def _put(model: nn.Module, **tables: _Table) -> None:
    """Put tables on a model; older ones stop acting."""
    for name, table in tables.items():
        old = model.__dict__.get(name)
        if isinstance(old, _Table):
            old.close()
        setattr(model, name, table)


def _with_pixels(given: Any, x: Tensor, name: str) -> Tensor:
    """Return the value for a layer, with the dtype, device, dimensions and pixels of its output."""
    own = fitted(given, x)
    if own.ndim == x.ndim == 4 and own.shape[2:] != x.shape[2:] and own[0, 0].numel() > 1:
        own = F.adaptive_max_pool2d(own, x.shape[2:])
    if any(a not in (1, b) for a, b in zip(own.shape[::-1], x.shape[::-1], strict=False)):
        raise ChangeError(
            f"The layer {name!r} was to be edited by a value of shape {tuple(own.shape)}.",
            f"Its output has the shape {tuple(x.shape)}.",
            "Give a number for each channel, or a value that broadcasts to the output.",
        )
    return own
