"""A run as plain data, in the form of ``omnisim-report/1``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from omnisim.checks import CHECKS
from omnisim.verify import FirstDivergence, Options, Run

__all__ = ["FORMAT", "again", "exit_code", "overall", "report", "run_data"]

FORMAT = "omnisim-report/1"

_SEVERITY = ("crash", "divergence", "refusal", "unusable", "agreement")


def overall(outcomes: Sequence[str]) -> str:
    """The gravest of several outcomes."""
    return min(outcomes, key=_SEVERITY.index)


def exit_code(outcomes: Sequence[str]) -> int:
    """0: all agree. 1: some divergence or crash. 2: none of these, but something could not be judged."""
    return {"agreement": 0, "divergence": 1, "crash": 1, "refusal": 2, "unusable": 2}[overall(outcomes)]


def report(runs: Sequence[dict[str, Any]], code: int | None = None) -> dict[str, Any]:
    """The whole report of several runs; ``code`` is an exit code that does not follow from their outcomes."""
    outcomes = [run["outcome"] for run in runs]
    code = exit_code(outcomes) if code is None else code
    return {"format": FORMAT, "outcome": overall(outcomes), "exit_code": code, "runs": list(runs)}


def run_data(run: Run) -> dict[str, Any]:
    """One run; ``hits`` counts new requests that start with computed tokens, ``hits_by_kind`` resumed ones too."""
    keys = {
        key: {
            "outputs_checked": tally.outputs_checked,
            "outputs_wrong": tally.outputs_wrong,
            "rows_checked": tally.rows_checked,
            "rows_wrong": tally.rows_wrong,
        }
        for key, tally in sorted(run.tally.keys.items())
    }
    return {
        "trace": run.trace,
        "subject": run.subject,
        "talker": run.talker,
        "truth": run.truth,
        "outcome": run.outcome,
        "error": run.error or None,
        "steps": run.steps,
        "requests": run.requests,
        "hits": sum(count for kind, count in run.hits.items() if kind != "resumed"),
        "hits_by_kind": dict(sorted(run.hits.items())),
        **{name: sum(tally[name] for tally in keys.values()) for name in _TOTALS},
        "checks": {check: {"checked": run.tally.checked[check], "failed": run.tally.failed[check]} for check in CHECKS},
        "keys": keys,
        "first_divergence": None if run.first is None else _first(run, run.first),
        "seconds": {"subject": round(run.subject_seconds, 6), "total": round(run.total_seconds, 6)},
    }


_TOTALS = ("outputs_checked", "outputs_wrong", "rows_checked", "rows_wrong")


def _first(run: Run, first: FirstDivergence) -> dict[str, Any]:
    divergence, owner = first.divergence, first.evidence.owner
    return {
        "check": divergence.check,
        "step": divergence.step,
        "request": divergence.req_id,
        "key": divergence.key,
        "position": divergence.position,
        "slot": divergence.slot,
        "due": divergence.due,
        "came": divergence.came,
        "owner": None if owner is None else {"request": owner.req_id, "position": owner.position, "step": owner.step},
        "explanation": first.explanation,
        "again": again(run),
    }


def again(run: Run) -> str:
    """The command that shows the first divergence of a run again, alone; for a subject of Python's own, the call."""
    assert run.first is not None, "only a divergence is shown again"
    start, stop = run.first.divergence.step, run.first.seen + 1
    defaults, options = Options(), run.options
    names = [name for name in _SHOWN if getattr(options, name) not in (None, getattr(defaults, name))]
    if run.subject != options.subject:
        said = "".join(f"{name}={getattr(options, name)!r}, " for name in names)
        return f"verify(load({run.trace!r}), Options({said}steps=({start}, {stop})), subject=...)"
    words = ["omnisim", "replay", f"./{run.trace}" if run.trace.startswith("-") else run.trace]
    words += ["--subject", options.subject]
    for name in names:
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return shlex.join([*words, "--steps", f"{start}:{stop}"])


_SHOWN = ("talker", "rows", "truth", "batch", "device", "write_mode", "read_delay")
