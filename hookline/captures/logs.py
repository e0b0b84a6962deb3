"""Captures of whole values, in little time: one hook for all modules, which notes what passes.

- `Log`: what the modules have in common that are asked for the same port
- `OutputLog`: the outputs of modules, in the order of the calls
- `LastLog`: the last output of each module, also in compiled graphs
- `LoggedTap`: what a log holds of one module, made when somebody asks; `noted` is for its values

They do what `Site` and `CaptureTap` do in the commonest cases, with no object made for a module
on entering: what was noted is sorted by modules when it is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.captures.entries import Kept
from hookline.captures.keeping import CaptureTap, Options
from hookline.engine.tracer import ACTIVE, CLOSED, KEYS, Site
from hookline.places.grammar import escape
from hookline.places.targets import Target
from hookline.places.tree import Step
from hookline.torch_private import (
    backward_id,
    base_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    lazy_clone,
    outside_graphs,
    use_count,
    version_of,
)
from hookline.values.snapshots import BASES, LAZY, SMALL, snapshot

__all__ = ["LastLog", "Log", "LoggedTap", "OutputLog", "noted"]


def noted(name: str) -> Any:
    """What a tap has under a name; when it is read, what the log has noted since is in it."""

    def read(tap: Any) -> Any:
        tap.log.sort()
        return getattr(tap, name)

    return property(read, lambda tap, value: setattr(tap, name, value))


class LoggedTap(CaptureTap, Site):
    """What a log holds of one module."""

    kept = noted("_kept")

    def __init__(self, log: Any, path: str, module: nn.Module | None, ident: int) -> None:
        self.log, self.path, self.module, self.ident = log, path, module, ident
        self.context, self.options, self.owner = log.context, log.options, log.owner
        self._kept: list[Kept] = []

    def take(self, *noted: Any) -> None:
        """Keep what the log has noted of one call."""
        self._kept.append(cast(Kept, noted))

    @property
    def count(self) -> int:
        return len(self.kept)

    @property
    def foreign(self) -> int:
        return self.log.strangers.get(self.ident, 0)

    @property
    def target(self) -> Target:
        return Target(cast(nn.Module, self.module), self.path, self.log.port, ident=self.ident)

    @property
    def spelled(self) -> str:
        return escape(self.path) + self.log.suffix

    def release(self) -> None:
        self.module = None


class Log(Site):
    """What the modules have in common that are asked for the same port, and its hooks on them."""

    kind: type[LoggedTap] = LoggedTap
    port, suffix = "output", ""  # what is asked for, and how it is spelled after a path
    beside: dict[int, int] | None = None  # hooks of logs at modules where several have one
    in_graph = False  # whether compiled graphs may keep values by themselves
    sorted = 0  # how many entries were given to taps

    def __init__(self, context: weakref.ref[Any], options: Options, owner: int | None) -> None:
        self.context, self.options, self.owner = context, options, owner
        self.key = next(KEYS)
        self.entries: list[Any] = []  # what has passed, call by call
        self.steps: list[Step] = []  # the modules, while the capture is open
        self.names: dict[int, str] = {}  # their paths by id, when it has ended or a tap is made
        self.modules: dict[int, nn.Module] = {}  # the same, while taps are made
        self.taps: dict[int, Any] = {}  # by id of the module, as far as they were asked for
        self.strangers: dict[int, int] = {}  # calls from other threads and tasks
        self.lock = threading.RLock()  # two threads may read

    def hook(self, steps: list[Step]) -> None:
        """Put hooks on modules; fine if they are on already."""
        self.steps += steps  # first, so that an interrupt leaves no hook behind
        key, after_call = self.key, self.after_call
        for _, module in steps:
            forward_hooks_of(module)[key] = after_call

    def after_call(self, module: nn.Module, args: Any, output: Any, /) -> Any:
        """The forward hook."""
        raise AssertionError("a log has a hook")

    def unhook(self) -> None:
        """Take the hooks off; fine if they are off already."""
        self.owner = CLOSED  # torch may still be about to call a hook
        key, names = self.key, self.names
        for path, module in self.steps:
            forward_hooks_of(module).pop(key, None)
            names.setdefault(id(module), path)

    def stranger(self, module: nn.Module) -> None:
        if getattr(self, "context", None) is None:  # a copied module
            self.unregister(module)
        elif self.owner != CLOSED:
            self.strangers[id(module)] = self.strangers.get(id(module), 0) + 1

    def all_taps(self) -> list[Any]:
        """A tap for each module, in the order in which they were asked for."""
        self._name()
        return [self.tap_of(ident) for ident in self.names]

    def tap_of(self, ident: int) -> Any:
        """The tap of a module; None if it was not asked for: a shallow copy has the same hooks."""
        tap = self.taps.get(ident)
        if tap is None:
            self._name()
            if ident in self.names:
                made = self.kind(self, self.names[ident], self.modules.get(ident), ident)
                tap = self.taps.setdefault(ident, made)
        return tap

    def _name(self) -> None:
        """Note the first path of each module, and while the capture is open the module."""
        if self.steps and not self.modules:
            names: dict[int, str] = {}
            for path, module in self.steps:
                names.setdefault(id(module), path)
            self.names = names
            self.modules = {id(module): module for _, module in self.steps}

    def beset(self) -> bool:
        """Whether others, too, have hooks on the modules: a tensor-parallel plan, say."""
        modules: list[Any] = [module for _, module in self.steps]
        return any(forward_pre_hooks_of(module) or forward_hooks_of(module) for module in modules)

    def sort(self) -> None:
        """Give what was noted since to the taps."""
        if self.sorted != len(self.entries):
            with self.lock:
                for ident, *noted in self.entries[self.sorted :]:
                    tap = self.tap_of(ident)
                    # In one step, so that an interrupt loses none and gives none twice.
                    self.sorted, _ = self.sorted + 1, tap and tap.take(*noted)

    def silent(self, one: bool) -> bool:
        """Whether a module may be silent, as far as can be told in little time.

        With `one`, it is enough that something came from one of them.
        """
        return True

    def ready(self) -> dict[str, Kept]:
        """By place, the values of modules that have only one, before taps are made."""
        found: dict[int, Kept | None] = {}
        for entry in self.entries:
            ident = entry[0]
            found[ident] = None if ident in found else self.only(entry)
        names = [(self.names.get(ident, "*"), kept) for ident, kept in found.items()]
        return {path + self.suffix: kept for path, kept in names if kept and escape(path) == path}

    def only(self, entry: Any) -> Kept | None:
        """What is kept of an entry, if its module has no other."""
        return entry[1:]

    def release(self) -> None:
        """Let go of the modules: a record does not keep them alive. If there are taps, of these."""
        self.steps, self.modules = [], {}
        if self.taps:
            self.sort()
            self.taps, self.entries, self.sorted = {}, [], 0


class OutputLog(Log):
    """The outputs of modules, in the order of the calls."""

    # An entry is the id of the module, the value and what to check on reading.
    looked = 0  # how many entries are known to `within`
    inside: set[int] | None = None  # the ids of entries that came in a backward
    outside: set[int]  # the modules that were called outside of one

    @outside_graphs
    def after_call(
        self,
        module: nn.Module,
        args: Any,
        output: Any,
        # Found more quickly here than as names of this file.
        active: Callable[[], frozenset[int | None]] = ACTIVE.get,
        backward_id: Callable[[], int] = backward_id,
        plain: type[Tensor] = Tensor,
        lazy: bool = LAZY,
        small: int = SMALL,
        bases: tuple[type, ...] = BASES,
        id: Callable[[object], int] = id,  # noqa: A002 - the builtin itself
        /,
    ) -> None:
        """The forward hook."""
        if self.owner not in active():
            return self.stranger(module)
        if backward_id() != -1:
            return self.within(id(module), output)
        if type(output) is not plain:
            self.entries.append((id(module), *self.options.keeps(output)))
            return None
        kept = version = None
        try:
            if (grad := output.requires_grad) and not self.options.detach:
                kept, version = output, version_of(output)
            elif (size := output.nbytes) < small and not grad and output.is_contiguous():
                kept = output.clone()
            elif lazy and output.is_cpu and not output.is_quantized:
                # The commonest snapshot, of all of its memory; others as in snapshots.py.
                storage = output.untyped_storage()
                if storage.nbytes() == size and storage.resizable():
                    if not grad:
                        if use_count(output) == 1:
                            kept = lazy_clone(output)
                    elif type(base_of(output)) in bases:
                        kept = lazy_clone(output.detach())
        except RuntimeError:  # no version (inference mode) or no storage (sparse, nested, vmap)
            pass
        self.entries.append((id(module), snapshot(output) if kept is None else kept, version))
        return None

    def within(self, ident: int, output: Any) -> None:
        """A call in a backward, unless it repeats one from outside: see `Site.recomputes`."""
        if self.inside is None:
            self.inside, self.outside = set(), set()
        start, self.looked = self.looked, len(self.entries)
        self.outside |= {entry[0] for entry in self.entries[start:] if id(entry) not in self.inside}
        if ident not in self.outside:
            entry = (ident, *self.options.keeps(output))
            self.inside.add(id(entry))
            self.entries.append(entry)

    def silent(self, one: bool) -> bool:
        if one and self.entries and self.entries[0][0] in self.names:
            return False
        return not {entry[0] for entry in self.entries} >= self.names.keys()


class _LastTap(LoggedTap):
    """The last output of a module, kept in a way that torch.compile takes into its graphs."""

    log: Any = Log  # in a copied module
    slot: Tensor | None = None  # the value of the last compiled call, if no other came since
    _kept: list[Kept] = []  # noqa: RUF012 - in a copied module, and never added to

    def _get_kept(self) -> list[Kept]:
        return self._kept if self.slot is None else [(self.slot, None)]

    def _set_kept(self, kept: list[Kept]) -> None:
        self._kept, self.slot = kept, None

    kept: Any = property(_get_kept, _set_kept)

    def after_call(self, module: nn.Module, args: Any, output: Any, /) -> None:
        """The forward hook."""
        # In a graph no version can be read and no copy-on-write made, but a copy costs little.
        inside = torch.compiler.is_compiling() and self.log.in_graph
        if not inside or type(output) is not Tensor:  # it does not follow into nested values
            self.keep(module, output)
        else:
            self.slot = output.detach().clone() if self.options.detach else output.clone()

    @outside_graphs
    def keep(self, module: nn.Module, output: Any) -> None:
        """Keep what a call has returned, outside of graphs."""
        if module is not self.module or self.log.owner not in ACTIVE.get():
            self.stranger(module)
        elif self.recomputes() is None:
            self.kept = [self.options.keeps(output)]
            self.fired += 1

    def stranger(self, module: nn.Module) -> None:
        if self.module is None:  # a copied module
            self.unregister(module)
        else:
            self.log.stranger(module)


class LastLog(Log):
    """The last output of each module, also in compiled graphs: a hook of its own at each."""

    kind = _LastTap

    def hook(self, steps: list[Step]) -> None:
        for step in steps:
            path, module = step
            if id(module) not in self.taps:
                tap = _LastTap(self, path, module, id(module))
                hooks = forward_hooks_of(module)
                # A shallow copy, which is another module, has its hooks in common with it.
                tap.key = next(KEYS) if self.key in hooks else self.key
                self.taps[id(module)] = tap
                self.steps.append(step)
                hooks[tap.key] = tap.after_call

    def unhook(self) -> None:
        for _, module in self.steps:
            forward_hooks_of(module).pop(self.taps[id(module)].key, None)
        super().unhook()
