"""Make the errors of a guard: search the producer, write its dump, build the message.

- `ErrorBuilder`: makes the errors of a guard
- `bad_gradients(kept)`: the bad gradients of a call's outputs
- `label_of(path)`: a part of the model's output in words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from hookline.errors import HooklineError, NonFiniteError
from hookline.guards.dumps import write_dump
from hookline.guards.faults import Fault, explain, fault_of
from hookline.guards.finite_checks import TensorDescription, is_bad, is_mask
from hookline.guards.kept_calls import KeptCall
from hookline.guards.origin_search import (
    SearchResult,
    backward_causes,
    describe_sample,
    find_backward,
    take_sample,
)
from hookline.guards.origins import IgnoredPlaces, Labelled, Origin, show_line
from hookline.guards.producer_samples import ProducerSample
from hookline.places.tree import join, tensors_of, walk
from hookline.values.nested import show_path

__all__ = ["ErrorBuilder", "bad_gradients", "label_of"]

T = TypeVar("T")
_DIFFERENT = "The second run was bad at other places than the first: something of it is random."
_OTHERWISE = (
    "What is shown is of a third run, which made finite numbers here: something of it is random, "
    "or counts its calls."
)
_NOT_WRITTEN = 'not written: guard(model, to="dumps") writes one for hookline.replay'
_PRODUCERS = ("operation", "module", "memory", "outside")  # kinds that can be run again


def label_of(path: tuple[Any, ...], called: str = "") -> str:
    """Describe a part of the model's output, or of the output of a module in it.

    >>> label_of(("logits", 0))
    "the model's output[logits][0]"
    >>> label_of((), "net")
    "the output of 'net'"
    """
    whose = f"the output of {called!r}" if called else "the model's output"
    return f"{whose}{show_path(path)}"


def bad_gradients(kept: KeptCall) -> Labelled:
    """Return the bad gradients of a call's outputs."""
    found = [(path, gradient) for path, (gradient, _) in kept.gradients.items() if is_bad(gradient)]
    return [(f"gradient of {label_of(p, kept.path)}", TensorDescription.of(g)) for p, g in found]


class ErrorBuilder:
    """Makes the errors of a guard."""

    def __init__(
        self, model: nn.Module, ignored: IgnoredPlaces, to: str | Path | None, scaled: bool
    ) -> None:
        self.model, self.ignored, self.to, self.scaled = model, ignored, to, scaled
        self.busy = False  # True while a call is run again

    def run_again(self, doubts: list[str], search: Callable[..., T], *given: Any) -> T | None:
        """Run a call again; an error of that run is one more doubt."""
        self.busy = True
        try:
            return search(*given)
        except Exception as error:  # noqa: BLE001 - the model's own, and the fault counts more
            doubts.append(f"the second run raised {type(error).__name__}: {error!s:.200}")
            return None
        finally:
            self.busy = False

    def search_backward(
        self, calls: list[KeptCall], hooked: dict[str, Tensor], seen: Labelled, scale: float
    ) -> list[str] | None:
        """Raise if a producer is found; else return doubts, or None if all bad numbers are meant.

        `hooked` are bad gradients of parameters that have hooks.
        """
        doubts: list[str] = []
        for kept in calls:
            found = self._search_call(kept, hooked, scale, doubts)
            if found is None or not found.bad:
                continue
            if not found.origins:
                return None  # all of it is ignored
            raise self.build(kept, found, seen or found.seen, scale)
        return doubts

    def _search_call(
        self, kept: KeptCall, hooked: dict[str, Tensor], scale: float, doubts: list[str]
    ) -> SearchResult | None:
        """Search one call for the origins of bad gradients; add the reasons why it cannot be."""
        if kept.trace is None:
            own = kept.doubts()
            found = None if own else self.run_again(own, find_backward, kept, self.ignored, scale)
            if found is not None and not found.same:
                own.append(
                    "its forward makes bad numbers that are ignored, and its backward of them"
                )
            doubts += own
            return None if own else found
        if kept.backward is None:
            doubts.append("its graph was let go, after many calls or another backward")
            return None
        kept.backward.settle(hooked)  # every node was looked at
        found = backward_causes(kept.backward)
        return None if found.origins and scale > 1 else found  # the scaler will see these

    def build(
        self, kept: KeptCall, found: SearchResult, seen: Labelled, scale: float = 1.0
    ) -> NonFiniteError:
        """Return the error for a call, with the inputs of the producer and a dump of them."""
        origin = found.origins[0]
        fault = fault_of(found.origins, found.trace.often, kept.number, seen)
        if not found.same:
            fault.remarks.append(_DIFFERENT)
        sample, doubts = origin.sample, list[str]()
        if origin.number and kept.trace is None:
            sample = self.run_again(doubts, take_sample, kept, self.ignored, origin, scale)
            if sample is not None:
                describe_sample(sample, origin)
                fault.values, fault.given = origin.values, origin.given
                if not origin.backward and not any(own.bad for _, own in origin.values):
                    fault.remarks.append(_OTHERWISE)
        elif origin.kind == "input":
            given = {path: tensor for path, tensor, _ in kept.versions}
            fault.values = [("", TensorDescription.of(given[origin.parts]))]
        if fault.operation and not fault.source:  # in a module of torch's that the model holds
            fault.source = show_line(kept.line)
        if origin.kind in _PRODUCERS:
            self._write_dump(fault, sample, kept, doubts)
        return self._complete(fault)

    def _write_dump(
        self, fault: Fault, sample: ProducerSample | None, kept: KeptCall, doubts: list[str]
    ) -> None:
        """Write a dump if that was asked for, and tell in the fault where it is or why not."""
        if self.to is None:
            fault.dump = _NOT_WRITTEN
        elif sample is None:
            why = doubts or ["what the producer was given is not known"]
            fault.remarks.append(f"No dump was written: {why[0]}.")
        else:
            try:
                fault.folder = write_dump(self.to, fault, sample, kept)
                fault.dump = f"{fault.folder}: hookline.replay runs it again"
            except (OSError, RuntimeError, HooklineError) as error:  # the fault counts more
                why = str(error).rstrip(".")
                fault.remarks.append(f"The dump could not be written: {why}.")

    def build_outside(self, origins: Sequence[Origin], step: int, seen: Labelled) -> NonFiniteError:
        """Return the error for origins that no call of the model contains."""
        return self._complete(fault_of(origins, set(), step, seen))

    def build_unknown(
        self, step: int, backward: bool, seen: Labelled, doubts: list[str]
    ) -> NonFiniteError:
        """Return the error for a call that cannot be run again as it was."""
        fault = Fault(step, backward, seen)
        fault.remarks = [f"No second run shows it: {one}." for one in dict.fromkeys(doubts)]
        held = [(join(path, name), t) for path, m in walk(self.model) for name, t in tensors_of(m)]
        bad = [name for name, t in held if is_bad(t) and not is_mask(t)]
        fault.remarks += [f"{name!r} holds such numbers now." for name in bad[:1]]
        return self._complete(fault)

    def _complete(self, fault: Fault) -> NonFiniteError:
        """Return the error for a fault, with the class of the module that it is in."""
        if fault.kind not in ("parameter", "buffer", "input", "loss", "unknown"):
            with suppress(AttributeError):  # a parameter's, in a sum
                fault.owner = type(self.model.get_submodule(fault.path)).__name__
        return explain(fault, self.scaled)
