"""The command line: `hookline …` and `python -m hookline …`."""

import sys

from hookline.operating_system import print_anything

__all__ = ["main"]


def main() -> None:
    """Run the command line, or print what to install for it."""
    try:
        from hookline.cli.commands import hookline
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write(
            f"Error: the command line was asked for.\n  It needs {error.name}, which is not "
            f"installed.\n  Install it with: pip install 'hookline[cli]'\n"
        )
        sys.exit(2)
    print_anything()
    hookline(prog_name="hookline")


if __name__ == "__main__":
    main()
