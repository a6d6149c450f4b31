"""Lines of a foreign text file, and the refusals of a file that is none."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnisim.errors import FileError

__all__ = ["Line", "decoded", "lines_of", "readable"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file without its end; ``place`` is ``file:number``."""

    number: int
    place: str
    text: str


def lines_of(path: Path) -> Iterator[Line]:
    """Every line of a text file; FileError if it cannot be read, or is not UTF-8. LF and CRLF may end a line."""
    with readable(path), path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            content = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            yield Line(number, f"{path}:{number}", decoded(content, path, number).rstrip("\r\n"))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """FileError for a file that cannot be opened."""
    try:
        yield
    except FileNotFoundError:
        raise FileError(str(path), "there is no such file", "check the path") from None
    except IsADirectoryError:
        raise FileError(str(path), "this is a folder", "name a file in it") from None
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
        raise FileError(str(path), what, "check the path and its permissions") from None


def decoded(raw: bytes, path: Path, number: int = 1) -> str:
    """Text from the UTF-8 that begins in line ``number``; FileError if it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = number + raw.count(b"\n", 0, error.start)
        raise FileError(f"{path}:{line}", f"byte {raw[error.start]:#04x} is not UTF-8", "save it as UTF-8") from None
