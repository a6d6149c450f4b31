"""vllm-omni 0.30: the package ``vllm_omni/core/prefix_cache/``, an ``OmniPrefixCacheManager``.

Its runner (``core/prefix_cache/runner_mixin.py``, ``worker/gpu_ar_model_runner.py``) calls:

    initialize         check_prefix_cache_token_accounting  refuses speculative decoding and hits of part of a block
                       check_prefix_cache_kv_groups         refuses more than one group
    first step         FullAttentionGroupView               refuses kernel blocks that are not the allocator's
                       OmniPrefixCacheManager, register_policy
    each step          new_step_starts                      before _update_states: nobody has left the batch
                       save_outputs                         the payload flattened; gives the step an id
                       materialize                          with that id and the requests of that step, now or later
                       discard_step                         in its place, if nobody reads the step
                       a list, in a dict too, becomes the request's element, the payload is flattened
    shutdown           shutdown

Without CUDA the manager writes at once; with it, on a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from omnisim.batch import Batch
from omnisim.rows.emit import ModelOutput
from omnisim.subjects.base import LATER, Later, Merged, Setup
from omnisim.subjects.runner import copy_output, merge, num_scheduled_of
from omnisim.subjects.wheel import Wheel
from omnisim.trace.model import Step

__all__ = ["Release030"]

_WAIT_SECONDS = 5.0
"""``staging_claim_timeout_s``: how long the manager waits for a step that nobody reads; 30 by default."""
_MAX_NUM_BATCHED_TOKENS = 65_536
"""More than engines are run with, and few enough for the staging pages, which are only touched where they are used."""


class Release030:
    """The cache as a package, which can be read late."""

    holding: frozenset[str] | None = None

    def __init__(self, wheel: Wheel) -> None:
        self.name = wheel.name
        self._package = wheel.module("core.prefix_cache")
        self._group_view = wheel.module("core.prefix_cache.group_view")
        self._flatten = wheel.module("data_entry_keys").flatten_payload
        self._wheel = wheel
        self.refusals: tuple[type[Exception], ...] = (self._package.OmniPrefixCacheUnmatchError,)
        self.hangs: tuple[type[Exception], ...] = (self._package.OmniPrefixCacheStagingTimeoutError,)
        self.cache: Any = None

    def open(self, setup: Setup) -> None:
        package, geometry, talker = self._package, setup.geometry, setup.talker
        self._setup = setup
        if geometry.num_kv_cache_groups > 1:
            package.check_prefix_cache_kv_groups([None] * geometry.num_kv_cache_groups)
        config = package.PrefixCacheConfig.from_vllm_config(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=min(_MAX_NUM_BATCHED_TOKENS, geometry.num_blocks * geometry.block_size)
            ),
        )
        self._config = replace(config, staging_claim_timeout_s=_WAIT_SECONDS)
        self._policy = package.ModelCachePolicy(
            needs_full_hidden_states=talker.requires_full_prefix_cached_hidden_states,
            deferred_keys=talker.deferred_keys,
        )
        self.cache = None
        self._saved: deque[tuple[Step, int, int]] = deque()

    def finish(self, step: Step, batch: Batch) -> None:
        if step.scheduled_spec_decode_tokens:
            self._group_view.check_prefix_cache_token_accounting(None, "speculative decoding")
        if self.cache is None:
            self.cache = self._make_manager(batch)
        blocks = dict(zip(step.req_ids, step.block_table, strict=True))
        computed = dict(zip(step.req_ids, step.num_computed_tokens, strict=True))
        self.cache.new_step_starts(
            SimpleNamespace(
                finished_req_ids=set(step.finished_req_ids),
                scheduled_new_reqs=[
                    SimpleNamespace(
                        req_id=new.req_id,
                        num_computed_tokens=computed[new.req_id],
                        block_ids=(list(blocks[new.req_id]),),
                    )
                    for new in step.scheduled_new_reqs
                ],
                num_scheduled_tokens=num_scheduled_of(step),
            )
        )

    def _make_manager(self, batch: Batch) -> Any:
        geometry = self._setup.geometry
        kernel_size = geometry.kernel_block_size or geometry.block_size
        self._group_view.check_prefix_cache_block_layout(
            SimpleNamespace(
                use_hybrid_blocks=kernel_size != geometry.block_size,
                blocks_per_kv_block=geometry.block_size // kernel_size,
                kv_cache_block_size=geometry.block_size,
            ),
            geometry.block_size,
        )
        view = self._package.FullAttentionGroupView(_LiveBatch(batch), geometry.block_size)
        manager = self._package.OmniPrefixCacheManager(self._config, view)
        manager.register_policy(self._policy)
        return manager

    def begin(self, step: Step, batch: Batch) -> None:
        pass

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged | Later:
        output = output if step.clobber else copy_output(output)
        payload = output.multimodal_outputs
        step_id = self.cache.save_outputs(
            output.hidden_states,
            self._flatten(payload) if payload else {},
            num_tokens_unpadded=step.num_tokens,
            num_tokens_padded=step.num_tokens_padded,
        )
        delay = max(step.read_delay, self._setup.read_delay)
        if delay:
            self._saved.append((step, step_id, delay))
            return LATER
        return self._read(step, step_id)

    def late(self, at_end: bool) -> Iterator[tuple[int, Merged]]:
        """Steps whose delay is over, in order; one that waits keeps those after it waiting, as an output queue does."""
        while self._saved and (at_end or self._saved[0][2] <= 0):
            step, step_id, _ = self._saved.popleft()
            yield step.index, self._read(step, step_id)
        self._saved = deque((step, step_id, delay - 1) for step, step_id, delay in self._saved)

    def _read(self, step: Step, step_id: int) -> Merged:
        outputs = self.cache.materialize(step_id, list(step.req_ids))
        payloads = {req_id: self._payload(outputs, req_id, row) for row, req_id in enumerate(step.req_ids)}
        return merge(outputs.hidden_states, payloads, self._setup.talker.keys)

    def _payload(self, outputs: Any, req_id: str, row: int) -> dict[str, Any]:
        if not outputs.mm_outputs:
            return {}
        build = self._wheel.module("worker.output.payload_build").build_combined_prefix_cache_mm_payload
        payload: dict[str, Any] = self._flatten(build(outputs.mm_outputs, rid=req_id, list_idx=row))
        return payload

    def close(self) -> None:
        if self.cache is None:
            return
        for _, step_id, _ in self._saved:
            self.cache.discard_step(step_id)
        self.cache.shutdown()

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {}


class _LiveBatch:
    """The runner's ``input_batch``, whichever object that is now."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch.input_batch, name)
