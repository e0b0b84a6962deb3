"""Which call of which module something happens in, forward and backward.

- `CallTree(model)`: a context that follows all calls while a model runs
- `size_of(tensor)`: its bytes
- `Step`: one call of one module, with the call that it was made from

Forwards are followed by hooks. In a backward, the sequence number of an autograd node tells in
which call the node was made: the numbers count up, so each call has a range of them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hookline.core.arguments import bind
from hookline.core.gradients import sequence
from hookline.core.hooks import Context
from hookline.core.nested import leaves
from hookline.core.places import Request, Target, resolve
from hookline.core.sites import ACTIVE, Site
from hookline.core.tables import bytes_of
from hookline.core.taps import Tap, is_over
from hookline.costs.flops import key_of, no_dispatch
from hookline.costs.summaries import shapes_of

__all__ = ["CallTree", "Step", "size_of"]

_PLAIN = (Tensor, nn.Parameter)
# Under a mode, to read the shape of a tensor is a torch call that the mode sees.
_no_modes: Any = torch._C.DisableTorchFunction
_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor; quickly, as most are plain."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.nbytes if plain else bytes_of(tensor)


class Step:
    """One call of one module, in the tree of calls."""

    __slots__ = (
        "backward", "begun", "bytes", "flops", "inner", "key", "parent", "path",
        "running", "seconds", "start", "stop",
    )  # fmt: skip

    def __init__(self, path: str, parent: Step | None, running: Any) -> None:
        self.path, self.parent, self.running = path, parent, running
        self.start, self.stop = sequence(), 0  # of the autograd nodes that are made in it
        self.flops = self.bytes = 0
        self.backward: float = 0  # FLOPs, or seconds where those are measured
        self.begun = self.seconds = 0.0
        self.inner = False  # whether it called other modules
        self.key: Any = None  # what its FLOPs depend on, if that is known

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

    def prepare(self) -> None:
        self.paired = True  # both hooks are wanted

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """The pre-forward hook."""
        tree = self._tree(module)
        if tree is not None:
            tree.wake()
            with _no_modes():
                known = tree.begin(module, self.path, args, kwargs or {}, sys._getframe(1))
            if known:
                tree.sleep()

    def after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """The forward hook."""
        tree = self._tree(module)
        if tree is not None:
            tree.wake()
            with _no_modes():
                tree.end(self.path, rest[-1])

    def _tree(self, module: nn.Module) -> CallTree | None:
        ours = not self.closed and module is self.module and self.owner in ACTIVE.get()
        return self.tree() if ours else None


def _every(name: str, module: nn.Module) -> bool:
    return True


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
        # The shapes of each module's first inputs and output, and the output's first dtype.
        self.seen: dict[str, tuple[Any, Any, str | None]] = {}
        self.varies: set[str] = set()
        self.outside = self.outside_backward = 0  # FLOPs in no call
        self.known: dict[Any, int] = {}  # FLOPs of calls of simple modules
        self.remembers = False  # whether such calls are counted only once
        self.guards: Any = None  # that keep modes off while such a call runs

    def _resolve(self) -> list[Request]:
        return resolve(self._model, (_every,))

    def _place(self, target: Target, ref: Any, owner: int | None) -> None:
        self._taps[target.key] = Tap(target, ref)
        site = _Site(target.module, ref, owner)
        site.path, site.tree = target.path, ref
        self._sites[target.ident] = (target.module, site)

    def _stop(self) -> None:
        self.wake()
        super()._stop()

    def sleep(self) -> None:
        """Let no mode see the operations of the call that begins: what they cost is known."""
        function = _no_modes()
        function.__enter__()
        self.guards = function, no_dispatch()

    def wake(self) -> None:
        """The call has ended, or raised; fine if nothing is asleep."""
        if self.guards is not None:
            function, _ = self.guards
            self.guards = None
            function.__exit__(None, None, None)

    @cached_property
    def hooked(self) -> set[str]:
        """The modules that can be seen."""
        return {target.path for request in self._requests for target in request.targets}

    def _verify(self) -> None:
        """That a module was not called is told in the summary, and no error."""

    def begin(self, module: nn.Module, path: str, args: Any, kwargs: Any, running: Any) -> bool:
        """A module is called; whether its FLOPs are known."""
        above = self._now()
        step = Step(path, above, running)
        if above is not None:
            above.inner = True
        self.stack.append(step)
        self.steps.append(step)
        self.starts.append(step.start)
        if self.clock is not None:
            step.begun = self.clock()
            return False
        if path not in self.seen:
            given = bind(module, args, kwargs)
            shapes: Any = {str(name): shapes_of(value) for name, value in given.items()}
            self.seen[path] = shapes, None, None
        if self.remembers and _node() is None:
            step.key = key_of(module, args, kwargs)
            step.flops = self.known.get(step.key, 0)
            return step.key in self.known
        return False

    def _now(self) -> Step | None:
        """The innermost running call."""
        stack = self.stack
        while stack and is_over(stack[-1].running):  # it raised, and someone caught that
            stack.pop()
        return stack[-1] if stack else None

    def end(self, path: str, output: Any) -> None:
        """A call is complete."""
        now = 0.0 if self.clock is None else self.clock()
        step = self._now()
        if step is None or step.path != path:  # this was entered while the module was running
            return
        self.stack.pop()
        step.running, step.stop = None, sequence()
        # A formula of the user's may give FLOPs to what else has none: then nothing is known.
        by_kind = isinstance(step.key, type) and bool(step.flops)
        if step.key is not None and not step.inner and not by_kind:
            self.known[step.key] = step.flops
        if self.clock is not None:
            step.seconds = now - step.begun
            return
        tensors = [output] if type(output) is Tensor else [tensor for _, tensor in leaves(output)]
        distinct = {id(tensor): tensor for tensor in tensors}
        step.bytes = sum([size_of(tensor) for tensor in distinct.values()])
        inputs, known, dtype = self.seen[path]
        shapes = shapes_of(output)
        if dtype is None:
            dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
            self.seen[path] = inputs, shapes, dtype
        elif known != shapes:
            self.varies.add(path)

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
