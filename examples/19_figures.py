"""All figures on one sheet, of two small networks that learn to read handwritten digits.

`python examples/19_figures.py docs/images/figures.png` draws the sheet of docs/figures.md.
"""

import sys
import tempfile
from pathlib import Path

import digit_reader
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

import hookline as hl
from hookline.view import figures


class Attention(nn.Module):
    """A digit is read as eight tokens, its rows."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.randn(8, 32))
        self.blocks = nn.Sequential(Attention(), Attention())
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        x = self.rows(images[:, 0]) + self.position
        return self.head(self.blocks(x).mean(1))


def watched(model, digits, folder):
    """Train, and write down what each layer gave at every second step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    with hl.watch(model, every=2, optimizer=optimizer, to=folder):
        train(model, digits, optimizer, steps=120)
    return hl.Run(folder)


def train(model, digits, optimizer, steps):
    for _ in range(steps):
        chosen = torch.randperm(len(digits.labels))[:64]
        F.cross_entropy(model(digits.images[chosen]), digits.labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()


def ablated(model, digits):
    """The change of the share of each digit that is read, without each channel."""
    whole = digit_reader.read_by_digit(model, digits)
    lost = []
    for channel in range(8):
        with hl.edit(model, "conv2", hl.zero(), at=np.s_[:, channel]):
            lost.append(digit_reader.read_by_digit(model, digits) - whole)
    return torch.stack(lost).double() * 100


torch.manual_seed(0)
torch.set_num_threads(1)
known, unseen = digit_reader.load_digits()
with tempfile.TemporaryDirectory() as folder:
    model = digit_reader.make_model()
    run = watched(model, known, folder)
    reader = Reader()
    train(reader, known, torch.optim.Adam(reader.parameters(), lr=0.005), steps=200)

    with hl.capture(model, "**", "**:grad_output", detach=True) as record:
        F.cross_entropy(model(unseen.images), unseen.labels).backward()
    with torch.no_grad(), hl.attention(reader, "blocks.*") as patterns:
        reader(unseen.images[:8])
    tops = hl.measure(model, "conv2", statistics=[hl.TopK(dim=1)], data=unseen.images.split(100))
    outputs = ["conv1", "relu1", "conv2", "relu2", "pool", "fc"]

    sheet = Figure(figsize=(17, 17), layout="constrained")
    sheet.get_layout_engine().set(w_pad=0.25, h_pad=0.2)
    axes = sheet.subplots(4, 3).flatten()
    figures.histograms(record, "conv2", ax=axes[0])
    figures.histograms(record, ["conv1", "conv2", "fc"], log=True, ax=axes[1])
    figures.ridge(record, outputs, ax=axes[2])
    figures.along_layers(record, outputs, ax=axes[3])
    figures.gradient_flow(record, ax=axes[4])
    figures.over_steps(run, ax=axes[5])
    figures.feature_maps(record, "relu2", sample=3, ax=axes[6])
    figures.attention_maps(patterns, "blocks.1", sample=3, ax=axes[7])
    figures.top_samples(tops, unseen.images, channels=[0, 3, 5], k=5, ax=axes[8])
    figures.weights(model, "fc.weight", ax=axes[9])
    figures.weights(reader, ax=axes[10])
    names = [f"channel {n}" for n in range(8)]
    words = "digits read without a channel, change (%)"
    figures.effects(ablated(model, unseen), names, range(10), words=words, ax=axes[11])

    target = Path(sys.argv[1] if len(sys.argv) == 2 else Path(folder) / "figures.png")
    sheet.savefig(target, dpi=72, pil_kwargs={"optimize": True})
    print(f"{len(axes)} figures, {target.stat().st_size // 1000} KB")
