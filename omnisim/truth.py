"""What each request must receive: the schedule and the rows' names, and nothing about any cache.

The slots of a step are read from its ``slot_mapping``, those of a hit from its block table by the arithmetic below;
nothing is shared with ``omnisim.cache``. A *name* is a uint64 that stands for one row's content (``omnisim.rows``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omnisim.rows.naming import Names
from omnisim.trace.model import Geometry, Step

__all__ = ["MAX_ROW_KEYS", "Due", "Grade", "HitKind", "Prefix", "SlotLedger", "Truth"]

Grade = Literal["content", "provenance"]
MAX_ROW_KEYS = 64
"""One bit each in a uint64."""
HitKind = Literal["same step", "running owner", "finished owner", "unknown owner", "resumed"]


class SlotLedger:
    """Which row was computed last in each slot: its name, its request, its step, and the keys emitted with it.

    ``lasts`` says whether it was its request's last one in that step.
    """

    def __init__(self, num_slots: int) -> None:
        self.names = np.zeros(num_slots, dtype=np.uint64)
        self.steps = np.full(num_slots, -1, dtype=np.int32)
        self.requests = np.zeros(num_slots, dtype=np.int32)
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.lasts = np.zeros(num_slots, dtype=np.bool_)
        self._ordinals: dict[str, int] = {}
        self._num_requests = 0

    def record(self, step: Step, names_T: NDArray[np.uint64], lasts_T: NDArray[np.bool_], keys: np.uint64) -> None:
        """Enter a step's rows; ``keys`` has a bit for each row key that the step emits."""
        for new in step.scheduled_new_reqs:
            self._num_requests += 1
            self._ordinals[new.req_id] = self._num_requests
        ordinals_T = np.repeat([self._ordinals[req_id] for req_id in step.req_ids], step.num_scheduled_tokens)
        slots, stored = step.slot_mapping, step.slot_mapping >= 0
        if not stored.all():
            slots, names_T, ordinals_T, lasts_T = slots[stored], names_T[stored], ordinals_T[stored], lasts_T[stored]
        self.names[slots] = names_T
        self.steps[slots] = step.index
        self.requests[slots] = ordinals_T
        self.keys[slots] = keys
        self.lasts[slots] = lasts_T

    def forget(self, req_ids: Sequence[str]) -> None:
        """These requests are over: what they computed stays, their ids do not."""
        for req_id in req_ids:
            self._ordinals.pop(req_id, None)

    def hit_kind(self, slots: NDArray[np.int64], step: Step) -> HitKind:
        """How the rows of a hit came there."""
        if (self.steps[slots] < 0).any():
            return "unknown owner"
        if (self.steps[slots] == step.index).any():
            return "same step"
        owners = set(self.requests[slots].tolist())
        return "finished owner" if owners.isdisjoint(self._ordinals.values()) else "running owner"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What a request that enters with computed tokens is due before this step's rows, by position ``[0, computed)``.

    ``names`` are due; ``keys`` has a bit for each row key that was emitted when the slot was computed, and ``lasts``
    says whether its row was a request's last then; ``known`` is false where nobody computed the slot in this trace.
    """

    names: NDArray[np.uint64]
    slots: NDArray[np.int64]
    keys: NDArray[np.uint64]
    lasts: NDArray[np.bool_]
    known: NDArray[np.bool_]
    kind: HitKind


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """What one step owes: ``names_T`` of its own rows in batch order, and the prefixes by row of the batch.

    ``lasts_T`` are the step's own, ``Step.lasts_T``.
    ``had`` are the positions that a request (by row of the batch) had already received before it was preempted, or
    before it was sent again with more to compute: their rows are due, and may be left out.
    """

    step: Step
    names_T: NDArray[np.uint64]
    lasts_T: NDArray[np.bool_]
    emitted: Sequence[str]
    prefixes: Mapping[int, Prefix]
    had: Mapping[int, int]


class Truth:
    """Follows a trace and says, step by step, what is due.

    Grade *content*: a hit is due the rows of its own prefix, so that a mistake of the scheduler or of its block hashes
    is found too. Grade *provenance* (traces without token ids): a hit is due the rows last written in its slots. In
    both, a key has rows at the positions where the step that computed them emitted it.
    """

    def __init__(self, geometry: Geometry, row_keys: Sequence[str], names: Names, grade: Grade) -> None:
        assert len(row_keys) <= MAX_ROW_KEYS
        self.ledger = SlotLedger(geometry.num_blocks * geometry.block_size)
        self.grade = grade
        self._block_size = geometry.kernel_block_size or geometry.block_size
        self._names = names
        self._bits = {key: np.uint64(1 << bit) for bit, key in enumerate(row_keys)}
        self._delivered: dict[str, int] = {}
        self._had: dict[str, int] = {}

    @property
    def alive(self) -> frozenset[str]:
        """Requests that have been scheduled and are not over."""
        return frozenset(self._delivered)

    def bit(self, key: str) -> np.uint64:
        """The bit of a row key in ``Prefix.keys``."""
        return self._bits[key]

    def names_of(self, req_id: str) -> NDArray[np.uint64]:
        """Names of a request's own positions, as far as they are known."""
        return self._names.of(req_id)

    def due(self, step: Step, emitted: Sequence[str]) -> Due:
        """What ``step`` owes; steps must come in order, each once."""
        self._finish(step)
        replaced = {new.req_id: self._names.of(new.req_id) for new in step.scheduled_new_reqs if new.replace}
        names_T = self._names.advance(step)
        lasts_T = step.lasts_T
        self.ledger.record(step, names_T, lasts_T, self._bits_of(emitted))
        prefixes = self._prefixes(step)
        return Due(step, names_T, lasts_T, emitted, prefixes, self._deliver(step, prefixes, replaced))

    def _deliver(
        self, step: Step, prefixes: Mapping[int, Prefix], replaced: Mapping[str, NDArray[np.uint64]]
    ) -> dict[int, int]:
        """Note how far each request gets; positions that a resumed one had before, by row of the batch.

        One that takes the place of another of its id had the rows that they have in common: it may be the next chunk
        of one streaming prompt.
        """
        for new in step.scheduled_new_reqs:
            self._had.pop(new.req_id, None)
        for row, prefix in prefixes.items():
            if (old := replaced.get(step.req_ids[row])) is not None:
                both = min(len(old), len(prefix.names), self._delivered.get(step.req_ids[row], 0))
                differs = np.flatnonzero(old[:both] != prefix.names[:both])
                self._had[step.req_ids[row]] = int(differs[0]) if len(differs) else both
        for req_id in step.resumed_req_ids:
            self._had[req_id] = max(self._delivered[req_id], self._had.get(req_id, 0))
        for req_id, computed, scheduled in zip(
            step.req_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            self._delivered[req_id] = computed + scheduled
        if not self._had:
            return {}
        had = {row: self._had[req_id] for row, req_id in enumerate(step.req_ids) if req_id in self._had}
        for row, stop in had.items():
            if self._delivered[step.req_ids[row]] >= stop:
                del self._had[step.req_ids[row]]
        return had

    def _bits_of(self, keys: Sequence[str]) -> np.uint64:
        return np.uint64(sum(int(bit) for key, bit in self._bits.items() if key in keys))

    def _finish(self, step: Step) -> None:
        self.ledger.forget(step.finished_req_ids)
        for req_id in step.finished_req_ids:
            self._delivered.pop(req_id, None)
            self._had.pop(req_id, None)

    def _prefixes(self, step: Step) -> dict[int, Prefix]:
        new = {request.req_id for request in step.scheduled_new_reqs}
        if not new and not step.resumed_req_ids:
            return {}
        resumed = set(step.resumed_req_ids)
        return {
            row: self._prefix(step, row, resumed=req_id in resumed)
            for row, req_id in enumerate(step.req_ids)
            if step.num_computed_tokens[row] and (req_id in new or req_id in resumed)
        }

    def _prefix(self, step: Step, row: int, resumed: bool) -> Prefix:
        req_id, num_computed = step.req_ids[row], step.num_computed_tokens[row]
        positions = np.arange(num_computed)
        blocks = np.asarray(step.block_table[row], dtype=np.int64)[positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        names = self.ledger.names[slots] if self.grade == "provenance" else self._names.of(req_id)[:num_computed]
        return Prefix(
            names=names,
            slots=slots,
            keys=self.ledger.keys[slots],
            lasts=self.ledger.lasts[slots],
            known=self.ledger.steps[slots] >= 0,
            kind="resumed" if resumed else self.ledger.hit_kind(slots, step),
        )
