"""guard: when it checks, what it repeats, and that it leaves everything unchanged."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from faults import INF, fault_in, guarded
from models import Giving, as_nested, convolutions, torch_encoder
from oracles import assert_clean, hooks_left, objects_alive
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.isolation.isolated_runs import isolated

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


# -- nothing is changed ---------------------------------------------------------------------------


def training(model, guard, x, steps=3):
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outputs = []

    def run():
        for _ in range(steps):
            optimizer.zero_grad()
            out = model(x)
            out.square().mean().backward()
            optimizer.step()
            outputs.append(out.detach())

    if guard:
        with guarded(model, **guard):
            run()
    else:
        run()
    state = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    return outputs + state + [torch.get_rng_state(), torch.tensor(random.random())]


@pytest.mark.parametrize("options", [{"careful": False}, {"careful": True}])
@pytest.mark.parametrize(
    ("make", "x"),
    [(convolutions, torch.randn(4, 1, 6, 6)), (torch_encoder, torch.randn(2, 5, 8))],
)
def test_a_guarded_training_is_bit_for_bit_the_bare_one(make, x, options):
    torch.manual_seed(0)
    bare = make()
    other = copy.deepcopy(bare)
    for one, two in zip(training(bare, None, x), training(other, options, x), strict=True):
        assert torch.equal(one, two)
    assert_clean(other)


class Faulty(nn.Module):
    """BatchNorm, Dropout, and a logarithm that fails in the given call."""

    def __init__(self, fails):
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)
        self.fails = fails

    def forward(self, x, bad=False):
        h = self.fc(self.drop(self.norm(x)))
        if bad and self.fails == "forward":
            h = h + torch.log(h * 0)
        if bad and self.fails == "backward":
            h = h + torch.sqrt(h * 0)
        return h


def run_bad(model, x, fails):
    """The operations that were found to be at fault."""
    try:
        out = model(x, bad=True)
        if fails == "backward":
            torch.rand(3), random.random()  # as a loss may do
            out.sum().backward()
    except hl.NonFiniteError as error:
        return [error.fault.operation]
    return []


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_after_a_fault_all_is_as_without_a_guard(fails):
    x, seen = torch.randn(4, 3), []
    for guard in (False, True):
        torch.manual_seed(0)
        model = Faulty(fails)
        context = guarded(model).attach() if guard else None
        torch.manual_seed(1), random.seed(1)
        model(x).sum().backward()
        model.zero_grad()
        faults = run_bad(model, x, fails)
        assert faults == ([{"forward": "log", "backward": "sqrt"}[fails]] if guard else [])
        if context is not None:
            context.remove()
        grads = [p.grad for p in model.parameters()]
        assert all(module.training for module in model.modules())
        drawn = torch.tensor(random.random()) if fails == "backward" else torch.zeros(1)
        seen.append([*model.state_dict().values(), torch.get_rng_state(), drawn, *grads])
        assert_clean(model)
    for one, two in zip(*seen, strict=True):
        assert (one is None and two is None) or torch.equal(one.nan_to_num(), two.nan_to_num())


def test_nothing_is_kept_after_a_step_and_after_the_end():
    model = nn.Linear(3, 3)
    context = guarded(model).attach()
    x = torch.randn(2, 3)
    ref, out = weakref.ref(x), model(x)
    graph = weakref.ref(out)
    out.sum().backward()
    del out, x
    model(torch.randn(2, 3)).sum().backward()
    assert graph() is None
    context.remove()
    del context
    gc.collect()
    assert ref() is None
    assert_clean(model)


def test_the_dropout_of_the_failing_step_is_repeated():
    """The fault depends on the random numbers: only a rerun with the same ones has it."""

    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) + torch.log(
                F.dropout(torch.ones(8), 0.003) + random.choice([0, 0, 0])
            )

    torch.manual_seed(3)
    model = Random()
    fault = fault_in(lambda: [model(torch.ones(8)) for _ in range(500)], model)
    assert (fault.place, fault.remarks) == ("/log", [])
    assert fault.step > 1


@pytest.mark.parametrize("training", [True, False])
def test_numpys_random_numbers_of_the_failing_step_are_repeated(training):
    """As transformers draws the masks of its models for speech."""

    def forward(x):
        if model.training is not training:
            return x
        return torch.log(x * torch.from_numpy(np.random.rand(8) > 0.003))

    np.random.seed(3)
    model = Giving(forward).train(not training)

    def run():
        model(torch.ones(8))  # in the other mode it draws none
        model.train(training)
        for _ in range(500):
            model(torch.ones(8))

    fault = fault_in(run, model)
    assert (fault.place, fault.remarks) == ("/log", [])
    assert fault.step > 2


def test_another_generator_of_numpys_is_repeated_without_a_warning():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        model = Giving(lambda x: torch.log(x * torch.from_numpy(np.random.rand(8) > 0.003)))
        fault = fault_in(lambda: [model(torch.ones(8)) for _ in range(500)], model)
        assert (fault.place, fault.remarks) == ("/log", [])
        assert fault.step > 1
        with isolated(model):
            first = np.random.rand()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_numpys_random_numbers_are_not_drawn_twice_where_infinities_are_meant():
    model = Giving(lambda x: (x * np.random.rand()).masked_fill(x > 1, -INF))
    np.random.seed(0)
    bare = [model(torch.arange(3.0)) for _ in range(3)]
    np.random.seed(0)
    with guarded(model):
        assert all(torch.equal(model(torch.arange(3.0)), own) for own in bare)


def test_the_buffers_of_the_failing_step_are_put_back_for_the_second_run():
    """The fault depends on a counter that every call moves on."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            out = x / (self.count - 3)
            self.count += 1
            return out

    model = nn.Sequential(nn.Linear(3, 3), Counting())
    fault = fault_in(lambda: [model(torch.ones(3)) for _ in range(9)], model)
    assert (fault.step, fault.place, fault.remarks) == (3, "1/div", [])
    assert model[1].count == 4


# -- when it looks --------------------------------------------------------------------------------


def test_the_step_is_told_and_the_error_comes_out_of_the_step_that_failed():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: x / (x.abs() > -1).all()))
    done = []

    def train():
        for number in range(5):
            if number == 3:
                model[1].function = lambda x: x / 0
            model(torch.ones(3)).sum().backward()
            done.append(number)

    context = guarded(model).attach()
    with pytest.raises(hl.NonFiniteError) as found:
        train()
    context.remove()
    assert (found.value.fault.step, found.value.fault.place) == (3, "1/div")
    assert done == [0, 1, 2]


def test_a_fault_of_a_backward_comes_out_of_backward_before_the_step_of_the_optimiser():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: (x * 0).sqrt()))
    loss = []
    with guarded(model):
        loss.append(model(torch.ones(3)).sum())
        with pytest.raises(hl.NonFiniteError):
            loss[0].backward()


def test_without_gradients_the_error_comes_out_of_the_call():
    model = nn.Sequential(nn.Linear(3, 3), Giving(torch.log))
    model[0].weight.data.zero_(), model[0].bias.data.zero_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), guarded(model), pytest.raises(hl.NonFiniteError, match="1/log"):
            model(torch.ones(3))


def test_several_calls_before_one_backward_are_told_apart():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x, *_: x))
    model[1].function = torch.abs
    nn.init.zeros_(model[0].bias), nn.init.ones_(model[0].weight)

    def run():
        one = model(torch.ones(3))
        model[1].function = torch.sqrt  # with which the first call would be finite, too
        two = model(torch.zeros(3))
        (one.sum() + two.sum()).backward()

    fault = fault_in(run, model)
    assert (fault.step, fault.place) == (1, "1/sqrt")


def test_gradients_that_are_accumulated_are_checked_at_each_backward():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Giving(torch.sqrt))
    nn.init.ones_(model[0].weight)

    def run():
        for x in (torch.ones(3), torch.ones(3), torch.zeros(3)):
            model(x).sum().backward()

    assert fault_in(run, model).step == 2


def test_autograd_grad_is_seen_and_gradients_of_inputs_too():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Giving(torch.sqrt))
    nn.init.ones_(model[0].weight)

    def of_weights():
        torch.autograd.grad(model(torch.zeros(3)).sum(), model[0].weight)

    def of_inputs():
        x = torch.zeros(3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)

    assert fault_in(of_weights, model).place == "1/sqrt"
    model.requires_grad_(False)
    assert fault_in(of_inputs, model).place == "1/sqrt"


def test_a_parameter_that_is_trained_only_later_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: (x * 0).sqrt()))
    model.requires_grad_(False)

    def run():
        model(torch.ones(3))
        model.requires_grad_(True)
        model(torch.ones(3)).sum().backward()

    assert fault_in(run, model).place == "1/sqrt"


def test_a_guard_without_a_call_says_so_and_can_be_entered_again():
    model = nn.Linear(3, 3)
    guard = guarded(model)
    with pytest.raises(hl.NeverFired, match="was not called"), guard:
        pass
    with guard:
        model(torch.ones(3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_looked_into(reentrant):
    class Net(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.first, self.inner = (
                nn.Linear(3, 3),
                nn.Sequential(nn.Linear(3, 3), Giving(function)),
            )

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model = Net(torch.abs)
    with guarded(model):
        model(torch.ones(3)).sum().backward()
    model = Net(lambda x: (x * 0).log())
    assert fault_in(lambda: model(torch.ones(3)), model).place == "inner.1/log"
    model = Net(lambda x: (x * 0).sqrt())
    before = model.first.weight.grad = torch.ones(3, 3)
    fault = fault_in(lambda: model(torch.ones(3)).sum().backward(), model)
    assert (fault.path, fault.node) == ("inner.1", "SqrtBackward0")
    assert fault.others == []
    assert model.first.weight.grad is before


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_recomputes_outside_of_modules_is_not_blamed_on_them(reentrant, careful):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(lambda y: (self.b(y) * 0).sqrt(), self.a(x), use_reentrant=reentrant)

    model = Net()
    fault = fault_in(lambda: model(torch.ones(3)).sum().backward(), model, careful=careful)
    assert (fault.kind, fault.path, fault.others) == ("operation", "", [])
    unseen = reentrant and careful  # of what is recomputed only modules are seen
    assert fault.node == ("CheckpointFunctionBackward" if unseen else "SqrtBackward0")


class OlderCheckpoint(nn.Module):
    """Runs what is in it under a checkpoint of the older kind."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(lambda y: self.inner(y * 1.0) * 1.0, x, use_reentrant=True)


def bad_root(x):
    """Bad in the backward only, and for large values only."""
    return x + torch.where(x > 0, (x * 0).sqrt(), 0 * x) if x.abs().max() > 50 else x * 1.0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch's own
@pytest.mark.parametrize("nested", [False, True])
def test_operations_inside_of_an_older_checkpoint_are_named_and_replayed(nested, tmp_path):
    inner = nn.Sequential(nn.Linear(3, 3), Giving(bad_root))
    model = nn.Sequential(
        nn.Linear(3, 3), OlderCheckpoint(OlderCheckpoint(inner) if nested else inner)
    )
    fault = fault_in(lambda: model(1e3 * torch.ones(2, 3)).sum().backward(), model, to=tmp_path)
    assert fault.place == ("1.inner.inner.1/sqrt" if nested else "1.inner.1/sqrt")
    assert (fault.node, fault.others) == ("SqrtBackward0", [])
    assert "(x * 0).sqrt()" in fault.source
    assert hl.replay(fault.folder).reproduced
    assert hl.replay(fault.folder, model).reproduced


@pytest.mark.parametrize("careful", [False, True])
def test_a_bad_gradient_that_flows_into_an_older_checkpoint_is_not_blamed_on_it(careful):
    model = nn.Sequential(OlderCheckpoint(nn.Linear(3, 3)), Giving(bad_root))
    x = 1e3 * torch.ones(2, 3, requires_grad=True)
    fault = fault_in(lambda: model(x).sum().backward(), model, careful=careful)
    assert (fault.path, fault.node, fault.others) == ("1", "SqrtBackward0", [])


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("sizes", [(1e3, 1.0), (1.0, 1e3)])
def test_of_several_calls_with_older_checkpoints_the_module_is_named(sizes, careful):
    model = nn.Sequential(
        nn.Linear(3, 3), OlderCheckpoint(nn.Sequential(Giving(bad_root), nn.Linear(3, 3)))
    )
    calls = [size * torch.ones(2, 3) for size in sizes]
    fault = fault_in(lambda: sum(model(x).sum() for x in calls).backward(), model, careful=careful)
    assert (fault.path, fault.node) == ("1.inner.0", "SqrtBackward0")


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("around", [nn.Identity, OlderCheckpoint])
def test_a_nan_that_attention_hides_from_the_output_is_told_as_what_made_it(around, careful):
    def logarithm(q):
        return q + F.pad((q[..., :1, :1] * 0 - 1).log(), (0, 3, 0, 3))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.query = nn.Linear(8, 8), Giving(logarithm)

        def forward(self, x):
            h = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
            h = F.scaled_dot_product_attention(self.query(h), h, h)
            return h.transpose(1, 2).flatten(-2)

    inner = Attention()
    model = nn.Sequential(
        nn.Linear(8, 8), OlderCheckpoint(inner) if around is OlderCheckpoint else inner
    )
    x = torch.randn(2, 4, 8)
    assert model(x).isfinite().all()  # else this shows nothing
    fault = fault_in(lambda: model(x).sum().backward(), model, careful=careful)
    assert fault.path == ("1.inner.query" if around is OlderCheckpoint else "1.query")
    assert (fault.backward, fault.operation) == (False, "" if careful else "log")


def test_only_the_model_itself_is_hooked_so_that_fast_paths_stay():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Tanh())
    x = torch.randn(2, 3, 16)
    model.eval()
    with torch.no_grad():
        bare = model(x)
        with guarded(model):
            hooked = {name.partition("._")[0] for name in hooks_left(model)}
            assert hooked & {name for name, _ in model.named_modules()} == {""}
            assert torch.equal(model(x), bare)
    assert fault_in(lambda: model(x * INF).sum().backward(), model).kind == "input"


# -- mixed precision, wrappers --------------------------------------------------------------------


def test_gradients_that_only_the_scale_makes_infinite_are_left_to_the_scaler():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: (x.half() * 2).float()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = guarded(model, scaler=scaler)
    scales = []
    with guard:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3)).sum() * 4).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[0] < 2**16
    assert guard.skipped >= 1
    fault = fault_in(lambda: (model(torch.ones(3)).sum() * 2.0**18).backward(), model)
    assert fault.place == "1/float"  # whose backward makes float16 of it


@pytest.mark.parametrize("careful", [False, True])
def test_a_backward_with_others_inside_of_it_is_skipped_once(careful):
    model = nn.Sequential(
        nn.Linear(3, 3), OlderCheckpoint(nn.Linear(3, 3)), OlderCheckpoint(nn.Linear(3, 3))
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with guarded(model, scaler=scaler, careful=careful) as guard:
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 3)).sum() * 64).backward()
            assert not model[2].inner.weight.grad.isfinite().all()
    assert guard.skipped == 3


def test_gradients_that_are_bad_without_the_scale_too_are_accused():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: (x * 0).sqrt()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    fault = fault_in(
        lambda: scaler.scale(model(torch.ones(3)).sum()).backward(), model, scaler=scaler
    )
    assert fault.place == "1/sqrt"


def test_autocast_is_as_it_was_when_a_call_is_run_again_in_a_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return (self.fc(x) * 0).sqrt()

    model = Net()

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(3))
        out.sum().backward()

    fault = fault_in(run, model)
    assert fault.place == "/sqrt"
    assert "bfloat16" in fault.values[0][1].kind


def test_a_compiled_model_runs_eagerly_inside_and_its_producer_is_named():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: x / 0))
    compiled = torch.compile(model, backend="eager")
    assert fault_in(lambda: compiled(torch.ones(3)), compiled).place == "1/div"


def test_an_error_of_the_model_itself_is_not_touched():
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: 1 / 0))
    with pytest.raises(ZeroDivisionError), guarded(model):
        model(torch.ones(3))
    assert_clean(model)
    model[1].function = torch.abs
    with guarded(model):
        model(torch.ones(3)).sum().backward()


def test_a_model_in_ddp_is_run_again_without_the_other_ranks(tmp_path):
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Giving(torch.abs))
        spread = DistributedDataParallel(model)
        with guarded(spread):
            spread(torch.randn(4, 3)).sum().backward()
        model[2].function = lambda x: (x * 0).sqrt()
        fault = fault_in(lambda: spread(torch.randn(4, 3)).sum().backward(), spread)
        assert fault.place == "2/sqrt"
        model[2].function = lambda x: x / 0
        assert fault_in(lambda: spread(torch.randn(4, 3)), spread).place == "2/div"
    finally:
        distributed.destroy_process_group()


def test_where_a_device_must_be_waited_for_a_step_is_checked_once(monkeypatch):
    """As on a GPU: after the backward, at the next call, or at the end."""
    from hookline.guards import guarding as guards

    monkeypatch.setattr(guards, "_must_be_waited_for", lambda probes: True)
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: x / 0))
    with guarded(model):
        out = model(torch.ones(3))
        with pytest.raises(hl.NonFiniteError, match="1/div"):
            out.sum().backward()
    with guarded(model):
        model(torch.ones(3))
        with pytest.raises(hl.NonFiniteError, match="1/div"):
            model(torch.ones(3))
    with pytest.raises(hl.NonFiniteError, match="1/div"), guarded(model):
        model(torch.ones(3))
    with torch.no_grad(), guarded(model), pytest.raises(hl.NonFiniteError, match="1/div"):
        model(torch.ones(3))


def test_many_calls_may_stand_before_one_backward():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Giving(torch.sqrt))
    nn.init.ones_(model[0].weight)

    def run():
        inputs = [torch.full((3,), float(n != 2)) for n in range(40)]
        sum(model(x).sum() for x in inputs).backward()

    fault = fault_in(run, model)
    assert (fault.step, fault.place) == (2, "1/sqrt")


def test_a_call_that_feeds_another_is_not_taken_for_the_loss():
    """What flows into the first call is bad, but it was made in the second."""
    cell = nn.Sequential(nn.Linear(3, 3), Giving(torch.abs))
    nn.init.zeros_(cell[0].bias)

    def run():
        first = cell(torch.ones(3))
        cell[1].function = torch.sqrt
        cell(first * 0).sum().backward()

    fault = fault_in(run, cell)
    assert (fault.step, fault.place) == (1, "1/sqrt")


def test_calls_without_a_backward_are_not_kept():
    model = nn.Linear(3, 3)
    guard = guarded(model).attach()
    alive = []
    for _ in range(2):
        for _ in range(100):
            model(torch.ones(3))
        alive.append(objects_alive())
    assert alive[1] - alive[0] < 100
    guard.remove()


@pytest.mark.parametrize("careful", [False, True])
def test_a_lazy_model_is_guarded(careful):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), Giving(torch.abs))

    def run():
        model(torch.randn(4, 2)).sum().backward()
        model[2].function = lambda x: (x * 0).sqrt()
        model(torch.randn(4, 2)).sum().backward()

    assert fault_in(run, model, careful=careful).place == ("2" if careful else "2/sqrt")


def test_a_second_run_that_fails_is_a_doubt_and_not_the_error():
    numbers = iter([1.0])
    model = nn.Sequential(nn.Linear(3, 3), Giving(lambda x: x * next(numbers) / 0))
    fault = fault_in(lambda: model(torch.ones(3)), model)
    assert fault.kind == "unknown"
    assert "the second run raised StopIteration" in fault.remarks[0]


def test_a_guard_at_a_part_of_a_model_speaks_of_that_part():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), Giving(torch.log)))
    model[1][0].weight.data.zero_(), model[1][0].bias.data.zero_()
    assert fault_in(lambda: model(torch.ones(3)), model[1]).place == "1/log"


def test_the_message_has_place_numbers_arguments_line_and_what_to_do():
    model = nn.Sequential(nn.Linear(2, 2), Giving(lambda x: torch.zeros(2) / torch.zeros(2)))
    with pytest.raises(hl.NonFiniteError) as found, guarded(model):
        model(torch.ones(2))
    error = found.value
    hint = (
        "Where the divisor is 0: add a small number to it, or clamp it. "
        "If it is meant so: guard(model, ignore='1/div')."
    )
    assert isinstance(error, (hl.HooklineError, ArithmeticError))
    assert str(error).splitlines() == [
        "guard found numbers that are not finite in step 0, the model's output: 2 NaN of 2.",
        "'1/div': 'div' in '1' (Giving) made them from finite inputs:",
        "  made         (2,) float32: 2 NaN of 2, first at [0]; nothing finite",
        "  given input  (2,) float32: all 0",
        "  given other  (2,) float32: all 0",
        f"  line         {error.fault.source}",
        '  dump         not written: guard(model, to="dumps") writes one for hookline.replay',
        hint,
    ]
    assert error.fault.source.startswith("test_guards.py:")
    assert "torch.zeros(2) / torch.zeros(2)" in error.fault.source


def test_where_only_modules_of_torch_run_the_line_is_that_which_calls_the_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    nn.init.constant_(model[1][0].weight, 3e38)

    def step():
        out = model(torch.full((2, 3), 9.0))  # in a forward
        out.backward(torch.full_like(out, 3e38))

    fault = fault_in(step, model)
    assert (fault.place, fault.backward) == ("1.0/linear", False)
    assert fault.source.startswith("test_guards.py:")
    assert fault.source.endswith("# in a forward")
    nn.init.constant_(model[0].weight, 0.0), nn.init.constant_(model[0].bias, 0.0)
    fault = fault_in(step, model)
    assert (fault.place, fault.backward) == ("1.0/linear", True)
    assert fault.source.endswith("# in a forward")


def test_the_line_in_a_library_whose_name_begins_as_that_of_torch_is_told():
    from pathlib import Path

    from hookline.guards.origins import line_of

    file = f"{Path(torch.__file__).parent}vision/models.py"
    code = compile("import sys\nframe = sys._getframe()", file, "exec")
    exec(code, found := {})
    assert line_of(found["frame"])[0] == file


@pytest.mark.parametrize("careful", [False, True])
def test_a_transformer_that_computes_with_nested_tensors_is_not_accused(careful):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, met = nn.TransformerEncoder(layer, 2).eval(), []
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    model.layers[1].register_forward_pre_hook(lambda module, args: met.append(args[0].is_nested))
    with torch.no_grad(), guarded(model, careful=careful):
        model(torch.randn(2, 5, 8), src_key_padding_mask=padding)
    assert met == [True]


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        lambda x: as_nested(x / 0),
        lambda x: as_nested(x / 0, torch.jagged),
        lambda x: (x / 0).to_sparse(),
        lambda x: (x / 0).to_sparse_csr(),
        lambda x: (x / 0).to_sparse_csc(),
        lambda x: (x / 0).to_sparse_bsr((2, 2)),
    ],
    ids=["nested", "jagged", "coo", "csr", "csc", "bsr"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_bad_numbers_in_nested_and_sparse_tensors_are_seen(made, careful):
    model = nn.Sequential(nn.Identity(), Giving(made))
    fault = fault_in(lambda: model(torch.ones(4, 4)), model, careful=careful)
    assert fault.place == ("1" if careful else "1/div")
    assert fault.seen[0][1].positive == 16


def test_bad_numbers_beside_a_part_of_a_nested_tensor_are_not_its_own():
    model = Giving(lambda x: as_nested(x.log()).chunk(2, -1)[1])
    with guarded(model):
        model(torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]))


def test_the_part_of_a_nested_output_is_told():
    model = Giving(lambda x: {"good": x, "bad": [x, x.log()]})
    fault = fault_in(lambda: model(torch.zeros(3)), model)
    assert fault.seen[0][0] == "the model's output[bad][1]"
    assert (fault.seen[0][1].negative, fault.seen[0][1].first) == (3, (0,))


def test_a_third_run_that_is_finite_is_told_as_such():
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x / 0.0 if self.calls < 3 else x / 2.0

    model = nn.Sequential(nn.Identity(), Counted())
    with pytest.raises(hl.NonFiniteError, match="third run, which made finite numbers") as caught:
        with hl.guard(model, to=None):
            model(torch.ones(2))
    assert caught.value.fault.place == "1/div"


def test_batched_gradients_are_let_by():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)

    def jacobian():
        rows = torch.eye(10).reshape(10, 5, 2)
        weights = list(model.parameters())
        return torch.autograd.grad(model(x), weights, rows, is_grads_batched=True)

    expected = jacobian()
    with hl.guard(model):
        found = jacobian()
    assert all(map(torch.equal, found, expected))
    assert_clean(model)


@pytest.mark.parametrize("careful", [False, True])
def test_nothing_is_written_unless_a_folder_is_given(careful, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Identity(), Giving(torch.log))
    with pytest.raises(hl.NonFiniteError, match=r'guard\(model, to="dumps"\)') as caught:
        with hl.guard(model, careful=careful):
            model(torch.zeros(2))
    assert list(tmp_path.iterdir()) == []
    assert caught.value.fault.folder is None
    with pytest.raises(hl.ReplayError, match=r'written nothing.*guard\(model, to="dumps"\)'):
        hl.replay(caught.value.fault.folder)
    with pytest.raises(hl.NonFiniteError) as caught:
        with hl.guard(model, to="dumps"):
            model(torch.zeros(2))
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]
    assert 'to="dumps"' not in str(caught.value)
    assert hl.replay(caught.value.fault.folder).reproduced


def test_a_scaler_that_is_none_is_told_before_anything_runs():
    with pytest.raises(hl.PlaceError, match=r"scaler=.*a Linear, without .*get_scale"):
        hl.guard(nn.ReLU(), scaler=nn.Linear(1, 1))


def test_a_folder_that_is_none_is_told_before_anything_runs():
    with pytest.raises(TypeError, match=r"not '?int"):
        hl.guard(nn.ReLU(), to=3)
