"""``OmniTensorPrefixCache``: rows of hidden states and multimodal outputs, cached by vLLM's own slots.

The public names and arguments are those of vLLM-Omni's class of this name, so that a runner written for it runs
unchanged. What is served is decided row by row, by ``omnisim.cache.slots``: a row that its slot's last tenant did not
write is not served, whatever the block table says.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.cache.checks import block_ids_behind, first_rows, refuse_layout, slots_of_step, staged_rows
from omnisim.cache.errors import (
    AmbiguousKey,
    BadCounts,
    CacheMemoryExceeded,
    NeverWritten,
    RowsDiscarded,
    RowsMissing,
)
from omnisim.cache.passthrough import build_mm_cpu, hand_out, hand_out_declared
from omnisim.cache.policy import DEFAULT_POLICY, KeyKind, ModelPolicy
from omnisim.cache.slots import (
    PAD_SLOT_ID,
    RowStore,
    SlotClock,
    Slots,
    num_blocks_of,
    share_a_block,
    slots_behind,
    stored,
)
from omnisim.cache.spans import BatchSpans, InputBatch, RequestSpan

__all__ = ["Counters", "OmniTensorPrefixCache"]

HIDDEN_STATES = "hidden_states"
_DISCARDED = "it was deferred and never staged, or discarded before it was committed"
_NOT_WRITTEN = "nobody wrote it through this cache"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What a report can read. Rows by key; ``bytes_copied`` counts rows moved into and out of the storage."""

    hits: int = 0
    rows_written: Counter[str] = field(default_factory=Counter)
    rows_served: Counter[str] = field(default_factory=Counter)
    bytes_copied: int = 0


class _Chunk(NamedTuple):
    """Deferred rows of one request and step, on the model's device, with the slots they belong to.

    Both are copies of the request's own: it may hold them long after the others of its step are gone.
    """

    rows: Tensor
    slots: Slots
    turn: int


@dataclass(slots=True, eq=False)
class _Step:
    """What the calls of one step have told so far; all of them have one turn."""

    num_tokens_padded: int = 0
    told: dict[str, list[Slots]] = field(default_factory=dict)
    """By deferred key, the slots of its rows that are still to be staged: an array for each update."""
    moved: dict[RowStore, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The model's tensor, and its rows on the CPU."""
    emitted: set[RowStore] = field(default_factory=set)


def _turn_of(chunk: _Chunk) -> int:
    return chunk.turn


class _Source(NamedTuple):
    """Where the cached rows of a hit are: its row in the batch, its blocks, and which computed positions have a row."""

    row: int
    block_ids: Slots
    present: NDArray[np.bool_]


class OmniTensorPrefixCache:
    """Rows ``[num_blocks, block_size, *shape]`` by key, in CPU memory, indexed by vLLM's slots.

    ``policy`` declares what the model emits; keys that it does not declare are judged by their shape. ``max_nbytes``
    bounds the storage: opening a key beyond it raises ``CacheMemoryExceeded``. Storage starts as zeros, and no row is
    served that was not written.

    A key that is not declared may be a row a request, which had as many rows as there were tokens. A hit on it raises
    ``AmbiguousKey`` until a merge or a stage has other numbers of requests, in the batch and scheduled, than of rows.
    An update sees no batch; two of its tokens in one block are taken as proof as long as no merge has as many requests
    as rows. What a caller that never merges cannot show is that no request without tokens was in its batch.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hidden_size: int,
        hs_dtype: torch.dtype,
        *,
        policy: ModelPolicy = DEFAULT_POLICY,
        max_nbytes: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.default_hidden_size = hidden_size
        self.policy = policy
        self.counters = Counters()
        self.mm_outputs_cache: dict[str, Tensor] = {}
        self.mm_cache_keys: set[str] = set()
        self._max_nbytes = max_nbytes
        self._clock = SlotClock(num_blocks, block_size)
        self._step = -1
        self._now = _Step()
        self._hits: set[str] = set()
        self._stores: dict[str, RowStore] = {}
        self._deferred_mm_outputs: dict[str, dict[str, list[_Chunk]]] = {}
        self._told_groups = False
        self._hidden = self._new_store(HIDDEN_STATES, (hidden_size,), hs_dtype, held=0)
        self._hidden.known_as_rows = True
        self.hidden_states_cache = self._hidden.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all storage, deferred chunks left out."""
        return self._hidden.rows.nbytes + sum(store.rows.nbytes for store in self._stores.values())

    @property
    def deferred_req_ids(self) -> frozenset[str]:
        """Requests that hold deferred rows."""
        return frozenset(req_id for req_id, per_key in self._deferred_mm_outputs.items() if per_key)

    # Marks

    def add_prefix_cached_new_req_id(self, req_id: str) -> None:
        """Mark a request that enters this step with computed tokens: its merged rows start at position 0."""
        self.counters.hits += req_id not in self._hits
        self._hits.add(req_id)

    def reset_prefix_cached_new_req_ids(self) -> None:
        """Begin a step: forget the marks of the step before."""
        self._hits.clear()
        self._step += 1
        self._begin_turn()

    def has_prefix_cached_new_req_ids(self) -> bool:
        """Whether some request of this step is marked."""
        return bool(self._hits)

    def _begin_turn(self) -> None:
        self._clock.tick()
        self._now = _Step()

    def _begin_turn_if_untold(self, stores: Iterable[RowStore]) -> None:
        """Before the first reset nobody tells steps apart: there a key that is emitted again begins the next one."""
        if self._step < 0:
            emitted = set(stores)
            if not self._now.emitted.isdisjoint(emitted):
                self._begin_turn()
            self._now.emitted |= emitted

    # Writing

    def maybe_init_missing_mm_cache_keys(self, multimodal_outputs: Mapping[str, Any], seq_len: int) -> None:
        """Open storage for each unknown tensor of 2 or more dimensions whose first is ``seq_len`` (padded count).

        A declared kind goes before the shape: only rows are opened, and those whatever their first dimension.
        """
        for key, value in multimodal_outputs.items():
            if key not in self._stores and isinstance(value, Tensor) and self._is_row_key(key, value, seq_len):
                self._open(key, value)

    def update_omni_tensor_prefix_cache(
        self,
        hidden_states: Tensor | None,
        multimodal_outputs: Mapping[str, Any] | None,
        num_tokens_unpadded: int,
        slot_mapping: Tensor,
        num_tokens_padded: int | None = None,
        skip_mm_cache_keys: Collection[str] | None = None,
        hidden_states_cpu: Tensor | None = None,
    ) -> None:
        """Write this step's first ``num_tokens_unpadded`` rows at ``slot_mapping``.

        A token whose slot is ``PAD_SLOT_ID`` is not stored, as its KV is not. Keys in ``skip_mm_cache_keys`` are opened
        and left to ``stage_deferred_mm_outputs``. No row is written unless all can be. A step may be told in several
        updates, of other slots or other keys.
        """
        num_tokens = num_tokens_unpadded
        num_padded = num_tokens if num_tokens_padded is None else num_tokens_padded
        slots, taken = slots_of_step(slot_mapping, num_tokens, self._clock, self._step)
        values = multimodal_outputs or {}
        for seq_len in {num_padded, num_tokens}:
            self.maybe_init_missing_mm_cache_keys(values, seq_len)
        cached = {key: value for key, value in values.items() if self._is_cached(key, value)}
        deferred = cached.keys() & (skip_mm_cache_keys or ())
        for key in deferred:
            first_rows(self._stores[key], cached[key], num_tokens, self._step)
        rows = {
            self._stores[key]: self._on_cpu(self._stores[key], value, num_tokens)
            for key, value in cached.items()
            if key not in deferred
        }
        if hidden_states is not None or hidden_states_cpu is not None:
            rows[self._hidden] = self._hidden_on_cpu(hidden_states, num_tokens, hidden_states_cpu)
        if len(taken) < len(slots):
            kept = torch.from_numpy(slots >= 0)
            rows = {store: value[kept] for store, value in rows.items()}
        self._begin_turn_if_untold(chain(rows, (self._stores[key] for key in deferred)))
        self._clock.take(taken)
        self._now.num_tokens_padded = num_padded
        for key in deferred:
            self._tell(key, slots)
        for store, value in rows.items():
            self._write(store, taken, value, self._clock.now)
        for key, value in cached.items():
            self._note_rows(self._stores[key], len(value) in (num_tokens, num_padded), taken)

    def _tell(self, key: str, slots: Slots) -> None:
        """Where rows belong that will be staged: lost, if they are not."""
        self._stores[key].put_off(stored(slots))
        told = self._now.told.setdefault(key, [])
        if not any(np.array_equal(slots, before) for before in told):
            told.append(slots)

    def _note_rows(self, store: RowStore, is_row_count: bool, slots: Slots) -> None:
        """Two tokens in a block that is being filled are one request's: fewer requests were scheduled than tokens."""
        if is_row_count and not (store.known_as_rows or store.maybe_requests or store.seems_rows):
            store.seems_rows = share_a_block(slots, self.block_size)

    def _on_cpu(self, store: RowStore, value: Tensor, num_tokens: int) -> Tensor:
        """The first ``num_tokens`` rows on the CPU, moved once a step: the model overwrites its buffer after that."""
        source, rows = self._now.moved.get(store, (None, value))
        if source is not value or len(rows) < num_tokens:
            rows = first_rows(store, value, num_tokens, self._step).cpu().contiguous()
            if self._step >= 0:
                self._now.moved[store] = value, rows
        return rows if len(rows) == num_tokens else rows[:num_tokens]

    def _hidden_on_cpu(self, hidden: Tensor | None, num_tokens: int, staged: Tensor | None) -> Tensor:
        """The first ``num_tokens`` hidden rows on the CPU, of the staged copy alone where there is one."""
        if staged is not None:
            return staged_rows(self._hidden, hidden, num_tokens, staged, self._step)
        if hidden is None:
            expected = f"hidden states of {num_tokens} scheduled tokens"
            raise RowsMissing(key=HIDDEN_STATES, step=self._step, expected=expected, found="None")
        return self._on_cpu(self._hidden, hidden, num_tokens)

    def _write(self, store: RowStore, slots: Slots, rows: Tensor, turns: NDArray[np.int64] | int) -> None:
        """Write a row at each slot, none of which is the pad slot."""
        store.write(slots, rows, turns)
        self.counters.rows_written[store.key] += len(slots)
        self.counters.bytes_copied += len(slots) * store.row_nbytes

    # Deferred rows

    def stage_deferred_mm_outputs(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        multimodal_outputs: Mapping[str, Any] | None,
        num_scheduled_tokens: Mapping[str, int],
        deferred_mm_cache_keys: Collection[str],
    ) -> None:
        """Keep each request's rows of the deferred keys on their device, for ``commit_deferred_mm_outputs``.

        If updates of this step named the key in ``skip_mm_cache_keys``, their slot mappings, one after the other, tell
        where the rows belong. Otherwise the block table does, and ``num_computed_tokens_cpu`` must already count this
        step's tokens.
        """
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens, self._step)
        values = multimodal_outputs or {}
        staged: dict[str, Tensor] = {}
        for key in deferred_mm_cache_keys:
            value = values.get(key)
            if isinstance(value, Tensor) and (value.ndim >= 2 or key in self._stores):
                store = self._stores.get(key) or self._open(key, value)
                staged[key] = first_rows(store, value, spans.num_tokens, self._step)
                store.known_as_rows |= spans.are_a_row_a_token(len(value))
        slots = self._slots_to_stage(staged, spans)
        self._begin_turn_if_untold(self._stores[key] for key in staged if key not in self._now.told)
        for key, rows in staged.items():
            self._stage(key, rows, slots[key], spans)

    def _slots_to_stage(self, keys: Iterable[str], spans: BatchSpans) -> dict[str, Slots]:
        """By key, the slot of each token in ``spans``."""
        slots: dict[str, Slots] = {}
        by_table: Slots | None = None
        for key in keys:
            if (told := self._now.told.get(key)) is None:
                slots[key] = by_table = self._slots_by_table(spans) if by_table is None else by_table
            else:
                slots[key] = np.concatenate(told)
                self._refuse_other_tokens(key, len(slots[key]), spans)
        return slots

    def _refuse_other_tokens(self, key: str, num_told: int, spans: BatchSpans) -> None:
        if num_told != spans.num_tokens:
            raise BadCounts(
                key=key,
                step=self._step,
                expected=f"to stage the {num_told} tokens whose slots this step's updates told",
                found=f"{spans.num_tokens} tokens",
            )

    def _stage(self, key: str, rows: Tensor, slots: Slots, spans: BatchSpans) -> None:
        """Keep a copy of each request's rows; the slots are of this step's turn from now on."""
        parts = spans.split_apart(rows)
        self._clock.take(stored(slots))
        self._stores[key].put_off(stored(slots))
        self._now.told.pop(key, None)
        for req_id, start, count in zip(spans.req_ids, spans.starts, spans.counts, strict=True):
            if count:
                chunk = _Chunk(parts[req_id], slots[start : start + count].copy(), self._clock.now)
                self._deferred_mm_outputs.setdefault(req_id, {}).setdefault(key, []).append(chunk)

    def _slots_by_table(self, spans: BatchSpans) -> Slots:
        slots = np.full(spans.num_tokens, PAD_SLOT_ID, dtype=np.int64)
        for request in spans.requests:
            if request.num_tokens:
                slots[request.start : request.stop] = self._slots_up_to_computed(request, spans)
        return slots

    def _slots_up_to_computed(self, request: RequestSpan, spans: BatchSpans) -> Slots:
        stop = spans.num_computed(request)
        if stop < request.num_tokens:
            raise BadCounts(
                request=request.req_id,
                step=self._step,
                expected=f"num_computed_tokens_cpu to count this step's {request.num_tokens} tokens",
                found=str(stop),
            )
        slots = slots_behind(self._block_ids(request, spans), self.block_size, stop)
        return slots[stop - request.num_tokens :]

    def commit_deferred_mm_outputs(self, finished_req_ids: Iterable[str], input_batch: InputBatch) -> None:
        """Write the deferred rows of these requests, except where somebody else has taken over the slot.

        Where they belong was settled when they were staged, so a request may have left the batch already.
        """
        for req_id in tuple(finished_req_ids):
            for key, chunks in self._deferred_mm_outputs.pop(req_id, {}).items():
                self._commit(self._stores[key], chunks)

    def discard_deferred_mm_outputs(self, req_id: str) -> None:
        """Drop the deferred rows of a request that leaves with no commit; a later hit on them is refused."""
        self._deferred_mm_outputs.pop(req_id, None)

    def _commit(self, store: RowStore, chunks: list[_Chunk]) -> None:
        rows = torch.cat([chunk.rows for chunk in chunks]).cpu()
        slots = np.concatenate([chunk.slots for chunk in chunks])
        turns = np.repeat([chunk.turn for chunk in chunks], [len(chunk.slots) for chunk in chunks])
        held = self._clock.holds(slots, turns)
        if not held.all():
            rows, slots, turns = rows[torch.from_numpy(held)], slots[held], turns[held]
        self._write(store, slots, rows, turns)

    def _commit_owners_of(self, store: RowStore, slots: Slots) -> None:
        """Commit early the requests whose deferred rows a hit is about to read; stop at a row that nobody holds."""
        written = store.written.reshape(-1)
        for slot, turn in zip(slots.tolist(), self._clock.by_slot[slots].tolist(), strict=True):
            if written[slot] != turn and not self._commit_owner_of(store, slot, turn):
                return

    def _commit_owner_of(self, store: RowStore, slot: int, turn: int) -> bool:
        for per_key in self._deferred_mm_outputs.values():
            chunks = per_key.get(store.key, [])
            first, stop = bisect_left(chunks, turn, key=_turn_of), bisect_right(chunks, turn, key=_turn_of)
            if any(slot in chunk.slots for chunk in chunks[first:stop]):
                self._commit(store, per_key.pop(store.key))
                return True
        return False

    # Merging

    def get_merged_hidden_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        hidden_states: Tensor,
        num_scheduled_tokens: Mapping[str, int],
        hidden_states_cpu: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Request id to ``[rows, hidden_size]``: a marked hit's cached rows and this step's, or this step's alone.

        Rows of requests without a hit are parts of one copy of the step's: ``clone`` what is kept for long or sent to
        another process, or it takes those of the others along. A storage for each would make a decode step of 64
        requests 170 us instead of 133 (``omnisim bench --only decode``, a shared virtual machine).
        """
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens, self._step)
        rows = self._hidden_on_cpu(hidden_states, spans.num_tokens, hidden_states_cpu)
        return self._merge(self._hidden, rows, spans)

    def get_merged_multimodal_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        multimodal_outputs: Mapping[str, Any] | None,
        num_scheduled_tokens: Mapping[str, int],
    ) -> dict[str, dict[str, Any]]:
        """Name to request id to value: cached keys merge like hidden states, every other value passes through.

        Rows of a cached key without a hit are parts of one copy, as those of ``get_merged_hidden_states``.
        """
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens, self._step)
        values = multimodal_outputs or {}
        cached = {key: value for key, value in values.items() if self._is_cached(key, value)}
        merged: dict[str, dict[str, Any]] = {key: self._merge_key(key, rows, spans) for key, rows in cached.items()}
        rest = build_mm_cpu({key: value for key, value in values.items() if key not in cached})
        return merged | {key: self._hand_out(key, value, spans) for key, value in rest.items()}

    def _merge_key(self, key: str, value: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        store = self._stores[key]
        rows = self._on_cpu(store, value, spans.num_tokens)
        is_known = spans.are_a_row_a_token(len(value))
        store.known_as_rows |= is_known
        merged = self._merge(store, rows, spans)
        store.maybe_requests |= not is_known
        return merged

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        if (kind := self.policy.kinds.get(key)) is not None:
            return hand_out_declared(key, kind, value, spans, self._step)
        return hand_out(key, value, spans, self._now.num_tokens_padded, self._hits, self._step)

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        hits = self._hits.intersection(spans.req_ids)
        if not hits:
            return spans.split(rows)
        self._tell_groups(spans.input_batch)
        sources = {r: self._source(store, r, spans) for r in spans.requests if r.req_id in hits}
        merged = spans.split(rows) if len(hits) < len(spans.req_ids) else dict.fromkeys(spans.req_ids, rows)
        for request, source in sources.items():  # all is checked by now: torch's threads stay awake between copies
            merged[request.req_id] = self._merged_hit(store, rows[request.start : request.stop], source)
        return merged

    def _source(self, store: RowStore, request: RequestSpan, spans: BatchSpans) -> _Source:
        num_computed = spans.num_computed(request)
        block_ids = self._block_ids(request, spans)
        return _Source(request.row, block_ids, self._present(store, block_ids, num_computed, request))

    def _merged_hit(self, store: RowStore, new: Tensor, source: _Source) -> Tensor:
        """Cached rows of the computed positions that have one, and the new rows after them."""
        _, block_ids, present = source
        num_computed, num_cached = len(present), int(np.count_nonzero(present))
        merged = torch.empty((num_cached + len(new), *store.shape), dtype=store.rows.dtype)
        if num_cached == num_computed:
            store.read_blocks(block_ids, merged[:num_cached])
        else:
            merged[:num_cached] = store.read_slots(slots_behind(block_ids, self.block_size, num_computed)[present])
        merged[num_cached:].copy_(new)
        self.counters.rows_served[store.key] += num_cached
        self.counters.bytes_copied += num_cached * store.row_nbytes
        return merged

    def _present(self, store: RowStore, block_ids: Slots, num_rows: int, request: RequestSpan) -> NDArray[np.bool_]:
        """Which of the first ``num_rows`` positions have a row; the others were computed without this key.

        Deferred rows among them are committed first. A position that nobody computed here, or whose row was lost,
        raises.
        """
        if store.holds_all(block_ids, num_rows) and not store.is_ambiguous:
            return np.ones(num_rows, dtype=np.bool_)
        present, lost = self._present_and_deferred(store, block_ids, num_rows)
        if lost.any():
            self._commit_owners_of(store, slots_behind(block_ids, self.block_size, num_rows)[lost])
            present, lost = self._present_and_deferred(store, block_ids, num_rows)
        if store.is_ambiguous and present.any():
            raise AmbiguousKey(
                key=store.key,
                request=request.req_id,
                step=self._step,
                expected="a key known to have a row a token (declare its kind in ModelPolicy.kinds)",
                found="one that every step so far may have had as many rows of as of requests",
            )
        if lost.any():
            raise RowsDiscarded(**self._missing_row(store, block_ids, request, int(lost.argmax()), _DISCARDED))
        if not present.all():
            unknown = ~present if store is self._hidden else store.turns(block_ids, num_rows)[0] == 0
            if unknown.any():
                raise NeverWritten(**self._missing_row(store, block_ids, request, int(unknown.argmax()), _NOT_WRITTEN))
        return present

    def _present_and_deferred(
        self, store: RowStore, block_ids: Slots, num_rows: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        computed, written, deferred = store.turns(block_ids, num_rows)
        present: NDArray[np.bool_] = (written == computed) & (computed > 0)
        return present, (deferred == computed) & (computed > 0) & ~present

    def _missing_row(
        self, store: RowStore, block_ids: Slots, request: RequestSpan, position: int, why: str
    ) -> dict[str, Any]:
        slot = store.slot_of(block_ids, position)
        null = " (block 0 is vLLM's null block)" if slot < self.block_size else ""
        return {
            "key": store.key,
            "request": request.req_id,
            "step": self._step,
            "expected": f"a row of position {position} in slot {slot}",
            "found": f"none: {why}{null}",
        }

    def _block_ids(self, request: RequestSpan, spans: BatchSpans) -> Slots:
        ids = self._get_cached_block_ids(request.row, spans.input_batch)
        geometry = self.num_blocks, self.block_size
        return block_ids_behind(ids, spans.num_computed(request), request, geometry, self._step)

    def _get_cached_block_ids(self, req_idx: int, input_batch: InputBatch) -> Any:
        """Block ids behind the computed tokens of row ``req_idx`` of the batch, a partly filled last one included."""
        table = input_batch.block_table[0]
        refuse_layout(table, self.block_size, self._step)
        num_blocks = num_blocks_of(int(input_batch.num_computed_tokens_cpu[req_idx]), self.block_size)
        return table.block_table.cpu[req_idx, :num_blocks]

    def _tell_groups(self, input_batch: InputBatch) -> None:
        num_groups = len(input_batch.block_table.block_tables)
        if num_groups > 1 and not self._told_groups:
            self._told_groups = True
            logger.warning("%d KV-cache groups: rows are cached by the first group's blocks only", num_groups)

    # Storage

    def _is_row_key(self, key: str, value: Tensor, seq_len: int) -> bool:
        kind = self.policy.kinds.get(key)
        if kind is not None:
            return kind is KeyKind.ROW and value.ndim >= 2
        return value.ndim >= 2 and value.shape[0] == seq_len

    def _is_cached(self, key: str, value: Any) -> bool:
        return key in self._stores and isinstance(value, Tensor)

    def _open(self, key: str, value: Tensor) -> RowStore:
        store = self._new_store(key, tuple(value.shape[1:]), value.dtype, held=self.nbytes)
        store.known_as_rows = self.policy.kinds.get(key) is KeyKind.ROW
        self._stores[key] = store
        self.mm_outputs_cache[key] = store.rows
        self.mm_cache_keys.add(key)
        return store

    def _new_store(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, held: int) -> RowStore:
        needed = held + self.num_blocks * self.block_size * int(np.prod(shape)) * dtype.itemsize
        if self._max_nbytes is not None and needed > self._max_nbytes:
            expected = f"at most {self._max_nbytes:,} bytes of storage"
            raise CacheMemoryExceeded(key=key, expected=expected, found=f"{needed:,} with this key")
        return RowStore(key, self._clock, shape, dtype)
