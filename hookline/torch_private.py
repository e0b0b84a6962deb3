"""Everything private of torch that hookline uses, in one file.

Each name is a small function, or a direct reference to something of torch's for hot paths. Its text
says what it does and, in the last sentence, what happens on a torch without it:

- "Required.": features of hookline depend on it. Without it, calling it raises `UnsupportedTorch`.
- "Without it, ...": what is done instead, which keeps every promise.

Unless a text says otherwise, all of it exists in every supported torch version. `torch_probes.py`
tests that each one *behaves* as described, since a name can stay while its meaning changes.
`docs/torch-private.md` has the table that is generated from this file.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from hookline.errors import UnsupportedTorch

__all__ = [
    "CALL_CODE",
    "INNER_CALL_CODE",
    "LAZY",
    "WRAPPER_NAMES",
    "BatchNormBase",
    "DispatchMode",
    "DropoutBase",
    "any_global_hook",
    "at_backward_end",
    "autograd_function",
    "backward_hooks_of",
    "backward_id",
    "base_of",
    "buffers_of",
    "checkpoint_code",
    "clear_parametrization_cache",
    "compiled_call",
    "compiler_is_loaded",
    "compiler_is_used",
    "current_function_modes",
    "current_node",
    "dispatch_mode_count",
    "forward_hooks_of",
    "forward_hooks_with_kwargs_of",
    "forward_pre_hooks_of",
    "forward_pre_hooks_with_kwargs_of",
    "global_forward_hooks",
    "has_other_modes",
    "hook_guards",
    "hook_tensor",
    "internal_operator",
    "is_compiler_error",
    "is_export_guard",
    "is_fsdp_managed",
    "is_functorch_tensor",
    "is_higher_order",
    "is_legacy_batched",
    "is_view",
    "lazy_clone",
    "local_tensor",
    "mask_of",
    "nested_sizes",
    "nested_tensor_class",
    "next_sequence_number",
    "operator_can_decompose",
    "operator_library",
    "operator_packet",
    "operator_schema",
    "outside_graphs",
    "packed_parameters_of",
    "padding_of",
    "parameters_of",
    "pop_function_mode",
    "post_accumulate_hooks_of",
    "push_function_mode",
    "recover_fsdp",
    "recovers_fsdp",
    "region_of",
    "regions_on_stack",
    "saved_for_backward",
    "saved_tensor_hooks",
    "saved_tensor_hooks_set_aside",
    "sequence_number",
    "set_version",
    "sparse_parts",
    "storage_id",
    "submodules_of",
    "tensor_parallel_styles",
    "transform_level",
    "transform_stack",
    "use_count",
    "version_of",
    "without_dispatch_modes",
    "without_function_modes",
]


_F = TypeVar("_F", bound=FunctionType)


def _find(owner: Any, name: str) -> Any:
    """Look up a private name; one that is missing raises `UnsupportedTorch` when it is called."""
    try:
        return operator.attrgetter(name)(owner)
    except AttributeError:
        shown = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        return partial(_unsupported, shown)


def _unsupported(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise UnsupportedTorch(
        f"hookline asked torch for {name}.",
        f"torch {torch.__version__} has no such name.",
        "Install a torch version that hookline was tested with: `hookline doctor` lists them.",
    )


# -- tensors --------------------------------------------------------------------------------------

version_of: Callable[[Any], int] = _find(Tensor, "_version.__get__")
"""`version_of(tensor)`: how often a tensor was changed in place. Raises for inference tensors.

Views and detached aliases share the count with their base. Required.
"""

base_of: Callable[[Tensor], Any] = _find(Tensor, "_base.__get__")
"""`base_of(tensor)`: the tensor that this one is a view of, or None. Required."""

is_view: Callable[[Tensor], bool] = _find(Tensor, "_is_view")
"""`is_view(tensor)`: True if autograd tracks the tensor as a view of another. Required."""

LAZY = hasattr(Tensor, "_lazy_clone") and hasattr(Tensor, "_use_count")
"""True if snapshots can be copy-on-write aliases. Without it, every snapshot is a clone."""

lazy_clone: Callable[[Tensor], Tensor] = _find(Tensor, "_lazy_clone")
"""`lazy_clone(tensor)`: a copy-on-write alias; whoever writes first gets memory of its own.

Only for plain strided CPU tensors: see `values/snapshots.py`. Without it, snapshots are clones.
"""

use_count: Callable[[Tensor], int] = _find(Tensor, "_use_count")
"""`use_count(tensor)`: how many references C++ holds: one, and those of views and saved tensors.

Required.
"""


def storage_id(tensor: Tensor) -> int:
    """Return a number that tells a tensor's memory from others, without ending copy-on-write.

    Raises RuntimeError or NotImplementedError for a tensor without storage. Required.
    """
    return tensor.untyped_storage()._cdata


_set_versions: Any = _find(torch._C, "_autograd._unsafe_set_version_counter")


def set_version(tensor: Tensor, number: int) -> None:
    """Set how often a tensor was changed in place. Required."""
    _set_versions((tensor,), (number,))


backward_hooks_of: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_backward_hooks"
)
"""`backward_hooks_of(tensor)`: the dict of `Tensor.register_hook`, or None. Required."""

post_accumulate_hooks_of: Callable[[Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""`post_accumulate_hooks_of(tensor)`: the dict of `register_post_accumulate_grad_hook`, or None.

Required.
"""

_hook_keys = itertools.count(-1, -1)  # torch's own count up from 0


def hook_tensor(
    tensor: Tensor, node: Any, function: Callable[[Tensor], Any]
) -> tuple[weakref.ref[Any], int] | None:
    """Do what `Tensor.register_hook` does for a tensor that `node` made, in a quarter of the time.

    Returns the dict that holds the hook and the key in it, or None if `node` takes no such dict.
    Reading `grad_fn` before, as the caller has done, avoids a crash of the process on views that
    were changed in place: https://github.com/pytorch/pytorch/issues/196459.
    Without it, `register_hook` is called.
    """
    register = getattr(node, "_register_hook_dict", None)
    if register is None or type(tensor) is not Tensor:
        return None
    hooks = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        register(tensor)
    key = next(_hook_keys)
    hooks[key] = function
    return weakref.ref(hooks), key


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values and indices of a sparse COO tensor, coalesced or not. Required."""
    return tensor._values(), tensor._indices()


def nested_sizes(tensor: Any) -> list[list[int]]:
    """Return the component sizes of a strided nested tensor, which has no shape. Required."""
    return tensor._nested_tensor_size().tolist()


def nested_tensor_class() -> type[Tensor]:
    """Return the class of nested tensors with the jagged layout. Required."""
    from torch.nested._internal.nested_tensor import NestedTensor

    return NestedTensor


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, outside of autograd. Required."""
    return tensor._local_tensor


# -- transforms of torch.func ---------------------------------------------------------------------

is_functorch_tensor: Callable[[Tensor], bool] = _find(
    torch._C, "_functorch.is_functorch_wrapped_tensor"
)
"""`is_functorch_tensor(tensor)`: True for a tensor of a running transform (vmap, grad, jvp).

Required.
"""

is_legacy_batched: Callable[[Tensor], bool] = _find(torch._C, "_functorch.is_legacy_batchedtensor")
"""`is_legacy_batched(tensor)`: True inside `torch.autograd.grad(..., is_grads_batched=True)`.

Required.
"""

transform_stack: Callable[[], Any] = _find(torch._C, "_functorch.peek_interpreter_stack")
"""`transform_stack()`: the innermost running transform, or None. Required."""

_maybe_level: Any = _find(torch._C, "_functorch.maybe_get_level")
_current_level: Any = _find(torch._C, "_functorch.maybe_current_level")


def transform_level(tensor: Tensor) -> tuple[int, int | None]:
    """Return the level of the transform that a tensor belongs to, and the innermost running one.

    Required.
    """
    return _maybe_level(tensor), _current_level()


# -- nodes of the autograd graph ------------------------------------------------------------------

sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""`sequence_number(node)`: nodes that a thread makes are numbered in order.

AccumulateGrad nodes have the largest number there is. Required.
"""

next_sequence_number: Callable[[], int] = _find(torch.autograd, "_get_sequence_nr")
"""`next_sequence_number()`: what the next node of this thread will get. Required."""

current_node: Callable[[], Any] = _find(torch._C, "_current_autograd_node")
"""`current_node()`: the node whose backward runs in this thread, or None. Required."""


def autograd_function(node: Any) -> Any:
    """Return the `torch.autograd.Function` whose backward a node runs; None for torch's own nodes.

    Required.
    """
    return getattr(node, "_forward_cls", None)


def saved_for_backward(node: Any) -> list[Any]:
    """Return what torch's own nodes have saved: tensors and numbers.

    Raises RuntimeError if hooks on saved tensors forbid reading. Required.
    """
    return [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]


def padding_of(node: Any) -> tuple[int, ...]:
    """Return the padding of a ConstantPadNd node. Without it, padding counts as unknown: ()."""
    return getattr(node, "_saved_pad", ())


# -- backward passes ------------------------------------------------------------------------------

backward_id: Callable[[], int] = _find(torch._C, "_current_graph_task_id")
"""`backward_id()`: the number of the backward pass that runs in this thread, or -1. Required."""

_engine: Any = _find(torch.autograd.Variable, "_execution_engine")


def at_backward_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running. Required."""
    _engine.queue_callback(function)


saved_tensor_hooks: Callable[[bool], Any] = _find(
    torch._C, "_autograd._top_saved_tensors_default_hooks"
)
"""`saved_tensor_hooks(True)`: the innermost pair of saved-tensor hooks, or None. Required."""

_push_saved: Any = _find(torch._C, "_autograd._push_saved_tensors_default_hooks")
_pop_saved: Any = _find(torch._C, "_autograd._pop_saved_tensors_default_hooks")


@contextmanager
def saved_tensor_hooks_set_aside(hooks: Any) -> Generator[None]:
    """Set the innermost saved-tensor hooks aside for the block, to see those around. Required."""
    _pop_saved()
    try:
        yield
    finally:
        _push_saved(*hooks)


# -- activation checkpointing ---------------------------------------------------------------------

RunningRegion = tuple[Any, bool]  # what lives as long as its graph; whether it is recomputed
_Context: Any = _find(torch._C, "_FunctionBase")


def checkpoint_code(code: CodeType) -> bool:
    """Return True for code of torch's checkpointing. Required."""
    return code.co_filename == checkpoint.__file__


def regions_on_stack(frame: FrameType | None, within: bool = False) -> list[RunningRegion]:
    """Return the checkpointed regions that run, the outermost first, found on the Python stack.

    A region is known by the `_CheckpointFrame` of a non-reentrant checkpoint, or by the `ctx` of a
    reentrant one, or of any other `torch.autograd.Function` that calls modules in its forward and
    again in its backward. With `within`, only those inside the innermost call of a module.
    It reads local variables of torch's frames: `ctx`, `frame`, `gen` and `new_frame`. Required.
    """
    found: list[RunningRegion] = []
    while frame is not None and not (within and frame.f_code is CALL_CODE):
        code = frame.f_code
        if code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, _Context):
                found.append((ctx, code.co_name == "backward"))
        elif checkpoint_code(code):
            if code.co_name == "unpack_hook":
                found.append((frame.f_locals["frame"], True))
            elif "gen" in frame.f_locals:  # suspended while the region runs
                inside = frame.f_locals["gen"].gi_frame.f_locals
                if "new_frame" in inside:  # else gradients are off: nothing will run again
                    found.append((inside["new_frame"], False))
        frame = frame.f_back
    found.reverse()
    return found


def region_of(pack_hook: Any) -> Any:
    """Return the checkpointed region for which a saved-tensor hook packs; None if for another use.

    It reads the closure of torch's function, which holds `frame`. Required.
    """
    names = getattr(getattr(pack_hook, "__code__", None), "co_freevars", ())
    if names == ("frame",) and pack_hook.__module__ == checkpoint.__name__:
        return pack_hook.__closure__[0].cell_contents
    return None


# -- modules and their hooks ----------------------------------------------------------------------

_call: Any = getattr(nn.Module, "_call_impl", _find)  # without it, no call is found
CALL_CODE: CodeType = _call.__code__
"""The code of the frame in which torch calls a module, with its hooks. Required."""

INNER_CALL_CODE: CodeType = next(
    (code for code in CALL_CODE.co_consts if isinstance(code, CodeType)), CALL_CODE
)
"""The code of the function inside it that calls the forward. Required."""

submodules_of: Callable[[Any], dict[str, Any]] = operator.attrgetter("_modules")
"""`submodules_of(module)`: the dict of a module's own children. Required."""

parameters_of: Callable[[Any], dict[str, Any]] = operator.attrgetter("_parameters")
"""`parameters_of(module)`: the dict of a module's own parameters. Required."""

buffers_of: Callable[[Any], dict[str, Any]] = operator.attrgetter("_buffers")
"""`buffers_of(module)`: the dict of a module's own buffers. Required."""

forward_hooks_of: Callable[[Any], dict[int, Any]] = operator.attrgetter("_forward_hooks")
"""`forward_hooks_of(module)`: the dict of `register_forward_hook`. Required."""

forward_hooks_with_kwargs_of: Callable[[Any], dict[int, bool]] = operator.attrgetter(
    "_forward_hooks_with_kwargs"
)
"""`forward_hooks_with_kwargs_of(module)`: the keys of forward hooks that get named arguments.

Required.
"""

forward_pre_hooks_of: Callable[[Any], dict[int, Any]] = operator.attrgetter("_forward_pre_hooks")
"""`forward_pre_hooks_of(module)`: the dict of `register_forward_pre_hook`. Required."""

forward_pre_hooks_with_kwargs_of: Callable[[Any], dict[int, bool]] = operator.attrgetter(
    "_forward_pre_hooks_with_kwargs"
)
"""`forward_pre_hooks_with_kwargs_of(module)`: the keys of pre-hooks that get named arguments.

Required.
"""

global_forward_hooks: dict[int, Any] = getattr(
    nn.modules.module, "_global_forward_hooks", {0: None}
)
"""The forward hooks of `register_module_forward_hook`, by key.

Without it, such hooks count as present, and a slower way is taken that allows for them.
"""

any_global_hook: Callable[[], bool] = getattr(
    nn.modules.module, "_has_any_global_hook", lambda: True
)
"""`any_global_hook()`: True if there are hooks for all modules of the process.

Without it, such hooks count as present, and a slower way is taken that allows for them.
"""

BatchNormBase: Any = _find(nn.modules.batchnorm, "_NormBase")
"""The base class of batch and instance norms, which write running statistics. Required."""

DropoutBase: Any = _find(nn.modules.dropout, "_DropoutNd")
"""The base class of dropout modules. Required."""

WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which wrappers of compile, FSDP1 and checkpointing hold a module. Required."""


def packed_parameters_of(module: nn.Module) -> Any:
    """Return the packed weights of one of torch's quantised layers; None for other modules.

    Without it, a harvest cannot tell two such layers apart, and says so.
    """
    return getattr(module, "_packed_params", None)


def mask_of(bias: Any, device: torch.device) -> Any:
    """Return an attention bias as numbers if it is of `torch.nn.attention.bias`, else as it is.

    Required.
    """
    return bias._materialize(device) if hasattr(bias, "_materialize") else bias


def is_export_guard(kind: type[Any]) -> bool:
    """Return True for the class of the modules in an exported program that check its inputs.

    Without it, such a module counts as one that may be called, and is reported as never called.
    """
    return f"{kind.__module__}.{kind.__name__}" == "torch.export._unlift.GuardsFn"


def clear_parametrization_cache() -> None:
    """Drop the weights that `torch.nn.utils.parametrize.cached` has computed. Required."""
    from torch.nn.utils import parametrize

    _find(parametrize, "_cache.clear")()


# -- modes ----------------------------------------------------------------------------------------

without_function_modes: Any = _find(torch._C, "DisableTorchFunction")
"""`with without_function_modes():` torch functions run past modes and subclasses. Required."""

without_dispatch_modes: Any = getattr(torch._C, "_DisableTorchDispatch", None)
"""`with without_dispatch_modes():` operations run past dispatch modes.

Without it, None, and FLOPs are counted the slow way, operation by operation.
"""

current_function_modes: Callable[[], list[Any]] = _find(
    torch.overrides, "_get_current_function_mode_stack"
)
"""`current_function_modes()`: the function modes of this thread, the outermost first. Required."""

push_function_mode: Callable[[Any], None] = _find(torch.overrides, "_push_mode")
"""`push_function_mode(mode)`: enter a function mode. Required."""

pop_function_mode: Callable[[], Any] = _find(torch.overrides, "_pop_mode")
"""`pop_function_mode()`: leave the innermost function mode, and return it. Required."""

dispatch_mode_count: Callable[[], int] = _find(torch._C, "_len_torch_dispatch_stack")
"""`dispatch_mode_count()`: how many dispatch modes are entered in this thread. Required."""


def has_other_modes() -> bool:
    """Return True if any mode but that of a default device is entered. Required."""
    from torch.utils._device import DeviceContext

    kinds: set[Any] = {type(mode) for mode in current_function_modes()}
    return bool(dispatch_mode_count() or kinds - {DeviceContext})


def _dispatch_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


DispatchMode: Any = _dispatch_mode()
"""The base class of modes that see every operation (`torch.utils._python_dispatch`).

A subclass sets `_should_skip_dynamo` to say whether the compiler may be imported for it. Required.
"""


# -- operators ------------------------------------------------------------------------------------


def internal_operator(name: str) -> Any:
    """Return the operator `aten.<name>`; None if this build has no such operator. Required."""
    return getattr(torch.ops.aten, name, None)


operator_packet: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")
"""`operator_packet(operator)`: the operator with all its overloads (`aten.add`). Required."""


def operator_schema(function: Any) -> str:
    """Return the name in an operator's schema, such as `aten::add`. Required."""
    return function._schema.name


def operator_can_decompose(function: Any) -> bool:
    """Return True if an operator is made of others that torch can run in its place. Required."""
    return function._can_decompose()


def operator_library(packet: Any) -> str:
    """Return the library of an operator, such as `aten`. Required."""
    return str(getattr(packet, "_qualified_op_name", "")).partition("::")[0]


def is_higher_order(function: Any) -> bool:
    """Return True for an operator that calls functions, as `cond` does. Required."""
    return isinstance(function, torch._ops.HigherOrderOperator)


# -- torch.compile --------------------------------------------------------------------------------


def compiler_is_loaded() -> bool:
    """Return True if there can be compiled models: the compiler was imported. Required."""
    return "torch._dynamo" in sys.modules


def compiler_is_used() -> bool:
    """Return True if something was compiled in this process since the compiler was reset.

    Without `input_codes` of the compiler, something counts as compiled.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None or getattr(dynamo.__spec__, "_initializing", False):  # being imported
        return False
    codes = getattr(getattr(dynamo, "input_codes", None), "seen", None)
    return codes is None or bool(codes)


def hook_guards(value: bool) -> bool:
    """Set whether new graphs ask for the hooks of modules, and return what was set before.

    Required where the compiler is loaded.
    """
    config: Any = cast(Any, torch)._dynamo.config
    before = not config.skip_nnmodule_hook_guards
    config.skip_nnmodule_hook_guards = not value
    return before


def is_compiler_error(error: BaseException) -> bool:
    """Return True for an error that the compiler raises about what it cannot compile. Required."""
    return type(error).__module__ == "torch._dynamo.exc"


_eval_frame: Any = _find(torch._C, "_dynamo.eval_frame")


def outside_graphs(function: _F) -> _F:
    """Mark a function that torch.compile neither compiles nor enters: a graph ends before its call.

    `torch.compiler.disable` does the same for all callers by a function around this one. It would
    load the compiler, which takes seconds, and cost every call. Required.
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(
        function.__code__, _eval_frame._FrameExecStrategy(skip, skip)
    )
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "hookline looks at values outside of graphs"
    return function


def compiled_call(module: nn.Module) -> Any:
    """Return what `module.compile()` has put in place of the call; None if there is none.

    Required.
    """
    return getattr(module, "_compiled_call_impl", None)


# -- torch.distributed ----------------------------------------------------------------------------


def is_fsdp_managed(module: nn.Module) -> bool:
    """Return True if FSDP2 keeps the parameters of a module in shards. Required."""
    return getattr(module, "_is_fsdp_managed_module", False)


def recovers_fsdp(kind: Any) -> bool:
    """Return True if FSDP2 can go on after a forward that ended early: since torch 2.13.

    Without it, a capture with `stop=True` is refused for such a model.
    """
    return hasattr(kind, "reset_iter_state")


# What a reset of FSDP drops with an iteration, though earlier backwards of a step have made it.
# Since torch 2.15 this includes the gradients, and how partial sums are laid out.
_OF_GROUPS = ("_partial_reduce_output", "_partial_reduce_output_layout", "_post_backward_pending")
_OF_ITERATIONS = ("manual_backward_finalization_active",)


def recover_fsdp(module: Any) -> None:
    """Reset FSDP2 after a forward of this module that ended early; keep accumulated gradients.

    Does nothing if no iteration is unfinished. Required where `recovers_fsdp` is true.
    """
    root = module._get_fsdp_state()._state_ctx.iter_forward_root
    if root is None:
        return
    groups = [group for s in root._state_ctx.all_states for group in s._fsdp_param_groups]
    own = [p for group in groups for p in group.fsdp_params]
    held = [p.sharded_param for p in own]
    held += [p._unsharded_param for p in own if hasattr(p, "_unsharded_param")]
    gradients = [(tensor, tensor.grad) for tensor in held]
    kept = [(group, _attributes(group, _OF_GROUPS)) for group in groups]
    kept.append((root._state_ctx, _attributes(root._state_ctx, _OF_ITERATIONS)))
    root._modules[0].reset_iter_state()
    for tensor, gradient in gradients:
        if tensor.grad is not gradient:
            tensor.grad = gradient
    for owner, values in kept:
        vars(owner).update(values)


def _attributes(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return attributes by name, as far as they are there; of a dict that is emptied a copy."""
    found: dict[str, Any] = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = {**value}
    return found


def tensor_parallel_styles(hooks: dict[int, Any]) -> list[Any]:
    """Return what the hooks of `parallelize_module` hold in their closures: the plan. Required."""
    return [
        cell.cell_contents
        for hook in list(hooks.values())  # others may come and go meanwhile
        if getattr(hook, "__module__", "").startswith("torch.distributed.tensor")
        for cell in getattr(hook, "__closure__", None) or ()
    ]
