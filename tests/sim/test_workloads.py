"""Workloads of every format become traces that agree: small files of each, and the public samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim.coverage import cover
from omnisim.importers import ReadOptions, read_workload
from omnisim.sim.clients import Plan
from omnisim.sim.run import prepare
from omnisim.sim.scenario import EngineSpec, StepTime
from omnisim.talkers import talker_names
from omnisim.verify import Options, verify

from ..importers.files import SAMPLES, needs_samples
from ..importers.test_reading import GOOD
from .simulated import Simulated, drive

pytestmark = pytest.mark.usefixtures("vllm")

SAMPLED = {
    "mooncake_conversation_first2000.jsonl": "mooncake",
    "mooncake_synthetic_first2000.jsonl": "mooncake",
    "azure_llm_2023_conv_first2000.csv": "azure",
    "azure_llm_2023_code_first2000.csv": "azure",
    "sharegpt_qwen3_300req_blk16_derived.jsonl": "blocks",
    "lmcache_agent_miniswe_blk64bytes_derived.jsonl": "blocks",
    "lmcache_agent_taubench_blk64bytes_derived.jsonl": "blocks",
    "lmcache_agent_magagent_blk64bytes_derived.jsonl": "blocks",
}
WITHOUT_PREFIXES = {"azure", "burstgpt"}


def simulated(form: str, path: Path, num_blocks: int | None = None, **options: object) -> Simulated:
    workload = read_workload(f"{form}:{path}", ReadOptions(**options))  # type: ignore[arg-type]
    spec = EngineSpec(num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=512)
    return drive(prepare(spec, Plan(workload.requests, (), StepTime()), path.name, told=""), path.name)


@pytest.mark.parametrize("form", GOOD)
def test_a_file_of_each_format_becomes_a_trace_that_agrees_under_every_talker(form: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(GOOD[form])
    made = simulated(form, path)
    assert made.outcome.requests == len(made.plan.requests) > 0
    for talker in talker_names():
        run = verify(made.trace, Options(talker=talker))
        assert run.outcome == "agreement", run


@needs_samples
@pytest.mark.parametrize("name", SAMPLED)
def test_the_public_samples_become_traces_that_agree_under_every_talker(name: str) -> None:
    """Shortened to a twentieth, so that five replays of each take seconds; prefixes are shortened with them."""
    made = simulated(SAMPLED[name], SAMPLES / name, limit=60, scale_lengths=0.05)
    assert made.outcome.requests == 60
    assert (made.stats.hits, made.stats.preemptions) == (made.outcome.hit_tokens, made.outcome.preemptions)
    if SAMPLED[name] in WITHOUT_PREFIXES:
        assert made.outcome.hit_tokens == 0
    for talker in talker_names():
        run = verify(made.trace, Options(talker=talker))
        assert run.outcome == "agreement", run


@needs_samples
@pytest.mark.slow
def test_a_pool_that_forgets_nothing_hits_what_the_sample_was_measured_to_reuse() -> None:
    """Whole blocks of 16 that stand in an earlier prompt, and what vLLM leaves of them: the last block of a prompt."""
    name = "lmcache_agent_taubench_blk64bytes_derived.jsonl"
    made = simulated("blocks", SAMPLES / name, num_blocks=20_000, time_scale=1000)
    seen: set[tuple[int, ...]] = set()
    expected = 0
    for request in made.plan.requests:
        prompt = request.prompt_token_ids().tolist()
        prefixes = [tuple(prompt[: 16 * number]) for number in range(1, len(prompt) // 16 + 1)]
        hits = next((at for at, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        expected += 16 * min(hits, (len(prompt) - 1) // 16)
        seen |= set(prefixes)
    assert made.outcome.hit_tokens == expected > 0
    assert cover(made.trace).times("hit-on-finished-owner") > 0
