"""Find the optimizer whose steps are counted.

- `OptimizerLike`: the protocol of an optimizer
- `innermost(optimizer)`: torch's optimizer inside of wrappers, which calls hooks at its steps
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hookline.errors import PlaceError

__all__ = ["OptimizerLike", "innermost"]


class OptimizerLike(Protocol):
    """An optimizer of torch, or a wrapper that has one as `optimizer`."""

    def step(self) -> Any:
        """Make a step."""


def innermost(optimizer: OptimizerLike) -> torch.optim.Optimizer:
    """Return the optimizer inside of wrappers such as accelerate's, which skip steps and call no
    hooks.

    >>> class Wrapper:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    ...
    ...     def step(self):
    ...         self.optimizer.step()
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> innermost(Wrapper(optimizer)) is optimizer
    True
    """
    found: Any = optimizer
    seen: list[Any] = []
    while found is not None and not any(found is one for one in seen):
        if _calls_hooks(found):
            return found
        seen.append(found)
        found = getattr(found, "optimizer", None)
    raise PlaceError(
        f"watch was given optimizer={optimizer!r:.80}.",
        "It is no torch.optim.Optimizer, whose steps could be counted, and has none as .optimizer.",
        "Leave out optimizer=, and call watching.step() at the end of each step.",
    )


def _calls_hooks(optimizer: Any) -> bool:
    """Return True if hooks can be put on an optimizer; the method of a wrapper fails."""
    try:
        optimizer.register_step_post_hook(_nothing).remove()
    except AttributeError:
        return False
    return True


def _nothing(optimizer: Any, args: Any, kwargs: Any) -> None: ...
