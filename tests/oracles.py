"""What tests compare with: hooks written by hand, bits, numpy, and the state before.

- `assert_clean`, `hooks_left`, `assert_clean_of_ours`: nothing is left behind
- `bits`, `state_bits`, `assert_same_state`, `same_tensors`: equality bit for bit
- `work_of`, `objects_alive`: the cost of a call in lines of Python, and in objects
- `cut`, `recorded`, `FOLLOWING`: gradients by cutting the graph
- `by_hand`, `rows_by_hand`: the values that hooks of torch see
- `assert_near_numpy`: results of statistics
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl

# -- what is left behind --------------------------------------------------------------------------

HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hooks_left(model: nn.Module) -> list[str]:
    """Return the address of every hook on a module, parameter or buffer of a model."""
    found = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in HOOK_DICTS
        if len(module.__dict__[name])
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found += [f"{path}._backward_hooks" for path, tensor in tensors if tensor._backward_hooks]
    return found


def assert_clean(*models: nn.Module) -> None:
    """Check that no hook is left on any module, parameter or buffer."""
    for model in models:
        assert hooks_left(model) == []


def assert_clean_of_ours(model: nn.Module) -> None:
    """Check that no hook of hookline is left, where torch has hooks of its own."""
    assert not hl.attached(model)
    for module in model.modules():
        hooks = {**module._forward_hooks, **module._forward_pre_hooks}
        assert not [h for h in hooks.values() if "hookline" in type(h).__module__ + str(h)]
    for parameter in model.parameters():
        assert not parameter._backward_hooks


# -- bits -----------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: they tell NaN payloads and the sign of zero apart."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def state_bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the bytes of all parameters and buffers."""
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Check that all parameters and buffers are bit for bit what `state_bits` returned."""
    after = state_bits(model)
    assert list(after) == list(before)
    for name, expected in before.items():
        assert torch.equal(after[name], expected), name


def same_tensors(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return True if both have as many tensors, with the same values."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# -- work and memory -------------------------------------------------------------------------------


def work_of(function: Callable[[], object]) -> int:
    """Count the lines of Python that run in a function and in everything it calls.

    A line counts once for each time it runs. Unlike a time, the number is the same in every run.
    Bytecode instructions are not counted: Python 3.13 misses some of the first call.
    """
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    gc.disable()  # finalizers of other objects must not be counted
    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def objects_alive() -> int:
    """Return the number of objects that the garbage collector tracks after a collection."""
    gc.collect()
    return len(gc.get_objects())


# -- gradients by cutting the graph ---------------------------------------------------------------


def cut(module, inputs, rest):
    """Return the gradient at the output and those at the inputs; `rest` computes the loss."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = module(*leaves)
    leaf = output.detach().clone().requires_grad_()
    (grad_output,) = torch.autograd.grad(rest(leaf.clone()), leaf)
    return grad_output, torch.autograd.grad(output, leaves, grad_output, allow_unused=True)


def recorded(module, inputs, rest, *places, **options):
    """Record one forward and backward, on inputs that other operations have made."""
    made = [x.detach().clone().requires_grad_() * 1 for x in inputs]
    with hl.capture(module, *places, **options) as record:
        rest(module(*made)).backward()
    assert_clean(module)
    return record


def weigh(y):
    """Compute a loss whose gradient differs from element to element."""
    return (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum()


def after(change):
    """Return a loss of the output after an in-place change, and not a linear one."""

    def rest(y):
        change(y)
        return weigh(y * y)  # the last bit of other functions depends on the strides

    return rest


FOLLOWING = {
    "nothing": after(lambda y: y),
    "relu_": after(lambda y: y.relu_()),
    "functional relu": after(lambda y: F.relu(y, inplace=True)),
    "iadd": after(lambda y: y.__iadd__(torch.ones_like(y))),
    "a part changed": after(lambda y: y[..., :1].mul_(3)),
    "changed twice": after(lambda y: y.mul_(3).sub_(1)),
    "used, then changed": lambda y: weigh(y) + weigh(y.mul_(2).square()),
    "summed (stride 0)": lambda y: y.sum(),
    "transposed": lambda y: weigh(y.transpose(0, -1)),
}


def assert_exact_or_refused(record, place, expected, because) -> None:
    """Check that a record has this gradient, or that reading it raises with the reason."""
    try:
        found = record[place]
    except hl.GradientNotAvailable as error:
        reason = str(error)
    else:
        reason = because
        torch.testing.assert_close(found, expected)
    assert because in reason


# -- hooks written by hand ------------------------------------------------------------------------


@dataclass
class Seen:
    """The values that hooks written by hand see: for each path, one value per call."""

    result: Any = None  # what the run returned
    order: list[str] = field(default_factory=list)  # the paths, in the order in which calls end
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    grad_outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, list[Any]]:
        """The values by place."""
        ports = {":input": self.inputs, "": self.outputs, ":grad_output": self.grad_outputs}
        return {f"{path}{port}": ports[port][path] for port in ports for path in ports[port]}


def by_hand(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    paths: Iterable[str] | None = None,
    gradients: bool = False,
) -> Seen:
    """Run a model with hooks written by hand, on all modules or on those at `paths`."""
    seen, handles = Seen(), []

    def note(values: dict[str, list[Any]], path: str, value: Any) -> None:
        copy = value.detach().clone() if isinstance(value, torch.Tensor) else value
        values.setdefault(path, []).append(copy)

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for first in [*args, *kwargs.values()][:1]:
            note(seen.inputs, path, first)

    def after(path: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.order.append(path)
        note(seen.outputs, path, output)
        if gradients and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(note, seen.grad_outputs, path))

    modules = dict(model.named_modules())
    try:
        for path in modules if paths is None else paths:
            hook = partial(before, path)
            handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(modules[path].register_forward_hook(partial(after, path)))
        seen.result = run(model)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@torch.no_grad()
def rows_by_hand(model: nn.Module, batches: Iterable[Any], *paths: str) -> dict[str, torch.Tensor]:
    """Return the outputs of modules over all batches, joined along the first dimension."""
    seen = by_hand(model, lambda model: [model(batch) for batch in batches], paths)
    return {path: torch.cat(seen.outputs[path]) for path in paths}


# -- statistics by numpy --------------------------------------------------------------------------


def parts_of(result):
    """Return the parts of the result of a statistic, as a list."""
    return list(result) if isinstance(result, tuple) else [result]


def assert_near_numpy(result, expected, **more):
    """Check that the result of a statistic is that of numpy, up to rounding."""
    for own, other in zip(parts_of(result), parts_of(expected), strict=True):
        other = torch.as_tensor(np.asarray(other))
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-11, equal_nan=True, **more)


# -- files ----------------------------------------------------------------------------------------


def rewrite_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


class Killed(BaseException):
    """End a writer as kill -9 does: no `except Exception` catches it."""
