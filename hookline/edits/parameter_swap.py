"""Swap the data of parameters, and undo what was changed in a model.

- `swap(handlers, undo, attached)`: change the data of parameters, for `edit`
- `Saving`: a watch over tensors that are saved for backwards meanwhile
- `Undo`: the steps that undo a change; `Swap`: one such step, for a slot of a dict
- `mark(tensor)`: tell autograd that a tensor holds other data

The verbs `preserve` and `replace_module` are in `restoring.py`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from hookline.engine.checkpointing import around_region
from hookline.engine.fsdp import is_gathered
from hookline.errors import NotHookable
from hookline.torch_private import (
    saved_tensor_hooks,
    saved_tensor_hooks_set_aside,
    set_version,
    storage_id,
    version_of,
)
from hookline.values.sharding import placements

if TYPE_CHECKING:
    from hookline.edits.editing import ParameterHandler

__all__ = ["Saving", "Swap", "Undo", "mark", "swap"]


class Undo(list[Callable[[], None]]):
    """The steps that undo a change."""

    def run(self) -> None:
        """Take the steps, the last first; after an interrupt this can be called again."""
        while self:
            self[-1]()
            self.pop()

    def covered(self) -> bool:
        """Return True if a later swap of the same slot is open, made of what this would undo."""
        swaps = [getattr(step, "__self__", None) for step in self]
        return any(isinstance(swap, Swap) and swap.chain[-1:] != [swap] for swap in swaps)


# The open swaps of each slot, in order, with a lock: two threads may swap the same thing. A lock is
# dropped with the last swap of its slot, since an interrupt at the end of a `with` may leave it
# locked. One lock for all slots would then keep every other thread waiting for ever.
_chains: dict[tuple[int, str], tuple[Any, list[Swap]]] = {}


class Swap:
    """Something put in a slot of a dict, and what stood there before; undone in any order."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder
        self.name = name
        self.slot = id(holder), name
        self.lock = threading.RLock()
        self.chain: list[Swap] = []

    def get(self) -> Any:
        """Return what is in the slot."""
        return self.holder[self.name]

    def set(self, value: Any) -> None:
        """Put something in the slot."""
        self.holder[self.name] = value

    def put(self, new: Any, undo: Undo) -> None:
        """Put something new in the slot; `undo` gets the step that takes it out."""
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
        """Put back the old one, or let a later swap of the slot put it back."""
        with self.lock:
            if self in self.chain:
                above = self.chain[self.chain.index(self) + 1 :]
                if above:  # a later swap was made since
                    above[0].old = self.old
                else:
                    self.set(self.old)
                self.chain.remove(self)
                if not self.chain:
                    del _chains[self.slot]


# -- swapping a parameter's data ------------------------------------------------------------------


_plain: Any = cast(Any, Tensor).__torch_dispatch__


def mark(tensor: Tensor, version: int | None = None) -> None:
    """Tell autograd and autocast, which know a parameter by its identity, that it is another."""
    torch.clear_autocast_cache()
    if not tensor.is_inference():
        if version is None:
            increment_version(tensor)
        else:
            set_version(tensor, version)


_serials = itertools.count()
_swapped: WeakValueDictionary[int, _DataSwap] = WeakValueDictionary()  # by the new data's storage


class _DataSwap(Swap):
    """Other data put in a parameter.

    Convolutions and norms save a parameter itself for the backward, not its data: a graph that
    was made before must fail meanwhile, and one that is made meanwhile must fail afterwards, hence
    a version that counting never reaches. With the data, the version comes back.
    """

    def get(self) -> tuple[Tensor, int]:
        return self.holder.data, 0 if self.holder.is_inference() else version_of(self.holder)

    def set(self, value: tuple[Tensor, int]) -> None:
        self.last = self.get()[1]
        self.holder.data, version = value
        mark(self.holder, version)

    def count(self) -> int:
        """Return how often the new data was changed: what the parameter counts while it has it."""
        return version_of(self.holder) if self in self.chain else self.last


def _storage(tensor: Tensor) -> int:
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse one, say
        return -id(tensor)


def swap(handlers: Iterable[ParameterHandler], undo: Undo, attached: bool) -> Saving | None:
    """Change the data of parameters; return what watches tensors that are saved for backwards."""
    for handler in handlers:
        tensor = handler.target.tensor()
        problem = _problem(handler.target.module, tensor)
        if tensor is None or problem is not None:
            asked = f"The value of {str(handler.place)!r} was to be changed."
            raise NotHookable(asked, *cast("tuple[str, str]", problem))
        with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
            new = handler.changed(tensor.detach().clone())
            new = torch.empty_like(tensor).copy_(new)  # nobody else's memory
        made = _swapped[_storage(new)] = _DataSwap(tensor, "data")
        made.put((new, (next(_serials) % 2**20 + 2**20) << 10), undo)
    if not undo or attached:
        return None
    found = Saving()
    undo.append(found.leave)
    found.hooks.__enter__()
    return found


def _problem(module: nn.Module, tensor: Tensor | None) -> tuple[str, str] | None:
    """Explain why the data of a parameter cannot be swapped, and what to do; None if it can."""
    if tensor is None or nn.parameter.is_lazy(tensor):
        return "It has none yet: it is lazy.", "Run the model once before."
    if tensor.is_meta:
        found = "It is on the meta device, without data: not loaded, or offloaded meanwhile."
        return found, "Load it all before, or edit what the module returns."
    gathered = is_gathered(module) and isinstance(tensor, nn.Parameter)
    spread = gathered or placements(tensor) is not None
    # Torch accepts other data for wrappers and for compressed layouts, and goes on with the old.
    wraps = cast(Any, type(tensor)).__torch_dispatch__ is not _plain
    if spread or wraps or str(tensor.layout)[-3:] in ("csr", "csc", "bsr", "bsc"):
        kept = f"in a {type(tensor).__name__}" if wraps else f"as {tensor.layout}"
        kept = "in shards, one on each rank" if spread else kept
        remedy = "Change it in place, under torch.no_grad(), within hookline.preserve(model)."
        return f"It is kept {kept}, which torch cannot swap.", remedy
    return None


class _Saved:
    """A tensor that was saved for the backward."""

    __slots__ = ("__weakref__", "read", "swap", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.read = False
        self.swap = _swapped.get(_storage(tensor))
        self.version = self.count()

    def count(self) -> int:
        """Return how often it was changed in place."""
        return version_of(self.tensor) if self.swap is None else self.swap.count()


class Saving:
    """A watch over tensors that are saved for the backward while data is swapped.

    Autograd saves a leaf as it is, so that the data swapped back would be used by a graph that was
    made meanwhile; an alias of the new data is saved instead. Saving through hooks turns torch's
    check for in-place changes off: it is made here. What a checkpointed region saves is what it
    needs to run again.
    """

    over = False

    def __init__(self) -> None:
        self.hooks = saved_tensors_hooks(self._pack, self._unpack)
        # The tensors that regions have saved, with the ids of the modules that ran then.
        self._regions: WeakKeyDictionary[_Saved, set[int]] = WeakKeyDictionary()

    def leave(self) -> None:
        """Take the hooks off, also from under others; those of another thread, when next used."""
        self.over = True
        top = saved_tensor_hooks(True)
        if top is not None:
            if top[0] == self.hooks.pack_hook:
                self.hooks.__exit__()
            else:
                with saved_tensor_hooks_set_aside(top):
                    self.leave()

    def _pack(self, tensor: Tensor) -> _Saved:
        if self.over:
            self.leave()
        saved = _Saved(tensor)
        around = around_region(sys._getframe(1))
        if around is not None:
            self._regions[saved] = around
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        saved.read = True
        if saved.count() != saved.version:
            # The words are torch's own.
            raise RuntimeError("a tensor saved for backward was modified by an inplace operation")
        return saved.tensor

    def has_pending(self, ident: int | None) -> bool:
        """Return True if a checkpointed region that saved tensors here has yet to run again.

        With the id of a module, only regions inside calls of that module count.
        """
        regions = [held for saved, held in self._regions.items() if not saved.read]
        return any(ident is None or ident in held for held in regions)
