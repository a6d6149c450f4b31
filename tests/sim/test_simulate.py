"""What is asked of the engine is what happens: each setting, each event, each way to come and to leave."""

from __future__ import annotations

from typing import Any

import pytest

from omnisim.coverage import cover
from omnisim.errors import CannotJudge, FileError, SetupError
from omnisim.sim.engine import load_vllm
from omnisim.sim.run import Simulation, plan_of, prepare
from omnisim.talkers import talker_names
from omnisim.trace.model import Step
from omnisim.verify import Options, verify

from .simulated import Simulated, scenario, simulated

pytestmark = pytest.mark.usefixtures("vllm")

ENGINE = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def group(**fields: Any) -> dict[str, Any]:
    return {"name": "g", "prompt": [{"tokens": 8}], "output_tokens": 3, **fields}


def run(*traffic: dict[str, Any], events: list[dict[str, Any]] | None = None, **engine: Any) -> Simulated:
    return simulated(list(traffic), engine=ENGINE | engine, events=events or [])


def steps(made: Simulated) -> list[Step]:
    return list(made.trace.steps())


def when(made: Simulated, req_id: str) -> list[int]:
    """Indices of the steps that a request is in."""
    return [step.index for step in steps(made) if req_id in step.req_ids]


def test_a_prompt_is_computed_and_then_a_token_a_step() -> None:
    made = steps(run(group()))
    assert [step.num_scheduled_tokens for step in made] == [(8,), (1,), (1,)]
    assert [step.num_computed_tokens for step in made] == [(0,), (8,), (9,)]
    assert made[0].block_table == ((1, 2),)
    assert made[0].slot_mapping.tolist() == list(range(4, 12))


def test_long_prompts_are_computed_in_chunks_of_the_budget() -> None:
    made = steps(run(group(prompt=[{"tokens": 40}])))
    assert [step.num_scheduled_tokens for step in made] == [(16,), (16,), (8,), (1,), (1,)]


def test_the_threshold_of_long_prompts_leaves_room_for_others() -> None:
    made = steps(run(group(prompt=[{"tokens": 40}]), group(name="h"), long_prefill_token_threshold=6))
    assert made[0].num_scheduled_tokens == (6, 6)


def test_without_chunked_prefill_a_prompt_waits_until_it_fits() -> None:
    made = steps(run(group(count=2, prompt=[{"tokens": 12}]), enable_chunked_prefill=False, max_model_len=16))
    assert [step.num_scheduled_tokens for step in made[:2]] == [(12,), (1, 12)]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    made = steps(run(group(count=9), max_num_seqs=2))
    assert max(len(step.req_ids) for step in made) == 2


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_prefixes_are_hit_whatever_the_hash(algorithm: str) -> None:
    made = run(group(count=2, prompt=[{"share": "s", "tokens": 8}]), prefix_caching_hash_algo=algorithm)
    assert made.outcome.hit_tokens == 4


def test_nothing_is_hit_without_prefix_caching() -> None:
    made = run(group(count=4, prompt=[{"share": "s", "tokens": 8}]), enable_prefix_caching=False)
    assert (made.outcome.requests_hit, made.stats.hits) == (0, 0)


def test_equal_images_are_hit_and_others_are_not() -> None:
    picture = group(count=4, arrivals={"every": 3}, prompt=[{"image": "i", "tokens": 8, "branches": 2}, {"tokens": 1}])
    made = run(picture)
    hits = [step.num_computed_tokens[0] for step in steps(made) if step.scheduled_new_reqs]
    assert hits == [0, 0, 8, 8]


@pytest.mark.parametrize("kind", ["adapters", "salts"])
def test_what_is_not_in_the_tokens_keeps_requests_apart(kind: str) -> None:
    told = group(count=4, arrivals={"every": 3}, prompt=[{"share": "s", "tokens": 9}], **{kind: ["x", "y"]})
    made = run(told)
    assert [step.num_computed_tokens[0] for step in steps(made) if step.scheduled_new_reqs] == [0, 0, 8, 8]
    tags = [new.content[0] for step in steps(made) for new in step.scheduled_new_reqs]
    assert tags == [f"{kind[:-1]}:{name}" for name in ("x", "y", "x", "y")]


def test_a_small_pool_preempts_and_resumes() -> None:
    made = run(group(count=3, prompt=[{"tokens": 8}], output_tokens=20), num_blocks=13)
    assert made.stats.preemptions == made.outcome.preemptions > 0
    assert verify(made.trace, Options()).outcome == "agreement"


def test_a_watermark_keeps_blocks_free_for_those_that_run() -> None:
    crowd = group(count=8, arrivals={"every": 2}, output_tokens=30)
    loose, held = (run(crowd, num_blocks=16, watermark=watermark) for watermark in (0.0, 0.3))
    assert held.outcome.preemptions < loose.outcome.preemptions
    assert held.outcome.largest_batch < loose.outcome.largest_batch


def test_the_more_urgent_goes_first() -> None:
    crowd = [group(count=3, priority=[5]), group(name="urgent", priority=[0])]
    for policy, first in (("fcfs", "g-0"), ("priority", "urgent-0")):
        assert steps(run(*crowd, policy=policy, max_num_seqs=1))[0].req_ids == (first,)


def test_urgent_requests_push_out_those_that_run() -> None:
    patient = group(count=3, priority=[5], output_tokens=24)
    urgent = group(name="urgent", arrivals={"at": 5}, priority=[0], output_tokens=24)
    made = run(patient, urgent, policy="priority", num_blocks=16)
    preempted = {req_id for step in steps(made) for req_id in step.preempted_req_ids}
    assert preempted
    assert "urgent-0" not in preempted


def test_a_backend_that_wants_decodes_first_gets_them_first() -> None:
    def prefills(step: Step) -> list[bool]:
        return [done < prompt for done, prompt in zip(step.num_computed_tokens, step.num_prompt_tokens, strict=True)]

    crowd = group(count=12, arrivals={"every": 1}, prompt=[{"tokens": {"choice": [2, 9, 30]}}])
    assert all(prefills(step) == sorted(prefills(step)) for step in steps(run(crowd, reorder_batch_threshold=1)))
    assert not all(prefills(step) == sorted(prefills(step)) for step in steps(run(crowd)))


def test_steps_are_padded_to_the_next_size_and_no_further_than_the_largest() -> None:
    made = run(group(prompt=[{"tokens": 21}]), max_num_batched_tokens=32, cudagraph_capture_sizes=(1, 4, 16))
    assert [(step.num_tokens, step.num_tokens_padded) for step in steps(made)] == [(21, 21), (1, 1), (1, 1)]
    made = run(group(prompt=[{"tokens": 9}]), cudagraph_capture_sizes=[2, 12])
    assert [(step.num_tokens, step.num_tokens_padded) for step in steps(made)] == [(9, 12), (1, 2), (1, 2)]
    assert made.records[0].slot_mapping in (((4, 9), (-1, 3)), None)


# How requests come and leave


def test_nothing_is_executed_while_nobody_asks() -> None:
    made = run(group(), group(name="late", arrivals={"at": 1000}))
    assert (when(made, "g-0"), when(made, "late-0")) == ([0, 1, 2], [3, 4, 5])


def test_arrivals_by_step_count_the_executed_ones() -> None:
    made = run(group(output_tokens=9), group(name="h", count=2, arrivals={"at": 2, "every": 3}))
    assert (when(made, "h-0")[0], when(made, "h-1")[0]) == (2, 5)


def test_with_a_step_time_requests_come_after_seconds() -> None:
    crowd = [group(output_tokens=9), group(name="h", arrivals={"at": 0.025})]
    made = simulated(crowd, engine=ENGINE, step_time={"base": 8, "token": 1, "request": 0})
    assert when(made, "h-0")[0] == 2, "steps of 8 + 8 and of 8 + 1 ms end at 25 ms"
    made = simulated(crowd, engine=ENGINE, step_time={"base": 30, "token": 0, "request": 0})
    assert when(made, "h-0")[0] == 1


def test_the_next_turn_comes_when_the_turn_before_it_has_ended() -> None:
    made = run(group(turns=3, turn_tokens=4, think=2), group(name="other", output_tokens=30))
    first, second, third = (when(made, f"g-0.{turn}") for turn in range(3))
    assert (second[0] - first[-1], third[0] - second[-1]) == (3, 3)
    assert made.outcome.requests_hit == 2


def test_a_client_that_leaves_in_a_prefill() -> None:
    made = run(group(prompt=[{"tokens": 40}], abort={"after_computed_tokens": 20}), group(name="h", output_tokens=9))
    assert when(made, "g-0") == [0, 1]
    assert made.stats.aborts == 1
    assert "g-0" in steps(made)[2].finished_req_ids


def test_a_client_that_leaves_in_a_decode_has_had_so_many_tokens() -> None:
    made = run(group(output_tokens=9, abort={"after_output_tokens": 4}))
    assert len(when(made, "g-0")) == 4


def test_the_same_request_again_at_once_under_the_same_id() -> None:
    made = run(group(output_tokens=9, abort={"after_output_tokens": 4, "resubmit": True}))
    again = steps(made)[4]
    assert again.finished_req_ids == ("g-0",)
    assert [new.req_id for new in again.scheduled_new_reqs] == ["g-0"]
    assert again.num_computed_tokens == (4,), "it hits what it left behind, but for the last block of its prompt"
    assert len(when(made, "g-0")) == 4 + 9
    assert verify(made.trace, Options()).outcome == "agreement"


def test_an_event_aborts_or_sends_again() -> None:
    crowd = group(count=2, output_tokens=9)
    made = run(crowd, events=[{"at": 3, "abort": ["g-0"]}, {"at": 5, "resubmit": ["g-0", "g-1"]}])
    assert when(made, "g-0")[:3] == [0, 1, 2]
    assert [step.index for step in steps(made) for new in step.scheduled_new_reqs if new.req_id == "g-0"] == [0, 5]
    assert [step.index for step in steps(made) for new in step.scheduled_new_reqs if new.req_id == "g-1"] == [0, 5]
    assert made.stats.aborts == 2


TWICE = {
    "one event names it twice": [{"at": 3, "resubmit": ["g-0", "g-0"]}],
    "two events of one time": [{"at": 3, "resubmit": ["g-0"]}, {"at": 3, "resubmit": ["g-0"]}],
    "two events one step apart": [{"at": 3, "resubmit": ["g-0"]}, {"at": 4, "resubmit": ["g-0"]}],
    "events that stand in another order": [{"at": 5, "resubmit": ["g-0"]}, {"at": 3, "resubmit": ["g-0"]}],
}


@pytest.mark.parametrize("events", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("patience", [None, 2, 4])
def test_of_one_id_one_request_lives_at_a_time(
    events: list[dict[str, Any]], async_scheduling: bool, patience: int | None
) -> None:
    abort = {"after_output_tokens": patience, "resubmit": True} if patience else None
    crowd = [group(output_tokens=9, abort=abort), group(name="other", output_tokens=30)]
    made = run(*crowd, events=events, async_scheduling=async_scheduling)
    assert made.outcome.requests >= 3
    assert verify(made.trace, Options()).outcome == "agreement"


def test_a_client_that_leaves_before_its_request_came_again_leaves_for_good() -> None:
    events = [{"at": 3, "resubmit": ["g-0"]}, {"at": 3.5, "abort": ["g-0"]}]
    crowd = [group(output_tokens=9), group(name="other", output_tokens=30)]
    for async_scheduling in (False, True):
        made = run(*crowd, events=events, async_scheduling=async_scheduling)
        assert max(when(made, "g-0")) == (2 if async_scheduling else 3)


def test_what_an_event_names_and_is_not_there_is_counted() -> None:
    early = run(group(arrivals={"at": 5}), events=[{"at": 2, "abort": ["g-0"]}, {"at": 3, "resubmit": ["g-0"]}])
    assert (early.stats.missed_events, early.stats.aborts, early.outcome.requests) == (2, 0, 1)
    late = run(group(), group(name="h", output_tokens=9), events=[{"at": 6, "abort": ["g-0"]}])
    assert late.stats.missed_events == 1
    again = run(group(), group(name="h", output_tokens=9), events=[{"at": 6, "resubmit": ["g-0"]}])
    assert (again.stats.missed_events, again.outcome.requests) == (0, 3)


def test_who_gets_all_he_asked_for_sends_nothing_again() -> None:
    made = run(group(count=4, output_tokens=5, abort={"after_output_tokens": 50, "resubmit": True}))
    assert (made.outcome.requests, made.stats.aborts) == (4, 0)


def test_the_next_turn_waits_for_the_last_life_of_the_turn_before_it() -> None:
    made = run(group(turns=2, output_tokens=9), events=[{"at": 3, "resubmit": ["g-0.0"]}])
    assert when(made, "g-0.0") == list(range(12))
    assert when(made, "g-0.1")[0] == 12


def test_a_client_counts_what_it_was_sent_whatever_the_engine_is_ahead() -> None:
    for async_scheduling, num_steps in ((False, 4), (True, 5)):
        crowd = group(output_tokens=9, abort={"after_output_tokens": 4})
        assert len(when(run(crowd, async_scheduling=async_scheduling), "g-0")) == num_steps


def test_nothing_is_kept_of_requests_that_left_before_they_ran() -> None:
    made = scenario(
        [group(output_tokens=4), group(name="h", count=50, arrivals={"at": 1}, abort={"after_computed_tokens": 0})],
        engine=ENGINE | {"max_num_seqs": 1},
    )
    simulation = prepare(made.engine, plan_of(made, 0), "test", told="")
    told = {req_id for record in simulation.records() for req_id in record.finished_req_ids}
    assert simulation.engine.stats.aborts == 50
    assert len(told) == 50
    assert simulation.recorder.num_waiting == 0


def test_a_reset_while_nothing_runs_forgets_every_prefix() -> None:
    crowd = group(count=2, arrivals={"times": [0, 20]}, prompt=[{"share": "s", "tokens": 8}])
    assert run(crowd).outcome.hit_tokens == 4
    assert run(crowd, events=[{"at": 20, "reset_prefix_cache": True}]).outcome.hit_tokens == 0


def test_vllm_refuses_a_reset_while_requests_hold_blocks_unless_they_are_reset_too() -> None:
    crowd = [group(output_tokens=9), group(name="h", arrivals={"at": 5})]
    made = run(*crowd, events=[{"at": 2, "reset_prefix_cache": True}])
    assert (made.stats.preemptions, made.stats.refused_resets) == (0, 1)
    made = run(*crowd, events=[{"at": 2, "reset_prefix_cache": True, "reset_running_requests": True}])
    assert (made.stats.preemptions, made.stats.refused_resets) == (1, 0)
    at_once = steps(made)[2]
    assert at_once.preempted_req_ids == at_once.resumed_req_ids == ("g-0",)
    assert at_once.num_computed_tokens[0] == 0
    assert verify(made.trace, Options()).outcome == "agreement"


def test_a_request_that_is_preempted_and_leaves_before_the_next_step_is_told_to_have_left() -> None:
    crowd = [group(output_tokens=9), group(name="h", output_tokens=9)]
    reset = {"at": 2, "reset_prefix_cache": True, "reset_running_requests": True}
    made = run(*crowd, events=[reset, {"at": 2, "abort": ["g-0"]}])
    told = steps(made)[2]
    assert (told.preempted_req_ids, told.finished_req_ids) == (("h-0",), ("g-0",))


def test_of_equal_priority_the_first_to_come_goes_first_whatever_it_is_called() -> None:
    crowd = [group(name=name, priority=[1]) for name in ("z", "m", "a")]
    made = run(*crowd, policy="priority", max_num_seqs=1)
    assert [new.req_id for step in steps(made) for new in step.scheduled_new_reqs] == ["z-0", "m-0", "a-0"]


def test_preemptions_of_a_request_that_came_again_are_counted() -> None:
    reset = {"at": 5, "reset_prefix_cache": True, "reset_running_requests": True}
    made = run(group(output_tokens=12), events=[{"at": 2, "resubmit": ["g-0"]}, reset])
    assert made.stats.preemptions == made.outcome.preemptions == 1


# Asynchronous scheduling


def test_a_request_that_stops_is_one_step_further_under_asynchronous_scheduling() -> None:
    for stops, steps_async in ((False, 3), (True, 4)):
        crowd = group(stops=stops)
        assert len(when(run(crowd), "g-0")) == 3
        assert len(when(run(crowd, async_scheduling=True), "g-0")) == steps_async


def test_an_id_comes_again_when_the_step_that_had_it_is_over() -> None:
    """Else what the old request samples would be taken for the new one's."""
    crowd = [
        group(output_tokens=9, abort={"after_output_tokens": 4, "resubmit": True}),
        group(name="h", output_tokens=30),
    ]
    for async_scheduling in (False, True):
        made = run(*crowd, async_scheduling=async_scheduling)
        assert made.outcome.requests == 3
        assert cover(made.trace).times("id-reused-at-once") == (not async_scheduling)
        assert verify(made.trace, Options()).outcome == "agreement"


# Speculative decoding


def test_drafts_are_scheduled_behind_a_token_and_those_that_are_right_are_kept() -> None:
    told = group(output_tokens=9)
    right = steps(run(told, num_speculative_tokens=3, acceptance_rate=1.0))
    assert [step.num_scheduled_tokens for step in right] == [(8,), (4,), (4,)]
    assert [step.num_computed_tokens for step in right] == [(0,), (8,), (12,)]
    wrong = steps(run(told, num_speculative_tokens=3, acceptance_rate=0.0))
    assert [step.num_computed_tokens[0] for step in wrong] == [0, *range(8, 16)]
    assert all(len(step.scheduled_spec_decode_tokens["g-0"]) == 3 for step in wrong[1:-3])


def test_right_drafts_are_the_answer_and_wrong_ones_are_not() -> None:
    plain = [ids for step in steps(run(group(output_tokens=9)))[1:] for ids in step.new_token_ids[0]]
    for rate in (0.0, 0.5, 1.0):
        computed: dict[int, int] = {}
        for step in steps(run(group(output_tokens=9), num_speculative_tokens=2, acceptance_rate=rate)):
            end = step.num_computed_tokens[0] + step.num_scheduled_tokens[0]
            computed |= dict(enumerate(step.new_token_ids[0], start=end - len(step.new_token_ids[0])))
        assert [computed[position] for position in range(8, 16)] == plain


@pytest.mark.parametrize("talker", talker_names())
def test_rejected_drafts_under_pressure_agree_under_every_talker(talker: str) -> None:
    crowd = group(count=6, prompt=[{"share": "s", "tokens": 9}, {"tokens": 4}], arrivals={"every": 2})
    made = run(crowd | {"output_tokens": 25}, num_blocks=24, num_speculative_tokens=3, acceptance_rate=0.5)
    assert made.outcome.preemptions > 0
    assert cover(made.trace).times("drafts-rejected") > 10
    result = verify(made.trace, Options(talker=talker))
    assert result.outcome == "agreement", result


# What can never run


@pytest.mark.parametrize(
    ("traffic", "engine", "complaint"),
    [
        (
            group(prompt=[{"tokens": 300}]),
            {},
            "request g-0 needs 76 blocks of 4, and of num_blocks 64 it can have 63 (one is the null block); raise "
            "engine.num_blocks to 77, or make it shorter",
        ),
        (
            group(),
            {"long_prefill_token_threshold": 12},
            "long_prefill_token_threshold 12 is more than max_model_len 11, and limits nothing; leave it out, or "
            "lower it",
        ),
        (
            group(),
            {"max_model_len": 2**24, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**16},
            "a batch of 65,536 requests of up to 16,777,216 tokens is too large; lower engine.max_num_seqs or "
            "max_model_len: vLLM keeps 5 bytes for each token",
        ),
        (
            group(prompt=[{"tokens": 30}]),
            {"max_model_len": 32},
            "request g-0 comes to 33 tokens, more than max_model_len 32; raise engine.max_model_len, or leave it out",
        ),
        (
            group(prompt=[{"tokens": 30}]),
            {"enable_chunked_prefill": False},
            "without chunked prefill max_num_batched_tokens 16 must be max_model_len 33; raise "
            "engine.max_num_batched_tokens, or enable_chunked_prefill",
        ),
        (
            group(),
            {"max_num_seqs": 32},
            "max_num_batched_tokens 16 is less than max_num_seqs 32; vLLM wants a token for each; lower "
            "engine.max_num_seqs",
        ),
        (group(prompt=[{"tokens": 0}]), {}, "request g-0 has an empty prompt; give it a token"),
    ],
)
def test_what_can_never_run_is_found_before_anything_runs(
    traffic: dict[str, Any], engine: dict[str, Any], complaint: str
) -> None:
    made = scenario([traffic], engine=ENGINE | engine)
    with pytest.raises(FileError) as found:
        prepare(made.engine, plan_of(made, 0), "mine.yaml", told="")
    assert str(found.value) == f"mine.yaml: {complaint}"


def test_a_scenario_without_traffic_and_events_about_nobody_are_refused() -> None:
    empty, unknown = scenario([], engine=ENGINE), scenario([group()], engine=ENGINE, events=[{"at": 1, "abort": ["x"]}])
    with pytest.raises(FileError, match="no request comes of it"):
        prepare(empty.engine, plan_of(empty, 0), "mine.yaml", told="")
    with pytest.raises(FileError, match=r"an event names the request 'x', and there is none; did you mean 'g-0'\?"):
        prepare(unknown.engine, plan_of(unknown, 0), "mine.yaml", told="")


def test_a_request_that_needs_every_block_there_is_runs_also_under_a_watermark() -> None:
    """vLLM holds blocks back for those that run, and there are none; the last token that is sampled needs no room."""
    made = run(group(prompt=[{"tokens": 10}]), num_blocks=4, watermark=0.5)
    assert [step.num_scheduled_tokens for step in steps(made)] == [(10,), (1,), (1,)]


def test_what_vllm_itself_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnisim.sim.run.check", lambda *_: None)
    made = scenario([group()], engine=ENGINE | {"max_num_seqs": 32})
    with pytest.raises(FileError, match=r"^mine\.yaml: vLLM refuses this engine \(.*max_num_seqs.*\); change"):
        prepare(made.engine, plan_of(made, 0), "mine.yaml", told="")


def test_memory_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't allocate memory:\n you tried to allocate 9 bytes")

    monkeypatch.setattr(type(load_vllm()), "make_batch", refuse)
    made = scenario([group()], engine=ENGINE)
    with pytest.raises(SetupError, match=r"4 requests cannot be made here \(can't allocate memory: you .*; lower"):
        prepare(made.engine, plan_of(made, 0), "mine.yaml", told="")


def test_a_scheduler_that_makes_no_step_any_more_is_said_to() -> None:
    """Nothing that ``prepare`` lets through does that; so it is not asked."""
    made = scenario([group(prompt=[{"tokens": 30}])], engine=ENGINE)
    stuck = Simulation(made.engine, 3, 64, plan_of(made, 0), "", None)
    with pytest.raises(CannotJudge, match="the scheduler makes no step although 1 request waits"):
        list(stuck.records())
