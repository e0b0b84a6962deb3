"""The four kinds of hooks, and the handles of registered ones.

- `FPH`, `FH`, `FBPH`, `FBH`: the kinds, in the order in which torch runs them
- `HookKind`: the properties of such a kind
- `Handle`: the result of a registration
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from hookline.engine.context import Context

__all__ = ["FBH", "FBPH", "FH", "FPH", "Handle", "HookKind"]


@dataclass(frozen=True, eq=False)
class HookKind:
    """One of torch's four kinds of hooks."""

    rank: int  # torch runs the hooks of a layer in this order, whichever was registered first
    method: str
    port: str  # what an update changes
    folder: str
    ending: str  # of the names of files


FPH = HookKind(0, "register_fph", ":input", "saved_forward_prehook_inputs", "forward_prehook")
FH = HookKind(1, "register_fh", ":output", "saved_forward_hook_values", "forward_hook")
FBPH = HookKind(
    2, "register_fbph", ":grad_output",
    "saved_full_backward_prehook_gradients", "full_backward_prehook",
)  # fmt: skip
FBH = HookKind(
    3, "register_fbh", ":grad_input", "saved_full_backward_hook_gradients", "full_backward_hook"
)


class Handle:
    """The result of a registration. `remove()`, or the end of a `with` block, ends it.

    >>> import torch
    >>> from hookline.compat.torch_tuner import Hooks
    >>> model = torch.nn.Sequential(torch.nn.Identity())
    >>> with Hooks(model, 0).register_fh(update=True, add_noise_output=True, noise_output=2):
    ...     model(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(self, kind: HookKind) -> None:
        self.kind = kind
        self._contexts: list[Context] = []
        self.live = False

    def attach(self, contexts: Iterable[Context]) -> None:
        """Enter contexts, all or none of them, each as soon as it is made."""
        self.live, self._contexts = True, []
        try:
            for context in contexts:
                self._contexts.append(context)
                context.attach()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Stop acting and leave nothing on the model. May be called twice."""
        self.live = False
        for context in self._contexts:
            context.remove()

    def attach_again(self) -> None:
        """Enter the contexts again after `remove()`."""
        self.attach(self._contexts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<handle of {self.kind.method}, {'live' if self.live else 'removed'}>"
