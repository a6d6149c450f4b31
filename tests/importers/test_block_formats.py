"""Mooncake's traces and this project's derived ones: blocks of 512 and of 16 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .files import block_row, everything, json_lines, prompt, read, refusal, reuse, shared, written

MOONCAKE = (
    block_row([0, 1, 2], 1030, timestamp=3000),
    block_row([0, 1, 3, 4], 1600, timestamp=3000),
    block_row([0, 1, 2], 1030, timestamp=4500, output_length=7),
    block_row([0, 1, 2], 1031, timestamp=6000),
)


def test_a_mooncake_trace(tmp_path: Path) -> None:
    workload = read("mooncake", written(tmp_path, json_lines(*MOONCAKE)))
    first, second, again, longer = workload.requests
    assert [request.req_id for request in workload.requests] == [f"mooncake-{number}" for number in (1, 2, 3, 4)]
    assert [request.arrival for request in workload.requests] == [0, 0, 1.5, 3]
    assert [request.num_prompt_tokens for request in workload.requests] == [1030, 1600, 1030, 1031]
    assert [request.max_tokens for request in workload.requests] == [5, 5, 7, 5]
    assert shared(prompt(first), prompt(second)) == 1024
    assert np.array_equal(prompt(first), prompt(again))
    assert shared(prompt(first), prompt(longer)) == 1024
    assert shared(everything(first), everything(again)) == 1030, "an output is its request's own"
    assert workload.notes == (
        "Token ids are made up from the ids of the blocks: where blocks are equal their tokens are, and only there.",
        "What a request samples is its own: the file does not say whether a later prompt continues it.",
    )


def test_rows_are_put_in_the_order_of_their_times(tmp_path: Path) -> None:
    rows = [block_row([at], 10, timestamp=time) for at, time in enumerate((500, 250, 500, 100))]
    workload = read("mooncake", written(tmp_path, json_lines(*rows)))
    assert [request.req_id[-1] for request in workload.requests] == ["4", "2", "1", "3"]
    assert [request.arrival for request in workload.requests] == [0, 0.15, 0.4, 0.4]
    assert workload.notes[-1] == "The rows of the file were not in the order of their times; here they are."


def test_lengths_and_times_can_be_scaled(tmp_path: Path) -> None:
    path = written(tmp_path, json_lines(*MOONCAKE))
    workload = read("mooncake", path, scale_lengths=0.25, time_scale=2)
    assert [request.num_prompt_tokens for request in workload.requests] == [256 + 2, 384 + 16, 256 + 2, 256 + 2]
    assert [request.max_tokens for request in workload.requests] == [1, 1, 1, 1]
    assert [request.arrival for request in workload.requests] == [0, 0, 3, 6]
    assert reuse(workload.requests, 128) == reuse(read("mooncake", path).requests, 512) == (13, 7, 1)
    double = read("mooncake", path, scale_lengths=2)
    assert [request.max_tokens for request in double.requests] == [10, 10, 14, 10]


def test_a_limit_counts_what_is_kept_and_stops_reading(tmp_path: Path) -> None:
    path = written(tmp_path, json_lines("oops", *MOONCAKE, block_row([1], 600)))
    workload = read("mooncake", path, limit=4)
    assert (workload.ledger.rows, workload.ledger.kept) == (5, 4)
    assert [request.req_id[-1] for request in workload.requests] == ["2", "3", "4", "5"]
    assert refusal("mooncake", path, limit=5).startswith("f:6: 1 hash_ids for 600 tokens")


DAMAGED: dict[str, Any] = {
    "not JSON": '{"timestamp": 0, "input_length": 10, "outp',
    "empty line": " ",
    "no JSON object": [1, 2],
    "no timestamp": {"input_length": 10, "output_length": 5, "hash_ids": [0]},
    "no input_length": {"timestamp": 0, "output_length": 5, "hash_ids": [0]},
    "no output_length": {"timestamp": 0, "input_length": 10, "hash_ids": [0]},
    "no hash_ids": {"timestamp": 0, "input_length": 10, "output_length": 5},
    "input_length is 0": block_row([], 0),
    "hash_ids is no list of block ids": block_row([True], 10),
}
NO_COUNT = [-1, 2**24 + 1, 2**70, True, 10.0, "10", None, [10]]
NO_TIME = [-1, 2**70, True, "0", None]
NO_IDS = ["0", None, 0, [-1], [2**63], [0.5], [None], [[0]], {"0": 0}]


def reasons(form: str, folder: Path, *rows: Any) -> dict[str, int]:
    """Why rows are dropped that lie between good ones."""
    good = block_row([0], 10)
    workload = read(form, written(folder, json_lines(good, *rows, good)))
    assert workload.ledger.rows == len(rows) + 2
    assert workload.ledger.kept == 2
    return dict(workload.ledger.dropped)


@pytest.mark.parametrize("form", ["mooncake", "blocks"])
def test_a_damaged_row_is_dropped_for_its_reason(form: str, tmp_path: Path) -> None:
    assert reasons(form, tmp_path, *DAMAGED.values()) == dict.fromkeys(DAMAGED, 1)
    lengths = [block_row([0], value) for value in NO_COUNT]
    assert reasons(form, tmp_path, *lengths) == {"input_length is no count": len(NO_COUNT)}
    outputs = [block_row([0], 10, output_length=value) for value in NO_COUNT]
    assert reasons(form, tmp_path, *outputs) == {"output_length is no count": len(NO_COUNT)}
    times = [block_row([0], 10, timestamp=value) for value in NO_TIME]
    assert reasons(form, tmp_path, *times) == {"timestamp is no time": len(NO_TIME)}
    ids = [block_row([0], 10) | {"hash_ids": value} for value in NO_IDS]
    assert reasons(form, tmp_path, *ids) == {"hash_ids is no list of block ids": len(NO_IDS)}


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1e999", "0x1"])
def test_a_time_that_json_cannot_say_is_not_json(time: str, tmp_path: Path) -> None:
    line = f'{{"timestamp": {time}, "input_length": 10, "output_length": 5, "hash_ids": [0]}}'
    assert reasons("mooncake", tmp_path, line, "[" * 100_000, '{"a": "\\ud800"}') == {"not JSON": 3}


def test_the_largest_ids_are_kept_and_other_fields_are_passed_over(tmp_path: Path) -> None:
    rows = [block_row([2**63 - 1], 512, note="x"), block_row([2**63 - 2], 512), block_row([2**63 - 1], 512)]
    first, second, third = read("mooncake", written(tmp_path, json_lines(*rows))).requests
    assert shared(prompt(first), prompt(second)) < 3
    assert shared(prompt(first), prompt(third)) == 512


REFUSED: dict[str, tuple[str, str, str]] = {
    "16-token blocks as mooncake": (
        "mooncake",
        json_lines(block_row([0], 10), block_row([0, 1, 2], 40)),
        "f:2: 3 hash_ids for 40 tokens: its blocks are not of 512 tokens; blocks of 16 fit: read it as blocks",
    ),
    "Qwen-Bailian as mooncake": (
        "mooncake",
        json_lines(block_row([0, 1, 2], 40, chat_id=1, parent_chat_id=-1)),
        "f:1: 3 hash_ids for 40 tokens: its blocks are not of 512 tokens; blocks of 16 fit: read it as qwen-bailian",
    ),
    "mooncake as blocks": (
        "blocks",
        json_lines(*MOONCAKE),
        "f:1: 3 hash_ids for 1030 tokens: its blocks are not of 16 tokens; blocks of 512 fit: read it as mooncake",
    ),
    "blocks of 64": (
        "mooncake",
        json_lines(block_row([0, 1], 100)),
        "f:1: 2 hash_ids for 100 tokens: its blocks are not of 512 tokens; "
        "no format that is known fits this row: take it out",
    ),
    "no blocks": (
        "blocks",
        json_lines(block_row([], 100)),
        "f:1: 0 hash_ids for 100 tokens: its blocks are not of 16 tokens; "
        "no format that is known fits this row: take it out",
    ),
    "final blocks that do not fit": (
        "blocks",
        json_lines(block_row([0, 1], 20, final_hash_ids=[7, 8])),
        "f:1: 2 final_hash_ids for the 9 tokens behind the whole prompt blocks; there is one for each 16: "
        "take the row out",
    ),
    "another format": (
        "mooncake",
        json_lines({"prompt": "a"}, {"prompt": "b"}, "c"),
        "f: 0 of 3 rows are of this format (no timestamp: 2, not JSON: 1); mooncake looks like "
        '{"timestamp": 0, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}',
    ),
    "an empty file": (
        "blocks",
        "",
        "f: there is no row in it; blocks looks like "
        '{"timestamp": 46.927, "input_length": 21, "output_length": 9, "hash_ids": [0, 1]}',
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_of_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    form, content, message = REFUSED[kind]
    assert refusal(form, written(tmp_path, content)) == message


def test_a_later_prompt_hits_an_output_whose_blocks_are_known(tmp_path: Path) -> None:
    rows = [
        block_row([0, 1], 21, output_length=20, final_hash_ids=[7, 8], session_id=3, turn=1),
        block_row([0, 7, 9], 40, output_length=8, final_hash_ids=[10], session_id=3, turn=2),
        block_row([0, 1], 21, output_length=11, final_hash_ids=[11]),
        block_row([0, 7, 10], 48, output_length=16, final_hash_ids=[12]),
    ]
    workload = read("blocks", written(tmp_path, json_lines(*rows)))
    first, second, third, fourth = workload.requests
    assert [request.req_id for request in workload.requests] == [
        "blocks-1-session3-turn1",
        "blocks-2-session3-turn2",
        "blocks-3",
        "blocks-4",
    ]
    assert shared(everything(first), prompt(second)) == 32
    assert shared(everything(first), everything(third)) == 21, "one prompt, two outputs"
    assert np.array_equal(everything(second), prompt(fourth))
    assert workload.notes == (
        "Token ids are made up from the ids of the blocks: where blocks are equal their tokens are, and only there.",
    )


def test_a_later_prompt_may_end_with_an_output_in_a_partial_block(tmp_path: Path) -> None:
    rows = [block_row([0, 1], 21, output_length=5, final_hash_ids=[7]), block_row([0, 7], 26), block_row([0, 7], 27)]
    first, second, third = read("blocks", written(tmp_path, json_lines(*rows))).requests
    assert np.array_equal(everything(first), prompt(second))
    assert 16 <= shared(everything(first), prompt(third)) < 19


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.5])
def test_a_scaled_output_still_completes_its_blocks(scale: float, tmp_path: Path) -> None:
    rows = [
        block_row([0, 1], 21, output_length=30, final_hash_ids=[7, 8, 9]),
        block_row([0, 7, 8, 4], 50, output_length=1),
    ]
    first, second = read("blocks", written(tmp_path, json_lines(*rows)), scale_lengths=scale).requests
    assert shared(everything(first), prompt(second)) == 3 * round(16 * scale)


def test_a_request_that_sampled_nothing_samples_one_token_that_nobody_continues(tmp_path: Path) -> None:
    rows = [block_row([0, 1], 32, output_length=0), block_row([0, 1, 2], 33), block_row([0, 1], 32, output_length=0)]
    workload = read("blocks", written(tmp_path, json_lines(*rows)))
    first, second, third = workload.requests
    assert [request.max_tokens for request in workload.requests] == [1, 5, 1]
    assert shared(everything(first), prompt(second)) == shared(everything(first), everything(third)) == 32
    assert workload.notes[1:] == (
        "3 of 3 requests have no final_hash_ids: what they sample is their own.",
        "Requests that sampled nothing: 2. vLLM always samples: each samples one token of its own.",
    )


def test_the_damage_of_derived_rows(tmp_path: Path) -> None:
    assert reasons(
        "blocks",
        tmp_path,
        block_row([0], 10, session_id="a", turn=1),
        block_row([0], 10, session_id=1),
        block_row([0], 10, final_hash_ids=["a"]),
    ) == {"session_id is no count": 1, "no turn": 1, "final_hash_ids is no list of block ids": 1}
    assert reasons("mooncake", tmp_path, block_row([0], 10, output_length=0)) == {"output_length is 0": 1}
