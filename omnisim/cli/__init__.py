"""The command line: each command reads its arguments, calls one function of the library, renders, and exits.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from omnisim import __version__
from omnisim.cli.bench import bench
from omnisim.cli.check import check
from omnisim.cli.convert import convert
from omnisim.cli.replay import replay
from omnisim.cli.show import show
from omnisim.errors import OmnisimError

__all__ = ["app", "main"]

app = typer.Typer(
    name="omnisim",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replay recorded vLLM schedules through a prefix cache of rows, and judge every row that it delivers.",
    epilog="Exit codes: 0 all agree, 1 some divergence or crash, 2 could not run (or the subject refused).",
)
for command in (replay, show, check, convert, bench):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omnisim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit 2, without a traceback."""
    try:
        app()
    except OmnisimError as error:
        typer.echo(f"omnisim: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output is gone, as in `omnisim show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        typer.echo("omnisim: interrupted", err=True)
        sys.exit(130)
