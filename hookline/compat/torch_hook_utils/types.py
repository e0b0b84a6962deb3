"""Layers of a type, and the type of a layer.

- `named_modules_of_type(module, module_type)`: the layers of a type with their names
- `Module`: a module with certain arguments and a certain result, for annotations
"""

from __future__ import annotations

from typing import ParamSpec, Protocol, TypeVar

from torch import nn

from hookline.places.tree import walk

__all__ = ["Module", "named_modules_of_type"]

P = ParamSpec("P")
Result_co = TypeVar("Result_co", covariant=True)
Layer = TypeVar("Layer", bound=nn.Module)


class Module(Protocol[P, Result_co]):
    """A module whose forward takes these arguments and gives that result; for annotations."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> Result_co: ...


def named_modules_of_type(
    module: nn.Module, module_type: type[Layer] | tuple[type[Layer], ...]
) -> list[tuple[str, Layer]]:
    """Return the modules of a type (or of one of several) with their names, in model order.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [name for name, _ in named_modules_of_type(model, nn.Linear)]
    ['0', '2']

    Args:
        module: the module to search, itself included.
        module_type: a type, or a tuple of types; their subclasses count.

    A module that is there twice comes once, under its first name.
    """
    return [(name, found) for name, found in walk(module) if isinstance(found, module_type)]
