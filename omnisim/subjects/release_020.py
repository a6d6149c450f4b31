"""vllm-omni 0.20: one file, ``vllm_omni/core/prefix_cache.py``, no deferred keys.

Its runner (``worker/gpu_model_runner.py``, ``worker/gpu_ar_model_runner.py``) calls, each step:

    _update_states     reset_prefix_cached_new_req_ids
                       add_prefix_cached_new_req_id        a new request that is not known, with computed tokens
    execute_model      update_omni_tensor_prefix_cache     the payload as the model returned it, not flattened
    sample_tokens      get_merged_hidden_states            always, whatever the model says it needs
                       get_merged_multimodal_states        with None too, if the model returned none
                       a list becomes the request's element, the payload is flattened
"""

from __future__ import annotations

from typing import Any

import torch

from omnisim.batch import Batch
from omnisim.rows.emit import ModelOutput
from omnisim.rows.encode import torch_dtype
from omnisim.subjects.base import AtOnce, Merged, Setup
from omnisim.subjects.runner import KnownRequests, copy_output, merge, num_scheduled_of, starts_of
from omnisim.subjects.wheel import Wheel
from omnisim.trace.model import Step

__all__ = ["Release020"]


class Release020(AtOnce):
    """The one-file cache of 0.20, and what the later one-file releases have in common with it."""

    holding: frozenset[str] | None = None

    def __init__(self, wheel: Wheel) -> None:
        self.name = wheel.name
        self._cache_module = wheel.module("core.prefix_cache")
        self._mm_outputs = wheel.module("utils.mm_outputs")
        self._flatten = wheel.module("data_entry_keys").flatten_payload

    def open(self, setup: Setup) -> None:
        self._setup = setup
        self._needs_hidden = setup.talker.requires_full_prefix_cached_hidden_states
        self._known = KnownRequests()
        self.cache = self._cache_module.OmniTensorPrefixCache(
            num_blocks=setup.geometry.num_blocks,
            block_size=setup.geometry.block_size,
            hidden_size=setup.talker.hidden_size,
            hs_dtype=torch_dtype(setup.talker.dtype),
        )

    def finish(self, step: Step, batch: Batch) -> None:
        self._known.drop(step.finished_req_ids)

    def begin(self, step: Step, batch: Batch) -> None:
        self.cache.reset_prefix_cached_new_req_ids()
        computed = dict(zip(step.req_ids, step.num_computed_tokens, strict=True))
        for req_id in self._known.enter(step.scheduled_new_reqs):
            if computed[req_id] > 0:
                self.cache.add_prefix_cached_new_req_id(req_id)

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        output = output if step.clobber else copy_output(output)
        self.cache.update_omni_tensor_prefix_cache(
            hidden_states=output.hidden_states,
            multimodal_outputs=output.multimodal_outputs,
            num_tokens_unpadded=step.num_tokens,
            slot_mapping=torch.from_numpy(step.slot_mapping),
            num_tokens_padded=step.num_tokens_padded,
        )
        asked = {
            "query_start_loc": starts_of(step),
            "input_batch": batch.input_batch,
            "num_scheduled_tokens": num_scheduled_of(step),
        }
        hidden = self.cache.get_merged_hidden_states(hidden_states=output.hidden_states, **asked)
        combined = self.cache.get_merged_multimodal_states(multimodal_outputs=output.multimodal_outputs, **asked)
        payloads = {
            req_id: self._flatten({key: self._element(values[req_id], row) for key, values in combined.items()})
            for row, req_id in enumerate(step.req_ids)
        }
        return merge(hidden if self._needs_hidden else None, payloads, self._setup.talker.keys)

    def _element(self, value: Any, row: int) -> Any:
        """Lists in a dict stay lists here."""
        if isinstance(value, list):
            return value[row] if row < len(value) else value[0]
        return value

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {}
