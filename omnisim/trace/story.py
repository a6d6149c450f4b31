"""Stories: schedules told in a line a step, for tests and bug reports.

    new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]     # in scheduled_new_reqs; 8 tokens from 0 on, blocks 1 and 2
    run A c=8 n=1 [1,2,4]                        # a known request; the blocks may be left out if they stay
    preempt B; run A
    resume B c=0 n=7 [5,6]
    fin A B

A step ends with its line or with `` / ``, an event with ``;``. Options of new, run, resume and replace: ``content=x``
(a tag from position 0 on), ``content=x@4`` (from 4), ``gen=1`` (the tag gen-1), ``p=8`` (length of the prompt; else all
chunks of more than one token count to it), ``drafts=3`` (so many of the last tokens are drafts), ``host=12`` (what the
batch on the host says is computed). Further events: ``pad 8`` (num_tokens_padded), ``slots [4,5,-1]`` (a recorded
slot_mapping), ``no K`` (the model emits no K), ``clobber`` (the outputs of the model are overwritten once the step is
handed out), ``late 2`` (the step is read 2 steps later), ``fail write`` (the first write into the cache fails).

Token ids are made up. A hit has the ids of whoever wrote its slots last, for that is what the author means by a hit;
slots nobody wrote, and all that is computed, have ids that occur nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from omnisim.errors import FileError
from omnisim.talker import Talker
from omnisim.trace.expand import slot_runs, span_slots
from omnisim.trace.files import Trace
from omnisim.trace.model import Geometry, Header, NewRequest, Producer, StepRecord

__all__ = ["numbered_story", "parse_story", "story_trace"]

Expect = Literal["agreement", "divergence", "refusal", "crash", "unusable"]

_LIST = re.compile(r"\[([^\]]*)\]")
_VERBS = ("new", "run", "resume", "replace", "fin", "preempt", "pad", "slots", "no", "clobber", "late", "fail")


def parse_story(text: str, *, block_size: int = 4, num_blocks: int | None = None) -> list[StepRecord]:
    """The records of a story; FileError, with the story's line, where it is not understood.

    Slots are of ``block_size`` tokens; a block that is not one of ``num_blocks`` is refused.
    """
    steps = list(_steps(text, "story", 1))
    blocks = _num_blocks(steps)
    if num_blocks is not None and blocks > num_blocks:
        raise FileError("story", f"block {blocks - 1} is not one of {num_blocks}", "raise num_blocks")
    return [record for _, record in _Writer(block_size).records(steps)]


def story_trace(
    text: str,
    *,
    talker: str | Talker | None = None,
    block_size: int = 4,
    num_blocks: int | None = None,
    kernel_block_size: int | None = None,
    num_kv_cache_groups: int = 1,
    expect: Mapping[str, Expect] | None = None,
) -> Trace:
    """A story as a trace in memory; as many blocks as it names, if ``num_blocks`` is not given."""
    split = block_size // (kernel_block_size or block_size)
    named = -(-_num_blocks(list(_steps(text, "story", 1))) // split)
    cache = Geometry(
        num_blocks=max(1, named) if num_blocks is None else num_blocks,
        block_size=block_size,
        num_kv_cache_groups=num_kv_cache_groups,
        kernel_block_size=kernel_block_size,
    )
    header = Header(
        format="omnisim-trace/1", producer=Producer(name="story"), cache=cache, talker=talker, expect=dict(expect or {})
    )
    records = numbered_story(text, cache, "story", 1)
    return Trace("story", header, lambda: iter(records))


def numbered_story(text: str, cache: Geometry, place: str, first_line: int) -> list[tuple[int, StepRecord]]:
    """Line and record of each step of a story that starts in ``first_line`` of the file ``place``."""
    writer = _Writer(cache.kernel_block_size or cache.block_size)
    return list(writer.records(list(_steps(text, place, first_line))))


# reading


@dataclass(slots=True)
class _Event:
    """One request that is scheduled; ``blocks`` is None where the story leaves them out."""

    verb: str
    req_id: str
    start: int | None
    num_tokens: int
    blocks: tuple[int, ...] | None
    num_prompt: int | None = None
    num_drafts: int = 0
    host: int | None = None
    content: dict[int, str] = field(default_factory=dict)

    @property
    def enters(self) -> bool:
        """Whether it is in scheduled_new_reqs."""
        return self.verb in ("new", "replace")


@dataclass(slots=True)
class _StoryStep:
    """The events of one step."""

    line: int
    scheduled: list[_Event] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    padded: int | None = None
    slots: list[int] | None = None
    clobber: bool = False
    read_delay: int = 0
    fail_write: bool = False


def _steps(text: str, place: str, first_line: int) -> Iterator[_StoryStep]:
    for line, written in enumerate(text.splitlines(), start=first_line):
        told = written.partition("#")[0].replace("`", "")
        for part in re.split(r"\s/\s", f" {told} "):
            if part.strip():
                yield _step(part, f"{place}:{line}", line)


def _step(text: str, place: str, line: int) -> _StoryStep:
    step = _StoryStep(line)
    for event in filter(None, map(str.strip, text.split(";"))):
        verb, _, rest = event.partition(" ")
        if verb not in _VERBS:
            raise FileError(place, f"{verb!r} is nothing that happens", f"it is one of {', '.join(_VERBS)}")
        _add(step, verb, rest, place)
    return step


def _add(step: _StoryStep, verb: str, rest: str, place: str) -> None:
    match verb:
        case "fin":
            step.finished += _names(rest)
        case "preempt":
            step.preempted += _names(rest)
        case "no":
            step.absent += _names(rest)
        case "pad":
            step.padded = _number(rest.strip(), verb, place)
        case "slots":
            found = _LIST.fullmatch(rest.strip())
            step.slots = _numbers(found[1] if found else rest, verb, place, lowest=-1)
        case "late":
            step.read_delay = _number(rest.strip(), verb, place, lowest=1)
        case "clobber":
            step.clobber = _whole(verb, rest, "", place)
        case "fail":
            step.fail_write = _whole(verb, rest, "write", place)
        case _:
            step.scheduled.append(_scheduled(verb, rest, place))


def _whole(verb: str, rest: str, wanted: str, place: str) -> bool:
    """That the event is just its words."""
    if rest.strip() != wanted:
        raise FileError(
            place, f"{f'{verb} {rest}'.strip()!r} is nothing that happens", f"write {verb} {wanted}".strip()
        )
    return True


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _scheduled(verb: str, text: str, place: str) -> _Event:
    found = _LIST.search(text)
    req_id, *options = _LIST.sub(" ", text).split() or [""]
    if not req_id or "=" in req_id:
        raise FileError(place, f"{verb} names no request", f"write {verb} A c=0 n=8 [1,2]")
    blocks = tuple(_numbers(found[1], "a block", place)) if found else None
    event = _Event(verb, req_id, None if verb == "run" else 0, 1, blocks)
    if blocks is None and verb != "run":
        raise FileError(place, f"{verb} {req_id} has no blocks", f"write {verb} {req_id} c=0 n=8 [1,2]")
    for option in options:
        _set(event, option, place)
    return event


def _set(event: _Event, option: str, place: str) -> None:
    name, equals, value = option.partition("=")
    match name if equals and value else None:
        case "c":
            event.start = _number(value, option, place)
        case "n":
            event.num_tokens = _number(value, option, place, lowest=1)
        case "p":
            event.num_prompt = _number(value, option, place)
        case "drafts":
            event.num_drafts = _number(value, option, place)
        case "host":
            event.host = _number(value, option, place)
        case "gen":
            if generation := _number(value, option, place):
                event.content[0] = f"gen-{generation}"
        case "content":
            tag, _, position = value.partition("@")
            event.content[_number(position or "0", option, place)] = tag
        case _:
            raise FileError(place, f"{option!r} is no option", "there are c= n= p= drafts= host= gen= content=")


def _number(text: str, what: str, place: str, lowest: int = 0) -> int:
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or not lowest <= int(text) < 2**31:
        raise FileError(place, f"{text!r} in {what} is no whole number from {lowest} on", "write digits")
    return int(text)


def _numbers(text: str, what: str, place: str, lowest: int = 0) -> list[int]:
    return [_number(item, what, place, lowest) for item in text.replace(",", " ").split()]


def _num_blocks(steps: Sequence[_StoryStep]) -> int:
    """One more than the highest block of the story."""
    rows = (event.blocks for step in steps for event in step.scheduled if event.blocks)
    return max((max(row) + 1 for row in rows), default=0)


# telling


class _Person:
    """A request as it is told: its token ids, how many of them the trace has told, and where it goes on."""

    def __init__(self, prompt_length: int = 0) -> None:
        self.ids: list[int] = [0] * prompt_length
        self.known = prompt_length
        self.blocks: tuple[int, ...] = ()
        self.start = 0
        self.stop = 0
        self.num_drafts = 0

    def schedule(self, event: _Event) -> None:
        """Take up the event's span and blocks; what was drafted behind its start is forgotten."""
        self.start = self.stop if event.start is None else event.start
        if self.num_drafts and event.verb == "run":
            self.known = max(self.known, self.start)
        self.stop = self.start + event.num_tokens
        self.blocks = self.blocks if event.blocks is None else event.blocks

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Slots of positions, as far as the blocks reach."""
        return span_slots(self.blocks, start, min(stop, len(self.blocks) * block_size), block_size)

    def tell(self, num_drafts: int) -> tuple[int, ...]:
        """The ids that the trace tells now."""
        told = tuple(self.ids[self.known : self.stop])
        self.num_drafts = num_drafts
        self.known = max(self.known, self.stop) - num_drafts
        return told


class _Writer:
    """Makes records of story steps, and makes up token ids as it goes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._people: dict[str, _Person] = {}
        self._slots: dict[int, int] = {}
        self._fresh = count(1)

    def records(self, steps: Sequence[_StoryStep]) -> Iterator[tuple[int, StepRecord]]:
        """Line and record of each step."""
        for at, step in enumerate(steps):
            for req_id in step.finished:
                self._people.pop(req_id, None)
            fields = self._block_changes(step)
            for event in step.scheduled:
                self._schedule(event, steps[at + 1 :])
            for event in step.scheduled:
                if event.enters:
                    self._hit(self._people[event.req_id])
            yield step.line, self._record(step, **fields)

    def _block_changes(self, step: _StoryStep) -> dict[str, Any]:
        replaced, appended = {}, {}
        for event in step.scheduled:
            person = self._people.get(event.req_id)
            had = person.blocks if person and event.verb == "run" else ()
            if event.blocks is None or event.blocks == had:
                continue
            if had and event.blocks[: len(had)] == had:
                appended[event.req_id] = event.blocks[len(had) :]
            else:
                replaced[event.req_id] = event.blocks
        return {"block_ids": replaced, "new_block_ids": appended}

    def _schedule(self, event: _Event, later: Sequence[_StoryStep]) -> None:
        """The request's span, with fresh ids where it has none yet, is written to its slots."""
        if event.enters:
            self._people[event.req_id] = _Person(_prompt_length(event, later))
        person = self._people.setdefault(event.req_id, _Person())
        person.schedule(event)
        if event.enters:
            person.ids[person.start :] = [next(self._fresh) for _ in person.ids[person.start :]]
        del person.ids[person.known :]
        person.ids += [next(self._fresh) for _ in range(len(person.ids), person.stop)]
        slots = person.slots(person.start, person.stop, self._block_size)
        self._slots.update(zip(slots, person.ids[person.start : person.stop], strict=False))

    def _hit(self, person: _Person) -> None:
        for position, slot in enumerate(person.slots(0, person.start, self._block_size)):
            if position < person.known:
                person.ids[position] = self._slots.setdefault(slot, next(self._fresh))

    def _record(self, step: _StoryStep, **fields: Any) -> StepRecord:
        people = [self._people[event.req_id] for event in step.scheduled]
        new = tuple(self._new_request(event) for event in step.scheduled if event.enters)
        told = [person.tell(event.num_drafts) for person, event in zip(people, step.scheduled, strict=True)]
        return StepRecord(
            req_ids=tuple(event.req_id for event in step.scheduled),
            num_computed_tokens=tuple(person.start for person in people),
            num_scheduled_tokens=tuple(event.num_tokens for event in step.scheduled),
            slot_mapping=None if step.slots is None else slot_runs(step.slots),
            num_tokens_padded=step.padded,
            scheduled_new_reqs=new,
            resumed_req_ids=tuple(event.req_id for event in step.scheduled if event.verb == "resume"),
            preempted_req_ids=tuple(step.preempted),
            finished_req_ids=tuple(step.finished),
            new_token_ids=tuple(told) if any(told) else (),
            scheduled_spec_decode_tokens={
                event.req_id: ids[-event.num_drafts :]
                for event, ids in zip(step.scheduled, told, strict=True)
                if event.num_drafts
            },
            absent_keys=tuple(step.absent),
            clobber=step.clobber,
            read_delay=step.read_delay,
            fail_write=step.fail_write,
            host_num_computed_tokens={event.req_id: event.host for event in step.scheduled if event.host is not None},
            **fields,
        )

    def _new_request(self, event: _Event) -> NewRequest:
        person = self._people[event.req_id]
        return NewRequest(
            req_id=event.req_id,
            prompt_token_ids=tuple(person.ids[: person.known]),
            content=event.content,
            replace=event.verb == "replace",
        )


def _prompt_length(event: _Event, later: Sequence[_StoryStep]) -> int:
    """Stated, or the end of the first chunk and of those of more than one token that follow it."""
    if event.num_prompt is not None:
        return event.num_prompt
    end = (event.start or 0) + event.num_tokens
    for step in later:
        for other in step.scheduled:
            if other.req_id == event.req_id:
                if other.verb != "run" or other.num_tokens == 1 or other.num_drafts:
                    return end
                end = (end if other.start is None else other.start) + other.num_tokens
    return end
