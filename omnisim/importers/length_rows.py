"""Rows that tell of a request only when it came and how long it was, and the requests they become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from omnisim.importers.identity import Kind, own_tokens
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import arrivals, by_time
from omnisim.workload import Ledger, Workload, WorkloadRequest

__all__ = ["LengthRow", "length_workload"]

_NO_REUSE = "The file tells lengths and times only: every request's tokens are its own, so nothing can be reused."


@dataclass(frozen=True, slots=True)
class LengthRow:
    """A request as its row tells it; ``time`` in the units of the file."""

    number: int
    time: float
    input_length: int
    output_length: int


def length_workload(name: str, rows: list[LengthRow], ticks: int, ledger: Ledger, options: ReadOptions) -> Workload:
    """Requests that have nothing in common, called ``name-number``."""
    ordered, notes = by_time(rows)
    requests = [
        _request(f"{name}-{row.number}", row, arrival, options)
        for row, arrival in zip(ordered, arrivals(ordered, ticks, options), strict=True)
    ]
    return Workload(tuple(requests), ledger, (_NO_REUSE, *notes))


def _request(req_id: str, row: LengthRow, arrival: float, options: ReadOptions) -> WorkloadRequest:
    num_prompt_tokens, max_tokens = options.scaled(row.input_length), options.scaled(row.output_length)
    return WorkloadRequest(
        req_id=req_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        prompt_token_ids=partial(own_tokens, Kind.PROMPT, row.number, 0, num_prompt_tokens),
        sampled_token_ids=partial(own_tokens, Kind.OUTPUT, row.number, 0, max_tokens),
        arrival=arrival,
    )
