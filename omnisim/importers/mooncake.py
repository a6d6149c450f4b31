"""Mooncake's request traces: JSON Lines, times in milliseconds, blocks of 512 tokens.

github.com/kvcache-ai/Mooncake, FAST25-release/traces; Qin et al., "Mooncake", FAST 2025.
"""

from __future__ import annotations

from pathlib import Path

from omnisim.importers.block_rows import MADE_UP, BlockRow, block_request, block_row, refuse_chats
from omnisim.importers.block_tokens import BlockTokens
from omnisim.importers.lines import Line, lines_of
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import Format, arrivals, by_time, json_fields, rows_of
from omnisim.workload import Workload

__all__ = ["read"]

_BLOCK_SIZE = 512
_TICKS = 1000
_FORMAT = Format("mooncake", '{"timestamp": 0, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}')
_OWN_OUTPUT = "What a request samples is its own: the file does not say whether a later prompt continues it."


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of a Mooncake trace; FileError if it is none."""
    blocks = BlockTokens(_BLOCK_SIZE, options.scale_lengths)
    rows, ledger = rows_of(path, lines_of(path), lambda line: _row(line, blocks), options, _FORMAT)
    ordered, notes = by_time(rows)
    requests = [
        block_request(f"mooncake-{row.number}", row, arrival, blocks)
        for row, arrival in zip(ordered, arrivals(ordered, _TICKS, options), strict=True)
    ]
    return Workload(tuple(requests), ledger, (MADE_UP, _OWN_OUTPUT, *notes))


def _row(line: Line, blocks: BlockTokens) -> BlockRow:
    fields = json_fields(line)
    row = block_row(line, fields, blocks)
    refuse_chats(line, fields)
    return row
