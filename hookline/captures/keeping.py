"""How captured values are stored.

- `Options`: what is kept of a value
- `CaptureAsk`: what a capture asks of modules
- `CaptureHandler`: what was captured at one place
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.captures.entries import Entries, Kept, Order, checks_of
from hookline.engine.asks import Ask, Missing
from hookline.engine.events import Keep
from hookline.engine.generation import FORGOTTEN, Step, UnknownStep
from hookline.engine.handlers import Handler, add_place
from hookline.engine.slices import Misfit, Slice, spelled, take
from hookline.errors import SeveralTensors
from hookline.places.grammar import INPUT_PORTS, is_gradient
from hookline.torch_private import backward_id, is_view, version_of
from hookline.values.nested import Path, map_leaves, set_part
from hookline.values.sharding import layouts, local
from hookline.values.snapshots import (
    compact_snapshot,
    duplicate,
    gradient_snapshot,
    snapshot,
    unreadable,
)

__all__ = ["PLAIN", "SINGLE_TENSOR", "CaptureAsk", "CaptureHandler", "Kept", "Options"]

SINGLE_TENSOR: tuple[Any, list[list[Path]]] = (None, [[()]])  # the structure of a plain tensor
_RECENT = 64  # calls whose gradients may still come, where not all are kept
_FORGOTTEN = (
    f"it came when {_RECENT} other calls had none so far, and what the value was is forgotten.",
    "Capture with keep='all'.",
)

Freeze = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Options:
    """The options of a capture: what is kept of a value."""

    at: Any = None
    transform: Callable[[Any], Any] | None = None
    detach: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    keep: Keep = "all"
    derives: bool = field(init=False)  # whether something else is kept than the value itself

    def __post_init__(self) -> None:
        self.derives = not (self.at is self.transform is self.device is self.dtype is None)

    def keeps(self, value: Any, freeze: Freeze = snapshot) -> Kept | Missing:
        """Return what to keep of a value: itself if it requires grad, otherwise a snapshot."""
        if self.derives:
            value = self._derived(value)
            return value if type(value) is Missing else self._nested(value, compact_snapshot)
        if type(value) is Tensor:
            if self.detach or not value.requires_grad:
                return freeze(value), None
            try:
                return value, version_of(value)
            except RuntimeError:  # no version, in inference mode
                pass
        return self._nested(value, freeze)

    def keeps_gradient(self, grad: Tensor) -> Kept | Missing:
        """Return what to keep of a gradient, during a backward."""
        if self.derives or grad.requires_grad:
            return self.keeps(grad, gradient_snapshot)
        return gradient_snapshot(grad), None

    def _nested(self, value: Any, freeze: Freeze) -> Kept:
        checks: dict[int, tuple[int, Tensor | None]] = {}

        def keep_leaf(leaf: Any) -> Any:
            if not issubclass(type(leaf), Tensor):  # isinstance would ask a proxy for its class
                # Opaque objects are kept by reference, but arrays may alias a tensor.
                kind = cast(Any, type(leaf))
                return copy.copy(leaf) if hasattr(kind, "__array_interface__") else leaf
            if self.detach or not leaf.requires_grad or leaf.is_inference():
                return freeze(leaf)
            local(leaf)  # waits for what a collective still brings
            # Fused optimisers change parameters without a new version: a twin shows it.
            dense = leaf.layout is torch.strided
            twin = duplicate(leaf) if dense and isinstance(leaf, nn.Parameter) else None
            checks[id(leaf)] = (version_of(leaf), twin)
            return leaf

        return map_leaves(keep_leaf, value), checks or None

    def _derived(self, value: Any) -> Any:
        """Apply at, transform, device and dtype to a value; keep no other memory of it alive."""

        def start(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or (leaf.requires_grad and not self.detach):
                return leaf
            return snapshot(leaf) if self.transform or callable(self.at) else leaf.detach()

        def finish(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dtype = self.dtype  # not where it would cut off an imaginary part
            fits = leaf.is_floating_point() or (leaf.is_complex() and dtype and dtype.is_complex)
            moved = leaf.to(device=self.device, dtype=dtype if fits else None)
            return moved.clone() if moved.requires_grad and is_view(moved) else moved

        value = map_leaves(start, value)
        if self.at is not None:
            value = self._sliced(value)
        if type(value) is Missing:
            return value
        if self.transform is not None:
            value = self.transform(value)
        return map_leaves(finish, value)

    def _sliced(self, value: Any) -> Any:
        try:
            return take(value, self.at)
        except (Misfit, SeveralTensors) as error:
            if callable(self.at):  # the user's own error
                raise
            return Missing(error.found, error.remedy)  # told on reading: the forward goes on

    def keep_function(self) -> Callable[[Any], Any]:
        """Return the function that hooks call with a value."""
        others = not (self.transform is self.device is self.dtype is None)
        return self.keeps if self.at is None or others or _depends(self.at) else self._keep_slice

    def _keep_slice(self, value: Any) -> Any:
        """Do what `keeps` does for an index of a plain tensor."""
        if type(value) is Tensor:
            try:
                kept = value.detach() if self.detach and value.requires_grad else value
                piece = kept[self.at]
                if piece.requires_grad and is_view(piece):
                    piece = piece.clone()  # without gradients, only the view requires grad
                if piece.requires_grad:
                    return piece, version_of(piece)
                return compact_snapshot(piece), None
            except (IndexError, TypeError, ValueError, RuntimeError):
                pass  # it does not fit
        return self.keeps(value)

    def explain(self, error: Exception) -> Missing:
        """Explain that a function of the user's raised."""
        option = "at" if self.transform is None else "transform"
        found = f"the function in {option}= raised {type(error).__name__}: {error!s:.200}."
        return Missing(found, "Let it give something for every value, such as None.")


def _depends(at: Any) -> bool:
    """Return True if a slice is a function of the value, or holds one."""
    steps = cast("tuple[Any, ...]", at) if isinstance(at, tuple) else (at,)
    return any(callable(step) or isinstance(step, (Slice, Tensor)) for step in steps)


PLAIN = Options()


class CaptureAsk(Ask):
    """The ask of a capture: modules log what is kept of their values."""

    def __init__(self, port: str, options: Options, **place: Any) -> None:
        super().__init__(port, CaptureHandler, replaces=False, **place)
        self.options = options
        self.keep = options.keep_function()
        # Others may hold the address of parameters, buffers and the model's own arguments.
        self.keep_copy = partial(options.keeps, freeze=duplicate)
        if options.keep == "all" and not (options.derives or self.calls):
            self.keep_gradient = options.keeps_gradient

    def explain(self, error: Exception) -> Missing:
        return self.options.explain(error)


class CaptureHandler(Handler):
    """The values of one place: one entry for each call, and backward pass of gradients."""

    ask: CaptureAsk

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.options = self.ask.options
        # What was kept of calls, in order of their numbers; None for a call that gave nothing.
        self.values: list[tuple[int, Kept | None]] = []
        self.layouts: Sequence[Any] = ()  # how a tensor-parallel plan spreads the value
        # Of gradients: the structure of the value by call, what arrived by call and backward pass,
        # the order of both if all are kept, and those that come in shares, to be derived from.
        self.shapes: dict[int, tuple[Any, list[list[Path]]]] = {}
        self.grads: dict[tuple[int, int], dict[Path, Kept]] = {}
        self.order = Order()
        self.shared: set[tuple[int, Path]] = set()
        self.shaped = 0  # how many calls are known to have a structure
        self.task = -1  # of a parameter: the last backward pass that came; `seen` counts them

    @property
    def holds(self) -> bool:
        """Return True if something was kept."""
        return any(kept is not None for _, kept in self.values) or any(self.grads.values())

    @property
    def slicing(self) -> tuple[str | None, bool]:
        """Return which slice of each value is kept, as text, and whether it was transformed."""
        at = self.options.at
        return None if at is None else spelled(at), self.options.transform is not None

    # -- what was logged ------------------------------------------------------------------------

    def take(self, number: Any, kept: Any) -> None:
        if isinstance(number, tuple):
            self._take_gradient(*cast("tuple[int, int, Path]", number), kept)
            return
        if not isinstance(number, int):  # the next one
            number = self.values[-1][0] + 1 if self.values else 0
        if isinstance(kept, Missing):
            self.explain(number, *kept)
            kept = None
        else:
            self.fired += 1
        # Threads and recursion end calls in another order than they began.
        at = bisect_right(self.values, number, key=itemgetter(0))
        self.values.insert(at, (number, kept))

    def take_only(self, number: Any, kept: Any, count: int) -> None:
        self.values, self.reasons = [], {}
        if not isinstance(number, int):
            number = 0 if self.options.keep == "first" else count - 1
        self.take(number, kept)

    def _take_gradient(self, number: int, task: int, path: Path, kept: Kept) -> None:
        parts = self.grads.setdefault((number, task), {})
        self.fired += not parts
        if path in parts and self.target.port in INPUT_PORTS:
            # The shares of an input come one by one. What cannot be read is refused on reading.
            held = parts[path]
            readable = unreadable(held[0], None, None) is None
            total = self.options.keeps_gradient(held[0] + kept[0]) if readable else held
            kept = cast(Kept, total)
        parts[path] = kept

    # -- reading --------------------------------------------------------------------------------

    def entries(self) -> Entries:
        """Return what was kept, with the numbers of the calls."""
        if is_gradient(self.target.port):
            return self._gathered()
        return Entries(self.values)

    def all_kept(self) -> list[Kept]:
        """Return everything that was kept, call by call."""
        return [kept for _, kept in self.entries() if kept is not None]

    def release(self) -> None:
        """Let go of the module: a record does not keep it alive."""
        self.target.module = cast(nn.Module, None)

    def note_layouts(self) -> None:
        """Note how a tensor-parallel plan spreads the values, while the module is there."""
        if self.options.at is None and self.options.transform is None:
            self.layouts = layouts(self.target) or self.layouts

    # -- which calls are meant ------------------------------------------------------------------

    def wants(self, number: int, step: Step | None) -> bool:
        wanted = super().wants(number, step)
        if wanted:
            self.calls_missing -= {number}
        return wanted

    def refuse_unknown(self, number: int, why: UnknownStep) -> None:
        if why is not FORGOTTEN and (self.options.keep == "all" or not self.unknown_steps):
            self.unknown_steps[number] = why

    # -- gradients ------------------------------------------------------------------------------

    def note_shares(self, number: int, path: Path) -> None:
        if self.options.derives:
            self.shared.add((number, path))

    def explain_separated(self, number: int, path: Path) -> None:
        for paths in self.shapes.get(number, SINGLE_TENSOR)[1]:
            for one in paths if path in paths else ():
                super().explain_separated(number, one)

    def expect(self, value: Any, number: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        whole = isinstance(value, Tensor)
        if self.options.keep != "all" and (whole or not tensors):
            return  # what is not known by then is whole
        shape = None if whole else map_leaves(lambda leaf: None, value)
        paths = SINGLE_TENSOR[1] if whole else [paths for _, paths in tensors]
        self.remember(self.shapes, number, (shape, paths))

    def remember(self, entries: dict[int, Any], number: int, entry: Any) -> None:
        keep = self.options.keep
        if keep == "first" and len(entries) >= _RECENT:
            return
        entries[number] = entry
        if keep == "last" and len(entries) > _RECENT:
            held = [call for call, _ in self.grads]
            del entries[next(old for old in entries if old not in held)]

    def gradient(self, grad: Tensor, number: int, path: Path) -> None:
        """Keep a gradient that does not go to the log."""
        task = backward_id()
        if number < 0 and self.ask.calls is not None:  # of a parameter: numbered by backward pass
            self.seen += task != self.task
            self.task, number = task, self.seen - 1
            if not self.wants(number, None):
                return
        parts = self._parts_of(number, task, path)
        if parts is None:
            return
        if path in parts and self.target.port in INPUT_PORTS:
            grad = parts[path][0] + grad  # the shares of an input come one by one
        # Shares are summed as they are; what is derived of them is derived on gathering. Of what
        # cannot be read nothing is derived.
        plain = (number, path) in self.shared or unreadable(grad, None, None)
        options = PLAIN if plain else self.options
        try:
            kept = options.keeps_gradient(grad)
        except Exception as error:
            add_place(error, self)
            self.explain(number, *self.options.explain(error), path=path)
            raise
        if isinstance(kept, Missing):
            self.explain(number, *kept, path=path)
        else:
            parts[path] = kept

    def _parts_of(self, number: int, task: int, path: Path) -> dict[Path, Kept] | None:
        """Return where to keep what arrives for a call in a backward pass; None if not at all."""
        key = (number, task)
        if key not in self.grads:
            keep = self.options.keep
            # A backward has the last call first: which one is kept goes by the numbers.
            if self.grads and keep != "all" and (key < next(iter(self.grads))) == (keep == "last"):
                return None
            if keep != "all":
                self.grads = {}  # what is there is not the one that was asked for
            if path and number not in self.shapes:
                self.explain(number, *_FORGOTTEN)
                return None
            self.grads[key] = {}
            self.fired += 1
        return self.grads[key]

    def _gathered(self) -> Entries:
        """Return the gradients by call, then by backward pass; None for a call without any."""
        self.explain_lost()
        everything = self.options.keep == "all"
        if everything:
            self._note_logged()
        order = self.order if everything else Order()
        keys = order.update(self.grads, self.shapes, self.reasons)
        if not everything:
            keys = [key for key in keys if key in self.grads] or keys[-1:]
        return Entries(keys, self._gather)

    def _note_logged(self) -> None:
        """Note the structure of calls that were only logged: all of them returned a tensor."""
        tracer = self.tracer()
        if self.ask.keep_gradient is not None and tracer is not None:
            first, self.shaped = self.shaped, tracer.numbers.completed.get(self.subject, 0)
            for call in range(first, self.shaped):
                if call not in self.reasons:
                    self.shapes.setdefault(call, SINGLE_TENSOR)

    def _gather(self, key: tuple[int, int]) -> tuple[int, Kept | None]:
        """Put the gradients of one call and backward pass together; None if there are none."""
        call, arrived = key[0], self.grads.get(key, {})
        shape, groups = self.shapes.get(call, SINGLE_TENSOR)
        parts = dict(arrived)
        for path in [path for path in arrived if (call, path) in self.shared]:
            if unreadable(arrived[path][0], None, None) is None:
                kept = self.options.keeps(arrived[path][0])
                if isinstance(kept, Missing):
                    self.explain(call, *kept, path=path)
                    del parts[path]
                else:
                    parts[path] = kept
        if () in parts or not parts:
            return call, parts.get(())
        checks: dict[int, Any] = {}
        for paths in groups:
            for path in paths if paths[0] in parts else ():
                shape = set_part(shape, path, parts[paths[0]][0])
                checks |= checks_of(parts[paths[0]])
        return call, (shape, checks or None)
