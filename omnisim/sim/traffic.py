"""From a scenario's traffic to requests: everything by chance is drawn here, from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from omnisim.sim.scenario import Amount, Arrivals, Distribution, Group, Scenario, Segment
from omnisim.workload import STOP, Image, WorkloadRequest, identity_of, pseudo_tokens

__all__ = ["PLACEHOLDER", "requests_of"]

PLACEHOLDER = 7
"""The token that stands for a piece of an image."""

TokenIds = NDArray[np.int32]
Piece = tuple[int, int]
"""Identity of its tokens, or the one token that all of them are, negated and less one; and how many."""


def requests_of(scenario: Scenario, seed: int) -> tuple[WorkloadRequest, ...]:
    """All requests of a scenario; the same seed gives the same ones."""
    requests: list[WorkloadRequest] = []
    for group in scenario.traffic:
        requests += _Drawing(group, seed).requests()
    return tuple(requests)


def _made(pieces: tuple[Piece, ...]) -> TokenIds:
    """Token ids of pieces, one after the other."""
    made = [
        np.full(num_tokens, -1 - identity, dtype=np.int32)
        if identity < 0
        else pseudo_tokens(identity, np.arange(num_tokens, dtype=np.uint64))
        for identity, num_tokens in pieces
    ]
    return np.concatenate(made) if made else np.zeros(0, dtype=np.int32)


class _Drawing:
    """Draws the requests of one group. Groups do not disturb each other's chance."""

    def __init__(self, group: Group, seed: int) -> None:
        self._group = group
        self._seed = seed
        self._chance = np.random.default_rng([seed, identity_of(group.name) % 2**32])

    def requests(self) -> Iterator[WorkloadRequest]:
        group = self._group
        for index, arrival in zip(range(group.count), self._times(group.arrivals), strict=False):
            yield from self._conversation(index, arrival)

    def _times(self, arrivals: Arrivals) -> Iterator[float]:
        now = arrivals.at
        for index in range(self._group.count):
            if arrivals.times is not None:
                yield arrivals.times[index % len(arrivals.times)]
                continue
            if arrivals.poisson is not None:
                now += float(self._chance.exponential(1 / arrivals.poisson))
            yield now
            now += arrivals.every or 0.0

    def _conversation(self, index: int, arrival: float) -> Iterator[WorkloadRequest]:
        """The turns of one conversation, or the n answers to one prompt."""
        group, name = self._group, f"{self._group.name}-{index}"
        pieces, images = self._prompt(index)
        num_turns = max(1, self._amount(group.turns))
        before: str | None = None
        for turn in range(num_turns):
            if turn:
                pieces += ((self._own(name, "turn", turn), max(1, self._amount(group.turn_tokens))),)
                arrival = float(self._amount(group.think))
            req_id = name if group.turns == 1 else f"{name}.{turn}"
            num_sampled = max(1, self._amount(group.output_tokens))
            for answer in range(group.n):
                child = req_id if group.n == 1 else f"{answer}_{req_id}"
                sampled = self._answer(child, num_sampled)
                yield self._request(child, index, pieces, images, sampled, arrival, before)
            pieces += sampled
            before = req_id

    def _answer(self, req_id: str, num_tokens: int) -> tuple[Piece, ...]:
        stop = int(self._group.stops)
        answer = (self._own(req_id, "answer"), num_tokens - stop)
        return (answer, (-1 - STOP, stop))

    def _request(
        self,
        req_id: str,
        index: int,
        pieces: tuple[Piece, ...],
        images: tuple[Image, ...],
        sampled: tuple[Piece, ...],
        arrival: float,
        after: str | None,
    ) -> WorkloadRequest:
        group, abort = self._group, self._group.abort
        leaves = abort is not None and self._chance.random() < abort.fraction
        return WorkloadRequest(
            req_id=req_id,
            num_prompt_tokens=sum(num_tokens for _, num_tokens in pieces),
            max_tokens=sum(num_tokens for _, num_tokens in sampled),
            prompt_token_ids=partial(_made, pieces),
            sampled_token_ids=partial(_made, sampled),
            arrival=arrival,
            after=after,
            priority=group.priority[index % len(group.priority)],
            images=images,
            adapter=group.adapters[index % len(group.adapters)] if group.adapters else None,
            salt=group.salts[index % len(group.salts)] if group.salts else None,
            abort_after_computed=self._patience(abort.after_computed_tokens) if abort and leaves else None,
            abort_after_sampled=self._patience(abort.after_output_tokens) if abort and leaves else None,
            resubmits=abort is not None and leaves and abort.resubmit,
            stops=group.stops,
        )

    def _patience(self, amount: Amount | None) -> int | None:
        return None if amount is None else self._amount(amount)

    def _prompt(self, index: int) -> tuple[tuple[Piece, ...], tuple[Image, ...]]:
        pieces: list[Piece] = []
        images: list[Image] = []
        position = 0
        for number, segment in enumerate(self._group.prompt):
            identity, num_tokens = self._segment(index, number, segment)
            if segment.image is not None:
                images.append(Image(position, num_tokens, _variant(segment.image, segment, index)))
            pieces.append((identity, num_tokens))
            position += num_tokens
        return tuple(pieces), tuple(images)

    def _segment(self, index: int, number: int, segment: Segment) -> Piece:
        if segment.share is None and segment.image is None:
            return self._own(f"{self._group.name}-{index}", "segment", number), self._amount(segment.tokens)
        kind, name = ("share", segment.share) if segment.share is not None else ("image", segment.image)
        assert name is not None
        variant = f"{kind} {_variant(name, segment, index)}"
        chance = np.random.default_rng(
            [self._seed, identity_of(variant) % 2**32]
        )  # it is whose turn it is, whoever asks
        num_tokens = _amount(segment.tokens, chance)
        if segment.image is not None:
            return -1 - PLACEHOLDER, max(1, num_tokens)  # without a placeholder vLLM would not see an image
        return identity_of(self._seed, variant), num_tokens

    def _own(self, *names: object) -> int:
        return identity_of(self._seed, "own", *names)

    def _amount(self, amount: Amount) -> int:
        return _amount(amount, self._chance)


def _amount(amount: Amount, chance: np.random.Generator) -> int:
    if isinstance(amount, int):
        return amount
    return round(min(max(_draw(amount, chance), amount.min), amount.max))


def _draw(wanted: Distribution, chance: np.random.Generator) -> float:
    if wanted.uniform is not None:
        return float(chance.integers(wanted.uniform[0], wanted.uniform[1], endpoint=True))
    if wanted.normal is not None:
        mean, deviation = wanted.normal
        return float(chance.normal(mean, deviation))
    if wanted.lognormal is not None:
        median, sigma = wanted.lognormal
        return float(chance.lognormal(np.log(median), sigma))
    if wanted.pareto is not None:
        least, alpha = wanted.pareto
        return float(least * (1 + chance.pareto(alpha)))
    assert wanted.choice is not None
    return float(chance.choice(wanted.choice))


def _variant(name: str, segment: Segment, index: int) -> str:
    return name if segment.branches == 1 else f"{name}.{index % segment.branches}"
