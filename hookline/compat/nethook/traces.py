"""Retain, edit and stop at layers.

- `Trace(module, layer, …)`: at one layer, with `.input` and `.output`
- `TraceDict(module, layers, …)`: at several; a dict of `Traced`
- `StopForward`: the exception that ends a forward early
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeAlias, TypeVar, cast

from torch import nn

from hookline.compat.nethook.module_names import get_module, place
from hookline.compat.nethook.optional_arguments import Invocation
from hookline.compat.nethook.retained_values import UnreadWarning
from hookline.compat.nethook.traced_layers import LayerOptions, Traced
from hookline.engine.calls import Call
from hookline.engine.context import targets_of
from hookline.engine.hooking import hook
from hookline.errors import PlaceError, warn_outside

__all__ = ["StopForward", "Trace", "TraceDict"]

T = TypeVar("T")
PerLayer: TypeAlias = T | Mapping[str, T]


class StopForward(BaseException):
    """Ends a forward early; a trace with `stop=True` raises it, and catches it at the end.

    Not an Exception, so that a model's own `except Exception` lets it by. `trace` is the trace
    that raised it, as an opaque object; one without is caught by any trace with `stop=True`.
    """

    def __init__(self, trace: object = None) -> None:
        super().__init__("the traced layer has run, and the forward ends here")
        self.trace = trace


class _Layers:
    """The hooks of a trace. They do not know the trace, so that it can be collected."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Traced]] = {}  # by the id of the module
        self.outputs: dict[int, list[Traced]] = {}

    def before(self, value: dict[Any, Any], call: Call) -> None:
        """Read the arguments of a layer."""
        for traced in self.inputs.get(id(call.module), ()):
            traced.begin(value, call)

    def after(self, value: Any, call: Call) -> Any:
        """Edit, retain and stop at the output of a layer."""
        stops = False
        for traced in self.outputs.get(id(call.module), ()):
            value = traced.complete(value, call)
            stops = stops or traced.stop
        if stops and not call.recomputed:
            raise StopForward(self)
        return value


class _Tracing:
    """The hooks of a trace: they act from its making to `close()`, or until it is collected."""

    def __init__(self, module: nn.Module, traced: Iterable[Traced], losses: UnreadWarning) -> None:
        self._module = module
        self._traced = list(traced)
        self._losses = losses
        self._layers = _Layers()
        self._contexts: list[hook] = []
        self.open()

    def open(self) -> None:
        """Act, afresh; all hooks or none. Nothing happens if it is open already."""
        if self._contexts:
            return
        layers = self._layers = _Layers()
        self._losses.told = False
        for traced in self._traced:
            traced.clear()
        inputs = [t for t in self._traced if t.options.retain_input]
        try:
            self._hook(inputs, "inputs", layers.before, layers.inputs)
            self._hook(self._traced, "output", layers.after, layers.outputs)
        except BaseException as error:
            self.close()
            if isinstance(error, PlaceError):  # a parameter is no layer, whatever is asked of it
                for traced in self._traced:
                    get_module(self._module, _name(traced))
            raise

    def _hook(
        self,
        layers: list[Traced],
        port: str,
        function: Callable[..., Any],
        found: dict[int, list[Traced]],
    ) -> None:
        if not layers:
            return
        context = hook(self._module, [place(_name(t), port) for t in layers], function)
        self._contexts.append(context)
        context.__enter__()
        # One request for each place, in their order; a shared module has several names.
        for traced, target in zip(layers, targets_of(context), strict=True):
            if target.attribute is not None:
                get_module(self._module, _name(traced))  # raises: it is a parameter
            found.setdefault(target.ident, []).append(traced)

    def close(self) -> None:
        """Leave no hook behind; may be called twice."""
        while self._contexts:
            self._contexts.pop().remove()

    def stopped(self, error: BaseException | None) -> bool:
        """Return True if an exception is the stop of this trace, or of none."""
        stops = any(traced.stop for traced in self._traced)
        return stops and isinstance(error, StopForward) and error.trace in (None, self._layers)

    def __del__(self) -> None:
        if self._contexts and not sys.is_finalizing():
            self.close()
            names = ", ".join(traced.name for traced in self._traced[:3])
            warn_outside(
                f"A trace of {names} was dropped before it was closed: it acts no longer. Use it "
                f"in a `with` statement, or keep it and call close()."
            )


def _name(traced: Traced) -> str:
    return "" if traced.layer is None else traced.layer


class _UntilClosed:
    """The base of `Trace` and `TraceDict`, which act until they are closed."""

    _tracing: _Tracing

    def close(self) -> None:
        """End the trace; what was retained stays. May be called twice."""
        self._tracing.close()

    def __enter__(self) -> Self:
        self._tracing.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.close()
        return self._tracing.stopped(error)


def _of_layer(port: str, words: str) -> Any:
    """Return a property of a trace: a value of its layer, which can be read, set and deleted."""
    return property(
        lambda trace: getattr(trace._traced, port),
        lambda trace, value: setattr(trace._traced, port, value),
        lambda trace: delattr(trace._traced, port),
        words,
    )


class Trace(_UntilClosed):
    """Retain what one layer is given and returns, and change it, while a `with` block runs.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with Trace(net, "1", retain_input=True, stop=True) as ret:
    ...     _ = net(torch.zeros(5, 2))
    >>> ret.output.shape, torch.equal(ret.output, ret.input.relu())
    (torch.Size([5, 3]), True)

    Args:
        module: any module; without `layer`, the one to trace.
        layer: the name of a module in it, taken literally.
        retain_output: keep the output, after `edit_output`, as `.output`.
        retain_input: keep the arguments, as they were before the call, as `.input`.
        clone: keep copies of tensors that require grad, attached; all others are snapshots anyway.
        detach: keep snapshots of tensors that require grad, too.
        retain_grad: after a backward, `.output.grad` is the gradient; the rest of the model gets a
            copy, so that in-place operations may follow. It goes before `clone` and `detach`.
        edit_output: a function of (output), (output, layer) or (output, layer, inputs), or of any
            of them by name; `inputs` is the tuple of the arguments passed by position. What it
            returns stands in the output's place; None leaves the output as it is.
        stop: end the forward, and the `with` block, after the layer.

    It acts from its making to the end of the `with` block, or to `close()`. Of several calls the
    last one is retained; if nobody read those before it, reading it warns, once.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: str | None = None,
        retain_output: bool = True,
        retain_input: bool = False,
        clone: bool = False,
        detach: bool = False,
        retain_grad: bool = False,
        edit_output: Callable[..., Any] | None = None,
        stop: bool = False,
    ) -> None:
        edit = _edit(edit_output)
        options = LayerOptions(retain_output, retain_input, clone, detach, retain_grad, edit, stop)
        self.layer = layer
        self.stop = stop
        losses = UnreadWarning()
        self._traced = Traced(layer, options, losses)
        self._tracing = _Tracing(module, [self._traced], losses)

    output = _of_layer(
        "output", "The output of the layer in the last call, after `edit_output`; it can be set."
    )
    input = _of_layer(
        "input",
        """The input of the layer in the last call: the argument, or a tuple of several.

        Those passed by position, as torch's own hooks have them; if there were none, those passed
        by keyword. It can be set.
        """,
    )

    def __repr__(self) -> str:
        return repr(self._traced).replace("Traced", "Trace", 1)


class TraceDict(_UntilClosed, OrderedDict[str, Traced]):
    """Retain and change the values of several layers while a `with` block runs.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with TraceDict(net, ["0", "2"], retain_input={"2": True}) as ret:
    ...     _ = net(torch.zeros(5, 2))
    >>> [(layer, tuple(ret[layer].output.shape)) for layer in ret]
    [('0', (5, 3)), ('2', (5, 1))]
    >>> torch.equal(ret["2"].input, ret["0"].output.relu())
    True

    Args:
        module: any module.
        layers: the names of modules in it; each counts once.
        retain_output, retain_input, clone, detach, retain_grad, edit_output: as in `Trace`, for
            all layers, or as a dict from layers to values. A layer that is not in it is left out;
            one that is in it and not in `layers` is ignored.
        stop: end the forward after the last of `layers`, even if others of them come later; or a
            dict that says after which.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Iterable[str],
        retain_output: PerLayer[bool] = True,
        retain_input: PerLayer[bool] = False,
        clone: PerLayer[bool] = False,
        detach: PerLayer[bool] = False,
        retain_grad: PerLayer[bool] = False,
        edit_output: PerLayer[Callable[..., Any] | None] = None,
        stop: PerLayer[bool] = False,
    ) -> None:
        super().__init__()
        if isinstance(layers, str):
            raise TypeError(
                f"TraceDict was asked for layers={layers!r}. That is one string, not several "
                f"names. Write [{layers!r}], or use Trace."
            )
        self.stop = stop
        names = dict.fromkeys(layers)
        if stop is True and names:
            stop = {next(reversed(names)): True}
        edits: Any = edit_output
        if isinstance(edits, Mapping):
            functions = cast("Mapping[str, Any]", edits).items()
            edits = {name: _edit(function) for name, function in functions}
        else:
            edits = _edit(edits)  # one for all: reading a signature takes time
        given = (retain_output, retain_input, clone, detach, retain_grad, edits, stop)
        losses = UnreadWarning()
        for name in names:
            self[name] = Traced(name, _options_of(given, name), losses)
        self._tracing = _Tracing(module, self.values(), losses)


def _edit(function: Any) -> Invocation | None:
    """Return a function that edits; None for False, as a condition may give it."""
    return None if function is None or function is False else Invocation(function)


_LEFT_OUT = LayerOptions(retain_output=False)


def _options_of(given: tuple[Any, ...], layer: str) -> LayerOptions:
    """Return the options of one layer, if some were given as a dict."""
    values = [
        cast("Mapping[str, Any]", value).get(layer, default)
        if isinstance(value, Mapping)
        else value
        for value, default in zip(given, _LEFT_OUT, strict=True)
    ]
    return LayerOptions._make(values)
