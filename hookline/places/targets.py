"""Requests for places, and the targets that were found for them.

- `Target`: a place found in a model, with the module that it belongs to
- `Request`: one thing that was asked for, with its targets
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hookline.places.grammar import Place
from hookline.places.tree import NamedModule, join
from hookline.torch_private import buffers_of
from hookline.values.nested import Path

__all__ = ["Request", "Target"]


class Target:
    """A place found in a model. `attribute` is set for a parameter or buffer of `module`.

    Two targets have the same `key` if they are at the same place of the same module, or of the
    same tensor. `ident` stays the id of a module that no longer exists.
    """

    __slots__ = ("attribute", "ident", "key", "module", "operation", "parts", "path", "port")

    def __init__(
        self,
        module: nn.Module,
        path: str,
        port: str = "output",
        parts: Path = (),
        attribute: str | None = None,
        operation: str | None = None,
        ident: int | None = None,
    ) -> None:
        self.module = module
        self.path = path
        self.port = port
        self.parts = parts
        self.attribute = attribute
        self.operation = operation
        self.ident = id(module) if ident is None else ident
        shared = self.ident if attribute is None else id(self.tensor())
        self.key = (shared, operation or attribute is None, port, parts)

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Target:
        """Return the gradient of a plain tensor, which stands where the model stands.

        Every target belongs to a module: here to a bare one, which holds the tensor as "".
        """
        owner = nn.Module()
        buffers_of(owner)[""] = tensor
        return cls(owner, "", "grad", (), "")

    def shares_port_with(self, other: Target) -> bool:
        """Return True if two targets are at the same port of the same module."""
        return self.key[:3] == other.key[:3]

    @property
    def place(self) -> Place:
        return self.place_at(self.path)

    def place_at(self, path: str) -> Place:
        """Return the place, given the path of the module."""
        return Place(self.named(path), self.port, self.parts, self.operation)

    def place_among(self, names: Mapping[int, str]) -> Place:
        """Return the place under the name that the module has among these, by id."""
        return self.place_at(names.get(self.ident, self.path))

    def named(self, path: str) -> str:
        """Return the path of the module or of its tensor, given the path of the module."""
        return join(path, self.attribute or "")

    def tensor(self) -> Tensor | None:
        """Return the parameter or buffer at this target, as it is now."""
        name: Any = self.attribute
        return getattr(self.module, name, None)


class Request:
    """One thing that was asked for. A literal place must fire; of other places, one must.

    Of the modules that were found the same is asked. Their targets are made when they are first
    read, since a capture of whole values needs none.
    """

    __slots__ = (
        "_of_modules", "literal", "modules", "operation", "parts", "port", "refused",
        "single_targets", "where",
    )  # fmt: skip

    def __init__(self, where: Any, literal: bool, port: str | None, parts: Path) -> None:
        self.where = where
        self.literal = literal
        self.port = port
        self.parts = parts
        self.operation: str | None = None
        self.modules: list[NamedModule] = []
        # Targets of which something is asked one by one: parameters and buffers, or others.
        self.single_targets: list[Target] = []
        self.refused: dict[Place, str] = {}  # matches of a wildcard that take no hooks, and why
        self._of_modules: list[Target] | None = None

    @property
    def shown(self) -> str:
        """The name by which errors call what was asked for."""
        where = self.where
        if isinstance(where, str):
            return repr(where)
        if isinstance(where, nn.Module):
            return f"the given {type(where).__name__}"
        return getattr(where, "__name__", None) or repr(getattr(where, "pattern", where))

    @property
    def targets(self) -> list[Target]:
        """All places that were found."""
        if self._of_modules is None:
            self._of_modules = [
                Target(module, path, self.port or "output", self.parts, None, self.operation)
                for path, module in self.modules
            ]
        return self._of_modules + self.single_targets

    def replace_targets(self, targets: list[Target]) -> None:
        """Put other targets in the place of those that were found."""
        self.modules = []
        self._of_modules = None
        self.single_targets = targets
