"""vLLM's own ``InputBatch``, led through a trace by its own methods. Every name of vLLM's stands in this file.

Tried with vLLM 0.32 and 0.33, whose batches are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from omnisim.errors import SetupError
from omnisim.known_vllm import REMEDY, known_vllm
from omnisim.trace.model import Geometry, Step

__all__ = ["VllmBatch"]


class _Sizes(NamedTuple):
    """What vLLM fixes when it makes a batch; the blocks are those of one request."""

    num_reqs: int
    num_blocks: int
    num_tokens: int


class VllmBatch:
    """Does to the persistent batch what a runner does before a forward.

    Who is not in the step, or has other blocks than before, is removed; who is not in the batch is added; further
    blocks are appended; then holes are closed and requests swapped into the recorded order. vLLM fixes its sizes when
    it makes the batch; a trace that needs more gets a larger one with the same requests in it. Requests carry no token
    ids: a cache reads none, and those of a hashed trace do not fit in vLLM's int32.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._vllm = _Vllm()
        self._geometry = geometry
        self._open(_Sizes(num_reqs=64, num_blocks=64, num_tokens=1024))

    def _open(self, sizes: _Sizes) -> None:
        self._sizes = sizes
        self.input_batch = self._vllm.make_batch(self._geometry, sizes)
        self._rows: dict[str, tuple[int, ...]] = {}

    def apply(self, step: Step) -> None:
        """Become the batch of ``step``."""
        self._make_room(step)
        batch, num_reqs = self.input_batch, len(step.req_ids)
        rows = dict(zip(step.req_ids, step.block_table, strict=True))
        for req_id in self._leaving(rows):
            batch.remove_request(req_id)
            del self._rows[req_id]
        for req_id, row in rows.items():
            self._add_or_append(req_id, row)
        batch.condense()
        self._reorder(step.req_ids)
        batch.num_computed_tokens_cpu[:num_reqs] = step.num_computed_tokens
        for req_id, count in step.host_num_computed_tokens.items():
            batch.num_computed_tokens_cpu[batch.req_id_to_index[req_id]] = count
        batch.num_prompt_tokens[:num_reqs] = step.num_prompt_tokens
        batch.refresh_metadata()

    def _make_room(self, step: Step) -> None:
        needed = (len(step.req_ids), max(map(len, step.block_table), default=0), step.num_tokens)
        if any(need > size for need, size in zip(needed, self._sizes, strict=True)):
            self._open(_Sizes(*(max(2 * need, size) for need, size in zip(needed, self._sizes, strict=True))))

    def _leaving(self, rows: dict[str, tuple[int, ...]]) -> list[str]:
        """Requests that are not in the batch any more, or whose blocks were not only added to."""
        return [req_id for req_id, old in self._rows.items() if req_id not in rows or rows[req_id][: len(old)] != old]

    def _add_or_append(self, req_id: str, row: tuple[int, ...]) -> None:
        written = self._rows.get(req_id)
        if written is None:
            self.input_batch.add_request(self._vllm.make_request(req_id, self._by_group(row)))
        elif row is not written:
            index = self.input_batch.req_id_to_index[req_id]
            self.input_batch.block_table.append_row(self._by_group(row[len(written) :]), index)
        self._rows[req_id] = row

    def _by_group(self, block_ids: tuple[int, ...]) -> tuple[list[int], ...]:
        """A trace tells the blocks of the full-attention group only."""
        groups = tuple(list[int]() for _ in range(self._geometry.num_kv_cache_groups))
        groups[self._geometry.full_attention_group].extend(block_ids)
        return groups

    def _reorder(self, req_ids: tuple[str, ...]) -> None:
        batch = self.input_batch
        for index, req_id in enumerate(req_ids):
            if (now := batch.req_id_to_index[req_id]) != index:
                batch.swap_states(now, index)


class _Vllm:
    """What is used of vLLM, imported late (some seconds); SetupError where it is missing or not a version we know."""

    def __init__(self) -> None:
        known_vllm("--batch vllm")
        try:
            from vllm import SamplingParams
            from vllm.v1.worker import gpu_input_batch
        except Exception as error:  # a torchvision built for another torch, for one, is a RuntimeError
            raise SetupError(f"--batch vllm needs vLLM, which cannot be imported here ({error})", REMEDY) from error
        gpu_input_batch.PIN_MEMORY = False  # the batch stays on the CPU, and pinning asks for a driver
        self._input_batch, self._request = gpu_input_batch.InputBatch, gpu_input_batch.CachedRequestState
        self._sampling = SamplingParams(temperature=0.0)

    def make_batch(self, geometry: Geometry, sizes: _Sizes) -> Any:
        """An empty ``InputBatch``. It holds no token ids, so model length and vocabulary are 1."""
        groups = geometry.num_kv_cache_groups
        return self._input_batch(
            max_num_reqs=sizes.num_reqs,
            max_model_len=1,
            max_num_batched_tokens=sizes.num_tokens,
            device=torch.device("cpu"),
            vocab_size=1,
            block_sizes=[geometry.kernel_block_size or geometry.block_size] * groups,
            max_num_blocks_per_req=[sizes.num_blocks] * groups,
        )

    def make_request(self, req_id: str, block_ids: tuple[list[int], ...]) -> Any:
        """A request with these blocks; its counts are set in the batch, step by step."""
        return self._request(
            req_id=req_id,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=self._sampling,
            generator=None,
            block_ids=block_ids,
            num_computed_tokens=0,
            output_token_ids=[],
        )
