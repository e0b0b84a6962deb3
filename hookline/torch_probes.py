"""Behavioural probes of everything private of torch that hookline uses.

`torch_private.py` says what each name does; a probe tries it, because a name can stay while its
meaning changes. `hookline doctor` runs all probes, on any torch. On a torch that hookline was not
tested with, `torch_checks.py` runs the probes of a group when a feature first needs it.

- `run(group)`: run the probes of a group → a list of `Outcome`
- `GROUPS`: the features that need each group
- `PROBES`: every `Probe`, by name

A probe takes milliseconds and leaves nothing behind: no hook, mode, random number or process group.
It does not import the compiler, except in the group "compiler".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from hookline import torch_private as private
from hookline.errors import UnsupportedTorch

__all__ = ["GROUPS", "PROBES", "Outcome", "Probe", "run"]

GROUPS = {
    "core": "capture, edit, hook and every other context",
    "checkpointing": "models with activation checkpointing",
    "edits": "edit and Recipe",
    "operations": "places of operations, guard, summarize",
    "guards": "guard",
    "tools": "attention, harvest, sweep, watch, tables of values",
    "flops": "summarize",
    "compiler": "compiled and exported models",
    "distributed": "models under FSDP2 or tensor parallelism",
    "early stop": "stop=True for models under FSDP2",
}


@dataclass(frozen=True)
class Probe:
    """A function that raises if something private of torch does not behave as described."""

    name: str  # in torch_private.__all__
    group: str
    function: Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What a probe found."""

    probe: Probe
    state: str  # "ok", "absent" (hookline does without it) or "differs"
    reason: str = ""


PROBES: dict[str, Probe] = {}


class _Differs(Exception):
    """Something private of torch does not behave as described."""


class _Absent(Exception):
    """This torch lacks something that hookline can do without."""


def run(group: str) -> list[Outcome]:
    """Run the probes of a group.

    They run in a thread of their own, where no mode, transform, autocast or backward is active.
    """
    found: list[Outcome] = []
    probes = [probe for probe in PROBES.values() if probe.group == group]
    thread = threading.Thread(target=lambda: found.extend(_outcomes(probes)), daemon=True)
    thread.start()
    thread.join()
    return found


def _outcomes(probes: Iterable[Probe]) -> Generator[Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes and deprecated parts of torch
        for probe in probes:
            try:
                probe.function()
            except _Absent as error:
                yield Outcome(probe, "absent", str(error))
            except (_Differs, UnsupportedTorch) as error:
                yield Outcome(probe, "differs", str(getattr(error, "found", error)))
            except Exception as error:  # noqa: BLE001 - whatever a changed torch may raise
                yield Outcome(probe, "differs", f"it raises {type(error).__name__}: {error}")
            else:
                yield Outcome(probe, "ok")


# -- how probes are written ------------------------------------------------------------------------


def _probe(group: str, name: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the probe of a name, which is that of the function unless one is given."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        named = name or function.__name__.removeprefix("_")
        PROBES[named] = Probe(named, group, function)
        return function

    return register


def _expect(holds: Any, otherwise: str) -> None:
    """Fail the probe with a reason unless something holds."""
    if not holds:
        raise _Differs(otherwise)


def _raises(
    kinds: type[Exception] | tuple[type[Exception], ...], function: Any, *args: Any
) -> bool:
    try:
        function(*args)
    except kinds:
        return True
    return False


def _vector(*, grad: bool = False) -> Tensor:
    """Return two ones on the CPU."""
    return torch.ones(2, dtype=torch.float32, device="cpu", requires_grad=grad)


def _source(module: str) -> str:
    """Return the text of a module of torch, without importing it; empty if there is none."""
    file = Path(torch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _codes(owner: Any) -> Generator[CodeType]:
    """Yield the code of a function, or of all functions of a class or module, and inner ones."""
    if isinstance(owner, CodeType):
        yield owner
        for inner in owner.co_consts:
            if isinstance(inner, CodeType):
                yield from _codes(inner)
    elif isinstance(owner, (type, ModuleType)):
        for value in list(vars(owner).values()):
            if getattr(value, "__module__", "") == getattr(owner, "__module__", owner.__name__):
                yield from _codes(value)
    else:
        code = getattr(inspect.unwrap(owner), "__code__", None) if callable(owner) else None
        yield from _codes(code) if code is not None else ()


def _names_in(owner: Any) -> set[str]:
    """Return the names of attributes and globals that functions use."""
    return {name for code in _codes(owner) for name in code.co_names}


class _Double(Function):
    """A Function whose backward calls a function with its node."""

    seen: Any = None

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, look: Callable[[Any], None]) -> Tensor:
        ctx.look = look
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.look(ctx)
        return grads[0] * 2, None


class _Called(nn.Module):
    """A module whose forward calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class _Seeing(TorchFunctionMode):
    """A function mode that lists the torch functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _Dispatched(private.DispatchMode):
    """A dispatch mode that lists the operations that it sees."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# -- tensors ---------------------------------------------------------------------------------------


@_probe("core")
def _version_of() -> None:
    tensor = _vector()
    view, alias, other = tensor[:1], tensor.detach(), _vector()
    before = private.version_of(tensor)
    tensor.add_(1)
    found = [private.version_of(one) - before for one in (tensor, view, alias, other)]
    _expect(found[0] == 1, f"one change in place counts as {found[0]}")
    _expect(found[1] == found[2] == 1, "views and aliases do not share the count")
    _expect(found[3] == 0, "another tensor's count rises, too")
    with torch.inference_mode():
        inference = _vector()
    _expect(_raises(RuntimeError, private.version_of, inference), "inference tensors have a count")


@_probe("core")
def _base_of() -> None:
    tensor = _vector()
    _expect(private.base_of(tensor[:1]) is tensor, "a slice's base is not the tensor")
    _expect(private.base_of(tensor) is None, "a tensor that is no view has a base")


@_probe("core")
def _is_view() -> None:
    tensor = _vector(grad=True) * 2
    _expect(private.is_view(tensor[:1]) is True, "a slice is not a view")
    _expect(private.is_view(tensor) is False, "the result of a product is a view")


@_probe("core", "LAZY")
def _lazy() -> None:
    has_both = all(hasattr(Tensor, name) for name in ("_lazy_clone", "_use_count"))
    _expect(private.LAZY is has_both, f"it is {private.LAZY}")
    if not private.LAZY:
        raise _Absent("copy-on-write aliases cannot be made, so snapshots are clones")


@_probe("core")
def _lazy_clone() -> None:
    if not private.LAZY:
        raise _Absent("snapshots are clones")
    is_lazy: Any = getattr(torch._C, "_is_cow_tensor", None)
    for written in (0, 1):
        pair = (tensor := _vector(), private.lazy_clone(tensor))
        _expect(is_lazy is None or is_lazy(pair[1]), "it copies at once")
        pair[written].add_(1)
        _expect(pair[written].tolist() == [2, 2], "a write is lost")
        _expect(pair[1 - written].tolist() == [1, 1], "a write to one changes the other")


@_probe("core")
def _use_count() -> None:
    tensor = _vector(grad=True) * 2
    _expect(private.use_count(tensor) == 1, "a new tensor has more than one reference")
    view = tensor[:1]
    with_view = private.use_count(tensor)
    saved = tensor * tensor
    _expect(with_view > 1, "a view does not count")
    _expect(private.use_count(tensor) > with_view, "a tensor saved for the backward does not count")
    del view, saved
    _expect(private.use_count(tensor) == 1, "references that are gone still count")


@_probe("edits")
def _storage_id() -> None:
    tensor = _vector()
    number = private.storage_id(tensor)
    _expect(private.storage_id(tensor[1:]) == number, "a view has memory of its own")
    _expect(private.storage_id(_vector()) != number, "two tensors have the same memory")
    sparse = torch.ones(2, device="cpu").to_sparse()
    refusals = (RuntimeError, NotImplementedError)
    _expect(_raises(refusals, private.storage_id, sparse), "a sparse tensor has a storage")
    is_lazy: Any = getattr(torch._C, "_is_cow_tensor", None)
    if private.LAZY and is_lazy is not None:
        alias = private.lazy_clone(tensor)
        private.storage_id(alias)
        _expect(is_lazy(alias), "asking ends copy-on-write")


@_probe("edits")
def _set_version() -> None:
    leaf = _vector(grad=True)
    square = leaf * leaf  # saves the leaf
    before = private.version_of(leaf)
    with torch.no_grad():
        leaf.add_(1)
    private.set_version(leaf, before)
    _expect(private.version_of(leaf) == before, "the number is another one afterwards")
    square.sum().backward()  # raises if autograd does not go by that number


@_probe("core")
def _backward_hooks_of() -> None:
    leaf = _vector(grad=True)
    _expect(private.backward_hooks_of(leaf) is None, "a tensor without hooks has a dict")
    handle = _hook(leaf, _keep)
    _expect(_values(private.backward_hooks_of(leaf)) == [_keep], "a hook is not in the dict")
    handle.remove()
    _expect(_values(private.backward_hooks_of(leaf)) == [], "a removed hook is in the dict")


@_probe("tools")
def _post_accumulate_hooks_of() -> None:
    leaf = _vector(grad=True)
    _expect(not private.post_accumulate_hooks_of(leaf), "a tensor without hooks has some")
    handle: Any = cast(Any, leaf).register_post_accumulate_grad_hook(_keep)
    _expect(_values(private.post_accumulate_hooks_of(leaf)) == [_keep], "a hook is not in the dict")
    handle.remove()
    _expect(_values(private.post_accumulate_hooks_of(leaf)) == [], "a removed hook is in the dict")


def _hook(tensor: Any, function: Callable[[Any], Any]) -> Any:
    return tensor.register_hook(function)


def _keep(*args: Any) -> None:
    """A hook that changes nothing."""


def _values(hooks: Any) -> list[Any]:
    return list(hooks.values())


@_probe("core")
def _hook_tensor() -> None:
    leaf, seen = _vector(grad=True), cast("list[Any]", [])
    tensor = leaf * 2

    def triple(grad: Tensor) -> Tensor:
        seen.append(grad.tolist())
        return grad * 3

    found = private.hook_tensor(tensor, tensor.grad_fn, triple)
    if found is None:
        raise _Absent("Tensor.register_hook is called, which takes longer")
    hooks, key = found[0](), found[1]
    _expect(hooks is not None and hooks.get(key) is triple, "the dict does not have the hook")
    _expect(hooks is private.backward_hooks_of(tensor), "the dict is not that of register_hook")
    tensor.sum().backward()
    _expect(seen == [[1, 1]], f"the hook is called with {seen}")
    _expect(leaf.grad is not None and leaf.grad.tolist() == [6, 6], "its result is not used")


@_probe("tools")
def _sparse_parts() -> None:
    indices = torch.tensor([[1, 1]], device="cpu")
    given = torch.sparse_coo_tensor(indices, _vector(), (3,), check_invariants=False)
    for tensor, expected in ((given, ([1, 1], [[1, 1]])), (given.coalesce(), ([2], [[1]]))):
        values, places = private.sparse_parts(tensor)
        _expect((values.tolist(), places.tolist()) == expected, "values or indices are others")


@_probe("edits")
def _nested_sizes() -> None:
    parts = [torch.ones(size, device="cpu") for size in ((2, 3), (1, 3))]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    _expect(private.nested_sizes(nested) == [[2, 3], [1, 3]], "the sizes are others")


@_probe("flops")
def _nested_tensor_class() -> None:
    kind = private.nested_tensor_class()
    _expect(issubclass(kind, Tensor) and kind is not Tensor, "it is no subclass of Tensor")
    used = _names_in(torch.nested.nested_tensor)
    _expect("jagged_from_list" in used, "nested tensors are made in another way")
    if private.compiler_is_loaded():  # to make one would import it
        parts = [torch.ones(size, device="cpu") for size in ((2, 3), (1, 3))]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        _expect(type(nested) is kind, "nested tensors are of another class")


# -- transforms of torch.func ----------------------------------------------------------------------


def _in_vmap(look: Callable[[Tensor], Any]) -> Any:
    """Return what a function finds inside `vmap`."""
    found: list[Any] = []

    def inside(tensor: Tensor) -> Tensor:
        found.append(look(tensor))
        return tensor

    torch.vmap(inside)(_vector())
    return found[0]


@_probe("core")
def _is_functorch_tensor() -> None:
    _expect(_in_vmap(private.is_functorch_tensor) is True, "a tensor inside vmap is plain")
    _expect(private.is_functorch_tensor(_vector()) is False, "a plain tensor is of a transform")


@_probe("core")
def _is_legacy_batched() -> None:
    internals: Any = importlib.import_module("torch._vmap_internals")
    seen: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(private.is_legacy_batched(tensor))
        return tensor

    # What torch.autograd.grad does for is_grads_batched=True, which itself would import sympy.
    _expect("_vmap" in _names_in(torch.autograd.grad), "torch.autograd.grad batches in another way")
    internals._vmap(look)(_vector())
    _expect(seen == [True], "a gradient of is_grads_batched=True is plain")
    _expect(private.is_legacy_batched(_vector()) is False, "a plain tensor is batched")


@_probe("flops")
def _transform_stack() -> None:
    _expect(private.transform_stack() is None, "a transform runs outside of all")
    _expect(_in_vmap(lambda _: private.transform_stack()) is not None, "none runs inside vmap")


@_probe("core")
def _transform_level() -> None:
    def both(outer: Tensor) -> Any:
        levels: list[Any] = [private.transform_level(outer)]

        def inside(inner: Tensor) -> Tensor:
            levels.extend(map(private.transform_level, (outer, inner)))
            return inner

        torch.vmap(inside)(_vector())
        return levels

    (own, running), (outer, deeper), (inner, innermost) = _in_vmap(both)
    _expect(own == running and own > 0, "a tensor inside vmap is of another level")
    _expect(outer == own and inner == innermost == deeper, "levels differ inside a second vmap")
    _expect(inner > outer, "a second vmap has no higher level")
    plain, none = private.transform_level(_vector())
    _expect(plain <= 0 and none is None, "there is a level outside of all transforms")


# -- nodes of the autograd graph -------------------------------------------------------------------


@_probe("core")
def _sequence_number() -> None:
    leaf = _vector(grad=True)
    first: Any = (leaf * 2).grad_fn
    second: Any = (leaf * 2).grad_fn
    one, two = private.sequence_number(first), private.sequence_number(second)
    _expect(two == one + 1, f"two nodes that are made in order have the numbers {one} and {two}")
    last = private.sequence_number(first.next_functions[0][0])
    _expect(last >= 2**63 - 1, "AccumulateGrad nodes do not have the largest number")


@_probe("core")
def _next_sequence_number() -> None:
    leaf, expected = _vector(grad=True), private.next_sequence_number()
    found = private.sequence_number((leaf * 2).grad_fn)
    _expect(found == expected, f"the next node has {found}, not {expected}")
    _expect(private.next_sequence_number() == expected + 1, "it does not count the node")


@_probe("flops")
def _current_node() -> None:
    leaf, seen = _vector(grad=True), cast("list[Any]", [])

    def look(ctx: Any) -> None:
        seen.append(private.current_node() is ctx)

    cast(Tensor, _Double.apply(leaf, look)).sum().backward()
    _expect(seen == [True], "it is another node than the one whose backward runs")
    _expect(private.current_node() is None, "there is one although no backward runs")


@_probe("core")
def _autograd_function() -> None:
    leaf = _vector(grad=True)
    own = cast(Tensor, _Double.apply(leaf, _keep)).grad_fn
    _expect(private.autograd_function(own) is _Double, "it is not found by the node")
    _expect(private.autograd_function((leaf * 2).grad_fn) is None, "torch's own nodes have one")


@_probe("guards")
def _saved_for_backward() -> None:
    leaf = _vector(grad=True)
    saved = private.saved_for_backward((leaf**3).grad_fn)
    _expect(any(one is leaf for one in saved), "a saved tensor is not found")
    _expect(any(type(one) is int and one == 3 for one in saved), "a saved number is not found")
    result = leaf.exp()
    result.sum().backward()
    freed = _raises(RuntimeError, private.saved_for_backward, result.grad_fn)
    _expect(freed, "what the backward has freed can be read")


@_probe("tools")
def _padding_of() -> None:
    leaf = _vector(grad=True)
    found = private.padding_of(F.pad(leaf, (1, 2)).grad_fn)
    if found == ():
        raise _Absent("padding counts as unknown")
    _expect(tuple(found) == (1, 2), f"a padding of (1, 2) is {found}")
    _expect(private.padding_of((leaf * 2).grad_fn) == (), "another node has a padding")


# -- backward passes -------------------------------------------------------------------------------


@_probe("core")
def _backward_id() -> None:
    leaf, seen = _vector(grad=True), cast("list[int]", [])
    for _ in range(2):
        tensor = leaf * 2
        _hook(tensor, lambda _: seen.append(private.backward_id()))
        tensor.sum().backward()
    _expect(len(seen) == 2 and min(seen) >= 0, f"inside of two backwards it is {seen}")
    _expect(seen[0] != seen[1], "two backwards have the same number")
    _expect(private.backward_id() == -1, "outside of a backward it is not -1")


@_probe("core")
def _at_backward_end() -> None:
    leaf, seen = _vector(grad=True), cast("list[str]", [])
    tensor = leaf * 2
    _hook(tensor, lambda _: private.at_backward_end(lambda: seen.append("end")))
    _hook(leaf, lambda _: seen.append("last gradient"))
    tensor.sum().backward()
    _expect(seen == ["last gradient", "end"], f"the order is: {', '.join(seen)}")


@_probe("core")
def _saved_tensor_hooks() -> None:
    saving = torch.autograd.graph.saved_tensors_hooks
    _expect(private.saved_tensor_hooks(True) is None, "there are some where none were entered")
    with saving(_pack, _unpack):
        _expect(_pair() == (_pack, _unpack), "they are not those that were entered")
        with saving(_unpack, _pack):
            _expect(_pair() == (_unpack, _pack), "they are not the innermost ones")
    _expect(private.saved_tensor_hooks(True) is None, "there are some after they were left")


@_probe("core")
def _saved_tensor_hooks_set_aside() -> None:
    saving = torch.autograd.graph.saved_tensors_hooks
    with saving(_pack, _unpack), saving(_unpack, _pack):
        innermost = private.saved_tensor_hooks(True)
        with private.saved_tensor_hooks_set_aside(innermost):
            _expect(_pair() == (_pack, _unpack), "those around do not come to the top")
        _expect(_pair() == (_unpack, _pack), "they are not put back")


def _pack(tensor: Any) -> Any:
    return tensor


def _unpack(packed: Any) -> Any:
    return packed


def _pair() -> tuple[Any, ...]:
    return tuple(private.saved_tensor_hooks(True)[:2])


# -- activation checkpointing ----------------------------------------------------------------------


class _Seen(Exception):
    """Ends a backward early: what follows in torch's would import sympy."""


def _checkpointed(look: Callable[[], Any], reentrant: bool) -> list[Any]:
    """Return what a function finds in a checkpointed region, and when that runs again."""
    found: list[Any] = []

    def region(tensor: Tensor) -> Tensor:
        found.append(look())
        if len(found) == 2:
            raise _Seen
        return tensor * tensor

    # What torch puts around it would import the compiler.
    run_region: Any = inspect.unwrap(cast(Any, checkpoint).checkpoint)
    result = run_region(
        region, _vector(grad=True), use_reentrant=reentrant, preserve_rng_state=False
    )
    with suppress(_Seen):
        result.sum().backward()
    return found


def _kinds() -> list[bool]:
    """Return the kinds of checkpointing that can be tried: torch imports the compiler for one."""
    return [True, False] if private.compiler_is_loaded() else [True]


@_probe("core")
def _checkpoint_code() -> None:
    def any_above() -> bool:
        return any(private.checkpoint_code(frame.f_code) for frame in _above(sys._getframe()))

    for reentrant in _kinds():
        seen = _checkpointed(any_above, reentrant)
        _expect(seen == [True, True], "the frames of a checkpoint are not found")
    _expect(not any_above(), "frames are found where no checkpoint runs")


def _above(frame: FrameType | None) -> Generator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@_probe("core")
def _regions_on_stack() -> None:
    def here() -> Any:
        return private.regions_on_stack(sys._getframe())

    for reentrant in _kinds():
        kind = "reentrant" if reentrant else "non-reentrant"
        found = _checkpointed(here, reentrant)
        _expect([len(regions) for regions in found] == [1, 1], f"a {kind} region is not found")
        (first, before), (second, again) = (regions[0] for regions in found)
        _expect(first is second, f"a {kind} region is another one when it runs again")
        _expect(
            (before, again) == (False, True), f"a {kind} region does not tell when it runs again"
        )
    _expect(here() == [], "there are regions where no checkpoint runs")
    # The non-reentrant kind, as far as it can be seen without running it.
    codes = list(_codes(checkpoint))
    local = {name for code in codes for name in (*code.co_varnames, *code.co_cellvars)}
    _expect({"gen", "new_frame"} <= local, "no local variables are named gen and new_frame")
    unpacks = [code for code in codes if code.co_name == "unpack_hook"]
    _expect(any("frame" in code.co_freevars for code in unpacks), "unpack_hook has no frame")


@_probe("checkpointing")
def _region_of() -> None:
    def of_hooks() -> Any:
        hooks = private.saved_tensor_hooks(True)
        return None if hooks is None else private.region_of(hooks[0])

    _expect(private.region_of(_pack) is None, "a hook of another kind has a region")
    packs = [code for code in _codes(checkpoint) if code.co_name == "pack_hook"]
    _expect(any(code.co_freevars == ("frame",) for code in packs), "pack_hook holds something else")
    if private.compiler_is_loaded():
        found = _checkpointed(
            lambda: (of_hooks(), private.regions_on_stack(sys._getframe())), False
        )
        hooked, on_stack = found[0]
        _expect(hooked is not None, "the region of a checkpoint's hook is not found")
        _expect(hooked is on_stack[0][0], "the region is not the one on the stack")


# -- modules and their hooks -----------------------------------------------------------------------


@_probe("core", "CALL_CODE")
def _call_code() -> None:
    found: list[Any] = []
    module = _Called(lambda value: found.append(_caller(sys._getframe())) or value)
    module(1)
    module.register_forward_hook(_keep)
    module(1)
    _expect(found == [module, module], "no frame of a call of a module runs this code")


def _caller(frame: FrameType) -> Any:
    """Return the module whose call is the innermost one above a frame."""
    calls = (one for one in _above(frame) if one.f_code is private.CALL_CODE)
    return next((call.f_locals.get("self") for call in calls), None)


@_probe("core", "INNER_CALL_CODE")
def _inner_call_code() -> None:
    found: list[Any] = []

    def look(value: Any) -> Any:
        forward: Any = sys._getframe().f_back
        found.append(forward.f_back.f_code)
        return value

    module = _Called(look)
    module(1)
    module.register_forward_hook(_keep)
    module(1)
    known = {private.CALL_CODE, private.INNER_CALL_CODE}
    _expect(known.issuperset(found), "another function stands between a call and the forward")
    inner = private.INNER_CALL_CODE is private.CALL_CODE or private.INNER_CALL_CODE in found
    _expect(inner, "no frame runs this code")


def _table(table: Callable[[Any], Any], add: Callable[[nn.Module, Any], None], value: Any) -> None:
    """Try a dict of a module: it has what was added, and what is put into it is the module's."""
    module = nn.Module()
    add(module, None)
    _expect(dict(table(module)) == {"part": None}, "what was added is not in the dict")
    table(module)["part"] = value
    _expect(cast(Any, module).part is value, "a value put into the dict is not the module's")


@_probe("core")
def _submodules_of() -> None:
    def add(module: nn.Module, child: Any) -> None:
        module.add_module("part", child)

    _table(private.submodules_of, add, nn.Module())


@_probe("core")
def _parameters_of() -> None:
    def add(module: nn.Module, parameter: Any) -> None:
        module.register_parameter("part", parameter)

    _table(private.parameters_of, add, nn.Parameter(_vector()))


@_probe("core")
def _buffers_of() -> None:
    def add(module: nn.Module, buffer: Any) -> None:
        module.register_buffer("part", buffer)

    _table(private.buffers_of, add, _vector())


def _hooks(table: Callable[[Any], Any], kind: str, with_kwargs: bool | None = None) -> None:
    """Try a dict of hooks: all of them by key, or only keys of those that get named arguments."""
    module = _Called(lambda value: value)
    register = getattr(module, f"register_forward_{kind}")
    plain, named = register(_keep), register(_keep, with_kwargs=True)
    expected = {named.id} if with_kwargs else {plain.id, named.id}
    _expect(set(table(module)) == expected, "it does not have the keys of the hooks")
    if not with_kwargs:
        _expect(table(module)[plain.id] is _keep, "it does not have the hooks")
    plain.remove()
    named.remove()
    _expect(not table(module), "it has hooks that were removed")


@_probe("core")
def _forward_hooks_of() -> None:
    _hooks(private.forward_hooks_of, "hook")


@_probe("core")
def _forward_hooks_with_kwargs_of() -> None:
    _hooks(private.forward_hooks_with_kwargs_of, "hook", with_kwargs=True)


@_probe("core")
def _forward_pre_hooks_of() -> None:
    _hooks(private.forward_pre_hooks_of, "pre_hook")


@_probe("core")
def _forward_pre_hooks_with_kwargs_of() -> None:
    _hooks(private.forward_pre_hooks_with_kwargs_of, "pre_hook", with_kwargs=True)


@_probe("core")
def _global_forward_hooks() -> None:
    if private.global_forward_hooks == {0: None}:
        raise _Absent("hooks for all modules count as present")
    handle = nn.modules.module.register_module_forward_hook(_keep)
    there = private.global_forward_hooks.get(handle.id)
    handle.remove()
    _expect(there is _keep, "a hook for all modules is not in the dict")
    _expect(handle.id not in private.global_forward_hooks, "a removed hook is in the dict")


@_probe("flops")
def _any_global_hook() -> None:
    if not hasattr(nn.modules.module, "_has_any_global_hook"):
        raise _Absent("hooks for all modules count as present")
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    registered = any(getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in kinds)
    before = bool(private.any_global_hook())
    _expect(before is registered, "there are none" if before else "they are not seen")
    handle = nn.modules.module.register_module_forward_pre_hook(_keep)
    there = bool(private.any_global_hook())
    handle.remove()
    _expect(there, "a hook for all modules is not seen")
    _expect(bool(private.any_global_hook()) is before, "a removed hook is seen")


@_probe("tools", "BatchNormBase")
def _batch_norm_base() -> None:
    base = private.BatchNormBase
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d)
    _expect(all(issubclass(kind, base) for kind in kinds), "a batch norm is of another class")
    others = (nn.LayerNorm, nn.GroupNorm, nn.Linear)
    _expect(not any(issubclass(kind, base) for kind in others), "other layers are of this class")
    norm = nn.BatchNorm1d(1, device="cpu", dtype=torch.float32)
    norm(torch.ones(2, 1, device="cpu", dtype=torch.float32))
    changed = norm.running_mean is not None and bool(norm.running_mean.any())
    _expect(changed, "a batch norm writes no running statistics")


@_probe("tools", "DropoutBase")
def _dropout_base() -> None:
    base = private.DropoutBase
    kinds = (
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )  # fmt: skip
    _expect(all(issubclass(kind, base) for kind in kinds), "a dropout is of another class")
    others = (nn.Linear, nn.ReLU, nn.BatchNorm1d)
    _expect(not any(issubclass(kind, base) for kind in others), "other layers are of this class")


# Where torch names them; the modules are read, not imported.
_WRAPPERS = {
    "_orig_mod": "torch._dynamo.eval_frame",
    "_fsdp_wrapped_module": "torch.distributed.fsdp._common_utils",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
}


@_probe("core", "WRAPPER_NAMES")
def _wrapper_names() -> None:
    _expect(set(private.WRAPPER_NAMES) == set(_WRAPPERS), "there are others")
    for name, module in _WRAPPERS.items():
        _expect(f'"{name}"' in _source(module), f"{module} does not name {name}")


@_probe("tools")
def _packed_parameters_of() -> None:
    _expect(private.packed_parameters_of(nn.ReLU()) is None, "a ReLU has packed weights")
    quantized: Any = getattr(getattr(torch.ao, "nn", None), "quantized", None)
    engines = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if quantized is None or not engines:
        raise _Absent("this torch has no quantised layers")
    packed = private.packed_parameters_of(quantized.Linear(2, 3))
    if packed is None:
        raise _Absent("a harvest cannot tell two quantised layers apart")
    weight: Any = (
        packed.unpack()[0] if hasattr(packed, "unpack") else quantized.Linear(2, 3).weight()
    )
    _expect(tuple(weight.shape) == (3, 2), "the packed weights are others")


@_probe("tools")
def _mask_of() -> None:
    device, plain = torch.device("cpu"), _vector()
    _expect(private.mask_of(plain, device) is plain, "a plain mask does not stay as it is")
    named = "def _materialize(self, device" in _source("torch.nn.attention.bias")
    _expect(named, "an attention bias gives its numbers in another way")
    if private.compiler_is_loaded():  # to import it would import that
        bias: Any = importlib.import_module("torch.nn.attention.bias")
        mask = private.mask_of(bias.causal_lower_right(2, 3), device)
        expected = torch.ones(2, 3, dtype=torch.bool, device="cpu").tril(1)
        _expect(torch.equal(mask, expected), "the numbers of a causal bias are others")


@_probe("edits")
def _clear_parametrization_cache() -> None:
    from torch.nn.utils import parametrize

    computed: list[Any] = []
    module: Any = nn.Module()
    module.weight = nn.Parameter(_vector())
    parametrize.register_parametrization(
        module, "weight", _Called(lambda value: computed.append(0) or value * 2), unsafe=True
    )
    with parametrize.cached():
        computed.clear()
        weights = [module.weight, module.weight]
        _expect(len(computed) == 1, "a parametrised weight is not kept")
        private.clear_parametrization_cache()
        weights.append(module.weight)
        _expect(len(computed) == 2, "a weight that was kept is used again")


# -- modes -----------------------------------------------------------------------------------------


@_probe("operations")
def _without_function_modes() -> None:
    own = cast(Any, _vector().as_subclass(_Own))
    _Own.seen.clear()
    with _Seeing() as mode:
        with private.without_function_modes():
            torch.add(own, own)
            torch.add(_vector(), 1)
        seen = [*mode.seen, *_Own.seen]
        torch.add(_vector(), 1)
    _expect(seen == [], "a mode or a subclass sees torch functions")
    _expect(mode.seen, "a mode sees nothing afterwards")


class _Own(Tensor):
    """A subclass of Tensor that lists the torch functions that it sees."""

    seen: list[Any] = []  # noqa: RUF012 - of the thread that runs the probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return cast(Any, super().__torch_function__(func, types, args, kwargs or {}))


@_probe("flops")
def _without_dispatch_modes() -> None:
    if private.without_dispatch_modes is None:
        raise _Absent("FLOPs are counted operation by operation")
    one = _vector()
    mode = _Dispatched()
    with mode:
        guard = private.without_dispatch_modes()
        one.add(1)
        seen = len(mode.seen)
        del guard
        one.add(1)
    _expect(seen == 0, "a dispatch mode sees operations")
    _expect(len(mode.seen) == 1, "a dispatch mode sees nothing afterwards")


@_probe("operations")
def _current_function_modes() -> None:
    _expect(private.current_function_modes() == [], "there are modes where none was entered")
    with _Seeing() as outer, _Seeing() as inner:
        entered = private.current_function_modes() == [outer, inner]
    _expect(entered, "they are not those that were entered, the outermost first")


@_probe("operations")
def _push_function_mode() -> None:
    one, mode = _vector(), _Seeing()
    private.push_function_mode(mode)
    try:
        torch.add(one, 1)
    finally:
        torch.overrides._pop_mode()
    _expect(mode.seen == [torch.add], "the mode does not see torch functions")


@_probe("operations")
def _pop_function_mode() -> None:
    one, outer, inner = _vector(), _Seeing(), _Seeing()
    torch.overrides._push_mode(outer)
    torch.overrides._push_mode(inner)
    try:
        popped = private.pop_function_mode()
        torch.add(one, 1)
    finally:
        while (left := torch.overrides._get_current_function_mode_stack()) and left[0] is outer:
            torch.overrides._pop_mode()
    _expect(popped is inner, "it returns another mode than the innermost")
    _expect(
        (inner.seen, outer.seen) == ([], [torch.add]), "another mode than the innermost is left"
    )


@_probe("flops")
def _dispatch_mode_count() -> None:
    counts = [private.dispatch_mode_count()]
    with _Dispatched():
        counts.append(private.dispatch_mode_count())
        with _Dispatched():
            counts.append(private.dispatch_mode_count())
    _expect(counts == [0, 1, 2], f"for none, one and two modes it is {counts}")


@_probe("flops")
def _has_other_modes() -> None:
    found = [private.has_other_modes()]
    with torch.device("cpu"):
        found.append(private.has_other_modes())
    for mode in (_Seeing(), _Dispatched()):
        with mode:
            found.append(private.has_other_modes())
    _expect(
        found == [False, False, True, True],
        f"for no mode, a default device, a function mode and a dispatch mode it is {found}",
    )


@_probe("flops", "DispatchMode")
def _dispatch_mode() -> None:
    _expect(issubclass(_Dispatched, private.DispatchMode), "it is another class")
    leaf, loaded = _vector(grad=True), private.compiler_is_loaded()
    mode = _Dispatched()
    with mode:
        result = (leaf * 2).sum()
        forward = list(mode.seen)
        result.backward()
    aten: Any = torch.ops.aten
    _expect(aten.mul.Tensor in forward, f"a product is seen as {forward}")
    backward = mode.seen[len(forward) :]
    _expect(aten.mul.Tensor in backward, "operations of a backward are not seen")
    _expect(private.compiler_is_loaded() is loaded, "its first operation imports the compiler")


# -- operators -------------------------------------------------------------------------------------

_aten: Any = torch.ops.aten


@_probe("flops")
def _internal_operator() -> None:
    _expect(private.internal_operator("mm") is _aten.mm, "an operator is not found by its name")
    unknown = private.internal_operator("no_operator_has_this_name")
    _expect(unknown is None, "an operator is found that does not exist")
    attention = "_scaled_dot_product_flash_attention"
    from torch.utils import flop_counter

    for name in (attention, f"{attention}_backward"):
        known = private.internal_operator(name) in flop_counter.flop_registry
        _expect(known, f"torch has no formula for {name}")


@_probe("flops")
def _operator_packet() -> None:
    _expect(private.operator_packet(_aten.add.Tensor) is _aten.add, "aten.add is not found")


@_probe("flops")
def _operator_schema() -> None:
    found = private.operator_schema(_aten.add.Tensor)
    _expect(found == "aten::add", f"that of aten.add is {found!r}")


@_probe("flops")
def _operator_can_decompose() -> None:
    composite, single = _aten.matmul.default, _aten.mm.default
    _expect(private.operator_can_decompose(composite), "aten.matmul is made of no others")
    _expect(not private.operator_can_decompose(single), "aten.mm is made of others")
    _expect(callable(composite.decompose), "what it is made of cannot be run")
    if private.compiler_is_loaded():  # to run it would import sympy
        square = torch.eye(2, device="cpu", dtype=torch.float32)
        mode = _Dispatched()
        with mode:
            composite.decompose(square, square)
        _expect(single in mode.seen, "decompose() does not run what aten.matmul is made of")


@_probe("flops")
def _operator_library() -> None:
    found = [private.operator_library(packet) for packet in (_aten.add, torch.ops.prims.add, 1)]
    _expect(found == ["aten", "prims", ""], f"of aten, prims and a number it is {found}")


@_probe("flops")
def _is_higher_order() -> None:
    known: Any = getattr(torch._ops, "_higher_order_ops", {})
    operators = list(known.values()) or [torch.ops.higher_order.cond]
    _expect(all(map(private.is_higher_order, operators)), "one of torch's is not found")
    _expect(not private.is_higher_order(_aten.add.Tensor), "aten.add is one")


# -- torch.compile ---------------------------------------------------------------------------------


@_probe("core")
def _compiler_is_loaded() -> None:
    loaded = "torch._dynamo" in sys.modules
    _expect(private.compiler_is_loaded() is loaded, f"it is {not loaded}")
    used = "_dynamo" in _names_in(torch.compile) and importlib.util.find_spec("torch._dynamo")
    _expect(used, "torch.compile is not made of torch._dynamo")


@_probe("compiler")
def _compiler_is_used() -> None:
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    if getattr(getattr(frames, "input_codes", None), "seen", None) is None:
        raise _Absent("something counts as compiled")
    _expect("input_codes" in _names_in(frames.ConvertFrameAssert), "input_codes are not filled")
    # As if something had been compiled; without it, before and afterwards, all is as it is.
    before, kept = private.compiler_is_used(), frames.input_codes
    frames.input_codes = type(kept)()
    try:
        found = [private.compiler_is_used()]
        code = compile("0", "<hookline>", "eval")
        frames.input_codes.add(code)
        found.append(private.compiler_is_used())
        frames.input_codes.clear()
        found.append(private.compiler_is_used())
    finally:
        frames.input_codes = kept
    _expect(
        found == [False, True, False], f"before, with and after something compiled it is {found}"
    )
    _expect(private.compiler_is_used() is before, "it does not go by input_codes")


@_probe("compiler")
def _hook_guards() -> None:
    config: Any = importlib.import_module("torch._dynamo.config")
    name = "skip_nnmodule_hook_guards"
    before = getattr(config, name)
    try:
        was = private.hook_guards(True)
        _expect(was is not before, "it returns something else than what was set")
        _expect(getattr(config, name) is False, "graphs go on without guards for hooks")
        _expect(private.hook_guards(False) is True, "it does not return what it has set")
        _expect(getattr(config, name) is True, "graphs go on with guards for hooks")
    finally:
        setattr(config, name, before)
    _expect(f"config.{name}" in _source("torch._dynamo.guards"), f"no guard reads {name}")


@_probe("compiler")
def _is_compiler_error() -> None:
    errors: Any = importlib.import_module("torch._dynamo.exc")
    for kind in (errors.Unsupported, errors.InternalTorchDynamoError):
        _expect(private.is_compiler_error(kind.__new__(kind)), f"{kind.__name__} is none")
    _expect(not private.is_compiler_error(RuntimeError()), "a RuntimeError is one")


@_probe("compiler")
def _outside_graphs() -> None:
    kinds: Any = importlib.import_module("torch._dynamo.types")
    eval_frame: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    offered: list[CodeType] = []

    def offer(frame: Any, *more: Any) -> Any:
        offered.append(frame.f_code)
        return kinds.ConvertFrameReturn()  # as if there were nothing to compile

    def plain() -> None: ...

    def marked() -> None: ...

    for function in (plain, marked):  # a mark belongs to code, which would outlive this probe
        function.__code__ = function.__code__.replace()
    private.outside_graphs(marked)
    # Not by a graph: to compile in a thread crashes torch 2.11 the second time.
    before = eval_frame.set_eval_frame(offer)
    try:
        plain()
        marked()
    finally:
        eval_frame.set_eval_frame(before)
    _expect(plain.__code__ in offered, "the compiler sees functions in another way")
    _expect(marked.__code__ not in offered, "a marked function is compiled")
    told = getattr(marked, "_torchdynamo_disable", False) is True
    known = "_torchdynamo_disable" in _source("torch._dynamo.variables.functions")
    _expect(told and known, "a graph goes on inside a marked function")


@_probe("compiler")
def _compiled_call() -> None:
    module = _Called(lambda value: value)
    _expect(private.compiled_call(module) is None, "a module that is not compiled has one")
    module.compile(backend="eager")  # nothing is compiled before the first call
    _expect(callable(private.compiled_call(module)), "a compiled module has none")
    used = "_compiled_call_impl" in _names_in(nn.Module._wrapped_call_impl)
    _expect(used, "a call does not use it")


@_probe("compiler")
def _is_export_guard() -> None:
    unlift: Any = importlib.import_module("torch.export._unlift")
    _expect(not private.is_export_guard(nn.Linear), "an ordinary class is one")
    if not hasattr(unlift, "GuardsFn"):
        raise _Absent("guards of an exported program may be reported as never called")
    _expect(private.is_export_guard(unlift.GuardsFn), "the class of the guards is none")
    _expect(issubclass(unlift.GuardsFn, nn.Module), "the guards are no modules")


# -- torch.distributed -----------------------------------------------------------------------------


@contextmanager
def _mesh() -> Generator[Any]:
    """Give a mesh of one rank, without communication."""
    from torch.distributed.device_mesh import DeviceMesh

    kind: Any = DeviceMesh
    if "_rank" in inspect.signature(kind).parameters:
        yield kind("cpu", torch.tensor([0], device="cpu"), _init_backend=False, _rank=0)
        return
    from torch import distributed

    ours = not distributed.is_initialized()
    if ours:  # torch is older than that argument, and asks for the rank
        fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    try:
        yield kind("cpu", [distributed.get_rank()], _init_backend=False)
    finally:
        if ours:
            distributed.destroy_process_group()


def _need_distributed() -> None:
    if not torch.distributed.is_available():
        raise _Absent("this torch was built without torch.distributed")


@_probe("distributed")
def _local_tensor() -> None:
    _need_distributed()
    from torch.distributed.tensor import DTensor, Shard

    part = _vector(grad=True)
    with _mesh() as mesh:
        spread = DTensor.from_local(part.detach(), mesh, [Shard(0)], run_check=False)
        found = private.local_tensor(spread)
    _expect(type(found) is Tensor, "it is no plain tensor")
    _expect(found.data_ptr() == part.data_ptr(), "it is a copy")
    _expect(found.grad_fn is None, "autograd sees it")


@_probe("distributed")
def _tensor_parallel_styles() -> None:
    _need_distributed()
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module

    style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    module = _Called(lambda value: value)
    module.register_forward_hook(_keep)
    with _mesh() as mesh:
        parallelize_module(module, mesh, style)
        found = private.tensor_parallel_styles(private.forward_hooks_of(module))
    _expect(any(one is style for one in found), "a plan is not in the closures of its hooks")
    plain = private.tensor_parallel_styles({0: _keep, 1: lambda: found})
    _expect(plain == [], "other hooks have a plan")


_FSDP = "torch.distributed.fsdp._fully_shard"


def _fsdp() -> Any:
    _need_distributed()
    return importlib.import_module("torch.distributed.fsdp")


@_probe("distributed")
def _is_fsdp_managed() -> None:
    _fsdp()
    marked = "._is_fsdp_managed_module = True" in _source(f"{_FSDP}._fully_shard")
    _expect(marked, "fully_shard marks modules in another way")
    module: Any = nn.Module()
    _expect(private.is_fsdp_managed(module) is False, "a module counts that FSDP does not manage")
    module._is_fsdp_managed_module = True
    _expect(private.is_fsdp_managed(module) is True, "a marked module does not count")


@_probe("early stop")
def _recovers_fsdp() -> None:
    kind = _fsdp().FSDPModule
    has_reset = callable(getattr(kind, "reset_iter_state", None))
    _expect(private.recovers_fsdp(kind) is has_reset, f"it is {not has_reset}")
    _expect(private.recovers_fsdp(nn.Module) is False, "every module can go on")
    if not has_reset:
        raise _Absent("a capture with stop=True is refused for models under FSDP2")


# All that the reset of FSDP2 uses, writes or clears, from torch 2.13 to 2.15. `recover_fsdp` knows
# which of them outlive an iteration; one that is not listed here may be another.
_RESET = {
    "IDLE", "RuntimeError", "TrainingState", "Work", "_all_gather_result", "_all_reduce_state",
    "_comm_ctx", "_device_handle", "_fsdp_param_groups", "_get_fsdp_state", "_is_root",
    "_last_post_reduce_events", "_modules_to_run_forward", "_partial_reduce_output",
    "_partial_reduce_output_layout", "_post_backward_pending", "_post_forward_indices",
    "_post_reduce_event", "_reset_iter_state", "_reshard_after_forward_event",
    "_set_unsharded_grad_dtypes", "_state_ctx", "_to_sharded", "_training_state",
    "_wait_all_gather_streams_on_event", "active_gradient_reduction", "all_gather_event",
    "all_gather_state", "all_gather_work", "all_states", "allocation_stream", "clear", "comm_ctx",
    "current_stream", "device_handle", "dist", "distributed_c10d", "event", "fsdp_params",
    "getattr", "grad", "gradient_reduction_pending", "isinstance", "iter_forward_root",
    "manual_backward_finalization_active", "owner", "post_backward_final_callback_queued",
    "post_forward_order", "reduce_scatter_states", "release_all_gather_state_on_current_stream",
    "sharded_param", "values", "wait", "wait_all_gather_streams_on_event", "wait_event",
}  # fmt: skip


@_probe("early stop")
def _recover_fsdp() -> None:
    kind = _fsdp().FSDPModule
    if not hasattr(kind, "reset_iter_state"):
        raise _Absent("a capture with stop=True is refused for models under FSDP2")
    of_state = importlib.import_module(f"{_FSDP}._fsdp_state").FSDPState._reset_iter_state
    groups = importlib.import_module(f"{_FSDP}._fsdp_param_group")
    of_group = groups.FSDPParamGroup._reset_iter_state
    used = set[str]().union(*map(_names_in, (kind.reset_iter_state, of_state, of_group)))
    unknown = ", ".join(sorted(used - _RESET))
    _expect(not unknown, f"FSDP's reset uses names that it did not use before: {unknown}")
    _try_reset(kind.reset_iter_state, of_state, of_group)


def _try_reset(of_module: Any, of_state: Any, of_group: Any) -> None:
    """Run torch's reset on stand-ins: what earlier backwards have made must stay."""
    parameter = SimpleNamespace(
        sharded_param=_vector(grad=True), _unsharded_param=_vector(grad=True)
    )
    for held in vars(parameter).values():
        held.grad = _vector()
    partial, layout = object(), {"a": 1}
    group = _StandIn(
        fsdp_params=[parameter],
        _partial_reduce_output=partial,
        _partial_reduce_output_layout={**layout},
        _post_backward_pending=True,
    )
    group._reset_iter_state = lambda: of_group(group)
    module = _StandIn()
    context = _StandIn(active_gradient_reduction=None, manual_backward_finalization_active=module)
    state = _StandIn(
        _is_root=True,
        _modules={0: module},
        _fsdp_param_groups=[group],
        _state_ctx=context,
        _comm_ctx=_StandIn(active_gradient_reduction=None),
        _reset_iter_state=lambda: of_state(state),
    )
    context.all_states, context.iter_forward_root = [state], state
    module._get_fsdp_state = lambda: state
    module.reset_iter_state = lambda: of_module(module)
    private.recover_fsdp(module)
    gradients = [held.grad is not None for held in vars(parameter).values()]
    _expect(all(gradients), "accumulated gradients are lost")
    kept = group._partial_reduce_output is partial and group._post_backward_pending is True
    kept = kept and group._partial_reduce_output_layout == layout
    _expect(kept, "gradients that were reduced in part are lost")
    _expect(context.manual_backward_finalization_active is module, "the end of backwards is lost")
    _expect(vars(context)["iter_forward_root"] is None, "the iteration goes on")


class _StandIn(SimpleNamespace):
    """Has every attribute; those that were not given can be called and iterated over in vain."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StandIn()
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> _StandIn:
        return _StandIn()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())
