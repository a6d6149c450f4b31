"""The driver: one loop that reads like the story of an engine step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from omnisim.batch import Batch
from omnisim.inputs import Inputs
from omnisim.rows.source import RowSource
from omnisim.subjects import Subject
from omnisim.trace.model import Step
from omnisim.truth import Due, Truth

__all__ = ["Outcome", "replay"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a subject did with one step. ``seconds`` is its own time.

    ``merged`` is what it handed out, whatever that is. ``changed`` names the inputs that it changed, ``holding`` the
    requests for which it says that it keeps deferred rows. After ``raised`` the others mean nothing.
    """

    due: Due
    merged: Any
    changed: list[str]
    holding: Collection[str] | None
    raised: BaseException | None
    seconds: float


def replay(steps: Iterable[Step], truth: Truth, rows: RowSource, subject: Subject, batch: Batch) -> Iterator[Outcome]:
    """Drive ``subject`` through ``steps``; stop after the first step that it does not survive."""
    for step in steps:
        due = truth.due(step, rows.emitted_keys(step))
        attempt = _Attempt()
        attempt(subject.finish, step, batch)
        batch.apply(step)
        attempt(subject.begin, step, batch)
        output = rows.forward(step, due.names_T)
        inputs = Inputs(step, batch, output)
        merged = attempt(subject.deliver, step, batch, output) if step.req_ids else {}
        holding = attempt(lambda: subject.holding)
        yield Outcome(due, merged, inputs.changed(), holding, attempt.raised, attempt.seconds)
        if attempt.raised is not None:
            return


class _Attempt:
    """Calls the code under test, which may raise anything, and times it; nothing is called after it raised."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.seconds = 0.0

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.raised is not None:
            return None
        start = perf_counter()
        try:
            return call(*args)
        except (Exception, SystemExit) as raised:  # one that exits must not pass for one that agrees
            self.raised = raised
            return None
        finally:
            self.seconds += perf_counter() - start
