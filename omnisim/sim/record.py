"""From a step as the runner has it to a record as it is written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from omnisim.trace.expand import slot_runs
from omnisim.trace.model import NewRequest, StepRecord
from omnisim.workload import STOP, WorkloadRequest

if TYPE_CHECKING:
    from omnisim.sim.engine import Scheduled

__all__ = ["Recorder", "content_of"]

FILLER = 0
"""What a request samples that ended a step ago, and nobody knew."""


class _Life:
    """A request with the ids of its prompt and of its answer; ``told`` counts those of the answer that were told."""

    __slots__ = ("num_prompt_tokens", "prompt", "request", "sampled", "told")

    def __init__(self, request: WorkloadRequest) -> None:
        self.request = request
        self.num_prompt_tokens = request.num_prompt_tokens
        self.prompt: list[int] = request.prompt_token_ids().tolist()
        self.sampled: list[int] = request.sampled_token_ids().tolist()
        if request.stops:
            self.sampled[-1] = STOP
        self.told = 0

    def tell(self, end: int) -> tuple[int, ...]:
        """Ids of the positions up to ``end`` that were not told yet."""
        start, stop = self.told, end - self.num_prompt_tokens
        if stop <= start:
            return ()
        self.told = stop
        ids = tuple(self.sampled[start:stop])
        return ids if len(ids) == stop - start else (*ids, *[FILLER] * (stop - start - len(ids)))

    def sample(self, end: int) -> list[int]:
        """What comes behind its first ``end`` tokens."""
        return self.sampled[(at := end - self.num_prompt_tokens) : at + 1] or [FILLER]


class Recorder:
    """Knows what has been told of each request; its records say what is new."""

    def __init__(self, cudagraph_capture_sizes: Iterable[int] = ()) -> None:
        self._sizes = sorted(cudagraph_capture_sizes)
        self._waiting: dict[str, _Life] = {}
        self._lives: dict[str, _Life] = {}
        self._req_ids: tuple[str, ...] | None = None
        self._batch: list[_Life] = []
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def admit(self, request: WorkloadRequest) -> list[int]:
        """A request is sent to the engine; returns the token ids of its prompt."""
        life = _Life(request)
        self._waiting[request.req_id] = life
        return life.prompt

    def record(self, step: Scheduled) -> StepRecord | None:
        """The record of a step; None if nothing was executed: what it told is told by the next one."""
        self._finished.update(step.finished_req_ids)
        self._preempted.update(step.preempted_req_ids)
        if not step.num_tokens:
            return None
        for req_id in self._finished:
            self._lives.pop(req_id, None)
        for req_id in step.new_req_ids:
            self._lives[req_id] = self._waiting.pop(req_id)
        if step.req_ids is not self._req_ids or step.new_req_ids:
            self._batch = [self._lives[req_id] for req_id in step.req_ids]
        told = tuple([life.tell(end) for life, end in zip(self._batch, step.ends, strict=True)])
        num_padded = self._num_padded(step.num_tokens)
        record = StepRecord(
            req_ids=UNSET if step.req_ids is self._req_ids else step.req_ids,
            num_computed_tokens=tuple(step.num_computed_tokens.tolist()),
            num_scheduled_tokens=tuple(step.num_scheduled_tokens.tolist()),
            query_start_loc=tuple(step.query_start_loc.tolist()),
            block_ids=step.block_ids,
            new_block_ids=step.new_block_ids,
            slot_mapping=_padded_runs(step.slot_mapping, num_padded),
            num_tokens_padded=num_padded,
            scheduled_new_reqs=tuple(self._new(req_id) for req_id in step.new_req_ids),
            resumed_req_ids=step.resumed_req_ids,
            preempted_req_ids=tuple(sorted(self._preempted - self._finished)),
            finished_req_ids=tuple(sorted(self._finished)),
            new_token_ids=told if any(told) else (),
        )
        self._req_ids = step.req_ids
        self._finished.clear()
        self._preempted.clear()
        return record

    def sampled(self, step: Scheduled) -> list[list[int]]:
        """What each request of the step last recorded samples: nothing before its last known token is computed."""
        return [
            life.sample(end) if samples else []
            for life, end, samples in zip(self._batch, step.ends, step.samples, strict=True)
        ]

    def _new(self, req_id: str) -> NewRequest:
        life = self._lives[req_id]
        return NewRequest(req_id=req_id, prompt_token_ids=tuple(life.prompt), content=content_of(life.request))

    def _num_padded(self, num_tokens: int) -> int:
        at = bisect_left(self._sizes, num_tokens)
        return self._sizes[at] if at < len(self._sizes) else num_tokens


def content_of(request: WorkloadRequest) -> dict[int, str]:
    """What is not in the token ids and yet tells two requests apart, by the position from which it does."""
    named = (("adapter", request.adapter), ("salt", request.salt))
    first = " ".join(f"{kind}:{name}" for kind, name in named if name is not None)
    tags = {0: first} if first else {}
    for image in request.images:
        tags[image.position] = " ".join(filter(None, (tags.get(image.position), f"image:{image.identifier}")))
    return tags


def _padded_runs(slots: NDArray[np.int64] | None, num_padded: int) -> tuple[int | tuple[int, ...], ...] | None:
    if slots is None:
        return None
    runs = slot_runs(slots)
    num_pads = num_padded - len(slots)
    return runs + (((-1, num_pads),) if num_pads > 2 else (-1,) * num_pads)
