"""Modules and parameters by their dotted names.

- `get_module(model, name)`, `get_parameter(model, name)`: the module or parameter with a name
- `module_names(model)`, `parameter_names(model)`: all names
- `replace_module(model, name, new_module)`: put another module there, for good
- `set_requires_grad(requires_grad, *models)`: freeze or thaw
- `place(name, port)`: the place that a name stands for
"""

from __future__ import annotations

from torch import Tensor, nn

from hookline.edits import restoring
from hookline.errors import PlaceError, PlaceNotFound
from hookline.places.grammar import Place
from hookline.places.resolution import resolve
from hookline.places.tree import walk

__all__ = [
    "get_module",
    "get_parameter",
    "module_names",
    "parameter_names",
    "place",
    "replace_module",
    "set_requires_grad",
]


def get_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module with this name; a LookupError shows the closest names if there is none.

    >>> get_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "1")
    ReLU()

    The empty name is the model itself. A second name of a shared module is found, too.
    """
    return restoring.get_module(model, place(name))


def get_parameter(model: nn.Module, name: str) -> Tensor:
    """Return the parameter (or buffer) with this name, itself; raise LookupError if there is none.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> with torch.no_grad():
    ...     get_parameter(model, "0.weight")[...] = 7
    >>> model[0].weight.tolist()
    [[7.0, 7.0]]
    """
    return restoring.get_parameter(model, place(name))


def place(name: str, port: str = "output") -> Place:
    """Return the place of a literal name; raise LookupError if it is no string.

    >>> place("h.1", "input")
    'h.1:input'
    """
    if not isinstance(name, str):
        raise PlaceNotFound(
            f"A layer was named by {name!r:.60}.",
            f"That is of type {type(name).__name__}.",
            "Give a string; module_names(model) lists them.",
        )
    return Place(name, port)


def module_names(model: nn.Module) -> list[str]:
    """Return the names of all modules, the empty one of the model itself first.

    >>> module_names(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    ['', '0', '1']
    """
    return [name for name, _ in walk(model)]


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters.

    >>> parameter_names(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    ['0.weight', '0.bias']
    """
    return [name for name, _ in model.named_parameters()]


def replace_module(model: nn.Module, name: str, new_module: nn.Module | None) -> None:
    """Put another module where the named one is, for good, and under this name only.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> replace_module(model, "1", nn.Tanh())
    >>> model[1]
    Tanh()

    `hookline.replace_module` is a context that puts the old one back.
    """
    (request,) = resolve(model, (place(name),), hookable=False)
    (target,) = request.targets
    owner, _, last = target.path.rpartition(".")
    if target.attribute is not None or not last:
        found = "It is a parameter or buffer." if last else "That is the model itself."
        raise PlaceError(
            f"The module {name!r} was to be replaced.",
            found,
            "Name a module inside the model; module_names(model) lists them.",
        )
    setattr(model.get_submodule(owner), last, new_module)


def set_requires_grad(requires_grad: bool, *models: nn.Module | Tensor) -> None:
    """Set whether all parameters of the models, and the given tensors, require grad.

    >>> model = nn.Linear(2, 3)
    >>> set_requires_grad(False, model)
    >>> model.weight.requires_grad
    False
    """
    for model in models:
        if not isinstance(model, (nn.Module, Tensor)):
            raise TypeError(
                f"set_requires_grad was given a {type(model).__name__}. Only modules and tensors "
                f"can require grad. Give the flag first, then modules, parameters or tensors."
            )
    for model in models:
        for tensor in [model] if isinstance(model, Tensor) else model.parameters():
            tensor.requires_grad = requires_grad
