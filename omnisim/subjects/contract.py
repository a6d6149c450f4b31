"""Any class with the public surface of ``OmniTensorPrefixCache``, called in the order of the cache contract.

finish     commit_deferred_mm_outputs · reset_prefix_cached_new_req_ids · discard_deferred_mm_outputs
begin      add_prefix_cached_new_req_id        new and resumed requests that start with computed tokens
deliver    update_omni_tensor_prefix_cache     hidden states staged on the CPU, if they are not there
           stage_deferred_mm_outputs           with a batch in which this step's tokens count as computed
           get_merged_multimodal_states · get_merged_hidden_states (if the model needs all hidden states)
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from omnisim.batch import Batch
from omnisim.rows.emit import HIDDEN_STATES, ModelOutput
from omnisim.rows.encode import torch_dtype
from omnisim.subjects.base import AtOnce, Merged, Setup
from omnisim.subjects.policy import policy_of
from omnisim.subjects.runner import copy_output, num_scheduled_of, unwrap
from omnisim.trace.model import Step

__all__ = ["SURFACE", "ByContract"]

SURFACE = (
    "add_prefix_cached_new_req_id",
    "reset_prefix_cached_new_req_ids",
    "update_omni_tensor_prefix_cache",
    "get_merged_hidden_states",
    "get_merged_multimodal_states",
    "stage_deferred_mm_outputs",
    "commit_deferred_mm_outputs",
    "discard_deferred_mm_outputs",
)
"""Methods that are called."""


@dataclass(slots=True, eq=False)
class _CountedBatch:
    """The batch as it is once this step's tokens count as computed, which is what staging asks for."""

    req_ids: Any
    req_id_to_index: Any
    num_computed_tokens_cpu: Any
    block_table: Any


class ByContract(AtOnce):
    """A cache class that somebody else wrote; it is given copies of the model's output, unless a step clobbers."""

    def __init__(self, cache_class: Any, name: str) -> None:
        self.name = name
        self._cache_class = cache_class

    def open(self, setup: Setup) -> None:
        geometry, talker = setup.geometry, setup.talker
        self._policy = policy_of(talker)
        self.cache = self._cache_class(
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            hidden_size=talker.hidden_size,
            hs_dtype=torch_dtype(talker.dtype),
            **self._extra_arguments({"policy": self._policy, "max_nbytes": geometry.max_nbytes}),
        )

    def _extra_arguments(self, known: dict[str, Any]) -> dict[str, Any]:
        """What this project's own cache takes beyond the surface; another is given what it has a name for."""
        names = inspect.signature(self._cache_class).parameters
        return {name: value for name, value in known.items() if name in names}

    def finish(self, step: Step, batch: Batch) -> None:
        self.cache.commit_deferred_mm_outputs(step.finished_req_ids, batch.input_batch)
        self.cache.reset_prefix_cached_new_req_ids()
        for req_id in step.finished_req_ids:
            self.cache.discard_deferred_mm_outputs(req_id)

    def begin(self, step: Step, batch: Batch) -> None:
        """Mark who enters with computed tokens. A resumed request does too: without a cache it would get all again."""
        if not step.scheduled_new_reqs and not step.resumed_req_ids:
            return
        entering = {new.req_id for new in step.scheduled_new_reqs}.union(step.resumed_req_ids)
        for req_id, num_computed in zip(step.req_ids, step.num_computed_tokens, strict=True):
            if num_computed and req_id in entering:
                self.cache.add_prefix_cached_new_req_id(req_id)

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        merged = self._deliver(step, batch, output if step.clobber else copy_output(output))
        return {
            key: {
                req_id: unwrap(value, row)
                for row, req_id in enumerate(step.req_ids)
                if (value := values.get(req_id, _NOTHING)) is not _NOTHING
            }
            for key, values in merged.items()
        }

    def _deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        cache, policy, input_batch = self.cache, self._policy, batch.input_batch
        num_scheduled = num_scheduled_of(step)
        query_start_loc = torch.tensor(step.query_start_loc)
        hidden = output.hidden_states if policy.requires_full_prefix_cached_hidden_states else None
        staged = hidden[: step.num_tokens].cpu() if hidden is not None and hidden.device.type != "cpu" else None
        cache.update_omni_tensor_prefix_cache(
            hidden,
            output.multimodal_outputs,
            step.num_tokens,
            torch.from_numpy(step.slot_mapping),
            num_tokens_padded=step.num_tokens_padded,
            skip_mm_cache_keys=policy.deferred_mm_cache_keys,
            hidden_states_cpu=staged,
        )
        if policy.deferred_mm_cache_keys:
            counted = _counted(step, input_batch)
            deferred = policy.deferred_mm_cache_keys
            cache.stage_deferred_mm_outputs(
                query_start_loc, counted, output.multimodal_outputs, num_scheduled, deferred
            )
        merged: Merged = cache.get_merged_multimodal_states(
            query_start_loc, input_batch, output.multimodal_outputs, num_scheduled
        )
        if hidden is not None:
            merged[HIDDEN_STATES] = cache.get_merged_hidden_states(
                query_start_loc, input_batch, hidden, num_scheduled, hidden_states_cpu=staged
            )
        return merged

    @property
    def holding(self) -> frozenset[str] | None:
        return None

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {}


_NOTHING = object()


def _counted(step: Step, input_batch: Any) -> _CountedBatch:
    counts = torch.tensor(step.num_computed_tokens) + torch.tensor(step.num_scheduled_tokens)
    return _CountedBatch(input_batch.req_ids, input_batch.req_id_to_index, counts, input_batch.block_table)
