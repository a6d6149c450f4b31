"""The strongest test of the simulator: fed what a real engine was asked, it does what that engine did, step by step.

``asked.json`` says what the engine was told, and of each request when it came, how many tokens it asked for and when
it was aborted; its prompt and what the model sampled are in ``traces/recorded``.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omnisim.sim.clients import Plan
from omnisim.sim.run import prepare
from omnisim.sim.scenario import EngineSpec, Event
from omnisim.trace import load
from omnisim.trace.model import StepRecord
from omnisim.workload import WorkloadRequest

pytestmark = pytest.mark.usefixtures("vllm")

ASKED: dict[str, Any] = json.loads((Path(__file__).parent / "asked.json").read_text())
RECORDED = Path(__file__).parents[2] / "traces" / "recorded"


def recorded(name: str) -> list[StepRecord]:
    return list(load(RECORDED / f"{name}.jsonl.zst").records())


def said(records: list[StepRecord]) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of each request that ran."""
    told: dict[str, tuple[list[int], list[int]]] = {}
    batch: tuple[str, ...] = ()
    for record in records:
        batch = record.req_ids if isinstance(record.req_ids, tuple) else batch
        for new in record.scheduled_new_reqs:
            told[new.req_id] = (list(new.prompt_token_ids), [])
        for req_id, ids in zip(batch, record.new_token_ids, strict=False):
            told[req_id][1].extend(ids)
    return told


def plan_of(name: str) -> Plan:
    """What the engine was asked; the ids are those that it gave itself, ``req-3-aaa8b794`` for ``req-3``."""
    records = recorded(name)
    told = said(records)
    named = [*told, *(req_id for record in records for req_id in record.finished_req_ids)]
    ids = {req_id.rpartition("-")[0]: req_id for req_id in named}
    requests, events = [], []
    for external, asked in ASKED[name]["requests"].items():
        req_id = ids[external]
        prompt, answer = told.get(req_id, ([1] * asked["num_prompt_tokens"], []))
        answer = answer + [0] * (asked["max_tokens"] - len(answer))  # the last one was sampled and never computed
        requests.append(
            WorkloadRequest(
                req_id=req_id,
                num_prompt_tokens=len(prompt),
                max_tokens=asked["max_tokens"],
                prompt_token_ids=partial(np.array, prompt, dtype=np.int32),
                sampled_token_ids=partial(np.array, answer, dtype=np.int32),
                arrival=asked["arrival_step"],
            )
        )
        if "aborted_before_step" in asked:
            events.append(Event(at=asked["aborted_before_step"], abort=(req_id,)))
    return Plan(tuple(requests), tuple(events))


def facts(record: StepRecord) -> dict[str, Any]:
    """A record as plain data. Not compared: its number, which is left out where it can be counted, and external ids."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    plain.pop("step", None)
    for new in plain.get("scheduled_new_reqs", ()):
        new.pop("external_req_id", None)
    return plain


@pytest.mark.parametrize("name", ASKED)
def test_a_simulation_is_the_recording_step_by_step(name: str) -> None:
    spec = msgspec.convert(ASKED[name]["engine"], EngineSpec)
    simulation = prepare(spec, plan_of(name), name, told="")
    simulated = [facts(record) for record in simulation.records()]
    if not simulation.computes_slots:
        for record in simulated:
            assert record.pop("slot_mapping", None) is None
    happened = [facts(record) for record in recorded(name)]
    for record in happened:
        if not simulation.computes_slots:
            del record["slot_mapping"]
    for index, (made, was) in enumerate(zip(simulated, happened, strict=False)):
        assert made == was, f"step {index}"
    assert len(simulated) == len(happened)


def test_the_recordings_are_of_what_a_simulator_can_get_wrong() -> None:
    tight, abort = recorded("chat-tight"), recorded("chat-abort")
    assert sum(len(record.preempted_req_ids) for record in tight) == 3
    assert sum(len(record.resumed_req_ids) for record in tight) == 3
    assert sum("aborted_before_step" in asked for asked in ASKED["chat-abort"]["requests"].values()) == 3
    assert len(abort) == 58


def test_a_schedule_with_one_thing_otherwise_is_another() -> None:
    name = "chat-tight"
    spec = msgspec.convert(ASKED[name]["engine"] | {"num_blocks": 15}, EngineSpec)
    simulated = [facts(record) for record in prepare(spec, plan_of(name), name, told="").records()]
    assert simulated != [facts(record) for record in recorded(name)]
