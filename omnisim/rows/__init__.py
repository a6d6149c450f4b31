"""What the model would emit: rows that name their owner, or recorded rows."""

from __future__ import annotations

from typing import Literal

from omnisim.rows.emit import OwnerRows
from omnisim.rows.naming import ContentNames, Names, ProvenanceNames
from omnisim.rows.recorded import RecordedRows
from omnisim.rows.source import RowSource
from omnisim.talker import Talker
from omnisim.trace import Trace

__all__ = ["make_names", "make_rows"]


def make_names(grade: Literal["content", "provenance"]) -> Names:
    """Fresh names of a grade."""
    return ContentNames() if grade == "content" else ProvenanceNames()


def make_rows(trace: Trace, talker: Talker, source: Literal["owner", "recorded"], device: str = "cpu") -> RowSource:
    """The rows of a replay of ``trace``; CannotJudge where it has no recorded ones."""
    return OwnerRows(talker, device) if source == "owner" else RecordedRows(trace, talker, device)
