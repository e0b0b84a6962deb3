"""Compiled models: while something looks inside, they run eagerly, or their graphs ask for hooks.

A graph that torch.compile has made runs no hooks that came later, and says nothing; it may even
have been made for another model of the same class. The stance "force_eager" makes all compiled
models of the process run as if they were not compiled. Where nothing was compiled so far, it is
enough that graphs ask for a module's hooks from now on.

- `suspend(user, in_graph)`, `resume(user)`: see to it that hooks are called; as before
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hookline.torch_checks import require
from hookline.torch_private import compiler_is_loaded, hook_guards

__all__ = ["resume", "suspend"]


class _Setting:
    """Something that is set as long as it has users, who may end in any order."""

    patience = 10.0  # seconds; a machine that is busy can let a thread wait for one or two

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.lock = threading.RLock()  # a user may be collected, and end, while it is held
        self.later: dict[threading.RLock, threading.RLock] = {}
        self.users: set[int] = set()
        self.undo: Any = None

    def acquire(self) -> threading.RLock:
        """Take the lock, or the one after it: an interrupt at a bad moment leaves it locked."""
        lock = self.lock
        while not lock.acquire(timeout=self.patience):
            lock = self.lock = self.later.setdefault(lock, threading.RLock())  # the same for all
        return lock

    def begin(self, user: object) -> None:
        """One user more; with the first it is set."""
        lock = self.acquire()
        try:
            self.users.add(id(user))
            if len(self.users) == 1:
                self.undo = self.make()
                self.undo.__enter__()
        finally:
            lock.release()

    def end(self, user: object) -> None:
        """One user less; after the last all is as before. May be called again."""
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


class _Asking:
    """Graphs ask for a module's hooks. Unlike torch's own patch it may be undone again."""

    def __enter__(self) -> None:
        self.before = hook_guards(True)

    def __exit__(self, *error: object) -> None:
        hook_guards(self.before)


_eager = _Setting(lambda: torch.compiler.set_stance("force_eager"))
_asking = _Setting(_Asking)


def suspend(user: object, in_graph: bool) -> None:
    """See to it that hooks are called: all runs eagerly, or new graphs ask for hooks."""
    if compiler_is_loaded() and not torch.compiler.is_compiling():
        require("compiler")
        (_asking if in_graph else _eager).begin(user)


def resume(user: object) -> None:
    """One user less; after the last, compiled models run as before. May be called again."""
    _eager.end(user)
    _asking.end(user)
