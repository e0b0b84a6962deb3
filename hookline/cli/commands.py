"""The command `hookline`: the group of all commands, and how it reports errors.

- `hookline`: the group of commands

Exit codes: 0 done; 1 a comparison found differences, or `doctor` a problem; 2 an error; 130 stopped
by Ctrl-C.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

import click

import hookline as hl
from hookline.cli.doctor import doctor
from hookline.cli.harvest_and_recipes import harvest, recipes
from hookline.cli.inspect import capture, places
from hookline.cli.output import fail
from hookline.cli.report_and_view import demo, report, view
from hookline.cli.summary_and_compare import compare, summary

__all__ = ["hookline"]


class _CommandGroup(click.Group):
    """A group of commands that prints errors in three parts, and tracebacks only with --debug."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if "--debug" in own:  # wherever it stands: people add it at the end
            args = ["--debug", *[a for a in own if a != "--debug"], *args[len(own) :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                if not ctx.params.get("debug"):
                    warnings.showwarning = _told
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
            ctx.exit(130)
        except SystemExit as error:  # of a model's forward
            said = error.code if isinstance(error.code, str) else f"SystemExit was raised: {error}."
            click.echo(f"Error: {said}", err=True)
            ctx.exit(2)
        except BrokenPipeError:  # of `hookline … | head`
            sys.stderr.close()
            ctx.exit(0)
        except Exception as error:  # noqa: BLE001 - a program ends with a message and a code
            if ctx.params.get("debug"):
                traceback.print_exc()
            else:
                fail(error)
                if not isinstance(error, hl.HooklineError):
                    click.echo(f"  ({type(error).__name__}; --debug shows where)", err=True)
            ctx.exit(2)


def _told(message: Warning | str, *_: Any) -> None:
    click.echo(f"Note: {message}", err=True)


@click.group(
    cls=_CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 differences or problems found, 2 an error, 130 stopped.",
)
@click.version_option(hl.__version__, message="hookline %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def hookline(debug: bool) -> None:
    """See inside any PyTorch model: its places, values, costs and what went wrong in training.

    MODEL is package.module:factory, file.py:name, or hf:FOLDER for a transformers model.
    """


for command in (places, capture, summary, compare, harvest, recipes, report, view, demo, doctor):
    hookline.add_command(command)


@hookline.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands.

    It is used as in eval "$(hookline completion bash)".
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(hookline, {}, "hookline", "_HOOKLINE_COMPLETE").source())
