"""A stand-in for vLLM's ``InputBatch``: the attributes that a cache reads, and no vLLM."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from omnisim.trace.model import Geometry, Step

__all__ = ["LightBatch"]

Int32s = NDArray[np.int32]


class _Buffer:
    """One piece of memory, as a tensor and as an array."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.cpu = torch.zeros((num_rows, width), dtype=torch.int32)
        self.np: Int32s = self.cpu.numpy()


class _BlockTable:
    """Of one KV-cache group."""

    def __init__(self, block_size: int, num_rows: int, width: int) -> None:
        self.block_size = block_size
        self.block_table = _Buffer(num_rows, width)


class _BlockTables:
    """Of all groups."""

    def __init__(self, geometry: Geometry, num_rows: int, width: int) -> None:
        size = geometry.kernel_block_size or geometry.block_size
        self.block_tables = [_BlockTable(size, num_rows, width) for _ in range(geometry.num_kv_cache_groups)]

    def __getitem__(self, group: int) -> _BlockTable:
        return self.block_tables[group]


class _InputBatch:
    """Buffers that live from step to step, as vLLM's do: whoever keeps one sees it change."""

    def __init__(self, geometry: Geometry, max_num_reqs: int, max_num_blocks: int) -> None:
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_cpu: Int32s = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_prompt_tokens: Int32s = np.zeros(max_num_reqs, dtype=np.int32)
        self.block_table = _BlockTables(geometry, max_num_reqs, max_num_blocks)


class LightBatch:
    """Led by a trace's steps; buffers start small and are replaced by larger ones when a step needs it."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._open(max_num_reqs=64, max_num_blocks=64)

    def _open(self, max_num_reqs: int, max_num_blocks: int) -> None:
        self.input_batch = _InputBatch(self._geometry, max_num_reqs, max_num_blocks)
        self._table = self.input_batch.block_table[self._geometry.full_attention_group].block_table.np
        self._rows: list[tuple[int, ...]] = [()] * max_num_reqs

    def apply(self, step: Step) -> None:
        """Become the batch of ``step``. Rows that are the same tuple as before are not written again."""
        self._make_room(len(step.req_ids), max(map(len, step.block_table), default=0))
        self._set_requests(step.req_ids)
        batch, num_reqs = self.input_batch, len(step.req_ids)
        batch.num_computed_tokens_cpu[:num_reqs] = step.num_computed_tokens
        for req_id, count in step.host_num_computed_tokens.items():
            batch.num_computed_tokens_cpu[batch.req_id_to_index[req_id]] = count
        batch.num_prompt_tokens[:num_reqs] = step.num_prompt_tokens
        for index, (row, written) in enumerate(zip(step.block_table, self._rows, strict=False)):
            if row is not written:
                self._write(index, row)

    def _make_room(self, num_reqs: int, num_blocks: int) -> None:
        max_num_reqs, max_num_blocks = self._table.shape
        if num_reqs > max_num_reqs or num_blocks > max_num_blocks:
            self._open(max(max_num_reqs, _round_up(num_reqs)), max(max_num_blocks, _round_up(num_blocks)))

    def _set_requests(self, req_ids: tuple[str, ...]) -> None:
        batch, num_before = self.input_batch, len(self.input_batch.req_ids)
        if tuple(batch.req_ids) != req_ids:
            batch.req_ids[:] = req_ids
            batch.req_id_to_index.clear()
            batch.req_id_to_index.update(zip(req_ids, range(len(req_ids)), strict=True))
        for index in range(len(req_ids), num_before):
            self._write(index, ())

    def _write(self, index: int, row: tuple[int, ...]) -> None:
        written = self._rows[index]
        kept = len(written) if row[: len(written)] == written else 0
        self._table[index, kept : len(row)] = row[kept:]
        self._table[index, len(row) : len(written)] = 0
        self._rows[index] = row


def _round_up(count: int) -> int:
    """The next power of two: growing costs nothing in the long run."""
    return 1 << (count - 1).bit_length()
