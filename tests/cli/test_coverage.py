"""``omnisim coverage``: a table, a report, and an exit code that says whether what is required is reached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from omnisim.coverage import STATES

from .conftest import Run
from .files import FIRST, GOOD, HELLO, ROOT, hit, lines

RECORDED = ROOT / "traces" / "recorded"
Written = Callable[[str, bytes | str], Path]

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}


def table(**fields: object) -> dict[str, object]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


FIRST_SEEN = {"anyOf": [{"type": "null"}, table(trace=TEXT, step=COUNT, request={"type": ["string", "null"]})]}
REPORT = table(
    format={"const": "omnisim-coverage/1"},
    reached=COUNT,
    states=table(**dict.fromkeys(STATES, table(times=COUNT, first=FIRST_SEEN, meaning=TEXT))),
    short={"type": "object", "additionalProperties": table(times=COUNT, required=COUNT)},
    unreadable={"type": "array", "items": TEXT},
    exit_code={"enum": [0, 1, 2]},
)


@pytest.fixture
def require(written: Written) -> Callable[[str], Path]:
    return lambda states: written("require.yaml", f"format: omnisim-coverage-require/1\nstates: {states}\n")


def test_a_line_a_state_those_not_reached_last(run: Run) -> None:
    done = run("coverage", HELLO)
    assert (done.code, done.err) == (0, "")
    told = [line.split()[0] for line in done.out.splitlines()]
    reached, unreached = told[1 : told.index("not")], told[told.index("not") + 1 : -1]
    assert sorted(reached + unreached) == sorted(STATES)
    assert [state for state in STATES if state in reached] == reached
    assert "hit-one-block" in reached
    assert "preempted" in unreached
    assert done.out.endswith(f"\n{len(reached)} of {len(STATES)} states\n")


def test_a_line_has_the_count_the_place_and_the_sentence(run: Run) -> None:
    (line,) = [line for line in run("coverage", HELLO).out.splitlines() if line.startswith("all-whole-blocks-hit ")]
    sentence = STATES["all-whole-blocks-hit"]
    assert line.split() == f"all-whole-blocks-hit 2 step 1, B {sentence}".split()
    (line,) = [line for line in run("coverage", HELLO, HELLO).out.splitlines() if line.startswith("mixed-step ")]
    assert f"{HELLO}, step 1 " in line


def test_a_page_is_as_wide_as_it_is_and_loses_no_state(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("coverage", HELLO)
    monkeypatch.setenv("COLUMNS", "100")
    told = run("coverage", RECORDED).out
    assert max(map(len, told.splitlines())) <= 100
    assert all(f"\n{state} " in told for state in STATES)
    assert "chat-abort.jsonl.zst, step 0," in told
    assert not any(line.endswith(" ") for line in told.splitlines())


def test_traces_add_up(run: Run) -> None:
    states = run("coverage", HELLO, HELLO, "--json", "-").report["states"]
    assert states["cold"] == {
        "times": 2,
        "first": {"trace": str(HELLO), "step": 0, "request": "A"},
        "meaning": STATES["cold"],
    }
    assert states["preempted"]["first"] is None


def test_a_folder_is_all_of_its_traces(run: Run) -> None:
    states = run("coverage", RECORDED, "--json", "-").report["states"]
    counts = {state: told["times"] for state, told in states.items()}
    assert (counts["same-step-hit"], counts["hit-on-running-owner"], counts["preempted"]) == (5, 12, 3)
    assert counts["hit-one-block"] + counts["hit-many-blocks"] == 100


def test_the_report_has_its_form(run: Run, written: Written, require: Callable[[str], Path]) -> None:
    bad = written("bad.jsonl", "no")
    for words in ([HELLO], [HELLO, bad], [HELLO, "--require", require("{cold: 9}")]):
        done = run("coverage", *words, "--json", "-")
        jsonschema.validate(done.report, REPORT)
        assert done.report["exit_code"] == done.code
        assert done.report["reached"] == sum(told["times"] > 0 for told in done.report["states"].values())


def test_a_report_in_a_file_comes_beside_the_table(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "coverage.json"
    done = run("coverage", HELLO, "--json", target)
    assert done.out == run("coverage", HELLO).out
    assert target.read_text() == run("coverage", HELLO, "--json", "-").out


def test_a_report_that_cannot_be_written_is_refused_first(run: Run, tmp_path: Path) -> None:
    done = run("coverage", HELLO, "--json", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "the report cannot be written: this is a folder" in done.err


# What is required


def test_all_that_is_required_is_reached(run: Run, require: Callable[[str], Path]) -> None:
    done = run("coverage", HELLO, "--require", require("{cold: 1, all-whole-blocks-hit: 2}"))
    assert done.code == 0
    assert done.out == run("coverage", HELLO).out + "all 2 states that are required were reached\n"
    assert run("coverage", HELLO, "--require", require("[cold, hit-many-blocks]")).code == 0


def test_of_no_trace_that_can_be_read_no_table_is_shown(run: Run, written: Written) -> None:
    done = run("coverage", written("broken.jsonl", "{"))
    assert (done.code, done.out) == (2, "")


def test_what_falls_short_is_named_with_its_counts(run: Run, require: Callable[[str], Path]) -> None:
    path = require("{same-step-hit: 1, cold: 1, all-whole-blocks-hit: 3000}")
    done = run("coverage", HELLO, "--require", path)
    assert (done.code, done.err) == (1, "")
    assert done.out.endswith(" states\nMISSING  same-step-hit: 0 of 1\nMISSING  all-whole-blocks-hit: 2 of 3,000\n")
    report = run("coverage", HELLO, "--require", path, "--json", "-").report
    assert report["short"] == {
        "same-step-hit": {"times": 0, "required": 1},
        "all-whole-blocks-hit": {"times": 2, "required": 3000},
    }


def test_a_requirement_of_an_unknown_state_names_the_nearest(run: Run, require: Callable[[str], Path]) -> None:
    path = require("{same-step-hits: 1}")
    done = run("coverage", HELLO, "--require", path)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"omnisim: {path}:2: 'same-step-hits' is no state; did you mean 'same-step-hit'? "
        "omnisim coverage lists them all\n"
    )


def test_requirements_that_are_not_there_are_refused(run: Run, tmp_path: Path) -> None:
    done = run("coverage", HELLO, "--require", tmp_path / "no.yaml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"omnisim: {tmp_path / 'no.yaml'}: it cannot be read (No such file or directory); ")


# Traces that cannot be read


def test_a_trace_that_cannot_be_read_is_told_and_the_others_count(
    run: Run, written: Written, require: Callable[[str], Path]
) -> None:
    late = {"num_computed_tokens": [9], "num_scheduled_tokens": [1], "new_token_ids": [[5]]}
    broken, good = written("a/broken.jsonl", lines(FIRST, late)), written("a/good.jsonl", GOOD)
    done = run("coverage", broken.parent, "--require", require("[preempted]"), "--json", "-")
    assert done.code == 2
    assert done.err.startswith(f"omnisim: {broken}:3: step 1, request A: ")
    assert done.report["unreadable"] == [done.err.removeprefix("omnisim: ").rstrip("\n")]
    assert done.report["states"]["cold"] == {
        "times": 1,
        "first": {"trace": str(good), "step": 0, "request": "A"},
        "meaning": STATES["cold"],
    }
    table_too = run("coverage", broken, good)
    assert (table_too.code, table_too.err) == (2, done.err)
    assert table_too.out == run("coverage", good).out


def test_what_a_trace_forges_is_escaped(run: Run, written: Written) -> None:
    out = run("coverage", written("t.jsonl", lines(*hit("a\nb[red]", "\x1b[31mX")))).out
    assert "step 1, a\\nb[red] " in out
    assert "step 0, \\x1b[31mX " in out
