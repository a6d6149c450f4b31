"""What a trace expects of each subject, against what came."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omnisim.errors import CannotJudge
from omnisim.trace import load
from omnisim.verify import Run, RunOutcome

__all__ = ["Expected", "Status", "exit_code", "expectations"]

Status = Literal["AS EXPECTED", "FIXED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Expected:
    """A run, and the outcome that its trace expects; None where it does not say."""

    run: Run
    outcome: RunOutcome | None

    @property
    def status(self) -> Status:
        """FIXED where agreement came in place of something worse; whoever keeps the trace must take note."""
        if self.run.outcome == self.outcome:
            return "AS EXPECTED"
        return "FIXED" if self.run.outcome == "agreement" else "FAILED"


def expectations(path: Path, subject: str | None) -> dict[str, RunOutcome]:
    """What a trace expects, by subject; of one only, if it is given.

    FileError for a trace that cannot be read, CannotJudge for one that expects nothing.
    """
    told: dict[str, RunOutcome] = dict(load(path).header.expect)
    if not told:
        raise CannotJudge(f"{path}: the trace expects nothing", "write expect: {builtin: agreement}, or leave it out")
    if subject is None:
        return told
    if subject not in told:
        raise CannotJudge(f"{path}: the trace expects nothing of {subject}", f"it tells of {', '.join(told)}")
    return {subject: told[subject]}


def exit_code(results: Iterable[Expected]) -> int:
    """0: all as expected. 1: some failed, or are fixed. 2: none of these but some that could not be judged."""
    surprises = {result.run.outcome for result in results if result.status != "AS EXPECTED"}
    if not surprises:
        return 0
    return 2 if surprises == {"unusable"} else 1
