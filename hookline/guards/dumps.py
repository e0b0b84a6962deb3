"""Write the inputs, state and random numbers of a producer of bad numbers as plain files.

- `write_dump(folder, fault, sample, kept)`: a new folder with `guard.json` and `guard.safetensors`
- `ArgumentWriter`: writes arguments as JSON, with their tensors beside it
- `read_value(content, tensors)`: reads such arguments, without trusting them
- `function_named(name)`, `name_of(function)`: torch's functions by name
- `constructor_of(module, writer)`: the arguments that make a module of `torch.nn` again
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn, overrides

from hookline.guards.faults import Fault
from hookline.guards.kept_calls import KeptCall
from hookline.guards.producer_samples import ProducerSample, RunSettings
from hookline.places.tree import join, tensors_of, walk
from hookline.storage import json_safetensors
from hookline.torch_private import buffers_of
from hookline.values.nested import leaves

__all__ = ["KIND", "ArgumentWriter", "function_named", "name_of", "read_value", "write_dump"]

KIND = "guard"
_MOST = 2 * 10**9  # bytes of a module's state
_LEVELS = 32
# Functions of torch that read files or run code that they are given: a replay never calls them.
_REFUSED = frozenset({"from_file", "load", "save", "apply_", "map_", "map2_", "backward", "numpy"})
_WORDS = {
    str(word): word
    for word in (
        torch.strided, torch.sparse_coo, torch.contiguous_format, torch.channels_last,
        torch.channels_last_3d, torch.preserve_format,
    )
}  # fmt: skip


class ArgumentWriter(json_safetensors.NumberedTensors):
    """Writes arguments as JSON; `tensors` collects the tensors in them."""

    def tensor(self, tensor: Tensor) -> dict[str, Any]:
        """Write a tensor as its number; raise TypeError if a file cannot hold it."""
        if not json_safetensors.is_plain(tensor):
            raise TypeError(f"a {json_safetensors.name_kind(tensor)}")
        return {"tensor": self.number_of(tensor), "complex": tensor.is_complex()}

    def value(self, value: Any) -> Any:  # noqa: C901
        """Write a nested value; raise TypeError with its type if JSON cannot hold it."""
        # One branch for each kind of value: this function and `read_value` show the whole format.
        if isinstance(value, Tensor):
            return self.tensor(value)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"number": [self.value(value.real), self.value(value.imag)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, slice):
            own = cast("Any", value)
            return {"slice": [self.value(step) for step in (own.start, own.stop, own.step)]}
        if isinstance(value, (torch.dtype, torch.device)):
            kind = "dtype" if isinstance(value, torch.dtype) else "device"
            return {kind: str(value).removeprefix("torch.")}
        if str(value) in _WORDS:
            return {"torch": str(value)}
        kind = cast("type[Any]", type(value))
        if kind is list:
            return [self.value(item) for item in cast("list[Any]", value)]
        if kind is tuple or kind is torch.Size:
            return {"tuple": [self.value(item) for item in cast("tuple[Any, ...]", value)]}
        if kind is dict:
            named = cast("dict[Any, Any]", value)
            return {"dict": [[self.value(k), self.value(v)] for k, v in named.items()]}
        raise TypeError(f"a {kind.__name__}")


def read_value(content: Any, tensors: dict[str, Tensor], level: int = 0) -> Any:
    """Read what an ArgumentWriter wrote; raise ValueError for anything else."""
    if level > _LEVELS:
        raise ValueError("it is nested too deeply")
    if content is None or isinstance(content, (bool, int, float, str)):
        return content

    def read(value: Any) -> Any:
        return read_value(value, tensors, level + 1)

    if isinstance(content, list):
        return [read(item) for item in cast("list[Any]", content)]
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{content!r:.40} is nothing that is known")
    held = cast("dict[str, Any]", content)
    tag, content = next(iter(held.items()))
    if tag == "tensor":
        found = tensors[content]
        return torch.view_as_complex(found) if held.get("complex") else found
    if tag == "dtype" and isinstance(found := getattr(torch, str(content), None), torch.dtype):
        return found
    readers: dict[str, Callable[[], Any]] = {
        "float": lambda: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content],
        "number": lambda: complex(*map(read, content)),
        "ellipsis": lambda: ...,
        "slice": lambda: slice(*map(read, content)),
        "device": lambda: torch.device("cpu"),  # the tensors of a dump are on the CPU now
        "torch": lambda: _WORDS[content],
        "tuple": lambda: tuple(map(read, content)),
        "dict": lambda: {read(key): read(value) for key, value in content},
    }
    if tag not in readers:
        raise ValueError(f"{tag!r:.40} is nothing that is known")
    return readers[tag]()


@cache
def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in cast("dict[Any, list[Any]]", overrides.get_overridable_functions()).values():
        for function in group:
            name = overrides.resolve_name(function)
            if name and function.__name__ not in _REFUSED:
                found[name] = function
    return found


def name_of(function: Any) -> str | None:
    """Return the name of a torch function, if it can be found by that name."""
    name = overrides.resolve_name(function)
    return name if name in _functions() else None


def function_named(name: Any) -> Any:
    """Return the torch function of that name; None if there is none that may be called."""
    return _functions().get(name) if isinstance(name, str) else None


# -- modules --------------------------------------------------------------------------------------


def constructor_of(module: nn.Module, writer: ArgumentWriter) -> dict[str, Any] | None:
    """Return the arguments that make such a module of torch.nn again; None if they are unknown.

    They are read from its attributes and tested: the new module must have the same text, and
    tensors of the same names and shapes.
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or "forward" in vars(module):
        return None
    found: dict[str, Any] = {}
    for name in _parameters(kind):
        if name in ("device", "dtype", "mode") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        is_switch = isinstance(value, Tensor) or (name == "bias" and value is None)
        found[name] = value is not None if is_switch else value
    try:
        content = {name: writer.value(value) for name, value in found.items()}
        with torch.device("meta"):
            made = kind(**found)
    except (TypeError, ValueError, RuntimeError):
        return None
    shapes = [{n: tuple(t.shape) for n, t in one.state_dict().items()} for one in (made, module)]
    return content if repr(made) == repr(module) and shapes[0] == shapes[1] else None


def _parameters(kind: type[nn.Module]) -> list[str]:
    """Return the parameter names of a constructor, with those of its base if it passes all on."""
    for base in kind.__mro__:
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return [p.name for p in parameters]
    return []


def _state_of(module: nn.Module, kept: KeptCall) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, as they were before the call."""
    before = {(id(b.held), b.name): b.tensor if b.copy is None else b.copy for b in kept.buffers}
    found: dict[str, Tensor] = {}
    for path, inner in walk(module):
        for name, tensor in tensors_of(inner):
            found[join(path, name)] = before.get((id(buffers_of(inner)), name), tensor)
    return found


def _module(
    sample: ProducerSample, kept: KeptCall, writer: ArgumentWriter, missing: dict[str, str]
) -> dict[str, Any]:
    module = cast(nn.Module, sample.module)
    kind = type(module)
    modes = {id(m): mode for m, mode in zip(kept.parts.modules, kept.modes, strict=True)}
    told: dict[str, Any] = {
        "path": sample.path, "class": f"{kind.__module__}.{kind.__qualname__}",
        "training": {path: modes.get(id(inner), True) for path, inner in walk(module)},
        "constructor": None, "inputs": None, "positional": sample.positional, "state": None,
        **_settings(sample.module_settings, writer),
    }  # fmt: skip
    try:
        if sample.inputs is None:
            missing["inputs"] = "the call of the module had ended when a part of it ran again"
        else:
            told["inputs"] = writer.value(dict(sample.inputs))
    except TypeError as error:
        missing["inputs"] = f"the module was given {error}, which no plain file can hold"
    state = _state_of(module, kept)
    size = sum(tensor.nbytes for tensor in state.values())
    if size > _MOST:
        missing["state"] = f"the state of the module has {size} bytes, more than {_MOST}"
    else:
        told["constructor"] = constructor_of(module, writer)
        told["state"] = {name: writer.tensor(tensor) for name, tensor in state.items()}
    return told


def _operation(
    sample: ProducerSample, writer: ArgumentWriter, missing: dict[str, str]
) -> dict[str, Any] | None:
    if sample.arguments is None:
        missing["operation"] = "no operation of torch was seen to make it"
        return None
    name = name_of(sample.function)
    if name is None:
        missing["operation"] = "it is no function of torch that can be found by its name"
        return None
    try:
        args, kwargs = sample.arguments
        told = {"args": writer.value(list(args)), "kwargs": writer.value(dict(kwargs))}
    except TypeError as error:
        missing["operation"] = f"the operation was given {error}, which no plain file can hold"
        return None
    return {"function": name, **told, **_settings(sample.settings, writer)}


def _settings(settings: RunSettings, writer: ArgumentWriter) -> dict[str, Any]:
    autocast = [[kind, on, str(d).removeprefix("torch.")] for kind, on, d in settings.autocast]
    return {"random": writer.tensor(settings.random), "autocast": autocast}


def write_dump(folder: str | Path, fault: Fault, sample: ProducerSample, kept: KeptCall) -> Path:
    """Write the inputs of a producer into a new folder inside `folder`; return that folder."""
    writer, missing = ArgumentWriter(), dict[str, str]()
    made = [(p, t) for p, t in leaves(sample.output) if json_safetensors.is_plain(t)]
    content: dict[str, Any] = {
        "fault": fault.to_dict(),
        "operation": _operation(sample, writer, missing) if sample.is_operation else None,
        "module": _module(sample, kept, writer, missing),
        "gradients": {
            name: [[list(path), writer.tensor(tensor)] for path, tensor in given.items()]
            for name, given in (
                ("operation", sample.gradients), ("module", sample.module_gradients)
            )
        },
        "output": [[list(path), writer.tensor(tensor)] for path, tensor in made],
        "torch": torch.__version__, "missing": missing,
    }  # fmt: skip
    number = 0
    while True:  # several processes may write at the same time
        own = Path(folder) / f"step{fault.step:06}-{number}"
        try:
            own.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
    return json_safetensors.write(own, KIND, content, writer.tensors)
