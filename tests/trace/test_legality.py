"""What cannot have happened is refused, in one line that says where, what and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from omnisim.errors import IllegalSchedule
from omnisim.trace import Geometry, Header, NewRequest, Producer, Step, StepRecord
from omnisim.trace import expand as expand_module
from omnisim.trace.expand import Expander
from omnisim.trace.story import story_trace

NEW_A = {
    "req_ids": ("A",),
    "num_computed_tokens": (0,),
    "num_scheduled_tokens": (8,),
    "block_ids": {"A": (1, 2)},
    "scheduled_new_reqs": (NewRequest(req_id="A", prompt_token_ids=tuple(range(8))),),
}
RUN_A = {
    "num_computed_tokens": (8,),
    "num_scheduled_tokens": (1,),
    "new_block_ids": {"A": (3,)},
    "new_token_ids": ((50,),),
}


def expand(*records: dict[str, Any], content: Any = "tokens", **geometry: int) -> list[Step]:
    cache = Geometry(**{"num_blocks": 10, "block_size": 4, **geometry})
    header = Header(format="omnisim-trace/1", producer=Producer(name="test"), cache=cache, content=content)
    expander = Expander(header, "t.jsonl")
    return [expander.step(StepRecord(**record), line) for line, record in enumerate(records, start=2)]


REFUSED: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
    "lists of different length": (
        [NEW_A | {"num_computed_tokens": (0, 4)}],
        "t.jsonl:2: step 0, num_computed_tokens has 2 entries for 1 requests; "
        "one entry a request, in the order of req_ids",
    ),
    "token ids of more requests than there are": (
        [NEW_A, RUN_A | {"new_token_ids": ((50,), (51,))}],
        "t.jsonl:3: step 1, new_token_ids has 2 entries for 1 requests; one entry a request, in the order of req_ids",
    ),
    "a request twice in a batch": (
        [NEW_A | {"req_ids": ("A", "A"), "num_computed_tokens": (0, 0), "num_scheduled_tokens": (8, 8)}],
        "t.jsonl:2: step 0, request A: it is twice in req_ids; name it once",
    ),
    "a request that was never new": (
        [NEW_A | {"scheduled_new_reqs": ()}],
        "t.jsonl:2: step 0, request A: it is scheduled and was never new, or has finished; "
        "enter it in scheduled_new_reqs",
    ),
    "a first step without a batch": (
        [{"num_computed_tokens": (), "num_scheduled_tokens": ()}],
        "t.jsonl:2: the first step has no req_ids; only a later step may leave them out",
    ),
    "new while it is alive": (
        [NEW_A, NEW_A],
        "t.jsonl:3: step 1, request A: it is new while it is still alive; finish it first, or say replace: true",
    ),
    "a replacement of nobody": (
        [NEW_A | {"scheduled_new_reqs": (NewRequest(req_id="A", replace=True),)}],
        "t.jsonl:2: step 0, request A: it replaces a request that is not alive; leave replace out",
    ),
    "new and not scheduled": (
        [NEW_A, RUN_A | {"scheduled_new_reqs": (NewRequest(req_id="B"),)}],
        "t.jsonl:3: step 1, request B: it is in scheduled_new_reqs and not in req_ids; it enters when it is scheduled",
    ),
    "new and resumed": (
        [NEW_A, RUN_A | {"scheduled_new_reqs": (NewRequest(req_id="A", replace=True),), "resumed_req_ids": ("A",)}],
        "t.jsonl:3: step 1, request A: it is twice in scheduled_new_reqs and resumed_req_ids; name it once",
    ),
    "preempted and unknown": (
        [NEW_A | {"preempted_req_ids": ("B",)}],
        "t.jsonl:2: step 0, request B: it is in preempted_req_ids and was never new, or has finished; "
        "enter it in scheduled_new_reqs",
    ),
    "resumed and unknown": (
        [NEW_A | {"resumed_req_ids": ("B",)}],
        "t.jsonl:2: step 0, request B: it is in resumed_req_ids and was never new, or has finished; "
        "enter it in scheduled_new_reqs",
    ),
    "resumed and not scheduled": (
        [
            NEW_A,
            RUN_A | {"req_ids": (), "num_computed_tokens": (), "num_scheduled_tokens": (), "resumed_req_ids": ("A",)},
        ],
        "t.jsonl:3: step 1, request A: it is in resumed_req_ids and not in req_ids; it enters when it is scheduled",
    ),
    "a batch with a finished request": (
        [NEW_A, RUN_A | {"finished_req_ids": ("A",)}],
        "t.jsonl:3: step 1, request A: it is scheduled in the step that says it finished; take it out of req_ids",
    ),
    "a preempted request that runs on": (
        [NEW_A, RUN_A | {"preempted_req_ids": ("A",)}],
        "t.jsonl:3: step 1, request A: it was preempted and is scheduled; add it to resumed_req_ids",
    ),
    "a resumed request on its old blocks": (
        [NEW_A, RUN_A | {"resumed_req_ids": ("A",), "new_block_ids": {}}],
        "t.jsonl:3: step 1, request A: it is resumed without blocks; give its whole new row in block_ids",
    ),
    "computed tokens that do not go on": (
        [NEW_A, RUN_A | {"num_computed_tokens": (7,)}],
        "t.jsonl:3: step 1, request A: num_computed_tokens is 7 where 8 were computed; "
        "only a new or resumed request may start elsewhere",
    ),
    "a count on the host of nobody who is there": (
        [NEW_A, RUN_A | {"host_num_computed_tokens": {"A": 9, "B": 4}}],
        "t.jsonl:3: step 1, request B: it is in host_num_computed_tokens and not in req_ids; "
        "the batch has counts of scheduled requests only",
    ),
    "more drafts rejected than there were": (
        [
            NEW_A,
            RUN_A
            | {
                "num_scheduled_tokens": (4,),
                "new_token_ids": ((50, 51, 52, 53),),
                "scheduled_spec_decode_tokens": {"A": (51, 52, 53)},
            },
            RUN_A | {"num_computed_tokens": (8,), "new_block_ids": {}},
        ],
        "t.jsonl:4: step 2, request A: num_computed_tokens is 8 where 9 to 12 were computed; "
        "only a new or resumed request may start elsewhere",
    ),
    "a span past its blocks": (
        [NEW_A, RUN_A | {"new_block_ids": {}}],
        "t.jsonl:3: step 1, request A: positions 8 to 8 reach past the 8 that its 2 blocks cover; "
        "list every block that it holds",
    ),
    "a chunk past its blocks": (
        [NEW_A | {"num_scheduled_tokens": (9,)}],
        "t.jsonl:2: step 0, request A: positions 0 to 8 reach past the 8 that its 2 blocks cover; "
        "list every block that it holds",
    ),
    "a block that does not exist": (
        [NEW_A | {"block_ids": {"A": (1, 10)}}],
        "t.jsonl:2: step 0, request A: block 10 is not one of 10; see cache.num_blocks",
    ),
    "blocks of a request that is not scheduled": (
        [NEW_A | {"new_block_ids": {"B": (3,)}}],
        "t.jsonl:2: step 0, request B: it is in new_block_ids and not in req_ids; rows change where they are scheduled",
    ),
    "blocks replaced and appended to": (
        [NEW_A | {"new_block_ids": {"A": (3,)}}],
        "t.jsonl:2: step 0, request A: it is in block_ids and in new_block_ids; replace its row or append to it",
    ),
    "a query_start_loc that is wrong": (
        [NEW_A | {"query_start_loc": (0, 7)}],
        "t.jsonl:2: step 0, query_start_loc[1] is 7 where num_scheduled_tokens add up to 8; "
        "leave it out and it is derived",
    ),
    "a query_start_loc that is short": (
        [NEW_A | {"query_start_loc": (0,)}],
        "t.jsonl:2: step 0, query_start_loc has 1 entries for 1 requests; "
        "one more than requests; leave it out and it is derived",
    ),
    "a slot_mapping that lags": (
        [NEW_A | {"slot_mapping": ((4, 6), 11, 12)}],
        "t.jsonl:2: step 0, request A: slot_mapping has 11 for position 6 where its blocks give 10; "
        "one of the two was recorded in another step",
    ),
    "a slot_mapping that is short": (
        [NEW_A | {"slot_mapping": ((4, 7),), "num_tokens_padded": 16}],
        "t.jsonl:2: step 0, slot_mapping has 7 slots where 8 or, padded, 16 are due; leave it out and it is derived",
    ),
    "a slot_mapping of absurd length": (
        [NEW_A | {"slot_mapping": ((4, 2**62),)}],
        f"t.jsonl:2: step 0, slot_mapping has {2**62} slots where 8 are due; leave it out and it is derived",
    ),
    "a run of no slots": (
        [NEW_A | {"slot_mapping": ((4, 8), (3, 0))}],
        "t.jsonl:2: step 0, slot_mapping has a run [3, 0]; "
        "a run is [first slot, number of slots], the number at least 1",
    ),
    "padding that is a slot": (
        [NEW_A | {"slot_mapping": ((4, 9), (-1, 7)), "num_tokens_padded": 16}],
        "t.jsonl:2: step 0, slot_mapping has a slot (run from 4) behind the 8 scheduled tokens; padding is -1 there",
    ),
    "two requests on one slot": (
        [
            NEW_A
            | {
                "req_ids": ("A", "B"),
                "num_computed_tokens": (0, 4),
                "num_scheduled_tokens": (8, 1),
                "block_ids": {"A": (1, 2), "B": (1, 2)},
                "scheduled_new_reqs": (
                    *NEW_A["scheduled_new_reqs"],
                    NewRequest(req_id="B", prompt_token_ids=(0, 1, 2, 3, 9)),
                ),
            }
        ],
        "t.jsonl:2: step 0, requests A and B both write slot 8; their blocks to write must differ",
    ),
    "less with padding than without": (
        [NEW_A | {"num_tokens_padded": 7}],
        "t.jsonl:2: step 0, num_tokens_padded is 7 where 8 tokens are scheduled; padding only adds",
    ),
    "more tokens than any step has": (
        [NEW_A | {"num_scheduled_tokens": (2**31 - 1,)}],
        "t.jsonl:2: step 0, 2147483647 tokens are scheduled, more than 4194304; no engine does that in one step",
    ),
    "steps that go back": (
        [NEW_A | {"step": 5}, RUN_A | {"step": 5}],
        "t.jsonl:3: step 5, followed by step 5; steps are written in order, each once",
    ),
    "a token id that is not known": (
        [NEW_A, RUN_A | {"new_token_ids": ()}],
        "t.jsonl:3: step 1, request A: position 8 is scheduled and its token id is not known; "
        "give it in new_token_ids, or state content: none",
    ),
    "a token id that is told again": (
        [NEW_A | {"new_token_ids": ((7,),)}],
        "t.jsonl:2: step 0, request A: 1 new_token_ids are given and 0 scheduled positions are untold; "
        "an id that the prompt or an earlier step told is not told again",
    ),
    "a hit on a prefix nobody told": (
        [
            NEW_A
            | {
                "scheduled_new_reqs": (NewRequest(req_id="A"),),
                "num_computed_tokens": (4,),
                "num_scheduled_tokens": (1,),
                "new_token_ids": ((1, 2, 3, 4, 5),),
            }
        ],
        "t.jsonl:2: step 0, request A: it starts at 4 and 0 of its token ids are known; "
        "give them in prompt_token_ids, or state content: none",
    ),
    "a prompt of another length": (
        [NEW_A | {"scheduled_new_reqs": (NewRequest(req_id="A", prompt_token_ids=(1, 2), num_prompt_tokens=3),)}],
        "t.jsonl:2: step 0, request A: num_prompt_tokens is 3 and 2 prompt_token_ids are given; make them agree",
    ),
    "drafts that are not the last tokens": (
        [
            NEW_A,
            RUN_A
            | {
                "num_scheduled_tokens": (2,),
                "new_token_ids": ((50, 51),),
                "scheduled_spec_decode_tokens": {"A": (52,)},
            },
        ],
        "t.jsonl:3: step 1, request A: new_token_ids ends in [51] and its drafts are [52]; "
        "the drafts are the last scheduled tokens",
    ),
    "nothing but drafts": (
        [NEW_A, RUN_A | {"scheduled_spec_decode_tokens": {"A": (50,)}}],
        "t.jsonl:3: step 1, request A: 1 drafts in 1 scheduled tokens; at least one scheduled token is no draft",
    ),
    "drafts of nobody": (
        [NEW_A, RUN_A | {"scheduled_spec_decode_tokens": {"B": (50,)}}],
        "t.jsonl:3: step 1, request B: it is in scheduled_spec_decode_tokens and not in req_ids; "
        "only a scheduled request has drafts",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_have_happened_is_refused(kind: str) -> None:
    records, message = REFUSED[kind]
    with pytest.raises(IllegalSchedule) as refusal:
        expand(*records)
    assert str(refusal.value) == message
    assert "\n" not in message


AT_LEVEL_NONE: dict[str, tuple[Sequence[dict[str, Any]], str]] = {
    "a prompt": (
        [NEW_A],
        "t.jsonl:2: step 0, request A: it has 8 prompt_token_ids at content level none; give num_prompt_tokens only",
    ),
    "sampled ids": (
        [NEW_A | {"scheduled_new_reqs": (NewRequest(req_id="A"),)}, RUN_A],
        "t.jsonl:3: step 1, new_token_ids has ids at content level none; "
        "leave them out, or state another content level",
    ),
    "drafted ids": (
        [
            NEW_A | {"scheduled_new_reqs": (NewRequest(req_id="A"),)},
            RUN_A | {"new_token_ids": (), "num_scheduled_tokens": (2,), "scheduled_spec_decode_tokens": {"A": (5,)}},
        ],
        "t.jsonl:3: step 1, request A: scheduled_spec_decode_tokens has ids at content level none; "
        "write 0 for each draft",
    ),
}


@pytest.mark.parametrize("kind", AT_LEVEL_NONE)
def test_token_ids_are_refused_where_none_are_promised(kind: str) -> None:
    records, message = AT_LEVEL_NONE[kind]
    with pytest.raises(IllegalSchedule) as refusal:
        expand(*records, content="none")
    assert str(refusal.value) == message


def test_a_kernel_block_must_divide_the_block() -> None:
    with pytest.raises(IllegalSchedule) as refusal:
        expand(NEW_A, kernel_block_size=3)
    assert str(refusal.value) == (
        "t.jsonl:1: kernel_block_size 3 does not divide block_size 4; a block is split into whole kernel blocks"
    )


def test_the_full_attention_group_is_one_of_the_groups() -> None:
    expand(NEW_A, num_kv_cache_groups=2, full_attention_group=1)
    with pytest.raises(IllegalSchedule) as refusal:
        expand(NEW_A, num_kv_cache_groups=2, full_attention_group=2)
    assert str(refusal.value) == (
        "t.jsonl:1: full_attention_group 2 is not one of 2 num_kv_cache_groups; groups are counted from 0"
    )


def test_block_ids_count_kernel_blocks_where_they_differ() -> None:
    (step,) = expand(NEW_A | {"block_ids": {"A": (3, 2, 9, 6)}}, num_blocks=5, kernel_block_size=2)
    assert step.slot_mapping.tolist() == [6, 7, 4, 5, 18, 19, 12, 13]
    with pytest.raises(IllegalSchedule, match="block 10 is not one of 10"):
        expand(NEW_A | {"block_ids": {"A": (3, 2, 10, 6)}}, num_blocks=5, kernel_block_size=2)


def test_what_is_left_out_is_derived() -> None:
    first, second = expand(NEW_A, RUN_A)
    assert (first.index, second.index) == (0, 1)
    assert second.req_ids == ("A",)
    assert second.query_start_loc == (0, 1)
    assert second.slot_mapping.tolist() == [12]
    assert second.num_tokens_padded == 1
    assert second.num_prompt_tokens == (8,)
    assert second.block_table == ((1, 2, 3),)
    assert first.new_token_ids == ((),)


def test_a_row_that_did_not_change_is_the_same_tuple() -> None:
    steps = list(story_trace("new A c=0 n=5 [1,2] / run A; new B c=0 n=4 [3] / run A; run B [3,4] / run A").steps())
    rows = [step.block_table[0] for step in steps]
    assert all(row is rows[0] for row in rows)
    assert steps[2].block_table[1] == (3, 4)


def test_a_prompt_of_unknown_length_is_minus_one() -> None:
    (step,) = expand(NEW_A | {"scheduled_new_reqs": (NewRequest(req_id="A"),)}, content="none")
    assert step.num_prompt_tokens == (-1,)


@pytest.mark.parametrize("slots", [((4, 8),), ((4, 8), (-1, 8)), tuple(range(4, 12)), (*range(4, 12), -1, -1, (-1, 6))])
def test_a_recorded_slot_mapping_may_be_padded(slots: Any) -> None:
    (step,) = expand(NEW_A | {"slot_mapping": slots, "num_tokens_padded": 16})
    assert step.slot_mapping.tolist() == list(range(4, 12))


def test_a_token_that_is_not_stored_has_a_pad_slot() -> None:
    (step,) = expand(NEW_A | {"slot_mapping": ((4, 6), -1, -1)})
    assert step.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9, -1, -1]


def test_a_request_may_finish_that_never_ran() -> None:
    (step,) = expand(NEW_A | {"finished_req_ids": ("waited",)})
    assert step.finished_req_ids == ("waited",)


@pytest.mark.parametrize(
    "story",
    [
        "new A c=0 n=8 [1,2] / fin A; new A c=0 n=4 [3]",
        "new A c=0 n=8 [1,2] / replace A c=4 n=4 [1,3]",
        "new A c=0 n=8 [1,2] / new B c=0 n=1 [3] / run A [1,2,4]",
        "new A c=0 n=8 [1,2] / preempt A / resume A c=0 n=8 [4,5]",
        "new A c=0 n=8 [1,2]; new B c=0 n=1 [3] / preempt A; preempt B; resume A c=0 n=8 [4,5]; resume B c=0 n=1 [6]",
        "new A c=0 n=8 [1,2] / fin A",
        "new A c=8 n=1 [0,2,3]",
    ],
)
def test_what_schedulers_do_is_legal(story: str) -> None:
    assert list(story_trace(story).steps())


def test_rejected_drafts_are_told_again_with_other_ids() -> None:
    story = "new A c=0 n=8 [1,2] / run A n=4 drafts=3 [1,2,3] / run A c=10 n=2 drafts=1 / run A c=12 n=1 [1,2,3,4]"
    steps = list(story_trace(story).steps())
    assert [step.num_computed_tokens for step in steps] == [(0,), (8,), (10,), (12,)]
    assert [len(step.new_token_ids[0]) for step in steps] == [0, 4, 2, 1]


def test_drafts_of_a_preempted_request_are_forgotten() -> None:
    story = "new A c=0 n=8 [1,2] / run A n=4 drafts=3 [1,2,3] / preempt A / resume A c=0 n=10 [4,5,6]"
    *_, last = story_trace(story).steps()
    assert len(last.new_token_ids[0]) == 1


def test_a_resumed_request_has_only_its_new_blocks() -> None:
    resumed = {
        "num_computed_tokens": (0,),
        "num_scheduled_tokens": (8,),
        "new_block_ids": {"A": (4, 5)},
        "resumed_req_ids": ("A",),
    }
    _, step = expand(NEW_A, resumed)
    assert step.block_table == ((4, 5),)


def test_only_living_requests_are_remembered() -> None:
    expander = Expander(story_trace("new A n=1 [1]").header, "t")
    for index in range(100):
        records = story_trace(f"fin R{index - 1}; new R{index} c=0 n=1 [1]", num_blocks=2).records()
        expander.step(next(records), index)
    assert len(expander._requests) == 1


def test_runs_of_slots_are_written_short_and_read_back() -> None:
    slots = [4, 5, 9, 12, 13, 14, -1, -1, -1, 0, 1, 2, -1]
    runs = expand_module.slot_runs(slots)
    assert runs == (4, 5, 9, (12, 3), (-1, 3), (0, 3), -1)
    assert expand_module.expand_runs(runs, len(slots)) == slots
