"""vLLM's ``Scheduler``, ``KVCacheManager`` and ``InputBatch`` without a model: all of vLLM that a simulation knows.

Tried with vLLM 0.32 (CPU build) and 0.33 (CUDA build, no GPU). Besides what is imported it uses:

- of ``Scheduler``: ``add_request``, ``schedule``, ``update_from_output`` (and the ``SchedulerStats`` that come with its
  outputs), ``update_draft_token_ids``, ``finish_requests``, ``reset_prefix_cache``, ``has_unfinished_requests``,
  ``get_num_unfinished_requests``, ``requests``, ``finished_req_ids``, ``kv_cache_manager.usage``,
  ``kv_cache_manager.block_pool.metrics_collector`` (set to a counter of evictions) and, where a workload has images,
  ``encoder_cache_manager`` and ``max_num_encoder_input_tokens`` (set: a text model has no budget);
- of ``Request``: ``num_computed_tokens``, ``num_output_tokens``, ``num_preemptions``, ``is_prefill_chunk``,
  ``is_finished``;
- of ``InputBatch``: ``add_request``, ``remove_request``, ``condense``, ``refresh_metadata``, ``req_ids``,
  ``req_id_to_index``, ``num_computed_tokens_cpu``, and of its ``block_table``: ``append_row``, ``commit_block_table``,
  ``compute_slot_mapping``.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omnisim.errors import SetupError
from omnisim.known_vllm import REMEDY, known_vllm
from omnisim.sim.scenario import EngineSpec
from omnisim.workload import STOP, VOCABULARY, WorkloadRequest

__all__ = ["Engine", "Scheduled", "Stats", "load_vllm"]

_ENOUGH = 2**30
"""Of encoder budget and cache: what an image costs is not what is simulated."""


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """One step as the runner has it: the batch in order, and who entered or left.

    ``slot_mapping`` is int64 ``[num_tokens]``, or None where this build of vLLM cannot compute it on a CPU.
    ``block_ids`` are whole rows of the block table of those that entered, ``new_block_ids`` what others got.
    ``samples`` says who samples at the end of the step. ``drafts`` are the speculative tokens that are the last of
    those scheduled; vLLM pads with -1.
    """

    req_ids: tuple[str, ...]
    num_computed_tokens: NDArray[np.int32]
    num_scheduled_tokens: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    slot_mapping: NDArray[np.int64] | None
    block_ids: dict[str, tuple[int, ...]]
    new_block_ids: dict[str, tuple[int, ...]]
    new_req_ids: tuple[str, ...]
    resumed_req_ids: tuple[str, ...]
    preempted_req_ids: tuple[str, ...]
    finished_req_ids: tuple[str, ...]
    samples: list[bool]
    drafts: dict[str, list[int]]
    output: Any

    @property
    def ends(self) -> list[int]:
        """How many tokens of each request are computed after this step."""
        ends: list[int] = (self.num_computed_tokens + self.num_scheduled_tokens).tolist()
        return ends

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled; 0: nothing was executed."""
        return int(self.query_start_loc[-1])


@dataclass(slots=True)
class Stats:
    """What the engine itself counted: vLLM's ``PrefixCacheStats`` and ``num_preemptions``, and blocks evicted.

    ``missed_events`` are requests that an event named and that were not there.

    ``queries`` and ``hits`` are in tokens, of a request's first admission only. ``usage`` is the share of the pool that
    is held in each executed step.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preemptions: int = 0
    aborts: int = 0
    refused_resets: int = 0
    missed_events: int = 0
    evictions: int = 0
    usage: list[float] = field(default_factory=list)


class Engine:
    """An engine core with a scheduler, a batch, and no model: what is sampled is what the workload says."""

    def __init__(self, spec: EngineSpec, *, num_blocks: int, max_model_len: int, images: bool = False) -> None:
        self._vllm = load_vllm()
        self._spec = spec
        self._scheduler = self._vllm.make_scheduler(spec, num_blocks, max_model_len, images)
        self._hasher = self._vllm.make_hasher(spec)
        self._runner = _Runner(self._vllm, spec, max_model_len)
        self._requests: dict[str, Any] = {}
        self._arrived = 0
        self.stats = Stats()
        self._evictions = _Evictions()
        self._scheduler.kv_cache_manager.block_pool.metrics_collector = self._evictions

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """While this lasts torch has one thread: vLLM's slot kernel is so small that more cost more than they give."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return int(self._scheduler.get_num_unfinished_requests())

    @property
    def ended(self) -> Iterable[str]:
        """Ids of requests that ended since the last step was scheduled."""
        ended: Iterable[str] = self._scheduler.finished_req_ids
        return ended

    def progress(self, req_id: str) -> tuple[int, int] | None:
        """Tokens computed and sampled of a request that is waiting or running; None where there is none."""
        request = self._scheduler.requests.get(req_id)
        return None if request is None else (int(request.num_computed_tokens), int(request.num_output_tokens))

    def add(self, request: WorkloadRequest, prompt_token_ids: list[int]) -> None:
        """Queue a request; of the same priority, those that came first go first."""
        self._arrived += 1
        self._bury(request.req_id)
        made = self._vllm.make_request(request, prompt_token_ids, self._arrived, self._hasher)
        self._requests[request.req_id] = made
        self._scheduler.add_request(made)

    def abort(self, req_id: str) -> bool:
        """As when a client has gone; False if there is no such request."""
        aborted = self._scheduler.finish_requests(req_id, self._vllm.RequestStatus.FINISHED_ABORTED)
        self.stats.aborts += len(aborted)
        return bool(aborted)

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        """Forget all hashes; vLLM may refuse, because requests hold blocks."""
        reset = self._scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
        self.stats.refused_resets += not reset

    def schedule(self) -> Scheduled:
        """Schedule a step and lead the batch to it."""
        output = self._scheduler.schedule()
        for req_id in output.finished_req_ids:
            self._bury(req_id)
        if output.total_num_scheduled_tokens:
            self.stats.usage.append(self._scheduler.kv_cache_manager.usage)
        return self._runner.lead(output, self._scheduler.requests)

    def finish(self, step: Scheduled, sampled: list[list[int]], drafts: list[list[int]]) -> None:
        """Hand back what was sampled in a step, by request in batch order (empty: a chunk of a prompt).

        ``drafts`` are speculative tokens for the next step, as many lists; none at all without speculative decoding.
        """
        result = self._vllm.make_output(step.req_ids, sampled)
        outputs = self._scheduler.update_from_output(step.output, result)
        for each in outputs.values():
            if each.scheduler_stats is not None:
                self._count(each.scheduler_stats)
        if drafts:
            self._scheduler.update_draft_token_ids(self._vllm.DraftTokenIds(list(step.req_ids), drafts))

    def run_bare(self, requests: Iterable[WorkloadRequest]) -> int:
        """Schedule and update until all requests have ended, no batch led and nothing recorded; returns the steps.

        What a benchmark measures a simulation against: the loop that any use of the scheduler is.
        """
        scheduler, token_ids = self._scheduler, {}
        for number, request in enumerate(requests):
            prompt = request.prompt_token_ids().tolist()
            token_ids[request.req_id] = prompt + request.sampled_token_ids().tolist()
            scheduler.add_request(self._vllm.make_request(request, prompt, number, self._hasher))
        num_steps = 0
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            sampled = []
            for req_id in output.num_scheduled_tokens:
                running = scheduler.requests[req_id]
                ids = token_ids[req_id]
                sampled.append([] if running.is_prefill_chunk else [ids[running.num_computed_tokens]])
            scheduler.update_from_output(output, self._vllm.make_output(tuple(output.num_scheduled_tokens), sampled))
            num_steps += 1
        return num_steps

    def _bury(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None and request.is_finished():
            self.stats.preemptions += request.num_preemptions
            del self._requests[req_id]

    def _count(self, told: Any) -> None:
        stats, prefix = self.stats, told.prefix_cache_stats
        stats.requests += prefix.requests
        stats.queries += prefix.queries
        stats.hits += prefix.hits
        stats.preempted_requests += prefix.preempted_requests
        stats.evictions = self._evictions.count


class _Evictions:
    """What a block pool reports to: vLLM's ``KVCacheMetricsCollector``, without its clock and its sampling."""

    def __init__(self) -> None:
        self.count = 0

    def on_block_allocated(self, block: Any) -> None:
        pass

    def on_block_accessed(self, block: Any) -> None:
        pass

    def on_block_evicted(self, block: Any) -> None:
        self.count += block.block_hash is not None  # it is told of every block that is handed out

    def reset(self) -> None:
        pass


class _Runner:
    """Does to vLLM's ``InputBatch`` what ``GPUModelRunner._update_states`` and ``_prepare_inputs`` do in 0.32 and 0.33.

    Who finished, and who is not scheduled or is resumed, is removed; blocks are appended; new and resumed requests are
    added, the smallest free rows first; holes are closed; and where the attention backend asks for it decodes are
    swapped to the front. The batch carries prompts; sampled ids are not written back, for nobody reads them.
    """

    def __init__(self, vllm: _Vllm, spec: EngineSpec, max_model_len: int) -> None:
        self._vllm = vllm
        self._threshold = spec.reorder_batch_threshold
        self._batch = vllm.make_batch(spec, max_model_len)
        self._table = self._batch.block_table
        self._states: dict[str, Any] = {}
        self._order: tuple[str, ...] = ()

    def lead(self, output: Any, requests: dict[str, Any]) -> Scheduled:
        """The batch of this step; of vLLM's ``requests``, those that are no prefill chunk sample at its end."""
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
            self._batch.remove_request(req_id)
        for req_id in self._batch.req_id_to_index.keys() - (scheduled.keys() - resumed):
            self._batch.remove_request(req_id)
        entering = [self._enter(new) for new in output.scheduled_new_reqs]
        rows = {new.req_id: tuple(new.block_ids[0]) for new in output.scheduled_new_reqs}
        appended: dict[str, tuple[int, ...]] = {}
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = self._states[req_id]
            state.num_computed_tokens = computed
            index = self._batch.req_id_to_index.get(req_id)
            if req_id in resumed:
                state.block_ids = blocks
                rows[req_id] = tuple(blocks[0])
            elif blocks is not None:
                state.block_ids[0].extend(blocks[0])
                appended[req_id] = tuple(blocks[0])
            if index is None:
                entering.append(state)
                continue
            self._batch.num_computed_tokens_cpu[index] = computed
            if blocks is not None:
                self._table.append_row(blocks, index)
        for state in entering:
            self._batch.add_request(state)
        self._batch.condense()
        if self._threshold is not None and scheduled:
            self._vllm.reorder(self._batch, output, decode_threshold=self._threshold)
        self._batch.refresh_metadata()
        return self._scheduled(output, rows, appended, requests)

    def _enter(self, new: Any) -> Any:
        state = self._vllm.make_state(new)
        self._states[new.req_id] = state
        return state

    def _scheduled(
        self,
        output: Any,
        rows: dict[str, tuple[int, ...]],
        appended: dict[str, tuple[int, ...]],
        requests: dict[str, Any],
    ) -> Scheduled:
        req_ids = tuple(self._batch.req_ids)
        if req_ids == self._order:
            req_ids = self._order
        self._order = req_ids
        num_reqs = len(req_ids)
        counts = output.num_scheduled_tokens
        num_scheduled = np.fromiter((counts[req_id] for req_id in req_ids), dtype=np.int32, count=num_reqs)
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=starts[1:])
        computed = self._batch.num_computed_tokens_cpu[:num_reqs].copy()
        finished = output.finished_req_ids
        return Scheduled(
            req_ids=req_ids,
            num_computed_tokens=computed,
            num_scheduled_tokens=num_scheduled,
            query_start_loc=starts,
            slot_mapping=self._slot_mapping(computed, num_scheduled, starts) if num_reqs else None,
            block_ids=rows,
            new_block_ids=appended,
            new_req_ids=tuple(new.req_id for new in output.scheduled_new_reqs),
            resumed_req_ids=tuple(sorted(output.scheduled_cached_reqs.resumed_req_ids)),
            preempted_req_ids=tuple(sorted(output.preempted_req_ids or ())),
            finished_req_ids=tuple(sorted(finished)),
            drafts=output.scheduled_spec_decode_tokens,
            samples=[not requests[req_id].is_prefill_chunk for req_id in req_ids],
            output=output,
        )

    def _slot_mapping(
        self, computed: NDArray[np.int32], scheduled: NDArray[np.int32], starts: NDArray[np.int32]
    ) -> NDArray[np.int64] | None:
        num_tokens = int(starts[-1])
        if not self._vllm.has_slot_kernel:
            return None
        positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(
            computed.astype(np.int64) - starts[:-1], scheduled
        )
        self._table.commit_block_table(len(computed))
        self._table.compute_slot_mapping(len(computed), torch.from_numpy(starts), torch.from_numpy(positions))
        slots: NDArray[np.int64] = self._table[0].slot_mapping.gpu[:num_tokens].numpy()
        return slots


class _Vllm:
    """What is used of vLLM, imported late (some seconds); SetupError where it is missing or not a version we know."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # that one has no InputBatch, and is told of resumed as of new
        for name in ("vllm", "torch._library.triton"):  # the latter tells that there is no Triton, which is no news
            logging.getLogger(name).setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
        self.version = str(known_vllm("simulate").__version__)
        try:
            self._import()
        except Exception as error:
            raise SetupError(f"simulate needs vLLM, and this one is broken ({error})", REMEDY) from error

    def _import(self) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.platforms import current_platform
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
        from vllm.v1.request import Request, RequestStatus
        from vllm.v1.worker import gpu_input_batch

        gpu_input_batch.PIN_MEMORY = False  # the batch stays on the CPU, and pinning asks for a driver
        self.has_slot_kernel = current_platform.is_cpu()
        if self.has_slot_kernel:
            with warnings.catch_warnings(action="ignore"):  # torch's own, when vLLM looks through what is loaded
                current_platform.register_triton_kernel_overrides()
        self.RequestStatus, self._request = RequestStatus, Request
        self.DraftTokenIds = DraftTokenIds
        self._sampling, self._output = SamplingParams, ModelRunnerOutput
        self._lora, self._feature, self._range = LoRARequest, MultiModalFeatureSpec, PlaceholderRange
        self._hash_by_name, self._hashing = get_hash_fn_by_name, kv_cache_utils
        self._batch, self._state = gpu_input_batch.InputBatch, gpu_input_batch.CachedRequestState
        self.reorder = reorder_batch_to_split_decodes_and_prefills
        self._params: dict[tuple[int, bool], Any] = {}
        self._adapters: dict[str, Any] = {}

    def make_scheduler(self, spec: EngineSpec, num_blocks: int, max_model_len: int, images: bool) -> Any:
        """A scheduler over one group of full attention."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = self._config(spec, num_blocks, max_model_len)
        attention = FullAttentionSpec(block_size=spec.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        group = KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=attention)
        scheduler = (AsyncScheduler if spec.async_scheduling else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=spec.block_size,
            log_stats=True,
        )
        if images:
            from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

            scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=_ENOUGH)
            scheduler.max_num_encoder_input_tokens = _ENOUGH
        return scheduler

    def _config(self, spec: EngineSpec, num_blocks: int, max_model_len: int) -> Any:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )

        cache = CacheConfig(
            block_size=spec.block_size,
            enable_prefix_caching=spec.enable_prefix_caching,
            prefix_caching_hash_algo=spec.prefix_caching_hash_algo,
        )
        cache.num_gpu_blocks = num_blocks
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_MODEL | {"max_position_embeddings": max_model_len}))
            model = ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=max_model_len
            )
            return VllmConfig(
                model_config=model,
                cache_config=cache,
                scheduler_config=SchedulerConfig(
                    max_model_len=max_model_len,
                    is_encoder_decoder=False,
                    max_num_seqs=spec.max_num_seqs,
                    max_num_batched_tokens=spec.max_num_batched_tokens,
                    enable_chunked_prefill=spec.enable_chunked_prefill,
                    policy=spec.policy,
                    async_scheduling=spec.async_scheduling,
                    watermark=spec.watermark,
                    long_prefill_token_threshold=spec.long_prefill_token_threshold,
                ),
                device_config=DeviceConfig("cpu"),
                parallel_config=ParallelConfig(),
                speculative_config=SpeculativeConfig(
                    method="ngram",
                    num_speculative_tokens=spec.num_speculative_tokens,
                    prompt_lookup_max=2,
                    target_model_config=model,
                    target_parallel_config=ParallelConfig(),
                )
                if spec.num_speculative_tokens
                else None,
            )

    def make_hasher(self, spec: EngineSpec) -> Any:
        """vLLM's own hasher of blocks, with its seed."""
        function = self._hash_by_name(spec.prefix_caching_hash_algo)
        self._hashing.init_none_hash(function)
        if not spec.enable_prefix_caching:
            return None  # as the engine core does
        return self._hashing.get_request_block_hasher(spec.block_size, function)

    def make_request(self, asked: WorkloadRequest, prompt: list[int], number: int, hasher: Any) -> Any:
        """vLLM's request; ``number`` stands for the time of its arrival."""
        features = [
            self._feature(
                data=None,
                modality="image",
                identifier=image.identifier,
                mm_position=self._range(offset=image.position, length=image.num_tokens),
            )
            for image in asked.images
        ]
        return self._request(
            request_id=asked.req_id,
            prompt_token_ids=prompt,
            sampling_params=self._sampling_params(asked),
            pooling_params=None,
            arrival_time=float(number),
            mm_features=features,
            lora_request=self._adapter(asked.adapter),
            cache_salt=asked.salt,
            priority=asked.priority,
            block_hasher=hasher,
        )

    def _sampling_params(self, asked: WorkloadRequest) -> Any:
        key = (asked.max_tokens, asked.stops)
        if key not in self._params:
            self._params[key] = self._sampling(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=asked.max_tokens + asked.stops,  # more than it will need: the engine cannot know
                stop_token_ids=[STOP] if asked.stops else [],
            )
        return self._params[key]

    def _adapter(self, name: str | None) -> Any:
        if name is not None and name not in self._adapters:
            self._adapters[name] = self._lora(lora_name=name, lora_int_id=len(self._adapters) + 1, lora_path=name)
        return None if name is None else self._adapters[name]

    def make_state(self, new: Any) -> Any:
        """What a runner keeps of a request, from the scheduler's ``NewRequestData``."""
        return self._state(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            mm_features=new.mm_features,
            sampling_params=new.sampling_params,
            generator=None,
            block_ids=new.block_ids,
            num_computed_tokens=new.num_computed_tokens,
            output_token_ids=[],
            lora_request=None,
        )

    def make_batch(self, spec: EngineSpec, max_model_len: int) -> Any:
        """An empty ``InputBatch``; its tables on the "GPU" are those on the CPU, as in vLLM's CPU runner."""
        batch = self._batch(
            max_num_reqs=spec.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            device=torch.device("cpu"),
            vocab_size=VOCABULARY + 1,
            block_sizes=[spec.block_size],
            max_num_blocks_per_req=[-(-(max_model_len + spec.num_speculative_tokens) // spec.block_size)],
            num_spec_tokens=spec.num_speculative_tokens,
        )
        for table in batch.block_table.block_tables:
            table.block_table.gpu = table.block_table.cpu
        return batch

    def make_output(self, req_ids: tuple[str, ...], sampled: list[list[int]]) -> Any:
        """What a model runner hands back."""
        return self._output(
            req_ids=list(req_ids),
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )


_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY + 1,
}
"""A model to configure vLLM with; it has no weights and is never made."""


@cache
def load_vllm() -> _Vllm:
    """vLLM, once; SetupError where it is missing or of a version that was not tried."""
    return _Vllm()
