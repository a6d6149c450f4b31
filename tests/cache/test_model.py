"""The cache against a dictionary: whatever a scheduler does, both hand out the same rows.

The model is ``{slot: {key: cell}}`` and knows nothing of turns, blocks or commits: a step replaces what its slots held,
and a hit reads the cells that are there. Hypothesis draws the schedule; every drawn number is taken modulo what is
possible, so each example is legal and shrinks to a short list of steps, which is told as a story where it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, event, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from omnisim.cache import KeyKind, ModelPolicy, OmniTensorPrefixCache, PrefixCacheError
from omnisim.cache.errors import AmbiguousKey, NeverWritten, RowsDiscarded

from .batches import HIDDEN, Request, batch, scheduled, starts

# What is drawn


@dataclass(frozen=True, slots=True)
class Key:
    """A row a token: its trailing shape and dtype, and whether it is written only when its request finishes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """A request enters (or, if one waits, resumes) with a hit of up to ``num_hit`` tokens of some earlier one."""

    source: int
    num_hit: int
    num_new: int
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """A request leaves: ``fin`` commits its deferred rows, ``abort`` discards them, ``preempt`` does neither."""

    which: int
    how: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step; ``advance`` holds the tokens of each running request in turn, 0 for not scheduled."""

    advance: tuple[int, ...]
    admits: tuple[Admit, ...] = ()
    leaves: tuple[Leave, ...] = ()
    absent: frozenset[int] = frozenset()
    unstored: frozenset[int] = frozenset()
    num_padding: int = 0
    admits_first: bool = False
    update_names_deferred: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """A cache and what its model emits."""

    num_blocks: int
    block_size: int
    keys: tuple[Key, ...]
    has_hidden: bool
    declares_kinds: bool


_SMALL = st.integers(0, 5)
_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.uint8, torch.int32]
_SHAPES = [(1,), (3,), (2, 3), (8,), (1, 2, 2), (5,)]


def _keys(names: str) -> st.SearchStrategy[tuple[Key, ...]]:
    one = [st.builds(Key, st.just(n), st.sampled_from(_SHAPES), st.sampled_from(_DTYPES), st.booleans()) for n in names]
    return st.tuples(*one)


_SETTINGS = st.builds(
    Setting,
    num_blocks=st.integers(5, 9),
    block_size=st.integers(1, 4),
    keys=st.sampled_from(["K", "KL", "KLM"]).flatmap(_keys),
    has_hidden=st.booleans(),
    declares_kinds=st.booleans(),
)
_STEPS = st.builds(
    Step,
    advance=st.lists(_SMALL, max_size=4).map(tuple),
    admits=st.lists(
        st.builds(Admit, st.integers(0, 9), st.integers(0, 12), st.integers(1, 7), st.booleans()), max_size=3
    ).map(tuple),
    leaves=st.lists(st.builds(Leave, _SMALL, st.sampled_from(["fin", "abort", "preempt"])), max_size=2).map(tuple),
    absent=st.frozensets(st.integers(0, 2), max_size=2),
    unstored=st.just(frozenset[int]()) | st.frozensets(_SMALL, max_size=2),
    num_padding=st.sampled_from([0, 0, 1, 4]),
    admits_first=st.booleans(),
    update_names_deferred=st.sampled_from([True, True, False]),
)


# A scheduler in twenty lines


@dataclass(slots=True)
class Live:
    """A request, its blocks and how many of its tokens are computed."""

    id: str
    blocks: list[int]
    computed: int


@dataclass(slots=True)
class Scheduler:
    """Hands out blocks, the least recently freed first; shares those of a hit."""

    num_blocks: int
    block_size: int
    running: list[Live] = field(default_factory=list)
    preempted: list[Live] = field(default_factory=list)
    past: list[Live] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    num_admitted: int = 0

    def leave(self, leave: Leave) -> str | None:
        if not self.running:
            return None
        live = self.running.pop(leave.which % len(self.running))
        if leave.how == "preempt":
            self.preempted.append(live)
        for block in live.blocks:
            self.last_use[block] = max(self.last_use.values(), default=0) + 1
        return live.id

    def advance(self, live: Live, num_new: int) -> Request | None:
        """Schedule ``num_new`` more tokens, if there are blocks for them."""
        num_needed = -(-(live.computed + num_new) // self.block_size) - len(live.blocks)
        free = self._free()
        if num_new == 0 or num_needed > len(free):
            return None
        live.blocks += free[:num_needed] if num_needed > 0 else []
        request = Request(live.id, live.computed, num_new, tuple(live.blocks))
        live.computed += num_new
        return request

    def admit(self, admit: Admit) -> Request | None:
        """Let a request in; its first blocks are those of the request that it hits."""
        resumed = self.preempted.pop(0) if admit.resumes and self.preempted else None
        source = resumed or (self.past[admit.source % len(self.past)] if self.past else Live("", [], 0))
        num_hit = self._shareable(source, min(admit.num_hit, source.computed))
        blocks = source.blocks[: -(-num_hit // self.block_size)]
        live = Live(resumed.id if resumed else chr(ord("A") + self.num_admitted), list(blocks), num_hit)
        self.running.append(live)
        request = self.advance(live, admit.num_new)
        if request is None:
            self.running.remove(live)
            self.preempted += [resumed] if resumed else []
            return None
        self.num_admitted += resumed is None
        self.past.append(live)
        return request

    def _shareable(self, source: Live, num_hit: int) -> int:
        """A block that somebody is filling is shared whole or not at all, or two would write one slot."""
        whole, tail = divmod(num_hit, self.block_size)
        in_use = {block for live in self.running for block in live.blocks}
        return whole * self.block_size if tail and source.blocks[whole] in in_use else num_hit

    def _free(self) -> list[int]:
        in_use = {block for live in self.running for block in live.blocks}
        return sorted(set(range(self.num_blocks)) - in_use, key=lambda block: self.last_use.get(block, 0))


# The model


@dataclass(slots=True)
class Cell:
    """A row; ``deferred_by`` until its request has finished, ``discarded`` if that never came to be."""

    row: Tensor
    deferred_by: str = ""
    discarded: bool = False


@dataclass(slots=True)
class Model:
    """What a slot holds: nothing if nobody computed it, else a cell for each key that was emitted."""

    slots: dict[int, dict[str, Cell]] = field(default_factory=dict)

    def finish(self, req_id: str) -> None:
        for cell in self._deferred_by(req_id):
            cell.deferred_by = ""

    def discard(self, req_id: str) -> None:
        for cell in self._deferred_by(req_id):
            cell.deferred_by, cell.discarded = "", True

    def _deferred_by(self, req_id: str) -> Iterator[Cell]:
        return (cell for cells in self.slots.values() for cell in cells.values() if cell.deferred_by == req_id)

    def cached(self, key: str, slots: Sequence[int]) -> tuple[list[Tensor], set[type[PrefixCacheError]], bool]:
        """Rows behind a hit, the refusals that are in order, and whether one must come."""
        must_refuse = any(slot not in self.slots or (key == HIDDEN and key not in self.slots[slot]) for slot in slots)
        cells = [self.slots[slot][key] for slot in slots if key in self.slots.get(slot, {})]
        refusals: set[type[PrefixCacheError]] = {NeverWritten} if must_refuse else set()
        if any(cell.discarded for cell in cells):
            refusals.add(RowsDiscarded)
        return [cell.row for cell in cells], refusals, must_refuse


# Both, step by step


class Trial:
    """Drives the cache as a runner does, and the model beside it."""

    def __init__(self, setting: Setting, cache_class: type[OmniTensorPrefixCache] = OmniTensorPrefixCache) -> None:
        policy = ModelPolicy(kinds={key.name: KeyKind.ROW for key in setting.keys if setting.declares_kinds})
        self.setting = setting
        self.cache = cache_class(setting.num_blocks, setting.block_size, 2, torch.float32, policy=policy)
        self.scheduler = Scheduler(setting.num_blocks, setting.block_size)
        self.model = Model()
        self.slot_buffer = torch.zeros(256, dtype=torch.int64)
        self.random = torch.Generator().manual_seed(0)
        self.delivered: list[tuple[str, Tensor, Tensor]] = []
        self.num_steps = 0

    def step(self, step: Step) -> None:
        leaving = [(self.scheduler.leave(leave), leave.how) for leave in step.leaves]
        known = list(self.scheduler.running)
        running = [self.scheduler.advance(live, num) for live, num in zip(known, step.advance, strict=False)]
        admitted = [self.scheduler.admit(admit) for admit in step.admits]
        lists = [admitted, running] if step.admits_first else [running, admitted]
        requests = [request for requests in lists for request in requests if request is not None]
        hits = {request.id for request in admitted if request is not None and request.computed}
        self._tell(requests, hits, leaving, step)
        self._leave([(who, how) for who, how in leaving if who is not None], requests)
        event(f"{min(len(hits), 2)} hits in a step")
        for req_id in hits:
            self.cache.add_prefix_cached_new_req_id(req_id)
        self._forward(requests, hits, step)
        self.num_steps += 1

    def _tell(self, requests: Sequence[Request], hits: set[str], leaving: Sequence[Any], step: Step) -> None:
        events = [f"{how} {who}" for who, how in leaving if who is not None]
        events += [
            f"{'hit' if r.id in hits else 'run'} {r.id} c={r.computed} n={r.num_new} {list(r.blocks)}" for r in requests
        ]
        events += [f"no {key.name}" for at, key in enumerate(self.setting.keys) if at in step.absent]
        note(f"step {self.num_steps}: {'; '.join(events)}")

    def _leave(self, leaving: Sequence[tuple[str, str]], requests: Sequence[Request]) -> None:
        finished = {who for who, how in leaving if how == "fin"}
        self.cache.commit_deferred_mm_outputs(finished, batch(requests))
        self.cache.reset_prefix_cached_new_req_ids()
        for who, how in leaving:
            if how != "preempt":
                (self.model.finish if how == "fin" else self.model.discard)(who)
                self.cache.discard_deferred_mm_outputs(who)

    def _forward(self, requests: Sequence[Request], hits: set[str], step: Step) -> None:
        slots = [slot for request in requests for slot in request.slots(self.setting.block_size)]
        if step.update_names_deferred:
            slots = [-1 if at in step.unstored else slot for at, slot in enumerate(slots)]
        keys = [key for at, key in enumerate(self.setting.keys) if at not in step.absent]
        outputs = {key.name: self._emit(key, len(slots) + step.num_padding) for key in keys}
        hidden_key = Key(HIDDEN, (2,), torch.float32)
        hidden = self._emit(hidden_key, len(slots) + step.num_padding) if self.setting.has_hidden else None
        self._write_model(requests, slots, outputs | ({} if hidden is None else {HIDDEN: hidden}))
        spans = list(zip(requests, starts(requests), strict=False))
        wants = {
            key: {request.id: self._want(key, request, rows, start, hits) for request, start in spans}
            for key, rows in [*outputs.items(), *([] if hidden is None else [(HIDDEN, hidden)])]
        }
        self._call(requests, slots, hidden, outputs, step, wants)
        for buffer in (*outputs.values(), *([] if hidden is None else [hidden])):
            buffer.fill_(1)

    def _emit(self, key: Key, num_rows: int) -> Tensor:
        limit = 2 if key.dtype is torch.bool else 251
        return torch.randint(0, limit, (num_rows, *key.shape), generator=self.random).to(key.dtype)

    def _write_model(self, requests: Sequence[Request], slots: Sequence[int], outputs: dict[str, Tensor]) -> None:
        deferred = {key.name for key in self.setting.keys if key.deferred}
        owners = [request.id for request in requests for _ in range(request.num_new)]
        for at, (slot, owner) in enumerate(zip(slots, owners, strict=True)):
            if slot >= 0:
                cells = {key: Cell(rows[at].clone(), owner if key in deferred else "") for key, rows in outputs.items()}
                self.model.slots[slot] = cells

    def _want(self, key: str, request: Request, rows: Tensor, start: int, hits: set[str]) -> Any:
        """Rows that are due to a request, the refusals that are in order, and whether one must come."""
        new = list(rows[start : start + request.num_new].clone())
        if request.id not in hits:
            return new, set(), False
        before = Request(request.id, 0, request.computed, request.blocks).slots(self.setting.block_size)
        cached, refusals, must_refuse = self.model.cached(key, before)
        if cached and key != HIDDEN and not self.setting.declares_kinds:
            refusals = refusals | {AmbiguousKey}
        return cached + new, refusals, must_refuse

    def _call(
        self,
        requests: Sequence[Request],
        slots: Sequence[int],
        hidden: Tensor | None,
        outputs: dict[str, Tensor],
        step: Step,
        wants: dict[str, Any],
    ) -> None:
        qsl = starts(requests) if self.num_steps % 2 else torch.tensor(starts(requests)[:-1], dtype=torch.int32)
        counts, deferred = scheduled(requests), {key.name for key in self.setting.keys if key.deferred}
        after = np.array([request.computed + request.num_new for request in requests], dtype=np.float32)
        self.slot_buffer.fill_(-1)
        self.slot_buffer[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
        named = {key: rows for key, rows in outputs.items() if step.update_names_deferred or key not in deferred}
        num_padded = len(slots) + step.num_padding if step.num_padding else None
        self.cache.update_omni_tensor_prefix_cache(
            hidden, named, len(slots), self.slot_buffer[: len(slots) + step.num_padding], num_padded, deferred
        )
        self.cache.stage_deferred_mm_outputs(qsl, batch(requests, after), outputs, counts, deferred)
        if hidden is not None:
            held: Tensor = hidden
            self._judge(
                {HIDDEN: wants.pop(HIDDEN)},
                lambda: {HIDDEN: self.cache.get_merged_hidden_states(qsl, batch(requests), held, counts)},
            )
        self._judge(wants, lambda: self.cache.get_merged_multimodal_states(qsl, batch(requests), outputs, counts))

    def _judge(self, wants: dict[str, Any], deliver: Callable[[], dict[str, dict[str, Tensor]]]) -> None:
        delivered, refusal = _try(deliver)
        if refusal is not None:
            allowed = {kind for per in wants.values() for _, refusals, _ in per.values() for kind in refusals}
            assert type(refusal) in allowed, f"step {self.num_steps}: refused for nothing: {refusal!r}"
            event(f"refusal {type(refusal).__name__}")
            return
        must_refuse = [(key, who) for key, per in wants.items() for who, want in per.items() if want[2]]
        assert not must_refuse, f"step {self.num_steps}: rows that were never written were served to {must_refuse}"
        assert {key: set(per) for key, per in delivered.items()} == {key: set(per) for key, per in wants.items()}
        for key, per_request in wants.items():
            for who, (rows, _, _) in per_request.items():
                self._compare(f"step {self.num_steps}, {who}, {key}", delivered[key][who], torch.stack(rows))

    def _compare(self, where: str, came: Tensor, due: Tensor) -> None:
        assert (came.dtype, came.shape) == (due.dtype, due.shape), f"{where}: form of the rows"
        assert came.is_contiguous(), where
        wrong = [at for at in range(len(due)) if not torch.equal(came[at], due[at])]
        assert not wrong, f"{where}: row {wrong[0]} is {came[wrong[0]].tolist()}, due was {due[wrong[0]].tolist()}"
        self.delivered.append((where, came, due))

    def finish(self) -> None:
        """What was delivered stays as it was, though every block may have been taken over since."""
        for where, came, due in self.delivered:
            assert torch.equal(came, due), f"{where}: changed after delivery"


def _try(deliver: Callable[[], dict[str, dict[str, Tensor]]]) -> tuple[dict[str, Any], PrefixCacheError | None]:
    try:
        return deliver(), None
    except PrefixCacheError as refusal:
        return {}, refusal


def play_steps(setting: Setting, steps: Sequence[Step], cache_class: Any = OmniTensorPrefixCache) -> None:
    trial = Trial(setting, cache_class)
    for step in steps:
        trial.step(step)
    trial.finish()


WALK = [
    Step((), (Admit(0, 0, 5),)),
    Step((1,), (Admit(0, 4, 2),), absent=frozenset({1})),
    Step((1, 1), leaves=(Leave(0, "fin"),)),
    Step((), (Admit(0, 5, 1),), (Leave(0, "preempt"),), num_padding=4),
    Step((1,), (Admit(0, 3, 3, resumes=True),), unstored=frozenset({0})),
    Step((), (Admit(1, 3, 7),), (Leave(0, "abort"), Leave(0, "abort"))),
]
"""What must not go untested whatever is drawn: hits on running and on finished requests, reuse, resumption, abort."""


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(Setting(6, 2, (Key("K", (3,), torch.int64, deferred=True), Key("L", (2,), torch.bool)), True, True), WALK)
@given(_SETTINGS, st.lists(_STEPS, min_size=1, max_size=12))
def test_the_cache_hands_out_what_a_dictionary_of_slots_would(setting: Setting, steps: list[Step]) -> None:
    play_steps(setting, steps)
