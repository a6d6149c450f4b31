"""The first of several releases whose outcome differs from the oldest one's, found by halving."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnisim.errors import CannotJudge
from omnisim.verify import Run

__all__ = ["Change", "bisect", "said", "signature"]


@dataclass(frozen=True, slots=True)
class Change:
    """Two neighbours in the order of releases, and what became of the trace under each."""

    before: Run
    after: Run


def bisect(subjects: Sequence[str], run: Callable[[str], Run]) -> Change:
    """The change between ``subjects[0]`` and ``subjects[-1]``; ``run`` replays the trace under one of them.

    Where it changed more than once, one of the changes. CannotJudge if both ends have the same signature, or a subject
    on the way cannot be judged.
    """
    ends = [_judged(run(subject)) for subject in (subjects[0], subjects[-1])]
    if signature(ends[0]) == signature(ends[1]):
        raise CannotJudge(f"{ends[0].trace}: {subjects[0]} and {subjects[-1]} are the same: {said(ends[0])}",
                          "choose two that differ; omnisim compare shows all")  # fmt: skip
    before, after = ends
    low, high = 0, len(subjects) - 1
    while high - low > 1:
        middle = (low + high) // 2
        found = _judged(run(subjects[middle]))
        if signature(found) == signature(ends[0]):
            low, before = middle, found
        else:
            high, after = middle, found
    return Change(before, after)


def signature(run: Run) -> tuple[str, ...]:
    """What makes two runs of a trace the same: the outcome and the first check that failed, or the error's class."""
    if run.first is not None:
        return run.outcome, run.first.divergence.check
    return run.outcome, re.split(r" (?:in step|when it|after step|before the) ", run.error)[0]


def said(run: Run) -> str:
    """A signature in words."""
    outcome, what = signature(run)
    return f"{outcome} ({what})" if what else outcome


def _judged(run: Run) -> Run:
    if run.outcome == "unusable":
        raise CannotJudge(f"{run.subject} cannot be judged: {run.error}", "leave it out")
    return run
