"""``omnisim check``."""

from __future__ import annotations

import typer

from omnisim.cli.common import TracePaths, complain, console, trace_paths
from omnisim.errors import OmnisimError

__all__ = ["check"]


def check(paths: TracePaths) -> None:
    """Say whether traces are legal: readable, and telling what can have happened.

    Examples:

    - `omnisim check trace.yaml`
    - `omnisim check traces/recorded`
    """
    from rich.text import Text

    from omnisim.report.show import count_steps, summary
    from omnisim.report.words import literal
    from omnisim.trace import load

    out = console()
    failed = 0
    for path in trace_paths(paths):
        try:
            trace = load(path)
            facts = summary(trace, count_steps(trace))
        except OmnisimError as error:
            failed += 1
            complain(error)
        else:
            out.print(Text.assemble(("legal", "green"), f"  {literal(str(path))}  ", (facts, "dim")), soft_wrap=True)
    raise typer.Exit(2 if failed else 0)
