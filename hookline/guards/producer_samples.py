"""Keep the inputs and outputs of a producer of bad numbers during a run.

- `ProducerSample`: those of one operation or call of a trace, by its number
- `RunSettings`: the random numbers and the autocast settings of a moment
- `kept_value(value)`: a nested value that later changes do not reach
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline.guards.kept_calls import autocast_settings
from hookline.torch_private import without_function_modes
from hookline.values.nested import Path, leaves, map_leaves
from hookline.values.snapshots import snapshot

if TYPE_CHECKING:
    from hookline.guards.forward_trace import TracedCall

__all__ = ["ProducerSample", "RunSettings", "kept_value"]


def kept_value(value: Any) -> Any:
    """Return a nested value of detached snapshots."""
    return map_leaves(lambda leaf: snapshot(leaf) if isinstance(leaf, Tensor) else leaf, value)


class RunSettings:
    """The random numbers and the autocast settings of a moment; a forward may change both."""

    __slots__ = ("autocast", "random")

    def __init__(self) -> None:
        self.random = torch.get_rng_state()
        self.autocast = autocast_settings(("cpu", "cuda"))


class ProducerSample:
    """The inputs and outputs of one operation or call of a trace, by its number.

    With `backward`, gradients of the output are kept, too.
    """

    def __init__(self, number: int, operation: bool, backward: bool = False) -> None:
        self.number, self.is_operation, self._backward = number, operation, backward
        self.function: Any = None  # for an operation
        self.arguments: tuple[Any, Any] | None = None  # for an operation, as they were passed
        self.inputs: Any = None  # the module's, by name; None if its call had ended before
        self.positional = 0
        self.path = ""
        self.module: nn.Module | None = None
        self.output: Any = None  # None if the producer did not run
        self.settings = self.module_settings = RunSettings()
        self._ended = False  # True if the call of the module around it has ended
        self.gradients: dict[Path, Tensor] = {}  # of the output
        self.module_gradients: dict[Path, Tensor] = {}

    def keep_call(self, running: TracedCall) -> None:
        """Keep the inputs and settings of a running call."""
        self.inputs, self.positional = running.inputs, running.positional
        self.path, self.module = running.path, running.module
        self.module_settings = running.settings

    def keep_output(self, made: Any) -> None:
        """Keep the output, and the gradients that reach it."""
        self.output = kept_value(made)
        self._keep_gradients(made, self.gradients)

    def keep_module_gradients(self, output: Any) -> None:
        """Keep the gradients of the module around the operation, of its first call that ends."""
        if not self._ended:
            self._ended = True
            self._keep_gradients(output, self.module_gradients)

    def _keep_gradients(self, value: Any, kept: dict[Path, Tensor]) -> None:
        for path, tensor in leaves(value) if self._backward else ():
            if tensor.requires_grad and tensor.grad_fn is not None:

                def keep(gradient: Tensor | None, path: Path = path) -> None:
                    if gradient is not None:  # a result that was not used has none
                        with without_function_modes():
                            kept[path] = gradient.detach().clone()

                tensor.register_hook(keep)
