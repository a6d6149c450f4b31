"""Every benchmark runs and says what it measured; how fast this machine is, no test says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from omnisim import bench
from omnisim.bench import BENCHMARKS, Benchmark, Result, run_benchmarks
from omnisim.cli import main
from omnisim.errors import UsageError
from omnisim.trace import load, save

NUM_LINES = {"merge": 1, "update": 1, "decode": 1, "replay": 2, "stream": 2, "read": 2, "simulate": 2, "start": 1}
WITHOUT_GOAL = {"... and checked to be legal"}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """``omnisim bench`` with these words, as in a pipe."""
    monkeypatch.setattr(sys, "argv", ["omnisim", "bench", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_every_benchmark_is_tried_here() -> None:
    assert list(NUM_LINES) == list(BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_line_has_a_measured_value_a_goal_and_whether_it_was_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(bench.STREAM_STEPS, "quick", 240)
    assert run(monkeypatch, "--only", name, "--quick") == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"torch \S+, \d+ cores, \d+ threads by default", head)
    assert columns.split() == ["what", "measured", "goal", "threads"]
    assert len(rows) == NUM_LINES[name]
    for row in rows:
        what, measured, goal, threads, *met = re.split(r"  +", row.strip())
        assert re.search(r"\d", measured)
        assert int(threads) == (BENCHMARKS[name].threads or torch.get_num_threads())
        if what in WITHOUT_GOAL:
            assert (goal, met) == ("none", [])
        else:
            assert re.fullmatch(r"[<>]= [\d.,]+( \S+)?", goal)
            assert met in (["met"], ["missed"])


def test_what_is_judged_in_microseconds_has_a_ratio_too() -> None:
    [decode] = BENCHMARKS["decode"].measure("quick")
    assert re.fullmatch(r"\d+ us, \d+\.\d\d of a plain index_copy_ and 64 clones \(\d+ us\)", decode.measured)


@pytest.mark.parametrize("fails", [False, True])
def test_the_threads_of_torch_are_as_they_were_before(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    before, seen = torch.get_num_threads(), []

    def measure(size: bench.Size) -> list[Result]:
        seen.append((size, torch.get_num_threads()))
        if fails:
            raise ZeroDivisionError
        return [Result("it", "1", "<= 2", True)]

    monkeypatch.setattr(bench, "BENCHMARKS", {"it": Benchmark(measure, threads=before + 1)})
    try:
        assert run_benchmarks(Console(quiet=True), [], "full") == [Result("it", "1", "<= 2", True)]
    except ZeroDivisionError:
        assert fails
    assert seen == [("full", before + 1)]
    assert torch.get_num_threads() == before


def test_a_name_that_is_none_gets_the_one_that_is_close() -> None:
    with pytest.raises(UsageError, match="no benchmark 'merg'; did you mean 'merge'"):
        run_benchmarks(Console(quiet=True), ["merg"])


def test_quick_and_full_do_not_go_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--quick", "--full") == 2
    assert capsys.readouterr().err == "omnisim: --quick and --full are two lengths; choose one of them\n"


def test_made_up_schedules_are_legal_and_have_the_length_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "made-up.jsonl"
    save(path, bench.made_up_header(5), bench.made_up_records(250, 5))
    steps = list(load(path).steps())
    assert len(steps) == 250
    assert {len(step.req_ids) for step in steps} == {5}
    assert any(step.num_computed_tokens[0] and step.scheduled_new_reqs for step in steps), "there are hits"
