"""Fixtures of several test files."""

import random
import signal
import zlib

import hypothesis
import numpy as np
import pytest
import torch
from environment import ROOT
from models import small

from hookline import Store

# No deadlines: the first example of a test may take as long as a busy machine lets it.
hypothesis.settings.register_profile("hookline", deadline=None)
hypothesis.settings.load_profile("hookline")

# Their asserts show both sides, as those of test files do.
pytest.register_assert_rewrite(
    "faults", "harvests", "oracles", "stores", "trainings", "tuner_hooks"
)

# What a shell runs in the background ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def seeded():
    """Seed torch: the weights are the same every time."""
    torch.manual_seed(0)


@pytest.fixture
def model():
    """A small model with the same weights every time."""
    return small(seed=0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a new folder the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["GPT-2", "Llama"])
def decoder(request):
    """A tiny decoder of transformers, with the places that tests need."""
    from language_models import described  # transformers is optional

    return described(request.param)


@pytest.fixture
def counted(tmp_path):
    """A folder with a store of seven appends, three samples each."""
    from stores import append_counted  # asserts of it are rewritten

    folder = tmp_path / "acts"
    with Store.create(folder, metadata={"model": "m"}, shard_bytes=100, sync="never") as writer:
        for _ in range(7):
            append_counted(writer)
    return folder


@pytest.fixture
def data():
    """Fifty rows of four numbers, in batches of eight."""
    torch.manual_seed(1)
    return torch.randn(50, 4).split(8)


@pytest.fixture
def to(tmp_path):
    """The folder for a store. It does not exist yet."""
    return tmp_path / "acts"


@pytest.fixture
def benchmarks_are_importable(monkeypatch):
    """Make the modules of the benchmarks importable."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def pytest_runtest_setup(item):
    """Seed all generators by the name of the test."""
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
