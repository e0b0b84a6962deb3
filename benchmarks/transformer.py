"""The models of the benchmarks.

- `Transformer`: 12 layers and 163 modules, 162 with a forward; all activations have the same size
- `Size`: how large; `TINY` is the worst case for hooks, `LARGE` for copies
- `GPT2`: 12 layers, 768 wide, as the smallest of OpenAI's, with random weights
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x)
        )
        return self.out(mixed)


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.activation = nn.SiLU()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Every activation has the same size, batch × length × width."""

    def __init__(self, width: int, length: int, layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(width, width)
        self.positions = nn.Embedding(length, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width)
        self.register_buffer("steps", torch.arange(length))

    def forward(self, ids: Tensor) -> Tensor:
        # The positions are given the batch's shape: their activation then has the common size.
        x = self.tokens(ids) + self.positions(self.steps.expand_as(ids))
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.c_proj(mixed.transpose(-2, -3).flatten(-2))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    vocabulary = 50_257

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(self.vocabulary, width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, self.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[-1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@dataclass(frozen=True)
class Size:
    name: str
    batch: int
    length: int
    width: int

    def build(self) -> tuple[Transformer, Tensor]:
        torch.manual_seed(0)
        model = Transformer(self.width, self.length)
        assert len(list(model.modules())) == 163
        return model, torch.randint(self.width, (self.batch, self.length))


TINY = Size("32 elements", batch=1, length=4, width=8)
# Short rows keep the arithmetic small beside the memory traffic that cloning is about.
LARGE = Size("98 KB", batch=96, length=16, width=16)
