"""What was asked of a model, and what was found there.

- `Target`: a place found in a model, with the module that it belongs to
- `Request`: one thing that was asked for, with its targets
"""

from __future__ import annotations

from collections.abc import Container
from typing import cast

from torch import Tensor, nn

from hookline.places.grammar import Place
from hookline.places.tree import Step, join
from hookline.values.nested import Path

__all__ = ["Place", "Request", "Target"]


class Target:
    """A place found in a model. `attribute` is set for a parameter or buffer of `module`."""

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
        self.module, self.path, self.port, self.parts = module, path, port, parts
        self.attribute, self.operation = attribute, operation
        self.ident = shared = id(module) if ident is None else ident  # of one that is gone
        if attribute is not None:
            shared = id(self.tensor())
        # The same for two targets at the same place of the same module, or of the same tensor.
        self.key = (shared, operation or attribute is None, port, parts)

    def meets(self, other: Target) -> bool:
        """Whether two targets are at the same port of the same module."""
        return self.key[:3] == other.key[:3]

    @property
    def place(self) -> Place:
        return self.place_at(self.path)

    def place_at(self, path: str) -> Place:
        """The place, if the module's path is `path`."""
        return Place(self.named(path), self.port, self.parts, self.operation)

    def named(self, path: str) -> str:
        """The path of the module, or of the tensor in it, if the module's path is `path`."""
        return join(path, self.attribute or "")

    def tensor(self) -> Tensor | None:
        """The parameter or buffer at this target, as it is now."""
        return getattr(self.module, cast(str, self.attribute), None)


class Request:
    """One thing that was asked for: literal places must all fire, of others one must."""

    __slots__ = (
        "_targets", "asked", "literal", "modules", "operation", "parts", "port", "refused",
        "tensors",
    )  # fmt: skip

    def __init__(self, asked: str, literal: bool, port: str | None, parts: Path) -> None:
        self.asked, self.literal, self.port, self.parts = asked, literal, port, parts
        self.operation: str | None = None
        self.modules: list[Step] = []  # what was found
        self.tensors: list[Target] = []
        self._targets: list[Target] | None = None
        self.refused: dict[Place, str] = {}  # what a wildcard matches and cannot be hooked, and why

    @property
    def targets(self) -> list[Target]:
        """What was found; made when it is asked for, since some captures need no targets."""
        if self._targets is None:
            port, parts, operation = self.port or "output", self.parts, self.operation
            found = [Target(m, path, port, parts, None, operation) for path, m in self.modules]
            self._targets = found + self.tensors
        return self._targets

    @targets.setter
    def targets(self, targets: list[Target]) -> None:
        self.modules, self._targets = [], targets

    def whole(self, ports: Container[str]) -> bool:
        """Whether it is for whole values of modules only, at one of these ports."""
        plain = self.modules and not (self.tensors or self.parts or self.operation)
        return bool(plain) and (self.port or "output") in ports
