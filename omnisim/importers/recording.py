"""Recordings of vLLM's runner: a header and, for each executed step, the whole persistent batch, as JSON lines.

Everything a step says is kept; block rows and token ids are written once, when they change or become known.
``python -m omnisim.importers.recording SOURCE FOLDER`` converts the five recordings of this project.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import UNSET

from omnisim.errors import FileError
from omnisim.trace.expand import slot_runs
from omnisim.trace.files import save
from omnisim.trace.model import Geometry, Header, NewRequest, Producer, RecordedRows, StepRecord

__all__ = ["RECORDED", "convert_recordings", "read_recording", "records_of"]


def read_recording(path: Path, no_cache: str) -> tuple[Header, list[StepRecord]]:
    """The trace of ``NAME.jsonl``; ``no_cache`` is the name of the same requests' run without prefix caching."""
    head, *lines = path.read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return _header(json.loads(head), path, no_cache), list(records_of(steps, str(path)))


def _header(head: dict[str, Any], path: Path, no_cache: str) -> Header:
    """What the recording says of itself, as the header of a trace."""
    caching = "on" if head["enable_prefix_caching"] else "off"
    aborted = ", ".join(head["aborted_between_steps"])
    return Header(
        format="omnisim-trace/1",
        producer=Producer(name="vllm", version=head["vllm_version"]),
        cache=Geometry(num_blocks=head["num_blocks"], block_size=head["block_size"]),
        content="tokens",
        recorded_rows=RecordedRows(
            tensors=f"{path.stem}.safetensors",
            no_cache_trace=f"{no_cache}.jsonl.zst",
            no_cache_tensors=f"{no_cache}.safetensors",
        ),
        expect={"builtin": "agreement"},
        provenance=(
            f"Recorded by this project on 2026-12-01 from vLLM {head['vllm_version']} on a CPU, prefix caching "
            f"{caching}, max_num_batched_tokens {head['max_num_batched_tokens']}, max_num_seqs {head['max_num_seqs']}; "
            f"model: {head['architecture']}, hidden size {head['hidden_size']}, {head['dtype']}."
            + (f" Aborted between steps: {aborted}." if aborted else "")
            + " Synthetic prompts. Apache-2.0."
        ),
    )


@dataclass(slots=True)
class _Seen:
    """What the records so far have told of a request."""

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)


def records_of(steps: Iterable[dict[str, Any]], place: str) -> Iterator[StepRecord]:
    """The records of whole steps: only what changed is kept. FileError where token ids contradict each other."""
    seen: dict[str, _Seen] = {}
    batch: list[str] | None = None
    for line, step in enumerate(steps, start=2):
        for new in step["scheduled_new_reqs"]:
            seen[new["req_id"]] = _Seen(list(new["prompt_token_ids"]))
        yield _record(step, seen, batch, f"{place}:{line}")
        batch = step["req_ids"]


def _record(step: dict[str, Any], seen: dict[str, _Seen], batch: list[str] | None, place: str) -> StepRecord:
    replaced, appended = _block_changes(step, seen)
    told = [
        _tell(seen[req_id].token_ids, start, ids, f"{place}: step {step['step']}, request {req_id}")
        for req_id, start, ids in zip(
            step["req_ids"], step["num_computed_tokens"], step["scheduled_token_ids"], strict=True
        )
    ]
    return StepRecord(
        step=step["step"],
        num_computed_tokens=tuple(step["num_computed_tokens"]),
        num_scheduled_tokens=tuple(step["num_scheduled_tokens"]),
        query_start_loc=tuple(step["query_start_loc"]),
        block_ids=replaced,
        new_block_ids=appended,
        slot_mapping=slot_runs(step["slot_mapping"]),
        num_tokens_padded=step["num_tokens_padded"],
        scheduled_new_reqs=tuple(_new_request(new) for new in step["scheduled_new_reqs"]),
        resumed_req_ids=tuple(step["resumed_req_ids"]),
        preempted_req_ids=tuple(step["preempted_req_ids"]),
        finished_req_ids=tuple(step["finished_req_ids"]),
        new_token_ids=tuple(told) if any(told) else (),
        req_ids=UNSET if step["req_ids"] == batch else tuple(step["req_ids"]),
    )


def _new_request(new: dict[str, Any]) -> NewRequest:
    """vLLM appends a random suffix to the id it was given: ``req-3-aaa8b794`` was ``req-3``."""
    external, _, _ = new["req_id"].rpartition("-")
    return NewRequest(req_id=new["req_id"], external_req_id=external, prompt_token_ids=tuple(new["prompt_token_ids"]))


def _block_changes(
    step: dict[str, Any], seen: dict[str, _Seen]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    replaced, appended = {}, {}
    entering = {new["req_id"] for new in step["scheduled_new_reqs"]} | set(step["resumed_req_ids"])
    for req_id, row in zip(step["req_ids"], step["block_table"], strict=True):
        known = seen[req_id].blocks
        if req_id in entering or row[: len(known)] != known:
            replaced[req_id] = tuple(row)
        elif len(row) > len(known):
            appended[req_id] = tuple(row[len(known) :])
        seen[req_id].blocks = row
    return replaced, appended


def _tell(known: list[int], start: int, ids: Sequence[int], where: str) -> tuple[int, ...]:
    """The ids of a scheduled span that were not known yet; they are known from here on."""
    told = known[start : start + len(ids)]
    for position, (want, found) in enumerate(zip(told, ids, strict=False), start=start):
        if want != found:
            raise FileError(where, f"token {found} at position {position} was {want} before", "record it again")
    new = tuple(ids[len(told) :])
    known += new
    return new


RECORDED = ("chat-roomy", "chat-tight", "chat-burst", "chat-abort", "chat-roomy-nocache")
"""Names of the recordings; the last is the first with prefix caching off."""


def convert_recordings(source: Path, folder: Path) -> None:
    """Write the trace of each recording in ``source`` into ``folder``, its tensors beside it."""
    for name in RECORDED:
        header, records = read_recording(source / f"{name}.jsonl", no_cache=RECORDED[-1])
        save(folder / f"{name}.jsonl.zst", header, records, overwrite=True)
        shutil.copyfile(source / f"{name}.safetensors", folder / f"{name}.safetensors")


if __name__ == "__main__":
    convert_recordings(Path(sys.argv[1]), Path(sys.argv[2]))
