"""The command line: each command reads its arguments, calls one function of the library, renders, and exits.

Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from typing import Annotated, Any

import typer

from omnisim import __version__
from omnisim.cli.bench import bench
from omnisim.cli.bisect import bisect
from omnisim.cli.check import check
from omnisim.cli.common import ReaderGone, complain
from omnisim.cli.compare import compare
from omnisim.cli.convert import convert
from omnisim.cli.coverage import coverage
from omnisim.cli.replay import replay
from omnisim.cli.show import show
from omnisim.cli.simulate import simulate
from omnisim.cli.subjects import subjects
from omnisim.errors import OmnisimError

__all__ = ["app", "main"]

app = typer.Typer(
    name="omnisim",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replay recorded vLLM schedules through a prefix cache of rows, and judge every row that it delivers.",
    epilog="Exit codes: 0 all agree, 1 some divergence or crash, 2 could not run (or the subject refused).",
)
for command in (replay, simulate, compare, bisect, show, check, coverage, convert, bench):
    app.command()(command)
app.add_typer(subjects)


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


_WrongUsage: Any = typer.BadParameter.__base__
"""Base of the errors of a command line that cannot be parsed; typer brings its own click or uses the one there is."""


def main() -> None:
    """Entry point: what a user can mend is one line on stderr and exit 2, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to stop
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("%(name)s: %(message)s"))  # a warning says whose it is
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="omnisim", standalone_mode=False))
    except OmnisimError as error:
        complain(error)
        sys.exit(2)
    except _WrongUsage as error:
        command = error.ctx.command_path if error.ctx else "omnisim"
        complain(f"{error.format_message().rstrip('.')}; see {command} --help")
        sys.exit(2)
    except ReaderGone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
