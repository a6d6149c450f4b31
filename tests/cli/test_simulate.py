"""``omnisim simulate`` as it is typed: what it writes, prints and refuses."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omnisim.sim.scenario import scenario_names

from .conftest import Run

Written = Callable[[str, bytes | str], Path]

SMALL = """\
format: omnisim-scenario/1
name: small
summary: Two requests that share a prefix.
engine: {block_size: 4, num_blocks: 32, max_num_seqs: 4, max_num_batched_tokens: 16}
traffic:
  - {name: r, count: 2, arrivals: {every: 4}, prompt: [{share: s, tokens: 9}, {tokens: 2}], output_tokens: 3}
"""

MOONCAKE = """\
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 20, "input_length": 1000, "output_length": 2, "hash_ids": [0, 2]}
{"timestamp": 30, "input_length": 9
"""


@pytest.fixture
def small(written: Written) -> Path:
    return written("small.yaml", SMALL)


@pytest.mark.usefixtures("vllm")
def test_a_simulated_trace_is_replayed(run: Run, small: Path, tmp_path: Path) -> None:
    made = run("simulate", small, "-o", tmp_path / "t.jsonl.zst")
    assert (made.code, made.err) == (0, "")
    assert "SIMULATED  small  vLLM " in made.out
    assert ", seed 0  wrote " in made.out
    assert "6 steps, 2 requests, 18 tokens computed, at most 1 request in a step" in made.out
    assert "hits       1 of 2 requests (50%)" in made.out
    assert "8 of 22 prompt tokens (36%)" in made.out
    assert "hit-many-blocks                  1  " in made.out
    replayed = run("replay", tmp_path / "t.jsonl.zst")
    assert (replayed.code, replayed.out.split()[0]) == (0, "AGREEMENT")
    assert run("replay", tmp_path / "t.jsonl.zst", "--subject", "none").code == 1
    assert run("check", tmp_path / "t.jsonl.zst").code == 0


@pytest.mark.usefixtures("vllm")
def test_without_an_output_nothing_is_written(run: Run, small: Path) -> None:
    before = sorted(small.parent.iterdir())
    made = run("simulate", small)
    assert (made.code, "not written" in made.out) == (0, True)
    assert sorted(small.parent.iterdir()) == before


WAYS = {
    "a seed, settings and a talker": (
        ("small.yaml", "--seed", "5", "--set", "engine.num_blocks=40", "--talker", "tts"),
        "omnisim simulate small.yaml --seed 5 --set engine.num_blocks=40 --talker tts",
    ),
    "settings that a shell would take apart": (
        (
            "small.yaml",
            "--set",
            'traffic.r.arrivals={"times": [1, 3]}',
            "--set",
            'summary="a b"',
            "--set",
            'talker="tts"',
        ),
        "omnisim simulate small.yaml --seed 0 --set 'traffic.r.arrivals={\"times\":[1,3]}' --set 'summary=\"a b\"' "
        "--set talker=tts",
    ),
    "a workload": (
        ("--workload", "mooncake:moon.jsonl", "--limit", "1", "--scale-lengths", "0.1", "--time-scale", "2"),
        "omnisim simulate --workload mooncake:moon.jsonl --limit 1 --scale-lengths 0.1 --time-scale 2.0",
    ),
    "a workload over the engine of a scenario": (
        ("small.yaml", "--workload", "mooncake:moon.jsonl", "--set", "engine.num_blocks=400"),
        "omnisim simulate small.yaml --workload mooncake:moon.jsonl --set engine.num_blocks=400",
    ),
}


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("words", "told"), WAYS.values(), ids=WAYS)
def test_the_trace_says_how_it_is_made_again_and_nothing_of_where(
    run: Run, monkeypatch: pytest.MonkeyPatch, small: Path, written: Written, words: tuple[str, ...], told: str
) -> None:
    written("moon.jsonl", MOONCAKE)
    monkeypatch.chdir(small.parent)
    assert run("simulate", *words, "-o", "t.jsonl").code == 0
    header = json.loads(Path("t.jsonl").read_text().splitlines()[0])
    assert header["provenance"] == told
    assert header["producer"]["name"] == "omnisim simulate"
    assert header.get("talker") == ("tts" if "tts" in told else None)
    assert str(small.parent) not in Path("t.jsonl").read_text()
    assert run(*shlex.split(told)[1:], "-o", "again.jsonl").code == 0
    assert Path("again.jsonl").read_bytes() == Path("t.jsonl").read_bytes()


@pytest.mark.usefixtures("vllm")
def test_a_run_of_a_sweep_is_made_again_by_what_its_trace_tells(
    run: Run, monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    monkeypatch.chdir(small.parent)
    sweep = ("--sweep", "traffic.r.output_tokens=2,{uniform: [1, 9]}", "--repeat", "2")
    assert run("simulate", "small.yaml", *sweep, "-o", "t.jsonl").code == 0
    traces = sorted(Path().glob("t.*.jsonl"))
    assert len(traces) == 4
    for trace in traces:
        told = json.loads(trace.read_text().splitlines()[0])["provenance"]
        run(*shlex.split(told)[1:], "-o", "again.jsonl", "--overwrite")
        assert Path("again.jsonl").read_bytes() == trace.read_bytes()


@pytest.mark.usefixtures("vllm")
def test_sweeps_and_repetitions_are_runs_with_names_of_their_own(run: Run, small: Path, tmp_path: Path) -> None:
    words = ("simulate", small, "--sweep", "engine.block_size=2,4", "--repeat", 2, "-o", tmp_path / "t.jsonl.zst")
    made = run(*words, "--json", tmp_path / "report.json")
    assert (made.code, made.err) == (0, "")
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert [(one["changes"], one["seed"]) for one in runs] == [
        ([f"engine.block_size={size}"], runs[number]["seed"]) for size in (2, 4) for number in (0, 1)
    ]
    assert runs[0]["seed"] == 0 != runs[1]["seed"]
    assert len({one["trace"] for one in runs}) == 4
    for one in runs:
        assert Path(one["trace"]).name == f"t.{one['changes'][0]}.seed={one['seed']}.jsonl.zst"
        assert Path(one["trace"]).stat().st_size == one["bytes"]
    assert re.search(r"^  block_size +seed +steps ", made.out, re.MULTILINE)
    assert "SIMULATED  small  4 runs, vLLM " in made.out
    again = run("simulate", small, "--set", "engine.block_size=4", "--seed", runs[3]["seed"], "--json", "-")
    assert again.report["runs"][0]["tokens"] == runs[3]["tokens"]
    Path(runs[0]["trace"]).unlink()
    refused = run(*words)
    assert (refused.code, "it exists already" in refused.err) == (2, True)
    assert not Path(runs[0]["trace"]).exists(), "nothing runs if one of them cannot be written"
    assert run(*words, "--overwrite").code == 0


@pytest.mark.usefixtures("vllm")
def test_a_report_is_plain_data(run: Run, small: Path) -> None:
    report = run("simulate", small, "--json", "-").report
    (one,) = report["runs"]
    assert report["format"] == "omnisim-simulation/1"
    assert (one["requests"], one["requests_hit"], one["prompt_tokens"], one["hit_tokens"]) == (2, 1, 22, 8)
    assert (one["trace"], one["preemptions"], one["aborts"], one["evictions"]) == (None, 0, 0, 0)
    assert len(one["usage"]) == one["steps"] == 6
    assert one["coverage"]["states"]["cold"]["times"] == 1


@pytest.mark.usefixtures("vllm")
def test_a_workload_is_simulated_and_its_rows_are_accounted_for(run: Run, written: Written, tmp_path: Path) -> None:
    file = written("moon.jsonl", MOONCAKE)
    made = run("simulate", "--workload", f"mooncake:{file}", "-o", tmp_path / "t.jsonl.zst")
    assert made.code == 0
    assert "3 rows read, 2 kept; 1 dropped: " in made.out
    assert "SIMULATED  mooncake:moon.jsonl  vLLM" in made.out
    assert "512 of 1,600 prompt tokens" in made.out
    assert run("replay", tmp_path / "t.jsonl.zst").code == 0


def test_nothing_that_is_read_is_overwritten(run: Run, small: Path, written: Written) -> None:
    moon = written("moon.jsonl", MOONCAKE)
    for words in (
        ("simulate", small, "--json", small),
        ("simulate", small, "-o", small, "--overwrite"),
        ("simulate", small, "--workload", f"mooncake:{moon}", "-o", moon, "--overwrite"),
        ("coverage", small, "--json", small),
        ("replay", small, "--json", small),
        ("compare", small, "--json", small, "--subject", "none", "--subject", "builtin"),
    ):
        done = run(*words)
        assert (done.code, done.out) == (2, ""), words
        assert "it is read, and would be overwritten; name another file" in done.err
    assert (small.read_text(), moon.read_text()) == (SMALL, MOONCAKE)


@pytest.mark.usefixtures("vllm")
def test_a_talker_in_a_file_travels_with_the_trace(run: Run, small: Path, written: Written, tmp_path: Path) -> None:
    talker = written("mine.yaml", "format: omnisim-talker/1\nname: mine\nhidden_size: 8\n")
    (tmp_path / "other").mkdir()
    assert run("simulate", small, "--talker", talker, "-o", tmp_path / "other" / "t.jsonl").code == 0
    replayed = run("replay", tmp_path / "other" / "t.jsonl")
    assert (replayed.code, "talker mine" in replayed.out) == (0, True)


@pytest.mark.usefixtures("vllm")
def test_what_the_engine_refused_and_what_an_event_missed_is_told(run: Run, small: Path) -> None:
    events = "events=[{at: 1, reset_prefix_cache: true}, {at: 2, abort: [r-1]}]"
    made = run("simulate", small, "--set", events)
    assert "refused    1 reset of the prefix cache, for requests held blocks" in made.out
    assert "missed     1 request of events: not sent yet, or over" in made.out


@pytest.mark.usefixtures("vllm")
def test_a_workload_takes_the_engine_of_a_scenario(run: Run, small: Path, written: Written) -> None:
    file = written("moon.jsonl", MOONCAKE)
    words = ("simulate", small, "--workload", f"mooncake:{file}", "--set", "engine.num_blocks=400", "--json", "-")
    (one,) = run(*words, "--limit", 1).report["runs"]
    assert (one["num_blocks"], one["requests"], one["steps"]) == (400, 1, 600 // 16 + 1 + 4)


def test_the_scenarios_are_listed(run: Run) -> None:
    listed = run("simulate", "--list")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.out.splitlines()] == list(scenario_names())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "nothing to simulate; name a scenario (see --list), or a --workload"),
        (("multiturn",), "unknown scenario 'multiturn'; did you mean 'multi-turn'?"),
        (("nowhere.yaml",), "nowhere.yaml: it cannot be read (No such file or directory); check the path"),
        (("multi-turn", "--limit", "3"), "--limit, --scale-lengths, --time-scale and --tokenizer are of a --workload"),
        (("multi-turn", "--sweep", "seed=3,3", "-o", "t.jsonl"), "two runs would be written to t.seed=3.seed=3.jsonl;"),
        (("multi-turn", "--set", "seed=3", "--sweep", "seed=1,2"), "seed is set or swept over more than once; say it"),
        (
            ("multi-turn", "--sweep", "engine.num_blocks=512,4"),
            "with engine.num_blocks=4: request chat-",
        ),
        (("multi-turn", "--sweep", "seed=1,2", "-o", "."), ".: this is a folder; name a trace in it"),
        (
            ("multi-turn", "--sweep", "seed=1,2", "-o", "t" * 250 + ".jsonl"),
            "it cannot be written (File name too long)",
        ),
        (("multi-turn", "--set", "talker=nobody"), "unknown talker 'nobody'"),
        (("multi-turn", "--set", "engine.long_prefill_token_threshold=100000"), "100,000 is more than max_model_len"),
        (("multi-turn", "--set", "engine.num_blocks=2000000000"), "engine.num_blocks: expected int <= 8388608"),
        (("multi-turn", "--set", "engine.max_num_seqs=65536"), "max_num_batched_tokens 256 is less than max_num_seqs"),
        (
            ("--workload", "mooncake:x", "--repeat", "2"),
            "there is no chance in a --workload: --seed and --repeat",
        ),
        (("--workload", "mooncake:x", "--seed", "2"), "there is no chance in a --workload: --seed and --repeat"),
        (("--workload", "mooncake:x", "-o", "t.txt"), "t.txt: this is no name of a trace"),
        (("multi-turn", "--sweep", "seed"), "--sweep 'seed' is no PATH=VALUE,VALUE; for example --sweep engine."),
        (("multi-turn", "--set", "engine.num_blocks=4"), "multi-turn.yaml: request chat-0.5 needs 25 blocks"),
        (("multi-turn", "--repeat", "2000"), "--sweep and --repeat make 2,000 runs; make fewer at once"),
        (("multi-turn", "--talker", "nobody"), "unknown talker 'nobody'"),
        (("multi-turn", "-o", "t.txt"), "t.txt: this is no name of a trace; a trace ends in "),
        (("multi-turn", "-o", "nowhere/t.jsonl"), "nowhere/t.jsonl: it cannot be written (there is no such folder)"),
        (("--workload", "moon"), "'moon' names no format and file"),
        (("--workload", "moon:x"), "'moon:x' names no format"),
        (("--workload", "mooncake:nowhere.jsonl"), "nowhere.jsonl: there is no such file; check the path"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: None, words: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("simulate", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert complaint in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [None, "0.30.1"])
def test_without_a_vllm_that_is_known_it_says_which_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, small: Path, version: str | None
) -> None:
    from omnisim.sim import engine

    class Fake:
        __version__ = version

    monkeypatch.setitem(sys.modules, "vllm", Fake if version else None)  # type: ignore[arg-type]
    engine.load_vllm.cache_clear()
    done = run("simulate", small)
    engine.load_vllm.cache_clear()
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    found = "simulate knows vLLM 0.32 and 0.33, and this is 0.30.1" if version else "simulate needs vLLM, which cannot"
    assert found in done.err
    assert "pip install -e '.[vllm]'" in done.err
