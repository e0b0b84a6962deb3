"""One traced layer, with its options, input and output.

- `Traced`: a layer with its `.input` and `.output`
- `LayerOptions`: the options of a trace for one layer
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
    """The options of a trace for one layer; see `Trace`."""

    retain_output: bool = True
    retain_input: bool = False
    clone: bool = False
    detach: bool = False
    retain_grad: bool = False
    edit_output: Invocation | None = None
    stop: bool = False


def _kept(port: str, words: str) -> Any:
    """Return a property for the retained input or output, which can be read, set and deleted."""
    return property(
        lambda traced: traced.read(port),
        lambda traced, value: traced.kept[port].set(value),
        lambda traced: traced.kept[port].clear(),
        words,
    )


class Traced:
    """One traced layer: its `input` and `output` in the last call.

    A tensor that requires grad is the very one, attached; reading it raises `ValueChanged` if it
    was changed in place since (`clone=True` keeps a copy). Any other is a snapshot.
    """

    def __init__(self, layer: str | None, options: LayerOptions, losses: UnreadWarning) -> None:
        self.layer = layer
        self.stop = options.stop
        self.options = options
        self.kept = {"input": LastValue(losses), "output": LastValue(losses)}
        self._given: tuple[Any, ...] = ()  # the arguments of the last call when it began
        self._closed = False
        self._graded = False  # whether the retained output was made with gradients on

    @property
    def name(self) -> str:
        """The name of the layer in errors and warnings."""
        return "the traced module" if self.layer is None else f"the layer {self.layer!r}"

    output = _kept(
        "output", "The output of the layer, after `edit_output`; or the value that was set instead."
    )
    input = _kept(
        "input",
        """The input of the layer, passed by position: the argument, or a tuple of them if there
        were several; the keyword arguments, in the same way, if there were no others. Or the value
        that was set instead.
        """,
    )

    def read(self, port: str) -> Any:
        """Return the retained input or output; raise if there is none."""
        if not self.kept[port].filled:
            asked = getattr(self.options, f"retain_{port}")
            raise NotRetained(
                f"The {port} of {self.name} was asked for.",
                "It was not called, or its call raised." if asked else f"retain_{port} is False.",
                "Read it after the forward." if asked else f"Trace it with retain_{port}=True.",
            )
        return self.kept[port].read(f"{port} of {self.name}")

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
        self.kept["input"].keep(
            given[0] if len(given) == 1 else given,
            clone=self.options.clone,
            detach=self.options.detach,
            freeze=snapshot if self.layer else duplicate,
            again=again,
        )

    def _keep_output(self, value: Any, call: Call) -> Any:
        options = self.options
        # The graph of a recomputed call counts after a reentrant checkpoint, which makes no other.
        if call.recomputed and (self._graded or not options.retain_grad):
            return value
        if options.retain_grad:
            self._graded = torch.is_grad_enabled()
            kept, value = with_gradient(value)
            self.kept["output"].put(kept, again=call.recomputed)
        else:
            self.kept["output"].keep(value, clone=options.clone, detach=options.detach)
        return value

    def clear(self) -> None:
        """Begin anew: forget what was retained."""
        self._closed, self.stop = False, self.options.stop
        for kept in self.kept.values():
            kept.clear()

    def __repr__(self) -> str:
        held = [port for port, kept in self.kept.items() if kept.filled]
        return f"<{type(self).__name__} at {self.name}, {' and '.join(held) or 'empty'}>"
