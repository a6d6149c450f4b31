"""From what changed to what is: ``StepRecord`` after ``StepRecord`` becomes ``Step`` after ``Step``, or is refused.

Everything a legal step costs is a few comparisons of whole lists; ``omnisim.trace.faults`` finds the words when one of
them fails. Only requests that are alive are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import numpy as np
from msgspec import UNSET

from omnisim.errors import IllegalSchedule
from omnisim.trace import faults
from omnisim.trace.faults import PAD, Fault
from omnisim.trace.model import Header, NewRequest, Step, StepRecord

__all__ = ["Expander", "Request", "Runs", "expand_runs", "slot_runs"]

Runs = Sequence[int | tuple[int, ...]]
"""A ``slot_mapping`` as it is written: slots and ``(first, count)``."""
UNKNOWN = -1


class Request:
    """What a request's next step is checked against.

    ``computed`` is where it must go on, ``known`` how many of its token ids have been told, and ``drafts`` how many of
    the last tokens may yet be rejected.
    """

    __slots__ = ("blocks", "computed", "drafts", "known", "num_prompt", "preempted", "req_id")

    def __init__(self, new: NewRequest) -> None:
        self.req_id = new.req_id
        self.known = len(new.prompt_token_ids)
        self.num_prompt = self.known if new.num_prompt_tokens is None else new.num_prompt_tokens
        if not self.known and new.num_prompt_tokens is None:
            self.num_prompt = UNKNOWN
        self.blocks: tuple[int, ...] = ()
        self.computed = 0
        self.drafts = 0
        self.preempted = False


class Expander:
    """Takes the records of one trace in order and gives back its steps; raises IllegalSchedule at the first lie."""

    def __init__(self, header: Header, path: str) -> None:
        self._path = path
        self._line = 1
        self._index = -1
        self._tells = header.content != "none"
        self._requests: dict[str, Request] = {}
        self._req_ids: tuple[str, ...] | None = None
        self._batch: list[Request] = []
        self._num_prompt: tuple[int, ...] = ()
        self._scheduled: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = (0,)
        self._drafting = False
        geometry = header.cache
        self._block_size = geometry.kernel_block_size or geometry.block_size
        self._num_blocks = geometry.num_blocks * (geometry.block_size // self._block_size)
        self._check(faults.geometry(geometry))

    def step(self, record: StepRecord, line: int) -> Step:
        """The step that ``record``, which stands in ``line``, makes of all before it."""
        self._line = line
        self._number(record)
        self._change_batch(record)
        batch, computed, scheduled = self._batch, record.num_computed_tokens, record.num_scheduled_tokens
        if not len(batch) == len(computed) == len(scheduled):
            self._refuse(faults.lengths(record, len(batch)))
        self._enter(record)
        if [request.computed for request in batch] != list(computed):
            self._fall_back(computed)
        starts = self._query_start_loc(record)
        slots = self._slot_mapping(record, starts[-1])
        told = self._new_token_ids(record)
        self._advance(record)
        return Step(
            index=self._index,
            req_ids=self._req_ids or (),
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            query_start_loc=starts,
            block_table=tuple([request.blocks for request in batch]),
            slot_mapping=slots,
            num_tokens_padded=starts[-1] if record.num_tokens_padded is None else record.num_tokens_padded,
            num_prompt_tokens=self._num_prompt,
            scheduled_new_reqs=record.scheduled_new_reqs,
            resumed_req_ids=record.resumed_req_ids,
            preempted_req_ids=record.preempted_req_ids,
            finished_req_ids=record.finished_req_ids,
            new_token_ids=told,
            scheduled_spec_decode_tokens=record.scheduled_spec_decode_tokens,
            absent_keys=record.absent_keys,
        )

    # who is there

    def _number(self, record: StepRecord) -> None:
        index = self._index + 1 if record.step is None else record.step
        if index <= self._index:
            self._refuse((f"step {index} comes after step {self._index}", "steps are written in order, each once"))
        self._index = index

    def _change_batch(self, record: StepRecord) -> None:
        events = (
            record.finished_req_ids or record.preempted_req_ids or record.scheduled_new_reqs or record.resumed_req_ids
        )
        if record.req_ids is UNSET and not events:
            if self._req_ids is None:
                self._refuse(("the first step has no req_ids", "only a later step may leave them out"))
            return
        if record.req_ids is not UNSET:
            self._req_ids = record.req_ids
        elif self._req_ids is None:
            self._refuse(("the first step has no req_ids", "only a later step may leave them out"))
        for req_id in record.finished_req_ids:
            self._requests.pop(req_id, None)  # vLLM also names those that were aborted before they ever ran
        for req_id in record.preempted_req_ids:
            self._known(req_id, "preempted_req_ids").preempted = True
        for req_id in record.resumed_req_ids:
            self._known(req_id, "resumed_req_ids").preempted = False
        for new in record.scheduled_new_reqs:
            self._admit(new)
        self._gather(record)

    def _known(self, req_id: str, field: str) -> Request:
        request = self._requests.get(req_id)
        if request is None:
            self._refuse(faults.unknown(req_id, field))
        return request

    def _admit(self, new: NewRequest) -> None:
        self._check(faults.admission(new, alive=new.req_id in self._requests, tells=self._tells))
        self._requests[new.req_id] = Request(new)

    def _gather(self, record: StepRecord) -> None:
        req_ids, requests = self._req_ids or (), self._requests
        entering = {new.req_id for new in record.scheduled_new_reqs} | set(record.resumed_req_ids)
        self._check(faults.membership(record, req_ids, entering))
        if any(req_id not in requests for req_id in req_ids):
            self._refuse(faults.never_new(req_ids, requests, record.finished_req_ids))
        self._batch = [requests[req_id] for req_id in req_ids]
        for request in self._batch:
            if request.preempted:
                self._refuse(faults.preempted(request.req_id))
        self._num_prompt = tuple([request.num_prompt for request in self._batch])

    def _enter(self, record: StepRecord) -> None:
        """Rows of the block table that changed; new and resumed requests start wherever the scheduler says."""
        resumed = record.resumed_req_ids
        if record.scheduled_new_reqs or resumed:
            entering = {new.req_id for new in record.scheduled_new_reqs}.union(resumed)
            for request, computed in zip(self._batch, record.num_computed_tokens, strict=True):
                if request.req_id in entering:
                    request.computed = computed
                    request.drafts = 0
        if resumed:
            self._check(faults.resumed_without_blocks(record))
        if record.block_ids or record.new_block_ids:
            self._change_blocks(record)

    def _change_blocks(self, record: StepRecord) -> None:
        self._check(faults.block_rows(record, self._req_ids or (), self._num_blocks))
        for req_id, blocks in record.block_ids.items():
            self._requests[req_id].blocks = blocks
        for req_id, blocks in record.new_block_ids.items():
            request = self._requests[req_id]
            request.blocks = blocks if req_id in record.resumed_req_ids else request.blocks + blocks

    # what is computed

    def _fall_back(self, computed: Sequence[int]) -> None:
        """After drafts, num_computed_tokens may be less than what was scheduled: so many were rejected."""
        for request, start in zip(self._batch, computed, strict=True):
            if not request.computed - request.drafts <= start <= request.computed:
                self._refuse(faults.continuity(request.req_id, start, request.computed, request.drafts))

    def _query_start_loc(self, record: StepRecord) -> tuple[int, ...]:
        if record.num_scheduled_tokens != self._scheduled:
            self._scheduled = record.num_scheduled_tokens
            self._starts = tuple(accumulate(self._scheduled, initial=0))
        recorded = record.query_start_loc
        if recorded is not None and recorded != self._starts:
            self._refuse(faults.query_start_loc(recorded, self._starts))
        padded = record.num_tokens_padded
        if padded is not None and padded < self._starts[-1]:
            self._refuse((f"num_tokens_padded is {padded} where {self._starts[-1]} tokens are scheduled",
                          "padding only adds"))  # fmt: skip
        return self._starts

    def _slot_mapping(self, record: StepRecord, num_tokens: int) -> np.ndarray:
        slots = self._derived_slots(record, num_tokens)
        recorded = record.slot_mapping
        if recorded is not None and (len(recorded) != num_tokens or list(recorded) != slots):
            slots = self._reconcile(recorded, slots, record)
        if len(set(slots)) != num_tokens:
            self._check(faults.overlap(slots, self._starts, self._req_ids or ()))
        return np.array(slots, dtype=np.int64)

    def _derived_slots(self, record: StepRecord, num_tokens: int) -> list[int]:
        size, batch, computed = self._block_size, self._batch, record.num_computed_tokens
        try:
            if num_tokens == len(batch):
                return [
                    request.blocks[start // size] * size + start % size
                    for request, start in zip(batch, computed, strict=True)
                ]
            slots: list[int] = []
            for request, start, count in zip(batch, computed, record.num_scheduled_tokens, strict=True):
                slots += span_slots(request.blocks, start, start + count, size)
            return slots
        except IndexError:
            rows = [request.blocks for request in batch]
            self._refuse(faults.uncovered(self._req_ids or (), record, rows, size))

    def _reconcile(self, runs: Runs, derived: list[int], record: StepRecord) -> list[int]:
        """What was recorded, without its padding, where it differs from ``derived`` by nothing but pads."""
        num_tokens = len(derived)
        padded = num_tokens if record.num_tokens_padded is None else record.num_tokens_padded
        self._check(faults.runs(runs))
        num_recorded = sum(1 if isinstance(run, int) else run[1] for run in runs)
        if num_recorded not in (num_tokens, padded):
            self._refuse(faults.slot_count(num_recorded, num_tokens, padded))
        slots = expand_runs(runs, num_tokens)
        if slots != derived:
            self._check(faults.slots(slots, derived, self._starts, record, self._req_ids or ()))
        self._check(faults.padding(runs, num_tokens))
        return slots

    # what is known of it

    def _new_token_ids(self, record: StepRecord) -> tuple[tuple[int, ...], ...]:
        told = record.new_token_ids or ((),) * len(self._batch)
        if len(told) != len(self._batch):
            self._refuse(faults.lengths(record, len(self._batch)))
        if not self._tells:
            self._check(faults.ids_at_level_none(record))
            return told
        if self._drafting:
            self._settle_drafts(record.num_computed_tokens)
        ends = [a + n for a, n in zip(record.num_computed_tokens, record.num_scheduled_tokens, strict=True)]
        untold = [
            end - request.known if end > request.known else 0 for request, end in zip(self._batch, ends, strict=True)
        ]
        if [len(ids) for ids in told] != untold:
            self._refuse(faults.untold(record, told, self._batch))
        if record.scheduled_new_reqs or record.resumed_req_ids:
            self._check(faults.unknown_prefix(record, self._batch))
        return told

    def _settle_drafts(self, computed: Sequence[int]) -> None:
        for request, start in zip(self._batch, computed, strict=True):
            if request.drafts:
                request.known = max(request.known, start)

    def _advance(self, record: StepRecord) -> None:
        drafts = record.scheduled_spec_decode_tokens
        if drafts:
            self._check(faults.drafts(record, self._req_ids or (), self._tells))
        for request, start, count in zip(
            self._batch, record.num_computed_tokens, record.num_scheduled_tokens, strict=True
        ):
            request.computed = end = start + count
            if end > request.known:
                request.known = end
        if drafts or self._drafting:
            self._note_drafts(record)

    def _note_drafts(self, record: StepRecord) -> None:
        """Drafts count as known once a later step starts behind them."""
        drafts = record.scheduled_spec_decode_tokens
        for request in self._batch:
            request.drafts = len(drafts.get(request.req_id, ()))
            request.known -= request.drafts
        self._drafting = any(request.drafts for request in self._requests.values())

    # how it is refused

    def _check(self, fault: Fault | None) -> None:
        if fault is not None:
            self._refuse(fault)

    def _refuse(self, fault: Fault) -> NoReturn:
        what, remedy = fault
        where = f"step {self._index}, " if self._index >= 0 else ""
        raise IllegalSchedule(f"{self._path}:{self._line}", where + what, remedy)


def span_slots(blocks: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of positions ``[start, stop)``; IndexError past what ``blocks`` cover."""
    slots: list[int] = []
    while start < stop:
        index, offset = divmod(start, block_size)
        count = min(stop - start, block_size - offset)
        first = blocks[index] * block_size + offset
        slots += range(first, first + count)
        start += count
    return slots


def expand_runs(runs: Runs, stop: int) -> list[int]:
    """The first ``stop`` slots of a ``slot_mapping`` as it is written."""
    slots: list[int] = []
    for run in runs:
        first, count = (run, 1) if isinstance(run, int) else run
        count = min(count, stop - len(slots))
        slots += range(first, first + count) if first != PAD else [PAD] * count
    return slots


def slot_runs(slots: Sequence[int] | np.ndarray) -> tuple[int | tuple[int, ...], ...]:
    """``slots`` as they are written: runs of three or more as ``(first, count)``, pads too."""
    runs: list[int | tuple[int, ...]] = []
    values = [int(slot) for slot in slots]
    at = 0
    while at < len(values):
        step = 0 if values[at] == PAD else 1
        end = at + 1
        while end < len(values) and values[end] == values[end - 1] + step and (step == 0 or values[end - 1] != PAD):
            end += 1
        runs += [(values[at], end - at)] if end - at >= 3 else values[at:end]
        at = end
    return tuple(runs)
