"""Traces in files: ``.yaml`` for people, ``.jsonl`` and ``.jsonl.zst`` for captures, converted without loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from omnisim.errors import FileError
from omnisim.trace import jsonl
from omnisim.trace.expand import Expander
from omnisim.trace.model import Header, Step, StepRecord

__all__ = ["SUFFIXES", "Trace", "check_target", "convert", "load", "save"]

SUFFIXES = (".jsonl.zst", ".jsonl", ".yaml", ".yml")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A header, and records that are read afresh each time they are asked for.

    ``numbered`` gives line and record, in order; ``path`` is what errors call the place.
    """

    path: str
    header: Header
    numbered: Callable[[], Iterator[tuple[int, StepRecord]]]

    def records(self) -> Iterator[StepRecord]:
        """The records as they are written; FileError where the file stops being good."""
        return (record for _, record in self.numbered())

    def steps(self) -> Iterator[Step]:
        """The steps they tell; IllegalSchedule at the first that cannot have happened."""
        expander = Expander(self.header, self.path)
        return (expander.step(record, line) for line, record in self.numbered())


def load(path: str | Path) -> Trace:
    """Open a trace; its steps are read when they are asked for. FileError if it is none."""
    path = Path(path)
    suffix = _suffix(path)
    with _readable(path):
        if suffix.startswith(".y"):
            from omnisim.trace import yamlform

            header, records = yamlform.read(path)
            return Trace(str(path), header, lambda: iter(records))
        return Trace(str(path), jsonl.read_header(path), lambda: _stream(path))


def save(path: str | Path, header: Header, records: Iterable[StepRecord], *, overwrite: bool = False) -> None:
    """Write a trace, whole or not at all; FileError if ``path`` exists and ``overwrite`` is not said."""
    path = Path(path)
    suffix = _suffix(path, must_exist=False)
    with _replacing(path, overwrite) as file:
        if suffix.startswith(".y"):
            from omnisim.trace import yamlform

            yamlform.write(file, header, records)
        else:
            jsonl.write(file, header, records, packed=suffix == ".jsonl.zst")


def check_target(path: str | Path, *, overwrite: bool = False) -> None:
    """FileError where ``save`` could not write ``path``: for whoever works long before he writes."""
    path = Path(path)
    try:
        path.exists()
    except OSError as error:
        raise FileError(str(path), f"it cannot be written ({error.strerror})", "choose another name") from None
    _suffix(path, must_exist=False)
    if os.path.lexists(path) and not overwrite:
        raise FileError(str(path), "it exists already", "choose another name, or say --overwrite")
    if not path.parent.is_dir():
        raise FileError(str(path), "it cannot be written (there is no such folder)", "check the folder")
    if not os.access(path.parent, os.W_OK):
        raise FileError(str(path), "it cannot be written (the folder is read-only)", "check the folder")


def convert(
    src: str | Path, dst: str | Path, content: Literal["hashed", "none"] | None = None, *, overwrite: bool = False
) -> None:
    """Write the trace ``src`` as ``dst``, without loss or with its ``content`` redacted."""
    trace = load(src)
    if content is None:
        save(dst, trace.header, trace.records(), overwrite=overwrite)
        return
    from omnisim.trace.redact import redact

    header, records = redact(trace, content)
    save(dst, header, records, overwrite=overwrite)


def _stream(path: Path) -> Iterator[tuple[int, StepRecord]]:
    with _readable(path):
        yield from jsonl.read_records(path)


def _suffix(path: Path, must_exist: bool = True) -> str:
    with _readable(path):
        if must_exist and not path.exists():
            raise FileError(str(path), "there is no such file", "check the path")
        if path.is_dir():
            raise FileError(str(path), "this is a folder", "name a trace in it")
        if path.exists() and not path.is_file():
            raise FileError(str(path), "this is no regular file", "a trace is read more than once: save it to a file")
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return suffix
    raise FileError(str(path), "this is no name of a trace", f"a trace ends in {', '.join(SUFFIXES)}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(
            str(path), f"it cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None


@contextmanager
def _replacing(path: Path, overwrite: bool) -> Iterator[IO[bytes]]:
    """A file that becomes ``path`` once it is whole."""
    if os.path.lexists(path) and not overwrite:
        raise FileError(str(path), "it exists already", "choose another name, or say --overwrite")
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise FileError(str(path), f"it cannot be written ({error.strerror})", "check the folder") from None
    finally:
        partial.unlink(missing_ok=True)
