"""Rows that tell a prompt as the ids of its blocks, and the requests they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from omnisim.errors import FileError
from omnisim.importers.block_tokens import BlockIds, BlockTokens
from omnisim.importers.identity import Kind, own_tokens
from omnisim.importers.lines import Line
from omnisim.importers.rows import DamagedRow, count_of, field_of, time_of
from omnisim.workload import TokenIds, WorkloadRequest

__all__ = ["MADE_UP", "BlockRow", "answer", "block_ids_of", "block_request", "block_row", "refuse_chats"]

MADE_UP = "Token ids are made up from the ids of the blocks: where blocks are equal their tokens are, and only there."

_SIZES = {"mooncake": 512, "qwen-bailian": 16, "blocks": 16}


@dataclass(frozen=True, slots=True, eq=False)
class BlockRow:
    """A request as its row tells it: ``time`` and lengths in the units of the file, int64 ``[num_blocks]`` ids."""

    number: int
    time: float
    input_length: int
    output_length: int
    hash_ids: BlockIds

    @property
    def total_length(self) -> int:
        """Prompt and output together."""
        return self.input_length + self.output_length


def block_row(line: Line, fields: Mapping[str, Any], blocks: BlockTokens, least_output: int = 1) -> BlockRow:
    """The common fields of a row; FileError if its blocks are of another size than the format's."""
    row = BlockRow(
        number=line.number,
        time=time_of(fields, "timestamp"),
        input_length=count_of(fields, "input_length"),
        output_length=count_of(fields, "output_length", least_output),
        hash_ids=block_ids_of(fields, "hash_ids"),
    )
    if len(row.hash_ids) != blocks.num_blocks(row.input_length):
        what = f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens: its blocks are not of {blocks.size} tokens"
        raise FileError(line.place, what, _other_format(fields, row, blocks.size))
    return row


def block_ids_of(fields: Mapping[str, Any], name: str) -> BlockIds:
    """A field that lists block ids: whole numbers from 0 to 2**63 - 1."""
    value = field_of(fields, name)
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return np.array(value, dtype=np.int64)
    raise DamagedRow(f"{name} is no list of block ids")


def _other_format(fields: Mapping[str, Any], row: BlockRow, size: int) -> str:
    """The format in which a row with so many blocks would be right."""
    not_meant = "blocks" if "chat_id" in fields else "qwen-bailian"
    for name, other in _SIZES.items():
        if other != size and name != not_meant and len(row.hash_ids) == -(-row.input_length // other):
            return f"blocks of {other} fit: read it as {name}"
    return "no format that is known fits this row: take it out"


def refuse_chats(line: Line, fields: Mapping[str, Any]) -> None:
    """FileError for a row of Qwen-Bailian, which would be read well, but its seconds as milliseconds."""
    if "chat_id" in fields:
        raise FileError(line.place, "the row has a chat_id, and its times are seconds", "read it as qwen-bailian")


def block_request(
    req_id: str, row: BlockRow, arrival: float, blocks: BlockTokens, sampled: Callable[[], TokenIds] | None = None
) -> WorkloadRequest:
    """The request of a row; ``sampled`` gives what is known of its output, and the rest is its own."""
    num_prompt_tokens = blocks.scaled(row.input_length)
    max_tokens = max(1, blocks.scaled(row.total_length) - num_prompt_tokens)
    return WorkloadRequest(
        req_id=req_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        prompt_token_ids=partial(blocks.tokens, row.hash_ids, row.input_length),
        sampled_token_ids=partial(answer, row.number, max_tokens, sampled),
        arrival=arrival,
    )


def answer(number: int, max_tokens: int, known: Callable[[], TokenIds] | None = None) -> TokenIds:
    """What is known of the output of the row ``number``, and tokens of its own behind it; int32 ``[max_tokens]``."""
    told = known()[:max_tokens] if known else np.empty(0, dtype=np.int32)
    return np.concatenate([told, own_tokens(Kind.OUTPUT, number, len(told), max_tokens)])
