"""What happened in a simulation, counted from its records alone; the engine's own counts stand beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from omnisim.trace.model import StepRecord

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """Counts of a trace. ``hit_tokens`` of ``prompt_tokens`` were not computed when their request was new."""

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    requests_hit: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    resumed: int = 0
    resumed_hit: int = 0
    largest_batch: int = 0
    batch: tuple[str, ...] = field(default=(), repr=False)

    def watch(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The records, counted as they pass."""
        for record in records:
            self._count(record)
            yield record

    def _count(self, record: StepRecord) -> None:
        if isinstance(record.req_ids, tuple):
            self.batch = record.req_ids
        self.steps += 1
        self.tokens += sum(record.num_scheduled_tokens)
        self.largest_batch = max(self.largest_batch, len(self.batch))
        self.preemptions += len(record.preempted_req_ids)
        if record.scheduled_new_reqs or record.resumed_req_ids:
            self._count_entering(record, dict(zip(self.batch, record.num_computed_tokens, strict=True)))

    def _count_entering(self, record: StepRecord, computed: dict[str, int]) -> None:
        for new in record.scheduled_new_reqs:
            hit = computed[new.req_id]
            self.requests += 1
            self.requests_hit += hit > 0
            self.prompt_tokens += len(new.prompt_token_ids)
            self.hit_tokens += hit
        self.resumed += len(record.resumed_req_ids)
        self.resumed_hit += sum(computed[req_id] > 0 for req_id in record.resumed_req_ids)
