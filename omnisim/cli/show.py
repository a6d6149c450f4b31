"""``omnisim show``."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import console
from omnisim.errors import UsageError

if TYPE_CHECKING:
    from omnisim.trace import Trace
    from omnisim.trace.model import Step

__all__ = ["show"]


def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Trace to show.", show_default=False)],
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
        print_step(out, _step(trace, step))
    if request is not None and not print_request(out, trace, request):
        raise UsageError(f"{path} has no request {request!r}", _others(trace, request))
    if step is None and request is None:
        print_overview(out, trace)


def _step(trace: Trace, index: int) -> Step:
    at = -1
    for step in trace.steps():
        if step.index == index:
            return step
        at = step.index
    raise UsageError(f"{trace.path} has no step {index}", f"its last is {at}" if at >= 0 else "it has none at all")


def _others(trace: Trace, req_id: str) -> str:
    known = list(dict.fromkeys(new.req_id for step in trace.steps() for new in step.scheduled_new_reqs))
    if close := get_close_matches(req_id, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"its requests are {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}" if known else "it has none"
