"""Which call of which module something happens in, forward and backward.

- `CallTree(model)`: a context that follows all calls while a model runs
- `Step`: one call of one module, with the call that it was made from

Forwards are followed by hooks. In a backward, the sequence number of an autograd node tells in
which call the node was made: the numbers count up, so each call has a range of them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from hookline.core.arguments import bind
from hookline.core.gradients import sequence
from hookline.core.hooks import Context
from hookline.core.places import Request, Target, resolve
from hookline.core.sites import ACTIVE, Site
from hookline.core.taps import Tap, is_over
from hookline.costs.flops import no_dispatch, settings_of
from hookline.costs.footprints import Noted, footprint_of, is_plain, note
from hookline.costs.summaries import shapes_of

__all__ = ["CallTree", "Step"]

# Under a mode, to read the shape of a tensor is a torch call that the mode sees.
_no_modes: Any = torch._C.DisableTorchFunction
_NOTHING: dict[str, Any] = {}
_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)


class Step:
    """One call of one module, in the tree of calls."""

    # Of all below, what is not set is as it stands here: that makes a step quick to make.
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

    def __init__(self, path: str, parent: Step | None, running: Any) -> None:
        self.path, self.parent, self.running = path, parent, running
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
    """The hooks of a tree on one module: with less to do in a call than other contexts have."""

    path = ""
    tree: Any = None  # a weak reference
    settings: Any = None  # what the FLOPs of its calls depend on, if that is known

    def prepare(self) -> None:
        self.paired = True  # both hooks are wanted

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """The pre-forward hook."""
        tree = self.tree() if module is self.module and self.owner in ACTIVE.get() else None
        if tree is None or self.closed:
            return
        if tree.guards is not None:
            tree.wake()
        modes = _no_modes()
        modes.__enter__()
        known = False
        try:
            known = tree.begin(module, self, args, kwargs or _NOTHING, sys._getframe(1))
        finally:
            if known:  # no mode has to see what the module does
                tree.guards = modes, no_dispatch()
            else:
                modes.__exit__(None, None, None)

    def after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """The forward hook."""
        tree = self.tree() if module is self.module and self.owner in ACTIVE.get() else None
        if tree is None or self.closed:
            return
        guards, tree.guards = tree.guards, None
        if guards is None:
            with _no_modes():
                tree.end(rest[-1], sys._getframe(1))
            return
        try:
            tree.end(rest[-1], sys._getframe(1))
        finally:
            guards[0].__exit__(None, None, None)


class CallTree(Context[Tap]):
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
    _owned = True

    def __init__(self, model: nn.Module, clock: Callable[[], float] | None = None) -> None:
        super().__init__(model, ("**",))
        self.clock = clock
        self.stack: list[Step] = []
        self.steps: list[Step] = []
        self.starts: list[int] = []
        self.given: dict[str, Any] = {}  # what is kept of the arguments of each module's first call
        self.texts: dict[torch.Size, str] = {}
        self.names: dict[type, str] = {}  # of the first argument of a kind of module
        self.outside = self.outside_backward = 0  # FLOPs in no call
        self.known: dict[Any, int] = {}  # FLOPs of calls of simple modules
        self.remembers = False  # whether such calls are counted only once
        self.guards: Any = None  # that keep modes off while such a call runs

    def _resolve(self) -> list[Request]:
        return resolve(self._model, (nn.Module,))

    def _place_all(self, targets: list[Target], ref: Any, owner: int | None) -> None:
        for target in targets:
            module = target.module
            site = _Site(module, ref, owner)
            site.path, site.tree = target.path, ref
            site.settings = None if self.clock else settings_of(module)
            self._sites[target.ident] = (module, site)

    def _stop(self) -> None:
        self.wake()
        super()._stop()

    def wake(self) -> None:
        """The call has ended, or raised; fine if nothing is asleep."""
        if self.guards is not None:
            function, _ = self.guards
            self.guards = None
            function.__exit__(None, None, None)

    def hooked(self) -> set[str]:
        """The modules that can be seen."""
        return {target.path for request in self._requests for target in request.targets}

    def _verify(self) -> None:
        """That a module was not called is told in the summary, and no error."""

    def begin(self, module: nn.Module, site: _Site, args: Any, kwargs: Any, running: Any) -> bool:
        """A module is called; whether its FLOPs are known."""
        above, path = self._now(), site.path
        step = Step(path, above, running)
        if above is not None:
            above.inner = True
        self.stack.append(step)
        self.steps.append(step)
        self.starts.append(step.start)
        if self.clock is not None:
            step.begun = self.clock()
            return False
        plain = not kwargs and len(args) == 1 and is_plain(args[0])
        if path not in self.given:
            self.given[path] = self._given(module, args, kwargs, plain)
        settings = site.settings
        if settings is None or not plain or not self.remembers or _node() is not None:
            return False
        if len(module.__dict__["_forward_hooks"]) == 1:  # others' hooks may compute, too
            free = isinstance(settings, type)
            key = step.key = settings if free else (args[0].shape, settings)
            if key in self.known:
                step.flops = self.known[key]
                return True
        return False

    def _given(self, module: nn.Module, args: Any, kwargs: Any, plain: bool) -> Any:
        """What is kept of the arguments: shapes by name, quickly if there is but one tensor."""
        if not plain or "forward" in module.__dict__:
            given = bind(module, args, kwargs)
            return {str(name): shapes_of(value) for name, value in given.items()}
        kind = type(module)
        if kind not in self.names:
            (self.names[kind],) = map(str, bind(module, args, kwargs))
        return self.names[kind], args[0].shape

    def inputs_of(self, path: str) -> dict[str, Any] | None:
        """The shapes of the arguments by name, in the first call of a module."""
        given: Any = self.given.get(path)
        if type(given) is not tuple:
            return given
        name, shape = cast("tuple[str, torch.Size]", given)
        if shape not in self.texts:  # there are few in a model
            self.texts[shape] = str(tuple(shape))
        return {name: self.texts[shape]}

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
        step.running, step.stop = None, sequence()
        if self.clock is not None:
            step.seconds = now - step.begun
            return
        key = step.key
        # A formula of the user's may give FLOPs to what else has none: then nothing is known.
        if key is not None and not step.inner and not (step.flops and isinstance(key, type)):
            self.known[key] = step.flops
        step.made = note(output)

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
        place = bisect_right(self.starts, number) - 1
        step = self.steps[place] if place >= 0 else None
        while step is not None and number >= step.stop:
            step = step.parent
        return step
