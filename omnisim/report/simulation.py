"""What happened in simulations: as plain data, then on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnisim import __version__
from omnisim.coverage import Coverage
from omnisim.report.coverage import coverage_json, print_reached
from omnisim.report.words import literal, num, print_table
from omnisim.sim.outcome import Outcome

if TYPE_CHECKING:
    from omnisim.sim.engine import Stats
    from omnisim.workload import Workload

__all__ = ["Simulated", "print_simulations", "simulations_json"]

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """One run: what was simulated, how it went, where it was written (None: nowhere); workloads have no ``seed``."""

    name: str
    seed: int | None
    changes: tuple[str, ...]
    vllm: str
    num_blocks: int
    max_model_len: int
    outcome: Outcome
    stats: Stats
    coverage: Coverage
    path: str | None = None
    num_bytes: int = 0


def print_simulations(console: Console, runs: Sequence[Simulated], workload: Workload | None) -> None:
    """One run in full, several as a line each; in front of them what became of a workload's rows."""
    if workload is not None:
        _print_workload(console, workload)
    if len(runs) == 1:
        _print_one(console, runs[0])
    else:
        _print_many(console, runs)
    if runs:
        print_reached(console, sum((run.coverage for run in runs), Coverage()))


def _print_many(console: Console, runs: Sequence[Simulated]) -> None:
    told = f"  {len(runs)} runs, vLLM {runs[0].vllm}"
    written = sum(run.num_bytes for run in runs)
    where = f"  wrote {len(runs)} traces, {written:,} bytes" if runs[0].path else "  not written"
    console.print(Text.assemble(("SIMULATED", "bold green"), f"  {literal(runs[0].name)}", (told, "dim"), where))
    print_table(console, _lines(runs))
    console.print()


def _print_workload(console: Console, workload: Workload) -> None:
    ledger = workload.ledger
    dropped = "".join(f"; {count:,} dropped: {literal(reason)}" for reason, count in sorted(ledger.dropped.items()))
    console.print(Text(f"  {num(ledger.rows, 'row')} read, {ledger.kept:,} kept{dropped}"), soft_wrap=True)
    for note in workload.notes:
        console.print(Text(f"  note: {literal(note)}", style="yellow"), soft_wrap=True)


def _print_one(console: Console, run: Simulated) -> None:
    outcome, stats = run.outcome, run.stats
    written = (f"  wrote {literal(run.path)}, {run.num_bytes:,} bytes" if run.path else "  not written", "")
    changes = "".join(f", {literal(change)}" for change in run.changes)
    seed = "" if run.seed is None else f", seed {run.seed}"
    told = (f"  vLLM {run.vllm}{seed}{changes}", "dim")
    console.print(Text.assemble(("SIMULATED", "bold green"), f"  {literal(run.name)}", told, written), soft_wrap=True)
    facts = (num(outcome.steps, "step"), num(outcome.requests, "request"), num(outcome.tokens, "token") + " computed")
    console.print(Text(f"  {', '.join(facts)}, at most {num(outcome.largest_batch, 'request')} in a step", style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("hits", _share(outcome.requests_hit, outcome.requests, "request"))
    table.add_row("", _share(outcome.hit_tokens, outcome.prompt_tokens, "prompt token"))
    resumed = f", {outcome.resumed:,} resumed, {outcome.resumed_hit:,} of them with a hit" if outcome.resumed else ""
    table.add_row("preempted", f"{num(outcome.preemptions, 'time')}{resumed}")
    table.add_row("aborted", num(stats.aborts, "request"))
    table.add_row("evicted", num(stats.evictions, "block"))
    if stats.refused_resets:
        table.add_row("refused", f"{num(stats.refused_resets, 'reset')} of the prefix cache, for requests held blocks")
    if stats.missed_events:
        table.add_row("missed", f"{num(stats.missed_events, 'request')} of events: not sent yet, or over")
    usable = run.num_blocks - 1
    peak = max(stats.usage, default=0.0)
    table.add_row("blocks", f"{round(peak * usable):,} of {usable:,} in use at the most ({peak:.0%})")
    if stats.usage:
        table.add_row("", Text(_bars(stats.usage), style="cyan"))
    print_table(console, table)
    console.print()


def _share(part: int, whole: int, noun: str) -> str:
    return f"{part:,} of {num(whole, noun)}" + (f" ({part / whole:.0%})" if whole else "")


def _bars(shares: Sequence[float]) -> str:
    """Shares of the whole over time, the largest of each column."""
    columns = min(len(shares), _WIDTH)
    edges = [at * len(shares) // columns for at in range(columns + 1)]
    largest = [max(shares[start:stop]) for start, stop in pairwise(edges)]
    return "".join(_BARS[min(8, round(share * 8 + 0.49))] for share in largest)


def _lines(runs: Sequence[Simulated]) -> Table:
    """A line a run, with a column for each setting in which they differ."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    settings = [dict(change.partition("=")[::2] for change in run.changes) for run in runs]
    differ = [path for path in settings[0] if len({each[path] for each in settings}) > 1]
    for path in differ:
        name = path.rpartition(".")[2]
        table.add_column(name, overflow="fold", min_width=len(name))
    for column in ("seed", "steps", "requests", "hit", "tokens hit", "preempted", "evicted", "peak"):
        table.add_column(column, justify="right", no_wrap=column == "seed")
    for run, setting in zip(runs, settings, strict=True):
        outcome, stats = run.outcome, run.stats
        table.add_row(
            *(Text(literal(setting[path])) for path in differ),
            "-" if run.seed is None else str(run.seed),
            f"{outcome.steps:,}",
            f"{outcome.requests:,}",
            f"{outcome.requests_hit / max(outcome.requests, 1):.0%}",
            f"{outcome.hit_tokens / max(outcome.prompt_tokens, 1):.0%}",
            f"{outcome.preemptions:,}",
            f"{stats.evictions:,}",
            f"{max(stats.usage, default=0.0):.0%}",
        )
    return table


def simulations_json(runs: Sequence[Simulated], workload: Workload | None) -> dict[str, Any]:
    """``omnisim-simulation/1``: counts of tokens, requests, blocks and steps; ``usage`` is a share of the blocks."""
    told: dict[str, Any] = {
        "format": "omnisim-simulation/1",
        "omnisim": __version__,
        "runs": [_json(run) for run in runs],
    }
    if workload is not None:
        ledger = workload.ledger
        told["workload"] = {
            "rows": ledger.rows,
            "kept": ledger.kept,
            "dropped": dict(sorted(ledger.dropped.items())),
            "notes": list(workload.notes),
        }
    return told


def _json(run: Simulated) -> dict[str, Any]:
    outcome, stats = run.outcome, run.stats
    return {
        "name": run.name,
        "seed": run.seed,
        "changes": list(run.changes),
        "vllm": run.vllm,
        "trace": run.path,
        "bytes": run.num_bytes,
        "num_blocks": run.num_blocks,
        "max_model_len": run.max_model_len,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "requests": outcome.requests,
        "requests_hit": outcome.requests_hit,
        "prompt_tokens": outcome.prompt_tokens,
        "hit_tokens": outcome.hit_tokens,
        "preemptions": outcome.preemptions,
        "resumed": outcome.resumed,
        "resumed_hit": outcome.resumed_hit,
        "aborts": stats.aborts,
        "evictions": stats.evictions,
        "refused_resets": stats.refused_resets,
        "missed_events": stats.missed_events,
        "usage": [round(share, 6) for share in stats.usage],
        "coverage": coverage_json(run.coverage),
    }
