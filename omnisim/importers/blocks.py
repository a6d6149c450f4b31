"""The block traces that this project derived: JSON Lines, times in milliseconds, blocks of 16 tokens.

An id names a whole prefix. ``final_hash_ids``, where they are, are the ids of the blocks from the one in which the
output begins to its end (data/traces-public/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnisim.errors import FileError
from omnisim.importers.block_rows import MADE_UP, BlockRow, block_ids_of, block_request, block_row, refuse_chats
from omnisim.importers.block_tokens import BlockIds, BlockTokens
from omnisim.importers.lines import Line, lines_of
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import Format, arrivals, by_time, count_of, json_fields, rows_of
from omnisim.workload import TokenIds, Workload

__all__ = ["read"]

_BLOCK_SIZE = 16
_TICKS = 1000
_FORMAT = Format("blocks", '{"timestamp": 46.927, "input_length": 21, "output_length": 9, "hash_ids": [0, 1]}')


@dataclass(frozen=True, slots=True, eq=False)
class _Derived:
    """A row, the blocks with its output where they are known, and its session and turn for its name."""

    row: BlockRow
    final_hash_ids: BlockIds | None
    label: str

    @property
    def time(self) -> float:
        return self.row.time

    def sampled(self, blocks: BlockTokens) -> Callable[[], TokenIds] | None:
        """What the file says of the output, if it does."""
        if self.final_hash_ids is None:
            return None
        return partial(blocks.tokens_behind, self.final_hash_ids, self.row.input_length, self.row.total_length)


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of a derived block trace; FileError if it is none."""
    blocks = BlockTokens(_BLOCK_SIZE, options.scale_lengths)
    rows, ledger = rows_of(path, lines_of(path), lambda line: _derived(line, blocks), options, _FORMAT)
    ordered, notes = by_time(rows)
    for derived in ordered:
        _complete_tail(derived, blocks)
    requests = [
        block_request(
            f"blocks-{derived.row.number}{derived.label}", derived.row, arrival, blocks, derived.sampled(blocks)
        )
        for derived, arrival in zip(ordered, arrivals(ordered, _TICKS, options), strict=True)
    ]
    return Workload(tuple(requests), ledger, (MADE_UP, *_made_up_outputs(rows), *notes))


def _derived(line: Line, blocks: BlockTokens) -> _Derived:
    fields = json_fields(line)
    row = block_row(line, fields, blocks, least_output=0)
    refuse_chats(line, fields)
    if "final_hash_ids" not in fields:
        return _Derived(row, None, _label(fields))
    final = block_ids_of(fields, "final_hash_ids")
    behind = row.total_length - row.input_length // _BLOCK_SIZE * _BLOCK_SIZE
    if len(final) != blocks.num_blocks(behind):
        what = f"{len(final)} final_hash_ids for the {behind} tokens behind the whole prompt blocks"
        raise FileError(line.place, what, f"there is one for each {_BLOCK_SIZE}: take the row out")
    return _Derived(row, final, _label(fields))


def _label(fields: dict[str, Any]) -> str:
    if "session_id" not in fields:
        return ""
    return f"-session{count_of(fields, 'session_id', 0)}-turn{count_of(fields, 'turn', 0)}"


def _complete_tail(derived: _Derived, blocks: BlockTokens) -> None:
    """The last prompt block, if partial, is how the first block with output begins."""
    rest = derived.row.input_length % _BLOCK_SIZE
    if rest and derived.final_hash_ids is not None:
        num_tokens = min(_BLOCK_SIZE, rest + derived.row.output_length)
        blocks.complete((int(derived.row.hash_ids[-1]), rest), (int(derived.final_hash_ids[0]), num_tokens))


def _made_up_outputs(rows: list[_Derived]) -> Iterator[str]:
    if number := sum(derived.final_hash_ids is None for derived in rows):
        yield f"{number} of {len(rows)} requests have no final_hash_ids: what they sample is their own."
    if number := sum(derived.row.output_length == 0 for derived in rows):
        yield f"Requests that sampled nothing: {number}. vLLM always samples: each samples one token of its own."
