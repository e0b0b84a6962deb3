"""What hookline does, end to end on real data: `python -m hookline.demo`, or `make demo`.

A small CNN learns to read scikit-learn's handwritten digits. Then its values are looked at and
changed while it reads digits that it has not seen, and at the end it is as it was.
"""

import sys
from textwrap import fill, indent
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline as hl

__all__ = ["main"]

Rows = list[tuple[str, ...]]


class Digits(NamedTuple):
    """Grey images of 8 x 8 pixels, and the digit that each one shows."""

    images: Tensor
    labels: Tensor


def main() -> None:
    """Run the whole demonstration and print an account of it."""
    torch.set_num_threads(1)  # the same figures whatever the number of cores
    torch.manual_seed(0)

    known, unseen = load_digits()
    model = train(make_model(), known)
    logits, weights = predict(model, unseen), copy_state(model)

    print(f"A CNN of {len(weights):,} weights learned {len(known.labels):,} handwritten digits.")
    print(f"Of {len(unseen.labels)} others it reads {accuracy(model, unseen)} correctly.")

    heading("Look: values and gradients at some places", "with hl.capture(model, ...) as record:")
    show_values(model, unseen)

    heading("Change: the same model, edited while it runs", "with hl.edit(model, place, change):")
    show_edits(model, unseen)

    heading("Ablate: what each channel of conv2 is for", "with hl.edit(..., at=np.s_[:, channel]):")
    show_channels(model, unseen)

    heading("Ask for what is not there", "with hl.capture(model, 'conv3'):")
    show_mistake(model, unseen)

    heading("Afterwards, everything is as it was")
    rows: Rows = [
        ("outputs, bit for bit", same(predict(model, unseen), logits)),
        ("weights, bit for bit", same(copy_state(model), weights)),
        ("hooks left on the model", str(len(hl.attached(model)))),
    ]
    table(rows, "<<")


def load_digits() -> tuple[Digits, Digits]:
    """Three quarters of the digits to learn from, and the rest to be tested on."""
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError:
        sys.exit(
            "The demo learns from scikit-learn's digits. scikit-learn is not installed here. "
            "Install it with: pip install scikit-learn"
        )
    data = cast(Any, load())
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    split = len(labels) * 3 // 4
    return Digits(images[:split], labels[:split]), Digits(images[split:], labels[split:])


def make_model() -> nn.Module:
    """Two convolutions and a classifier, untrained."""
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 8, kernel_size=3, padding=1))
    model.add_module("relu1", nn.ReLU(inplace=True))
    model.add_module("conv2", nn.Conv2d(8, 8, kernel_size=3, padding=1))
    model.add_module("relu2", nn.ReLU(inplace=True))
    model.add_module("pool", nn.MaxPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc", nn.Linear(8 * 4 * 4, 10))
    return model


def train(model: nn.Module, digits: Digits, epochs: int = 12) -> nn.Module:
    """The model, trained in about a second."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(digits.labels)), 64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(digits.images[batch]), digits.labels[batch])
            loss.backward()
            optimizer.step()
    optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module, digits: Digits) -> Tensor:
    """The logits of every image."""
    return model(digits.images)


def accuracy(model: nn.Module, digits: Digits) -> str:
    """The share of images that are read correctly, as a percentage."""
    return percent(predict(model, digits).argmax(1) == digits.labels)


def read_by_digit(model: nn.Module, digits: Digits) -> Tensor:
    """For each of the ten digits, the share of its images that are read correctly."""
    right = predict(model, digits).argmax(1) == digits.labels
    return torch.stack([right[digits.labels == digit].float().mean() for digit in range(10)])


def show_values(model: nn.Module, digits: Digits) -> None:
    """Capture outputs and their gradients in one run, and print a line for each place."""
    # detach=True takes snapshots: the in-place ReLUs overwrite the convolutions' outputs.
    places = ["conv*", "fc", "conv*:grad_output", "fc:grad_output"]
    with hl.capture(model, places, detach=True) as record:
        F.cross_entropy(model(digits.images), digits.labels).backward()
    model.zero_grad()

    rows: Rows = [("place", "shape", "lowest", "mean", "highest", "mean |gradient|")]
    for place in hl.select(model, "conv*", "fc"):
        value, gradient = record[place], record[f"{place}:grad_output"]
        shape = " x ".join(map(str, value.shape))
        figures = (f"{figure:.2f}" for figure in (value.min(), value.mean(), value.max()))
        rows.append((place, shape, *figures, f"{gradient.abs().mean():.1e}"))
    table(rows, "<<>>>>")
    print("\n  The values of conv1 and conv2 are those from before the in-place ReLUs behind them.")


def show_edits(model: nn.Module, digits: Digits) -> None:
    """Print the accuracy under several edits: of activations, of an input, of a weight."""
    edits = [
        ("conv2", "zero()", hl.zero()),
        ("conv2", "scale(0.5)", hl.scale(0.5)),
        ("conv2", "noise(1.0, relative=True)", hl.noise(1.0, relative=True, seed=0)),
        ("fc:input", "clamp(max=1.0)", hl.clamp(max=1.0)),
        ("fc.weight", "noise(0.3)", hl.noise(0.3, seed=0)),
    ]
    rows: Rows = [("place", "change", "accuracy"), ("", "none", accuracy(model, digits))]
    for place, name, change in edits:
        with hl.edit(model, place, change):
            rows.append((place, name, accuracy(model, digits)))
    table(rows, "<<>")


def show_channels(model: nn.Module, digits: Digits) -> None:
    """Switch off one channel after another, and print what it was for."""
    with hl.capture(model, "relu2") as record:
        before = read_by_digit(model, digits)
    channels = record["relu2"].transpose(0, 1)

    rows: Rows = [("channel", "active", "accuracy without it", "digit that suffers most")]
    for channel, values in enumerate(channels):
        with hl.edit(model, "conv2", hl.zero(), at=np.s_[:, channel]):
            score, after = accuracy(model, digits), read_by_digit(model, digits)
        worst = int((before - after).argmax())
        fall = f"{worst}: {before[worst]:.0%} -> {after[worst]:.0%}"
        rows.append((str(channel), percent(values > 0), score, fall))
    table(rows, ">>><")


def show_mistake(model: nn.Module, digits: Digits) -> None:
    """Print what a misspelt place is answered with."""
    try:
        with hl.capture(model, "conv3"):
            predict(model, digits)
    except hl.PlaceNotFound as error:
        print(indent(fill(f"{type(error).__name__}: {error}", 80), "  "))


def copy_state(model: nn.Module) -> Tensor:
    """All parameters and buffers in one tensor."""
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def same(left: Tensor, right: Tensor) -> str:
    """Whether two tensors are equal, in words."""
    return "the same" if torch.equal(left, right) else "DIFFERENT"


def percent(hits: Tensor) -> str:
    """The share of True, as a percentage."""
    return f"{hits.float().mean():.1%}"


def heading(title: str, code: str = "") -> None:
    """Print the title of a section and the line of code that it is about."""
    print(f"\n{title}")
    if code:
        print(f"  {code}\n")


def table(rows: Rows, align: str) -> None:
    """Print rows in columns, each aligned to the left (<) or to the right (>)."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = (f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True))
        print("  " + "   ".join(cells).rstrip())


if __name__ == "__main__":
    main()
