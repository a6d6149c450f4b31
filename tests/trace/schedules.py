"""Schedules made up by chance that a scheduler could have made, told in the richest form the model has."""

from __future__ import annotations

import random
from collections.abc import Iterator

from omnisim.trace import Geometry, Header, NewRequest, Producer, StepRecord
from omnisim.trace.expand import slot_runs

BLOCK_SIZE = 4
NUM_BLOCKS = 64


def header() -> Header:
    return Header(
        format="omnisim-trace/1",
        producer=Producer(name="chance", version="1: é\n'"),
        cache=Geometry(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_cache_groups=2),
    )


class _Living:
    def __init__(self, name: str, prompt: tuple[int, ...]) -> None:
        self.name = name
        self.ids = list(prompt)
        self.told = len(prompt)
        self.blocks: list[int] = []
        self.end = 0


def schedule(seed: int, num_steps: int) -> Iterator[StepRecord]:
    """Requests enter, run in chunks, are preempted and resumed, and finish; facts are recorded in some steps."""
    chance = random.Random(seed)
    numbered = chance.random() < 0.5
    living: dict[str, _Living] = {}
    waiting: dict[str, _Living] = {}
    free = list(range(1, NUM_BLOCKS))
    for index in range(num_steps):
        finished = [name for name in living if chance.random() < 0.1]
        for name in finished:
            free += living.pop(name).blocks
        preempted = [name for name in living if chance.random() < 0.1]
        for name in preempted:
            waiting[name] = living.pop(name)
            free += waiting[name].blocks
            waiting[name].blocks = []
        resumed = [name for name in waiting if chance.random() < 0.5]
        for name in resumed:
            living[name] = waiting.pop(name)
            living[name].end = 0
        new = []
        if chance.random() < 0.6:
            prompt = tuple(chance.randrange(1000) for _ in range(chance.randint(1, 12)))
            name = chance.choice(["r", "é: {", "no", "1", "#"]) + str(index)
            living[name] = _Living(name, prompt)
            new.append(NewRequest(req_id=name, prompt_token_ids=prompt, content={0: "tag"} if index % 3 else {}))
        entering = {request.req_id for request in new} | set(resumed)
        batch = [one for one in living.values() if one.name in entering or chance.random() < 0.8]
        chance.shuffle(batch)
        yield _step(chance, 3 * index if numbered else None, batch, free, finished, preempted, resumed, new)


def _step(
    chance: random.Random,
    index: int | None,
    batch: list[_Living],
    free: list[int],
    finished: list[str],
    preempted: list[str],
    resumed: list[str],
    new: list[NewRequest],
) -> StepRecord:
    computed, scheduled, told, slots = [], [], [], []
    replaced, appended = {}, {}
    for one in batch:
        start, count = one.end, chance.randint(1, max(1, len(one.ids) - one.end))
        need = -(-(start + count) // BLOCK_SIZE) - len(one.blocks)
        got = [free.pop(0) for _ in range(max(0, need))]
        if not one.blocks:
            replaced[one.name] = tuple(got)
        elif got:
            appended[one.name] = tuple(got)
        one.blocks += got
        one.ids += [chance.randrange(1000) for _ in range(start + count - len(one.ids))]
        told.append(tuple(one.ids[one.told : start + count]))
        one.told, one.end = max(one.told, start + count), start + count
        slots += [one.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, start + count)]
        computed.append(start)
        scheduled.append(count)
    facts = {}
    if chance.random() < 0.5:
        pads = chance.randint(0, 4)
        starts = [sum(scheduled[:row]) for row in range(len(batch) + 1)]
        facts = {
            "query_start_loc": tuple(starts),
            "slot_mapping": slot_runs(slots + [-1] * pads),
            "num_tokens_padded": len(slots) + pads,
        }
    return StepRecord(
        step=index,
        req_ids=tuple(one.name for one in batch),
        num_computed_tokens=tuple(computed),
        num_scheduled_tokens=tuple(scheduled),
        block_ids=replaced,
        new_block_ids=appended,
        scheduled_new_reqs=tuple(new),
        resumed_req_ids=tuple(resumed),
        preempted_req_ids=tuple(preempted),
        finished_req_ids=tuple(finished),
        new_token_ids=tuple(told),
        absent_keys=("codes.audio",) if chance.random() < 0.2 else (),
        clobber=chance.random() < 0.2,
        read_delay=chance.choice([0, 0, 0, 1, 3]),
        fail_write=chance.random() < 0.1,
        host_num_computed_tokens={one.name: one.end + chance.randrange(3) for one in batch if chance.random() < 0.1},
        **facts,
    )


def decode_steps(num_steps: int, num_requests: int, block_size: int = 16) -> Iterator[StepRecord]:
    """One prefill of a token each, then decode steps of all, with every fact that a recorder writes down."""
    chance = random.Random(0)
    req_ids = tuple(f"chatcmpl-{row:03}-{chance.getrandbits(32):08x}" for row in range(num_requests))
    rows = [[1 + row] for row in range(num_requests)]
    yield StepRecord(
        step=0,
        req_ids=req_ids,
        num_computed_tokens=(0,) * num_requests,
        num_scheduled_tokens=(1,) * num_requests,
        block_ids={req_id: tuple(blocks) for req_id, blocks in zip(req_ids, rows, strict=True)},
        scheduled_new_reqs=tuple(NewRequest(req_id=req_id, prompt_token_ids=(7,)) for req_id in req_ids),
    )
    next_block = 1 + num_requests
    for at in range(1, num_steps):
        appended = {}
        for row, req_id in enumerate(req_ids):
            if (at + row) % block_size == 0 or at // block_size >= len(rows[row]):
                rows[row].append(next_block)
                appended[req_id] = (next_block,)
                next_block += 1
        slots = [blocks[at // block_size] * block_size + at % block_size for blocks in rows]
        yield StepRecord(
            step=at,
            num_computed_tokens=(at,) * num_requests,
            num_scheduled_tokens=(1,) * num_requests,
            query_start_loc=tuple(range(num_requests + 1)),
            new_block_ids=appended,
            slot_mapping=slot_runs(slots),
            num_tokens_padded=num_requests,
            new_token_ids=tuple((chance.randrange(150_000),) for _ in req_ids),
        )
