"""The custom dataset of ``vllm bench serve``: JSON Lines with a prompt, and perhaps how many tokens are sampled.

vllm/benchmarks/datasets/datasets.py (0.32), CustomDataset. vLLM shuffles the rows and applies a chat template unless
it is told not to; here they keep their order and their text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omnisim.importers.block_rows import answer
from omnisim.importers.lines import Line, lines_of
from omnisim.importers.options import ReadOptions
from omnisim.importers.rows import DamagedRow, Format, count_of, field_of, json_fields, rows_of
from omnisim.importers.texts import encoder
from omnisim.workload import TokenIds, Workload, WorkloadRequest

__all__ = ["read"]

_OUTPUT_TOKENS = 256
"""vLLM's default of --custom-output-len."""
_FORMAT = Format("vllm-custom", '{"prompt": "What is the capital of India?", "output_tokens": 10}')
_NO_TIMES = "The file tells no times: all requests come at 0. What they sample is their own."


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    number: int
    prompt: TokenIds
    output_tokens: int | None


def read(path: Path, options: ReadOptions) -> Workload:
    """The workload of a custom dataset; FileError if it is none."""
    text = encoder(options)
    rows, ledger = rows_of(path, lines_of(path), lambda line: _row(line, text.encode), options, _FORMAT)
    requests = tuple(_request(row, options) for row in rows)
    return Workload(requests, ledger, (text.note, _NO_TIMES, *_defaults(rows)))


def _row(line: Line, encode: Callable[[str], TokenIds]) -> _Row:
    fields = json_fields(line)
    text = field_of(fields, "prompt")
    if not isinstance(text, str):
        raise DamagedRow("prompt is no text")
    output_tokens = None if fields.get("output_tokens") is None else count_of(fields, "output_tokens")
    prompt = encode(text)
    if not len(prompt):
        raise DamagedRow("prompt is empty")
    return _Row(line.number, prompt, output_tokens)


def _request(row: _Row, options: ReadOptions) -> WorkloadRequest:
    max_tokens = options.scaled(row.output_tokens or _OUTPUT_TOKENS)
    return WorkloadRequest(
        req_id=f"vllm-custom-{row.number}",
        num_prompt_tokens=len(row.prompt),
        max_tokens=max_tokens,
        prompt_token_ids=lambda: row.prompt,
        sampled_token_ids=partial(answer, row.number, max_tokens),
    )


def _defaults(rows: list[_Row]) -> tuple[str, ...]:
    number = sum(row.output_tokens is None for row in rows)
    told = f"Requests without output_tokens: {number}. Each samples {_OUTPUT_TOKENS}, as vLLM does by default."
    return (told,) if number else ()
