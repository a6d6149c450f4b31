"""Recorded hidden states are judged against the same requests run with prefix caching off, matched by content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
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
from omnisim.trace.schema import schemas

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


def test_of_two_rows_of_the_truth_that_agree_the_first_one_names(recording: Callable[..., Any], tmp_path: Path) -> None:
    recording()
    save_file({"step_00000": torch.ones(6, WIDTH)}, tmp_path / "truth.safetensors")
    rows = RecordedRows(load(tmp_path / "run.jsonl"), HIDDEN)
    (_, names_T), _ = steps_of(rows, tmp_path)
    row = torch.ones(WIDTH) * 1.000001
    assert rows.classify(HIDDEN_STATES, row) == ("row", int(names_T[0]))
    row[-1] = 2
    assert rows.classify(HIDDEN_STATES, row) == ("other", None)


def test_rows_are_due_in_the_order_asked_for_and_as_often(recording: Callable[..., Any], tmp_path: Path) -> None:
    rows = recording()
    (step, names_T), _ = steps_of(rows, tmp_path)
    hidden = rows.forward(step, names_T).hidden_states
    order = [5, 0, 0, 3]
    assert torch.equal(rows.due_rows(HIDDEN_STATES, names_T[order]), hidden[order])
    assert rows.due_rows(HIDDEN_STATES, np.empty(0, dtype=np.uint64)).shape == (0, WIDTH)


def test_requests_are_matched_by_their_tokens_whatever_they_are_called(
    recording: Callable[..., Any], tmp_path: Path
) -> None:
    rows = recording()
    _, (hit, names_T) = steps_of(rows, tmp_path)
    assert hit.req_ids == ("B",)  # the run without a cache has a request A only
    assert rows.due_rows(HIDDEN_STATES, names_T).shape == (2, WIDTH)


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


def refusal_of(tmp_path: Path) -> str:
    """What is said, in one line, when the rows of the recording are made."""
    with pytest.raises((FileError, CannotJudge)) as refused:
        RecordedRows(load(tmp_path / "run.jsonl"), HIDDEN)
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(f"{tmp_path}/", "")


def put(**tensors: Tensor) -> Callable[[Path], Any]:
    return lambda path: save_file(tensors, path)


HALF = torch.zeros(6, WIDTH // 2)

UNUSABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "no such file; the trace names it for its recorded rows"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it cannot be read ("),
    "damaged": (lambda path: path.write_bytes(b"no tensors"), "not a safetensors file"),
    "without a step": (put(other=torch.zeros(1)), "no tensor step_00000; the tensors are of another trace"),
    "1-D": (put(step_00000=torch.zeros(6)), "step_00000 has shape [6]; hidden states are [tokens, hidden_size]"),
    "3-D": (put(step_00000=torch.zeros(6, 2, 4)), "step_00000 has shape [6, 2, 4]; hidden states are"),
    "no width": (put(step_00000=torch.zeros(6, 0)), "step_00000 has shape [6, 0]; hidden states are"),
    "uint16": (put(step_00000=HALF.to(torch.uint16)), "no tolerance is stated for the dtype of step_00000, U16"),
    "int32": (put(step_00000=HALF.int()), "I32; it is one of F64, F32, BF16, F16"),
    "float8": (put(step_00000=HALF.to(torch.float8_e5m2)), "no tolerance is stated for the dtype of step_00000, F8_"),
    "two widths": (
        put(step_00000=torch.zeros(6, WIDTH), step_00001=HALF),
        "step_00000 is 8 wide, float32, and step_00001 4 wide, float32; all rows of a model are of one form",
    ),
}


@pytest.mark.parametrize("file", ["run", "truth"])
@pytest.mark.parametrize("case", UNUSABLE)
def test_tensors_that_cannot_be_used_are_found_when_the_rows_are_made(
    recording: Callable[..., Any], tmp_path: Path, case: str, file: str
) -> None:
    recording()
    damage, what = UNUSABLE[case]
    damage(tmp_path / f"{file}.safetensors")
    assert refusal_of(tmp_path).startswith(f"{file}.safetensors: ")
    assert what in refusal_of(tmp_path)


@pytest.mark.parametrize(
    ("truth", "form"),
    [(HALF, "4 wide, float32"), (torch.zeros(6, WIDTH).double(), "8 wide, float64")],
    ids=["narrower", "of another dtype"],
)
def test_two_runs_whose_rows_are_of_two_forms_are_no_matter_of_the_subject(
    recording: Callable[..., Any], tmp_path: Path, truth: Tensor, form: str
) -> None:
    recording()
    save_file({"step_00000": truth}, tmp_path / "truth.safetensors")
    assert refusal_of(tmp_path) == (
        f"run.safetensors has rows 8 wide, float32, and truth.safetensors {form}; record both runs with one model"
    )


@pytest.mark.parametrize("num_rows", [5, 7])
def test_a_truth_with_other_rows_than_its_steps_is_refused(
    recording: Callable[..., Any], tmp_path: Path, num_rows: int
) -> None:
    recording()
    save_file({"step_00000": torch.zeros(num_rows, WIDTH)}, tmp_path / "truth.safetensors")
    assert refusal_of(tmp_path) == (
        f"truth.safetensors: {num_rows} rows recorded for step 0, which has 6 tokens; the tensors are of another trace"
    )


def test_a_truth_that_holds_nan_is_refused(recording: Callable[..., Any], tmp_path: Path) -> None:
    recording()
    rows = torch.zeros(6, WIDTH)
    rows[3, 3] = torch.nan
    save_file({"step_00000": rows}, tmp_path / "truth.safetensors")
    assert refusal_of(tmp_path).startswith("truth.safetensors: step_00000 holds NaN, which equals nothing; ")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (Path.unlink, "truth.jsonl: there is no such file"),
        (lambda path: path.write_bytes(path.read_bytes() + b"{x"), "truth.jsonl:3: the line is cut, good up to step 0"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"[6]", b"[9]")), "truth.jsonl:2: step 0, request A"),
        (lambda path: path.write_bytes(path.read_bytes().splitlines()[0]), "truth.jsonl: it computes no row"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'"cache"', b'"content":"hashed","cache"', 1)),
            "truth.jsonl: its content is 'hashed', not 'tokens'",
        ),
    ],
    ids=["missing", "cut", "illegal", "empty", "redacted"],
)
def test_a_damaged_trace_of_the_truth_is_named_with_what_it_is_read_for(
    recording: Callable[..., Any], tmp_path: Path, damage: Callable[[Path], Any], what: str
) -> None:
    recording()
    damage(tmp_path / "truth.jsonl")
    told = refusal_of(tmp_path)
    assert told.startswith(what)
    assert told.endswith("; the recorded rows of run.jsonl are judged against it")


@pytest.mark.parametrize("field", ["tensors", "no_cache_trace", "no_cache_tensors"])
@pytest.mark.parametrize("name", ["sub/x", "../x", "/x", "a\\b", "", ".", "..", "a\0b"])
def test_a_name_that_is_no_plain_one_is_refused_when_the_trace_is_opened(
    recording: Callable[..., Any], tmp_path: Path, field: str, name: str
) -> None:
    recording()
    header, *steps = (tmp_path / "run.jsonl").read_text().splitlines()
    value = json.loads(header)
    value["recorded_rows"][field] = name
    (tmp_path / "run.jsonl").write_text("\n".join([json.dumps(value), *steps, ""]))
    with pytest.raises(FileError) as refused:
        load(tmp_path / "run.jsonl")
    assert str(refused.value) == (
        f"{tmp_path}/run.jsonl:1: recorded_rows: {field} {name!r} is no plain file name; the file lies beside the trace"
    )
    assert not jsonschema.Draft202012Validator(schemas()["trace-header.schema.json"]).is_valid(value)


def test_a_plain_name_may_have_dots(recording: Callable[..., Any], tmp_path: Path) -> None:
    recording()
    value = msgspec.to_builtins(load(tmp_path / "run.jsonl").header)
    value["recorded_rows"]["tensors"] = "..run 1.safetensors"
    jsonschema.Draft202012Validator(schemas()["trace-header.schema.json"]).validate(value)
    assert Recorded(**value["recorded_rows"]).tensors == "..run 1.safetensors"


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
