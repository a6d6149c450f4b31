"""The loop of a simulation against vLLM's own: ``EngineCore.step`` and ``step_with_batch_queue`` with our runner.

What is shared is the batch, the clients and the recorder; who schedules when, and what is told to the scheduler when,
is vLLM's. Scenarios are made up by chance.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest

from omnisim.errors import FileError
from omnisim.sim.clients import Clients
from omnisim.sim.run import Simulation, plan_of, prepare
from omnisim.sim.scenario import Scenario
from omnisim.trace.model import StepRecord

from .simulated import scenario

pytestmark = pytest.mark.usefixtures("vllm")


def _group(name: str, chance: random.Random) -> dict[str, Any]:
    group = {
        "name": name,
        "count": chance.randint(1, 8),
        "prompt": [{"share": "s", "tokens": 8}, {"tokens": {"uniform": [1, 20]}}],
        "output_tokens": {"uniform": [1, 9]},
        "arrivals": chance.choice([{"every": 0.5}, {"every": 2}, {"at": chance.randint(0, 5)}, {"poisson": 0.5}]),
        "stops": chance.random() < 0.5,
        "priority": [chance.randint(0, 2) for _ in range(3)],
    }
    if (kind := chance.random()) < 0.3:
        return group | {"turns": chance.randint(2, 3), "think": chance.randint(0, 3), "turn_tokens": 5}
    if kind < 0.6:
        when = chance.choice(["after_output_tokens", "after_computed_tokens"])
        return group | {"abort": {when: {"uniform": [1, 12]}, "fraction": 0.6, "resubmit": chance.random() < 0.5}}
    return group


def made_up(seed: int) -> Scenario:
    chance = random.Random(seed)
    engine = {
        "block_size": 4,
        "num_blocks": chance.randint(26, 40),
        "max_num_seqs": chance.choice([2, 4, 6]),
        "max_num_batched_tokens": chance.choice([8, 16, 64]),
        "policy": chance.choice(["fcfs", "priority"]),
        "async_scheduling": seed % 3 > 0,
        "watermark": chance.choice([0, 0.05]),
        "reorder_batch_threshold": chance.choice([None, 1]),
    }
    resets = [
        {"at": chance.randint(0, 30), "reset_prefix_cache": True, "reset_running_requests": chance.random() < 0.7}
        for _ in range(chance.randint(0, 3))
    ]
    return scenario([_group("a", chance), _group("b", chance)], engine=engine, events=resets, seed=seed)


def by_the_engine_core(simulation: Simulation) -> list[StepRecord]:
    """The records that come of it where vLLM's ``EngineCore`` runs the steps."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    engine, recorder, plan = simulation.engine, simulation.recorder, simulation.plan
    scheduler: Any = engine._scheduler
    records: list[StepRecord] = []
    in_flight: deque[Any] = deque()
    now = 0.0

    class Executor:
        """Runs nothing: leads the batch, and says what is sampled."""

        is_sleeping = False

        def execute_model(self, output: Any, non_block: bool = True) -> Future[Any]:
            nonlocal now
            for req_id in output.finished_req_ids:
                engine._bury(req_id)
            step = engine._runner.lead(output, scheduler.requests)
            record = recorder.record(step)
            future: Future[Any] = Future()
            if record is None:
                future.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
                return future
            records.append(record)
            now += plan.duration(step)
            sampled = recorder.sampled(step)
            in_flight.append((step, sampled, []))
            self.last = engine._vllm.make_output(step.req_ids, sampled)
            future.set_result(None)
            return future

        def sample_tokens(self, _: Any, non_block: bool = False) -> Any:
            if not non_block:
                return self.last
            future: Future[Any] = Future()
            future.set_result(self.last)
            return future

    class Core(EngineCore):  # type: ignore[misc]
        def __init__(self) -> None:
            self.scheduler, self.model_executor = scheduler, Executor()
            self.batch_queue_size, self.batch_queue, self.aborts_queue = 2, deque(maxlen=2), queue.Queue()
            self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False

        def _should_throttle_prefills(self) -> bool:
            return False

        def log_error_detail(self, *_: Any) -> Any:
            return nullcontext()

        capture_iteration_details = log_error_detail

        def _attach_iteration_details(self, *_: Any) -> None:
            pass

        _attach_weight_version = _attach_iteration_details

    update = scheduler.update_from_output

    def update_from_output(output: Any, result: Any) -> Any:
        if in_flight and in_flight[0][0].output is output:
            in_flight.popleft()
        return update(output, result)

    scheduler.update_from_output = update_from_output
    core, clients = Core(), Clients(plan, engine, recorder, in_flight)
    step = core.step_with_batch_queue if simulation.spec.async_scheduling else core.step
    while True:
        clients.come(now)
        if scheduler.has_requests() or core.batch_queue:
            step()
        elif (then := clients.next_time) is not None:
            now = max(now, then)
        else:
            return records


@pytest.mark.parametrize("seed", range(60))
def test_the_engine_core_of_vllm_makes_the_same_steps(seed: int) -> None:
    made = made_up(seed)
    try:
        ours, theirs = (prepare(made.engine, plan_of(made, seed), "test", told="") for _ in range(2))
    except FileError:
        pytest.skip("it cannot run: a request needs more than there is")
    assert list(ours.records()) == by_the_engine_core(theirs)
