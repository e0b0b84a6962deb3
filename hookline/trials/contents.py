"""What stands in the modules of a model, noted once for all that ask about it.

- `Contents(model)`: all modules of a model by name, with their parameters and buffers
"""

from __future__ import annotations

from itertools import chain
from operator import is_not
from typing import Any

from torch import Tensor, nn

from hookline.core.tree import walk

__all__ = ["Contents"]


class Contents:
    """All modules of a model by name, with their parameters and buffers.

    >>> layer = nn.Linear(2, 3, bias=False)
    >>> found = Contents(layer)
    >>> [name for name, _ in found.named], [tensor.shape for tensor in found.tensors]
    ([''], [torch.Size([3, 2])])
    >>> layer.bias = nn.Parameter(layer.weight.new_zeros(3))
    >>> found.is_current()
    False
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = walk(model)
        self.modules = [module for _, module in self.named]
        # Of every module, empty ones too. Loops over all of them are short, as they take time.
        self.children: list[dict[str, Any]] = [module._modules for module in self.modules]
        self.parameters: list[dict[str, Any]] = [module._parameters for module in self.modules]
        self.buffers: list[dict[str, Any]] = [module._buffers for module in self.modules]
        self._noted = self._read()
        self.all_parameters: list[nn.Parameter | None] = self._noted[1]
        self.all_buffers: list[Tensor | None] = self._noted[2]
        every = self.all_parameters + self.all_buffers
        self.tensors: list[Tensor] = [tensor for tensor in every if tensor is not None]

    def _read(self) -> list[list[Any]]:
        tables = self.children, self.parameters, self.buffers
        found = [[*chain.from_iterable([table.values() for table in kind])] for kind in tables]
        names = [*chain.from_iterable([table.keys() for table in self.children])]
        return [*found, names, *[[*map(len, kind)] for kind in tables]]

    def is_current(self) -> bool:
        """Whether the same modules, parameters and buffers stand in the same places."""
        now, before = self._read(), self._noted
        return now[3:] == before[3:] and not any(
            any(map(is_not, *pair)) for pair in zip(now[:3], before[:3], strict=True)
        )
