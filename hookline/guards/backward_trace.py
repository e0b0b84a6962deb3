"""Find where bad gradients come from, with hooks on every node of a graph during a backward.

A node that gets finite gradients and passes on one that is not is an origin. At the end, only
gradients that reached a parameter or an input count.

- `BackwardTrace`: the hooks on the nodes of a graph, and what they found
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path as File
from typing import Any, NamedTuple

from torch import Tensor

from hookline.guards.finite_checks import TensorDescription, is_bad
from hookline.guards.forward_trace import (
    ForwardTrace,
    ModuleHooks,
    NodeSpan,
    OperationMode,
    TracedCall,
)
from hookline.guards.origins import OURS, Labelled, Origin
from hookline.places.tree import around, tensors_of
from hookline.torch_private import (
    autograd_function,
    next_sequence_number,
    saved_for_backward,
    sequence_number,
    without_function_modes,
)
from hookline.values.nested import leaves

__all__ = ["BackwardTrace"]

Edge = tuple[Any, int]


class _PythonBackward(NamedTuple):
    """The node of an autograd function in Python, which may run a forward and a backward inside."""

    node: Any
    around: NodeSpan
    came: list[Origin]  # origins of its bad incoming gradients
    first: int  # the number of the first origin that may be found inside
    # The trace to which calls were shown until then, and the calls that were running there.
    trace: ForwardTrace | None
    running: list[TracedCall]


class BackwardTrace:
    """The hooks on the nodes of a graph; `bad` are the leaves that a bad gradient reached.

    Reentrant checkpointing runs a forward and a backward again inside of a node; `modules` and
    `operations` show these to the trace.
    """

    def __init__(
        self,
        trace: ForwardTrace,
        names: dict[int, str],
        modules: ModuleHooks,
        operations: OperationMode | None = None,
    ) -> None:
        self.trace, self._modules, self._operations = trace, modules, operations
        self.names = names  # names of parameters and inputs, by id
        self.bad: dict[str, tuple[Origin, ...]] = {}
        self.seen: Labelled = []  # the bad gradients that reached them
        self.origins: list[Origin] = []
        self._ends: list[Edge] = []  # where gradients come in
        self._of: dict[Edge, tuple[Origin, ...]] = {}
        self._nodes: dict[Any, list[Any]] = {}  # with the handles of the hooks
        self._inner: list[_PythonBackward] = []

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Put hooks on all nodes that lead to these tensors, which get their gradients here."""
        self._ends += [(t.grad_fn, t.output_nr) for t in tensors if t.grad_fn is not None]
        self._hook(node for node, _ in self._ends)

    def _hook(self, nodes: Iterable[Any]) -> None:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in self._nodes or not node.next_functions:
                continue
            self._nodes[node] = [node.register_hook(partial(self._leave, node))]
            if _is_python(node):
                self._nodes[node].append(node.register_prehook(partial(self._enter, node)))
            stack += [follows for follows, _ in node.next_functions if follows is not None]

    def recomputed(self, made: Any) -> None:
        """Note a new graph that was made inside of a node."""
        if self._inner:
            self._hook(tensor.grad_fn for _, tensor in leaves(made) if tensor.grad_fn is not None)

    def remove(self) -> None:
        """Remove all hooks, and forget the graph."""
        for handle in chain.from_iterable(self._nodes.values()):
            handle.remove()
        self._nodes.clear()
        self._of.clear()
        self._ends.clear()

    def _enter(self, node: Any, given: tuple[Any, ...]) -> None:
        """Attribute the calls and operations inside of a node to the call that made the node."""
        trace, made = self.trace, self._span(node)
        path = "" if made is None else made.path
        came = [o for n in range(len(given)) for o in self._of.get((node, n), ())]
        with without_function_modes():  # these computations are not the model's
            trace.clock += 1
            around = NodeSpan(next_sequence_number(), sys.maxsize, trace.clock, path)
            module = trace.model.get_submodule(path)
            running = TracedCall(module, path, trace.clock, around.start, None, 0)
        trace.spans.append(around)
        self._inner.append(
            _PythonBackward(
                node, around, came, len(self.origins), self._modules.trace, trace.running
            )
        )
        self._modules.trace, trace.running = trace, [running]
        if self._operations is not None:
            self._operations.resume()

    def _leave(self, node: Any, passed: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        found: list[Origin] = []
        if _is_python(node):
            inner = self._inner.pop()
            self._modules.trace, self.trace.running = inner.trace, inner.running
            inner.around.end = next_sequence_number()
            found = self.origins[inner.first :]
        with without_function_modes():
            self._follow(node, passed, given, found)

    def _follow(
        self, node: Any, passed: tuple[Any, ...], given: tuple[Any, ...], inside: list[Origin]
    ) -> None:
        """Follow bad gradients through a node; `inside` are origins in what it ran itself."""
        bad = _bad(passed)
        if not bad:
            return
        came = _bad(given)
        origins = [o for n in came for o in self._of.get((node, n), ())]
        if not came:
            origins = inside or self._passed_on(node)
            origins = origins or [self._origin("operation", node, passed, given)]
        elif not origins and self._inner and self._inner[-1].came:
            origins = self._inner[-1].came  # it came in where that begins, which is not known
        elif not origins:
            # Every share that flowed in was finite, or was none of the model's.
            met = (node, came[0])
            kind = self._joined(lambda edge: edge == met)
            origins = [
                self._origin(kind, node, passed, given) if kind else self._inside_checkpoint()
            ]
        for n in bad:
            edge: Edge = node.next_functions[n]
            before = self._of.get(edge, ())
            self._of[edge] = tuple(dict.fromkeys((*before, *origins)))[:8]
            name = self._name(edge)
            if name is not None:
                self._reached(name, passed[n], self._of[edge])

    def _name(self, edge: Edge) -> str | None:
        """Return the parameter or input that an edge leads to."""
        return self.names.get(id(getattr(edge[0], "variable", None)))

    def _reached(self, name: str, gradient: Tensor, origins: tuple[Origin, ...]) -> None:
        if name not in self.bad:
            named = name if name.startswith("the input ") else repr(name)
            self.seen.append((f"the gradient of {named}", TensorDescription.of(gradient)))
        self.bad[name] = origins

    def _joined(self, fits: Callable[[Edge], bool]) -> str:
        """Return what makes a bad gradient of finite shares: their sum, or for a single one a hook.

        The result is empty if no share was seen.
        """
        edges = [*self._ends, *(edge for node in self._nodes for edge in node.next_functions)]
        shares = sum(map(fits, edges))
        return "sum" if shares > 1 else "hook" if shares else ""

    def _origin(self, kind: str, node: Any, passed: Any, given: Any) -> Origin:
        span = self._span(node)
        origin = Origin(kind, "" if span is None else span.path, backward=True, node=node.name())
        if span is not None:
            origin.operation, origin.use = span.operation, span.use
            origin.source, origin.number = span.source, span.number
        if not origin.source:
            origin.source = _defined(node)
        origin.values = _described(passed, "gradient of argument")
        origin.given = _described(given, "gradient of the result")
        return self._add(origin)

    def _passed_on(self, node: Any) -> list[Origin]:
        """Return the origins of bad inputs of the forward: its backward only passes them on.

        Some kernels return a finite result for bad inputs, and so does a sigmoid of an infinity.
        """
        span, saved = self._span(node), _saved(node)
        bad = [tensor for tensor in saved or () if is_bad(tensor)]
        if span is None or self._is_ignored(span) or not (bad or saved is None):
            return []
        held = list(span.origins)
        if not span.operation:  # a call, whose own parameters count, too
            held = [o for tensor in bad for o in self.trace.origins_of(tensor)] or held
            owner = self.trace.model.get_submodule(span.path)
            bad = [tensor for _, tensor in tensors_of(owner) if is_bad(tensor)]
            held += [o for tensor in bad for o in self.trace.origins_of(tensor)]
        wrong = [o for o in held if not o.meant] or [o for o in held if o.ignored]
        self.origins += [o for o in wrong if o not in self.origins]
        return wrong

    def _inside_checkpoint(self) -> Origin:
        """Return an origin inside a checkpoint, of which only the graphs of modules are seen."""
        node, path, first = "", "", len(self.origins)
        if self._inner:
            inner = self._inner[-1]
            node, path, first = inner.node.name(), inner.around.path, inner.first
        for origin in self.origins[first:]:
            if origin.node == node:
                return origin
        return self._add(Origin("operation", path, backward=True, node=node))

    def causes(self) -> list[Origin]:
        """Return the origins that reached a parameter or an input and are not meant, in order."""
        reached = {origin for origins in self.bad.values() for origin in origins}
        found = [o for o in self.origins if o in reached and not o.meant]
        return list(dict.fromkeys(found))

    def _add(self, origin: Origin) -> Origin:
        origin.ignored = origin.meant = self._is_ignored(origin)
        self.origins.append(origin)
        return origin

    def _span(self, node: Any) -> NodeSpan | None:
        """Return the operation or call that made a node: the narrowest with fitting numbers."""
        number = sequence_number(node)
        fitting = [span for span in self.trace.spans if span.start <= number < span.end]
        return min(fitting, key=lambda s: (s.end - s.start, not s.operation), default=None)

    def _is_ignored(self, found: Origin | NodeSpan) -> bool:
        model, ignored = self.trace.model, self.trace.ignored
        if not ignored:
            return False
        if any(ignored.module(module) for module in around(model, found.path)):
            return True
        owner = model.get_submodule(found.path)
        return bool(found.operation) and ignored.operation(owner, found.operation, found.use)

    def settle(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Take in the final gradients: a sum of finite shares may be bad, or a hook made it so."""
        for name, gradient in gradients.items():
            if gradient is None or not is_bad(gradient):
                self.bad.pop(name, None)
            elif name not in self.bad:
                kind = self._joined(lambda edge, name=name: self._name(edge) == name)
                origin = Origin(kind or "sum", name, backward=True)
                origin.values = [("gradient", TensorDescription.of(gradient))]
                self.origins.append(origin)
                self._reached(name, gradient, (origin,))


def _bad(gradients: tuple[Any, ...]) -> list[int]:
    """Return the indices of bad gradients."""
    return [n for n, gradient in enumerate(gradients) if gradient is not None and is_bad(gradient)]


def _is_python(node: Any) -> bool:
    """Return True for the node of an autograd function written in Python."""
    return autograd_function(node) is not None


def _saved(node: Any) -> list[Tensor] | None:
    """Return the tensors that the forward saved for a node; None if they cannot be read twice."""
    try:
        if _is_python(node):
            found: list[Any] = [node.saved_tensors, vars(node)]
        else:
            found = saved_for_backward(node)
    except RuntimeError:  # raised by hooks on saved tensors, as a checkpoint's
        return None
    return [tensor for _, tensor in leaves(found)]


def _described(gradients: tuple[Any, ...], label: str) -> Labelled:
    found = [(n, TensorDescription.of(g)) for n, g in enumerate(gradients) if g is not None]
    return [(f"{label} {n}" if len(gradients) > 1 else label, own) for n, own in found]


def _defined(node: Any) -> str:
    """Return where the backward of a custom autograd function is written."""
    function: Any = getattr(autograd_function(node), "backward", None)
    if function is None:
        return ""
    try:
        if inspect.getfile(function).startswith(OURS):  # as that of full backward hooks
            return ""
        lines, first = inspect.getsourcelines(function)
        below = next((n for n, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
        return f"{File(inspect.getfile(function)).name}:{first + below}  {lines[below].strip()}"
    except (OSError, TypeError):  # written where no source is
        return ""
