"""What the cache under test raises is reported as what it is, with its step, and ends nothing but its own replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim.subjects import _SUBJECTS, Setup
from omnisim.subjects.builtin import Builtin

from .conftest import Run
from .files import HELLO, TIGHT, hit, lines


class Breaks(Builtin):
    """Raises ``error`` in ``where``."""

    error: BaseException = KeyError("codes")
    where = "deliver"

    def _break(self, where: str, index: int) -> None:
        if self.where == where and index == 1:
            raise self.error

    def open(self, setup: Setup) -> None:
        self._break("open", 1)
        super().open(setup)

    def finish(self, step, batch):  # type: ignore[no-untyped-def]
        self._break("finish", step.index)
        super().finish(step, batch)

    def begin(self, step, batch):  # type: ignore[no-untyped-def]
        self._break("begin", step.index)
        super().begin(step, batch)

    def deliver(self, step, batch, output):  # type: ignore[no-untyped-def]
        self._break("deliver", step.index)
        return super().deliver(step, batch, output)


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> type[Breaks]:
    """A subject by this name, to be given another error or place."""
    mine = type("Breaks", (Breaks,), {})
    monkeypatch.setitem(_SUBJECTS, "breaks", mine)
    return mine


@pytest.mark.parametrize("where", ["open", "finish", "begin", "deliver"])
def test_a_crash_is_told_with_its_class_message_step_and_line(run: Run, breaks: type[Breaks], where: str) -> None:
    breaks.where, breaks.error = where, ValueError("no rows for [bold]B[/]")
    when = "when it was opened" if where == "open" else "in step 1"
    done = run("replay", HELLO, "--subject", "breaks")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("CRASH  ")
    assert f"  ValueError {when}: no rows for [bold]B[/] (" in done.out
    assert "test_raised.py:" in done.out
    assert "Traceback" not in done.out
    (result,) = run("replay", HELLO, "--subject", "breaks", "--json", "-").report["runs"]
    assert (result["outcome"], result["first_divergence"]) == ("crash", None)
    assert result["error"].startswith(f"ValueError {when}: no rows for [bold]B[/]")


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), MemoryError(), RecursionError(), StopIteration()])
def test_a_subject_that_gives_up_in_other_ways_has_crashed(
    run: Run, breaks: type[Breaks], error: BaseException
) -> None:
    breaks.error = error
    done = run("replay", HELLO, "--subject", "breaks")
    assert done.code == 1
    assert f"  {type(error).__name__} in step 1: " in done.out


def test_a_message_of_many_lines_cannot_forge_a_result(run: Run, breaks: type[Breaks]) -> None:
    breaks.error = RuntimeError("first\nAGREEMENT  all is well\n\x1b[2J")
    out = run("replay", HELLO, "--subject", "breaks").out
    assert "\n  AGREEMENT  all is well\n" in out
    assert "\x1b" not in out


def test_a_refusal_is_told_with_the_name_of_the_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first, second = hit()
    path.write_text(lines(first, {**second, "block_ids": {"B": [5, 2]}}))
    done = run("replay", path)
    assert (done.code, done.err) == (2, "")
    assert done.out.startswith("REFUSAL  ")
    assert "  NeverWritten in step 1: " in done.out
    assert ".py:" not in done.out, "a refusal is no fault of the cache: where it was raised is of no use"
    (result,) = run("replay", path, "--json", "-").report["runs"]
    assert result["outcome"] == "refusal"
    assert result["error"].startswith("NeverWritten in step 1: ")


def test_a_crash_does_not_stop_the_traces_that_follow(run: Run, breaks: type[Breaks]) -> None:
    done = run("replay", HELLO, TIGHT, "--subject", "breaks")
    assert done.out.count("CRASH") == 2
    assert "2 traces: crash 2; " in done.out
    assert run("replay", HELLO, TIGHT, "--subject", "breaks", "--fail-fast").out.count("CRASH  ") == 1


def test_what_went_wrong_before_a_crash_is_told_too(run: Run, breaks: type[Breaks]) -> None:
    class Both(breaks):  # type: ignore[valid-type,misc]
        def deliver(self, step, batch, output):  # type: ignore[no-untyped-def]
            merged = super().deliver(step, batch, output)
            if step.index == 0:
                merged["hidden_states"]["A"] += 1
            return merged

    _SUBJECTS["breaks"] = Both
    done = run("replay", HELLO, "--subject", "breaks")
    assert done.code == 1
    assert "KeyError in step 1: 'codes'" in done.out
    assert "step 0, request A, key hidden_states, position 0, slot 4" in done.out
