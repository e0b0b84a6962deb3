"""Guards, and the faults they find."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import hookline as hl

INF = math.inf


def guarded(model: nn.Module, **options: Any) -> hl.guard:
    """Return a guard that writes nothing by default."""
    return hl.guard(model, **{"to": None} | options)


def fault_in(run: Callable[[], Any], model: nn.Module, **options: Any) -> Any:
    """Return the fault that a guard finds in a run."""
    with guarded(model, **options), pytest.raises(hl.NonFiniteError) as found:
        run()
    return found.value.fault


def fault_of(
    model: nn.Module,
    *args: Any,
    backward: bool | Callable[[Any], None] = False,
    **options: Any,
) -> Any:
    """Return the fault that a guard finds in a call and, if asked, in its backward."""

    def step() -> None:
        output = model(*args)
        if callable(backward):
            backward(output)
        elif backward:
            (output[0] if isinstance(output, tuple) else output).sum().backward()

    return fault_in(step, model, **options)
