"""What hookline promises, checked on one model.

- `check(model, step)`: run a model bare and captured, compare, and say what was found
- `Findings`: how many modules, places and gradients there were, and everything that is wrong
- `forward_and_backward(arguments)`: the commonest step, for a model that is called with arguments

A step is a function that uses a model and returns what came out: a forward and a backward,
usually. Every run has its own deep copy of the model, and all random numbers start anew.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import inspect
import random
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from oracles import HOOK_DICTS
from torch import Tensor, nn
from torch.distributions import Distribution

import hookline as hl

Step = Callable[[nn.Module], Any]

OUTPUTS = ("", "**")
EVERYTHING = ("", "**", ":inputs", "**:inputs", ":grad_output", "**:grad_output")
MISSING = "no gradient arrived|did not require grad|was not called"
DIRECTLY = "forward called directly"
WITHOUT = "weights used without it"
UNREACHED = "not reached"
ITERATED = "its children are called one by one"


@dataclasses.dataclass
class Findings:
    """What was found in one model. It is exact if nothing is wrong."""

    modules: int
    places: int = 0  # that fired
    values: int = 0  # that can be read at these places, over all calls
    changed: int = 0  # places where an attached value was changed in place, and reading says so
    refused: Counter[str] = dataclasses.field(default_factory=Counter)  # gradients, by reason
    silent: dict[str, str] = dataclasses.field(default_factory=dict)  # modules never called
    unsteady: list[str] = dataclasses.field(default_factory=list)  # differs between bare runs
    wrong: list[str] = dataclasses.field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not self.wrong


def check(model: nn.Module, step: Step) -> Findings:
    """Capture every module's inputs, outputs and gradients, and compare with bare runs."""
    found = Findings(modules=len(list(model.modules())))
    gc.collect()
    gc.freeze()  # what is there already need not be looked through each time
    try:
        bare = run(model, step)
        again = run(model, step)
        found.unsteady = differences(bare.seen, again.seen)
        for kind, places, options in (
            ("outputs", OUTPUTS, {}),
            ("attached", EVERYTHING, {}),
            ("detached", EVERYTHING, {"detach": True}),
        ):
            captured = run(model, step, lambda m, p=places, o=options: hl.capture(m, *p, **o))
            wrong = compare(bare, captured, found.unsteady)
            if kind != "outputs":
                wrong += read_all(captured.record, found, kind)
            if kind == "attached":
                count(captured.record, found)
            if kind == "detached" and not any("output" in name for name in found.unsteady):
                wrong += compare_with_hooks(captured.record, model, step)
            found.wrong += [f"{kind}: {name}" for name in wrong]
        explain_silence(found, model, step, bare.seen, called_in(captured.record))
    finally:
        gc.unfreeze()
    return found


# -- runs -----------------------------------------------------------------------------------------


def forward_and_backward(arguments: Mapping[str, Any]) -> Step:
    """Call a model with a copy of these arguments, and go back from all that it returns."""

    def step(model: nn.Module) -> Any:
        given = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        output = model(**given)
        losses = [
            weighed(tensor)
            for tensor in tensors(output)
            if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        ]
        if losses:
            torch.stack(losses).sum().backward()
        return output, given

    return step


def weighed(tensor: Tensor) -> Tensor:
    """A scalar whose gradient differs from element to element."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (real.float() * torch.linspace(-1, 1, real.numel()).reshape(real.shape)).sum()


@dataclasses.dataclass
class Run:
    """What a run gave and left behind."""

    seen: dict[str, str]  # outputs, gradients, buffers, random states …, as digests
    left: dict[str, str]  # hooks, attributes, contexts, modes
    warned: list[str]
    alive: bool  # whether something keeps the model
    record: Any


def run(model: nn.Module, step: Step, context: Callable[[nn.Module], Any] = nullcontext) -> Run:
    """Run a copy of the model inside a context."""
    subject = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seed()
        with context(subject) as record:
            output = step(subject)
            seen = observe(subject, output)
        left = surroundings(subject, output)
    if record is subject:  # of a null context
        record = None
    reference = weakref.ref(subject)
    del subject, output
    gc.collect()
    warned = [str(warning.message) for warning in said]
    return Run(seen, left, warned, reference() is not None, record)


def observe(model: nn.Module, output: Any) -> dict[str, str]:
    """Outputs, parameters, gradients, buffers and random states, as digests."""
    seen = {f"output {n}": digest(t) for n, t in enumerate(tensors(output, opaque=True))}
    for name, parameter in model.named_parameters():
        seen[f"parameter {name}"] = digest(parameter)
        seen[f"gradient {name}"] = "none" if parameter.grad is None else digest(parameter.grad)
    seen |= {f"buffer {name}": digest(buffer) for name, buffer in model.named_buffers()}
    seen["random state"] = digest(torch.get_rng_state())
    seen["numpy's random state"] = repr(np.random.get_state())
    seen["Python's random state"] = repr(random.getstate())
    return seen


def surroundings(model: nn.Module, output: Any) -> dict[str, str]:
    """Hooks, attributes, contexts and modes: those of the model itself, after a bare run."""
    found = {
        "contexts": repr(hl.attached(model)),
        "modes": str(torch._C._len_torch_function_stack()),
        "gradients on": str(torch.is_grad_enabled()),
        "hooks on outputs": str(sum(len(t._backward_hooks or ()) for t in tensors(output))),
    }
    for path, module in model.named_modules():
        found[f"attribute of {path!r}"] = " ".join(sorted(vars(module)))
        for name in HOOK_DICTS:
            found[f"{name} of {path!r}"] = str(len(module.__dict__[name]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"hook on {name}"] = str(len(tensor._backward_hooks or ()))
    return found


def seed() -> None:
    """All random numbers start anew; some models use those of numpy or Python."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What two runs do not have in common."""
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


def tensors(value: Any, opaque: bool = False, above: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors in a structure; with `opaque` also those in any object, such as a cache."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in above or isinstance(value, (nn.Module, type)):
        return
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    elif isinstance(value, Distribution) or dataclasses.is_dataclass(value):
        inside = list(vars(value).values())
    elif opaque and hasattr(value, "__dict__") and not callable(value):
        inside = list(vars(value).values())
    else:
        return
    for item in inside:
        yield from tensors(item, opaque, (*above, id(value)))


def digest(tensor: Tensor) -> str:
    """Shape, dtype and bytes of a tensor."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    data = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha1(data).hexdigest()}"


# -- after a capture ------------------------------------------------------------------------------


def compare(bare: Run, captured: Run, unsteady: list[str]) -> list[str]:
    """What is not as it is without a capture."""
    wrong = [name for name in differences(bare.seen, captured.seen) if name not in unsteady]
    wrong += [f"{name} left behind" for name in differences(bare.left, captured.left)]
    wrong += [f"warns: {text}" for text in captured.warned if text not in bare.warned]
    if captured.alive and not bare.alive:
        wrong.append("the record keeps the model alive")
    return wrong


def read_all(record: hl.Record, found: Findings, kind: str) -> list[str]:
    """Read every place; what cannot be read must say why."""
    wrong: list[str] = []
    for place in record.places():
        gradient = place.port == "grad_output"
        try:
            calls = record.calls(place)
            found.values += len(calls) if kind == "detached" else 0
        except hl.GradientNotAvailable as error:
            if not gradient or not error.found:
                wrong.append(f"{place}: {error}")
            if kind == "attached":
                found.refused[reason_of(error)] += 1
        except hl.ValueChanged as error:
            if kind == "attached" and not gradient:
                found.changed += 1
            else:
                wrong.append(f"{place}: {error}")
        except Exception as error:
            wrong.append(f"{place}: {type(error).__name__}: {error}")
    wrong += read_unfired(record, found, kind)
    str(record), record.nbytes
    return wrong


def read_unfired(record: hl.Record, found: Findings, kind: str) -> list[str]:
    """Read every place that did not fire: each has a reason, and none can be read."""
    wrong: list[str] = []
    called = called_in(record)
    for place, reason in record.unfired().items():
        if not reason:
            wrong.append(f"{place}: unfired without a reason")
        try:
            record[place]
        except hl.NeverFired:
            pass
        except hl.GradientNotAvailable as error:
            if kind == "attached" and place.port == "grad_output" and place.path in called:
                found.refused[reason_of(error)] += 1
        else:
            wrong.append(f"{place}: unfired, but it can be read")
    return wrong


def reason_of(error: hl.GradientNotAvailable) -> str:
    """The reason without numbers and remedies."""
    first = error.found.split(". ")[0].rstrip(".")
    return re.sub(r"its module was called \d+ times, but ", "", first)


def called_in(record: hl.Record) -> set[str]:
    """The paths of the modules that were called."""
    return {place.path for place in record.places() if place.port == "output"}


def count(record: hl.Record, found: Findings) -> None:
    """How much a record holds, and which modules were never called."""
    found.places = len(record.places())
    found.silent = {
        place.path: reason for place, reason in record.unfired().items() if place.port == "output"
    }


class ByHand:
    """What hooks written by hand see at every module, call by call, as digests.

    A call inside a backward repeats one that came before (checkpoints, reversible layers): it is
    no call of its own, but it may be what the gradient arrives at.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.inputs: dict[str, list[list[str]]] = {}
        self.output: dict[str, list[list[str]]] = {}
        self.grad_output: dict[str, list[list[str]]] = {}  # of outputs that are one tensor
        hooked = copy.deepcopy(model)
        for path, module in hooked.named_modules():
            module.register_forward_pre_hook(partial(self.before, path), with_kwargs=True)
            module.register_forward_hook(partial(self.after, path))
        seed()
        with warnings.catch_warnings(action="ignore"):
            step(hooked)

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.repeats(path):
            digests = sorted(digest(tensor) for tensor in tensors((args, kwargs)))
            self.inputs.setdefault(path, []).append(digests)

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self.repeats(path):
            self.output.setdefault(path, []).append([digest(tensor) for tensor in tensors(output)])
            self.grad_output.setdefault(path, []).append([])
        arrived = self.grad_output[path][-1]
        if isinstance(output, Tensor) and output.requires_grad:
            _ = output.grad_fn  # register_hook may crash on a changed view otherwise
            output.register_hook(lambda grad: arrived.append(digest(grad)))

    def repeats(self, path: str) -> bool:
        return torch._C._current_graph_task_id() != -1 and path in self.output


def compare_with_hooks(record: hl.Record, model: nn.Module, step: Step) -> list[str]:
    """Hooks written by hand must have seen what the record holds."""
    by_hand = ByHand(model, step)
    wrong = [
        f"{place} is not what hooks by hand have seen"
        for place in record.places()
        if not same_values(record, place, by_hand)
    ]
    missed = sorted(set(by_hand.output) - called_in(record))
    wrong += [f"{path} was called, but is not in the record" for path in missed]
    # What arrived by hand may be refused since it is not the module's alone, but not as missing.
    for place, reason in record.unfired().items():
        arrived = any(by_hand.grad_output.get(place.path, ()))
        if place.port == "grad_output" and arrived and re.search(MISSING, reason):
            wrong.append(f"{place} got a gradient by hand, but: {reason}")
    return wrong


def same_values(record: hl.Record, place: hl.Place, by_hand: ByHand) -> bool:
    expected = getattr(by_hand, place.port)[place.path]
    if place.port == "grad_output":
        try:
            kept = record.calls(place)
        except hl.GradientNotAvailable:
            return True
        # A hook on a view is lost, silently, if the view is changed in place later.
        arrived = [grad for call in expected for grad in (call or [None])]
        found = [digest(grad) if isinstance(grad, Tensor) else None for grad in kept]
        return not any(expected) or (
            len(found) == len(arrived)
            and all(b in (None, a) for a, b in zip(found, arrived, strict=True))
        )
    kept = [[digest(tensor) for tensor in tensors(value)] for value in record.calls(place)]
    if place.port == "inputs":
        kept = [sorted(digests) for digests in kept]
        # Those of a recursive module are numbered as the calls end, not as they begin.
        kept, expected = sorted(kept), sorted(expected)
    return kept == expected


def explain_silence(
    found: Findings, model: nn.Module, step: Step, bare: dict[str, str], called: set[str]
) -> None:
    """Why modules were never called: found out by counting the calls of their forwards."""
    if not found.silent:
        return
    subject = copy.deepcopy(model)
    ran: Counter[str] = Counter()

    def counting(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            ran[path] += 1
            return forward(*args, **kwargs)

        wrapped.__signature__ = inspect.signature(forward)  # some models look at it
        return wrapped

    for path in found.silent:
        module = subject.get_submodule(path)
        module.forward = counting(path, module.forward)
    seed()
    with warnings.catch_warnings(action="ignore"):
        step(subject)
    for path in found.silent:
        module = subject.get_submodule(path)
        own = [f"gradient {path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if ran[path]:
            reason = DIRECTLY
        elif any(other.startswith(f"{path}.") for other in called):
            reason = ITERATED
        else:
            reason = WITHOUT if any(bare.get(name, "none") != "none" for name in own) else UNREACHED
        found.silent[path] = reason
