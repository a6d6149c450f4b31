"""A trace without what its users said: token ids become keyed hashes of prefixes, or go."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from omnisim.errors import CannotJudge
from omnisim.trace.expand import Expander
from omnisim.trace.files import Trace
from omnisim.trace.model import Header, NewRequest, Step, StepRecord

__all__ = ["redact"]


def redact(trace: Trace, content: Literal["hashed", "none"]) -> tuple[Header, Iterator[StepRecord]]:
    """The trace at another content level.

    ``hashed``: each id becomes a 63-bit hash of the prefix that ends in it, under a key that is made here and kept
    nowhere: equal prefixes stay equal and nothing can be read back. ``none``: ids and tags go, lengths stay. Raises
    CannotJudge if the trace no longer has what is asked for.
    """
    if trace.header.content == "none" and content == "hashed":
        raise CannotJudge(f"{trace.path} has no token ids that could be hashed", "convert it with content none")
    header = msgspec.structs.replace(trace.header, content=content)
    return header, _hashed(trace) if content == "hashed" else map(_without_ids, trace.records())


def _without_ids(record: StepRecord) -> StepRecord:
    return msgspec.structs.replace(
        record,
        scheduled_new_reqs=tuple(map(_without_prompt, record.scheduled_new_reqs)),
        new_token_ids=(),
        scheduled_spec_decode_tokens={
            req_id: (0,) * len(ids) for req_id, ids in record.scheduled_spec_decode_tokens.items()
        },
    )


def _without_prompt(new: NewRequest) -> NewRequest:
    length = len(new.prompt_token_ids) or new.num_prompt_tokens
    return msgspec.structs.replace(new, prompt_token_ids=(), num_prompt_tokens=length, content={})


def _hashed(trace: Trace) -> Iterator[StepRecord]:
    hasher = _Hasher(secrets.token_bytes(32))
    expander = Expander(trace.header, trace.path)
    for line, record in trace.numbered():
        yield hasher.record(record, expander.step(record, line))


class _Hasher:
    """Follows the prefix of every living request under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._chains: dict[str, list[int]] = {}

    def record(self, record: StepRecord, step: Step) -> StepRecord:
        """``record``, which makes ``step``, with hashes in place of ids and tags."""
        for req_id in record.finished_req_ids:
            self._chains.pop(req_id, None)
        new = tuple(self._new_request(request) for request in record.scheduled_new_reqs)
        ends = map(sum, zip(step.num_computed_tokens, step.num_scheduled_tokens, strict=True))
        told = [
            self._extend(req_id, end - len(ids), ids)
            for req_id, end, ids in zip(step.req_ids, ends, step.new_token_ids, strict=True)
        ]
        drafts = record.scheduled_spec_decode_tokens
        return msgspec.structs.replace(
            record,
            scheduled_new_reqs=new,
            new_token_ids=tuple(told) if record.new_token_ids else (),
            scheduled_spec_decode_tokens={
                req_id: ids[len(ids) - len(drafts[req_id]) :]
                for req_id, ids in zip(step.req_ids, told, strict=True)
                if req_id in drafts
            },
        )

    def _new_request(self, new: NewRequest) -> NewRequest:
        self._chains[new.req_id] = []
        return msgspec.structs.replace(
            new,
            prompt_token_ids=self._extend(new.req_id, 0, new.prompt_token_ids),
            content={position: self._digest(tag.encode()).hex() for position, tag in new.content.items()},
        )

    def _extend(self, req_id: str, start: int, ids: Sequence[int]) -> tuple[int, ...]:
        """Hashes of the prefixes that end in ``ids``, which stand from ``start`` on."""
        chain = self._chains[req_id]
        if ids:
            del chain[start:]
        for token_id in ids:
            before = chain[-1] if chain else 0
            digest = self._digest(before.to_bytes(8, "little") + token_id.to_bytes(8, "little"))
            chain.append(int.from_bytes(digest, "little") >> 1)
        return tuple(chain[start:]) if ids else ()

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=8).digest()
