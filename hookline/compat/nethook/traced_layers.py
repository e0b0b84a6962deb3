"""One traced layer, with its options, input and output.

- `Traced`: a layer with its `.input` and `.output`
- `LayerOptions`: what to do at a layer
- `NotRetained`: the error for a value that was not retained
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch

from hookline.compat.nethook.optional_arguments import Invocation
from hookline.compat.nethook.retained_values import LastValue, UnreadWarning, with_gradient
from hookline.engine.calls import Call
from hookline.errors import NotCaptured
from hookline.values.snapshots import duplicate, snapshot

__all__ = ["LayerOptions", "NotRetained", "Traced"]


class NotRetained(NotCaptured, AttributeError):
    """A value was read that the trace does not retain; `hasattr` returns False."""


class LayerOptions(NamedTuple):
    """What to do at a layer; see `Trace`."""

    retain_output: bool = True
    retain_input: bool = False
    clone: bool = False
    detach: bool = False
    retain_grad: bool = False
    edit_output: Invocation | None = None
    stop: bool = False


class Traced:
    """One traced layer: its `input` and `output` in the last call.

    A tensor that requires grad is the very one, attached; reading it raises `ValueChanged` if it
    was changed in place since (`clone=True` keeps a copy). Any other is a snapshot.
    """

    def __init__(self, layer: str | None, options: LayerOptions, losses: UnreadWarning) -> None:
        self.layer = layer
        self.stop = options.stop
        self.options = options
        self._input, self._output = LastValue(losses), LastValue(losses)
        self._given: tuple[Any, ...] = ()  # the arguments of the last call when it began
        self._closed = False
        self._graded = False  # whether the retained output was made with gradients on

    @property
    def name(self) -> str:
        """The layer as errors and warnings have it."""
        return "the traced module" if self.layer is None else f"the layer {self.layer!r}"

    @property
    def output(self) -> Any:
        """What the layer returned, after `edit_output`; or what was set instead."""
        return self._read("output", self._output, self.options.retain_output)

    @output.setter
    def output(self, value: Any) -> None:
        self._output.set(value)

    @output.deleter
    def output(self) -> None:
        self._output.clear()

    @property
    def input(self) -> Any:
        """What the layer was given by position: the argument, or a tuple of them if there were
        several; the keyword arguments, in the same way, if there were no others. Or what was set.
        """
        return self._read("input", self._input, self.options.retain_input)

    @input.setter  # noqa: A003 - the property above is meant
    def input(self, value: Any) -> None:
        self._input.set(value)

    @input.deleter  # noqa: A003 - the property above is meant
    def input(self) -> None:
        self._input.clear()

    def _read(self, port: str, kept: LastValue, asked: bool) -> Any:
        if not kept.filled:
            raise NotRetained(
                f"The {port} of {self.name} was asked for.",
                "It was not called, or its call raised." if asked else f"retain_{port} is False.",
                "Read it after the forward." if asked else f"Trace it with retain_{port}=True.",
            )
        return kept.read(f"{port} of {self.name}")

    def close(self) -> None:
        """Do nothing any more at this layer; what was retained stays."""
        self._closed, self.stop = True, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, value: dict[Any, Any], call: Call) -> None:
        """Retain the arguments of a call before it may change them in place."""
        if not (call.recomputed or self._closed):
            given = tuple(value.values())
            self._keep_input(given[: call.positional] or given)

    def complete(self, value: Any, call: Call) -> Any:
        """Retain the output of a complete call; return the value for the model."""
        if self._closed:
            return value
        if self.options.retain_input and not call.recomputed:
            # Hooks that came later than this trace may have brought other arguments.
            given = call.args or tuple(call.kwargs.values())
            if list(map(id, given)) != list(map(id, self._given)):
                self._keep_input(given, again=True)
            self._given = ()
        if self.options.edit_output is not None:
            new = self.options.edit_output(output=value, layer=self.layer, inputs=call.args)
            value = value if new is None else new
        return self._keep_output(value, call) if self.options.retain_output else value

    def _keep_input(self, given: tuple[Any, ...], again: bool = False) -> None:
        self._given = given
        # Others may hold the address of the model's own arguments: those are copied at once.
        self._input.keep(
            given[0] if len(given) == 1 else given,
            clone=self.options.clone,
            detach=self.options.detach,
            freeze=snapshot if self.layer else duplicate,
            again=again,
        )

    def _keep_output(self, value: Any, call: Call) -> Any:
        options = self.options
        if call.recomputed and not self._wants_again():
            return value
        if options.retain_grad:
            self._graded = torch.is_grad_enabled()
            kept, value = with_gradient(value)
            self._output.put(kept, again=call.recomputed)
        else:
            self._output.keep(value, clone=options.clone, detach=options.detach)
        return value

    def _wants_again(self) -> bool:
        """Return True if the graph of a recomputed call counts: reentrant checkpoints make no
        other.
        """
        return self.options.retain_grad and not self._graded

    def clear(self) -> None:
        """Begin anew: forget what was retained."""
        self._closed, self.stop = False, self.options.stop
        self._input.clear()
        self._output.clear()

    def __repr__(self) -> str:
        held = [p for p in ("input", "output") if getattr(self, f"_{p}").filled]
        return f"<{type(self).__name__} at {self.name}, {' and '.join(held) or 'empty'}>"
