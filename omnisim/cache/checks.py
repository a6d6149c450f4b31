"""What is checked where the caller's values enter: each check returns the value it was asked about, or raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnisim.cache.errors import (
    BlockTableTooShort,
    RowFormChanged,
    RowsMissing,
    SlotOutOfRange,
    StagedCopyMismatch,
    UnsupportedLayout,
)
from omnisim.cache.slots import PAD_SLOT_ID, RowStore, SlotClock, Slots, stored
from omnisim.cache.spans import RequestSpan

__all__ = ["block_ids_behind", "first_rows", "refuse_layout", "slots_of_step", "staged_rows"]


def first_rows(store: RowStore, value: Tensor, num_tokens: int, step: int) -> Tensor:
    """The first ``num_tokens`` rows of ``value``, detached; they must be of the form the key was opened with."""
    if tuple(value.shape[1:]) != store.shape or value.dtype != store.rows.dtype:
        raise RowFormChanged(
            key=store.key,
            step=step,
            expected=f"rows of shape {list(store.shape)} {store.rows.dtype}, as the key was opened with",
            found=f"{list(value.shape[1:])} {value.dtype}",
        )
    if len(value) < num_tokens:
        raise RowsMissing(
            key=store.key,
            step=step,
            expected=f"a row for each of {num_tokens} scheduled tokens (or a declared kind in ModelPolicy.kinds)",
            found=f"{len(value)} rows",
        )
    return value[:num_tokens].detach()


def staged_rows(store: RowStore, hidden: Tensor | None, num_tokens: int, staged: Tensor, step: int) -> Tensor:
    """The first ``num_tokens`` rows of the staged copy of ``hidden``, which must be one."""
    if hidden is None:
        expected = "no hidden_states_cpu where hidden_states is None"
        raise StagedCopyMismatch(key="hidden_states_cpu", step=step, expected=expected, found="one")
    first_rows(store, hidden[:0], 0, step)
    if _form(staged) != ("contiguous", hidden.dtype, hidden.shape[1:], "cpu") or len(staged) < num_tokens:
        raise StagedCopyMismatch(
            key="hidden_states_cpu",
            step=step,
            expected=f"at least {num_tokens} contiguous {hidden.dtype} rows of shape {list(hidden.shape[1:])} on cpu",
            found=f"a {_form(staged)[0]} {staged.dtype} tensor of shape {list(staged.shape)} on {staged.device.type}",
        )
    return staged[:num_tokens].detach()


def _form(rows: Tensor) -> tuple[str, torch.dtype, torch.Size, str]:
    return ("contiguous" if rows.is_contiguous() else "strided", rows.dtype, rows.shape[1:], rows.device.type)


def slots_of_step(slot_mapping: Tensor, num_tokens: int, clock: SlotClock, step: int) -> tuple[Slots, Slots]:
    """A copy of the slots of the step's tokens (the caller's buffer is its next step's, too), and the stored of them.

    ``PAD_SLOT_ID`` for a token whose KV is not stored; every other slot is one token's.
    """
    told = slot_mapping[:num_tokens].cpu().numpy()
    if told.dtype.kind not in "iu":
        raise SlotOutOfRange(step=step, expected="slots that are integers", found=str(told.dtype))
    slots: Slots = told.astype(np.int64)
    num_slots = len(clock.by_slot)
    if len(slots) != num_tokens:
        raise SlotOutOfRange(step=step, expected=f"{num_tokens} slots", found=str(len(slots)))
    kept = stored(slots)
    if kept.max(initial=PAD_SLOT_ID) >= num_slots or (len(kept) < len(slots) and slots.min() < PAD_SLOT_ID):
        wrong = slots[(slots < PAD_SLOT_ID) | (slots >= num_slots)][0]
        expected = f"slots in [0, {num_slots}), or {PAD_SLOT_ID} for none"
        raise SlotOutOfRange(step=step, expected=expected, found=f"slot {wrong}")
    if (twice := clock.duplicate(kept)) is not None:
        raise SlotOutOfRange(step=step, expected="a slot of its own for each token", found=f"slot {twice} twice")
    return slots, kept


def block_ids_behind(ids: Any, num_computed: int, request: RequestSpan, geometry: tuple[int, int], step: int) -> Slots:
    """The request's block ids as int64; they must exist and cover ``num_computed`` tokens."""
    num_blocks, block_size = geometry
    told = np.asarray(ids).reshape(-1)
    if len(told) and told.dtype.kind not in "iu":
        expected = "block ids that are integers"
        raise SlotOutOfRange(request=request.req_id, step=step, expected=expected, found=str(ids))
    block_ids: Slots = told.astype(np.int64)
    if len(block_ids) * block_size < num_computed:
        raise BlockTableTooShort(
            request=request.req_id,
            step=step,
            expected=f"blocks for {num_computed} computed tokens",
            found=f"{len(block_ids)} blocks of {block_size}",
        )
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < num_blocks:
        expected = f"block ids in [0, {num_blocks})"
        raise SlotOutOfRange(request=request.req_id, step=step, expected=expected, found=str(block_ids.tolist()))
    return block_ids


def refuse_layout(table: Any, block_size: int, step: int) -> None:
    """Refuse a table whose ids do not count our blocks. vLLM's ``BlockTable`` tells, a stand-in need not."""
    found = getattr(table, "block_size", block_size), getattr(table, "dcp_world_size", 1)
    if found != (block_size, 1):
        raise UnsupportedLayout(
            step=step,
            expected=f"a block table in blocks of {block_size} without decode context parallelism",
            found=f"blocks of {found[0]}, context parallel size {found[1]}",
        )
