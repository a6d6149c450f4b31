"""Recorded hidden states are judged against the same requests run with prefix caching off, matched by content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from omnisim.errors import CannotJudge, FileError
from omnisim.rows.emit import HIDDEN_STATES
from omnisim.rows.naming import ContentNames
from omnisim.rows.recorded import TOLERANCES, RecordedRows
from omnisim.talker import KeySpec, Talker
from omnisim.trace import Geometry, Header, NewRequest, Producer, StepRecord, load, save
from omnisim.trace import RecordedRows as Recorded

HIDDEN = Talker(
    format="omnisim-talker/1",
    name="test",
    hidden_size=64,
    keys={"K": KeySpec(kind="row", shape=(16,), dtype="int64")},
)
WIDTH = 8
PROMPT = (1, 2, 3, 4, 5, 6)


def prefill(ids: tuple[int, ...], computed: int = 0, req_id: str = "A") -> StepRecord:
    return StepRecord(
        req_ids=(req_id,),
        num_computed_tokens=(computed,),
        num_scheduled_tokens=(len(ids) - computed,),
        block_ids={req_id: (0, 1)},
        scheduled_new_reqs=(NewRequest(req_id=req_id, prompt_token_ids=ids),),
    )


@pytest.fixture
def recording(tmp_path: Path) -> Callable[..., Any]:
    """Writes a recording (a prompt, then a hit on it) and opens it; ``truth`` are the no-cache run's token ids."""

    def make(truth: tuple[int, ...] = PROMPT, talker: Talker = HIDDEN, **tensors: Tensor) -> RecordedRows:
        recorded = Recorded(
            tensors="run.safetensors", no_cache_trace="truth.jsonl", no_cache_tensors="truth.safetensors"
        )
        header = Header(
            format="omnisim-trace/1",
            producer=Producer(name="test"),
            cache=Geometry(num_blocks=4, block_size=4),
            recorded_rows=recorded,
        )
        rows = torch.arange(6 * WIDTH, dtype=torch.float32).reshape(6, WIDTH) / 7
        save_file({"step_00000": rows, "step_00001": rows[4:] * 1.000001} | tensors, tmp_path / "run.safetensors")
        save_file({"step_00000": rows[: len(truth)].clone()}, tmp_path / "truth.safetensors")
        save(tmp_path / "run.jsonl", header, [prefill(PROMPT), prefill(PROMPT, 4, "B")])
        save(tmp_path / "truth.jsonl", header, [prefill(truth)])
        return RecordedRows(load(tmp_path / "run.jsonl"), talker)

    return make


def steps_of(rows: RecordedRows, tmp_path: Path) -> Any:
    names = ContentNames()
    return [(step, names.advance(step)) for step in load(tmp_path / "run.jsonl").steps()]


def test_the_recorded_rows_are_emitted_and_the_other_keys_name_their_owner(
    recording: Callable[..., Any], tmp_path: Path
) -> None:
    rows = recording()
    (step, names_T), _ = steps_of(rows, tmp_path)
    output = rows.forward(step, names_T)
    assert output.hidden_states.shape == (6, WIDTH)
    assert output.hidden_states.dtype is torch.float32
    assert output.hidden_states[1].tolist() == pytest.approx([value / 7 for value in range(8, 16)])
    assert [rows.classify("K", row)[1] for row in output.multimodal_outputs["K"]] == names_T.tolist()


def test_a_hit_is_due_the_rows_of_the_run_without_a_cache_within_rounding(
    recording: Callable[..., Any], tmp_path: Path
) -> None:
    rows = recording()
    _, (hit, names_T) = steps_of(rows, tmp_path)
    hidden = rows.forward(hit, names_T).hidden_states
    due = rows.due_rows(HIDDEN_STATES, names_T)
    rtol, atol = rows.tolerance(HIDDEN_STATES)
    assert not torch.equal(hidden, due)
    assert torch.allclose(hidden, due, rtol=rtol, atol=atol)
    assert rows.tolerance("K") is None


def test_a_recorded_row_is_known_by_the_row_of_the_truth_that_it_agrees_with(
    recording: Callable[..., Any], tmp_path: Path
) -> None:
    rows = recording()
    _, (hit, names_T) = steps_of(rows, tmp_path)
    hidden = rows.forward(hit, names_T).hidden_states
    assert [rows.classify(HIDDEN_STATES, row) for row in hidden] == [("row", name) for name in names_T.tolist()]
    assert rows.classify(HIDDEN_STATES, hidden[0] + 0.5) == ("other", None)


def test_runs_with_other_tokens_cannot_be_judged(recording: Callable[..., Any], tmp_path: Path) -> None:
    rows = recording(truth=(1, 2, 3, 9, 5, 6))
    (_, names_T), _ = steps_of(rows, tmp_path)
    with pytest.raises(CannotJudge, match=r"no row named 0x[0-9a-f]+: the two runs are not of the same requests"):
        rows.due_rows(HIDDEN_STATES, names_T)
    assert rows.due_rows(HIDDEN_STATES, names_T[:3]).shape == (3, WIDTH)


def test_tensors_of_another_trace_are_refused(recording: Callable[..., Any], tmp_path: Path) -> None:
    rows = recording(step_00001=torch.zeros(5, WIDTH))
    _, (hit, names_T) = steps_of(rows, tmp_path)
    with pytest.raises(CannotJudge) as refused:
        rows.forward(hit, names_T)
    assert str(refused.value) == (
        f"{tmp_path}/run.safetensors: 5 rows recorded for step 1, which has 2 tokens; the tensors are of another trace"
    )


def test_a_talker_without_hidden_states_has_no_use_for_recorded_ones(recording: Callable[..., Any]) -> None:
    talker = Talker(
        format="omnisim-talker/1", name="codes", hidden_size=8, requires_full_prefix_cached_hidden_states=False
    )
    with pytest.raises(CannotJudge, match="are hidden states, and talker 'codes' delivers none"):
        recording(talker=talker)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (Path.unlink, "no such file; the trace names it for its recorded rows"),
        (lambda path: path.write_bytes(b"no tensors"), "not a safetensors file"),
        (lambda path: save_file({"other": torch.zeros(1)}, path), "no tensor step_00000"),
    ],
    ids=["missing", "damaged", "without the step"],
)
def test_tensors_that_cannot_be_read_are_named(
    recording: Callable[..., Any], tmp_path: Path, damage: Callable[[Path], Any], what: str
) -> None:
    recording()
    damage(tmp_path / "run.safetensors")
    with pytest.raises(FileError, match=r"run\.safetensors: ") as refused:
        RecordedRows(load(tmp_path / "run.jsonl"), HIDDEN)
    assert what in str(refused.value)


def test_a_trace_without_recorded_rows_says_so(tmp_path: Path) -> None:
    header = Header(
        format="omnisim-trace/1", producer=Producer(name="test"), cache=Geometry(num_blocks=4, block_size=4)
    )
    save(tmp_path / "plain.jsonl", header, [prefill(PROMPT)])
    with pytest.raises(CannotJudge) as refused:
        RecordedRows(load(tmp_path / "plain.jsonl"), HIDDEN)
    assert str(refused.value) == f"{tmp_path}/plain.jsonl: the trace has no recorded rows; use --rows owner"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_tolerances_are_those_that_torch_documents(dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    with pytest.raises(AssertionError) as refused:
        torch.testing.assert_close(one, zero)
    assert f"(up to {rtol} allowed)" in str(refused.value)
    assert f"(up to {atol} allowed)" in str(refused.value)
