"""Small traces as text, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).parents[2]
HELLO = ROOT / "traces" / "hello.yaml"
TIGHT = ROOT / "traces" / "recorded" / "chat-tight.jsonl.zst"

HEADER: dict[str, Any] = {
    "format": "omnisim-trace/1",
    "producer": {"name": "test"},
    "cache": {"num_blocks": 8, "block_size": 4},
}
FIRST: dict[str, Any] = {
    "req_ids": ["A"],
    "scheduled_new_reqs": [{"req_id": "A", "prompt_token_ids": [1, 2, 3, 4]}],
    "num_computed_tokens": [0],
    "num_scheduled_tokens": [4],
    "block_ids": {"A": [1]},
}
BLIND: dict[str, Any] = {**FIRST, "scheduled_new_reqs": [{"req_id": "A", "num_prompt_tokens": 4}]}
"""The first step of a trace that tells no token ids."""
NO_LENGTH: dict[str, Any] = {**FIRST, "scheduled_new_reqs": [{"req_id": "A"}]}


def lines(*records: dict[str, Any], **header: Any) -> str:
    """A trace as JSON Lines."""
    return "".join(json.dumps(value) + "\n" for value in ({**HEADER, **header}, *records))


def hit(req_id: str = "B", other: str = "A") -> list[dict[str, Any]]:
    """Two steps: ``other`` computes a block, and ``req_id`` hits it."""
    return [
        {
            **FIRST,
            "req_ids": [other],
            "scheduled_new_reqs": [{"req_id": other, "prompt_token_ids": [1, 2, 3, 4]}],
            "block_ids": {other: [1]},
        },
        {
            "req_ids": [req_id],
            "finished_req_ids": [other],
            "scheduled_new_reqs": [{"req_id": req_id, "prompt_token_ids": [1, 2, 3, 4, 5]}],
            "num_computed_tokens": [4],
            "num_scheduled_tokens": [1],
            "block_ids": {req_id: [1, 2]},
        },
    ]


GOOD = lines(*hit())
PACKED = zstandard.ZstdCompressor().compress(GOOD.encode())
BAD_PACKED = zstandard.ZstdCompressor().compress((GOOD + "x" * 1000).encode())
