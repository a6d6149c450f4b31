"""BurstGPT's request traces: CSV, times in seconds from the first midnight; releases differ in their columns.

github.com/HPMLL/BurstGPT; Wang et al., "BurstGPT", arXiv 2401.17644. A row without response tokens is a failure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnisim.importers.csv_rows import csv_rows
from omnisim.importers.length_rows import LengthRow, length_workload
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, count_of, time_of
from omnisim.workload import Workload

__all__ = ["read"]

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_FORMAT = Format(
    "burstgpt",
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type and then "
    "5,ChatGPT,472,18,490,Conversation log",
)
_TICKS = 1


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of a BurstGPT trace; FileError if it is none."""
    rows, ledger = csv_rows(path, _COLUMNS, _row, options, _FORMAT)
    return length_workload("burstgpt", rows, _TICKS, ledger, options)


def _row(number: int, fields: dict[str, Any]) -> LengthRow:
    row = LengthRow(
        number=number,
        time=time_of(fields, "Timestamp"),
        input_length=count_of(fields, "Request tokens"),
        output_length=count_of(fields, "Response tokens", least=0),
    )
    if not row.output_length:
        raise DamagedRow("failed: no response tokens")
    return row
