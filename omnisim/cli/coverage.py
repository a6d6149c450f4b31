"""``omnisim coverage``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import TracePaths, complain, console, trace_paths
from omnisim.cli.options import JsonFile, check_writable, write_json
from omnisim.errors import OmnisimError

if TYPE_CHECKING:
    from omnisim.coverage import Coverage

__all__ = ["coverage"]


def coverage(
    paths: TracePaths,
    require: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="States that must be reached, and how often (YAML); else exit 1.", show_default=False
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say which states of a schedule traces reach: kinds of hits, whose rows they are on, preemptions, ends.

    Exits with 0, with 1 if a state falls short of what is required, with 2 if a trace could not be read. What is
    required stands in a file: `format: omnisim-coverage-require/1`, and `states: {same-step-hit: 1}` or `[preempted]`.

    Examples:

    - `omnisim coverage traces/hello.yaml`
    - `omnisim coverage traces/recorded --json -`
    """
    from omnisim.coverage import read_required
    from omnisim.report.coverage import coverage_json, print_coverage

    required = {} if require is None else read_required(require)
    check_writable(json_file, paths)
    found = trace_paths(paths)
    total, unreadable = _covered(found)
    short = {state: {"times": total.times(state), "required": required[state]} for state in total.short_of(required)}
    code = 2 if unreadable else 1 if short else 0
    if json_file is not None:
        told = {**coverage_json(total), "short": short, "unreadable": unreadable, "exit_code": code}
        write_json(json_file, told)
    if json_file != "-":
        out = console()
        if len(unreadable) < len(found):
            print_coverage(out, total, many=len(found) - len(unreadable) > 1)
        for state, counts in short.items():
            out.print(f"[bold red]MISSING[/]  {state}: {counts['times']:,} of {counts['required']:,}")
        if required and not short:
            out.print(f"[green]all {len(required)} states that are required were reached[/]")
    raise typer.Exit(code)


def _covered(paths: list[Path]) -> tuple[Coverage, list[str]]:
    """What the traces reach that can be read, and what is wrong with the others."""
    from omnisim.coverage import Coverage, cover
    from omnisim.trace import load

    total, unreadable = Coverage(), []
    for path in paths:
        try:
            total += cover(load(path))
        except OmnisimError as error:
            complain(error)
            unreadable.append(str(error))
    return total, unreadable
