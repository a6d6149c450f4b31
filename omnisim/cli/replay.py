"""``omnisim replay``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace as with_changes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.cli.common import TracePaths, complain, console, parse_bytes, parse_steps, trace_paths
from omnisim.cli.options import (
    BatchName,
    Device,
    JsonFile,
    MaxMemory,
    ReadDelay,
    Rows,
    Seconds,
    Steps,
    TalkerName,
    Truth,
    WriteMode,
    check_writable,
    counting,
    write_json,
)
from omnisim.errors import OmnisimError, UsageError

if TYPE_CHECKING:
    from omnisim.verify import Options, Progress, Run

__all__ = ["replay"]


def replay(
    paths: TracePaths,
    subject: Annotated[
        str | None,
        typer.Option(
            help="Cache under test: builtin (the default), none, vllm-omni:V (a release, see omnisim subjects), "
            "path:DIR (an unpacked vllm-omni wheel, or a checkout), installed (the vllm-omni of this environment), "
            "module:Class or file.py:Class.",
            show_default=False,
        ),
    ] = None,
    expect: Annotated[
        bool,
        typer.Option(
            "--expect", help="Test the outcomes that traces expect of the subjects they name (or of --subject alone)."
        ),
    ] = False,
    talker: TalkerName = None,
    rows: Rows = "owner",
    truth: Truth = None,
    batch: BatchName = "light",
    device: Device = "cpu",
    steps: Steps = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first divergence.")] = False,
    max_memory: MaxMemory = None,
    write_mode: WriteMode = "pending",
    read_delay: ReadDelay = 0,
    timeout: Seconds = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Replay traces through a cache and compare every output with the truth.

    Examples:

    - `omnisim replay traces/hello.yaml`
    - `omnisim replay traces/recorded --talker tts`
    - `omnisim replay traces/recorded/chat-roomy.jsonl.zst --rows recorded`
    - `omnisim replay traces/hello.yaml --subject none` shows what a wrong cache looks like
    - `omnisim replay traces/defects/ --expect` tests what traces expect of each subject
    """
    from omnisim.report.model import report, run_data
    from omnisim.verify import Options, check_options, unusable

    if expect and fail_fast:
        raise UsageError("--fail-fast cuts off what --expect tests", "leave one of them out")
    options = Options(
        subject=subject or "builtin",
        talker=talker,
        rows=rows,
        truth=truth,
        batch=batch,
        device=device,
        steps=parse_steps(steps),
        fail_fast=fail_fast,
        max_memory=parse_bytes(max_memory),
        write_mode=write_mode,
        read_delay=read_delay,
    )
    check_writable(json_file, paths)
    try:
        check_options(options)
        found = trace_paths(paths)
    except OmnisimError as error:
        if json_file is not None:  # whoever reads the file must not find an older verdict in it
            write_json(json_file, report([run_data(unusable("", options, str(error)))]))
        raise
    if expect:
        raise typer.Exit(_replay_expected(found, subject, options, timeout, json_file))
    raise typer.Exit(_replay_each(found, options, timeout, json_file))


def _replay_each(found: list[Path], options: Options, timeout: float, json_file: str | None) -> int:
    from omnisim.report.model import exit_code, report, run_data
    from omnisim.report.terminal import print_run, print_totals
    from omnisim.verify import unusable

    out = console(stderr=json_file == "-")
    runs: list[Run] = []
    with _judging(options, timeout) as judge:
        for path in found:
            try:
                with _progress(path) as progress:
                    run = judge(path, progress)
            except OmnisimError as error:
                complain(error)
                runs.append(unusable(str(path), options, str(error)))
                continue
            runs.append(run)
            if json_file != "-":
                print_run(out, run)
            if options.fail_fast and run.outcome != "agreement":
                break
    if json_file is not None:
        write_json(json_file, report([run_data(run) for run in runs]))
    if len(found) > 1 and json_file != "-":
        print_totals(out, runs)
    return exit_code([run.outcome for run in runs])


@contextmanager
def _judging(options: Options, timeout: float) -> Iterator[Callable[[Path, Progress | None], Run]]:
    """Replays of one subject: ours in this process, anybody else's code in one of its own."""
    from omnisim.subjects import subject_names
    from omnisim.trace import load
    from omnisim.verify import verify
    from omnisim.workers import Worker

    if options.subject in subject_names():
        yield lambda path, progress: verify(load(path), options, progress=progress)
        return
    with Worker(options.subject, timeout) as worker:
        worker.start()
        yield lambda path, progress: worker.verify(path, options, progress)


def _replay_expected(
    found: list[Path], subject: str | None, options: Options, timeout: float, json_file: str | None
) -> int:
    from omnisim.expectations import Expected, exit_code, expectations
    from omnisim.matrix import run_all
    from omnisim.report.expected import expected_report, print_expected
    from omnisim.verify import unusable

    expected = {}
    results: list[Expected] = []
    for path in found:
        try:
            expected[path] = expectations(path, subject)
        except OmnisimError as error:
            complain(error)
            of_whom = with_changes(options, subject=subject or "")
            results.append(Expected(unusable(str(path), of_whom, str(error)), None))
    subjects = dict.fromkeys(name for told in expected.values() for name in told)
    traces = {name: [path for path, told in expected.items() if name in told] for name in subjects}
    with counting(sum(map(len, traces.values()))) as progress:
        runs = run_all(traces, options, timeout, progress)
    results += [
        Expected(runs[path, name], outcome) for path, told in expected.items() for name, outcome in told.items()
    ]
    if json_file is not None:
        write_json(json_file, expected_report(results))
    if json_file != "-":
        print_expected(console(), results)
    return exit_code(results)


@contextmanager
def _progress(path: Path) -> Iterator[Progress | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from omnisim.report.words import literal

    name = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), name, BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(literal(path.name), total=None)
        yield lambda step: bar.update(task, completed=step + 1)
