"""Planted defects: our cache with one slip each, to show that the judge of a replay catches every one.

``MUTANTS`` holds each with the id of the check that should fail (perhaps among others) and the situation that it takes:
in a schedule without it a mutant is right. ``test_mutants_differ`` shows each one slip in its situation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnisim.cache import InputBatch, KeyKind, OmniTensorPrefixCache
from omnisim.cache.prefix_cache import _Chunk
from omnisim.cache.slots import RowStore, Slots, slots_behind, stored
from omnisim.cache.spans import BatchSpans, RequestSpan

__all__ = ["MUTANTS", "Mutant"]

Turns = NDArray[np.int64]
C = TypeVar("C", bound=type[OmniTensorPrefixCache])


@dataclass(frozen=True, slots=True)
class Mutant:
    """A cache with one slip, the check it should fail, and what a schedule must have for it to show."""

    name: str
    cache_class: type[OmniTensorPrefixCache]
    check: str
    situation: str


MUTANTS: list[Mutant] = []


def mutant(check: str, situation: str) -> Callable[[C], C]:
    """Enter a class in ``MUTANTS`` under its own name in kebab case."""

    def enter(cache_class: C) -> C:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", cache_class.__name__).lower()
        MUTANTS.append(Mutant(name, cache_class, check, situation))
        return cache_class

    return enter


# Prefix rows


@mutant("row-count", "a hit")
class PrefixMissing(OmniTensorPrefixCache):
    """A hit gets this step's rows alone."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        return new.clone()


@mutant("row-count", "a hit")
class PrefixTwice(OmniTensorPrefixCache):
    """A hit gets its cached rows twice over."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        return torch.cat([merged[: len(merged) - len(new)], merged])


@mutant("once-in-order", "a hit")
class PrefixAfterNewRows(OmniTensorPrefixCache):
    """A hit gets this step's rows first and its cached rows after them."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        return super()._merged_hit(store, new, source).roll(len(new), dims=0)


@mutant("row-count", "a hit, and a later step of the same request")
class MarksNotReset(OmniTensorPrefixCache):
    """The marks of one step are still there in the next, so the prefix is given again."""

    def reset_prefix_cached_new_req_ids(self) -> None:
        marks = set(self._hits)
        super().reset_prefix_cached_new_req_ids()
        self._hits |= marks


@mutant("row-count", "a request that decodes, or a prefill in two chunks")
class ComputedTakenForHit(OmniTensorPrefixCache):
    """Every request with computed tokens is merged like a hit, marked or not."""

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        marks = self._hits
        self._hits = marks | {request.req_id for request in spans.requests if spans.num_computed(request)}
        try:
            return super()._merge(store, rows, spans)
        finally:
            self._hits = marks


@mutant("row-count", "a hit that is not a multiple of the block size")
class PartialTailDropped(OmniTensorPrefixCache):
    """Cached rows in a partly filled last block are dropped."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        num_cached = len(merged) - len(new)
        return torch.cat([merged[: num_cached // self.block_size * self.block_size], new])


@mutant("rows", "a hit")
class NextBlock(OmniTensorPrefixCache):
    """Cached rows are read one block further on than the block table says."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        num_cached = len(merged) - len(new)
        blocks = (source.block_ids + 1) % self.num_blocks
        merged[:num_cached] = store.read_slots(slots_behind(blocks, self.block_size, num_cached))
        return merged


@mutant("once-in-order", "a hit of two blocks or more")
class BlocksReversed(OmniTensorPrefixCache):
    """The whole blocks of a hit are read in reverse order."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        num_whole = (len(merged) - len(new)) // self.block_size * self.block_size
        blocks = merged[:num_whole].unfold(0, self.block_size, self.block_size) if num_whole else merged[:0]
        if num_whole:
            merged[:num_whole] = blocks.movedim(-1, 1).flip(0).flatten(0, 1)
        return merged


@mutant("row-count", "a hit")
class LastRowLost(OmniTensorPrefixCache):
    """A hit gets all its rows but the last."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        return super()._merged_hit(store, new, source)[:-1]


@mutant("isolation", "two requests in one step with as many tokens, neither a hit, of different prompts")
class NeighboursRows(OmniTensorPrefixCache):
    """Requests that have as many rows as the next one get those of the next one."""

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        merged = super()._merge(store, rows, spans)
        misses = [req_id for req_id in merged if req_id not in self._hits]
        swapped = dict(zip(misses, [merged[req_id] for req_id in misses[1:] + misses[:1]], strict=True))
        same_size = {who: part for who, part in swapped.items() if len(part) == len(merged[who])}
        return merged | same_size


@mutant("isolation", "two KV-cache groups with other block ids, and a hit")
class SecondGroup(OmniTensorPrefixCache):
    """The block ids behind a hit are those of the last KV-cache group."""

    def _get_cached_block_ids(self, req_idx: int, input_batch: InputBatch) -> Any:
        last = input_batch.block_table[len(input_batch.block_table.block_tables) - 1]
        num_blocks = len(super()._get_cached_block_ids(req_idx, input_batch))
        return last.block_table.cpu[req_idx, :num_blocks]


# Who wrote a slot last


@mutant("isolation", "a block taken over by a request that does not emit a key its former tenant did, then hit")
class FormerTenantsRows(OmniTensorPrefixCache):
    """A row that somebody once wrote is served, whoever has taken over its slot since."""

    def _present(self, store: RowStore, block_ids: Slots, num_rows: int, request: RequestSpan) -> NDArray[np.bool_]:
        present = super()._present(store, block_ids, num_rows, request)
        served: NDArray[np.bool_] = present | (store.turns(block_ids, num_rows)[1] > 0)
        return served


@mutant("absent-rows", "a key absent in the step that filled a fresh block, present in the step that hits it")
class AbsentRowsAsZeros(OmniTensorPrefixCache):
    """Positions at which a key was not emitted are served as the zeros that storage started with."""

    def _present(self, store: RowStore, block_ids: Slots, num_rows: int, request: RequestSpan) -> NDArray[np.bool_]:
        present = super()._present(store, block_ids, num_rows, request)
        served: NDArray[np.bool_] = present | (store.turns(block_ids, num_rows)[1] == 0)
        return served


@mutant("never-written", "a hit on a block that is filled in the same step")
class WriteLandsLate(OmniTensorPrefixCache):
    """Rows are in the storage only when the next step begins."""

    def _write(self, store: RowStore, slots: Slots, rows: Tensor, turns: Turns | int) -> None:
        storage, at = store.rows.flatten(0, 1), torch.from_numpy(slots[slots >= 0])
        stale = storage[at]
        super()._write(store, slots, rows, turns)
        late: list[tuple[Tensor, Tensor, Tensor]] = self.__dict__.setdefault("_late", [])
        late.append((storage, at, storage[at]))
        storage[at] = stale

    def reset_prefix_cached_new_req_ids(self) -> None:
        for storage, at, rows in self.__dict__.pop("_late", []):
            storage[at] = rows
        super().reset_prefix_cached_new_req_ids()


@mutant("isolation", "a pad slot (-1) among the scheduled tokens while the last slot is in use, then a hit on that")
class PadSlotIsLastSlot(OmniTensorPrefixCache):
    """A token of the pad slot is written to the last slot of the cache."""

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
        super().update_omni_tensor_prefix_cache(
            hidden_states,
            multimodal_outputs,
            num_tokens_unpadded,
            slot_mapping,
            num_tokens_padded,
            skip_mm_cache_keys,
            hidden_states_cpu,
        )
        unstored = (slot_mapping[:num_tokens_unpadded] < 0).nonzero().reshape(-1)[-1:]
        if hidden_states is not None and len(unstored):
            last = np.array([self.num_blocks * self.block_size - 1])
            self._write(self._hidden, last, hidden_states[unstored].cpu(), self._clock.by_slot[last])


# Deferred rows


def _forget(store: RowStore, slots: Slots) -> None:
    """Rows were never put off here, so nobody misses them."""
    store.deferred.reshape(-1)[stored(slots)] = 0


@mutant("rows", "a deferred key, and a hit on its rows after the model's buffer was overwritten")
class DeferredChunksAreViews(OmniTensorPrefixCache):
    """Deferred rows are kept as views of the model's output buffer."""

    def _stage(self, key: str, rows: Tensor, slots: Slots, spans: BatchSpans) -> None:
        super()._stage(key, rows, slots, spans)
        for request in spans.requests:
            if request.num_tokens:
                chunks = self._deferred_mm_outputs[request.req_id][key]
                chunks[-1] = chunks[-1]._replace(rows=rows[request.start : request.stop])


@mutant("rows", "a deferred key, a finished request of two steps or more (or a hit), and a hit on its rows")
class DeferredRowsLandEarly(OmniTensorPrefixCache):
    """A deferred chunk of ``n`` rows is written ``n`` tokens before its place, as with counts of before the step."""

    def _stage(self, key: str, rows: Tensor, slots: Slots, spans: BatchSpans) -> None:
        super()._stage(key, rows, slots, spans)
        for request in spans.requests:
            if request.num_tokens:
                chunks = self._deferred_mm_outputs[request.req_id][key]
                chunks[-1] = chunks[-1]._replace(slots=self._early(request, spans))

    def _early(self, request: RequestSpan, spans: BatchSpans) -> Slots:
        stop = spans.num_computed(request)
        start = max(0, stop - 2 * request.num_tokens)
        return slots_behind(self._block_ids(request, spans), self.block_size, stop)[start : start + request.num_tokens]

    def _commit(self, store: RowStore, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            self._write(store, chunk.slots, chunk.rows.cpu(), self._clock.by_slot[chunk.slots])

    def _commit_owners_of(self, store: RowStore, slots: Slots) -> None:
        for per_key in self._deferred_mm_outputs.values():
            self._commit(store, per_key.pop(store.key, []))
        _forget(store, slots)


@mutant("row-count", "a deferred key, and a hit on rows of a finished request")
class DeferredNeverCommitted(OmniTensorPrefixCache):
    """Deferred rows are dropped where they should be written."""

    def _commit(self, store: RowStore, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            _forget(store, chunk.slots)


@mutant("row-count", "a deferred key, and a hit on rows of a request that is still running")
class DeferredOfRunningIgnored(OmniTensorPrefixCache):
    """A hit does not look at the deferred rows of requests that have not finished."""

    def _commit_owners_of(self, store: RowStore, slots: Slots) -> None:
        _forget(store, slots)


@mutant("isolation", "a deferred key, a block of a preempted request taken over before that finishes, then hit")
class LateCommitOverwrites(OmniTensorPrefixCache):
    """Deferred rows are written though somebody else has taken over their slots."""

    def _commit(self, store: RowStore, chunks: list[_Chunk]) -> None:
        for chunk in chunks:
            stored = chunk.slots >= 0
            slots, rows = chunk.slots[stored], chunk.rows.cpu()[torch.from_numpy(stored)]
            self._write(store, slots, rows, self._clock.by_slot[slots])


@mutant("deferred-bound", "a deferred key, and a request that finishes")
class DeferredKeptForEver(OmniTensorPrefixCache):
    """The deferred rows of a request stay in memory after it has finished."""

    def commit_deferred_mm_outputs(self, finished_req_ids: Iterable[str], input_batch: InputBatch) -> None:
        kept = {req_id: {**per_key} for req_id, per_key in self._deferred_mm_outputs.items()}
        super().commit_deferred_mm_outputs(finished_req_ids, input_batch)
        self._deferred_mm_outputs = kept

    def discard_deferred_mm_outputs(self, req_id: str) -> None:
        pass


# Form and lifetime of what is handed out


@mutant("aliasing", "a step without a hit, after which the model overwrites its output buffer")
class MissesAreViews(OmniTensorPrefixCache):
    """Where nobody is marked, requests get views of the model's output buffer."""

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        if self._hits:
            return super()._merge(store, rows, spans)
        return {request.req_id: rows[request.start : request.stop] for request in spans.requests}


@mutant("aliasing", "a request in consecutive slots whose block is taken over later")
class MissesAreViewsOfStorage(OmniTensorPrefixCache):
    """A request whose rows lie together in the storage gets a view of them."""

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        return super()._merge(store, rows, spans) | {
            request.req_id: store.rows.flatten(0, 1)[first : first + request.num_tokens]
            for request in spans.requests
            for first in self._first_of_run(store, request, spans)
            if request.req_id not in self._hits
        }

    def _first_of_run(self, store: RowStore, request: RequestSpan, spans: BatchSpans) -> list[int]:
        start = spans.num_computed(request)
        block_ids = np.asarray(spans.input_batch.block_table[0].block_table.cpu[request.row], dtype=np.int64)
        slots = slots_behind(block_ids, self.block_size, start + request.num_tokens)[start:]
        together = len(slots) == request.num_tokens > 0 and (np.diff(slots) == 1).all()
        written = store.written.reshape(-1)[slots] == self._clock.now
        return [int(slots[0])] if together and written.all() else []


@mutant("aliasing", "hits in two steps on the same row of the batch")
class HitsShareScratch(OmniTensorPrefixCache):
    """The merged rows of a hit lie in a buffer that the next hit overwrites."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        buffers: dict[tuple[str, int], Tensor] = self.__dict__.setdefault("_scratch", {})
        buffer = buffers.get((store.key, source.row))
        if buffer is None or len(buffer) < len(merged):
            buffer = buffers[store.key, source.row] = merged.new_zeros(2 * len(merged) + 64, *store.shape)
        return buffer[: len(merged)].copy_(merged)


@mutant("padding", "a padded step")
class PaddingDelivered(OmniTensorPrefixCache):
    """The last request of a batch gets a row of padding after its own."""

    def get_merged_hidden_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        hidden_states: Tensor,
        num_scheduled_tokens: Mapping[str, int],
        hidden_states_cpu: Tensor | None = None,
    ) -> dict[str, Tensor]:
        merged = super().get_merged_hidden_states(
            query_start_loc, input_batch, hidden_states, num_scheduled_tokens, hidden_states_cpu
        )
        return merged | self._padded(merged, hidden_states, sum(num_scheduled_tokens.values()))

    def _merge_key(self, key: str, value: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        merged = super()._merge_key(key, value, spans)
        return merged | self._padded(merged, value, spans.num_tokens)

    @staticmethod
    def _padded(merged: dict[str, Tensor], live: Tensor, num_tokens: int) -> dict[str, Tensor]:
        if len(live) <= num_tokens or not merged:
            return {}
        last = list(merged)[-1]
        return {last: torch.cat([merged[last], live[num_tokens : num_tokens + 1].detach().cpu()])}


@mutant("dtype", "a hit on rows that are not float64 or int64")
class HitsAreUpcast(OmniTensorPrefixCache):
    """The merged rows of a hit are widened to 64 bits."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        merged = super()._merged_hit(store, new, source)
        return merged.double() if merged.is_floating_point() else merged.long()


@mutant("device", "a hit")
class HitsAreElsewhere(OmniTensorPrefixCache):
    """The merged rows of a hit are not on the CPU."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        return super()._merged_hit(store, new, source).to("meta")


@mutant("contiguous", "a hit on rows of width 2 or more")
class HitsAreStrided(OmniTensorPrefixCache):
    """The merged rows of a hit lie column by column."""

    def _merged_hit(self, store: RowStore, new: Tensor, source: Any) -> Tensor:
        return super()._merged_hit(store, new, source).transpose(0, -1).contiguous().transpose(0, -1)


@mutant("inputs-unchanged", "a cached key or hidden states")
class InputOverwritten(OmniTensorPrefixCache):
    """The first row of a live output is set to zero once it was merged."""

    def _merge(self, store: RowStore, rows: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        merged = super()._merge(store, rows, spans)
        rows[:1].zero_()
        return merged


# Keys and values that are not cached


@mutant("keys", "a cached key that is absent in one step and present in a later one")
class KeyDroppedOnceAbsent(OmniTensorPrefixCache):
    """A cached key that is once absent is never handed out again."""

    def get_merged_multimodal_states(
        self,
        query_start_loc: Any,
        input_batch: InputBatch,
        multimodal_outputs: Mapping[str, Any] | None,
        num_scheduled_tokens: Mapping[str, int],
    ) -> dict[str, dict[str, Any]]:
        merged = super().get_merged_multimodal_states(
            query_start_loc, input_batch, multimodal_outputs, num_scheduled_tokens
        )
        dropped: set[str] = self.__dict__.setdefault("_dropped", set())
        dropped |= self.mm_cache_keys.difference(merged)
        return {key: value for key, value in merged.items() if key not in dropped}


@mutant("keys", "a hit in a step with a cached key")
class KeysOmittedOnHits(OmniTensorPrefixCache):
    """A hit gets none of the cached keys, as where memory ran out."""

    def _merge_key(self, key: str, value: Tensor, spans: BatchSpans) -> dict[str, Tensor]:
        merged = super()._merge_key(key, value, spans)
        return {req_id: rows for req_id, rows in merged.items() if req_id not in self._hits}


@mutant("pass-through", "two requests and a tensor with a part for each")
class ValueClonedToAll(OmniTensorPrefixCache):
    """Every request gets the whole of a tensor that has a part for each."""

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {request.req_id: value.clone() for request in spans.requests}
        return super()._hand_out(key, value, spans)


@mutant("pass-through", "a list of two different entries or more")
class ListShifted(OmniTensorPrefixCache):
    """A list is handed out with its first entry last."""

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        return super()._hand_out(key, value[1:] + value[:1] if isinstance(value, list) else value, spans)


@mutant("pass-through", "a declared row a decoding request, in a step with a prefill or with two that decode")
class DecodeRowToAll(OmniTensorPrefixCache):
    """The first row of those that decode goes to every request."""

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        if self.policy.kinds.get(key) is KeyKind.DECODE_ROW:
            return {request.req_id: value[:1].clone() for request in spans.requests}
        return super()._hand_out(key, value, spans)


@mutant("pass-through", "a declared value a request, in a step in which the first of two requests has two tokens")
class RequestValueByToken(OmniTensorPrefixCache):
    """A value a request is looked up by the request's first token instead of its row."""

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        if self.policy.kinds.get(key) is KeyKind.REQUEST:
            return {request.req_id: value[request.start : request.start + 1].clone() for request in spans.requests}
        return super()._hand_out(key, value, spans)


@mutant("aliasing", "a tensor that is not cached and that the model overwrites after the step")
class ValuesAreViews(OmniTensorPrefixCache):
    """Parts of a tensor that is not cached are views of the model's buffer."""

    def _hand_out(self, key: str, value: Any, spans: BatchSpans) -> dict[str, Any]:
        handed = super()._hand_out(key, value, spans)
        if not isinstance(value, Tensor):
            return handed
        return {r.req_id: self._view(key, value, r, handed[r.req_id]) for r in spans.requests}

    def _view(self, key: str, value: Tensor, request: RequestSpan, part: Tensor) -> Tensor:
        """The place in ``value`` that holds ``part``."""
        if part.shape == value.shape:
            return value
        is_by_row = self.policy.kinds.get(key) in (KeyKind.REQUEST, KeyKind.DECODE_ROW)
        start = request.row if is_by_row else request.start
        return value[start : start + len(part)] if len(value) >= start + len(part) else part
