"""Which tokens of a step's batch are whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from omnisim.cache.errors import BadCounts
from omnisim.cache.policy import KeyKind, Kinds

__all__ = ["BatchSpans", "InputBatch", "RequestSpan"]


class InputBatch(Protocol):
    """What the cache reads of the batch: vLLM's ``InputBatch``, or any stand-in with these attributes.

    ``block_table[0].block_table.cpu`` is ``[requests, max_blocks]``; ``block_table.block_tables`` has one entry a
    KV-cache group. ``num_computed_tokens_cpu`` may be an array or a tensor, of integers or floats. Where a policy
    declares rows of decoding requests, ``num_prompt_tokens`` (``[requests]``, vLLM's own) is read too.
    """

    req_ids: Sequence[str]
    req_id_to_index: Mapping[str, int]
    num_computed_tokens_cpu: Any
    block_table: Any


class RequestSpan(NamedTuple):
    """One request's part of a step: row ``row`` of the batch, tokens ``[start, stop)``."""

    req_id: str
    row: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of this request in this step."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class BatchSpans:
    """The batch of one step, in order: request ``req_ids[i]`` has ``counts[i]`` tokens from ``starts[i]`` on."""

    req_ids: Sequence[str]
    rows: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    input_batch: InputBatch
    step: int

    @classmethod
    def of(
        cls, query_start_loc: Any, input_batch: InputBatch, num_scheduled_tokens: Mapping[str, int], step: int = -1
    ) -> BatchSpans:
        """``query_start_loc`` is a tensor, an array or a list, with or without its last entry.

        Raises ``BadCounts`` where a request has no start or no count, or shares tokens with another.
        """
        by_row = query_start_loc.tolist() if hasattr(query_start_loc, "tolist") else query_start_loc
        req_ids = input_batch.req_ids
        try:
            rows = list(map(input_batch.req_id_to_index.__getitem__, req_ids))
            starts = list(map(index, map(by_row.__getitem__, rows)))
            counts = list(map(index, map(num_scheduled_tokens.__getitem__, req_ids)))
        except (LookupError, TypeError):
            _refuse_incomplete(by_row, input_batch, num_scheduled_tokens, step)
            raise
        spans = cls(input_batch.req_ids, rows, starts, counts, input_batch, step)
        if not spans.is_packed or min(counts, default=0) < 0:
            spans._refuse_overlap()
        return spans

    def _refuse_overlap(self) -> None:
        past = 0
        for request in sorted(self.requests, key=lambda request: request.start):
            if request.num_tokens < 0 or request.start < (past if request.num_tokens else 0):
                raise BadCounts(
                    request=request.req_id,
                    step=self.step,
                    expected=f"tokens from {past} on, which no other request has",
                    found=f"{request.num_tokens} from {request.start} on",
                )
            past = max(past, request.stop)

    @cached_property
    def requests(self) -> list[RequestSpan]:
        """The same, a value a request."""
        parts = zip(self.req_ids, self.rows, self.starts, self.counts, strict=True)
        return [RequestSpan(req_id, row, start, start + count) for req_id, row, start, count in parts]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that the batch covers."""
        if self.is_packed:
            return sum(self.counts)
        return max((start + count for start, count in zip(self.starts, self.counts, strict=True)), default=0)

    @cached_property
    def is_packed(self) -> bool:
        """Whether each request's tokens follow those of the one before, as in vLLM's runner."""
        return self.starts == list(accumulate(self.counts, initial=0))[:-1]

    def are_a_row_a_token(self, num_rows: int) -> bool:
        """Whether ``num_rows`` can only be a row a token: there are other numbers of requests, in all and scheduled."""
        num_requests = {len(self.req_ids), sum(map(bool, self.counts))}
        return num_requests.isdisjoint((self.num_tokens, num_rows))

    def num_computed(self, request: RequestSpan) -> int:
        """The batch's count of computed tokens, which is a whole number from 0 on though it may come as a float."""
        count = self.input_batch.num_computed_tokens_cpu[request.row]
        if not (count >= 0 and float(count).is_integer()):
            raise BadCounts(
                request=request.req_id,
                step=self.step,
                expected="a number of computed tokens in num_computed_tokens_cpu",
                found=str(count),
            )
        return int(count)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows to each request, as parts of one copy: the model may overwrite ``rows`` in its next forward."""
        copy = rows.clone()
        if self.is_packed:
            return dict(zip(self.req_ids, torch.split(copy, list(self.counts)), strict=True))
        return {request.req_id: copy[request.start : request.stop] for request in self.requests}

    def split_apart(self, rows: Tensor) -> dict[str, Tensor]:
        """The same, a storage for each request: what one keeps holds no memory of another's."""
        if self.is_packed:
            parts: Any = torch.split_with_sizes_copy(rows, list(self.counts))  # type: ignore[func-returns-value]
            return dict(zip(self.req_ids, parts, strict=True))
        return {request.req_id: rows[request.start : request.stop].clone() for request in self.requests}

    def decode_places(self, kind: KeyKind | Kinds) -> dict[str, int]:
        """Place of each request among those that decode, where ``kind`` has rows of decoding requests."""
        if not _has_decode_rows(kind):
            return {}
        num_prompt_tokens = self.input_batch.num_prompt_tokens  # type: ignore[attr-defined]
        decoding = [r.req_id for r in self.requests if self.num_computed(r) >= num_prompt_tokens[r.row]]
        return {req_id: place for place, req_id in enumerate(decoding)}


def _refuse_incomplete(
    by_row: Any, input_batch: InputBatch, num_scheduled_tokens: Mapping[str, int], step: int
) -> None:
    """Name the first request that has no start or no count."""
    for req_id in input_batch.req_ids:
        try:
            index(by_row[input_batch.req_id_to_index[req_id]]), index(num_scheduled_tokens[req_id])
        except (LookupError, TypeError) as wrong:
            expected = "integers for it in req_id_to_index, query_start_loc and num_scheduled_tokens"
            raise BadCounts(request=req_id, step=step, expected=expected, found=repr(wrong)) from None


def _has_decode_rows(kind: KeyKind | Kinds) -> bool:
    if isinstance(kind, KeyKind):
        return kind is KeyKind.DECODE_ROW
    return any(_has_decode_rows(item) for item in kind.values())
