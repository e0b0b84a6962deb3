"""Handwritten digits and a small CNN that reads them; several examples share it."""

from typing import NamedTuple

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Digits", "accuracy", "load_digits", "make_model", "predict", "read_by_digit", "train"]


class Digits(NamedTuple):
    """Grey images of 8 x 8 pixels, and the digit that each one shows."""

    images: Tensor
    labels: Tensor


def load_digits() -> tuple[Digits, Digits]:
    """Three quarters of scikit-learn's digits to learn from, and the rest to test on."""
    data = sklearn.datasets.load_digits()
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


def read_by_digit(model: nn.Module, digits: Digits) -> Tensor:
    """For each of the ten digits, the share of its images that are read correctly."""
    right = predict(model, digits).argmax(1) == digits.labels
    return torch.stack([right[digits.labels == digit].float().mean() for digit in range(10)])


def accuracy(model: nn.Module, digits: Digits) -> str:
    """The share of images that are read correctly, as a percentage."""
    right = predict(model, digits).argmax(1) == digits.labels
    return f"{right.float().mean():.1%}"
