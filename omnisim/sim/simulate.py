"""The loop: requests come, a step is scheduled and written down, what it sampled goes back."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from omnisim.errors import CannotJudge
from omnisim.sim.record import Recorder
from omnisim.sim.scenario import Event, StepTime
from omnisim.trace.model import StepRecord
from omnisim.workload import WorkloadRequest

if TYPE_CHECKING:
    from omnisim.sim.engine import Engine, Scheduled

__all__ = ["Plan", "simulate"]

InFlight = deque[tuple["Scheduled", list[list[int]], list[list[int]]]]
"""Steps that are not over, with what they sample and the drafts for what comes behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What comes to an engine. Without ``step_time`` time counts executed steps, with it seconds."""

    requests: tuple[WorkloadRequest, ...]
    events: tuple[Event, ...] = ()
    step_time: StepTime | None = None

    def duration(self, step: Scheduled) -> float:
        """Time that a step takes."""
        if self.step_time is None:
            return 1.0
        model = self.step_time
        return (model.base + model.token * step.num_tokens + model.request * len(step.req_ids)) / 1000


def simulate(plan: Plan, engine: Engine, recorder: Recorder, *, run_ahead: int = 0) -> Iterator[StepRecord]:
    """Drive the engine until all that comes to it has ended; yields the record of each executed step.

    ``run_ahead`` is how many steps are scheduled before it is known what the first of them sampled: 1 under vLLM's
    asynchronous scheduling. CannotJudge if requests wait and the scheduler makes no step any more.
    """
    in_flight: InFlight = deque()
    clients = _Clients(plan, engine, recorder, in_flight)
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


class _Clients:
    """Who sends requests, and gives up on them."""

    def __init__(self, plan: Plan, engine: Engine, recorder: Recorder, in_flight: InFlight) -> None:
        self._engine = engine
        self._recorder = recorder
        self._in_flight = in_flight
        self._order = count()
        self._queue: list[tuple[float, int, WorkloadRequest]] = []
        self._followers: dict[str, list[WorkloadRequest]] = {}
        self._sent: dict[str, WorkloadRequest] = {}
        self._impatient: dict[str, int] = {}
        self._events = deque(sorted(plan.events, key=lambda event: event.at))
        self._named = {req_id for event in plan.events for req_id in event.resubmit}
        for request in plan.requests:
            if request.after is None:
                self._queue_up(request.arrival, request)
            else:
                self._followers.setdefault(request.after, []).append(request)

    @property
    def next_time(self) -> float | None:
        """When something happens next without the engine's doing."""
        times = [self._queue[0][0]] if self._queue else []
        times += [self._events[0].at] if self._events else []
        return min(times, default=None)

    def come(self, now: float) -> None:
        """All that happens up to now: events, clients that leave, followers of what has ended, arrivals."""
        while self._events and self._events[0].at <= now:
            self._happen(self._events.popleft(), now)
        for req_id, least in list(self._impatient.items()):
            computed = self._engine.num_computed_tokens(req_id)
            if computed is None or computed >= least:
                self._engine.abort(req_id)
                del self._impatient[req_id]
        for req_id in sorted(self._engine.ended):
            if not self._engine.is_alive(req_id):
                for follower in self._followers.pop(req_id, ()):
                    self._queue_up(now + follower.arrival, follower)
        self._send_until(now)

    def _send_until(self, now: float) -> None:
        early = []
        while self._queue and self._queue[0][0] <= now:
            entry = heapq.heappop(self._queue)
            if any(entry[2].req_id in step.req_ids for step, *_ in self._in_flight):
                early.append(entry)  # a step that is not over has its namesake
            else:
                self._send(entry[2])
        for entry in early:
            heapq.heappush(self._queue, entry)

    def _queue_up(self, time: float, request: WorkloadRequest) -> None:
        heapq.heappush(self._queue, (time, next(self._order), request))

    def _send(self, request: WorkloadRequest) -> None:
        self._engine.add(request, self._recorder.admit(request))
        if request.req_id in self._named:
            self._sent[request.req_id] = request
        if request.abort_after is not None:
            self._impatient[request.req_id] = request.abort_after

    def _happen(self, event: Event, now: float) -> None:
        for req_id in (*event.abort, *event.resubmit):
            self._engine.abort(req_id)
            self._impatient.pop(req_id, None)
        if event.reset_prefix_cache:
            self._engine.reset_prefix_cache(event.reset_running_requests)
        for req_id in event.resubmit:
            if (request := self._sent.get(req_id)) is not None:
                self._queue_up(now, request)
