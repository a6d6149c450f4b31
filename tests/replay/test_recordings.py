"""The committed traces: recordings of a real engine agree under every talker, every truth, and either batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnisim.batch import make_batch
from omnisim.errors import SetupError
from omnisim.report.model import run_data
from omnisim.rows.recorded import TOLERANCES
from omnisim.subjects.builtin import Builtin
from omnisim.talkers import talker_names
from omnisim.trace import load
from omnisim.verify import Options, Run, verify

from ..cache.mutants import MUTANTS

TRACES = Path(__file__).parents[2] / "traces"
RECORDED = sorted((TRACES / "recorded").glob("*.jsonl.zst"))
ALL = [TRACES / "hello.yaml", *RECORDED]
WITH_CACHE = [path for path in RECORDED if "nocache" not in path.name]

# Of data/recordings/README.md: steps, tokens run, hits on blocks of (same step, running, finished) owners, resumes.
FACTS = {
    "chat-roomy": (58, 1382, (0, 5, 20), 0),
    "chat-roomy-nocache": (61, 3494, (0, 0, 0), 0),
    "chat-tight": (86, 1794, (0, 2, 23), 3),
    "chat-burst": (54, 1382, (5, 0, 20), 0),
    "chat-abort": (58, 1303, (0, 5, 20), 0),
}


def run(path: Path, **options: object) -> Run:
    return verify(load(path), Options(**options))  # type: ignore[arg-type]


def name_of(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.parametrize("path", RECORDED, ids=name_of)
def test_what_a_replay_counts_is_what_the_recording_says(path: Path) -> None:
    result = run(path)
    steps, tokens, hits, resumed = FACTS[name_of(path)]
    assert result.steps == steps
    assert result.counts["written"] == {"hidden_states": tokens}
    kinds = ("same step", "running owner", "finished owner")
    assert tuple(result.hits[kind] for kind in kinds) == hits  # type: ignore[index]
    assert result.hits["resumed"] == resumed


@pytest.mark.parametrize("talker", talker_names())
@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_our_cache_agrees_on_every_trace_under_every_talker(path: Path, talker: str) -> None:
    for truth in ("content", "provenance"):
        result = run(path, talker=talker, truth=truth)
        assert result.outcome == "agreement", (truth, result.error, result.first)
        assert sum(tally.outputs_checked for tally in result.tally.keys.values()) > 0


@pytest.mark.parametrize("path", WITH_CACHE, ids=name_of)
def test_a_cache_that_keeps_nothing_fails_on_each_hit_of_a_recording(path: Path) -> None:
    result = run(path, subject="none")
    assert result.outcome == "divergence"
    assert result.tally.keys["hidden_states"].outputs_wrong == 25
    assert result.tally.failed["row-count"] == 25


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_what_a_trace_expects_is_what_happens(path: Path) -> None:
    expected = load(path).header.expect
    assert expected
    for subject, outcome in expected.items():
        assert run(path, subject=subject).outcome == outcome


@pytest.mark.parametrize("path", RECORDED, ids=name_of)
def test_each_recorded_hidden_row_agrees_with_the_run_without_a_cache(path: Path) -> None:
    result = run(path, rows="recorded")
    assert result.outcome == "agreement", (result.error, result.first)
    # Every token run, every cached row of a hit, and what resumed requests get again.
    assert result.tally.keys["hidden_states"].rows_checked >= FACTS[name_of(path)][1]


def test_the_tolerance_is_what_torch_documents() -> None:
    for dtype, (rtol, atol) in TOLERANCES.items():
        one = torch.ones(1, dtype=torch.float64)
        torch.testing.assert_close((one * (1 + 0.9 * rtol)).to(dtype), one.to(dtype), rtol=rtol, atol=atol)
    assert TOLERANCES[torch.float32] == (1.3e-6, 1e-5)


@pytest.mark.parametrize("name", ["next-block", "blocks-reversed", "write-lands-late", "prefix-missing"])
def test_recorded_rows_tell_a_wrong_cache_too(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    path = TRACES / "recorded" / "chat-burst.jsonl.zst"
    result = verify(load(path), Options(rows="recorded"), Builtin(mutant.cache_class))
    assert result.outcome == "divergence"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_vllms_own_batch_gives_the_same_report(path: Path) -> None:
    trace = load(path)
    try:
        make_batch("vllm", trace.header.cache)
    except SetupError as error:
        pytest.skip(str(error))
    for talker in talker_names():
        reports = [run_data(run(path, talker=talker, batch=batch)) for batch in ("light", "vllm")]
        for report in reports:
            del report["seconds"]
        assert reports[0] == reports[1]
