"""Which states of a schedule a set of traces reaches: a corpus without a state tests nothing that goes wrong in it.

Every state is told from the trace alone. A trace that tells no token ids or no lengths of prompts does not reach the
states that need them. A *hit* is a request that is new in a step and starts with computed tokens; whose rows it is on
is told slot by slot, by who wrote there last. A request *decodes* once all its prompt is computed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from omnisim.errors import FileError, SetupError
from omnisim.trace import Trace
from omnisim.trace.model import Geometry, NewRequest, Step
from omnisim.trace.yamlform import Node, convert_node, parse

__all__ = ["REQUIRE_FORMAT", "STATES", "Coverage", "Required", "Seen", "Watcher", "cover", "read_required"]

STATES: dict[str, str] = {
    # How requests enter: counted once a new request.
    "cold": "A new request has nothing computed.",
    "hit-one-block": "A hit covers exactly one block.",
    "hit-many-blocks": "A hit covers two blocks or more.",
    "hit-over-100-blocks": "A hit covers more than 100 blocks.",
    "hit-inside-a-block": "A hit ends inside a block: num_computed_tokens is no multiple of block_size.",
    "full-prompt-hit": "A prompt of whole blocks is hit but for its last block, which is computed again.",
    "all-whole-blocks-hit": "A prompt that ends inside a block is hit in all of its whole blocks.",
    "prompt-within-a-block": "A prompt is shorter than a block.",
    "prompt-of-one-block": "A prompt is exactly one block.",
    "one-token-past-a-block": "A prompt is whole blocks and one token more.",
    # Whose rows a hit is on: counted once a hit.
    "same-step-hit": "A hit covers rows that another request writes in the same step.",
    "same-step-hit-reader-first": "A hit covers rows that a request behind it in the batch writes in the same step.",
    "hit-one-step-later": "A hit covers rows that were written in the step before.",
    "hit-on-running-owner": "A hit covers rows of a step before whose writer is alive and not preempted.",
    "hit-on-preempted-owner": "A hit covers rows of a step before whose writer is preempted.",
    "hit-on-finished-owner": "A hit covers rows whose writer is over: it has ended, or was replaced.",
    "hit-on-several-owners": "A hit covers rows of more than one writer.",
    "hit-on-decoded-rows": "A hit covers rows past their writer's prompt, as the next turn of a chat does.",
    "hit-on-unknown-rows": "A hit covers rows that nobody has computed in this trace.",
    # What becomes of blocks: counted once a step (block-shared), else once a slot.
    "block-shared": "A block (not the null block 0) is in two rows of a step's block table.",
    "evicted-and-reused": "A slot whose writer is over or was preempted is computed anew by another.",
    "block-filled-by-decode": "A request that decodes writes the last slot of a block.",
    "pad-slot": "A scheduled token has the pad slot, and so is stored nowhere.",
    # How prompts are computed: counted once each time a request enters (mixed-step: once a step).
    "chunked-prefill": "A prompt is computed over several steps, without a preemption between.",
    "chunked-hit": "The rest of a prompt behind a hit is computed over several steps.",
    "mixed-step": "One request prefills and another decodes in one step.",
    # What becomes of requests: counted once each time.
    "preempted": "A running request is preempted.",
    "preempted-mid-prefill": "A running request is preempted before all of its prompt is computed.",
    "resumed-cold": "A request is resumed with nothing computed.",
    "resumed-with-hit": "A request is resumed with computed tokens.",
    "resumed-on-others-rows": "A request is resumed on rows of which another request wrote some last.",
    "resumed-at-once": "A request is resumed that was in the batch of the step before: a forced reset.",
    "replaced": "A request takes the place of a living one of its id, as a streaming prompt does.",
    "replaced-with-hit": "A request takes the place of a living one of its id, and starts with computed tokens.",
    "ended-mid-prefill": "A request ends whose last step did not reach the end of its prompt.",
    "ended-while-preempted": "A request ends while it is preempted.",
    "ended-unseen": "A request ends that was never scheduled.",
    "id-reused": "A new request has the id of one that has ended.",
    "id-reused-at-once": "An id ends and is new in one step.",
    # The batch: counted once a request and step (row-moved, alive-not-scheduled), else once a step.
    "row-moved": "A request has another row of the batch than in its own step before.",
    "batch-reordered": "Two requests that stay in the batch change their order.",
    "alive-not-scheduled": "A request that had a step, lives and is not preempted is left out of a step.",
    "padded-step": "A step is padded: num_tokens_padded is more than is scheduled.",
    "big-batch": "256 requests or more are in one step.",
    "empty-step": "No request is in a step.",
    # Content: counted once a new request.
    "content-tagged": "A new request has content tags.",
    "same-tokens-other-content": "Two prompts have the same token ids for a block or more, and other content tags.",
    # Drafts: counted once a request and step.
    "drafts": "A request has speculative tokens scheduled.",
    "drafts-rejected": "A request goes on before the end of its drafts.",
}
"""Id and sentence of each state, in the order in which they are told."""

REQUIRE_FORMAT = "omnisim-coverage-require/1"
MANY_BLOCKS = 100
BIG_BATCH = 256
MOST_ENDED = 2**16
"""Ids of ended requests that are remembered: an older one that comes back is not seen to be the same."""
LEAST_PROMPT_BLOCKS = 2**10
"""Blocks of prompts that are remembered at least; else as many as the cache has."""

Mask = NDArray[np.bool_]
Codes = NDArray[np.int32]
Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a state was reached; ``req_id`` is None where it is about the step alone."""

    path: str
    step: int
    req_id: str | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often each state was reached, and where first; a state that was not reached is in neither."""

    counts: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, Seen] = field(default_factory=dict)

    def __add__(self, other: Coverage) -> Coverage:
        """Of these traces and then those."""
        return Coverage(Counter(self.counts) + Counter(other.counts), {**other.first, **self.first})

    def times(self, state: str) -> int:
        """How often ``state`` was reached."""
        return self.counts.get(state, 0)

    def short_of(self, required: Mapping[str, int]) -> list[str]:
        """States that were reached less often than is required."""
        return [state for state, times in required.items() if self.times(state) < times]


def cover(trace: Trace) -> Coverage:
    """The states that ``trace`` reaches, in one pass; FileError where it cannot be read."""
    watcher = Watcher(trace.header.cache, trace.path)
    for step in trace.steps():
        watcher.see(step)
    return watcher.coverage


# What is required


class Required(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of ``--require``."""

    format: Literal["omnisim-coverage-require/1"]
    states: dict[str, Annotated[int, Meta(ge=1)]] | list[str]


def read_required(path: Path) -> dict[str, int]:
    """How often each state must be reached at least; FileError, with the line, for a file that is wrong."""
    try:
        node = parse(path, REQUIRE_FORMAT)
    except OSError as error:
        raise FileError(
            str(path), f"it cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    states = convert_node(node, Required, str(path), REQUIRE_FORMAT).states
    if not states:
        place = f"{path}:{node.children['states'].line}"
        raise FileError(place, "it requires no state", "name one, or leave out --require")
    _check_names(node.children["states"], path)
    return dict(states) if isinstance(states, dict) else dict.fromkeys(states, 1)


def _check_names(states: Node, path: Path) -> None:
    known = set(STATES)
    for at, child in states.children.items():
        name, place = at if isinstance(states.value, dict) else child.value, f"{path}:{child.line}"
        if name not in STATES:
            close = get_close_matches(name, STATES, n=1, cutoff=0)
            raise FileError(
                place, f"{name!r} is no state", f"did you mean {close[0]!r}? omnisim coverage lists them all"
            )
        if name not in known:
            raise FileError(place, f"{name!r} is there twice", f"write states: {{{name}: 2}} if you mean two times")
        known.remove(name)


# What is known of requests and slots


@dataclass(slots=True, eq=False)
class _Life:
    """A request that is alive.

    ``seat`` is its number, which one that replaces it takes over. ``codes`` are what it writes into slots: one each
    time it enters, the last of them now; ``past_codes`` are those of the requests that it replaced.
    ``enters`` until its first prefill since it entered; ``short`` while its last step ended before its prompt did.
    """

    req_id: str
    seat: int
    codes: list[int]
    past_codes: list[int] = field(default_factory=list)
    is_hit: bool = False
    is_preempted: bool = False
    enters: bool = True
    chunked: bool = False
    short: bool = False
    row: int = -1
    batch: int = -1
    blocks: tuple[int, ...] = ()


class _Batch:
    """The requests of a step, in columns, kept while they stay the same.

    ``codes`` int32 and ``prompts`` int64, one a row. ``phases`` once nobody prefills: they cannot change.
    """

    __slots__ = ("codes", "lives", "number", "phases", "prompts", "req_ids", "rows")

    def __init__(self, number: int, lives: list[_Life], step: Step) -> None:
        self.number = number
        self.req_ids = step.req_ids
        self.lives = lives
        self.rows = {req_id: row for row, req_id in enumerate(step.req_ids)}
        self.codes: Codes = np.array([life.codes[-1] for life in lives], dtype=np.int32)
        self.prompts = np.array(step.num_prompt_tokens, dtype=np.int64)
        self.phases: tuple[Mask, Mask] | None = None


_NOBODY, _RUNNING, _BEFORE_PREEMPTION, _PREEMPTED, _OVER = range(5)
_OWNERS = {
    _NOBODY: "hit-on-unknown-rows",
    _RUNNING: "hit-on-running-owner",
    _BEFORE_PREEMPTION: "hit-on-running-owner",
    _PREEMPTED: "hit-on-preempted-owner",
    _OVER: "hit-on-finished-owner",
}


class _Ledger:
    """Who wrote each slot last, as a code; ``states`` and ``seats`` by code say what has become of the writer.

    A code is even for rows of a prompt, and one more for rows past it; 0 is nobody. The pad slot -1 is the last element
    and always nobody's. A code is given out again when its writer is over and no slot has it any more, so that there
    are never many more codes than slots that were touched.
    """

    def __init__(self) -> None:
        self._who: Codes = np.zeros(1, dtype=np.int32)
        self.states = np.zeros(2, dtype=np.uint8)
        self.seats = np.full(2, -1, dtype=np.int64)
        self._free: list[int] = []
        self._over: list[int] = []

    def reach(self, num_slots: int) -> None:
        """Make room for so many slots; MemoryError where there is none."""
        had = len(self._who) - 1
        if num_slots > had:
            grown = np.zeros(max(num_slots, 2 * had) + 1, dtype=np.int32)
            grown[:had] = self._who[:-1]
            self._who = grown

    def open(self, seat: int) -> int:
        """A code for a request that enters."""
        if not self._free:
            self._make_room()
        code = self._free.pop()
        self.states[code : code + 2] = _RUNNING
        self.seats[code : code + 2] = seat
        return code

    def mark(self, codes: Iterable[int], state: int) -> None:
        """What has become of the writer of these."""
        for code in codes:
            self.states[code : code + 2] = state

    def forget(self, codes: Iterable[int]) -> None:
        """These are of a request that is over, and of nobody who has its seat."""
        self._over += codes

    def _make_room(self) -> None:
        used = np.zeros(len(self.states), dtype=np.bool_)
        used[self._who] = True
        used[:-1] |= used[1:]  # an even code stands for both
        self._free = [code for code in self._over if not used[code]]
        self._over = [code for code in self._over if used[code]]
        had = len(self.states)
        if len(self._free) <= had // 8:
            self.states = np.concatenate([self.states, np.zeros(max(had, 512), dtype=np.uint8)])
            self.seats = np.concatenate([self.seats, np.full(max(had, 512), -1, dtype=np.int64)])
            self._free += range(had, len(self.states), 2)

    def at(self, slots: Slots) -> Codes:
        """The codes in these slots."""
        return self._who[slots]

    def write(self, slots: Slots, codes_T: Codes) -> tuple[Codes, bool]:
        """Enter a step's rows; the codes that were there before, and whether a pad slot is among the slots."""
        before_T = self._who[slots]
        self._who[slots] = codes_T
        has_pads = bool(self._who[-1])
        self._who[-1] = 0
        return before_T, has_pads

    def given_up(self, before_T: Codes, codes_T: Codes) -> Mask | None:
        """Where the writer before is gone or was preempted, and was another than the one now; None for nowhere."""
        states_T = self.states[before_T]
        if states_T.max(initial=0) <= _RUNNING:
            return None
        mask: Mask = (states_T > _RUNNING) & (self.seats[before_T] != self.seats[codes_T])
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """The slots of computed tokens, and the codes that were there before the step."""

    slots: Slots
    before: Codes


class _Shares:
    """Which requests have which blocks in their rows, of all that run."""

    def __init__(self) -> None:
        self._holder: dict[int, _Life] = {}
        self.shared: dict[int, set[_Life]] = {}

    def move(self, life: _Life, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The request has this row now; the blocks of it that it may not have had before."""
        had = life.blocks
        life.blocks = blocks
        if blocks[: len(had)] == had:
            blocks = blocks[len(had) :]
        else:
            for block in set(had).difference(blocks):
                self._drop(life, block)
        self._hold(life, blocks)
        return blocks

    def _hold(self, life: _Life, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if block and (other := self._holder.setdefault(block, life)) is not life:
                self.shared.setdefault(block, {other}).add(life)

    def _drop(self, life: _Life, block: int) -> None:
        if (holders := self.shared.get(block)) is not None:
            holders.discard(life)
            self._holder[block] = next(iter(holders))
            if len(holders) == 1:
                del self.shared[block]
        elif self._holder.get(block) is life:
            del self._holder[block]


class _Prompts:
    """The tags with which each run of whole blocks of token ids came; the oldest of ``most`` blocks are forgotten."""

    def __init__(self, block_size: int, most: int) -> None:
        self._block_size = block_size
        self._most = most
        self._tags: OrderedDict[int, int | None] = OrderedDict()

    def differs(self, new: NewRequest) -> bool:
        """Whether it begins as a prompt before it, for whole blocks, under other tags; it is remembered itself."""
        size, ids, found, run, tags = self._block_size, new.prompt_token_ids, False, 0, 0
        by_block: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for position, tag in sorted(new.content.items()):
            by_block[position // size].append((position, tag))
        for index in range(len(ids) // size):
            run = hash((run, ids[index * size : (index + 1) * size]))
            tags = hash((tags, *by_block.get(index, ())))
            if self._tags.setdefault(run, tags) != tags:  # None where two tags have been seen already
                self._tags[run] = None
                found = True
        while len(self._tags) > self._most:
            self._tags.popitem(last=False)
        return found


# Watching


class Watcher:
    """Sees the steps of one trace, in order, each once, and counts the states that they reach.

    It keeps what the living requests and the slots of their blocks need, and the last ids that ended.
    """

    def __init__(self, cache: Geometry, path: str = "") -> None:
        self._path = path
        self._block_size = cache.block_size
        self._row_block_size = cache.kernel_block_size or cache.block_size
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Seen] = {}
        self._index = -1
        self._lives: dict[str, _Life] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # the oldest goes: a dict would search for it
        self._num_preempted = 0
        self._num_seats = 0
        self._batch: _Batch | None = None
        self._table: tuple[tuple[int, ...], ...] = ()
        self._drafted: dict[str, int] = {}
        self._slots_before: Slots = np.empty(0, dtype=np.int64)
        self._ledger = _Ledger()
        self._shares = _Shares()
        self._prompts = _Prompts(cache.block_size, max(cache.num_blocks, LEAST_PROMPT_BLOCKS))

    @property
    def coverage(self) -> Coverage:
        """Of the steps that were seen until now."""
        return Coverage(dict(self._counts), dict(self._first))

    def see(self, step: Step) -> None:
        """Count what this step reaches; SetupError where there is no memory for its slots."""
        self._index = step.index
        batch, prefilling, decoding = self._enter(step)
        prefixes = self._prefixes(step, batch)
        self._write(step, batch, decoding)
        for new in step.scheduled_new_reqs:
            self._see_new(step, batch.rows[new.req_id], new)
            if new.req_id in prefixes:
                self._see_owners(step, batch.rows[new.req_id], prefixes[new.req_id])
        for req_id in step.resumed_req_ids:
            self._see_resumed(req_id, prefixes.get(req_id))
        if prefilling.any():
            self._see_prefill(step, batch, prefilling)
            if decoding.any():
                self._note("mixed-step")
        if self._drafted or step.scheduled_spec_decode_tokens:
            self._see_drafts(step, batch)
        self._see_step(step, batch)
        self._slots_before = step.slot_mapping

    def _note(self, state: str, req_id: str | None = None, times: int = 1) -> None:
        self._counts[state] += times
        if state not in self._first:
            self._first[state] = Seen(self._path, self._index, req_id)

    def _note_tokens(self, state: str, step: Step, mask_T: Mask) -> None:
        """Count tokens of the step."""
        if times := int(np.count_nonzero(mask_T)):
            req_id = None if state in self._first else step.req_ids[_row_of(int(mask_T.argmax()), step)]
            self._note(state, req_id, times)

    # Who comes and goes

    def _enter(self, step: Step) -> tuple[_Batch, Mask, Mask]:
        """The batch of the step, and which rows of it prefill and decode."""
        changes = self._change_lives(step)
        batch = self._batch
        if batch is None or changes or step.req_ids is not batch.req_ids:
            batch = self._change_batch(step)
        if step.block_table is not self._table:
            self._change_blocks(step, batch)
        if batch.phases is not None and not self._drafted:
            return batch, *batch.phases
        starts = np.array(step.num_computed_tokens, dtype=np.int64)
        prefilling = starts < batch.prompts
        decoding = ~prefilling & (batch.prompts >= 0)
        batch.phases = None if prefilling.any() else (prefilling, decoding)
        return batch, prefilling, decoding

    def _change_lives(self, step: Step) -> bool:
        """Whether anything has changed."""
        new, resumed = step.scheduled_new_reqs, step.resumed_req_ids
        if not (new or resumed or step.finished_req_ids or step.preempted_req_ids):
            return False
        for req_id in step.finished_req_ids:
            self._end(req_id)
        for req_id in step.preempted_req_ids:
            self._preempt(self._lives[req_id])
        for req_id in resumed:
            self._resume(self._lives[req_id])
        for request in new:
            self._admit(request, step.finished_req_ids)
        return True

    def _end(self, req_id: str) -> None:
        life = self._lives.pop(req_id, None)
        if life is None:
            if req_id not in self._ended:
                self._note("ended-unseen", req_id)
        else:
            if life.short:
                self._note("ended-mid-prefill", req_id)
            if life.is_preempted:
                self._note("ended-while-preempted", req_id)
            self._leave(life)
            self._ledger.forget(life.past_codes + life.codes)
        self._ended[req_id] = None
        self._ended.move_to_end(req_id)
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def _leave(self, life: _Life) -> None:
        """It is over, by its end or because another takes its place."""
        self._ledger.mark(life.codes, _OVER)
        self._shares.move(life, ())
        self._num_preempted -= life.is_preempted
        self._drafted.pop(life.req_id, None)

    def _preempt(self, life: _Life) -> None:
        if life.is_preempted:
            return
        life.is_preempted = True
        self._num_preempted += 1
        self._note("preempted", life.req_id)
        if life.short:
            self._note("preempted-mid-prefill", life.req_id)
        self._ledger.mark(life.codes, _PREEMPTED)
        self._shares.move(life, ())

    def _resume(self, life: _Life) -> None:
        self._num_preempted -= life.is_preempted
        life.is_preempted = life.is_hit = life.chunked = life.short = False
        life.enters = True
        if self._batch is not None and life.batch == self._batch.number:
            self._note("resumed-at-once", life.req_id)
        self._ledger.mark(life.codes, _BEFORE_PREEMPTION)
        life.codes.append(self._ledger.open(life.seat))
        self._drafted.pop(life.req_id, None)

    def _admit(self, new: NewRequest, finished: Sequence[str]) -> None:
        replaced, past = self._lives.get(new.req_id), []
        if replaced is None:
            self._num_seats += 1
            seat = self._num_seats
        else:
            self._note("replaced", new.req_id)
            self._leave(replaced)
            seat, past = replaced.seat, replaced.past_codes + replaced.codes
        self._lives[new.req_id] = _Life(new.req_id, seat, [self._ledger.open(seat)], past)
        if new.req_id in self._ended:
            del self._ended[new.req_id]
            self._note("id-reused", new.req_id)
            if new.req_id in finished:
                self._note("id-reused-at-once", new.req_id)

    # The batch and its blocks

    def _change_batch(self, step: Step) -> _Batch:
        before = -1 if self._batch is None else self._batch.number
        batch = _Batch(before + 1, [self._lives[req_id] for req_id in step.req_ids], step)
        highest, reordered = -1, ""
        for row, life in enumerate(batch.lives):
            if life.row not in (-1, row):
                self._note("row-moved", life.req_id)
            if life.batch == before and life.row >= 0:
                reordered = reordered or (life.req_id if life.row < highest else "")
                highest = max(highest, life.row)
            life.row, life.batch = row, batch.number
        if reordered:
            self._note("batch-reordered", reordered)
        self._batch = batch
        return batch

    def _change_blocks(self, step: Step, batch: _Batch) -> None:
        self._table = step.block_table
        changed = [(life, row) for life, row in zip(batch.lives, self._table, strict=True) if life.blocks is not row]
        for life, row in changed:
            if fresh := self._shares.move(life, row):
                self._reach((max(fresh) + 1) * self._row_block_size)

    def _reach(self, num_slots: int) -> None:
        try:
            self._ledger.reach(num_slots)
        except MemoryError:
            what = f"{self._path}, step {self._index}: no memory for a cache of {num_slots:,} slots"
            raise SetupError(what, "watch a trace of a smaller one") from None

    def _first_to_share(self, batch: _Batch) -> str | None:
        """A request of the batch whose row has a block of another's in it."""
        for holders in self._shares.shared.values():
            here = [life for life in holders if life.batch == batch.number]
            if len(here) > 1:
                return min(here, key=lambda life: life.row).req_id
        return None

    # What it computes, and what of it was computed

    def _write(self, step: Step, batch: _Batch, decoding: Mask) -> None:
        slots, size = step.slot_mapping, self._block_size
        if len(slots) == len(batch.lives):  # each request one token
            decoding_T, codes_T = decoding, batch.codes + decoding
        else:
            decoding_T, codes_T = self._by_token(step, batch, decoding)
        before_T, has_pads = self._ledger.write(slots, codes_T)
        if has_pads:
            self._note_tokens("pad-slot", step, slots < 0)
        if (given_up_T := self._ledger.given_up(before_T, codes_T)) is not None:
            self._note_tokens("evicted-and-reused", step, given_up_T)
        filled_T = slots % size == size - 1
        if filled_T.any():
            self._note_tokens("block-filled-by-decode", step, filled_T & decoding_T & (slots >= 0))

    @staticmethod
    def _by_token(step: Step, batch: _Batch, decoding: Mask) -> tuple[Mask, Codes]:
        """Whether each token's request decodes, and the code of its row."""
        rows_T = np.repeat(np.arange(len(batch.lives)), step.num_scheduled_tokens)
        shifts = np.array(step.num_computed_tokens, dtype=np.int64) - step.query_start_loc[:-1]
        positions_T, prompts_T = np.arange(step.num_tokens) + shifts[rows_T], batch.prompts[rows_T]
        past_T = (positions_T >= prompts_T) & (prompts_T >= 0)
        return decoding[rows_T], batch.codes[rows_T] + past_T

    def _prefixes(self, step: Step, batch: _Batch) -> dict[str, _Prefix]:
        """What the requests that enter with computed tokens find in the slots of these, by id."""
        if not (step.scheduled_new_reqs or step.resumed_req_ids):
            return {}
        prefixes = {}
        for req_id in (*(new.req_id for new in step.scheduled_new_reqs), *step.resumed_req_ids):
            if step.num_computed_tokens[row := batch.rows[req_id]]:
                slots = self._slots_of_prefix(step, row)
                prefixes[req_id] = _Prefix(slots, self._ledger.at(slots))
        return prefixes

    def _slots_of_prefix(self, step: Step, row: int) -> Slots:
        size, num_computed = self._row_block_size, step.num_computed_tokens[row]
        blocks = np.array(step.block_table[row][: -(-num_computed // size)], dtype=np.int64)
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:num_computed]

    def _see_new(self, step: Step, row: int, new: NewRequest) -> None:
        num_computed = step.num_computed_tokens[row]
        is_hit = self._lives[new.req_id].is_hit = num_computed > 0
        states = [
            *self._states_of_hit(num_computed),
            *self._states_of_prompt(num_computed, step.num_prompt_tokens[row]),
        ]
        if is_hit and new.replace:
            states.append("replaced-with-hit")
        if new.content:
            states.append("content-tagged")
        if self._prompts.differs(new):
            states.append("same-tokens-other-content")
        for state in states:
            self._note(state, new.req_id)

    def _states_of_hit(self, num_computed: int) -> list[str]:
        if not num_computed:
            return ["cold"]
        size = self._block_size
        states = {
            "hit-one-block": num_computed == size,
            "hit-many-blocks": num_computed >= 2 * size,
            "hit-over-100-blocks": num_computed > MANY_BLOCKS * size,
            "hit-inside-a-block": num_computed % size != 0,
        }
        return [state for state, reached in states.items() if reached]

    def _states_of_prompt(self, num_computed: int, num_prompt: int) -> list[str]:
        """Nothing of a prompt of unknown length (-1), or of none."""
        if num_prompt < 1:
            return []
        size = self._block_size
        tail = num_prompt % size
        states = {
            "full-prompt-hit": tail == 0 and 0 < num_computed == num_prompt - size,
            "all-whole-blocks-hit": tail != 0 and 0 < num_computed == num_prompt - tail,
            "prompt-within-a-block": num_prompt < size,
            "prompt-of-one-block": num_prompt == size,
            "one-token-past-a-block": num_prompt > size and (num_prompt - 1) % size == 0,
        }
        return [state for state, reached in states.items() if reached]

    def _see_owners(self, step: Step, row: int, prefix: _Prefix) -> None:
        """Whose rows a hit is on, those that are written in this very step among them."""
        slots = prefix.slots
        ahead = np.isin(slots, step.slot_mapping[: step.query_start_loc[row]])
        behind = np.isin(slots, step.slot_mapping[step.query_start_loc[row + 1] :])
        earlier, codes = ~(ahead | behind), self._ledger.at(slots)
        states = {_OWNERS[int(state)] for state in np.unique(self._ledger.states[prefix.before[earlier]])}
        for state, reached in {
            "same-step-hit": not earlier.all(),
            "same-step-hit-reader-first": behind.any(),
            "hit-one-step-later": np.isin(slots[earlier], self._slots_before).any(),
            "hit-on-several-owners": len(np.unique(self._ledger.seats[codes[codes > 0]])) > 1,
            "hit-on-decoded-rows": (codes & 1).any(),
        }.items():
            if reached:
                states.add(state)
        for state in states:
            self._note(state, step.req_ids[row])

    def _see_resumed(self, req_id: str, prefix: _Prefix | None) -> None:
        if prefix is None:
            self._note("resumed-cold", req_id)
            return
        self._note("resumed-with-hit", req_id)
        codes = self._ledger.at(prefix.slots)
        if (self._ledger.seats[codes[codes > 0]] != self._lives[req_id].seat).any():
            self._note("resumed-on-others-rows", req_id)

    def _see_prefill(self, step: Step, batch: _Batch, prefilling: Mask) -> None:
        for row in np.flatnonzero(prefilling).tolist():
            life = batch.lives[row]
            end = step.num_computed_tokens[row] + step.num_scheduled_tokens[row]
            life.short = end < step.num_prompt_tokens[row]
            if not life.enters and not life.chunked:
                life.chunked = True
                self._note("chunked-prefill", life.req_id)
                if life.is_hit:
                    self._note("chunked-hit", life.req_id)
            life.enters = False

    def _see_drafts(self, step: Step, batch: _Batch) -> None:
        """Drafts are rejected where their request goes on before their end."""
        for req_id in self._drafted.keys() & batch.rows.keys():
            if step.num_computed_tokens[batch.rows[req_id]] < self._drafted.pop(req_id):
                self._note("drafts-rejected", req_id)
        for req_id, ids in step.scheduled_spec_decode_tokens.items():
            if ids:
                row = batch.rows[req_id]
                self._drafted[req_id] = step.num_computed_tokens[row] + step.num_scheduled_tokens[row]
                self._note("drafts", req_id)

    def _see_step(self, step: Step, batch: _Batch) -> None:
        num_requests = len(batch.lives)
        if left_out := len(self._lives) - self._num_preempted - num_requests:
            self._see_left_out(batch, left_out)
        if self._shares.shared and (req_id := self._first_to_share(batch)) is not None:
            self._note("block-shared", req_id)
        if step.num_tokens_padded > len(step.slot_mapping):
            self._note("padded-step")
        if num_requests >= BIG_BATCH:
            self._note("big-batch")
        if not num_requests:
            self._note("empty-step")

    def _see_left_out(self, batch: _Batch, times: int) -> None:
        req_id = None
        if "alive-not-scheduled" not in self._first:
            idle = (life for life in self._lives.values() if life.batch != batch.number and not life.is_preempted)
            req_id = next(idle).req_id
        self._note("alive-not-scheduled", req_id, times)


def _row_of(token: int, step: Step) -> int:
    """The row of the batch that a token of the step belongs to."""
    return next(row for row, stop in enumerate(step.query_start_loc[1:]) if token < stop)
