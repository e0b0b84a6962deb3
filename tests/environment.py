"""The repository that is tested, and the version of torch."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
since_the_reset = pytest.mark.skipif(
    TORCH < (2, 13), reason="before torch 2.13, FSDP2 cannot be reset"
)
