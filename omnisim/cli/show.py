"""``omnisim show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnisim.cli.common import console
from omnisim.errors import UsageError

__all__ = ["show"]


def show(
    path: Annotated[Path, typer.Argument(help="Trace to show.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="One step's batch in full.", show_default=False)
    ] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="One request's life.", show_default=False)] = None,
) -> None:
    """Show what happened in a trace: a timeline of requests over steps, one step, or one request.

    Examples:

    - `omnisim show traces/hello.yaml`
    - `omnisim show traces/hello.yaml --step 1`
    - `omnisim show traces/hello.yaml --request B`
    """
    from omnisim.report.show import print_overview, print_request, print_step
    from omnisim.trace import load

    trace, out = load(path), console()
    if step is not None:
        found = next((one for one in trace.steps() if one.index == step), None)
        if found is None:
            raise UsageError(f"{path} has no step {step}", "omnisim show without --step says how many there are")
        print_step(out, found)
    if request is not None and not print_request(out, trace, request):
        raise UsageError(f"{path} has no request {request!r}", "omnisim show without --request lists them")
    if step is None and request is None:
        print_overview(out, trace)
