"""Who computed a slot last, and which rows of it are still his: every row the cache serves is proved here first.

A *turn* is a number for one writer's turn at a slot: all rows that one step emits share it. ``SlotClock`` holds each
slot's last turn, a ``RowStore`` the turn in which each of its rows was written, or was put off to be written later. A
row is its slot's own if the two agree. So whoever takes over a slot makes every row there stale, of all keys, with one
store; and a row that was put off in its slot's last turn, and that nobody holds to write it, is known to be lost.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PAD_SLOT_ID", "RowStore", "SlotClock", "Slots", "num_blocks_of", "share_a_block", "slots_behind", "stored"]

Slots = NDArray[np.int64]
Turns = NDArray[np.int64]

PAD_SLOT_ID = -1  # as in vllm.v1.attention.backends.utils: the KV of this token is not stored


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens take, the last one partly filled."""
    return -(-num_tokens // block_size)


def slots_behind(block_ids: Slots, block_size: int, num_tokens: int) -> Slots:
    """Slots of the first ``num_tokens`` positions of a request with these blocks."""
    return (block_ids[:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_tokens]


def stored(slots: Slots) -> Slots:
    """The slots without ``PAD_SLOT_ID``."""
    return slots if len(slots) and slots.min() >= 0 else slots[slots >= 0]


def share_a_block(slots: Slots, block_size: int) -> bool:
    """Whether two of these slots lie in one block."""
    blocks = slots // block_size
    return len(np.unique(blocks)) < len(blocks)


class SlotClock:
    """The turn in which each slot was last computed: int64 ``[num_blocks, block_size]``, 0 for never."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.last: Turns = np.zeros((num_blocks, block_size), dtype=np.int64)
        self.by_slot: Turns = self.last.reshape(-1)
        self.now = 1
        self._place = np.zeros(num_blocks * block_size, dtype=np.int32)

    def tick(self) -> None:
        """Begin the next turn."""
        self.now += 1

    def take(self, slots: Slots) -> None:
        """This turn is at ``slots`` (no pad slots): what was written there in another one is stale from now on."""
        self.by_slot[slots] = self.now

    def duplicate(self, slots: Slots) -> int | None:
        """A slot that stands twice among ``slots`` (no pad slots)."""
        places = np.arange(len(slots), dtype=np.int32)
        self._place[slots] = places
        replaced = self._place[slots] != places
        return int(slots[replaced.argmax()]) if np.count_nonzero(replaced) else None

    def holds(self, slots: Slots, turns: Turns | int) -> NDArray[np.bool_]:
        """Which of ``slots`` nobody has taken since these turns (false for pad slots)."""
        held: NDArray[np.bool_] = (self.by_slot[slots] == turns) & (slots >= 0)
        return held


class RowStore:
    """Rows of one key, a row a slot: ``[num_blocks, block_size, *shape]`` on the CPU, all zero at first.

    ``written`` is the turn in which a row was written, ``deferred`` the one in which it was put off; 0 for never.
    """

    def __init__(self, key: str, clock: SlotClock, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        num_blocks, block_size = clock.last.shape
        self.block_size: int = block_size
        self.key = key
        self.clock = clock
        self.shape = shape
        self.written: Turns = np.zeros_like(clock.last)
        self.deferred: Turns = np.zeros_like(clock.last)
        self.known_as_rows = False  # a row a token for certain
        self.seems_rows = False  # updated with two tokens of one block, which are one request's
        self.maybe_requests = False  # merged with as many rows as the batch had requests
        with torch.inference_mode(False):  # what is allocated in inference mode can only be written there
            self.rows = torch.zeros((num_blocks, block_size, *shape), dtype=dtype)
            self._words = _as_words(self.rows.flatten(0, 1).flatten(1))
            self._block_words = self._words.view(num_blocks, block_size * self._words.shape[1])
        self.row_nbytes = self.rows[0, 0].nbytes

    @property
    def is_ambiguous(self) -> bool:
        """Whether the rows may be a row a request, for all that was seen of them."""
        return not self.known_as_rows and (self.maybe_requests or not self.seems_rows)

    def write(self, slots: Slots, rows: Tensor, turns: Turns | int) -> None:
        """Write a row (CPU, contiguous) at each slot; no slot may be negative."""
        if len(slots):
            words = _as_words(rows.flatten(1), like=self._words)
            self._words.index_copy_(0, torch.from_numpy(slots), words)
            self.written.reshape(-1)[slots] = turns

    def put_off(self, slots: Slots) -> None:
        """Rows of this turn were emitted at ``slots`` (no pad slots) and will be written later."""
        self.deferred.reshape(-1)[slots] = self.clock.now

    def holds_all(self, block_ids: Slots, num_rows: int) -> bool:
        """Whether every one of the first ``num_rows`` positions behind the blocks has its slot's own row."""
        last = self.clock.last[block_ids].reshape(-1)[:num_rows]
        return bool(last.all()) and np.array_equal(last, self.written[block_ids].reshape(-1)[:num_rows])

    def turns(self, block_ids: Slots, num_rows: int) -> tuple[Turns, Turns, Turns]:
        """Turns (the slot's last, ``written``, ``deferred``) of the first ``num_rows`` positions behind the blocks."""
        last, written, deferred = self.clock.last[block_ids], self.written[block_ids], self.deferred[block_ids]
        return last.reshape(-1)[:num_rows], written.reshape(-1)[:num_rows], deferred.reshape(-1)[:num_rows]

    def read_blocks(self, block_ids: Slots, out: Tensor) -> None:
        """Copy the first ``len(out)`` rows behind ``block_ids`` into ``out`` (contiguous)."""
        num_whole, tail = divmod(len(out), self.block_size)
        if num_whole:
            words = _as_words(out.flatten(1)[: num_whole * self.block_size], like=self._words)
            ids = torch.from_numpy(block_ids[:num_whole])
            torch.index_select(self._block_words, 0, ids, out=words.view(num_whole, self._block_words.shape[1]))
        if tail:
            out[-tail:].copy_(self.rows[int(block_ids[num_whole]), :tail])

    def read_slots(self, slots: Slots) -> Tensor:
        """A copy of the rows at ``slots``."""
        return self.rows.view(-1, *self.shape)[torch.from_numpy(slots)]

    def slot_of(self, block_ids: Slots, position: int) -> int:
        """Slot of a position of the request that holds ``block_ids``."""
        block, offset = divmod(position, self.block_size)
        return int(block_ids[block]) * self.block_size + offset


_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


def _as_words(rows: Tensor, like: Tensor | None = None) -> Tensor:
    """The same bytes as the widest words a row divides into: torch copies rows of 16-byte words twice as fast.

    Of contiguous rows; those that cannot be viewed as words are copied. A lone row may be contiguous and yet have the
    strides of the buffer that it was cut from.
    """
    row_nbytes = rows.shape[1] * rows.element_size()
    word = like.dtype if like is not None else next(word for word in _WORDS if (row_nbytes or 1) % word.itemsize == 0)
    if rows.storage_offset() * rows.element_size() % word.itemsize or rows.stride() != (rows.shape[1], 1):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8).view(word)
