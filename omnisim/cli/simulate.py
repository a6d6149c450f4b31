"""``omnisim simulate``."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import console, is_folder
from omnisim.cli.options import JsonFile, TalkerName, check_not_read, check_writable, write_json
from omnisim.errors import UsageError

if TYPE_CHECKING:
    from omnisim.report.simulation import Simulated
    from omnisim.sim.clients import Plan
    from omnisim.sim.override import Change
    from omnisim.sim.scenario import Scenario
    from omnisim.talker import Talker
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
            metavar="SCENARIO",
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
            "--set",
            metavar="PATH=VALUE",
            help="Change the scenario: traffic.chat.count=3. Give several.",
            show_default=False,
        ),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="PATH=V,V",
            help="A run for each value: engine.block_size=16,32. Give several.",
            show_default=False,
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

    Every field of a scenario and every format of a workload is explained in docs/scenarios.md. Exits with 0, or with 2
    if it could not run. vLLM takes some seconds to load.

    Examples:

    - `omnisim simulate --list`
    - `omnisim simulate multi-turn`
    - `omnisim simulate multi-turn --set engine.num_blocks=64 --sweep engine.block_size=16,32 --repeat 2`
    """
    from omnisim.report.simulation import print_simulations, simulations_json

    if listed:
        _print_list()
        return
    if scenario is None and workload is None:
        raise UsageError("nothing to simulate", "name a scenario (see --list), or a --workload")
    asked = _Asked(
        scenario,
        _Workload(workload, limit, scale_lengths, time_scale, tokenizer) if workload is not None else None,
        seed=seed,
        talker=talker,
        output=output,
        overwrite=overwrite,
    )
    if workload is None and (limit, scale_lengths, time_scale, tokenizer) != (None, 1.0, 1.0, None):
        raise UsageError("--limit, --scale-lengths, --time-scale and --tokenizer are of a --workload", "name one")
    if workload is not None and (seed is not None or repeat > 1):
        raise UsageError("there is no chance in a --workload: --seed and --repeat change nothing", "leave them out")
    check_writable(json_file, asked.inputs)
    wanted = asked.wanted(sets or [], sweeps or [], repeat)
    read = asked.read()
    asked.check(wanted, read)
    runs: list[Simulated] = [asked.run(one, read) for one in wanted]
    if json_file != "-":
        print_simulations(console(), runs, read)
    if json_file is not None:
        write_json(json_file, simulations_json(runs, read))


@dataclass(frozen=True, slots=True)
class _Workload:
    """``FORMAT:FILE``, and how it is read."""

    text: str
    limit: int | None
    scale_lengths: float
    time_scale: float
    tokenizer: str | None

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.text.partition(":")[2])

    @property
    def name(self) -> str:
        """Without the folder of the file."""
        kind, _, file = self.text.partition(":")
        return f"{kind}:{Path(file).name}"

    def words(self) -> list[str]:
        """Of the command line; of files their names alone."""
        words = ["--workload", self.name]
        words += [] if self.limit is None else ["--limit", str(self.limit)]
        words += [] if self.scale_lengths == 1.0 else ["--scale-lengths", str(self.scale_lengths)]
        words += [] if self.time_scale == 1.0 else ["--time-scale", str(self.time_scale)]
        return words + ([] if self.tokenizer is None else ["--tokenizer", Path(self.tokenizer).name])

    def read(self) -> Workload:
        """FileError where it cannot be read."""
        from omnisim.importers import read_workload
        from omnisim.importers.options import ReadOptions

        options = ReadOptions(self.limit, self.scale_lengths, self.time_scale, self.tokenizer)
        return read_workload(self.text, options)


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """One run."""

    scenario: Scenario
    seed: int
    changes: tuple[Change, ...]
    path: Path | None


class _Asked:
    """What was asked for on the command line."""

    def __init__(
        self,
        scenario: str | None,
        workload: _Workload | None,
        *,
        seed: int | None,
        talker: str | None,
        output: Path | None,
        overwrite: bool,
    ) -> None:
        self._scenario, self._workload = scenario, workload
        self._seed, self._talker = seed, talker
        self._output, self._overwrite = output, overwrite
        self._place, self._node = self._document()

    @property
    def inputs(self) -> list[Path]:
        """Files that are read, and must not be written."""
        inputs = [Path(self._place), *([] if self._talker is None else [Path(self._talker)])]
        return inputs + ([] if self._workload is None else [self._workload.path])

    def _document(self) -> tuple[str, Node]:
        from omnisim.sim.scenario import FORMAT, read_scenario
        from omnisim.trace.yamlform import Node

        if self._scenario is not None:
            return read_scenario(self._scenario)
        return "the default engine", Node({"format": FORMAT, "name": "workload", "summary": ""}, 0)

    def wanted(self, sets: list[str], sweeps: list[str], repeat: int) -> list[_Wanted]:
        """The runs, all that can be wrong with them checked before the first of them runs."""
        from omnisim.sim.override import parse_set, parse_sweep, variants

        always, swept = [parse_set(text) for text in sets], [parse_sweep(text) for text in sweeps]
        _check_once([change.path for change in (*always, *(values[0] for values in swept))])
        combinations = [(*always, *variant) for variant in variants(swept)]
        if len(combinations) * repeat > _MOST_RUNS:
            raise UsageError(f"--sweep and --repeat make {len(combinations) * repeat:,} runs", "make fewer at once")
        many = len(combinations) * repeat > 1
        wanted = [self._one(changes, number, many) for changes in combinations for number in range(repeat)]
        self._check_paths([one.path for one in wanted if one.path is not None])
        return wanted

    def _one(self, changes: tuple[Change, ...], number: int, many: bool) -> _Wanted:
        from omnisim.sim.override import changed
        from omnisim.sim.run import derived_seed
        from omnisim.talkers import load_talker

        scenario = changed(self._node, self._place, changes)
        if (talker := self._talker or scenario.talker) is not None:
            load_talker(talker)
        seed = derived_seed(scenario.seed if self._seed is None else self._seed, number)
        return _Wanted(scenario, seed, changes, self._path(changes, seed, many))

    def _path(self, changes: tuple[Change, ...], seed: int, many: bool) -> Path | None:
        """The output, with what tells a run from the others in its name if there are several."""
        if self._output is None or not many or is_folder(self._output):
            return self._output
        stem, dot, suffix = self._output.name.partition(".")
        label = ".".join((*(str(change) for change in changes if change.option == "--sweep"), f"seed={seed}"))
        return self._output.with_name(f"{stem}.{re.sub(r'[^A-Za-z0-9_.=-]', '_', label)}{dot}{suffix}")

    def _check_paths(self, paths: list[Path]) -> None:
        from omnisim.trace.files import check_target

        for path in paths:
            check_not_read(path, self.inputs)
            check_target(path, overwrite=self._overwrite)
        if len(set(paths)) < len(paths):
            twice = next(path for at, path in enumerate(paths) if path in paths[:at])
            raise UsageError(f"two runs would be written to {twice}", "sweep over each value once")

    def read(self) -> Workload | None:
        """The workload, if one is asked for."""
        return None if self._workload is None else self._workload.read()

    def check(self, wanted: list[_Wanted], workload: Workload | None) -> None:
        """FileError if one of the runs never could, before the first of them runs."""
        from omnisim.sim.run import check

        for one in wanted:
            check(one.scenario.engine, self._plan(one, workload), self._place_of(one, many=len(wanted) > 1))

    def _place_of(self, wanted: _Wanted, many: bool = False) -> str:
        place = self._workload.text if self._workload is not None else self._place
        changes = " ".join(str(change) for change in wanted.changes) if many else ""
        return f"{place} with {changes}" if changes else place

    def run(self, wanted: _Wanted, workload: Workload | None) -> Simulated:
        """Simulate, write, and look at what was written."""
        from omnisim.coverage import cover
        from omnisim.report.simulation import Simulated
        from omnisim.sim.outcome import Outcome
        from omnisim.sim.run import prepare
        from omnisim.trace import Trace, load, save

        place = self._place_of(wanted)
        simulation = prepare(
            wanted.scenario.engine,
            self._plan(wanted, workload),
            place,
            told=self._told(wanted),
            talker=_talker_in_header(self._talker or wanted.scenario.talker),
        )
        outcome = Outcome()
        records = outcome.watch(simulation.records())
        if wanted.path is None:
            trace = Trace(place, simulation.header, lambda: enumerate(records, start=2))
        else:
            save(wanted.path, simulation.header, records, overwrite=self._overwrite)
            trace = load(wanted.path)
        return Simulated(
            name=wanted.scenario.name if self._workload is None else self._workload.name,
            seed=None if self._workload is not None else wanted.seed,
            changes=tuple(map(str, wanted.changes)),
            vllm=simulation.vllm_version,
            num_blocks=simulation.num_blocks,
            max_model_len=simulation.max_model_len,
            outcome=outcome,
            coverage=cover(trace),
            stats=simulation.engine.stats,
            path=None if wanted.path is None else str(wanted.path),
            num_bytes=0 if wanted.path is None else wanted.path.stat().st_size,
        )

    def _plan(self, wanted: _Wanted, workload: Workload | None) -> Plan:
        from omnisim.sim.clients import Plan
        from omnisim.sim.run import plan_of
        from omnisim.sim.scenario import StepTime

        scenario = wanted.scenario
        if workload is None:
            return plan_of(scenario, wanted.seed)
        return Plan(workload.requests, (), scenario.step_time or StepTime())  # events are of the scenario's traffic

    def _told(self, wanted: _Wanted) -> str:
        """How to make this trace again; of files their names alone, so that it does not matter where they lie."""
        words = ["omnisim", "simulate"]
        words += [] if self._scenario is None else [Path(self._scenario).name]
        words += ["--seed", str(wanted.seed)] if self._workload is None else self._workload.words()
        for change in wanted.changes:
            words += ["--set", str(change)]
        words += [] if self._talker is None else ["--talker", self._talker]
        return shlex.join(words)


def _check_once(paths: list[str]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"{path} is set or swept over more than once", "say it once")


def _talker_in_header(talker: str | None) -> str | Talker | None:
    """One with a name by its name; one in a file whole, for the file does not travel with the trace."""
    from omnisim.talkers import load_talker, talker_names

    return talker if talker is None or talker in talker_names() else load_talker(talker)


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
