"""Parameters, buffers and modules: get them, replace them, put them back.

- `get_module(model, path)`, `get_parameter(model, path)`: get what is at a path
- `preserve(model, *where)`: restore parameters and buffers after a block
- `replace_module(model, where, new)`: put another module in the place of one during a block
- `put_back(owner, table, before, name)`: put a tensor back where it was registered
- `restorer(tensor)`: make the function that restores a tensor
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
    """Return the module at a path, also a container; an error names the closest if there is none.

    >>> get_module(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    return _find(model, (path,), "output", one=True)[0].module


def get_parameter(model: nn.Module, path: str) -> Tensor:
    """Return the parameter or buffer at a path; an error names the closest if there is none.

    >>> get_parameter(nn.Sequential(nn.Linear(2, 3)), "0.weight").shape
    torch.Size([3, 2])

    For one that accelerate has offloaded, return a copy of the data, which it reads for each call.
    """
    target = _find(model, (path,), "value", one=True)[0]
    return data_of(model, cast(Tensor, target.tensor()), target.named(target.path))


def _find(model: Any, wheres: Any, *ports: str, one: bool = False) -> list[Target]:
    """Return what is at places, each once; raise an error for any other port."""
    targets = {t.key: t for r in resolve(model, wheres, hookable=False) for t in r.targets}
    if one and len(targets) > 1:
        asked = f"What stands at {wheres[0]!r} was asked for."
        raise PlaceNotFound(asked, f"It matches {len(targets)} places.", "Name one of them.")
    for target in targets.values():
        if target.port not in ports or target.parts:
            kind = " or ".join("module" if port == "output" else "parameter" for port in ports)
            found = f"That is no {kind}."
            if kind == "parameter" and target.port == "output":
                own = ", ".join(join(target.path, name) for name, _ in tensors_of(target.module))
                found = f"It is a module, with {own or 'none of its own'}."
            asked = f"A {kind} was asked for at {str(target.place)!r}."
            remedy = f"Give the path of a {kind}, without port or part."
            raise (PlaceNotFound if one else PlaceError)(asked, found, remedy)
    return list(targets.values())


class _PutsBack(Anchored):
    """A verb that changes the model step by step, and puts it back."""

    def __init__(self, model: nn.Module, *where: Where) -> None:
        super().__init__(model)
        self._wheres = where
        self._undo = Undo()

    def _stop(self) -> None:
        self._undo.run()


class preserve(_PutsBack):
    """Restore parameters and buffers after a block, bit for bit.

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
        tensors: dict[int, Tensor | None] = {}
        targets = _find(self._model, self._wheres or ("",), "output", "value")
        near = [step for target in targets for step in _near(self._model, target)]
        reshard(self._model, near)
        for target in targets:
            if is_gathered(target.module) and gatherer(self._model, target.path) is None:
                asked = f"The parameters at {str(target.place)!r} were to be preserved."
                found = "FSDP gathers them from outside of the model that was given."
                raise NotHookable(asked, found, "Give the whole model, and name the places in it.")
            owners = [target.module]
            if target.attribute is None:
                owners = [module for _, module in walk(target.module)]
            for owner in owners:
                for table in (parameters_of(owner), buffers_of(owner)):
                    tensors |= self._preserve(owner, table, target.attribute)
        for tensor in tensors.values():
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                self._undo.append(restorer(tensor))
        self._undo.append(partial(reshard, self._model, near))

    def _preserve(
        self, owner: nn.Module, table: dict[str, Any], only: str | None
    ) -> dict[int, Tensor | None]:
        """Put tensors back into a table at the end: all, or one; return them by id."""
        before = dict(table)
        names = list(before) if only is None else [name for name in before if name == only]
        for name in names:
            self._undo.append(partial(put_back, owner, table, before, name))
        return {id(before[name]): before[name] for name in names}


def _near(model: nn.Module, target: Target) -> list[NamedModule]:
    """Return the modules that may have gathered what is at a target: around it, and in it."""
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


def restorer(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores a tensor: the same memory, bits and `requires_grad`.

    A library's quantised tensor is restored by the tensors that it holds.
    """
    if is_wrapper(tensor):
        steps = [restorer(inner) for inner in held_in(tensor)]
    else:
        steps = [_data_restorer(tensor)]
    requires_grad = tensor.requires_grad

    def restore() -> None:
        for step in steps:
            step()
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return restore


def _data_restorer(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores the memory and bits of a tensor."""
    counts = None if tensor.is_inference() else (version_of(tensor), use_count(tensor))
    # The bits of other layouts cannot be compared.
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    size = tensor.untyped_storage().nbytes() if plain else None
    data = tensor.data
    copy = tensor.detach().clone()

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
            # before stay valid, also when that is undone. A graph that was made since does not.
            same = counts and version_of(tensor) == counts[0] and use_count(tensor) <= counts[1]
            if isinstance(tensor, nn.Parameter) or not same:
                mark(tensor)

    return restore


def _geometry(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.data_ptr()


class _CallHook(ModuleHooks):
    """A hook that calls a function before each call of a module."""

    def __init__(self, context: replace_module, called: Callable[[], None]) -> None:
        super().__init__(context, None)
        self.called = called

    @outside_graphs
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Call the function; on a copied module, take the hook off."""
        if self.context is None:
            self.remove_from(module)
        else:
            self.called()


class _Replacement:
    """A module in the place of another, and the calls of both."""

    def __init__(self, model: nn.Module, old: nn.Module, new: nn.Module, asked: str) -> None:
        self.model = model
        self.old = old
        self.new = new
        self.asked = asked
        self.old_calls = 0  # those by the model
        self.numbers = CallNumbers(shared=True)  # of the new one's calls

    def old_called(self) -> None:
        """Count a call of the old module, unless the new one makes it."""
        held = running_modules(sys._getframe(1))
        self.old_calls += id(self.model) in held and id(self.new) not in held

    def new_called(self) -> None:
        """Remember a call of the new module that a checkpointed region may run again."""
        if self.numbers.repeated(self.new) is None:
            self.numbers.end(self.new)
            self.numbers.remember(self.new, changing=False)


class replace_module(_PutsBack):
    """Put another module in the place of one, wherever the old one is used.

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

    If the model still calls the old one, which it also keeps in a plain list, leaving the `with`
    raises an error.
    """

    _verb = "replace_module"

    def __init__(self, model: nn.Module, where: Where, new: nn.Module | Maker) -> None:
        super().__init__(model, where)
        self._new = new

    def _start(self, attached: bool) -> None:
        self._replaced: list[_Replacement] = []
        owners = [module for _, module in walk(self._model)]
        targets = _find(self._model, self._wheres, "output")
        given = cast(Any, self._new)
        stateful = isinstance(given, nn.Module) and [*given.parameters(), *given.buffers()]
        if len(targets) > 1 and stateful:
            asked = f"One {type(given).__name__} was to be put at {len(targets)} places."
            found = "They would share its parameters and buffers."
            raise ChangeError(asked, found, "Give a function that makes one of each old module.")
        for target in targets:
            old = target.module
            asked = f"A module was to be put at {str(target.place)!r}."
            if old is self._model:
                raise PlaceError(asked, "The model itself has no parent.", "Name a part of it.")
            # One of torch's own classes would take the old module for something else.
            own = given is not nn.Sequential and any(given is k for k in vars(nn.modules).values())
            makes = callable(given) and not (own or isinstance(given, nn.Module))
            new = given(old) if makes else given
            if not isinstance(new, nn.Module):
                found = f"What was given, or made by a function, is a {type(new).__name__}."
                raise ChangeError(asked, found, "Give a module, or a function that returns one.")
            self._put(owners, old, new, asked)
            replaced = _Replacement(self._model, old, new, asked)
            self._replaced.append(replaced)
            self._watch(new, replaced.new_called)
            self._watch(old, replaced.old_called)

    def _put(self, owners: list[nn.Module], old: nn.Module, new: nn.Module, asked: str) -> None:
        for owner in owners:
            for name in [name for name, child in submodules_of(owner).items() if child is old]:
                if isinstance(owner, torch.jit.ScriptModule):
                    found = "It is in a ScriptModule, which runs what it was made of."
                    remedy = "Replace the whole ScriptModule, or use the model before torch.jit."
                    raise NotHookable(asked, found, remedy)
                Swap(submodules_of(owner), name).put(new, self._undo)

    def _watch(self, module: nn.Module, called: Callable[[], None]) -> None:
        """Call a function before each call of a module, which may not be a ScriptModule."""
        if not isinstance(module, torch.jit.ScriptModule):
            hook = _CallHook(self, called)
            self._undo.append(hook.remove_all)
            hook.put_before([module], hook.before)

    def _verify(self) -> None:
        for replaced in self._replaced:
            if replaced.old_calls:
                found = f"The model called the old one {replaced.old_calls}×, "
                found += "which it has elsewhere, too."
                remedy = "Keep modules in nn.ModuleList or nn.ModuleDict, not in plain lists."
                raise ChangeError(replaced.asked, found, remedy)
        for replaced in self._replaced:
            if replaced.numbers.will_be_repeated(replaced.new):
                name = type(replaced.new).__name__
                raise undone_too_early(f"replace_module let {name} be called")
