"""From what changed to what is: ``StepRecord`` after ``StepRecord`` becomes ``Step`` after ``Step``, or is refused.

Everything a legal step costs is a few comparisons of whole lists; ``omnisim.trace.faults`` finds the words when one of
them fails. Only requests that are alive are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NoReturn

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from omnisim.errors import IllegalSchedule
from omnisim.trace import faults
from omnisim.trace.faults import PAD, Fault
from omnisim.trace.model import Header, NewRequest, Step, StepRecord

__all__ = ["Expander", "Request", "Runs", "expand_runs", "slot_runs", "span_slots"]

Runs = Sequence[int | tuple[int, ...]]
"""A ``slot_mapping`` as it is written: slots and ``(first, count)``."""
UNKNOWN = -1
MAX_TOKENS = 2**22
"""In one step: no engine schedules as many, and a few bytes can claim them."""


class Request:
    """A living request: what its next step is checked against.

    ``computed`` is where it must go on, ``known`` how many of its token ids have been told, ``num_drafts`` how many of
    its last tokens may yet be rejected. While it is in the batch, ``_Batch`` has the first two.
    """

    __slots__ = ("blocks", "computed", "known", "num_drafts", "num_prompt", "preempted", "req_id")

    def __init__(self, new: NewRequest) -> None:
        self.req_id = new.req_id
        self.known = len(new.prompt_token_ids)
        stated = self.known or UNKNOWN
        self.num_prompt = stated if new.num_prompt_tokens is None else new.num_prompt_tokens
        self.blocks: tuple[int, ...] = ()
        self.computed = 0
        self.num_drafts = 0
        self.preempted = False


class _Batch:
    """The scheduled requests, and what is known of them in columns: a step changes whole lists."""

    __slots__ = ("computed", "known", "num_prompt", "req_ids", "requests", "table")

    def __init__(self, req_ids: tuple[str, ...], requests: list[Request]) -> None:
        self.req_ids = req_ids
        self.requests = requests
        self.computed = [request.computed for request in requests]
        self.known = [request.known for request in requests]
        self.num_prompt = tuple([request.num_prompt for request in requests])
        self.table = self.rows()

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The block table."""
        return tuple([request.blocks for request in self.requests])

    def part(self) -> None:
        """Give the columns back to the requests."""
        for request, computed, known in zip(self.requests, self.computed, self.known, strict=True):
            request.computed = computed
            request.known = known


class Expander:
    """Takes the records of one trace in order and gives back its steps; raises IllegalSchedule at the first lie."""

    def __init__(self, header: Header, path: str) -> None:
        self._path = path
        self._line = 1
        self._index = -1
        self._tells = header.content != "none"
        self._requests: dict[str, Request] = {}
        self._batch = _Batch((), [])
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
        if not len(batch.requests) == len(computed) == len(scheduled):
            self._refuse(faults.lengths(record, len(batch.requests)))
        self._place(record)
        if batch.computed != list(computed):
            self._fall_back(computed)
        if record.host_num_computed_tokens:
            self._check(faults.host_counts(record, batch.req_ids))
        starts = self._query_start_loc(record)
        slots = self._slot_mapping(record, starts[-1])
        told = self._advance(record)
        return Step(
            index=self._index,
            req_ids=batch.req_ids,
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
            query_start_loc=starts,
            block_table=batch.table,
            slot_mapping=slots,
            num_tokens_padded=starts[-1] if record.num_tokens_padded is None else record.num_tokens_padded,
            num_prompt_tokens=batch.num_prompt,
            scheduled_new_reqs=record.scheduled_new_reqs,
            resumed_req_ids=record.resumed_req_ids,
            preempted_req_ids=record.preempted_req_ids,
            finished_req_ids=record.finished_req_ids,
            new_token_ids=told,
            scheduled_spec_decode_tokens=record.scheduled_spec_decode_tokens,
            absent_keys=record.absent_keys,
            clobber=record.clobber,
            read_delay=record.read_delay,
            fail_write=record.fail_write,
            host_num_computed_tokens=record.host_num_computed_tokens,
        )

    # who is there

    def _number(self, record: StepRecord) -> None:
        index = self._index + 1 if record.step is None else record.step
        if index <= self._index:
            self._refuse((f"followed by step {index}", "steps are written in order, each once"))
        if self._index < 0 and record.req_ids is UNSET:
            self._refuse(("the first step has no req_ids", "only a later step may leave them out"))
        self._index = index

    def _change_batch(self, record: StepRecord) -> None:
        req_ids = self._batch.req_ids if record.req_ids is UNSET else record.req_ids
        new, resumed = record.scheduled_new_reqs, record.resumed_req_ids
        if req_ids == self._batch.req_ids and not (
            new or resumed or record.finished_req_ids or record.preempted_req_ids
        ):
            return
        self._batch.part()
        for req_id in record.finished_req_ids:
            self._requests.pop(req_id, None)  # vLLM also names those that were aborted before they ever ran
        for req_id in record.preempted_req_ids:
            self._known(req_id, "preempted_req_ids").preempted = True
        for req_id in resumed:
            self._known(req_id, "resumed_req_ids").preempted = False
        for request in new:
            self._admit(request)
        self._check(faults.membership(record, req_ids))
        self._batch = _Batch(req_ids, [self._scheduled_request(req_id, record) for req_id in req_ids])

    def _known(self, req_id: str, field: str) -> Request:
        request = self._requests.get(req_id)
        if request is None:
            self._refuse(faults.unknown(req_id, field))
        return request

    def _admit(self, new: NewRequest) -> None:
        self._check(faults.admission(new, alive=new.req_id in self._requests, tells=self._tells))
        self._requests[new.req_id] = Request(new)

    def _scheduled_request(self, req_id: str, record: StepRecord) -> Request:
        request = self._requests.get(req_id)
        if request is None:
            self._refuse(faults.not_alive(req_id, record.finished_req_ids))
        if request.preempted:
            self._refuse(faults.preempted(req_id))
        return request

    def _place(self, record: StepRecord) -> None:
        """Rows of the block table that changed; new and resumed requests start wherever the scheduler says."""
        if record.scheduled_new_reqs or record.resumed_req_ids:
            entering = {new.req_id for new in record.scheduled_new_reqs}.union(record.resumed_req_ids)
            for row, request in enumerate(self._batch.requests):
                if request.req_id in entering:
                    self._batch.computed[row] = record.num_computed_tokens[row]
                    request.num_drafts = 0
        if record.resumed_req_ids:
            self._check(faults.resumed_without_blocks(record))
        if record.block_ids or record.new_block_ids:
            self._change_blocks(record)

    def _change_blocks(self, record: StepRecord) -> None:
        self._check(faults.block_rows(record, self._batch.req_ids, self._num_blocks))
        for req_id, blocks in record.block_ids.items():
            self._requests[req_id].blocks = blocks
        for req_id, blocks in record.new_block_ids.items():
            request = self._requests[req_id]
            request.blocks = blocks if req_id in record.resumed_req_ids else request.blocks + blocks
        self._batch.table = self._batch.rows()

    # what is computed

    def _fall_back(self, computed: Sequence[int]) -> None:
        """After drafts, num_computed_tokens may be less than what was scheduled: so many were rejected."""
        for request, start, end in zip(self._batch.requests, computed, self._batch.computed, strict=True):
            if not end - request.num_drafts <= start <= end:
                self._refuse(faults.continuity(request.req_id, start, end, request.num_drafts))

    def _query_start_loc(self, record: StepRecord) -> tuple[int, ...]:
        if record.num_scheduled_tokens != self._scheduled:
            self._scheduled = record.num_scheduled_tokens
            self._starts = tuple(accumulate(self._scheduled, initial=0))
        recorded, padded = record.query_start_loc, record.num_tokens_padded
        if recorded is not None and recorded != self._starts:
            self._refuse(faults.query_start_loc(recorded, self._starts))
        num_tokens = self._starts[-1]
        if num_tokens > MAX_TOKENS or (padded is not None and not num_tokens <= padded <= MAX_TOKENS):
            self._refuse(faults.num_tokens(num_tokens, padded, MAX_TOKENS))
        return self._starts

    def _slot_mapping(self, record: StepRecord, num_tokens: int) -> NDArray[np.int64]:
        slots = self._derived_slots(record, num_tokens)
        recorded = record.slot_mapping
        if recorded is not None and (len(recorded) != num_tokens or list(recorded) != slots):
            slots = self._reconcile(recorded, slots, record)
        if len(set(slots)) != num_tokens:
            self._check(faults.overlap(slots, self._starts, self._batch.req_ids))
        return np.array(slots, dtype=np.int64)

    def _derived_slots(self, record: StepRecord, num_tokens: int) -> list[int]:
        size, table, computed = self._block_size, self._batch.table, record.num_computed_tokens
        try:
            if num_tokens == len(table):  # each request one token
                pairs = zip(table, computed, strict=False)  # as long as each other; this line is the hottest
                return [blocks[start // size] * size + start % size for blocks, start in pairs]
            slots: list[int] = []
            for blocks, start, count in zip(table, computed, record.num_scheduled_tokens, strict=True):
                slots += span_slots(blocks, start, start + count, size)
            return slots
        except IndexError:
            self._refuse(faults.uncovered(self._batch.req_ids, record, table, size))

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
            self._check(faults.slots(slots, derived, self._starts, record, self._batch.req_ids))
        self._check(faults.padding(runs, num_tokens))
        return slots

    # what is known of it

    def _advance(self, record: StepRecord) -> tuple[tuple[int, ...], ...]:
        """Move the batch behind this step; returns the token ids told, one tuple a request."""
        batch, computed, scheduled = self._batch, record.num_computed_tokens, record.num_scheduled_tokens
        told = record.new_token_ids or ((),) * len(computed)
        if len(told) != len(computed):
            self._refuse(faults.lengths(record, len(computed)))
        if self._drafting:
            self._settle_drafts(computed)
        ends = list(map(add, computed, scheduled))
        if self._tells:
            self._check_told(record, told, ends)
        elif record.new_token_ids:
            self._check(faults.ids_at_level_none(record))
        batch.computed = ends
        batch.known = ends if batch.known == list(computed) else list(map(max, batch.known, ends))
        if self._drafting or record.scheduled_spec_decode_tokens:
            self._note_drafts(record)
        return told

    def _check_told(self, record: StepRecord, told: Sequence[Sequence[int]], ends: list[int]) -> None:
        known = self._batch.known
        if known == list(record.num_computed_tokens):
            untold = list(record.num_scheduled_tokens)
        else:
            untold = [end - start if end > start else 0 for start, end in zip(known, ends, strict=True)]
        if list(map(len, told)) != untold:
            self._refuse(faults.untold(self._batch.req_ids, told, known, ends))
        if record.scheduled_new_reqs or record.resumed_req_ids:
            self._check(faults.unknown_prefix(self._batch.req_ids, record.num_computed_tokens, known))

    def _settle_drafts(self, computed: Sequence[int]) -> None:
        """Drafts are known where this step starts behind them."""
        for row, request in enumerate(self._batch.requests):
            if request.num_drafts:
                self._batch.known[row] = max(self._batch.known[row], computed[row])

    def _note_drafts(self, record: StepRecord) -> None:
        drafts = record.scheduled_spec_decode_tokens
        self._check(faults.drafts(record, self._batch.req_ids, self._tells))
        self._batch.known = list(self._batch.known)
        for row, request in enumerate(self._batch.requests):
            request.num_drafts = len(drafts.get(request.req_id, ()))
            self._batch.known[row] -= request.num_drafts
        self._drafting = any(request.num_drafts for request in self._requests.values())

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


def slot_runs(slots: Sequence[int] | NDArray[np.int64]) -> tuple[int | tuple[int, ...], ...]:
    """``slots`` as they are written: runs of three or more as ``(first, count)``, pads too."""
    values = np.asarray(slots, dtype=np.int64)
    goes_on = np.diff(values) == (values[:-1] != PAD)  # by one, or from pad to pad
    if not (goes_on[1:] & goes_on[:-1]).any():
        return tuple(values.tolist())
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    lengths = np.diff(starts, append=len(values))
    runs: list[int | tuple[int, ...]] = []
    for start, length, first in zip(starts.tolist(), lengths.tolist(), values[starts].tolist(), strict=True):
        runs += [(first, length)] if length >= 3 else values[start : start + length].tolist()
    return tuple(runs)
