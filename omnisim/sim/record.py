"""From a step as the runner has it to a record as it is written."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from omnisim.sim.scenario import EngineSpec
from omnisim.trace.expand import slot_runs
from omnisim.trace.model import NewRequest, StepRecord
from omnisim.workload import VOCABULARY, WorkloadRequest, identity_of, pseudo_tokens

if TYPE_CHECKING:
    from omnisim.sim.engine import Scheduled

__all__ = ["Recorder", "content_of"]

FILLER = 0
"""What a request samples that ended a step ago, and nobody knew."""


class _Life:
    """A request with the ids of its prompt and of its answer; ``told`` counts those of the answer that were told.

    Drafts are not counted: the next step tells what it computes again in their place.
    """

    __slots__ = ("identity", "num_prompt_tokens", "prompt", "request", "sampled", "told")

    def __init__(self, request: WorkloadRequest) -> None:
        self.request = request
        self.num_prompt_tokens = request.num_prompt_tokens
        self.prompt: list[int] = request.prompt_token_ids().tolist()
        self.sampled: list[int] = request.sampled_token_ids().tolist()
        self.told = 0
        self.identity = identity_of("drafts", request.req_id)

    def tell(self, computed: int, end: int, drafts: list[int]) -> tuple[int, ...]:
        """Ids of the positions from ``computed`` up to ``end`` that were not told yet; the last of them are drafts."""
        start, stop = max(self.told, computed - self.num_prompt_tokens), end - self.num_prompt_tokens - len(drafts)
        if stop < start:
            return ()
        self.told = stop
        return (*self.answer(start, stop), *[max(draft, FILLER) for draft in drafts])

    def sample(self, end: int, drafts: list[int]) -> list[int]:
        """What is sampled behind the first ``end`` tokens: the drafts that are right, and one more."""
        start = end - self.num_prompt_tokens - len(drafts)
        ids = self.answer(start, start + len(drafts) + 1)
        right = next(
            (at for at, (draft, made) in enumerate(zip(drafts, ids, strict=False)) if draft != made), len(drafts)
        )
        return ids[: right + 1]

    def propose(self, num_tokens: int, count: int, rate: float) -> list[int]:
        """Drafts of what comes behind its first ``num_tokens`` tokens: each is right with the chance of ``rate``."""
        start = num_tokens - self.num_prompt_tokens
        chance = pseudo_tokens(self.identity, np.arange(start, start + count, dtype=np.uint64)) / VOCABULARY
        ids = self.answer(start, start + count)
        return [made if right else (made + 1) % VOCABULARY for made, right in zip(ids, chance < rate, strict=True)]

    def answer(self, start: int, stop: int) -> list[int]:
        """Ids of the answer from one up to another; it goes on for ever."""
        ids = self.sampled[start:stop]
        return ids if len(ids) == stop - start else ids + [FILLER] * (stop - start - len(ids))


class Recorder:
    """Knows what has been told of each request; its records say what is new."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._sizes = sorted(spec.cudagraph_capture_sizes)
        self._waiting: dict[str, _Life] = {}
        self._lives: dict[str, _Life] = {}
        self._req_ids: tuple[str, ...] | None = None
        self._batch: list[_Life] = []
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that were sent and not scheduled yet."""
        return len(self._waiting)

    def admit(self, request: WorkloadRequest) -> list[int]:
        """A request is sent to the engine; returns the token ids of its prompt."""
        life = _Life(request)
        self._waiting[request.req_id] = life
        return life.prompt

    def withdraw(self, req_id: str) -> None:
        """A request is aborted; if it was never scheduled, nothing will be told of it."""
        self._waiting.pop(req_id, None)

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
        told = self._tell(step)
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
            scheduled_spec_decode_tokens={
                req_id: tuple(max(draft, FILLER) for draft in step.drafts[req_id])
                for req_id in step.req_ids
                if req_id in step.drafts
            },
        )
        self._req_ids = step.req_ids
        self._finished.clear()
        self._preempted.clear()
        return record

    def sampled(self, step: Scheduled) -> list[list[int]]:
        """What each request of the step last recorded samples: nothing before its last known token is computed."""
        return [
            life.sample(end, step.drafts.get(req_id, [])) if samples else []
            for life, req_id, end, samples in zip(self._batch, step.req_ids, step.ends, step.samples, strict=True)
        ]

    def drafts(self, step: Scheduled, sampled: list[list[int]]) -> list[list[int]]:
        """Speculative tokens behind what each request of that step sampled; no lists without speculative decoding."""
        count, rate = self._spec.num_speculative_tokens, self._spec.acceptance_rate
        if not count:
            return []
        known = [
            end - len(step.drafts.get(req_id, ())) + len(ids)
            for req_id, end, ids in zip(step.req_ids, step.ends, sampled, strict=True)
        ]
        return [
            life.propose(num_tokens, count, rate) if ids else []
            for life, num_tokens, ids in zip(self._batch, known, sampled, strict=True)
        ]

    def _tell(self, step: Scheduled) -> tuple[tuple[int, ...], ...]:
        drafts, computed = step.drafts, step.num_computed_tokens.tolist()
        batch = zip(self._batch, step.req_ids, computed, step.ends, strict=True)
        return tuple([life.tell(start, end, drafts.get(req_id, [])) for life, req_id, start, end in batch])

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
