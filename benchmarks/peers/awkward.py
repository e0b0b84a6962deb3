"""Small models that are awkward in one way each, for the probes."""

from __future__ import annotations

import threading

import torch
from torch import nn


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 4
        self.first = nn.Linear(4, 4)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.activation(self.first(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 4
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Thrice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 4
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


class Keyword(nn.Module):
    """A layer that is called with a keyword argument only."""

    class Inner(nn.Linear):
        def forward(self, *, x):
            return super().forward(x)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 4
        self.inner = self.Inner(4, 4)

    def forward(self, x):
        return self.inner(x=x * 2)


class Meddled(nn.Module):
    """Another thread uses the same layer while the model runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 4
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        other = threading.Thread(target=self.layer, args=(x + 1,))
        other.start()
        other.join()
        return y


class Failure(Exception):
    pass


class Failing(nn.Module):
    def forward(self, x):
        raise Failure("on purpose")


class Counting(nn.Linear):
    ran = 0

    def forward(self, x):
        Counting.ran += 1
        return super().forward(x)
