"""Options that several commands take.

- `model_argument`, `input_option`, `where_option`, `output_options`: decorators
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["input_option", "model_argument", "output_options", "where_option"]

F = TypeVar("F", bound=Callable[..., Any])


def _together(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def model_argument(name: str = "model") -> Callable[[F], F]:
    """MODEL, and how a transformers model gets its weights."""
    return _together(
        click.argument(name),
        click.option(
            "--random-weights", is_flag=True, help="Build hf:NAME from its configuration alone."
        ),
    )


input_option: Callable[[F], F] = _together(
    click.option(
        "-i", "--input", "inputs", multiple=True, metavar="[NAME=]SPEC",
        help="What to call the model with: a shape (8x3x32x32), tokens:1x16, ones:1x16, a file "
        "(.npy, .npz, .safetensors, .json) or file.py:name; repeat it for several arguments.",
    ),
    click.option("--seed", default=0, show_default=True, help="Of made-up inputs."),
)  # fmt: skip

where_option: Callable[[F], F] = click.option(
    "-w", "--where", multiple=True, metavar="PLACE", help="Places, such as 'h.*.mlp'; repeatable."
)

output_options: Callable[[F], F] = _together(
    click.option(
        "--format", "form", type=click.Choice(["table", "json"]), default="table",
        help="A table for people, or JSON for programs.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="No narration on stderr."),
)  # fmt: skip
