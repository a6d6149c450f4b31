"""Batches with the attributes of the cache contract and no others, and stories that drive a cache as a runner does.

A story is told in the notation of the defect corpus, a step a line, its events separated by ``;``::

    new A c=0 n=4 [1]                   A enters with 0 computed tokens, 4 are scheduled, its block table is [1]
    fin A; new B c=4 n=2 [1,3]          A has finished (its deferred rows are committed), B hits block 1
    run B c=6 n=1 [1,3]                 a known request
    resume B c=4 n=3 [1,5]              one that comes back after a preemption, marked like a new hit
    new A=G c=0 n=4 [3]                 request A emits the rows of G: other content behind the same id

and, beside these, ``abort A`` (leaves; its deferred rows are discarded), ``no K`` (key K is not emitted in this step),
``pad 8`` (outputs are padded to 8 rows) and ``slots 4,5,-1`` (the slot mapping of this step, in place of the true one).

Every emitted row says whose it is: ``A.6`` is the row of request A at position 6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnisim.cache import ModelPolicy, OmniTensorPrefixCache

HIDDEN = "hidden_states"
BLOCK_SIZE = 4
NUM_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Request:
    """One request in one step; ``event`` is ``new``, ``run`` or ``resume``."""

    id: str
    computed: int
    num_new: int
    blocks: tuple[int, ...]
    event: str = "run"
    content: str = ""

    def slots(self, block_size: int = BLOCK_SIZE) -> list[int]:
        """Slots of the tokens scheduled in this step."""
        positions = range(self.computed, self.computed + self.num_new)
        return [self.blocks[at // block_size] * block_size + at % block_size for at in positions]


class _Only:
    """An object with these attributes and no others."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Tables:
    """``block_table`` of a batch: indexable, one table a KV-cache group."""

    def __init__(self, groups: Sequence[Tensor]) -> None:
        self.block_tables = [_Only(block_table=_Only(cpu=table)) for table in groups]

    def __getitem__(self, group: int) -> Any:
        return self.block_tables[group]


def batch(requests: Sequence[Request], counts: Any = None, other_groups: Sequence[Sequence[int]] = ()) -> Any:
    """A stand-in for the batch of one step; ``counts`` overrides ``num_computed_tokens_cpu``."""
    width = max((len(request.blocks) for request in requests), default=0)
    table = torch.zeros((len(requests), width), dtype=torch.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
    ids = [request.id for request in requests]
    return _Only(
        req_ids=ids,
        req_id_to_index={req_id: row for row, req_id in enumerate(ids)},
        num_computed_tokens_cpu=np.array([r.computed for r in requests], np.int32) if counts is None else counts,
        block_table=Tables([table, *(torch.tensor([group], dtype=torch.int32) for group in other_groups)]),
    )


def starts(requests: Sequence[Request]) -> list[int]:
    """``query_start_loc``, with its last entry."""
    return [0, *accumulate(request.num_new for request in requests)]


def scheduled(requests: Sequence[Request]) -> dict[str, int]:
    """``num_scheduled_tokens``."""
    return {request.id: request.num_new for request in requests}


# Rows that say whose they are

KEY_OFFSET = 0.25


def rows(owner: str, start: int, stop: int, *, key: str = HIDDEN, shape: Sequence[int] = (2,)) -> Tensor:
    """Rows ``[start, stop)`` of the request named by one letter, float32; other keys than hidden have other rows."""
    first = 100.0 * (ord(owner) - ord("A") + 1) + (0.0 if key == HIDDEN else KEY_OFFSET)
    column = torch.arange(first + start, first + stop, dtype=torch.float32)
    return column.view(-1, *(1 for _ in shape)).expand(-1, *shape).clone()


PADDING = -1.0
OVERWRITTEN = -2.0
_MARKED = {0.0: "zero", PADDING: "padding", OVERWRITTEN: "overwritten"}


def names(delivered: Tensor, key: str = HIDDEN) -> str:
    """``"A.0..3 B.4"`` for four rows of A and one of B."""
    runs: list[tuple[str, int, int]] = []
    for owner, position in (_name(row, key) for row in delivered.double()):
        if runs and position >= 0 and runs[-1][0] == owner and runs[-1][2] == position - 1:
            runs[-1] = (owner, runs[-1][1], position)
        else:
            runs.append((owner, position, position))
    return " ".join(_run_name(*run) for run in runs)


def _run_name(owner: str, start: int, last: int) -> str:
    if start < 0:
        return owner
    return f"{owner}.{start}" if start == last else f"{owner}.{start}..{last}"


def _name(row: Tensor, key: str) -> tuple[str, int]:
    value = float(row.flatten()[0])
    if not bool((row == value).all()):
        return f"mixed {row.tolist()}", -1
    if value in _MARKED:
        return _MARKED[value], -1
    letter, position = divmod(value - (0.0 if key == HIDDEN else KEY_OFFSET), 100)
    if not (position.is_integer() and 1 <= letter <= 26):
        return f"unknown {value}", -1
    return chr(ord("A") + int(letter) - 1), int(position)


# Stories


@dataclass(slots=True)
class Line:
    """What one line of a story says."""

    requests: list[Request] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    num_padded: int = 0
    slots: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(request.num_new for request in self.requests)


_REQUEST = re.compile(r"(new|run|resume) (\w)(?:=(\w))? c=(\d+) n=(\d+) \[([\d,]*)\]")


def read_story(story: str) -> Iterator[Line]:
    """Its lines; an event that is not understood raises ``ValueError``."""
    for text in filter(None, map(str.strip, story.splitlines())):
        line = Line()
        for event in map(str.strip, text.split(";")):
            _read_event(event, line)
        yield line


def _read_event(event: str, line: Line) -> None:
    if match := _REQUEST.fullmatch(event):
        what, req_id, content, computed, num_new, blocks = match.groups()
        ids = tuple(int(block) for block in blocks.split(",") if block)
        line.requests.append(Request(req_id, int(computed), int(num_new), ids, what, content or req_id))
        return
    word, _, rest = event.partition(" ")
    match word:
        case "fin":
            line.finished.append(rest)
        case "abort":
            line.aborted.append(rest)
        case "no":
            line.absent.add(rest)
        case "pad":
            line.num_padded = int(rest)
        case "slots":
            line.slots = [int(slot) for slot in rest.split(",")]
        case _:
            raise ValueError(f"not an event of a story: {event!r}")


@dataclass(slots=True)
class Delivery:
    """What one step handed out, and what it looked like at that time."""

    hidden: dict[str, Tensor]
    mm: dict[str, dict[str, Any]]
    at_once: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at_once = [value.clone() for value in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Every delivered tensor."""
        per_key = [self.hidden, *self.mm.values()]
        return [value for per_request in per_key for value in per_request.values() if isinstance(value, Tensor)]

    @property
    def changed_since(self) -> bool:
        """Whether something delivered is not what it was."""
        return any(not torch.equal(now, then) for now, then in zip(self.tensors(), self.at_once, strict=True))

    def of(self, req_id: str, key: str = HIDDEN) -> str:
        """The names of the rows that a request got."""
        return names(self.hidden[req_id] if key == HIDDEN else self.mm[key][req_id], key)


Extra = Callable[[Line], Mapping[str, Any]]


@dataclass(slots=True)
class Player:
    """Calls ``cache`` in the order of a runner. Output buffers and slot mapping are overwritten after each step."""

    cache: OmniTensorPrefixCache
    keys: Sequence[str] = ("K",)
    deferred: frozenset[str] = frozenset()
    shape: Sequence[int] = (2,)
    extra: Extra = lambda line: {}
    pads_keys: bool = True
    stages_with_counts_before: bool = False
    other_groups: Sequence[Sequence[int]] = ()
    num_prompt_tokens: Mapping[str, int] | None = None
    running: set[str] = field(default_factory=set)
    inputs_changed: bool = False

    def step(self, line: Line) -> Delivery:
        """One step of the runner."""
        self._leave(line)
        self._mark(line.requests)
        hidden, outputs, slots = self._forward(line)
        before = hidden.clone(), {key: outputs[key].clone() for key in self._emitted(line)}, slots.clone()
        delivery = self._call(line, hidden, outputs, slots)
        after = hidden, {key: outputs[key] for key in self._emitted(line)}, slots
        self.inputs_changed |= not _same(before, after)
        for buffer in (hidden, *after[1].values()):
            buffer.fill_(OVERWRITTEN)
        slots.fill_(0)
        return delivery

    def _leave(self, line: Line) -> None:
        self.cache.commit_deferred_mm_outputs(set(line.finished), batch(line.requests))
        self.cache.reset_prefix_cached_new_req_ids()
        for req_id in (*line.finished, *line.aborted):
            self.cache.discard_deferred_mm_outputs(req_id)
            self.running.discard(req_id)

    def _mark(self, requests: Iterable[Request]) -> None:
        for request in requests:
            enters = request.event == "resume" or (request.event == "new" and request.id not in self.running)
            if enters and request.computed:
                self.cache.add_prefix_cached_new_req_id(request.id)
            self.running.add(request.id)

    def _emitted(self, line: Line) -> list[str]:
        return [key for key in self.keys if key not in line.absent]

    def _forward(self, line: Line) -> tuple[Tensor, dict[str, Any], Tensor]:
        hidden = self._emit(line, HIDDEN, (2,))
        outputs: dict[str, Any] = {key: self._emit(line, key, self.shape) for key in self._emitted(line)}
        slots = line.slots or [slot for request in line.requests for slot in request.slots(self.cache.block_size)]
        return hidden, outputs | dict(self.extra(line)), torch.tensor(slots)

    def _emit(self, line: Line, key: str, shape: Sequence[int]) -> Tensor:
        spans = [rows(r.content, r.computed, r.computed + r.num_new, key=key, shape=shape) for r in line.requests]
        num_padding = max(0, line.num_padded - line.num_tokens) if key == HIDDEN or self.pads_keys else 0
        padding = torch.full((num_padding, *shape), PADDING)
        return torch.cat([*spans, padding])

    def _call(self, line: Line, hidden: Tensor, outputs: dict[str, Any], slots: Tensor) -> Delivery:
        qsl, counts = starts(line.requests), scheduled(line.requests)
        before = batch(line.requests, other_groups=self.other_groups)
        if self.num_prompt_tokens is not None:
            before.num_prompt_tokens = np.array([self.num_prompt_tokens[request.id] for request in line.requests])
        after = batch(line.requests, before.num_computed_tokens_cpu + np.array(list(counts.values()), np.int32))
        cache = self.cache
        cache.update_omni_tensor_prefix_cache(
            hidden, outputs, line.num_tokens, slots, line.num_padded or None, self.deferred
        )
        staged_with = before if self.stages_with_counts_before else after
        cache.stage_deferred_mm_outputs(qsl, staged_with, outputs, counts, self.deferred)
        return Delivery(
            cache.get_merged_hidden_states(qsl, before, hidden, counts),
            cache.get_merged_multimodal_states(qsl, before, outputs, counts),
        )


def _same(one: Any, other: Any) -> bool:
    (hidden, keys, slots), (hidden_now, keys_now, slots_now) = one, other
    same_keys = all(torch.equal(keys[key], keys_now[key]) for key in keys)
    return same_keys and torch.equal(hidden, hidden_now) and torch.equal(slots, slots_now)


def play(
    story: str,
    *,
    cache_class: type[OmniTensorPrefixCache] = OmniTensorPrefixCache,
    policy: ModelPolicy | None = None,
    block_size: int = BLOCK_SIZE,
    deferred: Iterable[str] = (),
    **options: Any,
) -> tuple[Player, list[Delivery]]:
    """Play a story through a new cache; ``options`` are the fields of ``Player``."""
    cache = cache_class(NUM_BLOCKS, block_size, 2, torch.float32, policy=policy or ModelPolicy())
    player = Player(cache, deferred=frozenset(deferred), **options)
    return player, [player.step(line) for line in read_story(story)]
