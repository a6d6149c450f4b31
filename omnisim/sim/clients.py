"""Those who send requests to an engine, wait for answers, and give up."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from omnisim.sim.record import Recorder
from omnisim.sim.scenario import Event, StepTime
from omnisim.workload import WorkloadRequest

if TYPE_CHECKING:
    from omnisim.sim.engine import Engine, Scheduled

__all__ = ["Clients", "InFlight", "Plan"]

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


class Clients:
    """All of them. A request *lives* from when it is sent until it ends; of one id there is one life at a time.

    ``missed`` counts requests that an event named and that were not there: not sent yet, or over.
    """

    def __init__(self, plan: Plan, engine: Engine, recorder: Recorder, in_flight: InFlight) -> None:
        self._engine = engine
        self._recorder = recorder
        self._in_flight = in_flight
        self._order = count()
        self._queue: list[tuple[float, int, WorkloadRequest]] = []
        self._again: Counter[str] = Counter()
        self._followers: dict[str, list[WorkloadRequest]] = {}
        self._named = {req_id for event in plan.events for req_id in event.resubmit}
        self._sent: dict[str, WorkloadRequest] = {}
        self._impatient: dict[str, WorkloadRequest] = {}
        self._events = deque(sorted(plan.events, key=lambda event: event.at))
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
        """All that happens up to now: events, clients that lose patience, what follows on what has ended, arrivals."""
        ended = set(self._engine.ended)
        while self._events and self._events[0].at <= now:
            ended |= self._happen(self._events.popleft(), now)
        ended |= self._lose_patience(now)
        for req_id in sorted(ended):
            if not self._again[req_id]:
                for follower in self._followers.pop(req_id, ()):
                    self._queue_up(now + follower.arrival, follower)
        self._send_until(now)

    def _happen(self, event: Event, now: float) -> set[str]:
        """What an event does; ids of requests that it ended."""
        ended = set()
        for req_id in (*event.abort, *event.resubmit):
            was_there = self._abort(req_id)
            known = req_id in event.resubmit and req_id in self._sent
            self._engine.stats.missed_events += not (was_there or known)
            ended |= {req_id} if was_there else set()
        if event.reset_prefix_cache:
            self._engine.reset_prefix_cache(event.reset_running_requests)
        for req_id in dict.fromkeys(event.resubmit):
            if (request := self._sent.get(req_id)) is not None:
                self._send_again(request, now)
        return ended

    def _abort(self, req_id: str) -> bool:
        """End a life, or one that is about to begin again; False if there is none."""
        self._impatient.pop(req_id, None)
        self._recorder.withdraw(req_id)
        waited = self._again.pop(req_id, 0) > 0
        if waited:
            self._queue = [entry for entry in self._queue if entry[2].req_id != req_id]
            heapq.heapify(self._queue)
        return self._engine.abort(req_id) or waited

    def _lose_patience(self, now: float) -> set[str]:
        ended = set()
        for req_id, request in list(self._impatient.items()):
            if _is_over(self._engine.progress(req_id), request):
                del self._impatient[req_id]
                if self._abort(req_id):
                    ended.add(req_id)
                    if request.resubmits:
                        again = replace(request, abort_after_computed=None, abort_after_sampled=None, resubmits=False)
                        self._send_again(again, now)
        return ended

    def _send_again(self, request: WorkloadRequest, now: float) -> None:
        self._again[request.req_id] += 1
        self._queue_up(now, request)

    def _queue_up(self, time: float, request: WorkloadRequest) -> None:
        heapq.heappush(self._queue, (time, next(self._order), request))

    def _send_until(self, now: float) -> None:
        early = []
        busy = self._busy()
        while self._queue and self._queue[0][0] <= now:
            entry = heapq.heappop(self._queue)
            if entry[2].req_id in busy:
                early.append(entry)  # a step that is not over has its namesake
            else:
                self._send(entry[2])
        for entry in early:
            heapq.heappush(self._queue, entry)

    def _busy(self) -> set[str]:
        return {req_id for step, *_ in self._in_flight for req_id in step.req_ids} if self._again else set()

    def _send(self, request: WorkloadRequest) -> None:
        self._engine.add(request, self._recorder.admit(request))
        self._again.pop(request.req_id, None)
        if request.req_id in self._named:
            self._sent[request.req_id] = request
        if (request.abort_after_computed, request.abort_after_sampled) != (None, None):
            self._impatient[request.req_id] = request


def _is_over(progress: tuple[int, int] | None, request: WorkloadRequest) -> bool:
    """Whether a client has had enough, or what it asked for; ``progress`` in tokens computed and sampled."""
    if progress is None:
        return True
    limits: Iterable[int | None] = (request.abort_after_computed, request.abort_after_sampled)
    return any(limit is not None and had >= limit for had, limit in zip(progress, limits, strict=True))
