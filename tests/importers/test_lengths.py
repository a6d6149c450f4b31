"""Azure's and BurstGPT's traces: lengths and times, and no token in common."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from .files import everything, prompt, read, refusal, reuse, shared, written

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 23:59:59.9799600,4808,10",
    "2023-11-17 00:00:00.0319601,4808,8",
    "2023-11-17 00:00:01,110,27",
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "110.5,GPT-4,472,505,977,API log",
)


def text(*lines: str, end: str = "\r\n") -> str:
    return "".join(line + end for line in lines)


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_an_azure_trace(end: str, tmp_path: Path) -> None:
    workload = read("azure", written(tmp_path, text(*AZURE, end=end)))
    assert [request.req_id for request in workload.requests] == ["azure-1", "azure-2", "azure-3"]
    assert [request.arrival for request in workload.requests] == [0, 0.0520001, 1.02004]
    assert [request.num_prompt_tokens for request in workload.requests] == [4808, 4808, 110]
    assert [request.max_tokens for request in workload.requests] == [10, 8, 27]
    assert workload.notes == (
        "The file tells lengths and times only: every request's tokens are its own, so nothing can be reused.",
    )


def test_equal_lengths_have_no_token_in_common(tmp_path: Path) -> None:
    requests = read("azure", written(tmp_path, text(AZURE[0], *[AZURE[1]] * 20))).requests
    assert max(shared(prompt(one), prompt(other)) for one, other in combinations(requests, 2)) < 2
    sampled = [request.sampled_token_ids() for request in requests]
    assert max(shared(one, other) for one, other in combinations(sampled, 2)) < 2
    assert reuse(requests, 1)[1] < 3, "one token in 32,000 is equal by chance"
    assert reuse(requests, 4)[1] == 0


def test_the_times_of_2024_and_a_byte_order_mark(tmp_path: Path) -> None:
    lines = (AZURE[0], "2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:00.017335+00:00,2399,6")
    requests = read("azure", written(tmp_path, "\ufeff" + text(*lines))).requests
    assert [request.arrival for request in requests] == [0, 0.007405]


def test_a_burstgpt_trace(tmp_path: Path) -> None:
    workload = read("burstgpt", written(tmp_path, text(*BURST, end="\n")))
    assert [request.req_id for request in workload.requests] == ["burstgpt-1", "burstgpt-3"]
    assert [request.arrival for request in workload.requests] == [0, 105.5]
    assert [(request.num_prompt_tokens, request.max_tokens) for request in workload.requests] == [(472, 18), (472, 505)]
    assert workload.ledger.dropped == {"failed: no response tokens": 1}
    assert shared(*map(everything, workload.requests)) < 2


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    order = (3, 5, 0, 2, 1, 4)
    lines = [",".join(line.split(",")[at] for at in order) + ",extra" for line in BURST]
    moved = read("burstgpt", written(tmp_path, text(lines[0].replace("extra", "Session ID"), *lines[1:])))
    plain = read("burstgpt", written(tmp_path, text(*BURST)))
    told = [
        [(request.req_id, request.arrival, request.num_prompt_tokens, request.max_tokens) for request in one.requests]
        for one in (moved, plain)
    ]
    assert told[0] == told[1]


def test_lengths_and_times_can_be_scaled(tmp_path: Path) -> None:
    requests = read("burstgpt", written(tmp_path, text(*BURST)), scale_lengths=0.01, time_scale=0.5).requests
    assert [(request.num_prompt_tokens, request.max_tokens) for request in requests] == [(5, 1), (5, 5)]
    assert requests[1].arrival == 52.75


DAMAGED_AZURE = {
    "2023-11-16 18:17": "wrong number of fields",
    "2023-11-16 18:17:03.9,48,10,11": "wrong number of fields",
    "": "empty line",
    '2023-11-16 18:17:03.9,48,"10': "not CSV",
    "NaN,48,10": "TIMESTAMP is no time",
    "2023-13-16 18:17:03.9,48,10": "TIMESTAMP is no time",
    "2023-11-16 18:17:03.,48,10": "TIMESTAMP is no time",
    "2023-11-16 18:17:03.9,,10": "ContextTokens is no count",
    "2023-11-16 18:17:03.9,-48,10": "ContextTokens is no count",
    "2023-11-16 18:17:03.9,48.0,10": "ContextTokens is no count",
    "2023-11-16 18:17:03.9,1e3,10": "ContextTokens is no count",
    f"2023-11-16 18:17:03.9,{'9' * 5000},10": "ContextTokens is no count",
    "2023-11-16 18:17:03.9,0,10": "ContextTokens is 0",
    "2023-11-16 18:17:03.9,48,0": "GeneratedTokens is 0",
    "2023-11-16 18:17:03.9,48,1_0": "GeneratedTokens is no count",
    "2023-11-16 18:17:03.9,48,\u0661": "GeneratedTokens is no count",
}
DAMAGED_BURST = {
    "NaN,ChatGPT,472,18,490,API log": "Timestamp is no time",
    "inf,ChatGPT,472,18,490,API log": "Timestamp is no time",
    "-5,ChatGPT,472,18,490,API log": "Timestamp is no time",
    ",ChatGPT,472,18,490,API log": "Timestamp is no time",
    "5,ChatGPT,0,18,18,API log": "Request tokens is 0",
    "5,ChatGPT,472,x,490,API log": "Response tokens is no count",
    "5,ChatGPT,472,0,472,API log": "failed: no response tokens",
}


@pytest.mark.parametrize(
    ("form", "good", "line", "reason"),
    [
        *(("azure", AZURE, line, reason) for line, reason in DAMAGED_AZURE.items()),
        *(("burstgpt", BURST, line, reason) for line, reason in DAMAGED_BURST.items()),
    ],
)
def test_a_damaged_row_is_dropped_for_its_reason(
    form: str, good: tuple[str, ...], line: str, reason: str, tmp_path: Path
) -> None:
    workload = read(form, written(tmp_path, text(good[0], good[1], line, good[3])))
    assert workload.ledger.dropped == {reason: 1}
    assert [request.req_id for request in workload.requests] == [f"{form}-1", f"{form}-3"]


AZURE_LOOKS = "azure looks like TIMESTAMP,ContextTokens,GeneratedTokens and then 2023-11-16 18:17:03.9799600,4808,10"
REFUSED = {
    "": "f: the file is empty; ",
    text(AZURE[0]): "f: there is no row in it; ",
    text(BURST[0], BURST[1]): f"f:1: no column 'TIMESTAMP' in '{BURST[0]}'; ",
    text("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens"): (
        "f:1: more than one column 'ContextTokens' in 'TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens'; "
    ),
    text(AZURE[0], "1,2,3", "4,5"): (
        "f: 0 of 2 rows are of this format (TIMESTAMP is no time: 1, wrong number of fields: 1); "
    ),
    "[" + "1" * 200_000: "f:1: no column 'TIMESTAMP' in '[" + "1" * 79 + "'; ",
}


@pytest.mark.parametrize(("content", "message"), REFUSED.items())
def test_a_file_of_another_kind_is_refused(content: str, message: str, tmp_path: Path) -> None:
    assert refusal("azure", written(tmp_path, content)) == message + AZURE_LOOKS
