"""Tiny language models of transformers, their prompts, and how they generate."""

import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

LENGTH, NEW, WIDTH, HEADS, WORDS = 6, 5, 32, 4, 50


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS, n_positions=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5():
    config = transformers.T5Config(
        d_model=WIDTH, d_ff=64, d_kv=8, num_heads=HEADS, num_layers=2, vocab_size=WORDS,
        decoder_start_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


# Where the places are that the tests need: a block, its MLP, and what the heads' outputs go into.
LANGUAGE_MODELS = {
    "GPT-2": SimpleNamespace(
        make=gpt2, block="transformer.h.0", mlp="transformer.h.1.mlp",
        heads="transformer.h.0.attn.c_proj", embed="transformer.wte", norm="transformer.ln_f",
    ),
    "Llama": SimpleNamespace(
        make=llama, block="model.layers.0", mlp="model.layers.1.mlp",
        heads="model.layers.0.self_attn.o_proj", embed="model.embed_tokens", norm="model.norm",
    ),
    "T5": SimpleNamespace(
        make=t5, block="decoder.block.0", mlp="decoder.block.1.layer.2.DenseReluDense",
        heads="decoder.block.0.layer.0.SelfAttention.o", embed="decoder.embed_tokens",
        norm="decoder.final_layer_norm",
    ),
}  # fmt: skip


def tiny(name):
    """Return a tiny model with large weights: with small ones it repeats one word."""
    torch.manual_seed(0)
    model = LANGUAGE_MODELS[name].make().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3)
    return model


def described(name):
    """Return a tiny model with the places that tests need."""
    return SimpleNamespace(**vars(LANGUAGE_MODELS[name]), model=tiny(name))


def prompt(batch=2, seed=0):
    """Return prompts without special tokens."""
    return torch.randint(3, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def generate(model, ids=None, **options):
    """Generate exactly NEW words after a prompt."""
    ids = prompt() if ids is None else ids
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, **options)


def padded_prompts(side):
    """Return two prompts of 3 and 6 tokens in one batch, and its mask."""
    ids, mask = prompt(), torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        ids[0] = torch.cat([torch.zeros(3, dtype=torch.long), ids[0, :3]])
        mask[0, :3] = 0
    else:
        ids[0, 3:] = 0
        mask[0, 3:] = 0
    return ids, mask
