"""Qwen-Bailian's traces: a chat that continues another hits its output, where the file says what that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnisim.workload import WorkloadRequest

from .files import block_row, everything, json_lines, prompt, read, refusal, shared, written


def chat(chat_id: Any, ids: list[int], length: int, parent: Any = -1, output: int = 30, **more: Any) -> dict[str, Any]:
    known = {"chat_id": chat_id, "parent_chat_id": parent, "type": "text", "turn": 1, "output_length": output}
    return block_row(ids, length, **{"timestamp": 61.114 + chat_id if isinstance(chat_id, int) else 0, **known, **more})


PARENT = chat(1, [8, 9], 21)
"""Its output stands at 21 to 50: block 1 is completed, block 2 is whole, and block 3 is not."""
CHILD = chat(2, [8, 20, 21, 22, 23], 70, parent=1)


def pair(folder: Path, *rows: dict[str, Any], **options: Any) -> tuple[WorkloadRequest, ...]:
    return read("qwen-bailian", written(folder, json_lines(*rows)), **options).requests


def test_a_child_hits_the_output_of_its_parent(tmp_path: Path) -> None:
    workload = read("qwen-bailian", written(tmp_path, json_lines(PARENT, CHILD)))
    parent, child = workload.requests
    assert [parent.req_id, child.req_id] == ["qwen-bailian-1-chat1", "qwen-bailian-2-chat2"]
    assert (parent.arrival, child.arrival, child.after) == (0, pytest.approx(1), None)
    assert (parent.num_prompt_tokens, parent.max_tokens) == (21, 30)
    assert 48 <= shared(everything(parent), prompt(child)) < 51
    assert workload.notes == (
        "Token ids are made up from the ids of the blocks: where blocks are equal their tokens are, and only there.",
        "1 of 2 requests sample what the whole blocks of the first chat that continues them say; "
        "what else is sampled is each request's own.",
    )


def test_a_child_of_a_prompt_of_whole_blocks_hits_its_output(tmp_path: Path) -> None:
    parent, child = pair(tmp_path, chat(1, [8, 9], 32, output=20), chat(2, [8, 9, 20, 21], 60, parent=1))
    assert 48 <= shared(everything(parent), prompt(child)) < 50


def test_a_child_whose_own_last_block_holds_the_output_says_nothing_of_it(tmp_path: Path) -> None:
    parent, child = pair(tmp_path, PARENT, chat(2, [8, 20], 31, parent=1))
    assert 16 <= shared(everything(parent), prompt(child)) < 19
    parent, child = pair(tmp_path, PARENT, chat(2, [8, 20, 21], 47, parent=1))
    assert 32 <= shared(everything(parent), prompt(child)) < 35


UNRELATED = {
    "no child": chat(2, [8, 20, 21, 22, 23], 70),
    "a child of a chat that is not there": chat(2, [8, 20, 21, 22, 23], 70, parent=99),
    "a child with another prompt": chat(2, [7, 20, 21, 22, 23], 70, parent=1),
    "a child that came before its parent": chat(2, [8, 20, 21, 22, 23], 70, parent=1, timestamp=1.5),
}


@pytest.mark.parametrize("kind", UNRELATED)
def test_nothing_is_made_up_for(kind: str, tmp_path: Path) -> None:
    requests = {request.req_id[-1]: request for request in pair(tmp_path, PARENT, UNRELATED[kind])}
    same = 0 if kind == "a child with another prompt" else 16
    sampled, read_later = everything(requests["1"]), prompt(requests["2"])
    assert same <= shared(sampled, read_later) < same + 3
    assert not np.array_equal(sampled[32:48], read_later[32:48])


def test_the_first_of_two_children_tells_the_output(tmp_path: Path) -> None:
    parent, child, other = pair(tmp_path, PARENT, CHILD, chat(3, [8, 30, 31, 32], 60, parent=1))
    assert shared(everything(parent), prompt(child)) >= 48
    assert 21 <= shared(everything(parent), prompt(other)) < 24, "the prompt itself is in both"
    assert np.array_equal(prompt(child)[:21], prompt(parent))


def test_a_chat_id_that_is_there_twice_is_the_first(tmp_path: Path) -> None:
    first, again, child = pair(tmp_path, PARENT, {**PARENT, "output_length": 40}, CHILD)
    assert shared(everything(first), prompt(child)) >= 48
    assert shared(everything(again), prompt(child)) < 24


@pytest.mark.parametrize("scale", [0.1, 0.5, 3])
def test_a_scaled_child_hits_the_output_of_its_parent(scale: float, tmp_path: Path) -> None:
    parent, child = pair(tmp_path, PARENT, CHILD, scale_lengths=scale)
    assert shared(everything(parent), prompt(child)) // round(16 * scale) == 3


def test_damaged_rows_are_dropped_for_their_reason(tmp_path: Path) -> None:
    damaged = [
        {**CHILD, "chat_id": "a"},
        {**CHILD, "chat_id": -1},
        {**CHILD, "parent_chat_id": -2},
        {**CHILD, "parent_chat_id": True},
        {**CHILD, "type": 3},
        {**CHILD, "turn": 0},
        {**CHILD, "output_length": 0},
        *({name: value for name, value in CHILD.items() if name != missing} for missing in CHILD),
    ]
    workload = read("qwen-bailian", written(tmp_path, json_lines(PARENT, *damaged, {**CHILD, "type": "thinking"})))
    assert workload.ledger.kept == 2
    assert workload.ledger.dropped == {
        "chat_id is no id": 2,
        "parent_chat_id is no id": 2,
        "type is no word": 1,
        "turn is 0": 1,
        "output_length is 0": 1,
        **{f"no {name}": 1 for name in CHILD},
    }


def test_other_blocks_and_other_formats_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, json_lines(PARENT, chat(2, [0, 1], 600)))
    assert refusal("qwen-bailian", path) == (
        "f:2: 2 hash_ids for 600 tokens: its blocks are not of 16 tokens; blocks of 512 fit: read it as mooncake"
    )
    assert refusal("qwen-bailian", written(tmp_path, json_lines(block_row([0], 10)))) == (
        "f: 0 of 1 rows are of this format (no chat_id: 1); qwen-bailian looks like "
        '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 21, "output_length": 132, '
        '"type": "text", "turn": 1, "hash_ids": [8, 9]}'
    )
