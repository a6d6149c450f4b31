"""Names of made-up tokens: what has one name has the same tokens in every request, and nothing else has."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from omnisim.workload import TokenIds, pseudo_tokens

__all__ = ["Kind", "identities", "own_tokens"]


class Kind(IntEnum):
    """What a token is part of."""

    BLOCK = 1
    PROMPT = 2
    OUTPUT = 3
    TEXT = 4


_KINDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its first 2**13 multiples lie at least 2**49 apart (Knuth, TAOCP 6.4)."""


def identities(kind: Kind, numbers: NDArray[np.int64], length: int = 0) -> NDArray[np.uint64]:
    """A name for each of ``numbers``; no two are alike while numbers are below 2**49 and lengths below 1,000."""
    offset = _GOLDEN * (kind + _KINDS * length) % 2**64
    return numbers.astype(np.uint64) + np.uint64(offset)


def own_tokens(kind: Kind, number: int, start: int, stop: int) -> TokenIds:
    """Tokens ``[start, stop)`` of something that the row ``number`` shares with no other."""
    name = identities(kind, np.array([number], dtype=np.int64))
    return pseudo_tokens(name, np.arange(start, stop, dtype=np.uint64))
