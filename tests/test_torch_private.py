"""Everything private of torch behaves as described, and its probes notice where it does not."""

import contextlib
import importlib
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp
from environment import since_the_reset
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl
from hookline import torch_checks, torch_private, torch_probes
from hookline.errors import UnsupportedTorch
from hookline.torch_probes import GROUPS, PROBES

NAMES = sorted(torch_private.__all__)
OPTIONAL = {
    "LAZY", "any_global_hook", "compiler_is_used", "global_forward_hooks", "hook_tensor",
    "is_export_guard", "lazy_clone", "packed_parameters_of", "padding_of", "recover_fsdp",
    "recovers_fsdp", "without_dispatch_modes",
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiler():
    """Some probes try more where the compiler is loaded."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def untested(monkeypatch):
    """A torch that hookline was not tested with."""
    monkeypatch.setattr(torch_checks, "_tested", False)
    monkeypatch.setattr(torch_checks, "_passed", set())


def outcome_of(name):
    (found,) = (one for one in torch_probes.run(PROBES[name].group) if one.probe.name == name)
    return found


def test_every_name_has_a_probe_and_every_probe_a_name():
    assert sorted(PROBES) == NAMES
    assert all(name == probe.name for name, probe in PROBES.items())
    assert {probe.group for probe in PROBES.values()} == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_probe_passes(group):
    outcomes = torch_probes.run(group)
    assert len(outcomes) == sum(probe.group == group for probe in PROBES.values())
    for outcome in outcomes:
        name = outcome.probe.name
        assert outcome.state == "ok" or (outcome.state == "absent" and name in OPTIONAL), outcome


def state_of_torch():
    modules = nn.modules.module
    return {
        "random numbers": torch.get_rng_state().tolist(),
        "hooks for all modules": modules._has_any_global_hook(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "process group": torch.distributed.is_initialized(),
        "hook guards": torch._dynamo.config.skip_nnmodule_hook_guards,
        "compiled": len(torch._dynamo.convert_frame.input_codes.seen),
        "warnings": list(__import__("warnings").filters),
        "threads": threading.active_count(),
        "saved-tensor hooks": torch_private.saved_tensor_hooks(True),
        "cached weights": dict(nn.utils.parametrize._cache),
        "gradients": torch.is_grad_enabled(),
    }


def test_probes_leave_nothing_behind():
    before = state_of_torch()
    for group in GROUPS:
        torch_probes.run(group)
    assert state_of_torch() == before


def test_probes_take_milliseconds_and_load_neither_the_compiler_nor_sympy():
    program = """
import sys, time, torch
from hookline import torch_probes
slow = []
for group in torch_probes.GROUPS:
    if group in ("compiler", "distributed", "early stop"):
        continue
    for _ in range(2):  # the second time with what torch loads when it is first used
        began = time.perf_counter()
        assert all(outcome.state != "differs" for outcome in torch_probes.run(group)), group
        took = time.perf_counter() - began
    assert took < 0.5, (group, took)
    for name in ("torch._dynamo", "sympy"):
        assert name not in sys.modules, (group, name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Refusing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError("a probe came here")


class RefusingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError("a probe came here")


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        default_dtype,
        Refusing,
        RefusingOperations,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        lambda: torch.autograd.set_grad_enabled(False),
    ],
)
def test_probes_pass_wherever_a_context_is_entered(around):
    with around():
        outcomes = [outcome for group in GROUPS for outcome in torch_probes.run(group)]
    assert not [outcome for outcome in outcomes if outcome.state == "differs"]


def test_probes_pass_inside_a_backward_and_a_transform():
    found = []

    def look(tensor):
        found.extend(outcome for group in GROUPS for outcome in torch_probes.run(group))
        return tensor

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(look)
    leaf.sum().backward()
    torch.vmap(look)(torch.ones(2))
    assert len(found) == 2 * len(PROBES)
    assert not [outcome for outcome in found if outcome.state == "differs"]


# -- what behaves differently ----------------------------------------------------------------------

private = SimpleNamespace(**{name: getattr(torch_private, name) for name in NAMES})  # as they are


def nothing(*args):
    """Does nothing."""


@contextlib.contextmanager
def no_block(*args):
    """Is entered, and does nothing."""
    yield


def swapped(pair):
    return pair[::-1]


def new_dict(read):
    return lambda module: dict(read(module))


def drop_gradients(module):
    """Resets FSDP as torch 2.15 does it, without a thought for gradients."""
    root = module._get_fsdp_state()._state_ctx.iter_forward_root
    for group in root._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = None
    module.reset_iter_state()


DIFFERENT = {
    "CALL_CODE": [nothing.__code__],
    "INNER_CALL_CODE": [nothing.__code__],
    "LAZY": [not private.LAZY],
    "WRAPPER_NAMES": [frozenset(), frozenset({"_orig_mod"})],
    "BatchNormBase": [nn.Module, nn.BatchNorm1d, int],
    "DispatchMode": [int],
    "DropoutBase": [nn.Module, nn.Dropout],
    "any_global_hook": [lambda: False, lambda: True],
    "at_backward_end": [nothing, lambda function: function()],
    "autograd_function": [nothing, type],
    "backward_hooks_of": [
        nothing,
        lambda tensor: {},
        lambda tensor: private.backward_hooks_of(tensor) or {},
    ],
    "backward_id": [lambda: -1, lambda: 0, lambda: 7],
    "base_of": [
        nothing,
        lambda tensor: tensor,
        lambda tensor: tensor._base and tensor._base.detach(),
    ],
    "buffers_of": [lambda module: {}, new_dict(private.buffers_of), private.parameters_of],
    "checkpoint_code": [lambda code: False, lambda code: True],
    "clear_parametrization_cache": [nothing],
    "compiled_call": [nothing, lambda module: module.forward],
    "compiler_is_loaded": [lambda: False],
    "compiler_is_used": [lambda: True, lambda: False],
    "current_function_modes": [list, lambda: private.current_function_modes()[::-1]],
    "current_node": [nothing, lambda: 1],
    "dispatch_mode_count": [lambda: 0, lambda: 1, lambda: min(1, private.dispatch_mode_count())],
    "forward_hooks_of": [lambda module: {}, private.forward_pre_hooks_of],
    "forward_hooks_with_kwargs_of": [lambda module: {}, private.forward_hooks_of],
    "forward_pre_hooks_of": [lambda module: {}, private.forward_hooks_of],
    "forward_pre_hooks_with_kwargs_of": [lambda module: {}, private.forward_pre_hooks_of],
    "global_forward_hooks": [{}, nn.modules.module._global_forward_pre_hooks],
    "has_other_modes": [lambda: False, lambda: True],
    "hook_guards": [lambda value: value, lambda value: not value],
    "hook_tensor": [
        lambda tensor, node, function: (lambda: {0: function}, 0),
        lambda tensor, node, function: private.hook_tensor(tensor, node, nothing),
    ],
    "internal_operator": [nothing, lambda name: torch.ops.aten.mm],
    "is_compiler_error": [lambda error: False, lambda error: True],
    "is_export_guard": [lambda kind: False, lambda kind: True],
    "is_fsdp_managed": [lambda module: False, lambda module: True],
    "is_functorch_tensor": [lambda tensor: False, lambda tensor: True],
    "is_higher_order": [lambda function: False, lambda function: True],
    "is_legacy_batched": [lambda tensor: False, lambda tensor: True],
    "is_view": [lambda tensor: False, lambda tensor: True],
    "lazy_clone": [torch.Tensor.detach, torch.Tensor.clone, lambda tensor: tensor],
    "local_tensor": [lambda tensor: tensor, lambda tensor: tensor.to_local().clone()],
    "mask_of": [lambda bias, device: bias, lambda bias, device: torch.ones(2, 3).bool()],
    "nested_sizes": [lambda tensor: [], lambda tensor: [[2, 3]]],
    "nested_tensor_class": [lambda: torch.Tensor, lambda: nn.Parameter],
    "next_sequence_number": [lambda: 0, lambda: private.next_sequence_number() - 1],
    "operator_can_decompose": [lambda function: False, lambda function: True],
    "operator_library": [lambda packet: "", lambda packet: "aten"],
    "operator_packet": [lambda function: function],
    "operator_schema": [lambda function: "", lambda function: "add"],
    "outside_graphs": [nothing, lambda function: function],
    "packed_parameters_of": [lambda module: (), lambda module: torch.ones(1)],
    "padding_of": [lambda node: (1, 2), lambda node: (2, 1)],
    "parameters_of": [lambda module: {}, new_dict(private.parameters_of), private.buffers_of],
    "pop_function_mode": [nothing, lambda: private.current_function_modes()[0]],
    "post_accumulate_hooks_of": [lambda tensor: {}, private.backward_hooks_of],
    "push_function_mode": [lambda mode: private.push_function_mode(Refusing())],
    "recover_fsdp": [nothing, drop_gradients, lambda module: module.reset_iter_state and None],
    "recovers_fsdp": [lambda kind: True, lambda kind: False],
    "region_of": [nothing, lambda hook: hook],
    "regions_on_stack": [
        lambda frame, within=False: [],
        lambda frame, within=False: [
            (object(), flag) for _, flag in private.regions_on_stack(frame)
        ],
        lambda frame, within=False: [(one, False) for one, _ in private.regions_on_stack(frame)],
    ],
    "saved_for_backward": [lambda node: [], lambda node: [1]],
    "saved_tensor_hooks": [nothing, lambda top: (1, 2)],
    "saved_tensor_hooks_set_aside": [no_block],
    "sequence_number": [lambda node: 0, lambda node: 2**64 - 1, id],
    "set_version": [
        nothing,
        lambda tensor, number: torch._C._autograd._unsafe_set_version_counter(
            (tensor,), (number + 1,)
        ),
    ],
    "sparse_parts": [
        lambda tensor: swapped(private.sparse_parts(tensor)),
        lambda tensor: (tensor.coalesce().values(), tensor.coalesce().indices()),
    ],
    "storage_id": [id, lambda tensor: 1, lambda tensor: tensor.data_ptr()],
    "submodules_of": [lambda module: {}, new_dict(private.submodules_of)],
    "tensor_parallel_styles": [lambda hooks: [], lambda hooks: list(hooks.values())],
    "transform_level": [
        lambda tensor: (-1, None),
        lambda tensor: (1, 1),
        lambda tensor: swapped(private.transform_level(tensor)),
    ],
    "transform_stack": [nothing, lambda: 1],
    "use_count": [lambda tensor: 1, lambda tensor: 2],
    "version_of": [lambda tensor: 0, id, lambda tensor: 2 * tensor._version],
    "without_dispatch_modes": [no_block, object],
    "without_function_modes": [no_block, torch._C.DisableTorchFunctionSubclass],
}


def test_everything_is_tried_with_something_that_behaves_differently():
    assert sorted(DIFFERENT) == NAMES


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, all_ in DIFFERENT.items() for i in range(len(all_))]
)
def test_a_probe_fails_where_something_behaves_differently(monkeypatch, name, number):
    if outcome_of(name).state == "absent":
        pytest.skip("this torch has no such thing")
    before = state_of_torch()
    monkeypatch.setattr(torch_private, name, DIFFERENT[name][number])
    outcome = outcome_of(name)
    assert outcome.state == "differs"
    assert outcome.reason
    monkeypatch.undo()
    assert state_of_torch() == before
    assert outcome_of(name).state == "ok"


def test_a_name_that_torch_lacks_raises_when_it_is_called(monkeypatch):
    missing = torch_private._find(torch._C, "_autograd._no_such_thing")
    with pytest.raises(UnsupportedTorch, match=re.escape("torch._C._autograd._no_such_thing")):
        missing(1, key=2)
    monkeypatch.setattr(torch_private, "backward_id", missing)
    outcome = outcome_of("backward_id")
    assert (outcome.state, outcome.reason) == (
        "differs",
        f"torch {torch.__version__} has no such name.",
    )


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("global_forward_hooks", {0: None}),
        ("hook_tensor", nothing),
        ("packed_parameters_of", nothing),
        ("padding_of", lambda node: ()),
        ("without_dispatch_modes", None),
    ],
)
def test_what_hookline_can_do_without_may_be_absent(monkeypatch, name, lacking):
    monkeypatch.setattr(torch_private, name, lacking)
    assert outcome_of(name).state == "absent"
    assert name in OPTIONAL


# -- the reset of FSDP2 ----------------------------------------------------------------------------


def reset_as_in_torch_2_15(group):
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad = None
        leaf = getattr(parameter, "_unsharded_param", None)
        if leaf is not None:
            leaf.grad = None
    group._partial_reduce_output = None
    group._post_backward_pending = False
    group._partial_reduce_output_layout.clear()


def reset_of_a_later_torch(group):
    group._gradients_of_earlier_backwards = None


@since_the_reset
@pytest.mark.parametrize(
    ("reset", "state"), [(reset_as_in_torch_2_15, "ok"), (reset_of_a_later_torch, "differs")]
)
def test_a_reset_that_drops_something_new_is_noticed(monkeypatch, reset, state):
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    monkeypatch.setattr(_fsdp_param_group.FSDPParamGroup, "_reset_iter_state", reset, raising=False)
    outcome = outcome_of("recover_fsdp")
    assert outcome.state == state, outcome
    assert ("_gradients_of_earlier_backwards" in outcome.reason) == (state == "differs")


@pytest.fixture
def sharded():
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    finally:
        distributed.destroy_process_group()


@since_the_reset
def test_an_early_stop_under_fsdp_is_refused_where_the_reset_differs(
    monkeypatch, untested, sharded
):
    with hl.capture(sharded, "0", stop=True):
        sharded(torch.ones(1, 2))
    assert {"early stop"} <= torch_checks._passed
    torch_checks._passed.clear()
    monkeypatch.setattr(torch_private, "recover_fsdp", nothing)
    with pytest.raises(ValueError, match="Leave out stop"):
        hl.capture(sharded, "0", stop=True).__enter__()
    with hl.capture(sharded, "0") as record:  # all else works
        sharded(torch.ones(1, 2))
    assert record["0"].shape == (1, 2)


def test_a_sharded_model_is_refused_where_its_probes_fail(monkeypatch, untested, sharded):
    monkeypatch.setattr(torch_private, "local_tensor", lambda tensor: tensor)
    with pytest.raises(UnsupportedTorch, match="models under FSDP2"):
        hl.capture(sharded, "0.weight:grad").__enter__()


# -- when the probes run ---------------------------------------------------------------------------


def run_nothing(group):
    raise AssertionError(f"the probes of {group} run")


def enter_once(context):
    context.__enter__()
    context.remove()


class Softmax(nn.Module):
    def forward(self, x):
        return nn.functional.softmax(x, dim=-1)


MODEL = nn.Sequential(nn.Linear(2, 2), Softmax())
USES = {
    "capture": (lambda: enter_once(hl.capture(MODEL, "0")), {"core"}),
    "hook": (lambda: enter_once(hl.hook(MODEL, "0", nothing)), {"core"}),
    "attach": (lambda: hl.hook(MODEL, "0", nothing).attach().remove(), {"core"}),
    "preserve": (lambda: enter_once(hl.preserve(MODEL)), {"core"}),
    "edit": (lambda: enter_once(hl.edit(MODEL, "0", hl.zero())), {"core", "edits"}),
    "an operation": (lambda: enter_once(hl.capture(MODEL, "1/softmax")), {"core", "operations"}),
    "guard": (lambda: enter_once(hl.guard(MODEL)), {"core", "operations", "guards"}),
    "watch": (lambda: enter_once(hl.watch(MODEL, every=1)), {"core", "tools"}),
    "summarize": (lambda: hl.summarize(MODEL, (1, 2)), {"core", "operations", "flops"}),
    "select": (lambda: hl.select(MODEL, "**"), set()),
}


@pytest.mark.filterwarnings("ignore:.*saw no step")
@pytest.mark.parametrize("use", USES)
def test_an_untested_torch_is_probed_for_what_is_used(untested, use):
    function, groups = USES[use]
    function()
    # The compiler is loaded here, so that every context needs it.
    assert torch_checks._passed - {"compiler"} == groups
    assert ("compiler" in torch_checks._passed) == bool(groups)


def test_the_probes_of_a_group_run_once(monkeypatch, untested):
    ran = []
    run = torch_probes.run
    monkeypatch.setattr(torch_probes, "run", lambda group: ran.append(group) or run(group))
    for _ in range(3):
        enter_once(hl.edit(MODEL, "0", hl.zero()))
    assert sorted(ran) == ["compiler", "core", "edits"]


@pytest.mark.filterwarnings("ignore:.*saw no step")
@pytest.mark.parametrize("use", USES)
def test_nothing_is_probed_on_a_tested_torch(monkeypatch, use):
    monkeypatch.setattr(torch_checks, "_tested", True)
    monkeypatch.setattr(torch_probes, "run", run_nothing)
    USES[use][0]()


def test_checkpointing_is_probed_where_it_is_met(untested):
    from torch.utils.checkpoint import checkpoint

    with hl.edit(MODEL, "0", hl.scale(2.0)):
        checkpoint(MODEL, torch.ones(1, 2), use_reentrant=False).sum().backward()
    assert "checkpointing" in torch_checks._passed


def test_a_failing_probe_refuses_the_feature_and_says_what_to_do(monkeypatch, untested):
    monkeypatch.setattr(torch_private, "set_version", nothing)
    enter_once(hl.capture(MODEL, "0"))  # does not need it
    editing = hl.edit(MODEL, "0", hl.zero())
    with pytest.raises(UnsupportedTorch) as caught:
        editing.__enter__()
    error = caught.value
    assert (
        error.asked == "hookline asked torch for set_version, which is needed for: edit and Recipe."
    )
    assert error.found.startswith(f"torch {torch.__version__} was not tested with hookline")
    assert "the number is another one afterwards" in error.found
    assert re.fullmatch(r"Install torch 2\.\d+ to 2\.\d+\. `hookline doctor` .*", error.remedy)
    assert not hl.attached(MODEL)
    with pytest.raises(UnsupportedTorch):  # it is not passed over the second time
        editing.__enter__()
    monkeypatch.undo()
    enter_once(editing)


def test_what_is_absent_is_no_reason_to_refuse(monkeypatch, untested):
    monkeypatch.setattr(torch_private, "without_dispatch_modes", None)
    assert hl.summarize(MODEL, (1, 2)).totals["flops"] == 8


def test_the_core_is_probed_in_a_graph_later(monkeypatch, untested):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch_checks.require("core")
    assert not torch_checks._passed
    monkeypatch.undo()
    monkeypatch.setattr(torch_checks, "_tested", False)
    torch_checks.require("core")
    assert "core" in torch_checks._passed
