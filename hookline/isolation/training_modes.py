"""Read and set the training and evaluation modes of modules, module by module.

- `modes_of(modules)`: the mode of each module, None for one that has none
- `set_modes(modules, modes)`: put these modes back
- `set_mode(model, training)`: put a model in one mode, as `model.train()` does
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["modes_of", "set_mode", "set_modes"]


def modes_of(modules: Sequence[nn.Module]) -> list[bool | None]:
    """Return the mode of each module; None for a frozen ScriptModule, which has none.

    >>> modes_of([nn.ReLU(), nn.ReLU().eval()])
    [True, False]
    """
    return [getattr(module, "training", None) for module in modules]


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool | None]) -> None:
    """Put the modes of modules back, as `modes_of` gave them."""
    for module, was, now in zip(modules, modes, modes_of(modules), strict=True):
        if was is None:
            vars(module).pop("training", None)  # set there by `model.eval()`
        elif now != was:
            module.training = was


def set_mode(model: nn.Module, training: bool) -> None:
    """Put a model in one mode; an exported program in it stays in that of its export.

    >>> model = nn.Sequential(nn.ReLU())
    >>> set_mode(model, False)
    >>> model[0].training
    False
    """
    try:
        model.train(training)
    except NotImplementedError:  # raised by exported programs
        for child in model.children():
            set_mode(child, training)
