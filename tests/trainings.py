"""Trainings to watch, and the oracle for the measured numbers."""

import numpy as np
import pytest
import torch
from models import NormDropoutResidual
from torch.nn import functional as F


def labelled_batch(step, size=16):
    """Return the rows and labels of a step, the same every time."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


def train(model, optimizer, steps, parts=1, after=None, first=0):
    """Train, and return copies of all outputs, gradients, parameters and buffers."""
    seen = []
    for step in range(first, first + steps):
        x, y = labelled_batch(step)
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            out = model(part_x)
            (F.cross_entropy(out, part_y) / parts).backward()
            seen.append(out.detach().clone())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if after is not None:
            after(step)
        optimizer.step()
        optimizer.zero_grad()
        seen += [t.clone() for t in model.state_dict().values()]
    return seen


def fresh(seed=0, make=NormDropoutResidual, **options):
    """Return a model with the same weights every time, and its optimizer."""
    torch.manual_seed(seed)
    model = make()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **options)


def assert_measured(measured, place, kind, values, **tolerance):
    """Check measured statistics against the values themselves."""
    found = measured[place, kind]
    values = torch.as_tensor(values).detach().double().numpy()
    expected = {
        "mean": values.mean(), "std": values.std(), "absmax": np.abs(values).max(),
        "norm": np.sqrt((values**2).sum()), "zeros": (values == 0).mean(), "nonfinite": 0.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, **({"rel": 1e-4, "abs": 1e-7} | tolerance)), name


class OptimizerWrapper:
    """Wraps an optimizer without being one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()
