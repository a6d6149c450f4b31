"""``OmniTensorPrefixCache``: rows of hidden states and multimodal outputs, cached by vLLM's own slots.

The public names and arguments are those of vLLM-Omni's class of this name, so that a runner written for it runs
unchanged. What is served is decided row by row, by ``omnisim.cache.slots``: a row that its slot's last tenant did not
write is not served, whatever the block table says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.cache.checks import block_ids_behind, first_rows, hidden_on_cpu, refuse_layout, slots_of_step
from omnisim.cache.errors import AmbiguousKey, BadCounts, CacheMemoryExceeded, NeverWritten, RowsDiscarded
from omnisim.cache.passthrough import build_mm_cpu, hand_out, hand_out_declared
from omnisim.cache.policy import DEFAULT_POLICY, KeyKind, ModelPolicy
from omnisim.cache.slots import RowStore, SlotClock, Slots, num_blocks_of, slots_behind, stored
from omnisim.cache.spans import BatchSpans, InputBatch, RequestSpan

__all__ = ["Counters", "OmniTensorPrefixCache"]

HIDDEN_STATES = "hidden_states"
_DISCARDED = "it was discarded before it was committed"
_NOT_WRITTEN = "nobody wrote it through this cache"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What a report can read. Rows by key; ``bytes_copied`` counts rows moved into and out of the storage."""

    hits: int = 0
    rows_written: Counter[str] = field(default_factory=Counter)
    rows_served: Counter[str] = field(default_factory=Counter)
    bytes_copied: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Deferred rows of one request and step, on the model's device, with the slots they belong to."""

    rows: Tensor
    slots: Slots
    turn: int


@dataclass(slots=True, eq=False)
class _Turn:
    """This step's turn at its slots: the keys written in it so far, and those whose rows are still to be staged."""

    number: int
    slots: Slots
    keys: set[str]
    awaits_stage: set[str]
    num_tokens_padded: int = 0


class OmniTensorPrefixCache:
    """Rows ``[num_blocks, block_size, *shape]`` by key, in CPU memory, indexed by vLLM's slots.

    ``policy`` declares what the model emits; keys that it does not declare are judged by their shape. ``max_nbytes``
    bounds the storage: opening a key beyond it raises ``CacheMemoryExceeded``. Storage starts as zeros, and no row is
    served that was not written.
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
        self._turn: _Turn | None = None
        self._hits: set[str] = set()
        self._stores: dict[str, RowStore] = {}
        self._deferred_mm_outputs: dict[str, dict[str, list[_Chunk]]] = {}
        self._told_groups = False
        self._hidden = self._new_store(HIDDEN_STATES, (hidden_size,), hs_dtype, held=0)
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
        self._hits.add(req_id)
        self.counters.hits += 1

    def reset_prefix_cached_new_req_ids(self) -> None:
        """Begin a step: forget the marks of the step before."""
        self._hits.clear()
        self._step += 1
        self._turn = None

    def has_prefix_cached_new_req_ids(self) -> bool:
        """Whether some request of this step is marked."""
        return bool(self._hits)

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
        and left to ``stage_deferred_mm_outputs``. No row is written unless all can be.
        """
        num_tokens = num_tokens_unpadded
        num_padded = num_tokens if num_tokens_padded is None else num_tokens_padded
        slots = slots_of_step(slot_mapping, num_tokens, self.num_blocks * self.block_size, self._step)
        values = multimodal_outputs or {}
        for seq_len in {num_padded, num_tokens}:
            self.maybe_init_missing_mm_cache_keys(values, seq_len)
        cached = {key for key, value in values.items() if self._is_cached(key, value)}
        deferred = cached.intersection(skip_mm_cache_keys or ())
        writes = {key: first_rows(self._stores[key], values[key], num_tokens, self._step) for key in cached - deferred}
        hidden = None
        if hidden_states is not None:
            hidden = hidden_on_cpu(self._hidden, hidden_states, num_tokens, hidden_states_cpu, self._step)
        turn = self._turn_at(slots, cached if hidden is None else cached | {HIDDEN_STATES})
        turn.awaits_stage |= deferred
        turn.num_tokens_padded = num_padded
        for key, rows in writes.items():
            self._write(self._stores[key], slots, rows.cpu().contiguous(), turn.number)
        if hidden is not None:
            self._write(self._hidden, slots, hidden, turn.number)

    def _turn_at(self, slots: Slots, keys: set[str]) -> _Turn:
        """A new turn at ``slots``, unless this call goes on with the last one: same step, same slots, other keys."""
        turn = self._turn
        if turn is None or not turn.keys.isdisjoint(keys) or not np.array_equal(turn.slots, slots):
            turn = self._turn = _Turn(self._clock.take(slots), slots, set(), set())
        turn.keys |= keys
        return turn

    def _write(self, store: RowStore, slots: Slots, rows: Tensor, turns: NDArray[np.int64] | int) -> None:
        if len(slots) and slots.min() < 0:
            kept = slots >= 0
            slots, rows = slots[kept], rows[torch.from_numpy(kept)]
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

        If this step's update named the key in ``skip_mm_cache_keys``, its slot mapping tells where the rows belong.
        Otherwise the block table does, and ``num_computed_tokens_cpu`` must already count this step's tokens.
        """
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens)
        values = multimodal_outputs or {}
        for key in deferred_mm_cache_keys:
            value = values.get(key)
            if isinstance(value, Tensor) and (value.ndim >= 2 or key in self._stores):
                store = self._stores.get(key) or self._open(key, value)
                store.known_as_rows |= spans.tells_tokens_from_requests
                self._stage(key, first_rows(store, value, spans.num_tokens, self._step), spans)

    def _stage(self, key: str, rows: Tensor, spans: BatchSpans) -> None:
        turn = self._turn if self._turn is not None and key in self._turn.awaits_stage else None
        if turn is not None:
            turn.awaits_stage.discard(key)
        for request in spans.requests:
            if request.num_tokens:
                span = slice(request.start, request.stop)
                slots = turn.slots[span] if turn is not None else self._slots_up_to_computed(request, spans)
                chunk = _Chunk(rows[span].clone(), slots, self._turn_of_chunk(slots))
                self._deferred_mm_outputs.setdefault(request.req_id, {}).setdefault(key, []).append(chunk)

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

    def _turn_of_chunk(self, slots: Slots) -> int:
        """This step's turn where its update covered these slots, else a turn of their own."""
        if self._turn is not None and self._clock.holds(stored(slots), self._turn.number).all():
            return self._turn.number
        return self._clock.take(slots)

    def commit_deferred_mm_outputs(self, finished_req_ids: Iterable[str], input_batch: InputBatch) -> None:
        """Write the deferred rows of these requests, except where somebody else has taken over the slot.

        Where they belong was settled when they were staged, so a request may have left the batch already.
        """
        for req_id in tuple(finished_req_ids):
            for key, chunks in self._deferred_mm_outputs.pop(req_id, {}).items():
                self._commit(self._stores[key], chunks)

    def discard_deferred_mm_outputs(self, req_id: str) -> None:
        """Drop the deferred rows of a request that leaves with no commit; a later hit on them is refused."""
        for key, chunks in self._deferred_mm_outputs.pop(req_id, {}).items():
            for chunk in chunks:
                self._stores[key].drop(chunk.slots, chunk.turn)

    def _commit(self, store: RowStore, chunks: list[_Chunk]) -> None:
        rows = torch.cat([chunk.rows for chunk in chunks]).cpu()
        slots = np.concatenate([chunk.slots for chunk in chunks])
        turns = np.repeat([chunk.turn for chunk in chunks], [len(chunk.slots) for chunk in chunks])
        held = self._clock.holds(slots, turns)
        if not held.all():
            rows, slots, turns = rows[torch.from_numpy(held)], slots[held], turns[held]
        self._write(store, slots, rows, turns)

    def _commit_owners_of(self, store: RowStore, slots: Slots) -> None:
        """Commit early the requests whose deferred rows a hit is about to read."""
        wanted = set(slots.tolist())
        for per_key in self._deferred_mm_outputs.values():
            chunks = per_key.get(store.key, [])
            if any(not wanted.isdisjoint(chunk.slots.tolist()) for chunk in chunks):
                self._commit(store, per_key.pop(store.key))

    # Merging

    def get_merged_hidden_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        hidden_states: Tensor,
        num_scheduled_tokens: Mapping[str, int],
        hidden_states_cpu: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Request id to ``[rows, hidden_size]``: a marked hit's cached rows and this step's, or this step's alone."""
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens)
        rows = hidden_on_cpu(self._hidden, hidden_states, spans.num_tokens, hidden_states_cpu, self._step)
        return self._merge(self._hidden, rows, spans)

    def get_merged_multimodal_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        multimodal_outputs: Mapping[str, Any] | None,
        num_scheduled_tokens: Mapping[str, int],
    ) -> dict[str, dict[str, Any]]:
        """Name to request id to value: cached keys merge like hidden states, every other value passes through."""
        spans = BatchSpans.of(query_start_loc, input_batch, num_scheduled_tokens)
        values = multimodal_outputs or {}
        cached = {key: value for key, value in values.items() if self._is_cached(key, value)}
        merged: dict[str, dict[str, Any]] = {key: self._merge_key(key, rows, spans) for key, rows in cached.items()}
        rest = build_mm_cpu({key: value for key, value in values.items() if key not in cached})
        return merged | {key: self._hand_out(key, value, spans) for key, value in rest.items()}

    def _merge_key(self, key: str, value: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        store = self._stores[key]
        rows = first_rows(store, value, spans.num_tokens, self._step).cpu().contiguous()
        store.known_as_rows |= spans.tells_tokens_from_requests
        merged = self._merge(store, rows, spans)
        store.maybe_requests |= not spans.tells_tokens_from_requests
        return merged

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        if (kind := self.policy.kinds.get(key)) is not None:
            return hand_out_declared(key, kind, value, spans, self._step)
        num_padded = self._turn.num_tokens_padded if self._turn is not None else spans.num_tokens
        return hand_out(key, value, spans, num_padded, self._hits, self._step)

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        hits = self._hits.intersection(spans.req_ids)
        if not hits:
            return spans.split(rows)
        self._tell_groups(spans.input_batch)
        merged = spans.split(rows) if len(hits) < len(spans.req_ids) else dict.fromkeys(spans.req_ids, rows)
        for request in spans.requests:
            if request.req_id in hits:
                merged[request.req_id] = self._merged_hit(store, rows[request.start : request.stop], request, spans)
        return merged

    def _merged_hit(self, store: RowStore, new: Tensor, request: RequestSpan, spans: BatchSpans) -> Tensor:
        """Cached rows of the computed positions that have one, and the new rows after them."""
        num_computed = spans.num_computed(request)
        block_ids = self._block_ids(request, spans)
        present = self._present(store, block_ids, num_computed, request)
        num_cached = int(np.count_nonzero(present))
        merged = torch.empty((num_cached + len(new), *store.shape), dtype=store.rows.dtype)
        if num_cached == num_computed:
            store.read_blocks(block_ids, merged[:num_cached])
        else:
            merged[:num_cached] = store.read_slots(slots_behind(block_ids, self.block_size, num_computed)[present])
        merged[num_cached:] = new
        self.counters.rows_served[store.key] += num_cached
        self.counters.bytes_copied += num_cached * store.row_nbytes
        return merged

    def _present(self, store: RowStore, block_ids: Slots, num_rows: int, request: RequestSpan) -> NDArray[np.bool_]:
        """Which of the first ``num_rows`` positions have a row; the others were computed without this key.

        Deferred rows among them are committed first. A position that nobody computed here, or whose row was lost,
        raises.
        """
        computed, written = store.turns(block_ids, num_rows)
        present: NDArray[np.bool_] = (written == computed) & (computed > 0)
        if not present.all() and self._deferred_mm_outputs:
            self._commit_owners_of(store, slots_behind(block_ids, self.block_size, num_rows)[~present])
            _, written = store.turns(block_ids, num_rows)
            present = (written == computed) & (computed > 0)
        if present.any() and store.maybe_requests and not store.known_as_rows:
            raise AmbiguousKey(
                key=store.key,
                request=request.req_id,
                step=self._step,
                expected="a key known to have a row a token (declare its kind in ModelPolicy.kinds)",
                found="one that every step so far had as many rows of as of requests",
            )
        lost = (written == -computed) & (computed > 0)
        unknown = ~present if store is self._hidden else computed == 0
        if lost.any():
            raise RowsDiscarded(**self._missing_row(store, block_ids, request, int(lost.argmax()), _DISCARDED))
        if unknown.any():
            raise NeverWritten(**self._missing_row(store, block_ids, request, int(unknown.argmax()), _NOT_WRITTEN))
        return present

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
