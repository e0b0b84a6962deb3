"""The commands `harvest` and `recipes`, which write and read folders.

- `harvest`, `recipes`: the commands
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, cast

import click
import torch
from torch import nn

import hookline as hl
from hookline.cli.models import CommandError, load_model, load_object
from hookline.cli.options import takes_model, takes_screen, weights_options, where_option
from hookline.cli.output import Screen, aside, show_number

__all__ = ["harvest", "recipes"]

_DATA = "Write package.module:name or file.py:name, of batches or of a function that gives them."
_TEXT, _FLAG = "a text", "true or false"
_TEXTS, _WHEN = "a text or a list of texts", 'true, false or "auto"'
_KEYS = {
    "model": _TEXT, "data": _TEXT, "where": _TEXTS, "to": _TEXT, "dtype": _TEXT, "stop": _WHEN,
    "mask": _TEXT, "ids": _TEXT, "random_weights": _FLAG, "train": _FLAG,
}  # fmt: skip


@click.command()
@click.argument("plan", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", help="MODEL, in the plan's stead.")
@click.option("--data", help="package.module:name or file.py:name of the batches.")
@where_option
@click.option("--to", help="The folder of the store.")
@click.option("--dtype", help="How to store floating-point values, such as bfloat16.")
@click.option("--mask", help="The part of a batch that is nonzero for tokens, zero for padding.")
@click.option("--ids", help="The part of a batch that holds sample ids.")
@weights_options
@takes_screen
def harvest(plan: Path | None, where: tuple[str, ...], screen: Screen, **given: Any) -> None:
    """Run a model over data and store values; run again, it goes on.

    PLAN is a TOML file with the same names as the options, which come before it:

    \b
      model = "nets.py:make"
      data  = "nets.py:batches"
      where = ["h.*.mlp"]
      to    = "activations"
    """
    options = _read_plan(plan) | {key: value for key, value in given.items() if value}
    if where:
        options["where"] = list(where)
    missing = [key for key in ("model", "data", "where", "to") if not options.get(key)]
    if missing:
        raise CommandError(
            "A harvest was asked for.",
            f"It lacks {', '.join(missing)}.",
            "Give a plan, or the options of these names.",
        )
    net = load_model(
        options["model"], options.get("random_weights", False), options.get("train", False)
    )
    data = load_object(options["data"], _DATA)
    if Path(options["to"]).is_file():
        raise CommandError(
            f"The store {options['to']!r} was asked for.", "It is a file.", "Name a folder."
        )
    more: dict[str, Any] = {k: options[k] for k in ("mask", "ids", "stop") if k in options}
    if "dtype" in options:
        more["dtype"] = _dtype(options["dtype"])
    more |= {"to": options["to"], "quiet": screen.quiet}
    with aside():
        store = hl.harvest(net, data, options["where"], **more)
    info = store.info()
    screen.text(repr(info), {
        "folder": info.folder, "samples": info.samples, "places": list(info.places),
        "bytes": info.nbytes, "shards": info.shards,
    })  # fmt: skip


def _read_plan(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    asked = f"The plan {str(path)!r} was to be read."
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Name a TOML file, or use the options."
        raise CommandError(asked, f"It cannot be: {error.strerror}.", remedy) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(asked, f"It is no TOML: {error}.", "Mend that line.") from None
    unknown = sorted(set(found) - set(_KEYS))
    if unknown:
        raise CommandError(
            asked,
            f"It has {', '.join(unknown)}, which no harvest knows.",
            f"It may have {', '.join(sorted(_KEYS))}.",
        )
    for key, value in found.items():
        if not _is(value, _KEYS[key]):
            shown = f"{type(value).__name__} {value!r}"[:80]
            raise CommandError(asked, f"Its {key} is the {shown}.", f"Write {_KEYS[key]}.")
    return found


def _is(value: Any, kind: str) -> bool:
    """Return True if a value of a plan has the type that its name needs."""
    if kind == _TEXTS and isinstance(value, list):
        return all(isinstance(item, str) for item in cast("list[Any]", value))
    if kind in (_FLAG, _WHEN):
        return isinstance(value, bool) or (kind == _WHEN and value == "auto")
    return isinstance(value, str)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CommandError(
            f"The dtype {name!r} was asked for.",
            "torch has none of that name.",
            "Name one such as bfloat16, float16 or float32.",
        )
    return found


@click.group()
def recipes() -> None:
    """Show, check and join edits that were saved by Recipe.save."""


_folder = click.argument("folder", type=click.Path(path_type=Path))
_functions = click.option(
    "--allow-functions",
    is_flag=True,
    help="Import the functions that it names (runs their code), and take regular expressions.",
)


@recipes.command()
@_folder
@_functions
@takes_screen
def show(folder: Path, allow_functions: bool, screen: Screen) -> None:
    """Show what a recipe does."""
    recipe = hl.Recipe.load(folder, allow_functions=allow_functions)
    screen.text(repr(recipe), recipe.describe_entries())


@recipes.command()
@_folder
@takes_model
@_functions
@takes_screen
def check(folder: Path, net: nn.Module, allow_functions: bool, screen: Screen) -> None:
    """Check that a recipe fits MODEL: all its places are there.

    Which operations a module calls is not checked: that shows in a run only.
    """
    recipe = hl.Recipe.load(folder, allow_functions=allow_functions)
    with recipe.on(net) as applied:
        applied.remove()  # nothing runs, so nothing is to have fired
    screen.text(
        f"The recipe fits {type(net).__name__}: {show_number(len(recipe), 'edit')}.",
        {"fits": True, "edits": len(recipe)},
    )


@recipes.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Where to save it.")
@_functions
def join(folders: tuple[Path, ...], to: Path, allow_functions: bool) -> None:
    """Join recipes, in this order, into one."""
    joined = hl.Recipe()
    for folder in folders:
        joined += hl.Recipe.load(folder, allow_functions=allow_functions)
    joined.save(to)
    click.echo(f"{show_number(len(joined), 'edit')} in {to}", err=True)
