"""Which call of which module something happens in, forward and backward.

- `CallTree(model)`: a context that follows all calls while a model runs
- `size_of(tensor)`: its bytes
- `Step`: one call of one module, with the call that it was made from

Forwards are followed by hooks. In a backward, the sequence number of an autograd node tells in
which call the node was made: the numbers count up, so each call has a range of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.core.gradients import is_over, sequence
from hookline.core.hooks import Context
from hookline.core.nested import leaves
from hookline.core.places import Request, Target, resolve
from hookline.core.sites import KEEP, Frame, Tap
from hookline.core.tables import bytes_of
from hookline.summaries import shapes_of

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
        "backward", "begun", "bytes", "flops", "inner", "parent", "path", "running", "seconds",
        "start", "stop",
    )  # fmt: skip

    def __init__(self, path: str, parent: Step | None, running: Any) -> None:
        self.path, self.parent, self.running = path, parent, running
        self.start, self.stop = sequence(), 0  # of the autograd nodes that are made in it
        self.flops = self.bytes = 0
        self.backward: float = 0  # FLOPs, or seconds where those are measured
        self.begun = self.seconds = 0.0
        self.inner = False  # whether it called other modules

    def above(self) -> set[str]:
        """The modules in whose calls this one stands, its own too; a recursive one once."""
        found: set[str] = set()
        step: Step | None = self
        while step is not None:
            found.add(step.path)
            step = step.parent
        return found


class _Begin(Tap):
    replaces = False

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        cast("CallTree", self.context()).begin(self.target.path, value, cast(Frame, frame).running)
        return KEEP


class _End(Tap):
    replaces = False

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        cast("CallTree", self.context()).end(self.target.path, value)
        return KEEP


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

    def _resolve(self) -> list[Request]:
        return resolve(self._model, ((_every, ":inputs"), _every))

    def _tap(self, target: Target, ref: Any) -> Tap:
        return _Begin(target, ref) if target.port == "inputs" else _End(target, ref)

    @cached_property
    def hooked(self) -> set[str]:
        """The modules that can be seen."""
        return {target.path for request in self._requests for target in request.targets}

    def _verify(self) -> None:
        """That a module was not called is told in the summary, and no error."""

    def begin(self, path: str, inputs: Any, running: Any) -> None:
        """A module is called."""
        with _no_modes():
            self._begin(path, inputs, running)

    def _begin(self, path: str, inputs: Any, running: Any) -> None:
        above = self._now()
        step = Step(path, above, running)
        if above is not None:
            above.inner = True
        self.stack.append(step)
        self.steps.append(step)
        self.starts.append(step.start)
        if self.clock is not None:
            step.begun = self.clock()
        elif path not in self.seen:
            self.seen[path] = shapes_of(inputs), None, None

    def _now(self) -> Step | None:
        """The innermost running call."""
        stack = self.stack
        while stack and is_over(stack[-1].running):  # it raised, and someone caught that
            stack.pop()
        return stack[-1] if stack else None

    def end(self, path: str, output: Any) -> None:
        """A call is complete."""
        with _no_modes():
            self._end(path, output)

    def _end(self, path: str, output: Any) -> None:
        now = 0.0 if self.clock is None else self.clock()
        step = self._now()
        if step is None or step.path != path:  # this was entered while the module was running
            return
        self.stack.pop()
        step.running, step.stop = None, sequence()
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
