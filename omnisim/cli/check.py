"""``omnisim check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from omnisim.cli.common import TracePaths, console, trace_paths
from omnisim.errors import OmnisimError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check"]


def check(paths: TracePaths) -> None:
    """Say whether traces are legal: readable, and telling what can have happened.

    Examples:

    - `omnisim check trace.yaml`
    - `omnisim check traces/`
    """
    out = console()
    failed = 0
    for path in trace_paths(paths):
        try:
            out.print(f"[green]legal[/]  {path}  [dim]{_summary(path)}[/]", soft_wrap=True)
        except OmnisimError as error:
            failed += 1
            typer.echo(f"omnisim: {error}", err=True)
    raise typer.Exit(2 if failed else 0)


def _summary(path: Path) -> str:
    from omnisim.trace import load

    trace = load(path)
    num_steps = num_requests = num_tokens = 0
    for step in trace.steps():
        num_steps += 1
        num_requests += len(step.scheduled_new_reqs)
        num_tokens += step.num_tokens
    header = trace.header
    return (
        f"{num_steps:,} steps, {num_requests:,} requests, {num_tokens:,} tokens; {header.cache.num_blocks:,} blocks "
        f"of {header.cache.block_size}; content {header.content}; by {header.producer.name} {header.producer.version}"
    )
