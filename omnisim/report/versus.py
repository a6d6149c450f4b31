"""Caches against each other on a terminal: a line a phase, width and subject, then what each writes in a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnisim.report.words import literal, num, print_table
from omnisim.versus import PHASES, Copied, Phase, Timing

__all__ = ["GOALS", "print_copied", "print_timings"]

_PHASES: dict[Phase, str] = {
    "update": "update: 2,048 rows",
    "merge": "merge: 8 hits of 1,024 rows, and 64 new rows each",
    "decode": "decode: 4 steps of 64 requests, no hit",
}
GOALS: dict[Phase, float] = {"update": 1.0, "merge": 2.0, "decode": 2.5}
"""How many times as fast as vllm-omni 0.28.0 our cache is to be; a goal of this project and of no other cache."""


def print_timings(console: Console, timings: Mapping[int, Mapping[str, Mapping[Phase, Timing]]]) -> None:
    """``timings`` by width, subject and phase, each against ``copy_`` and against the first subject."""
    first = next(iter(next(iter(timings.values()))))
    for phase in PHASES:
        console.print(f"[bold]{_PHASES[phase]}[/], bf16")
        table = Table(box=None, padding=(0, 2), header_style="dim")
        columns = "width", "subject", "ms", "copy_ ms", "of copy_", Text(f"times as fast as {literal(first)}"), ""
        for column in columns:
            table.add_column(column, justify="left" if column in ("subject", "") else "right")
        for width, by_subject in timings.items():
            for subject, by_phase in by_subject.items():
                timing = by_phase[phase]
                faster = by_subject[first][phase].seconds / timing.seconds
                table.add_row(
                    f"{width:,}",
                    Text(literal(subject)),
                    f"{timing.seconds * 1e3:.2f}",
                    f"{timing.copy_seconds * 1e3:.2f}",
                    f"{timing.copy_seconds / timing.seconds:.2f}",
                    f"{faster:.2f}" if subject != first else "",
                    _goal(first, subject, phase, faster),
                )
        print_table(console, table)


def _goal(first: str, subject: str, phase: Phase, faster: float) -> str:
    if (first, subject) != ("vllm-omni:0.28.0", "builtin"):
        return ""
    met = "[green]met[/]" if faster >= GOALS[phase] else "[yellow]missed[/]"
    return f"goal {GOALS[phase]:g}, {met}"


def print_copied(console: Console, path: Path, copied: Mapping[str, Copied | str]) -> None:
    """What each subject wrote in one trace, or why that is not known."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("subject", "rows written", "bytes written", "bytes a step", "written : read again"):
        table.add_column(column, justify="left" if column == "subject" else "right")
    counted = {subject: one for subject, one in copied.items() if isinstance(one, Copied)}
    for subject, one in counted.items():
        table.add_row(
            Text(literal(subject)),
            f"{one.rows_written:,}",
            f"{one.bytes_written:,}",
            f"{one.bytes_written / one.steps:,.0f}",
            f"{one.rows_written / one.rows_read_again:.1f}" if one.rows_read_again else "none is",
        )
    if counted:
        schedule = next(iter(counted.values()))
        console.print(Text(literal(str(path)), style="bold"), soft_wrap=True, end="")
        console.print(
            f": {num(schedule.steps, 'step')}, {num(schedule.rows_computed, 'row')} computed, "
            f"{schedule.rows_read_again:,} of them ever read again by a hit"
        )
        print_table(console, table)
    for why in copied.values():
        if isinstance(why, str):
            console.print(Text(literal(why)), soft_wrap=True)
