"""One traced layer: what is asked of it, and what it gave.

- `Traced`: a layer with its `.input` and `.output`
- `Options`: what is asked of it
- `NotRetained`: the error of a layer that does not have what is asked for
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hookline.compat.nethook.invocations import Invocation
from hookline.compat.nethook.retention import Kept, with_gradient
from hookline.core.taps import Call
from hookline.errors import NotCaptured
from hookline.values.snapshots import duplicate, snapshot

__all__ = ["NotRetained", "Options", "Traced"]


class NotRetained(NotCaptured, AttributeError):
    """A trace was asked for what it does not have; `hasattr` says no."""


class Options(NamedTuple):
    """What is asked of a layer; see `Trace`."""

    retain_output: bool = True
    retain_input: bool = False
    clone: bool = False
    detach: bool = False
    retain_grad: bool = False
    edit_output: Invocation | None = None
    stop: bool = False

    @property
    def at_output(self) -> bool:
        """Whether the layer is hooked at its output; where nothing is asked, so that a wrong name
        is told.
        """
        acts = self.retain_output or self.stop or self.edit_output is not None
        return acts or not self.retain_input


class Traced:
    """One traced layer: its `input` and `output` in the last call.

    A tensor that requires grad is the very one, attached; reading it raises `ValueChanged` if it
    was changed in place since (`clone=True` keeps a copy). Any other is a snapshot.
    """

    def __init__(self, layer: str | None, options: Options) -> None:
        self.layer = layer
        self.stop = options.stop
        self.options = options
        self._input, self._output = Kept(), Kept()
        self._graded = False  # whether the retained output was made with gradients on

    @property
    def name(self) -> str:
        """The layer as errors and warnings have it."""
        return "the traced module" if self.layer is None else f"the layer {self.layer!r}"

    @property
    def output(self) -> Any:
        """What the layer returned, after `edit_output`."""
        return self._read("output", self._output, self.options.retain_output)

    @property
    def input(self) -> Any:
        """What the layer was given by position: the argument, or a tuple of them if there were
        several; the keyword arguments, in the same way, if there were no others.
        """
        return self._read("input", self._input, self.options.retain_input)

    def _read(self, port: str, kept: Kept, asked: bool) -> Any:
        if not kept.filled:
            raise NotRetained(
                f"The {port} of {self.name} was asked for.",
                "It was not called, or its call raised." if asked else f"retain_{port} is False.",
                "Read it after the forward." if asked else f"Trace it with retain_{port}=True.",
            )
        return kept.read(f"{port} of {self.name}")

    def take_input(self, value: dict[Any, Any], call: Call) -> bool:
        """Retain the arguments of a call; whether a value that nobody had read was lost."""
        if call.recomputed or not self.options.retain_input:
            return False
        given = list(value.values())
        given = tuple(given[: call.positional] or given)
        # Others may hold the address of the model's own arguments: those are copied at once.
        return self._input.keep(
            given[0] if len(given) == 1 else given,
            clone=self.options.clone,
            detach=self.options.detach,
            freeze=snapshot if self.layer else duplicate,
        )

    def take_output(self, value: Any, call: Call) -> tuple[Any, bool]:
        """What the model goes on with; and whether a value that nobody had read was lost."""
        options = self.options
        if options.edit_output is not None:
            new = options.edit_output(output=value, layer=self.layer)
            value = value if new is None else new
        if not options.retain_output or (call.recomputed and not self._wants_again()):
            return value, False
        if options.retain_grad:
            self._graded = torch.is_grad_enabled()
            kept, value = with_gradient(value)
            return value, self._output.put(kept) and not call.recomputed
        return value, self._output.keep(value, clone=options.clone, detach=options.detach)

    def _wants_again(self) -> bool:
        """Whether the graph of a recomputed call counts: reentrant checkpoints make no other."""
        return self.options.retain_grad and not self._graded

    def clear(self) -> None:
        """Forget what was retained."""
        self._input.clear()
        self._output.clear()

    def __repr__(self) -> str:
        held = [p for p in ("input", "output") if getattr(self, f"_{p}").filled]
        return f"<{type(self).__name__} at {self.name}, {' and '.join(held) or 'empty'}>"
