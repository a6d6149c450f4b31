"""Traces: what the scheduler did, step by step, as values and as files."""

from omnisim.trace.files import Trace, convert, load, save
from omnisim.trace.model import (
    Geometry,
    Header,
    NewRequest,
    Producer,
    RecordedRows,
    Step,
    StepRecord,
)

__all__ = [
    "Geometry",
    "Header",
    "NewRequest",
    "Producer",
    "RecordedRows",
    "Step",
    "StepRecord",
    "Trace",
    "convert",
    "load",
    "save",
]
