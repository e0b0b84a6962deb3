"""What is kept of a value that is captured.

- `Options`: how values are kept
- `CaptureTap`: what is kept at one target
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hookline.core.calls import Calls
from hookline.core.generation import FORGOTTEN, Step, Untold
from hookline.core.recomputation import in_backward
from hookline.core.slices import take
from hookline.core.taps import KEEP, Frame, Tap, add_place
from hookline.places.resolution import Target
from hookline.values.nested import Path, map_leaves, set_part
from hookline.values.shards import layouts, local
from hookline.values.snapshots import duplicate, gradient_snapshot, settle, snapshot, unreadable

__all__ = ["PLAIN", "WHOLE", "CaptureTap", "Keep", "Kept", "Options"]

Keep = Literal["all", "first", "last"]

# What is kept of a value: the value and what to check on reading. None: nothing (a snapshot). An
# int: the version of the tensor that it is. A dict: versions, and twins of parameters, by id.
Kept = tuple[Any, "int | dict[int, tuple[int, Tensor | None]] | None"]

WHOLE: tuple[Any, list[list[Path]]] = (None, [[()]])  # the structure of a plain tensor
_NONE = cast(Any, MappingProxyType({}))
_RECENT = 64  # calls whose gradients may still come, where not all are kept
_FORGOTTEN = (
    f"it came when {_RECENT} other calls had none so far, and what the value was is forgotten.",
    "Capture with keep='all'.",
)


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
            checks[id(leaf)] = (leaf._version, twin)
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
            return moved.clone() if moved.requires_grad and moved._is_view() else moved

        value = map_leaves(start, value)
        if self.at is not None:
            value = take(value, self.at)
        if self.transform is not None:
            value = self.transform(value)
        return map_leaves(finish, value)


class CaptureTap(Tap):
    """Keeps the values at a target: one entry a call, or for gradients one a call and pass."""

    replaces = False
    module: nn.Module | None = None
    freeze: Callable[[Tensor], Tensor] = staticmethod(snapshot)
    shared: Set[tuple[int, Path]] = frozenset()  # gradients that come in shares, to be derived from
    waiting = True  # for stop=True: until it has fired
    layouts: Sequence[Any] = ()  # how a tensor-parallel plan spreads the value
    numbers: list[int] = []  # noqa: RUF012 - of the calls that are kept, if some were asked for
    passes = 0  # of a parameter: the backward passes that came
    task = -1  # and the last one
    # Of gradients: the structure of the value by call, and what arrived by call and backward pass.
    shapes: dict[int, tuple[Any, list[list[Path]]]] = _NONE
    grads: dict[tuple[int, int], dict[Path, Kept]] = _NONE

    def __init__(self, target: Target, context: weakref.ref[Any], options: Options) -> None:
        self.target, self.context, self.options = target, context, options
        self.kept: list[Kept] = []

    @property
    def holds(self) -> bool:
        """Whether something was kept."""
        return bool(self.kept or self.grads)

    def receive(self, value: Any, index: int, recomputed: bool, frame: Frame | None) -> Any:
        if recomputed:
            return KEEP
        options = self.options
        if options.keep == "first" and self.fired:
            self.fired += 1
            return KEEP
        try:
            kept = options.keeps(value, self.freeze)
        except Exception as error:
            add_place(error, self)
            raise
        if frame is not None:  # an input: numbered when the call is complete
            frame.pending = (*frame.pending, (self, kept))
        else:
            self.commit(kept, index)
        if options.stop and self.waiting and not self.lacking:
            self.waiting = False
            context: Any = self.context()
            if context is not None:
                context.arrived()
        return KEEP

    def commit(self, kept: Kept, index: int, late: bool = False) -> None:
        """Keep a value. Late ones are inputs of calls that never completed."""
        if late and index in self.numbers:
            return  # a later call has that number
        self.fired += 1
        if self.options.keep == "all" or not self.kept:
            self.kept.append(kept)
            if self.chosen is not None:
                self.numbers.append(index)
        elif self.options.keep == "last" and not late:
            self.kept[0] = kept
            if self.chosen is not None:
                self.numbers[0] = index

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

    def numbered(self) -> list[tuple[int, Kept | None]]:
        """The values with their calls; None for a call that had not the part asked for."""
        without = {call for call, _ in self.reasons}
        if self.chosen is not None:
            without = without if self.options.keep == "all" else ()
            return _filled_up(without, zip(self.numbers, self.kept, strict=True))
        if self.options.keep != "all":
            return [(self.fired - 1 if self.options.keep == "last" else 0, k) for k in self.kept]
        calls = (call for call in itertools.count() if call not in without)
        return _filled_up(without, zip(calls, self.kept, strict=False))

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
            self.shared = {*self.shared, (index, path)}

    def expect(self, value: Any, index: int, tensors: Sequence[tuple[Tensor, list[Path]]]) -> None:
        whole = isinstance(value, Tensor)
        if self.options.keep != "all" and (whole or not tensors):
            return  # what is not known by then is whole
        self.shapes = self.shapes or {}
        shape = None if whole else map_leaves(lambda leaf: None, value)
        paths = WHOLE[1] if whole else [paths for _, paths in tensors]
        self.remember(self.shapes, index, (shape, paths))

    def remember(self, entries: Any, key: Any, entry: Any) -> None:
        keep = self.options.keep
        if keep == "first" and len(entries) >= _RECENT:
            return
        entries[key] = entry
        if keep == "last" and len(entries) > _RECENT:
            held = [call for call, _ in self.grads]
            del entries[next(old for old in entries if old not in held)]

    def gradient(self, grad: Tensor, index: int, path: Path) -> Tensor | None:
        key = (index, in_backward())
        if index < 0 and self.chosen is not None:  # of a parameter: numbered by backward pass
            if key[1] != self.task:
                self.task, self.passes = key[1], self.passes + 1
            if not self.wants(self.passes - 1, None):
                return None
            key = (self.passes - 1, key[1])
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
        except Exception as error:
            add_place(error, self)
            raise
        return None

    def gathered(self) -> list[tuple[int, Kept | None]]:
        """The gradients with their calls, in order of calls, then of backward passes; None for a
        call without any.
        """
        self.lost()
        passes: dict[int, list[dict[Path, Kept]]] = {call: [] for call in self.shapes}
        passes |= {call: [] for call, _ in self.reasons}
        for key, parts in sorted(self.grads.items(), key=itemgetter(0)):
            passes.setdefault(key[0], []).append(parts)
        found: list[tuple[int, Kept | None]] = []
        for call, arrived in sorted(passes.items()):
            found += [(call, self._gather(call, parts)) for parts in arrived] or [(call, None)]
        if self.options.keep == "all":
            return found
        return [call for call in found if call[1] is not None] or found[-1:]

    def _gather(self, call: int, parts: dict[Path, Kept]) -> Kept:
        shape, groups = self.shapes.get(call, WHOLE)
        for path in [path for path in parts if (call, path) in self.shared]:
            if unreadable(parts[path][0], None, None) is None:
                parts = {**parts, path: self.options.keeps(parts[path][0])}
        if () in parts:
            return parts[()]
        checks: dict[int, Any] = {}
        for paths in groups:
            for path in paths if paths[0] in parts else ():
                value, check = parts[paths[0]]
                shape = set_part(shape, path, value)
                checks |= check if isinstance(check, dict) else {}
        return shape, checks or None


def _filled_up(
    without: Iterable[int], found: Iterable[tuple[int, Kept]]
) -> list[tuple[int, Kept | None]]:
    """Calls with what is kept of them, and None for those without."""
    return sorted((dict.fromkeys(without) | dict(found)).items(), key=itemgetter(0))


PLAIN = Options(None, None, False, None, None, "all", False)
