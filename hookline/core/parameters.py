"""Parameters, buffers and modules: get them, change them, put them back.

- `get_module(model, path)`, `get_parameter(model, path)`: what stands at a path
- `preserve(model, *where)`: parameters and buffers are afterwards what they were before
- `replace_module(model, where, new)`: another module in the place of one
- `swap`, `swap_back`, `keep_saved`: how `edit` changes a parameter's data and undoes it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from hookline.core.hooks import Anchored, Tap
from hookline.core.places import Request, Target, Where, resolve, walk
from hookline.errors import ChangeError, PlaceError, PlaceNotFound

__all__ = [
    "Swap",
    "get_module",
    "get_parameter",
    "keep_saved",
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
    found = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    if path in found:
        return found[path]
    return _one(model, path).module


def get_parameter(model: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at a path; an error with the closest names if there is none.

    >>> get_parameter(nn.Sequential(nn.Linear(2, 3)), "0.weight").shape
    torch.Size([3, 2])
    """
    target = _one(model, path)
    if target.attribute is None:
        names = [*target.module._parameters, *target.module._buffers]
        prefix = f"{path}." if path else ""
        raise PlaceNotFound(
            f"The parameter {path!r} was asked for.",
            f"It is a module, with {', '.join(repr(prefix + name) for name in names) or 'none'}.",
            "Name the parameter.",
        )
    found = target.tensor()
    assert found is not None
    return found


def _one(model: nn.Module, path: str) -> Target:
    (request,) = resolve(model, (path,))
    if not request.literal or len(request.targets) != 1:
        raise PlaceError(
            f"One path was asked for, and {path!r} was given.",
            f"It matches {len(request.targets)} places.",
            "Write it without wildcards; hookline.select(model, where) lists several.",
        )
    return request.targets[0]


# -- swapping a parameter's data ------------------------------------------------------------------


class Swap:
    """A parameter whose data an edit has swapped."""

    __slots__ = ("ended", "old", "storage", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.old = tensor.data
        self.storage = 0
        self.ended: int | None = None  # the version at which the data was swapped back

    def put(self, new: Tensor) -> None:
        self.tensor.data = new
        self.storage = self.tensor.untyped_storage()._cdata
        _touch(self.tensor)

    def end(self) -> None:
        self.ended = 0 if self.tensor.is_inference() else self.tensor._version
        self.tensor.data = self.old
        _touch(self.tensor)


_chains: dict[int, list[Swap]] = {}  # the open swaps of each parameter, by id, in order


def _touch(tensor: Tensor) -> None:
    # Convolutions and norms save the parameter itself for the backward, not its data. A graph
    # that was made with other data must fail, not compute with what is there now.
    if not tensor.is_inference():
        increment_version(tensor)


def swap(taps: Iterable[Tap], swaps: list[Swap]) -> None:
    """Change the data of the parameters at taps; what was swapped is added to `swaps`."""
    seen: set[int] = set()
    for tap in taps:
        tensor = tap.target.tensor()
        assert tensor is not None
        if id(tensor) in seen:  # shared under two names
            tap.fired += 1
            continue
        seen.add(id(tensor))
        with torch.no_grad():
            given = tensor.detach().clone()
            new = tap.receive(given, 0, False, None)
        if not isinstance(new, Tensor) or new.shape != given.shape:
            raise ChangeError(
                f"The value of {str(tap.place)!r} was to be changed.",
                f"The change gave {type(new).__name__}.",
                "A parameter's new value is a tensor of its shape.",
            )
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
            del chain[position]
        if not chain:
            _chains.pop(id(made.tensor), None)
        swaps.pop()


def keep_saved(swaps: list[Swap]) -> saved_tensors_hooks:
    """Keeps a graph that is made with swapped data right after the data is swapped back.

    Autograd saves a leaf as it is, so that the data swapped back would be used; an alias of the
    data is saved instead. Saving through hooks turns torch's check for in-place changes off, so
    the check is made here.
    """
    by_storage = {made.storage: made for made in swaps}

    def pack(tensor: Tensor) -> tuple[Tensor, int, Swap | None]:
        try:
            made = by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors without a storage
            made = None
        return tensor.data if made else tensor.detach(), tensor._version, made

    def unpack(saved: tuple[Tensor, int, Swap | None]) -> Tensor:
        tensor, version, made = saved
        if made is None:
            current = tensor._version
        else:
            current = made.tensor._version if made.ended is None else made.ended
        if current != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tuple(tensor.shape)} tensor is at version {current}; "
                f"expected version {version} instead."
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)


# -- preserving -----------------------------------------------------------------------------------


class preserve(Anchored):  # noqa: N801 - a verb that is used like a function
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
        self._saved: list[tuple[dict[str, Any], str, Tensor, Tensor, Tensor, bool]] = []

    def _start(self, attached: bool) -> None:
        saved: dict[tuple[int, str], tuple[dict[str, Any], str, Tensor]] = {}
        for request in resolve(self._model, self._wheres):
            for target in request.targets:
                for owner, name in _tensors_at(target):
                    holder = owner._parameters if name in owner._parameters else owner._buffers
                    tensor = holder[name]
                    if tensor is not None:
                        saved[id(owner), name] = (holder, name, tensor)
        copies: dict[int, Tensor] = {}
        for holder, name, tensor in saved.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            kept = copies[id(tensor)]
            self._saved.append((holder, name, tensor, tensor.data, kept, tensor.requires_grad))

    def _stop(self) -> None:
        for holder, name, tensor, data, kept, requires_grad in reversed(self._saved):
            holder[name] = tensor
            if not _same_bits(data, kept):
                with torch.no_grad():
                    data.copy_(kept)
                _touch(tensor)
            if tensor.data.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                tensor.data = data
                _touch(tensor)
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        self._saved = []


def _tensors_at(target: Target) -> list[tuple[nn.Module, str]]:
    if target.attribute is not None:
        return [(target.module, target.attribute)]
    return [
        (module, name)
        for _, module in walk(target.module)
        for name in (*module._parameters, *module._buffers)
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
        return one.is_meta and other.is_meta
    try:
        flat = one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    except RuntimeError:  # no view as bytes: sparse, quantised
        return False
    return torch.equal(*flat)


# -- replacing modules ----------------------------------------------------------------------------


class replace_module(Anchored):  # noqa: N801 - a verb that is used like a function
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
        self._slots: list[tuple[dict[str, Any], str, nn.Module]] = []

    def _start(self, attached: bool) -> None:
        parents = [module for _, module in walk(self._model)]
        for target in _module_targets(resolve(self._model, self._wheres)):
            old = target.module
            new = self._new if isinstance(self._new, nn.Module) else self._new(old)
            if not isinstance(new, nn.Module):
                raise ChangeError(
                    f"A module was to be put at {str(target.place)!r}.",
                    f"The function made a {type(new).__name__}.",
                    "Return a torch.nn.Module.",
                )
            for parent in parents:
                for name, child in parent._modules.items():
                    if child is old:
                        self._slots.append((parent._modules, name, old))
                        parent._modules[name] = new

    def _stop(self) -> None:
        for modules, name, old in reversed(self._slots):
            modules[name] = old
        self._slots = []


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
