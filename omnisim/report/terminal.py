"""A run on a terminal: a line a trace, and the first divergence in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from omnisim.report.model import again
from omnisim.report.words import literal, num, print_table
from omnisim.verify import FirstDivergence, Run

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
        print_table(console, _keys_table(run))
    for note in run.notes:
        console.print(Text(f"  note: {literal(note)}", style="yellow"))
    for line in run.error.splitlines():
        console.print(Text(f"  {literal(line)}", style=OUTCOME_STYLES[run.outcome]))
    if run.first is not None:
        console.print(_first_divergence(run))
        console.print(_again(run), soft_wrap=True)
    console.print()


def _headline(run: Run) -> Text:
    return Text.assemble(
        (run.outcome.upper(), OUTCOME_STYLES[run.outcome]),
        f"  {literal(run.trace)}",
        (f"  subject {run.subject}, talker {literal(run.talker)}, truth {run.truth}", "dim"),
    )


def _facts(run: Run) -> Text:
    kinds = {kind: count for kind, count in sorted(run.hits.items()) if kind != "resumed"}
    words = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    facts = [
        num(run.steps, "step"),
        num(run.requests, "request"),
        num(sum(kinds.values()), "hit") + (f" ({words})" if words else ""),
    ]
    if run.hits["resumed"]:
        facts.append(f"{run.hits['resumed']:,} resumed over cached rows")
    return Text(f"  {', '.join(facts)}", style="dim")


def _keys_table(run: Run) -> Table:
    table = Table(box=None, padding=(0, 4, 0, 0), header_style="dim")
    table.add_column("key", overflow="fold")
    for column in ("outputs", "wrong", "rows", "wrong", "written", "served"):
        table.add_column(column, justify="right")
    written, served = run.counts.get("written", {}), run.counts.get("served", {})
    for key, tally in sorted(run.tally.keys.items()):
        table.add_row(
            Text(literal(key)),
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
    divergence = run.first.divergence
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    where = f"step {divergence.step}"
    if divergence.req_id is not None:
        where += f", request {divergence.req_id}"
    if divergence.key is not None:
        where += f", key {divergence.key}"
    if divergence.position is not None:
        where += f", position {divergence.position}, slot {divergence.slot}"
    facts = {
        "where": where,
        "check": ", ".join([divergence.check, *sorted(divergence.failed - {divergence.check})]),
        "due": divergence.due,
        "came": divergence.came,
        "whose": _whose(run.first),
        "why": run.first.explanation,
    }
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(literal(fact)))
    return Panel(table, title="first divergence", title_align="left", border_style="red", expand=False)


def _whose(first: FirstDivergence) -> str:
    """Whose row came, if one came in place of the one due."""
    if first.evidence.owner is not None:
        return str(first.evidence.owner)
    nobody = first.divergence.check in ("never-written", "padding") or first.divergence.came.startswith("a row that")
    return "nobody's" if nobody else ""


def _again(run: Run) -> Text:
    return Text.assemble("  again: ", (literal(again(run)), "bold"))


def print_totals(console: Console, runs: Sequence[Run]) -> None:
    """One line over several runs."""
    outcomes = [run.outcome for run in runs]
    counts = [f"{name} {outcomes.count(name):,}" for name in OUTCOME_STYLES if name in outcomes]
    keys = [tally for run in runs for tally in run.tally.keys.values()]
    console.print(
        f"{num(len(outcomes), 'trace')}: {', '.join(counts)}; "
        f"{num(sum(tally.outputs_checked for tally in keys), 'output')} judged, "
        f"{sum(tally.outputs_wrong for tally in keys):,} wrong; "
        f"{num(sum(tally.rows_checked for tally in keys), 'row')}, {sum(tally.rows_wrong for tally in keys):,} wrong"
    )
