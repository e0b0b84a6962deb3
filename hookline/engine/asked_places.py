"""The places that a context asks for: what is asked of which modules, and how they are spelled.

- `AskedPlaces`: what is asked of which modules, with the names of the places
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hookline.engine.asks import Ask
from hookline.engine.calls import Subject, module_id
from hookline.places.grammar import Place, escape
from hookline.places.resolution import Target
from hookline.places.tree import NamedModule, first_names
from hookline.torch_private import forward_hooks_of, forward_pre_hooks_of

__all__ = ["AskedPlaces"]


class AskedPlaces:
    """What a context asks of which modules, with the names of the places.

    A record outlives its context: `close` lets go of the modules, and keeps their ids and paths.
    """

    def __init__(self, model: Any) -> None:
        self.model = model  # None once it is closed
        self.entries: list[tuple[Ask, list[NamedModule]]] = []  # without modules once it is closed
        self._paths: list[tuple[Ask, dict[int, str]]] = []  # made when it is closed
        # Made when they are needed: paths and modules by id, the first names of all modules of the
        # model, and the places by their spelling.
        self._located: dict[int, tuple[str, Any]] = {}
        self._first_names: dict[int, str] | None = None
        self._spelled: dict[str, tuple[Subject, Ask]] | None = None

    def __iter__(self) -> Iterator[tuple[Subject, Ask]]:
        """Yield the subject and the ask of each place, in the order of asking."""
        found = [(ask.subject_at(i), ask) for ask, paths in self._by_id() for i in paths]
        return iter(dict.fromkeys(found))

    def targets(self) -> list[Target]:
        """Return all places as targets."""
        return [self.target(subject, ask) for subject, ask in self]

    def key_at(self, text: str) -> tuple[Subject, Ask] | None:
        """Return the subject and the ask of a place that is spelled as it was asked for."""
        if self._spelled is None:
            spelled: dict[str, tuple[Subject, Ask]] = {}
            for ask, paths in self._by_id():
                if ask.target is not None:
                    spelled.setdefault(str(ask.target.place), (ask.target.key, ask))
                    continue
                ending = Place("", ask.port, ask.parts, ask.operation)
                for ident, path in paths.items():
                    spelled.setdefault(escape(path) + ending, (ask.subject_at(ident), ask))
            self._spelled = spelled
        return self._spelled.get(text)

    def _by_id(self) -> list[tuple[Ask, dict[int, str]]]:
        """Return the paths of the modules of which something is asked, by their ids."""
        if self._paths:
            return self._paths
        return [(ask, {id(m): path for path, m in modules}) for ask, modules in self.entries]

    def located(self, subject: Subject) -> tuple[str, Any]:
        """Return the path and the module of a subject; no module once this is closed."""
        if not self._located:
            modules = {id(m): m for _, held in self.entries for _, m in held}
            for _, paths in reversed(self._by_id()):
                self._located |= {i: (path, modules.get(i)) for i, path in paths.items()}
        return self._located[module_id(subject)]

    def target(self, subject: Subject, ask: Ask) -> Target:
        """Return the place at which something is asked, as a target."""
        if ask.target is not None:
            return ask.target
        path, module = self.located(subject)
        ident = module_id(subject)
        return Target(module, path, ask.port, ask.parts, None, ask.operation, ident)

    def first_name(self, target: Target) -> Place:
        """Return the place of a target under the first name of its module."""
        if self._first_names is None:
            self._first_names = first_names(self.model)
        return target.place_among(self._first_names)

    def have_other_hooks(self) -> bool:
        """Return True if others have hooks on the modules, as a tensor-parallel plan has."""
        modules: list[nn.Module] = [module for _, held in self.entries for _, module in held]
        return any(forward_pre_hooks_of(module) or forward_hooks_of(module) for module in modules)

    def close(self) -> None:
        """Let go of the model: what was captured does not keep it alive."""
        self._paths, self._located = self._by_id(), {}
        self.entries = [(ask, []) for ask, _ in self.entries]
        self.model = None
