"""Parameters, buffers and modules: get them, replace them, put them back.

- `get_module(model, path)`, `get_parameter(model, path)`: what stands at a path
- `preserve(model, *where)`: parameters and buffers are afterwards what they were before
- `replace_module(model, where, new)`: another module in the place of one
- `put_back(owner, table, before, name)`, `restorer(tensor)`: the same for one tensor
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookline.edits.parameter_swap import Swap, Undo, mark
from hookline.engine.attaching import Anchored
from hookline.engine.call_numbers import CallNumbers
from hookline.engine.checkpointing import running_modules, undone_too_early
from hookline.engine.fsdp import gatherer, is_gathered, reshard
from hookline.engine.module_hooks import ModuleHooks
from hookline.engine.offloading import data_of
from hookline.errors import ChangeError, NotHookable, PlaceError, PlaceNotFound, warn_outside
from hookline.places.resolution import Target, Where, resolve
from hookline.places.tree import NamedModule, around, join, tensors_of, walk
from hookline.torch_private import (
    buffers_of,
    outside_graphs,
    parameters_of,
    submodules_of,
    use_count,
    version_of,
)
from hookline.values.quantisation import held_in, is_wrapper
from hookline.values.snapshots import same_bits

__all__ = ["get_module", "get_parameter", "preserve", "put_back", "replace_module", "restorer"]

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

    Of one that accelerate has offloaded this is a copy of the data, which it reads for each call.
    """
    target = _find(model, (path,), "value", one=True)[0]
    return data_of(model, cast(Tensor, target.tensor()), target.named(target.path))


def _find(model: Any, wheres: Any, *ports: str, one: bool = False) -> list[Target]:
    """What stands at places, each once; an error for what has none of these ports."""
    targets = {t.key: t for r in resolve(model, wheres, hookable=False) for t in r.targets}
    if one and len(targets) > 1:
        asked = f"What stands at {wheres[0]!r} was asked for."
        raise PlaceNotFound(asked, f"It matches {len(targets)} places.", "Name one of them.")
    for target in targets.values():
        if target.port not in ports or target.parts:
            kind = " or ".join("module" if port == "output" else "parameter" for port in ports)
            own = ", ".join(join(target.path, name) for name, _ in tensors_of(target.module))
            module = kind == "parameter" and target.port == "output"
            found = f"It is a module, with {own or 'none of its own'}."
            found = found if module else f"That is no {kind}."
            asked = f"A {kind} was asked for at {str(target.place)!r}."
            remedy = f"Give the path of a {kind}, without port or part."
            raise (PlaceNotFound if one else PlaceError)(asked, found, remedy)
    return list(targets.values())


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
        targets = _find(self._model, self._wheres or ("",), "output", "value")
        near = [step for target in targets for step in _near(self._model, target)]
        reshard(self._model, near)
        for target in targets:
            if is_gathered(target.module) and gatherer(self._model, target.path) is None:
                asked = f"The parameters at {str(target.place)!r} were to be preserved."
                found = "FSDP gathers them from outside of the model that was given."
                raise NotHookable(asked, found, "Give the whole model, and name the places in it.")
            only = target.attribute
            for owner in [target.module] if only else [module for _, module in walk(target.module)]:
                for table in (parameters_of(owner), buffers_of(owner)):
                    before = dict(table)
                    for name in before if only is None else {only} & before.keys():
                        tensors[id(before[name])] = before[name]
                        self._undo.append(partial(put_back, owner, table, before, name))
        for tensor in tensors.values():
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                self._undo.append(restorer(tensor))
        self._undo.append(partial(reshard, self._model, near))


def _near(model: nn.Module, target: Target) -> list[NamedModule]:
    """The modules that may have gathered what stands at a target: around it, and in it."""
    outside = [("", module) for module in around(model, target.path)]
    return outside if target.attribute else outside + walk(target.module)


def put_back(owner: nn.Module, table: dict[str, Any], before: dict[str, Any], name: str) -> None:
    """Put a tensor back where it was registered, in the old order: optimisers go by it."""
    for other in (owner.__dict__, parameters_of(owner), buffers_of(owner)):
        if other is not table and name in other:
            del other[name]  # it would shadow what is put back
    table[name] = before[name]
    if list(table.keys()) != list(before):
        for key in [key for key in before | table if key in table]:
            table[key] = table.pop(key)
    if hasattr(type(owner), name):
        told = f"{name!r} of a {type(owner).__name__} was put back, and a parametrization hides it."
        warn_outside(f"{told} Remove that before the end.")


# How many hold a tensor, as graphs that saved it do. Private, so detected; NaN is never less.


def restorer(tensor: Tensor) -> Callable[[], None]:
    """What makes a tensor again what it is now: the same memory, bits and `requires_grad`."""
    if is_wrapper(tensor):
        return _held_restorer(tensor)
    counts = None if tensor.is_inference() else (version_of(tensor), use_count(tensor))
    # Of others, bits cannot be compared.
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    size = tensor.untyped_storage().nbytes() if plain else None
    data, copy, requires_grad = tensor.data, tensor.detach().clone(), tensor.requires_grad

    def restore() -> None:
        own, kept = data, copy
        for dim, stride in enumerate(data.stride() if plain else ()):
            if stride == 0 and data.shape[dim]:  # what is expanded is in memory once
                own, kept = own.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
        if size is not None and data.untyped_storage().nbytes() < size:  # freed inside
            data.untyped_storage().resize_(size)
        if not (plain and _geometry(tensor) == _geometry(data) and same_bits(own, kept)):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                if data.layout is torch.sparse_csr:  # it may have fewer elements now
                    own.resize_as_sparse_(kept)
                own.copy_(kept)
            tensor.data = data
            # torch does not count what batch norm does to its statistics: graphs that saved them
            # before stay valid, and so they do when that is undone. One that has come since not.
            same = counts and version_of(tensor) == counts[0] and use_count(tensor) <= counts[1]
            if isinstance(tensor, nn.Parameter) or not same:
                mark(tensor)
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return restore


def _held_restorer(tensor: Tensor) -> Callable[[], None]:
    """The same for a library's quantised tensor, by the tensors that it holds."""
    undo, requires_grad = [restorer(inner) for inner in held_in(tensor)], tensor.requires_grad

    def restore() -> None:
        for step in undo:
            step()
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return restore


def _geometry(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.data_ptr()


class _NewCalls(ModuleHooks):
    """A hook on a module that stands in the place of another: remembers checkpointed calls."""

    def __init__(self, context: replace_module, module: nn.Module) -> None:
        super().__init__(context, None)
        self.module, self.numbers = module, CallNumbers(shared=True)

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """The pre-forward hook."""
        if self.context is None:
            self.remove_from(module)
        elif self.numbers.repeated(module) is None:
            self.numbers.remember(module, self.numbers.end(module), changing=False)


class _OldCalls(ModuleHooks):
    """A hook on a module that was replaced: counts its calls by the model, not by the new one."""

    def __init__(self, context: replace_module, model: Any, new: Any, asked: str) -> None:
        super().__init__(context, None)
        self.model, self.new, self.asked, self.count = model, new, asked, 0

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """The pre-forward hook."""
        if self.context is None:
            self.remove_from(module)
        else:
            held = running_modules(sys._getframe(1))
            self.count += id(self.model) in held and id(self.new) not in held


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
        new: the module to put there, or a function that makes one from the old one. One with
            parameters or buffers can stand at one place only, unless a function gives it.

    If the model calls the old one all the same, since it keeps it in a plain list, too, that is an
    error at the end of the `with`.
    """

    _verb = "replace_module"

    def __init__(self, model: nn.Module, where: Where, new: nn.Module | Maker) -> None:
        super().__init__(model, where)
        self._new = new

    def _start(self, attached: bool) -> None:
        self._new_calls: list[_NewCalls] = []
        self._old_calls: list[_OldCalls] = []
        owners = [module for _, module in walk(self._model)]
        targets, given = _find(self._model, self._wheres, "output"), cast(Any, self._new)
        stateful = isinstance(given, nn.Module) and [*given.parameters(), *given.buffers()]
        if len(targets) > 1 and stateful:
            asked = f"One {type(given).__name__} was to be put at {len(targets)} places."
            found = "They would share its parameters and buffers."
            raise ChangeError(asked, found, "Give a function that makes one of each old module.")
        for target in targets:
            old, asked = target.module, f"A module was to be put at {str(target.place)!r}."
            if old is self._model:
                raise PlaceError(asked, "The model itself has no parent.", "Name a part of it.")
            # Of torch's own classes one would take the old module for something else.
            own = given is not nn.Sequential and any(given is k for k in vars(nn.modules).values())
            makes = callable(given) and not (own or isinstance(given, nn.Module))
            new = given(old) if makes else given
            if not isinstance(new, nn.Module):
                found = f"What was given, or made by a function, is a {type(new).__name__}."
                raise ChangeError(asked, found, "Give a module, or a function that returns one.")
            self._put(owners, old, new, asked)
            if not isinstance(new, torch.jit.ScriptModule):
                calls = _NewCalls(self, new)
                self._undo.append(partial(calls.remove_from, new))
                self._new_calls.append(calls)
                calls.put_before([new], calls.before)
            if not isinstance(old, torch.jit.ScriptModule):
                calls = _OldCalls(self, self._model, new, asked)
                self._undo.append(partial(calls.remove_from, old))
                self._old_calls.append(calls)
                calls.put_before([old], calls.before)

    def _put(self, owners: list[nn.Module], old: nn.Module, new: nn.Module, asked: str) -> None:
        for owner in owners:
            for name in [name for name, child in submodules_of(owner).items() if child is old]:
                if isinstance(owner, torch.jit.ScriptModule):
                    found = "It is in a ScriptModule, which runs what it was made of."
                    remedy = "Replace the whole ScriptModule, or use the model before torch.jit."
                    raise NotHookable(asked, found, remedy)
                Swap(submodules_of(owner), name).put(new, self._undo)

    def _verify(self) -> None:
        for calls in self._old_calls:
            if calls.count:
                found = f"The model called the old one {calls.count}×, which it has elsewhere, too."
                remedy = "Keep modules in nn.ModuleList or nn.ModuleDict, not in plain lists."
                raise ChangeError(calls.asked, found, remedy)
        for calls in self._new_calls:
            if calls.numbers.will_be_repeated(calls.module):
                raise undone_too_early(
                    f"replace_module let {type(calls.module).__name__} be called"
                )
