"""Decide whether forwards over a data set may end before they are complete.

- `EarlyExit`: watches the first forward, which is complete, and decides for the others
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn

from hookline.engine.fsdp import recovers
from hookline.isolation.random_state import RandomState, cuda_devices
from hookline.places.tree import walk
from hookline.torch_checks import require
from hookline.torch_private import BatchNormBase, buffers_of, version_of
from hookline.values.sharding import placements

__all__ = ["EarlyExit"]


class EarlyExit:
    """Decides whether the forwards of a model may be ended early, by one that ran to its end.

    They may not if the end of a forward has effects of its own: random numbers are drawn, which
    others would then draw, or buffers change; if other ranks take part in it; or if torch cannot go
    on after a forward that was ended.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    >>> found = []
    >>> for training in (True, False):
    ...     stopping = EarlyExit(model.train(training))
    ...     with stopping.first():
    ...         _ = model(torch.ones(1, 2))
    ...     found.append(stopping.safe)
    >>> found
    [False, True]
    """

    def __init__(self, model: nn.Module) -> None:
        require("tools")
        self._model = model
        self.safe = False  # until a forward was looked at

    @contextmanager
    def first(self) -> Generator[None]:
        """Watch the forward that runs inside."""
        state = RandomState(cuda_devices(self._model))
        modules = [module for _, module in walk(self._model)]
        before, versions = _buffers_and_versions(modules)
        yield
        now, versions_now = _buffers_and_versions(modules)
        # torch does not count what a norm does to its running statistics.
        norms = [module for module in modules if isinstance(module, BatchNormBase)]
        self.safe = (
            recovers(self._model)
            and not any(placements(p) is not None for p in self._model.parameters())
            and state.is_current()
            and not any(norm.training and norm.track_running_stats for norm in norms)
            and [*map(id, now)] == [*map(id, before)]
            and versions_now == versions
        )


def _buffers_and_versions(modules: list[nn.Module]) -> tuple[list[Tensor], list[int]]:
    """Return the buffers of modules, and how often each was changed in place."""
    held = [buffer for module in modules for buffer in buffers_of(module).values()]
    # accelerate exchanges those that it has offloaded.
    held = [buffer for buffer in held if buffer is not None and not buffer.is_meta]
    return held, [0 if buffer.is_inference() else version_of(buffer) for buffer in held]
