"""Benchmarks: each number is a ratio to something measured in the same process, the two taken turn by turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from omnisim.cache import OmniTensorPrefixCache
from omnisim.errors import SetupError, UsageError
from omnisim.trace import Geometry, Header, NewRequest, Producer, StepRecord, load, save
from omnisim.verify import Options, verify

__all__ = ["BENCHMARKS", "Benchmark", "Result", "Size", "made_up_header", "made_up_records", "run_benchmarks"]

Size = Literal["quick", "normal", "full"]
"""How much is measured: a look, the numbers, or the numbers and the longest stream."""

STREAM_STEPS: dict[Size, int] = {"quick": 4_000, "normal": 100_000, "full": 1_000_000}


@dataclass(frozen=True, slots=True)
class Result:
    """One measured line. ``goal`` is what the project aims at; ``met`` is None where there is none."""

    what: str
    measured: str
    goal: str = "none"
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What measures some lines, and with how many threads of torch: None is torch's default.

    One thread where the work of a call is small: there the threads of a busy machine cost more than they give, up to a
    hundred times.
    """

    measure: Callable[[Size], list[Result]]
    threads: int | None = 1


# Made-up schedules: legal, endless, and of any size


def made_up_header(num_requests: int, block_size: int = 16, lifetime: int = 100, families: int = 8) -> Header:
    """The header that goes with ``made_up_records`` of the same arguments."""
    num_blocks = 1 + families + num_requests * _blocks_a_lane(block_size, lifetime)
    return Header(
        format="omnisim-trace/1",
        producer=Producer(name="omnisim bench"),
        cache=Geometry(num_blocks=num_blocks, block_size=block_size),
        talker="hidden-only",
    )


def _blocks_a_lane(block_size: int, lifetime: int) -> int:
    return -(-(block_size + lifetime) // block_size)


def made_up_records(
    num_steps: int, num_requests: int, block_size: int = 16, lifetime: int = 100, families: int = 8
) -> Iterator[StepRecord]:
    """A schedule of ``num_requests`` lanes: in each, a request decodes for ``lifetime`` steps and the next takes over.

    Prompts are one block that is shared by a family, and one token. All but the first of a family hit that block.
    """
    token_ids = count(families * block_size + 1)
    computed_families: set[int] = set()
    lanes = [_Lane(lane, block_size, lifetime, families) for lane in range(num_requests)]
    for index in range(num_steps):
        finished = [lane.leave() for lane in lanes if lane.is_over]
        news = [lane.enter(next(token_ids), computed_families) for lane in lanes if lane.req_id is None]
        runs = [lane.run(next(token_ids)) for lane in lanes]
        yield StepRecord(
            step=index,
            req_ids=tuple(lane.req_id or "" for lane in lanes),
            num_computed_tokens=tuple(run[0] for run in runs),
            num_scheduled_tokens=tuple(run[1] for run in runs),
            block_ids={new.req_id: lane.blocks for lane in lanes for new in news if new.req_id == lane.req_id},
            scheduled_new_reqs=tuple(news),
            finished_req_ids=tuple(finished),
            new_token_ids=tuple(run[2] for run in runs),
        )


class _Lane:
    """One row of the batch and the requests that follow each other in it."""

    def __init__(self, lane: int, block_size: int, lifetime: int, families: int) -> None:
        self.lane, self.block_size, self.lifetime = lane, block_size, lifetime
        self.family = lane % families
        first = 1 + families + lane * _blocks_a_lane(block_size, lifetime)
        own = range(first, first + _blocks_a_lane(block_size, lifetime))
        self.blocks = (1 + self.family, *own)
        self.req_id: str | None = None
        self.generation = 0
        self.computed = 0
        self.left = 1 + lane * lifetime // 64 % lifetime
        self.is_new = False

    @property
    def is_over(self) -> bool:
        return self.req_id is not None and self.left == 0

    def leave(self) -> str:
        req_id, self.req_id, self.left = self.req_id or "", None, self.lifetime
        return req_id

    def enter(self, token_id: int, computed_families: set[int]) -> NewRequest:
        self.generation += 1
        self.req_id = f"r{self.lane}-{self.generation}"
        self.computed = self.block_size if self.family in computed_families else 0
        computed_families.add(self.family)
        prefix = range(self.family * self.block_size, (self.family + 1) * self.block_size)
        self.is_new = True
        return NewRequest(req_id=self.req_id, prompt_token_ids=(*prefix, token_id))

    def run(self, token_id: int) -> tuple[int, int, tuple[int, ...]]:
        computed, scheduled = self.computed, self.block_size + 1 - self.computed if self.is_new else 1
        told = () if self.is_new else (token_id,)
        self.is_new = False
        self.computed += scheduled
        self.left -= 1
        return computed, scheduled, told


# Measuring


def _in_turn(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call, run turn by turn so that both meet the same noise."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 2):
        for call, taken in zip(calls, times, strict=True):
            start = perf_counter()
            call()
            if repeat >= 2:
                taken.append(perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def _batch(counts: list[int], tables: list[list[int]]) -> SimpleNamespace:
    req_ids = [f"r{row}" for row in range(len(counts))]
    group = SimpleNamespace(block_table=SimpleNamespace(cpu=torch.tensor(tables)))
    table = _Groups([group])
    return SimpleNamespace(
        req_ids=req_ids,
        req_id_to_index={req_id: row for row, req_id in enumerate(req_ids)},
        num_computed_tokens_cpu=torch.tensor(counts).numpy(),
        block_table=table,
    )


class _Groups(list[Any]):
    @property
    def block_tables(self) -> list[Any]:
        return self


NUM_BLOCKS, BLOCK_SIZE, WIDTH = 4096, 16, 2048


def _warm_cache() -> OmniTensorPrefixCache:
    """A cache of 256 MiB in which every slot has been written."""
    cache = OmniTensorPrefixCache(NUM_BLOCKS, BLOCK_SIZE, WIDTH, torch.bfloat16)
    rows = torch.randn(2048, WIDTH).bfloat16()
    for start in range(0, NUM_BLOCKS * BLOCK_SIZE, 2048):
        cache.reset_prefix_cached_new_req_ids()
        cache.update_omni_tensor_prefix_cache(rows, None, 2048, torch.arange(start, start + 2048))
    return cache


def _bench_merge(size: Size) -> list[Result]:
    """8 hits of 1,024 cached and 64 new rows, width 2,048, bf16, against ``copy_`` of the same bytes."""
    cache = _warm_cache()
    order = torch.randperm(NUM_BLOCKS).tolist()
    turn = count()
    hidden = torch.randn(8 * 64, WIDTH).bfloat16()
    sources = [torch.randn(1024 + 64, WIDTH).bfloat16() for _ in range(8)]

    def batch() -> SimpleNamespace:
        start = next(turn) * 512 % (NUM_BLOCKS - 512)
        return _batch([1024] * 8, [order[start + 64 * hit : start + 64 * hit + 64] for hit in range(8)])

    batches = [batch() for _ in range(8)]
    scheduled = {f"r{row}": 64 for row in range(8)}
    starts = [64 * row for row in range(9)]
    cache.reset_prefix_cached_new_req_ids()
    for req_id in scheduled:
        cache.add_prefix_cached_new_req_id(req_id)

    def merge() -> dict[str, Tensor]:
        return cache.get_merged_hidden_states(starts, batches[next(turn) % 8], hidden, scheduled)

    def copy() -> list[Tensor]:
        return [torch.empty_like(source).copy_(source) for source in sources]  # all are kept, as merged rows are

    copied, merged = _in_turn(9 if size == "quick" else 61, copy, merge)
    num_bytes = sum(source.nbytes for source in sources)
    return [_bandwidth("merge of 8 hits, 1,024 + 64 rows", num_bytes, merged, copied, 0.7)]


def _bench_update(size: Size) -> list[Result]:
    """2,048 rows into slots not touched recently, against ``copy_`` into contiguous rows not touched recently."""
    cache = _warm_cache()
    rows = torch.randn(2048, WIDTH).bfloat16()
    target = torch.ones(NUM_BLOCKS * BLOCK_SIZE, WIDTH, dtype=torch.bfloat16)
    order = torch.randperm(NUM_BLOCKS)
    offsets = torch.arange(BLOCK_SIZE)
    slot_mappings = [
        (order[start : start + 128, None] * BLOCK_SIZE + offsets).reshape(-1) for start in range(0, NUM_BLOCKS, 128)
    ]
    turn, other = count(), count()

    def update() -> None:
        cache.reset_prefix_cached_new_req_ids()
        cache.update_omni_tensor_prefix_cache(rows, None, 2048, slot_mappings[next(turn) % len(slot_mappings)])

    def copy() -> None:
        start = next(other) * 2048 % len(target)
        target[start : start + 2048].copy_(rows)

    copied, updated = _in_turn(9 if size == "quick" else 61, copy, update)
    return [_bandwidth("update of 2,048 rows", rows.nbytes, updated, copied, 0.5)]


def _bandwidth(what: str, num_bytes: int, seconds: float, copied: float, goal: float) -> Result:
    ratio = copied / seconds
    measured = f"{ratio:.2f} of copy_ ({num_bytes / seconds / 1e9:.1f} against {num_bytes / copied / 1e9:.1f} GB/s)"
    return Result(what, measured, f">= {goal}", ratio >= goal)


def _bench_decode(size: Size) -> list[Result]:
    """A decode step of 64 requests, no hit, width 2,048, against a cache that only writes rows and cuts them apart."""
    cache = _warm_cache()
    hidden = torch.randn(64, WIDTH).bfloat16()
    batch = _batch([100] * 64, [list(range(row * 10, row * 10 + 10)) for row in range(64)])
    scheduled = {f"r{row}": 1 for row in range(64)}
    slots, starts = torch.arange(64) * 160 + 100, torch.arange(65)

    def step() -> None:
        cache.reset_prefix_cached_new_req_ids()
        cache.update_omni_tensor_prefix_cache(hidden, None, 64, slots)
        cache.get_merged_hidden_states(starts, batch, hidden, scheduled)

    storage = torch.ones(NUM_BLOCKS * BLOCK_SIZE, WIDTH, dtype=torch.bfloat16)

    def plain_step() -> dict[str, Tensor]:
        storage.index_copy_(0, slots, hidden)
        bounds = starts.tolist()
        return {req_id: hidden[bounds[row] : bounds[row + 1]].clone() for row, req_id in enumerate(scheduled)}

    plain, stepped = _in_turn(50 if size == "quick" else 1000, plain_step, step)
    measured = (
        f"{stepped * 1e6:.0f} us, {stepped / plain:.2f} of a plain index_copy_ and 64 clones ({plain * 1e6:.0f} us)"
    )
    return [Result("decode step of 64 requests, no hit", measured, "<= 120 us", stepped <= 120e-6)]


def _bench_replay(size: Size) -> list[Result]:
    """A replay of 64 requests at width 64, every output judged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made-up.jsonl"
        save(path, made_up_header(64), made_up_records(200 if size == "quick" else 2000, 64))
        runs = [verify(load(path), Options()) for _ in range(2 if size == "quick" else 3)]
    run = min(runs, key=lambda run: run.total_seconds)
    rate = run.steps / run.total_seconds
    judging = (run.total_seconds - run.subject_seconds) / run.subject_seconds
    return [
        Result("replay of 64 requests, all judged", f"{rate:,.0f} steps/s", ">= 1,000 steps/s", rate >= 1000),
        Result("all else (reading, rows, judging) : subject", f"{judging:.1f}", "<= 3", judging <= 3),
    ]


def _bench_stream(size: Size) -> list[Result]:
    """A made-up trace of 4 requests a step, replayed from a file: memory above the storage, and CPU time by length."""
    num_steps = STREAM_STEPS[size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made-up.jsonl.zst"
        save(path, made_up_header(4), made_up_records(num_steps, 4))
        replays = {length: _replay_apart(path, length) for length in (num_steps // 4, num_steps // 2, num_steps)}
    us = [seconds / length * 1e6 for length, (seconds, _) in replays.items()]
    growth, grown = us[-1] / us[0], replays[num_steps][1]
    times = ", ".join(f"{one:.0f}" for one in us)
    return [
        Result(f"streaming {num_steps:,} steps: growth of memory", f"{grown:.0f} MB", "<= 300 MB", grown <= 300),
        Result(
            "CPU time a step, all of them : a quarter",
            f"{growth:.2f} ({times} us a step of a quarter, half, all)",
            "<= 1.2",
            growth <= 1.2,
        ),
    ]


_REPLAY_APART = """
import resource, sys, time
import torch
from omnisim.trace import load
from omnisim.verify import Options, verify
torch.set_num_threads(1)
before, began = 0, time.process_time()
def progress(step):
    global before
    if step == 50:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = verify(load(sys.argv[1]), Options(steps=(0, int(sys.argv[2]))), progress=progress)
assert run.outcome == "agreement", run.outcome
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _replay_apart(path: Path, num_steps: int) -> tuple[float, float]:
    """Seconds of CPU, which others do not disturb, and MB by which the peak grew after the first steps."""
    command = [sys.executable, "-c", _REPLAY_APART, str(path), str(num_steps)]
    seconds, grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(grown) / (1024 if sys.platform != "darwin" else 1024**2)


def _bench_read(size: Size) -> list[Result]:
    """Reading a ``.jsonl`` of 64 requests a step, as strict records and as steps that are legal, against json.loads."""
    num_steps = 500 if size == "quick" else 5000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made-up.jsonl"
        save(path, made_up_header(64), made_up_records(num_steps, 64))
        megabytes = path.stat().st_size / 1e6

        def bare() -> None:
            with path.open("rb") as lines:
                for line in lines:
                    json.loads(line)

        def records() -> None:
            for _ in load(path).records():
                pass

        def steps() -> None:
            for _ in load(path).steps():
                pass

        plain, strict, legal = _in_turn(1 if size == "quick" else 5, bare, records, steps)

    def told(seconds: float) -> str:
        return f"{megabytes / seconds:.0f} MB/s, {plain / seconds:.2f} of bare json.loads"

    return [
        Result("reading .jsonl, typed and strict", told(strict), ">= 50 MB/s", megabytes / strict >= 50),
        Result("... and checked to be legal", f"{told(legal)}, {legal / num_steps * 1e6:.0f} us a step"),
    ]


_SIMULATED = {
    "format": "omnisim-scenario/1",
    "name": "bench",
    "summary": "64 requests that decode, and others that take their place.",
    "engine": {"num_blocks": 4096, "max_num_seqs": 64},
    "traffic": [
        {
            "name": "user",
            "count": 300,
            "prompt": [{"share": "system", "tokens": 100}, {"tokens": {"uniform": [20, 300]}}],
            "output_tokens": {"uniform": [50, 300]},
        }
    ],
}


def _bench_simulate(size: Size) -> list[Result]:
    """A simulation and the writing of its trace, against vLLM's scheduler alone on the same requests."""
    from omnisim.sim.run import plan_of, prepare
    from omnisim.sim.scenario import Scenario

    scenario = msgspec.convert(_SIMULATED, Scenario)
    plan = plan_of(scenario, scenario.seed)
    sizes: list[int] = []
    num_steps: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "simulated.jsonl.zst"

        def simulate() -> None:
            simulation = prepare(scenario.engine, plan, "bench", told="")
            save(path, simulation.header, simulation.records(), overwrite=True)
            sizes.append(path.stat().st_size)

        def schedule() -> None:
            num_steps.append(prepare(scenario.engine, plan, "bench", told="").schedule_only())

        try:
            scheduled, simulated = _in_turn(1 if size == "quick" else 5, schedule, simulate)
        except SetupError as missing:
            return [Result("simulating 64 requests a step, and writing", f"not measured ({missing.what})")]
    ratio, a_step = scheduled / simulated, sizes[0] / num_steps[0]
    rates = f"{num_steps[0] / simulated:,.0f} against {num_steps[0] / scheduled:,.0f} steps/s"
    what, measured = "simulating 64 requests a step, and writing", f"{ratio:.2f} of the bare scheduler ({rates})"
    return [
        Result(what, measured, ">= 0.6", ratio >= 0.6),
        Result("... what is written", f"{a_step:,.0f} bytes a step", "<= 1,024 bytes", a_step <= 1024),
    ]


def _bench_start(size: Size) -> list[Result]:
    """``omnisim --help`` against an empty Python."""

    def run(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)

    environment = {**os.environ, "TERM": "dumb"}
    code = "from omnisim.cli import main; main()"
    empty, shown = _in_turn(3 if size == "quick" else 11, run("-c", "pass"), run("-c", code, "--help"))
    return [
        Result("omnisim --help", f"{shown:.2f} s, {shown / empty:.0f} times an empty Python", "<= 0.3 s", shown <= 0.3)
    ]


BENCHMARKS: dict[str, Benchmark] = {
    "merge": Benchmark(_bench_merge, threads=None),
    "update": Benchmark(_bench_update, threads=None),
    "decode": Benchmark(_bench_decode),
    "replay": Benchmark(_bench_replay),
    "stream": Benchmark(_bench_stream),
    "read": Benchmark(_bench_read),
    "simulate": Benchmark(_bench_simulate),
    "start": Benchmark(_bench_start),
}


def run_benchmarks(console: Console, only: list[str], size: Size = "normal") -> list[Result]:
    """Run and print; UsageError for a name that is none."""
    for name in only:
        if name not in BENCHMARKS:
            close = get_close_matches(name, BENCHMARKS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(BENCHMARKS)}"
            raise UsageError(f"no benchmark {name!r}", hint)
    console.print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads by default")
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("what", "measured", "goal", "threads", ""):
        table.add_column(column)
    results = []
    for name in only or BENCHMARKS:
        with _threads(BENCHMARKS[name].threads) as threads:
            measured = BENCHMARKS[name].measure(size)
        for result in measured:
            table.add_row(result.what, result.measured, result.goal, str(threads), _MET[result.met])
        results += measured
    console.print(table)
    return results


_MET = {True: "[green]met[/]", False: "[yellow]missed[/]", None: ""}


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """So many threads of torch, for a while; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield wanted or before
    finally:
        torch.set_num_threads(before)
