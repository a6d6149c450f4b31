"""``none``: no cache of rows, under a scheduler with a prefix cache. It proves that the judge can say no."""

from __future__ import annotations

from typing import Any

from omnisim.batch import Batch
from omnisim.cache.passthrough import build_mm_cpu, hand_out, hand_out_declared
from omnisim.cache.spans import BatchSpans
from omnisim.rows.emit import ModelOutput
from omnisim.subjects.base import AtOnce, Merged, Setup
from omnisim.subjects.policy import policy_of
from omnisim.trace.model import Step

__all__ = ["KeepsNothing"]


class KeepsNothing(AtOnce):
    """Hands each request this step's rows and nothing of its cached prefix."""

    name = "none"
    holding: tuple[str, ...] = ()

    def open(self, setup: Setup) -> None:
        self._policy = policy_of(setup.talker)

    def finish(self, step: Step, batch: Batch) -> None:
        pass

    def begin(self, step: Step, batch: Batch) -> None:
        pass

    def deliver(self, step: Step, batch: Batch, output: ModelOutput) -> Merged:
        counts = dict(zip(step.req_ids, step.num_scheduled_tokens, strict=True))
        spans = BatchSpans.of(step.query_start_loc, batch.input_batch, counts)
        values: dict[str, Any] = build_mm_cpu(output.multimodal_outputs)
        if self._policy.requires_full_prefix_cached_hidden_states:
            values["hidden_states"] = output.hidden_states.cpu()
        return {key: self._hand_out(key, value, spans, step) for key, value in values.items()}

    def _hand_out(self, key: str, value: Any, spans: BatchSpans, step: Step) -> dict[str, Any]:
        if (kind := self._policy.kinds.get(key)) is not None:
            return hand_out_declared(key, kind, value, spans, step.index)
        return hand_out(key, value, spans, step.num_tokens_padded, set(), step.index)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {}
