"""Caches are measured against each other in processes of their own; how fast they are, no test says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from omnisim import versus
from omnisim.batch import make_batch
from omnisim.errors import SetupError
from omnisim.report.versus import print_copied, print_timings
from omnisim.trace import Geometry, Header, Producer, load, save
from omnisim.versus import PHASES, Copied, Timing, copied, measure

from .releases import release

ROOMY = Path(__file__).parents[1] / "traces" / "recorded" / "chat-roomy.jsonl.zst"


def shown(print_it: object, *args: object) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_it(console, *args)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_schedule_that_is_measured_is_legal(tmp_path: Path) -> None:
    schedule = versus._Schedule()
    records = [schedule.next(phase) for phase in PHASES for _ in range(5)]
    cache = Geometry(num_blocks=versus._NUM_BLOCKS, block_size=versus._BLOCK_SIZE)
    header = Header(format="omnisim-trace/1", producer=Producer(name="test"), cache=cache)
    save(tmp_path / "t.jsonl", header, records)
    steps = list(load(tmp_path / "t.jsonl").steps())
    assert [step.num_tokens for step in steps] == [2048] * 5 + [512] * 5 + [64] * 5
    assert {step.num_computed_tokens for step in steps[5:10]} == {(1024,) * 8}
    batch = make_batch("light", cache)
    for step in steps:
        batch.apply(step)
        assert tuple(batch.input_batch.req_ids) == step.req_ids


def test_every_phase_of_every_subject_is_measured() -> None:
    timings = measure(["builtin", "omnisim.cache:OmniTensorPrefixCache"], width=64, turns=2)
    assert list(timings) == ["builtin", "omnisim.cache:OmniTensorPrefixCache"]
    for by_phase in timings.values():
        assert list(by_phase) == list(PHASES)
        assert all(timing.seconds > 0 and timing.copy_seconds > 0 for timing in by_phase.values())
    text = shown(print_timings, {64: timings})
    assert text.count("times as fast as builtin") == 3
    assert text.count("omnisim.cache:OmniTensorPrefixCache") == 3
    assert "goal" not in text, "a goal is of one pair only"


def test_a_goal_is_met_or_missed() -> None:
    slow, fast = (dict.fromkeys(PHASES, Timing(seconds, 1.0, 8)) for seconds in (4.0, 2.0))
    text = shown(print_timings, {8: {"vllm-omni:0.28.0": slow, "builtin": fast}})
    assert [line.split()[-1] for line in text.splitlines() if "goal" in line] == ["met", "met", "missed"]


@pytest.mark.parametrize("version", [None, "0.28.0", "0.30.0"])
def test_what_is_written_and_read_again_is_what_the_recording_says(version: str | None) -> None:
    told = copied("builtin" if version is None else release(version), ROOMY, None)
    assert told == Copied(
        steps=58, rows_computed=1382, rows_read_again=384, rows_written=1382, bytes_written=1382 * 128
    )


def test_what_cannot_be_counted_is_said_beside_the_others() -> None:
    with pytest.raises(SetupError, match="AttributeError: 'NoneType' object has no attribute 'keys'"):
        copied(release("0.20.0"), ROOMY, None)
    text = shown(print_copied, ROOMY, {"builtin": Copied(2, 8, 0, 8, 64), "other": "other: it failed"})
    assert "2 steps, 8 rows computed, 0 of them ever read again" in text
    assert "none is" in text
    assert text.endswith("other: it failed\n")


def test_a_subject_without_a_cache_cannot_be_measured() -> None:
    with pytest.raises(SetupError, match="none has no cache that could be measured"):
        measure(["none"], width=8, turns=1)
