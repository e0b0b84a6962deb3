"""The origins of numbers that are not finite, and the rule for infinities on purpose.

- `Origin`: a producer: an operation, a module, a parameter, an input, the loss
- `is_meant(...)`: return True if infinities were put there on purpose
- `IgnoredPlaces`: the places whose values are not checked
- `line_of(frame)`: the line of the user's program that is running; `show_line(line)` is its text
"""

from __future__ import annotations

import linecache
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.errors import PlaceError
from hookline.guards.finite_checks import TensorDescription, float_values, infinity_signs
from hookline.places.grammar import Place, is_gradient, parse
from hookline.places.resolution import Where, resolve
from hookline.values.nested import Path as Parts
from hookline.values.nested import children, leaves, show_path

__all__ = [
    "ADDING", "OURS", "IgnoredPlaces", "Line", "Origin", "infinite", "is_meant",
    "label_tensors", "line_of", "show_line",
]  # fmt: skip

ADDING = "AccumulateGrad"  # adds the gradient of a parameter to what is there

_GUARDS = str(Path(__file__).parent)
OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, _GUARDS))
# Their results have each number where the arguments have it.
_ELEMENTWISE = frozenset({"add", "sub", "subtract", "rsub", "mul", "multiply", "div", "pow", "exp"})
_TURNS = frozenset({"neg", "negative", "abs", "absolute", "sub", "subtract", "rsub"})

Labelled = list[tuple[str, TensorDescription]]
Line = tuple[str, int]


@dataclass(eq=False)
class Origin:
    """A producer of numbers that are not finite, or the place where they came in."""

    kind: str  # operation, memory, module, parameter, buffer, input, loss, sum, outside
    path: str  # the module's or the parameter's
    backward: bool = False
    operation: str = ""
    use: int = 0  # which use of that operation in the module's call
    node: str = ""  # the autograd node, in a backward
    source: str = ""  # the line of the user's program
    number: int = 0  # its operation or call in a trace, to find it in another trace
    meant: bool = False
    ignored: bool = False
    values: Labelled = field(default_factory=lambda: cast(Labelled, []))
    given: Labelled = field(default_factory=lambda: cast(Labelled, []))
    sample: Any = None  # its inputs and outputs, if they were kept at once
    parts: Parts = ()  # for an input, its path in the arguments

    def place(self, often: set[tuple[str, str]]) -> Place:
        """Return its place, with the number of the use for an operation that is used often.

        `often` are the paths of modules, each with an operation that is used often there.
        """
        if self.kind in ("parameter", "buffer"):
            return Place(self.path)
        if self.kind == "input":
            return Place(self.path, "inputs", self.parts)
        used_often = (self.path, self.operation) in often
        name = f"{self.operation}#{self.use}" if used_often else self.operation
        return Place(self.path, operation=name or None)


def label_tensors(values: Any) -> Labelled:
    """Describe every tensor with numbers in a nested value, by its path."""
    found: Labelled = []
    for path, tensor in leaves(values):
        if float_values(tensor) is not None:
            first, *rest = path or ("",)
            found.append((f"{first}{show_path(tuple(rest))}", TensorDescription.of(tensor)))
    return found


def infinite(tensor: Tensor) -> Tensor:
    """Return a mask of the infinities in a tensor."""
    found = float_values(tensor)
    return torch.zeros((), dtype=torch.bool) if found is None else found.isinf()


def _names_infinity(value: Any, depth: int = 0) -> bool:
    """Return True if a plain number among the arguments is infinite."""
    if isinstance(value, float):
        return math.isinf(value)
    if depth > 3 or isinstance(value, Tensor):
        return False
    return any(_names_infinity(item, depth + 1) for _, item in children(value) or ())


def is_meant(
    name: str, arguments: Any, held: Sequence[tuple[frozenset[str], Tensor]], made: Sequence[Tensor]
) -> bool:
    """Return True if the infinities that an operation made are there on purpose.

    A NaN never is. An infinity is if an argument is an infinite plain number, as in
    `masked_fill(mask, -inf)`, or if the operation only passes on infinities that were meant: of
    no other sign, and, where each number has its place, at no other place.

    Args:
        name: the name of the operation.
        arguments: the arguments of the call.
        held: for the arguments that held infinities before the call, all of them meant: the signs
            and positions of these.
        made: the results that are not finite.
    """
    found = frozenset[str]().union(*(infinity_signs(one) for one in made))
    if "n" in found:
        return False
    if _names_infinity(arguments):
        return True
    if not held:
        return False
    name = name.strip("_")
    allowed = frozenset[str]().union(*(one for one, _ in held))
    if not found <= allowed and name not in _TURNS:
        return False
    return name not in _ELEMENTWISE or not any(_is_new(one, [w for _, w in held]) for one in made)


def _is_new(made: Tensor, before: Sequence[Tensor]) -> bool:
    """Return True if a result is infinite where none of the arguments was."""
    where = infinite(made)
    for one in before:
        try:
            where = where & ~one
        except RuntimeError:  # does not broadcast: of another kind than thought
            return False
    return bool(where.any())


class IgnoredPlaces:
    """The places whose values are not checked: modules, operations, parameters, inputs."""

    def __init__(
        self, model: nn.Module, wheres: Sequence[Where], called: Sequence[nn.Module]
    ) -> None:
        requests = resolve(model, wheres, wild=True) if wheres else []
        self.targets = [target for request in requests for target in request.targets]
        for target in self.targets:
            own = any(target.module is one for one in called)
            inner = target.port in ("input", "inputs") and own
            if is_gradient(target.port) or (target.port not in ("output", "value") and not inner):
                raise PlaceError(
                    f"guard was told to ignore {str(target.place)!r}.",
                    "It looks at what modules and operations make, at parameters, and at the "
                    "model's own inputs.",
                    "Name a module, an operation, a parameter, or an input of the model.",
                )
        self._outputs = [
            t for t in self.targets
            if t.port == "output" and t.operation is None and t.attribute is None
        ]  # fmt: skip
        self._modules = {target.ident for target in self._outputs if not target.parts}

    def __bool__(self) -> bool:
        return bool(self.targets)

    def module(self, module: nn.Module) -> bool:
        """Return True if the output of a module is ignored."""
        return id(module) in self._modules

    def output(self, path: tuple[Any, ...], called: nn.Module) -> bool:
        """Return True if a part of the output of a call is ignored."""
        return any(t.module is called and path[: len(t.parts)] == t.parts for t in self._outputs)

    def operation(self, module: nn.Module, name: str, use: int) -> bool:
        """Return True if an operation in the forward of a module is ignored."""
        for target in self.targets:
            if target.operation is not None and target.module is module:
                wanted, _, nth = target.operation.partition("#")
                (segment,) = parse(wanted).paths[0]
                fits = name == segment if isinstance(segment, str) else segment.fullmatch(name)
                if fits and nth in ("", str(use)):
                    return True
        return False

    def tensor(self, path: str) -> bool:
        """Return True if a parameter or buffer is ignored."""
        return any(t.attribute is not None and str(t.place) == path for t in self.targets)

    def input(self, path: tuple[Any, ...], first: Any, called: nn.Module) -> bool:
        """Return True if a part of a call's inputs is ignored; `first` is the name of the first."""
        for target in self.targets:
            if target.module is not called:
                continue
            if target.port == "inputs" and path[: len(target.parts)] == target.parts:
                return True
            if target.port == "input" and path[: 1 + len(target.parts)] == (first, *target.parts):
                return True
        return False


def line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of the program that is neither torch's nor hookline's.

    It is None in a second run without a line of the user's.
    """
    while frame is not None and (file := frame.f_code.co_filename).startswith(OURS):
        frame = None if file.startswith(_GUARDS) else frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def show_line(line: Line | None) -> str:
    """Return a line of a program with its file and number."""
    if line is None:
        return ""
    file, number = line
    return f"{Path(file).name}:{number}  {linecache.getline(file, number).strip()}".strip()
