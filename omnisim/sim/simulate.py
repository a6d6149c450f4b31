"""The loop: requests come, a step is scheduled and written down, what it sampled goes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omnisim.errors import CannotJudge
from omnisim.sim.clients import Clients, InFlight, Plan
from omnisim.sim.record import Recorder
from omnisim.trace.model import StepRecord

if TYPE_CHECKING:
    from omnisim.sim.engine import Engine

__all__ = ["simulate"]


def simulate(plan: Plan, engine: Engine, recorder: Recorder, *, run_ahead: int = 0) -> Iterator[StepRecord]:
    """Drive the engine until all that comes to it has ended; yields the record of each executed step.

    ``run_ahead`` is how many steps are scheduled before it is known what the first of them sampled: 1 under vLLM's
    asynchronous scheduling. CannotJudge if requests wait and the scheduler makes no step any more.
    """
    in_flight: InFlight = deque()
    clients = Clients(plan, engine, recorder, in_flight)
    now = 0.0
    while True:
        clients.come(now)
        step = engine.schedule()
        record = recorder.record(step)
        if record is not None:
            sampled = recorder.sampled(step)
            in_flight.append((step, sampled, recorder.drafts(step, sampled)))
            yield record
            now += plan.duration(step)
            if len(in_flight) <= run_ahead:
                continue
        if in_flight:
            engine.finish(*in_flight.popleft())
        elif step.preempted_req_ids:
            continue  # under priorities all that ran may have been pushed out: the next step takes them in again
        elif (then := clients.next_time) is not None:
            now = max(now, then)
        elif (waiting := engine.num_unfinished) > 0:
            waits = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
            raise CannotJudge(f"the scheduler makes no step although {waits}", "give the engine more num_blocks")
        else:
            return
