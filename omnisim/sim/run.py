"""One simulation: a plan and an engine's settings, checked against each other, become the records of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from omnisim import __version__
from omnisim.errors import FileError, SetupError
from omnisim.sim.clients import Plan
from omnisim.sim.record import Recorder
from omnisim.sim.scenario import EngineSpec, Scenario
from omnisim.sim.simulate import simulate
from omnisim.sim.traffic import requests_of
from omnisim.talker import Talker
from omnisim.trace.model import Geometry, Header, Producer, StepRecord
from omnisim.workload import WorkloadRequest

__all__ = ["Simulation", "check", "derived_seed", "plan_of", "prepare"]


def plan_of(scenario: Scenario, seed: int) -> Plan:
    """What a scenario sends to its engine."""
    return Plan(requests_of(scenario, seed), scenario.events, scenario.step_time)


def derived_seed(seed: int, repetition: int) -> int:
    """The seed of a repetition; of the first it is the seed itself."""
    import numpy as np

    if repetition == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(repetition,)).generate_state(1)[0])


_MOST_IN_BATCH = 2**31
"""Tokens that an ``InputBatch`` has room for: some 10 GB."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_blocks: int
    max_model_len: int


def prepare(spec: EngineSpec, plan: Plan, place: str, *, told: str, talker: str | Talker | None = None) -> Simulation:
    """A simulation that can run; FileError, at ``place``, for a request that never could.

    ``told`` is what the trace says of its origin. SetupError without a vLLM that is known.
    """
    check(spec, plan, place)
    sizes = _sizes(spec, plan.requests)
    try:
        return Simulation(spec, sizes.num_blocks, sizes.max_model_len, plan, told, talker)
    except ValueError as error:  # what vLLM's configuration checks, and ``check`` does not
        what = " ".join(str(error).split())
        raise FileError(place, f"vLLM refuses this engine ({what})", "change engine") from None


class Simulation:
    """Runs once. The ``engine`` has vLLM's own counts when the records are at their end."""

    def __init__(
        self, spec: EngineSpec, num_blocks: int, max_model_len: int, plan: Plan, told: str, talker: str | Talker | None
    ) -> None:
        from omnisim.sim.engine import Engine, load_vllm

        self.spec, self.plan = spec, plan
        self.num_blocks, self.max_model_len = num_blocks, max_model_len
        self.vllm_version = load_vllm().version
        self.computes_slots = load_vllm().has_slot_kernel
        images = any(request.images for request in plan.requests)
        try:
            self.engine = Engine(spec, num_blocks=num_blocks, max_model_len=max_model_len, images=images)
        except (MemoryError, RuntimeError) as error:  # torch's own kind for memory that it does not get
            what = (
                f"an engine of {num_blocks:,} blocks and {spec.max_num_seqs:,} requests cannot be made here ({error})"
            )
            raise SetupError(" ".join(what.split()), "lower engine.num_blocks, max_num_seqs or max_model_len") from None
        self.recorder = Recorder(spec)
        self.header = Header(
            format="omnisim-trace/1",
            producer=Producer(name="omnisim simulate", version=f"{__version__}, vllm {self.vllm_version}"),
            cache=Geometry(num_blocks=num_blocks, block_size=spec.block_size),
            talker=talker,
            expect={"builtin": "agreement"},
            provenance=told,
        )

    def records(self) -> Iterator[StepRecord]:
        """The records of the executed steps, as they happen."""
        with self.engine.one_thread():
            yield from simulate(self.plan, self.engine, self.recorder, run_ahead=int(self.spec.async_scheduling))

    def schedule_only(self) -> int:
        """Run vLLM's scheduler and nothing of ours on the same requests, all at once; returns the number of steps."""
        return self.engine.run_bare(self.plan.requests)


def _sizes(spec: EngineSpec, requests: tuple[WorkloadRequest, ...]) -> _Sizes:
    longest = max((_most_tokens(spec, request) for request in requests), default=1)
    num_blocks = 1 + 4 * _blocks(longest, spec.block_size)
    return _Sizes(spec.num_blocks or num_blocks, spec.max_model_len or longest)


def _most_tokens(spec: EngineSpec, request: WorkloadRequest) -> int:
    """Prompt and answer, drafts behind it, and what is sampled by mistake behind a token that stops."""
    return request.num_tokens + request.stops + spec.num_speculative_tokens


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def check(spec: EngineSpec, plan: Plan, place: str) -> None:
    """FileError, at ``place``, for what vLLM would refuse, or wait for for ever."""
    if not plan.requests:
        raise FileError(place, "no request comes of it", "give it traffic")
    for request in plan.requests:
        if request.num_prompt_tokens < 1:
            raise FileError(place, f"request {request.req_id} has an empty prompt", "give it a token")
    sizes = _sizes(spec, plan.requests)
    _check_longest(spec, sizes, max(plan.requests, key=lambda request: _most_tokens(spec, request)), place)
    _check_budget(spec, sizes, place)
    _check_names(plan, place)


def _check_longest(spec: EngineSpec, sizes: _Sizes, request: WorkloadRequest, place: str) -> None:
    usable = sizes.num_blocks - 1  # and the null block
    name, num_tokens = request.req_id, _most_tokens(spec, request)
    if num_tokens > sizes.max_model_len:
        what = f"request {name} comes to {num_tokens:,} tokens, more than max_model_len {sizes.max_model_len:,}"
        raise FileError(place, what, "raise engine.max_model_len, or leave it out")
    needed = _blocks(num_tokens - 1, spec.block_size)  # the last token that is sampled is never computed
    if needed > usable:
        what = (
            f"request {name} needs {needed:,} blocks of {spec.block_size}, and of num_blocks {sizes.num_blocks:,} "
            f"it can have {usable:,} (one is the null block)"
        )
        raise FileError(place, what, f"raise engine.num_blocks to {needed + 1:,}, or make it shorter")


def _check_budget(spec: EngineSpec, sizes: _Sizes, place: str) -> None:
    budget = spec.max_num_batched_tokens
    if spec.long_prefill_token_threshold > sizes.max_model_len:
        threshold = f"long_prefill_token_threshold {spec.long_prefill_token_threshold:,}"
        what = f"{threshold} is more than max_model_len {sizes.max_model_len:,}, and limits nothing"
        raise FileError(place, what, "leave it out, or lower it")
    if spec.max_num_seqs * sizes.max_model_len > _MOST_IN_BATCH:
        what = f"a batch of {spec.max_num_seqs:,} requests of up to {sizes.max_model_len:,} tokens is too large"
        raise FileError(place, what, "lower engine.max_num_seqs or max_model_len: vLLM keeps 5 bytes for each token")
    if budget < spec.max_num_seqs:
        what = f"max_num_batched_tokens {budget:,} is less than max_num_seqs {spec.max_num_seqs:,}"
        raise FileError(place, what, "vLLM wants a token for each; lower engine.max_num_seqs")
    if not spec.enable_chunked_prefill and budget < sizes.max_model_len:
        what = (
            f"without chunked prefill max_num_batched_tokens {budget:,} must be max_model_len {sizes.max_model_len:,}"
        )
        raise FileError(place, what, "raise engine.max_num_batched_tokens, or enable_chunked_prefill")


def _check_names(plan: Plan, place: str) -> None:
    named = Counter(request.req_id for request in plan.requests)
    for req_id, times in named.items():
        if times > 1:
            raise FileError(place, f"{times} requests are called {req_id!r}", "give the groups other names")
    for event in plan.events:
        for req_id in (*event.abort, *event.resubmit):
            if req_id not in named:
                close = get_close_matches(req_id, named, n=1, cutoff=0)
                what = f"an event names the request {req_id!r}, and there is none"
                raise FileError(place, what, f"did you mean {close[0]!r}?")
