"""Keep a call of a model, so that it can be run again as it was.

- `KeptCall`: one call: its arguments, random numbers, buffers and settings
- `ModelParts`: the modules, parameters and buffers of a model, found once
- `BufferCopies`: the buffers of a model, copied before a call if calls change them
- `CallHolder`: a hook that keeps a call as long as its graph lives
- `count_of_writes(tensor)`: how often it was changed in place
- `split_arguments(inputs, positional)`: arguments by name as those by position and by keyword
- `autocast_settings(kinds)`: whether autocast is on for these kinds of devices, and its dtypes
- `unwrapped(model)`, `is_spread(model)`: which model can be run again in one process
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import hooks as torch_hooks

from hookline.engine.fsdp import is_gathered
from hookline.guards.finite_checks import finite_probe
from hookline.isolation.backward import copy_with_leaves
from hookline.isolation.isolated_runs import isolated
from hookline.isolation.module_index import ModuleIndex
from hookline.isolation.random_state import RandomState
from hookline.isolation.training_modes import modes_of, set_modes
from hookline.places.tree import join, walk
from hookline.torch_private import (
    BatchNormBase,
    buffers_of,
    parameters_of,
    submodules_of,
    version_of,
)
from hookline.values.nested import Path, children, leaves, map_leaves, show_path
from hookline.values.sharding import placements
from hookline.values.snapshots import same_bits

__all__ = [
    "BufferCopies",
    "CallHolder",
    "KeptCall",
    "ModelParts",
    "autocast_settings",
    "count_of_writes",
    "is_spread",
    "split_arguments",
    "unwrapped",
]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
_MOST = 2**28  # bytes of buffers that are copied before it is known which of them change


def count_of_writes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for an inference tensor."""
    return -1 if tensor.is_inference() else version_of(tensor)


def split_arguments(
    inputs: Mapping[Any, Any], positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call that are passed by position, and those by keyword."""
    args, kwargs = list(inputs.items())[:positional], list(inputs.items())[positional:]
    return tuple(value for _, value in args), {str(name): value for name, value in kwargs}


def autocast_settings(kinds: Iterable[str]) -> list[tuple[str, bool, torch.dtype]]:
    """Return for each kind of device whether autocast is on, and its dtype."""
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]


def _there(held: dict[str, Tensor | None], name: str) -> Tensor | None:
    """Return a buffer; None if it was removed, or is lazy and not yet initialized."""
    tensor = held[name] if name in held else None  # noqa: SIM401 - a ScriptModule's has no get
    return None if tensor is None or is_lazy(tensor) else tensor


class BufferCopy(NamedTuple):
    """A buffer at some time: the dict that holds it, and a copy if one was taken."""

    held: dict[str, Tensor | None]  # the module's own
    name: str
    path: str
    tensor: Tensor
    version: int
    copy: Tensor | None


class BufferCopies:
    """The buffers of a model, with copies of those that a call was seen to change."""

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.places = [
            (buffers_of(module), name, join(names[id(module)], name))
            for _, module in walk(model)
            for name in buffers_of(module).keys()  # noqa: SIM118 - a ScriptModule's has no iterator
        ]
        found = [t for held, name, _ in self.places if (t := _there(held, name)) is not None]
        small = sum(t.nbytes for t in found if not t.is_sparse) <= _MOST
        # torch does not count what batch norm does to its statistics.
        norms = [m for _, m in walk(model) if isinstance(m, BatchNormBase)]
        self._uncounted = {join(names[id(m)], name) for m in norms for name in buffers_of(m)}
        self.changing = {path for _, _, path in self.places} if small else set(self._uncounted)
        self.learnt = not small

    def now(self) -> list[BufferCopy]:
        """Return every buffer, its version, and a copy of those that may change."""
        kept: list[BufferCopy] = []
        for held, name, path in self.places:
            tensor = _there(held, name)
            if tensor is not None:
                copy = tensor.detach().clone() if path in self.changing else None
                kept.append(BufferCopy(held, name, path, tensor, count_of_writes(tensor), copy))
        return kept

    def learn(self, before: list[BufferCopy]) -> list[str]:
        """Note after a call which buffers it has changed; return those without a copy."""
        changed = [
            b for b in before
            if _there(b.held, b.name) is not b.tensor or count_of_writes(b.tensor) != b.version
        ]  # fmt: skip
        if not self.learnt:
            self.changing, self.learnt = set(self._uncounted), True
        self.changing |= {buffer.path for buffer in changed}
        return [buffer.path for buffer in changed if buffer.copy is None]

    @staticmethod
    def restore(kept: list[BufferCopy]) -> None:
        """Put the copied buffers back, as the same tensors."""
        for held, name, _, tensor, _, copy in kept:
            held[name] = tensor
            if copy is not None and not same_bits(tensor, copy):
                tensor.data.copy_(copy)  # by .data: what a graph has saved stays valid


class ModelParts:
    """The modules, parameters and buffers of a model, or of a module in it, found once."""

    def __init__(self, model: nn.Module, called: nn.Module, names: dict[int, str]) -> None:
        self.model, self.called, self.names = model, called, names
        self.path = names[id(called)]
        self.modules = [module for _, module in walk(called)]
        self.parameters = list(called.parameters())
        self.buffers = BufferCopies(called, names)
        self.devices = {p.device.index or 0 for p in self.parameters if p.is_cuda}
        self.changes_inputs = False  # True once a call has changed its inputs
        # By training mode, True if a call was seen to draw random numbers from numpy.
        self.draws: dict[bool | None, bool] = {}
        self._held = [held for m in self.modules for held in (submodules_of(m), parameters_of(m))]
        self._known = self._identities()

    def are_exchanged(self) -> bool:
        """Return True if modules or parameters were added, removed or exchanged since."""
        return self._identities() != self._known

    def _identities(self) -> list[int]:  # all are alive: this object keeps them
        return [*map(id, chain.from_iterable(held.values() for held in self._held))]


class KeptCall:
    """One call of a model, or of a module in it: its inputs, and all that it depends on."""

    def __init__(self, parts: ModelParts, inputs: Any, positional: int) -> None:
        # Containers are copied, since a list may grow; tensors are not, their versions are noted,
        # unless the model is known to change them.
        held = inputs
        if parts.changes_inputs:
            held = map_leaves(_copied, dict(inputs))
        elif not all(isinstance(value, Tensor) for value in inputs.values()):
            held = map_leaves(lambda leaf: leaf, dict(inputs))
        self.inputs, self.positional = held, positional
        self.versions = [(path, t, count_of_writes(t)) for path, t in leaves(held)]
        # Changes of tensors that were made in inference mode are not counted.
        self.sums = [(path, t, finite_probe(t)) for path, t, _ in self.versions if t.is_inference()]
        own = {t.device.index or 0 for _, t, _ in self.versions if t.is_cuda}
        self.devices = sorted(own | parts.devices)
        self.modes = modes_of(parts.modules)
        self.random_state = RandomState(self.devices, parts.draws.get(self.modes[0], True))
        self.parts, self.called, self.path = parts, parts.called, parts.path
        self.buffers = parts.buffers.now()
        # accelerate exchanges at each call what it has offloaded, and gives the same data again.
        self.parameters = [(p, version_of(p)) for p in parts.parameters if not p.is_meta]
        kinds = {"cpu", *(t.device.type for _, t, _ in self.versions)} - {"meta"}
        self.autocast = autocast_settings(sorted(kinds))
        self.cache = torch.is_autocast_cache_enabled()
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.lost: list[str] = []  # buffers that it changed and that were not copied
        self.gradients: dict[Path, tuple[Tensor, int]] = {}  # of its outputs, as they arrive
        self.outputs: list[tuple[Path, Tensor]] = []  # until they were checked
        self.number = 0  # the index of the call
        self.line: Any = None  # the line of the program that called
        self.trace: Any = None  # where every module is checked: what is known of the call
        self.backward: Any = None

    def learn(self) -> None:
        """Note after the call what it has changed."""
        self.lost = self.parts.buffers.learn(self.buffers)
        if any(count_of_writes(tensor) != version for _, tensor, version in self.versions):
            self.parts.changes_inputs = True
        if self.random_state.numpy is not None and self.modes[0] not in self.parts.draws:
            self.parts.draws[self.modes[0]] = not self.random_state.is_numpy_current()

    def close(self) -> None:
        """Remove the hooks from its graph."""
        if self.backward is not None:
            self.backward.remove()
            self.backward = None

    def doubts(self) -> list[str]:
        """Return reasons why running it again may give something else, as far as they are known."""
        found: list[str] = []
        changed = [path for path, t, version in self.versions if count_of_writes(t) != version]
        sums = [
            (path, before, finite_probe(t)) for path, t, before in self.sums if before is not None
        ]
        changed += [p for p, one, other in sums if other is None or not same_bits(one, other)]
        if changed:
            names = ", ".join(sorted({str(path[0]) for path in changed}))
            found.append(f"the input {names} was changed in place since")
        opaque = _opaque(self.inputs)
        if opaque:
            found.append(f"it was given a {opaque}, which the first run may have changed")
        if any(version_of(parameter) != version for parameter, version in self.parameters):
            found.append("parameters were changed since, as by an optimiser's step")
        there = set(map(id, self.called.parameters()))
        if any(id(parameter) not in there for parameter, _ in self.parameters):
            found.append("parameters were exchanged since, as after torch.func.functional_call")
        if self.lost:
            found.append(f"the buffer {self.lost[0]} was changed, and not copied before")
        if any(version_of(tensor) != version for tensor, version in self.gradients.values()):
            found.append("the gradient of its output was changed in place since")
        return found

    @contextmanager
    def again(self, gradients: bool) -> Generator[tuple[Any, Any, list[tuple[str, Tensor]]]]:
        """Set everything to the state before the call; yield the arguments to call the model with.

        The arguments are copies. With `gradients`, those that required grad are computed from new
        leaves, which are returned with their names. Afterwards the model is as it is now.
        """
        with isolated(ModuleIndex(self.called), devices=self.devices), ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference and not gradients))
            stack.enter_context(torch.set_grad_enabled(self.grad or gradients))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cache)
                )
            self.random_state.restore()
            BufferCopies.restore(self.buffers)
            set_modes(self.parts.modules, self.modes)
            yield self._arguments(gradients)

    def names(self) -> dict[int, str]:
        """Return descriptions of its inputs that require grad, by id."""
        return {
            id(t): f"the input {p[0]}{show_path(p[1:])}"
            for p, t, _ in self.versions
            if t.requires_grad
        }

    def _arguments(self, gradients: bool) -> tuple[Any, dict[str, Any], list[tuple[str, Tensor]]]:
        names = self.names()
        copy, found = copy_with_leaves(self.inputs, lambda leaf: gradients and leaf.requires_grad)
        args, kwargs = split_arguments(copy, self.positional)
        return args, kwargs, [(names[ident], leaf) for ident, leaf in found.items()]


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _opaque(value: Any) -> str:
    """Return the type of an argument that may hide state; "" if all are plain values or tensors."""
    inside = children(value)
    if inside is not None:
        return next((name for _, item in inside if (name := _opaque(item))), "")
    plain = isinstance(value, (Tensor, *_PLAIN)) or callable(value)
    return "" if plain else type(value).__name__


@torch_hooks.unserializable_hook
class CallHolder:
    """A hook on an output that does nothing but keep its call as long as the graph lives."""

    def __init__(self, kept: KeptCall) -> None:
        self.kept = kept

    def __call__(self, gradient: Tensor) -> None: ...


def unwrapped(model: Any) -> Any:
    """Return the model inside DDP and compile, which can run again without the other ranks."""
    while type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def is_spread(model: nn.Module) -> bool:
    """Return True if a forward of the model needs other ranks, and cannot be run again here."""
    return any(
        is_gathered(module)
        or (isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized())
        for module in model.modules()
    ) or any(placements(p) is not None for p in model.parameters())
