"""From a scenario's traffic to requests: everything by chance is drawn here, from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from omnisim.sim.scenario import Amount, Arrivals, Distribution, Group, Scenario, Segment
from omnisim.workload import Image, WorkloadRequest, identity_of, pseudo_tokens

__all__ = ["PLACEHOLDER", "requests_of"]

PLACEHOLDER = 7
"""The token that stands for a piece of an image."""

TokenIds = NDArray[np.int32]
Piece = tuple[int | None, int]
"""Identity of its tokens (None: placeholders) and how many."""


def requests_of(scenario: Scenario, seed: int) -> tuple[WorkloadRequest, ...]:
    """All requests of a scenario; the same seed gives the same ones."""
    shared: dict[str, int] = {}
    requests: list[WorkloadRequest] = []
    for group in scenario.traffic:
        requests += _Drawing(group, seed, shared).requests()
    return tuple(requests)


def _made(pieces: tuple[Piece, ...]) -> TokenIds:
    """Token ids of pieces, one after the other."""
    made = [
        np.full(num_tokens, PLACEHOLDER, dtype=np.int32)
        if identity is None
        else pseudo_tokens(identity, np.arange(num_tokens, dtype=np.uint64))
        for identity, num_tokens in pieces
    ]
    return np.concatenate(made) if made else np.zeros(0, dtype=np.int32)


class _Drawing:
    """Draws the requests of one group. Groups do not disturb each other's chance."""

    def __init__(self, group: Group, seed: int, shared: dict[str, int]) -> None:
        self._group = group
        self._seed = seed
        self._shared = shared
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
                sampled: Piece = (self._own(child, "answer"), num_sampled)
                yield from self._request(child, index, pieces, images, sampled, arrival, before)
            pieces += (sampled,)
            before = req_id

    def _request(
        self,
        req_id: str,
        index: int,
        pieces: tuple[Piece, ...],
        images: tuple[Image, ...],
        sampled: Piece,
        arrival: float,
        after: str | None,
    ) -> Iterator[WorkloadRequest]:
        group = self._group
        num_prompt_tokens = sum(num_tokens for _, num_tokens in pieces)
        abort = group.abort
        leaves = abort is not None and self._chance.random() < abort.fraction
        made = partial(
            WorkloadRequest,
            req_id=req_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=sampled[1],
            prompt_token_ids=partial(_made, pieces),
            sampled_token_ids=partial(_made, (sampled,)),
            priority=group.priority[index % len(group.priority)],
            images=images,
            adapter=group.adapters[index % len(group.adapters)] if group.adapters else None,
            salt=group.salts[index % len(group.salts)] if group.salts else None,
            stops=group.stops,
        )
        yield made(arrival=arrival, after=after, abort_after=self._patience(num_prompt_tokens) if leaves else None)
        if abort is not None and leaves and abort.resubmit:
            yield made(arrival=0.0, after=req_id)

    def _patience(self, num_prompt_tokens: int) -> int:
        """How many tokens are computed when the client leaves; the last sampled one is not computed yet."""
        abort = self._group.abort
        assert abort is not None
        if abort.after_computed_tokens is not None:
            return self._amount(abort.after_computed_tokens)
        assert abort.after_output_tokens is not None
        return num_prompt_tokens + max(0, self._amount(abort.after_output_tokens) - 1)

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
        if variant not in self._shared:
            self._shared[variant] = self._amount(segment.tokens)
        identity = None if segment.image is not None else identity_of(self._seed, variant)
        return identity, self._shared[variant]

    def _own(self, *names: object) -> int:
        return identity_of(self._seed, "own", *names)

    def _amount(self, amount: Amount) -> int:
        if isinstance(amount, int):
            return amount
        return min(max(round(self._draw(amount)), amount.min), amount.max)

    def _draw(self, wanted: Distribution) -> float:
        chance = self._chance
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
            return min(float(least * (1 + chance.pareto(alpha))), 2.0**62)
        assert wanted.choice is not None
        return float(chance.choice(wanted.choice))


def _variant(name: str, segment: Segment, index: int) -> str:
    return name if segment.branches == 1 else f"{name}.{index % segment.branches}"
