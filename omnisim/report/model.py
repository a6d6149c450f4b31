"""A run as plain data, in the form of ``omnisim-report/1``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from omnisim.checks import CHECKS
from omnisim.verify import FirstDivergence, Options, Run

__all__ = ["FORMAT", "again", "exit_code", "overall", "report", "run_data", "unusable_data"]

FORMAT = "omnisim-report/1"

_SEVERITY = ("crash", "divergence", "refusal", "unusable", "agreement")


def overall(outcomes: Sequence[str]) -> str:
    """The gravest of several outcomes."""
    return min(outcomes, key=_SEVERITY.index)


def exit_code(outcomes: Sequence[str]) -> int:
    """0: all agree. 1: some divergence or crash. 2: none of these, but something could not be judged."""
    return {"agreement": 0, "divergence": 1, "crash": 1, "refusal": 2, "unusable": 2}[overall(outcomes)]


def report(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole report of several runs."""
    outcomes = [run["outcome"] for run in runs]
    return {"format": FORMAT, "outcome": overall(outcomes), "exit_code": exit_code(outcomes), "runs": list(runs)}


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
        "again": again(run.trace, run.options, run.first),
    }


def again(trace: str, options: Options, first: FirstDivergence | None) -> str:
    """The command that shows the first divergence of a run again, and nothing else."""
    words = ["omnisim", "replay", f"./{trace}" if trace.startswith("-") else trace]
    defaults = Options()
    for name in ("subject", "talker", "rows", "truth", "batch", "device"):
        value = getattr(options, name)
        if value is not None and (value != getattr(defaults, name) or name == "subject"):
            words += [f"--{name}", value]
    if first is not None:
        words += ["--steps", f"{first.divergence.step}:{first.seen + 1}"]
    return shlex.join(words)


def unusable_data(trace: str, options: Options, error: str) -> dict[str, Any]:
    """The entry of a trace that could not be judged; every field of a run is there."""
    nothing = Run(trace, options.subject, options.talker or "", options.truth or "content", options)
    nothing.outcome, nothing.error = "unusable", error
    return run_data(nothing)
