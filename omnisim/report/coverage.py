"""Which states traces reach, as plain data and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnisim.coverage import STATES, Coverage, Seen
from omnisim.report.words import literal, print_table

__all__ = ["FORMAT", "coverage_json", "print_coverage", "print_reached"]

FORMAT = "omnisim-coverage/1"
_PAGE = 160
"""Columns: a console that is wider is a pipe, or has the room."""


def coverage_json(coverage: Coverage) -> dict[str, Any]:
    """Plain data: of each state how often it was reached, where first (null if never), and what it means."""
    return {
        "format": FORMAT,
        "reached": len(coverage.counts),
        "states": {
            state: {
                "times": coverage.times(state),
                "first": _first_data(coverage.first.get(state)),
                "meaning": meaning,
            }
            for state, meaning in STATES.items()
        },
    }


def _first_data(first: Seen | None) -> dict[str, Any] | None:
    return None if first is None else {"trace": first.path, "step": first.step, "request": first.req_id}


def print_reached(console: Console, coverage: Coverage) -> None:
    """A line a state that was reached, and how many were."""
    table = _table("state", "times", "meaning")
    for state in STATES:
        if coverage.times(state):
            table.add_row(state, f"{coverage.times(state):,}", STATES[state])
    if table.row_count:
        print_table(console, table)
    console.print(f"  {len(coverage.counts)} of {len(STATES)} states of a schedule", style="dim")


def print_coverage(console: Console, coverage: Coverage, *, many: bool = True) -> None:
    """A line a state, those that were not reached last and dim; and how many were. One trace is not named."""
    missed = [state for state in STATES if not coverage.times(state)]
    reached = _table("state", "times", "first seen", "meaning")
    for state, first in ((state, coverage.first[state]) for state in STATES if state not in missed):
        reached.add_row(state, f"{coverage.times(state):,}", _place(first, console if many else None), STATES[state])
    unreached = _table("not reached", "times", "meaning")
    for state in missed:
        unreached.add_row(state, "0", STATES[state], style="dim")
    for table in (reached, unreached):
        if table.row_count:
            print_table(console, table, indent=0)
    console.print(f"{len(STATES) - len(missed)} of {len(STATES)} states")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        match name:
            case "times":
                table.add_column(name, justify="right", no_wrap=True, min_width=6)
            case "meaning" | "first seen":
                table.add_column(name, overflow="fold", ratio=1)
            case _:
                table.add_column(name, no_wrap=True, min_width=max(map(len, STATES)))
    return table


def _place(first: Seen, console: Console | None) -> Text:
    """On a page the name of the file stands for its path; without a console the trace is known."""
    request = "" if first.req_id is None else f", {literal(first.req_id)}"
    where = f"step {first.step}{request}"
    if console is None:
        return Text(where)
    path = first.path if console.width > _PAGE else Path(first.path).name
    return Text(f"{literal(path)}, {where}")
