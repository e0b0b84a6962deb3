"""Parameters, buffers and modules: get them, change them, put them back.

- `get_module(model, path)`, `get_parameter(model, path)`: what stands at a path
- `preserve(model, *where)`: parameters and buffers are afterwards what they were before
- `replace_module(model, where, new)`: another module in the place of one
- `swap(taps, undo)`: how `edit` changes the data of parameters; `Undo` puts it back
- `Saving`: what is saved for backwards meanwhile
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from hookline.core.contexts import Anchored
from hookline.core.distributed import gatherer, is_gathered, placements, reshard
from hookline.core.places import Target, Where, resolve
from hookline.core.recomputation import around_region, awaited, saving
from hookline.core.sites import Site
from hookline.core.snapshots import same_bits
from hookline.core.taps import Tap
from hookline.core.tree import join, tensors_of, walk
from hookline.errors import ChangeError, NotHookable, PlaceError, PlaceNotFound

__all__ = [
    "Saving", "Undo", "get_module", "get_parameter", "preserve", "put_back", "replace_module",
    "restore", "swap",
]  # fmt: skip

Maker = Callable[[nn.Module], nn.Module]


def get_module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, also a container; an error with the closest names if there is none.

    >>> get_module(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    return _find(model, (path,), "output", one=True)[0].module


def get_parameter(model: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at a path; an error with the closest names if there is none.

    >>> get_parameter(nn.Sequential(nn.Linear(2, 3)), "0.weight").shape
    torch.Size([3, 2])
    """
    return cast(Tensor, _find(model, (path,), "value", one=True)[0].tensor())


def _find(model: Any, wheres: Any, *ports: str, one: bool = False) -> list[Target]:
    """What stands at places, each once; an error for what has none of these ports."""
    targets = {t.key: t for r in resolve(model, wheres, hookable=False) for t in r.targets}
    if one and len(targets) > 1:
        asked = f"What stands at {wheres[0]!r} was asked for."
        raise PlaceNotFound(asked, f"It matches {len(targets)} places.", "Name one of them.")
    for target in targets.values():
        if target.port not in ports or target.parts:
            kind = " or ".join("module" if port == "output" else "parameter" for port in ports)
            names = ", ".join(join(target.path, name) for name, _ in tensors_of(target.module))
            module = kind == "parameter" and target.port == "output"
            found = f"It is a module, with {names or 'none'}." if module else f"That is no {kind}."
            asked = f"A {kind} was asked for at {str(target.place)!r}."
            remedy = f"Give the path of a {kind}, without port or part."
            raise (PlaceNotFound if one else PlaceError)(asked, found, remedy)
    return list(targets.values())


# -- putting things back --------------------------------------------------------------------------


class Undo(list[Callable[[], None]]):
    """How to put back what was changed, the last first; may be interrupted and run again."""

    def run(self) -> None:
        while self:
            self[-1]()
            self.pop()


# The open swaps of each slot, in order, with a lock: two threads may swap the same thing. Each slot
# has its own, as an interrupt may leave one locked for ever.
_chains: dict[tuple[int, str], tuple[Any, list[_Swap]]] = {}


class _Swap:
    """Something put in a slot of a dict, and what stood there before; undone in any order."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name, self.slot = holder, name, (id(holder), name)
        self.lock, self.chain = threading.RLock(), list[_Swap]()

    def get(self) -> Any:
        return self.holder[self.name]

    def set(self, value: Any) -> None:
        self.holder[self.name] = value

    def put(self, new: Any, undo: Undo) -> None:
        undo.append(self.undo)
        while self not in self.chain:
            entry = _chains.setdefault(self.slot, (threading.RLock(), []))
            self.lock, self.chain = entry
            with self.lock:
                if _chains.get(self.slot) is entry:  # else another thread has just closed it
                    self.old = self.get()
                    self.chain.append(self)
                    self.set(new)

    def undo(self) -> None:
        with self.lock:
            if self in self.chain:
                above = self.chain[self.chain.index(self) + 1 :]
                if above:  # something else was put over it since: that one puts the old one back
                    above[0].old = self.old
                else:
                    self.set(self.old)
                self.chain.remove(self)
                if not self.chain:
                    del _chains[self.slot]


# -- swapping a parameter's data ------------------------------------------------------------------


_autograd: Any = cast(Any, torch._C)._autograd
# Private, so detected: without it a graph that was made before an edit raises after it.
_set_versions: Any = getattr(_autograd, "_unsafe_set_version_counter", None)


def _mark(tensor: Tensor, version: int | None = None) -> None:
    """Tell autograd and autocast, which know a parameter by its identity, that it is another."""
    torch.clear_autocast_cache()
    if not tensor.is_inference():
        if version is None or _set_versions is None:
            increment_version(tensor)
        else:
            _set_versions((tensor,), (version,))


_serials = itertools.count()
_swapped: WeakValueDictionary[int, _DataSwap] = WeakValueDictionary()  # by the new data's storage


class _DataSwap(_Swap):
    """Other data put in a parameter.

    Convolutions and norms save a parameter itself for the backward, not its data: a graph that
    was made before must fail meanwhile, and one that is made meanwhile must fail afterwards, hence
    a version that counting never reaches. With the data, the version comes back.
    """

    def get(self) -> tuple[Tensor, int]:
        return self.holder.data, 0 if self.holder.is_inference() else self.holder._version

    def set(self, value: tuple[Tensor, int]) -> None:
        self.last = self.get()[1]
        self.holder.data, version = value
        _mark(self.holder, version)

    @property
    def _version(self) -> int:
        """Of the new data: the parameter's while it is in it, then the last one."""
        return self.holder._version if self in self.chain else self.last


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse one, say
        return -id(tensor)


def swap(taps: Iterable[Tap], undo: Undo, attached: bool) -> Saving | None:
    """Change the data of the parameters at taps; what is then saved for backwards."""
    for tap in taps:
        tensor = tap.target.tensor()
        asked = f"The value of {str(tap.place)!r} was to be changed."
        if tensor is None or nn.parameter.is_lazy(tensor):
            raise NotHookable(asked, "It has none yet: it is lazy.", "Run the model once before.")
        gathered = is_gathered(tap.target.module) and isinstance(tensor, nn.Parameter)
        if gathered or placements(tensor) is not None:
            found = "It is kept in shards, one on each rank, which cannot be swapped."
            remedy = "Change it in place, under torch.no_grad(), within hookline.preserve(model)."
            raise NotHookable(asked, found, remedy)
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            new = tap.receive(tensor.detach().clone(), 0, False, None)
            new = torch.empty_like(tensor).copy_(new)  # nobody else's memory
        made = _swapped[_storage(new)] = _DataSwap(tensor, "data")
        made.put((new, (next(_serials) % 2**20 + 2**20) << 10), undo)
    if not undo or attached:
        return None
    found = Saving()
    undo.append(found.leave)
    found.hooks.__enter__()
    return found


class _Saved:
    """A tensor that was saved for the backward."""

    __slots__ = ("__weakref__", "counted", "read", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.read = tensor.detach(), False
        self.counted: Any = _swapped.get(_storage(tensor), self.tensor)
        self.version: int = self.counted._version


class Saving:
    """What is saved for the backward while data is swapped.

    Autograd saves a leaf as it is, so that the data swapped back would be used by a graph that was
    made meanwhile; an alias of the new data is saved instead. Saving through hooks turns torch's
    check for in-place changes off: it is made here. What a checkpointed region saves is what it
    needs to run again.
    """

    def __init__(self) -> None:
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)
        # Of regions what they have saved, with the modules in whose calls they began.
        self._regions: WeakKeyDictionary[_Saved, set[int]] = WeakKeyDictionary()

    def leave(self) -> None:
        """Take the hooks off, also from under others; in another thread they stay, harmlessly."""
        top = saving(True)
        if top is not None:
            self.hooks.__exit__()
            if top[0] != self.hooks.pack_hook:
                try:
                    self.leave()
                finally:
                    _autograd._push_saved_tensors_default_hooks(*top)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        around = around_region(sys._getframe(1))
        if around is not None:
            self._regions[saved] = around
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        saved.read = True
        if saved.counted._version != saved.version:
            # The words are torch's own.
            raise RuntimeError("a tensor saved for backward was modified by an inplace operation")
        return saved.tensor

    def awaiting(self, ident: int | None) -> bool:
        """Whether a region has not run again so far; with an id, one in a call of that module."""
        regions = [held for saved, held in self._regions.items() if not saved.read]
        return any(ident is None or ident in held for held in regions)


# -- verbs ----------------------------------------------------------------------------------------


class _PutsBack(Anchored):
    """A verb that changes the model step by step, and puts it back."""

    def __init__(self, model: nn.Module, *where: Where) -> None:
        super().__init__(model)
        self._wheres, self._undo = where, Undo()

    def _stop(self) -> None:
        self._undo.run()


class preserve(_PutsBack):
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

    def _start(self, attached: bool) -> None:
        tensors: dict[int, Any] = {}
        reshard(self._model)
        for target in _find(self._model, self._wheres or ("",), "output", "value"):
            if is_gathered(target.module) and gatherer(self._model, target.path) is None:
                raise NotHookable(
                    f"The parameters at {str(target.place)!r} were to be preserved.",
                    "FSDP gathers them from outside of the model that was given.",
                    "Give the whole model, and name the places in it.",
                )
            only = target.attribute
            for owner in [target.module] if only else [module for _, module in walk(target.module)]:
                for table in (owner._parameters, owner._buffers):
                    before = dict(table)
                    for name in before if only is None else {only} & before.keys():
                        tensors[id(before[name])] = before[name]
                        self._undo.append(partial(put_back, owner, table, before, name))
        for tensor in tensors.values():
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                old = tensor.data, tensor.detach().clone(), tensor.requires_grad
                self._undo.append(partial(restore, tensor, *old))
        self._undo.append(partial(reshard, self._model))


def put_back(owner: nn.Module, table: dict[str, Any], before: dict[str, Any], name: str) -> None:
    """Put a tensor back where it was registered, in the old order: optimisers go by it."""
    for other in (owner.__dict__, owner._parameters, owner._buffers):
        if other is not table and name in other:
            del other[name]  # it would shadow what is put back
    table[name] = before[name]
    if list(table.keys()) != list(before):
        for key in [key for key in before | table if key in table]:
            table[key] = table.pop(key)


def restore(tensor: Tensor, data: Tensor, copy: Tensor, requires_grad: bool) -> None:
    """Make a tensor what it was: the same memory, bits and `requires_grad`."""
    plain = data.layout is torch.strided and not data.is_quantized  # else bits cannot be compared
    if plain and data.untyped_storage().nbytes() < copy.untyped_storage().nbytes():  # freed inside
        data.untyped_storage().resize_(copy.untyped_storage().nbytes())
    if not (plain and _geometry(tensor) == _geometry(data) and same_bits(data, copy)):
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            data.copy_(copy)
        tensor.data = data
        _mark(tensor)
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _geometry(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.data_ptr()


class replace_module(_PutsBack):
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

    def __init__(self, model: nn.Module, where: Where, new: nn.Module | Maker) -> None:
        super().__init__(model, where)
        self._new = new

    def _start(self, attached: bool) -> None:
        self._sites: list[Site] = []
        tables = [module._modules for _, module in walk(self._model)]
        for target in _find(self._model, self._wheres, "output"):
            old, asked = target.module, f"A module was to be put at {str(target.place)!r}."
            if old is self._model:
                raise PlaceError(asked, "The model itself has no parent.", "Name a part of it.")
            new = self._new if isinstance(self._new, nn.Module) else self._new(old)
            if not isinstance(new, nn.Module):
                raise ChangeError(
                    asked, f"The function made a {type(new).__name__}.", "Return one."
                )
            for table in tables:
                for name in [name for name, child in table.items() if child is old]:
                    _Swap(table, name).put(new, self._undo)
            if not isinstance(new, torch.jit.ScriptModule):
                site = Site(new, weakref.ref(self), None)
                site.counted = True  # also where a checkpoint will call it again
                self._sites.append(site)
                self._undo.append(partial(site.unregister, new))
                site.register(new)

    def _verify(self) -> None:
        for site in self._sites:
            if site.regions is not None and site.regions.awaiting():
                raise awaited(f"replace_module let {type(site.module).__name__} be called")
