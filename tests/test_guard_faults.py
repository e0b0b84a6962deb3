"""guard names the producer of a NaN or an infinity: faults of many kinds, forward and backward.

The oracle is the case itself: each puts one fault into one known module between healthy ones.
"""

import math
import weakref
from functools import partial

import pytest
import torch
from faults import INF, fault_of
from models import Giving
from torch import nn
from torch.nn import functional as F

import hookline as hl

pytestmark = pytest.mark.usefixtures("seeded")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Gained(Giving):
    """With a weight of one number, so that gradients flow through it."""

    def __init__(self, function):
        super().__init__(function)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(x * self.gain)


class Host(nn.Module):
    """Healthy layers around a faulty one; the faulty one meets a chosen value."""

    def __init__(self, faulty, value):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.faulty = faulty
        self.after = nn.LayerNorm(4)
        self.value = value

    def forward(self, x):
        h = self.before(x)
        # The chosen value, with a graph behind it.
        h = self.value + 0 * h if self.value.ndim == 2 else self.value + 0 * h.mean()
        h = self.faulty(h)
        h = h[0] if isinstance(h, tuple) else h
        return self.after(h.reshape(-1)[:4].expand(2, 4))


class Doubled(torch.autograd.Function):
    """A custom function whose forward or backward divides by zero."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return x.div(0) if where == "forward" else x * 2

    @staticmethod
    def backward(ctx, grad):
        return (grad / 0 if ctx.where == "backward" else grad), None


def setting(x, what):
    x = x.clone()
    x[:, 1] = what
    return x


def into(x, value):
    x = x.clone()
    x[0, 0] = x[0, 0].div(value)
    return x


def alone(function):
    return lambda: Gained(function)


def overflowing(layer):
    """With the greatest weights that its dtype has: they are put there by the test."""
    layer.overflows = True
    return layer


def normless(kind, *args):
    return kind(*args, eps=0.0)


def mostly(value, other=1.0):
    """2 × 4, one value and others."""
    return torch.tensor([[value, other, other, other], [other, other, value, other]])


def full_of(value):
    return torch.full((2, 4), value)


def masked_softmax(x):
    return x.masked_fill(torch.tensor([[True] * 4, [False] * 4]), -INF).softmax(-1)


def added_mask(x):
    mask = torch.full((2, 4), -INF, dtype=x.dtype)
    return (x + mask).softmax(-1)


def negative_variance():
    layer = nn.BatchNorm1d(4).eval()
    layer.running_var.fill_(-1.0)
    return layer


class AttendsToPadding(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x):
        padding = torch.tensor([[True, True]])
        return self.attention(x[None], x[None], x[None], key_padding_mask=padding)[0]


# What stands in the model, the value that it meets, the operation that is to blame.
FORWARD = {
    "log of zero": (alone(torch.log), mostly(0.0), "log"),
    "log of a negative": (alone(lambda x: x.log()), mostly(-1.0), "log"),
    "log2": (alone(torch.log2), mostly(0.0), "log2"),
    "log1p": (alone(torch.log1p), mostly(-1.0), "log1p"),
    "zero over zero": (alone(lambda x: x / (x * 0)), full_of(0.0), "div"),
    "one over zero": (alone(lambda x: 1 / x), mostly(0.0), "div"),
    "reciprocal": (alone(torch.reciprocal), mostly(0.0), "reciprocal"),
    "in-place division": (alone(lambda x: (x + 1).div_(x)), mostly(0.0), "div_"),
    "in-place logarithm": (alone(lambda x: (x * 1).log_()), mostly(0.0), "log_"),
    "normed by hand": (
        alone(lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt()), full_of(0.0), "div",
    ),
    "square root": (alone(torch.sqrt), mostly(-1.0), "sqrt"),
    "reciprocal root": (alone(torch.rsqrt), mostly(0.0), "rsqrt"),
    "exponential": (alone(torch.exp), mostly(200.0), "exp"),
    "power of a negative": (alone(lambda x: x**0.5), mostly(-1.0), "pow"),
    "arc cosine": (alone(torch.acos), mostly(2.0), "acos"),
    "inverse tanh": (alone(torch.atanh), mostly(1.0, 0.5), "atanh"),
    "hyperbolic cosine": (alone(torch.cosh), mostly(200.0), "cosh"),
    "logit": (alone(torch.logit), mostly(1.0, 0.5), "logit"),
    "logit by functional": (alone(torch.special.logit), mostly(0.0, 0.5), "special_logit"),
    "inverse error function": (alone(torch.erfinv), mostly(1.0, 0.5), "erfinv"),
    "mean of nothing": (alone(lambda x: x + x[:0].mean()), full_of(1.0), "mean"),
    "loss over nothing": (
        alone(lambda x: x + F.cross_entropy(x, torch.tensor([-100, -100]))), full_of(1.0),
        "cross_entropy",
    ),
    "nan constant": (
        alone(lambda x: x + torch.full((4,), math.nan, dtype=x.dtype)), full_of(1.0), "full",
    ),
    "nan set": (alone(partial(setting, what=math.nan)), full_of(1.0), "setitem"),
    "division of a view": (alone(partial(into, value=0.0)), full_of(1.0), "div"),
    "infinity times zero": (alone(lambda x: (x * INF) * 0), full_of(1.0), "mul#2"),
    "infinity minus infinity": (alone(lambda x: (x * INF) - (x * INF)), full_of(1.0), "sub"),
    "matrix product": (alone(lambda x: x @ x.T), full_of(250.0), "matmul"),
    "einsum": (alone(lambda x: torch.einsum("ij,kj->ik", x, x)), full_of(250.0), "einsum"),
    "accumulated product": (
        alone(lambda x: x.repeat(1, 10).cumprod(1).flip(1)), full_of(30.0), "cumprod",
    ),
    "fully masked softmax": (alone(masked_softmax), full_of(1.0), "softmax"),
    "mask of -inf added": (alone(added_mask), full_of(1.0), "softmax"),
    "custom function": (alone(lambda x: Doubled.apply(x, "forward")), full_of(1.0), "div"),
    "linear": (lambda: overflowing(nn.Linear(4, 4)), full_of(1e2), ""),
    "convolution": (lambda: overflowing(nn.Conv1d(2, 4, 1)), full_of(1e2), ""),
    "linear without bias": (lambda: overflowing(nn.Linear(4, 4, bias=False)), full_of(1e2), ""),
    "layer norm": (lambda: normless(nn.LayerNorm, 4), full_of(1.0), ""),
    "group norm": (lambda: normless(nn.GroupNorm, 2, 4), full_of(1.0), ""),
    "rms norm": (lambda: normless(nn.RMSNorm, 4), full_of(0.0), ""),
    "batch norm": (negative_variance, full_of(1.0), ""),
    "attention": (AttendsToPadding, full_of(1.0), "attention"),
}  # fmt: skip
ONLY = {"matrix product": "fp16", "einsum": "fp16"}  # where the numbers overflow just there
CASES = [
    pytest.param(case, dtype, id=f"{case}, {dtype}")
    for case in FORWARD
    for dtype in DTYPES
    if ONLY.get(case, dtype) == dtype
]


def host(make, value, dtype):
    torch.manual_seed(0)
    model = Host(make(), value.to(dtype)).to(dtype)
    if hasattr(model.faulty, "overflows"):
        for parameter in model.faulty.parameters():
            nn.init.constant_(parameter, torch.finfo(dtype).max)
    return model


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_the_producer_in_a_forward_is_named(case, dtype):
    make, value, operation = FORWARD[case]
    model = host(make, value, DTYPES[dtype])
    fault = fault_of(model, torch.ones(2, 4, dtype=DTYPES[dtype]))
    assert (fault.backward, fault.kind) == (False, "operation"), fault
    if operation == "":
        assert fault.path == "faulty"
    elif operation == "attention":
        assert fault.path == "faulty.attention"
    else:
        assert fault.place == f"faulty/{operation}", fault
        assert __file__.rpartition("/")[2] in fault.source
    assert any(own.bad for _, own in fault.values)


# -- backward -------------------------------------------------------------------------------------


def root_of_squares(x):
    return x.pow(2).sum(-1, keepdim=True).sqrt() + x


# What stands in the model, the value that it meets, the operation whose backward is to blame.
# In all of them the forward is finite.
BACKWARD = {
    "square root at zero": (torch.sqrt, mostly(0.0), "sqrt"),
    "power at zero": (lambda x: x**0.5, mostly(0.0), "pow"),
    "norm by hand at zero": (root_of_squares, full_of(0.0), "sqrt"),
    "masked square root": (
        lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)), mostly(0.0), "sqrt",
    ),
    "masked division": (
        lambda x: torch.where(x > 0, 1 / x, torch.zeros_like(x)), mostly(0.0), "div",
    ),
    "masked logarithm": (
        lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)), mostly(0.0), "log",
    ),
    "masked exponential": (
        lambda x: torch.where(x < 50, x.exp(), torch.zeros_like(x)), mostly(200.0), "exp",
    ),
    "arc cosine at one": (torch.acos, mostly(1.0, 0.5), "acos"),
    "arc sine at one": (torch.asin, mostly(1.0, 0.5), "asin"),
    "in-place square root": (lambda x: (x * 1).sqrt_(), mostly(0.0), "sqrt_"),
    "custom function": (lambda x: Doubled.apply(x, "backward"), full_of(1.0), ""),
    "log of a softmax that is masked": (
        lambda x: torch.where(
            torch.eye(2, 4) > 0, x.softmax(-1).log(), torch.zeros_like(x)
        ), torch.eye(2, 4) * 300, "log",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", BACKWARD)
def test_the_producer_in_a_backward_is_named(case, dtype):
    function, value, operation = BACKWARD[case]
    model = host(alone(function), value, DTYPES[dtype])
    x = torch.ones(2, 4, dtype=DTYPES[dtype])
    assert model(x).isfinite().all()
    fault = fault_of(model, x, backward=lambda y: (y * torch.arange(4.0)).sum().backward())
    assert (fault.backward, fault.kind) == (True, "operation"), fault
    assert fault.path == "faulty"
    if operation:
        assert fault.place == f"faulty/{operation}", fault
    else:
        assert fault.node == "DoubledBackward"
        assert fault.source.endswith("def backward(ctx, grad):")  # where its backward is written
    assert any(label.startswith("the gradient of") for label, _ in fault.seen)
    assert all(not own.bad for label, own in fault.given if "gradient" in label)
    assert any(own.bad for _, own in fault.values)


@pytest.mark.parametrize(
    ("layer", "operation"),
    [(nn.Linear(4, 4), "linear"), (nn.Conv1d(2, 4, 1), "conv1d"), (nn.LayerNorm(4), "layer_norm")],
)
def test_an_overflow_of_half_precision_in_a_backward_is_named(layer, operation):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer)).half()
    for parameter in model[0].parameters():
        nn.init.constant_(parameter, 0.5)
    fault = fault_of(
        model,
        torch.ones(2, 4).half() * torch.arange(1, 5),
        backward=lambda y: y.backward(torch.full_like(y, 60000.0)),
    )
    assert (fault.backward, fault.place) == (True, f"1.0/{operation}")
    assert "float16 ends at 65504" in str(explained(fault))


def test_an_overflow_of_bfloat16_is_not_told_to_use_bfloat16():
    fault = fault_of(nn.Sequential(Giving(lambda x: x * 3e38)), torch.full((2,), 3.0).bfloat16())
    assert "bfloat16" in fault.values[0][1].kind
    assert "65504" not in str(explained(fault))


def explained(fault):
    from hookline.guards.faults import explain

    return explain(fault, scaled=False)


def test_a_sum_of_gradients_that_overflows_is_told_from_its_shares():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            h = self.inner(x)
            return torch.cat([h.abs(), h.relu()])

    model = Twice().half()
    nn.init.constant_(model.inner.weight, 0.5)
    fault = fault_of(
        model,
        torch.ones(1, 4).half(),
        backward=lambda y: y.backward(torch.full_like(y, 40000.0)),
    )
    assert (fault.kind, fault.place, fault.backward) == ("sum", "inner/linear", True)


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_overflow_over_several_backwards_are_told_at_once(dtype, careful):
    model = nn.Sequential(nn.Linear(4, 4)).to(DTYPES[dtype])
    large = 4e4 if dtype == "fp16" else 2e38
    x = torch.ones(1, 4, dtype=DTYPES[dtype])

    def backward():
        (model(x)[0, 0] * large).backward()

    with hl.guard(model, to=None, careful=careful) as guard:
        backward()
        with pytest.raises(hl.NonFiniteError, match="Added to what backwards before") as found:
            backward()
        fault = found.value.fault
        assert (fault.kind, fault.place, fault.step) == ("sum", "0.bias", 1)
        assert fault.others == ["0.weight (sum)"]
        assert fault.values[0][1].positive == 1
        model.zero_grad(set_to_none=False)
        backward()
        # What is there already is not looked at again by a backward that adds nothing to it.
        model[0].weight.grad[:] = INF
        torch.autograd.grad(model(x).sum(), model[0].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model.zero_grad()
    with hl.guard(model, to=None, careful=careful, scaler=scaler) as guard:
        backward()
        backward()
    assert guard.skipped == 0
    with hl.guard(model, to=None, careful=careful, ignore=["0.bias", "0.weight"]):
        backward()


@pytest.mark.parametrize("careful", [False, True])
def test_bad_gradients_that_are_ignored_are_so_too_when_others_are_added(careful):
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: (x * 0).sqrt() if x[0, 0] > 9 else x))
    nn.init.ones_(model[0].weight)
    with hl.guard(model, to=None, careful=careful, ignore="1"):
        for size in (1.0, 9.0, 1.0):
            model(size * torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad.isnan().all()


@pytest.mark.parametrize("careful", [False, True])
def test_what_autograd_grad_gives_is_looked_at_beside_gradients_that_are_there(careful):
    model = nn.Sequential(nn.Linear(4, 4), Giving(lambda x: (x * 0).sqrt()))
    x = torch.ones(2, 4)
    with hl.guard(model, to=None, careful=careful):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(hl.NonFiniteError) as found:
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert found.value.fault.path == "1"
        # A hook that mends what comes, as many have it.
        for parameter in model.parameters():
            parameter.register_hook(torch.nan_to_num)
        model(x).sum().backward()
        torch.autograd.grad(model(x).sum(), list(model.parameters()))


def test_a_parameter_whose_shares_overflow_together_is_named():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight, x + self.weight

    model = Shared().half()
    fault = fault_of(
        model,
        torch.ones(4).half(),
        backward=lambda y: torch.autograd.backward(y, [torch.full_like(p, 40000.0) for p in y]),
    )
    assert (fault.kind, fault.place) == ("sum", "weight")


class Hooked(nn.Module):
    """Divides a gradient by zero in a hook: of a parameter, or of a tensor in the forward."""

    def __init__(self, inside):
        super().__init__()
        self.fc, self.inside = nn.Linear(4, 4), inside
        if not inside:
            self.fc.weight.register_hook(lambda gradient: gradient / 0)

    def forward(self, x):
        y = self.fc(x).tanh()
        if self.inside:
            y.register_hook(lambda gradient: gradient / 0)
        return y.exp()


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_on_a_gradient_is_told_from_a_sum(inside, careful):
    model = nn.Sequential(Hooked(inside))
    fault = fault_of(
        model, torch.ones(2, 4), backward=lambda y: y.sum().backward(), careful=careful
    )
    assert (fault.kind, fault.backward) == ("hook", True)
    if inside:
        assert fault.path == "0"
        name = "TanhBackward0" if careful else "'tanh' (TanhBackward0)"
        assert f"the gradient of {name} in '0' (Hooked)" in str(fault)
    else:
        assert fault.place == "0.fc.weight"
    assert "register_hook" in str(explained(fault))


def test_an_output_that_is_used_inside_too_gets_a_sum_and_no_hook():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return h, h.relu()

    model = Both().half()
    nn.init.constant_(model.fc.weight, 0.5)
    fault = fault_of(
        model,
        torch.ones(1, 4).half(),
        backward=lambda y: torch.autograd.backward(y, [torch.full_like(p, 40000.0) for p in y]),
        careful=True,
    )
    assert (fault.kind, fault.place) == ("sum", "fc")


@pytest.mark.parametrize("careful", [False, True])
def test_the_gradient_of_an_input_that_is_bad_is_told(careful):
    x = torch.ones(4, requires_grad=True)
    model = Giving(lambda x: (x * 0).sqrt())
    fault = fault_of(model, x, backward=lambda y: y.sum().backward(), careful=careful)
    assert (fault.kind, fault.backward) == ("operation", True)
    label, own = fault.seen[0]
    assert (label, own.nan) == ("the gradient of the input 0", 4)


@pytest.mark.parametrize("careful", [False, True])
def test_a_gradient_penalty_that_is_bad_comes_from_outside_the_model(careful):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.ones(2, 4, requires_grad=True)

    def penalty(y):
        (own,) = torch.autograd.grad(y.sum() * 0, x, create_graph=True)
        own.pow(2).sum().sqrt().backward()

    fault = fault_of(model, x, backward=penalty, careful=careful)
    assert (fault.kind, fault.step) == ("loss", 0)
    assert "from outside the model, from the loss" in str(fault)
    assert "parameters" in str(explained(fault))


def test_a_parameter_that_the_loss_uses_is_told_from_the_model_once_every_module_is_checked():
    model = nn.Linear(4, 1)

    def step():
        loss = model(torch.ones(2, 4)).sum() + (model.weight * 0).sqrt().sum()
        loss.backward()

    with hl.guard(model, to=None):
        with pytest.raises(hl.NonFiniteError) as found:
            step()
        assert found.value.fault.kind == "unknown"
        assert "from outside of the model" in str(found.value)
        model.zero_grad()
        with pytest.raises(hl.NonFiniteError) as found:
            step()
        assert (found.value.fault.kind, found.value.fault.step) == ("loss", 1)


# -- what is not made in this step ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("name", ["before.weight", "before.bias", "faulty.gain", "after.bias"])
def test_a_parameter_that_was_bad_before_is_named(name, value, dtype):
    model = host(alone(lambda x: x + 1), full_of(1.0), DTYPES[dtype])
    model.get_parameter(name).data.view(-1)[0] = value
    fault = fault_of(model, torch.ones(2, 4, dtype=DTYPES[dtype]))
    assert (fault.kind, fault.place) == ("parameter", name)
    assert fault.values[0][1].bad == 1


def test_a_buffer_that_was_bad_before_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model[1].running_mean[1] = math.nan
    fault = fault_of(model, torch.ones(2, 3))
    assert (fault.kind, fault.place) == ("buffer", "1.running_mean")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_an_input_that_came_in_bad_is_named(value, dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, *, extra):
            return self.fc(x + extra["bias"][0])

    model, own = Net().to(DTYPES[dtype]), DTYPES[dtype]
    bias = torch.tensor([0.0, value, 1.0], dtype=own)
    with pytest.raises(hl.NonFiniteError) as found, hl.guard(model, to=None):
        model(torch.ones(2, 3, dtype=own), extra={"bias": [bias]})
    fault = found.value.fault
    assert (fault.kind, fault.place) == ("input", ":inputs[extra][bias][0]")
    assert fault.values[0][1].bad == 1
    assert "came in" in str(found.value)
    with hl.guard(model, to=None, ignore=fault.place):  # as it advises
        model(torch.ones(2, 3, dtype=own), extra={"bias": [bias]})


def test_a_bad_gradient_that_comes_from_the_loss_is_told_so():
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    fault = fault_of(model, torch.ones(2, 3), backward=lambda y: y.sqrt().sum().backward())
    assert (fault.kind, fault.backward) == ("loss", True)
    assert "from outside the model, from the loss" in str(fault)
    assert fault.values[0][1].positive == 2


def test_memory_that_nothing_was_written_to_is_named():
    class Unwritten(nn.Module):
        def forward(self, x):
            out = torch.empty(2, 4)
            out[0] = x[0]
            return out

    model = nn.Sequential(nn.Linear(4, 4), Unwritten())
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        fault = fault_of(model, torch.ones(2, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (fault.kind, fault.place) == ("memory", "1/empty")


def test_memory_that_is_written_to_before_it_is_read_is_not_blamed():
    def each(x):
        out = torch.empty(3, 4)
        for n in range(3):
            out[n] = x[n].log()
        return out

    model = nn.Sequential(Giving(each), nn.Linear(4, 4))
    torch.use_deterministic_algorithms(True)
    try:
        fault = fault_of(model, torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (fault.kind, fault.place) == ("operation", "0/log#1")


def masked_in_part(x):
    x = x.log()
    x[:, 0].fill_(-INF)  # which is meant, and elsewhere than what is not
    return x


def bad_in_two_parts(x):
    x = x.clone()
    x[:, 1].log_()
    x[:, 2].div_(0)
    return x[:, :2].clone()


def mended_in_part(x):
    x = x.clone()
    x[:, 2].div_(0)
    x[:, 2].fill_(1)
    x[:, 1].log_()
    return x


def mended(x):
    x = x.div(0)
    x.nan_to_num_()
    x.fill_(-1)[:, 1].log_()
    return x


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (masked_in_part, "/log"), (bad_in_two_parts, "/log_"), (mended_in_part, "/log_"),
        (mended, "/log_"),
    ],
)  # fmt: skip
def test_parts_of_one_memory_are_told_apart(function, place):
    assert (
        fault_of(Giving(function), torch.tensor([1.0, -1.0, 1.0, 1.0]).expand(2, 4)).place == place
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_parts_of_a_nested_tensor_that_is_bad_may_be_written_to():
    def scaled(x):
        parts = (torch.nested.as_nested_tensor([x[:1], x[1:]]) / 0).unbind()
        return torch.cat([part.mul_(2) for part in parts])

    assert fault_of(Giving(scaled), torch.ones(3, 4)).place == "/div"


def log_by_numpy(x):
    x.numpy()[0, 1] = math.nan


def by_vmap(x):
    torch.vmap(lambda row: row.sub_(row))(x)


@pytest.mark.parametrize("write", [log_by_numpy, by_vmap])
def test_a_nan_that_torch_does_not_show_beside_infinities_that_are_meant_is_told(write):
    def masked(x):
        x = x.masked_fill(x > 1, -INF)
        write(x)
        return x

    model = nn.Sequential(nn.Identity(), Giving(masked), nn.Identity())
    fault = fault_of(model, torch.arange(8.0).view(2, 4))
    assert (fault.kind, fault.place) == ("module", "1")


def test_a_constant_that_no_operation_made_is_told_from_what_the_module_makes():
    model = nn.Sequential(nn.Linear(3, 3), Gained(lambda x: x + BAD))
    fault = fault_of(model, torch.ones(2, 3))
    assert (fault.kind, fault.place) == ("outside", "1/add")


BAD = torch.tensor([1.0, math.nan, 1.0])


def test_a_fault_in_a_hook_is_at_the_module_that_is_hooked():
    model = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(3, 3))
    with hl.edit(model, "1", lambda value: value.log()):
        fault = fault_of(model, -torch.ones(2, 3))
    assert (fault.kind, fault.path, fault.operation) == ("operation", "1", "log")
    assert "value.log()" in fault.source


def test_the_first_of_several_producers_is_named_and_the_others_are_mentioned():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Gained(torch.log), Gained(torch.rsqrt)

        def forward(self, x):
            return self.a(x) + self.b(x)

    fault = fault_of(Net(), torch.zeros(3))
    assert fault.place == "a/log"
    assert fault.others == ["b/rsqrt (operation)"]


def test_what_is_masked_away_is_not_accused_beside_what_is_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.masked, self.bad = Gained(torch.log), Gained(torch.rsqrt)

        def forward(self, x):
            y = torch.where(x > 0, self.masked(x), torch.zeros_like(x))
            return y + self.bad(x)

    fault = fault_of(Net(), torch.zeros(3))
    assert (fault.place, fault.others) == ("bad/rsqrt", [])


class FunctionAfterLayers(nn.Module):
    """A layer, and then a function of what it made, in the same forward."""

    def __init__(self, function):
        super().__init__()
        self.before, self.layer, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(self.before(x).abs()))


@pytest.mark.parametrize("careful", [False, True])
def test_a_bad_parameter_is_told_though_only_gradients_show_it(careful):
    model = FunctionAfterLayers(torch.sigmoid)  # 1 at infinity, where its slope is 0
    nn.init.constant_(model.layer.weight, INF)
    fault = fault_of(model, torch.ones(2, 4), backward=True, careful=careful)
    assert (fault.kind, fault.place, fault.others) == ("parameter", "layer.weight", [])
    with hl.guard(model, to=None, careful=careful, ignore="layer.weight"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("careful", [False, True])
def test_a_bad_parameter_of_a_module_is_not_blamed_on_the_forward_around_it(careful):
    model = FunctionAfterLayers(lambda h: (h @ h.T).softmax(-1))
    nn.init.constant_(model.layer.weight, math.nan)
    fault = fault_of(model, torch.ones(2, 4), backward=True, careful=careful)
    assert (fault.kind, fault.place) == ("parameter", "layer.weight")


class Hidden(torch.autograd.Function):
    """Finite in the forward, whatever it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.nan_to_num(0.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("apart", [False, True])
def test_a_nan_that_a_custom_function_hides_is_told_as_what_made_it(apart):
    def log(h):
        return (h * 0 - 1).log()

    hide = Giving(Hidden.apply) if apart else Giving(lambda h: Hidden.apply(log(h)))
    model = nn.Sequential(nn.Linear(4, 4), Giving(log) if apart else nn.Identity(), hide)
    fault = fault_of(model, torch.ones(2, 4), backward=True)
    assert (fault.place, fault.backward) == ("1/log" if apart else "2/log", False)
    fault = fault_of(model, torch.ones(2, 4), backward=True, careful=True)
    assert fault.path == ("1" if apart else "2")


def test_infinities_that_were_masked_away_are_not_blamed_for_a_backward_that_is_bad_by_itself():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mask = nn.Linear(4, 4), Giving(lambda h: h.masked_fill(h > 0, -INF))

        def forward(self, x):
            h = self.linear(x)
            return self.mask(h).exp() + torch.where(h > 0, (h * 0).sqrt(), h)

    fault = fault_of(nn.Sequential(Scored()), torch.ones(2, 4), backward=True, careful=True)
    assert (fault.path, fault.node) == ("0", "SqrtBackward0")


def test_an_infinity_that_only_gradients_show_is_told_as_what_made_it():
    model = FunctionAfterLayers(lambda h: torch.sigmoid((1e9 * (h * h + 1)).exp() * h))
    fault = fault_of(model, torch.ones(2, 4), backward=True)
    assert (fault.kind, fault.place, fault.backward) == ("operation", "/exp", False)
    assert fault.others == []


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_the_limit_of_float16_is_named_for_float16_alone(dtype):
    model = nn.Sequential(Giving(lambda x: x * torch.finfo(dtype).max)).to(dtype)
    with hl.guard(model, to=None), pytest.raises(hl.NonFiniteError) as found:
        model(torch.full((2, 4), 3.0, dtype=dtype))
    assert ("65504" in str(found.value)) == (dtype is torch.float16)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_loss_that_overflows_in_float16_leads_to_the_scaler(dtype):
    model = nn.Sequential(nn.Linear(4, 4)).to(dtype)
    with hl.guard(model, to=None), pytest.raises(hl.NonFiniteError) as found:
        (model(torch.ones(2, 4, dtype=dtype)).double().sum() * 1e300).backward()
    assert found.value.fault.kind == "loss"
    assert ("scaler=scaler" in str(found.value)) == (dtype is torch.float16)


def test_where_no_second_run_can_be_trusted_bad_parameters_are_mentioned():
    model = nn.Sequential(Giving(lambda x: x.add_(1)), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, math.nan)
    with hl.guard(model, to=None), pytest.raises(hl.NonFiniteError) as found:
        model(torch.ones(2, 4))
    assert found.value.fault.kind == "unknown"
    assert "'1.weight' holds such numbers now." in str(found.value)


def test_the_code_of_torch_is_not_shown_as_the_line_of_a_program():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda module, passed, given: (passed[0] / 0,))
    with hl.guard(model, to=None), pytest.raises(hl.NonFiniteError) as found:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert found.value.fault.path == "0"
    assert "_functions.py" not in str(found.value)


def exchange_parameters(model):
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def exchange_a_module(model):
    model[0] = nn.Linear(4, 4)


@pytest.mark.parametrize("exchange", [exchange_parameters, exchange_a_module])
@pytest.mark.parametrize("careful", [False, True])
def test_gradients_of_parameters_that_came_while_it_guards_are_looked_at(exchange, careful):
    model = nn.Sequential(nn.Linear(4, 4), Giving(torch.abs), nn.Linear(4, 2))
    with hl.guard(model, to=None, careful=careful):
        model(torch.ones(2, 4)).sum().backward()
        exchange(model)
        model[1].function = lambda x: torch.sqrt(x * 0) + x
        with pytest.raises(hl.NonFiniteError) as found:
            model(torch.ones(2, 4)).sum().backward()
        assert found.value.fault.path == "1"
        assert found.value.fault.backward


def test_parameters_that_a_call_alone_was_given_are_let_go():
    model, seen = nn.Sequential(nn.Linear(4, 4)), []

    def given_alive():
        return sum(parameter() is not None for parameter in seen)

    with hl.guard(model, to=None):
        for _ in range(5):
            given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
            seen += map(weakref.ref, given.values())
            torch.func.functional_call(model, given, (torch.ones(2, 4),)).sum().backward()
            del given
            assert given_alive() == 2
        model(torch.ones(2, 4)).sum().backward()
        assert given_alive() == 0


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_buffer_that_the_call_itself_made_bad_was_not_bad_before(careful, bad):
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x):
            self.mean.mul_(x.sum(0))
            self.mean.div_(x.sum(0))
            return x - self.mean

    model = nn.Sequential(nn.ReLU(), Averaging())
    with hl.guard(model, to=None, careful=careful):
        model(torch.ones(2, 4))
        if bad:
            model[1].mean[0] = torch.nan
        with pytest.raises(hl.NonFiniteError) as found:
            model(-torch.ones(2, 4))
    kind = "buffer" if bad else "module" if careful else "operation"
    assert (found.value.fault.kind, found.value.fault.path) == (kind, "1.mean" if bad else "1")


@pytest.mark.parametrize("careful", [False, True])
def test_batch_norm_that_makes_its_statistics_bad_is_the_producer_at_any_step(careful):
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))
    with hl.guard(model, to=None, careful=careful):
        for _ in range(3):
            model(torch.rand(8, 4))
        with pytest.raises(hl.NonFiniteError) as found:
            model(torch.full((8, 4), 3e38))
    kind = "module" if careful else "operation"
    assert (found.value.fault.kind, found.value.fault.path) == (kind, "1")
    assert not found.value.fault.others


@pytest.mark.parametrize("careful", [False, True])
def test_a_bad_parameter_that_a_call_alone_was_given_is_told(careful):
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    weight = model[0].weight.detach() * torch.tensor([1, 1, torch.nan, 1])
    with (
        hl.guard(model, to=None, careful=careful),
        pytest.raises(hl.NonFiniteError, match=r"The parameter '0\.weight' was bad") as found,
    ):
        torch.func.functional_call(model, {"0.weight": weight}, torch.ones(2, 4))
    assert "4 NaN of 16" in str(found.value)


def test_a_bad_gradient_of_parameters_that_are_there_no_more_is_told_at_the_second_time():
    model = nn.Sequential(nn.Linear(4, 4), Giving(torch.sqrt))
    given = {n: torch.zeros_like(p).requires_grad_() for n, p in model.named_parameters()}
    with hl.guard(model, to=None):
        with pytest.raises(hl.NonFiniteError, match="not finite in step 0, a gradient") as found:
            torch.func.functional_call(model, given, torch.ones(2, 4)).sum().backward()
        assert "parameters were exchanged since" in str(found.value)
        with pytest.raises(hl.NonFiniteError) as found:
            torch.func.functional_call(model, given, torch.ones(2, 4)).sum().backward()
        assert found.value.fault.path == "1"


def test_gradients_and_outputs_inside_of_vmap_are_passed_by():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4)
    given = {name: tensor.detach() for name, tensor in model.named_parameters()}
    many = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in given.items()}

    def run(own):
        return torch.func.functional_call(model, own, x)

    slopes, outputs = torch.func.jacrev(run)(given), torch.func.vmap(run)(many)
    with hl.guard(model, to=None):
        assert torch.equal(torch.func.jacrev(run)(given)["0.weight"], slopes["0.weight"])
        assert torch.equal(torch.func.vmap(run)(many), outputs)
        model(x).sum().backward()


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("ignore", ["", "1", "1.weight"])
def test_what_an_ignored_module_makes_of_its_own_bad_parameter_is_ignored_too(ignore, careful):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sigmoid())
    with torch.no_grad():
        model[1].weight[0, 0] = INF
    with hl.guard(model, to=None, ignore=ignore, careful=careful):
        model(torch.ones(2, 4)).sum().backward()
    with (
        hl.guard(model, to=None, ignore="0", careful=careful),
        pytest.raises(hl.NonFiniteError, match=r"The parameter '1\.weight' was bad"),
    ):
        model(torch.ones(2, 4)).sum().backward()
