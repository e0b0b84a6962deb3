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
from typing import Any

import numpy as np
import torch
from helpers import HOOK_DICTS
from torch import Tensor, nn
from torch.distributions import Distribution

import hookline as hl

Step = Callable[[nn.Module], Any]

OUTPUTS = ("", "**")
EVERYTHING = ("", "**", ":inputs", "**:inputs", ":grad_output", "**:grad_output")
DIRECTLY = "forward called directly"
WITHOUT = "weights used without it"
UNREACHED = "not reached"
ITERATED = "its children are called one by one"


@dataclasses.dataclass
class Findings:
    """What was found in one model. It is exact if nothing is wrong."""

    modules: int
    places: int = 0  # that fired
    values: int = 0  # at these places, over all calls
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
        _check(model, step, found)
    finally:
        gc.unfreeze()
    return found


def _check(model: nn.Module, step: Step, found: Findings) -> None:
    subject = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        bare, _ = observe(subject, step)
        surroundings_before = surroundings(subject)
        again, _ = observe(copy.deepcopy(model), step)
    found.unsteady = differences(bare, again)
    usual = {str(warning.message) for warning in said}
    for kind, places, options in (
        ("outputs", OUTPUTS, {}),
        ("attached", EVERYTHING, {}),
        ("detached", EVERYTHING, {"detach": True}),
    ):
        subject = copy.deepcopy(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with hl.capture(subject, *places, **options) as record:
                seen, output = observe(subject, step)
        wrong = [name for name in differences(bare, seen) if name not in found.unsteady]
        after = surroundings(subject)
        wrong += [f"{name} left behind" for name in differences(surroundings_before, after)]
        wrong += ["a hook on an output left behind" for t in tensors(output) if t._backward_hooks]
        wrong += [f"warns: {w.message}" for w in said if str(w.message) not in usual]
        if kind != "outputs":
            wrong += read_all(record, found, kind)
        if kind == "attached":
            count(record, found)
        if kind == "detached":
            wrong += compare_with_hooks(record, model, step, found.unsteady)
        reference = weakref.ref(subject)
        del subject, output
        gc.collect()
        if reference() is not None:
            wrong.append("the record keeps the model alive")
        found.wrong += [f"{kind}: {name}" for name in wrong]
    explain_silence(found, model, step, bare)


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


def observe(model: nn.Module, step: Step) -> tuple[dict[str, str], Any]:
    """What a run gives and leaves (outputs, gradients, buffers, random states …) as digests."""
    seed()
    output = step(model)
    seen = {f"output {n}": digest(t) for n, t in enumerate(tensors(output, opaque=True))}
    for name, parameter in model.named_parameters():
        seen[f"parameter {name}"] = digest(parameter)
        seen[f"gradient {name}"] = "none" if parameter.grad is None else digest(parameter.grad)
    seen |= {f"buffer {name}": digest(buffer) for name, buffer in model.named_buffers()}
    seen["random state"] = digest(torch.get_rng_state())
    seen["numpy's random state"] = hashlib.sha1(repr(np.random.get_state()).encode()).hexdigest()
    return seen, output


def seed() -> None:
    """All random numbers start anew; some models use those of numpy or Python."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """What two runs do not have in common."""
    return [
        name
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


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


def surroundings(model: nn.Module) -> dict[str, str]:
    """What a model has of hooks, attributes, contexts and modes; its own, after a bare run."""
    found = {"contexts": repr(hl.attached(model))}
    found["modes"] = str(torch._C._len_torch_function_stack())
    found["gradients on"] = str(torch.is_grad_enabled())
    for path, module in model.named_modules():
        found[f"attribute of {path!r}"] = " ".join(sorted(vars(module)))
        for name in HOOK_DICTS:
            found[f"{name} of {path!r}"] = str(len(module.__dict__[name]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"hook on {name}"] = str(len(tensor._backward_hooks or ()))
    return found


def read_all(record: hl.Record, found: Findings, kind: str) -> list[str]:
    """Read every place; what cannot be read must say why."""
    wrong: list[str] = []
    called = {place.path for place in record.places() if place.port == "output"}
    for place in record.places():
        gradient = place.port == "grad_output"
        try:
            record.calls(place)
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
    str(record), record.nbytes
    return wrong


def reason_of(error: hl.GradientNotAvailable) -> str:
    """The reason without numbers and remedies."""
    return re.sub(r"its module was called \d+ times, but ", "", error.found.split(".")[0])


def count(record: hl.Record, found: Findings) -> None:
    """How much a record holds, and which modules were never called."""
    found.places = len(record.places())
    found.values = sum(len(tap.kept) or len(tap.grads) for tap in record._taps)
    found.silent = {
        place.path: reason for place, reason in record.unfired().items() if place.port == "output"
    }


def compare_with_hooks(
    record: hl.Record, model: nn.Module, step: Step, unsteady: list[str]
) -> list[str]:
    """Hooks written by hand must have seen what the record holds."""
    if any(name.startswith("output") for name in unsteady):
        return []
    hooked = copy.deepcopy(model)
    inputs: dict[str, list[list[str]]] = {}
    outputs: dict[str, list[list[str]]] = {}
    gradients: dict[str, list[list[str]]] = {}
    paths = {module: path for path, module in hooked.named_modules()}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.setdefault(paths[module], []).append(
            sorted(digest(t) for t in tensors((args, kwargs)))
        )

    def after(module: nn.Module, args: Any, output: Any) -> None:
        outputs.setdefault(paths[module], []).append([digest(t) for t in tensors(output)])
        arrived: list[str] = []
        gradients.setdefault(paths[module], []).append(arrived)
        if isinstance(output, Tensor) and output.requires_grad:
            _ = output.grad_fn  # register_hook may crash on a changed view otherwise
            output.register_hook(lambda grad: arrived.append(digest(grad)))

    for module in hooked.modules():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    seed()
    with warnings.catch_warnings(action="ignore"):
        step(hooked)

    wrong: list[str] = []
    for place in record.places():
        by_hand = {"inputs": inputs, "output": outputs}.get(place.port)
        if by_hand is not None:
            kept = [[digest(t) for t in tensors(value)] for value in record.calls(place)]
            expected = by_hand.get(place.path, [])
            if place.port == "inputs":
                kept = [sorted(values) for values in kept]
                # Those of a recursive module are numbered as the calls end, not as they begin.
                kept, expected = sorted(kept), sorted(expected)
            if kept != expected:
                wrong.append(f"{place} is not what hooks by hand have seen")
            continue
        try:
            kept = [None if g is None else g for g in record.calls(place)]
        except hl.GradientNotAvailable:
            continue
        expected = gradients.get(place.path, [])
        if not any(expected):  # no plain tensor, or the hook was lost with an in-place operation
            continue
        flat = [grad for call in expected for grad in (call or [None])]
        found = [digest(grad) if isinstance(grad, Tensor) else None for grad in kept]
        if len(found) != len(flat) or any(
            a != b for a, b in zip(found, flat, strict=True) if b is not None
        ):
            wrong.append(f"{place} is not what hooks by hand have seen")
    called = {path for path in outputs} - {""}
    held = {place.path for place in record.places() if place.port == "output"} - {""}
    wrong += [f"{path} was called, but is not in the record" for path in sorted(called - held)]
    return wrong


def explain_silence(
    found: Findings, model: nn.Module, step: Step, bare: dict[str, str]
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
    for path in list(found.silent):
        own = [name for name, _ in subject.get_submodule(path).named_parameters(recurse=False)]
        trained = any(bare.get(f"gradient {path}.{name}", "none") != "none" for name in own)
        below = [name for name, _ in subject.get_submodule(path).named_modules() if name]
        called = [name for name in below if f"{path}.{name}" not in found.silent]
        if ran[path]:
            why = DIRECTLY
        elif called:
            why = ITERATED
        else:
            why = WITHOUT if trained else UNREACHED
        found.silent[path] = why
