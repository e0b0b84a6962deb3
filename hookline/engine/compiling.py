"""Compiled models: make hooks run in them.

- `suspend(user, in_graph)`, `resume(user)`: force eager mode, or enable hook guards; and undo it
- `Setting`: a reference-counted global setting
- `Slot`: a hook that keeps the last output of a module, also inside compiled graphs

A graph that torch.compile has made runs no hooks that came later, and says nothing; it may even
have been made for another model of the same class. The stance "force_eager" makes all compiled
models of the process run as if they were not compiled. Where nothing was compiled so far, it is
enough that new graphs are guarded by the hooks of their modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.engine.module_hooks import ModuleHooks
from hookline.torch_checks import require
from hookline.torch_private import compiler_is_loaded, hook_guards, outside_graphs

if TYPE_CHECKING:
    from hookline.engine.tracer import Tracer

__all__ = ["Setting", "Slot", "resume", "suspend"]


class Setting:
    """A reference-counted global setting. Its users may end in any order.

    An interrupt at a bad moment, as Python leaves a `with` statement, leaves its lock locked: then
    other threads would wait for ever. After a while they go on to another lock.
    """

    patience = 10.0  # seconds; a machine that is busy can let a thread wait for one or two

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.lock = threading.RLock()  # a user may be collected, and end, while it is held
        self.later: dict[threading.RLock, threading.RLock] = {}
        self.users: set[int] = set()
        self.undo: Any = None

    def acquire(self) -> threading.RLock:
        """Take the lock, or the one after it if the lock was left locked."""
        lock = self.lock
        while not lock.acquire(timeout=self.patience):
            lock = self.lock = self.later.setdefault(lock, threading.RLock())  # the same for all
        return lock

    def begin(self, user: object) -> None:
        """Add a user; the first one sets it."""
        lock = self.acquire()
        try:
            self.users.add(id(user))
            if len(self.users) == 1:
                self.undo = self.make()
                self.undo.__enter__()
        finally:
            lock.release()

    def end(self, user: object) -> None:
        """Remove a user; the last one restores what was before. May be called again."""
        if self.undo is None and not self.users:
            return
        lock = self.acquire()
        try:
            self.users.discard(id(user))
            if not self.users and self.undo is not None:
                self.undo.__exit__(None, None, None)
                self.undo = None
        finally:
            lock.release()


class _HookGuards:
    """Guard new graphs by the hooks of modules. Unlike torch's own patch it may be undone again."""

    def __enter__(self) -> None:
        self.before = hook_guards(True)

    def __exit__(self, *error: object) -> None:
        hook_guards(self.before)


_eager = Setting(lambda: torch.compiler.set_stance("force_eager"))
_guarded = Setting(_HookGuards)


def suspend(user: object, in_graph: bool) -> None:
    """Make hooks run in compiled models: force eager mode, or enable hook guards."""
    if compiler_is_loaded() and not torch.compiler.is_compiling():
        require("compiler")
        (_guarded if in_graph else _eager).begin(user)


def resume(user: object) -> None:
    """Let compiled models run as before, after the last user. May be called again."""
    _eager.end(user)
    _guarded.end(user)


class Slot(ModuleHooks):
    """Keeps the last output of a module by a hook that torch.compile takes into its graphs.

    A log cannot grow inside a graph, but an attribute can be set. Outside of graphs, and for nested
    values, which torch.compile does not follow, the tracer does its ordinary work.
    """

    def __init__(self, tracer: Tracer, detach: bool) -> None:
        self.context, self.owner, self.keeper = tracer.context, tracer.owner, None
        self.key, self.tables = tracer.key, []
        self.tracer, self.detach = tracer.ref, detach  # weakly: the tracer holds this
        self.value: Tensor | None = None  # of the last compiled call, if no other came since

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        if torch.compiler.is_compiling() and type(output) is Tensor:
            # In a graph no version can be read and no copy-on-write made, but a copy costs little.
            self.value = output.detach().clone() if self.detach else output.clone()
        else:
            self.leave_graph(module, args, output)

    @outside_graphs
    def leave_graph(self, module: nn.Module, args: Any, output: Any) -> None:
        """Do the tracer's ordinary work."""
        tracer = None if self.context is None else self.tracer()
        if tracer is None:
            self.remove_from(module)
        else:
            self.value = None
            tracer.after(module, args, output)
