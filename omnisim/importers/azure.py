"""Azure's LLM inference traces: CSV with CRLF, a date and a time to 100 ns, and two lengths.

github.com/Azure/AzurePublicDataset; Patel et al., "Splitwise", ISCA 2024 (2023), and Stojkovic et al., "DynamoLLM",
HPCA 2025 (2024, whose times end in +00:00).
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from omnisim.importers.csv_rows import csv_rows
from omnisim.importers.length_rows import LengthRow, length_workload
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, count_of
from omnisim.workload import Workload

__all__ = ["read"]

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMAT = Format("azure", f"{','.join(_COLUMNS)} and then 2023-11-16 18:17:03.9799600,4808,10")
_TICKS = 10**9
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(?:\+00:00)?")
_START = datetime(1970, 1, 1)


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of an Azure trace; FileError if it is none."""
    rows, ledger = csv_rows(path, _COLUMNS, _row, options, _FORMAT)
    return length_workload("azure", rows, _TICKS, ledger, options)


def _row(number: int, fields: dict[str, Any]) -> LengthRow:
    return LengthRow(
        number=number,
        time=_nanoseconds(str(fields["TIMESTAMP"])),
        input_length=count_of(fields, "ContextTokens"),
        output_length=count_of(fields, "GeneratedTokens"),
    )


def _nanoseconds(text: str) -> int:
    """Since 1970, whole: a float could not hold the seventh digit."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise DamagedRow("TIMESTAMP is no time")
    try:
        since = datetime.fromisoformat(found[1]) - _START
    except ValueError:
        raise DamagedRow("TIMESTAMP is no time") from None
    return (since.days * 86_400 + since.seconds) * _TICKS + int((found[2] or "").ljust(9, "0"))
