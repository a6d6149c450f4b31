"""Traces by subjects: a cell says what came of it, a line what makes a subject differ from the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnisim.matrix import Runs
from omnisim.report.model import report, run_data
from omnisim.report.terminal import OUTCOME_STYLES
from omnisim.report.words import literal, num, print_table
from omnisim.verify import Run

__all__ = ["comparison", "differences", "exit_code", "print_comparison"]

_CELLS = {
    "agreement": "agrees",
    "divergence": "differs",
    "refusal": "refuses",
    "crash": "crashes",
    "unusable": "unusable",
}


def comparison(paths: Sequence[Path], subjects: Sequence[str], runs: Runs) -> dict[str, Any]:
    """A report of all runs, with the ``differences`` from the first subject."""
    different = list(differences(paths, subjects, runs))
    code = exit_code(runs, bool(different))
    told = report([run_data(runs[path, subject]) for path in paths for subject in subjects], code)
    return {**told, "differences": [{"trace": run.trace, "subject": run.subject} for run in different]}


def exit_code(runs: Runs, differ: bool) -> int:
    """As of diff: 0 no difference, 1 some, 2 something could not be judged."""
    if any(run.outcome == "unusable" for run in runs.values()):
        return 2
    return 1 if differ else 0


def differences(paths: Sequence[Path], subjects: Sequence[str], runs: Runs) -> Iterator[Run]:
    """Runs that are not as the first subject's of the same trace: another outcome, count, or first divergence."""
    for path in paths:
        first = _essence(runs[path, subjects[0]])
        yield from (runs[path, subject] for subject in subjects[1:] if _essence(runs[path, subject]) != first)


def _essence(run: Run) -> tuple[Any, ...]:
    where = None
    if run.first is not None:
        divergence = run.first.divergence
        where = (divergence.step, divergence.req_id, divergence.key, divergence.check)
    return run.outcome, _counts(run), where, run.error.partition(" (")[0]


def _counts(run: Run) -> tuple[int, int]:
    """Outputs that are wrong, and all that were judged."""
    keys = run.tally.keys.values()
    return sum(key.outputs_wrong for key in keys), sum(key.outputs_checked for key in keys)


def print_comparison(console: Console, paths: Sequence[Path], subjects: Sequence[str], runs: Runs) -> None:
    """The matrix, and a line a difference. Where it is wider than the terminal, a line a trace and subject."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("trace", no_wrap=True)
    for subject in subjects:
        table.add_column(Text(literal(subject)), no_wrap=True)
    for path in paths:
        table.add_row(Text(literal(str(path))), *(_cell(runs[path, subject]) for subject in subjects))
    if console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
        print_table(console, table, indent=0)
    else:
        _print_list(console, paths, subjects, runs)
    different = list(differences(paths, subjects, runs))
    for run in different:
        line = f"{literal(run.trace)}: {literal(run.subject)} is not as {literal(subjects[0])}: "
        console.print(Text.assemble((line, "bold"), literal(_told(run))), soft_wrap=True)
    console.print(
        f"{num(len(paths), 'trace')} under {num(len(subjects), 'subject')} (outputs wrong/checked): "
        f"{num(len(different), 'difference')}"
    )


def _print_list(console: Console, paths: Sequence[Path], subjects: Sequence[str], runs: Runs) -> None:
    for path in paths:
        console.print(Text(literal(str(path))))
        table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
        for subject in subjects:
            table.add_row(Text(literal(subject)), _cell(runs[path, subject]))
        print_table(console, table)


def _cell(run: Run) -> Text:
    wrong, checked = _counts(run)
    counts = "" if run.outcome == "unusable" else f" {wrong:,}/{checked:,}"
    return Text(_CELLS[run.outcome] + counts, style=OUTCOME_STYLES[run.outcome])


def _told(run: Run) -> str:
    wrong, checked = _counts(run)
    if run.first is not None:
        return f"{wrong:,} of {checked:,} outputs wrong; the first: {run.first}"
    if run.error:
        return f"{run.outcome}: {run.error.splitlines()[0]}"
    return f"{run.outcome}: {wrong:,} of {checked:,} outputs wrong"
