"""Attention patterns, against the kernel itself: with the identity as values it gives its pattern.

Models of transformers are compared with their own attentions in the eager implementation.
"""

import asyncio
import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import SelfAttention, hidden_states
from oracles import assert_clean, hooks_left, work_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import hookline as hl


class Kernel(nn.Module):
    """Attention and nothing else."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


def query_and_key(queries=5, keys=5, heads=4, kv_heads=4, dtype=torch.float32, batch=(2,)):
    torch.manual_seed(0)
    query = torch.randn(*batch, heads, queries, 8, dtype=dtype)
    return query, torch.randn(*batch, kv_heads, keys, 8, dtype=dtype)


def by_kernel(query, key, **kwargs):
    """What the kernel does to the identity matrix: its pattern."""
    identity = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    return F.scaled_dot_product_attention(query, key, identity, **kwargs)


def lower(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def without_a_row(mask, value):
    mask = mask.clone()
    mask[2] = value
    return mask


CASES = {
    "plain": (query_and_key(), {}),
    "causal": (query_and_key(), {"is_causal": True}),
    "causal with more keys": (query_and_key(3, 7), {"is_causal": True}),
    "causal with more queries": (query_and_key(7, 3), {"is_causal": True}),
    "one query of many keys": (query_and_key(1, 7), {}),
    "scale": (query_and_key(), {"scale": 0.7}),
    "boolean mask": (query_and_key(5, 7), {"attn_mask": lower(5, 7)}),
    "mask of each sequence": (query_and_key(), {"attn_mask": torch.rand(2, 1, 5, 5) > 0.4}),
    "mask of each head": (query_and_key(), {"attn_mask": torch.randn(4, 5, 5)}),
    "additive mask": (query_and_key(5, 7), {"attn_mask": torch.randn(5, 7)}),
    "a row of False": (query_and_key(), {"attn_mask": without_a_row(lower(5, 5), False)}),
    "a row of -inf": (query_and_key(), {"attn_mask": without_a_row(torch.randn(5, 5), -torch.inf)}),
    "a row of the smallest number": (
        query_and_key(),
        {"attn_mask": without_a_row(torch.zeros(5, 5), torch.finfo(torch.float32).min)},
    ),
    "grouped queries": (query_and_key(kv_heads=2), {"enable_gqa": True}),
    "grouped and causal": (
        query_and_key(4, 6, kv_heads=2),
        {"enable_gqa": True, "is_causal": True},
    ),
    "one head of keys, broadcast": (query_and_key(kv_heads=1), {}),
    "without a batch": (query_and_key(batch=()), {"is_causal": True}),
    "float64": (query_and_key(dtype=torch.float64), {"is_causal": True}),
    "bfloat16": (query_and_key(dtype=torch.bfloat16), {"is_causal": True}),
    "bfloat16 with a float32 mask": (
        query_and_key(dtype=torch.bfloat16),
        {"attn_mask": torch.randn(5, 5).bfloat16().float()},
    ),
    "lower right bias": (query_and_key(3, 7), {"attn_mask": causal_lower_right(3, 7)}),
    "upper left bias": (query_and_key(3, 7), {"attn_mask": causal_upper_left(3, 7)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pattern_is_what_the_kernel_does_to_the_identity(name):
    (query, key), options = CASES[name]
    model = Kernel()
    bare = model(query, key, key, **options)
    with hl.attention(model) as patterns:
        looked_at = model(query, key, key, **options)
    assert torch.equal(looked_at, bare)
    expected = by_kernel(query, key, **options)
    assert patterns[""].shape == expected.shape
    assert str(tuple(expected.shape)) in repr(patterns)
    torch.testing.assert_close(patterns[""], expected)
    assert_clean(model)


def test_a_row_that_may_see_nothing_is_zero_as_in_the_kernel():
    (query, key), options = CASES["a row of False"]
    model = Kernel()
    with hl.attention(model) as patterns:
        assert not model(query, key, key, **options)[:, :, 2].any()
    assert not patterns[""][:, :, 2].any()
    torch.testing.assert_close(patterns[""].sum(-1)[:, :, 0], torch.ones(2, 4))


def test_what_is_not_a_number_stays_so():
    query, key = query_and_key()
    query[0, 0, 1] = torch.nan
    model = Kernel()
    with hl.attention(model) as patterns:
        model(query, key, key)
    assert patterns[""].isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[0, 0, 1]]


def test_arguments_may_be_given_by_position():
    query, key = query_and_key()
    mask, model = lower(5, 5), Kernel()
    with hl.attention(model) as patterns:
        model(query, key, key, mask, 0.0, False)
    torch.testing.assert_close(patterns[""], by_kernel(query, key, attn_mask=mask))


def test_half_precision_is_computed_in_float32_and_rounded_once():
    query, key = query_and_key(dtype=torch.bfloat16)
    model, exact = Kernel(), by_kernel(query.double(), key.double())
    with hl.attention(model) as patterns:
        model(query, key, key)
    assert patterns[""].dtype is torch.bfloat16
    assert torch.equal(patterns[""], exact.to(torch.bfloat16))
    with hl.attention(model, dtype=torch.float32) as patterns:
        model(query, key, key)
        with torch.autocast("cpu", torch.bfloat16):
            pattern = patterns[""]
    assert pattern.dtype is torch.float32
    torch.testing.assert_close(pattern, exact.float())
    assert "float32" in repr(patterns)


# -- models written by hand -----------------------------------------------------------------------


class FusedOrWrittenAttention(nn.Module):
    """Self-attention, or with a context cross-attention; kernel or written out."""

    def __init__(self, width=8, heads=2, causal=True, dropout=0.0, written_out=False):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.written_out = written_out
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = self.split(self.q(x)), self.split(self.k(context)), self.split(self.v(context))
        dropout = self.dropout if self.training else 0.0
        if self.written_out:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if self.causal:
                hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                scores = scores.masked_fill(hidden, -torch.inf)
            pattern = F.dropout(torch.softmax(scores, dim=-1), dropout)
            y = pattern @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.o(y.transpose(1, 2).flatten(2))


class FusedOrWrittenBlock(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = FusedOrWrittenAttention(**options)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


def transformer(**options):
    torch.manual_seed(0)
    return nn.Sequential(FusedOrWrittenBlock(**options), FusedOrWrittenBlock(**options))


def written_out(model, x):
    """The patterns of the model's twin that computes them, by a plain capture of its softmax."""
    twin = copy.deepcopy(model)
    for block in twin:
        block.attn.written_out = True
    with hl.capture(twin.eval(), "*.attn/softmax", detach=True) as record:
        twin(x)
    return [record["0.attn/softmax"], record["1.attn/softmax"]]


@pytest.mark.parametrize(
    "where", [None, "**", "*.attn", FusedOrWrittenAttention, ["0.attn", "1.attn"]]
)
def test_every_way_to_say_where_finds_the_same(where):
    model, x = transformer(), hidden_states()
    with hl.attention(model, where) as patterns:
        model(x)
    assert patterns.places() == list(patterns) == ["0.attn", "1.attn"]
    assert len(patterns) == 2
    for found, expected in zip(patterns.items(), written_out(model, x), strict=True):
        torch.testing.assert_close(found[1], expected)


def test_looking_changes_neither_outputs_nor_gradients_and_leaves_nothing():
    model, x = transformer(dropout=0.3), hidden_states()

    def run():
        model.zero_grad()
        torch.manual_seed(3)
        out = model(x)
        out.square().sum().backward()
        return [out, *(p.grad.clone() for p in model.parameters())]

    bare = run()
    with hl.attention(model) as patterns:
        looked_at = run()
    assert all(torch.equal(a, b) for a, b in zip(bare, looked_at, strict=True))
    assert not patterns["0.attn"].requires_grad
    assert_clean(model)
    assert hl.attached(model) == []


def test_the_pattern_is_the_one_before_dropout_and_the_table_says_so():
    model, x = transformer(dropout=0.25), hidden_states()
    with hl.attention(model) as patterns:
        model(x)
    assert "causal, before dropout 0.25" in repr(patterns)
    torch.testing.assert_close(patterns["0.attn"], written_out(model, x)[0])
    with hl.attention(model.eval()) as patterns:
        model(x)
    assert "dropout" not in repr(patterns)


def test_queries_and_keys_that_are_overwritten_later_do_not_matter():
    class Overwrites(nn.Module):
        def forward(self, q, k):
            q, k = q.clone(), k.clone()
            mask = torch.zeros(5, 5)
            y = F.scaled_dot_product_attention(q, k, k, mask)
            q.zero_(), k.zero_(), mask.fill_(-1e4).triu_()
            return y

    query, key = query_and_key()
    model = Overwrites()
    with hl.attention(model) as patterns:
        model(query, key)
    torch.testing.assert_close(patterns[""], by_kernel(query, key))


def test_a_pattern_that_is_read_twice_is_the_same_whatever_was_done_to_the_first():
    for kind in (False, True):
        model, x = transformer(written_out=kind), hidden_states()
        with torch.no_grad(), hl.attention(model) as patterns:
            model(x)
        patterns["0.attn"].zero_()
        torch.testing.assert_close(patterns["0.attn"], written_out(model, x)[0])


def test_only_what_is_needed_is_kept():
    qkv = torch.randn(2, 4, 5, 24)

    class Fused(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(*x.chunk(3, -1))

    model = nn.Sequential(Fused())
    context = hl.attention(model)
    with context:
        model(qkv)
    (kept,) = context.record.calls("0/scaled_dot_product_attention:inputs")
    assert list(kept) == ["query", "key"]
    assert kept["query"].untyped_storage().nbytes() == qkv.nbytes // 3


def test_calls_are_numbered_and_reading_one_of_several_asks_for_its_number():
    model = transformer()
    with hl.attention(model) as patterns:
        model(hidden_states(5))
        model(hidden_states(3))
        assert patterns["0.attn", 0].shape == (2, 2, 5, 5)  # also while it is open
    assert [tuple(p.shape) for p in patterns.calls("0.attn")] == [(2, 2, 5, 5), (2, 2, 3, 3)]
    assert torch.equal(patterns["0.attn", -1], patterns["0.attn", 1])
    torch.testing.assert_close(patterns["1.attn", 1], written_out(model, hidden_states(3))[1])
    assert len(list(patterns.items())) == 4
    with pytest.raises(hl.SeveralCalls, match=r"There are 2 of them.*patterns\['0.attn', n\]"):
        patterns["0.attn"]
    with pytest.raises(hl.NotCaptured, match=r"call 2 at '0.attn'.*There are 2 calls"):
        patterns["0.attn", 2]


def test_the_table_shows_places_calls_and_shapes():
    model = transformer(dropout=0.5)
    with hl.attention(model) as patterns:
        model(hidden_states(5))
        model.eval()(hidden_states(3))
    assert repr(patterns).splitlines() == [
        "Attention patterns of 2 places, 4 calls",
        "  place   calls  shape                dtype    from",
        *(
            f"  {n}.attn  2      (2, 2, 5, 5) varies  float32  scaled_dot_product_attention  "
            "causal, before dropout 0.5 | causal"
            for n in range(2)
        ),
    ]
    assert patterns._repr_html_().count("<tr>") == 3


def test_a_module_that_attends_twice_in_a_forward_has_two_calls_and_names_tell_them_apart():
    class Twice(nn.Module):
        def forward(self, q, k):
            q = F.scaled_dot_product_attention(q, q, q)
            return F.scaled_dot_product_attention(q, k, k)

    query, key = query_and_key(5, 7)
    inner = F.scaled_dot_product_attention(query, query, query)
    model = nn.ModuleDict({"a": Twice()})
    with hl.attention(model, "a") as patterns:
        model.a(query, key)
    torch.testing.assert_close(patterns["a", 0], by_kernel(query, query))
    torch.testing.assert_close(patterns["a", 1], by_kernel(inner, key))
    with hl.attention(model, "a/scaled_dot_product_attention#1") as patterns:
        model.a(query, key)
    assert patterns.places() == ["a/scaled_dot_product_attention#1"]
    torch.testing.assert_close(patterns["a"], by_kernel(inner, key))
    assert torch.equal(patterns["a/scaled_dot_product_attention#1"], patterns["a"])
    both = [f"a/scaled_dot_product_attention#{n}" for n in range(2)]
    with hl.attention(model, both) as patterns:
        model.a(query, key)
    with pytest.raises(hl.NotCaptured, match="matches several"):
        patterns["a"]


def test_cross_attention_has_the_keys_of_the_context():
    model = FusedOrWrittenAttention(causal=False)
    x, context = hidden_states(3), hidden_states(6)
    with hl.attention(model) as patterns:
        model(x, context)
    assert patterns[""].shape == (2, 2, 3, 6)
    q, k = model.split(model.q(x)), model.split(model.k(context))
    torch.testing.assert_close(patterns[""], (q @ k.mT / 2.0).softmax(-1))


def test_places_are_read_by_module_and_by_other_names_and_when_the_model_is_gone():
    attn = FusedOrWrittenAttention()
    model, x = nn.ModuleDict({"one": attn, "two": attn, "fc": nn.Linear(8, 8)}), hidden_states()
    with hl.attention(model) as patterns:
        attn(x)
    assert patterns.places() == ["one"]
    expected = patterns["one"]
    assert torch.equal(patterns[attn], expected)
    assert torch.equal(patterns["two"], expected)
    assert "two" in patterns
    assert "fc" not in patterns
    assert "nowhere" not in patterns
    assert "not[a:place" not in patterns
    with pytest.raises(hl.NotCaptured, match=r"'fc' was asked for.*patterns at 'one'.*table"):
        patterns["fc"]
    with pytest.raises(hl.PlaceNotFound, match="nowhere"):
        patterns["nowhere"]
    del model, attn
    gc.collect()
    assert torch.equal(patterns["one"], expected)


def test_nothing_is_kept_alive_by_the_patterns_but_what_they_need():
    model, x = transformer(), hidden_states()
    kept = []
    handle = model[0].attn.v.register_forward_hook(lambda m, i, o: kept.append(weakref.ref(o)))
    with hl.attention(model) as patterns:
        model(x)
    handle.remove()
    gc.collect()
    assert kept[0]() is None
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert len(patterns) == 2


def test_autocast_inference_and_no_grad():
    model, x = transformer(), hidden_states()
    expected = written_out(model, x)[0]
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode, hl.attention(model) as patterns:
            model(x)
        torch.testing.assert_close(patterns["0.attn"], expected)
    with torch.autocast("cpu", torch.bfloat16), hl.attention(model) as patterns:
        model(x)
        pattern = patterns["0.attn"]
    torch.testing.assert_close(pattern, expected.bfloat16(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_is_counted_once(reentrant):
    model, x = transformer(), hidden_states().requires_grad_()
    with hl.attention(model) as patterns:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [len(patterns.calls(place)) for place in patterns] == [1, 1]
    torch.testing.assert_close(patterns["1.attn"], written_out(model, x)[1])


def test_a_compiled_model_runs_eagerly_in_the_block():
    model, x = transformer(), hidden_states()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with hl.attention(compiled) as patterns:
        compiled(x)
    torch.testing.assert_close(patterns["0.attn"], written_out(model, x)[0])


def test_torchs_own_layers_are_not_looked_at_by_a_wildcard():
    model = transformer()
    own = {name for name, m in model.named_modules() if type(m).__module__.startswith("torch.")}
    with hl.attention(model):
        hooked = {name.partition("._")[0] for name in hooks_left(model)}
        model(hidden_states())
    assert hooked
    assert not hooked & own


# -- written out ----------------------------------------------------------------------------------


def test_attention_that_is_written_out_gives_what_its_softmax_gave():
    model, x = transformer(written_out=True, dropout=0.5), hidden_states()
    with hl.capture(model, "*.attn/softmax", detach=True) as record, hl.attention(model) as found:
        model(x)
    assert found.places() == ["0.attn", "1.attn"]
    assert torch.equal(found["1.attn"], record["1.attn/softmax"])
    assert repr(found).count("softmax") == 2
    with hl.attention(model, dtype=torch.float64) as found:
        model(x)
    assert found["0.attn"].dtype is torch.float64


def test_an_edited_pattern_is_seen_as_it_was_used():
    model, x = transformer(written_out=True), hidden_states()
    with (
        hl.edit(model, "0.attn/softmax", hl.zero(), at=(slice(None), 1)),
        hl.attention(model) as patterns,
    ):
        model(x)
    assert not patterns["0.attn"][:, 1].any()
    assert patterns["0.attn"][:, 0].any()


class Softmaxes(nn.Module):
    """Softmaxes that are no attention: over classes, over channels."""

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"softmax": nn.Softmax(dim=-1)})

    def forward(self, q, k):
        maps = torch.softmax(q, 1)
        pattern = self.attn["softmax"](q @ k.mT)
        return F.softmax((pattern @ maps).mean((1, 2)), dim=-1)


def test_other_softmaxes_are_no_attention_and_a_softmax_layer_may_be():
    query, key = query_and_key()
    model = Softmaxes()
    with hl.attention(model) as patterns:
        model(query, key)
    assert patterns.places() == ["attn.softmax"]
    torch.testing.assert_close(patterns["attn.softmax"], (query @ key.mT).softmax(-1))


class SingleHead(nn.Module):
    """Attention without a dimension for heads."""

    def forward(self, x):
        return F.softmax(x @ x.mT, dim=-1) @ x


def test_a_softmax_over_three_dimensions_must_be_named():
    model, x = nn.Sequential(SingleHead()), hidden_states()
    for where in (None, "0"):
        with (
            pytest.raises(hl.NeverFired, match=r"SingleHead, which called .*softmax.*'0/softmax'")
            if where
            else pytest.raises(hl.NeverFired, match="looks like attention: nothing"),
            hl.attention(model, where),
        ):
            model(x)
    with hl.attention(model, "0/softmax") as patterns:
        model(x)
    assert patterns.places() == ["0/softmax"]
    torch.testing.assert_close(patterns["0"], (x @ x.mT).softmax(-1))


# -- nn.MultiheadAttention ------------------------------------------------------------------------

LAYERS = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "dropout": ({"dropout": 0.5}, {}),
    "additive mask": ({}, {"attn_mask": torch.randn(5, 5)}),
    "causal": (
        {},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True},
    ),
    "padding": ({}, {"key_padding_mask": torch.tensor([[False] * 3 + [True] * 2] * 2)}),
    "biases and a zero": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "other widths": ({"kdim": 8, "vdim": 4}, {}),
    "float64": ({"dtype": torch.float64}, {}),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_torchs_attention_layer_gives_the_weights_it_can_be_asked_for(name, need_weights):
    options, masks = LAYERS[name]
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, **options)
    shape = (2, 5) if options.get("batch_first") else (5, 2)
    dtype = options.get("dtype", torch.float32)
    x, value = torch.randn(*shape, 8, dtype=dtype), torch.randn(*shape, layer.vdim, dtype=dtype)
    torch.manual_seed(1)
    bare = layer(x, x, value, need_weights=need_weights, **masks)
    with hl.attention(nn.ModuleDict({"attn": layer})) as patterns:
        torch.manual_seed(1)
        looked_at = layer(x, x, value, need_weights=need_weights, **masks)
    assert torch.equal(bare[0], looked_at[0])
    _, expected = copy.deepcopy(layer).eval()(x, x, value, average_attn_weights=False, **masks)
    torch.testing.assert_close(patterns["attn"], expected)
    assert str(tuple(expected.shape)) in repr(patterns)
    assert ("before dropout 0.5" in repr(patterns)) == (name == "dropout")


def test_an_attention_layer_without_a_batch_and_with_a_row_that_may_see_nothing():
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 8)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    with hl.attention(layer) as patterns:
        layer(x, x, x, attn_mask=mask, need_weights=False)
        layer(x, x, x, attn_mask=mask, need_weights=True)
    kernel, exact = patterns.calls("")
    assert kernel.shape == (2, 5, 5)
    assert not kernel[:, 2].any()
    assert exact[:, 2].isnan().all()
    torch.testing.assert_close(kernel[:, 3], exact[:, 3])


def test_weights_that_are_trained_afterwards_do_not_change_the_pattern():
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 2, 8)
    _, expected = layer(x, x, x, average_attn_weights=False)
    with hl.attention(layer) as patterns:
        layer(x, x, x)
    with torch.no_grad():
        layer.in_proj_weight.mul_(3.0)
    torch.testing.assert_close(patterns[""], expected)


def test_torchs_encoder_in_evaluation_without_gradients():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), hidden_states()
    with torch.no_grad():
        with hl.attention(model) as patterns:
            model(x)
        first = model.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
    assert patterns.places() == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(patterns["layers.0.self_attn"], first)


# -- errors ---------------------------------------------------------------------------------------


class AttentionByOtherMeans(nn.Module):
    """Attention by other means."""

    def forward(self, x):
        weights = torch.exp(x @ x.mT)
        return weights / weights.sum(-1, keepdim=True) @ x


def test_a_model_without_attention_is_an_error_that_says_what_looks_like_it():
    model = nn.Sequential(nn.ModuleDict({"attn": AttentionByOtherMeans()}), FusedOrWrittenBlock())
    with pytest.raises(hl.NeverFired) as error, hl.attention(model, "0.attn"):
        model[0]["attn"](hidden_states())
    text = str(error.value)
    assert "'0.attn' were asked for" in text
    assert "No module there called scaled_dot_product_attention" in text
    assert "'0.attn' (AttentionByOtherMeans, which called mT, matmul, exp, sum, div)" in text
    assert "'1.attn' (FusedOrWrittenAttention, which was not looked at)" in text
    assert "select(model, '0.attn/*', inputs=batch)" in text
    assert_clean(model)


def test_a_module_that_leaves_attention_to_its_children_is_not_said_to_be_uncalled():
    model = transformer()
    with pytest.raises(hl.NeverFired) as error, hl.attention(model, "0"):
        model(hidden_states())
    assert "not called" not in str(error.value)
    assert "'0' (FusedOrWrittenBlock, which called " in str(error.value)
    assert "'0.attn' (FusedOrWrittenAttention, which was not looked at)" in str(error.value)
    assert "Look at every module: hookline.attention(model)." in error.value.remedy
    with hl.attention(model) as patterns:
        model(hidden_states())
    assert patterns.places() == ["0.attn", "1.attn"]


def test_a_named_module_without_a_pattern_is_an_error_though_others_have_one():
    model = transformer()
    with (
        pytest.raises(hl.NeverFired, match=r"Attention patterns at '1.mlp' were asked for"),
        hl.attention(model, ["*.attn", "1.mlp"]),
    ):
        model(hidden_states())


def test_an_exception_of_the_block_stands_alone():
    with pytest.raises(ZeroDivisionError), hl.attention(transformer()):
        raise ZeroDivisionError


def test_what_can_have_no_pattern_is_refused_at_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(hl.NotHookable, match=r"torch's own layers.*Linear, ReLU"):
        hl.attention(model, "**").__enter__()
    model = transformer()
    for where, reason in {
        "0.attn:input": "module as a whole.*'0.attn/scaled_dot_product_attention'",
        "0.attn.q.weight": "module as a whole",
        "0.attn/matmul": "Patterns come from .*capture",
    }.items():
        with pytest.raises(hl.PlaceError, match=reason):
            hl.attention(model, where).__enter__()
    with pytest.raises(hl.NotHookable, match="`with`"):
        hl.attention(model).attach()
    assert_clean(model)


def test_calls_of_another_thread_are_not_seen_and_are_the_reason_given():
    model, x = transformer(), hidden_states()

    def run():
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()

    with (
        pytest.raises(hl.NeverFired, match="called from another thread"),
        hl.attention(model),
    ):
        run()
    with hl.attention(model) as patterns:
        run()
        model(x)
    assert [len(patterns.calls(place)) for place in patterns] == [1, 1]


def test_calls_of_another_task_are_not_seen_and_are_the_reason_given():
    model, x = transformer(), hidden_states()

    async def look(entered, done):
        with hl.attention(model):
            entered.set()
            await done.wait()

    async def run(entered, done):
        await entered.wait()
        model(x)
        done.set()

    async def both():
        entered, done = asyncio.Event(), asyncio.Event()
        await asyncio.gather(look(entered, done), run(entered, done))

    with pytest.raises(hl.NeverFired, match="another thread or task"):
        asyncio.run(both())


def test_nested_tensors_are_refused_on_reading():
    model = Kernel()
    with warnings.catch_warnings(), hl.attention(model) as patterns:
        warnings.simplefilter("ignore")  # torch says that they may change
        parts = [torch.randn(3, 2, 4), torch.randn(5, 2, 4)]
        q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        model(q, q, q)
    assert "nested" in repr(patterns)
    with pytest.raises(hl.NotCaptured, match=r"nested tensors.*padded"):
        patterns[""]


# -- transformers ---------------------------------------------------------------------------------

SMALL = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_layer=2, n_head=4, n_embd=16, n_positions=32, **SMALL)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, **SMALL,
        ),
    ),
    "bert": (
        BertModel,
        BertConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            **SMALL,
        ),
    ),
    "bart": (
        BartModel,
        BartConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, **SMALL,
        ),
    ),
}  # fmt: skip


def fast_and_eager(name):
    """The same weights in two implementations."""
    kind, config = CONFIGS[name]
    torch.manual_seed(0)
    fast = kind._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(fast.state_dict())
    # Fresh weights are so small that every pattern would be nearly even.
    for one in (fast, eager):
        for parameter in one.parameters():
            parameter.data.mul_(15.0 if parameter.ndim > 1 else 1.0)
    return fast, eager


def sentences():
    torch.manual_seed(2)
    ids = torch.randint(3, 40, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return ids, mask


def expected_of(outputs):
    if "encoder_attentions" in outputs:
        return [
            *outputs.encoder_attentions, *outputs.decoder_attentions, *outputs.cross_attentions
        ]  # fmt: skip
    return list(outputs.attentions)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_patterns_equal_the_attentions_of_the_eager_implementation(name, padded):
    fast, eager = fast_and_eager(name)
    ids, mask = sentences()
    inputs = {"input_ids": ids, "attention_mask": mask if padded else None}
    with torch.no_grad():
        bare = fast(**inputs)
        with hl.attention(fast) as patterns:
            looked_at = fast(**inputs)
        with hl.attention(eager) as written:
            expected = expected_of(eager(**inputs, output_attentions=True))
    assert torch.equal(bare[0], looked_at[0])
    assert "softmax" not in repr(patterns)
    assert len(patterns) == len(written) == len(expected) >= 2
    assert max(pattern.std() for pattern in expected) > 0.1  # not all even
    for place, found, truth in zip(patterns, patterns.items(), expected, strict=True):
        torch.testing.assert_close(found[1], truth, rtol=1e-4, atol=1e-5)
        assert torch.equal(written[place], truth)
    assert_clean(fast)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_on_the_left_is_as_in_the_eager_implementation_for_every_token(name):
    fast, eager = fast_and_eager(name)
    ids, mask = sentences()
    mask = mask.flip(1)
    with torch.no_grad(), hl.attention(fast) as patterns:
        fast(ids, attention_mask=mask)
    truth = eager(ids, attention_mask=mask, output_attentions=True).attentions
    for (_, found), expected in zip(patterns.items(), truth, strict=True):
        for row, tokens in enumerate(mask.bool()):  # padding itself attends to anything
            torch.testing.assert_close(
                found[row][:, tokens], expected[row][:, tokens], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_has_one_query_a_step_and_keys_that_grow(name):
    fast, eager = fast_and_eager(name)
    ids, _ = sentences()
    with hl.attention(fast) as patterns:
        tokens = fast.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4,
            do_sample=False,
        )  # fmt: skip
    with torch.no_grad():
        truth = eager(tokens, output_attentions=True).attentions
    for place, whole in zip(patterns, truth, strict=True):
        first, *steps = patterns.calls(place)
        torch.testing.assert_close(first, whole[:, :, :6, :6], rtol=1e-4, atol=1e-5)
        assert [tuple(step.shape[2:]) for step in steps] == [(1, 7), (1, 8), (1, 9)]
        for n, step in enumerate(steps, 6):
            expected = whole[:, :, n : n + 1, : n + 1]
            torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), checkpoint_wrapper])
@pytest.mark.parametrize("asked", [None, "0"])
def test_a_wrapped_module_has_its_pattern_under_its_own_name(wrap, asked):
    model, (x, _) = nn.Sequential(SelfAttention(), nn.ReLU()), query_and_key()
    model[0] = wrap(model[0])
    with hl.attention(model, asked) as patterns:
        model(x)
    assert len(patterns) == 1
    for place in ("0", model[0]):
        assert torch.allclose(patterns[place], by_kernel(x, x, is_causal=True), atol=1e-6)


class Written(nn.Module):
    """Attention written out, beside a softmax that is none at every call."""

    def forward(self, query, key, value):
        weights = torch.softmax(query @ key.mT, -1)
        torch.softmax(query, 1)
        return weights @ value


@pytest.mark.parametrize("model", [Kernel(), Written()], ids=["kernel", "softmax"])
def test_a_pattern_is_read_without_going_through_the_other_calls(model):
    work = {}
    for count in (20, 400):
        queries = [torch.randn(1, 1, 2, 3) for _ in range(count)]
        with hl.attention(model) as patterns:
            for query in queries:
                model(query, query, query)
        assert torch.equal(patterns["", 3], patterns.calls("")[3])
        assert torch.equal(patterns["", -1], patterns.calls("")[-1])
        work[count] = work_of(lambda found=patterns: found["", 7])
        assert len(patterns.calls("")) == count
        torch.testing.assert_close(patterns["", 7].sum(-1), torch.ones(1, 1, 2))
        with pytest.raises(hl.NotCaptured, match=f"There are {count} calls"):
            patterns["", count]
    assert work[400] < work[20] * 1.5


def test_patterns_are_read_while_more_come():
    model, query = Written(), torch.randn(1, 1, 2, 3)
    with hl.attention(model) as patterns:
        for count in range(1, 4):
            model(query * count, query, query)
            assert len(patterns.calls("")) == count
            expected = (query * count @ query.mT).softmax(-1)
            assert torch.equal(patterns["", count - 1], expected)
            assert torch.equal(patterns["", -1], expected)
