"""summarize: the FLOPs of forward and backward equal those of torch and of the arithmetic."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from models import TiedTransformer
from oracles import assert_clean
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import hookline as hl
from hookline.costs.flop_counter import FlopCounter

aten = torch.ops.aten


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, groups=4, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.up(self.b(F.relu(self.norm(self.a(x)), inplace=True)))
        return self.head(self.drop(x.mean((2, 3))))


MODELS = {
    "convolutions": (Conv, lambda: torch.randn(2, 3, 9, 9)),
    "a transformer": (TiedTransformer, lambda: torch.randint(11, (2, 6))),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: torch.randn(2, 5, 8),
    ),
    "a GRU": (lambda: nn.GRU(4, 5, 2), lambda: torch.randn(3, 2, 4)),
    "an LSTM cell": (lambda: nn.LSTMCell(4, 5), lambda: torch.randn(2, 4)),
}  # fmt: skip


def flops_by_torch(model, batch, backward=False):
    """What torch's counter finds, by module, with formulas for the attention kernels it lacks."""
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, out_shape=None, **o: (
            4 * q[0] * q[1] * q[2] * k[2] * q[3]
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda g, q, k, v, *a, out_shape=None, **o: 10 * q[0] * q[1] * q[2] * k[2] * q[3]
        ),
    }
    batch = batch if isinstance(batch, tuple) else (batch,)
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        with torch.set_grad_enabled(backward):
            output = model(*batch)
            if backward:
                parts = output if isinstance(output, tuple) else (output,)
                torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
    model.zero_grad()
    found = {k: sum(v.values()) for k, v in counter.get_flop_counts().items()}
    return counter.get_total_flops(), found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_of_torchs_counter(name, training, backward):
    make, batch = MODELS[name]
    model, x = make(), batch()
    # torch has no formula for the fast path of attention in eval mode.
    total, by_module = flops_by_torch(model.train(training or not backward), x, backward)
    summary = hl.summarize(model.train(training), x, backward=backward)
    assert summary.totals["flops"] + (summary.totals["backward_flops"] or 0) == total > 0
    assert (summary.totals["backward_flops"] is not None) == backward
    assert summary[""].flops == summary.totals["flops"]
    assert summary[""].backward_flops == summary.totals["backward_flops"]
    root = type(model).__name__
    for row in summary if not backward else ():  # torch's tracker is not exact in a backward
        expected = by_module.get(f"{root}.{row.place}" if row.place else root, 0)
        assert row.flops == expected, row.place
    assert_clean(model)


@pytest.mark.parametrize("name", ["convolutions", "a transformer"])
def test_the_flops_of_a_backward_are_those_of_each_layer_alone(name):
    make, batch = MODELS[name]
    model, x = make(), batch()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    with hl.capture(model, *[(layer, ":input") for layer in layers]) as record:
        model(x)
    summary = hl.summarize(model, x, backward=True)
    for place in record.places():
        given = record[place]
        layer, given = (
            hl.get_module(model, place.path),
            given.detach().requires_grad_(given.requires_grad),
        )
        total, _ = flops_by_torch(layer, given, backward=True)
        row = summary[place.path]
        assert row.flops + row.backward_flops == row.own_flops + row.own_backward_flops == total


def test_forward_and_backward_are_told_apart():
    summary = hl.summarize(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), (5, 4), backward=True)
    assert summary["0"].flops == 2 * 5 * 4 * 6
    assert summary["0"].backward_flops == 2 * 5 * 4 * 6  # no gradient of the batch is needed
    assert summary["1"].backward_flops == 2 * (2 * 5 * 6 * 3)
    assert summary[""].own_flops == 0
    assert summary[""].own_backward_flops == 0


def test_attention_kernels_have_the_flops_of_attention_written_out():
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    q, kv = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16)
    fast = hl.summarize(Attend(), (q, kv, kv)).totals["flops"]
    with sdpa_kernel(SDPBackend.MATH):
        written, _ = flops_by_torch(Attend(), (q, kv, kv))
    assert fast == written == 2 * (2 * 2 * 3 * 7 * 11 * 16)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("directions", [False, True])
def test_an_lstm_has_the_flops_of_its_matrix_products(directions, bias):
    model, x = nn.LSTM(4, 5, 2, bias, bidirectional=directions), torch.randn(3, 2, 4)
    with torch.backends.mkldnn.flags(enabled=False):
        expected, _ = flops_by_torch(model, x)
    assert hl.summarize(model, x).totals["flops"] == expected > 0
    found = hl.summarize(model, x, backward=True).totals
    assert found["backward_flops"] == 2 * expected


def test_the_fast_path_of_attention_has_the_flops_of_the_slow_one(monkeypatch):
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    expected, _ = flops_by_torch(model.train(), (x, x, x))
    assert hl.summarize(model.eval(), (x, x, x)).totals["flops"] == expected > 0
    counted = []  # a function mode, as summarize has, turns the fast path off
    monkeypatch.setattr("hookline.costs.flop_counter.without_dispatch_modes", None)
    with torch.no_grad(), FlopCounter(counted.append):
        model(x, x, x, need_weights=False)
    assert counted == [expected]


class GroupedExperts(nn.Module):
    """Rows that each go to one of four experts, by one kernel or one expert after the other."""

    def __init__(self, grouped):
        super().__init__()
        self.grouped, self.weight = grouped, nn.Parameter(torch.randn(4, 16, 24))

    def forward(self, x):
        ends = torch.tensor([3, 3, 8, 12], dtype=torch.int32)
        if self.grouped:
            return torch._grouped_mm(x, self.weight, offs=ends)
        parts = x.tensor_split(ends[:-1].tolist())
        return torch.cat([part @ own for part, own in zip(parts, self.weight, strict=True)])


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no such kernel")
def test_experts_in_one_kernel_have_the_flops_of_each_alone():
    x = torch.randn(12, 16, requires_grad=True)
    found = [
        hl.summarize(GroupedExperts(grouped), x, backward=True).totals for grouped in (True, False)
    ]
    for name in ("flops", "backward_flops"):
        assert found[0][name] == found[1][name] == (1 + ("back" in name)) * 2 * 12 * 16 * 24
    one, other = torch.randn(5, 2, 16), torch.randn(5, 16, 8)
    batched = hl.summarize(GroupedExperts(True), lambda _: torch._grouped_mm(one, other))
    assert batched.totals["flops"] == 2 * 5 * 2 * 16 * 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_count_in_the_backward_and_no_gradient_is_left(reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model, x = Saving(), torch.randn(3, 4)
    marker = model.first.weight.grad = torch.full((4, 4), 7.0)
    summary = hl.summarize(model, x, backward=True)
    assert model.first.weight.grad is marker
    assert bool((marker == 7).all())
    assert model.inner[0].weight.grad is None
    one = 2 * 3 * 4 * 4
    assert summary["inner.0"].flops == one
    assert summary["inner.0"].backward_flops == 3 * one  # again, and two gradients
    assert summary["first"].backward_flops == one
    assert summary.totals["backward_flops"] == 4 * one


@pytest.mark.parametrize("backward", [False, True])
def test_a_backward_that_a_forward_makes_itself_is_a_part_of_it(backward):
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.energy(x).sum()
                return torch.autograd.grad(energy, x, create_graph=backward)[0]

    summary = hl.summarize(Forces(), torch.randn(5, 3), backward=backward)
    small, large = 2 * 5 * 8 * 1, 2 * 5 * 3 * 8
    assert summary["energy"].flops == small + large
    assert summary[""].own_flops == small + large  # the gradient of the positions
    assert summary[""].flops == summary.totals["flops"] == 2 * (small + large)
    if backward:  # the first weights and what they meet twice, the last weights once
        assert summary.totals["backward_flops"] == 4 * large + small


def test_a_backward_of_the_users_function_is_counted():
    model, x = nn.Linear(3, 4, bias=False), torch.randn(5, 3)

    def train(model):
        with torch.enable_grad():
            model(x).sum().backward()

    one = 2 * 5 * 3 * 4
    assert hl.summarize(model, train).totals["flops"] == 2 * one


def test_a_backward_is_measured_in_inference_mode_too():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(5, 3)
    expected = hl.summarize(model, x, backward=True).to_dict()
    with torch.inference_mode():
        assert hl.summarize(model, (5, 3), backward=True, time=True).totals["backward_seconds"] > 0
        assert hl.summarize(model, x * 1, backward=True).to_dict() == expected
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_backward_of_parameters_that_were_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    x = torch.randn(5, 3)
    with pytest.raises(hl.HooklineError, match=r"(?s)inside torch\.inference_mode.*deepcopy"):
        hl.summarize(model, x, backward=True)
    with pytest.raises(hl.HooklineError, match=r"(?s)inside torch\.inference_mode.*deepcopy"):
        hl.sweep(model, x, x + 1, "*", torch.sum, approximate=True)
    expected = 2 * 5 * 3 * 4
    assert hl.summarize(model, x).totals["flops"] == expected
    copied = hl.summarize(copy.deepcopy(model), x, backward=True)
    assert copied.totals["backward_flops"] == expected
    frozen = nn.Sequential(model.requires_grad_(False), nn.Linear(4, 2))  # it needs no gradient
    assert hl.summarize(frozen, x, backward=True).totals["backward_flops"] == 2 * 5 * 4 * 2


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_remembered_of_earlier_calls_is_what_counting_them_gives(inference, monkeypatch):
    model, ids = TiedTransformer(), torch.randint(11, (2, 6))
    with torch.inference_mode(inference):
        remembered = hl.summarize(model, ids).to_dict()
        monkeypatch.setattr("hookline.costs.flop_counter.without_dispatch_modes", None)
        counted = hl.summarize(model, ids).to_dict()
    assert remembered == counted
    assert counted["totals"]["flops"] > 0


def test_the_users_own_dispatch_modes_still_see_everything():
    model, ids = TiedTransformer(), torch.randint(11, (2, 6))
    with FlopCounterMode(display=False) as bare:
        model(ids)
    with FlopCounterMode(display=False) as counter:
        hl.summarize(model, ids)
    assert counter.get_total_flops() == bare.get_total_flops()


def test_operations_of_other_libraries_are_named_and_not_counted_as_nothing():
    with torch.library._scoped_library("hookline_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        class Twice(nn.Module):
            def forward(self, x):
                return torch.ops.hookline_test.twice(torch.ops.hookline_test.twice(x))

        summary = hl.summarize(Twice(), (2, 3))
    assert summary.totals["uncounted"] == {"hookline_test.twice": 2}
    assert "without a formula, and so not in the FLOPs: hookline_test.twice (2 ×)" in str(summary)


def test_marks_for_the_profiler_are_no_operations_without_a_formula():
    class Marked(nn.Module):
        def forward(self, x):
            with torch.profiler.record_function("mine"):
                return x @ x

    summary = hl.summarize(Marked(), (3, 3))
    assert summary.totals["uncounted"] == {}
    assert summary.totals["flops"] == 2 * 3 * 3 * 3


def test_a_formula_that_is_registered_later_is_seen():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    assert hl.summarize(model, (2, 3)).totals["flops"] == 0
    try:
        register_flop_formula(aten.relu)(lambda shape, out_shape=None: 10 * shape[0] + shape[1])
        summary = hl.summarize(model, (2, 3))
    finally:
        flop_registry.pop(aten.relu)
    assert [row.flops for row in summary] == [46, 23, 23]


def test_a_weight_that_is_computed_at_each_call_is_counted():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(2)))
    assert [row.own_flops for row in hl.summarize(model, (3, 4))] == [
        0,
        2 * 3 * 4 * 4,
        2 * 3 * 4 * 4,
    ]


@pytest.mark.slow
def test_the_compiler_is_not_imported():
    code = (
        "import sys, torch, hookline as hl; from torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())\n"
        "hl.summarize(model, torch.zeros(3, 4), backward=True, time=True)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- every module of torch.nn ---------------------------------------------------------------------

ROWS, ROW3, PAIR3 = torch.randn(7, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)

_SIGNAL, _PICTURE, _VOLUME = (torch.randn(2, 4, *[8] * n) for n in (1, 2, 3))


def _attending(queries, keys, width):
    """Four projections, queries with keys, and what comes of that with values; 2 samples."""
    return 2 * 2 * (2 * queries + 2 * keys) * width**2 + 2 * 2 * 2 * queries * keys * width


# How to make each module of torch.nn that has parameters, what it is given, and its FLOPs: a
# product and a sum for every time that a weight is used.
WITH_PARAMETERS = {
    "Linear": (nn.Linear(4, 6), ROW3, 2 * 14 * 4 * 6),
    "Linear, one row": (nn.Linear(4, 6), ROWS[0], 2 * 4 * 6),
    "Linear, no bias": (nn.Linear(4, 6, bias=False), ROWS[0], 2 * 4 * 6),
    "Bilinear": (nn.Bilinear(3, 4, 5), (PAIR3, ROW3), 2 * 14 * 5 * 4 * (3 + 1)),
    "Bilinear, no bias": (nn.Bilinear(3, 4, 5, bias=False), (PAIR3, ROW3), 2 * 14 * 5 * 4 * 4),
    "Bilinear, one row": (nn.Bilinear(3, 4, 5), (PAIR3[0, 0], ROWS[0]), 2 * 5 * 4 * (3 + 1)),
    **{
        f"Conv{n}d": (kind(4, 6, 3), x, 2 * 2 * 6**n * 4 * 6 * 3**n)
        for n, kind, x in [
            (1, nn.Conv1d, _SIGNAL), (2, nn.Conv2d, _PICTURE), (3, nn.Conv3d, _VOLUME)
        ]
    },
    **{
        f"ConvTranspose{n}d": (kind(4, 6, 3), x, 2 * 2 * 8**n * 4 * 6 * 3**n)
        for n, kind, x in [
            (1, nn.ConvTranspose1d, _SIGNAL),
            (2, nn.ConvTranspose2d, _PICTURE),
            (3, nn.ConvTranspose3d, _VOLUME),
        ]
    },
    **{
        kind.__name__: (kind(4, 5), ROW3, 2 * 14 * gates * 5 * (4 + 5))
        for kind, gates in [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)]
    },
    **{
        kind.__name__: (kind(4, 5), ROWS, 2 * 7 * gates * 5 * (4 + 5))
        for kind, gates in [(nn.RNNCell, 1), (nn.GRUCell, 3), (nn.LSTMCell, 4)]
    },
    "MultiheadAttention": (
        nn.MultiheadAttention(4, 2, batch_first=True), (ROW3, ROW3, ROW3), _attending(7, 7, 4)
    ),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), ROW3,
        _attending(7, 7, 4) + 2 * 2 * 14 * 4 * 8,
    ),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), (ROW3, ROW3),
        2 * _attending(7, 7, 4) + 2 * 2 * 14 * 4 * 8,
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        nn.AdaptiveLogSoftmaxWithLoss(4, 9, [5], div_value=2.0), (ROWS, torch.zeros(7).long()),
        2 * 7 * 4 * (5 + 1),  # and the tail, which no word here is in
    ),
    "Embedding": (nn.Embedding(9, 4), torch.zeros(2, 7).long(), 0),
    "EmbeddingBag": (nn.EmbeddingBag(9, 4), torch.zeros(2, 7).long(), 0),
    "LayerNorm": (nn.LayerNorm(4), ROW3, 0),
    "RMSNorm": (nn.RMSNorm(4), ROW3, 0),
    "GroupNorm": (nn.GroupNorm(2, 4), _PICTURE, 0),
    "PReLU": (nn.PReLU(4), _PICTURE, 0),
    **{
        kind.__name__: (kind(4, affine=True), x, 0)
        for kinds, x in [
            ((nn.BatchNorm1d, nn.InstanceNorm1d), _SIGNAL),
            ((nn.BatchNorm2d, nn.InstanceNorm2d), _PICTURE),
            ((nn.BatchNorm3d, nn.InstanceNorm3d), _VOLUME),
        ]
        for kind in kinds
    },
}  # fmt: skip

if hasattr(nn, "LinearCrossEntropyLoss"):
    _loss = nn.LinearCrossEntropyLoss(4, 6)
    WITH_PARAMETERS["LinearCrossEntropyLoss"] = (
        _loss,
        (ROWS, torch.zeros(7).long()),
        2 * 7 * 4 * 6,
    )
# Made of those above, of none of their own, or by others: what they have is counted in these.
_MADE_OF_OTHERS = {
    "Transformer", "TransformerEncoder", "TransformerDecoder", "Module", "Sequential", "Container",
    "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "DataParallel", "RNNBase",
    "RNNCellBase", "SyncBatchNorm",
}  # fmt: skip


def test_every_module_of_torch_with_parameters_is_among_those_that_are_counted():
    def has_parameters(kind):
        own = [
            base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module
        ]
        return any("Parameter(" in inspect.getsource(base) for base in own)

    kinds = {n: k for n, k in vars(nn).items() if isinstance(k, type) and issubclass(k, nn.Module)}
    found = {n for n, k in kinds.items() if has_parameters(k) and not n.startswith("Lazy")}
    assert found - _MADE_OF_OTHERS <= WITH_PARAMETERS.keys()


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "training"])
@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_the_flops_of_every_module_of_torch_are_those_of_the_arithmetic(name, mode):
    module, batch, flops = WITH_PARAMETERS[name]
    module.train(mode == "training")
    batch = batch if isinstance(batch, tuple) else (batch,)
    context = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    with context.get(mode, torch.enable_grad)():
        summary = hl.summarize(module, lambda m: m(*batch))
    assert summary.totals["uncounted"] == {}
    assert summary.totals["flops"] == flops


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_the_backward_of_a_bilinear_layer_is_that_of_products_of_its_three_tensors(wanted):
    one, two = (x.clone().requires_grad_(w) for x, w in zip((PAIR3, ROW3), wanted, strict=True))
    layer = nn.Bilinear(3, 4, 5)
    totals = hl.summarize(layer, (one, two), backward=True).totals
    one, two, grad = one.detach().flatten(0, 1), two.detach().flatten(0, 1), torch.randn(14, 5)
    with FlopCounterMode(display=False) as counter:  # the same, two tensors at a time
        torch.einsum("ni,no,nj->oij", one, grad, two)
        if wanted[0]:
            torch.einsum("no,oij,nj->ni", grad, layer.weight, two)
        if wanted[1]:
            torch.einsum("ni,oij,no->nj", one, layer.weight, grad)
    assert totals["backward_flops"] == counter.get_total_flops()
