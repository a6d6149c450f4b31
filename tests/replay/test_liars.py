"""Whatever a subject does, the judge has a verdict: the right check, the right words, and never a traceback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omnisim.report.model import run_data
from omnisim.subjects.builtin import Builtin
from omnisim.trace import Trace
from omnisim.trace.story import story_trace
from omnisim.verify import Options, Run, verify

from .liars import LIARS, Liar, NewRowsOfHitsLost, OneRowOnly
from .stories import HIDDEN, ROWS

STORY = (
    "new A c=0 n=4 [1]; new C c=0 n=3 [6]; pad 8\nrun A c=4 n=1 [1,2]; run C c=3 n=1; pad 4\n"
    "run A c=5 n=1; run C c=4 n=1 [6,7]; new B c=4 n=2 [1,3]\nrun A c=6 n=1; run B c=6 n=1\n"
    "fin C; run A c=7 n=1\nrun A c=8 n=1 [1,2,4]"
)


def story(talker: Any, text: str = STORY) -> Trace:
    return story_trace(text, talker=talker)


def run(subject: Builtin, talker: Any = HIDDEN, text: str = STORY) -> Run:
    return verify(story(talker, text), Options(), subject)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.name)
def test_the_liar_fails_the_check_that_is_made_for_it(liar: Liar) -> None:
    result = run(liar.subject(), liar.talker)
    assert result.outcome == "divergence", result.error
    assert liar.check in result.tally.failed, dict(result.tally.failed)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: liar.name)
def test_counts_hold_together_whatever_a_subject_hands_out(liar: Liar) -> None:
    data = run_data(run(liar.subject(), liar.talker))
    for tally in data["keys"].values():
        assert 0 <= tally["outputs_wrong"] <= tally["outputs_checked"]
        assert 0 <= tally["rows_wrong"] <= tally["rows_checked"]


def test_a_fault_of_no_request_is_pinned_on_none() -> None:
    for name, check in (("HoldsTheDead", "deferred-bound"), ("BlockTableZeroed", "inputs-unchanged")):
        liar = next(liar for liar in LIARS if liar.name == name)
        first = run_data(run(liar.subject()))["first_divergence"]
        assert (first["check"], first["request"]) == (check, None)


def test_rows_that_the_step_computed_and_lost_are_not_called_cached() -> None:
    first = run(NewRowsOfHitsLost()).first
    assert first is not None
    assert first.divergence.position == 4
    assert first.explanation == "Not all rows that the step computed for the request came."


def test_check_position_and_owner_of_a_divergence_are_of_one_row() -> None:
    first = run(OneRowOnly(), ROWS).first
    assert first is not None
    assert (first.divergence.check, first.divergence.position) == ("rows", 1)
    assert str(first.evidence.owner) == "position 0 of A, written in step 0"
    assert "shifted by -1" in first.explanation


@pytest.mark.parametrize("asked", ["holding", "counts"])
def test_a_subject_that_cannot_answer_has_crashed(asked: str) -> None:
    def fail(self: Builtin) -> Any:
        raise ZeroDivisionError("no answer")

    result = run(type("Mute", (Builtin,), {asked: property(fail)})())
    assert result.outcome == "crash"
    assert "ZeroDivisionError" in result.error


RESUMED = (
    "new A c=0 n=8 [1,2]; new X c=0 n=2 [7]\nrun X c=2 n=1; preempt A\nresume A c=4 n=3 [1,9]; run X c=3 n=1\n"
    "run A c=7 n=3 [1,9,10]; run X c=4 n=1 [7,8]\nrun A c=10 n=1"
)


class EachPositionOnce(Builtin):
    """A runner that knows what it has handed out already, and leaves it out after a preemption."""

    def deliver(self, step: Any, batch: Any, output: Any) -> Any:
        merged = super().deliver(step, batch, output)
        had: dict[str, int] = self.__dict__.setdefault("had", {})
        for row, req_id in enumerate(step.req_ids):
            stop = step.num_computed_tokens[row] + step.num_scheduled_tokens[row]
            rows = merged["hidden_states"][req_id]
            start = stop - len(rows)
            merged["hidden_states"][req_id] = rows[max(0, had.get(req_id, 0) - start) :].clone()
            had[req_id] = max(stop, had.get(req_id, 0))
        return merged


def test_a_resumed_request_may_get_each_position_once_or_again() -> None:
    assert run(Builtin(), text=RESUMED).outcome == "agreement"
    assert run(EachPositionOnce(), text=RESUMED).outcome == "agreement"


def test_a_request_that_was_never_preempted_may_not_leave_anything_out() -> None:
    class Late(EachPositionOnce):
        def deliver(self, step: Any, batch: Any, output: Any) -> Any:
            self.__dict__.setdefault("had", {"X": 1})
            return super().deliver(step, batch, output)

    assert run(Late(), text=RESUMED).outcome == "divergence"


def test_many_wrong_rows_are_looked_at_in_reasonable_time() -> None:
    class Shifted(Builtin):
        def deliver(self, step: Any, batch: Any, output: Any) -> Any:
            merged = super().deliver(step, batch, output)
            rows = merged["hidden_states"]
            return {"hidden_states": {req_id: torch.flip(value, (0,))[:-1] for req_id, value in rows.items()}}

    text = f"new A c=0 n=4096 [{','.join(map(str, range(1, 1025)))}]"
    result = run(Shifted(), text=text)
    assert result.first is not None
    assert "row-count" in result.first.divergence.failed
