"""The commands `summary` and `compare`.

- `summary`, `compare`: the commands
"""

from __future__ import annotations

import shutil
from typing import Any

import click
from torch import nn

import hookline as hl
from hookline.cli.models import CommandError, load_pair
from hookline.cli.options import (
    AskedInputs,
    takes_inputs,
    takes_model,
    takes_screen,
    weights_options,
    where_option,
)
from hookline.cli.output import Screen, aside, is_terminal

__all__ = ["compare", "summary"]


@click.command()
@takes_model
@takes_inputs
@click.option("--depth", type=click.IntRange(min=0), help="Show modules down to this depth.")
@where_option
@click.option("--backward", is_flag=True, help="Count the backward, too.")
@click.option("--time", "timed", is_flag=True, help="Time the forward, and the backward.")
@takes_screen
def summary(
    net: nn.Module,
    asked: AskedInputs,
    depth: int | None,
    where: tuple[str, ...],
    backward: bool,
    timed: bool,
    screen: Screen,
) -> None:
    """Tell what each module of MODEL costs.

    That is parameters, shapes, memory and FLOPs, and with --time the time. Without --input nothing
    runs, and only sizes are told.
    """
    if (backward or timed) and not asked:
        raise CommandError(
            f"{'--backward' if backward else '--time'} was asked for.",
            "There is no input, so nothing runs.",
            "Give --input.",
        )
    batch = asked.made_for(net).as_batch() if asked else None
    with aside():
        found = hl.summarize(net, batch, backward=backward, time=timed)
    table, data = found.show(list(where) or None, depth=depth, width=_width()), found.to_dict()
    table = table.replace("summary.show(depth=…)", "--depth shows them")
    paths = {place.path for place in hl.select(net, *where)} if where else None
    data["modules"] = [
        row for row in data["modules"]
        if (paths is None or row["place"] in paths) and (depth is None or row["depth"] <= depth)
    ]  # fmt: skip
    screen.text(table, data)


def _width() -> int:
    return shutil.get_terminal_size().columns if is_terminal() else 200


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@weights_options
@takes_inputs
@where_option
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="The relative error that counts as a difference.",
)
@click.option(
    "--map", "mapping", type=(str, str), multiple=True, metavar="PATH PATH",
    help="A path in A, or its beginning, and what it is in B; repeatable.",
)  # fmt: skip
@takes_screen
def compare(
    first: str,
    second: str,
    random_weights: bool,
    train: bool,
    asked: AskedInputs,
    where: tuple[str, ...],
    tolerance: float | None,
    mapping: tuple[tuple[str, str], ...],
    screen: Screen,
) -> None:
    """Name the first place where the models A and B differ.

    Both run on the same input. The exit code is 0 if they agree, and 1 if they do not.
    """
    one, other = load_pair(first, second, random_weights, train)
    batch = asked.made_for(one).as_batch()
    options: dict[str, Any] = {"where": list(where)} if where else {}
    with aside():
        found = hl.compare(one, other, batch, mapping=dict(mapping), tolerance=tolerance, **options)
    screen.text(found.show(width=_width()), found.to_dict())
    click.get_current_context().exit(0 if found.equal else 1)
