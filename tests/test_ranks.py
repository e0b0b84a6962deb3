"""Models spread over ranks: DDP, FSDP2 and tensor parallelism, on two processes with gloo.

Each test runs in both processes at once; see ranks.py.
"""

import contextlib
import functools
import sys

import numpy as np
import pytest
import torch
from environment import TORCH, since_the_reset
from oracles import assert_clean, assert_clean_of_ours, bits, by_hand, same_tensors
from ranks import on_ranks
from torch import Tensor, distributed, nn

import hookline as hl

EVERYTHING = (
    "", "**", ":input", "**:input", "**:inputs", ":grad_output", "**:grad_output",
    "**:grad_input", "**:grad",
)  # fmt: skip


class OverwritesItsView(nn.Module):
    """Returns a view, changed in place later; adds its input."""

    def __init__(self, width: int = 4, error: BaseException | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        if self.error is not None:
            raise self.error
        return x + self.down(h)


def unsharded(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    # The last one is there because FSDP warns of modules that return a view, as Linear does.
    last = nn.Linear(4, 2), nn.Tanh()
    return nn.Sequential(
        nn.Linear(3, 4), OverwritesItsView(), OverwritesItsView(), nn.LayerNorm(4), *last
    )


def sequences_of_rank(step: int = 0, rank: int | None = None) -> Tensor:
    rank = distributed.get_rank() if rank is None else rank
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).square().mean()


def train_on_ranks(model, steps=3, around=contextlib.nullcontext, first=0, optimizer=None):
    """The bits of all outputs, gradients and parameters of some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = sequences_of_rank(step).requires_grad_()
        with around():
            y = model(x)
            loss_of(y).backward()
        seen += [y, x.grad, *(p.grad for p in model.parameters()), *model.parameters()]
        optimizer.step()
        seen += model.parameters()
        seen = [here(t) for t in seen]
    return seen


def here(tensor: Tensor) -> Tensor:
    """The bits of what this rank holds."""
    if tensor.dtype is torch.uint8:
        return tensor
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return bits(tensor + 0 if hasattr(tensor, "trigger_wait") else tensor)


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor + 0


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """Reduced as torch's reducers do it with gloo: each divides, then all are added."""
    shared = tensor.detach() / distributed.get_world_size()
    distributed.all_reduce(shared)
    return shared


def assert_captures_change_nothing(make, detach) -> None:
    """A training with captures at everything is that without them, bit for bit."""
    bare, model = train_on_ranks(make()), make()
    looked = train_on_ranks(model, around=lambda: hl.capture(model, *EVERYTHING, detach=detach))
    assert same_tensors(looked, bare)
    assert_clean_of_ours(model)


def assert_captured_as_by_hand(make, run_with) -> None:
    """Every value that hooks written by hand see is in a record, bit for bit."""
    model = make()
    places = by_hand(model, run_with, gradients=True).places
    expected = {name: values[-1] for name, values in places.items()}
    assert len(expected) > 3 * len(list(model.modules())) - 4  # of changed views torch has none
    model = make()
    with hl.capture(model, *EVERYTHING[:-1], detach=True) as record:
        run_with(model)
    for name, value in expected.items():
        assert torch.equal(here(record[name]), here(value)), name
    assert_clean_of_ours(model)


def interrupt_forward(model: nn.Module, how: str, block: OverwritesItsView) -> None:
    """End a forward before its time, inside of a capture."""
    if how == "stop":
        with hl.capture(model, "1.up", "1.act:input", stop=True) as record:
            model(sequences_of_rank())
            raise AssertionError("not reached")
        assert record["1.up"] is not None
        return
    if how == "a hook":
        block.error, kind = None, ZeroDivisionError

        def fail(value: Tensor) -> None:
            raise ZeroDivisionError

        around = hl.hook(model, "1.up", fail)
    else:
        block.error = KeyboardInterrupt() if how == "interrupt" else ValueError()
        kind, around = type(block.error), hl.capture(model, "**")
    try:
        with around:
            model(sequences_of_rank())
    except kind:
        pass
    else:
        raise AssertionError("not interrupted")
    block.error = None


HOW = ["stop", "exception", "interrupt", "a hook"]


# -- what runs the tests --------------------------------------------------------------------------


@on_ranks
def fails_on_one_rank(which):
    if distributed.get_rank() == which:
        raise ValueError(f"this is {which}")
    distributed.barrier()


def test_what_fails_on_one_rank_fails_the_test_and_the_next_one_runs():
    with pytest.raises(AssertionError, match=r"On rank 1: [^$]*ValueError: this is 1"):
        fails_on_one_rank(1)
    fails_on_one_rank(2)


# -- DDP ------------------------------------------------------------------------------------------


def ddp(**options):
    return nn.parallel.DistributedDataParallel(unsharded(), **options)


OPTIONS = [
    {}, {"gradient_as_bucket_view": True}, {"static_graph": True},
    {"find_unused_parameters": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("detach", [False, True])
@on_ranks
def test_captures_change_nothing_under_ddp(options, detach):
    assert_captures_change_nothing(lambda: ddp(**options), detach)


@on_ranks
def test_values_and_gradients_under_ddp_are_those_of_hooks_written_by_hand():
    assert_captured_as_by_hand(ddp, lambda model: loss_of(model(sequences_of_rank())).backward())


@on_ranks
def test_a_gradient_of_a_parameter_under_ddp_is_this_ranks_own():
    alone, model = unsharded(), ddp()
    with hl.capture(alone, "**:grad_input", "**:grad_output") as expected:
        loss_of(alone(sequences_of_rank())).backward()
    with hl.capture(model, "**:grad", "**:grad_input", "**:grad_output") as record:
        loss_of(model(sequences_of_rank())).backward()
    for place in expected:
        assert torch.equal(record[place], expected[place])
    for name, parameter in alone.named_parameters():
        found = record[f"{name}:grad"]
        assert torch.equal(found, parameter.grad)
        assert torch.equal(mean_over_ranks(found), model.module.get_parameter(name).grad)


@on_ranks
def test_each_backward_has_its_own_gradient_while_ddp_accumulates():
    model, alone = ddp(), unsharded()
    with hl.capture(model, "4.weight:grad") as record:
        with model.no_sync():
            loss_of(model(sequences_of_rank(0))).backward()
        loss_of(model(sequences_of_rank(1))).backward()
    for step, found in enumerate(record.calls("4.weight:grad")):
        alone.zero_grad()
        loss_of(alone(sequences_of_rank(step))).backward()
        assert torch.equal(found, alone[4].weight.grad)
    total = sum(record.calls("4.weight:grad"))
    assert torch.equal(mean_over_ranks(total), model.module[4].weight.grad)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks
def test_a_gradient_that_is_edited_is_edited_before_it_is_reduced(kind):
    reference, model = unsharded(), {"ddp": ddp, "fsdp": fsdp}[kind]()
    loss_of(reference(sequences_of_rank(rank=1))).backward()
    with contextlib.ExitStack() as stack:
        if distributed.get_rank() == 0:
            stack.enter_context(hl.edit(model, "**:grad", hl.zero()))
        loss_of(model(sequences_of_rank())).backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(one.grad), other.grad / 2)


@pytest.mark.parametrize(
    "place", ["1", "1:input", "2.up", "1:grad_output", "2:grad_input", "4.weight", "3.bias"]
)
@on_ranks
def test_an_edit_under_ddp_does_to_each_rank_what_it_does_without(place):
    alone, model = unsharded(), ddp()
    for each in (alone, model):
        with hl.edit(each, place, hl.scale(0.5)):
            loss_of(each(sequences_of_rank())).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.grad, mean_over_ranks(other.grad))
    assert same_tensors(train_on_ranks(ddp()), train_on_ranks(ddp()))


@on_ranks
def test_the_name_of_the_ddp_wrapper_may_be_left_out():
    model = ddp()
    places = ["0.bias:grad", "1.down", "2:grad_output", "3:input", "4.weight"]
    assert hl.select(model, *reversed(places)) == [f"module.{place}" for place in places]
    with hl.capture(model, *places) as record:
        loss_of(model(sequences_of_rank())).backward()
    for place in places:
        assert record[place] is record[f"module.{place}"]
    assert record[model.module[1].down] is record["1.down"]


@pytest.mark.parametrize("how", HOW)
@on_ranks
def test_training_goes_on_under_ddp_after_a_forward_that_was_ended_early(how):
    bare, model = ddp(), ddp()
    optimizers = [torch.optim.SGD(each.parameters(), 0.5, momentum=0.9) for each in (bare, model)]
    assert same_tensors(
        train_on_ranks(model, 1, optimizer=optimizers[1]),
        train_on_ranks(bare, 1, optimizer=optimizers[0]),
    )
    interrupt_forward(model, how, model.module[1])
    assert same_tensors(
        train_on_ranks(model, 3, first=1, optimizer=optimizers[1]),
        train_on_ranks(bare, 3, first=1, optimizer=optimizers[0]),
    )
    assert_clean_of_ours(model)


# -- FSDP2 ----------------------------------------------------------------------------------------


def fsdp(model=None, **options):
    from torch.distributed.fsdp import fully_shard

    model = unsharded() if model is None else model
    for block in (model[1], model[2]):
        fully_shard(block, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("detach", [False, True])
@on_ranks
def test_captures_change_nothing_under_fsdp(options, detach):
    assert_captures_change_nothing(lambda: fsdp(**options), detach)


@on_ranks
def test_captures_change_nothing_under_fsdp_with_mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bare = train_on_ranks(fsdp(mp_policy=policy))
    model = fsdp(mp_policy=policy)
    assert same_tensors(train_on_ranks(model, around=lambda: hl.capture(model, *EVERYTHING)), bare)
    with hl.capture(model, "1.down", "1.up.weight:grad") as record:
        loss_of(model(sequences_of_rank())).backward()
    assert record["1.down"].dtype is record["1.up.weight:grad"].dtype is torch.bfloat16


@on_ranks
def test_values_and_gradients_under_fsdp_are_those_of_hooks_written_by_hand():
    assert_captured_as_by_hand(fsdp, lambda model: loss_of(model(sequences_of_rank())).backward())


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@on_ranks
def test_a_gradient_of_a_parameter_under_fsdp_is_this_ranks_own_and_whole(options):
    alone, model = unsharded(), fsdp(**options)
    for step in range(3):  # .grad is not set to None: each backward still has its own share
        alone.zero_grad()
        with hl.capture(alone, "**:grad_input", "**:grad_output") as expected:
            loss_of(alone(sequences_of_rank(step))).backward()
        before = [None if p.grad is None else full(p.grad) for p in model.parameters()]
        with hl.capture(model, "**:grad", "**:grad_input", "**:grad_output") as record:
            loss_of(model(sequences_of_rank(step))).backward()
        for place in expected:
            assert torch.equal(record[place], expected[place])
        for (name, parameter), old in zip(alone.named_parameters(), before, strict=True):
            found = record[f"{name}:grad"]
            assert torch.equal(found, parameter.grad)
            assert record.placement(f"{name}:grad") is None
            reduced = mean_over_ranks(found)
            reduced = reduced if old is None else old + reduced
            assert torch.equal(reduced, full(model.get_parameter(name).grad))
    assert_clean_of_ours(model)


@on_ranks
def test_a_gradient_under_fsdp_is_captured_in_a_part_of_the_model():
    alone, model = unsharded(), fsdp()
    loss_of(alone(sequences_of_rank())).backward()
    with hl.capture(model[3], "weight:grad") as record, hl.capture(model[1], "up.bias:grad") as up:
        loss_of(model(sequences_of_rank())).backward()
    assert torch.equal(record["weight:grad"], alone[3].weight.grad)
    assert torch.equal(up["up.bias:grad"], alone[1].up.bias.grad)


@on_ranks
def test_a_gradient_under_fsdp_needs_the_forward_inside_the_with_and_says_so():
    model = fsdp()
    y = model(sequences_of_rank())
    with hl.capture(model, "1.up.weight:grad") as record:
        loss_of(y).backward()
    with pytest.raises(hl.GradientNotAvailable, match=r"FSDP gathers.*the forward must run inside"):
        record["1.up.weight:grad"]
    y = model(sequences_of_rank())
    with pytest.raises(hl.NeverFired, match="FSDP gathers"):
        with hl.edit(model, "1.up.weight:grad", hl.zero()):
            loss_of(y).backward()


@on_ranks
def test_a_parameter_without_a_gradient_is_no_error_under_fsdp_where_others_have_one():
    model = unsharded()
    model[1].spare = nn.Parameter(torch.ones(4))  # which no forward uses
    model = fsdp(model)
    with hl.edit(model, "**:grad", hl.scale(2.0)), hl.capture(model, "**:grad") as record:
        loss_of(model(sequences_of_rank())).backward()
    assert list(record.unfired()) == ["1.spare:grad"]
    with pytest.raises(hl.NeverFired, match=r"'1.spare:grad': no gradient arrived"):
        with hl.edit(model, "1.spare:grad", hl.zero()):
            loss_of(model(sequences_of_rank())).backward()


@on_ranks
def test_noise_on_the_gradient_of_a_bias_under_fsdp_arrives_in_the_reduced_one():
    bare, model = fsdp(), fsdp()
    loss_of(bare(sequences_of_rank())).backward()
    with hl.edit(model, "4.bias:grad", hl.noise(1.0, seed=3)):
        with hl.capture(model, "4.bias:grad") as record:
            loss_of(model(sequences_of_rank())).backward()
    assert torch.equal(mean_over_ranks(record["4.bias:grad"]), full(model[4].bias.grad))
    drawn = full(model[4].bias.grad) - full(bare[4].bias.grad)
    assert drawn.abs().min() > 0.01
    assert torch.equal(full(model[4].weight.grad), full(bare[4].weight.grad))


@pytest.mark.parametrize("place", ["1", "1:input", "2.up", "0", "1:grad_output", "2:grad_input"])
@on_ranks
def test_an_edit_under_fsdp_does_to_each_rank_what_it_does_without(place):
    alone, model = unsharded(), fsdp()
    for each in (alone, model):
        with hl.edit(each, place, hl.scale(0.5)):
            loss_of(each(sequences_of_rank())).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(one.grad), mean_over_ranks(other.grad))
    assert_clean_of_ours(model)


@on_ranks
def test_a_parameter_captured_under_fsdp_is_whole_and_readable_if_it_was_copied():
    model, weights = fsdp(), dict(unsharded().named_parameters())
    with hl.capture(model, "**:value", detach=True) as record:
        model(sequences_of_rank())
    for name, parameter in weights.items():
        assert torch.equal(record[name], parameter)
    with hl.capture(model, "1.up.weight") as record:
        model(sequences_of_rank())
    repr(record)
    with pytest.raises(hl.ValueChanged, match=r"memory was freed since.*detach=True"):
        record["1.up.weight"]


@pytest.mark.parametrize("gathered", [False, True])
@on_ranks
def test_a_parameter_under_fsdp_cannot_be_swapped_and_the_remedy_works(gathered):
    model, alone = fsdp(), unsharded()
    if gathered:
        model(sequences_of_rank())  # of the outermost module, FSDP keeps what it gathered
    for place in ("4.weight", "1.up.weight"):
        with pytest.raises(hl.NotHookable, match=r"kept in shards.*hookline\.preserve"):
            with hl.edit(model, place, hl.scale(2.0)):
                model(sequences_of_rank())
    for each in (model, alone):
        before = full(each(sequences_of_rank()))
        with hl.preserve(each):
            with torch.no_grad():
                each[4].weight.mul_(2)
                each[1].up.weight.mul_(2)
            loss_of(each(sequences_of_rank())).backward()
        assert torch.equal(full(each(sequences_of_rank())), before)
    model.reshard()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(one.grad), mean_over_ranks(other.grad))


@on_ranks
def test_preserve_puts_back_what_an_optimizer_did_under_fsdp():
    model = fsdp()
    shards = [p.data.clone() for p in model.parameters()]
    before = full(model(sequences_of_rank()))
    with hl.preserve(model):
        train_on_ranks(model, 2)
        assert not torch.equal(full(model(sequences_of_rank())), before)
    assert same_tensors([here(p) for p in model.parameters()], [here(p) for p in shards])
    assert all(isinstance(p, type(shards[0])) for p in model.parameters())
    assert torch.equal(full(model(sequences_of_rank())), before)
    model.reshard()  # else it is what FSDP gathered that would be trained
    model.zero_grad()
    assert same_tensors(train_on_ranks(model), train_on_ranks(fsdp()))


@since_the_reset
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("when", ["first", "later", "before a step", "while a backward waits"])
@on_ranks
def test_training_goes_on_under_fsdp_after_a_forward_that_was_ended_early(how, when):
    bare, model = fsdp(), fsdp()
    optimizers = [torch.optim.SGD(each.parameters(), 0.5, momentum=0.9) for each in (bare, model)]
    results = []
    for each, optimizer in zip((bare, model), optimizers, strict=True):
        early = (
            functools.partial(interrupt_forward, each, how, each[1])
            if each is model
            else lambda: None
        )

        def end_early(each=each, early=early):
            early()
            ran = each is model or when != "first"
            if how != "stop" and ran:  # as torch asks for after an exception; it drops gradients
                each.reset_iter_state()

        seen = []
        if when == "later":
            seen += train_on_ranks(each, 2, optimizer=optimizer)
        if when == "before a step":
            loss_of(each(sequences_of_rank())).backward()
            end_early()
            optimizer.step()
        elif when == "while a backward waits":
            y = each(sequences_of_rank())
            end_early()
            loss_of(y).backward()
            optimizer.step()
        else:
            end_early()
        results.append(seen + train_on_ranks(each, 2, first=2, optimizer=optimizer))
    assert same_tensors(results[1], results[0])
    assert_clean_of_ours(model)


@since_the_reset
@pytest.mark.parametrize("how", ["plain", "hybrid", "mixed precision"])
@on_ranks
def test_stopping_under_fsdp_keeps_what_was_accumulated(how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    hybrid = how == "hybrid"
    options = {}
    if hybrid:
        options = {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}
    if how == "mixed precision":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy}
    results = []
    for stop in (False, True):
        model = fsdp(**options)
        wait = model.set_requires_all_reduce if hybrid else model.set_requires_gradient_sync
        wait(False)
        loss_of(model(sequences_of_rank(0))).backward()
        if stop:
            interrupt_forward(model, "stop", model[1])
        wait(True)
        loss_of(model(sequences_of_rank(1))).backward()
        results.append([here(p.grad) for p in model.parameters()])
    assert same_tensors(*results)


@since_the_reset
@pytest.mark.parametrize(("part", "place"), [(1, "up"), (3, "")])
@on_ranks
def test_stopping_in_a_part_of_an_fsdp_model_lets_training_go_on(part, place):
    model = fsdp()
    with hl.capture(model[part], place, stop=True):
        model(sequences_of_rank())
    assert same_tensors(train_on_ranks(model), train_on_ranks(fsdp()))


@on_ranks
def test_preserving_a_part_whose_parameters_are_gathered_from_outside_is_refused():
    model = fsdp()
    with pytest.raises(hl.NotHookable, match=r"FSDP gathers them from outside.*the whole model"):
        with hl.preserve(model[3]):
            pass
    for whole_model, where in ((model, "3"), (model[1], "")):  # the remedy, and one of its own
        before = [here(p) for p in model.parameters()]
        with hl.preserve(whole_model, where), torch.no_grad():
            for parameter in hl.get_module(whole_model, where).parameters():
                parameter.fill_(7)
            model(sequences_of_rank())
        model.reshard()
        assert same_tensors([here(p) for p in model.parameters()], before)


# -- tensor parallelism ---------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.act(self.up(self.norm(x)))))


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def tokens(step: int = 0) -> Tensor:
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step))


def mine(x: Tensor) -> Tensor:
    """This rank's part of a sequence."""
    return x.chunk(2, 1)[distributed.get_rank()].clone()


@functools.cache
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def parallel() -> Layer:
    """The sequence is spread at the ends, the features inside."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(layer(), mesh(), plan)


def shard(dim):
    from torch.distributed.tensor import Shard

    return (Shard(dim),)


def replicate():
    from torch.distributed.tensor import Replicate

    return (Replicate(),)


def joined(record: hl.Record, place: str) -> Tensor:
    """The whole value at a place, from the parts that the ranks hold, as the record says."""
    from torch.distributed.tensor import DTensor

    value = record.tensor(place).detach()
    if not isinstance(value, DTensor):
        value = value + 0
        value = DTensor.from_local(value, mesh(), record.placement(place), run_check=False)
    return value.full_tensor()


def train_parallel(model, steps=3, around=contextlib.nullcontext, first=0):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = mine(tokens(step)).requires_grad_()
        with around():
            y = model(x)
            loss_of(y).backward()
        seen += [here(t) for t in (y, x.grad, *(p.grad for p in model.parameters()))]
        optimizer.step()
    return seen + [here(p) for p in model.parameters()]


@pytest.mark.parametrize("detach", [False, True])
@on_ranks
def test_captures_change_nothing_under_tensor_parallelism(detach):
    model = parallel()
    looked = train_parallel(model, around=lambda: hl.capture(model, *EVERYTHING, detach=detach))
    assert same_tensors(looked, train_parallel(parallel()))
    assert_clean_of_ours(model)


@on_ranks
def test_values_and_gradients_under_tensor_parallelism_are_those_of_hooks_written_by_hand():
    assert_captured_as_by_hand(parallel, lambda model: loss_of(model(mine(tokens()))).backward())


PLACEMENTS = {
    "norm": ("DTensor", shard, 1), "norm:input": ("DTensor", shard, 1),
    "up:input": ("DTensor", replicate, None), "up": ("Tensor", shard, 2),
    "down:input": ("DTensor", shard, 2), "down": ("Tensor", shard, 1),
    "head": ("Tensor", replicate, None),
}  # fmt: skip


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@on_ranks
def test_the_placement_of_each_value_is_recorded_and_the_parts_make_the_whole(grad, detach):
    whole_model = layer()
    with torch.set_grad_enabled(grad), hl.capture(whole_model, "*") as expected:
        with hl.capture(whole_model, "*:input") as inputs:
            whole_model(tokens())
    model = parallel()
    with torch.set_grad_enabled(grad):
        with hl.capture(model, *PLACEMENTS, "act", detach=detach) as record:
            model(mine(tokens()))
            open_placement = record.placement("up")
    assert open_placement == record.placement("up") == shard(2)
    for place, (kind, made, dim) in PLACEMENTS.items():
        value = record[place]
        assert (type(value).__name__ == "DTensor") == (kind == "DTensor"), place
        assert record.placement(place) == (made() if dim is None else made(dim)), place
        reference = inputs[place] if ":" in place else expected[place]
        torch.testing.assert_close(joined(record, place), reference.detach())
    assert record["up"].shape == record["act"].shape == (2, 6, 4)
    assert record.placement("act") is None  # a part as well, of which torch says nothing
    row = next(line for line in repr(record).splitlines() if line.strip().startswith("up "))
    assert "Shard(dim=2)" in row or "S(2)" in row, row


@pytest.mark.parametrize("option", ["at", "transform"])
@on_ranks
def test_the_plan_tells_no_placement_of_what_is_made_of_a_value(option):
    made = {"at": np.s_[:, 0], "transform": lambda value: value[:, 0]}[option]
    model = parallel()
    with hl.capture(model, "up", **{option: made}) as record:
        model(mine(tokens()))
    assert record["up"].shape == (2, 4)  # a part of rows of 8, along a dimension that is now 1
    assert record.placement("up") is None


@on_ranks
def test_gradients_under_tensor_parallelism_are_those_of_the_whole_model():
    from torch.distributed.tensor import DTensor

    places = ["norm", "up", "down", "head"]
    whole_model, model = layer(), parallel()
    asked = [f"{p}:{port}" for p in places for port in ("grad_output", "grad_input")]
    with hl.capture(whole_model, *asked, "**:grad") as expected:
        loss_of(whole_model(tokens().requires_grad_())).backward()
    with hl.capture(model, *asked, "**:grad") as record:
        loss_of(model(mine(tokens()).requires_grad_())).backward()
    for place in asked:
        torch.testing.assert_close(joined(record, place), expected[place])
    for name, parameter in model.named_parameters():
        found = record[f"{name}:grad"]
        assert isinstance(found, DTensor)
        assert record.placement(f"{name}:grad") == found.placements == parameter.grad.placements
        assert torch.equal(here(found), here(parameter.grad))
        torch.testing.assert_close(found.full_tensor(), expected[f"{name}:grad"])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("detach", [False, True])
@on_ranks
def test_what_a_collective_still_brings_is_waited_for(grad, detach):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    model, kinds = parallel(), []
    handle = model.down.register_forward_hook(lambda m, i, o: kinds.append(type(o)))
    with torch.set_grad_enabled(grad), hl.capture(model, "down", "head:input", detach=detach) as r:
        model(mine(tokens()))
    handle.remove()
    assert kinds == [AsyncCollectiveTensor]  # else this shows nothing
    for value in (r["down"], r["head:input"]._local_tensor):
        assert getattr(value, "completed", True)
    held = r["down"]
    storage = getattr(held, "elem", held).detach().numpy().copy()  # no torch operation waits here
    whole_model = layer()
    with hl.capture(whole_model, "down") as expected:
        whole_model(tokens())
    torch.testing.assert_close(torch.from_numpy(storage), mine(expected["down"].detach()))


CHANGES = {
    "scale": hl.scale(2.0), "scale by channel": hl.scale(torch.linspace(1, 2, 4)),
    "add": hl.add(torch.linspace(-1, 1, 4)), "add a number": hl.add(0.5), "zero": hl.zero(),
    "clamp": hl.clamp(-0.5, 0.5), "replace": hl.replace(torch.linspace(-1, 1, 4)),
    "replace by a number": hl.replace(0.25), "blend": hl.blend(torch.ones(4), 0.3),
    "remove_direction": hl.remove_direction(torch.linspace(1, 2, 4)),
    "noise": hl.noise(0.5, seed=1), "dropout": hl.dropout(0.5, seed=2),
    "along positions": hl.add(torch.linspace(-1, 1, 6), dim=1),
    "bounds along positions": hl.clamp(max=torch.linspace(0, 1, 6), dim=-2),
    "a chain": hl.scale(2.0) | hl.add(torch.ones(4)) | hl.clamp(max=1.0),
    "a function": torch.tanh, "another function": lambda value: value * 2 - 1,
}  # fmt: skip


@pytest.mark.parametrize("place", ["norm", "norm:input", "up:input"])
@on_ranks
def test_an_edit_of_a_spread_value_does_what_it_does_to_the_whole(place):
    whole_model, model = layer(), parallel()
    for name, change in CHANGES.items():
        for each in (whole_model, model):
            each.zero_grad()
        with hl.edit(whole_model, place, change):
            expected = whole_model(tokens())
            loss_of(expected).backward()
        with hl.edit(model, place, change):
            found = model(mine(tokens()))
            loss_of(found).backward()
        torch.testing.assert_close(found + 0, expected, msg=name)
        for one, other in zip(model.parameters(), whole_model.parameters(), strict=True):
            if other.grad is None or one.grad is None:
                assert one.grad is other.grad is None, name
            else:
                torch.testing.assert_close(full(one.grad), other.grad, msg=name)
    assert_clean_of_ours(model)


@pytest.mark.parametrize(
    "at",
    [
        np.s_[:, 0],
        np.s_[..., 1],
        np.s_[:, 4:],
        hl.heads(1, of=2),
        hl.heads(0, 3, of=4),
        hl.last_token(torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])),
    ],
    ids=lambda at: type(at).__name__ + str(at)[:20],
)
@on_ranks
def test_a_slice_of_a_spread_value_is_a_slice_of_the_whole(at):
    whole_model, model = layer(), parallel()
    with hl.capture(whole_model, "norm", at=at) as expected:
        whole_model(tokens())
    with hl.capture(model, "norm", at=at) as record:
        model(mine(tokens()))
    torch.testing.assert_close(record["norm"].full_tensor(), expected["norm"])
    with hl.edit(whole_model, "norm", hl.scale(3.0), at=at):
        expected = whole_model(tokens())
    try:
        with hl.edit(model, "norm", hl.scale(3.0), at=at):
            found = model(mine(tokens())) + 0
    except hl.ChangeError:  # torch cannot write to these indices
        assert TORCH < (2, 13)
    else:
        torch.testing.assert_close(found, expected)


@on_ranks
def test_an_edit_of_a_plain_part_meets_what_this_rank_holds():
    whole_model, model = layer(), parallel()
    wide = torch.linspace(-1, 1, 8)
    own = wide.chunk(2)[distributed.get_rank()]
    with hl.edit(whole_model, "up", hl.add(wide)):
        expected = whole_model(tokens())
    with hl.edit(model, "up", hl.add(own)):
        torch.testing.assert_close(model(mine(tokens())) + 0, expected)
    with hl.capture(model, "head:input", detach=True) as record:
        model(mine(tokens()))
    with pytest.raises(hl.ChangeError, match=r"a Tensor and returned a DTensor.*placement"):
        with hl.edit(model, "head", hl.replace(record["head:input"][..., :2])):
            model(mine(tokens()))
    with pytest.raises(hl.ChangeError, match=r"\(8,\).*\(2, 6, 4\)"):
        with hl.edit(model, "up", hl.add(wide)):
            model(mine(tokens()))


@on_ranks
def test_heads_of_a_part_are_refused():
    model, at = parallel(), hl.heads(1, of=4)
    for context in (hl.capture(model, "up", at=at), hl.edit(model, "up", hl.zero(), at=at)):
        with pytest.raises(hl.ChangeError, match=r"only this rank's part of it.*Shard"):
            context.__enter__()
    assert_clean_of_ours(model)


@pytest.mark.parametrize("other", ["to_local", "full_tensor"])
@on_ranks
def test_a_function_must_return_a_value_that_is_spread_as_before(other):
    model = parallel()
    with pytest.raises(hl.ChangeError, match=r"Shard\(dim=1\).*shape.*placement"):
        with hl.edit(model, "norm", lambda value: getattr(value, other)()):
            model(mine(tokens()))


@on_ranks
def test_a_patch_puts_in_what_another_run_had_and_its_placement():
    model = parallel()
    with hl.capture(model, "norm", "up", "down", "head:input", detach=True) as clean:
        expected = model(mine(tokens())) + 0
    for place in ("norm", "up", "down", "head:input"):
        with hl.edit(model, place, hl.patch(clean)):
            assert torch.equal(model(mine(tokens(1))) + 0, expected)


GRADIENT_PORTS = [
    f"{name}:{port}" for name in ("norm", "up", "down", "head")
    for port in ("grad_output", "grad_input")
]  # fmt: skip


@on_ranks
def test_gradients_are_edited_under_tensor_parallelism_as_in_the_whole_model():
    for place in [*GRADIENT_PORTS, "norm.weight:grad", "up.weight:grad", "down.bias:grad"]:
        whole_model, model = layer(), parallel()
        with hl.edit(whole_model, place, hl.scale(3.0)):
            loss_of(whole_model(tokens().requires_grad_())).backward()
        with hl.edit(model, place, hl.scale(3.0)):
            loss_of(model(mine(tokens()).requires_grad_())).backward()
        for one, other in zip(model.parameters(), whole_model.parameters(), strict=True):
            torch.testing.assert_close(full(one.grad), other.grad, msg=place)
        assert_clean_of_ours(model)


@pytest.mark.parametrize("detach", [False, True])
@on_ranks
def test_one_rank_can_capture_and_hook_by_itself(detach):
    model, bare = parallel(), parallel()
    with contextlib.ExitStack() as stack:
        if distributed.get_rank() == 1:
            stack.enter_context(hl.capture(model, *EVERYTHING, detach=detach))
            stack.enter_context(hl.hook(model, ["**:grad_output", "**:grad"], lambda grad: None))
        found = train_parallel(model)
    assert same_tensors(found, train_parallel(bare))


@on_ranks
def test_one_rank_can_read_a_record_by_itself():
    model = parallel()
    with hl.capture(model, "**", "**:value", "**:input") as record:
        model(mine(tokens()))
    if distributed.get_rank() == 0:  # the other takes no part
        text = repr(record)
        for place in record:
            record[place]
            assert str(place) in text
        assert record.nbytes == sum({id(v): here(v).numel() for _, v in record.items()}.values())
    distributed.barrier()


@on_ranks
def test_a_spread_parameter_cannot_be_swapped_and_the_remedy_works():
    whole_model, model = layer(), parallel()
    with pytest.raises(hl.NotHookable, match=r"kept in shards.*hookline\.preserve"):
        with hl.edit(model, "up.weight", hl.scale(2.0)):
            model(mine(tokens()))
    before = model(mine(tokens())) + 0
    with hl.preserve(model):
        with torch.no_grad():
            model.up.weight.mul_(2)
            model.norm.bias.add_(1)
        found = model(mine(tokens())) + 0
    assert torch.equal(model(mine(tokens())) + 0, before)
    with torch.no_grad():
        whole_model.up.weight.mul_(2)
        whole_model.norm.bias.add_(1)
    torch.testing.assert_close(found, whole_model(tokens()))


@pytest.mark.parametrize("how", ["stop", "exception", "interrupt"])
@on_ranks
def test_training_goes_on_under_tensor_parallelism_after_a_forward_that_was_ended_early(how):
    model = parallel()
    if how == "stop":
        with hl.capture(model, "up", "norm:input", stop=True):
            model(mine(tokens()))
    else:
        error = KeyboardInterrupt() if how == "interrupt" else ValueError()

        def fail(value: Tensor) -> None:
            raise error

        with pytest.raises(type(error)), hl.capture(model, "**"):
            with hl.hook(model, "act", fail):
                model(mine(tokens()))
    assert same_tensors(train_parallel(model), train_parallel(parallel()))
    assert_clean_of_ours(model)


@on_ranks
def test_the_plans_of_prepared_inputs_and_outputs_are_read():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        PrepareModuleOutput,
        SequenceParallel,
        parallelize_module,
    )

    model = parallelize_module(
        nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Tanh()), mesh(),
        {
            "0": SequenceParallel(use_local_output=True),
            "1": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
            "2": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1)),
        },
    )  # fmt: skip
    with hl.capture(model, "**", "**:input") as record:
        model(mine(tokens()))
    assert record.placement("0") == shard(1)
    assert record.placement("1:input") == replicate()
    assert record.placement("2") == shard(2)
    assert record.placement("1") is None
    assert record["2"].shape == (2, 6, 2)


@on_ranks
def test_the_plan_of_a_module_of_which_only_the_inputs_are_prepared_is_read():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

    prepared = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    model = parallelize_module(nn.Sequential(nn.GELU()), mesh(), {"0": prepared})
    with hl.capture(model, "0:input") as record:
        model(mine(tokens()))
    assert torch.equal(record["0:input"], tokens())
    assert record.placement("0:input") == replicate()


# -- without ranks --------------------------------------------------------------------------------


def test_a_model_that_is_not_spread_has_no_placements():
    model = unsharded()
    with hl.capture(model, "**") as record:
        model(torch.randn(2, 5, 3))
    assert all(record.placement(place) is None for place in record)
    assert_clean(model)


def test_stopping_is_refused_where_this_torch_cannot_recover(monkeypatch):
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Linear):
        _is_fsdp_managed_module = True

    loaded = type(sys)("torch.distributed.fsdp")
    loaded.FSDPModule = FSDPModule
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", loaded)
    model = nn.Sequential(Sharded(3, 3))
    with pytest.raises(ValueError, match="cannot go on after a forward that ended early"):
        with hl.capture(model, "0", stop=True):
            model(torch.ones(1, 3))
    assert_clean(model)
