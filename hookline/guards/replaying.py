"""Run the dump of a guard again: `replay(folder, model=None)`.

- `replay`: run the producer of bad numbers again → `Replay`
- `Replay`: the outputs, and whether they are those of the first run
"""

# Values that are read from a file have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from hookline.errors import ReplayError
from hookline.guards.dumps import KIND, function_named, read_value
from hookline.guards.kept_calls import split_arguments, unwrapped
from hookline.guards.origins import Labelled, label_tensors
from hookline.isolation.backward import copy_with_leaves, is_differentiable
from hookline.isolation.batches import move_batch
from hookline.isolation.isolated_runs import isolated
from hookline.isolation.module_index import ModuleIndex
from hookline.isolation.training_modes import modes_of, set_modes
from hookline.places.tree import join, tensors_of, walk
from hookline.storage import json_safetensors
from hookline.values.nested import get_part, leaves
from hookline.values.snapshots import same_bits
from hookline.values.tables import one_line

__all__ = ["Replay", "replay"]

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WRITTEN = "Give a folder that a guard has written."
_GIVEN = "give the folder as a guard has written it, and the model that was guarded."
_TOLD = 'Guard it again with a folder: guard(model, to="dumps").'


@dataclass(eq=False)
class Replay:
    """The result of running a producer again.

    `reproduced` is True if the result has bad numbers again. `exact` is for a forward: True if its
    output is that of the first run, bit for bit. `output` and `gradients` were computed from
    `inputs`.
    """

    place: str
    what: str  # the function or module that was run
    backward: bool
    inputs: Any
    output: Any
    gradients: dict[str, Tensor]
    reproduced: bool
    exact: bool | None
    values: Labelled

    def __repr__(self) -> str:
        way = "backward" if self.backward else "forward"
        said = "bad numbers again" if self.reproduced else "only finite numbers this time"
        exactly = ", bit for bit those of the first run" if self.exact else ""
        rows = [(one_line(label) or "result", str(own)) for label, own in self.values]
        width = max((len(label) for label, _ in rows), default=0)
        lines = [f"  {label:{width}}  {text}" for label, text in rows]
        head = f"Replay of {self.place!r}, {way} of {self.what}: {said}{exactly}"
        return "\n".join([head, *lines])


class _Dump:
    """The folder of a dump, read without trusting it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder
        self.content, self.tensors = json_safetensors.read(folder, KIND, ReplayError)
        try:
            self.fault = dict(self.content["fault"])
            self.backward = self.fault["backward"] is True
            self.place = str(self.fault["place"])
            self.missing = dict(self.content["missing"])
            self.operation = self.content["operation"]
            self.module: dict[str, Any] = dict(self.content["module"])
            self.module["training"] = dict(self.module["training"])
            if type(self.module["positional"]) is not int:
                raise TypeError("'positional' is a whole number")
            if self.module["state"] is not None:
                self.module["state"] = dict(self.module["state"])
            self.given = dict(self.content["gradients"])
        except (KeyError, TypeError, ValueError) as error:
            self.refuse(f"It is not spelled as a guard does: {error!r:.80}.")

    def refuse(self, found: str, remedy: str = _WRITTEN) -> NoReturn:
        asked = f"What a guard has written to {str(self.folder)!r} was to be run again."
        raise ReplayError(asked, one_line(found), remedy) from None

    def value(self, content: Any) -> Any:
        """Return a value of the dump, or raise an error."""
        try:
            return read_value(content, self.tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self.refuse(f"A value in it is not spelled as a guard does: {error!r:.80}.")

    def pairs(self, name: str, content: Any) -> dict[tuple[Any, ...], Tensor]:
        """Return tensors by their paths."""
        try:
            return {tuple(path): self.tensor(tensor) for path, tensor in content}
        except (TypeError, ValueError) as error:
            self.refuse(f"Its {name} are not spelled as a guard does: {error!r:.80}.")

    def tensor(self, content: Any) -> Tensor:
        """Return a tensor of the dump, or raise an error."""
        found = self.value(content)
        if not isinstance(found, Tensor):
            self.refuse(f"A tensor in it is not spelled as a guard does: {content!r:.80}.")
        return found

    def why_not(self, part: str) -> str:
        """Return why a part was not written."""
        return f"{self.missing.get(part, 'it was not written')}."


def replay(folder: str | Path | None, model: nn.Module | None = None) -> Replay:
    """Run the producer of bad numbers in a dump again: an operation alone, or a module.

    >>> import tempfile
    >>> import hookline
    >>> class Log(nn.Module):
    ...     def forward(self, x):
    ...         return torch.log(x)
    >>> folder = tempfile.mkdtemp()
    >>> try:
    ...     with hookline.guard(Log(), to=folder) as own:
    ...         own.model(torch.tensor([1.0, 0.0]))
    ... except hookline.NonFiniteError as error:
    ...     print(replay(error.fault.folder))
    Replay of '/log', forward of torch.log: bad numbers again, bit for bit those of the first run
      result  (2,) float32: 1 -Inf of 2, first at [1]; finite 0

    Args:
        folder: `error.fault.folder` of a `NonFiniteError`, or a copy of that folder. It is None if
            the guard was not told by `to=` where to write.
        model: the guarded model, to run the whole module around the producer, with the inputs and
            the state in the folder; the model itself is not changed. It is required unless the
            producer is a function of torch or a plain module of `torch.nn`, since the folder
            contains no code.

    Random numbers are those of the first run, and afterwards as before. It runs on the CPU, or on
    the device of the model. Nothing is unpickled, and only torch's own functions and modules are
    called. The content of the folder is checked, but its author chooses how large the results are:
    run a stranger's folder where memory is limited.

    Raises:
        ReplayError: If the folder is not as a guard writes it, does not fit the model, or if what
            is run raises an error, which is then the cause of this one.
    """
    if folder is None:
        asked = "What a guard has written was to be run again."
        raise ReplayError(asked, "It has written nothing: it was not told where.", _TOLD)
    dump = _Dump(folder)
    if model is not None:
        return _run_module(dump, _find_module(dump, model))
    if isinstance(dump.operation, dict):
        return _run_operation(dump)
    return _run_module(dump, _make_module(dump))


@contextmanager
def _settings(
    dump: _Dump, told: dict[str, Any], device: str, *modules: nn.Module
) -> Generator[None]:
    """Set random numbers and autocast to those of the dump for a block."""
    state = dump.value(told.get("random"))
    try:
        with ExitStack() as stack:
            stack.enter_context(isolated(*map(ModuleIndex, modules)))
            stack.enter_context(torch.autocast(device, enabled=False))
            for kind, enabled, name in told["autocast"]:
                dtype = _AUTOCAST[name] if enabled else None
                if dtype is not None and kind in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.set_grad_enabled(dump.backward))
            torch.set_rng_state(state)
            yield
    except ReplayError:
        raise
    except Exception as error:  # the dump or the model may cause any type
        asked = f"What a guard has written to {str(dump.folder)!r} was run again."
        found = one_line(f"It raised {type(error).__name__}: {error!s:.200}.")
        raise ReplayError(asked, found, f"If it was changed or does not fit: {_GIVEN}") from error


def _copied(dump: _Dump, value: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return a copy of the arguments, and for a backward the leaves in it by name."""
    names = {id(tensor): f"{prefix}{path[-1] if path else ''}" for path, tensor in leaves(value)}
    made, found = copy_with_leaves(value, lambda one: dump.backward and is_differentiable(one))
    return made, {names[ident]: leaf for ident, leaf in found.items()}


def _finish(
    dump: _Dump, what: str, inputs: Any, output: Any, wanted: dict[str, Tensor], given: Any,
    whole: bool,
) -> Replay:  # fmt: skip
    """Return the result for an output, and for its gradients."""
    found: dict[str, Tensor] = {}
    exact = None
    if dump.backward:
        ends = [(get_part(output, path), gradient) for path, gradient in given.items()]
        ends = [(end, g.to(end.device)) for end, g in ends if end.requires_grad]
        if not ends:
            dump.refuse("The gradients of its result were not written.")
        own: Any = torch.autograd.grad(
            [end for end, _ in ends], list(wanted.values()), [g for _, g in ends], allow_unused=True
        )
        found = {n: g for n, g in zip(wanted, own, strict=True) if g is not None}
        values = label_tensors({f"gradient of {name}": g for name, g in found.items()})
    else:
        values = label_tensors({"": output})
        if not whole:
            first = dump.pairs("outputs", dump.content.get("output"))
            exact = all(same_bits(get_part(output, path), own) for path, own in first.items())
    bad = [(label, own) for label, own in values if own.bad]
    return Replay(
        dump.place, what, dump.backward, inputs, output, found, bool(bad), exact, bad or values[:4]
    )


def _run_operation(dump: _Dump) -> Replay:
    told = dump.operation
    function = function_named(told.get("function"))
    if function is None:
        dump.refuse(f"It names {told.get('function')!r:.60}, which is no function of torch's.")
    args, kwargs = dump.value(told.get("args")), dump.value(told.get("kwargs"))
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        dump.refuse("Its arguments are not spelled as a guard does.")
    with _settings(dump, told, "cpu"):
        (own_args, own_kwargs), wanted = _copied(dump, (args, kwargs), "argument ")
        output = function(*own_args, **own_kwargs)
        if not leaves(output):  # as x[0] = y: it has changed its argument
            output = [own_args[0]]
        given = dump.pairs("gradients", dump.given["operation"])
        inputs = {"args": args, "kwargs": kwargs}
        return _finish(dump, told["function"], inputs, output, wanted, given, False)


# -- modules --------------------------------------------------------------------------------------


def _find_module(dump: _Dump, model: nn.Module) -> nn.Module:
    told = dump.module
    path: Any = told.get("path")
    try:
        module = unwrapped(model).get_submodule(path)
    except (AttributeError, TypeError):
        dump.refuse(f"The model has no module {path!r}.", "Give the model that was guarded.")
    kind = type(module).__qualname__.rpartition(".")[2]  # a graph's has another __name__
    if kind != str(told.get("class")).rpartition(".")[2]:
        found = f"{path!r} is a {kind} in this model, and was a {told.get('class')}."
        dump.refuse(found, "Give the model that was guarded.")
    return module


def _make_module(dump: _Dump) -> nn.Module:
    told = dump.module
    name = str(told.get("class")).rpartition(".")[2]
    kind = getattr(nn, name, None)
    ours = str(told.get("class")).startswith("torch.nn.")
    given = told.get("constructor")
    if not ours or given is None or not isinstance(kind, type) or not issubclass(kind, nn.Module):
        why = dump.why_not("operation") if "operation" in dump.missing else ""
        dump.refuse(
            f"It needs the module {told.get('path')!r}, a {told.get('class')}, whose code is not "
            f"in the folder. {why}".strip(),
            "Give the model: hookline.replay(folder, model).",
        )
    state = {key: dump.tensor(tensor).shape for key, tensor in (told["state"] or {}).items()}
    try:
        options = {key: dump.value(value) for key, value in given.items()}
        for key, value in options.items():
            if key.endswith("layers") and value > len(state):  # else it would make them for ever
                raise ValueError(f"{key}={value}")
        with torch.device("meta"):  # its own size is the file's to choose
            made = kind(**options)
        tensors = {join(path, n): t.shape for path, m in walk(made) for n, t in tensors_of(m)}
        if tensors != state:
            raise ValueError("its state has other names or shapes")
        return made.to_empty(device="cpu")
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever torch raises for what a stranger chose
        dump.refuse(f"A {name} cannot be made of what was written: {error!r:.80}.")


def _run_module(dump: _Dump, module: nn.Module) -> Replay:
    told = dump.module
    if told.get("inputs") is None:
        dump.refuse(
            f"The inputs are not there: {dump.why_not('inputs')}", "It cannot be run again."
        )
    inputs = dump.value(told["inputs"])
    if not isinstance(inputs, dict):
        dump.refuse("Its inputs are not spelled as a guard does.")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    parameters = dict(cast("Any", module.named_parameters(remove_duplicate=False)))
    state = _state(dump, module, parameters, device)
    scripted = any(isinstance(one, torch.jit.ScriptModule) for one in module.modules())
    if scripted:  # which torch.func.functional_call does not take
        module, state = _copied_with(dump, module, state)
    inputs = move_batch(inputs, device)
    own, wanted = _copied(dump, inputs)
    if dump.backward:
        for name, tensor in state.items():
            if name in parameters and is_differentiable(tensor):
                wanted[name] = state[name] = tensor.requires_grad_()
    args, kwargs = split_arguments(own, told["positional"])
    with _settings(dump, told, device.type, module):
        named = walk(module)
        modules = [one for _, one in named]
        modes = [
            told["training"].get(path, mode)
            for (path, _), mode in zip(named, modes_of(modules), strict=True)
        ]
        set_modes(modules, modes)
        if scripted:
            output = module(*args, **kwargs)
        else:
            output = torch.func.functional_call(module, state, args, kwargs)
        given = dump.pairs("gradients", dump.given["module"])
        what = f"the module {told.get('path')!r} ({type(module).__name__})"
        whole = bool(dump.fault.get("operation"))  # the dump has the operation's result
        return _finish(dump, what, inputs, output, wanted, given, whole)


def _copied_with(
    dump: _Dump, module: nn.Module, state: dict[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of a module with another state, and its parameters and buffers by name."""
    made = copy.deepcopy(module)
    held = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    found = {name: tensor for name, tensor in held.items() if name in state}
    try:
        with torch.no_grad():
            for name, tensor in found.items():
                tensor.copy_(state[name])
    except RuntimeError as error:
        dump.refuse(f"Its state does not fit the module: {error!s:.80}.", "Give the guarded model.")
    return made, found


def _state(
    dump: _Dump, module: nn.Module, parameters: dict[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return the state in the dump, for a module with the same names; empty if none was written."""
    told = dump.module.get("state")
    if told is None:
        return {}
    found = {name: dump.tensor(tensor) for name, tensor in told.items()}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name, tensor in found.items():
        fits = name in buffers  # which may have grown since
        if not fits and (name not in parameters or parameters[name].shape != tensor.shape):
            dump.refuse(f"The module has no {name!r} of that shape.", "Give the guarded model.")
    copies: dict[str, Tensor] = {}  # tied tensors stay tied
    for name, tensor in found.items():
        copies.setdefault(told[name]["tensor"], tensor.to(device).clone())
    return {name: copies[told[name]["tensor"]] for name in found}
