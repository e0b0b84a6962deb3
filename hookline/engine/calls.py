"""Calls of modules: those that are running, and what functions learn of one.

- `RunningCall`: a call of a module or an operation, from its first hook to its last
- `Call`: which execution of which module a value belongs to, for functions that ask
- `module_id(subject)`: the id of the module that events belong to
- `key_of(call)`: the key of the target at which a value was met
- `is_over(frame)`: whether a Python frame has finished
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from hookline.engine.module_hooks import SERIALS
from hookline.places.grammar import Place

if TYPE_CHECKING:
    from hookline.engine.checkpointing import FirstRun
    from hookline.engine.generation import Step
    from hookline.engine.handlers import Handler

__all__ = ["Call", "RunningCall", "Subject", "is_over", "key_of", "module_id"]

# What an event belongs to: a module, by its id; an operation, by the module's id and its own name;
# a parameter or buffer, by the key of its target.
Subject = Any

_SERIAL = "hookline call"  # the name in the locals of a frame


class RunningCall:
    """A call of a module or an operation, from its first hook to its last.

    `frame` is the Python frame of torch's that calls both hooks. A call that raises has a first
    hook but no last one, and a recursive module has several calls at a time: only the frame tells
    which hooks belong together.
    """

    __slots__ = (
        "args", "edges", "first_run", "frame", "given", "graph_discarded", "kwargs", "number",
        "pending", "positional", "recomputed", "sequence", "simple", "step", "subject",
    )  # fmt: skip

    def __init__(self, subject: Subject, frame: types.FrameType | None) -> None:
        self.subject = subject
        self.frame = frame  # None for a gradient that arrives
        # While it runs, the lowest number that it may get; then the number by completion. Of a
        # recomputed call, that of the call which is repeated.
        self.number = 0
        self.recomputed = False
        # Of a recomputed call: whether the first run made the graph in use, not this one.
        self.graph_discarded = False
        self.first_run: FirstRun | None = None  # what checkpointed regions remember of it
        self.simple = False  # whether the shortcut for gradients takes it
        self.step: Step | None = None  # of a generation, where calls are chosen by it
        self.positional = 0  # how many arguments were passed by position
        self.args: tuple[Any, ...] = ()  # the arguments, once the call is complete
        self.kwargs: Mapping[str, Any] = {}
        self.pending: list[Any] = []  # events of what came as it began, until it is complete
        # For gradients, as the call began: the number of the next autograd node, the tensors that
        # were passed in, and what is noted of the inputs that are asked for.
        self.sequence = 0
        self.given: list[tuple[Tensor, Any, int, int]] = []
        self.edges: list[Any] = []

    @property
    def serial(self) -> int:
        """The number of this call, the same for all contexts; it ends with the frame."""
        assert self.frame is not None
        return self.frame.f_locals.setdefault(_SERIAL, next(SERIALS))


class Call:
    """Which execution of which module a value belongs to; given to functions that ask for it.

    `positional` says how many of the arguments were passed by position. At an output, `args` and
    `kwargs` are the arguments of the call, as the forward got them.
    """

    __slots__ = ("_handler", "args", "index", "kwargs", "module", "positional", "recomputed")

    def __init__(self, handler: Handler, call: RunningCall) -> None:
        self._handler = handler
        self.module = handler.target.module
        self.index = call.number
        self.recomputed = call.recomputed
        self.positional = call.positional
        self.args = call.args
        self.kwargs = call.kwargs

    @property
    def place(self) -> Place:
        """The place of the value, under the module's first name."""
        return self._handler.place

    @property
    def at(self) -> Any:
        """The slice of the value that an edit is for (its `at=`), or None."""
        return getattr(self._handler, "at", None)

    def __repr__(self) -> str:
        again = ", recomputed" if self.recomputed else ""
        return f"Call({str(self.place)!r}, {self.index}{again})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):  # other libraries give such functions the layer's name
            raise TypeError(f"A call was compared with {other!r}. Its name is call.place.")
        return self is other

    __hash__ = object.__hash__


def module_id(subject: Subject) -> int:
    """Return the id of the module of a subject that is no parameter or buffer."""
    return cast(int, subject[0] if type(subject) is tuple else subject)


def key_of(call: Call) -> Any:
    """Return the key of the target at which a value was met."""
    return call._handler.target.key


def is_over(frame: types.FrameType) -> bool:
    """Return True if a Python frame has finished: only then can it be cleared."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True
