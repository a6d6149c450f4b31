"""The public samples: what is kept, what is reused as their README measured it, and copies that are damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from .files import SAMPLES, chain, needs_samples, prompt, read, refusal, reuse, written

pytestmark = needs_samples

MEASURED = {
    "mooncake_conversation_first2000.jsonl": ("mooncake", 512, 2000, 54_559, 28.9, 17),
    "mooncake_synthetic_first2000.jsonl": ("mooncake", 512, 2000, 49_580, 32.8, 40),
    "sharegpt_qwen3_300req_blk16_derived.jsonl": ("blocks", 16, 300, 16_314, 7.9, 3),
    "lmcache_agent_miniswe_blk64bytes_derived.jsonl": ("blocks", 16, 402, 151_371, 93.5, 2),
    "lmcache_agent_taubench_blk64bytes_derived.jsonl": ("blocks", 16, 471, 5_112, 84.4, 288),
    "lmcache_agent_magagent_blk64bytes_derived.jsonl": ("blocks", 16, 746, 94_815, 84.1, 581),
}
"""Format, block size, rows; then as their README has it: blocks, reuse in percent, and prompts found whole."""
EMPTY = {"lmcache_agent_magagent_blk64bytes_derived.jsonl": 53}
"""Rows without a prompt, which that measurement counts as found whole."""
SPAN_S = {"mooncake_conversation_first2000.jsonl": 669, "mooncake_synthetic_first2000.jsonl": 533}


@pytest.mark.parametrize("name", MEASURED)
def test_tokens_are_reused_as_the_blocks_are(name: str) -> None:
    form, block_size, rows, num_blocks, percent, num_whole = MEASURED[name]
    num_empty = EMPTY.get(name, 0)
    workload = read(form, SAMPLES / name)
    assert (workload.ledger.rows, workload.ledger.kept) == (rows, rows - num_empty)
    assert workload.ledger.dropped == ({"input_length is 0": num_empty} if num_empty else {})
    found = reuse(workload.requests, block_size)
    assert (found[0], found[2] + num_empty) == (num_blocks, num_whole)
    assert abs(100 * found[1] / found[0] - percent) <= 0.0501


@pytest.mark.parametrize("name", SPAN_S)
def test_a_sample_lasts_as_long_as_was_measured(name: str) -> None:
    assert round(read("mooncake", SAMPLES / name).requests[-1].arrival) == SPAN_S[name]


def leading(names: list[list[object]]) -> list[int]:
    """For each list, how many of its first names were in the lists before it."""
    seen: set[object] = set()
    hits = []
    for row in names:
        hits.append(next((at for at, name in enumerate(row) if name not in seen), len(row)))
        seen |= set(row)
    return hits


def test_blocks_of_16_hit_what_the_file_says_and_nothing_more() -> None:
    """What can be hit is told by the ids: whole blocks, and of a last one that is the same, its whole 16 tokens."""
    path = SAMPLES / "mooncake_conversation_first2000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    units = [
        [(row["hash_ids"][at // 32], min(512, row["input_length"] - at // 32 * 512), at) for at in range(num // 16)]
        for row in rows
        if (num := row["input_length"])
    ]
    made = [
        chain(prompt(request), 16)[: request.num_prompt_tokens // 16] for request in read("mooncake", path).requests
    ]
    assert leading(made) == leading(units)


@pytest.mark.parametrize(
    ("name", "span_s"),
    [("azure_llm_2023_code_first2000.csv", 853.079347), ("azure_llm_2023_conv_first2000.csv", 424.259457)],
)
def test_the_azure_samples_have_no_reuse(name: str, span_s: float) -> None:
    workload = read("azure", SAMPLES / name)
    assert (workload.ledger.rows, workload.ledger.kept) == (2000, 2000)
    assert workload.requests[-1].arrival == span_s
    assert reuse(workload.requests, 16)[1:] == (0, 0)


@pytest.mark.parametrize("name", MEASURED)
def test_a_sample_is_read_only_as_what_it_is(name: str) -> None:
    form, block_size, *_ = MEASURED[name]
    other, other_size = ("blocks", 16) if form == "mooncake" else ("mooncake", 512)
    message = refusal(other, SAMPLES / name)
    assert f"its blocks are not of {other_size} tokens; blocks of {block_size} fit: read it as {form}" in message


FORMS = {**{name: told[0] for name, told in MEASURED.items()}, "azure_llm_2023_conv_first2000.csv": "azure"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMS)
def test_the_ledger_of_a_damaged_copy_adds_up(name: str, seed: int, tmp_path: Path) -> None:
    form, chance = FORMS[name], random.Random(seed)
    head, rows = heads_and_rows(name)
    chance.shuffle(rows)
    (cut, garbled), whole = (rows[20:40], rows[40:60]), rows[60:]
    damaged = [row[: chance.randrange(1, 20)] for row in cut]
    damaged += [row.replace("," if form == "azure" else "input_length", "x", 1) for row in garbled]
    both = damaged + whole
    chance.shuffle(both)
    workload = read(form, written(tmp_path, "\n".join([*head, *both])))
    num_empty = sum('"input_length": 0,' in row for row in whole)
    assert (workload.ledger.rows, workload.ledger.kept) == (len(both), len(whole) - num_empty)
    assert workload.ledger.dropped.total() == 40 + num_empty


def heads_and_rows(name: str) -> tuple[list[str], list[str]]:
    lines = (SAMPLES / name).read_text().splitlines()
    num_heads = int(name.endswith(".csv"))
    return lines[:num_heads], lines[num_heads:]
