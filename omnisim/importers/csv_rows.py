"""Rows of a CSV file with a header: columns are found by name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omnisim.errors import FileError
from omnisim.importers.lines import Line, lines_of
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, rows_of
from omnisim.workload import Ledger

__all__ = ["csv_rows"]

_LONGEST_HEADER = 10_000

T = TypeVar("T")


def csv_rows(
    path: Path, wanted: Sequence[str], parse: Callable[[int, dict[str, Any]], T], options: ReadOptions, form: Format
) -> tuple[list[T], Ledger]:
    """What ``parse`` makes of each row's number and fields; FileError if a column that is wanted is missing."""
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        raise FileError(str(path), "the file is empty", form.remedy)
    columns = _columns(first, wanted, form)
    return rows_of(path, lines, lambda line: parse(line.number - 1, _fields(line, columns)), options, form)


def _columns(first: Line, wanted: Sequence[str], form: Format) -> list[str]:
    """Names in the first line; FileError unless every one of ``wanted`` is there, once."""
    columns = [name.strip() for name in next(csv.reader([first.text[:_LONGEST_HEADER]]), [])]
    for name in wanted:
        if columns.count(name) != 1:
            how_often = "no column" if name not in columns else "more than one column"
            raise FileError(first.place, f"{how_often} {name!r} in {first.text[:80]!r}", form.remedy)
    return columns


def _fields(line: Line, columns: Sequence[str]) -> dict[str, Any]:
    """Values by the name of their column; what is written as a number is one."""
    if not line.text.strip():
        raise DamagedRow("empty line")
    try:
        values = next(csv.reader([line.text], strict=True))
    except csv.Error:
        raise DamagedRow("not CSV") from None
    if len(values) != len(columns):
        raise DamagedRow("wrong number of fields")
    return {name: _number(value.strip()) for name, value in zip(columns, values, strict=True)}


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text):
        return float(text)
    return text
