"""Why nothing happened at a place: the reasons that errors and `record.unfired()` give.

- `reason(handler, model, others)`: why nothing happened, and what to do
- `never_fired(handler, verb, model, others, matches)`: the error for it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hookline.engine import gradients
from hookline.engine.call_choice import ranges
from hookline.engine.handlers import Handler
from hookline.engine.operations import not_called
from hookline.errors import NeverFired
from hookline.places.grammar import is_gradient
from hookline.places.tree import walk

__all__ = ["never_fired", "reason"]

_NAME_OTHERS = "Name calls that come, or a slice of calls: one of those is enough."
_SHOW_ALL = "A capture of '**' shows what is called, in record.places() and record.unfired()."


def reason(handler: Handler, model: Any, others: bool) -> tuple[str, str]:
    """Explain why nothing happened at a place; return what was found, and what to do about it.

    `others` tells whether something happened elsewhere. What to do is "" where nothing special is
    known.
    """
    target, tracer = handler.target, handler.tracer()
    handler.explain_lost()
    if handler.unknown_steps:
        call, unknown = next(iter(handler.unknown_steps.items()))
        return f"call {call} cannot be told: {unknown.found}", unknown.remedy
    why = handler.why()
    if why is not None:
        return why
    if handler.known_reason and target.port != "grad":
        return handler.known_reason, ""
    if tracer is not None and tracer.foreign_calls(handler):
        return _foreign(handler, tracer.foreign_calls(handler))
    if target.operation is not None and not _calls_of(handler):
        names = () if tracer is None else tracer.called_in(target.ident)
        remedy = f"List them with hookline.select(model, '{target.path}/*', inputs=batch)."
        return not_called(target.operation, names), remedy
    if _came(handler)[0]:
        return _none_meant(handler)
    if target.port == "grad":
        return handler.known_reason or gradients.NONE_CAME[0], gradients.NONE_CAME[1]
    return _uncalled(model, handler, others)


def _foreign(handler: Handler, count: int) -> tuple[str, str]:
    """Explain that all calls belonged to other threads and tasks."""
    remedy = "threads='all' takes those calls too."
    if handler.target.operation is not None:
        remedy = "threads='all' takes those of tasks; operations in other threads are never seen."
    return f"its module was called {count}×, but from another thread or task than this.", remedy


def _uncalled(model: Any, handler: Handler, others: bool) -> tuple[str, str]:
    """Explain why a module was not called; the likeliest cause first."""
    ident = handler.target.ident
    named = walk(model) if isinstance(model, nn.Module) else [("", None)]
    path = next((path for path, module in named if module is None or id(module) == ident), None)
    if path is None:
        return "its module was taken out of the model while this was open.", ""
    if path.endswith("out_proj"):
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            found = "nn.MultiheadAttention uses the weights of its out_proj without ever calling "
            return found + "it; ask for the attention module's own output.", ""
    found = "its module was not called. Its forward may have been called directly"
    if not others:
        found = (
            "its module was not called, nor any other that was asked for. Most likely the model "
            "was called before or after the `with`, and not inside it. Or its forward was called "
            "directly"
        )
    found += ", as in module.forward(x), which runs no hooks, or its weights used without it, or "
    found += "the code that calls it was not reached."
    return found, gradients.NONE_CAME[1] if is_gradient(handler.target.port) else ""


def _none_meant(handler: Handler) -> tuple[str, str]:
    """Explain why nothing happened at a place although its module was called."""
    calls, came = handler.ask.calls, _came(handler)[1]
    nothing = f"{came}, and no call was {'changed' if handler.replaces else 'kept'}"
    if _came_before(handler):
        return f"{nothing}: calls= names others, counted from 0.", _NAME_OTHERS
    if is_gradient(handler.target.port):
        found, remedy = gradients.NONE_CAME
        return handler.known_reason or f"{came}, but {found}", remedy
    if calls is not None and calls.step is not None:
        return f"{nothing}: none was of the step {calls.shown}.", ""
    return f"{nothing}: calls= names others, counted from 0.", ""


def never_fired(handler: Handler, verb: str, model: Any, others: bool, matches: str) -> NeverFired:
    """Return the error for a place at which nothing happened, or not at each call that was named.

    `matches` names the other places of the same request at which nothing happened, if any.
    """
    missed = handler.tally()[1]
    if missed and (handler.fired or (handler.calls_missing and _came(handler)[0])):
        return _missed_calls(handler, verb)
    place, calls = str(handler.place), handler.ask.calls
    asked = f"Nothing happened at {place!r}{matches}:"
    if calls is not None and handler.unknown_steps:
        asked = f"The calls {calls.shown} at {place!r} were asked for:"
    elif handler.calls_lost:
        return NeverFired(f"Nothing happened at {place!r}:", *gradients.VIEW_CHANGED)
    found, remedy = reason(handler, model, others)
    return NeverFired(asked, found, remedy or _SHOW_ALL)


def _missed_calls(handler: Handler, verb: str) -> NeverFired:
    """Return the error for a place at which nothing happened at some of the calls."""
    reached, missed = handler.tally()
    asked = f"{verb} was to act at {str(handler.place)!r}:"
    found = f"it did not at {_in_words(missed)}"
    if reached:
        found = f"it did at {_in_words(reached)}, but not at {_in_words(missed)}"
    count, came = _came(handler)
    why = gradients.VIEW_CHANGED if missed[0] in handler.calls_lost else handler.why(missed[0])
    if why is None and count <= missed[0]:
        why = f"{came}, counted from 0.", _NAME_OTHERS
    elif why is None:
        why = (handler.known_reason, _NAME_OTHERS) if handler.known_reason else gradients.NONE_CAME
    return NeverFired(asked, f"{found}: {why[0]}", why[1])


def _in_words(numbers: Sequence[int]) -> str:
    return f"call{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _calls_of(handler: Handler) -> int:
    """Return how often the module, or the operation, at a place was called."""
    tracer = handler.tracer()
    return 0 if tracer is None else tracer.calls_of(handler)


def _came(handler: Handler) -> tuple[int, str]:
    """Return how often something came at a place, and that in words."""
    if handler.target.port == "grad":
        return handler.seen, f"its gradient came {handler.seen}×"
    what = "its module" if handler.target.operation is None else "the operation"
    count = _calls_of(handler)
    return count, f"{what} was called {count}×"


def _came_before(handler: Handler) -> bool:
    """Return True if something came, but only before the first call that was asked for."""
    count, calls = _came(handler)[0], handler.ask.calls
    return count > 0 and calls is not None and calls.step is None and calls.numbers[0] >= count
