"""Save and restore the random number generators of torch, Python and numpy.

- `RandomState(devices, numpy)`: the states of the generators; `restore()` puts them back
- `fork_rng(*models)`: a context that leaves the generators as they were
- `cuda_devices(model)`: the CUDA devices of the parameters and buffers of a model
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from hookline.isolation.module_index import ModuleIndex

__all__ = ["RandomState", "cuda_devices", "fork_rng"]


class RandomState:
    """The states of the generators at the time when this object is made.

    numpy is left out if `numpy.random` was not imported so far: nobody has seeded it then.

    Args:
        devices: the CUDA devices whose generators are saved, too.
        numpy: False to leave out numpy, whose state takes longer to read than all others.
    """

    def __init__(self, devices: Iterable[torch.device | int] = (), numpy: bool = True) -> None:
        self.torch = torch.get_rng_state()
        self.devices = {device: torch.cuda.get_rng_state(device) for device in devices}
        self.python = random.getstate()
        self.numpy: Any = None
        if numpy and "numpy.random" in sys.modules:
            self.numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def is_current(self) -> bool:
        """Return True if no generator was used since."""
        now = RandomState(self.devices)
        states = [(self.torch, now.torch)]
        states += [(state, now.devices[device]) for device, state in self.devices.items()]
        same = all(torch.equal(state, current) for state, current in states)
        return same and self.python == now.python and self.is_numpy_current()

    def is_numpy_current(self) -> bool:
        """Return True if the generator of numpy was not used since."""
        if self.numpy is None:
            return "numpy.random" not in sys.modules
        state, current = _numpy_values(self.numpy), _numpy_values(np.random.get_state(legacy=False))
        return all(map(np.array_equal, state, current))


def _numpy_values(state: dict[str, Any]) -> list[Any]:
    return [*{**state, "state": None, **state["state"]}.values()]


def cuda_devices(model: nn.Module | ModuleIndex) -> set[torch.device]:
    """Return the CUDA devices on which a model has parameters or buffers."""
    if not torch.cuda.is_initialized():
        return set()
    index = model if isinstance(model, ModuleIndex) else ModuleIndex(model)
    return {tensor.device for tensor in index.tensors if tensor.is_cuda}


@contextmanager
def fork_rng(*models: nn.Module) -> Generator[None]:
    """Restore the generators at the end, so that the same random numbers are drawn again.

    It does what `torch.random.fork_rng` does, for Python and numpy as well, also if `numpy.random`
    was not imported so far.

    >>> with fork_rng():
    ...     first = torch.rand(3)
    >>> bool((first == torch.rand(3)).all())
    True
    """
    _ = np.random  # imports it
    state = RandomState({device for model in models for device in cuda_devices(model)})
    try:
        yield
    finally:
        state.restore()
