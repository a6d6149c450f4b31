"""Simulations for tests: of a named scenario, or of one that is written down in the test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from omnisim.sim.clients import Plan
from omnisim.sim.engine import Stats
from omnisim.sim.outcome import Outcome
from omnisim.sim.override import changed
from omnisim.sim.run import Simulation, plan_of, prepare
from omnisim.sim.scenario import Scenario, read_scenario
from omnisim.trace import Trace, save
from omnisim.trace.model import StepRecord


@dataclass(frozen=True)
class Simulated:
    """A trace in memory, what is counted in it, and what the engine counted."""

    trace: Trace
    records: list[StepRecord]
    outcome: Outcome
    stats: Stats
    plan: Plan

    def write(self, path: Path) -> Path:
        save(path, self.trace.header, self.records)
        return path


def drive(simulation: Simulation, name: str) -> Simulated:
    outcome = Outcome()
    records = list(outcome.watch(simulation.records()))
    trace = Trace(name, simulation.header, lambda: enumerate(records, start=2))
    return Simulated(trace, records, outcome, simulation.engine.stats, simulation.plan)


@cache
def named(name: str, seed: int | None = None) -> Simulated:
    """A scenario of the library."""
    place, node = read_scenario(name)
    scenario = changed(node, place, ())
    plan = plan_of(scenario, scenario.seed if seed is None else seed)
    return drive(prepare(scenario.engine, plan, place, told="", talker=scenario.talker), name)


def scenario(traffic: list[dict[str, Any]], **fields: Any) -> Scenario:
    raw = {"format": "omnisim-scenario/1", "name": "test", "summary": "", "traffic": traffic, **fields}
    return msgspec.convert(raw, Scenario)


def simulated(traffic: list[dict[str, Any]], **fields: Any) -> Simulated:
    """A scenario told in the test."""
    made = scenario(traffic, **fields)
    return drive(prepare(made.engine, plan_of(made, made.seed), "test", told=""), "test")
