"""The report as data: its form, its counts, its outcome, and that ``again`` shows the same divergence again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omnisim.checks import CHECKS
from omnisim.subjects import _SUBJECTS
from omnisim.subjects.builtin import Builtin
from omnisim.trace import save
from omnisim.verify import Options, verify

from ..cache.mutants import MUTANTS, Mutant
from ..replay.test_mutants import CORPUS
from .conftest import Run
from .files import GOOD, HELLO, ROOT, TIGHT, hit, lines

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
SECONDS = {"type": "number", "minimum": 0}
OUTCOME = {"enum": ["agreement", "divergence", "refusal", "crash", "unusable"]}


def table(**fields: Any) -> dict[str, Any]:
    """An object with these fields, all of them and no other."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]}


TALLY = dict.fromkeys(("outputs_checked", "outputs_wrong", "rows_checked", "rows_wrong"), COUNT)
DIVERGENCE = table(
    check={"enum": list(CHECKS)},
    step=COUNT,
    request=TEXT,
    key=TEXT,
    position=maybe(COUNT),
    slot=maybe(COUNT),
    due=TEXT,
    came=TEXT,
    owner=maybe(table(request=TEXT, position=COUNT, step=COUNT)),
    explanation=TEXT,
    again=TEXT,
)
RUN = table(
    trace=TEXT,
    subject=TEXT,
    talker=TEXT,
    truth={"enum": ["content", "provenance"]},
    outcome=OUTCOME,
    error=maybe(TEXT),
    steps=COUNT,
    requests=COUNT,
    hits=COUNT,
    hits_by_kind={"type": "object", "additionalProperties": COUNT},
    **TALLY,
    checks=table(**{check: table(checked=COUNT, failed=COUNT) for check in CHECKS}),
    keys={"type": "object", "additionalProperties": table(**TALLY)},
    first_divergence=maybe(DIVERGENCE),
    seconds=table(subject=SECONDS, total=SECONDS),
)
REPORT = table(
    format={"const": "omnisim-report/1"},
    outcome=OUTCOME,
    exit_code={"enum": [0, 1, 2]},
    runs={"type": "array", "items": RUN, "minItems": 1},
)


def add_up(report: dict[str, Any]) -> None:
    """Whatever is counted twice is counted alike."""
    for run in report["runs"]:
        for name in TALLY:
            assert run[name] == sum(key[name] for key in run["keys"].values())
        assert run["hits"] == sum(count for kind, count in run["hits_by_kind"].items() if kind != "resumed")
        assert all(check["failed"] <= run["outputs_wrong"] for check in run["checks"].values())
        assert (run["first_divergence"] is not None) == (run["outcome"] == "divergence")
        assert (run["outputs_wrong"] > 0) == (run["outcome"] == "divergence")
        assert run["seconds"]["subject"] <= run["seconds"]["total"]


@pytest.mark.parametrize(
    "line",
    [
        HELLO,
        f"{HELLO} --subject none",
        f"{TIGHT} --talker tts",
        f"{TIGHT} --talker thinker --subject none --fail-fast",
        f"{TIGHT} --rows recorded",
        f"{TIGHT} --steps 3:9 --truth provenance",
        f"{ROOT / 'traces' / 'recorded'} --subject none",
    ],
)
def test_the_report_has_all_its_fields_and_adds_up(run: Run, line: object) -> None:
    done = run("replay", *str(line).split(), "--json", "-")
    jsonschema.validate(done.report, REPORT)
    add_up(done.report)
    assert done.code == done.report["exit_code"]
    assert done.err == ""


def test_to_a_file_goes_what_would_go_to_stdout_and_stdout_is_as_ever(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    done = run("replay", HELLO, "--subject", "none", "--json", report)
    plain = run("replay", HELLO, "--subject", "none")
    assert (done.code, done.out) == (plain.code, plain.out)
    written, printed = json.loads(report.read_text()), run("replay", HELLO, "--subject", "none", "--json", "-").report
    for value in (written, printed):
        jsonschema.validate(value, REPORT)
        del value["runs"][0]["seconds"]
    assert written == printed


def test_the_numbers_of_hello_are_those_that_one_counts_by_hand(run: Run) -> None:
    (result,) = run("replay", HELLO, "--subject", "none", "--json", "-").report["runs"]
    del result["seconds"], result["checks"]
    assert result == {
        "trace": str(HELLO),
        "subject": "none",
        "talker": "hidden-only",
        "truth": "content",
        "outcome": "divergence",
        "error": None,
        "steps": 3,
        "requests": 3,
        "hits": 2,
        "hits_by_kind": {"finished owner": 1, "running owner": 1},
        "outputs_checked": 5,
        "outputs_wrong": 2,
        "rows_checked": 26,
        "rows_wrong": 12,
        "keys": {"hidden_states": {"outputs_checked": 5, "outputs_wrong": 2, "rows_checked": 26, "rows_wrong": 12}},
        "first_divergence": {
            "check": "row-count",
            "step": 1,
            "request": "B",
            "key": "hidden_states",
            "position": 0,
            "slot": 4,
            "due": "the row of position 0 of B",
            "came": "nothing (3 rows where 7 are due)",
            "owner": None,
            "explanation": "The request entered with 4 cached positions; not all of their rows came. "
            "Slot 4 was last computed in step 0: position 0 of A, which is still running.",
            "again": f"omnisim replay {HELLO} --subject none --steps 1:2",
        },
    }


# Outcomes of several traces


WORSE = (
    lines(*hit(), cache={"num_blocks": 8, "block_size": 4, "kernel_block_size": 2})
    .replace('"A": [1]', '"A": [2, 3]')
    .replace('"B": [1, 2]', '"B": [2, 3, 4]')
)
"""Our cache refuses it: the runner's blocks are not the allocator's."""


@pytest.mark.parametrize(
    ("contents", "options", "outcome", "code"),
    [
        ([GOOD, GOOD], "", "agreement", 0),
        ([GOOD, ""], "", "unusable", 2),
        ([GOOD, WORSE], "", "refusal", 2),
        (["", WORSE], "", "refusal", 2),
        (["", GOOD], "--subject none", "divergence", 1),
        ([GOOD, "", WORSE], "--subject none", "divergence", 1),
        ([GOOD], "--subject broken", "crash", 1),
        ([GOOD, ""], "--subject broken", "crash", 1),
        ([""], "", "unusable", 2),
    ],
)
def test_the_gravest_outcome_is_that_of_all(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: list[str],
    options: str,
    outcome: str,
    code: int,
) -> None:
    class Broken(Builtin):
        def begin(self, *_: object) -> None:
            raise ZeroDivisionError

    monkeypatch.setitem(_SUBJECTS, "broken", Broken)
    for index, content in enumerate(contents):
        (tmp_path / f"{index}.jsonl").write_text(content)
    done = run("replay", tmp_path, *options.split(), "--json", "-")
    jsonschema.validate(done.report, REPORT)
    assert (done.report["outcome"], done.report["exit_code"], done.code) == (outcome, code, code)
    assert [Path(one["trace"]).name for one in done.report["runs"]] == [f"{i}.jsonl" for i in range(len(contents))]
    for one, content in zip(done.report["runs"], contents, strict=True):
        assert (one["outcome"] == "unusable") == (content == "")
        assert (one["error"] is None) == (one["outcome"] in ("agreement", "divergence"))


def test_fail_fast_stops_at_the_first_divergence(run: Run) -> None:
    done = run("replay", HELLO, TIGHT, "--subject", "none", "--fail-fast", "--json", "-")
    (only,) = done.report["runs"]
    assert (only["steps"], only["outputs_wrong"]) == (2, 1)


# Again


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two first divergences that are one; a command shows itself again."""
    return {**one, "again": ""} == {**other, "again": ""}


def shown_again(run: Run, first: dict[str, Any]) -> dict[str, Any]:
    program, *words = shlex.split(first["again"])
    assert program == "omnisim"
    done = run(*words, "--json", "-")
    assert done.code == 1
    found: dict[str, Any] = done.report["runs"][0]["first_divergence"]
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_again_shows_what_a_mutant_did(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    monkeypatch.setitem(_SUBJECTS, mutant.name, lambda: Builtin(mutant.cache_class))
    for story, talker in CORPUS:
        trace = story.trace(talker)
        found = verify(trace, Options(), Builtin(mutant.cache_class)).first
        if found is not None and (mutant.check == found.divergence.check or mutant.check in found.divergence.failed):
            break
    else:
        pytest.fail("no story shows it first of all")
    path = tmp_path / "a story's trace.jsonl"
    save(path, trace.header, trace.records())
    (result,) = run("replay", path, "--subject", mutant.name, "--json", "-").report["runs"]
    first = result["first_divergence"]
    assert (first["step"], first["request"]) == (found.divergence.step, found.divergence.req_id)
    assert same(shown_again(run, first), first)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--talker thinker",
        "--truth provenance",
        "--steps 20:",
        "--steps 30:60 --talker late-codes",
        "--rows recorded",
        "--fail-fast",
        "--max-memory 1G",
        "--talker deferred-codes --truth content",
    ],
)
def test_again_keeps_the_options_that_matter(run: Run, options: str) -> None:
    (result,) = run("replay", TIGHT, "--subject", "none", *options.split(), "--json", "-").report["runs"]
    first = result["first_divergence"]
    assert same(shown_again(run, first), first)


@pytest.mark.parametrize("name", ['it\'s "here" $(x) ü.jsonl', "-t.jsonl", "[red]t[bold].jsonl", "a\nb.jsonl"])
def test_again_can_be_pasted_whatever_the_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(GOOD)
    (result,) = run("replay", ".", "--subject", "none", "--json", "-").report["runs"]
    assert result["trace"] == name
    assert same(shown_again(run, result["first_divergence"]), result["first_divergence"])


# Whose row it is


def test_the_owner_is_the_request_whose_row_came_and_when_it_was_written(
    run: Run, written: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "next-block")
    monkeypatch.setitem(_SUBJECTS, "next-block", lambda: Builtin(mutant.cache_class))
    stranger = {
        "req_ids": ["S"],
        "scheduled_new_reqs": [{"req_id": "S", "prompt_token_ids": [7, 7, 7, 7]}],
        "num_computed_tokens": [0],
        "num_scheduled_tokens": [4],
        "block_ids": {"S": [2]},
    }
    one, two = hit()
    path = written("t.jsonl", lines(one, stranger, {**two, "finished_req_ids": ["A", "S"], "block_ids": {"B": [1, 3]}}))
    (result,) = run("replay", path, "--subject", "next-block", "--json", "-").report["runs"]
    first = result["first_divergence"]
    assert first["check"] == "isolation"
    assert (first["step"], first["request"], first["position"], first["slot"]) == (2, "B", 0, 4)
    assert first["owner"] == {"request": "S", "position": 0, "step": 1}
    assert first["explanation"] == (
        "The row is of another content: position 0 of S, written in step 1. "
        "Slot 4 was last computed in step 0: position 0 of A."
    )
    out = run("replay", path, "--subject", "next-block").out
    assert "whose  position 0 of S, written in step 1" in out
