"""Torch functions that are called inside a forward: the `/operation[#n]` of a place.

One TorchFunctionMode for each thread sees every torch call, as long as a context with such places
is open there. It looks at the calls in the own forward of a module of which operations are asked,
which it finds from the Python frames; all others pass through.

- `Operation`: one operation of one module, of which a context asks something
- `Mode`: sees the torch calls of a thread; `innermost` and `name_of` tell what they are
- `refuse(requests)`: the error where operations cannot be seen
- `not_called(name, others)`: why nothing happened at an operation
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookline.engine import arguments
from hookline.engine.calls import RunningCall
from hookline.engine.module_hooks import ACTIVE, CLOSED
from hookline.errors import NotHookable
from hookline.places.resolution import Request
from hookline.torch_checks import require
from hookline.torch_private import (
    CALL_CODE,
    INNER_CALL_CODE,
    backward_id,
    current_function_modes,
    pop_function_mode,
    push_function_mode,
)
from hookline.values.nested import leaves, map_leaves, set_part

if TYPE_CHECKING:
    from hookline.engine.asks import Plan
    from hookline.engine.tracer import Tracer

__all__ = ["Mode", "Operation", "innermost", "name_of", "not_called", "refuse"]

# torch's names for what Python writes as operators, where they differ.
_OPERATORS = {
    "rdiv": "div", "rtruediv": "div", "rpow": "pow", "floordiv": "floor_divide",
    "rfloordiv": "floor_divide", "mod": "remainder", "rmod": "remainder", "invert": "bitwise_not",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "iand": "bitwise_and_",
    "ior": "bitwise_or_", "ixor": "bitwise_xor_", "ilshift": "lshift_", "irshift": "rshift_",
}  # fmt: skip
_names: dict[Any, str] = {}


def name_of(function: Any) -> str:
    """Return the name of a torch function, method, operator or property."""
    name = _names.get(function)
    if name is None:
        name = cast(str, getattr(function, "__name__", ""))
        if name == "__get__":
            name = cast(str, function.__self__.__name__)
        if name.startswith("__"):
            name = _OPERATORS.get(name.strip("_"), name.strip("_"))
        _names[function] = name
    return name


def innermost(frame: FrameType | None) -> tuple[nn.Module, FrameType] | None:
    """Return the module in whose own forward a frame stands, and torch's frame that called it."""
    below: CodeType | None = None
    while frame is not None:
        code = frame.f_code
        if code is CALL_CODE:
            module: nn.Module = frame.f_locals["self"]
            forward: Any = module.forward
            own = getattr(getattr(forward, "__func__", forward), "__code__", below)
            return (module, frame) if own is below else None  # else it is a hook of the module
        if code is not INNER_CALL_CODE:
            below = code
        frame = frame.f_back
    return None


class Mode(TorchFunctionMode):
    """See every torch call of a thread while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[Operation]] = {}  # by id of module, in order of entering
        self.names: dict[str, int] = {}  # how many operations are for each name
        self.waiting = 0  # operations that never came: until then all names are of interest
        self.key = f"hookline {id(self)}"  # of the counts in a frame, which end with it

    def add(self, operation: Operation) -> None:
        """Serve one more operation; with the first the mode begins."""
        if not self.operations:
            self.resume()
        self.operations.setdefault(operation.ident, []).append(operation)
        self.names[operation.name] = self.names.get(operation.name, 0) + 1
        self.waiting += 1

    def resume(self) -> None:
        """Begin; in a backward, for which torch puts the mode aside, the engine drops it again."""
        if self not in current_function_modes():
            push_function_mode(self)

    def drop(self, operation: Operation) -> None:
        """Serve one operation less; with the last the mode ends."""
        served = self.operations.get(operation.ident, [])
        if operation not in served:
            return
        served.remove(operation)
        self.waiting -= not operation.called
        self.names[operation.name] -= 1
        if not self.names[operation.name]:
            del self.names[operation.name]
        if not served:
            del self.operations[operation.ident]
        if not self.operations:
            self.leave()

    def leave(self) -> None:
        """Take the mode off the stack, also from under others that were entered since.

        While it sees a call, torch has put it aside, and puts it back afterwards: then
        `Operation.leave` takes it off.
        """
        while self in current_function_modes():
            others: list[Any] = []
            while (top := pop_function_mode()) is not self:
                others.append(top)
            for other in reversed(others):
                push_function_mode(other)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name not in self.names and not self.waiting:
            return func(*args, **kwargs)
        found = innermost(sys._getframe(1))
        asked = self.operations.get(id(found[0])) if found else None
        if found is None or not asked:
            return func(*args, **kwargs)
        use = self.count(name, found[1])
        operations = [operation for operation in asked if operation.meets(name, use)]
        output = self.run(func, args, kwargs, operations)
        if self.waiting and leaves(output):
            for operation in asked:
                operation.names[name] = None
        for operation in operations:
            if not operation.called and operation in asked:  # else it was dropped meanwhile
                operation.called = True
                self.waiting -= 1
        return output

    def count(self, name: str, frame: FrameType) -> int:
        """Return how many operations of a name came before in this call of a module."""
        counts = frame.f_locals.setdefault(self.key, {})
        counts[name] = counts.get(name, -1) + 1
        return counts[name]

    def run(self, func: Any, args: Any, kwargs: Any, operations: list[Operation]) -> Any:
        """Call a function between what the operations do before and after it."""
        # The frame is never a local variable of its own: such a cycle holds all callers.
        given = args, kwargs
        replaces = any(operation.plan.replaces for operation in operations)
        written = _written(func, args, kwargs) if replaces else []
        # What works in place is often called without use of what it returns. Where values are to be
        # changed it works on a copy, which the backward may need as it is, as after `relu_`.
        if written:
            own = {id(tensor): tensor.clone() for tensor in written}
            args, kwargs = map_leaves(lambda leaf: own.get(id(leaf), leaf), given)
        for operation in operations:
            args, kwargs = operation.before(func, args, kwargs, sys._getframe())
        output = func(*args, **kwargs)
        for operation in operations:
            new = operation.after(args, kwargs, output, sys._getframe())
            output = output if new is None else new
        if not written:
            return output
        found = leaves(args[0] if output is None and args else output)  # `x[0] = y` returns nothing
        made = list(zip(written, found, strict=False))
        if any(new.shape != tensor.shape for tensor, (_, new) in made):  # as after `unsqueeze_`
            func(*given[0], **given[1])
        for tensor, (path, new) in made:
            output = set_part(output, path, tensor.copy_(new))
        return output


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a function writes to."""
    found = kwargs.get("out")
    given = arguments.bind(func, args, kwargs)
    if given.get("inplace") or name_of(func).endswith(("_", "setitem")):
        found = args[0] if args else given.get("input")
    return [tensor for _, tensor in leaves(found)]


class _Thread(threading.local):
    mode: Mode | None = None


_thread = _Thread()


class Operation:
    """One operation of one module, of which something is asked. The mode calls it, not a hook."""

    def __init__(self, tracer: Tracer, module: nn.Module, name: str, plan: Plan) -> None:
        self.tracer, self.plan = weakref.ref(tracer), plan
        self.ident = id(module)
        self.subject = self.ident, name
        self.name, _, nth = name.partition("#")
        self.nth = int(nth) if nth else None
        self.called = False
        self.names: dict[str, None] = {}  # the operations that were called there, in order
        self.mode: Mode | None = None

    def begin(self) -> None:
        """Begin to be called."""
        require("operations")
        if _thread.mode is None:
            _thread.mode = Mode()
        self.mode = _thread.mode
        self.mode.add(self)

    def end(self) -> None:
        """Be called no longer."""
        if self.mode is not None:
            self.mode.drop(self)

    def leave(self) -> None:
        """Take the mode off, if the context was removed while torch had put the mode aside."""
        if self.mode is not None and not self.mode.operations:
            self.mode.leave()

    def module_called(self, tracer: Tracer) -> None:
        """Be seen again in a checkpointed forward that a backward runs again."""
        if tracer.owner == CLOSED:
            return
        if backward_id() != -1:
            cast(Mode, self.mode).resume()
        elif _thread.mode is not self.mode:
            tracer.foreign[self.subject] += 1

    def meets(self, name: str, use: int) -> bool:
        """Return True if this is for the n-th use of an operation in a call of the module."""
        tracer = self.tracer()
        if tracer is None or name != self.name or self.nth not in (None, use):
            return False
        if tracer.owner not in ACTIVE.get():
            tracer.foreign[self.subject] += 1
            return False
        return True

    def before(self, function: Any, args: Any, kwargs: Any, frame: FrameType) -> tuple[Any, Any]:
        """Begin a call; return its arguments."""
        tracer = cast("Tracer", self.tracer())
        call = RunningCall(self.subject, frame)
        tracer.running[frame, self.subject] = call
        return tracer.begin(self.plan, call, function, args, kwargs) or (args, kwargs)

    def after(self, args: Any, kwargs: Any, output: Any, frame: FrameType) -> Any:
        """End a call; return its new output, or None."""
        tracer = cast("Tracer", self.tracer())
        call = tracer.running.pop((frame, self.subject), None)
        if call is None:  # the context was removed meanwhile
            return None
        call.args, call.kwargs = args, kwargs
        return tracer.end(self.plan, call, output)


def refuse(requests: Iterable[Request]) -> None:
    """Raise an error if something is to be attached to operations."""
    for request in requests:
        if request.operation is None and request.modules:
            continue
        for target in request.targets:
            if target.operation is not None:
                asked = f"attach() was asked for at {str(target.place)!r}."
                found = "Operations are seen by a mode of torch's that must end where it began."
                raise NotHookable(asked, found, "Use a `with` statement.")


def not_called(name: str, others: Iterable[str]) -> str:
    """Explain why nothing happened at an operation."""
    listed = ", ".join(dict.fromkeys(others)) or "no torch function at all"
    if name.startswith("softmax") and "scaled_dot_product_attention" in listed:
        listed += " (hookline.attention shows the patterns; to have a softmax to edit, models of "
        listed += 'transformers need attn_implementation="eager")'
    return f"its module's own forward never called {name!r}. It called {listed}."
