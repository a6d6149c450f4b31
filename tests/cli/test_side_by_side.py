"""``compare``, ``bisect`` and ``replay --expect``: what they print, how they exit, and what they do not take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..releases import release
from .conftest import Run
from .files import HELLO, ROOT, TIGHT, hit, lines

Written = Callable[[str, bytes | str], Path]
SHIFTED = ROOT / "traces" / "defects" / "deferred-codes-shifted-by-a-reader.yaml"
TALKER = {
    "format": "omnisim-talker/1",
    "name": "small",
    "hidden_size": 8,
    "when_empty": "empty",
}


def expecting(**expect: str) -> str:
    return lines(*hit(), expect=expect, talker=TALKER)


def test_a_comparison_is_a_matrix_and_a_line_a_difference(run: Run) -> None:
    done = run("compare", HELLO, TIGHT, "--subject", "builtin", "--subject", "none")
    assert (done.code, done.err) == (1, "")
    assert "builtin" in done.out
    assert "agrees 0/5" in done.out
    assert "differs 2/5" in done.out
    assert f"{HELLO}: none is not as builtin: 2 of 5 outputs wrong; the first: step 1, request B" in done.out
    assert done.out.endswith("2 traces under 2 subjects (outputs wrong/checked): 2 differences\n")
    assert "\x1b" not in done.out


def test_a_comparison_as_data(run: Run) -> None:
    done = run("compare", HELLO, "--subject", "builtin", "--subject", "none", "--json", "-")
    told = json.loads(done.out)
    assert (done.code, told["exit_code"]) == (1, 1)
    assert [(one["subject"], one["outcome"]) for one in told["runs"]] == [
        ("builtin", "agreement"),
        ("none", "divergence"),
    ]
    assert told["differences"] == [{"trace": str(HELLO), "subject": "none"}]


def test_subjects_that_do_not_differ_exit_with_0(run: Run, written: Written) -> None:
    path = written("t.jsonl", lines(hit()[0], talker=TALKER))
    done = run("compare", path, "--subject", "builtin", "--subject", "none")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(": 0 differences\n")


def test_a_trace_that_cannot_be_judged_exits_with_2_and_the_others_are_compared(run: Run, written: Written) -> None:
    path = written("bad.jsonl", "x")
    done = run("compare", path, HELLO, "--subject", "builtin", "--subject", "none")
    assert done.code == 2
    assert f"{path}:1" in done.err
    assert "differs 2/5" in done.out


def test_a_bisection_names_the_release_that_repaired_deferred_keys(run: Run) -> None:
    for version in ("0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0"):
        release(version)
    done = run("bisect", SHIFTED, "--good", "0.30.0", "--bad", "0.22.0")
    assert (done.code, done.err) == (0, "")
    assert "vllm-omni:0.30.0 is the first that is not as vllm-omni:0.28.0:" in done.out
    assert "isolation: due the row of position 1 of C" in done.out


def test_a_bisection_over_subjects_of_ones_own(run: Run) -> None:
    over = ("--over", "none", "--over", "builtin")
    done = run("bisect", HELLO, "--good", "builtin", "--bad", "none", *over)
    assert done.code == 0
    assert "builtin is the first that is not as none:" in done.out


def test_what_is_as_expected_exits_with_0(run: Run, written: Written) -> None:
    path = written("t.jsonl", expecting(builtin="agreement", none="divergence"))
    done = run("replay", path, "--expect")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"AS EXPECTED  {path}  2 subjects\n2 outcomes: 2 AS EXPECTED\n"
    assert run("replay", path, "--expect", "--subject", "none").out.startswith(f"AS EXPECTED  {path}  1 subject\n")


@pytest.mark.parametrize(
    ("expect", "status"),
    [({"builtin": "divergence"}, "FIXED"), ({"none": "agreement"}, "FAILED"), ({"none": "crash"}, "FAILED")],
)
def test_what_is_not_as_expected_exits_with_1(run: Run, written: Written, expect: dict[str, str], status: str) -> None:
    path = written("t.jsonl", expecting(**expect))
    done = run("replay", path, "--expect")
    assert done.code == 1
    assert done.out.startswith(status)
    told = json.loads(run("replay", path, "--expect", "--json", "-").out)
    assert [one["status"] for one in told["runs"]] == [status]
    assert told["exit_code"] == 1


def test_a_trace_that_expects_nothing_cannot_be_held_to_it(run: Run, written: Written) -> None:
    for told, words in (
        (lines(*hit()), "expects nothing"),
        (expecting(none="divergence"), "expects nothing of builtin"),
    ):
        done = run("replay", written("t.jsonl", told), "--expect", "--subject", "builtin")
        assert done.code == 2
        assert words in done.err


BAD = {
    "one subject": (("compare", HELLO, "--subject", "builtin"), "there is nothing to compare"),
    "one subject twice": (("compare", HELLO, "--subject", "none", "--subject", "none"), "there is nothing to compare"),
    "no such subject": (("compare", HELLO, "--subject", "none", "--subject", "nona"), "did you mean 'none'?"),
    "an unknown release": (("replay", HELLO, "--subject", "vllm-omni:9.9"), "known: 0.20.0"),
    "no version": (("replay", HELLO, "--subject", "vllm-omni:"), "is not a version"),
    "no such folder": (("replay", HELLO, "--subject", "path:nowhere"), "there is no vllm_omni/ in it"),
    "no such module": (("replay", HELLO, "--subject", "nowhere:Mine"), "cannot be imported"),
    "no such class": (("replay", HELLO, "--subject", "omnisim.cache:Mine"), "has no class 'Mine'"),
    "no cache": (("replay", HELLO, "--subject", "pathlib:Path"), "it has no add_prefix_cached_new_req_id"),
    "a bisection of one": (("bisect", HELLO, "--good", "0.30.0", "--bad", "0.30.0"), "is there twice"),
    "a release not known": (("bisect", HELLO, "--good", "0.30.0", "--bad", "0.29.0"), "is not in the order"),
    "an end that is not over": (
        ("bisect", HELLO, "--good", "none", "--bad", "x", "--over", "none", "--over", "builtin"),
        "x is not in the order none, builtin",
    ),
    "a measurement of nothing": (("bench", "--subject", "none"), "none has no cache that could be measured"),
    "a trace without a subject": (("bench", "--trace", HELLO), "asks about a --subject"),
    "a talker without a trace": (("bench", "--subject", "builtin", "--talker", "tts"), "what is emitted in a --trace"),
    "two benchmarks": (("bench", "--subject", "builtin", "--only", "merge"), "--subject does not go with --only"),
    "a timeout of 0": (("replay", HELLO, "--timeout", "0"), "--timeout"),
}


@pytest.mark.parametrize(("words", "told"), BAD.values(), ids=BAD)
def test_what_does_not_go_is_said_in_a_line(run: Run, words: tuple[object, ...], told: str) -> None:
    done = run(*words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert "Traceback" not in done.err


def test_a_bisection_between_two_that_are_alike_says_so(run: Run) -> None:
    over = ("--over", "builtin", "--over", "omnisim.cache:OmniTensorPrefixCache")
    done = run("bisect", HELLO, "--good", "builtin", "--bad", "omnisim.cache:OmniTensorPrefixCache", *over)
    assert done.code == 2
    assert "are the same: agreement" in done.err
