"""Fixtures of several test files."""

import pytest
import torch


@pytest.fixture
def seeded():
    """The same weights every time."""
    torch.manual_seed(0)
