"""What is kept of a value that is captured.

- `Options`: how values are kept
- `CaptureTap`: what is kept at one target
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.core.calls import Calls
from hookline.core.generation import FORGOTTEN, Step, Untold
from hookline.core.slices import Misfit, spelled, take
from hookline.core.taps import KEEP, Frame, Tap, add_place
from hookline.errors import SeveralTensors
from hookline.places.resolution import Target
from hookline.records.positions import Entries, Gradients, Kept, Numbered, Order, Values
from hookline.torch_private import backward_id, is_view, version_of
from hookline.values.nested import Path, map_leaves, set_part
from hookline.values.sharding import layouts, local
from hookline.values.snapshots import duplicate, gradient_snapshot, settle, snapshot, unreadable

__all__ = ["PLAIN", "WHOLE", "CaptureTap", "Keep", "Kept", "Options"]

Keep = Literal["all", "first", "last"]

WHOLE: tuple[Any, list[list[Path]]] = (None, [[()]])  # the structure of a plain tensor
_NONE = cast(Any, MappingProxyType({}))
_RECENT = 64  # calls whose gradients may still come, where not all are kept
_FORGOTTEN = (
    f"it came when {_RECENT} other calls had none so far, and what the value was is forgotten.",
    "Capture with keep='all'.",
)


class Unsliced(Exception):
    """A value has not the slice that `at=` asks for: told on read, so that the forward goes on."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy


@dataclass(slots=True, eq=False)
class Options:
    """How values are kept."""

    at: Any
    transform: Callable[[Any], Any] | None
    detach: bool
    device: torch.device | str | None
    dtype: torch.dtype | None
    keep: Keep
    stop: bool
    derives: bool = field(init=False)  # whether something else is kept than the value itself

    def __post_init__(self) -> None:
        self.derives = not (self.at is self.transform is self.device is self.dtype is None)

    def keeps(self, value: Any, freeze: Callable[[Tensor], Tensor] = snapshot) -> Kept:
        """What to keep of a value: attached if it requires grad, else a snapshot."""
        if self.derives:
            return self._nested(self._derived(value), settle)
        if type(value) is Tensor and (self.detach or not value.requires_grad):
            return freeze(value), None
        return self._nested(value, freeze)

    def _nested(self, value: Any, freeze: Callable[[Tensor], Tensor]) -> Kept:
        checks: dict[int, tuple[int, Tensor | None]] = {}

        def keep_leaf(leaf: Any) -> Any:
            if not issubclass(type(leaf), Tensor):  # isinstance would ask a proxy for its class
                # Opaque objects are kept by reference, but arrays may alias a tensor.
                kind = cast(Any, type(leaf))
                return copy.copy(leaf) if hasattr(kind, "__array_interface__") else leaf
            if self.detach or not leaf.requires_grad or leaf.is_inference():
                return freeze(leaf)
            local(leaf)  # what a collective still brings is waited for
            # Fused optimisers change parameters without a new version: a twin shows it.
            dense = leaf.layout is torch.strided
            twin = duplicate(leaf) if dense and isinstance(leaf, nn.Parameter) else None
            checks[id(leaf)] = (version_of(leaf), twin)
            return leaf

        return map_leaves(keep_leaf, value), checks or None

    def _derived(self, value: Any) -> Any:
        """What is made of a value by at, transform, device and dtype; of its memory only that."""

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
        if self.transform is not None:
            value = self.transform(value)
        return map_leaves(finish, value)

    def _sliced(self, value: Any) -> Any:
        try:
            return take(value, self.at)
        except (Misfit, SeveralTensors) as error:
            if callable(self.at):  # the user's own error
                raise
            raise Unsliced(error.found, error.remedy) from error


class CaptureTap(Tap):
    """Keeps the values at a target: one entry a call, or for gradients one a call and pass."""

    replaces = False
    module: nn.Module | None = None
    freeze: Callable[[Tensor], Tensor] = staticmethod(snapshot)
    missed: Sequence[int] = ()  # the calls that had not the part asked for, in order
    order: Order | None = None  # of gradients, if all are kept, as far as they were read
    # Gradients that come in shares, to be derived from.
    shared: set[tuple[int, Path]] = cast(Any, frozenset())
    waiting = True  # for stop=True: until it has fired
    layouts: Sequence[Any] = ()  # how a tensor-parallel plan spreads the value
    numbers: Sequence[int] = ()  # of the calls that are kept, in order, if some were asked for
    task = -1  # of a parameter: the last backward pass that came; `seen` counts them
    # Of gradients: the structure of the value by call, and what arrived by call and backward pass.
    shapes: dict[int, tuple[Any, list[list[Path]]]] = _NONE
    grads: dict[tuple[int, int], dict[Path, Kept]] = _NONE

    def __init__(self, target: Target, context: weakref.ref[Any], options: Options) -> None:
        self.target, self.context, self.options = target, context, options
        self.kept: list[Kept] = []

    @property
    def holds(self) -> bool:
        """Whether something was kept."""
        return bool(self.kept or any(self.grads.values()))

    @property
    def slicing(self) -> tuple[str | None, bool]:
        """Which slice of each value is kept, as text, and whether that was transformed."""
        at = self.options.at
        return None if at is None else spelled(at), self.options.transform is not None

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        if recomputed:
            return KEEP
        options = self.options
        if options.keep == "first" and (self.fired or self.reasons):
            self.fired += 1
        elif not self._take(value, index, frame):
            return KEEP
        if options.stop and self.waiting and not self.lacking:
            self.waiting = False
            context: Any = self.context()
            if context is not None:
                context.arrived()
        return KEEP

    def _take(self, value: Any, index: int, frame: Frame | None) -> bool:
        """Make of a value what is kept of it; false if there is nothing to keep."""
        try:
            kept = self.options.keeps(value, self.freeze)
        except Unsliced as error:
            self.explain(index, error.reason, error.remedy)
            return False
        except Exception as error:
            add_place(error, self)
            self.explain(index, *self._raised(error))  # the user may catch it, and call again
            raise
        if frame is not None:  # an input: numbered when the call is complete
            frame.pending = (*frame.pending, (self, kept))
        else:
            self.commit(kept, index)
        return True

    def commit(self, kept: Kept, index: int, late: bool = False) -> None:
        """Keep a value. Late ones are inputs of calls that never completed."""
        if late and (index in self.numbers or not self.wants_late()):
            return  # a later call has that number, or one that was completed is kept
        self.fired += 1
        if self.chosen is not None:
            self._commit_numbered(kept, index)
        elif self.options.keep == "all" or not self.kept:
            self.kept.append(kept)
        elif self.options.keep == "last" and not late:
            self.kept[0] = kept

    def _commit_numbered(self, kept: Kept, index: int) -> None:
        """Keep a value in the order of numbers: the input of a recursive call comes after others
        that began later.
        """
        numbers = cast("list[int]", self.numbers)
        at = bisect_left(numbers, index)
        self.kept.insert(at, kept)
        numbers.insert(at, index)
        if len(numbers) > 1 and self.options.keep != "all":
            gone = -1 if self.options.keep == "first" else 0
            del self.kept[gone], numbers[gone]

    def choose(self, calls: Calls) -> None:
        """Keep some calls only, with their numbers."""
        self.chosen, self.lacking, self.numbers = calls, calls.named, []

    def wants(self, index: int, step: Step | None) -> bool:
        wanted = super().wants(index, step)
        if wanted and index in self.lacking:
            self.lacking -= {index}
        return wanted

    def leave_out(self, index: int, why: Untold) -> None:
        if why is not FORGOTTEN and (self.options.keep == "all" or not self.untold):
            self.untold = self.untold or {}
            cast("dict[int, Untold]", self.untold)[index] = why

    def numbered(self) -> Entries:
        """The values with their calls; None for a call that had not the part asked for."""
        if self.chosen is not None:
            return Numbered(self.kept, self.numbers, self.missed)
        if self.options.keep == "all":
            return Values(self.kept, self.missed)
        last = self.fired + len(self.reasons) - 1
        return Values(self.kept, start=last if self.options.keep == "last" else 0)

    def explain(self, index: int, reason: str, remedy: str = "", path: Path = ()) -> None:
        if self.options.keep == "last":  # else an earlier value would be read as the last one
            self.kept, self.numbers = [], []
        elif self.options.keep == "all" and index not in self.reasons:
            self.missed = self.missed or []
            insort(cast("list[int]", self.missed), index)
        super().explain(index, reason, remedy, path)

    def withdraw(self, index: int) -> None:
        if index in self.reasons:
            self.missed = [call for call in self.missed if call != index]
        super().withdraw(index)

    def entries(self) -> list[Kept]:
        """All that is kept, call by call."""
        found = [kept for _, kept in self.gathered()] if self.grads else self.kept
        return [kept for kept in found if kept is not None]

    def release(self) -> None:
        """Let go of the module: a record does not keep it alive."""
        self.target.module = cast(nn.Module, None)

    def note_layouts(self) -> None:
        """Before the module is let go of: how a tensor-parallel plan spreads its values."""
        if self.options.at is None and self.options.transform is None:
            found = layouts(self.target)
            if found:
                self.layouts = found

    def wants_late(self) -> bool:
        """Whether the input of a call that raised is of use."""
        return self.options.keep == "all" or not self.kept

    # -- gradients ------------------------------------------------------------------------------

    def several(self, index: int, path: Path) -> None:
        if self.options.derives:
            self.shared = self.shared or set()
            self.shared.add((index, path))

    def divided(self, index: int, path: Path) -> None:
        for paths in self.shapes.get(index, WHOLE)[1]:
            for one in paths if path in paths else ():
                super().divided(index, one)

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        whole = isinstance(value, Tensor)
        if self.options.keep != "all" and (whole or not tensors):
            return  # what is not known by then is whole
        self.shapes = self.shapes or {}
        shape = None if whole else map_leaves(lambda leaf: None, value)
        paths = WHOLE[1] if whole else [paths for _, paths in tensors]
        self.remember(self.shapes, index, (shape, paths))

    def remember(self, entries: Any, index: int, entry: Any) -> None:
        keep = self.options.keep
        if keep == "first" and len(entries) >= _RECENT:
            return
        entries[index] = entry
        if keep == "last" and len(entries) > _RECENT:
            held = [call for call, _ in self.grads]
            del entries[next(old for old in entries if old not in held)]

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        task = backward_id()
        if index < 0 and self.chosen is not None:  # of a parameter: numbered by backward pass
            self.seen += task != self.task
            self.task, index = task, self.seen - 1
            if not self.wants(index, None):
                return None
        key = (index, task)
        parts = self.grads.get(key)
        if parts is None:
            keep = self.options.keep
            # A backward has the last call first: which one is kept goes by the numbers.
            if self.grads and keep != "all" and (key < next(iter(self.grads))) == (keep == "last"):
                return None
            if path and index not in self.shapes:
                self.grads = {}  # what is there is not the one that was asked for
                self.explain(index, *_FORGOTTEN)
                return None
            if not self.grads or keep != "all":
                self.grads = {}
            parts = self.grads[key] = {}
            self.fired += 1
        if path in parts and self.target.port.startswith("grad_input"):
            grad = parts[path][0] + grad  # the shares of an input come one by one
        # Shares are summed as they are; what is derived of them is derived on gathering. Of what
        # cannot be read nothing is derived.
        plain = (index, path) in self.shared or unreadable(grad, None, None)
        options = PLAIN if plain else self.options
        try:
            parts[path] = options.keeps(grad, gradient_snapshot)
        except Unsliced as error:
            self.explain(index, error.reason, error.remedy, path)
        except Exception as error:
            add_place(error, self)
            self.explain(index, *self._raised(error), path=path)
            raise
        return None

    def _raised(self, error: Exception) -> tuple[str, str]:
        """What to say of a call for which a function of the user's raised."""
        option = "at" if self.options.transform is None else "transform"
        found = f"the function in {option}= raised {type(error).__name__}: {error!s:.200}."
        return found, "Let it give something for every value, such as None."

    def gathered(self) -> Entries:
        """The gradients with their calls, in order of calls, then of backward passes; None for a
        call without any.
        """
        self.lost()
        grads, everything = self.grads, self.options.keep == "all"
        order = self.order or Order()
        if everything:
            self.order = order
        keys = order.update(grads, self.shapes, self.reasons)
        if not everything:
            keys = [key for key in keys if key in grads] or keys[-1:]
        return Gradients(keys, grads, self._gather)

    def _gather(self, call: int, arrived: dict[Path, Kept]) -> Kept | None:
        shape, groups = self.shapes.get(call, WHOLE)
        parts = dict(arrived)
        for path in [path for path in arrived if (call, path) in self.shared]:
            if unreadable(arrived[path][0], None, None) is None:
                try:
                    parts[path] = self.options.keeps(arrived[path][0])
                except Unsliced as error:
                    self.explain(call, error.reason, error.remedy, path)
                    del parts[path]
        if () in parts or not parts:
            return parts.get(())
        checks: dict[int, Any] = {}
        for paths in groups:
            for path in paths if paths[0] in parts else ():
                value, check = parts[paths[0]]
                shape = set_part(shape, path, value)
                checks |= check if isinstance(check, dict) else {}
        return shape, checks or None


PLAIN = Options(None, None, False, None, None, "all", False)
