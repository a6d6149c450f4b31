"""The recordings of a real engine: they are converted whole, and what they tell can have happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from omnisim.errors import FileError
from omnisim.importers.recording import RECORDED, convert_recordings, records_of
from omnisim.trace import load

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT.parent / "shared" / "data" / "recordings"
FOLDER = ROOT / "traces" / "recorded"

needs_recordings = pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason=f"the recorder's own files, {RECORDINGS}, are absent"
)

STEPS_TOKENS_HITS = {
    "chat-roomy": (58, 1382, 25),
    "chat-tight": (86, 1794, 25),
    "chat-burst": (54, 1382, 25),
    "chat-abort": (58, 1303, 25),
    "chat-roomy-nocache": (61, 3494, 0),
}


@pytest.mark.parametrize("name", RECORDED)
def test_each_recording_is_legal_and_whole(name: str) -> None:
    steps = list(load(FOLDER / f"{name}.jsonl.zst").steps())
    hits = sum(
        computed > 0
        for step in steps
        for req_id, computed in zip(step.req_ids, step.num_computed_tokens, strict=True)
        if req_id in {new.req_id for new in step.scheduled_new_reqs}
    )
    assert (len(steps), sum(step.num_tokens for step in steps), hits) == STEPS_TOKENS_HITS[name]


@pytest.mark.parametrize("name", RECORDED)
def test_each_recording_keeps_the_facts_of_its_engine(name: str) -> None:
    trace = load(FOLDER / f"{name}.jsonl.zst")
    assert all(
        record.query_start_loc and record.slot_mapping and record.num_tokens_padded for record in trace.records()
    )
    assert (trace.header.producer.name, trace.header.producer.version) == ("vllm", "0.32.0")
    assert "Apache-2.0" in trace.header.provenance
    for record in trace.records():
        for new in record.scheduled_new_reqs:
            assert new.req_id.startswith(f"{new.external_req_id}-")


@pytest.mark.parametrize("name", RECORDED)
def test_each_recording_has_a_row_a_token(name: str) -> None:
    trace = load(FOLDER / f"{name}.jsonl.zst")
    rows = trace.header.recorded_rows
    assert rows is not None
    assert (FOLDER / rows.no_cache_trace).is_file()
    assert (FOLDER / rows.no_cache_tensors).is_file()
    with safe_open(FOLDER / rows.tensors, "np") as tensors:
        for step in trace.steps():
            assert tensors.get_slice(f"step_{step.index:05}").get_shape() == [step.num_tokens, 32]


@needs_recordings
def test_conversion_gives_the_committed_files(tmp_path: Path) -> None:
    convert_recordings(RECORDINGS, tmp_path)
    committed = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert {path.name for path in tmp_path.iterdir()} == committed
    for name in RECORDED:
        made, kept = load(tmp_path / f"{name}.jsonl.zst"), load(FOLDER / f"{name}.jsonl.zst")
        assert made.header == kept.header
        assert list(made.records()) == list(kept.records())
        tensors = f"{name}.safetensors"
        assert (tmp_path / tensors).read_bytes() == (FOLDER / tensors).read_bytes()


@needs_recordings
@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_field_survives(name: str) -> None:
    _, *lines = (RECORDINGS / f"{name}.jsonl").read_text().splitlines()
    ids: dict[str, list[int]] = {}
    for line, step in zip(lines, load(FOLDER / f"{name}.jsonl.zst").steps(), strict=True):
        told = json.loads(line)
        assert step.index == told["step"]
        assert step.slot_mapping.tolist() == told["slot_mapping"]
        assert [list(row) for row in step.block_table] == told["block_table"]
        for field in ("req_ids", "num_scheduled_tokens", "num_computed_tokens", "query_start_loc"):
            assert list(getattr(step, field)) == told[field]
        for field in ("resumed_req_ids", "preempted_req_ids", "finished_req_ids"):
            assert list(getattr(step, field)) == told[field]
        assert step.num_tokens_padded == told["num_tokens_padded"]
        assert [new.req_id for new in step.scheduled_new_reqs] == [new["req_id"] for new in told["scheduled_new_reqs"]]
        ids |= {new.req_id: list(new.prompt_token_ids) for new in step.scheduled_new_reqs}
        for row, req_id in enumerate(step.req_ids):
            ids[req_id] += step.new_token_ids[row]
            start = step.num_computed_tokens[row]
            assert ids[req_id][start : start + step.num_scheduled_tokens[row]] == told["scheduled_token_ids"][row]


def test_a_recording_that_contradicts_its_prompt_is_refused() -> None:
    step = {
        "step": 0,
        "req_ids": ["req-0-aa"],
        "num_scheduled_tokens": [2],
        "num_computed_tokens": [0],
        "query_start_loc": [0, 2],
        "block_table": [[1]],
        "slot_mapping": [32, 33],
        "num_tokens_padded": 2,
        "scheduled_new_reqs": [{"req_id": "req-0-aa", "num_computed_tokens": 0, "prompt_token_ids": [5, 6, 7]}],
        "resumed_req_ids": [],
        "preempted_req_ids": [],
        "finished_req_ids": [],
        "scheduled_token_ids": [[5, 9]],
    }
    with pytest.raises(FileError) as error:
        list(records_of([step], "r.jsonl"))
    assert str(error.value) == (
        "r.jsonl:2: step 0, request req-0-aa: token 9 at position 1 was 6 before; record it again"
    )
