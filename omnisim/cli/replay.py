"""``omnisim replay``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omnisim.cli.common import ReaderGone, TracePaths, complain, console, parse_bytes, parse_steps, trace_paths
from omnisim.errors import FileError, OmnisimError

if TYPE_CHECKING:
    from rich.console import Console

    from omnisim.verify import Options, Progress, Run

__all__ = ["replay"]


def _talkers(incomplete: str) -> list[str]:
    from omnisim.talkers import talker_names

    return [name for name in talker_names() if name.startswith(incomplete)]


def replay(
    paths: TracePaths,
    subject: Annotated[
        str,
        typer.Option(
            help="Cache under test: builtin, none, path:DIR (an unpacked vllm-omni wheel, or a checkout), installed "
            "(the vllm-omni of this environment), module:Class or file.py:Class."
        ),
    ] = "builtin",
    talker: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="What the model emits, by name or file, in place of the trace's own.",
            autocompletion=_talkers,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        Literal["owner", "recorded"],
        typer.Option(help="Rows that name their owner, or hidden states that a real engine recorded."),
    ] = "owner",
    truth: Annotated[
        Literal["content", "provenance"] | None,
        typer.Option(
            help="What a hit is due: rows of its own content, or the rows last written in its slots. "
            "By default content, if the trace has token ids.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        Literal["light", "vllm"], typer.Option(help="The batch handed to the cache: a stand-in, or vLLM's InputBatch.")
    ] = "light",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model's rows are emitted.")] = "cpu",
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help="Judge steps from A up to, not with, B; those before A are replayed only.",
            show_default=False,
        ),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first divergence.")] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory the cache may take, as 8G. By default what is free.", show_default=False
        ),
    ] = None,
    write_mode: Annotated[
        Literal["pending", "sync", "off"],
        typer.Option(
            help="How vllm-omni 0.24 to 0.28 write: one step late as on CUDA, at once, or never as without CUDA."
        ),
    ] = "pending",
    read_delay: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many steps later vllm-omni 0.30 is read.")
    ] = 0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.", show_default=False),
    ] = None,
) -> None:
    """Replay traces through a cache and compare every output with the truth.

    Examples:

    - `omnisim replay traces/hello.yaml`
    - `omnisim replay traces/ --talker tts`
    - `omnisim replay traces/recorded/chat-roomy.jsonl.zst --rows recorded`
    - `omnisim replay traces/hello.yaml --subject none` shows what a wrong cache looks like
    """
    from omnisim.report.model import exit_code, report, run_data, unusable_data
    from omnisim.report.terminal import print_run, print_totals
    from omnisim.verify import Options, check_options

    options = Options(
        subject=subject,
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
    _check_writable(json_file)
    try:
        check_options(options)
        found = trace_paths(paths)
    except OmnisimError as error:
        if json_file is not None:  # whoever reads the file must not find an older verdict in it
            _write_json(json_file, report([unusable_data("", options, str(error))]))
        raise
    out = console(stderr=json_file == "-")
    runs: list[Run] = []
    data: list[dict[str, Any]] = []
    for path in found:
        try:
            run = _verify(path, options, out)
        except OmnisimError as error:
            complain(error)
            data.append(_unusable(path, options, error))
            continue
        runs.append(run)
        data.append(run_data(run))
        if json_file != "-":
            print_run(out, run)
        if fail_fast and run.outcome != "agreement":
            break
    if json_file is not None:
        _write_json(json_file, report(data))
    if len(found) > 1 and json_file != "-":
        print_totals(out, runs, len(data) - len(runs))
    raise typer.Exit(exit_code([entry["outcome"] for entry in data]))


def _verify(path: Path, options: Options, out: Console) -> Run:
    from omnisim.trace import load
    from omnisim.verify import verify

    with _progress(path) as progress:
        return verify(load(path), options, progress=progress)


def _unusable(path: Path, options: Options, error: OmnisimError) -> dict[str, Any]:
    from omnisim.report.model import unusable_data

    return unusable_data(str(path), options, str(error))


def _check_writable(target: str | None) -> None:
    """Before a long replay rather than after it."""
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        what = "this is a folder" if path.is_dir() else ""
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            what = f"{path.parent} is no folder that can be written to"
    except OSError as error:
        what = str(error.strerror)
    if what:
        raise FileError(target, f"the report cannot be written: {what}", "name another file")


def _write_json(target: str, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if target == "-":
        try:
            typer.echo(text, nl=False)
        except BrokenPipeError:
            raise ReaderGone from None
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(target, f"the report cannot be written: {error.strerror}", "name another file") from None


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
