"""Which tokens of a step's batch are whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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

    @classmethod
    def of(cls, query_start_loc: Any, input_batch: InputBatch, num_scheduled_tokens: Mapping[str, int]) -> BatchSpans:
        """``query_start_loc`` is a tensor, an array or a list, with or without its last entry."""
        by_row = query_start_loc.tolist() if hasattr(query_start_loc, "tolist") else [int(at) for at in query_start_loc]
        req_ids = input_batch.req_ids
        rows = [input_batch.req_id_to_index[req_id] for req_id in req_ids]
        counts = [int(num_scheduled_tokens[req_id]) for req_id in req_ids]
        return cls(req_ids, rows, [by_row[row] for row in rows], counts, input_batch)

    @cached_property
    def requests(self) -> list[RequestSpan]:
        """The same, a value a request."""
        parts = zip(self.req_ids, self.rows, self.starts, self.counts, strict=True)
        return [RequestSpan(req_id, row, start, start + count) for req_id, row, start, count in parts]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that the batch covers."""
        return max((start + count for start, count in zip(self.starts, self.counts, strict=True)), default=0)

    @property
    def is_packed(self) -> bool:
        """Whether each request's tokens follow those of the one before, as in vLLM's runner."""
        return self.starts == list(accumulate(self.counts, initial=0))[:-1]

    @property
    def tells_tokens_from_requests(self) -> bool:
        """Whether a row a token and a row a request would be different numbers of rows."""
        return max(self.counts, default=0) > 1

    def num_computed(self, request: RequestSpan) -> int:
        """The batch's count of computed tokens."""
        return int(self.input_batch.num_computed_tokens_cpu[request.row])

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows to each request, as parts of one copy: the model may overwrite ``rows`` in its next forward."""
        copy = rows.clone()
        if self.is_packed:
            return dict(zip(self.req_ids, torch.split(copy, list(self.counts)), strict=True))
        return {request.req_id: copy[request.start : request.stop] for request in self.requests}

    def decode_places(self, kind: KeyKind | Kinds) -> dict[str, int]:
        """Place of each request among those that decode, where ``kind`` has rows of decoding requests."""
        if not _has_decode_rows(kind):
            return {}
        num_prompt_tokens = self.input_batch.num_prompt_tokens  # type: ignore[attr-defined]
        decoding = [r.req_id for r in self.requests if self.num_computed(r) >= num_prompt_tokens[r.row]]
        return {req_id: place for place, req_id in enumerate(decoding)}


def _has_decode_rows(kind: KeyKind | Kinds) -> bool:
    if isinstance(kind, KeyKind):
        return kind is KeyKind.DECODE_ROW
    return any(_has_decode_rows(item) for item in kind.values())
