"""Call a model with a batch, and add notes to the errors that it raises.

- `call_model(model, batch)`: call a model with a batch as its arguments
- `run_model(model, batch)`: the same, or let a function call it; errors name the module and batch
- `error_note(note)`: a context that adds a note to an error of the model
- `check_model(verb, model)`: raise TypeError unless something is a module
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from hookline.errors import HooklineError
from hookline.isolation.batches import is_shape
from hookline.places.tree import walk
from hookline.torch_private import submodules_of

__all__ = ["call_model", "check_model", "error_note", "run_model"]


def check_model(verb: str, model: Any) -> None:
    """Raise TypeError unless what was given as a model is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{verb} was asked about a {type(model).__name__}. A model is a torch.nn.Module. "
            f"Give it first, then a batch."
        )


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model: a dict gives arguments by name, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return model(**batch)
    several = isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)
    return model(*batch) if several else model(batch)


def run_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch, or give it to a function that calls it.

    An error of the model gets a note with the module in which it was raised.

    >>> import torch
    >>> run_model(nn.ReLU(), {"input": torch.tensor([-1.0, 1.0])})
    tensor([0., 1.])
    >>> run_model(nn.ReLU(), lambda model: model(torch.tensor([-1.0, 1.0])))
    tensor([0., 1.])
    """
    if callable(batch) and not isinstance(batch, (Tensor, nn.Module)):
        return cast("Callable[[nn.Module], Any]", batch)(model)
    try:
        return call_model(model, batch)
    except Exception as error:
        _note_module(model, error)
        if isinstance(error, TypeError) and isinstance(batch, (tuple, list)):
            items = tuple(cast("list[Any]", batch))
            remedy = "if it holds labels too, give batch[0]."
            if is_shape(items):
                remedy = f"if a shape is meant, give a tuple: {items}."
            error.add_note(
                "hookline: a batch that is a tuple or list is given to the model as its arguments; "
                f"{remedy}"
            )
        elif isinstance(batch, DataLoader):
            error.add_note("hookline: this is a loader; give a batch of it: next(iter(loader)).")
        raise


def _note_module(model: nn.Module, error: Exception) -> None:
    """Add a note that names the module in which an error was raised, and its input."""
    names = {module: path for path, module in walk(model)}
    raised, trace = None, error.__traceback__
    while trace is not None:  # from the outermost frame inwards
        own = trace.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and names.get(own):
            raised = own, trace.tb_frame
        trace = trace.tb_next
    if raised is None or isinstance(error, HooklineError) or getattr(error, "__notes__", None):
        return
    module, frame = raised
    given = [value for value in frame.f_locals.values() if isinstance(value, Tensor)]
    shape = (
        f", which was given {tuple(given[0].shape)}" if given and not submodules_of(module) else ""
    )
    error.add_note(f"hookline: raised in {names[module]!r} ({type(module).__name__}){shape}.")


@contextmanager
def error_note(note: str) -> Generator[None]:
    """Add a note, unless it is empty, to an error that a model raises inside."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if note and not isinstance(error, HooklineError):
            error.add_note(f"hookline: {note}")
        raise
