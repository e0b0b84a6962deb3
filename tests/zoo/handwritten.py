"""Small models of many kinds, each with a step that uses it.

- `MODELS`: by name, a function that gives the model and the step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from models import QueryKeyValue, Recursive
from promises import Step, forward_and_backward
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Residual(nn.Module):
    """Two convolutions; each ReLU overwrites what it is given, and the sum is made in place."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)  # one module, called twice
        self.shortcut = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResidualCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(8), Residual(8, 2), Residual(8))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class UNet(nn.Module):
    """Down and up again, with a connection across at each scale."""

    def __init__(self, time: int = 0) -> None:
        super().__init__()
        widths = (4, 8, 16)
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(self._block(b + a, a) for a, b in pairwise(widths))
        self.leave = nn.Conv2d(4, 1, 1)
        self.time = nn.ModuleList(nn.Linear(time, b) for b in widths[1:]) if time else None

    @staticmethod
    def _block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(True))

    def forward(self, x: Tensor, moment: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        across = []
        for n, block in enumerate(self.down):
            across.append(x)
            x = block(F.avg_pool2d(x, 2))
            if self.time is not None:
                x = x + self.time[n](moment)[:, :, None, None]
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, across.pop()], 1))
        return self.leave(x)


class Denoiser(nn.Module):
    """Predicts the noise that was added to a picture; samples by taking it away step by step."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.net = UNet(time=16)
        self.register_buffer("kept", torch.linspace(0.99, 0.2, steps))

    def moment(self, step: Tensor) -> Tensor:
        waves = step[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
        return self.embed(torch.cat([waves.sin(), waves.cos()], 1))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.net(x, self.moment(step.float()))

    def sample(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape)
        for n in reversed(range(len(self.kept))):
            noise = self(x, torch.full(shape[:1], n))
            x = (x - (1 - self.kept[n]).sqrt() * noise) / self.kept[n].sqrt()
        return x


def diffuse(model: nn.Module) -> Any:
    """Train on one noisy batch, then sample: one call with gradients, four without."""
    picture, noise = torch.rand(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    step = torch.tensor([0, 3])
    kept = model.kept[step][:, None, None, None]
    loss = F.mse_loss(model(kept.sqrt() * picture + (1 - kept).sqrt() * noise, step), noise)
    loss.backward()
    with torch.no_grad():
        return loss, model.sample((2, 1, 8, 8))


class Recurrent(nn.Module):
    """Sequences of several lengths through an LSTM of two layers, then a cell step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)
        self.cell = nn.GRUCell(16, 7)
        self.out = nn.Linear(7, 11)

    def forward(self, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        output, state = self.lstm(packed)
        seen, _ = pad_packed_sequence(output, batch_first=True)
        hidden = seen.new_zeros(len(tokens), 7)
        logits = []
        for n in range(seen.shape[1]):
            hidden = self.cell(seen[:, n], hidden)
            logits.append(self.out(hidden))
        return torch.stack(logits, 1), state


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh()
        )
        self.critic = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.2, True), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.generator(noise))


def play(model: nn.Module) -> Any:
    """A step of the critic on true and made data, then one of the generator through the critic."""
    true, noise = torch.randn(6, 8), torch.randn(6, 4)
    made = model.generator(noise)
    loss = F.softplus(-model.critic(true)).mean() + F.softplus(model.critic(made.detach())).mean()
    loss.backward()
    score = F.softplus(-model(noise)).mean()
    score.backward()
    return loss, score, made


class VAE(nn.Module):
    """The encoder returns a Distribution, and so does the decoder."""

    class Gaussian(nn.Module):
        def __init__(self, width: int, latent: int) -> None:
            super().__init__()
            self.mean = nn.Linear(width, latent)
            self.spread = nn.Linear(width, latent)

        def forward(self, x: Tensor) -> Normal:
            return Normal(self.mean(x), F.softplus(self.spread(x)))

    class Choice(nn.Module):
        def __init__(self, latent: int, width: int) -> None:
            super().__init__()
            self.logits = nn.Linear(latent, width * 3)

        def forward(self, z: Tensor) -> Categorical:
            return Categorical(logits=self.logits(z).unflatten(-1, (-1, 3)))

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ELU(inplace=True))
        self.encode = self.Gaussian(12, 2)
        self.decode = self.Choice(2, 6)

    def forward(self, x: Tensor) -> tuple[Normal, Categorical]:
        latent = self.encode(self.body(x.float()))
        return latent, self.decode(latent.rsample())


def reconstruct(model: nn.Module) -> Any:
    x = torch.randint(3, (5, 6))
    latent, decoded = model(x)
    loss = kl_divergence(latent, Normal(0.0, 1.0)).sum() - decoded.log_prob(x).sum()
    loss.backward()
    return loss, latent, decoded


class Routed(NamedTuple):
    mixed: Tensor
    weights: Tensor
    load: Tensor


class Experts(nn.Module):
    """Each row goes to two of the experts: some of them see few rows, or none."""

    def __init__(self, count: int = 6, width: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)) for _ in range(count)
        )
        with torch.no_grad():
            self.gate.weight[-1] = 0
            self.gate.weight[0] = 5

    def forward(self, x: Tensor) -> Routed:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == n)
            if len(row):
                mixed.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
        return Routed(mixed, weights, torch.bincount(chosen.flatten(), minlength=len(self.experts)))


class Graph(nn.Module):
    """Messages along the edges of a graph, by a sparse matrix and by index; a shared layer."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.message = nn.Linear(2 * width, width)
            self.update = nn.GRUCell(width, width)

        def forward(self, graph: dict[str, Tensor]) -> dict[str, Tensor]:
            nodes, (a, b) = graph["nodes"], graph["edges"]
            sent = torch.tanh(self.message(torch.cat([nodes[a], nodes[b]], -1)))
            received = torch.zeros_like(nodes).index_add(0, b, sent)
            return {**graph, "nodes": self.update(received, nodes)}

    class Gather(nn.Module):
        def forward(self, adjacency: Tensor, nodes: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, nodes)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.layer = self.Layer(5)
        self.gather = self.Gather()
        self.out = nn.Linear(5, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graph = {"nodes": self.enter(nodes), "edges": edges}
        for _ in range(3):
            graph = self.layer(graph)
        shape, ones = (len(nodes), len(nodes)), torch.ones(edges.shape[1])
        adjacency = torch.sparse_coo_tensor(edges, ones, shape, check_invariants=True)
        return self.out(self.gather(adjacency.coalesce(), graph["nodes"]))


class Siamese(nn.Module):
    """One tower under two names, called for both arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
        self.right = self.left
        self.distance = nn.PairwiseDistance()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.distance(self.left(a), self.right(b))


class Attention(nn.Module):
    """Heads made of views of one projection, a residual stream changed in place, tied weights."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.qkv = QueryKeyValue(width)
        self.mix = nn.MultiheadAttention(width, heads, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(width, heads, 16, 0.1, batch_first=True)
        self.dropout = nn.Dropout(0.2, inplace=True)
        self.out = nn.Linear(width, 13, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed, _ = self.mix(x, x, x, need_weights=False)
        x += mixed
        return self.out(self.dropout(self.encoder(x)))


Making = Callable[[], tuple[nn.Module, Step]]


def _calling(make: Callable[[], nn.Module], **arguments: Any) -> Making:
    return lambda: (make(), forward_and_backward(arguments))


def _numbers(*shape: int, high: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(0)
    if high:
        return torch.randint(high, shape, generator=random)
    return torch.randn(shape, generator=random)


MODELS: dict[str, Making] = {
    "residual CNN, in-place ReLUs": _calling(ResidualCNN, x=_numbers(4, 3, 8, 8)),
    "U-Net": _calling(UNet, x=_numbers(2, 1, 8, 8)),
    "diffusion UNet": lambda: (Denoiser(), diffuse),
    "LSTM and a cell": _calling(Recurrent, tokens=_numbers(3, 5, high=11), lengths=[5, 3, 2]),
    "GAN": lambda: (GAN(), play),
    "VAE with Distributions": lambda: (VAE(), reconstruct),
    "mixture of experts": _calling(Experts, x=_numbers(7, 4).abs()),
    "graph network": _calling(Graph, nodes=_numbers(6, 3), edges=_numbers(2, 14, high=6)),
    "Siamese, shared towers": _calling(Siamese, a=_numbers(4, 5), b=_numbers(4, 5) + 1),
    "attention of views": _calling(Attention, tokens=_numbers(2, 6, high=13)),
    "recursive": _calling(Recursive, x=_numbers(2, 3), depth=3),
}
