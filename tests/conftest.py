"""Fixtures of several test files."""

import random
import signal
import zlib

import numpy as np
import pytest
import torch

# What a shell runs in the background ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def seeded():
    """The same weights every time."""
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    """Random numbers that are a test's own, and the same at each run of it."""
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
