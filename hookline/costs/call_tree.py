"""Follow the calls of modules, and assign each event to a call, in forward and backward.

- `CallTree(model)`: a context that follows all calls while a model runs
- `CallNode`: one call of one module, with its parent call

Hooks follow the forwards. In a backward, the sequence number of an autograd node tells in which
call the node was made: the numbers count up, so each call has a range of them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hookline.costs.flop_formulas import flops_of_linear, sort_leaves
from hookline.costs.footprints import Footprint, Noted, footprint_of, is_plain, note
from hookline.costs.summary import shapes_of
from hookline.engine.arguments import bind
from hookline.engine.calls import is_over
from hookline.engine.lifecycle import Entering
from hookline.engine.module_hooks import ACTIVE, SERIALS, ModuleHooks
from hookline.places.resolution import resolve
from hookline.places.tree import NamedModule, walk
from hookline.torch_private import (
    current_node,
    next_sequence_number,
    outside_graphs,
    sequence_number,
    transform_stack,
    without_dispatch_modes,
    without_function_modes,
)

__all__ = ["CallNode", "CallTree"]

# Under a mode, to read the shape of a tensor is a torch call that the mode sees.
_NOTHING: dict[str, Any] = {}
_strided, _getframe = torch.strided, sys._getframe
_hookable: dict[type[nn.Module], bool] = {}  # types of modules, as far as seen
_arguments: dict[Any, str] = {}  # the names of the first arguments of forwards
# Frames of Python from a hook to the one of torch's that runs the hooks of the module above, if
# that module's forward calls this one. Else, or with another torch, it takes longer to find out.
_UP = 5


class CallNode:
    """One call of one module, in the tree of calls."""

    # Class-level defaults make a node cheap to create.
    running: Any = None  # torch's frame that runs its hooks, until it is complete
    given: Any = None  # the shape of its argument if that is one plain tensor, else shapes by name
    made: Noted | None = None  # its output, once it is complete
    flops = 0
    backward: float = 0  # FLOPs, or seconds where those are measured
    begun = 0.0
    seconds = 0.0
    start = stop = 0  # the first autograd nodes that are made in it, and after it
    after = 0  # how many steps there were when it ended, if it may have called other modules
    usual = True  # whether it was called outside of backwards and of vmap
    parent: CallNode | None = None  # of a leaf only if a backward follows
    number: int  # of its module; always set, and by whoever makes it

    @property
    def bytes(self) -> int:
        """Return the bytes of the output."""
        return 0 if self.made is None else footprint_of(self.made).bytes

    def above(self) -> set[int]:
        """Return the modules around this call, its own included; a recursive one once."""
        found: set[int] = set()
        step: CallNode | None = self
        while step is not None:
            found.add(step.number)
            step = step.parent
        return found


class _TreeHooks(ModuleHooks):
    """The hooks of a tree, the same ones on many modules."""

    tree: Any = None  # none once the hooks are off

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Record the start of a call; the pre-forward hook."""
        tree = self.tree
        if tree is None or self.owner not in ACTIVE.get() or module not in tree.numbers:
            return self.foreign_call(module)
        return tree.begin(module, args, kwargs, _getframe(1), tree.inside is _frame(_UP))

    @outside_graphs
    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a call; the forward hook."""
        tree = self.tree
        if tree is None or self.owner not in ACTIVE.get():
            return self.foreign_call(module)
        return tree.end(output, _getframe(1))

    def foreign_call(self, module: nn.Module) -> None:
        """Note a call of another thread, or of a copied module."""
        if self.tree is not None:
            self.tree.elsewhere.add(module)
        super().foreign_call(module)


class _LeafHooks(_TreeHooks):
    """The hooks on modules that call no others, and whose FLOPs follow from shapes.

    While such a module runs, modes need not see its operations. The hooks have to be quick: most
    calls are of leaves. A leaf has one argument: if it is given by position, none is given by name.
    """

    rank = 0  # the fewest dimensions of an argument for which that holds
    linear = False  # whether the modules are linear layers, and not free of FLOPs

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Record the start of a call; the pre-forward hook."""
        tree = self.tree
        if tree is None:
            return self.foreign_call(module)
        try:
            # If the forward of the innermost call calls it, it is in this thread, too.
            usual = tree.inside is _getframe(_UP)
        except ValueError:  # there are not so many
            usual = False
        if not usual:
            if self.owner not in ACTIVE.get():
                return self.foreign_call(module)
            usual = tree.is_usual()
        if module not in tree.numbers:
            return self.foreign_call(module)
        if tree.leaf is not None:
            tree.wake()
        one_tensor = usual and len(args) == 1 and type(args[0]) is Tensor
        if one_tensor and self.note_shape(module, args[0]):
            return None
        if not args:  # it was given by name, and torch knows it
            kwargs = _getframe(1).f_locals.get("kwargs")
            tree.doubtful |= kwargs is None
        return tree.begin(module, args, kwargs, _getframe(1), usual)

    def note_shape(self, module: nn.Module, value: Tensor) -> bool:
        """Note only the shape of the argument; return False if the FLOPs do not follow from it."""
        tree = self.tree
        tree.off()
        if value.layout is _strided and not value.is_nested:
            tree.given = given = value.shape
            if len(given) >= self.rank:
                tree.leaf, tree.guard = module, without_dispatch_modes()
                if tree.graded:
                    tree.start = next_sequence_number()
                return True
        tree.on(None, None, None)
        return False

    @outside_graphs
    def ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a call; the forward hook."""
        tree = self.tree
        if tree is None or self.owner not in ACTIVE.get():
            return self.foreign_call(module)
        if tree.leaf is not module:
            return tree.end(output, _getframe(1))
        tree.leaf = tree.guard = None
        step = CallNode()
        step.number, step.given = tree.numbers[module], tree.given
        step.made = (output.shape, output.dtype) if type(output) is Tensor else note(output)
        if self.linear and type(step.made) is Footprint:  # no plain tensor
            tree.doubtful = True
        elif self.linear:
            step.flops = flops_of_linear(tree.given, step.made[0])
        if tree.graded:
            step.parent = tree.stack[-1] if tree.stack else None
            step.start, step.stop = tree.start, next_sequence_number()
        tree.steps.append(step)
        tree.on(None, None, None)
        return None


class CallTree(Entering):
    """Follows the calls of all modules, and assigns events to them.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with torch.no_grad(), CallTree(model) as tree:
    ...     _ = model(torch.zeros(5, 2))
    >>> [(tree.places[step.number], step.bytes) for step in tree.steps]
    [('', 60), ('0', 60), ('1', 60)]

    Args:
        model: any module.
        clock: a function that returns the time. With one, calls are timed, and nothing else.
        graded: whether a backward follows.
        certain: whether FLOPs that follow from shapes need not be counted. Modes do not see those
            calls; their FLOPs are added here.
        walked: all modules of the model, if they are known.
    """

    _verb = "summarize"
    _wheres = ("**",)
    _serial = 0

    def __init__(
        self,
        model: nn.Module,
        clock: Callable[[], float] | None = None,
        graded: bool = True,
        certain: bool = False,
        walked: list[NamedModule] | None = None,
    ) -> None:
        super().__init__(model)
        self._walked = walked or walk(model)
        self.clock, self.graded, self.certain = clock, graded, certain
        self.stack: list[CallNode] = []
        self.steps: list[CallNode] = []
        self.places = [path for path, _ in self._walked]
        self.numbers: dict[nn.Module, int] = {}  # of all modules that can be called
        self._hooks: dict[_TreeHooks, list[nn.Module]] = {}
        self._own: set[nn.Module] = set()  # those with a forward of their own, not of their class
        self.outside = self.outside_backward = 0  # FLOPs in no call
        self.inside: Any = None  # the frame of the innermost call, if it is a usual one
        # While the call of a leaf runs, torch's modes are off: the one for functions, and the
        # other as long as its guard exists.
        modes: Any = without_function_modes()
        self.off, self.on, self.guard = modes.__enter__, modes.__exit__, None
        self.leaf: nn.Module | None = None
        self.given: Any = None  # the shape of the leaf's argument
        self.start = 0  # the first autograd node that is made in it
        self.doubtful = False  # whether they were off while something else ran
        self.elsewhere: set[nn.Module] = set()  # what other threads called, copies too
        self.ran = False  # whether the forward is over, and its backward may follow

    def _start(self, attached: bool) -> None:
        self._own = {module for _, module in self._walked if "forward" in module.__dict__}
        self.numbers = _called(self._model, self._walked, self._own)
        self._serial = next(SERIALS)
        named = self, self._serial
        free, linear, other = _LeafHooks(*named), _LeafHooks(*named), _TreeHooks(*named)
        linear.rank, linear.linear = 2, True
        if self.certain:
            self._hooks = dict(zip((free, linear, other), sort_leaves(self.numbers), strict=True))
        else:
            self._hooks = {other: list(self.numbers)}
        for hooks, modules in self._hooks.items():
            hooks.tree = self
            hooks.put_before(modules, hooks.before, type(hooks) is _TreeHooks)
            hooks.put_after(modules, hooks.ended)
        ACTIVE.set(ACTIVE.get() | {self._serial})

    def _stop(self) -> None:
        if self.leaf is not None:
            self.wake()
        while self.stack:  # they raised
            self._drop()
        for hooks in self._hooks:
            hooks.remove_all()
            hooks.tree = None
        self._hooks = {}
        ACTIVE.set(ACTIVE.get() - {self._serial})

    def wake(self) -> None:
        """Enable the modes again: the call of a leaf has raised an error that was caught."""
        self.leaf = self.guard = None
        self.on(None, None, None)
        self.doubtful = True

    def is_usual(self) -> bool:
        """Return True outside of backwards and of vmap; forget calls that raised."""
        self.now()
        return current_node() is None and transform_stack() is None

    def begin(self, module: nn.Module, args: Any, kwargs: Any, running: Any, usual: bool) -> None:
        """Begin a call of a module, usually inside the innermost running call."""
        if self.leaf is not None:
            self.wake()
        step, stack = CallNode(), self.stack
        if not usual:
            step.usual = self.is_usual()
        step.number, step.running = self.numbers[module], running
        step.parent = stack[-1] if stack else None
        self.inside = running if step.usual else None
        if self.graded:
            step.start = next_sequence_number()
        stack.append(step)
        self.steps.append(step)
        if self.clock is not None:
            step.begun = self.clock()
            return
        self.off()
        try:
            plain = not (kwargs or self._own) and len(args) == 1 and is_plain(args[0])
            if plain:
                step.given = args[0].shape
            else:
                named = bind(module, args, kwargs or _NOTHING)
                step.given = {str(name): shapes_of(value) for name, value in named.items()}
        finally:
            self.on(None, None, None)

    def first_names(self) -> dict[int, str]:
        """Return the names of the first arguments of modules, where their class tells them."""
        modules = [m for m in self.numbers if m not in self._own] if self._own else self.numbers
        names: dict[Any, str] = {}
        for kind, module in {type(module): module for module in modules}.items():
            if kind.forward not in _arguments:
                _arguments[kind.forward] = str(*bind(module, (None,), _NOTHING))
            names[kind] = _arguments[kind.forward]
        return {number: names.get(type(m), "") for m, number in self.numbers.items()}

    def renumber(self, modules: list[nn.Module]) -> None:
        """Number all modules as they are now; those that are gone get no number and no row."""
        numbers, old = {m: n for n, m in enumerate(modules)}, [m for _, m in self._walked]
        for step in self.steps:
            step.number = numbers.get(old[step.number], -1)
        self.numbers = {m: numbers[m] for m in self.numbers if m in numbers}

    def now(self) -> CallNode | None:
        """Return the innermost running call."""
        stack = self.stack
        while stack and is_over(stack[-1].running):  # it raised, and someone caught that
            self._drop()
        return stack[-1] if stack else None

    def _drop(self) -> None:
        """Drop the innermost call, which has raised."""
        step = self.stack.pop()
        step.running, step.after = None, len(self.steps)

    def end(self, output: Any, running: Any) -> None:
        """Complete a call."""
        now = 0.0 if self.clock is None else self.clock()
        if self.leaf is not None:
            self.wake()
        stack = self.stack
        if not stack or stack[-1].running is not running:
            self.now()
            if not stack or stack[-1].running is not running:
                return  # this was entered while the module was running
        step = stack.pop()
        step.running, step.after, parent = None, len(self.steps), step.parent
        self.inside = parent.running if parent is not None and parent.usual else None
        if self.graded:
            step.stop = next_sequence_number()
        if self.clock is not None:
            step.seconds = now - step.begun
            return
        self.off()
        try:
            step.made = note(output)
        finally:
            self.on(None, None, None)

    def count(self, flops: int) -> None:
        """Add FLOPs to the running call."""
        step, node = self.stack[-1] if self.stack else None, current_node() if self.graded else None
        if step is not None and step.running is not _frame(3):
            step = self.now()  # else a forward has called a torch function, and is running
        # A backward that a forward makes itself, as for forces, is a part of the forward.
        if node is None or not (self.ran or step is None):
            if step is None:
                self.outside += flops
            else:
                step.flops += flops
            return
        # In a backward: of a call that is being recomputed, or of the one that made the node.
        step = step or self.maker(sequence_number(node))
        if step is None:
            self.outside_backward += flops
        else:
            step.backward += flops

    def maker(self, number: int) -> CallNode | None:
        """Return the innermost call in which the autograd node with this number was made."""
        place = bisect_right(self.steps, number, key=attrgetter("start")) - 1
        step = self.steps[place] if place >= 0 else None
        while step is not None and number >= step.stop:
            step = step.parent
        return step


def _frame(up: int) -> Any:
    try:
        return _getframe(up + 1)
    except ValueError:  # there are not so many
        return None


def _called(
    model: nn.Module, named: list[NamedModule], own: set[nn.Module]
) -> dict[nn.Module, int]:
    """Return the modules at which hooks can fire, with their numbers; containers are not called."""
    if isinstance(model, torch.jit.ScriptModule):
        resolve(model, ("",))  # which refuses it, with the reason
    kinds = {type(module) for _, module in named}
    if own or not kinds <= _hookable.keys():
        requests = resolve(model, (nn.Module,))
        found = {target.module for request in requests for target in request.targets}
        _hookable.update({type(m): m in found for _, m in named if m not in own})
        return {module: number for number, (_, module) in enumerate(named) if module in found}
    fit = {kind for kind in kinds if _hookable[kind]}
    return {module: number for number, (_, module) in enumerate(named) if type(module) in fit}
