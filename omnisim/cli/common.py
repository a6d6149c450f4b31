"""Arguments and small services that several commands share."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnisim.errors import FileError, OmnisimError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "ReaderGone",
    "TracePaths",
    "complain",
    "console",
    "is_folder",
    "is_same_file",
    "parse_bytes",
    "parse_steps",
    "trace_paths",
]

TracePaths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", help="Traces (.yaml, .jsonl, .jsonl.zst), or folders of them.", show_default=False),
]

_SUFFIXES = (".yaml", ".yml", ".jsonl", ".jsonl.zst")
_PIPE_WIDTH = 10_000
"""So wide that nothing is broken into lines or cut off."""


class ReaderGone(Exception):
    """Whoever read our output has closed it, as in ``omnisim show ... | head``. No OSError: typer would eat it."""


def trace_paths(paths: list[Path]) -> list[Path]:
    """The traces named, and those in the folders named, in order. FileError for a folder without any."""
    found: list[Path] = []
    for path in paths:
        if not is_folder(path):
            found.append(path)
            continue
        inside = sorted(p for p in path.rglob("*") if not p.is_dir() and p.name.endswith(_SUFFIXES))
        inside = [p for p in inside if not _is_talker(p)]
        if not inside:
            raise FileError(str(path), f"no traces in this folder ({', '.join(_SUFFIXES)})", "name a trace file")
        found += inside
    return found


def _is_talker(path: Path) -> bool:
    """Whether a file in a folder of traces is a talker; one that cannot be read is left to whoever reads it."""
    if not path.name.endswith((".yaml", ".yml")):
        return False
    try:
        with path.open(encoding="utf-8") as lines:
            return any(line.startswith("format: omnisim-talker/") for line in islice(lines, 64))
    except (OSError, UnicodeDecodeError):
        return False


def is_folder(path: Path) -> bool:
    """Whether this is a folder; a name that no file can have is none."""
    try:
        return path.is_dir()
    except OSError:  # a name that is too long; whoever reads the file says so
        return False


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file that exists."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """``A:B`` as ``(A, B)``; either end may be left out."""
    if text is None:
        return 0, None
    start, colon, stop = text.partition(":")
    try:
        span = (int(start or 0), int(stop) if stop else None)
    except ValueError:
        span = (-1, None)
    if not colon or span[0] < 0 or (span[1] is not None and span[1] <= span[0]):
        raise UsageError(f"--steps {text!r} is not a range of steps", "write A:B with 0 <= A < B, for example 10:20")
    return span


def parse_bytes(text: str | None) -> int | None:
    """``8G``, ``512M`` or plain bytes."""
    if text is None:
        return None
    number, unit = text.rstrip("iBb"), 1
    if number and number[-1].upper() in "KMGT":
        unit = 1024 ** ("KMGT".index(number[-1].upper()) + 1)
        number = number[:-1]
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"--max-memory {text!r} is not a size", "write bytes, or a number with K, M, G or T")
    return size


def console(stderr: bool = False) -> Console:
    """A console as wide as its terminal; in a pipe as wide as ``COLUMNS`` says, or as it takes."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise ReaderGone

    made = Ours(stderr=stderr, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Ours(stderr=stderr, highlight=False, width=_PIPE_WIDTH)
    return made


def complain(error: OmnisimError | str) -> None:
    """The line on stderr for a mistake that its user can mend."""
    from omnisim.report.words import literal

    typer.echo(f"omnisim: {literal(str(error))}", err=True)
