"""The modules, parameters and buffers of a model by name.

- `walk(model)`: every module once, under its first name
- `find(model, segments)`: the modules whose path matches
- `find_tensors(model, segments, gradients)`: the parameters and buffers whose path matches
- `child_of(module, path, name)`: one child by name, through wrappers whose name may be left out
- `tensors_of(module)`, `all_names(model)`: what there is
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from hookline.core.grammar import ANY, DEEP, Segment

__all__ = ["all_names", "child_of", "find", "find_tensors", "tensors_of", "walk"]

# Wrappers of torch whose name in a path may be left out: DDP, compile, FSDP1, checkpointing.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def walk(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Every module once with its first name, the model itself first, as `named_modules` has them.

    >>> [name for name, _ in walk(nn.Sequential(nn.ReLU()))]
    ['', '0']
    """
    found = [(path, model)]
    seen = {model}
    stack = [(f"{path}." if path else "", iter(model._modules.items()))]
    while stack:
        prefix, children = stack[-1]
        for name, child in children:
            if child is None or child in seen:
                continue
            seen.add(child)
            path = prefix + name
            found.append((path, child))
            if child._modules:
                stack.append((path + ".", iter(child._modules.items())))
                break
        else:
            stack.pop()
    return found


def find(model: nn.Module, segments: tuple[Segment, ...]) -> list[tuple[str, nn.Module]]:
    """The modules whose path matches, each once. Only what can match is looked at."""
    path, module = "", model
    for n, segment in enumerate(segments):
        if not isinstance(segment, str):
            return _find_more(path, module, segments[n:])
        step = child_of(module, path, segment)
        if step is None:
            return []
        path, module = step
    return [(path, module)]


def _is_wrapper(module: nn.Module, path: str, name: str) -> bool:
    """Whether wildcards pass through a child as if it were not there.

    An ordinary module may have a child called `module`, too.
    """
    if name not in _WRAPPERS or len(module._modules) != 1:
        return False
    outermost = not path or set(path.split(".")) <= _WRAPPERS
    return name != "module" or outermost or "DataParallel" in type(module).__name__


def _find_more(
    path: str, module: nn.Module, segments: tuple[Segment, ...]
) -> list[tuple[str, nn.Module]]:
    if segments == (DEEP,):
        return walk(module, path)[1:]
    children = module._modules
    if segments == (ANY,) and len(children) > 1:
        prefix = f"{path}." if path else ""
        return list(
            {
                id(child): (prefix + name, child)
                for name, child in reversed(children.items())
                if child is not None
            }.values()
        )[::-1]
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: set[tuple[int, int]] = set()
    stack = [(path, module, 0)]
    while stack:
        path, module, n = stack.pop()
        if n == len(segments):
            found.setdefault(id(module), (path, module))
            continue
        if (id(module), n) in seen:
            continue
        seen.add((id(module), n))
        segment = segments[n]
        if isinstance(segment, str):
            step = child_of(module, path, segment)
            if step is not None:
                stack.append((*step, n + 1))
            continue
        prefix = f"{path}." if path else ""
        last = n + 1 == len(segments)
        for name, child in reversed(module._modules.items()):
            if child is None:
                continue
            if segment is not DEEP and _is_wrapper(module, path, name):
                stack.append((prefix + name, child, n))  # as if the wrapper were not there
            elif segment is DEEP:
                stack.append((prefix + name, child, n))
                if last:
                    stack.append((prefix + name, child, n + 1))
            elif cast("re.Pattern[str]", segment).fullmatch(name):
                stack.append((prefix + name, child, n + 1))
        if segment is DEEP and not last:
            stack.append((path, module, n + 1))
    return list(found.values())


def child_of(module: nn.Module, path: str, name: str) -> tuple[str, nn.Module] | None:
    """One child by name with its path; through a wrapper whose name was left out."""
    modules = module._modules
    child = modules.get(name) if type(modules) is dict else dict(modules.items()).get(name)
    if child is not None:
        return (f"{path}.{name}" if path else name), child
    if len(modules) == 1:
        ((wrapper, inner),) = modules.items()
        if wrapper in _WRAPPERS and inner is not None:
            return child_of(inner, f"{path}.{wrapper}" if path else wrapper, name)
    return None


def find_tensors(
    model: nn.Module, segments: tuple[Segment, ...], gradients: bool
) -> Iterator[tuple[str, nn.Module, str]]:
    """The parameters and buffers whose path matches, each once, with their owners."""
    if not segments:
        return
    last = segments[-1]
    if last is DEEP:  # `a.**` is any tensor in a or below
        last = ANY
        owners = [
            (p, m) for path, module in find(model, segments[:-1]) for p, m in walk(module, path)
        ]
    else:
        owners = find(model, segments[:-1])
    seen: set[int] = set()
    for start, owner in owners:
        for path, module in _unwrapped(start, owner):
            found = False
            for name, tensor in tensors_of(module):
                matches = name == last if isinstance(last, str) else last.fullmatch(name)  # pyright: ignore
                if tensor is None or not matches or id(tensor) in seen:
                    continue
                if (
                    gradients
                    and not isinstance(last, (str, nn.Parameter))
                    and not tensor.requires_grad
                    and not isinstance(tensor, nn.Parameter)
                ):
                    continue  # buffers have none: a wildcard does not mean them
                found = True
                seen.add(id(tensor))
                yield path, module, name
            if found and isinstance(last, str):
                break


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """The parameters and buffers of a module itself; the tables of a ScriptModule are no dicts."""
    if isinstance(module, torch.jit.ScriptModule):
        named = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        return [pair for pairs in named for pair in pairs]
    return [*module._parameters.items(), *module._buffers.items()]


def _unwrapped(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module, and what it wraps, if it is a wrapper whose name may be left out."""
    yield path, module
    while len(module._modules) == 1:
        ((name, inner),) = module._modules.items()
        if name not in _WRAPPERS or inner is None:
            return
        path, module = (f"{path}.{name}" if path else name), inner
        yield path, module


def all_names(model: nn.Module) -> list[str]:
    """The paths of all modules, parameters and buffers."""
    names: list[str] = []
    for path, module in walk(model):
        prefix = path + "." if path else ""
        names.append(path)
        names += [prefix + name for name, tensor in tensors_of(module) if tensor is not None]
    return names[1:]
