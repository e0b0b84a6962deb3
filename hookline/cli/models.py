"""Load models and batches by their names on a command line.

- `load_model(spec, random_weights, train)`: the model that `MODEL` names
- `load_pair(first, second, random_weights, train)`: two models, each importing from its own folder
- `load_object(spec, remedy)`: the object of `package.module:name` or `file.py:name`
- `load_inputs(specs, model, seed)`: the inputs of the model
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from hookline.cli.output import aside
from hookline.errors import HooklineError
from hookline.isolation.training_modes import set_mode

__all__ = ["CommandError", "Inputs", "load_inputs", "load_model", "load_object", "load_pair"]

_MODELS = "Write package.module:factory, file.py:name, or hf:FOLDER for a transformers model."
_FILES = (".npy", ".npz", ".safetensors", ".json")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")  # that are not read
_INPUTS = (
    "Write a shape such as 8x3x32x32, tokens:1x16, a file (.npy, .npz, .safetensors, .json), or "
    "file.py:name; NAME=… for an argument by name."
)


class CommandError(HooklineError):
    """The command line asks for something that cannot be done."""


class Inputs(NamedTuple):
    """The arguments to call a model with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        with aside():
            return model(*self.args, **self.kwargs)

    def as_batch(self) -> Any:
        """Return one batch, for functions that take one."""
        if self.args and self.kwargs:
            return self.run
        return self.args or self.kwargs


# -- models ---------------------------------------------------------------------------------------


def load_model(spec: str, random_weights: bool = False, train: bool = False) -> nn.Module:
    """Return the model that a specification names: an instance, or made by a factory or class."""
    if spec.startswith("hf:"):
        return _load_transformers(spec.removeprefix("hf:"), random_weights).train(train)
    found = load_object(spec)
    if not isinstance(found, nn.Module) and callable(found):
        found = _guarded(f"The model {spec!r} was to be made.", cast("Callable[[], Any]", found))
    if not isinstance(found, nn.Module):
        raise CommandError(
            f"The model {spec!r} was asked for.",
            f"It is of type {type(found).__name__}, and no torch.nn.Module.",
            "Name a module, or a class or function that gives one without arguments.",
        )
    set_mode(found, train)
    return found


def load_pair(
    first: str, second: str, random_weights: bool = False, train: bool = False
) -> tuple[nn.Module, nn.Module]:
    """Return two models; each imports from the folder of its own file."""
    path, known, home = list(sys.path), set(sys.modules), _home(first)
    one = load_model(first, random_weights, train)
    if home != _home(second):
        sys.path[:] = path
        own = {n for n in set(sys.modules) - known if "." not in n and _lies_in(home, n)}
        for name in [n for n in sys.modules if n.partition(".")[0] in own]:
            del sys.modules[name]
    return one, load_model(second, random_weights, train)


def _home(spec: str) -> Path:
    """Return the folder where a model's file looks for imports first."""
    source = spec.rpartition(":")[0]
    return Path(source).resolve().parent if source.endswith(".py") else Path.cwd()


def _lies_in(folder: Path, name: str) -> bool:
    """Return True if an imported module or package is in a folder, at its top."""
    module = sys.modules[name]
    files = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
    return any(Path(file).resolve().parent == folder for file in files)


def load_object(spec: str, remedy: str = _MODELS) -> Any:
    """Return the object that `package.module:name` or `file.py:name` names; names may be dotted."""
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise CommandError(f"{spec!r} was asked for.", "It has no name after a colon.", remedy)
    load = _import_file if source.endswith(".py") else _import_package
    module = load(source, remedy)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [word for word in vars(module) if not word.startswith("_")]
            raise CommandError(
                f"{spec!r} was asked for.",
                f"{source} has no {part!r}. It has {', '.join(public[:12]) or 'nothing'}.",
                "Name one of these.",
            )
        found = getattr(found, part)
    return found


def _import_file(name: str, remedy: str) -> ModuleType:
    path = Path(name)
    asked = f"The file {name!r} was asked for."
    if not path.is_file():
        raise CommandError(asked, "There is no such file.", remedy)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look for it there
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    loader = spec.loader
    _guarded(asked, lambda: loader.exec_module(module))
    return module


def _import_package(name: str, remedy: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    asked = f"The module {name!r} was asked for."
    try:
        return _guarded(asked, lambda: importlib.import_module(name))
    except CommandError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and name.startswith(str(missing.name)):
            raise CommandError(asked, "There is no such module here.", remedy) from missing
        raise


def _guarded(asked: str, function: Callable[[], Any]) -> Any:
    """Run a user's code; turn what it raises into an error in three parts."""
    try:
        with aside():
            return function()
    except HooklineError:
        raise
    except (Exception, SystemExit) as error:
        found = f"It raised {type(error).__name__}: {str(error).rstrip('.')}."
        remedy = "Run with --debug to see where."
        if isinstance(error, SystemExit):
            remedy = "Put what ends a program under: if __name__ == '__main__'"
        if isinstance(error, TypeError) and "required positional argument" in found:
            remedy = "Name a function that needs no arguments and gives it, such as file.py:make."
        raise CommandError(asked, found, remedy) from error


def _load_transformers(name: str, random_weights: bool) -> nn.Module:
    asked = f"The transformers model {name!r} was asked for."
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        remedy = "Install it with: pip install 'hookline[transformers]'"
        raise CommandError(asked, "transformers is not installed.", remedy) from None
    auto: Any = transformers.AutoConfig.from_pretrained
    folder = Path(name)
    local = folder.exists()
    if name in transformers.CONFIG_MAPPING and not local:
        if not random_weights:
            raise CommandError(
                asked,
                f"{name!r} is an architecture, and no folder with weights.",
                "Give a folder, or --random-weights to build it from its default configuration.",
            )
        config = transformers.CONFIG_MAPPING[name]()
    elif local:
        config = _guarded(asked, lambda: auto(name, local_files_only=True))
    else:  # or a name on the hub; works where there is a network or a cache
        try:
            config = auto(name)
        except Exception as error:
            known: list[str] = list(transformers.CONFIG_MAPPING)
            close = ", ".join(difflib.get_close_matches(name, known, n=3))
            closest = f" (closest: {close})" if close else ""
            raise CommandError(
                asked,
                f"It is no folder, no architecture{closest}, and was not had from the hub "
                f"({type(error).__name__}; --debug shows it).",
                "Give a folder, a name on the hub, or an architecture with --random-weights.",
            ) from error
    kind = _class_of(transformers, config)
    torch.manual_seed(0)
    bare = local and not any(folder.glob("*.safetensors*"))
    others = [path.name for path in sorted(folder.glob("*")) if path.suffix in _OTHER_WEIGHTS]
    if bare and others and not random_weights:
        raise CommandError(
            asked,
            f"Its weights are not in safetensors: {', '.join(map(repr, others[:3]))}.",
            "Load it in Python and save it with model.save_pretrained(FOLDER), or give "
            "--random-weights.",
        )
    if random_weights or bare:
        return _guarded(asked, lambda: (kind or transformers.AutoModel.from_config)(config))
    load: Any = (kind or transformers.AutoModel).from_pretrained
    return _guarded(asked, lambda: load(name, local_files_only=local, use_safetensors=True))


def _class_of(transformers: Any, config: Any) -> Any:
    """Return the class that a configuration names, with its heads, if transformers has it."""
    named = [getattr(transformers, kind, None) for kind in config.architectures or ()]
    return next((kind for kind in named if kind is not None), None)


# -- batches --------------------------------------------------------------------------------------


def load_inputs(specs: Sequence[str], model: nn.Module, seed: int = 0) -> Inputs:
    """Return the inputs of a model; without a specification its own dummy inputs, if any."""
    dummy = getattr(model, "dummy_inputs", None)
    if not specs and isinstance(dummy, dict):
        return Inputs((), dict(cast("dict[str, Any]", dummy)))
    if not specs:
        raise CommandError("The model was to be run.", "No --input was given.", _INPUTS)
    generator = torch.Generator().manual_seed(seed)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        name, equals, rest = spec.partition("=")
        if equals and name.isidentifier():
            kwargs[name] = _one_input(rest, model, generator)
            continue
        value = _one_input(spec, model, generator)
        if isinstance(value, dict) and (Path(spec).suffix in _FILES or len(specs) == 1):
            kwargs.update(cast("dict[str, Any]", value))
        elif isinstance(value, tuple):
            args += cast("tuple[Any, ...]", value)
        else:
            args.append(value)
    return Inputs(tuple(args), kwargs)


def _one_input(spec: str, model: nn.Module, generator: torch.Generator) -> Any:
    path = Path(spec)
    if path.suffix in _FILES:
        return _read_file(path)
    kind, colon, rest = spec.partition(":")
    if not colon:
        kind, rest = "normal", spec
    shape, _, bound = rest.partition(":")
    sizes = shape.replace("x", " ").replace(",", " ").split()
    whole = bool(sizes) and all(size.isdecimal() for size in sizes)
    if kind in ("normal", "zeros", "ones", "tokens") and whole:
        if bound and kind != "tokens":
            _bad_input(spec, "Only tokens: has a number after the shape; there is no vocabulary.")
        if bound and not (bound.isdecimal() and int(bound)):
            _bad_input(spec, f"{bound!r} is no size of a vocabulary.")
        return _made(kind, [int(size) for size in sizes], bound, model, generator)
    if not colon:
        _bad_input(spec, "It is no shape, and no file that can be read.")
    found = load_object(spec, _INPUTS)
    return _guarded(f"The input {spec!r} was asked for.", found) if callable(found) else found


def _made(
    kind: str, shape: list[int], bound: str, model: nn.Module, generator: torch.Generator
) -> Tensor:
    if kind == "tokens":
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        known = int(bound) if bound else max(sizes, default=0)
        if known < 1:
            _bad_input(f"tokens:{'x'.join(map(str, shape))}", "The vocabulary's size is not known.")
        return torch.randint(known, shape, generator=generator)
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    return torch.ones(shape) if kind == "ones" else torch.zeros(shape)


def _read_file(path: Path) -> Any:
    """Read a tensor, or a dict of them. Never unpickles."""
    import numpy as np
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - untyped

    if not path.is_file():
        _bad_input(str(path), "There is no such file.")
    try:
        if path.suffix == ".safetensors":
            return _single(load_file(path))
        if path.suffix == ".json":
            return _tensors(json.loads(path.read_text(encoding="utf-8")))
        loaded = np.load(path, allow_pickle=False)
        if path.suffix == ".npy":
            return torch.from_numpy(loaded)
        return _single({name: torch.from_numpy(loaded[name]) for name in loaded.files})
    except Exception as error:  # noqa: BLE001 - whatever a foreign file makes its reader raise
        _bad_input(str(path), f"It cannot be read: {error}.")


def _single(tensors: dict[str, Tensor]) -> Any:
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def _tensors(found: Any) -> Any:
    if isinstance(found, dict):
        named = cast("dict[str, Any]", found)
        return {name: torch.tensor(value) for name, value in named.items()}
    return torch.tensor(found)


def _bad_input(spec: str, found: str) -> NoReturn:
    raise CommandError(f"The input {spec!r} was asked for.", found, _INPUTS) from None
