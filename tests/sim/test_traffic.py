"""What a scenario's traffic is turned into: prefix trees, turns, arrivals, lengths; by chance, and repeatable."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from omnisim.sim.scenario import Distribution, Scenario
from omnisim.sim.traffic import PLACEHOLDER, requests_of
from omnisim.workload import STOP, VOCABULARY, WorkloadRequest, pseudo_tokens


def requests(*groups: dict[str, Any], seed: int = 0) -> dict[str, WorkloadRequest]:
    raw = {"format": "omnisim-scenario/1", "name": "test", "summary": "", "traffic": list(groups)}
    return {request.req_id: request for request in requests_of(msgspec.convert(raw, Scenario), seed)}


def group(**fields: Any) -> dict[str, Any]:
    return {"name": "g", "prompt": [{"tokens": 8}], **fields}


def prompt(request: WorkloadRequest, most: int = VOCABULARY - 1) -> list[int]:
    ids = request.prompt_token_ids()
    assert (ids.dtype, len(ids)) == (np.int32, request.num_prompt_tokens)
    assert ids.min() >= 0
    assert ids.max() <= most
    return ids.tolist()


def answer(request: WorkloadRequest) -> list[int]:
    ids = request.sampled_token_ids().tolist()
    assert len(ids) == request.max_tokens
    return ids


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_shared_segments_are_alike_and_own_ones_are_not() -> None:
    made = requests(group(count=2, prompt=[{"share": "s", "tokens": 20}, {"tokens": 20}]))
    assert common(prompt(made["g-0"]), prompt(made["g-1"])) == 20


def test_what_is_shared_is_shared_between_groups_and_its_length_is_drawn_once() -> None:
    shared = {"share": "s", "tokens": {"uniform": [5, 500]}}
    made = requests(group(count=5, prompt=[shared]), group(name="h", prompt=[shared, {"tokens": 1}]))
    assert len({tuple(prompt(made[f"g-{index}"])) for index in range(5)}) == 1
    assert prompt(made["h-0"])[:-1] == prompt(made["g-0"])


def test_branches_make_a_tree() -> None:
    tree = [{"share": "root", "tokens": 10}, {"share": "branch", "tokens": 10, "branches": 3}, {"tokens": 10}]
    made = [prompt(request) for request in requests(group(count=6, prompt=tree)).values()]
    for one in range(6):
        for other in range(one):
            assert common(made[one], made[other]) == (20 if one % 3 == other % 3 else 10)


def test_a_turn_is_all_before_it_its_answer_and_more() -> None:
    made = requests(group(count=2, turns=3, turn_tokens=7, output_tokens=5, think=4))
    for index in range(2):
        first, second, third = (made[f"g-{index}.{turn}"] for turn in range(3))
        assert (first.after, second.after, third.after) == (None, first.req_id, second.req_id)
        assert (second.arrival, second.num_prompt_tokens, third.num_prompt_tokens) == (4.0, 20, 32)
        assert prompt(second)[:13] == prompt(first) + answer(first)
        assert prompt(third)[:25] == prompt(second) + answer(second)
    assert common(prompt(made["g-0.2"]), prompt(made["g-1.2"])) == 0


def test_images_have_like_tokens_and_names_of_their_own() -> None:
    made = requests(group(count=4, prompt=[{"tokens": 3}, {"image": "cat", "tokens": 6, "branches": 2}, {"tokens": 1}]))
    for index in range(4):
        request = made[f"g-{index}"]
        assert prompt(request)[3:9] == [PLACEHOLDER] * 6
        (image,) = request.images
        assert (image.position, image.num_tokens, image.identifier) == (3, 6, f"cat.{index % 2}")


def test_n_answers_to_one_prompt_are_called_as_vllm_calls_them() -> None:
    made = requests(group(n=3, output_tokens=4))
    assert list(made) == ["0_g-0", "1_g-0", "2_g-0"]
    assert len({tuple(prompt(request)) for request in made.values()}) == 1
    assert len({tuple(answer(request)) for request in made.values()}) == 3


def test_priorities_adapters_and_salts_are_taken_in_turn() -> None:
    made = list(requests(group(count=4, priority=[3, 1], adapters=["a"], salts=["x", "y", "z"])).values())
    assert [request.priority for request in made] == [3, 1, 3, 1]
    assert [request.adapter for request in made] == ["a"] * 4
    assert [request.salt for request in made] == ["x", "y", "z", "x"]


@pytest.mark.parametrize(
    ("arrivals", "times"),
    [
        ({}, [0, 0, 0, 0]),
        ({"at": 3}, [3, 3, 3, 3]),
        ({"every": 2}, [0, 2, 4, 6]),
        ({"at": 1, "every": 0.5}, [1, 1.5, 2, 2.5]),
        ({"times": [5, 1]}, [5, 1, 5, 1]),
    ],
)
def test_arrivals(arrivals: dict[str, Any], times: list[float]) -> None:
    made = requests(group(count=4, arrivals=arrivals))
    assert [request.arrival for request in made.values()] == times


def test_poisson_arrivals_come_at_their_rate() -> None:
    made = requests(group(count=4000, prompt=[{"tokens": 1}], arrivals={"poisson": 5, "at": 100}))
    times = np.array([request.arrival for request in made.values()])
    gaps = np.diff(times, prepend=100)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.1)


@pytest.mark.parametrize(
    ("drawn", "low", "high", "median"),
    [
        ({"uniform": [10, 20]}, 10, 20, 15),
        ({"normal": [50, 5]}, 20, 80, 50),
        ({"lognormal": [40, 0.5]}, 1, 1000, 40),
        ({"pareto": [10, 1.5], "max": 500}, 10, 500, 15.9),
        ({"choice": [7, 7, 7]}, 7, 7, 7),
        ({"normal": [0, 30], "min": 4, "max": 9}, 4, 9, 4),
    ],
)
def test_lengths_are_drawn_as_they_are_told(drawn: dict[str, Any], low: int, high: int, median: float) -> None:
    made = requests(group(count=3000, prompt=[{"tokens": drawn}]))
    lengths = np.array([request.num_prompt_tokens for request in made.values()])
    assert lengths.min() >= low
    assert lengths.max() <= high
    assert float(np.median(lengths)) == pytest.approx(median, rel=0.1)
    if "uniform" in drawn:
        assert set(lengths) == set(range(10, 21))


def test_both_ends_of_min_and_max_are_kept() -> None:
    made = requests(group(count=500, prompt=[{"tokens": {"normal": [5, 9], "min": 3, "max": 7}}]))
    assert {request.num_prompt_tokens for request in made.values()} == {3, 4, 5, 6, 7}


def test_an_answer_that_stops_ends_in_the_token_that_stops_it_in_the_next_turn_too() -> None:
    made = requests(group(turns=2, output_tokens=4, stops=True))
    assert answer(made["g-0.0"])[-1] == STOP
    assert STOP not in answer(made["g-0.0"])[:-1]
    assert prompt(made["g-0.1"], STOP)[8:12] == answer(made["g-0.0"])
    assert answer(requests(group(output_tokens=1, stops=True))["g-0"]) == [STOP]


@pytest.mark.parametrize(
    "drawn", [{"lognormal": [1, 1000]}, {"normal": [1e308, 1e308]}, {"pareto": [1, 1e-3]}, {"uniform": [0, 2**31 - 1]}]
)
def test_a_length_beyond_all_bounds_is_the_most_that_may_be(drawn: dict[str, Any]) -> None:
    made = requests(group(count=50, prompt=[{"tokens": 1}], output_tokens=drawn | {"max": 9}))
    assert max(request.max_tokens for request in made.values()) == 9


def test_an_image_is_a_token_at_least_or_vllm_would_not_see_it() -> None:
    made = requests(group(count=20, prompt=[{"image": "i", "tokens": {"choice": [0, 3], "min": 0}, "branches": 20}]))
    assert {request.images[0].num_tokens for request in made.values()} == {1, 3}


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({}, "a distribution is one of uniform, normal, lognormal, pareto, choice"),
        ({"uniform": (1, 2), "choice": (1,)}, "a distribution is one of uniform"),
        ({"uniform": (0, 2**80)}, "uniform takes numbers from 0 to 2147483647"),
        ({"uniform": (-1, 5)}, "uniform takes numbers from 0 to 2147483647"),
        ({"uniform": (2, 1)}, "uniform takes two numbers, \\[least, most\\]"),
        ({"normal": (2,)}, "normal takes two numbers, \\[mean, deviation\\]"),
        ({"lognormal": (0, 1)}, "lognormal takes two positive numbers, \\[median, sigma\\]"),
        ({"choice": ()}, "choice needs something to choose from"),
        ({"choice": (1,), "min": 5, "max": 4}, "min 5 is more than max 4"),
    ],
)
def test_a_distribution_that_is_none_is_refused(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Distribution(**raw)


def test_an_abort_is_at_so_many_tokens_for_so_many_of_the_requests() -> None:
    made = requests(group(count=1000, abort={"after_computed_tokens": 5, "fraction": 0.3}))
    assert sum(request.abort_after_computed == 5 for request in made.values()) == pytest.approx(300, abs=50)
    assert {request.abort_after_computed for request in made.values()} == {5, None}
    assert {request.abort_after_sampled for request in made.values()} == {None}
    (late,) = requests(group(abort={"after_output_tokens": 3, "resubmit": True})).values()
    assert (late.abort_after_computed, late.abort_after_sampled, late.resubmits) == (None, 3, True)


def test_groups_do_not_disturb_each_others_chance() -> None:
    shared = {"share": "s", "tokens": {"uniform": [1, 900]}}
    drawn = group(count=5, prompt=[shared, {"tokens": {"uniform": [1, 900]}}])
    alone, together = requests(drawn), requests(group(name="other", count=3, prompt=[shared]), drawn)
    for name, request in alone.items():
        assert prompt(request) == prompt(together[name])


def test_the_seed_is_what_chance_depends_on() -> None:
    drawn = group(count=5, prompt=[{"share": "s", "tokens": 30}, {"tokens": {"uniform": [1, 900]}}])
    prompts = [[prompt(request) for request in requests(drawn, seed=seed).values()] for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1]
    assert common(prompts[0][0], prompts[2][0]) == 0


def test_pseudo_tokens_are_spread_over_the_vocabulary_and_never_change() -> None:
    """The numbers are pinned: a trace that was simulated once is to be made again by any later omnisim."""
    made = pseudo_tokens(1, np.arange(8, dtype=np.uint64))
    assert made.tolist() == PINNED
    many = pseudo_tokens(2**63 + 5, np.arange(100_000, dtype=np.uint64))
    counts = np.bincount(many // 1000, minlength=VOCABULARY // 1000)
    assert counts.min() > 0.9 * counts.mean()
    assert len({tuple(pseudo_tokens(i, np.arange(16, dtype=np.uint64)).tolist()) for i in range(2000)}) == 2000


PINNED = [16158, 6915, 5227, 15575, 14435, 31666, 24818, 6924]
