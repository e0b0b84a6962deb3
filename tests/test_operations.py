"""Torch calls inside a forward: `path/operation[#n]`, against forwards that keep them by hand."""

import asyncio
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from models import Giving, hidden_states
from oracles import assert_clean
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import hookline as hl


class OracleAttention(nn.Module):
    """Keeps its own intermediate values when told to: the oracle."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.seen = None

    def keep(self, name, value):
        if self.seen is not None:
            self.seen.setdefault(name, []).append(value)
            if value.requires_grad:
                value.retain_grad()
        return value

    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        scores = self.keep("div", self.keep("matmul#0", q @ k.transpose(-1, -2)) / 2.0)
        pattern = self.keep("softmax", mix(scores))
        return self.o(self.keep("matmul#1", pattern @ v).transpose(1, 2).flatten(2))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def mix(scores):
    """Not a method: still a part of the forward that calls it."""
    return F.softmax(scores, dim=-1)


class OracleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = OracleAttention()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


def oracle_transformer():
    torch.manual_seed(0)
    return nn.Sequential(OracleBlock(), OracleBlock())


def watched(model, x):
    """What the attentions themselves keep, by place, and the output."""
    for n in (0, 1):
        model[n].attn.seen = {}
    out = model(x)
    kept = {f"{n}.attn/{name}": v for n in (0, 1) for name, v in model[n].attn.seen.items()}
    for n in (0, 1):
        model[n].attn.seen = None
    return kept, out


@pytest.fixture(autouse=True)
def no_mode_is_left():
    yield
    assert _get_current_function_mode_stack() == []


def test_every_use_of_an_operation_is_what_the_forward_itself_sees():
    model, x = oracle_transformer(), hidden_states()
    kept, expected = watched(model, x)
    with hl.capture(model, *kept) as record:
        out = model(x)
    assert torch.equal(out, expected)
    for place, values in kept.items():
        assert torch.equal(record[place], values[0])
    assert_clean(model)


def test_without_a_number_every_use_is_there_in_order():
    model, x = oracle_transformer(), hidden_states()
    kept, _ = watched(model, x)
    with hl.capture(model, "*.attn/matmul") as record:
        model(x), model(x)
    for n in (0, 1):
        found = record.calls(f"{n}.attn/matmul")
        expected = [kept[f"{n}.attn/matmul#{use}"][0] for use in (0, 1)] * 2
        assert len(found) == 4
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_numbered_use_counts_anew_in_each_call():
    model, x = oracle_transformer(), hidden_states()
    with hl.capture(model, "0.attn/matmul#1") as record:
        for step in range(3):
            model(x + step)
    assert len(record.calls("0.attn/matmul#1")) == 3
    for step, value in enumerate(record.calls("0.attn/matmul#1")):
        assert torch.equal(value, watched(model, x + step)[0]["0.attn/matmul#1"][0])


def test_inputs_by_position_and_by_name():
    model, x = oracle_transformer(), hidden_states()
    kept, _ = watched(model, x)
    places = ["0.attn/softmax:input", "0.attn/softmax:inputs[dim]", "0.attn/matmul#1:inputs[other]"]
    with hl.capture(model, *places, "0.attn/softmax:inputs") as record:
        model(x)
    assert torch.equal(record["0.attn/softmax:input"], kept["0.attn/div"][0])
    assert record["0.attn/softmax:inputs[dim]"] == -1
    value = model[0].attn.split(model[0].attn.v(x))
    assert torch.equal(record["0.attn/matmul#1:inputs[other]"], value)
    assert list(record["0.attn/softmax:inputs"])[:2] == ["input", "dim"]


def test_arguments_of_attention_have_their_names_however_they_were_passed():
    class Calls(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, None, 0.0, True)

    model = Calls()
    with hl.capture(model, "/scaled_dot_product_attention:inputs") as record:
        model(torch.randn(1, 2, 3, 4))
    given = record["/scaled_dot_product_attention:inputs"]
    assert list(given) == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    assert given["is_causal"] is True


def test_gradients_at_operations_are_those_that_retain_grad_gives():
    model, x = oracle_transformer(), hidden_states()
    kept, out = watched(model, x)
    out.square().sum().backward()
    with hl.capture(model, *(f"{place}:grad_output" for place in kept)) as record:
        model(x).square().sum().backward()
    for place, values in kept.items():
        torch.testing.assert_close(record[f"{place}:grad_output"], values[0].grad)
    with hl.capture(model, "0.attn/softmax:grad_input", "0.attn/matmul#1:grad_inputs") as record:
        model(x).square().sum().backward()
    torch.testing.assert_close(record["0.attn/softmax:grad_input"], kept["0.attn/div"][0].grad)
    torch.testing.assert_close(
        record["0.attn/matmul#1:grad_inputs"]["input"], kept["0.attn/softmax"][0].grad
    )


def with_changed_pattern(model, x, change):
    """The forward of the model with a change of the first block's pattern, written out."""
    attn = model[0].attn
    q, k, v = (attn.split(layer(x)) for layer in (attn.q, attn.k, attn.v))
    pattern = change(F.softmax(q @ k.transpose(-1, -2) / 2.0, dim=-1))
    x = x + attn.o((pattern @ v).transpose(1, 2).flatten(2))
    return model[1](x + model[0].mlp(x))


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (hl.zero(), torch.zeros_like),
        (hl.scale(0.5), lambda p: p * 0.5),
        (lambda p: p.flip(-1), lambda p: p.flip(-1)),
    ],
)
def test_an_edit_of_an_operation_is_the_forward_written_out(change, plain):
    model, x = oracle_transformer(), hidden_states()
    with hl.edit(model, "0.attn/softmax", change):
        out = model(x)
    torch.testing.assert_close(out, with_changed_pattern(model, x, plain))
    torch.testing.assert_close(model(x), with_changed_pattern(model, x, lambda p: p))
    assert_clean(model)


def test_one_head_of_a_pattern_is_edited_with_at():
    model, x = oracle_transformer(), hidden_states()
    with hl.edit(model, "0.attn/softmax", hl.zero(), at=(slice(None), 1)):
        out = model(x)

    def ablate(pattern):
        pattern = pattern.clone()
        pattern[:, 1] = 0
        return pattern

    torch.testing.assert_close(out, with_changed_pattern(model, x, ablate))


def test_an_edit_of_an_operations_input_and_of_its_gradient():
    model, x = oracle_transformer(), hidden_states()
    with (
        hl.edit(model, "0.attn/softmax:input", hl.zero()),
        hl.capture(model, "0.attn/softmax") as r,
    ):
        model(x)
    torch.testing.assert_close(r["0.attn/softmax"], torch.full((2, 2, 5, 5), 0.2))
    with hl.edit(model, "0.attn/softmax:grad_output", hl.zero()):
        model(x).sum().backward()
    assert model[0].attn.q.weight.grad.abs().sum() == 0
    assert model[0].attn.v.weight.grad.abs().sum() > 0
    with hl.edit(model, "1.attn/softmax:grad_input", hl.zero()):
        model.zero_grad()
        model(x).sum().backward()
    assert model[1].attn.q.weight.grad.abs().sum() == 0
    assert model[0].attn.q.weight.grad.abs().sum() > 0


def test_a_capture_inside_an_edit_sees_the_edited_value_and_one_outside_the_original():
    model, x = oracle_transformer(), hidden_states()
    place = "0.attn/softmax"
    for port, order in (("", "output"), (":input", "input")):
        with (
            hl.capture(model, place + port) as outside,
            hl.edit(model, place + port, hl.scale(3.0)),
            hl.capture(model, place + port) as inside,
        ):
            model(x)
        torch.testing.assert_close(inside[place + port], outside[place + port] * 3), order


def test_calls_restricts_an_edit_to_some_uses():
    model, x = oracle_transformer(), hidden_states()
    with hl.edit(model, "0/add", hl.zero(), calls=1):
        out = model[0](x)
    assert out.abs().sum() == 0
    with hl.edit(model, "0/add#0", hl.zero()):
        out = model[0](x)
    torch.testing.assert_close(out, model[0].mlp(torch.zeros_like(x)))


def test_only_the_modules_own_forward_is_looked_at_not_its_childrens_nor_hooks():
    model, x = oracle_transformer(), hidden_states()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return torch.softmax(self.inner(x), -1)

    wrapped = Wrapped()
    handle = wrapped.register_forward_hook(lambda m, i, o: torch.softmax(o, -1) * 0 + o)
    with hl.capture(wrapped, "/softmax") as record:
        wrapped(x)
    handle.remove()
    assert len(record.calls("/softmax")) == 1
    assert torch.equal(record["/softmax"], torch.softmax(model(x), -1))


OPERATORS = {
    "matmul": lambda x: x @ x, "div": lambda x: x / 2, "add": lambda x: 1 + x,
    "sub": lambda x: x - 1, "rsub": lambda x: 1 - x, "mul": lambda x: x * x,
    "pow": lambda x: x**2, "neg": lambda x: -x, "getitem": lambda x: x[0], "T": lambda x: x.T,
    "floor_divide": lambda x: x // 2, "remainder": lambda x: x % 2, "gt": lambda x: x > 0,
    "relu": F.relu, "softmax": lambda x: x.softmax(-1), "cat": lambda x: torch.cat([x]),
    "einsum": lambda x: torch.einsum("ij->ji", x), "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "zeros": lambda x: torch.zeros(3), "add_": lambda x: x.clone().add_(1), "bitwise_and":
    lambda x: (x > 0) & (x < 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_torchs_names(name):
    class Calls(nn.Module):
        def forward(self, x):
            return OPERATORS[name](x)

    model, x = Calls(), torch.rand(3, 3) + 0.5
    with hl.capture(model, f"/{name}") as record:
        expected = model(x)
    assert torch.equal(record[f"/{name}"], expected)


REFLECTED = {
    "div": lambda x: 2 / x,
    "pow": lambda x: 2**x,
    "floor_divide": lambda x: 2 // x,
    "remainder": lambda x: 2 % x,
    "bitwise_not": lambda x: ~(x > 1),
    "bitwise_or": lambda x: (x > 1) | (x < 0),
    "bitwise_xor": lambda x: (x > 1) ^ (x < 2),
}


@pytest.mark.parametrize("name", REFLECTED)
def test_operators_with_the_tensor_on_the_right_and_of_booleans_have_torchs_names(name):
    model, x = Giving(REFLECTED[name]), torch.rand(3, 3) + 0.5
    with hl.capture(model, f"/{name}") as record:
        expected = model(x)
    assert torch.equal(record[f"/{name}"], expected)
    assert torch.equal(expected, REFLECTED[name](x))


def test_a_name_that_is_not_called_is_an_error_that_lists_those_that_are():
    model, x = oracle_transformer(), hidden_states()
    with (
        pytest.raises(hl.errors.NeverFired, match=r"'bmm'.*matmul, div, softmax") as error,
        hl.capture(model, "0.attn/bmm"),
    ):
        model(x)
    assert "inputs=batch" in str(error.value)
    with (
        pytest.raises(hl.errors.NeverFired, match=r"never called 'matmul#2'"),
        hl.edit(model, "0.attn/matmul#2", hl.zero()),
    ):
        model(x)
    with pytest.raises(hl.errors.PlaceNotFound, match="matmul, div, softmax"):
        hl.select(model, "0.attn/bmm", inputs=x)


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("place", ["/softmax", "/softmax#0"])
def test_a_softmax_that_a_fused_kernel_does_inside_is_told_with_what_shows_it(place):
    model, x = Fused(), torch.randn(1, 2, 3, 4)
    for context in (hl.capture(model, place), hl.edit(model, place, hl.zero())):
        with (
            pytest.raises(hl.errors.NeverFired, match=r"hookline\.attention.*attn_implementation"),
            context,
        ):
            model(x)
    with pytest.raises(hl.errors.NeverFired) as error, hl.capture(model, "/bmm"):
        model(x)
    assert "attn_implementation" not in str(error.value)


def test_what_an_operation_cannot_have_is_refused():
    model = oracle_transformer()
    with pytest.raises(hl.errors.NotHookable, match="`with`"):
        hl.capture(model, "0.attn/softmax").attach()
    with pytest.raises(hl.errors.PlaceError, match="inputs=batch"):
        hl.capture(model, "0.attn/*").__enter__()
    with pytest.raises(hl.errors.PlaceError, match="parameters and buffers"):
        hl.capture(model, "0.attn/softmax:grad").__enter__()
    with pytest.raises(hl.errors.PlaceNotFound):
        hl.capture(model, "nowhere/softmax").__enter__()
    assert_clean(model)


def test_select_lists_operations_in_order_with_shapes_and_source():
    model, x = oracle_transformer(), hidden_states()
    state = torch.get_rng_state()
    found = hl.select(model, "0.attn/{matmul,softmax,div}", inputs=x)
    assert found == ["0.attn/matmul#0", "0.attn/div", "0.attn/softmax", "0.attn/matmul#1"]
    assert torch.equal(torch.get_rng_state(), state)
    shown = repr(found)
    assert "(2, 2, 5, 5) float32" in shown
    assert "return F.softmax(scores, dim=-1)" in shown
    assert "test_operations.py" in shown
    with hl.capture(model, *found) as record:
        model(x)
    assert len(record.places()) == 4
    assert "<table" in found._repr_html_()


def test_select_with_a_batch_shows_what_stood_at_modules_and_parameters_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.lstm, self.spare = nn.Linear(3, 4), nn.LSTM(4, 2), nn.ReLU()

        def forward(self, x):
            self.fc(x)
            return self.lstm(self.fc(x))

    model, x = Net(), torch.zeros(5, 3)
    found = hl.select(model, inputs=x)
    assert found == hl.select(model)
    states = "(5, 2) float32, (1, 2) float32, (1, 2) float32"
    assert [value for value, _ in found.rows.values()] == [
        "(5, 4) float32 × 2",
        states,
        "not called",
    ]
    assert "source" not in repr(found)
    found = hl.select(model, "fc:input", "fc.bias", "spare", "fc/*", inputs=x)
    assert [value for value, _ in found.rows.values()] == [
        "(5, 3) float32 × 2", "(4,) float32", "not called", "(5, 4) float32",
    ]  # fmt: skip
    assert "source" in repr(found)
    assert_clean(model)


def test_what_a_module_calls_is_told_without_what_others_call():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(hl.PlaceNotFound, match=r"It called linear\."):
        hl.select(model, "*/softmax", inputs=torch.zeros(1, 2))


def test_a_listing_shows_no_line_of_hookline_s_own():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    found = hl.select(model, "**/*", inputs=x)
    assert found.rows == {"0/linear": ("(2, 4) float32", "")}
    assert repr(found).startswith("1 place\n")


def test_select_with_a_batch_leaves_what_a_forward_replaces_and_writes_into():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1  # another tensor in the buffer's place
            return x.add_(random.random())

    model, x, state = Counting(), torch.zeros(2), random.getstate()
    buffer = model.seen
    assert hl.select(model, "/*", inputs=x) == ["/add", "/add_"]
    assert model.seen is buffer
    assert (float(model.seen), x.tolist()) == (0.0, [0.0, 0.0])
    assert random.getstate() == state


def test_select_takes_arguments_by_position_and_by_name_and_leaves_buffers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, a, *, b):
            return self.norm(F.dropout(a * b))

    model, x = Two(), torch.randn(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert hl.select(model, "/*", inputs={"a": x, "b": x}) == ["/mul", "/dropout"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_forward_that_raises_inside_another_mode_leaves_no_mode():
    class Raises(nn.Module):
        def forward(self, x):
            with torch.device("meta"):
                torch.relu(torch.zeros(2))
                raise ValueError("mine")

    model = Raises()
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"), hl.capture(model, "/relu"):
            model(torch.zeros(2))
        assert _get_current_function_mode_stack() == []
        assert torch.zeros(1).device.type == "cpu"


class PassingMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_modes_entered_before_and_after_stay_in_their_order():
    model, x = oracle_transformer(), hidden_states()
    outer, inner = PassingMode(), PassingMode()
    with outer:
        context = hl.capture(model, "0.attn/softmax")
        record = context.__enter__()
        with inner:
            model(x)
            context.__exit__(None, None, None)  # not the last one entered
            assert _get_current_function_mode_stack() == [outer, inner]
    assert record["0.attn/softmax"].shape == (2, 2, 5, 5)


def test_contexts_may_end_in_any_order():
    model, x = oracle_transformer(), hidden_states()
    one, two = hl.capture(model, "0.attn/softmax"), hl.edit(model, "0.attn/softmax", hl.zero())
    record = one.__enter__()
    two.__enter__()
    model(x)
    one.__exit__(None, None, None)
    out = model(x)
    two.__exit__(None, None, None)
    torch.testing.assert_close(out, with_changed_pattern(model, x, torch.zeros_like))
    assert len(record.calls("0.attn/softmax")) == 1


def test_autocast_inference_and_no_grad():
    model, x = oracle_transformer(), hidden_states()
    with torch.autocast("cpu", torch.bfloat16), hl.capture(model, "0.attn/matmul#0") as record:
        expected = model(x)
    assert record["0.attn/matmul#0"].dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expected, model(x))
    with torch.inference_mode(), hl.capture(model, "0.attn/softmax") as record:
        model(x)
    assert not record["0.attn/softmax"].requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_each_use_once_and_repeats_edits(reentrant):
    model, x = oracle_transformer(), hidden_states()

    def gradient(run):
        model.zero_grad()
        with (
            hl.edit(model, "*.attn/softmax", hl.noise(0.1, seed=3)),
            hl.capture(model, "*.attn/softmax", detach=True) as record,
        ):
            run(x.clone().requires_grad_()).square().sum().backward()
        return record, [p.grad.clone() for p in model.parameters()]

    bare, expected = gradient(model)
    record, found = gradient(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    for place in ("0.attn/softmax", "1.attn/softmax"):
        assert torch.equal(record[place], bare[place])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_autograd_grad_and_backward_of_tensors_see_the_edit(mode):
    model, x = oracle_transformer(), hidden_states().requires_grad_()
    (expected,) = torch.autograd.grad(with_changed_pattern(model, x, lambda p: p * 2).sum(), x)

    def run(x):
        return model(x) if mode is None else checkpoint(model, x, use_reentrant=mode)

    with hl.edit(model, "0.attn/softmax", hl.scale(2.0)):
        if mode is not True:  # which torch refuses
            (grad,) = torch.autograd.grad(run(x).sum(), x)
            torch.testing.assert_close(grad, expected)
        torch.autograd.backward(run(x).sum())
    torch.testing.assert_close(x.grad, expected)


def test_a_context_with_operations_only_is_listed_as_live():
    model = oracle_transformer()
    with hl.capture(model, "0.attn/softmax"):
        assert len(hl.attached(model)) == 1
        model(hidden_states())
    assert hl.attached(model) == []
    assert_clean(model)


def test_early_stop_at_an_operation():
    model, x = oracle_transformer(), hidden_states()
    with hl.capture(model, "0.attn/softmax", stop=True) as record:
        model(x)
        raise AssertionError("not reached")
    torch.testing.assert_close(record["0.attn/softmax"], watched(model, x)[0]["0.attn/softmax"][0])


def test_a_recursive_module_counts_uses_of_each_call():
    class Tree(nn.Module):
        def forward(self, x, depth=2):
            x = torch.relu(x - depth)
            if depth:
                x = self(x, depth - 1)
            return torch.relu(x + depth)

    model, x = Tree(), torch.arange(6.0)
    with hl.capture(model, "/relu#0", "/relu#1", "/relu") as record:
        model(x)
    assert len(record.calls("/relu#0")) == len(record.calls("/relu#1")) == 3
    assert len(record.calls("/relu")) == 6
    assert torch.equal(record["/relu#0", 0], torch.relu(x - 2))
    assert torch.equal(record["/relu#1", 2], record["/relu", 5])


def test_another_threads_calls_are_not_seen():
    model, x = oracle_transformer(), hidden_states()
    with hl.capture(model, "0.attn/softmax") as record:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        model(x)
    assert len(record.calls("0.attn/softmax")) == 1


@pytest.mark.parametrize(
    "looks",
    [
        lambda model: hl.capture(model, "*.attn/softmax", threads="all"),
        lambda model: hl.edit(model, "*.attn/softmax", hl.zero()),
        lambda model: hl.hook(model, "0.attn/softmax", lambda value: None),
    ],
)
def test_what_is_to_act_in_every_thread_tells_that_it_missed_the_operations_of_another(looks):
    model, x = oracle_transformer(), hidden_states()
    bare = model(x)

    def run(pool):
        with looks(model):
            model(x)
            assert torch.equal(pool.submit(model, x).result(), bare)

    told = r"every thread.*called 1× in another"
    with ThreadPoolExecutor(1) as pool, pytest.raises(hl.NeverFired, match=told):
        run(pool)
    assert_clean(model)


@pytest.mark.parametrize("looks", [lambda m: hl.capture(m, "0.attn/softmax"), hl.attention])
def test_operations_that_came_in_another_thread_only_are_not_said_to_be_missing(looks):
    model, x = oracle_transformer(), hidden_states()
    with pytest.raises(hl.NeverFired, match="another thread or task"), looks(model):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, x).result()


def test_another_tasks_calls_are_not_seen():
    model, x = oracle_transformer(), hidden_states()

    async def looks(started, done):
        with hl.capture(model, "0.attn/softmax") as record:
            model(x)
            started.set()
            await done.wait()
        return record

    async def runs(started, done):
        await started.wait()
        model(x), model(x)
        done.set()

    async def both():
        started, done = asyncio.Event(), asyncio.Event()
        return (await asyncio.gather(looks(started, done), runs(started, done)))[0]

    assert len(asyncio.run(both()).calls("0.attn/softmax")) == 1


def test_a_decorated_forward_and_one_given_to_the_instance_are_seen():
    class Decorated(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return torch.relu(x)

    given = nn.Linear(2, 2)
    given.forward = lambda x: torch.relu(x) + 1
    for model in (Decorated(), given):
        with hl.capture(model, "/relu") as record:
            model(torch.ones(2))
        assert torch.equal(record["/relu"], torch.ones(2))


def test_nothing_is_kept_alive_after_the_with():
    import gc
    import weakref

    model, x = oracle_transformer(), hidden_states().requires_grad_()
    with hl.capture(model, "0.attn/softmax") as record:
        model(x)
    ref = weakref.ref(record["0.attn/softmax"])
    del record
    gc.collect()
    assert ref() is None


def test_places_of_operations_are_printed_parsed_and_pickled():
    import pickle

    place = hl.Place("h.0.attn", "inputs", ("query",), "scaled_dot_product_attention#1")
    assert place == "h.0.attn/scaled_dot_product_attention#1:inputs[query]"
    assert pickle.loads(pickle.dumps(place)).operation == place.operation
    model, x = oracle_transformer(), hidden_states()
    with hl.capture(model, "0.attn/softmax:inputs[input]") as record:
        model(x)
    (place,) = record.places()
    assert (place.path, place.operation, place.port) == ("0.attn", "softmax", "inputs")
    assert torch.equal(record[place], record["0.attn/softmax:inputs[input]"])
    assert torch.equal(record[str(place)], record[place])


@pytest.mark.parametrize("verb", [hl.hook, hl.edit])
def test_a_context_that_its_own_function_removes_leaves_no_mode(verb):
    model, x, seen = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), []
    plain = model(x)

    def once(value):
        seen.append(value)
        context.remove()
        return value

    context = verb(model, "0/linear", once)
    with context:
        model(x)
        with hl.edit(model, "0/linear", hl.scale(2.0)):
            assert torch.equal(model(x), 2 * plain)
    assert len(seen) == 1
    assert not torch.overrides._get_current_function_mode_stack()
    with hl.capture(model, "0/linear") as record:
        model(x)
    assert torch.equal(record["0/linear"], plain)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("used", [True, False])
def test_an_edit_of_an_operation_in_place_holds_whether_its_result_is_used_or_not(used, mode):
    class Rectified(nn.Module):
        def forward(self, x):
            x = x + 1
            y = x.relu_()
            return y * 2 if used else x * 2

    model, x = Rectified(), torch.randn(3, 4)
    with mode(), hl.edit(model, "/relu_", hl.replace(5.0)):
        assert torch.equal(model(x), torch.full((3, 4), 10.0))


@pytest.mark.parametrize("change", [hl.scale(0.5), hl.clamp(-0.3, 0.3), torch.square])
@pytest.mark.parametrize("used", [True, False])
def test_an_edit_of_an_operation_in_place_has_its_gradient(used, change):
    class Masked(nn.Module):
        def forward(self, x):
            h = x * 3
            y = h.masked_fill_(x > 1, -0.2)
            return (y if used else h).square()

    model, x = Masked(), torch.randn(3, 4, requires_grad=True)
    with hl.edit(model, "/masked_fill_", change), hl.capture(model, "/masked_fill_") as record:
        output = model(x)
    by_hand = (x * 3).masked_fill(x > 1, -0.2)
    wanted = {hl.scale: lambda v: v * 0.5, hl.clamp: lambda v: v.clamp(-0.3, 0.3)}
    by_hand = wanted.get(type(change), torch.square)(by_hand)
    assert torch.equal(record["/masked_fill_"], by_hand)
    assert torch.equal(output, by_hand.square())
    gradients = [torch.autograd.grad(one.sum(), x)[0] for one in (output, by_hand.square())]
    assert torch.allclose(*gradients)


IN_PLACE = {  # and the same of a new tensor
    "relu_": (lambda h: h.relu_(), torch.relu),
    "relu": (lambda h: F.relu(h, inplace=True), torch.relu),
    "tanh_": (lambda h: torch.tanh_(input=h), torch.tanh),
    "silu": (lambda h: F.silu(input=h, inplace=True), F.silu),
    "exp_": (lambda h: h.exp_(), torch.exp),
    "mul_": (lambda h: h.mul_(3), lambda h: h * 3),
    "unsqueeze_": (lambda h: h.unsqueeze_(0), lambda h: h.unsqueeze(0)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("port", ["", ":input"])
@pytest.mark.parametrize("used", [True, False])
def test_an_edit_at_an_operation_in_place_is_what_it_is_with_a_new_tensor(used, port, name, mode):
    call, by_hand = IN_PLACE[name]

    class Model(nn.Module):
        def forward(self, x):
            h = x * 1.5
            view = h[1:]
            y = call(h)
            return (y if used else h) * 2, view

    model, x = Model(), torch.randn(3, 4)
    with mode():
        x.requires_grad_()
        with hl.edit(model, f"/{name}{port}", torch.sin), hl.capture(model, f"/{name}") as record:
            output, view = model(x)
        wanted = by_hand((x * 1.5).sin()) if port else by_hand(x * 1.5).sin()
        assert torch.equal(output, wanted * 2)
        assert torch.equal(record[f"/{name}"], wanted)
        assert torch.equal(view, wanted.view(3, 4)[1:])  # it is the same memory
    if output.requires_grad:
        gradients = [torch.autograd.grad(one.sum(), x)[0] for one in (output, wanted * 2)]
        assert torch.allclose(*gradients)


def test_the_operation_of_a_module_in_place_is_edited_where_its_result_is_dropped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.linear(x)
            self.relu(h)
            return h

    model, x = Model(), torch.randn(4, 3)
    with hl.edit(model, "relu/relu", hl.scale(2.0)):
        output = model(x)
    wanted = model.linear(x).relu() * 2
    assert torch.equal(output, wanted)
    weight = model.linear.weight
    gradients = [torch.autograd.grad(one.sum(), weight)[0] for one in (output, wanted)]
    assert torch.allclose(*gradients)


@pytest.mark.parametrize("size", [4, 0])
def test_an_edit_of_an_operation_with_out_is_written_there(size):
    class Model(nn.Module):
        def forward(self, x):
            y = torch.empty(size)
            torch.exp(x, out=y)
            return y * 2

    model, x = Model(), torch.randn(4)
    with hl.edit(model, "/exp", hl.add(1.0)):
        assert torch.equal(model(x), (x.exp() + 1) * 2)


@pytest.mark.parametrize("size", [2, 0])
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("place", ["/max[0]", "/max[values]", "/max:input"])
def test_an_edit_of_an_operation_with_several_outs_is_written_to_them(place, returned, size):
    class Model(nn.Module):
        def forward(self, x):
            values, indices = torch.empty(size), torch.empty(size, dtype=torch.int64)
            result = torch.max(x, 1, out=(values, indices))
            assert result[0] is values
            assert result.indices is indices
            return tuple(result) if returned else (values, indices)

    model, x = Model(), torch.randn(2, 3)
    with hl.edit(model, place, hl.add(1.0)):
        values, indices = model(x)
    assert torch.equal(values, x.max(1).values + 1)
    assert torch.equal(indices, x.max(1).indices)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_edit_of_what_an_assignment_writes_to_lets_it_be_written(mode):
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, 0] = x[:, 1]
            return y

    model, x = Model(), torch.randn(3, 4)
    with mode():
        x.requires_grad_()
        with hl.edit(model, "/setitem:input", hl.scale(10.0)):
            output = model(x)
        assert torch.equal(output, torch.cat([x[:, 1:2], x[:, 1:] * 20], 1))
    if output.requires_grad:
        output.sum().backward()
        assert x.grad[0].tolist() == [0, 21, 20, 20]


def test_an_operation_that_returns_its_input_unchanged_is_not_written_to():
    class Residual(nn.Module):
        def forward(self, x):
            return x.contiguous() + x

    model, x = Residual(), torch.ones(2)
    with hl.edit(model, "/contiguous", hl.zero()):
        assert torch.equal(model(x), x)
    assert torch.equal(x, torch.ones(2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_operation_in_a_region_inside_a_region_is_edited_again(reentrant):
    class Squash(nn.Module):
        def forward(self, x):
            return x.tanh() * 2

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Squash()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant).sin()

    model, x = Nested(), torch.randn(3, requires_grad=True)
    with hl.edit(model, "inner/tanh", hl.scale(0.5)):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    (wanted,) = torch.autograd.grad(x.tanh().sin().sum(), x)
    assert torch.allclose(x.grad, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["part/tanh", "part/mul#0:input", "part/tanh:inputs"])
def test_an_edit_in_a_region_that_runs_again_without_its_module_is_refused(place, reentrant):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def squash(self, x):
            return self.linear(x).tanh() * 2

        def forward(self, x):
            return checkpoint(self.squash, x, use_reentrant=reentrant) * x

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            return self.part(x).sin()

    model, x = Whole(), torch.randn(2, 3, requires_grad=True)

    def halved(value):
        return {n: t * 0.5 for n, t in value.items()} if isinstance(value, dict) else value * 0.5

    refused = pytest.raises(hl.ChangeError, match="checkpoint whole modules")
    with refused, hl.edit(model, place, halved):
        model(x).sum().backward()
    with torch.no_grad(), hl.edit(model, place, halved):
        model(x)
    x.grad = None
    with (
        hl.hook(model, place, lambda value: None),
        hl.edit(model, "part.linear", hl.scale(0.5)),
        hl.edit(model, "part/mul#1", hl.scale(3.0)),  # which is outside of the region
        hl.capture(model, place) as record,
    ):
        model(x).sum().backward()
    assert len(record.calls(place)) == 1
    wanted = (model.part.linear(x) * 0.5).tanh() * 2 * x * 3
    torch.testing.assert_close(x.grad, *torch.autograd.grad(wanted.sin().sum(), x))
    assert_clean(model)


def test_what_callers_hold_is_freed_when_they_return_without_garbage_collection():
    model = oracle_transformer()

    def run():
        x = hidden_states()
        model(x)
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        with hl.capture(model, "0.attn/softmax", detach=True):
            assert run()() is None
        with hl.edit(model, "0.attn/softmax", hl.scale(2.0)):
            assert run()() is None
    finally:
        gc.enable()
