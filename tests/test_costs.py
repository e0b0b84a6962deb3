"""summarize: sizes, batches, tables, and a model that is left as it was."""

import copy
import gc
import json
import pickle
import random
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import PackedAttentionBlock, TiedTransformer
from oracles import assert_clean, assert_same_state, state_bits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.costs.flop_counter import FlopCounter
from hookline.isolation.module_index import ModuleIndex

# -- sizes ----------------------------------------------------------------------------------------


def test_sizes_count_every_parameter_once():
    model = TiedTransformer()
    model.blocks[0].requires_grad_(False)
    summary = hl.summarize(model)
    count = sum(p.numel() for p in model.parameters())
    assert summary.totals["parameters"] == count == summary[""].parameters
    assert summary.totals["parameter_bytes"] == 4 * count
    frozen = sum(p.numel() for p in model.blocks[0].parameters())
    assert summary.totals["trainable"] == count - frozen
    assert summary["blocks.0"].trainable == 0
    assert summary["blocks.0"].parameters == frozen
    assert summary["head"].shared_with == ["embed"]
    assert summary["embed"].shared_with == ["head"]
    assert summary["head"].parameters == summary["head"].own_parameters == 88
    assert summary[""].own_parameters == 0
    assert "of them trainable" in str(summary)


def test_without_a_batch_nothing_runs_and_what_needs_a_run_is_none():
    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

        def forward(self):
            raise AssertionError("it ran")

    summary = hl.summarize(Never())
    assert summary[""].buffer_bytes == 24
    assert summary[""].called is None
    assert summary.totals["flops"] is None
    assert summary[""].flops is None
    assert "FLOPs" not in str(summary)
    assert "not called" not in str(summary)


def test_a_shared_module_has_one_row_and_its_other_names():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    summary = hl.summarize(model, (3, 4))
    assert [row.place for row in summary] == ["", "0", "1"]
    assert summary["2"] is summary["0"]
    assert summary["0"].aliases == ["2"]
    assert summary["0"].calls == 2
    assert summary["0"].flops == 2 * (2 * 3 * 4 * 4)
    assert summary.totals["parameters"] == 20
    assert "calls" in str(summary)


def test_a_module_without_parameters_has_its_other_names_too():
    act = nn.ReLU()
    summary = hl.summarize(nn.Sequential(act, nn.Linear(4, 4), act), (3, 4))
    assert summary["0"].aliases == ["2"]
    assert [row.parameters for row in summary] == [20, 0, 20]


def test_what_is_shared_inside_a_shared_module_counts_once():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    summary = hl.summarize(nn.Sequential(inner, nn.Sequential(inner, nn.BatchNorm1d(4))))
    assert summary.totals["parameters"] == 4 * 4 + 2 * 4 + 2 * 4
    assert summary["1"].parameters == summary.totals["parameters"]
    assert summary["1"].buffer_bytes == summary.totals["buffer_bytes"] == 2 * 4 * 4 + 8
    assert summary["0"].aliases == ["1.0"]
    assert summary["0.0"].shared_with == ["0.1"]
    assert summary["0.1"].aliases == ["1.0.1"]


def test_activation_bytes_are_those_of_all_calls_and_the_total_that_of_the_innermost():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 2))
    summary = hl.summarize(model, (3, 4))
    assert summary["0"].activation_bytes == 3 * 6 * 4
    assert summary.totals["activation_bytes"] == (3 * 6 + 3 * 6 + 3 * 2) * 4
    assert summary.totals["input_bytes"] == 3 * 4 * 4
    assert summary.totals["peak_bytes"] is None


def test_the_size_of_what_a_function_gives_the_model_is_not_said_to_be_nothing():
    summary = hl.summarize(nn.Linear(4, 6), lambda model: model(torch.ones(3, 4)))
    assert summary.totals["input_bytes"] is None


# -- batches --------------------------------------------------------------------------------------


@dataclass
class TensorPair:
    left: torch.Tensor
    right: torch.Tensor


class TakesAPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, pair, scale=1.0, mask=None):
        left = self.inner(pair.left) * scale
        return {"left": left, "states": (pair.right, [left, None])}


def test_nested_values_keep_their_structure():
    pair = TensorPair(torch.randn(5, 3), torch.randn(4))
    for batch in (pair, {"pair": pair, "scale": 2.0}, (pair, 2.0), lambda m: m(pair, scale=2.0)):
        row = hl.summarize(TakesAPair(), batch)[""]
        assert row.inputs["pair"] == {"left": "(5, 3)", "right": "(4,)"}
        assert row.inputs.get("scale", "float") == "float"
        assert row.output == {"left": "(5, 2)", "states": ["(4,)", ["(5, 2)", None]]}
        assert row.activation_bytes == (5 * 2 + 4) * 4  # what stands twice counts once
        assert row.dtype == "float32"
    assert "(5, 2), [(4,), [(5, 2)]]" in str(hl.summarize(TakesAPair(), pair))


def test_a_tuple_of_whole_numbers_is_a_shape_and_nothing_else_is():
    sizes = tuple(np.array([2, 8]))
    assert hl.summarize(nn.Linear(8, 3), sizes).totals["flops"] == 2 * 2 * 8 * 3

    class Two(nn.Module):
        def forward(self, a, b):
            return a, b

    assert hl.summarize(Two(), [(2, 3), (4,)])[""].inputs == {"a": "(2, 3)", "b": "(4,)"}
    assert hl.summarize(Two(), {"a": (2, 3), "b": [4]})[""].inputs == {"a": "(2, 3)", "b": ["int"]}
    mixed = hl.summarize(Two(), (torch.zeros(1), (2, 2)))[""].inputs
    assert mixed == {"a": "(1,)", "b": "(2, 2)"}
    seen = []
    hl.summarize(Two(), [(50,), lambda: seen])  # a function in a list is no batch by itself
    spread = nn.Identity()
    with hl.hook(spread, "", lambda value: seen.append(float(value.std()))):
        hl.summarize(spread, (50,))
    assert 0.5 < seen[0] < 2  # random numbers, not zeros
    model = nn.Linear(3, 2).double()
    assert hl.summarize(model, (5, 3))[""].dtype == "float64"
    assert hl.summarize(nn.ReLU(), (5, 3))[""].dtype == "float32"


def test_shapes_become_whole_numbers_where_the_model_wants_tokens():
    model = TiedTransformer()
    assert (
        hl.summarize(model, (2, 6)).totals == hl.summarize(model, torch.zeros(2, 6).long()).totals
    )
    assert hl.summarize(model, (2, 6), dtype=torch.int32)[""].output == "(2, 6, 11)"

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 3)

        def forward(self, ids, x):
            return self.embed(ids) + x

    with pytest.raises(
        hl.BatchError, match=r"\(2,\), \(2, 3\)\. .*whole numbers.*dtype=torch.long"
    ):
        hl.summarize(Both(), [(2,), (2, 3)])
    with pytest.raises(hl.BatchError, match=r"in torch\.float32"):
        hl.summarize(model, (2, 6), dtype=torch.float32)
    with pytest.raises(hl.BatchError, match="negative"):
        hl.summarize(nn.ReLU(), (-1, 3))


def test_what_is_no_model_and_what_is_no_batch_are_refused():
    with pytest.raises(TypeError, match=r"A model is a torch\.nn\.Module"):
        hl.summarize(torch.zeros(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        hl.summarize(nn.Linear(3, 2), (5, 4))
    with pytest.raises(hl.BatchError, match="Nothing that the model returned has a gradient"):
        hl.summarize(nn.ReLU(), (2, 3), backward=True)


def test_the_batch_is_not_written_to():
    x = torch.randn(4, 3, requires_grad=True)
    before = x.detach().clone()
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with torch.no_grad():
        hl.summarize(model, x)
    hl.summarize(nn.Linear(3, 2), x, backward=True)
    assert torch.equal(x, before)
    assert x.grad is None
    assert x.requires_grad


def test_the_loss_of_the_output_or_a_function_is_where_the_backward_starts():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return {"loss": self.a(x).sum(), "other": self.b(x)}

    summary = hl.summarize(WithLoss(), (2, 3), backward=True)
    assert summary["a"].backward_flops
    assert not summary["b"].backward_flops
    summary = hl.summarize(WithLoss(), (2, 3), backward=lambda output: output["other"].sum())
    assert summary["b"].backward_flops
    assert not summary["a"].backward_flops


# -- where models live ----------------------------------------------------------------------------


def test_on_the_meta_device_the_numbers_are_the_same():
    real = hl.summarize(
        TiedTransformer(), torch.zeros(2, 6, dtype=torch.long), backward=True
    ).to_dict()
    with torch.device("meta"):
        model = TiedTransformer()
    for batch in (torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6).long().to("meta"), (2, 6)):
        found = hl.summarize(model, batch, backward=True)
        assert found.totals["flops"] == real["totals"]["flops"]
        assert found.totals["parameters"] == real["totals"]["parameters"]
        assert found.totals["activation_bytes"] == real["totals"]["activation_bytes"]
    assert model.embed.weight.is_meta


def test_another_default_device_changes_nothing():
    model = nn.Linear(3, 2)
    expected = hl.summarize(model, (4, 3)).to_dict()
    with torch.device("meta"):  # as others have cuda there
        assert hl.summarize(model, (4, 3)).to_dict() == expected


class ConvLSTMBlock(nn.Module):
    """A convolution, a recurrent layer and attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.lstm, self.block = nn.LSTM(8, 8, batch_first=True), PackedAttentionBlock()

    def forward(self, x):
        return self.block(self.lstm(self.norm(self.conv(x)).mT)[0])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("given", [(2, 3, 6), lambda model: model(torch.ones(2, 3, 6))])
def test_fake_tensors_cost_what_real_ones_do(backward, given):
    expected = hl.summarize(ConvLSTMBlock(), given, backward=backward).to_dict()
    with FakeTensorMode():
        assert hl.summarize(ConvLSTMBlock(), given, backward=backward).to_dict() == expected
    assert expected["totals"]["flops"] > 0


def test_a_large_model_on_the_meta_device_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.BatchNorm1d(100_000))
    summary = hl.summarize(model, (64, 100_000))
    assert summary.totals["flops"] == 2 * 64 * 100_000**2
    assert summary.totals["parameter_bytes"] > 40e9


def test_a_lazy_model_is_measured_and_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    assert hl.summarize(model).totals["parameters"] == 0
    summary = hl.summarize(model, (5, 3))
    assert summary.totals["parameters"] == (3 + 1) * 8 + (8 + 1) * 2
    assert summary["0"].flops == 2 * 5 * 3 * 8
    assert isinstance(model[0], nn.LazyLinear)
    assert nn.parameter.is_lazy(model[0].weight)


def test_lazy_modules_that_have_buffers_are_measured_and_stay_lazy():
    norm = nn.LazyBatchNorm1d(dtype=torch.float64)
    model = nn.Sequential(nn.LazyConv1d(4, 1, dtype=torch.float64), norm, norm)
    summary = hl.summarize(model, (2, 8, 3))
    assert summary["1"].parameters == 8
    assert summary["1"].aliases == ["2"]
    assert summary["1"].buffer_bytes == 2 * 4 * 8 + 8
    assert isinstance(norm, nn.LazyBatchNorm1d)
    assert nn.parameter.is_lazy(norm.running_mean)


def test_the_backward_of_a_lazy_model_is_measured():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    summary = hl.summarize(model, (5, 3), backward=True)
    assert summary["0"].backward_flops == 2 * 5 * 3 * 8  # the batch has no gradient
    assert summary["3"].backward_flops == 2 * (2 * 5 * 8 * 2)
    assert all(nn.parameter.is_lazy(layer.weight) for layer in (model[0], model[1], model[3]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_script_module_is_refused_with_the_reason():
    model = torch.jit.script(nn.Linear(4, 5))
    hl.summarize(nn.Sequential(model), (2, 4))  # as a part its FLOPs are seen
    with pytest.raises(hl.NotHookable, match=r"ScriptModule.*Use the model before torch.jit"):
        hl.summarize(model, (2, 4))
    assert hl.summarize(model).totals["parameters"] == 25


def test_modules_that_were_not_called_are_marked_and_containers_are_not():
    class Lazybones(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.ModuleList([nn.ReLU()]), nn.Linear(2, 2)

        def forward(self, x):
            return self.used[0](x)

    summary = hl.summarize(Lazybones(), (2,))
    assert summary["unused"].called is False
    assert summary["unused"].calls == 0
    assert summary["used"].called is None
    assert summary["used.0"].called is True
    assert summary.totals["called"] == 2
    lines = [line for line in str(summary).splitlines() if "not called" in line]
    assert len(lines) == 1
    assert "unused" in lines[0]


def test_a_module_whose_output_varies_is_marked():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(torch.cat([self.act(x), x]))

    row = hl.summarize(Growing(), (2, 3))["act"]
    assert row.output == "(2, 3)"
    assert row.varies
    assert row.calls == 2


def test_a_recursive_module_counts_its_flops_once():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x, depth=2):
            x = self.layer(x)
            return self(x, depth - 1) if depth else x

    summary = hl.summarize(Recursive(), (2, 3), time=True)
    assert summary[""].flops == summary["layer"].flops == 3 * (2 * 2 * 3 * 3)
    assert summary[""].calls == 3
    assert summary[""].seconds <= summary.totals["seconds"]


def test_calls_that_raise_and_are_caught_do_not_take_what_comes_after():
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Linear(5, 5), nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x) + x @ x.new_ones(3, 3)

    summary = hl.summarize(Careless(), (2, 3))
    one = 2 * 2 * 3 * 3
    assert summary["bad"].flops == 0
    assert summary["good"].flops == one
    assert summary[""].own_flops == one
    assert summary[""].flops == 2 * one
    assert summary["bad"].called
    assert summary["bad"].output is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_in_other_threads_are_not_said_to_be_missing():
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.there, self.never = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return self.here(x) + pool.submit(self.there, x).result()

    summary = hl.summarize(Threaded(), (5, 3))
    assert [summary[name].called for name in ("here", "there", "never")] == [True, None, False]
    assert summary.totals["elsewhere"] == ["there"]
    assert "called in another thread, and not measured there: there" in str(summary)
    assert str(summary).count("not called") == 1
    assert hl.summarize(nn.Linear(3, 3), (5, 3)).totals["elsewhere"] == []


def test_a_compiled_model_is_measured_eagerly():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.zeros(2, 4))
    assert hl.summarize(compiled, (2, 4))["_orig_mod.0"].flops == 2 * 2 * 4 * 4


# -- all is as before -----------------------------------------------------------------------------


class ChangesAllItCan(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.register_buffer("late", None)
        self.fails = fails

    def forward(self, x):
        x = self.fc(self.drop(self.norm(x)))
        self.late = x.detach()
        self.register_buffer("new", torch.ones(2))
        self.fc.weight.requires_grad_(False)
        random.random(), np.random.rand(), torch.rand(1)
        if self.fails:
            raise KeyError("on purpose")
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [None, "eval", "train"])
@pytest.mark.parametrize("backward", [False, True])
def test_everything_is_put_back_also_after_an_error(fails, mode, backward):
    model = ChangesAllItCan(fails)
    model.drop.eval()
    grad = model.fc.weight.grad = torch.ones(4, 4)
    state, modes = state_bits(model), [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    try:
        hl.summarize(
            model,
            torch.randn(6, 4, generator=torch.Generator()),
            mode=mode,
            backward=backward,
            time=True,
        )
    except KeyError:
        assert fails
    else:
        assert not fails
    assert_clean(model)
    assert_same_state(model, state)
    assert [m.training for m in model.modules()] == modes
    assert model.late is None
    assert "new" not in model._buffers
    assert model.fc.weight.requires_grad
    assert model.fc.weight.grad is grad
    assert bool((grad == 1).all())
    assert model.fc.bias.grad is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    assert torch.is_grad_enabled()
    assert torch._C._is_torch_function_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shorten_their_weights_have_them_back(kind):
    model, ids = nn.Sequential(kind(5, 3, max_norm=0.1)), torch.arange(5)[None]
    weight, before = model[0].weight, model[0].weight.detach().clone()
    where = model[0].weight.data_ptr()
    hl.summarize(model, ids)
    hl.compare(model, model, ids)
    assert model[0].weight is weight
    assert torch.equal(weight, before)
    assert weight.data_ptr() == where


def test_a_packed_sequence_is_one_argument():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), [5, 3])
    summary = hl.summarize(nn.LSTM(3, 4), packed)
    assert summary.totals["flops"] == 2 * 8 * (3 + 4) * 4 * 4
    assert summary[""].output[0][0] == "(8, 4)"


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_hooks_that_step_an_optimiser_in_the_backward_do_not_run(reentrant):
    class Steps(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[1](x) if reentrant is None else checkpoint(
                self[1], x, use_reentrant=reentrant
            )  # fmt: skip

    model, ran = Steps(nn.Linear(3, 3), nn.Linear(3, 2)), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    hl.summarize(model, (4, 3), backward=True)
    assert not ran
    assert model[0].weight.grad is model[1].weight.grad is None
    model(torch.ones(4, 3)).sum().backward()
    assert len(ran) == 4


def test_gradients_are_kept_from_a_backward_that_the_run_makes_itself():
    class Learns(nn.Module):
        """Takes a backward in its forward, as a model that learns while it is tested does."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            with torch.enable_grad():
                self.fc(x).sum().backward()
            return self.fc(x)

    def step(model):
        with torch.enable_grad():
            model(torch.ones(2, 3)).sum().backward()

    model = Learns()
    grad = model.fc.weight.grad = torch.ones(3, 3)
    hl.summarize(model, (2, 3))
    hl.summarize(model.fc, step)
    hl.compare(model, copy.deepcopy(model), torch.ones(2, 3))
    assert model.fc.weight.grad is grad
    assert bool((grad == 1).all())
    assert model.fc.bias.grad is None


@pytest.mark.parametrize("mode", ["training", "Eval", True])
def test_a_mode_that_there_is_not_is_refused(mode):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(hl.BatchError, match=r"Give mode='eval', 'train' or None"):
        hl.summarize(model, x, mode=mode)
    with pytest.raises(hl.BatchError, match=re.escape(f"mode={mode!r}")):
        hl.compare(model, model, x, mode=mode)
    with pytest.raises(hl.BatchError, match=re.escape(f"mode={mode!r}")):
        hl.sweep(model, x, x, "", metric=lambda output: output.sum(), mode=mode)
    assert model.training


def test_the_mode_that_is_asked_for_is_the_one_in_which_it_runs():
    class Tells(nn.Module):
        def forward(self, x):
            return x[:1] if self.training else x

    model = Tells()
    assert hl.summarize(model, (2, 3))[""].output == "(1, 3)"
    assert hl.summarize(model, (2, 3), mode="eval")[""].output == "(2, 3)"
    assert hl.summarize(model.eval(), (2, 3), mode="train")[""].output == "(1, 3)"
    assert not model.training


def test_torchs_encoder_runs_its_layers_in_eval_mode_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    summary = hl.summarize(model, {"src": torch.randn(2, 3, 8), "src_key_padding_mask": mask})
    assert summary["layers.1.linear2"].called
    assert_clean(model)


# -- time -----------------------------------------------------------------------------------------


def test_times_are_measured_only_if_asked_for():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    assert hl.summarize(model, (8, 64)).totals["seconds"] is None
    summary = hl.summarize(model, (8, 64), time=True)
    assert summary["0"].seconds > 0
    assert summary.totals["seconds"] >= summary[""].seconds
    assert summary["0"].backward_seconds is None
    summary = hl.summarize(model, (8, 64), time=True, backward=True)
    assert 0 < summary["0"].backward_seconds <= summary.totals["backward_seconds"]
    assert summary[""].backward_seconds >= summary["0"].backward_seconds
    assert "backward time" in str(summary)


# -- showing --------------------------------------------------------------------------------------


def test_the_table_is_filtered_and_no_wider_than_asked():
    summary = hl.summarize(TiedTransformer(), (2, 6), backward=True, time=True)
    for width in (60, 80, 100):
        lines = summary.show(depth=9, width=width).splitlines()
        assert max(map(len, lines)) <= width
    assert summary.show(depth=1).count("\n") < summary.show().count("\n")
    shown = summary.show("blocks.*.qkv", width=200).splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["blocks.0.qkv", "blocks.1.qkv"]
    with pytest.raises(hl.PlaceNotFound):
        summary.show("layers.*")
    with pytest.raises(hl.PlaceNotFound, match="TiedTransformer has no such module"):
        summary["layers"]


def places_shown(summary, where):
    """The places of the rows that are shown."""
    return [line.split()[0] for line in summary.show(where, depth=9, width=200).splitlines()[2:]]


def test_the_table_is_filtered_by_whatever_names_places():
    model = TiedTransformer()
    summary = hl.summarize(model, (2, 6))
    block = model.blocks[1]
    assert places_shown(summary, nn.LayerNorm) == ["blocks.0.norm", "blocks.1.norm"]
    assert places_shown(summary, nn.ModuleList) == ["blocks"]
    assert places_shown(summary, block) == ["blocks.1"]
    assert (
        places_shown(summary, lambda name, module: module is block or name == "head")[0]
        == "blocks.1"
    )
    assert places_shown(summary, re.compile("qkv|head")) == ["blocks.0.qkv", "blocks.1.qkv", "head"]
    assert places_shown(summary, ["head", nn.Embedding, block]) == ["embed", "blocks.1", "head"]
    with pytest.raises(
        hl.PlaceNotFound, match=r"Nothing matches Conv2d\. The model has .*PackedAttentionBlock,"
    ):
        summary.show(nn.Conv2d)


@pytest.mark.parametrize("way", ["freed", "pickled", "copied"])
def test_without_the_model_rows_are_found_by_places_and_types(way):
    model = TiedTransformer()
    block, summary = model.blocks[1], hl.summarize(model, (2, 6))
    if way == "freed":
        del model
        gc.collect()
    else:
        summary = pickle.loads(pickle.dumps(summary)) if way == "pickled" else copy.copy(summary)
    assert places_shown(summary, [nn.LayerNorm, "head"]) == [
        "blocks.0.norm",
        "blocks.1.norm",
        "head",
    ]
    for where in (block, lambda name, module: True, nn.Conv2d):
        with pytest.raises(hl.PlaceNotFound, match="its model is gone"):
            summary.show(where)


def test_a_large_model_is_shown_as_deep_as_sixty_rows_go():
    model = nn.Sequential(*[nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(30)])
    text = str(hl.summarize(model, (2,)))
    assert "60 deeper modules: summary.show(depth=…)" in text
    assert len(text.splitlines()) == 1 + 1 + 31 + 1
    wide = nn.Sequential(*[nn.ReLU() for _ in range(100)])
    assert "100 deeper modules" in str(hl.summarize(wide))
    # What is asked for is shown, all of it.
    assert len(hl.summarize(wide).show(depth=1).splitlines()) == 1 + 1 + 101
    assert len(hl.summarize(model).show(depth=9).splitlines()) == 1 + 1 + 91


def test_a_summary_is_plain_data():
    summary = hl.summarize(TiedTransformer(), (2, 6), backward=True, time=True)
    content = summary.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert set(content) == {"model", "totals", "modules"}
    assert content["model"] == "TiedTransformer"
    wanted = {
        "place", "type", "depth", "inputs", "output", "parameters", "trainable", "parameter_bytes",
        "buffer_bytes", "activation_bytes", "flops", "backward_flops", "seconds",
        "backward_seconds", "calls", "called", "shared_with",
    }  # fmt: skip
    assert wanted <= set(content["modules"][0])
    frame = summary.to_pandas()
    assert list(frame["place"]) == [row.place for row in summary]
    assert len(frame) == len(summary)
    assert frame.attrs["totals"]["flops"] == summary.totals["flops"]


def test_names_are_escaped_in_html():
    model = nn.Sequential()
    model.add_module("<script>", nn.ReLU())
    text = hl.summarize(model, (2,))._repr_html_()
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


def test_without_pandas_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(hl.MissingExtra, match="pip install pandas"):
        hl.summarize(nn.ReLU()).to_pandas()


def test_the_counter_can_be_left_by_an_error():
    with pytest.raises(ZeroDivisionError), FlopCounter(lambda n: None):
        raise ZeroDivisionError
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_jagged_tensors_have_shapes_and_flops():
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    summary = hl.summarize(model, batch)
    dense = hl.summarize(model, torch.cat(rows))
    assert summary.to_dict()["totals"]["flops"] == dense.to_dict()["totals"]["flops"] == 512
    assert str(summary).splitlines()[0].count("512 FLOPs") == 1


# -- rows that are made when they are read --------------------------------------------------------


def test_rows_tell_what_was_when_the_model_was_summarized():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    summary, again = hl.summarize(model, (5, 4)), hl.summarize(model, (5, 4))
    expected = again.to_dict()
    model[0].weight.requires_grad_(False)
    model[2] = nn.Linear(6, 9)
    model[1].register_parameter("slope", nn.Parameter(torch.zeros(3)))
    assert summary.to_dict() == expected
    assert summary["2"] is summary.modules[3] is list(summary)[3]


def test_a_summary_keeps_neither_model_nor_batch_alive():
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.zeros(5, 4)
    known = [weakref.ref(thing) for thing in (model, model[0], model[0].weight, batch)]
    summary = hl.summarize(model, batch)
    del model, batch
    gc.collect()
    assert [ref() for ref in known] == [None] * 4
    assert summary["0"].flops == 2 * 5 * 4 * 6
    assert "Linear" in str(summary)


def test_a_summary_can_be_copied_and_pickled_before_it_is_read():
    class Local(nn.Sequential):
        """A class that cannot be pickled."""

    model = Local(nn.Linear(4, 6), nn.ReLU())
    expected = hl.summarize(model, (5, 4), backward=True).to_dict()
    summary = hl.summarize(model, (5, 4), backward=True)
    assert pickle.loads(pickle.dumps(summary)).to_dict() == expected
    assert copy.deepcopy(summary).to_dict() == expected


class ChangesItself(nn.Module):
    """Makes a layer at its first call, replaces one, and drops one."""

    def __init__(self):
        super().__init__()
        self.old, self.gone, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "made"):
            x = self.gone(x)
            del self.gone
            self.made = nn.Linear(4, 4, bias=False)
            self.old.bias = None
        return self.last(self.old(self.made(x)))


def test_a_model_that_changes_in_its_run_is_told_as_it_is_afterwards():
    summary, one = hl.summarize(ChangesItself(), (5, 4)), 2 * 5 * 4 * 4
    assert [row.place for row in summary] == ["", "old", "last", "made"]
    assert [row.parameters for row in summary] == [16 + 20 + 16, 16, 20, 16]
    assert [row.calls for row in summary] == [1, 1, 1, 0]  # nobody could watch the new one
    assert [row.flops for row in summary] == [4 * one, one, one, 0]
    assert summary["made"].called is None
    assert summary.totals["called"] == 3  # another one has gone


def test_contents_notice_whatever_is_put_in_another_place():
    changes = [
        lambda model: model.append(nn.ReLU()),
        lambda model: model.__setitem__(0, nn.Linear(2, 2)),
        lambda model: model.pop(1),
        lambda model: model[0]._modules.update(inner=nn.ReLU()),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model[1].register_buffer("steps", torch.zeros(2)),
        lambda model: model._modules.update({"a": model._modules.pop("0")}),
    ]
    for change in changes:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        contents = ModuleIndex(model)
        with torch.no_grad():
            model[0].weight.add_(1)
        model.eval()
        assert contents.is_current()
        change(model)
        assert not contents.is_current()


def test_modules_with_a_forward_of_their_own_have_its_arguments_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))
    inner = model[1]
    inner.forward = lambda hidden: inner[0](hidden)
    summary = hl.summarize(model, (5, 4))
    assert [summary[place].inputs for place in ("0", "1", "1.0", "2")] == [
        {"input": "(5, 4)"}, {"hidden": "(5, 4)"}, {"input": "(5, 4)"}, {"input": "(5, 4)"},
    ]  # fmt: skip


def test_parts_of_parts_that_stand_in_several_places_count_once():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.Sequential(shared)})
    model["c"] = nn.ModuleList([model["b"], nn.Linear(4, 4)])
    model["c"][1].weight = shared[1].weight
    rows = hl.summarize(model)
    for path, module in model.named_modules():
        row, own = rows[path], [*module.parameters()]
        assert row.parameters == sum(p.numel() for p in own), path
        assert row.parameter_bytes == 4 * row.parameters
    assert rows["c.1"].shared_with == ["a.0.1"]
    assert rows["a.0"].aliases == ["b.0", "c.0.0"]


@pytest.mark.parametrize("options", [{"time": True}, {"backward": True}, {"backward": sum}])
def test_the_costs_of_a_run_need_a_batch(options):
    with pytest.raises(hl.BatchError, match=r"costs was asked for\. There is no batch.*shape"):
        hl.summarize(nn.Linear(2, 2), **options)


def test_a_batch_with_labels_is_told_how_it_was_given():
    model, pair = nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2), torch.ones(1)]
    for ask in (hl.summarize, lambda model, batch: hl.compare(model, model, batch)):
        with pytest.raises(TypeError) as raised:
            ask(model, pair)
        assert "give batch[0]" in "".join(raised.value.__notes__)


def test_an_error_of_the_model_says_in_which_layer_it_was_raised():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tail = nn.Linear(8, 6), nn.Sequential(nn.ReLU(), nn.Linear(5, 2))

        def forward(self, x):
            try:
                self.tail(x)  # what is caught is not where it ends
            except RuntimeError:
                return self.tail(self.first(x))

    model = Two()
    for run in (hl.summarize, lambda m, x: hl.compare(m, m, x)):
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            run(model, torch.zeros(3, 8))
        noted = "hookline: raised in 'tail.1' (Linear), which was given (3, 6)."
        assert caught.value.__notes__[0] == noted
    assert_clean(model)


def test_a_loader_is_not_taken_for_a_batch_without_a_word():
    loader = torch.utils.data.DataLoader(torch.zeros(4, 8), batch_size=2)
    with pytest.raises(TypeError) as caught:
        hl.summarize(nn.Linear(8, 2), loader)
    assert "next(iter(loader))" in caught.value.__notes__[-1]


@pytest.mark.parametrize("verb", ["summarize", "compare", "compare with", "sweep"])
def test_what_is_no_model_is_refused_by_every_verb_that_runs_one(verb):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    calls = {
        "summarize": lambda: hl.summarize(len, x),
        "compare": lambda: hl.compare(len, model, x),
        "compare with": lambda: hl.compare(model, len, x),
        "sweep": lambda: hl.sweep(len, x, x, "*", torch.sum),
    }
    with pytest.raises(TypeError, match=r"was asked about a builtin_function_or_method\. A model"):
        calls[verb]()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_weights_are_named_as_they_are_no_parameters():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    assert hl.summarize(model).totals["packed"] == []
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    for summary in (hl.summarize(quantised), hl.summarize(quantised, torch.zeros(2, 8))):
        assert summary.totals["packed"] == ["0._packed_params", "2._packed_params"]
        told = "quantised weights, which are not in the parameters: 0._packed_params, 2._packed"
        assert told in str(summary)


def test_odd_names_keep_the_table_straight():
    model = nn.Sequential()
    model.add_module("long" * 40, nn.ReLU())
    model.add_module("new\nline", nn.ReLU())
    lines = hl.summarize(model, (2, 3)).show(width=60).splitlines()
    assert lines[-1].startswith(r"  new\nline ")
    assert lines[-2].startswith("  …")
    assert len(lines[-2]) == len(lines[-1]) <= 60


def test_a_model_without_buffers_has_no_column_for_them():
    assert "buffers" not in str(hl.summarize(nn.Linear(2, 3)))
    assert "buffers" in str(hl.summarize(nn.BatchNorm1d(3)))


def test_a_list_of_numbers_that_was_meant_as_a_shape_is_told():
    with pytest.raises(TypeError) as raised:
        hl.summarize(nn.Linear(4, 2), [16, 4])
    assert "give a tuple: (16, 4)" in "".join(raised.value.__notes__)


def test_a_summary_spells_places_as_select_does_and_takes_both_spellings():
    model = nn.Sequential()
    model.add_module("a/b", nn.Linear(2, 3))
    (place,) = hl.select(model, "*")
    summary = hl.summarize(model)
    assert summary[place] is not None
    assert summary[place] == summary["a/b"]
    assert summary["a/b"].place == "a/b"
    assert str(summary).splitlines()[-1].split()[0] == place == r"a\/b"
