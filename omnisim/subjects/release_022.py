"""vllm-omni 0.22: one file, which can defer keys until their request finishes.

Its runner (``worker/gpu_model_runner.py``, ``worker/gpu_ar_model_runner.py``) calls, each step:

    execute_model      commit_deferred_mm_outputs          finished requests, before they leave the batch
    _update_states     reset_prefix_cached_new_req_ids
                       discard_deferred_mm_outputs         finished requests
                       add_prefix_cached_new_req_id        a new request that is not known, with computed tokens
    execute_model      update_omni_tensor_prefix_cache     hidden states (if the model needs all) staged on the CPU
    sample_tokens      stage_deferred_mm_outputs           with the batch as it is: this step's tokens do not count yet
                       nothing more, if the model does not need all hidden states and no request is marked: the
                       payload is then built as without a cache (build_mm_cpu, to_payload_element)
                       get_merged_hidden_states            if the model needs all hidden states
                       get_merged_multimodal_states
                       a list, in a dict too, becomes the request's element, the payload is flattened
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnisim.batch import Batch
from omnisim.rows.emit import ModelOutput
from omnisim.subjects.base import Merged, Setup
from omnisim.subjects.release_020 import Release020
from omnisim.subjects.runner import copy_output, merge, num_scheduled_of, starts_of, unwrap
from omnisim.trace.model import Step

__all__ = ["Release022"]


class Release022(Release020):
    """The one-file cache with deferred keys."""

    def open(self, setup: Setup) -> None:
        super().open(setup)
        self._deferred = set(setup.talker.deferred_keys)

    def finish(self, step: Step, batch: Batch) -> None:
        if step.finished_req_ids:
            self.cache.commit_deferred_mm_outputs(set(step.finished_req_ids), batch.input_batch)
        super().finish(step, batch)
        for req_id in step.finished_req_ids:
            self.cache.discard_deferred_mm_outputs(req_id)

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        output = output if step.clobber else copy_output(output)
        payload = output.multimodal_outputs
        flat = self._flatten(payload) if payload else payload
        staged = self._write(step, output.hidden_states, flat)
        if self._deferred:
            self.cache.stage_deferred_mm_outputs(
                query_start_loc=starts_of(step),
                input_batch=batch.input_batch,
                multimodal_outputs=flat,
                num_scheduled_tokens=num_scheduled_of(step),
                deferred_mm_cache_keys=self._deferred,
            )
        if not self._needs_hidden and not self.cache.has_prefix_cached_new_req_ids():
            return merge(None, self._payloads_without_cache(step, output.hidden_states, flat), self._setup.talker.keys)
        asked = {
            "query_start_loc": starts_of(step),
            "input_batch": batch.input_batch,
            "num_scheduled_tokens": num_scheduled_of(step),
        }
        hidden = None
        if self._needs_hidden:
            hidden = self.cache.get_merged_hidden_states(
                hidden_states=output.hidden_states, hidden_states_cpu=staged, **asked
            )
        combined = self.cache.get_merged_multimodal_states(multimodal_outputs=flat, **asked)
        payloads = {req_id: self._combined(combined, req_id, row) for row, req_id in enumerate(step.req_ids)}
        return merge(hidden, payloads, self._setup.talker.keys)

    def _write(self, step: Step, hidden: Tensor, flat: Mapping[str, Any] | None) -> Tensor | None:
        """Store the step's rows; the copy of the hidden states on the CPU, if this generation's runner makes one."""
        staged = hidden[: step.num_tokens].detach().to("cpu").contiguous()
        self._update(step, hidden, flat, staged)
        return staged

    def _update(self, step: Step, hidden: Tensor, flat: Mapping[str, Any] | None, staged: Tensor | None) -> None:
        self.cache.update_omni_tensor_prefix_cache(
            hidden_states=hidden if self._needs_hidden else None,
            multimodal_outputs=flat,
            num_tokens_unpadded=step.num_tokens,
            slot_mapping=torch.from_numpy(step.slot_mapping),
            num_tokens_padded=step.num_tokens_padded,
            skip_mm_cache_keys=self._deferred,
            hidden_states_cpu=staged,
        )

    def _combined(self, combined: Mapping[str, Mapping[str, Any]], req_id: str, row: int) -> dict[str, Any]:
        """One request's payload out of what the cache merged."""
        payload: dict[str, Any] = self._flatten({key: unwrap(by[req_id], row) for key, by in combined.items()})
        return payload

    def _payloads_without_cache(
        self, step: Step, hidden: Tensor, flat: Mapping[str, Any] | None
    ) -> dict[str, dict[str, Any]]:
        values = self._mm_outputs.build_mm_cpu(flat)
        lengths = self._lengths(step, hidden)
        return {
            req_id: self._flatten(
                {
                    key: self._mm_outputs.to_payload_element(
                        value,
                        row,
                        start=step.query_start_loc[row],
                        end=step.query_start_loc[row + 1],
                        pass_lists_through=False,
                        **lengths,
                    )
                    for key, value in values.items()
                }
            )
            for row, req_id in enumerate(step.req_ids)
        }

    def _lengths(self, step: Step, hidden: Tensor) -> dict[str, int]:
        """By which lengths ``to_payload_element`` knows a row a token."""
        return {"seq_len": len(hidden)}

    @property
    def holding(self) -> frozenset[str] | None:  # type: ignore[override]
        """Requests with deferred chunks: ``_deferred_mm_outputs``."""
        return frozenset(self.cache._deferred_mm_outputs)
