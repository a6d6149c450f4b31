"""A story says in a line what a trace says in ten; token ids are made up so that a hit means what its author means."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisim.errors import FileError, IllegalSchedule
from omnisim.trace import StepRecord, load
from omnisim.trace.story import parse_story, story_trace


def prompts(story: str) -> dict[str, tuple[int, ...]]:
    """The prompt of each request, by id; a request that comes twice has its last."""
    return {new.req_id: new.prompt_token_ids for record in parse_story(story) for new in record.scheduled_new_reqs}


def test_a_step_ends_with_its_line_or_with_a_slash() -> None:
    lines = "new A c=0 n=8 [1,2]\n\n  run A c=8 n=1 [1,2,3] # decode\n# nothing\nfin A"
    assert parse_story(lines) == parse_story("`new A c=0 n=8 [1, 2]` / run A [1,2,3] / fin A")
    assert len(parse_story(lines)) == 3


def test_events_of_a_step_are_told_in_vllms_words() -> None:
    story = (
        "new A c=0 n=8 [1,2]; new C c=0 n=1 [5] / preempt C; fin A; new B c=4 n=2 [1,4]; pad 8; no K L / resume C [6]"
    )
    first, second, third = parse_story(story)
    assert first.req_ids == ("A", "C")
    assert first.block_ids == {"A": (1, 2), "C": (5,)}
    assert (second.preempted_req_ids, second.finished_req_ids) == (("C",), ("A",))
    assert (second.num_tokens_padded, second.absent_keys) == (8, ("K", "L"))
    assert third.resumed_req_ids == ("C",)
    assert third.block_ids == {"C": (6,)}


def test_only_changed_rows_are_written() -> None:
    _, same, longer, other = parse_story(
        "new A n=4 [1] / run A c=4 n=1 [1,2] / run A c=5 n=4 [1,2,3] / run A c=9 [1,4,3]"
    )
    assert same.new_block_ids == {"A": (2,)}
    assert longer.new_block_ids == {"A": (3,)}
    assert (other.block_ids, other.new_block_ids) == ({"A": (1, 4, 3)}, {})


def test_a_hit_has_the_ids_of_whoever_wrote_its_slots() -> None:
    told = prompts("new A c=0 n=8 [1,2] / new B c=7 n=2 [1,2,3]")
    assert told["B"][:7] == told["A"][:7]
    assert not set(told["B"][7:]) & set(told["A"])


@pytest.mark.parametrize(
    "step", ["new A c=0 n=8 [1,2]; new B c=4 n=3 [1,3]", "new B c=4 n=3 [1,3]; new A c=0 n=8 [1,2]"]
)
def test_a_hit_in_the_same_step_has_the_ids_of_that_step(step: str) -> None:
    told = prompts(f"new Z c=0 n=4 [1] / fin Z; {step}")
    assert told["B"][:4] == told["A"][:4] != told["Z"]


def test_a_slot_nobody_wrote_has_ids_of_its_own() -> None:
    told = prompts("new A c=0 n=4 [1] / new B c=4 n=1 [5,3]")
    assert not set(told["A"]) & set(told["B"])
    assert len(set(told["B"])) == 5


def test_a_hit_on_sampled_tokens_has_their_ids() -> None:
    story = "new A c=0 n=3 [1] / run A / run A [1,2] / fin A; new B c=4 n=1 [1,3]"
    sampled = [record.new_token_ids[0] for record in parse_story(story)[1:3]]
    assert prompts(story)["B"][:4] == (*prompts(story)["A"], *sampled[0])


def test_a_resumed_request_keeps_its_ids() -> None:
    story = "new A c=0 n=8 [1,2] / run A [1,2,3] / new B c=0 n=4 [1] / resume A c=4 n=6 [1,9,10]"
    *_, resumed = parse_story(story)
    assert len(resumed.new_token_ids[0]) == 1
    assert list(story_trace(story).steps())


def test_chunks_belong_to_the_prompt_and_decodes_do_not() -> None:
    assert len(prompts("new B c=4 n=2 [1,3] / run B c=6 n=2 / run B [1,3,4] / run B c=9 n=3")["B"]) == 8
    assert len(prompts("new B c=0 n=4 p=6 [1] / run B [1,3]")["B"]) == 6
    assert len(prompts("new B c=0 n=4 [1] / run B n=3 drafts=2 [1,3]")["B"]) == 4


def test_drafts_are_the_last_tokens() -> None:
    *_, record = parse_story("new A c=0 n=8 [1,2] / run A c=8 n=4 drafts=3 [1,2,3]")
    (told,) = record.new_token_ids
    assert record.scheduled_spec_decode_tokens == {"A": told[1:]}


def test_content_has_a_tag_from_a_position_on() -> None:
    story = "new A content=x n=4 [1]; new B content=y@2 n=4 [2]; new C gen=1 n=1 [3]; new D gen=0 n=1 [4]"
    (record,) = parse_story(story)
    assert [new.content for new in record.scheduled_new_reqs] == [{0: "x"}, {2: "y"}, {0: "gen-1"}, {}]


def test_a_replacement_is_new_while_the_old_one_lives() -> None:
    story = "new A gen=0 c=0 n=8 [1,2] / replace A gen=1 c=0 n=8 [3,4]; new B c=8 n=1 [1,2,5]"
    old, new = parse_story(story)
    assert new.scheduled_new_reqs[0].replace
    assert new.scheduled_new_reqs[1].prompt_token_ids[:8] == old.scheduled_new_reqs[0].prompt_token_ids
    assert len(list(story_trace(story).steps())) == 2


def test_slots_are_kept_as_told() -> None:
    (record,) = parse_story("new A c=0 n=4 [1]; slots [4,5,6,-1]")
    assert record.slot_mapping == ((4, 3), -1)
    (step,) = story_trace("new A c=0 n=4 [1]; slots [4,5,6,-1]").steps()
    assert step.slot_mapping.tolist() == [4, 5, 6, -1]
    with pytest.raises(IllegalSchedule, match="story:1: step 0, request A: slot_mapping has 8 for position 0"):
        list(story_trace("new A c=0 n=1 [1]; slots [8]").steps())


def test_what_the_runner_does_is_told_by_the_step() -> None:
    story = "new A c=0 n=8 [1,2]; clobber; late 2; fail write / run A c=8 n=4 drafts=3 host=12 [1,2,3]"
    told, quiet = parse_story(story)
    assert (told.clobber, told.read_delay, told.fail_write) == (True, 2, True)
    assert (quiet.clobber, quiet.read_delay, quiet.fail_write) == (False, 0, False)
    assert (told.host_num_computed_tokens, quiet.host_num_computed_tokens) == ({}, {"A": 12})
    told_step, quiet_step = story_trace(story).steps()
    assert (told_step.clobber, told_step.read_delay, told_step.fail_write) == (True, 2, True)
    assert quiet_step.host_num_computed_tokens == {"A": 12}


@pytest.mark.parametrize(
    "event", ["new A c=0 n=4 [1] host=3", "resume A c=0 n=4 [1] host=3", "replace A c=0 n=4 [1] host=3"]
)
def test_the_host_may_claim_a_count_of_whoever_is_scheduled(event: str) -> None:
    (record,) = parse_story(event)
    assert record.host_num_computed_tokens == {"A": 3}


def test_the_blocks_of_a_trace_are_those_of_its_story() -> None:
    assert story_trace("new A n=1 [6]").header.cache.num_blocks == 7
    assert story_trace("new A n=1 [7]", block_size=8, kernel_block_size=4).header.cache.num_blocks == 4
    assert story_trace("new A n=1 [1]", num_blocks=99, block_size=16).header.cache.num_blocks == 99


def test_a_story_in_a_file_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "format: omnisim-trace/1\nproducer: {name: test}\ncache: {num_blocks: 8, block_size: 2}\n"
        "story: |\n  new A c=0 n=4 [1,2]\n  fin A; new B c=2 n=2 [1,3]\n"
    )
    records = list(load(path).records())
    assert records == parse_story("new A c=0 n=4 [1,2] / fin A; new B c=2 n=2 [1,3]", block_size=2)
    assert isinstance(records[0], StepRecord)


NOT_UNDERSTOOD = {
    "walk A": "story:1: 'walk' is nothing that happens; "
    "it is one of new, run, resume, replace, fin, preempt, pad, slots, no, clobber, late, fail",
    "new A n=4": "story:1: new A has no blocks; write new A c=0 n=8 [1,2]",
    "run A\n\nresume A c=0": "story:3: resume A has no blocks; write resume A c=0 n=8 [1,2]",
    "new": "story:1: new names no request; write new A c=0 n=8 [1,2]",
    "run c=4": "story:1: run names no request; write run A c=0 n=8 [1,2]",
    "run A x=4": "story:1: 'x=4' is no option; there are c= n= p= drafts= host= gen= content=",
    "run A 4": "story:1: '4' is no option; there are c= n= p= drafts= host= gen= content=",
    "run A n=0": "story:1: '0' in n=0 is no whole number from 1 on; write digits",
    "run A c=-1": "story:1: '-1' in c=-1 is no whole number from 0 on; write digits",
    "run A n=99999999999": "story:1: '99999999999' in n=99999999999 is no whole number from 1 on; write digits",
    "run A / run A [1,x]": "story:1: 'x' in a block is no whole number from 0 on; write digits",
    "pad x": "story:1: 'x' in pad is no whole number from 0 on; write digits",
    "late x": "story:1: 'x' in late is no whole number from 1 on; write digits",
    "late 0": "story:1: '0' in late is no whole number from 1 on; write digits",
    "clobber A": "story:1: 'clobber A' is nothing that happens; write clobber",
    "fail": "story:1: 'fail' is nothing that happens; write fail write",
    "fail read": "story:1: 'fail read' is nothing that happens; write fail write",
    "run A host=-1": "story:1: '-1' in host=-1 is no whole number from 0 on; write digits",
    "slots [1,-2]": "story:1: '-2' in slots is no whole number from -1 on; write digits",
}


@pytest.mark.parametrize("story", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_refused_with_its_line(story: str) -> None:
    with pytest.raises(FileError) as error:
        parse_story(story)
    assert str(error.value) == NOT_UNDERSTOOD[story]


def test_a_block_past_the_last_is_refused() -> None:
    with pytest.raises(FileError) as error:
        parse_story("new A n=1 [4]", num_blocks=4)
    assert str(error.value) == "story: block 4 is not one of 4; raise num_blocks"
