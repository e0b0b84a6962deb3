"""The commands `places` and `capture`, which list and show values of a model.

- `places`, `capture`: the commands
- `loss_of(output, kind)`: one number to run a backward from
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.cli.models import CommandError, Inputs
from hookline.cli.options import (
    AskedInputs,
    takes_inputs,
    takes_model,
    takes_screen,
    where_option,
)
from hookline.cli.output import Screen, aside, show_number
from hookline.places.grammar import is_gradient, parse
from hookline.values.nested import leaves
from hookline.values.quantisation import dequantised
from hookline.values.tables import describe, show_bytes

__all__ = ["capture", "loss_of", "places"]


@click.command()
@takes_model
@click.argument("where", nargs=-1)
@takes_inputs
@takes_screen
def places(net: nn.Module, where: tuple[str, ...], asked: AskedInputs, screen: Screen) -> None:
    """List the places of MODEL that match WHERE.

    Without WHERE, these are all modules.

    With --input the model runs once, and values have shapes; operations can then be listed, too:

      hookline places file.py:net 'attn/*' -i 1x8x64
    """
    operations = [w for w in where if parse(w).operation is not None]
    if asked:
        rows = _seen(net, where, operations, asked.made_for(net))
    elif operations:
        raise CommandError(
            f"The operation {operations[0]!r} was asked for.",
            "Which operations there are is known when the model has run, and it has no input.",
            "Give --input.",
        )
    else:
        found = hl.select(net, *(where or _every(net)))
        rows = [(str(place), _kind(net, place), _size(net, place), "") for place in found]
    names = ("place", "type", "value", "source")
    shown = 4 if operations else 3
    screen.table(
        f"{type(net).__name__}: {show_number(len(rows), 'place')}",
        [names[:shown], *[(row[0] or "''", *row[1:shown]) for row in rows]],
        [dict(zip(names, row, strict=True)) for row in rows],
    )


def _every(model: nn.Module) -> list[str]:
    """Return all modules, or the model itself if it has none."""
    return ["**"] if any(True for _ in model.children()) else [""]


def _kind(model: nn.Module, place: hl.Place) -> str:
    if place.port in ("value", "grad"):
        return type(hl.get_parameter(model, place.path)).__name__
    return type(model.get_submodule(place.path)).__name__


def _size(model: nn.Module, place: hl.Place) -> str:
    """Return the shape of a tensor, or the number of parameters in a module."""
    if place.port in ("value", "grad"):
        return describe(hl.get_parameter(model, place.path))
    count = sum(p.numel() for p in model.get_submodule(place.path).parameters())
    return f"{count:,} parameters" if count else ""


def _seen(
    model: nn.Module, where: tuple[str, ...], operations: list[str], batch: Inputs
) -> list[tuple[str, str, str, str]]:
    """Run the model; return places with shapes, and operations with their source."""
    plain = [w for w in where if w not in operations] or ([] if operations else _every(model))
    rows: list[tuple[str, str, str, str]] = []
    if plain:
        gradients = any(is_gradient(place.port) for place in hl.select(model, *plain))
        with torch.set_grad_enabled(gradients), hl.capture(model, plain) as record:
            out = batch.run(model)
            if gradients:
                loss_of(out, "sum").backward()
        for place in record.places():
            calls = record.calls(place)
            shown = ", ".join(describe(t) for _, t in leaves(calls[0])) or type(calls[0]).__name__
            shown += f" × {len(calls)}" * (len(calls) > 1)
            rows.append((str(place), _kind(model, place), shown, ""))
        rows += [(str(place), _kind(model, place), "nothing", "") for place in record.unfired()]
    if operations:
        with aside():
            listing: Any = hl.select(model, *operations, inputs=batch.as_batch())
        rows += [(str(p), "operation", *row) for p, row in listing.rows.items()]
    return rows


@click.command()
@takes_model
@takes_inputs
@where_option
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), help="Save the values in this folder."
)
@click.option(
    "--backward",
    type=click.Choice(["sum", "mean"]),
    help="Also run a backward, from the sum or the mean of the output; for :grad places.",
)
@click.option("--stop", is_flag=True, help="End the forward after the last place asked for.")
@takes_screen
def capture(
    net: nn.Module,
    asked: AskedInputs,
    where: tuple[str, ...],
    to: Path | None,
    backward: str | None,
    stop: bool,
    screen: Screen,
) -> None:
    """Run MODEL once, and show and save the values inside.

    Without --where, those of every module.

    \b
      hookline capture file.py:net -i 8x3x32x32 -w 'layer*.conv2' --to values
      hookline report values
    """
    batch = asked.made_for(net)
    late = [place for place in hl.select(net, *where) if is_gradient(place.port)] if where else []
    if late and backward is None:
        raise CommandError(
            f"The gradient at {str(late[0])!r} was asked for.",
            "No backward runs.",
            "Give --backward sum, or mean.",
        )
    with torch.set_grad_enabled(backward is not None):
        with hl.capture(net, *(where or _every(net)), detach=True, stop=stop) as record:
            out = batch.run(net)
            if backward is not None:
                loss_of(out, backward).backward()
    rows, data = _described(record)
    count = show_number(len(record.places()), "place")
    screen.table(f"{count}, {show_bytes(record.nbytes)}", rows, data)
    for place, why in record.unfired().items():
        screen.say(f"{place}: {why}")
    if to is not None:
        hl.save_record(record, to)
        screen.say(f"saved in {to}; hookline.load_record({str(to)!r}) reads it")


def loss_of(output: Any, kind: str) -> Tensor:
    """Return one number to run a backward from."""
    tensors = [t for _, t in leaves(output) if t.requires_grad]
    if not tensors:
        raise CommandError(
            "A backward was asked for.",
            "The model's output holds no tensor that requires grad.",
            "Leave out --backward and gradient places.",
        )
    total = tensors[0].float()
    return total.sum() if kind == "sum" else total.mean()


def _described(record: hl.Record) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    names = ("place", "call", "value", "mean", "std", "min", "max")
    rows: list[tuple[str, ...]] = [names]
    data: list[dict[str, Any]] = []
    for place in record.places():
        for call, value in record.numbered(place):
            for path, tensor in leaves(value):
                part = hl.Place(place.path, place.port, (*place.parts, *path), place.operation)
                figures = _figures(tensor)
                shown = ["" if f is None else f"{f:.4g}" for f in figures]
                finite = [f if f is not None and isfinite(f) else None for f in figures]
                rows.append((str(part) or "''", str(call), describe(tensor), *shown))
                data.append({
                    "place": str(part), "call": call,
                    "shape": None if tensor.is_nested else list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    **dict(zip(names[3:], finite, strict=True)),
                })  # fmt: skip
    for place, why in record.unfired().items():
        rows.append((str(place), "-", "nothing", "", "", "", ""))
        data.append({"place": str(place), "call": None, "why": why})
    return rows, data


def _figures(tensor: Tensor) -> list[float | None]:
    tensor = dequantised(tensor.detach())
    if tensor.is_nested or tensor.layout is not torch.strided:
        return [None] * 4
    if not tensor.numel() or tensor.is_complex() or tensor.is_meta:
        return [None] * 4
    values = tensor.double()
    spread = values.std(correction=0)
    found = [values.mean(), spread, values.min(), values.max()]
    return [float(f) for f in found]
