"""Names of rows: a uint64 that stands for the content of one row, whatever key it is of.

The *content* name of a position is a chained hash of the token ids (and content tags) up to it, so that equal prefixes
have equal names. The *provenance* name of a row is drawn when it is computed. No name is 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnisim.trace.model import NewRequest, Step

__all__ = ["ContentNames", "NameArray", "Names", "ProvenanceNames", "mix", "unmix"]

NameArray = NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHAIN = 0xD1342543DE82EF95  # an odd multiplier for 64-bit congruential chains (Steele and Vigna, 2021)

# The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): multipliers, and their inverses modulo 2**64.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNMIX_1, _UNMIX_2 = np.uint64(pow(int(_MIX_1), -1, 2**64)), np.uint64(pow(int(_MIX_2), -1, 2**64))
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(words: NameArray) -> NameArray:
    """A bijection of uint64 in which every bit of the result depends on every bit of the argument."""
    words = (words ^ (words >> _30)) * _MIX_1
    words = (words ^ (words >> _27)) * _MIX_2
    mixed: NameArray = words ^ (words >> _31)
    return mixed


def unmix(words: NameArray) -> NameArray:
    """The inverse of ``mix``."""
    words = words ^ (words >> _31) ^ (words >> np.uint64(62))
    words = words * _UNMIX_2
    words = words ^ (words >> _27) ^ (words >> np.uint64(54))
    words = words * _UNMIX_1
    unmixed: NameArray = words ^ (words >> _30) ^ (words >> np.uint64(60))
    return unmixed


class Names(Protocol):
    """Follows a trace and names its rows."""

    def advance(self, step: Step) -> NameArray:
        """Names of the rows that ``step`` computes, in batch order; steps come in order, each once."""

    def of(self, req_id: str) -> NameArray:
        """Names of the positions of a request that are known."""


class _Chain:
    """The chained hash of one request: its state after each position."""

    __slots__ = ("_tags", "states")

    def __init__(self, new: NewRequest) -> None:
        self.states = array("Q")
        self._tags = new.content
        self.extend(new.prompt_token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        states, tags = self.states, self._tags
        state = states[-1] if states else _GOLDEN
        for token_id in token_ids:
            if tags and (tag := tags.get(len(states))) is not None:
                state = _link(state, int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "little"))
            state = ((state ^ token_id) * _CHAIN + _GOLDEN) & _MASK  # _link, without a call for every token
            state ^= state >> 32
            states.append(state)


def _link(state: int, number: int) -> int:
    state = ((state ^ number) * _CHAIN + _GOLDEN) & _MASK
    return state ^ (state >> 32)


class ContentNames:
    """Names by content: token ids must be known for every position that is computed."""

    def __init__(self) -> None:
        self._chains: dict[str, _Chain] = {}

    def advance(self, step: Step) -> NameArray:
        chains = self._chains
        for req_id in step.finished_req_ids:
            chains.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            chains[new.req_id] = _Chain(new)
        states_T = array("Q")
        for req_id, computed, scheduled, told in zip(
            step.req_ids, step.num_computed_tokens, step.num_scheduled_tokens, step.new_token_ids, strict=True
        ):
            chain, stop = chains[req_id], computed + scheduled
            if told:
                if len(chain.states) + len(told) != stop:
                    del chain.states[stop - len(told) :]  # drafts that were rejected are forgotten
                chain.extend(told)
            states_T += chain.states[computed:stop]
        return _finished(states_T)

    def of(self, req_id: str) -> NameArray:
        chain = self._chains.get(req_id)
        return _finished(array("Q") if chain is None else chain.states)


def _finished(states: array[int]) -> NameArray:
    names = mix(np.frombuffer(states, dtype=np.uint64))
    names[names == 0] = 1
    return names


class ProvenanceNames:
    """Names by birth: each computed row has a name of its own, which says nothing of its content.

    ``of`` has 0 where the request did not compute the position itself.
    """

    def __init__(self) -> None:
        self._drawn = 0
        self._own: dict[str, array[int]] = {}

    def advance(self, step: Step) -> NameArray:
        for req_id in (*step.finished_req_ids, *(new.req_id for new in step.scheduled_new_reqs)):
            self._own.pop(req_id, None)
        first, self._drawn = self._drawn, self._drawn + step.num_tokens
        names_T = _finished(array("Q", range(first, self._drawn)))
        drawn, starts = array("Q", names_T.tobytes()), step.query_start_loc
        for row, (req_id, computed) in enumerate(zip(step.req_ids, step.num_computed_tokens, strict=True)):
            own = self._own.setdefault(req_id, array("Q"))
            if computed > len(own):
                own.frombytes(bytes(own.itemsize * (computed - len(own))))
            own[computed : computed + starts[row + 1] - starts[row]] = drawn[starts[row] : starts[row + 1]]
        return names_T

    def of(self, req_id: str) -> NameArray:
        return np.array(self._own.get(req_id, array("Q")), dtype=np.uint64)
