"""``omnisim simulate``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import console
from omnisim.cli.options import JsonFile, TalkerName, check_writable, write_json
from omnisim.errors import FileError, UsageError

if TYPE_CHECKING:
    from omnisim.report.simulation import Simulated
    from omnisim.sim.override import Change
    from omnisim.sim.scenario import Scenario
    from omnisim.sim.simulate import Plan
    from omnisim.trace.yamlform import Node
    from omnisim.workload import Workload

__all__ = ["simulate"]

_MOST_RUNS = 1000


def _scenarios(incomplete: str) -> list[str]:
    from omnisim.sim.scenario import scenario_names

    return [name for name in scenario_names() if name.startswith(incomplete)]


def simulate(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCENARIO]",
            help="A scenario by name, or a .yaml file. With --workload its engine is used, and not its traffic.",
            autocompletion=_scenarios,
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT:FILE",
            help="Requests of a public trace: mooncake, qwen-bailian, azure, burstgpt, sharegpt, vllm-custom, blocks.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Trace to write: .jsonl.zst, .jsonl, .yaml.", show_default=False
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the scenario's own.", show_default=False)] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change the scenario: engine.num_blocks=40.", show_default=False
        ),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="PATH=V,V", help="A run for each value: engine.block_size=16,32.", show_default=False
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="So many runs, each with a seed derived from the first.")] = 1,
    talker: TalkerName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Of a workload, no more rows than these.", show_default=False)
    ] = None,
    scale_lengths: Annotated[float, typer.Option(help="Multiply a workload's lengths.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Multiply the times at which a workload's requests come.")] = 1.0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A tokenizer.json for workloads of text; else tokens are made up.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace traces that exist.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the scenarios that have a name.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Make a trace with vLLM's own scheduler, without a model, from a scenario or from a public workload.

    Examples:

    - `omnisim simulate --list`
    - `omnisim simulate multi-turn`
    - `omnisim simulate multi-turn --set engine.num_blocks=64 --sweep engine.block_size=16,32 --repeat 2`
    """
    from omnisim.report.simulation import print_simulations, simulations_json

    if listed:
        _print_list()
        return
    check_writable(json_file)
    out = console()
    if scenario is None and workload is None:
        raise UsageError("nothing to simulate", "name a scenario (see --list), or a --workload")
    asked = _Asked(scenario, workload, output, seed, talker, overwrite)
    read = asked.read(limit, scale_lengths, time_scale, tokenizer)
    runs: list[Simulated] = []
    wanted = asked.runs(sets or [], sweeps or [], repeat)
    asked.check_outputs(wanted)
    for changes, number in wanted:
        runs.append(asked.run(changes, number, many=len(wanted) > 1, workload=read))
    if json_file != "-":
        print_simulations(out, runs, read)
    if json_file is not None:
        write_json(json_file, simulations_json(runs, read))


class _Asked:
    """What was asked for on the command line."""

    def __init__(
        self,
        scenario: str | None,
        workload: str | None,
        output: Path | None,
        seed: int | None,
        talker: str | None,
        overwrite: bool,
    ) -> None:
        self._scenario, self._workload = scenario, workload
        self._output, self._overwrite = output, overwrite
        self._seed, self._talker = seed, talker
        self._place, self._node = self._document()
        if talker is not None:
            from omnisim.talkers import load_talker

            load_talker(talker)

    def _document(self) -> tuple[str, Node]:
        from omnisim.sim.scenario import FORMAT, read_scenario
        from omnisim.trace.yamlform import Node

        if self._scenario is not None:
            return read_scenario(self._scenario)
        return "the default engine", Node({"format": FORMAT, "name": "workload", "summary": ""}, 0)

    def read(
        self, limit: int | None, scale_lengths: float, time_scale: float, tokenizer: str | None
    ) -> Workload | None:
        """The workload, if one is asked for; UsageError for options that need one."""
        if self._workload is None:
            if limit is not None or (scale_lengths, time_scale) != (1.0, 1.0) or tokenizer is not None:
                raise UsageError(
                    "--limit, --scale-lengths, --time-scale and --tokenizer are of a --workload", "name one"
                )
            return None
        from omnisim.importers import read_workload
        from omnisim.importers.options import ReadOptions

        options = ReadOptions(limit=limit, scale_lengths=scale_lengths, time_scale=time_scale, tokenizer=tokenizer)
        return read_workload(self._workload, options)

    def runs(self, sets: list[str], sweeps: list[str], repeat: int) -> list[tuple[tuple[Change, ...], int]]:
        """What is changed in each run, and which repetition it is; checked before the first of them runs."""
        from omnisim.sim.override import changed, parse_set, parse_sweep, variants

        always = tuple(parse_set(text) for text in sets)
        combinations = [(*always, *variant) for variant in variants([parse_sweep(text) for text in sweeps])]
        if len(combinations) * repeat > _MOST_RUNS:
            raise UsageError(f"--sweep and --repeat make {len(combinations) * repeat:,} runs", "make fewer at once")
        for changes in combinations:
            changed(self._node, self._place, changes)
        return [(changes, number) for changes in combinations for number in range(repeat)]

    def check_outputs(self, wanted: list[tuple[tuple[Change, ...], int]]) -> None:
        """FileError if one of the runs could not write its trace, before the first of them runs."""
        for changes, number in wanted:
            path = self._path(changes, self._seed_of(changes, number), many=len(wanted) > 1)
            if path is not None and not self._overwrite and os.path.lexists(path):
                raise FileError(str(path), "it exists already", "choose another name, or say --overwrite")

    def _seed_of(self, changes: tuple[Change, ...], number: int) -> int:
        from omnisim.sim.override import changed
        from omnisim.sim.run import derived_seed

        first = changed(self._node, self._place, changes).seed if self._seed is None else self._seed
        return derived_seed(first, number)

    def run(self, changes: tuple[Change, ...], number: int, many: bool, workload: Workload | None) -> Simulated:
        """Simulate, write, and look at what was written."""
        from omnisim.coverage import cover
        from omnisim.report.simulation import Simulated
        from omnisim.sim.outcome import Outcome
        from omnisim.sim.override import changed
        from omnisim.sim.run import prepare
        from omnisim.trace import Trace, load, save

        scenario = changed(self._node, self._place, changes)
        seed = self._seed_of(changes, number)
        told = self._told(scenario, seed, changes)
        place = self._workload or self._place
        simulation = prepare(
            scenario.engine,
            self._plan(scenario, seed, workload),
            place,
            told=told,
            talker=self._talker or scenario.talker,
        )
        outcome = Outcome()
        records = outcome.watch(simulation.records())
        path = self._path(changes, seed, many)
        if path is None:
            trace = Trace(place, simulation.header, lambda: enumerate(records, start=2))
        else:
            save(path, simulation.header, records, overwrite=self._overwrite)
            trace = load(path)
        return Simulated(
            name=self._name(scenario),
            seed=seed,
            changes=tuple(map(str, changes)),
            vllm=simulation.vllm_version,
            num_blocks=simulation.num_blocks,
            max_model_len=simulation.max_model_len,
            outcome=outcome,
            stats=simulation.engine.stats,
            coverage=cover(trace),
            path=None if path is None else str(path),
            num_bytes=0 if path is None else path.stat().st_size,
        )

    def _plan(self, scenario: Scenario, seed: int, workload: Workload | None) -> Plan:
        from omnisim.sim.run import plan_of
        from omnisim.sim.scenario import StepTime
        from omnisim.sim.simulate import Plan

        if workload is None:
            return plan_of(scenario, seed)
        return Plan(workload.requests, scenario.events, scenario.step_time or StepTime())

    def _name(self, scenario: Scenario) -> str:
        if self._workload is None:
            return scenario.name
        kind, _, file = self._workload.partition(":")
        return f"{kind}:{Path(file).name}"

    def _told(self, scenario: Scenario, seed: int, changes: tuple[Change, ...]) -> str:
        """How to make this trace again; of files their names alone, so that it does not matter where they lie."""
        words = ["omnisim simulate"]
        if self._scenario is not None:
            words.append(Path(self._scenario).name)
        if self._workload is not None:
            words.append(f"--workload {self._name(scenario)}")
        words += [f"--seed {seed}", *(f"--set {change}" for change in changes)]
        return " ".join(words)

    def _path(self, changes: tuple[Change, ...], seed: int, many: bool) -> Path | None:
        """The output, with what tells a run from the others in its name if there are several."""
        if self._output is None or not many:
            return self._output
        stem, dot, suffix = self._output.name.partition(".")
        label = ".".join((*(str(change) for change in changes if change.option == "--sweep"), f"seed={seed}"))
        return self._output.with_name(f"{stem}.{re.sub(r'[^A-Za-z0-9_.=-]', '_', label)}{dot}{suffix}")


def _print_list() -> None:
    from rich.table import Table
    from rich.text import Text

    from omnisim.report.words import print_table
    from omnisim.sim.override import changed
    from omnisim.sim.scenario import read_scenario, scenario_names

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name in scenario_names():
        place, node = read_scenario(name)
        table.add_row(name, Text(changed(node, place, ()).summary))
    print_table(console(), table)
