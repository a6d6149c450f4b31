"""The driver: one loop that reads like the story of an engine step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from omnisim.batch import Batch
from omnisim.inputs import Inputs
from omnisim.rows.source import RowSource
from omnisim.subjects import LATER, Subject
from omnisim.trace.model import Step
from omnisim.truth import Due, Truth
from omnisim.writes import failing_write

__all__ = ["Outcome", "replay"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a subject did with one step. ``seconds`` is its own time.

    ``merged`` is what it handed out, whatever that is; ``LATER`` if it does so in a later step, from which an outcome
    with ``is_late`` comes. ``changed`` names the inputs that it changed, ``holding`` the requests for which it says
    that it keeps deferred rows. After ``raised`` the others mean nothing.
    """

    due: Due
    merged: Any
    changed: list[str]
    holding: Collection[str] | None
    raised: BaseException | None
    seconds: float
    is_late: bool = False


def replay(steps: Iterable[Step], truth: Truth, rows: RowSource, subject: Subject, batch: Batch) -> Iterator[Outcome]:
    """Drive ``subject`` through ``steps``; stop after the first step that it does not survive."""
    waiting: dict[int, Due] = {}
    for step in steps:
        due = truth.due(step, rows.emitted_keys(step))
        attempt = _Attempt()
        attempt(subject.finish, step, batch)
        batch.apply(step)
        attempt(subject.begin, step, batch)
        output = rows.forward(step, due.names_T)
        inputs = Inputs(step, batch, output)
        with failing_write(step.index, len(truth.ledger.names)) if step.fail_write else nullcontext():
            merged = attempt(subject.deliver, step, batch, output) if step.req_ids else {}
        if merged is LATER:
            waiting[step.index] = due
        holding = attempt(lambda: subject.holding)
        yield Outcome(due, merged, inputs.changed(), holding, attempt.raised, attempt.seconds)
        if attempt.raised is not None:
            return
        yield from _late(subject, waiting, due)
    if waiting:
        yield from _late(subject, waiting, next(reversed(waiting.values())), at_end=True)


def _late(subject: Subject, waiting: dict[int, Due], now: Due, at_end: bool = False) -> Iterator[Outcome]:
    """What is handed out of earlier steps; nothing is read of a subject that raised."""
    attempt = _Attempt()
    arrived = attempt(lambda: list(subject.late(at_end)))
    if attempt.raised is not None:
        yield Outcome(now, None, [], None, attempt.raised, attempt.seconds, is_late=True)
    for index, merged in arrived or ():
        yield Outcome(waiting.pop(index), merged, [], None, None, attempt.seconds, is_late=True)
        attempt.seconds = 0.0


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
