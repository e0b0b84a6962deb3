"""Parameters, buffers and modules: get them, change them, put them back.

- `get_module(model, path)`, `get_parameter(model, path)`: what stands at a path
- `preserve(model, *where)`: parameters and buffers are afterwards what they were before
- `replace_module(model, where, new)`: another module in the place of one
- `swap`, `swap_back`, `Saving`: how `edit` changes a parameter's data and undoes it

A little long: the ways to put something back belong together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.nn.parameter import is_lazy

from hookline.core.distributed import gatherer, is_gathered, placements, reshard
from hookline.core.hooks import Anchored
from hookline.core.places import Request, Target, Where, resolve
from hookline.core.sites import Tap
from hookline.core.snapshots import same_bits
from hookline.core.tree import tensors_of, walk
from hookline.errors import ChangeError, NotHookable, PlaceError, PlaceNotFound

__all__ = [
    "Saving",
    "Swap",
    "get_module",
    "get_parameter",
    "preserve",
    "replace_module",
    "swap",
    "swap_back",
]


def get_module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, also a container; an error with the closest names if there is none.

    >>> get_module(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    return _one(model, path, "module").module


def get_parameter(model: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at a path; an error with the closest names if there is none.

    >>> get_parameter(nn.Sequential(nn.Linear(2, 3)), "0.weight").shape
    torch.Size([3, 2])
    """
    found = _one(model, path, "parameter").tensor()
    assert found is not None
    return found


def _one(model: nn.Module, path: str, kind: str) -> Target:
    targets = [t for r in resolve(model, (path,), hookable=False) for t in r.targets]
    target = targets[0]
    is_module = target.attribute is None
    plain = target.port == ("output" if is_module else "value") and not target.parts
    if len(targets) == 1 and plain and is_module == (kind == "module"):
        return target
    found = f"It matches {len(targets)} places."
    if len(targets) == 1 and is_module and kind == "parameter":
        names = [
            f"{target.path}.{n}" for n in (*target.module._parameters, *target.module._buffers)
        ]
        found = f"It is a module, with {', '.join(names) or 'none of its own'}."
    elif len(targets) == 1:
        found = "It is not one."
    raise PlaceNotFound(
        f"The {kind} {path!r} was asked for.", found, f"Give the path of one {kind}, without port."
    )


# -- swapping a parameter's data ------------------------------------------------------------------


_Versions = Callable[[tuple[Tensor, ...], tuple[int, ...]], None]
# Private, so detected: without it a graph that was made before an edit raises after it.
_set_versions: _Versions | None = getattr(
    cast(Any, torch._C)._autograd, "_unsafe_set_version_counter", None
)  # fmt: skip


class Swap:
    """A parameter whose data an edit has swapped."""

    __slots__ = ("ended", "old", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.old = tensor.data
        self.storage = 0
        self.version = _version(tensor)
        self.ended: int | None = None  # the version just before the data was swapped back

    def put(self, new: Tensor) -> None:
        """Swap the data in. Convolutions and norms save a parameter itself for the backward, not
        its data: a graph that was made before must fail meanwhile, and one that is made meanwhile
        must fail afterwards, hence a version that counting never reaches.
        """
        self.tensor.data = new
        self.storage = self.tensor.untyped_storage()._cdata
        _touch(self.tensor)
        if _set_versions is not None and not self.tensor.is_inference():
            _set_versions((self.tensor,), ((next(_swaps) % 2**20 + 2**20) << 10,))

    def end(self) -> None:
        """Swap the data back, and the version: a graph that was made before is right again."""
        self.ended = _version(self.tensor)
        self.tensor.data = self.old
        if _set_versions is not None and not self.tensor.is_inference():
            _set_versions((self.tensor,), (self.version,))
        else:
            _touch(self.tensor)
        torch.clear_autocast_cache()


_swaps = itertools.count()
_chains: dict[int, list[Swap]] = {}  # the open swaps of each parameter, by id, in order


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _touch(tensor: Tensor) -> None:
    if not tensor.is_inference():
        increment_version(tensor)
    torch.clear_autocast_cache()  # it holds casts of parameters by their identity


def swap(taps: Iterable[Tap], swaps: list[Swap]) -> None:
    """Change the data of the parameters at taps; what was swapped is added to `swaps`."""
    seen: set[int] = set()
    for tap in taps:
        tensor = tap.target.tensor()
        if tensor is None or is_lazy(tensor):
            raise NotHookable(
                f"The value of {str(tap.place)!r} was to be changed.",
                "It has none yet: its module is a lazy one that never ran.",
                "Run the model once before.",
            )
        gathered = is_gathered(tap.target.module) and isinstance(tensor, nn.Parameter)
        if gathered or placements(tensor) is not None:
            raise NotHookable(
                f"The value of {str(tap.place)!r} was to be changed.",
                "It is kept in shards, one on each rank, which cannot be swapped.",
                "Change it in place, under torch.no_grad(), within `hookline.preserve(model)`.",
            )
        if id(tensor) in seen:  # shared under two names
            tap.fired += 1
            continue
        seen.add(id(tensor))
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            given = tensor.detach().clone()
            new = tap.receive(given, 0, False, None)
            if new is not given:  # nobody else's memory
                new = torch.empty_like(given).copy_(new)
        made = Swap(tensor)
        swaps.append(made)
        _chains.setdefault(id(tensor), []).append(made)
        made.put(new.detach())


def swap_back(swaps: list[Swap]) -> None:
    """Put the data back, also where another edit was laid over it since."""
    while swaps:
        made = swaps[-1]
        chain = _chains.get(id(made.tensor), [])
        if made in chain:
            position = chain.index(made)
            if position == len(chain) - 1:
                made.end()
            else:
                chain[position + 1].old = made.old
                chain[position + 1].version = made.version
            del chain[position]
        if not chain:
            _chains.pop(id(made.tensor), None)
        swaps.pop()


class Saving(saved_tensors_hooks):
    """Keeps a graph that is made with swapped data right after the data is swapped back.

    Autograd saves a leaf as it is, so that the data swapped back would be used; an alias of the
    data is saved instead. Saving through hooks turns torch's check for in-place changes off, so
    the check is made here.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def leave(self) -> None:
        """Leave; in another thread, or in another order, the hooks that stay are harmless."""
        top = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None or (top(True) or (None,))[0] is self.pack_hook:
            self.__exit__()

    @staticmethod
    def pack(tensor: Tensor) -> tuple[Tensor, int, Swap | None]:
        """What autograd saves for a tensor."""
        made = None
        try:
            storage = tensor.untyped_storage()._cdata
            made = next((c[-1] for c in _chains.values() if c[-1].storage == storage), None)
        except (NotImplementedError, RuntimeError):  # tensors without a storage
            pass
        if made is None:
            return tensor.detach(), _version(tensor), None
        return tensor.data, _version(made.tensor), made

    @staticmethod
    def unpack(saved: tuple[Tensor, int, Swap | None]) -> Tensor:
        """The saved tensor; torch's own error if it was changed in place since."""
        tensor, version, made = saved
        if made is None:
            current = _version(tensor)
        else:
            current = _version(made.tensor) if made.ended is None else made.ended
        if current != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tuple(tensor.shape)} tensor is at version {current}; "
                f"expected version {version} instead."
            )
        return tensor


# -- preserving -----------------------------------------------------------------------------------


class preserve(Anchored):
    """Parameters and buffers are afterwards, bit for bit, what they were before.

    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.detach().clone()
    >>> with preserve(model), torch.no_grad():
    ...     _ = model.weight.fill_(7)
    >>> torch.equal(model.weight, before)
    True

    Args:
        model: any module.
        where: places of parameters and buffers, or of modules (all that is in them); without
            any, the whole model.

    Values, the tensor objects themselves, and `requires_grad` are put back; `.grad` is not.
    """

    _verb = "preserve"

    def __init__(self, model: nn.Module, *where: Where) -> None:
        super().__init__(model)
        self._wheres = where or ("",)
        self._tables: list[tuple[nn.Module, dict[str, Any], dict[str, Any], set[str]]] = []
        self._saved: list[tuple[Tensor, Tensor, Tensor, bool]] = []

    def _start(self, attached: bool) -> None:
        wanted: dict[int, tuple[nn.Module, dict[str, Any], set[str]]] = {}
        reshard(self._model)
        for request in resolve(self._model, self._wheres, hookable=False):
            for target in request.targets:
                if is_gathered(target.module) and gatherer(self._model, target.path) is None:
                    raise NotHookable(
                        f"The parameters at {str(target.place)!r} were to be preserved.",
                        "FSDP gathers them from outside of the model that was given.",
                        "Give the whole model, and name the places in it.",
                    )
                for owner, table, name in _slots_at(target):
                    wanted.setdefault(id(table), (owner, table, set()))[2].add(name)
        seen: set[int] = set()
        for owner, table, names in wanted.values():
            if not isinstance(owner, torch.jit.ScriptModule):
                self._tables.append((owner, table, dict(table), names))
            for tensor in (table[name] for name in names):
                if tensor is not None and id(tensor) not in seen and not is_lazy(tensor):
                    seen.add(id(tensor))
                    copy = tensor.detach().clone()
                    self._saved.append((tensor, tensor.data, copy, tensor.requires_grad))

    def _stop(self) -> None:
        reshard(self._model)
        for tensor, data, copy, requires_grad in self._saved:
            if data.untyped_storage().nbytes() < copy.untyped_storage().nbytes():  # freed inside
                data.untyped_storage().resize_(copy.untyped_storage().nbytes())
            if not same_bits(data, copy):
                with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                    data.copy_(copy)
                _touch(tensor)
            if tensor.data.data_ptr() != data.data_ptr() or _geometry(tensor) != _geometry(data):
                tensor.data = data
                _touch(tensor)
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        for owner, table, before, names in self._tables:
            for name in names:
                for other in (owner.__dict__, owner._parameters, owner._buffers):
                    if other is not table:
                        other.pop(name, None)  # what shadows the tensor that is put back
            if any(table.get(name) is not before[name] for name in names) or names - set(table):
                now = {**table, **{name: before[name] for name in names}}
                table.clear()  # in the old order: optimisers go by it
                table.update({name: now.pop(name) for name in before if name in now} | now)
        self._saved, self._tables = [], []


def _slots_at(target: Target) -> list[tuple[nn.Module, dict[str, Any], str]]:
    """The tables of parameters and buffers at a target, with the names in them."""
    owners = [target.module] if target.attribute else [m for _, m in walk(target.module)]
    return [
        (owner, table, name)
        for owner in owners
        for table in _tables_of(owner)
        for name in table
        if target.attribute in (None, name)
    ]


def _tables_of(owner: nn.Module) -> tuple[dict[str, Any], ...]:
    if isinstance(owner, torch.jit.ScriptModule):  # whose tables are no dicts, and never change
        return (dict(tensors_of(owner)),)
    return owner._parameters, owner._buffers


def _geometry(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


# -- replacing modules ----------------------------------------------------------------------------


class replace_module(Anchored):
    """Another module in the place of one, wherever the old one is used.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with replace_module(model, "0", nn.Identity()):
    ...     model(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    >>> type(model[0]).__name__
    'Linear'

    Args:
        model: any module.
        where: a place, a module type or anything else that `select` takes.
        new: the module to put there, or a function that makes one from the old one.
    """

    _verb = "replace_module"

    def __init__(
        self, model: nn.Module, where: Where, new: nn.Module | Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__(model)
        self._wheres = (where,)
        self._new = new
        self._slots: list[_Slot] = []

    def _start(self, attached: bool) -> None:
        parents = [module for _, module in walk(self._model)]
        for target in _module_targets(resolve(self._model, self._wheres, hookable=False)):
            old = target.module
            new = self._new if isinstance(self._new, nn.Module) else self._new(old)
            if not isinstance(new, nn.Module):
                raise ChangeError(
                    f"A module was to be put at {str(target.place)!r}.",
                    f"The function made a {type(new).__name__}.",
                    "Return a torch.nn.Module.",
                )
            for parent in parents:
                for name in [n for n, child in parent._modules.items() if child is old]:
                    slot = _Slot(parent._modules, name, old)
                    self._slots.append(slot)
                    _open_slots.append(slot)
                    parent._modules[name] = new

    def _stop(self) -> None:
        while self._slots:
            self._slots[-1].restore()
            self._slots.pop()


class _Slot:
    """Where a module was replaced, and what stood there."""

    __slots__ = ("modules", "name", "old")

    def __init__(self, modules: dict[str, Any], name: str, old: nn.Module) -> None:
        self.modules, self.name, self.old = modules, name, old

    def restore(self) -> None:
        if self not in _open_slots:
            return
        position = _open_slots.index(self)
        for later in _open_slots[position + 1 :]:  # replaced again since: that one puts it back
            if later.modules is self.modules and later.name == self.name:
                later.old = self.old
                break
        else:
            self.modules[self.name] = self.old
        del _open_slots[position]


_open_slots: list[_Slot] = []  # in order of entering


def _module_targets(requests: list[Request]) -> list[Target]:
    found: dict[int, Target] = {}
    for request in requests:
        for target in request.targets:
            if target.attribute is not None or target.port != "output" or target.parts:
                raise PlaceError(
                    f"A module was to be replaced at {str(target.place)!r}.",
                    "That is no module.",
                    "Give the path of a module, without port or part.",
                )
            if not target.path:
                raise PlaceError(
                    "The model itself was to be replaced.",
                    "It has no parent that holds it.",
                    "Name one of its modules.",
                )
            found[id(target.module)] = target
    return list(found.values())
