"""The commands `report`, `view` and `demo`.

- `report`, `view`, `demo`: the commands
"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

import hookline as hl
from hookline.cli.models import CommandError, load_model
from hookline.cli.options import AskedInputs, takes_inputs, weights_options
from hookline.cli.output import Screen, aside

__all__ = ["demo", "report", "view"]


@click.command()
@click.argument("source", metavar="PATH_OR_MODEL")
@click.option("--to", default="report.html", show_default=True, help="The page to write.")
@takes_inputs
@weights_options
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
@click.option("-q", "--quiet", is_flag=True, help="No narration on stderr.")
def report(
    source: str,
    to: str,
    asked: AskedInputs,
    random_weights: bool,
    train: bool,
    opened: bool,
    quiet: bool,
) -> None:
    """Write one HTML page about a record, a store, a run or a model.

    A model is given as in the other commands; with --input it runs once, and its values are shown.
    """
    from hookline.view.reporting import kind_of

    options: dict[str, Any] = {}
    screen = Screen(quiet=quiet)
    what: Any = Path(source)
    if what.is_dir() or not (":" in source or source.endswith(".py")):
        if kind_of(what) is None:
            raise CommandError(
                f"{source!r} was to be opened.",
                "It holds no record, store or run."
                if what.is_dir()
                else "There is no such folder.",
                "Name a folder that save_record, harvest or watch has written, or a model: "
                "file.py:name.",
            )
        if asked or random_weights or train:
            screen.say("A folder is not run: --input, --random-weights and --train say nothing.")
    else:
        what = load_model(source, random_weights, train)
        if asked:
            options["batch"] = asked.made_for(what).as_batch()
    with aside():
        hl.report(what, to=to, **options)
    screen.say(f"{Path(to).stat().st_size / 1000:,.0f} KB")
    click.echo(to)
    if opened:
        webbrowser.open(Path(to).resolve().as_uri())


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port; without it, a free one."
)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
def view(path: Path, port: int, opened: bool) -> None:
    """Serve a run, a store or a record as a page that grows with it.

    Only this machine can reach it, and nothing is written. End it with Ctrl-C.
    """
    from hookline.view.server import serve

    server = serve(path, port=port)
    click.echo(server.address)
    if opened:
        webbrowser.open(server.address)
    server.serve_forever()


@click.command()
def demo() -> None:
    """Train a small CNN, find what is wrong, and write a page."""
    from hookline.demo import main

    main()
