"""A run on a terminal: a line a trace, and the first divergence in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from omnisim.report.model import again
from omnisim.verify import Run

__all__ = ["OUTCOME_STYLES", "print_run", "print_totals"]

OUTCOME_STYLES = {
    "agreement": "bold green",
    "divergence": "bold red",
    "crash": "bold red",
    "refusal": "bold yellow",
    "unusable": "bold yellow",
}


def print_run(console: Console, run: Run) -> None:
    """One run: its outcome, what was judged and, where there is one, the first divergence."""
    console.print(_headline(run))
    console.print(_facts(run))
    if run.tally.keys:
        console.print(_keys_table(run))
    for note in run.notes:
        console.print(Text(f"  note: {note}", style="yellow"))
    if run.error:
        console.print(Text(f"  {run.error}", style=OUTCOME_STYLES[run.outcome]))
    if run.first is not None:
        console.print(_first_divergence(run))
    console.print()


def _headline(run: Run) -> Text:
    return Text.assemble(
        (run.outcome.upper(), OUTCOME_STYLES[run.outcome]),
        f"  {run.trace}",
        (f"  subject {run.subject}, talker {run.talker}, truth {run.truth}", "dim"),
    )


def _facts(run: Run) -> Text:
    hits = sum(count for kind, count in run.hits.items() if kind != "resumed")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(run.hits.items()))
    return Text(
        f"  {run.steps:,} steps, {run.requests:,} requests, {hits:,} hits{f' ({kinds})' if kinds else ''}", style="dim"
    )


def _keys_table(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("key")
    for column in ("outputs", "wrong", "rows", "wrong", "written", "served"):
        table.add_column(column, justify="right")
    written, served = run.counts.get("written", {}), run.counts.get("served", {})
    for key, tally in sorted(run.tally.keys.items()):
        table.add_row(
            key,
            f"{tally.outputs_checked:,}",
            _wrong(tally.outputs_wrong),
            f"{tally.rows_checked:,}" if tally.rows_checked else "-",
            _wrong(tally.rows_wrong),
            f"{written[key]:,}" if key in written else "-",
            f"{served.get(key, 0):,}" if key in written else "-",
        )
    return table


def _wrong(count: int) -> Text:
    return Text(f"{count:,}", style="bold red" if count else "green")


def _first_divergence(run: Run) -> RenderableType:
    assert run.first is not None
    divergence, evidence = run.first.divergence, run.first.evidence
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    where = f"step {divergence.step}, request {divergence.req_id}, key {divergence.key}"
    if divergence.position is not None:
        where += f", position {divergence.position}, slot {divergence.slot}"
    table.add_row("where", where)
    table.add_row("check", ", ".join([divergence.check, *sorted(divergence.failed - {divergence.check})]))
    table.add_row("due", divergence.due)
    table.add_row("came", divergence.came)
    if divergence.position is not None:
        table.add_row("whose", str(evidence.owner) if evidence.owner else "nobody's")
    if run.first.explanation:
        table.add_row("why", run.first.explanation)
    command = Text(again(run.trace, run.options, run.first), style="bold", no_wrap=True, overflow="ignore")
    return Group(Panel(table, title="first divergence", title_align="left", border_style="red"),
                 Text.assemble("  again: ", command))  # fmt: skip


def print_totals(console: Console, runs: Sequence[Run], num_unusable: int) -> None:
    """One line over several runs."""
    outcomes = [run.outcome for run in runs] + ["unusable"] * num_unusable
    counts = [f"{outcomes.count(name)} {name}" for name in OUTCOME_STYLES if name in outcomes]
    keys = [tally for run in runs for tally in run.tally.keys.values()]
    console.print(
        f"{len(outcomes)} traces: {', '.join(counts)}; "
        f"{sum(tally.outputs_checked for tally in keys):,} outputs judged, "
        f"{sum(tally.outputs_wrong for tally in keys):,} wrong; "
        f"{sum(tally.rows_checked for tally in keys):,} rows, {sum(tally.rows_wrong for tally in keys):,} wrong"
    )
