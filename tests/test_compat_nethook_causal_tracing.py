"""hookline.compat.nethook runs code for causal tracing that was written for baukit's nethook."""

import functools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import assert_clean, by_hand
from torch import nn

from hookline.compat import nethook

# -- heads ----------------------------------------------------------------------------------------


def test_heads_are_put_in_place_by_what_an_output_projection_is_given(gpt):
    """As function vectors are: the output is computed again from inputs that were changed."""
    layer, heads, mean = "transformer.h.1.attn.c_proj", 4, torch.linspace(-1, 1, 4)

    def rep_act(output, layer_name, inputs):
        assert layer_name == layer
        if isinstance(inputs, tuple):
            inputs = inputs[0]
        shape = inputs.shape
        inputs = inputs.view(*shape[:-1], heads, -1)
        inputs[-1, -1, 2] = mean
        projection = nethook.get_module(gpt, layer_name)
        return F.linear(inputs.view(*shape), projection.weight, projection.bias)

    def change(module, args):
        x = args[0].clone()
        x.view(*x.shape[:-1], heads, -1)[-1, -1, 2] = mean
        return (x,)

    before = gpt(**INP).logits
    with torch.no_grad(), nethook.TraceDict(gpt, [layer], edit_output=rep_act):
        logits = gpt(**INP).logits
    handle = gpt.transformer.h[1].attn.c_proj.register_forward_pre_hook(change)
    expected = gpt(**INP).logits
    handle.remove()
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, before)


# -- causal tracing -------------------------------------------------------------------------------


class GPT2Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = self.c_attn(hidden_states).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.c_proj(mixed), None


class GPT2MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, hidden_states):
        return self.c_proj(F.gelu(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    """As in GPT-2: arguments by keyword, a tuple back."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = GPT2Attention(width), GPT2MLP(width)

    def forward(self, hidden_states, attention_mask=None):
        attended, _ = self.attn(
            hidden_states=self.ln_1(hidden_states), attention_mask=attention_mask
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states)), attended


class Body(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(GPT2Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        h = self.wte(input_ids) + self.wpe(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for block in self.h:
            h = block(h, attention_mask=mask)[0]
        return self.ln_f(h)


class TinyGPT(nn.Module):
    def __init__(self, words=29, width=16, layers=3):
        super().__init__()
        self.transformer = Body(words, width, layers)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.lm_head(self.transformer(input_ids)))


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return TinyGPT().eval()


INP = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9]] * 4)}

EMBED, LAYERS = "transformer.wte", [f"transformer.h.{n}" for n in range(3)]

SUBJECT = (1, 3)


def untuple(x):
    return x[0] if isinstance(x, tuple) else x


def corruption(b, e, x):
    noise = np.random.RandomState(1).randn(x.shape[0] - 1, e - b, x.shape[2])
    return 3.0 * torch.from_numpy(noise).to(x.device)


def trace_with_patch(model, inp, states, answer, tokens_to_mix, trace_layers=None):
    """Row 0 runs clean, the others with noise at the subject and some states of row 0 restored."""
    restored = defaultdict(list)
    for token, layer in states:
        restored[layer].append(token)

    def patch_rep(x, layer):
        if layer == EMBED:
            b, e = tokens_to_mix
            x[1:, b:e] += corruption(b, e, x)
            return x
        if layer not in restored:
            return x
        h = untuple(x)
        for token in restored[layer]:
            h[1:, token] = h[0, token]
        return x

    more = trace_layers or []
    with (
        torch.no_grad(),
        nethook.TraceDict(
            model, [EMBED] + list(restored.keys()) + more, edit_output=patch_rep
        ) as td,
    ):
        outputs = model(**inp)
    probs = torch.softmax(outputs.logits[1:, -1, :], dim=1).mean(dim=0)[answer]
    if trace_layers is None:
        return probs
    states = [untuple(td[layer].output).detach().cpu() for layer in trace_layers]
    return probs, torch.stack(states, dim=2)


def trace_by_hand(model, inp, states, answer, tokens_to_mix, trace_layers=()):
    """The same with hooks of torch."""
    modules, handles, seen = dict(model.named_modules()), [], {}

    def corrupt(module, args, output):
        b, e = tokens_to_mix
        output = output.clone()
        output[1:, b:e] += corruption(b, e, output)
        return output

    def restore(token, module, args, output):
        h = output[0].clone()
        h[1:, token] = h[0, token]
        return (h, *output[1:])

    def look(layer, module, args, output):
        seen[layer] = output[0].clone()

    handles.append(modules[EMBED].register_forward_hook(corrupt))
    for token, layer in states:
        handles.append(modules[layer].register_forward_hook(functools.partial(restore, token)))
    for layer in trace_layers:
        handles.append(modules[layer].register_forward_hook(functools.partial(look, layer)))
    with torch.no_grad():
        logits = model(**inp).logits
    for handle in handles:
        handle.remove()
    probs = torch.softmax(logits[1:, -1, :], dim=1).mean(dim=0)[answer]
    return probs, torch.stack([seen[n] for n in trace_layers], dim=2) if trace_layers else None


def test_causal_tracing_gives_what_hooks_written_by_hand_give(gpt):
    with torch.no_grad():
        answer = gpt(**INP).logits[0, -1].argmax()
    clean = torch.softmax(gpt(**INP).logits[0, -1], 0)[answer]
    low = trace_with_patch(gpt, INP, [], answer, SUBJECT)
    assert torch.equal(low, trace_by_hand(gpt, INP, [], answer, SUBJECT)[0])
    assert abs(low - clean) > 1e-4
    scores = torch.zeros(6, 3)
    for token in range(6):
        for n, layer in enumerate(LAYERS):
            scores[token, n] = trace_with_patch(gpt, INP, [(token, layer)], answer, SUBJECT)
            by_hand, _ = trace_by_hand(gpt, INP, [(token, layer)], answer, SUBJECT)
            assert torch.equal(scores[token, n], by_hand)
    assert scores.std() > 0
    assert torch.isclose(scores[5, 2], clean)  # the last state of the last token decides
    assert_clean(gpt)


def test_causal_tracing_returns_the_states_of_all_layers(gpt):
    states = [(2, LAYERS[0]), (1, LAYERS[0]), (5, LAYERS[1])]
    probs, traced = trace_with_patch(gpt, INP, states, 7, SUBJECT, trace_layers=LAYERS)
    by_hand, expected = trace_by_hand(gpt, INP, states, 7, SUBJECT, trace_layers=LAYERS)
    assert torch.equal(probs, by_hand)
    assert torch.equal(traced, expected)
    assert traced.shape == (4, 6, 3, 16)


def test_a_first_pass_can_be_read_in_the_edits_of_a_second(gpt):
    mlps = [f"{layer}.mlp" for layer in LAYERS]

    def patch(x, layer):
        if layer == EMBED:
            x[1:, 1:3] += corruption(1, 3, x)
        elif not first_pass and layer in LAYERS:
            untuple(x)[1:] = untuple(x)[:1]  # restore all
        elif not first_pass:
            x[1:, 2] = first[layer].output[1:, 2]  # but freeze this
        return x

    results, first = [], {}
    for first_pass in (True, False):
        layers = [EMBED, *LAYERS, *mlps]
        with torch.no_grad(), nethook.TraceDict(gpt, layers, edit_output=patch) as td:
            results.append(gpt(**INP).logits)
        if first_pass:
            first = td
    frozen, free = td[mlps[1]].output, first[mlps[1]].output
    assert torch.equal(frozen[1:, 2], free[1:, 2])
    assert not torch.equal(frozen[1:, 1], free[1:, 1])
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1][0], results[1][1])  # the last layer was restored


def test_representations_are_extracted_with_input_and_stop(gpt):
    layer = "transformer.h.1.mlp.c_proj"
    ran = []
    gpt.lm_head.register_forward_hook(lambda *args: ran.append(1))
    with torch.no_grad():
        with nethook.Trace(
            module=gpt, layer=layer, retain_input=True, retain_output=True, stop=True
        ) as tr:
            gpt(**INP)
    block = gpt.transformer.h[1]
    key = F.gelu(block.mlp.c_fc(gpt_output(gpt, "transformer.h.1.ln_2")))
    assert ran == [1]  # by the oracle only
    assert torch.equal(tr.input, key)
    assert torch.equal(tr.output, block.mlp.c_proj(key))
    assert tr.input[torch.arange(4), torch.tensor([2, 2, 3, 3])].shape == (4, 64)


def test_the_inputs_of_blocks_and_of_modules_called_by_keyword_are_extracted(gpt):
    names = ["transformer.h.2", "transformer.h.2.attn"]
    with torch.no_grad(), nethook.TraceDict(gpt, names, retain_input=True, stop=True) as td:
        gpt(**INP)
    hidden, mask = td["transformer.h.2.attn"].input
    expected = gpt_output(gpt, "transformer.h.1")[0]
    assert torch.equal(hidden, gpt.transformer.h[2].ln_1(expected))
    assert mask.dtype is torch.bool
    assert torch.equal(td["transformer.h.2"].input, expected)
    assert not hasattr(td["transformer.h.2"], "output")


def test_weights_are_edited_and_put_back_under_no_grad(gpt):
    name = "transformer.h.1.mlp.c_proj.weight"
    before = gpt(**INP).logits
    with torch.no_grad():
        saved = nethook.get_parameter(gpt, name).detach().clone()
        u, v = torch.randn(16, 1), torch.randn(1, 64)
        nethook.get_parameter(gpt, name)[...] += u @ v
        changed = gpt(**INP).logits
        assert torch.equal(gpt.transformer.h[1].mlp.c_proj.weight, saved + u @ v)
        nethook.get_parameter(gpt, name)[...] = saved
    assert not torch.equal(changed, before)
    assert torch.equal(gpt(**INP).logits, before)


def test_a_vector_is_optimised_through_an_edit(gpt):
    """As a new value is found for a key: a delta at one token, the weights frozen."""
    layer, target = "transformer.h.1.mlp", torch.tensor(11)
    delta = torch.zeros(16, requires_grad=True)
    first = []

    def edit_output_fn(cur_out, cur_layer):
        if cur_layer == layer:
            if not first:
                first.append(cur_out[0, 2].detach().clone())
            cur_out[:, 2, :] += delta
        return cur_out

    nethook.set_requires_grad(False, gpt)
    optimizer = torch.optim.Adam([delta], lr=0.3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with nethook.TraceDict(
            module=gpt,
            layers=[LAYERS[-1], layer],
            retain_input=False,
            retain_output=True,
            edit_output=edit_output_fn,
        ) as tr:
            logits = gpt(**INP).logits
        loss = F.cross_entropy(logits[:, -1], target.expand(4))
        assert untuple(tr[LAYERS[-1]].output).requires_grad
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(p.grad is None for p in gpt.parameters())
    assert torch.equal(first[0], gpt_output(gpt, layer)[0, 2])
    assert_clean(gpt)


def gpt_output(model, layer):
    (output,) = by_hand(model, lambda m: m(**INP), [layer]).outputs[layer]
    return output
