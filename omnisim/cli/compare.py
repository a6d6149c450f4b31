"""``omnisim compare``."""

from __future__ import annotations

from typing import Annotated

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
from omnisim.errors import UsageError

__all__ = ["compare"]


def compare(
    paths: TracePaths,
    subject: Annotated[
        list[str] | None,
        typer.Option(help="A cache under test, as for omnisim replay; give several.", show_default=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="builtin, none and every vllm-omni release that is installed here.")
    ] = False,
    talker: TalkerName = None,
    rows: Rows = "owner",
    truth: Truth = None,
    batch: BatchName = "light",
    device: Device = "cpu",
    steps: Steps = None,
    max_memory: MaxMemory = None,
    write_mode: WriteMode = "pending",
    read_delay: ReadDelay = 0,
    timeout: Seconds = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Replay traces under several subjects, and show where they differ from the first one.

    Exits with 0 if they do not differ, with 1 if they do, with 2 if something could not be judged.

    Examples:

    - `omnisim compare traces/hello.yaml --subject builtin --subject none`
    - `omnisim compare traces/recorded --talker deferred-codes --all`
    """
    from omnisim.matrix import run_all
    from omnisim.report.matrix import comparison, print_comparison
    from omnisim.verify import Options, check_options

    subjects = _subjects(subject or [], every)
    options = Options(
        talker=talker,
        rows=rows,
        truth=truth,
        batch=batch,
        device=device,
        steps=parse_steps(steps),
        max_memory=parse_bytes(max_memory),
        write_mode=write_mode,
        read_delay=read_delay,
    )
    check_writable(json_file, paths)
    check_options(options)
    found = trace_paths(paths)
    with counting(len(found) * len(subjects)) as progress:
        runs = run_all(dict.fromkeys(subjects, found), options, timeout, progress)
    for run in runs.values():
        if run.outcome == "unusable":
            complain(f"{run.error} (subject {run.subject})")
    told = comparison(found, subjects, runs)
    if json_file is not None:
        write_json(json_file, told)
    if json_file != "-":
        print_comparison(console(), found, subjects, runs)
    raise typer.Exit(told["exit_code"])


def _subjects(named: list[str], every: bool) -> list[str]:
    subjects = list(dict.fromkeys(named))
    if every:
        from omnisim.subjects import store, subject_names

        there = [f"vllm-omni:{release.version}" for release in store.installed()]
        subjects = list(dict.fromkeys([*subjects, *subject_names(), *there]))
        if missing := [version for version in store.RELEASES if f"vllm-omni:{version}" not in there]:
            complain(f"not installed, and left out: vllm-omni {', '.join(missing)}; omnisim subjects install --all")
    if len(subjects) < 2:
        raise UsageError("there is nothing to compare", "name two with --subject, or use --all")
    return subjects
