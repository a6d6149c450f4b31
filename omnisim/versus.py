"""Caches against each other: each in a process of its own, and asked in turn, so that all meet the same noise.

What is timed are the calls of the cache itself, not of the adapter around them. Inputs are live buffers that nobody
copies, and vllm-omni 0.24 to 0.28 write by the synchronous call: a copy from a GPU that overlaps with something is not
what a CPU can measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from omnisim.batch import make_batch
from omnisim.errors import OmnisimError, SetupError
from omnisim.replay import replay
from omnisim.rows import make_names, make_rows
from omnisim.rows.emit import ModelOutput
from omnisim.subjects import Setup, Subject, make_subject
from omnisim.talker import Talker
from omnisim.trace import Geometry, Header, NewRequest, Producer, StepRecord, load
from omnisim.trace.expand import Expander
from omnisim.trace.model import Step
from omnisim.truth import Truth
from omnisim.verify import Options, choose_grade, choose_talker
from omnisim.writes import WriteMeter

__all__ = ["PHASES", "WIDTHS", "Copied", "Timing", "copied", "measure", "serve"]

Phase = Literal["update", "merge", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("update", "merge", "decode")
WIDTHS: Final = (1024, 2048, 4096)

_BLOCK_SIZE = 16
_PREFIX = 1024
_TAIL = 64
_NUM_PREFIXES = 64
_NUM_HITS = 8
_NUM_DECODING = 64
_BLOCKS_A_PREFIX, _BLOCKS_A_TAIL = _PREFIX // _BLOCK_SIZE, _TAIL // _BLOCK_SIZE
_FIRST_TAIL = 1 + _NUM_PREFIXES * _BLOCKS_A_PREFIX
_FIRST_DECODING = _FIRST_TAIL + 2 * _NUM_HITS * _BLOCKS_A_TAIL
_BLOCKS_A_DECODING = 32
_NUM_BLOCKS = _FIRST_DECODING + _NUM_DECODING * _BLOCKS_A_DECODING

_WRITES = ("update_omni_tensor_prefix_cache", "schedule_async_write", "save_outputs")
_MERGES = ("get_merged_hidden_states", "get_merged_multimodal_states", "save_outputs", "materialize")
"""In ``save_outputs`` vllm-omni 0.30 gathers the rows of hits, and stores the new ones too."""


class Timing(msgspec.Struct, frozen=True):
    """Median seconds a turn of one phase, of the cache and of ``copy_`` of the same ``num_bytes``."""

    seconds: float
    copy_seconds: float
    num_bytes: int


class Copied(msgspec.Struct, frozen=True):
    """What a cache wrote in a trace, against what is ever read again.

    ``rows_read_again`` are rows, of the ``rows_computed`` of all keys, that some hit reads before they are overwritten.
    """

    steps: int
    rows_computed: int
    rows_read_again: int
    rows_written: int
    bytes_written: int


# In this process


def measure(subjects: Sequence[str], width: int, turns: int) -> dict[str, dict[Phase, Timing]]:
    """Each subject's time in each phase at rows of ``width`` bf16, over ``turns`` turns (at most 31)."""
    with ExitStack() as stack:
        peers = {subject: stack.enter_context(_Peer(subject)) for subject in subjects}
        for peer in peers.values():
            peer.ask(_Open(width))
        timings: dict[str, dict[Phase, Timing]] = {subject: {} for subject in subjects}
        for phase in PHASES:
            taken: dict[str, list[Timing]] = {subject: [] for subject in subjects}
            for turn in range(turns + 1):
                for subject, peer in peers.items():
                    told = msgspec.json.decode(peer.ask(_Turn(phase)), type=Timing)
                    if turn:  # the first is there to warm up
                        taken[subject].append(told)
            for subject, told_of in taken.items():
                timings[subject][phase] = _median(told_of)
    return timings


def _median(timings: Sequence[Timing]) -> Timing:
    seconds = median(timing.seconds for timing in timings)
    return Timing(seconds, median(timing.copy_seconds for timing in timings), timings[0].num_bytes)


def copied(subject: str, path: Path, talker: str | None) -> Copied:
    """What ``subject`` writes when the trace is replayed, in a process of its own."""
    with _Peer(subject) as peer:
        return msgspec.json.decode(peer.ask(_Replay(str(path), talker)), type=Copied)


class _Open(msgspec.Struct, frozen=True, tag="open"):
    width: int


class _Turn(msgspec.Struct, frozen=True, tag="turn"):
    phase: Phase


class _Replay(msgspec.Struct, frozen=True, tag="replay"):
    path: str
    talker: str | None


class _Answer(msgspec.Struct, frozen=True):
    value: msgspec.Raw
    error: str = ""


class _Peer:
    """The process of one subject, asked and answering a line at a time."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def __enter__(self) -> _Peer:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from omnisim.versus import serve; serve()", self.subject],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, question: msgspec.Struct) -> msgspec.Raw:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will be missing
        line = self._process.stdout.readline()
        if not line:
            raise SetupError(f"{self.subject} ended while it was measured", "replay a trace with it to see why")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise SetupError(answer.error, "replay a trace with this subject to see more")
        return answer.value


# In the process of a subject


def serve() -> None:
    """Measure the subject that is named by the first argument, as stdin asks."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    name, bench = sys.argv[1], None
    told: Timing | Copied | None
    for line in questions:
        try:
            match msgspec.json.decode(line, type=_Open | _Turn | _Replay):
                case _Open(width):
                    bench, told = _Bench(make_subject(name), width), None
                case _Turn(phase):
                    assert bench is not None
                    told = bench.turn(phase)
                case _Replay(path, talker):
                    told = _count(make_subject(name), path, talker)
            answer = _Answer(msgspec.Raw(msgspec.json.encode(told)))
        except OmnisimError as error:
            answer = _Answer(msgspec.Raw(b"null"), str(error))
        except Exception as raised:  # the code under test may raise anything
            answer = _Answer(msgspec.Raw(b"null"), f"{name}: {type(raised).__name__}: {raised}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


class _Clock:
    """A cache whose calls are timed, by the names of its methods."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if not callable(found):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

        return timed

    def taken(self, names: Sequence[str] | None) -> float:
        """Seconds in these methods, or in all, since it was last asked."""
        seconds, self.seconds = self.seconds, {}
        return sum(taken for name, taken in seconds.items() if names is None or name in names)


class _Bench:
    """One subject and the schedule by which it is measured."""

    def __init__(self, subject: Subject, width: int) -> None:
        geometry = Geometry(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        talker = Talker(
            format="omnisim-talker/1", name="bench", hidden_size=width, dtype="bfloat16", when_empty="empty"
        )
        subject.open(Setup(geometry, talker, write_mode="sync"))
        self._subject: Any = subject
        self._batch = make_batch("light", geometry)
        self._schedule = _Schedule()
        header = Header(format="omnisim-trace/1", producer=Producer(name="omnisim bench"), cache=geometry)
        self._expander = Expander(header, "bench")
        self._rows = torch.randn(2 * _PREFIX, width, generator=torch.Generator().manual_seed(0)).bfloat16()
        self._target = torch.ones(_NUM_BLOCKS * _BLOCK_SIZE, width, dtype=torch.bfloat16)
        self._turns = count()
        self._clock: _Clock | None = None

    def turn(self, phase: Phase) -> Timing:
        """One turn of a phase: a step, or as many as are long enough to be timed."""
        torch.set_num_threads(1 if phase == "decode" else len(os.sched_getaffinity(0)))
        names = {"update": _WRITES, "merge": _MERGES, "decode": None}[phase]
        taken = 0.0
        for _ in range(4 if phase == "decode" else 1):
            taken += self._step(phase, names)
        num_rows = {"update": 2 * _PREFIX, "merge": _NUM_HITS * (_PREFIX + _TAIL), "decode": 4 * _NUM_DECODING}[phase]
        return Timing(taken, self._copy(num_rows), num_rows * self._rows[0].nbytes)

    def _step(self, phase: Phase, names: Sequence[str] | None) -> float:
        step = self._expander.step(self._schedule.next(phase), 0)
        step = replace(step, clobber=True)  # an adapter copies what is not to be overwritten
        self._subject.finish(step, self._batch)
        if self._clock is None:
            if not hasattr(self._subject, "cache"):
                raise SetupError(f"{self._subject.name} has no cache that could be measured", "choose another subject")
            self._clock = self._subject.cache = _Clock(self._subject.cache)
        self._batch.apply(step)
        self._subject.begin(step, self._batch)
        self._subject.deliver(step, self._batch, ModelOutput(self._rows[: step.num_tokens], {}))
        return self._clock.taken(names)

    def _copy(self, num_rows: int) -> float:
        """Seconds to copy as many rows out of storage not touched recently into fresh memory, a piece a request."""
        pieces = -(-num_rows // len(self._rows))
        start_row = next(self._turns) * num_rows % (len(self._target) - num_rows)
        sources = self._target[start_row : start_row + num_rows].chunk(pieces)
        start = perf_counter()
        made = [torch.empty_like(source).copy_(source) for source in sources]
        taken = perf_counter() - start
        del made
        return taken


class _Schedule:
    """An endless legal schedule: first some prefixes, then whatever is wanted."""

    def __init__(self) -> None:
        self._token_ids = count(_NUM_PREFIXES * _PREFIX)
        self._order = np.random.default_rng(0).permutation(np.arange(1, _FIRST_TAIL)).tolist()
        self._prefills, self._hits, self._ordinals = count(), count(), count()
        self._num_prefixes = 0
        self._running: list[str] = []
        self._decoding: dict[str, int] = {}

    def next(self, phase: Phase) -> StepRecord:
        """A step of this phase."""
        return {"update": self._prefill, "merge": self._hit, "decode": self._decode}[phase]()

    def _prefill(self) -> StepRecord:
        """Two prefixes that nobody has: 2,048 rows."""
        first = next(self._prefills) * 2 % _NUM_PREFIXES
        prefixes = [first, first + 1]
        self._num_prefixes = max(self._num_prefixes, first + 2)
        news = [self._new(self._prefix(prefix)) for prefix in prefixes]
        return self._record(news, [0, 0], [_PREFIX] * 2, [self._blocks(prefix) for prefix in prefixes])

    def _hit(self) -> StepRecord:
        """Eight requests that hit a prefix of 1,024 tokens and bring 64 of their own."""
        turn = next(self._hits)
        prefixes = [(turn * _NUM_HITS + hit) % self._num_prefixes for hit in range(_NUM_HITS)]
        news = [self._new((*self._prefix(p), *(next(self._token_ids) for _ in range(_TAIL)))) for p in prefixes]
        tails = [_FIRST_TAIL + (turn % 2 * _NUM_HITS + hit) * _BLOCKS_A_TAIL for hit in range(_NUM_HITS)]
        tables = [(*self._blocks(p), *range(at, at + _BLOCKS_A_TAIL)) for p, at in zip(prefixes, tails, strict=True)]
        return self._record(news, [_PREFIX] * _NUM_HITS, [_TAIL] * _NUM_HITS, tables)

    def _decode(self) -> StepRecord:
        """64 requests, a token each; the first such step is their prefill, of one token."""
        if not self._decoding:
            news = [self._new((next(self._token_ids),)) for _ in range(_NUM_DECODING)]
            firsts = range(_FIRST_DECODING, _NUM_BLOCKS, _BLOCKS_A_DECODING)
            tables = [tuple(range(first, first + _BLOCKS_A_DECODING)) for first in firsts]
            record = self._record(news, [0] * _NUM_DECODING, [1] * _NUM_DECODING, tables)
            self._decoding = dict.fromkeys(self._running, 1)
            return record
        computed = list(self._decoding.values())
        self._decoding = {req_id: num + 1 for req_id, num in self._decoding.items()}
        return StepRecord(
            num_computed_tokens=tuple(computed),
            num_scheduled_tokens=(1,) * _NUM_DECODING,
            new_token_ids=tuple((next(self._token_ids),) for _ in computed),
        )

    def _record(
        self, news: list[NewRequest], computed: list[int], scheduled: list[int], tables: list[tuple[int, ...]]
    ) -> StepRecord:
        finished, self._running = self._running, [new.req_id for new in news]
        return StepRecord(
            req_ids=tuple(self._running),
            finished_req_ids=tuple(finished),
            scheduled_new_reqs=tuple(news),
            num_computed_tokens=tuple(computed),
            num_scheduled_tokens=tuple(scheduled),
            block_ids=dict(zip(self._running, tables, strict=True)),
        )

    def _new(self, token_ids: tuple[int, ...]) -> NewRequest:
        return NewRequest(req_id=f"r{next(self._ordinals)}", prompt_token_ids=token_ids)

    def _prefix(self, prefix: int) -> tuple[int, ...]:
        return tuple(range(prefix * _PREFIX, (prefix + 1) * _PREFIX))

    def _blocks(self, prefix: int) -> tuple[int, ...]:
        return tuple(self._order[prefix * _BLOCKS_A_PREFIX : (prefix + 1) * _BLOCKS_A_PREFIX])


def _count(subject: Subject, path: str, talker: str | None) -> Copied:
    """Replay the trace, count what is written, and which rows are read again; nothing is judged."""
    trace = load(path)
    options = Options(talker=talker)
    rows = make_rows(trace, choose_talker(trace, options), "owner", "cpu")
    geometry, grade = trace.header.cache, choose_grade(trace, options)
    truth = Truth(geometry, rows.row_keys, make_names(grade), grade)
    num_slots = geometry.num_blocks * geometry.block_size
    meter = WriteMeter(num_slots)
    subject.open(Setup(geometry, rows.talker, write_mode="sync"))
    readers = _Readers(num_slots, geometry.block_size)
    computed = read_again = steps = 0
    for outcome in replay(trace.steps(), truth, rows, _Metered(subject, meter), make_batch("light", geometry)):
        if outcome.raised is not None:
            raise outcome.raised
        steps += 1
        num_keys = len([key for key in outcome.due.emitted if key in rows.row_keys])
        computed += outcome.due.step.num_tokens * num_keys
        read_again += readers.follow(outcome.due.step) * num_keys
    return Copied(steps, computed, read_again, meter.rows, meter.num_bytes)


class _Readers:
    """Which rows are read again, told from the schedule alone."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._unread = np.zeros(num_slots, dtype=bool)
        self._block_size = block_size

    def follow(self, step: Step) -> int:
        """Rows that are read for the first time by hits of this step."""
        entering = {new.req_id for new in step.scheduled_new_reqs}.union(step.resumed_req_ids)
        self._unread[step.slot_mapping[step.slot_mapping >= 0]] = True
        first_reads = 0
        for req_id, computed, blocks in zip(step.req_ids, step.num_computed_tokens, step.block_table, strict=True):
            if req_id in entering and computed:
                offsets = np.arange(computed)
                slots = np.asarray(blocks)[offsets // self._block_size] * self._block_size + offsets % self._block_size
                first_reads += int(self._unread[slots].sum())
                self._unread[slots] = False
        return first_reads


class _Metered:
    """A subject whose calls are made under a meter."""

    def __init__(self, subject: Subject, meter: WriteMeter) -> None:
        self._subject, self._meter = subject, meter

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._subject, name)
        if not callable(found):
            return found

        def metered(*args: Any) -> Any:
            with self._meter:
                return found(*args)

        return metered
