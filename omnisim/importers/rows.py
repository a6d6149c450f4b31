"""Rows of a foreign file, line by line: each becomes a value or is dropped for a reason, and none is lost silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from omnisim.errors import FileError
from omnisim.importers.lines import Line
from omnisim.importers.options import ReadOptions
from omnisim.workload import Ledger

__all__ = [
    "UNSORTED",
    "DamagedRow",
    "Format",
    "Timed",
    "arrivals",
    "by_time",
    "count_of",
    "field_of",
    "json_fields",
    "keep",
    "refuse_if_empty",
    "rows_of",
    "time_of",
]

MAX_COUNT = 2**24
"""More tokens than any request has: what is above is a damaged number."""
MAX_TIME = 2**63
UNSORTED = "The rows of the file were not in the order of their times; here they are."

T = TypeVar("T")


class DamagedRow(Exception):
    """A row that cannot be a request; its text is the reason, the same for all rows of which it is true."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format as messages speak of it: its name and how a file of it begins."""

    name: str
    example: str

    @property
    def remedy(self) -> str:
        """What a file of this format looks like."""
        return f"{self.name} looks like {self.example}"


def rows_of(
    path: Path, lines: Iterable[Line], parse: Callable[[Line], T], options: ReadOptions, form: Format
) -> tuple[list[T], Ledger]:
    """What ``parse`` makes of each line, up to the limit; FileError if it makes nothing of any."""

    def attempts() -> Iterator[T | DamagedRow]:
        for line in lines:
            try:
                yield parse(line)
            except DamagedRow as damage:
                yield damage

    kept, ledger = keep(attempts(), options.limit)
    refuse_if_empty(path, ledger, form)
    return kept, ledger


def keep(attempts: Iterable[T | DamagedRow], limit: int | None) -> tuple[list[T], Ledger]:
    """The rows that are good, up to ``limit`` of them, and a ledger of all that were looked at."""
    kept: list[T] = []
    ledger = Ledger()
    for attempt in attempts:
        if isinstance(attempt, DamagedRow):
            ledger.drop(str(attempt))
            continue
        kept.append(attempt)
        ledger.keep()
        if ledger.kept == limit:
            break
    return kept, ledger


def refuse_if_empty(path: Path, ledger: Ledger, form: Format) -> None:
    """FileError if no row was kept: most likely it is a file of another format."""
    if not ledger.rows:
        raise FileError(str(path), "there is no row in it", form.remedy)
    if not ledger.kept:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in ledger.dropped.most_common(3))
        raise FileError(str(path), f"0 of {ledger.rows} rows are of this format ({reasons})", form.remedy)


def json_fields(line: Line) -> dict[str, Any]:
    """The object that a line holds."""
    if not line.text.strip():
        raise DamagedRow("empty line")
    try:
        value = msgspec.json.decode(line.text)
    except (msgspec.DecodeError, RecursionError):
        raise DamagedRow("not JSON") from None
    if not isinstance(value, dict):
        raise DamagedRow("no JSON object")
    return value


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """A field that must be there."""
    if name not in fields:
        raise DamagedRow(f"no {name}")
    return fields[name]


def count_of(fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    """A field that counts, from ``least`` to ``MAX_COUNT``."""
    value = field_of(fields, name)
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise DamagedRow(f"{name} is no count")
    if value < least:
        raise DamagedRow(f"{name} is {value}")
    return value


def time_of(fields: Mapping[str, Any], name: str) -> float:
    """A field that is a time, in the units of the file."""
    value = field_of(fields, name)
    if type(value) not in (int, float) or not 0 <= value < MAX_TIME:
        raise DamagedRow(f"{name} is no time")
    time: float = value
    return time


class Timed(Protocol):
    """A row with a time, in the units of its file."""

    @property
    def time(self) -> float: ...


S = TypeVar("S", bound=Timed)


def by_time(rows: list[S]) -> tuple[list[S], tuple[str, ...]]:
    """Rows in the order of their times, equal ones in that of the file; a note if they were not."""
    ordered = sorted(rows, key=lambda row: row.time)
    moved = any(one is not other for one, other in zip(rows, ordered, strict=True))
    return ordered, (UNSORTED,) if moved else ()


def arrivals(ordered: Sequence[Timed], ticks: int, options: ReadOptions) -> list[float]:
    """Seconds since the first of ``ordered``; a second has ``ticks`` of the file's units."""
    return [(row.time - ordered[0].time) / ticks * options.time_scale for row in ordered]
