"""Torch calls inside a forward: the `/operation[#n]` of a place.

One TorchFunctionMode a thread sees every torch call, for as long as a context with such places is
open there. It looks at the calls that stand in an asked module's own forward, found from the
Python frames; all others pass through.

- `Operation`: a context's doings at one operation of one module
- `survey(model, wheres, inputs)`: the operations that a run of the model makes, as a `Listing`
- `call(model, inputs)`: run a model on a batch
- `refuse(targets)`, `not_called(name, others)`: what cannot be, and why nothing happened
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from hookline.core import tables
from hookline.core.grammar import parse
from hookline.core.nested import leaves
from hookline.core.places import Place, Target, Where, resolve
from hookline.core.recomputation import in_backward
from hookline.core.sites import ACTIVE, Site
from hookline.core.snapshots import same_bits
from hookline.core.taps import is_over
from hookline.errors import NotHookable, PlaceNotFound

__all__ = ["Listing", "Operation", "call", "not_called", "refuse", "survey"]

_TORCH = str(Path(torch.__file__).parent)

_CALL = nn.Module._call_impl.__code__
_INNER = next(code for code in _CALL.co_consts if isinstance(code, CodeType))
# torch's names for what Python writes as operators, where they differ.
_OPERATORS = {
    "rdiv": "div", "rtruediv": "div", "rpow": "pow", "floordiv": "floor_divide",
    "rfloordiv": "floor_divide", "mod": "remainder", "rmod": "remainder", "invert": "bitwise_not",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
_names: dict[Any, str] = {}
_push_mode: Callable[[Any], None] = cast(Any, torch.overrides)._push_mode
_stack: Callable[[], list[Any]] = _get_current_function_mode_stack


def _name_of(function: Any) -> str:
    """The name of a torch function, method, operator or property."""
    name = _names.get(function)
    if name is None:
        name = cast(str, getattr(function, "__name__", ""))
        if name == "__get__":
            name = cast(str, function.__self__.__name__)
        if name.startswith("__"):
            name = name.strip("_")
            name = _OPERATORS.get(name, name)
        _names[function] = name
    return name


def _innermost(frame: FrameType | None) -> tuple[nn.Module, FrameType] | None:
    """The module in whose own forward a frame stands, and the frame of torch's that called it."""
    below: CodeType | None = None
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            module: nn.Module = frame.f_locals["self"]
            forward: Any = module.forward
            own = getattr(getattr(forward, "__func__", forward), "__code__", below)
            return (module, frame) if own is below else None  # else it is a hook of the module
        if code is not _INNER:
            below = code
        frame = frame.f_back
    return None


class _Running:
    """The operations of one running call of a module, counted by name."""

    def __init__(self, module: nn.Module, frame: FrameType) -> None:
        self.module, self.frame = module, frame
        self.counts: dict[str, int] = {}


class _Mode(TorchFunctionMode):
    """Sees every torch call of a thread while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[Operation]] = {}  # by module, in order of entering
        self.names: dict[str, int] = {}  # how many operations are for each name
        self.waiting = 0  # operations that never came: then all names are of interest
        self.running: list[_Running] = []

    def add(self, operation: Operation) -> None:
        """Serve one more operation; with the first the mode begins."""
        if not self.operations:
            _push_mode(self)
        self.operations.setdefault(id(operation.module), []).append(operation)
        self.names[operation.name] = self.names.get(operation.name, 0) + 1
        self.waiting += 1

    def drop(self, operation: Operation, ident: int) -> None:
        """Serve one operation less; with the last the mode ends."""
        served = self.operations.get(ident, [])
        if operation not in served:
            return
        served.remove(operation)
        self.waiting -= not operation.count
        self.names[operation.name] -= 1
        if not self.names[operation.name]:
            del self.names[operation.name]
        if not served:
            del self.operations[ident]
        if not self.operations:
            self.running.clear()
            self.leave()

    def leave(self) -> None:
        """Take the mode off the stack, also from under others that were entered since."""
        while self in _stack():
            others: list[Any] = []
            while (top := _pop_mode()) is not self:
                others.append(top)
            for other in reversed(others):
                _push_mode(other)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name not in self.names and not self.waiting:
            return func(*args, **kwargs)
        found = _innermost(sys._getframe(1))
        asked = self.operations.get(id(found[0])) if found else None
        if found is None or not asked:
            return func(*args, **kwargs)
        use = self.count(name, *found)
        operations = [operation for operation in asked if operation.meets(name, use)]
        new = [operation for operation in operations if not operation.count]
        output = self.run(func, args, kwargs, operations)
        if self.waiting and leaves(output):
            for operation in asked:
                operation.names[name] = None
            self.waiting -= sum(1 for operation in new if operation.count)
        return output

    def count(self, name: str, module: nn.Module, frame: FrameType) -> int:
        """How many operations of a name came before in this call of the module."""
        while self.running and self.running[-1].frame is not frame:
            if not is_over(self.running[-1].frame):
                break
            self.running.pop()
        if not self.running or self.running[-1].frame is not frame:
            self.running.append(_Running(module, frame))
        counts = self.running[-1].counts
        counts[name] = counts.get(name, -1) + 1
        return counts[name]

    def run(self, func: Any, args: Any, kwargs: Any, operations: list[Operation]) -> Any:
        """Call a function between what the operations do before and after it."""
        running = sys._getframe()
        for operation in operations:
            new = operation.begin(func, args, kwargs, running)
            if new is not None:
                args, kwargs = new
        output = func(*args, **kwargs)
        for operation in operations:
            new = operation.end(output, running)
            output = output if new is None else new
        return output


class _Thread(threading.local):
    mode: _Mode | None = None


_thread = _Thread()


class Operation(Site):
    """A context's doings at one operation of one module. The mode calls it, not a hook."""

    def __init__(self, module: nn.Module, context: Any, owner: int | None, target: Target) -> None:
        super().__init__(module, context, owner)
        self.name, _, nth = cast(str, target.operation).partition("#")
        self.nth = int(nth) if nth else None
        self.names: dict[str, None] = {}  # of the operations that were called there, in order

    def register(self, module: nn.Module) -> None:
        """Begin to be called."""
        self.prepare()
        self.paired = True
        if _thread.mode is None:
            _thread.mode = _Mode()
        self.mode = _thread.mode
        self.mode.add(self)
        self.anchor(module)

    def rest(self, module: nn.Module, args: Any) -> None:
        """The pre-forward hook. During a backward torch has put the mode aside, but a checkpointed
        forward that runs again must be seen again; the engine forgets the mode afterwards.
        """
        super().rest(module, args)
        if in_backward() != -1 and self.mode.operations and self.mode not in _stack():
            _push_mode(self.mode)

    def unregister(self, module: nn.Module) -> None:
        """Be called no longer."""
        super().unregister(module)
        if hasattr(self, "mode"):
            self.mode.drop(self, id(module))

    def meets(self, name: str, use: int) -> bool:
        """Whether this is for the n-th use of an operation in a call of the module."""
        if self.closed or name != self.name or self.nth not in (None, use):
            return False
        if self.owner is not None and self.owner not in ACTIVE.get():
            self.foreign += 1
            return False
        return True


def refuse(targets: Iterable[Target]) -> None:
    """An error if something is to be attached to operations."""
    for target in targets:
        if target.operation is not None:
            raise NotHookable(
                f"attach() was asked for at {str(target.place)!r}.",
                "Operations are seen by a mode of torch's that must end where it began.",
                "Use a `with` statement.",
            )


class Listing(list[Place]):
    """Places in the order in which they came, shown with what stood there."""

    def __init__(self, rows: dict[Place, tuple[str, str]]) -> None:
        super().__init__(rows)
        self.rows = rows  # shapes and dtypes, and the line of the source

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table())

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        rows = [(str(place) or "''", *row) for place, row in self.rows.items()]
        return f"{len(self)} places", [("place", "value", "source"), *rows]


class _Survey(_Mode):
    """Notes every operation in the forwards of some modules."""

    def __init__(self, targets: Iterable[Target]) -> None:
        super().__init__()
        self.targets = {target.ident: target for target in targets}
        self.found: list[tuple[Target, str, int, str, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        found = _innermost(sys._getframe(1))
        target = None if found is None else self.targets.get(id(found[0]))
        if found is not None and target is not None:
            name = _name_of(func)
            use = self.count(name, *found)
            values = [tables.describe(tensor) for _, tensor in leaves(output)]
            if values:
                self.found.append((target, name, use, ", ".join(values), _source()))
        return output


def _source() -> str:
    """The line that called a torch function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _TORCH in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()}".strip()


def survey(model: nn.Module, wheres: Iterable[Where], inputs: Any) -> list[Place]:
    """The operations that one run of the model makes in the forwards that are asked for.

    The run leaves nothing behind: no gradients, buffers and random numbers as before.
    """
    requests = resolve(model, wheres, wild=True)
    targets = [t for request in requests for t in request.targets if t.operation is not None]
    mode = _Survey(targets)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(model)), mode:
            call(model, inputs)
    finally:
        for buffer, before in buffers:
            if not same_bits(buffer, before):
                buffer.copy_(before)
    often = {(id(target), name) for target, name, use, *_ in mode.found if use}
    rows: dict[Place, tuple[str, str]] = {}
    for target, name, use, values, source in mode.found:
        for asked in (t for t in targets if t.ident == target.ident):
            wanted, _, nth = cast(str, asked.operation).partition("#")
            (segment,) = parse(wanted).paths[0]
            fits = name == segment if isinstance(segment, str) else segment.fullmatch(name)
            if fits and nth in ("", str(use)):
                spelled = f"{name}#{use}" if nth or (id(target), name) in often else name
                place = Place(asked.path, asked.port, asked.parts, spelled)
                rows.setdefault(place, (values, source))
    if targets and not rows:
        raise _not_called(targets[0], [name for _, name, *_ in mode.found])
    others = [t.place for request in requests for t in request.targets if t.operation is None]
    return Listing({**dict.fromkeys(others, ("", "")), **rows})


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a batch: a dict gives arguments by name, a tuple or list by position."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _devices(model: nn.Module) -> list[int]:
    """The devices other than the CPU whose random numbers a run may use."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def not_called(name: str, others: Iterable[str]) -> str:
    """Why nothing happened at an operation."""
    listed = ", ".join(dict.fromkeys(others)) or "no torch function at all"
    return f"its module's own forward never called {name!r}. It called {listed}."


def _not_called(target: Target, names: list[str]) -> PlaceNotFound:
    return PlaceNotFound(
        f"Nothing matches {str(target.place)!r}:",
        not_called(cast(str, target.operation), names),
        "Operations in a child's forward belong to the child.",
    )
