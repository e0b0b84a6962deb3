"""An index of the modules, parameters and buffers of a model, made once for all who need it.

- `ModuleIndex(model)`: all modules of a model by name, with their parameters and buffers
"""

from __future__ import annotations

from itertools import chain
from operator import is_not
from typing import Any

from torch import Tensor, nn

from hookline.places.tree import walk
from hookline.torch_private import buffers_of, parameters_of, submodules_of

__all__ = ["ModuleIndex"]

_Table = dict[str, Any]


class ModuleIndex:
    """The modules of a model by name, with their parameters and buffers.

    >>> layer = nn.Linear(2, 3, bias=False)
    >>> found = ModuleIndex(layer)
    >>> [name for name, _ in found.named], [tensor.shape for tensor in found.tensors]
    ([''], [torch.Size([3, 2])])
    >>> layer.bias = nn.Parameter(layer.weight.new_zeros(3))
    >>> found.is_current()
    False
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = walk(model)
        self.modules = modules = [module for _, module in self.named]
        # The tables of every module, also empty ones.
        self.children: list[_Table] = [submodules_of(module) for module in modules]
        self.parameters: list[_Table] = [parameters_of(module) for module in modules]
        self.buffers: list[_Table] = [buffers_of(module) for module in modules]
        tables = self.children, self.parameters, self.buffers
        # To look into each takes time, and many are empty.
        self._filled = [[table for table in kind if table] for kind in tables]
        self._noted = [_values(kind) for kind in self._filled]
        self._shape = self._measure()
        self.all_parameters: list[nn.Parameter | None] = self._noted[1]
        self.all_buffers: list[Tensor | None] = self._noted[2]
        every = self.all_parameters + self.all_buffers
        self.tensors: list[Tensor] = [tensor for tensor in every if tensor is not None]
        self.trained = self.find_trained()

    def find_trained(self) -> list[bool]:
        """Return for each parameter whether it requires a gradient now."""
        return [p is not None and p.requires_grad for p in self.all_parameters]

    def _measure(self) -> Any:
        """Return the size of each table, and the names of modules."""
        tables = self.children, self.parameters, self.buffers
        names = [*chain.from_iterable([table.keys() for table in self._filled[0]])]
        return names, [[*map(len, kind)] for kind in tables]

    def is_current(self) -> bool:
        """Return True if the same modules, parameters and buffers are in the same places."""
        return self._measure() == self._shape and not any(
            any(map(is_not, _values(tables), values))
            for tables, values in zip(self._filled, self._noted, strict=True)
        )


def _values(tables: list[_Table]) -> list[Any]:
    return [*chain.from_iterable([table.values() for table in tables])]
