"""A trace as values: what is written in a file (``Header``, ``StepRecord``) and what a replay reads (``Step``).

A ``StepRecord`` says only what changed since the record before it; a ``Step`` says everything. Names are vLLM's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from omnisim.talker import Talker

__all__ = [
    "FORMAT",
    "Geometry",
    "Header",
    "NewRequest",
    "Producer",
    "RecordedRows",
    "Step",
    "StepRecord",
    "encode_json",
]

FORMAT = "omnisim-trace/1"

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Tokens, positions, blocks: what vLLM keeps in an int32."""
Slot = Annotated[int, Meta(ge=-1, le=2**62)]
"""``block_id * block_size + offset``; -1 is vLLM's ``PAD_SLOT_ID``."""
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A token id or, at content level ``hashed``, the keyed hash of the prefix that ends in it."""
ReqId = Annotated[str, Meta(min_length=1, max_length=512)]
SlotRun = Annotated[tuple[Slot, ...], Meta(min_length=2, max_length=2)]
"""``[first, count]``: slots that follow each other; ``[-1, count]`` is that many pad slots.

Not ``tuple[Slot, Slot]``: msgspec 0.23 crashes where a union has an int with bounds beside a tuple of fixed length.
"""

_FILE_NAME = r"^(?!\.{1,2}$)[^/\\\x00]+$"
FileName = Annotated[str, Meta(extra_json_schema={"pattern": _FILE_NAME})]
"""The plain name of a file in the folder of the trace: no path, so that a trace reaches nothing outside its folder."""


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Producer(_Strict, frozen=True, kw_only=True):
    """Who wrote the schedule down."""

    name: str
    version: str = ""


class Geometry(_Strict, frozen=True, kw_only=True):
    """What shapes the slots, and what a cache is told of them.

    ``kernel_block_size`` differs from ``block_size`` where the runner splits blocks. The block table of a trace is that
    of ``full_attention_group``; tables of other groups have null blocks only. ``max_nbytes`` is the most that the
    storage of a cache may take, for caches that can be told so.
    """

    num_blocks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_kv_cache_groups: Annotated[int, Meta(ge=1, le=1024)] = 1
    full_attention_group: Annotated[int, Meta(ge=0, le=1023)] = 0
    kernel_block_size: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    max_nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class RecordedRows(_Strict, frozen=True, kw_only=True):
    """Rows that a real engine computed, beside the trace: tensor ``step_00012`` is ``[num_tokens, hidden_size]``.

    ``no_cache_trace`` and ``no_cache_tensors`` are the same requests run with prefix caching off: the truth. All three
    are plain names of files beside the trace. Rows of the two runs are matched by the token ids (and content tags) up
    to their position, whatever the requests are called.
    """

    tensors: FileName
    no_cache_trace: FileName
    no_cache_tensors: FileName

    def __post_init__(self) -> None:
        for field_name in self.__struct_fields__:
            name = getattr(self, field_name)
            if not re.search(_FILE_NAME, name):
                raise ValueError(f"{field_name} {name!r} is no plain file name; the file lies beside the trace")


class Header(_Strict, frozen=True, kw_only=True):
    """The first line of a trace."""

    format: Literal["omnisim-trace/1"]
    producer: Producer
    cache: Geometry
    content: Literal["tokens", "hashed", "none"] = "tokens"
    talker: str | Talker | None = None
    recorded_rows: RecordedRows | None = None
    expect: dict[str, Literal["agreement", "divergence", "refusal", "crash", "unusable"]] = {}
    provenance: str = ""


class NewRequest(_Strict, frozen=True, kw_only=True):
    """A request in its first scheduled step (vLLM's ``NewRequestData``).

    ``external_req_id`` is the id that the client gave, for people; nothing is matched by it. ``content`` maps a
    position to a tag (image hash, adapter, salt) that joins the identity of the prefix from there on. ``replace`` says
    that a request of this id is still alive and this one takes its place (a streaming prompt).
    """

    req_id: ReqId
    external_req_id: ReqId | None = None
    prompt_token_ids: tuple[TokenId, ...] = ()
    num_prompt_tokens: Count | None = None
    content: dict[Count, Annotated[str, Meta(min_length=1)]] = {}
    replace: bool = False


class StepRecord(_Strict, frozen=True, kw_only=True):
    """One step as it is written: fields left out are as in the step before, or empty, or can be derived.

    ``req_ids`` left out: the same batch. ``block_ids`` replaces a request's row of the block table, ``new_block_ids``
    appends to it; a row that is in neither is unchanged. ``query_start_loc``, ``slot_mapping`` and
    ``num_tokens_padded`` are facts of a recording; where they are missing they are derived, where they contradict the
    rest the trace is refused. ``new_token_ids`` has, in batch order, the ids of scheduled positions that neither the
    prompt nor an earlier step has told. ``absent_keys`` are keys of the talker that the model did not emit.

    The last four are about the runner, not the schedule. ``clobber``: the model's output tensors are a graph's static
    buffers, which are overwritten once this step's outputs have been handed out. ``read_delay``: the step is saved, and
    what it owes is read only so many steps later. ``fail_write``: the first write of rows into the cache in this step
    fails. ``host_num_computed_tokens``: what the batch on the host claims where it differs from what was computed
    (drafts that are counted before they are accepted).
    """

    step: Count | None = None
    req_ids: tuple[ReqId, ...] | UnsetType = UNSET
    num_computed_tokens: tuple[Count, ...]
    num_scheduled_tokens: tuple[Annotated[int, Meta(ge=1, le=2**31 - 1)], ...]
    query_start_loc: tuple[Count, ...] | None = None
    block_ids: dict[ReqId, tuple[Count, ...]] = {}
    new_block_ids: dict[ReqId, tuple[Count, ...]] = {}
    slot_mapping: tuple[Slot | SlotRun, ...] | None = None
    num_tokens_padded: Count | None = None
    scheduled_new_reqs: tuple[NewRequest, ...] = ()
    resumed_req_ids: tuple[ReqId, ...] = ()
    preempted_req_ids: tuple[ReqId, ...] = ()
    finished_req_ids: tuple[ReqId, ...] = ()
    new_token_ids: tuple[tuple[TokenId, ...], ...] = ()
    scheduled_spec_decode_tokens: dict[ReqId, tuple[TokenId, ...]] = {}
    absent_keys: tuple[str, ...] = ()
    clobber: bool = False
    read_delay: Count = 0
    fail_write: bool = False
    host_num_computed_tokens: dict[ReqId, Count] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of the scheduler and the forward it causes, nothing left out.

    Rows of ``block_table`` that did not change since the step before are the *same* tuple, so that a reader can tell
    by ``is``. ``slot_mapping`` is int64 ``[num_tokens]`` (the unpadded part). ``num_prompt_tokens`` is -1 where the
    trace does not say. ``finished_req_ids`` finished or were aborted since the step before.
    The last four fields are the record's.
    """

    index: int
    req_ids: tuple[str, ...]
    num_computed_tokens: tuple[int, ...]
    num_scheduled_tokens: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    block_table: tuple[tuple[int, ...], ...]
    slot_mapping: np.ndarray
    num_tokens_padded: int
    num_prompt_tokens: tuple[int, ...]
    scheduled_new_reqs: tuple[NewRequest, ...]
    resumed_req_ids: tuple[str, ...]
    preempted_req_ids: tuple[str, ...]
    finished_req_ids: tuple[str, ...]
    new_token_ids: tuple[tuple[int, ...], ...]
    scheduled_spec_decode_tokens: dict[str, tuple[int, ...]]
    absent_keys: tuple[str, ...]
    clobber: bool = False
    read_delay: int = 0
    fail_write: bool = False
    host_num_computed_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens scheduled in this step, padding left out."""
        return self.query_start_loc[-1]

    @property
    def lasts_T(self) -> np.ndarray:  # noqa: N802
        """Which tokens are the last of their request in this step: bool ``[num_tokens]``."""
        lasts = np.zeros(self.num_tokens, dtype=np.bool_)
        lasts[np.array(self.query_start_loc[1:], dtype=np.int64) - 1] = True
        return lasts


def encode_json(value: Struct) -> bytes:
    """The canonical line of a header or a record (no newline)."""
    return msgspec.json.encode(value)
