"""Awkward models that several test files use."""

import torch
from torch import nn


def small() -> nn.Sequential:
    """Linear, ReLU, Linear: 3 → 4 → 2."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Recursive(nn.Module):
    """Calls itself until the depth is zero, doubling on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        return self.lin(x) if depth == 0 else self(x + depth, depth - 1) * 2


class Failing(nn.Module):
    """Raises what it is given after its first layer has run."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.error is not None:
            raise self.error
        return self.second(x)


class Swallowing(nn.Module):
    """Runs a layer in a `try` that catches what it is told to catch."""

    def __init__(self, caught: type[BaseException]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.caught = caught

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except self.caught:
            x = x + 1
        return self.second(x)
