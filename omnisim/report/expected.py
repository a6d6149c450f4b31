"""Expectations on a terminal: a line a trace that is as expected, all that is to be known of one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from omnisim.expectations import Expected, exit_code
from omnisim.report.model import report, run_data
from omnisim.report.words import literal, num

__all__ = ["expected_report", "print_expected"]

_STYLES = {"AS EXPECTED": "green", "FIXED": "bold yellow", "FAILED": "bold red"}


def expected_report(results: Sequence[Expected]) -> dict[str, Any]:
    """A report in which each run has what was ``expected`` and its ``status``."""
    runs = [{**run_data(result.run), "expected": result.outcome, "status": result.status} for result in results]
    return report(runs, exit_code(results))


def print_expected(console: Console, results: Sequence[Expected]) -> None:
    """``results`` of one trace follow each other."""
    for trace, of_trace in groupby(results, key=lambda result: result.run.trace):
        together = list(of_trace)
        if as_expected := [result for result in together if result.status == "AS EXPECTED"]:
            _print_line(console, "AS EXPECTED", trace, num(len(as_expected), "subject"))
        for result in together:
            if result.status != "AS EXPECTED":
                _print_surprise(console, result)
    counts = {status: sum(result.status == status for result in results) for status in _STYLES}
    words = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    console.print(f"{num(len(results), 'outcome')}: {words}")


def _print_surprise(console: Console, result: Expected) -> None:
    run = result.run
    expected = "nothing was expected" if result.outcome is None else f"{result.outcome} was expected"
    _print_line(console, result.status, run.trace, f"{run.subject}: {expected}, {run.outcome} came")
    why = str(run.first) if run.first is not None else run.error
    if why:
        console.print(Text(f"             {literal(why)}", style="dim"))


def _print_line(console: Console, status: str, trace: str, said: str) -> None:
    console.print(Text.assemble((f"{status:11}", _STYLES[status]), f"  {literal(trace)}", (f"  {said}", "dim")))
