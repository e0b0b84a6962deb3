"""The modules, parameters and buffers of a model by name.

- `walk(model)`: every module once, under its first name
- `find(model, segments)`: the modules whose path matches
- `find_tensors(model, segments, gradients)`: the parameters and buffers whose path matches
- `exists(model, names)`: whether a plain path is that of a module, parameter or buffer
- `tensors_of(module)`: the parameters and buffers of a module itself
- `join(path, name)`: the path of what has that name in a module with that path
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hookline.core.grammar import ANY, DEEP, Segment

__all__ = ["Step", "exists", "find", "find_tensors", "join", "tensors_of", "walk"]

Step = tuple[str, nn.Module]  # a module under a path

# Wrappers of torch whose name in a path may be left out: DDP, compile, FSDP1, checkpointing.
_WRAPPERS = {"", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def walk(model: nn.Module) -> list[Step]:
    """Every module once with its first name, the model itself first, as `named_modules` has them.

    >>> [name for name, _ in walk(nn.Sequential(nn.ReLU()))]
    ['', '0']
    """
    found: dict[Any, Step] = {model: ("", model)}
    _add_children("", model, DEEP, found)
    return list(found.values())


def find(model: nn.Module, segments: Sequence[Segment]) -> list[Step]:
    """The modules whose path matches, each once. Only what can match is looked at."""
    module: Any = model
    depth = 0
    for segment in segments:  # as far as it is a plain path, and most often it is one
        modules = module._modules
        if segment not in modules or modules[segment] is None:
            break
        module, depth = modules[segment], depth + 1
    level = [(".".join(segments[:depth]), module)]  # pyright: ignore[reportArgumentType]
    for segment in segments[depth:]:
        depth += 1
        found: dict[Any, Step] = {}
        for path, module in level:
            if segment is DEEP and depth < len(segments):  # then it may stand for nothing
                found.setdefault(module, (path, module))
            _add_children(path, module, segment, found)
        if segment is DEEP and depth == len(segments):
            found.pop(model, None)
        level = list(found.values())
    return level


def _add_children(path: str, module: Any, segment: Segment, found: dict[Any, Step]) -> None:
    """Add the children whose name matches, and for `**` all modules below them."""
    deep = segment is DEEP
    inner = None if deep else _wrapped(path, module, segment)
    if inner is not None:
        _add_children(*inner, segment, found)
        return
    prefix, named = path and f"{path}.", module._modules.items()
    if isinstance(segment, str):
        named = [(segment, module._modules[segment])] if segment in module._modules else []
    every = deep or segment is ANY or isinstance(segment, str)
    for name, child in named:
        if child is not None and child not in found and (every or segment.fullmatch(name)):
            found[child] = (prefix + name, child)
            if deep and child._modules:
                _add_children(prefix + name, child, segment, found)


def _wrapped(path: str, module: nn.Module, segment: Segment) -> Step | None:
    """The module to look in, if this one is a wrapper whose name was left out.

    For wildcards an ordinary module that calls a child `module` is no wrapper.
    """
    for name, inner in module._modules.items() if len(module._modules) == 1 else ():
        known = name != "module" or "DataParallel" in type(module).__name__
        known = known or isinstance(segment, str) or _WRAPPERS.issuperset(path.split("."))
        if name in _WRAPPERS and inner is not None and name != segment and known:
            return join(path, name), inner
    return None


def find_tensors(
    model: nn.Module, segments: Sequence[Segment], gradients: bool
) -> Iterator[tuple[str, nn.Module, str]]:
    """The parameters and buffers whose path matches, each once, with their owners.

    Of gradients, wildcards do not mean buffers, which have none.
    """
    last, seen = segments[-1] if segments else "", set[int]()
    named = isinstance(last, str)
    fits = last.__eq__ if isinstance(last, str) else last.fullmatch
    below = find(model, segments) if last is DEEP else []  # `a.**` is any tensor in a or below
    step: Step | None
    for step in find(model, segments[:-1]) + below:
        while step is not None:
            path, module = step
            found = [(name, tensor) for name, tensor in tensors_of(module).items() if fits(name)]
            for name, tensor in found:
                trainable = tensor.requires_grad or isinstance(tensor, nn.Parameter)
                if id(tensor) not in seen and (named or trainable or not gradients):
                    seen.add(id(tensor))
                    yield path, module, name
            step = None if named and found else _wrapped(path, module, last)


def exists(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether a plain path is that of a module, parameter or buffer."""
    name, found = names[-1], dict[Any, Step]()
    for path, owner in find(model, names[:-1]):
        _add_children(path, owner, name, found)
        if found or name in owner._parameters or name in owner._buffers:
            return True
    return False


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself."""
    named = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in named if tensor is not None}


def join(path: str, name: str) -> str:
    """The path of what has that name, if any, in a module with that path."""
    return f"{path}.{name}" if path and name else path or name
