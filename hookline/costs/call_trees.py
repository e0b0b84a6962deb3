"""Which call of which module something happens in, forward and backward.

- `CallTree(model)`: a context that follows all calls while a model runs
- `Step`: one call of one module, with the call that it was made from

Forwards are followed by hooks. In a backward, the sequence number of an autograd node tells in
which call the node was made: the numbers count up, so each call has a range of them.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookline.core.arguments import bind
from hookline.core.contexts import Entering
from hookline.core.gradients import sequence
from hookline.core.places import resolve
from hookline.core.sites import ACTIVE, Site
from hookline.core.taps import SERIALS, is_over
from hookline.costs.flops import no_dispatch
from hookline.costs.footprints import Footprint, Noted, footprint_of, is_plain, note
from hookline.costs.shortcuts import flops_of_linear, settings_of
from hookline.costs.summaries import shapes_of

__all__ = ["CallTree", "Step"]

# Under a mode, to read the shape of a tensor is a torch call that the mode sees.
_no_modes: Any = torch._C.DisableTorchFunction
_NOTHING: dict[str, Any] = {}
_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_level: Any = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_UP = 6  # frames of Python from `begin` to torch's that runs the hooks of the module above


class Step:
    """One call of one module, in the tree of calls."""

    # Of all below, what is not set is as it stands here: that makes a step quick to make.
    running: Any = None  # torch's frame that runs its hooks, until it is complete
    given: Any = None  # the shape of its argument if that is one plain tensor, else shapes by name
    made: Noted | None = None  # its output, once it is complete
    flops = 0
    backward: float = 0  # FLOPs, or seconds where those are measured
    all_flops = 0  # with those of the calls made in it, once they were added up
    all_backward: float = 0
    begun = 0.0
    seconds = 0.0
    stop = 0  # the first autograd node that is made after it
    inner = False  # whether it called other modules
    key: Any = None  # what its FLOPs depend on, if that is known

    def __init__(self, path: str, module: nn.Module, parent: Step | None) -> None:
        self.path, self.module, self.parent = path, module, parent
        self.start = sequence()  # the first autograd node that is made in it

    @property
    def bytes(self) -> int:
        """Of the output."""
        return 0 if self.made is None else footprint_of(self.made).bytes

    def above(self) -> set[str]:
        """The modules in whose calls this one stands, its own too; a recursive one once."""
        found: set[str] = set()
        step: Step | None = self
        while step is not None:
            found.add(step.path)
            step = step.parent
        return found


class _Site(Site):
    """The hooks of a tree, the same ones on all modules: that makes them quick to register."""

    tree: Any = None

    def prepare(self) -> None:
        self.paired = True  # both hooks are wanted

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module whose calls are seen here."""
        if self.tree is None or self.owner not in ACTIVE.get():
            self.stranger(module)
            return None
        return self.tree.paths.get(id(module))

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """The pre-forward hook."""
        path = self.path_of(module)
        if path is None:
            return
        tree = self.tree
        if tree.guards is not None:
            tree.wake(late=True)
        modes = _no_modes()
        modes.__enter__()
        known = False
        try:
            known = tree.begin(path, module, args, kwargs or _NOTHING)
        finally:
            if known:  # no mode has to see what the module does
                tree.guards = modes, no_dispatch()
            else:
                modes.__exit__(None, None, None)

    def after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """The forward hook."""
        path = self.path_of(module)
        if path is None:
            return
        tree = self.tree
        if tree.guards is not None and tree.steps[-1].path is path:
            tree.steps[-1].made = note(rest[-1])
            tree.finish(tree.steps[-1])
            tree.wake()
            return
        if tree.guards is not None:
            tree.wake(late=True)
        with _no_modes():
            tree.end(rest[-1], sys._getframe(1))


class CallTree(Entering):
    """Follows the calls of all modules, and what happens in each of them.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with torch.no_grad(), CallTree(model) as tree:
    ...     _ = model(torch.zeros(5, 2))
    >>> [(step.path, step.bytes) for step in tree.steps]
    [('', 60), ('0', 60), ('1', 60)]

    Args:
        model: any module.
        clock: a function that tells the time. With one, calls are timed, and nothing else.
    """

    _verb = "summarize"
    _wheres = ("**",)
    _serial = 0
    _site: _Site | None = None

    def __init__(self, model: nn.Module, clock: Callable[[], float] | None = None) -> None:
        super().__init__(model)
        self.clock = clock
        self.stack: list[Step] = []
        self.steps: list[Step] = []
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}
        self.settings: dict[int, Any] = {}  # what the FLOPs of a module's calls depend on
        self.texts: dict[torch.Size, str] = {}
        self.names: dict[type, str] = {}  # of the first argument of a kind of module
        self.outside = self.outside_backward = 0  # FLOPs in no call
        self.known: dict[Any, int] = {}  # FLOPs of calls of simple modules
        self.remembers = False  # whether such calls are counted only once
        self.certain = False  # whether some need not be counted at all
        self.guards: Any = None  # that keep modes off while such a call runs
        self.doubtful = False  # whether they were on while something else ran

    def _start(self, attached: bool) -> None:
        self.modules, self.paths = [], {}
        for request in resolve(self._model, (nn.Module,)):
            for target in request.targets:
                self.modules.append(target.module)
                self.paths[id(target.module)] = target.path
        self._serial = next(SERIALS)
        site = self._site = _Site(self._model, weakref.ref(self), self._serial)
        site.tree = self
        for module in self.modules:
            site.register(module)
        ACTIVE.set(ACTIVE.get() | {self._serial})

    def _stop(self) -> None:
        if self.guards is not None:
            self.wake(late=True)
        if self._site is not None:
            self._site.tree = None
            for module in self.modules:
                self._site.unregister(module)
        ACTIVE.set(ACTIVE.get() - {self._serial})

    def trust(self, certain: bool) -> None:
        """From now on calls of simple modules are counted once, or not at all."""
        self.remembers, self.certain = True, certain
        settings = [(id(module), settings_of(module)) for module in self.modules]
        self.settings = {ident: found for ident, found in settings if found is not None}

    def wake(self, late: bool = False) -> None:
        """Let modes see what happens, for the call has ended; or, if that is late, had raised."""
        modes, _ = self.guards
        self.guards = None
        self.doubtful |= late
        modes.__exit__(None, None, None)

    def hooked(self) -> set[str]:
        """The modules that can be seen."""
        return set(self.paths.values())

    def begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """A module is called; whether its FLOPs are known."""
        stack = self.stack
        if stack and stack[-1].running is not _frame(_UP):  # it is not called by its forward
            self._now()
        step = Step(path, module, stack[-1] if stack else None)
        self.steps.append(step)
        if stack:
            stack[-1].inner = True
        if self.clock is None:
            plain = not kwargs and len(args) == 1 and is_plain(args[0])
            step.given = args[0].shape if plain else _named(module, args, kwargs)
            settings = self.settings.get(id(module)) if plain else None
            if settings is not None and self._is_known(step, settings, module):
                return True
        else:
            step.begun = self.clock()
        step.running = sys._getframe(2)
        stack.append(step)
        return False

    def _is_known(self, step: Step, settings: Any, module: nn.Module) -> bool:
        """Whether the FLOPs of a call need not be counted."""
        # Others' hooks may compute, too; inside vmap, tensors have more than they show.
        alone = len(module.__dict__["_forward_hooks"]) == 1
        if not alone or _level() is not None or _node() is not None:
            return False
        if self.certain and type(settings) is type:
            return True
        if self.certain and type(settings) is torch.Size and len(step.given) > 1:
            step.key = flops_of_linear
            return True
        step.key = step.given, settings
        step.flops = self.known.get(step.key, 0)
        return step.key in self.known

    def inputs_of(self, step: Step) -> Any:
        """The shapes of the arguments of a call by name."""
        shape, module = step.given, step.module
        if type(shape) is not torch.Size:
            return shape
        if shape not in self.texts:  # there are few in a model
            self.texts[shape] = str(tuple(shape))
        kind = type(module)
        if kind not in self.names or "forward" in module.__dict__:
            (self.names[kind],) = map(str, bind(module, (None,), _NOTHING))
        return {self.names[kind]: self.texts[shape]}

    def _now(self) -> Step | None:
        """The innermost running call."""
        stack = self.stack
        while stack and is_over(stack[-1].running):  # it raised, and someone caught that
            stack.pop()
        return stack[-1] if stack else None

    def end(self, output: Any, running: Any) -> None:
        """A call is complete."""
        now = 0.0 if self.clock is None else self.clock()
        stack = self.stack
        while stack and stack[-1].running is not running and is_over(stack[-1].running):
            stack.pop()
        if not stack or stack[-1].running is not running:
            return  # this was entered while the module was running
        step = stack.pop()
        if self.clock is None:
            step.made = note(output)
        else:
            step.seconds = now - step.begun
        self.finish(step)

    def finish(self, step: Step) -> None:
        """All is known of a call."""
        step.running, step.stop = None, sequence()
        if step.key is flops_of_linear:
            if step.made is None or isinstance(step.made, Footprint):  # no plain tensor
                self.doubtful = True
            else:
                step.flops = flops_of_linear(step.given, step.made[0])
        elif step.key is not None and not step.inner:
            self.known[step.key] = step.flops

    def count(self, flops: int) -> None:
        """FLOPs happen now."""
        step, node = self._now(), _node()
        if node is None:
            if step is None:
                self.outside += flops
            else:
                step.flops += flops
            return
        # In a backward: of a call that is being recomputed, or of the one that made the node.
        step = step or self.maker(node._sequence_nr())
        if step is None:
            self.outside_backward += flops
        else:
            step.backward += flops

    def maker(self, number: int) -> Step | None:
        """The innermost call in which the autograd node with this number was made."""
        place = bisect_right(self.steps, number, key=_start_of) - 1
        step = self.steps[place] if place >= 0 else None
        while step is not None and number >= step.stop:
            step = step.parent
        return step


def _start_of(step: Step) -> int:
    return step.start


def _frame(up: int) -> Any:
    try:
        return sys._getframe(up + 1)
    except ValueError:  # there are not so many
        return None


def _named(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The shapes of arguments by name."""
    return {str(name): shapes_of(value) for name, value in bind(module, args, kwargs).items()}
