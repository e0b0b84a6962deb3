"""Fixtures of several test files."""

import signal

import pytest
import torch

# What a shell runs in the background ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def seeded():
    """The same weights every time."""
    torch.manual_seed(0)
