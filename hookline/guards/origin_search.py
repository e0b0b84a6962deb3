"""Run a kept call again, and find what made the numbers that are not finite.

- `find_forward(kept, ignored)`: the origins of bad outputs
- `find_backward(kept, ignored, scale)`: the origins of bad gradients
- `output_origins(kept, trace, output, ignored)`, `backward_causes(backward)`: the origins in a call
  that was traced already
- `take_sample(kept, ignored, origin, scale)`: the inputs and outputs of the producer
- `SearchResult`: the result of a search, and whether it can be trusted
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.arguments import bind
from hookline.guards.backward_trace import BackwardTrace
from hookline.guards.finite_checks import bad_leaves, float_values, infinity_signs
from hookline.guards.forward_trace import ForwardTrace, ModuleHooks, OperationMode
from hookline.guards.kept_calls import KeptCall
from hookline.guards.origins import IgnoredPlaces, Labelled, Origin, label_tensors
from hookline.guards.producer_samples import ProducerSample
from hookline.isolation.backward import graph_nodes, has_reentrant_checkpoint
from hookline.places.tree import join, tensors_of, walk
from hookline.values.nested import get_part, leaves

__all__ = [
    "SearchResult",
    "backward_causes",
    "describe_sample",
    "find_backward",
    "find_forward",
    "output_origins",
    "parameter_names",
    "take_sample",
]


@dataclass
class SearchResult:
    """The origins of bad numbers; none if these are meant, or if nothing was bad."""

    trace: ForwardTrace
    origins: list[Origin] = field(default_factory=list[Origin])
    seen: Labelled = field(default_factory=Labelled)
    bad: bool = False  # True if the second run was bad at all
    same: bool = True  # False if it was bad at other places than the first


def _run(kept: KeptCall, trace: ForwardTrace, args: Any, kwargs: Any) -> Any:
    """Call the model again, with everything shown to a trace."""
    with ModuleHooks(kept.parts.model, trace), OperationMode(trace):
        return kept.called(*args, **kwargs)


def find_forward(kept: KeptCall, ignored: IgnoredPlaces) -> SearchResult:
    """Run a call again and find the origins of what is not finite in its outputs."""
    trace = ForwardTrace(kept.parts, ignored, operations=True)
    with kept.again(gradients=False) as (args, kwargs, _):
        output = _run(kept, trace, args, kwargs)
        found = output_origins(kept, trace, output, ignored)
        for path, tensor in kept.outputs:
            try:
                found.same &= _alike(tensor, get_part(output, path))
            except LookupError:
                found.same = False
        return found


def output_origins(
    kept: KeptCall, trace: ForwardTrace, output: Any, ignored: IgnoredPlaces
) -> SearchResult:
    """Return the origins of what is not finite in the output of a call."""
    found = SearchResult(trace)
    for path, tensor in bad_leaves(output):
        if ignored.output(path, kept.called):
            continue
        found.bad = True
        origins = [o for o in trace.origins_of(tensor) if not o.meant]
        found.origins += [o for o in origins if o not in found.origins]
    # Memory that is bad when it is taken may have been written to since, before it was read.
    found.origins.sort(key=lambda o: (o.kind == "memory", trace.origins.index(o)))
    return found


def _alike(one: Tensor, other: Any) -> bool:
    """Return True if two tensors are not finite at the same places."""
    first, second = float_values(one), float_values(other) if isinstance(other, Tensor) else None
    if first is None or second is None or first.shape != second.shape:
        return first is second
    return torch.equal(first.isfinite(), second.isfinite())


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of every parameter, by id."""
    found: dict[int, str] = {}
    for path, module in walk(model):
        for name, tensor in tensors_of(module):
            found.setdefault(id(tensor), join(path, name))
    return found


def find_backward(kept: KeptCall, ignored: IgnoredPlaces, scale: float) -> SearchResult:
    """Run a call and its backward again and find the origins of bad gradients."""
    trace = ForwardTrace(kept.parts, ignored, operations=True)
    output, backward = _run_both(kept, trace, scale)
    bad = [path for path, tensor in leaves(output) if "n" in infinity_signs(tensor)]
    same = all(ignored.output(path, kept.called) for path in bad)
    return backward_causes(backward, same)


def backward_causes(backward: BackwardTrace, same: bool = True) -> SearchResult:
    """Return the origins of bad gradients in a backward that was traced."""
    bad = bool(backward.bad)
    return SearchResult(backward.trace, backward.causes(), backward.seen, bad, same)


def _run_both(kept: KeptCall, trace: ForwardTrace, scale: float) -> tuple[Any, BackwardTrace]:
    """Call the model again and run its backward, with everything shown to a trace."""
    modules, operations = ModuleHooks(kept.parts.model, trace), OperationMode(trace)
    with kept.again(gradients=True) as (args, kwargs, inputs), modules:
        with operations:
            output = kept.called(*args, **kwargs)
        paths = parameter_names(kept.parts.model)
        wanted = [(paths[id(p)], p) for p in kept.parts.parameters if p.requires_grad] + inputs
        names = {id(tensor): name for name, tensor in wanted}
        backward = BackwardTrace(trace, names, modules, operations)
        try:
            backward.watch(tensor for _, tensor in leaves(output))
            operations.recomputed = backward.recomputed
            modules.left = lambda module, made: backward.recomputed(made)
            backward.settle(_gradients(kept, output, wanted, scale))
        finally:
            backward.remove()
    return output, backward


def _gradients(
    kept: KeptCall, output: Any, wanted: list[tuple[str, Tensor]], scale: float
) -> dict[str, Tensor | None]:
    ends: list[Tensor] = []
    given: list[Tensor] = []
    for path, (gradient, _) in kept.gradients.items():
        tensor = get_part(output, path)
        if tensor.requires_grad:
            ends.append(tensor)
            given.append(gradient / scale if scale != 1 else gradient)
    if not ends or not wanted:
        return {}
    if has_reentrant_checkpoint(graph_nodes(ends)):
        torch.autograd.backward(ends, given)  # to .grad, which is None inside of `kept.again`
        return {name: tensor.grad for name, tensor in wanted}
    names, tensors = zip(*wanted, strict=True)
    found = torch.autograd.grad(ends, tensors, given, allow_unused=True)
    return dict(zip(names, found, strict=True))


# -- what the producer was given ------------------------------------------------------------------


def take_sample(
    kept: KeptCall, ignored: IgnoredPlaces, origin: Origin, scale: float
) -> ProducerSample | None:
    """Run a call again; return what the producer was given and made, None if it did not run."""
    for both in (True,) if origin.backward else (False, True):  # it may come in a backward only
        trace = ForwardTrace(kept.parts, ignored, operations=True)
        sample = trace.sample = ProducerSample(
            origin.number, bool(origin.operation), origin.backward
        )
        if both:
            _run_both(kept, trace, scale)
        else:
            with kept.again(gradients=False) as (args, kwargs, _):
                _run(kept, trace, args, kwargs)
        if sample.module is not None and sample.output is not None:
            return sample
    return None


def describe_sample(sample: ProducerSample, origin: Origin) -> None:
    """Add the description of a sample to its origin."""
    told = sample.inputs
    if sample.arguments is not None:
        told = bind(sample.function, *sample.arguments)
    if origin.backward:
        origin.given = [*label_tensors(told), *origin.given]
    else:
        origin.given, made = label_tensors(told), label_tensors({"": sample.output})
        origin.values = [(label, own) for label, own in made if own.bad] or made[:1]
