"""Qwen-Bailian's request traces: JSON Lines, times in seconds, blocks of 16 tokens, and which chat continues which.

github.com/alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., "KVCache Cache in the Wild", ATC 2025. A chat
that continues another begins with all its blocks but a last one that was partial: there the answer begins (the
repository's docs/qa-context-growth-pattern.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from omnisim.importers.block_rows import MADE_UP, BlockRow, block_request, block_row
from omnisim.importers.block_tokens import BlockTokens
from omnisim.importers.lines import Line, lines_of
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, arrivals, by_time, count_of, field_of, json_fields, rows_of
from omnisim.workload import TokenIds, Workload

__all__ = ["read"]

_BLOCK_SIZE = 16
_TICKS = 1
_FORMAT = Format(
    "qwen-bailian",
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 21, "output_length": 132, '
    '"type": "text", "turn": 1, "hash_ids": [8, 9]}',
)


@dataclass(frozen=True, slots=True, eq=False)
class _Chat:
    """A row, and which chat it continues; -1 for none."""

    row: BlockRow
    chat_id: int
    parent_chat_id: int

    @property
    def time(self) -> float:
        return self.row.time


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of a Qwen-Bailian trace; FileError if it is none."""
    blocks = BlockTokens(_BLOCK_SIZE, options.scale_lengths)
    chats, ledger = rows_of(path, lines_of(path), lambda line: _chat(line, blocks), options, _FORMAT)
    ordered, notes = by_time(chats)
    continued = _continued(ordered, blocks)
    requests = [
        block_request(
            f"qwen-bailian-{chat.row.number}-chat{chat.chat_id}",
            chat.row,
            arrival,
            blocks,
            _sampled(chat.row, continued.get(chat.row.number), blocks),
        )
        for chat, arrival in zip(ordered, arrivals(ordered, _TICKS, options), strict=True)
    ]
    return Workload(tuple(requests), ledger, (MADE_UP, _note(len(continued), len(requests)), *notes))


def _chat(line: Line, blocks: BlockTokens) -> _Chat:
    fields = json_fields(line)
    chat_id, parent_chat_id = (_id_of(fields, name, least) for name, least in (("chat_id", 0), ("parent_chat_id", -1)))
    count_of(fields, "turn")
    if not isinstance(field_of(fields, "type"), str):
        raise DamagedRow("type is no word")
    return _Chat(block_row(line, fields, blocks), chat_id, parent_chat_id)


def _id_of(fields: dict[str, Any], name: str, least: int) -> int:
    value = field_of(fields, name)
    if type(value) is not int or value < least:
        raise DamagedRow(f"{name} is no id")
    return value


def _continued(ordered: list[_Chat], blocks: BlockTokens) -> dict[int, BlockRow]:
    """The first row that continues a chat, by the number of the chat's row; ``blocks`` learns what completes a tail."""
    chats: dict[int, _Chat] = {}
    continued: dict[int, BlockRow] = {}
    for chat in ordered:
        parent = chats.get(chat.parent_chat_id)
        if parent is not None and _continues(chat.row, parent.row):
            continued.setdefault(parent.row.number, chat.row)
            _complete_tail(chat.row, parent.row, blocks)
        chats.setdefault(chat.chat_id, chat)
    return continued


def _continues(child: BlockRow, parent: BlockRow) -> bool:
    """Whether a child has the whole blocks of its parent, and one behind them in which output stands."""
    whole = parent.input_length // _BLOCK_SIZE
    return whole < _num_known(child, parent) and np.array_equal(child.hash_ids[:whole], parent.hash_ids[:whole])


def _num_known(child: BlockRow, parent: BlockRow) -> int:
    """How many blocks are whole both in the child's prompt and in its parent's prompt and output."""
    return min(child.input_length, parent.total_length) // _BLOCK_SIZE


def _complete_tail(child: BlockRow, parent: BlockRow, blocks: BlockTokens) -> None:
    whole, rest = divmod(parent.input_length, _BLOCK_SIZE)
    if rest:
        blocks.complete((int(parent.hash_ids[whole]), rest), (int(child.hash_ids[whole]), _BLOCK_SIZE))


def _sampled(parent: BlockRow, child: BlockRow | None, blocks: BlockTokens) -> Callable[[], TokenIds] | None:
    """What the whole blocks of a child say of its parent's output, if there is a child."""
    if child is None:
        return None
    num_known = _num_known(child, parent)
    ids = child.hash_ids[parent.input_length // _BLOCK_SIZE : num_known]
    return partial(blocks.tokens_behind, ids, parent.input_length, num_known * _BLOCK_SIZE)


def _note(num_continued: int, num_requests: int) -> str:
    return (
        f"{num_continued} of {num_requests} requests sample what the whole blocks of the first chat that continues "
        "them say; what else is sampled is each request's own."
    )
