"""Commands that weigh a model: `summary` and `compare`."""

from __future__ import annotations

from typing import Any

import click

import hookline as hl
from hookline.cli.models import Inputs, load_inputs, load_model
from hookline.cli.options import input_option, model_argument, output_options, where_option
from hookline.cli.output import Screen

__all__ = ["compare", "summary"]


@click.command()
@model_argument()
@input_option
@click.option("--depth", type=int, help="Show modules down to this depth.")
@click.option("-w", "--where", metavar="PLACE", help="Show only these modules.")
@click.option("--backward", is_flag=True, help="Count the backward, too.")
@click.option("--time", "timed", is_flag=True, help="Time the forward, and the backward.")
@output_options
def summary(
    model: str, random_weights: bool, inputs: tuple[str, ...], seed: int, depth: int | None,
    where: str | None, backward: bool, timed: bool, form: str, quiet: bool,
) -> None:  # fmt: skip
    """Tell what each module of MODEL costs: parameters, shapes, memory, FLOPs, time.

    Without --input nothing runs, and only sizes are told.
    """
    screen, net = Screen(form, quiet), load_model(model, random_weights)
    batch = batch_of(load_inputs(inputs, net, seed)) if inputs else None
    found = hl.summarize(net, batch, backward=backward, time=timed)
    screen.text(found.table(depth=depth, where=where), found.to_dict())


def batch_of(inputs: Inputs) -> Any:
    """The same for functions that take one batch."""
    if inputs.args and inputs.kwargs:
        return inputs.run
    return inputs.args or inputs.kwargs


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--random-weights", is_flag=True, help="Build hf:NAME from its configuration alone.")
@input_option
@where_option
@click.option("--tolerance", type=float, help="The relative error that counts as a difference.")
@output_options
def compare(
    first: str, second: str, random_weights: bool, inputs: tuple[str, ...], seed: int,
    where: tuple[str, ...], tolerance: float | None, form: str, quiet: bool,
) -> None:  # fmt: skip
    """Run the models A and B on the same input and name the first place where they differ.

    The exit code is 0 if they agree, and 1 if they do not.
    """
    screen = Screen(form, quiet)
    one, other = load_model(first, random_weights), load_model(second, random_weights)
    batch = batch_of(load_inputs(inputs, one, seed))
    options: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    found = hl.compare(one, other, batch, where=list(where) or "**", **options)
    screen.text(str(found), found.to_dict())
    click.get_current_context().exit(0 if found.equal else 1)
