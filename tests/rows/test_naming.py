"""Equal prefixes have equal names and nothing else has; no name is 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisim.rows.naming import ContentNames, ProvenanceNames, mix, unmix
from omnisim.trace import Geometry, Header, NewRequest, Producer, Step, StepRecord
from omnisim.trace.expand import Expander
from omnisim.trace.story import story_trace

some_ids = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)


def told(*records: StepRecord) -> list[Step]:
    header = Header(
        format="omnisim-trace/1", producer=Producer(name="test"), cache=Geometry(num_blocks=64, block_size=4)
    )
    expander = Expander(header, "t.jsonl")
    return [expander.step(record, line) for line, record in enumerate(records, start=2)]


def prefill(*requests: NewRequest, finished: Sequence[str] = ()) -> StepRecord:
    """One step that computes the whole prompts."""
    return StepRecord(
        req_ids=tuple(new.req_id for new in requests),
        num_computed_tokens=(0,) * len(requests),
        num_scheduled_tokens=tuple(len(new.prompt_token_ids) for new in requests),
        block_ids={new.req_id: tuple(range(16 * at, 16 * at + 16)) for at, new in enumerate(requests)},
        scheduled_new_reqs=requests,
        finished_req_ids=tuple(finished),
    )


def new(ids: Iterable[int], req_id: str = "A", **options: object) -> NewRequest:
    return NewRequest(req_id=req_id, prompt_token_ids=tuple(ids), **options)  # type: ignore[arg-type]


def names_of(request: NewRequest) -> list[int]:
    (step,) = told(prefill(request))
    names: list[int] = ContentNames().advance(step).tolist()
    return names


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many names from the start on are equal; the rest must have nothing in common."""
    count = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    assert not set(one[count:]) & set(other[count:])
    return count


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_mixing_can_be_undone(words: list[int]) -> None:
    array = np.array(words, dtype=np.uint64)
    assert unmix(mix(array)).tolist() == words
    assert mix(unmix(array)).tolist() == words


@given(prefix=some_ids, one=some_ids, other=some_ids)
def test_names_are_equal_exactly_as_far_as_the_ids_are(prefix: list[int], one: list[int], other: list[int]) -> None:
    one, other = [*prefix, 1, *one], [*prefix, 2, *other]
    assert num_equal(names_of(new(one)), names_of(new(other, "B"))) == len(prefix)


@given(ids=some_ids)
def test_positions_of_one_request_have_different_names_and_none_is_0(ids: list[int]) -> None:
    names = names_of(new([*ids, *ids]))
    assert len(set(names)) == 2 * len(ids)
    assert 0 not in names


def test_a_request_of_one_token_over_and_over_has_a_name_a_position() -> None:
    assert len(set(names_of(new([7] * 32)))) == 32


@pytest.mark.parametrize("tagged_from", [0, 3, 5])
def test_a_content_tag_changes_the_names_from_its_position_on(tagged_from: int) -> None:
    plain, tagged = new(range(6)), new(range(6), content={tagged_from: "image-1"})
    assert num_equal(names_of(plain), names_of(tagged)) == tagged_from
    assert names_of(tagged) == names_of(new(range(6), "B", content={tagged_from: "image-1"}))
    assert num_equal(names_of(tagged), names_of(new(range(6), content={tagged_from: "image-2"}))) == tagged_from


def test_a_tag_of_a_position_that_is_generated_joins_when_it_is_known() -> None:
    tagged, plain = new([1, 2], content={3: "audio"}), new([1, 2])
    later = StepRecord(num_computed_tokens=(2,), num_scheduled_tokens=(3,), new_token_ids=((5, 6, 7),))
    names = [follow(prefill(request), later)[1][-1] for request in (tagged, plain)]
    assert num_equal(*names) == 1


def follow(*records: StepRecord) -> tuple[ContentNames, list[list[int]]]:
    names = ContentNames()
    return names, [names.advance(step).tolist() for step in told(*records)]


def test_generated_tokens_are_named_as_a_prompt_of_the_same_ids_is() -> None:
    decode = [
        StepRecord(num_computed_tokens=(4 + at,), num_scheduled_tokens=(1,), new_token_ids=((50 + at,),))
        for at in range(3)
    ]
    names, _ = follow(prefill(new([1, 2, 3, 4])), *decode)
    assert names.of("A").tolist() == names_of(new([1, 2, 3, 4, 50, 51, 52]))


def test_drafts_that_were_rejected_are_forgotten() -> None:
    names, (_, drafted, after) = follow(
        prefill(new([1, 2])),
        StepRecord(
            num_computed_tokens=(2,),
            num_scheduled_tokens=(4,),
            new_token_ids=((10, 11, 12, 13),),
            scheduled_spec_decode_tokens={"A": (11, 12, 13)},
        ),
        StepRecord(num_computed_tokens=(4,), num_scheduled_tokens=(2,), new_token_ids=((99, 13),)),
    )
    assert drafted == names_of(new([1, 2, 10, 11, 12, 13]))[2:]
    assert after == names_of(new([1, 2, 10, 11, 99, 13]))[4:]
    assert names.of("A").tolist() == names_of(new([1, 2, 10, 11, 99, 13]))


def test_rows_of_a_batch_come_in_its_order() -> None:
    _, (batch,) = follow(prefill(new([1, 2, 3], "A"), new([1, 9], "B")))
    assert batch == [*names_of(new([1, 2, 3])), *names_of(new([1, 9]))]


def test_a_request_that_is_over_is_forgotten_and_its_id_can_come_again() -> None:
    names, (_, again, _) = follow(
        prefill(new([1, 2, 3])), prefill(new([4, 5]), finished=["A"]), prefill(new([6], "B"), finished=["A"])
    )
    assert again == names_of(new([4, 5]))
    assert len(names.of("A")) == 0


def test_a_request_that_is_replaced_starts_again() -> None:
    names, steps = follow(prefill(new([1, 2, 3])), prefill(new([1, 2, 4, 5], replace=True)))
    assert num_equal(steps[0], steps[1]) == 2
    assert names.of("A").tolist() == names_of(new([1, 2, 4, 5]))


def test_a_hit_is_named_by_its_whole_prompt() -> None:
    hit = StepRecord(
        req_ids=("B",),
        num_computed_tokens=(4,),
        num_scheduled_tokens=(2,),
        block_ids={"B": (0, 9)},
        scheduled_new_reqs=(new([1, 2, 3, 4, 8, 9], "B"),),
    )
    names, (first, second) = follow(prefill(new([1, 2, 3, 4, 5])), hit)
    assert names.of("B").tolist() == [*first[:4], *second]


def test_names_handed_out_do_not_change_when_the_request_goes_on() -> None:
    steps = told(
        prefill(new([1, 2])), StepRecord(num_computed_tokens=(2,), num_scheduled_tokens=(1,), new_token_ids=((3,),))
    )
    names = ContentNames()
    names.advance(steps[0])
    before = names.of("A")
    kept = before.tolist()
    names.advance(steps[1])
    assert before.tolist() == kept


BIRTHS = "new A c=0 n=8 [1,2]\nnew B c=4 n=3 [1,3]; run A c=8 n=1 [1,2,4]\npreempt B; run A\nresume B c=4 n=3 [1,3]"


def test_each_computed_row_has_a_name_by_birth_of_its_own_and_the_same_in_every_replay() -> None:
    once, again = ProvenanceNames(), ProvenanceNames()
    names = [name for step in story_trace(BIRTHS).steps() for name in once.advance(step).tolist()]
    assert len(set(names)) == len(names) == 8 + 4 + 1 + 3
    assert 0 not in names
    assert names == [name for step in story_trace(BIRTHS).steps() for name in again.advance(step).tolist()]


def test_by_birth_a_request_has_0_where_others_computed_and_its_latest_name_where_it_did() -> None:
    names = ProvenanceNames()
    drawn = [names.advance(step).tolist() for step in story_trace(BIRTHS).steps()]
    assert names.of("B").tolist() == [0, 0, 0, 0, *drawn[3]]
    assert names.of("A").tolist()[:8] == drawn[0]


def test_by_birth_a_request_that_is_over_or_replaced_has_nothing() -> None:
    names = ProvenanceNames()
    for step in story_trace("new A c=0 n=8 [1,2]\nreplace A c=0 n=3 [3]\nfin A; new B c=0 n=1 [4]").steps():
        names.advance(step)
        assert len(names.of("A")) == {0: 8, 1: 3, 2: 0}[step.index]
