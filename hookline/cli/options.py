"""Options that several commands share. Each decorator passes an object to the command.

- `takes_model`: MODEL and its weights and mode → `net`
- `takes_inputs`: the inputs of the model → `asked`, an `AskedInputs`
- `takes_screen`: where output goes → `screen`
- `where_option`: places
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import click
from torch import nn

from hookline.cli.models import Inputs, load_inputs, load_model
from hookline.cli.output import Screen

__all__ = [
    "AskedInputs", "takes_inputs", "takes_model", "takes_screen", "weights_options", "where_option",
]  # fmt: skip

Command = Callable[..., None]


class AskedInputs(NamedTuple):
    """The inputs of a model, as they were given on the command line."""

    specs: tuple[str, ...]
    seed: int

    def __bool__(self) -> bool:
        return bool(self.specs)

    def made_for(self, model: nn.Module) -> Inputs:
        """Return the inputs for a model."""
        return load_inputs(self.specs, model, self.seed)


def weights_options(function: Command) -> Command:
    """Add the options for the weights of a model, and its mode."""
    function = click.option(
        "--train", is_flag=True, help="Run it in training mode, not in eval mode."
    )(function)
    return click.option(
        "--random-weights", is_flag=True, help="Build hf:NAME from its configuration alone."
    )(function)


def takes_model(function: Command) -> Command:
    """Add MODEL, its weights and its mode."""

    @wraps(function)
    def command(*args: Any, model: str, random_weights: bool, train: bool, **rest: Any) -> None:
        function(*args, net=load_model(model, random_weights, train), **rest)

    return click.argument("model")(weights_options(command))


def takes_inputs(function: Command) -> Command:
    """Add the inputs of the model."""

    @wraps(function)
    def command(*args: Any, inputs: tuple[str, ...], seed: int, **rest: Any) -> None:
        function(*args, asked=AskedInputs(inputs, seed), **rest)

    option = click.option(
        "-i", "--input", "inputs", multiple=True, metavar="[NAME=]SPEC",
        help="What to call the model with: a shape (8x3x32x32), tokens:1x16, ones:1x16, a file "
        "(.npy, .npz, .safetensors, .json) or file.py:name; repeat it for several arguments.",
    )  # fmt: skip
    seed = click.option("--seed", default=0, show_default=True, help="Of made-up inputs.")
    return option(seed(command))


def takes_screen(function: Command) -> Command:
    """Add where the output of a command goes, and in which form."""

    @wraps(function)
    def command(*args: Any, form: str, quiet: bool, **rest: Any) -> None:
        function(*args, screen=Screen(form, quiet), **rest)

    option = click.option(
        "--format", "form", type=click.Choice(["table", "json"]), default="table",
        help="A table for people, or JSON for programs.",
    )  # fmt: skip
    quiet = click.option("-q", "--quiet", is_flag=True, help="No narration on stderr.")
    return option(quiet(command))


where_option: Callable[[Command], Command] = click.option(
    "-w", "--where", multiple=True, metavar="PLACE", help="Places, such as 'h.*.mlp'; repeatable."
)
