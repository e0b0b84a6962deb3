"""Hooks on modules: how they are put on, taken off and copied, and whose calls they see.

- `ModuleHooks`: the hooks of one context on any number of modules
- `Anchor`: a hook that does nothing; through it a model keeps a context alive
- `ACTIVE`: the serials of the contexts that are open in this thread or task
- `SERIALS`: a new number for each context and each call
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

from hookline.torch_private import (
    forward_hooks_of,
    forward_hooks_with_kwargs_of,
    forward_pre_hooks_of,
    forward_pre_hooks_with_kwargs_of,
    outside_graphs,
)

__all__ = ["ACTIVE", "CLOSED", "SERIALS", "Anchor", "ModuleHooks"]

# None stands for the contexts that see the calls of every thread and task.
ACTIVE: ContextVar[frozenset[int | None]] = ContextVar("hookline_active", default=frozenset({None}))

SERIALS = itertools.count(1)
CLOSED = 0  # the owner of hooks that were taken off or copied: no context has this serial

# Keys in hook dicts. torch counts its own up from 0. The start is random because a model that was
# saved with hooks on it brings along keys of another process.
_KEYS = itertools.count(-1 - int.from_bytes(os.urandom(6)), -1)


class ModuleHooks:
    """The hooks of one context on any number of modules, under one key in their hook dicts.

    Hooks go straight into torch's hook dicts, as `register_forward_hook` puts them after making a
    handle for each. The model holds the hooks, and the hooks hold the context weakly, so that an
    abandoned context can be collected. An attached context is held by `keeper`.

    A copy of a hooked module holds an inert copy, which takes itself off when it is called.
    """

    def __init__(self, context: Any, owner: int | None) -> None:
        self.context: weakref.ref[Any] | None = weakref.ref(context)  # None in a copy
        # The serial of the context; None to act in every thread and task.
        self.owner: int | None = owner
        self.keeper: Any = None
        self.key = next(_KEYS)
        self.tables: list[dict[int, Any]] = []  # the hook dicts that hold an entry of these hooks

    def put_before(
        self, modules: Sequence[nn.Module], hook: Callable[..., Any], with_kwargs: bool = True
    ) -> None:
        """Call `hook(module, args, kwargs)` before each call of some modules."""
        if with_kwargs:
            self._put(map(forward_pre_hooks_with_kwargs_of, modules), True)
        self._put(map(forward_pre_hooks_of, modules), hook)

    def put_after(
        self, modules: Sequence[nn.Module], hook: Callable[..., Any], with_kwargs: bool = False
    ) -> None:
        """Call `hook(module, args, output)`, or with kwargs before the output, after each call."""
        if with_kwargs:
            self._put(map(forward_hooks_with_kwargs_of, modules), True)
        self._put(map(forward_hooks_of, modules), hook)

    def _put(self, tables: Iterable[dict[int, Any]], entry: Any) -> None:
        key, held = self.key, self.tables
        for table in tables:
            held.append(table)  # first: an interrupt may come between
            table[key] = entry

    def remove_all(self) -> None:
        """Take the hooks off all modules; fine if they are off already."""
        for table in self.tables:
            table.pop(self.key, None)
        self.tables.clear()

    def foreign_call(self, module: nn.Module) -> None:
        """Take the hooks off a copied module, which was called."""
        if self.context is None:
            self.remove_from(module)

    def remove_from(self, module: nn.Module) -> None:
        """Take the hooks off one module, such as a copy; fine if they are off already."""
        forward_hooks_of(module).pop(self.key, None)
        forward_hooks_with_kwargs_of(module).pop(self.key, None)
        forward_pre_hooks_of(module).pop(self.key, None)
        forward_pre_hooks_with_kwargs_of(module).pop(self.key, None)

    def __reduce__(self) -> Any:
        return _inert, (type(self), self.key)


def _inert(kind: type[ModuleHooks], key: int) -> ModuleHooks:
    """Return the hooks of a copied or loaded module, which belong to no context."""
    hooks = kind.__new__(kind)
    hooks.context, hooks.owner, hooks.keeper, hooks.key = None, CLOSED, None, key
    hooks.tables = []
    return hooks


class Anchor(ModuleHooks):
    """A hook on a module that does nothing; through it the model keeps a context alive."""

    def __init__(self, context: Any, attached: bool) -> None:
        super().__init__(context, None)
        self.keeper = context if attached else None

    def put_on(self, module: nn.Module) -> None:
        """Tie the context to a module."""
        self.put_before([module], self.do_nothing, with_kwargs=False)

    @outside_graphs
    def do_nothing(self, module: nn.Module, args: Any) -> None:
        """Do nothing; on a copied module, take the hook off."""
        if self.context is None:
            self.remove_from(module)
