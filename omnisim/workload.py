"""Requests as they come to an engine: what a scenario makes, and what an importer reads out of somebody's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["STOP", "VOCABULARY", "Image", "Ledger", "Workload", "WorkloadRequest", "identity_of", "pseudo_tokens"]

VOCABULARY = 32_000
"""Pseudo-tokens are less than this."""
STOP = VOCABULARY
"""The token that stops a request of which nobody knows how long it will be."""

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Image:
    """A multimodal item whose placeholders are the positions ``[position, position + num_tokens)`` of a prompt."""

    position: int
    num_tokens: int
    identifier: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkloadRequest:
    """One request. Token ids are made when they are asked for, so that a day of traffic need not lie in memory.

    ``prompt_token_ids`` gives int32 ``[num_prompt_tokens]``, ``sampled_token_ids`` what the model answers, int32
    ``[max_tokens]``: the request ends after so many. ``arrival`` is a time, in the units of the workload or, where
    ``after`` names another request, since that one ended. ``abort_after_computed`` and ``abort_after_sampled``: aborted
    before the first step that finds so many of its tokens computed, or sampled; if it ``resubmits``, the same comes
    again at once under the same id, and then has patience. ``stops``: its last token is one that stops it, and the
    engine does not know before that it will.
    """

    req_id: str
    num_prompt_tokens: int
    max_tokens: int
    prompt_token_ids: Callable[[], TokenIds]
    sampled_token_ids: Callable[[], TokenIds]
    arrival: float = 0.0
    after: str | None = None
    priority: int = 0
    images: tuple[Image, ...] = ()
    adapter: str | None = None
    salt: str | None = None
    abort_after_computed: int | None = None
    abort_after_sampled: int | None = None
    resubmits: bool = False
    stops: bool = False

    @property
    def num_tokens(self) -> int:
        """The most that it can come to."""
        return self.num_prompt_tokens + self.max_tokens


@dataclass(slots=True)
class Ledger:
    """What became of the rows of a file: ``rows`` were read, and each was kept or dropped for a reason."""

    rows: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def keep(self) -> None:
        """A row became a request."""
        self.rows += 1
        self.kept += 1

    def drop(self, reason: str) -> None:
        """A row did not."""
        self.rows += 1
        self.dropped[reason] += 1


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order of their file. ``notes`` are sentences on what was made up for want of a fact."""

    requests: tuple[WorkloadRequest, ...]
    ledger: Ledger
    notes: tuple[str, ...] = ()


def identity_of(*names: object) -> int:
    """A 64-bit number for what these names (numbers, texts) say, as ``pseudo_tokens`` takes it."""
    return int.from_bytes(blake2b(repr(names).encode(), digest_size=8).digest(), "little")


def pseudo_tokens(identity: int | NDArray[np.uint64], position: NDArray[np.uint64]) -> TokenIds:
    """Made-up token ids, a pure function of an identity and a position in it; the two are broadcast.

    The mixing is the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), twice.
    """
    mixed = _mix(_mix(np.asarray(identity, dtype=np.uint64)) + np.asarray(position, dtype=np.uint64))
    return (mixed % np.uint64(VOCABULARY)).astype(np.int32)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
