"""Options that several commands share, and what a replay is made of by them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omnisim.cli.common import ReaderGone, console, is_same_file
from omnisim.errors import FileError

if TYPE_CHECKING:
    from omnisim.verify import Run

__all__ = [
    "BatchName",
    "Device",
    "JsonFile",
    "MaxMemory",
    "ReadDelay",
    "Rows",
    "Seconds",
    "Steps",
    "TalkerName",
    "Truth",
    "WriteMode",
    "check_not_read",
    "check_writable",
    "counting",
    "write_json",
]


def _talkers(incomplete: str) -> list[str]:
    from omnisim.talkers import talker_names

    return [name for name in talker_names() if name.startswith(incomplete)]


TalkerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="What the model emits, by name or file, in place of the trace's own.",
        autocompletion=_talkers,
        show_default=False,
    ),
]
Rows = Annotated[
    Literal["owner", "recorded"],
    typer.Option(help="Rows that name their owner, or hidden states that a real engine recorded."),
]
Truth = Annotated[
    Literal["content", "provenance"] | None,
    typer.Option(
        help="What a hit is due: rows of its own content, or the rows last written in its slots. "
        "By default content, if the trace has token ids.",
        show_default=False,
    ),
]
BatchName = Annotated[
    Literal["light", "vllm"], typer.Option(help="The batch handed to the cache: a stand-in, or vLLM's InputBatch.")
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model's rows are emitted.")]
Steps = Annotated[
    str | None,
    typer.Option(
        metavar="A:B",
        help="Judge steps from A up to, not with, B; those before A are replayed only.",
        show_default=False,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory the cache may take, as 8G. By default what is free.", show_default=False),
]
WriteMode = Annotated[
    Literal["pending", "sync", "off"],
    typer.Option(help="How vllm-omni 0.24 to 0.28 write: one step late as on CUDA, at once, or never as without CUDA."),
]
ReadDelay = Annotated[int, typer.Option(min=0, metavar="N", help="How many steps later vllm-omni 0.30 is read.")]
Seconds = Annotated[
    float,
    typer.Option("--timeout", min=0.1, metavar="SECONDS", help="A subject that is silent for longer has crashed."),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout.", show_default=False),
]


def check_writable(target: str | None, inputs: Iterable[Path] = ()) -> None:
    """Before a long replay rather than after it; FileError for one of its ``inputs``, too."""
    if target is None or target == "-":
        return
    path = Path(target)
    check_not_read(path, inputs)
    try:
        what = "this is a folder" if path.is_dir() else ""
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            what = f"{path.parent} is no folder that can be written to"
    except OSError as error:
        what = str(error.strerror)
    if what:
        raise FileError(target, f"the report cannot be written: {what}", "name another file")


def check_not_read(target: Path, inputs: Iterable[Path]) -> None:
    """FileError where what is written would take the place of what is read."""
    if any(is_same_file(target, read) for read in inputs):
        raise FileError(str(target), "it is read, and would be overwritten", "name another file")


def write_json(target: str, value: dict[str, Any]) -> None:
    """FileError where it cannot be written."""
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
def counting(total: int) -> Iterator[Callable[[Run], None] | None]:
    """A bar over many runs on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("replays")
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda run: bar.update(task, advance=1)
