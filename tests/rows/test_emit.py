"""What a declared model emits, kind by kind, and what each request is due of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omnisim.errors import CannotJudge
from omnisim.rows.emit import HIDDEN_STATES, NOTHING, ModelOutput, OwnerRows
from omnisim.rows.naming import ContentNames, NameArray
from omnisim.talker import KeySpec, Talker
from omnisim.trace import Step
from omnisim.trace.story import story_trace

STORY = """
new A c=0 n=6 [1,2]; new B c=0 n=3 [3]; pad 12
run A c=6 n=1; run B c=3 n=4 [3,4]; pad 8       # A decodes, B is in the second chunk of its prompt
run A c=7 n=1; run B c=7 n=1; pad 2             # both decode
fin A; new A c=0 n=5 [5,6]; run B c=8 n=1 [3,4,7]
"""
STEPS = list(story_trace(STORY).steps())
PREFILL, MIXED, DECODE, REUSED = STEPS


def talker(hidden_size: int = 64, **keys: KeySpec | Any) -> Talker:
    options = {name: keys.pop(name) for name in Talker.__struct_fields__ if name in keys}
    return Talker(format="omnisim-talker/1", name="test", hidden_size=hidden_size, keys=keys, **options)


class Model:
    """An OwnerRows that is driven through the story."""

    def __init__(self, **keys: Any) -> None:
        self.rows = OwnerRows(talker(**keys))
        self._names = ContentNames()

    def step(self, step: Step) -> ModelOutput:
        self.names_T: NameArray = self._names.advance(step)
        return self.rows.forward(step, self.names_T)

    def until(self, last: Step) -> ModelOutput:
        """The output of the story's step ``last``."""
        return next(output for step, output in ((s, self.step(s)) for s in STEPS) if step is last)

    def value(self, key: str, last: Step) -> Any:
        payload = self.until(last).multimodal_outputs
        assert payload is not None
        return payload[key]

    def names(self, key: str, rows: Tensor) -> list[int | None]:
        return [self.rows.classify(key, row)[1] for row in rows]


def num_padding(model: Model, key: str, rows: Tensor) -> int:
    return sum(model.rows.classify(key, row)[0] == "padding" for row in rows)


# rows


def test_hidden_states_name_the_tokens_of_the_step_and_are_padded() -> None:
    model = Model()
    hidden = model.until(PREFILL).hidden_states
    assert hidden.shape == (12, 64)
    assert hidden.dtype is torch.bfloat16
    assert model.names(HIDDEN_STATES, hidden[:9]) == model.names_T.tolist()
    assert num_padding(model, HIDDEN_STATES, hidden) == 3


def test_hidden_states_that_are_not_padded_have_a_row_a_token() -> None:
    assert Model(hidden_padded=False).until(PREFILL).hidden_states.shape == (9, 64)


@pytest.mark.parametrize(("padded", "num_rows"), [(False, 9), (True, 12)])
def test_a_row_key_is_padded_if_it_says_so(padded: bool, num_rows: int) -> None:
    model = Model(K=KeySpec(kind="row", shape=(4, 2), dtype="int64", padded=padded))
    rows = model.value("K", PREFILL)
    assert rows.shape == (num_rows, 4, 2)
    assert model.names("K", rows[:9]) == model.names_T.tolist()
    assert num_padding(model, "K", rows) == num_rows - 9


def test_of_rows_that_are_filled_last_the_others_are_zeros_and_are_due_as_zeros() -> None:
    model = Model(K=KeySpec(kind="row", shape=(4, 2), dtype="int64", filled="last"))
    rows, lasts = model.value("K", PREFILL), PREFILL.lasts_T
    assert np.flatnonzero(lasts).tolist() == [stop - 1 for stop in PREFILL.query_start_loc[1:]]
    assert rows.ne(0).all(dim=(1, 2)).tolist() == lasts.tolist()
    assert [model.rows.classify("K", row) for row in rows[: PREFILL.query_start_loc[1] - 1]] == (
        [("row", None)] * (PREFILL.query_start_loc[1] - 1)
    )
    assert torch.equal(model.rows.due_rows("K", model.rows.named("K", model.names_T.copy(), lasts)), rows)
    assert torch.equal(model.rows.pristine("K", PREFILL, model.names_T.copy()), rows)
    assert model.rows.named(HIDDEN_STATES, model.names_T, lasts) is model.names_T


def test_two_keys_of_one_form_have_different_rows() -> None:
    spec = KeySpec(kind="row", shape=(16,), dtype="int64")
    payload = Model(K=spec, L=spec).until(PREFILL).multimodal_outputs
    assert payload is not None
    assert not (payload["K"] == payload["L"]).all(dim=1).any()


def test_a_row_without_a_shape_is_a_value_a_token_cut_per_request_and_not_cached() -> None:
    model = Model(flags=KeySpec(kind="row", dtype="int8"))
    flags = model.value("flags", MIXED)
    assert flags.shape == (5,)
    assert list(model.rows.row_keys) == [HIDDEN_STATES]
    assert torch.equal(model.rows.value_for("flags", MIXED, 0), flags[:1])
    assert torch.equal(model.rows.value_for("flags", MIXED, 1), flags[1:])


def test_keys_that_reach_no_consumer_are_not_row_keys() -> None:
    spec = KeySpec(kind="row", shape=(16,), dtype="int64")
    assert list(Model(K=spec, requires_full_prefix_cached_hidden_states=False).rows.row_keys) == ["K"]
    assert list(Model(K=spec).rows.row_keys) == [HIDDEN_STATES, "K"]


def test_due_rows_are_the_rows_that_were_emitted_for_these_names() -> None:
    model = Model(K=KeySpec(kind="row", shape=(16,), dtype="int64"))
    rows = model.value("K", MIXED)
    assert torch.equal(model.rows.due_rows("K", model.names_T[[3, 0]]), rows[[3, 0]])
    assert torch.equal(model.rows.pristine("K", MIXED, model.names_T), rows)


# live buffers


def test_the_next_forward_overwrites_every_row_of_the_one_before() -> None:
    model = Model(K=KeySpec(kind="row", shape=(16,), dtype="int64", padded=True))
    output = model.until(PREFILL)
    assert output.multimodal_outputs is not None
    before = [output.hidden_states.clone(), output.multimodal_outputs["K"].clone()]
    model.step(MIXED)
    after = [output.hidden_states, output.multimodal_outputs["K"]]
    for kept, now in zip(before, after, strict=True):
        assert not (kept[:9] == now[:9]).all(dim=1).any()


def test_a_larger_forward_overwrites_a_smaller_one_too() -> None:
    small, large = story_trace("new A c=0 n=2 [1]\nnew B c=0 n=40 [2,3,4,5,6,7,8,9,10,11]").steps()
    model = Model()
    hidden = model.step(small).hidden_states
    kept = hidden.clone()
    model.step(large)
    assert not (kept == hidden).all(dim=1).any()


def test_values_are_overwritten_too_wherever_they_lie() -> None:
    model = Model(
        a=KeySpec(kind="request", shape=(2,), dtype="int64"),
        b=KeySpec(kind="list", shape=(2,), dtype="int64"),
        c=KeySpec(kind="nested", fields={"d": KeySpec(kind="shared", dtype="int64")}),
    )
    payload = model.until(PREFILL).multimodal_outputs
    assert payload is not None
    model.rows.clobber()
    for value in (payload["a"], *payload["b"], payload["c"]["d"]):
        assert set(value.flatten().tolist()) == {-7}


def test_what_is_due_does_not_lie_in_a_live_buffer() -> None:
    model = Model(K=KeySpec(kind="row", shape=(16,), dtype="int64"), v=KeySpec(kind="row", dtype="int32"))
    model.until(PREFILL)
    due = [model.rows.due_rows("K", model.names_T), model.rows.value_for("v", PREFILL, 0)]
    kept = [value.clone() for value in due]
    model.rows.clobber()
    assert all(torch.equal(one, other) for one, other in zip(due, kept, strict=True))


# other kinds


def test_a_decode_row_belongs_to_each_request_that_decodes() -> None:
    spec = KeySpec(kind="decode-row", shape=(8,), dtype="int64")
    mixed, decode = Model(frame=spec), Model(frame=spec)
    frames = mixed.value("frame", MIXED)
    assert mixed.names("frame", frames) == [int(mixed.names_T[0])]
    assert torch.equal(mixed.rows.value_for("frame", MIXED, 0), frames)
    assert mixed.rows.value_for("frame", MIXED, 1) is NOTHING
    assert decode.names("frame", decode.value("frame", DECODE)) == decode.names_T.tolist()


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16", "int64"])
def test_nobody_who_decodes_is_no_decode_rows(dtype: Any) -> None:
    assert Model(frame=KeySpec(kind="decode-row", shape=(8,), dtype=dtype)).value("frame", PREFILL).shape == (0, 8)


@pytest.mark.parametrize("kind", ["request", "list"])
def test_a_value_a_request_is_its_own_and_stays_over_its_life(kind: Any) -> None:
    spec = KeySpec(kind=kind, shape=(3,), dtype="float32")
    steps = [(Model(v=spec), step) for step in (PREFILL, MIXED, DECODE)]
    values = [torch.stack([v.reshape(3) for v in model.value("v", step)]) for model, step in steps]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0][0], values[0][1])
    model, _ = steps[0]
    due = [model.rows.value_for("v", PREFILL, row) for row in (0, 1)]
    assert torch.equal(torch.cat([value.reshape(1, 3) for value in due]), values[0])
    assert due[0].shape == ((1, 3) if kind == "request" else (3,))


def test_a_request_that_reuses_an_id_has_a_value_of_its_own() -> None:
    spec = KeySpec(kind="request", shape=(3,), dtype="float32")
    first, second = Model(v=spec).value("v", PREFILL), Model(v=spec).value("v", REUSED)
    assert REUSED.req_ids == PREFILL.req_ids
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_a_shared_value_is_one_for_all_and_a_list_of_one_holds_it() -> None:
    model = Model(sr=KeySpec(kind="shared", dtype="int32"), bos=KeySpec(kind="list-of-one", shape=(1, 4)))
    payload = model.until(DECODE).multimodal_outputs
    assert payload is not None
    assert payload["sr"].shape == ()
    assert [tuple(value.shape) for value in payload["bos"]] == [(1, 4)]
    for row in (0, 1):
        assert torch.equal(model.rows.value_for("sr", DECODE, row), payload["sr"])
        assert torch.equal(model.rows.value_for("bos", DECODE, row), payload["bos"][0])


def test_an_opaque_value_is_handed_on() -> None:
    model = Model(mode=KeySpec(kind="opaque", value="text"))
    assert model.value("mode", DECODE) == model.rows.value_for("mode", DECODE, 1) == "text"


def test_a_nested_value_is_due_leaf_by_leaf_and_leaves_out_what_a_request_does_not_have() -> None:
    model = Model(
        meta=KeySpec(
            kind="nested",
            fields={
                "speaker": KeySpec(kind="request", shape=(2,)),
                "frame": KeySpec(kind="decode-row", shape=(4,), dtype="int64"),
                "inner": KeySpec(kind="nested", fields={"sr": KeySpec(kind="shared", dtype="int32")}),
            },
        )
    )
    meta = model.value("meta", MIXED)
    first, second = model.rows.value_for("meta", MIXED, 0), model.rows.value_for("meta", MIXED, 1)
    assert meta.keys() == first.keys() == {"speaker", "frame", "inner"}
    assert second.keys() == {"speaker", "inner"}
    assert torch.equal(first["frame"], meta["frame"])
    assert torch.equal(second["speaker"], meta["speaker"][1:])
    assert torch.equal(second["inner"]["sr"], meta["inner"]["sr"])


def test_fields_of_one_form_have_different_values() -> None:
    spec = KeySpec(kind="request", shape=(4,), dtype="int64")
    meta = Model(meta=KeySpec(kind="nested", fields={"a": spec, "b": spec})).value("meta", PREFILL)
    assert not torch.equal(meta["a"], meta["b"])


def test_a_dotted_name_is_emitted_as_it_is() -> None:
    payload = Model(**{"codes.audio": KeySpec(kind="row", shape=(16,), dtype="int64")}).until(PREFILL)
    assert payload.multimodal_outputs is not None
    assert payload.multimodal_outputs.keys() == {"codes.audio"}


# when


@pytest.mark.parametrize(
    ("phases", "emitted"),
    [
        (("prefill", "decode"), [True, True, True]),
        (("prefill",), [True, True, False]),
        (("decode",), [False, True, True]),
    ],
)
@pytest.mark.parametrize("kind", ["row", "nested"])
def test_a_key_is_emitted_where_some_request_is_in_one_of_its_phases(kind: Any, phases: Any, emitted: Any) -> None:
    value = KeySpec(kind="shared", dtype="int32")
    spec = {
        "row": KeySpec(kind="row", shape=(16,), dtype="int64", phases=phases),
        "nested": KeySpec(kind="nested", fields={"v": value}, phases=phases),
    }[kind]
    model = Model(K=spec)
    for step, wanted in zip(STEPS, emitted, strict=False):
        payload = model.step(step).multimodal_outputs
        assert (payload is not None) == wanted == ("K" in model.rows.emitted_keys(step))


def test_a_key_that_the_step_calls_absent_is_not_emitted() -> None:
    (step,) = story_trace("new A c=0 n=2 [1]; no K").steps()
    spec = KeySpec(kind="row", shape=(16,), dtype="int64")
    model = Model(K=spec, L=spec)
    assert list(model.rows.emitted_keys(step)) == [HIDDEN_STATES, "L"]
    payload = model.step(step).multimodal_outputs
    assert payload is not None
    assert payload.keys() == {"L"}


@pytest.mark.parametrize(("when_empty", "payload"), [("none", None), ("empty", {})])
def test_a_step_without_keys_has_the_payload_that_the_talker_says(when_empty: Any, payload: Any) -> None:
    assert Model(when_empty=when_empty).until(PREFILL).multimodal_outputs == payload


@pytest.mark.parametrize(
    "spec",
    [KeySpec(kind="row", shape=(4,), phases=("decode",)), KeySpec(kind="decode-row", shape=(4,))],
    ids=["phases", "decode-row"],
)
def test_a_trace_that_does_not_say_where_prompts_end_cannot_be_judged_by_phase(spec: KeySpec) -> None:
    step = _without_prompts(PREFILL)
    with pytest.raises(CannotJudge) as refused:
        OwnerRows(talker(K=spec)).forward(step, np.arange(1, 10, dtype=np.uint64))
    assert str(refused.value) == (
        "talker 'test' emits by phase, and the trace does not say where the prompt of 'B' ends; "
        "give num_prompt_tokens in scheduled_new_reqs, or use a talker whose keys are emitted in all phases"
    )


def _without_prompts(step: Step) -> Step:
    return replace(step, num_prompt_tokens=(6, -1))


def test_a_talker_without_phases_does_not_ask_where_prompts_end() -> None:
    model = Model(K=KeySpec(kind="row", shape=(16,), dtype="int64"))
    assert model.step(_without_prompts(PREFILL)).multimodal_outputs is not None


def test_a_key_too_narrow_to_name_its_owner_is_reported_with_its_bits() -> None:
    model = Model(
        narrow=KeySpec(kind="row", shape=(3,), dtype="uint8"),
        wide=KeySpec(kind="row", shape=(1,), dtype="int64"),
        not_cached=KeySpec(kind="row", dtype="int8"),
    )
    assert model.rows.narrow_keys() == {"narrow": 12}


def test_the_size_of_a_row_is_that_of_its_elements() -> None:
    model = Model(K=KeySpec(kind="row", shape=(4, 3), dtype="float8_e4m3fn"))
    assert model.rows.row_nbytes("K") == 12
    assert model.rows.row_nbytes(HIDDEN_STATES) == 128


# models that do not keep to their declaration


def test_a_key_is_emitted_and_due_as_its_change_says_from_that_step_on() -> None:
    wider, listed = KeySpec(kind="row", shape=(5,), dtype="float32"), KeySpec(kind="list", shape=(3,), dtype="int64")
    model = Model(K=KeySpec(kind="row", shape=(16,), dtype="int64"), changes={1: {"K": wider}, 2: {"K": listed}})
    assert model.step(PREFILL).multimodal_outputs["K"].shape == (9, 16)  # type: ignore[index]
    for step, is_rows in ((MIXED, True), (DECODE, False)):
        assert "K" in model.rows.emitted_keys(step)
        payload = model.step(step).multimodal_outputs
        assert payload is not None
        assert ("K" in model.rows.row_keys) is is_rows
        if is_rows:
            assert payload["K"].dtype is torch.float32
            assert torch.equal(payload["K"], model.rows.due_rows("K", model.names_T))
        else:
            assert torch.equal(payload["K"][1], model.rows.value_for("K", step, 1))


def test_hidden_states_may_be_wider_than_declared() -> None:
    model = Model(hidden_size=2, changes={0: {HIDDEN_STATES: KeySpec(kind="row", shape=(5,), dtype="float32")}})
    model.rows.emitted_keys(PREFILL)
    assert model.step(PREFILL).hidden_states.shape == (9, 5)


def test_a_short_list_has_entries_for_the_first_requests_only() -> None:
    model = Model(v=KeySpec(kind="list", shape=(3,), entries=1))
    (value,) = model.value("v", PREFILL)
    assert torch.equal(value, model.rows.value_for("v", PREFILL, 0))
    assert model.rows.value_for("v", PREFILL, 1) is NOTHING
