"""``omnisim show``: what happened, at a glance and in full."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from omnisim.trace import save
from omnisim.trace.story import story_trace

from .conftest import Run
from .files import HELLO, ROOT, TIGHT

SIGNS = """
  H hit: enters with computed tokens   R resumed   x preempted   P prefill   d decode   . alive, not scheduled
"""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str], Path]:
    """``told(story)``: the story as a trace."""

    def tell(text: str) -> Path:
        trace = story_trace(text, num_blocks=256)
        path = tmp_path / "story.jsonl"
        save(path, trace.header, trace.records(), overwrite=True)
        return path

    return tell


def test_the_whole_of_hello(run: Run) -> None:
    assert run("show", "traces/hello.yaml").out == (
        """\
traces/hello.yaml  3 steps, 3 requests, 14 tokens; 8 blocks of 4; content tokens; by hand
Written by hand for the README. Apache-2.0.

     0
  A  Pd
  B   Hd
  C    H
"""
        + SIGNS
        + "  a column is one step\n"
    )


def test_a_step_of_hello(run: Run) -> None:
    assert run("show", "traces/hello.yaml", "--step", 1).out == (
        """\
step 1  2 requests, 4 tokens
  request          num_computed_tokens  num_scheduled_tokens  slots  blocks
  A        decode                    8                     1  12     1-3
  B        hit                       4                     3  16-18  1 4
"""
    )
    assert "\n  finished_req_ids: A\n" in run("show", "traces/hello.yaml", "--step", 2).out


def test_a_request_of_hello(run: Run) -> None:
    assert run("show", "traces/hello.yaml", "--request", "B").out == (
        """\
B in traces/hello.yaml
  step          positions  slots  blocks  cached positions, and who computed them
     1  hit     [4, 7)     16-18  1 4     [0, 4) A in step 0, running
     2  decode  [7, 8)     19     1 4
"""
    )


def test_a_step_and_a_request_can_be_asked_for_together(run: Run) -> None:
    both = run("show", "traces/hello.yaml", "--step", 1, "--request", "B").out
    assert both.startswith("step 1  ")
    assert "\nB in traces/hello.yaml\n" in both


def test_a_recording_shows_who_was_preempted_and_resumed(run: Run) -> None:
    out = run("show", TIGHT).out
    assert "86 steps, 28 requests, 1,794 tokens; 14 blocks of 32; content tokens; by vllm 0.32.0" in out
    assert re.search(r"^  req-17-8dc60fd5 +Hx\.Rd+$", out, re.MULTILINE)
    assert len(re.findall(r"^  req-", out, re.MULTILINE)) == 28
    life = run("show", TIGHT, "--request", "req-17-8dc60fd5").out
    assert [line.split()[1] for line in life.splitlines()[2:]][:4] == ["hit", "preempted", "resumed", "decode"]
    assert "finished or aborted before this step" in life


def test_a_padded_step_says_so(run: Run, told: Callable[[str], Path]) -> None:
    path = told("new A c=0 n=2 [1]; new B c=0 n=1 [2]; pad 1_000".replace("_", ""))
    assert "step 0  2 requests, 3 tokens (padded to 1,000)\n" in run("show", path, "--step", 0).out


def test_a_step_that_schedules_nobody_is_shown(run: Run, told: Callable[[str], Path]) -> None:
    path = told("new A c=0 n=2 [1]\npreempt A\nresume A c=0 n=3 [2]\nfin A")
    assert run("show", path, "--step", 1).out == "step 1  0 requests, 0 tokens\n  preempted_req_ids: A\n"
    assert run("show", path, "--step", 3).out == "step 3  0 requests, 0 tokens\n  finished_req_ids: A\n"
    assert "\n  A  PxR\n" in run("show", path).out
    assert "\n     1  preempted\n" in run("show", path, "--request", "A").out


def test_a_request_that_waits_is_drawn_as_alive(run: Run, told: Callable[[str], Path]) -> None:
    path = told("new A c=0 n=2 [1]; new B c=0 n=2 [2]\nrun B c=2 n=1\nrun B c=3 n=1\nrun A c=2 n=1")
    out = run("show", path).out
    assert "\n  A  P..d\n" in out
    assert "\n  B  Pdd.\n" in out


def test_a_long_trace_fits_on_a_page(run: Run, told: Callable[[str], Path]) -> None:
    steps = [
        {
            0: f"new r{index // 4} c=0 n=2 [{1 + index // 4 % 200}]",
            1: f"preempt r{index // 4}",
            2: f"resume r{index // 4} c=0 n=3 [{1 + index // 4 % 200}]",
            3: f"fin r{index // 4}",
        }[index % 4]
        for index in range(2400)
    ]
    path = told("\n".join(steps))
    out = run("show", path).out
    assert "2,400 steps, 600 requests, 3,000 tokens" in out
    assert "a column is 15 steps" in out
    assert "and 536 more requests" in out
    assert max(map(len, out.splitlines()[2:])) <= 170
    ruler, *drawn = out.splitlines()[2:67]
    assert [int(mark) for mark in ruler.split()] == list(range(0, 2400, 150))
    for index, line in enumerate(drawn):
        assert re.fullmatch(rf"  r{index} +[PRx]+", line)
        column = len("  r00  ") + 4 * index // 15
        assert line[column] != " ", "it begins in the column of its first step"
    assert "\n  2398  resumed" in run("show", path, "--request", "r599").out


def test_steps_keep_the_numbers_that_they_were_recorded_with(run: Run, tmp_path: Path) -> None:
    text = HELLO.read_text().replace("- req_ids: [A]\n", "- step: 40\n  req_ids: [A]\n", 1)
    path = tmp_path / "t.yaml"
    path.write_text(text)
    assert run("show", path, "--step", 41).out.startswith("step 41  2 requests")
    assert run("show", path, "--step", 3).err == f"omnisim: {path} has no step 3; its last is 42\n"
    assert "3 steps, 3 requests" in run("show", path).out
    assert re.search(r"^  A  +Pd$", run("show", path).out, re.MULTILINE)


def test_marks_of_large_steps_stand_apart(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(HELLO.read_text().replace("- req_ids: [A]\n", "- step: 2000000000\n  req_ids: [A]\n", 1))
    ruler = run("show", path).out.splitlines()[3]
    marks = [int(mark) for mark in ruler.split()]
    assert marks == [mark * marks[1] for mark in range(len(marks))]
